//! One rank as seen by another: a link both ways, and the sends and receives that wait for it. Under the lock of the mesh, on whichever thread drives it.

mod events;

use std::collections::VecDeque;
use std::os::fd::RawFd;

use crate::base::error::{Error, Result};
use crate::base::stats::{CommStats, MeshOp, Wait, WaitCause};
use crate::link::Failure;
use crate::link::duplex::Duplex;
use crate::link::limits::{CONTROL_SIZE, MAX_MESSAGE, MAX_REQUESTS, SLOTS};

use super::device::{Part, Place};
use super::matching::{Matching, Send};
use super::ops::{OpId, Ops, Outcome};
use super::protocol::Small;
use super::protocol::{Control, Tag};
use super::recvs::{Recv, Recvs, put};
use super::slots::{SlotSend, Slots};
use super::small_sends::{SmallSend, SmallSends};

/// Control messages that wait at most: more than a peer that keeps to the protocol can ask for.
const MAX_QUEUED: usize = 16 * SLOTS;

/// Messages of collectives which match none of the peer's receives, that it is told of at a time.
const MAX_UNMATCHED: usize = 8;

/// Between two looks for the last acknowledgements of one that has left.
const ACKS_LOOK_NS: u64 = 50_000_000;

/// A peer.
pub struct Pair {
    link: Duplex,
    rank: usize,
    matching: Matching,
    slots: Slots,
    recvs: Recvs,
    /// Other control messages to it, not sent yet.
    controls: VecDeque<Control>,
    /// Of collectives and of users.
    small: [SmallSends; 2],
    /// Receives that the peer has advertised or offered.
    recvs_ready: u64,
    /// The messages that the peer knows to match none of its receives, when there were so many.
    sent_unmatched: (u64, Vec<OpId>),
    /// By the index of a request: which send it is of, and its bytes.
    sent: Vec<Option<(OpId, usize)>>,
    /// Operations that wait for this peer.
    outstanding: usize,
    /// It has sent its bye, and for which rank that it has lost.
    left: Option<Option<usize>>,
    /// When.
    left_at: u64,
    /// This rank has sent its own.
    bye_sent: bool,
    /// What is waited for from it, when last looked at; nothing once something has moved.
    wait: Wait,
}

/// What came from a peer that is not for its pair alone.
#[derive(Debug, Clone, Copy)]
pub enum PairEvent {
    /// It has a message for this offer.
    Claimed(u64),
    /// A small message.
    Message(Tag, Small),
    /// It has a message of so many bytes, and no receive for it.
    Unmatched(Tag, u64),
}

impl Pair {
    /// From a link to the rank.
    pub fn new(link: Duplex, rank: usize) -> Pair {
        Pair {
            link,
            rank,
            matching: Matching::default(),
            slots: Slots::default(),
            recvs: Recvs::default(),
            controls: VecDeque::new(),
            small: Default::default(),
            recvs_ready: 0,
            sent_unmatched: (0, Vec::new()),
            sent: Vec::with_capacity(MAX_REQUESTS),
            outstanding: 0,
            left: None,
            left_at: 0,
            bye_sent: false,
            wait: Wait::NONE,
        }
    }

    /// Its counters.
    pub fn stats(&self) -> &CommStats {
        self.link.stats()
    }

    /// Nothing is waited for from the peer; `over`: by nobody, until somebody does.
    pub fn waits_for_nothing(&mut self, over: bool) {
        self.wait = Wait::NONE;
        if over {
            self.link.waits_over();
        }
    }

    /// This is waited for from the peer, if nothing that says more is: a collective's before a user's message, and a receive before a send.
    pub fn waits_for(&mut self, receives: bool, op: MeshOp, tag: u64) {
        let unmatched = || self.matching.waits() || self.slots.waits() || self.small.iter().any(SmallSends::waits);
        let cause = match receives {
            true => WaitCause::PeerNoSend,
            false if unmatched() => WaitCause::PeerNoReceive,
            false => WaitCause::Fabric,
        };
        let weight = |wait: &Wait| (wait.op.is_collective(), wait.cause == WaitCause::PeerNoSend);
        let wait = Wait { cause, op, tag };
        if self.wait.cause == WaitCause::None || weight(&wait) > weight(&self.wait) {
            self.wait = wait;
        }
    }

    /// Whether its queue pairs are connected.
    pub fn poll_connected(&mut self) -> Result<bool> {
        self.link.poll_connected()
    }

    /// Sends, as soon as the peer receives.
    ///
    /// Errors: more than a message may have; a receive of another size; a peer that is gone.
    pub fn send(&mut self, op: OpId, tag: Tag, part: Part, ops: &mut Ops) -> Result<()> {
        fits(part.len)?;
        self.outstanding += 1;
        if let Some(small) = part.small.filter(|_| tag.is_small(part.len)) {
            if let Some(sends) = self.small.get_mut(tag.kind()) {
                sends.push(SmallSend { op, tag, small });
            }
            return self.post_small(ops);
        }
        if let Err(error) = self.matching.send(Send { op, tag, part }) {
            // Whatever waits for this peer has to hear of it.
            self.fail(&error);
        }
        self.flush_controls()?;
        self.post()
    }

    /// Sends a small message, if nothing is before it; whether it did.
    ///
    /// Errors: a peer that is gone.
    pub fn send_small(&mut self, tag: Tag, small: Small) -> Result<bool> {
        let Some(sends) = self.small.get_mut(tag.kind()).filter(|sends| sends.has_room()) else { return Ok(false) };
        if !self.controls.is_empty() || !self.link.send_control(&Control::Message(tag, small).encode())? {
            return Ok(false);
        }
        sends.sent_at_once(tag);
        self.link.carried(small.len());
        Ok(true)
    }

    /// Receives.
    ///
    /// Errors: more than a message may have; a peer that is gone.
    pub fn recv(&mut self, op: OpId, tag: Tag, place: Place) -> Result<()> {
        fits(place.len)?;
        self.outstanding += 1;
        self.add_recv(Recv::One { op, tag, place })
    }

    /// Offers a receive which others may get.
    ///
    /// Errors: a peer that is gone.
    pub fn offer(&mut self, number: u64, tag: Tag) -> Result<()> {
        self.add_recv(Recv::Offered { number, tag })
    }

    /// Receives the message that has claimed an offer.
    ///
    /// Errors: a peer that is gone.
    pub fn grant(&mut self, op: OpId, number: u64, tag: Tag, place: Place) -> Result<()> {
        self.outstanding += 1;
        self.add_recv(Recv::Granted { op, number, tag, place })
    }

    /// Takes an offer back.
    ///
    /// Errors: a peer that is gone.
    pub fn withdraw_offer(&mut self, number: u64) -> Result<()> {
        if self.recvs.remove_offer(number) { Ok(()) } else { self.queue_control(Control::WithdrawnOffer(number)) }
    }

    /// Takes an operation back, if nothing has come of it: it ends then, at once or once the peer has answered. A send that a peer has in mind is to
    /// be asked for again.
    ///
    /// Errors: a peer that is gone.
    pub fn cancel(&mut self, op: OpId, ops: &mut Ops) -> Result<()> {
        if let Some(recv) = self.recvs.remove(op) {
            self.ends(op, Outcome::Cancelled, ops);
            return match recv {
                Recv::Granted { number, .. } => self.queue_control(Control::WithdrawnOffer(number)),
                _ => Ok(()),
            };
        }
        if self.small.iter_mut().any(|sends| sends.cancel(op)) || self.matching.cancel(op) || self.slots.cancel(op) {
            self.ends(op, Outcome::Cancelled, ops);
            return Ok(());
        }
        self.recvs.withdraw(op).map_or(Ok(()), |sequence| self.queue_control(Control::Withdraw(sequence)))
    }

    /// The bytes that a receive with this tag is for, which is no small one.
    pub fn receives(&self, tag: Tag) -> Option<usize> {
        if self.outstanding == 0 { None } else { self.recvs.len_of(tag) }
    }

    /// The bytes of a message of the peer's with this tag, for which it knows no receive, though it knows of all.
    pub fn unmatched_there(&self, tag: Tag) -> Option<u64> {
        self.recvs.unmatched(tag)
    }

    /// Tells the peer that so many more of its small messages were received, of this tag's kind.
    ///
    /// Errors: a peer that is gone.
    pub fn send_received(&mut self, tag: Tag, number: u64) -> Result<()> {
        let (kind, mut all) = (tag.kind(), number);
        // What waits to be sent is told by this: the peer forgets what was waited for when it has that. So they are few, however slow it is.
        self.controls.retain(|control| match control {
            Control::Received(of, number) if *of == kind => {
                all += number;
                false
            }
            Control::Wanted(tag) => tag.kind() != kind,
            _ => true,
        });
        self.queue_control(Control::Received(kind, all))
    }

    /// Tells the peer that a small message with this tag is waited for, though there is no room for others.
    ///
    /// Errors: a peer that is gone.
    pub fn send_wanted(&mut self, tag: Tag) -> Result<()> {
        self.queue_control(Control::Wanted(tag))
    }

    /// It is lost: what was taken back needs no answer any more.
    pub fn give_up(&mut self, ops: &mut Ops) {
        self.recvs.withdrawn().for_each(|op| ops.end(op, Outcome::Cancelled));
        self.slots.give_up().for_each(|op| ops.end(op, Outcome::Cancelled));
    }

    /// As [`Duplex::drop_waits`], of one that is lost.
    pub fn drop_waits(&mut self) -> bool {
        self.link.drop_waits()
    }

    /// Fails it, for the next poll.
    #[cold]
    pub fn fail(&mut self, error: &Error) {
        self.link.fail(Failure::from_error(error));
    }

    /// A buffer sends to this slot from now on.
    ///
    /// Errors: another does.
    pub fn take_outgoing(&mut self, slot: u64) -> Result<()> {
        self.slots.take_outgoing(slot)
    }

    /// It does so no more.
    pub fn give_outgoing(&mut self, slot: u64, ops: &mut Ops) {
        self.outstanding -= self.slots.give_outgoing(slot, ops);
    }

    /// A buffer receives into this slot from now on.
    ///
    /// Errors: another does; a peer that is gone.
    pub fn take_incoming(&mut self, slot: u64, place: Place) -> Result<()> {
        self.slots.take_incoming(slot)?;
        self.add_recv(Recv::Slot { slot, place })
    }

    /// It does so no more, once `op` has ended.
    ///
    /// Errors: a peer that is gone.
    pub fn close_incoming(&mut self, op: OpId, slot: u64, ops: &mut Ops) -> Result<()> {
        if self.recvs.remove_slot(slot) {
            self.slots.give_incoming(slot);
            ops.end(op, Outcome::Cancelled);
            return Ok(());
        }
        let Some(sequence) = self.recvs.slot(slot) else {
            return Err(Error::internal(format!("slot {slot} is closed already")));
        };
        self.outstanding += 1;
        self.slots.closing_incoming(slot, op);
        self.queue_control(Control::Withdraw(sequence))
    }

    /// Sends to a slot, as soon as the peer has it open.
    ///
    /// Errors: more than a message may have; a peer that is gone.
    pub fn send_slot(&mut self, slot: u64, send: SlotSend, ops: &mut Ops) -> Result<()> {
        fits(send.part.len)?;
        self.outstanding += 1;
        self.slots.send(slot, send);
        self.post_slots(ops)
    }

    /// Waits for a message into a slot.
    pub fn recv_slot(&mut self, slot: u64, op: OpId, ops: &mut Ops) {
        self.outstanding += 1;
        if self.slots.recv(slot, op) {
            self.ends(op, Outcome::Done { rank: self.rank, len: 0, small: None }, ops);
        }
    }

    fn ends(&mut self, op: OpId, outcome: Outcome, ops: &mut Ops) {
        self.outstanding -= 1;
        ops.end(op, outcome);
    }

    /// Tells the peer of messages of collectives that none of its receives is for, once: it may wait for one of another size.
    ///
    /// Errors: a peer that is gone.
    pub fn send_unmatched(&mut self) -> Result<()> {
        let (recvs_ready, sent) = &mut self.sent_unmatched;
        if *recvs_ready != self.recvs_ready {
            sent.clear();
            *recvs_ready = self.recvs_ready;
        }
        let mut any = false;
        for send in self.matching.unmatched().take(MAX_UNMATCHED) {
            if !sent.contains(&send.op) {
                sent.push(send.op);
                any = true;
                self.controls.push_back(Control::Unmatched { tag: send.tag, len: send.part.len as u64, ready: self.recvs_ready });
            }
        }
        if any { self.flush_controls() } else { Ok(()) }
    }

    /// Asks to be woken, and names the descriptors to sleep on. `waits` as for [`Pair::poll`]. `Some`: see [`Duplex::arm`].
    pub fn arm(&mut self, waits: bool, watch: impl FnMut(RawFd)) -> Result<Option<u64>> {
        self.send_unmatched()?;
        let look = self.link.arm((self.outstanding > 0 || waits).then_some(self.wait), watch)?;
        // Nothing may wake who waits for a peer that has left.
        Ok(if self.awaits_acks() { Some(look.unwrap_or(u64::MAX).min(ACKS_LOOK_NS)) } else { look })
    }

    /// Whether it has to be polled again before anybody sleeps.
    pub fn needs_repoll(&mut self) -> bool {
        self.link.needs_repoll()
    }

    fn add_recv(&mut self, recv: Recv) -> Result<()> {
        self.recvs.push(recv);
        self.flush_controls()
    }

    fn queue_control(&mut self, control: Control) -> Result<()> {
        self.controls.push_back(control);
        self.flush_controls()
    }

    /// Sends the peer's control messages, in order, as far as there are slots and room.
    fn flush_controls(&mut self) -> Result<()> {
        let mut bytes = [0; CONTROL_SIZE];
        loop {
            while let Some(number) = self.matching.next_claim() {
                self.controls.push_back(Control::Claimed(number));
            }
            while let Some(control) = self.controls.front() {
                bytes.copy_from_slice(&control.encode());
                if !self.link.send_control(&bytes)? {
                    if self.controls.len() > MAX_QUEUED && self.link.can_post() {
                        self.protocol_error("more than it reads answers to");
                    }
                    return Ok(());
                }
                self.controls.pop_front();
            }
            let Some(control) = self.recvs.next(&mut self.link) else { return Ok(()) };
            self.controls.push_back(control);
        }
    }

    /// Sends the small messages for which there is room.
    fn post_small(&mut self, ops: &mut Ops) -> Result<()> {
        for kind in 0..self.small.len() {
            while let Some((at, SmallSend { op, tag, small })) = self.small.get(kind).and_then(SmallSends::next) {
                if !self.controls.is_empty() || !self.link.send_control(&Control::Message(tag, small).encode())? {
                    return Ok(());
                }
                if let Some(sends) = self.small.get_mut(kind) {
                    sends.sent(at);
                }
                self.link.carried(small.len());
                self.ends(op, Outcome::Done { rank: self.rank, len: small.len() as u64, small: None }, ops);
            }
        }
        Ok(())
    }

    /// Posts the messages that are matched, as far as there is room.
    fn post(&mut self) -> Result<()> {
        while let Some((send, target)) = self.matching.next() {
            let Part { addr, len, lkeys, .. } = send.part;
            let Some(id) = self.link.write(&target, addr, len, &lkeys)? else { break };
            self.matching.posted();
            put(&mut self.sent, (id.0 & 0xff) as usize, (send.op, len));
        }
        Ok(())
    }

    /// Posts what goes to slots, as far as there is room.
    fn post_slots(&mut self, ops: &mut Ops) -> Result<()> {
        let Pair { link, slots, sent, .. } = self;
        let failed = slots.post(ops, |target, send| {
            let Part { addr, len, lkeys, .. } = send.part;
            let Some(id) = link.notify(target, send.offset, 0, addr, len, &lkeys)? else { return Ok(false) };
            put(sent, (id.0 & 0xff) as usize, (send.op, len));
            Ok(true)
        })?;
        self.outstanding -= failed;
        Ok(())
    }
}

#[cfg(feature = "sim")]
impl Pair {
    /// What it is made of.
    pub fn link_for_test(&mut self) -> &mut crate::link::Link {
        self.link.link_for_test()
    }
}

#[cfg(test)]
impl Pair {
    /// Sends a control message of any bytes, as no honest rank would; whether there was room for it.
    pub fn send_raw_for_test(&mut self, bytes: &[u8; CONTROL_SIZE]) -> bool {
        self.link.send_control(bytes).unwrap_or(true)
    }

    /// Receives that the peer has advertised.
    pub fn recvs_ready_for_test(&self) -> u64 {
        self.recvs_ready
    }

    /// Has the fabric take what has come, without a look at what that is.
    pub fn serve_for_test(&mut self) {
        self.link.serve_for_test();
    }

    /// Entries that it has of messages, receives and slots.
    pub fn remembered(&self) -> usize {
        let small: usize = self.small.iter().map(SmallSends::remembered).sum();
        let posted = self.sent.iter().flatten().count();
        self.matching.remembered() + self.slots.remembered() + self.recvs.remembered() + small + self.controls.len() + posted
    }
}

/// Errors: more than a message may have.
pub fn fits(len: usize) -> Result<()> {
    if len <= MAX_MESSAGE {
        return Ok(());
    }
    Err(Error::usage(format!("{len} bytes; a message has at most {MAX_MESSAGE}")))
}
