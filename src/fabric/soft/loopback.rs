//! What stands in for the wire of a queue pair that is connected to itself, as for a flush: the requests are executed in this process.
//! Driven by the thread that drives the queue pair.

use super::publish::publish;
use super::work_queues::{Fault, WorkQueues};
use crate::base::mem;
use crate::base::stats::RailCounter;
use crate::fabric::types::*;

/// Requests executed per call at most.
const BUDGET: u32 = 64;

/// Executes posted requests; true if there was any.
pub fn progress(wq: &mut WorkQueues) -> Result<bool, Fault> {
    let mut moved = false;
    for _ in 0..BUDGET {
        if !wq.sq.pending() || !execute(wq)? {
            break;
        }
        wq.sq.sent += 1;
        wq.ack(wq.sq.sent)?;
        moved = true;
    }
    Ok(moved)
}

/// Executes the next request; false if it waits for a receive request.
fn execute(wq: &mut WorkQueues) -> Result<bool, Fault> {
    let request = wq.sq.sent;
    let wqe = *wq.sq.get(request);
    let len = wqe.len as usize;
    let own = if wqe.opcode == Opcode::Read { Access::LOCAL_WRITE } else { Access::empty() };
    let local = if len == 0 || wqe.inline { None } else { Some(wq.pin_local(wqe.lkey, wqe.addr, len, own).map_err(refused)?) };
    let imm = matches!(wqe.opcode, Opcode::SendWithImm | Opcode::WriteWithImm).then_some(wqe.imm);
    let send = matches!(wqe.opcode, Opcode::Send | Opcode::SendWithImm);
    let recv = if send || imm.is_some() {
        let Some(recv) = wq.peek_recv() else {
            return wq
                .receiver_not_ready()
                .map(|()| false)
                .map_err(|status| Fault::sending(status, "no receive request was posted in time"));
        };
        Some(recv)
    } else {
        None
    };
    let target = match (wqe.opcode, recv) {
        _ if len == 0 => None,
        (Opcode::Send | Opcode::SendWithImm, Some(recv)) => {
            if wqe.len > recv.sge.len {
                wq.fail_recv(WcStatus::LocLenErr);
                return Err(Fault::sending(
                    WcStatus::RemInvReqErr,
                    format!("sent more than the {} bytes of the receive request", recv.sge.len),
                ));
            }
            match wq.pin_local(recv.sge.lkey, recv.sge.addr, len, Access::LOCAL_WRITE) {
                Ok(pin) => Some(pin),
                Err(status) => {
                    wq.fail_recv(status);
                    return Err(Fault::sending(WcStatus::RemOpErr, "a receive request names memory that is not registered for writing"));
                }
            }
        }
        (Opcode::Read, _) => Some(wq.pin_remote(wqe.rkey, wqe.remote_addr, len, Access::REMOTE_READ).map_err(refused)?),
        _ => Some(wq.pin_remote(wqe.rkey, wqe.remote_addr, len, Access::REMOTE_WRITE).map_err(refused)?),
    };
    match (&local, &target) {
        (Some(local), Some(target)) if wqe.opcode == Opcode::Read => {
            // SAFETY: both pins cover `len` bytes; `copy` allows for overlap.
            unsafe { mem::copy(target.as_ptr(), local.as_ptr(), len) };
        }
        (Some(local), Some(target)) if len <= 64 => {
            let mut bytes = [0u8; 64];
            // SAFETY: the pin covers `len` bytes, and the guard keeps them within `bytes`.
            unsafe { mem::copy(local.as_ptr(), bytes.as_mut_ptr(), len) };
            // SAFETY: the pin covers `len` bytes.
            unsafe { publish(target.as_ptr(), &bytes[..len]) };
        }
        (Some(local), Some(target)) => {
            // SAFETY: both pins cover `len` bytes; `copy` allows for overlap.
            unsafe { mem::copy(local.as_ptr(), target.as_ptr(), len) };
        }
        (None, Some(target)) => {
            // SAFETY: the pin covers the inline bytes, which are `len`.
            unsafe { publish(target.as_ptr(), wq.sq.inline_bytes(request)) };
        }
        _ => {}
    }
    if send {
        wq.complete_recv(WcOpcode::Recv, wqe.len, imm);
    } else if imm.is_some() {
        wq.complete_recv(WcOpcode::RecvRdmaWithImm, wqe.len, imm);
    }
    wq.stats.add(RailCounter::TxMapped, u64::from(wqe.len));
    Ok(true)
}

fn refused(status: WcStatus) -> Fault {
    Fault::sending(status, format!("a request to itself was refused: {status}"))
}
