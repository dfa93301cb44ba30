//! One rank as seen by another: a link both ways, and the sends and receives that wait for it. Under the lock of the mesh, on whichever thread drives it.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use crate::base::error::{Error, Result};
use crate::base::stats::WaitCause;
use crate::link::Failure;
use crate::link::duplex::{Duplex, Event, Target};
use crate::link::limits::{MAX_MESSAGE, MAX_REQUESTS, SAY_SIZE, SLOTS};

use super::device::{Part, Place};
use super::matching::{Matching, Send};
use super::ops::{OpId, Ops, Outcome};
use super::protocol::{Said, Tag};
use super::slots::{SlotSend, Slots};
use super::small::{MAX_EARLY, Small};

/// Says that wait at most: more than a peer that keeps to the protocol can ask for.
const MAX_SAYS: usize = 16 * SLOTS;

/// Slots of the link that are kept for granted receives, and as many more for those and collectives'.
const KEPT: usize = 16;

/// A peer.
pub struct Pair {
    link: Duplex,
    rank: usize,
    matching: Matching,
    slots: Slots,
    /// Receives of users that the peer was not told of, and those that do not wait for them: of collectives, and granted ones.
    recvs: VecDeque<Recv>,
    urgent: VecDeque<Recv>,
    /// What else is to be said to it.
    says: VecDeque<Said>,
    /// Small messages, of collectives and of users, that wait for room, or for the peer to receive others.
    small: [VecDeque<(OpId, Tag, Small)>; 2],
    /// Those that the peer has not said to have been received.
    unreceived: [u64; 2],
    /// Receives from this peer, or from others as well, that it was told of; and those that it has told of.
    announced: u64,
    heard_of: u64,
    /// The message, and the number of receives known, of which the peer was told that they do not match.
    told_unmatched: Option<(OpId, u64)>,
    /// Messages of the peer's that match none of the receives that were announced.
    unmatched: Vec<(Tag, u64)>,
    /// By slot of the link.
    open: Box<[Option<Open>; SLOTS]>,
    /// By the index of a request: which send it is of, and its bytes.
    sent: Box<[Option<(OpId, usize)>; MAX_REQUESTS]>,
    /// Operations that wait for this peer.
    outstanding: usize,
}

/// A receive, before the peer is told of it.
#[derive(Debug, Clone, Copy)]
enum Recv {
    /// From this peer.
    One { op: OpId, tag: Tag, place: Place },
    /// From this peer, which has claimed the offer with this number.
    Granted { op: OpId, number: u64, tag: Tag, place: Place },
    /// From this peer or others.
    Offered { number: u64, tag: Tag },
    /// Into the slot of a buffer, at any time.
    Slot { slot: u64, place: Place },
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

/// What a slot of the link is open for, with its sequence number.
#[derive(Debug, Clone, Copy)]
enum Open {
    Once { sequence: u64, op: OpId, tag: Tag, len: usize, withdrawn: bool },
    Slot { sequence: u64, slot: u64 },
}

impl Open {
    fn sequence(&self) -> u64 {
        match *self {
            Open::Once { sequence, .. } | Open::Slot { sequence, .. } => sequence,
        }
    }
}

/// Whether two sequence numbers are the same, as far as they travel.
fn same(a: u64, b: u64) -> bool {
    (a ^ b) << 24 == 0
}

impl Pair {
    /// From a link to the rank.
    pub fn new(link: Duplex, rank: usize) -> Pair {
        Pair {
            link,
            rank,
            matching: Matching::default(),
            slots: Slots::default(),
            recvs: VecDeque::new(),
            urgent: VecDeque::new(),
            says: VecDeque::new(),
            small: Default::default(),
            unreceived: [0; 2],
            announced: 0,
            heard_of: 0,
            told_unmatched: None,
            unmatched: Vec::new(),
            open: Box::new([None; SLOTS]),
            sent: Box::new([None; MAX_REQUESTS]),
            outstanding: 0,
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
            if let Some(queue) = self.small.get_mut(tag.kind()) {
                queue.push_back((op, tag, small));
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
        let queued = |recv: &Recv| matches!(recv, Recv::Offered { number: other, .. } if *other == number);
        if let Some(at) = self.recvs.iter().position(queued) {
            self.recvs.remove(at);
            return Ok(());
        }
        self.say(Said::WithdrawnOffer(number))
    }

    /// Takes an operation back, if nothing has come of it: it ends then, at once or once the peer has answered. A send that a peer has in mind is to
    /// be asked for again.
    ///
    /// Errors: a peer that is gone.
    pub fn cancel(&mut self, op: OpId, ops: &mut Ops) -> Result<()> {
        let queued = |recv: &Recv| matches!(recv, Recv::One { op: of, .. } | Recv::Granted { op: of, .. } if *of == op);
        let queued = |queue: &mut VecDeque<Recv>| queue.iter().position(queued).and_then(|at| queue.remove(at));
        if let Some(recv) = queued(&mut self.recvs).or_else(|| queued(&mut self.urgent)) {
            self.ends(op, Outcome::Cancelled, ops);
            return match recv {
                Recv::Granted { number, .. } => self.say(Said::WithdrawnOffer(number)),
                _ => Ok(()),
            };
        }
        let small = self.small.iter_mut().any(|queue| {
            let at = queue.iter().position(|(of, ..)| *of == op);
            at.is_some_and(|at| queue.remove(at).is_some())
        });
        if small || self.matching.cancel(op) || self.slots.cancel(op) {
            self.ends(op, Outcome::Cancelled, ops);
            return Ok(());
        }
        for open in self.open.iter_mut().flatten() {
            if let Open::Once { sequence, op: of, withdrawn, .. } = open
                && *of == op
                && !std::mem::replace(withdrawn, true)
            {
                let sequence = *sequence;
                return self.say(Said::Withdraw(sequence));
            }
        }
        Ok(())
    }

    /// The bytes that a receive with this tag is for, which is no small one.
    pub fn receives(&self, tag: Tag) -> Option<usize> {
        let queued = self.recvs.iter().chain(&self.urgent).find_map(|recv| match recv {
            Recv::One { tag: of, place, .. } | Recv::Granted { tag: of, place, .. } if *of == tag => Some(place.len),
            _ => None,
        });
        let told = || {
            self.open.iter().flatten().find_map(|open| match open {
                Open::Once { tag: of, len, .. } if *of == tag => Some(*len),
                _ => None,
            })
        };
        if self.outstanding == 0 { None } else { queued.or_else(told) }
    }

    /// The bytes of a message of the peer's with this tag, for which it knows no receive, though it knows of all.
    pub fn unmatched_there(&self, tag: Tag) -> Option<u64> {
        self.unmatched.iter().find(|(of, _)| *of == tag).map(|(_, len)| *len)
    }

    /// Tells the peer that so many more of its small messages were received, of this tag's kind.
    ///
    /// Errors: a peer that is gone.
    pub fn say_received(&mut self, tag: Tag, number: u64) -> Result<()> {
        self.say(Said::Received(tag.kind(), number))
    }

    /// It is lost: what was taken back needs no answer any more.
    pub fn give_up(&mut self, ops: &mut Ops) {
        for open in self.open.iter().flatten() {
            if let Open::Once { op, withdrawn: true, .. } = open {
                ops.end(*op, Outcome::Cancelled);
            }
        }
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
        let queued = |recv: &Recv| matches!(recv, Recv::Slot { slot: of, .. } if *of == slot);
        if let Some(at) = self.recvs.iter().position(queued) {
            self.recvs.remove(at);
            self.slots.give_incoming(slot);
            ops.end(op, Outcome::Cancelled);
            return Ok(());
        }
        let told = |open: &&Open| matches!(open, Open::Slot { slot: of, .. } if *of == slot);
        let Some(sequence) = self.open.iter().flatten().find(told).map(Open::sequence) else {
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
        let moved = self.link.poll(WaitCause::PeerNoSend);
        let mut gone = false;
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
                    Ok(Said::Bye) => gone = true,
                    Ok(Said::Message(tag, small)) => heard.push(Heard::Message(tag, small)),
                    Ok(Said::Claimed(number)) => heard.push(Heard::Claimed(number)),
                    Ok(Said::Unmatched { tag, len, announced }) if announced == self.announced => {
                        if self.unmatched.len() < SLOTS {
                            self.unmatched.push((tag, len));
                        }
                        heard.push(Heard::Unmatched(tag, len));
                    }
                    // It has not heard of all receives.
                    Ok(Said::Unmatched { .. }) => {}
                    Ok(said) => self.heard(said, ops)?,
                    Err(what) => self.misbehaves(&what),
                },
            }
        }
        if gone {
            return Err(Error::remote("it has closed its mesh"));
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
        let place = self.open.get_mut((sequence % SLOTS as u64) as usize);
        match place {
            Some(&mut Some(Open::Slot { slot, .. })) => {
                if let Some(op) = self.slots.arrived(slot) {
                    self.ends(op, Outcome::Done { rank: self.rank, len: 0, small: None }, ops);
                }
            }
            Some(once @ Some(_)) => {
                if let Some(Open::Once { op, tag, len, .. }) = once.take() {
                    if value != len as u64 {
                        return Err(Error::usage(format!("it sent {value} bytes, {tag}: this rank receives {len}")));
                    }
                    self.ends(op, Outcome::Done { rank: self.rank, len: value, small: None }, ops);
                }
            }
            _ => {}
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
            Said::Received(kind, number) => match self.unreceived.get_mut(kind) {
                Some(unreceived) if *unreceived >= number => *unreceived -= number,
                _ => self.misbehaves("that it received what was not sent"),
            },
            Said::Granted(number, target) => self.matching.granted(number, target)?,
            Said::WithdrawnOffer(number) => self.matching.withdrawn_offer(number)?,
            Said::Opened(slot, target) if self.slots.opened(slot, target) => {}
            Said::Withdraw(sequence) => {
                if self.matching.withdraw(sequence) || self.slots.withdraw(sequence) {
                    self.says.push_back(Said::Withdrawn(sequence));
                }
            }
            Said::Withdrawn(sequence) => {
                let place = self.open.get_mut((sequence % SLOTS as u64) as usize);
                let Some(open) = place.and_then(|place| place.take_if(|open| same(open.sequence(), sequence))) else {
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
            Said::Opened(..) => self.misbehaves("a slot twice"),
            Said::Claimed(_) | Said::Message(..) | Said::Unmatched { .. } | Said::Bye => {}
        }
        Ok(())
    }

    #[cold]
    fn misbehaves(&mut self, what: &str) {
        self.link.fail(Failure::remote(format!("the peer sent {what}")));
    }

    /// Tells the peer that this rank goes, if there is a place for it: a peer that waits for it learns why.
    pub fn say_bye(&mut self) {
        let _ = self.link.say_last(&Said::Bye.encode());
    }

    /// Whether that, and all that was sent before, is through.
    pub fn bye_is_through(&mut self) -> bool {
        self.link.poll(WaitCause::PeerNoSend);
        self.link.last_is_through()
    }

    /// Asks to be woken. A message that waits for its receive is told of, once: its receiver may wait for one of another size.
    pub fn arm(&mut self, watch: impl FnMut(RawFd)) -> Result<()> {
        if let Some(send) = self.matching.first_unmatched()
            && self.told_unmatched.replace((send.op, self.heard_of)) != Some((send.op, self.heard_of))
        {
            self.say(Said::Unmatched { tag: send.tag, len: send.part.len as u64, announced: self.heard_of })?;
        }
        self.link.arm(WaitCause::PeerNoSend, watch)
    }

    /// Whether it has to be polled again before anybody sleeps.
    pub fn needs_repoll(&mut self) -> bool {
        self.link.needs_repoll()
    }

    fn tell_of(&mut self, recv: Recv) -> Result<()> {
        match recv {
            Recv::Granted { .. } | Recv::One { tag: Tag::Collective(_), .. } => self.urgent.push_back(recv),
            _ => self.recvs.push_back(recv),
        }
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
            if let Some(said) = self.urgent.front().copied().and_then(|recv| self.open(recv)) {
                self.urgent.pop_front();
                self.says.push_back(said);
            } else if let Some(said) = self.recvs.front().copied().and_then(|recv| self.open(recv)) {
                self.recvs.pop_front();
                self.says.push_back(said);
            } else {
                return Ok(());
            }
        }
    }

    /// Opens a slot for a receive: what is to be said of it. `None`: all are open that it may have. The last ones are for what others wait behind.
    fn open(&mut self, recv: Recv) -> Option<Said> {
        let kept = match recv {
            Recv::Granted { .. } | Recv::Offered { .. } => 0,
            Recv::One { tag: Tag::Collective(_), .. } => KEPT,
            Recv::One { .. } | Recv::Slot { .. } => 2 * KEPT,
        };
        if self.link.free_slots() <= kept && !matches!(recv, Recv::Offered { .. }) {
            return None;
        }
        let (sequence, place, open) = match recv {
            Recv::Offered { number, tag } => {
                self.announces();
                return Some(Said::Offered(number, tag));
            }
            Recv::One { op, tag, place } | Recv::Granted { op, tag, place, .. } => {
                let sequence = self.link.open(place.len as u64)?;
                (sequence, place, Open::Once { sequence, op, tag, len: place.len, withdrawn: false })
            }
            Recv::Slot { slot, place } => {
                let sequence = self.link.open_standing()?;
                (sequence, place, Open::Slot { sequence, slot })
            }
        };
        if let Some(entry) = self.open.get_mut((sequence % SLOTS as u64) as usize) {
            *entry = Some(open);
        }
        let target = Target { sequence, addr: place.addr as u64, len: place.len as u64, rkeys: place.rkeys };
        Some(match recv {
            Recv::Granted { number, .. } => Said::Granted(number, target),
            Recv::Slot { slot, .. } => Said::Opened(slot, target),
            Recv::One { tag, .. } | Recv::Offered { tag, .. } => {
                self.announces();
                Said::Announced(tag, target)
            }
        })
    }

    /// The peer is told of one more receive: what it has said of its messages means nothing any more.
    fn announces(&mut self) {
        self.announced += 1;
        self.unmatched.clear();
    }

    /// Sends the small messages for which there is room, and credit.
    fn post_small(&mut self, ops: &mut Ops) -> Result<()> {
        for kind in 0..self.small.len() {
            while let (Some(unreceived), Some(&(op, tag, small))) =
                (self.unreceived.get_mut(kind), self.small.get(kind).and_then(VecDeque::front))
            {
                if *unreceived >= MAX_EARLY {
                    break;
                }
                if !self.says.is_empty() || !self.link.say(&Said::Message(tag, small).encode())? {
                    return Ok(());
                }
                *unreceived += 1;
                self.small.get_mut(kind).and_then(VecDeque::pop_front);
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
            if let Some(place) = self.sent.get_mut((id.0 & 0xff) as usize) {
                *place = Some((send.op, len));
            }
        }
        Ok(())
    }

    /// Posts what goes to slots, as far as there is room.
    fn post_slots(&mut self, ops: &mut Ops) -> Result<()> {
        let Pair { link, slots, sent, .. } = self;
        let failed = slots.post(ops, |target, send| {
            let Part { addr, len, lkeys, .. } = send.part;
            let Some(id) = link.notify(target, send.offset, 0, addr, len, &lkeys)? else { return Ok(false) };
            if let Some(place) = sent.get_mut((id.0 & 0xff) as usize) {
                *place = Some((send.op, len));
            }
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
