//! Connecting: in any order, work posted ahead waits; many pairs, few queues, oneself.

use std::time::Instant;

use railhead::fabric::{QpCaps, QpState, SendWr, WcOpcode, WcStatus};

use super::bed::{Bed, NOTHING, PATIENCE, Pair, Request, SILENT, Side};

fn unconnected(bed: &Bed) -> Pair {
    let device = bed.device();
    Pair { a: Side::new("a", &device, QpCaps::default(), false), b: Side::new("b", &device, QpCaps::default(), false) }
}

/// What is posted right after `connect` goes, and in order, on both sides.
pub fn work_before_connect(bed: &Bed) {
    for big in [64, 5000, 2_000_000] {
        let mut p = unconnected(bed);
        let from = [p.a.open_memory(big), p.b.open_memory(big)];
        let to = [p.b.open_memory(big), p.a.open_memory(big)];
        from[0].pattern(1);
        from[1].pattern(2);
        p.a.recv(1, to[1].sge(0, big));
        p.b.recv(1, to[0].sge(0, big));
        p.connect();
        p.a.send(Request::send(2, from[0].sge(0, big)));
        p.b.send(Request::send(2, from[1].sge(0, big)));
        assert_eq!((p.a.state(), p.b.state()), (QpState::Rts, QpState::Rts));
        p.wait(2, 2);
        assert!(to[0].all() == from[0].all() && to[1].all() == from[1].all());
        assert!(p.a.got.iter().chain(&p.b.got).all(|c| c.status == WcStatus::Success));
    }
}

/// One side connects and posts a full queue; long after, the other connects. Everything goes, in order.
pub fn work_before_peer_connects(bed: &Bed) {
    let mut p = unconnected(bed);
    let from = p.a.open_memory(64 * 1000);
    let to = p.b.open_memory(64 * 1000);
    from.pattern(1);
    to.set(0);
    let (ea, eb) = (p.a.cq.qp(p.a.qp).endpoint(), p.b.cq.qp(p.b.qp).endpoint());
    p.a.cq.qp(p.a.qp).connect(&eb).expect("connect");
    for i in 0..512usize {
        p.a.send(Request::write(i as u64, from.sge(i * 100, 100), &to, i * 100));
    }
    p.settle();
    assert!(p.a.got.is_empty(), "completed before the peer was connected");
    assert!(to.all().iter().all(|&b| b == 0), "performed before the peer was connected");
    p.b.cq.qp(p.b.qp).connect(&ea).expect("connect");
    p.wait(512, 0);
    p.a.take_all_ok(0..512);
    p.ping();
    assert!(to.read(0, 51_200) == from.read(0, 51_200));
}

/// a first, b first, and b only after a has polled a lot.
pub fn either_side_first(bed: &Bed) {
    for case in 0..4 {
        let mut p = unconnected(bed);
        let (ea, eb) = (p.a.cq.qp(p.a.qp).endpoint(), p.b.cq.qp(p.b.qp).endpoint());
        let a = |p: &mut Pair| p.a.cq.qp(p.a.qp).connect(&eb).expect("connect a");
        let b = |p: &mut Pair| p.b.cq.qp(p.b.qp).connect(&ea).expect("connect b");
        match case {
            0 => {
                a(&mut p);
                b(&mut p);
            }
            1 => {
                b(&mut p);
                a(&mut p);
            }
            2 => {
                a(&mut p);
                p.settle();
                b(&mut p);
            }
            _ => {
                b(&mut p);
                p.settle();
                a(&mut p);
            }
        }
        p.ping();
        std::mem::swap(&mut p.a, &mut p.b);
        p.ping();
    }
}

/// A queue pair connected to itself is its own peer.
pub fn connected_to_itself(bed: &Bed) {
    let mut s = Side::new("self", &bed.device(), QpCaps::default(), false);
    let me = s.cq.qp(s.qp).endpoint();
    s.cq.qp(s.qp).connect(&me).expect("connect");
    let from = s.open_memory(3_000_000);
    let to = s.open_memory(3_000_000);
    from.pattern(1);
    for len in [0, 1, 64, 65, 4097, 3_000_000] {
        to.set(0);
        let sge = if len == 0 { NOTHING } else { from.sge(0, len) };
        s.recv(1, NOTHING);
        s.send(Request::write(2, sge, &to, 0));
        s.send(Request::write_imm(3, NOTHING, &to, 0, 4));
        s.wait(3);
        assert!(to.read(0, len) == from.read(0, len));
        to.set(0);
        s.send(Request::read(4, if len == 0 { NOTHING } else { to.sge(0, len) }, &from, 0));
        s.wait(4);
        assert!(s.got.drain(..).all(|c| c.status == WcStatus::Success));
        assert!(to.read(0, len) == from.read(0, len));
    }
}

/// Fifty pairs whose ends share two queues: completions carry the number of their own.
pub fn many_queue_pairs_on_one_queue(bed: &Bed) {
    const PAIRS: usize = 50;
    let caps = QpCaps { send_depth: 16, recv_depth: 16, ..QpCaps::default() };
    let mut p = bed.pair_with(caps);
    let (mut qa, mut qb) = (vec![p.a.qp], vec![p.b.qp]);
    for _ in 1..PAIRS {
        let a = p.a.cq.create_qp(&caps, p.a.stats.clone()).expect("create_qp");
        let b = p.b.cq.create_qp(&caps, p.b.stats.clone()).expect("create_qp");
        let (ea, eb) = (p.a.cq.qp(a).endpoint(), p.b.cq.qp(b).endpoint());
        p.a.cq.qp(a).connect(&eb).expect("connect");
        p.b.cq.qp(b).connect(&ea).expect("connect");
        qa.push(a);
        qb.push(b);
    }
    let nums: Vec<u32> = qb.iter().map(|&q| p.b.cq.qp(q).qp_num()).collect();
    let mut sorted = nums.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), PAIRS, "queue pair numbers of one queue differ");
    let from = p.a.open_memory(PAIRS * 100);
    let to = p.b.open_memory(PAIRS * 100);
    from.pattern(1);
    for round in 0..5u32 {
        to.set(0);
        for i in 0..PAIRS {
            let sge = to.sge(i * 100, 100);
            p.b.cq.qp(qb[i]).post_recv(&railhead::fabric::RecvWr { wr_id: i as u64, sge }).expect("post_recv");
            let request = Request::send_imm(i as u64, from.sge(i * 100, 100), round * 1000 + i as u32);
            p.a.cq.qp(qa[i]).post_send(&[request]).expect("post_send");
        }
        p.wait(PAIRS, PAIRS);
        for c in p.b.got.drain(..) {
            assert_eq!((c.status, c.qp_num, c.imm), (WcStatus::Success, nums[c.wr_id as usize], Some(round * 1000 + c.wr_id as u32)));
        }
        assert!(p.a.got.drain(..).all(|c| c.status == WcStatus::Success));
        assert!(to.all() == from.all());
    }
    // The death of one is no other's.
    p.b.cq.destroy_qp(qb.remove(7));
    if bed.waives("connect::many_queue_pairs_on_one_queue, the idle end", SILENT) {
        p.a.cq.qp(qa[7]).post_send(&[Request::write(7, NOTHING, &to, 0)]).expect("post_send");
    }
    p.until("one in ERROR", |p| p.a.cq.qp(qa[7]).state() == QpState::Error);
    qa.remove(7);
    for q in &qa {
        assert_eq!(p.a.cq.qp(*q).state(), QpState::Rts);
    }
    p.ping();
}

/// One queue with pairs to different peers: a slow peer does not stop the other.
pub fn two_peers_on_one_queue(bed: &Bed) {
    let device = bed.device();
    let caps = QpCaps::default();
    let mut p = bed.pair_on(&device, caps);
    let mut slow = Side::new("slow", &device, caps, false);
    let to_slow = p.a.cq.create_qp(&caps, p.a.stats.clone()).expect("create_qp");
    let (ea, es) = (p.a.cq.qp(to_slow).endpoint(), slow.cq.qp(slow.qp).endpoint());
    p.a.cq.qp(to_slow).connect(&es).expect("connect");
    slow.cq.qp(slow.qp).connect(&ea).expect("connect");
    let from = p.a.open_memory(1 << 20);
    let to = slow.open_memory(1 << 20);
    from.pattern(3);
    for i in 0..20 {
        p.a.cq.qp(to_slow).post_send(&[Request::write(500 + i, from.sge(0, 1 << 20), &to, 0)]).expect("post_send");
    }
    for _ in 0..50 {
        p.ping();
    }
    assert!(p.a.got.iter().all(|c| c.wr_id >= 500 && c.status == WcStatus::Success));
    let end = Instant::now() + PATIENCE;
    while p.a.got.len() < 20 {
        p.a.poll();
        slow.poll();
        assert!(Instant::now() < end, "the slow peer's work: {:?}", p.a.got);
    }
    assert!(p.a.got.iter().all(|c| c.status == WcStatus::Success));
}

/// A side that polls no more after its last completion holds nobody up: the other's requests that it has answered all complete.
pub fn peer_stops_polling(bed: &Bed) {
    for len in [1, 64, 65, 8192, 300_000] {
        for n in [1usize, 2, 50] {
            let mut p = bed.pair();
            let from = p.a.open_memory(len * n);
            let to = p.b.open_memory(len * n);
            from.pattern(len as u64);
            for i in 0..n {
                p.b.recv(i as u64, to.sge(i * len, len));
                p.a.send(SendWr { signaled: i + 1 == n, ..Request::send(i as u64, from.sge(i * len, len)) });
            }
            p.wait(0, n);
            assert!(p.b.got.iter().all(|c| c.status == WcStatus::Success && c.opcode == WcOpcode::Recv));
            assert!(to.all() == from.all());
            // b is never polled again.
            p.a.wait(1);
            p.a.take_ok(n as u64 - 1);
        }
    }
}

/// Queues are independent: eight threads with a pair each, on one device, while another registers memory.
pub fn pairs_in_many_threads(bed: &Bed) {
    let device = bed.device();
    std::thread::scope(|scope| {
        for seed in 0..8u64 {
            let device = &device;
            scope.spawn(move || {
                let mut p = bed.pair_on(device, QpCaps::default());
                let from = p.a.open_memory(200_000);
                let to = p.b.open_memory(200_000);
                for i in 0..100u64 {
                    let len = [8, 64, 1000, 10_000, 200_000][i as usize % 5];
                    from.pattern(seed * 1000 + i);
                    p.b.recv(1, NOTHING);
                    p.a.send(Request::write_imm(2, from.sge(0, len), &to, 0, i as u32));
                    p.wait(1, 1);
                    p.a.take_ok(2);
                    assert_eq!(p.b.take_ok(1).imm, Some(i as u32));
                    assert!(to.read(0, len) == from.read(0, len));
                }
            });
        }
    });
}
