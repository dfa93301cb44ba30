//! Copies out of and into memory that somebody else, a peer or the user's other threads, may write or read meanwhile. Used wherever bytes cross
//! such memory in bulk, on whatever thread moves them; single words go through atomics.

use std::arch::asm;

/// Copies `len` bytes from `from` to `to`; the two may overlap. Where another writes the source or the destination meanwhile, those bytes hold
/// anything afterwards, and nothing else is spoilt.
///
/// The language leaves racing plain copies undefined, as the compiler may believe that what it loaded once is still there. So no Rust code makes
/// these: the C library's `memmove`, as fast as what `copy_nonoverlapping` becomes, is called through a pointer of which the compiler knows no
/// more than its type, so it can neither see the loads, nor make others in their place, nor assume anything of what they yield.
///
/// # Safety
/// `from` must be valid for reads and `to` for writes of `len` bytes by this process, except that others may access them too.
#[inline]
#[allow(clippy::pointers_in_nomem_asm_block)] // The statement follows no pointer.
pub unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    let mut function: unsafe extern "C" fn(*mut libc::c_void, *const libc::c_void, usize) -> *mut libc::c_void = libc::memmove;
    // SAFETY: no instruction, and the value comes back as it was; the compiler must take it for any other.
    unsafe { asm!("/* {0} */", inout(reg) function, options(pure, nomem, nostack, preserves_flags)) };
    // SAFETY: it is `memmove`, whose demands are the caller's; what is done by code that is not Rust is no data race of Rust's.
    unsafe { function(to.cast(), from.cast(), len) };
}

/// Reads a word, of any alignment, in the same circumstances: once, and its bytes may be of different writes.
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
