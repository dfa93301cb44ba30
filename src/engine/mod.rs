//! The persistent thread: operations from a pool, in a circle across connectors, moved step by step until they are done.
//!
//! This is NCCL's proxy thread (2.7, src/proxy.cc) without what it is there for: what an operation is, and how it makes progress, is the client's
//! ([`Work`]). Clients append operations on any thread and start them; the engine's thread alone makes progress. It is the only place of the library
//! that starts a thread which moves data.
//!
//! In the steady state a step takes no lock and allocates nothing: the thread holds the lock of its own state (`core`) until somebody rings at the
//! `door`, which costs a relaxed load per step to know. The order of operations is a pure data structure (`list`).

mod connectors;
mod core;
mod door;
mod dump;
mod list;
mod notice;
#[cfg(test)]
mod tests;
mod types;

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::Duration;

use crate::base::error::{Error, Result as BaseResult};
use crate::base::log::{self, log_warn};
use crate::base::thread;
use crate::base::{clock, fork};
use connectors::Connectors;
pub use connectors::{ConnectorId, MAX_CONNECTORS};
use core::{Core, Counts, Pause};
pub use door::Sleeper;
use door::{Door, Shut};
pub use dump::{Dump, OpView};
pub use types::{Cause, Counters, Fatal, Options, Refusal, State, Step};

/// What one step of an operation came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// There was nothing to do. A lap of nothing else counts as idle.
    Idle,
    /// Something moved.
    Moved,
    /// The operation is complete, and not asked again.
    Done,
}

/// What the thread does where nothing has moved for a while.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// It goes on: there is something to do after all.
    Awake,
    /// It sleeps for so long at most.
    For(Duration),
    /// It sleeps until it is woken.
    UntilWoken,
}

/// The client of an engine: what operations are, and how they move. Called by whoever steps the engine, one call at a time.
pub trait Work: Send + 'static {
    /// An operation, with all that it needs to go on from where it is. Kept by value: a few hundred bytes at most.
    type Op: Send + 'static;
    /// Why an operation failed. It ends the engine.
    type Error: fmt::Display + Send + Sync + 'static;

    /// Makes what progress there is to be made on `op` without waiting. It is the oldest operation of `connector` that is not done. A panic counts as
    /// an error.
    fn progress(&mut self, connector: ConnectorId, op: &mut Self::Op) -> std::result::Result<Progress, Self::Error>;

    /// What the thread is to do, as no step on any of its operations has found anything for a while. What wakes it is [`Options::sleeper`].
    ///
    /// * `nap` - [`Options::nap`].
    fn rest(&mut self, operations: &mut dyn Iterator<Item = &mut Self::Op>, nap: Duration) -> Rest {
        let _ = operations;
        Rest::For(nap)
    }

    /// Says in a few words what `op` is and what it waits for.
    fn describe(&self, connector: ConnectorId, op: &Self::Op, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let _ = (connector, op, f);
        Ok(())
    }
}

type Result<T> = std::result::Result<T, Refusal>;

/// An operation on its way to the loop.
struct Posted<Op> {
    connector: ConnectorId,
    op_count: u64,
    op: Op,
    since: u64,
}

struct Shared<W: Work> {
    core: Mutex<Core<W>>,
    door: Door<Posted<W::Op>, Connectors>,
    counts: Counts,
    fatal: OnceLock<Fatal<W::Error>>,
    options: Options,
}

impl<W: Work> notice::Watched for Shared<W> {
    fn dump(&self) -> Dump {
        self.look(true)
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
    shown: Option<notice::Place>,
    epoch: u64,
}

impl<W: Work> Engine<W> {
    /// An engine without a thread: whoever calls [`Engine::step`] makes the steps. For tests and simulations.
    pub fn stepped(work: W, options: Options) -> Self {
        let shared = Shared {
            core: Mutex::new(Core::new(work)),
            door: Door::new(options.limit, options.first_op_count, options.sleeper.clone(), Connectors::default()),
            counts: Counts::default(),
            fatal: OnceLock::new(),
            options,
        };
        Engine { shared: Arc::new(shared), thread: Mutex::new(None), thread_id: None, shown: None, epoch: fork::epoch() }
    }

    /// An engine with its thread, which sleeps until something is started.
    ///
    /// Errors: no thread to be had.
    pub fn new(work: W, options: Options) -> BaseResult<Self> {
        let mut engine = Self::stepped(work, options);
        let shared = Arc::clone(&engine.shared);
        let Options { name, cpus, .. } = &engine.shared.options;
        let thread = thread::spawn(name, cpus, move || run(&shared));
        let thread = thread.map_err(|e| Error::system(format!("starting the thread {name}"), e))?;
        engine.thread_id = Some(thread.thread().id());
        *lock(&engine.thread) = Some(thread);
        if let Some(signal) = engine.shared.options.dump_signal {
            match notice::watch(signal, engine.shared.clone()) {
                Ok(place) => engine.shown = Some(place),
                Err(error) => log_warn!(log::NET, "{}: no dump on a signal: {error}", engine.shared.options.name),
            }
        }
        Ok(engine)
    }

    /// Makes a connector.
    pub fn add_connector(&self) -> Result<ConnectorId> {
        self.check()?;
        self.shared.door.with(|connectors, _, _| connectors.add()).ok_or(Refusal::TooManyConnectors)
    }

    /// Removes a connector that has no operations. After the engine has ended it may have some, which are dropped.
    pub fn remove_connector(&self, id: ConnectorId) -> Result<()> {
        let ended = self.has_ended();
        // Dropped last: what an operation's destructor does is not for this lock.
        let mut dropped = Vec::new();
        self.visit(|core| {
            self.shared.door.with(|connectors, started, held| {
                if !connectors.has(id) {
                    return Err(Refusal::NoConnector(id));
                }
                if ended {
                    let of_core = core.slots.iter_mut().filter(|slot| slot.connector == id);
                    dropped.extend(of_core.filter_map(|slot| slot.op.take()));
                    dropped.extend(started.extract_if(.., |posted| posted.connector == id).map(|posted| posted.op));
                    let (of_it, others): (Vec<_>, Vec<_>) = held.drain(..).partition(|posted| posted.connector == id);
                    held.extend(others);
                    dropped.extend(of_it.into_iter().map(|posted| posted.op));
                } else if core.list.has(id.number()) || started.iter().chain(&*held).any(|posted| posted.connector == id) {
                    return Err(Refusal::Busy(id));
                }
                connectors.remove(id);
                Ok(())
            })
        })?
    }

    /// Opens a group, maybe within another. Whatever anyone appends from now on is held until the group is closed and the engine started.
    pub fn group_start(&self) -> Result<()> {
        self.check()?;
        self.shared.door.group_start();
        Ok(())
    }

    /// Closes the innermost group. Starts nothing.
    pub fn group_end(&self) -> Result<()> {
        self.check()?;
        self.shared.door.group_end().map_err(|shut| self.refusal(shut))
    }

    /// Closes all groups and drops what was appended since the outermost one was opened; its opCounts are given out again.
    pub fn group_cancel(&self) -> Result<()> {
        self.check()?;
        self.shared.door.group_cancel().map(drop).map_err(|shut| self.refusal(shut))
    }

    /// Appends an operation to those of `connector`, and wakes nobody: it is held until [`Engine::start`]. Returns its opCount: one more than that of
    /// the operation before it, whichever connector's that was.
    pub fn append(&self, connector: ConnectorId, op: W::Op) -> Result<u64> {
        self.check()?;
        let since = clock::now();
        let refused = self.shared.door.append(|connectors, op_count| match connectors.has(connector) {
            true => Ok(Posted { connector, op_count, op, since }),
            false => Err(Refused::Connector),
        });
        refused.map_err(|refused| match refused {
            Refused::Connector => Refusal::NoConnector(connector),
            Refused::Shut(shut) => self.refusal(shut),
        })
    }

    /// Lets go what was appended, unless to a group that is still open, and wakes the thread for it.
    pub fn start(&self) -> Result<()> {
        self.check()?;
        self.shared.door.start().map_err(|shut| self.refusal(shut))
    }

    /// Takes no more operations in, and waits until those that were started are done and the thread has ended. What was never started is dropped
    /// with the engine. An operation that never ends makes this wait until another thread calls [`Engine::abort`].
    ///
    /// An engine without a thread ends by its further steps, and this does not wait.
    pub fn stop(&self) -> Result<()> {
        self.end_by(Door::stop)
    }

    /// Ends the engine after its present step, whatever is not done, and waits for that.
    pub fn abort(&self) -> Result<()> {
        self.end_by(Door::abort)
    }

    fn end_by(&self, ask: impl FnOnce(&Door<Posted<W::Op>, Connectors>)) -> Result<()> {
        self.check()?;
        ask(&self.shared.door);
        if self.thread_id.is_none() {
            return Ok(());
        }
        self.check_thread()?;
        self.shared.door.wait_for_end();
        if let Some(thread) = lock(&self.thread).take() {
            // It catches its panics.
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
        let core = &mut *lock(&shared.core);
        if shared.door.has_ended() {
            return if shared.fatal.get().is_some() { Err(Refusal::Failed) } else { Ok(Step::Ended) };
        }
        let abort = shared.door.has_rung() && shared.collect(core).abort;
        if abort || (core.list.is_empty() && core.stopping) {
            shared.door.end();
            return Ok(Step::Ended);
        }
        if core.list.is_empty() {
            return Ok(Step::Empty);
        }
        match catch_unwind(AssertUnwindSafe(|| core.step(&shared.door, &shared.counts))) {
            Ok(Ok(stepped)) => return Ok(Step::Turn(stepped.progress)),
            Ok(Err(error)) => shared.fail(core, Cause::Error(error)),
            Err(payload) => shared.fail(core, Cause::Panic(message(payload))),
        }
        shared.door.end();
        Err(Refusal::Failed)
    }

    /// The operation that ended the engine, if one did.
    pub fn fatal(&self) -> Option<&Fatal<W::Error>> {
        self.shared.fatal.get()
    }

    /// Whether the engine has ended: stopped, aborted or failed. It makes no more steps.
    pub fn has_ended(&self) -> bool {
        self.check().is_ok() && self.shared.door.has_ended()
    }

    /// Whether the thread sleeps because there is nothing to do.
    pub fn is_asleep(&self) -> bool {
        self.check().is_ok() && self.shared.door.asleep()
    }

    /// Whether the engine's own thread asks, which cannot wait for the engine.
    pub fn is_own_thread(&self) -> bool {
        self.thread_id == Some(std::thread::current().id())
    }

    /// What the next operation's opCount will be.
    pub fn next_op_count(&self) -> Result<u64> {
        self.check()?;
        Ok(self.shared.door.next())
    }

    /// Counters.
    pub fn counters(&self) -> Counters {
        let counts = &self.shared.counts;
        let [steps, done, laps, idle_laps, yields, sleeps] =
            [&counts.steps, &counts.done, &counts.laps, &counts.idle_laps, &counts.yields, &counts.sleeps]
                .map(|counter| counter.load(Ordering::Relaxed));
        Counters { steps, done, laps, idle_laps, yields, sleeps }
    }

    /// Runs `f` on the client between two steps. For what must change together with the thread's view: setting up a connector, taking results.
    pub fn with_work<R>(&self, f: impl FnOnce(&mut W) -> R) -> Result<R> {
        self.visit(|core| f(&mut core.work))
    }

    /// Runs `f` on the loop's state between two steps.
    fn visit<R>(&self, f: impl FnOnce(&mut Core<W>) -> R) -> Result<R> {
        self.check()?;
        self.check_thread()?;
        let _visit = Visit::new(&self.shared.door);
        Ok(f(&mut lock(&self.shared.core)))
    }

    fn check(&self) -> Result<()> {
        if self.epoch == fork::epoch() { Ok(()) } else { Err(Refusal::Forked) }
    }

    fn check_thread(&self) -> Result<()> {
        if self.is_own_thread() { Err(Refusal::OwnThread) } else { Ok(()) }
    }

    #[cold]
    fn refusal(&self, shut: Shut) -> Refusal {
        match shut {
            Shut::Ending if self.shared.fatal.get().is_some() => Refusal::Failed,
            Shut::Ending => Refusal::Stopped,
            Shut::Full => Refusal::Full(self.shared.options.limit),
            Shut::NoGroup => Refusal::NoGroup,
        }
    }
}

impl<W: Work> Drop for Engine<W> {
    fn drop(&mut self) {
        let thread = self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if self.epoch != fork::epoch() {
            // The thread is the parent's, and so is all that the operations refer to.
            std::mem::forget((thread, self.shown.take(), Arc::clone(&self.shared)));
            return;
        }
        self.shown = None;
        if let Some(thread) = thread {
            self.shared.door.abort();
            // The thread's own last reference, given up within a step: it ends right after.
            if self.check_thread().is_ok() {
                let _ = thread.join();
            }
        }
    }
}

enum Refused {
    Connector,
    Shut(Shut),
}

impl From<Shut> for Refused {
    fn from(shut: Shut) -> Self {
        Refused::Shut(shut)
    }
}

/// A caller that wants the loop's state.
struct Visit<'a, T, S>(&'a Door<T, S>);

impl<'a, T, S> Visit<'a, T, S> {
    fn new(door: &'a Door<T, S>) -> Self {
        door.visit();
        Visit(door)
    }
}

impl<T, S> Drop for Visit<'_, T, S> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl<W: Work> Shared<W> {
    fn collect(&self, core: &mut Core<W>) -> door::Orders {
        let orders = self.door.collect(&mut core.incoming);
        core.take_in();
        core.stopping |= orders.stop;
        orders
    }

    #[cold]
    fn fail(&self, core: &Core<W>, cause: Cause<W::Error>) {
        if let Some((connector, op_count)) = core.latest() {
            let fatal = self.fatal.get_or_init(|| Fatal { connector, op_count, cause });
            log_warn!(log::NET, "{}: {fatal}", self.options.name);
        }
    }
}

/// The thread.
fn run<W: Work>(shared: &Shared<W>) {
    let _end = End(&shared.door);
    let mut core = lock(&shared.core);
    loop {
        let pause = catch_unwind(AssertUnwindSafe(|| core.run(&shared.door, &shared.counts, &shared.options)));
        match pause {
            Ok(Pause::Rung) => {
                let orders = shared.collect(&mut core);
                if orders.abort {
                    return;
                }
                if orders.visitors {
                    drop(core);
                    shared.door.give_way();
                    core = lock(&shared.core);
                }
            }
            Ok(Pause::Empty) if core.stopping => return,
            Ok(pause @ (Pause::Empty | Pause::Nap(_))) => {
                Counts::add(&shared.counts.sleeps);
                drop(core);
                shared.door.sleep(if let Pause::Nap(most) = pause { most } else { None });
                core = lock(&shared.core);
            }
            Ok(Pause::Failed(error)) => return shared.fail(&core, Cause::Error(error)),
            Err(payload) => return shared.fail(&core, Cause::Panic(message(payload))),
        }
    }
}

/// However the thread ends, nobody waits for it in vain.
struct End<'a, T, S>(&'a Door<T, S>);

impl<T, S> Drop for End<'_, T, S> {
    fn drop(&mut self) {
        self.0.end();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic ends the engine; what it leaves is only looked at.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cold]
fn message(payload: Box<dyn Any + Send>) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned()).or_else(|| payload.downcast_ref::<String>().cloned());
    // A payload may have a destructor that panics in its turn.
    std::mem::forget(payload);
    text.unwrap_or_else(|| "a panic without a message".into())
}
