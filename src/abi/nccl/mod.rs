//! The tables that NCCL and RCCL look up by name: `ncclNetPlugin_v4` (NCCL 2.8) to `ncclNetPlugin_v12` (2.30).
//!
//! One file per version, with what that version brought: its types, the functions whose C signature changed, and the lists of members
//! of its properties and its table, which the macros of `declare` make the C types and the symbol of. A function
//! that did not change is the older file's, made for the newer version by its parameter `V`, which decides only which status codes
//! the host knows and what the log says. What the functions do is in [`calls`], once.

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)] // The field's names are NCCL's.

mod calls;
#[macro_use]
mod declare;
pub mod types;
pub mod v10;
pub mod v11;
pub mod v12;
pub mod v4;
pub mod v5;
pub mod v6;
pub mod v7;
pub mod v8;
pub mod v9;
