//! The accepting end of handshakes: the half-open connections of one listener, each a state machine that never waits. Polled by the
//! thread that calls `accept`.
//!
//! Anybody can open connections and send anything on them. So unauthenticated ones are bounded in number (the oldest is dropped) and, from
//! their first byte, in time; nothing is made for them but a buffer. A peer that has shown the secret is a rank of ours, which may be slow or
//! stopped, and is waited for.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::base::fd::TcpStream;
use crate::base::log::{self, log_info, log_warn};
use crate::base::process::{Process, ProcessState};
use crate::base::stage::{self, Stage};
use crate::base::stats::{self, CommKind, CommStats};
use crate::fabric::Endpoint;
use crate::link::control_connection::{Confirm, ConfirmError};
use crate::link::device_thread::WaitSet;
use crate::link::incoming::{RECORDS_SIZE, Records};
use crate::link::liveness::{Liveness, Peer};
use crate::link::queue_pairs::{QueuePairs, Side};
use crate::link::{CELLS_SIZE, Cells, Connection};

use super::cts_fifo::CTS_FIFO_SIZE;
use super::frames::{self, FrameReader, FrameWriter, Header, Kind, MAC_SIZE, PROTOCOL_VERSION, Params, Progress, WireError};
use super::handshake::{LateConfirm, Mode, peer, tune};
use super::listen_handle::SECRET_SIZE;
use super::resources::Resources;

/// Nanoseconds for which a rank that hung up is watched.
const SUSPICION_NS: u64 = 2_000_000_000;
/// Authentic H1s remembered per listener, against replays.
const SEEN_MAX: usize = 4096;

/// What the half-open connections of a listener have in common.
pub struct Acceptor {
    resources: Resources,
    secret: [u8; SECRET_SIZE],
    instance: u32,
    half_open: VecDeque<HalfOpen>,
    /// Ranks whose handshake is done and whose queue pairs are connecting to ours.
    connecting: VecDeque<Box<Connection<Records>>>,
    /// The MACs of authentic H1s, whatever was answered: heard again, each is a replay.
    seen: VecDeque<[u8; MAC_SIZE]>,
    /// Ranks of this host whose connection ended before the handshake was complete.
    suspects: Vec<Suspect>,
    /// Connections that came to nothing.
    drops: u64,
}

struct HalfOpen {
    stream: TcpStream,
    from: SocketAddr,
    /// When its first byte was seen; 0 before.
    first_byte: u64,
    /// Its H1 is whole.
    whole: bool,
    step: Step,
}

enum Step {
    AwaitH1 { reader: FrameReader },
    SendH2 { writer: FrameWriter, made: Box<Made> },
    AwaitH3 { made: Box<Made> },
    SendRefusal { writer: FrameWriter, why: String, ours: Option<Error> },
}

/// How much of its H1 an unauthenticated peer has sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Received {
    Nothing,
    Part,
    All,
}

/// What was made for a dialer that knows the secret.
struct Made {
    process: Option<Arc<Process>>,
    qps: QueuePairs,
    records: Records,
    stats: CommStats,
    peer: Peer,
    confirm: LateConfirm,
    qps_per_rail: usize,
    failover: bool,
}

/// A rank of ours that may have died, or only have lost its connection: then it dials again.
struct Suspect {
    label: String,
    /// `None` if it was gone already when its H1 was read.
    process: Option<Arc<Process>>,
    /// How long that is a question.
    until: u64,
}

/// Why an authentic H1 gets no H2.
enum No {
    /// It was heard before: silence.
    Replay,
    /// Its sender should know. And the caller, if it is this side that cannot.
    Refuse(String, Option<Error>),
}

const REPLAY: WireError = WireError::Field("MAC or instance: a replay");

/// Where a half-open connection got to.
enum Outcome {
    /// No further for now.
    Waiting(HalfOpen),
    /// Gone; why, for the log.
    Dropped(String),
    /// Refused: a rank of ours that cannot be talked to. An error if that is because of this side.
    Refused(String, Option<Error>),
    /// Done.
    Ready(Box<Connection<Records>>),
}

impl Acceptor {
    /// For a listener whose handle has this secret and instance.
    pub fn new(resources: Resources, secret: [u8; SECRET_SIZE], instance: u32) -> Acceptor {
        Acceptor {
            resources,
            secret,
            instance,
            half_open: VecDeque::new(),
            connecting: VecDeque::new(),
            seen: VecDeque::new(),
            suspects: Vec::new(),
            drops: 0,
        }
    }

    /// Takes on a connection that the listener accepted, and hears what it says: its H1 has come along as a rule.
    pub fn admit(&mut self, stream: TcpStream, from: SocketAddr, now: u64) {
        if let Err(e) = tune(&stream, &self.resources.config) {
            return self.note_drop(&format!("{from}: {e}"));
        }
        stage::reach(Stage::AcceptAccepted);
        let mut newcomer = HalfOpen { stream, from, first_byte: 0, whole: false, step: Step::AwaitH1 { reader: FrameReader::default() } };
        let _ = newcomer.read_h1(now);
        self.half_open.push_back(newcomer);
        for received in [Received::Nothing, Received::Part] {
            self.evict(received, now);
        }
    }

    /// Drops the oldest unauthenticated connection that has sent so much, if they are too many. One that has sent nothing never takes the place of one
    /// that has.
    fn evict(&mut self, received: Received, now: u64) {
        if self.half_open.iter().filter(|half| half.received() == received).count() <= self.resources.config.half_open_max() {
            return;
        }
        let Some(oldest) = self.half_open.iter().position(|half| half.received() == received) else { return };
        // It may have sent something since it was last read.
        let spoke = self.half_open.get_mut(oldest).is_some_and(|half| {
            let _ = half.read_h1(now);
            half.received() != received
        });
        if !spoke {
            self.half_open.remove(oldest);
            self.note_drop("the oldest of too many unfinished ones");
        }
    }

    /// Closes an unauthenticated connection to get a descriptor back, first one that has sent nothing; false if there is none.
    pub fn drop_unauthenticated(&mut self) -> bool {
        let oldest = |received| self.half_open.iter().position(|half| half.received() == received);
        oldest(Received::Nothing).or_else(|| oldest(Received::Part)).and_then(|oldest| self.half_open.remove(oldest)).is_some()
    }

    /// Advances every half-open connection; the first that is done.
    ///
    /// Errors: nothing left to make a comm of; a rank whose connection ended because it died. (One that lives may have lost only the connection, and
    /// dials again.) The listener stays usable. A rank that cannot be talked to is told, and warned of, and the wait goes on for another.
    pub fn drive(&mut self, now: u64, mode: Mode) -> Result<Option<Box<Connection<Records>>>> {
        if let Some(dead) = self.look_at_suspects(now) {
            return Err(Error::remote(format!("accept: {dead} died before its handshake was complete")));
        }
        for _ in 0..self.half_open.len() {
            let Some(connection) = self.half_open.pop_front() else { break };
            match self.advance(connection, now, mode) {
                Outcome::Waiting(connection) => self.half_open.push_back(connection),
                Outcome::Dropped(why) => self.note_drop(&why),
                Outcome::Refused(why, None) => log_warn!(log::NET, "accept: {why}"),
                Outcome::Refused(_, Some(error)) => return Err(error),
                Outcome::Ready(connection) if mode == Mode::Blocking => return Ok(Some(connection)),
                Outcome::Ready(connection) => self.connecting.push_back(connection),
            }
        }
        match mode {
            Mode::Blocking => Ok(self.connecting.pop_front()),
            Mode::NonBlocking => self.poll_connecting(),
        }
    }

    /// What the device's thread is to wake for.
    pub fn arm(&self, wait: &mut WaitSet) {
        if !self.connecting.is_empty() || !self.suspects.is_empty() {
            wait.poll_soon();
        }
        for connection in &self.half_open {
            match connection.step {
                // From its first byte on, its time is limited.
                Step::AwaitH1 { .. } if connection.first_byte == 0 => wait.add(connection.stream.as_raw_fd()),
                Step::AwaitH3 { .. } => wait.add(connection.stream.as_raw_fd()),
                Step::AwaitH1 { .. } | Step::SendH2 { .. } | Step::SendRefusal { .. } => wait.poll_soon(),
            }
        }
    }

    /// Lets the queue pairs of finished handshakes connect; the first whose have.
    fn poll_connecting(&mut self) -> Result<Option<Box<Connection<Records>>>> {
        for _ in 0..self.connecting.len() {
            let Some(mut connection) = self.connecting.pop_front() else { break };
            match connection.poll_connected() {
                Ok(true) => return Ok(Some(connection)),
                Ok(false) => self.connecting.push_back(connection),
                Err(e) => return Err(e.within("accept")),
            }
        }
        Ok(None)
    }

    fn advance(&mut self, mut connection: HalfOpen, now: u64, mode: Mode) -> Outcome {
        loop {
            let progress = connection.read_h1(now);
            let stream = &mut connection.stream;
            connection.step = match connection.step {
                Step::AwaitH1 { mut reader } => {
                    let step = match progress {
                        Ok(Progress::Done) => self.on_h1(reader.take(), connection.from),
                        Ok(Progress::Blocked) => {
                            let limit = u64::from(self.resources.config.handshake_timeout_s) * 1_000_000_000;
                            if connection.first_byte != 0 && now.saturating_sub(connection.first_byte) > limit {
                                return Outcome::Dropped(format!("{}: no whole handshake message in time", connection.from));
                            }
                            connection.step = Step::AwaitH1 { reader };
                            return Outcome::Waiting(connection);
                        }
                        Ok(Progress::Closed) => return Outcome::Dropped(format!("{}: it hung up", connection.from)),
                        Err(e) => return Outcome::Dropped(format!("{}: {e}", connection.from)),
                    };
                    match step {
                        Ok(step) => step,
                        Err(why) => return Outcome::Dropped(format!("{}: {why}", connection.from)),
                    }
                }
                Step::SendH2 { mut writer, made } => match writer.push(stream) {
                    Progress::Done => {
                        stage::reach(Stage::AcceptH2Sent);
                        match mode {
                            Mode::Blocking => return Outcome::Ready(self.establish(connection.stream, *made, true)),
                            Mode::NonBlocking => Step::AwaitH3 { made },
                        }
                    }
                    Progress::Blocked => {
                        connection.step = Step::SendH2 { writer, made };
                        return Outcome::Waiting(connection);
                    }
                    Progress::Closed => return self.lost(&made, now),
                },
                Step::AwaitH3 { mut made } => match made.confirm.read(stream) {
                    Ok(true) => {
                        stage::reach(Stage::AcceptH3Received);
                        return Outcome::Ready(self.establish(connection.stream, *made, false));
                    }
                    // Its H2 may have been sent before it was known that nobody waits for H3.
                    Ok(false) if mode == Mode::Blocking => return Outcome::Ready(self.establish(connection.stream, *made, true)),
                    Ok(false) => {
                        connection.step = Step::AwaitH3 { made };
                        return Outcome::Waiting(connection);
                    }
                    Err(ConfirmError::Closed) => return self.lost(&made, now),
                    Err(ConfirmError::Bad) => return Outcome::Dropped(format!("{}: its last message is wrong", connection.from)),
                },
                Step::SendRefusal { mut writer, why, ours } => match writer.push(stream) {
                    Progress::Blocked => {
                        connection.step = Step::SendRefusal { writer, why, ours };
                        return Outcome::Waiting(connection);
                    }
                    Progress::Done | Progress::Closed => return Outcome::Refused(why, ours),
                },
            }
        }
    }

    /// A whole H1. An error drops the connection without a word: its sender does not know the secret, or replays a frame.
    fn on_h1(&mut self, h1: Vec<u8>, from: SocketAddr) -> std::result::Result<Step, WireError> {
        let (header, body) = frames::open(&h1, &self.secret, &[])?;
        if header.kind != Kind::Hello {
            return Err(WireError::Kind);
        }
        if let Some(mac) = h1.last_chunk() {
            if self.seen.contains(mac) {
                return Err(REPLAY);
            }
            if self.seen.len() == SEEN_MAX {
                self.seen.pop_front();
            }
            self.seen.push_back(*mac);
        }
        match self.answer(&header, body, &h1, from) {
            Ok(step) => Ok(step),
            Err(No::Replay) => Err(REPLAY),
            Err(No::Refuse(why, ours)) => {
                let refusal = frames::seal(Kind::Refuse, PROTOCOL_VERSION, &self.secret, &[&h1], &frames::encode_reason(&why));
                Ok(Step::SendRefusal { writer: FrameWriter::new(refusal), why: format!("refused {from}: {why}"), ours })
            }
        }
    }

    fn answer(&mut self, header: &Header, body: &[u8], h1: &[u8], from: SocketAddr) -> std::result::Result<Step, No> {
        let refuse = |why| No::Refuse(why, None);
        self.resources.check(header.version, None).map_err(refuse)?;
        let theirs = Params::decode(body).map_err(|e| refuse(format!("parameters that make no sense: {e}")))?;
        if theirs.instance != self.instance {
            return Err(No::Replay);
        }
        self.resources.check(header.version, Some(&theirs)).map_err(refuse)?;
        stage::reach(Stage::AcceptH1Received);
        let (h2, made) = self.make(&theirs, h1, from).map_err(|e| {
            // What they sent is theirs; all else is lacking here.
            No::Refuse(e.to_string(), (!matches!(e, Error::Remote(_))).then_some(e))
        })?;
        Ok(Step::SendH2 { writer: FrameWriter::new(h2), made: Box::new(made) })
    }

    fn lost(&mut self, made: &Made, now: u64) -> Outcome {
        if made.peer.pid.is_some() {
            // The descriptors of a dying process are closed before it counts as dead, but not long before.
            self.suspects.push(Suspect { label: made.peer.label.clone(), process: made.process.clone(), until: now + SUSPICION_NS });
        }
        Outcome::Dropped(format!("{}: it hung up before the handshake was complete", made.peer.label))
    }

    /// The name of one that has died.
    fn look_at_suspects(&mut self, now: u64) -> Option<String> {
        self.suspects.retain(|suspect| now < suspect.until);
        let dead = self
            .suspects
            .iter()
            .position(|suspect| suspect.process.as_ref().is_none_or(|process| process.state() == ProcessState::Dead))?;
        Some(self.suspects.swap_remove(dead).label)
    }

    /// Logs the first few, then ever fewer: unauthenticated peers must not fill the log.
    fn note_drop(&mut self, why: &str) {
        self.drops += 1;
        if self.drops <= 8 || self.drops.is_power_of_two() {
            log_info!(log::NET, "accept: dropped connection number {} that came to nothing, from {why}", self.drops);
        }
    }

    /// Makes this side's queue pairs and H2.
    fn make(&self, theirs: &Params, h1: &[u8], from: SocketAddr) -> Result<(Vec<u8>, Made)> {
        let stats = stats::comm(CommKind::Recv, self.resources.device.name());
        let records = Records::with_more(CELLS_SIZE)?;
        let devices = self.resources.rails(&stats, usize::from(theirs.rails))?;
        let qps_per_rail = (self.resources.config.qps_per_rail as usize).min(usize::from(theirs.qps_per_rail));
        let traffic_class =
            if self.resources.config.traffic_class < 0 { theirs.traffic_class } else { self.resources.config.traffic_class };
        // All that this side sends is clear-to-sends.
        let own_class = if self.resources.config.ib_fifo_tc < 0 { traffic_class } else { self.resources.config.ib_fifo_tc };
        let mut qps = QueuePairs::new(&devices, qps_per_rail, Side::Recv, records.pages(), own_class, self.resources.notify())?;
        let used: Vec<Endpoint> = theirs
            .endpoints
            .chunks(usize::from(theirs.qps_per_rail))
            .take(qps.rails())
            .flat_map(|of_rail| of_rail.iter().take(qps_per_rail).copied())
            .collect();
        qps.connect(&used, theirs.memory, &theirs.rkeys)?;
        let mut ours = self.resources.params(&mut qps, qps_per_rail, records.pages().addr(), self.instance, traffic_class)?;
        ours.failover &= theirs.failover;
        let h2 = frames::seal(Kind::Reply, PROTOCOL_VERSION, &self.secret, &[h1], &ours.encode());
        let peer = peer(theirs, &ours, from);
        stats.set_peer(&peer.label, theirs.pid as i32);
        let process = peer.pid.and_then(Process::find);
        let confirm = LateConfirm::new(self.secret, h1.to_vec(), h2.clone());
        let failover = ours.failover;
        Ok((h2, Made { process, qps, records, stats, peer, confirm, qps_per_rail, failover }))
    }

    fn establish(&self, stream: TcpStream, made: Made, unconfirmed: bool) -> Box<Connection<Records>> {
        let Made { process: _, qps, records, stats, peer, confirm, qps_per_rail, failover } = made;
        log_info!(
            log::NET,
            "recv comm on {} from {}: {} rail(s), {qps_per_rail} queue pair(s) each, fabric {}",
            self.resources.device.name(),
            peer.label,
            qps.rails(),
            self.resources.device.fabric()
        );
        let liveness =
            Liveness::new(Some(stream), unconfirmed.then(|| Box::new(confirm) as Box<dyn Confirm>), &peer, &self.resources.config);
        let cells = failover.then(|| Cells::new(records.pages(), RECORDS_SIZE, CTS_FIFO_SIZE, false));
        Box::new(Connection { qps, memory: records, peer, liveness, stats, cells })
    }

    /// Connections in progress, for tests.
    #[cfg(test)]
    pub fn half_open(&self) -> usize {
        self.half_open.len()
    }

    /// Whether a dialer has been answered and not answered back.
    #[cfg(test)]
    pub fn answered(&self) -> bool {
        self.half_open.iter().any(|h| matches!(h.step, Step::AwaitH3 { .. }))
    }
}

impl HalfOpen {
    /// Reads more of an H1; `Done` once that is whole.
    fn read_h1(&mut self, now: u64) -> std::result::Result<Progress, WireError> {
        let Step::AwaitH1 { reader } = &mut self.step else { return Ok(Progress::Done) };
        let progress = reader.pull(&mut self.stream);
        if self.first_byte == 0 && reader.started() {
            self.first_byte = now.max(1);
        }
        self.whole = matches!(progress, Ok(Progress::Done));
        progress
    }

    /// How much it has said, before it has shown the secret.
    fn received(&self) -> Received {
        match self.step {
            Step::AwaitH1 { .. } if self.first_byte == 0 => Received::Nothing,
            Step::AwaitH1 { .. } if !self.whole => Received::Part,
            _ => Received::All,
        }
    }
}
