//! The link itself: polling, failing, and knowing why one waits. Used by the thread that drives it.

use std::fmt;
use std::os::fd::RawFd;

use crate::base::clock;
use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_info, log_warn};
use crate::base::stats::{CommCounter, CommStats, Wait, WaitCause};
use crate::engine;
use crate::fabric::{Completion, Opcode, Payload, PostError, WcStatus};

use super::connection::Connection;
use super::device_thread::WaitSet;
use super::failure::Failure;
use super::limits::{MAX_MESSAGE, RECORD_SIZE};
use super::liveness::{Liveness, Verdict, cause};
use super::queue_pairs::{BATCH, NO_COMPLETION, ORDERED_QP, QueuePairs, Side, Wr};
use super::request::{RequestTable, Sizes};
use super::stall::{StallWatch, Step, Subject, Waiting};
use super::wr_id::{RequestId, WrId, WrKind};

/// Batches of completions that one call takes from a rail at most, so that every call ends. A caller that polls often empties its queues all the same.
const BATCHES: usize = 4;
/// Empty polls per look at the clock.
const LOOK_EVERY: u32 = 64;
/// Nanoseconds that a link whose peer is lost waits for the reason: the system closes the connections of a dying process one after the other.
const EXPLAIN_NS: u64 = 50_000_000;

/// How often an end of a duplex link ([`Side::Both`]) asks whether its peer still answers, while somebody waits.
const PROBE_NS: u64 = 1_000_000_000;

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
    /// When a look first found unsignaled requests on [`ORDERED_QP`] with no signaled one behind them; 0: it found none.
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
    /// See [`Link::set_peer_left`].
    peer_left: bool,
    /// A call has returned the failure.
    reported: bool,
}

struct PendingFault {
    status: WcStatus,
    text: String,
    /// When the reason was first looked for; 0 before.
    since: u64,
}

impl Link {
    /// From a handshake; `what` is "send comm 3 on eth0 to" or the like. Also gives the memory that the peer writes to.
    pub fn new<M>(connection: Connection<M>, side: Side, what: &str, config: &Config) -> (Link, M) {
        let Connection { qps, memory, peer, liveness, stats } = connection;
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
                if let Some(text) = self.qps.broken() {
                    self.fault = Some(PendingFault { status: WcStatus::WrFlushErr, text, since: now });
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

    /// A fabric reports that it gave up on a request only by the completion of a signaled one, and clear-to-sends are signaled rarely: so one that
    /// never arrives would be waited for without end. After a while a signaled WRITE of nothing is posted after them.
    ///
    /// An end of a duplex link may have no control connection that would end with its peer, so it asks regularly.
    fn probe_unsignaled(&mut self, now: u64) {
        let both = self.side == Side::Both;
        let most = if both { PROBE_NS } else { self.unsignaled_max_ns };
        if !both && !self.qps.has_unsignaled(ORDERED_QP) {
            self.unsignaled_since = 0;
        } else if self.unsignaled_since == 0 {
            self.unsignaled_since = now.max(1);
        } else if now.saturating_sub(self.unsignaled_since) >= most {
            self.unsignaled_since = 0;
            let id = self.stall.last_probe_id();
            self.probe(id);
        }
    }

    /// Warns, once, of a request that has been outstanding for too long. `next` is the number of the send that `isend` gave no request for, and `why`
    /// what is known of the wait beyond its cause.
    #[cold]
    pub fn report_stall(&mut self, next: Option<u64>, why: &'static str) {
        let oldest = self.requests.oldest();
        let request = oldest.map(|(id, request)| Waiting { subject: Subject::Request(id), sequence: request.sequence });
        let waiting = request.or(next.map(|sequence| Waiting { subject: Subject::NextSend, sequence }));
        let now = clock::now();
        match self.stall.look(now, waiting, self.stats.moved()) {
            Step::Nothing => {}
            Step::Suspect => {
                let id = self.stall.probe();
                self.probe(id);
            }
            Step::Stalled { age_ns, moved } => {
                // The last look at the process may have been long ago.
                let gone = self.liveness.condition(now);
                let part = oldest.is_some_and(|(_, request)| request.left < request.n);
                // Bytes that moved belong to the oldest request if it is the only one, or if all come on one queue pair, in order.
                let alone = self.requests.unfinished().0 == 1 || (self.side == Side::Recv && self.qps.len() == 1);
                let (cause, detail) = self.stall_cause(request.is_some(), gone, part || (alone && moved > 0), why);
                let Some(waiting) = waiting else { return };
                self.stats.add(CommCounter::Stalls, 1);
                let (what, name, age, used) = (self.what(&waiting), &self.name, Seconds(age_ns), self.requests.used());
                log_warn!(
                    log::NET,
                    "stalled: {what} of {name}: for {age} so far; cause: {}{detail}; {used} request(s) outstanding",
                    cause.words()
                );
            }
            Step::Over { was, age_ns } => {
                log_info!(log::NET, "no longer stalled: {} of {}: it took {}", self.what(&was), self.name, Seconds(age_ns));
            }
        }
    }

    /// Why a wait goes on: the state of the peer's process explains any wait; if it says nothing, what the wait is for does.
    fn stall_cause(&self, posted: bool, gone: Option<String>, part: bool, why: &'static str) -> (WaitCause, String) {
        let detail = |text: &str| if text.is_empty() { String::new() } else { format!(" ({text})") };
        if let Some(gone) = gone {
            return (WaitCause::PeerGone, detail(&gone));
        }
        match self.side {
            _ if self.liveness.stopped() => (WaitCause::PeerStopped, String::new()),
            Side::Send if posted => {
                let text = if part { "part of it has moved" } else { "the peer does not poll, or the network does not deliver" };
                (WaitCause::Fabric, detail(text))
            }
            Side::Send => (WaitCause::PeerNoReceive, detail(why)),
            Side::Recv | Side::Both if part => (WaitCause::Fabric, detail("part of it has arrived")),
            Side::Recv | Side::Both if self.stall.answered() => (WaitCause::PeerNoSend, detail("it knows of the receive")),
            Side::Recv | Side::Both => {
                (WaitCause::PeerNoSend, detail("nor taken the receive's clear-to-send: it does not poll, or the network does not deliver"))
            }
        }
    }

    fn what(&self, waiting: &Waiting) -> String {
        let number = waiting.sequence;
        match (self.side, waiting.subject) {
            (Side::Send, Subject::Request(_)) => format!("send {number}"),
            (Side::Send, Subject::NextSend) => format!("send {number}, not yet posted,"),
            (Side::Recv | Side::Both, _) => format!("receive {number}"),
        }
    }

    /// Posts a signaled WRITE of nothing: its completion shows that the peer's fabric has taken all clear-to-sends before it.
    fn probe(&mut self, id: RequestId) {
        if self.side == Side::Send || self.qps.room(ORDERED_QP) == 0 || !self.can_post() {
            return;
        }
        // A device that gives up on a peer which has not connected yet would take a late peer for a lost one.
        if !self.confirmed() && !self.qps.keeps_early_requests {
            return;
        }
        let nothing = Wr { opcode: Opcode::Write, payload: Payload::Inline(&[]), remote: self.qps.remote(ORDERED_QP, 0), imm: 0 };
        // A queue pair that takes nothing has failed, which the next poll says in its own words.
        let _ = self.qps.post_send(ORDERED_QP, [nothing], WrKind::Probe, id, true);
    }

    #[cold]
    #[inline(never)]
    fn unknown(&mut self, wr_id: u64) {
        self.fail(Failure::internal(format!("unknown work request {wr_id:#x} completed")));
    }

    /// A completion that failed.
    #[cold]
    #[inline(never)]
    fn on_failed(&mut self, wr: &WrId, status: WcStatus) {
        if self.failed.is_some() {
            return;
        }
        // A flush error only says that another request failed first.
        if self.fault.as_ref().is_some_and(|d| d.status != WcStatus::WrFlushErr || status == WcStatus::WrFlushErr) {
            return;
        }
        let what = wr.kind.what();
        let why = self.qps.why(wr.kind, usize::from(wr.qp)).map_or(String::new(), |why| format!(": {why}"));
        self.fault = Some(PendingFault { status, text: format!("{what} ended with {status}{why}"), since: 0 });
    }

    #[cold]
    fn resolve(&mut self, fault: PendingFault, now: u64) {
        // Asked for, as what is flushed does not tell.
        if let Some(errno) = self.qps.lack() {
            return self.fail(Failure::from_error(&Error::system(fault.text, std::io::Error::from_raw_os_error(errno))));
        }
        if matches!(fault.status, WcStatus::LocLenErr | WcStatus::LocProtErr | WcStatus::LocQpOpErr) {
            return self.fail(Failure::internal(fault.text));
        }
        let since = if fault.since == 0 { now } else { fault.since };
        let text = match self.liveness.explain() {
            Some(why) => format!("{why} ({})", fault.text),
            // Memory of a dying process goes before the process, so its NIC may refuse an access first.
            None if now.saturating_sub(since) < EXPLAIN_NS => {
                self.fault = Some(PendingFault { since, ..fault });
                return;
            }
            None => fault.text,
        };
        self.fail(Failure::remote(text));
    }

    /// Fails the link: requests that are not done never will be. The peer learns of it by its queue pairs.
    #[cold]
    pub fn fail(&mut self, failure: Failure) {
        if self.failed.is_some() {
            return;
        }
        let now = clock::now();
        let (outstanding, oldest) = self.requests.unfinished();
        let oldest = oldest.map_or(String::new(), |sequence| {
            let age = self.stall.age(now, sequence).map_or(String::new(), |age_ns| format!(", for {} so far", Seconds(age_ns)));
            format!(", the oldest is number {sequence}{age}")
        });
        let gone = if self.liveness.ended() { format!("; cause: {}", WaitCause::PeerGone.words()) } else { String::new() };
        let failure = failure.in_context(&self.name, &format!("{outstanding} request(s) outstanding{oldest}{gone}"));
        log_warn!(log::NET, "{failure}");
        self.stats.add(CommCounter::Errors, outstanding.max(1) as u64);
        if failure.is_remote() {
            self.stats.sample(WaitCause::PeerGone, now);
        }
        self.failed = Some(failure);
        self.fault = None;
        self.qps.abort();
        self.liveness.hang_up();
    }

    /// The peer broke the protocol.
    #[cold]
    pub fn protocol_error(&mut self, what: fmt::Arguments<'_>) {
        self.fail(Failure::remote(format!("the peer sent {what}")));
    }

    /// The fabric refused a post for which there was room. An end of a duplex link fails once its queues are empty: other queue pairs may have what the
    /// peer sent before it went.
    #[cold]
    pub fn post_failed(&mut self, kind: WrKind, qp: usize, error: PostError) {
        let what = kind.what();
        let why = self.qps.why(kind, qp).map_or(String::new(), |why| format!(" ({why})"));
        let text = format!("cannot post {what}: {error}{why}");
        if let (PostError::State(_), Side::Both, None) = (&error, self.side, &self.failed) {
            self.fault.get_or_insert(PendingFault { status: WcStatus::WrFlushErr, text, since: 0 });
            return;
        }
        let failure = match error {
            PostError::State(_) => Failure::remote(self.liveness.explain().map_or(text.clone(), |gone| format!("{gone} ({text})"))),
            _ => Failure::internal(text),
        };
        self.fail(failure);
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

/// An age, to a tenth.
struct Seconds(u64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} s", self.0 / 1_000_000_000, self.0 / 100_000_000 % 10)
    }
}

/// A size beyond what a message may have.
#[cold]
pub fn too_long(what: &str, len: usize) -> Error {
    Error::usage(format!("{what}: {len} bytes; a message has at most {} (maxP2pBytes)", MAX_MESSAGE))
}
