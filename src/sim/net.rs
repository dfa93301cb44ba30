//! Two ranks and a comm between them, whose rails fail and come back. What must hold: messages come as they were sent, in the order of their receives;
//! once a receive is done, nobody writes to its memory; and all ends, soon after the last fault.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use crate::base::config::{Config, Progress};
use crate::base::error::{Error, Result};
use crate::base::mem::Pages;
use crate::base::stats::RailCounter;
use crate::fabric::Capabilities;
use crate::fabric::sim::{Cut, Port, Random, World};
use crate::link::memory::MemoryKind;
use crate::link::wr_id::RequestId;
use crate::net::simulated::{self, Host};
use crate::net::{RecvBuffer, RecvComm, SendComm};

use super::{Options, Report, Violation};

/// Receives outstanding at most, and bytes of each one's memory.
const PLACES: usize = 12;
const ROOM: usize = 16 << 10;
/// Nanoseconds after the last fault in which all has to come to an end.
const PATIENCE_NS: u64 = 300_000_000_000;
/// Nanoseconds for which the end of a comm is watched whose other one has failed.
const ALONE_NS: u64 = 100_000_000;
/// Nanoseconds between two polls of a rank that is busy, and of one that has found nothing for a while.
const BUSY_NS: u64 = 2_000;
const IDLE_NS: u64 = 5_000_000;
/// Nanoseconds for which a rail may be cut, and a rank may be away.
const CUT_NS: u64 = 400_000_000;
const AWAY_NS: u64 = 100_000_000;

/// A group of receives.
struct Group {
    receive: RequestId,
    /// Place, bytes and pattern of each message.
    messages: Vec<(usize, usize, u64)>,
}

/// A message that the sender is to send, or has begun to.
struct Message {
    place: usize,
    len: usize,
    pattern: u64,
    request: Option<RequestId>,
}

/// A port that is cut until then.
struct Fault {
    port: Port,
    until: u64,
}

/// When a rank is polled next, and how often it has found nothing.
#[derive(Clone, Copy)]
struct Turn {
    at: u64,
    idle: u32,
}

impl Turn {
    fn next(&mut self, now: u64, moved: bool, random: &mut Random) {
        self.idle = if moved { 0 } else { self.idle.saturating_add(1) };
        // Polls of a rank that waits are rarer and rarer, so that long waits take few of them.
        let pause = (BUSY_NS << (self.idle / 64).min(12)).min(IDLE_NS);
        self.at = now + 1 + random.below(pause);
    }
}

fn fill(pages: &Pages, place: usize, len: usize, pattern: u64) {
    pages.write(place * ROOM, &bytes_of(len, pattern));
}

fn bytes_of(len: usize, pattern: u64) -> Vec<u8> {
    let mut random = Random(pattern);
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        out.extend_from_slice(&random.draw().to_le_bytes());
    }
    out.truncate(len);
    out
}

/// The settings of all schedules; what differs between them is taken from the seed.
fn config(qps_per_rail: u32) -> Arc<Config> {
    static CONFIGS: [OnceLock<Arc<Config>>; 4] = [const { OnceLock::new() }; 4];
    let make = || Arc::new(Config { stats: false, progress: Progress::Caller, qps_per_rail, split_min: 1024, ..Config::default() });
    CONFIGS.get(qps_per_rail as usize).map_or_else(make, |place| place.get_or_init(make).clone())
}

/// A schedule under way.
struct Schedule {
    world: World,
    random: Random,
    send: SendComm,
    recv: RecvComm,
    from: Pages,
    to: Pages,
    mrs: [crate::net::MrHandle; 2],
    groups: VecDeque<Group>,
    sending: VecDeque<Message>,
    free: Vec<usize>,
    /// Messages that are not announced yet.
    left: usize,
    patterns: u64,
    faults: Vec<Fault>,
    faults_left: usize,
    /// There was a time at which no rail was sure to work.
    may_fail: bool,
    turns: [Turn; 2],
    rails: usize,
    received: u64,
}

/// Runs one schedule.
///
/// Errors: a promise that was broken.
pub fn run(options: &Options) -> std::result::Result<Report, Violation> {
    let violation = |what: String| Violation { seed: options.seed, what };
    let mut schedule = Schedule::new(options).map_err(|error| violation(format!("the comm was not made: {error}")))?;
    let ended = schedule.run().map_err(|what| {
        let rails = [schedule.send.link_for_test().rails_for_test(), schedule.recv.link_for_test().rails_for_test()];
        violation(format!("{what}\nsender:\n{}\nreceiver:\n{}", rails[0], rails[1]))
    })?;
    let mut report = Report {
        trace: schedule.world.trace(),
        messages: schedule.received,
        has_ended: ended,
        time: schedule.world.now(),
        ..Report::default()
    };
    for link in [schedule.send.link_for_test(), schedule.recv.link_for_test()] {
        for rail in 0..options.rails {
            report.failures += link.stats.rail(rail).get(RailCounter::Failures);
            report.reconnects += link.stats.rail(rail).get(RailCounter::Reconnects);
        }
    }
    Ok(report)
}

impl Schedule {
    fn new(options: &Options) -> Result<Schedule> {
        let mut random = Random(options.seed);
        let capabilities = Capabilities {
            keeps_early_requests: random.one_in(2),
            counts_plain_writes: false,
            splits_data: random.one_in(2),
            ar_threshold: if random.one_in(3) { 4096 } else { u32::MAX },
            shares_regions: false,
            descriptors_per_qp: 0,
        };
        let config = config(1 + random.below(3) as u32);
        let world = World::new(random.draw(), capabilities);
        let hosts = [Host::new(&world, 0, options.rails, &config)?, Host::new(&world, 1, options.rails, &config)?];
        let [first, second] = &hosts;
        let (send, recv) = simulated::comm(first, second)?;
        let (from, to) = (Pages::new(PLACES * ROOM)?, Pages::new(PLACES * ROOM)?);
        let mrs = [
            first.net.register(first.dev, from.to_register(), MemoryKind::Host)?,
            second.net.register(second.dev, to.to_register(), MemoryKind::Host)?,
        ];
        for place in 0..PLACES {
            world.guard(to.addr() + place * ROOM, ROOM);
        }
        let now = world.now();
        Ok(Schedule {
            world,
            send,
            recv,
            from,
            to,
            mrs,
            groups: VecDeque::new(),
            sending: VecDeque::new(),
            free: (0..PLACES).collect(),
            left: options.messages,
            patterns: random.draw(),
            faults: Vec::new(),
            faults_left: random.below(options.faults as u64 + 1) as usize,
            may_fail: options.rails == 1,
            turns: [Turn { at: now, idle: 0 }; 2],
            rails: options.rails,
            received: 0,
            random,
        })
    }

    /// True: the comm has failed, as it may.
    fn run(&mut self) -> std::result::Result<bool, String> {
        let mut deadline = u64::MAX;
        loop {
            let (rank, turn) = if self.turns[0].at <= self.turns[1].at { (0, self.turns[0]) } else { (1, self.turns[1]) };
            if let Some(violation) = self.world.advance(turn.at) {
                return Err(violation);
            }
            let now = self.world.now();
            self.heal(now);
            self.break_something(now);
            let moved = match if rank == 0 { self.sender() } else { self.receiver() } {
                Ok(moved) => moved,
                Err(Stop::Wrong(what)) => return Err(what),
                Err(Stop::Failed(error)) => {
                    return match self.may_fail {
                        true => self.goes_on_alone(1 - rank).map(|()| true),
                        false => Err(format!("the comm has failed: {error}")),
                    };
                }
            };
            self.turns[rank].next(now, moved, &mut self.random);
            if self.random.one_in(2000) {
                self.turns[rank].at += self.random.below(AWAY_NS);
            }
            let is_done = self.left == 0 && self.groups.is_empty() && self.sending.is_empty();
            if is_done && self.faults_left == 0 && self.faults.is_empty() && self.all_live() {
                return Ok(false);
            }
            // Who has nothing outstanding, or may post nothing, is told by the control connection alone.
            let failed = self.send.link_for_test().has_failed() || self.recv.link_for_test().has_failed();
            if failed && !self.may_fail {
                return Err("the comm has failed".into());
            }
            if failed && (is_done || now > deadline) {
                return Ok(true);
            }
            if self.faults_left == 0 && self.faults.is_empty() {
                deadline = deadline.min(now + PATIENCE_NS);
                if now > deadline {
                    let (groups, sending) = (self.groups.len(), self.sending.len());
                    return Err(format!(
                        "after {now} ns {groups} groups are not received, {sending} messages not sent, or a rail is not back"
                    ));
                }
            }
        }
    }

    fn all_live(&mut self) -> bool {
        (0..self.rails).all(|rail| self.is_live(rail))
    }

    fn is_live(&mut self, rail: usize) -> bool {
        self.rails == 1 || self.send.link_for_test().is_live_for_test(rail) && self.recv.link_for_test().is_live_for_test(rail)
    }

    /// What the other end has under way when one has failed: it may go on for a while, and what comes is right. That it is told is the work of the control
    /// connection, which is not simulated.
    fn goes_on_alone(&mut self, rank: usize) -> std::result::Result<(), String> {
        let until = self.world.now() + ALONE_NS;
        let mut turn = self.turns[rank];
        while self.world.now() < until {
            if let Some(violation) = self.world.advance(turn.at.max(self.world.now())) {
                return Err(violation);
            }
            match if rank == 0 { self.sender() } else { self.receiver() } {
                Ok(moved) => turn.next(self.world.now(), moved, &mut self.random),
                Err(Stop::Wrong(what)) => return Err(what),
                Err(Stop::Failed(_)) => break,
            }
        }
        Ok(())
    }

    fn heal(&mut self, now: u64) {
        let world = &self.world;
        self.faults.retain(|fault| {
            if fault.until <= now {
                world.cut(fault.port, Cut::default());
            }
            fault.until > now
        });
    }

    /// Now and then a rail fails: in one direction or both, at one end or both, or a device of its own accord, or refuses a request. Mostly one of which there is another.
    fn break_something(&mut self, now: u64) {
        if self.faults_left == 0 || !self.random.one_in(400) {
            return;
        }
        let rail = self.random.below(self.rails as u64) as usize;
        let is_safe = (0..self.rails).any(|other| other != rail && self.world.is_sound(other) && self.is_live(other));
        if !is_safe && !self.random.one_in(40) {
            return;
        }
        self.may_fail |= !is_safe;
        self.faults_left -= 1;
        let port = Port { host: self.random.below(2) as usize, rail };
        match self.random.below(6) {
            0 | 1 => return self.world.break_port(port),
            2 => return self.world.refuse(port),
            _ => {}
        }
        let cut = match self.random.below(3) {
            0 => Cut { out: true, back: false },
            1 => Cut { out: false, back: true },
            _ => Cut { out: true, back: true },
        };
        let length = 1 << self.random.below(CUT_NS.ilog2().into());
        self.world.cut(port, cut);
        self.faults.retain(|fault| fault.port != port);
        self.faults.push(Fault { port, until: now + 1 + self.random.below(length) });
    }

    /// Whether something has moved.
    fn sender(&mut self) -> std::result::Result<bool, Stop> {
        self.send.poll_for_test();
        let (mut moved, mut posted) = (false, 0);
        for message in self.sending.iter_mut().filter(|message| message.request.is_none()) {
            fill(&self.from, message.place, message.len, message.pattern);
            let addr = self.from.addr() + message.place * ROOM;
            match self.send.isend(addr, message.len, message.place as i32, self.mrs[0]).map_err(Stop::Failed)? {
                None => break,
                request => message.request = request,
            }
            moved = true;
            posted += 1;
            if posted == 3 {
                break;
            }
        }
        let mut index = 0;
        while let Some(message) = self.sending.get(index) {
            let done = match message.request {
                Some(request) => self.send.test(request).map_err(Stop::Failed)?.is_some(),
                None => false,
            };
            if done {
                // The memory is the sender's again: what is still read of it comes as something else.
                fill(&self.from, message.place, message.len, !message.pattern);
                self.sending.remove(index);
                moved = true;
            } else {
                index += 1;
            }
        }
        Ok(moved)
    }

    fn receiver(&mut self) -> std::result::Result<bool, Stop> {
        self.recv.poll_for_test();
        let mut moved = false;
        let mut index = 0;
        while let Some(group) = self.groups.get(index) {
            let Some(sizes) = self.recv.test(group.receive).map_err(Stop::Failed)? else {
                index += 1;
                continue;
            };
            let Some(group) = self.groups.remove(index) else { break };
            moved = true;
            for (&(place, len, pattern), size) in group.messages.iter().zip(sizes.bytes) {
                let mut bytes = vec![0; len];
                self.to.read(place * ROOM, &mut bytes);
                if size as usize != len || bytes != bytes_of(len, pattern) {
                    return Err(Stop::Wrong(format!("message {} of {len} bytes has come as another one, of {size}", self.received)));
                }
                self.world.guard(self.to.addr() + place * ROOM, ROOM);
                self.received += 1;
                self.free.push(place);
            }
        }
        let n = (1 + self.random.below(3) as usize).min(self.left);
        // A message's memory at the sender is its place, too.
        let busy = |place: &usize| self.sending.iter().any(|message| message.place == *place);
        let places: Vec<usize> = self.free.iter().copied().filter(|place| !busy(place)).take(n).collect();
        if n == 0 || places.len() < n || !self.random.one_in(2) {
            return Ok(moved);
        }
        let buffer = |place: &usize| RecvBuffer { addr: self.to.addr() + place * ROOM, len: ROOM, tag: *place as i32, mr: self.mrs[1] };
        let buffers: Vec<RecvBuffer> = places.iter().map(buffer).collect();
        places.iter().for_each(|place| self.world.unguard(self.to.addr() + place * ROOM));
        let Some(receive) = self.recv.irecv(&buffers).map_err(Stop::Failed)? else {
            places.iter().for_each(|place| self.world.guard(self.to.addr() + place * ROOM, ROOM));
            return Ok(moved);
        };
        self.free.retain(|place| !places.contains(place));
        self.left -= n;
        let mut messages = Vec::new();
        for place in places {
            self.patterns = self.patterns.wrapping_add(2);
            let len = [0, 8, 100, 3000, ROOM][self.random.below(5) as usize];
            messages.push((place, len, self.patterns));
            self.sending.push_back(Message { place, len, pattern: self.patterns, request: None });
        }
        self.groups.push_back(Group { receive, messages });
        Ok(true)
    }
}

/// Why a schedule ends.
enum Stop {
    /// A promise was broken.
    Wrong(String),
    /// The comm has failed.
    Failed(Error),
}
