//! The connectors of an engine. Used by callers on any thread, under the lock of the submit queue.

use std::fmt;

/// Names a connector: one direction of one peer, whose operations are done one after the other. Valid for the engine that made it, until removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ConnectorId {
    index: u32,
    /// Tells it from those that had the index before.
    generation: u32,
}

impl ConnectorId {
    /// A small number for a client's own table of connectors. Used again after the connector is removed.
    #[inline]
    pub fn index(self) -> usize {
        self.index as usize
    }

    #[inline]
    pub(super) fn number(self) -> u32 {
        self.index
    }
}

impl fmt::Display for ConnectorId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.generation {
            0 => write!(f, "connector {}", self.index),
            reused => write!(f, "connector {}.{reused}", self.index),
        }
    }
}

/// The most connectors of one engine.
pub const MAX_CONNECTORS: usize = 1 << 20;

#[derive(Debug, Default)]
pub struct Connectors {
    /// By index: the generation, and whether the connector exists.
    all: Vec<(u32, bool)>,
    free: Vec<u32>,
}

impl Connectors {
    /// `None` if there are [`MAX_CONNECTORS`].
    pub fn add(&mut self) -> Option<ConnectorId> {
        if let Some(index) = self.free.pop() {
            let (generation, exists) = &mut self.all[index as usize];
            *exists = true;
            return Some(ConnectorId { index, generation: *generation });
        }
        if self.all.len() == MAX_CONNECTORS {
            return None;
        }
        self.all.push((0, true));
        Some(ConnectorId { index: self.all.len() as u32 - 1, generation: 0 })
    }

    #[inline]
    pub fn has(&self, id: ConnectorId) -> bool {
        self.all.get(id.index()) == Some(&(id.generation, true))
    }

    /// Of one that exists.
    pub fn remove(&mut self, id: ConnectorId) {
        if self.has(id) {
            self.all[id.index()] = (id.generation.wrapping_add(1), false);
            self.free.push(id.index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_is_used_again_under_another_name() {
        let mut connectors = Connectors::default();
        let (a, b) = (connectors.add().unwrap(), connectors.add().unwrap());
        assert_eq!((a.index(), b.index()), (0, 1));
        connectors.remove(a);
        connectors.remove(a);
        assert!(!connectors.has(a) && connectors.has(b));
        let c = connectors.add().unwrap();
        assert_eq!(c.index(), 0);
        assert!(c != a && connectors.has(c) && !connectors.has(a));
        assert_eq!(connectors.add().unwrap().index(), 2);
        assert_eq!(format!("{b}, {c}"), "connector 1, connector 0.1");
    }
}
