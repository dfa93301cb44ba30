//! Which way bulk data goes fastest on this machine: found out once per process, when its first queue pair meets a peer on shared memory.
//!
//! Copied straight, each byte is copied once, by either of two cores, at the pace of `process_vm_readv`; through the ring it is copied
//! twice, once by each core, at the pace of plain copies. What the kernel adds to a copy (it pins page by page) differs by a factor of four between
//! processors: on some a straight copy is twice as fast as the ring, on others half as fast.

use std::time::Duration;

use once_cell::race::OnceBool;

use crate::base::clock;

/// As many bytes as a large message and its neighbours: more than the nearest caches hold.
const SLOT: usize = 1024 * 1024;
const SLOTS: usize = 4;
const ROUNDS: usize = 3;
/// How much faster than straight copies plain ones must be: twice, as only one core makes each, and something for the ring's own work.
const FACTOR: u32 = 5;
const FACTOR_OF: u32 = 2;

/// Whether a ring moves bulk data faster than straight copies.
pub fn ring_is_faster() -> bool {
    // No lock, which a fork could leave locked: two threads may measure at once.
    static ANSWER: OnceBool = OnceBool::new();
    ANSWER.get_or_init(|| measure().is_some_and(|(plain, straight)| straight * FACTOR_OF > plain * FACTOR))
}

/// Times of plain and of straight copies of the same bytes; none if the kernel refuses the latter.
fn measure() -> Option<(Duration, Duration)> {
    let from = vec![1u8; SLOT * SLOTS];
    let mut to = vec![2u8; SLOT * SLOTS];
    let mut best = |copy: &mut dyn FnMut(&[u8], &mut [u8]) -> bool| {
        let round = |to: &mut [u8], copy: &mut dyn FnMut(&[u8], &mut [u8]) -> bool| {
            let begin = clock::now();
            let all = from.chunks(SLOT).zip(to.chunks_mut(SLOT)).all(|(from, to)| copy(from, to));
            all.then(|| clock::now() - begin)
        };
        (0..ROUNDS).map(|_| round(&mut to, copy)).min().flatten().map(Duration::from_nanos)
    };
    let plain = best(&mut |from, to| {
        to.copy_from_slice(std::hint::black_box(from));
        true
    })?;
    let straight = best(&mut |from, to| {
        let local = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
        let remote = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
        // SAFETY: both ranges are slices of this process that outlive the call; only `to`, borrowed exclusively, is written.
        unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) == to.len() as isize }
    })?;
    Some((plain, straight))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_copies_are_timed() {
        let (plain, straight) = measure().unwrap();
        assert!(plain > Duration::ZERO && straight > Duration::ZERO);
    }
}
