//! A mesh: the pairs of one rank, and whoever waits for them. Any number of threads; all state is under one lock.
//!
//! The first thread that waits drives the mesh for all: it polls every pair for a little while, then arms them, polls once more, and sleeps on the
//! device's descriptor. Others sleep until it has moved something or stops. Who asks for something while the driver sleeps wakes it.
//!
//! A rank that is lost is an error for what waits for it, and that poisons the mesh: all that waits, and all that is asked for later, fails with the first
//! cause. So does a wait that takes too long, as what it waited for cannot be taken back.

use std::future::Future;
use std::os::fd::RawFd;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::base::mem::UserMemory;
use crate::base::sync::lock;
use crate::base::wakeup::Wakeup;
use crate::link::Failure;

use super::device::{Device, Registered};
use super::ops::{OpId, OpState, Ops};
use super::pair::{Pair, Part, Place};

/// Polls that find nothing, with others allowed to run in between, before the driver sleeps.
const YIELDS: u32 = 40;
/// A sleep ends after so long, to look whether the peers are there. Not in tests, where it would hide a wake-up that is lost.
const LOOK: Duration = Duration::from_secs(if cfg!(test) { 3600 } else { 1 });

/// Pieces of scratch memory that are kept.
const POOL: usize = 8;

/// One rank's end of a mesh.
pub struct Mesh {
    pub(super) device: Arc<Device>,
    rank: usize,
    size: usize,
    core: Mutex<Core>,
    /// The driver has moved something, or stops.
    moved: Condvar,
    /// Counts, under the lock, what may have finished an operation: who waits compares it with what it was before they looked at theirs.
    moves: AtomicU64,
    wakeup: Wakeup,
    scratch: Mutex<Vec<Registered>>,
}

/// What is under the lock.
struct Core {
    /// By rank; none for this one, and for those that are not connected.
    pairs: Vec<Option<Peer>>,
    ops: Ops,
    failed: Option<Failure>,
    /// A thread drives the mesh, and whether it sleeps.
    driven: bool,
    asleep: bool,
}

/// A rank, or why it is lost.
enum Peer {
    Here(Box<Pair>),
    Lost(Failure),
}

impl Core {
    /// Polls all pairs; whether something has moved.
    fn poll(&mut self) -> bool {
        let Core { pairs, ops, failed, .. } = self;
        let mut moved = false;
        for (rank, place) in pairs.iter_mut().enumerate() {
            let Some(Peer::Here(pair)) = place else { continue };
            match pair.poll(ops) {
                Ok(some) => moved |= some,
                Err(error) => {
                    moved = true;
                    let failure = Failure::from_error(&named(rank, error));
                    let waits = |state| matches!(state, OpState::Pending { rank: of, .. } if of == rank);
                    if failed.is_none() && ops.pending().any(waits) {
                        *failed = Some(failure.clone());
                    }
                    *place = Some(Peer::Lost(failure));
                }
            }
        }
        moved
    }

    /// Arms all pairs; whether one cannot be.
    fn arm(&mut self, fds: &mut Vec<RawFd>) -> bool {
        let mut add = |fd| {
            if !fds.contains(&fd) {
                fds.push(fd);
            }
        };
        let mut failed = false;
        for peer in self.pairs.iter_mut().flatten() {
            if let Peer::Here(pair) = peer {
                failed |= pair.arm(&mut add).is_err();
            }
        }
        failed
    }

    /// Whether they have to be polled again before anybody sleeps.
    fn needs_repoll(&mut self) -> bool {
        let again = |peer: &mut Peer| match peer {
            Peer::Here(pair) => pair.needs_repoll(),
            Peer::Lost(_) => false,
        };
        self.pairs.iter_mut().flatten().any(again)
    }

    fn check(&self) -> Result<()> {
        self.failed.as_ref().map_or(Ok(()), |failure| Err(failure.error()))
    }

    fn pair(&mut self, rank: usize) -> Result<&mut Pair> {
        let size = self.pairs.len();
        match self.pairs.get_mut(rank) {
            Some(Some(Peer::Here(pair))) => Ok(pair),
            Some(Some(Peer::Lost(failure))) => Err(failure.error()),
            Some(None) => Err(Error::usage(format!("rank {rank} is not connected, or is this rank"))),
            None => Err(Error::usage(format!("there is no rank {rank}; there are 0 to {}", size.saturating_sub(1)))),
        }
    }

    /// What a wait that is over waited for.
    fn waits_for(&self) -> String {
        let waits: Vec<String> = self
            .ops
            .pending()
            .filter_map(|state| match state {
                OpState::Pending { rank, receives, tag } => {
                    let what = if receives { "a message from" } else { "a receive of" };
                    Some(format!("{what} rank {rank} (tag {tag:#x})"))
                }
                OpState::Done { .. } => None,
            })
            .take(4)
            .collect();
        if waits.is_empty() { "nothing".into() } else { waits.join(", ") }
    }
}

impl Mesh {
    /// Of these pairs, by rank.
    pub(super) fn new(device: Arc<Device>, rank: usize, pairs: Vec<Option<Pair>>) -> Result<Mesh> {
        let size = pairs.len();
        let pairs = pairs.into_iter().map(|pair| pair.map(|pair| Peer::Here(Box::new(pair)))).collect();
        let core = Core { pairs, ops: Ops::default(), failed: None, driven: false, asleep: false };
        Ok(Mesh {
            device,
            rank,
            size,
            core: Mutex::new(core),
            moved: Condvar::new(),
            moves: AtomicU64::new(0),
            wakeup: Wakeup::new()?,
            scratch: Mutex::default(),
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Sends to a rank, as soon as that receives with the same tag. The memory must stay registered until it is done.
    ///
    /// Errors: no such rank; one that is lost; a mesh that has failed.
    pub(super) fn send(&self, rank: usize, tag: u64, part: Part) -> Result<Operation<'_>> {
        self.start(OpState::Pending { rank, receives: false, tag }, |core, id| {
            core.pair(rank)?.send(id, tag, part).map_err(|error| named(rank, error))
        })
    }

    /// Receives from a rank what it sends with the same tag.
    ///
    /// Errors: as for [`Mesh::send`].
    pub(super) fn recv(&self, rank: usize, tag: u64, place: Place) -> Result<Operation<'_>> {
        self.start(OpState::Pending { rank, receives: true, tag }, |core, id| {
            core.pair(rank)?.recv(id, tag, place).map_err(|error| named(rank, error))
        })
    }

    fn start(&self, state: OpState, post: impl FnOnce(&mut Core, OpId) -> Result<()>) -> Result<Operation<'_>> {
        let mut core = lock(&self.core);
        core.check()?;
        let id = core.ops.insert(state);
        if let Err(error) = post(&mut core, id) {
            core.ops.forget(id);
            return Err(error);
        }
        if core.asleep {
            self.wakeup.notify();
        }
        Ok(Operation { mesh: self, id, over: false })
    }

    /// Memory of at least `len` bytes that peers may write to.
    pub(super) fn scratch(&self, len: usize) -> Result<Borrowed<'_>> {
        let found = {
            let mut pool = lock(&self.scratch);
            let fits = pool.iter().enumerate().filter(|(_, scratch)| scratch.len() >= len);
            let least = fits.min_by_key(|(_, scratch)| scratch.len()).map(|(at, _)| at);
            least.map(|at| pool.swap_remove(at))
        };
        let scratch = found.map_or_else(|| self.device.scratch(len), Ok).inspect_err(|error| self.poison(error))?;
        Ok(Borrowed { mesh: self, scratch })
    }

    /// Waits for a future over this mesh's operations, for so long at most.
    ///
    /// Errors: the future's; a wait that took too long. The mesh has failed then.
    pub(super) fn block_on<T>(&self, what: &str, future: impl Future<Output = Result<T>>, timeout: Duration) -> Result<T> {
        let mut future = pin!(future);
        // Dropped before the future: if that panics, what it has asked for is still under way.
        let guard = PoisonOnDrop(self);
        let mut context = Context::from_waker(Waker::noop());
        let began = clock::now();
        let deadline = began.saturating_add(timeout.as_nanos().try_into().unwrap_or(u64::MAX));
        let mut stalled_at = match self.device.config.stall_warn_s.nanos() {
            0 => u64::MAX,
            limit => began.saturating_add(limit),
        };
        loop {
            // Pairs with the Release in `drive`: what finishes after the look below is not missed.
            let seen = self.moves.load(Ordering::Acquire);
            // Before the look, which is the last one then.
            let now = clock::now();
            if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
                std::mem::forget(guard);
                return result.inspect_err(|error| self.poison(error));
            }
            if now >= deadline {
                self.poison(&Error::timeout(self.waited(what, timeout)));
            } else if now >= stalled_at {
                stalled_at = u64::MAX;
                log_warn!(log::NET, "stalled: {}", self.waited(what, Duration::from_nanos(now - began)));
            }
            self.step(seen, deadline.min(stalled_at));
        }
    }

    /// What a wait that took so long waits for.
    fn waited(&self, what: &str, time: Duration) -> String {
        let waits_for = lock(&self.core).waits_for();
        format!("{what}: rank {} waited for {:.1} s for {waits_for}", self.rank, time.as_secs_f64())
    }

    /// Registers memory for a collective.
    ///
    /// Errors: it cannot be registered. The mesh has failed then, as the other ranks begin without this one.
    pub(super) fn register(&self, memory: UserMemory) -> Result<Registered> {
        self.device.register(memory).inspect_err(|error| self.poison(error))
    }

    /// The same for memory that is only read.
    pub(super) fn register_input(&self, memory: UserMemory) -> Result<Registered> {
        self.device.register_input(memory).inspect_err(|error| self.poison(error))
    }

    /// Fails the mesh, unless it has failed.
    fn poison(&self, error: &Error) {
        let mut core = lock(&self.core);
        if core.failed.is_none() {
            log_warn!(log::NET, "mesh: {error}");
            core.failed = Some(Failure::from_error(error));
            self.moves.fetch_add(1, Ordering::Release);
            self.moved.notify_all();
            self.wakeup.notify();
        }
    }

    /// Waits until something has moved that had not when `moves` was `seen`, or until then.
    pub(super) fn step(&self, seen: u64, until: u64) {
        let left = || Duration::from_nanos(until.saturating_sub(clock::now())).min(LOOK);
        let mut core = lock(&self.core);
        if self.moves.load(Ordering::Relaxed) != seen || core.failed.is_some() {
            return;
        }
        if core.driven {
            drop(self.moved.wait_timeout(core, left()).unwrap_or_else(PoisonError::into_inner));
            return;
        }
        core.driven = true;
        drop(core);
        let _driving = Driving(self);
        for _ in 0..YIELDS {
            if self.drive(&mut lock(&self.core)) {
                return;
            }
            // Whoever asks for something gets the lock meanwhile.
            std::thread::yield_now();
        }
        let mut fds = Vec::new();
        let mut core = lock(&self.core);
        let again = core.arm(&mut fds);
        if self.drive(&mut core) || again || core.needs_repoll() {
            return;
        }
        core.asleep = true;
        drop(core);
        self.wakeup.wait(&fds, Some(left()));
    }

    /// Polls, unless the mesh has failed; whether there is something new.
    fn drive(&self, core: &mut Core) -> bool {
        let moved = core.failed.is_some() || core.poll();
        if moved {
            // Pairs with the Acquire in `block_on`.
            self.moves.fetch_add(1, Ordering::Release);
        }
        moved
    }

    /// Whether all pairs are connected.
    ///
    /// Errors: one cannot be.
    pub(super) fn poll_connected(&self) -> Result<bool> {
        let mut core = lock(&self.core);
        let mut all = true;
        for (rank, peer) in core.pairs.iter_mut().enumerate() {
            match peer {
                Some(Peer::Here(pair)) => all &= pair.poll_connected().map_err(|error| named(rank, error))?,
                Some(Peer::Lost(failure)) => return Err(failure.error()),
                None => {}
            }
        }
        Ok(all)
    }
}

fn named(rank: usize, error: Error) -> Error {
    error.within(&format!("rank {rank}"))
}

/// The driver, until it is dropped.
struct Driving<'a>(&'a Mesh);

impl Drop for Driving<'_> {
    fn drop(&mut self) {
        let mut core = lock(&self.0.core);
        (core.driven, core.asleep) = (false, false);
        drop(core);
        self.0.moved.notify_all();
    }
}

/// Fails the mesh if a collective panics.
struct PoisonOnDrop<'a>(&'a Mesh);

impl Drop for PoisonOnDrop<'_> {
    fn drop(&mut self) {
        self.0.poison(&Error::internal("a collective has panicked"));
    }
}

#[cfg(test)]
impl Mesh {
    /// What a wait would compare.
    pub(super) fn moves(&self) -> u64 {
        self.moves.load(Ordering::Acquire)
    }

    /// Operations that are not done.
    pub(super) fn pending(&self) -> usize {
        lock(&self.core).ops.pending().count()
    }
}

/// A send or a receive; waited for like any future. Its result is the bytes of the message.
pub(super) struct Operation<'a> {
    mesh: &'a Mesh,
    id: OpId,
    over: bool,
}

impl Future for Operation<'_> {
    type Output = Result<u64>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Result<u64>> {
        let mut core = lock(&self.mesh.core);
        let done = match core.ops.take(self.id) {
            Some((_, len)) => Ok(len),
            None => match core.check() {
                Ok(()) => return Poll::Pending,
                Err(error) => Err(error),
            },
        };
        drop(core);
        self.over = done.is_ok();
        Poll::Ready(done)
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        if !self.over {
            lock(&self.mesh.core).ops.forget(self.id);
        }
    }
}

/// Scratch memory. Dropped, it is given up, as a peer may still write to it.
pub(super) struct Borrowed<'a> {
    mesh: &'a Mesh,
    scratch: Registered,
}

impl std::ops::Deref for Borrowed<'_> {
    type Target = Registered;

    fn deref(&self) -> &Registered {
        &self.scratch
    }
}

impl Borrowed<'_> {
    /// Nobody writes to it any more: others may use it.
    pub fn give_back(self) {
        let mut pool = lock(&self.mesh.scratch);
        if pool.len() < POOL {
            pool.push(self.scratch);
        }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        for peer in lock(&self.core).pairs.iter_mut().flatten() {
            if let Peer::Here(pair) = peer {
                pair.say_bye();
            }
        }
    }
}
