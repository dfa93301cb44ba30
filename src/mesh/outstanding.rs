//! What a buffer's owner has asked for and not yet waited for. On the caller's threads, any number.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::Mutex;
use std::task::Poll;
use std::time::Duration;

use crate::base::error::{Error, Result};
use crate::base::sync::lock;

use super::context::Context;
use super::ops::{OpId, Outcome};

/// How long a buffer that is dropped without being closed waits for what is on its way: Gloo's default for all waits (gloo/transport/context.h).
pub const DROP_TIMEOUT: Duration = Duration::from_secs(30);

/// How a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// A message is through.
    Done {
        /// The peer.
        rank: usize,
        /// Its bytes; of one into the slot of a buffer, 0.
        len: u64,
    },
    /// The wait was aborted; what was waited for is outstanding still.
    Aborted,
}

/// Operations of one kind, in the order in which they were asked for.
#[derive(Debug, Default)]
pub struct Outstanding(Mutex<List>);

#[derive(Debug, Default)]
struct List {
    /// With the offset of what a receive gets.
    ops: VecDeque<(OpId, usize)>,
    aborted: bool,
    closed: bool,
}

impl Outstanding {
    /// Notes what `start` starts.
    ///
    /// Errors: its own; a buffer that is closed.
    pub fn start(&self, offset: usize, start: impl FnOnce() -> Result<OpId>) -> Result<()> {
        let mut list = lock(&self.0);
        if list.closed {
            return Err(closed());
        }
        list.ops.push_back((start()?, offset));
        Ok(())
    }

    /// Waits until one has ended, or the wait is aborted. The bytes of a small message are `put` to their offset.
    ///
    /// Errors: that one's; the mesh has failed; a wait that took too long, and then the mesh has failed; the buffer is closed meanwhile.
    pub fn wait(&self, mesh: &Context, what: &str, timeout: Duration, put: impl Fn(usize, &[u8])) -> Result<Waited> {
        mesh.block_on(what, poll_fn(|_| self.poll(mesh, &put)), timeout)?
    }

    /// Whether one has ended that nobody was told of: that one.
    ///
    /// Errors: as for [`Outstanding::wait`], but for the time.
    pub fn test(&self, mesh: &Context, put: impl Fn(usize, &[u8])) -> Result<Option<Waited>> {
        let look = || lock(&self.0).poll(mesh, &put);
        let mut found = look();
        if found.is_pending() {
            // Who looks again and again may have the core of whoever drives the mesh.
            std::thread::yield_now();
            found = look();
        }
        match found {
            Poll::Ready(result) => result?.map(Some),
            Poll::Pending => Ok(None),
        }
    }

    fn poll(&self, mesh: &Context, put: impl Fn(usize, &[u8])) -> Poll<Result<Result<Waited>>> {
        let mut list = lock(&self.0);
        if std::mem::take(&mut list.aborted) && !list.closed {
            return Poll::Ready(Ok(Ok(Waited::Aborted)));
        }
        list.poll(mesh, put)
    }

    /// Ends the wait of one thread that waits, or else the next wait, though nothing has ended.
    pub fn abort(&self, mesh: &Context) {
        lock(&self.0).aborted = true;
        mesh.wake();
    }

    /// Nothing is asked for any more.
    pub fn close(&self) {
        lock(&self.0).closed = true;
    }

    /// Takes everything back that nothing has come of; whether all has ended.
    pub fn poll_closed(&self, mesh: &Context) -> bool {
        let mut list = lock(&self.0);
        mesh.with(|core| {
            list.ops.retain(|(op, _)| {
                core.cancel(*op);
                core.ops.take(*op).is_none()
            });
            list.ops.is_empty()
        })
    }

    /// Forgets what is left, which a mesh that has failed does not touch any more.
    pub fn forget(&self, mesh: &Context) {
        let mut list = lock(&self.0);
        mesh.with(|core| list.ops.drain(..).for_each(|(op, _)| core.ops.forget(op)));
    }
}

impl List {
    /// An error inside is not the mesh's.
    fn poll(&mut self, mesh: &Context, put: impl Fn(usize, &[u8])) -> Poll<Result<Result<Waited>>> {
        if self.closed {
            return Poll::Ready(Ok(Err(closed())));
        }
        let mut core = mesh.driver.lock();
        for at in 0..self.ops.len() {
            if let Some((outcome, offset)) = self.ops.get(at).and_then(|(op, offset)| Some((core.ops.take(*op)?, *offset))) {
                self.ops.remove(at);
                return Poll::Ready(Ok(match outcome {
                    Outcome::Done { rank, len, small } => {
                        drop(core);
                        if let Some(small) = small {
                            put(offset, small.bytes());
                        }
                        Ok(Waited::Done { rank, len })
                    }
                    Outcome::Failed(failure) => Err(failure.error()),
                    Outcome::Cancelled => Err(closed()),
                }));
            }
        }
        match core.check() {
            Ok(()) => Poll::Pending,
            Err(error) => Poll::Ready(Err(error)),
        }
    }
}

/// For whoever uses a buffer that is closed.
#[cold]
pub fn closed() -> Error {
    Error::usage("the buffer is closed")
}
