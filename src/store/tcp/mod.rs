//! PyTorch's TCPStore: one server, and clients that talk to it or to torch's.

mod client;
mod connection;
mod secret;
mod server;
mod turn;
pub mod wire;

pub use client::{Host, TcpOptions, TcpStore};
pub use server::{Server, ServerOptions};

/// Where torch's stores listen unless told otherwise. Source: TCPStoreOptions::kDefaultPort.
pub const DEFAULT_PORT: u16 = 29500;
