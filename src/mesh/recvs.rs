//! Receives from one rank: those that were not advertised yet, and those that were, by slot of the link. Under the lock of the mesh; used by
//! [`super::pair`].

use std::collections::VecDeque;

use crate::link::duplex::{Duplex, Target};
use crate::link::limits::SLOTS;

use super::device::Place;
use super::ops::OpId;
use super::protocol::{Control, Tag};

/// A receive, before it is advertised.
#[derive(Debug, Clone, Copy)]
pub enum Recv {
    /// From this peer.
    One { op: OpId, tag: Tag, place: Place },
    /// From this peer, which has claimed the offer with this number.
    Granted { op: OpId, number: u64, tag: Tag, place: Place },
    /// From this peer or others.
    Offered { number: u64, tag: Tag },
    /// Into the slot of a buffer, at any time.
    Slot { slot: u64, place: Place },
}

/// Of which [`Recv::class`] there are receives.
const CLASSES: usize = 4;

/// Slots of the link that each class leaves to those before it.
const KEPT: usize = 16;

impl Recv {
    /// Those of a lower class do not wait for slots behind those of a higher one: other ranks and buffers may have to go on before a user's receives end.
    fn class(&self) -> usize {
        match self {
            Recv::Granted { .. } => 0,
            Recv::One { tag: Tag::Collective(_), .. } => 1,
            Recv::Slot { .. } => 2,
            Recv::One { .. } | Recv::Offered { .. } => 3,
        }
    }

    fn is_of(&self, op: OpId) -> bool {
        matches!(self, Recv::One { op: of, .. } | Recv::Granted { op: of, .. } if *of == op)
    }
}

/// What a slot of the link is open for, with its sequence number.
#[derive(Debug, Clone, Copy)]
pub enum Open {
    /// A message.
    Once { sequence: u64, op: OpId, tag: Tag, len: usize, withdrawn: bool },
    /// The slot of a buffer.
    Slot { sequence: u64, slot: u64 },
}

impl Open {
    /// Its sequence number.
    pub fn sequence(&self) -> u64 {
        match *self {
            Open::Once { sequence, .. } | Open::Slot { sequence, .. } => sequence,
        }
    }
}

/// All of them.
#[derive(Debug)]
pub struct Recvs {
    /// By class.
    waiting: [VecDeque<Recv>; CLASSES],
    /// By slot, as far as any was ever open: the others take no memory.
    open: Vec<Option<Open>>,
    /// Receives from this peer, or from others as well, that were advertised or offered to it.
    ready: u64,
    /// Messages of the peer's that match none of these.
    unmatched: Vec<(Tag, u64)>,
}

impl Default for Recvs {
    fn default() -> Recvs {
        Recvs { waiting: Default::default(), open: Vec::with_capacity(SLOTS), ready: 0, unmatched: Vec::new() }
    }
}

impl Recvs {
    /// One to advertise.
    pub fn push(&mut self, recv: Recv) {
        if let Some(queue) = self.waiting.get_mut(recv.class()) {
            queue.push_back(recv);
        }
    }

    /// The control message of the next one. `None`: there is none, or all slots are open that it may have.
    pub fn next(&mut self, link: &mut Duplex) -> Option<Control> {
        for class in 0..CLASSES {
            let Some(recv) = self.waiting.get(class).and_then(VecDeque::front).copied() else { continue };
            if let Some(control) = self.advertise(recv, link) {
                self.waiting.get_mut(class).and_then(VecDeque::pop_front);
                return Some(control);
            }
        }
        None
    }

    fn advertise(&mut self, recv: Recv, link: &mut Duplex) -> Option<Control> {
        let (tag, place) = match recv {
            Recv::Offered { number, tag } => {
                self.one_more_ready();
                return Some(Control::Offered(number, tag));
            }
            _ if link.free_slots() <= KEPT * recv.class() => return None,
            Recv::Slot { slot, place } => {
                let sequence = link.open_standing()?;
                self.opened(Open::Slot { sequence, slot });
                return Some(Control::Opened(slot, target(sequence, place)));
            }
            Recv::One { tag, place, .. } | Recv::Granted { tag, place, .. } => (tag, place),
        };
        let (Recv::One { op, .. } | Recv::Granted { op, .. }) = recv else { return None };
        let sequence = link.open(place.len as u64)?;
        self.opened(Open::Once { sequence, op, tag, len: place.len, withdrawn: false });
        let target = target(sequence, place);
        if let Recv::Granted { number, .. } = recv {
            return Some(Control::Granted(number, target));
        }
        self.one_more_ready();
        Some(Control::RecvReady(tag, target))
    }

    fn opened(&mut self, open: Open) {
        put(&mut self.open, place_of(open.sequence()), open);
    }

    /// One more is: what the peer has sent of messages that match none means nothing any more.
    fn one_more_ready(&mut self) {
        self.ready += 1;
        self.unmatched.clear();
    }

    /// Forgets one that was not advertised.
    pub fn remove(&mut self, op: OpId) -> Option<Recv> {
        self.take(|recv| recv.is_of(op))
    }

    /// The same for an offer; whether there was one.
    pub fn remove_offer(&mut self, number: u64) -> bool {
        self.take(|recv| matches!(recv, Recv::Offered { number: other, .. } if *other == number)).is_some()
    }

    /// The same for the slot of a buffer.
    pub fn remove_slot(&mut self, slot: u64) -> bool {
        self.take(|recv| matches!(recv, Recv::Slot { slot: other, .. } if *other == slot)).is_some()
    }

    fn take(&mut self, which: impl Fn(&Recv) -> bool) -> Option<Recv> {
        self.waiting.iter_mut().find_map(|queue| queue.iter().position(&which).and_then(|at| queue.remove(at)))
    }

    /// Marks one that the peer knows of as withdrawn: the sequence number of its slot, of which the peer is to be told.
    pub fn withdraw(&mut self, op: OpId) -> Option<u64> {
        self.open.iter_mut().flatten().find_map(|open| match open {
            Open::Once { sequence, op: of, withdrawn, .. } if *of == op => (!std::mem::replace(withdrawn, true)).then_some(*sequence),
            _ => None,
        })
    }

    /// Those that are withdrawn, which the peer has not answered.
    pub fn withdrawn(&self) -> impl Iterator<Item = OpId> + '_ {
        self.open.iter().flatten().filter_map(|open| match open {
            Open::Once { op, withdrawn: true, .. } => Some(*op),
            _ => None,
        })
    }

    /// The sequence number of the link's slot that is open for the slot of a buffer.
    pub fn slot(&self, slot: u64) -> Option<u64> {
        let is_open = |open: &&Open| matches!(open, Open::Slot { slot: of, .. } if *of == slot);
        self.open.iter().flatten().find(is_open).map(Open::sequence)
    }

    /// A message is in this slot of the link: what it was open for. For the slot of a buffer it stays open.
    pub fn received(&mut self, sequence: u64) -> Option<Open> {
        let entry = self.open.get_mut(place_of(sequence))?;
        match entry {
            Some(Open::Slot { .. }) => *entry,
            _ => entry.take(),
        }
    }

    /// The peer writes nothing there any more. `None`: it was not open, as far as the number travels, or not `asked` about.
    pub fn close(&mut self, sequence: u64, asked: impl Fn(&Open) -> bool) -> Option<Open> {
        self.open.get_mut(place_of(sequence))?.take_if(|open| (open.sequence() ^ sequence) << 24 == 0 && asked(open))
    }

    /// The bytes that a receive with this tag is for.
    pub fn len_of(&self, tag: Tag) -> Option<usize> {
        let waiting = self.waiting.iter().flatten().find_map(|recv| match recv {
            Recv::One { tag: of, place, .. } | Recv::Granted { tag: of, place, .. } if *of == tag => Some(place.len),
            _ => None,
        });
        let open = || {
            self.open.iter().flatten().find_map(|open| match open {
                Open::Once { tag: of, len, .. } if *of == tag => Some(*len),
                _ => None,
            })
        };
        waiting.or_else(open)
    }

    /// The peer has a message of so many bytes that matches none of as many receives; whether that is all of them.
    pub fn is_unmatched(&mut self, tag: Tag, len: u64, ready: u64) -> bool {
        let all = ready == self.ready;
        if all && self.unmatched.len() < SLOTS {
            self.unmatched.push((tag, len));
        }
        all
    }

    /// The bytes of a message of the peer's with this tag, for which it knows no receive, though it knows of all.
    pub fn unmatched(&self, tag: Tag) -> Option<u64> {
        self.unmatched.iter().find(|(of, _)| *of == tag).map(|(_, len)| *len)
    }
}

#[cfg(test)]
impl Recvs {
    /// Entries that it has.
    pub fn remembered(&self) -> usize {
        self.waiting.iter().map(VecDeque::len).sum::<usize>() + self.open.iter().flatten().count() + self.unmatched.len()
    }
}

/// Puts something into its place of a table that grows with the highest place in use.
pub fn put<T: Clone>(table: &mut Vec<Option<T>>, place: usize, value: T) {
    if table.len() <= place {
        table.resize(place + 1, None);
    }
    if let Some(entry) = table.get_mut(place) {
        *entry = Some(value);
    }
}

fn place_of(sequence: u64) -> usize {
    (sequence % SLOTS as u64) as usize
}

fn target(sequence: u64, place: Place) -> Target {
    Target { sequence, addr: place.addr as u64, len: place.len as u64, rkeys: place.rkeys }
}
