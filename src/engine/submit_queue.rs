//! The queue between an engine's callers and its thread. Callers on any thread submit operations, ask the thread to end, or wait for the lock of its
//! state; the engine's thread collects all that, and sleeps here.
//!
//! Everything is under one lock, which is held for moments only. The thread takes it when `notified` is set, so a step pays one relaxed load; what the
//! flag stands for is read under the lock. `tests/loom.rs` compiles this file over loom.
//!
//! An operation is first held; `start` hands it to the thread, unless it was appended to a group that is still open. That is NCCL's opCount gate
//! (2.7, src/proxy.cc: `opCount < comm->lastOpCount`), here and not in the loop: an operation that may not run costs no step, and an engine that has
//! no other sleeps.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use crate::base::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use crate::base::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Why the queue refused a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rejected {
    /// The engine stops, or has ended.
    Ending,
    /// As many operations as may wait do.
    Full,
    /// There is no group to end.
    NoGroup,
}

/// What callers have asked of the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Commands {
    /// End once everything that was started is done.
    pub stop: bool,
    /// End now.
    pub abort: bool,
    /// Callers wait for the lock of the thread's state: release it.
    pub waiters: bool,
}

/// How a thread sleeps that has more to wait for than its queue.
pub trait Sleeper: Debug + Send + Sync {
    /// Returns once `wake` was called, even if that was before, for whatever else it watches, or after `timeout`. Called by the engine's thread.
    fn sleep(&self, timeout: Option<Duration>);
    /// Ends the sleep that is going on, or else the next one. Any thread; never waits.
    fn wake(&self);
}

/// `T`: an operation. `S`: what callers keep under the same lock.
pub struct SubmitQueue<T, S> {
    inner: Mutex<Inner<T, S>>,
    /// 1: there is something to collect. Written under the lock.
    notified: AtomicU32,
    /// The thread sleeps on it.
    wakeup: Condvar,
    /// Callers wait on it for the thread to end, and the thread for its waiters to be done.
    changed: Condvar,
    /// Operations that the thread is done with.
    finished: AtomicU64,
    limit: u64,
    sleeper: Option<Arc<dyn Sleeper>>,
}

struct Inner<T, S> {
    /// Appended and not started.
    held: VecDeque<T>,
    /// Started and not collected.
    started: Vec<T>,
    next_op_count: u64,
    /// Appended and not cancelled, ever.
    appended: u64,
    /// Groups that are open, one within the other.
    groups: u32,
    /// How many of the held ones came before the outermost group.
    before_group: usize,
    asleep: bool,
    stop: bool,
    abort: bool,
    ended: bool,
    /// Callers that wait for the lock of the thread's state, or have it.
    waiters: u32,
    shared: S,
}

impl<T, S> SubmitQueue<T, S> {
    /// * `limit` - operations that may wait or run at a time.
    /// * `first` - opCount of the first operation.
    /// * `sleeper` - if the thread has more to wait for than this queue.
    pub fn new(limit: u64, first: u64, sleeper: Option<Arc<dyn Sleeper>>, shared: S) -> Self {
        let inner = Inner {
            held: VecDeque::new(),
            started: Vec::new(),
            next_op_count: first,
            appended: 0,
            groups: 0,
            before_group: 0,
            asleep: false,
            stop: false,
            abort: false,
            ended: false,
            waiters: 0,
            shared,
        };
        SubmitQueue {
            inner: Mutex::new(inner),
            notified: AtomicU32::new(0),
            wakeup: Condvar::new(),
            changed: Condvar::new(),
            finished: AtomicU64::new(0),
            limit,
            sleeper,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner<T, S>> {
        // What runs under the lock may panic anywhere and leaves everything whole.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` on what callers keep here, on the operations that were started and not collected, and on those that are held.
    pub fn with<R>(&self, f: impl FnOnce(&mut S, &mut Vec<T>, &mut VecDeque<T>) -> R) -> R {
        let inner = &mut *self.lock();
        f(&mut inner.shared, &mut inner.started, &mut inner.held)
    }

    /// Appends the operation that `make` gives for this opCount, and wakes nobody. Returns the opCount.
    pub fn append<E: From<Rejected>>(&self, make: impl FnOnce(&S, u64) -> Result<T, E>) -> Result<u64, E> {
        let mut inner = self.lock();
        if inner.stop || inner.abort || inner.ended {
            return Err(Rejected::Ending.into());
        }
        // The load may be late: then too few operations are let in, never too many.
        if inner.appended.wrapping_sub(self.finished.load(Ordering::Relaxed)) >= self.limit {
            return Err(Rejected::Full.into());
        }
        let op_count = inner.next_op_count;
        let op = make(&inner.shared, op_count)?;
        inner.held.push_back(op);
        inner.next_op_count = op_count.wrapping_add(1);
        inner.appended = inner.appended.wrapping_add(1);
        Ok(op_count)
    }

    /// Opens a group, maybe within another: what is appended from now on is held until the group is closed.
    pub fn group_start(&self) {
        let mut inner = self.lock();
        if inner.groups == 0 {
            inner.before_group = inner.held.len();
        }
        inner.groups += 1;
    }

    /// Closes the innermost group.
    pub fn group_end(&self) -> Result<(), Rejected> {
        let mut inner = self.lock();
        inner.groups = inner.groups.checked_sub(1).ok_or(Rejected::NoGroup)?;
        Ok(())
    }

    /// Closes all groups and returns what was appended since the outermost one was opened. Its opCounts are given out again.
    pub fn group_cancel(&self) -> Result<VecDeque<T>, Rejected> {
        let mut inner = self.lock();
        if inner.groups == 0 {
            return Err(Rejected::NoGroup);
        }
        inner.groups = 0;
        let from = inner.before_group;
        let cancelled = inner.held.split_off(from);
        inner.next_op_count = inner.next_op_count.wrapping_sub(cancelled.len() as u64);
        inner.appended = inner.appended.wrapping_sub(cancelled.len() as u64);
        Ok(cancelled)
    }

    /// Hands over everything that is not of an open group, and wakes the thread for it.
    pub fn start(&self) -> Result<(), Rejected> {
        let inner = &mut *self.lock();
        if inner.stop || inner.abort || inner.ended {
            return Err(Rejected::Ending);
        }
        let count = if inner.groups > 0 { std::mem::take(&mut inner.before_group) } else { inner.held.len() };
        if count > 0 {
            inner.started.extend(inner.held.drain(..count));
            self.notify(inner);
        }
        Ok(())
    }

    /// Asks the thread to end when all that was started is done. What is held never runs.
    pub fn stop(&self) {
        let mut inner = self.lock();
        inner.stop = true;
        self.notify(&inner);
    }

    /// Asks the thread to end after its present step.
    pub fn abort(&self) {
        let mut inner = self.lock();
        inner.abort = true;
        self.notify(&inner);
    }

    fn notify(&self, inner: &Inner<T, S>) {
        self.notified.store(1, Ordering::Relaxed);
        // A thread that is awake looks at the flag before it goes to sleep.
        if inner.asleep {
            match &self.sleeper {
                None => self.wakeup.notify_one(),
                Some(sleeper) => sleeper.wake(),
            }
        }
    }

    /// Whether there is something to collect. One relaxed load.
    #[inline]
    pub fn is_notified(&self) -> bool {
        self.notified.load(Ordering::Relaxed) != 0
    }

    /// Moves the started operations, in order, to the end of `out`; if `out` is empty, without copying. Never waits for a caller's work.
    pub fn collect(&self, out: &mut Vec<T>) -> Commands {
        let inner = &mut *self.lock();
        if out.is_empty() {
            std::mem::swap(out, &mut inner.started)
        } else {
            out.append(&mut inner.started)
        }
        self.notified.store(0, Ordering::Relaxed);
        Commands { stop: inner.stop, abort: inner.abort, waiters: inner.waiters > 0 }
    }

    /// Counts operations that are done.
    #[inline]
    pub fn finish(&self, count: u64) {
        // Only the thread writes it.
        self.finished.store(self.finished.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }

    /// Sleeps until there is something to collect, `timeout` is over, or the sleeper's other events wake it.
    pub fn sleep(&self, timeout: Option<Duration>) {
        if let Some(sleeper) = &self.sleeper {
            return self.sleep_with(&**sleeper, timeout);
        }
        let mut inner = self.lock();
        // The flag is set under this lock, so nobody can set it between this look and the wait.
        while self.notified.load(Ordering::Relaxed) == 0 {
            inner.asleep = true;
            inner = match timeout {
                None => self.wakeup.wait(inner).unwrap_or_else(PoisonError::into_inner),
                Some(timeout) => self.wakeup.wait_timeout(inner, timeout).unwrap_or_else(PoisonError::into_inner).0,
            };
            inner.asleep = false;
            if timeout.is_some() {
                return;
            }
        }
    }

    fn sleep_with(&self, sleeper: &dyn Sleeper, timeout: Option<Duration>) {
        let mut inner = self.lock();
        // Whoever notifies after this look sees `asleep`, and wakes the thread.
        if self.notified.load(Ordering::Relaxed) != 0 {
            return;
        }
        inner.asleep = true;
        drop(inner);
        sleeper.sleep(timeout);
        self.lock().asleep = false;
    }

    /// Whether the thread sleeps.
    pub fn asleep(&self) -> bool {
        self.lock().asleep
    }

    /// A caller is about to wait for the lock of the thread's state: asks the thread to release it.
    pub fn add_waiter(&self) {
        let mut inner = self.lock();
        inner.waiters += 1;
        // A thread that sleeps has released it already, and need not be woken.
        self.notified.store(1, Ordering::Relaxed);
    }

    /// That caller has released the lock again.
    pub fn remove_waiter(&self) {
        let mut inner = self.lock();
        inner.waiters -= 1;
        if inner.waiters == 0 {
            self.changed.notify_all();
        }
    }

    /// The thread, which has released the lock of its state, waits until all its waiters are done.
    pub fn wait_for_waiters(&self) {
        let mut inner = self.lock();
        while inner.waiters > 0 {
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The thread has ended: nothing more is appended.
    pub fn end(&self) {
        self.end_with(|| ());
    }

    /// The same, with what is done at the same time: whoever calls this queue after they have seen it finds the queue ended.
    pub fn end_with(&self, do_it: impl FnOnce()) {
        let mut inner = self.lock();
        do_it();
        inner.ended = true;
        self.changed.notify_all();
    }

    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        self.lock().ended
    }

    /// Waits until it has ended.
    pub fn wait_for_end(&self) {
        let mut inner = self.lock();
        while !inner.ended {
            inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// opCount of the next operation.
    pub fn next_op_count(&self) -> u64 {
        self.lock().next_op_count
    }
}
