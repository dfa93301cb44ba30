//! The proxy: sends and receives over any ncclNet table on behalf of programs that cannot call a network.
//!
//! A producer writes data, a size and a counter into a [`ring`]; the engine's thread sees the counter move and calls the table.

pub mod protocol;
pub mod ring;
