//! A tensor: what is known of it, and its bytes. Made by producers, and for consumers. Any thread.

use std::borrow::Cow;
use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::fabric::RegionView;

use super::memory::Memory;
use super::message::Meta;

/// Clones share the bytes.
#[derive(Clone)]
pub struct Tensor {
    meta: Meta,
    contents: Contents,
}

#[derive(Clone)]
enum Contents {
    Own(Arc<Vec<u8>>),
    /// In as many of its first bytes as the tensor has.
    Placed(Arc<Memory>),
}

impl Tensor {
    /// With these contents. What the number of the data type means, and that shape and bytes go together, is the users' concern.
    ///
    /// Errors: more than 16 dimensions, or one below zero.
    pub fn new(data_type: u32, shape: &[i64], bytes: Vec<u8>) -> Result<Tensor> {
        let meta = meta(data_type, shape, bytes.len())?;
        Ok(Tensor { meta, contents: Contents::Own(Arc::new(bytes)) })
    }

    /// What a producer sends that has nothing to send, as of a branch that is not taken.
    pub fn dead() -> Tensor {
        Tensor { meta: Meta { is_dead: true, ..Meta::default() }, contents: Contents::Own(Arc::default()) }
    }

    /// As it came. `bytes` must be as many as is said.
    pub(super) fn received(meta: Meta, bytes: Vec<u8>) -> Tensor {
        Tensor { meta, contents: Contents::Own(Arc::new(bytes)) }
    }

    /// One in this memory, which has as many bytes as is said, or more.
    pub(super) fn placed(meta: Meta, memory: Arc<Memory>) -> Tensor {
        Tensor { meta, contents: Contents::Placed(memory) }
    }

    /// What is known of it without its bytes.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.meta.bytes as usize
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its contents: a copy, if they are in memory that is registered.
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        match &self.contents {
            Contents::Own(bytes) => Cow::Borrowed(bytes.as_slice()),
            Contents::Placed(memory) => {
                let mut bytes = vec![0; self.len()];
                if let Some(view) = memory.view(self.len()) {
                    view.read(&mut bytes);
                }
                Cow::Owned(bytes)
            }
        }
    }

    /// Where its contents are, as long as it is.
    pub fn as_ptr(&self) -> *const u8 {
        match &self.contents {
            Contents::Own(bytes) => bytes.as_ptr(),
            Contents::Placed(memory) => std::ptr::with_exposed_provenance(memory.addr()),
        }
    }

    /// Copies its contents, as many as there is room for.
    pub(super) fn copy_to(&self, view: &RegionView<'_>) {
        match &self.contents {
            Contents::Own(bytes) => view.write(bytes),
            Contents::Placed(memory) => {
                if let Some(from) = memory.view(self.len()) {
                    view.copy_from(&from);
                }
            }
        }
    }

    /// The memory in which it is.
    pub(super) fn memory(&self) -> Option<&Arc<Memory>> {
        match &self.contents {
            Contents::Own(_) => None,
            Contents::Placed(memory) => Some(memory),
        }
    }

    /// Moved into other memory, unless it is there.
    ///
    /// Errors: it has too few bytes.
    pub(super) fn moved(self, into: &Arc<Memory>) -> Result<Tensor> {
        if self.memory().is_some_and(|memory| Arc::ptr_eq(memory, into)) {
            return Ok(self);
        }
        fits(&self.meta, into)?;
        if let Some(view) = into.view(self.len()) {
            self.copy_to(&view);
        }
        Ok(Tensor::placed(self.meta, into.clone()))
    }

    /// Whether its producer had nothing to send.
    pub fn is_dead(&self) -> bool {
        self.meta.is_dead
    }
}

/// Errors: as for [`Tensor::new`].
pub(super) fn meta(data_type: u32, shape: &[i64], bytes: usize) -> Result<Meta> {
    Meta::new(data_type, shape, bytes as u64, false).map_err(|why| Error::usage(format!("a tensor: {why}")))
}

/// Errors: the memory has too few bytes for such a tensor.
pub(super) fn fits(meta: &Meta, into: &Memory) -> Result<()> {
    if meta.bytes <= into.len() as u64 {
        return Ok(());
    }
    Err(Error::usage(format!("a tensor of {} bytes, received into {}", meta.bytes, into.len())))
}

impl PartialEq for Tensor {
    fn eq(&self, other: &Tensor) -> bool {
        self.meta == other.meta && self.bytes() == other.bytes()
    }
}

impl Eq for Tensor {}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tensor").field("meta", &self.meta).finish_non_exhaustive()
    }
}
