//! The segment that two queue pairs share, as one side sees it: the areas of the mapping, the peer's process, and the peer's private memory,
//! as far as the kernel and the peer let this side read and write it.
//!
//! `soft::connect` makes it and introduces the sides to each other; then [`ShmWire`](super::ShmWire) and its halves [`requester`](super::requester) and
//! [`responder`](super::responder) use it. All on the thread that drives the queue pair. Every load of what the peer stored checks the value.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use once_cell::race::OnceBox;

use super::layout::{self, Control, Desc, DirectionState, GRANTS, Geometry, Grant, MAGIC, Side};
use crate::base::clock;
use crate::base::config::CrossMemory;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::base::mem::Shm;
use crate::base::process::Process;
use crate::base::rand;

/// How long a look at who has the peer's pid holds. That the peer has exited is noticed after each write all the same; that it runs another program (exec)
/// only by the next look: until then that program's memory is written, if there is any at the address.
const LOOK_NS: u64 = 1_000_000;

/// 16 random bytes at a fixed address of this process's private memory: a peer that reads them there reads the right process.
/// Made without a lock, as a fork of another thread could leave it locked.
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
    pub(super) shm: Arc<Shm>,
    pub(super) geometry: Geometry,
    /// First byte of the mapping, and of each direction's descriptors.
    start: *mut u8,
    descs: [*const Desc; 2],
    pub(super) me: usize,
    pub(super) peer: Option<Arc<Process>>,
    /// When [`Segment::is_the_peer`] last looked and found it so, by [`clock::now`].
    pub(super) seen: Cell<u64>,
    /// Whether this side reads the peer's private memory: it has proven that it can, and the settings let it.
    pub(super) can_read_peer: bool,
    /// Whether the peer's memory may be written under its grants: only if the kernel, not the peer, has told the peer's pid.
    pub(super) can_write_peer: bool,
    /// Whether bulk data goes by CMA wherever that is possible, even if the bounce ring is faster.
    pub(super) cma_only: bool,
}

// SAFETY: the pointers lead into the mapping that `shm` keeps, which any thread may use; its contents are atomics, or copied as bytes.
unsafe impl Send for Segment {}

impl Drop for Segment {
    /// This side writes nothing more: also one that had offered the segment, and never learnt that the peer uses it.
    fn drop(&mut self) {
        // Pairs with the load in `LeaseTable::peer_is_gone`.
        self.side(self.me).closed.store(1, Ordering::SeqCst);
    }
}

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
        segment.set_geometry(geometry);
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
            peer: None,
            seen: Cell::new(0),
            can_read_peer: false,
            can_write_peer: false,
            cma_only: true,
        };
        segment.set_geometry(geometry);
        Ok(segment)
    }

    /// Sets a geometry, which fits the mapping.
    fn set_geometry(&mut self, geometry: Geometry) {
        self.geometry = geometry;
        self.descs = [0, 1].map(|direction| self.base(geometry.descs(direction)).cast_const().cast());
    }

    /// Bytes of a segment with that bounce ring.
    pub fn len_for(bounce: u64) -> Result<usize> {
        Ok(Geometry::new(bounce)?.len())
    }

    /// Removes the segment's name: both sides have it.
    pub fn unlink(&self) {
        self.shm.unlink();
    }

    /// Writes who this side is into the segment. `notify` if it asks for doorbells.
    pub fn introduce(&self, notify: bool) {
        let side = self.side(self.me);
        side.pid.store(u64::from(std::process::id()), Ordering::Relaxed);
        side.cookie_addr.store(cookie().as_ptr() as u64, Ordering::Relaxed);
        for (to, from) in side.cookie.iter().zip(cookie()) {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        side.notify.store(u32::from(notify), Ordering::Release);
    }

    /// Finds out whether this side can read the peer's memory, and tells the peer. Call once the peer has introduced itself.
    /// `vouched` is its pid by the kernel; without one the pid in the segment is tried. The cookie proves either.
    pub fn prove_peer(&mut self, vouched: Option<i32>, cma: CrossMemory) {
        let side = self.side(1 - self.me);
        // Found before the cookie is read: the cookie proves the pid, and `is_the_peer` then checks that this process still has it.
        self.peer = Process::find(vouched.unwrap_or(side.pid.load(Ordering::Relaxed) as i32));
        if self.peer.is_none() {
            return;
        }
        let proven = self.is_the_peer();
        if !proven && vouched.is_none() {
            self.peer = None;
        }
        self.can_read_peer = proven && cma != CrossMemory::Never;
        self.can_write_peer = self.can_read_peer && vouched.is_some();
        self.cma_only = cma != CrossMemory::Auto;
        self.side(self.me).can_read_peer.store(u32::from(self.can_read_peer), Ordering::Release);
    }

    /// Whether the process that has the peer's pid is still the peer, running the same program: its cookie is where the peer said, and the peer's
    /// process lives, so that no other has its pid. The cookie alone would not do: a process that the peer forked has it too.
    /// Looks at most once in [`LOOK_NS`].
    pub(super) fn is_the_peer(&self) -> bool {
        // Read before the look: what that finds is not older.
        let now = clock::now();
        if now.wrapping_sub(self.seen.get()) < LOOK_NS {
            return true;
        }
        let side = self.side(1 - self.me);
        let mut words = [0u64; 2];
        // SAFETY: `words` is valid for 16 bytes.
        let read = unsafe { self.read_peer(side.cookie_addr.load(Ordering::Relaxed), words.as_mut_ptr().cast(), 16) };
        let is = matches!(read, Ok(16)) && side.cookie.iter().zip(words).all(|(a, b)| a.load(Ordering::Relaxed) == b) && self.peer_lives();
        if is {
            self.seen.set(now);
        }
        is
    }

    #[inline]
    pub(super) fn control(&self) -> &Control {
        // SAFETY: every mapping is page-aligned and at least a control page long (checked in `view`); its fields are atomics, so the peer's
        // writes are no data race.
        unsafe { &*self.start.cast::<Control>() }
    }

    #[inline]
    pub(super) fn side(&self, i: usize) -> &Side {
        &self.control().sides[i & 1]
    }

    #[inline]
    pub(super) fn direction(&self, i: usize) -> &DirectionState {
        &self.control().directions[i & 1]
    }

    #[inline]
    pub(super) fn grant(&self, direction: usize, desc: u64) -> &Grant {
        &self.control().grants[direction & 1][desc as usize % GRANTS]
    }

    #[inline]
    pub(super) fn desc(&self, direction: usize, number: u64) -> &Desc {
        // SAFETY: the descriptor area of a direction holds DESCS aligned descriptors of atomics, and lies within the mapping by the geometry.
        unsafe { &*self.descs[direction & 1].add((number % layout::DESCS) as usize) }
    }

    /// `len` bytes of a bounce ring; the caller has checked that they do not cross the ring's end.
    #[inline]
    pub(super) fn ring(&self, direction: usize, position: u64, len: usize) -> *mut u8 {
        let offset = position & (self.geometry.bounce - 1);
        debug_assert!(offset + len as u64 <= self.geometry.bounce);
        self.base(self.geometry.ring(direction) + offset as usize)
    }

    pub(super) fn fill(&self, direction: usize) -> *mut u8 {
        self.base(self.geometry.fill(direction))
    }

    pub(super) fn resp(&self, direction: usize) -> *mut u8 {
        self.base(self.geometry.resp(direction))
    }

    #[inline]
    fn base(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset < self.shm.len());
        // SAFETY: every offset comes from the geometry, which fits the mapping (checked in `view` and `attach`).
        unsafe { self.start.add(offset) }
    }

    fn peer_lives(&self) -> bool {
        self.peer.as_ref().is_some_and(|peer| !peer.is_gone())
    }

    /// Whether the peer says that it can read this side's private memory.
    #[inline]
    pub(super) fn peer_can_read(&self) -> bool {
        self.side(1 - self.me).can_read_peer.load(Ordering::Acquire) == 1
    }

    #[inline]
    pub(super) fn peer_closed(&self) -> bool {
        // Pairs with the store in `ShmWire::close`.
        self.side(1 - self.me).closed.load(Ordering::SeqCst) != 0
    }

    /// Reads the peer's private memory (`process_vm_readv`); fewer bytes than `len` if the rest cannot be read.
    ///
    /// # Safety
    /// `to` must be valid for `len` bytes.
    pub(super) unsafe fn read_peer(&self, from: u64, to: *mut u8, len: usize) -> io::Result<usize> {
        let Some(peer) = &self.peer else { return Err(io::ErrorKind::NotFound.into()) };
        let local = libc::iovec { iov_base: to.cast(), iov_len: len };
        let remote = libc::iovec { iov_base: from as *mut libc::c_void, iov_len: len };
        // SAFETY: the caller vouches for the local range; a bad remote one is an error, not a fault.
        let n = unsafe { libc::process_vm_readv(peer.pid(), &local, 1, &remote, 1, 0) };
        if n < 0 { Err(io::Error::last_os_error()) } else { Ok(n as usize) }
    }

    /// Writes the peer's private memory (`process_vm_writev`); true if all bytes were written, into the peer's memory.
    ///
    /// The system call takes a pid, not a pidfd. Between the last look at who has it and the system call the peer may end and its pid
    /// be given to another process of this user; then that one's memory is written. This cannot be prevented, only detected, and then there
    /// is a warning.
    ///
    /// # Safety
    /// `from` must be valid for `len` bytes, and the peer must have granted the range at `to`.
    pub(super) unsafe fn write_peer(&self, from: *const u8, to: u64, len: usize) -> bool {
        let Some(peer) = self.peer.as_ref().filter(|_| self.is_the_peer()) else { return false };
        let local = libc::iovec { iov_base: from.cast_mut().cast(), iov_len: len };
        let remote = libc::iovec { iov_base: to as *mut libc::c_void, iov_len: len };
        // SAFETY: the caller vouches for the local range and for the peer's consent; a bad remote one is an error, not a fault.
        let n = unsafe { libc::process_vm_writev(peer.pid(), &local, 1, &remote, 1, 0) };
        if n <= 0 || self.peer_lives() {
            return n == len as isize;
        }
        if peer.is_replaced() {
            let pid = peer.pid();
            log_warn!(
                log::NET,
                "the peer, process {pid}, ended while {n} bytes were written to its address {to:#x}, and another process {pid} exists: they may be in its memory"
            );
        }
        false
    }
}
