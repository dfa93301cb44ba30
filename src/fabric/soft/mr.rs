//! The soft fabric's memory regions: one table for the process, from a key to a range and what may be done to it.
//!
//! Regions come and go on any thread (`regMr` on NCCL's service thread) while the threads that drive queue pairs look keys up for
//! every request. A look-up takes no lock: it pins the entry, and deregistration waits until nobody has it pinned, so that after it
//! nothing of the library touches the caller's memory.

use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::base::error::{Error, Result};
use crate::base::fork::PerProcess;
use crate::base::mem::Shm;
use crate::base::rand;
use crate::fabric::soft::memory;
use crate::fabric::types::{Access, UserMemory, WcStatus};

/// A key is 32 random bits, so that a peer that was told of some regions reaches no other. The lower ones are its place in the table.
const PLACE_BITS: u32 = 20;
const PLACES: usize = 1 << PLACE_BITS;
/// Regions at most, over all devices of the process: of the places, half stay free, so that a random one mostly is.
pub const MAX_REGIONS: usize = PLACES / 2;

/// One region. `key` is 0 while the entry is free; the other fields change only then, with nobody pinning. Never deallocated, as any thread may
/// look at it.
#[repr(align(64))]
#[derive(Default)]
struct Entry {
    key: AtomicU32,
    access: AtomicU32,
    addr: AtomicU64,
    len: AtomicU64,
    /// Copies in progress.
    users: AtomicU32,
    /// Id of the library's own allocation that holds the range; 0 for none.
    allocation: AtomicU32,
    /// Where in that allocation the range begins.
    allocation_offset: AtomicU64,
}

struct Table {
    /// By the lower bits of the key; null where there is no region. Of its 8 MiB those pages exist that were written.
    places: [AtomicPtr<Entry>; PLACES],
    /// Entries that were given back. A forked child never reuses its parent's: a copy may have been in progress when it forked.
    free: PerProcess<Vec<&'static Entry>>,
    /// Regions, those of the processes included that this one was forked from.
    regions: AtomicUsize,
}

static TABLE: Table =
    Table { places: [const { AtomicPtr::new(std::ptr::null_mut()) }; PLACES], free: PerProcess::new(), regions: AtomicUsize::new(0) };

impl Table {
    fn place(&'static self, key: u32) -> &'static AtomicPtr<Entry> {
        &self.places[key as usize % PLACES]
    }

    #[inline]
    fn entry(&'static self, key: u32) -> Option<&'static Entry> {
        // Pairs with the Release in `admit`.
        // SAFETY: null, or an entry that lives as long as the process.
        unsafe { self.place(key).load(Ordering::Acquire).as_ref() }
    }

    /// Gives a free entry a key whose place is free, and the place.
    fn admit(&'static self, entry: &'static Entry) -> Result<u32> {
        loop {
            let key = rand::u64()? as u32;
            let entry = std::ptr::from_ref(entry).cast_mut();
            // Pairs with the Acquire in `entry`.
            if key != 0 && self.place(key).compare_exchange(std::ptr::null_mut(), entry, Ordering::Release, Ordering::Relaxed).is_ok() {
                return Ok(key);
            }
        }
    }
}

/// An entry in use; dropping it frees the key, once nobody has it pinned.
pub struct Region {
    entry: &'static Entry,
    key: u32,
    memory: UserMemory,
    /// Keeps the library's own memory mapped even if the user frees it too early.
    _allocation: Option<Arc<Shm>>,
}

/// Registers `memory`. Any thread.
///
/// Errors: an empty range, one that wraps, or [`MAX_REGIONS`] regions already; a kernel without randomness.
pub fn register(memory: UserMemory, access: Access) -> Result<Region> {
    if memory.is_empty() || memory.addr() == 0 {
        return Err(Error::usage(format!(
            "cannot register {} bytes at {:#x}: needs at least 1 byte at a non-null address",
            memory.len(),
            memory.addr()
        )));
    }
    if memory.addr().checked_add(memory.len()).is_none() {
        return Err(Error::usage(format!(
            "cannot register {} bytes at {:#x}: the range leaves the address space",
            memory.len(),
            memory.addr()
        )));
    }
    // A thread that registers at the same time may make it a few more.
    if TABLE.regions.load(Ordering::Relaxed) >= MAX_REGIONS {
        return Err(Error::usage(format!("{MAX_REGIONS} memory regions are registered already, the most there can be")));
    }
    let entry = TABLE.free.with(Vec::pop).unwrap_or_else(|| Box::leak(Box::default()));
    let key = TABLE.admit(entry).inspect_err(|_| TABLE.free.with(|free| free.push(entry)))?;
    TABLE.regions.fetch_add(1, Ordering::Relaxed);
    entry.addr.store(memory.addr() as u64, Ordering::Relaxed);
    entry.len.store(memory.len() as u64, Ordering::Relaxed);
    entry.access.store(access.bits(), Ordering::Relaxed);
    let allocation = memory::find(memory.addr(), memory.len());
    let (id, offset) = allocation.as_ref().map_or((0, 0), |a| (a.id, memory.addr() - a.addr));
    entry.allocation.store(id, Ordering::Relaxed);
    entry.allocation_offset.store(offset as u64, Ordering::Relaxed);
    // Pairs with the load in `pin`: who sees the key sees the range.
    entry.key.store(key, Ordering::Release);
    Ok(Region { entry, key, memory, _allocation: allocation.map(|a| a.shm) })
}

impl Region {
    /// Key, for local use and for the peer.
    pub fn key(&self) -> u32 {
        self.key
    }

    /// The range.
    pub fn memory(&self) -> UserMemory {
        self.memory
    }

    /// Refuses new pins from now on.
    pub fn refuse(&self) {
        // Store and load are SeqCst, as are the increment and the re-check in `pin`: of a pin and a deregistration at the same time, at
        // least one sees the other.
        self.entry.key.store(0, Ordering::SeqCst);
    }

    /// Returns once nobody has it pinned, after [`Region::refuse`].
    pub fn drain(&self) {
        let backoff = crossbeam_utils::Backoff::new();
        while self.entry.users.load(Ordering::SeqCst) != 0 {
            backoff.snooze();
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.refuse();
        self.drain();
        TABLE.place(self.key).store(std::ptr::null_mut(), Ordering::Relaxed);
        TABLE.regions.fetch_sub(1, Ordering::Relaxed);
        TABLE.free.with(|free| free.push(self.entry));
    }
}

/// A checked range that stays registered while this value lives. Hold it for one bounded copy only: deregistration waits.
pub struct Pin {
    entry: &'static Entry,
    addr: usize,
    len: usize,
}

impl Pin {
    /// First byte of the checked range; valid for `len` bytes while the pin lives.
    pub fn as_ptr(&self) -> *mut u8 {
        self.addr as *mut u8
    }

    /// Bytes of the checked range.
    #[allow(clippy::len_without_is_empty)] // A pin is never empty.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the range is of [`memory::SharedPages`].
    pub fn peers_write(&self) -> bool {
        self.entry.allocation.load(Ordering::Relaxed) & memory::PEERS_WRITE != 0
    }

    /// The library's own allocation that holds the range, and where in it the range begins.
    pub fn allocation(&self) -> Option<(u32, u64)> {
        let id = self.entry.allocation.load(Ordering::Relaxed);
        let start = self.entry.addr.load(Ordering::Relaxed);
        (id != 0).then(|| (id, self.entry.allocation_offset.load(Ordering::Relaxed) + (self.addr as u64 - start)))
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // Release: the copies made under the pin happen before the deregistration that sees it gone.
        self.entry.users.fetch_sub(1, Ordering::Release);
    }
}

/// Why a key was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// No such region.
    Key,
    /// Outside the region.
    Bounds,
    /// Not allowed in the region.
    Access,
}

impl Refused {
    /// How the requester's own queue pair reports it.
    pub fn local(self) -> WcStatus {
        WcStatus::LocProtErr
    }

    /// How the peer reports it.
    pub fn remote(self) -> WcStatus {
        WcStatus::RemAccessErr
    }
}

/// Checks `len` bytes at `addr` against the region of `key` and keeps it registered. `len` must not be 0: such requests touch no
/// memory and need no key.
#[inline]
pub fn pin(key: u32, addr: u64, len: usize, need: Access) -> std::result::Result<Pin, Refused> {
    let entry = TABLE.entry(key).ok_or(Refused::Key)?;
    entry.users.fetch_add(1, Ordering::SeqCst);
    let pin = Pin { entry, addr: addr as usize, len };
    // Pairs with the store in `register`; SeqCst for the sake of `Region::refuse`.
    if key == 0 || entry.key.load(Ordering::SeqCst) != key {
        return Err(Refused::Key);
    }
    let start = entry.addr.load(Ordering::Relaxed);
    let size = entry.len.load(Ordering::Relaxed);
    let offset = addr.checked_sub(start).ok_or(Refused::Bounds)?;
    if offset > size || len as u64 > size - offset {
        return Err(Refused::Bounds);
    }
    if entry.access.load(Ordering::Relaxed) & need.bits() != need.bits() {
        return Err(Refused::Access);
    }
    Ok(pin)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(bytes: &mut [u8], access: Access) -> Region {
        // SAFETY: the tests keep `bytes` alive and unaliased longer than the region.
        register(unsafe { UserMemory::new(bytes.as_mut_ptr(), bytes.len()) }, access).unwrap()
    }

    #[test]
    fn a_range_is_checked_at_both_ends() {
        let mut bytes = vec![0u8; 100];
        let mr = region(&mut bytes, Access::REMOTE_WRITE);
        let start = bytes.as_ptr() as u64;
        let at = |addr, len| pin(mr.key(), addr, len, Access::REMOTE_WRITE).map(|p| p.len());
        assert_eq!(at(start, 100), Ok(100));
        assert_eq!(at(start + 99, 1), Ok(1));
        assert_eq!(at(start + 99, 2), Err(Refused::Bounds));
        assert_eq!(at(start - 1, 2), Err(Refused::Bounds));
        assert_eq!(at(start + 101, 1), Err(Refused::Bounds));
        assert_eq!(at(u64::MAX, usize::MAX), Err(Refused::Bounds));
        assert_eq!(pin(mr.key(), start, 1, Access::REMOTE_READ).map(|p| p.len()), Err(Refused::Access));
    }

    #[test]
    fn a_key_dies_with_its_region() {
        let mut bytes = vec![0u8; 8];
        let mr = region(&mut bytes, Access::LOCAL_WRITE);
        let key = mr.key();
        drop(mr);
        let start = bytes.as_ptr() as u64;
        assert_eq!(pin(key, start, 8, Access::empty()).map(|p| p.len()), Err(Refused::Key));
        let again = region(&mut bytes, Access::LOCAL_WRITE);
        assert_ne!(again.key(), key);
        assert_eq!(pin(0, start, 8, Access::empty()).map(|p| p.len()), Err(Refused::Key));
    }

    #[test]
    fn who_knows_a_key_cannot_guess_at_another() {
        let mut bytes = [0u8; 64];
        let regions: Vec<_> = bytes.chunks_mut(1).map(|byte| region(byte, Access::all())).collect();
        let hits = |key: u32| regions.iter().filter(|mr| pin(key, mr.memory().addr() as u64, 1, Access::REMOTE_WRITE).is_ok()).count();
        let told = regions[0].key();
        assert_eq!(hits(told), 1);
        // Neighbours of the whole key, of its lower bits and of its upper bits: 2^10 guesses at 64 of 2^32 keys, so chance is out of the question.
        let near = (1..=256).flat_map(|n| [told.wrapping_add(n), told.wrapping_sub(n)]);
        let beside = (1..=256).flat_map(|n| [told ^ n, told ^ n << 20]);
        let found: Vec<_> = near.chain(beside).filter(|key| hits(*key) > 0).collect();
        assert!(found.is_empty(), "{} keys near {told:#x} are of other regions, as {:#x}", found.len(), found[0]);
        let mut keys: Vec<_> = regions.iter().map(Region::key).collect();
        keys.sort_unstable();
        let steps: std::collections::HashSet<_> = keys.windows(2).map(|pair| pair[1] - pair[0]).collect();
        assert!(steps.len() > 60, "the steps between keys are alike: {steps:?}");
    }

    #[test]
    fn deregistration_waits_for_copies_under_way() {
        let mut bytes = vec![0u8; 8];
        let mr = region(&mut bytes, Access::LOCAL_WRITE);
        let held = pin(mr.key(), bytes.as_ptr() as u64, 8, Access::LOCAL_WRITE).unwrap();
        let key = mr.key();
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            drop(mr);
            sender.send(()).unwrap();
        });
        while pin(key, bytes.as_ptr() as u64, 8, Access::LOCAL_WRITE).is_ok() {
            std::thread::yield_now();
        }
        assert!(receiver.try_recv().is_err(), "deregistration returned under a pin");
        drop(held);
        receiver.recv().unwrap();
        thread.join().unwrap();
    }

    #[test]
    fn impossible_ranges_are_refused() {
        // SAFETY: never registered, so never touched.
        let bad = |addr: usize, len| register(unsafe { UserMemory::new(addr as *mut u8, len) }, Access::empty());
        assert!(matches!(bad(0x1000, 0), Err(Error::Usage(_))));
        assert!(matches!(bad(0, 8), Err(Error::Usage(_))));
        assert!(matches!(bad(usize::MAX - 3, 8), Err(Error::Usage(_))));
    }
}
