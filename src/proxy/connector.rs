//! One direction of a connection to a peer: a comm of the table, a ring, and the step up to which both are used. Made and closed on any thread; its
//! operations run on the engine's, one at a time, so its counters have one writer.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::args::Args;
use super::net::{Buffer, Comm, Mr, Net};
use super::protocol::Protocol;
use super::ring::{Memory, Ring, Words};
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};

/// The direction of a connector's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// From the ring to the peer.
    Send,
    /// From the peer to the ring.
    Recv,
}

/// How a connector behaves.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    /// Tag of all its messages.
    pub tag: i32,
    /// Whether received data is flushed before it is published, even in host memory.
    pub flush: bool,
    /// Whether the caller closes the comm, not the connector.
    pub borrowed: bool,
}

/// What a connector has done. Each counter wraps at 2^64.
#[derive(Debug, Default)]
pub struct Counters {
    /// Operations complete.
    pub operations: AtomicU64,
    /// Messages complete.
    pub messages: AtomicU64,
    /// Bytes posted to the network, or received from it.
    pub bytes: AtomicU64,
    /// Calls of isend and irecv that the network did not accept yet.
    pub retries: AtomicU64,
    /// Flushes posted.
    pub flushes: AtomicU64,
}

/// One direction of a connection to a peer.
pub struct Connector<N: Net> {
    net: Arc<N>,
    direction: Direction,
    ring: Arc<Ring>,
    // None once closed.
    open: Option<Open>,
    options: Options,
    // The step at which its complete operations ended.
    step: AtomicU64,
    counters: Counters,
}

struct Open {
    comm: Comm,
    mr: Mr,
}

impl<N: Net> Connector<N> {
    /// A connector over an open comm. The ring's data is registered with it.
    ///
    /// Errors: the network refuses the memory; the comm is closed then, unless it is borrowed.
    pub fn new(net: Arc<N>, direction: Direction, comm: Comm, ring: Arc<Ring>, options: Options) -> Result<Connector<N>> {
        let data = ring.whole();
        let step = match direction {
            Direction::Send => ring.words().head(),
            Direction::Recv => ring.words().tail(),
        };
        match net.reg_mr(&comm, data, ring.memory() == Memory::Device) {
            Ok(mr) => {
                let (step, counters) = (AtomicU64::new(step), Counters::default());
                Ok(Connector { net, direction, ring, open: Some(Open { comm, mr }), options, step, counters })
            }
            Err(error) => {
                if !options.borrowed
                    && let Err(error) = close(&*net, direction, comm)
                {
                    log_warn!(log::NET, "closing a comm whose memory was refused: {error}");
                }
                Err(error)
            }
        }
    }

    /// The direction of its data.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The ring.
    pub fn ring(&self) -> &Arc<Ring> {
        &self.ring
    }

    /// What it has done.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The step at which its complete operations ended.
    pub fn step(&self) -> u64 {
        self.step.load(Relaxed)
    }

    /// Deregisters the memory and closes the comm. No operation may be left that is still stepped.
    ///
    /// Errors: those of the network; the comm is closed all the same.
    pub fn close(mut self) -> Result<()> {
        self.close_once()
    }

    fn close_once(&mut self) -> Result<()> {
        let Some(Open { comm, mr }) = self.open.take() else { return Ok(()) };
        let deregistered = self.net.dereg_mr(&comm, mr);
        let closed = if self.options.borrowed { Ok(()) } else { close(&*self.net, self.direction, comm) };
        deregistered.and(closed)
    }

    #[inline]
    pub(super) fn net(&self) -> &N {
        &self.net
    }

    #[inline]
    pub(super) fn comm(&self) -> Result<(&Comm, &Mr)> {
        match &self.open {
            Some(open) => Ok((&open.comm, &open.mr)),
            None => Err(Error::internal("the connector is closed")),
        }
    }

    #[inline]
    pub(super) fn tag(&self) -> i32 {
        self.options.tag
    }

    /// Whether data received by `protocol` is flushed before it is published. Readers of LL and LL128 check the flags in the data instead.
    #[inline]
    pub(super) fn flushes(&self, protocol: Protocol) -> bool {
        protocol == Protocol::Simple && (self.options.flush || self.ring.memory() == Memory::Device)
    }

    /// The most bytes of one message of the operation.
    #[inline]
    pub(super) fn capacity(&self, args: &Args) -> usize {
        self.ring.geometry().step_bytes(args.steps.protocol) * args.steps.slice as usize
    }

    /// Whether the ring has slots for the operation.
    pub fn check(&self, args: &Args) -> Result<()> {
        match self.capacity(args) {
            0 => Err(Error::usage(format!("a {} operation on a ring without {0} slots", args.steps.protocol))),
            _ => Ok(()),
        }
    }

    /// `bytes` bytes from the slot of `step` on.
    #[inline]
    pub(super) fn buffer(&self, protocol: Protocol, step: u64, bytes: usize) -> Buffer {
        self.ring.buffer(protocol, step, bytes)
    }

    /// Notes that an operation is complete.
    #[inline]
    pub(super) fn finish(&self, args: &Args) {
        self.step.store(args.end, Relaxed);
        Counters::add(&self.counters.operations, 1);
    }
}

impl<N: Net> Drop for Connector<N> {
    fn drop(&mut self) {
        if let Err(error) = self.close_once() {
            log_warn!(log::NET, "closing a connector: {error}");
        }
    }
}

impl Counters {
    /// A load and a store, not one atomic instruction: the engine is the only writer.
    #[inline]
    pub(super) fn add(counter: &AtomicU64, count: u64) {
        counter.store(counter.load(Relaxed).wrapping_add(count), Relaxed);
    }
}

/// Closes a comm.
pub fn close<N: Net>(net: &N, direction: Direction, comm: Comm) -> Result<()> {
    match direction {
        Direction::Send => net.close_send(comm),
        Direction::Recv => net.close_recv(comm),
    }
}
