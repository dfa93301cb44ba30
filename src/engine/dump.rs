//! A look at everything that an engine has to do, for people and for tests. Made by any thread while the loop gives way.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use super::core::{Core, Slot};
use super::{ConnectorId, Engine, Posted, Refusal, Shared, State, Visit, Work};
use crate::base::clock;

/// How long the loop may take to give way before it counts as stuck in a step.
const PATIENCE: Duration = Duration::from_secs(1);
/// Between two tries.
const PAUSE: Duration = Duration::from_millis(1);

/// An operation as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpView {
    /// Whose it is.
    pub connector: ConnectorId,
    /// What [`Engine::append`] returned.
    pub op_count: u64,
    /// Where it stands.
    pub state: State,
    /// Operations of its connector before it.
    pub depth: u32,
    /// Appended and not let go.
    pub held: bool,
    /// For how long it is in this state.
    pub age: Duration,
    /// For how long its steps have found nothing to do, to within some laps. Zero if the latest one moved something.
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
    /// In the order of their turns, each connector's behind one another; then those that are held, as appended.
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
        Ok(self.shared.look(self.thread_id.is_some()))
    }
}

impl<W: Work> Shared<W> {
    pub(super) fn look(&self, threaded: bool) -> Dump {
        let name = self.options.name.clone();
        let _visit = Visit::new(&self.door);
        let Some(core) = self.patiently() else {
            let (connector, op_count) = (self.counts.connector.load(Ordering::Relaxed), self.counts.op_count.load(Ordering::Relaxed));
            let doing = format!("stuck in a step of operation {op_count} of connector {connector}");
            return Dump { name, doing, operations: Vec::new() };
        };
        let (now, work) = (clock::now(), &core.work);
        let mut operations = Vec::new();
        core.list.for_each(|at, depth| operations.extend(core.slots.get(at as usize).and_then(|slot| view(work, slot, depth, now))));
        self.door.with(|_, started, held| {
            let waiting = started.iter().map(|posted| (posted, false)).chain(held.iter().map(|posted| (posted, true)));
            for (posted, held) in waiting {
                let depth = operations.iter().filter(|op| op.connector == posted.connector).count() as u32;
                operations.push(waiting_view(work, posted, depth, held, now));
            }
        });
        Dump { name, doing: self.doing(threaded), operations }
    }

    fn patiently(&self) -> Option<MutexGuard<'_, Core<W>>> {
        let until = clock::now() + PATIENCE.as_nanos() as u64;
        loop {
            match self.core.try_lock() {
                Ok(core) => return Some(core),
                Err(TryLockError::Poisoned(core)) => return Some(PoisonError::into_inner(core)),
                Err(TryLockError::WouldBlock) if clock::now() > until => return None,
                Err(TryLockError::WouldBlock) => clock::sleep(PAUSE),
            }
        }
    }

    fn doing(&self, threaded: bool) -> String {
        match self.fatal.get() {
            Some(fatal) => format!("failed: {fatal}"),
            None if self.door.has_ended() => "ended".into(),
            None if self.door.asleep() => "asleep".into(),
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

fn waiting_view<W: Work>(work: &W, posted: &Posted<W::Op>, depth: u32, held: bool, now: u64) -> OpView {
    let Posted { connector, op_count, op, since } = posted;
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
