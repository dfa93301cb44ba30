//! The two streams of bytes beside the descriptors: responses of READs, from the responder, and what it could not read itself, to it.

use std::sync::atomic::Ordering;

use super::super::super::work_queues::{Fault, WorkQueues};
use super::super::layout::{DESCS, DirectionState, source};
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

    /// The responder cannot get at a descriptor's bytes: begins to write them to the fill stream. From now on it uses the bounce ring where they would
    /// be in private memory, and takes the memory for private where the responder has not mapped it.
    #[cold]
    pub(super) fn on_fill_wanted(&mut self, wq: &WorkQueues, direction: &DirectionState) -> Result<(), Fault> {
        let want = direction.fill_want.load(Ordering::Acquire);
        self.fill_seen = want;
        if want == 0 {
            return Ok(());
        }
        let protocol_error =
            || Fault::oldest(WcStatus::GeneralErr, format!("the peer asked for the bytes of descriptor {want}, which is not in flight"));
        let desc = want - 1;
        if desc >= self.tail || self.tail - desc > DESCS {
            return Err(protocol_error());
        }
        let Some(in_flight) = self.in_flight.get_mut((desc % DESCS) as usize) else { return Err(protocol_error()) };
        let InFlight { request, at, source } = *in_flight;
        if request < wq.sq.acked || request >= wq.sq.sent {
            return Err(protocol_error());
        }
        let wqe = wq.sq.get(request);
        let from = direction.fill_from.load(Ordering::Relaxed);
        if wqe.inline || wqe.opcode == Opcode::Read || from > u64::from(wqe.len - at) {
            return Err(protocol_error());
        }
        // All bytes were counted when the descriptor was published; `write_fill` counts those that were not read.
        let missing = u64::from(wqe.len - at) - from;
        // So that it cannot be asked for again.
        in_flight.source = source::BOUNCE;
        match source {
            source::PRIVATE => {
                self.peer_reads = false;
                wq.stats.add(RailCounter::CmaRefused, 1);
                wq.stats.take(RailCounter::TxCma, missing);
            }
            source::MAPPED => {
                // Without it, `write_fill` says what is wrong.
                let pin = wq.pin_local(wqe.lkey, wqe.addr, wqe.len as usize, Access::empty()).ok();
                let id = pin.and_then(|pin| pin.allocation()).map(|(id, _)| id);
                let passed = id.and_then(|id| self.passed.iter_mut().find(|(passed, _)| *passed == id));
                passed.into_iter().for_each(|(_, is_mapped)| *is_mapped = false);
                wq.stats.take(RailCounter::TxMapped, missing);
            }
            _ => return Err(protocol_error()),
        }
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
