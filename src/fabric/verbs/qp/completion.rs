//! How a queue pair's requests end: turns the device's completions into the fabric's, words the first failure for a user, and checks now and then
//! for failures that no completion reports. Called by the completion queue, on the thread that drives it.

use ibverbs_sys::*;

use super::{NUMBER, QueuePair, RECEIVE};
use crate::base::log::{self, log_info};
use crate::base::stats::RailCounter;
use crate::fabric::types::*;
use crate::fabric::verbs::{events, status};

/// Nanoseconds between two queries of the device's state of a queue pair that has nothing outstanding.
const QUERY_NS: u64 = 250_000_000;

impl QueuePair {
    /// The completion of the device's `wc`; `None` if the request was not signaled by the caller.
    #[inline]
    pub(in crate::fabric::verbs) fn complete(&mut self, wc: &ibv_wc) -> Option<Completion> {
        let number = wc.wr_id() & NUMBER;
        if wc.wr_id() & RECEIVE != 0 {
            let wr_id = self.recvs.take(number)?;
            let (opcode, byte_len, imm) = (status::received(wc.opcode()), wc.len() as u32, wc.imm_data().map(u32::from_be));
            let completion = Completion { wr_id, status: WcStatus::Success, opcode, byte_len, imm, qp_num: self.local.qpn };
            return Some(if wc.is_valid() {
                self.stats.add(RailCounter::RxNic, u64::from(byte_len));
                completion
            } else {
                Completion {
                    status: self.on_error("a receive", 0, wc, false),
                    opcode: WcOpcode::Recv,
                    byte_len: 0,
                    imm: None,
                    ..completion
                }
            });
        }
        let sent = self.sends.take(number)?;
        if wc.is_valid() {
            let byte_len = if sent.opcode == Opcode::Read { sent.len } else { 0 };
            let completion = Completion {
                wr_id: sent.wr_id,
                status: WcStatus::Success,
                opcode: status::sent(sent.opcode),
                byte_len,
                imm: None,
                qp_num: self.local.qpn,
            };
            return sent.signaled.then_some(completion);
        }
        if self.last == Some(number) {
            return None;
        }
        let status = self.on_error(verb(sent.opcode), sent.len, wc, true);
        Some(Completion { wr_id: sent.wr_id, status, opcode: status::sent(sent.opcode), byte_len: 0, imm: None, qp_num: self.local.qpn })
    }

    /// The status of a failed completion. The first one that is more than a flush goes to the log.
    #[cold]
    fn on_error(&mut self, what: &str, len: u32, wc: &ibv_wc, is_send: bool) -> WcStatus {
        let (raw, vendor) = wc.error().unwrap_or((ibv_wc_status::IBV_WC_GENERAL_ERR, 0));
        let status = status::status(raw);
        if status == WcStatus::WrFlushErr {
            if self.state != QpState::Error {
                self.fail(format!("{}: the device took the queue pair to ERROR", self.path()));
            }
            // Requests that this side failed as overdue complete as flushed; the first one gets the real status.
            if is_send && std::mem::take(&mut self.expired) {
                return WcStatus::RetryExcErr;
            }
            return status;
        }
        let (name, hint) = (status::name(raw), status::hint(status));
        let text = format!("{}: {what} of {len} bytes failed: {name} ({raw}), vendor_err {vendor:#x}: {hint}", self.path());
        // The caller warns, as it knows the peer.
        log_info!(log::NET, "{text}");
        self.fail(text);
        status
    }

    /// To ERROR on this side; the first reason stays.
    #[cold]
    pub(super) fn fail(&mut self, why: String) {
        if self.state == QpState::Error && self.error.is_some() {
            return;
        }
        self.state = QpState::Error;
        self.stats.add(RailCounter::Errors, 1);
        self.error = Some(why);
    }

    /// Takes the queue pair to ERROR.
    #[cold]
    pub fn set_error(&mut self) {
        if self.state() == QpState::Error && self.error.is_some() {
            return;
        }
        self.fail(format!("{}: given up by this side", self.path()));
        self.device.to_error();
    }

    /// Why the queue pair is in ERROR.
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref().or_else(|| self.async_status.fatal().map(events::describe))
    }

    /// Called now and then. Counts asynchronous events. With nothing outstanding, asks whether the device took the queue pair to ERROR. Fails it
    /// if a signaled request has not completed for RAILHEAD_FABRIC_TIMEOUT_S, as some devices retry for ever.
    #[cold]
    pub(in crate::fabric::verbs) fn check(&mut self, now: u64) {
        let events = self.async_status.count();
        self.stats.add(RailCounter::NicEvents, u64::from(events.wrapping_sub(std::mem::replace(&mut self.events, events))));
        if self.state() != QpState::Rts {
            return;
        }
        if self.sends.idle() && self.recvs.idle() && now >= self.query_at {
            self.query_at = now + QUERY_NS;
            self.query_state();
        }
        // Requests posted since the last signaled one may be done without a completion.
        let done = self.sends.done();
        if done >= self.sends.posted() - u64::from(self.unsignaled) {
            (self.progress_seen, self.overdue) = ((done, 0), false);
            return;
        }
        if self.progress_seen.1 == 0 || self.progress_seen.0 != done {
            (self.progress_seen, self.overdue) = ((done, now.max(1)), false);
            return;
        }
        let timeout_s = u64::from(self.shared.port.config.fabric_timeout_s);
        // Found twice: after a pause of this process, the completion may be in the queue, which is polled between two checks.
        if now.saturating_sub(self.progress_seen.1) >= timeout_s * 1_000_000_000 && std::mem::replace(&mut self.overdue, true) {
            let n = self.sends.posted() - self.sends.done();
            let hint = status::hint(WcStatus::RetryExcErr);
            let text = format!("{}: {n} requests without completion for {timeout_s} s (RAILHEAD_FABRIC_TIMEOUT_S): {hint}", self.path());
            log_info!(log::NET, "{text}");
            self.expired = true;
            self.fail(text);
            self.device.to_error();
        }
    }

    fn query_state(&mut self) {
        if self.device.is_error() {
            self.fail(format!(
                "{}: the device took the queue pair to ERROR: the peer did what it may not, or the device failed",
                self.path()
            ));
        }
    }

    /// Both ends, for messages.
    pub(super) fn path(&self) -> String {
        let (label, gid, qpn) = (&self.shared.port.label, self.local.gid, self.local.qpn);
        match self.remote {
            Some(remote) => format!("{label} gid {gid} qp {qpn} -> gid {} lid {} qp {}", remote.gid, remote.lid, remote.qpn),
            None => format!("{label} gid {gid} qp {qpn}"),
        }
    }
}

fn verb(opcode: Opcode) -> &'static str {
    match opcode {
        Opcode::Send => "a SEND",
        Opcode::SendWithImm => "a SEND_WITH_IMM",
        Opcode::Write => "a WRITE",
        Opcode::WriteWithImm => "a WRITE_WITH_IMM",
        Opcode::Read => "a READ",
    }
}
