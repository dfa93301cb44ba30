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
/// Messages of each queue pair for which an answer holds, and of all together at most; or sixteen times as many as the probe took.
const SHORTEST: u32 = 256;
const LONGEST: u32 = 1 << 17;
const LONGEST_OF_ALL: u32 = 1 << 20;
/// Messages of each queue pair after which it is tried again, at most, what could not be measured.
const UNDECIDED: u32 = 16 * SHORTEST;
/// Messages of each queue pair that wait for a probe that others are at, or that has all its messages, until it is given up.
const RETRY: u32 = 1024;
/// Classes of sizes. What fits the caches goes at another pace than what does not.
const CLASSES: usize = 4;

/// A class of sizes.
struct Kind {
    /// The first size of the next one.
    below: u32,
    /// Messages of a run that are measured, and those before them and after them, for each queue pair. Who has several outstanding may find them
    /// done all at once, so fewer than that would measure when somebody looked; and a run is a multiple of what senders like to have outstanding, 8,
    /// so that all begin alike.
    counted: u32,
    margin: u32,
}

const KINDS: [Kind; CLASSES] = [
    Kind { below: 32 << 10, counted: 32, margin: 16 },
    Kind { below: 256 << 10, counted: 32, margin: 16 },
    Kind { below: 2 << 20, counted: 16, margin: 8 },
    Kind { below: u32::MAX, counted: 8, margin: 4 },
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
#[derive(Debug)]
struct Part {
    /// Which one.
    number: u64,
    /// A bit for each slot of the send queue, set if its request is measured and not accepted; and how many are.
    measured: Box<[u64]>,
    open: u32,
    /// Messages and bytes that were accepted and are not counted yet, as another thread was at the choice.
    owed: (u32, u64),
}

impl Route {
    /// For a queue pair towards process `peer` whose send queue has `slots` slots (a power of two). Where nothing is known of the peer, the first
    /// messages of each class are a probe.
    pub fn towards(peer: Option<i32>, slots: usize) -> Route {
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
        Route::of(known.unwrap_or_default(), slots)
    }

    fn of(choice: Arc<Mutex<Choice>>, slots: usize) -> Route {
        let part = Part { number: 0, measured: vec![0; slots.div_ceil(64)].into(), open: 0, owed: (0, 0) };
        Route { choice, chosen: (0, Way::Straight), ways: [Way::Straight; CLASSES], epochs: [0; CLASSES], part }
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
            self.part.add(choice.number, request);
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
        if self.part.open > 0 || self.part.owed.0 > 0 {
            self.take(from, upto, len, now);
        }
    }

    #[cold]
    fn take(&mut self, from: u64, upto: u64, len: impl Fn(u64) -> u32, now: impl FnOnce() -> u64) {
        for request in from..upto {
            if self.part.remove(request) {
                self.part.owed = (self.part.owed.0 + 1, self.part.owed.1 + u64::from(len(request)));
            }
        }
        self.settle(now);
    }

    /// Counts what is owed, unless another thread is at the choice.
    fn settle(&mut self, now: impl FnOnce() -> u64) {
        if self.part.owed.0 > 0
            && let Ok(mut choice) = self.choice.try_lock()
        {
            let (messages, bytes) = std::mem::take(&mut self.part.owed);
            if choice.probing && choice.number == self.part.number {
                choice.take(messages, bytes, now());
            }
        }
    }
}

impl Drop for Route {
    fn drop(&mut self) {
        // What it had under way will not be accepted: the run was disturbed, and goes on.
        self.part.owed.0 += std::mem::take(&mut self.part.open);
        self.settle(clock::now);
        if let Ok(mut choice) = self.choice.try_lock() {
            for (class, epoch) in choice.classes.iter_mut().zip(self.epochs) {
                class.active -= u32::from(class.epoch == epoch && class.active > 0);
            }
        }
    }
}

impl Part {
    /// Request `request` is measured by probe `number`.
    fn add(&mut self, number: u64, request: u64) {
        if self.number != number {
            // The one before was given up.
            self.measured.fill(0);
            (self.number, self.open, self.owed) = (number, 0, (0, 0));
        }
        if let Some(bits) = self.bits(request) {
            *bits |= 1 << (request % 64);
            self.open += 1;
        }
    }

    /// Whether it was, once.
    fn remove(&mut self, request: u64) -> bool {
        let Some(bits) = self.bits(request) else { return false };
        let bit = 1 << (request % 64);
        let was = *bits & bit != 0;
        *bits &= !bit;
        self.open -= u32::from(was);
        was
    }

    fn bits(&mut self, request: u64) -> Option<&mut u64> {
        let words = self.measured.len().max(1) as u64;
        self.measured.get_mut((request / 64 % words) as usize)
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
    /// The probe that it waited for.
    waited: u64,
}

impl Default for Choice {
    fn default() -> Choice {
        let class = Class { way: Way::Straight, left: 0, hold: SHORTEST, epoch: 1, active: 0, waited: 0 };
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
        if self.probing && class.waited != self.number {
            class.waited = self.number;
            class.left = RETRY.saturating_mul(class.active.max(1));
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
        if class.active > 2 * self.probe.active {
            // Most came while it was under way, and had no part in its measure.
            class.left = 0;
            return;
        }
        let (way, longest) = match (straight, ring) {
            (Some(straight), Some(ring)) => (if ring < straight { Way::Ring } else { Way::Straight }, LONGEST),
            _ => (class.way, UNDECIDED),
        };
        class.hold = if way == class.way { class.hold.max((class.hold * 2).min(longest)) } else { SHORTEST };
        class.way = way;
        let most = LONGEST_OF_ALL.max((self.probe.length() * 16 * RUNS as u64).try_into().unwrap_or(u32::MAX));
        class.left = class.hold.saturating_mul(class.active.max(1)).min(most);
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
    /// Queue pairs that it was made for.
    active: u32,
    runs: [Run; RUNS],
    /// Beginnings and ends of what is measured that have passed: two for each run.
    passed: usize,
    /// Since when nothing is under way; 0 while something is. And how long that was before.
    idle_since: u64,
    idle: u64,
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
        let active = active.max(1);
        Probe { class, counted: counted.saturating_mul(active), margin: margin.saturating_mul(active), active, ..Probe::default() }
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

    /// So much more was accepted. Once all that is measured was, the pace of either way, where a run of it could be measured.
    fn take(&mut self, messages: u32, bytes: u64, now: u64) -> Option<[Option<f64>; 2]> {
        self.accepted = self.accepted.saturating_add(messages).min(self.sent);
        if let (false, Some(run)) = (self.passed.is_multiple_of(2), self.runs.get_mut(self.passed / 2)) {
            run.bytes += bytes;
        }
        while u64::from(self.accepted) >= self.mark()
            && let Some(run) = self.runs.get_mut(self.passed / 2)
        {
            run.times[self.passed % 2] = now.saturating_sub(self.idle);
            self.passed += 1;
        }
        if self.accepted == self.sent && self.idle_since == 0 {
            self.idle_since = now;
        }
        (self.passed == 2 * RUNS).then(|| {
            // A run that came and went at once was not measured.
            let pace = |run: &Run| {
                let time = run.times[1].saturating_sub(run.times[0]);
                (time > 0 && run.bytes > 0).then(|| time as f64 / run.bytes as f64)
            };
            [0, 1].map(|first| self.runs.iter().skip(first).step_by(2).filter_map(pace).min_by(f64::total_cmp))
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
mod tests;
