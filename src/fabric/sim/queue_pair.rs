//! The protocol between two simulated queue pairs: numbered packets that are sent again until they are acknowledged, as over InfiniBand. A request is cut
//! into pieces, each of which is a packet, and lands for itself.
//!
//! The requester keeps what was sent until its last packet is acknowledged, and sends all of it again when nothing was for a while. The responder takes
//! packets in the order of their numbers alone. Numbers have 24 bits; a queue pair that was reset begins at a place of its generation, so that it
//! takes nothing for its own that was sent to an earlier one.

use std::collections::VecDeque;

use crate::base::error::Result;
use crate::base::mem;
use crate::base::stats::RailStats;
use crate::fabric::soft::publish::publish;
use crate::fabric::soft::work_queues::{Fault, WorkQueues};
use crate::fabric::types::*;

use super::world::{Event, Port, State};

/// Nanoseconds without an acknowledgement until all is sent again, and how often in a row.
const TIMEOUT_NS: u64 = 1_000_000;
const RETRIES: u32 = 4;
/// Nanoseconds for which what was sent to a queue pair may land after it was taken to ERROR.
const CLOSING_NS: u64 = 100_000;
/// Nanoseconds until a queue pair goes to ERROR whose device has met memory that is not registered: what is posted meanwhile is flushed.
const NOTICE_NS: u64 = 1_000;
/// Packets that may be under way to one queue pair.
const WINDOW: u32 = 4096;
/// Pieces of a request at most.
const PIECES: u64 = 4;
/// Requests are not cut below this.
const WHOLE: u32 = 64;

const MASK: u32 = 0xff_ffff;

const UNREGISTERED: &str = "a request names memory that is not registered";

/// How many packets after `from` packet `to` is.
fn distance(from: u32, to: u32) -> u32 {
    to.wrapping_sub(from) & MASK
}

fn is_before(a: u32, b: u32) -> bool {
    a != b && distance(a, b) <= MASK / 2
}

/// Where the numbers of a generation begin.
fn first_of(first: u32, generation: u32) -> u32 {
    first.wrapping_add(generation.wrapping_mul(0x9e_3779)) & MASK
}

/// What a queue pair waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Timer {
    /// That something is acknowledged.
    Ack,
    /// A receive request of the peer's.
    Receive,
}

/// A packet.
#[derive(Clone)]
pub struct Packet {
    /// The queue pair that it goes to.
    pub to: usize,
    /// Its number, or the one that it answers.
    pub psn: u32,
    pub what: What,
}

/// What a packet says.
#[derive(Clone)]
pub enum What {
    /// A piece of a request.
    Piece(Piece),
    /// All packets up to this one were taken.
    Ack,
    /// This one was refused for good.
    Nak(WcStatus),
    /// There was no receive request for this one.
    NotReady,
    /// What a READ has read. It acknowledges, too.
    Response(Vec<u8>),
}

#[derive(Clone)]
pub struct Piece {
    opcode: Opcode,
    is_last: bool,
    /// Where in the request it begins, and where it lands.
    at: u32,
    remote_addr: u64,
    rkey: u32,
    imm: u32,
    /// Bytes of the whole request: what a READ asks for, and what a WRITE must be allowed before any of it lands.
    total: u32,
    bytes: Vec<u8>,
}

/// A request whose packets were sent.
struct Sent {
    request: u64,
    psn: u32,
    /// Bytes of each piece.
    pieces: Vec<u32>,
}

/// A queue pair.
pub struct QueuePairState {
    pub port: Port,
    pub wq: WorkQueues,
    caps: QpCaps,
    /// Of generation 0.
    pub first_psn: u32,
    generation: u32,
    peer: Option<usize>,
    is_destroyed: bool,
    /// It is being taken to ERROR, for this: what arrives lands until then.
    closing: Option<(WcStatus, &'static str)>,
    sent: VecDeque<Sent>,
    next_psn: u32,
    /// What is waited for, and until when; and when that is looked at next.
    timer: Option<(Timer, u64)>,
    looked_at: Option<u64>,
    retries: u32,
    /// Nothing is sent before, as the peer had no receive request.
    not_before: u64,
    expected: u32,
    /// Bytes of the message that is being received.
    received: u32,
    /// When the last packet that it has sent arrives: they keep their order.
    pub last_arrival: u64,
}

impl QueuePairState {
    pub fn new(port: Port, caps: &QpCaps, stats: RailStats, number: usize, first_psn: u32) -> QueuePairState {
        QueuePairState {
            port,
            wq: WorkQueues::new(caps, stats, number as u32, 0),
            caps: *caps,
            first_psn,
            generation: 0,
            peer: None,
            is_destroyed: false,
            closing: None,
            sent: VecDeque::new(),
            next_psn: first_psn,
            timer: None,
            looked_at: None,
            retries: 0,
            not_before: 0,
            expected: 0,
            received: 0,
            last_arrival: 0,
        }
    }

    pub fn state(&self) -> QpState {
        if self.closing.is_some() { QpState::Error } else { self.wq.state() }
    }

    pub fn connect(&mut self, peer: usize, first_psn: u32, rnr_retry: u8) {
        self.peer = Some(peer);
        self.next_psn = first_of(self.first_psn, self.generation);
        self.expected = first_of(first_psn, self.generation);
        self.wq.ready(rnr_retry);
    }

    pub fn drained(&self) -> bool {
        self.closing.is_none() && self.wq.idle()
    }

    pub fn reset(&mut self, generation: u32) -> Result<()> {
        check_reset(self.state(), self.drained(), self.generation, generation)?;
        let (stats, last_arrival) = (self.wq.stats.clone(), self.last_arrival);
        *self = QueuePairState {
            generation,
            last_arrival,
            ..QueuePairState::new(self.port, &self.caps, stats, self.wq.qp_num as usize, self.first_psn)
        };
        Ok(())
    }

    pub fn poll(&mut self, out: &mut [Completion]) -> usize {
        self.wq.poll_completions(out)
    }

    /// Whether nothing is wrong with it.
    pub fn is_sound(&self) -> bool {
        self.is_destroyed || self.state() == QpState::Rts && self.retries == 0
    }

    /// Whether packets are taken.
    fn takes(&self) -> bool {
        !self.is_destroyed && self.wq.state() == QpState::Rts
    }

    fn fail(&mut self, fault: Fault) {
        self.sent.clear();
        self.timer = None;
        self.closing = None;
        self.wq.fail(fault);
    }
}

impl State {
    pub fn destroy(&mut self, number: usize) {
        let qp = self.qp(number);
        qp.fail(Fault::oldest(WcStatus::WrFlushErr, "destroyed"));
        qp.is_destroyed = true;
    }

    /// To ERROR, a little later.
    pub fn begin_to_fail(&mut self, number: usize, status: WcStatus, why: &'static str) {
        let closing = 1 + self.random.below(CLOSING_NS);
        let qp = self.qp(number);
        if qp.closing.is_none() && qp.wq.state() != QpState::Error && !qp.is_destroyed {
            qp.closing = Some((status, why));
            let generation = qp.generation;
            self.at(closing, Event::Closed { number, generation });
        }
    }

    /// How often what it sends is tried again where there is no receive.
    pub fn rnr_retry(&self, number: usize) -> u8 {
        self.qp_ref(number).caps.rnr_retry
    }

    /// What was sent to it lands no more.
    pub fn closed(&mut self, number: usize, generation: u32) {
        let qp = self.qp(number);
        if qp.generation == generation
            && let Some((status, why)) = qp.closing
        {
            qp.fail(Fault::oldest(status, why));
        }
    }

    /// Sends what was posted.
    pub fn transmit(&mut self, number: usize) {
        loop {
            let (now, most) = (self.now, 1 + self.random.below(PIECES) as u32);
            let qp = self.qp(number);
            if !qp.takes() || qp.closing.is_some() || !qp.wq.sq.pending() || now < qp.not_before {
                return;
            }
            let oldest = qp.sent.front().map_or(qp.next_psn, |sent| sent.psn);
            if distance(oldest, qp.next_psn) + PIECES as u32 > WINDOW {
                return;
            }
            let request = qp.wq.sq.sent;
            let wqe = *qp.wq.sq.get(request);
            let count = if wqe.len <= WHOLE || wqe.opcode == Opcode::Read { 1 } else { most };
            let piece = wqe.len.div_ceil(count).max(1).next_multiple_of(8);
            let pieces = (0..count).map(|i| wqe.len.saturating_sub(i * piece).min(piece)).collect();
            let psn = qp.next_psn;
            qp.sent.push_back(Sent { request, psn, pieces });
            let at = qp.sent.len() - 1;
            let sent = self.send_request(number, at);
            let qp = self.qp(number);
            if let Err(status) = sent {
                qp.sent.pop_back();
                return self.refused(number, Fault::sending(status, UNREGISTERED));
            }
            qp.next_psn = (psn + count) & MASK;
            qp.wq.sq.sent += 1;
            self.start_timer(number);
        }
    }

    /// The device has met memory that is not registered.
    fn refused(&mut self, number: usize, fault: Fault) {
        let qp = self.qp(number);
        // Nothing goes out any more.
        qp.not_before = u64::MAX;
        let generation = qp.generation;
        self.at(NOTICE_NS, Event::Refused { number, generation, fault });
    }

    /// So its queue pair has failed.
    pub fn noticed(&mut self, number: usize, generation: u32, fault: Fault) {
        let qp = self.qp(number);
        if qp.generation == generation && qp.closing.is_none() {
            qp.fail(fault);
        }
    }

    /// Sends the packets of a request: the bytes are what is in its memory now.
    ///
    /// Errors: that is not registered.
    fn send_request(&mut self, number: usize, at: usize) -> std::result::Result<(), WcStatus> {
        let qp = self.qp_ref(number);
        let (Some(sent), Some(to)) = (qp.sent.get(at), qp.peer) else { return Ok(()) };
        let wqe = *qp.wq.sq.get(sent.request);
        let (mut packets, mut offset) = (Vec::with_capacity(sent.pieces.len()), 0);
        for (index, len) in sent.pieces.iter().enumerate() {
            let bytes = match wqe.opcode {
                Opcode::Read => Vec::new(),
                _ if *len == 0 => Vec::new(),
                _ if wqe.inline => qp.wq.sq.inline_bytes(sent.request).to_vec(),
                _ => {
                    let pin = qp.wq.pin_local(wqe.lkey, wqe.addr.wrapping_add(u64::from(offset)), *len as usize, Access::empty())?;
                    let mut bytes = vec![0; pin.len()];
                    // SAFETY: the pin covers as many bytes as the vector has.
                    unsafe { mem::copy(pin.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
                    bytes
                }
            };
            let piece = Piece {
                opcode: wqe.opcode,
                is_last: index + 1 == sent.pieces.len(),
                at: offset,
                remote_addr: wqe.remote_addr,
                rkey: wqe.rkey,
                imm: wqe.imm,
                total: wqe.len,
                bytes,
            };
            packets.push(Packet { to, psn: (sent.psn + index as u32) & MASK, what: What::Piece(piece) });
            offset += len;
        }
        packets.into_iter().for_each(|packet| self.send(number, packet));
        Ok(())
    }

    fn start_timer(&mut self, number: usize) {
        if self.qp_ref(number).timer.is_none() {
            self.set_timer(number, Timer::Ack, TIMEOUT_NS);
        }
    }

    fn set_timer(&mut self, number: usize, timer: Timer, after: u64) {
        let until = self.now + after;
        self.qp(number).timer = Some((timer, until));
        self.look_at_timer(number, until);
    }

    /// Most timers are set anew before they end: one event serves many.
    fn look_at_timer(&mut self, number: usize, when: u64) {
        let now = self.now;
        let qp = self.qp(number);
        if qp.looked_at.is_none_or(|at| at > when) {
            qp.looked_at = Some(when);
            self.at(when - now, Event::Timer(number));
        }
    }

    /// A timer may be over. Whether it was, of a queue pair that packets are sent by.
    pub fn timer(&mut self, number: usize) -> bool {
        let now = self.now;
        let qp = self.qp(number);
        if qp.looked_at == Some(now) {
            qp.looked_at = None;
        }
        let Some((timer, until)) = qp.timer else { return false };
        if until > now {
            self.look_at_timer(number, until);
            return false;
        }
        qp.timer = None;
        if !qp.takes() || qp.closing.is_some() || qp.sent.is_empty() {
            return false;
        }
        if timer == Timer::Ack {
            qp.retries += 1;
            if qp.retries > RETRIES {
                qp.fail(Fault::oldest(WcStatus::RetryExcErr, "the peer does not answer"));
                return true;
            }
        }
        self.send_again(number);
        true
    }

    fn send_again(&mut self, number: usize) {
        for at in 0..self.qp_ref(number).sent.len() {
            if let Err(status) = self.send_request(number, at) {
                return self.refused(number, Fault::oldest(status, UNREGISTERED));
            }
        }
        self.start_timer(number);
        self.transmit(number);
    }

    /// A packet has come.
    pub fn arrived(&mut self, Packet { to, psn, what }: Packet) {
        if !self.qp_ref(to).takes() {
            return;
        }
        match what {
            What::Piece(piece) => self.take(to, psn, &piece),
            What::Ack => self.acked(to, psn),
            What::Response(bytes) => self.responded(to, psn, &bytes),
            What::Nak(status) => {
                self.acked(to, psn.wrapping_sub(1) & MASK);
                if self.qp_ref(to).sent.front().is_some_and(|sent| distance(sent.psn, psn) < sent.pieces.len() as u32) {
                    self.qp(to).fail(Fault::oldest(status, "the peer has refused a request"));
                }
            }
            What::NotReady => {
                self.acked(to, psn.wrapping_sub(1) & MASK);
                let now = self.now;
                let qp = self.qp(to);
                if qp.sent.front().is_some_and(|sent| distance(sent.psn, psn) < sent.pieces.len() as u32) {
                    // The peer is there.
                    let pause = u64::from(qp.caps.min_rnr_timer_us) * 1_000;
                    (qp.not_before, qp.retries) = (now + pause, 0);
                    self.set_timer(to, Timer::Receive, pause);
                }
            }
        }
    }

    /// All up to this number were taken.
    fn acked(&mut self, number: usize, psn: u32) {
        let qp = self.qp(number);
        let mut any = false;
        while let Some(sent) = qp.sent.front() {
            let last = (sent.psn + sent.pieces.len() as u32 - 1) & MASK;
            // What a READ has read comes with its own answer.
            if is_before(psn, last) || qp.wq.sq.get(sent.request).opcode == Opcode::Read || distance(last, psn) > WINDOW {
                break;
            }
            let upto = sent.request + 1;
            qp.sent.pop_front();
            any = true;
            if let Err(fault) = qp.wq.ack(upto) {
                return qp.fail(fault);
            }
        }
        if any {
            self.progressed(number);
        }
    }

    fn progressed(&mut self, number: usize) {
        let qp = self.qp(number);
        (qp.retries, qp.timer) = (0, None);
        if !qp.sent.is_empty() {
            self.start_timer(number);
        }
        self.transmit(number);
    }

    fn responded(&mut self, number: usize, psn: u32, bytes: &[u8]) {
        self.acked(number, psn.wrapping_sub(1) & MASK);
        let qp = self.qp(number);
        let Some(sent) = qp.sent.front().filter(|sent| sent.psn == psn) else { return };
        let (wqe, upto) = (*qp.wq.sq.get(sent.request), sent.request + 1);
        if wqe.opcode != Opcode::Read || bytes.len() != wqe.len as usize {
            return;
        }
        if !bytes.is_empty() {
            match qp.wq.pin_local(wqe.lkey, wqe.addr, bytes.len(), Access::LOCAL_WRITE) {
                // SAFETY: the pin covers as many bytes.
                Ok(pin) => unsafe { mem::copy(bytes.as_ptr(), pin.as_ptr(), bytes.len()) },
                Err(status) => return qp.fail(Fault::oldest(status, "a READ names memory that is not registered")),
            }
            self.landed(wqe.addr, bytes.len());
        }
        let qp = self.qp(number);
        qp.sent.pop_front();
        match qp.wq.ack(upto) {
            Ok(()) => self.progressed(number),
            Err(fault) => qp.fail(fault),
        }
    }

    /// A piece of a request of the peer's.
    fn take(&mut self, number: usize, psn: u32, piece: &Piece) {
        let qp = self.qp_ref(number);
        let (Some(peer), expected) = (qp.peer, qp.expected) else { return };
        let answer = |what| Packet { to: peer, psn, what };
        if psn != expected {
            // One that was taken before is acknowledged again, as that may have been lost; a READ is done again.
            if is_before(psn, expected) && distance(psn, expected) <= WINDOW {
                let last = expected.wrapping_sub(1) & MASK;
                let what = match piece.opcode {
                    Opcode::Read => match self.read(number, piece) {
                        Ok(bytes) => answer(What::Response(bytes)),
                        Err(_) => return,
                    },
                    _ => Packet { to: peer, psn: last, what: What::Ack },
                };
                self.send(number, what);
            }
            return;
        }
        match self.execute(number, piece) {
            Ok(response) => {
                let qp = self.qp(number);
                qp.expected = (expected + 1) & MASK;
                match response {
                    Some(bytes) => self.send(number, answer(What::Response(bytes))),
                    None if piece.is_last => self.send(number, answer(What::Ack)),
                    None => {}
                }
            }
            Err(None) => {
                let waits = self.qp(number).wq.receiver_not_ready();
                self.send(number, answer(waits.map_or_else(What::Nak, |()| What::NotReady)));
            }
            Err(Some(status)) => {
                self.send(number, answer(What::Nak(status)));
                self.qp(number).fail(Fault::oldest(WcStatus::WrFlushErr, format!("a request of the peer's was refused: {status}")));
            }
        }
    }

    /// Does what a piece asks for. Errors: why it is refused; `None`: there is no receive request.
    fn execute(&mut self, number: usize, piece: &Piece) -> std::result::Result<Option<Vec<u8>>, Option<WcStatus>> {
        let (at, len) = (u64::from(piece.at), piece.bytes.len());
        let qp = self.qp_ref(number);
        let imm = matches!(piece.opcode, Opcode::SendWithImm | Opcode::WriteWithImm).then_some(piece.imm);
        let (target, is_send) = match piece.opcode {
            Opcode::Read => return self.read(number, piece).map(Some).map_err(Some),
            Opcode::Send | Opcode::SendWithImm => {
                let recv = qp.wq.peek_recv().ok_or(None)?;
                if at + len as u64 > u64::from(recv.sge.len) {
                    self.qp(number).wq.fail_recv(WcStatus::LocLenErr);
                    return Err(Some(WcStatus::RemInvReqErr));
                }
                ((recv.sge.addr + at, recv.sge.lkey, Access::LOCAL_WRITE), true)
            }
            _ => {
                if imm.is_some() && piece.is_last && !qp.wq.recv_available() {
                    return Err(None);
                }
                // All of it is allowed, or nothing lands.
                if piece.total > 0 {
                    qp.wq.pin_remote(piece.rkey, piece.remote_addr, piece.total as usize, Access::REMOTE_WRITE).map_err(Some)?;
                }
                ((piece.remote_addr.wrapping_add(at), piece.rkey, Access::REMOTE_WRITE), false)
            }
        };
        if len > 0 {
            let (addr, key, access) = target;
            let pin = match qp.wq.pin_remote(key, addr, len, access) {
                Ok(pin) => pin,
                Err(_) if is_send => {
                    self.qp(number).wq.fail_recv(WcStatus::LocProtErr);
                    return Err(Some(WcStatus::RemOpErr));
                }
                Err(status) => return Err(Some(status)),
            };
            // SAFETY: the pin covers as many bytes.
            unsafe { publish(pin.as_ptr(), &piece.bytes) };
            drop(pin);
            self.landed(addr, len);
        }
        let qp = self.qp(number);
        qp.received = piece.at + len as u32;
        if piece.is_last && (is_send || imm.is_some()) {
            let opcode = if is_send { WcOpcode::Recv } else { WcOpcode::RecvRdmaWithImm };
            qp.wq.complete_recv(opcode, qp.received, imm);
        }
        Ok(None)
    }

    fn read(&mut self, number: usize, piece: &Piece) -> std::result::Result<Vec<u8>, WcStatus> {
        let mut bytes = vec![0; piece.total as usize];
        if !bytes.is_empty() {
            let pin = self.qp_ref(number).wq.pin_remote(piece.rkey, piece.remote_addr, bytes.len(), Access::REMOTE_READ)?;
            // SAFETY: the pin covers as many bytes.
            unsafe { mem::copy(pin.as_ptr(), bytes.as_mut_ptr(), bytes.len()) };
        }
        Ok(bytes)
    }
}
