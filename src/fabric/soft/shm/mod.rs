//! The shared-memory wire of a queue pair, between two processes of one host, or within one. Driven by the thread that drives the queue pair.
//!
//! Each side is the requester of its own requests ([`requester`]) and the responder of the peer's ([`responder`]). Descriptors and small payloads go through
//! rings in a shared segment ([`layout`]). Bulk data takes one of three paths:
//!
//! * CMA (cross-memory attach): the responder reads the requester's private memory (`process_vm_readv`), and the requester writes parts of it
//!   under a grant (`process_vm_writev`);
//! * the bounce ring: the requester copies in, the responder copies out; where the kernel refuses CMA, or where two copies are faster;
//! * mapped memory: the responder copies out of an allocation of the library that both sides map, or the requester into [`memory::SharedPages`]; where
//!   both could, whoever has less to do.
//!
//! User memory is written by its owner's process, or by the peer under a grant of the owner.

mod control;
mod copy_path;
mod expose;
mod grant;
mod inline;
mod layout;
mod requester;
mod responder;
mod segment;
mod stream;
#[cfg(test)]
mod tests;

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::memory;
use super::work_queues::{Fault, WorkQueues, is_lack};
use crate::base;
use crate::base::error::Error;
use crate::base::fd::OwnedFd;
use crate::base::log::{self, log_info};
use crate::base::mem::Shm;
use crate::base::process::Process;
use crate::base::stats::{RailCounter, RailStats};
use crate::fabric::types::WcStatus;
use control::{ControlEvent, ControlSocket, Record};
pub use control::{recv as recv_with_fd, send as send_with_fd};
use expose::Exposed;
pub use expose::end_peer_reads;
pub use grant::{Grants, end_peer_writes};
use requester::Requester;
use responder::{Offer, Responder};
pub use segment::Segment;

/// Polls without anything to do until the control socket is read: rare enough to cost nothing, and still within a millisecond.
const IDLE_POLLS: u32 = 1024;

/// The same while it is armed, as the socket then ends a sleep whatever is in it.
const ARMED_POLLS: u32 = 16;

/// Allocations that the peer has passed, by id.
pub struct PeerMappings {
    /// None: one that could not be had.
    mapped: Vec<(u32, Option<Shm>)>,
}

impl PeerMappings {
    /// Nothing.
    fn none() -> Self {
        PeerMappings { mapped: Vec::new() }
    }

    /// The peer's allocation `id`, if it was passed; `None` inside: it cannot be had.
    #[inline]
    fn get(&self, id: u64) -> Option<&Option<Shm>> {
        self.mapped.iter().find(|(have, _)| u64::from(*have) == id).map(|(_, shm)| shm)
    }

    /// Whether the peer's allocation `id` was passed, and cannot be had.
    fn lacks(&self, id: u64) -> bool {
        self.get(id).is_some_and(Option::is_none)
    }

    /// `len` bytes at `offset` of the peer's allocation `id`.
    #[inline]
    fn find(&self, id: u64, offset: u64, len: usize) -> Option<*const u8> {
        let shm = self.get(id)?.as_ref()?;
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(len)?;
        (end <= shm.len()).then(|| shm.ptr(offset, len).cast_const())
    }
}

/// A queue pair's shared-memory wire.
pub struct ShmWire {
    segment: Segment,
    control: ControlSocket,
    tx: Requester,
    rx: Responder,
    maps: PeerMappings,
    idle: u32,
    /// Whether this side was armed: a doorbell may come.
    armed: bool,
    /// The control socket is watched, for good.
    watched: bool,
    /// Why the control socket ended, if it has.
    ended: Option<String>,
}

impl ShmWire {
    /// Over a segment that both sides have, and its control socket. `unix` if the socket passes descriptors. `stats` are the queue pair's.
    pub fn new(segment: Segment, socket: OwnedFd, unix: bool, send_slots: usize, stats: RailStats) -> Self {
        let exposed = Exposed::new(send_slots, segment.shm.clone(), segment.me);
        ShmWire {
            tx: Requester::new(segment.me, segment.geometry, exposed, segment.peer.as_ref().map(|peer| peer.pid()), send_slots),
            rx: Responder::new(1 - segment.me, &segment, stats),
            control: ControlSocket::new(socket, unix),
            maps: PeerMappings::none(),
            segment,
            idle: 0,
            armed: false,
            watched: false,
            ended: None,
        }
    }

    /// Receives, polls acks and sends, as far as possible without waiting; true if anything moved, or a doorbell was read: then, who is to sleep arms
    /// again.
    #[inline(never)]
    pub fn progress(&mut self, wq: &mut WorkQueues) -> std::result::Result<bool, Fault> {
        // A doorbell that is read here may have been for something that was received before: without another arm, nothing later rings one.
        let woken = self.armed && self.may_be_woken() && self.poll_control(wq)?;
        // The peer's descriptors carry acks, so that often its ack word, which costs a cache miss, need not be loaded.
        let mut moved = self.rx.receive(wq, &mut self.tx, &self.segment, &mut self.maps)?;
        if self.rx.needs_mapping {
            moved |= self.receive_mapped(wq)?;
        }
        if self.tx.has_unacked(wq) {
            moved |= self.tx.poll_acks(wq, &self.segment)?;
        }
        if wq.sq.pending() {
            moved |= self.transmit(wq)?;
        }
        if self.tx.may_claim() {
            moved |= self.tx.write_claimed_part(wq, &self.segment);
        }
        if moved {
            if let Some(offer) = self.rx.offer.take() {
                self.pass_target(offer);
            }
            self.idle = 0;
            self.armed = false;
            self.wake_peer();
            return Ok(true);
        }
        self.idle = self.idle.wrapping_add(1);
        if self.idle.is_multiple_of(IDLE_POLLS) || self.ended.is_some() || self.segment.peer_closed() {
            return Ok(self.check_ended(wq)? || woken);
        }
        Ok(woken)
    }

    /// Whether a look at the control socket, which is a system call, is due while this side is armed: the peer has rung the doorbell, or there may be something
    /// else in the socket, which keeps it readable.
    #[inline]
    fn may_be_woken(&self) -> bool {
        self.segment.side(self.segment.me).sleeping.load(Ordering::Relaxed) == 0 || self.idle.is_multiple_of(ARMED_POLLS)
    }

    /// Sends requests that were just posted.
    #[inline(never)]
    pub fn kick(&mut self, wq: &mut WorkQueues) -> std::result::Result<(), Fault> {
        if self.tx.transmit(wq, &self.segment, &self.control)? {
            self.wake_peer();
        }
        Ok(())
    }

    /// Goes on where [`Responder::receive`] stopped at a descriptor that names memory not mapped yet. A record with that memory waits in the control
    /// socket, unless the peer made a protocol error.
    #[inline(never)]
    fn receive_mapped(&mut self, wq: &mut WorkQueues) -> std::result::Result<bool, Fault> {
        let woken = self.control.passes_descriptors() && self.poll_control(wq)?;
        let moved = self.rx.receive(wq, &mut self.tx, &self.segment, &mut self.maps)?;
        self.rx.needs_mapping = false;
        Ok(moved || woken)
    }

    /// Sends requests for which there was no room when they were posted.
    #[inline(never)]
    fn transmit(&mut self, wq: &mut WorkQueues) -> std::result::Result<bool, Fault> {
        self.tx.transmit(wq, &self.segment, &self.control)
    }

    /// Reads the control socket until nothing is left; true if a doorbell was in it, after which the peer takes this side to be awake.
    #[cold]
    #[inline(never)]
    fn poll_control(&mut self, wq: &WorkQueues) -> std::result::Result<bool, Fault> {
        let mut woken = false;
        while self.ended.is_none() {
            wq.stats.add(RailCounter::Syscalls, 1);
            match self.control.receive() {
                ControlEvent::Nothing => break,
                ControlEvent::Record(Record::Doorbell) => woken = true,
                ControlEvent::Record(Record::Memory(passed)) => {
                    let id = passed.id;
                    let shm = match passed.map() {
                        Ok(shm) => Some(shm),
                        Err(Error::System { word, .. }) if is_lack(&word) => None,
                        Err(e) => return Err(Fault::oldest(WcStatus::GeneralErr, format!("cannot map the peer's memory: {e}"))),
                    };
                    self.add_mapping(id, shm)?;
                }
                ControlEvent::Lacking(id) => self.add_mapping(id, None)?,
                ControlEvent::Record(Record::Target(passed)) => {
                    let (key, addr) = (passed.id, passed.addr);
                    if self.tx.targets() >= requester::MAPPED_MAX {
                        return Err(too_much());
                    }
                    // Without it, its bytes go like others.
                    if let Ok(shm) = passed.map() {
                        self.tx.add_target(key, addr, shm, wq);
                    }
                }
                ControlEvent::End(why) => self.ended = Some(why),
            }
        }
        Ok(woken)
    }

    /// The peer has passed an allocation; `None`: it cannot be had here.
    fn add_mapping(&mut self, id: u32, shm: Option<Shm>) -> std::result::Result<(), Fault> {
        if self.maps.mapped.len() >= requester::MAPPED_MAX {
            return Err(too_much());
        }
        if shm.is_none() {
            log_info!(
                log::NET,
                "memory that the peer passes cannot be mapped, for want of a descriptor or of memory; its bytes go like others"
            );
        }
        self.maps.mapped.push((id, shm));
        Ok(())
    }

    /// Lets the peer map memory of ours that it writes to. Where that cannot be, bytes go as before; if the peer has gone, others notice.
    #[cold]
    #[inline(never)]
    fn pass_target(&mut self, offer: Offer) {
        let passed = match memory::by_id(offer.allocation) {
            Some(allocation) if self.control.passes_descriptors() => self.control.pass_target(offer.key, &allocation.shm).unwrap_or(true),
            _ => true,
        };
        self.rx.offered(offer, passed);
    }

    /// Fails the queue pair if the peer is gone and everything that it published before was handled; true if anything moved.
    #[cold]
    #[inline(never)]
    fn check_ended(&mut self, wq: &mut WorkQueues) -> std::result::Result<bool, Fault> {
        let woken = self.poll_control(wq)?;
        if self.ended.is_none() && !self.segment.peer_closed() {
            return Ok(woken);
        }
        // Everything that the peer did before it went is visible in the segment now.
        fence(Ordering::SeqCst);
        let mut moved = self.tx.poll_acks(wq, &self.segment)? || self.rx.receive(wq, &mut self.tx, &self.segment, &mut self.maps)?;
        // Even if something was received: `needs_mapping` is not left set for a later call.
        if self.rx.needs_mapping {
            moved |= self.receive_mapped(wq)?;
        }
        if moved {
            return Ok(true);
        }
        let why = match &self.ended {
            Some(why) if !self.segment.peer_closed() => format!("the peer process is gone: {why}"),
            _ => "the peer closed its queue pair".to_string(),
        };
        Err(Fault::oldest(WcStatus::RetryExcErr, why))
    }

    /// Wakes the peer if it sleeps.
    #[inline]
    fn wake_peer(&self) {
        let peer = self.segment.side(1 - self.segment.me);
        if peer.notify.load(Ordering::Relaxed) == 0 {
            return;
        }
        // What was just published must be visible before `sleeping` is loaded. After `arm` the peer stores `sleeping` and then polls the rings once
        // more: so either that poll sees what was published here, or this load sees that it sleeps.
        fence(Ordering::SeqCst);
        if peer.sleeping.load(Ordering::SeqCst) != 0 && peer.sleeping.swap(0, Ordering::SeqCst) != 0 {
            self.control.doorbell();
        }
    }

    /// Whether the peer maps memory that it is passed.
    pub fn maps_memory(&self) -> bool {
        self.control.passes_descriptors()
    }

    /// Whether this side can read the peer's memory.
    pub fn can_read_peer(&self) -> bool {
        self.segment.can_read_peer
    }

    /// Asks the peer for a doorbell. `watch` is called with where it comes, once.
    pub fn arm(&mut self, watch: impl FnOnce(RawFd) -> base::error::Result<()>) -> base::error::Result<()> {
        self.armed = true;
        self.segment.side(self.segment.me).sleeping.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if !self.watched {
            watch(self.control.raw())?;
            self.watched = true;
        }
        Ok(())
    }

    /// The peer's process.
    pub fn peer_process(&self) -> Option<&Arc<Process>> {
        self.segment.peer.as_ref()
    }

    /// Closes the wire. The peer still finds every ack, and relies on nothing else. The result are grants under which the peer may still be
    /// writing a part: the caller drops them with the queue pair, or once the peer is gone. The drop waits for the peer.
    pub fn close(self) -> Grants {
        self.segment.side(self.segment.me).closed.store(1, Ordering::SeqCst);
        self.tx.retire();
        let peer = self.segment.side(1 - self.segment.me);
        if peer.notify.load(Ordering::Relaxed) != 0 && peer.sleeping.swap(0, Ordering::SeqCst) != 0 {
            self.control.doorbell();
        }
        self.rx.close()
    }
}

fn too_much() -> Fault {
    Fault::oldest(WcStatus::GeneralErr, "the peer passed more memory than there is room for")
}

/// The number of a status in a segment.
fn status_code(status: WcStatus) -> u64 {
    match status {
        WcStatus::RemAccessErr => 1,
        WcStatus::RemInvReqErr => 2,
        WcStatus::RemOpErr => 3,
        WcStatus::RnrRetryExcErr => 4,
        _ => 5,
    }
}

/// The status of a number that the peer stored.
fn status_from(code: u64) -> WcStatus {
    match code {
        1 => WcStatus::RemAccessErr,
        2 => WcStatus::RemInvReqErr,
        3 => WcStatus::RemOpErr,
        4 => WcStatus::RnrRetryExcErr,
        _ => WcStatus::GeneralErr,
    }
}
