//! Memory that is given to a plugin: never referenced from Rust while a plugin, or a peer through it, may write there, only copied in and out.

use std::io;
use std::ptr::{self, NonNull};

/// Pages of this process, followed by one that cannot be touched. They stay mapped until the process ends: a broken plugin may write
/// there at any time.
#[derive(Debug, Clone, Copy)]
pub struct Mem {
    base: NonNull<u8>,
    /// Usable bytes, which end where the guard page begins.
    len: usize,
}

// SAFETY: plain memory; contents are copied in and out.
unsafe impl Send for Mem {}
// SAFETY: as above; races with the plugin are races of bytes that the rules look at only when the plugin says that it is done with them.
unsafe impl Sync for Mem {}

impl Mem {
    /// `len` zero bytes. The guard page follows the last.
    pub fn new(len: usize) -> io::Result<Mem> {
        // SAFETY: sysconf has no requirements.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
        let body = len.max(1).next_multiple_of(page);
        let mapped = body + page;
        let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a fresh anonymous mapping.
        let start = unsafe { libc::mmap(ptr::null_mut(), mapped, protection, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the last page of the mapping made above.
        if unsafe { libc::mprotect(start.byte_add(body), page, libc::PROT_NONE) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `len` bytes before the guard page lie inside the mapping.
        let base = unsafe { start.cast::<u8>().add(body - len) };
        Ok(Mem { base: NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?, len })
    }

    /// Address of byte `at`.
    pub fn ptr(&self, at: usize) -> *mut u8 {
        assert!(at <= self.len, "byte {at} of {}", self.len);
        // SAFETY: at most one past the end.
        unsafe { self.base.as_ptr().add(at) }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Copies in.
    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(bytes.len() <= self.len && at <= self.len - bytes.len(), "{at} + {} of {}", bytes.len(), self.len);
        // SAFETY: inside the mapping, as just checked.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.ptr(at), bytes.len()) }
    }

    /// Sets bytes.
    pub fn fill(&self, at: usize, len: usize, byte: u8) {
        assert!(len <= self.len && at <= self.len - len, "{at} + {len} of {}", self.len);
        // SAFETY: inside the mapping, as just checked.
        unsafe { ptr::write_bytes(self.ptr(at), byte, len) }
    }

    /// Copies out.
    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(len <= self.len && at <= self.len - len, "{at} + {len} of {}", self.len);
        let mut out = vec![0; len];
        // SAFETY: inside the mapping, as just checked.
        unsafe { ptr::copy_nonoverlapping(self.ptr(at), out.as_mut_ptr(), len) }
        out
    }

    /// One byte, as it is now: for waiting until it changes.
    pub fn byte(&self, at: usize) -> u8 {
        assert!(at < self.len, "byte {at} of {}", self.len);
        // SAFETY: inside the mapping, as just checked; volatile, because others write there.
        unsafe { ptr::read_volatile(self.ptr(at)) }
    }
}
