//! How a producer marks a slot as filled. Chosen per operation; used by the ring, the proxy and the programs at both ends.
//!
//! NCCL's own: nccl v2.7.8 src/include/devcomm.h (NCCL_PROTO_*, ncclLLFifoLine, NCCL_LL128_*).

use std::fmt;

/// How a producer marks a slot as filled. Numbers: NCCL_PROTO_LL, NCCL_PROTO_LL128, NCCL_PROTO_SIMPLE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Protocol {
    /// By a flag in every 8-byte word: 4 bytes of data, 4 of flag, stored at once. Needs no order between stores.
    Ll = 0,
    /// By `tail`, and by a flag at the end of every 128-byte line: 120 bytes of data, 8 of flag.
    Ll128 = 1,
    /// By publishing `tail` after the data.
    Simple = 2,
}

impl Protocol {
    /// Number of protocols.
    pub const COUNT: usize = 3;
    /// In the order of their numbers.
    pub const ALL: [Protocol; Protocol::COUNT] = [Protocol::Ll, Protocol::Ll128, Protocol::Simple];

    /// The protocol of a number.
    pub fn of_number(number: u32) -> Option<Protocol> {
        Protocol::ALL.get(number as usize).copied()
    }

    /// Bytes on the wire are a multiple of this: whole lines.
    pub const fn line(self) -> usize {
        match self {
            Protocol::Simple => 1,
            Protocol::Ll => 16,
            Protocol::Ll128 => 128,
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Protocol::Simple => "SIMPLE",
            Protocol::Ll => "LL",
            Protocol::Ll128 => "LL128",
        })
    }
}
