//! Where the messages of a receiving comm land: completions of its queue pairs become done requests. Announced messages were written in place;
//! eager ones are copied there. [`super::recv`] calls it, on the thread that drives the comm.

use std::sync::Arc;

use crate::base::clock;
use crate::base::stage::{self, Stage};
use crate::fabric::{Completion, Opcode, Payload, PostError, SendRequest};

use super::comm::Core;
use super::cts_fifo::{self, AT_CREDIT, Imm, Records, SLOTS};
use super::eager::{Arrival, EAGER_SIZE, Inbox};
use super::liveness::Failure;
use super::mr_cache::{MrHandle, MrTable};
use super::rails::ANNOUNCES;
use super::recv::RecvBuffer;
use super::request::{MAX_RECVS, RequestId};
use super::wr_id::{WrId, WrKind};

/// Where messages land, and what is known of them.
pub(super) struct Landing {
    /// Dropped after the core, which registered it.
    pub records: Records,
    pub slots: Box<[RecvSlot; SLOTS]>,
    /// Up to which announcement the sender is known to have read them.
    pub read: u64,
    pub inbox: Inbox,
    pub mrs: Arc<MrTable>,
    /// [`MrTable::kept`] when the receives outstanding were last looked at.
    pub kept: u64,
    pub dev: usize,
}

/// An announced receive.
#[derive(Debug, Clone, Copy)]
pub(super) struct RecvSlot {
    /// Announced, and its group is not done.
    pub busy: bool,
    /// Its message has landed.
    pub landed: bool,
    /// Which message of the request it is.
    pub index: u8,
    pub request: RequestId,
    pub sequence: u64,
    /// Room for so many bytes.
    pub room: u64,
    /// The registration that they are of.
    pub mr: MrHandle,
    /// Size and number of stripes, once known; 0 stripes before.
    pub size: u64,
    pub stripes: u32,
    /// Which of them have landed: a bit each.
    pub seen: u64,
}

/// Half of the FIFO: see [`super::eager`].
pub(super) const HALF_LAP: u64 = SLOTS as u64 / 2;

pub(super) const FREE: RecvSlot = RecvSlot {
    busy: false,
    landed: false,
    index: 0,
    request: RequestId(0),
    sequence: 0,
    room: 0,
    mr: MrHandle(0),
    size: 0,
    stripes: 0,
    seen: 0,
};

impl Landing {
    #[inline]
    pub fn slot(&mut self, sequence: u64) -> Option<&mut RecvSlot> {
        self.slots.get_mut((sequence % SLOTS as u64) as usize)
    }

    /// Whether announcement `sequence` may be written: the receive a lap before it is done, and the sender has read of it. (It need not have:
    /// an eager message may have served it.)
    #[inline(always)]
    pub fn is_free(&self, sequence: u64) -> bool {
        let slot = self.slots.get((sequence % SLOTS as u64) as usize);
        slot.is_some_and(|slot| !slot.busy) && sequence < self.read + SLOTS as u64
    }

    /// Whether `n` more receives with the eager tag can be noted.
    #[inline]
    pub fn has_places(&self, n: usize) -> bool {
        self.inbox.has_room(n as u32, |sequence| {
            let slot = self.slots.get((sequence % SLOTS as u64) as usize);
            slot.is_none_or(|slot| !slot.busy || slot.landed || slot.sequence != sequence)
        })
    }

    /// A group was announced from `tail` on: notes those with the eager tag, and takes what has come for them.
    #[inline(never)]
    pub fn count(&mut self, core: &mut Core, tail: u64, buffers: &[RecvBuffer]) {
        let Some(tag) = buffers.first().and_then(|first| self.inbox.tag(first.tag as u32)) else { return };
        for (sequence, buffer) in (tail..).zip(buffers).filter(|(_, buffer)| buffer.tag as u32 == tag) {
            self.inbox.post(Some(sequence), RequestId(0), buffer.addr, buffer.len, buffer.mr);
        }
        if let Some(last) = buffers.last() {
            self.inbox.announced(buffers.len(), last.tag as u32, last.len);
        }
        self.deliver(core);
    }

    /// Fails the comm if the memory of a receive outstanding was deregistered and its region is kept by others, so that no key stops the
    /// message. Called before each completion is believed: a message that came after `deregMr` had returned is not reported as received.
    #[inline(always)]
    pub fn check_registrations(&mut self, core: &mut Core) {
        let kept = self.mrs.kept();
        if kept != self.kept {
            self.kept = kept;
            self.look_for_deregistered(core);
        }
    }

    #[cold]
    #[inline(never)]
    fn look_for_deregistered(&mut self, core: &mut Core) {
        for slot in self.slots.iter_mut().filter(|slot| slot.busy && !slot.landed && slot.room > 0) {
            if let Err(error) = self.mrs.is_registered("a receive outstanding", slot.mr) {
                // Its message, if that is among the completions taken, is not expected any more.
                slot.busy = false;
                core.fail(Failure::internal(error.to_string()));
            }
        }
    }

    /// A posting has completed.
    #[inline(always)]
    pub fn completed(&mut self, core: &mut Core, wr: &WrId, completion: &Completion) {
        if wr.kind == WrKind::Recv {
            return self.received(core, wr, completion);
        }
        match wr.kind {
            WrKind::Flush => {
                if let Some(request) = core.requests.get_mut(wr.id) {
                    request.left = request.left.saturating_sub(1);
                }
            }
            WrKind::Cts => core.accepted(wr.id),
            WrKind::Data | WrKind::Recv => {}
        }
    }

    /// A stripe has landed: says so to its slot, and replaces the receive that it consumed.
    #[inline(always)]
    fn received(&mut self, core: &mut Core, wr: &WrId, completion: &Completion) {
        self.check_registrations(core);
        let lane = usize::from(wr.lane);
        match core.rails.post_recv(lane) {
            // A queue pair that has failed since says so itself, behind what arrived before.
            Ok(()) | Err(PostError::State(_)) => {}
            Err(error) => return core.post_failed(WrKind::Recv, lane, error),
        }
        let Some(imm) = completion.imm else { return core.nonsense(format_args!("a message without an immediate")) };
        let (number, meaning) = Imm::decode(imm);
        if let Imm::Eager(low) = meaning {
            return self.arrived(core, number, low, completion.byte_len);
        }
        let Landing { records, slots, read, .. } = self;
        let Some(slot) = slots.get_mut(usize::from(number)).filter(|slot| slot.busy && !slot.landed) else {
            return unexpected(core, number);
        };
        *read = (*read).max(slot.sequence + 1);
        match meaning {
            Imm::Whole(size) if slot.seen == 0 => {
                slot.size = u64::from(size);
                slot.landed = true;
            }
            Imm::Whole(_) => return whole_after_stripes(core, number),
            Imm::Stripe(index) => {
                if !stripe_landed(core, records, slot, number, index) {
                    return;
                }
            }
            Imm::Eager(_) => {}
        }
        if slot.size > slot.room {
            return too_much(core, slot.size, slot.room, number);
        }
        if slot.landed {
            self.landed(core, number);
        }
    }

    /// A message is whole. Its slot stays taken until its group is done: the sender looks at all of them until then.
    #[inline]
    fn landed(&mut self, core: &mut Core, number: u8) {
        let Some(slot) = self.slots.get(usize::from(number)).copied() else { return };
        let Some(request) = core.requests.get_mut(slot.request) else { return };
        if let Some(size) = request.bytes.get_mut(usize::from(slot.index)) {
            *size = slot.size as u32;
        }
        request.left = request.left.saturating_sub(1);
        if request.left == 0 {
            let first = slot.sequence - u64::from(slot.index);
            for sequence in first..first + u64::from(request.n) {
                if let Some(slot) = self.slot(sequence) {
                    slot.busy = false;
                }
            }
            stage::reach(Stage::RecvDone);
        }
    }

    /// An eager message has landed.
    #[inline(never)]
    fn arrived(&mut self, core: &mut Core, slot: u8, low: u16, len: u32) {
        if !self.inbox.arrive(slot, low, len as usize) {
            return core.nonsense(format_args!("an eager message of {len} bytes in slot {slot}, number {low}"));
        }
        core.moved_beside(len as usize);
        self.deliver(core);
    }

    /// Copies what has come to the receives that it is for.
    fn deliver(&mut self, core: &mut Core) {
        loop {
            let (arrival, place) = match self.inbox.deliver() {
                Ok(Some(delivery)) => delivery,
                Ok(None) => break,
                Err(Arrival { number, .. }) => {
                    return core.nonsense(format_args!("an eager message for receive {number}, which had its message"));
                }
            };
            let Some(sequence) = place.announced else {
                let size = self.copy(core, arrival, place.addr, place.len as usize, place.mr);
                self.finish(core, place.request, size);
                continue;
            };
            let waits = |slot: &&mut RecvSlot| slot.busy && slot.sequence == sequence && !slot.landed && slot.stripes == 0;
            if self.slot(sequence).filter(waits).is_none() {
                return unexpected(core, (sequence % SLOTS as u64) as u8);
            }
            let size = self.copy(core, arrival, place.addr, place.len as usize, place.mr);
            if core.has_failed() {
                return;
            }
            if let Some(slot) = self.slot(sequence) {
                (slot.size, slot.landed) = (u64::from(size), true);
            }
            self.landed(core, (sequence % SLOTS as u64) as u8);
        }
        self.give_back(core);
    }

    /// Copies an eager message to where it belongs; as much of it as there is room for, and how much that is.
    pub fn copy(&self, core: &mut Core, arrival: Arrival, addr: usize, room: usize, mr: MrHandle) -> u32 {
        let mut bytes = [0; EAGER_SIZE];
        let len = usize::from(arrival.len).min(room);
        let Some(bytes) = bytes.get_mut(..len).filter(|bytes| !bytes.is_empty()) else { return 0 };
        self.records.eager(arrival.slot, bytes);
        if let Err(error) = self.mrs.fill("a receive outstanding", self.dev, mr, addr, bytes) {
            core.fail(Failure::internal(error.to_string()));
        }
        len as u32
    }

    /// The request of an unannounced receive is done.
    pub fn finish(&self, core: &mut Core, id: RequestId, size: u32) {
        let failed = core.has_failed();
        if let Some(request) = core.requests.get_mut(id).filter(|_| !failed) {
            request.left = 0;
            request.bytes = [0; MAX_RECVS];
            if let Some(bytes) = request.bytes.first_mut() {
                *bytes = size;
            }
            stage::reach(Stage::RecvDone);
        }
    }

    /// Lets the sender know of the eager slots that were emptied, if it is worth it.
    #[inline]
    pub fn give_back(&mut self, core: &mut Core) {
        if self.inbox.owes() {
            self.say(core);
        }
    }

    /// Lets the sender know of quiet receives if they have waited for long enough.
    #[inline(never)]
    pub fn tell(&mut self, core: &mut Core) {
        if !core.has_failed() && self.inbox.is_overdue(clock::now()) {
            self.say(core);
        }
    }

    #[inline(never)]
    fn say(&mut self, core: &mut Core) {
        // Without room, this is tried again.
        if core.rails.room(ANNOUNCES) == 0 || core.has_failed() {
            return;
        }
        let news = self.inbox.news().encode();
        let (remote_addr, rkey) = core.rails.remote(ANNOUNCES, AT_CREDIT);
        let write =
            SendRequest { wr_id: 0, opcode: Opcode::Write, payload: Payload::Inline(&news), remote_addr, rkey, imm: 0, signaled: false };
        match core.rails.post_send_all(ANNOUNCES, &mut [write], WrKind::Cts, RequestId(0), false) {
            Ok(()) => self.inbox.told(),
            // As in `received`.
            Err(PostError::State(_)) => {}
            Err(error) => core.post_failed(WrKind::Cts, ANNOUNCES, error),
        }
    }
}

/// A stripe of a message has landed, whose record says of how many; whether they agree.
#[inline(never)]
fn stripe_landed(core: &mut Core, records: &Records, slot: &mut RecvSlot, number: u8, index: u32) -> bool {
    let lanes = core.rails.lanes() as u32;
    let record = records.read(number);
    if record.epoch != cts_fifo::epoch(slot.sequence) || !(1..=lanes).contains(&record.stripes) || index >= record.stripes {
        core.nonsense(format_args!("stripe {index} for slot {number} with {record:?}"));
        return false;
    }
    if slot.stripes == 0 {
        slot.size = record.size;
        slot.stripes = record.stripes;
    }
    if (slot.size, slot.stripes) != (record.size, record.stripes) || slot.seen & 1 << index != 0 {
        core.nonsense(format_args!("stripe {index} for slot {number} twice, or two records of it"));
        return false;
    }
    core.record_received();
    slot.seen |= 1 << index;
    slot.landed = slot.seen.count_ones() == slot.stripes;
    true
}

#[cold]
#[inline(never)]
fn unexpected(core: &mut Core, number: u8) {
    core.nonsense(format_args!("a message for slot {number}, where none is expected"));
}

#[cold]
#[inline(never)]
fn whole_after_stripes(core: &mut Core, number: u8) {
    core.nonsense(format_args!("a whole message for slot {number} after stripes of it"));
}

#[cold]
#[inline(never)]
fn too_much(core: &mut Core, size: u64, room: u64, number: u8) {
    core.nonsense(format_args!("{size} bytes for slot {number}, which has room for {room}"));
}
