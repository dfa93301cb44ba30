//! A look at another process of this host: whether it runs, is stopped or is dead. Used by whoever watches a peer, rarely.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read, Write};

/// A process, told from a later one with the same number by its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    pid: u32,
    /// `None` while it could not be found out.
    started: Option<u64>,
}

/// How it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Life {
    /// It lives.
    Running,
    /// By a signal or a debugger.
    Stopped,
    /// It has ended, whether or not its parent has noticed.
    Dead,
}

impl Process {
    /// The process that has this number now. `None` if there is none: if it should be there, it died. One that cannot be looked at, as
    /// this process is out of descriptors for one, counts as there.
    pub fn find(pid: u32) -> Option<Process> {
        match Stat::read(pid) {
            Ok(stat) if stat.life() == Life::Dead => None,
            Ok(stat) => Some(Process { pid, started: Some(stat.started) }),
            Err(error) if is_death(&error) => None,
            Err(_) => Some(Process { pid, started: None }),
        }
    }

    /// Its number.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// How it is now; what cannot be found out counts as running.
    pub fn look(&self) -> Life {
        match Stat::read(self.pid) {
            Ok(stat) if self.started.is_none_or(|started| started == stat.started) => stat.life(),
            Ok(_) => Life::Dead,
            Err(error) if is_death(&error) => Life::Dead,
            Err(_) => Life::Running,
        }
    }
}

/// Whether there is no such process: the file is not there, or its process went between open and read.
fn is_death(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
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
    fn read(pid: u32) -> io::Result<Stat> {
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

    fn life(&self) -> Life {
        match self.state {
            b'T' | b't' => Life::Stopped,
            // With other threads left, only the main thread has ended.
            b'Z' if self.threads > 1 => Life::Running,
            b'Z' | b'X' | b'x' => Life::Dead,
            _ => Life::Running,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_lines_are_read_whatever_the_name() {
        let line = b"42 (a) b (c) T 1 42 42 0 -1 4194304 100 0 0 0 1 2 3 4 20 0 7 0 987654 1000 10 18446744073709551615 1 1";
        assert_eq!(Stat::parse(line), Some(Stat { state: b'T', threads: 7, started: 987_654 }));
        assert_eq!(Stat::parse(b"42 (x"), None);
        assert_eq!(Stat::parse(b"42 (x) T 1 2"), None);
        assert_eq!(Stat::parse(b""), None);
    }

    #[test]
    fn states_mean_what_ps_says() {
        let life = |state, threads| Stat { state, threads, started: 0 }.life();
        assert_eq!([life(b'R', 1), life(b'S', 1), life(b'D', 1), life(b'Z', 2)], [Life::Running; 4]);
        assert_eq!([life(b'T', 1), life(b't', 1)], [Life::Stopped; 2]);
        assert_eq!([life(b'Z', 1), life(b'X', 1)], [Life::Dead; 2]);
    }

    #[test]
    fn a_child_lives_and_dies() {
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let process = Process::find(child.id()).unwrap();
        assert_ne!(process.look(), Life::Dead);
        drop(child.stdin.take());
        // A zombie until it is waited for, and then nothing.
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while process.look() != Life::Dead {
            assert!(std::time::Instant::now() < end);
            std::thread::yield_now();
        }
        child.wait().unwrap();
        assert_eq!(process.look(), Life::Dead);
        assert_eq!(Process { started: Some(1), ..Process::find(std::process::id()).unwrap() }.look(), Life::Dead);
    }

    #[test]
    fn who_is_out_of_descriptors_takes_nobody_for_dead() {
        // Another process, as the limit is the whole process's.
        assert!(crate::base::fork::tests::without_descriptors(|| {
            let parent = std::os::unix::process::parent_id();
            let found = Process::find(parent);
            found.is_some_and(|process| process.look() == Life::Running && process.pid() == parent)
        }));
    }
}
