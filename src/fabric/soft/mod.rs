//! The embedded software fabric: RC queue pairs in user space, over shared memory within a host and TCP between hosts.
//!
//! A device is a network interface. It has a hub, which accepts streams from other processes, and one descriptor to sleep on. Everything else
//! belongs to a completion queue and to the thread that polls it. Each poll makes progress on every queue pair of the queue: it connects to its
//! peer (`connect`), and then moves bytes over its wire (`shm`, `tcp`, or `loopback` for one connected to itself).

mod connect;
mod dial;
mod endpoint;
mod hub;
mod loopback;
pub mod memory;
pub mod mr;
pub(super) mod publish;
mod qp;
mod region;
mod shm;
mod sockets;
pub mod tcp;
#[cfg(test)]
mod tests;
pub mod work_queues;

use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::Arc;

use once_cell::sync::OnceCell;

use crate::base::config::{Config, SoftWire};
use crate::base::error::{Error, Result};
use crate::base::fd::OwnedFd;
use crate::base::log::{self, log_warn};
use crate::base::stats::RailStats;
use crate::base::{mac, mem, rand};
use crate::fabric::iface;
use crate::fabric::types::*;
use hub::{Hub, Turn};
pub use qp::QueuePair;
pub use region::MemoryRegion;

/// Bytes that a request may carry inline: a clear-to-send, exactly.
pub const MAX_INLINE: usize = 64;
/// Microseconds, for NCCL's topology: what NCCL says of its socket transport (2.27, src/transport/net_socket.cc) would hide that most of
/// our peers are near.
const LATENCY_US: f32 = 1.0;
/// How often one poll of an armed queue polls its queue pairs, as long as something moves and nothing completes.
const ARMED_POLLS: u32 = 4096;
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
    /// The epoll descriptor that callers sleep on; made when the first queue with notification is.
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

    /// What the software fabric can do.
    pub fn capabilities(&self) -> Capabilities {
        let config = &self.shared.config;
        Capabilities {
            keeps_early_requests: true,
            counts_plain_writes: true,
            splits_data: true,
            ar_threshold: u32::MAX,
            shares_regions: false,
            // The socket beside a segment, or the control stream; over TCP the data streams, too.
            descriptors_per_qp: 1 + if config.soft_wire == SoftWire::Tcp { config.tcp_streams } else { 0 },
        }
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
        Ok(CompletionQueue { shared: self.shared.clone(), notify, armed: Armed::No, needs_repoll: false, qps: Vec::new(), next: 0 })
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

    /// Serves the hub, if it is a queue pair's turn to, and has sleepers woken by more that reaches it. The inner error is [`Hub::serve`]'s.
    ///
    /// Errors: it cannot be watched.
    fn serve_hub(&self, turn: &mut Turn) -> Result<std::io::Result<()>> {
        if !self.hub.is_turn_of(turn) {
            return Ok(Ok(()));
        }
        let served = self.hub.serve();
        self.watch_hub()?;
        if served.is_ok() {
            self.hub.had_turn(turn);
        }
        Ok(served)
    }

    /// Wakes sleepers for a stream that reaches the hub, and for a Hello on one that is half-open.
    fn watch_hub(&self) -> Result<()> {
        if self.sleep.get().is_none() { Ok(()) } else { self.hub.watch(|fd, events| self.watch(fd, events)) }
    }

    /// Wakes sleepers for `events` of `fd`. The kernel stops watching a descriptor when it is closed.
    fn watch(&self, fd: RawFd, events: u32) -> Result<()> {
        let sleep = self.sleep_fd()?;
        let watched = [libc::EPOLL_CTL_MOD, libc::EPOLL_CTL_ADD].into_iter().any(|op| epoll_ctl(sleep, op, fd, events));
        if watched { Ok(()) } else { Err(Error::last_os("epoll_ctl")) }
    }

    /// Sleepers are not woken any more once `fd` takes output, if they were.
    fn watch_input_only(&self, fd: RawFd) {
        if let Some(sleep) = self.sleep.get() {
            // It fails if nobody watches it.
            epoll_ctl(sleep, libc::EPOLL_CTL_MOD, fd, libc::EPOLLIN as u32);
        }
    }
}

/// Whether it succeeded.
fn epoll_ctl(sleep: &OwnedFd, op: i32, fd: RawFd, events: u32) -> bool {
    let mut event = libc::epoll_event { events, u64: 0 };
    // SAFETY: the event is alive, and the first descriptor open. The second is the caller's; one that is closed is refused.
    unsafe { libc::epoll_ctl(sleep.as_raw_fd(), op, fd, &mut event) == 0 }
}

/// Whether the caller of a queue's polls goes to sleep once one finds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Armed {
    /// No.
    No,
    /// Yes, and nothing has completed since it was armed.
    Yes,
    /// Yes, and something has, which may have used up the notification.
    Found,
    /// One has found nothing: the caller sleeps, or has.
    Drained,
}

/// A completion queue and its queue pairs.
pub struct CompletionQueue {
    shared: Arc<Shared>,
    notify: bool,
    armed: Armed,
    /// Whether the last armed poll returned before the queue was drained.
    needs_repoll: bool,
    qps: Vec<Option<Box<QueuePair>>>,
    /// The queue pair that the next poll begins with, so that none starves.
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

    /// Makes progress on every queue pair and polls completions.
    #[inline(always)]
    pub fn poll(&mut self, out: &mut [Completion]) -> usize {
        if self.armed != Armed::No {
            return self.poll_armed(out);
        }
        self.poll_once(out).0
    }

    /// [`CompletionQueue::poll`] for a caller that will sleep if it returns 0.
    #[inline(never)]
    fn poll_armed(&mut self, out: &mut [Completion]) -> usize {
        for _ in 0..ARMED_POLLS {
            let (n, moved) = self.poll_once(out);
            if n > 0 {
                // Who still drains it goes to sleep without arming it again; who has slept arms it before the next sleep.
                self.armed = if self.armed == Armed::Drained { Armed::No } else { Armed::Found };
                self.qps.iter_mut().flatten().for_each(|qp| qp.after_sleep());
                return n;
            }
            // 0 makes the caller sleep, so it is returned only when nothing is left to do, not when nothing has completed yet.
            if !moved && self.armed != Armed::Found {
                if self.qps.iter_mut().flatten().any(|qp| qp.before_sleep().is_err()) {
                    break;
                }
                self.armed = Armed::Drained;
                return 0;
            }
            if out.is_empty() {
                return 0;
            }
            // What moved may have used up the notification: the peer sends no other until this side is armed again.
            if self.qps.iter_mut().flatten().any(|qp| qp.arm().is_err()) {
                break;
            }
            self.armed = Armed::Yes;
        }
        // The peer sends without end, or its descriptor cannot be watched: the caller gets its turn, and must not sleep.
        self.needs_repoll = true;
        self.shared.hub.notify();
        0
    }

    /// Whether the last armed poll returned before the queue was drained. It has also notified the device's descriptor, but another sleeper
    /// may have cleared that.
    pub fn needs_repoll(&mut self) -> bool {
        std::mem::take(&mut self.needs_repoll)
    }

    /// Polls every queue pair once: how many completions, and whether anything moved.
    #[inline(always)]
    fn poll_once(&mut self, out: &mut [Completion]) -> (usize, bool) {
        if let [Some(qp)] = self.qps.as_mut_slice() {
            return qp.poll_once(self.armed != Armed::No, out);
        }
        self.poll_all(out)
    }

    /// [`CompletionQueue::poll_once`] of a queue that has not exactly one queue pair.
    #[inline(never)]
    fn poll_all(&mut self, out: &mut [Completion]) -> (usize, bool) {
        let count = self.qps.len();
        let (mut n, mut moved) = (0, false);
        let mut at = self.next;
        self.next = if self.next + 1 < count { self.next + 1 } else { 0 };
        for _ in 0..count {
            if let Some(Some(qp)) = self.qps.get_mut(at) {
                let (taken, some) = qp.poll_once(self.armed != Armed::No, out.get_mut(n..).unwrap_or_default());
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
        self.armed = Armed::Yes;
        self.qps.iter_mut().flatten().for_each(|qp| qp.after_sleep());
        // Epoll reports a listener as long as a stream waits in it, so it is accepted first. If there is no descriptor left for the stream,
        // the queue pair that waits for it fails at the next poll.
        if let Some(qp) = self.qps.iter_mut().flatten().next() {
            let _ = qp.serve_hub()?;
        }
        self.shared.hub.clear_notification();
        self.qps.iter_mut().flatten().try_for_each(|qp| qp.arm())
    }
}

#[cold]
fn unknown(id: QpId) -> ! {
    panic!("{id:?} names no queue pair of this completion queue")
}
