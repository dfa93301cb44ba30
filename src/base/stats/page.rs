//! The stats page: its layout, and the reader. The owner writes through `stats`; any process that the kernel lets open it reads it, without stopping
//! the owner.
//!
//! A memfd named "railhead-stats", found through /proc/PID/fd. Everything is in host order. A comm or rail record is in use while its `kind` or
//! `owner` is not 0. `seq` of a record is odd while what identifies it changes; counters may be read at any time. The reader trusts
//! nothing in the page but its size, which the seals guarantee.

use std::fs::{File, OpenOptions};
use std::mem::offset_of;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};

use super::{CommCounter, CommKind, MeshOp, RailCounter, WaitCause};
use crate::base::error::{Error, Result};

/// Name of the memfd.
pub const MEMFD_NAME: &str = "railhead-stats";
/// "RHSTATS\0", little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"RHSTATS\0");
/// Changes when something moves, or means something else; not when something is added where zeroes were. `c_examples/railhead_stats.c` has it, too.
pub const VERSION: u32 = 4;
/// Comm records in a page.
pub const COMMS: usize = 1024;
/// Rail records in a page.
pub const RAILS: usize = 2048;
/// Counters in a rail record, spare ones included.
pub const COUNTERS: usize = 24;
/// Bytes of a comm's device name, and of its peer's.
pub const NAME_SIZE: usize = 64;
/// Bytes of why a rail is down.
pub const WHY_SIZE: usize = 128;

/// First 4096 bytes.
#[repr(C)]
pub struct Header {
    /// [`MAGIC`], stored last.
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU32,
    /// Owner's process id, in its own namespace.
    pub pid: AtomicI32,
    /// CLOCK_MONOTONIC, in ns, when the page was made.
    pub started_ns: AtomicU64,
    /// Bytes of the whole page.
    pub size: AtomicU64,
    /// [`COMMS`].
    pub comms: AtomicU32,
    /// [`RAILS`].
    pub rails: AtomicU32,
    /// Comms and rails for which there was no free record.
    pub overflowed: AtomicU64,
    spare: [AtomicU64; 506],
}

/// One comm.
#[repr(C, align(128))]
pub struct CommRecord {
    /// Odd while identity changes.
    pub seq: AtomicU32,
    /// [`CommKind`], or 0 for a free record.
    pub kind: AtomicU32,
    /// Number of the comm within the process, from 1, never used again.
    pub id: AtomicU64,
    /// Peer's process id, or 0.
    pub peer_pid: AtomicI32,
    /// Of a pair of a mesh: the owner's rank.
    pub rank: AtomicU32,
    /// [`WaitCause`].
    pub wait_cause: AtomicU32,
    /// Of a pair of a mesh: the peer's rank, which is another one.
    pub peer_rank: AtomicU32,
    /// CLOCK_MONOTONIC, in ns, at the first sample of the present wait.
    pub wait_since_ns: AtomicU64,
    /// When the comm was made.
    pub made_ns: AtomicU64,
    /// By [`CommCounter`].
    pub counters: [AtomicU64; 8],
    /// By [`WaitCause`].
    pub wait_ns: [AtomicU64; 8],
    /// Device, zero-terminated unless full.
    pub device: [AtomicU8; NAME_SIZE],
    /// Peer, likewise.
    pub peer: [AtomicU8; NAME_SIZE],
    /// [`MeshOp`] of the present wait; `seq` changes with it and with its tag.
    pub wait_op: AtomicU32,
    spare0: AtomicU32,
    /// Its user's tag, or the slot of a buffer; of a wait for a tensor, the step.
    pub wait_tag: AtomicU64,
    /// The tensor that is waited for, likewise; `seq` changes with it.
    pub wait_key: [AtomicU8; NAME_SIZE],
}

/// One rail of a comm.
#[repr(C, align(128))]
pub struct RailRecord {
    /// Odd while identity changes.
    pub seq: AtomicU32,
    /// Which of the comm's rails.
    pub index: AtomicU32,
    /// `id` of the comm, or 0 for a free record.
    pub owner: AtomicU64,
    /// CLOCK_MONOTONIC, in ns, when it failed and the others went on without it; 0 while it is used. `seq` changes with it.
    pub down_since_ns: AtomicU64,
    spare: [AtomicU64; 5],
    /// By [`RailCounter`].
    pub counters: [AtomicU64; COUNTERS],
    /// Why it is down, zero-terminated unless full.
    pub down_why: [AtomicU8; WHY_SIZE],
}

/// The whole page.
#[repr(C)]
pub struct Layout {
    /// What it is.
    pub header: Header,
    /// Comms.
    pub comms: [CommRecord; COMMS],
    /// Their rails.
    pub rails: [RailRecord; RAILS],
}

const _: () = {
    assert!(CommCounter::Ops as usize == 0 && CommCounter::Completions as usize == 1);
    assert!(size_of::<Header>() == 4096 && offset_of!(Header, version) == 8 && offset_of!(Header, pid) == 12);
    assert!(offset_of!(Header, started_ns) == 16 && offset_of!(Header, size) == 24 && offset_of!(Header, comms) == 32);
    assert!(offset_of!(Header, rails) == 36 && offset_of!(Header, overflowed) == 40);
    assert!(size_of::<CommRecord>() == 384 && offset_of!(CommRecord, kind) == 4 && offset_of!(CommRecord, id) == 8);
    assert!(offset_of!(CommRecord, peer_pid) == 16 && offset_of!(CommRecord, rank) == 20 && offset_of!(CommRecord, wait_cause) == 24);
    assert!(offset_of!(CommRecord, peer_rank) == 28 && offset_of!(CommRecord, wait_op) == 304 && offset_of!(CommRecord, wait_tag) == 312);
    assert!(offset_of!(CommRecord, wait_key) == 320);
    assert!(offset_of!(CommRecord, wait_since_ns) == 32 && offset_of!(CommRecord, made_ns) == 40 && offset_of!(CommRecord, counters) == 48);
    assert!(offset_of!(CommRecord, wait_ns) == 112 && offset_of!(CommRecord, device) == 176 && offset_of!(CommRecord, peer) == 240);
    assert!(size_of::<RailRecord>() == 384 && offset_of!(RailRecord, index) == 4 && offset_of!(RailRecord, owner) == 8);
    assert!(
        offset_of!(RailRecord, down_since_ns) == 16 && offset_of!(RailRecord, counters) == 64 && offset_of!(RailRecord, down_why) == 256
    );
    assert!(offset_of!(Layout, comms) == 4096 && offset_of!(Layout, rails) == 4096 + COMMS * 384);
    assert!(size_of::<Layout>() == 4096 + (COMMS + RAILS) * 384 && size_of::<Layout>().is_multiple_of(4096));
};

impl CommRecord {
    /// Runs a change of identity between two steps of `seq`. By the owner.
    pub(super) fn describe(&self, change: impl FnOnce(&Self)) {
        seq_begin(&self.seq);
        change(self);
        seq_end(&self.seq);
    }

    pub(super) fn set_peer(&self, peer: &str, pid: i32) {
        put_text(&self.peer, peer);
        self.peer_pid.store(pid, Ordering::Relaxed);
    }

    pub(super) fn set_wait_key(&self, key: &str) {
        put_text(&self.wait_key, key);
    }

    pub(super) fn set_ranks(&self, rank: usize, peer: usize) {
        self.rank.store(rank as u32, Ordering::Relaxed);
        self.peer_rank.store(peer as u32, Ordering::Relaxed);
    }

    /// Everything but `seq` and `kind` at its start.
    pub(super) fn clear(&self) {
        for word in self.counters.iter().chain(&self.wait_ns).chain([&self.id, &self.wait_since_ns, &self.made_ns, &self.wait_tag]) {
            word.store(0, Ordering::Relaxed);
        }
        self.wait_cause.store(0, Ordering::Relaxed);
        self.wait_op.store(0, Ordering::Relaxed);
        self.set_ranks(0, 0);
        self.set_peer("", 0);
        self.set_wait_key("");
    }

    pub(super) fn set_device(&self, device: &str) {
        put_text(&self.device, device);
    }

    fn snapshot(&self, now: u64) -> Option<CommSnapshot> {
        let read = || {
            let kind = match self.kind.load(Ordering::Relaxed) {
                1 => CommKind::Listen,
                2 => CommKind::Send,
                3 => CommKind::Recv,
                4 => CommKind::Pair,
                _ => return None,
            };
            let cause = self.wait_cause.load(Ordering::Relaxed);
            let wait = WaitCause::ALL.get(cause as usize).copied().unwrap_or(WaitCause::None);
            let op = MeshOp::ALL.get(self.wait_op.load(Ordering::Relaxed) as usize).copied().unwrap_or(MeshOp::None);
            let ranks = (self.rank.load(Ordering::Relaxed), self.peer_rank.load(Ordering::Relaxed));
            let since = self.wait_since_ns.load(Ordering::Relaxed);
            let counters = load_all(&self.counters);
            Some(CommSnapshot {
                kind,
                id: self.id.load(Ordering::Relaxed),
                device: take_text(&self.device),
                peer: take_text(&self.peer),
                peer_pid: self.peer_pid.load(Ordering::Relaxed),
                ranks: Some(ranks).filter(|(rank, peer)| kind == CommKind::Pair && rank != peer),
                outstanding: outstanding(kind, &counters),
                wait,
                wait_age_ns: if wait == WaitCause::None { 0 } else { now.saturating_sub(since) },
                wait_op: if wait == WaitCause::None { MeshOp::None } else { op },
                wait_tag: self.wait_tag.load(Ordering::Relaxed),
                wait_key: if wait == WaitCause::None { String::new() } else { take_text(&self.wait_key) },
                counters,
                wait_ns: load_all(&self.wait_ns),
                rails: Vec::new(),
            })
        };
        consistent(&self.seq, read)
    }
}

impl RailRecord {
    /// As [`CommRecord::describe`].
    pub(super) fn describe(&self, change: impl FnOnce(&Self)) {
        seq_begin(&self.seq);
        change(self);
        seq_end(&self.seq);
    }

    /// Counters at their start.
    pub(super) fn clear(&self) {
        for counter in &self.counters {
            counter.store(0, Ordering::Relaxed);
        }
        self.set_down(0, "");
    }

    pub(super) fn set_down(&self, since: u64, why: &str) {
        self.down_since_ns.store(since, Ordering::Relaxed);
        put_text(&self.down_why, why);
    }

    fn snapshot(&self, now: u64) -> Option<(u64, RailSnapshot)> {
        let read = || match self.owner.load(Ordering::Relaxed) {
            0 => None,
            owner => {
                let down = match self.down_since_ns.load(Ordering::Relaxed) {
                    0 => None,
                    since => Some(Down { age_ns: now.saturating_sub(since), why: take_text(&self.down_why) }),
                };
                Some((owner, RailSnapshot { index: self.index.load(Ordering::Relaxed), counters: load_all(&self.counters), down }))
            }
        };
        consistent(&self.seq, read)
    }
}

fn seq_begin(seq: &AtomicU32) {
    seq.store(seq.load(Ordering::Relaxed).wrapping_add(1) | 1, Ordering::Relaxed);
    // No change may become visible before the odd number; pairs with the acquire fence in `consistent`.
    fence(Ordering::Release);
}

fn seq_end(seq: &AtomicU32) {
    // Pairs with the first load in `consistent`.
    seq.store(seq.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
}

/// What `read` returns while `seq` stands still. An owner that died, or lies, in the middle of a change has no such record.
fn consistent<T>(seq: &AtomicU32, read: impl Fn() -> Option<T>) -> Option<T> {
    for _ in 0..100 {
        let before = seq.load(Ordering::Acquire);
        if before.is_multiple_of(2) {
            let value = read();
            fence(Ordering::Acquire);
            if seq.load(Ordering::Relaxed) == before {
                return value;
            }
        }
        std::thread::yield_now();
    }
    None
}

fn load_all<const N: usize>(words: &[AtomicU64; N]) -> [u64; N] {
    std::array::from_fn(|i| words[i].load(Ordering::Relaxed))
}

/// Requests given out and not completed; a listener has none. The owner may count between two of our loads.
fn outstanding(kind: CommKind, counters: &[u64; 8]) -> u32 {
    let [ops, completions, ..] = counters;
    if kind == CommKind::Listen {
        return 0;
    }
    u32::try_from(ops.saturating_sub(*completions)).unwrap_or(u32::MAX)
}

fn put_text(to: &[AtomicU8], text: &str) {
    let bytes = text.bytes().map(|b| if b == 0 { b'?' } else { b }).chain(std::iter::repeat(0));
    for (slot, byte) in to.iter().zip(bytes) {
        slot.store(byte, Ordering::Relaxed);
    }
}

fn take_text(from: &[AtomicU8]) -> String {
    let bytes: Vec<u8> = from.iter().map(|b| b.load(Ordering::Relaxed)).take_while(|&b| b != 0).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A process's page at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Owner's process id, in its own namespace.
    pub pid: i32,
    /// Nanoseconds since the page was made.
    pub age_ns: u64,
    /// Comms and rails for which there was no free record.
    pub overflowed: u64,
    /// Comms, each with its rails.
    pub comms: Vec<CommSnapshot>,
}

/// A comm at one moment.
#[derive(Debug, Clone)]
pub struct CommSnapshot {
    /// Which end.
    pub kind: CommKind,
    /// Number within the process.
    pub id: u64,
    /// Device.
    pub device: String,
    /// Peer, as the owner knows it.
    pub peer: String,
    /// Peer's process id, or 0.
    pub peer_pid: i32,
    /// Of a pair of a mesh: the owner's rank and the peer's.
    pub ranks: Option<(u32, u32)>,
    /// Requests outstanding.
    pub outstanding: u32,
    /// What it waits for.
    pub wait: WaitCause,
    /// Since when, in ns.
    pub wait_age_ns: u64,
    /// Of a pair of a mesh: in what it waits.
    pub wait_op: MeshOp,
    /// Its user's tag, or the slot of a buffer; of a wait for a tensor, the step.
    pub wait_tag: u64,
    /// The tensor that is waited for, or nothing.
    pub wait_key: String,
    /// By [`CommCounter`].
    pub counters: [u64; 8],
    /// By [`WaitCause`].
    pub wait_ns: [u64; 8],
    /// Rails, by index.
    pub rails: Vec<RailSnapshot>,
}

/// A rail at one moment.
#[derive(Debug, Clone)]
pub struct RailSnapshot {
    /// Which of the comm's rails.
    pub index: u32,
    /// By [`RailCounter`].
    pub counters: [u64; COUNTERS],
    /// It is down.
    pub down: Option<Down>,
}

/// A rail that has failed, and without which its comm goes on.
#[derive(Debug, Clone)]
pub struct Down {
    /// For how long, in ns.
    pub age_ns: u64,
    /// Why; the end of a long text is cut.
    pub why: String,
}

impl CommSnapshot {
    /// One counter.
    pub fn get(&self, counter: CommCounter) -> u64 {
        self.counters[counter as usize]
    }

    /// Nanoseconds waited for one cause.
    pub fn waited(&self, cause: WaitCause) -> u64 {
        self.wait_ns[cause as usize]
    }

    /// One rail counter, summed over the rails.
    pub fn rail_sum(&self, counter: RailCounter) -> u64 {
        self.rails.iter().map(|rail| rail.get(counter)).fold(0, u64::wrapping_add)
    }
}

impl RailSnapshot {
    /// One counter.
    pub fn get(&self, counter: RailCounter) -> u64 {
        self.counters[counter as usize]
    }
}

/// Somebody's page, mapped read-only.
pub struct Page {
    map: MmapRaw,
    /// Of its file.
    ino: u64,
    path: PathBuf,
}

impl Page {
    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn layout(&self) -> &Layout {
        // SAFETY: the mapping has the layout's exact size, page alignment satisfies it, its length is sealed, and it consists of
        // atomics, so whatever the owner stores meanwhile is a value.
        unsafe { &*self.map.as_mut_ptr().cast::<Layout>() }
    }

    /// Copies everything that is in use.
    pub fn snapshot(&self) -> Snapshot {
        let layout = self.layout();
        let now = crate::base::clock::now();
        let mut comms: Vec<CommSnapshot> = layout.comms.iter().filter_map(|record| record.snapshot(now)).collect();
        for (owner, rail) in layout.rails.iter().filter_map(|record| record.snapshot(now)) {
            // A rail whose comm is just going, or was never there, belongs to nobody.
            if let Some(comm) = comms.iter_mut().find(|comm| comm.id == owner) {
                comm.rails.push(rail);
            }
        }
        for comm in &mut comms {
            comm.rails.sort_by_key(|rail| rail.index);
            let moved = RailCounter::payload(comm.kind).map(|counter| comm.rail_sum(counter)).fold(0, u64::wrapping_add);
            // A record may have been counted, and wait to be sent; or the rails found no place in the page.
            comm.counters[CommCounter::Bytes as usize] = moved.saturating_sub(comm.get(CommCounter::Bytes));
        }
        Snapshot {
            pid: layout.header.pid.load(Ordering::Relaxed),
            age_ns: now.saturating_sub(layout.header.started_ns.load(Ordering::Relaxed)),
            overflowed: layout.header.overflowed.load(Ordering::Relaxed),
            comms,
        }
    }
}

/// Maps the page at `path`, as found in some /proc/PID/fd.
///
/// Errors: what cannot be opened, is no page of this version, or could shrink while being read.
pub fn attach(path: &Path) -> Result<Page> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open(path)
        .map_err(|e| Error::system(format!("opening {}", path.display()), e))?;
    let (map, ino) = check(&file).map_err(|why| Error::usage(format!("{} is not a stats page: {why}", path.display())))?;
    let page = Page { map, ino, path: path.into() };
    let header = &page.layout().header;
    // Acquire pairs with the owner's Release store of the magic: the rest of the header is there.
    if header.magic.load(Ordering::Acquire) != MAGIC || header.version.load(Ordering::Relaxed) != VERSION {
        return Err(Error::usage(format!("{} is not a stats page of version {VERSION}", path.display())));
    }
    Ok(page)
}

/// The page's mapping, and the number of its file.
fn check(file: &File) -> std::result::Result<(MmapRaw, u64), String> {
    // SAFETY: the descriptor is open; the command takes no argument.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
        return Err("it can shrink".into());
    }
    let meta = file.metadata().map_err(|e| e.to_string())?;
    let size = meta.len();
    if size != size_of::<Layout>() as u64 {
        return Err(format!("it has {size} bytes, expected {}", size_of::<Layout>()));
    }
    let map = MmapOptions::new().len(size_of::<Layout>()).map_raw_read_only(file).map_err(|e| e.to_string())?;
    Ok((map, meta.ino()))
}

/// The pages that the process owns: none or one, or one per loaded copy of the library. A page inherited through fork is not its own.
pub fn find(pid: i32) -> Vec<Page> {
    // A process that is gone, or not ours to look into, has no page for us.
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let owners = ids(pid);
    let mut seen = Vec::new();
    let mut pages = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        let ours = std::fs::read_link(&path).is_ok_and(|target| target.as_os_str() == format!("/memfd:{MEMFD_NAME} (deleted)").as_str());
        if !ours {
            continue;
        }
        let Ok(page) = attach(&path) else { continue };
        // Of what was opened, as the descriptor may be another file's by now.
        if !seen.contains(&page.ino) && owners.contains(&page.layout().header.pid.load(Ordering::Relaxed)) {
            seen.push(page.ino);
            pages.push(page);
        }
    }
    pages
}

/// What the process calls itself in the namespaces that it is in.
fn ids(pid: i32) -> Vec<i32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let inner = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
    inner.split_whitespace().filter_map(|id| id.parse().ok()).chain([pid]).collect()
}
