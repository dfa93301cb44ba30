//! The monotonic clock. Read by providers, timeouts and sampled waits, on any thread.
//!
//! A call that moves something does not read it, and one that finds nothing does so one time in 64. There are four exceptions: shared memory
//! measures, from time to time, how fast large messages move by each copy path (fabric/soft/shm/copy_path.rs), and reads it with each part of a message
//! that it writes into the peer's private memory (segment.rs there); a NIC's completion queue checks every 1024th poll whether the oldest request
//! is late (fabric/verbs/cq.rs); and each receive of a tensor notes when it began, for reports of stalls (tensor/calls.rs), of the coarse clock.

use std::time::Duration;

/// Nanoseconds of CLOCK_MONOTONIC: comparable between processes of one host, so that a reader of a stats page can tell ages.
#[inline]
pub fn now() -> u64 {
    #[cfg(feature = "sim")]
    if let Some(now) = VIRTUAL.get() {
        return now;
    }
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a timespec that outlives the call. CLOCK_MONOTONIC always exists, so the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// The same as of the kernel's last tick, a few milliseconds ago at most, and read four times as fast: for what is compared with seconds.
#[inline]
pub fn coarse() -> u64 {
    #[cfg(feature = "sim")]
    if let Some(now) = VIRTUAL.get() {
        return now;
    }
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a timespec that outlives the call. CLOCK_MONOTONIC_COARSE exists since Linux 2.6.32, so the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &mut t) };
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

/// Blocks the calling thread.
pub fn sleep(time: Duration) {
    std::thread::sleep(time);
}

#[cfg(feature = "sim")]
thread_local! {
    static VIRTUAL: std::cell::Cell<Option<u64>> = const { std::cell::Cell::new(None) };
}

/// On this thread it is that time, until it is set again: that of a simulation. `None`: the real one.
#[cfg(feature = "sim")]
pub fn set_virtual(now: Option<u64>) {
    VIRTUAL.set(now);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advances_by_the_time_slept() {
        let before = now();
        sleep(Duration::from_millis(5));
        let passed = now() - before;
        assert!(passed >= 5_000_000, "{passed} ns");
        assert!(passed < 60_000_000_000, "{passed} ns");
    }
}
