//! The thread that moves the links of a driver on while nobody waits: what was asked may be waited for long after, and peers want answers. It sleeps
//! in the kernel, and leaves the links to whoever waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::base::log::{self, log_warn};
use crate::base::sync::lock;
use crate::base::thread::{self, Cpus};

/// How long links are left to those who may wait again at once.
const GRACE: Duration = Duration::from_millis(1);

/// Whom the thread helps: a driver.
pub trait BackgroundDriver: Send + Sync + 'static {
    /// Drives it once while nobody waits, asleep until something comes or somebody does. False: somebody does, or it is over.
    fn step_aside(&self) -> bool;

    /// Whether nobody waits: then there is nobody else to answer the peers.
    fn left_alone(&self) -> bool;
}

/// What a driver has of its thread.
#[derive(Default)]
pub struct Background {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Whether that is `Asleep`. Changed under its lock.
    is_asleep: AtomicBool,
    changed: Condvar,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    None,
    Asleep,
    Awake,
    Ended,
}

impl Background {
    /// Starts the thread, unless there is one. Without it, the links move on only while somebody waits.
    pub fn start(&self, name: &str, driver: &Arc<impl BackgroundDriver>) {
        let mut state = lock(&self.shared.state);
        if *state != State::None {
            return;
        }
        let (shared, driver) = (self.shared.clone(), Arc::downgrade(driver));
        match thread::spawn(name, &Cpus::default(), move || shared.run(&driver)) {
            Ok(thread) => {
                *state = State::Awake;
                *lock(&self.thread) = Some(thread);
            }
            Err(error) => log_warn!(log::NET, "{name}: no thread for what nobody waits for: {error}"),
        }
    }

    /// Nobody waits now, which was said under the lock that [`BackgroundDriver::left_alone`] takes.
    pub fn wake(&self) {
        // Either that lock was taken there before, after this was set, or it is taken after, and finds that nobody waits.
        if !self.shared.is_asleep.load(Ordering::Relaxed) {
            return;
        }
        let mut state = lock(&self.shared.state);
        if *state == State::Asleep {
            self.shared.set(&mut state, State::Awake);
            self.shared.changed.notify_all();
        }
    }

    /// Ends the thread, unless this is it. Whoever calls has woken it from its sleep.
    pub fn stop(&self) {
        self.shared.set(&mut lock(&self.shared.state), State::Ended);
        self.shared.changed.notify_all();
        if let Some(thread) = lock(&self.thread).take_if(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
impl Background {
    /// Whether it leaves the links to those who wait.
    pub fn is_asleep(&self) -> bool {
        *lock(&self.shared.state) == State::Asleep
    }
}

impl Shared {
    fn set(&self, state: &mut State, to: State) {
        *state = to;
        self.is_asleep.store(to == State::Asleep, Ordering::Relaxed);
    }

    fn run(&self, driver: &Weak<impl BackgroundDriver>) {
        loop {
            let mut state = lock(&self.state);
            while *state == State::Asleep {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            let (state, _) =
                self.changed.wait_timeout_while(state, GRACE, |state| *state != State::Ended).unwrap_or_else(PoisonError::into_inner);
            if *state == State::Ended {
                return;
            }
            drop(state);
            let Some(driver) = driver.upgrade() else { return };
            while driver.step_aside() {}
            let mut state = lock(&self.state);
            if *state == State::Awake {
                // Before the look: whoever stops waiting after it wakes this thread.
                self.set(&mut state, State::Asleep);
                if driver.left_alone() {
                    self.set(&mut state, State::Awake);
                }
            }
        }
    }
}
