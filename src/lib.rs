//! Railhead: an NCCL network plugin, and the small RDMA library it is made of.
//!
//! Modules depend downwards only: [`abi`] is the C boundary, [`net`] the plugin's semantics, [`fabric`] the RDMA vocabulary and
//! its providers, [`store`] where ranks find each other, [`base`] what everybody needs. Unsafe code lives in `abi`, `fabric` and `base` alone.

pub mod abi;
pub mod base;
pub mod fabric;
pub mod net;
pub mod store;
