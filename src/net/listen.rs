//! The listen comm: one TCP listener on the device's address, whose handle says where it is and how to prove that one was invited.
//! Driven by the thread that calls `accept`; it may be closed at any time after an accept, since nothing of a comm depends on it.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use crate::base::error::{Error, Result};
use crate::base::log::{self, log_info};
use crate::base::stage::{self, Stage};
use crate::base::stats::{self, CommCounter, CommKind, CommStats, WaitCause};
use crate::base::{clock, listen, rand};

use super::accept::Acceptor;
use super::handle::{HANDLE_SIZE, Handle, SECRET_SIZE};
use super::handshake::Setup;
use super::recv::RecvComm;
use super::{Net, Ready};

/// Connections taken from the kernel per call.
const ADMIT_AT_ONCE: usize = 64;
/// Pause of a blocking accept (v4 only) that found nothing.
const PAUSE: Duration = Duration::from_micros(200);

/// A listening comm.
pub struct ListenComm {
    listener: TcpListener,
    acceptor: Acceptor,
    dev: usize,
    stats: CommStats,
    net: Arc<Net>,
}

impl ListenComm {
    /// Listens on the device's address and fills a handle.
    pub(super) fn new(net: &Arc<Net>, setup: Setup) -> Result<(ListenComm, [u8; HANDLE_SIZE])> {
        let mut secret = [0u8; SECRET_SIZE];
        rand::fill(&mut secret)?;
        let instance = rand::u64()? as u32;
        let listener = listen::tcp(setup.device.addr(), &setup.config.port_range)?;
        let addr = listener.local_addr().map_err(|e| Error::system("listen: getsockname", e))?;
        // The kernel forgets the scope of an address in none of its answers, but a handle's reader needs it to be there.
        let addr = match (addr, setup.device.addr()) {
            (SocketAddr::V6(mut bound), SocketAddr::V6(device)) if bound.scope_id() == 0 => {
                bound.set_scope_id(device.scope_id());
                SocketAddr::V6(bound)
            }
            (bound, _) => bound,
        };
        let mut host = [0u8; 8];
        for (out, byte) in host.iter_mut().zip(setup.local.host_id) {
            *out = byte;
        }
        let handle = Handle { addr, instance, secret, cursor: 0, host }.encode();
        log_info!(log::NET, "listen comm on {} at {addr}", setup.device.name());
        let stats = stats::comm(CommKind::Listen, setup.device.name());
        let dev = setup.device.index();
        stage::reach(Stage::ListenOpen);
        Ok((ListenComm { listener, acceptor: Acceptor::new(setup, secret, instance), dev, stats, net: net.clone() }, handle))
    }

    /// The device it listens on.
    pub fn dev(&self) -> usize {
        self.dev
    }

    /// Advances the incoming handshakes; a comm once one of them is done. `Ready::Full` never waits and gives `None` for "call again";
    /// `Ready::Eager` waits until a peer came, and gives out the comm as soon as that can know of it.
    ///
    /// Errors: a rank that was given the handle and cannot be talked to (another fabric or release), or died during its handshake; no
    /// descriptor left. The listener stays usable after each.
    pub fn accept(&mut self, when: Ready) -> Result<Option<RecvComm>> {
        loop {
            self.admit()?;
            if let Some(established) = self.acceptor.drive(clock::now(), when)? {
                self.stats.add(CommCounter::Ops, 1);
                self.stats.clear_wait();
                return RecvComm::new(self.net.clone(), self.dev, *established).map(Some);
            }
            self.stats.wait(WaitCause::Handshake);
            match when {
                Ready::Full => return Ok(None),
                Ready::Eager => clock::sleep(PAUSE),
            }
        }
    }

    fn admit(&mut self) -> Result<()> {
        for _ in 0..ADMIT_AT_ONCE {
            match self.listener.accept() {
                Ok((stream, from)) => self.acceptor.admit(stream, from)?,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)) => {
                    return Err(Error::system("accept: the connection waits", e));
                }
                // Errors of the connection, which accept(2) hands out in its place: the next one may be fine.
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Handshakes in progress, for tests.
    #[cfg(test)]
    pub(super) fn half_open(&self) -> usize {
        self.acceptor.half_open()
    }

    #[cfg(test)]
    pub(super) fn answered_for_test(&self) -> bool {
        self.acceptor.answered()
    }
}
