//! RC (reliable connection) queue pairs, memory regions and completion queues behind one interface for all providers.
//!
//! In names: Wr is a work request, Wc a work completion, Sge a scatter/gather element. INIT: a queue pair takes receives; RTS: sends too; ERROR: nothing
//! any more. RNR: receiver not ready, no receive request was posted.
//!
//! `net` (and every other layer above) sees only the types of this file and of [`types`]; which provider stands behind a
//! [`Device`] is decided when the devices are listed. Dispatch is a `match` on an enum, so that the hot path has no indirect call.
//!
//! # The contract
//!
//! * A queue pair is connected by exchanging opaque [`Endpoint`]s, in any order, over any channel. `connect` does not wait for the peer (a
//!   NIC may take a while to resolve its address); what is posted before the peer answers waits, or, on a NIC, is sent again until its retries are used up.
//! * Reliable and in order per queue pair. A WRITE completes once the responder has accepted it in order. WRITE consumes no
//!   receive request; WRITE_WITH_IMM consumes one and ignores its memory. No receive posted: the requester waits (RNR) up to its
//!   `rnr_retry`. A wrong remote key, range or access is `RemAccessErr` and takes both queue pairs to ERROR. In ERROR everything outstanding
//!   completes with `WrFlushErr`. A dead peer is `RetryExcErr` on the oldest request. Zero-length requests are legal.
//! * Ordered publish: of a WRITE of 8 to 64 bytes whose end is 8-aligned, the last 8 bytes become visible (Release) after the
//!   rest. This is what makes a flag at the end of a slot trustworthy.
//! * `poll` returns a completion only after every acknowledgement owed for earlier work was handed to the kernel or to shared
//!   memory: a caller that stops polling after its last completion holds nobody up.
//! * A [`CompletionQueue`] owns its queue pairs, and one thread at a time drives it with all of them. Different queues are independent.
//!   Registration is independent of all of them and may happen on any thread.
//! * A queue created with notification is armed, **then** drained, then waited for on the device's one file descriptor.
//!
//! The conformance suite, `tests/conformance.rs`, tests each clause on each provider.

pub mod iface;
pub mod soft;
pub mod types;
pub mod verbs;

use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::sync::Arc;

use crate::base::config::{Config, Fabric};
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::base::mem::{self, Pages};
use crate::base::process::Process;
use crate::base::stats::RailStats;

pub use soft::memory::SharedPages;
pub use types::*;

/// A device that queue pairs can be made on. Cheap to clone.
#[derive(Clone)]
pub enum Device {
    /// The embedded software fabric.
    Soft(soft::Device),
    /// A NIC.
    Verbs(verbs::Device),
}

/// Lists the usable devices, in an order that is the same on every start: by PCI path, then name. RAILHEAD_FABRIC chooses the provider:
/// by default NICs if there is a usable one, else the software fabric.
///
/// Errors: a setting that names no interface of this machine.
pub fn devices(config: &Arc<Config>) -> Result<Vec<Device>> {
    if config.fabric != Fabric::Soft {
        let nics: Vec<Device> = verbs::devices(config)?.into_iter().map(Device::Verbs).collect();
        if !nics.is_empty() {
            return Ok(nics);
        }
        if config.fabric == Fabric::Verbs {
            log_warn!(
                log::INIT,
                "RAILHEAD_FABRIC=verbs, and this machine has no usable RDMA NIC (`railhead info` says why); auto and soft work"
            );
            return Ok(nics);
        }
    }
    Ok(soft::devices(config)?.into_iter().map(Device::Soft).collect())
}

/// Allocates `len` zeroed, page-aligned bytes that a peer on the same host can map: the soft fabric then moves them without a system
/// call. Ordinary memory to every other provider. Freed with [`free`].
///
/// Errors: 0 bytes; no memory or descriptor left.
pub fn alloc(len: usize) -> Result<*mut u8> {
    soft::memory::alloc(len)
}

/// Frees what [`alloc`] returned. A region registered over it keeps the memory mapped until it is deregistered.
///
/// Errors: an address that is no allocation's first byte.
pub fn free(memory: *mut u8) -> Result<()> {
    soft::memory::free(memory)
}

impl Device {
    /// Properties.
    pub fn info(&self) -> &DeviceInfo {
        match self {
            Device::Soft(device) => device.info(),
            Device::Verbs(device) => device.info(),
        }
    }

    /// What it can do.
    pub fn capabilities(&self) -> Capabilities {
        match self {
            Device::Soft(device) => device.capabilities(),
            Device::Verbs(device) => device.capabilities(),
        }
    }

    /// Opens the device's domain. All openers share it, so a region serves every queue pair of the device.
    pub fn open(&self) -> Result<Domain> {
        match self {
            Device::Soft(device) => Ok(Domain::Soft(device.open()?)),
            Device::Verbs(device) => Ok(Domain::Verbs(device.open()?)),
        }
    }
}

/// A device's context and protection domain. Cheap to clone.
#[derive(Clone)]
pub enum Domain {
    /// The embedded software fabric.
    Soft(soft::Domain),
    /// A NIC.
    Verbs(verbs::Domain),
}

impl Domain {
    /// Registers memory. Any thread, also while others post and poll.
    ///
    /// Errors: an empty range; one that wraps around the address space; too many regions.
    pub fn register(&self, memory: UserMemory, access: Access) -> Result<MemoryRegion> {
        match self {
            Domain::Soft(domain) => Ok(MemoryRegion::Soft(domain.register(memory, access)?)),
            Domain::Verbs(domain) => Ok(MemoryRegion::Verbs(domain.register(memory, access)?)),
        }
    }

    /// Registers pages of our own.
    ///
    /// Errors: as for [`Domain::register`].
    pub fn register_pages(&self, pages: &Pages, access: Access) -> Result<PagesRegion> {
        // SAFETY: a `PagesRegion` drops its region before its clone of the pages.
        let region = self.register(unsafe { pages.as_memory() }, access)?;
        Ok(PagesRegion { region, _pages: pages.clone() })
    }

    /// Registers memory that a DMA-BUF names, from `offset` on. Requests name it by the addresses of `memory`. Any thread; the descriptor
    /// stays the caller's.
    ///
    /// Errors: as for [`Domain::register`]; a device that takes none.
    pub fn register_dma_buf(&self, memory: UserMemory, access: Access, offset: u64, fd: RawFd) -> Result<MemoryRegion> {
        match self {
            Domain::Soft(_) => Err(Error::usage("the software fabric moves host memory, and takes no DMA-BUF")),
            Domain::Verbs(domain) => Ok(MemoryRegion::Verbs(domain.register_dma_buf(memory, access, offset, fd)?)),
        }
    }

    /// Makes a completion queue; `notify` for one that can be armed.
    pub fn create_cq(&self, notify: bool) -> Result<CompletionQueue> {
        match self {
            Domain::Soft(domain) => Ok(CompletionQueue::Soft(domain.create_cq(notify)?)),
            Domain::Verbs(domain) => Ok(CompletionQueue::Verbs(domain.create_cq(notify)?)),
        }
    }

    /// The device's one descriptor to block on: readable when an armed queue has something, until that queue is polled.
    pub fn notification_fd(&self) -> Result<RawFd> {
        match self {
            Domain::Soft(domain) => domain.notification_fd(),
            Domain::Verbs(domain) => domain.notification_fd(),
        }
    }
}

/// Registered memory. Dropping it deregisters: it returns once nothing is being copied into or out of the range, and nothing will be.
pub enum MemoryRegion {
    /// The embedded software fabric.
    Soft(soft::MemoryRegion),
    /// A NIC.
    Verbs(verbs::MemoryRegion),
}

/// A region over pages of our own, which it keeps mapped.
pub struct PagesRegion {
    region: MemoryRegion,
    _pages: Pages,
}

// Not its range as such: that must not be registered by others, who would not keep the pages.
impl PagesRegion {
    /// Key for local use.
    pub fn lkey(&self) -> u32 {
        self.region.lkey()
    }

    /// Key for the peer.
    pub fn rkey(&self) -> u32 {
        self.region.rkey()
    }

    /// Its bytes.
    pub fn view(&self) -> RegionView<'_> {
        self.region.view()
    }
}

/// Memory that is not registered, as no peer and no device gets at it, and that is held as if it were.
pub struct HeldMemory(UserMemory);

impl HeldMemory {
    /// Holds memory until this is dropped.
    pub fn new(memory: UserMemory) -> HeldMemory {
        HeldMemory(memory)
    }

    /// Its bytes.
    pub fn view(&self) -> RegionView<'_> {
        RegionView { memory: self.0, region: PhantomData }
    }
}

/// The bytes of a region, or part of them, while it is registered or held. Its peers may change them at any time.
#[derive(Clone, Copy)]
pub struct RegionView<'a> {
    memory: UserMemory,
    region: PhantomData<&'a MemoryRegion>,
}

impl RegionView<'_> {
    /// First byte.
    pub fn addr(&self) -> usize {
        self.memory.addr()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.memory.is_empty()
    }

    /// `len` bytes from `offset` on, if they are inside.
    pub fn part(&self, offset: usize, len: usize) -> Option<Self> {
        Some(RegionView { memory: self.memory.part(offset, len)?, ..*self })
    }

    /// Copies its first bytes, as many as both have.
    pub fn read(&self, out: &mut [u8]) {
        // SAFETY: inside of the region, whose memory is valid while it exists, which the lifetime says; `copy` allows for peers that write meanwhile.
        unsafe { mem::copy(self.memory.addr() as *const u8, out.as_mut_ptr(), out.len().min(self.len())) };
    }

    /// Replaces its first bytes, as many as both have.
    pub fn write(&self, from: &[u8]) {
        // SAFETY: as above.
        unsafe { mem::copy(from.as_ptr(), self.memory.addr() as *mut u8, from.len().min(self.len())) };
    }

    /// Its line number `i`, if it is inside as a whole.
    #[inline(always)]
    pub fn line(&self, i: usize, vectors: impl mem::Vectors) -> Option<mem::Line> {
        // SAFETY: as above.
        (i < self.len() / mem::LINE).then(|| unsafe { vectors.load((self.memory.addr() + i * mem::LINE) as *const u8) })
    }

    /// Replaces it.
    #[inline(always)]
    pub fn set_line(&self, i: usize, line: mem::Line, vectors: impl mem::Vectors) {
        if i < self.len() / mem::LINE {
            // SAFETY: as above.
            unsafe { vectors.store((self.memory.addr() + i * mem::LINE) as *mut u8, line) };
        }
    }

    /// Copies another's first bytes here, as many as both have. They may overlap.
    pub fn copy_from(&self, from: &RegionView<'_>) {
        // SAFETY: as above, for both.
        unsafe { mem::copy(from.memory.addr() as *const u8, self.memory.addr() as *mut u8, from.len().min(self.len())) };
    }
}

impl MemoryRegion {
    /// Its bytes.
    pub fn view(&self) -> RegionView<'_> {
        RegionView { memory: self.memory(), region: PhantomData }
    }

    /// Key for local use.
    pub fn lkey(&self) -> u32 {
        match self {
            MemoryRegion::Soft(region) => region.lkey(),
            MemoryRegion::Verbs(region) => region.lkey(),
        }
    }

    /// Key for the peer.
    pub fn rkey(&self) -> u32 {
        match self {
            MemoryRegion::Soft(region) => region.rkey(),
            MemoryRegion::Verbs(region) => region.rkey(),
        }
    }

    /// The range.
    pub fn memory(&self) -> UserMemory {
        match self {
            MemoryRegion::Soft(region) => region.memory(),
            MemoryRegion::Verbs(region) => region.memory(),
        }
    }
}

/// Names a queue pair within its completion queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpId(pub(crate) u32);

/// A completion queue and the queue pairs that complete into it. `Send`, not `Sync`: one thread at a time.
pub enum CompletionQueue {
    /// The embedded software fabric.
    Soft(soft::CompletionQueue),
    /// A NIC.
    Verbs(verbs::CompletionQueue),
}

impl CompletionQueue {
    /// Makes a queue pair in INIT. `stats` is where it counts what it moves.
    ///
    /// Errors: caps out of range; no descriptor or memory left.
    pub fn create_qp(&mut self, caps: &QpCaps, stats: RailStats) -> Result<QpId> {
        match self {
            CompletionQueue::Soft(cq) => cq.create_qp(caps, stats),
            CompletionQueue::Verbs(cq) => cq.create_qp(caps, stats),
        }
    }

    /// The queue pair that `create_qp` named.
    ///
    /// # Panics
    /// Never for an id of this queue that was not destroyed.
    #[inline(always)]
    pub fn qp(&mut self, id: QpId) -> QueuePair<'_> {
        match self {
            CompletionQueue::Soft(cq) => QueuePair::Soft(cq.qp(id)),
            CompletionQueue::Verbs(cq) => QueuePair::Verbs(cq.qp(id)),
        }
    }

    /// Destroys a queue pair. Nothing of the caller's memory is touched afterwards. Its completions not yet polled are gone.
    pub fn destroy_qp(&mut self, id: QpId) {
        match self {
            CompletionQueue::Soft(cq) => cq.destroy_qp(id),
            CompletionQueue::Verbs(cq) => cq.destroy_qp(id),
        }
    }

    /// Makes progress and takes completions, at most `out.len()`; returns how many. Completions of one queue pair come in order.
    #[inline(always)]
    pub fn poll(&mut self, out: &mut [Completion]) -> usize {
        match self {
            CompletionQueue::Soft(cq) => cq.poll(out),
            CompletionQueue::Verbs(cq) => cq.poll(out),
        }
    }

    /// Asks for one notification on the device's descriptor for anything that arrives from now on. Drain the queue afterwards: what
    /// was already there raises none.
    ///
    /// Errors: a queue created without notification.
    pub fn arm(&mut self) -> Result<()> {
        match self {
            CompletionQueue::Soft(cq) => cq.arm(),
            CompletionQueue::Verbs(cq) => cq.arm(),
        }
    }

    /// Ends notification: the queue is not polled any more, and what arrives wakes nobody.
    #[cold]
    pub fn disarm(&mut self) {
        match self {
            // A notification of its (a doorbell: a record on the segment's socket, or bytes on a stream) wakes a sleeper once, and is read then.
            CompletionQueue::Soft(_) => {}
            CompletionQueue::Verbs(cq) => cq.disarm(),
        }
    }

    /// Whether the last poll of an armed queue returned before the queue was drained: no notification may come for the rest.
    pub fn needs_repoll(&mut self) -> bool {
        match self {
            CompletionQueue::Soft(cq) => cq.needs_repoll(),
            CompletionQueue::Verbs(_) => false,
        }
    }
}

/// A queue pair, borrowed from its completion queue.
pub enum QueuePair<'a> {
    /// The embedded software fabric.
    Soft(&'a mut soft::QueuePair),
    /// A NIC.
    Verbs(&'a mut verbs::QueuePair),
}

impl QueuePair<'_> {
    /// Where this queue pair can be reached. Carries a secret: only for the peer's eyes.
    pub fn endpoint(&self) -> Endpoint {
        match self {
            QueuePair::Soft(qp) => qp.endpoint(),
            QueuePair::Verbs(qp) => qp.endpoint(),
        }
    }

    /// Takes the queue pair to RTS towards `remote`, without waiting for it.
    ///
    /// Errors: an endpoint that no provider of this kind makes; a queue pair that is not in INIT.
    pub fn connect(&mut self, remote: &Endpoint) -> Result<()> {
        match self {
            QueuePair::Soft(qp) => qp.connect(remote),
            QueuePair::Verbs(qp) => qp.connect(remote),
        }
    }

    /// State.
    #[inline]
    pub fn state(&self) -> QpState {
        match self {
            QueuePair::Soft(qp) => qp.state(),
            QueuePair::Verbs(qp) => qp.state(),
        }
    }

    /// Whether the peer has connected too: from then on requests are sent as they are posted. A NIC does not tell, and is always connected.
    #[inline]
    pub fn connected(&self) -> bool {
        match self {
            QueuePair::Soft(qp) => qp.connected(),
            QueuePair::Verbs(_) => true,
        }
    }

    /// Whether the peer is known to have posted a receive: then a request that consumes one is sent as it is posted, and no other call is needed for it. A NIC
    /// does not tell, and sends it in any case.
    pub fn knows_receives(&self) -> bool {
        match self {
            QueuePair::Soft(qp) => qp.knows_receives(),
            QueuePair::Verbs(_) => true,
        }
    }

    /// Whether the queue pair failed because this process has no descriptor left.
    pub fn lacks_descriptor(&self) -> bool {
        match self {
            QueuePair::Soft(qp) => qp.lacks_descriptor(),
            QueuePair::Verbs(_) => false,
        }
    }

    /// Number of the queue pair, in its completions.
    #[inline]
    pub fn qp_num(&self) -> u32 {
        match self {
            QueuePair::Soft(qp) => qp.qp_num(),
            QueuePair::Verbs(qp) => qp.qp_num(),
        }
    }

    /// Bytes that a request may carry inline.
    pub fn max_inline(&self) -> usize {
        match self {
            QueuePair::Soft(_) => soft::MAX_INLINE,
            QueuePair::Verbs(_) => verbs::MAX_INLINE,
        }
    }

    /// Posts requests in order: all of them, or none. A NIC that takes only some has the queue pair in ERROR, and those are flushed.
    #[inline(always)]
    pub fn post_send(&mut self, requests: &[SendWr<'_>]) -> std::result::Result<(), PostError> {
        match self {
            QueuePair::Soft(qp) => qp.post_send(requests),
            QueuePair::Verbs(qp) => qp.post_send(requests),
        }
    }

    /// [`QueuePair::post_send`] of a number of requests that the caller knows: inlined, they are nowhere built in memory on their way to the
    /// software fabric.
    #[inline(always)]
    pub fn post_some<const N: usize>(&mut self, requests: [SendWr<'_>; N]) -> std::result::Result<(), PostError> {
        match self {
            QueuePair::Soft(qp) => qp.post_send(&requests),
            QueuePair::Verbs(qp) => {
                // Copies, so that only they have an address.
                let requests = requests.each_ref().map(|request| *request);
                qp.post_some(&requests)
            }
        }
    }

    /// Posts one receive request. Legal from INIT on.
    #[inline(always)]
    pub fn post_recv(&mut self, request: &RecvWr) -> std::result::Result<(), PostError> {
        match self {
            QueuePair::Soft(qp) => qp.post_recv(request),
            QueuePair::Verbs(qp) => {
                // As in `post_some`.
                let request = *request;
                qp.post_recv(&request)
            }
        }
    }

    /// Takes the queue pair to ERROR: what is outstanding is flushed, and the peer will learn.
    pub fn set_error(&mut self) {
        match self {
            QueuePair::Soft(qp) => qp.set_error(),
            QueuePair::Verbs(qp) => qp.set_error(),
        }
    }

    /// Why the queue pair is in ERROR, in words for a log.
    pub fn error(&self) -> Option<&str> {
        match self {
            QueuePair::Soft(qp) => qp.error(),
            QueuePair::Verbs(qp) => qp.error(),
        }
    }

    /// The peer's process, where the provider has proven it.
    pub fn peer_process(&self) -> Option<&Arc<Process>> {
        match self {
            QueuePair::Soft(qp) => qp.peer_process(),
            QueuePair::Verbs(_) => None,
        }
    }
}
