//! Opens streams to a peer's hub, without blocking. Used by the dialer, and by an acceptor that checks whether its dialer still exists, on the
//! thread that drives the queue pair.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};

use socket2::{Domain, Protocol, SockAddr, Type};

use super::endpoint::{Address, HELLO_SIZE, Hello, Offer};
use super::hub::{peer_of, unix_name};
use super::shm::{recv_with_fd, send_with_fd};
use crate::base::error::Result;
use crate::base::fd::{OwnedFd, Socket};
use crate::base::{clock, rand};

/// Connects to the abstract unix socket of a hub. Errors: it is not in this network namespace, or not this user's.
pub fn unix(instance: &[u8; 16]) -> io::Result<OwnedFd> {
    let name = unix_name(instance);
    // SAFETY: plain system call; the result is checked before it is owned.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor that nobody else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: an all-zero sockaddr_un is a valid one.
    let mut addr: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    addr.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in addr.sun_path.iter_mut().skip(1).zip(&name) {
        *to = *from as libc::c_char;
    }
    let len = size_of::<libc::sa_family_t>() + 1 + name.len();
    // SAFETY: `addr` is a sockaddr_un of which the first `len` bytes are the name (unix_name yields 41 of the 107 there are).
    if unsafe { libc::connect(socket.as_raw_fd(), (&raw const addr).cast(), len as libc::socklen_t) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if peer_of(&socket).is_none() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(socket)
}

/// Begins to connect to the peer's listener, from this rail's own address; `buffer_kib` as [`buffers`] has it.
pub fn tcp(from: &Address, to: &Address, buffer_kib: u32) -> io::Result<Socket> {
    let (mut local, mut remote) = (from.addr, to.addr);
    let socket = Socket::new(socket2::Socket::new(Domain::for_address(remote), Type::STREAM.nonblocking(), Some(Protocol::TCP))?);
    buffers(&socket, buffer_kib);
    if local.is_ipv4() == remote.is_ipv4() && local.ip().is_loopback() == remote.ip().is_loopback() {
        local.set_port(0);
        socket.bind(&SockAddr::from(local))?;
    }
    if let (std::net::SocketAddr::V6(remote), std::net::SocketAddr::V6(local)) = (&mut remote, local)
        && remote.ip().is_unicast_link_local()
    {
        // A scope means something at its own host only.
        remote.set_scope_id(local.scope_id());
    }
    match socket.connect(&SockAddr::from(remote)) {
        Ok(()) => Ok(socket),
        Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => Ok(socket),
        Err(e) => Err(e),
    }
}

/// Sets the buffers of a socket that is not connected yet, or of a listener, whose streams inherit them; 0 leaves them to the system. Not for a
/// connected stream: it has advertised its window, and if that shrinks below the peer's segments, each of them waits for the peer's timer.
pub fn buffers(socket: &impl AsFd, kib: u32) {
    if kib > 0 {
        let socket = socket2::SockRef::from(socket);
        // The stream works with the system's buffers too.
        let _ = socket.set_send_buffer_size(kib as usize * 1024);
        let _ = socket.set_recv_buffer_size(kib as usize * 1024);
    }
}

/// Whether a socket that was connecting is connected.
pub fn connected(socket: &Socket) -> io::Result<bool> {
    let mut poll = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: one live pollfd.
    match unsafe { libc::poll(&mut poll, 1, 0) } {
        0 => Ok(false),
        1 => socket.take_error()?.map_or(Ok(true), Err),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether the peer has closed or reset the stream and everything before that was read. Takes nothing off it.
pub fn closed(socket: &OwnedFd) -> bool {
    let mut byte = 0u8;
    // SAFETY: room for the one byte that is looked at.
    let n = unsafe { libc::recv(socket.as_raw_fd(), (&raw mut byte).cast(), 1, libc::MSG_PEEK | libc::MSG_DONTWAIT) };
    n == 0 || (n < 0 && !matches!(io::Error::last_os_error().kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted))
}

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

/// How long an acceptor waits before it first probes its dialer, and between two probes.
const FIRST_PROBE_NS: u64 = 250_000_000;
const PROBE_NS: u64 = 100_000_000;
/// For how long the probes of a dialer must fail until it is given up.
const GONE_NS: u64 = 2_000_000_000;

/// Checks whether the queue pair that is to dial this one still exists: its hub keeps a probing stream open as long as it does.
#[derive(Default)]
pub struct DialerProbe {
    stream: Option<ProbeStream>,
    /// When to probe next; 0 before the first time.
    next: u64,
    /// Since when the dialer seems gone; 0 while it does not.
    gone_since: u64,
}

enum ProbeStream {
    Dialing(Socket),
    /// The Hello is sent.
    Open(OwnedFd),
}

impl DialerProbe {
    /// Probes the dialer if it is time to. An error once it has been gone for long enough.
    pub fn check(&mut self, local: &Address, remote: &Address) -> io::Result<()> {
        let now = clock::now();
        if self.next == 0 {
            self.next = now + FIRST_PROBE_NS;
        }
        if now < self.next {
            return Ok(());
        }
        self.next = now + PROBE_NS;
        let alive = match self.stream.take() {
            None => self.open(local, remote),
            Some(ProbeStream::Dialing(socket)) => match connected(&socket) {
                Ok(false) => {
                    self.stream = Some(ProbeStream::Dialing(socket));
                    Ok(())
                }
                Ok(true) => self.send_hello(socket.convert(), local, remote),
                Err(e) => Err(e),
            },
            Some(ProbeStream::Open(socket)) => match recv_with_fd(&socket, &mut [0; 1]) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.gone_since = 0;
                    self.stream = Some(ProbeStream::Open(socket));
                    Ok(())
                }
                _ => Err(io::ErrorKind::ConnectionReset.into()),
            },
        };
        let Err(e) = alive else { return Ok(()) };
        if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) {
            // No descriptor here says nothing about the dialer.
            return Ok(());
        }
        if self.gone_since == 0 {
            self.gone_since = now;
        }
        if now - self.gone_since > GONE_NS { Err(e) } else { Ok(()) }
    }

    fn open(&mut self, local: &Address, remote: &Address) -> io::Result<()> {
        if let Ok(socket) = unix(&remote.instance) {
            return self.send_hello(socket, local, remote);
        }
        self.stream = Some(ProbeStream::Dialing(tcp(local, remote, 0)?));
        Ok(())
    }

    fn send_hello(&mut self, socket: OwnedFd, local: &Address, remote: &Address) -> io::Result<()> {
        send_hello(&socket, local, remote, Offer::Probe, None)?;
        self.stream = Some(ProbeStream::Open(socket));
        Ok(())
    }
}
