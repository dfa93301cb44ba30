//! Grants, both sides of them in one process.

use super::*;
use crate::fabric::soft::shm::layout::Geometry;

fn grants(peer: Option<i32>) -> Grants {
    let peer = peer.and_then(Process::find);
    let len = Geometry::new(64 * 1024).unwrap().len();
    Grants::new(Arc::new(Shm::create("railhead-test", len).unwrap()), 0, peer)
}

fn parts(grants: &mut Grants, desc: u64) -> Vec<CopyPart> {
    std::iter::from_fn(|| match grants.poll(desc) {
        CopyProgress::Part(part) => Some(part),
        _ => None,
    })
    .collect()
}

#[test]
fn either_side_alone_gets_all_of_it() {
    for len in [16 * 1024, 65_536, 100_001, 1 << 20, (1 << 20) + 1, 1 << 30] {
        for waiting in [1, 8] {
            let mut grants = grants(None);
            grants.open(7, 9, 0x1000, len, waiting);
            let mut own = parts(&mut grants, 7);
            own.reverse();
            assert_eq!(own.iter().fold(0, |at, p| if p.offset == at { at + p.len } else { 0 }), len);
            assert_eq!(grants.poll(7), CopyProgress::Done(0));
            grants.close(7);
            grants.open(8, 9, 0x2000, len, waiting);
            let leases = grants.leases.clone();
            let grant = leases.grant(0);
            let mut at = 0;
            while let Claim::Part(part, to) = claim(grant, 8, len) {
                assert_eq!((part.offset, to), (at, 0x2000));
                at += part.len;
                assert!(!grants.leases.stop(7, tag(8)), "another slot");
                part_written(grant, 8);
            }
            assert_eq!(at, len);
            assert_eq!(grants.poll(8), CopyProgress::Done(len));
        }
    }
}

#[test]
fn only_short_ones_of_many_are_left_whole() {
    for (len, waiting, wanted) in [
        (64 << 10, 1, 2),
        (64 << 10, 4, 1),
        (256 << 10, 4, 1),
        ((256 << 10) + 1, 4, 2),
        (512 << 10, 1, 2),
        (512 << 10, 4, 2),
        (1 << 20, 4, 2),
        (2 << 20, 4, 4),
    ] {
        let mut grants = grants(None);
        grants.open(0, 1, 0, len, waiting);
        assert_eq!(parts(&mut grants, 0).len(), wanted, "{len} bytes, {waiting} of them");
    }
}

/// Two threads copy the same descriptors, each byte exactly once, over many laps of the grants.
#[test]
fn two_sides_take_each_part_once() {
    const LEN: u32 = 200_000;
    const DESCS: u64 = 20_000;
    let mut grants = grants(None);
    let leases = grants.leases.clone();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut desc, mut all) = (0, 0u64);
            while desc < DESCS && !stop.load(Ordering::Relaxed) {
                let grant = leases.grant(desc as usize % GRANTS);
                match claim(grant, desc, LEN) {
                    Claim::NotOpen => std::thread::yield_now(),
                    Claim::Over => desc += 1,
                    Claim::Part(part, to) => {
                        assert_eq!(to, desc, "the target of another descriptor");
                        all += u64::from(part.len);
                        part_written(grant, desc);
                    }
                }
            }
            println!("the requester wrote {all} bytes");
        });
        for desc in 0..DESCS {
            while grants.next(desc) < (desc + GRANTS as u64).min(DESCS) {
                let next = grants.next(desc);
                grants.open(desc, 1, next, LEN, desc % 8);
            }
            let mut own = 0;
            loop {
                match grants.poll(desc) {
                    CopyProgress::Part(part) => own += part.len,
                    CopyProgress::Waits => std::thread::yield_now(),
                    CopyProgress::Done(theirs) => break assert_eq!(own + theirs, LEN),
                    other => panic!("{desc}: {other:?}"),
                }
            }
            grants.close(desc);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_part_that_the_requester_cannot_write_is_taken_over() {
    let mut grants = grants(None);
    grants.open(0, 9, 0, 1 << 20, 1);
    let leases = grants.leases.clone();
    let grant = leases.grant(0);
    let Claim::Part(not_written, _) = claim(grant, 0, 1 << 20) else { panic!("nothing to take") };
    assert_eq!(grants.poll(0), CopyProgress::Part(CopyPart { offset: 512 * 1024, len: 512 * 1024 }));
    assert_eq!(grants.poll(0), CopyProgress::Waits);
    part_not_written(grant, 0);
    assert_eq!(grants.poll(0), CopyProgress::Part(not_written));
    assert_eq!(grants.poll(0), CopyProgress::Done(0));
}

#[test]
fn a_short_part_taken_over_is_not_counted_as_a_long_one() {
    const LEN: u32 = (1 << 20) + 4096;
    let mut grants = grants(None);
    grants.open(0, 9, 0, LEN, 1);
    let leases = grants.leases.clone();
    let grant = leases.grant(0);
    let mut written_bytes = 0;
    while let Claim::Part(part, _) = claim(grant, 0, LEN) {
        if part.len == PART_MAX {
            part_written(grant, 0);
            written_bytes += part.len;
        }
    }
    part_not_written(grant, 0);
    assert_eq!(grants.poll(0), CopyProgress::Part(CopyPart { offset: 1 << 20, len: 4096 }));
    assert_eq!((grants.poll(0), written_bytes), (CopyProgress::Done(1 << 20), 1 << 20));
}

#[test]
fn a_withdrawn_grant_waits_for_the_part_being_written_and_gives_out_no_other() {
    let mut grants = grants(Some(std::process::id() as i32));
    grants.open(0, 77, 0, 4 << 20, 1);
    let leases = grants.leases.clone();
    let grant = leases.grant(0);
    let Claim::Part(..) = claim(grant, 0, 4 << 20) else { panic!("nothing to take") };
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        end_peer_writes(78);
        end_peer_writes(77);
        sender.send(()).unwrap();
    });
    while grant.claims.load(Ordering::Relaxed) & WITHDRAWN == 0 {
        std::thread::yield_now();
    }
    assert!(receiver.try_recv().is_err(), "withdrawn under a writer");
    assert!(matches!(claim(grant, 0, 4 << 20), Claim::Over));
    assert_eq!(grants.poll(0), CopyProgress::Withdrawn);
    part_written(grant, 0);
    receiver.recv().unwrap();
    thread.join().unwrap();
}

#[test]
fn a_dead_writer_is_not_waited_for() {
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let mut grants = grants(Some(child.id() as i32));
    grants.open(0, 1, 0, 1 << 20, 1);
    let leases = grants.leases.clone();
    assert!(matches!(claim(leases.grant(0), 0, 1 << 20), Claim::Part(..)));
    child.kill().unwrap();
    child.wait().unwrap();
    grants.withdraw();
}

#[test]
fn a_writer_that_has_closed_is_not_waited_for() {
    let mut grants = grants(Some(std::process::id() as i32));
    grants.open(0, 1, 0, 1 << 20, 1);
    let leases = grants.leases.clone();
    assert!(matches!(claim(leases.grant(0), 0, 1 << 20), Claim::Part(..)));
    assert!(grants.stop());
    leases.control().sides[0].closed.store(1, Ordering::SeqCst);
    grants.withdraw();
}

#[test]
fn a_writer_that_spoilt_its_count_is_not_waited_for() {
    let mut grants = grants(Some(std::process::id() as i32));
    grants.open(0, 1, 0, 1 << 20, 1);
    let leases = grants.leases.clone();
    assert!(matches!(claim(leases.grant(0), 0, 1 << 20), Claim::Part(..)));
    for done in [1, tag(1), u64::MAX, tag(0) | NOT_WRITTEN, tag(0) | 2] {
        leases.grant(0).done.store(done, Ordering::Relaxed);
        assert!(!grants.stop(), "{done:#x}");
    }
    grants.withdraw();
}

#[test]
fn impossible_values_are_noticed_and_never_waited_for() {
    for (claims, done) in
        [(u64::MAX, 0), (0, 0), (tag(0) | 5, 0), (tag(0) | 3 << RESPONDER_SHIFT, 0), (tag(1) | 1, 0), (tag(0), tag(0) | 9)]
    {
        let mut grants = grants(Some(std::process::id() as i32));
        grants.open(0, 1, 0, 1 << 20, 1);
        let leases = grants.leases.clone();
        let grant = leases.grant(0);
        grant.claims.store(claims, Ordering::Relaxed);
        grant.done.store(done, Ordering::Relaxed);
        assert_eq!(grants.poll(0), CopyProgress::ProtocolError, "{claims:#x} {done:#x}");
        grants.withdraw();
    }
    // And by a requester: nothing it takes lies outside of its own message.
    for (part, parts) in [(0, u64::MAX), (u64::MAX, 9), (u64::MAX / 2, 9), (1 << 20, 9), (7, 0)] {
        let mut grants = grants(None);
        grants.open(0, 1, 0, 1 << 20, 1);
        let leases = grants.leases.clone();
        let grant = leases.grant(0);
        grant.part.store(part, Ordering::Relaxed);
        grant.parts.store(parts, Ordering::Relaxed);
        for _ in 0..3 {
            if let Claim::Part(cut, _) = claim(grant, 0, 1 << 20) {
                assert!(cut.offset as u64 + u64::from(cut.len) <= 1 << 20);
                part_written(grant, 0);
            }
        }
    }
}

#[test]
fn what_was_done_four_billion_descriptors_ago_is_not_taken_for_new() {
    let mut grants = grants(None);
    grants.open(5, 1, 0, 1 << 20, 1);
    let leases = grants.leases.clone();
    assert!(matches!(claim(leases.grant(5), 5, 1 << 20), Claim::Part(..)));
    part_not_written(leases.grant(5), 5);
    grants.withdraw();
    assert!(!grants.fits(5 + (1 << 32), 0, 1 << 20) && grants.fits(6 + (1 << 32), 0, 1 << 20));
}

#[test]
fn overlapping_targets_are_not_open_at_once() {
    let mut grants = grants(None);
    assert!(grants.fits(0, 1000, 100));
    grants.open(0, 1, 1000, 100, 1);
    assert!(!grants.fits(0, 1099, 10) && !grants.fits(0, 900, 101) && !grants.fits(0, 1010, 10) && !grants.fits(0, 0, u32::MAX));
    assert!(grants.fits(0, 1100, 10) && grants.fits(0, 900, 100));
    for i in 1..GRANTS as u64 {
        grants.open(0, 1, i * 10_000, 100, 1);
    }
    assert!(!grants.fits(0, 1 << 40, 1), "no room");
    grants.close(0);
    assert!(grants.fits(1, 1000, 100));
}

#[test]
fn a_later_copy_waits_for_what_was_passed_over_at_its_place() {
    let mut grants = grants(None);
    grants.pass(0, 0x2000, 16);
    for (addr, len, apart) in
        [(0x1000, 0x1000, true), (0x1000, 0x1001, false), (0x2000, 16, false), (0x200f, 0x1000, false), (0x2010, 0x1000, true)]
    {
        assert_eq!(grants.fits(0, addr, len), apart, "{len:#x} bytes at {addr:#x}");
    }
    grants.close(0);
    assert!(grants.fits(1, 0x2000, 16), "it is in place");
}

/// Though its slot had a copy before, and one beside it is withdrawn.
#[test]
fn what_was_passed_over_is_nobody_s_to_claim_or_to_wait_for() {
    let mut grants = grants(None);
    let leases = grants.leases.clone();
    let lap = GRANTS as u64;
    for desc in 0..lap {
        grants.open(desc, 9, 0x1000, 1 << 20, 1);
        parts(&mut grants, desc);
        grants.close(desc);
    }
    grants.pass(lap, 0x1000, 16);
    grants.open(lap, 9, 0x2000, 1 << 20, 1);
    assert!(matches!(claim(leases.grant(0), lap, 1 << 20), Claim::NotOpen));
    assert_eq!(grants.poll(lap), CopyProgress::Done(0));
    assert!(matches!(claim(leases.grant(1), lap + 1, 1 << 20), Claim::Part(..)));
    assert!(grants.stop(), "a part of the second one is being written");
    part_written(leases.grant(1), lap + 1);
    assert!(!grants.stop());
    grants.withdraw();
    assert!(matches!(claim(leases.grant(1), lap + 1, 1 << 20), Claim::Over));
    assert!(!grants.is_open(lap));
}
