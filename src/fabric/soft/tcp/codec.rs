//! The format of the TCP wire: frames on the control stream, segments on the data streams. Pure functions, used by the receiving and the
//! sending half.
//!
//! A frame is a header of [`HEADER_SIZE`] bytes and `len` bytes of payload. All integers are little-endian but the immediate, which is
//! big-endian as on InfiniBand.
//!
//! ```text
//!  0 kind u8 | 1 flags u8 | 2 zero u16 | 4 len u32 | 8 addr u64 | 16 total u32 | 20 rkey u32 | 24 imm u32 | 28 arg u32
//! ```
//!
//! A request longer than [`CHUNK`] is one `Send` or `Write` and `Part`s, so that acks and READ responses of the same direction need not wait
//! for its end. A `STREAMED` request has no payload here: its bytes come in segments on the data streams, each after a header of its own:
//! index u64 (how many requests came before), offset u32, len u32.

use crate::fabric::types::WcStatus;

use super::super::work_queues::MAX_LEN;

/// Bytes of a frame's header.
pub const HEADER_SIZE: usize = 32;
/// Payload of one frame at most. Longer frames need fewer system calls (below 512 KiB that is measurable), but acks wait for a frame's end.
pub const CHUNK: u32 = 1 << 20;
/// READs that a requester may have unanswered: InfiniBand's usual responder resources.
pub const MAX_READS: usize = 16;
/// Bytes of a segment's header.
pub const SEGMENT_HEADER_SIZE: usize = 16;
/// Shortest and longest segment, powers of two.
pub const SEGMENT_MIN: u32 = 1 << 16;
/// See [`SEGMENT_MIN`].
pub const SEGMENT_MAX: u32 = 1 << 19;
/// Requests from this size on use the data streams, if there are any.
pub const STREAM_MIN: u32 = 1 << 17;

/// The request carries an immediate.
pub const FLAG_IMM: u8 = 1;
/// The request's bytes come on the data streams.
pub const FLAG_STREAMED: u8 = 2;
/// The requester wants the ack at once; without this flag the ack may wait until something else is sent (InfiniBand's AckReq bit).
pub const FLAG_ACK_REQ: u8 = 4;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// `addr` requests are acked so far, `arg` receives were posted so far (modulo 2^32).
    Ack = 1,
    /// The request after those acked was refused with status `arg`. Nothing follows.
    Nak = 2,
    /// The sender's next request waits for a receive request.
    Wait = 3,
    /// A SEND of `total` bytes.
    Send = 4,
    /// A WRITE of `total` bytes to `addr` under `rkey`.
    Write = 5,
    /// A READ of `total` bytes from `addr` under `rkey`.
    Read = 6,
    /// More bytes of the SEND or WRITE before it.
    Part = 7,
    /// Bytes of the oldest READ of `total` bytes.
    Response = 8,
}

/// A frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What it is.
    pub kind: Kind,
    /// `FLAG_*`.
    pub flags: u8,
    /// Bytes of payload after the header.
    pub len: u32,
    /// Address, or a count.
    pub addr: u64,
    /// Bytes of the whole request.
    pub total: u32,
    /// Key.
    pub rkey: u32,
    /// Immediate, in host order.
    pub imm: u32,
    /// Depends on the kind; of a streamed request, the length of its segments.
    pub arg: u32,
}

impl Header {
    /// A header with nothing but a kind.
    pub fn new(kind: Kind) -> Self {
        Header { kind, flags: 0, len: 0, addr: 0, total: 0, rkey: 0, imm: 0, arg: 0 }
    }

    /// As bytes.
    #[inline]
    pub fn encode(&self) -> [u8; HEADER_SIZE] {
        let mut out = [0; HEADER_SIZE];
        out[0] = self.kind as u8;
        out[1] = self.flags;
        out[4..8].copy_from_slice(&self.len.to_le_bytes());
        out[8..16].copy_from_slice(&self.addr.to_le_bytes());
        out[16..20].copy_from_slice(&self.total.to_le_bytes());
        out[20..24].copy_from_slice(&self.rkey.to_le_bytes());
        out[24..28].copy_from_slice(&self.imm.to_be_bytes());
        out[28..32].copy_from_slice(&self.arg.to_le_bytes());
        out
    }

    /// From bytes, with every check that needs no knowledge of what came before.
    ///
    /// Errors: what is wrong, to follow "the peer sent".
    #[inline]
    pub fn decode(bytes: &[u8; HEADER_SIZE]) -> Result<Header, &'static str> {
        let [kind, flags, zero0, zero1, l0, l1, l2, l3, rest @ ..] = *bytes;
        let [a0, a1, a2, a3, a4, a5, a6, a7, rest @ ..] = rest;
        let [t0, t1, t2, t3, k0, k1, k2, k3, i0, i1, i2, i3, g0, g1, g2, g3] = rest;
        let kind = match kind {
            1 => Kind::Ack,
            2 => Kind::Nak,
            3 => Kind::Wait,
            4 => Kind::Send,
            5 => Kind::Write,
            6 => Kind::Read,
            7 => Kind::Part,
            8 => Kind::Response,
            _ => return Err("a frame of no known kind"),
        };
        let header = Header {
            kind,
            flags,
            len: u32::from_le_bytes([l0, l1, l2, l3]),
            addr: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            total: u32::from_le_bytes([t0, t1, t2, t3]),
            rkey: u32::from_le_bytes([k0, k1, k2, k3]),
            imm: u32::from_be_bytes([i0, i1, i2, i3]),
            arg: u32::from_le_bytes([g0, g1, g2, g3]),
        };
        if zero0 | zero1 != 0 {
            return Err("a frame with reserved bits set");
        }
        let allowed = if matches!(kind, Kind::Send | Kind::Write) { FLAG_IMM | FLAG_STREAMED | FLAG_ACK_REQ } else { 0 };
        if flags & !allowed != 0 {
            return Err("a frame with flags that its kind does not have");
        }
        if header.total > MAX_LEN {
            return Err("a request longer than 2^30 bytes");
        }
        let fits = match kind {
            Kind::Ack | Kind::Nak | Kind::Wait | Kind::Read => header.len == 0,
            Kind::Send | Kind::Write if flags & FLAG_STREAMED != 0 => {
                header.len == 0 && header.total > 0 && header.arg.is_power_of_two() && (SEGMENT_MIN..=SEGMENT_MAX).contains(&header.arg)
            }
            Kind::Send | Kind::Write => header.len == header.total.min(CHUNK),
            Kind::Part => header.len > 0 && header.len <= CHUNK,
            Kind::Response => header.len <= CHUNK && header.len <= header.total,
        };
        if fits { Ok(header) } else { Err("a frame with an impossible length") }
    }
}

/// A segment's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHeader {
    /// How many requests came before its own.
    pub index: u64,
    /// Where in the request its bytes belong.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

impl SegmentHeader {
    /// As bytes.
    pub fn encode(&self) -> [u8; SEGMENT_HEADER_SIZE] {
        let mut out = [0; SEGMENT_HEADER_SIZE];
        out[0..8].copy_from_slice(&self.index.to_le_bytes());
        out[8..12].copy_from_slice(&self.offset.to_le_bytes());
        out[12..16].copy_from_slice(&self.len.to_le_bytes());
        out
    }

    /// From bytes; nothing is checked.
    pub fn decode(bytes: &[u8; SEGMENT_HEADER_SIZE]) -> SegmentHeader {
        let [i0, i1, i2, i3, i4, i5, i6, i7, o0, o1, o2, o3, l0, l1, l2, l3] = *bytes;
        SegmentHeader {
            index: u64::from_le_bytes([i0, i1, i2, i3, i4, i5, i6, i7]),
            offset: u32::from_le_bytes([o0, o1, o2, o3]),
            len: u32::from_le_bytes([l0, l1, l2, l3]),
        }
    }
}

/// The statuses that a NAK may carry, by their numbers in `enum ibv_wc_status` (rdma-core v55 libibverbs/verbs.h).
const STATUSES: [(u32, WcStatus); 6] = [
    (5, WcStatus::WrFlushErr),
    (9, WcStatus::RemInvReqErr),
    (10, WcStatus::RemAccessErr),
    (11, WcStatus::RemOpErr),
    (13, WcStatus::RnrRetryExcErr),
    (21, WcStatus::GeneralErr),
];

/// The number of a status in a NAK.
pub fn status_number(status: WcStatus) -> u32 {
    STATUSES.iter().find(|(_, s)| *s == status).map_or(21, |(number, _)| *number)
}

/// The status that a NAK's number means; unknown ones are `GeneralErr`.
pub fn status_of(number: u32) -> WcStatus {
    STATUSES.iter().find(|(n, _)| *n == number).map_or(WcStatus::GeneralErr, |(_, status)| *status)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_header_survives_the_wire() {
        let header = Header {
            flags: FLAG_IMM,
            len: 5,
            addr: 0x1122_3344_5566_7788,
            total: 5,
            rkey: 0x99aa_bbcc,
            imm: 0x0102_0304,
            arg: 7,
            ..Header::new(Kind::Write)
        };
        let bytes = header.encode();
        assert_eq!(Header::decode(&bytes), Ok(header));
        assert_eq!(bytes[24..28], [1, 2, 3, 4], "the immediate is big-endian");
    }

    #[test]
    fn impossible_headers_are_refused() {
        let write = Header { len: 8, total: 8, ..Header::new(Kind::Write) };
        let streamed = Header { flags: FLAG_STREAMED, total: STREAM_MIN, arg: SEGMENT_MIN, ..Header::new(Kind::Send) };
        assert!(Header::decode(&write.encode()).is_ok() && Header::decode(&streamed.encode()).is_ok());
        for bad in [
            Header { len: 7, ..write },
            Header { len: 9, ..write },
            Header { total: MAX_LEN + 1, len: CHUNK, ..write },
            Header { flags: 8, ..write },
            Header { flags: FLAG_IMM, len: 0, total: 0, kind: Kind::Read, ..write },
            Header { kind: Kind::Ack, ..write },
            Header { kind: Kind::Part, len: 0, ..write },
            Header { kind: Kind::Part, len: CHUNK + 1, ..write },
            Header { kind: Kind::Response, len: 9, ..write },
            Header { len: 1, ..streamed },
            Header { total: 0, ..streamed },
            Header { arg: SEGMENT_MIN + 1, ..streamed },
            Header { arg: SEGMENT_MIN / 2, ..streamed },
            Header { arg: SEGMENT_MAX * 2, ..streamed },
        ] {
            assert!(Header::decode(&bad.encode()).is_err(), "{bad:?}");
        }
        for (at, value) in [(0, 0), (0, 9), (2, 1), (3, 1)] {
            let mut bytes = write.encode();
            bytes[at] = value;
            assert!(Header::decode(&bytes).is_err(), "byte {at} = {value}");
        }
    }

    #[test]
    fn every_status_of_a_nak_has_its_number() {
        for (number, status) in STATUSES {
            assert_eq!((status_number(status), status_of(number)), (number, status));
        }
        assert_eq!(status_of(0), WcStatus::GeneralErr);
        assert_eq!(status_of(status_number(WcStatus::LocProtErr)), WcStatus::GeneralErr);
    }

    proptest! {
        #[test]
        fn what_decodes_encodes_back(bytes: [u8; HEADER_SIZE]) {
            let mut bytes = bytes;
            bytes[0] %= 10;
            if let Ok(header) = Header::decode(&bytes) {
                prop_assert_eq!(header.encode(), bytes);
            }
        }

        #[test]
        fn a_segment_header_survives_the_wire(index: u64, offset: u32, len: u32) {
            let header = SegmentHeader { index, offset, len };
            prop_assert_eq!(SegmentHeader::decode(&header.encode()), header);
        }
    }
}
