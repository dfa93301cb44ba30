//! Which collectives run on a mesh: two with one tag would take each other's messages. Any number of threads, without a lock.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::base::error::{Error, Result};

use super::protocol::{SMALL, Tag};

/// Collectives that may run at once.
const MOST: usize = 1024;

/// The tags of those that run, whatever the size of their messages.
#[derive(Debug)]
pub struct Running {
    /// 0: nobody's.
    tags: [AtomicU64; MOST],
    /// Places of which none was ever used begin here.
    used: AtomicUsize,
}

/// One that runs, until this is dropped.
#[derive(Debug)]
pub struct Run<'a> {
    place: &'a AtomicU64,
    tag: u64,
}

impl Run<'_> {
    /// Of its messages.
    pub fn tag(&self) -> u64 {
        self.tag
    }
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        // Pairs with the exchange in `begin`: what this thread did comes before what the next one in this place does.
        self.place.store(0, Ordering::Release);
    }
}

impl Default for Running {
    fn default() -> Running {
        Running { tags: [const { AtomicU64::new(0) }; MOST], used: AtomicUsize::new(0) }
    }
}

impl Running {
    /// One begins whose messages have this tag, which is not 0.
    ///
    /// Errors: one with the same tag runs, or as many as may be do. Of two that begin at the same time with one tag both may be refused, and one is.
    pub fn begin(&self, tag: u64) -> Result<Run<'_>> {
        let key = tag & !SMALL;
        let free = |(_, place): &(usize, &AtomicU64)| place.compare_exchange(0, key, Ordering::SeqCst, Ordering::Relaxed).is_ok();
        let Some((at, place)) = self.tags.iter().enumerate().find(free) else {
            return Err(Error::usage(format!("{}: {MOST} collectives run already, as many as may be at once", Tag::Collective(tag))));
        };
        if at >= self.used.load(Ordering::SeqCst) {
            self.used.fetch_max(at + 1, Ordering::SeqCst);
        }
        let run = Run { place, tag };
        // All in one order, so that of two at least one sees the other: each stores its own before it looks.
        let others = self.tags.iter().take(self.used.load(Ordering::SeqCst)).enumerate().filter(|(other, _)| *other != at);
        if others.into_iter().any(|(_, other)| other.load(Ordering::SeqCst) == key) {
            return Err(Error::usage(format!("{}: this rank is in one with the same tag already", Tag::Collective(tag))));
        }
        Ok(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tag_runs_once_at_a_time() {
        let running = Running::default();
        let (first, second) = (running.begin(7).unwrap(), running.begin(8).unwrap());
        let refused = running.begin(7).unwrap_err().to_string();
        assert!(refused.contains("this rank is in one with the same tag already"), "{refused}");
        assert_eq!((first.tag(), second.tag()), (7, 8));
        drop(first);
        // In the place before the other's, and for messages of the other kind.
        assert!(running.begin(8).is_err() && running.begin(8 | SMALL).is_err());
        drop(second);
        let all: Vec<Run<'_>> = (1..=MOST as u64).map(|tag| running.begin(tag).unwrap()).collect();
        let refused = running.begin(u64::MAX).unwrap_err().to_string();
        assert!(refused.contains("1024 collectives run already"), "{refused}");
        drop(all);
        assert!(running.begin(100).is_ok());
    }

    #[test]
    fn of_two_threads_one_is_refused() {
        let (running, inside, ran) = (Running::default(), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        if let Ok(_run) = running.begin(7) {
                            assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two run at once");
                            inside.fetch_sub(1, Ordering::SeqCst);
                            ran.fetch_add(1, Ordering::SeqCst);
                        }
                    }
                });
            }
        });
        assert!(ran.into_inner() > 0, "all were refused");
    }
}
