//! A device's own thread, under RAILHEAD_PROGRESS=thread: it moves comms and handshakes along while their callers do something else.
//!
//! A caller and the thread share what they move under a lock, which is almost always free: the thread does not wait for it, as a caller who has
//! it makes progress himself. Without the setting there is neither thread nor lock.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Duration;

use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::fork;
use crate::base::log::{self, log_warn};
use crate::base::thread::Cpus;
use crate::engine::{ConnectorId, Engine, Options, Progress, Work};

use super::connect::PendingTable;
use super::listen::Listening;
use super::recv::Receiver;
use super::send::State;

/// How long the thread sleeps at a time while nothing moves. A caller who polls does not wait for it.
const NAP: Duration = Duration::from_millis(1);
/// How often the thread lets others run before it sleeps.
const YIELDS: u32 = 100;

/// Something that can be moved along without its caller.
pub trait Member: Send {
    /// Makes what progress there is to be made. Done: there never will be any more.
    fn step(&mut self) -> Progress;
}

/// What a caller has taken away is done with.
impl<T: Member> Member for Option<T> {
    fn step(&mut self) -> Progress {
        self.as_mut().map_or(Progress::Done, T::step)
    }
}

type Watched<T> = Weak<Mutex<T>>;

/// What the thread watches over, without keeping it alive.
pub enum Watch {
    /// A send comm.
    Send(Watched<Option<State>>),
    /// A receive comm.
    Recv(Watched<Option<Receiver>>),
    /// A listen comm.
    Listen(Watched<Option<Listening>>),
    /// Connects in progress.
    Connects(Watched<PendingTable>),
}

/// The engine's client: each thing that it watches over is one operation, on a connector of its own.
struct Mover {
    idle: Arc<Mutex<Vec<ConnectorId>>>,
}

impl Work for Mover {
    type Op = Watch;
    type Error = std::convert::Infallible;

    fn progress(&mut self, connector: ConnectorId, op: &mut Watch) -> std::result::Result<Progress, Self::Error> {
        let progress = match op {
            Watch::Send(comm) => step(comm),
            Watch::Recv(comm) => step(comm),
            Watch::Listen(comm) => step(comm),
            Watch::Connects(table) => step(table),
        };
        if progress == Progress::Done {
            lock(&self.idle).push(connector);
        }
        Ok(progress)
    }

    fn describe(&self, _connector: ConnectorId, op: &Watch, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match op {
            Watch::Send(_) => "a send comm",
            Watch::Recv(_) => "a receive comm",
            Watch::Listen(_) => "a listen comm",
            Watch::Connects(_) => "connects in progress",
        })
    }
}

fn step<T: Member>(watched: &Watched<T>) -> Progress {
    let Some(shared) = watched.upgrade() else { return Progress::Done };
    match shared.try_lock() {
        Ok(mut member) => member.step(),
        Err(TryLockError::WouldBlock) => Progress::Idle,
        // Its caller panicked.
        Err(TryLockError::Poisoned(_)) => Progress::Done,
    }
}

/// The thread of a device, which ends with the last that holds this: whoever has something that it watches over. Held by nothing that the thread
/// itself may be the last to drop, so that whoever closes the last comm waits for its end.
pub struct Background {
    engine: Engine<Mover>,
    idle: Arc<Mutex<Vec<ConnectorId>>>,
}

impl Background {
    /// Starts the thread of the device with this name.
    ///
    /// Errors: no thread to be had.
    pub fn start(config: &Config, device: &str) -> Result<Background> {
        let cpus = Cpus::parse(&config.proxy_cpuset).unwrap_or_default();
        let dump_signal = config.dump_signal.number();
        let options = Options { name: format!("rh-{device}"), cpus, nap: NAP, yields: YIELDS, dump_signal, ..Options::default() };
        let idle = Arc::<Mutex<Vec<ConnectorId>>>::default();
        let engine = Engine::new(Mover { idle: idle.clone() }, options)?;
        Ok(Background { engine, idle })
    }

    /// Watches over something until it is done or gone.
    pub fn watch(&self, watch: Watch) {
        let free = lock(&self.idle).pop();
        let connector = free.map_or_else(|| self.engine.add_connector(), Ok);
        let watched = connector.and_then(|connector| self.engine.append(connector, watch)).and_then(|_| self.engine.start());
        if let Err(refusal) = watched {
            // Its caller still makes progress.
            log_warn!(log::NET, "a comm is not moved along in the background: {refusal}");
        }
    }
}

/// What a caller and the device's thread have in common.
pub struct Guarded<T> {
    shared: Arc<Mutex<Option<T>>>,
    epoch: u64,
    _background: Arc<Background>,
}

impl<T> Guarded<T> {
    /// Shares `value` with the thread.
    pub fn new(value: T, background: Arc<Background>, watch: impl FnOnce(Watched<Option<T>>) -> Watch) -> Guarded<T> {
        let shared = Arc::new(Mutex::new(Some(value)));
        background.watch(watch(Arc::downgrade(&shared)));
        Guarded { shared, epoch: fork::epoch(), _background: background }
    }

    /// Runs `f` on it, after the thread's present step on it.
    ///
    /// Errors: a step on it panicked.
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> Result<R>) -> Result<R> {
        match self.shared.lock() {
            Ok(mut value) => value.as_mut().map_or_else(|| Err(Error::internal("the comm is closed")), f),
            Err(_) => Err(Error::internal("the comm broke in an earlier call, or in its device's thread")),
        }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        if self.epoch != fork::epoch() {
            // The lock may be held by a thread of the parent, and what is under it is the parent's.
            std::mem::forget(self.shared.clone());
            return;
        }
        // Dropped here and not by the thread: once a comm is closed, nothing touches its caller's memory.
        let value = lock(&self.shared).take();
        drop(value);
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
