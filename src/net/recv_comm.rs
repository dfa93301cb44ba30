//! A receiving comm as the plugin has it. `irecv`, `iflush` and `test` are called by the one thread that drives the comm; what they do is in
//! [`super::receiver`].

use crate::base::error::Result;
use crate::base::stage::{self, Stage};
use crate::link::Connection;
#[cfg(any(test, feature = "sim"))]
use crate::link::Link;
use crate::link::device_thread::{Guarded, Polled};
use crate::link::incoming::Records;
use crate::link::request::Sizes;
use crate::link::wr_id::RequestId;

use super::receiver::{Receiver, RecvBuffer};
use super::resources::Resources;

/// A receiving comm. Dropping it closes it.
pub struct RecvComm {
    receiver: Polled<Receiver>,
    resources: Resources,
}

impl RecvComm {
    /// From a handshake.
    pub(super) fn new(resources: Resources, connection: Connection<Records>) -> Result<RecvComm> {
        let receiver = Receiver::new(&resources, connection)?;
        let thread = resources.thread(receiver.link.has_failover())?;
        Ok(RecvComm { receiver: Polled::new(receiver, "a receive comm", thread), resources })
    }

    /// The device it was made on.
    pub fn dev(&self) -> usize {
        self.resources.device.index()
    }

    /// Posts a group of 1..=8 receives. `None`: too many are outstanding; call again. The memory is the peer's until `test` says that
    /// the request is done.
    ///
    /// Errors: memory that its `mr` does not cover; more than 1 GiB; a group of no or too many; a peer that is gone or misbehaves, unless a request
    /// is outstanding: then it is `None`, until `test` of one has said so or all are done.
    #[inline(always)]
    pub fn irecv(&mut self, buffers: &[RecvBuffer]) -> Result<Option<RequestId>> {
        match &mut self.receiver {
            Polled::ByCaller(receiver) => receiver.irecv(&self.resources.mrs, buffers),
            Polled::ByThreadToo(shared) => shared.with(|receiver| receiver.irecv(&self.resources.mrs, buffers)),
        }
    }

    /// Whether a request is done, and then the sizes of what came; that frees it. Any outstanding request, in any order.
    ///
    /// Errors: a request that is not outstanding; a peer that is gone or misbehaves.
    #[inline(always)]
    pub fn test(&mut self, id: RequestId) -> Result<Option<Sizes>> {
        match &mut self.receiver {
            Polled::ByCaller(receiver) => receiver.test(id),
            Polled::ByThreadToo(shared) => test_shared(shared, id),
        }
    }

    /// Makes what was received visible to the device that owns the memory. `None`: nothing to do, which is so for all host memory.
    ///
    /// Errors: memory that its `mr` does not cover; a peer that is gone or misbehaves, if there is something to do.
    pub fn iflush(&mut self, buffers: &[RecvBuffer]) -> Result<Option<RequestId>> {
        let RecvComm { receiver, resources } = self;
        receiver.with(|receiver| receiver.iflush(resources, buffers))
    }
}

#[inline(never)]
fn test_shared(shared: &Guarded<Receiver>, id: RequestId) -> Result<Option<Sizes>> {
    shared.with(|receiver| receiver.test(id))
}

impl Drop for RecvComm {
    fn drop(&mut self) {
        stage::reach(Stage::Closing);
    }
}

#[cfg(any(test, feature = "sim"))]
impl RecvComm {
    fn receiver(&mut self) -> &mut Receiver {
        match &mut self.receiver {
            Polled::ByCaller(receiver) => receiver,
            Polled::ByThreadToo(_) => panic!("a device's thread polls this comm"),
        }
    }

    /// Polls.
    pub fn poll_for_test(&mut self) {
        self.receiver().progress();
    }

    #[cfg(test)]
    pub(super) fn qps_for_test(&mut self) -> usize {
        self.receiver().link.qps.len()
    }

    /// Its link.
    pub fn link_for_test(&mut self) -> &mut Link {
        &mut self.receiver().link
    }

    /// Does something with it, whoever polls.
    #[cfg(test)]
    pub(super) fn with_link_for_test<R>(&mut self, f: impl FnOnce(&mut Link) -> R) -> R {
        self.receiver.with(|receiver| Ok(f(&mut receiver.link))).unwrap()
    }
}
