//! The embedded software fabric: RC queue pairs in user space, over shared memory within a host and TCP between hosts.
//!
//! A device is a network interface. It has a hub, where streams of other processes arrive, and one descriptor to sleep on. Everything else
//! belongs to a completion queue and is moved by the thread that polls it: each poll steps every queue pair of the queue, which meets its peer
//! (`connect`), and then moves bytes over its wire (`shm`, `tcp`, or `loopback` for one connected to itself).

mod connect;
mod dial;
mod endpoint;
mod hub;
pub mod iface;
mod loopback;
pub mod memory;
pub mod mr;
mod publish;
mod qp;
pub mod queue;
mod region;
mod shm;
pub mod tcp;
#[cfg(test)]
mod tests;

use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::Arc;

use once_cell::sync::OnceCell;

use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::fd::OwnedFd;
use crate::base::log::{self, log_warn};
use crate::base::stats::RailStats;
use crate::base::{mac, mem, rand};
use crate::fabric::QpId;
use crate::fabric::types::*;
use hub::Hub;
pub use qp::QueuePair;
pub use region::MemoryRegion;

/// Bytes that a request may carry inline: a flow-control slot of `net`, exactly.
pub const MAX_INLINE: usize = 64;
/// Microseconds, for NCCL's topology: what NCCL says of its socket transport (2.27, src/transport/net_socket.cc) would hide that most of
/// our peers are near.
const LATENCY_US: f32 = 1.0;
/// Turns of a poll whose caller is about to sleep, as long as something moves and nothing completes.
const ARMED_TURNS: u32 = 4096;
/// Depth of either queue at most.
const MAX_DEPTH: u32 = 4096;

/// A network interface.
#[derive(Clone)]
pub struct Device {
    shared: Arc<Shared>,
}

struct Shared {
    info: DeviceInfo,
    config: Arc<Config>,
    kernel: [u8; 16],
    hub: Hub,
    /// What sleepers watch; made when somebody first wants to sleep.
    sleep: OnceCell<OwnedFd>,
}

/// Lists the usable interfaces, and removes what dead processes of this user left in /dev/shm.
///
/// Errors: a setting that names no interface of this machine.
pub fn devices(config: &Arc<Config>) -> Result<Vec<Device>> {
    mem::sweep();
    let listing = iface::list(config)?;
    if listing.interfaces.is_empty() {
        log_warn!(log::INIT, "no usable network interface: {}", listing.excluded_line());
    }
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut kernel = [0; 16];
    kernel.copy_from_slice(&mac::hmac(b"kernel", &[&boot])[..16]);
    listing
        .interfaces
        .into_iter()
        .map(|interface| {
            let mut instance = [0; 16];
            rand::fill(&mut instance)?;
            let hub = Hub::new(config.clone(), interface.addr, instance)?;
            let info = DeviceInfo {
                name: interface.name,
                fabric: "soft",
                pci_path: interface.pci_path,
                guid: interface.guid,
                port: interface.port,
                speed_mbps: interface.speed_mbps,
                latency_us: LATENCY_US,
                mtu: interface.mtu,
                max_qp: 0,
                rail_id: ID_UNDEF,
                plane_id: ID_UNDEF,
                peer_memory: false,
                dma_buf: false,
                addr: interface.addr,
            };
            Ok(Device { shared: Arc::new(Shared { info, config: config.clone(), kernel, hub, sleep: OnceCell::new() }) })
        })
        .collect()
}

impl Device {
    /// Properties.
    pub fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    /// Opens the device's domain.
    pub fn open(&self) -> Result<Domain> {
        Ok(Domain { shared: self.shared.clone() })
    }
}

/// A device's domain. Regions serve every device of the process: one process, one address space.
#[derive(Clone)]
pub struct Domain {
    shared: Arc<Shared>,
}

impl Domain {
    /// Registers memory.
    pub fn register(&self, memory: UserMemory, access: Access) -> Result<MemoryRegion> {
        MemoryRegion::register(memory, access)
    }

    /// Makes a completion queue.
    pub fn create_cq(&self, notify: bool) -> Result<CompletionQueue> {
        if notify {
            self.notification_fd()?;
        }
        Ok(CompletionQueue { shared: self.shared.clone(), notify, armed: false, restless: false, qps: Vec::new(), next: 0 })
    }

    /// The descriptor to sleep on.
    pub fn notification_fd(&self) -> Result<RawFd> {
        self.shared.sleep_fd().map(|fd| fd.as_raw_fd())
    }
}

impl Shared {
    fn sleep_fd(&self) -> Result<&OwnedFd> {
        self.sleep.get_or_try_init(|| {
            // SAFETY: plain system call; the result is checked before it is owned.
            let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
            if fd < 0 {
                return Err(Error::last_os("epoll_create1"));
            }
            // SAFETY: a fresh descriptor that nobody else owns.
            Ok(unsafe { OwnedFd::from_raw_fd(fd) })
        })
    }

    /// Lets sleepers wake for whoever comes to the hub and for greetings that are still to come.
    fn watch_hub(&self) -> Result<()> {
        if self.sleep.get().is_none() { Ok(()) } else { self.hub.watch(|fd, events| self.watch(fd, events)) }
    }

    /// Lets sleepers wake for `events` of `fd`. A descriptor that is closed stops being watched by itself.
    fn watch(&self, fd: RawFd, events: u32) -> Result<()> {
        let sleep = self.sleep_fd()?.as_raw_fd();
        let mut event = libc::epoll_event { events, u64: 0 };
        for op in [libc::EPOLL_CTL_MOD, libc::EPOLL_CTL_ADD] {
            // SAFETY: both descriptors are open, the event is alive.
            if unsafe { libc::epoll_ctl(sleep, op, fd, &mut event) } == 0 {
                return Ok(());
            }
        }
        Err(Error::last_os("epoll_ctl"))
    }
}

/// A completion queue and its queue pairs.
pub struct CompletionQueue {
    shared: Arc<Shared>,
    notify: bool,
    /// Whether the caller will sleep unless something turns up.
    armed: bool,
    /// The last armed poll gave up before all was drained.
    restless: bool,
    qps: Vec<Option<Box<QueuePair>>>,
    /// Where the next poll begins, so that none is starved.
    next: usize,
}

impl CompletionQueue {
    /// Makes a queue pair.
    pub fn create_qp(&mut self, caps: &QpCaps, stats: RailStats) -> Result<QpId> {
        for (name, depth) in [("send_depth", caps.send_depth), ("recv_depth", caps.recv_depth)] {
            if !(1..=MAX_DEPTH).contains(&depth) {
                return Err(Error::usage(format!("{name} {depth}: must be in 1..={MAX_DEPTH}")));
            }
        }
        if caps.rnr_retry > 7 {
            return Err(Error::usage(format!("rnr_retry {}: must be in 0..=7", caps.rnr_retry)));
        }
        let qp = Box::new(QueuePair::new(self.shared.clone(), caps, stats, self.notify)?);
        let free = self.qps.iter().position(Option::is_none);
        let at = free.unwrap_or(self.qps.len());
        if at == self.qps.len() {
            self.qps.push(None);
        }
        self.qps[at] = Some(qp);
        Ok(QpId(at as u32))
    }

    /// The queue pair of that id.
    #[inline(always)]
    pub fn qp(&mut self, id: QpId) -> &mut QueuePair {
        match self.qps.get_mut(id.0 as usize) {
            Some(Some(qp)) => qp,
            _ => unknown(id),
        }
    }

    /// Destroys it.
    pub fn destroy_qp(&mut self, id: QpId) {
        if let Some(place) = self.qps.get_mut(id.0 as usize) {
            *place = None;
        }
    }

    /// Steps every queue pair and takes completions.
    #[inline(always)]
    pub fn poll(&mut self, out: &mut [Completion]) -> usize {
        if self.armed {
            return self.poll_armed(out);
        }
        self.turn(out).0
    }

    /// [`CompletionQueue::poll`] of a caller who is about to sleep.
    #[inline(never)]
    fn poll_armed(&mut self, out: &mut [Completion]) -> usize {
        for _ in 0..ARMED_TURNS {
            let (n, moved) = self.turn(out);
            // The caller takes 0 for "nothing to be done here", not for "nothing done yet".
            if n > 0 || !moved || out.is_empty() {
                self.armed = n == 0;
                return n;
            }
            // What moved may have been what the peer had rung for, so that it would not ring again.
            if self.qps.iter_mut().flatten().any(|qp| qp.arm().is_err()) {
                break;
            }
        }
        // A peer that streams without end, or that cannot be watched, does not keep the caller here, nor lets it sleep.
        self.restless = true;
        self.shared.hub.ring();
        0
    }

    /// Whether the last armed poll gave up. Another sleeper of the device may have silenced what it rang.
    pub fn is_restless(&mut self) -> bool {
        std::mem::take(&mut self.restless)
    }

    /// Steps every queue pair once: completions taken, and whether anything moved.
    #[inline(always)]
    fn turn(&mut self, out: &mut [Completion]) -> (usize, bool) {
        if let [Some(qp)] = self.qps.as_mut_slice() {
            return qp.turn(self.armed, out);
        }
        self.turn_all(out)
    }

    /// The same of any number of them.
    #[inline(never)]
    fn turn_all(&mut self, out: &mut [Completion]) -> (usize, bool) {
        let count = self.qps.len();
        let (mut n, mut moved) = (0, false);
        let mut at = self.next;
        self.next = if self.next + 1 < count { self.next + 1 } else { 0 };
        for _ in 0..count {
            if let Some(Some(qp)) = self.qps.get_mut(at) {
                let (taken, some) = qp.turn(self.armed, out.get_mut(n..).unwrap_or_default());
                n += taken;
                moved |= some;
            }
            if n == out.len() {
                break;
            }
            at = if at + 1 < count { at + 1 } else { 0 };
        }
        (n, moved)
    }

    /// Asks for a notification.
    pub fn arm(&mut self) -> Result<()> {
        if !self.notify {
            return Err(Error::usage("this completion queue was created without notification"));
        }
        self.armed = true;
        // The listeners are watched as long as they are open, and whoever comes keeps sleepers awake until taken in.
        // For want of a descriptor, who waits for a stream fails at the next poll.
        let _ = self.shared.hub.serve();
        self.shared.watch_hub()?;
        self.shared.hub.hush();
        self.qps.iter_mut().flatten().try_for_each(|qp| qp.arm())
    }
}

#[cold]
fn unknown(id: QpId) -> ! {
    panic!("{id:?} names no queue pair of this completion queue")
}
