//! What a mesh was asked to do and has not done: one entry for each send and each receive. Under the lock of the mesh.

use crate::base::stats::{CommCounter, MeshOp};
use crate::link::Failure;

use super::protocol::Small;
use super::protocol::Tag;

/// Names an operation: an index and a generation, so that one that was forgotten is not taken for a later one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpId {
    index: u32,
    generation: u32,
}

/// What an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Asked {
    /// The peer; none of a receive from any of several, before one of them has it.
    pub rank: Option<usize>,
    /// Whether it is a receive.
    pub receives: bool,
    /// Of which messages.
    pub what: What,
}

/// Which messages an operation is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// Those with a tag.
    Tagged(Tag),
    /// Those for a slot of a buffer.
    Slot(u64),
    /// None: the buffer of a slot is closed, which the peer has to know.
    Closing(u64),
}

impl What {
    /// What the stats page says of an operation on them: what it is, and its user's tag.
    pub fn shown(self, receives: bool) -> (MeshOp, u64) {
        match self {
            What::Slot(slot) | What::Closing(slot) => (MeshOp::Buffer, slot),
            What::Tagged(Tag::User(tag)) => (if receives { MeshOp::Recv } else { MeshOp::Send }, tag),
            What::Tagged(tag) => tag.of(),
        }
    }
}

/// Whose waits are told of.
#[derive(Debug, Clone, Copy)]
pub enum Waiter<'a> {
    /// A collective, by the tag of its messages.
    Collective(u64),
    /// Another call.
    Call(&'a str),
    /// All of the mesh.
    Anybody,
}

impl<'a> From<&'a str> for Waiter<'a> {
    fn from(call: &'a str) -> Waiter<'a> {
        Waiter::Call(call)
    }
}

impl Waiter<'_> {
    /// Whether it may wait for these messages.
    fn waits_for(self, what: What) -> bool {
        match (self, what) {
            (Waiter::Collective(own), What::Tagged(Tag::Collective(of))) => own == of,
            (Waiter::Collective(_), _) | (Waiter::Call(_), What::Tagged(Tag::Collective(_))) => false,
            (Waiter::Call(_) | Waiter::Anybody, _) => true,
        }
    }
}

impl std::fmt::Display for Waiter<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Waiter::Collective(number) => write!(f, "{}", Tag::Collective(*number)),
            Waiter::Call(name) => f.write_str(name),
            Waiter::Anybody => f.write_str("mesh"),
        }
    }
}

impl std::fmt::Display for What {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            What::Tagged(tag) => write!(f, "{tag}"),
            What::Slot(slot) => write!(f, "slot {slot}"),
            What::Closing(slot) => write!(f, "closing slot {slot}"),
        }
    }
}

impl Asked {
    /// Whether it is part of a collective, for which all ranks have to be there.
    pub fn is_collectives(&self) -> bool {
        matches!(self.what, What::Tagged(Tag::Collective(_)))
    }

    /// The pair that counts it.
    fn counts(&self) -> Option<usize> {
        self.rank.filter(|_| !matches!(self.what, What::Closing(_)))
    }
}

/// `{:#}` leaves out of which messages it is.
impl std::fmt::Display for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let action = match self.what {
            What::Closing(_) => "an answer from",
            _ if self.receives => "a message from",
            _ => "a receive of",
        };
        match self.rank {
            Some(rank) => write!(f, "{action} rank {rank}")?,
            None => write!(f, "{action} one of several ranks")?,
        }
        if f.alternate() { Ok(()) } else { write!(f, " ({})", self.what) }
    }
}

/// How an operation ended.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// It is done.
    Done {
        /// The peer.
        rank: usize,
        /// Bytes.
        len: u64,
        /// A small message's, which whoever waits puts where they belong.
        small: Option<Small>,
    },
    /// It was taken back before anything came of it.
    Cancelled,
    /// It could not be done, which is no matter to others.
    Failed(Failure),
}

#[derive(Debug)]
enum State {
    Pending(Asked),
    Ended(Outcome),
}

/// The table.
#[derive(Debug, Default)]
pub struct Ops {
    entries: Vec<(u32, Option<State>)>,
    free: Vec<u32>,
    /// How many have ended so far.
    ended: u64,
    /// What the pairs with these ranks have not counted yet.
    uncounted: Vec<(usize, CommCounter)>,
}

impl Ops {
    /// Notes one.
    pub fn insert(&mut self, asked: Asked) -> OpId {
        self.uncounted.extend(asked.counts().map(|rank| (rank, CommCounter::Ops)));
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push((0, None));
            (self.entries.len() - 1) as u32
        });
        let generation = self.entries.get_mut(index as usize).map_or(0, |entry| {
            entry.1 = Some(State::Pending(asked));
            entry.0
        });
        OpId { index, generation }
    }

    fn entry(&mut self, id: OpId) -> Option<&mut Option<State>> {
        self.entries.get_mut(id.index as usize).filter(|entry| entry.0 == id.generation).map(|entry| &mut entry.1)
    }

    /// What it is, unless it has ended.
    pub fn asked(&mut self, id: OpId) -> Option<Asked> {
        match self.entry(id) {
            Some(Some(State::Pending(asked))) => Some(*asked),
            _ => None,
        }
    }

    /// It has got its peer.
    pub fn is_with(&mut self, id: OpId, rank: usize) {
        if let Some(Some(State::Pending(asked))) = self.entry(id)
            && asked.rank.replace(rank).is_none()
        {
            self.uncounted.push((rank, CommCounter::Ops));
        }
    }

    /// It has ended. Nothing, if nobody waits for it any more.
    pub fn end(&mut self, id: OpId, outcome: Outcome) {
        if let Outcome::Done { rank, .. } = outcome {
            self.is_with(id, rank);
        }
        if let Some(state @ Some(State::Pending(_))) = self.entry(id) {
            let was = state.replace(State::Ended(outcome));
            self.ended += 1;
            self.completes(was);
        }
    }

    fn completes(&mut self, was: Option<State>) {
        if let Some(State::Pending(asked)) = was {
            self.uncounted.extend(asked.counts().map(|rank| (rank, CommCounter::Completions)));
        }
    }

    /// What the pairs with these ranks have not counted yet.
    pub fn uncounted(&mut self) -> std::vec::Drain<'_, (usize, CommCounter)> {
        self.uncounted.drain(..)
    }

    /// All that have not ended have failed.
    pub fn fail_all(&mut self, failure: &Failure) {
        let pending = |(index, entry): (usize, &(u32, Option<State>))| match entry {
            (generation, Some(State::Pending(_))) => Some(OpId { index: index as u32, generation: *generation }),
            _ => None,
        };
        let all: Vec<OpId> = self.entries.iter().enumerate().filter_map(pending).collect();
        all.into_iter().for_each(|id| self.end(id, Outcome::Failed(failure.clone())));
    }

    /// Forgets one that has ended, and says how.
    pub fn take(&mut self, id: OpId) -> Option<Outcome> {
        let Some(State::Ended(outcome)) = self.entry(id)?.take_if(|state| matches!(state, State::Ended(_))) else { return None };
        self.free(id);
        Some(outcome)
    }

    /// Forgets one.
    pub fn forget(&mut self, id: OpId) {
        let Some(entry) = self.entries.get_mut(id.index as usize).filter(|entry| entry.0 == id.generation) else { return };
        let was = entry.1.take();
        if was.is_some() {
            self.free(id);
            self.completes(was);
        }
    }

    /// The place of one that was taken out is another's.
    fn free(&mut self, id: OpId) {
        if let Some(entry) = self.entries.get_mut(id.index as usize) {
            entry.0 = id.generation.wrapping_add(1);
            self.free.push(id.index);
        }
    }

    /// How many have ended so far: more than before, if one has.
    pub fn ended(&self) -> u64 {
        self.ended
    }

    /// Those that have not ended.
    pub fn pending(&self) -> impl Iterator<Item = Asked> + '_ {
        self.entries.iter().filter_map(|entry| match entry.1 {
            Some(State::Pending(asked)) => Some(asked),
            _ => None,
        })
    }

    /// Those of them that this one may wait for.
    pub fn awaited<'a>(&'a self, waiter: Waiter<'a>) -> impl Iterator<Item = (OpId, Asked)> + 'a {
        self.entries.iter().zip(0..).filter_map(move |((generation, state), index)| match state {
            Some(State::Pending(asked)) if waiter.waits_for(asked.what) => Some((OpId { index, generation: *generation }, *asked)),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: Asked = Asked { rank: Some(1), receives: true, what: What::Slot(7) };

    fn done(outcome: Option<Outcome>) -> Option<(usize, u64)> {
        match outcome {
            Some(Outcome::Done { rank, len, .. }) => Some((rank, len)),
            _ => None,
        }
    }

    #[test]
    fn an_operation_is_taken_once_and_its_place_used_again() {
        let mut ops = Ops::default();
        let (a, b) = (ops.insert(ASKED), ops.insert(ASKED));
        assert_eq!((ops.take(a).is_none(), ops.pending().count()), (true, 2));
        ops.end(a, Outcome::Done { rank: 3, len: 9, small: None });
        assert_eq!((done(ops.take(a)), done(ops.take(a))), (Some((3, 9)), None));
        let again = ops.insert(ASKED);
        assert_eq!(again.index, a.index);
        // What comes late for the one before.
        ops.end(a, Outcome::Done { rank: 4, len: 4, small: None });
        ops.forget(a);
        assert_eq!((done(ops.take(again)), ops.pending().count()), (None, 2));
        ops.forget(again);
        ops.forget(b);
        assert_eq!((ops.pending().count(), ops.ended()), (0, 1));
    }

    #[test]
    fn each_peer_counts_what_is_its_from_when_it_is() {
        use CommCounter::{Completions, Ops as Asks};
        let mut ops = Ops::default();
        let counted = |ops: &mut Ops| ops.uncounted().collect::<Vec<_>>();
        let [one, any, early, closing] =
            [ASKED, Asked { rank: None, ..ASKED }, Asked { rank: None, ..ASKED }, Asked { what: What::Closing(7), ..ASKED }]
                .map(|asked| ops.insert(asked));
        assert_eq!(counted(&mut ops), [(1, Asks)]);
        ops.is_with(any, 3);
        ops.end(any, Outcome::Done { rank: 3, len: 9, small: None });
        ops.end(early, Outcome::Done { rank: 2, len: 9, small: None });
        ops.end(closing, Outcome::Cancelled);
        assert_eq!(counted(&mut ops), [(3, Asks), (3, Completions), (2, Asks), (2, Completions)]);
        ops.forget(one);
        ops.forget(any);
        ops.end(early, Outcome::Cancelled);
        assert_eq!(counted(&mut ops), [(1, Completions)]);
    }

    #[test]
    fn a_waiter_waits_for_its_own() {
        let mut ops = Ops::default();
        let tagged = |tag| Asked { what: What::Tagged(tag), ..ASKED };
        let barrier = Tag::collective(MeshOp::Barrier, 5, true);
        let all = [Tag::User(9), Tag::Collective(barrier), Tag::Collective(Tag::collective(MeshOp::Barrier, 6, true))];
        for tag in all {
            ops.insert(tagged(tag));
        }
        let awaited = |waiter| ops.awaited(waiter).map(|(_, asked)| asked.to_string()).collect::<Vec<_>>();
        assert_eq!(awaited(Waiter::Collective(barrier)), ["a message from rank 1 (barrier, tag 0x5)"]);
        assert_eq!(awaited(Waiter::Call("wait_recv")), ["a message from rank 1 (tag 0x9)"]);
        assert_eq!(awaited(Waiter::Anybody).len(), 3);
        assert_eq!(Waiter::Collective(barrier).to_string(), "barrier, tag 0x5");
    }

    #[test]
    fn the_first_end_is_the_one_that_counts() {
        let mut ops = Ops::default();
        let id = ops.insert(ASKED);
        ops.end(id, Outcome::Cancelled);
        ops.end(id, Outcome::Done { rank: 1, len: 1, small: None });
        assert_eq!((ops.pending().count(), ops.ended()), (0, 1));
        assert!(matches!(ops.take(id), Some(Outcome::Cancelled)));
    }
}
