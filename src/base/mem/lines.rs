//! Lines of memory that others may write or read at the same time, moved by the widest registers that the processor has. Used for what is computed
//! with such memory, on the thread that computes.

#[cfg(target_arch = "x86_64")]
use std::arch::{
    asm,
    x86_64::{_MM_HINT_T0, _mm_prefetch},
};

/// Bytes of a [`Line`].
pub const LINE: usize = 64;

/// As many bytes as a cache line has, of any alignment, in registers.
pub type Line = [u8; LINE];

/// Bytes between a line that is read and the one that is asked for meanwhile: the processor's own prefetching begins anew at every page. Measured
/// with an allreduce of 48 MB, whose memory is in no core's cache.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 1024;

/// Registers of some width.
pub trait Vectors: Copy {
    /// Reads a line, once. Its bytes may come from different writes.
    ///
    /// # Safety
    /// `from` must be valid for reads of [`LINE`] bytes by this process, except that others may write them too.
    unsafe fn load(self, from: *const u8) -> Line;

    /// Writes a line.
    ///
    /// # Safety
    /// `to` must be valid for writes of [`LINE`] bytes by this process, except that others may access them too.
    unsafe fn store(self, to: *mut u8, line: Line);
}

/// Something that is computed with registers of any width. `run` should be `#[inline(always)]`: so it is compiled for each.
pub trait Compute {
    /// Does it.
    fn run(self, vectors: impl Vectors);
}

/// Computes with the widest registers of this processor.
#[cfg(target_arch = "x86_64")]
pub fn with_widest(what: impl Compute) {
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has it.
        unsafe { with_avx512(what) }
    } else if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: as above.
        unsafe { with_avx2(what) }
    } else {
        what.run(Sse(()));
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn with_avx512(what: impl Compute) {
    what.run(Avx512(()));
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2(what: impl Compute) {
    what.run(Avx2(()));
}

/// Computes with the registers of any processor.
#[cfg(not(target_arch = "x86_64"))]
pub fn with_widest(what: impl Compute) {
    what.run(Any);
}

/// Made only where the processor has them, as are the other two.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Avx512(());

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Avx2(());

#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
struct Sse(());

/// `$load` and `$store` of a register `$class` of type `$type`, from `$at` bytes on.
#[cfg(target_arch = "x86_64")]
macro_rules! vectors {
    ($vectors:ty, $type:ty, $class:ident, $move:literal, $feature:literal, $($at:literal)*) => {
        impl Vectors for $vectors {
            #[inline(always)]
            unsafe fn load(self, from: *const u8) -> Line {
                #[target_feature(enable = $feature)]
                #[inline]
                unsafe fn load(from: *const u8) -> Line {
                    // SAFETY: the instructions read the bytes that the caller vouches for, and the processor has them; both types are plain bytes, as many.
                    // Of a prefetch, any address will do.
                    unsafe {
                        _mm_prefetch::<_MM_HINT_T0>(from.wrapping_add(AHEAD).cast());
                        let parts = [$({
                            let part: $type;
                            asm!(concat!($move, " {part}, [{from} + ", $at, "]"), from = in(reg) from, part = out($class) part,
                                options(readonly, nostack, preserves_flags));
                            part
                        }),*];
                        std::mem::transmute(parts)
                    }
                }
                // SAFETY: the caller's.
                unsafe { load(from) }
            }

            #[inline(always)]
            unsafe fn store(self, to: *mut u8, line: Line) {
                #[target_feature(enable = $feature)]
                #[inline]
                unsafe fn store(to: *mut u8, line: Line) {
                    // SAFETY: as for `load`.
                    unsafe {
                        let parts: [$type; [$($at),*].len()] = std::mem::transmute(line);
                        let mut next = parts.into_iter();
                        $(if let Some(part) = next.next() {
                            asm!(concat!($move, " [{to} + ", $at, "], {part}"), to = in(reg) to, part = in($class) part,
                                options(nostack, preserves_flags));
                        })*
                    }
                }
                // SAFETY: the caller's.
                unsafe { store(to, line) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
vectors!(Avx512, std::arch::x86_64::__m512i, zmm_reg, "vmovups", "avx512f", 0);
#[cfg(target_arch = "x86_64")]
vectors!(Avx2, std::arch::x86_64::__m256i, ymm_reg, "vmovups", "avx2", 0 32);
#[cfg(target_arch = "x86_64")]
vectors!(Sse, std::arch::x86_64::__m128i, xmm_reg, "movups", "sse2", 0 16 32 48);

/// Those of any processor.
#[cfg(not(target_arch = "x86_64"))]
#[derive(Clone, Copy)]
struct Any;

#[cfg(not(target_arch = "x86_64"))]
impl Vectors for Any {
    #[inline(always)]
    unsafe fn load(self, from: *const u8) -> Line {
        let mut line = [0; LINE];
        // SAFETY: the caller vouches for `from`, and `line` has as many bytes.
        unsafe { super::copy(from, line.as_mut_ptr(), LINE) };
        line
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut u8, line: Line) {
        // SAFETY: the caller vouches for `to`, and `line` has as many bytes.
        unsafe { super::copy(line.as_ptr(), to, LINE) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Moves<'a>(&'a [u8], usize, &'a mut [u8], usize);

    impl Compute for Moves<'_> {
        fn run(self, vectors: impl Vectors) {
            let Moves(from, at, to, place) = self;
            assert!(at + LINE <= from.len() && place + LINE <= to.len());
            // SAFETY: both lines lie within the slices.
            unsafe { vectors.store(to.as_mut_ptr().add(place), vectors.load(from.as_ptr().add(at))) };
        }
    }

    #[test]
    fn a_line_goes_from_any_address_to_any_by_registers_of_any_width() {
        let bytes: Vec<u8> = (0..128).collect();
        type With = fn(Moves<'_>);
        #[cfg(target_arch = "x86_64")]
        let all: [With; 3] = [
            |what| with_widest(what),
            |what| what.run(Sse(())),
            |what| {
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: the processor has it.
                    unsafe { with_avx2(what) }
                } else {
                    what.run(Sse(()));
                }
            },
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let all: [With; 1] = [with_widest];
        for with in all {
            for (from, to) in [(0, 0), (1, 7), (63, 64), (64, 3)] {
                let mut moved = vec![0xee; 128];
                with(Moves(&bytes, from, &mut moved, to));
                assert_eq!(moved[to..to + LINE], bytes[from..from + LINE]);
                assert!(moved[..to].iter().chain(&moved[to + LINE..]).all(|b| *b == 0xee));
            }
        }
    }
}
