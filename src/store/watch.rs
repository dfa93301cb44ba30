//! Watching a key: a thread that reports each change. An extension of Railhead, like that of torch before 2.1.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use super::{Error, Result};
use crate::base::fork;
use crate::base::thread::{self, Cpus};

/// What happened to a watched key.
#[derive(Debug, Clone, Copy)]
pub enum Change<'a> {
    /// It exists now.
    Created(&'a [u8]),
    /// It has another value: the old one, the new one. The two may be alike.
    Updated(&'a [u8], &'a [u8]),
    /// It is gone; this was its value.
    Deleted(&'a [u8]),
    /// The store has ended, or dropped this watch because it read too slowly: the last change.
    Lost(&'a Error),
}

/// Called with each change, in order, on the watch's own thread. May use the store.
pub type Callback = Box<dyn FnMut(Change<'_>) + Send>;

/// A watch. Dropping it waits until the callback has returned for the last time, unless the callback itself drops it: then that call is the last.
pub struct KeyWatch {
    stopped: Arc<AtomicBool>,
    wake: Box<dyn Fn() + Send + Sync>,
    thread: Option<JoinHandle<()>>,
    epoch: u64,
}

impl KeyWatch {
    /// Starts the thread. `next` blocks until there is a change for the callback, and returns false after the last one; `wake` ends its wait.
    pub(super) fn start(
        wake: impl Fn() + Send + Sync + 'static,
        mut next: impl FnMut(&mut dyn FnMut(Change<'_>)) -> bool + Send + 'static,
        mut callback: Callback,
    ) -> Result<KeyWatch> {
        let stopped = Arc::new(AtomicBool::new(false));
        let thread_stopped = Arc::clone(&stopped);
        let run = move || {
            // Relaxed: no data is published by the flag.
            let mut notify = |change: Change<'_>| {
                if !thread_stopped.load(Ordering::Relaxed) {
                    callback(change);
                }
            };
            while next(&mut notify) && !thread_stopped.load(Ordering::Relaxed) {}
        };
        let thread = thread::spawn("railhead-watch", &Cpus::default(), run).map_err(|e| Error::system("start a watch's thread", e))?;
        Ok(KeyWatch { stopped, wake: Box::new(wake), thread: Some(thread), epoch: fork::epoch() })
    }
}

impl Drop for KeyWatch {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.epoch != fork::epoch() {
            // A forked child does not have the thread.
            std::mem::forget(thread);
            return;
        }
        self.stopped.store(true, Ordering::Relaxed);
        (self.wake)();
        if thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}
