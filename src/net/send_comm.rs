//! A sending comm as the plugin has it: connecting still, up, or failed. `isend` and `test` are called by the one thread that drives the comm;
//! what they do once it is up is in [`super::sender`].

use std::time::Duration;

use crate::base::clock;
use crate::base::error::Result;
use crate::base::stage::{self, Stage};
use crate::engine::Progress;
use crate::link::device_thread::{Member, Polled, WaitSet};
use crate::link::memory::MrHandle;
use crate::link::request::{RequestTable, Sizes};
use crate::link::wr_id::RequestId;
use crate::link::{Connection, Failure};

use super::connect::Dialer;
use super::cts_fifo::CtsFifo;
use super::resources::Resources;
use super::sender::Sender;

/// Pause of a blocking connect (v4 only) that found nothing.
const PAUSE: Duration = Duration::from_micros(100);

/// A sending comm. Dropping it closes it.
pub struct SendComm {
    state: Polled<State>,
    resources: Resources,
}

/// How far a sending comm is.
pub(super) enum State {
    /// Handed out before the peer answered (v4).
    Connecting(Box<Dialer>),
    Up(Box<Sender>),
    /// The handshake failed.
    Failed(Failure),
}

impl SendComm {
    /// A comm whose handshake is done.
    pub(super) fn connected(resources: Resources, connection: Connection<CtsFifo>) -> Result<SendComm> {
        let sender = Sender::new(&resources, connection);
        let answers = sender.link.has_failover();
        SendComm::new(resources, State::Up(Box::new(sender)), answers)
    }

    fn new(resources: Resources, state: State, answers: bool) -> Result<SendComm> {
        Ok(SendComm { state: Polled::new(state, "a send comm", resources.thread(answers)?), resources })
    }

    /// The device it was made on.
    pub fn dev(&self) -> usize {
        self.resources.device.index()
    }

    /// Sends `len` bytes at `addr` into the receive that has this tag, of the group at the head of the FIFO. Size 0 is legal and needs
    /// no memory handle. `None`: there is no clear-to-send for it yet, or all requests are in use; call again. The memory must stay as it
    /// is until `test` says that the request is done. A send longer than its receive is cut to it.
    ///
    /// Errors: memory that `mr` does not cover; more than 1 GiB; a peer that is gone or misbehaves, unless a request is outstanding: then it is
    /// `None`, until `test` of one has said so or all are done.
    #[inline(always)]
    pub fn isend(&mut self, addr: usize, len: usize, tag: i32, mr: MrHandle) -> Result<Option<RequestId>> {
        match &mut self.state {
            Polled::ByCaller(State::Up(sender)) => sender.isend(&self.resources.mrs, addr, len, tag, mr),
            _ => self.isend_in_any_state(addr, len, tag, mr),
        }
    }

    /// Whether a request is done, and then its size; that frees it. Any outstanding request, in any order.
    ///
    /// Errors: a request that is not outstanding; a peer that is gone or misbehaves.
    #[inline(always)]
    pub fn test(&mut self, request: RequestId) -> Result<Option<Sizes>> {
        match &mut self.state {
            Polled::ByCaller(State::Up(sender)) => sender.test(request),
            state => test_in_any_state(state, request),
        }
    }

    #[inline(never)]
    fn isend_in_any_state(&mut self, addr: usize, len: usize, tag: i32, mr: MrHandle) -> Result<Option<RequestId>> {
        let SendComm { state, resources } = self;
        state.with(|state| state.isend(resources, addr, len, tag, mr))
    }

    /// Drops the registration of the CTS FIFO, so that the receiver's clear-to-sends fail: for tests, which have no other way to make them fail.
    #[doc(hidden)]
    pub fn invalidate_cts_fifo(&mut self) {
        // A comm that broke has none to drop.
        let _ = self.state.with(|state| {
            if let State::Up(sender) = state {
                sender.link.qps.forget_inbox();
            }
            Ok(())
        });
    }
}

#[inline(never)]
fn test_in_any_state(state: &mut Polled<State>, request: RequestId) -> Result<Option<Sizes>> {
    state.with(|state| state.test(request))
}

impl Drop for SendComm {
    fn drop(&mut self) {
        stage::reach(Stage::Closing);
    }
}

impl State {
    /// [`SendComm::isend`] in every state.
    fn isend(&mut self, resources: &Resources, addr: usize, len: usize, tag: i32, mr: MrHandle) -> Result<Option<RequestId>> {
        let check = || if len > 0 { resources.mrs.lookup("isend", resources.device.index(), mr, addr, len).map(drop) } else { Ok(()) };
        let driven = match self {
            State::Up(sender) => return sender.isend(&resources.mrs, addr, len, tag, mr),
            State::Connecting(dialer) => {
                check()?;
                dialer.drive()
            }
            State::Failed(failure) => {
                check()?;
                return failure.result();
            }
        };
        match driven {
            Ok(None) => Ok(None),
            Ok(Some(connection)) => {
                *self = State::Up(Box::new(Sender::new(resources, connection)));
                self.isend(resources, addr, len, tag, mr)
            }
            Err(error) => {
                *self = State::Failed(Failure::from_error(&error));
                Err(error)
            }
        }
    }

    /// [`SendComm::test`] in every state.
    fn test(&mut self, request: RequestId) -> Result<Option<Sizes>> {
        match self {
            State::Up(sender) => sender.test(request),
            State::Failed(failure) => failure.result(),
            // Nothing was sent yet, so no request can be outstanding; asking the table says so in its own words.
            State::Connecting(_) => RequestTable::new().finish(request),
        }
    }
}

impl Member for State {
    fn poll(&mut self) -> Progress {
        match self {
            // What comes after it is the caller's to begin.
            State::Connecting(dialer) => {
                dialer.poll();
                Progress::Idle
            }
            State::Up(sender) => sender.poll(),
            State::Failed(_) => Progress::Done,
        }
    }

    fn arm(&mut self, wait: &mut WaitSet) -> Progress {
        match self {
            State::Connecting(dialer) => dialer.arm(wait),
            State::Up(sender) => sender.arm(wait),
            State::Failed(_) => Progress::Done,
        }
    }

    fn look_at_rails(&mut self) -> Option<Duration> {
        if let State::Up(sender) = self { sender.link.rails_wait_within() } else { None }
    }
}

/// What tests need to see, and to do as a hostile peer would.
#[cfg(any(test, feature = "sim"))]
impl SendComm {
    fn up(&mut self) -> Option<&mut Sender> {
        match &mut self.state {
            Polled::ByCaller(State::Up(sender)) => Some(sender),
            _ => None,
        }
    }

    /// Polls.
    pub fn poll_for_test(&mut self) {
        if let Some(sender) = self.up() {
            sender.progress(crate::base::stats::WaitCause::Fabric);
        }
    }

    #[cfg(test)]
    pub(super) fn qps_for_test(&mut self) -> usize {
        self.up().map_or(0, |sender| sender.link.qps.len())
    }

    #[cfg(test)]
    pub(super) fn fifo_for_test(&mut self) -> &crate::base::mem::Pages {
        self.up().unwrap().fifo.pages()
    }

    /// Its link.
    pub fn link_for_test(&mut self) -> &mut crate::link::Link {
        &mut self.up().unwrap().link
    }

    /// Does something with it, whoever polls.
    #[cfg(test)]
    pub(super) fn with_link_for_test<R>(&mut self, f: impl FnOnce(&mut crate::link::Link) -> R) -> R {
        let with = |state: &mut State| match state {
            State::Up(sender) => Ok(f(&mut sender.link)),
            State::Connecting(_) | State::Failed(_) => panic!("it is not up"),
        };
        self.state.with(with).unwrap()
    }
}

/// Connects; see [`super::Net::connect`].
pub(super) fn connect_blocking(resources: Resources, mut dialer: Box<Dialer>) -> Result<SendComm> {
    // Only the dial can take time: the kernel of a listener accepts and takes H1 whatever its process does.
    while !dialer.h1_sent() {
        if let Some(connection) = dialer.drive()? {
            return SendComm::connected(resources, connection);
        }
        if !dialer.h1_sent() {
            clock::sleep(PAUSE);
        }
    }
    // Callers of v4 have no comms of several rails.
    SendComm::new(resources, State::Connecting(dialer), false)
}
