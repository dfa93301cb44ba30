//! Railhead: an NCCL network plugin, and the small RDMA library it is made of.
//!
//! Modules depend downwards only: [`abi`] is the C boundary, [`proxy`] what sends for programs that cannot, [`net`] the plugin's semantics,
//! [`mesh`] collectives among ranks, [`tensor`] named tensors among workers, [`link`] one connected peer, [`engine`] the persistent thread,
//! [`fabric`] the RDMA vocabulary and its providers, [`store`] where ranks find each other, [`base`] what everybody needs. Unsafe code lives in
//! `abi`, `fabric`, `base` and the proxy's ring alone.

pub mod abi;
pub mod base;
pub mod engine;
pub mod fabric;
pub mod link;
pub mod mesh;
pub mod net;
pub mod proxy;
#[cfg(feature = "sim")]
pub mod sim;
pub mod store;
pub mod tensor;
