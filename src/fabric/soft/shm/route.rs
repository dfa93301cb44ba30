//! Which way bulk data goes fastest: straight from memory to memory, or through the ring. Found out as it goes, per queue pair and class of
//! sizes, since it depends on the processor, on where the two processes run, and on what else does. Used by the thread that drives the queue pair.
//!
//! Straight copies cross once, at the pace of `process_vm_readv`, made by both sides; the ring is two plain copies, one by each side, and every
//! byte passes from one core's cache into the other's. Either way may be five times the other's pace.
//!
//! A probe sends runs of messages either way in turn and measures the middle of each: at both ends a run overlaps its neighbours, as a
//! sender fills the ring while earlier messages are still being copied straight. What counts is the time between acceptances, less that in
//! which nothing was under way. The better run of each way decides, as a run can be disturbed but not helped. The answer
//! holds for a number of messages, doubled whenever the next probe says the same.

use crate::base::clock;

/// Runs of a probe, either way in turn.
const RUNS: usize = 4;
/// Messages for which an answer holds.
const SHORTEST: u32 = 256;
const LONGEST: u32 = 1 << 17;
/// Messages of a class that wait for the probe of another, until that is given up if it got no further.
const RETRY: u32 = 64;
/// Classes of sizes. What fits the caches goes at another pace than what does not.
const CLASSES: usize = 4;

/// A class of sizes.
struct Kind {
    /// The first size of the next one.
    below: u32,
    /// Messages of a run that are measured, and those before them and after them.
    counted: u32,
    margin: u32,
}

const KINDS: [Kind; CLASSES] = [
    Kind { below: 32 << 10, counted: 16, margin: 20 },
    Kind { below: 256 << 10, counted: 16, margin: 20 },
    Kind { below: 2 << 20, counted: 8, margin: 12 },
    Kind { below: u32::MAX, counted: 4, margin: 4 },
];

/// A way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The responder pulls, with the requester's help.
    Straight,
    /// Through the bounce ring.
    Ring,
}

/// What is known of a class of sizes.
#[derive(Debug, Clone, Copy)]
struct Class {
    way: Way,
    /// Messages until it is probed again.
    left: u32,
    /// How many that were at the beginning.
    hold: u32,
}

/// The measured part of a run.
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    /// The requests whose acceptances begin and end it, each plus 1; 0 as long as they were not handed over.
    marks: [u64; 2],
    /// When they were accepted, by a clock that stands still while nothing is under way.
    times: [u64; 2],
    bytes: u64,
}

/// A probe under way.
#[derive(Debug, Default)]
struct Probe {
    class: usize,
    /// Messages handed over, and the last of them, plus 1.
    sent: u32,
    last: u64,
    runs: [Run; RUNS],
    /// Marks passed: two for each run.
    passed: usize,
    /// Since when nothing is under way; 0 while something is. And how long that was before.
    idle_since: u64,
    idle: u64,
    /// `sent` and `passed` when another class last had to wait.
    before: (u32, usize),
}

/// A queue pair's choice.
pub struct Route {
    classes: [Class; CLASSES],
    probing: bool,
    probe: Probe,
    /// The last request asked for, plus 1, and its way.
    chosen: (u64, Way),
}

impl Route {
    /// Knows nothing: the first messages of each class are a probe.
    pub fn new() -> Route {
        Route {
            classes: [Class { way: Way::Straight, left: 0, hold: SHORTEST }; CLASSES],
            probing: false,
            probe: Probe::default(),
            chosen: (0, Way::Straight),
        }
    }

    /// The way for request number `request` of `len` bytes, which is about to be handed over; the same however often it is asked for.
    #[inline]
    pub fn choose(&mut self, request: u64, len: u32) -> Way {
        if self.chosen.0 != request + 1 {
            self.chosen = (request + 1, self.find(request, len, clock::now));
        }
        self.chosen.1
    }

    fn find(&mut self, request: u64, len: u32, now: impl FnOnce() -> u64) -> Way {
        let index = KINDS.iter().position(|kind| len < kind.below).unwrap_or(CLASSES - 1);
        if self.probing && self.probe.class == index {
            return self.probe.hand_over(request, len, now).unwrap_or(self.classes[index].way);
        }
        let class = &mut self.classes[index];
        class.left = class.left.saturating_sub(1);
        if class.left > 0 {
            return class.way;
        }
        let progress = (self.probe.sent, self.probe.passed);
        if self.probing && self.probe.before != progress {
            self.probe.before = progress;
            class.left = RETRY;
            return class.way;
        }
        self.probing = true;
        self.probe = Probe { class: index, ..Probe::default() };
        self.probe.hand_over(request, len, now).unwrap_or(class.way)
    }

    /// Every request below `upto` was accepted.
    #[inline]
    pub fn accepted(&mut self, upto: u64) {
        self.heed(upto, clock::now);
    }

    #[inline]
    fn heed(&mut self, upto: u64, now: impl FnOnce() -> u64) {
        // A probe may wait for its next message for ever, while others come and go that need no clock.
        if self.probing && self.probe.idle_since == 0 {
            self.take(upto, now());
        }
    }

    #[cold]
    fn take(&mut self, upto: u64, now: u64) {
        let Some([straight, ring]) = self.probe.take(upto, now) else { return };
        self.probing = false;
        let Some(class) = self.classes.get_mut(self.probe.class) else { return };
        let way = if ring < straight { Way::Ring } else { Way::Straight };
        class.hold = if way == class.way { (class.hold * 2).min(LONGEST) } else { SHORTEST };
        (class.way, class.left) = (way, class.hold);
    }
}

impl Probe {
    /// The way of the next message; none if the probe has all it needs.
    fn hand_over(&mut self, request: u64, len: u32, now: impl FnOnce() -> u64) -> Option<Way> {
        let Kind { counted, margin, .. } = KINDS.get(self.class)?;
        let length = counted + 2 * margin;
        let (number, place) = ((self.sent / length) as usize, self.sent % length);
        let run = self.runs.get_mut(number)?;
        if self.idle_since != 0 {
            self.idle += now().saturating_sub(self.idle_since);
            self.idle_since = 0;
        }
        if place + 1 == *margin {
            run.marks[0] = request + 1;
        } else if place >= *margin && place < margin + counted {
            run.bytes += u64::from(len);
            if place + 1 == margin + counted {
                run.marks[1] = request + 1;
            }
        }
        self.sent += 1;
        self.last = request + 1;
        Some(if number.is_multiple_of(2) { Way::Straight } else { Way::Ring })
    }

    /// Every request below `upto` was accepted. Once all that is measured was, the pace of either way.
    fn take(&mut self, upto: u64, now: u64) -> Option<[f64; 2]> {
        while let Some(run) = self.runs.get_mut(self.passed / 2) {
            let mark = run.marks[self.passed % 2];
            if mark == 0 || mark > upto {
                break;
            }
            run.times[self.passed % 2] = now.saturating_sub(self.idle);
            self.passed += 1;
        }
        if self.last <= upto && self.idle_since == 0 {
            self.idle_since = now;
        }
        (self.passed == 2 * RUNS).then(|| {
            let pace = |run: &Run| run.times[1].saturating_sub(run.times[0]) as f64 / run.bytes.max(1) as f64;
            [0, 1].map(|first| self.runs.iter().skip(first).step_by(2).map(pace).fold(f64::MAX, f64::min))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A sender with so many outstanding, and a responder that takes so long for a message either way.
    struct World {
        route: Route,
        next: u64,
        clock: u64,
        outstanding: std::collections::VecDeque<u64>,
    }

    impl World {
        fn new() -> World {
            World { route: Route::new(), next: 0, clock: 1, outstanding: std::collections::VecDeque::new() }
        }

        /// How many of `count` messages go through the ring.
        fn send(&mut self, count: usize, len: u32, depth: usize, [straight, ring]: [u64; 2]) -> usize {
            let mut through = 0;
            for _ in 0..count {
                let clock = self.clock;
                let way = self.route.find(self.next, len, || clock);
                self.next += 1;
                through += usize::from(way == Way::Ring);
                self.outstanding.push_back(if way == Way::Ring { ring } else { straight });
                while self.outstanding.len() >= depth {
                    self.clock += self.outstanding.pop_front().unwrap();
                    let clock = self.clock;
                    self.route.heed(self.next - self.outstanding.len() as u64, || clock);
                }
                if self.outstanding.is_empty() {
                    // The sender has other things to do, for any length of time.
                    self.clock += self.next * 7919 % 1_000_000;
                }
            }
            through
        }
    }

    #[test]
    fn the_faster_way_is_found_for_each_class_and_found_again_when_it_changes() {
        for depth in [1, 8, 20] {
            let mut world = World::new();
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
    fn a_disturbed_run_does_not_decide() {
        let mut world = World::new();
        world.send(50, 65536, 8, [100_000, 100_000]);
        world.send(200, 65536, 8, [400, 900]);
        assert_eq!(world.send(100, 65536, 8, [400, 900]), 0);
    }

    /// Messages of several classes, many outstanding, accepted late and in any portions.
    #[test]
    fn every_class_gets_its_turn() {
        let (mut route, mut probed) = (Route::new(), [false; CLASSES]);
        for request in 0..100_000u64 {
            route.choose(request * 2, [9000, 65536, 1 << 20, 1 << 30][(request / 7 % 4) as usize]);
            if request.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60 == 0 {
                route.accepted(request * 2 - request % 2);
                if route.probe.passed == 2 * RUNS {
                    probed[route.probe.class] = true;
                }
            }
        }
        assert_eq!(probed, [true; CLASSES]);
    }

    #[test]
    fn a_probe_that_waits_for_messages_reads_no_clock() {
        let mut route = Route::new();
        let mut reads = 0;
        route.find(0, 65536, || 1);
        route.heed(1, || 2);
        for upto in 2..100 {
            route.heed(upto, || {
                reads += 1;
                3
            });
        }
        assert!(route.probing && reads == 0, "{reads}");
    }

    #[test]
    fn a_probe_that_gets_no_further_is_given_up() {
        let mut route = Route::new();
        route.find(0, 65536, || 0);
        route.find(1, 65536, || 0);
        // Either way has the same pace, so that the answers hold ever longer: the last one here from message 834 to 1858.
        for request in 2..1500 {
            route.find(request, 1 << 20, || request);
            route.heed(request + 1, || request + 1);
        }
        assert!(route.classes[2].left > 0 && route.classes[1].left == 0);
    }

    #[test]
    fn a_request_that_is_asked_for_twice_counts_once() {
        let mut route = Route::new();
        let ways: Vec<Way> = (0..400).map(|i| route.choose(i / 2, 65536)).collect();
        assert!(ways.chunks(2).all(|pair| pair[0] == pair[1]) && ways.contains(&Way::Ring));
        assert_eq!(route.probe.sent, 200);
    }
}
