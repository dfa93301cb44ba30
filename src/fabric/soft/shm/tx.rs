//! The requester's half of a shared-memory queue pair: turns send requests into descriptors, takes acceptances back, and serves bytes
//! that the responder could not pull. Driven by the thread that drives the queue pair.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::memory;
use super::super::queue::{Fault, WorkQueues, Wqe};
use super::control::ControlSocket;
use super::expose::Exposed;
use super::grant::{self, Taken};
use super::inline::pack;
use super::layout::{DESC_INLINE, DESCS, Desc, Geometry, Head, Lane, PAYLOAD_WORDS, flag, op, place};
use super::route::{Route, Way};
use super::{Segment, stream};
use crate::base::mem;
use crate::base::stage::{self, Stage};
use crate::base::stats::RailCounter;
use crate::fabric::types::*;

/// Up to this many bytes a copy through the bounce ring is cheaper than a system call at the other side (`process_vm_readv`).
const BOUNCE_MAX: u32 = 8192;
/// Bytes of a bounce ring that one descriptor takes at most: both sides copy at the same time, a piece apart. Of a small ring at most a
/// quarter, so that a piece finds room wherever the ring ends.
const BOUNCE_CHUNK: u32 = 64 * 1024;
/// Bytes copied into a bounce ring before the caller gets its turn.
const COPY_BUDGET: u64 = 1024 * 1024;
/// READs in flight at most, as on a NIC (max_rd_atomic is 16 on current ones).
const READS: usize = 16;
/// Allocations of ours that a peer maps at most; what lies in others is copied.
pub const MAPPED_MAX: usize = 64;

/// What a descriptor is about.
#[derive(Debug, Clone, Copy, Default)]
struct Owner {
    /// The request it belongs to.
    request: u64,
    /// Which of its bytes the descriptor begins with.
    at: u32,
    /// Whether the bytes lie in private memory.
    private: bool,
}

/// The requester's half.
pub struct Tx {
    lane: usize,
    geometry: Geometry,
    /// Descriptors published.
    tail: u64,
    /// Bounce bytes handed out.
    bounce_tail: u64,
    /// What was last seen of the responder's positions; they may be further.
    desc_head: u64,
    bounce_head: u64,
    /// What each descriptor in flight is about; fills during the first lap, within its capacity.
    owner: Vec<Owner>,
    /// Bytes of the request being sent that were published.
    at: u32,
    /// READs whose response has not come whole, and how much of the oldest's has.
    reads: VecDeque<u64>,
    read_at: u32,
    /// Whether the responder can pull from private memory; sinks to false at its first refusal.
    pulls: bool,
    /// The transfer being served through the fill stream: request, next byte, end.
    fill: Option<(u64, u32, u32)>,
    /// The last value of `fill_want` that was acted upon.
    filled: u64,
    exposed: Arc<Exposed>,
    passed: Vec<u32>,
    /// The oldest descriptor of which a part may be taken, and the one after the last.
    share_at: u64,
    share_end: u64,
    /// Where bulk data goes if it can go both ways.
    route: Route,
    /// Whether the responder's memory can be written; sinks to false at the first refusal.
    writes: bool,
    /// Requests accepted when the responder had last been heard out: no descriptor of its that comes later tells of fewer.
    heard: u64,
}

impl Tx {
    /// A half with nothing in flight, towards a queue pair of process `peer`. `slots` is the send queue's.
    pub fn new(lane: usize, geometry: Geometry, exposed: Arc<Exposed>, peer: Option<i32>, slots: usize) -> Self {
        Tx {
            lane,
            geometry,
            tail: 0,
            bounce_tail: 0,
            desc_head: 0,
            bounce_head: 0,
            owner: Vec::with_capacity(DESCS as usize),
            at: 0,
            reads: VecDeque::with_capacity(READS),
            read_at: 0,
            pulls: true,
            fill: None,
            filled: 0,
            exposed,
            passed: Vec::with_capacity(MAPPED_MAX),
            share_at: 0,
            share_end: 0,
            route: Route::towards(peer, slots),
            writes: true,
            heard: 0,
        }
    }

    /// No deregistration needs to warn this queue pair's peer any more.
    pub fn retire(&self) {
        self.exposed.retire();
    }

    /// Publishes what fits; true if anything was.
    #[inline(always)]
    pub fn transmit(&mut self, wq: &mut WorkQueues, segment: &Segment, control: &ControlSocket) -> Result<bool, Fault> {
        let mut moved = false;
        let mut budget = COPY_BUDGET;
        while wq.sq.pending() {
            if self.tail - self.desc_head >= DESCS {
                // Pairs with the Release in `Rx`: the responder is done with the descriptors below it.
                self.desc_head = segment.lane(self.lane).desc_head.load(Ordering::Acquire).min(self.tail);
                if self.tail - self.desc_head >= DESCS {
                    break;
                }
            }
            if !self.publish_inline(wq, segment)? && !self.publish_apart(wq, segment, control, &mut budget)? {
                break;
            }
            moved = true;
        }
        Ok(moved)
    }

    /// Publishes what of the next request fits; false if nothing does.
    #[inline(never)]
    fn publish_apart(&mut self, wq: &mut WorkQueues, segment: &Segment, control: &ControlSocket, budget: &mut u64) -> Result<bool, Fault> {
        let request = wq.sq.sent;
        let wqe = *wq.sq.get(request);
        if wqe.opcode == Opcode::Read {
            return Ok(self.publish_read(wq, &wqe, request, segment));
        }
        if wqe.inline || wqe.len <= BOUNCE_MAX {
            return self.publish_bounce(wq, &wqe, request, segment);
        }
        if self.at == 0 && self.peer_reads(&wqe, wq, segment, control)? {
            return self.publish_in_place(wq, &wqe, request, segment);
        }
        if *budget == 0 {
            return Ok(false);
        }
        *budget = budget.saturating_sub(u64::from(BOUNCE_CHUNK));
        self.publish_bounce(wq, &wqe, request, segment)
    }

    /// Whether something is outstanding, so that the responder's line has to be looked at.
    #[inline]
    pub fn awaits(&self, wq: &WorkQueues) -> bool {
        wq.sq.acked != wq.sq.sent || self.fill.is_some()
    }

    /// Takes over what a descriptor of the responder said on its way: the low bits of how many requests it has accepted.
    #[inline(always)]
    pub fn hear(&mut self, wq: &mut WorkQueues, accepted: u16) -> Result<(), Fault> {
        let more = accepted.wrapping_sub(wq.sq.acked as u16);
        // READs need a look at their bytes. An older descriptor may tell less than the line did; one that has waited for very long, as
        // there was no receive request for it or for those before it, so much less that its bits seem to tell more.
        if more == 0 || more > 1 << 15 || !self.reads.is_empty() || wq.sq.acked - self.heard >= 1 << 15 {
            return Ok(());
        }
        let from = wq.sq.acked;
        wq.ack(from + u64::from(more))?;
        self.over(wq, from, wq.sq.acked);
        Ok(())
    }

    /// The responder has published nothing that was not looked at.
    #[inline]
    pub fn heard_out(&mut self, wq: &WorkQueues) {
        self.heard = wq.sq.acked;
    }

    /// Takes over what the responder has accepted, refused, answered or asked for.
    #[inline(always)]
    pub fn take_acceptance(&mut self, wq: &mut WorkQueues, segment: &Segment) -> Result<bool, Fault> {
        let lane = segment.lane(self.lane);
        // Pairs with the Release in `Rx`: what was written for the accepted requests, responses included, is visible.
        let accepted = lane.accepted.load(Ordering::Acquire);
        let mut moved = false;
        let mut upto = accepted;
        if !self.reads.is_empty() {
            moved |= self.take_response(wq, segment)?;
            // A READ is complete only when its bytes are here.
            upto = self.reads.front().map_or(accepted, |&read| accepted.min(read));
        }
        if upto != wq.sq.acked {
            let from = wq.sq.acked;
            wq.ack(upto)?;
            self.over(wq, from, upto);
            moved = true;
        }
        if lane.fill_want.load(Ordering::Acquire) != self.filled {
            self.begin_fill(wq, lane)?;
        }
        if self.fill.is_some() {
            moved |= self.feed(wq, segment)?;
        }
        let nak = lane.nak.load(Ordering::Acquire);
        if nak != 0 {
            return Err(self.refused(wq, lane, nak));
        }
        if lane.revoked.load(Ordering::Relaxed) != 0 {
            return Err(Fault::oldest(WcStatus::LocProtErr, "memory was deregistered while the peer was reading it"));
        }
        Ok(moved)
    }

    /// The responder has refused a request. What it had accepted before stays accepted.
    #[cold]
    #[inline(never)]
    fn refused(&self, wq: &mut WorkQueues, lane: &Lane, nak: u64) -> Fault {
        let accepted = lane.accepted.load(Ordering::Acquire);
        let upto = self.reads.front().map_or(accepted, |&read| accepted.min(read));
        if let Err(nonsense) = wq.ack(upto) {
            return nonsense;
        }
        let status = super::status_from(nak);
        Fault::oldest(status, format!("the peer refused a request: {status}"))
    }

    /// Requests `from..upto` were accepted.
    #[inline(always)]
    fn over(&mut self, wq: &WorkQueues, from: u64, upto: u64) {
        self.exposed.remove(from, upto);
        self.route.accepted(from, upto, |request| wq.sq.get(request).len);
    }

    /// Publishes the next request with its bytes in the descriptor; false if they are too many, or not this side's.
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
        let head = Head { inline: wqe.len as u8, words: mask, ..Head::default() };
        self.publish(segment, wqe, request, place::INLINE, head.bits(), 0, wqe.len, payload);
        wq.sq.sent += 1;
        Ok(true)
    }

    fn publish_bounce(&mut self, wq: &mut WorkQueues, wqe: &Wqe, request: u64, segment: &Segment) -> Result<bool, Fault> {
        let len = (wqe.len - self.at).min(BOUNCE_CHUNK.min((self.geometry.bounce / 4) as u32));
        let Some(position) = self.reserve(u64::from(len), segment) else { return Ok(false) };
        let to = segment.ring(self.lane, position, len as usize);
        if wqe.inline {
            let from = wq.sq.inline_bytes(request);
            // SAFETY: `to` is valid for `len` bytes, which is the length of `from`: inline requests are one piece.
            unsafe { mem::copy(from.as_ptr(), to, from.len().min(len as usize)) };
        } else {
            // The whole rest is checked, so that a request that cannot be completed moves nothing.
            let left = (wqe.len - self.at) as usize;
            let pin = wq.pin_local(wqe.lkey, wqe.addr.wrapping_add(u64::from(self.at)), left, Access::empty()).map_err(local_fault)?;
            // SAFETY: the pin vouches for `left >= len` bytes and `to` is valid for `len`.
            unsafe { mem::copy(pin.as_ptr(), to, len as usize) };
        }
        self.bounce_tail = position + round(u64::from(len));
        wq.stats.add(RailCounter::TxBounce, u64::from(len));
        self.publish(segment, wqe, request, place::BOUNCE, 0, self.at, len, [position, u64::from(wqe.len - self.at), u64::from(len), 0, 0]);
        self.at += len;
        if self.at == wqe.len {
            self.at = 0;
            wq.sq.sent += 1;
        } else {
            stage::reach(Stage::SendHalf);
        }
        Ok(true)
    }

    /// Whether the peer can read the request's bytes where they are. Passes it the memory to map, the first time.
    fn peer_reads(&mut self, wqe: &Wqe, wq: &WorkQueues, segment: &Segment, control: &ControlSocket) -> Result<bool, Fault> {
        let pin = wq.pin_local(wqe.lkey, wqe.addr, wqe.len as usize, Access::empty()).map_err(local_fault)?;
        if let Some((id, _)) = pin.allocation()
            && self.pass(id, control)?
        {
            return Ok(true);
        }
        let can = self.pulls && segment.peer_pulls();
        Ok(can && (segment.straight || self.route.choose(wq.sq.sent, wqe.len) == Way::Straight))
    }

    /// Whether the peer has, or now gets, our allocation `id`.
    fn pass(&mut self, id: u32, control: &ControlSocket) -> Result<bool, Fault> {
        if self.passed.contains(&id) {
            return Ok(true);
        }
        if !control.passes_descriptors() || self.passed.len() == MAPPED_MAX {
            return Ok(false);
        }
        let Some(allocation) = memory::by_id(id) else { return Ok(false) };
        let passed = control
            .pass_memory(id, allocation.shm.len() as u64, allocation.shm.fd().as_raw_fd())
            .map_err(|e| Fault::oldest(WcStatus::RetryExcErr, e.to_string()))?;
        if passed {
            self.passed.push(id);
        }
        Ok(passed)
    }

    fn publish_in_place(&mut self, wq: &mut WorkQueues, wqe: &Wqe, request: u64, segment: &Segment) -> Result<bool, Fault> {
        self.exposed.add(request, wqe.lkey);
        // Checked after it was exposed: a deregistration that this check does not see, sees the exposure.
        let pin = wq.pin_local(wqe.lkey, wqe.addr, wqe.len as usize, Access::empty()).map_err(local_fault)?;
        match pin.allocation() {
            Some((id, offset)) if self.passed.contains(&id) => {
                wq.stats.add(RailCounter::TxMapped, u64::from(wqe.len));
                self.publish(segment, wqe, request, place::MAPPED, 0, 0, wqe.len, [offset, u64::from(id), u64::from(wqe.len), 0, 0]);
            }
            _ => {
                wq.stats.add(RailCounter::TxCma, u64::from(wqe.len));
                self.publish(segment, wqe, request, place::PRIVATE, 0, 0, wqe.len, [wqe.addr, 0, u64::from(wqe.len), 0, 0]);
                self.share_end = self.tail;
            }
        }
        wq.sq.sent += 1;
        Ok(true)
    }

    /// Whether there may be a part of a copy to take.
    #[inline]
    pub fn may_share(&self) -> bool {
        self.share_at != self.share_end
    }

    /// Writes one part of the oldest copy that the responder shares; true if it did.
    pub fn share(&mut self, wq: &mut WorkQueues, segment: &Segment) -> bool {
        while self.share_at != self.share_end {
            let desc = self.share_at;
            let Owner { request, private, .. } = self.owner.get((desc % DESCS) as usize).copied().unwrap_or_default();
            if !private || request < wq.sq.acked || !self.writes || !segment.writes_allowed {
                self.share_at += 1;
                continue;
            }
            let wqe = *wq.sq.get(request);
            let grant = segment.grant(self.lane, desc);
            match grant::take(grant, desc, wqe.len) {
                Taken::NotYet => return false,
                Taken::Over => self.share_at += 1,
                Taken::Part(part, to) => {
                    stage::reach(Stage::SendShared);
                    let from = wqe.addr.wrapping_add(u64::from(part.offset));
                    let to = to.wrapping_add(u64::from(part.offset));
                    wq.stats.add(RailCounter::Syscalls, 1);
                    let copied = wq.pin_local(wqe.lkey, from, part.len as usize, Access::empty()).is_ok_and(|pin| {
                        // Looked at each time, as the process may have ended, or run another program, with its grants open.
                        // SAFETY: the pin vouches for the part, the cookie for the process, and the grant, taken and not yet given
                        // back, for the responder's consent.
                        segment.is_the_peer() && unsafe { segment.write_peer(pin.as_ptr(), to, pin.len()) }
                    });
                    if copied {
                        grant::written(grant, desc);
                        wq.stats.add(RailCounter::TxGranted, u64::from(part.len));
                    } else {
                        grant::not_written(grant, desc);
                        self.writes = false;
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
        self.publish(segment, wqe, request, place::PRIVATE, 0, 0, wqe.len, [0, 0, u64::from(wqe.len), 0, 0]);
        wq.sq.sent += 1;
        true
    }

    /// Writes a descriptor for `len` bytes of the request from `at` on. `more` are the bits of its head that are of an inline payload.
    #[allow(clippy::too_many_arguments)] // They are the descriptor.
    #[inline(always)]
    fn publish(
        &mut self,
        segment: &Segment,
        wqe: &Wqe,
        request: u64,
        place: u8,
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
        let desc: &Desc = segment.desc(self.lane, self.tail);
        let [addr, key, places @ .., word] = &desc.words;
        addr.store(wqe.remote_addr.wrapping_add(u64::from(at)), Ordering::Relaxed);
        key.store(u64::from(wqe.rkey) | u64::from(wqe.imm) << 32, Ordering::Relaxed);
        for (place, word) in places.iter().zip(payload) {
            place.store(word, Ordering::Relaxed);
        }
        // Written by this side alone; what it was when the request was posted would do as well.
        let accepted = segment.lane(1 - self.lane).accepted.load(Ordering::Relaxed) as u16;
        let bits = Head { op, place, flags: imm | last, accepted, ..Head::default() }.bits() | more;
        // Pairs with the Acquire in `Rx::look`: the descriptor and its bounced bytes are visible before its number.
        word.store(Head::word(bits, self.tail), Ordering::Release);
        let private = place == place::PRIVATE && op != op::READ;
        match self.owner.get_mut((self.tail % DESCS) as usize) {
            Some(owner) => {
                owner.request = request;
                owner.at = at;
                owner.private = private;
            }
            None => self.first_lap(request, at, private),
        }
        self.tail += 1;
    }

    /// The next descriptor is one that was never used before.
    #[cold]
    #[inline(never)]
    fn first_lap(&mut self, request: u64, at: u32, private: bool) {
        self.owner.push(Owner { request, at, private });
    }

    /// Room for `len` contiguous bytes in the bounce ring, or none yet. Nothing is taken until `bounce_tail` moves.
    fn reserve(&mut self, len: u64, segment: &Segment) -> Option<u64> {
        let size = self.geometry.bounce;
        let offset = self.bounce_tail & (size - 1);
        let position = if offset + round(len) > size { self.bounce_tail + (size - offset) } else { self.bounce_tail };
        if position + round(len) - self.bounce_head > size {
            // Pairs with the Release in `Rx`: the responder is done with the bytes below it.
            self.bounce_head = segment.lane(self.lane).bounce_head.load(Ordering::Acquire).min(self.bounce_tail);
            if position + round(len) - self.bounce_head > size {
                return None;
            }
        }
        Some(position)
    }

    /// Moves what came of the oldest READ's response into place.
    #[cold]
    fn take_response(&mut self, wq: &mut WorkQueues, segment: &Segment) -> Result<bool, Fault> {
        let lane = segment.lane(self.lane);
        let mut moved = false;
        while let Some(&read) = self.reads.front() {
            let wqe = *wq.sq.get(read);
            let left = wqe.len - self.read_at;
            if left > 0 {
                let addr = wqe.addr + u64::from(self.read_at);
                let pin = wq
                    .pin_local(wqe.lkey, addr, left as usize, Access::LOCAL_WRITE)
                    .map_err(|status| Fault::oldest(status, "the local memory of a READ is not registered for writing"))?;
                // SAFETY: the pin vouches for `left` bytes, the segment for the stream.
                let n = unsafe { stream::read(segment.resp(self.lane), &lane.resp_tail, &lane.resp_head, pin.as_ptr(), pin.len()) };
                self.read_at += n as u32;
                moved |= n > 0;
                if self.read_at < wqe.len {
                    break;
                }
            } else if lane.accepted.load(Ordering::Acquire) <= read {
                break;
            }
            wq.stats.add(RailCounter::RxBounce, u64::from(wqe.len));
            self.reads.pop_front();
            self.read_at = 0;
            moved = true;
        }
        Ok(moved)
    }

    /// The responder cannot pull a transfer: finds out which, and gives up on pulling for good.
    #[cold]
    fn begin_fill(&mut self, wq: &WorkQueues, lane: &Lane) -> Result<(), Fault> {
        let want = lane.fill_want.load(Ordering::Acquire);
        self.filled = want;
        if want == 0 {
            return Ok(());
        }
        self.pulls = false;
        wq.stats.add(RailCounter::CmaRefused, 1);
        let nonsense =
            || Fault::oldest(WcStatus::GeneralErr, format!("the peer asked for the bytes of descriptor {want}, which is not in flight"));
        let desc = want - 1;
        if desc >= self.tail || self.tail - desc > DESCS {
            return Err(nonsense());
        }
        let Owner { request, at, .. } = *self.owner.get((desc % DESCS) as usize).ok_or_else(nonsense)?;
        if request < wq.sq.acked || request >= wq.sq.sent {
            return Err(nonsense());
        }
        let wqe = wq.sq.get(request);
        let from = lane.fill_from.load(Ordering::Relaxed);
        if wqe.inline || wqe.opcode == Opcode::Read || from > u64::from(wqe.len - at) {
            return Err(nonsense());
        }
        // It was counted whole when the descriptor was published; what is still missing counts where it goes now.
        wq.stats.take(RailCounter::TxCma, u64::from(wqe.len - at) - from);
        self.fill = Some((request, at + from as u32, wqe.len));
        Ok(())
    }

    #[cold]
    fn feed(&mut self, wq: &mut WorkQueues, segment: &Segment) -> Result<bool, Fault> {
        let Some((request, at, end)) = self.fill else { return Ok(false) };
        if request < wq.sq.acked || at == end {
            self.fill = None;
            return Ok(false);
        }
        let wqe = *wq.sq.get(request);
        let lane = segment.lane(self.lane);
        let pin = wq
            .pin_local(wqe.lkey, wqe.addr + u64::from(at), (end - at) as usize, Access::empty())
            .map_err(|status| Fault::oldest(status, "memory was deregistered while it was being sent"))?;
        // SAFETY: the pin vouches for the rest of the request, the segment for the stream.
        let n = unsafe { stream::write(segment.fill(self.lane), &lane.fill_tail, &lane.fill_head, pin.as_ptr(), pin.len()) };
        wq.stats.add(RailCounter::TxBounce, n as u64);
        self.fill = Some((request, at + n as u32, end));
        Ok(n > 0)
    }
}

/// What a bounced piece takes of the ring: whole lines.
pub fn round(len: u64) -> u64 {
    len.next_multiple_of(64)
}

#[cold]
fn local_fault(status: WcStatus) -> Fault {
    Fault::sending(status, "a send request names local memory that is not registered")
}
