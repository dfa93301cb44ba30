//! TCP listeners, within the ports that a firewall lets through. At set-up, on any thread.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;

use socket2::{Domain, Type};

use super::config::parse_ports;
use super::error::{Error, Result};
use super::fd::{Socket, TcpListener};
use super::rand;

/// Connections that the kernel keeps for a listener that is not polled (it may cut this to net.core.somaxconn): v4 ranks all connect
/// before any accepts.
const BACKLOG: i32 = 1024;

/// A nonblocking listener on `addr`, on a free port of `range` (RAILHEAD_PORT_RANGE), or one of the system's choice if that is empty.
///
/// Errors: every port of the range is in use; an address that is not this machine's.
pub fn tcp(addr: SocketAddr, range: &str) -> Result<TcpListener> {
    let Some(ports) = parse_ports(range) else {
        return bind(addr, 0).map_err(|e| Error::system(format!("listen on {addr}"), e));
    };
    let (low, count) = (u32::from(*ports.start()), ports.len() as u32);
    // Several processes share the range: begin anywhere in it.
    let start = (rand::u64()? % u64::from(count.max(1))) as u32;
    for i in 0..count {
        let port = (low + (start + i) % count) as u16;
        match bind(addr, port) {
            Err(e) if e.kind() == ErrorKind::AddrInUse => {}
            Err(e) => return Err(Error::system(format!("listen on {addr} port {port}"), e)),
            Ok(listener) => return Ok(listener),
        }
    }
    Err(Error::usage(format!("listen: every port of RAILHEAD_PORT_RANGE={range} is in use on {}", addr.ip())))
}

/// What the failure of an accept(2) means. Without a descriptor left that fails before it looks whether anybody waits: if nobody does, it would block.
pub fn refusal(listener: &impl AsRawFd, e: io::Error) -> io::Error {
    let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let lacks = matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
    // SAFETY: one live pollfd.
    if lacks && unsafe { libc::poll(&mut poll, 1, 0) } == 0 { ErrorKind::WouldBlock.into() } else { e }
}

fn bind(mut addr: SocketAddr, port: u16) -> io::Result<TcpListener> {
    addr.set_port(port);
    let socket = Socket::new(socket2::Socket::new(Domain::for_address(addr), Type::STREAM, None)?);
    // A port of the range that served a closed connection a minute ago is free.
    socket.set_reuse_address(true)?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(socket.convert())
}
