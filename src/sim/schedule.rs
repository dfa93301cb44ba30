//! A schedule: ranks that are polled in turn, at random times, while rails between them fail and come back. What the ranks do is their scenario's.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::base::error::{Error, Result};
use crate::base::stats::RailCounter;
use crate::fabric::Capabilities;
use crate::fabric::sim::{Cut, NIC, Port, Random, World};
use crate::link::Link;

use super::{Options, Report, Violation};

/// Nanoseconds after the last fault in which all has to come to an end.
const PATIENCE_NS: u64 = 300_000_000_000;
/// Nanoseconds for which an end is watched whose other one has failed.
const ALONE_NS: u64 = 100_000_000;
/// Nanoseconds between two polls of a rank that is busy, and of one that has found nothing for a while.
const BUSY_NS: u64 = 2_000;
const IDLE_NS: u64 = 5_000_000;
/// So many ranks are few.
const FEW: usize = 8;
/// Nanoseconds for which a rail may be cut, and a rank may be away: longer than the first pause before a rail is taken up again.
const CUT_NS: u64 = 400_000_000;
const AWAY_NS: u64 = 400_000_000;

/// Ranks of a host each, and what they have under way.
pub trait Ranks {
    /// How many there are.
    fn count(&self) -> usize;
    /// Polls one of them, which begins something new now and then; whether something has moved.
    fn poll(&mut self, rank: usize, random: &mut Random) -> std::result::Result<bool, Stop>;
    /// Whether all that was to be done is.
    fn is_done(&self) -> bool;
    /// Does something with each link of a rank.
    fn for_each_link(&mut self, rank: usize, f: &mut dyn FnMut(&mut Link));
    /// Whether their links go on though no rail works for a while.
    fn outlast_outages(&self) -> bool {
        false
    }
    /// Messages, or whatever is counted, that were received as they were sent.
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
#[derive(Clone, Copy, Default)]
struct Turn {
    at: u64,
    idle: u32,
}

impl Turn {
    /// Polls of a rank that waits are rarer and rarer, so that long waits take few of them; soon, if it is told of what comes.
    fn next(&mut self, now: u64, moved: bool, is_told: bool, random: &mut Random) {
        self.idle = if moved { 0 } else { self.idle.saturating_add(1) };
        let doubled = if is_told { self.idle.saturating_mul(6) } else { self.idle / 64 };
        let pause = (BUSY_NS << doubled.min(12)).min(IDLE_NS);
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
    /// There was a time at which no rail was sure to work, and links that do not outlast it.
    may_fail: bool,
    /// By rank; and in order, with entries that are of no turn any more.
    turns: Vec<Turn>,
    next: BinaryHeap<Reverse<(u64, usize)>>,
    rails: usize,
    /// A rank of which not all rails were live when it was last looked at.
    not_live: usize,
}

/// Runs one schedule of the ranks that `make` connects. With many of them, one for which something has come is polled soon.
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
        splits_data: random.one_in(2),
        ar_threshold: if random.one_in(3) { 4096 } else { u32::MAX },
        ..NIC
    };
    let world = World::new(random.draw(), capabilities);
    let ranks = make(&world, &mut random, options).map_err(|error| violation(format!("the ranks are not connected: {error}")))?;
    let turns = vec![Turn { at: world.now(), idle: 0 }; ranks.count()];
    let mut schedule = Schedule {
        next: turns.iter().enumerate().map(|(rank, turn)| Reverse((turn.at, rank))).collect(),
        world,
        ranks,
        faults: Vec::new(),
        faults_left: random.below(options.faults as u64 + 1) as usize,
        may_fail: options.rails == 1,
        turns,
        rails: options.rails,
        not_live: 0,
        random,
    };
    let ended = schedule.run().map_err(|what| violation(what + &schedule.rails_of_few()))?;
    let mut report = Report {
        trace: schedule.world.trace(),
        messages: schedule.ranks.received(),
        has_ended: ended,
        time: schedule.world.now(),
        ..Report::default()
    };
    for rank in 0..schedule.ranks.count() {
        schedule.ranks.for_each_link(rank, &mut |link| {
            for rail in 0..options.rails {
                report.failures += link.stats.rail(rail).get(RailCounter::Failures);
                report.reconnects += link.stats.rail(rail).get(RailCounter::Reconnects);
            }
        });
    }
    Ok(report)
}

impl<R: Ranks> Schedule<R> {
    /// True: an end has failed, as it may.
    fn run(&mut self) -> std::result::Result<bool, String> {
        let mut deadline = u64::MAX;
        loop {
            let rank = self.advance_to_next()?;
            let now = self.world.now();
            self.heal(now);
            self.break_something(now);
            let moved = match self.poll(rank) {
                Ok(moved) => moved,
                Err(Stop::Wrong(what)) => return Err(what),
                Err(Stop::Failed(error)) => {
                    return match self.may_fail {
                        true => self.others_go_on(rank).map(|()| true),
                        false => Err(format!("rank {rank} has failed: {error}")),
                    };
                }
            };
            let is_done = self.ranks.is_done();
            if is_done && self.are_told() {
                // Many ranks that have nothing to do take long to come to the next one.
                self.faults_left = 0;
            }
            let is_over = self.faults_left == 0 && self.faults.is_empty();
            if is_done && is_over && (0..self.rails).all(|rail| self.is_live(rail)) {
                return Ok(false);
            }
            // Who has nothing outstanding, or may post nothing, is told by the control connection alone.
            let mut failed = false;
            if moved || !self.are_told() {
                self.ranks.for_each_link(rank, &mut |link| failed |= link.has_failed());
            }
            if failed && !self.may_fail {
                return Err(format!("a link of rank {rank} has failed"));
            }
            if failed && (is_done || now > deadline) {
                return Ok(true);
            }
            if is_over {
                deadline = deadline.min(now + PATIENCE_NS);
                if now > deadline {
                    return Err(format!("after {now} ns something is not received or not sent, or a rail is not back"));
                }
            }
        }
    }

    /// Lets all happen until the next turn: whose it is.
    fn advance_to_next(&mut self) -> std::result::Result<usize, String> {
        loop {
            let Some(Reverse((at, rank))) = self.next.pop() else { return Err("there is no rank".into()) };
            if at != self.turns[rank].at {
                continue;
            }
            if let Some(violation) = self.world.advance(at.max(self.world.now())) {
                return Err(violation);
            }
            if self.are_told() {
                let now = self.world.now();
                for other in self.world.take_reached() {
                    if self.turns[other].at > now + BUSY_NS {
                        let at = now + 1 + self.random.below(BUSY_NS);
                        self.set_turn(other, Turn { at, idle: 0 });
                    }
                }
                if self.turns[rank].at != at {
                    continue;
                }
            }
            return Ok(rank);
        }
    }

    /// Whether ranks are polled soon after something has come for them: many are, as else most polls would find nothing.
    fn are_told(&self) -> bool {
        self.turns.len() > FEW
    }

    fn set_turn(&mut self, rank: usize, turn: Turn) {
        self.turns[rank] = turn;
        self.next.push(Reverse((turn.at, rank)));
    }

    fn poll(&mut self, rank: usize) -> std::result::Result<bool, Stop> {
        let moved = self.ranks.poll(rank, &mut self.random)?;
        let mut turn = self.turns[rank];
        turn.next(self.world.now(), moved, self.are_told(), &mut self.random);
        if self.random.one_in(2000) {
            turn.at += self.random.below(AWAY_NS);
        }
        self.set_turn(rank, turn);
        Ok(moved)
    }

    fn is_live(&mut self, rail: usize) -> bool {
        if self.rails == 1 {
            return true;
        }
        // First a rank where it was not.
        let (count, first) = (self.ranks.count(), self.not_live);
        let not_live = (first..first + count).map(|rank| rank % count).find(|rank| {
            let mut is_live = true;
            self.ranks.for_each_link(*rank, &mut |link| is_live &= link.is_live_for_test(rail));
            !is_live
        });
        self.not_live = not_live.unwrap_or(first);
        not_live.is_none()
    }

    /// What the other ranks have under way when one has failed: they may go on for a while, and what comes is right.
    fn others_go_on(&mut self, failed: usize) -> std::result::Result<(), String> {
        let until = self.world.now() + ALONE_NS;
        let mut over = vec![false; self.turns.len()];
        over[failed] = true;
        while self.world.now() < until && over.contains(&false) {
            let rank = self.advance_to_next()?;
            if over[rank] {
                continue;
            }
            match self.poll(rank) {
                Ok(_) => {}
                Err(Stop::Wrong(what)) => return Err(what),
                Err(Stop::Failed(_)) => over[rank] = true,
            }
        }
        Ok(())
    }

    fn rails_of_few(&mut self) -> String {
        let mut text = String::new();
        for rank in 0..self.ranks.count().min(FEW) {
            self.ranks.for_each_link(rank, &mut |link| text += &format!("\nrank {rank}:\n{}", link.rails_for_test()));
        }
        text
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
        if self.faults_left == 0 || !self.random.one_in(200 * self.turns.len() as u64) {
            return;
        }
        let rail = self.random.below(self.rails as u64) as usize;
        let is_safe = (0..self.rails).any(|other| other != rail && self.world.is_sound(other) && self.is_live(other));
        let outlasts = self.ranks.outlast_outages();
        if !is_safe && !self.random.one_in(if outlasts { 4 } else { 40 }) {
            return;
        }
        self.may_fail |= !is_safe && !outlasts;
        self.faults_left -= 1;
        let port = Port { host: self.random.below(self.ranks.count() as u64) as usize, rail };
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
