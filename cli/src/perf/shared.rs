//! Words in memory that two processes have mapped. Used by the limits.

use std::fs::File;
use std::sync::atomic::AtomicU64;

use anyhow::ensure;
use memmap2::MmapRaw;

/// A shared mapping of a file as atomic words.
pub struct Words {
    memory: MmapRaw,
    count: usize,
}

impl Words {
    /// Maps the first `count` words of `file`.
    pub fn map(file: &File, count: usize) -> anyhow::Result<Words> {
        let bytes = count * size_of::<AtomicU64>();
        ensure!(file.metadata()?.len() >= bytes as u64, "the file has fewer than {bytes} bytes");
        Ok(Words { memory: memmap2::MmapOptions::new().len(bytes).map_raw(file)?, count })
    }

    /// A word.
    pub fn get(&self, index: usize) -> Option<&AtomicU64> {
        // SAFETY: within the mapping by the comparison, aligned since the mapping begins on a page; only accessed as atomics, here and in
        // the other process, which runs this same code.
        (index < self.count).then(|| unsafe { &*self.memory.as_mut_ptr().cast::<AtomicU64>().add(index) })
    }
}
