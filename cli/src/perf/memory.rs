//! The buffers that messages are sent from and received into: ordinary private memory, page aligned. Used by the thread that drives a
//! rank; between a post and its completion a plugin may write to them, from this process or another.

use anyhow::Context;
use memmap2::MmapMut;

/// Equal slots in one mapping, each beginning on a page.
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
        let bytes = stride * count;
        let mut memory = MmapMut::map_anon(bytes).with_context(|| format!("no memory for {count} slots of {size} bytes"))?;
        // Reading would map the one page of zeroes everywhere.
        memory.chunks_mut(PAGE).for_each(|page| page[0] = 1);
        memory.chunks_mut(PAGE).for_each(|page| page[0] = 0);
        Ok(Slots { memory, stride, count })
    }

    /// All of them.
    pub fn whole(&mut self) -> (*mut u8, usize) {
        (self.memory.as_mut_ptr(), self.memory.len())
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

    #[inline]
    fn at(&self, seq: u64) -> usize {
        (seq % self.count as u64) as usize * self.stride
    }
}
