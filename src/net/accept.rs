//! The accepting end of handshakes: the half-open connections of one listener, each a state machine that never waits. Driven by the
//! thread that calls `accept`.
//!
//! A stranger can open connections and say anything on them. So those that have not shown the secret are bounded in number (the oldest
//! goes) and, from their first byte, in time; nothing is made for them but a buffer. Whoever has shown it is a rank of ours, which
//! may be slow or stopped, and is waited for.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::base::fd::TcpStream;
use crate::base::log::{self, log_info, log_warn};
use crate::base::process::{Life, Process};
use crate::base::stage::{self, Stage};
use crate::base::stats::{self, CommKind, CommStats};
use crate::fabric::Endpoint;

use super::Ready;
use super::background::Sleep;
use super::connect::rail_devices;
use super::cts_fifo::Records;
use super::handle::SECRET_SIZE;
use super::handshake::{ConfirmError, Established, LateConfirm, Setup, tune};
use super::liveness::{Liveness, Peer};
use super::rails::{Rails, Side};
use super::wire::{self, FrameReader, FrameWriter, Header, Kind, MAC_SIZE, Params, Progress, WIRE_VERSION, WireError};

/// Nanoseconds for which a rank that hung up is watched.
const SUSPICION_NS: u64 = 2_000_000_000;
/// Authentic H1s remembered per listener, against replays.
const HEARD: usize = 4096;

/// What the half-open connections of a listener have in common.
pub struct Acceptor {
    setup: Setup,
    secret: [u8; SECRET_SIZE],
    instance: u32,
    half_open: VecDeque<HalfOpen>,
    /// Ranks whose handshake is done and whose queue pairs are meeting ours.
    meeting: VecDeque<Box<Established<Records>>>,
    /// The MACs of authentic H1s, whatever was answered: heard again, each is a replay.
    heard: VecDeque<[u8; MAC_SIZE]>,
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

/// How much a stranger has said.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Said {
    Nothing,
    Part,
    Enough,
}

/// What was made for a connector that knows the secret.
struct Made {
    process: Option<Arc<Process>>,
    rails: Rails,
    records: Records,
    stats: CommStats,
    peer: Peer,
    confirm: LateConfirm,
    qps_per_rail: u8,
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
    Ready(Box<Established<Records>>),
}

impl Acceptor {
    /// For a listener whose handle has this secret and instance.
    pub fn new(setup: Setup, secret: [u8; SECRET_SIZE], instance: u32) -> Acceptor {
        Acceptor {
            setup,
            secret,
            instance,
            half_open: VecDeque::new(),
            meeting: VecDeque::new(),
            heard: VecDeque::new(),
            suspects: Vec::new(),
            drops: 0,
        }
    }

    /// Takes on a connection that the listener accepted, and hears what it says: its H1 has come along as a rule.
    pub fn admit(&mut self, stream: TcpStream, from: SocketAddr, now: u64) {
        if let Err(e) = tune(&stream, &self.setup.config) {
            return self.note_drop(&format!("{from}: {e}"));
        }
        stage::reach(Stage::AcceptAccepted);
        let mut newcomer = HalfOpen { stream, from, first_byte: 0, whole: false, step: Step::AwaitH1 { reader: FrameReader::default() } };
        let _ = newcomer.hear(now);
        self.half_open.push_back(newcomer);
        for said in [Said::Nothing, Said::Part] {
            self.crowd_out(said, now);
        }
    }

    /// Drops the oldest stranger who has said so much, if they are too many. Who has said nothing never takes the place of one who has.
    fn crowd_out(&mut self, said: Said, now: u64) {
        if self.half_open.iter().filter(|half| half.said() == said).count() <= self.setup.config.half_open_max() {
            return;
        }
        let Some(oldest) = self.half_open.iter().position(|half| half.said() == said) else { return };
        // It may have spoken since it was last heard.
        let spoke = self.half_open.get_mut(oldest).is_some_and(|half| {
            let _ = half.hear(now);
            half.said() != said
        });
        if !spoke {
            self.half_open.remove(oldest);
            self.note_drop("the oldest of too many unfinished ones");
        }
    }

    /// Gives a descriptor back that a stranger has, first of those who have said nothing; false if there is none.
    pub fn spare(&mut self) -> bool {
        let oldest = |said| self.half_open.iter().position(|half| half.said() == said);
        oldest(Said::Nothing).or_else(|| oldest(Said::Part)).and_then(|oldest| self.half_open.remove(oldest)).is_some()
    }

    /// Advances every half-open connection; the first that is done.
    ///
    /// Errors: nothing left to make a comm of; a rank whose connection ended because it died. (One that lives may have lost only the connection, and
    /// dials again.) The listener stays usable. A rank that cannot be talked to is told, and warned of, and the wait goes on for another.
    pub fn drive(&mut self, now: u64, when: Ready) -> Result<Option<Box<Established<Records>>>> {
        if let Some(dead) = self.look_at_suspects(now) {
            return Err(Error::remote(format!("accept: {dead} died before its handshake was complete")));
        }
        for _ in 0..self.half_open.len() {
            let Some(connection) = self.half_open.pop_front() else { break };
            match self.advance(connection, now, when) {
                Outcome::Waiting(connection) => self.half_open.push_back(connection),
                Outcome::Dropped(why) => self.note_drop(&why),
                Outcome::Refused(why, None) => log_warn!(log::NET, "accept: {why}"),
                Outcome::Refused(_, Some(error)) => return Err(error),
                Outcome::Ready(established) if when == Ready::Eager => return Ok(Some(established)),
                Outcome::Ready(established) => self.meeting.push_back(established),
            }
        }
        match when {
            Ready::Eager => Ok(self.meeting.pop_front()),
            Ready::Full => self.meet(),
        }
    }

    /// What the device's thread is to wake for.
    pub fn rest(&self, sleep: &mut Sleep) {
        if !self.meeting.is_empty() || !self.suspects.is_empty() {
            sleep.nap();
        }
        for connection in &self.half_open {
            match connection.step {
                // From its first byte on, its time is limited.
                Step::AwaitH1 { .. } if connection.first_byte == 0 => sleep.watch(connection.stream.as_raw_fd()),
                Step::AwaitH3 { .. } => sleep.watch(connection.stream.as_raw_fd()),
                Step::AwaitH1 { .. } | Step::SendH2 { .. } | Step::SendRefusal { .. } => sleep.nap(),
            }
        }
    }

    /// Lets the queue pairs of finished handshakes meet; the first comm whose have.
    fn meet(&mut self) -> Result<Option<Box<Established<Records>>>> {
        for _ in 0..self.meeting.len() {
            let Some(mut established) = self.meeting.pop_front() else { break };
            match established.meet() {
                Ok(true) => return Ok(Some(established)),
                Ok(false) => self.meeting.push_back(established),
                Err(e) => return Err(e.within("accept")),
            }
        }
        Ok(None)
    }

    fn advance(&mut self, mut connection: HalfOpen, now: u64, when: Ready) -> Outcome {
        loop {
            let heard = connection.hear(now);
            let stream = &mut connection.stream;
            connection.step = match connection.step {
                Step::AwaitH1 { mut reader } => {
                    let step = match heard {
                        Ok(Progress::Done) => self.on_h1(reader.take(), connection.from),
                        Ok(Progress::Blocked) => {
                            let limit = u64::from(self.setup.config.handshake_timeout_s) * 1_000_000_000;
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
                        match when {
                            Ready::Eager => return Outcome::Ready(self.establish(connection.stream, *made, true)),
                            Ready::Full => Step::AwaitH3 { made },
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
                    Ok(false) if when == Ready::Eager => return Outcome::Ready(self.establish(connection.stream, *made, true)),
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

    /// A whole H1. An error drops the connection without a word: whoever sent it does not know the secret, or repeats what he heard.
    fn on_h1(&mut self, h1: Vec<u8>, from: SocketAddr) -> std::result::Result<Step, WireError> {
        let (header, body) = wire::open(&h1, &self.secret, &[])?;
        if header.kind != Kind::Hello {
            return Err(WireError::Kind);
        }
        if let Some(mac) = h1.last_chunk() {
            if self.heard.contains(mac) {
                return Err(REPLAY);
            }
            if self.heard.len() == HEARD {
                self.heard.pop_front();
            }
            self.heard.push_back(*mac);
        }
        match self.answer(&header, body, &h1, from) {
            Ok(step) => Ok(step),
            Err(No::Replay) => Err(REPLAY),
            Err(No::Refuse(why, ours)) => {
                let refusal = wire::seal(Kind::Refuse, WIRE_VERSION, &self.secret, &[&h1], &wire::encode_reason(&why));
                Ok(Step::SendRefusal { writer: FrameWriter::new(refusal), why: format!("refused {from}: {why}"), ours })
            }
        }
    }

    fn answer(&mut self, header: &Header, body: &[u8], h1: &[u8], from: SocketAddr) -> std::result::Result<Step, No> {
        let refuse = |why| No::Refuse(why, None);
        self.setup.check(header.version, None).map_err(refuse)?;
        let theirs = Params::decode(body).map_err(|e| refuse(format!("parameters that make no sense: {e}")))?;
        if theirs.instance != self.instance {
            return Err(No::Replay);
        }
        self.setup.check(header.version, Some(&theirs)).map_err(refuse)?;
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
        let dead = self.suspects.iter().position(|suspect| suspect.process.as_ref().is_none_or(|process| process.look() == Life::Dead))?;
        Some(self.suspects.swap_remove(dead).label)
    }

    /// Strangers must not fill the log: the first few are told of, then ever fewer.
    fn note_drop(&mut self, why: &str) {
        self.drops += 1;
        if self.drops <= 8 || self.drops.is_power_of_two() {
            log_info!(log::NET, "accept: dropped connection number {} that came to nothing, from {why}", self.drops);
        }
    }

    /// Makes this side's queue pairs and H2.
    fn make(&self, theirs: &Params, h1: &[u8], from: SocketAddr) -> Result<(Vec<u8>, Made)> {
        let stats = stats::comm(CommKind::Recv, self.setup.device.name());
        let records = Records::new()?;
        let devices = rail_devices(&self.setup, &stats, usize::from(theirs.rails))?;
        let qps = (self.setup.config.qps_per_rail as usize).min(usize::from(theirs.qps_per_rail));
        let traffic_class = if self.setup.config.traffic_class < 0 { theirs.traffic_class } else { self.setup.config.traffic_class };
        // What this side sends is announcements.
        let own_class = if self.setup.config.ib_fifo_tc < 0 { traffic_class } else { self.setup.config.ib_fifo_tc };
        let mut rails = Rails::new(&devices, qps, Side::Recv, records.pages().as_memory(), own_class, self.setup.notify())?;
        let used: Vec<Endpoint> = theirs
            .endpoints
            .chunks(usize::from(theirs.qps_per_rail))
            .take(rails.rails())
            .flat_map(|of_rail| of_rail.iter().take(qps).copied())
            .collect();
        rails.connect(&used, theirs.memory, &theirs.rkeys)?;
        let ours = self.setup.params(&mut rails, qps, records.pages().addr(), self.instance, traffic_class)?;
        let h2 = wire::seal(Kind::Reply, WIRE_VERSION, &self.secret, &[h1], &ours.encode());
        let peer = Peer::new(theirs, &ours, from);
        stats.set_peer(&peer.label, theirs.pid as i32);
        let process = peer.pid.and_then(Process::find);
        let confirm = LateConfirm::new(self.secret, h1.to_vec(), h2.clone());
        Ok((h2, Made { process, rails, records, stats, peer, confirm, qps_per_rail: qps as u8 }))
    }

    fn establish(&self, stream: TcpStream, made: Made, unconfirmed: bool) -> Box<Established<Records>> {
        let Made { process: _, rails, records, stats, peer, confirm, qps_per_rail } = made;
        log_info!(
            log::NET,
            "recv comm on {} from {}: {} rail(s), {qps_per_rail} queue pair(s) each, fabric {}",
            self.setup.device.name(),
            peer.label,
            rails.rails(),
            self.setup.device.fabric()
        );
        let liveness = Liveness::new(stream, unconfirmed.then_some(confirm), &peer, &self.setup.config);
        Box::new(Established { rails, memory: records, peer, liveness, stats })
    }

    /// Connections in progress, for tests.
    #[cfg(test)]
    pub fn half_open(&self) -> usize {
        self.half_open.len()
    }

    /// Whether a connector has been answered and not answered back.
    #[cfg(test)]
    pub fn answered(&self) -> bool {
        self.half_open.iter().any(|h| matches!(h.step, Step::AwaitH3 { .. }))
    }
}

impl HalfOpen {
    /// Reads more of an H1; `Done` once that is whole.
    fn hear(&mut self, now: u64) -> std::result::Result<Progress, WireError> {
        let Step::AwaitH1 { reader } = &mut self.step else { return Ok(Progress::Done) };
        let progress = reader.pull(&mut self.stream);
        if self.first_byte == 0 && reader.started() {
            self.first_byte = now.max(1);
        }
        self.whole = matches!(progress, Ok(Progress::Done));
        progress
    }

    /// How much it has said, before it has shown the secret.
    fn said(&self) -> Said {
        match self.step {
            Step::AwaitH1 { .. } if self.first_byte == 0 => Said::Nothing,
            Step::AwaitH1 { .. } if !self.whole => Said::Part,
            _ => Said::Enough,
        }
    }
}
