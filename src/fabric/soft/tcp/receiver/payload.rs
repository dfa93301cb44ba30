//! The part of the receiving half that stores payload: into which memory it goes, and what happens when all of a request is stored. Used as
//! [`super`] is.

use crate::base::mem;
use crate::base::stage::{self, Stage};
use crate::base::stats::RailCounter;
use crate::fabric::types::*;

use super::super::super::mr::Pin;
use super::super::super::publish::publish;
use super::super::super::work_queues::{Fault, WorkQueues};
use super::super::codec::Kind;
use super::{Body, FrameReceiver, IncomingRequest, protocol_error};

impl FrameReceiver {
    /// Stores payload of the current frame, at most `body_left` bytes.
    pub(super) fn store(&mut self, wq: &mut WorkQueues, bytes: &[u8]) -> Result<(), Fault> {
        let n = bytes.len() as u32;
        match self.body {
            Body::Skip => self.body_left -= n,
            Body::Small => {
                self.body_left -= n;
                return self.store_small(wq, bytes);
            }
            Body::Request | Body::Response => match self.pin_target(wq)? {
                None => self.body_left -= n,
                Some(pin) => {
                    // SAFETY: `copy` requires a source and a target that are valid for so many bytes: no more than `bytes` has, and no more than the pin
                    // keeps registered for writing. (They are as many: the headers' checks have bound the payload to what the pin covers.)
                    unsafe { mem::copy(bytes.as_ptr(), pin.as_ptr(), bytes.len().min(pin.len())) };
                    drop(pin);
                    return self.direct_received(wq, bytes.len());
                }
            },
        }
        Ok(())
    }

    #[inline]
    fn store_small(&mut self, wq: &mut WorkQueues, bytes: &[u8]) -> Result<(), Fault> {
        let Some(mut incoming) = self.incoming else { return Ok(()) };
        let start = incoming.done as usize;
        let whole = if bytes.len() == incoming.total as usize {
            bytes
        } else {
            let Some(to) = self.small.get_mut(start..start + bytes.len()) else { return Err(protocol_error("too much of a request")) };
            to.copy_from_slice(bytes);
            self.small.get(..start + bytes.len()).unwrap_or(&[])
        };
        incoming.done += bytes.len() as u32;
        if incoming.done == incoming.total {
            match wq.pin_remote(incoming.key, incoming.addr, whole.len(), Access::REMOTE_WRITE) {
                // SAFETY: `publish` requires memory that is valid for writes of `whole.len()` bytes, and that others read only as words meanwhile: the pin
                // keeps so many bytes registered for the peer's WRITEs, which its owner expects as from a NIC.
                Ok(pin) => unsafe { publish(pin.as_ptr(), whole) },
                Err(status) => {
                    self.refuse_place(wq, &incoming, status);
                    return Ok(());
                }
            }
            wq.stats.add(RailCounter::RxTcp, u64::from(incoming.total));
            return self.request_done(wq, &incoming);
        }
        self.incoming = Some(incoming);
        Ok(())
    }

    /// Pins the memory that the next payload byte goes to, up to the end of its request; none if the request was refused.
    pub(super) fn pin_target(&mut self, wq: &mut WorkQueues) -> Result<Option<Pin>, Fault> {
        if self.body == Body::Response {
            let Some(read) = self.reads_in_flight.front() else { return Err(protocol_error("an answer to no READ")) };
            let wqe = wq.sq.get(read.index);
            let left = wqe.len.saturating_sub(read.done) as usize;
            return wq
                .pin_local(wqe.lkey, wqe.addr.wrapping_add(u64::from(read.done)), left, Access::LOCAL_WRITE)
                .map(Some)
                .map_err(|status| Fault::oldest(status, "the local memory of a READ is not registered for writing"));
        }
        let Some(incoming) = self.incoming else { return Ok(None) };
        Ok(self.pin(wq, &incoming, incoming.done, (incoming.total - incoming.done) as usize))
    }

    pub(super) fn pin(&mut self, wq: &mut WorkQueues, incoming: &IncomingRequest, offset: u32, len: usize) -> Option<Pin> {
        let addr = incoming.addr.wrapping_add(u64::from(offset));
        let pinned = match incoming.kind {
            Kind::Send => wq.pin_local(incoming.key, addr, len, Access::LOCAL_WRITE),
            _ => wq.pin_remote(incoming.key, addr, len, Access::REMOTE_WRITE),
        };
        pinned.map_err(|status| self.refuse_place(wq, incoming, status)).ok()
    }

    #[cold]
    fn refuse_place(&mut self, wq: &mut WorkQueues, incoming: &IncomingRequest, status: WcStatus) {
        if incoming.kind == Kind::Send {
            self.fail_recv(wq, status);
            self.refuse(WcStatus::RemOpErr, "a receive request names memory that is not registered for writing");
        } else {
            let why = format!("the peer may not write {} bytes at {:#x} with key {:#x}", incoming.total, incoming.addr, incoming.key);
            self.refuse(status, why);
        }
    }

    #[cold]
    pub(super) fn fail_recv(&mut self, wq: &mut WorkQueues, status: WcStatus) {
        wq.fail_recv(status);
        self.recvs_completed = self.recvs_completed.wrapping_add(1);
    }

    #[inline]
    pub(super) fn advance(&mut self, wq: &mut WorkQueues, n: u32) -> Result<(), Fault> {
        let Some(incoming) = &mut self.incoming else { return Ok(()) };
        incoming.done = incoming.done.saturating_add(n).min(incoming.total);
        let incoming = *incoming;
        if incoming.done == incoming.total {
            return self.request_done(wq, &incoming);
        }
        stage::reach(Stage::RecvHalf);
        Ok(())
    }

    /// Every byte of the oldest request is stored: completes its receive request, if it has one, and counts it as executed.
    #[inline]
    pub(super) fn request_done(&mut self, wq: &mut WorkQueues, incoming: &IncomingRequest) -> Result<(), Fault> {
        let opcode = if incoming.kind == Kind::Send { WcOpcode::Recv } else { WcOpcode::RecvRdmaWithImm };
        if incoming.kind == Kind::Send || incoming.imm.is_some() {
            if !wq.complete_recv(opcode, incoming.total, incoming.imm) {
                return Err(protocol_error("a request without being told of a receive for it"));
            }
            self.recvs_completed = self.recvs_completed.wrapping_add(1);
        }
        self.incoming = None;
        self.executed += 1;
        if incoming.ack_req {
            self.ack_requested = self.executed;
        }
        Ok(())
    }

    /// `n` more bytes of our oldest READ are stored.
    pub(super) fn response_received(&mut self, wq: &mut WorkQueues, n: u32) -> Result<(), Fault> {
        let Some(read) = self.reads_in_flight.front_mut() else { return Err(protocol_error("an answer to no READ")) };
        read.done = read.done.saturating_add(n);
        if read.done >= wq.sq.get(read.index).len {
            self.reads_in_flight.pop();
        }
        Ok(())
    }
}
