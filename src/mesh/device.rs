//! Parts of registered memory, as messages come from them and go to them. Any thread.

use crate::base::error::Result;
use crate::fabric::RegionView;
pub use crate::link::device::{Device, Registered};
use crate::link::limits::MAX_RAILS;

use super::protocol::Small;

/// Part of registered memory, to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// First byte.
    pub addr: usize,
    /// Bytes.
    pub len: usize,
    /// Its keys, rail by rail.
    pub lkeys: [u32; MAX_RAILS],
    /// The bytes themselves, if they are few.
    pub small: Option<Small>,
}

/// The same, to be received into: what its sender is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// First byte.
    pub addr: usize,
    /// Bytes.
    pub len: usize,
    /// Its keys, rail by rail.
    pub rkeys: [u32; MAX_RAILS],
}

impl Part {
    /// A small message alone.
    pub fn inside(small: Small) -> Part {
        Part { addr: 0, len: small.len(), lkeys: [0; MAX_RAILS], small: Some(small) }
    }
}

/// Where a message is received, until it is.
#[derive(Clone, Copy)]
pub struct Destination<'a> {
    /// What its sender is told.
    pub place: Place,
    /// Its bytes, if there are any.
    pub view: Option<RegionView<'a>>,
}

impl Destination<'_> {
    /// None: a small message of so many bytes is for whoever waits for it.
    pub fn inside(len: usize) -> Self {
        Destination { place: Place { addr: 0, len, rkeys: [0; MAX_RAILS] }, view: None }
    }

    /// A small message has come.
    pub fn write(&self, small: &Small) {
        if let Some(view) = self.view {
            view.write(small.bytes());
        }
    }
}

impl Registered {
    fn addr(&self, offset: usize, len: usize) -> Result<usize> {
        if len == 0 && offset <= self.len() { Ok(0) } else { self.view(offset, len).map(|view| view.addr()) }
    }

    /// The same, to be sent.
    ///
    /// Errors: as above.
    pub(super) fn part(&self, offset: usize, len: usize) -> Result<Part> {
        let addr = self.addr(offset, len)?;
        let small = Small::new(len, |bytes| {
            if let Ok(view) = self.view(offset, len) {
                view.read(bytes);
            }
        });
        Ok(Part { addr, len, lkeys: self.lkeys(), small })
    }

    /// The same, to be received into.
    ///
    /// Errors: as above.
    pub(super) fn place(&self, offset: usize, len: usize) -> Result<Destination<'_>> {
        let place = Place { addr: self.addr(offset, len)?, len, rkeys: self.rkeys() };
        Ok(Destination { place, view: self.view(offset, len).ok() })
    }
}
