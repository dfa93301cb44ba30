//! How a thread sleeps on descriptors and is woken by other threads of the process: an eventfd beside what else it watches. Any thread rings; one
//! thread waits.

use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::time::Duration;

use super::error::{Error, Result};
use super::fd::OwnedFd;

/// What ended a wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Somebody rang.
    Rung,
    /// One of the other descriptors.
    Ready,
    /// Neither: the time is over, or a signal came.
    Early,
}

/// Ends one thread's wait.
#[derive(Debug)]
pub struct Alarm(OwnedFd);

impl Alarm {
    /// A silent one.
    ///
    /// Errors: no descriptor left.
    pub fn new() -> Result<Alarm> {
        // SAFETY: plain system call; the result is checked before it is owned.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(Error::last_os("eventfd"));
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        Ok(Alarm(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Ends the wait that is going on, or else the next one.
    pub fn ring(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight live bytes. An alarm that was rung 2^64 times unheard has rung.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Waits until somebody rings, one of `others` is readable or has ended, or `most` is over. May return early.
    pub fn wait(&self, others: &[RawFd], most: Option<Duration>) -> Ended {
        let watched = |&fd: &RawFd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        let mut fds: Vec<libc::pollfd> = std::iter::once(&self.0.as_raw_fd()).chain(others).map(watched).collect();
        let time = most.map(|most| libc::timespec {
            tv_sec: libc::time_t::try_from(most.as_secs()).unwrap_or(libc::time_t::MAX),
            tv_nsec: most.subsec_nanos().into(),
        });
        let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the array has as many entries as are said; the time is absent or outlives the call, and so is the mask.
        let ready = unsafe { libc::ppoll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, time, std::ptr::null()) };
        let rung = ready > 0 && fds.first().is_some_and(|alarm| alarm.revents != 0);
        if rung {
            let mut count = [0u8; 8];
            // SAFETY: room for the eight bytes that an eventfd yields.
            unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
            return Ended::Rung;
        }
        if ready > 0 { Ended::Ready } else { Ended::Early }
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
        let alarm = Alarm::new().unwrap();
        let (mut far, near) = UnixStream::pair().unwrap();
        let others = [near.as_raw_fd()];
        // Rung before, and heard once.
        alarm.ring();
        alarm.ring();
        assert_eq!(alarm.wait(&others, None), Ended::Rung);
        let (from, pause) = (Instant::now(), Duration::from_millis(5));
        while from.elapsed() < pause {
            assert_eq!(alarm.wait(&others, Some(pause.saturating_sub(from.elapsed()))), Ended::Early);
        }
        std::thread::scope(|scope| {
            scope.spawn(|| alarm.ring());
            assert_eq!(alarm.wait(&others, None), Ended::Rung);
        });
        far.write_all(&[1]).unwrap();
        assert_eq!(alarm.wait(&others, None), Ended::Ready);
        drop(far);
        assert_eq!(alarm.wait(&others, None), Ended::Ready);
    }
}
