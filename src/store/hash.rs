//! A store within one process, for threads, tests, and as the innermost of other stores.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::deadline::Deadline;
use super::values::{Compared, Values};
use super::{Error, Result, Store};

/// A store that lives as long as somebody holds it.
#[derive(Default)]
pub struct HashStore {
    values: Mutex<Values>,
    changed: Condvar,
}

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

    fn change<R>(&self, change: impl FnOnce(&mut Values) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }
}

impl Store for HashStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|values| values.set(key.as_bytes(), value));
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
        self.change(|values| values.add(key.as_bytes(), delta))
            .map_err(|_| Error::Usage(format!("add: the value of {key} plus {delta} is not a number")))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        Ok(match self.change(|values| values.compare_set(key.as_bytes(), expected, desired)) {
            Compared::Stored => desired.to_vec(),
            Compared::Other(value) => value.bytes().to_vec(),
            Compared::Missing => expected.to_vec(),
        })
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|values| values.append(key.as_bytes(), value));
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
        self.change(|values| entries.iter().for_each(|(key, value)| values.set(key.as_bytes(), value)));
        Ok(())
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        Ok(self.lock().delete(key.as_bytes()))
    }

    fn num_keys(&self) -> Result<i64> {
        Ok(self.lock().keys().len() as i64)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        Ok(self.lock().keys().filter_map(|key| std::str::from_utf8(key).ok().map(str::to_owned)).collect())
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|values| values.push(key.as_bytes(), value));
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

    fn queue_len(&self, key: &str) -> Result<i64> {
        Ok(self.lock().queue_len(key.as_bytes()) as i64)
    }
}
