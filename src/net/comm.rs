//! What the two ends of a comm have in common: polling, failing, and knowing why one waits. Used by the thread that drives the comm.

use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::base::stats::{CommCounter, CommStats, WaitCause};
use crate::fabric::{Completion, WcStatus};

use super::handshake::Established;
use super::liveness::{Failure, Liveness, Peer, Verdict, cause};
use super::rails::{BATCH, NO_COMPLETION, Rails, WrId, WrKind};
use super::request::{RequestId, RequestTable, Sizes};

/// Batches of completions taken from one rail per call: enough to empty it under any load that calls often, and an end to every call.
const BATCHES: usize = 4;

/// The common part. Fields drop in order: queue pairs, regions, then the control connection.
pub struct Core {
    /// Queue pairs.
    pub rails: Rails,
    /// Requests.
    pub requests: RequestTable,
    /// Counters.
    pub stats: CommStats,
    liveness: Liveness,
    /// For messages: "send comm on eth0 to host pid 5 (eth1 at 10.0.0.2)".
    name: String,
    batch: [Completion; BATCH],
    /// Evidence that the comm is lost. What had arrived before it is still completed: the comm fails once the queues are empty.
    dying: Option<Dying>,
    failed: Option<Failure>,
}

struct Dying {
    status: WcStatus,
    text: String,
}

impl Core {
    /// From a handshake; `what` is "send comm on eth0 to" or the like. Also gives the memory that the peer writes to.
    pub fn new<M>(established: Established<M>, what: String) -> (Core, M) {
        let Established { rails, memory, peer, liveness, stats } = established;
        let Peer { label, .. } = peer;
        let core = Core {
            rails,
            requests: RequestTable::new(),
            stats,
            liveness,
            name: format!("{what} {label}"),
            batch: [NO_COMPLETION; BATCH],
            dying: None,
            failed: None,
        };
        (core, memory)
    }

    /// Errors: the comm has failed.
    #[inline]
    pub fn check(&self) -> Result<()> {
        match &self.failed {
            None => Ok(()),
            Some(failure) => failure.result(),
        }
    }

    /// Moves things along and hands each good completion to `on`. A call that finds nothing is a wait for `waits_for`.
    #[inline]
    pub fn progress(&mut self, waits_for: WaitCause, mut on: impl FnMut(&mut Core, &WrId, &Completion)) {
        let mut found = 0;
        for rail in 0..self.rails.rails() {
            for _ in 0..BATCHES {
                let n = self.rails.poll(rail, &mut self.batch);
                for i in 0..n {
                    let Some(completion) = self.batch.get(i).copied() else { break };
                    match WrId::decode(completion.wr_id) {
                        Some(wr) if completion.status == WcStatus::Success => {
                            self.rails.retire(&wr);
                            on(self, &wr, &completion);
                        }
                        Some(wr) => self.fault(&wr, completion.status),
                        None => self.fail(Failure::internal(format!("unknown work request {:#x} completed", completion.wr_id))),
                    }
                }
                found += n;
                if n < BATCH {
                    break;
                }
            }
        }
        if found > 0 {
            self.stats.clear_wait();
            self.liveness.busy();
        } else {
            self.idle(waits_for);
        }
    }

    fn idle(&mut self, waits_for: WaitCause) {
        if self.failed.is_some() {
            return;
        }
        if let Some(dying) = self.dying.take() {
            return self.die(dying);
        }
        self.stats.wait(cause(waits_for, self.liveness.stopped()));
        match self.liveness.idle() {
            Verdict::Alive => {}
            Verdict::LookedAt => {
                if let Some(why) = self.rails.broken() {
                    let text = self.liveness.explain().map_or(why.clone(), |known| format!("{known} ({why})"));
                    return self.fail(Failure::remote(text));
                }
                if let Some(pid) = self.rails.peer_pid().and_then(|pid| u32::try_from(pid).ok()) {
                    self.liveness.set_pid(pid);
                }
            }
            Verdict::Gone(why) => self.fail(Failure::remote(why)),
            Verdict::Nonsense(why) => self.fail(Failure::remote(format!("the peer sent {why}"))),
        }
    }

    /// A completion that failed.
    #[cold]
    fn fault(&mut self, wr: &WrId, status: WcStatus) {
        if self.failed.is_some() {
            return;
        }
        // "Flushed" only says that something else went wrong first.
        if self.dying.as_ref().is_some_and(|d| d.status != WcStatus::WrFlushErr || status == WcStatus::WrFlushErr) {
            return;
        }
        let what = match wr.kind {
            WrKind::Data => "the WRITE of a message",
            WrKind::Cts => "the WRITE that announces a receive",
            WrKind::Recv => "a receive",
            WrKind::Flush => "the READ of a flush",
        };
        let why = self.rails.why(usize::from(wr.lane)).map_or(String::new(), |why| format!(": {why}"));
        self.dying = Some(Dying { status, text: format!("{what} ended with {status}{why}") });
    }

    #[cold]
    fn die(&mut self, dying: Dying) {
        let ours = matches!(dying.status, WcStatus::LocLenErr | WcStatus::LocProtErr | WcStatus::LocQpOpErr);
        if ours {
            return self.fail(Failure::internal(dying.text));
        }
        let text = match self.liveness.explain() {
            Some(why) => format!("{why} ({})", dying.text),
            None => dying.text,
        };
        self.fail(Failure::remote(text));
    }

    /// Fails the comm: the requests that are not done never will be. The peer learns through its queue pairs.
    #[cold]
    pub fn fail(&mut self, failure: Failure) {
        if self.failed.is_some() {
            return;
        }
        let (outstanding, oldest) = self.requests.unfinished();
        let oldest = oldest.map_or(String::new(), |sequence| format!(", the oldest is number {sequence}"));
        let failure = failure.in_context(&self.name, &format!("{outstanding} request(s) outstanding{oldest}"));
        log_warn!(log::NET, "{failure}");
        self.stats.add(CommCounter::Errors, outstanding.max(1) as u64);
        if failure.is_remote() {
            // The page shows a cause when the clock is sampled, and that is every 64th time.
            (0..64).for_each(|_| self.stats.wait(WaitCause::PeerGone));
        }
        self.failed = Some(failure);
        self.dying = None;
        self.rails.abort();
        self.liveness.hang_up();
    }

    /// The peer broke the protocol.
    #[cold]
    pub fn nonsense(&mut self, what: std::fmt::Arguments<'_>) {
        self.fail(Failure::remote(format!("the peer sent {what}")));
    }

    /// A post that must have been possible was not.
    #[cold]
    pub fn post_failed(&mut self, lane: usize, what: &str, error: crate::fabric::PostError) {
        let why = self.rails.why(lane).map_or(String::new(), |why| format!(" ({why})"));
        self.fail(match error {
            crate::fabric::PostError::State(_) => Failure::remote(format!("cannot post {what}: {error}{why}")),
            _ => Failure::internal(format!("cannot post {what}: {error}{why}")),
        });
    }

    /// The sizes of a request that is done, which frees it.
    ///
    /// Errors: a request that is not outstanding.
    #[inline]
    pub fn finish(&mut self, id: RequestId) -> Result<Option<Sizes>> {
        let Some(sizes) = self.requests.finish(id)? else { return Ok(None) };
        self.stats.add(CommCounter::Completions, 1);
        self.stats.add(CommCounter::Bytes, sizes.bytes.iter().take(sizes.n).sum::<usize>() as u64);
        self.stats.set_outstanding(self.requests.used() as u32);
        Ok(Some(sizes))
    }

    /// Counts a request given out.
    #[inline]
    pub fn posted(&mut self) {
        self.stats.add(CommCounter::Ops, 1);
        self.stats.set_outstanding(self.requests.used() as u32);
    }

    /// Tells the peer that the comm closes.
    pub fn close(&mut self) {
        if self.failed.is_none() {
            self.liveness.say_bye();
        }
    }
}

#[cfg(test)]
impl Core {
    /// Puts bytes on the control connection.
    pub fn say_for_test(&mut self, bytes: &[u8]) {
        self.liveness.say_for_test(bytes);
    }
}

/// A size beyond what a message may have.
#[cold]
pub fn too_long(what: &str, len: usize) -> Error {
    Error::usage(format!("{what}: {len} bytes; a message has at most {} (maxP2pBytes)", super::MAX_MESSAGE))
}
