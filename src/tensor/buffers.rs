//! The tensor buffers of a channel in one direction, by name and by number, and which of them are given up: those that have been idle for longest.
//! Under the lock of the manager.

use std::collections::BTreeMap;

use foldhash::HashMap;

use super::key::Name;

/// Buffers by number. A number is used again.
#[derive(Debug)]
pub struct Buffers<B> {
    places: Vec<Option<B>>,
    free: Vec<usize>,
    index_of: HashMap<Name, usize>,
}

impl<B> Default for Buffers<B> {
    fn default() -> Self {
        Buffers { places: Vec::new(), free: Vec::new(), index_of: HashMap::default() }
    }
}

impl<B> Buffers<B> {
    /// The number of a name's.
    pub fn index_of(&self, name: &Name) -> Option<usize> {
        self.index_of.get(name).copied()
    }

    /// The one with this number.
    pub fn get_mut(&mut self, index: usize) -> Option<&mut B> {
        self.places.get_mut(index)?.as_mut()
    }

    /// The number that the next new one gets.
    pub fn next_index(&self) -> usize {
        self.free.last().copied().unwrap_or(self.places.len())
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.index_of.len()
    }

    /// The number of numbers.
    #[cfg(test)]
    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// Adds one for a name that has none: its number.
    pub fn insert(&mut self, name: &Name, buffer: B) -> usize {
        let index = self.free.pop().unwrap_or(self.places.len());
        if index == self.places.len() {
            self.places.push(None);
        }
        if let Some(place) = self.places.get_mut(index) {
            *place = Some(buffer);
        }
        self.index_of.insert(name.clone(), index);
        index
    }

    /// Removes a name's.
    pub fn remove(&mut self, name: &Name) {
        if let Some(index) = self.index_of.remove(name) {
            self.places.get_mut(index).and_then(Option::take);
            self.free.push(index);
        }
    }
}

/// Buffers that are idle, in the order in which they became so.
#[derive(Debug)]
pub struct Idle {
    most: usize,
    most_bytes: u64,
    /// Number and bytes.
    since: BTreeMap<u64, (usize, u64)>,
    bytes: u64,
    next: u64,
}

impl Idle {
    /// None; so many are kept at most, of so many bytes in all.
    pub fn new(most: usize, most_bytes: u64) -> Idle {
        Idle { most, most_bytes, since: BTreeMap::new(), bytes: 0, next: 0 }
    }

    /// One has become idle: what names it here.
    pub fn insert(&mut self, index: usize, bytes: u64) -> u64 {
        self.next += 1;
        self.bytes += bytes;
        self.since.insert(self.next, (index, bytes));
        self.next
    }

    /// It is used.
    pub fn remove(&mut self, id: u64) {
        if let Some((_, bytes)) = self.since.remove(&id) {
            self.bytes -= bytes;
        }
    }

    /// The next one that is to be given up, if there are too many. It is none of them any more.
    pub fn pop_excess(&mut self) -> Option<usize> {
        if self.since.len() <= self.most && self.bytes <= self.most_bytes {
            return None;
        }
        let (_, (index, bytes)) = self.since.pop_first()?;
        self.bytes -= bytes;
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_used_again() {
        let mut buffers = Buffers::default();
        assert_eq!(["a", "b", "c"].map(|name| (buffers.next_index(), buffers.insert(&name.into(), name))), [(0, 0), (1, 1), (2, 2)]);
        buffers.remove(&"b".into());
        buffers.remove(&"x".into());
        let mut at = |index| buffers.get_mut(index).map(|name| *name);
        assert_eq!([at(0), at(1), at(2), at(3)], [Some("a"), None, Some("c"), None]);
        assert_eq!((buffers.index_of(&"b".into()), buffers.len()), (None, 2));
        assert_eq!((buffers.next_index(), buffers.insert(&"d".into(), "d"), buffers.next_index()), (1, 1, 3));
        assert_eq!((buffers.index_of(&"d".into()), buffers.len(), buffers.get_mut(1)), (Some(1), 3, Some(&mut "d")));
    }

    #[test]
    fn the_ones_idle_for_longest_are_given_up() {
        let mut idle = Idle::new(2, 100);
        let a = idle.insert(7, 10);
        idle.insert(8, 10);
        assert_eq!(idle.pop_excess(), None);
        idle.remove(a);
        idle.insert(7, 10);
        idle.insert(9, 10);
        assert_eq!((idle.pop_excess(), idle.pop_excess()), (Some(8), None), "7 was used since");
        let large = idle.insert(3, 95);
        assert_eq!((idle.pop_excess(), idle.pop_excess(), idle.pop_excess()), (Some(7), Some(9), None));
        idle.remove(large);
        idle.insert(4, 101);
        assert_eq!((idle.pop_excess(), idle.pop_excess(), idle.bytes), (Some(4), None, 0));
    }
}
