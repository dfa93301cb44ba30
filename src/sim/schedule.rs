//! A schedule: two ranks that are polled in turn, at random times, while rails between them fail and come back. What the ranks do is their scenario's.

use crate::base::error::{Error, Result};
use crate::base::stats::RailCounter;
use crate::fabric::Capabilities;
use crate::fabric::sim::{Cut, Port, Random, World};
use crate::link::Link;

use super::{Options, Report, Violation};

/// Nanoseconds after the last fault in which all has to come to an end.
const PATIENCE_NS: u64 = 300_000_000_000;
/// Nanoseconds for which an end is watched whose other one has failed.
const ALONE_NS: u64 = 100_000_000;
/// Nanoseconds between two polls of a rank that is busy, and of one that has found nothing for a while.
const BUSY_NS: u64 = 2_000;
const IDLE_NS: u64 = 5_000_000;
/// Nanoseconds for which a rail may be cut, and a rank may be away.
const CUT_NS: u64 = 400_000_000;
const AWAY_NS: u64 = 100_000_000;

/// Two ranks, and what they have under way.
pub trait Ranks {
    /// Polls one of them, which begins something new now and then; whether something has moved.
    fn poll(&mut self, rank: usize, random: &mut Random) -> std::result::Result<bool, Stop>;
    /// Whether all that was to be done is.
    fn is_done(&self) -> bool;
    /// Their ends.
    fn links(&mut self) -> [&mut Link; 2];
    /// Messages that were received as they were sent.
    fn received(&self) -> u64;
}

/// Why a schedule ends.
pub enum Stop {
    /// A promise was broken.
    Wrong(String),
    /// An end has failed.
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        Stop::Failed(error)
    }
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

/// A schedule under way.
struct Schedule<R> {
    world: World,
    random: Random,
    ranks: R,
    faults: Vec<Fault>,
    faults_left: usize,
    /// There was a time at which no rail was sure to work.
    may_fail: bool,
    turns: [Turn; 2],
    rails: usize,
}

/// Runs one schedule of the ranks that `make` connects.
///
/// Errors: a promise that was broken.
pub fn run<R: Ranks>(
    options: &Options,
    make: impl FnOnce(&World, &mut Random, &Options) -> Result<R>,
) -> std::result::Result<Report, Violation> {
    let violation = |what: String| Violation { seed: options.seed, what };
    let mut random = Random(options.seed);
    // With a third one, whichever takes over may fail at once.
    let rails = if options.rails > 0 { options.rails } else { 2 + usize::from(random.one_in(3)) };
    let options = &Options { rails, ..options.clone() };
    let capabilities = Capabilities {
        keeps_early_requests: random.one_in(2),
        counts_plain_writes: false,
        splits_data: random.one_in(2),
        ar_threshold: if random.one_in(3) { 4096 } else { u32::MAX },
        shares_regions: false,
        descriptors_per_qp: 0,
    };
    let world = World::new(random.draw(), capabilities);
    let ranks = make(&world, &mut random, options).map_err(|error| violation(format!("the ranks are not connected: {error}")))?;
    let turn = Turn { at: world.now(), idle: 0 };
    let mut schedule = Schedule {
        world,
        ranks,
        faults: Vec::new(),
        faults_left: random.below(options.faults as u64 + 1) as usize,
        may_fail: options.rails == 1,
        turns: [turn; 2],
        rails: options.rails,
        random,
    };
    let ended = schedule.run().map_err(|what| {
        let [first, second] = schedule.ranks.links().map(Link::rails_for_test);
        violation(format!("{what}\nrank 0:\n{first}\nrank 1:\n{second}"))
    })?;
    let mut report = Report {
        trace: schedule.world.trace(),
        messages: schedule.ranks.received(),
        has_ended: ended,
        time: schedule.world.now(),
        ..Report::default()
    };
    for link in schedule.ranks.links() {
        for rail in 0..options.rails {
            report.failures += link.stats.rail(rail).get(RailCounter::Failures);
            report.reconnects += link.stats.rail(rail).get(RailCounter::Reconnects);
        }
    }
    Ok(report)
}

impl<R: Ranks> Schedule<R> {
    /// True: an end has failed, as it may.
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
            let moved = match self.ranks.poll(rank, &mut self.random) {
                Ok(moved) => moved,
                Err(Stop::Wrong(what)) => return Err(what),
                Err(Stop::Failed(error)) => {
                    return match self.may_fail {
                        true => self.goes_on_alone(1 - rank).map(|()| true),
                        false => Err(format!("rank {rank} has failed: {error}")),
                    };
                }
            };
            self.turns[rank].next(now, moved, &mut self.random);
            if self.random.one_in(2000) {
                self.turns[rank].at += self.random.below(AWAY_NS);
            }
            let is_done = self.ranks.is_done();
            if is_done && self.faults_left == 0 && self.faults.is_empty() && (0..self.rails).all(|rail| self.is_live(rail)) {
                return Ok(false);
            }
            // Who has nothing outstanding, or may post nothing, is told by the control connection alone.
            let failed = self.ranks.links().into_iter().any(|link| link.has_failed());
            if failed && !self.may_fail {
                return Err("an end has failed".into());
            }
            if failed && (is_done || now > deadline) {
                return Ok(true);
            }
            if self.faults_left == 0 && self.faults.is_empty() {
                deadline = deadline.min(now + PATIENCE_NS);
                if now > deadline {
                    return Err(format!("after {now} ns something is not received or not sent, or a rail is not back"));
                }
            }
        }
    }

    fn is_live(&mut self, rail: usize) -> bool {
        self.rails == 1 || self.ranks.links().into_iter().all(|link| link.is_live_for_test(rail))
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
            match self.ranks.poll(rank, &mut self.random) {
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

    /// Now and then a rail fails: in one direction or both, at one end or both, or a device of its own accord, or refuses a request. Mostly one of which
    /// there is another.
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
            2 => return self.world.refuse(port, self.random.below(8)),
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
}
