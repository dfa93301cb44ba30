//! The words that the two sides of a ring exchange, and the order in which each becomes visible. Used by both sides, on their threads.
//!
//! A trait over single loads and stores, so that loom's models run the same code, with the same memory orders.

use std::sync::atomic::Ordering::{self, Acquire, Release};

use super::layout::Control;

/// A word that the two sides of a ring exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// Steps that the consumer has read.
    Head,
    /// Steps that the producer has filled.
    Tail,
    /// Bytes in a slot.
    Size(usize),
}

/// The words that the two sides of a ring exchange. A loaded value may be anything: the other side may be another program.
pub trait Words {
    /// Loads a word.
    fn load(&self, word: Word, order: Ordering) -> u64;

    /// Stores a word.
    fn store(&self, word: Word, value: u64, order: Ordering);

    /// Steps that the consumer has read. Acquire: pairs with [`Words::set_head`], so the consumer's reads of those steps, and its emptying of their
    /// sizes, happen before the producer's next stores.
    #[inline]
    fn head(&self) -> u64 {
        self.load(Word::Head, Acquire)
    }

    /// Publishes `head`. Release: pairs with [`Words::head`].
    #[inline]
    fn set_head(&self, steps: u64) {
        self.store(Word::Head, steps, Release);
    }

    /// Steps that the producer has filled. Acquire: pairs with [`Words::set_tail`], so their data and sizes are visible.
    #[inline]
    fn tail(&self) -> u64 {
        self.load(Word::Tail, Acquire)
    }

    /// Publishes `tail`. Release: pairs with [`Words::tail`].
    #[inline]
    fn set_tail(&self, steps: u64) {
        self.store(Word::Tail, steps, Release);
    }

    /// Bytes in a slot, or [`EMPTY`](super::EMPTY). Acquire: pairs with [`Words::set_size`], because LL reads a size without `tail`.
    #[inline]
    fn size(&self, slot: usize) -> i64 {
        self.load(Word::Size(slot), Acquire) as i64
    }

    /// Sets the bytes in a slot. Release: pairs with [`Words::size`].
    #[inline]
    fn set_size(&self, slot: usize, bytes: i64) {
        self.store(Word::Size(slot), bytes as u64, Release);
    }
}

impl Words for Control {
    #[inline]
    fn load(&self, word: Word, order: Ordering) -> u64 {
        match word {
            Word::Head => self.send_mem.head.load(order),
            Word::Tail => self.recv_mem.tail.load(order),
            Word::Size(slot) => self.recv_mem.sizes_fifo[slot % self.recv_mem.sizes_fifo.len()].load(order) as u64,
        }
    }

    #[inline]
    fn store(&self, word: Word, value: u64, order: Ordering) {
        match word {
            Word::Head => self.send_mem.head.store(value, order),
            Word::Tail => self.recv_mem.tail.store(value, order),
            Word::Size(slot) => self.recv_mem.sizes_fifo[slot % self.recv_mem.sizes_fifo.len()].store(value as i64, order),
        }
    }
}

impl<W: Words + ?Sized> Words for &W {
    #[inline]
    fn load(&self, word: Word, order: Ordering) -> u64 {
        (**self).load(word, order)
    }

    #[inline]
    fn store(&self, word: Word, value: u64, order: Ordering) {
        (**self).store(word, value, order);
    }
}
