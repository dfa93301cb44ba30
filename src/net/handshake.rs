//! What both ends of a handshake share: its connection's settings, who the peer is, and the wait for the last message.
//! Called by whatever thread drives the comm's set-up.

use std::net::SocketAddr;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::fd::TcpStream;
use crate::link::control_connection::{Confirm, ConfirmError};
use crate::link::liveness::Peer;

use super::frames::{self, FrameReader, Kind, PROTOCOL_VERSION, Params, Progress};
use super::listen_handle::SECRET_SIZE;

/// When `connect` and `accept` give out a comm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Once the handshake is done; `None` before (v5 and later).
    NonBlocking,
    /// At once, waiting if need be: `connect` once its first message is sent, `accept` once its answer is (v4, where every rank
    /// connects first and accepts second, and neither call is repeated).
    Blocking,
}

/// Prepares the handshake's connection: no delay, no wait, and a dead host is noticed.
pub fn tune(stream: &TcpStream, config: &Config) -> Result<()> {
    let socket = SockRef::from(stream);
    let user_timeout = (config.tcp_user_timeout_s > 0).then(|| Duration::from_secs(u64::from(config.tcp_user_timeout_s)));
    // A host that vanished is noticed after about a minute of silence, or the time that was set if that is shorter. In whole seconds.
    let share = |n: u32, most: u64| user_timeout.map_or(most, |t| (t / n).as_secs().clamp(1, most));
    let keepalive =
        TcpKeepalive::new().with_time(Duration::from_secs(share(2, 30))).with_interval(Duration::from_secs(share(6, 10))).with_retries(3);
    socket
        .set_nonblocking(true)
        .and_then(|()| socket.set_tcp_nodelay(true))
        .and_then(|()| socket.set_tcp_keepalive(&keepalive))
        .and_then(|()| user_timeout.map_or(Ok(()), |t| socket.set_tcp_user_timeout(Some(t))))
        .map_err(|e| Error::system("setting options of a handshake's connection", e))
}

/// Who a side's parameters say that the peer is. Its pid means something here only in the same pid namespace of the same host.
pub fn peer(theirs: &Params, ours: &Params, addr: SocketAddr) -> Peer {
    let same = theirs.host_id == ours.host_id && theirs.pid_ns != 0 && theirs.pid_ns == ours.pid_ns;
    let label = format!("{} pid {} ({} at {})", theirs.host, theirs.pid, theirs.device, addr.ip());
    Peer { label, pid: i32::try_from(theirs.pid).ok().filter(|_| same) }
}

/// The acceptor's wait for H3.
pub struct LateConfirm {
    reader: FrameReader,
    secret: [u8; SECRET_SIZE],
    h1: Vec<u8>,
    h2: Vec<u8>,
}

impl LateConfirm {
    /// Waits for the H3 that answers `h2`.
    pub fn new(secret: [u8; SECRET_SIZE], h1: Vec<u8>, h2: Vec<u8>) -> Self {
        LateConfirm { reader: FrameReader::default(), secret, h1, h2 }
    }
}

impl Confirm for LateConfirm {
    fn read(&mut self, stream: &mut TcpStream) -> std::result::Result<bool, ConfirmError> {
        match self.reader.pull(stream) {
            Ok(Progress::Blocked) => return Ok(false),
            Ok(Progress::Closed) => return Err(ConfirmError::Closed),
            Err(_) => return Err(ConfirmError::Bad),
            Ok(Progress::Done) => {}
        }
        match frames::open(&self.reader.take(), &self.secret, &[&self.h1, &self.h2]) {
            Ok((header, [])) if header.kind == Kind::Confirm && header.version == PROTOCOL_VERSION => Ok(true),
            _ => Err(ConfirmError::Bad),
        }
    }
}
