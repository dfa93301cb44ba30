//! Chooses the path of bulk data: CMA (cross-memory attach) or the bounce ring. Which one is faster is measured while data moves, per peer process
//! and class of sizes, as it depends on the processor, on the cores of the two processes, and on their load. Used by the threads that drive
//! queue pairs.
//!
//! CMA is one copy, at the speed of `process_vm_readv`, made by both sides; the bounce ring is two plain copies, one by each side, and every
//! byte passes from one core's cache into the other's. Either path may be five times as fast as the other.
//!
//! A probe sends runs of messages by each path in turn, on all queue pairs to the process at once: they share the memory's bandwidth, so
//! that one cannot be measured while others use the other path. It measures a run once what is in flight is all of the run, less the time in which nothing
//! is in flight. The better run of each path decides, as other load can slow a run down but not speed it up. The answer holds for a number
//! of messages, which doubles whenever the next probe gives the same answer.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};

use crate::base::clock;
use crate::base::fork::PerProcess;

/// Runs of a probe, by each path in turn.
const RUNS: usize = 4;
/// An answer holds for at least so many times the messages that its probe took.
const FIRST_HOLD: u32 = 4;
/// The same answer again holds for twice as many messages as the last time, up to this number.
const LONGEST_HOLD: u32 = 1 << 20;
/// Messages of other classes after which a probe that gets none of its own is given up.
const GIVE_UP: u32 = 1024;
/// The first size of the next class, and messages of a run that are measured at least. What fits the caches moves at another speed than what does not.
const CLASSES: [(u32, u32); 4] = [(32 << 10, 32), (256 << 10, 32), (2 << 20, 16), (u32::MAX, 8)];

/// The class of a size.
fn class_of(len: u32) -> usize {
    CLASSES.iter().position(|(below, _)| len < *below).unwrap_or(CLASSES.len() - 1)
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
    /// By class: the last path, used while another thread has the lock.
    paths: [CopyPath; CLASSES.len()],
    /// Requests of a probe that are not acked, or not reported to the probe as another thread had the lock. Oldest first, with their sizes and runs.
    measured: VecDeque<(u64, u32, u64)>,
}

impl PathChooser {
    /// For a queue pair to process `peer` whose send queue has `slots` slots. If nothing is known of the peer, the first messages of each class are
    /// a probe.
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
        PathChooser { peer, chosen: (0, CopyPath::Cma), paths: [CopyPath::Cma; CLASSES.len()], measured: VecDeque::with_capacity(slots) }
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
        let Some(path) = self.paths.get_mut(class) else { return CopyPath::Cma };
        let Ok(mut peer) = self.peer.try_lock() else { return *path };
        let run;
        (*path, run) = peer.choose(class, now);
        if let Some(run) = run {
            if self.measured.len() == self.measured.capacity() {
                self.measured.pop_front();
            }
            self.measured.push_back((request, len, run));
        }
        *path
    }

    /// Requests below `upto` are acked.
    #[inline]
    pub fn on_acked(&mut self, upto: u64) {
        self.on_acked_at(upto, clock::now);
    }

    #[inline]
    fn on_acked_at(&mut self, upto: u64, now: impl FnOnce() -> u64) {
        if self.measured.front().is_some_and(|(request, ..)| *request < upto) {
            self.report(upto, now);
        }
    }

    /// Reports acked requests to the probe, unless another thread has the lock.
    #[cold]
    fn report(&mut self, upto: u64, now: impl FnOnce() -> u64) {
        if let Ok(mut peer) = self.peer.try_lock() {
            let acked = self.measured.iter().take_while(|(request, ..)| *request < upto).count();
            peer.on_acked(self.measured.drain(..acked).map(|(_, len, run)| (len, run)), now());
        }
    }
}

impl Drop for PathChooser {
    fn drop(&mut self) {
        // What is in flight will not be acked any more. The probe goes on, a little disturbed.
        self.measured.iter_mut().for_each(|(_, len, _)| *len = 0);
        self.report(u64::MAX, clock::now);
    }
}

/// What is known of the paths to one process.
#[derive(Debug, Default)]
struct PeerPaths {
    classes: [ClassPath; CLASSES.len()],
    /// Runs of all probes so far.
    runs: u64,
    probe: Option<Probe>,
}

/// The path of a class of sizes.
#[derive(Debug, Clone, Copy)]
struct ClassPath {
    path: CopyPath,
    /// Messages until it is probed again, and for how many the answer held from the beginning.
    left: u32,
    hold: u32,
}

impl Default for ClassPath {
    fn default() -> Self {
        ClassPath { path: CopyPath::Cma, left: 0, hold: 0 }
    }
}

/// A probe of one class.
#[derive(Debug, Default)]
struct Probe {
    class: usize,
    /// The number of its first run.
    first_run: u64,
    /// Messages sent, those of them that are in flight, and the most that were.
    sent: u32,
    in_flight: u32,
    most: u32,
    /// Since when nothing is, 0 while something is.
    idle_since: u64,
    /// Messages of other classes since the last one of this.
    others: u32,
    /// Finished runs, and the least nanoseconds per byte by each path.
    finished: usize,
    pace: [Option<f64>; 2],
    run: Run,
}

/// A run of a probe.
#[derive(Debug, Default)]
struct Run {
    /// Tells its messages from those of earlier runs that are still in flight.
    number: u64,
    /// Messages acked until it was measured: as many as are in flight at a time, as the first of them overlap those of the run before.
    acked: u32,
    /// Since when it is measured, by a clock that stands still while nothing is in flight; and messages and bytes acked since.
    began: u64,
    counted: u32,
    bytes: u64,
}

impl PeerPaths {
    /// The path of the next message of class `index`, and the run that it is part of, if it is to be measured.
    fn choose(&mut self, index: usize, now: impl FnOnce() -> u64) -> (CopyPath, Option<u64>) {
        let Some(class) = self.classes.get_mut(index) else { return (CopyPath::Cma, None) };
        match &mut self.probe {
            Some(probe) if probe.class == index => return probe.add(now),
            Some(probe) => {
                probe.others += 1;
                if probe.others > GIVE_UP {
                    self.probe = None;
                }
            }
            None => {}
        }
        class.left = class.left.saturating_sub(1);
        if class.left > 0 || self.probe.is_some() {
            return (class.path, None);
        }
        self.runs += 1;
        let run = Run { number: self.runs, ..Run::default() };
        self.probe.insert(Probe { class: index, first_run: self.runs, run, ..Probe::default() }).add(now)
    }

    /// Messages of these sizes and runs are acked.
    fn on_acked(&mut self, acked: impl Iterator<Item = (u32, u64)>, now: u64) {
        let Some(probe) = &mut self.probe else { return };
        if !probe.on_acked(acked, now) {
            return;
        }
        self.runs += 1;
        probe.run = Run { number: self.runs, ..Run::default() };
        let Some(class) = self.classes.get_mut(probe.class).filter(|_| probe.finished == RUNS) else { return };
        let path = match probe.pace {
            [Some(cma), Some(bounce)] if bounce < cma => CopyPath::Bounce,
            [Some(_), Some(_)] => CopyPath::Cma,
            _ => class.path,
        };
        let again = if path == class.path { class.hold.saturating_mul(2).min(LONGEST_HOLD) } else { 0 };
        let hold = again.max(probe.sent.saturating_mul(FIRST_HOLD));
        *class = ClassPath { path, left: hold, hold };
        self.probe = None;
    }
}

impl Probe {
    /// The path of its next message, and the run.
    fn add(&mut self, now: impl FnOnce() -> u64) -> (CopyPath, Option<u64>) {
        if self.idle_since != 0 {
            self.run.began += now().saturating_sub(self.idle_since);
            self.idle_since = 0;
        }
        self.others = 0;
        self.sent = self.sent.saturating_add(1);
        self.in_flight += 1;
        self.most = self.most.max(self.in_flight);
        (if self.finished.is_multiple_of(2) { CopyPath::Cma } else { CopyPath::Bounce }, Some(self.run.number))
    }

    /// Whether a run has ended.
    fn on_acked(&mut self, acked: impl Iterator<Item = (u32, u64)>, now: u64) -> bool {
        let (mut messages, mut bytes) = (0, 0);
        for (len, run) in acked {
            self.in_flight = self.in_flight.saturating_sub(u32::from(run >= self.first_run));
            if run == self.run.number {
                messages += 1;
                bytes += u64::from(len);
            }
        }
        if self.in_flight == 0 && self.idle_since == 0 {
            self.idle_since = now;
        }
        let run = &mut self.run;
        if run.acked < self.most {
            run.acked += messages;
            // Also where more are in flight than before: it is measured anew.
            (run.began, run.counted, run.bytes) = (now, 0, 0);
            return false;
        }
        run.counted += messages;
        run.bytes += bytes;
        let least = CLASSES.get(self.class).map_or(1, |(_, least)| *least);
        if run.counted < least.max(self.most.saturating_mul(4)) {
            return false;
        }
        let time = now.saturating_sub(run.began);
        if let Some(best) = self.pace.get_mut(self.finished % 2).filter(|_| time > 0 && run.bytes > 0) {
            let pace = time as f64 / run.bytes as f64;
            *best = Some(best.map_or(pace, |best| best.min(pace)));
        }
        self.finished += 1;
        true
    }
}

#[cfg(test)]
mod tests;
