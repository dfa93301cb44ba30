//! The link itself: polling, arming, and what its layers ask of it. Used by the thread that drives it. How it fails is in `link/failing.rs`, what it says of a
//! long wait in `link/waiting.rs`, how it goes on without a rail in `link/rails.rs`, and without any in
//! `link/outage.rs`.

mod failing;
mod outage;
mod rails;
mod waiting;

use std::os::fd::RawFd;
use std::time::Duration;

use crate::base::clock;
use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::stage::FailingRails;
use crate::base::stats::{CommCounter, CommStats, Wait, WaitCause};
use crate::engine;
use crate::fabric::{Completion, PostError, WcStatus};

use super::connection::Connection;
use super::device_thread::WaitSet;
use super::failover::Failover;
use super::failure::Failure;
use super::limits::{MAX_MESSAGE, MAX_REQUESTS, RECORD_SIZE};
use super::liveness::{Liveness, Verdict, cause};
use super::queue_pairs::{BATCH, NO_COMPLETION, QueuePairs, Side};
use super::request::{RequestTable, Sizes};
use super::stall::StallWatch;
use super::wr_id::{RequestId, WrId, WrKind};
use failing::{EXPLAIN_NS, PendingFault};
use outage::Outage;
use waiting::PROBE_NS;

/// Batches of completions that one call takes from a rail at most, so that every call ends. A caller that polls often empties its queues all the same.
const BATCHES: usize = 4;
/// Empty polls per look at the clock.
const LOOK_EVERY: u32 = 64;

/// One connected peer. Fields drop in order: queue pairs, regions, then the control connection.
pub struct Link {
    /// Queue pairs.
    pub qps: QueuePairs,
    /// Requests.
    pub requests: RequestTable,
    /// Counters.
    pub stats: CommStats,
    liveness: Liveness,
    side: Side,
    stall: StallWatch,
    /// When a look first found unsignaled requests on the ordered queue pair with no signaled one behind them; 0: it found none.
    unsignaled_since: u64,
    /// How long that may last before the peer is probed.
    unsignaled_max_ns: u64,
    /// Polls that found nothing. It wraps: only the remainder by [`LOOK_EVERY`] is used.
    idle_polls: u32,
    /// The wait's cause is on the stats page; the next completion clears it.
    wait_shown: bool,
    /// For log lines: "send comm 3 on eth0 to host pid 5 (eth1 at 10.0.0.2)".
    name: String,
    batch: [Completion; BATCH],
    /// Evidence that the peer is lost. What had arrived before is still completed: the link fails once its queues are empty.
    fault: Option<PendingFault>,
    failed: Option<Failure>,
    /// What goes on when a rail fails, where there are several.
    failover: Option<Box<Failover>>,
    /// No rail is live, or none was until lately.
    outage: Option<Outage>,
    /// How long that may last.
    rail_timeout_ns: u64,
    /// Rails that a test lets fail.
    failing: FailingRails,
    /// Something is to be done about rails.
    rails_active: bool,
    /// Polls since; only the remainder matters.
    rail_polls: u32,
    /// When rails were last looked at for who sleeps.
    rails_checked: u64,
    /// When one is given up on which the peer's host does not answer; `u64::MAX` while it does on all.
    silent_at: u64,
    /// See [`Link::set_peer_left`].
    peer_left: bool,
    /// A call has returned the failure.
    reported: bool,
}

impl Link {
    /// From a handshake; `what` is "send comm 3 on eth0 to" or the like. Also gives the memory that the peer writes to.
    pub fn new<M>(connection: Connection<M>, side: Side, what: &str, config: &Config) -> (Link, M) {
        let Connection { qps, memory, peer, mut liveness, stats, cells } = connection;
        let failover = cells.filter(|_| qps.rails() > 1).map(|cells| {
            liveness.outlasts_its_connection();
            let messages = if side == Side::Recv { 0 } else { MAX_REQUESTS };
            Box::new(Failover::new(cells, qps.rails(), qps.len(), qps.depth() as usize, messages, clock::now()))
        });
        let link = Link {
            qps,
            requests: RequestTable::new(),
            stats,
            liveness,
            side,
            stall: StallWatch::new(config.stall_warn_s.nanos()),
            unsignaled_since: 0,
            unsignaled_max_ns: u64::from(config.fabric_timeout_s) * 1_000_000_000 / 4,
            idle_polls: 0,
            // The handshake may have left a wait on the stats page.
            wait_shown: true,
            name: format!("{what} {}", peer.label),
            batch: [NO_COMPLETION; BATCH],
            fault: None,
            failed: None,
            failover,
            outage: None,
            rail_timeout_ns: u64::from(config.rail_timeout_s) * 1_000_000_000,
            failing: FailingRails::of_link(),
            rails_active: false,
            rail_polls: 0,
            rails_checked: 0,
            silent_at: u64::MAX,
            peer_left: false,
            reported: false,
        };
        (link, memory)
    }

    /// Errors: the link has failed.
    #[inline]
    pub fn check(&mut self) -> Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(failure) => {
                self.reported = true;
                failure.result()
            }
        }
    }

    /// What a call returns that could not post. A caller with requests outstanding gets the link's failure from their `test` first, since they may be
    /// done. It makes no difference whether this thread or the device's found the failure.
    ///
    /// Errors: the link has failed, and a call has returned that already or no request is outstanding whose `test` could.
    pub fn no_request(&mut self) -> Result<Option<RequestId>> {
        if self.failed.is_none() {
            self.stats.add(CommCounter::NullPosts, 1);
        } else if self.reported || self.requests.used() == 0 {
            self.check()?;
        }
        Ok(None)
    }

    /// The same for a post that the fabric refused, which fails the link: nobody is given its request.
    #[cold]
    #[inline(never)]
    pub fn not_posted(&mut self, id: RequestId, kind: WrKind, qp: usize, error: PostError) -> Result<Option<RequestId>> {
        self.post_failed(kind, qp, error);
        self.requests.withdraw(id);
        self.no_request()
    }

    /// Polls, and hands each successful completion to `on`. A poll that finds nothing is a wait for `waits_for`. True, rarely: the caller is to call
    /// [`Link::report_stall`].
    #[inline(always)]
    pub fn progress(&mut self, waits_for: impl Into<Wait>, on: impl FnMut(&mut Link, &WrId, &Completion)) -> bool {
        !self.poll_completions(on) && self.found_nothing(waits_for)
    }

    /// A poll found nothing, and was a wait for `waits_for`. The result is that of [`Link::progress`].
    #[inline(always)]
    pub fn found_nothing(&mut self, waits_for: impl Into<Wait>) -> bool {
        self.idle_polls = self.idle_polls.wrapping_add(1);
        if self.fault.is_none() && !self.idle_polls.is_multiple_of(LOOK_EVERY) {
            return false;
        }
        self.idle(waits_for.into())
    }

    /// The same for the device's thread. Nobody waits for its polls, so an empty one is a wait only if a request is outstanding. Whether there was a
    /// completion; and, rarely, whether the caller is to call [`Link::report_stall`].
    pub fn progress_in_background(&mut self, waits_for: WaitCause, on: impl FnMut(&mut Link, &WrId, &Completion)) -> (bool, bool) {
        if self.poll_completions(on) {
            return (true, false);
        }
        self.idle_polls = self.idle_polls.wrapping_add(1);
        let look = self.fault.is_some() || self.idle_polls.is_multiple_of(LOOK_EVERY);
        (false, look && self.requests.unfinished().0 > 0 && self.idle(waits_for.into()))
    }

    /// Before the device's thread sleeps: arms the queues, then drains them. The rest as for [`Link::progress_in_background`].
    pub fn arm_and_drain(
        &mut self,
        wait: &mut WaitSet,
        waits_for: WaitCause,
        on: impl FnMut(&mut Link, &WrId, &Completion),
    ) -> (engine::Progress, bool) {
        if self.qps.arm(|fd| wait.add(fd)).is_err() {
            wait.poll_soon();
        }
        if self.poll_completions(on) || self.qps.needs_repoll() {
            return (engine::Progress::Moved, false);
        }
        if let Some(ns) = self.look_at_rails() {
            wait.within(Duration::from_nanos(ns));
        }
        if self.requests.unfinished().0 == 0 {
            return (engine::Progress::Idle, false);
        }
        // The thread polls too rarely for one look in many polls.
        let watch = self.idle(waits_for.into());
        match self.fault {
            Some(_) => wait.poll_soon(),
            None => wait.with_requests(self.stall.interval()),
        }
        (engine::Progress::Idle, watch)
    }

    /// Whether it is about to fail, for which it wants to be polled.
    pub fn has_fault(&self) -> bool {
        self.fault.is_some()
    }

    /// The peer has said that it takes nothing more.
    pub fn set_peer_left(&mut self) {
        self.peer_left = true;
    }

    /// Whether anything may be posted: not where the peer has left, nor where the link has failed or is about to.
    #[inline]
    pub fn can_post(&self) -> bool {
        !self.peer_left && self.fault.is_none() && self.failed.is_none()
    }

    /// Whether it has failed for good.
    pub fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Takes completions and hands each successful one to `on`; whether there was any, also of those that failed, after which the queues are not armed
    /// any more.
    #[inline(always)]
    pub fn poll_completions(&mut self, mut on: impl FnMut(&mut Link, &WrId, &Completion)) -> bool {
        let (mut found, mut probes, mut rail, mut batches) = (0, 0, 0, 0);
        while let Some(n) = self.qps.poll(rail, &mut self.batch) {
            for i in 0..n {
                let Some(completion) = self.batch.get(i).copied() else { break };
                match WrId::decode(completion.wr_id) {
                    Some(wr) if completion.status == WcStatus::Success => {
                        self.qps.retire(&wr);
                        if self.failover.is_some() {
                            self.count_arrival(&wr);
                        }
                        if wr.kind == WrKind::Probe {
                            self.stall.answer(wr.id);
                            probes += 1;
                        }
                        on(self, &wr, &completion);
                    }
                    Some(wr) => self.on_failed(&wr, completion.status),
                    None => self.unknown(completion.wr_id),
                }
            }
            found += n;
            batches += 1;
            if n < BATCH || batches == BATCHES {
                (rail, batches) = (rail + 1, 0);
            }
        }
        if found > 0 {
            self.liveness.busy();
        }
        if self.rails_active {
            self.poll_rails();
        }
        // Whoever waited when a probe was posted still does.
        if found > probes {
            self.waits_over();
        }
        found > 0
    }

    /// What was waited for is here, or nobody waits for it any more.
    #[cold]
    fn end_wait(&mut self) {
        self.wait_shown = false;
        // Who has no caller that polls all the time may have slept.
        if self.side == Side::Both { self.stats.end_wait(clock::now()) } else { self.stats.clear_wait() }
    }

    /// Nobody waits for the peer any more: the stats page says so.
    pub fn waits_over(&mut self) {
        if self.wait_shown {
            self.end_wait();
        }
    }

    /// As [`Liveness::set_waited_for`].
    #[inline]
    pub fn set_waited_for(&mut self, waited: bool) {
        self.liveness.set_waited_for(waited);
    }

    /// The peer's silence until now is not held against it.
    #[inline]
    pub fn reset_silence(&mut self) {
        self.liveness.reset_silence();
    }

    /// Before the caller sleeps: looks whether the peer is there, and names a descriptor that tells of its end. `Some`: nothing would wake the caller, who
    /// has to look again after so many nanoseconds.
    pub fn look(&mut self, waits_for: Wait, watch: impl FnMut(RawFd)) -> Option<u64> {
        let _ = self.idle(waits_for);
        match self.fault.is_some() || self.liveness.ended() {
            true => Some(EXPLAIN_NS),
            // A NIC says nothing of a peer's queue pair that has failed while its process lives.
            false => (!(self.liveness.watch(watch) && self.qps.keeps_early_requests)).then_some(PROBE_NS),
        }
    }

    /// A look whether its queue pairs are connected found that they are not: looks whether the peer is there. How long it may take is for the layer above
    /// to know.
    ///
    /// Errors: the link has failed.
    pub fn wait_to_connect(&mut self) -> Result<()> {
        self.liveness.reset_silence();
        let _ = self.idle(WaitCause::Handshake.into());
        self.check()
    }

    /// One of many polls that found nothing.
    #[cold]
    fn idle(&mut self, waits_for: Wait) -> bool {
        if self.failed.is_some() {
            return false;
        }
        let now = clock::now();
        if let Some(fault) = self.fault.take() {
            self.resolve(fault, now);
            return false;
        }
        if self.failover.is_some() {
            self.hear_of_rails();
            if now >= self.silent_at {
                self.check_rails(now);
            }
        }
        let verdict = self.liveness.look(now);
        if waits_for.cause == WaitCause::None {
            self.waits_over();
        } else {
            self.wait_shown = true;
            self.stats.sample_in(Wait { cause: cause(waits_for.cause, self.liveness.stopped()), ..waits_for }, now);
        }
        match verdict {
            Verdict::NotChecked => {}
            Verdict::Checked => {
                if self.failover.is_some() {
                    self.check_rails(now);
                }
                let broken = {
                    let failover = self.failover.as_deref();
                    self.qps.broken(|rail| failover.is_none_or(|failover| !failover.is_down(rail)))
                };
                if let Some((rail, text)) = broken {
                    if self.rail_is_broken(rail, &text) {
                        return false;
                    }
                    self.fault = Some(PendingFault { since: now, ..PendingFault::new(WcStatus::WrFlushErr, text) });
                    return false;
                }
                if let Some(process) = self.qps.peer_process() {
                    self.liveness.set_process(&process);
                }
                self.probe_unsignaled(now);
            }
            Verdict::Gone(why) => self.fail(Failure::remote(why)),
            Verdict::ProtocolError(why) => self.fail(Failure::remote(format!("the peer sent {why}"))),
        }
        self.failed.is_none() && self.stall.due(now)
    }

    /// Whether the peer has said that its end is connected.
    #[inline]
    pub fn confirmed(&self) -> bool {
        self.liveness.confirmed()
    }

    /// The sizes of a request that is done, which frees it.
    ///
    /// Errors: a request that is not outstanding.
    #[inline(always)]
    pub fn finish(&mut self, id: RequestId) -> Result<Option<Sizes>> {
        let finished = self.requests.finish(id)?;
        if finished.is_some() {
            self.stats.add(CommCounter::Completions, 1);
        }
        Ok(finished)
    }

    /// Counts a request given out.
    #[inline]
    pub fn count_op(&mut self) {
        self.stats.add(CommCounter::Ops, 1);
    }

    /// Counts the bytes of a record that was received, if the fabric counts those of plain WRITEs too.
    pub fn record_received(&self) {
        if self.qps.counts_plain_writes {
            self.stats.add(CommCounter::Bytes, RECORD_SIZE as u64);
        }
    }

    /// Tells the peer that this end closes.
    pub fn close(&mut self) {
        if self.failed.is_none() {
            self.liveness.say_bye();
        }
    }
}

#[cfg(test)]
impl Link {
    /// Probes the peer.
    pub fn probe_for_test(&mut self) {
        let id = self.stall.probe();
        self.probe(id);
    }

    /// Gives a peer up that is silent for so many nanoseconds.
    pub fn set_peer_timeout_for_test(&mut self, time: u64) {
        self.liveness.set_peer_timeout_for_test(time);
    }

    /// Whether it has answered.
    pub fn answered_for_test(&self) -> bool {
        self.stall.answered()
    }

    /// Takes a process for the peer's.
    pub fn set_process_for_test(&mut self, process: &std::sync::Arc<crate::base::process::Process>) {
        self.liveness.set_process(process);
    }

    /// Puts bytes on the control connection.
    pub fn say_for_test(&mut self, bytes: &[u8]) {
        self.liveness.say_for_test(bytes);
    }
}

/// A size beyond what a message may have.
#[cold]
pub fn too_long(what: &str, len: usize) -> Error {
    Error::usage(format!("{what}: {len} bytes; a message has at most {} (maxP2pBytes)", MAX_MESSAGE))
}
