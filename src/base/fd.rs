//! The library's own descriptors, which are closed in a forked child: [`Owned`] enters each in a table while it is open, and a handler of
//! `pthread_atfork` closes those in the table in the child. Opened and closed on any thread; the handler runs on the thread that forks.
//!
//! A child that kept them would keep the parent's connections alive after the parent's death, its ports taken and its files locked. The child
//! must not use the parent's objects that it inherits, and dropping them closes nothing: the number may belong to the child by then.
//!
//! Not covered: a fork in the very moment in which another thread opens or closes a descriptor may leave that one open in the child; and neither clone(2) nor
//! glibc's `_Fork` calls handlers. What executes another program needs none: all are closed on exec.

use std::fmt;
use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use once_cell::race::OnceBox;

use super::fork;

/// A descriptor of any kind.
pub type OwnedFd = Owned<std::os::fd::OwnedFd>;
/// A file.
pub type File = Owned<std::fs::File>;
/// A connection.
pub type TcpStream = Owned<std::net::TcpStream>;
/// A listener.
pub type TcpListener = Owned<std::net::TcpListener>;
/// A socket being set up.
pub type Socket = Owned<socket2::Socket>;

/// How many descriptors the process may have, RLIMIT_NOFILE.
pub fn limit() -> Option<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is an rlimit that outlives the call.
    (unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0).then_some(limit)
}

/// How many more it may open now; `None` if that cannot be found out.
pub fn left() -> Option<usize> {
    let limit = usize::try_from(limit()?.rlim_cur).ok()?;
    match std::fs::read_dir("/proc/self/fd") {
        // One of them is that of the folder.
        Ok(open) => Some(limit.saturating_sub(open.count().saturating_sub(1))),
        Err(error) => (error.raw_os_error() == Some(libc::EMFILE)).then_some(0),
    }
}

/// A descriptor of the library, held by a `T`.
pub struct Owned<T: AsRawFd> {
    inner: ManuallyDrop<T>,
    /// The process that opened it.
    epoch: u64,
}

impl<T: AsRawFd> Owned<T> {
    /// Takes a descriptor that was just opened.
    pub fn new(inner: impl Into<T>) -> Owned<T> {
        let inner = ManuallyDrop::new(inner.into());
        enter(inner.as_raw_fd());
        Owned { inner, epoch: fork::epoch() }
    }

    /// The same descriptor in another type.
    pub fn convert<U: AsRawFd + From<T>>(self) -> Owned<U> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: `this` is never dropped nor used again, so the descriptor has one owner.
        let inner = unsafe { ManuallyDrop::take(&mut this.inner) };
        Owned { inner: ManuallyDrop::new(inner.into()), epoch: this.epoch }
    }

    /// Keeps it open in forked children, because the application gets its number and may use it there.
    pub fn share_with_children(&self) {
        remove(self.as_raw_fd());
    }
}

impl<T: AsRawFd> Drop for Owned<T> {
    fn drop(&mut self) {
        if self.epoch == fork::epoch() {
            // Before the close: afterwards the number may belong to another thread.
            remove(self.inner.as_raw_fd());
            // SAFETY: neither dropped before, nor used after.
            unsafe { ManuallyDrop::drop(&mut self.inner) };
        }
    }
}

impl<T: AsRawFd> Deref for Owned<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: AsRawFd> DerefMut for Owned<T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

impl<T: AsRawFd> AsRawFd for Owned<T> {
    #[inline(always)]
    fn as_raw_fd(&self) -> RawFd {
        self.inner.as_raw_fd()
    }
}

impl<T: AsRawFd + AsFd> AsFd for Owned<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.as_fd()
    }
}

impl<T: AsRawFd + FromRawFd> FromRawFd for Owned<T> {
    unsafe fn from_raw_fd(fd: RawFd) -> Self {
        // SAFETY: the requirement is the caller's own.
        Owned::new(unsafe { T::from_raw_fd(fd) })
    }
}

impl<T: AsRawFd + Read> Read for Owned<T> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.inner.read(into)
    }
}

impl<T: AsRawFd + Write> Write for Owned<T> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.inner.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<T: AsRawFd + fmt::Debug> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

/// Words of a chunk of the table.
const WORDS: usize = 4096;
/// Descriptors of a chunk: one is enough for most processes.
const CHUNK: usize = WORDS * 64;
/// Chunks: as many as make a place for every number that a descriptor can have.
const CHUNKS: usize = (1 << 31) / CHUNK;

/// A bit for each descriptor. Without a lock, which a fork could find taken.
static TABLE: [OnceBox<[AtomicU64; WORDS]>; CHUNKS] = [const { OnceBox::new() }; CHUNKS];
/// The process that the table speaks of.
static EPOCH: AtomicU64 = AtomicU64::new(0);
/// Whether the handlers are installed. They stay for as long as the library is loaded, which is until the process ends.
static WATCHING: AtomicBool = AtomicBool::new(false);

/// Enters a descriptor that is never closed.
pub(super) fn enter(fd: RawFd) {
    if !WATCHING.load(Ordering::Relaxed) && !WATCHING.swap(true, Ordering::Relaxed) {
        // SAFETY: functions that live as long as the library. It fails for want of memory alone: then the next descriptor tries again.
        let installed = unsafe { libc::pthread_atfork(Some(before_fork), None, Some(in_child)) } == 0;
        WATCHING.store(installed, Ordering::Relaxed);
    }
    be_own();
    if let Some((word, bit)) = place(fd) {
        word.fetch_or(bit, Ordering::Relaxed);
    }
}

fn remove(fd: RawFd) {
    if let Some((word, bit)) = place(fd) {
        word.fetch_and(!bit, Ordering::Relaxed);
    }
}

fn place(fd: RawFd) -> Option<(&'static AtomicU64, u64)> {
    let at = usize::try_from(fd).ok()?;
    let chunk = TABLE.get(at / CHUNK)?.get_or_init(|| Box::new([const { AtomicU64::new(0) }; WORDS]));
    Some((chunk.get(at % CHUNK / 64)?, 1 << (at % 64)))
}

/// Forgets the parent's descriptors in a process that was forked without the handlers: it may have put others in their places.
extern "C" fn before_fork() {
    be_own();
}

fn be_own() {
    let mine = fork::epoch();
    if EPOCH.load(Ordering::Relaxed) != mine {
        take_all(|_| {});
        EPOCH.store(mine, Ordering::Relaxed);
    }
}

/// Closes the parent's. Async-signal-safe: between fork and exec nothing else is allowed, since another thread may have held any lock.
extern "C" fn in_child() {
    take_all(|fd| {
        // SAFETY: the parent's object is not used in this process, nor does it close the number when it is dropped.
        unsafe { libc::close(fd) };
    });
    EPOCH.store(fork::epoch(), Ordering::Relaxed);
}

/// Empties the table.
fn take_all(mut each: impl FnMut(RawFd)) {
    for (chunk, base) in TABLE.iter().zip((0..).step_by(CHUNK)) {
        let Some(words) = chunk.get() else { continue };
        for (word, base) in words.iter().zip((base..).step_by(64)) {
            // Most are empty, and this does not make the pages that they are on the child's own.
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = word.swap(0, Ordering::Relaxed);
            while bits != 0 {
                each(base + bits.trailing_zeros() as RawFd);
                bits &= bits - 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::base::fork::tests::in_child as forked;

    fn is_open(fd: RawFd) -> bool {
        // SAFETY: asks for flags.
        unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
    }

    fn pair() -> (Owned<UnixStream>, UnixStream) {
        let (ours, other) = UnixStream::pair().unwrap();
        (Owned::new(ours), other)
    }

    /// What the process does that forks without handlers.
    fn forked_bare(f: impl FnOnce() -> bool) -> bool {
        // SAFETY: a fork; the child makes async-signal-safe calls alone and leaves by _exit.
        let pid = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
        if pid == 0 {
            // SAFETY: ends the child without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!f())) };
        }
        let mut status = 1;
        // SAFETY: `status` outlives the call; `pid` is our child.
        pid > 0 && unsafe { libc::waitpid(pid, &mut status, 0) } == pid && status == 0
    }

    /// Puts another descriptor in the place of `at`.
    fn replace(at: RawFd) {
        // SAFETY: plain system call.
        assert_eq!(unsafe { libc::dup2(0, at) }, at);
    }

    #[test]
    fn a_child_has_what_was_not_ours_alone_and_closes_nothing_of_its_own() {
        let (ours, mut other) = pair();
        let fd = ours.as_raw_fd();
        let mut ours = Some(ours);
        let (left, kept) = pair();
        left.share_with_children();
        let (converted, _other) = pair();
        let converted: OwnedFd = Owned::<std::os::fd::OwnedFd>::new(converted.try_clone().unwrap()).convert();
        assert!(forked(|| {
            let gone = [fd, converted.as_raw_fd()].iter().all(|fd| !is_open(*fd));
            let there = [other.as_raw_fd(), left.as_raw_fd(), kept.as_raw_fd()].iter().all(|fd| is_open(*fd));
            replace(fd);
            drop(ours.take());
            let (own, own_other) = pair();
            let apart = forked(|| !is_open(own.as_raw_fd()) && is_open(own_other.as_raw_fd()) && is_open(fd));
            let own_fd = own.as_raw_fd();
            drop(own);
            gone && there && apart && is_open(fd) && !is_open(own_fd)
        }));
        // What was there before a fork without handlers is not looked for after one with them.
        assert!(forked_bare(|| {
            replace(fd);
            before_fork();
            in_child();
            is_open(fd)
        }));
        ours.as_mut().unwrap().write_all(b"x").unwrap();
        let mut byte = [0];
        other.read_exact(&mut byte).unwrap();
        drop(ours);
        assert_eq!(other.read(&mut byte).unwrap(), 0, "somebody else has the other end");
    }
}
