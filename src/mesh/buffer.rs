//! Memory that two ranks share by the number of a slot, as Gloo's buffers: one sends into it at any offset and at any time, the other waits for what has
//! come. On the caller's threads, any number.

use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use crate::base::error::{Error, Result};
use crate::base::mem::UserMemory;
use crate::base::sync::lock;

use super::context::{Context, Mesh};
use super::core::named;
use super::device::Registered;
use super::ops::{Asked, OpId, Outcome, What};
use super::outstanding::{DROP_TIMEOUT, Outstanding, Waited, closed};
use super::slots::SlotSend;

/// One end of a slot.
pub struct Buffer {
    mesh: Arc<Context>,
    peer: usize,
    slot: u64,
    /// Whether the peer writes to it.
    receives: bool,
    /// Until it is closed.
    memory: Mutex<Option<Registered>>,
    outstanding: Outstanding,
    /// Whether it is closed. Held while it is being closed, so that a second call returns when the first does.
    is_closed: Mutex<bool>,
}

impl Buffer {
    /// Memory whose bytes are sent into the peer's buffer of the same slot.
    ///
    /// Errors: a slot that another buffer of this rank sends to; a rank that there is not, or that is lost; a range that cannot be registered.
    pub fn send_to(mesh: &Mesh, peer: usize, slot: u64, memory: UserMemory) -> Result<Buffer> {
        let memory = mesh.device.register_input(memory)?;
        mesh.with(|core| core.pair(peer)?.take_outgoing(slot).map_err(|error| named(peer, error)))?;
        Ok(Buffer::new(mesh, peer, slot, false, memory))
    }

    /// Memory that the peer sends into.
    ///
    /// Errors: a slot that another buffer of this rank receives into; and as for [`Buffer::send_to`].
    pub fn recv_from(mesh: &Mesh, peer: usize, slot: u64, memory: UserMemory) -> Result<Buffer> {
        let memory = mesh.device.register(memory)?;
        let place = memory.place(0, memory.len())?.place;
        mesh.with(|core| core.pair(peer)?.take_incoming(slot, place).map_err(|error| named(peer, error)))?;
        Ok(Buffer::new(mesh, peer, slot, true, memory))
    }

    fn new(mesh: &Mesh, peer: usize, slot: u64, receives: bool, memory: Registered) -> Buffer {
        Buffer {
            mesh: mesh.attended(),
            peer,
            slot,
            receives,
            memory: Mutex::new(Some(memory)),
            outstanding: Outstanding::default(),
            is_closed: Mutex::new(false),
        }
    }

    fn asked(&self) -> Asked {
        Asked { rank: Some(self.peer), receives: self.receives, what: What::Slot(self.slot) }
    }

    /// Errors: this end does not do that.
    fn must(&self, receive: bool) -> Result<()> {
        let words = |receives| if receives { "receives" } else { "sends" };
        if self.receives == receive {
            return Ok(());
        }
        Err(Error::usage(format!("slot {}: a buffer that {}, not one that {}", self.slot, words(self.receives), words(receive))))
    }

    /// Sends bytes, all from `offset` on if `len` is none, to `remote_offset` of the peer's memory. They must not change before
    /// [`Buffer::wait_send`] has told of it. Messages come in the order in which they were sent. One that does not fit is an error of its wait.
    ///
    /// Errors: bytes outside the buffer; one that receives; a rank that is lost; a mesh that has failed.
    pub fn send(&self, offset: usize, len: Option<usize>, remote_offset: u64) -> Result<()> {
        self.must(false)?;
        let part = {
            let memory = lock(&self.memory);
            let memory = memory.as_ref().ok_or_else(closed)?;
            memory.part(offset, len.unwrap_or(memory.len().saturating_sub(offset)))?
        };
        self.outstanding.start(0, || {
            self.mesh.start(self.asked(), |core, op| {
                let (pair, ops) = core.pair_and_ops(self.peer)?;
                pair.send_slot(self.slot, SlotSend { op, part, offset: remote_offset }, ops).map_err(|error| named(self.peer, error))
            })
        })?;
        Ok(())
    }

    /// Waits until one of the sends is done.
    ///
    /// Errors: it does not fit the peer's memory; the mesh has failed, or does as this took too long; the buffer is closed meanwhile.
    pub fn wait_send(&self, timeout: Duration) -> Result<Waited> {
        self.must(false)?;
        self.outstanding.wait(&self.mesh, "wait_send", timeout, |_, _| ())
    }

    /// Waits until the next message has come.
    ///
    /// Errors: the mesh has failed, or does as this took too long; the buffer is closed meanwhile.
    pub fn wait_recv(&self, timeout: Duration) -> Result<Waited> {
        self.must(true)?;
        self.outstanding.start(0, || {
            self.mesh.start(self.asked(), |core, op| {
                let (pair, ops) = core.pair_and_ops(self.peer)?;
                pair.recv_slot(self.slot, op, ops);
                Ok(())
            })
        })?;
        self.outstanding.wait(&self.mesh, "wait_recv", timeout, |_, _| ())
    }

    /// Ends it: what was not sent yet is not; what is on its way is waited for. Nobody reads or writes the memory after that, and the slot may be used
    /// again. A second call does nothing.
    ///
    /// Errors: it took too long. The mesh has failed then, and nobody touches the memory either.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        let mut is_closed = lock(&self.is_closed);
        if std::mem::replace(&mut *is_closed, true) {
            return Ok(());
        }
        let failed_before = self.mesh.check().is_err();
        self.outstanding.close();
        self.mesh.wake();
        // Threads that wait for messages do so no more, as the slot forgets them.
        self.outstanding.poll_closed(&self.mesh);
        // A rank that is lost has nothing to be told.
        let closing = self.mesh.start(Asked { what: What::Closing(self.slot), ..self.asked() }, |core, op| {
            let (pair, ops) = core.pair_and_ops(self.peer)?;
            if self.receives {
                return pair.close_incoming(op, self.slot, ops);
            }
            pair.give_outgoing(self.slot, ops);
            ops.end(op, Outcome::Cancelled);
            Ok(())
        });
        let told = |op: OpId| self.mesh.with(|core| core.ops.take(op).is_some());
        let mut closing = closing.ok();
        let ended = poll_fn(|_| {
            closing = closing.take_if(|op| !told(*op));
            let ended = self.outstanding.poll_closed(&self.mesh) && closing.is_none();
            match self.mesh.check() {
                _ if ended => Poll::Ready(Ok(())),
                Err(_) if failed_before => Poll::Ready(Ok(())),
                Err(error) => Poll::Ready(Err(error)),
                Ok(()) => Poll::Pending,
            }
        });
        let closed = self.mesh.block_on("close of a buffer", ended, timeout);
        self.mesh.wait_until_heard();
        *lock(&self.memory) = None;
        self.outstanding.forget(&self.mesh);
        closed
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if lock(&self.memory).is_some() {
            let _ = self.close(DROP_TIMEOUT);
        }
    }
}
