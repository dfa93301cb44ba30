//! The receiving end of a comm: posts clear-to-sends into the sender's CTS FIFO and learns from immediates what came ([`super::recv_state`]).
//! [`super::recv_comm`] calls it, on the thread that drives the comm; nothing waits, allocates, locks or logs unless something went wrong.

use std::collections::VecDeque;
use std::time::Duration;

use crate::base::error::{Error, Result};
use crate::base::stage::{self, Stage};
use crate::base::stats::WaitCause;
use crate::engine::Progress;
use crate::fabric::{Opcode, Payload, PostError};
use crate::link::device_thread::{Member, WaitSet};
use crate::link::incoming::{IncomingMessage, Records};
use crate::link::limits::{MAX_MESSAGE, MAX_RECVS, MAX_REQUESTS, SLOT_SIZE, SLOTS};
use crate::link::memory::{MemoryKind, MrHandle, MrTable, Registration};
use crate::link::queue_pairs::{QueuePairs, Side, Wr};
use crate::link::request::{Request, Sizes};
use crate::link::wr_id::{RequestId, WrKind};
use crate::link::{Connection, Link, too_long};

use super::cts_fifo::Slot;
use super::flush::Flusher;
use super::recv_state::{FREE, RecvSlot, RecvState};
use super::resources::Resources;

/// A receiver whose peer has connected, or is about to (v4).
pub(super) struct Receiver {
    pub link: Link,
    state: RecvState,
    /// Sequence number of the next clear-to-send.
    tail: u64,
    /// Dropped after the link: its queue pairs are in the link's queues.
    flusher: Option<Flusher>,
    dev: usize,
    /// v4 only: clear-to-sends that wait until the peer has connected its queue pairs.
    early: Option<Box<Early>>,
    /// Clear-to-sends, by their number: those of the group that is being posted, or, where a rail may fail, of all receives outstanding.
    encoded: Box<[[u8; SLOT_SIZE]]>,
    /// Which is the next to be posted once more, as it may have been lost with a rail: no new one before these.
    repost: Option<u64>,
}

/// Clear-to-sends, in order, that wait until the peer has connected its queue pairs: v4 hands a comm out before.
struct Early(VecDeque<(u64, [u8; SLOT_SIZE], RequestId)>);

/// One of the memory ranges of a group of receives.
#[derive(Debug, Clone, Copy)]
pub struct RecvBuffer {
    /// First byte.
    pub addr: usize,
    /// Bytes; 0 is legal and needs no memory handle.
    pub len: usize,
    /// Which send it is for.
    pub tag: i32,
    /// The registration that covers it.
    pub mr: MrHandle,
}

impl Member for Receiver {
    fn poll(&mut self) -> Progress {
        if self.link.has_failed() {
            return Progress::Done;
        }
        self.send_held_cts();
        let Receiver { link, state, .. } = self;
        let (moved, due) = link.progress_in_background(WaitCause::PeerNoSend, |link, wr, done| state.completed(link, wr, done));
        self.after_poll(due);
        if moved { Progress::Moved } else { Progress::Idle }
    }

    fn arm(&mut self, wait: &mut WaitSet) -> Progress {
        if self.link.has_failed() {
            return Progress::Done;
        }
        let Receiver { link, state, .. } = self;
        let (progress, due) = link.arm_and_drain(wait, WaitCause::PeerNoSend, |link, wr, done| state.completed(link, wr, done));
        self.after_poll(due);
        if self.early.is_some() {
            wait.poll_soon();
        }
        progress
    }

    fn look_at_rails(&mut self) -> Option<Duration> {
        self.link.rails_wait_within()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.link.close();
    }
}

impl Receiver {
    /// From a handshake. Every queue pair gets as many receive requests as there can be receives outstanding, and from then on one for each that
    /// was consumed.
    pub fn new(resources: &Resources, connection: Connection<Records>) -> Result<Receiver> {
        let name = format!("recv comm {} on {} from", connection.stats.id(), resources.device.name());
        let (mut link, records) = Link::new(connection, Side::Recv, &name, &resources.config);
        for qp in 0..link.qps.len() {
            for _ in 0..MAX_REQUESTS {
                link.qps.post_recv(qp).map_err(|e| Error::internal(format!("accept: posting receives: {e}")))?;
            }
        }
        let early = (!link.confirmed() && !link.qps.keeps_early_requests).then(|| Box::new(Early(VecDeque::with_capacity(SLOTS))));
        let mrs = resources.mrs.clone();
        let state =
            RecvState { records, slots: Box::new([FREE; SLOTS]), shared_deregs: mrs.shared_deregs(), mrs, unused: 0, held: 0, come: 0 };
        let encoded = vec![[0; SLOT_SIZE]; if link.has_failover() { SLOTS } else { MAX_RECVS }].into_boxed_slice();
        Ok(Receiver { link, early, state, tail: 0, flusher: None, dev: resources.device.index(), encoded, repost: None })
    }

    #[inline(never)]
    pub fn irecv(&mut self, mrs: &MrTable, buffers: &[RecvBuffer]) -> Result<Option<RequestId>> {
        if self.link.has_failed() {
            return self.link.no_request();
        }
        let n = buffers.len();
        if !(1..=MAX_RECVS).contains(&n) {
            return Err(bad_group(n));
        }
        let mut free = self.repost.is_none();
        for (i, buffer) in buffers.iter().enumerate() {
            let sequence = self.tail + i as u64;
            let cts = cts_of(mrs, self.dev, buffer, n)?;
            // The one of a lap before may be needed still.
            free &= self.state.is_free(sequence);
            if free && let Some(place) = place(&mut self.encoded, sequence) {
                cts.encode_to(sequence, place);
            }
        }
        // A queue pair has as many receives posted as there can be outstanding, so none is missing there.
        let ordered = self.link.qps.ordered();
        if !free || !self.link.requests.has_room() || (self.link.qps.room(ordered) as usize) < n {
            return self.poll_then_no_request();
        }
        let request = Request { n: n as u8, left: n as u8, pending_stripes: 0, sequence: self.tail, bytes: [0; MAX_RECVS] };
        let Some(id) = self.link.requests.insert(request) else { return Ok(None) };
        for (i, buffer) in buffers.iter().enumerate() {
            let sequence = self.tail + i as u64;
            if let Some(slot) = self.state.slot(sequence) {
                let (room, incoming) = (buffer.len as u64, IncomingMessage::NONE);
                *slot = RecvSlot { busy: true, index: i as u8, request: id, sequence, room, mr: buffer.mr, incoming };
            }
        }
        let encoded = &mut self.encoded;
        let posted = match &mut self.early {
            Some(early) => {
                early.0.extend((self.tail..).take(n).filter_map(|sequence| Some((sequence, *place(encoded, sequence)?, id))));
                Ok(())
            }
            None => match place(encoded, self.tail) {
                Some(one) if n == 1 && self.state.can_hold_cts(&self.link) => post_held_cts(&mut self.link, self.tail, one, id),
                Some(one) if n == 1 => post_cts(&mut self.link, self.tail, one, id),
                _ => post_cts_group(&mut self.link, self.tail, encoded, n, id),
            },
        };
        if let Err(error) = posted.or_else(|error| self.link.refused(ordered, error)) {
            return self.link.not_posted(id, WrKind::Cts, ordered, error);
        }
        self.tail += n as u64;
        self.state.unused += n as u32;
        self.link.count_op();
        stage::reach(Stage::RecvPosted);
        Ok(Some(id))
    }

    /// Posts the clear-to-sends that waited for the peer, once it can take them, as many as there is room for.
    #[cold]
    fn post_early(&mut self) {
        while self.link.confirmed() && self.link.qps.room(self.link.qps.ordered()) > 0 {
            let Some((sequence, slot, id)) = self.early.as_mut().and_then(|early| early.0.pop_front()) else {
                self.early = None;
                return;
            };
            if let Err(error) = post_cts(&mut self.link, sequence, &slot, id) {
                self.link.post_failed(WrKind::Cts, self.link.qps.ordered(), error);
                self.early = None;
                return;
            }
        }
    }

    /// Posts clear-to-sends once more, in order, as many as there is room for. What the sender has of them already it finds unchanged.
    #[cold]
    fn repost(&mut self) {
        while let Some(sequence) = self.repost.filter(|sequence| *sequence < self.tail) {
            let ordered = self.link.qps.ordered();
            let outstanding = self.state.slot(sequence).filter(|slot| slot.busy && slot.sequence == sequence).map(|slot| slot.request);
            if let (Some(id), Some(cts)) = (outstanding, place(&mut self.encoded, sequence)) {
                if self.link.qps.room(ordered) == 0 {
                    return;
                }
                let posted = post_cts(&mut self.link, sequence, cts, id);
                if let Err(error) = posted.or_else(|error| self.link.refused(ordered, error)) {
                    return self.link.post_failed(WrKind::Cts, ordered, error);
                }
            }
            self.repost = Some(sequence + 1);
        }
        self.repost = None;
    }

    #[inline(always)]
    pub fn test(&mut self, id: RequestId) -> Result<Option<Sizes>> {
        if !self.link.requests.is_done(id)? {
            self.link.check()?;
            self.progress();
        }
        match self.link.finish(id)? {
            None => self.link.check().map(|()| None),
            done => Ok(done),
        }
    }

    pub fn iflush(&mut self, resources: &Resources, buffers: &[RecvBuffer]) -> Result<Option<RequestId>> {
        let mut last = None;
        for buffer in buffers.iter().filter(|b| b.len > 0) {
            let registration = resources.mrs.lookup("iflush", self.dev, buffer.mr, buffer.addr, buffer.len)?;
            if registration.kind() == MemoryKind::Device {
                last = Some((buffer.addr, registration));
            }
        }
        // The NIC keeps its writes in order before a later read of its own, so one READ after the last of them flushes all.
        let Some((addr, registration)) = last else { return Ok(None) };
        // A failure is returned even with requests outstanding, unlike in `irecv`: no request would mean that there is nothing to flush.
        self.link.check()?;
        let flusher = match &mut self.flusher {
            Some(flusher) => flusher,
            none => none.insert(Flusher::new(resources.device.rails(), &mut self.link)?),
        };
        let posted = flusher.post(&mut self.link, addr as u64, registration);
        if let Ok(Some(_)) = posted {
            self.link.count_op();
            stage::reach(Stage::Flush);
        }
        posted
    }

    /// Nothing can be posted now.
    #[inline(never)]
    fn poll_then_no_request(&mut self) -> Result<Option<RequestId>> {
        self.progress();
        self.link.no_request()
    }

    #[inline(never)]
    pub fn progress(&mut self) {
        self.send_held_cts();
        let Receiver { link, state, .. } = self;
        let due = link.progress(WaitCause::PeerNoSend, |link, wr, done| state.completed(link, wr, done));
        self.after_poll(due);
    }

    /// Sends the clear-to-sends that are held, if the sender may need them soon.
    #[inline(always)]
    fn send_held_cts(&mut self) {
        if self.state.needs_held_cts() {
            self.link.qps.send_held(self.link.qps.ordered());
        }
    }

    /// What is to be done after each poll; `due`: look for what stalls.
    #[inline]
    fn after_poll(&mut self, due: bool) {
        self.state.check_registrations(&mut self.link);
        if self.link.ordered_moved() {
            self.repost = Some(self.tail.saturating_sub(SLOTS as u64));
        }
        if self.repost.is_some() {
            self.repost();
        }
        if due {
            self.link.report_stall(None, "");
        }
        if self.early.is_some() {
            self.post_early();
        }
    }
}

#[cold]
fn bad_group(n: usize) -> Error {
    Error::internal(format!("irecv: a group of {n}; 1..={MAX_RECVS} are possible (maxRecvs)"))
}

/// The registration of a buffer of device `dev`; `None` for one without bytes.
#[inline(always)]
fn check_buffer<'a>(mrs: &'a MrTable, dev: usize, buffer: &RecvBuffer) -> Result<Option<&'a Registration>> {
    match buffer.len {
        0 => Ok(None),
        1..=MAX_MESSAGE => mrs.lookup("irecv", dev, buffer.mr, buffer.addr, buffer.len).map(Some),
        _ => Err(too_long("irecv", buffer.len)),
    }
}

/// The clear-to-send for a buffer of device `dev`, one of `n`.
#[inline(always)]
fn cts_of(mrs: &MrTable, dev: usize, buffer: &RecvBuffer, n: usize) -> Result<Slot> {
    let rkeys = check_buffer(mrs, dev, buffer)?.map_or([0; _], Registration::rkeys);
    Ok(Slot { addr: buffer.addr as u64, size: buffer.len as u64, rkeys, nreqs: n as u32, tag: buffer.tag as u32 })
}

/// Writes a clear-to-send into the sender's FIFO.
#[inline(always)]
fn post_cts(link: &mut Link, sequence: u64, slot: &[u8; SLOT_SIZE], id: RequestId) -> std::result::Result<(), PostError> {
    let write = cts_write(&link.qps, sequence, slot);
    link.qps.post_send(link.qps.ordered(), [write], WrKind::Cts, id, false)
}

/// The same for one that the sender does not need yet.
#[inline(always)]
fn post_held_cts(link: &mut Link, sequence: u64, slot: &[u8; SLOT_SIZE], id: RequestId) -> std::result::Result<(), PostError> {
    let write = cts_write(&link.qps, sequence, slot);
    link.qps.post_held(link.qps.ordered(), write, WrKind::Cts, id)
}

/// The same for a group, in one posting. Each is a WRITE of its own: only a slot is published as a whole.
#[inline(never)]
fn post_cts_group(
    link: &mut Link,
    sequence: u64,
    encoded: &[[u8; SLOT_SIZE]],
    n: usize,
    id: RequestId,
) -> std::result::Result<(), PostError> {
    let mut writes = [cts_write(&link.qps, sequence, &[0; SLOT_SIZE]); MAX_RECVS];
    for (sequence, write) in (sequence..).zip(writes.iter_mut().take(n)) {
        let Some(cts) = encoded.get(sequence as usize & (encoded.len() - 1)) else { continue };
        *write = cts_write(&link.qps, sequence, cts);
    }
    link.qps.post_send_group(link.qps.ordered(), writes.get(..n).unwrap_or_default(), WrKind::Cts, id)
}

/// Where a clear-to-send is kept.
#[inline(always)]
fn place(encoded: &mut [[u8; SLOT_SIZE]], sequence: u64) -> Option<&mut [u8; SLOT_SIZE]> {
    // A power of two.
    let at = sequence as usize & encoded.len().wrapping_sub(1);
    encoded.get_mut(at)
}

#[inline(always)]
fn cts_write<'a>(qps: &QueuePairs, sequence: u64, slot: &'a [u8; SLOT_SIZE]) -> Wr<'a> {
    let remote = qps.remote(qps.ordered(), (sequence % SLOTS as u64) as usize * SLOT_SIZE);
    Wr { opcode: Opcode::Write, payload: Payload::Inline(slot), remote, imm: 0 }
}
