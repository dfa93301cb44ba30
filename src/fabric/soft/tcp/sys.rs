//! The two system calls of the wire, with their errors sorted by what the wire does about them. Called on the thread that drives
//! the queue pair; never blocks, never raises SIGPIPE.

use std::io;
use std::os::fd::RawFd;

/// The result of a call.
#[derive(Debug)]
pub enum Io {
    /// So many bytes moved, at least one.
    Moved(usize),
    /// Nothing can move now.
    Blocked,
    /// The peer has closed the stream.
    Closed,
    /// Memory of ours that the kernel cannot reach.
    BadMemory,
    /// The stream is broken.
    Failed(io::Error),
}

/// Sends from `iov`.
///
/// # Safety
/// Each element must be readable memory, or memory whose absence the kernel may report.
#[inline]
pub unsafe fn send(fd: RawFd, iov: &mut [libc::iovec]) -> Io {
    let message = message(iov);
    loop {
        // SAFETY: sendmsg requires a valid message and readable elements: `message` names `iov`, which is borrowed, and the elements are the caller's
        // to vouch for.
        let n = unsafe { libc::sendmsg(fd, &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
        match result(n) {
            Some(Io::Closed) => return Io::Blocked,
            Some(io) => return io,
            None => {}
        }
    }
}

/// Receives into `iov`.
///
/// # Safety
/// Each element must be writable memory, or memory whose absence the kernel may report.
#[inline]
pub unsafe fn recv(fd: RawFd, iov: &mut [libc::iovec]) -> Io {
    let mut message = message(iov);
    loop {
        // SAFETY: recvmsg requires a valid message and writable elements: `message` names `iov`, which is borrowed, and the elements are the caller's
        // to vouch for.
        let n = unsafe { libc::recvmsg(fd, &mut message, libc::MSG_DONTWAIT) };
        if let Some(io) = result(n) {
            return io;
        }
    }
}

fn message(iov: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: `zeroed` requires that all-zero is a valid value: a msghdr is numbers and pointers, and without name, control data and elements then.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = iov.as_mut_ptr();
    message.msg_iovlen = iov.len() as _;
    message
}

/// None for a call to be repeated.
#[inline]
fn result(n: isize) -> Option<Io> {
    if n > 0 {
        return Some(Io::Moved(n as usize));
    }
    if n == 0 {
        return Some(Io::Closed);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EINTR) => None,
        Some(libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM) => Some(Io::Blocked),
        Some(libc::EFAULT) => Some(Io::BadMemory),
        _ => Some(Io::Failed(error)),
    }
}

/// Spaces out calls that keep finding nothing: after [`Backoff::EVERY_CHANCE`] misses in a row only every 8th chance is taken, then every 16th,
/// every 32nd and, from about 57 000 polls without success on (1000 + 8000 + 16 000 + 32 000), every 64th.
#[derive(Debug, Default)]
pub struct Backoff {
    misses: u32,
    skip: u32,
}

impl Backoff {
    /// Misses before chances are skipped: a peer that is polling answers within so many polls.
    pub const EVERY_CHANCE: u32 = 1000;

    /// Whether to take this chance.
    #[inline]
    pub fn due(&mut self) -> bool {
        if self.skip == 0 {
            return true;
        }
        self.skip -= 1;
        false
    }

    /// It found nothing.
    #[inline]
    pub fn miss(&mut self) {
        self.misses = self.misses.saturating_add(1);
        if let Some(beyond) = self.misses.checked_sub(Self::EVERY_CHANCE) {
            self.skip = (8 << (beyond / Self::EVERY_CHANCE).min(3)) - 1;
        }
    }

    /// Whether the last chance found nothing.
    #[inline]
    pub fn idle(&self) -> bool {
        self.misses > 0
    }

    /// It found something, or something is expected.
    #[inline]
    pub fn reset(&mut self) {
        *self = Backoff::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_chances_are_taken_ever_more_rarely_but_never_less_than_one_in_64() {
        let mut backoff = Backoff::default();
        let mut gap = 0;
        let mut widest = 0;
        let mut taken = 0;
        for _ in 0..1_000_000 {
            if backoff.due() {
                assert!(taken >= Backoff::EVERY_CHANCE || gap == 0);
                taken += 1;
                gap = 0;
                backoff.miss();
            } else {
                gap += 1;
                widest = widest.max(gap);
            }
        }
        assert_eq!(widest, 63);
        assert!(taken < 1_000_000 / 32);
        backoff.reset();
        assert!(backoff.due());
    }
}
