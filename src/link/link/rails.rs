//! Goes on without a rail that has failed, and takes it up again: see [`crate::link::failover`] for what the ends say to each other.

use std::time::Duration;

use super::Link;
use super::failing::PendingFault;
use super::outage::OUTAGE_PAUSE_NS;
use super::waiting::Seconds;
use crate::base::clock;
use crate::base::log::{self, log_info, log_warn};
use crate::fabric::{Opcode, Payload, PostError, WcStatus};
use crate::link::failover::{
    ATTEMPT_NS, CONTROL, Counts, FIRST_PAUSE_NS, Failover, LAST_PAUSE_NS, Phase, Posted, Rail, Sent, Traffic, Word, encode_cell,
};
use crate::link::limits::MAX_QPS_PER_RAIL;
use crate::link::plan::Plan;
use crate::link::queue_pairs::{NO_QP, Side, Wr};
use crate::link::sends::{self, LocalKeys, Message};
use crate::link::wr_id::{RequestId, WrId, WrKind};

/// In the id of a [`WrKind::Rail`]: a probe. Else it is a cell.
const PROBE: RequestId = RequestId(1);
const CELL: RequestId = RequestId(2);
/// How long who sleeps does so at most: while there is something to do about rails, at first and once that lasts for so long, and else.
const BUSY_RAIL_POLL_NS: u64 = 1_000_000;
const LASTING_NS: u64 = 1_000_000_000;
const LASTING_RAIL_POLL_NS: u64 = 20_000_000;
const RAIL_POLL_NS: u64 = 100_000_000;
/// Polls per look at rails for which there is nothing to do but to wait.
const WAIT_POLLS: u32 = 64;

/// The setting that allows no longer wait.
fn allowed(ns: u64) -> String {
    format!("{} s (RAILHEAD_FABRIC_TIMEOUT_S)", ns / 1_000_000_000)
}

/// Whether an error says that a path or a device has failed, and not that one of the ends did what it may not.
pub(super) fn is_of_the_rail(status: WcStatus) -> bool {
    use WcStatus::{GeneralErr, LocQpOpErr, RemOpErr, RetryExcErr, WrFlushErr};
    // Of its own link that is down a device says that the queue pair cannot perform the request (mlx5; Soft-RoCE).
    matches!(status, WrFlushErr | RetryExcErr | RemOpErr | GeneralErr | LocQpOpErr)
}

impl Link {
    /// A queue pair has failed. If others carry on, so does the link.
    #[cold]
    #[inline(never)]
    pub(super) fn rail_failed(&mut self, rail: usize, status: WcStatus, text: String) {
        let Some(mut failover) = self.failover.take() else { return };
        self.give_up_rail(&mut failover, rail, status, text);
        self.failover = Some(failover);
    }

    fn give_up_rail(&mut self, failover: &mut Failover, rail: usize, status: WcStatus, text: String) {
        let now = clock::now();
        let Some(it) = failover.rails.get_mut(rail).filter(|it| matches!(it.phase, Phase::Live | Phase::Connecting | Phase::Probing))
        else {
            return;
        };
        if it.phase == Phase::Live {
            if now.saturating_sub(it.since) > LAST_PAUSE_NS {
                it.pause = FIRST_PAUSE_NS;
            }
            (it.since, it.why, it.is_logged) = (now, text.clone(), false);
            self.stats.rail(rail).went_down(now, &text);
        }
        (it.phase, it.begun_at) = (Phase::Draining, now);
        // What was told over it may be lost.
        failover.tell_again(rail);
        self.qps.fail_rail(rail);
        if failover.ordered_rail == rail {
            self.qps.set_ordered(NO_QP);
        }
        self.rails_changed(failover);
        self.begin_outage(failover, now, status, text);
        self.check_outage(failover, now);
    }

    fn rails_changed(&mut self, failover: &mut Failover) {
        self.rails_active = true;
        self.qps.use_rails(|rail| failover.is_live(rail));
        // Nothing that is ordered may be under way on the former queue pair when it goes on over another one.
        if self.qps.ordered() == NO_QP && !matches!(failover.phase(failover.ordered_rail), Phase::Draining | Phase::Down) {
            let next = self.qps.live_rails().next();
            if let Some((rail, qp)) = next {
                self.qps.set_ordered(qp);
                // An end that sends has nothing there that could be lost.
                (failover.ordered_rail, failover.ordered_moved) = (rail, self.side == Side::Recv);
            }
        }
    }

    /// Whether it goes on when a rail fails.
    pub fn has_failover(&self) -> bool {
        self.failover.is_some()
    }

    /// The same, now: a peer that leaves takes its rails with it.
    pub(super) fn goes_on(&self) -> bool {
        self.failover.is_some() && !self.peer_left
    }

    /// Free entries for what is ordered: none while something of it has to be sent again.
    #[inline]
    pub fn room_in_order(&self) -> u32 {
        let waits = self.rails_active && self.failover.as_ref().is_some_and(|failover| !failover.lost_in_order.is_empty());
        if waits { 0 } else { self.qps.room(self.qps.ordered()) }
    }

    /// What is ordered and has to be sent again next, if there is room: the caller posts it.
    pub fn next_lost_in_order(&mut self) -> Option<Posted> {
        let failover = self.failover.as_mut()?;
        if self.qps.room(self.qps.ordered()) < sends::MOST_ENTRIES { None } else { failover.lost_in_order.pop_front() }
    }

    /// Posts a notification again.
    pub fn notify_again(&mut self, id: RequestId, value: u32) -> Result<(), (usize, PostError)> {
        let sent = self.failover.as_ref().and_then(|failover| failover.message(id));
        sent.map_or(Ok(()), |sent| sent.post_again_in_order(self, value))
    }

    /// What was found to have landed when a rail failed.
    pub fn next_landed(&mut self) -> Option<RequestId> {
        self.failover.as_mut()?.landed.pop_front()
    }

    /// Whether something is to be done about rails.
    #[inline]
    pub fn rails_are_active(&self) -> bool {
        self.rails_active
    }

    /// Whether what is ordered goes on another queue pair since this was last asked: what was under way may be lost.
    #[inline]
    pub fn ordered_moved(&mut self) -> bool {
        self.rails_active && self.failover.as_mut().is_some_and(|failover| std::mem::take(&mut failover.ordered_moved))
    }

    /// A look while nothing moves: the peer may have said something.
    #[inline]
    pub(super) fn hear_of_rails(&mut self) {
        let Some(failover) = self.failover.as_ref().filter(|_| !self.peer_left) else { return };
        let rails = failover.rails.len();
        let word = |rail| failover.cells.word(rails, rail).max(self.liveness.said(rail).word);
        let news = |(rail, it): (usize, &Rail)| word(rail) > Word::up(it.generation);
        if self.rails_active || failover.rails.iter().enumerate().any(news) {
            self.step_rails();
        }
    }

    /// A look before a sleep, and while nobody waits. `Some`: nothing would wake the caller, who has to look again after so many nanoseconds.
    pub fn look_at_rails(&mut self) -> Option<u64> {
        if self.failover.is_none() || self.peer_left {
            return None;
        }
        let now = clock::now();
        let checks = now.saturating_sub(self.rails_checked) >= RAIL_POLL_NS || now >= self.silent_at;
        if checks && !self.hear(now) {
            return None;
        }
        self.hear_of_rails();
        if checks {
            self.rails_checked = now;
            self.check_rails(now);
        }
        let begun = self.failover.iter().flat_map(|failover| &failover.rails).filter(|it| it.phase != Phase::Live).map(|it| it.begun_at);
        let pause = match (self.rails_need_polls(), begun.max().is_some_and(|begun| now.saturating_sub(begun) < LASTING_NS)) {
            (true, true) => BUSY_RAIL_POLL_NS,
            (true, false) => LASTING_RAIL_POLL_NS,
            (false, _) => RAIL_POLL_NS,
        };
        Some(pause.min(self.silent_at.saturating_sub(now)).max(BUSY_RAIL_POLL_NS))
    }

    /// A look while nobody calls. `Some`: something is to be done about rails, and how soon they have to be looked at again.
    pub fn rails_wait_within(&mut self) -> Option<Duration> {
        let pause = self.look_at_rails()?;
        self.rails_need_polls().then(|| Duration::from_nanos(pause))
    }

    /// A queue pair was found in ERROR that no completion has told of. False: that is the end of the link.
    #[cold]
    pub(super) fn rail_is_broken(&mut self, rail: Option<usize>, text: &str) -> bool {
        let (Some(rail), true) = (rail, self.goes_on()) else { return false };
        self.rail_failed(rail, WcStatus::WrFlushErr, text.to_owned());
        true
    }

    /// A look that is rare: gives up rails on which the peer's host has not answered for too long, or that take too long to come back. Without what a
    /// device was asked to do before its rail failed nothing can be sent again, so one that never reports it is the end of the link.
    #[cold]
    pub(super) fn check_rails(&mut self, now: u64) {
        let Some(mut failover) = self.failover.take() else { return };
        let timeout = self.unsignaled_max_ns * 4;
        self.silent_at = u64::MAX;
        for rail in 0..failover.rails.len() {
            let unanswered = if failover.is_down(rail) { None } else { self.qps.rail_unanswered_for(rail) };
            let Some(it) = failover.rails.get_mut(rail) else { continue };
            it.unanswered_since = match (unanswered, it.unanswered_since) {
                (None, _) => 0,
                // An attempt to connect is no longer without an answer than it lasts.
                (Some(ns), 0) => now.saturating_sub(ns).max(it.begun_at).max(1),
                (Some(_), since) => since,
            };
            if it.phase == Phase::Draining && now.saturating_sub(it.begun_at) >= timeout {
                let text = format!(
                    "rail {rail} is down ({}), and its device has not reported what was outstanding for {}",
                    it.why,
                    allowed(timeout)
                );
                self.fault.get_or_insert(PendingFault::new(WcStatus::GeneralErr, text));
            }
            let silent = it.unanswered_since > 0 && now.saturating_sub(it.unanswered_since) >= timeout;
            let slow = matches!(it.phase, Phase::Connecting | Phase::Probing) && now.saturating_sub(it.begun_at) >= ATTEMPT_NS;
            if silent || slow {
                let text = match silent {
                    true => format!("the peer's host has not answered for {}", allowed(timeout)),
                    false => format!("the peer has not answered an attempt to connect for {} s", ATTEMPT_NS / 1_000_000_000),
                };
                self.give_up_rail(&mut failover, rail, WcStatus::RetryExcErr, text);
            } else if it.unanswered_since > 0 {
                self.silent_at = self.silent_at.min(it.unanswered_since + timeout);
            }
        }
        self.check_outage(&mut failover, now);
        self.failover = Some(failover);
    }

    /// Which rails are down, for how long and why, for a line of the log.
    pub(super) fn rails_down(&self, now: u64) -> String {
        let rails = self.failover.iter().flat_map(|failover| failover.rails.iter().enumerate());
        let down = rails.filter(|(_, it)| it.phase != Phase::Live);
        down.map(|(rail, it)| format!("; rail {rail} is down, for {}: {}", Seconds(now.saturating_sub(it.since)), it.why)).collect()
    }

    /// What has to be known of a message to send it again.
    #[inline]
    pub fn remember<K: LocalKeys>(&mut self, message: &Message<'_, K>, plan: Plan) {
        let Some(failover) = &mut self.failover else { return };
        let lkeys = std::array::from_fn(|rail| message.keys.map_or(0, |keys| keys.lkey(rail)));
        let &Message { sequence, remote_addr, rkeys, addr, id, .. } = message;
        failover.remember(Sent { id, sequence, addr, remote_addr, rkeys: *rkeys, lkeys, plan });
    }

    /// Something was posted, or refused by a queue pair that has failed. Its device may have taken a part, so it is under way until both ends are drained.
    ///
    /// Errors: what `posted` says, if that is the end of the link.
    #[inline]
    pub fn posted(&mut self, qp: usize, what: Posted, posted: Result<(), PostError>) -> Result<(), PostError> {
        if let Some(failover) = &mut self.failover {
            failover.posted(qp, what);
            let (rails, qps) = (&failover.rails, &mut self.qps);
            let all_work = || rails.iter().all(|it| it.phase == Phase::Live) && qps.broken(|_| true).is_none();
            if matches!(what, Posted::Stripe(_, 0) | Posted::Notification(..))
                && let Some(rail) = self.failing.posted(all_work)
            {
                self.qps.fail_rail(rail);
            }
        }
        posted.or_else(|error| self.refused(qp, error))
    }

    /// A queue pair has refused what was ordered.
    ///
    /// Errors: that is the end of the link.
    #[cold]
    pub fn refused(&mut self, qp: usize, error: PostError) -> Result<(), PostError> {
        if !self.goes_on() || !matches!(error, PostError::State(_)) {
            return Err(error);
        }
        let rail = self.qps.rail_of(qp);
        let why = self.qps.why(WrKind::Data, qp).unwrap_or_else(|| error.to_string());
        self.rail_failed(rail, WcStatus::WrFlushErr, why);
        Ok(())
    }

    /// Whether a thread that sleeps has to look at rails soon: there is something to do besides waiting.
    pub fn rails_need_polls(&self) -> bool {
        self.rails_active && !self.peer_left && !self.failover.as_ref().is_none_or(|failover| failover.waits())
    }

    /// Called by each poll while something is to be done about rails.
    #[cold]
    #[inline(never)]
    pub(super) fn poll_rails(&mut self) {
        self.rail_polls = self.rail_polls.wrapping_add(1);
        let waits = self.failover.as_ref().is_none_or(|failover| failover.waits());
        if !waits || self.rail_polls.is_multiple_of(WAIT_POLLS) {
            self.step_rails();
        }
    }

    fn step_rails(&mut self) {
        if self.failed.is_some() || self.peer_left {
            return;
        }
        let now = clock::now();
        if self.is_in_outage() && !self.hear(now) {
            return;
        }
        let Some(mut failover) = self.failover.take() else { return };
        for rail in 0..failover.rails.len() {
            self.step_rail(&mut failover, rail, now);
        }
        self.send_lost(&mut failover);
        for rail in 0..failover.rails.len() {
            self.tell(&mut failover, rail);
        }
        self.rails_active = !failover.is_calm() || failover.ordered_moved;
        self.failover = Some(failover);
    }

    fn step_rail(&mut self, failover: &mut Failover, rail: usize, now: u64) {
        let said = self.said(failover, rail);
        let heard = said.word;
        let connects = failover.cells.connects;
        let Some(it) = failover.rails.get_mut(rail) else { return };
        // Each end goes a step further only once it has heard of the other's last one, but may fail at any time.
        let most = match it.word {
            word if word >= Word::settled(it.generation) => Word::down(it.generation + 1),
            word if word >= Word::down(it.generation) => Word::settled(it.generation),
            _ => Word::down(it.generation),
        };
        if heard > most {
            return self.protocol_error(format_args!("{heard:?} of rail {rail}, where {most:?} is the most"));
        }
        match it.phase {
            Phase::Live | Phase::Connecting | Phase::Probing if heard >= Word::down(it.generation) => {
                self.give_up_rail(failover, rail, WcStatus::WrFlushErr, "the peer says that it is down".into());
            }
            Phase::Live => {}
            Phase::Draining => {
                if self.qps.rail_drained(rail) {
                    it.counts = counts(&failover.traffic, self.qps.qps_of(rail));
                    (it.phase, it.word) = (Phase::Down, Word::down(it.generation));
                }
            }
            Phase::Down => {
                if heard >= Word::down(it.generation) {
                    self.settle(failover, rail, said.counts, now);
                }
            }
            Phase::Settled if heard >= Word::down(it.generation + 1) => {
                // The peer has tried in vain.
                it.generation += 1;
                it.counts = [0; MAX_QPS_PER_RAIL];
                (it.phase, it.word) = (Phase::Down, Word::down(it.generation));
            }
            Phase::Settled => {
                let begins = if connects {
                    heard >= Word::settled(it.generation) && now >= it.retry_at
                } else {
                    heard >= Word::up(it.generation + 1)
                };
                if begins {
                    self.begin(failover, rail);
                }
            }
            Phase::Connecting => {
                if heard >= Word::up(it.generation) {
                    it.phase = Phase::Probing;
                    self.probe_rail(failover, rail);
                }
            }
            Phase::Probing => {
                if self.qps.qps_of(rail).all(|qp| failover.traffic.get(qp).is_some_and(|it| it.probed)) {
                    let down = now.saturating_sub(it.since);
                    (it.phase, it.since) = (Phase::Live, now);
                    self.end_outage(failover, now);
                    self.stats.rail(rail).came_back();
                    log_info!(log::NET, "{}: rail {rail} is up again, after {}", self.name, Seconds(down));
                    self.rails_changed(failover);
                }
            }
        }
    }

    /// Both ends are drained: completes what had landed, and what had not is to be sent again.
    fn settle(&mut self, failover: &mut Failover, rail: usize, arrived: Counts, now: u64) {
        let (lost, mut any) = (failover.lost.len(), false);
        for (qp, received) in self.qps.qps_of(rail).zip(arrived) {
            let Some(it) = failover.traffic.get_mut(qp) else { continue };
            let landed = received.wrapping_sub(it.done) as usize;
            if landed > it.sent.len() {
                let (done, sent) = (it.done, it.sent.len());
                return self.protocol_error(format_args!(
                    "{received} messages received on a queue pair that {done} are done on and {sent} under way"
                ));
            }
            for what in it.sent.drain(..landed) {
                match what {
                    Posted::Stripe(id, stripe) => sends::stripe_done(&mut self.requests, id, stripe),
                    Posted::Notification(id, _) => sends::stripe_done(&mut self.requests, id, 0),
                    Posted::Control(..) => {}
                }
                if self.side == Side::Both && !matches!(what, Posted::Control(.., false)) {
                    failover.landed.push_back(what.id());
                }
            }
            failover.has_landed |= landed > 0 || it.done != 0 || it.received != 0;
            (it.done, it.received) = (0, 0);
            any |= landed > 0;
            while let Some(what) = failover.traffic.get_mut(qp).and_then(|it| it.sent.pop_back()) {
                failover.lose(what);
            }
        }
        if any {
            self.has_landed(failover);
        }
        let again = failover.lost.len() - lost;
        let live = (0..failover.rails.len()).filter(|rail| failover.is_live(*rail)).count();
        let Some(it) = failover.rails.get_mut(rail) else { return };
        (it.phase, it.word) = (Phase::Settled, Word::settled(it.generation));
        let longest = if self.is_in_outage() { OUTAGE_PAUSE_NS } else { LAST_PAUSE_NS };
        (it.retry_at, it.pause) = (now + self.failing.pause(it.pause), (it.pause * 2).min(longest));
        // Further attempts in vain say nothing new.
        if !std::mem::replace(&mut it.is_logged, true) {
            let why = &it.why;
            let others = match self.is_in_outage() {
                true => "no other one works".to_owned(),
                false => format!("{live} of its rails carry on"),
            };
            log_warn!(log::NET, "{}: rail {rail} is down: {why}; {others}, {again} stripe(s) are sent again", self.name);
        }
        self.rails_changed(failover);
    }

    /// Takes the rail's queue pairs to the next generation.
    fn begin(&mut self, failover: &mut Failover, rail: usize) {
        let Some(it) = failover.rails.get_mut(rail) else { return };
        it.generation += 1;
        it.counts = [0; MAX_QPS_PER_RAIL];
        it.begun_at = clock::now();
        (it.phase, it.word) = (Phase::Connecting, Word::up(it.generation));
        for qp in self.qps.qps_of(rail) {
            if let Some(it) = failover.traffic.get_mut(qp) {
                it.probed = false;
            }
        }
        let receives = if self.side == Side::Send { 0 } else { self.side.recv_depth() };
        if let Err(error) = self.qps.reset_rail(rail, it.generation, receives) {
            self.give_up_rail(failover, rail, WcStatus::LocQpOpErr, error.to_string());
        }
    }

    fn probe_rail(&mut self, failover: &mut Failover, rail: usize) {
        for qp in self.qps.qps_of(rail) {
            let nothing = Wr { opcode: Opcode::Write, payload: Payload::Inline(&[]), remote: self.qps.remote(qp, 0), imm: 0 };
            if let Err(error) = self.qps.post_send(qp, [nothing], WrKind::Rail, PROBE, true) {
                return self.give_up_rail(failover, rail, WcStatus::WrFlushErr, error.to_string());
            }
        }
    }

    /// Something was received, or has arrived.
    #[inline]
    pub(super) fn count_arrival(&mut self, wr: &WrId) {
        let (Some(failover), qp) = (&mut self.failover, usize::from(wr.qp)) else { return };
        match wr.kind {
            WrKind::Data => failover.arrived(qp, false),
            WrKind::Control => failover.arrived(qp, true),
            WrKind::Recv => failover.received(qp),
            WrKind::Probe | WrKind::Rail => {
                failover.arrived_unsignaled(qp, wr.retires.saturating_sub(1));
                if wr.kind == WrKind::Rail && wr.id == PROBE {
                    failover.probed(qp);
                }
            }
            WrKind::Cts | WrKind::Flush => {}
        }
    }

    /// Tells the peer what it does not know, or may not, as the rail over which it was told has failed since.
    fn tell(&mut self, failover: &mut Failover, rail: usize) {
        let Some(it) = failover.rails.get(rail) else { return };
        if it.told.0 == it.word {
            return;
        }
        let cell = encode_cell(it.word, &it.counts);
        let word = it.word;
        let Some((via, qp)) = self.qps.live_rails().find(|(_, qp)| self.qps.room(*qp) > 0) else {
            if self.is_in_outage()
                && self.liveness.say_cell(rail, &cell)
                && let Some(it) = failover.rails.get_mut(rail)
            {
                it.told = (word, CONTROL);
            }
            return;
        };
        let write = Wr {
            opcode: Opcode::Write,
            payload: Payload::Inline(&cell),
            remote: self.qps.remote(qp, failover.cells.remote(via, rail)),
            imm: 0,
        };
        match self.qps.post_send(qp, [write], WrKind::Rail, CELL, true) {
            Ok(()) => {
                if let Some(it) = failover.rails.get_mut(rail) {
                    it.told = (word, via);
                }
            }
            Err(error) => self.give_up_rail(failover, via, WcStatus::WrFlushErr, error.to_string()),
        }
    }

    /// Sends again what was lost, as far as there is room.
    fn send_lost(&mut self, failover: &mut Failover) {
        while let Some((id, stripe)) = failover.lost.front().copied() {
            let Some(message) = failover.message(id) else {
                failover.lost.pop_front();
                continue;
            };
            let Some(qp) = self.qps.next_with_room() else { return };
            let posted = message.post_again(&mut self.qps, &self.stats, usize::from(stripe), qp);
            failover.posted(qp, Posted::Stripe(id, stripe));
            failover.lost.pop_front();
            if let Err(error) = posted {
                let rail = self.qps.rail_of(qp);
                self.give_up_rail(failover, rail, WcStatus::WrFlushErr, error.to_string());
            }
        }
    }
}

fn counts(traffic: &[Traffic], qps: impl Iterator<Item = usize>) -> [u32; MAX_QPS_PER_RAIL] {
    let mut counts = [0; MAX_QPS_PER_RAIL];
    for (count, qp) in counts.iter_mut().zip(qps) {
        *count = traffic.get(qp).map_or(0, |it| it.received);
    }
    counts
}

#[cfg(any(test, feature = "sim"))]
impl Link {
    /// Whether there is nothing to do about rails.
    pub fn is_calm_for_test(&self) -> bool {
        !self.rails_active
    }

    /// How much is remembered of what was posted.
    pub fn remembered_for_test(&self) -> usize {
        self.failover.iter().flat_map(|failover| &failover.traffic).map(|it| it.sent.len()).sum()
    }

    /// Whether messages take a rail.
    pub fn is_live_for_test(&self, rail: usize) -> bool {
        self.failover.as_ref().is_some_and(|failover| failover.is_live(rail))
    }

    /// How far each is, and what is outstanding.
    pub fn rails_for_test(&mut self) -> String {
        let Some(failover) = &self.failover else { return String::new() };
        let rails = failover.rails.len();
        let state = |(rail, it): (usize, &Rail)| {
            let (generation, phase, word, told) = (it.generation, it.phase, it.word, it.told);
            let heard = self.said(failover, rail).word;
            let traffic: Vec<_> =
                self.qps.qps_of(rail).map(|qp| (failover.traffic[qp].sent.len(), failover.traffic[qp].probed, self.qps.room(qp))).collect();
            format!("{generation} {phase:?} {word:?} told {told:?} heard {heard:?} traffic {traffic:?}")
        };
        let states: Vec<_> = failover.rails.iter().enumerate().map(state).collect();
        let (lost, ordered, failed) = (failover.lost.len(), self.qps.ordered(), self.failed.as_ref().map(ToString::to_string));
        let rest =
            format!("lost {lost} ordered {ordered} active {} requests {:?} {failed:?}", self.rails_active, self.requests.unfinished());
        let broken: Vec<_> = (0..rails).map(|rail| self.qps.broken(|it| it == rail)).collect();
        format!("{}\n{rest} {broken:?}", states.join("\n"))
    }

    /// A rail that has failed is tried again without a pause.
    pub fn retry_rails_at_once_for_test(&mut self) {
        for rail in self.failover.iter_mut().flat_map(|failover| &mut failover.rails) {
            rail.pause = 0;
        }
    }
}
