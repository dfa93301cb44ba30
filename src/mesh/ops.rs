//! What a mesh was asked to do and has not done: one entry for each send and each receive. Under the lock of the mesh.

use crate::link::Failure;

use super::protocol::Tag;
use super::small::Small;

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
}

impl std::fmt::Display for What {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            What::Tagged(tag) => write!(f, "{tag}"),
            What::Slot(slot) => write!(f, "slot {slot}"),
        }
    }
}

impl Asked {
    /// Whether it is part of a collective, for which all ranks have to be there.
    pub fn is_collectives(&self) -> bool {
        matches!(self.what, What::Tagged(Tag::Collective(_)))
    }
}

impl std::fmt::Display for Asked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let action = if self.receives { "a message from" } else { "a receive of" };
        match self.rank {
            Some(rank) => write!(f, "{action} rank {rank} ({})", self.what),
            None => write!(f, "{action} one of several ranks ({})", self.what),
        }
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
}

impl Ops {
    /// Notes one.
    pub fn insert(&mut self, asked: Asked) -> OpId {
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
        if let Some(Some(State::Pending(asked))) = self.entry(id) {
            asked.rank = Some(rank);
        }
    }

    /// It has ended. Nothing, if nobody waits for it any more.
    pub fn end(&mut self, id: OpId, outcome: Outcome) {
        if let Some(state @ Some(State::Pending(_))) = self.entry(id) {
            *state = Some(State::Ended(outcome));
            self.ended += 1;
        }
    }

    /// Forgets one that has ended, and says how.
    pub fn take(&mut self, id: OpId) -> Option<Outcome> {
        let Some(State::Ended(outcome)) = self.entry(id)? else { return None };
        let outcome = outcome.clone();
        self.forget(id);
        Some(outcome)
    }

    /// Forgets one.
    pub fn forget(&mut self, id: OpId) {
        let Some(entry) = self.entries.get_mut(id.index as usize).filter(|entry| entry.0 == id.generation) else { return };
        if entry.1.take().is_some() {
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
    fn the_first_end_is_the_one_that_counts() {
        let mut ops = Ops::default();
        let id = ops.insert(ASKED);
        ops.end(id, Outcome::Cancelled);
        ops.end(id, Outcome::Done { rank: 1, len: 1, small: None });
        assert_eq!((ops.pending().count(), ops.ended()), (0, 1));
        assert!(matches!(ops.take(id), Some(Outcome::Cancelled)));
    }
}
