//! Waiting without sleeping. Used on the threads that drive ranks.

/// How often in a row there was nothing to do.
#[derive(Default)]
pub struct Spin(u32);

/// About a millisecond: longer than anything that is measured takes where each rank has a CPU of its own. Where it has not, the other
/// rank should run instead. Not sooner: two ranks that take turns on one CPU faster than Linux's migration cost (0.5 ms) count as hot in
/// its cache, and stay there beside an idle CPU.
const SPINS: u32 = 1 << 15;

impl Spin {
    /// Something happened.
    #[inline]
    pub fn reset(&mut self) {
        self.0 = 0;
    }

    /// Nothing did.
    #[inline]
    pub fn idle(&mut self) {
        if self.0 < SPINS {
            self.0 += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }

    /// One or the other.
    #[inline]
    pub fn after(&mut self, moved: bool) {
        if moved { self.reset() } else { self.idle() }
    }
}
