//! The library's one error type. Made by every module, on any thread, always off the hot path;
//! turned into an `ncclResult_t` by `abi` alone.
//!
//! The kinds are those that a caller can act on and that the C status codes distinguish: who has to mend it. The message names the operation, the
//! value and the accepted range.

use std::io;

/// Result of the library's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed operation.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system or a NIC refused an operation (`ncclSystemError`).
    #[error("{what}: {word}")]
    System {
        /// The operation that failed.
        what: String,
        /// The system's error. Not the `source` of this error: its text includes it.
        word: io::Error,
    },
    /// The caller broke the contract of the interface, or the library has a fault (`ncclInternalError`).
    #[error("{0}")]
    Internal(String),
    /// A size, an argument or a setting that the user can mend (`ncclInvalidUsage`).
    #[error("{0}")]
    Usage(String),
    /// The peer is gone, or broke the protocol (`ncclRemoteError`).
    #[error("{0}")]
    Remote(String),
    /// What was waited for did not happen in time. NCCL's interface has no such wait.
    #[error("{0}")]
    Timeout(String),
}

impl Error {
    /// A system error of an operation.
    pub fn system(what: impl Into<String>, word: io::Error) -> Self {
        let mut what = what.into();
        if word.raw_os_error() == Some(libc::EMFILE) {
            what.push_str(&descriptor_limit());
        }
        Error::System { what, word }
    }

    /// The calling thread's `errno`, with the operation that set it.
    pub fn last_os(what: impl Into<String>) -> Self {
        Self::system(what, io::Error::last_os_error())
    }

    /// The same error, with another operation named before it.
    pub fn within(self, operation: &str) -> Self {
        let said = |text| format!("{operation}: {text}");
        match self {
            Error::System { what, word } => Error::System { what: said(what), word },
            Error::Internal(text) => Error::Internal(said(text)),
            Error::Usage(text) => Error::Usage(said(text)),
            Error::Remote(text) => Error::Remote(said(text)),
            Error::Timeout(text) => Error::Timeout(said(text)),
        }
    }

    /// A broken contract.
    pub fn internal(what: impl Into<String>) -> Self {
        Error::Internal(what.into())
    }

    /// A mistake that the user can mend.
    pub fn usage(what: impl Into<String>) -> Self {
        Error::Usage(what.into())
    }

    /// A peer that is gone or misbehaves.
    pub fn remote(what: impl Into<String>) -> Self {
        Error::Remote(what.into())
    }

    /// A wait that is over.
    pub fn timeout(what: impl Into<String>) -> Self {
        Error::Timeout(what.into())
    }
}

/// What to do about the most common reason for EMFILE.
#[cold]
fn descriptor_limit() -> String {
    match super::fd::limit() {
        Some(limit) => format!(" (RLIMIT_NOFILE is {}: raise it with `ulimit -n`, to {} at most)", limit.rlim_cur, limit.rlim_max),
        None => " (RLIMIT_NOFILE is too low: raise it with `ulimit -n`)".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_systems_word_is_said_once() {
        let error = Error::system("open x", io::Error::from_raw_os_error(libc::EACCES));
        assert_eq!(error.to_string(), "open x: Permission denied (os error 13)");
        assert!(std::error::Error::source(&error).is_none(), "who prints the sources as well prints it again");
    }

    #[test]
    fn running_out_of_descriptors_says_what_to_do() {
        let error = Error::system("socket", io::Error::from_raw_os_error(libc::EMFILE)).to_string();
        assert!(error.contains("RLIMIT_NOFILE") && error.contains("ulimit -n"), "{error}");
        let other = Error::system("socket", io::Error::from_raw_os_error(libc::ENOMEM)).to_string();
        assert!(!other.contains("RLIMIT"), "{other}");
    }
}
