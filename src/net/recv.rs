//! The receiving end of a comm: announces receives in the sender's CTS FIFO and learns from immediates what landed. `irecv`, `iflush` and
//! `test` are called by the one thread that drives the comm; none waits, allocates, locks or logs unless something went wrong.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::stage::{self, Stage};
use crate::base::stats::{CommCounter, WaitCause};
use crate::engine::Progress;
use crate::fabric::{Completion, Opcode, Payload, PostError, SendRequest};

use super::background::{Guarded, Member, Sleep, Watch};
use super::comm::{Core, LOOK_EVERY, too_long};
use super::cts_fifo::{self, AT_CREDIT, Imm, Records, SLOT_SIZE, SLOTS, Slot};
use super::eager::{Arrival, EAGER_SIZE, Inbox};
use super::flush::Flusher;
use super::handshake::Established;
use super::liveness::Failure;
use super::mr_cache::{MemoryKind, MrHandle, MrTable, Registration};
use super::rails::{ANNOUNCES, Rails, Side, WrId, WrKind};
use super::request::{MAX_RECVS, MAX_REQUESTS, Request, RequestId, Sizes};
use super::{MAX_MESSAGE, Net};

/// A receiving comm. Dropping it closes it.
pub struct RecvComm {
    receiver: Held,
    dev: usize,
    net: Arc<Net>,
}

/// Who moves a receiver along.
// There is one per comm, and most are of the first kind, which is not to be reached by a detour.
#[allow(clippy::large_enum_variant)]
enum Held {
    /// The caller.
    Own(Receiver),
    /// And the device's thread.
    Shared(Guarded<Receiver>),
}

/// The receiving end itself.
pub(super) struct Receiver {
    core: Core,
    landing: Landing,
    /// Sequence number of the next announcement.
    tail: u64,
    /// Receives posted; more than were announced.
    count: u64,
    /// Dropped after the core: its queue pairs are in the core's queues.
    flusher: Option<Flusher>,
    dev: usize,
    /// Until the peer can take announcements.
    early: Option<Box<Early>>,
    /// The group that is being announced: here, so that no call begins with clearing room for the longest.
    announcements: [[u8; SLOT_SIZE]; MAX_RECVS],
}

/// Where messages land, and what is known of them.
struct Landing {
    /// Dropped after the core, which registered it.
    records: Records,
    slots: Box<[RecvSlot; SLOTS]>,
    /// Up to which announcement the sender is known to have read them.
    read: u64,
    inbox: Inbox,
    mrs: Arc<MrTable>,
    dev: usize,
}

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

/// An announced receive.
#[derive(Debug, Clone, Copy)]
struct RecvSlot {
    /// Announced, and its group is not done.
    busy: bool,
    /// Its message has landed.
    landed: bool,
    /// Which message of the request it is.
    index: u8,
    request: RequestId,
    sequence: u64,
    /// Room for so many bytes.
    room: u64,
    /// Size and number of stripes, once known; 0 stripes before.
    size: u64,
    stripes: u32,
    /// Which of them have landed: a bit each.
    seen: u64,
}

/// Half of the FIFO: see [`super::eager`].
pub(super) const HALF_LAP: u64 = SLOTS as u64 / 2;

const FREE: RecvSlot =
    RecvSlot { busy: false, landed: false, index: 0, request: RequestId(0), sequence: 0, room: 0, size: 0, stripes: 0, seen: 0 };

/// Announcements, in order, that wait until the peer has connected its queue pairs: v4 hands a comm out before.
struct Early(VecDeque<(u64, [u8; SLOT_SIZE], RequestId)>);

impl RecvComm {
    /// From a handshake. Every lane gets as many receives as messages can come, and from then on one for each that came.
    pub(super) fn new(net: Arc<Net>, dev: usize, established: Established<Records>) -> Result<RecvComm> {
        let name = format!("recv comm {} on {} from", established.stats.id(), net.device_name(dev));
        let (mut core, records) = Core::new(established, Side::Recv, name, &net.config);
        for lane in 0..core.rails.lanes() {
            for _ in 0..MAX_REQUESTS {
                core.rails.post_recv(lane).map_err(|e| Error::internal(format!("accept: posting receives: {e}")))?;
            }
        }
        let early = (!core.confirmed() && !core.rails.keep_early_work()).then(|| Box::new(Early(VecDeque::with_capacity(SLOTS))));
        let landing =
            Landing { records, slots: Box::new([FREE; SLOTS]), read: 0, inbox: Inbox::new(core.eager()), mrs: net.mrs.clone(), dev };
        let announcements = [[0; SLOT_SIZE]; MAX_RECVS];
        let receiver = Receiver { core, early, landing, tail: 0, count: 0, flusher: None, dev, announcements };
        let device = net.device(dev)?;
        let receiver = match device.background(&net.config)? {
            None => Held::Own(receiver),
            Some(background) => Held::Shared(Guarded::new(receiver, background, Watch::Recv)),
        };
        Ok(RecvComm { receiver, dev, net })
    }

    /// The device it was made on.
    pub fn dev(&self) -> usize {
        self.dev
    }

    /// Announces a group of 1..=8 receives. `None`: too many are outstanding; call again. The memory is the peer's until `test` says that
    /// the request is done.
    ///
    /// Errors: memory that its `mr` does not cover; more than 1 GiB; a group of no or too many; a peer that is gone or misbehaves.
    #[inline(always)]
    pub fn irecv(&mut self, buffers: &[RecvBuffer]) -> Result<Option<RequestId>> {
        match &mut self.receiver {
            Held::Own(receiver) => receiver.irecv(&self.net.mrs, buffers),
            Held::Shared(shared) => irecv_shared(shared, &self.net.mrs, buffers),
        }
    }

    /// Whether a request is done, and then the sizes of what came; that frees it. Any outstanding request, in any order.
    ///
    /// Errors: a request that is not outstanding; a peer that is gone or misbehaves.
    #[inline(always)]
    pub fn test(&mut self, id: RequestId) -> Result<Option<Sizes>> {
        match &mut self.receiver {
            Held::Own(receiver) => receiver.test(id),
            Held::Shared(shared) => test_shared(shared, id),
        }
    }

    /// Makes what was received visible to the device that owns the memory. `None`: nothing to do, which is so for all host memory.
    ///
    /// Errors: memory that its `mr` does not cover; a peer that is gone or misbehaves.
    pub fn iflush(&mut self, buffers: &[RecvBuffer]) -> Result<Option<RequestId>> {
        match &mut self.receiver {
            Held::Own(receiver) => receiver.iflush(&self.net, buffers),
            Held::Shared(shared) => shared.with(|receiver| receiver.iflush(&self.net, buffers)),
        }
    }
}

#[inline(never)]
fn irecv_shared(shared: &Guarded<Receiver>, mrs: &MrTable, buffers: &[RecvBuffer]) -> Result<Option<RequestId>> {
    shared.with(|receiver| receiver.irecv(mrs, buffers))
}

#[inline(never)]
fn test_shared(shared: &Guarded<Receiver>, id: RequestId) -> Result<Option<Sizes>> {
    shared.with(|receiver| receiver.test(id))
}

impl Drop for RecvComm {
    fn drop(&mut self) {
        stage::reach(Stage::Closing);
    }
}

impl Member for Receiver {
    fn step(&mut self) -> Progress {
        if self.core.has_failed() {
            return Progress::Done;
        }
        let Receiver { core, landing, .. } = self;
        let (moved, watch) = core.progress_unasked(WaitCause::PeerNoSend, |core, wr, done| landing.completed(core, wr, done));
        self.follow(watch);
        if moved { Progress::Moved } else { Progress::Idle }
    }

    fn rest(&mut self, sleep: &mut Sleep) -> Progress {
        if self.core.has_failed() {
            return Progress::Done;
        }
        let Receiver { core, landing, .. } = self;
        let (progress, watch) = core.rest(sleep, WaitCause::PeerNoSend, |core, wr, done| landing.completed(core, wr, done));
        self.follow(watch);
        if self.early.is_some() || self.landing.inbox.keeps_quiet() {
            sleep.nap();
        }
        progress
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        self.core.close();
    }
}

impl Receiver {
    #[inline(never)]
    fn irecv(&mut self, mrs: &MrTable, buffers: &[RecvBuffer]) -> Result<Option<RequestId>> {
        self.core.check()?;
        let n = buffers.len();
        if !(1..=MAX_RECVS).contains(&n) {
            return Err(bad_group(n));
        }
        if let ([buffer], true) = (buffers, self.landing.inbox.may_skip())
            && let Some(outcome) = self.irecv_unannounced(mrs, buffer)
        {
            return outcome;
        }
        let first = self.landing.inbox.first();
        let mut free = true;
        for (i, buffer) in buffers.iter().enumerate() {
            let sequence = self.tail + i as u64;
            let Some(place) = self.announcements.get_mut(i) else { break };
            announcement(mrs, self.dev, buffer, n, first)?.encode_to(sequence, place);
            free &= self.landing.is_free(sequence);
        }
        if self.landing.inbox.counts() {
            free &= self.landing.has_places(n);
        }
        // A lane holds as many receives as slots can be announced, so those need no look.
        let lane = ANNOUNCES;
        if !free || !self.core.requests.has_room() || (self.core.rails.room(lane) as usize) < n {
            return self.null_post();
        }
        let request = Request { n: n as u8, left: n as u8, stripes: 0, sequence: self.count, bytes: [0; MAX_RECVS] };
        let Some(id) = self.core.requests.insert(request) else { return Ok(None) };
        for (i, buffer) in buffers.iter().enumerate() {
            let sequence = self.tail + i as u64;
            if let Some(slot) = self.landing.slot(sequence) {
                *slot = RecvSlot { busy: true, index: i as u8, request: id, sequence, room: buffer.len as u64, ..FREE };
            }
        }
        let posted = match (&mut self.early, &self.announcements) {
            (Some(early), all) => {
                early.0.extend((self.tail..).zip(all.iter().take(n)).map(|(sequence, announcement)| (sequence, *announcement, id)));
                Ok(())
            }
            (None, [one, ..]) if n == 1 => announce(&mut self.core, lane, self.tail, one, id),
            (None, all) => announce_group(&mut self.core, lane, self.tail, all.get(..n).unwrap_or_default(), id),
        };
        if let Err(error) = posted {
            self.core.post_failed(WrKind::Cts, lane, error);
            return self.core.check().map(|()| None);
        }
        if self.landing.inbox.counts() {
            self.landing.count(&mut self.core, self.tail, buffers);
        }
        self.tail += n as u64;
        self.posted(n);
        Ok(Some(id))
    }

    #[inline(always)]
    fn posted(&mut self, n: usize) {
        self.core.posted();
        self.count += n as u64;
        stage::reach(Stage::RecvPosted);
    }

    /// Posts a receive of which the sender need not know: its message is here already, or will come anyway. `None` if that is not so.
    #[inline(never)]
    fn irecv_unannounced(&mut self, mrs: &MrTable, buffer: &RecvBuffer) -> Option<Result<Option<RequestId>>> {
        let Receiver { core, landing, early, count, tail, .. } = self;
        if !landing.inbox.has(buffer.tag as u32) {
            return None;
        }
        let come = landing.inbox.come();
        if come.is_none() && !(landing.inbox.may_be_quiet(buffer.len) && *tail < landing.read + HALF_LAP && early.is_none()) {
            return None;
        }
        if let Err(error) = check_buffer(mrs, landing.dev, buffer) {
            return Some(Err(error));
        }
        if !landing.has_places(1) || !core.requests.has_room() {
            return Some(self.null_post());
        }
        let request = Request { n: 1, left: 1, stripes: 0, sequence: *count, bytes: [0; MAX_RECVS] };
        let id = core.requests.insert(request)?;
        match come {
            None => landing.inbox.post(None, id, buffer.addr, buffer.len, buffer.mr),
            Some(arrival) => {
                landing.inbox.took();
                let size = landing.copy(core, arrival, buffer.addr, buffer.len, buffer.mr);
                landing.finish(core, id, size);
                landing.give_back(core);
            }
        }
        self.posted(1);
        Some(self.core.check().map(|()| Some(id)))
    }

    /// Lets go of held announcements once the peer can take them, as many as there is room for.
    #[cold]
    fn release(&mut self) {
        let lane = ANNOUNCES;
        while self.core.confirmed() && self.core.rails.room(lane) > 0 {
            let Some((sequence, announcement, id)) = self.early.as_mut().and_then(|early| early.0.pop_front()) else {
                self.early = None;
                return;
            };
            if let Err(error) = announce(&mut self.core, lane, sequence, &announcement, id) {
                self.core.post_failed(WrKind::Cts, lane, error);
                self.early = None;
                return;
            }
        }
    }

    #[inline(always)]
    fn test(&mut self, id: RequestId) -> Result<Option<Sizes>> {
        if !self.core.requests.is_done(id)? {
            self.core.check()?;
            self.progress(WaitCause::PeerNoSend);
            if !self.core.requests.is_done(id)? {
                return self.core.check().map(|()| None);
            }
        }
        self.core.finish(id)
    }

    fn iflush(&mut self, net: &Net, buffers: &[RecvBuffer]) -> Result<Option<RequestId>> {
        self.core.check()?;
        let mut last = None;
        for buffer in buffers.iter().filter(|b| b.len > 0) {
            let registration = net.mrs.lookup("iflush", self.dev, buffer.mr, buffer.addr, buffer.len)?;
            if registration.kind() == MemoryKind::Device {
                last = Some((buffer.addr, registration));
            }
        }
        // The NIC keeps its writes in order before a later read of its own, so one READ behind the last of them flushes all.
        let Some((addr, registration)) = last else { return Ok(None) };
        let flusher = match &mut self.flusher {
            Some(flusher) => flusher,
            none => none.insert(Flusher::new(net.device(self.dev)?.rails(), &mut self.core)?),
        };
        let posted = flusher.post(&mut self.core, addr as u64, registration);
        if let Ok(Some(_)) = posted {
            self.core.posted();
            stage::reach(Stage::Flush);
        }
        posted
    }

    /// Nothing can be announced now.
    #[inline(never)]
    fn null_post(&mut self) -> Result<Option<RequestId>> {
        self.core.stats.add(CommCounter::NullPosts, 1);
        self.progress(WaitCause::PeerNoSend);
        self.core.check().map(|()| None)
    }

    #[inline(never)]
    fn progress(&mut self, cause: WaitCause) {
        let Receiver { core, landing, .. } = self;
        let watch = core.progress(cause, |core, wr, done| landing.completed(core, wr, done));
        self.follow(watch);
    }

    /// What is to be done behind each poll.
    #[inline]
    fn follow(&mut self, watch: bool) {
        if watch {
            self.core.watch(None, "");
        }
        if self.early.is_some() {
            self.release();
        }
        self.landing.give_back(&mut self.core);
        if self.landing.inbox.keeps_quiet() && self.landing.inbox.polled(LOOK_EVERY) {
            self.landing.tell(&mut self.core);
        }
    }
}

#[cfg(test)]
impl RecvComm {
    fn receiver(&mut self) -> &mut Receiver {
        match &mut self.receiver {
            Held::Own(receiver) => receiver,
            Held::Shared(_) => panic!("a device's thread moves this comm along"),
        }
    }

    pub(super) fn poll_for_test(&mut self) {
        self.receiver().progress(WaitCause::PeerNoSend);
    }

    pub(super) fn inbox_for_test(&mut self) -> &mut Inbox {
        &mut self.receiver().landing.inbox
    }

    pub(super) fn lanes_for_test(&mut self) -> usize {
        self.receiver().core.rails.lanes()
    }

    pub(super) fn core_for_test(&mut self) -> &mut Core {
        &mut self.receiver().core
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

/// What announces a buffer of device `dev`, one of `n`.
#[inline(always)]
fn announcement(mrs: &MrTable, dev: usize, buffer: &RecvBuffer, n: usize, first: u32) -> Result<Slot> {
    let rkeys = check_buffer(mrs, dev, buffer)?.map_or([0; _], Registration::rkeys);
    Ok(Slot { addr: buffer.addr as u64, size: buffer.len as u64, rkeys, nreqs: n as u32, first, tag: buffer.tag as u32 })
}

/// Writes an announcement into the sender's FIFO.
#[inline(always)]
fn announce(
    core: &mut Core,
    lane: usize,
    sequence: u64,
    announcement: &[u8; SLOT_SIZE],
    id: RequestId,
) -> std::result::Result<(), PostError> {
    let request = write_of(&core.rails, lane, sequence, announcement);
    core.rails.post_send(lane, [request], WrKind::Cts, id, false)
}

/// The same for a group, in one posting. Each is a WRITE of its own: only a slot is published as a whole.
#[inline(never)]
fn announce_group(
    core: &mut Core,
    lane: usize,
    sequence: u64,
    announcements: &[[u8; SLOT_SIZE]],
    id: RequestId,
) -> std::result::Result<(), PostError> {
    let mut requests = [write_of(&core.rails, lane, sequence, &[0; SLOT_SIZE]); MAX_RECVS];
    for ((sequence, announcement), request) in (sequence..).zip(announcements).zip(&mut requests) {
        *request = write_of(&core.rails, lane, sequence, announcement);
    }
    let requests = requests.get_mut(..announcements.len()).unwrap_or_default();
    core.rails.post_send_all(lane, requests, WrKind::Cts, id, false)
}

#[inline(always)]
fn write_of<'a>(rails: &Rails, lane: usize, sequence: u64, announcement: &'a [u8; SLOT_SIZE]) -> SendRequest<'a> {
    let (remote_addr, rkey) = rails.remote(lane, (sequence % SLOTS as u64) as usize * SLOT_SIZE);
    SendRequest { wr_id: 0, opcode: Opcode::Write, payload: Payload::Inline(announcement), remote_addr, rkey, imm: 0, signaled: false }
}

impl Landing {
    #[inline]
    fn slot(&mut self, sequence: u64) -> Option<&mut RecvSlot> {
        self.slots.get_mut((sequence % SLOTS as u64) as usize)
    }

    /// Whether announcement `sequence` may be written: the receive a lap before it is done, and the sender has read of it. (It need not have:
    /// an eager message may have served it.)
    #[inline(always)]
    fn is_free(&self, sequence: u64) -> bool {
        let slot = self.slots.get((sequence % SLOTS as u64) as usize);
        slot.is_some_and(|slot| !slot.busy) && sequence < self.read + SLOTS as u64
    }

    /// Whether `n` more receives with the eager tag can be noted.
    #[inline]
    fn has_places(&self, n: usize) -> bool {
        self.inbox.has_room(n as u32, |sequence| {
            let slot = self.slots.get((sequence % SLOTS as u64) as usize);
            slot.is_none_or(|slot| !slot.busy || slot.landed || slot.sequence != sequence)
        })
    }

    /// A group was announced from `tail` on: notes those with the eager tag, and takes what has come for them.
    #[inline(never)]
    fn count(&mut self, core: &mut Core, tail: u64, buffers: &[RecvBuffer]) {
        let Some(tag) = buffers.first().and_then(|first| self.inbox.tag(first.tag as u32)) else { return };
        for (sequence, buffer) in (tail..).zip(buffers).filter(|(_, buffer)| buffer.tag as u32 == tag) {
            self.inbox.post(Some(sequence), RequestId(0), buffer.addr, buffer.len, buffer.mr);
        }
        if let Some(last) = buffers.last() {
            self.inbox.announced(buffers.len(), last.tag as u32, last.len);
        }
        self.deliver(core);
    }

    /// A posting has completed.
    #[inline(always)]
    fn completed(&mut self, core: &mut Core, wr: &WrId, completion: &Completion) {
        if wr.kind == WrKind::Recv {
            return self.received(core, wr, completion);
        }
        match wr.kind {
            WrKind::Flush => {
                if let Some(request) = core.requests.get_mut(wr.id) {
                    request.left = request.left.saturating_sub(1);
                }
            }
            WrKind::Cts => core.accepted(wr.id),
            WrKind::Data | WrKind::Recv => {}
        }
    }

    /// A stripe has landed: says so to its slot, and replaces the receive that it consumed.
    #[inline(always)]
    fn received(&mut self, core: &mut Core, wr: &WrId, completion: &Completion) {
        let lane = usize::from(wr.lane);
        match core.rails.post_recv(lane) {
            // A queue pair that has failed since says so itself, behind what arrived before.
            Ok(()) | Err(PostError::State(_)) => {}
            Err(error) => return core.post_failed(WrKind::Recv, lane, error),
        }
        let Some(imm) = completion.imm else { return core.nonsense(format_args!("a message without an immediate")) };
        let (number, meaning) = Imm::decode(imm);
        if let Imm::Eager(low) = meaning {
            return self.arrived(core, number, low, completion.byte_len);
        }
        let Landing { records, slots, read, .. } = self;
        let Some(slot) = slots.get_mut(usize::from(number)).filter(|slot| slot.busy && !slot.landed) else {
            return unexpected(core, number);
        };
        *read = (*read).max(slot.sequence + 1);
        match meaning {
            Imm::Whole(size) if slot.seen == 0 => {
                slot.size = u64::from(size);
                slot.landed = true;
            }
            Imm::Whole(_) => return whole_after_stripes(core, number),
            Imm::Stripe(index) => {
                if !stripe_landed(core, records, slot, number, index) {
                    return;
                }
            }
            Imm::Eager(_) => {}
        }
        if slot.size > slot.room {
            return too_much(core, slot.size, slot.room, number);
        }
        if slot.landed {
            self.landed(core, number);
        }
    }

    /// A message is whole. Its slot stays taken until its group is done: the sender looks at all of them until then.
    #[inline]
    fn landed(&mut self, core: &mut Core, number: u8) {
        let Some(slot) = self.slots.get(usize::from(number)).copied() else { return };
        let Some(request) = core.requests.get_mut(slot.request) else { return };
        if let Some(size) = request.bytes.get_mut(usize::from(slot.index)) {
            *size = slot.size as u32;
        }
        request.left = request.left.saturating_sub(1);
        if request.left == 0 {
            let first = slot.sequence - u64::from(slot.index);
            for sequence in first..first + u64::from(request.n) {
                if let Some(slot) = self.slot(sequence) {
                    slot.busy = false;
                }
            }
            stage::reach(Stage::RecvDone);
        }
    }

    /// An eager message has landed.
    #[inline(never)]
    fn arrived(&mut self, core: &mut Core, slot: u8, low: u16, len: u32) {
        if !self.inbox.arrive(slot, low, len as usize) {
            return core.nonsense(format_args!("an eager message of {len} bytes in slot {slot}, number {low}"));
        }
        core.moved_beside(len as usize);
        self.deliver(core);
    }

    /// Copies what has come to the receives that it is for.
    fn deliver(&mut self, core: &mut Core) {
        loop {
            let (arrival, place) = match self.inbox.deliver() {
                Ok(Some(delivery)) => delivery,
                Ok(None) => break,
                Err(Arrival { number, .. }) => {
                    return core.nonsense(format_args!("an eager message for receive {number}, which had its message"));
                }
            };
            let Some(sequence) = place.announced else {
                let size = self.copy(core, arrival, place.addr, place.len as usize, place.mr);
                self.finish(core, place.request, size);
                continue;
            };
            let waits = |slot: &&mut RecvSlot| slot.busy && slot.sequence == sequence && !slot.landed && slot.stripes == 0;
            if self.slot(sequence).filter(waits).is_none() {
                return unexpected(core, (sequence % SLOTS as u64) as u8);
            }
            let size = self.copy(core, arrival, place.addr, place.len as usize, place.mr);
            if let Some(slot) = self.slot(sequence) {
                (slot.size, slot.landed) = (u64::from(size), true);
            }
            self.landed(core, (sequence % SLOTS as u64) as u8);
        }
        self.give_back(core);
    }

    /// Copies an eager message to where it belongs; as much of it as there is room for, and how much that is.
    fn copy(&self, core: &mut Core, arrival: Arrival, addr: usize, room: usize, mr: MrHandle) -> u32 {
        let mut bytes = [0; EAGER_SIZE];
        let len = usize::from(arrival.len).min(room);
        let Some(bytes) = bytes.get_mut(..len).filter(|bytes| !bytes.is_empty()) else { return 0 };
        self.records.eager(arrival.slot, bytes);
        if let Err(error) = self.mrs.fill("a receive outstanding", self.dev, mr, addr, bytes) {
            core.fail(Failure::internal(error.to_string()));
        }
        len as u32
    }

    /// The request of an unannounced receive is done.
    fn finish(&self, core: &mut Core, id: RequestId, size: u32) {
        let failed = core.has_failed();
        if let Some(request) = core.requests.get_mut(id).filter(|_| !failed) {
            request.left = 0;
            request.bytes = [0; MAX_RECVS];
            if let Some(bytes) = request.bytes.first_mut() {
                *bytes = size;
            }
            stage::reach(Stage::RecvDone);
        }
    }

    /// Lets the sender know of the eager slots that were emptied, if it is worth it.
    #[inline]
    fn give_back(&mut self, core: &mut Core) {
        if self.inbox.owes() {
            self.say(core);
        }
    }

    /// Lets the sender know of quiet receives if they have waited for long enough.
    #[inline(never)]
    fn tell(&mut self, core: &mut Core) {
        if !core.has_failed() && self.inbox.is_overdue(clock::now()) {
            self.say(core);
        }
    }

    #[inline(never)]
    fn say(&mut self, core: &mut Core) {
        // Without room, this is tried again.
        if core.rails.room(ANNOUNCES) == 0 || core.has_failed() {
            return;
        }
        let news = self.inbox.news().encode();
        let (remote_addr, rkey) = core.rails.remote(ANNOUNCES, AT_CREDIT);
        let write =
            SendRequest { wr_id: 0, opcode: Opcode::Write, payload: Payload::Inline(&news), remote_addr, rkey, imm: 0, signaled: false };
        match core.rails.post_send_all(ANNOUNCES, &mut [write], WrKind::Cts, RequestId(0), false) {
            Ok(()) => self.inbox.told(),
            // As in `received`.
            Err(PostError::State(_)) => {}
            Err(error) => core.post_failed(WrKind::Cts, ANNOUNCES, error),
        }
    }
}

/// A stripe of a message has landed, whose record says of how many; whether they agree.
#[inline(never)]
fn stripe_landed(core: &mut Core, records: &Records, slot: &mut RecvSlot, number: u8, index: u32) -> bool {
    let lanes = core.rails.lanes() as u32;
    let record = records.read(number);
    if record.epoch != cts_fifo::epoch(slot.sequence) || !(1..=lanes).contains(&record.stripes) || index >= record.stripes {
        core.nonsense(format_args!("stripe {index} for slot {number} with {record:?}"));
        return false;
    }
    if slot.stripes == 0 {
        slot.size = record.size;
        slot.stripes = record.stripes;
    }
    if (slot.size, slot.stripes) != (record.size, record.stripes) || slot.seen & 1 << index != 0 {
        core.nonsense(format_args!("stripe {index} for slot {number} twice, or two records of it"));
        return false;
    }
    core.record_received();
    slot.seen |= 1 << index;
    slot.landed = slot.seen.count_ones() == slot.stripes;
    true
}

#[cold]
#[inline(never)]
fn unexpected(core: &mut Core, number: u8) {
    core.nonsense(format_args!("a message for slot {number}, where none is expected"));
}

#[cold]
#[inline(never)]
fn whole_after_stripes(core: &mut Core, number: u8) {
    core.nonsense(format_args!("a whole message for slot {number} after stripes of it"));
}

#[cold]
#[inline(never)]
fn too_much(core: &mut Core, size: u64, room: u64, number: u8) {
    core.nonsense(format_args!("{size} bytes for slot {number}, which has room for {room}"));
}
