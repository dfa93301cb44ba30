//! WRITEs into memory of the responder's that this side maps: it copies the bytes to where they go, and publishes that they are there.

use std::sync::atomic::Ordering;

use super::super::super::work_queues::{Fault, WorkQueues, Wqe};
use super::super::Segment;
use super::super::layout::{DESC_INLINE, source};
use super::{BOUNCE_MAX, Requester, local_fault};
use crate::base::mem::{self, Shm};
use crate::base::stats::RailCounter;
use crate::fabric::types::*;

/// Memory of the responder's that this side maps, and may write to.
pub(super) struct Target {
    key: u32,
    /// Where the responder has it.
    addr: u64,
    shm: Shm,
    /// Of the requests below this number, the responder may move the bytes.
    from: u64,
}

impl Requester {
    /// How many of the responder's memories this side maps.
    pub fn targets(&self) -> usize {
        self.targets.len()
    }

    /// From now on this side copies what it writes with this key.
    #[cold]
    pub fn add_target(&mut self, key: u32, addr: u64, shm: Shm, wq: &WorkQueues) {
        // Of the request that is next, the responder may have some already.
        self.targets.push(Target { key, addr, shm, from: wq.sq.sent + 1 });
    }

    /// Where to copy the rest of the next request to, if this side may write there by itself, and now.
    pub(super) fn target(&mut self, wqe: &Wqe, wq: &WorkQueues, segment: &Segment) -> Option<*mut u8> {
        // What is short is published in order, by the responder.
        if !matches!(wqe.opcode, Opcode::Write | Opcode::WriteWithImm) || wqe.inline || wqe.len as usize <= DESC_INLINE {
            return None;
        }
        let Requester { direction, tail, at, targets, passed, .. } = self;
        let target = targets.iter_mut().find(|target| target.key == wqe.rkey)?;
        // An earlier WRITE of which the responder moves the bytes would replace what comes after it, and an earlier READ would find it.
        let is_behind = (wq.sq.acked..wq.sq.sent).any(|request| {
            let earlier = wq.sq.get(request);
            earlier.rkey == wqe.rkey
                && (request < target.from || earlier.opcode == Opcode::Read || earlier.inline || earlier.len as usize <= DESC_INLINE)
        });
        // If the responder maps the bytes, it copies them as long as it has handled all that was published: both copy at once when there is more to copy.
        let is_theirs = || {
            *at == 0
                && wqe.len > BOUNCE_MAX
                && segment.direction(*direction).desc_head.load(Ordering::Relaxed) == *tail
                && wq
                    .pin_local(wqe.lkey, wqe.addr, wqe.len as usize, Access::empty())
                    .is_ok_and(|pin| pin.allocation().is_some_and(|(id, _)| passed.contains(&(id, true))))
        };
        let offset = wqe.remote_addr.checked_add(u64::from(*at)).and_then(|at| at.checked_sub(target.addr));
        let len = (wqe.len - *at) as usize;
        let fits = |offset: &usize| offset.checked_add(len).is_some_and(|end| end <= target.shm.len());
        let offset = offset.and_then(|offset| usize::try_from(offset).ok()).filter(fits).filter(|_| !is_behind && !is_theirs());
        if offset.is_none() {
            target.from = wq.sq.sent + 1;
        }
        offset.map(|offset| target.shm.ptr(offset, len))
    }

    /// Copies the rest of a request, or a part of that, to where it goes in the responder's memory, and publishes that it is there.
    pub(super) fn publish_by_placement(
        &mut self,
        wq: &mut WorkQueues,
        wqe: &Wqe,
        request: u64,
        segment: &Segment,
        to: *mut u8,
        budget: &mut u64,
    ) -> Result<bool, Fault> {
        let left = wqe.len - self.at;
        let len = left.min((*budget).min(u64::from(u32::MAX)) as u32);
        if len == 0 {
            return Ok(false);
        }
        *budget -= u64::from(len);
        let pin = wq.pin_local(wqe.lkey, wqe.addr.wrapping_add(u64::from(self.at)), left as usize, Access::empty()).map_err(local_fault)?;
        // SAFETY: the pin vouches for `left >= len` bytes, and so does `target` for where they go, in a sealed mapping.
        unsafe { mem::copy(pin.as_ptr(), to, len as usize) };
        drop(pin);
        wq.stats.add(RailCounter::TxMapped, u64::from(len));
        self.publish(segment, wqe, request, source::PLACED, 0, self.at, len, [0, u64::from(left), u64::from(len), 0, 0]);
        self.advance(wq, wqe, len);
        Ok(true)
    }
}
