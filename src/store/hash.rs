//! A store within one process, for threads, tests, and as the innermost of other stores.

use std::collections::HashMap;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::deadline::Deadline;
use super::values::{Compared, Value, Values};
use super::watch::{Callback, Change, Watch};
use super::{Error, Result, Store};

/// A store that lives as long as somebody holds it.
#[derive(Default)]
pub struct HashStore {
    values: Mutex<Values>,
    changed: Condvar,
    /// Locked within `values`, so that watches hear of changes in their order.
    watches: Arc<Mutex<Watches>>,
}

/// Where changes of each key go.
type Watches = HashMap<String, Vec<Arc<Sender<Noted>>>>;

/// A key's value before and after a change.
type Noted = (Option<Value>, Option<Value>);

impl HashStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Values> {
        // Nothing that holds the lock can stop halfway.
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all keys exist, and says how it stands then.
    fn wait_for(&self, keys: &[&str], timeout: Duration) -> Result<MutexGuard<'_, Values>> {
        let deadline = Deadline::after(timeout);
        let mut values = self.lock();
        while !keys.iter().all(|key| values.contains(key.as_bytes())) {
            values = match deadline.left() {
                None => self.changed.wait(values).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return Err(Error::wait_timeout(timeout, keys)),
                Some(left) => self.changed.wait_timeout(values, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
        Ok(values)
    }

    /// Changes what a key means.
    fn change<R>(&self, key: &str, change: impl FnOnce(&mut Values) -> R) -> R {
        let mut values = self.lock();
        let result = self.observed(key, &mut values, change);
        drop(values);
        self.changed.notify_all();
        result
    }

    fn observed<R>(&self, key: &str, values: &mut Values, change: impl FnOnce(&mut Values) -> R) -> R {
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(watchers) = watches.get_mut(key) else { return change(values) };
        // Held, so that a change makes another value of it.
        let old = values.get(key.as_bytes()).cloned();
        let result = change(values);
        let new = values.get(key.as_bytes()).cloned();
        if old.as_ref().map(Arc::as_ptr) != new.as_ref().map(Arc::as_ptr) {
            for watcher in watchers {
                // A watch that has just ended takes its sender out itself.
                let _ = watcher.send((old.clone(), new.clone()));
            }
        }
        result
    }
}

/// Sends a watch no more changes.
fn forget(watches: &Mutex<Watches>, key: &str, watcher: &Arc<Sender<Noted>>) {
    let mut watches = watches.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(watchers) = watches.get_mut(key) else { return };
    watchers.retain(|other| !Arc::ptr_eq(other, watcher));
    if watchers.is_empty() {
        watches.remove(key);
    }
}

impl Store for HashStore {
    /// It has no connection.
    fn reopen(self: Arc<Self>) -> Result<Arc<dyn Store>> {
        Ok(self)
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(key, |values| values.set(key.as_bytes(), value));
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let values = self.wait_for(&[key], timeout)?;
        Ok(values.get(key.as_bytes()).map_or(Vec::new(), |value| value.bytes().to_vec()))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.wait_for(keys, timeout).map(|_| ())
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let values = self.lock();
        Ok(keys.iter().all(|key| values.contains(key.as_bytes())))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let sum = self.change(key, |values| {
            // Torch's, too, reads an empty value as 0 here, and its server does not.
            if values.get(key.as_bytes()).is_some_and(|value| value.bytes().is_empty()) {
                values.set(key.as_bytes(), b"0");
            }
            values.add(key.as_bytes(), delta)
        });
        sum.map_err(|_| Error::Usage(format!("add: the value of {key} is not a number of 64 bits")))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        Ok(match self.change(key, |values| values.compare_set(key.as_bytes(), expected, desired)) {
            Compared::Stored => desired.to_vec(),
            Compared::Other(value) => value.bytes().to_vec(),
            Compared::Missing => expected.to_vec(),
        })
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(key, |values| values.append(key.as_bytes(), value));
        Ok(())
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let values = self.wait_for(keys, timeout)?;
        // Shared under the lock, copied outside.
        let found: Vec<_> = keys.iter().map(|key| values.get(key.as_bytes()).map(Arc::clone)).collect();
        drop(values);
        Ok(found.iter().map(|value| value.as_ref().map_or(Vec::new(), |value| value.bytes().to_vec())).collect())
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        let mut values = self.lock();
        entries.iter().for_each(|(key, value)| self.observed(key, &mut values, |values| values.set(key.as_bytes(), value)));
        drop(values);
        self.changed.notify_all();
        Ok(())
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        Ok(self.change(key, |values| values.delete(key.as_bytes())))
    }

    fn num_keys(&self) -> Result<i64> {
        Ok(self.lock().keys().len() as i64)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        Ok(self.lock().keys().filter_map(|key| std::str::from_utf8(key).ok().map(str::to_owned)).collect())
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(key, |values| values.push(key.as_bytes(), value));
        Ok(())
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let deadline = Deadline::after(timeout);
        let mut values = self.lock();
        loop {
            if let Some(value) = values.pop(key.as_bytes()) {
                return Ok(value.bytes().to_vec());
            }
            values = match deadline.left() {
                _ if timeout.is_zero() => return Err(Error::QueueEmpty),
                None => self.changed.wait(values).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return Err(Error::wait_timeout(timeout, &[key])),
                Some(left) => self.changed.wait_timeout(values, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// What a callback has not been called with yet waits in memory.
    fn watch_key(&self, key: &str, callback: Callback) -> Result<Watch> {
        let (send, receive) = mpsc::channel::<Noted>();
        let send = Arc::new(send);
        let next = move |tell: &mut dyn FnMut(Change<'_>)| match receive.recv() {
            Ok((old, new)) => {
                match (&old, &new) {
                    (Some(old), Some(new)) => tell(Change::Updated(old.bytes(), new.bytes())),
                    (None, Some(new)) => tell(Change::Created(new.bytes())),
                    (Some(old), None) => tell(Change::Deleted(old.bytes())),
                    // The watch's own sign to stop.
                    (None, None) => return false,
                }
                true
            }
            Err(_) => false,
        };
        let (stop, watches, watched) = (Arc::clone(&send), Arc::downgrade(&self.watches), key.to_owned());
        let wake = move || {
            if let Some(watches) = watches.upgrade() {
                forget(&watches, &watched, &stop);
            }
            let _ = stop.send((None, None));
        };
        let watch = Watch::start(wake, next, callback)?;
        let mut watches = self.watches.lock().unwrap_or_else(PoisonError::into_inner);
        watches.entry(key.to_owned()).or_default().push(send);
        Ok(watch)
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        Ok(self.lock().queue_len(key.as_bytes()) as i64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_that_is_dropped_leaves_nothing_behind() {
        let store = HashStore::new();
        let (send, heard) = mpsc::channel();
        let watch = |name: &'static str| {
            let send = send.clone();
            store.watch_key("k", Box::new(move |_| send.send(name).unwrap())).unwrap()
        };
        let (first, second) = (watch("first"), watch("second"));
        drop(first);
        store.set("k", b"v").unwrap();
        assert_eq!(heard.recv(), Ok("second"), "the other of the same key goes on");
        drop(second);
        store.watch_key("never set", Box::new(|_| ())).unwrap();
        assert!(store.watches.lock().unwrap().is_empty());
        drop(store.watch_key("k", Box::new(|_| ())));
        let watch = store.watch_key("k", Box::new(|_| ())).unwrap();
        drop(store);
        drop(watch);
    }
}
