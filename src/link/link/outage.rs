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

/// Such a time, and those before it since something has moved: rails that come back, move nothing and fail again are no end of it.
pub(super) struct Outage {
    /// Nanoseconds in which no rail was live, until the last look.
    lasted: u64,
    looked_at: u64,
    /// A rail is live again.
    is_over: bool,
    /// How the last rail failed.
    status: WcStatus,
    text: String,
}

impl Outage {
    /// Counts the time since the last look.
    fn look(&mut self, now: u64) {
        self.lasted += now.saturating_sub(self.looked_at).min(COUNTED_NS);
        self.looked_at = now;
    }
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
        let before = self.outage.take().filter(|_| !failover.has_moved());
        for it in &mut failover.rails {
            it.pause = if before.is_none() { FIRST_PAUSE_NS } else { it.pause.min(OUTAGE_PAUSE_NS) };
            it.retry_at = it.retry_at.min(now + it.pause);
        }
        let lasted = before.map_or(0, |outage| outage.lasted);
        self.outage = Some(Outage { lasted, looked_at: now, is_over: false, status, text });
    }

    /// A rail is live.
    pub(super) fn end_outage(&mut self, failover: &mut Failover, now: u64) {
        let Some(outage) = self.outage.as_mut().filter(|outage| !outage.is_over) else { return };
        outage.look(now);
        outage.is_over = true;
        failover.has_landed = false;
        self.fault.take_if(|fault| fault.of_outage);
        // The control connection may be slow, as it need not go where this rail does.
        failover.tell_again(CONTROL);
    }

    /// Something has landed over a rail that has failed since, as the peer says: this is no longer the outage of before.
    pub(super) fn has_landed(&mut self, failover: &mut Failover) {
        if let Some(outage) = &mut self.outage {
            outage.lasted = 0;
            failover.rails.iter_mut().for_each(|it| it.pause = FIRST_PAUSE_NS);
        }
    }

    /// Fails the link if it is not to wait on.
    #[cold]
    pub(super) fn check_outage(&mut self, failover: &mut Failover, now: u64) {
        let is_lost = self.side != Side::Both && self.liveness.has_lost_its_connection();
        if is_lost && failover.tell_again(CONTROL) {
            self.rails_active = true;
        }
        self.outage.take_if(|outage| outage.is_over && failover.has_moved());
        let Some(outage) = self.outage.as_mut().filter(|outage| !outage.is_over) else { return };
        outage.look(now);
        let (status, text) = (outage.status, outage.text.clone());
        let (status, text) = if self.rail_timeout_ns == 0 || !self.liveness.can_talk() {
            // Of those that are none, one may become live, and then the peer can be talked to.
            if !(0..failover.rails.len()).all(|rail| failover.is_down(rail)) {
                return;
            }
            match is_lost {
                true => (WcStatus::RetryExcErr, text + "; no rail works, and the control connection is lost"),
                false => (status, text),
            }
        } else if self.liveness.explain().is_some() {
            (WcStatus::RetryExcErr, text)
        } else if outage.lasted >= self.rail_timeout_ns {
            let most = self.rail_timeout_ns / 1_000_000_000;
            (WcStatus::RetryExcErr, format!("{text}; no rail has worked for {most} s (RAILHEAD_RAIL_TIMEOUT_S)"))
        } else {
            return;
        };
        self.fault.get_or_insert(PendingFault { of_outage: true, ..PendingFault::new(status, text) });
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
