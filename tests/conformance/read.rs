//! READ: the peer's memory comes here without the peer's doing.

use railhead::fabric::{Access, QpCaps, WcOpcode, WcStatus};

use super::bed::{Bed, NOTHING, Request, SILENT, pattern};

/// READs of many lengths, none included.
pub fn every_size(bed: &Bed) {
    let mut p = bed.pair();
    const MOST: usize = 5 << 20;
    let to = p.a.open_memory(MOST);
    let from = p.b.memory(MOST, Access::REMOTE_READ);
    from.pattern(1);
    for len in [0, 1, 7, 63, 64, 65, 1000, 4095, 4096, 4097, 8193, 65535, 65537, 1 << 20, (1 << 20) + 1, MOST] {
        to.set(0);
        p.a.send(Request::read(1, if len == 0 { NOTHING } else { to.sge(0, len) }, &from, MOST - len));
        p.wait(1, 0);
        let c = p.a.take_ok(1);
        assert_eq!((c.opcode, c.byte_len as usize), (WcOpcode::Read, len));
        assert!(to.read(0, len) == from.read(MOST - len, len), "READ of {len}");
        assert!(to.read(len, MOST - len).iter().all(|&b| b == 0), "behind a READ of {len}");
    }
}

/// Far more READs outstanding than a NIC allows at once: they queue, and complete in order.
pub fn many_outstanding(bed: &Bed) {
    let mut p = bed.pair_with(QpCaps { send_depth: 256, ..QpCaps::default() });
    const EACH: usize = 3000;
    let to = p.a.open_memory(200 * EACH);
    let from = p.b.open_memory(200 * EACH);
    for round in 0..4 {
        from.pattern(round + 1);
        to.set(0);
        for i in 0..200usize {
            p.a.send(Request::read(i as u64, to.sge(i * EACH, EACH), &from, i * EACH));
        }
        p.wait(200, 0);
        p.a.take_all_ok(0..200);
        assert!(to.all() == from.all(), "round {round}");
    }
}

/// A READ behind WRITEs sees them, and a WRITE behind a READ does not disturb it.
pub fn ordered_after_write(bed: &Bed) {
    let mut p = bed.pair();
    const LEN: usize = 200_000;
    let from = p.a.open_memory(LEN);
    let back = p.a.open_memory(LEN);
    let to = p.b.open_memory(LEN);
    for round in 1..20u64 {
        for len in [8, 64, 3000, LEN] {
            from.pattern(round);
            back.set(0);
            p.a.send(Request::write(1, from.sge(0, len), &to, 0));
            p.a.send(Request::read(2, back.sge(0, len), &to, 0));
            p.wait(2, 0);
            p.a.take_ok(1);
            p.a.take_ok(2);
            assert!(back.read(0, len) == pattern(round, LEN)[..len], "round {round}, {len} bytes");
        }
    }
}

/// The local region of a READ needs LOCAL_WRITE.
pub fn into_memory_that_may_not_be_written(bed: &Bed) {
    let mut p = bed.pair();
    let to = p.a.memory(4096, Access::REMOTE_READ);
    let from = p.b.open_memory(4096);
    to.set(0);
    from.pattern(5);
    p.a.send(Request::read(1, to.sge(0, 4096), &from, 0));
    p.wait(1, 0);
    let c = p.a.take();
    assert!(c.wr_id == 1 && bed.own_error(c.status, WcStatus::LocProtErr), "{c:?}");
    if !bed.waives("read::into_memory_that_may_not_be_written, the peer's end", SILENT) {
        p.both_fail();
    }
    assert!(to.all().iter().all(|&b| b == 0));
}
