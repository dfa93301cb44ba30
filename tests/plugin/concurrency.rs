//! Several things at once: threads on different comms, registration while another thread drives the same comm, many connections to one
//! listener, and comms closed with everything in flight.

use crate::support;
use support::comms::{self, Mem};
use support::holdings::Holdings;
use support::plugin::{Buf, Opaque, Plugin, Result};
use support::{Ctx, Role, World, pattern, until};

pub const ROLES: &[(&str, Role)] = &[
    ("threads", threads),
    ("registration", registration),
    ("many_connections", many_connections),
    ("closed_in_flight", closed_in_flight),
    ("deregistered_in_flight", deregistered_in_flight),
    ("retried_apart", retried_apart),
];

fn on_both_wires(role: &'static str, ranks: usize) {
    for wire in ["shm", "tcp"] {
        World::new(role, ranks).env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
    }
}

const THREADS: usize = 8;

/// Eight threads of each rank, a pair of comms each, all at once; each also makes and closes further comms of its own.
fn threads(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    // Handles first, as the ranks share one channel.
    let listens: Vec<_> = (0..THREADS).map(|_| plugin.listen(0).expect("listen")).collect();
    listens.iter().for_each(|(handle, _)| comms::give(ctx.to(1 - ctx.rank), handle));
    let theirs: Vec<_> = (0..THREADS).map(|_| comms::get(ctx.to(1 - ctx.rank))).collect();
    std::thread::scope(|scope| {
        for (i, ((_, listen), mut handle)) in listens.into_iter().zip(theirs).enumerate() {
            let (plugin, rank) = (&plugin, ctx.rank);
            scope.spawn(move || {
                let (mut send, mut recv) = (None, None);
                let (send, recv) = until("both comms", || {
                    send = send.or_else(|| plugin.connect(0, &mut handle).expect("connect"));
                    recv = recv.or_else(|| plugin.accept(listen).expect("accept"));
                    send.zip(recv)
                });
                plugin.close_listen(listen).expect("close");
                for round in 0..10 {
                    comms::exchange(plugin, rank, send, recv, &[i * 10, 100 + i, 9000, 200_000 + round]).expect("exchange");
                    let (s, r) = comms::to_itself(plugin, 0).expect("comms");
                    comms::exchange_with_itself(plugin, s, r, &pattern(i as u64, 5000));
                    plugin.close_send(s).expect("close");
                    plugin.close_recv(r).expect("close");
                }
                plugin.close_send(send).expect("close");
                plugin.close_recv(recv).expect("close");
            });
        }
    });
    ctx.barrier();
}

#[test]
fn many_threads_on_different_comms() {
    on_both_wires("threads", 2);
}

/// One thread drives a comm while others register and deregister memory through the same comm and through another.
fn registration(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        for comm in [send, recv] {
            let (plugin, stop) = (&plugin, &stop);
            scope.spawn(move || {
                let mem = Mem::new(64 * 4096);
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let held: Vec<Opaque> = (0..32).map(|i| plugin.reg_mr(comm, mem.ptr(i * 4096), 8192).expect("regMr")).collect();
                    for (i, mr) in held.into_iter().enumerate() {
                        // Given back through whichever comm.
                        plugin.dereg_mr(if i % 2 == 0 { send } else { recv }, mr).expect("deregMr");
                    }
                }
            });
        }
        for _ in 0..40 {
            comms::exchange(&plugin, ctx.rank, send, recv, &[8, 4096, 100_000]).expect("exchange");
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    ctx.barrier();
}

#[test]
fn registering_while_another_thread_drives_the_comm() {
    on_both_wires("registration", 2);
}

/// One listen comm accepts whoever comes: here three ranks twenty times each, in whatever order they get through.
fn many_connections(ctx: &Ctx) {
    const EACH: usize = 20;
    let plugin = Plugin::start(12);
    if ctx.rank > 0 {
        let handle = comms::get(ctx.to(0));
        for i in 0..EACH {
            let comm = comms::connect(&plugin, 0, &mut handle.clone()).expect("connect");
            comms::send(&plugin, comm, &pattern((ctx.rank * 100 + i) as u64, 2000)).expect("send");
            plugin.close_send(comm).expect("close");
        }
        ctx.barrier();
        return;
    }
    let (handle, listen) = plugin.listen(0).expect("listen");
    (1..ctx.size).for_each(|r| comms::give(ctx.to(r), &handle));
    let mut seen = Vec::new();
    for _ in 0..EACH * (ctx.size - 1) {
        let comm = comms::accept(&plugin, listen).expect("accept");
        let bytes = comms::recv(&plugin, comm, 2000).expect("receive");
        plugin.close_recv(comm).expect("close");
        let from = (0..400).find(|&n| bytes == pattern(n, 2000)).expect("somebody's message");
        assert!(!seen.contains(&from), "message {from} twice");
        seen.push(from);
    }
    ctx.barrier();
    plugin.close_listen(listen).expect("close");
}

#[test]
fn one_listener_and_many_connections() {
    on_both_wires("many_connections", 4);
}

const SLOT: usize = 300_000;

/// A one-way comm with 32 requests posted on each side, all of them matched and few of them done.
fn loaded(ctx: &Ctx, plugin: &Plugin) -> (Opaque, Mem, Opaque, Vec<Opaque>) {
    let comm = comms::one_way(ctx, plugin, 0).expect("a comm");
    let mem = Mem::new(32 * SLOT);
    let mr = plugin.reg_mr(comm, mem.ptr(0), mem.len()).expect("regMr");
    if ctx.rank == 0 {
        let open = (0..32).map(|i| comms::irecv(plugin, comm, &mem, i * SLOT, SLOT, 1, mr).expect("irecv")).collect();
        // Never met, so it can be tested as often as one likes: the announcements may need us to get out.
        let pump = comms::irecv(plugin, comm, &mem, 0, 1, 99, mr).expect("irecv");
        until("the sender's word", || {
            assert_eq!(plugin.test(pump).expect("test"), None);
            ctx.to(1).ready().then_some(())
        });
        assert_eq!(ctx.to(1).text(), "posted");
        // Only now may the sender break the comm: until here an error would be a failure.
        ctx.to(1).send(b"seen").expect("rank 1");
        return (comm, mem, mr, open);
    }
    (0..32).for_each(|i| mem.write(i * SLOT, &pattern(i as u64, SLOT)));
    let open = (0..32).map(|i| comms::isend(plugin, comm, &mem, i * SLOT, SLOT, 1, mr).expect("isend")).collect();
    ctx.to(0).send(b"posted").expect("rank 0");
    assert_eq!(ctx.to(0).text(), "seen");
    (comm, mem, mr, open)
}

/// Closed by one side with 32 requests outstanding: the other gets errors or completions, never a hang; nothing lands in memory that was
/// given back; nothing is kept.
fn closed_in_flight(ctx: &Ctx) {
    let mut before = None;
    for round in 0..20 {
        let mut plugin = Plugin::start(12);
        let (comm, mem, mr, open) = loaded(ctx, &plugin);
        let close = |p: &Plugin| if ctx.rank == 0 { p.close_recv(comm) } else { p.close_send(comm) };
        if ctx.rank == round % 2 {
            for _ in 0..round {
                let _ = plugin.test(open[0]);
            }
            // In either order.
            if round % 4 < 2 {
                plugin.dereg_mr(comm, mr).expect("deregMr");
                close(&plugin).expect("close");
            } else {
                close(&plugin).expect("close");
            }
            mem.write(0, &vec![0xAA; mem.len()]);
            ctx.barrier();
            assert!(mem.read(0, mem.len()).iter().all(|&b| b == 0xAA), "round {round}: something landed after close");
        } else {
            let ends: Vec<Result<_>> = open.iter().map(|&r| comms::wait(&plugin, r)).collect();
            let good = ends.iter().take_while(|e| e.is_ok()).count();
            assert!(ends[good..].iter().all(|e| *e == Err(6)), "round {round}: {ends:?}");
            ctx.barrier();
            plugin.dereg_mr(comm, mr).expect("deregMr");
            close(&plugin).expect("close");
        }
        plugin.finalize().expect("finalize");
        drop(mem);
        let after = Holdings::now();
        if round > 1 {
            before.get_or_insert_with(|| after.clone()).assert_same(&after, "closing in flight");
        }
    }
}

#[test]
fn closing_with_32_requests_in_flight() {
    on_both_wires("closed_in_flight", 2);
}

/// Memory is given back with 32 requests in flight: whatever becomes of them, nothing lands in it afterwards.
fn deregistered_in_flight(ctx: &Ctx) {
    for round in 0..20 {
        let plugin = Plugin::start(12);
        let (comm, mem, mr, open) = loaded(ctx, &plugin);
        if ctx.rank == round % 2 {
            for _ in 0..round {
                let _ = plugin.test(open[0]);
            }
            plugin.dereg_mr(comm, mr).expect("deregMr");
            mem.write(0, &vec![0xAA; mem.len()]);
            for &request in &open {
                if plugin.test(request).is_err() {
                    break;
                }
            }
            assert!(mem.read(0, mem.len()).iter().all(|&b| b == 0xAA), "round {round}: something landed after deregMr");
        } else {
            // All done, or an error, or (where the other side's requests were all matched before) some done: no hang in close.
            for &request in &open {
                if until("a request or silence", || match plugin.test(request) {
                    Ok(None) if ctx.to(1 - ctx.rank).ready() => Some(None),
                    Ok(None) => None,
                    other => Some(Some(other.is_ok())),
                }) != Some(true)
                {
                    break;
                }
            }
        }
        ctx.to(1 - ctx.rank).send(b"enough").expect("rank");
        assert_eq!(ctx.to(1 - ctx.rank).text(), "enough");
        // Left registered, the range would cover the next round's memory, which the system may put in the same place.
        if ctx.rank != round % 2 {
            plugin.dereg_mr(comm, mr).expect("deregMr");
        }
        if ctx.rank == 0 { plugin.close_recv(comm) } else { plugin.close_send(comm) }.expect("close");
    }
}

#[test]
fn deregistering_with_32_requests_in_flight() {
    on_both_wires("deregistered_in_flight", 2);
}

/// isend that said "not now" may be followed by an isend of something else, and irecv likewise.
fn retried_apart(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("a comm");
    let mem = Mem::new(8 * 1000);
    let mr = plugin.reg_mr(comm, mem.ptr(0), mem.len()).expect("regMr");
    let order = [3, 1, 0, 2];
    for _ in 0..100 {
        if ctx.rank == 1 {
            (0..4).for_each(|i| mem.write(i * 1000, &pattern(i as u64, 1000)));
            // Tags 0 to 3 are tried by turns until all are posted; which one the receiver is ready for, the sender cannot know.
            let mut posted: [Option<Opaque>; 4] = [None; 4];
            until("four sends", || {
                for (i, posted) in posted.iter_mut().enumerate() {
                    if posted.is_none() {
                        *posted = plugin.isend(comm, mem.ptr(i * 1000), 1000, i as i32, mr).expect("isend");
                    }
                }
                posted.iter().all(Option::is_some).then_some(())
            });
            posted.iter().flatten().for_each(|&r| assert_eq!(comms::wait(&plugin, r).expect("test")[0], 1000));
        } else {
            let open: Vec<_> = order
                .iter()
                .map(|&i| {
                    let buf = Buf { addr: mem.ptr(i * 1000), len: 1000, tag: i as i32, mr };
                    until("irecv", || plugin.irecv(comm, &[buf]).expect("irecv"))
                })
                .collect();
            open.iter().for_each(|&r| assert_eq!(comms::wait(&plugin, r).expect("test")[0], 1000));
            (0..4).for_each(|i| assert!(mem.read(i * 1000, 1000) == pattern(i as u64, 1000), "buffer {i}"));
        }
    }
    ctx.barrier();
}

#[test]
fn posts_are_retried_independently() {
    on_both_wires("retried_apart", 2);
}
