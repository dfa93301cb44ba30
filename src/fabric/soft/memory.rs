//! Memory that the library allocates for its user, or for itself: ordinary to use, but a peer on the same host maps it instead of copying out of it.
//! Called from the C boundary on any thread; looked up when memory is registered.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use crate::base::error::{Error, Result};
use crate::base::fork::PerProcess;
use crate::base::mem::{Pages, Shm};

/// One allocation.
#[derive(Clone)]
pub struct Allocation {
    /// Names it within this process, from 1; never used twice. With [`PEERS_WRITE`] if peers may write to it.
    pub id: u32,
    /// Where it is mapped.
    pub addr: usize,
    /// What keeps it mapped.
    pub shm: Arc<Shm>,
}

/// Of the ids of [`SharedPages`].
pub const PEERS_WRITE: u32 = 1 << 31;

/// How many of them there are: as a rule none, and then nobody has to look for any.
static SHARED_PAGES: AtomicUsize = AtomicUsize::new(0);

/// A forked child starts without any: the mappings do not come along.
static LIVE: PerProcess<Vec<Allocation>> = PerProcess::new();
static NEXT: AtomicU32 = AtomicU32::new(1);

/// Allocates `len` zeroed, page-aligned bytes. The caller frees them with [`free`].
///
/// Errors: 0 bytes; no memory or descriptor left.
pub fn alloc(len: usize) -> Result<*mut u8> {
    if len == 0 {
        return Err(Error::usage("cannot allocate 0 bytes"));
    }
    Ok(add(Arc::new(Shm::create("railhead-memory", len)?), 0)? as *mut u8)
}

/// Adds one, with these flags in its id; where it is mapped.
fn add(shm: Arc<Shm>, flags: u32) -> Result<usize> {
    let id = NEXT
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < PEERS_WRITE - 1).then_some(n + 1))
        .map_err(|_| Error::usage("2^31 allocations were made, the most there can be"))?;
    let addr = shm.addr();
    LIVE.with(|live| live.push(Allocation { id: id | flags, addr, shm }));
    Ok(addr)
}

/// Zeroed pages of our own, for what peers send and for what is sent to them. Those on this host may map them as soon as they know a key of a region over them, and then write to them
/// by themselves, until their queue pair is destroyed, whatever is registered then, and before a receive request is there. Never memory of a user's, who may
/// have other plans for it by then. On one device it has one key, or WRITEs with several may pass each other.
pub struct SharedPages {
    pages: Pages,
}

impl SharedPages {
    /// At least `len` bytes, rounded up to whole pages.
    ///
    /// Errors: no descriptor left.
    pub fn new(len: usize) -> Result<SharedPages> {
        let shm = Arc::new(Shm::create_lazy("railhead-scratch", len)?);
        add(shm.clone(), PEERS_WRITE)?;
        SHARED_PAGES.fetch_add(1, Ordering::Relaxed);
        Ok(SharedPages { pages: Pages::shared(shm) })
    }

    /// To be registered.
    pub fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Whether there are any in this process.
    pub(super) fn exist() -> bool {
        SHARED_PAGES.load(Ordering::Relaxed) > 0
    }
}

impl Drop for SharedPages {
    fn drop(&mut self) {
        SHARED_PAGES.fetch_sub(1, Ordering::Relaxed);
        // In a forked child it is not there.
        let _ = free(self.pages.addr() as *mut u8);
    }
}

/// Frees what [`alloc`] returned. A region registered over it keeps the memory mapped until it is deregistered.
///
/// Errors: an address that is no allocation's first byte.
pub fn free(addr: *mut u8) -> Result<()> {
    let freed = LIVE.with(|live| live.iter().position(|a| a.addr == addr as usize).map(|at| live.swap_remove(at)));
    freed.map(drop).ok_or_else(|| Error::usage(format!("{addr:p} was not allocated by railhead_alloc, or was freed already")))
}

/// The allocation that holds the whole range.
pub fn find(addr: usize, len: usize) -> Option<Allocation> {
    let holds = |a: &&Allocation| addr >= a.addr && addr - a.addr <= a.shm.len() && len <= a.shm.len() - (addr - a.addr);
    LIVE.with(|live| live.iter().find(holds).cloned())
}

/// The allocation of that id, to pass it to a peer.
pub fn by_id(id: u32) -> Option<Allocation> {
    LIVE.with(|live| live.iter().find(|a| a.id == id).cloned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_found_by_any_range_inside() {
        let p = alloc(10_000).unwrap();
        let a = find(p as usize + 100, 9_900).unwrap();
        assert_eq!(a.addr, p as usize);
        assert!(find(p as usize - 1, 10).is_none());
        assert!(find(p as usize + 9_999, 8_000_000).is_none());
        assert!(by_id(a.id).is_some());
        free(p).unwrap();
        assert!(free(p).is_err());
        assert!(find(p as usize, 1).is_none());
        assert!(matches!(alloc(0), Err(Error::Usage(_))));
    }
}
