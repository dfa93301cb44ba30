//! The thread that moves a mesh on while nobody waits: what was asked of its buffers may be waited for long after, and other ranks that close theirs
//! want answers. It is started by the first buffer; it sleeps in the kernel, and leaves the mesh to whoever waits.

use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::base::log::{self, log_warn};
use crate::base::sync::lock;
use crate::base::thread::{self, Cpus};

use super::context::Context;

/// How long a mesh is left to those who may wait for it again at once.
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
    /// Starts the thread, unless there is one. Without it, a mesh moves on only while somebody waits.
    pub fn start(&self, mesh: &Arc<Context>) {
        let mut state = lock(&self.shared.state);
        if *state != State::None {
            return;
        }
        let (shared, mesh) = (self.shared.clone(), Arc::downgrade(mesh));
        match thread::spawn("rh-mesh", &Cpus::default(), move || shared.run(&mesh)) {
            Ok(thread) => {
                *state = State::Awake;
                *lock(&self.thread) = Some(thread);
            }
            Err(error) => log_warn!(log::NET, "mesh: no thread for what nobody waits for: {error}"),
        }
    }

    /// Nobody waits for the mesh now.
    pub fn wake(&self) {
        let mut state = lock(&self.shared.state);
        if *state == State::Asleep {
            *state = State::Awake;
            self.shared.changed.notify_all();
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
    fn run(&self, mesh: &Weak<Context>) {
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
                // Before the look: whoever stops waiting after it wakes this thread.
                *state = State::Asleep;
                if mesh.left_alone() {
                    *state = State::Awake;
                }
            }
        }
    }
}
