//! The wire of a queue pair that is connected to itself, as for a flush: requests are carried out where they are posted.
//! Driven by the thread that drives the queue pair.

use super::publish::publish;
use super::queue::{Core, Fault};
use crate::base::mem;
use crate::base::stats::RailCounter;
use crate::fabric::types::*;

/// Requests carried out before the caller gets its turn.
const BUDGET: u32 = 64;

/// Carries out what was posted; true if anything was.
pub fn progress(core: &mut Core) -> Result<bool, Fault> {
    let mut moved = false;
    for _ in 0..BUDGET {
        if !core.sq.pending() || !carry_out(core)? {
            break;
        }
        core.sq.sent += 1;
        core.acknowledge(core.sq.sent)?;
        moved = true;
    }
    Ok(moved)
}

/// Carries the next request out; false if it waits for a receive request.
fn carry_out(core: &mut Core) -> Result<bool, Fault> {
    let request = core.sq.sent;
    let wqe = *core.sq.get(request);
    let len = wqe.len as usize;
    let own = if wqe.opcode == Opcode::Read { Access::LOCAL_WRITE } else { Access::empty() };
    let local = if len == 0 || wqe.inline { None } else { Some(core.pin_local(wqe.lkey, wqe.addr, len, own).map_err(refused)?) };
    let imm = matches!(wqe.opcode, Opcode::SendWithImm | Opcode::WriteWithImm).then_some(wqe.imm);
    let send = matches!(wqe.opcode, Opcode::Send | Opcode::SendWithImm);
    let recv = if send || imm.is_some() {
        let Some(recv) = core.peek_recv() else {
            return core
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
                core.fail_recv(WcStatus::LocLenErr);
                return Err(Fault::sending(
                    WcStatus::RemInvReqErr,
                    format!("sent more than the {} bytes of the receive request", recv.sge.len),
                ));
            }
            match core.pin_local(recv.sge.lkey, recv.sge.addr, len, Access::LOCAL_WRITE) {
                Ok(pin) => Some(pin),
                Err(status) => {
                    core.fail_recv(status);
                    return Err(Fault::sending(WcStatus::RemOpErr, "a receive request names memory that is not registered for writing"));
                }
            }
        }
        (Opcode::Read, _) => Some(core.pin_remote(wqe.rkey, wqe.remote_addr, len, Access::REMOTE_READ).map_err(refused)?),
        _ => Some(core.pin_remote(wqe.rkey, wqe.remote_addr, len, Access::REMOTE_WRITE).map_err(refused)?),
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
            unsafe { publish(target.as_ptr(), core.sq.inline_bytes(request)) };
        }
        _ => {}
    }
    if send {
        core.complete_recv(WcOpcode::Recv, wqe.len, imm);
    } else if imm.is_some() {
        core.complete_recv(WcOpcode::RecvRdmaWithImm, wqe.len, imm);
    }
    core.stats.add(RailCounter::TxMapped, u64::from(wqe.len));
    Ok(true)
}

fn refused(status: WcStatus) -> Fault {
    Fault::sending(status, format!("a request to itself was refused: {status}"))
}
