//! The RDMA vocabulary: requests, completions, states and keys as every provider understands them.
//! Plain data, used by those who post and poll; no thread of its own.

use std::fmt;

use crate::base::error::{Error, Result};
pub use crate::base::mem::UserMemory;

bitflags::bitflags! {
    /// What may be done to a memory region, beyond reading it locally. Values of `enum ibv_access_flags` (rdma-core v55 libibverbs/verbs.h).
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct Access: u32 {
        /// Receives and READ responses may land in it.
        const LOCAL_WRITE = 1;
        /// The peer may WRITE to it.
        const REMOTE_WRITE = 2;
        /// The peer may READ from it.
        const REMOTE_READ = 4;
        /// Its bytes may become visible in any order until a completion tells of them. Never for memory with flags in it. A wish, which
        /// some providers do not know.
        const RELAXED_ORDERING = 1 << 20;
    }
}

/// A piece of registered local memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sge {
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// Local key of the region it lies in.
    pub lkey: u32,
}

/// What a send request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opcode {
    /// Into the memory of the receive request at the head of the peer's queue.
    Send,
    /// As `Send`, with 32 bits for the receive completion.
    SendWithImm,
    /// Into the peer's memory at `remote_addr`; the peer is not told.
    Write,
    /// As `Write`; consumes a receive request, whose memory is ignored, and completes it with 32 bits.
    WriteWithImm,
    /// From the peer's memory at `remote_addr` into local memory.
    Read,
}

/// Where the bytes of a send request come from, or, for a READ, go to.
#[derive(Debug, Clone, Copy)]
pub enum Payload<'a> {
    /// Registered memory, left alone by the caller until the request completes. `len` 0 is legal and touches no memory.
    Sge(Sge),
    /// Copied while posting; at most the queue pair's `max_inline` bytes. Not for READ.
    Inline(&'a [u8]),
}

/// One send request.
#[derive(Debug, Clone, Copy)]
pub struct SendWr<'a> {
    /// The caller's name for it, returned in its completion.
    pub wr_id: u64,
    /// What to do.
    pub opcode: Opcode,
    /// Local bytes.
    pub payload: Payload<'a>,
    /// Peer's memory (WRITE, READ).
    pub remote_addr: u64,
    /// Peer's key (WRITE, READ).
    pub rkey: u32,
    /// Immediate data (…WithImm), in host order; big-endian on the wire.
    pub imm: u32,
    /// Whether success is reported. A failure always is.
    pub signaled: bool,
    /// Success may be reported before the peer has the bytes, once the caller's memory is not needed any more. A provider may ignore it.
    pub when_sent: bool,
}

/// One receive request; `sge.len` 0 for a queue that only takes immediates.
#[derive(Debug, Clone, Copy, Default)]
pub struct RecvWr {
    /// The caller's name for it, returned in its completion.
    pub wr_id: u64,
    /// Where a SEND lands.
    pub sge: Sge,
}

/// How a request ended. Named after `enum ibv_wc_status` (rdma-core v55 libibverbs/verbs.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WcStatus {
    /// Done.
    Success,
    /// A SEND was longer than its receive request.
    LocLenErr,
    /// A request that the queue pair cannot perform.
    LocQpOpErr,
    /// A local key, bounds or access violation.
    LocProtErr,
    /// Outstanding when the queue pair entered ERROR.
    WrFlushErr,
    /// The peer refused the remote key, bounds or access.
    RemAccessErr,
    /// The peer could not make sense of the request.
    RemInvReqErr,
    /// The peer failed while performing the request.
    RemOpErr,
    /// The peer is gone.
    RetryExcErr,
    /// The peer posted no receive request within the limit.
    RnrRetryExcErr,
    /// Anything else.
    GeneralErr,
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            WcStatus::Success => "success",
            WcStatus::LocLenErr => "local length error",
            WcStatus::LocQpOpErr => "local queue pair operation error",
            WcStatus::LocProtErr => "local protection error",
            WcStatus::WrFlushErr => "flushed in error",
            WcStatus::RemAccessErr => "remote access error",
            WcStatus::RemInvReqErr => "remote invalid request",
            WcStatus::RemOpErr => "remote operation error",
            WcStatus::RetryExcErr => "transport retries exceeded (peer gone)",
            WcStatus::RnrRetryExcErr => "receiver-not-ready retries exceeded",
            WcStatus::GeneralErr => "general error",
        })
    }
}

/// What a completion completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WcOpcode {
    /// A SEND.
    Send,
    /// A WRITE, with or without immediate.
    Write,
    /// A READ.
    Read,
    /// A receive request, by a SEND.
    Recv,
    /// A receive request, by a WRITE_WITH_IMM.
    RecvRdmaWithImm,
}

/// One entry of a completion queue. With a status other than success only `wr_id`, `status`, `opcode` and `qp_num` mean anything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Name of the request.
    pub wr_id: u64,
    /// How it ended.
    pub status: WcStatus,
    /// What it was.
    pub opcode: WcOpcode,
    /// Bytes received or read.
    pub byte_len: u32,
    /// Immediate data, in host order.
    pub imm: Option<u32>,
    /// Which of the queue's pairs.
    pub qp_num: u32,
}

/// States of a queue pair. `connect` takes INIT to RTS; the steps between are the provider's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QpState {
    /// Receives may be posted, nothing moves.
    Init,
    /// Sends may be posted; they wait for the peer like on a NIC.
    Rts,
    /// Everything outstanding was or will be flushed.
    Error,
}

/// What every provider asks of a [`reset`](super::QueuePair::reset).
pub(super) fn check_reset(state: QpState, drained: bool, from: u32, to: u32) -> Result<()> {
    if state != QpState::Error || !drained {
        let what = if state == QpState::Error { "not drained" } else { "not in ERROR" };
        return Err(Error::internal(format!("reset of a queue pair that is {what}")));
    }
    if to <= from {
        return Err(Error::internal(format!("reset to generation {to} of a queue pair of generation {from}: it must be later")));
    }
    Ok(())
}

/// Why requests were not taken. Nothing was posted, unless the queue pair is in ERROR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// The queue is full; poll and try again.
    #[error("queue full")]
    Full,
    /// The queue pair is in the wrong state.
    #[error("queue pair is in state {0:?}")]
    State(QpState),
    /// A request that could never be performed.
    #[error("invalid request: {0}")]
    Invalid(&'static str),
}

/// Names a queue pair within its completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpId(pub(crate) u32);

/// Sizes and limits of a queue pair.
#[derive(Debug, Clone, Copy)]
pub struct QpCaps {
    /// Send requests outstanding, 1..=4096.
    pub send_depth: u32,
    /// Receive requests outstanding, 1..=4096.
    pub recv_depth: u32,
    /// How often a request that finds no receive is retried, 0..=7; 7 means for ever (InfiniBand specification 1.4, 9.7.5.2.8).
    pub rnr_retry: u8,
    /// Microseconds between such retries. 640 is IB's timer code 12, NCCL's choice.
    pub min_rnr_timer_us: u32,
    /// Traffic class of what it sends (IPv4 TOS, IPv6 traffic class); `None` for the system's.
    pub traffic_class: Option<u8>,
}

impl Default for QpCaps {
    fn default() -> Self {
        QpCaps { send_depth: 512, recv_depth: 256, rnr_retry: 7, min_rnr_timer_us: 640, traffic_class: None }
    }
}

/// What a device can do, and what suits it. Constant: its users read it once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Requests that are posted before the peer has connected wait for that. A NIC sends them in vain, retries after its timeout, and fails
    /// after some retries.
    pub keeps_early_requests: bool,
    /// Bytes of the peer's plain WRITEs are counted as received. A NIC does not report them.
    pub counts_plain_writes: bool,
    /// A message is to be striped over all queue pairs between two devices, rather than to take one of them.
    pub splits_data: bool,
    /// Longest data that goes with its immediate; for more bytes, a WRITE and an empty WRITE_WITH_IMM after it are better, as only a WRITE is routed
    /// adaptively (NCCL_IB_AR_THRESHOLD). `u32::MAX` where nothing is.
    pub ar_threshold: u32,
    /// Making a region is so expensive that users of the same range had better share one: a NIC pins each page, and the region takes up room on
    /// it. Elsewhere each user has its own, whose keys die with it.
    pub shares_regions: bool,
    /// Descriptors of the process that a connected queue pair takes at least.
    pub descriptors_per_qp: u32,
}

/// Bytes of an opaque endpoint.
pub const ENDPOINT_SIZE: usize = 128;

/// Where a queue pair can be reached: opaque to everybody but the provider that made it, exchanged out of band.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Endpoint(pub [u8; ENDPOINT_SIZE]);

impl fmt::Debug for Endpoint {
    // It carries a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Endpoint(..)")
    }
}

/// A rail or plane that is not known (NCCL 2.29 `NCCL_NET_ID_UNDEF`).
pub const ID_UNDEF: i16 = -1;

/// A device as the layers above see it.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    /// Unique, and stable over restarts: the key in NCCL's topology.
    pub name: String,
    /// Provider's name, to refuse a peer on another fabric by name.
    pub fabric: &'static str,
    /// Real sysfs path of the PCI device, if it is one.
    pub pci_path: Option<String>,
    /// Unique per NIC, shared by its ports.
    pub guid: u64,
    /// Port number on the NIC, from 1.
    pub port: u16,
    /// Mbit/s; 10000 where the system does not know.
    pub speed_mbps: u32,
    /// Microseconds.
    pub latency_us: f32,
    /// Bytes.
    pub mtu: u32,
    /// Queue pairs at most; 0 for no limit of its own.
    pub max_qp: u32,
    /// Rail of the network that it is on, or [`ID_UNDEF`].
    pub rail_id: i16,
    /// Plane of the network, or [`ID_UNDEF`].
    pub plane_id: i16,
    /// Whether a GPU's memory can be registered by its address.
    pub peer_memory: bool,
    /// Whether memory can be registered by a DMA-BUF.
    pub dma_buf: bool,
    /// Address that a peer dials for the connection handshake.
    pub addr: std::net::SocketAddr,
}
