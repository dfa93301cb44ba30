//! What threads of one process meet through: the standard library's types, under the names that files use which `tests/loom.rs` compiles a second
//! time, over loom's types of the same names.

pub use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Words that threads share.
pub mod atomic {
    pub use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
}

/// Locks, also after a thread has panicked under the lock. What it guards must be whole wherever a critical section may panic, or only be read afterwards,
/// as the state of an engine is. Where that does not hold, take `Mutex::lock`.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
