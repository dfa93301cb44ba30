//! What a process holds, to compare before and after; and what the stats page of a process says.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use railhead::base::stats::page::{CommSnapshot, find};
use railhead::base::stats::{RailCounter, WaitCause};
use rustix::fs::{FlockOperation, flock};

/// Descriptors, threads, mappings and files in /dev/shm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holdings {
    pub fds: Vec<String>,
    pub tasks: usize,
    pub shm: BTreeSet<String>,
    pub shared_maps: usize,
    pub maps: usize,
}

fn names(path: &str) -> Vec<String> {
    let Ok(dir) = std::fs::read_dir(path) else { return Vec::new() };
    dir.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect()
}

/// /dev/shm is one for all: whoever looks for what was left in it, or leaves something there, does so alone.
pub fn dev_shm() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // A test that failed has poisoned nothing but itself.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Files in /dev/shm that nobody owns, at this moment. The next start of anybody's takes them away.
pub fn abandoned_files() -> BTreeSet<String> {
    names("/dev/shm").into_iter().filter(|name| name.contains("railhead") && is_abandoned(name)).collect()
}

fn is_abandoned(name: &String) -> bool {
    let file = std::fs::File::open(format!("/dev/shm/{name}"));
    file.is_ok_and(|file| flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok())
}

/// Our files in /dev/shm that nobody owns: a segment's owner holds a lock on its file as long as it has a name. Other tests' processes own some all the time.
pub fn shm_files() -> BTreeSet<String> {
    let mut left = abandoned_files();
    // One that is just made gets its lock, and one that is just given up loses its name: on a busy machine that takes a while.
    for _ in 0..50 {
        if left.is_empty() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
        left.retain(is_abandoned);
    }
    left
}

/// Segments of this process whose files have a name still.
pub fn named_segments() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    maps.lines().filter(|line| line.contains("/dev/shm/railhead-") && !line.ends_with("(deleted)")).count()
}

impl Holdings {
    pub fn now() -> Holdings {
        let target = |fd: &String| std::fs::read_link(format!("/proc/self/fd/{fd}")).map(|p| kind(&p.to_string_lossy()));
        // The descriptor that lists them is not there any more when its link is read.
        let mut fds: Vec<String> = names("/proc/self/fd").iter().filter_map(|fd| target(fd).ok()).collect();
        fds.sort();
        let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
        Holdings {
            fds,
            tasks: names("/proc/self/task").len(),
            shm: shm_files(),
            shared_maps: maps.lines().filter(|l| l.contains("memfd") || l.contains("/dev/shm")).count(),
            maps: maps.lines().count(),
        }
    }

    /// Fails unless `after` holds the same; mappings may differ by a few, as the C library keeps arenas.
    #[track_caller]
    pub fn assert_same(&self, after: &Holdings, what: &str) {
        assert_eq!(self.fds, after.fds, "{what}: descriptors");
        assert_eq!(self.tasks, after.tasks, "{what}: threads");
        assert_eq!(self.shm, after.shm, "{what}: /dev/shm");
        assert_eq!(self.shared_maps, after.shared_maps, "{what}: shared mappings");
        assert!(after.maps <= self.maps + 16, "{what}: {} mappings, then {}", self.maps, after.maps);
    }
}

/// `socket:[123]` without its number.
fn kind(target: &str) -> String {
    target.split(":[").next().unwrap_or(target).to_string()
}

/// Every comm on the stats pages of a process.
pub fn comms(pid: i32) -> Vec<CommSnapshot> {
    find(pid).iter().flat_map(|page| page.snapshot().comms).collect()
}

/// Sum of a rail counter over the comms of a process.
pub fn rail_sum(pid: i32, counter: RailCounter) -> u64 {
    comms(pid).iter().map(|c| c.rail_sum(counter)).sum()
}

/// Bytes sent and received by this process, by path: inline, mapped, cma, bounce, tcp.
pub fn paths(pid: i32) -> [u64; 5] {
    use RailCounter::*;
    [[TxInline, RxInline], [TxMapped, RxMapped], [TxCma, RxCma], [TxBounce, RxBounce], [TxTcp, RxTcp]]
        .map(|pair| pair.iter().map(|&c| rail_sum(pid, c)).sum())
}

/// What the comms of a process wait for at the moment.
pub fn waits(pid: i32) -> Vec<WaitCause> {
    comms(pid).iter().map(|c| c.wait).filter(|w| *w != WaitCause::None).collect()
}

/// The process behind a wrapping command such as `unshare --fork`: the last one of a line of only children.
pub fn innermost(pid: i32) -> i32 {
    let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    match children.split_whitespace().next().and_then(|c| c.parse().ok()) {
        Some(child) => innermost(child),
        None => pid,
    }
}
