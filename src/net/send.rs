//! A sending comm as the plugin has it: connecting still, up, failed, or shared with the device's thread. `isend` and `test` are called by the
//! one thread that drives the comm; what they do once it is up is in [`super::sender`].

use std::sync::Arc;

use crate::base::error::Result;
use crate::base::stage::{self, Stage};
use crate::engine::Progress;

use super::Net;
use super::background::{Guarded, Member, Sleep, Watch};
use super::connect::Connector;
use super::cts_fifo::CtsFifo;
use super::handshake::Established;
use super::liveness::Failure;
use super::mr_cache::MrHandle;
use super::request::{RequestId, Sizes};
use super::sender::Sender;

/// A sending comm. Dropping it closes it.
pub struct SendComm {
    state: State,
    dev: usize,
    net: Arc<Net>,
}

/// How far a sending comm is.
pub(super) enum State {
    /// Handed out before the peer answered (v4).
    Connecting(Box<Connector>),
    Up(Box<Sender>),
    /// The handshake failed.
    Failed(Failure),
    /// Any of the others, where the device's thread moves it along too.
    Shared(Guarded<State>),
}

impl SendComm {
    /// A comm whose handshake goes on.
    pub(super) fn connecting(net: Arc<Net>, dev: usize, connector: Box<Connector>) -> Result<SendComm> {
        SendComm::new(net, dev, State::Connecting(connector))
    }

    /// A comm whose handshake is done.
    pub(super) fn established(net: Arc<Net>, dev: usize, established: Established<CtsFifo>) -> Result<SendComm> {
        let sender = Sender::new(&net, dev, established);
        SendComm::new(net, dev, State::Up(Box::new(sender)))
    }

    fn new(net: Arc<Net>, dev: usize, state: State) -> Result<SendComm> {
        let device = net.device(dev)?;
        let state = match device.background(&net.config)? {
            None => state,
            Some(background) => State::Shared(Guarded::new(state, background, Watch::Send)),
        };
        Ok(SendComm { state, dev, net })
    }

    /// The device it was made on.
    pub fn dev(&self) -> usize {
        self.dev
    }

    /// Sends `len` bytes at `addr` into the receive that has this tag, of the group at the head of the FIFO. Size 0 is legal and needs
    /// no memory handle. `None`: the receiver has not announced it yet, or all requests are in use; call again. The memory must stay as it
    /// is until `test` says that the request is done. A send longer than its receive is cut to it.
    ///
    /// Errors: memory that `mr` does not cover; more than 1 GiB; a peer that is gone or misbehaves, unless a request is outstanding: then it is
    /// `None`, until `test` of one has said so or all are done.
    #[inline(always)]
    pub fn isend(&mut self, addr: usize, len: usize, tag: i32, mr: MrHandle) -> Result<Option<RequestId>> {
        match &mut self.state {
            State::Up(sender) => sender.isend(&self.net.mrs, addr, len, tag, mr),
            state => state.isend(&self.net, self.dev, addr, len, tag, mr),
        }
    }

    /// Whether a request is done, and then its size; that frees it. Any outstanding request, in any order.
    ///
    /// Errors: a request that is not outstanding; a peer that is gone or misbehaves.
    #[inline(always)]
    pub fn test(&mut self, request: RequestId) -> Result<Option<Sizes>> {
        match &mut self.state {
            State::Up(sender) => sender.test(request),
            state => state.test(request),
        }
    }

    /// Drops the registration of the CTS FIFO, so that the receiver's announcements fail: for tests that there is no other way for them.
    #[doc(hidden)]
    pub fn invalidate_cts_fifo(&mut self) {
        self.state.invalidate_cts_fifo();
    }
}

impl Drop for SendComm {
    fn drop(&mut self) {
        stage::reach(Stage::Closing);
    }
}

impl State {
    /// [`SendComm::isend`] in every state.
    #[inline(never)]
    fn isend(&mut self, net: &Net, dev: usize, addr: usize, len: usize, tag: i32, mr: MrHandle) -> Result<Option<RequestId>> {
        match self {
            State::Up(sender) => return sender.isend(&net.mrs, addr, len, tag, mr),
            State::Shared(shared) => return shared.with(|state| state.isend(net, dev, addr, len, tag, mr)),
            State::Connecting(_) | State::Failed(_) => {}
        }
        if len > 0 {
            net.mrs.lookup("isend", dev, mr, addr, len)?;
        }
        let driven = match self {
            State::Connecting(connector) => connector.drive(),
            State::Failed(failure) => return failure.result(),
            State::Up(_) | State::Shared(_) => Ok(None),
        };
        match driven {
            Ok(None) => Ok(None),
            Ok(Some(established)) => {
                *self = State::Up(Box::new(Sender::new(net, dev, established)));
                self.isend(net, dev, addr, len, tag, mr)
            }
            Err(error) => {
                *self = State::Failed(Failure::from_error(&error));
                Err(error)
            }
        }
    }

    /// [`SendComm::test`] in every state.
    #[inline(never)]
    fn test(&mut self, request: RequestId) -> Result<Option<Sizes>> {
        match self {
            State::Up(sender) => sender.test(request),
            State::Shared(shared) => shared.with(|state| state.test(request)),
            State::Failed(failure) => failure.result(),
            // Nothing was sent yet, so no request can be outstanding; asking the table says so in its own words.
            State::Connecting(_) => super::request::RequestTable::new().finish(request),
        }
    }

    fn invalidate_cts_fifo(&mut self) {
        match self {
            State::Up(sender) => sender.core.rails.forget_own(),
            State::Shared(shared) => {
                // A comm that broke has none to drop.
                let _ = shared.with(|state| {
                    state.invalidate_cts_fifo();
                    Ok(())
                });
            }
            State::Connecting(_) | State::Failed(_) => {}
        }
    }
}

impl Member for State {
    fn step(&mut self) -> Progress {
        match self {
            // What comes after it is the caller's to begin.
            State::Connecting(connector) => {
                connector.step();
                Progress::Idle
            }
            State::Up(sender) => sender.step(),
            State::Failed(_) | State::Shared(_) => Progress::Done,
        }
    }

    fn rest(&mut self, sleep: &mut Sleep) -> Progress {
        match self {
            State::Connecting(connector) => connector.rest(sleep),
            State::Up(sender) => sender.rest(sleep),
            State::Failed(_) | State::Shared(_) => Progress::Done,
        }
    }
}

/// What tests need to see, and to do as a hostile peer would.
#[cfg(test)]
impl SendComm {
    fn up(&mut self) -> Option<&mut Sender> {
        match &mut self.state {
            State::Up(sender) => Some(sender),
            _ => None,
        }
    }

    pub(super) fn poll_for_test(&mut self) {
        if let Some(sender) = self.up() {
            sender.progress(crate::base::stats::WaitCause::Fabric);
        }
    }

    pub(super) fn lanes_for_test(&mut self) -> usize {
        self.up().map_or(0, |sender| sender.core.rails.lanes())
    }

    pub(super) fn fifo_for_test(&mut self) -> &crate::base::mem::Pages {
        self.up().unwrap().fifo.pages()
    }

    pub(super) fn core_for_test(&mut self) -> &mut super::comm::Core {
        &mut self.up().unwrap().core
    }
}

/// Connects; see [`Net::connect`].
pub(super) fn connect_eager(net: Arc<Net>, dev: usize, mut connector: Box<Connector>) -> Result<SendComm> {
    // Only the dial can take time: the kernel of a listener accepts and takes H1 whatever its process does.
    while !connector.h1_sent() {
        if let Some(established) = connector.drive()? {
            return SendComm::established(net, dev, established);
        }
        if !connector.h1_sent() {
            crate::base::clock::sleep(std::time::Duration::from_micros(100));
        }
    }
    SendComm::connecting(net, dev, connector)
}
