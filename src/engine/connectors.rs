//! The connectors of an engine. Used by callers on any thread, under the lock of the submit queue.

use std::fmt;

use crate::base::slab::Slab;

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
        match self.generation >> 1 {
            0 => write!(f, "connector {}", self.index),
            reused => write!(f, "connector {}.{reused}", self.index),
        }
    }
}

/// The most connectors of one engine.
pub const MAX_CONNECTORS: usize = 1 << 20;

/// The connectors of an engine that exist.
#[derive(Default)]
pub struct Connectors(Slab<(), 1024, { MAX_CONNECTORS / 1024 }>);

impl Connectors {
    /// `None` if there are [`MAX_CONNECTORS`].
    pub fn add(&mut self) -> Option<ConnectorId> {
        self.0.insert(|()| ()).map(|(index, generation)| ConnectorId { index, generation })
    }

    #[inline]
    pub fn has(&self, id: ConnectorId) -> bool {
        self.0.find(id.index, id.generation).is_some()
    }

    /// Removes a connector, if it exists.
    pub fn remove(&mut self, id: ConnectorId) {
        self.0.remove(id.index, id.generation, |()| ());
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
