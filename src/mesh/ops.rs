//! What a mesh was asked to do and has not done: one entry for each send and each receive. Under the lock of the mesh.

/// Names an operation: an index and a generation, so that one that was forgotten is not taken for a later one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpId {
    index: u32,
    generation: u32,
}

/// How far an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpState {
    /// It waits for this rank.
    Pending {
        /// The peer.
        rank: usize,
        /// Whether it is a receive.
        receives: bool,
        /// Its tag.
        tag: u64,
    },
    /// It is done.
    Done {
        /// The peer.
        rank: usize,
        /// Bytes.
        len: u64,
    },
}

/// The table.
#[derive(Debug, Default)]
pub struct Ops {
    entries: Vec<(u32, Option<OpState>)>,
    free: Vec<u32>,
}

impl Ops {
    /// Notes one.
    pub fn insert(&mut self, state: OpState) -> OpId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.entries.push((0, None));
            (self.entries.len() - 1) as u32
        });
        let generation = self.entries.get_mut(index as usize).map_or(0, |entry| {
            entry.1 = Some(state);
            entry.0
        });
        OpId { index, generation }
    }

    fn entry(&mut self, id: OpId) -> Option<&mut (u32, Option<OpState>)> {
        self.entries.get_mut(id.index as usize).filter(|entry| entry.0 == id.generation)
    }

    /// It is done. Nothing, if nobody waits for it any more.
    pub fn complete(&mut self, id: OpId, rank: usize, len: u64) {
        if let Some((_, state @ Some(_))) = self.entry(id) {
            *state = Some(OpState::Done { rank, len });
        }
    }

    /// Forgets one that is done, and says with which rank and how many bytes.
    pub fn take(&mut self, id: OpId) -> Option<(usize, u64)> {
        let &mut (_, Some(OpState::Done { rank, len })) = self.entry(id)? else { return None };
        self.forget(id);
        Some((rank, len))
    }

    /// Forgets one.
    pub fn forget(&mut self, id: OpId) {
        if let Some(entry) = self.entry(id).filter(|entry| entry.1.is_some()) {
            *entry = (id.generation.wrapping_add(1), None);
            self.free.push(id.index);
        }
    }

    /// Those that are pending.
    pub fn pending(&self) -> impl Iterator<Item = OpState> + '_ {
        self.entries.iter().filter_map(|entry| entry.1).filter(|state| matches!(state, OpState::Pending { .. }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PENDING: OpState = OpState::Pending { rank: 1, receives: true, tag: 7 };

    #[test]
    fn an_operation_is_taken_once_and_its_place_used_again() {
        let mut ops = Ops::default();
        let (a, b) = (ops.insert(PENDING), ops.insert(PENDING));
        assert_eq!((ops.take(a), ops.pending().count()), (None, 2));
        ops.complete(a, 3, 9);
        assert_eq!((ops.take(a), ops.take(a)), (Some((3, 9)), None));
        let again = ops.insert(PENDING);
        assert_eq!(again.index, a.index);
        // What comes late for the one before.
        ops.complete(a, 4, 4);
        ops.forget(a);
        assert_eq!((ops.take(again), ops.pending().count()), (None, 2));
        ops.forget(again);
        ops.forget(b);
        assert_eq!(ops.pending().count(), 0);
    }
}
