//! Processes that fork while they use the library: a child that goes on without it, as a DataLoader's worker does, keeps nothing of it open, and nobody
//! takes the child for the parent. (What a child gets from calls on its parent's comms is in `faults.rs`.)

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::support;
use railhead::store::tcp::{Host, Server, ServerOptions, TcpOptions};
use railhead::store::{Store, TcpStore};
use support::comms::{self, Mem};
use support::netns::usable;
use support::plugin::{Plugin, REMOTE_ERROR};
use support::proxy::Proxy;
use support::{Chan, Ctx, PATIENCE, Ranks, Role, World};

pub const ROLES: &[(&str, Role)] =
    &[("peer_with_worker", peer_with_worker), ("server_with_worker", server_with_worker), ("keeps_nothing", keeps_nothing)];

/// Much more than it takes, and than a peer's end takes to be noticed; less than a hang.
const SOON: Duration = Duration::from_secs(20);

/// Forks a child that does nothing until the test says so, outliving this process.
fn fork_worker(chan: &Chan) {
    // SAFETY: the child waits for a message and leaves by _exit.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        let word = chan.recv_within(2 * PATIENCE);
        let _ = word.and_then(|_| chan.send(b"the worker lives"));
        // SAFETY: ends the child without running the parent's handlers.
        unsafe { libc::_exit(0) };
    }
}

/// Ends the worker of a rank that is gone. It must have lived until now.
fn end_worker(ranks: &mut Ranks, rank: usize) {
    ranks.tell(rank, "end");
    ranks.expect(rank, "the worker lives");
}

fn kill(ranks: &mut Ranks, rank: usize) {
    ranks.ranks[rank].signal(libc::SIGKILL);
    ranks.ranks[rank].wait();
}

/// Rank 0 has a worker and is killed; rank 1 has receives outstanding from it, and a send.
fn peer_with_worker(ctx: &Ctx) {
    const LEN: usize = 1 << 20;
    let plugin = Plugin::start(12);
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    comms::exchange(&plugin, ctx.rank, send, recv, &comms::SIZES).expect("exchange");
    if ctx.rank == 0 {
        fork_worker(&ctx.parent);
        // A fork disturbs nothing.
        comms::exchange(&plugin, ctx.rank, send, recv, &comms::SIZES).expect("exchange");
        ctx.say("forked");
        loop {
            std::thread::park();
        }
    }
    comms::exchange(&plugin, ctx.rank, send, recv, &comms::SIZES).expect("exchange");
    let mem = Mem::new(LEN);
    let (to, from) = (plugin.reg_mr(recv, mem.ptr(0), LEN).expect("regMr"), plugin.reg_mr(send, mem.ptr(0), LEN).expect("regMr"));
    let receive = comms::irecv(&plugin, recv, &mem, 0, LEN, 1, to).expect("irecv");
    ctx.say("waits");
    assert_eq!(ctx.parent.text(), "killed");
    let start = Instant::now();
    let mut outcome = Ok(None);
    while outcome == Ok(None) && start.elapsed() < SOON {
        outcome = plugin.test(receive);
        support::pause(start);
    }
    assert_eq!(outcome.map(drop), Err(REMOTE_ERROR), "after {:?}", start.elapsed());
    // Nothing announces a receive any more: it has to be looked for.
    let mut posted = Ok(None);
    while posted == Ok(None) && start.elapsed() < SOON {
        posted = plugin.isend(send, mem.ptr(0), LEN, 1, from);
        support::pause(start);
    }
    assert_eq!(posted.map(drop), Err(REMOTE_ERROR), "after {:?}", start.elapsed());
    ctx.say("noticed");
}

#[test]
fn a_killed_rank_is_noticed_while_its_forked_child_lives() {
    if !usable() {
        return;
    }
    let settings = [("shm", "poll"), ("shm", "thread"), ("tcp", "poll"), ("tcp", "thread")];
    let mut worlds = settings.map(|(wire, progress)| {
        let world = World::new("peer_with_worker", 2).env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_PROGRESS", progress);
        // Rank 1 sees no process of rank 0's: all that it can notice is the end of connections.
        let alone = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
        world.env("RAILHEAD_TCP_STREAMS", "2").wrap(1, &alone).spawn()
    });
    for ranks in &mut worlds {
        ranks.expect(0, "forked");
        ranks.expect(1, "waits");
        kill(ranks, 0);
        ranks.tell(1, "killed");
    }
    for ranks in &mut worlds {
        ranks.expect(1, "noticed");
        end_worker(ranks, 0);
        assert!(ranks.ranks[1].wait().success());
    }
}

/// Serves a store, uses another one, and has a worker.
fn server_with_worker(ctx: &Ctx) {
    let server = Server::start(ServerOptions { port: 0, ..ServerOptions::default() }).expect("start");
    ctx.say(&server.port().to_string());
    let other = TcpStore::new(Host::Other("localhost".into(), ctx.parent.text().parse().expect("a port")), TcpOptions::default());
    let other = other.expect("connect");
    other.set("key", b"value").expect("set");
    ctx.say("uses it");
    ctx.parent.recv();
    fork_worker(&ctx.parent);
    other.set("key", b"value").expect("set");
    ctx.say("forked");
    loop {
        std::thread::park();
    }
}

#[test]
fn a_killed_store_server_and_client_end_while_their_forked_child_lives() {
    let mut ranks = World::new("server_with_worker", 1).spawn();
    let port: u16 = ranks.hear(0).parse().expect("a port");
    let ours = std::net::TcpListener::bind(("localhost", 0)).expect("bind");
    let address = ours.local_addr().expect("address");
    let relay = Server::start(ServerOptions { port: 0, bind: Some(address.ip()), ..ServerOptions::default() }).expect("start");
    // Between the client and a server, so that the end of the client's connection can be seen.
    ranks.tell(0, &address.port().to_string());
    let (client, _) = ours.accept().expect("accept");
    let server = std::net::TcpStream::connect((address.ip(), relay.port())).expect("connect");
    let relayed = std::thread::spawn(move || {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _ = std::io::copy(&mut &server, &mut &client);
            });
            let _ = std::io::copy(&mut &client, &mut &server);
            let _ = server.shutdown(std::net::Shutdown::Both);
        });
    });
    ranks.expect(0, "uses it");
    let store = TcpStore::new(Host::Other("localhost".into(), port), TcpOptions::default()).expect("connect");
    store.set("before", b"").expect("set");
    ranks.tell(0, "fork");
    ranks.expect(0, "forked");
    store.set("after", b"").expect("set");
    kill(&mut ranks, 0);
    let start = Instant::now();
    let lost = store.get("never", 2 * SOON).expect_err("nobody sets it");
    assert!(start.elapsed() < SOON, "{lost} after {:?}", start.elapsed());
    while !relayed.is_finished() {
        assert!(start.elapsed() < SOON, "the client's connection does not end");
        support::pause(start);
    }
    // Nobody listens any more.
    let again = Server::start(ServerOptions { port, ..ServerOptions::default() });
    assert!(again.is_ok(), "{:?}", again.err());
    end_worker(&mut ranks, 0);
}

/// This process's descriptors, and what each of them is.
fn descriptors() -> BTreeMap<i32, String> {
    let entries = std::fs::read_dir("/proc/self/fd").expect("read_dir").map(|entry| entry.expect("an entry").path());
    let number = |path: &std::path::Path| path.file_name()?.to_str()?.parse().ok();
    let all = entries.filter_map(|path| Some((number(&path)?, std::fs::read_link(&path).ok()?.to_string_lossy().into_owned())));
    // Without the folder itself.
    all.filter(|(_, what)| !what.starts_with("/proc/")).collect()
}

fn keeps_nothing(_: &Ctx) {
    let before = descriptors();
    let server = Server::start(ServerOptions { port: 0, ..ServerOptions::default() }).expect("start");
    let store = TcpStore::new(Host::Other("localhost".into(), server.port()), TcpOptions::default()).expect("connect");
    let watch = store.watch_key("key", Box::new(|_| {})).expect("watch_key");
    let plugin = Plugin::start(12);
    let (mut handle, listen) = plugin.listen(0).expect("listen");
    let (send, recv) = comms::to_itself(&plugin, 0).expect("comms");
    comms::exchange_with_itself(&plugin, send, recv, &support::pattern(1, 70_000));
    // One that waits to be accepted.
    assert!(plugin.connect(0, &mut handle).expect("connect").is_none());
    let proxy = Proxy::new();
    let held: Vec<_> = descriptors().into_iter().filter(|(fd, _)| !before.contains_key(fd)).collect();
    assert!(held.len() > 10, "{held:?}");
    // SAFETY: the child looks at its descriptors and leaves by _exit.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // An eventfd connects nobody, and mio does not tell its own.
        let kept: Vec<_> = descriptors().into_iter().filter(|(fd, what)| !before.contains_key(fd) && !what.contains("eventfd")).collect();
        if !kept.is_empty() {
            eprintln!("of {held:?} the child kept {kept:?}");
        }
        // SAFETY: ends the child without running the parent's handlers.
        unsafe { libc::_exit(i32::from(!kept.is_empty())) };
    }
    let mut status = 0;
    // SAFETY: our child, a place for its status.
    assert_eq!((unsafe { libc::waitpid(child, &raw mut status, 0) }, status), (child, 0));
    comms::exchange_with_itself(&plugin, send, recv, &support::pattern(2, 70_000));
    store.set("key", b"value").expect("set");
    drop(watch);
    proxy.destroy().expect("destroy");
    plugin.close_send(send).expect("close");
    plugin.close_recv(recv).expect("close");
    plugin.close_listen(listen).expect("close");
}

#[test]
fn a_forked_child_keeps_no_descriptor_of_the_librarys() {
    for (wire, progress) in [("shm", "poll"), ("tcp", "poll"), ("shm", "thread"), ("tcp", "thread")] {
        let world = World::new("keeps_nothing", 1).env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_PROGRESS", progress);
        world.env("RAILHEAD_TCP_STREAMS", "2").spawn().finish();
    }
}
