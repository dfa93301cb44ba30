//! How a link fails: evidence first, what had arrived is completed still, then the reason.

use std::fmt;

use super::Link;
use super::rails::is_of_the_rail;
use super::waiting::Seconds;
use crate::base::clock;
use crate::base::error::Error;
use crate::base::log::{self, log_warn};
use crate::base::stats::{CommCounter, WaitCause};
use crate::fabric::{PostError, WcStatus};
use crate::link::failure::Failure;
use crate::link::queue_pairs::Side;
use crate::link::wr_id::{WrId, WrKind};

/// Nanoseconds that a link whose peer is lost waits for the reason: the system closes the connections of a dying process one after the other.
pub(super) const EXPLAIN_NS: u64 = 50_000_000;

/// Why a link is about to fail.
pub(super) struct PendingFault {
    pub(super) status: WcStatus,
    pub(super) text: String,
    /// When the reason was first looked for; 0 before.
    pub(super) since: u64,
    /// Only that no rail works: nothing, once one does.
    pub(super) of_outage: bool,
}

impl PendingFault {
    /// Whose reason was not looked for.
    pub(super) fn new(status: WcStatus, text: String) -> PendingFault {
        PendingFault { status, text, since: 0, of_outage: false }
    }
}

impl Link {
    #[cold]
    #[inline(never)]
    pub(super) fn unknown(&mut self, wr_id: u64) {
        self.fail(Failure::internal(format!("unknown work request {wr_id:#x} completed")));
    }

    /// A completion that failed.
    #[cold]
    #[inline(never)]
    pub(super) fn on_failed(&mut self, wr: &WrId, status: WcStatus) {
        if self.failed.is_some() {
            return;
        }
        let what = wr.kind.what();
        let why = self.qps.why(wr.kind, usize::from(wr.qp)).map_or(String::new(), |why| format!(": {why}"));
        if self.goes_on() && wr.kind != WrKind::Flush && is_of_the_rail(status) {
            let rail = self.qps.rail_of(usize::from(wr.qp));
            return self.rail_failed(rail, status, format!("{what} ended with {status}{why}"));
        }
        // A flush error only says that another request failed first.
        if self.fault.as_ref().is_some_and(|d| d.status != WcStatus::WrFlushErr || status == WcStatus::WrFlushErr) {
            return;
        }
        self.fault = Some(PendingFault::new(status, format!("{what} ended with {status}{why}")));
    }

    /// Fails by what was found, or waits a little for the reason.
    #[cold]
    pub(super) fn resolve(&mut self, fault: PendingFault, now: u64) {
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
            self.fault.get_or_insert(PendingFault::new(WcStatus::WrFlushErr, text));
            return;
        }
        let failure = match error {
            PostError::State(_) => Failure::remote(self.liveness.explain().map_or(text.clone(), |gone| format!("{gone} ({text})"))),
            _ => Failure::internal(text),
        };
        self.fail(failure);
    }
}
