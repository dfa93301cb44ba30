//! The choice of the way, with senders and responders that are numbers and a clock of its own.

use std::collections::VecDeque;

use super::*;

/// A sender with queue pairs and so many messages outstanding on each, and a responder that takes so long for a message either way.
struct World {
    lanes: Vec<Lane>,
    /// How many of them send.
    awake: usize,
    clock: u64,
    /// Whether it waits for the first of them alone, and then finds what the others have got done meanwhile.
    lumps: bool,
    /// What the others took since.
    meanwhile: u64,
}

struct Lane {
    route: Route,
    next: u64,
    outstanding: VecDeque<u64>,
}

impl World {
    fn new(lanes: usize) -> World {
        let choice = Arc::default();
        let lane = |_| Lane { route: Route::of(Arc::clone(&choice), 64), next: 0, outstanding: VecDeque::new() };
        World { lanes: (0..lanes).map(lane).collect(), awake: lanes, clock: 1, lumps: false, meanwhile: 0 }
    }

    /// How many of `count` messages on each queue pair go through the ring.
    fn send(&mut self, count: usize, len: u32, depth: usize, [straight, ring]: [u64; 2]) -> usize {
        let (mut through, alone) = (0, self.lanes.len() == 1);
        for _ in 0..count {
            // A poll of one of many finds several messages done.
            let portion = if alone {
                1
            } else if self.lumps {
                depth
            } else {
                depth.div_ceil(2)
            };
            for (index, lane) in self.lanes.iter_mut().take(self.awake).enumerate() {
                let clock = self.clock;
                let way = lane.route.find(lane.next, len, || clock);
                lane.next += 1;
                through += usize::from(way == Way::Ring);
                lane.outstanding.push_back(if way == Way::Ring { ring } else { straight });
                if lane.outstanding.len() < depth {
                    continue;
                }
                let from = lane.next - lane.outstanding.len() as u64;
                let took = lane.outstanding.drain(..portion).sum::<u64>();
                if self.lumps && index > 0 {
                    self.meanwhile += took - 1;
                    self.clock += 1;
                } else {
                    self.clock += took + std::mem::take(&mut self.meanwhile);
                }
                let (clock, upto) = (self.clock, lane.next - lane.outstanding.len() as u64);
                lane.route.heed(from, upto, |_| len, || clock);
            }
            if self.lanes.iter().all(|lane| lane.outstanding.is_empty()) {
                // The sender has other things to do, for any length of time.
                self.clock += self.lanes[0].next * 7919 % 1_000_000;
            }
        }
        through
    }
}

#[test]
fn the_faster_way_is_found_for_each_class_and_found_again_when_it_changes() {
    for depth in [1, 8, 20] {
        let mut world = World::new(1);
        for (len, times) in [(16 << 10, [900, 400]), (64 << 10, [400, 900]), (1 << 20, [5000, 4900]), (64 << 20, [1000, 2000])] {
            let Kind { counted, margin, .. } = KINDS.iter().find(|kind| len < kind.below).unwrap();
            world.send(RUNS * (counted + 2 * margin) as usize + depth, len, depth, times);
            let expected = if times[1] < times[0] { 200 } else { 0 };
            assert_eq!(world.send(200, len, depth, times), expected, "{len} bytes, {depth} outstanding");
        }
        let through = world.send(20_000, 64 << 10, depth, [900, 400]);
        assert!(through > 15_000, "{through} of 20000 after the ring became faster");
        // And what is known is asked for ever more rarely.
        let through = world.send(1_000_000, 64 << 10, depth, [900, 400]);
        assert!(through > 998_000, "{through} of 1000000");
    }
}

#[test]
fn queue_pairs_find_the_faster_way_together() {
    for lanes in [2, 8, 64] {
        for times in [[400, 500], [500, 400]] {
            let mut world = World::new(lanes);
            // They do not begin at one time, and the first probe does not know yet how many there are.
            for awake in 1..=lanes {
                world.awake = awake;
                world.send(29, 64 << 10, 8, times);
            }
            world.send(2000, 64 << 10, 8, times);
            let through = world.send(1000, 64 << 10, 8, times) as f64 / (1000 * lanes) as f64;
            let best = if times[1] < times[0] { through } else { 1.0 - through };
            assert!(best > 0.85, "{best} of the messages on {lanes} queue pairs went the better way");
            // Who comes later knows, too.
            let choice = Arc::clone(&world.lanes[0].route.choice);
            let expected = choice.lock().unwrap().classes[1].way;
            choice.lock().unwrap().classes[1].left = 10;
            assert_eq!(Route::of(choice, 64).find(0, 64 << 10, || 0), expected);
        }
    }
}

#[test]
fn whom_the_sender_looks_at_first_does_not_decide() {
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
                assert!(best > 0.8, "{best} of the messages of {len} bytes went the better way, begun at {phase}");
            }
        }
    }
}

/// The first message of the first of them begins a probe.
#[test]
fn queue_pairs_that_begin_together_are_measured_together() {
    let mut world = World::new(64);
    world.send(30, 65536, 8, [400, 900]);
    let choice = world.lanes[0].route.choice.lock().unwrap();
    assert!(choice.probing);
    assert_eq!(choice.probe.active, 64);
}

#[test]
fn a_queue_pair_that_goes_holds_up_nobody() {
    let mut world = World::new(2);
    // What it has under way is more than the probe can do without.
    world.send(50, 65536, 64, [900, 400]);
    let choice = Arc::clone(&world.lanes[0].route.choice);
    let active = || choice.lock().unwrap().classes[1].active;
    assert_eq!(active(), 2);
    world.lanes.pop();
    assert_eq!(active(), 1);
    world.send(300, 65536, 8, [900, 400]);
    assert_eq!(world.send(100, 65536, 8, [900, 400]), 100);
}

/// Requests that never ask for a way, such as small ones, lie between those that do.
#[test]
fn what_is_not_measured_does_not_count() {
    let mut route = Route::of(Arc::default(), 64);
    let mut clock = 1;
    for request in 0..2000 {
        let way = if request % 3 == 0 { Way::Ring } else { route.find(request, 20_000, || clock) };
        clock += if request % 3 == 0 {
            10_000
        } else if way == Way::Ring {
            400
        } else {
            900
        };
        route.heed(request, request + 1, |_| 20_000, || clock);
        let probe = &route.choice.lock().unwrap().probe;
        assert_eq!(probe.accepted, probe.sent);
    }
    assert_eq!(route.choice.lock().unwrap().classes[0].way, Way::Ring);
}

/// A sender that looks seldom finds whole runs done at once.
#[test]
fn a_run_that_nobody_saw_does_not_decide() {
    let mut route = Route::of(Arc::default(), 128);
    for step in 0..1000 {
        for request in step * 100..step * 100 + 100 {
            route.find(request, 4 << 20, || step * 1000 + 1);
        }
        route.heed(step * 100, step * 100 + 100, |_| 4 << 20, || step * 1000 + 1000);
    }
    let class = route.choice.lock().unwrap().classes[3];
    assert_eq!((class.way, class.hold), (Way::Straight, UNDECIDED));
}

#[test]
fn peers_are_told_apart_and_forgotten() {
    let [one, same, other] = [4_194_305, 4_194_305, 4_194_306].map(|pid| Route::towards(Some(pid), 64));
    assert!(Arc::ptr_eq(&one.choice, &same.choice) && !Arc::ptr_eq(&one.choice, &other.choice));
    assert!(!Arc::ptr_eq(&Route::towards(None, 64).choice, &Route::towards(None, 64).choice));
    one.choice.lock().unwrap().classes[0].hold = 7;
    drop((one, same));
    assert_eq!(Route::towards(Some(4_194_305), 64).choice.lock().unwrap().classes[0].hold, SHORTEST);
}

/// Another thread may be at the choice at any time: nothing waits for it, and nothing is lost.
#[test]
fn what_was_accepted_meanwhile_is_counted_later() {
    let mut route = Route::of(Arc::default(), 64);
    let choice = Arc::clone(&route.choice);
    for request in 0..3 {
        route.find(request, 65536, || 1);
    }
    let held = choice.lock().unwrap();
    route.heed(0, 2, |_| 65536, || 2);
    assert_eq!(route.find(3, 65536, || 2), Way::Straight);
    drop(held);
    route.heed(2, 3, |_| 65536, || 3);
    assert_eq!(choice.lock().unwrap().probe.accepted, 3);
}

#[test]
fn a_disturbed_run_does_not_decide() {
    let mut world = World::new(1);
    world.send(50, 65536, 8, [100_000, 100_000]);
    world.send(200, 65536, 8, [400, 900]);
    assert_eq!(world.send(100, 65536, 8, [400, 900]), 0);
}

/// Messages of several classes, many outstanding, accepted late and in any portions.
#[test]
fn every_class_gets_its_turn() {
    let (mut route, mut probed) = (Route::of(Arc::default(), 64), [false; CLASSES]);
    let len = |request: u64| [9000, 65536, 1 << 20, 1 << 30][(request / 7 % 4) as usize];
    let mut from = 0;
    for request in 0..100_000u64 {
        route.choose(request, len(request));
        if request.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60 == 0 {
            let number = route.part.number;
            route.accepted(from, request, len);
            from = request;
            let choice = route.choice.lock().unwrap();
            if number > 0 && !choice.probing {
                probed[choice.probe.class] = true;
            }
        }
    }
    assert_eq!(probed, [true; CLASSES]);
}

#[test]
fn a_probe_that_waits_for_messages_reads_no_clock() {
    let mut route = Route::of(Arc::default(), 64);
    let mut reads = 0;
    route.find(0, 65536, || 1);
    route.heed(0, 1, |_| 65536, || 2);
    for from in 1..100 {
        route.heed(
            from,
            from + 1,
            |_| 65536,
            || {
                reads += 1;
                3
            },
        );
    }
    assert!(route.choice.lock().unwrap().probing && reads == 0, "{reads}");
}

#[test]
fn a_probe_that_gets_no_further_is_given_up() {
    let mut route = Route::of(Arc::default(), 64);
    route.find(0, 65536, || 0);
    route.find(1, 65536, || 0);
    // Either way has the same pace, so that the answers hold ever longer: the last one here from message 834 to 1858.
    for request in 2..1500 {
        route.find(request, 1 << 20, || request);
        route.heed(request, request + 1, |_| 1 << 20, || request + 1);
    }
    let classes = route.choice.lock().unwrap().classes;
    assert!(classes[2].left > 0 && classes[1].left == 0);
}

#[test]
fn a_request_that_is_asked_for_twice_counts_once() {
    let mut route = Route::of(Arc::default(), 64);
    let ways: Vec<Way> = (0..400).map(|i| route.choose(i / 2, 65536)).collect();
    assert!(ways.chunks(2).all(|pair| pair[0] == pair[1]) && ways.contains(&Way::Ring));
    assert_eq!(route.choice.lock().unwrap().probe.sent, 200);
}
