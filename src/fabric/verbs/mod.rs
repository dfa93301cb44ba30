//! RDMA NICs through libibverbs: RC queue pairs that the device itself moves.
//!
//! A device is a port of a NIC. Its domain is a protection domain, one completion channel to sleep on, and a thread (`events`) that waits
//! for the device's asynchronous events. Everything else belongs to a completion queue and the thread that polls it. The NIC makes progress
//! without polls.
//!
//! The contract's ordered publish rests on the NIC, as in NCCL: a clear-to-send is one WRITE of 64 bytes into one aligned cache line, in memory that
//! is registered without relaxed ordering, and is assumed to become visible with its last word last.
//!
//! Two limits, as a NIC tells less than the contract wants: a peer that is gone or has failed is noticed only by requests outstanding to it; and
//! requests that do not complete within RAILHEAD_FABRIC_TIMEOUT_S fail the queue pair, RNR waits included.

pub mod attributes;
mod channel;
mod choices;
mod context;
mod cq;
mod endpoint;
mod events;
mod filter;
pub mod gid;
mod library;
pub mod port;
mod qp;
mod raw_qp;
mod ring;
mod status;

use std::os::fd::RawFd;
use std::sync::Arc;

use ibverbs_sys::*;
use once_cell::sync::OnceCell;

use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_info, log_warn};
use crate::fabric::iface;
use crate::fabric::types::*;
use channel::Channel;
pub use choices::{Choices, choices};
pub use cq::CompletionQueue;
use events::{AsyncStatus, Events};
use library::{Library, made};
use port::{Listing, Port};
pub use qp::{MAX_INLINE, QueuePair};

/// A port of a NIC.
#[derive(Clone)]
pub struct Device {
    port: Arc<Port>,
    domain: Arc<OnceCell<Arc<Shared>>>,
}

/// Lists the usable ports. None without libibverbs, or where NCCL_IB_DISABLE says so; the log then has a line.
///
/// Errors: a setting that names no interface of this machine.
pub fn devices(config: &Arc<Config>) -> Result<Vec<Device>> {
    let listing = match listing(config)? {
        Ok(listing) => listing,
        Err(why) => {
            log_info!(log::INIT, "no RDMA NICs: {why}");
            return Ok(Vec::new());
        }
    };
    for rejected in &listing.rejected {
        log_info!(log::INIT, "RDMA port {} {}", rejected.label, rejected.why);
    }
    if listing.ports.is_empty() && listing.rejected.is_empty() {
        log_info!(log::INIT, "no RDMA NICs: libibverbs lists none");
    }
    for port in &listing.ports {
        log_info!(log::INIT, "RDMA port {}: GID {} (index {}), {} Mbit/s", port.label, port.gid, port.gid_index, port.info.speed_mbps);
    }
    Ok(listing.ports.into_iter().map(|port| Device { port, domain: Arc::default() }).collect())
}

/// What became of every port of the machine, or, in words, why none was looked at.
///
/// Errors: a setting that names no interface of this machine.
pub fn listing(config: &Arc<Config>) -> Result<std::result::Result<Listing, String>> {
    if config.ib_disable {
        return Ok(Err("NCCL_IB_DISABLE is set".into()));
    }
    let library = match library::get() {
        Ok(library) => library,
        Err(why) => return Ok(Err(why.into())),
    };
    // Handshakes use TCP, on the interface that NCCL would choose for them.
    let interfaces = iface::list(config)?;
    let Some(addr) = interfaces.interfaces.first().map(|interface| interface.addr) else {
        return Ok(Err(format!("no usable network interface for handshakes: {}", interfaces.excluded_line())));
    };
    port::list(library, config, addr).map(Ok)
}

impl Device {
    /// Properties.
    pub fn info(&self) -> &DeviceInfo {
        &self.port.info
    }

    /// What it can do.
    pub fn capabilities(&self) -> Capabilities {
        let config = &self.port.config;
        let adaptive = match config.ib_adaptive_routing {
            -1 => u32::from(self.port.link_layer) == IBV_LINK_LAYER_INFINIBAND,
            set => set != 0,
        };
        Capabilities {
            keeps_early_requests: false,
            counts_plain_writes: false,
            splits_data: config.ib_split_data,
            // A WRITE is routed adaptively, its immediate is not (NCCL 2.28, NCCL_IB_AR_THRESHOLD and NCCL_IB_ADAPTIVE_ROUTING).
            ar_threshold: if adaptive { config.ib_ar_threshold } else { u32::MAX },
            shares_regions: true,
            descriptors_per_qp: 0,
        }
    }

    /// Opens the device's domain.
    pub fn open(&self) -> Result<Domain> {
        let shared = self.domain.get_or_try_init(|| Shared::new(self.port.clone()).map(Arc::new))?;
        Ok(Domain { shared: shared.clone() })
    }
}

/// A device's domain.
#[derive(Clone)]
pub struct Domain {
    shared: Arc<Shared>,
}

impl Domain {
    /// Registers memory.
    pub fn register(&self, memory: UserMemory, access: Access) -> Result<MemoryRegion> {
        self.shared.register(memory, access)
    }

    /// Registers memory that a DMA-BUF names.
    pub fn register_dma_buf(&self, memory: UserMemory, access: Access, offset: u64, fd: RawFd) -> Result<MemoryRegion> {
        self.shared.register_dma_buf(memory, access, offset, fd)
    }

    /// Makes a completion queue.
    pub fn create_cq(&self, notify: bool) -> Result<CompletionQueue> {
        CompletionQueue::new(self.shared.clone(), notify)
    }

    /// The descriptor to sleep on.
    pub fn notification_fd(&self) -> Result<RawFd> {
        self.shared.channel().map(Channel::fd)
    }
}

/// What the users of a domain share. Dropped in this order, after all of them.
struct Shared {
    /// Made when the first queue with notification is.
    channel: OnceCell<Channel>,
    pd: *mut ibv_pd,
    port: Arc<Port>,
}

// SAFETY: libibverbs' functions may be called from any thread.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn new(port: Arc<Port>) -> Result<Shared> {
        // The thread is started before there is a queue pair that an event could be for.
        port.context.events(port.config.ib_async_errors)?;
        // SAFETY: the device is open.
        let pd = made(unsafe { (port.context.library.alloc_pd)(port.context.raw) });
        let pd = pd.map_err(|e| Error::system(format!("{}: ibv_alloc_pd", port.label), e))?;
        Ok(Shared { channel: OnceCell::new(), pd, port })
    }

    fn library(&self) -> &'static Library {
        self.port.context.library
    }

    /// The thread that waits for asynchronous events. `new` has started it, so it is there.
    fn events(&self) -> Option<&Events> {
        self.port.context.events(self.port.config.ib_async_errors).ok()
    }

    /// Counts asynchronous events for a queue pair from now on.
    fn watch_qp(&self, qp: *mut ibv_qp, cq: *mut ibv_cq) -> Arc<AsyncStatus> {
        let (port, address) = (&self.port, (self.port.gid_index_now(), self.port.gid));
        self.events().map_or_else(Arc::default, |events| events.watch(qp, cq, port.number, address))
    }

    /// Ends that: the queue pair may be destroyed then.
    fn unwatch_qp(&self, qp: *mut ibv_qp) {
        if let Some(events) = self.events() {
            events.forget(qp);
        }
    }

    fn channel(&self) -> Result<&Channel> {
        self.channel.get_or_try_init(|| Channel::new(self.library(), self.port.context.raw))
    }

    /// Whether this is the process that opened the device, and not a forked child: a child must not destroy what is its parent's.
    fn owned(&self) -> bool {
        self.port.context.owned()
    }

    fn register(self: &Arc<Self>, memory: UserMemory, access: Access) -> Result<MemoryRegion> {
        let (flags, relaxed) = self.flags(memory, access)?;
        let (library, addr) = (self.library(), std::ptr::with_exposed_provenance_mut(memory.addr()));
        if let (true, Some(reg_mr)) = (relaxed, library.reg_mr_iova2) {
            let flags = flags | Access::RELAXED_ORDERING.bits();
            // SAFETY: the domain is live; the range is the caller's, who vouched for it.
            let raw = unsafe { reg_mr(self.pd, addr, memory.len(), memory.addr() as u64, flags) };
            if !raw.is_null() {
                return Ok(MemoryRegion { raw, memory, shared: self.clone() });
            }
            // A driver that does not know the flag may refuse it; then without it.
        }
        // SAFETY: as above.
        let raw = made(unsafe { (library.reg_mr)(self.pd, addr, memory.len(), flags as i32) });
        let raw = raw.map_err(|e| {
            let hint = match e.raw_os_error() {
                Some(libc::ENOMEM | libc::EAGAIN) => memlock_hint(),
                Some(libc::EFAULT) => {
                    " (not memory that the kernel can pin: a GPU's needs nvidia_peermem or DMA-BUF; or it is mapped read-only)".into()
                }
                _ => String::new(),
            };
            Error::system(format!("{}: registering {} bytes at {:#x}{hint}", self.port.label, memory.len(), memory.addr()), e)
        })?;
        Ok(MemoryRegion { raw, memory, shared: self.clone() })
    }
}

impl Shared {
    /// The device's access flags, and whether relaxed ordering is to be tried on top of them.
    ///
    /// Errors: a range that no region can have.
    fn flags(&self, memory: UserMemory, access: Access) -> Result<(u32, bool)> {
        if memory.is_empty() {
            return Err(Error::usage("register: an empty range"));
        }
        if memory.addr().checked_add(memory.len()).is_none() {
            return Err(Error::usage(format!("register: {} bytes at {:#x} wrap around the address space", memory.len(), memory.addr())));
        }
        let relaxed = access.contains(Access::RELAXED_ORDERING) && self.port.config.ib_relaxed_ordering > 0;
        let mut flags = access.difference(Access::RELAXED_ORDERING).bits();
        if access.contains(Access::REMOTE_WRITE) {
            // Required together (InfiniBand specification 1.4, 10.6.3.3).
            flags |= Access::LOCAL_WRITE.bits();
        }
        Ok((flags, relaxed))
    }

    fn register_dma_buf(self: &Arc<Self>, memory: UserMemory, access: Access, offset: u64, fd: RawFd) -> Result<MemoryRegion> {
        let (flags, relaxed) = self.flags(memory, access)?;
        let Some(reg_mr) = self.library().reg_dmabuf_mr else {
            return Err(Error::usage(format!("{}: libibverbs has no ibv_reg_dmabuf_mr (rdma-core 34 has)", self.port.label)));
        };
        let iova = memory.addr() as u64;
        let mut refused = None;
        // A driver that does not know the flag may refuse it; then without it.
        let with_relaxed = relaxed.then_some(flags | Access::RELAXED_ORDERING.bits());
        for flags in with_relaxed.into_iter().chain([flags]) {
            // SAFETY: the domain is live. Whatever the descriptor is, the kernel checks it.
            match made(unsafe { reg_mr(self.pd, offset, memory.len(), iova, fd, flags as i32) }) {
                Ok(raw) => return Ok(MemoryRegion { raw, memory, shared: self.clone() }),
                Err(error) => refused = Some(error),
            }
        }
        let error = refused.unwrap_or_else(std::io::Error::last_os_error);
        let hint = match error.raw_os_error() {
            Some(libc::EBADF) => " (descriptor closed, or not a DMA-BUF)".into(),
            Some(libc::EINVAL) => " (offset or size outside of the DMA-BUF, or not a DMA-BUF)".into(),
            Some(libc::EOPNOTSUPP) => " (the NIC's driver, or the GPU's, cannot)".into(),
            Some(libc::ENOMEM) => memlock_hint(),
            _ => String::new(),
        };
        let (label, len) = (&self.port.label, memory.len());
        Err(Error::system(format!("{label}: registering {len} bytes at {offset} of DMA-BUF {fd}{hint}"), error))
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if !self.owned() {
            // The channel is the parent's as well.
            std::mem::forget(self.channel.take());
            return;
        }
        drop(self.channel.take());
        // SAFETY: made by alloc_pd, given back once, after everything made in it (each of which holds it).
        unsafe { (self.library().dealloc_pd)(self.pd) };
    }
}

/// Registered memory.
pub struct MemoryRegion {
    raw: *mut ibv_mr,
    memory: UserMemory,
    shared: Arc<Shared>,
}

// SAFETY: libibverbs' functions may be called from any thread; the keys never change.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Key for local use.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the region is registered as long as `self` lives.
        unsafe { (*self.raw).lkey }
    }

    /// Key for the peer.
    pub fn rkey(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.raw).rkey }
    }

    /// The range.
    pub fn memory(&self) -> UserMemory {
        self.memory
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        if !self.shared.owned() {
            return;
        }
        // SAFETY: made by reg_mr, given back once.
        let result = library::check(unsafe { (self.shared.library().dereg_mr)(self.raw) });
        if let Err(e) = result {
            log_warn!(
                log::REG,
                "{}: ibv_dereg_mr of {} bytes at {:#x}: {e}",
                self.shared.port.label,
                self.memory.len(),
                self.memory.addr()
            );
        }
    }
}

/// What to do about the most common reason for ENOMEM.
#[cold]
fn memlock_hint() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is an rlimit that outlives the call.
    match unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } {
        0 if limit.rlim_cur == libc::RLIM_INFINITY => String::new(),
        0 => format!(" (RLIMIT_MEMLOCK is {} bytes: raise it with `ulimit -l unlimited`, or in the container's settings)", limit.rlim_cur),
        _ => " (RLIMIT_MEMLOCK may be too low: `ulimit -l`)".into(),
    }
}
