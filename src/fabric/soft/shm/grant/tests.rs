//! Grants, both sides of them in one process.

use super::*;
use crate::fabric::soft::shm::layout::Geometry;

fn offers(peer: Option<i32>) -> Grants {
    let peer = peer.and_then(Process::find);
    let len = Geometry::new(64 * 1024).unwrap().len();
    Grants::new(Arc::new(Shm::create("railhead-test", len).unwrap()), 0, peer)
}

fn parts(offers: &mut Grants, desc: u64) -> Vec<Part> {
    std::iter::from_fn(|| match offers.progress(desc) {
        Progress::Part(part) => Some(part),
        _ => None,
    })
    .collect()
}

#[test]
fn either_side_alone_gets_all_of_it() {
    for len in [16 * 1024, 65_536, 100_001, 1 << 20, (1 << 20) + 1, 1 << 30] {
        for waiting in [1, 8] {
            let mut offers = offers(None);
            offers.offer(7, 9, 0x1000, len, waiting);
            let mut own = parts(&mut offers, 7);
            own.reverse();
            assert_eq!(own.iter().fold(0, |at, p| if p.offset == at { at + p.len } else { 0 }), len);
            assert_eq!(offers.progress(7), Progress::Done(0));
            offers.end(7);
            offers.offer(8, 9, 0x2000, len, waiting);
            let watched = offers.watched.clone();
            let grant = watched.grant(0);
            let mut at = 0;
            while let Taken::Part(part, to) = take(grant, 8, len) {
                assert_eq!((part.offset, to), (at, 0x2000));
                at += part.len;
                assert!(!offers.watched.refuse(7, tag(8)), "another slot");
                written(grant, 8);
            }
            assert_eq!(at, len);
            assert_eq!(offers.progress(8), Progress::Done(len));
        }
    }
}

/// Two threads copy the same descriptors, each byte exactly once, over many laps of the grants.
#[test]
fn two_sides_take_each_part_once() {
    const LEN: u32 = 200_000;
    const DESCS: u64 = 20_000;
    let mut offers = offers(None);
    let watched = offers.watched.clone();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut desc, mut all) = (0, 0u64);
            while desc < DESCS && !stop.load(Ordering::Relaxed) {
                let grant = watched.grant(desc as usize % GRANTS);
                match take(grant, desc, LEN) {
                    Taken::NotYet => std::thread::yield_now(),
                    Taken::Over => desc += 1,
                    Taken::Part(part, to) => {
                        assert_eq!(to, desc, "the target of another descriptor");
                        all += u64::from(part.len);
                        written(grant, desc);
                    }
                }
            }
            println!("the requester wrote {all} bytes");
        });
        for desc in 0..DESCS {
            while offers.next(desc) < (desc + GRANTS as u64).min(DESCS) {
                let next = offers.next(desc);
                offers.offer(desc, 1, next, LEN, desc % 8);
            }
            let mut own = 0;
            loop {
                match offers.progress(desc) {
                    Progress::Part(part) => own += part.len,
                    Progress::Waits => std::thread::yield_now(),
                    Progress::Done(theirs) => break assert_eq!(own + theirs, LEN),
                    other => panic!("{desc}: {other:?}"),
                }
            }
            offers.end(desc);
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn what_the_requester_gives_up_is_taken_over() {
    let mut offers = offers(None);
    offers.offer(0, 9, 0, 1 << 20, 1);
    let watched = offers.watched.clone();
    let grant = watched.grant(0);
    let Taken::Part(given_up, _) = take(grant, 0, 1 << 20) else { panic!("nothing to take") };
    assert_eq!(offers.progress(0), Progress::Part(Part { offset: 512 * 1024, len: 512 * 1024 }));
    assert_eq!(offers.progress(0), Progress::Waits);
    not_written(grant, 0);
    assert_eq!(offers.progress(0), Progress::Part(given_up));
    assert_eq!(offers.progress(0), Progress::Done(0));
}

#[test]
fn a_short_part_given_up_is_not_counted_as_a_long_one() {
    const LEN: u32 = (1 << 20) + 4096;
    let mut offers = offers(None);
    offers.offer(0, 9, 0, LEN, 1);
    let watched = offers.watched.clone();
    let grant = watched.grant(0);
    let mut written_bytes = 0;
    while let Taken::Part(part, _) = take(grant, 0, LEN) {
        if part.len == PART_MAX {
            written(grant, 0);
            written_bytes += part.len;
        }
    }
    not_written(grant, 0);
    assert_eq!(offers.progress(0), Progress::Part(Part { offset: 1 << 20, len: 4096 }));
    assert_eq!((offers.progress(0), written_bytes), (Progress::Done(1 << 20), 1 << 20));
}

#[test]
fn a_withdrawn_grant_waits_for_the_part_being_written_and_gives_out_no_other() {
    let mut offers = offers(Some(std::process::id() as i32));
    offers.offer(0, 77, 0, 4 << 20, 1);
    let watched = offers.watched.clone();
    let grant = watched.grant(0);
    let Taken::Part(..) = take(grant, 0, 4 << 20) else { panic!("nothing to take") };
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        withdraw(78);
        withdraw(77);
        sender.send(()).unwrap();
    });
    while grant.claims.load(Ordering::Relaxed) & FLAG == 0 {
        std::thread::yield_now();
    }
    assert!(receiver.try_recv().is_err(), "withdrawn under a writer");
    assert!(matches!(take(grant, 0, 4 << 20), Taken::Over));
    assert_eq!(offers.progress(0), Progress::Withdrawn);
    written(grant, 0);
    receiver.recv().unwrap();
    thread.join().unwrap();
}

#[test]
fn a_dead_writer_is_not_waited_for() {
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let mut offers = offers(Some(child.id() as i32));
    offers.offer(0, 1, 0, 1 << 20, 1);
    let watched = offers.watched.clone();
    assert!(matches!(take(watched.grant(0), 0, 1 << 20), Taken::Part(..)));
    child.kill().unwrap();
    child.wait().unwrap();
    offers.withdraw();
}

#[test]
fn a_writer_that_has_closed_is_not_waited_for() {
    let mut offers = offers(Some(std::process::id() as i32));
    offers.offer(0, 1, 0, 1 << 20, 1);
    let watched = offers.watched.clone();
    assert!(matches!(take(watched.grant(0), 0, 1 << 20), Taken::Part(..)));
    assert!(offers.refuse());
    watched.control().sides[0].closed.store(1, Ordering::SeqCst);
    offers.withdraw();
}

#[test]
fn a_writer_that_spoilt_its_count_is_not_waited_for() {
    let mut offers = offers(Some(std::process::id() as i32));
    offers.offer(0, 1, 0, 1 << 20, 1);
    let watched = offers.watched.clone();
    assert!(matches!(take(watched.grant(0), 0, 1 << 20), Taken::Part(..)));
    for done in [1, tag(1), u64::MAX, tag(0) | FLAG, tag(0) | 2] {
        watched.grant(0).done.store(done, Ordering::Relaxed);
        assert!(!offers.refuse(), "{done:#x}");
    }
    offers.withdraw();
}

#[test]
fn nonsense_is_noticed_and_never_waited_for() {
    for (claims, done) in [(u64::MAX, 0), (0, 0), (tag(0) | 5, 0), (tag(0) | 3 << OWN_SHIFT, 0), (tag(1) | 1, 0), (tag(0), tag(0) | 9)] {
        let mut offers = offers(Some(std::process::id() as i32));
        offers.offer(0, 1, 0, 1 << 20, 1);
        let watched = offers.watched.clone();
        let grant = watched.grant(0);
        grant.claims.store(claims, Ordering::Relaxed);
        grant.done.store(done, Ordering::Relaxed);
        assert_eq!(offers.progress(0), Progress::Nonsense, "{claims:#x} {done:#x}");
        offers.withdraw();
    }
    // And by a requester: nothing it takes lies outside of its own message.
    for (part, parts) in [(0, u64::MAX), (u64::MAX, 9), (u64::MAX / 2, 9), (1 << 20, 9), (7, 0)] {
        let mut offers = offers(None);
        offers.offer(0, 1, 0, 1 << 20, 1);
        let watched = offers.watched.clone();
        let grant = watched.grant(0);
        grant.part.store(part, Ordering::Relaxed);
        grant.parts.store(parts, Ordering::Relaxed);
        for _ in 0..3 {
            if let Taken::Part(cut, _) = take(grant, 0, 1 << 20) {
                assert!(cut.offset as u64 + u64::from(cut.len) <= 1 << 20);
                written(grant, 0);
            }
        }
    }
}

#[test]
fn what_was_done_four_billion_descriptors_ago_is_not_taken_for_new() {
    let mut offers = offers(None);
    offers.offer(5, 1, 0, 1 << 20, 1);
    let watched = offers.watched.clone();
    assert!(matches!(take(watched.grant(5), 5, 1 << 20), Taken::Part(..)));
    not_written(watched.grant(5), 5);
    offers.withdraw();
    assert!(!offers.fits(5 + (1 << 32), 0, 1 << 20) && offers.fits(6 + (1 << 32), 0, 1 << 20));
}

#[test]
fn overlapping_targets_are_not_open_at_once() {
    let mut offers = offers(None);
    assert!(offers.fits(0, 1000, 100));
    offers.offer(0, 1, 1000, 100, 1);
    assert!(!offers.fits(0, 1099, 10) && !offers.fits(0, 900, 101) && !offers.fits(0, 1010, 10) && !offers.fits(0, 0, u32::MAX));
    assert!(offers.fits(0, 1100, 10) && offers.fits(0, 900, 100));
    for i in 1..GRANTS as u64 {
        offers.offer(0, 1, i * 10_000, 100, 1);
    }
    assert!(!offers.fits(0, 1 << 40, 1), "no room");
    offers.end(0);
    assert!(offers.fits(1, 1000, 100));
}
