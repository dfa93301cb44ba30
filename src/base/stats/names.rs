//! Names of the page's counters and causes: in snake case for programs, in words for people. Used to show a page.

use super::{CommCounter, CommKind, MeshOp, RailCounter, WaitCause};

impl RailCounter {
    /// In snake case.
    pub fn name(self) -> &'static str {
        match self {
            RailCounter::TxInline => "tx_inline_bytes",
            RailCounter::TxMapped => "tx_mapped_bytes",
            RailCounter::TxCma => "tx_cma_bytes",
            RailCounter::TxBounce => "tx_bounce_bytes",
            RailCounter::TxTcp => "tx_tcp_bytes",
            RailCounter::RxInline => "rx_inline_bytes",
            RailCounter::RxMapped => "rx_mapped_bytes",
            RailCounter::RxCma => "rx_cma_bytes",
            RailCounter::RxBounce => "rx_bounce_bytes",
            RailCounter::RxTcp => "rx_tcp_bytes",
            RailCounter::Requests => "requests",
            RailCounter::RnrWaits => "rnr_waits",
            RailCounter::Errors => "errors",
            RailCounter::CmaRefused => "cma_refused",
            RailCounter::Syscalls => "syscalls",
            RailCounter::Reconnects => "reconnects",
            RailCounter::TxGranted => "tx_granted_bytes",
            RailCounter::TxNic => "tx_nic_bytes",
            RailCounter::RxNic => "rx_nic_bytes",
            RailCounter::NicEvents => "nic_events",
            RailCounter::Failures => "failures",
        }
    }
}

impl CommCounter {
    /// In snake case.
    pub fn name(self) -> &'static str {
        match self {
            CommCounter::Ops => "ops",
            CommCounter::Completions => "completions",
            CommCounter::Bytes => "bytes",
            CommCounter::NullPosts => "null_posts",
            CommCounter::Errors => "errors",
            CommCounter::Stalls => "stalls",
            CommCounter::Copied => "copied_bytes",
        }
    }
}

impl WaitCause {
    /// In snake case.
    pub fn name(self) -> &'static str {
        match self {
            WaitCause::None => "none",
            WaitCause::PeerNoReceive => "peer_no_receive",
            WaitCause::PeerNoSend => "peer_no_send",
            WaitCause::Fabric => "fabric",
            WaitCause::Handshake => "handshake",
            WaitCause::PeerStopped => "peer_stopped",
            WaitCause::PeerGone => "peer_gone",
        }
    }

    /// In words, as in "cause: ..." of a log line.
    pub fn words(self) -> &'static str {
        match self {
            WaitCause::None => "nothing",
            WaitCause::PeerNoReceive => "the peer has not posted a receive",
            WaitCause::PeerNoSend => "the peer has not sent",
            WaitCause::Fabric => "the fabric has not completed",
            WaitCause::Handshake => "the connection is being made",
            WaitCause::PeerStopped => "the peer's process is stopped",
            WaitCause::PeerGone => "the peer is gone",
        }
    }
}

impl MeshOp {
    /// In snake case, as C's functions are called.
    pub fn name(self) -> &'static str {
        match self {
            MeshOp::None => "none",
            MeshOp::Gather => "gather",
            MeshOp::Allgather => "allgather",
            MeshOp::Reduce => "reduce",
            MeshOp::Allreduce => "allreduce",
            MeshOp::Scatter => "scatter",
            MeshOp::Broadcast => "broadcast",
            MeshOp::Barrier => "barrier",
            MeshOp::Alltoall => "alltoall",
            MeshOp::ReduceScatter => "reduce_scatter",
            MeshOp::Send => "send",
            MeshOp::Recv => "recv",
            MeshOp::RecvAny => "recv_any",
            MeshOp::Buffer => "buffer",
        }
    }
}

impl CommKind {
    /// Which end it is.
    pub fn name(self) -> &'static str {
        match self {
            CommKind::Listen => "listen",
            CommKind::Send => "send",
            CommKind::Recv => "recv",
            CommKind::Pair => "pair",
        }
    }
}
