//! A name space within another store, so that groups and sub-groups of ranks do not read each other's keys.

use std::sync::Arc;
use std::time::Duration;

use super::{Callback, Deadline, KeyWatch, Result, Store};

/// A store whose key `k` is `<prefix>/k` in another.
#[derive(Clone)]
pub struct PrefixStore {
    prefix: String,
    inner: Arc<dyn Store>,
}

impl PrefixStore {
    /// The name space `prefix` of `inner`.
    pub fn new(prefix: impl Into<String>, inner: Arc<dyn Store>) -> Self {
        PrefixStore { prefix: prefix.into(), inner }
    }

    /// The store around the name space.
    pub fn underlying(&self) -> &Arc<dyn Store> {
        &self.inner
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn with_keys<R>(&self, keys: &[&str], call: impl FnOnce(&[&str]) -> R) -> R {
        let keys: Vec<String> = keys.iter().map(|key| self.key(key)).collect();
        call(&keys.iter().map(String::as_str).collect::<Vec<_>>())
    }
}

impl Store for PrefixStore {
    fn reopen(self: Arc<Self>) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(PrefixStore { prefix: self.prefix.clone(), inner: Arc::clone(&self.inner).reopen()? }))
    }

    fn server_port(&self) -> Option<u16> {
        self.inner.server_port()
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.set(&self.key(key), value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.inner.get(&self.key(key), timeout)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.with_keys(keys, |keys| self.inner.wait(keys, timeout))
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.with_keys(keys, |keys| self.inner.check(keys))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.inner.add(&self.key(key), delta)
    }

    fn add_by(&self, key: &str, delta: i64, deadline: Deadline) -> Result<i64> {
        self.inner.add_by(&self.key(key), delta, deadline)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.inner.compare_set(&self.key(key), expected, desired)
    }

    fn compare_set_by(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        self.inner.compare_set_by(&self.key(key), expected, desired, deadline)
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.append(&self.key(key), value)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.with_keys(keys, |keys| self.inner.multi_get(keys, timeout))
    }

    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        let keys: Vec<String> = entries.iter().map(|(key, _)| self.key(key)).collect();
        let entries: Vec<(&str, &[u8])> = keys.iter().map(String::as_str).zip(entries.iter().map(|(_, value)| *value)).collect();
        self.inner.multi_set(&entries)
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.inner.delete_key(&self.key(key))
    }

    /// All keys of the store around it, as torch counts them.
    fn num_keys(&self) -> Result<i64> {
        self.inner.num_keys()
    }

    /// Only the keys of this name space.
    fn list_keys(&self) -> Result<Vec<String>> {
        let own = |key: String| key.strip_prefix(&self.prefix)?.strip_prefix('/').map(str::to_owned);
        Ok(self.inner.list_keys()?.into_iter().filter_map(own).collect())
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.inner.queue_push(&self.key(key), value)
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.inner.queue_pop(&self.key(key), timeout)
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        self.inner.queue_len(&self.key(key))
    }

    fn watch_key(&self, key: &str, callback: Callback) -> Result<KeyWatch> {
        self.inner.watch_key(&self.key(key), callback)
    }

    fn barrier(&self, key: &str, world_size: i64, timeout: Duration) -> Result<()> {
        self.inner.barrier(&self.key(key), world_size, timeout)
    }
}
