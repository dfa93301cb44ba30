//! WRITEs to memory that the peer maps: it copies the bytes by itself, and all else is as for other memory.

use railhead::fabric::{Access, WcStatus};

use super::bed::{Bed, Mem, NOTHING, Pair, Request, received, sent};

/// Bytes that went by mapped memory, in the order of `sent` and `received`.
const MAPPED: usize = 1;
const LEN: usize = 100_000;

/// Writes all of `from`, and checks it; the bytes that were sent and received by mapped memory for it.
#[track_caller]
fn moved(p: &mut Pair, from: &Mem, to: &Mem) -> (u64, u64) {
    let before = (sent(&p.a.stats), received(&p.b.stats));
    p.b.recv(1, NOTHING);
    p.a.send(Request::write_imm(2, from.sge(0, from.len()), to, 0, 5));
    p.wait(1, 1);
    p.a.take_ok(2);
    assert_eq!(p.b.take_ok(1).imm, Some(5));
    assert!(to.read(0, from.len()) == from.all());
    (sent(&p.a.stats)[MAPPED] - before.0[MAPPED], received(&p.b.stats)[MAPPED] - before.1[MAPPED])
}

/// A pair, with memory to write from, and memory whose key the requester has used, so that it may know it by now.
fn known(bed: &Bed) -> (Pair, Mem, Mem) {
    let mut p = bed.pair();
    // Private, so that nothing else is mapped.
    let (from, to) = (Mem::new(&p.a.domain, LEN, Access::LOCAL_WRITE), p.b.open_memory(LEN));
    from.pattern(1);
    assert_eq!(moved(&mut p, &from, &to), (0, 0), "it cannot know");
    p.settle();
    (p, from, to)
}

/// The first WRITE with a key is moved like any other; then the requester has the memory, and copies into it.
pub fn once_the_key_is_known(bed: &Bed) {
    let (mut p, from, to) = known(bed);
    for round in 2..10 {
        from.pattern(round);
        assert_eq!(moved(&mut p, &from, &to), (LEN as u64, LEN as u64), "round {round}");
    }
}

/// A WRITE whose bytes the responder moves is not overtaken by one that comes after it.
pub fn behind_what_the_peer_moves(bed: &Bed) {
    let (mut p, from, to) = known(bed);
    let small = Mem::new(&p.a.domain, 64, Access::LOCAL_WRITE);
    for round in 0..50u8 {
        from.pattern(u64::from(round));
        small.set(round);
        to.set(0xee);
        // The responder does not poll meanwhile.
        p.a.send(Request::write(1, small.sge(0, 24), &to, 0));
        p.a.send(Request::write(2, from.sge(0, LEN), &to, 0));
        p.a.send(Request::write(3, small.sge(0, 24), &to, 80));
        p.b.recv(1, NOTHING);
        p.a.send(Request::write_imm(4, NOTHING, &to, 0, 0));
        p.wait(4, 1);
        p.a.take_all_ok(1..5);
        p.b.take_ok(1);
        let mut expected = from.all();
        expected[80..104].fill(round);
        assert!(to.all() == expected, "round {round}");
    }
}

/// Where the responder maps the bytes as well, it copies them if it has nothing else to do, and the requester copies what comes behind them; WRITEs to one
/// memory stay in order.
pub fn either_side_copies_what_both_map(bed: &Bed) {
    let mut p = bed.pair();
    let [first, second] = [1, 2].map(|seed| {
        let from = p.a.open_memory(LEN);
        from.pattern(seed);
        from
    });
    let [one, other] = [&first, &second].map(|from| {
        let to = p.b.open_memory(LEN);
        assert_eq!(moved(&mut p, from, &to), (LEN as u64, LEN as u64), "out of what it maps");
        p.settle();
        to
    });
    for round in 0..20 {
        one.set(0xee);
        other.set(0xee);
        // The responder does not poll meanwhile.
        p.a.send(Request::write(1, first.sge(0, LEN), &one, 0));
        p.a.send(Request::write(2, second.sge(0, LEN), &other, 0));
        p.a.send(Request::write(3, second.sge(0, LEN), &one, 0));
        assert!(one.all().iter().all(|byte| *byte == 0xee), "round {round}: the responder copies");
        assert!(other.all() == second.all(), "round {round}: the requester copies");
        p.b.recv(1, NOTHING);
        p.a.send(Request::write_imm(4, NOTHING, &one, 0, 0));
        p.wait(4, 1);
        p.a.take_all_ok(1..5);
        p.b.take_ok(1);
        assert!(one.all() == second.all(), "round {round}: in order");
    }
}

/// That the requester has the memory mapped does not make a key good that is not: it may put bytes there, but no WRITE succeeds.
pub fn keys_and_bounds_are_the_owners(bed: &Bed) {
    let (mut p, from, to) = known(bed);
    p.a.send(Request::write(1, from.sge(0, 5000), &to, LEN - 4000));
    p.both_fail();
    assert_eq!(p.a.take().status, WcStatus::RemAccessErr, "beyond its end");

    let (mut p, from, mut to) = known(bed);
    let stale = Request::write(1, from.sge(0, 5000), &to, 0);
    to.deregister();
    p.a.send(stale);
    p.both_fail();
    assert_eq!(p.a.take().status, WcStatus::RemAccessErr, "deregistered");
}

/// A side maps 64 of a peer's: what lies in others is moved like any other memory.
pub fn more_than_is_mapped(bed: &Bed) {
    let mut p = bed.pair();
    let from = Mem::new(&p.a.domain, 10_000, Access::LOCAL_WRITE);
    let all: Vec<Mem> = (0..70).map(|_| p.b.open_memory(10_000)).collect();
    let mut placed = 0;
    for round in 0..2 {
        for to in &all {
            from.pattern(round);
            placed += moved(&mut p, &from, to).0;
            p.settle();
        }
    }
    assert_eq!(placed, 64 * 10_000);
}
