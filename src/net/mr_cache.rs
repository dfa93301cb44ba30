//! Registered memory, process-wide per device. `register` and `deregister` come on any thread (NCCL: the proxy service thread, also
//! while the progress thread drives the same comm) and take a lock; a look-up by the posting thread takes none.
//!
//! Registering a range inside one that is registered already is a hit and only counts; nothing is kept at count 0. Ranges are taken as
//! the caller gives them, not rounded to pages: the rest of a page is nobody's to offer to a peer.
//!
//! A handle is an index and a generation, never a pointer, so an unknown or stale one is noticed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::base::error::{Error, Result};
use crate::base::mem::UserRange;
use crate::fabric::{MemoryRegion, UserMemory};

use super::wire::MAX_RAILS;

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

/// A look-up's result: one registration as the posting thread sees it. Its fields change only while nobody has its handle.
#[derive(Default)]
pub struct Registration {
    /// Generation of the handle; even while free.
    generation: AtomicU32,
    dev: AtomicUsize,
    range: UserRange,
    /// Calls that copy into the memory.
    filling: AtomicU32,
    device_memory: AtomicU32,
    lkeys: [AtomicU32; MAX_RAILS],
    /// Two to a word, as they are announced.
    rkeys: [AtomicU64; MAX_RAILS / 2],
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

const FIRST_SEGMENT: usize = 1024;
/// Segment `i` holds `FIRST_SEGMENT << i` registrations, so 16 of them some 67 million: entries never move, which is what makes the
/// look-up lock-free.
const SEGMENTS: usize = 16;

/// All registrations of a [`super::Net`].
pub struct MrTable {
    segments: [OnceLock<Box<[Registration]>>; SEGMENTS],
    owners: Mutex<Owners>,
    caches: Vec<Mutex<Cache<MemoryRegion>>>,
}

#[derive(Default)]
struct Owners {
    /// By index: the regions behind each registration, as (physical device, region).
    regions: Vec<Vec<(usize, u64)>>,
    free: Vec<u32>,
}

impl MrTable {
    /// An empty table for so many physical devices.
    pub fn new(physical: usize) -> Self {
        MrTable {
            segments: [const { OnceLock::new() }; SEGMENTS],
            owners: Mutex::new(Owners::default()),
            caches: (0..physical).map(|_| Mutex::new(Cache::new())).collect(),
        }
    }

    fn entry(&self, index: usize) -> Option<&Registration> {
        let (segment, offset) = locate(index)?;
        self.segments.get(segment)?.get()?.get(offset)
    }

    /// Registers `memory` on every rail of `dev`, or finds it registered. `make` registers on one physical device.
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
            let cache = self.caches.get(rail).ok_or_else(|| Error::internal(format!("register: no device {rail}")))?;
            let got = lock(cache).acquire(memory.addr(), memory.len(), || make(rail), |region| (region.lkey(), region.rkey()));
            match got {
                Ok((id, rail_keys)) => {
                    keys.push(rail_keys);
                    regions.push((rail, id));
                }
                Err(error) => {
                    self.release(&regions);
                    return Err(error);
                }
            }
        }
        let mut owners = lock(&self.owners);
        let index = match owners.free.pop() {
            Some(index) => index as usize,
            None => owners.regions.len(),
        };
        let entry = locate(index).and_then(|(segment, offset)| {
            let made = || (0..FIRST_SEGMENT << segment).map(|_| Registration::default()).collect();
            self.segments.get(segment)?.get_or_init(made).get(offset)
        });
        let Some(entry) = entry else {
            drop(owners);
            self.release(&regions);
            return Err(Error::usage("register: too much memory is registered at once"));
        };
        entry.dev.store(dev, Ordering::Relaxed);
        entry.range.set(memory);
        entry.device_memory.store(u32::from(kind == MemoryKind::Device), Ordering::Relaxed);
        for (place, (lkey, _)) in entry.lkeys.iter().zip(&keys) {
            place.store(*lkey, Ordering::Relaxed);
        }
        for (place, pair) in entry.rkeys.iter().zip(keys.chunks(2)) {
            let word = pair.iter().rev().fold(0, |word, (_, rkey)| word << 32 | u64::from(*rkey));
            place.store(word, Ordering::Relaxed);
        }
        match owners.regions.get_mut(index) {
            Some(place) => *place = regions,
            None => owners.regions.push(regions),
        }
        let generation = entry.generation.load(Ordering::Relaxed).wrapping_add(1);
        // Pairs with the load in `find`: who finds the registration sees its fields.
        entry.generation.store(generation, Ordering::Release);
        Ok(MrHandle(u64::from(generation) << 32 | index as u64))
    }

    /// Gives a registration back. Once it returns and no other registration covers the memory, nothing touches the memory any more.
    ///
    /// Errors: a handle that is not, or no longer, known, or belongs to another device.
    pub fn deregister(&self, dev: usize, mr: MrHandle) -> Result<()> {
        let mut owners = lock(&self.owners);
        let entry = self.find(mr).ok_or_else(|| unknown("deregMr", mr))?;
        if entry.dev.load(Ordering::Relaxed) != dev {
            return Err(foreign("deregMr", mr, entry, dev));
        }
        entry.generation.fetch_add(1, Ordering::SeqCst);
        // Whoever does not see the new generation in `fill` is seen here, and copies 64 bytes at most.
        while entry.filling.load(Ordering::SeqCst) > 0 {
            std::thread::yield_now();
        }
        entry.range.clear();
        let index = mr.0 as u32;
        let regions = owners.regions.get_mut(index as usize).map(std::mem::take).unwrap_or_default();
        owners.free.push(index);
        drop(owners);
        self.release(&regions);
        Ok(())
    }

    fn release(&self, regions: &[(usize, u64)]) {
        for &(rail, id) in regions {
            // The region is dropped outside of the lock: that may wait for a copy under way.
            let last = self.caches.get(rail).and_then(|cache| lock(cache).release(id));
            drop(last);
        }
    }

    #[inline]
    fn find(&self, mr: MrHandle) -> Option<&Registration> {
        let generation = (mr.0 >> 32) as u32;
        let entry = self.entry((mr.0 & u64::from(u32::MAX)) as usize)?;
        // Pairs with the store in `register`. Odd: live.
        (generation & 1 == 1 && entry.generation.load(Ordering::Acquire) == generation).then_some(entry)
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
        if entry.range.covers(addr, len) { Ok(entry) } else { Err(outside(what, addr, len, &entry.range)) }
    }

    /// Copies `bytes` to `addr`, in host memory that `mr` names. Any thread; a deregistration waits for it, or prevents it.
    ///
    /// Errors: as for [`MrTable::lookup`].
    #[inline]
    pub fn fill(&self, what: &str, dev: usize, mr: MrHandle, addr: usize, bytes: &[u8]) -> Result<()> {
        let entry = self.lookup(what, dev, mr, addr, bytes.len())?;
        // SeqCst, as are the other two: of this and `deregister`, one sees the other.
        entry.filling.fetch_add(1, Ordering::SeqCst);
        let live = entry.generation.load(Ordering::SeqCst) == (mr.0 >> 32) as u32;
        let filled = live && entry.range.fill(addr, bytes);
        entry.filling.fetch_sub(1, Ordering::SeqCst);
        if filled { Ok(()) } else { Err(unknown(what, mr)) }
    }

    /// Registrations and regions alive, for tests.
    #[cfg(test)]
    pub fn counts(&self) -> (usize, usize) {
        let owners = lock(&self.owners);
        let regions = self.caches.iter().map(|cache| lock(cache).len()).sum();
        (owners.regions.len() - owners.free.len(), regions)
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
fn outside(what: &str, addr: usize, len: usize, range: &UserRange) -> Error {
    let (start, size) = (range.addr(), range.size());
    Error::internal(format!("{what}: {len} bytes at {addr:#x} are not inside the registered {size} bytes at {start:#x}"))
}

/// Segment and offset of an index.
#[inline]
fn locate(index: usize) -> Option<(usize, usize)> {
    // Segment i begins at FIRST_SEGMENT * (2^i - 1).
    let segment = (index / FIRST_SEGMENT + 1).ilog2() as usize;
    let begin = FIRST_SEGMENT * ((1 << segment) - 1);
    (segment < SEGMENTS).then(|| (segment, index - begin))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What a panicking thread left behind is complete: the critical sections change one thing last.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The regions of one physical device, counted. Generic so that its rules can be tested without a fabric.
struct Cache<R> {
    regions: BTreeMap<u64, Counted<R>>,
    /// The same by (start, region), to find what covers a range.
    by_start: BTreeSet<(usize, u64)>,
    /// No region is longer: where the search for a covering one may end.
    longest: usize,
    next: u64,
}

struct Counted<R> {
    region: R,
    start: usize,
    len: usize,
    count: usize,
}

impl<R> Cache<R> {
    fn new() -> Self {
        Cache { regions: BTreeMap::new(), by_start: BTreeSet::new(), longest: 0, next: 0 }
    }

    #[cfg(test)]
    fn len(&self) -> usize {
        self.regions.len()
    }

    /// Counts one more user of a region that covers the range, made if there is none.
    fn acquire<K>(&mut self, start: usize, len: usize, make: impl FnOnce() -> Result<R>, keys: impl FnOnce(&R) -> K) -> Result<(u64, K)> {
        let candidates = self.by_start.range(..=(start, u64::MAX)).rev();
        let near = candidates.take_while(|(begin, _)| start - begin < self.longest);
        let covering = near.map(|&(_, id)| id).find(|id| {
            // `start` is not before the region's, so the difference does not wrap.
            self.regions.get(id).is_some_and(|r| start - r.start <= r.len && len <= r.len - (start - r.start))
        });
        if let Some((id, found)) = covering.and_then(|id| Some((id, self.regions.get_mut(&id)?))) {
            found.count += 1;
            return Ok((id, keys(&found.region)));
        }
        let region = make()?;
        let answer = keys(&region);
        let id = self.next;
        self.next += 1;
        self.by_start.insert((start, id));
        self.regions.insert(id, Counted { region, start, len, count: 1 });
        self.longest = self.longest.max(len);
        Ok((id, answer))
    }

    /// Counts one user less; the region, if that was the last.
    fn release(&mut self, id: u64) -> Option<R> {
        let found = self.regions.get_mut(&id)?;
        found.count -= 1;
        if found.count > 0 {
            return None;
        }
        let gone = self.regions.remove(&id)?;
        self.by_start.remove(&(gone.start, id));
        if self.regions.is_empty() {
            self.longest = 0;
        }
        Some(gone.region)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn indices_fill_the_segments_without_a_gap() {
        let mut expected = (0, 0);
        for index in 0..10_000 {
            assert_eq!(locate(index), Some(expected), "{index}");
            expected.1 += 1;
            if expected.1 == FIRST_SEGMENT << expected.0 {
                expected = (expected.0 + 1, 0);
            }
        }
        assert_eq!(locate(usize::MAX / 2), None);
    }

    /// A range registered over others: the model is a list of (start, len, count).
    #[derive(Debug, Clone)]
    enum Op {
        Acquire(usize, usize),
        Release(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![3 => (0..50usize, 1..20usize).prop_map(|(s, l)| Op::Acquire(s, l)), 2 => (0..60usize).prop_map(Op::Release)]
    }

    proptest! {
        #[test]
        fn behaves_like_a_list_of_counted_ranges(ops in proptest::collection::vec(op(), 0..120)) {
            let mut cache = Cache::new();
            let mut model: Vec<(u64, usize, usize, usize)> = Vec::new();
            let mut held: Vec<u64> = Vec::new();
            for op in ops {
                match op {
                    Op::Acquire(start, len) => {
                        let covered = model.iter().any(|&(_, s, l, _)| s <= start && start + len <= s + l);
                        let mut made = false;
                        let (id, got) = cache.acquire(start, len, || { made = true; Ok((start, len)) }, |r| *r).unwrap();
                        prop_assert_eq!(made, !covered);
                        prop_assert!(got.0 <= start && start + len <= got.0 + got.1);
                        match model.iter_mut().find(|m| m.0 == id) {
                            Some(m) => { prop_assert_eq!((m.1, m.2), got); m.3 += 1; }
                            None => model.push((id, start, len, 1)),
                        }
                        held.push(id);
                    }
                    Op::Release(i) if i < held.len() => {
                        let id = held.swap_remove(i);
                        let m = model.iter_mut().find(|m| m.0 == id).unwrap();
                        m.3 -= 1;
                        let last = m.3 == 0;
                        let (start, len) = (m.1, m.2);
                        prop_assert_eq!(cache.release(id), last.then_some((start, len)));
                        model.retain(|m| m.3 > 0);
                    }
                    Op::Release(_) => {}
                }
                prop_assert_eq!(cache.len(), model.len());
            }
        }
    }

    #[test]
    fn a_failed_registration_leaves_nothing() {
        let mut cache: Cache<u8> = Cache::new();
        assert!(cache.acquire(0, 5, || Err(Error::usage("no")), |_| ()).is_err());
        assert_eq!(cache.len(), 0);
        assert_eq!(cache.release(0), None);
    }
}
