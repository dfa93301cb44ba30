//! Warnings about clients that the server disconnects. Strangers can cause as many as they like, so only so many are said. Called on the server's thread.

use std::fmt;

use crate::base::clock;
use crate::base::log::{self, log_warn};

/// Lines that may come in a row.
const BURST: u64 = 10;
/// Nanoseconds for each further one.
const PER_LINE: u64 = 1_000_000_000;

/// What may be said.
#[derive(Default)]
pub struct Complaints {
    /// When all of the burst may be said again; at most [`BURST`] lines' time ahead.
    full_at: u64,
    /// Not said since the last line.
    untold: u64,
}

impl Complaints {
    /// Says that a client is disconnected, and why, or counts it for a later line.
    pub fn say(&mut self, client: impl fmt::Display, why: fmt::Arguments<'_>) {
        match self.admit(clock::now()) {
            Some(0) => log_warn!(log::INIT, "store: {client} is disconnected: {why}"),
            Some(others) => {
                log_warn!(log::INIT, "store: {client} is disconnected: {why} ({others} others before it, which were not told of)")
            }
            None => {}
        }
    }

    /// Whether a line may be said at `now`, and how many were not before it.
    fn admit(&mut self, now: u64) -> Option<u64> {
        let full_at = self.full_at.max(now) + PER_LINE;
        if full_at > now + BURST * PER_LINE {
            self.untold += 1;
            return None;
        }
        self.full_at = full_at;
        Some(std::mem::take(&mut self.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_told_and_then_a_line_each_second() {
        let mut complaints = Complaints::default();
        let start = 5 * PER_LINE;
        assert!((0..BURST).all(|_| complaints.admit(start) == Some(0)));
        assert!((0..100).all(|i| complaints.admit(start + i).is_none()));
        assert_eq!(complaints.admit(start + PER_LINE), Some(100));
        assert_eq!(complaints.admit(start + PER_LINE), None);
        assert_eq!(complaints.admit(start + 3 * PER_LINE), Some(1));
        assert_eq!(complaints.admit(start + 3 * PER_LINE), Some(0));
        assert!((0..BURST).all(|_| complaints.admit(start + 100 * PER_LINE) == Some(0)));
        assert_eq!(complaints.admit(start + 100 * PER_LINE), None);
    }
}
