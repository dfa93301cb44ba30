//! Which clients wait for which keys, queues and barriers. Clients are numbers here; nothing is sent.
//!
//! A client that waits for several keys is listed under each that does not exist yet, and is woken when each has been set once: torch's rule. So a key
//! that was set and deleted again is not waited for once more. [`Store::wait`](crate::store::Store::wait) says so to users.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::store::tcp::wire::Strings;
use crate::store::values::Values;

/// All waits of a server.
#[derive(Default)]
pub struct Waits {
    pending: HashMap<usize, Pending>,
    /// Under each key that is waited for: the numbers of the waits, which increase, and their clients.
    by_key: HashMap<Arc<[u8]>, VecDeque<(u64, usize)>>,
    /// Waits for keys so far.
    count: u64,
    barriers: HashMap<Box<[u8]>, Barrier>,
    /// Clients woken for a value in a queue that they have not popped yet.
    woken_for: HashMap<usize, Box<[u8]>>,
    /// Bytes of all this.
    size: usize,
}

/// A barrier.
struct Barrier {
    /// The clients that wait, and the count for which each waits.
    waiting: Vec<(usize, i64)>,
    /// No greater than any of these counts.
    least: i64,
}

enum Pending {
    Keys {
        /// Those that did not exist, each once.
        keys: Box<[Arc<[u8]>]>,
        /// How many of them were not set yet.
        missing: usize,
        /// The wait's number in the lists.
        number: u64,
    },
    Barrier(Box<[u8]>),
}

/// Bytes for a key of a wait besides its own: its counts, its entries in the wait and in the table, and a short list.
const LISTED: usize =
    2 * size_of::<usize>() + 2 * size_of::<Arc<[u8]>>() + size_of::<VecDeque<(u64, usize)>>() + 4 * size_of::<(u64, usize)>();

impl Waits {
    /// Bytes of all waits.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether the client is waiting.
    pub fn is_waiting(&self, client: usize) -> bool {
        !self.pending.is_empty() && self.pending.contains_key(&client)
    }

    /// Begins to wait; true if there is nothing to wait for.
    pub fn wait(&mut self, client: usize, keys: &Strings<'_>, values: &Values) -> bool {
        let mut missing: Vec<&[u8]> = keys.iter().filter(|key| !values.contains(key)).collect();
        if missing.is_empty() {
            return true;
        }
        missing.sort_unstable();
        missing.dedup();
        self.count += 1;
        let number = self.count;
        let keys: Box<[Arc<[u8]>]> = missing.into_iter().map(|key| self.list(key, number, client)).collect();
        self.add(client, Pending::Keys { missing: keys.len(), keys, number });
        false
    }

    /// A key has come into being: who waited for nothing else goes on.
    pub fn wake(&mut self, key: &[u8], woken: &mut Vec<usize>) {
        if self.by_key.is_empty() {
            return;
        }
        for (_, client) in self.by_key.remove(key).unwrap_or_default() {
            if self.key_was_set(client) {
                woken.push(client);
            }
        }
    }

    /// A queue has a value more: one who waited for nothing else goes on. Until that client has come for it the value is owed. Those in front of it, who
    /// wait for more, do not wait for the queue any more.
    pub fn wake_one(&mut self, key: &[u8], woken: &mut Vec<usize>) {
        while let Some((_, client)) = self.by_key.get_mut(key).and_then(VecDeque::pop_front) {
            if self.by_key.get(key).is_some_and(VecDeque::is_empty) {
                self.by_key.remove(key);
            }
            if self.key_was_set(client) {
                woken.push(client);
                self.woken_for.insert(client, key.into());
                return;
            }
        }
    }

    /// Takes the queue that the client was woken for: its next request shows whether it pops the value.
    pub fn take_woken_for(&mut self, client: usize) -> Option<Box<[u8]>> {
        if self.woken_for.is_empty() { None } else { self.woken_for.remove(&client) }
    }

    /// The client joins a barrier as number `count`: all clients that waited for that count, or less, are woken.
    pub fn join_barrier(&mut self, client: usize, key: &[u8], world_size: i64, count: i64, woken: &mut Vec<usize>) {
        self.add(client, Pending::Barrier(key.into()));
        match self.barriers.get_mut(key) {
            Some(barrier) => barrier.join(client, world_size),
            None => {
                self.barriers.insert(key.into(), Barrier { waiting: vec![(client, world_size)], least: world_size });
            }
        }
        // Rarely true: so the list is searched once per barrier, not each time that a client joins.
        if self.barriers.get(key).is_some_and(|barrier| barrier.least <= count)
            && let Some(mut barrier) = self.barriers.remove(key)
        {
            let released = woken.len();
            woken.extend(barrier.release(count));
            woken.iter().skip(released).for_each(|&client| drop(self.remove(client)));
            if !barrier.waiting.is_empty() {
                self.barriers.insert(key.into(), barrier);
            }
        }
    }

    /// Ends the client's wait.
    pub fn cancel(&mut self, client: usize) {
        match self.remove(client) {
            None => {}
            Some(Pending::Keys { keys, number, .. }) => keys.iter().for_each(|key| self.unlist(key, number)),
            Some(Pending::Barrier(key)) => {
                if let Some(barrier) = self.barriers.get_mut(&key) {
                    barrier.waiting.retain(|&(other, _)| other != client);
                    if barrier.waiting.is_empty() {
                        self.barriers.remove(&key);
                    }
                }
            }
        }
    }

    /// A key for which the client waits was set, and its list was removed: whether it was the last key of the wait.
    fn key_was_set(&mut self, client: usize) -> bool {
        let Some(Pending::Keys { missing, .. }) = self.pending.get_mut(&client) else { return false };
        *missing = missing.saturating_sub(1);
        *missing == 0 && self.remove(client).is_some()
    }

    /// Lists a wait under a key, and returns the key as the table holds it.
    fn list(&mut self, key: &[u8], number: u64, client: usize) -> Arc<[u8]> {
        let held = self.by_key.get_key_value(key).map_or_else(|| Arc::from(key), |(held, _)| Arc::clone(held));
        self.by_key.entry(Arc::clone(&held)).or_default().push_back((number, client));
        held
    }

    /// Removes a wait from the list of a key. It is not there any more once the key was set.
    fn unlist(&mut self, key: &[u8], number: u64) {
        let Some(list) = self.by_key.get_mut(key) else { return };
        if let Ok(index) = list.binary_search_by_key(&number, |&(other, _)| other) {
            list.remove(index);
        }
        if list.is_empty() {
            self.by_key.remove(key);
        }
    }

    fn add(&mut self, client: usize, pending: Pending) {
        self.size += pending.size();
        self.pending.insert(client, pending);
    }

    fn remove(&mut self, client: usize) -> Option<Pending> {
        let pending = self.pending.remove(&client)?;
        self.size -= pending.size();
        Some(pending)
    }
}

impl Barrier {
    fn join(&mut self, client: usize, wanted: i64) {
        self.waiting.push((client, wanted));
        self.least = self.least.min(wanted);
    }

    /// Removes the clients that waited for no more than `count`, and returns them.
    fn release(&mut self, count: i64) -> impl Iterator<Item = usize> {
        let (released, waiting) = std::mem::take(&mut self.waiting).into_iter().partition(|&(_, wanted)| wanted <= count);
        self.waiting = waiting;
        self.least = self.waiting.iter().map(|&(_, wanted)| wanted).min().unwrap_or(i64::MAX);
        let released: Vec<(usize, i64)> = released;
        released.into_iter().map(|(client, _)| client)
    }
}

impl Pending {
    fn size(&self) -> usize {
        match self {
            Pending::Keys { keys, .. } => keys.iter().map(|key| key.len() + LISTED).sum(),
            Pending::Barrier(key) => key.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_client_of_a_barrier_waits_for_its_own_count() {
        let (mut waits, mut woken) = (Waits::default(), Vec::new());
        let mut join = |waits: &mut Waits, client, world_size, count| {
            waits.join_barrier(client, b"b", world_size, count, &mut woken);
            std::mem::take(&mut woken)
        };
        assert_eq!(join(&mut waits, 1, 4, 1), []);
        assert_eq!(join(&mut waits, 2, 2, 2), [2]);
        waits.cancel(1);
        assert_eq!(join(&mut waits, 3, 5, 3), []);
        assert_eq!(join(&mut waits, 4, 5, 4), [], "a cancelled wait is not woken");
        assert_eq!(join(&mut waits, 5, 5, 5), [3, 4, 5]);
        assert!((1..=5).all(|client| !waits.is_waiting(client)));
        assert_eq!(waits.size(), 0);
    }
}
