//! The progress thread: steps operations, connector by connector in a circle, until each is done.
//!
//! This is NCCL's proxy thread (2.7, src/proxy.cc) for any kind of operation: what an operation is, and how it makes progress, is up to the client
//! ([`Work`]). Clients append operations on any thread and start them; only the engine's thread steps them. One other thread moves data, that of
//! `link::background`.
//!
//! A step takes no lock and allocates nothing: the thread keeps the lock of its own state (`scheduler`) until the `submit_queue` is notified, which
//! it checks with one relaxed load per step. The order of operations is a pure data structure (`list`).

mod connectors;
mod dump;
mod dump_signal;
mod list;
mod scheduler;
mod submit_queue;
#[cfg(test)]
mod tests;
mod types;

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

use crate::base::error::{Error, Result as BaseResult};
use crate::base::log::{self, log_warn};
use crate::base::sync::lock;
use crate::base::thread;
use crate::base::{clock, fork};
use connectors::Connectors;
pub use connectors::{ConnectorId, MAX_CONNECTORS};
pub use dump::{Dump, OpView};
pub use dump_signal::{DumpGuard, DumpSource, watch as dump_on_signal};
use scheduler::{Counts, Pause, Scheduler};
pub use submit_queue::Sleeper;
use submit_queue::{Commands, Rejected, SubmitQueue};
pub use types::{Cause, Counters, Fatal, Options, Refusal, State, Step};

/// What one step of an operation did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// There was nothing to do. A lap of nothing but this counts as idle.
    Idle,
    /// Something moved.
    Moved,
    /// The operation is complete, and not stepped again.
    Done,
}

/// What the thread does when nothing has moved for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdleAction {
    /// It goes on stepping: there is something to do after all.
    Poll,
    /// It sleeps for so long at most.
    SleepFor(Duration),
    /// It sleeps until it is woken.
    SleepUntilWoken,
}

/// The client of an engine: what its operations are, and how to step them. Called by the thread that steps the engine, one call at a time.
pub trait Work: Send + 'static {
    /// An operation with all of its state. Kept by value: a few hundred bytes at most.
    type Op: Send + 'static;
    /// Why an operation failed. Any failure ends the engine.
    type Error: fmt::Display + Send + Sync + 'static;

    /// Makes what progress is possible on `op`, without waiting. `op` is the oldest operation of `connector` that is not done. A panic counts as an
    /// error.
    fn progress(&mut self, connector: ConnectorId, op: &mut Self::Op) -> std::result::Result<Progress, Self::Error>;

    /// Decides what the thread does after a while in which no operation moved. [`Options::sleeper`] wakes it.
    ///
    /// * `idle_sleep` - [`Options::idle_sleep`].
    fn on_idle(&mut self, operations: &mut dyn Iterator<Item = &mut Self::Op>, idle_sleep: Duration) -> IdleAction {
        let _ = operations;
        IdleAction::SleepFor(idle_sleep)
    }

    /// Says in a few words what `op` is and what it waits for.
    fn describe(&self, connector: ConnectorId, op: &Self::Op, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let _ = (connector, op, f);
        Ok(())
    }
}

type Result<T> = std::result::Result<T, Refusal>;

/// An operation on its way to the scheduler.
struct Submitted<Op> {
    connector: ConnectorId,
    op_count: u64,
    op: Op,
    since: u64,
}

type Queue<W> = SubmitQueue<Submitted<<W as Work>::Op>, Connectors>;

struct Shared<W: Work> {
    scheduler: Mutex<Scheduler<W>>,
    queue: Queue<W>,
    counts: Counts,
    fatal: OnceLock<Fatal<W::Error>>,
    options: Options,
}

impl<W: Work> DumpSource for Shared<W> {
    fn dump(&self) -> String {
        self.snapshot(true).to_string()
    }
}

/// An engine. Any thread may call any of its functions, which wait at most for the step that is being made, unless they say otherwise. Dropping it
/// aborts it, and drops its operations.
///
/// In a forked child every call is refused, and dropping it there leaves the parent's engine as it is.
pub struct Engine<W: Work> {
    shared: Arc<Shared<W>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    thread_id: Option<ThreadId>,
    dump_on_signal: Option<DumpGuard>,
    epoch: u64,
}

impl<W: Work> Engine<W> {
    /// An engine without a thread, stepped by calls of [`Engine::step`]. For tests and simulations.
    pub fn stepped(work: W, options: Options) -> Self {
        let shared = Shared {
            scheduler: Mutex::new(Scheduler::new(work)),
            queue: SubmitQueue::new(options.limit, options.first_op_count, options.sleeper.clone(), Connectors::default()),
            counts: Counts::default(),
            fatal: OnceLock::new(),
            options,
        };
        Engine { shared: Arc::new(shared), thread: Mutex::new(None), thread_id: None, dump_on_signal: None, epoch: fork::epoch() }
    }

    /// An engine with its thread, which sleeps until something is started.
    ///
    /// Errors: the system gives no thread.
    pub fn new(work: W, options: Options) -> BaseResult<Self> {
        let mut engine = Self::stepped(work, options);
        let shared = Arc::clone(&engine.shared);
        let Options { name, cpus, .. } = &engine.shared.options;
        let thread = thread::spawn(name, cpus, move || run(&shared));
        let thread = thread.map_err(|e| Error::system(format!("starting the thread {name}"), e))?;
        engine.thread_id = Some(thread.thread().id());
        *lock(&engine.thread) = Some(thread);
        if let Some(signal) = engine.shared.options.dump_signal {
            match dump_on_signal(signal, engine.shared.clone()) {
                Ok(guard) => engine.dump_on_signal = Some(guard),
                Err(error) => log_warn!(log::NET, "{}: no dump on a signal: {error}", engine.shared.options.name),
            }
        }
        Ok(engine)
    }

    /// Makes a connector.
    pub fn add_connector(&self) -> Result<ConnectorId> {
        self.check()?;
        self.shared.queue.with(|connectors, _, _| connectors.add()).ok_or(Refusal::TooManyConnectors)
    }

    /// Removes a connector that has no operations. After the engine has ended it may have some, which are dropped.
    pub fn remove_connector(&self, id: ConnectorId) -> Result<()> {
        let ended = self.has_ended();
        // Dropped last: an operation's destructor may take long, or call the engine.
        let mut dropped = Vec::new();
        self.with_scheduler(|scheduler| {
            self.shared.queue.with(|connectors, started, held| {
                if !connectors.has(id) {
                    return Err(Refusal::NoConnector(id));
                }
                if ended {
                    let slots = scheduler.slots.iter_mut().filter(|slot| slot.connector == id);
                    dropped.extend(slots.filter_map(|slot| slot.op.take()));
                    dropped.extend(started.extract_if(.., |submitted| submitted.connector == id).map(|submitted| submitted.op));
                    let (of_it, others): (Vec<_>, Vec<_>) = held.drain(..).partition(|submitted| submitted.connector == id);
                    held.extend(others);
                    dropped.extend(of_it.into_iter().map(|submitted| submitted.op));
                } else if scheduler.list.has(id.number()) || started.iter().chain(&*held).any(|submitted| submitted.connector == id) {
                    return Err(Refusal::Busy(id));
                }
                connectors.remove(id);
                Ok(())
            })
        })?
    }

    /// Opens a group, maybe within another. What any thread appends from now on is held until the group is closed and the engine started.
    pub fn group_start(&self) -> Result<()> {
        self.check()?;
        self.shared.queue.group_start();
        Ok(())
    }

    /// Closes the innermost group. Starts nothing.
    pub fn group_end(&self) -> Result<()> {
        self.check()?;
        self.shared.queue.group_end().map_err(|rejected| self.refusal(rejected))
    }

    /// Closes all groups and drops what was appended since the outermost one was opened; its opCounts are given out again.
    pub fn group_cancel(&self) -> Result<()> {
        self.check()?;
        self.shared.queue.group_cancel().map(drop).map_err(|rejected| self.refusal(rejected))
    }

    /// Appends an operation to those of `connector`, and wakes nobody: it is held until [`Engine::start`]. Returns its opCount: one more than that of
    /// the operation before it, whichever connector's that was.
    pub fn append(&self, connector: ConnectorId, op: W::Op) -> Result<u64> {
        self.check()?;
        let since = clock::now();
        let appended = self.shared.queue.append(|connectors, op_count| match connectors.has(connector) {
            true => Ok(Submitted { connector, op_count, op, since }),
            false => Err(AppendError::NoConnector),
        });
        appended.map_err(|error| match error {
            AppendError::NoConnector => Refusal::NoConnector(connector),
            AppendError::Rejected(rejected) => self.refusal(rejected),
        })
    }

    /// Hands the thread what was appended, unless to a group that is still open, and wakes it.
    pub fn start(&self) -> Result<()> {
        self.check()?;
        self.shared.queue.start().map_err(|rejected| self.refusal(rejected))
    }

    /// Refuses further operations, and waits until those that were started are done and the thread has ended. What was never started is dropped with
    /// the engine. An operation that never ends makes this wait until another thread calls [`Engine::abort`].
    ///
    /// An engine without a thread ends by its further steps, and this does not wait.
    pub fn stop(&self) -> Result<()> {
        self.end_by(SubmitQueue::stop)
    }

    /// Ends the engine after its present step, even if operations are not done, and waits for that.
    pub fn abort(&self) -> Result<()> {
        self.end_by(SubmitQueue::abort)
    }

    fn end_by(&self, ask: impl FnOnce(&Queue<W>)) -> Result<()> {
        self.check()?;
        ask(&self.shared.queue);
        if self.thread_id.is_none() {
            return Ok(());
        }
        self.check_thread()?;
        self.shared.queue.wait_for_end();
        if let Some(thread) = lock(&self.thread).take() {
            // No error: the thread catches its panics.
            let _ = thread.join();
        }
        Ok(())
    }

    /// Makes one step of an engine that has no thread.
    ///
    /// Errors: [`Refusal::Failed`], in this step or before.
    pub fn step(&self) -> Result<Step> {
        self.check()?;
        if self.thread_id.is_some() {
            return Err(Refusal::HasThread);
        }
        let shared = &*self.shared;
        let scheduler = &mut *lock(&shared.scheduler);
        if shared.queue.has_ended() {
            return if shared.fatal.get().is_some() { Err(Refusal::Failed) } else { Ok(Step::Ended) };
        }
        let abort = shared.queue.is_notified() && shared.collect(scheduler).abort;
        if abort || (scheduler.list.is_empty() && scheduler.stopping) {
            shared.queue.end();
            return Ok(Step::Ended);
        }
        if scheduler.list.is_empty() {
            return Ok(Step::Empty);
        }
        match catch_unwind(AssertUnwindSafe(|| scheduler.step(&shared.queue, &shared.counts))) {
            Ok(Ok(stepped)) => return Ok(Step::Stepped(stepped.progress)),
            Ok(Err(error)) => shared.fail(scheduler, Cause::Error(error)),
            Err(payload) => shared.fail(scheduler, Cause::Panic(message(payload))),
        }
        shared.queue.end();
        Err(Refusal::Failed)
    }

    /// The operation that ended the engine, if one did.
    pub fn fatal(&self) -> Option<&Fatal<W::Error>> {
        self.shared.fatal.get()
    }

    /// Whether the engine has ended: stopped, aborted or failed. It makes no more steps.
    pub fn has_ended(&self) -> bool {
        self.check().is_ok() && self.shared.queue.has_ended()
    }

    /// Whether the thread sleeps because there is nothing to do.
    pub fn is_asleep(&self) -> bool {
        self.check().is_ok() && self.shared.queue.asleep()
    }

    /// Whether this is called on the engine's own thread, which cannot wait for the engine.
    pub fn is_own_thread(&self) -> bool {
        self.thread_id == Some(std::thread::current().id())
    }

    /// What the next operation's opCount will be.
    pub fn next_op_count(&self) -> Result<u64> {
        self.check()?;
        Ok(self.shared.queue.next_op_count())
    }

    /// Counters.
    pub fn counters(&self) -> Counters {
        let counts = &self.shared.counts;
        let [steps, done, laps, idle_laps, yields, sleeps] =
            [&counts.steps, &counts.done, &counts.laps, &counts.idle_laps, &counts.yields, &counts.sleeps]
                .map(|counter| counter.load(Ordering::Relaxed));
        Counters { steps, done, laps, idle_laps, yields, sleeps }
    }

    /// Runs `f` on the client between two steps: to set up a connector, or take results.
    pub fn with_work<R>(&self, f: impl FnOnce(&mut W) -> R) -> Result<R> {
        self.with_scheduler(|scheduler| f(&mut scheduler.work))
    }

    /// Runs `f` on the scheduler between two steps.
    fn with_scheduler<R>(&self, f: impl FnOnce(&mut Scheduler<W>) -> R) -> Result<R> {
        self.check()?;
        self.check_thread()?;
        let _waiter = Waiter::new(&self.shared.queue);
        Ok(f(&mut lock(&self.shared.scheduler)))
    }

    fn check(&self) -> Result<()> {
        if self.epoch == fork::epoch() { Ok(()) } else { Err(Refusal::Forked) }
    }

    fn check_thread(&self) -> Result<()> {
        if self.is_own_thread() { Err(Refusal::OwnThread) } else { Ok(()) }
    }

    #[cold]
    fn refusal(&self, rejected: Rejected) -> Refusal {
        match rejected {
            Rejected::Ending if self.shared.fatal.get().is_some() => Refusal::Failed,
            Rejected::Ending => Refusal::Stopped,
            Rejected::Full => Refusal::Full(self.shared.options.limit),
            Rejected::NoGroup => Refusal::NoGroup,
        }
    }
}

impl<W: Work> Drop for Engine<W> {
    fn drop(&mut self) {
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.epoch != fork::epoch() {
            // The thread belongs to the parent, and so does all that the operations refer to.
            std::mem::forget((thread, self.dump_on_signal.take(), Arc::clone(&self.shared)));
            return;
        }
        self.dump_on_signal = None;
        if let Some(thread) = thread {
            self.shared.queue.abort();
            // The thread itself may drop the engine, within a step: it ends right after.
            if self.check_thread().is_ok() {
                let _ = thread.join();
            }
        }
    }
}

enum AppendError {
    NoConnector,
    Rejected(Rejected),
}

impl From<Rejected> for AppendError {
    fn from(rejected: Rejected) -> Self {
        AppendError::Rejected(rejected)
    }
}

/// A caller that waits for the scheduler's lock, or has it.
struct Waiter<'a, T, S>(&'a SubmitQueue<T, S>);

impl<'a, T, S> Waiter<'a, T, S> {
    fn new(queue: &'a SubmitQueue<T, S>) -> Self {
        queue.add_waiter();
        Waiter(queue)
    }
}

impl<T, S> Drop for Waiter<'_, T, S> {
    fn drop(&mut self) {
        self.0.remove_waiter();
    }
}

impl<W: Work> Shared<W> {
    fn collect(&self, scheduler: &mut Scheduler<W>) -> Commands {
        let commands = self.queue.collect(&mut scheduler.incoming);
        scheduler.add_incoming();
        scheduler.stopping |= commands.stop;
        commands
    }

    #[cold]
    fn fail(&self, scheduler: &Scheduler<W>, cause: Cause<W::Error>) {
        if let Some((connector, op_count)) = scheduler.latest() {
            self.queue.end_with(|| _ = self.fatal.set(Fatal { connector, op_count, cause }));
            let Some(fatal) = self.fatal.get() else { return };
            log_warn!(log::NET, "{}: {fatal}", self.options.name);
        }
    }
}

/// The body of the progress thread.
fn run<W: Work>(shared: &Shared<W>) {
    let _end = EndOnDrop(&shared.queue);
    let mut scheduler = lock(&shared.scheduler);
    loop {
        let pause = catch_unwind(AssertUnwindSafe(|| scheduler.run(&shared.queue, &shared.counts, &shared.options)));
        match pause {
            Ok(Pause::Notified) => {
                let commands = shared.collect(&mut scheduler);
                if commands.abort {
                    return;
                }
                if commands.waiters {
                    drop(scheduler);
                    shared.queue.wait_for_waiters();
                    scheduler = lock(&shared.scheduler);
                }
            }
            Ok(Pause::Empty) if scheduler.stopping => return,
            Ok(pause @ (Pause::Empty | Pause::Sleep(_))) => {
                Counts::add(&shared.counts.sleeps);
                drop(scheduler);
                shared.queue.sleep(if let Pause::Sleep(timeout) = pause { timeout } else { None });
                scheduler = lock(&shared.scheduler);
            }
            Ok(Pause::Failed(error)) => return shared.fail(&scheduler, Cause::Error(error)),
            Err(payload) => return shared.fail(&scheduler, Cause::Panic(message(payload))),
        }
    }
}

/// Tells those who wait for the thread that it has ended, however it ends.
struct EndOnDrop<'a, T, S>(&'a SubmitQueue<T, S>);

impl<T, S> Drop for EndOnDrop<'_, T, S> {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cold]
fn message(payload: Box<dyn Any + Send>) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned()).or_else(|| payload.downcast_ref::<String>().cloned());
    // Not dropped: its destructor could panic as well.
    std::mem::forget(payload);
    text.unwrap_or_else(|| "a panic without a message".into())
}
