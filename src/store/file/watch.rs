//! Watches a key in a file: a thread of its own reads the file at intervals. The file is a log, so no change is missed.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use rustix::fs::FlockOperation;

use super::{Entry, Locked, POLL_INTERVAL, Seen, read_on};
use crate::store::deadline::Deadline;
use crate::store::watch::{Callback, Change, KeyWatch};
use crate::store::{Error, Result};

/// A watch's key, and how far it has read the file.
pub struct Follower {
    pub path: PathBuf,
    /// As in the file.
    pub key: Vec<u8>,
    /// The last value.
    pub value: Option<Vec<u8>>,
    pub seen: Seen,
}

impl Follower {
    /// Starts the thread.
    pub fn start(mut self, callback: Callback) -> Result<KeyWatch> {
        let (stop, stopped) = mpsc::channel();
        let wake = move || {
            let _ = stop.send(());
        };
        let next = move |notify: &mut dyn FnMut(Change<'_>)| match stopped.recv_timeout(POLL_INTERVAL) {
            Err(RecvTimeoutError::Timeout) => match self.poll(notify) {
                Ok(()) => true,
                Err(error) => {
                    notify(Change::Lost(&error));
                    false
                }
            },
            _ => false,
        };
        KeyWatch::start(wake, next, callback)
    }

    /// Reports the changes since the last time. Not under the file's lock: the callback may use the store.
    fn poll(&mut self, notify: &mut dyn FnMut(Change<'_>)) -> Result<()> {
        let failed = |what: &str, error| Error::system(format!("{what} {}", self.path.display()), error);
        let mut values = Vec::new();
        let mut outcome = Ok(());
        // Without waiting for the lock: its holder may be stopped, and this thread must end when the watch does.
        match Locked::open(&self.path, OpenOptions::new().read(true), FlockOperation::LockShared, Deadline::after(Duration::ZERO)) {
            Ok(locked) => {
                let collect = |entry| match entry {
                    Entry::Restart => values.push(None),
                    Entry::Set(key, value) if key == self.key => values.push(Some(value)),
                    Entry::Delete(key) if key == self.key => values.push(None),
                    _ => {}
                };
                outcome = read_on(&locked.0, &mut self.seen, collect).map_err(|e| failed("read", e));
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) if e.kind() == ErrorKind::NotFound => {
                self.seen = Seen::default();
                values.push(None);
            }
            Err(e) => return Err(failed("open", e)),
        }
        for new in values {
            let old = std::mem::replace(&mut self.value, new);
            match (&old, &self.value) {
                (Some(old), Some(new)) => notify(Change::Updated(old, new)),
                (None, Some(new)) => notify(Change::Created(new)),
                (Some(old), None) => notify(Change::Deleted(old)),
                (None, None) => {}
            }
        }
        outcome
    }
}
