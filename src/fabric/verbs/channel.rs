//! Notification: one completion channel per device, whose events belong to many completion queues. Used by the threads that drive those
//! queues, and only when they are about to sleep.
//!
//! Whoever takes events off the channel may take other queues' too. He marks these as fired and keeps the device's descriptor
//! readable until their owners have looked, so that nobody sleeps through his own.

use std::collections::HashMap;
use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ibverbs_sys::*;

use super::library::{Library, made};
use crate::base::error::{Error, Result};
use crate::base::fd::OwnedFd;

/// A completion channel and what became of its events.
pub struct Channel {
    library: &'static Library,
    raw: *mut ibv_comp_channel,
    /// Readable while the channel has an event or `others` is set.
    sleep: OwnedFd,
    /// An eventfd: set while some queue has fired and its owner has not looked.
    others: OwnedFd,
    state: Mutex<State>,
}

// SAFETY: libibverbs' functions may be called from any thread; the rest is descriptors and a mutex.
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

#[derive(Default)]
struct State {
    /// By the number that a queue was made with: whether it has fired.
    queues: HashMap<usize, bool>,
    next: usize,
    /// Whether `others` is set.
    signalled: bool,
}

impl Channel {
    /// A channel of the device.
    pub fn new(library: &'static Library, context: *mut ibv_context) -> Result<Channel> {
        // SAFETY: the context is open.
        let raw = made(unsafe { (library.create_comp_channel)(context) }).map_err(|e| Error::system("ibv_create_comp_channel", e))?;
        // From here on dropping gives it back.
        let guard = Raw { library, raw };
        // SAFETY: plain system calls; results are checked before they are owned.
        let (sleep, others) =
            unsafe { (libc::epoll_create1(libc::EPOLL_CLOEXEC), libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) };
        if sleep < 0 || others < 0 {
            return Err(Error::last_os("epoll_create1 or eventfd"));
        }
        // SAFETY: fresh descriptors that nobody else owns.
        let (sleep, others) = unsafe { (OwnedFd::from_raw_fd(sleep), OwnedFd::from_raw_fd(others)) };
        // SAFETY: `raw` is a live channel.
        let fd = unsafe { (*raw).fd };
        nonblocking(fd)?;
        for fd in [fd, others.as_raw_fd()] {
            let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
            // SAFETY: both descriptors are open, the event is alive.
            if unsafe { libc::epoll_ctl(sleep.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &mut event) } != 0 {
                return Err(Error::last_os("epoll_ctl"));
            }
        }
        std::mem::forget(guard);
        Ok(Channel { library, raw, sleep, others, state: Mutex::default() })
    }

    /// What to sleep on.
    pub fn fd(&self) -> RawFd {
        self.sleep.as_raw_fd()
    }

    /// The channel, to make queues on.
    pub fn raw(&self) -> *mut ibv_comp_channel {
        self.raw
    }

    /// A number for a new queue, to be its context.
    pub fn join(&self) -> usize {
        let mut state = self.lock();
        state.next += 1;
        let id = state.next;
        state.queues.insert(id, false);
        id
    }

    /// Forgets a queue. It can be destroyed then: all its events were acknowledged.
    pub fn leave(&self, id: usize) {
        let mut state = self.lock();
        self.drain(&mut state);
        state.queues.remove(&id);
        self.signal(&mut state);
    }

    /// Whether the queue has fired since this was last asked.
    pub fn take(&self, id: usize) -> bool {
        let mut state = self.lock();
        self.drain(&mut state);
        let fired = state.queues.get_mut(&id).is_some_and(std::mem::take);
        self.signal(&mut state);
        fired
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is complete in itself.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes every event off the channel. Each is acknowledged at once, so a queue never waits for that when it is destroyed.
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

    /// Keeps the descriptor readable as long as somebody has fired.
    fn signal(&self, state: &mut State) {
        let wanted = state.queues.values().any(|&fired| fired);
        if wanted == state.signalled {
            return;
        }
        state.signalled = wanted;
        let mut word = 1u64;
        let fd = self.others.as_raw_fd();
        // SAFETY: 8 bytes that outlive the call. An eventfd that holds 0 or 1 takes and gives it without waiting.
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
