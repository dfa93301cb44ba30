//! The receiver's side: where SENDs land, what consumes a receive, and what happens without one.

use railhead::fabric::{QpCaps, QpState, WcOpcode, WcStatus};

use super::bed::{Bed, NOTHING, Pair, Request, Side, Wire};

/// A SEND that does not fit is the receiver's length error and a failure at the sender; both queue pairs are in ERROR, and no byte
/// lies behind the receive.
pub fn send_longer_than_receive(bed: &Bed) {
    for (len, room) in [(1, 0), (64, 63), (65, 64), (4097, 4096), (300_000, 299_999), (2_000_000, 8)] {
        let mut p = bed.pair();
        let from = p.a.open_memory(len);
        let to = p.b.open_memory(len + 64);
        from.pattern(1);
        to.set(0);
        p.b.recv(1, to.sge(0, room));
        p.b.recv(2, to.sge(0, room));
        p.a.send(Request::send(3, from.sge(0, len)));
        p.wait(1, 2);
        let (first, second) = (p.b.take(), p.b.take());
        assert!(first.wr_id == 1 && bed.own_error(first.status, WcStatus::LocLenErr), "{len} into {room}: {first:?}");
        assert_eq!((second.wr_id, second.status), (2, WcStatus::WrFlushErr));
        let sent = p.a.take();
        assert_eq!(sent.wr_id, 3);
        assert!(matches!(sent.status, WcStatus::RemInvReqErr | WcStatus::RemOpErr), "{sent:?}");
        p.both_fail();
        assert!(to.read(room, len + 64 - room).iter().all(|&b| b == 0), "{len} into {room}: bytes behind the receive");
    }
}

/// The immediate comes out as it went in, whatever its bytes.
pub fn send_with_immediate(bed: &Bed) {
    let mut p = bed.pair();
    let from = p.a.open_memory(256);
    let to = p.b.open_memory(256);
    from.pattern(2);
    for imm in [0, 1, 0x0102_0304, 0xFF00_0000, 0x0000_00FF, u32::MAX] {
        for len in [0, 1, 64, 256] {
            p.b.recv(1, to.sge(0, 256));
            p.a.send(Request::send_imm(2, from.sge(0, len), imm));
            p.wait(1, 1);
            let c = p.b.take_ok(1);
            assert_eq!((c.opcode, c.imm, c.byte_len as usize), (WcOpcode::Recv, Some(imm), len));
            p.a.take_ok(2);
            assert!(to.read(0, len) == from.read(0, len));
        }
    }
}

/// With rnr_retry 7 a SEND waits as long as it takes, and what is behind it waits too.
pub fn rnr_waits_for_ever(bed: &Bed) {
    let mut p = bed.pair_with(QpCaps { min_rnr_timer_us: 1, ..QpCaps::default() });
    for len in [8, 100_000, 3_000_000] {
        let from = p.a.open_memory(len);
        let to = p.b.open_memory(2 * len);
        from.pattern(len as u64);
        to.set(0);
        p.a.send(Request::send(1, from.sge(0, len)));
        p.a.send(Request::write(2, from.sge(0, len), &to, len));
        for _ in 0..20_000 {
            p.poll();
        }
        assert!(p.a.got.is_empty(), "{:?}", p.a.got);
        assert!(to.all().iter().all(|&b| b == 0), "a WRITE overtook a SEND that waits");
        p.b.recv(3, to.sge(0, len));
        p.wait(2, 1);
        p.a.take_ok(1);
        p.a.take_ok(2);
        assert_eq!(p.b.take_ok(3).byte_len as usize, len);
        p.ping();
        assert!(to.read(0, len) == from.all() && to.read(len, len) == from.all());
    }
    if bed.waives("receive::rnr_waits_for_ever, the count", "a NIC keeps its RNR waits to itself") {
        return;
    }
    assert!(p.a.stats.get(railhead::base::stats::RailCounter::RnrWaits) + p.b.stats.get(railhead::base::stats::RailCounter::RnrWaits) > 0);
}

/// A SEND that waits for its receive says how far its sender was when it was posted. However far the other way has got since, and whatever
/// counts how far, that completes nothing and fails nothing.
pub fn a_long_wait_one_way_leaves_the_other_alone(bed: &Bed) {
    let mut p = bed.pair_with(QpCaps { send_depth: 64, ..QpCaps::default() });
    let (from, to) = (p.b.open_memory(8), p.a.open_memory(64));
    // Two wait: the second is looked at when the first has found its receive.
    for id in 0..2 {
        p.a.send(Request::send(id, to.sge(0, 8)));
    }
    p.settle();
    // A NIC counts by itself. A lap of ours would take an emulated one longer than RAILHEAD_FABRIC_TIMEOUT_S leaves the two.
    let lap: u64 = if bed.wire == Wire::Nic { 1 << 11 } else { 1 << 16 };
    let mut done = 0u64;
    while done < 2 * lap {
        // Short of a lap, nothing is accepted that the receiver has not seen.
        let ahead = if done % (lap / 2) == lap / 2 - 64 { 64 } else { 32 };
        for i in 0..ahead {
            p.b.send(Request::write(done + i, from.sge(0, 8), &to, 8));
        }
        if ahead == 64 {
            for _ in 0..100 {
                p.b.poll();
            }
            assert!(p.b.got.is_empty() || bed.wire != Wire::Shm, "completed without the responder, {done} done: {:?}", p.b.got);
        }
        p.wait(0, ahead as usize);
        p.b.take_all_ok(done..done + ahead);
        assert!(p.a.got.is_empty());
        done += ahead;
        if done == lap + lap / 2 {
            p.b.recv(7, from.sge(0, 8));
            p.wait(1, 1);
            p.a.take_ok(0);
            p.b.take_ok(7);
        }
    }
    p.b.recv(8, from.sge(0, 8));
    p.wait(1, 1);
    p.a.take_ok(1);
    p.b.take_ok(8);
    p.ping();
}

/// With a limit, the wait ends in an error at the requester alone: the responder did nothing wrong, and learns.
pub fn rnr_limit(bed: &Bed) {
    for (retry, with_imm) in [(0, false), (1, false), (3, true), (6, false)] {
        let mut p = bed.pair_with(QpCaps { rnr_retry: retry, min_rnr_timer_us: 10, ..QpCaps::default() });
        let from = p.a.open_memory(64);
        let to = p.b.open_memory(64);
        if with_imm {
            p.a.send(Request::write_imm(1, from.sge(0, 64), &to, 0, 1));
        } else {
            p.a.send(Request::send(1, from.sge(0, 64)));
        }
        p.a.send(Request::write(2, from.sge(0, 64), &to, 0));
        p.wait(2, 0);
        let (first, second) = (p.a.take(), p.a.take());
        assert_eq!((first.wr_id, first.status), (1, WcStatus::RnrRetryExcErr), "rnr_retry {retry}");
        assert_eq!((second.wr_id, second.status), (2, WcStatus::WrFlushErr));
        assert_eq!(p.a.state(), QpState::Error);
    }
    // Within the limit it is no error.
    let mut p = bed.pair_with(QpCaps { rnr_retry: 6, min_rnr_timer_us: 1_000_000, ..QpCaps::default() });
    let from = p.a.open_memory(64);
    let to = p.b.open_memory(64);
    p.a.send(Request::send(1, from.sge(0, 64)));
    p.settle();
    p.b.recv(2, to.sge(0, 64));
    p.wait(1, 1);
    p.a.take_ok(1);
    p.b.take_ok(2);
}

/// A WRITE_WITH_IMM needs a receive like a SEND does, and takes exactly one.
pub fn write_with_imm_waits_for_receive(bed: &Bed) {
    let mut p = bed.pair();
    let from = p.a.open_memory(4096);
    let to = p.b.open_memory(4096);
    from.pattern(8);
    for i in 0..5u64 {
        p.a.send(Request::write_imm(i, from.sge(0, 100), &to, i as usize * 100, i as u32));
    }
    p.settle();
    assert!(p.a.got.is_empty() && p.b.got.is_empty());
    for i in 0..5u64 {
        p.b.recv(10 + i, NOTHING);
        p.wait(1, 1);
        let c = p.b.take_ok(10 + i);
        assert_eq!((c.opcode, c.imm, c.byte_len), (WcOpcode::RecvRdmaWithImm, Some(i as u32), 100));
        p.a.take_ok(i);
        p.settle();
        assert!(p.a.got.is_empty() && p.b.got.is_empty(), "one receive served more than one");
        assert!(to.read(i as usize * 100, 100) == from.read(0, 100));
    }
}

/// WRITE_WITH_IMM leaves the memory of the receive alone; a SEND shorter than its receive leaves the rest alone.
pub fn receive_scatter_is_exact(bed: &Bed) {
    let mut p = bed.pair();
    let from = p.a.open_memory(4096);
    let (to, inbox) = (p.b.open_memory(4096), p.b.open_memory(4096));
    from.pattern(4);
    for len in [1, 64, 65, 4096] {
        inbox.set(7);
        p.b.recv(1, inbox.sge(0, 4096));
        p.a.send(Request::write_imm(2, from.sge(0, len), &to, 0, 1));
        p.wait(1, 1);
        p.b.take_ok(1);
        p.a.take_ok(2);
        assert!(inbox.all().iter().all(|&b| b == 7), "the receive of an immediate was written to");
        p.b.recv(3, inbox.sge(0, 4096));
        p.a.send(Request::send(4, from.sge(0, len)));
        p.wait(1, 1);
        p.b.take_ok(3);
        p.a.take_ok(4);
        assert!(inbox.read(len, 4096 - len).iter().all(|&b| b == 7), "behind a short SEND");
        assert!(inbox.read(0, len) == from.read(0, len));
    }
}

/// Any number of WRITEs leave the posted receives for the SENDs.
pub fn write_consumes_no_receive(bed: &Bed) {
    let mut p = bed.pair();
    let from = p.a.open_memory(4096);
    let to = p.b.open_memory(4096);
    p.b.recv(1, to.sge(0, 4096));
    for i in 0..300 {
        p.a.send(Request::write(i, from.sge(0, 8), &to, 8));
        p.wait(1, 0);
        p.a.take_ok(i);
    }
    assert!(p.b.got.is_empty());
    p.a.send(Request::send(5, from.sge(0, 16)));
    p.wait(1, 1);
    p.b.take_ok(1);
}

/// Receives may be posted from INIT on, and serve what comes after.
pub fn receives_posted_before_connect(bed: &Bed) {
    let device = bed.device();
    let mut p = Pair { a: Side::new("a", &device, QpCaps::default(), false), b: Side::new("b", &device, QpCaps::default(), false) };
    assert_eq!((p.a.state(), p.b.state()), (QpState::Init, QpState::Init));
    let from = p.a.open_memory(64);
    let to = p.b.open_memory(64 * 10);
    from.pattern(6);
    for i in 0..10 {
        p.b.recv(i, to.sge(i as usize * 64, 64));
    }
    p.connect();
    for i in 0..10 {
        p.a.send(Request::send(i, from.sge(0, 64)));
    }
    p.wait(10, 10);
    for i in 0..10 {
        p.b.take_ok(i);
        assert!(to.read(i as usize * 64, 64) == from.all());
    }
}
