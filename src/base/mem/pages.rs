//! Memory of our own that a peer WRITEs to: slots, records, scratch. Private, or of a shared segment. Made at connection set-up, read on the thread that drives the comm.

use std::sync::Arc;

use memmap2::{Advice, MmapMut, MmapRaw};

use super::{Shm, UserMemory, View, page_round};
use crate::base::error::{Error, Result};

/// Page-aligned, zeroed memory, absent in a forked child (a copy there would be a different memory from the one that the NIC
/// or the peer knows). Clones are the same memory, which is unmapped with the last of them.
#[derive(Clone)]
pub struct Pages {
    view: View,
    _mapped: Arc<dyn Send + Sync>,
}

// SAFETY: `view` is of `_mapped`, which may be used on any thread.
unsafe impl Send for Pages {}
// SAFETY: as above; the accessors are atomics and copies that allow for others' writes.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps at least `len` bytes, rounded up to whole pages.
    ///
    /// Errors: no memory; `len` 0.
    pub fn new(len: usize) -> Result<Pages> {
        let rounded = page_round(len).filter(|&n| n > 0).ok_or_else(|| Error::internal(format!("cannot map {len} bytes")))?;
        let map = MmapMut::map_anon(rounded).map_err(|e| Error::system(format!("mmap of {rounded} bytes"), e))?;
        let map = MmapRaw::from(map);
        map.advise(Advice::DontFork).map_err(|e| Error::system("madvise(MADV_DONTFORK)", e))?;
        Ok(Pages { view: View { base: map.as_mut_ptr(), len: map.len() }, _mapped: Arc::new(map) })
    }

    /// Those of a segment, which others may have mapped.
    pub fn shared(shm: Arc<Shm>) -> Pages {
        Pages { view: shm.view(), _mapped: shm }
    }

    /// Address of the first byte.
    #[inline]
    pub fn addr(&self) -> usize {
        self.view.base as usize
    }

    /// Bytes: whole pages.
    #[inline]
    pub fn len(&self) -> usize {
        self.view.len
    }

    /// Never: there is at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The whole of it, to be registered.
    ///
    /// # Safety
    /// The region is dropped before the last clone of the pages.
    pub(crate) unsafe fn as_memory(&self) -> UserMemory {
        // SAFETY: a private writable mapping; that it outlives the region is the caller's promise.
        unsafe { UserMemory::new(self.view.base, self.view.len) }
    }

    /// The same for tests, which keep the pages.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn to_register(&self) -> UserMemory {
        // SAFETY: as above.
        unsafe { self.as_memory() }
    }

    #[inline]
    pub(super) fn view(&self) -> View {
        self.view
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

    use super::*;
    use crate::base::fork::tests::in_child;

    fn panics<R>(f: impl FnOnce() -> R) -> bool {
        catch_unwind(AssertUnwindSafe(f)).is_err()
    }

    #[test]
    fn are_whole_zeroed_pages() {
        let pages = Pages::new(5000).unwrap();
        assert_eq!((pages.len(), pages.addr() % 4096), (8192, 0));
        let mut all = vec![1; 8192];
        pages.read(0, &mut all);
        assert!(all.iter().all(|&b| b == 0));
        let memory = pages.to_register();
        assert_eq!((memory.addr(), memory.len()), (pages.addr(), 8192));
        assert!(Pages::new(0).is_err() && Pages::new(usize::MAX).is_err());
    }

    #[test]
    fn words_are_where_they_were_put() {
        let pages = Pages::new(4096).unwrap();
        pages.store_u64(4088, 0x0102_0304_0506_0708, Release);
        assert_eq!(pages.load_u64(4088, Acquire), 0x0102_0304_0506_0708);
        assert_eq!(pages.load_u32(4092, Acquire), 0x0102_0304);
        assert_eq!(pages.swap_u32(4092, 5, AcqRel), 0x0102_0304);
        assert_eq!(pages.fetch_add_u64(8, 3, AcqRel), 0);
        assert_eq!(pages.compare_exchange_u64(8, 3, 9), Ok(3));
        assert_eq!(pages.compare_exchange_u64(8, 3, 9), Err(9));
        pages.store_u32(0, 1, Relaxed);
        assert_eq!(pages.load_u64(0, Relaxed), 1);
        let last = 0x0102_0304_0506_0708 & 0xffff_ffff | 5 << 32;
        assert_eq!(pages.load_line(4032, last, Relaxed), Ok([0, 0, 0, 0, 0, 0, 0, last]));
        assert_eq!(pages.load_line(4032, 1, Relaxed), Err(last));
    }

    #[test]
    fn nothing_outside_or_misaligned_is_touched() {
        let pages = Pages::new(4096).unwrap();
        for offset in [4096, 4089, 4, usize::MAX, usize::MAX - 7] {
            assert!(panics(|| pages.load_u64(offset, Relaxed)), "{offset}");
            assert!(panics(|| pages.store_u64(offset, 1, Relaxed)), "{offset}");
        }
        for offset in [4096, 4094, 2] {
            assert!(panics(|| pages.load_u32(offset, Relaxed)), "{offset}");
        }
        for offset in [4040, 4, usize::MAX] {
            assert!(panics(|| pages.load_line(offset, 0, Relaxed)), "{offset}");
        }
        assert!(panics(|| pages.read(4090, &mut [0; 7])) && panics(|| pages.write(usize::MAX, &[0; 2])));
        assert!(panics(|| pages.ptr(4097, 0)) && panics(|| pages.ptr(1, usize::MAX)));
        assert_eq!(pages.ptr(4096, 0) as usize, pages.addr() + 4096);
        assert_eq!(pages.ptr(10, 4086) as usize, pages.addr() + 10);
    }

    #[test]
    fn copies_are_exact_at_every_alignment_and_length() {
        let pages = Pages::new(4096).unwrap();
        let mut model = vec![0u8; 4096];
        let mut next = 1u8;
        for offset in (0..9).chain(4060..4064) {
            for len in 0..33 {
                let from: Vec<u8> = (0..len as u8).map(|i| next.wrapping_add(i)).collect();
                next = next.wrapping_mul(5).wrapping_add(3);
                pages.write(offset, &from);
                model[offset..offset + len].copy_from_slice(&from);
                let mut back = vec![0; len];
                pages.read(offset, &mut back);
                assert_eq!(back, from, "{len} bytes at {offset}");
            }
        }
        let mut all = vec![0; 4096];
        pages.read(0, &mut all);
        assert!(all == model, "a copy touched its neighbours");
    }

    #[test]
    fn a_forked_child_does_not_have_them() {
        let pages = Pages::new(4096).unwrap();
        pages.store_u32(0, 3, Relaxed);
        assert!(!in_child(|| pages.load_u32(0, Relaxed) == 3));
        assert_eq!(pages.load_u32(0, Relaxed), 3);
    }
}
