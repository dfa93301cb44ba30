//! The receives of a comm that are outstanding: completions of its queue pairs become done requests. [`super::receiver`] calls it, on the thread
//! that drives the comm.

use std::sync::Arc;

use crate::base::stage::{self, Stage};
use crate::fabric::{Completion, PostError};
use crate::link::incoming::{Imm, IncomingMessage, Records, epoch};
use crate::link::limits::SLOTS;
use crate::link::memory::{MrHandle, MrTable};
use crate::link::wr_id::{RequestId, WrId, WrKind};
use crate::link::{Failure, Link};

/// Which receives are outstanding, and what is known of them.
pub(super) struct RecvState {
    /// What the sender writes its completion records into.
    pub records: Records,
    pub slots: Box<[RecvSlot; SLOTS]>,
    pub mrs: Arc<MrTable>,
    /// [`MrTable::shared_deregs`] when the receives outstanding were last checked.
    pub shared_deregs: u64,
    /// Receives whose messages have not come.
    pub unused: u32,
    /// The last of the clear-to-sends, which are held.
    pub held: u32,
    /// Messages that have come since the last clear-to-send was sent.
    pub come: u32,
}

/// A receive of which the sender was told.
#[derive(Debug, Clone, Copy)]
pub(super) struct RecvSlot {
    /// It was posted, and its group is not done.
    pub busy: bool,
    /// Which message of the request it is.
    pub index: u8,
    pub request: RequestId,
    pub sequence: u64,
    /// Room for so many bytes.
    pub room: u64,
    /// The registration that they are of.
    pub mr: MrHandle,
    /// What has come.
    pub incoming: IncomingMessage,
}

pub(super) const FREE: RecvSlot =
    RecvSlot { busy: false, index: 0, request: RequestId(0), sequence: 0, room: 0, mr: MrHandle(0), incoming: IncomingMessage::NONE };

impl RecvState {
    #[inline]
    pub fn slot(&mut self, sequence: u64) -> Option<&mut RecvSlot> {
        self.slots.get_mut((sequence % SLOTS as u64) as usize)
    }

    /// Whether the sender may be told of receive `sequence`: the one a lap before it is done.
    #[inline(always)]
    pub fn is_free(&self, sequence: u64) -> bool {
        let slot = self.slots.get((sequence % SLOTS as u64) as usize);
        slot.is_some_and(|slot| !slot.busy)
    }

    /// Clear-to-sends that the sender has and has not used, as far as is known here.
    #[inline(always)]
    fn known(&self) -> u32 {
        self.unused.saturating_sub(self.held)
    }

    /// Whether the next clear-to-send can be held, to go with later ones in one system call: the sender has more than are held, and they take the place of
    /// those whose messages have come, so that a caller who posts many and then makes no call has told the sender of all but those.
    #[inline(always)]
    pub fn can_hold_cts(&mut self, link: &Link) -> bool {
        let holds = self.held < self.come && self.known() > self.held && link.qps.len() == 1;
        if holds {
            self.held += 1;
        } else {
            (self.held, self.come) = (0, 0);
        }
        holds
    }

    /// Whether those that are held are to be sent, as no later ones have come.
    #[inline(always)]
    pub fn needs_held_cts(&mut self) -> bool {
        let needs = self.held > 0 && self.known() < self.held.div_ceil(2);
        if needs {
            (self.held, self.come) = (0, 0);
        }
        needs
    }

    /// Fails the comm if the memory of a receive outstanding was deregistered and its region is kept by others, so that no key stops the
    /// message. Called before each completion is believed: a message that came after `deregMr` had returned is not reported as received.
    #[inline(always)]
    pub fn check_registrations(&mut self, link: &mut Link) {
        let shared_deregs = self.mrs.shared_deregs();
        if shared_deregs != self.shared_deregs {
            self.shared_deregs = shared_deregs;
            self.look_for_deregistered(link);
        }
    }

    #[cold]
    #[inline(never)]
    fn look_for_deregistered(&mut self, link: &mut Link) {
        for slot in self.slots.iter_mut().filter(|slot| slot.busy && !slot.incoming.completed && slot.room > 0) {
            if let Err(error) = self.mrs.is_registered("a receive outstanding", slot.mr) {
                // Its message, if that is among the completions taken, is not expected any more.
                slot.busy = false;
                link.fail(Failure::internal(error.to_string()));
            }
        }
    }

    /// A work request has completed.
    #[inline(always)]
    pub fn completed(&mut self, link: &mut Link, wr: &WrId, completion: &Completion) {
        if wr.kind == WrKind::Recv {
            self.received(link, wr, completion);
        } else if wr.kind == WrKind::Flush
            && let Some(request) = link.requests.get_mut(wr.id)
        {
            request.left = request.left.saturating_sub(1);
        }
    }

    /// A stripe is here: accounts for it in its slot, and replaces the receive request that it consumed.
    #[inline(always)]
    fn received(&mut self, link: &mut Link, wr: &WrId, completion: &Completion) {
        self.check_registrations(link);
        let qp = usize::from(wr.qp);
        match link.qps.post_recv(qp) {
            // A queue pair that has failed since says so itself, after what arrived before.
            Ok(()) | Err(PostError::State(_)) => {}
            Err(error) => return link.post_failed(WrKind::Recv, qp, error),
        }
        let Some(imm) = completion.imm else { return link.protocol_error(format_args!("a message without an immediate")) };
        let (number, meaning) = Imm::decode(imm);
        let RecvState { records, slots, .. } = self;
        let Some(slot) = slots.get_mut(usize::from(number)).filter(|slot| slot.busy && !slot.incoming.completed) else {
            return unexpected(link, number);
        };
        match meaning {
            Imm::Whole(size) => {
                if !slot.incoming.whole(size) {
                    return whole_after_stripes(link, number);
                }
            }
            Imm::Stripe(index) => {
                if !stripe_received(link, records, slot, number, index) {
                    return;
                }
            }
        }
        if slot.incoming.size > slot.room {
            return too_much(link, slot.incoming.size, slot.room, number);
        }
        if slot.incoming.completed {
            self.message_completed(link, number);
        }
    }

    /// A message is whole. Its slot stays taken until its group is done: the slots of a group are freed together.
    #[inline]
    fn message_completed(&mut self, link: &mut Link, number: u8) {
        let Some(slot) = self.slots.get(usize::from(number)).copied() else { return };
        let Some(request) = link.requests.get_mut(slot.request) else { return };
        if let Some(size) = request.bytes.get_mut(usize::from(slot.index)) {
            *size = slot.incoming.size as u32;
        }
        request.left = request.left.saturating_sub(1);
        (self.unused, self.come) = (self.unused.saturating_sub(1), self.come.saturating_add(1));
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

/// A stripe of a message is here, whose record says of how many; whether they agree.
#[inline(never)]
fn stripe_received(link: &mut Link, records: &Records, slot: &mut RecvSlot, number: u8, index: u32) -> bool {
    match slot.incoming.stripe(index, records.read(number), epoch(slot.sequence), link.qps.len() as u32) {
        Ok(()) => {
            link.record_received();
            true
        }
        Err(why) => {
            link.protocol_error(format_args!("stripe {index} for slot {number} {why}"));
            false
        }
    }
}

#[cold]
#[inline(never)]
fn unexpected(link: &mut Link, number: u8) {
    link.protocol_error(format_args!("a message for slot {number}, where none is expected"));
}

#[cold]
#[inline(never)]
fn whole_after_stripes(link: &mut Link, number: u8) {
    link.protocol_error(format_args!("a whole message for slot {number} after stripes of it"));
}

#[cold]
#[inline(never)]
fn too_much(link: &mut Link, size: u64, room: u64, number: u8) {
    link.protocol_error(format_args!("{size} bytes for slot {number}, which has room for {room}"));
}
