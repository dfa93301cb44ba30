//! What a channel tells its worker: what the peer wants, and what has become of what was asked of it. Under the lock of the manager; a tensor in its
//! buffer is copied out without it.

use std::sync::{Arc, OnceLock};

use crate::base::error::{Error, Result};
use crate::link::Failure;
use crate::link::device::Registered;

use super::key::TensorId;
use super::memory::{COPIED, Memory, Pool};
use super::message::{HEADER, Meta};
use super::value::{self, Tensor, fits};

/// What the peer wants of this worker, or has for it.
pub enum ChannelEvent {
    /// It wants a tensor: `found` or `not_found` of the adapter answers.
    Find {
        /// Which.
        id: TensorId,
        /// It has asked for one of this name before, which was found.
        again: bool,
    },
    /// It does not want it any more: `forgotten` of the adapter, if it was still looked for.
    Forget {
        /// Which.
        id: TensorId,
    },
    /// It was found, and is not wanted any more.
    Back {
        /// Which.
        id: TensorId,
        /// As it was found.
        tensor: Tensor,
    },
    /// A tensor is here.
    Here {
        /// Which.
        id: TensorId,
        /// With its memory, which nobody writes to any more.
        tensor: Tensor,
    },
    /// A tensor is here: the adapter's `consumed` once it was copied out.
    Landed {
        /// Which.
        id: TensorId,
        /// Where it is.
        tensor: Arc<Landed>,
    },
    /// A tensor will not come, and why.
    Failed {
        /// Which.
        id: TensorId,
        /// In the peer's words.
        why: Error,
    },
    /// There is none for it here: the request is being taken back.
    NoMemory {
        /// Which.
        id: TensorId,
        /// Or too little, where a receive has brought it.
        why: Error,
    },
    /// A request was taken back, and nothing has come of it.
    Withdrawn {
        /// Which.
        id: TensorId,
    },
}

/// A tensor in its buffer.
pub struct Landed {
    /// The buffer's number.
    pub index: usize,
    meta: Meta,
    memory: Arc<Registered>,
    pool: Arc<Pool>,
    copy: OnceLock<std::result::Result<Tensor, Failure>>,
}

impl Landed {
    /// In the buffer of this number, whose memory it is; it is copied to memory of the pool.
    pub fn new(index: usize, meta: Meta, memory: Arc<Registered>, pool: Arc<Pool>) -> Landed {
        Landed { index, meta, memory, pool, copy: OnceLock::new() }
    }

    /// Whether its buffer has this memory.
    pub fn is_in(&self, memory: &Arc<Registered>) -> bool {
        Arc::ptr_eq(&self.memory, memory)
    }

    /// A copy, for which no lock is needed; and whether it was made now, and so the adapter's `consumed` is due. All copies share their bytes.
    /// `between` is called now and then.
    ///
    /// Errors: no memory.
    pub fn copy(&self, between: &mut impl FnMut()) -> (Result<Tensor>, bool) {
        let mut made = false;
        let copy = self.copy.get_or_init(|| {
            made = true;
            self.copied(between).map_err(|why| Failure::from_error(&why))
        });
        (copy.clone().map_err(|why| why.error()), made)
    }

    fn copied(&self, between: &mut impl FnMut()) -> Result<Tensor> {
        let len = self.meta.bytes as usize;
        let view = self.memory.view(HEADER, len)?;
        if len <= COPIED {
            return Ok(Tensor::received(self.meta, view.to_vec()?));
        }
        // Memory of the process's would be mapped for each.
        let copy = self.pool.take(len)?;
        if let Some(place) = copy.view(len) {
            value::copy(&place, &view, between);
        }
        Ok(Tensor::placed(self.meta, Arc::new(copy)))
    }

    /// One in this memory, by the only one who wants it.
    ///
    /// Errors: it has too few bytes.
    pub fn copy_into(&self, into: &Arc<Memory>, between: &mut impl FnMut()) -> Result<Tensor> {
        fits(&self.meta, into)?;
        let len = self.meta.bytes as usize;
        if let Some(place) = into.view(len) {
            value::copy(&place, &self.memory.view(HEADER, len)?, between);
        }
        Ok(Tensor::placed(self.meta, into.clone()))
    }

    /// Its bytes.
    pub fn len(&self) -> u64 {
        self.meta.bytes
    }
}
