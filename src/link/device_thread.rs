//! A device's own thread: it polls links and handshakes ([`Member`]s) while their callers do something else. Under RAILHEAD_PROGRESS=thread all of
//! them; else, and rarely, only those that a peer may need whose rail has failed ([`Member::answer`]).
//!
//! A caller and the thread share a member under a lock, which is almost always free: the thread does not wait for it, as a caller who has it makes
//! progress himself. Where a member needs no thread there is neither thread nor lock ([`Polled`]).
//!
//! Once nothing moves and no caller calls, the thread arms the queues of all members, drains them, and blocks on the device's descriptor until
//! something comes. A call may take away what would have woken it: so a caller who finds it blocked wakes it, and it arms anew once the calls cease.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, TryLockError, Weak};
use std::time::Duration;

use crate::base::config::{self, Config};
use crate::base::error::{Error, Result};
use crate::base::fork;
use crate::base::log::{self, log_warn};
use crate::base::sync::lock;
use crate::base::thread::Cpus;
use crate::base::wakeup::{Wakeup, Woken};
use crate::engine::{ConnectorId, Engine, IdleAction, Options, Progress, Sleeper, Work};

/// How long the thread sleeps at a time while a handshake goes on that it cannot be woken for, or after it was woken for nothing.
const HANDSHAKE_POLL: Duration = Duration::from_millis(1);
/// How long it sleeps at a time while callers call: they make progress themselves, and to be woken by each would slow them down.
const CALLED_POLL: Duration = Duration::from_micros(200);
/// How long a member is left alone before it is polled for its peer's sake.
const ANSWER_POLL: Duration = Duration::from_millis(250);
/// Polls after which a peer was heard: a socket that was empty for long is read in one of 64 (`fabric::soft::tcp`).
const ANSWER_POLLS: usize = 64;
/// How long it sleeps at most while requests are outstanding: how late a silent peer is noticed.
const REQUEST_POLL: Duration = Duration::from_secs(1);
/// How often the thread lets others run before it sleeps.
const YIELDS: u32 = 100;

/// What the thread polls, beside or instead of its caller.
pub trait Member: Send {
    /// Makes what progress there is to be made. Done: there never will be any more.
    fn poll(&mut self) -> Progress;

    /// Asks to be woken for whatever may come, and then drains what has come already.
    fn arm(&mut self, wait: &mut WaitSet) -> Progress;

    /// Looks at its rails, which a peer may need though the caller waits for nothing. `Some`: how soon that has to be done again.
    fn look_at_rails(&mut self) -> Option<Duration> {
        None
    }

    /// Polls as often as it takes to find what the peer has said.
    fn answer(&mut self) -> Progress {
        let moved = (0..ANSWER_POLLS).map(|_| self.poll()).find(|progress| *progress != Progress::Idle);
        if moved.is_none() {
            self.look_at_rails();
        }
        moved.unwrap_or(Progress::Idle)
    }
}

/// What the thread is to wake for.
#[derive(Default)]
pub struct WaitSet {
    fds: Vec<RawFd>,
    timeout: Option<Duration>,
    called: bool,
}

impl WaitSet {
    /// It wakes when this is readable. Many may name one device's.
    pub fn add(&mut self, fd: RawFd) {
        if !self.fds.contains(&fd) {
            self.fds.push(fd);
        }
    }

    /// It wakes when so much time is over, at the latest.
    pub fn within(&mut self, timeout: Duration) {
        self.timeout = Some(self.timeout.map_or(timeout, |other| other.min(timeout)));
    }

    /// It polls again soon, as nothing would wake it for what goes on.
    pub fn poll_soon(&mut self) {
        self.within(HANDSHAKE_POLL);
    }

    /// Requests are outstanding, whose age is checked every `look` if that is set.
    pub fn with_requests(&mut self, look: Option<Duration>) {
        self.within(look.map_or(REQUEST_POLL, |look| look.clamp(HANDSHAKE_POLL, REQUEST_POLL)));
    }
}

/// A member that its caller shares with the thread, until it is closed.
struct SharedMember<T> {
    value: Option<T>,
    /// The caller has called since the thread last thought of sleep.
    called: bool,
    /// The thread only answers peers.
    only_answers: bool,
    /// The caller did not call between its last two sleeps.
    is_left: bool,
}

impl<T: Member> Member for SharedMember<T> {
    fn poll(&mut self) -> Progress {
        match &mut self.value {
            None => Progress::Done,
            Some(value) if !self.only_answers => value.poll(),
            Some(value) if self.is_left && !self.called => value.answer(),
            Some(_) => Progress::Idle,
        }
    }

    fn arm(&mut self, wait: &mut WaitSet) -> Progress {
        let called = std::mem::take(&mut self.called);
        if self.only_answers {
            self.is_left = !called;
            let Some(value) = &mut self.value else { return Progress::Done };
            wait.within(if self.is_left { value.look_at_rails().unwrap_or(ANSWER_POLL) } else { ANSWER_POLL });
            return Progress::Idle;
        }
        wait.called |= called;
        if wait.called {
            return Progress::Idle;
        }
        self.value.as_mut().map_or(Progress::Done, |value| value.arm(wait))
    }
}

/// A member as the thread has it: it does not keep it alive.
struct Watched {
    what: &'static str,
    member: Weak<Mutex<dyn Member>>,
}

impl Watched {
    /// `None`: its caller is at it.
    fn with(&self, f: impl FnOnce(&mut dyn Member) -> Progress) -> Option<Progress> {
        let Some(shared) = self.member.upgrade() else { return Some(Progress::Done) };
        match shared.try_lock() {
            Ok(mut member) => Some(f(&mut *member)),
            Err(TryLockError::WouldBlock) => None,
            // Its caller panicked.
            Err(TryLockError::Poisoned(_)) => Some(Progress::Done),
        }
    }
}

/// The engine's client: each member is one operation, on a connector of its own.
struct Members {
    idle: Arc<Mutex<Vec<ConnectorId>>>,
    parking: Arc<Parking>,
    only_answers: bool,
}

/// Where the thread sleeps.
#[derive(Debug)]
struct Parking {
    wakeup: Wakeup,
    /// Whoever calls is to wake the thread.
    wakes: AtomicBool,
    /// A descriptor ended the last sleep, and nothing has moved since: one that stays readable must not keep the thread awake.
    vain: AtomicBool,
    /// What else it watches in its next sleep.
    fds: Mutex<Vec<RawFd>>,
}

impl Parking {
    /// A caller's call is over.
    #[inline]
    fn called(&self) {
        // Set before the thread last had the lock that the caller has just given back, or the thread has yet to see what the caller did.
        if self.wakes.load(Ordering::Relaxed) && self.wakes.swap(false, Ordering::Relaxed) {
            self.wakeup.notify();
        }
    }
}

impl Sleeper for Parking {
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

impl Work for Members {
    type Op = Watched;
    type Error = std::convert::Infallible;

    fn progress(&mut self, connector: ConnectorId, op: &mut Watched) -> std::result::Result<Progress, Self::Error> {
        let progress = op.with(|member| member.poll());
        let progress = progress.unwrap_or(Progress::Idle);
        if progress != Progress::Idle {
            self.parking.vain.store(false, Ordering::Relaxed);
        }
        if progress == Progress::Done {
            lock(&self.idle).push(connector);
        }
        Ok(progress)
    }

    fn on_idle(&mut self, operations: &mut dyn Iterator<Item = &mut Watched>, _idle_sleep: Duration) -> IdleAction {
        // Before any lock is taken: whoever gets one after this thread sees it.
        self.parking.wakes.store(true, Ordering::Relaxed);
        let mut wait = WaitSet::default();
        for op in operations {
            match op.with(|member| member.arm(&mut wait)) {
                Some(Progress::Idle) => {}
                // A caller has it.
                None if self.only_answers => wait.within(ANSWER_POLL),
                None => wait.called = true,
                Some(Progress::Moved | Progress::Done) => {
                    self.parking.wakes.store(false, Ordering::Relaxed);
                    return IdleAction::Poll;
                }
            }
            if wait.called {
                self.parking.wakes.store(false, Ordering::Relaxed);
                return IdleAction::SleepFor(CALLED_POLL);
            }
        }
        if self.parking.vain.swap(false, Ordering::Relaxed) {
            self.parking.wakes.store(false, Ordering::Relaxed);
            return IdleAction::SleepFor(HANDSHAKE_POLL);
        }
        *lock(&self.parking.fds) = wait.fds;
        wait.timeout.map_or(IdleAction::SleepUntilWoken, IdleAction::SleepFor)
    }

    fn describe(&self, _connector: ConnectorId, op: &Watched, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(op.what)
    }
}

/// The thread of a device, which ends with the last that holds this: whoever has something that it watches over. Held by nothing that the thread
/// itself may be the last to drop, so that whoever closes the last comm waits for its end.
pub struct ProgressThread {
    engine: Engine<Members>,
    idle: Arc<Mutex<Vec<ConnectorId>>>,
    parking: Arc<Parking>,
    only_answers: bool,
}

impl ProgressThread {
    /// Starts the thread of the device with this name.
    ///
    /// Errors: no thread to be had.
    pub fn start(config: &Config, device: &str) -> Result<ProgressThread> {
        let cpus = Cpus::parse(&config.proxy_cpuset).unwrap_or_default();
        let dump_signal = config.dump_signal.number();
        let parking = Arc::new(Parking {
            wakeup: Wakeup::new()?,
            wakes: AtomicBool::new(false),
            vain: AtomicBool::new(false),
            fds: Mutex::default(),
        });
        let only_answers = config.progress != config::Progress::Thread;
        let (idle_laps, yields) = if only_answers { (1, 0) } else { (Options::default().idle_laps, YIELDS) };
        let options = Options {
            name: format!("rh-{device}"),
            cpus,
            idle_laps,
            idle_sleep: HANDSHAKE_POLL,
            yields,
            dump_signal,
            sleeper: Some(parking.clone()),
            ..Options::default()
        };
        let idle = Arc::<Mutex<Vec<ConnectorId>>>::default();
        let engine = Engine::new(Members { idle: idle.clone(), parking: parking.clone(), only_answers }, options)?;
        Ok(ProgressThread { engine, idle, parking, only_answers })
    }

    /// Polls `member`, which is `what`, until it is done or gone.
    pub fn watch<T: Member + 'static>(&self, what: &'static str, member: &Arc<Mutex<T>>) {
        let member: Weak<Mutex<T>> = Arc::downgrade(member);
        let watched = Watched { what, member };
        let free = lock(&self.idle).pop();
        let connector = free.map_or_else(|| self.engine.add_connector(), Ok);
        let appended = connector.and_then(|connector| self.engine.append(connector, watched)).and_then(|_| self.engine.start());
        if let Err(refusal) = appended {
            // Its caller still makes progress.
            log_warn!(log::NET, "a comm is not moved along in the background: {refusal}");
        }
    }

    /// Something that it watches over was touched by somebody else.
    #[inline]
    pub fn called(&self) {
        if !self.only_answers {
            self.parking.called();
        }
    }
}

/// A member that is polled by its caller alone, or by the device's thread too.
// There is one per comm, and most are of the first kind, which is not to be reached by a detour.
#[allow(clippy::large_enum_variant)]
pub enum Polled<T: Member> {
    /// The caller alone.
    ByCaller(T),
    /// And the device's thread.
    ByThreadToo(Guarded<T>),
}

impl<T: Member + 'static> Polled<T> {
    /// Of `value`, which is `what`; shared if there is a thread.
    pub fn new(value: T, what: &'static str, thread: Option<Arc<ProgressThread>>) -> Polled<T> {
        match thread {
            None => Polled::ByCaller(value),
            Some(thread) => Polled::ByThreadToo(Guarded::new(value, what, thread)),
        }
    }

    /// Runs `f` on it, after the thread's present step on it.
    ///
    /// Errors: of `f`; a step on it panicked.
    #[inline(always)]
    pub fn with<R>(&mut self, f: impl FnOnce(&mut T) -> Result<R>) -> Result<R> {
        match self {
            Polled::ByCaller(value) => f(value),
            Polled::ByThreadToo(shared) => shared.with(f),
        }
    }
}

/// What a caller and the device's thread share.
pub struct Guarded<T> {
    shared: Arc<Mutex<SharedMember<T>>>,
    epoch: u64,
    thread: Arc<ProgressThread>,
}

impl<T: Member + 'static> Guarded<T> {
    fn new(value: T, what: &'static str, thread: Arc<ProgressThread>) -> Guarded<T> {
        let shared =
            Arc::new(Mutex::new(SharedMember { value: Some(value), called: false, only_answers: thread.only_answers, is_left: false }));
        thread.watch(what, &shared);
        Guarded { shared, epoch: fork::epoch(), thread }
    }

    /// Runs `f` on it, after the thread's present step on it.
    ///
    /// Errors: of `f`; a step on it panicked.
    #[inline(never)]
    pub fn with<R>(&self, f: impl FnOnce(&mut T) -> Result<R>) -> Result<R> {
        let result = match self.shared.lock() {
            Ok(mut shared) => {
                shared.called = true;
                shared.value.as_mut().map_or_else(|| Err(Error::internal("the comm is closed")), f)
            }
            Err(_) => Err(Error::internal("the comm broke in an earlier call, or in its device's thread")),
        };
        self.thread.called();
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
        self.thread.parking.called();
    }
}
