//! The limit of one copying core: memcpy from as many slots of private memory to as many others. Rank 0 copies, rank 1 has nothing to do.

use super::super::memory::Slots;
use super::super::message::{Block, Round};
use super::super::rank::coordinator::{self, Coordinator};
use super::super::rank::job::{Begin, Job, Meter};

/// The slots; none in rank 1.
pub struct Memcpy {
    slots: Option<(Slots, Slots)>,
    size: usize,
}

impl Memcpy {
    /// Allocates.
    pub fn new(block: Block, rank: usize) -> anyhow::Result<Memcpy> {
        let slots = || Slots::new(block.slots, block.size);
        Ok(Memcpy { slots: if rank == 0 { Some((slots()?, slots()?)) } else { None }, size: block.size })
    }
}

impl Job for Memcpy {
    fn round(&mut self, _: &mut Coordinator, messages: u64, begin: Begin) -> anyhow::Result<Round> {
        let Some((from, to)) = &mut self.slots else { return Ok(Round::default()) };
        let meter = Meter::start(begin);
        for seq in 0..messages {
            // As a plugin's messages: stamped, so that no copy can be left out.
            let source = from.slot(seq);
            source[0] = seq as u8;
            let target = to.slot(seq);
            target[..self.size].copy_from_slice(&source[..self.size]);
            std::hint::black_box(target);
        }
        coordinator::count(messages);
        Ok(meter.stop())
    }
}
