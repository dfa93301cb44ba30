//! A device's own thread, under RAILHEAD_PROGRESS=thread: it moves comms and handshakes along while their callers do something else.
//!
//! A caller and the thread share what they move under a lock, which is almost always free: the thread does not wait for it, as a caller who has
//! it makes progress himself. Without the setting there is neither thread nor lock.
//!
//! Once nothing moves and no caller calls, the thread arms every queue that it watches over, drains it, and blocks on the device's descriptor until
//! something comes. A call may take away what would have woken it: so a caller who finds it blocked wakes it, and it arms anew once the calls cease.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::Duration;

use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::fork;
use crate::base::log::{self, log_warn};
use crate::base::thread::Cpus;
use crate::base::wakeup::{Wakeup, Woken};
use crate::engine::{ConnectorId, Engine, IdleAction, Options, Progress, Sleeper, Work};

use super::connect::PendingTable;
use super::listen::Listening;
use super::recv::Receiver;
use super::send::State;

/// How long the thread sleeps at a time while a handshake goes on that it cannot be woken for, or after it was woken for nothing.
const HANDSHAKE_NAP: Duration = Duration::from_millis(1);
/// How long it sleeps at a time while callers call: they make progress themselves, and to be woken by each would slow them down.
const CALLED_NAP: Duration = Duration::from_micros(200);
/// How long it sleeps at most while requests are outstanding: how late a silent peer is noticed.
const WATCH_NAP: Duration = Duration::from_secs(1);
/// How often the thread lets others run before it sleeps.
const YIELDS: u32 = 100;

/// Something that can be moved along without its caller.
pub trait Member: Send {
    /// Makes what progress there is to be made. Done: there never will be any more.
    fn step(&mut self) -> Progress;

    /// Asks to be woken for whatever may come, and then looks once more for what has come already.
    fn rest(&mut self, sleep: &mut Sleep) -> Progress;
}

/// What the thread is to wake for.
#[derive(Default)]
pub struct Sleep {
    fds: Vec<RawFd>,
    most: Option<Duration>,
    called: bool,
}

impl Sleep {
    /// It wakes when this is readable. Many may name one device's.
    pub fn watch(&mut self, fd: RawFd) {
        if !self.fds.contains(&fd) {
            self.fds.push(fd);
        }
    }

    /// It wakes when so much time is over.
    pub fn within(&mut self, most: Duration) {
        self.most = Some(self.most.map_or(most, |other| other.min(most)));
    }

    /// It looks again soon, as nothing would wake it for what goes on.
    pub fn nap(&mut self) {
        self.within(HANDSHAKE_NAP);
    }

    /// Requests are outstanding, whose age is looked at every `look` if that is set.
    pub fn with_requests(&mut self, look: Option<Duration>) {
        self.within(look.map_or(WATCH_NAP, |look| look.clamp(HANDSHAKE_NAP, WATCH_NAP)));
    }
}

/// What a caller and the thread share. What the caller has taken away is done with.
pub struct Attended<T> {
    value: Option<T>,
    /// The caller has called since the thread last thought of sleep.
    called: bool,
}

impl<T: Member> Member for Attended<T> {
    fn step(&mut self) -> Progress {
        self.value.as_mut().map_or(Progress::Done, T::step)
    }

    fn rest(&mut self, sleep: &mut Sleep) -> Progress {
        sleep.called |= std::mem::take(&mut self.called);
        if sleep.called {
            return Progress::Idle;
        }
        self.value.as_mut().map_or(Progress::Done, |value| value.rest(sleep))
    }
}

type Watched<T> = Weak<Mutex<T>>;

/// What the thread watches over, without keeping it alive.
pub enum Watch {
    /// A send comm.
    Send(Watched<Attended<State>>),
    /// A receive comm.
    Recv(Watched<Attended<Receiver>>),
    /// A listen comm.
    Listen(Watched<Attended<Listening>>),
    /// Connects in progress.
    Connects(Watched<PendingTable>),
}

/// The engine's client: each thing that it watches over is one operation, on a connector of its own.
struct Mover {
    idle: Arc<Mutex<Vec<ConnectorId>>>,
    bed: Arc<Bed>,
}

/// Where the thread sleeps.
#[derive(Debug)]
struct Bed {
    wakeup: Wakeup,
    /// Whoever calls is to wake the thread.
    wakes: AtomicBool,
    /// A descriptor ended the last sleep, and nothing has moved since: one that stays readable must not keep the thread awake.
    vain: AtomicBool,
    /// What else it watches in its next sleep.
    fds: Mutex<Vec<RawFd>>,
}

impl Bed {
    /// A caller's call is over.
    #[inline]
    fn called(&self) {
        // Set before the thread last had the lock that the caller has just given back, or the thread has yet to look at what he did.
        if self.wakes.load(Ordering::Relaxed) && self.wakes.swap(false, Ordering::Relaxed) {
            self.wakeup.notify();
        }
    }
}

impl Sleeper for Bed {
    fn sleep(&self, most: Option<Duration>) {
        let fds = std::mem::take(&mut *lock(&self.fds));
        let woken = self.wakeup.wait(&fds, most);
        self.vain.store(woken == Woken::Ready, Ordering::Relaxed);
        self.wakes.store(false, Ordering::Relaxed);
    }

    fn wake(&self) {
        self.wakeup.notify();
    }
}

impl Work for Mover {
    type Op = Watch;
    type Error = std::convert::Infallible;

    fn progress(&mut self, connector: ConnectorId, op: &mut Watch) -> std::result::Result<Progress, Self::Error> {
        let progress = match op {
            Watch::Send(comm) => with(comm, Member::step),
            Watch::Recv(comm) => with(comm, Member::step),
            Watch::Listen(comm) => with(comm, Member::step),
            Watch::Connects(table) => with(table, Member::step),
        };
        let progress = progress.unwrap_or(Progress::Idle);
        if progress != Progress::Idle {
            self.bed.vain.store(false, Ordering::Relaxed);
        }
        if progress == Progress::Done {
            lock(&self.idle).push(connector);
        }
        Ok(progress)
    }

    fn on_idle(&mut self, operations: &mut dyn Iterator<Item = &mut Watch>, _idle_sleep: Duration) -> IdleAction {
        // Before any lock is taken: whoever gets one behind this thread sees it.
        self.bed.wakes.store(true, Ordering::Relaxed);
        let mut sleep = Sleep::default();
        for op in operations {
            let rested = match op {
                Watch::Send(comm) => with(comm, |comm| comm.rest(&mut sleep)),
                Watch::Recv(comm) => with(comm, |comm| comm.rest(&mut sleep)),
                Watch::Listen(comm) => with(comm, |comm| comm.rest(&mut sleep)),
                Watch::Connects(table) => with(table, |table| table.rest(&mut sleep)),
            };
            match rested {
                Some(Progress::Idle) => {}
                // A caller has it.
                None => sleep.called = true,
                Some(Progress::Moved | Progress::Done) => {
                    self.bed.wakes.store(false, Ordering::Relaxed);
                    return IdleAction::Poll;
                }
            }
            if sleep.called {
                self.bed.wakes.store(false, Ordering::Relaxed);
                return IdleAction::SleepFor(CALLED_NAP);
            }
        }
        if self.bed.vain.swap(false, Ordering::Relaxed) {
            self.bed.wakes.store(false, Ordering::Relaxed);
            return IdleAction::SleepFor(HANDSHAKE_NAP);
        }
        *lock(&self.bed.fds) = sleep.fds;
        sleep.most.map_or(IdleAction::SleepUntilWoken, IdleAction::SleepFor)
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

/// `None`: its caller is at it.
fn with<T: Member>(watched: &Watched<T>, f: impl FnOnce(&mut T) -> Progress) -> Option<Progress> {
    let Some(shared) = watched.upgrade() else { return Some(Progress::Done) };
    match shared.try_lock() {
        Ok(mut member) => Some(f(&mut member)),
        Err(TryLockError::WouldBlock) => None,
        // Its caller panicked.
        Err(TryLockError::Poisoned(_)) => Some(Progress::Done),
    }
}

/// The thread of a device, which ends with the last that holds this: whoever has something that it watches over. Held by nothing that the thread
/// itself may be the last to drop, so that whoever closes the last comm waits for its end.
pub struct Background {
    engine: Engine<Mover>,
    idle: Arc<Mutex<Vec<ConnectorId>>>,
    bed: Arc<Bed>,
}

impl Background {
    /// Starts the thread of the device with this name.
    ///
    /// Errors: no thread to be had.
    pub fn start(config: &Config, device: &str) -> Result<Background> {
        let cpus = Cpus::parse(&config.proxy_cpuset).unwrap_or_default();
        let dump_signal = config.dump_signal.number();
        let bed =
            Arc::new(Bed { wakeup: Wakeup::new()?, wakes: AtomicBool::new(false), vain: AtomicBool::new(false), fds: Mutex::default() });
        let options = Options {
            name: format!("rh-{device}"),
            cpus,
            idle_sleep: HANDSHAKE_NAP,
            yields: YIELDS,
            dump_signal,
            sleeper: Some(bed.clone()),
            ..Options::default()
        };
        let idle = Arc::<Mutex<Vec<ConnectorId>>>::default();
        let engine = Engine::new(Mover { idle: idle.clone(), bed: bed.clone() }, options)?;
        Ok(Background { engine, idle, bed })
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

    /// Something that it watches over was touched by somebody else.
    #[inline]
    pub fn called(&self) {
        self.bed.called();
    }
}

/// What a caller and the device's thread have in common.
pub struct Guarded<T> {
    shared: Arc<Mutex<Attended<T>>>,
    epoch: u64,
    background: Arc<Background>,
}

impl<T> Guarded<T> {
    /// Shares `value` with the thread.
    pub fn new(value: T, background: Arc<Background>, watch: impl FnOnce(Watched<Attended<T>>) -> Watch) -> Guarded<T> {
        let shared = Arc::new(Mutex::new(Attended { value: Some(value), called: false }));
        background.watch(watch(Arc::downgrade(&shared)));
        Guarded { shared, epoch: fork::epoch(), background }
    }

    /// Runs `f` on it, after the thread's present step on it.
    ///
    /// Errors: a step on it panicked.
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> Result<R>) -> Result<R> {
        let result = match self.shared.lock() {
            Ok(mut attended) => {
                attended.called = true;
                attended.value.as_mut().map_or_else(|| Err(Error::internal("the comm is closed")), f)
            }
            Err(_) => Err(Error::internal("the comm broke in an earlier call, or in its device's thread")),
        };
        self.background.called();
        result
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
        let value = lock(&self.shared).value.take();
        drop(value);
        self.background.called();
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
