//! A dump of everything that an engine has to do, for people and for tests. Made on any thread, between two steps of the engine's.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use super::scheduler::{Scheduler, Slot};
use super::{ConnectorId, Engine, Refusal, Shared, State, Submitted, Waiter, Work};
use crate::base::clock;

/// How long a step may take before the thread counts as stuck in it.
const STEP_TIMEOUT: Duration = Duration::from_secs(1);
/// Time between two tries of the lock.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// An operation as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpView {
    /// Its connector.
    pub connector: ConnectorId,
    /// What [`Engine::append`] returned.
    pub op_count: u64,
    /// Its state.
    pub state: State,
    /// Operations of its connector before it.
    pub depth: u32,
    /// Appended and not started.
    pub held: bool,
    /// For how long it is in this state.
    pub age: Duration,
    /// For how long its steps have found nothing to do, accurate to some laps. Zero if the latest one moved something.
    pub idle: Duration,
    /// [`Work::describe`].
    pub what: String,
}

/// An engine as it stands. `Display` shows it in the manner of NCCL's dump of its proxy (src/proxy.cc: dumpProxyState): the circle from top to bottom,
/// each connector's later operations behind its first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dump {
    /// [`super::Options::name`].
    pub name: String,
    /// What it is doing, in words.
    pub doing: String,
    /// In the order in which they are stepped, each followed by the later ones of its connector; then those that are held, as appended.
    pub operations: Vec<OpView>,
}

struct Described<'a, W: Work>(&'a W, ConnectorId, &'a W::Op);

impl<W: Work> fmt::Display for Described<'_, W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.describe(self.1, self.2, f)
    }
}

impl<W: Work> Engine<W> {
    /// Shows what the engine has to do and what it waits for. If the step that is being made does not end within a second, that is what is shown.
    pub fn dump(&self) -> Result<Dump, Refusal> {
        self.check()?;
        self.check_thread()?;
        Ok(self.shared.snapshot(self.thread_id.is_some()))
    }
}

impl<W: Work> Shared<W> {
    pub(super) fn snapshot(&self, threaded: bool) -> Dump {
        let name = self.options.name.clone();
        let _waiter = Waiter::new(&self.queue);
        let Some(scheduler) = self.lock_between_steps() else {
            let (connector, op_count) = (self.counts.connector.load(Ordering::Relaxed), self.counts.op_count.load(Ordering::Relaxed));
            let doing = format!("stuck in a step of operation {op_count} of connector {connector}");
            return Dump { name, doing, operations: Vec::new() };
        };
        let (now, work) = (clock::now(), &scheduler.work);
        let mut operations = Vec::new();
        scheduler
            .list
            .for_each(|at, depth| operations.extend(scheduler.slots.get(at as usize).and_then(|slot| view(work, slot, depth, now))));
        self.queue.with(|_, started, held| {
            let waiting = started.iter().map(|submitted| (submitted, false)).chain(held.iter().map(|submitted| (submitted, true)));
            for (submitted, held) in waiting {
                let depth = operations.iter().filter(|op| op.connector == submitted.connector).count() as u32;
                operations.push(waiting_view(work, submitted, depth, held, now));
            }
        });
        Dump { name, doing: self.doing(threaded), operations }
    }

    /// `None` if a step does not end within [`STEP_TIMEOUT`].
    fn lock_between_steps(&self) -> Option<MutexGuard<'_, Scheduler<W>>> {
        let until = clock::now() + STEP_TIMEOUT.as_nanos() as u64;
        loop {
            match self.scheduler.try_lock() {
                Ok(scheduler) => return Some(scheduler),
                Err(TryLockError::Poisoned(scheduler)) => return Some(PoisonError::into_inner(scheduler)),
                Err(TryLockError::WouldBlock) if clock::now() > until => return None,
                Err(TryLockError::WouldBlock) => clock::sleep(RETRY_INTERVAL),
            }
        }
    }

    fn doing(&self, threaded: bool) -> String {
        match self.fatal.get() {
            Some(fatal) => format!("failed: {fatal}"),
            None if self.queue.has_ended() => "ended".into(),
            None if self.queue.asleep() => "asleep".into(),
            None if !threaded => "without a thread".into(),
            None => "running".into(),
        }
    }
}

fn view<W: Work>(work: &W, slot: &Slot<W::Op>, depth: u32, now: u64) -> Option<OpView> {
    let Slot { op, connector, op_count, state, since, idle_since } = slot;
    let op = op.as_ref()?;
    let idle = if *idle_since == 0 { Duration::ZERO } else { age(*idle_since, now) };
    let what = Described(work, *connector, op).to_string();
    Some(OpView { connector: *connector, op_count: *op_count, state: *state, depth, held: false, age: age(*since, now), idle, what })
}

fn waiting_view<W: Work>(work: &W, submitted: &Submitted<W::Op>, depth: u32, held: bool, now: u64) -> OpView {
    let Submitted { connector, op_count, op, since } = submitted;
    let what = Described(work, *connector, op).to_string();
    let (connector, op_count, age) = (*connector, *op_count, age(*since, now));
    OpView { connector, op_count, state: State::Ready, depth, held, age, idle: Duration::ZERO, what }
}

fn age(since: u64, now: u64) -> Duration {
    Duration::from_nanos(now.saturating_sub(since))
}

impl fmt::Display for Dump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {}, {} operations", self.name, self.doing, self.operations.len())?;
        for op in &self.operations {
            let behind = if op.depth > 0 && !op.held { "`-> " } else { "" };
            write!(f, "{behind}[{}|{}| {:?}{}", op.connector, op.op_count, op.state, if op.held { ", held" } else { "" })?;
            write!(f, " for {:.3} s", op.age.as_secs_f64())?;
            if !op.idle.is_zero() {
                write!(f, ", idle for {:.3} s", op.idle.as_secs_f64())?;
            }
            writeln!(f, "{}{}]", if op.what.is_empty() { "" } else { ": " }, op.what)?;
        }
        Ok(())
    }
}
