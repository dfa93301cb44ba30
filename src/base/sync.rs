//! What threads of one process meet through: the standard library's types, under the names that files use which `tests/loom.rs` compiles a second
//! time, over loom's types of the same names.

pub use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Words that threads share.
pub mod atomic {
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
}
