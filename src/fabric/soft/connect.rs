//! How two soft queue pairs meet: one dials, both prove that they know the other's token, and together they choose the wire. A state
//! machine that never blocks, stepped by the thread that drives the queue pair.
//!
//! The lower token dials. It tries the acceptor's abstract unix socket first: if that answers and belongs to the same user, both are on
//! one host and a segment is passed over it. Otherwise it dials TCP, and if the kernels seem to be the same it offers a
//! segment by a name in /dev/shm; what the acceptor can open, both use. What neither can share goes over TCP.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use socket2::TcpKeepalive;

use super::dial::{self, Probe};
use super::endpoint::{Address, HELLO_SIZE, Offer, REPLY_SIZE, Reply};
use super::hub::{Arrival, LetterBox, peer_of};
use super::queue::Fault;
use super::shm::{Segment, ShmWire, recv_with_fd, send_with_fd};
use super::tcp::TcpWire;
use crate::base::config::{Config, SoftWire};
use crate::base::error::Error;
use crate::base::fd::{OwnedFd, Socket};
use crate::base::log::{self, log_info, log_warn};
use crate::base::mem::Shm;
use crate::base::stage::{self, Stage};
use crate::base::stats::RailStats;
use crate::base::{self, clock};
use crate::fabric::types::WcStatus;

/// How long a refused or unreachable address is dialed again, and how often.
const RETRY_NS: u64 = 5_000_000_000;
const RETRY_PAUSE_NS: u64 = 50_000_000;
/// How long the other end keeps a stream that it does not close for want of room, nor for being a stranger's: longer than a hub that is served
/// takes for those.
const KEPT_NS: u64 = 1_000_000_000;

/// What came of the meeting.
pub enum Met {
    /// Shared memory.
    Shm(Box<ShmWire>),
    /// TCP.
    Tcp(Box<TcpWire>),
}

/// What one side brings to the meeting.
pub struct Party {
    /// Settings.
    pub config: Arc<Config>,
    /// This side, as its endpoint says.
    pub local: Address,
    /// The other side.
    pub remote: Address,
    /// Where streams from the other side arrive.
    pub letters: Arc<LetterBox>,
    /// Whether this side wants doorbells.
    pub notify: bool,
    /// Slots of the send queue.
    pub send_slots: usize,
    /// Traffic class of what this side sends.
    pub traffic_class: Option<u8>,
    /// Where the queue pair counts.
    pub stats: RailStats,
}

/// A meeting under way.
pub struct Bringup {
    party: Party,
    stage: Step,
    /// When dialing began to fail; 0 while it does not.
    failing_since: u64,
    retry_at: u64,
    /// Whether the unix socket was tried and is out of the question.
    unix_failed: bool,
    /// Acceptor: whether there is still somebody to wait for.
    probe: Probe,
}

enum Step {
    /// Dialer: nothing is open.
    Dial,
    /// Dialer: the TCP stream is being connected.
    Connecting(Socket),
    /// Dialer: the greeting is out.
    Reply(Box<Asked>),
    /// Dialer: data streams are being opened.
    Streams(OwnedFd, Vec<Opening>),
    /// Acceptor: waits for the first stream.
    Listen,
    /// Acceptor: waits for data streams, the last of which came then.
    Gather(OwnedFd, Vec<Option<OwnedFd>>, u64),
    /// Over.
    Done,
}

/// A stream that was greeted and has not answered.
struct Asked {
    socket: OwnedFd,
    unix: bool,
    hello: [u8; HELLO_SIZE],
    /// When.
    since: u64,
    segment: Option<Segment>,
    /// The segment's name in /dev/shm goes when this does.
    bytes: [u8; REPLY_SIZE],
    have: usize,
}

impl Asked {
    fn new(socket: OwnedFd, unix: bool, hello: [u8; HELLO_SIZE], segment: Option<Segment>) -> Self {
        Asked { socket, unix, hello, since: clock::now(), segment, bytes: [0; REPLY_SIZE], have: 0 }
    }

    /// Reads more of the answer; true once it is whole.
    fn read(&mut self) -> io::Result<bool> {
        match recv_with_fd(&self.socket, &mut self.bytes[self.have..]) {
            Ok((0, _)) => return Err(io::ErrorKind::ConnectionReset.into()),
            Ok((n, _)) => self.have += n,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(e) => return Err(e),
        }
        Ok(self.have == REPLY_SIZE)
    }
}

/// How far a data stream of the dialer's is.
enum Opening {
    /// To be dialed, not before then.
    Closed(u64),
    Connecting(Socket),
    Asked(Box<Asked>),
    /// The peer has it.
    Open(OwnedFd),
}

impl Bringup {
    /// Begins.
    pub fn new(party: Party) -> Result<Self, Fault> {
        let (mine, theirs) = (party.local.wire, party.remote.wire);
        if matches!((mine, theirs), (SoftWire::Shm, SoftWire::Tcp) | (SoftWire::Tcp, SoftWire::Shm)) {
            return Err(unreachable(format!("one side allows only {mine:?}, the other only {theirs:?} (RAILHEAD_SOFT_WIRE)")));
        }
        let dials = party.local.token < party.remote.token;
        let stage = if dials { Step::Dial } else { Step::Listen };
        Ok(Bringup { party, stage, failing_since: 0, retry_at: 0, unix_failed: false, probe: Probe::default() })
    }

    /// Calls `watch` with each stream that a sleeper must watch, and for what.
    pub fn watch(&self, mut watch: impl FnMut(RawFd, u32) -> base::error::Result<()>) -> base::error::Result<()> {
        let (input, output, end) = (libc::EPOLLIN as u32, libc::EPOLLOUT as u32, libc::EPOLLRDHUP as u32);
        match &self.stage {
            Step::Connecting(socket) => watch(socket.as_raw_fd(), output),
            Step::Reply(asked) => watch(asked.socket.as_raw_fd(), input),
            Step::Streams(control, streams) => {
                watch(control.as_raw_fd(), end)?;
                streams.iter().try_for_each(|stream| match stream {
                    Opening::Connecting(socket) => watch(socket.as_raw_fd(), output),
                    Opening::Asked(asked) => watch(asked.socket.as_raw_fd(), input),
                    Opening::Closed(_) | Opening::Open(_) => Ok(()),
                })
            }
            Step::Gather(control, ..) => watch(control.as_raw_fd(), end),
            Step::Dial | Step::Listen | Step::Done => Ok(()),
        }
    }

    /// Whether what it waits for comes to the hub.
    pub fn waits_for_streams(&self) -> bool {
        matches!(self.stage, Step::Listen | Step::Gather(..))
    }

    /// Goes as far as it can without waiting.
    pub fn step(&mut self) -> Result<Option<Met>, Fault> {
        loop {
            let stage = std::mem::replace(&mut self.stage, Step::Done);
            let before = std::mem::discriminant(&stage);
            let met = match stage {
                Step::Dial => self.dial()?,
                Step::Connecting(socket) => self.connecting(socket)?,
                Step::Reply(asked) => self.reply(asked)?,
                Step::Streams(control, streams) => self.streams(control, streams)?,
                Step::Listen => self.listen()?,
                Step::Gather(control, streams, since) => self.gather(control, streams, since)?,
                Step::Done => None,
            };
            if met.is_some() {
                stage::reach(Stage::WireUp);
                return Ok(met);
            }
            if std::mem::discriminant(&self.stage) == before {
                return Ok(None);
            }
        }
    }

    fn shm_allowed(&self) -> bool {
        self.party.local.wire != SoftWire::Tcp && self.party.remote.wire != SoftWire::Tcp
    }

    fn tcp_allowed(&self) -> bool {
        self.party.local.wire != SoftWire::Shm && self.party.remote.wire != SoftWire::Shm
    }

    fn dial(&mut self) -> Result<Option<Met>, Fault> {
        self.stage = Step::Dial;
        if self.retry_at != 0 && clock::now() < self.retry_at {
            return Ok(None);
        }
        if self.shm_allowed() && !self.unix_failed {
            match dial::unix(&self.party.remote.instance) {
                Ok(socket) => {
                    stage::reach(Stage::WireDialed);
                    return self.ask(socket, true);
                }
                // The backlog is full: its owner is alive and will get to it.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) if is_emfile(&e) => return Err(self.cannot_dial()),
                Err(_) => self.unix_failed = true,
            }
        }
        match dial::tcp(&self.party.local, &self.party.remote, self.party.config.tcp_buffer_kib) {
            Ok(socket) => self.stage = Step::Connecting(socket),
            Err(e) => self.failed(e)?,
        }
        Ok(None)
    }

    /// Dials again after a little while, as long as that makes sense.
    fn failed(&mut self, e: io::Error) -> Result<(), Fault> {
        self.retry_at = self.again(e)?;
        self.stage = Step::Dial;
        Ok(())
    }

    /// When to dial again what has failed.
    fn again(&mut self, e: io::Error) -> Result<u64, Fault> {
        if is_emfile(&e) {
            return Err(self.cannot_dial());
        }
        let now = clock::now();
        if self.failing_since == 0 {
            self.failing_since = now;
        }
        if now - self.failing_since > RETRY_NS {
            return Err(unreachable(format!("cannot reach the peer's soft fabric at {}: {e}", self.party.remote.addr)));
        }
        Ok(now + RETRY_PAUSE_NS)
    }

    fn cannot_dial(&self) -> Fault {
        no_descriptor("to dial the peer", &self.party.local)
    }

    /// As [`Bringup::again`], for a stream that was greeted and closed by the other end. One that was kept for a while was no failure until then.
    fn dropped(&mut self, asked: &Asked, e: io::Error) -> Result<u64, Fault> {
        if clock::now() - asked.since > KEPT_NS {
            self.failing_since = 0;
        }
        self.again(e)
    }

    fn connecting(&mut self, socket: Socket) -> Result<Option<Met>, Fault> {
        match dial::connected(&socket) {
            Ok(false) => self.stage = Step::Connecting(socket),
            Ok(true) => {
                stage::reach(Stage::WireDialed);
                return self.ask(socket.convert(), false);
            }
            Err(e) => self.failed(e)?,
        }
        Ok(None)
    }

    /// Sends the greeting with the best offer that this stream allows.
    fn ask(&mut self, socket: OwnedFd, unix: bool) -> Result<Option<Met>, Fault> {
        let mut segment = None;
        let mut offer = Offer::Tcp;
        if unix || (self.shm_allowed() && self.party.local.kernel == self.party.remote.kernel) {
            match self.make_segment(unix) {
                Ok((made, how)) => {
                    segment = Some(made);
                    offer = how;
                }
                Err(Error::System { word, .. }) if is_emfile(&word) => return Err(self.cannot_dial()),
                Err(e) => log_info!(log::NET, "no shared memory towards {}: {e}", self.party.remote.addr),
            }
        }
        if segment.is_none() && unix {
            self.unix_failed = true;
            self.stage = Step::Dial;
            return Ok(None);
        }
        if segment.is_none() && !self.tcp_allowed() {
            return Err(unreachable("shared memory with the peer is not possible, and RAILHEAD_SOFT_WIRE=shm allows nothing else"));
        }
        let memory = segment.as_ref().filter(|_| unix).map(Segment::fd);
        let hello = match dial::greet(&socket, &self.party.local, &self.party.remote, offer, memory) {
            Ok(hello) => hello,
            Err(e) => return self.failed(e).map(|()| None),
        };
        stage::reach(Stage::WireHelloSent);
        self.stage = Step::Reply(Box::new(Asked::new(socket, unix, hello, segment)));
        Ok(None)
    }

    fn make_segment(&self, unix: bool) -> base::error::Result<(Segment, Offer)> {
        let bounce = (u64::from(self.party.config.shm_bounce_kib) * 1024).next_power_of_two();
        let len = Segment::len_for(bounce)?;
        let shm = if unix { Shm::create("railhead-wire", len)? } else { Shm::create_file(len)? };
        let offer = match shm.name() {
            Some(name) => Offer::Named(len as u64, name.to_string()),
            None => Offer::Passed(len as u64),
        };
        let segment = Segment::create(shm, bounce)?;
        segment.introduce(self.party.notify);
        Ok((segment, offer))
    }

    fn reply(&mut self, mut asked: Box<Asked>) -> Result<Option<Met>, Fault> {
        match asked.read() {
            Ok(true) => {}
            Ok(false) => {
                self.stage = Step::Reply(asked);
                return Ok(None);
            }
            Err(e) => {
                self.retry_at = self.dropped(&asked, e)?;
                self.stage = Step::Dial;
                return Ok(None);
            }
        }
        let Asked { socket, unix, hello, segment, bytes, .. } = *asked;
        match (Reply::decode(&bytes, &self.party.local.token, &hello), segment) {
            (Some(Reply::Shm), Some(segment)) => Ok(Some(self.share(segment, socket, unix))),
            (Some(Reply::Tcp(streams)), _) if !unix && self.tcp_allowed() => {
                self.tune(&socket);
                self.failing_since = 0;
                let streams = streams.min(self.party.local.streams);
                self.stage = Step::Streams(socket, (0..streams).map(|_| Opening::Closed(0)).collect());
                Ok(None)
            }
            (Some(Reply::Refused), _) if unix => {
                self.unix_failed = true;
                self.stage = Step::Dial;
                Ok(None)
            }
            (Some(_), _) => Err(unreachable("the peer refused every wire that this side offered (RAILHEAD_SOFT_WIRE at either side)")),
            (None, _) => self.failed(not_the_peer()).map(|()| None),
        }
    }

    fn share(&self, mut segment: Segment, socket: OwnedFd, unix: bool) -> Met {
        segment.unlink();
        segment.prove_peer(if unix { peer_of(&socket) } else { None }, self.party.config.cma);
        Met::Shm(Box::new(ShmWire::new(segment, socket, unix, self.party.send_slots, self.party.stats.clone())))
    }

    /// Opens the data streams. The peer has them all before anything is sent: each is answered, and one that it closes instead, because strangers
    /// crowd at its hub, is dialed again.
    fn streams(&mut self, control: OwnedFd, streams: Vec<Opening>) -> Result<Option<Met>, Fault> {
        // Looked at before the answers are: whoever has answered all may have gone since.
        let gone = dial::closed(&control);
        let streams = (0u8..).zip(streams).map(|(number, stream)| self.open(number, stream)).collect::<Result<Vec<_>, _>>()?;
        if streams.iter().all(|stream| matches!(stream, Opening::Open(_))) {
            let streams = streams.into_iter().filter_map(|stream| if let Opening::Open(socket) = stream { Some(socket) } else { None });
            return Ok(Some(Met::Tcp(Box::new(TcpWire::new(control, streams.collect())))));
        }
        if gone {
            return Err(unreachable("the peer went away before it had all data streams"));
        }
        self.stage = Step::Streams(control, streams);
        Ok(None)
    }

    /// Takes a data stream as far as it can go without waiting.
    fn open(&mut self, number: u8, mut stream: Opening) -> Result<Opening, Fault> {
        loop {
            stream = match stream {
                Opening::Closed(until) if clock::now() >= until => {
                    match dial::tcp(&self.party.local, &self.party.remote, self.party.config.tcp_buffer_kib) {
                        Ok(socket) => Opening::Connecting(socket),
                        Err(e) => return self.again(e).map(Opening::Closed),
                    }
                }
                Opening::Connecting(socket) => match dial::connected(&socket) {
                    Ok(false) => return Ok(Opening::Connecting(socket)),
                    Ok(true) => {
                        let socket: OwnedFd = socket.convert();
                        match dial::greet(&socket, &self.party.local, &self.party.remote, Offer::Data(number), None) {
                            Ok(hello) => Opening::Asked(Box::new(Asked::new(socket, false, hello, None))),
                            Err(e) => return self.again(e).map(Opening::Closed),
                        }
                    }
                    Err(e) => return self.again(e).map(Opening::Closed),
                },
                Opening::Asked(mut asked) => match asked.read() {
                    Ok(false) => return Ok(Opening::Asked(asked)),
                    Ok(true) => match Reply::decode(&asked.bytes, &self.party.local.token, &asked.hello) {
                        Some(Reply::Tcp(n)) if n == number => {
                            self.failing_since = 0;
                            self.tune(&asked.socket);
                            Opening::Open(asked.socket)
                        }
                        _ => return self.again(not_the_peer()).map(Opening::Closed),
                    },
                    Err(e) => return self.dropped(&asked, e).map(Opening::Closed),
                },
                waits @ (Opening::Closed(_) | Opening::Open(_)) => return Ok(waits),
            };
        }
    }

    fn listen(&mut self) -> Result<Option<Met>, Fault> {
        self.stage = Step::Listen;
        let Some(arrival) = self.party.letters.take() else {
            let gone = |e| unreachable(format!("the peer's queue pair is gone: {e}"));
            return self.probe.look(&self.party.local, &self.party.remote).map(|()| None).map_err(gone);
        };
        if arrival.hello.from != self.party.remote.qpn || matches!(arrival.hello.offer, Offer::Data(_) | Offer::Probe) {
            return Ok(None);
        }
        let answer = |reply: Reply| {
            let bytes = reply.encode(&self.party.remote.token, &arrival.raw);
            matches!(send_with_fd(&arrival.socket, &bytes, None), Ok(REPLY_SIZE))
        };
        let offered = self.open_offered(&arrival);
        if let Err(Error::System { word, .. }) = &offered
            && is_emfile(word)
        {
            return Err(no_descriptor("for the memory that the peer passes", &self.party.local));
        }
        let offered = offered.unwrap_or_else(|e| {
            // The peer hears no more than that it was refused.
            let peer = self.party.remote.addr;
            match self.tcp_allowed() {
                true => log_info!(log::NET, "no shared memory from {peer}: {e}"),
                false => log_warn!(log::NET, "no shared memory from {peer}, and nothing else is allowed: {e}"),
            }
            None
        });
        if let Some(segment) = offered {
            segment.introduce(self.party.notify);
            if answer(Reply::Shm) {
                return Ok(Some(self.share(segment, arrival.socket, arrival.unix)));
            }
        } else if self.tcp_allowed() && !arrival.unix {
            let streams = self.party.local.streams.min(self.party.remote.streams);
            if answer(Reply::Tcp(streams)) {
                self.tune(&arrival.socket);
                self.stage = Step::Gather(arrival.socket, (0..streams).map(|_| None).collect(), clock::now());
            }
        } else {
            answer(Reply::Refused);
        }
        Ok(None)
    }

    /// Opens the segment that a greeting offers, if it offers one and this side may.
    fn open_offered(&self, arrival: &Arrival) -> base::error::Result<Option<Segment>> {
        if !self.shm_allowed() {
            return Ok(None);
        }
        let too_long = || Error::remote("the peer offered a segment longer than the address space");
        let shm = match &arrival.hello.offer {
            Offer::Passed(len) => {
                if arrival.pid.is_none() {
                    return Err(Error::remote("the peer is another user's process"));
                }
                // The kernel leaves out a descriptor that there is no room for.
                let none = || Error::system("no descriptor came with the greeting", io::Error::from_raw_os_error(libc::EMFILE));
                let memory = arrival.memory.as_ref().ok_or_else(none)?;
                let memory = OwnedFd::new(memory.try_clone().map_err(|e| Error::system("dup", e))?);
                Shm::attach(memory, usize::try_from(*len).map_err(|_| too_long())?)?
            }
            Offer::Named(len, name) => Shm::open_file(name, usize::try_from(*len).map_err(|_| too_long())?)?,
            Offer::Tcp | Offer::Data(_) | Offer::Probe => return Ok(None),
        };
        Segment::attach(shm).map(Some)
    }

    fn gather(&mut self, control: OwnedFd, mut streams: Vec<Option<OwnedFd>>, mut since: u64) -> Result<Option<Met>, Fault> {
        while let Some(arrival) = self.party.letters.take() {
            let Offer::Data(number) = arrival.hello.offer else { continue };
            // One whose connection was lost is dialed again. A replay is none of these.
            let free = |place: &&mut Option<OwnedFd>| place.as_ref().is_none_or(dial::closed);
            let place = streams.get_mut(usize::from(number)).filter(free);
            let Some(place) = place.filter(|_| arrival.hello.from == self.party.remote.qpn) else { continue };
            let answer = Reply::Tcp(number).encode(&self.party.remote.token, &arrival.raw);
            if matches!(send_with_fd(&arrival.socket, &answer, None), Ok(REPLY_SIZE)) {
                self.tune(&arrival.socket);
                *place = Some(arrival.socket);
                since = clock::now();
            }
        }
        if streams.iter().all(Option::is_some) {
            return Ok(Some(Met::Tcp(Box::new(TcpWire::new(control, streams.into_iter().flatten().collect())))));
        }
        if dial::closed(&control) {
            return Err(unreachable("the peer went away before its data streams had come"));
        }
        let seconds = self.party.config.handshake_timeout_s;
        if clock::now() - since > u64::from(seconds) * 1_000_000_000 {
            return Err(unreachable(format!("the peer's data streams did not come within {seconds} s (RAILHEAD_HANDSHAKE_TIMEOUT_S)")));
        }
        self.stage = Step::Gather(control, streams, since);
        Ok(None)
    }

    /// Sets what can be set on a connected TCP stream; nothing of it is vital.
    fn tune(&self, socket: &OwnedFd) {
        let config = &self.party.config;
        let socket = socket2::SockRef::from(socket);
        let _ = socket.set_tcp_nodelay(true);
        let near = self.party.local.kernel == self.party.remote.kernel;
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
            // Not TCP_USER_TIMEOUT: since Linux 5.11 that also ends the connection to a peer that acknowledges and does not read, because
            // it is stopped or busy. A host that is silent with data under way is noticed on the comm's control connection.
            let timeout = std::time::Duration::from_secs(u64::from(config.tcp_user_timeout_s));
            // The kernel knows whole seconds, and takes none of the three if one is 0.
            let second = std::time::Duration::from_secs(1);
            let keepalive = TcpKeepalive::new().with_time(second.max(timeout / 2)).with_interval(second.max(timeout / 8)).with_retries(4);
            let _ = socket.set_tcp_keepalive(&keepalive);
        }
        if let Some(class) = self.party.traffic_class.map(u32::from) {
            let _ = if self.party.remote.addr.is_ipv4() { socket.set_tos_v4(class) } else { socket.set_tclass_v6(class) };
        }
    }
}

fn is_emfile(e: &io::Error) -> bool {
    e.raw_os_error() == Some(libc::EMFILE)
}

/// This process has no descriptor left; the need is the queue pair's own.
#[cold]
pub fn no_descriptor(what: &str, local: &Address) -> Fault {
    let need = 1 + u32::from(local.streams);
    let why = format!("no descriptor left {what}; a queue pair takes 2 on shared memory, {need} over TCP (RAILHEAD_TCP_STREAMS)");
    Fault::oldest(WcStatus::LocQpOpErr, why)
}

#[cold]
fn not_the_peer() -> io::Error {
    io::Error::other("the answer does not prove that it is the peer's")
}

#[cold]
fn unreachable(why: impl Into<String>) -> Fault {
    Fault::oldest(WcStatus::RetryExcErr, why)
}
