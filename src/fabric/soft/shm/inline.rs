//! Payloads that travel in their descriptor, as words. Words that are zero are left out: so a CTS slot of `net`, 64 bytes of which 24 are
//! zero on one rail, fits one cache line. Used by both halves, on the thread that drives the queue pair.

use super::layout::{DESC_INLINE, PAYLOAD_WORDS};
use crate::base::mem;

/// The words of a payload of `len` bytes that are not zero, and a mask of which they are. None if they are too many for a descriptor.
///
/// # Safety
/// `from` must be valid for `len` bytes, at most [`DESC_INLINE`]; others may write them meanwhile.
#[inline(always)]
pub unsafe fn pack(from: *const u8, len: usize) -> Option<(u8, [u64; PAYLOAD_WORDS])> {
    if len == 8 {
        // SAFETY: `len` is 8, and the caller vouches for `len` bytes.
        let word = unsafe { mem::load(from) };
        return Some((u8::from(word != 0), [word, 0, 0, 0, 0]));
    }
    // SAFETY: the requirement is the caller's own.
    unsafe {
        if len == DESC_INLINE { pack_words(from, DESC_INLINE / 8, 0) } else { pack_words(from, (len / 8).min(DESC_INLINE / 8), len % 8) }
    }
}

/// [`pack`] of `whole` words and `rest` bytes after them.
///
/// # Safety
/// `from` must be valid for so many bytes, at most [`DESC_INLINE`].
#[inline(always)]
unsafe fn pack_words(from: *const u8, whole: usize, rest: usize) -> Option<(u8, [u64; PAYLOAD_WORDS])> {
    let mut packed = [0; DESC_INLINE / 8];
    let (mut mask, mut n) = (0, 0usize);
    // Which words of a CTS slot are zero hardly ever changes, so a processor predicts these branches.
    let mut put = |i: usize, word: u64| {
        if word != 0 {
            packed[n & 7] = word;
            mask |= 1 << i;
            n += 1;
        }
    };
    for i in 0..whole {
        // SAFETY: word `i` is one of the whole ones.
        put(i, unsafe { mem::load(from.add(8 * i)) });
    }
    if rest > 0 {
        let mut word = 0u64;
        // SAFETY: the bytes after the whole words are fewer than a word, and the caller's.
        unsafe { mem::copy(from.add(8 * whole), std::ptr::from_mut(&mut word).cast::<u8>(), rest) };
        put(whole, word);
    }
    let (payload, _) = packed.split_first_chunk()?;
    (n <= PAYLOAD_WORDS).then_some((mask, *payload))
}

/// The words of a payload of `len` bytes. `mask` and `payload` are what [`pack`] returned, or whatever a peer sent instead.
#[inline(always)]
pub fn unpack(mask: u8, payload: &[u64; PAYLOAD_WORDS], len: usize) -> [u64; DESC_INLINE / 8] {
    let mut words = [0; DESC_INLINE / 8];
    if len <= 8 {
        words[0] = payload[0];
        return words;
    }
    let mut left = mask;
    for word in payload {
        if left == 0 {
            break;
        }
        words[left.trailing_zeros() as usize & 7] = *word;
        left &= left - 1;
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_comes_back_and_the_rest_is_refused() {
        for len in 0..=DESC_INLINE {
            for zeros in 0..=255u8 {
                let bytes: Vec<u8> = (0..len).map(|i| if zeros >> (i / 8) & 1 == 0 { i as u8 + 1 } else { 0 }).collect();
                // SAFETY: a vector is valid for its length.
                match unsafe { pack(bytes.as_ptr(), len) } {
                    Some((mask, payload)) => {
                        let words = unpack(mask, &payload, len);
                        let all: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
                        assert!(all[..len] == bytes && all[len..].iter().all(|b| *b == 0), "{len} bytes, {zeros:#b}");
                    }
                    None => assert!(bytes.chunks(8).filter(|word| word.iter().any(|b| *b != 0)).count() > PAYLOAD_WORDS),
                }
            }
        }
    }
}
