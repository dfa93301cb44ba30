//! Checks the other side's counter, and derives from it how many steps this side may read or fill. Pure functions, for the proxy and for the programs'
//! sides alike.
//!
//! Counters wrap, so they are compared by their difference. Between operations a counter may lag: an operation starts at the next multiple of its
//! chunk, up to 7 steps further, and the side that starts first may not see the other's last stores for flag-checked slots yet, up to 8 steps. So a
//! lag of up to 15 is valid until this side has claimed its first step; after that, no lag is.

use super::layout::{EMPTY, STEPS};
use crate::base::error::{Error, Result};

/// The largest valid lag before the first step of an operation.
const FRESH_LAG: i64 = 2 * STEPS as i64 - 1;

/// The counters of this side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    /// Steps published to the other side.
    pub published: u64,
    /// Steps claimed: those published, and those that are being read or filled.
    pub claimed: u64,
    /// Whether nothing has been claimed yet since the operation started.
    pub fresh: bool,
}

/// Steps that a consumer may read: filled, and not claimed.
///
/// Errors: a `tail` that no producer publishes.
#[inline]
pub fn filled(tail: u64, at: Position) -> Result<u64> {
    let ahead = tail.wrapping_sub(at.claimed) as i64;
    let lead = tail.wrapping_sub(at.published) as i64;
    if ahead >= 0 && lead <= STEPS as i64 {
        Ok(ahead as u64)
    } else if at.fresh && (-FRESH_LAG..0).contains(&ahead) {
        Ok(0)
    } else {
        Err(invalid_counter("tail", tail, at))
    }
}

/// Steps that a producer may fill: free, and not claimed.
///
/// Errors: a `head` that no consumer publishes.
#[inline]
pub fn room(head: u64, at: Position) -> Result<u64> {
    let used = at.claimed.wrapping_sub(head) as i64;
    if (0..=STEPS as i64).contains(&used) {
        Ok(STEPS - used as u64)
    } else if at.fresh && (0..=FRESH_LAG).contains(&used) {
        Ok(0)
    } else {
        Err(invalid_counter("head", head, at))
    }
}

/// The size in a slot of sizes_fifo; `None` while it is empty.
///
/// Errors: a size that does not fit the slots of one slice.
#[inline]
pub fn size(bytes: i64, capacity: usize) -> Result<Option<usize>> {
    match usize::try_from(bytes) {
        Ok(bytes) if bytes <= capacity => Ok(Some(bytes)),
        _ if bytes == EMPTY => Ok(None),
        _ => Err(bad_size(bytes, capacity)),
    }
}

/// Checks the steps of a slice: their slots must be contiguous in the ring.
pub fn check_slice(slice: u64) -> Result<()> {
    match slice {
        1 | 2 | 4 | 8 => Ok(()),
        _ => Err(Error::usage(format!("a slice of {slice} steps; accepted: 1, 2, 4 or 8"))),
    }
}

#[cold]
fn invalid_counter(what: &str, value: u64, at: Position) -> Error {
    Error::usage(format!(
        "the ring's {what} is {value}, but this side is at {} (published {}): the other side may be at most {STEPS} steps away",
        at.claimed, at.published
    ))
}

#[cold]
fn bad_size(bytes: i64, capacity: usize) -> Error {
    Error::usage(format!("a step of {bytes} bytes in the ring; accepted: 0 to {capacity}, or {EMPTY} for none yet"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(published: u64, claimed: u64, fresh: bool) -> Position {
        Position { published, claimed, fresh }
    }

    #[test]
    fn filled_counts_what_is_not_claimed() {
        for base in [0, 100, u64::MAX - 3, u64::MAX] {
            let up = |n: u64| base.wrapping_add(n);
            assert_eq!(filled(base, at(base, base, true)).unwrap(), 0);
            assert_eq!(filled(up(8), at(base, base, false)).unwrap(), 8);
            assert_eq!(filled(up(8), at(base, up(3), false)).unwrap(), 5);
            assert_eq!(filled(up(3), at(base, up(3), false)).unwrap(), 0);
            // More than fits, and less than there was.
            assert!(filled(up(9), at(base, up(3), false)).is_err());
            assert!(filled(up(2), at(base, up(3), false)).is_err());
            // The producer has not come to this operation yet.
            assert_eq!(filled(base.wrapping_sub(15), at(base, base, true)).unwrap(), 0);
            assert!(filled(base.wrapping_sub(16), at(base, base, true)).is_err());
            assert!(filled(base.wrapping_sub(1), at(base, base, false)).is_err());
            assert!(filled(up(1 << 63), at(base, base, true)).is_err());
        }
    }

    #[test]
    fn room_counts_what_is_free() {
        for base in [0, 100, u64::MAX - 3, u64::MAX] {
            let up = |n: u64| base.wrapping_add(n);
            assert_eq!(room(base, at(base, base, true)).unwrap(), 8);
            assert_eq!(room(base, at(base, up(3), false)).unwrap(), 5);
            assert_eq!(room(base, at(up(2), up(8), false)).unwrap(), 0);
            // The consumer cannot be done with what was never filled, nor take back what it was done with.
            assert!(room(up(4), at(base, up(3), false)).is_err());
            assert!(room(base, at(up(9), up(9), false)).is_err());
            assert_eq!(room(base, at(up(15), up(15), true)).unwrap(), 0);
            assert!(room(base, at(up(16), up(16), true)).is_err());
        }
    }

    #[test]
    fn sizes_are_checked_against_the_slot() {
        assert_eq!(size(0, 64).unwrap(), Some(0));
        assert_eq!(size(64, 64).unwrap(), Some(64));
        assert_eq!(size(EMPTY, 64).unwrap(), None);
        for bad in [65, -2, i64::MIN, i64::MAX] {
            assert!(size(bad, 64).unwrap_err().to_string().contains(&bad.to_string()));
        }
        assert!([0, 3, 5, 6, 7, 9, 16].into_iter().all(|slice| check_slice(slice).is_err()));
    }
}
