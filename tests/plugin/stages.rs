//! A peer that is killed, or stopped and continued, at every stage of a connection's life; the stages are those built into the code
//! (`src/base/stage.rs`), and a test fails if its stage was not reached.
//!
//! Rank 0 receives, rank 1 sends, rank 2 is a second sender for later: whatever became of rank 1, rank 0's listener must serve it.
//! Needs the feature `stages`.
use crate::support;
use railhead::base::config::Config;
use railhead::base::stage::Stage;
use railhead::base::stats::WaitCause;
use railhead::net::{Mode, Net, RecvBuffer};
use support::comms::{self, Mem};
use support::holdings::waits;
use support::plugin::{Opaque, Plugin, Result, take_log};
use support::squatter::Squatter;
use support::{Ctx, PATIENCE, Ranks, Role, World, pattern, until};

pub const ROLES: &[(&str, Role)] = &[("scenario", scenario), ("keeps_its_memory", keeps_its_memory)];

/// Small, ring-sized, and large enough to move in parts. Repeated, so that there is always something left after the first.
const SIZES: [usize; 6] = [64, 9000, 8 << 20, 1, 8 << 20, 100];

/// Receives everything from a comm and says how it went.
fn receive(plugin: &Plugin, comm: Opaque) -> Result<()> {
    for (i, len) in SIZES.into_iter().enumerate() {
        let bytes = comms::recv(plugin, comm, len)?;
        assert!(bytes == pattern(i as u64, len), "message {i} of {len} bytes is not what was sent");
    }
    plugin.close_recv(comm)
}

fn send(plugin: &Plugin, comm: Opaque) -> Result<()> {
    for (i, len) in SIZES.into_iter().enumerate() {
        comms::send(plugin, comm, &pattern(i as u64, len))?;
    }
    plugin.close_send(comm)
}

/// What the test hears: "done", or the error and what the log said about it.
fn verdict(result: Result<()>) -> String {
    match result {
        Ok(()) => "done".into(),
        Err(e) => format!("error {e}: {}", take_log().pop().map_or("nothing logged".into(), |l| l.1)),
    }
}

fn scenario(ctx: &Ctx) {
    if ctx.rank == 0 && std::env::var("RHT_FLUSH").is_ok() {
        return flushing_receiver(ctx);
    }
    let plugin = Plugin::start(12);
    if ctx.rank > 0 {
        // The second sender comes when it is told to; if nobody gave a handle, the receiver died first.
        if ctx.rank == 2 && ctx.parent.text() != "come" {
            return;
        }
        let Ok(handle) = ctx.to(0).recv_within(PATIENCE) else { return ctx.say("no handle") };
        let mut handle = handle.try_into().expect("a handle");
        ctx.say(&verdict(comms::connect(&plugin, 0, &mut handle).and_then(|comm| send(&plugin, comm))));
        return;
    }
    let (handle, listen) = plugin.listen(0).expect("listen");
    // Whoever was killed meanwhile does not get it.
    (1..ctx.size).for_each(|rank| drop(ctx.to(rank).send(&handle)));
    loop {
        let comm = until("a comm or the end", || {
            if ctx.parent.ready() {
                return Some(None);
            }
            plugin.accept(listen).transpose().map(Some)
        });
        match comm {
            Some(comm) => ctx.say(&verdict(comm.and_then(|comm| receive(&plugin, comm)))),
            None => return assert_eq!(ctx.parent.text(), "end"),
        }
    }
}

/// The receiver through the Rust interface, as only device memory is flushed and the soft fabric has none to offer over the C one.
fn flushing_receiver(ctx: &Ctx) {
    let net = Net::open().expect("open");
    let (mut listen, handle) = net.listen(0).expect("listen");
    let mut full = [0; 128];
    full[..handle.len()].copy_from_slice(&handle);
    (1..ctx.size).for_each(|rank| ctx.to(rank).send(&full).expect("a sender"));
    let mut comm = until("accept", || listen.accept(Mode::NonBlocking).expect("accept"));
    let mem = Mem::new(8 << 20);
    // SAFETY: the memory outlives its registration.
    let memory = unsafe { railhead::fabric::UserMemory::new(mem.ptr(0), mem.len()) };
    let mr = net.register_as_device(0, memory).expect("register");
    for (i, len) in SIZES.into_iter().enumerate() {
        let buf = [RecvBuffer { addr: mem.ptr(0) as usize, len, tag: 7, mr }];
        let request = until("irecv", || comm.irecv(&buf).expect("irecv"));
        until("a message", || comm.test(request).expect("test"));
        let flush = until("iflush", || comm.iflush(&buf).expect("iflush"));
        until("a flush", || comm.test(flush).expect("test"));
        assert!(mem.read(0, len) == pattern(i as u64, len));
    }
    drop(comm);
    net.deregister(0, mr).expect("deregister");
    ctx.say("done");
    while ctx.parent.text() != "end" {}
}

#[derive(Clone, Copy, PartialEq)]
enum Wire {
    Shm,
    Tcp,
}

/// Which ranks reach a stage.
fn ranks_of(stage: Stage) -> &'static [usize] {
    match stage {
        Stage::ListenOpen | Stage::AcceptAccepted | Stage::AcceptH1Received | Stage::AcceptH2Sent | Stage::AcceptH3Received => &[0],
        Stage::RecvPosted | Stage::RecvHalf | Stage::RecvDone | Stage::Flush => &[0],
        Stage::ConnectDialed | Stage::ConnectH1Sent | Stage::ConnectH2Received | Stage::ConnectH3Sent => &[1],
        Stage::SendPosted | Stage::SendHalf | Stage::SendShared | Stage::SendDone => &[1],
        Stage::WireDialed | Stage::WireHelloReady | Stage::WireHelloSent | Stage::WireUp | Stage::Closing => &[0, 1],
        // No comm gets there.
        Stage::TensorRequest | Stage::TensorBufferRequest | Stage::TensorBufferResponse | Stage::TensorBufferIdle => &[],
        Stage::TensorMetaDataUpdate | Stage::TensorReRequest | Stage::TensorWithdraw | Stage::TensorWithdrawn => &[],
        Stage::TensorWrite | Stage::TensorErrorStatus | Stage::TensorAck => &[],
    }
}

/// Only one side of a wire dials, and chance decides which; nor has the sender any part in a copy that the receiver was quick enough to make alone.
fn by_chance(stage: Stage) -> bool {
    matches!(stage, Stage::WireDialed | Stage::WireHelloReady | Stage::WireHelloSent | Stage::SendShared)
}

/// Starts the ranks and waits until the victim has reached its stage.
fn reach(stage: Stage, victim: usize, wire: Wire, action: &str, timeout: &str) -> Ranks {
    for _ in 0..40 {
        let mut world = World::new("scenario", 3)
            .env("RAILHEAD_SOFT_WIRE", if wire == Wire::Tcp { "tcp" } else { "shm" })
            .env("RAILHEAD_PEER_TIMEOUT_S", timeout)
            .env_of(victim, "RH_STAGE", &format!("{}={action}", stage.name()));
        if stage == Stage::Flush {
            world = world.env("RHT_FLUSH", "1");
        }
        // On shared memory only the bounce ring has the sender move anything itself; on TCP a large buffer may take everything at once.
        if stage == Stage::SendHalf {
            world = world.env("RAILHEAD_CMA", "0").env("RAILHEAD_TCP_BUFFER_KIB", "64");
        }
        let mut ranks = world.spawn();
        let proof = if by_chance(stage) {
            // Reached, or everything is over without.
            until("the stage or the end", || {
                let r = &ranks.ranks[victim];
                if r.stage.ready() { Some(r.stage.recv_within(PATIENCE).ok()) } else { ranks.ranks[1].chan.ready().then_some(None) }
            })
        } else {
            Some(ranks.ranks[victim].stage.recv_within(PATIENCE).unwrap_or_else(|e| panic!("{} was not reached: {e}", stage.name())))
        };
        match proof {
            Some(proof) => {
                assert_eq!(String::from_utf8_lossy(&proof), format!("{}\n", stage.name()));
                return ranks;
            }
            None => {
                ranks.hear(1);
            }
        }
    }
    panic!("{} was not reached in 40 attempts", stage.name());
}

/// The other rank's word on a dead peer.
#[track_caller]
fn clear_error(word: &str) {
    assert!(word.starts_with("error 6: "), "{word}");
    assert!(!word.ends_with("nothing logged"), "{word}");
}

fn kill(stage: Stage, wire: Wire) {
    for &victim in ranks_of(stage) {
        let mut ranks = reach(stage, victim, wire, "kill", "0");
        assert!(!ranks.ranks[victim].wait().success());
        if victim == 0 {
            let word = ranks.hear(1);
            match stage {
                Stage::ListenOpen => assert_eq!(word, "no handle"),
                // It had everything when it began to close, and may or may not have said so to the sender.
                Stage::Closing if word == "done" => {}
                _ => clear_error(&word),
            }
            continue;
        }
        // A connector that dies before it has shown the secret is a stranger, of whom nobody need hear.
        match stage {
            Stage::ConnectDialed => {}
            Stage::Closing => assert_eq!(ranks.hear(0), "done"),
            _ => clear_error(&ranks.hear(0)),
        }
        ranks.tell(2, "come");
        assert_eq!((ranks.hear(0).as_str(), ranks.hear(2).as_str()), ("done", "done"), "the listener serves the next peer");
        ranks.tell(0, "end");
        assert!(ranks.ranks[0].wait().success());
    }
}

fn stop(stage: Stage, wire: Wire) {
    for &victim in ranks_of(stage) {
        let mut ranks = reach(stage, victim, wire, "stop", "0");
        until("the stop", || (ranks.ranks[victim].state() == 'T').then_some(()));
        let other = 1 - victim;
        // Where the other one needs the stopped one it says so on its stats page; at the ends of the story it may not need it any more.
        if !matches!(stage, Stage::ListenOpen | Stage::Closing | Stage::SendDone | Stage::RecvDone | Stage::Flush) {
            let pid = ranks.ranks[other].pid();
            let word = until("a wait on the stats page", || {
                let found = waits(pid);
                assert!(!ranks.ranks[other].chan.ready(), "rank {other} has not waited: {}", ranks.hear(other));
                found.iter().copied().find(|w| expected(stage).contains(w))
            });
            println!("{}: rank {other} waits for {word:?}", stage.name());
        }
        ranks.ranks[victim].signal(libc::SIGCONT);
        assert_eq!((ranks.hear(0).as_str(), ranks.hear(1).as_str()), ("done", "done"));
        ranks.tell(0, "end");
        ranks.tell(2, "end");
        ranks.finish();
    }
}

/// What the stats page may call the wait for a peer that is stopped there.
fn expected(stage: Stage) -> &'static [WaitCause] {
    match stage {
        Stage::ConnectDialed | Stage::ConnectH1Sent | Stage::ConnectH2Received => &[WaitCause::Handshake],
        Stage::AcceptAccepted | Stage::AcceptH1Received => &[WaitCause::Handshake],
        // Here the other end may have its comm already, or not yet.
        Stage::ConnectH3Sent | Stage::AcceptH2Sent | Stage::AcceptH3Received => &[WaitCause::Handshake, WaitCause::PeerStopped],
        Stage::WireDialed | Stage::WireHelloReady | Stage::WireHelloSent | Stage::WireUp => &[WaitCause::Handshake, WaitCause::PeerStopped],
        // A comm knows its peer's process on one host, and looks.
        _ => &[WaitCause::PeerStopped],
    }
}

/// With RAILHEAD_PEER_TIMEOUT_S a peer that is stopped in the middle of things becomes an error.
fn time_out(stage: Stage, wire: Wire) {
    for &victim in ranks_of(stage) {
        let mut ranks = reach(stage, victim, wire, "stop", "1");
        let word = ranks.hear(1 - victim);
        assert!(word.starts_with("error 6: ") && word.contains("RAILHEAD_PEER_TIMEOUT_S"), "{word}");
        ranks.ranks[victim].signal(libc::SIGCONT);
        // It notices that it was given up.
        let word = ranks.hear(victim);
        assert!(word.starts_with("error") || word == "done", "{word}");
    }
}

macro_rules! tests {
    ($($name:ident = $stage:ident),*; on shared memory alone: $($own:ident = $own_stage:ident),*) => {
        mod killed_on_shared_memory {
            $(#[test] fn $name() { super::kill(super::Stage::$stage, super::Wire::Shm) })*
            $(#[test] fn $own() { super::kill(super::Stage::$own_stage, super::Wire::Shm) })*
        }
        mod killed_on_tcp { $(#[test] fn $name() { super::kill(super::Stage::$stage, super::Wire::Tcp) })* }
        mod stopped_on_shared_memory {
            $(#[test] fn $name() { super::stop(super::Stage::$stage, super::Wire::Shm) })*
            $(#[test] fn $own() { super::stop(super::Stage::$own_stage, super::Wire::Shm) })*
        }
        mod stopped_on_tcp { $(#[test] fn $name() { super::stop(super::Stage::$stage, super::Wire::Tcp) })* }

        /// A stage that is added to the code must be added here.
        #[test]
        fn every_stage_has_its_tests() {
            let mut tested = [$(stringify!($name),)* $(stringify!($own)),*];
            // Those of tensors: tests/library/tensor_faults.rs.
            let mut all: Vec<&str> = Stage::ALL.iter().map(|s| s.name()).filter(|name| !name.starts_with("tensor_")).collect();
            tested.sort_unstable();
            all.sort_unstable();
            assert_eq!(tested.as_slice(), all.as_slice());
            $(assert_eq!(Stage::$stage.name(), stringify!($name));)*
            $(assert_eq!(Stage::$own_stage.name(), stringify!($own));)*
        }
    };
}

tests! {
    listen_open = ListenOpen,
    connect_dialed = ConnectDialed,
    connect_h1_sent = ConnectH1Sent,
    connect_h2_received = ConnectH2Received,
    connect_h3_sent = ConnectH3Sent,
    accept_accepted = AcceptAccepted,
    accept_h1_received = AcceptH1Received,
    accept_h2_sent = AcceptH2Sent,
    accept_h3_received = AcceptH3Received,
    wire_dialed = WireDialed,
    wire_hello_ready = WireHelloReady,
    wire_hello_sent = WireHelloSent,
    wire_up = WireUp,
    recv_posted = RecvPosted,
    send_posted = SendPosted,
    send_half = SendHalf,
    recv_half = RecvHalf,
    send_done = SendDone,
    recv_done = RecvDone,
    flush = Flush,
    closing = Closing;
    on shared memory alone: send_shared = SendShared
}

#[test]
fn peer_timeout_makes_a_stop_an_error() {
    for wire in [Wire::Shm, Wire::Tcp] {
        for stage in [Stage::RecvPosted, Stage::SendPosted, Stage::RecvHalf] {
            time_out(stage, wire);
        }
    }
}

/// The receiver of one large message, in memory that it gives back only when the test says so.
fn keeps_its_memory(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("a comm");
    let mem = Mem::new(8 << 20);
    let mr = plugin.reg_mr(comm, mem.ptr(0), mem.len()).expect("regMr");
    // A receiver that is quick copies a whole message alone.
    if ctx.rank == 1 {
        while comms::isend(&plugin, comm, &mem, 0, mem.len(), 1, mr).and_then(|request| comms::wait(&plugin, request)).is_ok() {}
        return;
    }
    let receive = || comms::irecv(&plugin, comm, &mem, 0, mem.len(), 1, mr).and_then(|request| comms::wait(&plugin, request));
    let failed = loop {
        if let Err(status) = receive() {
            break status;
        }
    };
    ctx.say(&verdict(Err(failed)));
    ctx.say("giving it back");
    match std::env::var("RHT_CLOSE") {
        Ok(_) => plugin.close_recv(comm).expect("closeRecv"),
        Err(_) => plugin.dereg_mr(comm, mr).expect("deregMr"),
    }
    mem.write(0, &vec![0xAA; mem.len()]);
    ctx.say("given back");
    assert_eq!(ctx.parent.text(), "look");
    ctx.say(if mem.read(0, mem.len()).iter().all(|&b| b == 0xAA) { "untouched" } else { "touched" });
}

/// A sender that is stopped about to write into the receiver's memory: the receiver has its error in time, and gives its memory back when,
/// and not before, the sender can write to it no more.
#[test]
fn memory_is_given_back_when_a_stopped_sender_writes_to_it_no_more() {
    for end in [libc::SIGCONT, libc::SIGKILL] {
        let mut ranks = World::new("keeps_its_memory", 2)
            .env("RAILHEAD_SOFT_WIRE", "shm")
            .env("RAILHEAD_PEER_TIMEOUT_S", "1")
            .env_of(1, "RH_STAGE", "send_shared=stop")
            .spawn();
        ranks.ranks[1].stage.recv_within(PATIENCE).expect("the stage");
        let word = ranks.hear(0);
        assert!(word.starts_with("error 6: ") && word.contains("RAILHEAD_PEER_TIMEOUT_S"), "{word}");
        assert_eq!(ranks.hear(0), "giving it back");
        until("the wait", || (ranks.ranks[0].state() == 'S').then_some(()));
        assert!(ranks.is_silent(0), "given back under a writer");
        ranks.ranks[1].signal(end);
        assert_eq!(ranks.hear(0), "given back");
        ranks.ranks[1].wait();
        ranks.tell(0, "look");
        assert_eq!(ranks.hear(0), "untouched");
        assert!(ranks.ranks[0].wait().success());
    }
}

/// A sender that died while it was writing, and another process has its number before the receiver looks: it is dead all the same.
#[test]
fn memory_is_given_back_when_another_process_took_the_number_of_a_dead_sender() {
    for how in [None, Some("RHT_CLOSE")] {
        let world = World::new("keeps_its_memory", 2).env("RAILHEAD_SOFT_WIRE", "shm").env_of(1, "RH_STAGE", "send_shared=stop");
        let mut ranks = how.iter().fold(world, |world, name| world.env_of(0, name, "1")).spawn();
        ranks.ranks[1].stage.recv_within(PATIENCE).expect("the stage");
        // Stopped, so that it never sees the number free.
        ranks.ranks[0].signal(libc::SIGSTOP);
        until("the receiver to stop", || (ranks.ranks[0].state() == 'T').then_some(()));
        ranks.ranks[1].signal(libc::SIGKILL);
        ranks.ranks[1].wait();
        let Some(_squatter) = Squatter::of(ranks.ranks[1].pid()) else { return };
        ranks.ranks[0].signal(libc::SIGCONT);
        let word = ranks.hear(0);
        assert!(word.starts_with("error 6: "), "{word}");
        assert_eq!(ranks.hear(0), "giving it back");
        assert_eq!(ranks.hear(0), "given back");
        ranks.tell(0, "look");
        assert_eq!(ranks.hear(0), "untouched");
        assert!(ranks.ranks[0].wait().success());
    }
}

/// The environment decides; nothing armed, nothing happens.
#[test]
fn unarmed_stages_do_nothing() {
    assert_eq!(Config::default().peer_timeout_s, 0);
    let mut ranks = World::new("scenario", 3).env("RH_STAGE", "closing:99=kill").spawn();
    assert_eq!((ranks.hear(0).as_str(), ranks.hear(1).as_str()), ("done", "done"));
    ranks.tell(0, "end");
    ranks.tell(2, "end");
    ranks.finish();
}
