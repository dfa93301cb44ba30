//! The 64 bits that a work request carries into its completion: what it was for, on which queue pair, for which request and stripe.
//! Made and read by the thread that drives the link.

use super::limits::MAX_QPS;

/// Names an outstanding request of a link: generation << 8 | index. Never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestId(pub u32);

/// What a work request was for. It and the rest of a [`WrId`] come back in the completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WrKind {
    /// A stripe of a message and the record before it; `id` is the send request.
    Data,
    /// A clear-to-send; `id` is the receive request.
    Cts,
    /// A pre-posted receive.
    Recv,
    /// The READ of a flush; `id` is the flush request.
    Flush,
    /// A control message or a credit of a [`Duplex`](super::duplex::Duplex); `id` is no request's.
    Control,
    /// A WRITE of nothing, to find out what the peer has taken; `id` is its number.
    Probe,
    /// What is said of a rail, or a WRITE of nothing that probes one.
    Rail,
}

impl WrKind {
    /// In words.
    pub fn what(self) -> &'static str {
        match self {
            WrKind::Data => "the WRITE of a message",
            WrKind::Cts => "the WRITE of a clear-to-send",
            WrKind::Recv => "a receive",
            WrKind::Flush => "the READ of a flush",
            WrKind::Control => "the WRITE of a control message",
            WrKind::Probe => "the WRITE of nothing that probes the peer",
            WrKind::Rail => "a WRITE about a rail",
        }
    }
}

/// A stripe, or a queue pair.
const SIX_BITS: u8 = MAX_QPS as u8 - 1;
const _: () = assert!(MAX_QPS == 64);

/// A decoded work request id: `kind:4 | stripe:6 | qp:6 | retires:16 | id:32`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WrId {
    /// What for.
    pub kind: WrKind,
    /// Of a message: which stripe.
    pub stripe: u8,
    /// On which queue pair.
    pub qp: u8,
    /// Send queue entries that its completion frees: its own and those of the unsignaled ones before it.
    pub retires: u16,
    /// Which request.
    pub id: RequestId,
}

impl WrId {
    /// The 64 bits.
    #[inline]
    pub fn encode(self) -> u64 {
        let kind = match self.kind {
            WrKind::Data => 1u64,
            WrKind::Cts => 2,
            WrKind::Recv => 3,
            WrKind::Flush => 4,
            WrKind::Control => 5,
            WrKind::Probe => 6,
            WrKind::Rail => 7,
        };
        let (stripe, qp) = (u64::from(self.stripe & SIX_BITS), u64::from(self.qp & SIX_BITS));
        kind << 60 | stripe << 54 | qp << 48 | u64::from(self.retires) << 32 | u64::from(self.id.0)
    }

    /// `None` for what [`WrId::encode`] never made.
    #[inline]
    pub fn decode(wr_id: u64) -> Option<WrId> {
        let kind = match wr_id >> 60 {
            1 => WrKind::Data,
            2 => WrKind::Cts,
            3 => WrKind::Recv,
            4 => WrKind::Flush,
            5 => WrKind::Control,
            6 => WrKind::Probe,
            7 => WrKind::Rail,
            _ => return None,
        };
        let (stripe, qp) = ((wr_id >> 54) as u8 & SIX_BITS, (wr_id >> 48) as u8 & SIX_BITS);
        Some(WrId { kind, stripe, qp, retires: (wr_id >> 32) as u16, id: RequestId(wr_id as u32) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_request_ids_round_trip() {
        for kind in [WrKind::Data, WrKind::Cts, WrKind::Recv, WrKind::Flush, WrKind::Control, WrKind::Probe, WrKind::Rail] {
            let wr = WrId { kind, stripe: 63, qp: 62, retires: 0xabcd, id: RequestId(0xffff_ffff) };
            assert_eq!(WrId::decode(wr.encode()), Some(wr));
        }
        assert_eq!(WrId::decode(0), None);
        assert_eq!(WrId::decode(8 << 60), None);
    }
}
