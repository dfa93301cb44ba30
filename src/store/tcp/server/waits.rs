//! Who waits for what. Clients are numbers here; nothing is sent.
//!
//! A client that waits for several keys is listed under each that does not exist yet, and goes on when each has come once: torch's rule. So a key that
//! has come and was deleted again is not waited for once more. [`Store::wait`](crate::store::Store::wait) says so to users.

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
    /// Waits for keys that there have been.
    count: u64,
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
    Keys {
        /// Those that did not exist, each once.
        keys: Box<[Arc<[u8]>]>,
        /// How many of them have yet to come.
        missing: usize,
        /// What the wait is listed as.
        number: u64,
    },
    Barrier(Box<[u8]>),
}

/// Bytes that a key of a wait takes besides its own: its counts, its place in the wait and in the table, and a list that holds little.
const LISTED: usize =
    2 * size_of::<usize>() + 2 * size_of::<Arc<[u8]>>() + size_of::<VecDeque<(u64, usize)>>() + 4 * size_of::<(u64, usize)>();

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
        let mut missing: Vec<&[u8]> = keys.iter().filter(|key| !values.contains(key)).collect();
        if missing.is_empty() {
            return true;
        }
        missing.sort_unstable();
        missing.dedup();
        self.count += 1;
        let number = self.count;
        let keys: Box<[Arc<[u8]>]> = missing.into_iter().map(|key| self.list(key, number, client)).collect();
        self.admit(client, Pending::Keys { missing: keys.len(), keys, number });
        false
    }

    /// A key has come into being: who waited for nothing else goes on.
    pub fn wake(&mut self, key: &[u8], woken: &mut Vec<usize>) {
        if self.by_key.is_empty() {
            return;
        }
        for (_, client) in self.by_key.remove(key).unwrap_or_default() {
            if self.arrived(client) {
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
            if self.arrived(client) {
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
            Some(Pending::Keys { keys, number, .. }) => keys.iter().for_each(|key| self.strike(key, number)),
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

    /// A key that the client was listed under has come, and the list is gone: whether it was the last.
    fn arrived(&mut self, client: usize) -> bool {
        let Some(Pending::Keys { missing, .. }) = self.pending.get_mut(&client) else { return false };
        *missing = missing.saturating_sub(1);
        *missing == 0 && self.dismiss(client).is_some()
    }

    /// Lists a wait under a key, and returns the key as the table holds it.
    fn list(&mut self, key: &[u8], number: u64, client: usize) -> Arc<[u8]> {
        let held = self.by_key.get_key_value(key).map_or_else(|| Arc::from(key), |(held, _)| Arc::clone(held));
        self.by_key.entry(Arc::clone(&held)).or_default().push_back((number, client));
        held
    }

    /// Takes a wait off the list of a key, if it stands there: it does not once the key has come.
    fn strike(&mut self, key: &[u8], number: u64) {
        let Some(list) = self.by_key.get_mut(key) else { return };
        if let Ok(place) = list.binary_search_by_key(&number, |&(other, _)| other) {
            list.remove(place);
        }
        if list.is_empty() {
            self.by_key.remove(key);
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
            Pending::Keys { keys, .. } => keys.iter().map(|key| key.len() + LISTED).sum(),
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
