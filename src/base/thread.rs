//! Starts the library's threads: named, with all signals blocked, and on given processors where the user wants that. Any thread.

use std::io;
use std::mem::MaybeUninit;
use std::thread::JoinHandle;

use super::log::{self, log_warn};

/// Processors that a thread may run on. Empty: wherever the thread that starts it may.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cpus(Vec<usize>);

/// Processors that the kernel's interface has room for (glibc, sched.h: CPU_SETSIZE).
pub const MAX_CPUS: usize = libc::CPU_SETSIZE as usize;

impl Cpus {
    /// Reads a list as in NCCL_PROXY_CPUSET, `0,2,5`, or with ranges, `0-3,8`. `None` for anything else, and for a number from [`MAX_CPUS`] on.
    pub fn parse(text: &str) -> Option<Cpus> {
        let mut cpus = Vec::new();
        if !text.is_empty() {
            for part in text.split(',') {
                let (low, high) = part.split_once('-').unwrap_or((part, part));
                let (low, high): (usize, usize) = (low.trim().parse().ok()?, high.trim().parse().ok()?);
                if low > high || high >= MAX_CPUS {
                    return None;
                }
                cpus.extend(low..=high);
            }
        }
        cpus.sort_unstable();
        cpus.dedup();
        Some(Cpus(cpus))
    }

    /// Moves the calling thread to these processors.
    fn apply(&self) -> io::Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        // SAFETY: all bytes zero is the empty set.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        for &cpu in &self.0 {
            // SAFETY: the number is below CPU_SETSIZE, which `parse` has checked.
            unsafe { libc::CPU_SET(cpu, &mut set) };
        }
        // SAFETY: 0 is the calling thread; the set outlives the call.
        match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Starts a thread with all signals blocked: they are for the application's own threads. If it cannot run on `cpus`, it logs a warning and runs on any
/// processor.
///
/// * `name` - at most 15 bytes are seen by `top -H` and debuggers (linux/sched.h: TASK_COMM_LEN).
///
/// Errors: the system gives no thread.
pub fn spawn(name: &str, cpus: &Cpus, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let (cpus, shown) = (cpus.clone(), name.to_owned());
    let body = move || {
        if let Err(error) = cpus.apply() {
            log_warn!(log::INIT, "thread {shown}: cannot run on the processors {:?}: {error}", cpus.0);
        }
        body();
    };
    // A thread inherits its creator's mask, so no signal reaches it before it could have blocked them itself.
    let _blocked = Blocked::new();
    std::thread::Builder::new().name(name.into()).spawn(body)
}

/// All signals of the calling thread are blocked as long as this exists.
struct Blocked(libc::sigset_t);

impl Blocked {
    fn new() -> Self {
        let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: sigfillset makes a whole set of the first; the second is what the call fills in; both outlive the calls. Neither can fail with
        // valid pointers and SIG_BLOCK.
        unsafe {
            libc::sigfillset(all.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), before.as_mut_ptr());
            Blocked(before.assume_init())
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: the set is the one that the thread had.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &self.0, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A line of the calling thread's status.
    fn status(field: &str) -> String {
        let text = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(":\t")).unwrap().to_owned()
    }

    fn seen_inside(cpus: &Cpus, field: &'static str) -> String {
        let (tx, rx) = mpsc::channel();
        spawn("railhead-test", cpus, move || tx.send(status(field)).unwrap()).unwrap().join().unwrap();
        rx.recv().unwrap()
    }

    #[test]
    fn a_thread_has_its_name_and_blocks_all_signals_but_its_parent_does_not() {
        let before = status("SigBlk");
        assert_eq!(seen_inside(&Cpus::default(), "Name"), "railhead-test");
        let inside = u64::from_str_radix(&seen_inside(&Cpus::default(), "SigBlk"), 16).unwrap();
        // SIGKILL and SIGSTOP cannot be blocked; 32 and 33 are glibc's own.
        let never = [libc::SIGKILL, libc::SIGSTOP, 32, 33].iter().fold(0u64, |mask, &signal| mask | 1 << (signal - 1));
        assert_eq!(inside | never, u64::MAX);
        assert_eq!(status("SigBlk"), before);
    }

    #[test]
    fn a_thread_runs_on_the_processors_it_was_given() {
        let allowed = status("Cpus_allowed_list");
        let last: usize = allowed.rsplit([',', '-']).next().unwrap().parse().unwrap();
        assert_eq!(seen_inside(&Cpus::parse(&last.to_string()).unwrap(), "Cpus_allowed_list"), last.to_string());
        assert_eq!(seen_inside(&Cpus::default(), "Cpus_allowed_list"), allowed);
        // A processor that no machine has: told in the log, and not the end of the thread.
        assert_eq!(seen_inside(&Cpus::parse("1023").unwrap(), "Name"), "railhead-test");
        assert_eq!(status("Cpus_allowed_list"), allowed);
    }

    #[test]
    fn lists_of_processors_are_read_and_other_text_is_not() {
        for (text, cpus) in [("", vec![]), ("3", vec![3]), ("0-3, 8", vec![0, 1, 2, 3, 8]), ("5,1,5", vec![1, 5]), ("1023", vec![1023])] {
            assert_eq!(Cpus::parse(text), Some(Cpus(cpus)), "{text}");
        }
        for text in [",", "1,", "a", "-1", "3-1", "1024", "0-99999999999", "0x1", "1-2-3"] {
            assert_eq!(Cpus::parse(text), None, "{text}");
        }
    }
}
