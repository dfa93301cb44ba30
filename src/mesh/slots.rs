//! The slots of buffers between two ranks: memory that a peer may write to at any time, and the messages that go there, in order. Plain data under the
//! lock of the mesh; [`super::pair`] feeds it.

use std::collections::{BTreeMap, VecDeque};

use crate::base::error::{Error, Result};
use crate::link::Failure;
use crate::link::duplex::Target;
use crate::link::limits::SLOTS;

use super::device::Part;
use super::ops::{OpId, Ops, Outcome};

/// Buffers that one rank may have for another's messages: half of the link's slots, so that there are some for other receives.
const MAX_INCOMING: usize = SLOTS / 2;

/// A message for a slot.
#[derive(Debug, Clone, Copy)]
pub struct SlotSend {
    /// The operation.
    pub op: OpId,
    /// Its bytes.
    pub part: Part,
    /// Where in the peer's memory they go.
    pub offset: u64,
}

/// One that this rank sends to.
#[derive(Debug, Default)]
struct Outgoing {
    /// A buffer of this rank has it.
    taken: bool,
    /// Once the peer has told of its memory.
    target: Option<Target>,
    sends: VecDeque<SlotSend>,
}

/// One that this rank receives into.
#[derive(Debug, Default)]
struct Incoming {
    /// Messages that nobody has waited for yet.
    arrived: u64,
    waiters: VecDeque<OpId>,
    /// The operation that closes it.
    closing: Option<OpId>,
}

/// All slots between two ranks.
#[derive(Debug, Default)]
pub struct Slots {
    outgoing: BTreeMap<u64, Outgoing>,
    incoming: BTreeMap<u64, Incoming>,
}

impl Slots {
    /// A buffer sends to this slot from now on.
    ///
    /// Errors: another does.
    pub fn take_outgoing(&mut self, slot: u64) -> Result<()> {
        let outgoing = self.outgoing.entry(slot).or_default();
        if outgoing.taken {
            return Err(Error::usage(format!("slot {slot}: another buffer of this rank sends to it")));
        }
        outgoing.taken = true;
        Ok(())
    }

    /// It does so no more: what was not posted is cancelled.
    pub fn give_outgoing(&mut self, slot: u64, ops: &mut Ops) -> usize {
        let Some(outgoing) = self.outgoing.get_mut(&slot) else { return 0 };
        let sends = std::mem::take(&mut outgoing.sends);
        sends.iter().for_each(|send| ops.end(send.op, Outcome::Cancelled));
        outgoing.taken = false;
        if outgoing.target.is_none() {
            self.outgoing.remove(&slot);
        }
        sends.len()
    }

    /// A buffer receives into this slot from now on.
    ///
    /// Errors: another does; too many.
    pub fn take_incoming(&mut self, slot: u64) -> Result<()> {
        if self.incoming.contains_key(&slot) {
            return Err(Error::usage(format!("slot {slot}: another buffer of this rank receives into it")));
        }
        if self.incoming.len() >= MAX_INCOMING {
            return Err(Error::usage(format!(
                "slot {slot}: this rank has {MAX_INCOMING} buffers for that one's messages, the most there may be"
            )));
        }
        self.incoming.insert(slot, Incoming::default());
        Ok(())
    }

    /// It is being closed by this operation.
    pub fn closing_incoming(&mut self, slot: u64, op: OpId) {
        if let Some(incoming) = self.incoming.get_mut(&slot) {
            incoming.closing = Some(op);
        }
    }

    /// The peer is lost: the operations that close slots, which need no answer any more.
    pub fn give_up(&mut self) -> impl Iterator<Item = OpId> + '_ {
        self.incoming.values_mut().filter_map(|incoming| incoming.closing.take())
    }

    /// It is closed: the operation that closed it.
    pub fn give_incoming(&mut self, slot: u64) -> Option<OpId> {
        self.incoming.remove(&slot)?.closing
    }

    /// Whether a slot that this rank receives into is being closed.
    pub fn is_closing(&self, slot: u64) -> bool {
        self.incoming.get(&slot).is_some_and(|incoming| incoming.closing.is_some())
    }

    /// The peer may be sent to: whether the slot was not open before, and it has no more than it may have.
    pub fn opened(&mut self, slot: u64, target: Target) -> bool {
        let open = self.outgoing.values().filter(|outgoing| outgoing.target.is_some()).count();
        open < MAX_INCOMING && self.outgoing.entry(slot).or_default().target.replace(target).is_none()
    }

    /// The peer closes what this sequence number names: whether it was open.
    pub fn withdraw(&mut self, sequence: u64) -> bool {
        let here = |outgoing: &Outgoing| outgoing.target.is_some_and(|target| target.sequence == sequence);
        let Some(slot) = self.outgoing.iter().find(|(_, outgoing)| here(outgoing)).map(|(slot, _)| *slot) else { return false };
        if let Some(outgoing) = self.outgoing.get_mut(&slot) {
            outgoing.target = None;
            if !outgoing.taken {
                self.outgoing.remove(&slot);
            }
        }
        true
    }

    /// Whether a message waits for the peer to have its slot open.
    pub fn waits(&self) -> bool {
        self.outgoing.values().any(|outgoing| outgoing.target.is_none() && !outgoing.sends.is_empty())
    }

    /// Sends, as soon as the peer has the slot open.
    pub fn send(&mut self, slot: u64, send: SlotSend) {
        self.outgoing.entry(slot).or_default().sends.push_back(send);
    }

    /// Posts what can be, by `post`, which says whether there was room. One that does not fit the peer's memory has failed. How many have.
    pub fn post(&mut self, ops: &mut Ops, mut post: impl FnMut(&Target, &SlotSend) -> Result<bool>) -> Result<usize> {
        let mut failed = 0;
        for (slot, outgoing) in &mut self.outgoing {
            let Some(target) = outgoing.target else { continue };
            while let Some(send) = outgoing.sends.front() {
                let (len, has) = (send.part.len, target.len);
                if send.offset.checked_add(len as u64).is_none_or(|end| end > has) {
                    let offset = send.offset;
                    let why = Error::usage(format!("slot {slot}: {len} bytes to offset {offset} of the peer's {has}"));
                    ops.end(send.op, Outcome::Failed(Failure::from_error(&why)));
                    failed += 1;
                } else if !post(&target, send)? {
                    return Ok(failed);
                }
                outgoing.sends.pop_front();
            }
        }
        Ok(failed)
    }

    /// Waits for a message: whether one is here, which is its then.
    pub fn recv(&mut self, slot: u64, op: OpId) -> bool {
        let Some(incoming) = self.incoming.get_mut(&slot) else { return false };
        if incoming.arrived > 0 {
            incoming.arrived -= 1;
            return true;
        }
        incoming.waiters.push_back(op);
        false
    }

    /// A message is here: whose it is, if somebody waits.
    pub fn arrived(&mut self, slot: u64) -> Option<OpId> {
        let incoming = self.incoming.get_mut(&slot)?;
        let waiter = incoming.waiters.pop_front();
        incoming.arrived += u64::from(waiter.is_none());
        waiter
    }

    /// Nobody waits for this any more: whether somebody did.
    pub fn cancel(&mut self, op: OpId) -> bool {
        let waiters = self.incoming.values_mut().map(|incoming| &mut incoming.waiters);
        let mut found = false;
        for waiters in waiters {
            let before = waiters.len();
            waiters.retain(|waiter| *waiter != op);
            found |= waiters.len() < before;
        }
        found
    }
}

#[cfg(test)]
impl Slots {
    /// Entries that it has.
    pub fn remembered(&self) -> usize {
        self.outgoing.len() + self.incoming.len()
    }
}
