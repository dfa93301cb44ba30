//! Ranks that exchange messages and compute together: Gloo's transport and collectives, on [`link`](crate::link) and any store.
//!
//! A [`Mesh`] has a [`pair`] to each other rank ([`connect`] makes them). A receive is announced to its sender, who WRITEs the message straight into its
//! memory ([`protocol`]). Collectives ([`coll`]) are futures over sends and receives; whoever waits drives the mesh for all ([`driver`](crate::link::driver)).
//!
//! Ranks trust each other: a peer can write into memory that it was told of until the operation is over.
#![forbid(unsafe_code)]

mod addresses;
mod buffer;
mod coll;
mod connect;
mod context;
mod core;
mod device;
mod matching;
mod ops;
mod outstanding;
mod pair;
mod protocol;
mod recvs;
mod reduce;
mod report;
mod running;
mod sendrecv;
#[cfg(feature = "sim")]
pub mod simulated;
mod slots;
mod small;
mod small_sends;
mod unbound;

pub use buffer::Buffer;
pub use coll::{Algorithm, Options};
pub use context::Mesh;
pub use device::{Device, Registered};
pub use outstanding::Waited;
pub use reduce::{DataType, Op, Reduction};
pub use unbound::UnboundBuffer;

/// What reads a peer's bytes, for `make fuzz`.
#[cfg(fuzzing)]
pub mod fuzzed {
    pub use super::addresses::find as find_address;
    pub use super::protocol::Control;
}

#[cfg(test)]
mod tests;
