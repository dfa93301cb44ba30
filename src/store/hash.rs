//! A store within one process, for threads, tests, and as the innermost of other stores.

use std::collections::HashMap;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::deadline::Deadline;
use super::values::{Compared, Value, Values};
use super::watch::{Callback, Change, KeyWatch};
use super::{Error, Result, Store};
use crate::base::sync::lock;

/// A store that lives as long as somebody holds it.
#[derive(Default)]
pub struct HashStore {
    values: Mutex<Values>,
    changed: Condvar,
    /// Locked while `values` is, so that watches get the changes in order.
    watches: Arc<Mutex<Watches>>,
}

/// By key: where its changes go.
type Watches = HashMap<String, Vec<Arc<Sender<KeyChange>>>>;

/// A key's value before and after a change.
type KeyChange = (Option<Value>, Option<Value>);

impl HashStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Waits until all keys exist, and returns the values.
    fn wait_for(&self, keys: &[&str], timeout: Duration) -> Result<MutexGuard<'_, Values>> {
        let deadline = Deadline::after(timeout);
        let mut values = lock(&self.values);
        while !keys.iter().all(|key| values.contains(key.as_bytes())) {
            values = match deadline.left() {
                None => self.changed.wait(values).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return Err(Error::wait_timeout(timeout, keys)),
                Some(left) => self.changed.wait_timeout(values, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
        Ok(values)
    }

    /// Changes a key's value.
    fn change<R>(&self, key: &str, change: impl FnOnce(&mut Values) -> R) -> R {
        let mut values = lock(&self.values);
        let result = self.change_locked(key, &mut values, change);
        drop(values);
        self.changed.notify_all();
        result
    }

    fn change_locked<R>(&self, key: &str, values: &mut Values, change: impl FnOnce(&mut Values) -> R) -> R {
        let mut watches = lock(&self.watches);
        let Some(watchers) = watches.get_mut(key) else { return change(values) };
        // Cloned, so that a change does not happen in place and can be told by the pointer.
        let old = values.get(key.as_bytes()).cloned();
        let result = change(values);
        let new = values.get(key.as_bytes()).cloned();
        if old.as_ref().map(Arc::as_ptr) != new.as_ref().map(Arc::as_ptr) {
            for watcher in watchers {
                // Fails for a watch that has just ended, which removes its sender itself.
                let _ = watcher.send((old.clone(), new.clone()));
            }
        }
        result
    }
}

/// Removes a watch.
fn remove_watch(watches: &Mutex<Watches>, key: &str, watcher: &Arc<Sender<KeyChange>>) {
    let mut watches = lock(watches);
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
        let values = lock(&self.values);
        Ok(keys.iter().all(|key| values.contains(key.as_bytes())))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let sum = self.change(key, |values| {
            // As torch's HashStore reads an empty value as 0. (Its server does not.)
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
        // The values are copied after the lock is released.
        let found: Vec<_> = keys.iter().map(|key| values.get(key.as_bytes()).map(Arc::clone)).collect();
        drop(values);
        Ok(found.iter().map(|value| value.as_ref().map_or(Vec::new(), |value| value.bytes().to_vec())).collect())
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        let mut values = lock(&self.values);
        entries.iter().for_each(|(key, value)| self.change_locked(key, &mut values, |values| values.set(key.as_bytes(), value)));
        drop(values);
        self.changed.notify_all();
        Ok(())
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        Ok(self.change(key, |values| values.delete(key.as_bytes())))
    }

    fn num_keys(&self) -> Result<i64> {
        Ok(lock(&self.values).keys().len() as i64)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        Ok(lock(&self.values).keys().filter_map(|key| std::str::from_utf8(key).ok().map(str::to_owned)).collect())
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(key, |values| values.push(key.as_bytes(), value));
        Ok(())
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let deadline = Deadline::after(timeout);
        let mut values = lock(&self.values);
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

    /// Changes that the callback was not called with yet are kept in memory.
    fn watch_key(&self, key: &str, callback: Callback) -> Result<KeyWatch> {
        let (send, receive) = mpsc::channel::<KeyChange>();
        let send = Arc::new(send);
        let next = move |notify: &mut dyn FnMut(Change<'_>)| match receive.recv() {
            Ok((old, new)) => {
                match (&old, &new) {
                    (Some(old), Some(new)) => notify(Change::Updated(old.bytes(), new.bytes())),
                    (None, Some(new)) => notify(Change::Created(new.bytes())),
                    (Some(old), None) => notify(Change::Deleted(old.bytes())),
                    // Sent by `wake`.
                    (None, None) => return false,
                }
                true
            }
            Err(_) => false,
        };
        let (stop, watches, watched) = (Arc::clone(&send), Arc::downgrade(&self.watches), key.to_owned());
        let wake = move || {
            if let Some(watches) = watches.upgrade() {
                remove_watch(&watches, &watched, &stop);
            }
            let _ = stop.send((None, None));
        };
        let watch = KeyWatch::start(wake, next, callback)?;
        let mut watches = lock(&self.watches);
        watches.entry(key.to_owned()).or_default().push(send);
        Ok(watch)
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        Ok(lock(&self.values).queue_len(key.as_bytes()) as i64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_that_is_dropped_leaves_nothing_behind() {
        let store = HashStore::new();
        let (send, received) = mpsc::channel();
        let watch = |name: &'static str| {
            let send = send.clone();
            store.watch_key("k", Box::new(move |_| send.send(name).unwrap())).unwrap()
        };
        let (first, second) = (watch("first"), watch("second"));
        drop(first);
        store.set("k", b"v").unwrap();
        assert_eq!(received.recv(), Ok("second"), "the other of the same key goes on");
        drop(second);
        store.watch_key("never set", Box::new(|_| ())).unwrap();
        assert!(store.watches.lock().unwrap().is_empty());
        drop(store.watch_key("k", Box::new(|_| ())));
        let watch = store.watch_key("k", Box::new(|_| ())).unwrap();
        drop(store);
        drop(watch);
    }
}
