//! Where the messages of a receiving comm land: completions of its queue pairs become done requests. [`super::recv`] calls it, on the
//! thread that drives the comm.

use std::sync::Arc;

use crate::base::stage::{self, Stage};
use crate::fabric::{Completion, PostError};

use super::comm::Core;
use super::cts_fifo::{self, Imm, Records, SLOTS};
use super::liveness::Failure;
use super::mr_cache::{MrHandle, MrTable};
use super::request::RequestId;
use super::wr_id::{WrId, WrKind};

/// Where messages land, and what is known of them.
pub(super) struct Landing {
    /// Dropped after the core, which registered it.
    pub records: Records,
    pub slots: Box<[RecvSlot; SLOTS]>,
    pub mrs: Arc<MrTable>,
    /// [`MrTable::kept`] when the receives outstanding were last looked at.
    pub kept: u64,
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

    /// Whether announcement `sequence` may be written: the receive a lap before it is done.
    #[inline(always)]
    pub fn is_free(&self, sequence: u64) -> bool {
        let slot = self.slots.get((sequence % SLOTS as u64) as usize);
        slot.is_some_and(|slot| !slot.busy)
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
        let Landing { records, slots, .. } = self;
        let Some(slot) = slots.get_mut(usize::from(number)).filter(|slot| slot.busy && !slot.landed) else {
            return unexpected(core, number);
        };
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
