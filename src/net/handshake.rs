//! What both ends of a handshake share: who this process is, what it tells the peer, and what it checks of what the peer tells.
//! Called by whatever thread drives the comm's set-up.

use std::io::Read;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};

use crate::base::config::{self, Config};
use crate::base::error::{Error, Result};
use crate::base::stats::{CommStats, WaitCause};
use crate::base::{clock, host, rand};

use super::MAX_MESSAGE;
use super::device::NetDevice;
use super::handle::SECRET_SIZE;
use super::liveness::{Liveness, Peer, Verdict, cause};
use super::rails::Rails;
use super::wire::{self, FrameReader, Kind, Params, Progress, WIRE_VERSION};

/// This process, as its peers hear of it.
#[derive(Debug, Clone)]
pub struct Local {
    /// Host id (a hint).
    pub host_id: [u8; 16],
    /// Host name.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// Inode of the pid namespace; 0 if unknown.
    pub pid_ns: u64,
}

impl Local {
    /// Asks the system.
    pub fn new() -> Local {
        use std::os::unix::fs::MetadataExt;
        let host = String::from_utf8_lossy(&host::name()).chars().filter(|c| !c.is_control()).collect();
        let pid_ns = std::fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino());
        Local { host_id: host::id(), host, pid: std::process::id(), pid_ns }
    }
}

/// What the set-up of a comm needs of its [`super::Net`], without keeping that alive.
#[derive(Clone)]
pub struct Setup {
    /// Settings.
    pub config: Arc<Config>,
    /// This process.
    pub local: Arc<Local>,
    /// The comm's device.
    pub device: Arc<NetDevice>,
}

impl Setup {
    /// Whether queues are to notify, for the device's thread to sleep.
    pub fn notify(&self) -> bool {
        self.config.progress == config::Progress::Thread
    }

    /// This side's parameters.
    pub fn params(&self, rails: &mut Rails, qps_per_rail: usize, memory: usize, instance: u32, traffic_class: i32) -> Result<Params> {
        let mut nonce = [0u8; 16];
        rand::fill(&mut nonce)?;
        Ok(Params {
            nonce,
            instance,
            host_id: self.local.host_id,
            pid: self.local.pid,
            pid_ns: self.local.pid_ns,
            traffic_class,
            max_message: MAX_MESSAGE as u64,
            memory: memory as u64,
            rails: rails.rails() as u8,
            qps_per_rail: qps_per_rail as u8,
            fabric: self.device.fabric().to_owned(),
            host: self.local.host.clone(),
            device: self.device.name().to_owned(),
            rkeys: rails.own_keys(),
            endpoints: rails.endpoints(),
        })
    }

    /// Whether both sides can talk; if not, why, in words that make sense on both.
    pub fn check(&self, version: u16, peer: Option<&Params>) -> std::result::Result<(), String> {
        let here = format!("{} pid {}", self.local.host, self.local.pid);
        if version != WIRE_VERSION {
            return Err(format!("wire version {version} meets {WIRE_VERSION} of {here}; use one release of Railhead on all ranks"));
        }
        let Some(peer) = peer else { return Ok(()) };
        if peer.fabric != self.device.fabric() {
            let (theirs, ours) = (&peer.fabric, self.device.fabric());
            return Err(format!(
                "peer {} pid {} ({}) is on fabric {theirs}, this side {here} ({}) on {ours}; set RAILHEAD_FABRIC alike on all ranks",
                peer.host,
                peer.pid,
                peer.device,
                self.device.name()
            ));
        }
        if peer.memory == 0 || peer.memory % 64 != 0 || peer.max_message == 0 {
            return Err(format!("peer {} pid {} names memory that cannot be", peer.host, peer.pid));
        }
        Ok(())
    }
}

/// A connection whose handshake is done; `M` is the memory that its peer writes to.
pub struct Established<M> {
    /// Queue pairs, connected. Dropped before the memory.
    pub rails: Rails,
    /// FIFO or records.
    pub memory: M,
    /// The peer.
    pub peer: Peer,
    /// The watch over it.
    pub liveness: Liveness,
    /// Where the comm counts.
    pub stats: CommStats,
}

impl<M> Established<M> {
    /// Lets the queue pairs meet, so that what is posted later goes out at once; true once they have, or the peer, whose own had, has closed its
    /// comm since: that is for the use of the comm to say, and no failure of the handshake.
    ///
    /// Errors: they cannot meet, `System` if this process has no descriptor left for it; the peer is gone without having closed.
    pub fn meet(&mut self) -> Result<bool> {
        let gone = match self.rails.meet() {
            Ok(true) => {
                self.stats.clear_wait();
                return Ok(true);
            }
            Ok(false) => {
                self.stats.wait(cause(WaitCause::Handshake, self.liveness.stopped()));
                match self.liveness.idle() {
                    Verdict::Alive | Verdict::LookedAt => return Ok(false),
                    Verdict::Gone(why) => why,
                    Verdict::Nonsense(why) => format!("it sent {why}"),
                }
            }
            Err(ours @ Error::System { .. }) => return Err(ours),
            Err(_) if self.liveness.autopsy(clock::now()) => return Ok(false),
            Err(why) => why.to_string(),
        };
        match self.liveness.said_bye() {
            true => Ok(true),
            false => Err(Error::remote(format!("{}: {gone}", self.peer.label))),
        }
    }
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

/// The acceptor's wait for H3.
pub struct LateConfirm {
    reader: FrameReader,
    secret: [u8; SECRET_SIZE],
    h1: Vec<u8>,
    h2: Vec<u8>,
}

/// Why there is no H3.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConfirmError {
    /// The connector is gone.
    Closed,
    /// It is not the H3 of this conversation.
    Bad,
}

impl LateConfirm {
    /// Waits for the H3 that answers `h2`.
    pub fn new(secret: [u8; SECRET_SIZE], h1: Vec<u8>, h2: Vec<u8>) -> Self {
        LateConfirm { reader: FrameReader::default(), secret, h1, h2 }
    }

    /// Whether it has come.
    pub fn read(&mut self, stream: &mut impl Read) -> std::result::Result<bool, ConfirmError> {
        match self.reader.pull(stream) {
            Ok(Progress::Blocked) => return Ok(false),
            Ok(Progress::Closed) => return Err(ConfirmError::Closed),
            Err(_) => return Err(ConfirmError::Bad),
            Ok(Progress::Done) => {}
        }
        match wire::open(&self.reader.take(), &self.secret, &[&self.h1, &self.h2]) {
            Ok((header, [])) if header.kind == Kind::Confirm && header.version == WIRE_VERSION => Ok(true),
            _ => Err(ConfirmError::Bad),
        }
    }
}
