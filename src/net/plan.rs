//! How a message is cut over the lanes of a comm: plain numbers, nothing of queue pairs. [`Rails`](super::rails::Rails) makes a plan for
//! each message, on the thread that drives the comm, and the sender posts it stripe by stripe.

/// Stripes begin at multiples of it, as NCCL's do: no two lanes write to one cache line, or to a pair that is fetched together.
const STRIPE_ALIGN: usize = 128;

/// A message cut into stripes: stripe `i` is `chunk` bytes (the last one what is left) on lane `(first + i) % lanes`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Stripes, at least 1.
    pub stripes: usize,
    /// Bytes of each but the last.
    chunk: usize,
    /// Lane of stripe 0.
    pub first: usize,
    lanes: usize,
    len: usize,
}

impl Plan {
    /// Cuts `len` bytes for `lanes` lanes, from lane `first` on: into `most` stripes at most, and into one if they are fewer than
    /// `split_min`.
    pub fn new(len: usize, lanes: usize, most: usize, split_min: usize, first: usize) -> Plan {
        if most <= 1 || len < split_min {
            return Plan { stripes: 1, chunk: len, first, lanes: lanes.max(1), len };
        }
        let chunk = len.div_ceil(most).next_multiple_of(STRIPE_ALIGN);
        Plan { stripes: len.div_ceil(chunk).max(1), chunk, first, lanes, len }
    }

    /// Bytes of the message.
    #[inline]
    pub fn len(self) -> usize {
        self.len
    }

    /// Lane, offset and length of stripe `i`.
    #[inline]
    pub fn stripe(self, i: usize) -> (usize, usize, usize) {
        let offset = (i * self.chunk).min(self.len);
        (wrapped(self.first + i, self.lanes), offset, self.chunk.min(self.len - offset))
    }
}

/// `lane % lanes` of a lane below twice the lanes: without a division, which is slow.
#[inline]
pub fn wrapped(lane: usize, lanes: usize) -> usize {
    if lane >= lanes { lane - lanes } else { lane }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stripes_cover_a_message_once(len in 0usize..3_000_000, lanes in 1usize..=64, most in 1usize..=64, split_min in 128usize..100_000, first in 0usize..64) {
            let most = most.min(lanes);
            let plan = Plan::new(len, lanes, most, split_min, first % lanes);
            prop_assert!(plan.stripes >= 1 && plan.stripes <= most);
            prop_assert!(len >= split_min || plan.stripes == 1);
            let (mut at, mut used) = (0, 0u64);
            for i in 0..plan.stripes {
                let (lane, offset, size) = plan.stripe(i);
                prop_assert_eq!(offset, at);
                prop_assert!(offset % STRIPE_ALIGN == 0 && (size > 0 || len == 0));
                prop_assert!(lane < lanes && used & 1 << lane == 0);
                used |= 1 << lane;
                at += size;
            }
            prop_assert_eq!(at, len);
        }
    }
}
