//! The limit of one TCP stream: rank 0 sends whole messages, rank 1 receives them, both blocking, no headers. It has the congestion control
//! that does not pace loopback.

use std::io::{Read, Write};
use std::net::TcpStream;

use super::super::memory::Slots;
use super::super::message::{Block, Round};
use super::super::rank::coordinator::{self, Coordinator};
use super::super::rank::job::{Begin, Job, Meter};
use super::tcp;

/// A connection and slots.
pub struct TcpLoop {
    stream: TcpStream,
    slots: Slots,
    size: usize,
    rank: usize,
}

impl TcpLoop {
    /// Allocates and connects.
    pub fn new(block: Block, rank: usize, coordinator: &mut Coordinator) -> anyhow::Result<(TcpLoop, String)> {
        let slots = Slots::new(block.slots, block.size)?;
        let (stream, note) = tcp::pair(rank, coordinator)?;
        Ok((TcpLoop { stream, slots, size: block.size, rank }, note))
    }
}

impl Job for TcpLoop {
    fn round(&mut self, _: &mut Coordinator, messages: u64, begin: Begin) -> anyhow::Result<Round> {
        let meter = Meter::start(begin);
        for seq in 0..messages {
            let slot = &mut self.slots.slot(seq)[..self.size];
            if self.rank == 0 {
                slot[0] = seq as u8;
                self.stream.write_all(slot)?;
            } else {
                self.stream.read_exact(slot)?;
                anyhow::ensure!(slot[0] == seq as u8, "message {seq} carries stamp {:#04x}", slot[0]);
            }
        }
        coordinator::count(messages);
        Ok(meter.stop())
    }
}
