//! A timeout that has begun. Used by every wait of a store, on the waiting thread.

use std::time::Duration;

use crate::base::clock;

/// A moment, or never.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Option<u64>);

impl Deadline {
    /// So much time from now. A duration that the clock cannot hold, such as [`super::FOREVER`], is never.
    pub fn after(timeout: Duration) -> Self {
        Deadline(u64::try_from(timeout.as_nanos()).ok().and_then(|nanos| clock::now().checked_add(nanos)))
    }

    /// The time left: zero if the moment has passed, `None` if it never comes.
    pub fn left(self) -> Option<Duration> {
        self.0.map(|at| Duration::from_nanos(at.saturating_sub(clock::now())))
    }

    /// Whether the moment has passed.
    pub fn passed(self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }
}
