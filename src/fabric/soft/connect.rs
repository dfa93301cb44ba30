//! Connects two soft queue pairs: one dials the other, each proves that it knows the other's token, and they agree on the wire. A state
//! machine that never blocks, stepped by the thread that drives the queue pair.
//!
//! The queue pair with the lower token dials. It tries the acceptor's abstract unix socket first: if that answers and belongs to the same user,
//! both are on one host, and the dialer passes a segment over it. Otherwise it dials TCP, and if both endpoints name the same kernel it offers
//! a segment by a name in /dev/shm. If the acceptor can open the segment, both use it; if not, they use TCP.
//!
//! | dialer | acceptor |
//! |---|---|
//! | dials, sends a Hello with its offer | accepts, checks the Hello, sends a Reply with its choice |
//! | TCP: dials the data streams, a Hello on each | TCP: accepts the data streams, a Reply on each |
//!
//! Here is the dialer; the acceptor's steps are in `connect/acceptor.rs`.

mod acceptor;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use super::dial::{self, DialerCheck};
use super::endpoint::{Address, HELLO_SIZE, Offer, REPLY_SIZE, Reply};
use super::hub::PendingStreams;
use super::shm::{Segment, ShmWire, recv_with_fd};
use super::sockets;
use super::tcp::TcpWire;
use super::work_queues::{Fault, is_lack};
use crate::base::config::{Config, SoftWire};
use crate::base::error::Error;
use crate::base::fd::{File, OwnedFd, Socket};
use crate::base::log::{self, log_info};
use crate::base::mem::Shm;
use crate::base::stage::{self, Stage};
use crate::base::stats::RailStats;
use crate::base::{self, clock};
use crate::fabric::types::WcStatus;

/// For how long dialing is retried while it keeps failing, and the pause between two tries.
const RETRY_NS: u64 = 5_000_000_000;
const RETRY_PAUSE_NS: u64 = 50_000_000;
/// A stream that the acceptor closes this long after the Hello was not refused by a hub: hubs close what they have no room for, or what they
/// cannot authenticate, sooner.
const REFUSAL_NS: u64 = 1_000_000_000;

/// The wire that both sides have.
pub enum Connected {
    /// Shared memory.
    Shm(Box<ShmWire>),
    /// TCP.
    Tcp(Box<TcpWire>),
}

/// What [`Connecting`] needs to know of its queue pair.
pub struct ConnectArgs {
    /// Settings.
    pub config: Arc<Config>,
    /// The endpoint of this side.
    pub local: Address,
    /// The endpoint of the peer.
    pub remote: Address,
    /// Where the peer's streams arrive.
    pub pending: Arc<PendingStreams>,
    /// Whether this side asks for doorbells.
    pub notify: bool,
    /// Slots of the send queue.
    pub send_slots: usize,
    /// Traffic class of what this side sends.
    pub traffic_class: Option<u8>,
    /// Where the queue pair counts.
    pub stats: RailStats,
}

/// A queue pair that is connecting.
pub struct Connecting {
    args: ConnectArgs,
    step: Step,
    /// Dialer: since when dialing has failed; 0 while it has not.
    failing_since: u64,
    /// Dialer: not to dial before then.
    retry_at: u64,
    /// Dialer: whether the unix socket was tried and does not work.
    unix_failed: bool,
    /// Acceptor: whether the dialer still exists.
    check: DialerCheck,
    /// The last step may have opened streams.
    has_opened: bool,
}

enum Step {
    /// Dialer: no stream is open.
    Dial,
    /// Dialer: the TCP control stream is connecting.
    DialControl(Socket),
    /// Dialer: the Hello is sent on the control stream, the Reply has not come.
    AwaitReply(Box<AwaitedReply>),
    /// Dialer: the control stream, and the data streams that are being opened.
    DialData(OwnedFd, Vec<DataStream>),
    /// Acceptor: waits for the control stream.
    AcceptControl,
    /// Acceptor: the control stream, the data streams that have come, and when the last one did.
    AcceptData(OwnedFd, Vec<Option<OwnedFd>>, u64),
    /// Connected or failed.
    Done,
}

/// A stream with a Hello sent and no Reply yet.
struct AwaitedReply {
    socket: OwnedFd,
    unix: bool,
    hello: [u8; HELLO_SIZE],
    /// When the Hello was sent.
    since: u64,
    /// The segment that was offered. Dropping it removes its name from /dev/shm.
    segment: Option<Segment>,
    bytes: [u8; REPLY_SIZE],
    have: usize,
}

impl AwaitedReply {
    fn new(socket: OwnedFd, unix: bool, hello: [u8; HELLO_SIZE], segment: Option<Segment>) -> Self {
        AwaitedReply { socket, unix, hello, since: clock::now(), segment, bytes: [0; REPLY_SIZE], have: 0 }
    }

    /// Reads more of the Reply; true once it is whole.
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

/// A data stream of the dialer's.
enum DataStream {
    /// To be dialed, not before then.
    Closed(u64),
    Dialing(Socket),
    AwaitReply(Box<AwaitedReply>),
    /// The acceptor has confirmed it.
    Open(OwnedFd),
}

impl Connecting {
    /// Begins to connect. Errors: the two sides allow no common wire.
    pub fn new(args: ConnectArgs) -> Result<Self, Fault> {
        let (mine, theirs) = (args.local.wire, args.remote.wire);
        if matches!((mine, theirs), (SoftWire::Shm, SoftWire::Tcp) | (SoftWire::Tcp, SoftWire::Shm)) {
            return Err(unreachable(format!("one side allows only {mine:?}, the other only {theirs:?} (RAILHEAD_SOFT_WIRE)")));
        }
        let dials = args.local.token < args.remote.token;
        let step = if dials { Step::Dial } else { Step::AcceptControl };
        Ok(Connecting { args, step, failing_since: 0, retry_at: 0, unix_failed: false, check: DialerCheck::default(), has_opened: false })
    }

    /// Calls `watch` with each stream that a sleeper must watch, and for which events.
    pub fn watch(&self, mut watch: impl FnMut(RawFd, u32) -> base::error::Result<()>) -> base::error::Result<()> {
        let (input, output, end) = (libc::EPOLLIN as u32, libc::EPOLLOUT as u32, libc::EPOLLRDHUP as u32);
        match &self.step {
            Step::DialControl(socket) => watch(socket.as_raw_fd(), output),
            Step::AwaitReply(awaited) => watch(awaited.socket.as_raw_fd(), input),
            Step::DialData(control, streams) => {
                watch(control.as_raw_fd(), end)?;
                streams.iter().try_for_each(|stream| match stream {
                    DataStream::Dialing(socket) => watch(socket.as_raw_fd(), output),
                    DataStream::AwaitReply(awaited) => watch(awaited.socket.as_raw_fd(), input),
                    DataStream::Closed(_) | DataStream::Open(_) => Ok(()),
                })
            }
            Step::AcceptData(control, ..) => watch(control.as_raw_fd(), end),
            Step::Dial | Step::AcceptControl | Step::Done => Ok(()),
        }
    }

    /// Whether it waits for a stream that arrives at the hub.
    pub fn waits_for_streams(&self) -> bool {
        matches!(self.step, Step::AcceptControl | Step::AcceptData(..))
    }

    /// Whether the last step may have opened streams, which nobody watches yet.
    pub fn has_opened(&self) -> bool {
        self.has_opened
    }

    /// Goes as far as it can without waiting. The wire, once it is there.
    pub fn step(&mut self) -> Result<Option<Connected>, Fault> {
        self.has_opened = matches!(self.step, Step::DialData(..));
        loop {
            let step = std::mem::replace(&mut self.step, Step::Done);
            let before = std::mem::discriminant(&step);
            let connected = match step {
                Step::Dial => self.dial()?,
                Step::DialControl(socket) => self.dial_control(socket)?,
                Step::AwaitReply(awaited) => self.await_reply(awaited)?,
                Step::DialData(control, streams) => self.dial_data(control, streams)?,
                Step::AcceptControl => self.accept_control()?,
                Step::AcceptData(control, streams, since) => self.accept_data(control, streams, since)?,
                Step::Done => None,
            };
            if connected.is_some() {
                stage::reach(Stage::WireUp);
                return Ok(connected);
            }
            if std::mem::discriminant(&self.step) == before {
                return Ok(None);
            }
            self.has_opened = true;
        }
    }

    fn shm_allowed(&self) -> bool {
        self.args.local.wire != SoftWire::Tcp && self.args.remote.wire != SoftWire::Tcp
    }

    fn tcp_allowed(&self) -> bool {
        self.args.local.wire != SoftWire::Shm && self.args.remote.wire != SoftWire::Shm
    }

    fn dial(&mut self) -> Result<Option<Connected>, Fault> {
        self.step = Step::Dial;
        if self.retry_at != 0 && clock::now() < self.retry_at {
            return Ok(None);
        }
        if self.shm_allowed() && !self.unix_failed {
            match sockets::connect_unix(&self.args.remote.instance) {
                Ok(socket) => {
                    stage::reach(Stage::WireDialed);
                    return self.send_hello(socket, true);
                }
                // The listener's backlog is full, so its owner is alive and will accept later.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) if is_emfile(&e) => return Err(self.cannot_dial()),
                Err(_) => self.unix_failed = true,
            }
        }
        match sockets::connect_tcp(&self.args.local, &self.args.remote, self.args.config.tcp_buffer_kib) {
            Ok(socket) => self.step = Step::DialControl(socket),
            Err(e) => self.redial(e)?,
        }
        Ok(None)
    }

    /// Dials the control stream again after a pause. Errors: it has failed for too long.
    fn redial(&mut self, e: io::Error) -> Result<(), Fault> {
        self.retry_at = self.next_try(e)?;
        self.step = Step::Dial;
        Ok(())
    }

    /// When to dial a stream again after error `e`. Errors: dialing has failed for too long.
    fn next_try(&mut self, e: io::Error) -> Result<u64, Fault> {
        if is_emfile(&e) {
            return Err(self.cannot_dial());
        }
        let now = clock::now();
        if self.failing_since == 0 {
            self.failing_since = now;
        }
        if now - self.failing_since > RETRY_NS {
            let peer = self.args.remote.addr;
            return Err(if is_lack(&e) {
                Fault::lacking(&e, &format!("to dial the peer at {peer}"))
            } else {
                unreachable(format!("cannot reach the peer's soft fabric at {peer}: {e}"))
            });
        }
        Ok(now + RETRY_PAUSE_NS)
    }

    fn cannot_dial(&self) -> Fault {
        no_descriptor("to dial the peer", &self.args.local)
    }

    /// As [`Connecting::next_try`], for a stream that the acceptor closed instead of sending a Reply. If it kept the stream for a while, dialing
    /// had worked until now.
    fn closed_without_reply(&mut self, awaited: &AwaitedReply, e: io::Error) -> Result<u64, Fault> {
        if clock::now() - awaited.since > REFUSAL_NS {
            self.failing_since = 0;
        }
        self.next_try(e)
    }

    fn dial_control(&mut self, socket: Socket) -> Result<Option<Connected>, Fault> {
        match sockets::connected(&socket) {
            Ok(false) => self.step = Step::DialControl(socket),
            Ok(true) => {
                stage::reach(Stage::WireDialed);
                return self.send_hello(socket.convert(), false);
            }
            Err(e) => self.redial(e)?,
        }
        Ok(None)
    }

    /// Sends the Hello with the best offer that this stream allows.
    fn send_hello(&mut self, socket: OwnedFd, unix: bool) -> Result<Option<Connected>, Fault> {
        let (mut segment, mut memory, mut why) = (None, None, None);
        let mut offer = Offer::Tcp;
        if unix || (self.shm_allowed() && self.args.local.kernel == self.args.remote.kernel) {
            match self.make_segment(unix) {
                Ok((made, how, fd)) => {
                    (segment, memory) = (Some(made), fd);
                    offer = how;
                }
                Err(Error::System { word, .. }) if is_emfile(&word) => return Err(self.cannot_dial()),
                Err(e) => {
                    log_info!(log::NET, "no shared memory towards {}: {e}", self.args.remote.addr);
                    why = Some(e);
                }
            }
        }
        if segment.is_none() && unix {
            self.unix_failed = true;
            self.step = Step::Dial;
            return Ok(None);
        }
        if segment.is_none() && !self.tcp_allowed() {
            return Err(match why {
                Some(Error::System { word, .. }) => Fault::lacking(&word, SHM_ONLY),
                _ => unreachable("shared memory with the peer is not possible, and RAILHEAD_SOFT_WIRE=shm allows nothing else"),
            });
        }
        let memory = memory.as_ref().map(AsRawFd::as_raw_fd);
        stage::reach(Stage::WireHelloReady);
        let hello = match dial::send_hello(&socket, &self.args.local, &self.args.remote, offer, memory) {
            Ok(hello) => hello,
            Err(e) => return self.redial(e).map(|()| None),
        };
        stage::reach(Stage::WireHelloSent);
        self.step = Step::AwaitReply(Box::new(AwaitedReply::new(socket, unix, hello, segment)));
        Ok(None)
    }

    /// A segment, how it is offered, and the descriptor to be passed if it has no name.
    fn make_segment(&self, unix: bool) -> base::error::Result<(Segment, Offer, Option<File>)> {
        let bounce = (u64::from(self.args.config.shm_bounce_kib) * 1024).next_power_of_two();
        let len = Segment::len_for(bounce)?;
        let (shm, fd) = if unix {
            let (shm, fd) = Shm::create_sparse("railhead-wire", len)?;
            (shm, Some(fd))
        } else {
            (Shm::create_file(len)?, None)
        };
        let offer = match shm.name() {
            Some(name) => Offer::Named(len as u64, name.to_string()),
            None => Offer::Passed(len as u64),
        };
        let segment = Segment::create(shm, bounce)?;
        segment.introduce(self.args.notify);
        Ok((segment, offer, fd))
    }

    fn await_reply(&mut self, mut awaited: Box<AwaitedReply>) -> Result<Option<Connected>, Fault> {
        match awaited.read() {
            Ok(true) => {}
            Ok(false) => {
                self.step = Step::AwaitReply(awaited);
                return Ok(None);
            }
            Err(e) => {
                self.retry_at = self.closed_without_reply(&awaited, e)?;
                self.step = Step::Dial;
                return Ok(None);
            }
        }
        let AwaitedReply { socket, unix, hello, segment, bytes, .. } = *awaited;
        match (Reply::decode(&bytes, &self.args.local.token, &hello), segment) {
            (Some(Reply::Shm), Some(segment)) => Ok(Some(self.use_segment(segment, socket, unix))),
            (Some(Reply::Tcp(streams)), _) if !unix && self.tcp_allowed() => {
                self.set_options(&socket);
                self.failing_since = 0;
                let streams = streams.min(self.args.local.streams);
                self.step = Step::DialData(socket, (0..streams).map(|_| DataStream::Closed(0)).collect());
                Ok(None)
            }
            (Some(Reply::Refused(_)), _) if unix => {
                self.unix_failed = true;
                self.step = Step::Dial;
                Ok(None)
            }
            (Some(Reply::Refused(errno)), _) if errno != 0 => {
                let lack = io::Error::from_raw_os_error(errno.into());
                Err(unreachable(format!(
                    "the peer cannot map the memory that this side offers, and nothing else is allowed (RAILHEAD_SOFT_WIRE): {lack}"
                )))
            }
            (Some(_), _) => Err(unreachable("the peer refused every wire that this side offered (RAILHEAD_SOFT_WIRE at either side)")),
            (None, _) => self.redial(unauthenticated()).map(|()| None),
        }
    }

    fn use_segment(&self, mut segment: Segment, socket: OwnedFd, unix: bool) -> Connected {
        segment.unlink();
        segment.prove_peer(if unix { sockets::peer_pid(&socket) } else { None }, self.args.config.cma);
        Connected::Shm(Box::new(ShmWire::new(segment, socket, unix, self.args.send_slots, self.args.stats.clone())))
    }

    /// Opens the data streams. The acceptor confirms each with a Reply, so it has them all before any data is sent. It closes one that its hub has
    /// no room for, because of unauthenticated streams; that one is dialed again.
    fn dial_data(&mut self, control: OwnedFd, streams: Vec<DataStream>) -> Result<Option<Connected>, Fault> {
        // Asked before the Replies are read: an acceptor that has confirmed all streams may go away right after that.
        let gone = sockets::closed(&control);
        let streams = (0u8..).zip(streams).map(|(number, stream)| self.open_data(number, stream)).collect::<Result<Vec<_>, _>>()?;
        if streams.iter().all(|stream| matches!(stream, DataStream::Open(_))) {
            let streams = streams.into_iter().filter_map(|stream| if let DataStream::Open(socket) = stream { Some(socket) } else { None });
            return Ok(Some(Connected::Tcp(Box::new(TcpWire::new(control, streams.collect())))));
        }
        if gone {
            return Err(unreachable("the peer went away before it had all data streams"));
        }
        self.step = Step::DialData(control, streams);
        Ok(None)
    }

    /// Takes a data stream as far as it can go without waiting.
    fn open_data(&mut self, number: u8, mut stream: DataStream) -> Result<DataStream, Fault> {
        loop {
            stream = match stream {
                DataStream::Closed(until) if clock::now() >= until => {
                    match sockets::connect_tcp(&self.args.local, &self.args.remote, self.args.config.tcp_buffer_kib) {
                        Ok(socket) => DataStream::Dialing(socket),
                        Err(e) => return self.next_try(e).map(DataStream::Closed),
                    }
                }
                DataStream::Dialing(socket) => match sockets::connected(&socket) {
                    Ok(false) => return Ok(DataStream::Dialing(socket)),
                    Ok(true) => {
                        let socket: OwnedFd = socket.convert();
                        match dial::send_hello(&socket, &self.args.local, &self.args.remote, Offer::Data(number), None) {
                            Ok(hello) => DataStream::AwaitReply(Box::new(AwaitedReply::new(socket, false, hello, None))),
                            Err(e) => return self.next_try(e).map(DataStream::Closed),
                        }
                    }
                    Err(e) => return self.next_try(e).map(DataStream::Closed),
                },
                DataStream::AwaitReply(mut awaited) => match awaited.read() {
                    Ok(false) => return Ok(DataStream::AwaitReply(awaited)),
                    Ok(true) => match Reply::decode(&awaited.bytes, &self.args.local.token, &awaited.hello) {
                        Some(Reply::Tcp(n)) if n == number => {
                            self.failing_since = 0;
                            self.set_options(&awaited.socket);
                            DataStream::Open(awaited.socket)
                        }
                        _ => return self.next_try(unauthenticated()).map(DataStream::Closed),
                    },
                    Err(e) => return self.closed_without_reply(&awaited, e).map(DataStream::Closed),
                },
                waits @ (DataStream::Closed(_) | DataStream::Open(_)) => return Ok(waits),
            };
        }
    }

    fn set_options(&self, socket: &OwnedFd) {
        let ConnectArgs { config, local, remote, traffic_class, .. } = &self.args;
        sockets::set_options(socket, config, local, remote, *traffic_class);
    }
}

/// For what a process then has not enough.
const SHM_ONLY: &str = "for shared memory with the peer, and RAILHEAD_SOFT_WIRE=shm allows nothing else";

fn is_emfile(e: &io::Error) -> bool {
    e.raw_os_error() == Some(libc::EMFILE)
}

/// The fault of a queue pair for which this process has no descriptor left. Names how many a queue pair needs.
#[cold]
pub fn no_descriptor(what: &str, local: &Address) -> Fault {
    let need = 1 + u32::from(local.streams);
    let purpose =
        format!("{what}; a queue pair takes 1 on shared memory, and 1 more while it connects, {need} over TCP (RAILHEAD_TCP_STREAMS)");
    Fault::lacking(&io::Error::from_raw_os_error(libc::EMFILE), &purpose)
}

#[cold]
fn unauthenticated() -> io::Error {
    io::Error::other("the reply does not prove that it is the peer's")
}

#[cold]
fn unreachable(why: impl Into<String>) -> Fault {
    Fault::oldest(WcStatus::RetryExcErr, why)
}
