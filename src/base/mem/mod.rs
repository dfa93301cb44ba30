//! Memory that others write too: pages that a peer's NIC may write, and segments shared with another process. Made and dropped at set-up, used on the
//! thread that drives the comm.
//!
//! Rust allows no reference to memory that others change, so none is returned: single words are accessed by the atomic accessors, which check bounds
//! and are safe; for bulk copies the fabric takes a raw pointer, checked for the whole range. What is read is a copy: check it, then use it.

mod lines;
mod pages;
mod racing;
mod shm;

pub use lines::{Compute, LINE, Line, Vectors, with_widest};
pub use pages::Pages;
pub use racing::{copy, load};
pub(crate) use shm::memfd;
pub use shm::{FILE_PREFIX, Shm, sweep};

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

/// A range of the caller's memory, from the C boundary to its registration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UserMemory {
    addr: usize,
    len: usize,
}

impl UserMemory {
    /// `len` bytes at `addr`.
    ///
    /// # Safety
    /// The range must be memory of this process, and stay so until every region registered over it, or other holder of it, was dropped; while a region
    /// is registered, the peer may change it at any time. The CPU must be able to read and write it, unless it is a device's memory: that may be
    /// registered on NICs alone, and nothing may view its bytes.
    pub unsafe fn new(addr: *mut u8, len: usize) -> Self {
        UserMemory { addr: addr as usize, len }
    }

    /// First byte.
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the range holds no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// `len` bytes of it from `offset` on, if they are inside.
    pub fn part(&self, offset: usize, len: usize) -> Option<UserMemory> {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        inside.then(|| UserMemory { addr: self.addr + offset, len })
    }
}

/// Whole pages that `len` bytes need.
pub(crate) fn page_round(len: usize) -> Option<usize> {
    let page = page_size();
    len.checked_add(page - 1).map(|n| n & !(page - 1))
}

/// The system's page size.
pub(crate) fn page_size() -> usize {
    // SAFETY: sysconf takes no pointer.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    // POSIX requires the name; 4096 is the smallest page of any Linux.
    usize::try_from(size).unwrap_or(4096)
}

/// A mapping, for the accessors.
#[derive(Clone, Copy)]
struct View {
    base: *mut u8,
    len: usize,
}

// Separate functions, so that a valid access does not prepare their messages.

#[cold]
#[inline(never)]
fn outside(offset: usize, len: usize, of: usize) -> ! {
    panic!("{len} bytes at {offset} of {of}")
}

#[cold]
#[inline(never)]
fn misaligned(offset: usize) -> ! {
    panic!("word at {offset} is misaligned")
}

impl View {
    /// # Panics
    /// A range that is not inside: an error of ours, because an offset from a peer must be checked before.
    #[inline]
    fn ptr(self, offset: usize, len: usize) -> *mut u8 {
        if len > self.len || offset > self.len - len {
            outside(offset, len, self.len);
        }
        // SAFETY: the offset is inside the mapping, or one past its end if `len` is 0.
        unsafe { self.base.add(offset) }
    }

    #[inline]
    fn word<T>(self, offset: usize) -> *mut T {
        let ptr = self.ptr(offset, size_of::<T>()).cast::<T>();
        if !ptr.is_aligned() {
            misaligned(offset);
        }
        ptr
    }

    #[inline]
    fn u32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside the mapping and aligned, by `word`; the mapping lives as long as the owner that `self` was borrowed from;
        // the type allows writes by others.
        unsafe { AtomicU32::from_ptr(self.word(offset)) }
    }

    #[inline]
    fn u64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: as in `u32`.
        unsafe { AtomicU64::from_ptr(self.word(offset)) }
    }

    #[inline]
    fn line(&self, offset: usize) -> &[AtomicU64; 8] {
        // SAFETY: as in `u32`; eight aligned words in a row are as aligned as the first.
        unsafe { &*self.word::<[AtomicU64; 8]>(offset) }
    }

    #[inline]
    fn u8(&self, offset: usize) -> &AtomicU8 {
        // SAFETY: as in `u32`.
        unsafe { AtomicU8::from_ptr(self.word(offset)) }
    }

    /// Bytes up to the first aligned word, whole words, bytes after them.
    fn parts(self, offset: usize, len: usize) -> (usize, usize) {
        let head = self.ptr(offset, len).align_offset(8).min(len);
        (head, (len - head) / 8)
    }

    fn read(&self, offset: usize, out: &mut [u8]) {
        let (head, words) = self.parts(offset, out.len());
        for (i, byte) in out[..head].iter_mut().enumerate() {
            *byte = self.u8(offset + i).load(Ordering::Relaxed);
        }
        let (lines, rest) = out[head..].as_chunks_mut::<64>();
        let mut at = offset + head;
        for line in lines {
            for (bytes, word) in line.as_chunks_mut().0.iter_mut().zip(self.line(at)) {
                *bytes = word.load(Ordering::Relaxed).to_ne_bytes();
            }
            at += 64;
        }
        for (word, bytes) in rest.as_chunks_mut().0.iter_mut().enumerate() {
            *bytes = self.u64(at + word * 8).load(Ordering::Relaxed).to_ne_bytes();
        }
        for (i, byte) in out.iter_mut().enumerate().skip(head + words * 8) {
            *byte = self.u8(offset + i).load(Ordering::Relaxed);
        }
    }

    fn write(&self, offset: usize, from: &[u8]) {
        let (head, words) = self.parts(offset, from.len());
        for (i, byte) in from[..head].iter().enumerate() {
            self.u8(offset + i).store(*byte, Ordering::Relaxed);
        }
        for (word, bytes) in from[head..].chunks_exact(8).enumerate() {
            let mut value = [0; 8];
            value.copy_from_slice(bytes);
            self.u64(offset + head + word * 8).store(u64::from_ne_bytes(value), Ordering::Relaxed);
        }
        for (i, byte) in from.iter().enumerate().skip(head + words * 8) {
            self.u8(offset + i).store(*byte, Ordering::Relaxed);
        }
    }
}

/// The accessors of a type that has `view()`.
macro_rules! accessors {
    ($type:ty) => {
        impl $type {
            /// Loads the word at `offset`. Like all accessors, panics if that is not inside, or not aligned to the word's size: check
            /// an offset that came from a peer first.
            #[inline]
            pub fn load_u32(&self, offset: usize, order: Ordering) -> u32 {
                self.view().u32(offset).load(order)
            }

            /// Loads the word at `offset`.
            #[inline]
            pub fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
                self.view().u64(offset).load(order)
            }

            /// Loads the 8 words from `offset` on, one by one: the last one first, with the given memory order, and the others only if it is as wanted.
            /// Otherwise returns the last one.
            #[inline]
            pub fn load_line(&self, offset: usize, last: u64, order: Ordering) -> Result<[u64; 8], u64> {
                let view = self.view();
                let line = view.line(offset);
                match line[7].load(order) {
                    found if found == last => Ok(line.each_ref().map(|word| word.load(Ordering::Relaxed))),
                    found => Err(found),
                }
            }

            /// Stores the word at `offset`.
            #[inline]
            pub fn store_u32(&self, offset: usize, value: u32, order: Ordering) {
                self.view().u32(offset).store(value, order);
            }

            /// Stores the word at `offset`.
            #[inline]
            pub fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
                self.view().u64(offset).store(value, order);
            }

            /// Replaces the word at `offset` and returns what was there.
            #[inline]
            pub fn swap_u32(&self, offset: usize, value: u32, order: Ordering) -> u32 {
                self.view().u32(offset).swap(value, order)
            }

            /// Replaces the word at `offset` if it is `current`; what was there, either way.
            #[inline]
            pub fn compare_exchange_u64(&self, offset: usize, current: u64, new: u64) -> Result<u64, u64> {
                self.view().u64(offset).compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire)
            }

            /// Adds to the word at `offset`, wrapping, and returns what was there.
            #[inline]
            pub fn fetch_add_u64(&self, offset: usize, value: u64, order: Ordering) -> u64 {
                self.view().u64(offset).fetch_add(value, order)
            }

            /// Copies bytes out, each aligned word by one load, unordered with concurrent writes.
            pub fn read(&self, offset: usize, out: &mut [u8]) {
                self.view().read(offset, out);
            }

            /// Copies bytes in, each aligned word by one store, unordered with concurrent reads.
            pub fn write(&self, offset: usize, from: &[u8]) {
                self.view().write(offset, from);
            }

            /// Address of `len` bytes at `offset`, for code that copies in bulk. Valid while `self` lives; others may write there
            /// at any time, so no reference may be made of it.
            #[inline]
            pub fn ptr(&self, offset: usize, len: usize) -> *mut u8 {
                self.view().ptr(offset, len)
            }
        }
    };
}

accessors!(Pages);
accessors!(Shm);
