//! The proxy: sends and receives over any ncclNet table on behalf of programs that cannot call a network.
//!
//! A producer writes data, a size and a counter into a [`ring`]; the engine's thread sees the counter move and calls the table. It stands where
//! NCCL's proxy stands, above the plugin table, so it drives any plugin.
//!
//! * [`ring`]: the memory that a program and the proxy share.
//! * [`net`]: what the proxy asks of a table.
//! * [`connector`]: one direction of a connection: a comm and a ring.
//! * [`args`]: one operation on a connector; [`send`] and [`recv`] move it on.
//! * [`save`]: which operations a transfer between ranks needs.

pub mod args;
pub mod connector;
pub mod net;
pub mod protocol;
pub mod recv;
pub mod ring;
pub mod save;
pub mod send;
#[cfg(test)]
mod tests;
