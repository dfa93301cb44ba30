//! RAILHEAD_PROGRESS=thread: what a rank has posted moves, and who connects to it gets through, although it makes no call.

use std::time::{Duration, Instant};

use crate::support;
use railhead::base::config::{Config, Progress};
use support::comms::{self, Mem};
use support::plugin::Plugin;
use support::{Ctx, Role, World, pattern, until};

pub const ROLES: &[(&str, Role)] = &[
    ("progress::quiet_receiver", quiet_receiver),
    ("progress::quiet_sender", quiet_sender),
    ("progress::threads", threads),
    ("sleeper", sleeper),
    ("woken", woken),
];

const WIRES: [&str; 2] = ["shm", "tcp"];
/// Short, through a ring, and more than any buffer on the way holds.
const LENGTHS: [usize; 3] = [8, 100_000, 64 << 20];

fn longest() -> usize {
    *LENGTHS.iter().max().expect("lengths")
}

fn with_thread(role: &'static str, wire: &str, size: usize) -> World {
    World::new(role, size).env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_PROGRESS", "thread")
}

/// Rank 0 posts receives and makes no call until rank 1's sends are all done, and their bytes are there.
fn quiet_receiver(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("a comm");
    let mem = Mem::new(LENGTHS.len() * longest());
    let mr = plugin.reg_mr(comm, mem.ptr(0), mem.len()).expect("regMr");
    let at = |i: usize| i * longest();
    if ctx.rank == 0 {
        let post = |i: usize| comms::irecv(&plugin, comm, &mem, at(i), LENGTHS[i], 1, mr).expect("irecv");
        let requests: Vec<_> = (0..LENGTHS.len()).map(post).collect();
        assert_eq!(ctx.to(1).text(), "all sent");
        for (i, request) in requests.into_iter().enumerate() {
            // Over TCP a send may be done before.
            let sent = pattern(i as u64, LENGTHS[i]);
            let end = LENGTHS[i] - 8;
            until("the bytes", || (mem.read(at(i) + end, 8) == sent[end..]).then_some(()));
            assert_eq!(comms::wait(&plugin, request).expect("test")[0] as usize, LENGTHS[i]);
            assert!(mem.read(at(i), LENGTHS[i]) == sent, "message {i}");
        }
    } else {
        for (i, len) in LENGTHS.into_iter().enumerate() {
            mem.write(at(i), &pattern(i as u64, len));
            let request = comms::isend(&plugin, comm, &mem, at(i), len, 1, mr).expect("isend");
            comms::wait(&plugin, request).expect("test");
        }
        ctx.to(0).send(b"all sent").expect("rank 0");
    }
}

#[test]
fn messages_arrive_while_the_receiver_makes_no_call() {
    for wire in WIRES {
        // Copied through a ring, for which both ends have to work; and by the receiver alone.
        for cma in ["0", "1"] {
            with_thread("progress::quiet_receiver", wire, 2).env("RAILHEAD_CMA", cma).spawn().finish();
        }
    }
}

/// Rank 1 posts sends and makes no call until rank 0's receives are all done.
fn quiet_sender(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("a comm");
    let mem = Mem::new(LENGTHS.len() * longest());
    let mr = plugin.reg_mr(comm, mem.ptr(0), mem.len()).expect("regMr");
    let at = |i: usize| i * longest();
    if ctx.rank == 1 {
        let post = |i: usize| {
            mem.write(at(i), &pattern(i as u64, LENGTHS[i]));
            comms::isend(&plugin, comm, &mem, at(i), LENGTHS[i], 1, mr).expect("isend")
        };
        let requests: Vec<_> = (0..LENGTHS.len()).map(post).collect();
        assert_eq!(ctx.to(0).text(), "all received");
        requests.into_iter().for_each(|request| _ = comms::wait(&plugin, request).expect("test"));
    } else {
        let post = |i: usize| comms::irecv(&plugin, comm, &mem, at(i), LENGTHS[i], 1, mr).expect("irecv");
        let requests: Vec<_> = (0..LENGTHS.len()).map(post).collect();
        for (i, request) in requests.into_iter().enumerate() {
            assert_eq!(comms::wait(&plugin, request).expect("test")[0] as usize, LENGTHS[i]);
            assert!(mem.read(at(i), LENGTHS[i]) == pattern(i as u64, LENGTHS[i]), "message {i}");
        }
        ctx.to(1).send(b"all received").expect("rank 1");
    }
}

#[test]
fn messages_leave_while_the_sender_makes_no_call() {
    for wire in WIRES {
        with_thread("progress::quiet_sender", wire, 2).spawn().finish();
    }
}

/// What the kernel says of the threads of this process that belong to a device.
fn device_threads() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("tasks");
    let status = |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.expect("task").path().join("status"));
    tasks.filter_map(|task| status(task).ok()).filter(|status| status.starts_with("Name:\trh-")).collect()
}

/// How often the device's thread was given a processor, and whether it waits for something.
fn switches() -> (u64, bool) {
    let threads = device_threads();
    let [status] = threads.as_slice() else { panic!("{} threads of devices", threads.len()) };
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":\t")).expect(name);
    let count = |name| field(name).parse::<u64>().expect("a number");
    (count("voluntary_ctxt_switches") + count("nonvoluntary_ctxt_switches"), field("State").starts_with('S'))
}

/// How often the device's thread is woken while this one naps so many times for a millisecond; `None` if it is not asleep at the end.
fn wakes_during(naps: u64) -> Option<u64> {
    let (before, _) = switches();
    (0..naps).for_each(|_| std::thread::sleep(std::time::Duration::from_millis(1)));
    let (after, asleep) = switches();
    asleep.then(|| after - before)
}

/// Waits until the device's thread sleeps soundly.
fn until_it_sleeps() {
    // It gives itself its name.
    until("the thread to have begun", || (device_threads().len() == 1).then_some(()));
    until("the thread to sleep", || (wakes_during(5) == Some(0)).then_some(()));
}

/// Rank 0 receives and rank 1 sends, each while its thread sleeps and it makes no more than the one call.
fn sleeper(ctx: &Ctx) {
    const LEN: usize = 8 << 20;
    const ROUNDS: u64 = 15;
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("a comm");
    let mem = Mem::new(LEN);
    let mr = plugin.reg_mr(comm, mem.ptr(0), mem.len()).expect("regMr");
    // Nothing is outstanding: nothing wakes it at all.
    until_it_sleeps();
    ctx.to(1 - ctx.rank).send(b"asleep").expect("the other");
    assert_eq!(ctx.to(1 - ctx.rank).text(), "asleep");
    until_it_sleeps();
    assert_eq!(wakes_during(300), Some(0));
    ctx.to(1 - ctx.rank).send(b"go").expect("the other");
    assert_eq!(ctx.to(1 - ctx.rank).text(), "go");
    for round in 0..ROUNDS {
        let len = if round % 3 == 2 { LEN } else { 8 + round as usize };
        if ctx.rank == 0 {
            let request = comms::irecv(&plugin, comm, &mem, 0, len, 1, mr).expect("irecv");
            until_it_sleeps();
            if round == 0 {
                // A look at an outstanding request now and then is no more than that.
                let naps = 300;
                let wakes = wakes_during(naps);
                assert!(wakes.is_none_or(|wakes| wakes * 10 < naps), "woken {wakes:?} times in {naps} ms or more");
            }
            ctx.to(1).send(b"posted").expect("rank 1");
            assert_eq!(ctx.to(1).text(), "sent");
            until("the message", || plugin.test(request).expect("test"));
            assert!(mem.read(0, len) == pattern(round, len), "round {round}");
            ctx.to(1).send(b"received").expect("rank 1");
        } else {
            assert_eq!(ctx.to(0).text(), "posted");
            mem.write(0, &pattern(round, len));
            until_it_sleeps();
            let request = comms::isend(&plugin, comm, &mem, 0, len, 1, mr).expect("isend");
            // Round by round, one of the two makes all further calls.
            if round % 2 == 0 {
                comms::wait(&plugin, request).expect("test");
                ctx.to(0).send(b"sent").expect("rank 0");
                assert_eq!(ctx.to(0).text(), "received");
            } else {
                ctx.to(0).send(b"sent").expect("rank 0");
                assert_eq!(ctx.to(0).text(), "received");
                comms::wait(&plugin, request).expect("test");
            }
        }
    }
}

#[test]
fn an_idle_thread_sleeps_until_there_is_something_to_do() {
    for wire in WIRES {
        // Looks at what is outstanding are far apart.
        let world = |cma| with_thread("sleeper", wire, 2).env("RAILHEAD_CMA", cma).env("RAILHEAD_STALL_WARN_S", "60");
        for cma in ["0", "1"] {
            world(cma).spawn().finish();
        }
        // Streams that were full for a while keep nobody awake.
        if wire == "tcp" {
            world("0").env("RAILHEAD_TCP_STREAMS", "2").spawn().finish();
        }
    }
}

/// Rank 0 looks at nothing but its memory until a message has landed there.
fn woken(ctx: &Ctx) {
    const ROUNDS: usize = 5;
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("a comm");
    let mem = Mem::new(64 * ROUNDS);
    let mr = plugin.reg_mr(comm, mem.ptr(0), mem.len()).expect("regMr");
    if ctx.rank == 1 {
        mem.write(0, &[7; 8]);
        for _ in 0..ROUNDS {
            assert_eq!(ctx.to(0).text(), "asleep");
            let request = comms::isend(&plugin, comm, &mem, 0, 8, 1, mr).expect("isend");
            comms::wait(&plugin, request).expect("test");
            assert_eq!(ctx.to(0).text(), "landed");
        }
        return;
    }
    let fastest = (0..ROUNDS).map(|round| {
        let request = comms::irecv(&plugin, comm, &mem, 64 * round, 8, 1, mr).expect("irecv");
        until_it_sleeps();
        let from = Instant::now();
        ctx.to(1).send(b"asleep").expect("rank 1");
        until("the message", || (mem.read(64 * round, 8) == [7; 8]).then_some(()));
        let took = from.elapsed();
        comms::wait(&plugin, request).expect("test");
        ctx.to(1).send(b"landed").expect("rank 1");
        took
    });
    // It looks after a second by itself. A machine under load may make any one round last longer, but not all of them.
    let fastest = fastest.min().expect("rounds");
    assert!(fastest < Duration::from_millis(700), "the fastest of {ROUNDS} messages took {fastest:?}");
}

#[test]
fn what_comes_wakes_a_thread_that_watches_what_is_outstanding() {
    for wire in WIRES {
        with_thread("woken", wire, 2).spawn().finish();
    }
}

/// The thread is there as long as a comm is.
fn threads(_: &Ctx) {
    let plugin = Plugin::start(12);
    assert!(device_threads().is_empty());
    for _ in 0..3 {
        let pairs: Vec<_> = (0..3).map(|_| comms::to_itself(&plugin, 0).expect("comms")).collect();
        // It gives itself its name.
        until("the thread", || (device_threads().len() == 1).then_some(()));
        for (send, recv) in pairs {
            comms::exchange_with_itself(&plugin, send, recv, &[7; 4096]);
            plugin.close_send(send).expect("closeSend");
            plugin.close_recv(recv).expect("closeRecv");
        }
        // The kernel may take a moment to clear away what was waited for.
        until("its end", || device_threads().is_empty().then_some(()));
    }
}

#[test]
fn a_device_has_a_thread_while_it_has_comms() {
    with_thread("progress::threads", "auto", 1).spawn().finish();
}

#[test]
fn a_handshake_goes_on_between_two_calls() {
    use railhead::net::{Mode, Net};
    let net = Net::with_config(Config { progress: Progress::Thread, ..Config::default() }).expect("open");
    let (mut listen, handle) = net.listen(0).expect("listen");
    // One call each begins it; one more of each finds it done, however long the pause between them. Which pause suffices is not known.
    let mut pause = std::time::Duration::from_millis(1);
    // One that is closed before its other end was accepted is an error there.
    let mut open = Vec::new();
    until("a handshake in two calls", || {
        let mut fresh = handle;
        let mut send = net.connect(0, None, &mut fresh, Mode::NonBlocking).expect("connect");
        std::thread::sleep(pause);
        pause *= 2;
        if send.is_none() {
            send = net.connect(0, None, &mut fresh, Mode::NonBlocking).expect("connect");
        }
        let recv = listen.accept(Mode::NonBlocking).expect("accept");
        let both = send.is_some() && recv.is_some();
        open.push((send, recv));
        both.then_some(())
    });
}
