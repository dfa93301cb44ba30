//! Registered memory, process-wide per device. `register` and `deregister` come on any thread (NCCL: the proxy service thread, also
//! while the progress thread drives the same comm) and take a lock; a look-up by the posting thread takes none.
//!
//! Each registration has a region of its own, so that its keys die with it. Where the fabric says that registering is expensive, registrations
//! of the same range, byte for byte, share one; it is given back with the last of them. Registrations of parts of a range do not: the region
//! would go on to cover bytes that nobody has registered any more. Ranges are taken as the caller gives them, not rounded to pages: the rest
//! of a page is nobody's to offer to a peer.
//!
//! Of a shared region the keys stay valid when one of its registrations is given back, so a peer that was told of them can go on writing what
//! the others have registered. Nobody can stop it without stopping the others, but a receive that is outstanding under the handle never
//! completes: [`MrTable::shared_deregs`] tells the comms to look, and they fail.
//!
//! A handle is an index and a generation, never a pointer, so an unknown or stale one is noticed.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::base::error::{Error, Result};
use crate::base::slab::Slab;
use crate::base::sync::lock;
use crate::fabric::{MemoryRegion, UserMemory};

use super::limits::MAX_RAILS;

/// Names a registration: generation << 32 | index. Never 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MrHandle(pub u64);

/// What kind of memory a range is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// The host's.
    Host,
    /// A device's, which a NIC reaches but a CPU's load does not order after: needs flushes.
    Device,
}

/// One registration. The thread that posts reads all but `regions`; nothing changes while a handle of it is valid.
#[derive(Default)]
pub struct Registration {
    dev: AtomicUsize,
    addr: AtomicUsize,
    len: AtomicUsize,
    device_memory: AtomicU32,
    lkeys: [AtomicU32; MAX_RAILS],
    /// Two to a word, as a slot of the CTS FIFO has them.
    rkeys: [AtomicU64; MAX_RAILS / 2],
    /// What is behind it, rail by rail.
    regions: Mutex<Vec<RegionRef>>,
}

impl Registration {
    /// Key for local use on a rail.
    #[inline]
    pub fn lkey(&self, rail: usize) -> u32 {
        self.lkeys.get(rail).map_or(0, |key| key.load(Ordering::Relaxed))
    }

    /// Keys for the peer, rail by rail.
    #[inline]
    pub fn rkeys(&self) -> [u32; MAX_RAILS] {
        let words = self.rkeys.each_ref().map(|pair| pair.load(Ordering::Relaxed));
        std::array::from_fn(|rail| words.get(rail / 2).map_or(0, |pair| (pair >> (rail % 2 * 32)) as u32))
    }

    /// What kind of memory it is.
    pub fn kind(&self) -> MemoryKind {
        if self.device_memory.load(Ordering::Relaxed) == 0 { MemoryKind::Host } else { MemoryKind::Device }
    }
}

/// Registrations for which memory is allocated at a time.
const CHUNK: usize = 1024;
/// The most registrations at once.
const MAX_REGISTRATIONS: usize = 1 << 22;

/// All registrations of a process.
pub struct MrTable {
    registrations: Slab<Registration, CHUNK, { MAX_REGISTRATIONS / CHUNK }>,
    /// The shared regions of each physical device that shares any.
    caches: Vec<Option<Mutex<Cache<MemoryRegion>>>>,
    /// Deregistrations that left a region to others.
    shared_deregs: AtomicU64,
}

/// What is behind a registration on one physical device.
enum RegionRef {
    /// A region of its own.
    Own { _region: MemoryRegion },
    /// A counted one of that device.
    Shared(usize, Range),
}

/// First byte, and bytes.
type Range = (usize, usize);

impl MrTable {
    /// An empty table. For each physical device, whether registrations of the same range share a region.
    pub fn new(shares: impl IntoIterator<Item = bool>) -> Self {
        MrTable {
            registrations: Slab::default(),
            caches: shares.into_iter().map(|shares| shares.then(Mutex::default)).collect(),
            shared_deregs: AtomicU64::new(0),
        }
    }

    /// Registers `memory` on every rail of `dev`, or finds it registered where regions are shared. `make` registers on one physical device.
    pub fn register(
        &self,
        dev: usize,
        rails: &[usize],
        memory: UserMemory,
        kind: MemoryKind,
        make: impl Fn(usize) -> Result<MemoryRegion>,
    ) -> Result<MrHandle> {
        let mut keys = Vec::with_capacity(rails.len());
        let mut regions = Vec::with_capacity(rails.len());
        for &rail in rails {
            match self.register_on(rail, memory, &make) {
                Ok((behind, rail_keys)) => {
                    keys.push(rail_keys);
                    regions.push(behind);
                }
                Err(error) => {
                    self.release(regions);
                    return Err(error);
                }
            }
        }
        let mut regions = Some(regions);
        let inserted = self.registrations.insert(|entry| {
            entry.dev.store(dev, Ordering::Relaxed);
            entry.addr.store(memory.addr(), Ordering::Relaxed);
            entry.len.store(memory.len(), Ordering::Relaxed);
            entry.device_memory.store(u32::from(kind == MemoryKind::Device), Ordering::Relaxed);
            for (place, (lkey, _)) in entry.lkeys.iter().zip(&keys) {
                place.store(*lkey, Ordering::Relaxed);
            }
            for (place, pair) in entry.rkeys.iter().zip(keys.chunks(2)) {
                let word = pair.iter().rev().fold(0, |word, (_, rkey)| word << 32 | u64::from(*rkey));
                place.store(word, Ordering::Relaxed);
            }
            *lock(&entry.regions) = regions.take().unwrap_or_default();
        });
        let Some((index, generation)) = inserted else {
            self.release(regions.unwrap_or_default());
            return Err(Error::usage(format!("register: {MAX_REGISTRATIONS} registrations exist, which is the limit")));
        };
        Ok(MrHandle(u64::from(generation) << 32 | u64::from(index)))
    }

    /// What is behind a registration on one device, and the keys.
    fn register_on(
        &self,
        rail: usize,
        memory: UserMemory,
        make: impl Fn(usize) -> Result<MemoryRegion>,
    ) -> Result<(RegionRef, (u32, u32))> {
        let keys = |region: &MemoryRegion| (region.lkey(), region.rkey());
        let cache = self.caches.get(rail).ok_or_else(|| Error::internal(format!("register: no device {rail}")))?;
        match cache {
            None => {
                let region = make(rail)?;
                let keys = keys(&region);
                Ok((RegionRef::Own { _region: region }, keys))
            }
            Some(cache) => {
                let range = (memory.addr(), memory.len());
                let keys = lock(cache).acquire(range, || make(rail), keys)?;
                Ok((RegionRef::Shared(rail, range), keys))
            }
        }
    }

    /// Gives a registration back. Once it returns nothing is written or read under its keys any more, unless it shared a region with another
    /// registration of the same range that is still there: then a peer may write until the comms that it concerns have noticed
    /// ([`MrTable::shared_deregs`]).
    ///
    /// Errors: a handle that is not, or no longer, known, or belongs to another device.
    pub fn deregister(&self, dev: usize, mr: MrHandle) -> Result<()> {
        let entry = self.find(mr).ok_or_else(|| unknown("deregMr", mr))?;
        if entry.dev.load(Ordering::Relaxed) != dev {
            return Err(foreign("deregMr", mr, entry, dev));
        }
        let regions = self.registrations.remove(mr.0 as u32, (mr.0 >> 32) as u32, |entry| std::mem::take(&mut *lock(&entry.regions)));
        let regions = regions.ok_or_else(|| unknown("deregMr", mr))?;
        if self.release(regions) {
            // Pairs with the Acquire in `shared_deregs`: who sees this sees that the handle is stale.
            self.shared_deregs.fetch_add(1, Ordering::Release);
        }
        Ok(())
    }

    /// Whether a region stays, for other registrations of the same range.
    fn release(&self, regions: Vec<RegionRef>) -> bool {
        let mut stays = false;
        for behind in regions {
            // Regions are dropped outside of all locks: that may wait for a copy under way.
            if let RegionRef::Shared(rail, range) = behind {
                let last = self.caches.get(rail).and_then(Option::as_ref).and_then(|cache| lock(cache).release(range));
                stays |= last.is_none();
            }
        }
        stays
    }

    /// Changes when a registration was given back whose region others keep. Whoever has work outstanding under handles then asks
    /// [`MrTable::is_registered`] of each.
    #[inline(always)]
    pub fn shared_deregs(&self) -> u64 {
        // Pairs with the Release in `deregister`.
        self.shared_deregs.load(Ordering::Acquire)
    }

    /// Whether a handle names a registration.
    ///
    /// Errors: it does not, or no longer.
    pub fn is_registered(&self, what: &str, mr: MrHandle) -> Result<()> {
        self.find(mr).map(|_| ()).ok_or_else(|| unknown(what, mr))
    }

    #[inline]
    fn find(&self, mr: MrHandle) -> Option<&Registration> {
        self.registrations.find(mr.0 as u32, (mr.0 >> 32) as u32)
    }

    /// The registration that `mr` names, for `len` bytes at `addr` on device `dev`. No lock, no wait.
    ///
    /// Errors: an unknown handle, one of another device, a range that is not inside.
    #[inline(always)]
    pub fn lookup(&self, what: &str, dev: usize, mr: MrHandle, addr: usize, len: usize) -> Result<&Registration> {
        let Some(entry) = self.find(mr) else { return Err(unknown(what, mr)) };
        if entry.dev.load(Ordering::Relaxed) != dev {
            return Err(foreign(what, mr, entry, dev));
        }
        let (start, size) = (entry.addr.load(Ordering::Relaxed), entry.len.load(Ordering::Relaxed));
        match addr.checked_sub(start) {
            Some(offset) if offset <= size && len <= size - offset => Ok(entry),
            _ => Err(outside(what, addr, len, start, size)),
        }
    }

    /// Registrations and regions alive, for tests.
    #[cfg(test)]
    pub fn counts(&self) -> (usize, usize) {
        let all = (0..).map_while(|index| self.registrations.entry(index));
        let live: Vec<_> = all.filter(|(generation, _)| generation % 2 == 1).collect();
        let own = |entry: &Registration| lock(&entry.regions).iter().filter(|behind| matches!(behind, RegionRef::Own { .. })).count();
        let shared: usize = self.caches.iter().flatten().map(|cache| lock(cache).regions.len()).sum();
        (live.len(), live.iter().map(|(_, entry)| own(entry)).sum::<usize>() + shared)
    }
}

#[cold]
fn unknown(what: &str, mr: MrHandle) -> Error {
    Error::internal(format!("{what}: memory handle {:#x} is not registered; deregistered before, or never returned by regMr", mr.0))
}

#[cold]
fn foreign(what: &str, mr: MrHandle, entry: &Registration, dev: usize) -> Error {
    let owner = entry.dev.load(Ordering::Relaxed);
    Error::internal(format!("{what}: memory handle {:#x} belongs to device {owner}, this comm is on device {dev}", mr.0))
}

#[cold]
fn outside(what: &str, addr: usize, len: usize, start: usize, size: usize) -> Error {
    Error::internal(format!("{what}: {len} bytes at {addr:#x} are not inside the registered {size} bytes at {start:#x}"))
}

/// The shared regions of one physical device, counted. Generic so that its rules can be tested without a fabric.
struct Cache<R> {
    regions: HashMap<Range, Counted<R>>,
}

struct Counted<R> {
    region: R,
    count: usize,
}

impl<R> Default for Cache<R> {
    fn default() -> Self {
        Cache { regions: HashMap::new() }
    }
}

impl<R> Cache<R> {
    /// Counts one more user of the region of a range, made if there is none.
    fn acquire<K>(&mut self, range: Range, make: impl FnOnce() -> Result<R>, keys: impl FnOnce(&R) -> K) -> Result<K> {
        let found = match self.regions.entry(range) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(place) => place.insert(Counted { region: make()?, count: 0 }),
        };
        found.count += 1;
        Ok(keys(&found.region))
    }

    /// Counts one user less; the region, if that was the last.
    fn release(&mut self, range: Range) -> Option<R> {
        let Entry::Occupied(mut found) = self.regions.entry(range) else { return None };
        found.get_mut().count -= 1;
        (found.get().count == 0).then(|| found.remove().region)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Debug, Clone)]
    enum Op {
        Acquire(usize, usize),
        Release(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![3 => (0..5usize, 1..4usize).prop_map(|(s, l)| Op::Acquire(s, l)), 2 => (0..60usize).prop_map(Op::Release)]
    }

    proptest! {
        /// The model is a list of the ranges in use, one for each user.
        #[test]
        fn a_region_is_shared_by_its_own_range_alone_until_the_last(ops in proptest::collection::vec(op(), 0..120)) {
            let mut cache = Cache::default();
            let mut held: Vec<Range> = Vec::new();
            for op in ops {
                match op {
                    Op::Acquire(start, len) => {
                        let mut made = false;
                        let got = cache.acquire((start, len), || { made = true; Ok((start, len)) }, |r| *r).unwrap();
                        prop_assert_eq!((got, made), ((start, len), !held.contains(&got)));
                        held.push(got);
                    }
                    Op::Release(i) if i < held.len() => {
                        let range = held.swap_remove(i);
                        prop_assert_eq!(cache.release(range), (!held.contains(&range)).then_some(range));
                    }
                    Op::Release(_) => {}
                }
                let different: std::collections::HashSet<_> = held.iter().collect();
                prop_assert_eq!(cache.regions.len(), different.len());
            }
        }
    }

    #[test]
    fn a_failed_registration_leaves_nothing() {
        let mut cache: Cache<u8> = Cache::default();
        assert!(cache.acquire((0, 5), || Err(Error::usage("no")), |_| ()).is_err());
        assert!(cache.regions.is_empty());
        assert_eq!(cache.release((0, 5)), None);
    }
}
