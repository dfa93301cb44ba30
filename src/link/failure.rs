//! Why a link cannot go on: kept, so that every later call on it fails as the first one did. Made by the thread that drives the link.

use crate::base::error::{Error, Result};

/// A link that cannot go on.
#[derive(Debug, Clone)]
pub struct Failure {
    /// Ours or the caller's mistake, rather than the peer's.
    internal: bool,
    text: String,
}

impl Failure {
    /// The peer is gone or broke the protocol.
    pub fn remote(text: String) -> Self {
        Failure { internal: false, text }
    }

    /// A mistake on this side.
    pub fn internal(text: String) -> Self {
        Failure { internal: true, text }
    }

    /// To fail later calls as the first one failed.
    pub fn from_error(error: &Error) -> Self {
        Failure { internal: !matches!(error, Error::Remote(_)), text: error.to_string() }
    }

    /// The same with the comm and its state around it.
    pub fn in_context(self, name: &str, state: &str) -> Self {
        Failure { text: format!("{name}: {}; {state}", self.text), ..self }
    }

    /// Whether it is the peer's doing.
    pub fn is_remote(&self) -> bool {
        !self.internal
    }

    /// As an error, once per call that it makes fail.
    #[cold]
    pub fn error(&self) -> Error {
        if self.internal { Error::internal(self.text.clone()) } else { Error::remote(self.text.clone()) }
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
