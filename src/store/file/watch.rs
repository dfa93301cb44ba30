//! Watching a key in a file: a thread of the watch's own that reads every record as it comes. The file is a log, so no change is missed, however late
//! the thread looks; each change is told of within a pause between looks.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use rustix::fs::FlockOperation;

use super::{Entry, LOOK, Locked, Seen, read_on};
use crate::store::deadline::Deadline;
use crate::store::watch::{Callback, Change, Watch};
use crate::store::{Error, Result};

/// How far a watch has read.
pub struct Follower {
    pub path: PathBuf,
    /// As it stands in the file.
    pub key: Vec<u8>,
    /// The value there.
    pub value: Option<Vec<u8>>,
    pub seen: Seen,
}

impl Follower {
    /// Goes on in a thread.
    pub fn start(mut self, callback: Callback) -> Result<Watch> {
        let (stop, stopped) = mpsc::channel();
        let wake = move || {
            let _ = stop.send(());
        };
        let next = move |tell: &mut dyn FnMut(Change<'_>)| match stopped.recv_timeout(LOOK) {
            Err(RecvTimeoutError::Timeout) => match self.look(tell) {
                Ok(()) => true,
                Err(error) => {
                    tell(Change::Lost(&error));
                    false
                }
            },
            _ => false,
        };
        Watch::start(wake, next, callback)
    }

    /// Tells of what has changed since the last time. The callback is not called under the file's lock: it may use the store.
    fn look(&mut self, tell: &mut dyn FnMut(Change<'_>)) -> Result<()> {
        let failed = |what: &str, error| Error::system(format!("{what} {}", self.path.display()), error);
        let mut values = Vec::new();
        let mut outcome = Ok(());
        // Not waiting for the lock: its holder may be stopped, and this thread must end when the watch does.
        match Locked::open(&self.path, OpenOptions::new().read(true), FlockOperation::LockShared, Deadline::after(Duration::ZERO)) {
            Ok(locked) => {
                let note = |entry| match entry {
                    Entry::Restart => values.push(None),
                    Entry::Set(key, value) if key == self.key => values.push(Some(value)),
                    Entry::Delete(key) if key == self.key => values.push(None),
                    _ => {}
                };
                outcome = read_on(&locked.0, &mut self.seen, note).map_err(|e| failed("read", e));
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
                (Some(old), Some(new)) => tell(Change::Updated(old, new)),
                (None, Some(new)) => tell(Change::Created(new)),
                (Some(old), None) => tell(Change::Deleted(old)),
                (None, None) => {}
            }
        }
        outcome
    }
}
