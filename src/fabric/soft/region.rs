//! A registered region. Made and dropped on any thread; dropping it also ends what peers on this host do with the memory by themselves.

use super::{mr, shm};
use crate::base::error::Result;
use crate::fabric::types::{Access, UserMemory};

/// A registered region; dropping it deregisters. Then neither the library nor a peer touches the memory under its key any more.
pub struct MemoryRegion(mr::Region);

impl MemoryRegion {
    /// As [`mr::register`].
    pub fn register(memory: UserMemory, access: Access) -> Result<MemoryRegion> {
        mr::register(memory, access).map(MemoryRegion)
    }

    /// Key for local use.
    pub fn lkey(&self) -> u32 {
        self.0.key()
    }

    /// Key for the peer.
    pub fn rkey(&self) -> u32 {
        self.0.key()
    }

    /// The range.
    pub fn memory(&self) -> UserMemory {
        self.0.memory()
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        self.0.refuse();
        shm::end_peer_reads(self.0.key());
        self.0.drain();
        // A grant is opened under a pin: there are no new ones.
        shm::end_peer_writes(self.0.key());
    }
}
