//! What can go wrong with a store. The kinds are those that torch distinguishes, because callers act on them; the texts are torch's
//! wherever users search for them.

use std::time::Duration;

use crate::base;

/// What every fallible function of a store returns.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed operation of a store.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What was waited for did not happen in time (torch: `DistStoreError`).
    #[error("{0}")]
    Timeout(String),
    /// Nothing to pop (torch: `QueueEmptyError`).
    #[error("queue is empty")]
    QueueEmpty,
    /// This kind of store has no such operation (torch: `NotImplementedError`).
    #[error("{0}")]
    Unsupported(String),
    /// An argument that the caller can mend (torch: `ValueError`).
    #[error("{0}")]
    Usage(String),
    /// The server is gone, cannot be reached, or answers what no correct server answers (torch: `DistNetworkError`).
    #[error("{0}")]
    Network(String),
    /// The operating system refused something else.
    #[error(transparent)]
    System(#[from] base::error::Error),
}

impl Error {
    /// A wait that ran out.
    pub(super) fn wait_timeout(timeout: Duration, keys: &[&str]) -> Self {
        Error::Timeout(format!("wait timeout after {}ms, keys: {}", timeout.as_millis(), keys.join(", ")))
    }

    /// A call to the operating system that failed.
    pub(super) fn system(what: impl Into<String>, source: std::io::Error) -> Self {
        Error::System(base::error::Error::system(what, source))
    }
}
