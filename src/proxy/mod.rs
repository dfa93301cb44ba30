//! The proxy: sends and receives over any ncclNet table on behalf of programs that cannot call a network.
//!
//! A producer writes data, a size and a counter into a [`ring`]; the engine's thread sees the counter move and calls the table. It stands where
//! NCCL's proxy stands, above the plugin table, so it drives any plugin.
//!
//! * [`ring`]: the memory that a program and the proxy share.
//! * [`net`]: what the proxy asks of a table.
//! * [`connector`]: one direction of a connection: a comm and a ring.
//! * [`args`]: one operation on a connector; [`send`] and [`recv`] move it on.
//! * [`mover`]: the three together, as a client of the engine.
//! * [`save`]: which operations a transfer between ranks needs.

pub mod args;
pub mod connector;
pub mod mover;
pub mod net;
pub mod protocol;
pub mod recv;
pub mod ring;
pub mod save;
pub mod send;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::engine::{self, ConnectorId, Counters, Dump, Engine, Fatal, Refusal};
use args::{Args, Steps};
use connector::{Connector, Direction};
use mover::{Mover, Op};
use net::{Comm, Net};
use ring::Ring;

/// A proxy: an engine that moves operations over a network. Any thread may call any of its functions. Dropping it aborts it.
pub struct Proxy<N: Net> {
    engine: Engine<Mover<N>>,
    net: Arc<N>,
}

/// A connector of a proxy. Dropping it closes it, but not before its operations are gone: see [`Proxy::detach`].
pub struct Link<N: Net> {
    id: ConnectorId,
    connector: Arc<Connector<N>>,
}

impl<N: Net> Link<N> {
    /// What it is called in messages and dumps.
    pub fn id(&self) -> ConnectorId {
        self.id
    }

    /// The connector.
    pub fn connector(&self) -> &Connector<N> {
        &self.connector
    }

    /// Closes the connector of a link that was detached.
    ///
    /// Errors: what the network says; the comm is gone all the same. One that was not detached is closed once its operations are gone.
    pub fn close(self) -> Result<()> {
        match Arc::into_inner(self.connector) {
            Some(connector) => connector.close(),
            None => Err(Error::usage(format!("{} still has operations", self.id))),
        }
    }
}

impl<N: Net> Proxy<N> {
    /// A proxy with its thread, which sleeps until something is started.
    ///
    /// Errors: no thread to be had.
    pub fn new(net: Arc<N>, options: engine::Options) -> Result<Proxy<N>> {
        Ok(Proxy { engine: Engine::new(Mover::new(), options)?, net })
    }

    /// A proxy without a thread, whose steps the caller makes.
    pub fn stepped(net: Arc<N>, options: engine::Options) -> Proxy<N> {
        Proxy { engine: Engine::stepped(Mover::new(), options), net }
    }

    /// The network.
    pub fn net(&self) -> &Arc<N> {
        &self.net
    }

    /// The engine, for its groups, its end, its counters and its dump.
    pub fn engine(&self) -> &Engine<Mover<N>> {
        &self.engine
    }

    /// Makes a connector of an open comm and a ring.
    ///
    /// Errors: the network refuses the memory, or there are too many connectors: the comm is closed then, unless it is borrowed.
    pub fn connect(&self, direction: Direction, comm: Comm, ring: Arc<Ring>, options: connector::Options) -> Result<Link<N>> {
        let connector = Connector::new(self.net.clone(), direction, comm, ring, options)?;
        let id = self.engine.add_connector().map_err(|refusal| self.refused(refusal))?;
        Ok(Link { id, connector: Arc::new(connector) })
    }

    /// Appends an operation to those of a connector; it moves once it is started. Returns its opCount.
    ///
    /// Errors: steps that make no sense, or that the ring has no slots for; an engine that has ended; too many operations.
    pub fn append(&self, link: &Link<N>, steps: Steps) -> Result<u64> {
        let args = Args::new(steps)?;
        link.connector.check(&args)?;
        self.engine.append(link.id, Op::new(link.connector.clone(), args)).map_err(|refusal| self.refused(refusal))
    }

    /// Takes a connector without operations away from the proxy, so that it may be closed. After the engine has ended it may have some, which are
    /// dropped.
    ///
    /// Errors: a connector with operations that are not done; one that was detached before.
    pub fn detach(&self, link: &Link<N>) -> Result<()> {
        self.engine.remove_connector(link.id).map_err(|refusal| self.refused(refusal))
    }

    /// The operation that failed, if one did.
    pub fn fatal(&self) -> Option<&Fatal<Error>> {
        self.engine.fatal()
    }

    /// How often what has happened.
    pub fn counters(&self) -> Counters {
        self.engine.counters()
    }

    /// What there is to do, and what it waits for.
    pub fn dump(&self) -> Result<Dump> {
        self.engine.dump().map_err(|refusal| self.refused(refusal))
    }

    /// The error of a refused call: that of the operation that failed, if that is why.
    pub fn refused(&self, refusal: Refusal) -> Error {
        match (refusal, self.fatal()) {
            (Refusal::Failed, Some(fatal)) => fatal.error(),
            (Refusal::OwnThread | Refusal::Forked | Refusal::NoConnector(_), _) => Error::internal(refusal.to_string()),
            _ => Error::usage(refusal.to_string()),
        }
    }
}

impl Fatal<Error> {
    /// The error, of the kind that the operation failed with, to be given to a caller.
    pub fn error(&self) -> Error {
        let words = self.to_string();
        match &self.cause {
            engine::Cause::Error(Error::System { what, word }) => {
                let what = format!("operation {} of {}: {what}", self.op_count, self.connector);
                Error::System { what, word: std::io::Error::new(word.kind(), word.to_string()) }
            }
            engine::Cause::Error(Error::Usage(_)) => Error::usage(words),
            engine::Cause::Error(Error::Remote(_)) => Error::remote(words),
            engine::Cause::Error(Error::Internal(_)) | engine::Cause::Panic(_) => Error::internal(words),
        }
    }
}
