//! The memory of a channel's tensor buffers, and what is kept of it for later ones. Under the lock of the manager.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::base::error::Result;
use crate::base::fd;
use crate::link::device::{Device, Registered};

/// How much is kept of what is not used, and its bytes: the next buffer is often of the same size.
const SPARE: (usize, usize) = (4, 64 << 20);
/// How much there is, and its bytes, that the peer may map, each with a descriptor. Once it has, it does so until the channel ends, so all of it is kept
/// for as long. A queue pair has room for twice as much.
const SHARED: (usize, usize) = (32, 64 << 20);
/// Descriptors that are left to the program, and to connections.
const DESCRIPTORS_LEFT: usize = 256;
/// Bytes of a buffer that the peer is to map: what is less gains little by it.
const SHARED_LEAST: usize = 64 << 10;

/// What buffers are made of.
pub struct BufferMemory {
    device: Arc<Device>,
    /// What is not used, the oldest first.
    spare: VecDeque<Arc<Registered>>,
    /// The same of what the peer may map.
    shared: Vec<Arc<Registered>>,
    /// How much of that there is, used or not, and its bytes.
    made: (usize, usize),
}

impl BufferMemory {
    /// None yet.
    pub fn new(device: Arc<Device>) -> BufferMemory {
        BufferMemory { device, spare: VecDeque::new(), shared: Vec::new(), made: (0, 0) }
    }

    /// At least so many bytes; `shared`: better ones that the peer maps, if there may be such.
    ///
    /// Errors: there is no memory.
    pub fn take(&mut self, bytes: usize, shared: bool) -> Result<Arc<Registered>> {
        if let Some(memory) = (shared && bytes >= SHARED_LEAST).then(|| self.take_shared(bytes)).flatten() {
            return Ok(memory);
        }
        let spare = self.spare.iter().position(|memory| memory.len() == bytes).and_then(|spare| self.spare.remove(spare));
        spare.map_or_else(|| self.device.scratch(bytes).map(Arc::new), Ok)
    }

    fn take_shared(&mut self, bytes: usize) -> Option<Arc<Registered>> {
        let fits = self.shared.iter().enumerate().filter(|(_, memory)| memory.len() >= bytes);
        let least = fits.min_by_key(|(_, memory)| memory.len()).map(|(index, _)| index);
        if let Some(index) = least {
            return Some(self.shared.swap_remove(index));
        }
        let ((made, made_bytes), (most, most_bytes)) = (self.made, SHARED);
        // Few sizes, so that one that grows and grows does not use up all. Pages that are not touched cost nothing.
        let bytes = bytes.checked_next_power_of_two().unwrap_or(bytes);
        if made == most || bytes > most_bytes - made_bytes || fd::left().is_some_and(|left| left <= DESCRIPTORS_LEFT) {
            return None;
        }
        let memory = self.device.shared_scratch(bytes).ok()?;
        self.made = (made + 1, made_bytes + bytes);
        Some(Arc::new(memory))
    }

    /// A buffer's is not used any more.
    pub fn give(&mut self, memory: Arc<Registered>) {
        if memory.is_shared() {
            return self.shared.push(memory);
        }
        self.spare.push_back(memory);
        let (most, most_bytes) = SPARE;
        while self.spare.len() > most || self.spare.iter().map(|memory| memory.len()).sum::<usize>() > most_bytes {
            self.spare.pop_front();
        }
    }
}

#[cfg(test)]
impl BufferMemory {
    /// How much there is that the peer may map.
    pub fn made(&self) -> usize {
        self.made.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::config::{Config, SoftWire};

    #[test]
    fn what_the_peer_may_map_is_bounded_and_used_again() {
        let device = Device::open(Config { socket_ifname: "=lo".into(), soft_wire: SoftWire::Shm, ..Config::default() }, "").unwrap();
        let mut memory = BufferMemory::new(device);
        let mut take = |bytes, shared| memory.take(bytes, shared).unwrap();
        let large = take(20 << 20, true);
        let is_shared = [(1 << 20, false), (SHARED_LEAST - 1, true), (33 << 20, true), (17 << 20, true), (SHARED_LEAST, true)]
            .map(|(bytes, shared)| take(bytes, shared).is_shared());
        assert_eq!((large.is_shared(), is_shared), (true, [false, false, false, true, false]));
        memory.give(large.clone());
        let again = memory.take(1 << 20, true).unwrap();
        assert!(Arc::ptr_eq(&again, &large), "one that is large enough");
        let mut memory = BufferMemory::new(memory.device);
        let all: Vec<_> = (0..33).map(|_| memory.take(SHARED_LEAST, true).unwrap()).collect();
        assert_eq!(all.iter().filter(|memory| memory.is_shared()).count(), 32);
        all.iter().for_each(|one| memory.give(one.clone()));
        assert_eq!((memory.shared.len(), memory.spare.len()), (32, 1));
    }
}
