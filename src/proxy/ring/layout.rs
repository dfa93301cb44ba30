//! The layout of a ring's memory. `include/railhead_ring.h` has the same layout in C; both assert it.
//!
//! ```text
//!    0  info        magic, version, steps, where the data is         written once, before others map it
//!  128  sendMem     head                                             written by the consumer
//!  256  recvMem     tail                                             written by the producer
//!  384              sizes_fifo[8]                                    filled by the producer, emptied by the consumer
//! 4096  data        SIMPLE slots | LL slots | LL128 slots            elsewhere, if the caller supplied the memory
//! ```
//!
//! `head` counts the steps that the consumer has read, `tail` those that the producer has filled; both wrap at 2^64. Step `s` uses slot `s % 8`. Each
//! word that one side polls while the other writes has 128 bytes to itself, because processors fetch cache lines in pairs; the sizes share one line,
//! because a side that reads one soon reads its neighbours.

use std::mem::offset_of;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64};

use crate::base::error::{Error, Result};
use crate::proxy::protocol::Protocol;

/// Slots of a ring, and the most steps in flight: NCCL_STEPS (nccl v2.7.8 src/include/devcomm.h).
pub const STEPS: u64 = 8;
/// Value in sizes_fifo of a slot without a size.
pub const EMPTY: i64 = -1;
/// First word: "RHRING" and two zero bytes, little-endian.
pub const MAGIC: u64 = 0x0000_474e_4952_4852;
/// Version of the layout.
pub const VERSION: u32 = 1;
/// Where the data starts if it follows the control words: the next page.
pub const DATA_OFFSET: usize = 4096;
/// Buffers are multiples of this: every slot then starts on an LL128 line.
pub const BUFFER_UNIT: usize = 1024;
/// The most bytes of a buffer: a slot's size must fit the `int` in which ncclNet's `test` returns it.
pub const BUFFER_MAX: usize = 1 << 30;

/// The control words.
#[repr(C)]
pub struct Control {
    /// Describes the ring.
    pub info: Info,
    /// The consumer's word.
    pub send_mem: SendMem,
    /// The producer's words.
    pub recv_mem: RecvMem,
}

/// Describes the ring to a process that maps it. The library writes it and never reads it back.
#[repr(C, align(128))]
pub struct Info {
    /// [`MAGIC`].
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// [`STEPS`].
    pub steps: AtomicU32,
    /// Bytes from the control words to the data; 0 if it is elsewhere.
    pub data_offset: AtomicU64,
    /// Bytes of all slots.
    pub data_bytes: AtomicU64,
    /// The slots of each protocol.
    pub areas: [Area; 3],
}

/// The slots of one protocol.
#[repr(C)]
pub struct Area {
    /// Bytes from the start of the data to slot 0.
    pub offset: AtomicU64,
    /// Bytes of a slot; 0 if the ring has none for the protocol.
    pub step_bytes: AtomicU64,
}

/// The consumer's word.
#[repr(C, align(128))]
pub struct SendMem {
    /// Steps read.
    pub head: AtomicU64,
}

/// The producer's words.
#[repr(C, align(128))]
pub struct RecvMem {
    /// Steps filled.
    pub tail: AtomicU64,
    _line: [u64; 15],
    /// Bytes in each slot, or [`EMPTY`].
    pub sizes_fifo: [AtomicI64; STEPS as usize],
}

const _: () = {
    assert!(size_of::<Control>() == 512 && align_of::<Control>() == 128);
    assert!(offset_of!(Control, info) == 0 && offset_of!(Control, send_mem) == 128 && offset_of!(Control, recv_mem) == 256);
    assert!(size_of::<Info>() == 128 && offset_of!(Info, version) == 8 && offset_of!(Info, steps) == 12);
    assert!(offset_of!(Info, data_offset) == 16 && offset_of!(Info, data_bytes) == 24 && offset_of!(Info, areas) == 32);
    assert!(size_of::<Area>() == 16 && offset_of!(Area, step_bytes) == 8);
    assert!(size_of::<SendMem>() == 128 && offset_of!(SendMem, head) == 0);
    assert!(size_of::<RecvMem>() == 256 && offset_of!(RecvMem, tail) == 0 && offset_of!(RecvMem, sizes_fifo) == 128);
    assert!(size_of::<Control>() <= DATA_OFFSET);
};

/// Sizes and offsets of all slots, as the ring's owner keeps them: not read from the shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    buffers: [usize; Protocol::COUNT],
}

impl Geometry {
    /// A ring with a buffer of that many bytes for each protocol, in the order of [`Protocol`]; 0 for none.
    ///
    /// Errors: no buffer at all; one that is not a multiple of [`BUFFER_UNIT`] up to [`BUFFER_MAX`].
    pub fn new(buffers: [usize; Protocol::COUNT]) -> Result<Geometry> {
        for (protocol, bytes) in Protocol::ALL.into_iter().zip(buffers) {
            if !bytes.is_multiple_of(BUFFER_UNIT) || bytes > BUFFER_MAX {
                return Err(Error::usage(format!(
                    "{protocol} buffer of {bytes} bytes; accepted: 0, or a multiple of {BUFFER_UNIT} up to {BUFFER_MAX}"
                )));
            }
        }
        match buffers {
            [0, 0, 0] => Err(Error::usage("a ring without a buffer of any protocol")),
            _ => Ok(Geometry { buffers }),
        }
    }

    /// Bytes of a slot, `buffer / 8`; 0 if the ring has none for the protocol.
    #[inline]
    pub fn step_bytes(&self, protocol: Protocol) -> usize {
        self.buffers[protocol as usize] / STEPS as usize
    }

    /// Bytes from the start of the data to the protocol's slot 0.
    #[inline]
    pub fn area(&self, protocol: Protocol) -> usize {
        self.buffers.iter().take(protocol as usize).sum()
    }

    /// Bytes from the start of the data to the slot of `step`.
    #[inline]
    pub fn slot(&self, protocol: Protocol, step: u64) -> usize {
        self.area(protocol) + slot(step) * self.step_bytes(protocol)
    }

    /// Bytes of all slots.
    pub fn data_bytes(&self) -> usize {
        self.buffers.iter().sum()
    }
}

/// The slot of a step.
#[inline]
pub fn slot(step: u64) -> usize {
    (step % STEPS) as usize
}

/// The next multiple of `chunk`, a power of two: where an operation starts. Wraps with the counter.
#[inline]
pub fn round_up(step: u64, chunk: u64) -> u64 {
    step.wrapping_add(chunk - 1) & !(chunk - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_follow_each_other_without_overlap() {
        let g = Geometry::new([4096, 1024, 8192]).unwrap();
        let mut next = 0;
        for protocol in Protocol::ALL {
            for step in 0..STEPS {
                assert_eq!(g.slot(protocol, step), next, "{protocol} {step}");
                assert_eq!(g.slot(protocol, step.wrapping_sub(STEPS)), next);
                next += g.step_bytes(protocol);
            }
        }
        assert_eq!(next, g.data_bytes());
        assert_eq!(g.slot(Protocol::Ll128, 3) % 128, 0);
    }

    #[test]
    fn odd_buffers_are_refused() {
        for bad in [[0, 0, 0], [1, 0, 0], [1023, 0, 0], [1024, 8, 0], [0, 0, BUFFER_MAX + BUFFER_UNIT], [usize::MAX, 0, 0]] {
            assert!(Geometry::new(bad).is_err(), "{bad:?}");
        }
        assert!(Geometry::new([BUFFER_MAX, 0, 1024]).is_ok());
    }

    #[test]
    fn rounding_wraps_with_the_counter() {
        assert_eq!([0, 1, 3, 4, 5].map(|step| round_up(step, 4)), [0, 4, 4, 4, 8]);
        assert_eq!(round_up(u64::MAX, 8), 0);
        assert_eq!(round_up(u64::MAX - 7, 8), u64::MAX - 7);
        assert_eq!(round_up(77, 1), 77);
    }
}
