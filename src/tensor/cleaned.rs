//! Numbers of steps that were cleaned up, all of them, in bounded memory. Under the lock of the manager.
//!
//! Ranges, so that numbers which follow each other cost nothing. Where there are too many, those are joined that lie closest together: numbers
//! between them count as cleaned up then. A request that comes late is always refused; one that comes early may be, unless numbers rise.

use std::collections::BTreeMap;

/// Ranges at most.
const RANGES: usize = 1 << 16;
/// Gaps that are closed at a time, the smallest, and those that are as small.
const CLOSED: usize = RANGES / 16;

/// A set of numbers that only grows.
#[derive(Debug, Default)]
pub struct Cleaned {
    /// First and last of each range. No two touch.
    ranges: BTreeMap<u64, u64>,
}

impl Cleaned {
    /// Whether a number is among them.
    pub fn contains(&self, id: u64) -> bool {
        self.ranges.range(..=id).next_back().is_some_and(|(_, last)| *last >= id)
    }

    /// Adds a number.
    pub fn insert(&mut self, id: u64) {
        let before = self.ranges.range(..=id).next_back().map(|(first, last)| (*first, *last));
        let first = match before {
            Some((_, last)) if last >= id => return,
            Some((first, last)) if last + 1 == id => first,
            _ => id,
        };
        let last = id.checked_add(1).and_then(|next| self.ranges.remove(&next)).unwrap_or(id);
        self.ranges.insert(first, last);
        if self.ranges.len() > RANGES {
            self.join();
        }
    }

    fn join(&mut self) {
        let ranges: Vec<(u64, u64)> = std::mem::take(&mut self.ranges).into_iter().collect();
        let gap = |(_, last): &(u64, u64), (first, _): &(u64, u64)| first.saturating_sub(*last);
        let mut gaps: Vec<u64> = ranges.iter().zip(ranges.iter().skip(1)).map(|(a, b)| gap(a, b)).collect();
        let (_, most, _) = gaps.select_nth_unstable(CLOSED);
        let mut joined: Vec<(u64, u64)> = Vec::new();
        for range in ranges {
            match joined.last_mut() {
                Some(before) if gap(before, &range) <= *most => before.1 = range.1,
                _ => joined.push(range),
            }
        }
        self.ranges = joined.into_iter().collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    #[test]
    fn numbers_that_follow_each_other_are_one_range() {
        let mut cleaned = Cleaned::default();
        (0..1_000_000).for_each(|id| cleaned.insert(id));
        assert_eq!((cleaned.ranges.len(), cleaned.contains(999_999), cleaned.contains(1_000_000)), (1, true, false));
        [u64::MAX, u64::MAX - 1, u64::MAX].into_iter().for_each(|id| cleaned.insert(id));
        assert_eq!(cleaned.ranges.last_key_value(), Some((&(u64::MAX - 1), &u64::MAX)));
    }

    #[test]
    fn however_many_there_are_all_are_known_and_take_bounded_memory() {
        let mut cleaned = Cleaned::default();
        let random = |i: u64| (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (i << 7).wrapping_mul(0xd134_2543_de82_ef95);
        for i in 0..100_000 {
            cleaned.insert(random(i));
            assert!(cleaned.ranges.len() <= RANGES);
        }
        assert!((0..100_000).all(|i| cleaned.contains(random(i))));
    }

    #[test]
    fn what_is_far_from_all_that_were_cleaned_up_is_none_of_them() {
        let mut cleaned = Cleaned::default();
        let jobs = [0u64, 1 << 40, 1 << 50];
        (0..RANGES as u64).for_each(|i| jobs.iter().for_each(|job| cleaned.insert(job + 10 * i)));
        let next = 10 * RANGES as u64;
        assert!(jobs.iter().all(|job| !cleaned.contains(job + next) && !cleaned.contains(job.wrapping_sub(1))));
        assert!(jobs.iter().all(|job| cleaned.contains(*job) && cleaned.contains(job + next - 10)));
        assert!(cleaned.ranges.len() <= RANGES);
    }

    proptest! {
        #[test]
        fn it_is_a_set(ids in proptest::collection::vec(0u64..60, 0..60)) {
            let (mut cleaned, mut all) = (Cleaned::default(), BTreeSet::new());
            for id in ids {
                cleaned.insert(id);
                all.insert(id);
                prop_assert!((0..61).all(|id| cleaned.contains(id) == all.contains(&id)));
            }
            prop_assert!(cleaned.ranges.iter().zip(cleaned.ranges.keys().skip(1)).all(|((_, last), first)| last + 1 < *first));
        }
    }
}
