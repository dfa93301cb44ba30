//! Ordered publish: the flag at the end of a slot is trustworthy.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use railhead::fabric::{PostError, QpCaps, SendWr, WcStatus};

use super::bed::{Bed, NOTHING, Request, Rng, count};

const SLOT: usize = 64;
const SLOTS: u64 = 256;

/// A thread that only reads follows slot after slot by their flags alone and never sees one whose other words are not of that lap.
/// Slots of each length up to 64, inline and not. RHT_PUBLISHES sets how many.
pub fn no_torn_slot(bed: &Bed) {
    let publishes = count("RHT_PUBLISHES", 100_000);
    let mut p = bed.pair_with(QpCaps { send_depth: 128, ..QpCaps::default() });
    let from = p.a.open_memory(SLOT * SLOTS as usize);
    let slots = p.b.open_memory(SLOT * SLOTS as usize);
    slots.set(0);
    let (read, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (slots, read, stop) = (&slots, &read, &stop);
        scope.spawn(move || {
            let done = StopOnDrop(stop);
            for seq in 0..publishes {
                let words = words(seq);
                let at = (seq % SLOTS) as usize * SLOT;
                // SAFETY: 8-aligned memory that outlives this thread; others change it, so it is read with atomics only.
                let word = |i: usize| unsafe { AtomicU64::from_ptr(slots.ptr(at + 8 * i).cast()) };
                let mut spins = 0u32;
                while word(7).load(Ordering::Acquire) != seq + 1 {
                    spins += 1;
                    if spins.is_multiple_of(64) {
                        assert!(!stop.load(Ordering::Relaxed), "stopped at {seq}");
                        std::thread::yield_now();
                    }
                }
                for i in 8 - words..7 {
                    let value = word(i).load(Ordering::Relaxed);
                    assert_eq!(value, value_of(seq, i), "torn slot: publish {seq}, word {i} of {words}");
                }
                read.store(seq + 1, Ordering::Release);
            }
            std::mem::forget(done);
        });
        let done = StopOnDrop(stop);
        let mut next = 0;
        while read.load(Ordering::Acquire) < publishes {
            assert!(!stop.load(Ordering::Relaxed), "the reader saw a torn slot");
            while next < publishes && next < read.load(Ordering::Acquire) + SLOTS {
                let (at, len) = ((next % SLOTS) as usize * SLOT, words(next) * 8);
                let mut bytes = [0u8; SLOT];
                (0..7).for_each(|i| bytes[8 * i..8 * i + 8].copy_from_slice(&value_of(next, i).to_le_bytes()));
                bytes[56..].copy_from_slice(&(next + 1).to_le_bytes());
                let tail = &bytes[SLOT - len..];
                let signaled = next % 32 == 0;
                let to = at + SLOT - len;
                let request = if next % 3 == 0 {
                    from.write(to, tail);
                    Request::write(next, from.sge(to, len), slots, to)
                } else {
                    Request::write_inline(next, tail, slots, to)
                };
                match p.a.cq.qp(p.a.qp).post_send(&[SendWr { signaled, ..request }]) {
                    Ok(()) => next += 1,
                    Err(PostError::Full) => break,
                    Err(e) => panic!("{e}"),
                }
            }
            if p.poll() == 0 && next >= read.load(Ordering::Relaxed) + SLOTS {
                std::thread::yield_now();
            }
            assert!(p.a.got.drain(..).all(|c| c.status == WcStatus::Success));
        }
        std::mem::forget(done);
    });
}

/// Whoever fails stops the other, who would wait for ever.
struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Words of publish `seq`: 1 to 8, mostly 8.
fn words(seq: u64) -> usize {
    if seq.is_multiple_of(4) { 1 + (seq / 4 % 8) as usize } else { 8 }
}

fn value_of(seq: u64, word: usize) -> u64 {
    seq.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (word as u64) << 56
}

/// What is not a publish (odd end, or longer) promises no order of bytes, but is whole once something behind it was received.
pub fn unaligned_or_long_writes_are_whole_at_completion(bed: &Bed) {
    let mut p = bed.pair();
    let from = p.a.open_memory(4096);
    let to = p.b.open_memory(4096);
    let mut rng = Rng(5);
    for round in 0..2000u64 {
        from.pattern(round + 1);
        let len = 1 + rng.below(200);
        let at = rng.below(300);
        p.b.recv(1, NOTHING);
        p.a.send(SendWr { signaled: false, ..Request::write(2, from.sge(at, len), &to, at) });
        p.a.send(Request::write_imm(3, NOTHING, &to, 0, round as u32));
        p.wait(1, 1);
        p.b.take_ok(1);
        p.a.take_ok(3);
        assert!(to.read(at, len) == from.read(at, len), "round {round}: {len} at {at}");
    }
}
