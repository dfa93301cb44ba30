//! What becomes of a queue pair's requests: its completions in the fabric's words, the first failure in a user's, and what no completion tells.
//! Called by the completion queue, on the thread that drives it.

use ibverbs_sys::*;

use super::{NUMBER, QueuePair, RECEIVE};
use crate::base::log::{self, log_info};
use crate::base::stats::RailCounter;
use crate::fabric::types::*;
use crate::fabric::verbs::{events, status};

/// Nanoseconds between questions to the device whether a queue pair with nothing outstanding is still well.
const ASK_NS: u64 = 250_000_000;

impl QueuePair {
    /// The completion behind the device's; `None` if the caller did not ask for it.
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
                Completion { status: self.failed("a receive", 0, wc, false), opcode: WcOpcode::Recv, byte_len: 0, imm: None, ..completion }
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
        let status = self.failed(verb(sent.opcode), sent.len, wc, true);
        Some(Completion { wr_id: sent.wr_id, status, opcode: status::sent(sent.opcode), byte_len: 0, imm: None, qp_num: self.local.qpn })
    }

    /// A completion that is none of success: what it reports. The first that is more than a flush is told.
    #[cold]
    fn failed(&mut self, what: &str, len: u32, wc: &ibv_wc, is_send: bool) -> WcStatus {
        let (raw, vendor) = wc.error().unwrap_or((ibv_wc_status::IBV_WC_GENERAL_ERR, 0));
        let status = status::status(raw);
        if status == WcStatus::WrFlushErr {
            if self.state != QpState::Error {
                self.fail(format!("{}: the device took the queue pair to ERROR", self.path()));
            }
            // What we gave up on is reported once as what it is.
            if is_send && std::mem::take(&mut self.expired) {
                return WcStatus::RetryExcErr;
            }
            return status;
        }
        let (name, hint) = (status::name(raw), status::hint(status));
        let text = format!("{}: {what} of {len} bytes failed: {name} ({raw}), vendor_err {vendor:#x}: {hint}", self.path());
        // Whose work it is says who the peer is, and warns.
        log_info!(log::NET, "{text}");
        self.fail(text);
        status
    }

    /// To ERROR in our books; the first reason stays.
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
        self.device.break_off();
    }

    /// Why the queue pair is in ERROR.
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref().or_else(|| self.fate.event().map(events::epitaph))
    }

    /// A look now and then: work whose report takes longer than RAILHEAD_FABRIC_TIMEOUT_S is given up, as some devices never do; and a device that
    /// took the queue pair to ERROR while nothing was outstanding is asked. And what the device reported meanwhile is counted.
    #[cold]
    pub(in crate::fabric::verbs) fn look(&mut self, now: u64) {
        let events = self.fate.count();
        self.stats.add(RailCounter::NicEvents, u64::from(events.wrapping_sub(std::mem::replace(&mut self.events, events))));
        if self.state() != QpState::Rts {
            return;
        }
        if self.sends.idle() && self.recvs.idle() && now >= self.ask_at {
            self.ask_at = now + ASK_NS;
            self.ask();
        }
        // What was posted since the device was last asked for a report may be done, and nobody knows.
        let done = self.sends.done();
        if done >= self.sends.posted() - u64::from(self.quiet) {
            (self.seen, self.late) = ((done, 0), false);
            return;
        }
        if self.seen.1 == 0 || self.seen.0 != done {
            (self.seen, self.late) = ((done, now.max(1)), false);
            return;
        }
        let patience = u64::from(self.shared.port.config.fabric_timeout_s);
        // Twice: after a pause of this process, the report may lie in the queue that is polled after the first look.
        if now.saturating_sub(self.seen.1) >= patience * 1_000_000_000 && std::mem::replace(&mut self.late, true) {
            let n = self.sends.posted() - self.sends.done();
            let hint = status::hint(WcStatus::RetryExcErr);
            let text = format!("{}: {n} requests without completion for {patience} s (RAILHEAD_FABRIC_TIMEOUT_S): {hint}", self.path());
            log_info!(log::NET, "{text}");
            self.expired = true;
            self.fail(text);
            self.device.break_off();
        }
    }

    fn ask(&mut self) {
        if self.device.is_broken() {
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
