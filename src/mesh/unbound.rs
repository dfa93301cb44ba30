//! Memory for messages with tags, as Gloo's unbound buffers: sent to any rank, received from one or from any of several, at any offset. On the caller's
//! threads, any number.

use std::future::poll_fn;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Duration;

use crate::base::error::Result;
use crate::base::mem::UserMemory;
use crate::base::sync::lock;

use super::context::{Context, Mesh};
use super::device::Registered;
use super::outstanding::{DROP_TIMEOUT, Outstanding, Waited, closed};
use super::protocol::Tag;

/// Memory that messages come from and go to.
pub struct UnboundBuffer {
    mesh: Arc<Context>,
    /// Until it is closed.
    memory: Mutex<Option<Registered>>,
    sends: Outstanding,
    recvs: Outstanding,
}

impl UnboundBuffer {
    /// Registers memory, which must stay until the buffer is closed.
    ///
    /// Errors: a range that cannot be registered.
    pub fn new(mesh: &Mesh, memory: UserMemory) -> Result<UnboundBuffer> {
        let memory = Mutex::new(Some(mesh.device.register(memory)?));
        Ok(UnboundBuffer { mesh: mesh.attended(), memory, sends: Outstanding::default(), recvs: Outstanding::default() })
    }

    fn memory<T>(&self, f: impl FnOnce(&Registered) -> Result<T>) -> Result<T> {
        lock(&self.memory).as_ref().map_or_else(|| Err(closed()), f)
    }

    /// Sends bytes to a rank, all from `offset` on if `len` is none. They must not change before [`UnboundBuffer::wait_send`] has told of it.
    ///
    /// Errors: bytes outside the buffer; a rank that there is not, or that is lost; a mesh that has failed.
    pub fn send(&self, rank: usize, tag: u64, offset: usize, len: Option<usize>) -> Result<()> {
        let part = self.memory(|memory| memory.part(offset, len.unwrap_or(memory.len().saturating_sub(offset))))?;
        self.sends.start(offset, || self.mesh.with(|core| core.send(rank, Tag::User(tag), part)))?;
        Ok(())
    }

    /// Receives a message of just so many bytes, from whichever of these ranks has one first. Messages of a rank with one tag come in the order in
    /// which they were sent.
    ///
    /// Errors: as for [`UnboundBuffer::send`].
    pub fn recv(&self, ranks: &[usize], tag: u64, offset: usize, len: Option<usize>) -> Result<()> {
        let len = |memory: &Registered| len.unwrap_or(memory.len().saturating_sub(offset));
        let place = self.memory(|memory| Ok(memory.place(offset, len(memory))?.place))?;
        self.recvs.start(offset, || self.mesh.with(|core| core.recv(ranks, Tag::User(tag), place)))?;
        Ok(())
    }

    /// Waits until one of the sends is done.
    ///
    /// Errors: the mesh has failed, or does as this took too long; the buffer is closed meanwhile.
    pub fn wait_send(&self, timeout: Duration) -> Result<Waited> {
        self.sends.wait(&self.mesh, "wait_send", timeout, |_, _| ())
    }

    /// Waits until one of the receives is done.
    ///
    /// Errors: as for [`UnboundBuffer::wait_send`].
    pub fn wait_recv(&self, timeout: Duration) -> Result<Waited> {
        self.recvs.wait(&self.mesh, "wait_recv", timeout, |offset, bytes| self.put(offset, bytes))
    }

    fn put(&self, offset: usize, bytes: &[u8]) {
        if let Some(Ok(view)) = lock(&self.memory).as_ref().map(|memory| memory.view(offset, bytes.len())) {
            view.write(bytes);
        }
    }

    /// Whether one of the sends is done that nobody was told of: that one.
    ///
    /// Errors: the mesh has failed; the buffer is closed.
    pub fn test_send(&self) -> Result<Option<Waited>> {
        self.sends.test(&self.mesh, |_, _| ())
    }

    /// Whether one of the receives is done that nobody was told of: that one.
    ///
    /// Errors: as for [`UnboundBuffer::test_send`].
    pub fn test_recv(&self) -> Result<Option<Waited>> {
        self.recvs.test(&self.mesh, |offset, bytes| self.put(offset, bytes))
    }

    /// Ends one [`UnboundBuffer::wait_send`]: that which goes on, or else the next.
    pub fn abort_send(&self) {
        self.sends.abort(&self.mesh);
    }

    /// Ends one [`UnboundBuffer::wait_recv`]: that which goes on, or else the next.
    pub fn abort_recv(&self) {
        self.recvs.abort(&self.mesh);
    }

    /// Takes back the sends and receives that nothing has come of, and waits for the others. Nobody reads or writes the memory after that.
    ///
    /// Errors: it took too long. The mesh has failed then, and nobody touches the memory either.
    pub fn close(&self, timeout: Duration) -> Result<()> {
        self.sends.close();
        self.recvs.close();
        self.mesh.wake();
        let failed_before = self.mesh.check().is_err();
        let ended = poll_fn(|_| {
            let (sent, received) = (self.sends.poll_closed(&self.mesh), self.recvs.poll_closed(&self.mesh));
            match self.mesh.check() {
                _ if sent && received => Poll::Ready(Ok(())),
                Err(_) if failed_before => Poll::Ready(Ok(())),
                Err(error) => Poll::Ready(Err(error)),
                Ok(()) => Poll::Pending,
            }
        });
        let closed = self.mesh.block_on("close of a buffer", ended, timeout);
        self.mesh.wait_until_heard();
        *lock(&self.memory) = None;
        self.sends.forget(&self.mesh);
        self.recvs.forget(&self.mesh);
        closed
    }
}

impl Drop for UnboundBuffer {
    fn drop(&mut self) {
        if lock(&self.memory).is_some() {
            let _ = self.close(DROP_TIMEOUT);
        }
    }
}
