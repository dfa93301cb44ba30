//! Tests of the engine with a client whose operations follow a script.

mod ending;
mod order;
mod wakeup;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::*;

/// How long anything may take before it counts as hanging.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What an operation does in its next step.
#[derive(Debug, Clone)]
enum Act {
    Idle,
    Moved,
    Fail(&'static str),
    Panic(&'static str),
    /// Idle as long as the number is 0.
    Until(Arc<AtomicU64>),
    /// Sets the first number, and stays until the second is not 0.
    Block(Arc<AtomicU64>, Arc<AtomicU64>),
}

/// An operation that is done after its acts.
#[derive(Debug, Default)]
struct Op {
    acts: Vec<Act>,
    at: usize,
    name: u64,
    _alive: Option<Alive>,
}

/// Counts those that exist.
#[derive(Debug)]
struct Alive(Arc<AtomicUsize>);

impl Alive {
    fn new(count: &Arc<AtomicUsize>) -> Alive {
        count.fetch_add(1, Ordering::Relaxed);
        Alive(Arc::clone(count))
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn op(name: u64, acts: &[Act]) -> Op {
    Op { name, acts: acts.to_vec(), ..Op::default() }
}

fn wait() -> Arc<AtomicU64> {
    Arc::default()
}

/// The names of operations, in the order in which they ended, with their connector.
#[derive(Default)]
struct Script {
    ended: Vec<(usize, u64)>,
    /// Every step: connector and operation.
    steps: Vec<(usize, u64)>,
    keep_steps: bool,
}

impl Work for Script {
    type Op = Op;
    type Error = String;

    fn progress(&mut self, connector: ConnectorId, op: &mut Op) -> std::result::Result<Progress, String> {
        if self.keep_steps {
            self.steps.push((connector.index(), op.name));
        }
        let Some(act) = op.acts.get(op.at) else {
            self.ended.push((connector.index(), op.name));
            return Ok(Progress::Done);
        };
        op.at += 1;
        match act {
            Act::Idle => return Ok(Progress::Idle),
            Act::Moved => {}
            Act::Fail(text) => return Err((*text).into()),
            Act::Panic(text) => panic!("{text}"),
            Act::Until(flag) => {
                if flag.load(Ordering::Acquire) == 0 {
                    op.at -= 1;
                    return Ok(Progress::Idle);
                }
            }
            Act::Block(here, flag) => {
                here.store(1, Ordering::Release);
                until("the step may go on", || flag.load(Ordering::Acquire) != 0);
            }
        }
        Ok(Progress::Moved)
    }

    fn describe(&self, _: ConnectorId, op: &Op, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "act {} of {}", op.at, op.acts.len())
    }
}

fn options(name: &str) -> Options {
    Options { name: name.into(), ..Options::default() }
}

fn stepped() -> Engine<Script> {
    Engine::stepped(Script { keep_steps: true, ..Script::default() }, options("stepped"))
}

fn threaded(name: &str) -> Engine<Script> {
    Engine::new(Script::default(), options(name)).unwrap()
}

/// Waits until what another thread does makes `holds` true.
#[track_caller]
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let from = Instant::now();
    while !holds() {
        assert!(from.elapsed() < TIMEOUT, "waited in vain until {what}");
        std::thread::yield_now();
    }
}

/// Steps until there is nothing to do.
fn drain(engine: &Engine<Script>) -> u64 {
    let mut steps = 0;
    while let Step::Stepped(_) = engine.step().unwrap() {
        steps += 1;
        assert!(steps < 1_000_000);
    }
    steps
}
