//! What every module needs and none of them owns: errors, configuration, logging, counters, memory shared with a peer, and the
//! few words with the operating system that have nothing to do with RDMA.
//!
//! Nothing here runs at load time, starts a thread or opens a socket. Process-wide state starts anew in a forked child.

pub mod clock;
pub mod config;
pub mod error;
pub mod fd;
pub mod fork;
pub mod host;
pub mod listen;
pub mod log;
pub mod mac;
pub mod mem;
pub mod process;
pub mod rand;
pub mod signal;
pub mod slab;
pub mod stage;
pub mod stats;
pub mod sync;
#[cfg(test)]
pub mod testing;
pub mod thread;
pub mod wakeup;
