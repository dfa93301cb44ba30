//! The limits that both ends of a link build in, and the sizes of what they write into each other's memory. Whoever changes one of them changes the
//! wire version.

/// Rails of a link: `NCCL_NET_MAX_DEVS_PER_NIC` (8 in v12; nccl 2.30 src/include/plugin/nccl_net.h).
pub const MAX_RAILS: usize = 8;
/// Queue pairs of a link on one rail.
pub const MAX_QPS_PER_RAIL: usize = 8;
/// Queue pairs of a link: a bit each in a stripe bitmap.
pub const MAX_QPS: usize = MAX_RAILS * MAX_QPS_PER_RAIL;
const _: () = assert!(MAX_QPS <= 64);

/// Requests of a comm: NCCL has at most 32 groups of 8 outstanding (`NCCL_NET_MAX_REQUESTS` * maxRecvs).
pub const MAX_REQUESTS: usize = 256;
const _: () = assert!(MAX_REQUESTS == 256, "an index is the low byte of a RequestId");
/// Receives of a group: `NCCL_NET_IB_MAX_RECVS`, nccl src/transport/net_ib/common.h.
pub const MAX_RECVS: usize = 8;

/// Longest message: maxP2pBytes. 1 GiB is what NCCL's shims for old plugins cut to (`MAX_NET_SIZE`).
pub const MAX_MESSAGE: usize = 1 << 30;
const _: () = assert!(MAX_MESSAGE <= u32::MAX as usize);

/// Incoming slots of a link: as many as receives can be outstanding.
pub const SLOTS: usize = MAX_REQUESTS;
const _: () = assert!(SLOTS == 256, "a slot is a byte of an immediate");
/// Bytes of a slot of the CTS FIFO: a cache line. The longest inline WRITE that a device has to take.
pub const SLOT_SIZE: usize = 64;
/// Bytes of a completion record `{u64 size, u32 stripes, u32 epoch}`.
pub const RECORD_SIZE: usize = 16;
/// Bytes of a control message of a [`Duplex`](super::duplex::Duplex).
pub const CONTROL_SIZE: usize = SLOT_SIZE;
/// Control messages on their way at most: places of the ring that they are written into.
pub const CONTROLS: usize = 64;
/// Sizes below it fit an immediate.
pub const IMM_LIMIT: usize = 1 << 23;
