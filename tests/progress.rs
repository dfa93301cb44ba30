//! RAILHEAD_PROGRESS=thread: what a rank has posted moves, and who connects to it gets through, although it makes no call.

mod support;

use railhead::base::config::{Config, Progress};
use support::comms::{self, Mem};
use support::plugin::Plugin;
use support::{Ctx, World, pattern, until};

#[test]
fn child_entry() {
    support::enter(&[("quiet_receiver", quiet_receiver), ("quiet_sender", quiet_sender), ("threads", threads)]);
}

const WIRES: [&str; 2] = ["shm", "tcp"];
/// Short, through a ring, and more than any buffer on the way holds.
const LENGTHS: [usize; 3] = [8, 100_000, 64 << 20];

fn longest() -> usize {
    *LENGTHS.iter().max().expect("lengths")
}

fn with_thread(role: &'static str, wire: &str, size: usize) -> World {
    World::new(role, size).env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_PROGRESS", "thread")
}

/// Rank 0 posts receives and makes no call until rank 1's sends are all done.
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
            // All that was left to do is to say so.
            let sizes = plugin.test(request).expect("test").expect("a send is done only once it has arrived");
            assert_eq!(sizes[0] as usize, LENGTHS[i]);
            assert!(mem.read(at(i), LENGTHS[i]) == pattern(i as u64, LENGTHS[i]), "message {i}");
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
            with_thread("quiet_receiver", wire, 2).env("RAILHEAD_CMA", cma).spawn().finish();
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
        with_thread("quiet_sender", wire, 2).spawn().finish();
    }
}

/// Threads of this process that belong to a device.
fn device_threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("tasks");
    let name = |task: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(task.expect("task").path().join("comm"));
    tasks.filter_map(|task| name(task).ok()).filter(|name| name.starts_with("rh-")).count()
}

/// The thread is there as long as a comm is.
fn threads(_: &Ctx) {
    let plugin = Plugin::start(12);
    assert_eq!(device_threads(), 0);
    for _ in 0..3 {
        let pairs: Vec<_> = (0..3).map(|_| comms::to_itself(&plugin, 0).expect("comms")).collect();
        // It gives itself its name.
        until("the thread", || (device_threads() == 1).then_some(()));
        for (send, recv) in pairs {
            comms::exchange_with_itself(&plugin, send, recv, &[7; 4096]);
            plugin.close_send(send).expect("closeSend");
            plugin.close_recv(recv).expect("closeRecv");
        }
        // The kernel may take a moment to clear away what was waited for.
        until("its end", || (device_threads() == 0).then_some(()));
    }
}

#[test]
fn a_device_has_a_thread_while_it_has_comms() {
    with_thread("threads", "auto", 1).spawn().finish();
}

#[test]
fn a_handshake_goes_on_between_two_calls() {
    use railhead::net::{Net, Ready};
    let net = Net::with_config(Config { progress: Progress::Thread, ..Config::default() }).expect("open");
    let (mut listen, handle) = net.listen(0).expect("listen");
    // One call each begins it; one more of each finds it done, however long the pause between them. Which pause suffices is not known.
    let mut pause = std::time::Duration::from_millis(1);
    // One that is closed before its other end was accepted is an error there.
    let mut open = Vec::new();
    until("a handshake in two calls", || {
        let mut fresh = handle;
        let mut send = net.connect(0, None, &mut fresh, Ready::Full).expect("connect");
        std::thread::sleep(pause);
        pause *= 2;
        if send.is_none() {
            send = net.connect(0, None, &mut fresh, Ready::Full).expect("connect");
        }
        let recv = listen.accept(Ready::Full).expect("accept");
        let both = send.is_some() && recv.is_some();
        open.push((send, recv));
        both.then_some(())
    });
}
