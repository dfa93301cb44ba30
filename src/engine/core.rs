//! What the engine's loop works on: the client, the list and its operations. Stepped by the engine's thread, or by a test without one; everyone
//! else looks at it only while the loop gives way.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::connectors::ConnectorId;
use super::door::Door;
use super::list::{List, NONE};
use super::{Connectors, Options, Posted, Progress, Rest, State, Work};
use crate::base::clock;

/// Laps between two looks at the clock, from which it is known since when an operation waits.
const LAPS_PER_LOOK: u64 = 64;

/// How often what has happened, ever; and what the loop is at. Written by the loop, read by anyone.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub steps: AtomicU64,
    pub done: AtomicU64,
    pub laps: AtomicU64,
    pub idle_laps: AtomicU64,
    pub yields: AtomicU64,
    pub sleeps: AtomicU64,
    /// The operation of the present or latest step.
    pub op_count: AtomicU64,
    pub connector: AtomicU64,
}

impl Counts {
    /// The loop is the only writer, so that this need not be one instruction.
    #[inline]
    pub fn add(counter: &AtomicU64) {
        counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }
}

/// An operation that was let go.
pub(super) struct Slot<Op> {
    /// `None` for a slot of the pool.
    pub op: Option<Op>,
    pub connector: ConnectorId,
    pub op_count: u64,
    pub state: State,
    /// Since when it is in this state.
    pub since: u64,
    /// Since when its steps find nothing to do; 0 if the latest one did.
    pub idle_since: u64,
}

pub(super) struct Core<W: Work> {
    pub work: W,
    pub list: List,
    /// By the list's numbers.
    pub slots: Vec<Slot<W::Op>>,
    /// What the door gave and the list has not.
    pub incoming: Vec<Posted<W::Op>>,
    /// The slot before the one whose turn it is.
    turn: u32,
    /// The slot of the latest step.
    at: u32,
    /// Whether every step of this lap was idle.
    idle: bool,
    laps: u64,
    /// Idle laps in a row, and yields in a row.
    idle_laps: u32,
    yields: u32,
    /// The time of the latest look at the clock.
    clock: u64,
    pub stopping: bool,
}

/// What one step came to.
pub(super) struct Stepped {
    pub progress: Progress,
    /// It ended a lap in which nothing moved.
    pub idle_lap: bool,
}

/// Why the loop pauses.
pub(super) enum Pause<E> {
    /// The bell has rung.
    Rung,
    /// There is nothing to do.
    Empty,
    /// There is, but nothing moves: for so long at most.
    Nap(Option<Duration>),
    /// An operation failed.
    Failed(E),
}

impl<W: Work> Core<W> {
    pub fn new(work: W) -> Self {
        Core {
            work,
            list: List::default(),
            slots: Vec::new(),
            incoming: Vec::new(),
            turn: NONE,
            at: NONE,
            idle: true,
            laps: 0,
            idle_laps: 0,
            yields: 0,
            clock: clock::now(),
            stopping: false,
        }
    }

    /// Puts what came in into the list.
    pub fn take_in(&mut self) {
        for Posted { connector, op_count, op, since } in self.incoming.drain(..) {
            let at = self.list.append(connector.number());
            let slot = Slot { op: Some(op), connector, op_count, state: State::Ready, since, idle_since: 0 };
            if at as usize == self.slots.len() {
                self.slots.push(slot);
            } else {
                self.slots[at as usize] = slot;
            }
            if self.list.len() == 1 {
                (self.turn, self.idle) = (at, true);
            }
        }
        (self.idle_laps, self.yields) = (0, 0);
    }

    /// Makes progress on the operation whose turn it is. There is one.
    #[inline]
    pub fn step(&mut self, door: &Door<Posted<W::Op>, Connectors>, counts: &Counts) -> Result<Stepped, W::Error> {
        let at = self.list.next(self.turn);
        let slot = &mut self.slots[at as usize];
        self.at = at;
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
                self.turn = at;
            }
            Progress::Moved => {
                (slot.idle_since, self.idle) = (0, false);
                self.turn = at;
            }
            Progress::Done => {
                (slot.state, self.idle) = (State::None, false);
                slot.op = None;
                self.turn = self.list.remove_next(self.turn);
                Counts::add(&counts.done);
                door.finish(1);
            }
        }
        let lap = self.turn == NONE || self.list.next(self.turn) == self.list.ops();
        Ok(Stepped { progress, idle_lap: lap && self.end_lap(counts) })
    }

    /// Whether nothing moved in it.
    #[inline]
    fn end_lap(&mut self, counts: &Counts) -> bool {
        self.laps = self.laps.wrapping_add(1);
        if self.laps.is_multiple_of(LAPS_PER_LOOK) {
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

    /// Goes on until there is a reason to pause.
    pub fn run(&mut self, door: &Door<Posted<W::Op>, Connectors>, counts: &Counts, options: &Options) -> Pause<W::Error> {
        loop {
            if door.has_rung() {
                return Pause::Rung;
            }
            if self.list.is_empty() {
                return Pause::Empty;
            }
            match self.step(door, counts) {
                Ok(stepped) if !stepped.idle_lap => {}
                Ok(_) => {
                    self.idle_laps += 1;
                    if self.idle_laps >= options.idle_laps {
                        self.idle_laps = 0;
                        self.clock = clock::now();
                        if !options.nap.is_zero() && self.yields >= options.yields {
                            let mut operations = self.slots.iter_mut().filter_map(|slot| slot.op.as_mut());
                            match self.work.rest(&mut operations, options.nap) {
                                Rest::Awake => continue,
                                Rest::For(most) => return Pause::Nap(Some(most)),
                                Rest::UntilWoken => return Pause::Nap(None),
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
        self.slots.get(self.at as usize).map(|slot| (slot.connector, slot.op_count))
    }
}
