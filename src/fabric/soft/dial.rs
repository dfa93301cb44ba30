//! What a queue pair sends to its peer's hub: Hellos, and an acceptor's checks that its dialer still exists. On the thread that
//! drives the queue pair.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use super::endpoint::{Address, HELLO_SIZE, Hello, Offer};
use super::shm::{recv_with_fd, send_with_fd};
use super::sockets::{connect_tcp, connect_unix, connected};
use super::work_queues::is_lack;
use crate::base::error::Result;
use crate::base::fd::{OwnedFd, Socket};
use crate::base::{clock, rand};

/// Sends a Hello on a new stream; returns its bytes, which the Reply's MAC covers.
pub fn send_hello(socket: &OwnedFd, from: &Address, to: &Address, offer: Offer, memory: Option<i32>) -> io::Result<[u8; HELLO_SIZE]> {
    let hello = Hello { to: to.qpn, from: from.qpn, nonce: nonce().map_err(io::Error::other)?, offer }.encode(&to.token);
    match send_with_fd(socket, &hello, memory)? {
        HELLO_SIZE => Ok(hello),
        // The buffer of a new stream holds more than a Hello.
        n => Err(io::Error::other(format!("the stream took {n} of {HELLO_SIZE} bytes"))),
    }
}

fn nonce() -> Result<[u8; 16]> {
    let mut nonce = [0; 16];
    rand::fill(&mut nonce)?;
    Ok(nonce)
}

/// How long an acceptor waits before it first checks its dialer, and between two checks.
const FIRST_CHECK_NS: u64 = 250_000_000;
const CHECK_NS: u64 = 100_000_000;
/// Between two checks of a process, whatever queue pair they are for: hundreds that wait for busy peers do not keep them busy.
const PACE_NS: u64 = 20_000_000;
/// For how long the checks of a dialer must fail until it is given up.
const GONE_NS: u64 = 2_000_000_000;

/// Whether a check may be made now; if so, it is the last for a while.
fn may_check(now: u64) -> bool {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let next = NEXT.load(Ordering::Relaxed);
    now >= next && NEXT.compare_exchange(next, now + PACE_NS, Ordering::Relaxed, Ordering::Relaxed).is_ok()
}

/// Checks whether the queue pair that is to dial this one still exists: its hub keeps a stream open as long as it does.
#[derive(Default)]
pub struct DialerCheck {
    stream: Option<CheckStream>,
    /// When to look next; 0 before the first time.
    next: u64,
    /// Since when the dialer seems gone; 0 while it does not.
    gone_since: u64,
}

enum CheckStream {
    Dialing(Socket),
    /// The Hello is sent.
    Open(OwnedFd),
}

impl DialerCheck {
    /// Looks for the dialer if it is time to. An error once it has been gone for long enough.
    pub fn poll(&mut self, local: &Address, remote: &Address) -> io::Result<()> {
        let now = clock::now();
        if self.next == 0 {
            self.next = now + FIRST_CHECK_NS;
        }
        if now < self.next || !may_check(now) {
            return Ok(());
        }
        self.next = now + CHECK_NS;
        let alive = match self.stream.take() {
            None => self.open(local, remote),
            Some(CheckStream::Dialing(socket)) => match connected(&socket) {
                Ok(false) => {
                    self.stream = Some(CheckStream::Dialing(socket));
                    Ok(())
                }
                Ok(true) => self.send_hello(socket.convert(), local, remote),
                Err(e) => Err(e),
            },
            Some(CheckStream::Open(socket)) => match recv_with_fd(&socket, &mut [0; 1]) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.gone_since = 0;
                    self.stream = Some(CheckStream::Open(socket));
                    Ok(())
                }
                _ => Err(io::ErrorKind::ConnectionReset.into()),
            },
        };
        let Err(e) = alive else { return Ok(()) };
        if is_lack(&e) {
            return Ok(());
        }
        if self.gone_since == 0 {
            self.gone_since = now;
        }
        if now - self.gone_since > GONE_NS { Err(e) } else { Ok(()) }
    }

    fn open(&mut self, local: &Address, remote: &Address) -> io::Result<()> {
        if let Ok(socket) = connect_unix(&remote.instance) {
            return self.send_hello(socket, local, remote);
        }
        self.stream = Some(CheckStream::Dialing(connect_tcp(local, remote, 0)?));
        Ok(())
    }

    fn send_hello(&mut self, socket: OwnedFd, local: &Address, remote: &Address) -> io::Result<()> {
        send_hello(&socket, local, remote, Offer::Check, None)?;
        self.stream = Some(CheckStream::Open(socket));
        Ok(())
    }
}
