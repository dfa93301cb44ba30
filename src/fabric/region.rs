//! Registered memory of any provider, and views of its bytes. Any thread; the peer may write to what is viewed at any time.

use std::io;
use std::marker::PhantomData;

use crate::base::error::{Error, Result};
use crate::base::mem::{self, Pages};

use super::types::UserMemory;
use super::{soft, verbs};

/// Registered memory. Dropping it deregisters: it returns once nothing is being copied into or out of the range, and nothing will be.
pub enum MemoryRegion {
    /// The embedded software fabric.
    Soft(soft::MemoryRegion),
    /// A NIC.
    Verbs(verbs::MemoryRegion),
}

impl MemoryRegion {
    /// Its bytes.
    pub fn view(&self) -> RegionView<'_> {
        RegionView { memory: self.memory(), region: PhantomData }
    }

    /// Key for local use.
    pub fn lkey(&self) -> u32 {
        match self {
            MemoryRegion::Soft(region) => region.lkey(),
            MemoryRegion::Verbs(region) => region.lkey(),
        }
    }

    /// Key for the peer.
    pub fn rkey(&self) -> u32 {
        match self {
            MemoryRegion::Soft(region) => region.rkey(),
            MemoryRegion::Verbs(region) => region.rkey(),
        }
    }

    /// The range.
    pub fn memory(&self) -> UserMemory {
        match self {
            MemoryRegion::Soft(region) => region.memory(),
            MemoryRegion::Verbs(region) => region.memory(),
        }
    }
}

/// A region over pages of our own, which it keeps mapped.
pub struct PagesRegion {
    region: MemoryRegion,
    _pages: Pages,
}

// Not its range as such: that must not be registered by others, who would not keep the pages.
impl PagesRegion {
    /// Of these pages, which the region was registered over.
    pub(super) fn new(region: MemoryRegion, pages: Pages) -> PagesRegion {
        PagesRegion { region, _pages: pages }
    }

    /// Key for local use.
    pub fn lkey(&self) -> u32 {
        self.region.lkey()
    }

    /// Key for the peer.
    pub fn rkey(&self) -> u32 {
        self.region.rkey()
    }

    /// Its bytes.
    pub fn view(&self) -> RegionView<'_> {
        self.region.view()
    }
}

/// Memory that is not registered, as no peer and no device gets at it, and that is held as if it were.
pub struct HeldMemory(UserMemory);

impl HeldMemory {
    /// Holds memory until this is dropped.
    pub fn new(memory: UserMemory) -> HeldMemory {
        HeldMemory(memory)
    }

    /// Its bytes.
    pub fn view(&self) -> RegionView<'_> {
        RegionView { memory: self.0, region: PhantomData }
    }
}

/// The bytes of a region, or part of them, while it is registered or held. Its peers may change them at any time.
#[derive(Clone, Copy)]
pub struct RegionView<'a> {
    memory: UserMemory,
    region: PhantomData<&'a MemoryRegion>,
}

impl RegionView<'_> {
    /// First byte.
    pub fn addr(&self) -> usize {
        self.memory.addr()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// `len` bytes from `offset` on, if they are inside.
    pub fn part(&self, offset: usize, len: usize) -> Option<Self> {
        Some(RegionView { memory: self.memory.part(offset, len)?, ..*self })
    }

    /// Copies its first bytes, as many as both have.
    pub fn read(&self, out: &mut [u8]) {
        // SAFETY: inside of the region, whose memory is valid while it exists, which the lifetime says; `copy` allows for peers that write meanwhile.
        unsafe { mem::copy(self.memory.addr() as *const u8, out.as_mut_ptr(), out.len().min(self.len())) };
    }

    /// A copy of its bytes, whose memory is not cleared first.
    ///
    /// Errors: no memory.
    pub fn to_vec(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let reserved = bytes.try_reserve_exact(self.len());
        reserved.map_err(|_| Error::system(format!("memory for {} bytes", self.len()), io::Error::from(io::ErrorKind::OutOfMemory)))?;
        // SAFETY: as above, into room for as many, all of which are written.
        unsafe {
            mem::copy(self.memory.addr() as *const u8, bytes.as_mut_ptr(), self.len());
            bytes.set_len(self.len());
        }
        Ok(bytes)
    }

    /// Replaces its first bytes, as many as both have.
    pub fn write(&self, from: &[u8]) {
        // SAFETY: as above.
        unsafe { mem::copy(from.as_ptr(), self.memory.addr() as *mut u8, from.len().min(self.len())) };
    }

    /// Its line number `i`, if it is inside as a whole.
    #[inline(always)]
    pub fn line(&self, i: usize, vectors: impl mem::Vectors) -> Option<mem::Line> {
        // SAFETY: as above.
        (i < self.len() / mem::LINE).then(|| unsafe { vectors.load((self.memory.addr() + i * mem::LINE) as *const u8) })
    }

    /// Replaces it.
    #[inline(always)]
    pub fn set_line(&self, i: usize, line: mem::Line, vectors: impl mem::Vectors) {
        if i < self.len() / mem::LINE {
            // SAFETY: as above.
            unsafe { vectors.store((self.memory.addr() + i * mem::LINE) as *mut u8, line) };
        }
    }

    /// Copies another's first bytes here, as many as both have. They may overlap.
    pub fn copy_from(&self, from: &RegionView<'_>) {
        // SAFETY: as above, for both.
        unsafe { mem::copy(from.memory.addr() as *const u8, self.memory.addr() as *mut u8, from.len().min(self.len())) };
    }
}
