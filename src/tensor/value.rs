//! A tensor: what is known of it, and its bytes. Made by producers, and for consumers. Any thread.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::fabric::RegionView;

use super::memory::Memory;
use super::message::Meta;

/// Bytes of a tensor that are copied without a look at anything else. Between two such slices the thread may do something: copies of a few MiB take
/// longer than it should leave its peers without an answer.
const SLICE: usize = 64 << 10;

/// Clones are the same one.
#[derive(Clone)]
pub struct Tensor(Arc<Value>);

struct Value {
    meta: Meta,
    contents: Contents,
}

enum Contents {
    Own(Vec<u8>),
    /// In as many of its first bytes as the tensor has.
    Placed(Arc<Memory>),
}

impl Tensor {
    /// With these contents. What the number of the data type means, and that shape and bytes go together, is the users' concern.
    ///
    /// Errors: more than 16 dimensions, or one below zero.
    pub fn new(data_type: u32, shape: &[i64], bytes: Vec<u8>) -> Result<Tensor> {
        let meta = meta(data_type, shape, bytes.len())?;
        Ok(Tensor::received(meta, bytes))
    }

    /// What a producer sends that has nothing to send, as of a branch that is not taken.
    pub fn dead() -> Tensor {
        Tensor::received(Meta { is_dead: true, ..Meta::default() }, Vec::new())
    }

    /// As it came. `bytes` must be as many as is said.
    pub(super) fn received(meta: Meta, bytes: Vec<u8>) -> Tensor {
        Tensor(Arc::new(Value { meta, contents: Contents::Own(bytes) }))
    }

    /// One in this memory, which has as many bytes as is said, or more.
    pub(super) fn placed(meta: Meta, memory: Arc<Memory>) -> Tensor {
        Tensor(Arc::new(Value { meta, contents: Contents::Placed(memory) }))
    }

    /// What is known of it without its bytes.
    pub fn meta(&self) -> &Meta {
        &self.0.meta
    }

    /// How many bytes it has.
    pub fn len(&self) -> usize {
        self.0.meta.bytes as usize
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its contents: a copy, if they are in memory that is registered.
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        match &self.0.contents {
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
        match &self.0.contents {
            Contents::Own(bytes) => bytes.as_ptr(),
            Contents::Placed(memory) => std::ptr::with_exposed_provenance(memory.addr()),
        }
    }

    /// Copies its contents, as many as there is room for; see [`SLICE`].
    pub(super) fn copy_to(&self, to: &RegionView<'_>, between: &mut impl FnMut()) {
        match &self.0.contents {
            Contents::Own(bytes) => in_slices(bytes.len().min(to.len()), between, |range| {
                if let (Some(to), Some(from)) = (to.part(range.start, range.len()), bytes.get(range)) {
                    to.write(from);
                }
            }),
            Contents::Placed(memory) => {
                if let Some(from) = memory.view(self.len()) {
                    copy(to, &from, between);
                }
            }
        }
    }

    /// The memory in which it is.
    pub(super) fn memory(&self) -> Option<&Arc<Memory>> {
        match &self.0.contents {
            Contents::Own(_) => None,
            Contents::Placed(memory) => Some(memory),
        }
    }

    /// Moved into other memory, unless it is there.
    ///
    /// Errors: it has too few bytes.
    pub(super) fn moved(self, into: &Arc<Memory>, between: &mut impl FnMut()) -> Result<Tensor> {
        if self.memory().is_some_and(|memory| Arc::ptr_eq(memory, into)) {
            return Ok(self);
        }
        fits(&self.0.meta, into)?;
        if let Some(view) = into.view(self.len()) {
            self.copy_to(&view, between);
        }
        Ok(Tensor::placed(self.0.meta, into.clone()))
    }

    /// Whether its producer had nothing to send.
    pub fn is_dead(&self) -> bool {
        self.0.meta.is_dead
    }
}

/// Copies the first bytes of `from`, as many as both have; see [`SLICE`].
pub(super) fn copy(to: &RegionView<'_>, from: &RegionView<'_>, between: &mut impl FnMut()) {
    in_slices(from.len().min(to.len()), between, |range| {
        if let (Some(to), Some(from)) = (to.part(range.start, range.len()), from.part(range.start, range.len())) {
            to.copy_from(&from);
        }
    });
}

fn in_slices(len: usize, between: &mut impl FnMut(), mut copy: impl FnMut(Range<usize>)) {
    for start in (0..len).step_by(SLICE) {
        if start > 0 {
            between();
        }
        copy(start..len.min(start + SLICE));
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
        self.0.meta == other.0.meta && self.bytes() == other.bytes()
    }
}

impl Eq for Tensor {}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tensor").field("meta", &self.0.meta).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::config::Config;
    use crate::base::mem::Pages;
    use crate::link::device::Device;
    use crate::tensor::memory::Pool;

    #[test]
    fn copies_are_whole_and_leave_time_for_other_things() {
        let pool = Pool::new(Device::open(Config::default(), "").unwrap());
        for len in [0, 1, SLICE, SLICE + 1, 5 * SLICE, 5 * SLICE + 100] {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 31 + i / 256) as u8).collect();
            let own = Tensor::new(1, &[len as i64], bytes.clone()).unwrap();
            let placed = Tensor::placed(*own.meta(), Arc::new(pool.copy(&bytes).unwrap()));
            for tensor in [own, placed] {
                let (pages, mut times) = (Pages::new(len + 1).unwrap(), 0);
                let into = Arc::new(pool.destination(pages.to_register().part(0, len).unwrap(), false).unwrap());
                drop(tensor.moved(&into, &mut || times += 1).unwrap());
                assert_eq!(times, len.saturating_sub(1) / SLICE, "{len}");
                let mut to = vec![1; len + 1];
                pages.read(0, &mut to);
                assert!(to[..len] == bytes && to[len] == 0, "{len}");
            }
        }
    }
}
