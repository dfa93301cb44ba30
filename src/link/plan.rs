//! How a message is cut over the queue pairs of a comm: plain numbers, nothing of queue pairs. [`QueuePairs`](super::queue_pairs::QueuePairs) makes a plan for
//! each message, on the thread that drives the comm, and the sender posts it stripe by stripe.

/// Stripes begin at multiples of it from the first byte of the message, as NCCL's do (its protocols LL and LL128 need that).
const STRIPE_ALIGN: usize = 128;

/// A message cut into stripes: stripe `i` is `chunk` bytes (the last one what is left), and goes to place `(first + i) % qps` of those that take messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Stripes, at least 1.
    pub stripes: usize,
    /// Bytes of each but the last.
    chunk: usize,
    /// Place of stripe 0.
    pub first: usize,
    qps: usize,
    len: usize,
}

impl Plan {
    /// Cuts `len` bytes for `qps` queue pairs, from queue pair `first` on: into `most` stripes at most, and into one if they are fewer than
    /// `split_min`.
    pub fn new(len: usize, qps: usize, most: usize, split_min: usize, first: usize) -> Plan {
        if most <= 1 || len < split_min {
            return Plan { stripes: 1, chunk: len, first, qps: qps.max(1), len };
        }
        let chunk = len.div_ceil(most).next_multiple_of(STRIPE_ALIGN);
        Plan { stripes: len.div_ceil(chunk).max(1), chunk, first, qps, len }
    }

    /// All in one stripe.
    #[inline]
    pub fn whole(len: usize) -> Plan {
        Plan { stripes: 1, chunk: len, first: 0, qps: 1, len }
    }

    /// Bytes of the message.
    #[inline]
    #[allow(clippy::len_without_is_empty)] // One without bytes has a stripe all the same.
    pub fn len(self) -> usize {
        self.len
    }

    /// Place, offset and length of stripe `i`.
    #[inline]
    pub fn stripe(self, i: usize) -> (usize, usize, usize) {
        let offset = (i * self.chunk).min(self.len);
        (wrapped(self.first + i, self.qps), offset, self.chunk.min(self.len - offset))
    }
}

/// `qp % qps` of a queue pair below twice the queue pairs: without a division, which is slow.
#[inline]
pub fn wrapped(qp: usize, qps: usize) -> usize {
    if qp >= qps { qp - qps } else { qp }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn stripes_cover_a_message_once(len in 0usize..3_000_000, qps in 1usize..=64, most in 1usize..=64, split_min in 128usize..100_000, first in 0usize..64) {
            let most = most.min(qps);
            let plan = Plan::new(len, qps, most, split_min, first % qps);
            prop_assert!(plan.stripes >= 1 && plan.stripes <= most);
            prop_assert!(len >= split_min || plan.stripes == 1);
            let (mut at, mut used) = (0, 0u64);
            for i in 0..plan.stripes {
                let (qp, offset, size) = plan.stripe(i);
                prop_assert_eq!(offset, at);
                prop_assert!(offset % STRIPE_ALIGN == 0 && (size > 0 || len == 0));
                prop_assert!(qp < qps && used & 1 << qp == 0);
                used |= 1 << qp;
                at += size;
            }
            prop_assert_eq!(at, len);
        }
    }
}
