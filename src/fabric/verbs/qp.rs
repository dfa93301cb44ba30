//! A queue pair of a NIC. Driven by the thread that drives its completion queue, which owns it.
//!
//! A work request's id on the device is the place of the queue pair in its completion queue, a generation, and the request's running number;
//! the caller's id, and what a completion may not be trusted to tell (the opcode of a failed one), are kept in a ring beside it.

use std::ptr;
use std::sync::Arc;

use ibverbs_sys::*;

use super::Shared;
use super::endpoint::Address;
use super::events::{self, Fate};
use super::library::{check, made};
use super::status;
use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::base::mem::UserMemory;
use crate::base::rand;
use crate::base::stats::{RailCounter, RailStats};
use crate::fabric::types::*;

/// Bytes that a request may carry inline: a flow-control slot of `net`, exactly. On a device that takes fewer they pass through memory
/// of ours.
pub const MAX_INLINE: usize = 64;
/// Depth of either queue at most, as the contract has it.
const MAX_DEPTH: u32 = 4096;
/// Longest request: InfiniBand allows 2^31 (specification 1.4, 9.3.3.1.5), NCCL's largest message is half of that.
const MAX_LEN: u32 = 1 << 30;
/// Requests handed to the device at once.
const CHAIN: usize = 8;
/// READs answered at once at most; more of a device's is of no use to anybody here.
const MAX_READS: i32 = 16;
/// Hops of a packet, and its time to live.
const HOP_LIMIT: u8 = 255;
/// Number of a request in its id on the device, beside `RECEIVE`.
const NUMBER: u64 = (1 << 31) - 1;
/// The request is a receive.
const RECEIVE: u64 = 1 << 31;
/// Nanoseconds between questions to the device whether a queue pair with nothing outstanding is still well.
const ASK_NS: u64 = 250_000_000;
/// NCCL_IB_MQP_RETRY_CNT and NCCL_IB_MQP_RETRY_SLEEP_MSEC of NCCL 2.28: a neighbour may take a while to be found.
const MODIFY_TRIES: u32 = 34;
const MODIFY_PAUSE_MS: u64 = 100;

/// Requests by free-running numbers: `done <= posted`, `posted - done <= depth`.
struct Ring<T> {
    slots: Box<[T]>,
    mask: u64,
    depth: u64,
    posted: u64,
    done: u64,
}

impl<T: Copy> Ring<T> {
    fn new(depth: u32, empty: T) -> Ring<T> {
        let slots = (depth as usize).next_power_of_two();
        Ring { slots: vec![empty; slots].into_boxed_slice(), mask: slots as u64 - 1, depth: u64::from(depth), posted: 0, done: 0 }
    }

    #[inline]
    fn room(&self) -> u64 {
        self.depth - (self.posted - self.done)
    }

    #[inline]
    fn push(&mut self, item: T) {
        self.slots[(self.posted & self.mask) as usize] = item;
        self.posted += 1;
    }

    /// Takes the request whose number ends in `number`, and with it all before it. `None` if none of that number is outstanding.
    #[inline]
    fn take(&mut self, number: u64) -> Option<T> {
        let ahead = number.wrapping_sub(self.done) & NUMBER;
        if ahead >= self.posted - self.done {
            return None;
        }
        let at = self.done + ahead;
        self.done = at + 1;
        Some(self.slots[(at & self.mask) as usize])
    }

    fn idle(&self) -> bool {
        self.done == self.posted
    }
}

/// What is remembered of a send request.
#[derive(Clone, Copy)]
struct Sent {
    wr_id: u64,
    len: u32,
    opcode: Opcode,
    /// Whether the caller wants to hear of success.
    signaled: bool,
}

/// A request as the device takes it.
struct Link {
    wr: ibv_send_wr,
    sge: ibv_sge,
}

/// Registered memory for what the device will not take inline: one place per send request.
struct Bounce {
    bytes: Box<[[u8; MAX_INLINE]]>,
    region: super::MemoryRegion,
}

/// A queue pair.
pub struct QueuePair {
    raw: *mut ibv_qp,
    post_send: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> i32,
    post_recv: unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> i32,
    state: QpState,
    fate: Arc<Fate>,
    /// Events that are counted.
    events: u32,
    /// High half of the ids on the device.
    name: u64,
    sends: Ring<Sent>,
    recvs: Ring<u64>,
    /// Requests since the device was last asked to report one.
    quiet: u32,
    chain: Box<[Link; CHAIN]>,
    bounce: Option<Bounce>,
    stats: RailStats,
    caps: QpCaps,
    local: Address,
    remote: Option<Address>,
    error: Option<String>,
    /// Given up on by us, so that the device's word for its requests is only that they were flushed.
    expired: bool,
    /// `sends.done` when last looked at, and since when it is that; 0 while nothing is outstanding.
    seen: (u64, u64),
    ask_at: u64,
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
        let (raw, inline) = create(&shared, cq, caps)?;
        let local = Address {
            // SAFETY: a queue pair just made.
            qpn: unsafe { (*raw).qp_num },
            psn: (rand::u64().unwrap_or_else(|_| clock::now()) & 0xff_ffff) as u32,
            lid: shared.port.lid,
            gid: shared.port.gid,
            mtu: shared.port.mtu as u8,
            link_layer: shared.port.link_layer,
            reads: context.reads_answered.clamp(0, MAX_READS) as u8,
        };
        let fate = shared.events().watch(raw, cq, shared.port.number);
        let empty = Sent { wr_id: 0, len: 0, opcode: Opcode::Send, signaled: false };
        let link = |_| Link { wr: ibv_send_wr::default(), sge: ibv_sge::default() };
        // From here on dropping it destroys the queue pair.
        let mut qp = QueuePair {
            raw,
            post_send,
            post_recv,
            state: QpState::Init,
            fate,
            events: 0,
            name: u64::from(name) << 32,
            sends: Ring::new(caps.send_depth, empty),
            recvs: Ring::new(caps.recv_depth, 0),
            quiet: 0,
            chain: Box::new(std::array::from_fn(link)),
            bounce: None,
            stats,
            caps: *caps,
            local,
            remote: None,
            error: None,
            expired: false,
            seen: (0, 0),
            ask_at: 0,
            shared,
        };
        if inline < MAX_INLINE {
            let mut bytes = vec![[0; MAX_INLINE]; qp.sends.slots.len()].into_boxed_slice();
            // SAFETY: the box's memory stays where it is until the region, which is dropped with it, after the queue pair is destroyed.
            let memory = unsafe { UserMemory::new(bytes.as_mut_ptr().cast(), size_of_val(&*bytes)) };
            let region = qp.shared.register(memory, Access::LOCAL_WRITE)?;
            qp.bounce = Some(Bounce { bytes, region });
        }
        qp.init()?;
        Ok(qp)
    }

    /// Where this queue pair can be reached.
    pub fn endpoint(&self) -> Endpoint {
        self.local.encode()
    }

    fn init(&mut self) -> Result<()> {
        let mut attr = ibv_qp_attr {
            qp_state: ibv_qp_state::IBV_QPS_INIT,
            pkey_index: self.shared.port.config.ib_pkey as u16,
            port_num: self.shared.port.number,
            // Only what a region allows can be done to it.
            qp_access_flags: (ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
                | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
                | ibv_access_flags::IBV_ACCESS_REMOTE_READ)
                .0,
            ..Default::default()
        };
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_PKEY_INDEX
            | ibv_qp_attr_mask::IBV_QP_PORT
            | ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS;
        self.modify("INIT", &mut attr, mask)
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
        let config = port.config.clone();
        let ethernet = u32::from(port.link_layer) == IBV_LINK_LAYER_ETHERNET;
        // The subnet prefix is the first half of a GID.
        let routed = ethernet || remote.lid == 0 || remote.gid.0[..8] != port.gid.0[..8];
        let mut ah = ibv_ah_attr {
            dlid: remote.lid,
            sl: u8::try_from(config.ib_sl).unwrap_or(0),
            is_global: u8::from(routed),
            port_num: port.number,
            ..Default::default()
        };
        if routed {
            ah.grh.dgid = ibv_gid { raw: remote.gid.0 };
            ah.grh.sgid_index = port.gid_index as u8;
            ah.grh.hop_limit = HOP_LIMIT;
            ah.grh.traffic_class = self.caps.traffic_class.unwrap_or(0);
        }
        let mut attr = ibv_qp_attr {
            qp_state: ibv_qp_state::IBV_QPS_RTR,
            path_mtu: u32::from(self.local.mtu.min(remote.mtu)),
            dest_qp_num: remote.qpn,
            rq_psn: remote.psn,
            max_dest_rd_atomic: self.local.reads,
            min_rnr_timer: rnr_timer(self.caps.min_rnr_timer_us),
            ah_attr: ah,
            ..Default::default()
        };
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_AV
            | ibv_qp_attr_mask::IBV_QP_PATH_MTU
            | ibv_qp_attr_mask::IBV_QP_DEST_QPN
            | ibv_qp_attr_mask::IBV_QP_RQ_PSN
            | ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER;
        self.remote = Some(remote);
        self.modify("RTR", &mut attr, mask)?;
        let mut attr = ibv_qp_attr {
            qp_state: ibv_qp_state::IBV_QPS_RTS,
            timeout: config.ib_timeout as u8,
            retry_cnt: config.ib_retry_cnt as u8,
            rnr_retry: self.caps.rnr_retry,
            sq_psn: self.local.psn,
            max_rd_atomic: (self.shared.port.context.reads_asked.clamp(0, MAX_READS) as u8).min(remote.reads),
            ..Default::default()
        };
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_TIMEOUT
            | ibv_qp_attr_mask::IBV_QP_RETRY_CNT
            | ibv_qp_attr_mask::IBV_QP_RNR_RETRY
            | ibv_qp_attr_mask::IBV_QP_SQ_PSN
            | ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("RTS", &mut attr, mask)?;
        self.state = QpState::Rts;
        Ok(())
    }

    /// Changes the queue pair. ETIMEDOUT is said of a neighbour that did not answer yet, and is tried again.
    fn modify(&self, to: &str, attr: &mut ibv_qp_attr, mask: ibv_qp_attr_mask) -> Result<()> {
        let mut tries = 0;
        loop {
            // SAFETY: the queue pair is live, the attributes outlive the call and are those that the mask names.
            let result = check(unsafe { (self.shared.library().modify_qp)(self.raw, attr, mask.0 as i32) });
            let Err(error) = result else { return Ok(()) };
            tries += 1;
            if error.raw_os_error() == Some(libc::ETIMEDOUT) && tries < MODIFY_TRIES {
                clock::sleep(std::time::Duration::from_millis(MODIFY_PAUSE_MS));
                continue;
            }
            return Err(Error::system(format!("{}: queue pair to {to}{}", self.path(), modify_hint(&error)), error));
        }
    }

    /// State.
    #[inline]
    pub fn state(&self) -> QpState {
        if self.fate.event().is_some() { QpState::Error } else { self.state }
    }

    /// Number in completions.
    #[inline]
    pub fn qp_num(&self) -> u32 {
        self.local.qpn
    }

    /// Takes all of `requests`, or none.
    #[inline]
    pub fn post_send(&mut self, requests: &[SendRequest<'_>]) -> std::result::Result<(), PostError> {
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
        requests.chunks(CHAIN).try_for_each(|requests| self.hand_over(requests))
    }

    /// Hands at most `CHAIN` requests to the device.
    #[inline]
    fn hand_over(&mut self, requests: &[SendRequest<'_>]) -> std::result::Result<(), PostError> {
        // At least one report in half a lap, or the places of requests that nobody asks about would never be free again.
        let quiet_at_most = (self.sends.depth as u32).div_ceil(2);
        let first = self.sends.posted;
        let base = self.chain.as_mut_ptr();
        for (i, request) in requests.iter().enumerate() {
            // SAFETY: `i` is below CHAIN, as is the next one's index where it is used; nobody else refers into the chain.
            let (link, next) =
                unsafe { (&mut *base.add(i), if i + 1 < requests.len() { &raw mut (*base.add(i + 1)).wr } else { ptr::null_mut() }) };
            self.quiet += 1;
            let report = request.signaled || self.quiet >= quiet_at_most;
            let mut flags = 0;
            if report {
                self.quiet = 0;
                flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
            }
            let len = match request.payload {
                Payload::Sge(sge) => {
                    link.sge = ibv_sge { addr: sge.addr, length: sge.len, lkey: sge.lkey };
                    sge.len
                }
                Payload::Inline(bytes) => {
                    let len = bytes.len() as u32;
                    match &mut self.bounce {
                        None => {
                            flags |= ibv_send_flags::IBV_SEND_INLINE.0;
                            link.sge = ibv_sge { addr: bytes.as_ptr() as u64, length: len, lkey: 0 };
                        }
                        Some(bounce) => {
                            // Its place is free: its last request is done, or it would still count against the depth.
                            let place = &mut bounce.bytes[(self.sends.posted & self.sends.mask) as usize];
                            place[..bytes.len()].copy_from_slice(bytes);
                            link.sge = ibv_sge { addr: place.as_ptr() as u64, length: len, lkey: bounce.region.lkey() };
                        }
                    }
                    len
                }
            };
            link.wr.wr_id = self.name | self.sends.posted & NUMBER;
            link.wr.next = next;
            link.wr.sg_list = &raw mut link.sge;
            link.wr.num_sge = i32::from(len > 0);
            link.wr.opcode = opcode(request.opcode);
            link.wr.send_flags = flags;
            link.wr.__bindgen_anon_1.imm_data = request.imm.to_be();
            link.wr.wr.rdma.remote_addr = request.remote_addr;
            link.wr.wr.rdma.rkey = request.rkey;
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

    /// The device took fewer requests than it promised to have room for.
    #[cold]
    fn not_taken(&mut self, first: u64, base: *const Link, bad: *mut ibv_send_wr, code: i32) -> PostError {
        // Which of them: `bad` points into the chain, or is NULL.
        let offset = (bad as usize).wrapping_sub(base as usize) / size_of::<Link>();
        let taken = if bad.is_null() { 0 } else { (offset as u64).min(self.sends.posted - first) };
        self.sends.posted = first + taken;
        let error = std::io::Error::from_raw_os_error(code.saturating_abs());
        self.fail(format!("{}: the device took {taken} requests of a batch and then said: {error}", self.path()));
        self.to_error();
        PostError::State(QpState::Error)
    }

    /// Takes one receive request.
    #[inline]
    pub fn post_recv(&mut self, request: &RecvRequest) -> std::result::Result<(), PostError> {
        if self.state == QpState::Error {
            // Not every device flushes what comes so late.
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
            wr_id: self.name | RECEIVE | self.recvs.posted & NUMBER,
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
        self.to_error();
        PostError::State(QpState::Error)
    }

    /// The completion behind the device's; `None` if the caller did not ask for it.
    #[inline]
    pub(super) fn complete(&mut self, wc: &ibv_wc) -> Option<Completion> {
        let number = wc.wr_id() & NUMBER;
        if wc.wr_id() & RECEIVE != 0 {
            let wr_id = self.recvs.take(number)?;
            let (opcode, byte_len, imm) = (status::received(wc.opcode()), wc.len() as u32, wc.imm_data().map(u32::from_be));
            let completion = Completion { wr_id, status: WcStatus::Success, opcode, byte_len, imm, qp_num: self.local.qpn };
            return Some(if wc.is_valid() {
                self.stats.add(RailCounter::RxNic, u64::from(byte_len));
                completion
            } else {
                Completion { status: self.failed("a receive", 0, wc, false), opcode: WcOpcode::Recv, byte_len: 0, imm: None, ..completion }
            });
        }
        let sent = self.sends.take(number)?;
        if wc.is_valid() {
            let byte_len = if sent.opcode == Opcode::Read { sent.len } else { 0 };
            let completion = Completion {
                wr_id: sent.wr_id,
                status: WcStatus::Success,
                opcode: status::sent(sent.opcode),
                byte_len,
                imm: None,
                qp_num: self.local.qpn,
            };
            return sent.signaled.then_some(completion);
        }
        let status = self.failed(verb(sent.opcode), sent.len, wc, true);
        Some(Completion { wr_id: sent.wr_id, status, opcode: status::sent(sent.opcode), byte_len: 0, imm: None, qp_num: self.local.qpn })
    }

    /// A completion that is none of success: what it reports. The first that is more than a flush is told.
    #[cold]
    fn failed(&mut self, what: &str, len: u32, wc: &ibv_wc, is_send: bool) -> WcStatus {
        let (raw, vendor) = wc.error().unwrap_or((ibv_wc_status::IBV_WC_GENERAL_ERR, 0));
        let status = status::status(raw);
        if status == WcStatus::WrFlushErr {
            if self.state != QpState::Error {
                self.fail(format!("{}: the device took the queue pair to ERROR", self.path()));
            }
            // What we gave up on is reported once as what it is.
            if is_send && std::mem::take(&mut self.expired) {
                return WcStatus::RetryExcErr;
            }
            return status;
        }
        let (name, hint) = (status::name(raw), status::hint(status));
        let text = format!("{}: {what} of {len} bytes failed: {name} ({raw}), vendor_err {vendor:#x}: {hint}", self.path());
        log_warn!(log::NET, "{text}");
        self.fail(text);
        status
    }

    /// To ERROR in our books; the first reason stays.
    #[cold]
    fn fail(&mut self, why: String) {
        if self.state == QpState::Error && self.error.is_some() {
            return;
        }
        self.state = QpState::Error;
        self.stats.add(RailCounter::Errors, 1);
        self.error = Some(why);
    }

    /// Takes the queue pair to ERROR.
    #[cold]
    pub fn set_error(&mut self) {
        if self.state() == QpState::Error && self.error.is_some() {
            return;
        }
        self.fail(format!("{}: given up by this side", self.path()));
        self.to_error();
    }

    #[cold]
    fn to_error(&self) {
        let mut attr = ibv_qp_attr { qp_state: ibv_qp_state::IBV_QPS_ERR, ..Default::default() };
        // Refused only by a device that is gone, whose queue pairs are in ERROR anyway.
        let _ = self.modify("ERROR", &mut attr, ibv_qp_attr_mask::IBV_QP_STATE);
    }

    /// Why the queue pair is in ERROR.
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref().or_else(|| self.fate.event().map(events::epitaph))
    }

    /// A look now and then: work that takes longer than RAILHEAD_FABRIC_TIMEOUT_S is given up, as some devices never do; and a device that
    /// took the queue pair to ERROR while nothing was outstanding is asked. And what the device reported meanwhile is counted.
    #[cold]
    pub(super) fn look(&mut self, now: u64) {
        let events = self.fate.count();
        self.stats.add(RailCounter::NicEvents, u64::from(events.wrapping_sub(std::mem::replace(&mut self.events, events))));
        if self.state() != QpState::Rts {
            return;
        }
        if self.sends.idle() {
            self.seen = (self.sends.done, 0);
            if self.recvs.idle() && now >= self.ask_at {
                self.ask_at = now + ASK_NS;
                self.ask();
            }
            return;
        }
        if self.seen.1 == 0 || self.seen.0 != self.sends.done {
            self.seen = (self.sends.done, now.max(1));
            return;
        }
        let patience = u64::from(self.shared.port.config.fabric_timeout_s);
        if now.saturating_sub(self.seen.1) >= patience * 1_000_000_000 {
            let n = self.sends.posted - self.sends.done;
            let hint = status::hint(WcStatus::RetryExcErr);
            let text = format!("{}: {n} requests without completion for {patience} s (RAILHEAD_FABRIC_TIMEOUT_S): {hint}", self.path());
            log_warn!(log::NET, "{text}");
            self.expired = true;
            self.fail(text);
            self.to_error();
        }
    }

    fn ask(&mut self) {
        let (mut attr, mut init) = (ibv_qp_attr::default(), ibv_qp_init_attr::default());
        let mask = ibv_qp_attr_mask::IBV_QP_STATE.0 as i32;
        // SAFETY: the queue pair is live, both places outlive the call.
        let answer = check(unsafe { (self.shared.library().query_qp)(self.raw, &mut attr, mask, &mut init) });
        if answer.is_ok() && attr.qp_state == ibv_qp_state::IBV_QPS_ERR {
            self.fail(format!(
                "{}: the device took the queue pair to ERROR: the peer did what it may not, or the device failed",
                self.path()
            ));
        }
    }

    /// Both ends, for messages.
    fn path(&self) -> String {
        let (label, gid, qpn) = (&self.shared.port.label, self.local.gid, self.local.qpn);
        match self.remote {
            Some(remote) => format!("{label} gid {gid} qp {qpn} -> gid {} lid {} qp {}", remote.gid, remote.lid, remote.qpn),
            None => format!("{label} gid {gid} qp {qpn}"),
        }
    }

    /// Requests whose completions may still lie in the completion queue.
    pub(super) fn outstanding(&self) -> u64 {
        self.sends.posted - self.sends.done + self.recvs.posted - self.recvs.done
    }

    /// Completions that it may have at once.
    pub(super) fn depth(&self) -> u64 {
        self.sends.depth + self.recvs.depth
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        if !self.shared.owned() {
            return;
        }
        self.shared.events().forget(self.raw);
        // SAFETY: made by create_qp, destroyed once. The device touches no memory for it afterwards, so what it used (chain, bounce) may go.
        unsafe { (self.shared.library().destroy_qp)(self.raw) };
    }
}

/// Makes a queue pair; how many bytes it takes inline.
fn create(shared: &Shared, cq: *mut ibv_cq, caps: &QpCaps) -> Result<(*mut ibv_qp, usize)> {
    let wanted = if shared.port.config.ib_use_inline { MAX_INLINE as u32 } else { 0 };
    let mut refused = None;
    for inline in [wanted, 0] {
        let mut attr = ibv_qp_init_attr {
            send_cq: cq,
            recv_cq: cq,
            cap: ibv_qp_cap {
                max_send_wr: caps.send_depth,
                max_recv_wr: caps.recv_depth,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: inline,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            ..Default::default()
        };
        // SAFETY: domain and queue are live, the attributes outlive the call.
        match made(unsafe { (shared.library().create_qp)(shared.pd, &mut attr) }) {
            Ok(raw) => return Ok((raw, if inline == 0 { 0 } else { attr.cap.max_inline_data as usize })),
            Err(error) => refused = Some(error),
        }
    }
    let error = refused.unwrap_or_else(std::io::Error::last_os_error);
    let hint = if error.raw_os_error() == Some(libc::ENOMEM) { super::memlock_hint() } else { String::new() };
    Err(Error::system(
        format!("{}: creating a queue pair of depth {} and {}{hint}", shared.port.label, caps.send_depth, caps.recv_depth),
        error,
    ))
}

fn modify_hint(error: &std::io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ETIMEDOUT) => " (the peer's address does not answer: is there a route between the two GIDs?)",
        Some(libc::EINVAL | libc::ENODEV | libc::ENETUNREACH | libc::EHOSTUNREACH) => {
            " (the GID is gone, or has no route to the peer's; see NCCL_IB_GID_INDEX, NCCL_IB_ROCE_VERSION_NUM and NCCL_IB_ADDR_RANGE)"
        }
        _ => "",
    }
}

/// Code of the shortest wait that is not shorter (InfiniBand specification 1.4, table 45; code 0 is the longest).
fn rnr_timer(us: u32) -> u8 {
    const HUNDREDTHS_MS: [u32; 31] = [
        1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384,
        24576, 32768, 49152,
    ];
    HUNDREDTHS_MS.iter().position(|&wait| wait * 10 >= us).map_or(0, |at| at as u8 + 1)
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

fn verb(opcode: Opcode) -> &'static str {
    match opcode {
        Opcode::Send => "a SEND",
        Opcode::SendWithImm => "a SEND_WITH_IMM",
        Opcode::Write => "a WRITE",
        Opcode::WriteWithImm => "a WRITE_WITH_IMM",
        Opcode::Read => "a READ",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_rounded_up() {
        for (us, code) in [(0, 1), (1, 1), (10, 1), (11, 2), (640, 12), (641, 13), (10_240, 20), (491_520, 31), (491_521, 0), (u32::MAX, 0)]
        {
            assert_eq!(rnr_timer(us), code, "{us}");
        }
    }

    #[test]
    fn numbers_find_their_requests_across_the_wrap() {
        let mut ring = Ring::new(4, 0u64);
        (ring.posted, ring.done) = (NUMBER - 1, NUMBER - 1);
        for i in 0..4 {
            ring.push(100 + i);
        }
        assert_eq!(ring.room(), 0);
        // The third one's report stands for the two before it.
        assert_eq!(ring.take((NUMBER + 1) & NUMBER), Some(102));
        assert_eq!(ring.room(), 3);
        assert_eq!(ring.take(NUMBER), None, "it was reported before");
        assert_eq!(ring.take((NUMBER + 2) & NUMBER), Some(103));
        assert_eq!(ring.take((NUMBER + 3) & NUMBER), None, "it was never posted");
        assert!(ring.idle());
    }
}
