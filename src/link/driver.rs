//! What several links of one owner are behind one lock, and whoever waits for them: for layers whose callers wait, without a thread on the way of a
//! message. Any number of threads.
//!
//! The first thread that waits drives the links for all: it polls them for a little while, then arms them, polls once more, and sleeps on the
//! device's descriptor. Others sleep until it has moved something or stops. Who asks for something while the driver sleeps wakes it. While nobody
//! waits, a thread in the background does the same, if one was started.

use std::ops::{Deref, DerefMut};
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::base::clock;
use crate::base::error::Result;
use crate::base::host;
use crate::base::sync::lock;
use crate::base::wakeup::Wakeup;

use super::background::{Background, BackgroundDriver};

/// How often the driver polls and finds nothing, with others allowed to run in between, before it sleeps.
const YIELDS: u64 = 40;
/// Polls one after the other each time, where there is a core for every peer: letting others run is a system call.
const SPINS: u32 = 16;
/// Links that are polled so often; more are less often, as who polls hundreds keeps those from running that it waits for.
const FEW: u64 = 8;
/// Polls that find nothing between two looks at the clock, for a driver that does not sleep.
const LOOK_EVERY: u64 = 256;

/// What is driven: links, and what their owner knows of them.
pub trait Driven: Send {
    /// How many ends are linked, with this one.
    fn links(&self) -> usize;
    /// Polls; whether something has moved.
    fn poll(&mut self) -> bool;
    /// Arms all links, for a sleep on these descriptors. `Some`: it has to end after so many nanoseconds.
    ///
    /// Errors: one that cannot be; the driver polls on then.
    fn arm(&mut self, fds: &mut Vec<RawFd>) -> Result<Option<u64>>;
    /// Whether it has to be polled again before anybody sleeps.
    fn needs_repoll(&mut self) -> bool;
    /// Whether it is over: nobody polls it any more.
    fn has_failed(&self) -> bool;
    /// Counts what has ended that somebody may wait for.
    fn ended(&self) -> u64;
    /// All that has arrived was polled, and nothing moved: whether that means something.
    fn settled(&mut self) -> bool {
        false
    }
    /// Whether there is something to do without the lock.
    fn has_work(&mut self) -> bool {
        false
    }
    /// Does it. Called by whoever waits, and by the thread in the background.
    fn work(_driver: &Driver<Self>)
    where
        Self: Sized,
    {
    }
    /// So many threads wait now: it has changed.
    fn waited_for(&mut self, _waiters: usize) {}
    /// What else arming does, now and then in place of it where the driver does not sleep.
    fn instead_of_arm(&mut self) {}
}

/// What the lock guards.
pub struct State<D> {
    driven: D,
    /// A thread drives it.
    is_driven: bool,
    /// Threads that wait for something, and so drive it.
    waiters: usize,
    /// Those of them that sleep while another one drives it.
    sleepers: usize,
}

impl<D: Driven> State<D> {
    fn count_waiter(&mut self, more: isize) {
        self.waiters = self.waiters.saturating_add_signed(more);
        self.driven.waited_for(self.waiters);
    }
}

impl<D> Deref for State<D> {
    type Target = D;

    fn deref(&self) -> &D {
        &self.driven
    }
}

impl<D> DerefMut for State<D> {
    fn deref_mut(&mut self) -> &mut D {
        &mut self.driven
    }
}

/// The lock, and who waits.
pub struct Driver<D> {
    state: Mutex<State<D>>,
    /// The driver has moved something, or stops.
    moved: Condvar,
    /// Counts, under the lock, what may be waited for: who waits compares it with what it was before they looked.
    moves: AtomicU64,
    /// Whoever drives it sleeps. Stored under the lock.
    asleep: AtomicBool,
    wakeup: Wakeup,
    /// Who waits never sleeps.
    busy: AtomicBool,
    background: Background,
    /// Of this host.
    cores: AtomicU64,
}

impl<D: Driven> Driver<D> {
    /// Errors: no descriptor left.
    pub fn new(driven: D) -> Result<Driver<D>> {
        Ok(Driver {
            state: Mutex::new(State { driven, is_driven: false, waiters: 0, sleepers: 0 }),
            moved: Condvar::new(),
            moves: AtomicU64::new(0),
            asleep: AtomicBool::new(false),
            wakeup: Wakeup::new()?,
            busy: AtomicBool::new(false),
            background: Background::default(),
            cores: AtomicU64::new(host::cores()),
        })
    }

    /// What is driven, to look at.
    pub fn lock(&self) -> MutexGuard<'_, State<D>> {
        lock(&self.state)
    }

    /// What is driven, for a thread that polls it a few times under the lock: if nobody drives it, and there is a core for every peer.
    pub fn lock_to_poll(&self) -> Option<MutexGuard<'_, State<D>>> {
        let state = self.lock();
        (!state.is_driven && self.has_a_core_for_each(&state)).then_some(state)
    }

    fn has_a_core_for_each(&self, state: &State<D>) -> bool {
        state.links() as u64 <= self.cores.load(Ordering::Relaxed)
    }

    /// Polls it for such a thread; whether something has moved.
    pub fn poll(&self, state: &mut State<D>) -> bool {
        self.drive(state)
    }

    /// Polls it once for a thread that is busy with something else, if nobody drives it and the links are few.
    pub fn poll_once(&self) {
        // Whoever has the lock polls, or will.
        let Ok(mut state) = self.state.try_lock() else { return };
        if !state.is_driven && state.links() as u64 <= FEW {
            self.drive(&mut state);
        }
    }

    /// Does something with it, of which whoever drives it has to know.
    pub fn with<T>(&self, f: impl FnOnce(&mut D) -> T) -> T {
        let mut state = self.lock();
        let ended = state.ended();
        let result = f(&mut state);
        if state.ended() != ended {
            // Pairs with the Acquire in `wait`.
            self.moves.fetch_add(1, Ordering::Release);
            self.wake_sleepers(&state);
        }
        if self.is_asleep() {
            self.wakeup.notify();
        }
        result
    }

    /// Whether who waits polls without end instead of sleeping: less delay, and a core that does nothing else.
    pub fn set_busy(&self, busy: bool) {
        self.busy.store(busy, Ordering::Relaxed);
    }

    /// Waits until `done` gives something. It is asked at once, whenever something has moved, and at the time that it gives instead; with the lock, which
    /// it may take and give back.
    pub fn wait<'a, T>(&'a self, mut done: impl FnMut(&mut Option<Locked<'a, D>>) -> std::result::Result<T, u64>) -> T {
        let (waiting, mut state) = Waiting::new(self);
        loop {
            // Pairs with the Release in `drive`: what ends after the look below is not missed.
            let seen = self.moves.load(Ordering::Acquire);
            if state.has_work() {
                drop(state);
                D::work(self);
                state = self.lock();
            }
            let mut held = Some(state);
            match done(&mut held) {
                Ok(result) => {
                    waiting.end(held.unwrap_or_else(|| self.lock()));
                    return result;
                }
                Err(until) => {
                    drop(held);
                    state = self.drive_until(seen, until, YIELDS);
                }
            }
        }
    }

    /// Has all that wait look again.
    pub fn wake(&self) {
        let state = self.lock();
        // Pairs with the Acquire in `wait`.
        self.moves.fetch_add(1, Ordering::Release);
        self.wake_sleepers(&state);
        self.wakeup.notify();
    }

    /// The same without the lock, which this thread may have: whoever drives it looks, and has the others look when it stops.
    pub fn nudge(&self) {
        // As who falls asleep stores that it does and then looks at `moves`, it sees this, or is seen here.
        self.moves.fetch_add(1, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            self.wakeup.notify();
        }
    }

    /// Whether whoever drives it sleeps.
    pub fn is_asleep(&self) -> bool {
        self.asleep.load(Ordering::Relaxed)
    }

    /// Has those look again that sleep while another thread drives it: a system call, even for nobody.
    fn wake_sleepers(&self, state: &State<D>) {
        if state.sleepers > 0 {
            self.moved.notify_all();
        }
    }

    /// Waits until something has moved that had not when `moves` was `seen`, or until then. The driver polls so often before it sleeps, if the links are
    /// few.
    fn drive_until(&self, seen: u64, until: u64, polls: u64) -> Locked<'_, D> {
        let left = || Duration::from_nanos(until.saturating_sub(clock::now()));
        // Dropped after the lock, which it takes if there is a panic.
        let driving;
        let mut state = self.lock();
        if self.moves.load(Ordering::Relaxed) != seen || state.has_failed() {
            return state;
        }
        if state.is_driven {
            state.sleepers += 1;
            let (mut state, _) = self.moved.wait_timeout(state, left()).unwrap_or_else(PoisonError::into_inner);
            state.sleepers -= 1;
            return state;
        }
        state.is_driven = true;
        driving = Driving(self);
        let links = state.links() as u64;
        let polls = (polls * FEW / links.max(FEW)).max(polls.min(2));
        let spins = match polls > 1 && self.has_a_core_for_each(&state) {
            true if self.busy.load(Ordering::Relaxed) => LOOK_EVERY as u32,
            true => SPINS,
            false => 1,
        };
        let mut idle = 0;
        // The thread in the background polls once.
        while idle < polls || polls > 1 && self.busy.load(Ordering::Relaxed) {
            for _ in 0..spins {
                if self.drive(&mut state) || self.moves.load(Ordering::Acquire) != seen {
                    return driving.stop(state);
                }
                // Whoever asks for something gets the lock meanwhile.
                drop(state);
                std::hint::spin_loop();
                state = self.lock();
            }
            idle += 1;
            if idle.is_multiple_of(LOOK_EVERY / u64::from(spins)) {
                // What else is done before a sleep.
                state.instead_of_arm();
                if state.settled() || clock::now() >= until {
                    return driving.stop(state);
                }
            }
            drop(state);
            std::thread::yield_now();
            state = self.lock();
        }
        let mut fds: Vec<RawFd> = Vec::new();
        let Ok(look) = state.arm(&mut fds) else { return driving.stop(state) };
        if self.drive(&mut state) || state.needs_repoll() || state.settled() {
            return driving.stop(state);
        }
        self.asleep.store(true, Ordering::SeqCst);
        if self.moves.load(Ordering::SeqCst) != seen {
            return driving.stop(state);
        }
        drop(state);
        self.wakeup.wait(&fds, Some(look.map_or(Duration::MAX, Duration::from_nanos).min(left())));
        driving.stop(self.lock())
    }

    /// Polls, unless it is over; whether there is something new.
    fn drive(&self, driven: &mut D) -> bool {
        let moved = driven.has_failed() || driven.poll();
        if moved {
            // Pairs with the Acquire in `wait`.
            self.moves.fetch_add(1, Ordering::Release);
        }
        moved
    }
}

impl<D: Driven + 'static> BackgroundDriver for Driver<D> {
    fn step_aside(&self) -> bool {
        // Pairs with the Release in `drive`.
        let seen = self.moves.load(Ordering::Acquire);
        let alone = self.left_alone();
        if alone {
            D::work(self);
            drop(self.drive_until(seen, u64::MAX, 1));
        }
        alone
    }

    fn left_alone(&self) -> bool {
        let state = self.lock();
        state.waiters == 0 && !state.has_failed()
    }
}

impl<D: Driven + 'static> Driver<D> {
    /// From now on it is driven while nobody waits, too, by a thread of this name.
    pub fn attend(self: &Arc<Self>, name: &str) {
        self.background.start(name, self);
    }

    /// What had failed goes on: that thread looks again.
    pub fn resume(&self) {
        self.background.wake();
    }

    /// Ends that thread, unless this is it; `has_failed` is true by now.
    pub fn leave(&self) {
        self.wake();
        self.background.stop();
    }
}

/// What is driven, while nobody else gets at it.
pub type Locked<'a, D> = MutexGuard<'a, State<D>>;

/// A thread that waits.
struct Waiting<'a, D: Driven>(&'a Driver<D>);

impl<'a, D: Driven> Waiting<'a, D> {
    /// The thread in the background leaves it to this one then.
    fn new(driver: &'a Driver<D>) -> (Self, Locked<'a, D>) {
        let mut state = driver.lock();
        state.count_waiter(1);
        if driver.is_asleep() {
            driver.wakeup.notify();
        }
        (Waiting(driver), state)
    }

    fn end(self, mut state: Locked<'_, D>) {
        state.count_waiter(-1);
        let left = state.waiters == 0;
        drop(state);
        if left {
            self.0.background.wake();
        }
        std::mem::forget(self);
    }
}

impl<D: Driven> Drop for Waiting<'_, D> {
    fn drop(&mut self) {
        Waiting(self.0).end(self.0.lock());
    }
}

/// The driver, until it is stopped.
struct Driving<'a, D: Driven>(&'a Driver<D>);

impl<D: Driven> Driving<'_, D> {
    /// Others may drive it.
    fn stop<'s>(self, mut state: Locked<'s, D>) -> Locked<'s, D> {
        state.is_driven = false;
        self.0.asleep.store(false, Ordering::Relaxed);
        self.0.wake_sleepers(&state);
        std::mem::forget(self);
        state
    }
}

/// What is driven has panicked.
impl<D: Driven> Drop for Driving<'_, D> {
    fn drop(&mut self) {
        drop(Driving(self.0).stop(self.0.lock()));
    }
}

#[cfg(test)]
impl<D: Driven> Driver<D> {
    /// Takes the host to have so many.
    pub fn set_cores(&self, cores: u64) {
        self.cores.store(cores, Ordering::Relaxed);
    }

    /// What a wait would compare.
    pub fn moves(&self) -> u64 {
        self.moves.load(Ordering::Acquire)
    }

    /// Waits once, as a thread that has seen so many moves would.
    pub fn step(&self, seen: u64, until: u64) {
        drop(self.drive_until(seen, until, YIELDS));
    }

    /// Whether one thread waits, and sleeps: as the driver, or beside the thread in the background, if that had begun to drive and not left.
    pub fn waiter_sleeps(&self) -> bool {
        // Not under the lock, which that thread takes under its own.
        let left = self.background.is_asleep();
        let state = self.lock();
        state.waiters == 1 && self.is_asleep() && (left || state.sleepers == 1)
    }

    /// Until this thread waits, or has waited.
    pub fn until_waited_for<T>(&self, waits: &std::thread::ScopedJoinHandle<'_, T>) {
        while self.lock().waiters == 0 && !waits.is_finished() {
            std::thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    struct Panics;

    impl Driven for Panics {
        fn links(&self) -> usize {
            1
        }
        fn poll(&mut self) -> bool {
            panic!("a link has panicked")
        }
        fn arm(&mut self, _: &mut Vec<RawFd>) -> Result<Option<u64>> {
            Ok(None)
        }
        fn needs_repoll(&mut self) -> bool {
            false
        }
        fn has_failed(&self) -> bool {
            false
        }
        fn ended(&self) -> u64 {
            0
        }
    }

    #[test]
    fn what_panics_can_be_driven_by_others() {
        let driver = Driver::new(Panics).unwrap();
        for _ in 0..2 {
            let end = clock::now() + 1_000_000_000;
            let panicked = catch_unwind(AssertUnwindSafe(|| driver.wait(|_| if clock::now() < end { Err(end) } else { Ok(()) })));
            assert!(panicked.is_err(), "nobody has driven it");
        }
        let state = driver.lock();
        assert_eq!((state.is_driven, state.waiters), (false, 0));
    }

    /// Something comes as it is armed, too early for an event.
    #[derive(Default)]
    struct ComesAsArmed {
        is_here: bool,
        ended: u64,
    }

    impl Driven for ComesAsArmed {
        fn links(&self) -> usize {
            1
        }
        fn poll(&mut self) -> bool {
            self.ended += u64::from(self.is_here);
            std::mem::take(&mut self.is_here)
        }
        fn arm(&mut self, _: &mut Vec<RawFd>) -> Result<Option<u64>> {
            self.is_here = true;
            Ok(None)
        }
        fn needs_repoll(&mut self) -> bool {
            false
        }
        fn has_failed(&self) -> bool {
            false
        }
        fn ended(&self) -> u64 {
            self.ended
        }
    }

    #[test]
    fn what_comes_as_it_is_armed_is_found_before_the_sleep() {
        let driver = Driver::new(ComesAsArmed::default()).unwrap();
        let end = clock::now() + 5_000_000_000;
        let found = driver.wait(|held| match held {
            Some(state) if state.ended() > 0 => Ok(true),
            _ if clock::now() >= end => Ok(false),
            _ => Err(end),
        });
        assert!(found, "it slept, and nothing wakes it");
    }
}
