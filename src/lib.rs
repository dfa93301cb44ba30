//! Railhead: an NCCL network plugin, and the small RDMA library it is made of.

pub mod base;
pub mod fabric;
pub mod net;
