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
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::base::sync::lock;
use crate::base::wakeup::Wakeup;
use crate::link::Failure;

use super::device::{Device, Registered};
use super::ops::{OpId, OpState, Ops};
use super::pair::{Pair, Part, Place};

/// Polls that find nothing, with others allowed to run in between, before the driver sleeps.
const YIELDS: u32 = 40;
/// A sleep ends after so long, to look whether the peers are there.
const LOOK: Duration = Duration::from_secs(1);

/// One rank's end of a mesh.
pub struct Mesh {
    pub(super) device: Arc<Device>,
    rank: usize,
    size: usize,
    core: Mutex<Core>,
    /// The driver has moved something, or stops.
    moved: Condvar,
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
                    let failure = Failure::from_error(&error.within(&format!("rank {rank}")));
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

    /// Arms all pairs; whether they have to be polled before anybody sleeps.
    fn arm(&mut self, fds: &mut Vec<RawFd>) -> bool {
        fds.clear();
        let mut add = |fd| {
            if !fds.contains(&fd) {
                fds.push(fd);
            }
        };
        let mut all = true;
        for peer in self.pairs.iter_mut().flatten() {
            if let Peer::Here(pair) = peer {
                all &= pair.arm(&mut add).is_ok();
            }
        }
        let moved = self.poll();
        let again = |peer: &mut Peer| match peer {
            Peer::Here(pair) => pair.needs_repoll(),
            Peer::Lost(_) => false,
        };
        moved || !all || self.pairs.iter_mut().flatten().any(again)
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
        Ok(Mesh { device, rank, size, core: Mutex::new(core), moved: Condvar::new(), wakeup: Wakeup::new()?, scratch: Mutex::default() })
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
        self.start(OpState::Pending { rank, receives: false, tag }, |core, id| core.pair(rank)?.send(id, tag, part))
    }

    /// Receives from a rank what it sends with the same tag.
    ///
    /// Errors: as for [`Mesh::send`].
    pub(super) fn recv(&self, rank: usize, tag: u64, place: Place) -> Result<Operation<'_>> {
        self.start(OpState::Pending { rank, receives: true, tag }, |core, id| core.pair(rank)?.recv(id, tag, place))
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

    /// Memory of at least `len` bytes that peers may write to, until it is given back.
    pub(super) fn scratch(&self, len: usize) -> Result<Borrowed<'_>> {
        let found = {
            let mut pool = lock(&self.scratch);
            let at = pool.iter().position(|scratch| scratch.len() >= len);
            at.map(|at| pool.swap_remove(at))
        };
        let scratch = found.map_or_else(|| self.device.scratch(len.next_power_of_two()), Ok)?;
        Ok(Borrowed { mesh: self, scratch: Some(scratch) })
    }

    /// Waits for a future over this mesh's operations, for so long at most.
    ///
    /// Errors: the future's; a wait that took too long, and then the mesh has failed.
    pub(super) fn block_on<T>(&self, what: &str, future: impl Future<Output = Result<T>>, timeout: Duration) -> Result<T> {
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        let deadline = clock::now().saturating_add(timeout.as_nanos().try_into().unwrap_or(u64::MAX));
        loop {
            if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
                return result.inspect_err(|error| self.poison(error));
            }
            if !self.progress(deadline) {
                let text = {
                    let core = lock(&self.core);
                    format!("{what}: rank {} waited for {:.1} s for {}", self.rank, timeout.as_secs_f64(), core.waits_for())
                };
                self.poison(&Error::timeout(text));
            }
        }
    }

    /// Fails the mesh, unless it has failed.
    fn poison(&self, error: &Error) {
        let mut core = lock(&self.core);
        if core.failed.is_none() {
            log_warn!(log::NET, "mesh: {error}");
            core.failed = Some(Failure::from_error(error));
            self.moved.notify_all();
            self.wakeup.notify();
        }
    }

    /// Waits until something has moved. False: not before the deadline.
    fn progress(&self, deadline: u64) -> bool {
        let left = || Duration::from_nanos(deadline.saturating_sub(clock::now()));
        let mut core = lock(&self.core);
        if core.driven {
            let (core, _) = self.moved.wait_timeout(core, left().min(LOOK)).unwrap_or_else(PoisonError::into_inner);
            drop(core);
            return !left().is_zero();
        }
        core.driven = true;
        let mut moved = false;
        for _ in 0..YIELDS {
            moved = core.poll() || core.failed.is_some();
            if moved {
                break;
            }
            // Whoever asks for something gets the lock meanwhile.
            drop(core);
            std::thread::yield_now();
            core = lock(&self.core);
        }
        let mut fds = Vec::new();
        if !moved && !core.arm(&mut fds) {
            core.asleep = true;
            drop(core);
            self.wakeup.wait(&fds, Some(left().min(LOOK)));
            core = lock(&self.core);
            core.asleep = false;
        }
        core.driven = false;
        drop(core);
        self.moved.notify_all();
        !left().is_zero()
    }

    /// Whether all pairs are connected.
    ///
    /// Errors: one cannot be.
    pub(super) fn poll_connected(&self) -> Result<bool> {
        let mut core = lock(&self.core);
        let mut all = true;
        for (rank, peer) in core.pairs.iter_mut().enumerate() {
            match peer {
                Some(Peer::Here(pair)) => all &= pair.poll_connected().map_err(|error| error.within(&format!("rank {rank}")))?,
                Some(Peer::Lost(failure)) => return Err(failure.error()),
                None => {}
            }
        }
        Ok(all)
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

/// Scratch memory, given back when dropped, unless the mesh has failed: then a peer may still write to it.
pub(super) struct Borrowed<'a> {
    mesh: &'a Mesh,
    scratch: Option<Registered>,
}

impl Borrowed<'_> {
    /// It.
    ///
    /// Errors: none.
    pub fn get(&self) -> Result<&Registered> {
        self.scratch.as_ref().ok_or_else(|| Error::internal("no scratch memory"))
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        if lock(&self.mesh.core).failed.is_none() {
            lock(&self.mesh.scratch).extend(self.scratch.take());
        }
    }
}
