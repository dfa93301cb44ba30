//! The two streams of bytes beside the descriptors: responses of READs, from the responder, and what it could not read itself, to it.

use std::sync::atomic::Ordering;

use super::super::super::work_queues::{Fault, WorkQueues};
use super::super::layout::{DESCS, DirectionState};
use super::super::{Segment, stream};
use super::{InFlight, Requester};
use crate::base::stats::RailCounter;
use crate::fabric::types::*;

impl Requester {
    /// Copies what has come of the oldest READs' responses into place.
    #[cold]
    pub(super) fn poll_read_response(&mut self, wq: &mut WorkQueues, segment: &Segment) -> Result<bool, Fault> {
        let direction = segment.direction(self.direction);
        let mut moved = false;
        while let Some(&read) = self.reads.front() {
            let wqe = *wq.sq.get(read);
            let left = wqe.len - self.read_at;
            if left > 0 {
                let addr = wqe.addr + u64::from(self.read_at);
                let pin = wq
                    .pin_local(wqe.lkey, addr, left as usize, Access::LOCAL_WRITE)
                    .map_err(|status| Fault::oldest(status, "the local memory of a READ is not registered for writing"))?;
                // SAFETY: the pin vouches for `left` bytes, the segment for the stream.
                let n = unsafe {
                    stream::read(segment.resp(self.direction), &direction.resp_tail, &direction.resp_head, pin.as_ptr(), pin.len())
                };
                self.read_at += n as u32;
                moved |= n > 0;
                if self.read_at < wqe.len {
                    break;
                }
            } else if direction.acked.load(Ordering::Acquire) <= read {
                break;
            }
            wq.stats.add(RailCounter::RxBounce, u64::from(wqe.len));
            self.reads.pop_front();
            self.read_at = 0;
            moved = true;
        }
        Ok(moved)
    }

    /// The responder cannot read a descriptor's bytes: begins to write them to the fill stream, and uses the bounce ring from now on.
    #[cold]
    pub(super) fn on_fill_wanted(&mut self, wq: &WorkQueues, direction: &DirectionState) -> Result<(), Fault> {
        let want = direction.fill_want.load(Ordering::Acquire);
        self.fill_seen = want;
        if want == 0 {
            return Ok(());
        }
        self.peer_reads = false;
        wq.stats.add(RailCounter::CmaRefused, 1);
        let protocol_error =
            || Fault::oldest(WcStatus::GeneralErr, format!("the peer asked for the bytes of descriptor {want}, which is not in flight"));
        let desc = want - 1;
        if desc >= self.tail || self.tail - desc > DESCS {
            return Err(protocol_error());
        }
        let InFlight { request, at, .. } = *self.in_flight.get((desc % DESCS) as usize).ok_or_else(protocol_error)?;
        if request < wq.sq.acked || request >= wq.sq.sent {
            return Err(protocol_error());
        }
        let wqe = wq.sq.get(request);
        let from = direction.fill_from.load(Ordering::Relaxed);
        if wqe.inline || wqe.opcode == Opcode::Read || from > u64::from(wqe.len - at) {
            return Err(protocol_error());
        }
        // All bytes were counted as CMA when the descriptor was published; `write_fill` counts those that were not read.
        wq.stats.take(RailCounter::TxCma, u64::from(wqe.len - at) - from);
        self.fill = Some((request, at + from as u32, wqe.len));
        Ok(())
    }

    /// Writes to the fill stream what it has room for.
    #[cold]
    pub(super) fn write_fill(&mut self, wq: &mut WorkQueues, segment: &Segment) -> Result<bool, Fault> {
        let Some((request, at, end)) = self.fill else { return Ok(false) };
        if request < wq.sq.acked || at == end {
            self.fill = None;
            return Ok(false);
        }
        let wqe = *wq.sq.get(request);
        let direction = segment.direction(self.direction);
        let pin = wq
            .pin_local(wqe.lkey, wqe.addr + u64::from(at), (end - at) as usize, Access::empty())
            .map_err(|status| Fault::oldest(status, "memory was deregistered while it was being sent"))?;
        // SAFETY: the pin vouches for the rest of the request, the segment for the stream.
        let n = unsafe { stream::write(segment.fill(self.direction), &direction.fill_tail, &direction.fill_head, pin.as_ptr(), pin.len()) };
        wq.stats.add(RailCounter::TxBounce, n as u64);
        self.fill = Some((request, at + n as u32, end));
        Ok(n > 0)
    }
}
