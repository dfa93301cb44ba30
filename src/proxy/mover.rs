//! The proxy as a client of the engine: what an operation is to it, and how it is moved on. Called by the engine's thread.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use super::args::Args;
use super::connector::{Connector, Direction};
use super::net::Net;
use super::ring::Words;
use super::{recv, send};
use crate::base::error::{Error, Result};
use crate::engine::{ConnectorId, Progress, Work};

/// An operation on its way: a connector, and how far it has come.
pub struct Op<N: Net> {
    connector: Arc<Connector<N>>,
    args: Args,
}

impl<N: Net> Op<N> {
    /// An operation that has not started.
    pub fn new(connector: Arc<Connector<N>>, args: Args) -> Op<N> {
        Op { connector, args }
    }
}

/// Moves operations on. All that it works on comes with the operations.
pub struct Mover<N>(PhantomData<fn(N)>);

impl<N> Mover<N> {
    /// A mover.
    pub fn new() -> Mover<N> {
        Mover(PhantomData)
    }
}

impl<N> Default for Mover<N> {
    fn default() -> Self {
        Mover::new()
    }
}

impl<N: Net> Work for Mover<N> {
    type Op = Op<N>;
    type Error = Error;

    #[inline]
    fn progress(&mut self, _connector: ConnectorId, op: &mut Op<N>) -> Result<Progress> {
        match op.connector.direction() {
            Direction::Send => send::progress(&op.connector, &mut op.args),
            Direction::Recv => recv::progress(&op.connector, &mut op.args),
        }
    }

    fn describe(&self, _connector: ConnectorId, op: &Op<N>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words = op.connector.ring().words();
        let direction = match op.connector.direction() {
            Direction::Send => "send",
            Direction::Recv => "receive",
        };
        write!(f, "{direction} {}", op.args)?;
        if op.args.started {
            write!(f, " (ring: head {}, tail {})", words.head(), words.tail())?;
        }
        Ok(())
    }
}
