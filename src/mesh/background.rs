//! The thread that moves a mesh on while nobody waits for what is outstanding: the sends and receives of buffers, which may be asked for long before
//! they are waited for. It is started by the first of them, and sleeps unless there are such.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::base::log::{self, log_warn};
use crate::base::sync::lock;
use crate::base::thread::{self, Cpus};

use super::context::Mesh;

/// How long what is asked for is left to those who may wait for it at once.
const GRACE: Duration = Duration::from_millis(1);

/// What a mesh has of its thread.
#[derive(Default)]
pub struct Background {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
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
    /// There may be something to do.
    pub fn wake(&self, mesh: &Arc<Mesh>) {
        let mut state = lock(&self.shared.state);
        match *state {
            State::None => {
                let (shared, mesh) = (self.shared.clone(), Arc::downgrade(mesh));
                match thread::spawn("rh-mesh", &Cpus::default(), move || shared.run(&mesh)) {
                    Ok(thread) => {
                        *state = State::Awake;
                        *lock(&self.thread) = Some(thread);
                    }
                    Err(error) => log_warn!(log::NET, "mesh: no thread for what nobody waits for: {error}"),
                }
            }
            State::Asleep => self.shared.wakes(state),
            State::Awake | State::Ended => {}
        }
    }

    /// The same, of a thread that was started.
    pub fn wake_if_started(&self) {
        let state = lock(&self.shared.state);
        if *state == State::Asleep {
            self.shared.wakes(state);
        }
    }

    /// Ends the thread, unless this is it. Whoever calls has woken it from the mesh's descriptor.
    pub fn stop(&self) {
        *lock(&self.shared.state) = State::Ended;
        self.shared.changed.notify_all();
        if let Some(thread) = lock(&self.thread).take_if(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn wakes(&self, mut state: MutexGuard<'_, State>) {
        *state = State::Awake;
        self.changed.notify_all();
    }

    fn run(&self, mesh: &Weak<Mesh>) {
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
            let Some(mesh) = mesh.upgrade() else { return };
            while mesh.step_aside() {}
            let mut state = lock(&self.state);
            if *state == State::Awake {
                // Before the look: whoever asks for something after it wakes this thread.
                *state = State::Asleep;
                if mesh.left_alone() {
                    *state = State::Awake;
                }
            }
        }
    }
}
