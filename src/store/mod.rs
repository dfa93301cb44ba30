//! Key-value stores by which the ranks of a job find each other: PyTorch's, in its protocol and its file format, so that Railhead
//! programs join a torch job's store and torch programs use ours.
//!
//! [`rendezvous`] finds the job's store by a URL. [`TcpStore`] talks to a server, which may be its own; [`FileStore`] is a file; [`HashStore`] lives in one
//! process; [`PrefixStore`] is a name space within another store. All are called on any thread, several at a time; an operation may block its caller, up
//! to its timeout.

#![forbid(unsafe_code)]

mod deadline;
mod error;
mod exchange;
mod file;
mod hash;
mod prefix;
pub mod rendezvous;
pub mod tcp;
mod values;
mod watch;

use std::sync::Arc;
use std::time::Duration;

pub use deadline::Deadline;
pub use error::{Error, Result};
pub use exchange::{Exchange, Member};
pub use file::FileStore;
pub use hash::HashStore;
pub use prefix::PrefixStore;
pub use tcp::TcpStore;
pub use watch::{Callback, Change, KeyWatch};

/// A timeout that never runs out.
pub const FOREVER: Duration = Duration::MAX;

/// A key-value store shared by the ranks of a job.
///
/// Keys are text, values are bytes. A timeout of zero checks once and does not wait, [`FOREVER`] waits without limit. An operation without a timeout waits
/// for the server for the [`TcpStore`]'s timeout, or for the lock of a rank's [`FileStore`] without limit, as torch's does. No operation returns later
/// than 100 ms after its timeout: then it is [`Error::Timeout`].
///
/// Errors, besides those of each operation: [`Error::Network`] when the server has ended, [`Error::System`] when a file cannot be used.
pub trait Store: Send + Sync {
    /// The same store, with another connection if it has one: threads that use different connections do not wait for each other.
    ///
    /// Errors: [`Error::Network`] if the server cannot be reached.
    fn reopen(self: Arc<Self>) -> Result<Arc<dyn Store>>;

    /// The port of its server, if it has one.
    fn server_port(&self) -> Option<u16> {
        None
    }

    /// Stores a value, replacing any other. Wakes those that wait for the key.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The key's value, waiting for the key to exist. Errors: [`Error::Timeout`].
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Waits until all keys exist. On a server a key that was set and deleted again meanwhile counts as existing, by torch's rule. A queue that is not empty
    /// counts as a key, but a server, torch's or ours, wakes only one waiter for each value that is pushed: the others wait on, though the queue is not
    /// empty. Errors: [`Error::Timeout`].
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Whether all keys exist now. A queue that is not empty counts as a key.
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Adds to a number, which starts from 0, and returns the sum, which wraps around at 64 bits; numbers are stored as decimal text. Errors:
    /// [`Error::Usage`] or, from a server, [`Error::Network`] when the value is no number of 64 bits. An empty value is no number on a server, and 0
    /// elsewhere: torch's rules.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// As `add`, with a deadline for waiting for a server or a lock.
    fn add_by(&self, key: &str, delta: i64, _: Deadline) -> Result<i64> {
        self.add(key, delta)
    }

    /// Stores `desired` if the value is `expected`, or if there is no value and `expected` is empty. Returns the value after that. A key that does
    /// not exist while `expected` is not empty stays so, and `expected` is returned: torch's rule.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// As `compare_set`, with a deadline for waiting for a server or a lock.
    fn compare_set_by(&self, key: &str, expected: &[u8], desired: &[u8], _: Deadline) -> Result<Vec<u8>> {
        self.compare_set(key, expected, desired)
    }

    /// Appends to a value, which starts empty.
    fn append(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The values of all keys, in their order, waiting for all to exist. Errors: [`Error::Timeout`].
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>>;

    /// Stores several values.
    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()>;

    /// Removes a key; false if it did not exist, but always true for a [`FileStore`], as torch's.
    fn delete_key(&self, key: &str) -> Result<bool>;

    /// How many keys the store holds: all of them, the store's own bookkeeping included, but no queues.
    fn num_keys(&self) -> Result<i64>;

    /// The keys, in no order, without the store's own. Keys that are no UTF-8 are left out.
    fn list_keys(&self) -> Result<Vec<String>>;

    /// Appends to a queue. Wakes one waiter.
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Takes the oldest value from a queue, waiting for one. Errors: [`Error::QueueEmpty`] if there is none and `timeout` is zero;
    /// [`Error::Timeout`].
    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// How many values a queue holds.
    fn queue_len(&self, key: &str) -> Result<i64>;

    /// Calls `callback` with each change of the key's value from now on, until the watch is dropped. Queues cannot be watched.
    ///
    /// Errors: [`Error::Unsupported`] from torch's servers.
    fn watch_key(&self, key: &str, callback: Callback) -> Result<KeyWatch>;

    /// Waits until `world_size` callers have joined; not at all if that is less than 1. A key works once: later callers do not wait. Errors:
    /// [`Error::Timeout`].
    fn barrier(&self, key: &str, world_size: i64, timeout: Duration) -> Result<()> {
        let last = format!("{key}/last_member");
        if self.add(&format!("{key}/num_members"), 1)? == world_size {
            self.set(&last, b"1")?;
        }
        if world_size < 1 {
            return Ok(());
        }
        self.wait(&[&last], timeout)
    }
}
