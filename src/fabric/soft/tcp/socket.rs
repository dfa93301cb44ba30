//! TCP streams of queue pairs, on which the kernel may still have bytes to send when nobody needs the queue pair any more: requests may have been done once
//! they were sent. Where a socket is closed while bytes wait in it to be read, the kernel drops what it has not sent. So such a stream is closed only
//! once the peer's kernel has all, and a process that exits waits for that, for a while. Any thread.

use std::collections::VecDeque;
use std::ops::Deref;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Once;
use std::time::Duration;

use crate::base::clock;
use crate::base::fd::OwnedFd;
use crate::base::fork::PerProcess;

/// How long a process that exits waits for the kernels of its peers, in ns: longer than the kernel takes to send a lost segment again a few times.
const EXIT_NS: u64 = 2_000_000_000;
/// How long a device that is closed waits for them, in ns: longer than the kernel delays an acknowledgement. What takes longer stays open.
const CLOSE_NS: u64 = 100_000_000;
/// The state of a connection that is over, after which the kernel counts what it has not sent still: TCP_CLOSE in Linux's include/net/tcp_states.h.
const TCP_CLOSE: u8 = 7;
/// How often it looks.
const PAUSE: Duration = Duration::from_micros(200);

/// Those that are open.
static OPEN: PerProcess<Vec<RawFd>> = PerProcess::new();
/// Those of devices that are closed, which wait for nothing but the peer's kernel.
static LEFT: PerProcess<VecDeque<TcpSocket>> = PerProcess::new();

/// A stream.
pub struct TcpSocket(OwnedFd);

impl TcpSocket {
    /// From now on the end of the process waits for what is sent on it.
    pub fn new(fd: OwnedFd) -> TcpSocket {
        static AT_EXIT: Once = Once::new();
        AT_EXIT.call_once(|| {
            // SAFETY: atexit requires a function that can be called until the process ends, or the library is unloaded, when the C library calls it
            // too: it is a function of the library. Without memory for it nothing is registered, and a process that exits does not wait.
            unsafe { libc::atexit(at_exit) };
        });
        OPEN.with(|open| open.push(fd.as_raw_fd()));
        TcpSocket(fd)
    }

    /// Whether the peer's kernel does not have all that was sent.
    pub fn has_unsent(&self) -> bool {
        unsent(self.0.as_raw_fd())
    }

    /// Closes them, or leaves those open of which the peer's kernel does not have all soon.
    pub fn leave_all(sockets: impl Iterator<Item = TcpSocket>) {
        let (mut sockets, until): (Vec<TcpSocket>, u64) = (sockets.collect(), clock::now() + CLOSE_NS);
        loop {
            sockets.retain(TcpSocket::has_unsent);
            if sockets.is_empty() || clock::now() >= until {
                return sockets.into_iter().for_each(TcpSocket::leave);
            }
            clock::sleep(PAUSE);
        }
    }

    /// Closes it, or leaves it open until the peer's kernel has all.
    pub fn leave(self) {
        close_left();
        if self.has_unsent() {
            LEFT.with(|left| left.push_back(self));
        }
    }
}

impl Deref for TcpSocket {
    type Target = OwnedFd;

    fn deref(&self) -> &OwnedFd {
        &self.0
    }
}

impl Drop for TcpSocket {
    fn drop(&mut self) {
        let fd = self.0.as_raw_fd();
        OPEN.with(|open| {
            if let Some(index) = open.iter().position(|other| *other == fd) {
                open.swap_remove(index);
            }
        });
    }
}

/// Closes those that were left open and are not needed any more.
pub fn close_left() {
    let done: VecDeque<TcpSocket> = LEFT.with(|left| {
        let (waiting, done) = std::mem::take(left).into_iter().partition(TcpSocket::has_unsent);
        *left = waiting;
        done
    });
    // Not inside: each takes the other lock.
    drop(done);
}

/// Whether a stream's peer has not acknowledged all of it; false for a connection that is over, which sends nothing more.
fn unsent(fd: RawFd) -> bool {
    let mut state: u8 = TCP_CLOSE;
    let mut len = size_of::<u8>() as libc::socklen_t;
    // SAFETY: getsockopt writes `len` bytes at most, of which `state` has so many: the first of a tcp_info is the state. Both outlive the call, which
    // fails for a descriptor that is none.
    let known = unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut state).cast(), &raw mut len) } == 0;
    let mut bytes: libc::c_int = 0;
    // SAFETY: TIOCOUTQ requires an int to write to, which outlives the call. A descriptor that is none, or no socket, is an error.
    let counted = unsafe { libc::ioctl(fd, libc::TIOCOUTQ, &raw mut bytes) } == 0;
    known && state != TCP_CLOSE && counted && bytes > 0
}

/// The process exits, or the library is unloaded.
extern "C" fn at_exit() {
    let until = clock::now() + EXIT_NS;
    let open = OPEN.with(|open| open.clone());
    while open.iter().any(|fd| unsent(*fd)) && clock::now() < until {
        clock::sleep(PAUSE);
    }
}

/// Whether what was sent on a stream is sent again, as the peer's kernel, or the way to it, does not answer: that of a process that is stopped does. For how
/// many nanoseconds at least.
pub fn unanswered_for(fd: RawFd) -> Option<u64> {
    // SAFETY: zeros are a valid tcp_info, of numbers alone.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of_val(&info) as libc::socklen_t;
    // SAFETY: getsockopt writes `len` bytes at most, of which `info` has so many. Both outlive the call; a descriptor that is no stream is an error.
    let known = unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len) } == 0;
    // Where this host has no way to the peer, the kernel probes instead, as it does a full peer, which answers each (Linux 6.1 net/ipv4/tcp_output.c,
    // tcp_send_probe0).
    let unanswered = known && (info.tcpi_retransmits > 0 || info.tcpi_probes > 1);
    // The pause before each has doubled, up to the one that now runs, and so was this long altogether; and so long ago was the last.
    let pauses_us = info.tcpi_rto - info.tcpi_rto.checked_shr(u32::from(info.tcpi_backoff)).unwrap_or(0);
    unanswered.then(|| u64::from(pauses_us) * 1_000 + u64::from(info.tcpi_last_data_sent) * 1_000_000)
}
