//! The errors of a store. The kinds are those that torch distinguishes, because callers act on them; the messages are torch's where users search for
//! them.

use std::time::Duration;

use crate::base;

/// Result of a store's function.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed operation of a store.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A wait has timed out (torch: `DistStoreError`).
    #[error("{0}")]
    Timeout(String),
    /// Nothing to pop (torch: `QueueEmptyError`).
    #[error("queue is empty")]
    QueueEmpty,
    /// This kind of store has no such operation (torch: `NotImplementedError`).
    #[error("{0}")]
    Unsupported(String),
    /// An invalid argument (torch: `ValueError`).
    #[error("{0}")]
    Usage(String),
    /// The server has ended, cannot be reached, or breaks the protocol (torch: `DistNetworkError`).
    #[error("{0}")]
    Network(String),
    /// The operating system refused something else.
    #[error(transparent)]
    System(#[from] base::error::Error),
}

impl Error {
    /// A wait that has timed out.
    pub(super) fn wait_timeout(timeout: Duration, keys: &[&str]) -> Self {
        Error::Timeout(format!("wait timeout after {}ms, keys: {}", timeout.as_millis(), keys.join(", ")))
    }

    /// A call to the operating system that failed.
    pub(super) fn system(what: impl Into<String>, source: std::io::Error) -> Self {
        Error::System(base::error::Error::system(what, source))
    }
}
