//! One rank as seen by another: a link both ways, and the sends and receives that wait for it. Under the lock of the mesh, on whichever thread drives it.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use crate::base::error::{Error, Result};
use crate::base::stats::{CommStats, MeshOp, Wait, WaitCause};
use crate::link::Failure;
use crate::link::duplex::{Duplex, Event};
use crate::link::limits::{MAX_MESSAGE, MAX_REQUESTS, SAY_SIZE, SLOTS};

use super::device::{Part, Place};
use super::matching::{Matching, Send};
use super::ops::{OpId, Ops, Outcome};
use super::protocol::{Said, Tag};
use super::recvs::{Open, Recv, Recvs, put};
use super::slots::{SlotSend, Slots};
use super::small::Small;
use super::small_sends::{SmallSend, SmallSends};

/// Says that wait at most: more than a peer that keeps to the protocol can ask for.
const MAX_SAYS: usize = 16 * SLOTS;

/// Messages of collectives that the peer is told of at a time because none of its receives is for them.
const MAX_TOLD: usize = 8;

/// A peer.
pub struct Pair {
    link: Duplex,
    rank: usize,
    matching: Matching,
    slots: Slots,
    recvs: Recvs,
    /// What else is to be said to it.
    says: VecDeque<Said>,
    /// Of collectives and of users.
    small: [SmallSends; 2],
    /// Receives that the peer has told of.
    heard_of: u64,
    /// The messages of which the peer was told, when it had told of so many receives, that they match none.
    told_unmatched: (u64, Vec<OpId>),
    /// By the index of a request: which send it is of, and its bytes.
    sent: Vec<Option<(OpId, usize)>>,
    /// Operations that wait for this peer.
    outstanding: usize,
    /// It has said that it goes, and for which rank that it has lost.
    left: Option<Option<usize>>,
    /// So has this rank.
    said_bye: bool,
    /// What is waited for from it, when last looked at; nothing once something has moved.
    wait: Wait,
}

/// What a peer has said that is not for its pair alone.
#[derive(Debug, Clone, Copy)]
pub enum Heard {
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
            says: VecDeque::new(),
            small: Default::default(),
            heard_of: 0,
            told_unmatched: (0, Vec::new()),
            sent: Vec::with_capacity(MAX_REQUESTS),
            outstanding: 0,
            left: None,
            said_bye: false,
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
        let says = |wait: &Wait| (wait.op.is_collective(), wait.cause == WaitCause::PeerNoSend);
        let wait = Wait { cause, op, tag };
        if self.wait.cause == WaitCause::None || says(&wait) > says(&self.wait) {
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
        self.tell()?;
        self.post()
    }

    /// Receives.
    ///
    /// Errors: more than a message may have; a peer that is gone.
    pub fn recv(&mut self, op: OpId, tag: Tag, place: Place) -> Result<()> {
        fits(place.len)?;
        self.outstanding += 1;
        self.tell_of(Recv::One { op, tag, place })
    }

    /// Offers a receive which others may get.
    ///
    /// Errors: a peer that is gone.
    pub fn offer(&mut self, number: u64, tag: Tag) -> Result<()> {
        self.tell_of(Recv::Offered { number, tag })
    }

    /// Receives the message that has claimed an offer.
    ///
    /// Errors: a peer that is gone.
    pub fn grant(&mut self, op: OpId, number: u64, tag: Tag, place: Place) -> Result<()> {
        self.outstanding += 1;
        self.tell_of(Recv::Granted { op, number, tag, place })
    }

    /// Takes an offer back.
    ///
    /// Errors: a peer that is gone.
    pub fn withdraw_offer(&mut self, number: u64) -> Result<()> {
        if self.recvs.remove_offer(number) { Ok(()) } else { self.say(Said::WithdrawnOffer(number)) }
    }

    /// Takes an operation back, if nothing has come of it: it ends then, at once or once the peer has answered. A send that a peer has in mind is to
    /// be asked for again.
    ///
    /// Errors: a peer that is gone.
    pub fn cancel(&mut self, op: OpId, ops: &mut Ops) -> Result<()> {
        if let Some(recv) = self.recvs.remove(op) {
            self.ends(op, Outcome::Cancelled, ops);
            return match recv {
                Recv::Granted { number, .. } => self.say(Said::WithdrawnOffer(number)),
                _ => Ok(()),
            };
        }
        if self.small.iter_mut().any(|sends| sends.cancel(op)) || self.matching.cancel(op) || self.slots.cancel(op) {
            self.ends(op, Outcome::Cancelled, ops);
            return Ok(());
        }
        self.recvs.withdraw(op).map_or(Ok(()), |sequence| self.say(Said::Withdraw(sequence)))
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
    pub fn say_received(&mut self, tag: Tag, number: u64) -> Result<()> {
        self.say(Said::Received(tag.kind(), number))
    }

    /// Tells the peer that a small message with this tag is waited for, though there is no room for others.
    ///
    /// Errors: a peer that is gone.
    pub fn say_wanted(&mut self, tag: Tag) -> Result<()> {
        self.say(Said::Wanted(tag))
    }

    /// It is lost: what was taken back needs no answer any more.
    pub fn give_up(&mut self, ops: &mut Ops) {
        self.recvs.withdrawn().for_each(|op| ops.end(op, Outcome::Cancelled));
        self.slots.give_up().for_each(|op| ops.end(op, Outcome::Cancelled));
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
        self.tell_of(Recv::Slot { slot, place })
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
        self.say(Said::Withdraw(sequence))
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

    /// Moves everything along; whether something has moved. `heard` gets what the peer has said to the mesh. `waits`: somebody waits for the peer whom it does
    /// not know of.
    ///
    /// Errors: a peer that is gone or misbehaves; a message and a receive of different sizes.
    pub fn poll(&mut self, ops: &mut Ops, waits: bool, heard: &mut Vec<Heard>) -> Result<bool> {
        if self.outstanding == 0 && !waits {
            self.link.nobody_waits();
        }
        let moved = self.link.poll(self.wait);
        if moved {
            self.wait = Wait::NONE;
        }
        let mut gone = None;
        while let Some(event) = self.link.next_event() {
            match event {
                Event::Sent(id) => {
                    let place = self.sent.get_mut((id.0 & 0xff) as usize);
                    if let Some((op, len)) = place.and_then(Option::take) {
                        self.ends(op, Outcome::Done { rank: self.rank, len: len as u64, small: None }, ops);
                    }
                }
                Event::Received { sequence, value } => self.received(sequence, value, ops)?,
                Event::Said(bytes) => match Said::decode(&bytes) {
                    Ok(Said::Bye(of)) => gone = Some(of),
                    Ok(Said::Message(tag, small)) => {
                        self.link.carried(small.len());
                        heard.push(Heard::Message(tag, small));
                    }
                    Ok(Said::Claimed(number)) => heard.push(Heard::Claimed(number)),
                    Ok(Said::Unmatched { tag, len, announced }) => {
                        if self.recvs.is_unmatched(tag, len, announced) {
                            heard.push(Heard::Unmatched(tag, len));
                        }
                    }
                    Ok(said) => self.heard(said, ops)?,
                    Err(what) => self.misbehaves(&what),
                },
            }
        }
        if let Some(of) = gone {
            self.left = Some(of);
            let why = of.map_or(String::new(), |rank| format!(", as rank {rank} is lost"));
            return Err(Error::remote(format!("it has closed its mesh{why}")));
        }
        if moved {
            self.tell()?;
            self.post_small(ops)?;
            self.post()?;
            self.post_slots(ops)?;
        }
        self.link.check().map(|()| moved)
    }

    fn received(&mut self, sequence: u64, value: u64, ops: &mut Ops) -> Result<()> {
        match self.recvs.received(sequence) {
            Some(Open::Slot { slot, .. }) => {
                if let Some(op) = self.slots.arrived(slot) {
                    self.ends(op, Outcome::Done { rank: self.rank, len: 0, small: None }, ops);
                }
            }
            Some(Open::Once { tag, len, .. }) if value != len as u64 => {
                return Err(Error::usage(format!("it sent {value} bytes, {tag}: this rank receives {len}")));
            }
            Some(Open::Once { op, .. }) => self.ends(op, Outcome::Done { rank: self.rank, len: value, small: None }, ops),
            None => {}
        }
        Ok(())
    }

    fn heard(&mut self, said: Said, ops: &mut Ops) -> Result<()> {
        match said {
            Said::Announced(tag, target) => {
                self.heard_of += 1;
                self.matching.announced(tag, target)?;
            }
            Said::Offered(number, tag) => {
                self.heard_of += 1;
                self.matching.offered(number, tag)?;
            }
            Said::Received(kind, number) => self.small.get_mut(kind).map_or(Ok(()), |sends| sends.received(number))?,
            Said::Wanted(tag) => self.small.get_mut(tag.kind()).map_or(Ok(()), |sends| sends.wanted(tag))?,
            Said::Granted(number, target) => self.matching.granted(number, target)?,
            Said::WithdrawnOffer(number) => self.matching.withdrawn_offer(number)?,
            Said::Opened(slot, target) if self.slots.opened(slot, target) => {}
            Said::Withdraw(sequence) => {
                if self.matching.withdraw(sequence) || self.slots.withdraw(sequence) {
                    self.says.push_back(Said::Withdrawn(sequence));
                }
            }
            Said::Withdrawn(sequence) => {
                let slots = &self.slots;
                let asked = |open: &Open| match open {
                    Open::Once { withdrawn, .. } => *withdrawn,
                    Open::Slot { slot, .. } => slots.is_closing(*slot),
                };
                let Some(open) = self.recvs.close(sequence, asked) else {
                    self.misbehaves("an answer to nothing");
                    return Ok(());
                };
                self.link.close(open.sequence());
                match open {
                    Open::Once { op, .. } => self.ends(op, Outcome::Cancelled, ops),
                    Open::Slot { slot, .. } => {
                        if let Some(op) = self.slots.give_incoming(slot) {
                            self.ends(op, Outcome::Cancelled, ops);
                        }
                    }
                }
            }
            Said::Opened(..) => self.misbehaves("a slot twice, or too many"),
            Said::Claimed(_) | Said::Message(..) | Said::Unmatched { .. } | Said::Bye(_) => {}
        }
        Ok(())
    }

    #[cold]
    fn misbehaves(&mut self, what: &str) {
        self.link.fail(Failure::remote(format!("the peer sent {what}")));
    }

    /// Whether the peer has said that it goes, and for which rank that it has lost.
    pub fn left(&self) -> Option<Option<usize>> {
        self.left
    }

    /// Tells the peer that this rank goes, if there is a place for it: a peer that waits for it learns why. It may go for a rank that it has lost. Once is
    /// enough.
    pub fn say_bye(&mut self, gone: Option<usize>) {
        if !self.said_bye && self.tell().is_ok() && self.says.is_empty() {
            self.said_bye = self.link.say_last(&Said::Bye(gone).encode()).unwrap_or(false);
        }
    }

    /// Whether that, and all that was sent before, is through, or will never be.
    pub fn bye_is_through(&mut self) -> bool {
        // A peer that has it, or has said the same, may go at once: what a poll finds after that means nothing.
        if !self.is_done() {
            self.link.poll(Wait::NONE);
            while let Some(event) = self.link.next_event() {
                if let Event::Said(bytes) = event
                    && let Ok(Said::Bye(of)) = Said::decode(&bytes)
                {
                    self.left = Some(of);
                }
            }
        }
        self.is_done() || self.link.check().is_err()
    }

    fn is_done(&mut self) -> bool {
        self.left.is_some() || self.said_bye && self.link.last_is_through()
    }

    /// Tells the peer of messages of collectives that none of its receives is for, once: it may wait for one of another size.
    ///
    /// Errors: a peer that is gone.
    pub fn tell_unmatched(&mut self) -> Result<()> {
        let (heard_of, told) = &mut self.told_unmatched;
        if *heard_of != self.heard_of {
            told.clear();
            *heard_of = self.heard_of;
        }
        let mut any = false;
        for send in self.matching.unmatched().take(MAX_TOLD) {
            if !told.contains(&send.op) {
                told.push(send.op);
                any = true;
                self.says.push_back(Said::Unmatched { tag: send.tag, len: send.part.len as u64, announced: self.heard_of });
            }
        }
        if any { self.tell() } else { Ok(()) }
    }

    /// Asks to be woken, and names the descriptors to sleep on. `waits` as for [`Pair::poll`]. `Some`: see [`Duplex::arm`].
    pub fn arm(&mut self, waits: bool, watch: impl FnMut(RawFd)) -> Result<Option<u64>> {
        self.tell_unmatched()?;
        self.link.arm((self.outstanding > 0 || waits).then_some(self.wait), watch)
    }

    /// Whether it has to be polled again before anybody sleeps.
    pub fn needs_repoll(&mut self) -> bool {
        self.link.needs_repoll()
    }

    fn tell_of(&mut self, recv: Recv) -> Result<()> {
        self.recvs.push(recv);
        self.tell()
    }

    fn say(&mut self, said: Said) -> Result<()> {
        self.says.push_back(said);
        self.tell()
    }

    /// Tells the peer what it was not told, in order, as far as there are slots and room.
    fn tell(&mut self) -> Result<()> {
        let mut bytes = [0; SAY_SIZE];
        loop {
            while let Some(number) = self.matching.next_claim() {
                self.says.push_back(Said::Claimed(number));
            }
            while let Some(said) = self.says.front() {
                bytes.copy_from_slice(&said.encode());
                if !self.link.say(&bytes)? {
                    if self.says.len() > MAX_SAYS {
                        self.misbehaves("more than it reads answers to");
                    }
                    return Ok(());
                }
                self.says.pop_front();
            }
            let Some(said) = self.recvs.next(&mut self.link) else { return Ok(()) };
            self.says.push_back(said);
        }
    }

    /// Sends the small messages for which there is room.
    fn post_small(&mut self, ops: &mut Ops) -> Result<()> {
        for kind in 0..self.small.len() {
            while let Some((at, SmallSend { op, tag, small })) = self.small.get(kind).and_then(SmallSends::next) {
                if !self.says.is_empty() || !self.link.say(&Said::Message(tag, small).encode())? {
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

/// Errors: more than a message may have.
pub fn fits(len: usize) -> Result<()> {
    if len <= MAX_MESSAGE {
        return Ok(());
    }
    Err(Error::usage(format!("{len} bytes; a message has at most {MAX_MESSAGE}")))
}
