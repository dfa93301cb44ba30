//! What a completion of a NIC means: status and opcode as numbers, which newer drivers may extend, in our words and in a user's.
#![forbid(unsafe_code)]

use ibverbs_sys::{ibv_wc_opcode, ibv_wc_status};

use crate::fabric::types::{Opcode, WcOpcode, WcStatus};

/// Our status.
pub fn status(raw: ibv_wc_status::Type) -> WcStatus {
    use ibv_wc_status as wc;
    match raw {
        wc::IBV_WC_SUCCESS => WcStatus::Success,
        wc::IBV_WC_LOC_LEN_ERR => WcStatus::LocLenErr,
        wc::IBV_WC_LOC_QP_OP_ERR => WcStatus::LocQpOpErr,
        wc::IBV_WC_LOC_PROT_ERR | wc::IBV_WC_LOC_ACCESS_ERR => WcStatus::LocProtErr,
        wc::IBV_WC_WR_FLUSH_ERR => WcStatus::WrFlushErr,
        wc::IBV_WC_REM_INV_REQ_ERR => WcStatus::RemInvReqErr,
        wc::IBV_WC_REM_ACCESS_ERR => WcStatus::RemAccessErr,
        wc::IBV_WC_REM_OP_ERR => WcStatus::RemOpErr,
        wc::IBV_WC_RETRY_EXC_ERR => WcStatus::RetryExcErr,
        wc::IBV_WC_RNR_RETRY_EXC_ERR => WcStatus::RnrRetryExcErr,
        _ => WcStatus::GeneralErr,
    }
}

/// Name in `enum ibv_wc_status` (rdma-core v55 libibverbs/verbs.h), as logs of other programs have it.
pub fn name(raw: ibv_wc_status::Type) -> &'static str {
    const NAMES: [&str; 24] = [
        "IBV_WC_SUCCESS",
        "IBV_WC_LOC_LEN_ERR",
        "IBV_WC_LOC_QP_OP_ERR",
        "IBV_WC_LOC_EEC_OP_ERR",
        "IBV_WC_LOC_PROT_ERR",
        "IBV_WC_WR_FLUSH_ERR",
        "IBV_WC_MW_BIND_ERR",
        "IBV_WC_BAD_RESP_ERR",
        "IBV_WC_LOC_ACCESS_ERR",
        "IBV_WC_REM_INV_REQ_ERR",
        "IBV_WC_REM_ACCESS_ERR",
        "IBV_WC_REM_OP_ERR",
        "IBV_WC_RETRY_EXC_ERR",
        "IBV_WC_RNR_RETRY_EXC_ERR",
        "IBV_WC_LOC_RDD_VIOL_ERR",
        "IBV_WC_REM_INV_RD_REQ_ERR",
        "IBV_WC_REM_ABORT_ERR",
        "IBV_WC_INV_EECN_ERR",
        "IBV_WC_INV_EEC_STATE_ERR",
        "IBV_WC_FATAL_ERR",
        "IBV_WC_RESP_TIMEOUT_ERR",
        "IBV_WC_GENERAL_ERR",
        "IBV_WC_TM_ERR",
        "IBV_WC_TM_RNDV_INCOMPLETE",
    ];
    NAMES.get(raw as usize).copied().unwrap_or("a status newer than this library")
}

/// What to look at.
pub fn hint(status: WcStatus) -> &'static str {
    match status {
        WcStatus::RetryExcErr => {
            "no acknowledgement came within NCCL_IB_TIMEOUT x NCCL_IB_RETRY_CNT: the peer's process or host is gone, a link or switch port \
             between them is down, or the two GIDs have no route to each other (same RoCE version and subnet? PFC or ECN dropping?)"
        }
        WcStatus::RnrRetryExcErr => "the peer posted no receive in time: it is stuck or overloaded",
        WcStatus::RemAccessErr => {
            "the peer's NIC refused the key, range or access: memory was deregistered while in use, or the two sides disagree on a message"
        }
        WcStatus::RemOpErr => "the peer's NIC failed while performing it: look at the peer's log and at `dmesg` there",
        WcStatus::RemInvReqErr => "the peer's NIC did not understand the request, or it was longer than the receive posted for it",
        WcStatus::LocProtErr => "a local key, range or access is wrong: memory was deregistered, or unmapped, while in use",
        WcStatus::LocLenErr => "longer than the receive that it met, or than the port's largest message",
        WcStatus::LocQpOpErr => "the local NIC could not send: its link is down, or its address (GID) was removed",
        WcStatus::WrFlushErr => "the queue pair failed before; its first failure tells why",
        WcStatus::GeneralErr | WcStatus::Success => "look at `dmesg` and at the vendor's list of error codes",
    }
}

/// What a successful receive completes.
pub fn received(raw: ibv_wc_opcode::Type) -> WcOpcode {
    if raw == ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv }
}

/// What a send request completes as.
pub fn sent(opcode: Opcode) -> WcOpcode {
    match opcode {
        Opcode::Send | Opcode::SendWithImm => WcOpcode::Send,
        Opcode::Write | Opcode::WriteWithImm => WcOpcode::Write,
        Opcode::Read => WcOpcode::Read,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_where_the_header_has_them() {
        assert_eq!(name(ibv_wc_status::IBV_WC_RETRY_EXC_ERR), "IBV_WC_RETRY_EXC_ERR");
        assert_eq!(name(ibv_wc_status::IBV_WC_TM_RNDV_INCOMPLETE), "IBV_WC_TM_RNDV_INCOMPLETE");
        assert_eq!(name(ibv_wc_status::IBV_WC_GENERAL_ERR), "IBV_WC_GENERAL_ERR");
    }

    #[test]
    fn numbers_that_nobody_knows_yet_are_errors_and_no_more() {
        for raw in [24, 25, 1000, u32::MAX] {
            assert_eq!(status(raw), WcStatus::GeneralErr);
            assert!(name(raw).contains("newer"));
        }
        assert_eq!(received(u32::MAX), WcOpcode::Recv);
    }
}
