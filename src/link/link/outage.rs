//! A time in which no rail of a link is live: its ends talk about their rails over their control connection, if they have one, and wait for as long as that
//! tells of no end of the peer's.

use super::Link;
use super::failing::PendingFault;
use crate::fabric::WcStatus;
use crate::link::failover::{CONTROL, FIRST_PAUSE_NS, Failover, Said, Word};

/// The longest pause before a rail is taken up again meanwhile.
pub(super) const OUTAGE_PAUSE_NS: u64 = 1_000_000_000;

/// Since when, and how the last rail failed.
pub(super) struct Outage {
    since: u64,
    status: WcStatus,
    text: String,
}

impl Link {
    /// A rail has failed: whether that was the last one.
    pub(super) fn begin_outage(&mut self, failover: &mut Failover, now: u64, status: WcStatus, text: String) {
        if self.outage.is_some() || (0..failover.rails.len()).any(|rail| failover.is_live(rail)) {
            return;
        }
        self.outage = Some(Outage { since: now, status, text });
        for it in &mut failover.rails {
            (it.retry_at, it.pause) = (it.retry_at.min(now + FIRST_PAUSE_NS), FIRST_PAUSE_NS);
        }
    }

    /// Whether the link is to wait on.
    #[cold]
    pub(super) fn check_outage(&mut self, failover: &mut Failover, now: u64) {
        if self.liveness.has_lost_its_connection() {
            // What was told there may be lost.
            failover.rails.iter_mut().filter(|it| it.told.1 == CONTROL).for_each(|it| it.told.0 = Word::up(0));
        }
        let Some(outage) = &self.outage else { return };
        let (waits, over) =
            (self.rail_timeout_ns > 0 && self.liveness.can_talk(), now.saturating_sub(outage.since) >= self.rail_timeout_ns);
        let text = if !waits {
            // Of those that are none, one may become live, and then the peer can be talked to.
            if !(0..failover.rails.len()).all(|rail| failover.is_down(rail)) {
                return;
            }
            outage.text.clone()
        } else if self.liveness.explain().is_some() {
            outage.text.clone()
        } else if over {
            format!("{}; no rail has worked for {} s (RAILHEAD_RAIL_TIMEOUT_S)", outage.text, self.rail_timeout_ns / 1_000_000_000)
        } else {
            return;
        };
        self.fault.get_or_insert(PendingFault { status: outage.status, text, since: 0 });
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
