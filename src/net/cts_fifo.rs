//! The CTS FIFO: where a receiver tells its sender what it may write, and the completion records: where a sender tells its receiver
//! what it wrote when an immediate is too small for it. Both are memory that the peer WRITEs to, so what is read from them is
//! copied, checked, then used. Called by the threads that drive the two comms.
//!
//! The FIFO belongs to the sender: 256 slots of 64 bytes, flat. Announcement number `s` (from 0, without end) lives in slot `s % 256`:
//!
//! ```text
//!  0 u64 addr       16 u32 rkeys[8]   48 u32 nreqs   56 u64 ready = s + 1
//!  8 u64 size                         52 u32 tag
//! ```
//!
//! **The ready flag is written by [`Slot::encode_to`] and read by [`CtsFifo::read`].** It is the last field, and a fabric makes the
//! last 8 bytes of a small WRITE visible after the rest, so whoever sees it (acquire) sees the slot. It is never cleared: a number
//! from the last lap is simply another number. This is the seed's `ncclIbSendFifo` without its two faults, an element that straddles
//! cache lines and a clear that races with the next lap.

use std::sync::atomic::Ordering;

use crate::base::error::Result;
use crate::base::mem::Pages;

use super::request::{MAX_RECVS, MAX_REQUESTS};
use super::wire::MAX_RAILS;

/// Slots of the FIFO: as many as receives can be outstanding.
pub const SLOTS: usize = MAX_REQUESTS;
/// Bytes of a slot: a cache line.
pub const SLOT_SIZE: usize = 64;

const AT_READY: usize = 56;
const _: () = assert!(MAX_RAILS == 8 && AT_READY + 8 == SLOT_SIZE);
const _: () = assert!(SLOTS == 256, "a slot is a byte of an immediate");

/// One announced receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Slot {
    /// First byte of the receiver's memory.
    pub addr: u64,
    /// Bytes that it takes.
    pub size: u64,
    /// Its key on each rail.
    pub rkeys: [u32; MAX_RAILS],
    /// Receives of its group, 1..=8; they have consecutive numbers.
    pub nreqs: u32,
    /// Which send it is for.
    pub tag: u32,
}

impl Slot {
    /// Puts the 64 bytes into `out` that announce it as number `sequence`: the ready flag is written here.
    #[inline(always)]
    pub fn encode_to(&self, sequence: u64, out: &mut [u8; SLOT_SIZE]) {
        let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
        let [k0, k1, k2, k3, k4, k5, k6, k7] = self.rkeys;
        let (counts, ready) = (pair(self.nreqs, self.tag), sequence + 1);
        let words = [self.addr, self.size, pair(k0, k1), pair(k2, k3), pair(k4, k5), pair(k6, k7), counts, ready];
        for (out, word) in out.chunks_exact_mut(8).zip(words) {
            out.copy_from_slice(&word.to_le_bytes());
        }
    }
}

#[cfg(test)]
impl Slot {
    /// [`Slot::encode_to`], as a value.
    pub fn encode(&self, sequence: u64) -> [u8; SLOT_SIZE] {
        let mut out = [0; SLOT_SIZE];
        self.encode_to(sequence, &mut out);
        out
    }
}

/// What a slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ready {
    /// The announcement asked for has not come.
    NotYet,
    /// It has.
    Yes(Slot),
    /// A number that no correct receiver writes there.
    Nonsense(u64),
}

/// The sender's side.
pub struct CtsFifo {
    pages: Pages,
}

impl CtsFifo {
    /// Empty, and not registered yet.
    pub fn new() -> Result<Self> {
        Ok(CtsFifo { pages: Pages::new(SLOTS * SLOT_SIZE)? })
    }

    /// The memory, to be registered for the receiver.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Looks whether announcement number `sequence` has come: the ready flag is read here.
    #[inline(always)]
    pub fn read(&self, sequence: u64) -> Ready {
        let at = (sequence % SLOTS as u64) as usize * SLOT_SIZE;
        // Pairs with the ordered publish of the receiver's WRITE.
        let words = match self.pages.load_line(at, (sequence + 1).to_le(), Ordering::Acquire) {
            Ok(words) => words.map(u64::from_le),
            Err(ready) => {
                let last_lap = (sequence + 1).saturating_sub(SLOTS as u64);
                let ready = u64::from_le(ready);
                return if ready == last_lap { Ready::NotYet } else { Ready::Nonsense(ready) };
            }
        };
        let low = |word: u64| word as u32;
        let high = |word: u64| (word >> 32) as u32;
        let [addr, size, k0, k2, k4, k6, counts, _] = words;
        Ready::Yes(Slot {
            addr,
            size,
            rkeys: [low(k0), high(k0), low(k2), high(k2), low(k4), high(k4), low(k6), high(k6)],
            nreqs: low(counts),
            tag: high(counts),
        })
    }
}

/// Whether a group of this size can be.
#[inline]
pub fn valid_group(nreqs: u32) -> bool {
    (1..=MAX_RECVS as u32).contains(&nreqs)
}

/// Bytes of a completion record `{u64 size, u32 stripes, u32 epoch}`.
pub const RECORD_SIZE: usize = 16;

/// What a message's immediates do not tell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Bytes of the message.
    pub size: u64,
    /// Into how many stripes it was cut.
    pub stripes: u32,
    /// Which use of the slot: the low half of its sequence number plus 1.
    pub epoch: u32,
}

/// The epoch of a slot's use.
#[inline]
pub fn epoch(sequence: u64) -> u32 {
    (sequence + 1) as u32
}

impl Record {
    /// The bytes.
    #[inline]
    pub fn encode(&self) -> [u8; RECORD_SIZE] {
        let words = u128::from(self.size) | u128::from(self.stripes) << 64 | u128::from(self.epoch) << 96;
        words.to_le_bytes()
    }
}

/// The receiver's side: a record per slot.
pub struct Records {
    pages: Pages,
}

impl Records {
    /// Empty, and not registered yet.
    pub fn new() -> Result<Self> {
        Ok(Records { pages: Pages::new(SLOTS * RECORD_SIZE)? })
    }

    /// The memory, to be registered for the sender.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// A copy of the record of `slot`. Its WRITE came before the immediate that made the caller look.
    #[inline]
    pub fn read(&self, slot: u8) -> Record {
        let at = usize::from(slot) * RECORD_SIZE;
        // The word with the epoch is published last.
        let high = u64::from_le(self.pages.load_u64(at + 8, Ordering::Acquire));
        let size = u64::from_le(self.pages.load_u64(at, Ordering::Relaxed));
        Record { size, stripes: high as u32, epoch: (high >> 32) as u32 }
    }
}

/// What the 32 bits of an immediate say: `slot:8 | kind:1 | value:23`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Imm {
    /// Kind 0: the whole message has landed; its size.
    Whole(u32),
    /// Kind 1: this stripe has landed; size and stripe count are in the slot's record.
    Stripe(u32),
}

/// Sizes below it fit an immediate.
pub const IMM_LIMIT: usize = 1 << 23;

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

    #[inline]
    pub fn decode(imm: u32) -> (u8, Imm) {
        let value = imm & (IMM_LIMIT as u32 - 1);
        let meaning = if imm >> 23 & 1 == 0 { Imm::Whole(value) } else { Imm::Stripe(value) };
        ((imm >> 24) as u8, meaning)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As a fabric's WRITE: the bytes, then the last word.
    fn land(pages: &Pages, at: usize, bytes: &[u8]) {
        let split = bytes.len() - 8;
        pages.write(at, &bytes[..split]);
        pages.store_u64(at + split, u64::from_ne_bytes(bytes[split..].try_into().unwrap()), Ordering::Release);
    }

    fn sample() -> Slot {
        Slot { addr: 0x1122_3344_5566_7788, size: 1 << 30, rkeys: [1, 2, 3, 4, 5, 6, 7, 0xffff_ffff], nreqs: 8, tag: 0x8000_0001 }
    }

    #[test]
    fn a_slot_round_trips_on_every_lap() {
        let fifo = CtsFifo::new().unwrap();
        for sequence in [0u64, 1, 255, 256, 511, 512, 1 << 40] {
            // A receiver that went round as often as this has left the number of the last lap.
            let at = (sequence % 256) as usize * SLOT_SIZE;
            fifo.pages.store_u64(at + AT_READY, (sequence + 1).saturating_sub(256), Ordering::Relaxed);
            assert_eq!(fifo.read(sequence), Ready::NotYet);
            land(&fifo.pages, at, &sample().encode(sequence));
            assert_eq!(fifo.read(sequence), Ready::Yes(sample()));
            assert_eq!(fifo.read(sequence + 256), Ready::NotYet);
        }
    }

    #[test]
    fn other_ready_values_are_nonsense() {
        let fifo = CtsFifo::new().unwrap();
        fifo.pages.store_u64(AT_READY, 2, Ordering::Relaxed);
        assert_eq!(fifo.read(0), Ready::Nonsense(2));
        fifo.pages.store_u64(AT_READY, 257, Ordering::Relaxed);
        assert_eq!(fifo.read(0), Ready::Nonsense(257));
        fifo.pages.store_u64(AT_READY, 0, Ordering::Relaxed);
        assert_eq!(fifo.read(256), Ready::Nonsense(0));
    }

    #[test]
    fn layout_is_as_documented() {
        let bytes = sample().encode(9);
        assert_eq!(bytes[0..8], 0x1122_3344_5566_7788u64.to_le_bytes());
        assert_eq!(bytes[8..16], (1u64 << 30).to_le_bytes());
        assert_eq!(bytes[16..20], 1u32.to_le_bytes());
        assert_eq!(bytes[44..48], u32::MAX.to_le_bytes());
        assert_eq!(bytes[48..52], 8u32.to_le_bytes());
        assert_eq!(bytes[52..56], 0x8000_0001u32.to_le_bytes());
        assert_eq!(bytes[56..64], 10u64.to_le_bytes());
    }

    #[test]
    fn a_record_round_trips() {
        let records = Records::new().unwrap();
        let record = Record { size: 0x3fff_ffff, stripes: 64, epoch: epoch(0xffff_ffff) };
        assert_eq!(record.epoch, 0);
        land(&records.pages, 255 * RECORD_SIZE, &record.encode());
        assert_eq!(records.read(255), record);
    }

    proptest! {
        #[test]
        fn immediates_round_trip(imm: u32) {
            let (slot, meaning) = Imm::decode(imm);
            prop_assert_eq!(meaning.encode(slot), imm);
        }
    }
}
