//! Chooses the path of bulk data: CMA (cross-memory attach) or the bounce ring. Which one is faster is measured while data moves, per peer process
//! and class of sizes, as it depends on the processor, on the cores of the two processes, and on their load. Used by the threads that drive
//! queue pairs.
//!
//! CMA is one copy, at the speed of `process_vm_readv`, made by both sides; the bounce ring is two plain copies, one by each side, and every
//! byte passes from one core's cache into the other's. Either path may be five times as fast as the other.
//!
//! All queue pairs to a process share the measurement: what one of them moves says nothing of its path while the others take the other one.
//! A probe sends runs of messages by each path in turn and measures the middle of each run, as at both ends it overlaps its neighbours: a
//! requester fills the bounce ring while earlier messages are still being copied by CMA. It measures the time between acks, less the time in
//! which nothing was in flight. The better run of each path decides, as other load can slow a run down but not speed it up. The answer holds
//! for a number of messages, which doubles whenever the next probe gives the same answer.

use std::sync::{Arc, Mutex, Weak};

use crate::base::clock;
use crate::base::fork::PerProcess;

/// Runs of a probe, by each path in turn.
const RUNS: usize = 4;
/// Messages of each queue pair for which an answer holds, and of all together at most; or sixteen times as many as the probe took.
const SHORTEST: u32 = 256;
const LONGEST: u32 = 1 << 17;
const LONGEST_OF_ALL: u32 = 1 << 20;
/// Messages of each queue pair, at most, until a probe that measured nothing is repeated.
const UNDECIDED: u32 = 16 * SHORTEST;
/// Messages of each queue pair that wait for another class's probe, until that one is given up.
const RETRY: u32 = 1024;
/// Classes of sizes. What fits the caches moves at another speed than what does not.
const CLASSES: usize = 4;

/// How a class of sizes is probed.
struct ClassParams {
    /// The first size of the next class.
    below: u32,
    /// Messages of a run that are measured, and those before and after them, per queue pair. A requester with several outstanding may see them all
    /// acked by one poll, so fewer than that would measure when it polled. A run is a multiple of 8, which requesters like to have outstanding, so
    /// that all runs begin alike.
    counted: u32,
    margin: u32,
}

const CLASS_PARAMS: [ClassParams; CLASSES] = [
    ClassParams { below: 32 << 10, counted: 32, margin: 16 },
    ClassParams { below: 256 << 10, counted: 32, margin: 16 },
    ClassParams { below: 2 << 20, counted: 16, margin: 8 },
    ClassParams { below: u32::MAX, counted: 8, margin: 4 },
];

/// The class of a size.
fn class_of(len: u32) -> usize {
    CLASS_PARAMS.iter().position(|params| len < params.below).unwrap_or(CLASSES - 1)
}

/// How the bytes of a WRITE or SEND get to the responder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyPath {
    /// Cross-memory attach: the responder reads them, with the requester's help under a grant.
    Cma,
    /// Both sides copy, through the bounce ring.
    Bounce,
}

/// The peers to which this process has queue pairs, by pid.
static PEERS: PerProcess<Vec<(i32, Weak<Mutex<PeerPaths>>)>> = PerProcess::new();

/// Chooses the copy path for the requests of one queue pair.
pub struct PathChooser {
    peer: Arc<Mutex<PeerPaths>>,
    /// The request that was last asked for, plus 1, and its path.
    chosen: (u64, CopyPath),
    /// By class: the last path, used while another thread has the lock; and the epoch in which this queue pair was last counted as active.
    paths: [CopyPath; CLASSES],
    epochs: [u32; CLASSES],
    share: ProbeShare,
}

/// The messages of a probe that are this queue pair's.
#[derive(Debug)]
struct ProbeShare {
    /// Number of the probe.
    number: u64,
    /// A bit for each slot of the send queue, set if its request is part of the probe and not acked; and how many are set.
    measured: Box<[u64]>,
    open: u32,
    /// Messages and bytes that were acked and not reported to the probe, because another thread had the lock.
    unreported: (u32, u64),
}

impl PathChooser {
    /// For a queue pair to process `peer` whose send queue has `slots` slots (a power of two). If nothing is known of the peer, the first messages
    /// of each class are a probe.
    pub fn towards(peer: Option<i32>, slots: usize) -> PathChooser {
        let known = peer.map(|pid| {
            PEERS.with(|peers| {
                peers.retain(|(_, peer)| peer.strong_count() > 0);
                peers.iter().find(|(of, _)| *of == pid).and_then(|(_, peer)| peer.upgrade()).unwrap_or_else(|| {
                    let peer = Arc::default();
                    peers.push((pid, Arc::downgrade(&peer)));
                    peer
                })
            })
        });
        PathChooser::of(known.unwrap_or_default(), slots)
    }

    fn of(peer: Arc<Mutex<PeerPaths>>, slots: usize) -> PathChooser {
        let share = ProbeShare { number: 0, measured: vec![0; slots.div_ceil(64)].into(), open: 0, unreported: (0, 0) };
        PathChooser { peer, chosen: (0, CopyPath::Cma), paths: [CopyPath::Cma; CLASSES], epochs: [0; CLASSES], share }
    }

    /// The path of request number `request` of `len` bytes, which is sent next; the same however often it is asked for.
    #[inline]
    pub fn choose(&mut self, request: u64, len: u32) -> CopyPath {
        if self.chosen.0 != request + 1 {
            self.chosen = (request + 1, self.choose_at(request, len, clock::now));
        }
        self.chosen.1
    }

    fn choose_at(&mut self, request: u64, len: u32, now: impl FnOnce() -> u64) -> CopyPath {
        let class = class_of(len);
        let (Some(path), Some(epoch)) = (self.paths.get_mut(class), self.epochs.get_mut(class)) else { return CopyPath::Cma };
        let Ok(mut peer) = self.peer.try_lock() else { return *path };
        let measured;
        (*path, measured) = peer.choose(class, epoch, now);
        if measured {
            self.share.add(peer.number, request);
        }
        *path
    }

    /// Requests `from..upto` are acked. `len` tells their sizes.
    #[inline]
    pub fn on_acked(&mut self, from: u64, upto: u64, len: impl Fn(u64) -> u32) {
        self.on_acked_at(from, upto, len, clock::now);
    }

    #[inline]
    fn on_acked_at(&mut self, from: u64, upto: u64, len: impl Fn(u64) -> u32, now: impl FnOnce() -> u64) {
        // While a probe waits for its next message, acks of other requests read no clock.
        if self.share.open > 0 || self.share.unreported.0 > 0 {
            self.count_acked(from, upto, len, now);
        }
    }

    #[cold]
    fn count_acked(&mut self, from: u64, upto: u64, len: impl Fn(u64) -> u32, now: impl FnOnce() -> u64) {
        for request in from..upto {
            if self.share.remove(request) {
                self.share.unreported = (self.share.unreported.0 + 1, self.share.unreported.1 + u64::from(len(request)));
            }
        }
        self.report_share(now);
    }

    /// Reports acked messages to the probe, unless another thread has the lock.
    fn report_share(&mut self, now: impl FnOnce() -> u64) {
        if self.share.unreported.0 > 0
            && let Ok(mut peer) = self.peer.try_lock()
        {
            let (messages, bytes) = std::mem::take(&mut self.share.unreported);
            if peer.probing && peer.number == self.share.number {
                peer.on_acked(messages, bytes, now());
            }
        }
    }
}

impl Drop for PathChooser {
    fn drop(&mut self) {
        // Requests in flight will not be acked any more. The probe goes on without them: it was disturbed.
        self.share.unreported.0 += std::mem::take(&mut self.share.open);
        self.report_share(clock::now);
        if let Ok(mut peer) = self.peer.try_lock() {
            for (class, epoch) in peer.classes.iter_mut().zip(self.epochs) {
                class.active -= u32::from(class.epoch == epoch && class.active > 0);
            }
        }
    }
}

impl ProbeShare {
    /// Request `request` is part of probe `number`.
    fn add(&mut self, number: u64, request: u64) {
        if self.number != number {
            // The earlier probe was given up.
            self.measured.fill(0);
            (self.number, self.open, self.unreported) = (number, 0, (0, 0));
        }
        if let Some(bits) = self.bits(request) {
            *bits |= 1 << (request % 64);
            self.open += 1;
        }
    }

    /// Request `request` is acked; whether it was part of the probe.
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

/// What is known of the paths to one process.
#[derive(Debug)]
struct PeerPaths {
    classes: [ClassPath; CLASSES],
    /// Whether a probe runs, and the number of the last one.
    probing: bool,
    number: u64,
    probe: PathProbe,
}

/// The path of a class of sizes.
#[derive(Debug, Clone, Copy)]
struct ClassPath {
    path: CopyPath,
    /// Messages until it is probed again.
    left: u32,
    /// Messages of each queue pair for which the last answer holds.
    hold: u32,
    /// The epoch, which begins with a probe, and how many queue pairs have sent in it.
    epoch: u32,
    active: u32,
    /// The probe of another class that it has waited for.
    waited: u64,
}

impl Default for PeerPaths {
    fn default() -> PeerPaths {
        let class = ClassPath { path: CopyPath::Cma, left: 0, hold: SHORTEST, epoch: 1, active: 0, waited: 0 };
        PeerPaths { classes: [class; CLASSES], probing: false, number: 0, probe: PathProbe::default() }
    }
}

impl PeerPaths {
    /// The path of the next message of class `index`, and whether it is part of a probe. `epoch` is the queue pair's.
    fn choose(&mut self, index: usize, epoch: &mut u32, now: impl FnOnce() -> u64) -> (CopyPath, bool) {
        let Some(class) = self.classes.get_mut(index) else { return (CopyPath::Cma, false) };
        if *epoch != class.epoch {
            *epoch = class.epoch;
            class.active += 1;
        }
        if self.probing
            && self.probe.class == index
            && let Some(path) = self.probe.assign(now)
        {
            return (path, true);
        }
        class.left = class.left.saturating_sub(1);
        if class.left > 0 {
            return (class.path, false);
        }
        if self.probing && class.waited != self.number {
            class.waited = self.number;
            class.left = RETRY.saturating_mul(class.active.max(1));
            return (class.path, false);
        }
        self.probing = true;
        self.number += 1;
        self.probe = PathProbe::of(index, class.active);
        class.epoch = class.epoch.wrapping_add(1);
        (*epoch, class.active) = (class.epoch, 1);
        (CopyPath::Cma, self.probe.assign(|| 0).is_some())
    }

    /// So many more messages and bytes of the probe are acked.
    fn on_acked(&mut self, messages: u32, bytes: u64, now: u64) {
        let Some([cma, bounce]) = self.probe.on_acked(messages, bytes, now) else { return };
        self.probing = false;
        let Some(class) = self.classes.get_mut(self.probe.class) else { return };
        if class.active > 2 * self.probe.active {
            // Most queue pairs began to send while it ran, and were not measured.
            class.left = 0;
            return;
        }
        let (path, longest) = match (cma, bounce) {
            (Some(cma), Some(bounce)) => (if bounce < cma { CopyPath::Bounce } else { CopyPath::Cma }, LONGEST),
            _ => (class.path, UNDECIDED),
        };
        class.hold = if path == class.path { class.hold.max((class.hold * 2).min(longest)) } else { SHORTEST };
        class.path = path;
        let most = LONGEST_OF_ALL.max((self.probe.length() * 16 * RUNS as u64).try_into().unwrap_or(u32::MAX));
        class.left = class.hold.saturating_mul(class.active.max(1)).min(most);
    }
}

/// A probe that runs.
#[derive(Debug, Default)]
struct PathProbe {
    class: usize,
    /// Messages of a run that are measured, and those before and after them.
    counted: u32,
    margin: u32,
    /// Messages sent, and acked.
    sent: u32,
    acked: u32,
    /// Queue pairs that it was made for.
    active: u32,
    runs: [Run; RUNS],
    /// How many beginnings and ends of measured parts have passed: two for each run.
    marks_passed: usize,
    /// Since when nothing is in flight, 0 while something is; and for how long nothing was before.
    idle_since: u64,
    idle: u64,
}

/// The measured part of a run.
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    /// Its beginning and its end, by a clock that stands still while nothing is in flight, and the bytes acked between them.
    times: [u64; 2],
    bytes: u64,
}

impl PathProbe {
    /// For so many queue pairs.
    fn of(class: usize, active: u32) -> PathProbe {
        let (counted, margin) = CLASS_PARAMS.get(class).map_or((1, 1), |params| (params.counted, params.margin));
        let active = active.max(1);
        PathProbe { class, counted: counted.saturating_mul(active), margin: margin.saturating_mul(active), active, ..PathProbe::default() }
    }

    /// The path of the next message; none if the probe has all the messages it needs.
    fn assign(&mut self, now: impl FnOnce() -> u64) -> Option<CopyPath> {
        let number = (u64::from(self.sent) / self.length()) as usize;
        if number >= RUNS {
            return None;
        }
        if self.idle_since != 0 {
            self.idle += now().saturating_sub(self.idle_since);
            self.idle_since = 0;
        }
        self.sent += 1;
        Some(if number.is_multiple_of(2) { CopyPath::Cma } else { CopyPath::Bounce })
    }

    /// So many more messages and bytes are acked. Once all that is measured is: the time per byte of each path, if a run of it could be measured.
    fn on_acked(&mut self, messages: u32, bytes: u64, now: u64) -> Option<[Option<f64>; 2]> {
        self.acked = self.acked.saturating_add(messages).min(self.sent);
        if let (false, Some(run)) = (self.marks_passed.is_multiple_of(2), self.runs.get_mut(self.marks_passed / 2)) {
            run.bytes += bytes;
        }
        while u64::from(self.acked) >= self.next_mark()
            && let Some(run) = self.runs.get_mut(self.marks_passed / 2)
        {
            run.times[self.marks_passed % 2] = now.saturating_sub(self.idle);
            self.marks_passed += 1;
        }
        if self.acked == self.sent && self.idle_since == 0 {
            self.idle_since = now;
        }
        (self.marks_passed == 2 * RUNS).then(|| {
            // A run whose acks all came at once was not measured.
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

    /// How many messages are acked at the next beginning or end.
    fn next_mark(&self) -> u64 {
        let measured = if self.marks_passed.is_multiple_of(2) { 0 } else { u64::from(self.counted) };
        self.marks_passed as u64 / 2 * self.length() + u64::from(self.margin) + measured
    }
}

#[cfg(test)]
mod tests;
