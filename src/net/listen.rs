//! The listen comm: one TCP listener on the device's address, whose handle says where it is and how to prove that one was invited.
//! Polled by the thread that calls `accept`; it may be closed at any time after an accept, since nothing of a comm depends on it.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::time::Duration;

use crate::base::error::{Error, Result};
use crate::base::fd::{TcpListener, TcpStream};
use crate::base::log::{self, log_info};
use crate::base::stage::{self, Stage};
use crate::base::stats::{self, CommCounter, CommKind, CommStats, WaitCause};
use crate::base::{clock, listen, rand};
use crate::engine::Progress;
use crate::link::Connection;
use crate::link::device_thread::{Member, Polled, WaitSet};
use crate::link::incoming::Records;

use super::accept::Acceptor;
use super::handshake::Mode;
use super::listen_handle::{HANDLE_SIZE, ListenHandle, SECRET_SIZE};
use super::recv_comm::RecvComm;
use super::resources::Resources;

/// Connections taken from the kernel per call.
const ADMIT_AT_ONCE: usize = 64;
/// Pause of a blocking accept (v4 only) that found nothing.
const PAUSE: Duration = Duration::from_micros(200);

/// Outcomes that a device's thread keeps for a caller who does not ask: then it takes no more connections in.
const MAX_OUTCOMES: usize = 64;

/// A listening comm.
pub struct ListenComm {
    listening: Polled<Listening>,
    stats: CommStats,
    resources: Resources,
}

/// The listener and its incoming handshakes.
pub(super) struct Listening {
    listener: TcpListener,
    acceptor: Acceptor,
    /// What the device's thread came to, for callers to learn.
    outcomes: VecDeque<Result<Box<Connection<Records>>>>,
}

impl ListenComm {
    /// Listens on the device's address and fills a handle.
    pub(super) fn new(resources: Resources) -> Result<(ListenComm, [u8; HANDLE_SIZE])> {
        let mut secret = [0u8; SECRET_SIZE];
        rand::fill(&mut secret)?;
        let instance = rand::u64()? as u32;
        let listener = listen::tcp(resources.device.addr(), &resources.config.port_range)?;
        let addr = listener.local_addr().map_err(|e| Error::system("listen: getsockname", e))?;
        // The kernel forgets the scope of an address in none of its answers, but a handle's reader needs it to be there.
        let addr = match (addr, resources.device.addr()) {
            (SocketAddr::V6(mut bound), SocketAddr::V6(device)) if bound.scope_id() == 0 => {
                bound.set_scope_id(device.scope_id());
                SocketAddr::V6(bound)
            }
            (bound, _) => bound,
        };
        let mut host = [0u8; 8];
        for (out, byte) in host.iter_mut().zip(resources.local.host_id) {
            *out = byte;
        }
        let handle = ListenHandle { addr, instance, secret, cursor: 0, host }.encode();
        log_info!(log::NET, "listen comm on {} at {addr}", resources.device.name());
        let stats = stats::comm(CommKind::Listen, resources.device.name());
        stage::reach(Stage::ListenOpen);
        let listening = Listening { listener, acceptor: Acceptor::new(resources.clone(), secret, instance), outcomes: VecDeque::new() };
        let listening = Polled::new(listening, "a listen comm", resources.thread(false)?);
        Ok((ListenComm { listening, stats, resources }, handle))
    }

    /// The device it listens on.
    pub fn dev(&self) -> usize {
        self.resources.device.index()
    }

    /// Advances the incoming handshakes; a comm once one of them is done. `Mode::NonBlocking` never waits and gives `None` for "call again";
    /// `Mode::Blocking` waits until a peer came, and gives out the comm as soon as that can know of it.
    ///
    /// Errors: a rank that was given the handle died during its handshake; no descriptor left. The listener stays usable after each. A rank that
    /// cannot be talked to (another fabric or release) is told why and warned of, and is no error here: the call waits on for one that can.
    pub fn accept(&mut self, mode: Mode) -> Result<Option<RecvComm>> {
        loop {
            if let Some(connection) = self.listening.with(|listening| listening.drive(mode))? {
                self.stats.add(CommCounter::Ops, 1);
                self.stats.clear_wait();
                return RecvComm::new(self.resources.clone(), *connection).map(Some);
            }
            self.stats.wait(WaitCause::Handshake);
            match mode {
                Mode::NonBlocking => return Ok(None),
                Mode::Blocking => clock::sleep(PAUSE),
            }
        }
    }

    /// Handshakes in progress, for tests.
    #[cfg(test)]
    pub(super) fn half_open(&mut self) -> usize {
        self.own().acceptor.half_open()
    }

    #[cfg(test)]
    pub(super) fn answered_for_test(&mut self) -> bool {
        self.own().acceptor.answered()
    }

    #[cfg(test)]
    fn own(&mut self) -> &mut Listening {
        match &mut self.listening {
            Polled::ByCaller(listening) => listening,
            Polled::ByThreadToo(_) => panic!("a device's thread moves this comm along"),
        }
    }
}

impl Listening {
    /// What the device's thread came to, or else what the caller comes to himself.
    fn drive(&mut self, mode: Mode) -> Result<Option<Box<Connection<Records>>>> {
        match self.outcomes.pop_front() {
            Some(outcome) => outcome.map(Some),
            None => self.advance(mode),
        }
    }

    fn advance(&mut self, mode: Mode) -> Result<Option<Box<Connection<Records>>>> {
        let now = clock::now();
        self.admit(now)?;
        self.acceptor.drive(now, mode)
    }

    /// Whether the thread leaves it to the caller. An error may come again each time: it is told once.
    fn is_full(&self) -> bool {
        self.outcomes.len() >= MAX_OUTCOMES || self.outcomes.iter().any(Result::is_err)
    }

    fn admit(&mut self, now: u64) -> Result<()> {
        for _ in 0..ADMIT_AT_ONCE {
            match self.listener.accept().map_err(|e| listen::refusal(&self.listener, e)) {
                Ok((stream, from)) => self.acceptor.admit(TcpStream::new(stream), from, now),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.raw_os_error() == Some(libc::EMFILE) && self.acceptor.drop_unauthenticated() => {}
                Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)) => {
                    return Err(Error::system("accept: the connection waits", e));
                }
                // Errors of the connection, which accept(2) hands out in its place: the next one may be fine.
                Err(_) => {}
            }
        }
        Ok(())
    }
}

impl Member for Listening {
    fn poll(&mut self) -> Progress {
        if self.is_full() {
            return Progress::Idle;
        }
        let outcome = self.advance(Mode::NonBlocking).transpose();
        let moved = outcome.is_some();
        self.outcomes.extend(outcome);
        if moved { Progress::Moved } else { Progress::Idle }
    }

    fn arm(&mut self, wait: &mut WaitSet) -> Progress {
        if !self.is_full() {
            wait.add(self.listener.as_raw_fd());
            self.acceptor.arm(wait);
        }
        Progress::Idle
    }
}
