//! Runs the layers above the fabric in a simulated world, schedule after schedule: what happens when, which rail fails and when it comes back, and who is
//! slow all follow from a seed. A schedule that breaks a promise can be run again by it. Only under the feature `sim`; `tests/sim.rs` calls it.
//!
//! A scenario says what the ranks do, and what must hold ([`net`], [`duplex`], [`mesh`], [`tensor`]). A [`schedule`] polls them in turn: between two polls the world's time goes on,
//! and no code under test ever waits.
#![forbid(unsafe_code)]

pub mod duplex;
pub mod mesh;
pub mod net;
mod schedule;
pub mod tensor;

use std::fmt;

use crate::fabric::sim::Random;

/// What a schedule is made of.
#[derive(Debug, Clone)]
pub struct Options {
    /// All that is random follows from it.
    pub seed: u64,
    /// Rails of a comm; 0: two or three.
    pub rails: usize,
    /// Faults at most.
    pub faults: usize,
    /// Messages.
    pub messages: usize,
}

/// How a schedule went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    /// The same for the same seed.
    pub trace: u64,
    /// Rails that have failed, and have come back, at either end.
    pub failures: u64,
    /// See there.
    pub reconnects: u64,
    /// Messages that were received as they were sent.
    pub messages: u64,
    /// The comm has failed, as no rail was left for a while.
    pub has_ended: bool,
    /// Nanoseconds in its world.
    pub time: u64,
}

/// A promise that was broken.
#[derive(Debug, Clone)]
pub struct Violation {
    /// By which it can be seen again.
    pub seed: u64,
    /// What has happened.
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {:#x}: {}", self.seed, self.what)
    }
}

/// What a message of that pattern is made of.
fn bytes_of(len: usize, pattern: u64) -> Vec<u8> {
    let mut random = Random(pattern);
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        out.extend_from_slice(&random.draw().to_le_bytes());
    }
    out.truncate(len);
    out
}
