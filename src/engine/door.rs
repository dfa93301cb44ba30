//! Where other threads meet the engine's: operations come in here, and whoever wants the loop's attention rings. Callers on any thread; the
//! engine's thread collects, gives way and sleeps.
//!
//! Everything is under one lock, which is held for moments only. The loop takes it when the bell has rung, so what a step pays is one relaxed load:
//! all that the bell announces is read under the lock. `tests/loom.rs` compiles this file over loom.
//!
//! An operation is first held, and let go by `start`; what was appended to a group that is still open stays held. That is NCCL's opCount gate
//! (2.7, src/proxy.cc: `opCount < comm->lastOpCount`) at the door and not in the loop: what may not run costs no step, and an engine that has
//! nothing else sleeps.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use crate::base::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::base::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Why nothing was taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shut {
    /// The engine stops, or has ended.
    Ending,
    /// As many operations as may wait do.
    Full,
    /// There is no group to end.
    NoGroup,
}

/// What `collect` has found beside operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Orders {
    /// End once everything that was started is done.
    pub stop: bool,
    /// End now.
    pub abort: bool,
    /// Others wait for the loop's state: give way.
    pub visitors: bool,
}

/// How a loop sleeps that has more to wait for than its door.
pub trait Sleeper: Debug + Send + Sync {
    /// Returns once `wake` was called, even if that was before, for whatever else it watches, or after `most`. Called by the loop's thread.
    fn sleep(&self, most: Option<Duration>);
    /// Ends the sleep that is going on, or else the next one. Any thread; never waits.
    fn wake(&self);
}

/// `T`: an operation. `S`: what callers keep under the same lock.
pub struct Door<T, S> {
    inside: Mutex<Inside<T, S>>,
    /// 1: something inside awaits the loop. Written under the lock.
    bell: AtomicU32,
    /// The loop sleeps on it.
    wake: Condvar,
    /// Others wait on it for the loop to end, and the loop for visitors to leave.
    changed: Condvar,
    /// Operations that the loop has done with.
    finished: AtomicU64,
    limit: u64,
    sleeper: Option<Arc<dyn Sleeper>>,
}

struct Inside<T, S> {
    /// Appended and not let go.
    held: VecDeque<T>,
    /// Let go and not collected.
    started: Vec<T>,
    /// opCount of the next one to be appended.
    next: u64,
    /// Appended and not cancelled, ever.
    accepted: u64,
    /// Groups that are open, one within the other.
    groups: u32,
    /// How many of the held ones came before the outermost group.
    before_group: usize,
    asleep: bool,
    stop: bool,
    abort: bool,
    ended: bool,
    visitors: u32,
    shared: S,
}

impl<T, S> Door<T, S> {
    /// * `limit` - operations that may wait or run at a time.
    /// * `first` - opCount of the first operation.
    /// * `sleeper` - if there is more to wait for than what comes in here.
    pub fn new(limit: u64, first: u64, sleeper: Option<Arc<dyn Sleeper>>, shared: S) -> Self {
        let inside = Inside {
            held: VecDeque::new(),
            started: Vec::new(),
            next: first,
            accepted: 0,
            groups: 0,
            before_group: 0,
            asleep: false,
            stop: false,
            abort: false,
            ended: false,
            visitors: 0,
            shared,
        };
        Door {
            inside: Mutex::new(inside),
            bell: AtomicU32::new(0),
            wake: Condvar::new(),
            changed: Condvar::new(),
            finished: AtomicU64::new(0),
            limit,
            sleeper,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inside<T, S>> {
        // What runs under the lock leaves everything whole wherever it stops.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` on what callers keep here, on the operations that were let go and not collected, and on those that are held.
    pub fn with<R>(&self, f: impl FnOnce(&mut S, &mut Vec<T>, &mut VecDeque<T>) -> R) -> R {
        let inside = &mut *self.lock();
        f(&mut inside.shared, &mut inside.started, &mut inside.held)
    }

    /// Takes in the operation that `make` gives for this opCount, and wakes nobody. Returns the opCount.
    pub fn append<E: From<Shut>>(&self, make: impl FnOnce(&S, u64) -> Result<T, E>) -> Result<u64, E> {
        let mut inside = self.lock();
        if inside.stop || inside.abort || inside.ended {
            return Err(Shut::Ending.into());
        }
        // A number that lags is too careful, no more.
        if inside.accepted.wrapping_sub(self.finished.load(Ordering::Relaxed)) >= self.limit {
            return Err(Shut::Full.into());
        }
        let op_count = inside.next;
        let op = make(&inside.shared, op_count)?;
        inside.held.push_back(op);
        inside.next = op_count.wrapping_add(1);
        inside.accepted = inside.accepted.wrapping_add(1);
        Ok(op_count)
    }

    /// Opens a group, maybe within another: what is appended from now on is held until it is closed.
    pub fn group_start(&self) {
        let mut inside = self.lock();
        if inside.groups == 0 {
            inside.before_group = inside.held.len();
        }
        inside.groups += 1;
    }

    /// Closes the innermost group.
    pub fn group_end(&self) -> Result<(), Shut> {
        let mut inside = self.lock();
        inside.groups = inside.groups.checked_sub(1).ok_or(Shut::NoGroup)?;
        Ok(())
    }

    /// Closes all groups and returns what was appended since the outermost one was opened. Its opCounts are given out again.
    pub fn group_cancel(&self) -> Result<VecDeque<T>, Shut> {
        let mut inside = self.lock();
        if inside.groups == 0 {
            return Err(Shut::NoGroup);
        }
        inside.groups = 0;
        let from = inside.before_group;
        let cancelled = inside.held.split_off(from);
        inside.next = inside.next.wrapping_sub(cancelled.len() as u64);
        inside.accepted = inside.accepted.wrapping_sub(cancelled.len() as u64);
        Ok(cancelled)
    }

    /// Lets go everything that is not of an open group, and wakes the loop for it.
    pub fn start(&self) -> Result<(), Shut> {
        let inside = &mut *self.lock();
        if inside.stop || inside.abort || inside.ended {
            return Err(Shut::Ending);
        }
        let count = if inside.groups > 0 { std::mem::take(&mut inside.before_group) } else { inside.held.len() };
        if count > 0 {
            inside.started.extend(inside.held.drain(..count));
            self.ring(inside);
        }
        Ok(())
    }

    /// Asks the loop to end when all that was let go is done. What is held never runs.
    pub fn stop(&self) {
        let mut inside = self.lock();
        inside.stop = true;
        self.ring(&inside);
    }

    /// Asks the loop to end after its present step.
    pub fn abort(&self) {
        let mut inside = self.lock();
        inside.abort = true;
        self.ring(&inside);
    }

    fn ring(&self, inside: &Inside<T, S>) {
        self.bell.store(1, Ordering::Relaxed);
        // Who is awake looks at the bell before it goes to sleep.
        if inside.asleep {
            match &self.sleeper {
                None => self.wake.notify_one(),
                Some(sleeper) => sleeper.wake(),
            }
        }
    }

    /// Whether `collect` would find something. One relaxed load.
    #[inline]
    pub fn has_rung(&self) -> bool {
        self.bell.load(Ordering::Relaxed) != 0
    }

    /// Gives the loop what was let go, in order, at the end of `out`; if `out` is empty, without copying. Never waits for a caller's work.
    pub fn collect(&self, out: &mut Vec<T>) -> Orders {
        let inside = &mut *self.lock();
        if out.is_empty() {
            std::mem::swap(out, &mut inside.started)
        } else {
            out.append(&mut inside.started)
        }
        self.bell.store(0, Ordering::Relaxed);
        Orders { stop: inside.stop, abort: inside.abort, visitors: inside.visitors > 0 }
    }

    /// Counts operations that are no more.
    #[inline]
    pub fn finish(&self, count: u64) {
        // Written by the loop alone.
        self.finished.store(self.finished.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    /// Sleeps until the bell rings, or for `most`, or until there is something else to wake for.
    pub fn sleep(&self, most: Option<Duration>) {
        if let Some(sleeper) = &self.sleeper {
            return self.sleep_with(&**sleeper, most);
        }
        let mut inside = self.lock();
        // Rung under this lock, so that nobody can ring between the look and the sleep.
        while self.bell.load(Ordering::Relaxed) == 0 {
            inside.asleep = true;
            inside = match most {
                None => self.wake.wait(inside).unwrap_or_else(PoisonError::into_inner),
                Some(most) => self.wake.wait_timeout(inside, most).unwrap_or_else(PoisonError::into_inner).0,
            };
            inside.asleep = false;
            if most.is_some() {
                return;
            }
        }
    }

    fn sleep_with(&self, sleeper: &dyn Sleeper, most: Option<Duration>) {
        let mut inside = self.lock();
        // Whoever rings after this look finds the loop asleep, and wakes it.
        if self.bell.load(Ordering::Relaxed) != 0 {
            return;
        }
        inside.asleep = true;
        drop(inside);
        sleeper.sleep(most);
        self.lock().asleep = false;
    }

    /// Whether the loop sleeps.
    pub fn asleep(&self) -> bool {
        self.lock().asleep
    }

    /// A caller wants the loop's state and is about to wait for its lock.
    pub fn visit(&self) {
        let mut inside = self.lock();
        inside.visitors += 1;
        // A loop that sleeps has left its state alone already.
        self.bell.store(1, Ordering::Relaxed);
    }

    /// It has done with it.
    pub fn leave(&self) {
        let mut inside = self.lock();
        inside.visitors -= 1;
        if inside.visitors == 0 {
            self.changed.notify_all();
        }
    }

    /// The loop, which has unlocked its state, waits until all visitors have left.
    pub fn give_way(&self) {
        let mut inside = self.lock();
        while inside.visitors > 0 {
            inside = self.changed.wait(inside).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The loop has ended: nothing more is taken in.
    pub fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    /// Whether it has.
    pub fn has_ended(&self) -> bool {
        self.lock().ended
    }

    /// Waits until it has.
    pub fn wait_for_end(&self) {
        let mut inside = self.lock();
        while !inside.ended {
            inside = self.changed.wait(inside).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// opCount of the next operation.
    pub fn next(&self) -> u64 {
        self.lock().next
    }
}
