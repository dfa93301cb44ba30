//! The requester's half of a shared-memory queue pair: publishes a descriptor per send request, polls the responder's acks, writes the parts
//! of copies that the responder grants it, and copies bytes that the responder cannot read. Driven by the thread that drives the queue pair.
//! WRITEs that it copies into place itself are in `requester/placement.rs`, READ responses and the fill stream in `requester/streams.rs`.

mod placement;
mod streams;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::memory;
use super::super::work_queues::{Fault, WorkQueues, Wqe, is_lack};
use super::Segment;
use super::control::ControlSocket;
use super::copy_path::{CopyPath, PathChooser};
use super::expose::Exposed;
use super::grant::{self, Claim};
use super::inline::pack;
use super::layout::{DESC_INLINE, DESCS, Desc, DirectionState, Geometry, PAYLOAD_WORDS, Trailer, flag, op, source};
use crate::base::error::Error;
use crate::base::mem;
use crate::base::stage::{self, Stage};
use crate::base::stats::RailCounter;
use crate::fabric::types::*;
use placement::Target;

/// Up to this many bytes, two copies through the bounce ring are cheaper than a `process_vm_readv` of the responder.
const BOUNCE_MAX: u32 = 8192;
/// Bytes of a bounce ring that one descriptor takes at most: while the responder copies one piece out, the requester copies the next one in.
/// At most a quarter of a small ring, so that a piece always finds contiguous room.
const BOUNCE_CHUNK: u32 = 64 * 1024;
/// Bytes copied into a bounce ring per call at most.
const COPY_BUDGET: u64 = 1024 * 1024;
/// READs in flight at most, as on a NIC (max_rd_atomic is 16 on current ones).
const READS: usize = 16;
/// Allocations of this side that a peer maps at most; bytes in any other are copied like private memory.
pub const MAPPED_MAX: usize = 64;

/// What the requester remembers of a descriptor that it has published.
#[derive(Debug, Clone, Copy, Default)]
struct InFlight {
    /// The request that it is part of.
    request: u64,
    /// Offset of its first byte in the request.
    at: u32,
    /// Where its bytes are. If in private memory, the responder may grant parts of the copy.
    source: u8,
}

/// The requester's half.
pub struct Requester {
    direction: usize,
    geometry: Geometry,
    /// Descriptors published.
    tail: u64,
    /// Bytes of the bounce ring used.
    bounce_tail: u64,
    /// The responder's positions when last loaded.
    desc_head: u64,
    bounce_head: u64,
    /// By descriptor. Filled during the first lap, within its capacity.
    in_flight: Vec<InFlight>,
    /// Bytes published of the request being sent.
    at: u32,
    /// READs whose response is not complete, and how many bytes of the oldest's have come.
    reads: VecDeque<u64>,
    read_at: u32,
    /// Whether the responder can read private memory; false for good once its kernel has refused.
    peer_reads: bool,
    /// What is being written to the fill stream: request, next byte, end.
    fill: Option<(u64, u32, u32)>,
    /// The last value of `fill_want` that was acted upon.
    fill_seen: u64,
    exposed: Arc<Exposed>,
    /// Ids of the allocations that were passed to the peer, and whether it has mapped them, for all that is known.
    passed: Vec<(u32, bool)>,
    /// Memory of the peer's that this side writes to.
    targets: Vec<Target>,
    /// The oldest descriptor of which a part may be claimed, and the one after the last.
    grant_at: u64,
    grant_end: u64,
    /// Chooses between CMA and the bounce ring for bulk data that can take either.
    copy_path: PathChooser,
    /// Whether the responder's private memory can be written; false for good once the kernel has refused.
    writes_peer: bool,
    /// `acked` when the responder's descriptors were last drained: no later descriptor carries an older ack.
    acked_at_drain: u64,
}

impl Requester {
    /// A half with nothing in flight, towards a queue pair of process `peer`. `slots` are the slots of the send queue.
    pub fn new(direction: usize, geometry: Geometry, exposed: Arc<Exposed>, peer: Option<i32>, slots: usize) -> Self {
        Requester {
            direction,
            geometry,
            tail: 0,
            bounce_tail: 0,
            desc_head: 0,
            bounce_head: 0,
            in_flight: Vec::with_capacity(DESCS as usize),
            at: 0,
            reads: VecDeque::with_capacity(READS),
            read_at: 0,
            peer_reads: true,
            fill: None,
            fill_seen: 0,
            exposed,
            passed: Vec::with_capacity(MAPPED_MAX),
            targets: Vec::new(),
            grant_at: 0,
            grant_end: 0,
            copy_path: PathChooser::towards(peer, slots),
            writes_peer: true,
            acked_at_drain: 0,
        }
    }

    /// The queue pair is closed: deregistrations need not set its `revoked` word.
    pub fn retire(&self) {
        self.exposed.retire();
    }

    /// Publishes posted requests as far as there is room; true if anything was published.
    #[inline(always)]
    pub fn transmit(&mut self, wq: &mut WorkQueues, segment: &Segment, control: &ControlSocket) -> Result<bool, Fault> {
        let mut moved = false;
        let mut budget = COPY_BUDGET;
        while wq.sq.pending() {
            if self.tail - self.desc_head >= DESCS {
                // Pairs with the Release in `Responder::complete_desc`: the responder has consumed the descriptors below it.
                self.desc_head = segment.direction(self.direction).desc_head.load(Ordering::Acquire).min(self.tail);
                if self.tail - self.desc_head >= DESCS {
                    break;
                }
            }
            if !self.publish_inline(wq, segment)? && !self.publish_not_inline(wq, segment, control, &mut budget)? {
                break;
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Publishes the next request, or a piece of it, if its bytes do not fit the descriptor; false if there is no room.
    #[inline(never)]
    fn publish_not_inline(
        &mut self,
        wq: &mut WorkQueues,
        segment: &Segment,
        control: &ControlSocket,
        budget: &mut u64,
    ) -> Result<bool, Fault> {
        let request = wq.sq.sent;
        let wqe = *wq.sq.get(request);
        if wqe.opcode == Opcode::Read {
            return Ok(self.publish_read(wq, &wqe, request, segment));
        }
        if !self.targets.is_empty()
            && let Some(to) = self.target(&wqe, wq, segment)
        {
            return self.publish_by_placement(wq, &wqe, request, segment, to, budget);
        }
        if wqe.inline || wqe.len <= BOUNCE_MAX {
            return self.publish_bounce(wq, &wqe, request, segment);
        }
        if self.at == 0 && self.responder_can_read(&wqe, wq, segment, control)? {
            return self.publish_by_reference(wq, &wqe, request, segment);
        }
        if *budget == 0 {
            return Ok(false);
        }
        *budget = budget.saturating_sub(u64::from(BOUNCE_CHUNK));
        self.publish_bounce(wq, &wqe, request, segment)
    }

    /// Whether something is outstanding, so that the responder's cache line has to be loaded.
    #[inline]
    pub fn has_unacked(&self, wq: &WorkQueues) -> bool {
        wq.sq.acked != wq.sq.sent || self.fill.is_some()
    }

    /// Takes the ack that a descriptor of the responder carries: the low bits of the number of requests that it has acked.
    #[inline(always)]
    pub fn on_piggybacked_ack(&mut self, wq: &mut WorkQueues, acked: u16) -> Result<(), Fault> {
        let more = acked.wrapping_sub(wq.sq.acked as u16);
        // A READ completes only with its response, which `poll_acks` polls. A descriptor may be older than the last ack that was loaded from the
        // responder's cache line: then `more` wraps. After 2^15 acks its 16 bits are ambiguous; `poll_acks` then finds the ack.
        if more == 0 || more > 1 << 15 || !self.reads.is_empty() || wq.sq.acked - self.acked_at_drain >= 1 << 15 {
            return Ok(());
        }
        let from = wq.sq.acked;
        wq.ack(from + u64::from(more))?;
        self.on_acked(from, wq.sq.acked);
        Ok(())
    }

    /// Every descriptor that the responder has published was received.
    #[inline]
    pub fn acks_drained(&mut self, wq: &WorkQueues) {
        self.acked_at_drain = wq.sq.acked;
    }

    /// Polls what the responder has written for this direction: acks, a NAK, READ responses, and a wish for the fill stream.
    #[inline(always)]
    pub fn poll_acks(&mut self, wq: &mut WorkQueues, segment: &Segment) -> Result<bool, Fault> {
        let direction = segment.direction(self.direction);
        // Pairs with the Release in `Responder::complete_desc`: what the responder wrote for the acked requests, responses included, is visible.
        let acked = direction.acked.load(Ordering::Acquire);
        let mut moved = false;
        let mut upto = acked;
        if !self.reads.is_empty() {
            moved |= self.poll_read_response(wq, segment)?;
            // A READ is acked only once its response is complete.
            upto = self.reads.front().map_or(acked, |&read| acked.min(read));
        }
        if upto != wq.sq.acked {
            let from = wq.sq.acked;
            wq.ack(upto)?;
            self.on_acked(from, upto);
            moved = true;
        }
        if direction.fill_want.load(Ordering::Acquire) != self.fill_seen {
            self.on_fill_wanted(wq, direction)?;
        }
        if self.fill.is_some() {
            moved |= self.write_fill(wq, segment)?;
        }
        let nak = direction.nak.load(Ordering::Acquire);
        if nak != 0 {
            return Err(self.on_nak(wq, direction, nak));
        }
        if direction.revoked.load(Ordering::Relaxed) != 0 {
            return Err(Fault::oldest(WcStatus::LocProtErr, "memory was deregistered while the peer was reading it"));
        }
        Ok(moved)
    }

    /// The responder has refused a request. Requests that it acked before stay acked.
    #[cold]
    #[inline(never)]
    fn on_nak(&self, wq: &mut WorkQueues, direction: &DirectionState, nak: u64) -> Fault {
        let acked = direction.acked.load(Ordering::Acquire);
        let upto = self.reads.front().map_or(acked, |&read| acked.min(read));
        if let Err(protocol_error) = wq.ack(upto) {
            return protocol_error;
        }
        let status = super::status_from(nak);
        Fault::oldest(status, format!("the peer refused a request: {status}"))
    }

    /// Requests `from..upto` are acked.
    #[inline(always)]
    fn on_acked(&mut self, from: u64, upto: u64) {
        self.exposed.remove(from, upto);
        self.copy_path.on_acked(upto);
    }

    /// Publishes the next request with its bytes in the descriptor; false if they are too many, or if it is a READ.
    #[inline(always)]
    fn publish_inline(&mut self, wq: &mut WorkQueues, segment: &Segment) -> Result<bool, Fault> {
        let request = wq.sq.sent;
        let wqe = wq.sq.get(request);
        if wqe.len as usize > DESC_INLINE || wqe.opcode == Opcode::Read {
            return Ok(false);
        }
        let packed = if wqe.inline {
            let from = wq.sq.inline_bytes(request);
            // SAFETY: the slice is valid for its length, at most DESC_INLINE.
            unsafe { pack(from.as_ptr(), from.len()) }
        } else if wqe.len > 0 {
            let pin = wq.pin_local(wqe.lkey, wqe.addr, wqe.len as usize, Access::empty()).map_err(local_fault)?;
            // SAFETY: the pin vouches for `len` bytes, at most DESC_INLINE.
            unsafe { pack(pin.as_ptr(), pin.len()) }
        } else {
            Some((0, [0; PAYLOAD_WORDS]))
        };
        let Some((mask, payload)) = packed else { return Ok(false) };
        wq.stats.add(RailCounter::TxInline, u64::from(wqe.len));
        let trailer = Trailer { inline: wqe.len as u8, words: mask, ..Trailer::default() };
        self.publish(segment, wqe, request, source::INLINE, trailer.bits(), 0, wqe.len, payload);
        wq.sq.sent += 1;
        Ok(true)
    }

    fn publish_bounce(&mut self, wq: &mut WorkQueues, wqe: &Wqe, request: u64, segment: &Segment) -> Result<bool, Fault> {
        let len = (wqe.len - self.at).min(BOUNCE_CHUNK.min((self.geometry.bounce / 4) as u32));
        let Some(position) = self.reserve(u64::from(len), segment) else { return Ok(false) };
        let to = segment.ring(self.direction, position, len as usize);
        if wqe.inline {
            let from = wq.sq.inline_bytes(request);
            // SAFETY: `to` is valid for `len` bytes, which is the length of `from`: inline requests are one piece.
            unsafe { mem::copy(from.as_ptr(), to, from.len().min(len as usize)) };
        } else {
            // The whole rest is checked, so that a request that would fail halfway moves nothing.
            let left = (wqe.len - self.at) as usize;
            let pin = wq.pin_local(wqe.lkey, wqe.addr.wrapping_add(u64::from(self.at)), left, Access::empty()).map_err(local_fault)?;
            // SAFETY: the pin vouches for `left >= len` bytes and `to` is valid for `len`.
            unsafe { mem::copy(pin.as_ptr(), to, len as usize) };
        }
        self.bounce_tail = position + round(u64::from(len));
        wq.stats.add(RailCounter::TxBounce, u64::from(len));
        self.publish(
            segment,
            wqe,
            request,
            source::BOUNCE,
            0,
            self.at,
            len,
            [position, u64::from(wqe.len - self.at), u64::from(len), 0, 0],
        );
        self.advance(wq, wqe, len);
        Ok(true)
    }

    /// So many more bytes of the next request are published.
    fn advance(&mut self, wq: &mut WorkQueues, wqe: &Wqe, len: u32) {
        self.at += len;
        if self.at == wqe.len {
            self.at = 0;
            wq.sq.sent += 1;
        } else {
            stage::reach(Stage::SendHalf);
        }
    }

    /// Whether the responder is to read the request's bytes where they are, rather than from the bounce ring. Passes an allocation on first use.
    fn responder_can_read(&mut self, wqe: &Wqe, wq: &WorkQueues, segment: &Segment, control: &ControlSocket) -> Result<bool, Fault> {
        let pin = wq.pin_local(wqe.lkey, wqe.addr, wqe.len as usize, Access::empty()).map_err(local_fault)?;
        if let Some((id, _)) = pin.allocation()
            && self.pass_allocation(id, control)?
        {
            return Ok(true);
        }
        let can = self.peer_reads && segment.peer_can_read();
        Ok(can && (segment.cma_only || self.copy_path.choose(wq.sq.sent, wqe.len) == CopyPath::Cma))
    }

    /// Passes our allocation `id` to the peer if that was not done; whether it has it now.
    fn pass_allocation(&mut self, id: u32, control: &ControlSocket) -> Result<bool, Fault> {
        if let Some((_, is_mapped)) = self.passed.iter().find(|(passed, _)| *passed == id) {
            return Ok(*is_mapped);
        }
        if !control.passes_descriptors() || self.passed.len() == MAPPED_MAX {
            return Ok(false);
        }
        let Some(allocation) = memory::by_id(id) else { return Ok(false) };
        let passed = match control.pass_memory(id, &allocation.shm) {
            // Too much is on its way to peers that have not received it yet.
            Err(Error::System { word, .. }) if is_lack(&word) => false,
            passed => passed.map_err(|e| Fault::oldest(WcStatus::RetryExcErr, e.to_string()))?,
        };
        if passed {
            self.passed.push((id, true));
        }
        Ok(passed)
    }

    /// Publishes where the bytes of a request are: the responder maps or reads them.
    fn publish_by_reference(&mut self, wq: &mut WorkQueues, wqe: &Wqe, request: u64, segment: &Segment) -> Result<bool, Fault> {
        self.exposed.add(request, wqe.lkey);
        // Checked after it was exposed: if a deregistration runs at the same time, either this check fails or it sees the exposure.
        let pin = wq.pin_local(wqe.lkey, wqe.addr, wqe.len as usize, Access::empty()).map_err(local_fault)?;
        match pin.allocation() {
            Some((id, offset)) if self.passed.contains(&(id, true)) => {
                wq.stats.add(RailCounter::TxMapped, u64::from(wqe.len));
                self.publish(segment, wqe, request, source::MAPPED, 0, 0, wqe.len, [offset, u64::from(id), u64::from(wqe.len), 0, 0]);
            }
            _ => {
                wq.stats.add(RailCounter::TxCma, u64::from(wqe.len));
                self.publish(segment, wqe, request, source::PRIVATE, 0, 0, wqe.len, [wqe.addr, 0, u64::from(wqe.len), 0, 0]);
                self.grant_end = self.tail;
            }
        }
        wq.sq.sent += 1;
        Ok(true)
    }

    /// Whether there may be a part of a copy to claim.
    #[inline]
    pub fn may_claim(&self) -> bool {
        self.grant_at != self.grant_end
    }

    /// Claims one part of the oldest copy for which the responder has a grant, and writes it; true if there was one.
    pub fn write_claimed_part(&mut self, wq: &mut WorkQueues, segment: &Segment) -> bool {
        while self.grant_at != self.grant_end {
            let desc = self.grant_at;
            let InFlight { request, source, .. } = self.in_flight.get((desc % DESCS) as usize).copied().unwrap_or_default();
            // A READ moves none of ours.
            let is_ours = source == source::PRIVATE && request >= wq.sq.acked && wq.sq.get(request).opcode != Opcode::Read;
            if !is_ours || !self.writes_peer || !segment.can_write_peer {
                self.grant_at += 1;
                continue;
            }
            let wqe = *wq.sq.get(request);
            let grant = segment.grant(self.direction, desc);
            match grant::claim(grant, desc, wqe.len) {
                Claim::NotOpen => return false,
                Claim::Over => self.grant_at += 1,
                Claim::Part(part, to) => {
                    stage::reach(Stage::SendShared);
                    let from = wqe.addr.wrapping_add(u64::from(part.offset));
                    let to = to.wrapping_add(u64::from(part.offset));
                    wq.stats.add(RailCounter::Syscalls, 1);
                    let copied = wq.pin_local(wqe.lkey, from, part.len as usize, Access::empty()).is_ok_and(|pin| {
                        // SAFETY: the pin keeps our bytes valid. The peer granted the range at `to`, and waits for this part before it takes the
                        // memory back. That it may have ended, or run another program, with its grants open: `write_peer` tells what it does then.
                        unsafe { segment.write_peer(pin.as_ptr(), to, pin.len()) }
                    });
                    if copied {
                        grant::part_written(grant, desc);
                        wq.stats.add(RailCounter::TxGranted, u64::from(part.len));
                    } else {
                        grant::part_not_written(grant, desc);
                        self.writes_peer = false;
                    }
                    return true;
                }
            }
        }
        false
    }

    fn publish_read(&mut self, wq: &mut WorkQueues, wqe: &Wqe, request: u64, segment: &Segment) -> bool {
        if self.reads.len() == READS {
            return false;
        }
        self.reads.push_back(request);
        self.publish(segment, wqe, request, source::PRIVATE, 0, 0, wqe.len, [0, 0, u64::from(wqe.len), 0, 0]);
        wq.sq.sent += 1;
        true
    }

    /// Publishes a descriptor for `len` bytes of the request from `at` on. `more` are the bits of its trailer that describe an inline payload.
    #[allow(clippy::too_many_arguments)] // They are the descriptor.
    #[inline(always)]
    fn publish(
        &mut self,
        segment: &Segment,
        wqe: &Wqe,
        request: u64,
        source: u8,
        more: u64,
        at: u32,
        len: u32,
        payload: [u64; PAYLOAD_WORDS],
    ) {
        let (op, imm) = match wqe.opcode {
            Opcode::Send => (op::SEND, 0),
            Opcode::SendWithImm => (op::SEND, flag::IMM),
            Opcode::Write => (op::WRITE, 0),
            Opcode::WriteWithImm => (op::WRITE, flag::IMM),
            Opcode::Read => (op::READ, 0),
        };
        let last = if at + len == wqe.len { flag::LAST } else { 0 };
        let desc: &Desc = segment.desc(self.direction, self.tail);
        let [addr, key, rest @ .., word] = &desc.words;
        addr.store(wqe.remote_addr.wrapping_add(u64::from(at)), Ordering::Relaxed);
        key.store(u64::from(wqe.rkey) | u64::from(wqe.imm) << 32, Ordering::Relaxed);
        for (to, from) in rest.iter().zip(payload) {
            to.store(from, Ordering::Relaxed);
        }
        // Piggybacks the newest ack. Only this side writes the word.
        let acked = segment.direction(1 - self.direction).acked.load(Ordering::Relaxed) as u16;
        let bits = Trailer { op, source, flags: imm | last, acked, ..Trailer::default() }.bits() | more;
        // Pairs with the Acquire in `Responder::published`: the descriptor and its bounced bytes are visible before its number.
        word.store(Trailer::word(bits, self.tail), Ordering::Release);
        match self.in_flight.get_mut((self.tail % DESCS) as usize) {
            Some(in_flight) => {
                in_flight.request = request;
                in_flight.at = at;
                in_flight.source = source;
            }
            None => self.grow(request, at, source),
        }
        self.tail += 1;
    }

    /// Appends an entry to `in_flight` during the first lap.
    #[cold]
    #[inline(never)]
    fn grow(&mut self, request: u64, at: u32, source: u8) {
        self.in_flight.push(InFlight { request, at, source });
    }

    /// The position of `len` contiguous free bytes in the bounce ring; none if there are none now. The caller uses them by moving `bounce_tail`.
    fn reserve(&mut self, len: u64, segment: &Segment) -> Option<u64> {
        let size = self.geometry.bounce;
        let offset = self.bounce_tail & (size - 1);
        let position = if offset + round(len) > size { self.bounce_tail + (size - offset) } else { self.bounce_tail };
        if position + round(len) - self.bounce_head > size {
            // Pairs with the Release in `Responder::complete_desc`: the responder has copied the bytes below it.
            self.bounce_head = segment.direction(self.direction).bounce_head.load(Ordering::Acquire).min(self.bounce_tail);
            if position + round(len) - self.bounce_head > size {
                return None;
            }
        }
        Some(position)
    }
}

/// Bytes of the bounce ring that a piece of `len` bytes takes: whole cache lines.
pub fn round(len: u64) -> u64 {
    len.next_multiple_of(64)
}

#[cold]
fn local_fault(status: WcStatus) -> Fault {
    Fault::sending(status, "a send request names local memory that is not registered")
}
