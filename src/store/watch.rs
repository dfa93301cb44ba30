//! Watching a key: a thread that tells of each change. Railhead's own, as torch had it before 2.1.

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
    /// The store is gone, or sent more changes than were taken: nothing comes after this.
    Lost(&'a Error),
}

/// Called with each change, in order, on the watch's own thread. May use the store.
pub type Callback = Box<dyn FnMut(Change<'_>) + Send>;

/// A watch. When it is dropped the callback has returned for the last time, unless the callback itself drops it: then this call is the last.
pub struct Watch {
    stopped: Arc<AtomicBool>,
    wake: Box<dyn Fn() + Send + Sync>,
    thread: Option<JoinHandle<()>>,
    epoch: u64,
}

impl Watch {
    /// Starts the thread. `next` blocks until there is something for the callback, and is false once nothing more will come; `wake` ends its wait.
    pub(super) fn start(
        wake: impl Fn() + Send + Sync + 'static,
        mut next: impl FnMut(&mut dyn FnMut(Change<'_>)) -> bool + Send + 'static,
        mut callback: Callback,
    ) -> Result<Watch> {
        let stopped = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&stopped);
        let run = move || {
            // Nothing is published by the flag: it only says that nobody listens any more.
            let mut tell = |change: Change<'_>| {
                if !told.load(Ordering::Relaxed) {
                    callback(change);
                }
            };
            while next(&mut tell) && !told.load(Ordering::Relaxed) {}
        };
        let thread = thread::spawn("railhead-watch", &Cpus::default(), run).map_err(|e| Error::system("start a watch's thread", e))?;
        Ok(Watch { stopped, wake: Box::new(wake), thread: Some(thread), epoch: fork::epoch() })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if self.epoch != fork::epoch() {
            // A forked child has no such thread.
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
