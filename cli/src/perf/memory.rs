//! The buffers that messages are sent from and received into: ordinary private memory, page aligned. Used by the thread that drives a
//! rank; between a post and its completion a plugin may write to them, from this process or another.

use anyhow::Context;
use memmap2::MmapMut;

/// Equal slots in one mapping, each beginning on a page, with a page before the first and one behind the last that nobody may write.
pub struct Slots {
    memory: MmapMut,
    stride: usize,
    count: usize,
}

const PAGE: usize = 4096;

impl Slots {
    /// `count` slots for `size` bytes each, in RAM.
    pub fn new(count: usize, size: usize) -> anyhow::Result<Slots> {
        let stride = size.max(1).next_multiple_of(PAGE);
        let bytes = stride * count + 2 * PAGE;
        let mut memory = MmapMut::map_anon(bytes).with_context(|| format!("no memory for {count} slots of {size} bytes"))?;
        // Reading would map the one page of zeroes everywhere.
        memory.chunks_mut(PAGE).for_each(|page| page[0] = 1);
        memory.chunks_mut(PAGE).for_each(|page| page[0] = 0);
        Ok(Slots { memory, stride, count })
    }

    /// All of them, without the pages around.
    pub fn whole(&mut self) -> (*mut u8, usize) {
        let slots = self.slots();
        (slots.as_mut_ptr(), slots.len())
    }

    /// How many slots `bytes` hold: at least one, at most all.
    pub fn within(&self, bytes: usize) -> usize {
        (bytes / self.stride).clamp(1, self.count.max(1))
    }

    /// All of them, `slots` at a time: where each piece is, and its bytes.
    pub fn pieces(&mut self, slots: usize) -> impl Iterator<Item = (*mut u8, usize)> {
        let piece = slots * self.stride;
        self.slots().chunks_mut(piece).map(|piece| (piece.as_mut_ptr(), piece.len()))
    }

    fn slots(&mut self) -> &mut [u8] {
        let len = self.count * self.stride;
        &mut self.memory[PAGE..PAGE + len]
    }

    /// Whether all that lies outside the first `size` bytes of a slot is zero, as it began.
    pub fn margins_intact(&self, size: usize) -> bool {
        let zero = |bytes: &[u8]| bytes.iter().all(|&b| b == 0);
        let (slots, behind) = self.memory[PAGE..].split_at(self.count * self.stride);
        zero(&self.memory[..PAGE]) && zero(behind) && slots.chunks(self.stride).all(|slot| zero(&slot[size..]))
    }

    /// First byte of the slot that message `seq` uses.
    #[inline]
    pub fn addr(&mut self, seq: u64) -> *mut u8 {
        let at = self.at(seq);
        self.memory[at..].as_mut_ptr()
    }

    /// The slot of message `seq`, with the rest of its last page. Only between a completion and the next post.
    #[inline]
    pub fn slot(&mut self, seq: u64) -> &mut [u8] {
        let at = self.at(seq);
        &mut self.memory[at..at + self.stride]
    }

    /// Which slot message `seq` uses.
    #[inline]
    pub fn index(&self, seq: u64) -> usize {
        (seq % self.count as u64) as usize
    }

    #[inline]
    fn at(&self, seq: u64) -> usize {
        PAGE + self.index(seq) * self.stride
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_whole_slots_and_cover_all() {
        let mut slots = Slots::new(5, 5000).unwrap();
        let stride = 2 * PAGE;
        for (bytes, covers, lens) in
            [(usize::MAX, 5, &[5][..]), (5 * stride, 5, &[5]), (5 * stride - 1, 4, &[4, 1]), (2 * stride, 2, &[2, 2, 1]), (1, 1, &[1; 5])]
        {
            assert_eq!(slots.within(bytes), covers, "{bytes}");
            let pieces: Vec<_> = slots.pieces(covers).collect();
            assert_eq!(pieces.iter().map(|(_, len)| len / stride).collect::<Vec<_>>(), lens, "{bytes}");
            for (n, (addr, _)) in pieces.into_iter().enumerate() {
                assert_eq!(addr, slots.addr((n * covers) as u64), "{bytes}, piece {n}");
            }
        }
    }

    #[test]
    fn margins_are_all_but_the_messages() {
        let mut slots = Slots::new(3, 5000).unwrap();
        for seq in 0..4 {
            slots.slot(seq)[..5000].fill(1);
            assert_eq!(slots.addr(seq) as usize % PAGE, 0);
            assert_eq!(slots.addr(seq), slots.addr(seq + 3));
        }
        assert!(slots.margins_intact(5000));
        for at in [PAGE - 1, PAGE + 5000, PAGE + 3 * 2 * PAGE] {
            slots.memory[at] = 1;
            assert!(!slots.margins_intact(5000), "byte {at}");
            slots.memory[at] = 0;
        }
    }
}
