//! One direction of a comm while it moves messages: what is posted, what is done, which slot is next. Called on the thread that drives a rank.

use anyhow::{Context, ensure};

use super::coordinator;
use super::payload::Payload;
use crate::perf::memory::Slots;
use crate::perf::message::MAX_OUTSTANDING;
use crate::plugin::{Buf, Opaque, Plugin};

/// A ring of requests over a ring of slots. Messages are numbered from 0 on for as long as it lives.
pub struct Flow {
    comm: Opaque,
    /// Registrations, in the order of the slots that they cover.
    mrs: Vec<Opaque>,
    /// Slots that each covers.
    covers: usize,
    slots: Slots,
    size: usize,
    /// Of a receive.
    room: usize,
    outstanding: u64,
    tag: i32,
    requests: [Option<Opaque>; MAX_OUTSTANDING],
    /// Messages whose slot is filled.
    filled: u64,
    /// Messages posted.
    pub posted: u64,
    /// Messages completed.
    pub done: u64,
}

impl Flow {
    /// For messages of `size` bytes, in slots of `room`. Allocates the slots and registers them, in as few pieces as the table takes.
    pub fn new(
        plugin: &Plugin,
        comm: Opaque,
        tag: i32,
        (size, room): (usize, usize),
        outstanding: usize,
        slots: usize,
    ) -> anyhow::Result<Flow> {
        let mut slots = Slots::new(slots, room)?;
        // NCCL's headers have int sizes before v8.
        let most = if plugin.version() >= 8 { usize::MAX } else { i32::MAX as usize };
        let covers = slots.within(most);
        let mrs = slots.pieces(covers).map(|(addr, len)| Ok(plugin.reg_mr(comm, addr, len)?)).collect::<anyhow::Result<_>>()?;
        let requests = [None; MAX_OUTSTANDING];
        Ok(Flow { comm, mrs, covers, slots, size, room, outstanding: outstanding as u64, tag, requests, filled: 0, posted: 0, done: 0 })
    }

    /// After [`super::payload::Pattern`] has been received: nothing else may have been written.
    pub fn check_margins(&self) -> anyhow::Result<()> {
        ensure!(self.slots.margins_intact(self.size), "a byte before or behind a message of {} bytes was overwritten", self.size);
        Ok(())
    }

    /// Moved so far.
    pub fn bytes(&self) -> u64 {
        self.done * self.size as u64
    }

    /// Deregisters.
    pub fn release(self, plugin: &Plugin) -> anyhow::Result<()> {
        self.mrs.into_iter().try_for_each(|mr| Ok(plugin.dereg_mr(self.comm, mr)?))
    }

    /// The registration that covers the slot of message `seq`.
    #[inline]
    fn mr(&self, seq: u64) -> Opaque {
        // One in nearly all cases, and no division then.
        if let [mr] = self.mrs[..] { mr } else { self.mrs[self.slots.index(seq) / self.covers] }
    }

    /// Posts sends up to message `target`, as many as may be outstanding and the plugin takes.
    #[inline]
    pub fn post_sends<P: Payload>(&mut self, plugin: &Plugin, target: u64, payload: P) -> anyhow::Result<bool> {
        let before = self.posted;
        while self.posted < target && self.posted - self.done < self.outstanding {
            let seq = self.posted;
            if self.filled == seq {
                payload.fill(self.slots.slot(seq), self.size, seq);
                self.filled += 1;
            }
            let Some(request) = plugin.isend(self.comm, self.slots.addr(seq), self.size, self.tag, self.mr(seq))? else { break };
            self.requests[seq as usize % MAX_OUTSTANDING] = Some(request);
            self.posted += 1;
        }
        Ok(self.posted != before)
    }

    /// Posts receives, likewise.
    #[inline]
    pub fn post_receives(&mut self, plugin: &Plugin, target: u64) -> anyhow::Result<bool> {
        let before = self.posted;
        while self.posted < target && self.posted - self.done < self.outstanding {
            let seq = self.posted;
            let buf = Buf { addr: self.slots.addr(seq), len: self.room, tag: self.tag, mr: self.mr(seq) };
            let Some(request) = plugin.irecv(self.comm, &[buf])? else { break };
            self.requests[seq as usize % MAX_OUTSTANDING] = Some(request);
            self.posted += 1;
        }
        Ok(self.posted != before)
    }

    /// Takes the sends that are done, oldest first.
    #[inline]
    pub fn take_sends<P: Payload>(&mut self, plugin: &Plugin, payload: P) -> anyhow::Result<bool> {
        let before = self.done;
        while self.done < self.posted && self.test(plugin)?.is_some() {
            payload.check_sent(self.slots.slot(self.done), self.size, self.done)?;
            self.done += 1;
        }
        Ok(self.done != before)
    }

    /// Takes the receives that are done, oldest first, and checks them.
    #[inline]
    pub fn take_receives<P: Payload>(&mut self, plugin: &Plugin, payload: P) -> anyhow::Result<bool> {
        let before = self.done;
        while self.done < self.posted {
            let Some(size) = self.test(plugin)? else { break };
            let seq = self.done;
            if size as usize != self.size {
                return wrong_size(seq, size, self.size);
            }
            payload.check(self.slots.slot(seq), self.size, seq)?;
            self.done += 1;
        }
        coordinator::count(self.done - before);
        Ok(self.done != before)
    }

    #[inline]
    fn test(&self, plugin: &Plugin) -> anyhow::Result<Option<i32>> {
        let request = self.requests[self.done as usize % MAX_OUTSTANDING].context("a request is posted")?;
        Ok(plugin.test(request)?.map(|sizes| sizes[0]))
    }
}

#[cold]
fn wrong_size(seq: u64, reported: i32, size: usize) -> anyhow::Result<bool> {
    anyhow::bail!("test reported {reported} bytes for message {seq} of {size}")
}
