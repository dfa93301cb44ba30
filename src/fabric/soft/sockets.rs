//! The sockets of hubs and of those that dial them: how they are named, opened and set, whose they are, and whether they are still open. Nothing here waits. On
//! the threads that make or drive queue pairs.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::time::Duration;

use socket2::{Domain, Protocol, SockAddr, TcpKeepalive, Type};

use super::endpoint::Address;
use crate::base::config::Config;
use crate::base::fd::{OwnedFd, Socket};
use crate::base::log::{self, log_info};

/// The abstract name of a hub's unix socket.
pub fn unix_name(instance: &[u8; 16]) -> Vec<u8> {
    instance.iter().fold(b"railhead-".to_vec(), |mut name, byte| {
        name.extend_from_slice(format!("{byte:02x}").as_bytes());
        name
    })
}

/// The peer's process, if it is this user's.
pub fn peer_pid(socket: &OwnedFd) -> Option<i32> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `cred` has room for the `len` bytes that SO_PEERCRED yields.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut cred).cast(), &mut len) };
    // SAFETY: plain system call.
    (rc == 0 && cred.uid == unsafe { libc::geteuid() }).then_some(cred.pid)
}

/// Connects to the abstract unix socket of a hub. Errors: it is not in this network namespace, or not this user's.
pub fn connect_unix(instance: &[u8; 16]) -> io::Result<OwnedFd> {
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
    if peer_pid(&socket).is_none() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    Ok(socket)
}

/// Begins to connect to the peer's listener, from this rail's own address; `buffer_kib` as [`set_buffers`] has it.
pub fn connect_tcp(from: &Address, to: &Address, buffer_kib: u32) -> io::Result<Socket> {
    let (mut local, mut remote) = (from.addr, to.addr);
    let socket = Socket::new(socket2::Socket::new(Domain::for_address(remote), Type::STREAM.nonblocking(), Some(Protocol::TCP))?);
    set_buffers(&socket, buffer_kib);
    if local.is_ipv4() == remote.is_ipv4() && local.ip().is_loopback() == remote.ip().is_loopback() {
        local.set_port(0);
        // The port is chosen when the peer's is known: a connection needs one that no other to that has, instead of one of the 28 000 that the host has.
        let (on, len): (libc::c_int, _) = (1, size_of::<libc::c_int>() as libc::socklen_t);
        // SAFETY: an integer that outlives the call. Where the kernel refuses, the port is chosen below.
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::IPPROTO_IP, libc::IP_BIND_ADDRESS_NO_PORT, (&raw const on).cast(), len) };
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
pub fn set_buffers(socket: &impl AsFd, kib: u32) {
    if kib > 0 {
        let socket = socket2::SockRef::from(socket);
        // The stream works with the system's buffers too.
        let _ = socket.set_send_buffer_size(kib as usize * 1024);
        let _ = socket.set_recv_buffer_size(kib as usize * 1024);
    }
}

/// Sets the options of a stream that is connected. The stream works without any of them.
pub fn set_options(socket: &OwnedFd, config: &Config, from: &Address, to: &Address, traffic_class: Option<u8>) {
    let socket = socket2::SockRef::from(socket);
    let _ = socket.set_tcp_nodelay(true);
    let near = from.kernel == to.kernel;
    match config.tcp_congestion.as_str() {
        // The default may pace loopback (bbr halves its rate); reno may be chosen without privilege.
        "auto" if near => drop(socket.set_tcp_congestion(b"reno")),
        "auto" | "system" => {}
        name => {
            if let Err(e) = socket.set_tcp_congestion(name.as_bytes()) {
                log_info!(log::NET, "RAILHEAD_TCP_CONGESTION={name}: {e}; the system's default stays");
            }
        }
    }
    if config.tcp_user_timeout_s > 0 {
        // Not TCP_USER_TIMEOUT: since Linux 5.11 it also ends the connection to a peer whose kernel acks but whose process does not read,
        // because it is stopped or busy. A host that dies with data in flight is noticed on the comm's control connection.
        let timeout = Duration::from_secs(u64::from(config.tcp_user_timeout_s));
        // The kernel takes whole seconds, and refuses all three if one is 0.
        let second = Duration::from_secs(1);
        let keepalive = TcpKeepalive::new().with_time(second.max(timeout / 2)).with_interval(second.max(timeout / 8)).with_retries(4);
        let _ = socket.set_tcp_keepalive(&keepalive);
    }
    if let Some(class) = traffic_class.map(u32::from) {
        let _ = if to.addr.is_ipv4() { socket.set_tos_v4(class) } else { socket.set_tclass_v6(class) };
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
