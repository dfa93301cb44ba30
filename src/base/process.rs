//! Other processes of this host. Any thread.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

/// Whether process `pid` has ended, all of its threads included. What cannot be found out counts as alive.
pub fn is_gone(pid: i32) -> bool {
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH) || has_no_threads(pid);
    }
    // SAFETY: the call above just returned it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one pollfd that outlives the call. Readable once the last thread of the process has ended.
    unsafe { libc::poll(&mut poll, 1, 0) == 1 }
}

/// Where there is no pidfd (before Linux 5.3, or forbidden): no such process, or one that ended and nobody has waited for.
fn has_no_threads(pid: i32) -> bool {
    // SAFETY: signal 0 is sent to nobody.
    if unsafe { libc::kill(pid, 0) } != 0 {
        return std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
    }
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Behind the name in brackets: the state, and as the 18th field from there the number of threads (proc(5)).
    let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    matches!(fields.next(), Some("Z" | "X")) && matches!(fields.nth(16), Some("0" | "1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_is_gone_once_it_was_killed_even_if_nobody_has_waited_for_it() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        assert!(!is_gone(pid) && !has_no_threads(pid));
        child.kill().unwrap();
        while !is_gone(pid) || !has_no_threads(pid) {
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert!(is_gone(pid));
        assert!(!is_gone(std::process::id() as i32));
    }
}
