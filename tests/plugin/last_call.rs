//! A rank that makes no further call after its last completed request: the other side completes all the same, with full send buffers and tiny
//! ones too.

use crate::support;
use support::comms::{self, Mem};
use support::plugin::Plugin;
use support::{Ctx, Role, World, pattern, until};

pub const ROLES: &[(&str, Role)] =
    &[("quiet_sender", quiet_sender), ("quiet_receiver", quiet_receiver), ("both_quiet", both_quiet), ("exits", exits)];

/// Messages outstanding at once, and the longest of them.
const N: usize = 24;
const LENGTHS: [usize; 6] = [0, 1, 64, 4000, 100_000, 3_000_000];

fn message(i: usize) -> Vec<u8> {
    pattern(i as u64 + 1, LENGTHS[i % LENGTHS.len()])
}

/// One rank goes quiet after its last request is done, until the other, who polls on, has said that all of its own are.
fn run(ctx: &Ctx, quiet: usize) {
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("a comm");
    let most = *LENGTHS.iter().max().expect("lengths");
    let mem = Mem::new(N * most);
    let mr = plugin.reg_mr(comm, mem.ptr(0), mem.len()).expect("regMr");
    let mut open = Vec::new();
    for i in 0..N {
        if ctx.rank == 0 {
            open.push(comms::irecv(&plugin, comm, &mem, i * most, most, 1, mr).expect("irecv"));
        } else {
            let bytes = message(i);
            mem.write(i * most, &bytes);
            open.push(comms::isend(&plugin, comm, &mem, i * most, bytes.len(), 1, mr).expect("isend"));
        }
    }
    // All that are done are taken at every turn, and the last one is the last call that is made.
    let mut left: Vec<usize> = (0..N).collect();
    until("all requests", || {
        left.retain(|&i| match plugin.test(open[i]).expect("test") {
            None => true,
            Some(sizes) => {
                assert_eq!(sizes[0] as usize, message(i).len());
                false
            }
        });
        left.is_empty().then_some(())
    });
    if ctx.rank == 0 {
        (0..N).for_each(|i| assert!(mem.read(i * most, message(i).len()) == message(i), "message {i}"));
    }
    if ctx.rank == quiet {
        // No call into the plugin from here on until the other one is done.
        assert_eq!(ctx.to(1 - quiet).text(), "done");
    } else {
        ctx.to(quiet).send(b"done").expect("the quiet one");
    }
    ctx.barrier();
    plugin.dereg_mr(comm, mr).expect("deregMr");
    if ctx.rank == 0 { plugin.close_recv(comm) } else { plugin.close_send(comm) }.expect("close");
}

fn quiet_sender(ctx: &Ctx) {
    run(ctx, 1);
}

fn quiet_receiver(ctx: &Ctx) {
    run(ctx, 0);
}

/// Each is the quiet one in turn, ten times, on one comm each way and with nothing but the comms in common.
fn both_quiet(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    for round in 0..20 {
        comms::exchange(&plugin, ctx.rank, send, recv, &[100, 70_000, 1 << 20]).expect("exchange");
        // After its last request of the round one rank waits for the other without a call, and then the other way round.
        if ctx.rank == round % 2 {
            assert_eq!(ctx.to(1 - ctx.rank).text(), "mine too");
        } else {
            ctx.to(1 - ctx.rank).send(b"mine too").expect("rank");
        }
    }
    ctx.barrier();
    plugin.close_send(send).expect("close");
    plugin.close_recv(recv).expect("close");
}

/// Rank 1 exits when it can send no more, without another call: its socket is full, and has bytes that it has not read.
fn exits(ctx: &Ctx) {
    const LEN: usize = 16 << 10;
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("a comm");
    let mem = Mem::new(32 * LEN);
    let mr = plugin.reg_mr(comm, mem.ptr(0), mem.len()).expect("regMr");
    if ctx.rank == 0 {
        let posted: Vec<_> = (0..24).map(|i| comms::irecv(&plugin, comm, &mem, i * LEN, LEN, 1, mr).expect("irecv")).collect();
        ctx.to(1).send(b"posted").expect("rank 1");
        let sent: usize = ctx.to(1).text().parse().expect("a number");
        let _unread: Vec<_> = (0..8).map(|i| comms::irecv(&plugin, comm, &mem, (24 + i) * LEN, LEN, 1, mr).expect("irecv")).collect();
        ctx.to(1).send(b"more are posted").expect("rank 1");
        assert_eq!(ctx.parent.text(), "receive");
        for (i, request) in posted.into_iter().take(sent).enumerate() {
            assert_eq!(comms::wait(&plugin, request).expect("a message that was done")[0], LEN as i32);
            assert!(mem.read(i * LEN, LEN) == pattern(i as u64, LEN), "message {i}");
        }
        return;
    }
    assert_eq!(ctx.to(0).text(), "posted");
    (0..24).for_each(|i| mem.write(i * LEN, &pattern(i as u64, LEN)));
    let mut open: Vec<_> = (0..24).map(|i| comms::isend(&plugin, comm, &mem, i * LEN, LEN, 1, mr).expect("isend")).collect();
    // In order: what the first of them is, all are that come later.
    while !open.is_empty() && (0..1000).any(|_| plugin.test(open[0]).expect("test").is_some()) {
        open.remove(0);
    }
    assert!(!open.is_empty(), "the sockets hold all");
    ctx.to(0).send((24 - open.len()).to_string().as_bytes()).expect("rank 0");
    assert_eq!(ctx.to(0).text(), "more are posted");
    ctx.say("exits");
    // SAFETY: the process has no other thread that its handlers of exit could disturb.
    unsafe { libc::exit(0) };
}

#[test]
fn a_process_that_exits_has_sent_what_is_done() {
    let world = World::new("exits", 2).env("RAILHEAD_SOFT_WIRE", "tcp").env("RAILHEAD_TCP_BUFFER_KIB", "32");
    let mut ranks = world.env("RAILHEAD_PROGRESS", "poll").spawn();
    ranks.expect(1, "exits");
    // Time in which it would be gone if it did not wait: too little of it proves nothing, and fails nothing.
    let end = std::time::Instant::now() + std::time::Duration::from_millis(300);
    while ranks.ranks[1].state() != 'Z' && std::time::Instant::now() < end {
        std::thread::yield_now();
    }
    ranks.tell(0, "receive");
    ranks.finish();
}

fn everywhere(role: &'static str) {
    for (name, value) in [("RAILHEAD_SOFT_WIRE", "shm"), ("RAILHEAD_CMA", "0"), ("RAILHEAD_SOFT_WIRE", "tcp")] {
        World::new(role, 2).env(name, value).spawn().finish();
    }
    for streams in ["0", "3"] {
        let world = World::new(role, 2).env("RAILHEAD_SOFT_WIRE", "tcp").env("RAILHEAD_TCP_BUFFER_KIB", "16");
        world.env("RAILHEAD_TCP_STREAMS", streams).spawn().finish();
    }
}

#[test]
fn a_sender_that_goes_quiet() {
    everywhere("quiet_sender");
}

#[test]
fn a_receiver_that_goes_quiet() {
    everywhere("quiet_receiver");
}

#[test]
fn by_turns() {
    everywhere("both_quiet");
}
