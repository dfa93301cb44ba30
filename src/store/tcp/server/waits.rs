//! Who waits for what. Clients are numbers here; nothing is sent.
//!
//! A client that waits for several keys is listed under one of them, one that does not exist yet, and moves on when that comes: a wait costs one
//! entry however long it is, and ends only while all its keys exist, even if some were deleted in between.

use std::collections::{HashMap, VecDeque};

use crate::store::tcp::wire::Strings;
use crate::store::values::Values;

/// All waits of a server.
#[derive(Default)]
pub struct Waits {
    pending: HashMap<usize, Pending>,
    /// Under the key that each waits for, in the order of coming.
    by_key: HashMap<Box<[u8]>, VecDeque<usize>>,
    barriers: HashMap<Box<[u8]>, Gathering>,
    /// Clients woken for a value in a queue that they have not come for yet.
    owed: HashMap<usize, Box<[u8]>>,
    /// Bytes that all this takes.
    size: usize,
}

/// Clients at a barrier, with the number that each waits for.
struct Gathering {
    here: Vec<(usize, i64)>,
    /// No greater than any of these numbers.
    least: i64,
}

enum Pending {
    Keys { keys: Box<[Box<[u8]>]>, at: usize },
    Barrier(Box<[u8]>),
}

impl Waits {
    /// Bytes that all waits take.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether the client is waiting.
    pub fn waiting(&self, client: usize) -> bool {
        !self.pending.is_empty() && self.pending.contains_key(&client)
    }

    /// Begins to wait; true if there is nothing to wait for.
    pub fn wait(&mut self, client: usize, keys: &Strings<'_>, values: &Values) -> bool {
        let Some(at) = keys.iter().position(|key| !values.contains(key)) else { return true };
        let keys: Box<[Box<[u8]>]> = keys.iter().map(Box::from).collect();
        self.list(client, keys.get(at).map_or(&[], |key| key));
        self.admit(client, Pending::Keys { keys, at });
        false
    }

    /// A key has come into being: who waited for all there is now goes on.
    pub fn wake(&mut self, key: &[u8], values: &Values, woken: &mut Vec<usize>) {
        if self.by_key.is_empty() {
            return;
        }
        for client in self.by_key.remove(key).unwrap_or_default() {
            if self.advance(client, values) {
                woken.push(client);
            }
        }
    }

    /// A queue has a value more: one who waited for it goes on. Until that client has come for it the value is owed.
    pub fn wake_one(&mut self, key: &[u8], values: &Values, woken: &mut Vec<usize>) {
        while let Some(client) = self.by_key.get_mut(key).and_then(VecDeque::pop_front) {
            if self.by_key.get(key).is_some_and(VecDeque::is_empty) {
                self.by_key.remove(key);
            }
            if self.advance(client, values) {
                woken.push(client);
                self.owed.insert(client, key.into());
                return;
            }
        }
    }

    /// The queue that the client was woken for, once: its next request tells whether it takes the value.
    pub fn settle(&mut self, client: usize) -> Option<Box<[u8]>> {
        if self.owed.is_empty() { None } else { self.owed.remove(&client) }
    }

    /// The client has come to a barrier, as number `count`: all who waited for so many go on.
    pub fn arrive(&mut self, client: usize, key: &[u8], world_size: i64, count: i64, woken: &mut Vec<usize>) {
        self.admit(client, Pending::Barrier(key.into()));
        match self.barriers.get_mut(key) {
            Some(gathering) => gathering.join(client, world_size),
            None => {
                self.barriers.insert(key.into(), Gathering { here: vec![(client, world_size)], least: world_size });
            }
        }
        // Seldom so: a thousand who come look at each other once, not each time that one comes.
        if self.barriers.get(key).is_some_and(|gathering| gathering.least <= count)
            && let Some(mut gathering) = self.barriers.remove(key)
        {
            let released = woken.len();
            woken.extend(gathering.release(count));
            woken.iter().skip(released).for_each(|&client| drop(self.dismiss(client)));
            if !gathering.here.is_empty() {
                self.barriers.insert(key.into(), gathering);
            }
        }
    }

    /// The client waits no more.
    pub fn cancel(&mut self, client: usize) {
        match self.dismiss(client) {
            None => {}
            Some(Pending::Keys { keys, at }) => {
                let key = keys.get(at).map_or(&[][..], |key| key);
                if let Some(list) = self.by_key.get_mut(key) {
                    list.retain(|&other| other != client);
                    if list.is_empty() {
                        self.by_key.remove(key);
                    }
                }
            }
            Some(Pending::Barrier(key)) => {
                if let Some(gathering) = self.barriers.get_mut(&key) {
                    gathering.here.retain(|&(other, _)| other != client);
                    if gathering.here.is_empty() {
                        self.barriers.remove(&key);
                    }
                }
            }
        }
    }

    /// The key that a client was listed under exists: lists it under the next that does not, or lets it go.
    fn advance(&mut self, client: usize, values: &Values) -> bool {
        let Some(Pending::Keys { keys, at }) = self.pending.get_mut(&client) else { return false };
        // From where it stands, then once over all, for what was deleted meanwhile.
        let missing = |from: usize| keys.iter().skip(from).position(|key| !values.contains(key)).map(|i| from + i);
        match missing(*at).or_else(|| missing(0)) {
            Some(next) => {
                *at = next;
                let key = keys.get(next).cloned().unwrap_or_default();
                self.list(client, &key);
                false
            }
            None => {
                self.dismiss(client);
                true
            }
        }
    }

    fn list(&mut self, client: usize, key: &[u8]) {
        match self.by_key.get_mut(key) {
            Some(list) => list.push_back(client),
            None => {
                self.by_key.insert(key.into(), VecDeque::from([client]));
            }
        }
    }

    fn admit(&mut self, client: usize, pending: Pending) {
        self.size += pending.size();
        self.pending.insert(client, pending);
    }

    fn dismiss(&mut self, client: usize) -> Option<Pending> {
        let pending = self.pending.remove(&client)?;
        self.size -= pending.size();
        Some(pending)
    }
}

impl Gathering {
    fn join(&mut self, client: usize, wanted: i64) {
        self.here.push((client, wanted));
        self.least = self.least.min(wanted);
    }

    /// Takes out those who waited for no more than `count`.
    fn release(&mut self, count: i64) -> impl Iterator<Item = usize> {
        let (released, here) = std::mem::take(&mut self.here).into_iter().partition(|&(_, wanted)| wanted <= count);
        self.here = here;
        self.least = self.here.iter().map(|&(_, wanted)| wanted).min().unwrap_or(i64::MAX);
        let released: Vec<(usize, i64)> = released;
        released.into_iter().map(|(client, _)| client)
    }
}

impl Pending {
    fn size(&self) -> usize {
        match self {
            Pending::Keys { keys, .. } => keys.iter().map(|key| key.len() + size_of::<Box<[u8]>>()).sum(),
            Pending::Barrier(key) => key.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_a_barrier_each_waits_for_the_number_that_it_named() {
        let (mut waits, mut woken) = (Waits::default(), Vec::new());
        let mut arrive = |waits: &mut Waits, client, world_size, count| {
            waits.arrive(client, b"b", world_size, count, &mut woken);
            std::mem::take(&mut woken)
        };
        assert_eq!(arrive(&mut waits, 1, 4, 1), []);
        assert_eq!(arrive(&mut waits, 2, 2, 2), [2]);
        waits.cancel(1);
        assert_eq!(arrive(&mut waits, 3, 5, 3), []);
        assert_eq!(arrive(&mut waits, 4, 5, 4), [], "who cancelled does not count");
        assert_eq!(arrive(&mut waits, 5, 5, 5), [3, 4, 5]);
        assert!((1..=5).all(|client| !waits.waiting(client)));
        assert_eq!(waits.size(), 0);
    }
}
