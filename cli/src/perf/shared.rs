//! Words in memory that two processes have mapped. Used by the limits.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicU64;

use anyhow::{Context, ensure};
use memmap2::MmapRaw;

use super::os;
use super::rank::coordinator::Coordinator;

/// A shared mapping of a file as atomic words.
pub struct Words {
    memory: MmapRaw,
    count: usize,
}

impl Words {
    /// Maps `count` words of a file of rank 0 in both ranks, which call it at the same time. They are zero.
    pub fn of_both(count: usize, rank: usize, coordinator: &mut Coordinator) -> anyhow::Result<Words> {
        let file = os::memory_file()?;
        let theirs = coordinator.swap(format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()))?;
        let file = if rank == 0 {
            file.set_len((count * size_of::<AtomicU64>()) as u64)?;
            coordinator.swap(String::new())?;
            file
        } else {
            coordinator.swap(String::new())?;
            let theirs = File::options().read(true).write(true).open(&theirs);
            theirs.context("the kernel refuses to open a file of another process")?
        };
        // Not before both have it open.
        coordinator.swap(String::new())?;
        Words::map(&file, count)
    }

    /// Maps the first `count` words of `file`.
    fn map(file: &File, count: usize) -> anyhow::Result<Words> {
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
