//! Lets one thread sleep on descriptors until another thread of the process wakes it, through an eventfd. Any thread notifies; one thread waits.

use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::time::Duration;

use super::error::{Error, Result};
use super::fd::OwnedFd;

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Woken {
    /// By [`Wakeup::notify`].
    Notified,
    /// One of the other descriptors is ready.
    Ready,
    /// The timeout is over, or a signal came.
    TimedOut,
}

/// Ends one thread's wait.
#[derive(Debug)]
pub struct Wakeup(OwnedFd);

impl Wakeup {
    /// One that nobody has notified.
    ///
    /// Errors: no descriptor left.
    pub fn new() -> Result<Wakeup> {
        // SAFETY: plain system call; the result is checked before it is owned.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(Error::last_os("eventfd"));
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        Ok(Wakeup(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Ends the wait that is going on, or else the next one.
    pub fn notify(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight live bytes. Where the count is full, the wait ends anyway.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Waits until another thread notifies, one of `others` is readable or closed, or `timeout` is over. May return early.
    pub fn wait(&self, others: &[RawFd], timeout: Option<Duration>) -> Woken {
        let watched = |&fd: &RawFd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds: Vec<libc::pollfd> = std::iter::once(&self.0.as_raw_fd()).chain(others).map(watched).collect();
        let time = timeout.map(|timeout| libc::timespec {
            tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        });
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the array has as many entries as are said; the time is absent or outlives the call, and so is the mask.
        let ready = unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, time, std::ptr::null()) };
        let notified = ready > 0 && fds.first().is_some_and(|own| own.revents != 0);
        if notified {
            let mut count = [0u8; 8];
            // SAFETY: room for the eight bytes that an eventfd yields.
            unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
            return Woken::Notified;
        }
        if ready > 0 { Woken::Ready } else { Woken::TimedOut }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::net::UnixStream;
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_wait_ends_for_each_of_its_reasons() {
        let wakeup = Wakeup::new().unwrap();
        let (mut far, near) = UnixStream::pair().unwrap();
        let others = [near.as_raw_fd()];
        // Notified twice before the wait, which both end.
        wakeup.notify();
        wakeup.notify();
        assert_eq!(wakeup.wait(&others, None), Woken::Notified);
        let (from, pause) = (Instant::now(), Duration::from_millis(5));
        while from.elapsed() < pause {
            assert_eq!(wakeup.wait(&others, Some(pause.saturating_sub(from.elapsed()))), Woken::TimedOut);
        }
        std::thread::scope(|scope| {
            scope.spawn(|| wakeup.notify());
            assert_eq!(wakeup.wait(&others, None), Woken::Notified);
        });
        far.write_all(&[1]).unwrap();
        assert_eq!(wakeup.wait(&others, None), Woken::Ready);
        drop(far);
        assert_eq!(wakeup.wait(&others, None), Woken::Ready);
    }
}
