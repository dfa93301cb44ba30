//! Railhead: an NCCL network plugin, and the small RDMA library it is made of.
//!
//! Modules depend downwards only: [`abi`] is the C boundary, [`net`] the plugin's semantics, [`engine`] the persistent thread, [`fabric`] the RDMA
//! vocabulary and its providers, [`store`] where ranks find each other, [`base`] what everybody needs. Unsafe code lives in `abi`, `fabric` and
//! `base`.

pub mod abi;
pub mod base;
pub mod engine;
pub mod fabric;
pub mod net;
pub mod store;
