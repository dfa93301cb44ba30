//! The requests of one comm: a fixed table, so that posting allocates nothing. Used by the thread that drives the comm.
//!
//! A [`RequestId`] is a slot and its generation, never a pointer: testing a request that was freed, or one of another comm, is noticed.

use crate::base::error::{Error, Result};

use super::limits::{MAX_RECVS, MAX_REQUESTS};
use super::wr_id::RequestId;

/// What a finished request moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// How many messages: 1 for a send, the group's n for a receive, 0 for a flush.
    pub n: usize,
    /// Their sizes.
    pub bytes: [u32; MAX_RECVS],
}

/// A request in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Messages of it.
    pub n: u8,
    /// Still to complete: 1 for a send, messages of a receive, READs of a flush. 0 = done.
    pub left: u8,
    /// Stripes of this send that have not completed: a bit each.
    pub pending_stripes: u64,
    /// Sequence number of its first slot.
    pub sequence: u64,
    /// Sizes, as far as known.
    pub bytes: [u32; MAX_RECVS],
}

#[derive(Clone, Copy)]
struct Entry {
    /// The request's id. When free, the next one's with its slot inverted: an id of another entry, so that one comparison tells.
    id: u32,
    request: Request,
}

/// The table. Entries that were never used were never touched, so they take no memory.
pub struct RequestTable {
    /// As many as were in use at once up to now; room for all.
    entries: Vec<Entry>,
    free: [u8; MAX_REQUESTS],
    free_count: usize,
}

const EMPTY: Request = Request { n: 0, left: 0, pending_stripes: 0, sequence: 0, bytes: [0; MAX_RECVS] };
/// The part of an id that is the slot.
const SLOT: u32 = 0xff;
/// The rest is the generation: the first.
const FIRST: u32 = SLOT + 1;
const _: () = assert!(MAX_REQUESTS == SLOT as usize + 1);

impl RequestTable {
    /// An empty table.
    pub fn new() -> Self {
        RequestTable {
            entries: Vec::with_capacity(MAX_REQUESTS),
            free: std::array::from_fn(|i| (MAX_REQUESTS - 1 - i) as u8),
            free_count: MAX_REQUESTS,
        }
    }

    /// Requests in use.
    #[inline]
    pub fn used(&self) -> usize {
        MAX_REQUESTS - self.free_count
    }

    /// Whether another request fits.
    #[inline]
    pub fn has_room(&self) -> bool {
        self.free_count > 0
    }

    /// Takes a slot. `None` when all are in use.
    #[inline(always)]
    pub fn insert(&mut self, request: Request) -> Option<RequestId> {
        let top = self.free_count.checked_sub(1)?;
        let slot = *self.free.get(top)?;
        if usize::from(slot) == self.entries.len() {
            self.first_use();
        }
        let entry = self.entries.get_mut(usize::from(slot))?;
        self.free_count = top;
        entry.id ^= SLOT;
        entry.request = request;
        Some(RequestId(entry.id))
    }

    /// Makes the next entry, within the capacity.
    #[cold]
    #[inline(never)]
    fn first_use(&mut self) {
        let id = FIRST | self.entries.len() as u32;
        self.entries.push(Entry { id: id ^ SLOT, request: EMPTY });
    }

    /// The request, if it is outstanding.
    #[inline]
    pub fn get_mut(&mut self, id: RequestId) -> Option<&mut Request> {
        let entry = self.entries.get_mut((id.0 & SLOT) as usize)?;
        (entry.id == id.0).then_some(&mut entry.request)
    }

    /// Whether it is done.
    ///
    /// Errors: a request that is not outstanding: finished before, or never made here.
    #[inline(always)]
    pub fn is_done(&self, id: RequestId) -> Result<bool> {
        match self.entries.get((id.0 & SLOT) as usize) {
            Some(entry) if entry.id == id.0 => Ok(entry.request.left == 0),
            _ => Err(stale(id)),
        }
    }

    /// Its sizes if it is done, in which case it is freed.
    ///
    /// Errors: as for [`RequestTable::is_done`].
    #[inline(always)]
    pub fn finish(&mut self, id: RequestId) -> Result<Option<Sizes>> {
        match self.get_mut(id) {
            Some(Request { left: 0, n, bytes, .. }) => {
                let sizes = Sizes { n: usize::from(*n), bytes: *bytes };
                self.withdraw(id);
                Ok(Some(sizes))
            }
            Some(_) => Ok(None),
            None => Err(stale(id)),
        }
    }

    /// Frees a request, whether or not it is done.
    #[inline(always)]
    pub fn withdraw(&mut self, id: RequestId) {
        let Some(entry) = self.entries.get_mut((id.0 & SLOT) as usize).filter(|entry| entry.id == id.0) else { return };
        let slot = id.0 & SLOT;
        // Generation 0 is skipped so that no id is 0.
        entry.id = id.0.checked_add(FIRST).unwrap_or(FIRST | slot) ^ SLOT;
        if let Some(top) = self.free.get_mut(self.free_count) {
            *top = slot as u8;
            self.free_count += 1;
        }
    }

    /// The oldest send or receive that is not done. A flush is neither: it has no message.
    pub fn oldest(&self) -> Option<(RequestId, Request)> {
        self.open().filter(|(_, request)| request.n != 0).min_by_key(|(_, request)| request.sequence)
    }

    /// Requests that are not done, and the sequence number of the oldest of them.
    pub fn unfinished(&self) -> (usize, Option<u64>) {
        let sequences = self.open().map(|(_, request)| request.sequence);
        sequences.fold((0, None), |(n, oldest), it| (n + 1, Some(oldest.map_or(it, |oldest: u64| oldest.min(it)))))
    }

    /// The requests that are not done.
    fn open(&self) -> impl Iterator<Item = (RequestId, Request)> {
        let used = self.entries.iter().zip(0..).filter(|(entry, slot)| entry.id & SLOT == *slot);
        used.map(|(entry, _)| (RequestId(entry.id), entry.request)).filter(|(_, request)| request.left != 0)
    }
}

impl Default for RequestTable {
    fn default() -> Self {
        Self::new()
    }
}

#[cold]
fn stale(id: RequestId) -> Error {
    Error::internal(format!("test: request {:#x} is not outstanding on this comm; it was finished before, or belongs to another", id.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    #[test]
    fn holds_256_and_not_one_more() {
        let mut table = RequestTable::new();
        let ids: Vec<_> = (0..MAX_REQUESTS).map(|_| table.insert(EMPTY).unwrap()).collect();
        assert!(table.insert(EMPTY).is_none() && !table.has_room());
        for id in ids {
            assert!(table.finish(id).unwrap().is_some());
        }
        assert_eq!(table.used(), 0);
    }

    #[test]
    fn a_finished_request_is_gone() {
        let mut table = RequestTable::new();
        let id = table.insert(Request { n: 1, left: 1, ..EMPTY }).unwrap();
        assert_eq!(table.finish(id).unwrap(), None);
        table.get_mut(id).unwrap().left = 0;
        assert_eq!(table.finish(id).unwrap().unwrap().n, 1);
        assert!(matches!(table.finish(id), Err(Error::Internal(_))));
        assert!(table.get_mut(id).is_none());
        assert!(table.get_mut(RequestId(id.0 + 0x100)).is_none(), "not given out yet");
        let next = table.insert(EMPTY).unwrap();
        assert_eq!(next.0, id.0 + 0x100);
        assert_eq!(next.0 & 0xff, id.0 & 0xff);
        assert!(table.get_mut(id).is_none() && table.get_mut(next).is_some());
        table.withdraw(id);
        assert_eq!(table.used(), 1, "not that of another generation");
        table.withdraw(next);
        assert_eq!(table.used(), 0);
        assert!(matches!(table.is_done(next), Err(Error::Internal(_))));
    }

    #[test]
    fn a_flush_is_not_the_oldest_receive() {
        let mut table = RequestTable::new();
        table.insert(Request { n: 0, left: 1, sequence: 0, ..EMPTY }).unwrap();
        assert_eq!(table.oldest(), None);
        let receive = table.insert(Request { n: 1, left: 1, sequence: 9, ..EMPTY }).unwrap();
        assert_eq!(table.oldest().map(|(id, _)| id), Some(receive));
    }

    #[test]
    fn generations_wrap_past_zero() {
        let mut table = RequestTable::new();
        let id = table.insert(EMPTY).unwrap();
        table.finish(id).unwrap();
        table.entries[0].id = u32::MAX;
        let id = table.insert(EMPTY).unwrap();
        assert_eq!(id.0, u32::MAX << 8);
        table.finish(id).unwrap();
        assert_eq!(table.insert(EMPTY).unwrap().0, 1 << 8);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Insert(u8),
        Finish(usize),
        Complete(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![any::<u8>().prop_map(Op::Insert), (0..400usize).prop_map(Op::Finish), (0..400usize).prop_map(Op::Complete)]
    }

    proptest! {
        #[test]
        fn behaves_like_a_map(ops in proptest::collection::vec(op(), 0..900)) {
            let mut table = RequestTable::new();
            let mut model: HashMap<u32, u8> = HashMap::new();
            let mut ever: Vec<RequestId> = Vec::new();
            for op in ops {
                match op {
                    Op::Insert(left) => match table.insert(Request { n: 1, left, ..EMPTY }) {
                        Some(id) => {
                            prop_assert!(model.insert(id.0, left).is_none());
                            ever.push(id);
                        }
                        None => prop_assert_eq!(model.len(), MAX_REQUESTS),
                    },
                    Op::Finish(i) => if let Some(&id) = ever.get(i) {
                        match model.get(&id.0) {
                            None => prop_assert!(table.finish(id).is_err()),
                            Some(0) => { prop_assert!(table.finish(id).unwrap().is_some()); model.remove(&id.0); }
                            Some(_) => prop_assert!(table.finish(id).unwrap().is_none()),
                        }
                    },
                    Op::Complete(i) => if let Some(&id) = ever.get(i) {
                        let found = table.get_mut(id);
                        prop_assert_eq!(found.is_some(), model.contains_key(&id.0));
                        if let Some(request) = found { request.left = 0; model.insert(id.0, 0); }
                    },
                }
                prop_assert_eq!(table.used(), model.len());
                prop_assert_eq!(table.unfinished().0, model.values().filter(|&&l| l != 0).count());
                let oldest = table.oldest();
                prop_assert_eq!(oldest.is_some(), table.unfinished().0 > 0);
                prop_assert!(oldest.is_none_or(|(id, request)| model.get(&id.0) == Some(&request.left) && request.left != 0));
            }
        }
    }
}
