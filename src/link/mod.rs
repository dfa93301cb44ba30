//! One connected peer: what `net`, and whoever else moves data between two processes, stands on.
//!
//! A [`Link`] has queue pairs on one or more rails ([`queue_pairs`]), cuts a message over them ([`plan`], [`sends`]), knows each outstanding request
//! ([`request`]) by the id in its work requests ([`wr_id`]), takes their completions, and notices when the peer is gone ([`liveness`]) or when something
//! waits too long ([`stall`]). What comes in is accounted for slot by slot ([`incoming`]). Registered memory is in [`memory`]; the thread that moves
//! links along under RAILHEAD_PROGRESS=thread in [`device_thread`].
//!
//! A comm of `net` uses a link one way. [`duplex`] uses one both ways, for layers whose ranks exchange [`address`]es through a store,
//! and [`driver`] is how their waiting threads move several of them along.
//!
//! One thread at a time drives a link: its caller's, or the device's under the lock of [`device_thread::Guarded`]. Nothing here knows how the peers
//! found each other: the handshake, and what is written where, belong to the layers above.
#![forbid(unsafe_code)]

pub mod address;
mod background;
mod connection;
pub mod control_connection;
pub mod device;
pub mod device_thread;
pub mod driver;
pub mod duplex;
mod failover;
mod failure;
pub mod incoming;
pub mod limits;
#[allow(clippy::module_inception)]
mod link;
pub mod liveness;
pub mod memory;
pub mod plan;
pub mod queue_pairs;
pub mod request;
pub mod sends;
mod stall;
pub mod wr_id;

pub use connection::Connection;
pub use failover::{CELLS_SIZE, Cells, Posted};
pub use failure::Failure;
pub use link::{Link, too_long};
