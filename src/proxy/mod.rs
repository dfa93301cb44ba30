//! The proxy: sends and receives over any ncclNet table on behalf of programs that cannot call a network.
//!
//! A producer writes data, a size and a counter into a [`ring`]; the engine's thread sees the counter change and calls the table. As NCCL's proxy does,
//! it calls the plugin through its table, so it works with any plugin.
//!
//! * [`ring`]: the memory that a program and the proxy share.
//! * [`net`]: the functions of a table that the proxy calls.
//! * [`connector`]: one direction of a connection: a comm and a ring.
//! * [`args`]: one operation on a connector; [`send`] and [`recv`] step it.
//! * [`transfer`]: these as a client of the engine.
//! * [`save`]: which operations a transfer between ranks needs.

pub mod args;
pub mod connector;
pub mod net;
pub mod protocol;
pub mod recv;
pub mod ring;
pub mod save;
pub mod send;
#[cfg(test)]
mod tests;
pub mod transfer;

use std::marker::PhantomData;
use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::engine::{self, ConnectorId, Counters, Dump, Engine, Fatal, Refusal};
use args::{Args, Steps};
use connector::{Connector, Direction};
use net::{Comm, Net};
use ring::Ring;
use transfer::{Transfer, TransferWork};

/// A proxy: an engine whose operations send and receive over a network. Any thread may call any of its functions. Dropping it aborts it.
pub struct Proxy<N: Net> {
    engine: Engine<TransferWork<N>>,
    net: Arc<N>,
}

/// A connector of a proxy. Dropping it closes the connector once its operations are gone: see [`Proxy::detach`].
pub struct AttachedConnector<N: Net> {
    id: ConnectorId,
    connector: Arc<Connector<N>>,
}

impl<N: Net> AttachedConnector<N> {
    /// Its name in messages and dumps.
    pub fn id(&self) -> ConnectorId {
        self.id
    }

    /// The connector.
    pub fn connector(&self) -> &Connector<N> {
        &self.connector
    }

    /// Closes the connector after [`Proxy::detach`].
    ///
    /// Errors: those of the network, after which the comm is closed all the same; operations that are left, with the last of which it is closed.
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
    /// Errors: the system gives no thread.
    pub fn new(net: Arc<N>, options: engine::Options) -> Result<Proxy<N>> {
        Ok(Proxy { engine: Engine::new(TransferWork(PhantomData), options)?, net })
    }

    /// A proxy without a thread, stepped by its caller.
    pub fn stepped(net: Arc<N>, options: engine::Options) -> Proxy<N> {
        Proxy { engine: Engine::stepped(TransferWork(PhantomData), options), net }
    }

    /// The network.
    pub fn net(&self) -> &Arc<N> {
        &self.net
    }

    /// The engine, to group and start operations and to end them.
    pub fn engine(&self) -> &Engine<TransferWork<N>> {
        &self.engine
    }

    /// Makes a connector of an open comm and a ring.
    ///
    /// Errors: the network refuses the memory, or there are too many connectors: the comm is closed then, unless it is borrowed.
    pub fn connect(&self, direction: Direction, comm: Comm, ring: Arc<Ring>, options: connector::Options) -> Result<AttachedConnector<N>> {
        let connector = Connector::new(self.net.clone(), direction, comm, ring, options)?;
        let id = self.engine.add_connector().map_err(|refusal| self.refused(refusal))?;
        Ok(AttachedConnector { id, connector: Arc::new(connector) })
    }

    /// Appends an operation to those of a connector; it runs once it is started. Returns its opCount.
    ///
    /// Errors: invalid steps, or a protocol for which the ring has no slots; an engine that has ended; too many operations.
    pub fn append(&self, attached: &AttachedConnector<N>, steps: Steps) -> Result<u64> {
        let args = Args::new(steps)?;
        attached.connector.check(&args)?;
        self.engine.append(attached.id, Transfer::new(attached.connector.clone(), args)).map_err(|refusal| self.refused(refusal))
    }

    /// Removes a connector without operations from the proxy, so that it can be closed. After the engine has ended it may have some, which are
    /// dropped.
    ///
    /// Errors: a connector with operations that are not done; one that was detached before.
    pub fn detach(&self, attached: &AttachedConnector<N>) -> Result<()> {
        self.engine.remove_connector(attached.id).map_err(|refusal| self.refused(refusal))
    }

    /// The operation that failed, if one did.
    pub fn fatal(&self) -> Option<&Fatal<Error>> {
        self.engine.fatal()
    }

    /// The engine's counters.
    pub fn counters(&self) -> Counters {
        self.engine.counters()
    }

    /// The operations, and what each waits for.
    pub fn dump(&self) -> Result<Dump> {
        self.engine.dump().map_err(|refusal| self.refused(refusal))
    }

    /// The error of a refused call; where an operation has failed, that operation's.
    pub fn refused(&self, refusal: Refusal) -> Error {
        match (refusal, self.fatal()) {
            (Refusal::Failed, Some(fatal)) => fatal.error(),
            (Refusal::OwnThread | Refusal::Forked | Refusal::NoConnector(_), _) => Error::internal(refusal.to_string()),
            _ => Error::usage(refusal.to_string()),
        }
    }
}

impl Fatal<Error> {
    /// The error for a caller, of the kind with which the operation failed.
    pub fn error(&self) -> Error {
        let words = self.to_string();
        match &self.cause {
            engine::Cause::Error(Error::System { what, word }) => {
                let what = format!("operation {} of {}: {what}", self.op_count, self.connector);
                Error::System { what, word: std::io::Error::new(word.kind(), word.to_string()) }
            }
            engine::Cause::Error(Error::Usage(_)) => Error::usage(words),
            engine::Cause::Error(Error::Remote(_) | Error::Timeout(_)) => Error::remote(words),
            engine::Cause::Error(Error::Internal(_)) | engine::Cause::Panic(_) => Error::internal(words),
        }
    }
}
