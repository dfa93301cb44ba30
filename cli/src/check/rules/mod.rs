//! The rules: what NCCL relies on in a net plugin, one function each, run in fresh processes. A rule stands here only if NCCL depends on it or
//! promises it to plugins' authors, and if a deliberately broken plugin of `cli/tests/mutants` fails it.
//!
//! Sources are of NVIDIA/nccl; "README" is plugins/net/README.md there, "net.h" the interface's header.

mod closing;
mod comms;
mod completion;
mod connecting;
mod device;
mod life;
mod memory;
mod messages;
mod order;
mod requests;
mod sizes;

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
    /// Whether a plugin without a device can pass it.
    pub deviceless: bool,
    /// A rank's part of it.
    pub run: fn(&mut Rank) -> Verdict,
}

/// What most rules are like.
const USUAL: Rule =
    Rule { name: "", says: "", source: "", versions: 4..=12, ranks: 2, ready: true, gate: false, deviceless: false, run: |_| Ok(()) };

pub use life::DEVICES;

/// All rules, in the order in which they are run: the first of them are what the later ones need.
pub const RULES: &[&[Rule]] = &[
    life::RULES,
    device::RULES,
    connecting::RULES,
    memory::RULES,
    requests::RULES,
    completion::RULES,
    messages::RULES,
    order::RULES,
    sizes::RULES,
    comms::RULES,
    closing::RULES,
    life::CYCLES,
];
