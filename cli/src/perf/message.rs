//! What the coordinator and its ranks say to each other, in frames of `channel`.

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::warnings::Warnings;

/// Requests that may be outstanding per comm: NCCL_NET_MAX_REQUESTS.
pub const MAX_OUTSTANDING: usize = 32;
/// Largest message.
pub const MAX_SIZE: usize = 64 << 20;
/// Comms of one rank at most.
pub const MAX_COMMS: usize = 1024;
/// Slots per comm at most: what 64 comms with 32 have.
const MAX_SLOTS: usize = 2048;
/// Slots of a ping-pong, in each direction.
pub const PING_SLOTS: usize = 8;
/// Receives of a ping-pong that are posted at most: a send may complete behind the answer to it.
pub const MAX_AHEAD: usize = PING_SLOTS;
/// Bytes of a receive and how many are posted if not given: what NCCL has of its Simple protocol (NCCL_BUFFSIZE by NCCL_STEPS, 4 MiB by 8).
pub const STEP: usize = 512 << 10;
/// See [`STEP`].
pub const AHEAD: usize = 4;

/// From the coordinator to a rank. A rank answers each with [`FromRank::Done`] or [`FromRank::Failed`], except for what ends a swap.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum ToRank {
    /// The first message.
    Start(Start),
    /// Allocates and registers for some work, to be named `id` from here on.
    Prepare { id: u32, work: Work },
    /// Moves data and checks every byte.
    Verify { id: u32 },
    /// Moves `messages` per comm and measures, from `start_ns` (CLOCK_MONOTONIC) on if both ranks have one clock.
    Round { id: u32, messages: u64, start_ns: Option<u64> },
    /// Undoes `Prepare`.
    Release { id: u32 },
    /// What the other rank swapped.
    Swapped { data: String },
    /// The other rank will not swap: it failed.
    Abort,
    /// Closes everything.
    Finish,
}

/// From a rank to the coordinator.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum FromRank {
    /// Gives something to the other rank and waits for what that gives.
    Swap { data: String },
    /// The command succeeded.
    Done(Outcome),
    /// It did not.
    Failed { message: String },
    /// Messages completed since the start: this rank is alive. Only sent when there were some since the last time.
    Progress { messages: u64 },
    /// What the plugin warned of since the last time.
    Warnings(Warnings),
}

/// Who a rank is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Start {
    /// 0 or 1.
    pub rank: usize,
    /// None: this rank only measures limits.
    pub plugin: Option<PluginSpec>,
    /// Comms to set up, each with both directions.
    pub comms: usize,
    /// The CPU to stay on.
    pub cpu: Option<usize>,
}

/// Which plugin, and how.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PluginSpec {
    /// The file.
    pub path: std::path::PathBuf,
    /// The version of the table; the newest if none.
    pub abi: Option<u32>,
    /// The device.
    pub dev: i32,
    /// Make the kernel refuse cross-memory attach.
    pub refuse_cma: bool,
}

/// Something to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// The plugin: messages as fast as they go.
    Bandwidth(Bandwidth),
    /// The plugin: ping-pong on one comm.
    Latency(Latency),
    /// The plugin: sets up comms of its own, uses each, tears them down.
    Churn { comms: usize },
    /// Single-thread memcpy.
    Memcpy(Block),
    /// Bare process_vm_readv.
    Readv(Block),
    /// One cache line between two processes.
    CacheLine,
    /// Ping-pong over two rings of cache lines.
    Ring,
    /// Plain blocking TCP stream.
    TcpStream(Block),
    /// Spinning TCP ping-pong.
    TcpPingPong { size: usize },
}

/// Parameters of [`Work::Latency`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    /// Bytes of a message.
    pub size: usize,
    /// Of a receive, which a message may not fill.
    pub recv_size: usize,
    /// Receives that are posted at any time; 0: one, when it is waited for.
    pub ahead: usize,
}

/// Parameters of [`Work::Bandwidth`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bandwidth {
    /// Bytes of a message.
    pub size: usize,
    /// Of a receive, which a message may not fill.
    pub recv_size: usize,
    /// Requests outstanding per comm and direction.
    pub outstanding: usize,
    /// Buffers per comm and direction that messages walk over.
    pub slots: usize,
    /// Comms in use.
    pub comms: usize,
    /// Both directions at once.
    pub two_way: bool,
    /// The sender writes and the receiver reads every byte.
    pub touch: bool,
}

/// The slots of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// Bytes of a slot.
    pub size: usize,
    /// Slots.
    pub slots: usize,
}

impl Work {
    /// Whether a rank should do that: the coordinator may be on another host.
    pub fn check(&self) -> anyhow::Result<()> {
        let size = |n: usize| {
            ensure!(n <= MAX_SIZE, "a message of {n} bytes: at most {MAX_SIZE}");
            Ok(())
        };
        let receive = |n: usize, least: usize| {
            ensure!((least..=MAX_SIZE).contains(&n), "a receive of {n} bytes for a message of {least}: {least} to {MAX_SIZE}");
            Ok(())
        };
        let slots = |n: usize| {
            ensure!((1..=MAX_SLOTS).contains(&n), "{n} slots: 1 to {MAX_SLOTS}");
            Ok(())
        };
        let comms = |n: usize| {
            ensure!((1..=MAX_COMMS).contains(&n), "{n} comms: 1 to {MAX_COMMS}");
            Ok(())
        };
        match *self {
            Work::Bandwidth(b) => {
                size(b.size)?;
                receive(b.recv_size, b.size)?;
                slots(b.slots)?;
                comms(b.comms)?;
                ensure!(
                    (1..=MAX_OUTSTANDING.min(b.slots)).contains(&b.outstanding),
                    "{} outstanding: 1 to {MAX_OUTSTANDING}",
                    b.outstanding
                );
                Ok(())
            }
            Work::Latency(l) => {
                size(l.size)?;
                receive(l.recv_size, l.size)?;
                ensure!(l.ahead <= MAX_AHEAD, "{} receives ahead: 0 to {MAX_AHEAD}", l.ahead);
                Ok(())
            }
            Work::Churn { comms: n } => comms(n),
            Work::Memcpy(b) | Work::Readv(b) | Work::TcpStream(b) => {
                ensure!(b.size > 0, "a limit of 0 bytes");
                size(b.size)?;
                slots(b.slots)
            }
            Work::CacheLine | Work::Ring => Ok(()),
            Work::TcpPingPong { size: n } => {
                ensure!((1..=4096).contains(&n), "a ping of {n} bytes: 1 to 4096");
                Ok(())
            }
        }
    }
}

impl Work {
    /// Bytes of buffers that a rank allocates.
    pub fn bytes(&self) -> usize {
        match *self {
            // One rank only sends if it goes one way, and that takes less.
            Work::Bandwidth(b) if b.two_way => (b.size + b.recv_size) * b.slots * b.comms,
            Work::Bandwidth(b) => b.recv_size * b.slots * b.comms,
            Work::Memcpy(b) => 2 * b.size * b.slots,
            Work::Readv(b) | Work::TcpStream(b) => b.size * b.slots,
            Work::Latency(l) => PING_SLOTS * (l.size + l.recv_size),
            Work::Churn { .. } | Work::CacheLine | Work::Ring | Work::TcpPingPong { .. } => 0,
        }
    }
}

/// What a command gave.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Outcome {
    /// Nothing to tell.
    Nothing,
    /// [`ToRank::Start`] with a plugin.
    Started(Started),
    /// [`ToRank::Prepare`]: a remark on how it is measured.
    Prepared { note: Option<String> },
    /// [`ToRank::Round`].
    Round(Round),
    /// [`ToRank::Release`]: bytes that a plugin has delivered to this rank since [`ToRank::Prepare`].
    Released { received: u64 },
}

/// The plugin that a rank loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Started {
    /// Its name.
    pub name: String,
    /// The version of its table.
    pub abi: u32,
    /// The device's name.
    pub device: String,
}

/// One round as a rank saw it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Round {
    /// CLOCK_MONOTONIC at the beginning and the end; both zero for a rank that had nothing to do.
    pub start_ns: u64,
    /// The end.
    pub end_ns: u64,
    /// User and system time.
    pub cpu_s: f64,
    /// The figure, where it is not the time per message.
    pub value: Option<f64>,
    /// Messages completed per comm when the first comm had all of its own.
    pub at_first: Vec<u64>,
    /// Memory, where that is the question.
    pub memory: Option<Memory>,
}

/// Growth of a process's memory, in bytes.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Private pages in RAM.
    pub anon: i64,
    /// Shared pages in RAM.
    pub shared: i64,
    /// Address space of shared mappings.
    pub mapped: i64,
}
