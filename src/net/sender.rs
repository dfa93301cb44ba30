//! The sending end of a comm whose peer has answered: looks in the CTS FIFO for what it is clear to send and writes there.
//! [`super::send_comm`] calls it, on the thread that drives the comm; nothing waits, allocates, locks or logs unless something went wrong.

use crate::base::error::Result;
use crate::base::stage::{self, Stage};
use crate::base::stats::WaitCause;
use crate::engine::Progress;
use crate::link::device_thread::WaitSet;
use crate::link::incoming::Imm;
use crate::link::limits::{MAX_MESSAGE, MAX_RECVS};
use crate::link::memory::{MrHandle, MrTable, Registration};
use crate::link::plan::Plan;
use crate::link::queue_pairs::Side;
use crate::link::request::Sizes;
use crate::link::sends::{self, Message, stripe_completed};
use crate::link::wr_id::{RequestId, WrKind};
use crate::link::{Connection, Link, Posted, too_long};

use super::cts_fifo::{CtsFifo, Slot, SlotState, valid_group};
use super::resources::Resources;

/// A sender whose peer has answered.
pub(super) struct Sender {
    pub link: Link,
    /// What the receiver writes its clear-to-sends into.
    pub fifo: CtsFifo,
    /// Sequence number of the group at the head of the FIFO.
    head: u64,
    /// Copy of that group, once all of it has come; `group_len` 0 before.
    group: [Slot; MAX_RECVS],
    group_len: usize,
    /// Which of its slots were used: a bit each.
    used: u8,
    split_min: usize,
    dev: usize,
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.link.close();
    }
}

impl Sender {
    pub fn new(resources: &Resources, connection: Connection<CtsFifo>) -> Sender {
        let name = format!("send comm {} on {} to", connection.stats.id(), resources.device.name());
        let (mut link, fifo) = Link::new(connection, Side::Send, &name, &resources.config);
        // As NCCL's own Socket does it: what is lost with a peer is told with the next request.
        link.qps.complete_when_sent();
        Sender {
            link,
            fifo,
            head: 0,
            group: [Slot::default(); MAX_RECVS],
            group_len: 0,
            used: 0,
            split_min: resources.config.split_min as usize,
            dev: resources.device.index(),
        }
    }

    #[inline(never)]
    pub fn isend(&mut self, mrs: &MrTable, addr: usize, len: usize, tag: i32, mr: MrHandle) -> Result<Option<RequestId>> {
        if self.link.has_failed() {
            return self.link.no_request();
        }
        if len > MAX_MESSAGE {
            return Err(too_long("isend", len));
        }
        let registration = if len > 0 { Some(mrs.lookup("isend", self.dev, mr, addr, len)?) } else { None };
        let index = match self.find(tag) {
            Some(index) => index,
            None => match self.poll_and_find(tag) {
                Some(index) => index,
                None => return self.link.no_request(),
            },
        };
        let Some(slot) = self.group.get(index) else { return Ok(None) };
        let len = len.min(usize::try_from(slot.size).unwrap_or(usize::MAX));
        if slot.addr.checked_add(len as u64).is_none() {
            self.link.protocol_error(format_args!("a receive of {} bytes at {:#x}, past the end of memory", slot.size, slot.addr));
            return self.link.no_request();
        }
        let Some(qp) = self.link.qps.qp_for_fast_path(len, self.split_min) else {
            return self.isend_slow(index, addr, len, registration);
        };
        let sequence = self.head + index as u64;
        let Some(id) = self.link.requests.insert(sends::request(len, 1, sequence)) else { return self.poll_then_no_request() };
        let message = Message { sequence, remote_addr: slot.addr, rkeys: &slot.rkeys, addr, keys: registration, id };
        let write = message.write(&self.link.qps, qp, 0, len, Imm::Whole(len as u32));
        self.link.remember(&message, Plan::whole(len));
        let posted = self.link.qps.post_send(qp, [write], WrKind::Data, id, true);
        self.link.qps.next_qp();
        if let Err(error) = self.link.posted(qp, Posted::Stripe(id, 0), posted) {
            return self.link.not_posted(id, WrKind::Data, qp, error);
        }
        self.posted(index);
        Ok(Some(id))
    }

    /// Sends a message that may take more than one request, or for which there is no room just now.
    #[inline(never)]
    fn isend_slow(&mut self, index: usize, addr: usize, len: usize, registration: Option<&Registration>) -> Result<Option<RequestId>> {
        let Some(slot) = self.group.get(index) else { return Ok(None) };
        let plan = self.link.qps.plan(len, self.split_min);
        if !self.link.qps.has_room(plan) || !self.link.requests.has_room() {
            self.link.qps.unplan(plan);
            return self.poll_then_no_request();
        }
        let sequence = self.head + index as u64;
        let Some(id) = self.link.requests.insert(sends::request(len, plan.stripes, sequence)) else { return Ok(None) };
        let message = Message { sequence, remote_addr: slot.addr, rkeys: &slot.rkeys, addr, keys: registration, id };
        if let Err((qp, error)) = message.post(&mut self.link, plan) {
            return self.link.not_posted(id, WrKind::Data, qp, error);
        }
        self.posted(index);
        Ok(Some(id))
    }

    /// A message for slot `index` of the group was posted: goes on to the next group once all slots of this one were used.
    #[inline(always)]
    fn posted(&mut self, index: usize) {
        self.used |= 1 << index;
        if usize::from(self.used) == (1 << self.group_len) - 1 {
            self.head += self.group_len as u64;
            self.group_len = 0;
            self.used = 0;
        }
        self.link.count_op();
        stage::reach(Stage::SendPosted);
    }

    /// All requests are in use, or a send queue is full.
    #[inline(never)]
    fn poll_then_no_request(&mut self) -> Result<Option<RequestId>> {
        self.progress(WaitCause::Fabric);
        self.link.no_request()
    }

    /// Which of the head group's slots is unused and has this tag.
    #[inline(always)]
    fn find(&mut self, tag: i32) -> Option<usize> {
        if self.group_len == 0 {
            self.load_group();
        }
        let tag = tag as u32;
        let mut i = 0;
        while i < self.group_len && (self.used >> i & 1 != 0 || self.group.get(i).is_none_or(|slot| slot.tag != tag)) {
            i += 1;
        }
        (i < self.group_len).then_some(i)
    }

    /// The same after a poll: the software fabric delivers clear-to-sends only while this side polls.
    #[inline(never)]
    fn poll_and_find(&mut self, tag: i32) -> Option<usize> {
        self.progress(WaitCause::PeerNoReceive);
        if self.link.has_failed() { None } else { self.find(tag) }
    }

    /// Copies the group at the head out of the FIFO, if all of it has come.
    #[inline(always)]
    fn load_group(&mut self) {
        let first = match self.fifo.read(self.head) {
            SlotState::Empty => return,
            SlotState::Ready(slot) => slot,
            SlotState::Invalid(value) => return self.bad_flag(value, self.head),
        };
        if !valid_group(first.nreqs) {
            return self.bad_group(first.nreqs);
        }
        let len = first.nreqs as usize;
        self.group[0] = first;
        if len == 1 || self.load_others(len) {
            self.group_len = len;
        }
    }

    /// Copies the rest of a group; whether it has come.
    #[inline(never)]
    fn load_others(&mut self, len: usize) -> bool {
        for (i, place) in self.group.iter_mut().enumerate().take(len).skip(1) {
            let sequence = self.head + i as u64;
            match self.fifo.read(sequence) {
                SlotState::Ready(slot) if slot.nreqs as usize == len => *place = slot,
                SlotState::Ready(slot) => {
                    self.link.protocol_error(format_args!("groups of {len} and {} in one", slot.nreqs));
                    return false;
                }
                SlotState::Empty => return false,
                SlotState::Invalid(value) => {
                    self.bad_flag(value, sequence);
                    return false;
                }
            }
        }
        true
    }

    #[cold]
    #[inline(never)]
    fn bad_flag(&mut self, value: u64, sequence: u64) {
        self.link.protocol_error(format_args!("ready flag {value} where {} belongs", sequence + 1));
    }

    #[cold]
    #[inline(never)]
    fn bad_group(&mut self, nreqs: u32) {
        self.link.protocol_error(format_args!("a group of {nreqs} receives"));
    }

    #[inline(never)]
    pub fn progress(&mut self, cause: WaitCause) {
        if self.link.progress(cause, stripe_completed) {
            self.report_stall(cause);
        }
    }

    /// A poll of the device's thread.
    pub fn poll(&mut self) -> Progress {
        if self.link.has_failed() {
            return Progress::Done;
        }
        let (moved, due) = self.link.progress_in_background(WaitCause::Fabric, stripe_completed);
        if due {
            self.report_stall(WaitCause::Fabric);
        }
        if moved { Progress::Moved } else { Progress::Idle }
    }

    /// Before the device's thread sleeps.
    pub fn arm(&mut self, wait: &mut WaitSet) -> Progress {
        if self.link.has_failed() {
            return Progress::Done;
        }
        let (progress, due) = self.link.arm_and_drain(wait, WaitCause::Fabric, stripe_completed);
        if due {
            self.report_stall(WaitCause::Fabric);
        }
        progress
    }

    #[cold]
    fn report_stall(&mut self, cause: WaitCause) {
        let next = self.head + u64::from(self.used.count_ones());
        let why = if self.group_len > 0 { "with this tag; there is one with another" } else { "" };
        // A caller that only tests requests has no further send to post.
        self.link.report_stall((cause == WaitCause::PeerNoReceive).then_some(next), why);
    }

    #[inline(always)]
    pub fn test(&mut self, id: RequestId) -> Result<Option<Sizes>> {
        if !self.link.requests.is_done(id)? {
            self.link.check()?;
            self.progress(WaitCause::Fabric);
        }
        match self.link.finish(id)? {
            None => self.link.check().map(|()| None),
            done => Ok(done),
        }
    }
}
