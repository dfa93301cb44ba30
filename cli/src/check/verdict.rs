//! What comes of a rule: in a rank ([`Stop`]), and in all ([`Outcome`]).

use std::fmt::Display;

use crate::plugin::Failure;

/// Why a rank stopped before the end of its rule.
#[derive(Debug)]
pub enum Stop {
    /// The plugin broke the rule.
    Fail(String),
    /// The rule does not apply to this plugin.
    Skip(String),
    /// The other rank ended, or did not come this far; it knows why.
    Aside(String),
}

/// What a step of a rule gives.
pub type Verdict<T = ()> = Result<T, Stop>;

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Stop {
        Stop::Fail(failure.to_string())
    }
}

/// Fails the rule unless `holds`.
pub fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Verdict {
    if holds { Ok(()) } else { Err(Stop::Fail(otherwise())) }
}

/// Adds to a failure what was being done.
pub fn during<T, E: Into<Stop>>(what: impl Display, result: Result<T, E>) -> Verdict<T> {
    result.map_err(|error| match error.into() {
        Stop::Fail(why) => Stop::Fail(format!("{what}: {why}")),
        other => other,
    })
}

/// What came of a rule in a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// All ranks reached the end.
    Passed,
    /// A rank saw the rule broken, crashed or hung.
    Failed(String),
    /// There is nothing to check in this plugin.
    Skipped(String),
}
