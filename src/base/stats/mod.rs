//! Counters and wait causes: written by the thread that drives a comm, read by any process through the page of [`page`].
//!
//! A counter costs a load, an addition and a store, all relaxed; nothing here takes a lock, allocates or reads the clock while messages move. A record is
//! taken when a comm is made and freed when its last handle is dropped. Where the page is full, disabled (RAILHEAD_STATS=0) or could not be made, the
//! counters are in private memory, which makes no difference to the caller.

mod names;
pub mod page;
mod records;

use std::cell::Cell;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::base::clock;
use page::{COUNTERS, CommRecord, RailRecord};
use records::{OwnedCommRecord, OwnedRailRecord};

pub use records::{PageGuard, keep_page, set_enabled};

/// What is counted per rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum RailCounter {
    /// Bytes sent inside a descriptor.
    TxInline,
    /// Bytes that the peer copied out of an allocation of ours that it maps.
    TxMapped,
    /// Bytes sent by cross-memory attach.
    TxCma,
    /// Bytes sent through a bounce ring.
    TxBounce,
    /// Bytes sent over TCP.
    TxTcp,
    /// Bytes received inside a descriptor.
    RxInline,
    /// Bytes copied out of an allocation of the peer's that this side maps.
    RxMapped,
    /// Bytes received by cross-memory attach.
    RxCma,
    /// Bytes received through a bounce ring.
    RxBounce,
    /// Bytes received over TCP.
    RxTcp,
    /// Send requests posted. Each completes, or its queue pair fails; and each receive request is matched by one of the peer's: so neither
    /// completions nor receive requests are counted.
    Requests,
    /// Requests that waited for a receive request.
    RnrWaits,
    /// Failed requests; of the software fabric, failed queue pairs.
    Errors,
    /// Times that cross-memory attach was found not to work: while connecting, or by a copy.
    CmaRefused,
    /// System calls made to move data.
    Syscalls,
    /// Connections made anew.
    Reconnects,
    /// Of the bytes sent by cross-memory attach, those that this side wrote into the peer's memory.
    TxGranted,
    /// Bytes sent by a NIC.
    TxNic,
    /// Bytes received by a NIC, of messages that say that they came: a peer's plain WRITEs are not seen.
    RxNic,
    /// What a NIC reported unasked and that concerns the rail: its link, its addresses, its queue pair, the device.
    NicEvents,
    /// Times that the rail failed and others carried on.
    Failures,
}

impl RailCounter {
    /// Every counter, in the page's order.
    pub const ALL: [RailCounter; 21] = [
        RailCounter::TxInline,
        RailCounter::TxMapped,
        RailCounter::TxCma,
        RailCounter::TxBounce,
        RailCounter::TxTcp,
        RailCounter::RxInline,
        RailCounter::RxMapped,
        RailCounter::RxCma,
        RailCounter::RxBounce,
        RailCounter::RxTcp,
        RailCounter::Requests,
        RailCounter::RnrWaits,
        RailCounter::Errors,
        RailCounter::CmaRefused,
        RailCounter::Syscalls,
        RailCounter::Reconnects,
        RailCounter::TxGranted,
        RailCounter::TxNic,
        RailCounter::RxNic,
        RailCounter::NicEvents,
        RailCounter::Failures,
    ];

    /// Those that count payload bytes sent.
    pub const TX: [RailCounter; 6] =
        [RailCounter::TxInline, RailCounter::TxMapped, RailCounter::TxCma, RailCounter::TxBounce, RailCounter::TxTcp, RailCounter::TxNic];

    /// Those that count payload bytes received.
    pub const RX: [RailCounter; 6] =
        [RailCounter::RxInline, RailCounter::RxMapped, RailCounter::RxCma, RailCounter::RxBounce, RailCounter::RxTcp, RailCounter::RxNic];

    /// Those that count the bytes which a comm of that kind is for.
    pub fn payload(kind: CommKind) -> impl Iterator<Item = RailCounter> {
        let sent = (kind != CommKind::Recv).then_some(RailCounter::TX);
        let received = matches!(kind, CommKind::Recv | CommKind::Pair).then_some(RailCounter::RX);
        sent.into_iter().chain(received).flatten()
    }
}

/// What is counted per comm; of a pair of a mesh, or a channel of tensors, of both directions. Requests that are outstanding are those given out and not completed, so nobody
/// counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(usize)]
pub enum CommCounter {
    /// Requests given out.
    Ops,
    /// Requests completed.
    Completions,
    /// Bytes of messages, sent or received. The writer counts here only the bytes that the rails have moved in the comm's direction and that belong to
    /// no message; the reader shows the sum over the rails minus that.
    Bytes,
    /// Calls that returned no request, to be tried again.
    NullPosts,
    /// Requests that failed.
    Errors,
    /// Requests reported as stalled (RAILHEAD_STALL_WARN_S).
    Stalls,
    /// Bytes of tensors that were copied on their way between their producer's and their consumer's memory.
    Copied,
}

impl CommCounter {
    /// Every counter, in the page's order.
    pub const ALL: [CommCounter; 7] = [
        CommCounter::Ops,
        CommCounter::Completions,
        CommCounter::Bytes,
        CommCounter::NullPosts,
        CommCounter::Errors,
        CommCounter::Stalls,
        CommCounter::Copied,
    ];
}

/// What a comm waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum WaitCause {
    /// Nothing.
    None = 0,
    /// A send waits: the peer has not posted the receive.
    PeerNoReceive = 1,
    /// A receive waits: the peer has sent nothing.
    PeerNoSend = 2,
    /// Posted work has not completed.
    Fabric = 3,
    /// The connection is being made.
    Handshake = 4,
    /// The peer's process is stopped.
    PeerStopped = 5,
    /// The peer is gone.
    PeerGone = 6,
}

impl WaitCause {
    /// Every cause, by number.
    pub const ALL: [WaitCause; 7] = [
        WaitCause::None,
        WaitCause::PeerNoReceive,
        WaitCause::PeerNoSend,
        WaitCause::Fabric,
        WaitCause::Handshake,
        WaitCause::PeerStopped,
        WaitCause::PeerGone,
    ];
}

/// What a rank of a mesh does that waits for another. The numbers of collectives are also in the tags of their messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum MeshOp {
    /// Nothing, or it is no mesh.
    None = 0,
    /// A collective, and so are those that follow.
    Gather = 1,
    /// See `Gather`.
    Allgather = 2,
    /// See `Gather`.
    Reduce = 3,
    /// See `Gather`.
    Allreduce = 4,
    /// See `Gather`.
    Scatter = 5,
    /// See `Gather`.
    Broadcast = 6,
    /// See `Gather`.
    Barrier = 7,
    /// See `Gather`.
    Alltoall = 8,
    /// The last collective.
    ReduceScatter = 9,
    /// A message to the peer.
    Send = 10,
    /// A message from the peer.
    Recv = 11,
    /// A message from the peer or any of others.
    RecvAny = 12,
    /// A message into the slot of a buffer, either way.
    Buffer = 13,
}

impl MeshOp {
    /// All, by number.
    pub const ALL: [MeshOp; 14] = [
        MeshOp::None,
        MeshOp::Gather,
        MeshOp::Allgather,
        MeshOp::Reduce,
        MeshOp::Allreduce,
        MeshOp::Scatter,
        MeshOp::Broadcast,
        MeshOp::Barrier,
        MeshOp::Alltoall,
        MeshOp::ReduceScatter,
        MeshOp::Send,
        MeshOp::Recv,
        MeshOp::RecvAny,
        MeshOp::Buffer,
    ];

    /// Whether all ranks do it together.
    pub fn is_collective(self) -> bool {
        (MeshOp::Gather as u32..=MeshOp::ReduceScatter as u32).contains(&(self as u32))
    }
}

/// A wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// For what.
    pub cause: WaitCause,
    /// Of a mesh: in which operation.
    pub op: MeshOp,
    /// Its user's tag, or the slot of a buffer.
    pub tag: u64,
}

impl Wait {
    /// Nobody waits.
    pub const NONE: Wait = Wait { cause: WaitCause::None, op: MeshOp::None, tag: 0 };
}

impl From<WaitCause> for Wait {
    fn from(cause: WaitCause) -> Wait {
        Wait { cause, ..Wait::NONE }
    }
}

/// What kind of comm a record belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum CommKind {
    /// A listener.
    Listen = 1,
    /// The sending end.
    Send = 2,
    /// The receiving end.
    Recv = 3,
    /// Both ends in one: a pair of a mesh, or a channel of tensors.
    Pair = 4,
}

/// Idle polls per read of the clock.
const SAMPLE_EVERY: u32 = 64;

/// One rail's counters. Clones count into the same record; one thread at a time, or counts get lost.
#[derive(Clone)]
pub struct RailStats {
    record: NonNull<RailRecord>,
    /// Keeps `record` where it is.
    _owned: Arc<OwnedRailRecord>,
}

// SAFETY: the record is atomics alone, and what keeps it alive may be shared and dropped by any thread.
unsafe impl Send for RailStats {}
// SAFETY: as above; `add` from two threads may lose counts, which is no memory error.
unsafe impl Sync for RailStats {}

impl RailStats {
    /// Counters that are in no page.
    pub fn detached() -> Self {
        Self::at(OwnedRailRecord::detached())
    }

    fn at(owned: OwnedRailRecord) -> Self {
        let owned = Arc::new(owned);
        RailStats { record: owned.record(), _owned: owned }
    }

    #[inline]
    fn record(&self) -> &RailRecord {
        // SAFETY: `_owned` keeps the record mapped; a record is atomics, which others may read meanwhile.
        unsafe { self.record.as_ref() }
    }

    #[inline]
    fn counter(&self, counter: RailCounter) -> &AtomicU64 {
        &self.record().counters[counter as usize]
    }

    /// Counts. By the thread that drives the rail.
    #[inline]
    pub fn add(&self, counter: RailCounter, n: u64) {
        bump(self.counter(counter), n);
    }

    /// Subtracts what was counted too early.
    #[cold]
    pub fn take(&self, counter: RailCounter, n: u64) {
        bump(self.counter(counter), n.wrapping_neg());
    }

    /// It has failed, at `since` (CLOCK_MONOTONIC, ns), and others carry on.
    pub fn went_down(&self, since: u64, why: &str) {
        self.add(RailCounter::Failures, 1);
        self.record().describe(|record| record.set_down(since.max(1), why));
    }

    /// It is used again.
    pub fn came_back(&self) {
        self.add(RailCounter::Reconnects, 1);
        self.record().describe(|record| record.set_down(0, ""));
    }

    /// The count so far.
    #[inline]
    pub fn get(&self, counter: RailCounter) -> u64 {
        self.counter(counter).load(Ordering::Relaxed)
    }
}

/// One comm's counters and wait state; `Send`, not `Sync`: owned by the thread that drives the comm.
pub struct CommStats {
    record: NonNull<CommRecord>,
    rails: std::cell::RefCell<Vec<RailStats>>,
    /// Polls that found nothing, of all time; only its remainder matters.
    idle_polls: Cell<u32>,
    /// When the clock was last read during the present wait; 0 while there is none.
    sampled_at: Cell<u64>,
    waiting: Cell<WaitCause>,
    /// What the record says that a rank of a mesh waits in.
    waits_in: Cell<(MeshOp, u64)>,
    /// Since when the owner waits, if it says so; 0: since a poll first found nothing.
    waits_since: Cell<u64>,
    kind: CommKind,
    owned: OwnedCommRecord,
}

// SAFETY: the record is atomics alone, and what keeps it alive may be dropped by any thread.
unsafe impl Send for CommStats {}

/// Takes a record for a comm on the device of that name.
pub fn comm(kind: CommKind, dev_name: &str) -> CommStats {
    let owned = OwnedCommRecord::take(kind, dev_name);
    CommStats {
        record: owned.record(),
        rails: std::cell::RefCell::new(Vec::new()),
        idle_polls: Cell::new(0),
        sampled_at: Cell::new(0),
        waiting: Cell::new(WaitCause::None),
        waits_in: Cell::new((MeshOp::None, 0)),
        waits_since: Cell::new(0),
        kind,
        owned,
    }
}

impl CommStats {
    #[inline]
    fn record(&self) -> &CommRecord {
        // SAFETY: `owned` keeps the record mapped; a record is atomics, which others may read meanwhile.
        unsafe { self.record.as_ref() }
    }

    /// Its number in the page; no other comm of the process has it.
    pub fn id(&self) -> u64 {
        self.owned.id()
    }

    /// The counters of the comm's rail number `index`, the same for the same number. At set-up: it allocates.
    pub fn rail(&self, index: usize) -> RailStats {
        let mut rails = self.rails.borrow_mut();
        while rails.len() <= index {
            let next = rails.len();
            rails.push(RailStats::at(self.owned.rail(next as u32)));
        }
        rails[index].clone()
    }

    /// Names the peer; `pid` 0 where it is not known.
    pub fn set_peer(&self, peer: &str, pid: i32) {
        self.record().describe(|record| record.set_peer(peer, pid));
    }

    /// Of a pair of a mesh: whose it is, and to whom it leads.
    pub fn set_ranks(&self, rank: usize, peer: usize) {
        self.record().describe(|record| record.set_ranks(rank, peer));
    }

    /// Of a channel of tensors: which one its waits are for, of which step, and since when, from now on; or none, and 0.
    #[cold]
    pub fn set_wait_key(&self, key: &str, step: u64, since: u64) {
        self.waits_since.set(since);
        // A sample of a wait in no operation of a mesh leaves the tag as it is.
        self.waits_in.set((MeshOp::None, 0));
        self.record().describe(|record| {
            record.set_wait_key(key);
            record.wait_op.store(MeshOp::None as u32, Ordering::Relaxed);
            record.wait_tag.store(step, Ordering::Relaxed);
            if since != 0 {
                record.wait_since_ns.store(since, Ordering::Relaxed);
            }
        });
    }

    /// Counts. By the thread that drives the comm.
    #[inline]
    pub fn add(&self, counter: CommCounter, n: u64) {
        bump(&self.record().counters[counter as usize], n);
    }

    /// The count so far.
    pub fn get(&self, counter: CommCounter) -> u64 {
        self.record().counters[counter as usize].load(Ordering::Relaxed)
    }

    /// Bytes that the comm's rails have moved in the direction that the comm is for.
    pub fn moved(&self) -> u64 {
        let rails = self.rails.borrow();
        let all = rails.iter().flat_map(|rail| RailCounter::payload(self.kind).map(move |counter| rail.get(counter)));
        all.fold(0, u64::wrapping_add)
    }

    /// Nanoseconds accounted to a cause so far.
    pub fn waited(&self, cause: WaitCause) -> u64 {
        self.record().wait_ns[cause as usize].load(Ordering::Relaxed)
    }

    /// Records why a poll found nothing. Every 64th time it reads the clock, adds the time since the last read to the cause, and publishes the cause and
    /// since when it holds. A shorter wait is not recorded.
    #[inline]
    pub fn wait(&self, cause: WaitCause) {
        let polls = self.idle_polls.get().wrapping_add(1);
        self.idle_polls.set(polls);
        if polls.is_multiple_of(SAMPLE_EVERY) {
            self.sample(cause, clock::now());
        }
    }

    /// What [`CommStats::wait`] does every 64th time, for a caller that counts its idle polls itself.
    #[cold]
    pub fn sample(&self, cause: WaitCause, now: u64) {
        let record = self.record();
        let before = self.sampled_at.replace(now);
        if before != 0 {
            bump(&record.wait_ns[cause as usize], now.saturating_sub(before));
        }
        if self.waiting.replace(cause) != cause {
            let since = self.waits_since.get();
            record.wait_since_ns.store(if since == 0 { now } else { since }, Ordering::Relaxed);
            record.wait_cause.store(cause as u32, Ordering::Relaxed);
        }
    }

    /// The same for a rank of a mesh, with what it waits in.
    #[cold]
    pub fn sample_in(&self, wait: Wait, now: u64) {
        if self.waits_in.replace((wait.op, wait.tag)) != (wait.op, wait.tag) {
            self.record().describe(|record| {
                record.wait_op.store(wait.op as u32, Ordering::Relaxed);
                record.wait_tag.store(wait.tag, Ordering::Relaxed);
            });
        }
        self.sample(wait.cause, now);
    }

    /// For how long the present wait has gone on, if there is one.
    pub fn wait_age(&self, now: u64) -> Option<u64> {
        let since = self.record().wait_since_ns.load(Ordering::Relaxed);
        (self.waiting.get() != WaitCause::None).then(|| now.saturating_sub(since))
    }

    /// Ends a wait, for a caller that slept meanwhile: the time since the last sample is its cause's.
    #[cold]
    pub fn end_wait(&self, now: u64) {
        if self.waiting.get() != WaitCause::None {
            self.sample(self.waiting.get(), now);
        }
        self.clear_wait();
    }

    /// Ends a wait: a poll found something.
    #[inline]
    pub fn clear_wait(&self) {
        if self.sampled_at.get() != 0 {
            self.sampled_at.set(0);
            self.waiting.set(WaitCause::None);
            self.record().wait_cause.store(WaitCause::None as u32, Ordering::Relaxed);
        }
    }
}

/// A load and a store, not one atomic instruction: there is one writer at a time.
#[inline]
fn bump(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

const _: () = assert!(RailCounter::Failures as usize + 1 == RailCounter::ALL.len() && RailCounter::ALL.len() <= COUNTERS);

#[cfg(test)]
mod tests;
