//! The responder's half of a shared-memory queue pair: receives the peer's descriptors, checks them, moves their bytes, and acks or NAKs the
//! requests. Driven by the thread that drives the queue pair. Nothing that is read from the segment is trusted.

mod granted;

use std::io;
use std::sync::atomic::{Ordering, fence};

use super::super::memory::SharedPages;
use super::super::mr::Pin;
use super::super::publish::{publish, publish_words};
use super::super::work_queues::{Fault, WorkQueues};
use super::grant::Grants;
use super::inline::unpack;
use super::layout::{DESC_INLINE, DESCS, Desc, DirectionState, GRANTS, Geometry, PAYLOAD_WORDS, Trailer, flag, op, source};
use super::requester::{MAPPED_MAX, Requester, round};
use super::{PeerMappings, Segment, stream};
use crate::base::log::{self, log_info};
use crate::base::mem;
use crate::base::stage::{self, Stage};
use crate::base::stats::{RailCounter, RailStats};
use crate::fabric::types::*;

/// Descriptors handled per call at most.
const DESC_BUDGET: u32 = 64;
/// Bytes moved per call, and by one system call, at most.
const COPY_BUDGET: usize = 1024 * 1024;
/// Longest WRITE that is published in order (the contract of [`crate::fabric`]).
const ORDERED_MAX: usize = 64;

/// The responder's half.
pub struct Responder {
    direction: usize,
    geometry: Geometry,
    /// Descriptors consumed. The one of this number is at the head.
    head: u64,
    /// Requests acked.
    acked: u64,
    /// Bytes of the descriptor at the head that are in place.
    at: usize,
    /// Bytes in place of a SEND that comes in several descriptors.
    send_at: u32,
    /// Bytes in place of a WRITE_WITH_IMM that comes in several descriptors.
    write_at: u32,
    /// Whether the rest of the descriptor at the head comes through the fill stream.
    filling: bool,
    /// Whether the descriptor at the head names memory that is not mapped yet.
    pub needs_mapping: bool,
    /// Memory of ours that the peer is to map, and the keys of what it was offered.
    pub offer: Option<Offer>,
    offered: Vec<u32>,
    /// Grants to the requester, and the descriptors that they are for.
    grants: Grants,
    granted: [DescCopy; GRANTS],
    /// Bytes of each of these descriptors that this side has read, and counted.
    read: [u32; GRANTS],
    /// The first descriptor that may get a grant.
    grants_from: u64,
    /// The system call's result when a part of a granted copy could not be read.
    read_error: Option<io::Result<usize>>,
    /// Where received bytes are counted.
    stats: RailStats,
}

/// Memory of ours that the peer may write to by itself.
pub struct Offer {
    /// What the peer knows it by.
    pub key: u32,
    /// Id of the allocation.
    pub allocation: u32,
}

/// A descriptor, copied out of the segment, where the peer can no longer change it.
#[derive(Clone, Copy, Default)]
struct DescCopy {
    op: u8,
    source: u8,
    flags: u8,
    /// Which words of an inline payload are in `payload`.
    words: u8,
    len: u32,
    addr: u64,
    rkey: u32,
    imm: u32,
    payload: [u64; PAYLOAD_WORDS],
}

impl DescCopy {
    /// A copy of descriptor `shared`, whose last word was loaded as `trailer`.
    fn of(trailer: Trailer, shared: &Desc) -> DescCopy {
        let [addr, key, payload @ .., _] = &shared.words;
        let payload = payload.each_ref().map(|word| word.load(Ordering::Relaxed));
        let key = key.load(Ordering::Relaxed);
        DescCopy {
            op: trailer.op,
            source: trailer.source,
            flags: trailer.flags,
            words: trailer.words,
            len: if trailer.source == source::INLINE { u32::from(trailer.inline) } else { payload[2] as u32 },
            addr: addr.load(Ordering::Relaxed),
            rkey: key as u32,
            imm: (key >> 32) as u32,
            payload,
        }
    }

    /// Whether it consumes a receive request.
    fn completes(&self) -> bool {
        completes(self.flags)
    }

    /// Bytes from here to the request's end. They are checked at once, so that a request that is refused moves nothing.
    fn rest(&self) -> usize {
        let claimed =
            if matches!(self.source, source::BOUNCE | source::PLACED) { self.payload[1].min(u64::from(u32::MAX)) as usize } else { 0 };
        claimed.max(self.len as usize)
    }
}

/// Whether a descriptor with these flags consumes a receive request.
#[inline]
fn completes(flags: u8) -> bool {
    flags & (flag::LAST | flag::IMM) == flag::LAST | flag::IMM
}

/// What became of the descriptor at the head.
enum Outcome {
    /// All its bytes are in place.
    Done,
    /// Some of its bytes were moved; the next call can move more.
    Partial,
    /// Nothing can be moved now.
    Blocked,
}

impl Responder {
    /// A half that has received nothing.
    pub fn new(direction: usize, segment: &Segment, stats: RailStats) -> Self {
        Responder {
            direction,
            geometry: segment.geometry,
            head: 0,
            acked: 0,
            at: 0,
            send_at: 0,
            write_at: 0,
            filling: false,
            needs_mapping: false,
            offer: None,
            offered: Vec::new(),
            grants: Grants::new(segment.shm.clone(), direction, segment.peer.clone()),
            granted: [DescCopy::default(); GRANTS],
            read: [0; GRANTS],
            read_error: None,
            stats,
            grants_from: if segment.can_read_peer { 0 } else { u64::MAX },
        }
    }

    /// Stops the grants. The peer may be writing a part under the result until it is gone, or the result dropped.
    pub fn close(mut self) -> Grants {
        self.grants.stop();
        self.grants
    }

    /// Receives the descriptors that the peer has published, and gives the requester the acks that they carry; true if anything moved. Stops before a
    /// descriptor of memory that is not in `maps`, and sets `needs_mapping`; called with it set, receives that descriptor in any case.
    #[inline(always)]
    pub fn receive(&mut self, wq: &mut WorkQueues, tx: &mut Requester, segment: &Segment, maps: &mut PeerMappings) -> Result<bool, Fault> {
        let mut moved = false;
        let mut copied = 0;
        for _ in 0..DESC_BUDGET {
            let shared = segment.desc(self.direction, self.head);
            let Some(trailer) = Responder::published(shared, self.head) else {
                tx.acks_drained(wq);
                break;
            };
            tx.on_piggybacked_ack(wq, trailer.acked)?;
            if trailer.op == op::WRITE && trailer.source == source::INLINE && usize::from(trailer.inline) <= DESC_INLINE {
                if !self.write_inline(trailer, shared, wq, segment)? {
                    break;
                }
                self.complete_desc(source::INLINE, trailer.flags, 0, segment);
                moved = true;
                continue;
            }
            let desc = DescCopy::of(trailer, shared);
            if desc.source == source::MAPPED {
                // The peer passes memory before it publishes a descriptor that names it: so the caller polls the control socket, once.
                self.needs_mapping = !self.needs_mapping && maps.get(desc.payload[1]).is_none();
                if self.needs_mapping {
                    break;
                }
            }
            let before = self.at;
            match self.execute(desc, wq, segment, maps)? {
                Outcome::Done => {
                    copied += (desc.len as usize).saturating_sub(before);
                    // Used for a bounced one: where its piece ends in the ring.
                    let end = desc.payload[0].wrapping_add(round(u64::from(desc.len)));
                    self.complete_desc(desc.source, desc.flags, end, segment);
                    moved = true;
                }
                Outcome::Partial => return Ok(true),
                Outcome::Blocked => {
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

    /// Executes the descriptor at the head as far as possible now.
    #[inline(never)]
    fn execute(&mut self, desc: DescCopy, wq: &mut WorkQueues, segment: &Segment, maps: &mut PeerMappings) -> Result<Outcome, Fault> {
        if SharedPages::exist() && desc.op == op::WRITE && matches!(desc.source, source::BOUNCE | source::PRIVATE | source::MAPPED) {
            self.find_offer(&desc, wq);
        }
        match desc.op {
            op::WRITE if desc.source == source::PRIVATE && self.may_grant(&desc) => self.copy_granted(&desc, wq, segment),
            op::WRITE => self.write(&desc, wq, segment, maps),
            op::SEND => self.send(&desc, wq, segment, maps),
            op::READ => self.read(&desc, wq, segment),
            other => Err(self.nak(segment, WcStatus::RemInvReqErr, format!("the peer published a descriptor of unknown kind {other}"))),
        }
    }

    /// Finds out whether the peer may write to the descriptor's memory by itself, and does not know it yet.
    #[inline(never)]
    fn find_offer(&mut self, desc: &DescCopy, wq: &WorkQueues) {
        if desc.len == 0 || self.offered.len() == MAPPED_MAX || self.offered.contains(&desc.rkey) {
            return;
        }
        if let Ok(pin) = wq.pin_remote(desc.rkey, desc.addr, desc.len as usize, Access::REMOTE_WRITE)
            && pin.peers_write()
        {
            self.offer = pin.allocation().map(|(allocation, _)| Offer { key: desc.rkey, allocation });
        }
    }

    /// An offer was made, or has to be made again, as the control socket had no room.
    pub fn offered(&mut self, offer: Offer, passed: bool) {
        if passed {
            self.offered.push(offer.key);
        }
    }

    /// The trailer of descriptor `number`, if it was published.
    #[inline(always)]
    fn published(shared: &Desc, number: u64) -> Option<Trailer> {
        let [.., trailer] = &shared.words;
        // Pairs with the Release in `Requester::publish`.
        Trailer::decode(trailer.load(Ordering::Acquire), number)
    }

    /// Copies descriptor `number` out of the segment, if it was published.
    fn peek(&self, segment: &Segment, number: u64) -> Option<DescCopy> {
        let shared = segment.desc(self.direction, number);
        Some(DescCopy::of(Responder::published(shared, number)?, shared))
    }

    /// Consumes the descriptor at the head, and acks its request if it is the last of it. `end` is where a bounced one ends in the ring.
    #[inline(always)]
    fn complete_desc(&mut self, source: u8, flags: u8, end: u64, segment: &Segment) {
        let direction = segment.direction(self.direction);
        self.head += 1;
        self.at = 0;
        self.filling = false;
        if source == source::BOUNCE {
            // Pairs with the Acquire in `Requester::reserve`.
            direction.bounce_head.store(end, Ordering::Release);
        }
        // Pairs with the Acquire in `Requester::transmit`.
        direction.desc_head.store(self.head, Ordering::Release);
        if flags & flag::LAST != 0 {
            self.acked += 1;
            // Pairs with the Acquire in `Requester::poll_acks`.
            direction.acked.store(self.acked, Ordering::Release);
        }
    }

    /// Executes a WRITE whose bytes are in its descriptor, such as a CTS or a small message; false if it waits for a receive request.
    #[inline(always)]
    fn write_inline(&mut self, trailer: Trailer, shared: &Desc, wq: &mut WorkQueues, segment: &Segment) -> Result<bool, Fault> {
        let [addr, key, payload @ .., _] = &shared.words;
        let (addr, key, len) = (addr.load(Ordering::Relaxed), key.load(Ordering::Relaxed), usize::from(trailer.inline));
        if completes(trailer.flags) && !wq.recv_available() {
            return self.rnr_wait(wq, segment).map(|_| false);
        }
        if len > 0 {
            let pin = match wq.pin_remote(key as u32, addr, len, Access::REMOTE_WRITE) {
                Ok(pin) => pin,
                Err(status) => return Err(self.nak_write(segment, status, len, addr, key as u32)),
            };
            let payload = payload.each_ref().map(|word| word.load(Ordering::Relaxed));
            let words = unpack(trailer.words, &payload, len);
            // SAFETY: the pin covers `len` bytes, at most DESC_INLINE, which the words hold.
            unsafe { publish_words(pin.as_ptr(), &words, len) };
            self.stats.add(RailCounter::RxInline, len as u64);
        }
        self.write_done(trailer.flags, len as u32, (key >> 32) as u32, wq);
        Ok(true)
    }

    #[inline(always)]
    fn write(&mut self, desc: &DescCopy, wq: &mut WorkQueues, segment: &Segment, maps: &mut PeerMappings) -> Result<Outcome, Fault> {
        if desc.completes() && !wq.recv_available() {
            return self.rnr_wait(wq, segment);
        }
        if desc.len > 0 {
            let left = desc.rest().saturating_sub(self.at);
            let addr = desc.addr.wrapping_add(self.at as u64);
            let pin = match wq.pin_remote(desc.rkey, addr, left, Access::REMOTE_WRITE) {
                Ok(pin) => pin,
                Err(status) => return Err(self.nak_write(segment, status, left, addr, desc.rkey)),
            };
            match self.fetch(desc, segment, maps, &pin)? {
                Outcome::Done => {}
                unfinished => return Ok(unfinished),
            }
        }
        self.write_done(desc.flags, desc.len, desc.imm, wq);
        Ok(Outcome::Done)
    }

    #[cold]
    #[inline(never)]
    fn nak_write(&self, segment: &Segment, status: WcStatus, len: usize, addr: u64, rkey: u32) -> Fault {
        self.nak(segment, status, format!("the peer may not write {len} bytes at {addr:#x} with key {rkey:#x}"))
    }

    /// The bytes of a WRITE's descriptor are in place: completes a receive request, if it is to.
    #[inline]
    fn write_done(&mut self, flags: u8, len: u32, imm: u32, wq: &mut WorkQueues) {
        if completes(flags) {
            wq.complete_recv(WcOpcode::RecvRdmaWithImm, self.write_at.saturating_add(len), Some(imm));
            self.write_at = 0;
        } else if flags & flag::IMM != 0 {
            self.write_at = self.write_at.saturating_add(len);
        }
    }

    fn send(&mut self, desc: &DescCopy, wq: &mut WorkQueues, segment: &Segment, maps: &mut PeerMappings) -> Result<Outcome, Fault> {
        let Some(recv) = wq.peek_recv() else { return self.rnr_wait(wq, segment) };
        if self.send_at as usize + desc.rest() > recv.sge.len as usize {
            wq.fail_recv(WcStatus::LocLenErr);
            return Err(self.nak(
                segment,
                WcStatus::RemInvReqErr,
                format!("the peer sent more than the {} bytes of the receive request", recv.sge.len),
            ));
        }
        if desc.len > 0 {
            let left = (desc.len as usize).saturating_sub(self.at);
            let addr = recv.sge.addr.wrapping_add(u64::from(self.send_at)).wrapping_add(self.at as u64);
            // Nothing is moved unless all of the request fits and is registered.
            let rest = desc.rest().saturating_sub(self.at);
            let fits = if rest > left { wq.pin_local(recv.sge.lkey, addr, rest, Access::LOCAL_WRITE).map(drop) } else { Ok(()) };
            let pin = match fits.and_then(|()| wq.pin_local(recv.sge.lkey, addr, left, Access::LOCAL_WRITE)) {
                Ok(pin) => pin,
                Err(status) => {
                    wq.fail_recv(status);
                    return Err(self.nak(segment, WcStatus::RemOpErr, "a receive request names memory that is not registered for writing"));
                }
            };
            match self.fetch(desc, segment, maps, &pin)? {
                Outcome::Done => {}
                unfinished => return Ok(unfinished),
            }
        }
        self.send_at += desc.len;
        if desc.flags & flag::LAST != 0 {
            let imm = (desc.flags & flag::IMM != 0).then_some(desc.imm);
            wq.complete_recv(WcOpcode::Recv, self.send_at, imm);
            self.send_at = 0;
        }
        Ok(Outcome::Done)
    }

    #[cold]
    fn read(&mut self, desc: &DescCopy, wq: &mut WorkQueues, segment: &Segment) -> Result<Outcome, Fault> {
        let left = (desc.len as usize).saturating_sub(self.at);
        if left > 0 {
            let addr = desc.addr.wrapping_add(self.at as u64);
            let pin = match wq.pin_remote(desc.rkey, addr, left, Access::REMOTE_READ) {
                Ok(pin) => pin,
                Err(status) => {
                    return Err(self.nak(
                        segment,
                        status,
                        format!("the peer may not read {left} bytes at {addr:#x} with key {:#x}", desc.rkey),
                    ));
                }
            };
            let direction = segment.direction(self.direction);
            // SAFETY: the pin vouches for `left` bytes, the segment for the stream.
            let n = unsafe { stream::write(segment.resp(self.direction), &direction.resp_tail, &direction.resp_head, pin.as_ptr(), left) };
            self.at += n;
            self.stats.add(RailCounter::TxBounce, n as u64);
            if n < left {
                return Ok(Outcome::Blocked);
            }
        }
        Ok(Outcome::Done)
    }

    /// Moves the bytes of the descriptor that are not in place yet to the beginning of `to`, which is at least as long.
    #[inline(always)]
    fn fetch(&mut self, desc: &DescCopy, segment: &Segment, maps: &mut PeerMappings, to: &Pin) -> Result<Outcome, Fault> {
        // For a bounced piece the pin covers more: the rest of the request.
        let left = if desc.source == source::INLINE { to.len() } else { (desc.len as usize).saturating_sub(self.at).min(to.len()) };
        if desc.source == source::INLINE && left <= DESC_INLINE {
            let words = unpack(desc.words, &desc.payload, left);
            // SAFETY: the pin covers at least `left` bytes, which the words hold.
            unsafe { publish_words(to.as_ptr(), &words, left) };
            self.stats.add(RailCounter::RxInline, left as u64);
            return Ok(Outcome::Done);
        }
        self.fetch_bulk(*desc, segment, maps, to, left)
    }

    /// [`Responder::fetch`] of bytes that are not in the descriptor.
    #[inline(never)]
    fn fetch_bulk(&mut self, desc: DescCopy, segment: &Segment, maps: &mut PeerMappings, to: &Pin, left: usize) -> Result<Outcome, Fault> {
        let desc = &desc;
        match desc.source {
            source::BOUNCE if left as u64 <= self.geometry.bounce - (desc.payload[0] & (self.geometry.bounce - 1)) => {
                let from = segment.ring(self.direction, desc.payload[0], left);
                if left <= ORDERED_MAX {
                    let mut bytes = [0u8; ORDERED_MAX];
                    // SAFETY: `from` is valid for `left` bytes by the guard, `bytes` by the test; the peer may be changing the source, which
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
            source::PRIVATE | source::MAPPED if self.filling => return self.read_fill(segment, to, left),
            source::PRIVATE => return self.read_private(desc, segment, to, left),
            source::MAPPED if maps.lacks(desc.payload[1]) => return Ok(self.want_fill(segment)),
            source::MAPPED => {
                let offset = desc.payload[0].wrapping_add(self.at as u64);
                let n = left.min(COPY_BUDGET);
                let Some(from) = maps.find(desc.payload[1], offset, n) else {
                    return Err(self.nak(segment, WcStatus::RemInvReqErr, "the peer named memory that it did not pass"));
                };
                // SAFETY: `from` is valid for `n` bytes of a sealed mapping, the pin covers at least `left >= n` bytes.
                unsafe { mem::copy(from, to.as_ptr(), n) };
                self.stats.add(RailCounter::RxMapped, n as u64);
                return self.advance(n, left, segment);
            }
            source::PLACED if to.peers_write() => self.stats.add(RailCounter::RxMapped, left as u64),
            _ => {
                return Err(self.nak(
                    segment,
                    WcStatus::RemInvReqErr,
                    format!("the peer published a descriptor with {left} bytes of unknown source {}", desc.source),
                ));
            }
        }
        Ok(Outcome::Done)
    }

    /// Reads the peer's private memory.
    fn read_private(&mut self, desc: &DescCopy, segment: &Segment, to: &Pin, left: usize) -> Result<Outcome, Fault> {
        let n = left.min(COPY_BUDGET);
        let from = desc.payload[0].wrapping_add(self.at as u64);
        self.stats.add(RailCounter::Syscalls, 1);
        // SAFETY: the pin covers at least `left >= n` bytes.
        match unsafe { segment.read_peer(from, to.as_ptr(), n) } {
            Ok(n) if n > 0 => {
                self.stats.add(RailCounter::RxCma, n as u64);
                self.advance(n, left, segment)
            }
            Err(e) if e.raw_os_error() == Some(libc::ESRCH) => Err(Fault::oldest(WcStatus::RetryExcErr, "the peer process is gone")),
            refused => Ok(self.refused(segment, refused)),
        }
    }

    /// The peer's private memory cannot be read.
    #[cold]
    fn refused(&mut self, segment: &Segment, refused: io::Result<usize>) -> Outcome {
        let why = refused.err().unwrap_or_else(|| io::ErrorKind::UnexpectedEof.into());
        log_info!(log::NET, "reading the peer's memory was refused ({why}); it goes through the bounce ring from now on");
        self.stats.add(RailCounter::CmaRefused, 1);
        self.grants_from = u64::MAX;
        self.want_fill(segment)
    }

    /// Asks for the missing bytes of the descriptor at the head through the fill stream. That counts as a move: the peer, who may sleep, is woken.
    #[cold]
    fn want_fill(&mut self, segment: &Segment) -> Outcome {
        let direction = segment.direction(self.direction);
        direction.fill_from.store(self.at as u64, Ordering::Relaxed);
        // Pairs with the Acquire in `Requester::on_fill_wanted`.
        direction.fill_want.store(self.head + 1, Ordering::Release);
        self.filling = true;
        Outcome::Partial
    }

    /// Takes the missing bytes of the descriptor at the head from the fill stream.
    #[cold]
    fn read_fill(&mut self, segment: &Segment, to: &Pin, left: usize) -> Result<Outcome, Fault> {
        let direction: &DirectionState = segment.direction(self.direction);
        // SAFETY: the pin covers at least `left` bytes, the segment vouches for the stream.
        let n = unsafe { stream::read(segment.fill(self.direction), &direction.fill_tail, &direction.fill_head, to.as_ptr(), left) };
        self.stats.add(RailCounter::RxBounce, n as u64);
        if n == 0 {
            return Ok(Outcome::Blocked);
        }
        let outcome = self.advance(n, left, segment)?;
        if n == left {
            direction.fill_want.store(0, Ordering::Release);
        }
        Ok(outcome)
    }

    /// Counts `n` bytes as in place, if the memory that they were read from was still valid.
    #[inline]
    fn advance(&mut self, n: usize, left: usize, segment: &Segment) -> Result<Outcome, Fault> {
        self.check_source(segment)?;
        self.at += n;
        stage::reach(Stage::RecvHalf);
        Ok(if n == left { Outcome::Done } else { Outcome::Partial })
    }

    /// Checks that the memory which bytes were just read from was not deregistered meanwhile.
    #[inline]
    fn check_source(&self, segment: &Segment) -> Result<(), Fault> {
        // The loads of the flags must not move before the copy. Pairs with the SeqCst stores in `expose::revoke` and in `ShmWire::close`, which
        // precede any reuse of the memory.
        fence(Ordering::SeqCst);
        if segment.direction(self.direction).revoked.load(Ordering::SeqCst) != 0 {
            return Err(Fault::oldest(WcStatus::WrFlushErr, "the peer deregistered memory that it was sending from"));
        }
        if segment.peer_closed() {
            return Err(Fault::oldest(WcStatus::RetryExcErr, "the peer closed its queue pair while it was sending"));
        }
        Ok(())
    }

    /// There is no receive request for the descriptor at the head. Errors: for too long.
    #[cold]
    #[inline(never)]
    fn rnr_wait(&mut self, wq: &mut WorkQueues, segment: &Segment) -> Result<Outcome, Fault> {
        match wq.receiver_not_ready() {
            Ok(()) => Ok(Outcome::Blocked),
            Err(status) => Err(self.nak(segment, status, "no receive request was posted in time")),
        }
    }

    /// NAKs the request of the descriptor at the head: the peer's request fails with `status`, and this side flushes.
    #[cold]
    fn nak(&self, segment: &Segment, status: WcStatus, why: impl Into<String>) -> Fault {
        // Pairs with the Acquire in `Requester::poll_acks`.
        segment.direction(self.direction).nak.store(super::status_code(status), Ordering::Release);
        Fault::oldest(WcStatus::WrFlushErr, why)
    }
}

const _: () = assert!(DESCS.is_power_of_two() && DESC_INLINE <= 64);
