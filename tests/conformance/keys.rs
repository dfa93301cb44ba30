//! Keys, bounds and access: nothing is touched that was not registered for it, on either side.

use railhead::fabric::{Access, Opcode, Payload, QpState, SendWr, Sge, WcStatus};

use super::bed::{Bed, Mem, NOTHING, Pair, Request, SILENT, Wire};

/// Lengths that take different ways: inside a descriptor, ring, bulk.
const LENGTHS: [usize; 4] = [8, 64, 5000, 2_000_000];

/// The three requests that name the peer's memory, and inline.
const KINDS: [Kind; 4] = [Kind::Write, Kind::Inline, Kind::WriteImm, Kind::Read];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Write,
    Inline,
    WriteImm,
    Read,
}

/// Sends one request to (`addr`, `rkey`) with an innocent one before and behind it, and demands the contract's answer.
fn refused(bed: &Bed, what: &str, kind: Kind, len: usize, target: impl FnOnce(&mut Pair, &Mem) -> (u64, u32, Option<Mem>)) {
    if kind == Kind::Inline && len > 64 {
        return;
    }
    let mut p = bed.pair();
    let local = p.a.open_memory(len.max(64));
    let victim = p.b.open_memory(len + 64);
    local.pattern(1);
    victim.pattern(2);
    let before = (local.all(), victim.all());
    let (addr, rkey, keep) = target(&mut p, &victim);
    let kept = keep.as_ref().map(Mem::all);
    let sentinel = p.b.open_memory(64);
    sentinel.set(0);
    p.b.recv(50, NOTHING);
    p.b.recv(51, NOTHING);
    p.a.send(SendWr { signaled: false, ..Request::write(1, local.sge(0, 8), &sentinel, 0) });
    let inline = local.read(0, len.min(64));
    let request = match kind {
        Kind::Write => Request::write(2, local.sge(0, len), &victim, 0),
        Kind::Inline => SendWr { payload: Payload::Inline(&inline), ..Request::write(2, NOTHING, &victim, 0) },
        Kind::WriteImm => Request::write_imm(2, local.sge(0, len), &victim, 0, 3),
        Kind::Read => Request::read(2, local.sge(0, len), &victim, 0),
    };
    p.a.send(SendWr { remote_addr: addr, rkey, ..request });
    p.a.send(Request::write(3, local.sge(0, 8), &sentinel, 32));
    p.wait(2, 2);
    let (bad, behind) = (p.a.take(), p.a.take());
    let context = format!("{what}: {kind:?} of {len}");
    assert_eq!((bad.wr_id, bad.status), (2, WcStatus::RemAccessErr), "{context}");
    assert_eq!((behind.wr_id, behind.status), (3, WcStatus::WrFlushErr), "{context}");
    for id in [50, 51] {
        let c = p.b.take();
        // Soft-RoCE has taken the receive when it looks at the key, and reports it as what went wrong.
        let taken = bed.wire == Wire::Nic && kind == Kind::WriteImm && id == 50 && c.status == WcStatus::RemAccessErr;
        assert!(c.wr_id == id && (c.status == WcStatus::WrFlushErr || taken), "{context}: the receiver's outstanding receives: {c:?}");
    }
    p.both_fail();
    assert!(p.a.cq.qp(p.a.qp).error().is_some_and(|e| !e.is_empty()), "{context}: why?");
    p.settle();
    assert!((local.all(), victim.all()) == before, "{context}: memory was touched");
    assert!(keep.as_ref().map(Mem::all) == kept, "{context}: memory was touched");
    assert!(sentinel.read(0, 8) == local.read(0, 8), "{context}: what was before it must be performed");
    assert!(sentinel.read(32, 8) == [0; 8], "{context}: what was behind it must not");
}

fn each(bed: &Bed, what: &str, mut target: impl FnMut(&mut Pair, &Mem) -> (u64, u32, Option<Mem>)) {
    for kind in KINDS {
        for len in LENGTHS {
            refused(bed, what, kind, len, &mut target);
        }
    }
}

/// Keys that name nothing.
pub fn bad_remote_key(bed: &Bed) {
    each(bed, "zero key", |_, v| (v.addr(0), 0, None));
    each(bed, "all ones", |_, v| (v.addr(0), u32::MAX, None));
    for bit in [0, 1, 7, 8, 15, 16, 24, 31] {
        refused(bed, "one bit wrong", Kind::Write, 64, |_, v| (v.addr(0), v.rkey() ^ 1 << bit, None));
    }
}

/// The key of a region that is gone, also when its place is taken by another region over the same memory.
pub fn stale_remote_key(bed: &Bed) {
    let stale = |p: &mut Pair, v: &Mem| {
        let mut gone = p.b.open_memory(v.len());
        let (addr, rkey) = (gone.addr(0), gone.rkey());
        gone.deregister();
        (addr, rkey, Some(gone))
    };
    each(bed, "stale key", stale);
    each(bed, "stale key of a reused place", |p, v| {
        let rkey = {
            let memory = v.memory();
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
            let gone = p.b.domain.register(memory, access).expect("register");
            let rkey = gone.rkey();
            drop(gone);
            // Whatever is freed first is reused first.
            let again = p.b.domain.register(memory, access).expect("register");
            assert_ne!(again.rkey(), rkey, "a key was reused at once");
            std::mem::forget(again);
            rkey
        };
        (v.addr(0), rkey, None)
    });
}

/// A peer that was told of one region guesses at the keys of those registered beside it, of which it knows the addresses.
pub fn guessed_remote_key(bed: &Bed) {
    if bed.wire == Wire::Nic {
        // Its keys are the NIC's.
        return;
    }
    for kind in [Kind::Write, Kind::Read] {
        for guess in [1, -1, 2, -2, 1 << 20, -1 << 20, (1 << 20) + 1, (1 << 20) - 1] {
            refused(bed, "guessed key", kind, 64, |p, _| {
                let told = p.b.open_memory(64);
                let (key, beside) = (told.rkey(), p.b.open_memory(64));
                std::mem::forget(told);
                (beside.addr(0), key.wrapping_add_signed(guess), Some(beside))
            });
        }
    }
}

/// One byte below, one byte above, far away, and around the end of the address space.
pub fn bad_remote_bounds(bed: &Bed) {
    each(bed, "one byte below", |_, v| (v.addr(0) - 1, v.rkey(), None));
    each(bed, "one byte above", |_, v| (v.addr(65), v.rkey(), None));
    each(bed, "behind", |_, v| (v.addr(v.len()), v.rkey(), None));
    each(bed, "another region's address", |p, v| {
        let other = p.b.open_memory(v.len());
        (other.addr(0), v.rkey(), Some(other))
    });
    each(bed, "NULL", |_, v| (0, v.rkey(), None));
    each(bed, "wraps", |_, v| (u64::MAX - 3, v.rkey(), None));
    each(bed, "last byte wraps", |_, v| (u64::MAX, v.rkey(), None));
}

/// A region registered for the other thing.
pub fn bad_remote_access(bed: &Bed) {
    for len in LENGTHS {
        for (access, kinds) in [
            (Access::LOCAL_WRITE, &KINDS[..]),
            (Access::empty(), &KINDS[..]),
            (Access::LOCAL_WRITE | Access::REMOTE_READ, &KINDS[..3]),
            (Access::LOCAL_WRITE | Access::REMOTE_WRITE, &KINDS[3..]),
        ] {
            for &kind in kinds {
                refused(bed, "access", kind, len, |p, v| {
                    let other = p.b.memory(v.len(), access);
                    (other.addr(0), other.rkey(), Some(other))
                });
            }
        }
    }
}

/// Local keys and bounds of a send request: the requester's own error, found without the peer's memory being touched.
pub fn bad_local_key(bed: &Bed) {
    let alone = bed.waives("keys::bad_local_key, the peer's end", SILENT);
    let by_packet = bed.waives("keys::bad_local_key, memory of long requests", "a NIC sends, or stores, the packets before the bad byte");
    for opcode in [Opcode::Send, Opcode::Write, Opcode::WriteWithImm, Opcode::Read] {
        for len in [8usize, 64, 5000, 2_000_000] {
            for case in 0..6 {
                let mut p = bed.pair();
                let local = p.a.open_memory(len);
                let to = p.b.open_memory(len);
                local.pattern(1);
                to.pattern(2);
                p.b.recv(9, to.sge(0, len));
                let good = local.sge(0, len);
                let sge = match case {
                    0 => Sge { lkey: 0, ..good },
                    1 => Sge { lkey: good.lkey ^ 0x100, ..good },
                    2 => Sge { addr: good.addr - 1, ..good },
                    3 => Sge { addr: good.addr + 1, ..good },
                    4 => Sge { addr: u64::MAX - 1, ..good },
                    _ => {
                        let gone = p.a.open_memory(len);
                        gone.sge(0, len)
                    }
                };
                p.a.send(SendWr { opcode, payload: Payload::Sge(sge), ..Request::write(1, NOTHING, &to, 0) });
                p.a.send(Request::write(2, local.sge(0, 8), &to, 0));
                p.wait(2, usize::from(!alone));
                let (first, second) = (p.a.take(), p.a.take());
                assert!(
                    first.wr_id == 1 && bed.own_error(first.status, WcStatus::LocProtErr),
                    "{opcode:?} of {len}, case {case}: {first:?}"
                );
                assert_eq!((second.wr_id, second.status), (2, WcStatus::WrFlushErr), "{opcode:?} of {len}, case {case}");
                assert_eq!(p.a.state(), QpState::Error);
                if !alone {
                    let flushed = p.b.take();
                    assert_eq!((flushed.wr_id, flushed.status), (9, WcStatus::WrFlushErr), "{opcode:?} of {len}, case {case}");
                    p.both_fail();
                }
                let whole = !by_packet || len <= 4096;
                assert!(!whole || local.all() == super::bed::pattern(1, len), "{opcode:?} of {len}, case {case}: local memory was touched");
                // What is behind a READ may be performed before the READ's response finds out.
                assert!(
                    opcode == Opcode::Read || !whole || to.all() == super::bed::pattern(2, len),
                    "{opcode:?} of {len}, case {case}: the peer's memory was touched"
                );
            }
        }
    }
}

/// A receive whose own memory is not valid fails when a SEND meets it: a local error there, an operation error at the sender.
pub fn bad_receive_key(bed: &Bed) {
    let by_packet = bed.waives("keys::bad_receive_key, memory of long messages", "a NIC stores the packets before the bad byte");
    for len in LENGTHS {
        for case in 0..3 {
            let mut p = bed.pair();
            let local = p.a.open_memory(len);
            let mut to = p.b.open_memory(len);
            let read_only = p.b.memory(len, Access::REMOTE_READ);
            to.set(0);
            read_only.set(0);
            let sge = match case {
                0 => Sge { lkey: to.lkey() ^ 0x300, ..to.sge(0, len) },
                1 => Sge { addr: to.addr(0) + 1, ..to.sge(0, len) },
                _ => read_only.sge(0, len),
            };
            local.pattern(3);
            p.b.recv(1, sge);
            p.a.send(Request::send(2, local.sge(0, len)));
            p.wait(1, 1);
            let (sent, got) = (p.a.take(), p.b.take());
            assert!(got.wr_id == 1 && bed.own_error(got.status, WcStatus::LocProtErr), "{len}, case {case}: {got:?}");
            assert_eq!(sent.wr_id, 2);
            assert!(matches!(sent.status, WcStatus::RemOpErr), "{sent:?}");
            p.both_fail();
            to.deregister();
            let whole = !by_packet || len <= 4096;
            assert!(!whole || to.all().iter().chain(&read_only.all()).all(|&b| b == 0));
        }
    }
}

/// What one queue pair does wrong is no other's error, on the same completion queue or not.
pub fn foreign_qp_keeps_working(bed: &Bed) {
    let device = bed.device();
    let mut good = bed.pair_on(&device, Default::default());
    let mut bad = bed.pair_on(&device, Default::default());
    let local = bad.a.open_memory(64);
    let to = bad.b.open_memory(64);
    good.ping();
    bad.a.send(SendWr { rkey: to.rkey() ^ 1, ..Request::write(1, local.sge(0, 64), &to, 0) });
    bad.both_fail();
    good.ping();
}
