//! What a rank does to its own process before the plugin is loaded. Called once, on the rank's first thread.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

/// The two descriptors that a rank is started with: standard input leads to the supervisor, standard output to the other rank. Both are
/// moved away, so that a plugin that reads or prints does no harm.
pub fn channels() -> io::Result<(OwnedFd, OwnedFd)> {
    let to_parent = io::stdin().as_fd().try_clone_to_owned()?;
    let to_peer = io::stdout().as_fd().try_clone_to_owned()?;
    let null = File::open("/dev/null")?;
    for (from, to) in [(null.as_raw_fd(), libc::STDIN_FILENO), (libc::STDERR_FILENO, libc::STDOUT_FILENO)] {
        // SAFETY: dup2 takes any numbers; Rust's standard streams own nothing behind 0 and 1, and what stood there was cloned above.
        if unsafe { libc::dup2(from, to) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok((to_parent, to_peer))
}

/// Ends with the supervisor, and leaves no core file when the plugin crashes.
pub fn tie_to_parent() {
    // SAFETY: PR_SET_PDEATHSIG takes a signal number and touches no memory.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
    let none = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: reads one rlimit, which is there.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const none) };
}

/// Kills this process, as a crash would.
pub fn die() -> ! {
    // SAFETY: kill takes any numbers; the process id is our own.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    // The signal ends the process before the call above returns; abort is for the compiler.
    std::process::abort()
}
