//! What a manager and its rendezvous have in common: how they wait, and how a receive ends. Any number of threads.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::base::clock;
use crate::base::error::Result;
use crate::base::log::{self, log_warn};
use crate::link::device::Device;
use crate::link::driver::{Driven, Driver};

use super::adapter::Mode;
use super::calls::{Answer, DueAnswer};
use super::core::Core;
use super::leaving::LostEnd;
use super::memory::{Memory, Pool, Release};
use super::value::Tensor;

/// Between two looks at what nothing wakes anybody for.
pub(super) const PAUSE: Duration = Duration::from_micros(200);

/// What the manager's parts share.
pub struct Shared {
    pub(super) device: Arc<Device>,
    pub(super) name: String,
    pub(super) others: Vec<String>,
    pub(super) driver: Arc<Driver<Core>>,
    pub(super) mode: Mode,
    pub(super) pool: Arc<Pool>,
    /// Who closes it, until nobody reads or writes any memory of this worker's.
    pub(super) closing: Mutex<()>,
}

impl Shared {
    /// Waits until `look` finds something, until then at most. It reports receives that take too long.
    pub(super) fn wait<T>(&self, deadline: u64, mut look: impl FnMut(&mut Core) -> Option<T>) -> Option<T> {
        let limit = self.device.config.stall_warn_s.nanos();
        self.driver.wait(|locked| {
            let core = locked.get_or_insert_with(|| self.driver.lock());
            // Under the lock, so that nothing comes between the look and the clock, which takes longer.
            let found = look(core);
            if found.is_some() {
                return Ok(found);
            }
            let now = clock::now();
            if now >= deadline {
                return Ok(None);
            }
            if core.has_failed() {
                // Nobody drives what is closed: this waits for one that writes to its memory.
                drop(locked.take());
                clock::sleep(PAUSE);
                return Err(deadline);
            }
            let (stalled, next) = if limit > 0 { core.stalled(now, limit) } else { (None, u64::MAX) };
            if let Some(stalled) = stalled {
                drop(locked.take());
                log_warn!(log::NET, "stalled: worker {} waited for {stalled}", self.name);
            }
            Err(deadline.min(next))
        })
    }

    /// Drops ends, and ends the receives whose memory their workers may write to. That waits for those who do, without the lock: be one stopped, it
    /// holds up nobody else.
    pub(super) fn drop_ends(&self, mut ends: Vec<LostEnd>) {
        while !ends.is_empty() {
            let quiet: Vec<LostEnd> = ends.extract_if(.., |end| !end.drop_waits()).collect();
            if quiet.is_empty() {
                clock::sleep(PAUSE);
            }
            for end in quiet {
                let exposed = end.drop();
                self.driver.with(|core| exposed.into_iter().for_each(|id| core.calls.returned(id)));
            }
        }
    }

    /// Does something after which tensors may be sent, and copies those that are to be copied, without the lock.
    pub(super) fn with<T>(&self, f: impl FnOnce(&mut Core) -> T) -> T {
        let result = self.driver.with(f);
        Core::work(&self.driver);
        result
    }

    /// The tensor of a receive that is over, in its memory if it has any. It is copied without the lock.
    pub(super) fn settle(&self, answer: Answer, into: Option<&Arc<Memory>>) -> Result<Tensor> {
        let mut poll = || self.driver.poll_once();
        match answer {
            Answer::Here(tensor) => match into {
                Some(into) => tensor.moved(into, &mut poll),
                None => Ok(tensor),
            },
            Answer::Failed(error) => Err(error),
            Answer::Landed { from, landed, is_shared } => {
                let (tensor, first) = match into {
                    Some(into) if !is_shared => (landed.copy_into(into, &mut poll), true),
                    _ => landed.copy(&mut poll),
                };
                if first {
                    self.driver.with(|core| core.consumed(from, &landed));
                }
                match into {
                    Some(into) => tensor?.moved(into, &mut poll),
                    None => tensor,
                }
            }
        }
    }

    /// How many calls to users are due.
    pub(super) fn due(&self, core: &Core) -> usize {
        core.calls.due() + self.pool.released()
    }

    /// The next one, for this thread to call at once.
    pub(super) fn next_due(&self, core: &mut Core) -> Option<Due> {
        let due = match self.pool.next_release() {
            Some(release) => Due::Release(release),
            None => Due::Answer(core.calls.next_due()?),
        };
        core.calls.calls();
        Some(due)
    }

    /// Calls it: whether a callback of the user's was run.
    pub(super) fn call(&self, due: Due) -> bool {
        // However it ends.
        let _called = Called(self);
        match due {
            Due::Release(release) => {
                release();
                true
            }
            Due::Answer(DueAnswer { callback, answer, into, .. }) => {
                let tensor = self.settle(answer, into.as_ref());
                // It is the user's again, but for the tensor.
                drop(into);
                callback(tensor)
            }
        }
    }
}

/// What a user is to be told.
pub(super) enum Due {
    /// The memory of a tensor is not needed any more.
    Release(Release),
    /// A receive is over.
    Answer(DueAnswer),
}

/// When so much time is over.
pub(super) fn deadline(timeout: Duration) -> u64 {
    clock::now().saturating_add(timeout.as_nanos().try_into().unwrap_or(u64::MAX))
}

/// A callback that is being called.
struct Called<'a>(&'a Shared);

impl Drop for Called<'_> {
    fn drop(&mut self) {
        self.0.driver.lock().calls.called();
    }
}
