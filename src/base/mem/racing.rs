//! Copies from and to memory that others, a peer or the user's threads, may write or read at the same time. Used for all bulk copies of such memory, on
//! the thread that makes the copy; single words go through atomics.

use std::arch::asm;

/// Copies `len` bytes from `from` to `to`; the two may overlap. Bytes that others write meanwhile have any value afterwards; nothing else is affected.
///
/// In Rust a data race of plain copies is undefined: the compiler may assume that memory does not change between two loads. So the copy is not made by
/// Rust code: the C library's `memmove`, as fast as `copy_nonoverlapping`, is called through a pointer of which the compiler knows only the type, so
/// it can neither see nor replace the loads, nor assume anything about their values.
///
/// # Safety
/// `from` must be valid for reads and `to` for writes of `len` bytes by this process, except that others may access them too.
#[inline]
#[allow(clippy::pointers_in_nomem_asm_block)] // The statement follows no pointer.
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    let mut function: unsafe extern "C" fn(*mut libc::c_void, *const libc::c_void, usize) -> *mut libc::c_void = libc::memmove;
    // SAFETY: no instruction, and the value comes back as it was; the compiler must take it for any other.
    unsafe { asm!("/* {0} */", inout(reg) function, options(pure, nomem, nostack, preserves_flags)) };
    // SAFETY: it is `memmove`, whose demands are the caller's. The compiler does not know what is called, so the copy has the effect of one by a device:
    // bytes that others write meanwhile come out old or new.
    unsafe { function(to.cast(), from.cast(), len) };
}

/// Reads a word of any alignment from such memory, once. Its bytes may come from different writes.
///
/// # Safety
/// `from` must be valid for reads of 8 bytes by this process, except that others may write them too.
#[inline(always)]
pub unsafe fn load(from: *const u8) -> u64 {
    #[repr(C, packed)]
    #[derive(Clone, Copy)]
    struct Unaligned(u64);
    // SAFETY: valid as the caller says, and aligned to one byte as the type is. Volatile: loaded once, and nothing is assumed of it.
    unsafe { from.cast::<Unaligned>().read_volatile() }.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_read_from_any_address() {
        let bytes: Vec<u8> = (0..16).collect();
        for at in 0..=8 {
            let expected = u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
            // SAFETY: the word lies within the vector.
            assert_eq!(unsafe { load(bytes.as_ptr().add(at)) }, expected);
        }
    }

    #[test]
    fn bytes_are_copied_either_way_over_an_overlap() {
        let bytes: Vec<u8> = (0..=255).cycle().take(10_000).collect();
        for len in [0, 1, 7, 64, 65, 4096, 9000] {
            for (from, to) in [(0, 500), (500, 0), (3, 3)] {
                let mut moved = bytes.clone();
                // SAFETY: both ranges lie within the vector.
                unsafe { copy(moved.as_ptr().add(from), moved.as_mut_ptr().add(to), len) };
                let mut expected = bytes.clone();
                expected.copy_within(from..from + len, to);
                assert_eq!(moved, expected, "{len} bytes from {from} to {to}");
            }
        }
    }
}
