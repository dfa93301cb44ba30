//! Why a link cannot go on: kept, so that every later call on it fails as the first one did. Made by the thread that drives the link.

use std::io;

use crate::base::error::{Error, Result};

/// Whose doing it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Ours, or the caller's mistake.
    Internal,
    /// The user's, who can mend it.
    Usage,
    /// The system's, with its number for the error.
    System(i32),
    /// The peer's.
    Remote,
    /// Nobody's, as far as known: it took too long.
    Timeout,
}

/// What cannot go on: a link, or what stands on links.
#[derive(Debug, Clone)]
pub struct Failure {
    kind: Kind,
    text: String,
}

impl Failure {
    /// The peer is gone or broke the protocol.
    pub fn remote(text: String) -> Self {
        Failure { kind: Kind::Remote, text }
    }

    /// A mistake on this side.
    pub fn internal(text: String) -> Self {
        Failure { kind: Kind::Internal, text }
    }

    /// To fail later calls as the first one failed.
    pub fn from_error(error: &Error) -> Self {
        let kind = match error {
            Error::Remote(_) => Kind::Remote,
            Error::Timeout(_) => Kind::Timeout,
            Error::Usage(_) => Kind::Usage,
            Error::Internal(_) => Kind::Internal,
            Error::System { what, word } => {
                let number = word.raw_os_error().unwrap_or_default();
                return Failure { kind: Kind::System(number), text: what.clone() };
            }
        };
        Failure { kind, text: error.to_string() }
    }

    /// The same with the comm and its state around it.
    pub fn in_context(self, name: &str, state: &str) -> Self {
        Failure { text: format!("{name}: {}; {state}", self.text), ..self }
    }

    /// Whether it is the peer's doing.
    pub fn is_remote(&self) -> bool {
        matches!(self.kind, Kind::Remote | Kind::Timeout)
    }

    /// As an error, once per call that it makes fail.
    #[cold]
    pub fn error(&self) -> Error {
        match self.kind {
            Kind::Internal => Error::internal(self.text.clone()),
            Kind::Remote => Error::remote(self.text.clone()),
            Kind::Timeout => Error::timeout(self.text.clone()),
            Kind::Usage => Error::usage(self.text.clone()),
            Kind::System(number) => Error::System { what: self.text.clone(), word: io::Error::from_raw_os_error(number) },
        }
    }

    /// The same as a result.
    #[cold]
    pub fn result<T>(&self) -> Result<T> {
        Err(self.error())
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}
