//! The receiving end of a comm: announces receives in the sender's CTS FIFO and learns from immediates what landed. `irecv`, `iflush` and
//! `test` are called by the one thread that drives the comm; none waits, allocates, locks or logs unless something went wrong.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::base::stage::{self, Stage};
use crate::base::stats::WaitCause;
use crate::engine::Progress;
use crate::fabric::{Opcode, Payload, PostError, SendRequest};

use super::background::{Guarded, Member, Sleep, Watch};
use super::comm::{Core, too_long};
use super::cts_fifo::{Records, SLOT_SIZE, SLOTS, Slot};
use super::flush::Flusher;
use super::handshake::Established;
use super::landing::{FREE, Landing, RecvSlot};
use super::mr_cache::{MemoryKind, MrHandle, MrTable, Registration};
use super::rails::{ANNOUNCES, Rails, Side};
use super::request::{MAX_RECVS, MAX_REQUESTS, Request, RequestId, Sizes};
use super::wr_id::WrKind;
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
    /// Dropped after the core: its queue pairs are in the core's queues.
    flusher: Option<Flusher>,
    dev: usize,
    /// Until the peer can take announcements.
    early: Option<Box<Early>>,
    /// The group that is being announced: here, so that no call begins with clearing room for the longest.
    announcements: [[u8; SLOT_SIZE]; MAX_RECVS],
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

/// Announcements, in order, that wait until the peer has connected its queue pairs: v4 hands a comm out before.
struct Early(VecDeque<(u64, [u8; SLOT_SIZE], RequestId)>);

impl RecvComm {
    /// From a handshake. Every lane gets as many receives as announced ones can be outstanding, and from then on one for each that came.
    pub(super) fn new(net: Arc<Net>, dev: usize, established: Established<Records>) -> Result<RecvComm> {
        let name = format!("recv comm {} on {} from", established.stats.id(), net.device_name(dev));
        let (mut core, records) = Core::new(established, Side::Recv, name, &net.config);
        for lane in 0..core.rails.lanes() {
            for _ in 0..MAX_REQUESTS {
                core.rails.post_recv(lane).map_err(|e| Error::internal(format!("accept: posting receives: {e}")))?;
            }
        }
        let early = (!core.confirmed() && !core.rails.keep_early_work()).then(|| Box::new(Early(VecDeque::with_capacity(SLOTS))));
        let mrs = net.mrs.clone();
        let landing = Landing { records, slots: Box::new([FREE; SLOTS]), kept: mrs.kept(), mrs };
        let announcements = [[0; SLOT_SIZE]; MAX_RECVS];
        let receiver = Receiver { core, early, landing, tail: 0, flusher: None, dev, announcements };
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
    /// Errors: memory that its `mr` does not cover; more than 1 GiB; a group of no or too many; a peer that is gone or misbehaves, unless a request
    /// is outstanding: then it is `None`, until `test` of one has said so or all are done.
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
    /// Errors: memory that its `mr` does not cover; a peer that is gone or misbehaves, if there is something to do.
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
        if self.early.is_some() {
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
        if self.core.has_failed() {
            return self.core.null_post();
        }
        let n = buffers.len();
        if !(1..=MAX_RECVS).contains(&n) {
            return Err(bad_group(n));
        }
        let mut free = true;
        for (i, buffer) in buffers.iter().enumerate() {
            let sequence = self.tail + i as u64;
            let Some(place) = self.announcements.get_mut(i) else { break };
            announcement(mrs, self.dev, buffer, n)?.encode_to(sequence, place);
            free &= self.landing.is_free(sequence);
        }
        // A lane holds as many receives as slots can be announced, so those need no look.
        let lane = ANNOUNCES;
        if !free || !self.core.requests.has_room() || (self.core.rails.room(lane) as usize) < n {
            return self.null_post();
        }
        let request = Request { n: n as u8, left: n as u8, stripes: 0, sequence: self.tail, bytes: [0; MAX_RECVS] };
        let Some(id) = self.core.requests.insert(request) else { return Ok(None) };
        for (i, buffer) in buffers.iter().enumerate() {
            let sequence = self.tail + i as u64;
            if let Some(slot) = self.landing.slot(sequence) {
                *slot = RecvSlot { busy: true, index: i as u8, request: id, sequence, room: buffer.len as u64, mr: buffer.mr, ..FREE };
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
            return self.core.not_posted(id, WrKind::Cts, lane, error);
        }
        self.tail += n as u64;
        self.core.posted();
        stage::reach(Stage::RecvPosted);
        Ok(Some(id))
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
            self.progress();
            if !self.core.requests.is_done(id)? {
                return self.core.check().map(|()| None);
            }
        }
        self.core.finish(id)
    }

    fn iflush(&mut self, net: &Net, buffers: &[RecvBuffer]) -> Result<Option<RequestId>> {
        let mut last = None;
        for buffer in buffers.iter().filter(|b| b.len > 0) {
            let registration = net.mrs.lookup("iflush", self.dev, buffer.mr, buffer.addr, buffer.len)?;
            if registration.kind() == MemoryKind::Device {
                last = Some((buffer.addr, registration));
            }
        }
        // The NIC keeps its writes in order before a later read of its own, so one READ behind the last of them flushes all.
        let Some((addr, registration)) = last else { return Ok(None) };
        self.core.check()?;
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
        self.progress();
        self.core.null_post()
    }

    #[inline(never)]
    fn progress(&mut self) {
        let Receiver { core, landing, .. } = self;
        let watch = core.progress(WaitCause::PeerNoSend, |core, wr, done| landing.completed(core, wr, done));
        self.follow(watch);
    }

    /// What is to be done behind each poll.
    #[inline]
    fn follow(&mut self, watch: bool) {
        self.landing.check_registrations(&mut self.core);
        if watch {
            self.core.watch(None, "");
        }
        if self.early.is_some() {
            self.release();
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
        self.receiver().progress();
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
fn announcement(mrs: &MrTable, dev: usize, buffer: &RecvBuffer, n: usize) -> Result<Slot> {
    let rkeys = check_buffer(mrs, dev, buffer)?.map_or([0; _], Registration::rkeys);
    Ok(Slot { addr: buffer.addr as u64, size: buffer.len as u64, rkeys, nreqs: n as u32, tag: buffer.tag as u32 })
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
