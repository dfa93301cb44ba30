//! What a link says and does about a wait that lasts: it probes the peer, and warns of a stall with its cause.

use std::fmt;

use super::Link;
use crate::base::clock;
use crate::base::log::{self, log_info, log_warn};
use crate::base::stats::{CommCounter, WaitCause};
use crate::fabric::{Opcode, Payload};
use crate::link::queue_pairs::{Side, Wr};
use crate::link::stall::{Step, Subject, Waiting};
use crate::link::wr_id::{RequestId, WrKind};

/// How often an end asks whether its peer still answers, while somebody waits, if nothing else tells.
pub(super) const PROBE_NS: u64 = 1_000_000_000;

impl Link {
    /// A fabric reports that it gave up on a request only by the completion of a signaled one, and clear-to-sends are signaled rarely: so one that
    /// never arrives would be waited for without end. After a while a signaled WRITE of nothing is posted after them.
    ///
    /// An end of a duplex link may have no control connection that would end with its peer, so it asks regularly, as does one that has lost it.
    pub(super) fn probe_unsignaled(&mut self, now: u64) {
        let asks = self.asks();
        let most = if asks { PROBE_NS } else { self.unsignaled_max_ns };
        if !asks && !self.qps.has_unsignaled(self.qps.ordered()) {
            self.unsignaled_since = 0;
        } else if self.unsignaled_since == 0 {
            self.unsignaled_since = now.max(1);
        } else if now.saturating_sub(self.unsignaled_since) >= most {
            self.unsignaled_since = 0;
            let id = self.stall.last_probe_id();
            self.probe(id);
        }
    }

    /// Whether only the peer's queue pairs tell that it is there.
    fn asks(&self) -> bool {
        self.side == Side::Both || self.liveness.has_lost_its_connection()
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
                    "stalled: {what} of {name}: for {age} so far; cause: {}{detail}; {used} request(s) outstanding{}",
                    cause.words(),
                    self.rails_down(now)
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
    pub(super) fn probe(&mut self, id: RequestId) {
        if (self.side == Side::Send && !self.asks()) || self.qps.room(self.qps.ordered()) == 0 || !self.can_post() {
            return;
        }
        // A device that gives up on a peer which has not connected yet would take a late peer for a lost one.
        if !self.confirmed() && !self.qps.keeps_early_requests {
            return;
        }
        let nothing = Wr { opcode: Opcode::Write, payload: Payload::Inline(&[]), remote: self.qps.remote(self.qps.ordered(), 0), imm: 0 };
        // A queue pair that takes nothing has failed, which the next poll says in its own words.
        let _ = self.qps.post_send(self.qps.ordered(), [nothing], WrKind::Probe, id, true);
    }
}

/// An age, to a tenth.
pub(super) struct Seconds(pub u64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{} s", self.0 / 1_000_000_000, self.0 / 100_000_000 % 10)
    }
}
