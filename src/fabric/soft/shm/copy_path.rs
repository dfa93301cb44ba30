//! Chooses the path of bulk data: CMA (cross-memory attach) or the bounce ring. Which one is faster is measured while data moves, per peer process
//! and class of sizes, as it depends on the processor, on the cores of the two processes, and on their load. Used by the threads that drive
//! queue pairs.
//!
//! CMA is one copy, at the speed of `process_vm_readv`, made by both sides; the bounce ring is two plain copies, one by each side, and every
//! byte passes from one core's cache into the other's. Either path may be five times as fast as the other.
//!
//! A trial sends runs of messages by each path in turn, on all queue pairs to the process at once: they share the memory's bandwidth, so
//! that one cannot be measured while others use the other path. The first messages of a run share the time with the last ones of the run before,
//! which took the other path, so they are not measured. Nor is time in which nothing is in flight. The better run of each path decides, as other
//! load can slow a run down but not speed it up. The answer holds for a number of messages, which doubles whenever the next trial gives the same
//! answer.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};

use crate::base::clock;
use crate::base::fork::PerProcess;

/// Runs of a trial, by each path in turn.
const RUNS: usize = 4;
/// An answer holds for at least so many times the messages that its trial took.
const FIRST_HOLD: u32 = 4;
/// A trial is given up after so many messages of classes that wait for a trial themselves.
const GIVE_UP: u32 = 1024;
/// That number is doubled so often at most.
const MOST_DOUBLED: u32 = 8;

/// Sizes that are measured together: what fits the caches moves at another speed than what does not.
struct Class {
    /// The first size of the next class.
    below: u32,
    /// A run measures at least so many messages.
    run: u32,
    /// An answer holds for at most so many messages, unless its trial was long: half a minute of nothing else.
    longest_hold: u32,
}

const CLASSES: [Class; 4] = [
    Class { below: 32 << 10, run: 32, longest_hold: 1 << 20 },
    Class { below: 256 << 10, run: 32, longest_hold: 1 << 18 },
    Class { below: 2 << 20, run: 16, longest_hold: 1 << 15 },
    Class { below: u32::MAX, run: 8, longest_hold: 1 << 12 },
];

/// The class of a size.
fn class_of(len: u32) -> usize {
    CLASSES.iter().position(|class| len < class.below).unwrap_or(CLASSES.len() - 1)
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
    /// Requests of a trial that it does not know to be acked. Oldest first, with their sizes and runs.
    measured: VecDeque<(u64, u32, u64)>,
    /// Requests below the first number are acked; at the time that follows, the last measured one of them was. The trial is told under the next lock,
    /// if it is still there.
    acked: (u64, u64),
}

impl PathChooser {
    /// For a queue pair to process `peer` whose send queue has `slots` slots. If nothing is known of the peer, the first messages of each class are
    /// a trial.
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
        let paths = [CopyPath::Cma; CLASSES.len()];
        PathChooser { peer, chosen: (0, CopyPath::Cma), paths, measured: VecDeque::with_capacity(slots + 1), acked: (0, 0) }
    }

    /// The path of request number `request` of `len` bytes, which is sent next; the same however often it is asked for.
    #[inline]
    pub fn choose(&mut self, request: u64, len: u32) -> CopyPath {
        if self.chosen.0 != request + 1 {
            self.chosen = (request + 1, self.choose_at(request, len, clock::now));
        }
        self.chosen.1
    }

    #[inline(never)]
    fn choose_at(&mut self, request: u64, len: u32, now: impl FnOnce() -> u64) -> CopyPath {
        let class = class_of(len);
        let Some(path) = self.paths.get_mut(class) else { return CopyPath::Cma };
        let Ok(mut peer) = self.peer.try_lock() else { return *path };
        if !self.measured.is_empty() {
            report(&mut peer, &mut self.measured, self.acked);
        }
        let run;
        (*path, run) = peer.choose(class, now);
        self.measured.extend(run.map(|run| (request, len, run)));
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
            self.measured_acked(upto, now);
        }
    }

    #[cold]
    #[inline(never)]
    fn measured_acked(&mut self, upto: u64, now: impl FnOnce() -> u64) {
        // Not of requests that are not measured: an ack that waits to be reported keeps its time.
        if self.measured.iter().any(|(request, ..)| (self.acked.0..upto).contains(request)) {
            self.acked = (upto, now());
        }
        if let Ok(mut peer) = self.peer.try_lock() {
            report(&mut peer, &mut self.measured, self.acked);
        }
    }
}

/// Tells the trial of the requests below `upto`, which are acked since `at`.
#[cold]
fn report(peer: &mut PeerPaths, measured: &mut VecDeque<(u64, u32, u64)>, (upto, at): (u64, u64)) {
    let acked = measured.iter().take_while(|(request, ..)| *request < upto).count();
    if acked > 0 {
        peer.on_acked(measured.drain(..acked).map(|(_, len, run)| (len, run)), at);
    }
}

impl Drop for PathChooser {
    fn drop(&mut self) {
        if let Ok(mut peer) = self.peer.lock() {
            report(&mut peer, &mut self.measured, self.acked);
            peer.on_lost(self.measured.drain(..).map(|(.., run)| run));
        }
    }
}

/// What is known of the paths to one process.
#[derive(Debug, Default)]
struct PeerPaths {
    classes: [ClassPath; CLASSES.len()],
    /// Runs of all trials so far.
    runs: u64,
    trial: Option<Trial>,
}

/// The path of a class of sizes.
#[derive(Debug, Clone, Copy)]
struct ClassPath {
    path: CopyPath,
    /// The next trial is after so many messages.
    left: u32,
    /// What `left` began with.
    hold: u32,
    /// How often its trial was given up since the last answer: each time, others wait twice as long for the next one.
    given_up: u32,
}

impl Default for ClassPath {
    fn default() -> Self {
        ClassPath { path: CopyPath::Cma, left: 0, hold: 0, given_up: 0 }
    }
}

/// A trial of one class.
#[derive(Debug, Default)]
struct Trial {
    class: usize,
    /// The number of its first run.
    first_run: u64,
    /// Messages sent, those of them that are in flight, and the most that were in this run.
    sent: u32,
    in_flight: u32,
    most: u32,
    /// When the last ack came, and since when nothing is in flight, 0 while something is.
    latest: u64,
    idle_since: u64,
    /// Messages of classes that wait for a trial.
    others: u32,
    /// Finished runs, and the least nanoseconds per byte by each path.
    finished: usize,
    pace: [Option<f64>; 2],
    run: Run,
}

/// A run of a trial.
#[derive(Debug, Default)]
struct Run {
    /// Tells its messages from those of earlier runs that are still in flight.
    number: u64,
    /// Messages acked before it was measured: as many as are in flight at a time.
    acked: u32,
    /// Since when it is measured, put off by the time in which nothing was in flight; and messages and bytes acked since.
    began: u64,
    counted: u32,
    bytes: u64,
}

impl PeerPaths {
    /// The path of the next message of class `index`, and the run that it is part of, if it is to be measured.
    fn choose(&mut self, index: usize, now: impl FnOnce() -> u64) -> (CopyPath, Option<u64>) {
        let Some(class) = self.classes.get_mut(index) else { return (CopyPath::Cma, None) };
        if let Some(trial) = self.trial.as_mut().filter(|trial| trial.class == index) {
            return trial.add(now);
        }
        class.left = class.left.saturating_sub(1);
        let path = class.path;
        if class.left > 0 {
            return (path, None);
        }
        if let Some(trial) = &mut self.trial {
            trial.others += 1;
            let Some(tried) = self.classes.get_mut(trial.class) else { return (path, None) };
            if trial.others < GIVE_UP << tried.given_up.min(MOST_DOUBLED) {
                return (path, None);
            }
            tried.given_up += 1;
            tried.left = trial.sent.saturating_mul(FIRST_HOLD);
        }
        self.runs += 1;
        let run = Run { number: self.runs, ..Run::default() };
        self.trial.insert(Trial { class: index, first_run: self.runs, run, ..Trial::default() }).add(now)
    }

    /// Messages of these sizes and runs are acked, since `at`.
    fn on_acked(&mut self, acked: impl Iterator<Item = (u32, u64)>, at: u64) {
        let Some(trial) = &mut self.trial else { return };
        if !trial.on_acked(acked, at) {
            return;
        }
        self.runs += 1;
        trial.run = Run { number: self.runs, ..Run::default() };
        trial.most = trial.in_flight;
        if trial.finished < RUNS {
            return;
        }
        if let (Some(class), Some(Class { longest_hold, .. })) = (self.classes.get_mut(trial.class), CLASSES.get(trial.class)) {
            let answer = match trial.pace {
                [Some(cma), Some(bounce)] => Some(if bounce < cma { CopyPath::Bounce } else { CopyPath::Cma }),
                _ => None,
            };
            let again = if answer == Some(class.path) { class.hold.saturating_mul(2).min(*longest_hold) } else { 0 };
            let hold = again.max(trial.sent.saturating_mul(FIRST_HOLD));
            *class = ClassPath { path: answer.unwrap_or(class.path), left: hold, hold, given_up: 0 };
        }
        self.trial = None;
    }

    /// Messages of these runs will never be acked.
    fn on_lost(&mut self, lost: impl Iterator<Item = u64>) {
        if let Some(trial) = &mut self.trial {
            trial.retire(lost);
        }
    }
}

impl Trial {
    /// The path of its next message, and the run.
    fn add(&mut self, now: impl FnOnce() -> u64) -> (CopyPath, Option<u64>) {
        if self.idle_since != 0 {
            self.run.began += now().saturating_sub(self.idle_since);
            self.idle_since = 0;
        }
        self.sent = self.sent.saturating_add(1);
        self.in_flight += 1;
        self.most = self.most.max(self.in_flight);
        (if self.finished.is_multiple_of(2) { CopyPath::Cma } else { CopyPath::Bounce }, Some(self.run.number))
    }

    /// Messages of these runs are not in flight any more, since `latest` or before.
    fn retire(&mut self, runs: impl Iterator<Item = u64>) {
        let mine = runs.filter(|run| *run >= self.first_run).count();
        self.in_flight = self.in_flight.saturating_sub(mine as u32);
        if self.in_flight == 0 && self.idle_since == 0 {
            self.idle_since = self.latest;
        }
    }

    /// Whether a run has ended.
    fn on_acked(&mut self, acked: impl Iterator<Item = (u32, u64)>, at: u64) -> bool {
        // Threads report in any order.
        let now = self.latest.max(at);
        self.latest = now;
        let (current, mut messages, mut bytes) = (self.run.number, 0, 0);
        self.retire(acked.map(|(len, run)| {
            if run == current {
                messages += 1;
                bytes += u64::from(len);
            }
            run
        }));
        let run = &mut self.run;
        if run.acked < self.most {
            run.acked += messages;
            // Also where more are in flight than before: it is measured anew.
            (run.began, run.counted, run.bytes) = (now, 0, 0);
            return false;
        }
        run.counted += messages;
        run.bytes += bytes;
        let least = CLASSES.get(self.class).map_or(1, |class| class.run);
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
