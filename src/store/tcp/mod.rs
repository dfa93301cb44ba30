//! PyTorch's TCPStore: one server, and clients that talk to it or to torch's.

mod client;
mod connection;
mod secret;
mod server;
mod shared_connection;
pub mod wire;

pub use client::{Host, TcpOptions, TcpStore};
pub use server::{Server, ServerOptions};

/// Torch's default port. Source: TCPStoreOptions::kDefaultPort.
pub const DEFAULT_PORT: u16 = 29500;
