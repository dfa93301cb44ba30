//! The TCP wire of one queue pair: a control stream, full duplex, and as many data streams for long requests as RAILHEAD_TCP_STREAMS says (none by
//! default, 16 at most). Driven by the thread that
//! drives the queue pair, through [`TcpWire::progress`] and [`TcpWire::kick`]; nothing here blocks or, once made, allocates.
//!
//! * [`codec`]: the format. * [`receiver`]: executes the peer's frames. * [`sender`]: frames for the peer. * [`streams`]: the data
//!   streams. This file connects them to the sockets.
//!
//! Receiving never waits for sending: a frame is executed as it comes, or at worst left in its socket until the data streams, which are read
//! too, have completed the request before it. So two sides with full send buffers never wait for each other.

pub mod codec;
mod frame;
pub mod receiver;
mod ring;
mod sender;
pub mod socket;
mod streams;
mod sys;
#[cfg(test)]
mod tests;

use std::alloc::{Layout, handle_alloc_error};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};

use memmap2::MmapMut;

use crate::base::clock;
use crate::base::fd::OwnedFd;
use crate::base::stats::RailCounter;
use crate::fabric::types::*;

use super::work_queues::{Fault, WorkQueues};
use receiver::FrameReceiver;
use sender::FrameSender;
use socket::TcpSocket;
use streams::Streams;
use sys::{Backoff, Io};

/// Data streams at most.
pub const MAX_STREAMS: usize = 16;
/// Bytes that one call moves in each direction at most, roughly.
const BUDGET: usize = 2 << 20;
/// Bytes received at once beyond a payload that goes directly into the target memory.
const STAGING: usize = 64 << 10;
/// The same between long payloads: enough for the headers and small messages between two of them.
const BETWEEN: usize = 512;
/// How long data may still come on the data streams after the control stream has ended, in ns. The peer closes all at once, but the streams are
/// independent of each other.
const DATA_GRACE_NS: u64 = 2_000_000_000;
/// Polls for which requests that can wait are held at most.
const HELD_POLLS: u32 = 1024;
/// Bytes read away at once when closing.
const DRAIN: usize = 1 << 20;

/// The wire.
pub struct TcpWire {
    control: TcpSocket,
    streams: Streams,
    receiver: FrameReceiver,
    sender: FrameSender,
    /// Received, not yet passed to the receiver: `staging[start..end]`.
    staging: MmapMut,
    start: usize,
    end: usize,
    /// Since when and why the control stream receives nothing more.
    ended: Option<(u64, String)>,
    /// Since when and why some stream is broken.
    broken: Option<(u64, String)>,
    /// Whether the control stream waits for the peer to read.
    blocked: bool,
    /// Whether there was more to send than one call may.
    more: bool,
    /// The requests from this number on are held, and the polls since the first of them was posted.
    held: Option<(u64, u32)>,
    receiving: Backoff,
    sending: Backoff,
}

impl TcpWire {
    /// Over connected, nonblocking streams, at most [`MAX_STREAMS`] of `data`. Allocates all that it ever needs.
    pub fn new(control: OwnedFd, data: Vec<OwnedFd>) -> TcpWire {
        TcpWire {
            control: TcpSocket::new(control),
            streams: Streams::new(data),
            receiver: FrameReceiver::new(),
            sender: FrameSender::new(),
            staging: staging(),
            start: 0,
            end: 0,
            ended: None,
            broken: None,
            blocked: false,
            more: false,
            held: None,
            receiving: Backoff::default(),
            sending: Backoff::default(),
        }
    }

    /// Receives and executes what has come, sends what can be sent; true if anything moved. Calls that keep finding nothing make a
    /// system call ever more rarely: see [`TcpWire::wake`].
    ///
    /// Errors: what ends the queue pair, once everything that came before it was executed.
    #[inline]
    pub fn progress(&mut self, wq: &mut WorkQueues) -> Result<bool, Fault> {
        let mut moved = false;
        // What is done already is worth more than a system call that may find nothing.
        let is_due = (!wq.sq.has_sent() || wq.sq.half_full()) && self.receiving.due();
        if self.ended.is_some() || self.receiver.streamed().is_some() || is_due {
            moved = self.receive(wq)?;
        }
        self.receiver.check_rnr(wq);
        // Notes where our requests begin, before the first is sent.
        self.receiver.base(wq);
        if self.broken.is_none() && (!self.blocked || self.sending.due()) {
            moved |= self.transmit(wq)?;
        }
        if self.ended.is_some() || self.broken.is_some() || self.sender.nak_sent() {
            self.check_ended()?;
        }
        Ok(moved)
    }

    /// Sends requests that were just posted.
    ///
    /// Errors: what ends the queue pair.
    #[inline]
    pub fn kick(&mut self, wq: &mut WorkQueues) -> Result<(), Fault> {
        // Where an answer is expected now, the next poll tries the socket.
        self.held = None;
        if !self.blocked && self.broken.is_none() {
            self.transmit(wq)?;
        }
        if !wq.sq.has_sent() {
            self.receiving.reset();
        }
        Ok(())
    }

    /// Requests from this number on were just posted, and can wait: they go with the next ack or request, or after some polls, or before a sleep.
    #[inline]
    pub fn hold(&mut self, from: u64) {
        if self.held.is_none() {
            self.held = Some((from, 0));
        }
    }

    /// Whether requests are held.
    pub fn is_holding(&self) -> bool {
        self.held.is_some()
    }

    /// Whether there is nothing to send but what is held, for one poll more.
    #[inline]
    fn holds(&mut self, wq: &WorkQueues) -> bool {
        let Some((from, polls)) = &mut self.held else { return false };
        *polls += 1;
        let holds = *polls < HELD_POLLS && self.sender.window.begun() >= *from && !self.sender.has_more(wq, &self.receiver);
        if !holds {
            self.held = None;
        }
        holds
    }

    /// Makes the next [`TcpWire::progress`] try the sockets, even if it found nothing for long: one of them may be ready. Nothing is held any more.
    pub fn wake(&mut self) {
        self.held = None;
        self.receiving.reset();
        self.sending.reset();
    }

    /// Whether the kernel has taken every ack and READ response that the peer waits for.
    #[inline]
    pub fn flushed(&self) -> bool {
        self.sender.flushed(&self.receiver) || self.broken.is_some()
    }

    /// Whether it needs no memory of a request that it has sent, and the socket takes care of the rest.
    pub fn copies(&self) -> bool {
        self.streams.len() == 0
    }

    /// Whether the peer has told of a receive.
    pub fn knows_receives(&self) -> bool {
        self.receiver.peer_recvs_posted() > 0
    }

    /// Descriptors, and whether something waits for each to become writable.
    pub fn fds(&self) -> impl Iterator<Item = (RawFd, bool)> {
        std::iter::once((self.control.as_raw_fd(), self.blocked || self.more)).chain(self.streams.fds())
    }

    /// For how many nanoseconds at least the peer's host has not answered, if it does not.
    pub fn unanswered_for(&self) -> Option<u64> {
        self.fds().filter_map(|(fd, _)| socket::unanswered_for(fd)).max()
    }

    /// Shuts the streams down for sending and reads away what has come. The caller keeps the descriptors, and reads away what comes, until the peer
    /// has closed its ends too: closing them earlier may reset the connection before the peer has read the last acks.
    pub fn close(mut self) -> Vec<TcpSocket> {
        if self.broken.is_none() {
            // The ack of requests that were executed, but for which no ack was requested: they should not fail.
            self.sender.send_last(self.control.as_raw_fd(), &self.receiver);
        }
        let fds: Vec<TcpSocket> = std::iter::once(self.control).chain(self.streams.into_fds().map(TcpSocket::new)).collect();
        for fd in &fds {
            drain(fd, &mut self.staging);
            // An error means that the connection is closed already.
            let _ = socket2::SockRef::from(&**fd).shutdown(Shutdown::Write);
        }
        fds
    }

    #[inline]
    fn receive(&mut self, wq: &mut WorkQueues) -> Result<bool, Fault> {
        let mut moved = false;
        let mut budget = BUDGET;
        loop {
            if self.receiver.streamed().is_some() {
                let result = self.streams.receive(wq, &mut self.receiver)?;
                moved |= result.moved;
                self.set_broken(result.broken);
            }
            self.apply(wq)?;
            if self.receiver.held() || self.ended.is_some() || budget == 0 {
                return Ok(moved);
            }
            let Some(n) = self.recv(wq)? else { return Ok(moved) };
            moved = true;
            self.apply(wq)?;
            if n.short {
                // The socket was empty a moment ago; the next call tries again.
                return Ok(moved);
            }
            budget = budget.saturating_sub(n.bytes);
        }
    }

    /// Passes what is staged to the receiver, as far as it takes it.
    #[inline]
    fn apply(&mut self, wq: &mut WorkQueues) -> Result<(), Fault> {
        if self.start != self.end || self.receiver.held() {
            let staged = self.staging.get(self.start..self.end).unwrap_or(&[]);
            self.start += self.receiver.feed(wq, staged)?;
        }
        Ok(())
    }

    /// One system call on the control stream; `staging` is empty. None if nothing has come.
    #[inline]
    fn recv(&mut self, wq: &mut WorkQueues) -> Result<Option<Received>, Fault> {
        let target = self.receiver.direct_target(wq)?;
        let mut iov = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 2];
        let mut direct = 0;
        if let Some((pin, n)) = &target {
            direct = *n;
            iov[0] = libc::iovec { iov_base: pin.as_ptr().cast(), iov_len: direct };
        }
        let ahead = if self.receiver.bulk() { BETWEEN.min(self.staging.len()) } else { self.staging.len() };
        iov[1] = libc::iovec { iov_base: self.staging.as_mut_ptr().cast(), iov_len: ahead };
        wq.stats.add(RailCounter::Syscalls, 1);
        // SAFETY: `recv` requires writable elements. The first is empty, or lies in registered memory that `target` keeps pinned until after the call; the
        // second is the beginning of `staging`, borrowed mutably, with nothing in it.
        let io = unsafe { sys::recv(self.control.as_raw_fd(), &mut iov) };
        drop(target);
        match io {
            Io::Moved(n) => {
                self.receiving.reset();
                let direct = n.min(direct);
                (self.start, self.end) = (0, n - direct);
                if direct > 0 {
                    self.receiver.direct_received(wq, direct)?;
                }
                return Ok(Some(Received { bytes: n, short: n < direct + ahead }));
            }
            Io::Blocked => self.receiving.miss(),
            Io::Closed => self.end_control("the peer closed the connection".to_string()),
            Io::Failed(error) => self.end_control(error.to_string()),
            Io::BadMemory => self.receiver.unwritable(wq)?,
        }
        Ok(None)
    }

    #[inline]
    fn transmit(&mut self, wq: &mut WorkQueues) -> Result<bool, Fault> {
        let mut moved = false;
        let mut budget = BUDGET;
        if self.holds(wq) {
            return Ok(false);
        }
        while budget > 0 {
            self.sender.queue_frames(wq, &mut self.receiver, self.streams.len())?;
            let Some(io) = self.sender.send(self.control.as_raw_fd(), wq, &mut self.receiver)? else {
                self.blocked = false;
                break;
            };
            match io {
                Io::Moved(n) => {
                    moved = true;
                    self.blocked = false;
                    self.sending.reset();
                    budget = budget.saturating_sub(n);
                }
                Io::Failed(error) => {
                    self.set_broken(Some(error.to_string()));
                    return Ok(true);
                }
                _ => {
                    self.blocked = true;
                    self.sending.miss();
                    break;
                }
            }
        }
        if self.streams.len() > 0 {
            let base = self.receiver.base(wq);
            let result = self.streams.transmit(wq, base, &mut self.sender.window)?;
            moved |= result.moved;
            self.set_broken(result.broken);
        }
        self.more = budget == 0;
        Ok(moved)
    }

    #[cold]
    fn end_control(&mut self, why: String) {
        self.ended = Some((clock::now(), why));
    }

    #[inline]
    fn set_broken(&mut self, why: Option<String>) {
        if let (Some(why), None) = (why, &self.broken) {
            self.broken = Some((clock::now(), why));
            // What came before is read first: the peer may have said why.
            self.receiving.reset();
        }
    }

    /// Fails the queue pair if the wire has ended and everything that came before was executed.
    #[cold]
    fn check_ended(&mut self) -> Result<(), Fault> {
        if self.sender.nak_sent() {
            let why = self.receiver.refusal().map_or_else(String::new, |(_, why)| why.clone());
            return Err(Fault::oldest(WcStatus::WrFlushErr, why));
        }
        let Some((since, why)) = self.ended.as_ref().or(self.broken.as_ref()) else { return Ok(()) };
        let drained = self.ended.is_some() || self.receiver.held() || self.receiving.idle();
        let more_may_come =
            self.receiver.streamed().is_some() && !self.streams.all_ended() && clock::now().saturating_sub(*since) < DATA_GRACE_NS;
        if !drained || more_may_come {
            return Ok(());
        }
        let cut = if self.receiver.between_frames() { "" } else { " in the middle of a request" };
        Err(Fault::oldest(WcStatus::RetryExcErr, format!("lost the peer{cut}: {why}")))
    }
}

/// Whole pages, so that those that nothing was received into take no memory. If there is no address space the process aborts, as for any
/// allocation.
fn staging() -> MmapMut {
    MmapMut::map_anon(STAGING).unwrap_or_else(|_| handle_alloc_error(Layout::new::<[u8; STAGING]>()))
}

/// The result of [`TcpWire::recv`].
struct Received {
    bytes: usize,
    /// Whether there was room for more.
    short: bool,
}

/// Reads away what has come, up to a bound: closing a socket with unread bytes resets its connection.
fn drain(fd: &OwnedFd, scratch: &mut [u8]) {
    let mut left = DRAIN;
    while left > 0 {
        let mut iov = [libc::iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: scratch.len() }];
        // SAFETY: `recv` requires writable elements: the only one is `scratch`, borrowed mutably.
        match unsafe { sys::recv(fd.as_raw_fd(), &mut iov) } {
            Io::Moved(n) => left = left.saturating_sub(n),
            _ => return,
        }
    }
}
