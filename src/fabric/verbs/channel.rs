//! Notification: one completion channel per device, whose events belong to many completion queues. Used by the threads that drive those
//! queues, and only when they are about to sleep.
//!
//! A thread that takes events off the channel may take those of other threads' queues too. It marks these queues as fired, and the device's
//! descriptor stays readable until their threads have seen the mark, so that no thread sleeps through its own event.

use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::ptr;
use std::sync::Mutex;

use ibverbs_sys::*;

use super::library::{Library, made};
use crate::base::error::{Error, Result};
use crate::base::fd::OwnedFd;
use crate::base::sync::lock;

/// A completion channel, and which queues its events were for.
pub struct Channel {
    library: &'static Library,
    raw: *mut ibv_comp_channel,
    /// An epoll descriptor: readable while the channel has an event or `fired` is set.
    sleep: OwnedFd,
    /// An eventfd: set while a queue is marked as fired.
    fired: OwnedFd,
    state: Mutex<State>,
}

// SAFETY: libibverbs' functions may be called from any thread; the rest is descriptors and a mutex.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

#[derive(Default)]
struct State {
    /// By the number that a queue was made with: whether it is marked as fired.
    queues: HashMap<usize, bool>,
    next: usize,
    /// Whether the eventfd is set.
    fired_set: bool,
}

impl Channel {
    /// A channel of the device.
    pub fn new(library: &'static Library, context: *mut ibv_context) -> Result<Channel> {
        // SAFETY: the context is open.
        let raw = made(unsafe { (library.create_comp_channel)(context) }).map_err(|e| Error::system("ibv_create_comp_channel", e))?;
        // From here on dropping gives it back.
        let guard = Raw { library, raw };
        // SAFETY: plain system calls; results are checked before they are owned.
        let (sleep, fired) =
            unsafe { (libc::epoll_create1(libc::EPOLL_CLOEXEC), libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) };
        if sleep < 0 || fired < 0 {
            return Err(Error::last_os("epoll_create1 or eventfd"));
        }
        // SAFETY: fresh descriptors that nobody else owns.
        let (sleep, fired) = unsafe { (OwnedFd::from_raw_fd(sleep), OwnedFd::from_raw_fd(fired)) };
        // SAFETY: `raw` is a live channel.
        let fd = unsafe { (*raw).fd };
        nonblocking(fd)?;
        for fd in [fd, fired.as_raw_fd()] {
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            // SAFETY: both descriptors are open, the event is alive.
            if unsafe { libc::epoll_ctl(sleep.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event) } != 0 {
                return Err(Error::last_os("epoll_ctl"));
            }
        }
        std::mem::forget(guard);
        Ok(Channel { library, raw, sleep, fired, state: Mutex::default() })
    }

    /// What to sleep on.
    pub fn fd(&self) -> RawFd {
        self.sleep.as_raw_fd()
    }

    /// The channel, to make queues on.
    pub fn raw(&self) -> *mut ibv_comp_channel {
        self.raw
    }

    /// Adds a queue. The number is to be its context.
    pub fn add(&self) -> usize {
        let mut state = lock(&self.state);
        state.next += 1;
        let id = state.next;
        state.queues.insert(id, false);
        id
    }

    /// Removes a queue. It can be destroyed then: all its events were acknowledged.
    pub fn remove(&self, id: usize) {
        let mut state = lock(&self.state);
        self.drain(&mut state);
        state.queues.remove(&id);
        self.set_fired(&mut state);
    }

    /// Whether the queue is marked as fired; clears the mark.
    pub fn take_fired(&self, id: usize) -> bool {
        let mut state = lock(&self.state);
        self.drain(&mut state);
        let has_fired = state.queues.get_mut(&id).is_some_and(std::mem::take);
        self.set_fired(&mut state);
        has_fired
    }

    /// Takes every event off the channel and marks its queue. Each is acknowledged at once, so that destroying a queue never waits for that.
    fn drain(&self, state: &mut State) {
        let (mut cq, mut context): (*mut ibv_cq, *mut c_void) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel is live and does not block; both places outlive the call.
        while unsafe { (self.library.get_cq_event)(self.raw, &mut cq, &mut context) } == 0 {
            // SAFETY: an event was got for this queue, which cannot be destroyed before it is acknowledged.
            unsafe { (self.library.ack_cq_events)(cq, 1) };
            if let Some(fired) = state.queues.get_mut(&(context as usize)) {
                *fired = true;
            }
        }
    }

    /// Sets or clears the eventfd: it is set while a queue is marked as fired.
    fn set_fired(&self, state: &mut State) {
        let wanted = state.queues.values().any(|&fired| fired);
        if wanted == state.fired_set {
            return;
        }
        state.fired_set = wanted;
        let mut word = 1u64;
        let fd = self.fired.as_raw_fd();
        // SAFETY: 8 bytes that outlive the call. An eventfd that holds 0 or 1 is written and read without waiting.
        unsafe {
            if wanted {
                libc::write(fd, (&raw const word).cast(), 8);
            } else {
                libc::read(fd, (&raw mut word).cast(), 8);
            }
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        drop(Raw { library: self.library, raw: self.raw });
    }
}

struct Raw {
    library: &'static Library,
    raw: *mut ibv_comp_channel,
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: made by create_comp_channel, destroyed once, after every queue on it (each holds the domain that holds the channel).
        unsafe { (self.library.destroy_comp_channel)(self.raw) };
    }
}

/// Makes reads of `fd` return instead of wait.
pub fn nonblocking(fd: RawFd) -> Result<()> {
    // SAFETY: plain system calls on an open descriptor.
    let rc = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK)
    };
    if rc < 0 { Err(Error::last_os("fcntl")) } else { Ok(()) }
}
