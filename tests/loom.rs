//! Files of the library that several threads use, compiled over loom's types, which try every order that a processor and a scheduler may choose.
//!
//! `base::sync` has the names of the library's, over loom's types. To show that a model can fail, its primitives can be made to misbehave, and each
//! model is run with each misbehaviour that would be a mistake of the file.

#[path = "loom/submit_queue.rs"]
mod models_of_submit_queue;
#[path = "loom/ring.rs"]
mod ring;
#[path = "loom/sync.rs"]
mod sync;

/// Where the library's files find what they use.
mod base {
    pub(crate) use super::sync;
}

#[allow(dead_code)]
#[path = "../src/engine/submit_queue.rs"]
mod submit_queue;
