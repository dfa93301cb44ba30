//! A byte stream in shared memory: the response stream and the fill stream. One side writes, the other reads, each on the thread that drives
//! its queue pair.

use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::STREAM;
use crate::base::mem;

const MASK: u64 = STREAM - 1;

/// Copies as much of the `len` bytes at `src` as fits after `tail`, given the reader's `head`; returns how many and publishes the
/// new tail. An impossible `head`, from a hostile reader, leaves no room.
///
/// # Safety
/// `area` must be valid for [`STREAM`] bytes and `src` for `len`.
pub unsafe fn write(area: *mut u8, tail: &AtomicU64, head: &AtomicU64, src: *const u8, len: usize) -> usize {
    let at = tail.load(Ordering::Relaxed);
    // Pairs with the Release in `read`: the reader has copied what it freed.
    let used = at.wrapping_sub(head.load(Ordering::Acquire));
    let n = STREAM.saturating_sub(used).min(len as u64) as usize;
    let first = n.min((STREAM - (at & MASK)) as usize);
    // SAFETY: both pieces lie within the area by the mask and the minimum, and within the first n <= len bytes of `src`.
    unsafe {
        mem::copy(src, area.add((at & MASK) as usize), first);
        mem::copy(src.add(first), area, n - first);
    }
    if n > 0 {
        // Pairs with the Acquire in `read`.
        tail.store(at.wrapping_add(n as u64), Ordering::Release);
    }
    n
}

/// Copies at most `len` bytes to `dst`; returns how many and frees their room. An impossible `tail`, from a hostile writer, yields at most
/// [`STREAM`] bytes of garbage.
///
/// # Safety
/// `area` must be valid for [`STREAM`] bytes and `dst` for `len`.
pub unsafe fn read(area: *const u8, tail: &AtomicU64, head: &AtomicU64, dst: *mut u8, len: usize) -> usize {
    let at = head.load(Ordering::Relaxed);
    // Pairs with the Release in `write`.
    let n = tail.load(Ordering::Acquire).wrapping_sub(at).min(STREAM).min(len as u64) as usize;
    let first = n.min((STREAM - (at & MASK)) as usize);
    // SAFETY: both pieces lie within the area by the mask and the minimum, and within the first n <= len bytes of `dst`.
    unsafe {
        mem::copy(area.add((at & MASK) as usize), dst, first);
        mem::copy(area, dst.add(first), n - first);
    }
    if n > 0 {
        // Pairs with the Acquire in `write`.
        head.store(at.wrapping_add(n as u64), Ordering::Release);
    }
    n
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_as_they_went_in_over_many_laps() {
        let mut area = vec![0u8; STREAM as usize];
        let (tail, head) = (AtomicU64::new(u64::MAX - 100), AtomicU64::new(u64::MAX - 100));
        let (mut sent, mut seen) = (0u64, 0u64);
        let mut chunk = 1;
        while seen < 5 * STREAM {
            let src: Vec<u8> = (0..chunk).map(|i| ((sent + i as u64) % 251) as u8).collect();
            // SAFETY: the area has STREAM bytes and `src` has its length.
            sent += unsafe { write(area.as_mut_ptr(), &tail, &head, src.as_ptr(), src.len()) } as u64;
            let mut dst = vec![0u8; chunk / 2 + 1];
            // SAFETY: as above.
            let n = unsafe { read(area.as_ptr(), &tail, &head, dst.as_mut_ptr(), dst.len()) };
            for byte in &dst[..n] {
                assert_eq!(*byte, (seen % 251) as u8);
                seen += 1;
            }
            assert!(sent - seen <= STREAM);
            chunk = chunk * 7 % 50_021 + 1;
        }
    }

    #[test]
    fn impossible_positions_stay_within_the_area() {
        let mut area = vec![0u8; STREAM as usize];
        let mut out = vec![0u8; 2 * STREAM as usize];
        // SAFETY: `out` is longer than asked for, the area is whole.
        unsafe {
            assert_eq!(
                read(area.as_ptr(), &AtomicU64::new(u64::MAX / 2), &AtomicU64::new(3), out.as_mut_ptr(), out.len()),
                STREAM as usize
            );
            assert_eq!(write(area.as_mut_ptr(), &AtomicU64::new(0), &AtomicU64::new(9), out.as_ptr(), out.len()), 0);
        }
    }
}
