//! What a queue pair makes of the frames that its peer sends: applies requests in order, takes acknowledgements, NAKs and READ
//! responses. Fed with bytes in pieces of any size, by the wire or by a test; no socket here. Driven by the thread that drives the
//! queue pair.
//!
//! Every byte may come from somebody who means harm: whatever is wrong ends the queue pair, nothing else happens. The queues are
//! bounded by what the codec allows, nothing is allocated.
//!
//! A SEND or WRITE_WITH_IMM is sent only once the peer has said that a receive for it is posted: were it to wait here, the
//! acknowledgements behind it would wait too, and with them the peer's progress.

mod place;

use crate::base::stats::RailCounter;
use crate::fabric::types::*;

use super::super::mr::Pin;
use super::super::queue::{Fault, WorkQueues};
use super::codec::{self, FLAG_ASK, FLAG_IMM, FLAG_STREAMED, HEADER_SIZE, Header, Kind, MAX_READS};
use super::ring::Ring;

/// Longest WRITE that is published in order (DESIGN: a flow-control slot).
const ORDERED_MAX: usize = 64;
/// Shortest rest of a payload that is worth receiving straight into place.
const DIRECT_MIN: u32 = 2048;
/// Shortest payload that makes the next one worth receiving straight into place as a whole.
const BULK_MIN: u32 = 32 << 10;
/// Receives that a peer may announce at once; more than the deepest queue.
const MAX_ANNOUNCED: u32 = 1 << 16;

/// Where the payload of the frame under way goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    /// Into the request under way.
    Request,
    /// Into `small`, to be published in order once it is whole.
    Small,
    /// Into the memory of our oldest READ.
    Response,
    /// Nowhere: its request was refused.
    Skip,
}

/// A SEND or WRITE of which bytes are to come.
#[derive(Debug, Clone, Copy)]
struct Incoming {
    kind: Kind,
    imm: Option<u32>,
    /// Of the receive request for a SEND, of the peer's choosing for a WRITE.
    key: u32,
    addr: u64,
    total: u32,
    done: u32,
    /// Length of the segments on the data streams; 0 if the bytes come in frames.
    segment: u32,
    /// The requester waits for the acknowledgement.
    asks: bool,
}

/// A READ that the peer asked for and the sending half answers.
#[derive(Debug, Clone, Copy, Default)]
pub struct Serving {
    /// How many requests came before it.
    pub index: u64,
    /// Key.
    pub rkey: u32,
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
}

/// A READ of ours that the peer is to answer.
#[derive(Debug, Clone, Copy, Default)]
struct Awaited {
    index: u64,
    done: u32,
}

/// The receiving half of the wire, with what the sending half has to know of it.
pub struct Receiver {
    header: [u8; HEADER_SIZE],
    header_len: usize,
    body: Body,
    /// Payload bytes of the frame under way still to come.
    body_left: u32,
    /// The last payload was a long one.
    bulk: bool,
    incoming: Option<Incoming>,
    small: [u8; ORDERED_MAX],
    /// Requests accepted, READs not yet answered included.
    accepted: u64,
    /// Of these, up to which one the requester waits for the acknowledgement.
    asked: u64,
    /// Receives completed.
    received: u32,
    /// READs to answer.
    serving: Ring<Serving, MAX_READS>,
    /// The request after those accepted was refused; nothing more is accepted.
    refusal: Option<(WcStatus, String)>,
    /// The peer's next request waits for a receive.
    waiting: bool,
    /// What our send queue had sent before this wire sent anything.
    base: Option<u64>,
    /// Receives that the peer has posted so far.
    announced: u32,
    /// READs to be answered.
    awaited: Ring<Awaited, MAX_READS>,
}

impl Default for Receiver {
    fn default() -> Self {
        Self::new()
    }
}

#[cold]
fn malformed(what: &str) -> Fault {
    Fault::oldest(WcStatus::GeneralErr, format!("the peer sent {what}"))
}

impl Receiver {
    /// One that has heard nothing yet.
    pub fn new() -> Self {
        Receiver {
            header: [0; HEADER_SIZE],
            header_len: 0,
            body: Body::Skip,
            body_left: 0,
            bulk: false,
            incoming: None,
            small: [0; ORDERED_MAX],
            accepted: 0,
            asked: 0,
            received: 0,
            serving: Ring::new(),
            refusal: None,
            waiting: false,
            base: None,
            announced: 0,
            awaited: Ring::new(),
        }
    }

    /// Applies `bytes`, the next of the control stream; returns how many were taken. Fewer than all only while a streamed request is
    /// at the head: give the rest again once it is complete.
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
                if let Some(place) = self.header.get_mut(self.header_len..self.header_len + now.len()) {
                    place.copy_from_slice(now);
                }
                self.header_len += now.len();
                rest = later;
                if self.header_len < HEADER_SIZE {
                    break;
                }
            }
            if !self.begin(wq)? {
                break;
            }
            self.header_len = 0;
        }
        Ok(bytes.len() - rest.len())
    }

    /// Whether a frame waits for the streamed request at the head to be complete.
    #[inline]
    pub fn held(&self) -> bool {
        self.header_len == HEADER_SIZE
    }

    /// Whether the frame under way is whole: nothing of it is missing, were the stream to end here.
    pub fn between_frames(&self) -> bool {
        self.body_left == 0 && self.header_len == 0 && self.incoming.is_none()
    }

    /// Memory that the next bytes of the control stream may be received straight into, and how many.
    pub fn target(&mut self, wq: &mut WorkQueues) -> Result<Option<(Pin, usize)>, Fault> {
        if self.body_left < DIRECT_MIN || !matches!(self.body, Body::Request | Body::Response) {
            return Ok(None);
        }
        let left = self.body_left as usize;
        Ok(self.place(wq)?.map(|pin| {
            let n = left.min(pin.len());
            (pin, n)
        }))
    }

    /// Whether the next payload is probably a long one: what is received of it before its place is known has to be copied there.
    #[inline]
    pub fn bulk(&self) -> bool {
        self.bulk
    }

    /// `n` bytes were received into [`Receiver::target`].
    pub fn placed(&mut self, wq: &mut WorkQueues, n: usize) -> Result<(), Fault> {
        wq.stats.add(RailCounter::RxTcp, n as u64);
        self.body_left = self.body_left.saturating_sub(n as u32);
        if self.body == Body::Response {
            return self.answered(wq, n as u32);
        }
        self.advance(wq, n as u32)
    }

    /// The kernel could not write where [`Receiver::target`] or [`Receiver::segment_place`] pointed.
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

    /// Index, length and segment length of the request whose bytes come on the data streams now.
    #[inline]
    pub fn streamed(&self) -> Option<(u64, u32, u32)> {
        self.incoming.filter(|incoming| incoming.segment > 0).map(|incoming| (self.accepted, incoming.total, incoming.segment))
    }

    /// Where `len` bytes at `offset` of the streamed request go; none if the request was refused.
    pub fn segment_place(&mut self, wq: &mut WorkQueues, offset: u32, len: u32) -> Option<Pin> {
        let incoming = self.incoming?;
        self.pin(wq, &incoming, offset, len as usize)
    }

    /// `n` bytes of the streamed request were received.
    pub fn segment_placed(&mut self, wq: &mut WorkQueues, n: usize) -> Result<(), Fault> {
        wq.stats.add(RailCounter::RxTcp, n as u64);
        self.advance(wq, n as u32)
    }

    /// How many requests the peer may be told were accepted: READs count once they are answered.
    #[inline]
    pub fn ackable(&self) -> u64 {
        self.serving.front().map_or(self.accepted, |read| read.index)
    }

    /// How many requests the peer wants to be told were accepted; it can wait to hear of later ones.
    #[inline]
    pub fn asked(&self) -> u64 {
        self.asked
    }

    /// How many receives were posted so far, modulo 2^32.
    #[inline]
    pub fn posted(&self, wq: &WorkQueues) -> u32 {
        self.received.wrapping_add(wq.recvs() as u32)
    }

    /// How many receives were completed so far, modulo 2^32.
    #[inline]
    pub fn received(&self) -> u32 {
        self.received
    }

    /// READs to answer, oldest first.
    #[inline]
    pub fn serving(&self) -> &Ring<Serving, MAX_READS> {
        &self.serving
    }

    /// The oldest READ is answered.
    pub fn served(&mut self) {
        self.serving.pop();
    }

    /// Why the peer's next request was refused.
    #[inline]
    pub fn refusal(&self) -> Option<&(WcStatus, String)> {
        self.refusal.as_ref()
    }

    /// Refuses whatever the peer asks for from now on.
    #[cold]
    pub fn refuse(&mut self, status: WcStatus, why: impl Into<String>) {
        self.incoming = None;
        self.body = if self.body == Body::Response { Body::Response } else { Body::Skip };
        self.waiting = false;
        self.refusal.get_or_insert_with(|| (status, why.into()));
    }

    /// Whether the peer's next request waits for a receive that is not posted; counts the wait and ends it after the peer's patience.
    #[inline]
    pub fn waits(&mut self, wq: &mut WorkQueues) -> bool {
        if !self.waiting {
            return false;
        }
        if wq.recv_available() {
            self.waiting = false;
            return false;
        }
        if let Err(status) = wq.receiver_not_ready() {
            self.refuse(status, "no receive request was posted in time");
        }
        true
    }

    /// What our send queue had sent before this wire sent anything.
    #[inline]
    pub fn base(&mut self, wq: &WorkQueues) -> u64 {
        *self.base.get_or_insert(wq.sq.sent)
    }

    /// Receives that the peer has posted so far, modulo 2^32.
    #[inline]
    pub fn announced(&self) -> u32 {
        self.announced
    }

    /// Notes that our READ number `index` is being sent; false if too many are unanswered already.
    pub fn await_read(&mut self, index: u64) -> bool {
        self.awaited.push(Awaited { index, done: 0 })
    }

    /// Whether another READ of ours would be one too many.
    pub fn reads_full(&self) -> bool {
        self.awaited.is_full()
    }

    /// Begins the frame whose header is complete; false if it has to wait for the streamed request at the head.
    fn begin(&mut self, wq: &mut WorkQueues) -> Result<bool, Fault> {
        let header = Header::decode(&self.header).map_err(malformed)?;
        // The last part of a long payload may be short, and says nothing about what follows.
        if header.len > 0 && header.kind != Kind::Part {
            self.bulk = header.len >= BULK_MIN;
        }
        match header.kind {
            Kind::Ack => self.acknowledged(wq, &header)?,
            Kind::Nak => {
                let status = codec::status_of(header.arg);
                return Err(Fault::oldest(status, format!("the peer refused a request: {status}")));
            }
            Kind::Response => {
                let Some(read) = self.awaited.front() else { return Err(malformed("an answer to no READ")) };
                let wanted = wq.sq.get(read.index).len;
                if header.total != wanted || header.len > wanted - read.done || (header.len == 0) != (wanted == 0) {
                    return Err(malformed("an answer that does not fit its READ"));
                }
                self.body = Body::Response;
                self.body_left = header.len;
                if header.len == 0 {
                    self.answered(wq, 0)?;
                }
            }
            _ if self.refusal.is_some() => {
                self.body = Body::Skip;
                self.body_left = header.len;
            }
            Kind::Part => {
                let Some(incoming) = self.incoming.filter(|incoming| incoming.segment == 0) else {
                    return Err(malformed("more of a request that is complete"));
                };
                if header.len > incoming.total - incoming.done {
                    return Err(malformed("more of a request than the request is long"));
                }
                self.body = Body::Request;
                self.body_left = header.len;
            }
            Kind::Send | Kind::Write | Kind::Read | Kind::Wait => {
                if let Some(incoming) = self.incoming {
                    return if incoming.segment > 0 { Ok(false) } else { Err(malformed("a request inside another")) };
                }
                match header.kind {
                    Kind::Wait => self.waiting = true,
                    Kind::Read => self.read(wq, &header)?,
                    _ => self.request(wq, &header)?,
                }
            }
        }
        Ok(true)
    }

    fn acknowledged(&mut self, wq: &mut WorkQueues, header: &Header) -> Result<(), Fault> {
        let upto = self.base(wq).checked_add(header.addr).ok_or_else(|| malformed("an impossible acknowledgement"))?;
        if self.awaited.front().is_some_and(|read| read.index < upto) {
            return Err(malformed("an acknowledgement of a READ that it did not answer"));
        }
        if header.arg.wrapping_sub(self.announced) > MAX_ANNOUNCED {
            return Err(malformed("an impossible number of receives"));
        }
        self.announced = header.arg;
        wq.ack(upto)
    }

    #[inline]
    fn request(&mut self, wq: &mut WorkQueues, header: &Header) -> Result<(), Fault> {
        self.body_left = header.len;
        let imm = (header.flags & FLAG_IMM != 0).then_some(header.imm);
        let mut incoming = Incoming {
            kind: header.kind,
            imm,
            key: header.rkey,
            addr: header.addr,
            total: header.total,
            done: 0,
            segment: if header.flags & FLAG_STREAMED != 0 { header.arg } else { 0 },
            asks: header.flags & FLAG_ASK != 0,
        };
        self.body = Body::Request;
        if header.kind == Kind::Send {
            let Some(recv) = wq.peek_recv() else { return Err(malformed("a SEND without being told of a receive for it")) };
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
            return Err(malformed("an immediate without being told of a receive for it"));
        } else if header.total as usize <= ORDERED_MAX && header.addr.wrapping_add(u64::from(header.total)) % 8 == 0 {
            self.body = Body::Small;
        }
        self.incoming = Some(incoming);
        if incoming.segment > 0 {
            // Segments are checked one by one, but a request that does not fit as a whole must not land in part.
            self.pin(wq, &incoming, 0, incoming.total as usize);
        }
        if header.total == 0 {
            self.accept(wq, &incoming)?;
        }
        Ok(())
    }

    fn read(&mut self, wq: &mut WorkQueues, header: &Header) -> Result<(), Fault> {
        if header.total > 0
            && let Err(status) = wq.pin_remote(header.rkey, header.addr, header.total as usize, Access::REMOTE_READ)
        {
            self.refuse(status, format!("the peer may not read {} bytes at {:#x} with key {:#x}", header.total, header.addr, header.rkey));
            return Ok(());
        }
        if !self.serving.push(Serving { index: self.accepted, rkey: header.rkey, addr: header.addr, len: header.total }) {
            return Err(malformed("more READs than may be unanswered"));
        }
        self.accepted += 1;
        self.asked = self.accepted;
        Ok(())
    }
}
