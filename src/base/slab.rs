//! Entries that threads find by index without a lock, with a generation that tells an entry from the earlier ones of its index. Behind the handles of
//! comms and registrations, and the connectors of an engine. Any thread, at any time.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

use super::sync::lock;

/// At most `CHUNK * CHUNKS` entries. They are allocated a chunk at a time, never move, and live as long as the slab. Threads may refer to the value of a
/// free entry, so values are changed through atomics, locks and the like.
pub struct Slab<T, const CHUNK: usize, const CHUNKS: usize> {
    chunks: [OnceLock<Box<[Entry<T>; CHUNK]>>; CHUNKS],
    /// Indices that are free again, and the first that was never used.
    free: Mutex<(Vec<u32>, u32)>,
}

#[derive(Default)]
struct Entry<T> {
    /// Odd while the entry is in use.
    generation: AtomicU32,
    value: T,
}

impl<T: Default, const CHUNK: usize, const CHUNKS: usize> Default for Slab<T, CHUNK, CHUNKS> {
    fn default() -> Self {
        Slab { chunks: [const { OnceLock::new() }; CHUNKS], free: Mutex::default() }
    }
}

impl<T: Default, const CHUNK: usize, const CHUNKS: usize> Slab<T, CHUNK, CHUNKS> {
    /// Lets `fill` set the value of a free entry, and returns its index and its new generation, which is odd. `None` if all are in use. Neither `fill` nor
    /// the `empty` of [`Slab::remove`] may panic: the index would be lost.
    pub fn insert(&self, fill: impl FnOnce(&T)) -> Option<(u32, u32)> {
        let index = {
            let (free, unused) = &mut *lock(&self.free);
            let index = free.pop().unwrap_or(*unused);
            if index as usize == CHUNK * CHUNKS {
                return None;
            }
            *unused = (*unused).max(index + 1);
            index
        };
        let chunk = self.chunks.get(index as usize / CHUNK)?.get_or_init(|| {
            let entries: Box<[_]> = (0..CHUNK).map(|_| Entry::default()).collect();
            entries.try_into().unwrap_or_else(|_| unreachable!("as many as were made"))
        });
        let entry = &chunk[index as usize % CHUNK];
        fill(&entry.value);
        // Release: pairs with the Acquire in `entry`: a thread that sees the generation sees the value.
        Some((index, entry.generation.fetch_add(1, Ordering::Release).wrapping_add(1)))
    }

    /// Removes an entry: it is found no longer, then `empty` takes what is to be taken of its value, then the index may be used again. `None` if this is
    /// not, or no longer, its generation.
    pub fn remove<R>(&self, index: u32, generation: u32, empty: impl FnOnce(&T) -> R) -> Option<R> {
        let entry = self.chunks.get(index as usize / CHUNK)?.get()?.get(index as usize % CHUNK).filter(|_| generation % 2 == 1)?;
        // Of several threads that remove it, one succeeds.
        entry.generation.compare_exchange(generation, generation.wrapping_add(1), Ordering::AcqRel, Ordering::Relaxed).ok()?;
        let result = empty(&entry.value);
        lock(&self.free).0.push(index);
        Some(result)
    }

    /// The generation and the value of an entry; the former is odd while the entry is in use, and 0 before its first use. `None` if its chunk was never
    /// needed.
    #[inline(always)]
    pub fn entry(&self, index: u32) -> Option<(u32, &T)> {
        let entry = &self.chunks.get(index as usize / CHUNK)?.get()?[index as usize % CHUNK];
        // Acquire: pairs with the Release in `insert`.
        Some((entry.generation.load(Ordering::Acquire), &entry.value))
    }

    /// The value of an entry that is in use, if this is its generation.
    #[inline(always)]
    pub fn find(&self, index: u32, generation: u32) -> Option<&T> {
        self.entry(index).filter(|(current, _)| *current == generation && generation % 2 == 1).map(|(_, value)| value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_found_by_its_own_generation_and_used_again() {
        let slab = Slab::<AtomicU32, 4, 2>::default();
        let value = |index, generation| slab.find(index, generation).map(|value| value.load(Ordering::Relaxed));
        for n in 0..8 {
            assert_eq!(slab.insert(|value| value.store(n, Ordering::Relaxed)), Some((n, 1)));
        }
        assert_eq!(slab.insert(|_| ()), None);
        assert!((0..8).all(|n| value(n, 1) == Some(n)) && slab.entry(8).is_none());
        assert_eq!(slab.remove(5, 1, |value| value.load(Ordering::Relaxed)), Some(5));
        assert!([0, 1, 2, 3].iter().all(|generation| value(5, *generation).is_none() && slab.remove(5, *generation, |_| ()).is_none()));
        assert_eq!((slab.insert(|value| value.store(9, Ordering::Relaxed)), slab.insert(|_| ())), (Some((5, 3)), None));
        assert_eq!((value(5, 1), value(5, 3)), (None, Some(9)));
    }

    #[test]
    fn no_two_threads_have_an_entry_at_a_time() {
        let slab = Slab::<AtomicU32, 4, 4>::default();
        let work = || {
            for _ in 0..10_000 {
                let (index, generation) = slab.insert(|value| assert_eq!(value.fetch_add(1, Ordering::Relaxed), 0)).unwrap();
                slab.remove(index, generation, |value| value.store(0, Ordering::Relaxed)).unwrap();
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(work))));
        assert!(slab.entry(4).is_none(), "four entries are enough for four threads");
    }
}
