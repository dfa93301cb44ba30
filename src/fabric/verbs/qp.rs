//! A queue pair of a NIC. Driven by the thread that drives its completion queue, which owns it.
//!
//! A work request's id on the device consists of the queue pair's slot in its completion queue, a generation, and the request's running number.
//! A ring holds the caller's id, and what a failed completion does not tell (the opcode). `completion` turns the device's completions into ours.

mod completion;

use std::cell::Cell;
use std::ptr;
use std::sync::Arc;

use ibverbs_sys::*;

use super::Shared;
use super::endpoint::{Address, Ece};
use super::events::AsyncStatus;
use super::raw_qp::{MAX_READS, RawQp};
use super::ring::{NUMBER, Ring};
use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_info};
use crate::base::mem::UserMemory;
use crate::base::rand;
use crate::base::stats::{RailCounter, RailStats};
use crate::fabric::types::*;

/// Bytes that a request may carry inline: a CTS slot of `net`, exactly. On a device that takes fewer they are copied to registered memory.
pub const MAX_INLINE: usize = 64;
/// Depth of either queue at most, as the contract has it.
const MAX_DEPTH: u32 = 4096;
/// Longest request: InfiniBand allows 2^31 (specification 1.4, 9.3.3.1.5), NCCL's largest message is half of that.
const MAX_LEN: u32 = 1 << 30;
/// Requests posted to the device at once.
const CHAIN: usize = 8;
/// In an id on the device: the request is a receive.
const RECEIVE: u64 = 1 << 31;

/// What the ring holds of a send request.
#[derive(Clone, Copy)]
struct Sent {
    wr_id: u64,
    len: u32,
    opcode: Opcode,
    /// Whether success is reported to the caller.
    signaled: bool,
}

/// A work request of a chain that is posted to the device at once.
struct ChainedWr {
    wr: ibv_send_wr,
    sge: ibv_sge,
}

/// Registered memory for inline payload, if the device takes none inline: a slot per send request.
struct Bounce {
    bytes: Box<[[u8; MAX_INLINE]]>,
    region: super::MemoryRegion,
}

/// A queue pair.
pub struct QueuePair {
    /// Dropped before the memory that the device uses for it: `bounce`, `chain`.
    device: RawQp,
    /// `device`'s pointer, for the device's functions.
    raw: *mut ibv_qp,
    /// Where it completes.
    cq: *mut ibv_cq,
    post_send: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> i32,
    post_recv: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> i32,
    state: QpState,
    async_status: Arc<AsyncStatus>,
    /// Asynchronous events that were counted.
    events: u32,
    /// High half of the ids on the device.
    name: u64,
    sends: Ring<Sent>,
    recvs: Ring<u64>,
    /// Requests posted to the device since the last signaled one.
    unsignaled: u32,
    chain: Box<[ChainedWr; CHAIN]>,
    bounce: Option<Bounce>,
    stats: RailStats,
    caps: QpCaps,
    /// How often it was reset, or more: the peer's must be the same.
    generation: u32,
    /// In ERROR: the number of the request that was posted to learn when all before it are flushed.
    last: Option<u64>,
    local: Address,
    /// Whether the endpoint was asked for: then the ECE options that it names cannot change any more.
    endpoint_sent: Cell<bool>,
    remote: Option<Address>,
    error: Option<String>,
    /// Whether this side has failed it because requests were overdue: the device will report these only as flushed.
    expired: bool,
    /// `sends.done()` at the last check, and since when it is that; 0 while no signaled request is outstanding.
    progress_seen: (u64, u64),
    /// Whether the last check found requests overdue.
    overdue: bool,
    query_at: u64,
    shared: Arc<Shared>,
}

// SAFETY: the raw pointers are the device's queue pair, which any thread may use, one at a time, and the chain's links to itself.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// A queue pair in INIT that completes into `cq`. `name` is the high half of its requests' ids.
    pub(super) fn new(shared: Arc<Shared>, cq: *mut ibv_cq, name: u32, caps: &QpCaps, stats: RailStats) -> Result<QueuePair> {
        for (name, depth) in [("send_depth", caps.send_depth), ("recv_depth", caps.recv_depth)] {
            if !(1..=MAX_DEPTH).contains(&depth) {
                return Err(Error::usage(format!("{name} {depth}: must be in 1..={MAX_DEPTH}")));
            }
        }
        if caps.rnr_retry > 7 {
            return Err(Error::usage(format!("rnr_retry {}: must be in 0..=7", caps.rnr_retry)));
        }
        let context = &shared.port.context;
        // SAFETY: the context is open; its table of operations was filled when it was.
        let (post_send, post_recv) = unsafe { ((*context.raw).ops.post_send, (*context.raw).ops.post_recv) };
        let (Some(post_send), Some(post_recv)) = (post_send, post_recv) else {
            return Err(Error::internal(format!("{}: its driver has no post_send or post_recv", context.name)));
        };
        let wanted = if shared.port.config.ib_use_inline { MAX_INLINE as u32 } else { 0 };
        let (device, inline) = RawQp::create(shared.clone(), cq, caps, wanted)?;
        let raw = device.raw();
        let local = Address {
            qpn: device.number(),
            psn: (rand::u64().unwrap_or_else(|_| clock::now()) & 0xff_ffff) as u32,
            lid: shared.port.lid,
            gid: shared.port.gid,
            mtu: shared.port.mtu as u8,
            link_layer: shared.port.link_layer,
            reads: context.reads_answered.clamp(0, MAX_READS) as u8,
            ece: Ece::None,
        };
        let async_status = shared.watch_qp(raw, cq);
        let empty = Sent { wr_id: 0, len: 0, opcode: Opcode::Send, signaled: false };
        let empty_wr = |_| ChainedWr { wr: ibv_send_wr::default(), sge: ibv_sge::default() };
        // From here on dropping it destroys the queue pair.
        let mut qp = QueuePair {
            device,
            raw,
            cq,
            post_send,
            post_recv,
            state: QpState::Init,
            async_status,
            events: 0,
            name: u64::from(name) << 32,
            sends: Ring::new(caps.send_depth, empty),
            recvs: Ring::new(caps.recv_depth, 0),
            unsignaled: 0,
            chain: Box::new(std::array::from_fn(empty_wr)),
            bounce: None,
            stats,
            caps: *caps,
            generation: 0,
            last: None,
            local,
            endpoint_sent: Cell::new(false),
            remote: None,
            error: None,
            expired: false,
            progress_seen: (0, 0),
            overdue: false,
            query_at: 0,
            shared,
        };
        if inline < MAX_INLINE {
            let mut bytes = vec![[0; MAX_INLINE]; qp.sends.slot_count()].into_boxed_slice();
            // SAFETY: the box's memory stays where it is until the region, which is dropped with it, after the queue pair is destroyed.
            let memory = unsafe { UserMemory::new(bytes.as_mut_ptr().cast(), size_of_val(&*bytes)) };
            let region = qp.shared.register(memory, Access::LOCAL_WRITE)?;
            qp.bounce = Some(Bounce { bytes, region });
        }
        qp.device.init().map_err(|e| e.into_error(&qp.path()))?;
        if qp.shared.port.config.ib_ece {
            // A driver without ECE options has none to offer.
            let some = qp.device.ece().filter(|ece| ece.options != 0);
            qp.local.ece = some.map_or(Ece::None, Ece::Offered);
        }
        Ok(qp)
    }

    /// Where this queue pair can be reached.
    pub fn endpoint(&self) -> Endpoint {
        self.endpoint_sent.set(true);
        self.local.encode()
    }

    /// Takes the queue pair through RTR to RTS.
    pub fn connect(&mut self, remote: &Endpoint) -> Result<()> {
        if self.state() != QpState::Init {
            return Err(Error::internal(format!("a queue pair in state {:?} cannot be connected", self.state())));
        }
        let remote = Address::decode(remote)?;
        let port = &self.shared.port;
        if remote.link_layer != port.link_layer {
            let kind = |layer| if u32::from(layer) == IBV_LINK_LAYER_ETHERNET { "Ethernet (RoCE)" } else { "InfiniBand" };
            let (ours, theirs) = (kind(port.link_layer), kind(remote.link_layer));
            return Err(Error::usage(format!("{}: its link is {ours}, the peer's is {theirs}: no path between them", port.label)));
        }
        self.remote = Some(remote);
        let agreed = self.agree_ece(&remote)?;
        // What it reads at once is bounded by what the peer answers.
        let [from, to] = [&self.local, &remote].map(|end| end.of_generation(self.generation));
        self.device.connect(&from, &to, &self.caps).map_err(|e| e.into_error(&self.path()))?;
        if agreed {
            self.local.ece = self.device.ece().map_or(Ece::None, Ece::Agreed);
        }
        self.state = QpState::Rts;
        Ok(())
    }

    /// Enhanced connection establishment (ECE), as rdma-core's manual describes it: the side that connects first takes from the peer's offer the
    /// options that it can use, and names them in its endpoint; the peer then uses these, as both do again after a reset. Whether this side is to name
    /// them still.
    fn agree_ece(&mut self, remote: &Address) -> Result<bool> {
        match (self.local.ece, remote.ece) {
            (Ece::Offered(_), Ece::Offered(offer)) if !self.endpoint_sent.get() => match self.device.set_ece(offer) {
                Ok(()) => return Ok(true),
                Err(why) => {
                    log_info!(log::NET, "{}: enhancements {:#x} of the peer's NIC are not used: {why}", self.path(), offer.options);
                    self.local.ece = Ece::None;
                }
            },
            (Ece::Offered(_), Ece::Agreed(choice)) | (Ece::Agreed(choice), _) => self.device.set_ece(choice).map_err(|e| {
                let (path, options) = (self.path(), choice.options);
                Error::system(
                    format!("{path}: enhancements {options:#x}, which the two NICs had agreed on; NCCL_IB_ECE_ENABLE=0 does without"),
                    e,
                )
            })?,
            // Each side has sent an offer before it had the other's: nothing can be agreed on.
            _ => {}
        }
        Ok(false)
    }

    /// State.
    #[inline]
    pub fn state(&self) -> QpState {
        if self.async_status.fatal().is_some() { QpState::Error } else { self.state }
    }

    /// Number in completions.
    #[inline]
    pub fn qp_num(&self) -> u32 {
        self.local.qpn
    }

    /// Takes all of `requests`, or none.
    pub fn post_send(&mut self, requests: &[SendWr<'_>]) -> std::result::Result<(), PostError> {
        self.post(requests)
    }

    /// The same, of a number of requests that the compiler knows.
    #[inline(never)]
    pub fn post_some<const N: usize>(&mut self, requests: &[SendWr<'_>; N]) -> std::result::Result<(), PostError> {
        self.post(requests)
    }

    #[inline(always)]
    fn post(&mut self, requests: &[SendWr<'_>]) -> std::result::Result<(), PostError> {
        if self.state != QpState::Rts {
            return Err(PostError::State(self.state));
        }
        if requests.len() as u64 > self.sends.room() {
            return Err(PostError::Full);
        }
        for request in requests {
            match request.payload {
                Payload::Inline(bytes) if bytes.len() > MAX_INLINE => return Err(PostError::Invalid("more inline bytes than max_inline")),
                Payload::Inline(_) if request.opcode == Opcode::Read => return Err(PostError::Invalid("a READ cannot be inline")),
                Payload::Sge(sge) if sge.len > MAX_LEN => return Err(PostError::Invalid("longer than 2^30 bytes")),
                _ => {}
            }
        }
        for requests in requests.chunks(CHAIN) {
            self.post_chunk(requests)?;
        }
        Ok(())
    }

    /// Hands at most `CHAIN` requests to the device.
    #[inline(always)]
    fn post_chunk(&mut self, requests: &[SendWr<'_>]) -> std::result::Result<(), PostError> {
        // At least one signaled request in half a lap, or the slots of unsignaled requests would never be free again.
        let unsignaled_max = (self.sends.depth() as u32).div_ceil(2);
        let first = self.sends.posted();
        let base = self.chain.as_mut_ptr();
        for (i, request) in requests.iter().enumerate() {
            // SAFETY: `i` is below CHAIN, as is the next one's index where it is used; nobody else refers into the chain.
            let (entry, next) =
                unsafe { (&mut *base.add(i), if i + 1 < requests.len() { &raw mut (*base.add(i + 1)).wr } else { ptr::null_mut() }) };
            self.unsignaled += 1;
            let signaled = request.signaled || self.unsignaled >= unsignaled_max;
            let mut flags = 0;
            if signaled {
                self.unsignaled = 0;
                flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
            let len = match request.payload {
                Payload::Sge(sge) => {
                    entry.sge = ibv_sge { addr: sge.addr, length: sge.len, lkey: sge.lkey };
                    sge.len
                }
                Payload::Inline(bytes) => {
                    let len = bytes.len() as u32;
                    match &mut self.bounce {
                        None => {
                            flags |= ibv_send_flags::IBV_SEND_INLINE.0;
                            entry.sge = ibv_sge { addr: bytes.as_ptr() as u64, length: len, lkey: 0 };
                        }
                        Some(bounce) => {
                            // The slot is free: its last request is done, or there would be no room.
                            let slot = &mut bounce.bytes[self.sends.slot()];
                            slot[..bytes.len()].copy_from_slice(bytes);
                            entry.sge = ibv_sge { addr: slot.as_ptr() as u64, length: len, lkey: bounce.region.lkey() };
                        }
                    }
                    len
                }
            };
            entry.wr.wr_id = self.name | self.sends.posted() & NUMBER;
            entry.wr.next = next;
            entry.wr.sg_list = &raw mut entry.sge;
            entry.wr.num_sge = i32::from(len > 0);
            entry.wr.opcode = opcode(request.opcode);
            entry.wr.send_flags = flags;
            entry.wr.__bindgen_anon_1.imm_data = request.imm.to_be();
            entry.wr.wr.rdma.remote_addr = request.remote_addr;
            entry.wr.wr.rdma.rkey = request.rkey;
            self.sends.push(Sent { wr_id: request.wr_id, len, opcode: request.opcode, signaled: request.signaled });
            self.stats.add(RailCounter::Requests, 1);
            if request.opcode != Opcode::Read {
                self.stats.add(RailCounter::TxNic, u64::from(len));
            }
        }
        if requests.is_empty() {
            return Ok(());
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is live; the chain's links are valid and end with NULL, and the device copies them before returning.
        let code = unsafe { (self.post_send)(self.raw, &raw mut (*base).wr, &mut bad) };
        if code == 0 { Ok(()) } else { Err(self.not_taken(first, base, bad, code)) }
    }

    /// Whether everything outstanding was reported. A request that was not signaled and was performed before the queue pair failed is reported only by
    /// a later one: in ERROR, where each is flushed, one more tells (as the kernel's ib_drain_qp does it: Linux 6.12 drivers/infiniband/core/verbs.c).
    #[cold]
    pub fn drained(&mut self) -> bool {
        if self.state() != QpState::Error {
            return false;
        }
        if !self.sends.idle() && self.last.is_none() && self.sends.room() > 0 {
            let number = self.sends.posted() & NUMBER;
            let nothing = Payload::Inline(&[]);
            let wr = SendWr {
                wr_id: 0,
                opcode: Opcode::Write,
                payload: nothing,
                remote_addr: 0,
                rkey: 0,
                imm: 0,
                signaled: true,
                when_sent: false,
            };
            if self.post_chunk(&[wr]).is_ok() {
                self.last = Some(number);
            }
        }
        self.sends.idle() && self.recvs.idle()
    }

    /// From ERROR to INIT, as a later generation.
    pub fn reset(&mut self, generation: u32) -> Result<()> {
        let drained = self.drained();
        check_reset(self.state(), drained, self.generation, generation)?;
        self.device.set_impatient();
        let to_init = self.device.to_reset().and_then(|()| self.device.init());
        to_init.map_err(|e| e.into_error(&self.path()))?;
        // Events of the earlier generation say nothing of this one.
        self.shared.unwatch_qp(self.raw);
        self.async_status = self.shared.watch_qp(self.raw, self.cq);
        self.events = 0;
        (self.state, self.error, self.generation) = (QpState::Init, None, generation);
        (self.unsignaled, self.last, self.expired) = (0, None, false);
        (self.progress_seen, self.overdue, self.query_at) = ((0, 0), false, 0);
        Ok(())
    }

    /// The device took fewer requests than its queue has room for.
    #[cold]
    fn not_taken(&mut self, first: u64, base: *const ChainedWr, bad: *mut ibv_send_wr, code: i32) -> PostError {
        // `bad` is the first one that was not taken: it points into the chain, or is NULL.
        let offset = (bad as usize).wrapping_sub(base as usize) / size_of::<ChainedWr>();
        let taken = if bad.is_null() { 0 } else { (offset as u64).min(self.sends.posted() - first) };
        self.sends.truncate(first + taken);
        let error = std::io::Error::from_raw_os_error(code.saturating_abs());
        self.fail(format!("{}: the device took {taken} requests of a batch and then said: {error}", self.path()));
        self.device.to_error();
        PostError::State(QpState::Error)
    }

    /// Takes one receive request.
    #[inline]
    pub fn post_recv(&mut self, request: &RecvWr) -> std::result::Result<(), PostError> {
        if self.state == QpState::Error {
            // Not every device flushes a receive that is posted in ERROR.
            return Err(PostError::State(self.state));
        }
        if self.recvs.room() == 0 {
            return Err(PostError::Full);
        }
        if request.sge.len > MAX_LEN {
            return Err(PostError::Invalid("longer than 2^30 bytes"));
        }
        let mut sge = ibv_sge { addr: request.sge.addr, length: request.sge.len, lkey: request.sge.lkey };
        let mut wr = ibv_recv_wr {
            wr_id: self.name | RECEIVE | self.recvs.posted() & NUMBER,
            next: ptr::null_mut(),
            sg_list: &raw mut sge,
            num_sge: i32::from(request.sge.len > 0),
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is live; the request and its element outlive the call, which copies them.
        let code = unsafe { (self.post_recv)(self.raw, &mut wr, &mut bad) };
        if code != 0 {
            return Err(self.recv_not_taken(code));
        }
        self.recvs.push(request.wr_id);
        Ok(())
    }

    #[cold]
    fn recv_not_taken(&mut self, code: i32) -> PostError {
        let error = std::io::Error::from_raw_os_error(code.saturating_abs());
        self.fail(format!("{}: the device did not take a receive request: {error}", self.path()));
        self.device.to_error();
        PostError::State(QpState::Error)
    }

    /// Requests whose completions may still lie in the completion queue.
    pub(super) fn outstanding(&self) -> u64 {
        self.sends.posted() - self.sends.done() + self.recvs.posted() - self.recvs.done()
    }

    /// Completions that it may have at once.
    pub(super) fn depth(&self) -> u64 {
        self.sends.depth() + self.recvs.depth()
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if !self.shared.owned() {
            return;
        }
        // Before the device's queue pair is destroyed.
        self.shared.unwatch_qp(self.raw);
    }
}

#[inline]
fn opcode(opcode: Opcode) -> ibv_wr_opcode::Type {
    match opcode {
        Opcode::Send => ibv_wr_opcode::IBV_WR_SEND,
        Opcode::SendWithImm => ibv_wr_opcode::IBV_WR_SEND_WITH_IMM,
        Opcode::Write => ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        Opcode::WriteWithImm => ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
        Opcode::Read => ibv_wr_opcode::IBV_WR_RDMA_READ,
    }
}
