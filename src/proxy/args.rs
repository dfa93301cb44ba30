//! One operation on a connector: its steps, and how many of them are done. NCCL's ncclProxyArgs (nccl v2.7.8 src/include/proxy.h) without the
//! fields that the engine has. Made on the appending thread, advanced by `send` and `recv` on the engine's.

use std::fmt;

use super::net::NetRequest;
use super::protocol::Protocol;
use super::ring::STEPS;
use super::ring::layout::round_up;
use super::ring::rules::{Position, check_slice};
use crate::base::error::{Error, Result};

/// The steps of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Steps {
    /// How many steps: a multiple of `slice`, and at least one slice.
    pub count: u64,
    /// Steps that make one message: 1, 2, 4 or 8.
    pub slice: u64,
    /// The operation starts at the next multiple of this: 1, 2, 4 or 8, and at least `slice`.
    pub chunk: u64,
    /// How the producer marks a slot as filled.
    pub protocol: Protocol,
}

impl Steps {
    /// `count` steps of SIMPLE, each a message.
    pub fn simple(count: u64) -> Steps {
        Steps { count, slice: 1, chunk: 1, protocol: Protocol::Simple }
    }

    /// Checks the numbers.
    pub fn check(&self) -> Result<()> {
        check_slice(self.slice)?;
        let Steps { count, slice, chunk, .. } = *self;
        if check_slice(chunk).is_err() || chunk < slice {
            return Err(Error::usage(format!("{chunk} steps a chunk; accepted: 1, 2, 4 or 8, and not less than the {slice} of a slice")));
        }
        // From 2^63 on the difference of two counters would change its sign.
        if count == 0 || !count.is_multiple_of(slice) || count > i64::MAX as u64 {
            return Err(Error::usage(format!(
                "an operation of {count} steps; accepted: a multiple of its slice's {slice}, up to 2^63 - 1"
            )));
        }
        Ok(())
    }
}

/// What an operation waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Nothing: it was not stepped yet, or its last step moved something.
    Nothing,
    /// The local producer to fill a step.
    Producer,
    /// The local producer's flags: it has published the size, but not all of the data.
    Flags,
    /// The network to accept a send: the peer has not posted a receive.
    Receiver,
    /// The network to complete a send.
    Sent,
    /// The local consumer to free a step.
    Consumer,
    /// The network to accept a receive.
    Posted,
    /// The network to complete a receive: the peer has not sent.
    Sender,
    /// The network to flush what was received.
    Flush,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Wait::Nothing => "nothing",
            Wait::Producer => "the local producer to fill a step",
            Wait::Flags => "the local producer's flags",
            Wait::Receiver => "the peer to post a receive",
            Wait::Sent => "the network to complete a send",
            Wait::Consumer => "the local consumer to free a step",
            Wait::Posted => "the network to accept a receive",
            Wait::Sender => "the peer to send",
            Wait::Flush => "the network to flush received data",
        })
    }
}

/// An operation and its progress. The counters count the ring's steps, and wrap.
#[derive(Debug)]
pub struct Args {
    /// What it moves.
    pub steps: Steps,
    /// Whether it was stepped, so that the counters below are set.
    pub started: bool,
    /// Its first step.
    pub base: u64,
    /// End of the steps that are complete: published to the ring's other side.
    pub head: u64,
    /// End of the steps that are received; those from `head` on may wait for a flush. Not used by sends.
    pub received: u64,
    /// End of the steps that are posted to the network.
    pub tail: u64,
    /// End of its last step.
    pub end: u64,
    /// The outstanding requests, by slot.
    pub requests: [Option<NetRequest>; STEPS as usize],
    /// Bytes received, by slot.
    pub sizes: [u32; STEPS as usize],
    /// Lines of the next step whose flags are set.
    pub lines: usize,
    /// What it waits for.
    pub wait: Wait,
}

impl Args {
    /// An operation that was not stepped yet.
    ///
    /// Errors: those of [`Steps::check`].
    pub fn new(steps: Steps) -> Result<Args> {
        steps.check()?;
        let requests = [const { None }; STEPS as usize];
        let (sizes, wait) = ([0; STEPS as usize], Wait::Nothing);
        Ok(Args { steps, started: false, base: 0, head: 0, received: 0, tail: 0, end: 0, requests, sizes, lines: 0, wait })
    }

    /// Starts the operation on a connector whose operations so far ended at `step`. True if it skips steps to start at a multiple of its chunk.
    pub fn start(&mut self, step: u64) -> bool {
        let base = round_up(step, self.steps.chunk);
        (self.base, self.head, self.received, self.tail) = (base, base, base, base);
        self.end = base.wrapping_add(self.steps.count);
        self.started = true;
        base != step
    }

    /// Whether another slice may be posted: there is one, and no more than [`STEPS`] would be in flight.
    #[inline]
    pub fn may_post(&self) -> bool {
        self.tail != self.end && self.tail.wrapping_sub(self.head) + self.steps.slice <= STEPS
    }

    /// The counters of this side of the ring.
    #[inline]
    pub fn position(&self) -> Position {
        Position { published: self.head, claimed: self.tail, fresh: self.tail == self.base }
    }
}

impl fmt::Display for Args {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Steps { count, slice, protocol, .. } = self.steps;
        write!(f, "{count} steps of {protocol}")?;
        if slice > 1 {
            write!(f, ", {slice} a slice")?;
        }
        if self.started {
            let [done, posted] = [self.head, self.tail].map(|counter| counter.wrapping_sub(self.base));
            write!(f, ", from step {}: {posted} posted, {done} done; waits for {}", self.base, self.wait)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_steps_are_refused() {
        let steps = |count, slice, chunk| Steps { count, slice, chunk, protocol: Protocol::Simple };
        for good in [(1, 1, 1), (4, 2, 4), (8, 8, 8), (6, 2, 8), (i64::MAX as u64, 1, 1)] {
            assert!(steps(good.0, good.1, good.2).check().is_ok(), "{good:?}");
        }
        for bad in [(0, 1, 1), (3, 2, 2), (4, 4, 2), (8, 8, 16), (3, 3, 3), (1, 0, 1), (1 << 63, 1, 1)] {
            assert!(Args::new(steps(bad.0, bad.1, bad.2)).is_err(), "{bad:?}");
        }
    }
}
