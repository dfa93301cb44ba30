//! Files of the library that threads meet in, compiled over loom's types, which try every order that a processor and a scheduler may choose.
//!
//! `base::sync` is here what it is in the library, but for whose types it names. So that a model is known to be able to fail, its primitives can be
//! made to misbehave, and each model is run with each misbehaviour that would be a mistake of the file.

#[path = "loom/door.rs"]
mod models_of_door;
#[path = "loom/sync.rs"]
mod sync;

/// Where the library's files look for what they need.
mod base {
    pub(crate) use super::sync;
}

#[allow(dead_code)]
#[path = "../src/engine/door.rs"]
mod door;
