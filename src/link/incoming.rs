//! What is known of the messages that come in: the completion records, where a sender tells its receiver what it wrote when an immediate is too
//! small for it, the immediates themselves, and the account of a message's stripes. Used by the threads that drive the two ends of a link.
//!
//! Records are memory that the peer WRITEs to, so what is read from them is copied, checked, then used.

use std::sync::atomic::Ordering;

use crate::base::error::Result;
use crate::base::mem::Pages;

use super::limits::{IMM_LIMIT, RECORD_SIZE, SLOTS};

/// What a message's immediates do not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletionRecord {
    /// Bytes of the message.
    pub size: u64,
    /// Into how many stripes it was cut.
    pub stripes: u32,
    /// Which use of the slot: the low 32 bits of its sequence number + 1.
    pub epoch: u32,
}

/// The epoch of a slot's use.
#[inline]
pub fn epoch(sequence: u64) -> u32 {
    (sequence + 1) as u32
}

impl CompletionRecord {
    /// The bytes.
    #[inline]
    pub fn encode(&self) -> [u8; RECORD_SIZE] {
        let words = u128::from(self.size) | u128::from(self.stripes) << 64 | u128::from(self.epoch) << 96;
        words.to_le_bytes()
    }
}

/// Bytes of the records. Behind them is whatever else the peer writes.
pub const RECORDS_SIZE: usize = SLOTS * RECORD_SIZE;

/// The receiver's side: a record per slot.
pub struct Records {
    pages: Pages,
}

impl Records {
    /// Empty, and not registered yet.
    pub fn new() -> Result<Self> {
        Records::with_more(0)
    }

    /// With so many bytes behind them, for whatever else the peer writes.
    pub fn with_more(bytes: usize) -> Result<Self> {
        Ok(Records { pages: Pages::new(RECORDS_SIZE + bytes)? })
    }

    /// The memory, to be registered for the sender.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// A copy of the record of `slot`. Its WRITE came before the immediate that made the caller look.
    #[inline]
    pub fn read(&self, slot: u8) -> CompletionRecord {
        let at = usize::from(slot) * RECORD_SIZE;
        // The word with the epoch is published last.
        let high = u64::from_le(self.pages.load_u64(at + 8, Ordering::Acquire));
        let size = u64::from_le(self.pages.load_u64(at, Ordering::Relaxed));
        CompletionRecord { size, stripes: high as u32, epoch: (high >> 32) as u32 }
    }
}

/// What the 32 bits of an immediate say: `slot:8 | kind:1 | value:23`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Imm {
    /// Kind 0: the whole message has landed; its size, or a notification's value.
    Whole(u32),
    /// Kind 1: this stripe has landed; size and stripe count are in the slot's record.
    Stripe(u32),
}

impl Imm {
    /// The immediate for `slot`. The value must be below [`IMM_LIMIT`].
    #[inline]
    pub fn encode(self, slot: u8) -> u32 {
        let (kind, value) = match self {
            Imm::Whole(size) => (0, size),
            Imm::Stripe(index) => (1, index),
        };
        debug_assert!((value as usize) < IMM_LIMIT);
        u32::from(slot) << 24 | kind << 23 | (value & (IMM_LIMIT as u32 - 1))
    }

    /// The slot, and what is said of it.
    #[inline]
    pub fn decode(imm: u32) -> (u8, Imm) {
        let value = imm & (IMM_LIMIT as u32 - 1);
        let meaning = if imm >> 23 & 1 == 0 { Imm::Whole(value) } else { Imm::Stripe(value) };
        ((imm >> 24) as u8, meaning)
    }
}

/// The account of one message that comes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IncomingMessage {
    /// All of it is here.
    pub completed: bool,
    /// Bytes, once known.
    pub size: u64,
    /// How many stripes it has, once known; 0 before.
    stripes: u32,
    /// Which of them are here: a bit each.
    seen: u64,
}

impl IncomingMessage {
    /// Nothing has come.
    pub const NONE: IncomingMessage = IncomingMessage { completed: false, size: 0, stripes: 0, seen: 0 };

    /// All of it came at once; false if stripes of it had.
    #[inline(always)]
    pub fn whole(&mut self, size: u32) -> bool {
        self.size = u64::from(size);
        self.completed = true;
        self.seen == 0
    }

    /// Stripe `index` came, of a message that can have `max` and is the one of `epoch`, with this record.
    ///
    /// Errors: what makes no sense about it, in words that follow "stripe 3 for slot 7".
    #[inline(never)]
    pub fn stripe(&mut self, index: u32, record: CompletionRecord, epoch: u32, max: u32) -> std::result::Result<(), String> {
        if record.epoch != epoch || !(1..=max).contains(&record.stripes) || index >= record.stripes {
            return Err(format!("with {record:?}"));
        }
        if self.stripes == 0 {
            self.size = record.size;
            self.stripes = record.stripes;
        }
        if (self.size, self.stripes) != (record.size, record.stripes) || self.seen & 1 << index != 0 {
            return Err("twice, or two records of it".into());
        }
        self.seen |= 1 << index;
        self.completed = self.seen.count_ones() == self.stripes;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_record_round_trips() {
        let records = Records::new().unwrap();
        let record = CompletionRecord { size: 0x3fff_ffff, stripes: 64, epoch: epoch(0xffff_ffff) };
        assert_eq!(record.epoch, 0);
        let bytes = record.encode();
        records.pages.write(255 * RECORD_SIZE, &bytes[..8]);
        records.pages.store_u64(255 * RECORD_SIZE + 8, u64::from_ne_bytes(bytes[8..].try_into().unwrap()), Ordering::Release);
        assert_eq!(records.read(255), record);
    }

    #[test]
    fn a_message_is_complete_with_its_last_stripe() {
        let record = CompletionRecord { size: 300, stripes: 3, epoch: 7 };
        let mut incoming = IncomingMessage::NONE;
        for (index, completed) in [(2, false), (0, false), (1, true)] {
            incoming.stripe(index, record, 7, 3).unwrap();
            assert_eq!((incoming.completed, incoming.size), (completed, 300));
        }
        assert!(incoming.stripe(1, record, 7, 3).is_err(), "twice");
        assert!(!incoming.whole(300), "after stripes of it");
        for (index, record, max) in [
            (3, record, 3),
            (0, CompletionRecord { epoch: 8, ..record }, 3),
            (0, record, 2),
            (0, CompletionRecord { stripes: 0, ..record }, 3),
        ] {
            assert!(IncomingMessage::NONE.clone().stripe(index, record, 7, max).is_err(), "{index} {record:?} {max}");
        }
        let mut incoming = IncomingMessage::NONE;
        incoming.stripe(0, record, 7, 3).unwrap();
        assert!(incoming.stripe(1, CompletionRecord { size: 301, ..record }, 7, 3).is_err(), "two records");
    }

    proptest! {
        #[test]
        fn immediates_round_trip(imm: u32) {
            let (slot, meaning) = Imm::decode(imm);
            prop_assert_eq!(meaning.encode(slot), imm);
        }
    }
}
