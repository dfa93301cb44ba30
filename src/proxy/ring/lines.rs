//! The flags inside LL and LL128 slots, which the proxy checks before it sends a slot. Read on the engine's thread while the producer writes.
//!
//! ```text
//! LL      16 bytes: data u32 | flag u32 | data u32 | flag u32      flag = low half of step + 1
//! LL128  128 bytes: data u64[15] | flag u64                        flag = step + 1
//! ```
//!
//! ncclLLFifoLine and NCCL_LL128_* of nccl v2.7.8 src/include/devcomm.h. A flag of 2^32 steps ago equals the current one, so LL producers
//! rewrite all lines of a slot in the last lap of each 2^31 steps (NCCL_LL_CLEAN_MASK 0x7ffffff8, same file).

use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::atomic::{AtomicU64, fence};

use crate::proxy::protocol::Protocol;

/// The flag of a step in an LL slot.
#[inline]
pub fn ll_flag(step: u64) -> u32 {
    step.wrapping_add(1) as u32
}

/// The flag of a step in an LL128 slot.
#[inline]
pub fn ll128_flag(step: u64) -> u64 {
    step.wrapping_add(1)
}

/// Lines that `bytes` take.
#[inline]
pub fn lines(protocol: Protocol, bytes: usize) -> usize {
    bytes.div_ceil(protocol.line())
}

/// The first line from line `from` on, of the first `count` of a slot, whose flags are not those of `step`; `count` if there is none. The data of all
/// lines before it may be read then. SIMPLE has no flags: none is missing.
///
/// # Safety
/// `slot` must be aligned to the protocol's line and readable for `count` lines, by the CPU. Others may write there.
#[inline]
pub unsafe fn missing(protocol: Protocol, slot: *mut u8, step: u64, from: usize, count: usize) -> usize {
    let word = |index: usize| {
        // SAFETY: the callers below stay inside the first `count` lines, which this function's own requirement covers; a line's alignment
        // is at least a word's; the type allows writes by others.
        unsafe { AtomicU64::from_ptr(slot.cast::<u64>().add(index)) }
    };
    let first = match protocol {
        Protocol::Simple => count,
        Protocol::Ll => {
            let flag = ll_flag(step).to_ne_bytes();
            // One load for data and flag: they are stored together, and a later read of the data cannot return an older value.
            let set = |index: usize| word(index).load(Relaxed).to_ne_bytes()[4..] == flag;
            (from..count).find(|line| !set(line * 2) || !set(line * 2 + 1)).unwrap_or(count)
        }
        // Acquire: pairs with the Release store of the flag, which the producer makes after the line's data.
        Protocol::Ll128 => (from..count).find(|line| word(line * 16 + 15).load(Acquire) != ll128_flag(step)).unwrap_or(count),
    };
    if protocol == Protocol::Ll && first == count {
        // The network reads the data by other means than these loads: none of its reads may come before them.
        fence(Acquire);
    }
    first
}

/// Fills new slots with flags that none of the next 2^31 steps has. Zeroed memory needs that only if the steps do not start from 0.
///
/// # Safety
/// `area` must be aligned to the protocol's line and writable for `bytes` bytes, and nobody else may use it yet.
pub unsafe fn prime(protocol: Protocol, area: *mut u8, bytes: usize, start: u64) {
    let (stride, value) = match protocol {
        Protocol::Simple => return,
        Protocol::Ll => (1, u64::from(ll_flag(start) ^ 1 << 31) * 0x1_0000_0001),
        Protocol::Ll128 => (16, ll128_flag(start) ^ 1 << 63),
    };
    for index in (stride - 1..bytes / 8).step_by(stride) {
        // SAFETY: inside the area, aligned, and nobody else's, by this function's own requirement.
        unsafe { area.cast::<u64>().add(index).write(value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lines as a producer leaves them.
    fn slot(protocol: Protocol, lines: usize, step: u64) -> Vec<u128> {
        let mut words = vec![0u64; lines * protocol.line() / 8];
        for (index, word) in words.iter_mut().enumerate() {
            match protocol {
                Protocol::Ll => *word = u64::from_ne_bytes([[7; 4], ll_flag(step).to_ne_bytes()].concat().try_into().unwrap()),
                Protocol::Ll128 if index % 16 == 15 => *word = ll128_flag(step),
                _ => *word = 7,
            }
        }
        // 16-aligned, which is what the loads need.
        words.chunks(2).map(|pair| u128::from(pair[0]) | u128::from(pair[1]) << 64).collect()
    }

    #[test]
    fn the_first_line_without_its_flag_is_found() {
        for step in [0, 5, u64::from(u32::MAX) - 1, u64::from(u32::MAX), u64::MAX] {
            for protocol in [Protocol::Ll, Protocol::Ll128] {
                let mut whole = slot(protocol, 5, step);
                // SAFETY: five whole lines of our own.
                let first = |slot: &mut Vec<u128>, from| unsafe { missing(protocol, slot.as_mut_ptr().cast(), step, from, 5) };
                assert_eq!(first(&mut whole, 0), 5);
                // The last word of line 3 is still of the lap before.
                let last = 4 * protocol.line() / 16 - 1;
                whole[last] = slot(protocol, 5, step.wrapping_sub(8))[last];
                assert_eq!((first(&mut whole, 0), first(&mut whole, 2), first(&mut whole, 4)), (3, 3, 5), "{protocol} {step}");
            }
        }
    }

    #[test]
    fn primed_slots_have_no_flag_of_a_coming_step() {
        for start in [1, u64::from(u32::MAX) - 3, u64::MAX - 3] {
            for protocol in [Protocol::Ll, Protocol::Ll128] {
                let mut area = vec![0u128; 8 * 8];
                // SAFETY: whole lines of our own.
                unsafe { prime(protocol, area.as_mut_ptr().cast(), 1024, start) };
                for step in 0..20 {
                    // SAFETY: as above.
                    let first = unsafe { missing(protocol, area.as_mut_ptr().cast(), start.wrapping_add(step), 0, 1) };
                    assert_eq!(first, 0, "{protocol} {start}+{step}");
                }
            }
        }
    }
}
