//! A queue pair of a NIC. Driven by the thread that drives its completion queue, which owns it.
//!
//! A work request's id on the device is the place of the queue pair in its completion queue, a generation, and the request's running number;
//! the caller's id, and what a completion may not be trusted to tell (the opcode of a failed one), are kept in a ring beside it.

use std::cell::Cell;
use std::ptr;
use std::sync::Arc;

use ibverbs_sys::*;

use super::Shared;
use super::endpoint::{Address, Ece};
use super::events::{self, Fate};
use super::handle::{Handle, MAX_READS};
use super::ring::{NUMBER, Ring};
use super::status;
use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_info};
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
/// In an id on the device, beside the number: the request is a receive.
const RECEIVE: u64 = 1 << 31;
/// Nanoseconds between questions to the device whether a queue pair with nothing outstanding is still well.
const ASK_NS: u64 = 250_000_000;

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
    /// Dropped before the memory that the device uses for it: `bounce`, `chain`.
    device: Handle,
    /// The same, for the device's functions.
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
    /// Whether somebody was told of it: what it says of its enhancements then stands.
    told: Cell<bool>,
    remote: Option<Address>,
    error: Option<String>,
    /// Given up on by us, so that the device's word for its requests is only that they were flushed.
    expired: bool,
    /// `sends.done()` when last looked at, and since when it is that; 0 while the device owes no report.
    seen: (u64, u64),
    /// The last look found work that has taken too long.
    late: bool,
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
        let wanted = if shared.port.config.ib_use_inline { MAX_INLINE as u32 } else { 0 };
        let (device, inline) = Handle::create(shared.clone(), cq, caps, wanted)?;
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
        let fate = shared.events().watch(raw, cq, shared.port.number);
        let empty = Sent { wr_id: 0, len: 0, opcode: Opcode::Send, signaled: false };
        let link = |_| Link { wr: ibv_send_wr::default(), sge: ibv_sge::default() };
        // From here on dropping it destroys the queue pair.
        let mut qp = QueuePair {
            device,
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
            told: Cell::new(false),
            remote: None,
            error: None,
            expired: false,
            seen: (0, 0),
            late: false,
            ask_at: 0,
            shared,
        };
        if inline < MAX_INLINE {
            let mut bytes = vec![[0; MAX_INLINE]; qp.sends.places()].into_boxed_slice();
            // SAFETY: the box's memory stays where it is until the region, which is dropped with it, after the queue pair is destroyed.
            let memory = unsafe { UserMemory::new(bytes.as_mut_ptr().cast(), size_of_val(&*bytes)) };
            let region = qp.shared.register(memory, Access::LOCAL_WRITE)?;
            qp.bounce = Some(Bounce { bytes, region });
        }
        qp.device.init().map_err(|refused| refused.at(&qp.path()))?;
        if qp.shared.port.config.ib_ece {
            // A driver without any has none to say.
            let some = qp.device.enhancements().filter(|ece| ece.options != 0);
            qp.local.ece = some.map_or(Ece::None, Ece::Offered);
        }
        Ok(qp)
    }

    /// Where this queue pair can be reached.
    pub fn endpoint(&self) -> Endpoint {
        self.told.set(true);
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
        let agreed = self.enhance(&remote)?;
        // What it reads at once is bounded by what the peer answers.
        self.device.connect(&self.local, &remote, &self.caps).map_err(|refused| refused.at(&self.path()))?;
        if agreed {
            self.local.ece = self.device.enhancements().map_or(Ece::None, Ece::Agreed);
        }
        self.state = QpState::Rts;
        Ok(())
    }

    /// Enhanced connection establishment, as rdma-core's manual has it: who connects first takes of the peer's offer what it can, says so in its
    /// endpoint, and the peer takes that. Whether this side is the one that has yet to say so.
    fn enhance(&mut self, remote: &Address) -> Result<bool> {
        match (self.local.ece, remote.ece) {
            (Ece::Offered(_), Ece::Offered(offer)) if !self.told.get() => match self.device.enhance(offer) {
                Ok(()) => return Ok(true),
                Err(why) => {
                    log_info!(log::NET, "{}: enhancements {:#x} of the peer's NIC are not used: {why}", self.path(), offer.options);
                    self.local.ece = Ece::None;
                }
            },
            (Ece::Offered(_), Ece::Agreed(choice)) => self.device.enhance(choice).map_err(|e| {
                let (path, options) = (self.path(), choice.options);
                Error::system(
                    format!("{path}: enhancements {options:#x}, which the peer's NIC chose of ours; NCCL_IB_ECE_ENABLE=0 does without"),
                    e,
                )
            })?,
            // Both were told of offers: whose choice would count?
            _ => {}
        }
        Ok(false)
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
    pub fn post_send(&mut self, requests: &[SendRequest<'_>]) -> std::result::Result<(), PostError> {
        self.take(requests)
    }

    /// The same, of a number of requests that the compiler knows.
    #[inline(never)]
    pub fn post_some<const N: usize>(&mut self, requests: &[SendRequest<'_>; N]) -> std::result::Result<(), PostError> {
        self.take(requests)
    }

    #[inline(always)]
    fn take(&mut self, requests: &[SendRequest<'_>]) -> std::result::Result<(), PostError> {
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
            self.hand_over(requests)?;
        }
        Ok(())
    }

    /// Hands at most `CHAIN` requests to the device.
    #[inline(always)]
    fn hand_over(&mut self, requests: &[SendRequest<'_>]) -> std::result::Result<(), PostError> {
        // At least one report in half a lap, or the places of requests that nobody asks about would never be free again.
        let quiet_at_most = (self.sends.depth() as u32).div_ceil(2);
        let first = self.sends.posted();
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
                            let place = &mut bounce.bytes[self.sends.place()];
                            place[..bytes.len()].copy_from_slice(bytes);
                            link.sge = ibv_sge { addr: place.as_ptr() as u64, length: len, lkey: bounce.region.lkey() };
                        }
                    }
                    len
                }
            };
            link.wr.wr_id = self.name | self.sends.posted() & NUMBER;
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
        let taken = if bad.is_null() { 0 } else { (offset as u64).min(self.sends.posted() - first) };
        self.sends.take_back(first + taken);
        let error = std::io::Error::from_raw_os_error(code.saturating_abs());
        self.fail(format!("{}: the device took {taken} requests of a batch and then said: {error}", self.path()));
        self.device.break_off();
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
        self.device.break_off();
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
        // Whose work it is says who the peer is, and warns.
        log_info!(log::NET, "{text}");
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
        self.device.break_off();
    }

    /// Why the queue pair is in ERROR.
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref().or_else(|| self.fate.event().map(events::epitaph))
    }

    /// A look now and then: work whose report takes longer than RAILHEAD_FABRIC_TIMEOUT_S is given up, as some devices never do; and a device that
    /// took the queue pair to ERROR while nothing was outstanding is asked. And what the device reported meanwhile is counted.
    #[cold]
    pub(super) fn look(&mut self, now: u64) {
        let events = self.fate.count();
        self.stats.add(RailCounter::NicEvents, u64::from(events.wrapping_sub(std::mem::replace(&mut self.events, events))));
        if self.state() != QpState::Rts {
            return;
        }
        if self.sends.idle() && self.recvs.idle() && now >= self.ask_at {
            self.ask_at = now + ASK_NS;
            self.ask();
        }
        // What was posted since the device was last asked for a report may be done, and nobody knows.
        let done = self.sends.done();
        if done >= self.sends.posted() - u64::from(self.quiet) {
            (self.seen, self.late) = ((done, 0), false);
            return;
        }
        if self.seen.1 == 0 || self.seen.0 != done {
            (self.seen, self.late) = ((done, now.max(1)), false);
            return;
        }
        let patience = u64::from(self.shared.port.config.fabric_timeout_s);
        // Twice: after a pause of this process, the report may lie in the queue that is polled after the first look.
        if now.saturating_sub(self.seen.1) >= patience * 1_000_000_000 && std::mem::replace(&mut self.late, true) {
            let n = self.sends.posted() - self.sends.done();
            let hint = status::hint(WcStatus::RetryExcErr);
            let text = format!("{}: {n} requests without completion for {patience} s (RAILHEAD_FABRIC_TIMEOUT_S): {hint}", self.path());
            log_info!(log::NET, "{text}");
            self.expired = true;
            self.fail(text);
            self.device.break_off();
        }
    }

    fn ask(&mut self) {
        if self.device.is_broken() {
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
        // Then the device's queue pair may go.
        self.shared.events().forget(self.raw);
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

fn verb(opcode: Opcode) -> &'static str {
    match opcode {
        Opcode::Send => "a SEND",
        Opcode::SendWithImm => "a SEND_WITH_IMM",
        Opcode::Write => "a WRITE",
        Opcode::WriteWithImm => "a WRITE_WITH_IMM",
        Opcode::Read => "a READ",
    }
}
