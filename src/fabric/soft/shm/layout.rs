//! The layout of the segment that the two ends of a queue pair share: what lies where, and who writes it.
//!
//! A segment has two directions, one per requester. Side 0 is the one that dialed, and direction 0 carries its requests. Every word is written
//! by one side only, except two: a grant's `claims`, which both change with compare-and-swap, and `sleeping`, which its side sets and the other
//! clears. Neither side trusts what the other wrote: positions are
//! masked or compared before they are used, so a hostile peer can spoil its own data and nothing else.
//!
//! ```text
//! 0      Control: magic, geometry, Side[2], DirectionState[2], Grant[2][GRANTS]     one page
//! 4096   direction 0: descriptors | fill stream | response stream | bounce ring
//! ...    direction 1: the same
//! ```
//!
//! The fill stream carries bytes that the requester copies because the responder cannot read them; the response stream carries READ responses.

use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::base::error::{Error, Result};

/// First word of every segment: "RHSHM" and the layout's version.
pub const MAGIC: u64 = 0x0004_4d48_5348_5200;

/// Descriptors per direction.
pub const DESCS: u64 = 1024;
/// Bytes of the fill stream and of the response stream of a direction.
pub const STREAM: u64 = 64 * 1024;
/// Bytes of the control page.
const CONTROL: usize = 4096;

/// What one side says about itself.
#[repr(C, align(64))]
pub struct Side {
    /// Process id in its own namespace. Used, as a hint, if the kernel does not tell the pid.
    pub pid: AtomicU64,
    /// Address of its cookie in its private memory.
    pub cookie_addr: AtomicU64,
    /// The cookie. Reading the same 16 bytes at `cookie_addr` proves that the pid is right and that its memory can be read.
    pub cookie: [AtomicU64; 2],
    /// 1 once the side has closed its queue pair: its memory may be reused.
    pub closed: AtomicU32,
    /// 1 if the side asks for a doorbell on the control socket when it sleeps.
    pub notify: AtomicU32,
    /// 1 while the side sleeps or is about to.
    pub sleeping: AtomicU32,
    /// 1 once the side has proven that it can read the other's memory.
    pub can_read_peer: AtomicU32,
}

/// The positions of one direction. The first cache line is written by the responder, the second by the requester.
#[repr(C, align(64))]
pub struct DirectionState {
    /// Requests acked.
    pub acked: AtomicU64,
    /// Descriptors consumed.
    pub desc_head: AtomicU64,
    /// Bounce ring bytes consumed.
    pub bounce_head: AtomicU64,
    /// Status of the request after the acked ones, once it was refused; 0 before.
    pub nak: AtomicU64,
    /// 1 + the descriptor whose bytes the responder wants through the fill stream, because it cannot read them; 0 for none.
    pub fill_want: AtomicU64,
    /// Offset of the first byte wanted.
    pub fill_from: AtomicU64,
    /// Fill stream bytes consumed.
    pub fill_head: AtomicU64,
    /// Response stream bytes produced.
    pub resp_tail: AtomicU64,

    /// Fill stream bytes produced.
    pub fill_tail: AtomicU64,
    /// Response stream bytes consumed.
    pub resp_head: AtomicU64,
    /// 1 once memory that a descriptor in flight names was deregistered: what was read from it since is not valid.
    pub revoked: AtomicU64,
    _reserved: [AtomicU64; 5],
}

/// The control page.
#[repr(C, align(64))]
pub struct Control {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// Bytes of a bounce ring.
    pub bounce: AtomicU64,
    _reserved: [AtomicU64; 6],
    /// The dialer, then the acceptor.
    pub sides: [Side; 2],
    /// The dialer's requests, then the acceptor's.
    pub directions: [DirectionState; 2],
    /// For the dialer's requests, then for the acceptor's.
    pub grants: [[Grant; GRANTS]; 2],
}

/// Grants per direction.
pub const GRANTS: usize = 8;

/// Lets the requester write parts of one descriptor's bytes into the responder's private memory. Descriptor `d` uses grant `d % GRANTS`.
/// `grant.rs` says how.
#[repr(C, align(64))]
pub struct Grant {
    /// Where the first byte goes in the responder's memory. This cache line is written by the responder.
    pub to: AtomicU64,
    /// Bytes of a part; the last one may be shorter.
    pub part: AtomicU64,
    /// Parts.
    pub parts: AtomicU64,
    _first: [AtomicU64; 4],
    /// 1 + the descriptor's number, stored last with Release.
    pub number: AtomicU64,

    /// How many parts each side has claimed; changed by both, with compare-and-swap.
    pub claims: AtomicU64,
    /// How many of its parts the requester has written; written by the requester.
    pub done: AtomicU64,
    _second: [AtomicU64; 6],
}

/// A descriptor: one cache line, published by its last word.
///
/// | word | holds |
/// |---|---|
/// | 0 | peer's memory |
/// | 1 | rkey: u32, imm: u32 |
/// | 2 to 6 | inline: the words of the payload that are not zero, in order; else as below |
/// | 2 | position in the bounce ring, address, or offset in mapped memory |
/// | 3 | bounce, placed: bytes from here to the request's end; mapped: id of the allocation |
/// | 4 | bytes |
/// | 7 | its [`Trailer`], stored last with Release |
#[repr(C, align(64))]
pub struct Desc {
    /// The words.
    pub words: [AtomicU64; 8],
}

/// Words of a descriptor that may hold payload.
pub const PAYLOAD_WORDS: usize = 5;
/// Most bytes of an inline payload: a clear-to-send, of which one or two rails use five words.
pub const DESC_INLINE: usize = 64;

/// The last word of a descriptor, which publishes it:
/// `number + 1:24 | acked:16 | words:8 | inline bytes:8 | flags:3 | source:3 | op:2`, from the top down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Trailer {
    /// [`op`]: what to do.
    pub op: u8,
    /// [`source`]: where the bytes are.
    pub source: u8,
    /// [`flag`].
    pub flags: u8,
    /// Bytes, if they are inline.
    pub inline: u8,
    /// Which words of an inline payload are not zero: a bit each.
    pub words: u8,
    /// Piggybacked ack: the low bits of the number of requests that the publisher has acked in the other direction.
    pub acked: u16,
}

impl Trailer {
    /// The word, but for the descriptor's number.
    #[inline(always)]
    pub fn bits(self) -> u64 {
        u64::from(self.op & 3)
            | u64::from(self.source & 7) << 2
            | u64::from(self.flags & 7) << 5
            | u64::from(self.inline) << 8
            | u64::from(self.words) << 16
            | u64::from(self.acked) << 24
    }

    /// The word of descriptor `number`.
    #[inline(always)]
    pub fn word(bits: u64, number: u64) -> u64 {
        bits | Trailer::tag(number)
    }

    /// The fields of `word`; none if it does not publish descriptor `number`.
    #[inline]
    pub fn decode(word: u64, number: u64) -> Option<Trailer> {
        Trailer::is(word, number).then_some(Trailer {
            op: word as u8 & 3,
            source: (word >> 2) as u8 & 7,
            flags: (word >> 5) as u8 & 7,
            inline: (word >> 8) as u8,
            words: (word >> 16) as u8,
            acked: (word >> 24) as u16,
        })
    }

    /// Whether `word` publishes descriptor `number`.
    #[inline]
    pub fn is(word: u64, number: u64) -> bool {
        (word ^ Trailer::tag(number)) >> 40 == 0
    }

    #[inline]
    fn tag(number: u64) -> u64 {
        (number + 1) << 40
    }
}

const _: () = assert!(size_of::<Side>() == 64);
const _: () = assert!(size_of::<DirectionState>() == 128);
const _: () = assert!(offset_of!(DirectionState, resp_tail) == 56 && offset_of!(DirectionState, fill_tail) == 64);
const _: () = assert!(size_of::<Desc>() == 64);
const _: () = assert!(offset_of!(Control, sides) == 64 && offset_of!(Control, directions) == 192 && offset_of!(Control, grants) == 448);
const _: () = assert!(size_of::<Grant>() == 128 && offset_of!(Grant, number) == 56 && offset_of!(Grant, claims) == 64);
const _: () = assert!(size_of::<Control>() <= CONTROL);

/// Offsets of everything in a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes of a bounce ring, a power of two.
    pub bounce: u64,
}

/// Smallest and largest bounce ring.
const BOUNCE_RANGE: std::ops::RangeInclusive<u64> = 64 * 1024..=64 * 1024 * 1024;

impl Geometry {
    /// Checks a bounce ring's size, ours or a peer's.
    pub fn new(bounce: u64) -> Result<Self> {
        if !bounce.is_power_of_two() || !BOUNCE_RANGE.contains(&bounce) {
            return Err(Error::usage(format!("bounce ring of {bounce} bytes: must be a power of two in {BOUNCE_RANGE:?}")));
        }
        Ok(Geometry { bounce })
    }

    fn direction_len(&self) -> usize {
        DESCS as usize * size_of::<Desc>() + 2 * STREAM as usize + self.bounce as usize
    }

    /// Bytes of the segment.
    pub fn len(&self) -> usize {
        CONTROL + 2 * self.direction_len()
    }

    /// Offset of a direction's descriptors.
    pub fn descs(&self, direction: usize) -> usize {
        CONTROL + direction * self.direction_len()
    }

    /// Offset of a direction's fill stream.
    pub fn fill(&self, direction: usize) -> usize {
        self.descs(direction) + DESCS as usize * size_of::<Desc>()
    }

    /// Offset of a direction's response stream.
    pub fn resp(&self, direction: usize) -> usize {
        self.fill(direction) + STREAM as usize
    }

    /// Offset of a direction's bounce ring.
    pub fn ring(&self, direction: usize) -> usize {
        self.resp(direction) + STREAM as usize
    }
}

/// What a descriptor makes the responder do.
pub mod op {
    /// Into the memory of a receive request.
    pub const SEND: u8 = 1;
    /// Into the memory named by address and key.
    pub const WRITE: u8 = 2;
    /// From the memory named by address and key, through the response stream.
    pub const READ: u8 = 3;
}

/// Where a descriptor's bytes are.
pub mod source {
    /// In the descriptor.
    pub const INLINE: u8 = 0;
    /// In the direction's bounce ring.
    pub const BOUNCE: u8 = 1;
    /// In the requester's private memory.
    pub const PRIVATE: u8 = 2;
    /// In memory that the requester's library allocated and the responder maps.
    pub const MAPPED: u8 = 3;
    /// At their destination already: the requester has copied them there, through a mapping of the responder's memory.
    pub const PLACED: u8 = 4;
}

/// Flags of a descriptor.
pub mod flag {
    /// The request ends with this descriptor.
    pub const LAST: u8 = 1;
    /// The request carries an immediate.
    pub const IMM: u8 = 2;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn areas_follow_each_other_without_overlap() {
        let g = Geometry::new(1 << 20).unwrap();
        assert_eq!(g.descs(0), 4096);
        assert!(g.descs(0) < g.fill(0) && g.fill(0) < g.resp(0) && g.resp(0) < g.ring(0));
        assert_eq!(g.ring(0) + (1 << 20), g.descs(1));
        assert_eq!(g.ring(1) + (1 << 20), g.len());
    }

    #[test]
    fn a_trailer_tells_all_its_parts_and_only_of_its_own_descriptor() {
        let trailer = Trailer { op: 3, source: 5, flags: 6, inline: 64, words: 0xa5, acked: 0xfedc };
        for number in [0, 1, 1023, (1 << 24) - 2, (1 << 24) - 1, 1 << 24, u64::MAX >> 1] {
            let word = Trailer::word(trailer.bits(), number);
            assert_eq!(Trailer::decode(word, number), Some(trailer), "{number}");
            // A descriptor of an earlier lap.
            assert!(!Trailer::is(word, number + DESCS) && !Trailer::is(word, number + (1 << 23)));
        }
        assert!(!Trailer::is(0, 0), "a fresh segment");
    }

    #[test]
    fn odd_ring_sizes_are_refused() {
        for bad in [0, 1, 65535, 65537, 32768, 1 << 27, u64::MAX] {
            assert!(Geometry::new(bad).is_err(), "{bad}");
        }
    }
}
