//! What a channel in Direct mode has done: slots are opened over memory, and tensors are written from where they are. Under the lock of the manager.

use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::base::stats::CommCounter;

use super::super::direct::{Actions, Announced};
use super::super::event::ChannelEvent;
use super::super::key::TensorId;
use super::super::memory::Memory;
use super::super::message::{Meta, RemoteMr};
use super::super::value::Tensor;
use super::{ChannelIo, Opened, Place};

/// Slots that are left to tensors of which their producer has told.
const KEPT_SLOTS: usize = 64;
/// While so many bytes of the library's memory are open to another worker no more are opened: for tensors that are there, and as many for those that may
/// not be produced for long. Few, so that memory is used again while it is in a cache; as many as a fast network has under way at a time.
const OPEN: usize = 4 << 20;

impl Actions<Tensor, Arc<Memory>> for ChannelIo {
    fn open(&mut self, into: Option<&Arc<Memory>>, bytes: u64, ahead: bool) -> Result<Option<Announced>> {
        let (len, kept) = (bytes as usize, if ahead { KEPT_SLOTS } else { 0 });
        let pooled = if into.is_none() { len } else { 0 };
        let open = &mut self.open[usize::from(ahead)];
        if self.link.free_slots() <= kept || pooled > 0 && *open >= OPEN {
            return Ok(None);
        }
        let memory = match into {
            Some(memory) => memory.clone(),
            None => Arc::new(self.pool.take(len)?),
        };
        let Some(place) = memory.view(len) else {
            return Err(Error::usage(format!("a tensor of {bytes} bytes, received into {}", memory.len())));
        };
        let (addr, (_, rkeys)) = (place.addr() as u64, memory.keys());
        let Some(sequence) = self.link.open(bytes) else { return Ok(None) };
        *open += pooled;
        self.opened.insert(sequence, Opened { memory, pooled, ahead });
        Ok(Some(Announced { sequence, memory: RemoteMr { addr, rkeys }, bytes }))
    }

    fn close(&mut self, sequence: u64) {
        self.link.close(sequence);
        self.take_opened(sequence);
    }

    fn write(&mut self, to: &Announced, tensor: Tensor) {
        match tensor.memory().filter(|memory| memory.is_registered(&self.pool)) {
            Some(memory) => {
                self.link.stats().add(CommCounter::Copied, if memory.is_copy() { tensor.len() as u64 } else { 0 });
                self.write_from(*to, tensor);
            }
            None => self.fill(tensor, Place::Pooled { to: *to, pool: self.pool.clone(), copy: None }),
        }
    }

    fn find(&mut self, id: TensorId, again: bool) {
        self.tell_find(id, again);
    }

    fn forget(&mut self, id: &TensorId) {
        self.tell_forget(id);
    }

    fn give_back(&mut self, id: &TensorId, tensor: Tensor) {
        self.events.push_back(ChannelEvent::Back { id: id.clone(), tensor });
    }

    fn deliver(&mut self, id: TensorId, meta: &Meta, sequence: Option<u64>) {
        self.count(CommCounter::Completions);
        let tensor = match sequence.map(|sequence| self.take_opened(sequence)) {
            Some(Some(memory)) => Tensor::placed(*meta, memory),
            Some(None) => {
                self.broken = Some(Error::internal("a slot has no memory"));
                return;
            }
            None => Tensor::received(*meta, Vec::new()),
        };
        self.events.push_back(ChannelEvent::Here { id, tensor });
    }

    fn fail(&mut self, id: &TensorId, why: Error) {
        self.tell_failed(id, why);
    }

    fn no_memory(&mut self, id: &TensorId, why: Error) {
        self.count(CommCounter::Errors);
        self.events.push_back(ChannelEvent::NoMemory { id: id.clone(), why });
    }

    fn withdrawn(&mut self, id: &TensorId) {
        self.tell_withdrawn(id);
    }
}
