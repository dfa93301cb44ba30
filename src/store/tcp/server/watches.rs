//! Who watches what. Clients are numbers here; nothing is sent.

use std::collections::{HashMap, HashSet};

use crate::store::tcp::wire::Event;
use crate::store::values::Value;

/// All watches of a server.
#[derive(Default)]
pub struct Watches {
    by_key: HashMap<Box<[u8]>, Vec<usize>>,
    by_client: HashMap<usize, HashSet<Box<[u8]>>>,
    /// Bytes that all this takes.
    size: usize,
}

/// A change that a client is to be told of.
pub struct Notice {
    /// What happened.
    pub event: Event,
    /// To which key.
    pub key: Box<[u8]>,
    /// Its value before.
    pub old: Option<Value>,
    /// Its value now.
    pub new: Option<Value>,
}

impl Watches {
    /// Bytes that all watches take.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The client wants to know.
    pub fn add(&mut self, client: usize, key: &[u8]) {
        if self.by_client.entry(client).or_default().insert(key.into()) {
            self.by_key.entry(key.into()).or_default().push(client);
            self.size += entry_size(key);
        }
    }

    /// Who wants to know of the key.
    pub fn of(&self, key: &[u8]) -> &[usize] {
        if self.by_key.is_empty() { &[] } else { self.by_key.get(key).map_or(&[], Vec::as_slice) }
    }

    /// Whether the client watches anything.
    pub fn watching(&self, client: usize) -> bool {
        !self.by_client.is_empty() && self.by_client.contains_key(&client)
    }

    /// The client is gone.
    pub fn leave(&mut self, client: usize) {
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
