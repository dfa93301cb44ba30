//! Warnings about clients that the server disconnects, at a limited rate, because unauthenticated clients can cause any number. Called on the server's
//! thread.

use std::fmt;

use crate::base::clock;
use crate::base::log::{self, log_warn};

/// Lines that may come in a row.
const BURST: u64 = 10;
/// Nanoseconds per further line.
const PER_LINE: u64 = 1_000_000_000;

/// A token bucket for these warnings.
#[derive(Default)]
pub struct DisconnectLog {
    /// When a whole burst may be logged again; at most [`BURST`] lines' time ahead.
    full_at: u64,
    /// Warnings suppressed since the last line.
    suppressed: u64,
}

impl DisconnectLog {
    /// Warns that a client is disconnected, and why, or counts it for a later line.
    pub fn warn(&mut self, client: impl fmt::Display, why: fmt::Arguments<'_>) {
        match self.admit(clock::now()) {
            Some(0) => log_warn!(log::INIT, "store: {client} is disconnected: {why}"),
            Some(others) => {
                log_warn!(log::INIT, "store: {client} is disconnected: {why} ({others} others before it were not logged)")
            }
            None => {}
        }
    }

    /// Whether a line may be logged at `now`: then how many were suppressed before it.
    fn admit(&mut self, now: u64) -> Option<u64> {
        let full_at = self.full_at.max(now) + PER_LINE;
        if full_at > now + BURST * PER_LINE {
            self.suppressed += 1;
            return None;
        }
        self.full_at = full_at;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_logged_and_then_a_line_each_second() {
        let mut log = DisconnectLog::default();
        let start = 5 * PER_LINE;
        assert!((0..BURST).all(|_| log.admit(start) == Some(0)));
        assert!((0..100).all(|i| log.admit(start + i).is_none()));
        assert_eq!(log.admit(start + PER_LINE), Some(100));
        assert_eq!(log.admit(start + PER_LINE), None);
        assert_eq!(log.admit(start + 3 * PER_LINE), Some(1));
        assert_eq!(log.admit(start + 3 * PER_LINE), Some(0));
        assert!((0..BURST).all(|_| log.admit(start + 100 * PER_LINE) == Some(0)));
        assert_eq!(log.admit(start + 100 * PER_LINE), None);
    }
}
