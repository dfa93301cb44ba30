//! The words that the two sides of a ring exchange, and the order in which each becomes visible. Used by both sides, on their threads.
//!
//! A trait, so that models run the same code over words that a checker watches.

use std::sync::atomic::Ordering::{Acquire, Release};

use super::layout::Control;

/// The words that the two sides of a ring exchange. What comes out may be anything: the other side may be another program.
pub trait Words {
    /// Steps that the consumer is done with. Acquire: pairs with [`Words::set_head`], so that what the consumer read of those steps, and its
    /// emptying of their sizes, happened before whatever the producer stores next.
    fn head(&self) -> u64;
    /// Publishes `head`. Release: pairs with [`Words::head`].
    fn set_head(&self, steps: u64);
    /// Steps that the producer has filled. Acquire: pairs with [`Words::set_tail`], so that their data and sizes are there.
    fn tail(&self) -> u64;
    /// Publishes `tail`. Release: pairs with [`Words::tail`].
    fn set_tail(&self, steps: u64);
    /// Bytes in a slot, or [`EMPTY`](super::EMPTY). Acquire: pairs with [`Words::set_size`], because LL takes a size without having seen `tail`.
    fn size(&self, slot: usize) -> i64;
    /// Sets the bytes in a slot. Release: pairs with [`Words::size`].
    fn set_size(&self, slot: usize, bytes: i64);
}

impl Words for Control {
    #[inline]
    fn head(&self) -> u64 {
        self.send_mem.head.load(Acquire)
    }

    #[inline]
    fn set_head(&self, steps: u64) {
        self.send_mem.head.store(steps, Release);
    }

    #[inline]
    fn tail(&self) -> u64 {
        self.recv_mem.tail.load(Acquire)
    }

    #[inline]
    fn set_tail(&self, steps: u64) {
        self.recv_mem.tail.store(steps, Release);
    }

    #[inline]
    fn size(&self, slot: usize) -> i64 {
        self.recv_mem.sizes_fifo[slot % self.recv_mem.sizes_fifo.len()].load(Acquire)
    }

    #[inline]
    fn set_size(&self, slot: usize, bytes: i64) {
        self.recv_mem.sizes_fifo[slot % self.recv_mem.sizes_fifo.len()].store(bytes, Release);
    }
}

impl<W: Words + ?Sized> Words for &W {
    #[inline]
    fn head(&self) -> u64 {
        (**self).head()
    }

    #[inline]
    fn set_head(&self, steps: u64) {
        (**self).set_head(steps);
    }

    #[inline]
    fn tail(&self) -> u64 {
        (**self).tail()
    }

    #[inline]
    fn set_tail(&self, steps: u64) {
        (**self).set_tail(steps);
    }

    #[inline]
    fn size(&self, slot: usize) -> i64 {
        (**self).size(slot)
    }

    #[inline]
    fn set_size(&self, slot: usize, bytes: i64) {
        (**self).set_size(slot, bytes);
    }
}
