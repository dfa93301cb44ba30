//! The program's commands as users run them. One program for all of these tests, so that their waits overlap.

#[path = "../../tests/support/fake_ibverbs.rs"]
mod fake_ibverbs;
#[path = "../../tests/support/mod.rs"]
mod support;

/// The tests, by command.
mod commands {
    pub mod check;
    pub mod info;
    pub mod library;
    pub mod mesh;
    pub mod mesh_stats;
    pub mod perf;
    pub mod stats;
    pub mod store;
    pub mod tensor_stats;
    pub mod top;
}

use commands::{mesh_stats, stats, tensor_stats, top};

#[test]
fn child_entry() {
    support::enter(&[mesh_stats::ROLES, stats::ROLES, tensor_stats::ROLES, top::ROLES].concat());
}
