//! Payloads that travel in their descriptor, as words: those that are zero are left out, so that a flow-control slot of `net`, 64 bytes of
//! which one rail leaves 24 empty, takes one line. Used by both halves, on the thread that drives the queue pair.

use super::layout::{DESC_INLINE, PAYLOAD_WORDS};

/// `len` bytes as words, the rest of them zero.
///
/// # Safety
/// `from` must be valid for `len` bytes, at most [`DESC_INLINE`].
#[inline]
pub unsafe fn gather(from: *const u8, len: usize) -> [u64; DESC_INLINE / 8] {
    let mut words = [0u64; DESC_INLINE / 8];
    if len == 8 {
        // SAFETY: the first word is all there is.
        words[0] = unsafe { from.cast::<u64>().read_unaligned() };
        return words;
    }
    let whole = len / 8;
    for (i, word) in words.iter_mut().enumerate() {
        if i < whole {
            // SAFETY: word `i` ends within `len`.
            *word = unsafe { from.add(8 * i).cast::<u64>().read_unaligned() };
        }
    }
    if let (Some(word), 1..) = (words.get_mut(whole), len % 8) {
        // SAFETY: the bytes behind the whole words are fewer than a word, and within `len`.
        unsafe { std::ptr::copy_nonoverlapping(from.add(8 * whole), std::ptr::from_mut(word).cast::<u8>(), len % 8) };
    }
    words
}

/// Of a payload of `len` bytes the words that are not zero, and which they are: a bit each. None if they are too many for a descriptor.
#[inline]
pub fn compact(words: &[u64; DESC_INLINE / 8], len: usize) -> Option<(u8, [u64; PAYLOAD_WORDS])> {
    if len <= 8 {
        return Some((u8::from(words[0] != 0), [words[0], 0, 0, 0, 0]));
    }
    let mut packed = [0; DESC_INLINE / 8];
    let (mut mask, mut n) = (0, 0usize);
    for (i, &word) in words.iter().enumerate() {
        // Without branches: what stands behind the last one that counts is overwritten, or zero.
        packed[n & 7] = word;
        let some = word != 0;
        mask |= u8::from(some) << i;
        n += usize::from(some);
    }
    let (payload, _) = packed.split_first_chunk()?;
    (n <= PAYLOAD_WORDS).then_some((mask, *payload))
}

/// The words of a payload of `len` bytes, from what [`compact`] made of them, or a peer says it did.
#[inline]
pub fn expand(mask: u8, payload: &[u64; PAYLOAD_WORDS], len: usize) -> [u64; DESC_INLINE / 8] {
    if len <= 8 {
        return [payload[0], 0, 0, 0, 0, 0, 0, 0];
    }
    let mut packed = [0; DESC_INLINE / 8];
    packed[..PAYLOAD_WORDS].copy_from_slice(payload);
    let mut n = 0usize;
    std::array::from_fn(|i| {
        let some = mask >> i & 1;
        let word = packed[n & 7];
        n += usize::from(some);
        if some == 1 { word } else { 0 }
    })
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
                let words = unsafe { gather(bytes.as_ptr(), len) };
                let all: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
                assert!(all[..len] == bytes && all[len..].iter().all(|b| *b == 0));
                match compact(&words, len) {
                    Some((mask, payload)) => assert_eq!(expand(mask, &payload, len), words, "{len} bytes, {zeros:#b}"),
                    None => assert!(words.iter().filter(|word| **word != 0).count() > PAYLOAD_WORDS),
                }
            }
        }
    }
}
