//! The segment that two queue pairs share, as one of its sides sees it: where things lie in the mapping, who the other side is, and
//! its private memory, as far as the kernel and the other side let this one reach it.
//!
//! While a queue pair connects, `soft::connect` makes it and introduces the sides; then [`ShmWire`](super::ShmWire) and its halves
//! [`tx`](super::tx) and [`rx`](super::rx) use it. All on the thread that drives the queue pair. What the peer stores is checked by whoever
//! loads it.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use once_cell::race::OnceBox;

use super::layout::{self, Control, Desc, GRANTS, Geometry, Grant, Lane, MAGIC, Side};
use crate::base::config::CrossMemory;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::base::mem::Shm;
use crate::base::process::Process;
use crate::base::rand;

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
    pub(super) shm: Arc<Shm>,
    pub(super) geometry: Geometry,
    /// First byte of the mapping, and of each lane's descriptors.
    start: *mut u8,
    descs: [*const Desc; 2],
    pub(super) me: usize,
    pub(super) peer: Option<Arc<Process>>,
    pub(super) pulls_allowed: bool,
    /// Whether the peer's memory may be written under its grants: not on the word of a peer that the kernel does not vouch for.
    pub(super) writes_allowed: bool,
    /// Whether bulk data goes straight wherever it can, even if the ring were faster.
    pub(super) straight: bool,
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
            peer: None,
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
        // Before the proof: what is proven of the number is proven of this process, if it then still lives.
        self.peer = Process::find(vouched.unwrap_or(side.pid.load(Ordering::Relaxed) as i32));
        if self.peer.is_none() {
            return;
        }
        let proven = self.is_the_peer();
        if !proven && vouched.is_none() {
            self.peer = None;
        }
        self.pulls_allowed = proven && cma != CrossMemory::Never;
        self.writes_allowed = self.pulls_allowed && vouched.is_some();
        self.straight = cma != CrossMemory::Auto;
        self.side(self.me).pulls.store(u32::from(self.pulls_allowed), Ordering::Release);
    }

    /// Whether the process with the peer's number is, still, the peer: its cookie is where the peer said, and no other has taken the number,
    /// which could be one that the peer forked, cookie and all.
    pub(super) fn is_the_peer(&self) -> bool {
        let side = self.side(1 - self.me);
        let mut words = [0u64; 2];
        // SAFETY: `words` is valid for 16 bytes.
        let read = unsafe { self.read_peer(side.cookie_addr.load(Ordering::Relaxed), words.as_mut_ptr().cast(), 16) };
        matches!(read, Ok(16)) && side.cookie.iter().zip(words).all(|(a, b)| a.load(Ordering::Relaxed) == b) && self.peer_lives()
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
    pub(super) fn lane(&self, i: usize) -> &Lane {
        &self.control().lanes[i & 1]
    }

    #[inline]
    pub(super) fn grant(&self, lane: usize, desc: u64) -> &Grant {
        &self.control().grants[lane & 1][desc as usize % GRANTS]
    }

    #[inline]
    pub(super) fn desc(&self, lane: usize, number: u64) -> &Desc {
        // SAFETY: the descriptor area of a lane holds DESCS aligned descriptors of atomics, and lies within the mapping by the geometry.
        unsafe { &*self.descs[lane & 1].add((number % layout::DESCS) as usize) }
    }

    /// `len` bytes of a bounce ring; the caller has checked that they do not cross the ring's end.
    #[inline]
    pub(super) fn ring(&self, lane: usize, position: u64, len: usize) -> *mut u8 {
        let offset = position & (self.geometry.bounce - 1);
        debug_assert!(offset + len as u64 <= self.geometry.bounce);
        self.base(self.geometry.ring(lane) + offset as usize)
    }

    pub(super) fn fill(&self, lane: usize) -> *mut u8 {
        self.base(self.geometry.fill(lane))
    }

    pub(super) fn resp(&self, lane: usize) -> *mut u8 {
        self.base(self.geometry.resp(lane))
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

    /// Whether the peer can pull from this side's private memory.
    #[inline]
    pub(super) fn peer_pulls(&self) -> bool {
        self.side(1 - self.me).pulls.load(Ordering::Acquire) == 1
    }

    #[inline]
    pub(super) fn peer_closed(&self) -> bool {
        // Pairs with the store in `ShmWire::close`.
        self.side(1 - self.me).closed.load(Ordering::SeqCst) != 0
    }

    /// Reads the peer's private memory; fewer bytes than asked for if the rest cannot be read.
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

    /// Writes the peer's private memory; true if all bytes were written, and the peer's they are.
    ///
    /// The kernel takes a number here, and no pidfd. Between [`Segment::is_the_peer`], which the caller asks right before, and the kernel's look
    /// at the number the peer may end and all numbers be used until another process of this user has it; that one's memory is then written.
    /// This cannot be prevented, only seen and warned of.
    ///
    /// # Safety
    /// `from` must be valid for `len` bytes, and the peer must have granted the range at `to`.
    pub(super) unsafe fn write_peer(&self, from: *const u8, to: u64, len: usize) -> bool {
        let Some(peer) = &self.peer else { return false };
        let local = libc::iovec { iov_base: from.cast_mut().cast(), iov_len: len };
        let remote = libc::iovec { iov_base: to as *mut libc::c_void, iov_len: len };
        // SAFETY: the caller vouches for the local range and for the peer's consent; a bad remote one is an error, not a fault.
        let n = unsafe { libc::process_vm_writev(peer.pid(), &local, 1, &remote, 1, 0) };
        if self.peer_lives() {
            return n == len as isize;
        }
        if n > 0 && peer.is_succeeded() {
            let pid = peer.pid();
            log_warn!(
                log::NET,
                "the peer, process {pid}, ended while {n} bytes were written to its address {to:#x}, and another process {pid} exists: they may be in its memory"
            );
        }
        false
    }
}
