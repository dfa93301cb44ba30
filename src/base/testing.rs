//! What tests of several rooms use.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::sync::lock;

/// Longer than any test lets a thread wait, on a machine that has much else to do as well.
const TIME: Duration = Duration::from_secs(300);

/// As the standard library's, but whoever is alone there fails: a thread that has failed does not come.
pub struct Barrier {
    count: usize,
    came: Mutex<usize>,
    all: Condvar,
}

impl Barrier {
    /// For so many threads.
    pub fn new(count: usize) -> Barrier {
        Barrier { count, came: Mutex::new(0), all: Condvar::new() }
    }

    /// Waits until all have come.
    pub fn wait(&self) {
        let mut came = lock(&self.came);
        *came += 1;
        let all = came.next_multiple_of(self.count);
        self.all.notify_all();
        let (came, _) = self.all.wait_timeout_while(came, TIME, |came| *came < all).unwrap_or_else(PoisonError::into_inner);
        assert!(*came >= all, "the others do not come");
    }
}
