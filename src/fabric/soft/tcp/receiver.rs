//! The receiving half of a control stream: executes the peer's requests in order, and takes its acks, NAKs and READ responses. Fed with bytes in
//! pieces of any size, by the wire or by a test; no socket here. Driven by the thread that drives the queue pair.
//!
//! No byte is trusted: a protocol error ends the queue pair, and nothing else happens. The queues are bounded by what the codec allows, nothing
//! is allocated.
//!
//! A SEND or WRITE_WITH_IMM is sent only once an ack has told the requester that a receive for it is posted. If it waited here for its receive,
//! the acks behind it on the stream would wait too, and both sides could wait for each other.

mod payload;

use crate::base::stats::RailCounter;
use crate::fabric::types::*;

use super::super::mr::Pin;
use super::super::work_queues::{Fault, WorkQueues};
use super::codec::{self, FLAG_ACK_REQ, FLAG_IMM, FLAG_STREAMED, HEADER_SIZE, Header, Kind, MAX_READS};
use super::ring::Ring;

/// Longest WRITE that is published in order (the contract of [`crate::fabric`]).
const ORDERED_MAX: usize = 64;
/// Shortest rest of a payload that is received directly into the target memory.
const DIRECT_MIN: u32 = 2048;
/// Shortest payload after which the next one is expected to be long too, so that little is received ahead of it.
const BULK_MIN: u32 = 32 << 10;
/// Receives by which the peer's count may grow at once; more than the deepest queue.
const MAX_PEER_RECVS: u32 = 1 << 16;

/// Where the payload of the current frame goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    /// Into the target memory of `incoming`.
    Request,
    /// Into `small`, to be published in order once it is whole.
    Small,
    /// Into the memory of our oldest READ.
    Response,
    /// Nowhere: its request was refused.
    Skip,
}

/// A SEND or WRITE that is being received.
#[derive(Debug, Clone, Copy)]
struct IncomingRequest {
    kind: Kind,
    imm: Option<u32>,
    /// Key of the target memory: of the receive request for a SEND, named by the peer for a WRITE.
    key: u32,
    addr: u64,
    total: u32,
    done: u32,
    /// Length of the segments on the data streams; 0 if the bytes come in frames.
    segment: u32,
    /// The requester wants the ack at once.
    ack_req: bool,
}

/// A READ of the peer's, which the sending half answers.
#[derive(Debug, Clone, Copy, Default)]
pub struct IncomingRead {
    /// How many requests came before it.
    pub index: u64,
    /// Key.
    pub rkey: u32,
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
}

/// A READ of ours, which the peer answers.
#[derive(Debug, Clone, Copy, Default)]
struct OutgoingRead {
    index: u64,
    done: u32,
}

/// The receiving half of the wire, with what the sending half has to know of it.
pub struct FrameReceiver {
    header: [u8; HEADER_SIZE],
    header_len: usize,
    body: Body,
    /// Payload bytes of the current frame that have not come.
    body_left: u32,
    /// Whether the last payload was a long one.
    bulk: bool,
    incoming: Option<IncomingRequest>,
    small: [u8; ORDERED_MAX],
    /// Requests executed, READs that are not answered yet included.
    executed: u64,
    /// How many of these the requester wants acked at once.
    ack_requested: u64,
    /// Receives completed, modulo 2^32.
    recvs_completed: u32,
    /// READs of the peer that are not answered.
    reads_to_answer: Ring<IncomingRead, MAX_READS>,
    /// Why the request after those executed was refused. Nothing more is executed.
    refusal: Option<(WcStatus, String)>,
    /// Whether the peer's next request waits for a receive.
    rnr_waiting: bool,
    /// Number in our send queue of the first request of this wire, which counts requests from 0.
    base: Option<u64>,
    /// Receives that the peer has posted so far, modulo 2^32.
    peer_recvs_posted: u32,
    /// READs of ours that are not answered.
    reads_in_flight: Ring<OutgoingRead, MAX_READS>,
}

impl Default for FrameReceiver {
    fn default() -> Self {
        Self::new()
    }
}

#[cold]
fn protocol_error(what: &str) -> Fault {
    Fault::oldest(WcStatus::GeneralErr, format!("the peer sent {what}"))
}

impl FrameReceiver {
    /// One that has received nothing.
    pub fn new() -> Self {
        FrameReceiver {
            header: [0; HEADER_SIZE],
            header_len: 0,
            body: Body::Skip,
            body_left: 0,
            bulk: false,
            incoming: None,
            small: [0; ORDERED_MAX],
            executed: 0,
            ack_requested: 0,
            recvs_completed: 0,
            reads_to_answer: Ring::new(),
            refusal: None,
            rnr_waiting: false,
            base: None,
            peer_recvs_posted: 0,
            reads_in_flight: Ring::new(),
        }
    }

    /// Applies `bytes`, the next of the control stream; returns how many were taken. Fewer than all only while the oldest request is a streamed
    /// one: pass the rest again once it is complete.
    ///
    /// Errors: what ends the queue pair.
    pub fn feed(&mut self, wq: &mut WorkQueues, bytes: &[u8]) -> Result<usize, Fault> {
        let mut rest = bytes;
        loop {
            if self.body_left > 0 {
                if rest.is_empty() {
                    break;
                }
                let (now, later) = rest.split_at((self.body_left as usize).min(rest.len()));
                self.store(wq, now)?;
                rest = later;
                continue;
            }
            if self.header_len < HEADER_SIZE {
                let (now, later) = rest.split_at((HEADER_SIZE - self.header_len).min(rest.len()));
                if let Some(to) = self.header.get_mut(self.header_len..self.header_len + now.len()) {
                    to.copy_from_slice(now);
                }
                self.header_len += now.len();
                rest = later;
                if self.header_len < HEADER_SIZE {
                    break;
                }
            }
            if !self.on_header(wq)? {
                break;
            }
            self.header_len = 0;
        }
        Ok(bytes.len() - rest.len())
    }

    /// Whether a frame waits until the oldest request, a streamed one, is complete.
    #[inline]
    pub fn held(&self) -> bool {
        self.header_len == HEADER_SIZE
    }

    /// Whether no request is cut off if the stream ends here.
    pub fn between_frames(&self) -> bool {
        self.body_left == 0 && self.header_len == 0 && self.incoming.is_none()
    }

    /// Memory that the next bytes of the control stream are to be received into directly, and how many.
    pub fn direct_target(&mut self, wq: &mut WorkQueues) -> Result<Option<(Pin, usize)>, Fault> {
        if self.body_left < DIRECT_MIN || !matches!(self.body, Body::Request | Body::Response) {
            return Ok(None);
        }
        let left = self.body_left as usize;
        Ok(self.pin_target(wq)?.map(|pin| {
            let n = left.min(pin.len());
            (pin, n)
        }))
    }

    /// Whether the next payload is probably a long one: bytes of it that are received before its target is known must be copied there.
    #[inline]
    pub fn bulk(&self) -> bool {
        self.bulk
    }

    /// `n` bytes were received into [`FrameReceiver::direct_target`].
    pub fn direct_received(&mut self, wq: &mut WorkQueues, n: usize) -> Result<(), Fault> {
        wq.stats.add(RailCounter::RxTcp, n as u64);
        self.body_left = self.body_left.saturating_sub(n as u32);
        if self.body == Body::Response {
            return self.response_received(wq, n as u32);
        }
        self.advance(wq, n as u32)
    }

    /// The kernel could not write to [`FrameReceiver::direct_target`] or [`FrameReceiver::pin_segment`].
    #[cold]
    pub fn unwritable(&mut self, wq: &mut WorkQueues) -> Result<(), Fault> {
        if self.body_left > 0 && self.body == Body::Response {
            return Err(Fault::oldest(WcStatus::LocProtErr, "the local memory of a READ cannot be written"));
        }
        if matches!(self.incoming, Some(incoming) if incoming.kind == Kind::Send) {
            self.fail_recv(wq, WcStatus::LocProtErr);
        }
        self.refuse(WcStatus::RemOpErr, "registered memory cannot be written");
        Ok(())
    }

    /// Index, length and segment length of the oldest request, if its bytes come on the data streams.
    #[inline]
    pub fn streamed(&self) -> Option<(u64, u32, u32)> {
        self.incoming.filter(|incoming| incoming.segment > 0).map(|incoming| (self.executed, incoming.total, incoming.segment))
    }

    /// Pins the target of `len` bytes at `offset` of the streamed request; none if the request was refused.
    pub fn pin_segment(&mut self, wq: &mut WorkQueues, offset: u32, len: u32) -> Option<Pin> {
        let incoming = self.incoming?;
        self.pin(wq, &incoming, offset, len as usize)
    }

    /// `n` bytes of the streamed request were received.
    pub fn segment_received(&mut self, wq: &mut WorkQueues, n: usize) -> Result<(), Fault> {
        wq.stats.add(RailCounter::RxTcp, n as u64);
        self.advance(wq, n as u32)
    }

    /// How many requests may be acked: a READ only once it is answered.
    #[inline]
    pub fn ackable(&self) -> u64 {
        self.reads_to_answer.front().map_or(self.executed, |read| read.index)
    }

    /// How many requests the peer wants acked at once.
    #[inline]
    pub fn ack_requested(&self) -> u64 {
        self.ack_requested
    }

    /// How many receives were posted so far, modulo 2^32.
    #[inline]
    pub fn recvs_posted(&self, wq: &WorkQueues) -> u32 {
        self.recvs_completed.wrapping_add(wq.recvs() as u32)
    }

    /// How many receives were completed so far, modulo 2^32.
    #[inline]
    pub fn recvs_completed(&self) -> u32 {
        self.recvs_completed
    }

    /// READs of the peer that are not answered, oldest first.
    #[inline]
    pub fn reads_to_answer(&self) -> &Ring<IncomingRead, MAX_READS> {
        &self.reads_to_answer
    }

    /// The oldest of them is answered.
    pub fn read_answered(&mut self) {
        self.reads_to_answer.pop();
    }

    /// Why the peer's next request was refused.
    #[inline]
    pub fn refusal(&self) -> Option<&(WcStatus, String)> {
        self.refusal.as_ref()
    }

    /// Refuses the peer's next request and every later one.
    #[cold]
    pub fn refuse(&mut self, status: WcStatus, why: impl Into<String>) {
        self.incoming = None;
        self.body = if self.body == Body::Response { Body::Response } else { Body::Skip };
        self.rnr_waiting = false;
        self.refusal.get_or_insert_with(|| (status, why.into()));
    }

    /// Whether the peer's next request waits for a receive that is not posted. Refuses it once the peer's RNR retries are used up.
    #[inline]
    pub fn check_rnr(&mut self, wq: &mut WorkQueues) -> bool {
        if !self.rnr_waiting {
            return false;
        }
        if wq.recv_available() {
            self.rnr_waiting = false;
            return false;
        }
        if let Err(status) = wq.receiver_not_ready() {
            self.refuse(status, "no receive request was posted in time");
        }
        true
    }

    /// Number in our send queue of the first request of this wire.
    #[inline]
    pub fn base(&mut self, wq: &WorkQueues) -> u64 {
        *self.base.get_or_insert(wq.sq.sent)
    }

    /// Receives that the peer has posted so far, modulo 2^32.
    #[inline]
    pub fn peer_recvs_posted(&self) -> u32 {
        self.peer_recvs_posted
    }

    /// Our READ number `index` is sent; false if too many are in flight already.
    pub fn read_sent(&mut self, index: u64) -> bool {
        self.reads_in_flight.push(OutgoingRead { index, done: 0 })
    }

    /// Whether another READ of ours would be one too many.
    pub fn reads_full(&self) -> bool {
        self.reads_in_flight.is_full()
    }

    /// Handles a complete header; false if its frame has to wait until the oldest request, a streamed one, is complete.
    fn on_header(&mut self, wq: &mut WorkQueues) -> Result<bool, Fault> {
        let header = Header::decode(&self.header).map_err(protocol_error)?;
        // The last part of a long payload may be short, and says nothing about what follows.
        if header.len > 0 && header.kind != Kind::Part {
            self.bulk = header.len >= BULK_MIN;
        }
        match header.kind {
            Kind::Ack => self.on_ack(wq, &header)?,
            Kind::Nak => {
                let status = codec::status_of(header.arg);
                return Err(Fault::oldest(status, format!("the peer refused a request: {status}")));
            }
            Kind::Response => {
                let Some(read) = self.reads_in_flight.front() else { return Err(protocol_error("an answer to no READ")) };
                let wanted = wq.sq.get(read.index).len;
                if header.total != wanted || header.len > wanted - read.done || (header.len == 0) != (wanted == 0) {
                    return Err(protocol_error("an answer that does not fit its READ"));
                }
                self.body = Body::Response;
                self.body_left = header.len;
                if header.len == 0 {
                    self.response_received(wq, 0)?;
                }
            }
            _ if self.refusal.is_some() => {
                self.body = Body::Skip;
                self.body_left = header.len;
            }
            Kind::Part => {
                let Some(incoming) = self.incoming.filter(|incoming| incoming.segment == 0) else {
                    return Err(protocol_error("more of a request that is complete"));
                };
                if header.len > incoming.total - incoming.done {
                    return Err(protocol_error("more of a request than the request is long"));
                }
                self.body = Body::Request;
                self.body_left = header.len;
            }
            Kind::Send | Kind::Write | Kind::Read | Kind::Wait => {
                if let Some(incoming) = self.incoming {
                    return if incoming.segment > 0 { Ok(false) } else { Err(protocol_error("a request inside another")) };
                }
                match header.kind {
                    Kind::Wait => self.rnr_waiting = true,
                    Kind::Read => self.on_read(wq, &header)?,
                    _ => self.on_request(wq, &header)?,
                }
            }
        }
        Ok(true)
    }

    fn on_ack(&mut self, wq: &mut WorkQueues, header: &Header) -> Result<(), Fault> {
        let upto = self.base(wq).checked_add(header.addr).ok_or_else(|| protocol_error("an impossible acknowledgement"))?;
        if self.reads_in_flight.front().is_some_and(|read| read.index < upto) {
            return Err(protocol_error("an acknowledgement of a READ that it did not answer"));
        }
        if header.arg.wrapping_sub(self.peer_recvs_posted) > MAX_PEER_RECVS {
            return Err(protocol_error("an impossible number of receives"));
        }
        self.peer_recvs_posted = header.arg;
        wq.ack(upto)
    }

    #[inline]
    fn on_request(&mut self, wq: &mut WorkQueues, header: &Header) -> Result<(), Fault> {
        self.body_left = header.len;
        let imm = (header.flags & FLAG_IMM != 0).then_some(header.imm);
        let mut incoming = IncomingRequest {
            kind: header.kind,
            imm,
            key: header.rkey,
            addr: header.addr,
            total: header.total,
            done: 0,
            segment: if header.flags & FLAG_STREAMED != 0 { header.arg } else { 0 },
            ack_req: header.flags & FLAG_ACK_REQ != 0,
        };
        self.body = Body::Request;
        if header.kind == Kind::Send {
            let Some(recv) = wq.peek_recv() else { return Err(protocol_error("a SEND without being told of a receive for it")) };
            if header.total > recv.sge.len {
                self.fail_recv(wq, WcStatus::LocLenErr);
                self.refuse(
                    WcStatus::RemInvReqErr,
                    format!("the peer sent {} bytes to a receive request of {}", header.total, recv.sge.len),
                );
                return Ok(());
            }
            incoming.key = recv.sge.lkey;
            incoming.addr = recv.sge.addr;
        } else if imm.is_some() && !wq.recv_available() {
            return Err(protocol_error("an immediate without being told of a receive for it"));
        } else if header.total as usize <= ORDERED_MAX && header.addr.wrapping_add(u64::from(header.total)) % 8 == 0 {
            self.body = Body::Small;
        }
        self.incoming = Some(incoming);
        if incoming.segment > 0 {
            // Segments are checked one by one, but if a request does not fit as a whole, none of its bytes may be stored.
            self.pin(wq, &incoming, 0, incoming.total as usize);
        }
        if header.total == 0 {
            self.request_done(wq, &incoming)?;
        }
        Ok(())
    }

    fn on_read(&mut self, wq: &mut WorkQueues, header: &Header) -> Result<(), Fault> {
        if header.total > 0
            && let Err(status) = wq.pin_remote(header.rkey, header.addr, header.total as usize, Access::REMOTE_READ)
        {
            self.refuse(status, format!("the peer may not read {} bytes at {:#x} with key {:#x}", header.total, header.addr, header.rkey));
            return Ok(());
        }
        if !self.reads_to_answer.push(IncomingRead { index: self.executed, rkey: header.rkey, addr: header.addr, len: header.total }) {
            return Err(protocol_error("more READs than may be unanswered"));
        }
        self.executed += 1;
        self.ack_requested = self.executed;
        Ok(())
    }
}
