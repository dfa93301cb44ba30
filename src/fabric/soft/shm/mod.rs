//! The shared-memory wire of a queue pair, between two processes of one host (or within one).
//!
//! Descriptors and small payloads go through rings in a shared segment. Bulk data is pulled by the responder out of the requester's
//! private memory (`process_vm_readv`), with the requester's help under a grant (`process_vm_writev`), copied out of memory that both map, or,
//! where the kernel refuses the first, goes through a bounce ring. User memory is written by its owner, or with the owner's leave.
//! Driven by the thread that drives the queue pair.

mod control;
mod expose;
mod grant;
mod inline;
mod layout;
mod route;
mod rx;
mod segment;
mod stream;
#[cfg(test)]
mod tests;
mod tx;

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::queue::{Fault, WorkQueues};
use crate::base::fd::OwnedFd;
use crate::base::mem::Shm;
use crate::base::process::Process;
use crate::base::stats::{RailCounter, RailStats};
use crate::fabric::types::WcStatus;
use control::{ControlSocket, Record, Seen};
pub use control::{recv as recv_with_fd, send as send_with_fd};
use expose::Exposed;
pub use expose::revoke;
pub use grant::{Grants, withdraw};
use rx::Rx;
pub use segment::Segment;
use tx::Tx;

/// Turns without anything to do before the control socket is looked at: rare enough to cost nothing, and still within a millisecond.
const IDLE_TURNS: u32 = 1024;

/// The peer's memory that this side maps.
pub struct Maps {
    mapped: Vec<(u32, Shm)>,
}

impl Maps {
    /// Nothing.
    fn none() -> Self {
        Maps { mapped: Vec::new() }
    }

    /// `len` bytes at `offset` of the peer's allocation `id`.
    #[inline]
    fn find(&self, id: u64, offset: u64, len: usize) -> Option<*const u8> {
        let (_, shm) = self.mapped.iter().find(|(have, _)| u64::from(*have) == id)?;
        let offset = usize::try_from(offset).ok()?;
        let end = offset.checked_add(len)?;
        (end <= shm.len()).then(|| shm.ptr(offset, len).cast_const())
    }
}

/// A queue pair's shared-memory wire.
pub struct ShmWire {
    segment: Segment,
    control: ControlSocket,
    tx: Tx,
    rx: Rx,
    maps: Maps,
    idle: u32,
    /// Whether this side was armed and looks for doorbells.
    armed: bool,
    /// Why the control socket ended.
    ended: Option<String>,
}

impl ShmWire {
    /// Takes over a segment that both sides have, and the socket beside it. `unix` if the socket passes descriptors. `stats` is the
    /// queue pair's.
    pub fn new(segment: Segment, socket: OwnedFd, unix: bool, send_slots: usize, stats: RailStats) -> Self {
        let exposed = Exposed::new(send_slots, segment.shm.clone(), segment.me);
        ShmWire {
            tx: Tx::new(segment.me, segment.geometry, exposed, segment.peer.as_ref().map(|peer| peer.pid()), send_slots),
            rx: Rx::new(1 - segment.me, &segment, stats),
            control: ControlSocket::new(socket, unix),
            maps: Maps::none(),
            segment,
            idle: 0,
            armed: false,
            ended: None,
        }
    }

    /// Moves what can be moved, both ways; true if anything was.
    #[inline(never)]
    pub fn progress(&mut self, wq: &mut WorkQueues) -> std::result::Result<bool, Fault> {
        if self.armed {
            self.listen(wq)?;
        }
        // What the peer publishes tells most of what it has accepted, without a look at the line that it writes for that.
        let mut moved = self.rx.receive(wq, &mut self.tx, &self.segment, &mut self.maps)?;
        if self.rx.lacks_memory {
            moved |= self.receive_mapped(wq)?;
        }
        if self.tx.awaits(wq) {
            moved |= self.tx.take_acceptance(wq, &self.segment)?;
        }
        if wq.sq.pending() {
            moved |= self.transmit(wq)?;
        }
        if self.tx.may_share() {
            moved |= self.tx.share(wq, &self.segment);
        }
        if moved {
            self.idle = 0;
            self.armed = false;
            self.wake_peer();
            return Ok(true);
        }
        self.idle = self.idle.wrapping_add(1);
        if self.idle.is_multiple_of(IDLE_TURNS) || self.ended.is_some() || self.segment.peer_closed() {
            self.look_for_the_end(wq)?;
        }
        Ok(false)
    }

    /// Sends what was just posted.
    #[inline(never)]
    pub fn kick(&mut self, wq: &mut WorkQueues) -> std::result::Result<(), Fault> {
        if self.tx.transmit(wq, &self.segment, &self.control)? {
            self.wake_peer();
        }
        Ok(())
    }

    /// Goes on where [`Rx::receive`] stopped for want of memory, which the peer has passed unless it never will.
    #[inline(never)]
    fn receive_mapped(&mut self, wq: &mut WorkQueues) -> std::result::Result<bool, Fault> {
        if self.control.passes_descriptors() {
            self.listen(wq)?;
        }
        let moved = self.rx.receive(wq, &mut self.tx, &self.segment, &mut self.maps)?;
        self.rx.lacks_memory = false;
        Ok(moved)
    }

    /// Sends what could not go when it was posted.
    #[inline(never)]
    fn transmit(&mut self, wq: &mut WorkQueues) -> std::result::Result<bool, Fault> {
        self.tx.transmit(wq, &self.segment, &self.control)
    }

    /// Takes what the control socket holds.
    #[cold]
    #[inline(never)]
    fn listen(&mut self, wq: &WorkQueues) -> std::result::Result<(), Fault> {
        while self.ended.is_none() {
            wq.stats.add(RailCounter::Syscalls, 1);
            match self.control.receive() {
                Seen::Nothing => break,
                Seen::Record(Record::Doorbell) => {}
                Seen::Record(Record::Memory { id, len, fd }) => {
                    if self.maps.mapped.len() >= tx::MAPPED_MAX {
                        return Err(Fault::oldest(WcStatus::GeneralErr, "the peer passed more memory than there is room for"));
                    }
                    let len = usize::try_from(len).unwrap_or(usize::MAX);
                    let shm = Shm::attach(fd, len)
                        .map_err(|e| Fault::oldest(WcStatus::GeneralErr, format!("cannot map the peer's memory: {e}")))?;
                    self.maps.mapped.push((id, shm));
                }
                Seen::End(why) => self.ended = Some(why),
            }
        }
        Ok(())
    }

    /// Once the peer is gone and everything that it left was handled, the queue pair ends.
    #[cold]
    #[inline(never)]
    fn look_for_the_end(&mut self, wq: &mut WorkQueues) -> std::result::Result<(), Fault> {
        self.listen(wq)?;
        if self.ended.is_none() && !self.segment.peer_closed() {
            return Ok(());
        }
        // What the peer did before it went is in the segment by now.
        fence(Ordering::SeqCst);
        let mut moved = self.tx.take_acceptance(wq, &self.segment)? || self.rx.receive(wq, &mut self.tx, &self.segment, &mut self.maps)?;
        // Also behind what was received: a look that found memory lacking is not for a later call to act on.
        if self.rx.lacks_memory {
            moved |= self.receive_mapped(wq)?;
        }
        if moved {
            return Ok(());
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
        // What was just published must be visible before the look at `sleeping`: of this look and the peer's last look at the
        // rings after `arm`, one sees the other's store.
        fence(Ordering::SeqCst);
        if peer.sleeping.load(Ordering::SeqCst) != 0 && peer.sleeping.swap(0, Ordering::SeqCst) != 0 {
            self.control.doorbell();
        }
    }

    /// Whether this side can read the peer's memory.
    pub fn pulls(&self) -> bool {
        self.segment.pulls_allowed
    }

    /// Asks for a doorbell.
    pub fn arm(&mut self) {
        self.armed = true;
        self.segment.side(self.segment.me).sleeping.store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// For epoll.
    pub fn fd(&self) -> RawFd {
        self.control.raw()
    }

    /// The peer's process.
    pub fn peer_process(&self) -> Option<&Arc<Process>> {
        self.segment.peer.as_ref()
    }

    /// Ends the wire: the peer finds everything that was accepted, and counts on nothing else. The result is to be dropped with the
    /// queue pair, which takes as long as the peer writes the part of a copy that it was granted.
    pub fn close(self) -> Option<Grants> {
        self.segment.side(self.segment.me).closed.store(1, Ordering::SeqCst);
        self.tx.retire();
        let peer = self.segment.side(1 - self.segment.me);
        if peer.notify.load(Ordering::Relaxed) != 0 && peer.sleeping.swap(0, Ordering::SeqCst) != 0 {
            self.control.doorbell();
        }
        self.rx.close()
    }
}

/// A status in a segment.
fn status_code(status: WcStatus) -> u64 {
    match status {
        WcStatus::RemAccessErr => 1,
        WcStatus::RemInvReqErr => 2,
        WcStatus::RemOpErr => 3,
        WcStatus::RnrRetryExcErr => 4,
        _ => 5,
    }
}

/// The other way, for whatever the peer stored.
fn status_from(code: u64) -> WcStatus {
    match code {
        1 => WcStatus::RemAccessErr,
        2 => WcStatus::RemInvReqErr,
        3 => WcStatus::RemOpErr,
        4 => WcStatus::RnrRetryExcErr,
        _ => WcStatus::GeneralErr,
    }
}
