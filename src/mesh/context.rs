//! A mesh: the pairs of one rank, and whoever waits for them. Any number of threads; all state is under the lock of a [`Driver`].
//!
//! A rank that is lost is an error for what waits for it, and that poisons the mesh: all that waits, and all that is asked for later, fails with the first
//! cause. So does a wait that takes too long, as what it waited for cannot be taken back.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Poll, Waker};
use std::time::Duration;

use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::base::mem::UserMemory;
use crate::base::sync::lock;
use crate::engine::{self, DumpGuard};
use crate::link::Failure;
use crate::link::driver::Driver;

use super::core::Core;
use super::device::{Destination, Device, Part, Registered};
use super::ops::{Asked, OpId, Outcome, Waiter};
use super::protocol::Tag;
use super::protocol::{MAX_SMALL, Small};
use super::running::Running;

/// How long a mesh that is closed waits for the last that its ranks were sent to be through.
const FAREWELL_NS: u64 = 100_000_000;
/// The same for one that gives up because a rank is lost: others may read this rank's memory, and are to learn of the lost rank before it goes.
const BAD_NEWS_NS: u64 = 1_000_000_000;

/// Pieces of scratch memory that are kept.
pub(super) const POOL: usize = 8;
/// Long ones have a multiple of so many bytes, short ones a power of two.
const SCRATCH: usize = 1 << 20;

/// One rank's end of a mesh, as its parts have it: whoever drives it, and its buffers.
pub struct Context {
    pub(super) device: Arc<Device>,
    rank: usize,
    size: usize,
    pub(super) driver: Arc<Driver<Core>>,
    pub(super) connecting: AtomicBool,
    /// How often ranks have tried to connect and could not: what is left of an attempt is no matter to the next one. Changes under the lock.
    pub(super) attempts: AtomicU64,
    /// Collectives.
    pub(super) running: Running,
    scratch: Mutex<Vec<Arc<Registered>>>,
    /// Scratch memory of collectives that have failed, and the mesh with them. Others may read from it and write to it until it is closed.
    given_up: Mutex<Vec<Arc<Registered>>>,
}

impl Context {
    /// This rank's end of a mesh of `size` ranks, none of which is connected yet.
    ///
    /// Errors: a rank that is not below the size; no descriptor left.
    pub fn new(device: Arc<Device>, rank: usize, size: usize) -> Result<Context> {
        if rank >= size {
            return Err(Error::usage(format!("rank {rank} of {size}; ranks are 0 to {}", size.saturating_sub(1))));
        }
        Ok(Context {
            device,
            rank,
            size,
            driver: Arc::new(Driver::new(Core::new(rank, size))?),
            connecting: AtomicBool::new(false),
            attempts: AtomicU64::new(0),
            running: Running::default(),
            scratch: Mutex::default(),
            given_up: Mutex::default(),
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

    /// Whether who waits polls without end instead of sleeping: less delay, and a core that does nothing else.
    pub fn set_sync(&self, busy: bool) {
        self.driver.set_busy(busy);
    }

    /// Errors: it has failed, or is closed.
    pub(super) fn check(&self) -> Result<()> {
        self.driver.lock().check()
    }

    /// Sends to a rank, as soon as that receives with the same tag. The memory must stay registered until it is done.
    ///
    /// Errors: no such rank; one that is lost; a mesh that has failed.
    pub(super) fn send(&self, rank: usize, tag: u64, part: Part) -> Result<Operation<'_>> {
        let id = self.with(|core| core.send(rank, Tag::Collective(tag), part))?;
        Ok(Operation { mesh: self, id, to: None, over: false })
    }

    /// Receives from a rank what it sends with the same tag.
    ///
    /// Errors: as for [`Context::send`].
    pub(super) fn recv<'a>(&'a self, rank: usize, tag: u64, to: Destination<'a>) -> Result<Operation<'a>> {
        let id = self.with(|core| core.recv(&[rank], Tag::Collective(tag), to.place))?;
        Ok(Operation { mesh: self, id, to: Some(to), over: false })
    }

    /// Notes an operation and has it posted.
    pub(super) fn start(&self, asked: Asked, post: impl FnOnce(&mut Core, OpId) -> Result<()>) -> Result<OpId> {
        self.with(|core| core.start(asked, post))
    }

    /// Does something with the pairs, of which whoever drives them has to know.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut Core) -> T) -> T {
        self.driver.with(|core| {
            let result = f(core);
            core.count();
            result
        })
    }

    /// Memory of at least `len` bytes that peers may write to.
    ///
    /// Errors: as for [`Context::check`]; it cannot be had, and the mesh has failed then.
    pub(super) fn scratch(&self, len: usize) -> Result<Borrowed<'_>> {
        self.check()?;
        // Few lengths, so that most of it is used again.
        let rounded = if len <= SCRATCH { len.next_power_of_two() } else { len.next_multiple_of(SCRATCH) };
        let found = {
            let mut pool = lock(&self.scratch);
            match pool.pop_if(|last| last.len() == rounded) {
                None => {
                    let fits = pool.iter().enumerate().filter(|(_, scratch)| scratch.len() >= len);
                    let least = fits.min_by_key(|(_, scratch)| scratch.len()).map(|(at, _)| at);
                    least.map(|at| pool.swap_remove(at))
                }
                last => last,
            }
        };
        let scratch =
            found.map_or_else(|| self.device.shared_scratch(rounded).map(Arc::new), Ok).inspect_err(|error| self.poison(error))?;
        Ok(Borrowed { mesh: self, scratch, is_back: false })
    }

    /// Waits for a future over this mesh's operations, for so long at most.
    ///
    /// Errors: the future's; a wait that took too long. The mesh has failed then.
    pub(super) fn block_on<'w, T>(
        &self,
        waiter: impl Into<Waiter<'w>>,
        future: impl Future<Output = Result<T>>,
        timeout: Duration,
    ) -> Result<T> {
        let waiter = waiter.into();
        let attempt = self.attempts.load(Ordering::Relaxed);
        let mut future = pin!(future);
        // Dropped before the future: if that panics, what it has asked for is still under way.
        let guard = PoisonOnDrop(self);
        let mut context = std::task::Context::from_waker(Waker::noop());
        // Short ones are often done without a wait.
        let result = match future.as_mut().poll(&mut context) {
            Poll::Ready(result) => result,
            Poll::Pending => self.wait(waiter, attempt, timeout, || future.as_mut().poll(&mut context)),
        };
        std::mem::forget(guard);
        result.inspect_err(|error| self.give_up_in(attempt, error))
    }

    /// Waits until what is polled is ready, for so long at most: the mesh has failed then.
    fn wait<T>(&self, waiter: Waiter<'_>, attempt: u64, timeout: Duration, mut poll: impl FnMut() -> Poll<Result<T>>) -> Result<T> {
        let began = clock::now();
        let deadline = began.saturating_add(timeout.as_nanos().try_into().unwrap_or(u64::MAX));
        let mut stalled_at = match self.device.config.stall_warn_s.nanos() {
            0 => u64::MAX,
            limit => began.saturating_add(limit),
        };
        self.driver.wait(|locked| {
            // What is polled takes the lock.
            drop(locked.take());
            if let Poll::Ready(result) = poll() {
                return Ok(result);
            }
            let now = clock::now();
            if now >= deadline {
                // What has come since, in time, counts.
                if let Poll::Ready(result) = poll() {
                    return Ok(result);
                }
                let error = Error::timeout(self.waited(waiter, timeout));
                if !self.poison_in(attempt, &error) {
                    // The mesh goes on.
                    return Ok(Err(error));
                }
            } else if now >= stalled_at {
                stalled_at = u64::MAX;
                self.driver.lock().count_stalls(waiter);
                log_warn!(log::NET, "stalled: {}", self.waited(waiter, Duration::from_nanos(now - began)));
            }
            Err(deadline.min(stalled_at))
        })
    }

    /// What a wait that took so long waits for.
    fn waited(&self, waiter: Waiter<'_>, time: Duration) -> String {
        let waits_for = self.driver.lock().waits_for(waiter);
        format!("{waiter}: rank {} waited for {:.1} s for {waits_for}", self.rank, time.as_secs_f64())
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

    /// The same as `register`, for a collective whose messages are all of this memory. It takes longer to register a few bytes than to send them.
    pub(super) fn register_whole(&self, memory: UserMemory) -> Result<Registered> {
        if memory.len() <= MAX_SMALL { Ok(self.device.hold(memory)) } else { self.register(memory) }
    }

    /// Fails the mesh, unless it has failed. Others may wait for this rank, which has come to an end: they are told.
    pub(super) fn poison(&self, error: &Error) {
        self.poison_in(self.attempts.load(Ordering::Relaxed), error);
    }

    /// The same, and returns once the others have heard.
    pub(super) fn give_up(&self, error: &Error) {
        self.give_up_in(self.attempts.load(Ordering::Relaxed), error);
    }

    fn give_up_in(&self, attempt: u64, error: &Error) {
        if self.poison_in(attempt, error) {
            self.wait_until_heard();
        } else {
            self.drop_given_up();
        }
    }

    /// A rank that is stopped while it writes to such memory holds up who deregisters it.
    fn drop_given_up(&self) {
        let given_up = std::mem::take(&mut *lock(&self.given_up));
        drop(given_up);
    }

    /// As [`Context::poison`], unless the ranks connect anew since that attempt: whether they do not.
    fn poison_in(&self, attempt: u64, error: &Error) -> bool {
        let (current, first) = self.with(|core| {
            let current = attempt == self.attempts.load(Ordering::Relaxed);
            let first = core.failed.is_none() && current;
            if first {
                core.failed = Some(Failure::from_error(error));
                core.send_byes();
            }
            (current, first)
        });
        if first {
            log_warn!(log::NET, "mesh: {error}");
            self.wake();
        }
        current
    }

    /// Has all that wait look again.
    pub(super) fn wake(&self) {
        self.driver.wake();
    }

    /// Ends it: all that is outstanding fails, and so does what is asked for later. Ranks that wait for this one learn that it has gone.
    pub fn close(&self) {
        let closed = Failure::from_error(&Error::usage("this rank has closed the mesh"));
        let first = self.with(|core| {
            core.failed.get_or_insert(closed);
            core.send_byes();
            !std::mem::replace(&mut core.closed, true)
        });
        self.driver.leave();
        if first {
            self.send_byes(FAREWELL_NS);
        }
        self.drop_given_up();
    }

    /// If the mesh has failed: returns once the others have heard, or when there was time for that. They may read memory of this rank's until then.
    pub(super) fn wait_until_heard(&self) {
        let (failed, lost) = {
            let core = self.driver.lock();
            (core.check().is_err(), core.has_lost())
        };
        if failed {
            self.send_byes(if lost { BAD_NEWS_NS } else { FAREWELL_NS });
        }
    }

    /// Waits, for so long at most, until the ranks have all that they were sent, and know that this one has come to an end: what was sent in its last
    /// moments is theirs, and is read from this rank's memory or sent by its queue pairs.
    pub(super) fn send_byes(&self, time: u64) {
        let until = clock::now() + time;
        let through = |core: &mut Core| {
            // Some had no room for it.
            core.send_byes();
            let is_over = core.byes_are_through();
            core.unheard |= !is_over && clock::now() >= until;
            is_over || core.unheard
        };
        while !self.with(through) {
            std::thread::yield_now();
        }
    }
}

/// Fails the mesh if a collective panics.
struct PoisonOnDrop<'a>(&'a Context);

impl Drop for PoisonOnDrop<'_> {
    fn drop(&mut self) {
        self.0.poison(&Error::internal("a collective has panicked"));
    }
}

#[cfg(test)]
impl Context {
    /// Operations that are not done.
    pub(super) fn pending(&self) -> usize {
        self.driver.lock().ops.pending().count()
    }
}

/// A send or a receive; waited for like any future. Its result is the message, if it is a small one.
pub(super) struct Operation<'a> {
    mesh: &'a Context,
    id: OpId,
    /// Where the bytes of a small message go.
    to: Option<Destination<'a>>,
    over: bool,
}

impl Future for Operation<'_> {
    type Output = Result<Option<Small>>;

    fn poll(mut self: Pin<&mut Self>, _: &mut std::task::Context<'_>) -> Poll<Result<Option<Small>>> {
        let mut core = self.mesh.driver.lock();
        let done = match core.ops.take(self.id) {
            Some(Outcome::Done { small, .. }) => {
                if let (Some(to), Some(small)) = (&self.to, &small) {
                    to.write(small);
                }
                Ok(small)
            }
            Some(Outcome::Failed(failure)) => Err(failure.error()),
            Some(Outcome::Cancelled) => Err(Error::internal("an operation was taken back that is waited for")),
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
            self.mesh.driver.lock().ops.forget(self.id);
        }
    }
}

/// Scratch memory. Dropped, it is given up, as a peer may still write to it, and stays for a while, as one may still read it.
pub(super) struct Borrowed<'a> {
    mesh: &'a Context,
    scratch: Arc<Registered>,
    is_back: bool,
}

impl std::ops::Deref for Borrowed<'_> {
    type Target = Registered;

    fn deref(&self) -> &Registered {
        &self.scratch
    }
}

impl Borrowed<'_> {
    /// Nobody writes to it any more: others may use it.
    pub fn give_back(mut self) {
        self.is_back = true;
        let mut pool = lock(&self.mesh.scratch);
        pool.push(self.scratch.clone());
        if pool.len() > POOL
            && let Some((shortest, _)) = pool.iter().enumerate().min_by_key(|(_, scratch)| scratch.len())
        {
            let _ = pool.swap_remove(shortest);
        }
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        if !self.is_back {
            lock(&self.mesh.given_up).push(self.scratch.clone());
        }
    }
}

/// One rank's end of a mesh. It is closed when it is dropped, whatever buffers there are.
pub struct Mesh {
    context: Arc<Context>,
    _dumped: Option<DumpGuard>,
}

impl Mesh {
    /// This rank's end of a mesh of `size` ranks, none of which is connected yet.
    ///
    /// Errors: a rank that is not below the size; no descriptor left.
    pub fn new(device: Arc<Device>, rank: usize, size: usize) -> Result<Mesh> {
        Ok(Mesh::of(Context::new(device, rank, size)?))
    }

    fn of(context: Context) -> Mesh {
        let context = Arc::new(context);
        let dumped = context.device.config.dump_signal.number().map(|signal| engine::dump_on_signal(signal, context.clone()));
        let guard = dumped.and_then(|dumped| dumped.inspect_err(|error| log_warn!(log::NET, "mesh: no dump on a signal: {error}")).ok());
        Mesh { context, _dumped: guard }
    }

    /// What its buffers keep of it. From the first of them on, what comes is seen to while nobody waits.
    pub(super) fn attended(&self) -> Arc<Context> {
        self.context.driver.attend("rh-mesh");
        self.context.clone()
    }
}

impl std::ops::Deref for Mesh {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.context
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.close();
    }
}
