//! The proxy as a client of the engine: its operations, and how each is stepped. Called by the engine's thread.

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

/// An operation of the engine: send or receive operation `args` on a connector.
pub struct Transfer<N: Net> {
    connector: Arc<Connector<N>>,
    args: Args,
}

impl<N: Net> Transfer<N> {
    /// An operation that has not started.
    pub fn new(connector: Arc<Connector<N>>, args: Args) -> Transfer<N> {
        Transfer { connector, args }
    }
}

/// The client of the engine. Has no state: the operations hold all of it.
pub struct TransferWork<N>(pub(super) PhantomData<fn(N)>);

impl<N: Net> Work for TransferWork<N> {
    type Op = Transfer<N>;
    type Error = Error;

    #[inline]
    fn progress(&mut self, _connector: ConnectorId, op: &mut Transfer<N>) -> Result<Progress> {
        match op.connector.direction() {
            Direction::Send => send::progress(&op.connector, &mut op.args),
            Direction::Recv => recv::progress(&op.connector, &mut op.args),
        }
    }

    fn describe(&self, _connector: ConnectorId, op: &Transfer<N>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
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
