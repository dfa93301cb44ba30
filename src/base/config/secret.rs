//! A setting that is never shown.

use std::ffi::OsStr;
use std::fmt;

use super::value::Value;

/// A secret that processes share; none if it is empty. Its text is only ever used as a key.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

/// What is shown in its place.
const HIDDEN: &str = "(hidden)";

impl Secret {
    /// This text.
    pub fn new(text: impl Into<String>) -> Self {
        Secret(text.into())
    }

    /// The key that it is, if there is one.
    pub fn key(&self) -> Option<&[u8]> {
        (!self.0.is_empty()).then_some(self.0.as_bytes())
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "no secret" } else { "a secret" })
    }
}

impl Value for Secret {
    type Limits = ();

    fn parse(text: &str, (): &()) -> Option<Self> {
        Some(Secret::new(text))
    }

    /// A blank secret is an error: it is neither a secret nor the absence of one.
    fn read(text: &OsStr, (): &()) -> Option<Self> {
        let text = text.to_str()?;
        (text.is_empty() || !text.trim().is_empty()).then(|| Secret::new(text.trim()))
    }

    fn show_rejected(_: &OsStr) -> String {
        HIDDEN.into()
    }

    fn accepted((): &()) -> String {
        "UTF-8 text that is not blank, or empty".into()
    }

    fn show(&self) -> String {
        if self.0.is_empty() { String::new() } else { HIDDEN.into() }
    }
}
