//! The data streams of a queue pair: a long request is cut into segments, and each goes to the first stream that has room for it. Driven by the
//! thread that drives the queue pair.
//!
//! The receiving half reads a stream only while its next segment belongs to the oldest request of the control stream, so that requests are
//! stored strictly in order. That cannot deadlock: each stream carries its segments in the order of the requests.

use std::os::fd::{AsRawFd, RawFd};

use crate::base::fd::OwnedFd;
use crate::base::stats::RailCounter;
use crate::fabric::types::*;

use super::super::work_queues::{Fault, MAX_LEN, WorkQueues};
use super::codec::{SEGMENT_HEADER_SIZE, SEGMENT_MIN, SegmentHeader};
use super::receiver::FrameReceiver;
use super::sender::Window;
use super::sys::{self, Backoff, Io};

/// Bytes that one stream moves per call at most, roughly.
const BUDGET: usize = 1 << 20;
/// Segments that a request can have.
const MAX_SEGMENTS: usize = (MAX_LEN / SEGMENT_MIN) as usize;

/// A segment being sent.
#[derive(Debug, Clone, Copy)]
struct OutgoingSegment {
    request: u64,
    header: [u8; SEGMENT_HEADER_SIZE],
    offset: u32,
    len: u32,
    /// Bytes sent, header included.
    done: usize,
}

/// A segment being received.
#[derive(Debug, Clone, Copy)]
struct IncomingSegment {
    header: SegmentHeader,
    /// Whether it was checked against its request.
    admitted: bool,
    /// Bytes received, header not included.
    done: u32,
}

struct Stream {
    fd: OwnedFd,
    outgoing: Option<OutgoingSegment>,
    blocked: bool,
    incoming: Option<IncomingSegment>,
    header: [u8; SEGMENT_HEADER_SIZE],
    header_len: usize,
    /// Why nothing more comes.
    ended: Option<String>,
    backoff: Backoff,
}

/// The data streams.
pub struct Streams {
    streams: Vec<Stream>,
    /// The request that is being received, and a bit for each of its segments: whether it has begun to come.
    seen_of: Option<u64>,
    seen: Box<[u64]>,
    /// The stream that is tried first.
    first: usize,
}

/// The result of one call for all streams.
pub struct PollResult {
    /// Whether something moved.
    pub moved: bool,
    /// Why a stream is broken, if one is.
    pub broken: Option<String>,
}

impl Streams {
    /// Over nonblocking, connected streams.
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        let stream = |fd| Stream {
            fd,
            outgoing: None,
            blocked: false,
            incoming: None,
            header: [0; SEGMENT_HEADER_SIZE],
            header_len: 0,
            ended: None,
            backoff: Backoff::default(),
        };
        let seen = if fds.is_empty() { 0 } else { MAX_SEGMENTS / 64 };
        Streams { streams: fds.into_iter().map(stream).collect(), seen_of: None, seen: vec![0; seen].into_boxed_slice(), first: 0 }
    }

    /// How many.
    #[inline]
    pub fn len(&self) -> usize {
        self.streams.len()
    }

    /// Descriptors, and whether each waits for the peer to read.
    pub fn fds(&self) -> impl Iterator<Item = (RawFd, bool)> {
        self.streams.iter().map(|stream| (stream.fd.as_raw_fd(), stream.blocked))
    }

    /// Descriptors, to be closed by the caller.
    pub fn into_fds(self) -> impl Iterator<Item = OwnedFd> {
        self.streams.into_iter().map(|stream| stream.fd)
    }

    /// Whether no stream can bring anything more.
    pub fn all_ended(&self) -> bool {
        self.streams.iter().all(|stream| stream.ended.is_some())
    }

    /// Sends as much as the streams take. The next segment goes to the first stream that takes at least a byte of it.
    pub fn transmit(&mut self, wq: &mut WorkQueues, base: u64, window: &mut Window) -> Result<PollResult, Fault> {
        let mut result = PollResult { moved: false, broken: None };
        let count = self.streams.len();
        for i in 0..count {
            let at = (self.first + i) % count;
            let Some(stream) = self.streams.get_mut(at) else { break };
            let mut budget = BUDGET;
            while budget > 0 && result.broken.is_none() {
                let fresh = stream.outgoing.is_none();
                let Some(segment) = stream.outgoing.or_else(|| next_segment(wq, base, window)) else {
                    // Another stream has taken the segment that this one had no room for.
                    stream.blocked = false;
                    break;
                };
                if stream.blocked && !stream.backoff.due() {
                    break;
                }
                match stream.send(wq, &segment)? {
                    Io::Moved(n) => {
                        result.moved = true;
                        stream.blocked = false;
                        stream.backoff.reset();
                        budget = budget.saturating_sub(n);
                        if fresh {
                            assign(window, segment.len, wq);
                        }
                        let done = segment.done + n;
                        stream.outgoing = Some(OutgoingSegment { done, ..segment });
                        if done == SEGMENT_HEADER_SIZE + segment.len as usize {
                            stream.outgoing = None;
                            wq.stats.add(RailCounter::TxTcp, u64::from(segment.len));
                            window.piece_done(wq, segment.request);
                        }
                    }
                    Io::Failed(error) => result.broken = Some(error.to_string()),
                    Io::BadMemory => return Err(Fault::sending(WcStatus::LocProtErr, "registered memory cannot be read")),
                    Io::Blocked | Io::Closed => {
                        stream.blocked = true;
                        stream.backoff.miss();
                        break;
                    }
                }
            }
        }
        self.first = if count > 0 { (self.first + 1) % count } else { 0 };
        Ok(result)
    }

    /// Receives segments of the oldest request, until it is complete or no more have come.
    pub fn receive(&mut self, wq: &mut WorkQueues, receiver: &mut FrameReceiver) -> Result<PollResult, Fault> {
        let mut result = PollResult { moved: false, broken: None };
        for at in 0..self.streams.len() {
            let mut budget = BUDGET;
            while budget > 0 {
                let Some((index, total, segment)) = receiver.streamed() else { return Ok(result) };
                if self.seen_of != Some(index) {
                    self.seen_of = Some(index);
                    self.seen.fill(0);
                }
                let Some(stream) = self.streams.get_mut(at) else { break };
                if stream.ended.is_some() || !stream.admit(index, total, segment, &mut self.seen)? {
                    break;
                }
                match stream.recv(wq, receiver)? {
                    Some(Io::Moved(n)) => {
                        result.moved = true;
                        budget = budget.saturating_sub(n);
                    }
                    Some(Io::Closed) => stream.ended = Some("the peer closed a data stream".to_string()),
                    Some(Io::Failed(error)) => stream.ended = Some(error.to_string()),
                    Some(Io::BadMemory) => receiver.unwritable(wq)?,
                    Some(Io::Blocked) => break,
                    None => return Ok(result),
                }
            }
        }
        result.broken = self.streams.iter().find_map(|stream| stream.ended.clone());
        Ok(result)
    }
}

/// The next segment that is not assigned to a stream.
fn next_segment(wq: &WorkQueues, base: u64, window: &Window) -> Option<OutgoingSegment> {
    let job = window.streamed.front()?;
    let len = (wq.sq.get(job.request).len - job.assigned).min(job.segment);
    let header = SegmentHeader { index: job.request - base, offset: job.assigned, len };
    Some(OutgoingSegment { request: job.request, header: header.encode(), offset: job.assigned, len, done: 0 })
}

/// A stream has taken the segment that [`next_segment`] returned.
fn assign(window: &mut Window, len: u32, wq: &WorkQueues) {
    if let Some(job) = window.streamed.front_mut() {
        job.assigned += len;
        if job.assigned == wq.sq.get(job.request).len {
            window.streamed.pop();
        }
    }
}

impl Stream {
    fn send(&self, wq: &mut WorkQueues, segment: &OutgoingSegment) -> Result<Io, Fault> {
        let wqe = *wq.sq.get(segment.request);
        let own = segment.header.get(segment.done..).unwrap_or(&[]);
        let into = segment.done.saturating_sub(SEGMENT_HEADER_SIZE);
        let addr = wqe.addr.wrapping_add(u64::from(segment.offset) + into as u64);
        let pin = wq
            .pin_local(wqe.lkey, addr, segment.len as usize - into, Access::empty())
            .map_err(|status| Fault::sending(status, "memory was deregistered while it was being sent"))?;
        let mut iov = [
            libc::iovec { iov_base: own.as_ptr().cast_mut().cast(), iov_len: own.len() },
            libc::iovec { iov_base: pin.as_ptr().cast(), iov_len: pin.len() },
        ];
        wq.stats.add(RailCounter::Syscalls, 1);
        // SAFETY: `send` requires readable elements. The first is the rest of the header in `segment`, which is borrowed; the second is registered memory
        // that `pin` keeps so until after the call.
        Ok(unsafe { sys::send(self.fd.as_raw_fd(), &mut iov) })
    }

    /// Whether the stream's next bytes may be read for request `index`: a header, or payload of a segment of that request.
    fn admit(&mut self, index: u64, total: u32, segment: u32, seen: &mut [u64]) -> Result<bool, Fault> {
        let Some(incoming) = &mut self.incoming else { return Ok(true) };
        if incoming.admitted || incoming.header.index > index {
            return Ok(incoming.header.index == index);
        }
        let SegmentHeader { index: of, offset, len } = incoming.header;
        let number = (offset / segment) as usize;
        let fits = of == index && offset < total && offset % segment == 0 && len == (total - offset).min(segment);
        match seen.get_mut(number / 64) {
            Some(word) if fits && *word & (1 << (number % 64)) == 0 => *word |= 1 << (number % 64),
            _ => {
                let why = format!("the peer sent a segment that its request does not have: {len} bytes at {offset} of request {of}");
                return Err(Fault::oldest(WcStatus::GeneralErr, why));
            }
        }
        incoming.admitted = true;
        Ok(true)
    }

    /// One system call: the rest of an admitted segment and the next header. None if the request was refused.
    fn recv(&mut self, wq: &mut WorkQueues, receiver: &mut FrameReceiver) -> Result<Option<Io>, Fault> {
        let mut iov = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2];
        let mut pin = None;
        if let Some(incoming) = &self.incoming {
            let Some(target) = receiver.pin_segment(wq, incoming.header.offset + incoming.done, incoming.header.len - incoming.done) else {
                return Ok(None);
            };
            iov[0] = libc::iovec { iov_base: target.as_ptr().cast(), iov_len: target.len() };
            pin = Some(target);
        }
        if let Some(header) = self.header.get_mut(self.header_len..) {
            iov[1] = libc::iovec { iov_base: header.as_mut_ptr().cast(), iov_len: header.len() };
        }
        wq.stats.add(RailCounter::Syscalls, 1);
        // SAFETY: `recv` requires writable elements. The first is empty, or registered memory that `pin` keeps so until after the call; the second is empty,
        // or the rest of the header in `self`, borrowed mutably.
        let io = unsafe { sys::recv(self.fd.as_raw_fd(), &mut iov) };
        drop(pin);
        if let Io::Moved(n) = io {
            let mut headers = n;
            if let Some(incoming) = &mut self.incoming {
                let payload = n.min((incoming.header.len - incoming.done) as usize);
                headers -= payload;
                incoming.done += payload as u32;
                if incoming.done == incoming.header.len {
                    self.incoming = None;
                }
                receiver.segment_received(wq, payload)?;
            }
            self.header_len += headers;
            if self.header_len == SEGMENT_HEADER_SIZE {
                self.header_len = 0;
                let header = SegmentHeader::decode(&self.header);
                self.incoming = Some(IncomingSegment { header, admitted: false, done: 0 });
            }
        }
        Ok(Some(io))
    }
}
