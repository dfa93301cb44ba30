//! The responder's half of a shared-memory queue pair: checks what the peer's descriptors ask for, moves the bytes, and accepts or
//! refuses. Driven by the thread that drives the queue pair. Nothing read from the segment is believed.

mod share;

use std::io;
use std::sync::atomic::{Ordering, fence};

use super::super::mr::Pin;
use super::super::publish::{publish, publish_words};
use super::super::queue::{Fault, WorkQueues};
use super::grant::Grants;
use super::inline::unpack;
use super::layout::{DESC_INLINE, DESCS, Desc, GRANTS, Geometry, Head, Lane, PAYLOAD_WORDS, flag, op, place};
use super::tx::{Tx, round};
use super::{Maps, Segment, stream};
use crate::base::log::{self, log_info};
use crate::base::mem;
use crate::base::stage::{self, Stage};
use crate::base::stats::{RailCounter, RailStats};
use crate::fabric::types::*;

/// Descriptors handled before the caller gets its turn.
const DESC_BUDGET: u32 = 64;
/// Bytes moved before the caller gets its turn, and by one system call.
const COPY_BUDGET: usize = 1024 * 1024;
/// Longest WRITE that is published in order (DESIGN: a flow-control slot).
const ORDERED_MAX: usize = 64;

/// The responder's half.
pub struct Rx {
    lane: usize,
    geometry: Geometry,
    /// Descriptors done with.
    head: u64,
    /// Requests accepted.
    accepted: u64,
    /// Bytes of the descriptor at the head that are in place.
    at: usize,
    /// Bytes of the SEND under way that came in earlier descriptors.
    send_at: u32,
    /// And of the WRITE_WITH_IMM under way.
    write_at: u32,
    /// Whether the rest of the descriptor at the head comes through the fill stream.
    filling: bool,
    /// Whether the descriptor at the head waits for memory to be mapped.
    pub lacks_memory: bool,
    /// Copies that the requester shares, and the descriptors that they are of.
    offers: Grants,
    offered: [Request; GRANTS],
    /// Bytes of each that this side has read, and counted.
    read: [u32; GRANTS],
    /// The first descriptor that may be shared.
    shared_from: u64,
    /// Why a part of a shared copy could not be read.
    unread: Option<io::Result<usize>>,
    /// Where what is received is counted.
    stats: RailStats,
}

/// A descriptor, copied out of the segment.
#[derive(Clone, Copy, Default)]
struct Request {
    op: u8,
    place: u8,
    flags: u8,
    /// Which words of an inline payload are in `payload`.
    words: u8,
    len: u32,
    addr: u64,
    rkey: u32,
    imm: u32,
    payload: [u64; PAYLOAD_WORDS],
}

impl Request {
    /// What the words of a descriptor say whose last word is `head`.
    fn of(head: Head, desc: &Desc) -> Request {
        let [addr, key, payload @ .., _] = &desc.words;
        let payload = payload.each_ref().map(|word| word.load(Ordering::Relaxed));
        let key = key.load(Ordering::Relaxed);
        Request {
            op: head.op,
            place: head.place,
            flags: head.flags,
            words: head.words,
            len: if head.place == place::INLINE { u32::from(head.inline) } else { payload[2] as u32 },
            addr: addr.load(Ordering::Relaxed),
            rkey: key as u32,
            imm: (key >> 32) as u32,
            payload,
        }
    }

    /// Whether it completes a receive request.
    fn completes(&self) -> bool {
        completes(self.flags)
    }

    /// Bytes from here to the request's end: what is checked at once, so that a request that must be refused moves nothing.
    fn rest(&self) -> usize {
        let said = if self.place == place::BOUNCE { self.payload[1].min(u64::from(u32::MAX)) as usize } else { 0 };
        said.max(self.len as usize)
    }
}

/// Whether a descriptor with these flags completes a receive request.
#[inline]
fn completes(flags: u8) -> bool {
    flags & (flag::LAST | flag::IMM) == flag::LAST | flag::IMM
}

/// What became of the descriptor at the head.
enum Outcome {
    /// It is in place.
    Done,
    /// More of it can be moved at the next turn.
    Partly,
    /// Nothing can be done for it just now.
    Waits,
}

impl Rx {
    /// A half that has seen nothing.
    pub fn new(lane: usize, segment: &Segment, stats: RailStats) -> Self {
        Rx {
            lane,
            geometry: segment.geometry,
            head: 0,
            accepted: 0,
            at: 0,
            send_at: 0,
            write_at: 0,
            filling: false,
            lacks_memory: false,
            offers: Grants::new(segment.shm.clone(), lane, segment.peer.clone()),
            offered: [Request::default(); GRANTS],
            read: [0; GRANTS],
            unread: None,
            stats,
            shared_from: if segment.pulls_allowed { 0 } else { u64::MAX },
        }
    }

    /// Lets the peer write no further part; what has to be kept until it has finished the one that it may be writing.
    pub fn close(mut self) -> Option<Grants> {
        self.offers.refuse().then_some(self.offers)
    }

    /// Handles what the peer has published, and tells `tx` what it says of our requests; true if anything moved. Stops before a
    /// descriptor that names memory which `maps` lacks, and sets `lacks_memory`. If that is set, the one at the head is handled in any case.
    #[inline(always)]
    pub fn receive(&mut self, wq: &mut WorkQueues, tx: &mut Tx, segment: &Segment, maps: &mut Maps) -> Result<bool, Fault> {
        let mut moved = false;
        let mut copied = 0;
        for _ in 0..DESC_BUDGET {
            let desc = segment.desc(self.lane, self.head);
            let Some(head) = Rx::published(desc, self.head) else {
                tx.heard_out(wq);
                break;
            };
            tx.hear(wq, head.accepted)?;
            if head.op == op::WRITE && head.place == place::INLINE && usize::from(head.inline) <= DESC_INLINE {
                if !self.write_inline(head, desc, wq, segment)? {
                    break;
                }
                self.finish(place::INLINE, head.flags, 0, segment);
                moved = true;
                continue;
            }
            let request = Request::of(head, desc);
            if request.place == place::MAPPED {
                // Memory is passed before a descriptor that names it is published: the caller looks for it, once.
                self.lacks_memory = !self.lacks_memory && maps.find(request.payload[1], 0, 0).is_none();
                if self.lacks_memory {
                    break;
                }
            }
            let before = self.at;
            match self.handle(request, wq, segment, maps)? {
                Outcome::Done => {
                    copied += (request.len as usize).saturating_sub(before);
                    // Of a bounced one, what it took of the ring.
                    let end = request.payload[0].wrapping_add(round(u64::from(request.len)));
                    self.finish(request.place, request.flags, end, segment);
                    moved = true;
                }
                Outcome::Partly => return Ok(true),
                Outcome::Waits => {
                    moved |= self.at != before;
                    break;
                }
            }
            if copied >= COPY_BUDGET {
                break;
            }
        }
        Ok(moved)
    }

    /// Does what can be done for the descriptor at the head.
    #[inline(never)]
    fn handle(&mut self, request: Request, wq: &mut WorkQueues, segment: &Segment, maps: &mut Maps) -> Result<Outcome, Fault> {
        match request.op {
            op::WRITE if request.place == place::PRIVATE && self.shares(&request) => self.share(&request, wq, segment),
            op::WRITE => self.write(&request, wq, segment, maps),
            op::SEND => self.send(&request, wq, segment, maps),
            op::READ => self.read(&request, wq, segment),
            other => Err(self.refuse(segment, WcStatus::RemInvReqErr, format!("the peer published a descriptor of unknown kind {other}"))),
        }
    }

    /// The head of descriptor `number`, if it was published.
    #[inline(always)]
    fn published(desc: &Desc, number: u64) -> Option<Head> {
        let [.., head] = &desc.words;
        // Pairs with the Release in `Tx::publish`.
        Head::decode(head.load(Ordering::Acquire), number)
    }

    /// Copies descriptor `number` out of the segment, if it was published.
    fn look(&self, segment: &Segment, number: u64) -> Option<Request> {
        let desc = segment.desc(self.lane, number);
        Some(Request::of(Rx::published(desc, number)?, desc))
    }

    /// Accepts the descriptor at the head. `end` is where a bounced one ends in the ring.
    #[inline(always)]
    fn finish(&mut self, place: u8, flags: u8, end: u64, segment: &Segment) {
        let lane = segment.lane(self.lane);
        self.head += 1;
        self.at = 0;
        self.filling = false;
        if place == place::BOUNCE {
            // Pairs with the Acquire in `Tx::reserve`.
            lane.bounce_head.store(end, Ordering::Release);
        }
        // Pairs with the Acquire in `Tx::transmit`.
        lane.desc_head.store(self.head, Ordering::Release);
        if flags & flag::LAST != 0 {
            self.accepted += 1;
            // Pairs with the Acquire in `Tx::take_acceptance`.
            lane.accepted.store(self.accepted, Ordering::Release);
        }
    }

    /// Does a WRITE whose bytes are in its descriptor, as those of small messages and of announcements are; false if it has to wait.
    #[inline(always)]
    fn write_inline(&mut self, head: Head, desc: &Desc, wq: &mut WorkQueues, segment: &Segment) -> Result<bool, Fault> {
        let [addr, key, payload @ .., _] = &desc.words;
        let (addr, key, len) = (addr.load(Ordering::Relaxed), key.load(Ordering::Relaxed), usize::from(head.inline));
        if completes(head.flags) && !wq.recv_available() {
            return self.not_ready(wq, segment).map(|_| false);
        }
        if len > 0 {
            let pin = match wq.pin_remote(key as u32, addr, len, Access::REMOTE_WRITE) {
                Ok(pin) => pin,
                Err(status) => return Err(self.refuse_write(segment, status, len, addr, key as u32)),
            };
            let payload = payload.each_ref().map(|word| word.load(Ordering::Relaxed));
            let words = unpack(head.words, &payload, len);
            // SAFETY: the pin covers `len` bytes, at most DESC_INLINE, which the words hold.
            unsafe { publish_words(pin.as_ptr(), &words, len) };
            self.stats.add(RailCounter::RxInline, len as u64);
        }
        self.written(head.flags, len as u32, (key >> 32) as u32, wq);
        Ok(true)
    }

    #[inline(always)]
    fn write(&mut self, request: &Request, wq: &mut WorkQueues, segment: &Segment, maps: &mut Maps) -> Result<Outcome, Fault> {
        if request.completes() && !wq.recv_available() {
            return self.not_ready(wq, segment);
        }
        if request.len > 0 {
            let left = request.rest().saturating_sub(self.at);
            let addr = request.addr.wrapping_add(self.at as u64);
            let pin = match wq.pin_remote(request.rkey, addr, left, Access::REMOTE_WRITE) {
                Ok(pin) => pin,
                Err(status) => return Err(self.refuse_write(segment, status, left, addr, request.rkey)),
            };
            match self.fetch(request, segment, maps, &pin)? {
                Outcome::Done => {}
                unfinished => return Ok(unfinished),
            }
        }
        self.written(request.flags, request.len, request.imm, wq);
        Ok(Outcome::Done)
    }

    #[cold]
    #[inline(never)]
    fn refuse_write(&self, segment: &Segment, status: WcStatus, len: usize, addr: u64, rkey: u32) -> Fault {
        self.refuse(segment, status, format!("the peer may not write {len} bytes at {addr:#x} with key {rkey:#x}"))
    }

    /// A WRITE's bytes are in place.
    #[inline]
    fn written(&mut self, flags: u8, len: u32, imm: u32, wq: &mut WorkQueues) {
        if completes(flags) {
            wq.complete_recv(WcOpcode::RecvRdmaWithImm, self.write_at.saturating_add(len), Some(imm));
            self.write_at = 0;
        } else if flags & flag::IMM != 0 {
            self.write_at = self.write_at.saturating_add(len);
        }
    }

    fn send(&mut self, request: &Request, wq: &mut WorkQueues, segment: &Segment, maps: &mut Maps) -> Result<Outcome, Fault> {
        let Some(recv) = wq.peek_recv() else { return self.not_ready(wq, segment) };
        if self.send_at as usize + request.rest() > recv.sge.len as usize {
            wq.fail_recv(WcStatus::LocLenErr);
            return Err(self.refuse(
                segment,
                WcStatus::RemInvReqErr,
                format!("the peer sent more than the {} bytes of the receive request", recv.sge.len),
            ));
        }
        if request.len > 0 {
            let left = (request.len as usize).saturating_sub(self.at);
            let addr = recv.sge.addr.wrapping_add(u64::from(self.send_at)).wrapping_add(self.at as u64);
            // Nothing lands unless all of it may.
            let rest = request.rest().saturating_sub(self.at);
            let fits = if rest > left { wq.pin_local(recv.sge.lkey, addr, rest, Access::LOCAL_WRITE).map(drop) } else { Ok(()) };
            let pin = match fits.and_then(|()| wq.pin_local(recv.sge.lkey, addr, left, Access::LOCAL_WRITE)) {
                Ok(pin) => pin,
                Err(status) => {
                    wq.fail_recv(status);
                    return Err(self.refuse(
                        segment,
                        WcStatus::RemOpErr,
                        "a receive request names memory that is not registered for writing",
                    ));
                }
            };
            match self.fetch(request, segment, maps, &pin)? {
                Outcome::Done => {}
                unfinished => return Ok(unfinished),
            }
        }
        self.send_at += request.len;
        if request.flags & flag::LAST != 0 {
            let imm = (request.flags & flag::IMM != 0).then_some(request.imm);
            wq.complete_recv(WcOpcode::Recv, self.send_at, imm);
            self.send_at = 0;
        }
        Ok(Outcome::Done)
    }

    #[cold]
    fn read(&mut self, request: &Request, wq: &mut WorkQueues, segment: &Segment) -> Result<Outcome, Fault> {
        let left = (request.len as usize).saturating_sub(self.at);
        if left > 0 {
            let addr = request.addr.wrapping_add(self.at as u64);
            let pin = match wq.pin_remote(request.rkey, addr, left, Access::REMOTE_READ) {
                Ok(pin) => pin,
                Err(status) => {
                    return Err(self.refuse(
                        segment,
                        status,
                        format!("the peer may not read {left} bytes at {addr:#x} with key {:#x}", request.rkey),
                    ));
                }
            };
            let lane = segment.lane(self.lane);
            // SAFETY: the pin vouches for `left` bytes, the segment for the stream.
            let n = unsafe { stream::write(segment.resp(self.lane), &lane.resp_tail, &lane.resp_head, pin.as_ptr(), left) };
            self.at += n;
            self.stats.add(RailCounter::TxBounce, n as u64);
            if n < left {
                return Ok(Outcome::Waits);
            }
        }
        Ok(Outcome::Done)
    }

    /// Moves the bytes of the descriptor that are still missing to the beginning of `to`, which is at least as long.
    #[inline(always)]
    fn fetch(&mut self, request: &Request, segment: &Segment, maps: &mut Maps, to: &Pin) -> Result<Outcome, Fault> {
        // Of a bounced piece it covers more: the rest of the request.
        let left = if request.place == place::INLINE { to.len() } else { (request.len as usize).saturating_sub(self.at).min(to.len()) };
        if request.place == place::INLINE && left <= DESC_INLINE {
            let words = unpack(request.words, &request.payload, left);
            // SAFETY: the pin covers at least `left` bytes, which the words hold.
            unsafe { publish_words(to.as_ptr(), &words, left) };
            self.stats.add(RailCounter::RxInline, left as u64);
            return Ok(Outcome::Done);
        }
        self.fetch_bulk(*request, segment, maps, to, left)
    }

    /// What is not in the descriptor.
    #[inline(never)]
    fn fetch_bulk(&mut self, request: Request, segment: &Segment, maps: &mut Maps, to: &Pin, left: usize) -> Result<Outcome, Fault> {
        let request = &request;
        match request.place {
            place::BOUNCE if left as u64 <= self.geometry.bounce - (request.payload[0] & (self.geometry.bounce - 1)) => {
                let from = segment.ring(self.lane, request.payload[0], left);
                if left <= ORDERED_MAX {
                    let mut bytes = [0u8; ORDERED_MAX];
                    // SAFETY: `from` is valid for `left` bytes by the guard, `bytes` by the test; the peer may be changing them, which
                    // spoils the copy and nothing else.
                    unsafe { mem::copy(from, bytes.as_mut_ptr(), left) };
                    // SAFETY: the pin covers at least `left` bytes.
                    unsafe { publish(to.as_ptr(), &bytes[..left]) };
                } else {
                    // SAFETY: as above.
                    unsafe { mem::copy(from, to.as_ptr(), left) };
                }
                self.stats.add(RailCounter::RxBounce, left as u64);
            }
            place::PRIVATE if self.filling => return self.fill(segment, to, left),
            place::PRIVATE => return self.pull(request, segment, to, left),
            place::MAPPED => {
                let offset = request.payload[0].wrapping_add(self.at as u64);
                let n = left.min(COPY_BUDGET);
                let Some(from) = maps.find(request.payload[1], offset, n) else {
                    return Err(self.refuse(segment, WcStatus::RemInvReqErr, "the peer named memory that it did not pass"));
                };
                // SAFETY: `from` is valid for `n` bytes of a sealed mapping, the pin covers at least `left >= n` bytes.
                unsafe { mem::copy(from, to.as_ptr(), n) };
                self.stats.add(RailCounter::RxMapped, n as u64);
                return self.advance(n, left, segment);
            }
            _ => {
                return Err(self.refuse(
                    segment,
                    WcStatus::RemInvReqErr,
                    format!("the peer published a descriptor with {left} bytes in place {}", request.place),
                ));
            }
        }
        Ok(Outcome::Done)
    }

    /// Reads from the peer's private memory.
    fn pull(&mut self, request: &Request, segment: &Segment, to: &Pin, left: usize) -> Result<Outcome, Fault> {
        let n = left.min(COPY_BUDGET);
        let from = request.payload[0].wrapping_add(self.at as u64);
        self.stats.add(RailCounter::Syscalls, 1);
        // SAFETY: the pin covers at least `left >= n` bytes.
        match unsafe { segment.read_peer(from, to.as_ptr(), n) } {
            Ok(n) if n > 0 => {
                self.stats.add(RailCounter::RxCma, n as u64);
                self.advance(n, left, segment)
            }
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Err(Fault::oldest(WcStatus::RetryExcErr, "the peer process is gone")),
            refused => {
                self.ask_for_fill(segment, refused);
                Ok(Outcome::Waits)
            }
        }
    }

    /// The peer's memory cannot be read: asks for what is missing of the descriptor at the head.
    #[cold]
    fn ask_for_fill(&mut self, segment: &Segment, refused: io::Result<usize>) {
        let why = refused.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into());
        log_info!(log::NET, "reading the peer's memory was refused ({why}); it goes through the bounce ring from now on");
        self.stats.add(RailCounter::CmaRefused, 1);
        let lane = segment.lane(self.lane);
        lane.fill_from.store(self.at as u64, Ordering::Relaxed);
        // Pairs with the Acquire in `Tx::begin_fill`.
        lane.fill_want.store(self.head + 1, Ordering::Release);
        self.filling = true;
        self.shared_from = u64::MAX;
    }

    /// Takes bytes that the peer copies for us because we cannot read its memory.
    #[cold]
    fn fill(&mut self, segment: &Segment, to: &Pin, left: usize) -> Result<Outcome, Fault> {
        let lane: &Lane = segment.lane(self.lane);
        // SAFETY: the pin covers at least `left` bytes, the segment vouches for the stream.
        let n = unsafe { stream::read(segment.fill(self.lane), &lane.fill_tail, &lane.fill_head, to.as_ptr(), left) };
        self.stats.add(RailCounter::RxBounce, n as u64);
        if n == 0 {
            return Ok(Outcome::Waits);
        }
        let outcome = self.advance(n, left, segment)?;
        if n == left {
            lane.fill_want.store(0, Ordering::Release);
        }
        Ok(outcome)
    }

    /// Counts `n` bytes that came out of memory which the peer may have taken back meanwhile.
    #[inline]
    fn advance(&mut self, n: usize, left: usize, segment: &Segment) -> Result<Outcome, Fault> {
        self.trust(segment)?;
        self.at += n;
        stage::reach(Stage::RecvHalf);
        Ok(if n == left { Outcome::Done } else { Outcome::Partly })
    }

    /// Whether bytes just read were still the peer's to send.
    #[inline]
    fn trust(&self, segment: &Segment) -> Result<(), Fault> {
        // The look at the flags must not move before the copy. Pairs with the SeqCst store in `expose::revoke`, which precedes any reuse of the
        // memory, as the one in `ShmWire::close` does.
        fence(Ordering::SeqCst);
        if segment.lane(self.lane).revoked.load(Ordering::SeqCst) != 0 {
            return Err(Fault::oldest(WcStatus::WrFlushErr, "the peer deregistered memory that it was sending from"));
        }
        if segment.peer_closed() {
            return Err(Fault::oldest(WcStatus::RetryExcErr, "the peer closed its queue pair while it was sending"));
        }
        Ok(())
    }

    #[cold]
    #[inline(never)]
    fn not_ready(&mut self, wq: &mut WorkQueues, segment: &Segment) -> Result<Outcome, Fault> {
        match wq.receiver_not_ready() {
            Ok(()) => Ok(Outcome::Waits),
            Err(status) => Err(self.refuse(segment, status, "no receive request was posted in time")),
        }
    }

    /// Refuses the descriptor at the head: the peer reports `status`, this side flushes.
    #[cold]
    fn refuse(&self, segment: &Segment, status: WcStatus, why: impl Into<String>) -> Fault {
        // Pairs with the Acquire in `Tx::take_acceptance`.
        segment.lane(self.lane).nak.store(super::status_code(status), Ordering::Release);
        Fault::oldest(WcStatus::WrFlushErr, why)
    }
}

const _: () = assert!(DESCS.is_power_of_two() && DESC_INLINE <= 64);
