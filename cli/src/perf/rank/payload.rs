//! What is in a message, and whether it arrived: the three ways a rank fills and checks its slots. Called on the thread that drives a rank.

use anyhow::{Context, bail};

/// Fills slots before a send and checks them after a receive. `slot` runs to the end of its last page.
pub trait Payload: Copy {
    /// Before message `seq` is posted.
    fn fill(self, slot: &mut [u8], len: usize, seq: u64);
    /// After message `seq` has arrived.
    fn check(self, slot: &[u8], len: usize, seq: u64) -> anyhow::Result<()>;
    /// After the send of message `seq` has completed.
    fn check_sent(self, _slot: &[u8], _len: usize, _seq: u64) -> anyhow::Result<()> {
        Ok(())
    }
}

/// For timing: the sequence number at both ends.
#[derive(Clone, Copy)]
pub struct Stamp;

impl Payload for Stamp {
    #[inline]
    fn fill(self, slot: &mut [u8], len: usize, seq: u64) {
        let stamp = seq.to_le_bytes();
        let n = len.min(8);
        slot[..n].copy_from_slice(&stamp[..n]);
        if len >= 16 {
            slot[len - 8..len].copy_from_slice(&stamp);
        }
    }

    #[inline]
    fn check(self, slot: &[u8], len: usize, seq: u64) -> anyhow::Result<()> {
        let stamp = seq.to_le_bytes();
        let n = len.min(8);
        if slot[..n] != stamp[..n] || len >= 16 && slot[len - 8..len] != stamp {
            return wrong_stamp(slot, len, seq);
        }
        Ok(())
    }
}

#[cold]
fn wrong_stamp(slot: &[u8], len: usize, seq: u64) -> anyhow::Result<()> {
    let n = len.min(8);
    bail!(
        "message {seq} of {len} bytes carries stamps {:02x?} and {:02x?}, not {:02x?}",
        &slot[..n],
        &slot[len - n..len],
        &seq.to_le_bytes()[..n]
    );
}

/// For the untimed pass: every byte differs with its place and its message, and nothing may be written behind the last.
#[derive(Clone, Copy)]
pub struct Pattern;

/// splitmix64 of a message and a place in it.
#[inline]
fn word(seq: u64, at: usize) -> [u8; 8] {
    let mut z = seq.wrapping_mul(0xD134_2543_DE82_EF95).wrapping_add((at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (z ^ (z >> 31)).to_le_bytes()
}

/// What lies behind the end of a message that is received.
const SLACK: u8 = 0;

impl Payload for Pattern {
    fn fill(self, slot: &mut [u8], len: usize, seq: u64) {
        for (at, part) in slot[..len].chunks_mut(8).enumerate() {
            part.copy_from_slice(&word(seq, at)[..part.len()]);
        }
    }

    fn check(self, slot: &[u8], len: usize, seq: u64) -> anyhow::Result<()> {
        for (at, part) in slot[..len].chunks(8).enumerate() {
            let want = word(seq, at);
            if let Some(i) = (0..part.len()).find(|&i| part[i] != want[i]) {
                bail!("message {seq}: byte {} of {len} is {:#04x}, and must be {:#04x}", at * 8 + i, part[i], want[i]);
            }
        }
        if let Some(i) = slot[len..].iter().position(|&b| b != SLACK) {
            bail!("message {seq} of {len} bytes: byte {i} behind its end was overwritten");
        }
        Ok(())
    }

    fn check_sent(self, slot: &[u8], len: usize, seq: u64) -> anyhow::Result<()> {
        self.check(slot, len, seq).context("the sender's own buffer was changed")
    }
}

/// For timing an application that computes with its data: every byte is written and read.
#[derive(Clone, Copy)]
pub struct Touch;

impl Touch {
    #[inline]
    fn byte(seq: u64) -> u8 {
        (seq % 251) as u8 + 1
    }
}

impl Payload for Touch {
    #[inline]
    fn fill(self, slot: &mut [u8], len: usize, seq: u64) {
        slot[..len].fill(Touch::byte(seq));
    }

    #[inline]
    fn check(self, slot: &[u8], len: usize, seq: u64) -> anyhow::Result<()> {
        let want = Touch::byte(seq);
        // Without an early exit, so that it compiles to vector instructions and no byte is left unread.
        let wrong = slot[..len].iter().fold(0, |all, &b| all | (b ^ want));
        if wrong != 0 {
            bail!("message {seq} of {len} bytes: not every byte is {want:#04x}");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn notices<P: Payload>(payload: P, len: usize, places: &[usize]) {
        let mut slot = vec![SLACK; 4096];
        payload.fill(&mut slot, len, 77);
        payload.check(&slot, len, 77).unwrap();
        assert!(len == 0 || payload.check(&slot, len, 78).is_err(), "the message before");
        for &at in places {
            slot[at] ^= 1;
            assert!(payload.check(&slot, len, 77).is_err(), "byte {at} of {len}");
            slot[at] ^= 1;
        }
    }

    #[test]
    fn each_payload_notices_what_it_promises() {
        notices(Stamp, 1000, &[0, 7, 992, 999]);
        notices(Stamp, 3, &[0, 1, 2]);
        notices(Pattern, 1001, &(0..1002).collect::<Vec<_>>());
        notices(Pattern, 0, &[0]);
        notices(Touch, 100, &(0..100).collect::<Vec<_>>());
    }
}
