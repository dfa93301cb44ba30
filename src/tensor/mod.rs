//! Producers and consumers of named tensors, step by step, on workers that know each other by name: TensorFlow's verbs rendezvous, on
//! [`link`](crate::link) and any store.
//!
//! A [`Manager`] has an [`adapter`] to each other worker, whose [`channel`] says what is to be done with messages and buffers; a [`Rendezvous`] is
//! one step, in whose [`table`] a tensor waits for its receiver or a receiver for its tensor. A consumer asks the producer's worker. In Buffered mode
//! the tensor goes through a buffer of its name, which both have, and is copied out by the thread that wants it; in Direct mode ([`direct`]) it goes
//! from the producer's [`memory`] into the consumer's.
//!
//! Workers trust each other: a peer can write into the buffers that it was told of, and the tables' hashes do not withstand keys that were chosen to
//! collide.
#![forbid(unsafe_code)]

mod adapter;
mod buffers;
mod calls;
mod channel;
mod cleaned;
mod connect;
mod core;
mod direct;
mod event;
mod io;
mod key;
mod leaving;
mod mailbox;
mod manager;
mod memory;
mod message;
mod rendezvous;
mod report;
mod shared;
#[cfg(feature = "sim")]
pub mod simulated;
mod steps;
mod table;
mod value;

pub use adapter::Mode;
pub use core::State;
pub use key::Key;
pub use manager::{Manager, MemoryHandle};
pub use memory::Release;
pub use message::Meta;
pub use rendezvous::Rendezvous;
pub use value::Tensor;

#[cfg(test)]
mod tests;
