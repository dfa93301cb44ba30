//! A tensor: what is known of it, and its bytes. Made by producers, and for consumers. Any thread.

use std::sync::Arc;

use crate::base::error::{Error, Result};

use super::message::Meta;

/// Clones share the bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    meta: Meta,
    bytes: Arc<Vec<u8>>,
}

impl Tensor {
    /// With these contents. What the number of the data type means, and that shape and bytes go together, is the users' concern.
    ///
    /// Errors: more than 16 dimensions, or one below zero.
    pub fn new(data_type: u32, shape: &[i64], bytes: Vec<u8>) -> Result<Tensor> {
        let meta = Meta::new(data_type, shape, bytes.len() as u64, false).map_err(|why| Error::usage(format!("a tensor: {why}")))?;
        Ok(Tensor { meta, bytes: Arc::new(bytes) })
    }

    /// What a producer sends that has nothing to send, as of a branch that is not taken.
    pub fn dead() -> Tensor {
        Tensor { meta: Meta { is_dead: true, ..Meta::default() }, bytes: Arc::default() }
    }

    /// As it came. `bytes` must be as many as is said.
    pub(super) fn received(meta: Meta, bytes: Vec<u8>) -> Tensor {
        Tensor { meta, bytes: Arc::new(bytes) }
    }

    /// What is known of it without its bytes.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Its contents.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether its producer had nothing to send.
    pub fn is_dead(&self) -> bool {
        self.meta.is_dead
    }
}
