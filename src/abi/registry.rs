//! The objects behind the handles of the library's own C functions, other than comms. Looked up at every call, on the callers' threads; nothing
//! that moves data comes here.
//!
//! A handle is a number, as those of comms are: kind, process, count and index. What is closed, forged, of another kind or from before a fork is told
//! apart without touching what it might point to.

use std::sync::Arc;

use crate::abi::handle::{Handle, Kind, MAX_COMMS, Place};
use crate::base::error::{Error, Result};
use crate::base::fork;

/// Objects of one kind.
pub struct Registry<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

struct Slot<T> {
    // How many objects had the slot before.
    count: u32,
    object: Option<Arc<T>>,
}

impl<T> Default for Registry<T> {
    fn default() -> Self {
        Registry { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Registry<T> {
    /// Takes an object in.
    ///
    /// Errors: 2^18 of the kind are open.
    pub fn insert(&mut self, kind: Kind, object: Arc<T>) -> Result<Handle> {
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.slots.len() == MAX_COMMS => return Err(Error::usage(format!("{MAX_COMMS} {}s are open", kind.words()))),
            None => {
                self.slots.push(Slot { count: 0, object: None });
                self.slots.len() as u32 - 1
            }
        };
        match self.slots.get_mut(index as usize) {
            Some(slot) => {
                slot.object = Some(object);
                Ok(Place::comm(kind, process(), index, slot.count))
            }
            None => Err(Error::internal("a slot that is not there")),
        }
    }

    /// The object of a handle.
    pub fn get(&self, kind: Kind, handle: Handle) -> Result<Arc<T>> {
        handle.expect(kind, process())?;
        let place = handle.comm();
        let slot = self.slots.get(place.index as usize).filter(|slot| place.is(slot.count));
        slot.and_then(|slot| slot.object.clone()).ok_or_else(|| gone(kind, handle))
    }

    /// Takes an object out; its handle is spent.
    pub fn remove(&mut self, kind: Kind, handle: Handle) -> Result<Arc<T>> {
        handle.expect(kind, process())?;
        let place = handle.comm();
        let slot = self.slots.get_mut(place.index as usize).filter(|slot| place.is(slot.count));
        let Some((slot, object)) = slot.and_then(|slot| slot.object.take().map(|object| (slot, object))) else {
            return Err(gone(kind, handle));
        };
        slot.count = place.next();
        self.free.push(place.index);
        Ok(object)
    }

    /// Takes all objects out that `which` picks; their handles are spent.
    pub fn remove_all(&mut self, which: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut removed = Vec::new();
        for (index, slot) in (0..).zip(&mut self.slots) {
            if let Some(object) = slot.object.take_if(|object| which(object)) {
                slot.count = Place::after(slot.count);
                self.free.push(index);
                removed.push(object);
            }
        }
        removed
    }
}

/// What tells the handles of this process from those of its ancestors.
fn process() -> u8 {
    fork::epoch() as u8
}

#[cold]
fn gone(kind: Kind, handle: Handle) -> Error {
    Error::internal(format!("{} {:#x} is closed, or never was one", kind.words(), handle.value()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_lives_as_long_as_its_object_is_in() {
        let mut registry = Registry::default();
        let [a, b] = ["a", "b"].map(|name| registry.insert(Kind::Proxy, Arc::new(name)).unwrap());
        assert_ne!(a, b);
        assert_eq!((*registry.get(Kind::Proxy, a).unwrap(), *registry.get(Kind::Proxy, b).unwrap()), ("a", "b"));
        assert!(registry.get(Kind::Connector, a).is_err_and(|e| e.to_string().contains("is a proxy, not a connector")));
        assert_eq!(*registry.remove(Kind::Proxy, a).unwrap(), "a");
        for result in [registry.get(Kind::Proxy, a), registry.remove(Kind::Proxy, a)] {
            assert!(result.is_err_and(|e| e.to_string().contains("is closed, or never was one")));
        }
        // The next one has its slot, and another handle.
        let c = registry.insert(Kind::Proxy, Arc::new("c")).unwrap();
        assert!(registry.get(Kind::Proxy, a).is_err() && *registry.get(Kind::Proxy, c).unwrap() == "c");
        assert_eq!(registry.remove_all(|name| *name != "b").len(), 1);
        assert!(registry.get(Kind::Proxy, c).is_err() && registry.get(Kind::Proxy, b).is_ok());
        for nothing in [0, 1, 0x7fff_1234_5678, usize::MAX] {
            assert!(registry.get(Kind::Proxy, Handle::from_pointer(std::ptr::without_provenance_mut(nothing))).is_err());
        }
    }
}
