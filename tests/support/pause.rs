//! What a loop that polls does between two looks that showed nothing.

use std::time::{Duration, Instant};

/// Gives way for the first millisecond since `start`; then sleeps, the longer the longer it has been, as others wait for this processor.
pub fn pause(start: Instant) {
    let waited = start.elapsed();
    if waited < Duration::from_millis(1) {
        std::thread::yield_now();
    } else {
        std::thread::sleep((waited / 16).min(Duration::from_millis(1)));
    }
}
