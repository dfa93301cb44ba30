//! Detects that the process is a forked child. Called at the C boundary and before process-wide state is used, on any thread.
//!
//! A child inherits its parent's connections and locks that other threads held, so what was made before the fork cannot be used in the child, and
//! process-wide state starts anew there. [`epoch`] detects it, without a system call; [`PerProcess`] applies it to a global.

use std::cell::UnsafeCell;
use std::mem::ManuallyDrop;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};

use memmap2::{MmapMut, MmapRaw};
use once_cell::race::OnceNonZeroUsize;

/// Address of a word that the kernel zeroes in a forked child (MADV_WIPEONFORK, Linux 4.14), or `NO_WORD`. Never unmapped while the
/// library is loaded, which is until the process ends. Initialised without a lock, which a fork on another thread could leave taken.
static WORD: OnceNonZeroUsize = OnceNonZeroUsize::new();
/// Not the address of any mapping.
const NO_WORD: NonZeroUsize = NonZeroUsize::MIN;
/// The last epoch given out. A child inherits it and continues from there.
static LAST: AtomicU64 = AtomicU64::new(0);

/// A number that is the same for the life of a process and differs from that of all its ancestors. Never 0.
#[inline]
pub fn epoch() -> u64 {
    match WORD.get() {
        Some(address) if address != NO_WORD => {
            // SAFETY: `make_word` leaked the mapping that starts there: a page, aligned, zeroed, read and written as this atomic alone.
            let word = unsafe { &*(address.get() as *const AtomicU64) };
            match word.load(Ordering::Relaxed) {
                0 => renew(word),
                epoch => epoch,
            }
        }
        Some(_) => u64::from(std::process::id()),
        None => first(),
    }
}

#[cold]
fn first() -> u64 {
    WORD.get_or_init(make_word);
    epoch()
}

#[cold]
fn renew(word: &AtomicU64) -> u64 {
    let next = LAST.fetch_add(1, Ordering::Relaxed) + 1;
    // Of several threads that see 0, one wins and all use its number.
    match word.compare_exchange(0, next, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => next,
        Err(winner) => winner,
    }
}

fn make_word() -> NonZeroUsize {
    let Ok(map) = MmapMut::map_anon(4096).map(MmapRaw::from) else { return NO_WORD };
    let page = map.as_mut_ptr();
    // SAFETY: the range is the whole mapping just made. Wiping it in a child changes nobody's memory but ours.
    if unsafe { libc::madvise(page.cast(), map.len(), libc::MADV_WIPEONFORK) } != 0 {
        // An older kernel: the process id tells as well, at a system call each time.
        return NO_WORD;
    }
    let _kept = ManuallyDrop::new(map);
    NonZeroUsize::new(page as usize).unwrap_or(NO_WORD)
}

/// A global that starts from `T::default()` in every process, forked ones included: a child neither sees its parent's value nor
/// waits for a lock that a thread of its parent held. Hold it briefly: waiters spin.
pub struct PerProcess<T> {
    /// 0, or the epoch of the process whose thread is inside.
    holder: AtomicU64,
    inner: UnsafeCell<Inner<T>>,
}

struct Inner<T> {
    /// The process that `value` belongs to; 0 before the first use.
    epoch: u64,
    value: Option<T>,
}

// SAFETY: `inner` is touched by the thread that set `holder` alone, so sharing the container only ever moves `T` between threads.
unsafe impl<T: Send> Sync for PerProcess<T> {}

impl<T: Default> PerProcess<T> {
    /// For a `static`.
    pub const fn new() -> Self {
        PerProcess { holder: AtomicU64::new(0), inner: UnsafeCell::new(Inner { epoch: 0, value: None }) }
    }

    /// Runs `f` on the value, alone. Must not be nested on one global.
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        let mine = epoch();
        let _guard = self.lock(mine);
        // SAFETY: this thread holds the lock until `_guard` drops, and no other reference is made outside of it.
        let inner = unsafe { &mut *self.inner.get() };
        if inner.epoch != mine {
            // The parent's value, maybe left half changed: its destructor has no meaning here.
            std::mem::forget(inner.value.take());
            inner.epoch = mine;
        }
        f(inner.value.get_or_insert_with(T::default))
    }

    fn lock(&self, mine: u64) -> Guard<'_> {
        let mut spins = 0u32;
        loop {
            let seen = self.holder.load(Ordering::Relaxed);
            // A holder of another epoch is a thread that did not come along through the fork.
            // Acquire pairs with the Release store in `Guard::drop`.
            if seen != mine && self.holder.compare_exchange(seen, mine, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return Guard(&self.holder);
            }
            spins += 1;
            if spins.is_multiple_of(64) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

impl<T: Default> Default for PerProcess<T> {
    fn default() -> Self {
        Self::new()
    }
}

struct Guard<'a>(&'a AtomicU64);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Runs `f` in a forked child; true if it returned true. `f` must not panic, and must not allocate where another thread may
    /// hold the allocator (glibc's is made safe across fork).
    pub(crate) fn in_child(f: impl FnOnce() -> bool) -> bool {
        // SAFETY: the child runs `f` and leaves by _exit: no destructor, no other thread's lock is needed.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            // A test's logger may hold a lock that a thread of the parent held at the fork.
            crate::base::log::set_nccl_logger(None);
            let code = if f() { 0 } else { 1 };
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: `status` outlives the call; `pid` is our child.
        assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }

    /// As `in_child`, with no descriptor left to open anything.
    pub(crate) fn without_descriptors(f: impl FnOnce() -> bool) -> bool {
        in_child(|| {
            let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            // SAFETY: a limit of this child, read from a value that outlives the call.
            unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &none) == 0 && f() }
        })
    }

    #[test]
    fn epoch_is_stable_here_and_new_in_children_and_grandchildren() {
        let mine = epoch();
        assert_ne!(mine, 0);
        assert!(in_child(|| {
            let child = epoch();
            child != mine && child != 0 && child == epoch() && in_child(|| ![0, mine, child].contains(&epoch()))
        }));
        assert_eq!(epoch(), mine);
    }

    #[test]
    fn a_global_starts_anew_in_a_child_and_stays_in_the_parent() {
        static G: PerProcess<Vec<u32>> = PerProcess::new();
        G.with(|v| v.push(1));
        assert!(in_child(|| G.with(|v| {
            v.push(7);
            *v == [7]
        })));
        G.with(|v| assert_eq!(*v, [1]));
    }

    #[test]
    fn a_child_does_not_wait_for_a_lock_that_its_parent_holds() {
        static G: PerProcess<u32> = PerProcess::new();
        G.with(|v| {
            *v = 5;
            assert!(in_child(|| G.with(|v| *v == 0)));
        });
        G.with(|v| assert_eq!(*v, 5));
    }

    #[test]
    fn one_thread_at_a_time() {
        const THREADS: u64 = 4;
        const ROUNDS: u64 = 50_000;
        static G: PerProcess<(u64, u64)> = PerProcess::new();
        let start = std::sync::Barrier::new(THREADS as usize);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    start.wait();
                    for _ in 0..ROUNDS {
                        G.with(|(a, b)| {
                            assert_eq!(a, b);
                            *a += 1;
                            std::hint::black_box(&mut *a);
                            *b += 1;
                        });
                    }
                });
            }
        });
        G.with(|v| assert_eq!(*v, (THREADS * ROUNDS, THREADS * ROUNDS)));
    }
}
