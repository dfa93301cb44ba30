//! The choice of the copy path, with simulated requesters, responders and clock.

use std::collections::VecDeque;

use super::*;

/// A requester with queue pairs and several messages outstanding on each, and a responder that takes so long for a message by each path.
struct World {
    qps: Vec<Qp>,
    /// How many of them send.
    awake: usize,
    clock: u64,
    /// Whether it waits for the first of them alone, and then finds what the others have got done meanwhile.
    lumps: bool,
    /// What the others took since.
    meanwhile: u64,
}

struct Qp {
    chooser: PathChooser,
    next: u64,
    outstanding: VecDeque<u64>,
}

impl World {
    fn new(qps: usize) -> World {
        let peer = Arc::default();
        let qp = |_| Qp { chooser: PathChooser::of(Arc::clone(&peer), 64), next: 0, outstanding: VecDeque::new() };
        World { qps: (0..qps).map(qp).collect(), awake: qps, clock: 1, lumps: false, meanwhile: 0 }
    }

    /// How many of `count` messages on each queue pair go through the bounce ring.
    fn send(&mut self, count: usize, len: u32, depth: usize, [cma, bounce]: [u64; 2]) -> usize {
        let (mut through, alone) = (0, self.qps.len() == 1);
        for _ in 0..count {
            // A poll of one of many finds several messages done.
            let portion = if alone {
                1
            } else if self.lumps {
                depth
            } else {
                depth.div_ceil(2)
            };
            for (index, qp) in self.qps.iter_mut().take(self.awake).enumerate() {
                let clock = self.clock;
                let path = qp.chooser.choose_at(qp.next, len, || clock);
                qp.next += 1;
                through += usize::from(path == CopyPath::Bounce);
                qp.outstanding.push_back(if path == CopyPath::Bounce { bounce } else { cma });
                if qp.outstanding.len() < depth {
                    continue;
                }
                let took = qp.outstanding.drain(..portion).sum::<u64>();
                if self.lumps && index > 0 {
                    self.meanwhile += took - 1;
                    self.clock += 1;
                } else {
                    self.clock += took + std::mem::take(&mut self.meanwhile);
                }
                let (clock, upto) = (self.clock, qp.next - qp.outstanding.len() as u64);
                qp.chooser.on_acked_at(upto, || clock);
            }
            if self.qps.iter().all(|qp| qp.outstanding.is_empty()) {
                // The sender has other things to do, for any length of time.
                self.clock += self.qps[0].next * 7919 % 1_000_000;
            }
        }
        through
    }
}

#[test]
fn the_faster_path_is_found_for_each_class_and_found_again_when_it_changes() {
    for depth in [1, 8, 20] {
        let mut world = World::new(1);
        for (len, times) in [(16 << 10, [900, 400]), (64 << 10, [400, 900]), (1 << 20, [5000, 4900]), (64 << 20, [1000, 2000])] {
            let measured = (CLASSES[class_of(len)].run as usize).max(4 * depth);
            world.send(RUNS * (measured + 2 * depth) + depth, len, depth, times);
            let expected = if times[1] < times[0] { 100 } else { 0 };
            assert_eq!(world.send(100, len, depth, times), expected, "{len} bytes, {depth} outstanding");
        }
        let through = world.send(20_000, 64 << 10, depth, [900, 400]);
        assert!(through > 15_000, "{through} of 20000 after the bounce ring became faster");
        // And what is known is asked for ever more rarely.
        let through = world.send(1_000_000, 64 << 10, depth, [900, 400]);
        assert!(through > 997_000, "{through} of 1000000");
    }
}

#[test]
fn more_messages_in_flight_than_before_decide_nothing() {
    for times in [[900, 400], [400, 900]] {
        for n in 9..160 {
            let mut world = World::new(1);
            world.send(n, 64 << 10, 8, times);
            world.send(400, 64 << 10, 9, times);
            let expected = if times[1] < times[0] { 50 } else { 0 };
            assert_eq!(world.send(50, 64 << 10, 9, times), expected, "{n} messages, then one more in flight; {times:?}");
        }
    }
}

#[test]
fn queue_pairs_find_the_faster_path_together() {
    for qps in [2, 8, 64] {
        for times in [[400, 500], [500, 400]] {
            let mut world = World::new(qps);
            // They do not begin at one time, and the first trial does not know yet how many there are.
            for awake in 1..=qps {
                world.awake = awake;
                world.send(29, 64 << 10, 8, times);
            }
            world.send(2000, 64 << 10, 8, times);
            let through = world.send(1000, 64 << 10, 8, times) as f64 / (1000 * qps) as f64;
            let best = if times[1] < times[0] { through } else { 1.0 - through };
            assert!(best > 0.85, "{best} of the messages on {qps} queue pairs took the better path");
            // Who comes later knows, too.
            let peer = Arc::clone(&world.qps[0].chooser.peer);
            let expected = peer.lock().unwrap().classes[1].path;
            peer.lock().unwrap().classes[1].left = 10;
            assert_eq!(PathChooser::of(peer, 64).choose_at(0, 64 << 10, || 0), expected);
        }
    }
}

#[test]
fn which_queue_pair_is_polled_first_does_not_decide() {
    for len in [16 << 10, 64 << 10, 1 << 20, 8 << 20] {
        for phase in 0..16 {
            for times in [[40_000, 60_000], [60_000, 40_000]] {
                let mut world = World::new(2);
                world.lumps = true;
                world.send(phase, len, 8, times);
                world.awake = 1;
                world.send(phase, len, 8, times);
                world.awake = 2;
                world.send(2000, len, 8, times);
                let through = world.send(1000, len, 8, times) as f64 / 2000.0;
                let best = if times[1] < times[0] { through } else { 1.0 - through };
                assert!(best > 0.8, "{best} of the messages of {len} bytes took the better path, begun at {phase}");
            }
        }
    }
}

#[test]
fn a_queue_pair_that_goes_holds_up_nobody() {
    let mut world = World::new(2);
    // What it has under way is a good part of the trial.
    world.send(50, 65536, 64, [900, 400]);
    world.qps.pop();
    assert_eq!(world.qps[0].chooser.peer.lock().unwrap().trial.as_ref().unwrap().in_flight, 50);
    world.send(2500, 65536, 8, [900, 400]);
    assert_eq!(world.send(100, 65536, 8, [900, 400]), 100);
}

/// Requests that never ask for a path, such as small ones, lie between those that do.
#[test]
fn what_is_not_measured_does_not_count() {
    let mut chooser = PathChooser::of(Arc::default(), 64);
    let mut clock = 1;
    for request in 0..2000 {
        let path = if request % 3 == 0 { CopyPath::Bounce } else { chooser.choose_at(request, 20_000, || clock) };
        clock += if request % 3 == 0 {
            10_000
        } else if path == CopyPath::Bounce {
            400
        } else {
            900
        };
        chooser.on_acked_at(request + 1, || clock);
    }
    assert_eq!(chooser.peer.lock().unwrap().classes[0].path, CopyPath::Bounce);
}

/// A requester that polls seldom finds whole runs acked at once.
#[test]
fn a_run_is_as_long_as_it_takes_several_polls() {
    let (mut chooser, mut clock) = (PathChooser::of(Arc::default(), 128), 1);
    for step in 1..40 {
        for request in (step - 1) * 100..step * 100 {
            clock += if chooser.choose_at(request, 4 << 20, || clock) == CopyPath::Bounce { 400 } else { 900 };
        }
        chooser.on_acked_at(step * 100, || clock);
    }
    assert_eq!(chooser.peer.lock().unwrap().classes[3].path, CopyPath::Bounce);
}

#[test]
fn peers_are_told_apart_and_forgotten() {
    let [one, same, other] = [4_194_305, 4_194_305, 4_194_306].map(|pid| PathChooser::towards(Some(pid), 64));
    assert!(Arc::ptr_eq(&one.peer, &same.peer) && !Arc::ptr_eq(&one.peer, &other.peer));
    assert!(!Arc::ptr_eq(&PathChooser::towards(None, 64).peer, &PathChooser::towards(None, 64).peer));
    one.peer.lock().unwrap().classes[0].hold = 7;
    drop((one, same));
    assert_eq!(PathChooser::towards(Some(4_194_305), 64).peer.lock().unwrap().classes[0].hold, 0);
}

/// Another thread may have the lock at any time: nothing waits for it, and nothing is lost.
#[test]
fn what_is_acked_meanwhile_is_counted_later() {
    let mut chooser = PathChooser::of(Arc::default(), 64);
    let peer = Arc::clone(&chooser.peer);
    for request in 0..3 {
        chooser.choose_at(request, 65536, || 1);
    }
    let held = peer.lock().unwrap();
    chooser.on_acked_at(2, || 2);
    assert_eq!(chooser.choose_at(3, 65536, || 2), CopyPath::Cma);
    drop(held);
    chooser.on_acked_at(3, || 3);
    assert_eq!(peer.lock().unwrap().trial.as_ref().unwrap().run.acked, 3);
}

#[test]
fn a_disturbed_run_does_not_decide() {
    let mut world = World::new(1);
    world.send(50, 65536, 8, [100_000, 100_000]);
    world.send(200, 65536, 8, [400, 900]);
    assert_eq!(world.send(100, 65536, 8, [400, 900]), 0);
}

/// Messages of several classes, many outstanding, acked late and in any portions.
#[test]
fn every_class_gets_its_turn() {
    let mut chooser = PathChooser::of(Arc::default(), 64);
    for request in 0..100_000u64 {
        chooser.choose(request, [9000, 65536, 1 << 20, 1 << 30][(request / 7 % 4) as usize]);
        if request.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60 == 0 {
            chooser.on_acked(request);
        }
    }
    assert!(chooser.peer.lock().unwrap().classes.iter().all(|class| class.hold > 0));
}

#[test]
fn a_trial_that_waits_for_messages_reads_no_clock() {
    let mut chooser = PathChooser::of(Arc::default(), 64);
    chooser.choose_at(0, 65536, || 1);
    chooser.on_acked_at(1, || 2);
    (1..100).for_each(|upto| chooser.on_acked_at(upto, || panic!("the clock was read")));
    assert!(chooser.peer.lock().unwrap().trial.is_some());
}

#[test]
fn a_trial_that_gets_no_further_is_given_up() {
    let mut chooser = PathChooser::of(Arc::default(), 64);
    chooser.choose_at(0, 65536, || 0);
    for request in 1..2000 {
        chooser.choose_at(request, 1 << 20, || request);
        chooser.on_acked_at(request + 1, || request + 1);
    }
    let peer = chooser.peer.lock().unwrap();
    assert!(peer.classes[2].hold > 0 && peer.classes[1].hold == 0);
}

#[test]
fn a_request_that_is_asked_for_twice_counts_once() {
    let mut chooser = PathChooser::of(Arc::default(), 256);
    let paths: Vec<CopyPath> = (0..400).map(|i| chooser.choose(i / 2, 65536)).collect();
    assert!(paths.chunks(2).all(|pair| pair[0] == pair[1]));
    assert_eq!(chooser.measured.len(), 200);
}

/// The sender pauses after each message, and the trial hears of the ack only when it sends the next one.
#[test]
fn a_pause_after_an_ack_that_found_the_lock_taken_is_not_copying() {
    for times in [[400, 900], [900, 400]] {
        let (mut chooser, mut clock) = (PathChooser::of(Arc::default(), 64), 1);
        let peer = Arc::clone(&chooser.peer);
        for request in (0..800).step_by(2) {
            let path = chooser.choose_at(request, 65536, || clock);
            clock += if path == CopyPath::Bounce { times[1] } else { times[0] };
            let slower = (path == CopyPath::Bounce) == (times[1] > times[0]);
            let held = (!slower).then(|| peer.lock().unwrap());
            chooser.on_acked_at(request + 1, || clock);
            drop(held);
            clock += 1_000_000;
            // A small one, which asks for no path.
            chooser.on_acked_at(request + 2, || clock);
        }
        let expected = if times[1] < times[0] { CopyPath::Bounce } else { CopyPath::Cma };
        let class = peer.lock().unwrap().classes[1];
        assert!(class.hold > 0 && class.path == expected, "{class:?} for {times:?}");
    }
}

#[test]
fn the_class_in_which_little_moves_holds_up_no_other_and_is_held_up_by_none() {
    for (every, rounds, rare, often) in [(100, 4_000, 2, 1), (2_000, 800_000, 2, 1), (500, 800_000, 1, 3)] {
        let mut chooser = PathChooser::of(Arc::default(), 64);
        let len = |class: usize| CLASSES[class].below / 2;
        for request in 0..rounds {
            chooser.choose_at(request, len(if request % every == 0 { rare } else { often }), || request);
            chooser.on_acked_at(request + 1, || request + 1);
        }
        let peer = chooser.peer.lock().unwrap();
        assert!(peer.classes[often].hold > 0, "one in {every}: {:?}", peer.classes);
        assert!(every == 100 || peer.classes[rare].hold > 0, "one in {every}: {:?}", peer.classes);
    }
}

/// An hour of messages of 64 MiB must not pass before another load is noticed.
#[test]
fn large_messages_are_measured_again_before_long() {
    let mut world = World::new(1);
    world.send(100_000, 64 << 20, 8, [400, 900]);
    let through = world.send(20_000, 64 << 20, 8, [900, 400]);
    assert!(through > 14_000, "{through} of 20000 after the bounce ring became faster");
}
