//! The limit of a small message: a ping-pong as the plugins' is driven, over two bare rings of slots of one cache line, one for each direction. The sender
//! stores a message and then its number, the receiver spins on the number and checks the message. No call, no request, no memory but the ring's.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, ensure};

use super::super::message::Round;
use super::super::rank::coordinator::{self, Coordinator};
use super::super::rank::job::{Begin, Job, Meter};
use super::super::shared::Words;
use super::super::spin::Spin;

/// Of each direction: as many as NCCL has requests (NCCL_NET_MAX_REQUESTS).
const SLOTS: usize = 32;
/// Words of a slot.
const LINE: usize = 8;
/// Words of both rings.
const WORDS: usize = 2 * SLOTS * LINE;

/// Rings that both ranks have mapped.
pub struct Ring {
    words: Words,
    rank: usize,
    /// Messages so far, in each direction.
    done: u64,
}

impl Ring {
    /// Maps them.
    pub fn new(rank: usize, coordinator: &mut Coordinator) -> anyhow::Result<Ring> {
        Ok(Ring { words: Words::of_both(WORDS, rank, coordinator)?, rank, done: 0 })
    }

    /// Number and contents of message `seq` from this rank.
    #[inline]
    fn slot(&self, from: usize, seq: u64) -> anyhow::Result<(&AtomicU64, &AtomicU64)> {
        let at = (from * SLOTS + seq as usize % SLOTS) * LINE;
        self.words.get(at).zip(self.words.get(at + 1)).context("the mapping is too short")
    }

    #[inline]
    fn send(&self, seq: u64) -> anyhow::Result<()> {
        let (number, message) = self.slot(self.rank, seq)?;
        message.store(!seq, Ordering::Relaxed);
        // Pairs with the Acquire in `receive`.
        number.store(seq + 1, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn receive(&self, seq: u64) -> anyhow::Result<()> {
        let (number, message) = self.slot(1 - self.rank, seq)?;
        let mut spin = Spin::default();
        // Pairs with the Release in `send`.
        while number.load(Ordering::Acquire) != seq + 1 {
            spin.idle();
        }
        ensure!(message.load(Ordering::Relaxed) == !seq, "message {seq} is another one");
        Ok(())
    }
}

impl Job for Ring {
    fn round(&mut self, _: &mut Coordinator, messages: u64, begin: Begin) -> anyhow::Result<Round> {
        ensure!(begin.0.is_some(), "both ranks must be on one host");
        let meter = Meter::start(begin);
        for seq in self.done..self.done + messages {
            if self.rank == 0 {
                self.send(seq)?;
            }
            self.receive(seq)?;
            if self.rank == 1 {
                self.send(seq)?;
            }
        }
        self.done += messages;
        coordinator::count(messages);
        Ok(meter.stop())
    }
}
