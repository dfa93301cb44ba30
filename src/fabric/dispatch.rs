//! Devices, domains, completion queues and queue pairs of any provider: each call is passed on by a `match`. The contract is in [`crate::fabric`];
//! threads are the providers'.

use std::os::fd::RawFd;
use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::base::mem::Pages;
use crate::base::process::Process;
use crate::base::stats::RailStats;

use super::region::{MemoryRegion, PagesRegion};
#[cfg(feature = "sim")]
use super::sim;
use super::types::*;
use super::{soft, verbs};

/// A device that queue pairs can be made on. Cheap to clone.
#[derive(Clone)]
pub enum Device {
    /// The embedded software fabric.
    Soft(soft::Device),
    /// A NIC.
    Verbs(verbs::Device),
    /// The simulated fabric.
    #[cfg(feature = "sim")]
    Sim(sim::Device),
}

impl Device {
    /// Properties.
    pub fn info(&self) -> &DeviceInfo {
        match self {
            Device::Soft(device) => device.info(),
            Device::Verbs(device) => device.info(),
            #[cfg(feature = "sim")]
            Device::Sim(device) => device.info(),
        }
    }

    /// What it can do.
    pub fn capabilities(&self) -> Capabilities {
        match self {
            Device::Soft(device) => device.capabilities(),
            Device::Verbs(device) => device.capabilities(),
            #[cfg(feature = "sim")]
            Device::Sim(device) => device.capabilities(),
        }
    }

    /// Opens the device's domain. All openers share it, so a region serves every queue pair of the device.
    pub fn open(&self) -> Result<Domain> {
        match self {
            Device::Soft(device) => Ok(Domain::Soft(device.open()?)),
            Device::Verbs(device) => Ok(Domain::Verbs(device.open()?)),
            #[cfg(feature = "sim")]
            Device::Sim(device) => Ok(Domain::Sim(device.open())),
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
    /// The simulated fabric.
    #[cfg(feature = "sim")]
    Sim(sim::Domain),
}

impl Domain {
    /// Registers memory. Any thread, also while others post and poll.
    ///
    /// Errors: an empty range; one that wraps around the address space; too many regions.
    pub fn register(&self, memory: UserMemory, access: Access) -> Result<MemoryRegion> {
        match self {
            Domain::Soft(domain) => Ok(MemoryRegion::Soft(domain.register(memory, access)?)),
            Domain::Verbs(domain) => Ok(MemoryRegion::Verbs(domain.register(memory, access)?)),
            #[cfg(feature = "sim")]
            Domain::Sim(domain) => Ok(MemoryRegion::Soft(domain.register(memory, access)?)),
        }
    }

    /// Registers pages of our own.
    ///
    /// Errors: as for [`Domain::register`].
    pub fn register_pages(&self, pages: &Pages, access: Access) -> Result<PagesRegion> {
        // SAFETY: a `PagesRegion` drops its region before its clone of the pages.
        let region = self.register(unsafe { pages.as_memory() }, access)?;
        Ok(PagesRegion::new(region, pages.clone()))
    }

    /// Registers memory that a DMA-BUF names, from `offset` on. Requests name it by the addresses of `memory`. Any thread; the descriptor
    /// stays the caller's.
    ///
    /// Errors: as for [`Domain::register`]; a device that takes none.
    pub fn register_dma_buf(&self, memory: UserMemory, access: Access, offset: u64, fd: RawFd) -> Result<MemoryRegion> {
        match self {
            Domain::Soft(_) => Err(Error::usage("the software fabric moves host memory, and takes no DMA-BUF")),
            Domain::Verbs(domain) => Ok(MemoryRegion::Verbs(domain.register_dma_buf(memory, access, offset, fd)?)),
            #[cfg(feature = "sim")]
            Domain::Sim(_) => Err(Error::usage("the simulated fabric takes no DMA-BUF")),
        }
    }

    /// Makes a completion queue; `notify` for one that can be armed.
    pub fn create_cq(&self, notify: bool) -> Result<CompletionQueue> {
        match self {
            Domain::Soft(domain) => Ok(CompletionQueue::Soft(domain.create_cq(notify)?)),
            Domain::Verbs(domain) => Ok(CompletionQueue::Verbs(domain.create_cq(notify)?)),
            #[cfg(feature = "sim")]
            Domain::Sim(domain) => Ok(CompletionQueue::Sim(domain.create_cq(notify)?)),
        }
    }

    /// The device's one descriptor to block on: readable when an armed queue has something, until that queue is polled.
    pub fn notification_fd(&self) -> Result<RawFd> {
        match self {
            Domain::Soft(domain) => domain.notification_fd(),
            Domain::Verbs(domain) => domain.notification_fd(),
            #[cfg(feature = "sim")]
            Domain::Sim(domain) => domain.notification_fd(),
        }
    }
}

/// A completion queue and the queue pairs that complete into it. `Send`, not `Sync`: one thread at a time.
pub enum CompletionQueue {
    /// The embedded software fabric.
    Soft(soft::CompletionQueue),
    /// A NIC.
    Verbs(verbs::CompletionQueue),
    /// The simulated fabric.
    #[cfg(feature = "sim")]
    Sim(sim::CompletionQueue),
}

impl CompletionQueue {
    /// Makes a queue pair in INIT. `stats` is where it counts what it moves.
    ///
    /// Errors: caps out of range; no descriptor or memory left.
    pub fn create_qp(&mut self, caps: &QpCaps, stats: RailStats) -> Result<QpId> {
        match self {
            CompletionQueue::Soft(cq) => cq.create_qp(caps, stats),
            CompletionQueue::Verbs(cq) => cq.create_qp(caps, stats),
            #[cfg(feature = "sim")]
            CompletionQueue::Sim(cq) => cq.create_qp(caps, stats),
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
            #[cfg(feature = "sim")]
            CompletionQueue::Sim(cq) => QueuePair::Sim(cq.qp(id)),
        }
    }

    /// Destroys a queue pair. Nothing of the caller's memory is touched afterwards. Its completions not yet polled are gone.
    pub fn destroy_qp(&mut self, id: QpId) {
        match self {
            CompletionQueue::Soft(cq) => cq.destroy_qp(id),
            CompletionQueue::Verbs(cq) => cq.destroy_qp(id),
            #[cfg(feature = "sim")]
            CompletionQueue::Sim(cq) => cq.destroy_qp(id),
        }
    }

    /// Makes progress and takes completions, at most `out.len()`; returns how many. Completions of one queue pair come in order.
    #[inline(always)]
    pub fn poll(&mut self, out: &mut [Completion]) -> usize {
        match self {
            CompletionQueue::Soft(cq) => cq.poll(out),
            CompletionQueue::Verbs(cq) => cq.poll(out),
            #[cfg(feature = "sim")]
            CompletionQueue::Sim(cq) => cq.poll(out),
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
            #[cfg(feature = "sim")]
            CompletionQueue::Sim(cq) => cq.arm(),
        }
    }

    /// Ends notification: the queue is not polled any more, and what arrives wakes nobody.
    #[cold]
    pub fn disarm(&mut self) {
        match self {
            // A notification of its (a doorbell: a record on the segment's socket, or bytes on a stream) wakes a sleeper once, and is read then.
            CompletionQueue::Soft(_) => {}
            CompletionQueue::Verbs(cq) => cq.disarm(),
            #[cfg(feature = "sim")]
            CompletionQueue::Sim(_) => {}
        }
    }

    /// Whether the last poll of an armed queue returned before the queue was drained: no notification may come for the rest.
    pub fn needs_repoll(&mut self) -> bool {
        match self {
            CompletionQueue::Soft(cq) => cq.needs_repoll(),
            CompletionQueue::Verbs(_) => false,
            #[cfg(feature = "sim")]
            CompletionQueue::Sim(_) => false,
        }
    }
}

/// A queue pair, borrowed from its completion queue.
pub enum QueuePair<'a> {
    /// The embedded software fabric.
    Soft(&'a mut soft::QueuePair),
    /// A NIC.
    Verbs(&'a mut verbs::QueuePair),
    /// The simulated fabric.
    #[cfg(feature = "sim")]
    Sim(&'a mut sim::QueuePair),
}

impl QueuePair<'_> {
    /// Where this queue pair can be reached. Carries a secret: only for the peer's eyes.
    pub fn endpoint(&self) -> Endpoint {
        match self {
            QueuePair::Soft(qp) => qp.endpoint(),
            QueuePair::Verbs(qp) => qp.endpoint(),
            #[cfg(feature = "sim")]
            QueuePair::Sim(qp) => qp.endpoint(),
        }
    }

    /// Takes the queue pair to RTS towards `remote`, without waiting for it.
    ///
    /// Errors: an endpoint that no provider of this kind makes; a queue pair that is not in INIT.
    pub fn connect(&mut self, remote: &Endpoint) -> Result<()> {
        match self {
            QueuePair::Soft(qp) => qp.connect(remote),
            QueuePair::Verbs(qp) => qp.connect(remote),
            #[cfg(feature = "sim")]
            QueuePair::Sim(qp) => qp.connect(remote),
        }
    }

    /// State.
    #[inline]
    pub fn state(&self) -> QpState {
        match self {
            QueuePair::Soft(qp) => qp.state(),
            QueuePair::Verbs(qp) => qp.state(),
            #[cfg(feature = "sim")]
            QueuePair::Sim(qp) => qp.state(),
        }
    }

    /// Whether the peer has connected too: from then on requests are sent as they are posted. A NIC does not tell, and is always connected.
    #[inline]
    pub fn connected(&self) -> bool {
        match self {
            QueuePair::Soft(qp) => qp.connected(),
            QueuePair::Verbs(_) => true,
            #[cfg(feature = "sim")]
            QueuePair::Sim(_) => true,
        }
    }

    /// Whether the peer is known to have posted a receive: then a request that consumes one is sent as it is posted, and no other call is needed for it. A NIC
    /// does not tell, and sends it in any case.
    pub fn knows_receives(&self) -> bool {
        match self {
            QueuePair::Soft(qp) => qp.knows_receives(),
            QueuePair::Verbs(_) => true,
            #[cfg(feature = "sim")]
            QueuePair::Sim(_) => true,
        }
    }

    /// Whether the peer's host, or the way to it, does not answer what was sent, which is sent again: for how many nanoseconds at least. A NIC gives up
    /// by itself, and does not tell before.
    pub fn unanswered_for(&self) -> Option<u64> {
        match self {
            QueuePair::Soft(qp) => qp.unanswered_for(),
            QueuePair::Verbs(_) => None,
            #[cfg(feature = "sim")]
            QueuePair::Sim(_) => None,
        }
    }

    /// If the queue pair failed because this process has no descriptor, memory or port left for it: what the system said.
    pub fn lack(&self) -> Option<i32> {
        match self {
            QueuePair::Soft(qp) => qp.lack(),
            QueuePair::Verbs(_) => None,
            #[cfg(feature = "sim")]
            QueuePair::Sim(_) => None,
        }
    }

    /// Number of the queue pair, in its completions.
    #[inline]
    pub fn qp_num(&self) -> u32 {
        match self {
            QueuePair::Soft(qp) => qp.qp_num(),
            QueuePair::Verbs(qp) => qp.qp_num(),
            #[cfg(feature = "sim")]
            QueuePair::Sim(qp) => qp.qp_num(),
        }
    }

    /// Bytes that a request may carry inline.
    pub fn max_inline(&self) -> usize {
        match self {
            QueuePair::Soft(_) => soft::MAX_INLINE,
            QueuePair::Verbs(_) => verbs::MAX_INLINE,
            #[cfg(feature = "sim")]
            QueuePair::Sim(_) => sim::MAX_INLINE,
        }
    }

    /// Posts requests in order: all of them, or none. A NIC that takes only some has the queue pair in ERROR, and those are flushed.
    #[inline(always)]
    pub fn post_send(&mut self, requests: &[SendWr<'_>]) -> std::result::Result<(), PostError> {
        match self {
            QueuePair::Soft(qp) => qp.post_send(requests),
            QueuePair::Verbs(qp) => qp.post_send(requests),
            #[cfg(feature = "sim")]
            QueuePair::Sim(qp) => qp.post_send(requests),
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
            #[cfg(feature = "sim")]
            QueuePair::Sim(qp) => qp.post_send(&requests),
        }
    }

    /// [`QueuePair::post_some`] of requests that can wait until something else is sent on the queue pair, this side's acks among it: a provider may
    /// send them together. It sends them in any case before the caller sleeps, and after a bounded number of polls.
    #[inline(always)]
    pub fn post_held<const N: usize>(&mut self, requests: [SendWr<'_>; N]) -> std::result::Result<(), PostError> {
        match self {
            QueuePair::Soft(qp) => qp.post_held(&requests),
            QueuePair::Verbs(_) => self.post_some(requests),
            #[cfg(feature = "sim")]
            QueuePair::Sim(_) => self.post_some(requests),
        }
    }

    /// Sends them, if they are not sent.
    pub fn send_held(&mut self) {
        if let QueuePair::Soft(qp) = self {
            qp.send_held();
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
            #[cfg(feature = "sim")]
            QueuePair::Sim(qp) => qp.post_recv(request),
        }
    }

    /// Takes the queue pair to ERROR: what is outstanding is flushed, and the peer will learn.
    pub fn set_error(&mut self) {
        match self {
            QueuePair::Soft(qp) => qp.set_error(),
            QueuePair::Verbs(qp) => qp.set_error(),
            #[cfg(feature = "sim")]
            QueuePair::Sim(qp) => qp.set_error(),
        }
    }

    /// Whether everything outstanding on a queue pair in ERROR was reported, and nothing that the peer sent can land any more.
    pub fn drained(&mut self) -> bool {
        match self {
            QueuePair::Soft(qp) => qp.drained(),
            QueuePair::Verbs(qp) => qp.drained(),
            #[cfg(feature = "sim")]
            QueuePair::Sim(qp) => qp.drained(),
        }
    }

    /// Whether the peer is on this host and maps memory of [`SharedPages`](super::SharedPages), so that its bytes are read without a system call.
    pub fn maps_memory(&self) -> bool {
        match self {
            QueuePair::Soft(qp) => qp.maps_memory(),
            QueuePair::Verbs(_) => false,
            #[cfg(feature = "sim")]
            QueuePair::Sim(_) => false,
        }
    }

    /// Whether dropping the queue pair would wait for the peer, which may be in the middle of a write to this process's memory. Takes it to ERROR.
    pub fn drop_waits(&mut self) -> bool {
        // Once: it wakes who sleeps.
        if self.state() != QpState::Error {
            self.set_error();
        }
        match self {
            QueuePair::Soft(qp) => qp.drop_waits(),
            QueuePair::Verbs(_) => false,
            #[cfg(feature = "sim")]
            QueuePair::Sim(_) => false,
        }
    }

    /// Takes a queue pair in ERROR that is drained back to INIT, as this generation: the first was 0. The endpoint is what it was, and what it is to
    /// be connected to is the peer's endpoint of before; it meets the peer once that one is of the same generation.
    ///
    /// Errors: another state; not drained; a generation that is not later; a device that refuses.
    pub fn reset(&mut self, generation: u32) -> Result<()> {
        match self {
            QueuePair::Soft(qp) => qp.reset(generation),
            QueuePair::Verbs(qp) => qp.reset(generation),
            #[cfg(feature = "sim")]
            QueuePair::Sim(qp) => qp.reset(generation),
        }
    }

    /// Why the queue pair is in ERROR, in words for a log.
    pub fn error(&self) -> Option<&str> {
        match self {
            QueuePair::Soft(qp) => qp.error(),
            QueuePair::Verbs(qp) => qp.error(),
            #[cfg(feature = "sim")]
            QueuePair::Sim(qp) => qp.error(),
        }
    }

    /// The peer's process, where the provider has proven it.
    pub fn peer_process(&self) -> Option<&Arc<Process>> {
        match self {
            QueuePair::Soft(qp) => qp.peer_process(),
            QueuePair::Verbs(_) => None,
            #[cfg(feature = "sim")]
            QueuePair::Sim(_) => None,
        }
    }
}
