//! The rules: what NCCL relies on in a net plugin, one function each, run in fresh processes. A rule stands here only if NCCL depends on it, or
//! its header promises it, and if a deliberately broken plugin of `cli/tests/mutants` fails it.

mod connecting;
mod life;
mod messages;

use std::ops::RangeInclusive;

use super::rank::Rank;
use super::verdict::Verdict;

/// A rule of the interface.
pub struct Rule {
    /// What it is called.
    pub name: &'static str,
    /// The rule, in a sentence.
    pub says: &'static str,
    /// What depends on it.
    pub source: &'static str,
    /// Versions that it applies to.
    pub versions: RangeInclusive<u32>,
    /// Processes that it takes.
    pub ranks: usize,
    /// Whether the plugin is initialised before `run`.
    pub ready: bool,
    /// Whether no other rule makes sense in a version that fails it.
    pub gate: bool,
    /// A rank's part of it.
    pub run: fn(&mut Rank) -> Verdict,
}

/// What most rules are like.
const USUAL: Rule = Rule { name: "", says: "", source: "", versions: 4..=12, ranks: 2, ready: true, gate: false, run: |_| Ok(()) };

/// All rules, in the order in which they are run: the first of them are what the later ones need.
pub const RULES: &[&[Rule]] = &[life::RULES, connecting::RULES, messages::RULES];
