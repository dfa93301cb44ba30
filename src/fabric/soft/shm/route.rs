//! Which way bulk data goes fastest: straight from memory to memory, or through the ring. Found out as it goes, per peer process and class of
//! sizes, since it depends on the processor, on where the two processes run, and on what else does. Used by the threads that drive queue pairs.
//!
//! Straight copies cross once, at the pace of `process_vm_readv`, made by both sides; the ring is two plain copies, one by each side, and every
//! byte passes from one core's cache into the other's. Either way may be five times the other's pace.
//!
//! All queue pairs towards a process look for the answer together: what one of many moves in a time says nothing of its way, as long as the
//! others go another. A probe sends runs of messages either way in turn and measures the middle of each: at both ends a run overlaps its
//! neighbours, as a sender fills the ring while earlier messages are still being copied straight. What counts is the time between
//! acceptances, less that in which nothing was under way. The better run of each way decides, as a run can be disturbed but not helped. The
//! answer holds for a number of messages, doubled whenever the next probe says the same.

use std::sync::{Arc, Mutex, Weak};

use crate::base::clock;
use crate::base::fork::PerProcess;

/// Runs of a probe, either way in turn.
const RUNS: usize = 4;
/// Messages of each queue pair for which an answer holds, and of all together at most.
const SHORTEST: u32 = 256;
const LONGEST: u32 = 1 << 17;
const LONGEST_OF_ALL: u32 = 1 << 20;
/// Messages of each queue pair that wait for the probe of another class, until that is given up if it got no further.
const RETRY: u32 = 64;
/// Queue pairs beyond which more of them do not make what is measured longer.
const CROWD: u32 = 8;
/// Classes of sizes. What fits the caches goes at another pace than what does not.
const CLASSES: usize = 4;

/// A class of sizes.
struct Kind {
    /// The first size of the next one.
    below: u32,
    /// Messages of a run that are measured, and those before them and after them, for each queue pair.
    counted: u32,
    margin: u32,
}

const KINDS: [Kind; CLASSES] = [
    Kind { below: 32 << 10, counted: 16, margin: 20 },
    Kind { below: 256 << 10, counted: 16, margin: 20 },
    Kind { below: 2 << 20, counted: 8, margin: 12 },
    Kind { below: u32::MAX, counted: 4, margin: 4 },
];

/// The class of a size.
fn class_of(len: u32) -> usize {
    KINDS.iter().position(|kind| len < kind.below).unwrap_or(CLASSES - 1)
}

/// A way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// The responder pulls, with the requester's help.
    Straight,
    /// Through the bounce ring.
    Ring,
}

/// What is known of each peer towards which there are queue pairs.
static CHOICES: PerProcess<Vec<(i32, Weak<Mutex<Choice>>)>> = PerProcess::new();

/// A queue pair's part in the choice.
pub struct Route {
    choice: Arc<Mutex<Choice>>,
    /// The last request asked for, plus 1, and its way.
    chosen: (u64, Way),
    /// The last answers, by class, for when another thread is at the choice; and the epoch in which this queue pair was counted.
    ways: [Way; CLASSES],
    epochs: [u32; CLASSES],
    part: Part,
}

/// What a queue pair has to do with a probe.
#[derive(Debug, Clone, Copy, Default)]
struct Part {
    /// Which probe, and its class.
    number: u64,
    class: usize,
    /// The first request that it measures, and the last, plus 1.
    first: u64,
    last: u64,
    /// Messages and bytes that were accepted and are not counted yet, as another thread was at the choice.
    owed: (u32, u64),
}

impl Route {
    /// For a queue pair towards process `peer`. Where nothing is known of it, the first messages of each class are a probe.
    pub fn towards(peer: Option<i32>) -> Route {
        let known = peer.map(|pid| {
            CHOICES.with(|choices| {
                choices.retain(|(_, choice)| choice.strong_count() > 0);
                choices.iter().find(|(of, _)| *of == pid).and_then(|(_, choice)| choice.upgrade()).unwrap_or_else(|| {
                    let choice = Arc::default();
                    choices.push((pid, Arc::downgrade(&choice)));
                    choice
                })
            })
        });
        Route::of(known.unwrap_or_default())
    }

    fn of(choice: Arc<Mutex<Choice>>) -> Route {
        Route { choice, chosen: (0, Way::Straight), ways: [Way::Straight; CLASSES], epochs: [0; CLASSES], part: Part::default() }
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
        let class = class_of(len);
        let (Some(way), Some(epoch)) = (self.ways.get_mut(class), self.epochs.get_mut(class)) else { return Way::Straight };
        let Ok(mut choice) = self.choice.try_lock() else { return *way };
        let measured;
        (*way, measured) = choice.find(class, epoch, now);
        if measured {
            if self.part.number != choice.number {
                self.part = Part { number: choice.number, class, first: request, ..Part::default() };
            }
            self.part.last = request + 1;
        }
        *way
    }

    /// Requests `from..upto` were accepted. `len` tells their sizes.
    #[inline]
    pub fn accepted(&mut self, from: u64, upto: u64, len: impl Fn(u64) -> u32) {
        self.heed(from, upto, len, clock::now);
    }

    #[inline]
    fn heed(&mut self, from: u64, upto: u64, len: impl Fn(u64) -> u32, now: impl FnOnce() -> u64) {
        // A probe may wait for its next message for ever, while others come and go that need no clock.
        if from < self.part.last {
            self.take(from, upto, len, now());
        }
    }

    #[cold]
    fn take(&mut self, from: u64, upto: u64, len: impl Fn(u64) -> u32, now: u64) {
        let part = &mut self.part;
        for request in from.max(part.first)..upto.min(part.last) {
            let len = len(request);
            if class_of(len) == part.class {
                part.owed = (part.owed.0 + 1, part.owed.1 + u64::from(len));
            }
        }
        let Ok(mut choice) = self.choice.try_lock() else { return };
        let (messages, bytes) = std::mem::take(&mut part.owed);
        if !choice.probing || choice.number != part.number {
            part.last = 0;
        } else if messages > 0 {
            choice.take(messages, bytes, now);
        }
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        // What it had under way is not accepted any more.
        if let Ok(mut choice) = self.choice.try_lock()
            && choice.number == self.part.number
        {
            choice.probing = false;
        }
    }
}

/// What the queue pairs towards one process know.
#[derive(Debug)]
struct Choice {
    classes: [Class; CLASSES],
    /// Whether there is a probe under way, and how many there were.
    probing: bool,
    number: u64,
    probe: Probe,
}

/// What is known of a class of sizes.
#[derive(Debug, Clone, Copy)]
struct Class {
    way: Way,
    /// Messages until it is probed again.
    left: u32,
    /// How many of each queue pair that were at the beginning.
    hold: u32,
    /// The epoch, which begins with a probe, and the queue pairs that have sent in it.
    epoch: u32,
    active: u32,
}

impl Default for Choice {
    fn default() -> Choice {
        let class = Class { way: Way::Straight, left: 0, hold: SHORTEST, epoch: 1, active: 0 };
        Choice { classes: [class; CLASSES], probing: false, number: 0, probe: Probe::default() }
    }
}

impl Choice {
    /// The way of the next message, and whether it is part of a probe. `epoch` is the sender's.
    fn find(&mut self, index: usize, epoch: &mut u32, now: impl FnOnce() -> u64) -> (Way, bool) {
        let Some(class) = self.classes.get_mut(index) else { return (Way::Straight, false) };
        if *epoch != class.epoch {
            *epoch = class.epoch;
            class.active += 1;
        }
        if self.probing
            && self.probe.class == index
            && let Some(way) = self.probe.hand_over(now)
        {
            return (way, true);
        }
        class.left = class.left.saturating_sub(1);
        if class.left > 0 {
            return (class.way, false);
        }
        let progress = (self.probe.sent, self.probe.accepted);
        if self.probing && self.probe.before != progress {
            self.probe.before = progress;
            class.left = RETRY.saturating_mul(class.active);
            return (class.way, false);
        }
        self.probing = true;
        self.number += 1;
        self.probe = Probe::of(index, class.active);
        class.epoch = class.epoch.wrapping_add(1);
        (*epoch, class.active) = (class.epoch, 1);
        (Way::Straight, self.probe.hand_over(|| 0).is_some())
    }

    /// So much more of the probe was accepted.
    fn take(&mut self, messages: u32, bytes: u64, now: u64) {
        let Some([straight, ring]) = self.probe.take(messages, bytes, now) else { return };
        self.probing = false;
        let Some(class) = self.classes.get_mut(self.probe.class) else { return };
        let way = if ring < straight { Way::Ring } else { Way::Straight };
        class.hold = if way == class.way { (class.hold * 2).min(LONGEST) } else { SHORTEST };
        class.way = way;
        class.left = class.hold.saturating_mul(class.active).min(LONGEST_OF_ALL);
    }
}

/// A probe under way.
#[derive(Debug, Default)]
struct Probe {
    class: usize,
    /// Messages of a run that are measured, and those before them and after them.
    counted: u32,
    margin: u32,
    /// Messages handed over, and accepted.
    sent: u32,
    accepted: u32,
    runs: [Run; RUNS],
    /// Beginnings and ends of what is measured that have passed: two for each run.
    passed: usize,
    /// Since when nothing is under way; 0 while something is. And how long that was before.
    idle_since: u64,
    idle: u64,
    /// `sent` and `accepted` when another class last had to wait.
    before: (u32, u32),
}

/// The measured part of a run.
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    /// Its beginning and its end, by a clock that stands still while nothing is under way, and what was accepted between them.
    times: [u64; 2],
    bytes: u64,
}

impl Probe {
    /// For so many queue pairs.
    fn of(class: usize, active: u32) -> Probe {
        let (counted, margin) = KINDS.get(class).map_or((1, 1), |kind| (kind.counted, kind.margin));
        Probe { class, counted: counted * active.clamp(1, CROWD), margin: margin.saturating_mul(active.max(1)), ..Probe::default() }
    }

    /// The way of the next message; none if the probe has all it needs.
    fn hand_over(&mut self, now: impl FnOnce() -> u64) -> Option<Way> {
        let number = (u64::from(self.sent) / self.length()) as usize;
        if number >= RUNS {
            return None;
        }
        if self.idle_since != 0 {
            self.idle += now().saturating_sub(self.idle_since);
            self.idle_since = 0;
        }
        self.sent += 1;
        Some(if number.is_multiple_of(2) { Way::Straight } else { Way::Ring })
    }

    /// So much more was accepted. Once all that is measured was, the pace of either way.
    fn take(&mut self, messages: u32, bytes: u64, now: u64) -> Option<[f64; 2]> {
        self.accepted = self.accepted.saturating_add(messages).min(self.sent);
        if let (false, Some(run)) = (self.passed.is_multiple_of(2), self.runs.get_mut(self.passed / 2)) {
            run.bytes += bytes;
        }
        while u64::from(self.accepted) >= self.mark()
            && let Some(run) = self.runs.get_mut(self.passed / 2)
        {
            run.times[self.passed % 2] = now.saturating_sub(self.idle);
            self.passed += 1;
            if !self.passed.is_multiple_of(2) {
                // A run begins; what is of it comes later.
                break;
            }
        }
        if self.accepted == self.sent && self.idle_since == 0 {
            self.idle_since = now;
        }
        (self.passed == 2 * RUNS).then(|| {
            let pace = |run: &Run| run.times[1].saturating_sub(run.times[0]) as f64 / run.bytes.max(1) as f64;
            [0, 1].map(|first| self.runs.iter().skip(first).step_by(2).map(pace).fold(f64::MAX, f64::min))
        })
    }

    fn length(&self) -> u64 {
        (u64::from(self.counted) + 2 * u64::from(self.margin)).max(1)
    }

    /// How many messages have to be accepted for the next beginning or end.
    fn mark(&self) -> u64 {
        let measured = if self.passed.is_multiple_of(2) { 0 } else { u64::from(self.counted) };
        self.passed as u64 / 2 * self.length() + u64::from(self.margin) + measured
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// A sender with queue pairs and so many messages outstanding on each, and a responder that takes so long for a message either way.
    struct World {
        lanes: Vec<Lane>,
        /// How many of them send.
        awake: usize,
        clock: u64,
    }

    struct Lane {
        route: Route,
        next: u64,
        outstanding: VecDeque<u64>,
    }

    impl World {
        fn new(lanes: usize) -> World {
            let choice = Arc::default();
            let lane = |_| Lane { route: Route::of(Arc::clone(&choice)), next: 0, outstanding: VecDeque::new() };
            World { lanes: (0..lanes).map(lane).collect(), awake: lanes, clock: 1 }
        }

        /// How many of `count` messages on each queue pair go through the ring.
        fn send(&mut self, count: usize, len: u32, depth: usize, [straight, ring]: [u64; 2]) -> usize {
            let (mut through, alone) = (0, self.lanes.len() == 1);
            for _ in 0..count {
                // A poll of one of many finds several messages done.
                let portion = if alone { 1 } else { depth.div_ceil(2) };
                for lane in self.lanes.iter_mut().take(self.awake) {
                    let clock = self.clock;
                    let way = lane.route.find(lane.next, len, || clock);
                    lane.next += 1;
                    through += usize::from(way == Way::Ring);
                    lane.outstanding.push_back(if way == Way::Ring { ring } else { straight });
                    if lane.outstanding.len() < depth {
                        continue;
                    }
                    let from = lane.next - lane.outstanding.len() as u64;
                    self.clock += lane.outstanding.drain(..portion).sum::<u64>();
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
                assert_eq!(Route::of(choice).find(0, 64 << 10, || 0), expected);
            }
        }
    }

    #[test]
    fn a_queue_pair_that_goes_leaves_no_probe_behind() {
        let mut world = World::new(2);
        world.send(50, 65536, 8, [400, 900]);
        let choice = Arc::clone(&world.lanes[0].route.choice);
        assert!(choice.lock().unwrap().probing);
        world.lanes.pop();
        assert!(!choice.lock().unwrap().probing);
        world.send(2000, 65536, 8, [400, 900]);
        assert_eq!(world.send(100, 65536, 8, [400, 900]), 0);
    }

    #[test]
    fn peers_are_told_apart_and_forgotten() {
        let [one, same, other] = [4_194_305, 4_194_305, 4_194_306].map(|pid| Route::towards(Some(pid)));
        assert!(Arc::ptr_eq(&one.choice, &same.choice) && !Arc::ptr_eq(&one.choice, &other.choice));
        assert!(!Arc::ptr_eq(&Route::towards(None).choice, &Route::towards(None).choice));
        one.choice.lock().unwrap().classes[0].hold = 7;
        drop((one, same));
        assert_eq!(Route::towards(Some(4_194_305)).choice.lock().unwrap().classes[0].hold, SHORTEST);
    }

    /// Another thread may be at the choice at any time: nothing waits for it, and nothing is lost.
    #[test]
    fn what_was_accepted_meanwhile_is_counted_later() {
        let mut route = Route::of(Arc::default());
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
        let (mut route, mut probed) = (Route::of(Arc::default()), [false; CLASSES]);
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
        let mut route = Route::of(Arc::default());
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
        let mut route = Route::of(Arc::default());
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
        let mut route = Route::of(Arc::default());
        let ways: Vec<Way> = (0..400).map(|i| route.choose(i / 2, 65536)).collect();
        assert!(ways.chunks(2).all(|pair| pair[0] == pair[1]) && ways.contains(&Way::Ring));
        assert_eq!(route.choice.lock().unwrap().probe.sent, 200);
    }
}
