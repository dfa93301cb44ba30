//! What a channel in Buffered mode has done: its buffers have memory, and tensors are copied into them. Under the lock of the manager.

use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::base::stats::CommCounter;
use crate::link::duplex::Target;

use super::super::channel::{Actions, RemoteBuffer};
use super::super::event::{ChannelEvent, Landed};
use super::super::key::TensorId;
use super::super::message::{Packet, RemoteMr};
use super::super::value::Tensor;
use super::{ChannelIo, Place, TENSORS};

/// What the channel believes and its memory does not show: never seen.
#[cold]
fn no_memory(index: usize) -> Error {
    Error::internal(format!("buffer {index} has no memory"))
}

impl Actions<Tensor> for ChannelIo {
    fn grow(&mut self, outgoing: bool, index: usize, bytes: u64) -> Result<RemoteMr> {
        let bytes = usize::try_from(bytes).map_err(|_| Error::usage(format!("a buffer of {bytes} bytes")))?;
        let shared = self.link.maps_memory();
        let [coming, going] = &mut self.tensors;
        let buffers = if outgoing { going } else { coming };
        // It may have more than it was asked for before.
        let memory = match buffers.get(&index).filter(|memory| memory.len() >= bytes) {
            Some(memory) => memory.clone(),
            None => {
                let memory = self.memory.take(bytes, shared)?;
                let before = buffers.insert(index, memory.clone());
                before.into_iter().for_each(|memory| self.memory.give(memory));
                memory
            }
        };
        Ok(RemoteMr { addr: memory.view(0, bytes)?.addr() as u64, rkeys: memory.rkeys() })
    }

    fn give_up(&mut self, outgoing: bool, index: usize) {
        let [coming, going] = &mut self.tensors;
        let memory = if outgoing { going } else { coming }.remove(&index);
        memory.into_iter().for_each(|memory| self.memory.give(memory));
    }

    fn write(&mut self, index: usize, to: RemoteBuffer, packet: &Packet, tensor: Tensor) {
        let target = Target { sequence: TENSORS, addr: to.memory.addr, len: to.len, rkeys: to.memory.rkeys };
        let [_, going] = &self.tensors;
        match going.get(&index).cloned() {
            Some(memory) => {
                let packet = Box::new(packet.clone());
                self.fill(tensor, Place::Buffer { index, to: target, value: to.index, memory, packet });
            }
            None => self.broken = Some(no_memory(index)),
        }
    }

    fn find(&mut self, id: TensorId) {
        self.tell_find(id, false);
    }

    fn forget(&mut self, id: &TensorId) {
        self.tell_forget(id);
    }

    fn deliver(&mut self, index: usize, packet: &Packet) {
        self.count(CommCounter::Completions);
        match self.incoming(index).cloned() {
            Some(memory) => {
                let tensor = Arc::new(Landed::new(index, packet.meta, memory, self.pool.clone()));
                self.events.push_back(ChannelEvent::Landed { id: packet.id.clone(), tensor });
            }
            None => self.broken = Some(no_memory(index)),
        }
    }

    fn fail(&mut self, id: &TensorId, why: Error) {
        self.tell_failed(id, why);
    }

    fn withdrawn(&mut self, id: &TensorId) {
        self.tell_withdrawn(id);
    }
}
