//! Waiting without sleeping. Used on the threads that drive ranks.

/// How often in a row there was nothing to do.
#[derive(Default)]
pub struct Spin(u32);

/// Some 100 us: longer than anything that is measured takes where each rank has a CPU of its own. Where it has not, the other rank
/// should run instead; NCCL's proxy yields too.
const PATIENCE: u32 = 4096;

impl Spin {
    /// Something happened.
    #[inline]
    pub fn reset(&mut self) {
        self.0 = 0;
    }

    /// Nothing did.
    #[inline]
    pub fn idle(&mut self) {
        if self.0 < PATIENCE {
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
