//! Coming and going: nothing is touched after its owner took it back, nothing is left behind.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use railhead::fabric::{QpCaps, QpState, SendWr, WcStatus};

use super::bed::{Bed, Mem, NOTHING, PATIENCE, Pair, Request, SILENT, Wire, count};

/// A region is dropped by one thread while another performs the peer's WRITEs into it and READs from it: once the drop has returned,
/// nothing lands any more, and the requests fail with an access error.
pub fn deregistration_in_flight(bed: &Bed) {
    const LEN: usize = 4 << 20;
    // An emulated device takes more than a second for each, and a simulated one makes packets of all at once.
    for round in 0..if matches!(bed.wire, Wire::Nic | Wire::Sim) { 3 } else { 30 } {
        let mut p = bed.pair();
        let from = p.a.open_memory(LEN);
        let mut to = p.b.open_memory(LEN);
        from.set(0x55);
        for i in 0..64u64 {
            if i % 8 == 7 {
                p.a.send(Request::read(i, from.sge(0, LEN), &to, 0));
            } else {
                p.a.send(Request::write(i, from.sge(0, LEN), &to, 0));
            }
        }
        let (polls, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let (polls, stop) = (&polls, &stop);
            let driver = scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    p.poll();
                    polls.fetch_add(1, Ordering::Release);
                }
                p
            });
            let wait_for = |n: u64| {
                let (start, end) = (polls.load(Ordering::Acquire), Instant::now() + PATIENCE);
                while polls.load(Ordering::Acquire) < start + n && !driver.is_finished() {
                    assert!(Instant::now() < end);
                    std::thread::yield_now();
                }
            };
            wait_for(round % 7);
            to.deregister();
            to.set(0xAA);
            wait_for(200);
            assert!(to.all().iter().all(|&b| b == 0xAA), "round {round}: something landed after deregistration");
            stop.store(true, Ordering::Relaxed);
            let mut p = driver.join().expect("driver");
            p.wait(1, 0);
            p.until("the end of it", |p| p.a.state() == QpState::Error || p.a.got.len() == 64);
            let first_bad = p.a.got.iter().find(|c| c.status != WcStatus::Success);
            if let Some(c) = first_bad {
                assert_eq!(c.status, WcStatus::RemAccessErr, "round {round}");
            }
        });
    }
}

/// The requester takes back the memory that the peer is reading, and uses it for something else: what arrived by then may be reported,
/// but never a message with bytes of both lives.
pub fn source_deregistration_in_flight(bed: &Bed) {
    const LEN: usize = 16 << 20;
    let alone = bed.waives("churn::source_deregistration_in_flight, the idle end", SILENT);
    // An emulated device is slow here, too.
    for round in (0..40u64).step_by(if bed.wire == Wire::Nic { 4 } else { 1 }) {
        let mut p = bed.pair();
        let mut from = p.a.open_memory(LEN);
        let to = p.b.open_memory(LEN);
        from.set(0x55);
        p.b.recv(1, NOTHING);
        p.a.send(Request::write_imm(2, from.sge(0, LEN), &to, 0, 7));
        // Anywhere from not begun to done.
        for _ in 0..round {
            p.poll();
        }
        from.deregister();
        from.set(0xAA);
        // The peer alone at first, as the requester's own poll would end it.
        for _ in 0..1000 {
            p.b.poll();
        }
        p.wait(1, 0);
        let sent = p.a.take();
        if sent.status != WcStatus::Success && alone {
            // The receiver must not have received either.
            p.settle();
            assert!(p.b.got.iter().all(|c| c.status != WcStatus::Success), "round {round}: {:?}", p.b.got);
            continue;
        }
        p.wait(0, 1);
        let got = p.b.take();
        if got.status == WcStatus::Success {
            assert!(to.all().iter().all(|&b| b == 0x55), "round {round}: bytes of the memory's next life were reported as received");
        }
        if sent.status == WcStatus::Success {
            assert_eq!(got.status, WcStatus::Success, "round {round}: sent, and not received");
        }
    }
}

/// A queue pair is destroyed with READs and receives in flight: its owner's memory is left alone from then on.
pub fn destruction_in_flight(bed: &Bed) {
    const LEN: usize = 2 << 20;
    for round in (0..30).step_by(6) {
        let mut p = bed.pair();
        let mine = p.a.open_memory(LEN);
        let theirs = p.b.open_memory(LEN);
        theirs.set(0x55);
        for i in 0..8 {
            p.a.send(Request::read(i, mine.sge(0, LEN), &theirs, 0));
            p.a.recv(100 + i, mine.sge(0, LEN));
            p.b.send(Request::send(i, theirs.sge(0, LEN)));
            p.b.send(Request::write(50 + i, theirs.sge(0, LEN), &mine, 0));
        }
        for _ in 0..round {
            p.poll();
        }
        p.a.cq.destroy_qp(p.a.qp);
        mine.set(0xAA);
        for _ in 0..300 {
            p.a.poll();
            p.b.poll();
        }
        assert!(mine.all().iter().all(|&b| b == 0xAA), "round {round}: something landed after destruction");
        if round == 0 && bed.waives("churn::destruction_in_flight, the idle end", SILENT) || matches!(bed.wire, Wire::Nic | Wire::Sim) {
            // Refused if it has learnt already.
            let _ = p.b.cq.qp(p.b.qp).post_send(&[Request::write(99, NOTHING, &mine, 0)]);
        }
        p.until("the peer's error", |p| p.b.state() == QpState::Error);
    }
}

/// What a process holds: descriptors, threads, mappings, files in /dev/shm.
#[derive(Debug, PartialEq)]
pub struct Holdings {
    fds: usize,
    tasks: usize,
    shm: BTreeSet<String>,
    shared_maps: usize,
    maps: usize,
}

impl Holdings {
    pub fn now() -> Holdings {
        let list =
            |path: &str| std::fs::read_dir(path).map(|d| d.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect());
        let count = |path: &str| list(path).map_or(0, |l: BTreeSet<String>| l.len());
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        let shm: BTreeSet<String> = list("/dev/shm").unwrap_or_default();
        Holdings {
            fds: count("/proc/self/fd"),
            tasks: count("/proc/self/task"),
            shm: shm.into_iter().filter(|name| name.contains("railhead")).collect(),
            shared_maps: maps.lines().filter(|l| l.contains("memfd") || l.contains("/dev/shm")).count(),
            maps: maps.lines().count(),
        }
    }

    /// Nothing was added since, but for a few mappings of the allocator's.
    pub fn still_hold(&self) {
        let now = Holdings::now();
        assert_eq!((now.fds, now.tasks, &now.shm, now.shared_maps), (self.fds, self.tasks, &self.shm, self.shared_maps));
        assert!(now.maps <= self.maps + 8, "{self:?} {now:?}");
    }
}

/// Queue pairs made, used and destroyed, on both ends; the process then holds what it held before. RHT_LIVES sets how many.
///
/// In a process of its own, as other tests' descriptors would be counted.
pub fn a_thousand_lives(bed: &Bed) {
    bed.alone("churn::a_thousand_lives", || {
        let device = bed.device();
        let caps = QpCaps { send_depth: 16, recv_depth: 16, ..QpCaps::default() };
        let live = |i: u64| {
            let mut p = bed.pair_on(&device, caps);
            if i.is_multiple_of(2) {
                p.ping();
            } else {
                p.a.recv(1, NOTHING);
                p.b.recv(1, NOTHING);
            }
            let Pair { a, b } = p;
            if i.is_multiple_of(3) { drop((a, b)) } else { drop((b, a)) }
        };
        (0..200).for_each(live);
        let before = Holdings::now();
        (0..count("RHT_LIVES", 1_000)).for_each(live);
        before.still_hold();
    });
}

/// Registration needs no one's leave: two threads register and deregister while a third moves data.
pub fn registration_from_other_threads(bed: &Bed) {
    let mut p = bed.pair();
    let domain = p.a.domain.clone();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut held = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    held.push(Mem::new(&domain, 8192, railhead::fabric::Access::LOCAL_WRITE));
                    if held.len() == 50 {
                        let mut keys: Vec<u32> = held.iter().map(Mem::lkey).collect();
                        keys.sort_unstable();
                        keys.dedup();
                        assert_eq!(keys.len(), 50, "two live regions with one key");
                        held.clear();
                    }
                }
            });
        }
        let from = p.a.open_memory(100_000);
        let to = p.b.open_memory(100_000);
        for i in 0..3000u64 {
            let len = [8, 64, 4000, 100_000][i as usize % 4];
            p.b.recv(1, NOTHING);
            p.a.send(SendWr { imm: i as u32, ..Request::write_imm(2, from.sge(0, len), &to, 0, 0) });
            p.wait(1, 1);
            assert_eq!(p.b.take_ok(1).imm, Some(i as u32));
            p.a.take_ok(2);
        }
        stop.store(true, Ordering::Relaxed);
    });
}
