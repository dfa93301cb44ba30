//! Other processes of this host, identified by more than their number, which the kernel reuses after they have ended. Found at set-up; polled rarely, by
//! the code that watches a peer. Any thread.
//!
//! A pidfd always means the same process. Where there is none (before Linux 5.3, forbidden, or no descriptor left), the start time tells a process from a
//! later one of its number: it is in clock ticks of 10 ms, so it fails only if all numbers were used within one tick. Where the start time cannot be
//! read either, the number alone is used.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::{Arc, Weak};

use super::fd::OwnedFd;
use super::fork::PerProcess;

/// A process.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    pidfd: Option<OwnedFd>,
    /// In ticks since boot; `None` if it could not be found out.
    started: Option<u64>,
}

/// The state of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessState {
    /// It runs, or sleeps.
    Running,
    /// Stopped by a signal or a debugger.
    Stopped,
    /// It has ended, whether or not its parent has noticed.
    Dead,
}

/// The processes in use, so that all users of one share its descriptor.
static KNOWN: PerProcess<Vec<Weak<Process>>> = PerProcess::new();

impl Process {
    /// The process that has this number now; `None` if there is none. One that cannot be examined counts as existing. The caller must prove that it is
    /// the intended process, and afterwards check that it has not ended: then the number was its own during the proof.
    pub fn find(pid: i32) -> Option<Arc<Process>> {
        if pid <= 0 {
            return None;
        }
        let known = KNOWN.with(|known| {
            known.retain(|process| process.strong_count() > 0);
            known.iter().filter_map(Weak::upgrade).find(|process| process.pid == pid && process.is_certain())
        });
        if let Some(process) = known.filter(|process| !process.is_gone()) {
            return Some(process);
        }
        let process = Arc::new(Process { pid, pidfd: open(pid), started: Stat::read(pid).ok().map(|stat| stat.started) });
        if process.is_gone() {
            return None;
        }
        KNOWN.with(|known| {
            // The earlier process of this number is dead.
            known.retain(|process| process.upgrade().is_some_and(|process| process.pid != pid));
            known.push(Arc::downgrade(&process));
        });
        Some(process)
    }

    /// Its number.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The descriptor that becomes readable once it has ended, where there is one.
    pub fn fd(&self) -> Option<RawFd> {
        self.pidfd.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Whether it can be told from a later process of its number.
    fn is_certain(&self) -> bool {
        self.pidfd.is_some() || self.started.is_some()
    }

    /// Whether it has ended, with all its threads. If that cannot be found out, it counts as alive.
    pub fn is_gone(&self) -> bool {
        let Some(pidfd) = &self.pidfd else {
            return !is_taken(self.pid)
                || Stat::read(self.pid).is_ok_and(|stat| stat.state() == ProcessState::Dead || self.is_another(&stat));
        };
        let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one pollfd that outlives the call. Readable once the last thread of the process has ended.
        unsafe { libc::poll(&mut poll, 1, 0) == 1 && poll.revents & libc::POLLIN != 0 }
    }

    /// Whether it has ended and another process has its number.
    pub fn is_replaced(&self) -> bool {
        self.is_gone() && Stat::read(self.pid).is_ok_and(|stat| self.is_another(&stat))
    }

    /// Its state now; if that cannot be found out, it counts as running.
    pub fn state(&self) -> ProcessState {
        if self.is_gone() {
            return ProcessState::Dead;
        }
        match Stat::read(self.pid) {
            Ok(stat) if stat.state() == ProcessState::Stopped && !self.is_another(&stat) => ProcessState::Stopped,
            _ => ProcessState::Running,
        }
    }

    /// Whether a process of this number is a later one.
    fn is_another(&self, stat: &Stat) -> bool {
        self.started.is_some_and(|started| started != stat.started)
    }
}

/// A descriptor of the process that has this number now.
fn open(pid: i32) -> Option<OwnedFd> {
    // SAFETY: no memory is passed.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    // SAFETY: the call above just returned it.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Whether a process has this number, including a zombie.
fn is_taken(pid: i32) -> bool {
    // SAFETY: signal 0 is sent to nobody.
    unsafe { libc::kill(pid, 0) == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH) }
}

/// What `/proc/PID/stat` says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stat {
    state: u8,
    threads: u64,
    started: u64,
}

impl Stat {
    /// Without allocating, as this is done while messages flow.
    fn read(pid: i32) -> io::Result<Stat> {
        let mut path = [0u8; 32];
        write!(path.as_mut_slice(), "/proc/{pid}/stat")?;
        let path = CStr::from_bytes_until_nul(&path).ok().and_then(|path| path.to_str().ok()).ok_or(io::ErrorKind::InvalidInput)?;
        // Longer than the line can be: 52 numbers and a name of at most 64 bytes; and one read gets all of it.
        let mut line = [0u8; 1536];
        let n = File::open(path)?.read(&mut line)?;
        line.get(..n).and_then(Stat::parse).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Fields 3, 20 and 22 (proc_pid_stat(5)). The name before them may hold anything, parentheses included.
    fn parse(stat: &[u8]) -> Option<Stat> {
        let after = stat.iter().rposition(|&b| b == b')')? + 1;
        let text = std::str::from_utf8(stat.get(after..)?).ok()?;
        let mut fields = text.split_ascii_whitespace();
        let state = *fields.next()?.as_bytes().first()?;
        // Field 20 is the 17th after the state.
        let threads = fields.nth(16)?.parse().ok()?;
        let started = fields.nth(1)?.parse().ok()?;
        Some(Stat { state, threads, started })
    }

    fn state(&self) -> ProcessState {
        match self.state {
            b'T' | b't' => ProcessState::Stopped,
            // With other threads left, only the main thread has ended.
            b'Z' if self.threads > 1 => ProcessState::Running,
            b'Z' | b'X' | b'x' => ProcessState::Dead,
            _ => ProcessState::Running,
        }
    }
}

#[cfg(test)]
#[path = "../../tests/support/squatter.rs"]
pub(crate) mod squatter;

#[cfg(test)]
mod tests {
    use super::*;
    use squatter::Squatter;

    #[test]
    fn stat_lines_are_read_whatever_the_name() {
        let line = b"42 (a) b (c) T 1 42 42 0 -1 4194304 100 0 0 0 1 2 3 4 20 0 7 0 987654 1000 10 18446744073709551615 1 1";
        assert_eq!(Stat::parse(line), Some(Stat { state: b'T', threads: 7, started: 987_654 }));
        assert_eq!(Stat::parse(b"42 (x"), None);
        assert_eq!(Stat::parse(b"42 (x) T 1 2"), None);
        assert_eq!(Stat::parse(b""), None);
    }

    #[test]
    fn states_are_those_that_ps_shows() {
        let of = |state, threads| Stat { state, threads, started: 0 }.state();
        assert_eq!([of(b'R', 1), of(b'S', 1), of(b'D', 1), of(b'Z', 2)], [ProcessState::Running; 4]);
        assert_eq!([of(b'T', 1), of(b't', 1)], [ProcessState::Stopped; 2]);
        assert_eq!([of(b'Z', 1), of(b'X', 1)], [ProcessState::Dead; 2]);
    }

    /// As it is known where there are no pidfds.
    fn by_start(pid: i32) -> Process {
        Process { pid, pidfd: None, started: Stat::read(pid).ok().map(|stat| stat.started) }
    }

    fn child() -> std::process::Child {
        std::process::Command::new("sleep").arg("1000").spawn().unwrap()
    }

    /// Kills a child, and returns once it is a zombie.
    fn end(child: &mut std::process::Child) {
        child.kill().unwrap();
        while Stat::read(child.id() as i32).unwrap().state() != ProcessState::Dead {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_child_is_gone_once_it_was_killed_even_if_nobody_has_waited_for_it() {
        let mut child = child();
        let pid = child.id() as i32;
        let (held, by_start) = (Process::find(pid).unwrap(), by_start(pid));
        assert!(held.pidfd.is_some() && by_start.started.is_some());
        for process in [&*held, &by_start] {
            assert!(!process.is_gone() && process.state() != ProcessState::Dead);
        }
        end(&mut child);
        assert!(Process::find(pid).is_none());
        for _ in 0..2 {
            for process in [&*held, &by_start] {
                assert!(process.is_gone() && process.state() == ProcessState::Dead && !process.is_replaced());
            }
            child.wait().unwrap();
        }
        assert!(Process::find(pid).is_none());
    }

    #[test]
    fn a_process_that_took_the_number_of_another_is_not_taken_for_it() {
        let mut child = child();
        let pid = child.id() as i32;
        let (held, by_start) = (Process::find(pid).unwrap(), by_start(pid));
        // Start times are told in ticks: the next one has begun when a child started now is of it.
        let ticks = || {
            let mut child = super::tests::child();
            let started = Stat::read(child.id() as i32).unwrap().started;
            child.kill().and_then(|()| child.wait()).unwrap();
            started
        };
        while Some(ticks()) == by_start.started {}
        end(&mut child);
        child.wait().unwrap();
        let Some(_squatter) = Squatter::of(pid) else { return };
        for process in [&*held, &by_start] {
            assert!(process.is_gone() && process.state() == ProcessState::Dead && process.is_replaced(), "{process:?}");
        }
        let squatter = Process::find(pid).unwrap();
        assert!(!Arc::ptr_eq(&squatter, &held) && !squatter.is_gone());
        assert!(Arc::ptr_eq(&squatter, &Process::find(pid).unwrap()), "one descriptor for all who look");
    }

    #[test]
    fn who_is_out_of_descriptors_takes_nobody_for_dead() {
        // Another process, as the limit is the whole process's.
        assert!(crate::base::fork::tests::without_descriptors(|| {
            let parent = std::os::unix::process::parent_id() as i32;
            let found = Process::find(parent);
            found.is_some_and(|process| process.state() == ProcessState::Running && process.pid() == parent)
        }));
    }
}
