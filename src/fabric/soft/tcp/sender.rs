//! The sending half of a control stream: turns posted requests and READ responses into frames, and sends as many as possible per system call,
//! payload directly from registered memory. Driven by the thread that drives the queue pair.
//!
//! Frames wait in a small ring. The pending ack (or NAK) is not in it: it is sent between two frames with the next system call, with the newest
//! numbers.

use std::os::fd::RawFd;

use crate::base::mem;
use crate::base::stage::{self, Stage};
use crate::base::stats::RailCounter;
use crate::fabric::types::*;

use super::super::MAX_INLINE;
use super::super::work_queues::{Fault, WorkQueues, Wqe};
use super::codec::{
    CHUNK, FLAG_ACK_REQ, FLAG_IMM, FLAG_STREAMED, HEADER_SIZE, Header, Kind, SEGMENT_MAX, SEGMENT_MIN, STREAM_MIN, status_number,
};
use super::frame::{FRAMES, Frame, Gather, OnSent, Source, lost};
use super::receiver::FrameReceiver;
use super::ring::Ring;
use super::sys::{self, Io};

/// No frame is added while more bytes than this wait.
const QUEUED_MAX: usize = 2 << 20;
/// Requests at most that are begun and not sent whole.
pub const WINDOW: usize = 64;

/// An ack to be sent, and a NAK after it; or neither.
#[derive(Debug)]
struct PendingAck {
    bytes: [u8; 2 * HEADER_SIZE],
    len: usize,
    /// Bytes sent.
    done: usize,
    /// What it says: requests acked, receives posted, and whether there is a NAK.
    acked: u64,
    recvs_posted: u32,
    nak: bool,
}

/// A request whose bytes go out on the data streams.
#[derive(Debug, Clone, Copy, Default)]
pub struct Streamed {
    /// Its number in the send queue.
    pub request: u64,
    /// Bytes already assigned to a data stream.
    pub assigned: u32,
    /// Bytes of a segment, but for the last.
    pub segment: u32,
}

/// The requests that are being sent: those between the send queue's `sent` and `begun`.
#[derive(Debug)]
pub struct Window {
    /// Requests begun.
    begun: u64,
    /// Frames and segments of each request that are not sent.
    pieces_left: [u32; WINDOW],
    /// Requests whose segments are not all assigned to a data stream, oldest first.
    pub streamed: Ring<Streamed, WINDOW>,
}

impl Window {
    /// Requests begun.
    pub fn begun(&self) -> u64 {
        self.begun
    }

    fn begin(&mut self, pieces: u32) {
        self.pieces_left[self.begun as usize % WINDOW] = pieces;
        self.begun += 1;
    }

    /// The kernel has taken a frame or segment of `request`.
    pub fn piece_done(&mut self, wq: &mut WorkQueues, request: u64) {
        self.pieces_left[request as usize % WINDOW] -= 1;
        while wq.sq.sent != self.begun && self.pieces_left[wq.sq.sent as usize % WINDOW] == 0 {
            wq.sq.sent += 1;
        }
    }
}

/// The sending half.
pub struct FrameSender {
    frames: Ring<Frame, FRAMES>,
    /// Bytes sent of the oldest frame.
    front_done: usize,
    /// Bytes in `frames`.
    queued: usize,
    ack: PendingAck,
    /// What the peer was told: requests acked, receives posted, and whether a NAK was sent.
    acked: u64,
    recvs_posted: u32,
    nak_sent: bool,
    /// Bytes of the request begun last that are in frames; 0 if all of it is.
    part_at: u32,
    /// One more than the last request for which an ack was requested.
    ack_requested: u64,
    /// Receives of the peer that our requests consumed, modulo 2^32.
    recvs_used: u32,
    /// The request for which a `Wait` frame was sent.
    wait_sent: Option<u64>,
    /// READ responses that are in frames as a whole, and bytes of the next one that are.
    responses_queued: usize,
    response_at: u32,
    /// Whether a READ response is queued next if there are requests too.
    response_next: bool,
    started: bool,
    /// The requests that are being sent.
    pub window: Window,
}

impl FrameSender {
    /// One that has sent nothing.
    pub fn new() -> Self {
        FrameSender {
            frames: Ring::new(),
            front_done: 0,
            queued: 0,
            ack: PendingAck { bytes: [0; 2 * HEADER_SIZE], len: 0, done: 0, acked: 0, recvs_posted: 0, nak: false },
            acked: 0,
            recvs_posted: 0,
            nak_sent: false,
            part_at: 0,
            ack_requested: 0,
            recvs_used: 0,
            wait_sent: None,
            responses_queued: 0,
            response_at: 0,
            response_next: false,
            started: false,
            window: Window { begun: 0, pieces_left: [0; WINDOW], streamed: Ring::new() },
        }
    }

    /// Whether the kernel has taken every ack that the peer requested and every READ response.
    pub fn flushed(&self, receiver: &FrameReceiver) -> bool {
        self.ack.done == 0 && receiver.reads_to_answer().is_empty() && self.acked >= receiver.ack_requested()
    }

    /// Whether there is anything to send besides requests that are not begun.
    pub fn has_more(&mut self, wq: &WorkQueues, receiver: &FrameReceiver) -> bool {
        self.prepare_ack(wq, receiver);
        self.ack.len > 0 || !self.frames.is_empty() || !self.window.streamed.is_empty() || !receiver.reads_to_answer().is_empty()
    }

    /// Whether the kernel has taken a NAK.
    pub fn nak_sent(&self) -> bool {
        self.nak_sent
    }

    /// Queues frames of READ responses and requests, in turn, as far as there is room. `streams` is the number of data streams.
    pub fn queue_frames(&mut self, wq: &mut WorkQueues, receiver: &mut FrameReceiver, streams: usize) -> Result<(), Fault> {
        if !self.started {
            self.window.begun = receiver.base(wq);
            self.started = true;
        }
        while !self.frames.is_full() && self.queued < QUEUED_MAX {
            self.response_next = !self.response_next;
            let first = self.response_next;
            if first && self.queue_response(receiver) {
                continue;
            }
            if !self.queue_request(wq, receiver, streams)? && (first || !self.queue_response(receiver)) {
                break;
            }
        }
        Ok(())
    }

    /// One system call: sends the pending ack and the oldest frames. None if there is nothing to send.
    pub fn send(&mut self, fd: RawFd, wq: &mut WorkQueues, receiver: &mut FrameReceiver) -> Result<Option<Io>, Fault> {
        self.prepare_ack(wq, receiver);
        if self.ack.len == 0 && self.frames.is_empty() {
            return Ok(None);
        }
        let ack_first = self.ack.done > 0 || self.front_done == 0;
        let io = {
            let mut gather = Gather::new();
            if ack_first {
                gather.own(self.ack.bytes.get(self.ack.done..self.ack.len).unwrap_or(&[]));
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
                if i == 0 && !ack_first {
                    gather.own(self.ack.bytes.get(..self.ack.len).unwrap_or(&[]));
                }
            }
            wq.stats.add(RailCounter::Syscalls, 1);
            // SAFETY: `send` requires readable elements: those of `gather` are, while it lives, which is beyond the call.
            unsafe { sys::send(fd, gather.iovs()) }
        };
        match io {
            Io::Moved(n) => self.on_sent(n, ack_first, wq, receiver),
            Io::BadMemory => {
                return Err(Fault::sending(WcStatus::LocProtErr, "registered memory cannot be read"));
            }
            _ => {}
        }
        Ok(Some(io))
    }

    /// Tries to send the newest ack before the wire is closed. Only possible between two frames.
    #[cold]
    pub fn send_last(&mut self, fd: RawFd, receiver: &FrameReceiver) {
        if self.nak_sent || self.ack.done > 0 || self.front_done > 0 || receiver.ackable() == self.acked {
            return;
        }
        self.encode_ack(receiver.ackable(), self.recvs_posted, None);
        let mut iov = [libc::iovec { iov_base: self.ack.bytes.as_mut_ptr().cast(), iov_len: self.ack.len }];
        // SAFETY: `send` requires readable elements: the only one is the ack in `self`. If it cannot be sent, the end of the stream tells the peer enough.
        unsafe { sys::send(fd, &mut iov) };
        self.acked = receiver.ackable();
        self.ack.len = 0;
    }

    /// Brings the pending ack up to date, unless part of it is sent.
    fn prepare_ack(&mut self, wq: &WorkQueues, receiver: &FrameReceiver) {
        if self.ack.done > 0 {
            return;
        }
        let (acked, recvs_posted) = (receiver.ackable(), receiver.recvs_posted(wq));
        let nak = receiver.refusal().filter(|_| !self.nak_sent && receiver.reads_to_answer().is_empty());
        self.ack.len = 0;
        // Newly posted receives are told with the next ack. They get an ack of their own only if the peer knows of less than half of them.
        let known = self.recvs_posted.wrapping_sub(receiver.recvs_completed());
        let few = recvs_posted != self.recvs_posted && u64::from(known) < wq.recvs().div_ceil(2);
        let waited_for = acked != self.acked && (receiver.ack_requested() > self.acked || !self.frames.is_empty());
        if !waited_for && nak.is_none() && !few {
            return;
        }
        let status = nak.map(|(status, _)| *status);
        self.encode_ack(acked, recvs_posted, status);
    }

    fn encode_ack(&mut self, acked: u64, recvs_posted: u32, nak: Option<WcStatus>) {
        let ack = Header { addr: acked, arg: recvs_posted, ..Header::new(Kind::Ack) };
        self.ack.bytes[..HEADER_SIZE].copy_from_slice(&ack.encode());
        self.ack.len = HEADER_SIZE;
        self.ack.acked = acked;
        self.ack.recvs_posted = recvs_posted;
        self.ack.nak = nak.is_some();
        if let Some(status) = nak {
            let nak = Header { arg: status_number(status), ..Header::new(Kind::Nak) };
            self.ack.bytes[HEADER_SIZE..].copy_from_slice(&nak.encode());
            self.ack.len = 2 * HEADER_SIZE;
        }
    }

    /// The kernel has taken `n` bytes, in the order in which [`FrameSender::send`] gathered them.
    fn on_sent(&mut self, n: usize, ack_first: bool, wq: &mut WorkQueues, receiver: &mut FrameReceiver) {
        let mut n = n;
        if !ack_first {
            n = self.on_frame_sent(n, wq, receiver);
            if self.front_done > 0 {
                return;
            }
        }
        let ack = n.min(self.ack.len - self.ack.done);
        self.ack.done += ack;
        n -= ack;
        if self.ack.len > 0 && self.ack.done == self.ack.len {
            self.acked = self.ack.acked;
            self.recvs_posted = self.ack.recvs_posted;
            self.nak_sent |= self.ack.nak;
            self.ack.len = 0;
            self.ack.done = 0;
        }
        while n > 0 {
            n = self.on_frame_sent(n, wq, receiver);
        }
    }

    /// The kernel has taken up to `n` bytes of the oldest frame; returns what is left of `n`.
    fn on_frame_sent(&mut self, n: usize, wq: &mut WorkQueues, receiver: &mut FrameReceiver) -> usize {
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
        let (on_sent, moved) = (frame.on_sent, (frame.payload_len() + copied) as u64);
        self.frames.pop();
        wq.stats.add(RailCounter::TxTcp, moved);
        match on_sent {
            OnSent::Nothing => {}
            OnSent::Request(request) => self.window.piece_done(wq, request),
            OnSent::ReadAnswered => {
                receiver.read_answered();
                self.responses_queued -= 1;
            }
        }
        n - rest
    }

    fn push(&mut self, frame: Frame) {
        self.queued += frame.len();
        self.frames.push(frame);
    }

    /// Queues the next frame of a READ response; false if there is none.
    fn queue_response(&mut self, receiver: &FrameReceiver) -> bool {
        let Some(read) = receiver.reads_to_answer().get(self.responses_queued) else { return false };
        let len = (read.len - self.response_at).min(CHUNK);
        let addr = read.addr.wrapping_add(u64::from(self.response_at));
        let header = Header { len, total: read.len, ..Header::new(Kind::Response) };
        self.response_at += len;
        let last = self.response_at == read.len;
        let source = if len == 0 { Source::Copied } else { Source::Remote { rkey: read.rkey, addr, len } };
        self.push(Frame::new(&header, source, if last { OnSent::ReadAnswered } else { OnSent::Nothing }));
        if last {
            self.responses_queued += 1;
            self.response_at = 0;
        }
        true
    }

    /// Queues the next frame of our requests; false if there is none to queue now.
    fn queue_request(&mut self, wq: &mut WorkQueues, receiver: &mut FrameReceiver, streams: usize) -> Result<bool, Fault> {
        if self.part_at > 0 {
            self.queue_part(wq);
            return Ok(true);
        }
        let request = self.window.begun;
        if request == wq.sq.posted || request - wq.sq.sent >= WINDOW as u64 {
            return Ok(false);
        }
        let wqe = *wq.sq.get(request);
        let consumes = matches!(wqe.opcode, Opcode::Send | Opcode::SendWithImm | Opcode::WriteWithImm);
        if consumes && receiver.peer_recvs_posted() == self.recvs_used {
            if self.wait_sent == Some(request) {
                return Ok(false);
            }
            self.wait_sent = Some(request);
            self.push(Frame::new(&Header::new(Kind::Wait), Source::Copied, OnSent::Nothing));
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
                    // SAFETY: `copy` requires a source and a target that are valid for `len` bytes: the pin covers them, and the guard keeps them within `bytes`.
                    unsafe { mem::copy(pin.as_ptr(), bytes.as_mut_ptr(), wqe.len as usize) };
                    frame.copy(&bytes[..wqe.len as usize]);
                    None
                }
                Ok(_) => None,
                Err(status) => Some(status),
            };
            if let Some(status) = refused {
                // Reported only once every earlier request for which an ack was requested is acked, so that these complete.
                let its_turn = wq.sq.sent == request && wq.sq.acked >= self.ack_requested;
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
            self.recvs_used = self.recvs_used.wrapping_add(1);
        }
        let ack_req = wqe.signaled && !(wqe.when_sent && wq.sq.copies) || wqe.opcode == Opcode::Read || wq.sq.half_full();
        if ack_req {
            self.ack_requested = request + 1;
        }
        self.begin_request(frame, &wqe, request, receiver, streams);
        Ok(true)
    }

    /// Begins a request: queues its first frame, which holds the payload already if it is short.
    fn begin_request(&mut self, mut frame: Frame, wqe: &Wqe, request: u64, receiver: &mut FrameReceiver, streams: usize) {
        let with_imm = matches!(wqe.opcode, Opcode::SendWithImm | Opcode::WriteWithImm);
        let mut header = Header { total: wqe.len, ..Header::new(Kind::Send) };
        if with_imm {
            header.flags |= FLAG_IMM;
            header.imm = wqe.imm;
        }
        if self.ack_requested == request + 1 && wqe.opcode != Opcode::Read {
            header.flags |= FLAG_ACK_REQ;
        }
        if !matches!(wqe.opcode, Opcode::Send | Opcode::SendWithImm) {
            header.kind = if wqe.opcode == Opcode::Read { Kind::Read } else { Kind::Write };
            header.addr = wqe.remote_addr;
            header.rkey = wqe.rkey;
        }
        let mut pieces = 1;
        frame.on_sent = OnSent::Request(request);
        if wqe.opcode == Opcode::Read {
            receiver.read_sent(request);
        } else if streams > 0 && wqe.len >= STREAM_MIN {
            let segment = (wqe.len / streams as u32).next_power_of_two().clamp(SEGMENT_MIN, SEGMENT_MAX);
            header.flags |= FLAG_STREAMED;
            header.arg = segment;
            pieces += wqe.len.div_ceil(segment);
            self.window.streamed.push(Streamed { request, assigned: 0, segment });
        } else {
            header.len = wqe.len.min(CHUNK);
            pieces = wqe.len.div_ceil(CHUNK).max(1);
            if frame.own_len == 0 && wqe.len > 0 {
                frame.source = Source::Local { lkey: wqe.lkey, addr: wqe.addr, len: header.len };
            }
            if header.len < wqe.len {
                self.part_at = header.len;
            }
        }
        frame.own[..HEADER_SIZE].copy_from_slice(&header.encode());
        frame.own_len = frame.own_len.max(HEADER_SIZE);
        self.window.begin(pieces);
        self.push(frame);
    }

    /// Queues the next frame of the request begun last.
    fn queue_part(&mut self, wq: &WorkQueues) {
        let request = self.window.begun - 1;
        let wqe = wq.sq.get(request);
        let len = (wqe.len - self.part_at).min(CHUNK);
        let header = Header { len, ..Header::new(Kind::Part) };
        let source = Source::Local { lkey: wqe.lkey, addr: wqe.addr.wrapping_add(u64::from(self.part_at)), len };
        self.part_at = if self.part_at + len == wqe.len { 0 } else { self.part_at + len };
        self.push(Frame::new(&header, source, OnSent::Request(request)));
    }
}
