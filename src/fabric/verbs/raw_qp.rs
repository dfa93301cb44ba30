//! The device's queue pair (`ibv_qp`): creates it, modifies its state, queries it, destroys it. Only this file knows its attributes, and which of
//! them belong to which state. Owned by a queue pair, used by the thread that drives it; nothing here is called while messages flow.

use std::io;
use std::sync::Arc;

use ibverbs_sys::*;

use super::Shared;
use super::endpoint::{Address, Enhancements};
use super::library::{check, made};
use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::fabric::types::QpCaps;

/// READs answered at once at most; nothing here uses more, even if the device can.
pub const MAX_READS: i32 = 16;
/// Hops of a packet, and its time to live.
const HOP_LIMIT: u8 = 255;
/// NCCL_IB_MQP_RETRY_CNT and NCCL_IB_MQP_RETRY_SLEEP_MSEC of NCCL 2.28: resolving the peer's address may take a while.
const MODIFY_TRIES: u32 = 34;
const MODIFY_PAUSE_MS: u64 = 100;

/// A queue pair of the device, destroyed when dropped.
pub struct RawQp {
    raw: *mut ibv_qp,
    /// How often its state is modified while the peer's address is not resolved.
    tries: u32,
    shared: Arc<Shared>,
}

/// A change of state that failed.
pub struct ModifyError {
    to: &'static str,
    error: io::Error,
}

impl ModifyError {
    /// As an error of the queue pair; `path` names its two ends.
    pub fn into_error(self, path: &str) -> Error {
        let hint = match self.error.raw_os_error() {
            Some(libc::ETIMEDOUT) => " (the peer's address does not answer: is there a route between the two GIDs?)",
            Some(libc::EINVAL | libc::ENODEV | libc::ENETUNREACH | libc::EHOSTUNREACH) => {
                " (the GID is gone, or has no route to the peer's; see NCCL_IB_GID_INDEX, NCCL_IB_ROCE_VERSION_NUM and NCCL_IB_ADDR_RANGE; or the device refuses an enhancement: NCCL_IB_ECE_ENABLE=0)"
            }
            _ => "",
        };
        Error::system(format!("{path}: queue pair to {}{hint}", self.to), self.error)
    }
}

impl RawQp {
    /// A queue pair in RESET that completes into `cq`, and how many bytes it takes inline; `inline` are wanted.
    pub fn create(shared: Arc<Shared>, cq: *mut ibv_cq, caps: &QpCaps, inline: u32) -> Result<(RawQp, usize)> {
        let mut refused = None;
        for inline in [inline, 0] {
            let mut attr = ibv_qp_init_attr {
                send_cq: cq,
                recv_cq: cq,
                cap: ibv_qp_cap {
                    max_send_wr: caps.send_depth,
                    max_recv_wr: caps.recv_depth,
                    max_send_sge: 1,
                    max_recv_sge: 1,
                    max_inline_data: inline,
                },
                qp_type: ibv_qp_type::IBV_QPT_RC,
                ..Default::default()
            };
            // SAFETY: domain and queue are live, the attributes outlive the call.
            match made(unsafe { (shared.library().create_qp)(shared.pd, &mut attr) }) {
                Ok(raw) => {
                    return Ok((
                        RawQp { raw, shared, tries: MODIFY_TRIES },
                        if inline == 0 { 0 } else { attr.cap.max_inline_data as usize },
                    ));
                }
                Err(error) => refused = Some(error),
            }
        }
        let error = refused.unwrap_or_else(io::Error::last_os_error);
        let hint = if error.raw_os_error() == Some(libc::ENOMEM) { super::memlock_hint() } else { String::new() };
        Err(Error::system(
            format!("{}: creating a queue pair of depth {} and {}{hint}", shared.port.label, caps.send_depth, caps.recv_depth),
            error,
        ))
    }

    /// The device's queue pair.
    pub fn raw(&self) -> *mut ibv_qp {
        self.raw
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is live.
        unsafe { (*self.raw).qp_num }
    }

    /// To RESET: what it holds is dropped.
    pub fn to_reset(&self) -> std::result::Result<(), ModifyError> {
        let mut attr = ibv_qp_attr { qp_state: ibv_qp_state::IBV_QPS_RESET, ..Default::default() };
        self.modify("RESET", &mut attr, ibv_qp_attr_mask::IBV_QP_STATE)
    }

    /// From RESET to INIT: receives may be posted.
    pub fn init(&self) -> std::result::Result<(), ModifyError> {
        let mut attr = ibv_qp_attr {
            qp_state: ibv_qp_state::IBV_QPS_INIT,
            pkey_index: self.shared.port.config.ib_pkey as u16,
            port_num: self.shared.port.number,
            // Everything: the access to memory is restricted by its region.
            qp_access_flags: (ibv_access_flags::IBV_ACCESS_LOCAL_WRITE
                | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE
                | ibv_access_flags::IBV_ACCESS_REMOTE_READ)
                .0,
            ..Default::default()
        };
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_PKEY_INDEX
            | ibv_qp_attr_mask::IBV_QP_PORT
            | ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS;
        self.modify("INIT", &mut attr, mask)
    }

    /// Through RTR to RTS. `local` is the address that the peer has or gets.
    pub fn connect(&self, local: &Address, remote: &Address, caps: &QpCaps) -> std::result::Result<(), ModifyError> {
        let (port, config) = (&self.shared.port, &self.shared.port.config);
        let beyond = u32::from(port.link_layer) != IBV_LINK_LAYER_ETHERNET && remote.gid.subnet() != port.gid.subnet();
        let routed = port.global || beyond || remote.lid == 0;
        let dlid = match remote.gid.flid().filter(|_| beyond) {
            Some(router) => router,
            None if beyond => {
                log_warn!(
                    log::NET,
                    "{}: the peer {} is in another subnet and its GID has no FLID: its LID is used, which may not lead there",
                    port.label,
                    remote.gid
                );
                remote.lid
            }
            None => remote.lid,
        };
        let mut ah = ibv_ah_attr {
            dlid,
            sl: u8::try_from(config.ib_sl).unwrap_or(0),
            is_global: u8::from(routed),
            port_num: port.number,
            ..Default::default()
        };
        if routed {
            ah.grh.dgid = ibv_gid { raw: remote.gid.0 };
            ah.grh.sgid_index = port.gid_index_now();
            ah.grh.hop_limit = HOP_LIMIT;
            ah.grh.traffic_class = caps.traffic_class.unwrap_or(0);
        }
        let mut attr = ibv_qp_attr {
            qp_state: ibv_qp_state::IBV_QPS_RTR,
            path_mtu: u32::from(local.mtu.min(remote.mtu)),
            dest_qp_num: remote.qpn,
            rq_psn: remote.psn,
            max_dest_rd_atomic: local.reads,
            min_rnr_timer: rnr_timer(caps.min_rnr_timer_us),
            ah_attr: ah,
            ..Default::default()
        };
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_AV
            | ibv_qp_attr_mask::IBV_QP_PATH_MTU
            | ibv_qp_attr_mask::IBV_QP_DEST_QPN
            | ibv_qp_attr_mask::IBV_QP_RQ_PSN
            | ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER;
        self.modify("RTR", &mut attr, mask)?;
        let mut attr = ibv_qp_attr {
            qp_state: ibv_qp_state::IBV_QPS_RTS,
            timeout: config.ib_timeout as u8,
            retry_cnt: config.ib_retry_cnt as u8,
            rnr_retry: caps.rnr_retry,
            sq_psn: local.psn,
            max_rd_atomic: (self.shared.port.context.reads_asked.clamp(0, MAX_READS) as u8).min(remote.reads),
            ..Default::default()
        };
        let mask = ibv_qp_attr_mask::IBV_QP_STATE
            | ibv_qp_attr_mask::IBV_QP_TIMEOUT
            | ibv_qp_attr_mask::IBV_QP_RETRY_CNT
            | ibv_qp_attr_mask::IBV_QP_RNR_RETRY
            | ibv_qp_attr_mask::IBV_QP_SQ_PSN
            | ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify("RTS", &mut attr, mask)
    }

    /// To ERROR: what is outstanding is flushed. Refused only by a device that is gone, whose queue pairs are in ERROR anyway.
    pub fn to_error(&self) {
        let mut attr = ibv_qp_attr { qp_state: ibv_qp_state::IBV_QPS_ERR, ..Default::default() };
        let _ = self.modify("ERROR", &mut attr, ibv_qp_attr_mask::IBV_QP_STATE);
    }

    /// Whether the device says that it is in ERROR.
    pub fn is_error(&self) -> bool {
        let (mut attr, mut init) = (ibv_qp_attr::default(), ibv_qp_init_attr::default());
        let mask = ibv_qp_attr_mask::IBV_QP_STATE.0 as i32;
        // SAFETY: the queue pair is live, both places outlive the call.
        let answer = check(unsafe { (self.shared.library().query_qp)(self.raw, &mut attr, mask, &mut init) });
        answer.is_ok() && attr.qp_state == ibv_qp_state::IBV_QPS_ERR
    }

    /// Its ECE options: those that it could use, and, once it is connected, those that it uses.
    pub fn ece(&self) -> Option<Enhancements> {
        let library = self.shared.library();
        // Both functions are needed to agree on anything.
        let (query, _) = library.query_ece.zip(library.set_ece)?;
        let mut ece = ibv_ece { vendor_id: 0, options: 0, comp_mask: 0 };
        // SAFETY: the queue pair is live, the place outlives the call.
        check(unsafe { query(self.raw, &mut ece) }).ok()?;
        Some(Enhancements { vendor: ece.vendor_id, options: ece.options, mask: ece.comp_mask })
    }

    /// Sets the ECE options that it is to use, before it is connected.
    pub fn set_ece(&self, ece: Enhancements) -> io::Result<()> {
        let set = self.shared.library().set_ece.ok_or(io::ErrorKind::Unsupported)?;
        let mut ece = ibv_ece { vendor_id: ece.vendor, options: ece.options, comp_mask: ece.mask };
        // SAFETY: the queue pair is live, the place outlives the call. Numbers that the driver does not know it refuses.
        check(unsafe { set(self.raw, &mut ece) })
    }

    /// What is tried after a failure is not tried for long: whoever drives other queue pairs too would wait with them.
    pub fn set_impatient(&mut self) {
        self.tries = 1;
    }

    /// Modifies its state. ETIMEDOUT means that the peer's address is not resolved yet, and is retried.
    fn modify(&self, to: &'static str, attr: &mut ibv_qp_attr, mask: ibv_qp_attr_mask) -> std::result::Result<(), ModifyError> {
        let mut tries = 0;
        loop {
            // SAFETY: the queue pair is live, the attributes outlive the call and are those that the mask names.
            let result = check(unsafe { (self.shared.library().modify_qp)(self.raw, attr, mask.0 as i32) });
            let Err(error) = result else { return Ok(()) };
            tries += 1;
            if error.raw_os_error() == Some(libc::ETIMEDOUT) && tries < self.tries {
                clock::sleep(std::time::Duration::from_millis(MODIFY_PAUSE_MS));
                continue;
            }
            return Err(ModifyError { to, error });
        }
    }
}

impl Drop for RawQp {
    fn drop(&mut self) {
        if !self.shared.owned() {
            return;
        }
        // SAFETY: made by create_qp, destroyed once.
        unsafe { (self.shared.library().destroy_qp)(self.raw) };
    }
}

/// Code of the shortest wait that is not shorter (InfiniBand specification 1.4, table 45; code 0 is the longest).
fn rnr_timer(us: u32) -> u8 {
    const HUNDREDTHS_MS: [u32; 31] = [
        1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384,
        24576, 32768, 49152,
    ];
    HUNDREDTHS_MS.iter().position(|&wait| wait * 10 >= us).map_or(0, |at| at as u8 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_rounded_up() {
        for (us, code) in [(0, 1), (1, 1), (10, 1), (11, 2), (640, 12), (641, 13), (10_240, 20), (491_520, 31), (491_521, 0), (u32::MAX, 0)]
        {
            assert_eq!(rnr_timer(us), code, "{us}");
        }
    }
}
