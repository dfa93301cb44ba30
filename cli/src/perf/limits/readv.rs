//! The limit of one side copying across processes: process_vm_readv in a bare loop over the slots of the other process. Rank 1 reads, rank 0
//! only owns the slots.

use anyhow::{Context, bail};

use super::super::memory::Slots;
use super::super::message::{Block, Round};
use super::super::os;
use super::super::rank::coordinator::{self, Coordinator};
use super::super::rank::job::{Begin, Job, Meter};

/// The slots of this rank, and in rank 1 where those of the other are.
pub struct Readv {
    slots: Slots,
    block: Block,
    peer: Option<Peer>,
}

struct Peer {
    pid: u32,
    addr: usize,
    stride: usize,
}

impl Readv {
    /// Allocates, and reads once.
    pub fn new(block: Block, rank: usize, coordinator: &mut Coordinator) -> anyhow::Result<Readv> {
        let mut slots = Slots::new(block.slots, block.size)?;
        let (addr, len) = slots.whole();
        let theirs = coordinator.swap(format!("{} {}", std::process::id(), addr as usize))?;
        let (pid, addr) = theirs.split_once(' ').context("no address")?;
        let (pid, addr) = (pid.parse()?, addr.parse()?);
        os::allow_attach(pid);
        // Until the other side has allowed it too.
        coordinator.swap(String::new())?;
        let peer = (rank == 1).then_some(Peer { pid, addr, stride: len / block.slots });
        let mut readv = Readv { slots, block, peer };
        readv.read(0).context("the kernel refuses to read another process's memory (process_vm_readv)")?;
        Ok(readv)
    }

    fn read(&mut self, seq: u64) -> anyhow::Result<()> {
        let Some(Peer { pid, addr, stride }) = self.peer else { return Ok(()) };
        let from = addr + (seq % self.block.slots as u64) as usize * stride;
        match os::read_peer(pid, from, &mut self.slots.slot(seq)[..self.block.size])? {
            n if n == self.block.size => Ok(()),
            n => bail!("{n} of {} bytes were read", self.block.size),
        }
    }
}

impl Job for Readv {
    fn round(&mut self, _: &mut Coordinator, messages: u64, begin: Begin) -> anyhow::Result<Round> {
        if self.peer.is_none() {
            return Ok(Round::default());
        }
        let meter = Meter::start(begin);
        for seq in 0..messages {
            self.read(seq)?;
        }
        coordinator::count(messages);
        Ok(meter.stop())
    }
}
