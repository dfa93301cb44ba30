//! Which clients watch which keys. Clients are numbers here; nothing is sent.

use std::collections::{HashMap, HashSet};

use crate::store::tcp::wire::Event;
use crate::store::values::Value;

/// All watches of a server.
#[derive(Default)]
pub struct Watches {
    by_key: HashMap<Box<[u8]>, Vec<usize>>,
    by_client: HashMap<usize, HashSet<Box<[u8]>>>,
    /// Bytes of all this.
    size: usize,
}

/// A change of a watched key.
pub struct ChangeNotice {
    /// What happened.
    pub event: Event,
    /// The key.
    pub key: Box<[u8]>,
    /// Its value before.
    pub old: Option<Value>,
    /// Its value now.
    pub new: Option<Value>,
}

impl Watches {
    /// Bytes of all watches.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The client watches the key from now on.
    pub fn add(&mut self, client: usize, key: &[u8]) {
        if self.by_client.entry(client).or_default().insert(key.into()) {
            self.by_key.entry(key.into()).or_default().push(client);
            self.size += entry_size(key);
        }
    }

    /// The clients that watch the key.
    pub fn of(&self, key: &[u8]) -> &[usize] {
        if self.by_key.is_empty() { &[] } else { self.by_key.get(key).map_or(&[], Vec::as_slice) }
    }

    /// Whether the client watches anything.
    pub fn watching(&self, client: usize) -> bool {
        !self.by_client.is_empty() && self.by_client.contains_key(&client)
    }

    /// Removes a client.
    pub fn remove_client(&mut self, client: usize) {
        if self.by_client.is_empty() {
            return;
        }
        for key in self.by_client.remove(&client).unwrap_or_default() {
            self.size -= entry_size(&key);
            if let Some(clients) = self.by_key.get_mut(&key) {
                clients.retain(|&other| other != client);
                if clients.is_empty() {
                    self.by_key.remove(&key);
                }
            }
        }
    }
}

fn entry_size(key: &[u8]) -> usize {
    2 * (key.len() + size_of::<Box<[u8]>>()) + size_of::<usize>()
}
