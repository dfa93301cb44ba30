//! The clear-to-send (CTS) FIFO: where a receiver tells its sender what it may write. It is memory that the peer WRITEs to, so what is read from
//! it is copied, checked, then used. Called by the threads that drive the two comms.
//!
//! The FIFO belongs to the sender: 256 slots of 64 bytes, flat. Clear-to-send number `s` (from 0, without end) lives in slot `s % 256`:
//!
//! ```text
//!  0 u64 addr       16 u32 rkeys[8]   48 u32 nreqs   56 u64 ready = s + 1
//!  8 u64 size                         52 u32 tag
//! ```
//!
//! **The ready flag is written by [`Slot::encode_to`] and read by [`CtsFifo::read`].** It is the last field, and a fabric makes the
//! last 8 bytes of a small WRITE visible after the rest, so whoever sees it (acquire) sees the slot. It is never cleared: a number
//! from the last lap is simply another number. NCCL's `ncclIbIsend` zeroes the first
//! slot of a group once it has posted, which can erase one of the next lap.

use std::sync::atomic::Ordering;

use crate::base::error::Result;
use crate::base::mem::Pages;
use crate::link::CELLS_SIZE;
use crate::link::limits::{MAX_RAILS, MAX_RECVS, SLOT_SIZE, SLOTS};

/// Bytes of the slots. Behind them is where the receiver says something of the rails.
pub const CTS_FIFO_SIZE: usize = SLOTS * SLOT_SIZE;
const AT_READY: usize = 56;
const _: () = assert!(MAX_RAILS == 8 && AT_READY + 8 == SLOT_SIZE);

/// One receive that the sender is clear to send to.
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
    /// Puts the 64 bytes into `out` that tell of it as number `sequence`: the ready flag is written here.
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
pub enum SlotState {
    /// The clear-to-send asked for has not come.
    Empty,
    /// It has.
    Ready(Slot),
    /// A number that no correct receiver writes there.
    Invalid(u64),
}

/// The sender's side.
pub struct CtsFifo {
    pages: Pages,
}

impl CtsFifo {
    /// Empty, and not registered yet.
    pub fn new() -> Result<Self> {
        Ok(CtsFifo { pages: Pages::new(CTS_FIFO_SIZE + CELLS_SIZE)? })
    }

    /// The memory, to be registered for the receiver.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Looks whether clear-to-send number `sequence` has come: the ready flag is read here.
    #[inline(always)]
    pub fn read(&self, sequence: u64) -> SlotState {
        let at = (sequence % SLOTS as u64) as usize * SLOT_SIZE;
        // Pairs with the ordered publish of the receiver's WRITE.
        let words = match self.pages.load_line(at, (sequence + 1).to_le(), Ordering::Acquire) {
            Ok(words) => words.map(u64::from_le),
            Err(ready) => {
                let last_lap = (sequence + 1).saturating_sub(SLOTS as u64);
                let ready = u64::from_le(ready);
                return if ready == last_lap { SlotState::Empty } else { SlotState::Invalid(ready) };
            }
        };
        let low = |word: u64| word as u32;
        let high = |word: u64| (word >> 32) as u32;
        let [addr, size, k0, k2, k4, k6, counts, _] = words;
        SlotState::Ready(Slot {
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

#[cfg(test)]
mod tests {
    use super::*;

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
            assert_eq!(fifo.read(sequence), SlotState::Empty);
            land(&fifo.pages, at, &sample().encode(sequence));
            assert_eq!(fifo.read(sequence), SlotState::Ready(sample()));
            assert_eq!(fifo.read(sequence + 256), SlotState::Empty);
        }
    }

    #[test]
    fn other_ready_values_are_protocol_errors() {
        let fifo = CtsFifo::new().unwrap();
        fifo.pages.store_u64(AT_READY, 2, Ordering::Relaxed);
        assert_eq!(fifo.read(0), SlotState::Invalid(2));
        fifo.pages.store_u64(AT_READY, 257, Ordering::Relaxed);
        assert_eq!(fifo.read(0), SlotState::Invalid(257));
        fifo.pages.store_u64(AT_READY, 0, Ordering::Relaxed);
        assert_eq!(fifo.read(256), SlotState::Invalid(0));
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
}
