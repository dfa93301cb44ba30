//! Key-value stores by which the ranks of a job find each other: PyTorch's, in its protocol and its file format, so that Railhead
//! programs join a torch job's store and torch programs use ours.
//!
//! [`rendezvous`] finds the job's store by a URL. [`TcpStore`] talks to a server, which may be its own; [`FileStore`] is a file; [`HashStore`] lives in one process; [`PrefixStore`] is a name space within another
//! store. All are called on any thread, several at a time; an operation may block its caller, up to the timeout that it was given.

#![forbid(unsafe_code)]

mod deadline;
mod error;
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
pub use file::FileStore;
pub use hash::HashStore;
pub use prefix::PrefixStore;
pub use tcp::TcpStore;
pub use watch::{Callback, Change, Watch};

/// A timeout that never runs out.
pub const FOREVER: Duration = Duration::MAX;

/// A key-value store shared by the ranks of a job.
///
/// Keys are text, values are bytes. A timeout of zero looks once and does not wait, [`FOREVER`] waits without limit. What is given no timeout waits for a server or for
/// the lock of a file as long as the store was told when it was made: [`TcpStore`] for its own timeout, a rank's [`FileStore`] without limit, as torch's does.
/// No operation returns later than 100 ms after its timeout: then it is [`Error::Timeout`].
///
/// Errors, besides those of each operation: [`Error::Network`] when a server is gone, [`Error::System`] when a file cannot be used.
pub trait Store: Send + Sync {
    /// The same store once more, with a connection of its own if it has one: a thread that waits does not keep others from that.
    ///
    /// Errors: [`Error::Network`] if the server cannot be reached.
    fn reopen(self: Arc<Self>) -> Result<Arc<dyn Store>>;

    /// The port of its server, if it has one.
    fn server_port(&self) -> Option<u16> {
        None
    }

    /// Stores a value, replacing any other. Whoever waits for the key goes on.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The key's value, waiting for the key to exist. Errors: [`Error::Timeout`].
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Waits until all keys exist. On a server a key that has come meanwhile and was deleted again counts as there, by torch's rule. A queue that holds something counts as a key, but a server, torch's or ours, lets only one who waits go on for each
    /// value that is pushed: the others wait on, though the queue is not empty. Errors: [`Error::Timeout`].
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Whether all keys exist now. A queue that holds something counts as a key.
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Adds to a number, which starts from 0, and returns the sum, which wraps around at 64 bits; numbers are stored as decimal text. Errors:
    /// [`Error::Usage`] or, from a server, [`Error::Network`] when the value is no number of 64 bits. An empty value is none on a server, and 0 elsewhere:
    /// torch's rules.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// As `add`, over by a deadline where a server or a lock may be waited for.
    fn add_by(&self, key: &str, delta: i64, _: Deadline) -> Result<i64> {
        self.add(key, delta)
    }

    /// Stores `desired` if the value is `expected`, or if there is no value and `expected` is empty. Returns the value after that. A key that does
    /// not exist while `expected` is not empty stays so, and `expected` is returned: torch's rule.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Appends to a value, which starts empty.
    fn append(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The values of all keys, in their order, waiting for all to exist. Errors: [`Error::Timeout`].
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>>;

    /// Stores several values.
    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()>;

    /// Removes a key; false if it did not exist, but always true of a [`FileStore`], as torch's. Whoever waits for it goes on waiting.
    fn delete_key(&self, key: &str) -> Result<bool>;

    /// How many keys the store holds: all of them, the store's own bookkeeping included, but no queues.
    fn num_keys(&self) -> Result<i64>;

    /// The keys, in no order, without the store's own. Keys that are no UTF-8 are left out.
    fn list_keys(&self) -> Result<Vec<String>>;

    /// Appends to a queue. One who waits for the queue goes on.
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Takes the oldest value from a queue, waiting for one. Errors: [`Error::QueueEmpty`] if there is none and `timeout` is zero;
    /// [`Error::Timeout`].
    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// How many values a queue holds.
    fn queue_len(&self, key: &str) -> Result<i64>;

    /// Has `callback` called with each change of the key's value from now on, until the watch is dropped. Queues are not watched.
    ///
    /// Errors: [`Error::Unsupported`] by torch's servers.
    fn watch_key(&self, key: &str, callback: Callback) -> Result<Watch>;

    /// Waits until `world_size` callers have come; not at all if that is less than 1. A key serves once: later callers find it open. Errors:
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
