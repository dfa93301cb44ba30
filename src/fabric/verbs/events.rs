//! Asynchronous events of a device: a thread per opened device waits for them, and reports each to the log and to the queue pairs it concerns.
//!
//! The thread holds no queue pair. It knows each by its address alone, which is removed before the queue pair is destroyed, and writes to an
//! [`AsyncStatus`] that it shares with the queue pair.

use std::collections::{BTreeSet, HashMap};
use std::ffi::CStr;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use ibverbs_sys::*;

use super::channel::nonblocking;
use super::gid::Gid;
use super::library::{Library, check};
use crate::base::error::{Error, Result};
use crate::base::fd::OwnedFd;
use crate::base::fork;
use crate::base::log::{self, log_info, log_warn};
use crate::base::sync::lock;
use crate::base::thread::{self, Cpus};

/// The asynchronous events of a queue pair. Written by the thread, read by the queue pair; no other memory is read on the strength of it.
#[derive(Debug, Default)]
pub struct AsyncStatus {
    /// The first fatal one, plus 1; or 0.
    fatal: AtomicU32,
    /// How many there were, wrapping.
    count: AtomicU32,
}

impl AsyncStatus {
    /// The first fatal event.
    #[inline]
    pub fn fatal(&self) -> Option<ibv_event_type> {
        self.fatal.load(Ordering::Relaxed).checked_sub(1)
    }

    /// How many events there were, wrapping.
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// Counts an event. `fatal`: whether it takes the queue pair to ERROR.
    fn record(&self, event: ibv_event_type, fatal: bool) {
        self.count.fetch_add(1, Ordering::Relaxed);
        if fatal {
            // The first one is the cause of the others.
            let _ = self.fatal.compare_exchange(0, event.saturating_add(1), Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

/// A fatal event in words.
pub fn describe(event: ibv_event_type) -> &'static str {
    match event {
        IBV_EVENT_CQ_ERR => "its completion queue overflowed or failed (IBV_EVENT_CQ_ERR)",
        IBV_EVENT_QP_FATAL => "the device reported IBV_EVENT_QP_FATAL for it",
        IBV_EVENT_QP_REQ_ERR => "the peer sent what the device could not make sense of (IBV_EVENT_QP_REQ_ERR)",
        IBV_EVENT_QP_ACCESS_ERR => "the peer touched memory that it may not (IBV_EVENT_QP_ACCESS_ERR)",
        IBV_EVENT_DEVICE_FATAL => "the device failed (IBV_EVENT_DEVICE_FATAL)",
        _ => "the device reported an error of it",
    }
}

type Watched = Mutex<HashMap<usize, WatchedQp>>;

struct WatchedQp {
    port: u8,
    /// Index of the queue pair's GID in the port's table, and the GID.
    address: (u8, Gid),
    cq: usize,
    status: Arc<AsyncStatus>,
}

/// The thread, and the queue pairs that it knows.
pub struct Events {
    watched: Arc<Watched>,
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
    epoch: u64,
}

/// A context that the thread may use: it is closed only after the thread has ended.
struct Context(*mut ibv_context);

// SAFETY: libibverbs' functions may be called from any thread.
unsafe impl Send for Context {}

impl Events {
    /// Starts the thread. `raw` must stay open until the result is dropped. `fatal`: whether errors take the queue pairs they concern to ERROR.
    pub fn start(library: &'static Library, raw: *mut ibv_context, device: &str, fatal: bool) -> Result<Events> {
        // SAFETY: the context is open.
        nonblocking(unsafe { (*raw).async_fd })?;
        // SAFETY: plain system call; the result is checked before it is owned.
        let stop = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if stop < 0 {
            return Err(Error::last_os("eventfd"));
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let stop = unsafe { OwnedFd::from_raw_fd(stop) };
        let watched = Arc::new(Watched::default());
        let (context, stop_fd, shared, device) = (Context(raw), stop.as_raw_fd(), watched.clone(), device.to_owned());
        let body = move || {
            // Captures all of it, not just its pointer, which is not `Send`.
            let context = context;
            run(library, &context, stop_fd, &shared, &device, fatal);
        };
        let thread = thread::spawn("railhead-ib", &Cpus::default(), body);
        let thread = thread.map_err(|e| Error::system("starting the thread for asynchronous events", e))?;
        Ok(Events { watched, stop, thread: Some(thread), epoch: fork::epoch() })
    }

    /// Adds a queue pair of a port. `address` is its GID's index in the port's table, and the GID.
    pub fn watch(&self, qp: *mut ibv_qp, cq: *mut ibv_cq, port: u8, address: (u8, Gid)) -> Arc<AsyncStatus> {
        let status = Arc::new(AsyncStatus::default());
        lock(&self.watched).insert(qp as usize, WatchedQp { port, address, cq: cq as usize, status: status.clone() });
        status
    }

    /// Removes a queue pair, which may be destroyed then.
    pub fn forget(&self, qp: *mut ibv_qp) {
        lock(&self.watched).remove(&(qp as usize));
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if self.epoch != fork::epoch() {
            // The thread is the parent's.
            std::mem::forget(self.thread.take());
            return;
        }
        let word = 1u64;
        // SAFETY: 8 bytes that outlive the call.
        unsafe { libc::write(self.stop.as_raw_fd(), (&raw const word).cast(), 8) };
        if let Some(thread) = self.thread.take() {
            // It does not panic; if it did, it has said so.
            let _ = thread.join();
        }
    }
}

fn run(library: &Library, context: &Context, stop: RawFd, watched: &Watched, device: &str, fatal: bool) {
    // SAFETY: the context stays open until this thread has ended.
    let fd = unsafe { (*context.0).async_fd };
    loop {
        let mut fds = [fd, stop].map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
        // SAFETY: two valid pollfds.
        let n = unsafe { libc::poll(fds.as_mut_ptr(), 2, -1) };
        if fds[1].revents != 0 || (n < 0 && std::io::Error::last_os_error().kind() != std::io::ErrorKind::Interrupted) {
            return;
        }
        let mut event = ibv_async_event::default();
        // SAFETY: as above; the place outlives the call, which does not wait.
        while unsafe { (library.get_async_event)(context.0, &mut event) } == 0 {
            handle(library, &event, watched, device, fatal);
            if event.event_type == IBV_EVENT_GID_CHANGE {
                // SAFETY: of this kind of event, `port_num` is what the union holds.
                check_gids(library, context, unsafe { event.element.port_num }, watched, device);
            }
            // SAFETY: an event that was got, acknowledged once.
            unsafe { (library.ack_async_event)(&mut event) };
        }
        if fds[0].revents & (libc::POLLERR | libc::POLLHUP | libc::POLLNVAL) != 0 {
            // The device is gone: there will be no more events.
            return;
        }
    }
}

/// Counts an event of a port, which is fatal to no queue pair.
fn record_port(watched: &Watched, port: i32, kind: ibv_event_type) {
    lock(watched).values().filter(|entry| i32::from(entry.port) == port).for_each(|entry| entry.status.record(kind, false));
}

/// Warns if a GID of the port that queue pairs were made with is not there any more.
fn check_gids(library: &Library, context: &Context, port: i32, watched: &Watched, device: &str) {
    let used = lock(watched).values().filter(|entry| i32::from(entry.port) == port).map(|entry| entry.address).collect::<BTreeSet<_>>();
    for (index, gid) in used {
        let mut raw = ibv_gid { raw: [0; 16] };
        // SAFETY: the context stays open until this thread has ended; the place outlives the call.
        let answer = check(unsafe { (library.query_gid)(context.0, port as u8, index as i32, &mut raw) });
        // SAFETY: every pattern of 16 bytes is one.
        if answer.is_err() || Gid(unsafe { raw.raw }) != gid {
            log_warn!(
                log::NET,
                "{device}:{port}: its address (GID) {gid} was removed from index {index}: connections that use it fail once their retries are used up"
            );
        }
    }
}

fn handle(library: &Library, event: &ibv_async_event, watched: &Watched, device: &str, fatal: bool) {
    let kind = event.event_type;
    // SAFETY: returns a static string for any number.
    let name = unsafe { CStr::from_ptr((library.event_type_str)(kind)) }.to_string_lossy();
    match kind {
        IBV_EVENT_QP_FATAL | IBV_EVENT_QP_REQ_ERR | IBV_EVENT_QP_ACCESS_ERR => {
            // SAFETY: of this kind of event, `qp` is what the union holds. It is compared, not followed.
            let qp = unsafe { event.element.qp } as usize;
            if let Some(entry) = lock(watched).get(&qp) {
                entry.status.record(kind, fatal);
            }
            log_warn!(log::NET, "{device}: {name}: {}", describe(kind));
        }
        IBV_EVENT_CQ_ERR => {
            // SAFETY: as above, `cq`.
            let cq = unsafe { event.element.cq } as usize;
            lock(watched).values().filter(|entry| entry.cq == cq).for_each(|entry| entry.status.record(kind, fatal));
            log_warn!(log::NET, "{device}: {name}: a completion queue overflowed or failed");
        }
        IBV_EVENT_DEVICE_FATAL => {
            lock(watched).values().for_each(|entry| entry.status.record(kind, fatal));
            log_warn!(log::NET, "{device}: {name}: the device failed; look at `dmesg`");
        }
        IBV_EVENT_PORT_ERR => {
            // SAFETY: as above, `port_num`.
            let port = unsafe { event.element.port_num };
            record_port(watched, port, kind);
            log_warn!(
                log::NET,
                "{device}:{port}: {name}: the link is down; what is under way waits for it, up to NCCL_IB_TIMEOUT x NCCL_IB_RETRY_CNT"
            );
        }
        IBV_EVENT_PORT_ACTIVE => {
            // SAFETY: as above, `port_num`.
            let port = unsafe { event.element.port_num };
            record_port(watched, port, kind);
            log_info!(log::NET, "{device}:{port}: {name}: the link is up");
        }
        IBV_EVENT_GID_CHANGE | IBV_EVENT_LID_CHANGE | IBV_EVENT_PKEY_CHANGE | IBV_EVENT_SM_CHANGE | IBV_EVENT_CLIENT_REREGISTER => {
            // SAFETY: as above, `port_num`.
            let port = unsafe { event.element.port_num };
            record_port(watched, port, kind);
            log_info!(log::NET, "{device}:{port}: {name}: existing connections go on with what they were made with");
        }
        _ => log_info!(log::NET, "{device}: {name}"),
    }
}
