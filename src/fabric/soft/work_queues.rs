//! The work queues of a soft queue pair, whatever wire moves the bytes: its send queue, its receive queue and its state.
//! Used by the thread that drives the completion queue. A wire takes requests from here, and reports here what was sent, acked and received.
//!
//! No completion is ever stored. The queues count how many requests were posted, sent, acked and reported, and completions follow from
//! these counters. So a queue pair never has more completions than it has requests.

use std::io;

use crate::base::clock;
use crate::base::error::Error;
use crate::base::stats::{RailCounter, RailStats};
use crate::fabric::types::*;

use super::MAX_INLINE;
use super::mr::{self, Pin};

/// One posted send request.
#[derive(Debug, Clone, Copy)]
pub struct Wqe {
    /// The caller's name for it.
    pub wr_id: u64,
    /// What to do.
    pub opcode: Opcode,
    /// Whether success is reported.
    pub signaled: bool,
    /// Whether it is done once it is sent, where the wire copies what it sends.
    pub when_sent: bool,
    /// Whether the bytes are in `SendQueue::inline_bytes`.
    pub inline: bool,
    /// Bytes.
    pub len: u32,
    /// Local memory, unless inline or empty.
    pub addr: u64,
    /// Local key.
    pub lkey: u32,
    /// Peer's key.
    pub rkey: u32,
    /// Peer's memory.
    pub remote_addr: u64,
    /// Immediate data.
    pub imm: u32,
}

/// Send requests, by free-running counters: `acked <= sent <= posted`, `reported <= sent`, `posted - reported <= depth`. The rings get their address
/// space at once and fill during the first lap, so that entries that are never used take no memory.
pub struct SendQueue {
    ring: Vec<Wqe>,
    inline: Vec<[u8; MAX_INLINE]>,
    mask: u64,
    depth: u64,
    /// Requests posted.
    pub posted: u64,
    /// Requests that the wire has taken over whole. Over shared memory their bytes may still be in the caller's memory.
    pub sent: u64,
    /// Requests that the peer has acked.
    pub acked: u64,
    /// Requests whose completion was polled, or that needed none.
    reported: u64,
    /// The wire needs no memory of a request that it has sent.
    pub copies: bool,
}

impl SendQueue {
    fn new(depth: u32, start: u64) -> Self {
        let slots = (depth as usize).next_power_of_two();
        SendQueue {
            ring: Vec::with_capacity(slots),
            inline: Vec::with_capacity(slots),
            mask: slots as u64 - 1,
            depth: u64::from(depth),
            posted: start,
            sent: start,
            acked: start,
            reported: start,
            copies: false,
        }
    }

    /// Whether the oldest request that was not reported is done.
    #[inline(always)]
    fn front_is_done(&self) -> bool {
        self.reported < self.acked || self.copies && self.reported < self.sent && self.get(self.reported).when_sent
    }

    /// Whether the oldest request that was not reported is done as it is sent, though not acked.
    #[inline]
    pub fn has_sent(&self) -> bool {
        self.reported >= self.acked && self.front_is_done()
    }

    /// Appends an entry during the first lap. It fits the capacity.
    #[cold]
    #[inline(never)]
    fn grow(&mut self) {
        let none = Wqe {
            wr_id: 0,
            opcode: Opcode::Send,
            signaled: false,
            when_sent: false,
            inline: false,
            len: 0,
            addr: 0,
            lkey: 0,
            rkey: 0,
            remote_addr: 0,
            imm: 0,
        };
        self.ring.push(none);
        self.inline.push([0; MAX_INLINE]);
    }

    /// Request number `i`, of those not reported: `reported <= i < posted`.
    #[inline]
    pub fn get(&self, i: u64) -> &Wqe {
        debug_assert!(i >= self.reported && i < self.posted);
        &self.ring[(i & self.mask) as usize]
    }

    /// Bytes of request number `i`, which must be outstanding and inline.
    #[inline]
    pub fn inline_bytes(&self, i: u64) -> &[u8] {
        let slot = (i & self.mask) as usize;
        &self.inline[slot][..(self.ring[slot].len as usize).min(MAX_INLINE)]
    }

    /// Whether half of the queue or more is not acked yet, so that the peer should not delay its next ack.
    #[inline]
    pub fn half_full(&self) -> bool {
        (self.posted - self.acked) * 2 >= self.depth
    }

    /// Whether a posted request is not sent yet.
    #[inline]
    pub fn pending(&self) -> bool {
        self.sent != self.posted
    }
}

/// A receive request and, once it is complete, how it ended.
#[derive(Debug, Clone, Copy)]
struct Rqe {
    request: RecvWr,
    opcode: WcOpcode,
    status: WcStatus,
    byte_len: u32,
    imm: Option<u32>,
}

/// Receive requests, by free-running counters: `reported <= completed <= posted`, `posted - reported <= depth`.
struct RecvQueue {
    ring: Vec<Rqe>,
    mask: u64,
    depth: u64,
    posted: u64,
    completed: u64,
    reported: u64,
}

impl RecvQueue {
    /// As [`SendQueue::grow`], up to `slot`, which takes the request. More than one entry only if the counters did not begin at 0.
    #[cold]
    #[inline(never)]
    fn grow(&mut self, slot: usize, request: RecvWr) {
        self.ring.resize(slot + 1, Rqe { request, opcode: WcOpcode::Recv, status: WcStatus::Success, byte_len: 0, imm: None });
    }
}

/// What takes a queue pair to ERROR. Boxed, as every function of the hot path may return one and hardly ever does.
#[derive(Debug, Clone)]
pub struct Fault(Box<Cause>);

/// The contents of a [`Fault`].
#[derive(Debug, Clone)]
pub struct Cause {
    /// Completion status of the request named by `at`; every other outstanding request is flushed.
    pub status: WcStatus,
    /// Which request failed.
    pub at: FaultAt,
    /// Cause, in words for a log.
    pub why: String,
    /// Of a fault that is this process's own: what the system said.
    pub errno: Option<i32>,
}

/// Which send request a fault belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultAt {
    /// The oldest that is not acked: what a NAK or a dead peer fails.
    Oldest,
    /// The oldest that is not sent: what a local key violation fails.
    Sending,
}

impl Fault {
    /// A fault of the oldest outstanding request.
    #[cold]
    pub fn oldest(status: WcStatus, why: impl Into<String>) -> Self {
        Fault(Box::new(Cause { status, at: FaultAt::Oldest, why: why.into(), errno: None }))
    }

    /// A fault of the request being sent.
    #[cold]
    pub fn sending(status: WcStatus, why: impl Into<String>) -> Self {
        Fault(Box::new(Cause { status, at: FaultAt::Sending, why: why.into(), errno: None }))
    }

    /// A fault of this process, which cannot get from the system what is `purpose`'s: it says nothing of the peer.
    #[cold]
    pub fn lacking(error: &io::Error, purpose: &str) -> Self {
        let what = match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => "no descriptor left",
            Some(libc::ENOMEM | libc::ENOBUFS) => "no memory left",
            Some(libc::EADDRNOTAVAIL) => "no port or address left",
            Some(libc::ENOSPC) => "no room left in /dev/shm",
            _ => "the system refuses what it takes",
        };
        let errno = Some(error.raw_os_error().unwrap_or(libc::EIO));
        Fault(Box::new(Cause { status: WcStatus::LocQpOpErr, at: FaultAt::Oldest, why: format!("{what} {purpose}"), errno }))
    }
}

/// A call of this process for itself has failed.
impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        match error {
            Error::System { what, word } => Fault(Box::new(Cause {
                status: WcStatus::LocQpOpErr,
                at: FaultAt::Oldest,
                why: what,
                errno: Some(word.raw_os_error().unwrap_or(libc::EIO)),
            })),
            other => Fault::oldest(WcStatus::LocQpOpErr, other.to_string()),
        }
    }
}

/// Whether the system gave this process nothing more: that says nothing of the peer.
pub fn is_lack(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS | libc::EADDRNOTAVAIL | libc::ETOOMANYREFS))
}

impl std::ops::Deref for Fault {
    type Target = Cause;

    fn deref(&self) -> &Cause {
        &self.0
    }
}

/// The send queue and the receive queue of a queue pair, and its state.
pub struct WorkQueues {
    /// Send queue. The wire advances `sent`, and `acked` through [`WorkQueues::ack`].
    pub sq: SendQueue,
    rq: RecvQueue,
    /// Where the rail's traffic is counted.
    pub stats: RailStats,
    /// Number in completions.
    pub qp_num: u32,
    state: QpState,
    /// The request that failed, and the cause.
    fault: Option<(u64, Fault)>,
    /// The peer's `rnr_retry`, from its endpoint: how long its requests wait for a receive.
    peer_rnr_retry: u8,
    min_rnr_timer_us: u32,
    /// Since when the peer's oldest request waits for a receive; 0 when none waits.
    rnr_since: u64,
}

impl WorkQueues {
    /// Empty queues in INIT. `start` is where the counters begin.
    pub fn new(caps: &QpCaps, stats: RailStats, qp_num: u32, start: u64) -> Self {
        let slots = (caps.recv_depth as usize).next_power_of_two();
        WorkQueues {
            sq: SendQueue::new(caps.send_depth, start),
            rq: RecvQueue {
                ring: Vec::with_capacity(slots),
                mask: slots as u64 - 1,
                depth: u64::from(caps.recv_depth),
                posted: start,
                completed: start,
                reported: start,
            },
            stats,
            qp_num,
            state: QpState::Init,
            fault: None,
            peer_rnr_retry: 7,
            min_rnr_timer_us: caps.min_rnr_timer_us,
            rnr_since: 0,
        }
    }

    /// State.
    #[inline]
    pub fn state(&self) -> QpState {
        self.state
    }

    /// INIT to RTS.
    pub fn ready(&mut self, peer_rnr_retry: u8) {
        self.state = QpState::Rts;
        self.peer_rnr_retry = peer_rnr_retry;
    }

    /// To ERROR; the first fault stays.
    #[cold]
    pub fn fail(&mut self, fault: Fault) {
        if self.state == QpState::Error {
            return;
        }
        self.state = QpState::Error;
        let at = match fault.at {
            FaultAt::Oldest => self.sq.acked.max(self.sq.reported),
            FaultAt::Sending => self.sq.sent,
        };
        self.stats.add(RailCounter::Errors, 1);
        self.fault = Some((at, fault));
    }

    /// Whether nothing is outstanding.
    pub fn idle(&self) -> bool {
        self.sq.reported == self.sq.posted && self.rq.reported == self.rq.posted
    }

    /// Why the queue pair is in ERROR.
    pub fn error(&self) -> Option<&str> {
        self.fault.as_ref().map(|(_, fault)| fault.why.as_str())
    }

    /// Of a fault that is this process's own: what the system said.
    pub fn errno(&self) -> Option<i32> {
        self.fault.as_ref().and_then(|(_, fault)| fault.errno)
    }

    /// Takes all of `requests`, or none.
    #[inline(always)]
    pub fn post_send(&mut self, requests: &[SendWr<'_>]) -> Result<(), PostError> {
        if self.state == QpState::Init {
            return Err(PostError::State(self.state));
        }
        self.skip_unsignaled();
        if self.sq.posted - self.sq.reported + requests.len() as u64 > self.sq.depth {
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
        for request in requests {
            let slot = (self.sq.posted & self.sq.mask) as usize;
            while slot >= self.sq.ring.len() {
                self.sq.grow();
            }
            let wqe = &mut self.sq.ring[slot];
            wqe.wr_id = request.wr_id;
            wqe.opcode = request.opcode;
            wqe.signaled = request.signaled;
            wqe.when_sent = request.when_sent;
            wqe.rkey = request.rkey;
            wqe.remote_addr = request.remote_addr;
            wqe.imm = request.imm;
            match request.payload {
                Payload::Sge(sge) => {
                    wqe.inline = false;
                    wqe.len = sge.len;
                    wqe.addr = sge.addr;
                    wqe.lkey = sge.lkey;
                }
                Payload::Inline(bytes) => {
                    wqe.inline = true;
                    wqe.len = bytes.len() as u32;
                    self.sq.inline[slot][..bytes.len()].copy_from_slice(bytes);
                }
            }
            self.sq.posted = self.sq.posted.wrapping_add(1);
            self.stats.add(RailCounter::Requests, 1);
        }
        Ok(())
    }

    /// Takes one receive request.
    #[inline(always)]
    pub fn post_recv(&mut self, request: &RecvWr) -> Result<(), PostError> {
        if self.rq.posted - self.rq.reported >= self.rq.depth {
            return Err(PostError::Full);
        }
        if request.sge.len > MAX_LEN {
            return Err(PostError::Invalid("longer than 2^30 bytes"));
        }
        let slot = (self.rq.posted & self.rq.mask) as usize;
        match self.rq.ring.get_mut(slot) {
            Some(rqe) => rqe.request = *request,
            None => self.rq.grow(slot, *request),
        }
        self.rq.posted += 1;
        Ok(())
    }

    /// The peer has acked every request below `upto`.
    #[inline]
    pub fn ack(&mut self, upto: u64) -> Result<(), Fault> {
        if upto < self.sq.acked || upto > self.sq.sent {
            return Err(self.bad_ack(upto));
        }
        self.sq.acked = upto;
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn bad_ack(&self, upto: u64) -> Fault {
        let (acked, sent) = (self.sq.acked, self.sq.sent);
        Fault::oldest(WcStatus::GeneralErr, format!("peer acknowledged request {upto}, outside {acked}..={sent}"))
    }

    /// Whether a SEND or WRITE_WITH_IMM would find a receive request.
    #[inline]
    pub fn recv_available(&self) -> bool {
        self.rq.completed != self.rq.posted
    }

    /// Receive requests posted and not completed.
    #[inline]
    pub fn recvs(&self) -> u64 {
        self.rq.posted - self.rq.completed
    }

    /// The oldest receive request that is not completed. The wire fills it and then completes it.
    #[inline]
    pub fn peek_recv(&self) -> Option<RecvWr> {
        self.recv_available().then(|| self.rq.ring[(self.rq.completed & self.rq.mask) as usize].request)
    }

    /// Completes the oldest receive request; false if there is none.
    #[inline]
    pub fn complete_recv(&mut self, opcode: WcOpcode, byte_len: u32, imm: Option<u32>) -> bool {
        if !self.recv_available() {
            return false;
        }
        let rqe = &mut self.rq.ring[(self.rq.completed & self.rq.mask) as usize];
        rqe.opcode = opcode;
        rqe.status = WcStatus::Success;
        rqe.byte_len = byte_len;
        rqe.imm = imm;
        self.rq.completed += 1;
        self.rnr_since = 0;
        true
    }

    /// Completes the oldest receive request, if there is one, with an error of its own memory.
    #[cold]
    pub fn fail_recv(&mut self, status: WcStatus) {
        if self.complete_recv(WcOpcode::Recv, 0, None) {
            self.rq.ring[(self.rq.completed.wrapping_sub(1) & self.rq.mask) as usize].status = status;
        }
    }

    /// Called by a wire each time a request of the peer finds no receive request. An error once the peer's RNR retries are used up: the
    /// wire then NAKs the request.
    pub fn receiver_not_ready(&mut self) -> Result<(), WcStatus> {
        if self.rnr_since == 0 {
            self.stats.add(RailCounter::RnrWaits, 1);
            self.rnr_since = if self.peer_rnr_retry < 7 { clock::now().max(1) } else { 1 };
        }
        if self.peer_rnr_retry < 7 {
            let timeout = u64::from(self.peer_rnr_retry) * u64::from(self.min_rnr_timer_us) * 1000;
            if clock::now().saturating_sub(self.rnr_since) > timeout {
                return Err(WcStatus::RnrRetryExcErr);
            }
        }
        Ok(())
    }

    /// Checks and pins memory that a request of this side names.
    #[inline]
    pub fn pin_local(&self, lkey: u32, addr: u64, len: usize, need: Access) -> Result<Pin, WcStatus> {
        mr::pin(lkey, addr, len, need).map_err(|refused| refused.local())
    }

    /// Checks and pins memory that the peer named.
    #[inline]
    pub fn pin_remote(&self, rkey: u32, addr: u64, len: usize, need: Access) -> Result<Pin, WcStatus> {
        mr::pin(rkey, addr, len, need).map_err(|refused| refused.remote())
    }

    /// Frees the entries of acked unsignaled requests at the front of the send queue.
    #[inline]
    fn skip_unsignaled(&mut self) {
        while self.sq.front_is_done() && !self.sq.ring[(self.sq.reported & self.sq.mask) as usize].signaled {
            self.sq.reported += 1;
        }
    }

    /// Writes completions to `out`; returns how many. In ERROR everything outstanding completes, sends first.
    #[inline(always)]
    pub fn poll_completions(&mut self, out: &mut [Completion]) -> usize {
        let most = out.len();
        let mut places = out.iter_mut();
        while self.sq.front_is_done() {
            let wqe = &self.sq.ring[(self.sq.reported & self.sq.mask) as usize];
            if wqe.signaled {
                let Some(place) = places.next() else { break };
                let byte_len = if wqe.opcode == Opcode::Read { wqe.len } else { 0 };
                *place = Completion {
                    wr_id: wqe.wr_id,
                    status: WcStatus::Success,
                    opcode: wc_opcode(wqe.opcode),
                    byte_len,
                    imm: None,
                    qp_num: self.qp_num,
                };
            }
            self.sq.reported += 1;
        }
        while self.rq.reported != self.rq.completed
            && let Some(place) = places.next()
        {
            let rqe = &self.rq.ring[(self.rq.reported & self.rq.mask) as usize];
            *place = Completion {
                wr_id: rqe.request.wr_id,
                status: rqe.status,
                opcode: rqe.opcode,
                byte_len: rqe.byte_len,
                imm: rqe.imm,
                qp_num: self.qp_num,
            };
            self.rq.reported += 1;
        }
        let n = most - places.len();
        if self.state == QpState::Error && n < most { n + self.flush(places.into_slice()) } else { n }
    }

    #[cold]
    #[inline(never)]
    fn flush(&mut self, out: &mut [Completion]) -> usize {
        let mut n = 0;
        while n < out.len() && self.sq.reported != self.sq.posted {
            let wqe = &self.sq.ring[(self.sq.reported & self.sq.mask) as usize];
            let status = match &self.fault {
                Some((at, fault)) if *at == self.sq.reported => fault.status,
                _ => WcStatus::WrFlushErr,
            };
            out[n] = Completion { wr_id: wqe.wr_id, status, opcode: wc_opcode(wqe.opcode), byte_len: 0, imm: None, qp_num: self.qp_num };
            n += 1;
            self.sq.reported += 1;
            self.sq.acked = self.sq.acked.max(self.sq.reported);
            self.sq.sent = self.sq.sent.max(self.sq.reported);
        }
        while n < out.len() && self.rq.reported != self.rq.posted {
            let rqe = &self.rq.ring[(self.rq.reported & self.rq.mask) as usize];
            out[n] = Completion {
                wr_id: rqe.request.wr_id,
                status: WcStatus::WrFlushErr,
                opcode: WcOpcode::Recv,
                byte_len: 0,
                imm: None,
                qp_num: self.qp_num,
            };
            n += 1;
            self.rq.reported += 1;
            self.rq.completed = self.rq.reported;
        }
        n
    }
}

/// Longest request: 2^30 bytes, half of InfiniBand's limit (specification 1.4, 9.3.3.1.5) and NCCL's largest message.
pub const MAX_LEN: u32 = 1 << 30;

/// What a send request completes as.
fn wc_opcode(opcode: Opcode) -> WcOpcode {
    match opcode {
        Opcode::Send | Opcode::SendWithImm => WcOpcode::Send,
        Opcode::Write | Opcode::WriteWithImm => WcOpcode::Write,
        Opcode::Read => WcOpcode::Read,
    }
}
