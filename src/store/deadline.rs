//! A timeout that is running. Used by every wait of a store, on the waiting thread.

use std::time::Duration;

use crate::base::clock;

/// By how much an operation may miss its deadline, for a reply that is on its way, or a lock that is about to be released. Together with the time to
/// return it is at most 100 ms.
pub const GRACE: Duration = Duration::from_millis(80);

/// A moment, or never.
#[derive(Debug, Clone, Copy)]
pub struct Deadline(Option<u64>);

impl Deadline {
    /// A moment of which nobody is in time.
    #[cfg(test)]
    pub const LONG_PAST: Deadline = Deadline(Some(0));

    /// The given time from now. A duration that the clock cannot hold, such as [`super::FOREVER`], is never.
    pub fn after(timeout: Duration) -> Self {
        Deadline(u64::try_from(timeout.as_nanos()).ok().and_then(|nanos| clock::now().checked_add(nanos)))
    }

    /// The time left: zero if the moment has passed, `None` if it never comes.
    pub fn left(self) -> Option<Duration> {
        self.0.map(|at| Duration::from_nanos(at.saturating_sub(clock::now())))
    }

    /// The earlier of this and the given time from now.
    pub fn within(self, timeout: Duration) -> Self {
        match (self.0, Deadline::after(timeout).0) {
            (Some(own), Some(other)) => Deadline(Some(own.min(other))),
            (own, other) => Deadline(own.or(other)),
        }
    }

    /// The last moment at which an operation with this deadline returns.
    pub fn grace(self) -> Self {
        Deadline(self.0.map(|at| at.saturating_add(GRACE.as_nanos() as u64)))
    }

    /// Whether the moment has passed.
    pub fn passed(self) -> bool {
        self.left().is_some_and(|left| left.is_zero())
    }
}
