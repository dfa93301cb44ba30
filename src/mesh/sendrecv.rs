//! A step of a collective of small messages: a rank sends to one and receives from another. Its message goes at once where nothing is before it, and one
//! that comes within a few polls is had under the same lock, without an operation. On the caller's thread.

use crate::base::error::Result;
use crate::base::stats::CommCounter;

use super::context::Context;
use super::core::{Core, named};
use super::device::{Destination, Part};
use super::protocol::Small;
use super::protocol::Tag;

/// Polls before a message is waited for like any other.
const POLLS: u32 = 64;

/// What was done at once.
enum Done {
    /// Nothing.
    Neither,
    /// The message was sent; the other one is not here yet.
    Sent,
    /// All of it.
    Both(Small),
}

impl Context {
    /// Sends a small message to a rank, and receives one of `len` bytes from one.
    ///
    /// Errors: as for [`Context::send`].
    pub(super) async fn sendrecv(&self, to: usize, small: Small, from: usize, len: usize, tag: u64) -> Result<Small> {
        let is_sent = match self.sendrecv_at_once(to, small, from, len, Tag::Collective(tag))? {
            Done::Neither => false,
            Done::Sent => true,
            Done::Both(small) => return Ok(small),
        };
        let received = self.recv(from, tag, Destination::inside(len))?;
        if !is_sent {
            self.send(to, tag, Part::inside(small))?.await?;
        }
        received.await.map(|small| small.unwrap_or(Small::NONE))
    }

    fn sendrecv_at_once(&self, to: usize, small: Small, from: usize, len: usize, tag: Tag) -> Result<Done> {
        let Some(mut core) = self.driver.lock_to_poll() else { return Ok(Done::Neither) };
        if !core.send_small(to, tag, small)? {
            return Ok(Done::Neither);
        }
        for _ in 0..POLLS {
            if let Some(small) = core.take_small(from, tag, len) {
                return Ok(Done::Both(small));
            }
            self.driver.poll(&mut core);
        }
        Ok(Done::Sent)
    }
}

impl Core {
    /// Sends a small message, if it need not wait; whether it did.
    ///
    /// Errors: as for [`Core::send`].
    fn send_small(&mut self, rank: usize, tag: Tag, small: Small) -> Result<bool> {
        self.check_all(tag)?;
        let pair = self.pair(rank)?;
        let sent = pair.send_small(tag, small).map_err(|error| named(rank, error))?;
        if sent {
            pair.stats().add(CommCounter::Ops, 1);
            pair.stats().add(CommCounter::Completions, 1);
        }
        Ok(sent)
    }

    /// Receives a small message of this length, if it is here.
    fn take_small(&mut self, rank: usize, tag: Tag, len: usize) -> Option<Small> {
        let small = self.small.take(rank, tag, len)?;
        self.received_small(Some(rank), tag);
        if let Ok(pair) = self.pair(rank) {
            pair.stats().add(CommCounter::Ops, 1);
            pair.stats().add(CommCounter::Completions, 1);
        }
        Some(small)
    }
}
