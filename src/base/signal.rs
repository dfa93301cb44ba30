//! Turns a signal into an event on a descriptor: the handler writes to it, and a thread of the library reads it. Set up on any thread; the handler
//! runs on whichever thread of the application the kernel picks.
//!
//! The handler calls the one that the application had installed before. It stays installed as long as the process lives: without it a later signal
//! might end the process.

use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::RawFd;
use std::ptr::{self, null_mut};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use super::fd;

/// Signals of Linux are 1 to this (asm-generic/signal.h: _NSIG).
const MOST: usize = 64;

/// The process that reads, and its eventfd: `pid << 32 | fd`. 0: none. One word, so that a forked child never writes to its parent's. The descriptor is
/// never closed, as a handler may be about to write to it.
static READER: AtomicU64 = AtomicU64::new(0);
/// By number: what was installed before. NULL: the handler is not installed. Never freed, as a handler may be about to read it.
static BEFORE: [AtomicPtr<libc::sigaction>; MOST + 1] = [const { AtomicPtr::new(null_mut()) }; MOST + 1];

/// Readable when a signal has come to this process. One serves all signals that were asked for.
#[derive(Debug, Clone, Copy)]
pub struct SignalEvent(c_int);

impl SignalEvent {
    /// Handles `signal`.
    ///
    /// Errors: no descriptor left; a signal that cannot be handled.
    pub fn of(signal: c_int) -> io::Result<SignalEvent> {
        let event = current()?;
        install(signal)?;
        Ok(event)
    }

    /// The descriptor, readable after a signal until [`SignalEvent::clear`]. Several signals may make it readable once.
    pub fn fd(self) -> RawFd {
        self.0
    }

    /// Whether a signal has come since the last call.
    pub fn clear(self) -> bool {
        let mut word = 0u64;
        // SAFETY: room for the eight bytes that an eventfd yields; it does not wait.
        unsafe { libc::read(self.0, (&raw mut word).cast(), 8) == 8 }
    }

    /// Async-signal-safe.
    fn notify(self) {
        let word = 1u64;
        // SAFETY: 8 bytes that outlive the call, to an eventfd, which does not wait.
        unsafe { libc::write(self.0, (&raw const word).cast(), 8) };
    }
}

/// The event of this process.
fn current() -> io::Result<SignalEvent> {
    let pid = u64::from(std::process::id());
    let seen = READER.load(Ordering::Relaxed);
    let word = if seen >> 32 == pid {
        seen
    } else {
        // SAFETY: plain system call.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let mine = pid << 32 | fd as u64;
        match READER.compare_exchange(seen, mine, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => {
                fd::enter(fd);
                mine
            }
            Err(other) => {
                // SAFETY: just made, and published nowhere.
                unsafe { libc::close(fd) };
                other
            }
        }
    };
    Ok(SignalEvent(word as u32 as c_int))
}

fn install(signal: c_int) -> io::Result<()> {
    let slot = usize::try_from(signal).ok().and_then(|signal| BEFORE.get(signal)).ok_or(io::ErrorKind::InvalidInput)?;
    // SAFETY: zero is a value of each of its members, and the call fills it in.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: only asks; the place outlives the call.
    if unsafe { libc::sigaction(signal, ptr::null(), &raw mut before) } != 0 {
        return Err(io::Error::last_os_error());
    }
    if !slot.load(Ordering::Relaxed).is_null() {
        // To install it over one that may call it in turn could go round for ever.
        return match before.sa_sigaction == arrived as *const () as usize {
            true => Ok(()),
            false => Err(io::Error::other("the application has installed a handler of its own since")),
        };
    }
    let kept = Box::into_raw(Box::new(before));
    // Release: the handler's Acquire sees what it points to. Before the handler is installed, so that it calls the application's from the first time on.
    if slot.compare_exchange(null_mut(), kept, Ordering::Release, Ordering::Relaxed).is_err() {
        // SAFETY: from `Box::into_raw` above, and published nowhere.
        drop(unsafe { Box::from_raw(kept) });
        return Ok(());
    }
    let mut ours = before;
    ours.sa_sigaction = arrived as *const () as usize;
    // As the application's was: whether it interrupts system calls, and on which stack it runs.
    let theirs = if is_function(before.sa_sigaction) { before.sa_flags & !libc::SA_RESETHAND } else { libc::SA_RESTART | libc::SA_ONSTACK };
    ours.sa_flags = theirs | libc::SA_SIGINFO;
    // SAFETY: a handler that makes async-signal-safe calls only, with the mask that was there.
    if unsafe { libc::sigaction(signal, &raw const ours, null_mut()) } != 0 {
        let error = io::Error::last_os_error();
        slot.store(null_mut(), Ordering::Relaxed);
        return Err(error);
    }
    Ok(())
}

fn is_function(handler: libc::sighandler_t) -> bool {
    handler != libc::SIG_DFL && handler != libc::SIG_IGN
}

/// The handler. Async-signal-safe: loads, getpid, write, and whatever the application's own does.
extern "C" fn arrived(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: this thread's errno.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before_errno = unsafe { *errno };
    let reader = READER.load(Ordering::Relaxed);
    // SAFETY: plain system call.
    let pid = unsafe { libc::getpid() };
    if reader >> 32 == pid as u64 {
        SignalEvent(reader as u32 as c_int).notify();
    }
    // SAFETY: NULL, or leaked by `install`. Acquire: pairs with its Release.
    let before = BEFORE.get(signal as usize).and_then(|slot| unsafe { slot.load(Ordering::Acquire).as_ref() });
    if let Some(before) = before
        && is_function(before.sa_sigaction)
    {
        if before.sa_flags & libc::SA_SIGINFO != 0 {
            // SAFETY: installed with this flag, so it is a function of this type.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = unsafe { std::mem::transmute(before.sa_sigaction) };
            handler(signal, info, context);
        } else {
            // SAFETY: installed without it, so it is a function of this type.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(before.sa_sigaction) };
            handler(signal);
        }
    }
    // SAFETY: as above. Whoever was interrupted may be about to look at it.
    unsafe { *errno = before_errno };
}
