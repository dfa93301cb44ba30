//! Queues are finite: full is said and changes nothing, counters wrap, nobody is told what he did not ask for.

use railhead::base::config::CrossMemory;
use railhead::fabric::{Completion, PostError, QpCaps, QpState, RecvWr, SendWr, WcOpcode, WcStatus};

use super::bed::{Bed, NOTHING, Request};

/// A full send queue says so; nothing of the refused request happens; with one completion there is room again.
pub fn full_send_queue(bed: &Bed) {
    for depth in [1u32, 2, 3, 16, 100] {
        let mut p = bed.pair_with(QpCaps { send_depth: depth, recv_depth: depth, ..QpCaps::default() });
        let from = p.a.open_memory(64);
        let to = p.b.open_memory(64);
        for round in 0..4 {
            for i in 0..u64::from(depth) {
                p.a.send(Request::send(i, from.sge(0, 8)));
            }
            // All wait for a receive, so none can complete.
            p.settle();
            for _ in 0..3 {
                let result = p.a.cq.qp(p.a.qp).post_send(&[Request::write(99, from.sge(0, 8), &to, 0)]);
                assert_eq!(result, Err(PostError::Full), "depth {depth}, round {round}");
            }
            for i in 0..u64::from(depth) {
                p.b.recv(i, to.sge(8, 8));
            }
            p.wait(depth as usize, depth as usize);
            for i in 0..u64::from(depth) {
                p.a.take_ok(i);
                p.b.take_ok(i);
            }
            assert_eq!(to.read(0, 8), [0; 8], "a refused request was performed");
        }
        p.ping();
    }
}

/// A full receive queue says so, from INIT on.
pub fn full_receive_queue(bed: &Bed) {
    for depth in [1u32, 3, 64] {
        let mut p = bed.pair_with(QpCaps { recv_depth: depth, ..QpCaps::default() });
        let from = p.a.open_memory(64);
        for round in 0..4 {
            for i in 0..u64::from(depth) {
                p.b.recv(i, NOTHING);
            }
            let result = p.b.cq.qp(p.b.qp).post_recv(&RecvWr { wr_id: 99, sge: NOTHING });
            assert_eq!(result, Err(PostError::Full), "depth {depth}, round {round}");
            for i in 0..u64::from(depth) {
                p.a.send(Request::send(i, from.sge(0, 0)));
            }
            p.wait(depth as usize, depth as usize);
            for i in 0..u64::from(depth) {
                p.a.take_ok(i);
                p.b.take_ok(i);
            }
        }
    }
}

/// A batch is posted whole or not at all, whether room or one bad request is what is wrong.
pub fn batch_is_all_or_nothing(bed: &Bed) {
    let mut p = bed.pair_with(QpCaps { send_depth: 8, ..QpCaps::default() });
    let from = p.a.open_memory(64);
    let to = p.b.open_memory(1024);
    from.set(1);
    let write = |i: u64| Request::write(i, from.sge(0, 8), &to, i as usize * 8);
    let nine: Vec<SendWr<'_>> = (0..9).map(write).collect();
    assert_eq!(p.a.cq.qp(p.a.qp).post_send(&nine), Err(PostError::Full));
    let bytes = vec![0; p.a.cq.qp(p.a.qp).max_inline() + 1];
    let bad = [write(0), Request::write_inline(1, &bytes, &to, 0), write(2)];
    assert!(matches!(p.a.cq.qp(p.a.qp).post_send(&bad), Err(PostError::Invalid(_))));
    assert_eq!(p.a.cq.qp(p.a.qp).post_send(&[]), Ok(()));
    p.settle();
    assert!(p.a.got.is_empty());
    assert!(to.all().iter().all(|&b| b == 0), "part of a refused batch was performed");
    p.a.cq.qp(p.a.qp).post_send(&nine[..8]).expect("exactly full");
    p.wait(8, 0);
    p.a.take_all_ok(0..8);
    p.ping();
    assert_eq!(to.read(0, 64), [1; 64]);
    assert!(to.read(64, 960).iter().all(|&b| b == 0));
}

/// More requests than 16 bits count, and many laps of every ring, with a little and with a small bounce ring.
pub fn counters_wrap(bed: &Bed) {
    let mut p = bed.pair_with(QpCaps { send_depth: 128, recv_depth: 64, ..QpCaps::default() });
    let from = p.a.open_memory(64);
    let to = p.b.open_memory(64 * 64);
    const N: u64 = 150_000;
    let (mut posted, mut sent, mut got) = (0u64, 0u64, 0u64);
    for i in 0..64 {
        p.b.recv(i, to.sge(i as usize * 64, 64));
    }
    let end = std::time::Instant::now() + super::bed::PATIENCE;
    while got < N || sent < N {
        while posted < N {
            let bytes = posted.to_le_bytes();
            let request =
                SendWr { payload: railhead::fabric::Payload::Inline(&bytes), ..Request::send_imm(posted, from.sge(0, 8), posted as u32) };
            match p.a.cq.qp(p.a.qp).post_send(&[request]) {
                Ok(()) => posted += 1,
                Err(e) => {
                    assert_eq!(e, PostError::Full);
                    break;
                }
            }
        }
        p.poll();
        assert!(std::time::Instant::now() < end, "{posted} {sent} {got}");
        while let Some(c) = p.a.got.pop_front() {
            assert_eq!((c.wr_id, c.status), (sent, WcStatus::Success));
            sent += 1;
        }
        while let Some(c) = p.b.got.pop_front() {
            assert_eq!((c.wr_id, c.status, c.imm, c.byte_len), (got % 64, WcStatus::Success, Some(got as u32), 8));
            assert_eq!(to.read((got % 64) as usize * 64, 8), got.to_le_bytes());
            p.b.recv(got % 64, to.sge((got % 64) as usize * 64, 64));
            got += 1;
        }
    }
    // The bulk path: 64 MiB through rings of 64 KiB.
    let device = bed.device_with(|c| {
        c.cma = CrossMemory::Never;
        c.shm_bounce_kib = 64;
    });
    let mut p = bed.pair_on(&device, QpCaps { send_depth: 4, recv_depth: 4, ..QpCaps::default() });
    const LEN: usize = 1_000_003;
    let from = p.a.open_memory(LEN);
    let to = p.b.open_memory(LEN);
    for i in 0..64u64 {
        from.pattern(i + 1);
        p.b.recv(i, NOTHING);
        p.a.send(Request::write_imm(i, from.sge(0, LEN), &to, 0, 1));
        p.wait(1, 1);
        p.a.take_ok(i);
        p.b.take_ok(i);
        assert!(to.all() == from.all(), "message {i}");
    }
}

/// Success of an unsignaled request is never reported, and its place in the queue is free again once a later one is.
pub fn unsignaled(bed: &Bed) {
    let mut p = bed.pair_with(QpCaps { send_depth: 16, ..QpCaps::default() });
    let from = p.a.open_memory(64);
    let to = p.b.open_memory(64);
    for round in 0..500u64 {
        for _ in 0..15 {
            p.a.send(SendWr { signaled: false, ..Request::write(7, from.sge(0, 16), &to, 0) });
        }
        p.a.send(Request::write(round, from.sge(0, 16), &to, 0));
        p.wait(1, 0);
        let c = p.a.take_ok(round);
        assert_eq!(c.opcode, WcOpcode::Write);
        assert!(p.a.got.is_empty(), "{:?}", p.a.got);
    }
}

/// Failure is reported, asked for or not; so is the flush behind it.
pub fn unsignaled_failure_is_reported(bed: &Bed) {
    let mut p = bed.pair();
    let from = p.a.open_memory(64);
    let to = p.b.open_memory(64);
    let quiet = |request| SendWr { signaled: false, ..request };
    p.a.send(quiet(Request::write(1, from.sge(0, 16), &to, 0)));
    p.a.send(quiet(SendWr { rkey: to.rkey() ^ 1, ..Request::write(2, from.sge(0, 16), &to, 0) }));
    p.a.send(quiet(Request::write(3, from.sge(0, 16), &to, 0)));
    p.wait(2, 0);
    let got: Vec<_> = p.a.got.drain(..).map(|c| (c.wr_id, c.status)).collect();
    assert_eq!(got, [(2, WcStatus::RemAccessErr), (3, WcStatus::WrFlushErr)]);
    p.both_fail();
    assert_eq!(p.a.state(), QpState::Error);
}

/// A request that can wait is sent by polls alone, and in order with what is posted behind it.
pub fn what_can_wait_is_sent(bed: &Bed) {
    let mut p = bed.pair();
    let from = p.a.open_memory(64);
    let to = p.b.open_memory(64);
    for round in 0..20u64 {
        from.pattern(round);
        let quiet = SendWr { signaled: false, ..Request::write(1, from.sge(0, 64), &to, 0) };
        p.a.cq.qp(p.a.qp).post_held([quiet]).expect("post_held");
        if round % 2 == 0 {
            p.until("the bytes", |_| to.all() == from.all());
        } else {
            p.b.recv(round, NOTHING);
            p.a.send(Request::write_imm(round, NOTHING, &to, 0, 5));
            p.wait(1, 1);
            p.a.take_ok(round);
            p.b.take_ok(round);
            assert_eq!(to.all(), from.all());
        }
    }
}

/// The memory of a request that is done once it is sent is the caller's again: what it becomes then is not what arrives.
pub fn memory_of_what_is_sent_is_free(bed: &Bed) {
    const LEN: usize = 1 << 20;
    let mut p = bed.pair();
    let from = p.a.open_memory(LEN);
    let to = p.b.open_memory(LEN);
    for (round, len) in [8, 300, 70_000, LEN].into_iter().enumerate() {
        from.pattern(round as u64);
        let expected = from.read(0, len);
        p.b.recv(1, NOTHING);
        p.a.send(SendWr { when_sent: true, ..Request::write_imm(1, from.sge(0, len), &to, 0, 5) });
        p.wait(1, 0);
        p.a.take_ok(1);
        from.set(0xee);
        p.wait(0, 1);
        p.b.take_ok(1);
        assert!(to.read(0, len) == expected, "{len} bytes");
    }
}

/// `poll` never returns more than asked for, and what it keeps is not lost.
pub fn poll_takes_no_more_than_asked(bed: &Bed) {
    let mut p = bed.pair();
    let from = p.a.open_memory(64);
    let to = p.b.open_memory(64);
    for i in 0..100 {
        p.a.send(Request::write(i, from.sge(0, 8), &to, 0));
    }
    let blank = Completion { wr_id: u64::MAX, status: WcStatus::GeneralErr, opcode: WcOpcode::Send, byte_len: 0, imm: None, qp_num: 0 };
    let end = std::time::Instant::now() + super::bed::PATIENCE;
    let mut next = 0;
    while next < 100 {
        for size in [0usize, 1, 2, 3] {
            let mut out = [blank; 4];
            let n = p.a.cq.poll(&mut out[..size]);
            assert!(n <= size);
            for c in &out[..n] {
                assert_eq!((c.wr_id, c.status), (next, WcStatus::Success));
                next += 1;
            }
            assert!(out[n..].iter().all(|c| *c == blank), "written beyond what was returned");
        }
        p.b.poll();
        assert!(std::time::Instant::now() < end, "{next} of 100");
    }
    let num = p.a.cq.qp(p.a.qp).qp_num();
    p.a.send(Request::write(5, from.sge(0, 8), &to, 0));
    p.wait(1, 0);
    assert_eq!(p.a.take_ok(5).qp_num, num);
}
