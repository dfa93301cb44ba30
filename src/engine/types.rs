//! What callers of an engine give it and get from it: plain data.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::Progress;
use super::connectors::{ConnectorId, MAX_CONNECTORS};
use super::submit_queue::Sleeper;
use crate::base::thread::Cpus;

/// State of an operation. Names and meaning as in NCCL 2.7 (src/include/proxy.h: ncclProxyOpState).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Complete.
    None,
    /// Not stepped yet.
    Ready,
    /// Stepped at least once.
    Progress,
}

/// How an engine behaves.
#[derive(Debug, Clone)]
pub struct Options {
    /// Name of the thread, and of the engine in messages. The kernel shows 15 bytes of it.
    pub name: String,
    /// Where the thread may run.
    pub cpus: Cpus,
    /// Idle laps before the thread yields its processor. Source of 10: NCCL 2.7, src/proxy.cc, `++idleSpin == 10`.
    pub idle_laps: u32,
    /// How long the thread sleeps at a time after `yields` yields during which nothing moved, unless [`super::Work::on_idle`] says otherwise. Zero:
    /// never; it polls as long as there are operations, as NCCL's does. `start`, `stop` and `abort` end the sleep.
    pub idle_sleep: Duration,
    /// See `idle_sleep`.
    pub yields: u32,
    /// Operations at most, whatever their state.
    pub limit: u64,
    /// opCount of the first operation.
    pub first_op_count: u64,
    /// How the thread sleeps, if its client waits for more than calls of the engine.
    pub sleeper: Option<Arc<dyn Sleeper>>,
    /// Signal upon which an engine with a thread writes its dump to the log.
    pub dump_signal: Option<i32>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            name: "railhead-engine".into(),
            cpus: Cpus::default(),
            idle_laps: 10,
            idle_sleep: Duration::ZERO,
            yields: 1000,
            limit: 1 << 20,
            first_op_count: 0,
            sleeper: None,
            dump_signal: None,
        }
    }
}

/// Why a call was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// An operation failed; [`super::Engine::fatal`] says which and why.
    #[error("the engine failed")]
    Failed,
    /// The engine was stopped or aborted.
    #[error("the engine was stopped")]
    Stopped,
    /// [`Options::limit`] operations are not done.
    #[error("{0} operations are not done, the most that the engine takes")]
    Full(u64),
    /// [`MAX_CONNECTORS`] exist.
    #[error("the engine has {MAX_CONNECTORS} connectors, the most that it takes")]
    TooManyConnectors,
    /// Removed, or of another engine.
    #[error("{0} does not exist")]
    NoConnector(ConnectorId),
    /// It has operations that are not done, and the engine has not ended.
    #[error("{0} has operations that are not done")]
    Busy(ConnectorId),
    /// There is no group to end.
    #[error("no group was started")]
    NoGroup,
    /// This process is a forked child of the one that made the engine.
    #[error("the engine belongs to the parent of this process")]
    Forked,
    /// The engine's own thread would wait for itself.
    #[error("the engine's own thread cannot wait for the engine")]
    OwnThread,
    /// The engine has a thread, which alone makes its steps.
    #[error("the engine is stepped by its own thread")]
    HasThread,
}

/// The operation that ended an engine.
#[derive(Debug)]
pub struct Fatal<E> {
    /// Connector of the operation.
    pub connector: ConnectorId,
    /// What [`super::Engine::append`] returned for it.
    pub op_count: u64,
    /// What happened.
    pub cause: Cause<E>,
}

/// Why an operation failed.
#[derive(Debug)]
pub enum Cause<E> {
    /// What [`super::Work::progress`] returned.
    Error(E),
    /// [`super::Work::progress`] panicked, with this message.
    Panic(String),
}

impl<E: fmt::Display> fmt::Display for Fatal<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fatal { connector, op_count, cause } = self;
        match cause {
            Cause::Error(error) => write!(f, "operation {op_count} of {connector}: {error}"),
            Cause::Panic(message) => write!(f, "operation {op_count} of {connector}: internal error: {message}"),
        }
    }
}

/// What an engine has done. Each counter wraps at 2^64.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Calls of [`super::Work::progress`].
    pub steps: u64,
    /// Operations that are complete.
    pub done: u64,
    /// Laps: in each, every connector with operations is stepped once.
    pub laps: u64,
    /// Those in which nothing moved.
    pub idle_laps: u64,
    /// Times that the thread yielded its processor.
    pub yields: u64,
    /// Times that the thread slept.
    pub sleeps: u64,
}

/// What [`super::Engine::step`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// There is no operation that was started.
    Empty,
    /// One operation was stepped.
    Stepped(Progress),
    /// The engine was stopped and all is done, or aborted: there will be no more steps.
    Ended,
}
