//! Ordered publish: what makes a flag at the end of a small WRITE trustworthy. Used by the wires, on the thread that drives the queue pair.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::mem;

/// Stores `src` at `dst`. If it is 8 to 64 bytes and its end is 8-aligned, the last 8 bytes become visible after the rest (Release), and no
/// aligned word inside is ever seen half written. Otherwise there is no order.
///
/// # Safety
/// `dst` must be valid for writes of `src.len()` bytes. Others may read it at the same time, if they do so with atomic words.
#[inline]
pub unsafe fn publish(dst: *mut u8, src: &[u8]) {
    let end = dst as usize + src.len();
    if src.len() < 8 || src.len() > 64 || !end.is_multiple_of(8) {
        // SAFETY: the caller vouches for the range.
        unsafe { mem::copy(src.as_ptr(), dst, src.len()) };
        return;
    }
    let (bytes, words) = src.split_at(src.len() % 8);
    // SAFETY: the caller vouches for the range.
    unsafe { mem::copy(bytes.as_ptr(), dst, bytes.len()) };
    let mut at = bytes.len();
    let mut left = words.len();
    for chunk in words.chunks_exact(8) {
        let mut word = [0; 8];
        word.copy_from_slice(chunk);
        left -= 8;
        let order = if left == 0 { Ordering::Release } else { Ordering::Relaxed };
        // SAFETY: within the caller's range, and aligned: the range ends 8-aligned and whole words are left.
        let to = unsafe { AtomicU64::from_ptr(dst.add(at).cast()) };
        to.store(u64::from_ne_bytes(word), order);
        at += 8;
    }
}

/// [`publish`] of the first `len` bytes of `words`.
///
/// # Safety
/// As for [`publish`], with `len` bytes, at most 64.
#[inline]
pub unsafe fn publish_words(dst: *mut u8, words: &[u64; 8], len: usize) {
    if len == 0 || !len.is_multiple_of(8) || !(dst as usize).is_multiple_of(8) {
        // SAFETY: an array of words is as many bytes.
        let bytes = unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), len.min(64)) };
        // SAFETY: the requirement is the caller's own.
        return unsafe { publish(dst, bytes) };
    }
    let last = len / 8 - 1;
    for (i, word) in words.iter().enumerate().take(last) {
        // SAFETY: within the caller's range, and aligned.
        unsafe { AtomicU64::from_ptr(dst.add(8 * i).cast()) }.store(*word, Ordering::Relaxed);
    }
    // SAFETY: as above.
    unsafe { AtomicU64::from_ptr(dst.add(8 * last).cast()) }.store(words.get(last).copied().unwrap_or(0), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_and_alignment_lands_whole() {
        for len in 0..=80 {
            for shift in 0..9 {
                let mut words = [0u64; 12];
                let src: Vec<u8> = (1..=len as u8).collect();
                // SAFETY: 96 bytes hold shift + len <= 88.
                unsafe { publish(words.as_mut_ptr().cast::<u8>().add(shift), &src) };
                let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
                assert_eq!(&bytes[shift..shift + len], &src[..], "{len} bytes at {shift}");
                assert!(bytes[..shift].iter().chain(&bytes[shift + len..]).all(|b| *b == 0), "{len} bytes at {shift} spilled");
                if len > 64 {
                    continue;
                }
                let (mut packed, mut again) = ([0u64; 8], [0u64; 12]);
                // SAFETY: 64 bytes hold `len`, and 96 hold shift + len.
                unsafe {
                    std::ptr::copy_nonoverlapping(src.as_ptr(), packed.as_mut_ptr().cast::<u8>(), len);
                    publish_words(again.as_mut_ptr().cast::<u8>().add(shift), &packed, len);
                }
                assert_eq!(again, words, "{len} bytes as words at {shift}");
            }
        }
    }
}
