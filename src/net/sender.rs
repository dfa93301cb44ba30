//! The sending end of a comm whose peer has answered: looks in the CTS FIFO for what the receiver announced and writes there.
//! [`super::send`] calls it, on the thread that drives the comm; nothing waits, allocates, locks or logs unless something went wrong.

use crate::base::error::Result;
use crate::base::stage::{self, Stage};
use crate::base::stats::{CommCounter, WaitCause};
use crate::engine::Progress;
use crate::fabric::{Completion, Opcode, Payload, PostError, SendRequest, Sge};

use super::background::Sleep;
use super::comm::{Core, too_long};
use super::cts_fifo::{self, CtsFifo, IMM_LIMIT, Imm, RECORD_SIZE, Record, SLOTS, Slot};
use super::handshake::Established;
use super::mr_cache::{MrHandle, MrTable, Registration};
use super::rails::{Plan, Rails, Side};
use super::request::{MAX_RECVS, Request, RequestId, Sizes};
use super::wr_id::{WrId, WrKind};
use super::{MAX_MESSAGE, Net};

/// A sender whose peer has answered.
pub(super) struct Sender {
    pub core: Core,
    /// Dropped after the core, which registered it.
    pub fifo: CtsFifo,
    /// Sequence number of the group at the head of the FIFO.
    head: u64,
    /// Copy of that group, once all of it has come; `group_len` 0 before.
    group: [Slot; MAX_RECVS],
    group_len: usize,
    /// Which of its slots were used: a bit each.
    used: u8,
    split_min: usize,
    dev: usize,
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.core.close();
    }
}

impl Sender {
    pub fn new(net: &Net, dev: usize, established: Established<CtsFifo>) -> Sender {
        let name = format!("send comm {} on {} to", established.stats.id(), net.device_name(dev));
        let (core, fifo) = Core::new(established, Side::Send, name, &net.config);
        Sender {
            core,
            fifo,
            head: 0,
            group: [Slot::default(); MAX_RECVS],
            group_len: 0,
            used: 0,
            split_min: net.config.split_min as usize,
            dev,
        }
    }

    #[inline(never)]
    pub fn isend(&mut self, mrs: &MrTable, addr: usize, len: usize, tag: i32, mr: MrHandle) -> Result<Option<RequestId>> {
        if self.core.has_failed() {
            return self.null_post();
        }
        if len > MAX_MESSAGE {
            return Err(too_long("isend", len));
        }
        let registration = if len > 0 { Some(mrs.lookup("isend", self.dev, mr, addr, len)?) } else { None };
        let index = match self.find(tag) {
            Some(index) => index,
            None => match self.find_later(tag) {
                Some(index) => index,
                None => return self.null_post(),
            },
        };
        let Some(slot) = self.group.get(index) else { return Ok(None) };
        let len = len.min(usize::try_from(slot.size).unwrap_or(usize::MAX));
        if slot.addr.checked_add(len as u64).is_none() {
            self.core.nonsense(format_args!("a receive of {} bytes at {:#x}, past the end of memory", slot.size, slot.addr));
            return self.null_post();
        }
        let Some(lane) = self.core.rails.lane_for_short(len, self.split_min) else {
            return self.isend_long(index, addr, len, registration);
        };
        let sequence = self.head + index as u64;
        let Some(id) = self.core.requests.insert(request(len, 1 << lane, sequence)) else { return self.full() };
        let write = Message { slot, sequence, addr, registration, id }.write(&self.core.rails, lane, 0, len, Imm::Whole(len as u32));
        if let Err(error) = self.core.rails.post_send(lane, [write], WrKind::Data, id, true) {
            return self.core.not_posted(id, WrKind::Data, lane, error);
        }
        self.core.rails.next_lane();
        self.posted(index);
        Ok(Some(id))
    }

    /// Sends a message that may take more than one request, or for which there is no room just now.
    #[inline(never)]
    fn isend_long(&mut self, index: usize, addr: usize, len: usize, registration: Option<&Registration>) -> Result<Option<RequestId>> {
        let Some(slot) = self.group.get(index) else { return Ok(None) };
        let plan = self.core.rails.plan(len, self.split_min);
        let lanes = self.core.rails.lanes_for_message(plan).filter(|_| self.core.requests.has_room());
        let Some(lanes) = lanes else {
            self.core.rails.unplan(plan);
            return self.full();
        };
        let sequence = self.head + index as u64;
        let Some(id) = self.core.requests.insert(request(len, lanes, sequence)) else { return Ok(None) };
        if let Err((lane, error)) = (Message { slot, sequence, addr, registration, id }).post_long(&mut self.core, plan) {
            return self.core.not_posted(id, WrKind::Data, lane, error);
        }
        self.posted(index);
        Ok(Some(id))
    }

    /// A message for slot `index` of the group was posted: goes on to the next group once all slots of this one were used.
    #[inline(always)]
    fn posted(&mut self, index: usize) {
        self.used |= 1 << index;
        if usize::from(self.used) == (1 << self.group_len) - 1 {
            self.head += self.group_len as u64;
            self.group_len = 0;
            self.used = 0;
        }
        self.core.posted();
        stage::reach(Stage::SendPosted);
    }

    /// All requests are in use, or a send queue is full.
    #[inline(never)]
    fn full(&mut self) -> Result<Option<RequestId>> {
        self.progress(WaitCause::Fabric);
        self.null_post()
    }

    /// Which of the head group's slots is unused and has this tag.
    #[inline(always)]
    fn find(&mut self, tag: i32) -> Option<usize> {
        if self.group_len == 0 {
            self.load_group();
        }
        let tag = tag as u32;
        let mut i = 0;
        while i < self.group_len && (self.used >> i & 1 != 0 || self.group.get(i).is_none_or(|slot| slot.tag != tag)) {
            i += 1;
        }
        (i < self.group_len).then_some(i)
    }

    /// The same after a poll: announcements arrive only while somebody polls.
    #[inline(never)]
    fn find_later(&mut self, tag: i32) -> Option<usize> {
        self.progress(WaitCause::PeerNoReceive);
        if self.core.has_failed() { None } else { self.find(tag) }
    }

    /// Copies the group at the head out of the FIFO, if all of it has come.
    #[inline(always)]
    fn load_group(&mut self) {
        let first = match self.fifo.read(self.head) {
            cts_fifo::Ready::NotYet => return,
            cts_fifo::Ready::Yes(slot) => slot,
            cts_fifo::Ready::Nonsense(value) => return self.bad_flag(value, self.head),
        };
        if !cts_fifo::valid_group(first.nreqs) {
            return self.bad_group(first.nreqs);
        }
        let len = first.nreqs as usize;
        self.group[0] = first;
        if len == 1 || self.load_others(len) {
            self.group_len = len;
        }
    }

    /// Copies the rest of a group; whether it has come.
    #[inline(never)]
    fn load_others(&mut self, len: usize) -> bool {
        for (i, place) in self.group.iter_mut().enumerate().take(len).skip(1) {
            let sequence = self.head + i as u64;
            match self.fifo.read(sequence) {
                cts_fifo::Ready::Yes(slot) if slot.nreqs as usize == len => *place = slot,
                cts_fifo::Ready::Yes(slot) => {
                    self.core.nonsense(format_args!("groups of {len} and {} in one", slot.nreqs));
                    return false;
                }
                cts_fifo::Ready::NotYet => return false,
                cts_fifo::Ready::Nonsense(value) => {
                    self.bad_flag(value, sequence);
                    return false;
                }
            }
        }
        true
    }

    #[cold]
    #[inline(never)]
    fn bad_flag(&mut self, value: u64, sequence: u64) {
        self.core.nonsense(format_args!("ready flag {value} where {} belongs", sequence + 1));
    }

    #[cold]
    #[inline(never)]
    fn bad_group(&mut self, nreqs: u32) {
        self.core.nonsense(format_args!("a group of {nreqs} receives"));
    }

    /// Nothing can be sent now.
    #[inline(never)]
    fn null_post(&mut self) -> Result<Option<RequestId>> {
        self.core.null_post()
    }

    #[inline(never)]
    pub fn progress(&mut self, cause: WaitCause) {
        if self.core.progress(cause, sent) {
            self.watch(cause);
        }
    }

    /// A step of the device's thread.
    pub fn step(&mut self) -> Progress {
        if self.core.has_failed() {
            return Progress::Done;
        }
        let (moved, watch) = self.core.progress_unasked(WaitCause::Fabric, sent);
        if watch {
            self.watch(WaitCause::Fabric);
        }
        if moved { Progress::Moved } else { Progress::Idle }
    }

    /// Before the device's thread sleeps.
    pub fn rest(&mut self, sleep: &mut Sleep) -> Progress {
        if self.core.has_failed() {
            return Progress::Done;
        }
        let (progress, watch) = self.core.rest(sleep, WaitCause::Fabric, sent);
        if watch {
            self.watch(WaitCause::Fabric);
        }
        progress
    }

    #[cold]
    fn watch(&mut self, cause: WaitCause) {
        let next = self.head + u64::from(self.used.count_ones());
        let why = if self.group_len > 0 { "with this tag; there is one with another" } else { "" };
        // Who only tests requests has no further send to post.
        self.core.watch((cause == WaitCause::PeerNoReceive).then_some(next), why);
    }

    #[inline(always)]
    pub fn test(&mut self, id: RequestId) -> Result<Option<Sizes>> {
        if !self.core.requests.is_done(id)? {
            self.core.check()?;
            self.progress(WaitCause::Fabric);
            if !self.core.requests.is_done(id)? {
                return self.core.check().map(|()| None);
            }
        }
        self.core.finish(id)
    }
}

/// The request of a message of `len` bytes that takes these lanes.
#[inline(always)]
fn request(len: usize, stripes: u64, sequence: u64) -> Request {
    let mut bytes = [0; MAX_RECVS];
    bytes[0] = len as u32;
    Request { n: 1, left: 1, stripes, sequence, bytes }
}

/// A message that is being posted.
#[derive(Clone, Copy)]
struct Message<'a> {
    slot: &'a Slot,
    sequence: u64,
    addr: usize,
    /// None for a message without bytes.
    registration: Option<&'a Registration>,
    id: RequestId,
}

impl Message<'_> {
    /// The WRITE of `len` bytes of it, with an immediate.
    #[inline(always)]
    fn write(&self, rails: &Rails, lane: usize, offset: usize, len: usize, imm: Imm) -> SendRequest<'static> {
        let rail = rails.rail_of(lane);
        let lkey = self.registration.map_or(0, |registration| registration.lkey(rail));
        SendRequest {
            wr_id: 0,
            opcode: Opcode::WriteWithImm,
            payload: Payload::Sge(Sge { addr: (self.addr + offset) as u64, len: len as u32, lkey }),
            remote_addr: self.slot.addr.wrapping_add(offset as u64),
            rkey: self.slot.rkeys.get(rail).copied().unwrap_or(0),
            imm: imm.encode((self.sequence % SLOTS as u64) as u8),
            signaled: true,
        }
    }

    /// Posts it in more than one request: several stripes, or one whose immediate does not tell all, or goes apart.
    #[inline(never)]
    fn post_long(self, core: &mut Core, plan: Plan) -> std::result::Result<(), (usize, PostError)> {
        let rails = &mut core.rails;
        let whole = plan.stripes == 1 && plan.len() < IMM_LIMIT;
        let record = Record { size: plan.len() as u64, stripes: plan.stripes as u32, epoch: cts_fifo::epoch(self.sequence) }.encode();
        for stripe in 0..plan.stripes {
            let (lane, offset, len) = plan.stripe(stripe);
            let imm = if whole { Imm::Whole(plan.len() as u32) } else { Imm::Stripe(stripe as u32) };
            let data = self.write(rails, lane, offset, len, imm);
            let apart = len > rails.max_with_imm(lane) as usize;
            let (remote_addr, rkey) = rails.remote(lane, (self.sequence % SLOTS as u64) as usize * RECORD_SIZE);
            let first = SendRequest { opcode: Opcode::Write, payload: Payload::Inline(&record), remote_addr, rkey, imm: 0, ..data };
            let body = SendRequest { opcode: Opcode::Write, imm: 0, ..data };
            let word = SendRequest { payload: Payload::Sge(Sge::default()), ..data };
            let posted = match (whole, apart) {
                (true, false) => rails.post_send_all(lane, &mut [data], WrKind::Data, self.id, true),
                (true, true) => rails.post_send_all(lane, &mut [body, word], WrKind::Data, self.id, true),
                (false, false) => rails.post_send_all(lane, &mut [first, data], WrKind::Data, self.id, true),
                (false, true) => rails.post_send_all(lane, &mut [first, body, word], WrKind::Data, self.id, true),
            };
            if !whole {
                // A record is moved as messages are, and is none.
                core.stats.add(CommCounter::Bytes, RECORD_SIZE as u64);
            }
            posted.map_err(|error| (lane, error))?;
        }
        Ok(())
    }
}

/// A stripe was accepted.
#[inline]
fn sent(core: &mut Core, wr: &WrId, _: &Completion) {
    let Some(request) = core.requests.get_mut(wr.id) else { return };
    request.stripes &= !(1 << wr.lane);
    if request.stripes == 0 && request.left > 0 {
        request.left = 0;
        stage::reach(Stage::SendDone);
    }
}
