//! The engine's loop: steps one operation after the other, until there is a reason to pause. Run by the engine's thread, or step by step by a test;
//! other threads use it only while that thread has released its lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::connectors::ConnectorId;
use super::list::{List, NONE};
use super::{IdleAction, Options, Progress, Queue, State, Submitted, Work};
use crate::base::clock;

/// Laps between two reads of the clock, which tells since when an operation is idle.
const LAPS_PER_CLOCK_READ: u64 = 64;

/// The counters behind [`super::Counters`], and the operation of the latest step. Written by the loop, read by any thread.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub steps: AtomicU64,
    pub done: AtomicU64,
    pub laps: AtomicU64,
    pub idle_laps: AtomicU64,
    pub yields: AtomicU64,
    pub sleeps: AtomicU64,
    /// opCount and connector of the present or latest step.
    pub op_count: AtomicU64,
    pub connector: AtomicU64,
}

impl Counts {
    /// A load and a store, not one atomic instruction: the loop is the only writer.
    #[inline]
    pub fn add(counter: &AtomicU64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

/// An operation that was started.
pub(super) struct Slot<Op> {
    /// `None` for a slot of the pool.
    pub op: Option<Op>,
    pub connector: ConnectorId,
    pub op_count: u64,
    pub state: State,
    /// Since when it is in this state.
    pub since: u64,
    /// Since when its steps find nothing to do; 0 if the latest one moved something.
    pub idle_since: u64,
}

/// The client, its operations and their order.
pub(super) struct Scheduler<W: Work> {
    pub work: W,
    pub list: List,
    /// By the list's numbers.
    pub slots: Vec<Slot<W::Op>>,
    /// Collected from the queue and not in the list yet.
    pub incoming: Vec<Submitted<W::Op>>,
    /// The slot before the one that is stepped next.
    before_next: u32,
    /// The slot of the latest step.
    latest: u32,
    /// Whether every step of this lap was idle.
    idle: bool,
    laps: u64,
    /// Idle laps in a row, and yields in a row.
    idle_laps: u32,
    yields: u32,
    /// The time when the clock was last read.
    clock: u64,
    pub stopping: bool,
}

/// What one step did.
pub(super) struct Stepped {
    pub progress: Progress,
    /// It was the last of a lap in which nothing moved.
    pub idle_lap: bool,
}

/// Why the loop pauses.
pub(super) enum Pause<E> {
    /// There is something to collect from the queue.
    Notified,
    /// There are no operations.
    Empty,
    /// No operation moves: sleep for so long at most, or until woken.
    Sleep(Option<Duration>),
    /// An operation failed.
    Failed(E),
}

impl<W: Work> Scheduler<W> {
    pub fn new(work: W) -> Self {
        Scheduler {
            work,
            list: List::default(),
            slots: Vec::new(),
            incoming: Vec::new(),
            before_next: NONE,
            latest: NONE,
            idle: true,
            laps: 0,
            idle_laps: 0,
            yields: 0,
            clock: clock::now(),
            stopping: false,
        }
    }

    /// Puts the collected operations into the list.
    pub fn add_incoming(&mut self) {
        for Submitted { connector, op_count, op, since } in self.incoming.drain(..) {
            let at = self.list.append(connector.number());
            let slot = Slot { op: Some(op), connector, op_count, state: State::Ready, since, idle_since: 0 };
            if at as usize == self.slots.len() {
                self.slots.push(slot);
            } else {
                self.slots[at as usize] = slot;
            }
            if self.list.len() == 1 {
                (self.before_next, self.idle) = (at, true);
            }
        }
        (self.idle_laps, self.yields) = (0, 0);
    }

    /// Steps the next operation. There must be one.
    #[inline]
    pub fn step(&mut self, queue: &Queue<W>, counts: &Counts) -> Result<Stepped, W::Error> {
        let at = self.list.next(self.before_next);
        let slot = &mut self.slots[at as usize];
        self.latest = at;
        Counts::add(&counts.steps);
        counts.op_count.store(slot.op_count, Ordering::Relaxed);
        counts.connector.store(slot.connector.number().into(), Ordering::Relaxed);
        if slot.state == State::Ready {
            (slot.state, slot.since) = (State::Progress, clock::now());
        }
        let progress = match &mut slot.op {
            Some(op) => self.work.progress(slot.connector, op)?,
            None => Progress::Done,
        };
        match progress {
            Progress::Idle => {
                if slot.idle_since == 0 {
                    slot.idle_since = self.clock;
                }
                self.before_next = at;
            }
            Progress::Moved => {
                (slot.idle_since, self.idle) = (0, false);
                self.before_next = at;
            }
            Progress::Done => {
                (slot.state, self.idle) = (State::None, false);
                slot.op = None;
                self.before_next = self.list.remove_next(self.before_next);
                Counts::add(&counts.done);
                queue.finish(1);
            }
        }
        let lap = self.before_next == NONE || self.list.next(self.before_next) == self.list.ops();
        Ok(Stepped { progress, idle_lap: lap && self.end_lap(counts) })
    }

    /// Counts a lap; whether nothing moved in it.
    #[inline]
    fn end_lap(&mut self, counts: &Counts) -> bool {
        self.laps = self.laps.wrapping_add(1);
        if self.laps.is_multiple_of(LAPS_PER_CLOCK_READ) {
            self.clock = clock::now();
        }
        Counts::add(&counts.laps);
        let idle = std::mem::replace(&mut self.idle, true);
        if idle {
            Counts::add(&counts.idle_laps);
        } else {
            (self.idle_laps, self.yields) = (0, 0);
        }
        idle
    }

    /// Steps operations until there is a reason to pause.
    pub fn run(&mut self, queue: &Queue<W>, counts: &Counts, options: &Options) -> Pause<W::Error> {
        loop {
            if queue.is_notified() {
                return Pause::Notified;
            }
            if self.list.is_empty() {
                return Pause::Empty;
            }
            match self.step(queue, counts) {
                Ok(stepped) if !stepped.idle_lap => {}
                Ok(_) => {
                    self.idle_laps += 1;
                    if self.idle_laps >= options.idle_laps {
                        self.idle_laps = 0;
                        self.clock = clock::now();
                        if !options.idle_sleep.is_zero() && self.yields >= options.yields {
                            let mut operations = self.slots.iter_mut().filter_map(|slot| slot.op.as_mut());
                            match self.work.on_idle(&mut operations, options.idle_sleep) {
                                IdleAction::Poll => continue,
                                IdleAction::SleepFor(timeout) => return Pause::Sleep(Some(timeout)),
                                IdleAction::SleepUntilWoken => return Pause::Sleep(None),
                            }
                        }
                        self.yields = self.yields.saturating_add(1);
                        Counts::add(&counts.yields);
                        std::thread::yield_now();
                    }
                }
                Err(error) => return Pause::Failed(error),
            }
        }
    }

    /// Connector and opCount of the latest step.
    pub fn latest(&self) -> Option<(ConnectorId, u64)> {
        self.slots.get(self.latest as usize).map(|slot| (slot.connector, slot.op_count))
    }
}
