//! The outstanding requests of a send or receive queue. Owned by a queue pair, used by the thread that drives it.
#![forbid(unsafe_code)]

/// The part of a request's number that travels in its id on the device.
pub const NUMBER: u64 = (1 << 31) - 1;

/// Requests by free-running numbers: `done <= posted`, `posted - done <= depth`.
pub struct Ring<T> {
    slots: Box<[T]>,
    mask: u64,
    depth: u64,
    posted: u64,
    done: u64,
}

impl<T: Copy> Ring<T> {
    /// Of so many requests at most.
    pub fn new(depth: u32, empty: T) -> Ring<T> {
        let slots = (depth as usize).next_power_of_two();
        Ring { slots: vec![empty; slots].into_boxed_slice(), mask: slots as u64 - 1, depth: u64::from(depth), posted: 0, done: 0 }
    }

    /// How many more it takes.
    #[inline]
    pub fn room(&self) -> u64 {
        self.depth - (self.posted - self.done)
    }

    /// Adds one. There must be room.
    #[inline]
    pub fn push(&mut self, item: T) {
        self.slots[(self.posted & self.mask) as usize] = item;
        self.posted += 1;
    }

    /// Takes the outstanding request whose number ends in `number`; those before it are done too. `None` if there is none of that number.
    #[inline]
    pub fn take(&mut self, number: u64) -> Option<T> {
        let ahead = number.wrapping_sub(self.done) & NUMBER;
        if ahead >= self.posted - self.done {
            return None;
        }
        let at = self.done + ahead;
        self.done = at + 1;
        Some(self.slots[(at & self.mask) as usize])
    }

    /// Whether nothing is outstanding.
    pub fn idle(&self) -> bool {
        self.done == self.posted
    }

    /// Requests that may be outstanding at once.
    #[inline]
    pub fn depth(&self) -> u64 {
        self.depth
    }

    /// Slots. Each outstanding request has one to itself.
    pub fn slot_count(&self) -> usize {
        self.slots.len()
    }

    /// The slot of the next request.
    #[inline]
    pub fn slot(&self) -> usize {
        (self.posted & self.mask) as usize
    }

    /// Requests posted so far.
    #[inline]
    pub fn posted(&self) -> u64 {
        self.posted
    }

    /// Requests done so far.
    pub fn done(&self) -> u64 {
        self.done
    }

    /// Removes the newest requests, so that only the first `posted` so far are left.
    pub fn truncate(&mut self, posted: u64) {
        self.posted = posted.clamp(self.done, self.posted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_find_their_requests_across_the_wrap() {
        let mut ring = Ring::new(4, 0u64);
        (ring.posted, ring.done) = (NUMBER - 1, NUMBER - 1);
        for i in 0..4 {
            ring.push(100 + i);
        }
        assert_eq!(ring.room(), 0);
        // The completion of the third one completes the two before it.
        assert_eq!(ring.take((NUMBER + 1) & NUMBER), Some(102));
        assert_eq!(ring.room(), 3);
        assert_eq!(ring.take(NUMBER), None, "it was reported before");
        assert_eq!(ring.take((NUMBER + 2) & NUMBER), Some(103));
        assert_eq!(ring.take((NUMBER + 3) & NUMBER), None, "it was never posted");
        assert!(ring.idle());
    }
}
