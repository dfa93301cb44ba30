//! The library as others have it: its tables and functions seen from C, the file itself, the examples and the documents. One program for all of
//! these tests, so that their waits overlap.

#[path = "c/build.rs"]
mod build;
mod support;

/// The tests, by subject.
mod library {
    pub mod artifact;
    pub mod docs;
    pub mod examples;
    pub mod idle;
    pub mod launch;
    pub mod layout;
    pub mod mesh;
    pub mod mesh_faults;
    pub mod mesh_stopped;
    pub mod misuse;
    pub mod rails;
    pub mod tensor;
    pub mod tensor_faults;
    pub mod tensor_stopped;
}

use library::{idle, mesh_faults, mesh_stopped, rails, tensor_faults, tensor_stopped};

#[test]
fn child_entry() {
    support::enter(
        &[idle::ROLES, mesh_faults::ROLES, mesh_stopped::ROLES, rails::ROLES, tensor_faults::ROLES, tensor_stopped::ROLES].concat(),
    );
}
