//! A time in which no rail of a link is live: its ends talk about their rails over their control connection, if they have one, and wait for as long as that
//! tells of no end of the peer's.

use super::Link;
use super::failing::PendingFault;
use crate::fabric::WcStatus;
use crate::link::failover::{CONTROL, FIRST_PAUSE_NS, Failover, Said};
use crate::link::queue_pairs::Side;

/// The longest pause before a rail is taken up again meanwhile.
pub(super) const OUTAGE_PAUSE_NS: u64 = 1_000_000_000;

/// Nobody tries a rail while nobody looks: of the time from one look to the next, no more counts.
const COUNTED_NS: u64 = 1_000_000_000;

/// Such a time, until something has moved after it: rails that come back, move nothing and fail again are no end of it.
pub(super) struct Outage {
    since: u64,
    looked_at: u64,
    /// A rail is live again.
    is_over: bool,
    /// The link's fault is of this outage.
    gave_up: bool,
    /// How the last rail failed.
    status: WcStatus,
    text: String,
}

impl Link {
    /// Whether no rail is live.
    pub(super) fn is_in_outage(&self) -> bool {
        self.outage.as_ref().is_some_and(|outage| !outage.is_over)
    }

    /// A rail has failed, which may have been the last one.
    pub(super) fn begin_outage(&mut self, failover: &mut Failover, now: u64, status: WcStatus, text: String) {
        if self.is_in_outage() || (0..failover.rails.len()).any(|rail| failover.is_live(rail)) {
            return;
        }
        let since = self.outage.as_ref().filter(|_| !failover.has_moved()).map(|outage| outage.since);
        if since.is_none() {
            for it in &mut failover.rails {
                (it.retry_at, it.pause) = (it.retry_at.min(now + FIRST_PAUSE_NS), FIRST_PAUSE_NS);
            }
        }
        self.outage = Some(Outage { since: since.unwrap_or(now), looked_at: now, is_over: false, gave_up: false, status, text });
    }

    /// A rail is live.
    pub(super) fn end_outage(&mut self, failover: &mut Failover) {
        let Some(outage) = self.outage.as_mut().filter(|outage| !outage.is_over) else { return };
        outage.is_over = true;
        failover.has_landed = false;
        if std::mem::take(&mut outage.gave_up) {
            self.fault = None;
        }
        // The control connection may be slow, as it need not go where this rail does.
        failover.tell_again(CONTROL);
    }

    /// Fails the link if it is not to wait on.
    #[cold]
    pub(super) fn check_outage(&mut self, failover: &mut Failover, now: u64) {
        let is_lost = self.side != Side::Both && self.liveness.has_lost_its_connection();
        if is_lost && failover.tell_again(CONTROL) {
            self.rails_active = true;
        }
        let Some(outage) = self.outage.as_mut().filter(|outage| !outage.is_over) else { return };
        let uncounted = now.saturating_sub(outage.looked_at).saturating_sub(COUNTED_NS);
        (outage.looked_at, outage.since) = (now, outage.since + uncounted);
        let (status, text, lasted) = (outage.status, outage.text.clone(), now.saturating_sub(outage.since));
        let fault = if self.rail_timeout_ns == 0 || !self.liveness.can_talk() {
            // Of those that are none, one may become live, and then the peer can be talked to.
            if !(0..failover.rails.len()).all(|rail| failover.is_down(rail)) {
                return;
            }
            let lost = if is_lost { "; no rail works, and the control connection is lost" } else { "" };
            PendingFault { status, text: text + lost, since: 0 }
        } else if self.liveness.explain().is_some() {
            PendingFault { status: WcStatus::RetryExcErr, text, since: 0 }
        } else if lasted >= self.rail_timeout_ns {
            let most = self.rail_timeout_ns / 1_000_000_000;
            let text = format!("{text}; no rail has worked for {most} s (RAILHEAD_RAIL_TIMEOUT_S)");
            PendingFault { status: WcStatus::RetryExcErr, text, since: 0 }
        } else {
            return;
        };
        if self.fault.is_none() {
            self.fault = Some(fault);
            if let Some(outage) = &mut self.outage {
                outage.gave_up = true;
            }
        }
    }

    /// The last that the peer has said of a rail.
    pub(super) fn said(&self, failover: &Failover, rail: usize) -> Said {
        let (cell, control) = (failover.cells.said(failover.rails.len(), rail), self.liveness.said(rail));
        if control.word > cell.word { control } else { cell }
    }

    /// Reads what the peer says on the control connection. False: the link has failed.
    pub(super) fn hear(&mut self, now: u64) -> bool {
        match self.liveness.hear(now) {
            Ok(()) => true,
            Err(what) => {
                self.protocol_error(format_args!("{what}"));
                false
            }
        }
    }
}
