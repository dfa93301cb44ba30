//! The library as others have it: its tables and functions seen from C, the file itself, the examples and the documents. One program for all of
//! these tests, so that their waits overlap.

#[path = "c/build.rs"]
mod build;

/// The tests, by subject.
mod library {
    pub mod artifact;
    pub mod docs;
    pub mod examples;
    pub mod layout;
    pub mod mesh;
    pub mod misuse;
}
