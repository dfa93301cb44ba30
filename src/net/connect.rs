//! The connecting end of a handshake: a state machine that never waits, advanced by whatever call touches the comm: `connect`, or,
//! where the comm was handed out early (v4), `isend` and `test`. And the table of connects in progress, which `connect` finds its way
//! back to through the handle's cursor.

use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};

use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::fd::{Socket, TcpStream};
use crate::base::log::{self, log_info, log_warn};
use crate::base::stage::{self, Stage};
use crate::base::stats::{self, CommKind, CommStats, WaitCause};
use crate::base::sync::lock;
use crate::engine;
use crate::link::device_thread::{Member, ProgressThread, WaitSet};
use crate::link::incoming::RECORDS_SIZE;
use crate::link::liveness::Liveness;
use crate::link::queue_pairs::{QueuePairs, Side};
use crate::link::{Cells, Connection};

use super::cts_fifo::{CTS_FIFO_SIZE, CtsFifo};
use super::frames::{self, FrameReader, FrameWriter, Kind, PROTOCOL_VERSION, Params, Progress};
use super::handshake::{peer, tune};
use super::listen_handle::ListenHandle;
use super::resources::Resources;

/// Times that a listener may drop a connection before that is an error. It drops honest ones only when flooded by others, or when it
/// closes; a wrong secret is dropped every time.
const MAX_DROPS: u32 = 16;
/// Pauses before dialing again: the first, and the longest that doubling leads to. About two seconds in all.
const FIRST_PAUSE_NS: u64 = 1_000_000;
const LAST_PAUSE_NS: u64 = 200_000_000;

/// A connect in progress.
pub struct Dialer {
    resources: Resources,
    handle: ListenHandle,
    traffic_class: i32,
    /// Handed on once established.
    stats: Option<CommStats>,
    step: Step,
    /// Queue pairs and FIFO; the FIFO goes last.
    ends: Option<(QueuePairs, CtsFifo)>,
    ours: Option<Params>,
    h1: Vec<u8>,
    drops: u32,
    h1_sent: bool,
    /// What the device's thread came to, for the caller to learn.
    outcome: Option<Result<Box<Connection<CtsFifo>>>>,
}

enum Step {
    Pause { until: u64 },
    Dial { stream: TcpStream },
    SendH1 { stream: TcpStream, writer: FrameWriter },
    AwaitH2 { stream: TcpStream, reader: FrameReader },
    SendH3 { stream: TcpStream, writer: FrameWriter, theirs: Box<Params> },
    Connecting { connection: Box<Connection<CtsFifo>> },
    Over,
}

impl Dialer {
    /// Prepares queue pairs and FIFO and begins to dial.
    pub fn new(resources: Resources, handle: ListenHandle, traffic_class: i32) -> Result<Dialer> {
        let stats = stats::comm(CommKind::Send, resources.device.name());
        stats.set_peer(&format!("{}", handle.addr), 0);
        let mut dialer = Dialer {
            resources,
            handle,
            traffic_class,
            stats: Some(stats),
            step: Step::Over,
            ends: None,
            ours: None,
            h1: Vec::new(),
            drops: 0,
            h1_sent: false,
            outcome: None,
        };
        dialer.dial()?;
        Ok(dialer)
    }

    /// Whether it is the connect that `handle` names.
    pub fn is_for(&self, dev: usize, handle: &ListenHandle) -> bool {
        let mine = &self.handle;
        self.resources.device.index() == dev && mine.addr == handle.addr && mine.secret == handle.secret && mine.instance == handle.instance
    }

    /// Whether H1 was handed to the kernel at least once.
    pub fn h1_sent(&self) -> bool {
        self.h1_sent
    }

    /// Goes as far as it can without waiting. `None` means: call again.
    ///
    /// Errors: no listener there any more; a listener that refuses, or is not the one that made the handle.
    pub fn drive(&mut self) -> Result<Option<Connection<CtsFifo>>> {
        match self.outcome.take() {
            Some(outcome) => outcome.map(|established| Some(*established)),
            None => self.advance(),
        }
    }

    fn advance(&mut self) -> Result<Option<Connection<CtsFifo>>> {
        loop {
            let step = std::mem::replace(&mut self.step, Step::Over);
            let (step, more) = match step {
                Step::Pause { until } if clock::now() < until => (Step::Pause { until }, false),
                Step::Pause { .. } => {
                    self.dial()?;
                    continue;
                }
                Step::Dial { stream } => self.dialing(stream)?,
                Step::SendH1 { stream, writer } => self.send_h1(stream, writer),
                Step::AwaitH2 { stream, reader } => self.await_h2(stream, reader)?,
                Step::SendH3 { mut stream, mut writer, theirs } => match writer.push(&mut stream) {
                    Progress::Done => {
                        stage::reach(Stage::ConnectH3Sent);
                        (Step::Connecting { connection: Box::new(self.establish(stream, *theirs)?) }, true)
                    }
                    Progress::Blocked => (Step::SendH3 { stream, writer, theirs }, false),
                    Progress::Closed => (self.dropped("before the handshake was complete")?, true),
                },
                Step::Connecting { mut connection } => match connection.poll_connected().map_err(|e| e.within("connect"))? {
                    true => return Ok(Some(*connection)),
                    false => (Step::Connecting { connection }, false),
                },
                Step::Over => return Err(over()),
            };
            self.step = step;
            if !more {
                if let Some(stats) = &self.stats {
                    stats.wait(WaitCause::Handshake);
                }
                return Ok(None);
            }
        }
    }

    /// Fresh queue pairs each time: the listener may have connected to the old ones before it dropped us.
    fn dial(&mut self) -> Result<()> {
        self.ends = None;
        let fifo = CtsFifo::new()?;
        let qps = self.resources.config.qps_per_rail as usize;
        let stats = self.stats.as_ref().ok_or_else(over)?;
        let devices = self.resources.rails(stats, usize::MAX)?;
        let qps = QueuePairs::new(&devices, qps, Side::Send, fifo.pages(), self.traffic_class, self.resources.notify())?;
        self.ends = Some((qps, fifo));

        let addr = self.handle.addr;
        let failed = |e| Error::system(format!("connect to {addr}"), e);
        let socket = socket2::Socket::new(socket2::Domain::for_address(addr), socket2::Type::STREAM, None).map_err(failed)?;
        let stream: TcpStream = Socket::new(socket).convert();
        tune(&stream, &self.resources.config)?;
        match socket2::SockRef::from(&stream).connect(&addr.into()) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(e) => return Err(unreachable(addr, e)),
        }
        self.step = Step::Dial { stream };
        Ok(())
    }

    fn dialing(&mut self, stream: TcpStream) -> Result<(Step, bool)> {
        let addr = self.handle.addr;
        let error = stream.take_error().map_err(|e| Error::system(format!("connect to {addr}"), e))?;
        match error {
            None => {}
            Some(e) if e.kind() == std::io::ErrorKind::TimedOut => {
                log_warn!(log::NET, "connect: {addr} does not answer ({e}); trying on");
                return Ok((self.pause(), true));
            }
            Some(e) => return Err(unreachable(addr, e)),
        }
        if stream.peer_addr().is_err() {
            return Ok((Step::Dial { stream }, false));
        }
        // Dialing a free port of this host's own may connect to itself (simultaneous open).
        if stream.local_addr().ok() == Some(addr) {
            return Err(unreachable(addr, std::io::ErrorKind::ConnectionRefused.into()));
        }
        stage::reach(Stage::ConnectDialed);
        let Some((qps, fifo)) = &mut self.ends else { return Err(Error::internal("connect: no queue pairs")) };
        let ours = self.resources.params(
            qps,
            self.resources.config.qps_per_rail as usize,
            fifo.pages().addr(),
            self.handle.instance,
            self.traffic_class,
        )?;
        self.h1 = frames::seal(Kind::Hello, PROTOCOL_VERSION, &self.handle.secret, &[], &ours.encode());
        self.ours = Some(ours);
        Ok((Step::SendH1 { stream, writer: FrameWriter::new(self.h1.clone()) }, true))
    }

    fn send_h1(&mut self, mut stream: TcpStream, mut writer: FrameWriter) -> (Step, bool) {
        match writer.push(&mut stream) {
            Progress::Done => {
                self.h1_sent = true;
                stage::reach(Stage::ConnectH1Sent);
                (Step::AwaitH2 { stream, reader: FrameReader::default() }, true)
            }
            Progress::Blocked => (Step::SendH1 { stream, writer }, false),
            // A refusal may be on its way even so; and if not, that is where it is noticed.
            Progress::Closed => (Step::AwaitH2 { stream, reader: FrameReader::default() }, true),
        }
    }

    fn await_h2(&mut self, mut stream: TcpStream, mut reader: FrameReader) -> Result<(Step, bool)> {
        let addr = self.handle.addr;
        match reader.pull(&mut stream) {
            Ok(Progress::Blocked) => return Ok((Step::AwaitH2 { stream, reader }, false)),
            Ok(Progress::Closed) => return Ok((self.dropped("without an answer")?, true)),
            Ok(Progress::Done) => {}
            Err(e) => return Err(Error::remote(format!("connect: whoever listens at {addr} is not Railhead ({e})"))),
        }
        let frame = reader.take();
        let (header, body) = frames::open(&frame, &self.handle.secret, &[&self.h1])
            .map_err(|e| Error::remote(format!("connect: whoever listens at {addr} is not the listener that made this handle ({e})")))?;
        match header.kind {
            Kind::Reply => {}
            Kind::Refuse => {
                let reason = frames::decode_reason(body);
                log_warn!(log::NET, "connect: {addr} refused: {reason}");
                return Err(Error::usage(format!("connect: {addr} refused: {reason}")));
            }
            Kind::Hello | Kind::Confirm => return Err(Error::remote(format!("connect: {addr} answered with the wrong message"))),
        }
        self.resources.check(header.version, None).map_err(|why| Error::usage(format!("connect to {addr}: {why}")))?;
        let theirs = Params::decode(body).map_err(|e| Error::remote(format!("connect: the answer of {addr} makes no sense ({e})")))?;
        self.resources.check(header.version, Some(&theirs)).map_err(|why| Error::usage(format!("connect to {addr}: {why}")))?;
        let ours = self.ours.as_ref().ok_or_else(|| Error::internal("connect: no parameters"))?;
        if theirs.instance != self.handle.instance
            || theirs.rails > ours.rails
            || theirs.qps_per_rail > ours.qps_per_rail
            || (theirs.failover && !ours.failover)
        {
            return Err(Error::remote(format!("connect: the answer of {addr} does not fit the question")));
        }
        stage::reach(Stage::ConnectH2Received);
        let h3 = frames::seal(Kind::Confirm, PROTOCOL_VERSION, &self.handle.secret, &[&self.h1, &frame], &[]);
        Ok((Step::SendH3 { stream, writer: FrameWriter::new(h3), theirs: Box::new(theirs) }, true))
    }

    /// The listener closed the connection. That may be its right: try again.
    fn dropped(&mut self, when: &str) -> Result<Step> {
        self.drops += 1;
        let addr = self.handle.addr;
        if self.drops >= MAX_DROPS {
            return Err(Error::remote(format!(
                "connect: {addr} dropped the handshake {when}, {} times: the handle was damaged, or its listener is not the one it names",
                self.drops
            )));
        }
        log_info!(log::NET, "connect: {addr} dropped the handshake {when}; dialing again");
        Ok(self.pause())
    }

    fn pause(&mut self) -> Step {
        let pause = FIRST_PAUSE_NS.checked_shl(self.drops).map_or(LAST_PAUSE_NS, |ns| ns.min(LAST_PAUSE_NS));
        Step::Pause { until: clock::now() + pause }
    }

    fn establish(&mut self, stream: TcpStream, theirs: Params) -> Result<Connection<CtsFifo>> {
        let (mut qps, fifo) = self.ends.take().ok_or_else(over)?;
        let ours = self.ours.take().ok_or_else(over)?;
        qps.shrink(usize::from(theirs.rails), usize::from(theirs.qps_per_rail));
        qps.connect(&theirs.endpoints, theirs.memory, &theirs.rkeys)?;
        let peer = peer(&theirs, &ours, self.handle.addr);
        let liveness = Liveness::new(Some(stream), None, &peer, &self.resources.config);
        let stats = self.stats.take().ok_or_else(over)?;
        stats.set_peer(&peer.label, theirs.pid as i32);
        log_info!(
            log::NET,
            "send comm on {} to {}: {} rail(s), {} queue pair(s) each, fabric {}",
            self.resources.device.name(),
            peer.label,
            theirs.rails,
            theirs.qps_per_rail,
            theirs.fabric
        );
        let cells = theirs.failover.then(|| Cells::new(fifo.pages(), CTS_FIFO_SIZE, RECORDS_SIZE, true));
        Ok(Connection { qps, memory: fifo, peer, liveness, stats, cells })
    }
}

fn over() -> Error {
    Error::internal("connect: this attempt has ended")
}

fn unreachable(addr: SocketAddr, e: std::io::Error) -> Error {
    use std::io::ErrorKind::{ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable};
    match e.kind() {
        ConnectionRefused | ConnectionReset => {
            Error::remote(format!("connect: nobody listens at {addr} any more: the peer died or closed its listener"))
        }
        HostUnreachable | NetworkUnreachable => {
            Error::remote(format!("connect: {addr} cannot be reached ({e}); do the ranks' RAILHEAD_SOCKET_IFNAME name one network?"))
        }
        _ => Error::system(format!("connect to {addr}"), e),
    }
}

impl Member for Dialer {
    fn poll(&mut self) -> engine::Progress {
        if self.outcome.is_none() {
            self.outcome = self.advance().map(|established| established.map(Box::new)).transpose();
        }
        if self.outcome.is_some() { engine::Progress::Done } else { engine::Progress::Idle }
    }

    fn arm(&mut self, wait: &mut WaitSet) -> engine::Progress {
        match &self.step {
            _ if self.outcome.is_some() => {}
            // The peer may take as long as it likes to accept.
            Step::AwaitH2 { stream, .. } => wait.add(stream.as_raw_fd()),
            _ => wait.poll_soon(),
        }
        engine::Progress::Idle
    }
}

/// The connects in progress of a [`super::Net`], by cursor: generation << 32 | index + 1.
#[derive(Default)]
pub struct PendingTable {
    entries: Vec<Pending>,
    /// Whether a device's thread moves them along.
    watched: bool,
    /// That thread, as long as there are any.
    thread: Option<Arc<ProgressThread>>,
}

impl Member for PendingTable {
    fn poll(&mut self) -> engine::Progress {
        let mut unfinished = false;
        for dialer in self.entries.iter_mut().filter_map(|entry| entry.dialer.as_mut()) {
            unfinished |= dialer.poll() != engine::Progress::Done;
        }
        self.watched = unfinished;
        if unfinished { engine::Progress::Idle } else { engine::Progress::Done }
    }

    fn arm(&mut self, wait: &mut WaitSet) -> engine::Progress {
        for dialer in self.entries.iter_mut().filter_map(|entry| entry.dialer.as_mut()) {
            dialer.arm(wait);
        }
        engine::Progress::Idle
    }
}

#[derive(Default)]
struct Pending {
    generation: u32,
    dialer: Option<Box<Dialer>>,
}

/// Connects that may be in progress at once; they are as many as one process has ranks' channels, so more is a leak.
const MAX_PENDING: usize = 65536;

impl PendingTable {
    /// Has those of `table` polled by a device's thread until there are none.
    pub fn watch(table: &Arc<Mutex<PendingTable>>, thread: Arc<ProgressThread>) {
        let mut pending = lock(table);
        if !std::mem::replace(&mut pending.watched, true) {
            thread.watch("connects in progress", table);
            pending.thread = Some(thread);
        } else if let Some(thread) = &pending.thread {
            thread.called();
        }
    }

    /// Takes the connect that the handle's cursor names, if it is one to the same listener from the same device.
    pub fn take(&mut self, dev: usize, handle: &ListenHandle) -> Option<Box<Dialer>> {
        let index = (handle.cursor as u32).checked_sub(1)? as usize;
        let entry = self.entries.get_mut(index)?;
        let mine = entry.generation == (handle.cursor >> 32) as u32 && entry.dialer.as_ref().is_some_and(|c| c.is_for(dev, handle));
        if mine { entry.dialer.take() } else { None }
    }

    /// A connect has ended. After the last, whoever comes next is watched over anew, maybe by another thread.
    pub fn settle(&mut self) {
        if self.thread.is_some() && self.entries.iter().all(|entry| entry.dialer.is_none()) {
            (self.watched, self.thread) = (false, None);
        }
    }

    /// Keeps a connect and returns its new cursor.
    pub fn put(&mut self, dialer: Box<Dialer>) -> Result<u64> {
        let index = match self.entries.iter().position(|e| e.dialer.is_none()) {
            Some(index) => index,
            None if self.entries.len() < MAX_PENDING => {
                self.entries.push(Pending::default());
                self.entries.len() - 1
            }
            None => return Err(Error::usage(format!("connect: {MAX_PENDING} connects are in progress already"))),
        };
        let entry = self.entries.get_mut(index).ok_or_else(|| Error::internal("connect: table index"))?;
        entry.generation = entry.generation.wrapping_add(1);
        entry.dialer = Some(dialer);
        Ok(u64::from(entry.generation) << 32 | (index as u64 + 1))
    }
}
