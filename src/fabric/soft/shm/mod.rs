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
mod stream;
#[cfg(test)]
mod tests;
mod tx;

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use once_cell::race::OnceBox;

use super::queue::{Core, Fault};
use crate::base::config::CrossMemory;
use crate::base::error::{Error, Result};
use crate::base::mem::Shm;
use crate::base::rand;
use crate::base::stats::{RailCounter, RailStats};
use crate::fabric::types::WcStatus;
use control::{ControlSocket, Record, Seen};
pub use control::{recv as recv_with_fd, send as send_with_fd};
use expose::Exposed;
pub use expose::revoke;
pub use grant::{Offers, withdraw};
use layout::{Control, Desc, GRANTS, Geometry, Grant, Lane, MAGIC, Side};
use rx::Rx;
use tx::Tx;

/// Turns without anything to do before the control socket is looked at: rare enough to cost nothing, and still within a millisecond.
const IDLE_TURNS: u32 = 1024;

/// 16 random bytes at a fixed place of this process's private memory: whoever reads them there has found the right process.
/// Made without a lock, which another thread's fork could leave locked.
fn cookie() -> &'static [AtomicU64; 2] {
    static COOKIE: OnceBox<[AtomicU64; 2]> = OnceBox::new();
    COOKIE.get_or_init(|| {
        let mut bytes = [0u8; 16];
        // Without randomness the cookie proves nothing to a hostile peer, but one of this user could read our memory anyway.
        let _ = rand::fill(&mut bytes);
        let (a, b) = bytes.split_at(8);
        let word = |half: &[u8]| AtomicU64::new(half.iter().fold(0, |w, b| w << 8 | u64::from(*b)));
        Box::new([word(a), word(b)])
    })
}

/// A segment as one of its sides sees it.
pub struct Segment {
    shm: Arc<Shm>,
    geometry: Geometry,
    /// First byte of the mapping, and of each lane's descriptors.
    start: *mut u8,
    descs: [*const Desc; 2],
    me: usize,
    peer_pid: Option<i32>,
    pulls_allowed: bool,
    /// Whether the peer's memory may be written under its grants: not on the word of a peer that the kernel does not vouch for.
    writes_allowed: bool,
    /// Whether bulk data goes straight wherever it can, even if the ring were faster.
    straight: bool,
}

// SAFETY: the pointers lead into the mapping that `shm` keeps, which any thread may use; what lies there is atomics, or copied as bytes.
unsafe impl Send for Segment {}

impl Segment {
    /// Makes the dialer's view of a fresh segment.
    pub fn create(shm: Shm, bounce: u64) -> Result<Self> {
        let geometry = Geometry::new(bounce)?;
        let segment = Self::view(shm, geometry, 0)?;
        segment.control().bounce.store(bounce, Ordering::Relaxed);
        // Pairs with the Acquire in `attach`.
        segment.control().magic.store(MAGIC, Ordering::Release);
        Ok(segment)
    }

    /// Makes the acceptor's view of a segment that the peer created.
    ///
    /// Errors: not a segment of this version; a geometry that does not match its size.
    pub fn attach(shm: Shm) -> Result<Self> {
        let smallest = Geometry::new(64 * 1024)?;
        let mut segment = Self::view(shm, smallest, 1)?;
        // Pairs with the Release in `create`.
        let magic = segment.control().magic.load(Ordering::Acquire);
        if magic != MAGIC {
            return Err(Error::remote(format!("the peer's segment begins with {magic:#x}, not with {MAGIC:#x}")));
        }
        let geometry = Geometry::new(segment.control().bounce.load(Ordering::Relaxed))?;
        if geometry.len() != segment.shm.len() {
            return Err(Error::remote(format!("the peer's segment has {} bytes instead of {}", segment.shm.len(), geometry.len())));
        }
        segment.shape(geometry);
        Ok(segment)
    }

    fn view(shm: Shm, geometry: Geometry, me: usize) -> Result<Self> {
        if shm.len() < geometry.len() {
            return Err(Error::remote(format!("the segment has {} bytes, fewer than {}", shm.len(), geometry.len())));
        }
        let start = shm.addr() as *mut u8;
        let mut segment = Segment {
            shm: Arc::new(shm),
            geometry,
            start,
            descs: [start.cast_const().cast(); 2],
            me,
            peer_pid: None,
            pulls_allowed: false,
            writes_allowed: false,
            straight: true,
        };
        segment.shape(geometry);
        Ok(segment)
    }

    /// Takes a geometry over that fits the mapping.
    fn shape(&mut self, geometry: Geometry) {
        self.geometry = geometry;
        self.descs = [0, 1].map(|lane| self.base(geometry.descs(lane)).cast_const().cast());
    }

    /// Bytes of a segment with that bounce ring.
    pub fn len_for(bounce: u64) -> Result<usize> {
        Ok(Geometry::new(bounce)?.len())
    }

    /// The segment's descriptor, for the peer.
    pub fn fd(&self) -> RawFd {
        self.shm.fd().as_raw_fd()
    }

    /// Removes the segment's name: both sides have it.
    pub fn unlink(&self) {
        self.shm.unlink();
    }

    /// Says who this side is. `notify` if it wants to be woken.
    pub fn introduce(&self, notify: bool) {
        let side = self.side(self.me);
        side.pid.store(u64::from(std::process::id()), Ordering::Relaxed);
        side.cookie_addr.store(cookie().as_ptr() as u64, Ordering::Relaxed);
        for (to, from) in side.cookie.iter().zip(cookie()) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        side.notify.store(u32::from(notify), Ordering::Release);
    }

    /// Finds out whether the peer's memory can be read, and tells the peer. Call once the peer has introduced itself.
    /// `vouched` is the kernel's word for its pid; without one the peer's own is tried. The cookie decides.
    pub fn prove_peer(&mut self, vouched: Option<i32>, cma: CrossMemory) {
        let side = self.side(1 - self.me);
        let pid = vouched.unwrap_or(side.pid.load(Ordering::Relaxed) as i32);
        if pid <= 0 {
            return;
        }
        self.peer_pid = Some(pid);
        let proven = self.is_the_peer();
        if !proven {
            self.peer_pid = vouched;
        }
        self.pulls_allowed = proven && cma != CrossMemory::Never;
        self.writes_allowed = self.pulls_allowed && vouched.is_some();
        self.straight = cma != CrossMemory::Auto;
        self.side(self.me).pulls.store(u32::from(self.pulls_allowed), Ordering::Release);
    }

    /// Whether the process with the peer's pid is, still, the peer: its cookie is where the peer said.
    fn is_the_peer(&self) -> bool {
        let side = self.side(1 - self.me);
        let mut words = [0u64; 2];
        // SAFETY: `words` is valid for 16 bytes.
        let read = unsafe { self.read_peer(side.cookie_addr.load(Ordering::Relaxed), words.as_mut_ptr().cast(), 16) };
        matches!(read, Ok(16)) && side.cookie.iter().zip(words).all(|(a, b)| a.load(Ordering::Relaxed) == b)
    }

    #[inline]
    fn control(&self) -> &Control {
        // SAFETY: every mapping is page-aligned and at least a control page long (checked in `view`); its fields are atomics, so the peer's
        // writes are no data race.
        unsafe { &*self.start.cast::<Control>() }
    }

    #[inline]
    fn side(&self, i: usize) -> &Side {
        &self.control().sides[i & 1]
    }

    #[inline]
    fn lane(&self, i: usize) -> &Lane {
        &self.control().lanes[i & 1]
    }

    #[inline]
    fn grant(&self, lane: usize, desc: u64) -> &Grant {
        &self.control().grants[lane & 1][desc as usize % GRANTS]
    }

    #[inline]
    fn desc(&self, lane: usize, number: u64) -> &Desc {
        // SAFETY: the descriptor area of a lane holds DESCS aligned descriptors of atomics, and lies within the mapping by the geometry.
        unsafe { &*self.descs[lane & 1].add((number % layout::DESCS) as usize) }
    }

    /// `len` bytes of a bounce ring; the caller has checked that they do not cross the ring's end.
    #[inline]
    fn ring(&self, lane: usize, position: u64, len: usize) -> *mut u8 {
        let offset = position & (self.geometry.bounce - 1);
        debug_assert!(offset + len as u64 <= self.geometry.bounce);
        self.base(self.geometry.ring(lane) + offset as usize)
    }

    fn fill(&self, lane: usize) -> *mut u8 {
        self.base(self.geometry.fill(lane))
    }

    fn resp(&self, lane: usize) -> *mut u8 {
        self.base(self.geometry.resp(lane))
    }

    #[inline]
    fn base(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.shm.len());
        // SAFETY: every offset comes from the geometry, which fits the mapping (checked in `view` and `attach`).
        unsafe { self.start.add(offset) }
    }

    /// Whether the peer can pull from this side's private memory.
    #[inline]
    fn peer_pulls(&self) -> bool {
        self.side(1 - self.me).pulls.load(Ordering::Acquire) == 1
    }

    #[inline]
    fn peer_closed(&self) -> bool {
        // Pairs with the store in `ShmWire::close`.
        self.side(1 - self.me).closed.load(Ordering::SeqCst) != 0
    }

    /// Reads the peer's private memory; fewer bytes than asked for if the rest cannot be read.
    ///
    /// # Safety
    /// `to` must be valid for `len` bytes.
    unsafe fn read_peer(&self, from: u64, to: *mut u8, len: usize) -> io::Result<usize> {
        let Some(pid) = self.peer_pid else { return Err(io::ErrorKind::NotFound.into()) };
        let local = libc::iovec { iov_base: to.cast(), iov_len: len };
        let remote = libc::iovec { iov_base: from as *mut libc::c_void, iov_len: len };
        // SAFETY: the caller vouches for the local range; a bad remote one is an error, not a fault.
        let n = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }

    /// Writes the peer's private memory; true if all bytes were written.
    ///
    /// # Safety
    /// `from` must be valid for `len` bytes, and the peer must have granted the range at `to`.
    unsafe fn write_peer(&self, from: *const u8, to: u64, len: usize) -> bool {
        let Some(pid) = self.peer_pid else { return false };
        let local = libc::iovec { iov_base: from.cast_mut().cast(), iov_len: len };
        let remote = libc::iovec { iov_base: to as *mut libc::c_void, iov_len: len };
        // SAFETY: the caller vouches for the local range and for the peer's consent; a bad remote one is an error, not a fault.
        let n = unsafe { libc::process_vm_writev(pid, &local, 1, &remote, 1, 0) };
        n == len as isize
    }
}

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
            tx: Tx::new(segment.me, segment.geometry, exposed),
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
    pub fn progress(&mut self, core: &mut Core) -> std::result::Result<bool, Fault> {
        if self.armed {
            self.listen(core)?;
        }
        // What the peer publishes tells most of what it has accepted, without a look at the line that it writes for that.
        let mut moved = self.rx.receive(core, &mut self.tx, &self.segment, &mut self.maps)?;
        if self.rx.lacks_memory {
            moved |= self.receive_mapped(core)?;
        }
        if self.tx.awaits(core) {
            moved |= self.tx.take_acceptance(core, &self.segment)?;
        }
        if core.sq.pending() {
            moved |= self.transmit(core)?;
        }
        if self.tx.may_share() {
            moved |= self.tx.share(core, &self.segment);
        }
        if moved {
            self.idle = 0;
            self.armed = false;
            self.wake_peer();
            return Ok(true);
        }
        self.idle = self.idle.wrapping_add(1);
        if self.idle.is_multiple_of(IDLE_TURNS) || self.ended.is_some() || self.segment.peer_closed() {
            self.look_for_the_end(core)?;
        }
        Ok(false)
    }

    /// Sends what was just posted.
    #[inline(never)]
    pub fn kick(&mut self, core: &mut Core) -> std::result::Result<(), Fault> {
        if self.tx.transmit(core, &self.segment, &self.control)? {
            self.wake_peer();
        }
        Ok(())
    }

    /// Goes on where [`Rx::receive`] stopped for want of memory, which the peer has passed unless it never will.
    #[inline(never)]
    fn receive_mapped(&mut self, core: &mut Core) -> std::result::Result<bool, Fault> {
        if self.control.passes_descriptors() {
            self.listen(core)?;
        }
        let moved = self.rx.receive(core, &mut self.tx, &self.segment, &mut self.maps)?;
        self.rx.lacks_memory = false;
        Ok(moved)
    }

    /// Sends what could not go when it was posted.
    #[inline(never)]
    fn transmit(&mut self, core: &mut Core) -> std::result::Result<bool, Fault> {
        self.tx.transmit(core, &self.segment, &self.control)
    }

    /// Takes what the control socket holds.
    #[cold]
    #[inline(never)]
    fn listen(&mut self, core: &Core) -> std::result::Result<(), Fault> {
        while self.ended.is_none() {
            core.stats.add(RailCounter::Syscalls, 1);
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
    fn look_for_the_end(&mut self, core: &mut Core) -> std::result::Result<(), Fault> {
        self.listen(core)?;
        if self.ended.is_none() && !self.segment.peer_closed() {
            return Ok(());
        }
        // What the peer did before it went is in the segment by now.
        fence(Ordering::SeqCst);
        let mut moved =
            self.tx.take_acceptance(core, &self.segment)? || self.rx.receive(core, &mut self.tx, &self.segment, &mut self.maps)?;
        // Also behind what was received: a look that found memory lacking is not for a later call to act on.
        if self.rx.lacks_memory {
            moved |= self.receive_mapped(core)?;
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
    pub fn peer_pid(&self) -> Option<i32> {
        self.segment.peer_pid
    }

    /// Ends the wire: the peer finds everything that was accepted, and counts on nothing else. The result is to be dropped with the
    /// queue pair, which takes as long as the peer writes the part of a copy that it was granted.
    pub fn close(self) -> Option<Offers> {
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
