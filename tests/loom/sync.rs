//! Loom's types under the names of `src/base/sync.rs`, and how they can be made to misbehave.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::sync::LockResult;
use std::time::Duration;

pub use std::sync::PoisonError;

/// What goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mistake {
    /// Nothing.
    None,
    /// Nobody is woken.
    NoNotify,
    /// To look whether to wait, and to begin to wait, are not one.
    LookThenWait,
    /// A number that is stored in a word of 32 bits is not seen by others.
    NoStore,
}

impl Mistake {
    const ALL: [Mistake; 4] = [Mistake::None, Mistake::NoNotify, Mistake::LookThenWait, Mistake::NoStore];
}

thread_local! {
    /// Of the model that this thread runs; loom's threads are all on the one of the test.
    static MISTAKE: Cell<Mistake> = const { Cell::new(Mistake::None) };
}

fn is(mistake: Mistake) -> bool {
    MISTAKE.with(Cell::get) == mistake
}

/// Names a mistake to a process that runs one model.
const VARIABLE: &str = "RH_LOOM_MISTAKE";

/// Runs a model in every order with at most `preemptions` that no lock asks for.
pub fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let named = std::env::var(VARIABLE).unwrap_or_default();
    let mistake = Mistake::ALL.into_iter().find(|mistake| format!("{mistake:?}") == named);
    MISTAKE.with(|cell| cell.set(mistake.unwrap_or(Mistake::None)));
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(body);
}

/// Checks that the model of that test gets stuck with this mistake. It runs in a process of its own: what loom leaves behind of a model that is
/// stuck cannot always be cleaned up.
#[track_caller]
pub fn gets_stuck(test: &str, mistake: Mistake) {
    let mut command = std::process::Command::new(std::env::current_exe().expect("this program"));
    command.args(["--exact", test, "--nocapture"]).env(VARIABLE, format!("{mistake:?}"));
    let output = command.output().expect("this program runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("deadlock; threads"), "{mistake:?} was not found: {said}");
}

pub struct Mutex<T>(loom::sync::Mutex<T>);

pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    guard: loom::sync::MutexGuard<'a, T>,
}

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Mutex(loom::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        let guard = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(MutexGuard { mutex: self, guard })
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

pub struct Condvar(loom::sync::Condvar);

impl Condvar {
    pub fn new() -> Self {
        Condvar(loom::sync::Condvar::new())
    }

    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        let MutexGuard { mutex, mut guard } = guard;
        if is(Mistake::LookThenWait) {
            drop(guard);
            guard = mutex.0.lock().unwrap_or_else(PoisonError::into_inner);
        }
        let guard = self.0.wait(guard).unwrap_or_else(PoisonError::into_inner);
        Ok(MutexGuard { mutex, guard })
    }

    pub fn wait_timeout<'a, T>(&self, guard: MutexGuard<'a, T>, _: Duration) -> LockResult<(MutexGuard<'a, T>, ())> {
        // The time passes at once.
        let mutex = guard.mutex;
        drop(guard);
        let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
        Ok((guard, ()))
    }

    pub fn notify_one(&self) {
        if !is(Mistake::NoNotify) {
            self.0.notify_one();
        }
    }

    pub fn notify_all(&self) {
        if !is(Mistake::NoNotify) {
            self.0.notify_all();
        }
    }
}

pub mod atomic {
    pub use loom::sync::atomic::{AtomicU64, Ordering};

    use super::{Mistake, is};

    pub struct AtomicU32(loom::sync::atomic::AtomicU32);

    impl AtomicU32 {
        pub fn new(value: u32) -> Self {
            AtomicU32(loom::sync::atomic::AtomicU32::new(value))
        }

        pub fn load(&self, order: Ordering) -> u32 {
            self.0.load(order)
        }

        pub fn store(&self, value: u32, order: Ordering) {
            if !is(Mistake::NoStore) {
                self.0.store(value, order);
            }
        }
    }
}
