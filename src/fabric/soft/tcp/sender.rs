//! The sending half of a control stream: turns posted requests, acknowledgements and READ responses into frames, and hands as many as
//! possible to the kernel in one call, payload straight from registered memory. Driven by the thread that drives the queue pair.
//!
//! Frames wait in a small ring. What the peer is owed (acknowledgement, NAK) is not in it: it goes out between two frames as soon as
//! anything goes out, with the newest numbers.

use std::os::fd::RawFd;

use crate::base::mem;
use crate::base::stage::{self, Stage};
use crate::base::stats::RailCounter;
use crate::fabric::types::*;

use super::super::MAX_INLINE;
use super::super::queue::{Fault, WorkQueues, Wqe};
use super::codec::{
    CHUNK, FLAG_ASK, FLAG_IMM, FLAG_STREAMED, HEADER_SIZE, Header, Kind, SEGMENT_MAX, SEGMENT_MIN, STREAM_MIN, status_number,
};
use super::frame::{After, FRAMES, Frame, Gather, Source, lost};
use super::receiver::Receiver;
use super::ring::Ring;
use super::sys::{self, Io};

/// Bytes that wait at most before the next frame is added.
const QUEUED_MAX: usize = 2 << 20;
/// Requests of which something is still to be sent.
pub const WINDOW: usize = 64;

/// What the peer is owed: an acknowledgement, a NAK after it, or neither.
#[derive(Debug)]
struct Owed {
    bytes: [u8; 2 * HEADER_SIZE],
    len: usize,
    done: usize,
    accepted: u64,
    posted: u32,
    nak: bool,
}

/// A request whose bytes go out on the data streams.
#[derive(Debug, Clone, Copy, Default)]
pub struct Streamed {
    /// Its number in the send queue.
    pub request: u64,
    /// Bytes already given to a stream.
    pub given: u32,
    /// Bytes of a segment, but for the last.
    pub segment: u32,
}

/// How far the send queue is turned into frames and segments.
#[derive(Debug)]
pub struct Window {
    /// Requests begun; the send queue's `sent` are whole.
    opened: u64,
    /// Frames and segments that are left of each request between the two.
    left: [u32; WINDOW],
    /// Requests whose segments are not all given out, oldest first.
    pub streamed: Ring<Streamed, WINDOW>,
}

impl Window {
    fn open(&mut self, pieces: u32) {
        self.left[self.opened as usize % WINDOW] = pieces;
        self.opened += 1;
    }

    /// A frame or segment of `request` was handed to the kernel.
    pub fn piece_done(&mut self, wq: &mut WorkQueues, request: u64) {
        self.left[request as usize % WINDOW] -= 1;
        while wq.sq.sent != self.opened && self.left[wq.sq.sent as usize % WINDOW] == 0 {
            wq.sq.sent += 1;
        }
    }
}

/// The sending half.
pub struct Sender {
    frames: Ring<Frame, FRAMES>,
    /// Bytes of the frame at the front that are gone.
    front_done: usize,
    /// Bytes in `frames`.
    queued: usize,
    owed: Owed,
    /// What the peer knows.
    acked: u64,
    posted: u32,
    nak_sent: bool,
    /// Bytes of the request opened last that are in frames, while there are others.
    part: u32,
    /// One more than the last request whose acknowledgement was asked for.
    asked: u64,
    /// Receives of the peer that were used, modulo 2^32.
    used: u32,
    /// The request for which the peer was told that it waits.
    wait_told: Option<u64>,
    /// READs, and bytes of the one after them, that are in frames.
    answering: usize,
    answered: u32,
    /// Whose turn it is when both have something: READ responses, or requests.
    answer_next: bool,
    started: bool,
    /// How the send queue is being worked off.
    pub window: Window,
}

impl Sender {
    /// One that has sent nothing.
    pub fn new() -> Self {
        Sender {
            frames: Ring::new(),
            front_done: 0,
            queued: 0,
            owed: Owed { bytes: [0; 2 * HEADER_SIZE], len: 0, done: 0, accepted: 0, posted: 0, nak: false },
            acked: 0,
            posted: 0,
            nak_sent: false,
            part: 0,
            asked: 0,
            used: 0,
            wait_told: None,
            answering: 0,
            answered: 0,
            answer_next: false,
            started: false,
            window: Window { opened: 0, left: [0; WINDOW], streamed: Ring::new() },
        }
    }

    /// Whether the peer was told of everything that it waits for, and got every answer.
    pub fn flushed(&self, receiver: &Receiver) -> bool {
        self.owed.done == 0 && receiver.serving().is_empty() && self.acked >= receiver.asked()
    }

    /// Whether the refusal of a request was handed to the kernel.
    pub fn nak_sent(&self) -> bool {
        self.nak_sent
    }

    /// Makes frames of what there is to send, as far as there is room. `streams` is the number of data streams.
    pub fn fill(&mut self, wq: &mut WorkQueues, receiver: &mut Receiver, streams: usize) -> Result<(), Fault> {
        if !self.started {
            self.window.opened = receiver.base(wq);
            self.started = true;
        }
        while !self.frames.is_full() && self.queued < QUEUED_MAX {
            self.answer_next = !self.answer_next;
            let first = self.answer_next;
            if first && self.answer(receiver) {
                continue;
            }
            if !self.request(wq, receiver, streams)? && (first || !self.answer(receiver)) {
                break;
            }
        }
        Ok(())
    }

    /// One system call: sends from the front of what there is. None if there is nothing.
    pub fn send(&mut self, fd: RawFd, wq: &mut WorkQueues, receiver: &mut Receiver) -> Result<Option<Io>, Fault> {
        self.prepare_owed(wq, receiver);
        if self.owed.len == 0 && self.frames.is_empty() {
            return Ok(None);
        }
        let mut gather = Gather::new();
        let owed_first = self.owed.done > 0 || self.front_done == 0;
        if owed_first {
            gather.own(self.owed.bytes.get(self.owed.done..self.owed.len).unwrap_or(&[]));
        }
        for i in 0..self.frames.len() {
            let Some(frame) = self.frames.get(i) else { break };
            let skip = if i == 0 { self.front_done } else { 0 };
            if let Err(status) = gather.frame(wq, frame, skip) {
                if gather.bytes == 0 {
                    return Err(lost(frame, status));
                }
                break;
            }
            if i == 0 && !owed_first {
                gather.own(self.owed.bytes.get(..self.owed.len).unwrap_or(&[]));
            }
        }
        wq.stats.add(RailCounter::Syscalls, 1);
        // SAFETY: the elements point into `self`, or into registered memory pinned until after the call.
        let io = unsafe { sys::send(fd, gather.iovs()) };
        drop(gather);
        match io {
            Io::Moved(n) => self.sent(n, owed_first, wq, receiver),
            Io::BadMemory => {
                return Err(Fault::sending(WcStatus::LocProtErr, "registered memory cannot be read"));
            }
            _ => {}
        }
        Ok(Some(io))
    }

    /// Tries to send the newest acknowledgement, and a NAK, at once, which is possible between two frames.
    #[cold]
    pub fn send_last(&mut self, fd: RawFd, receiver: &Receiver, nak: Option<WcStatus>) {
        let news = nak.is_some() || receiver.ackable() != self.acked;
        if self.nak_sent || self.owed.done > 0 || self.front_done > 0 || !news {
            return;
        }
        self.owe(receiver.ackable(), self.posted, nak);
        let mut iov = [libc::iovec { iov_base: self.owed.bytes.as_mut_ptr().cast(), iov_len: self.owed.len }];
        // SAFETY: the element is in `self`. What cannot be sent is given up: the end of the stream tells the peer enough.
        unsafe { sys::send(fd, &mut iov) };
        self.acked = receiver.ackable();
        self.nak_sent = nak.is_some();
        self.owed.len = 0;
    }

    /// Brings what the peer is owed up to date, unless it is half sent.
    fn prepare_owed(&mut self, wq: &WorkQueues, receiver: &Receiver) {
        if self.owed.done > 0 {
            return;
        }
        let (accepted, posted) = (receiver.ackable(), receiver.posted(wq));
        let nak = receiver.refusal().filter(|_| !self.nak_sent && receiver.serving().is_empty());
        self.owed.len = 0;
        // Receives travel with acknowledgements. They get a frame of their own only if the peer knows of less than half of them.
        let known = self.posted.wrapping_sub(receiver.received());
        let few = posted != self.posted && u64::from(known) < wq.recvs().div_ceil(2);
        let waited_for = accepted != self.acked && (receiver.asked() > self.acked || !self.frames.is_empty());
        if !waited_for && nak.is_none() && !few {
            return;
        }
        let status = nak.map(|(status, _)| *status);
        self.owe(accepted, posted, status);
    }

    fn owe(&mut self, accepted: u64, posted: u32, nak: Option<WcStatus>) {
        let ack = Header { addr: accepted, arg: posted, ..Header::new(Kind::Ack) };
        self.owed.bytes[..HEADER_SIZE].copy_from_slice(&ack.encode());
        self.owed.len = HEADER_SIZE;
        self.owed.accepted = accepted;
        self.owed.posted = posted;
        self.owed.nak = nak.is_some();
        if let Some(status) = nak {
            let nak = Header { arg: status_number(status), ..Header::new(Kind::Nak) };
            self.owed.bytes[HEADER_SIZE..].copy_from_slice(&nak.encode());
            self.owed.len = 2 * HEADER_SIZE;
        }
    }

    /// Accounts for `n` bytes sent, in the order in which [`Sender::send`] gathered them.
    fn sent(&mut self, n: usize, owed_first: bool, wq: &mut WorkQueues, receiver: &mut Receiver) {
        let mut n = n;
        if !owed_first {
            n = self.frame_sent(n, wq, receiver);
            if self.front_done > 0 {
                return;
            }
        }
        let owed = n.min(self.owed.len - self.owed.done);
        self.owed.done += owed;
        n -= owed;
        if self.owed.len > 0 && self.owed.done == self.owed.len {
            self.acked = self.owed.accepted;
            self.posted = self.owed.posted;
            self.nak_sent |= self.owed.nak;
            self.owed.len = 0;
            self.owed.done = 0;
        }
        while n > 0 {
            n = self.frame_sent(n, wq, receiver);
        }
    }

    /// Accounts for at most `n` bytes of the frame at the front; returns what is left of `n`.
    fn frame_sent(&mut self, n: usize, wq: &mut WorkQueues, receiver: &mut Receiver) -> usize {
        let Some(frame) = self.frames.front() else { return 0 };
        let rest = frame.len() - self.front_done;
        if n < rest {
            self.front_done += n;
            stage::reach(Stage::SendHalf);
            return 0;
        }
        let copied = frame.own_len - HEADER_SIZE;
        self.queued -= frame.len();
        self.front_done = 0;
        let (after, moved) = (frame.after, (frame.payload_len() + copied) as u64);
        self.frames.pop();
        wq.stats.add(RailCounter::TxTcp, moved);
        match after {
            After::Nothing => {}
            After::Request(request) => self.window.piece_done(wq, request),
            After::Served => {
                receiver.served();
                self.answering -= 1;
            }
        }
        n - rest
    }

    fn push(&mut self, frame: Frame) {
        self.queued += frame.len();
        self.frames.push(frame);
    }

    /// Adds the next frame of a READ response; false if there is none.
    fn answer(&mut self, receiver: &Receiver) -> bool {
        let Some(read) = receiver.serving().get(self.answering) else { return false };
        let len = (read.len - self.answered).min(CHUNK);
        let addr = read.addr.wrapping_add(u64::from(self.answered));
        let header = Header { len, total: read.len, ..Header::new(Kind::Response) };
        self.answered += len;
        let last = self.answered == read.len;
        let source = if len == 0 { Source::Copied } else { Source::Remote { rkey: read.rkey, addr, len } };
        self.push(Frame::new(&header, source, if last { After::Served } else { After::Nothing }));
        if last {
            self.answering += 1;
            self.answered = 0;
        }
        true
    }

    /// Adds the next frame of our requests; false if there is none to add now.
    fn request(&mut self, wq: &mut WorkQueues, receiver: &mut Receiver, streams: usize) -> Result<bool, Fault> {
        if self.part > 0 {
            self.part(wq);
            return Ok(true);
        }
        let request = self.window.opened;
        if request == wq.sq.posted || request - wq.sq.sent >= WINDOW as u64 {
            return Ok(false);
        }
        let wqe = *wq.sq.get(request);
        let consumes = matches!(wqe.opcode, Opcode::Send | Opcode::SendWithImm | Opcode::WriteWithImm);
        if consumes && receiver.announced() == self.used {
            if self.wait_told == Some(request) {
                return Ok(false);
            }
            self.wait_told = Some(request);
            self.push(Frame::new(&Header::new(Kind::Wait), Source::Copied, After::Nothing));
            return Ok(true);
        }
        if wqe.opcode == Opcode::Read && receiver.reads_full() {
            return Ok(false);
        }
        let need = if wqe.opcode == Opcode::Read { Access::LOCAL_WRITE } else { Access::empty() };
        let mut frame = Frame::default();
        if wqe.len > 0 && !wqe.inline {
            let refused = match wq.pin_local(wqe.lkey, wqe.addr, wqe.len as usize, need) {
                Ok(pin) if wqe.opcode != Opcode::Read && wqe.len as usize <= MAX_INLINE => {
                    let mut bytes = [0; MAX_INLINE];
                    // SAFETY: the pin covers `len` bytes, which the guard keeps within `bytes`.
                    unsafe { mem::copy(pin.as_ptr(), bytes.as_mut_ptr(), wqe.len as usize) };
                    frame.copy(&bytes[..wqe.len as usize]);
                    None
                }
                Ok(_) => None,
                Err(status) => Some(status),
            };
            if let Some(status) = refused {
                // Reported only once every earlier request that somebody waits for is accepted, so that these complete.
                let its_turn = wq.sq.sent == request && wq.sq.acked >= self.asked;
                return if its_turn {
                    Err(Fault::sending(status, "a send request names local memory that is not registered"))
                } else {
                    Ok(false)
                };
            }
        } else if wqe.inline {
            frame.copy(wq.sq.inline_bytes(request));
        }
        if consumes {
            self.used = self.used.wrapping_add(1);
        }
        let asks = wqe.signaled || wqe.opcode == Opcode::Read || wq.sq.half_full();
        if asks {
            self.asked = request + 1;
        }
        self.open(frame, &wqe, request, receiver, streams);
        Ok(true)
    }

    /// Begins a request: its first frame, which has the payload already if it is short.
    fn open(&mut self, mut frame: Frame, wqe: &Wqe, request: u64, receiver: &mut Receiver, streams: usize) {
        let with_imm = matches!(wqe.opcode, Opcode::SendWithImm | Opcode::WriteWithImm);
        let mut header = Header { total: wqe.len, ..Header::new(Kind::Send) };
        if with_imm {
            header.flags |= FLAG_IMM;
            header.imm = wqe.imm;
        }
        if self.asked == request + 1 && wqe.opcode != Opcode::Read {
            header.flags |= FLAG_ASK;
        }
        if !matches!(wqe.opcode, Opcode::Send | Opcode::SendWithImm) {
            header.kind = if wqe.opcode == Opcode::Read { Kind::Read } else { Kind::Write };
            header.addr = wqe.remote_addr;
            header.rkey = wqe.rkey;
        }
        let mut pieces = 1;
        frame.after = After::Request(request);
        if wqe.opcode == Opcode::Read {
            receiver.await_read(request);
        } else if streams > 0 && wqe.len >= STREAM_MIN {
            let segment = (wqe.len / streams as u32).next_power_of_two().clamp(SEGMENT_MIN, SEGMENT_MAX);
            header.flags |= FLAG_STREAMED;
            header.arg = segment;
            pieces += wqe.len.div_ceil(segment);
            self.window.streamed.push(Streamed { request, given: 0, segment });
        } else {
            header.len = wqe.len.min(CHUNK);
            pieces = wqe.len.div_ceil(CHUNK).max(1);
            if frame.own_len == 0 && wqe.len > 0 {
                frame.source = Source::Local { lkey: wqe.lkey, addr: wqe.addr, len: header.len };
            }
            if header.len < wqe.len {
                self.part = header.len;
            }
        }
        frame.own[..HEADER_SIZE].copy_from_slice(&header.encode());
        frame.own_len = frame.own_len.max(HEADER_SIZE);
        self.window.open(pieces);
        self.push(frame);
    }

    /// Adds the next frame of the request opened last.
    fn part(&mut self, wq: &WorkQueues) {
        let request = self.window.opened - 1;
        let wqe = wq.sq.get(request);
        let len = (wqe.len - self.part).min(CHUNK);
        let header = Header { len, ..Header::new(Kind::Part) };
        let source = Source::Local { lkey: wqe.lkey, addr: wqe.addr.wrapping_add(u64::from(self.part)), len };
        self.part = if self.part + len == wqe.len { 0 } else { self.part + len };
        self.push(Frame::new(&header, source, After::Request(request)));
    }
}
