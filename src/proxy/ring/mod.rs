//! The ring that a producer and a consumer share: plain memory, with the proxy on one side and a program on the other, which may be a GPU kernel, a
//! real-time thread or another process. Made at connection set-up; its words are used on the threads of both sides.
//!
//! The proxy consumes from the ring of a send connector and produces into that of a receive connector. The memory is private to the process, a
//! mapping that another process opens, or supplied by the caller. What another process may write is not trusted: counters and sizes are copied,
//! checked by [`rules`], then used; the geometry is kept here and never read back.

pub mod layout;
pub mod lines;
pub mod rules;
pub mod side;
pub mod words;

pub use layout::{BUFFER_MAX, BUFFER_UNIT, Control, EMPTY, Geometry, STEPS};
pub use side::{Consumer, Producer};
pub use words::{Word, Words};

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::{self, Relaxed, Release};

use crate::base::error::{Error, Result};
use crate::base::mem::{Pages, Shm};
use crate::proxy::net::Buffer;
use crate::proxy::protocol::Protocol;

/// What can access the data of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Memory {
    /// The CPU.
    Host,
    /// A device: the CPU never accesses it, and data that a NIC wrote there is flushed before it is published.
    Device,
}

/// A ring and its memory.
pub struct Ring {
    control: NonNull<Control>,
    data: NonNull<u8>,
    geometry: Geometry,
    memory: Memory,
    home: Home,
}

enum Home {
    Private(Pages),
    Shared(Shm),
    Caller,
}

// SAFETY: `control` points to atomics alone. `data` is handed out as an address, and touched here only by `copy_in` and `copy_out`, whose
// requirement says who may. The memory outlives `self`: it belongs to `home`, or to a caller who vouched for it.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    /// A ring in private memory, whose counters start from `start`.
    ///
    /// Errors: no memory.
    pub fn private(geometry: Geometry, start: u64) -> Result<Ring> {
        let pages = Pages::new(layout::DATA_OFFSET + geometry.data_bytes())?;
        let memory = pages.ptr(0, pages.len());
        // SAFETY: fresh, zeroed pages of that length, page-aligned, that live in `home`.
        unsafe { Ring::in_one(memory, geometry, Home::Private(pages), start) }
    }

    /// A ring in a memfd, sealed against resizing, for another process to map; [`Ring::fd`] is what it needs.
    ///
    /// Errors: no memory or descriptor.
    pub fn memfd(geometry: Geometry, start: u64) -> Result<Ring> {
        Ring::shared(Shm::create("railhead-ring", layout::DATA_OFFSET + geometry.data_bytes())?, geometry, start)
    }

    /// A ring in a file under /dev/shm that only this user may open; [`Ring::path`] is what another process needs. Dropping removes the file.
    /// A process that may open the file may also shrink it, and then accesses fault: a memfd cannot be shrunk.
    ///
    /// Errors: no /dev/shm, or no room in it.
    pub fn named(geometry: Geometry, start: u64) -> Result<Ring> {
        Ring::shared(Shm::create_file(layout::DATA_OFFSET + geometry.data_bytes())?, geometry, start)
    }

    fn shared(shm: Shm, geometry: Geometry, start: u64) -> Result<Ring> {
        // The process that maps it may be a forked child.
        shm.share_with_children();
        let memory = shm.ptr(0, shm.len());
        // SAFETY: a fresh, zeroed, page-aligned mapping of that length that lives in `home`, and that nobody else knows yet.
        unsafe { Ring::in_one(memory, geometry, Home::Shared(shm), start) }
    }

    /// # Safety
    /// `memory` must be page-aligned, zeroed, writable for `DATA_OFFSET` and the geometry's bytes, nobody else's yet, and live as long as
    /// `home`.
    unsafe fn in_one(memory: *mut u8, geometry: Geometry, home: Home, start: u64) -> Result<Ring> {
        // SAFETY: inside the memory, by this function's own requirement.
        let data = unsafe { memory.add(layout::DATA_OFFSET) };
        // SAFETY: this function's own requirement; a page is aligned as `Control` and the lines are.
        unsafe { Ring::build(memory, data, layout::DATA_OFFSET, geometry, Memory::Host, home, start) }
    }

    /// A ring in memory that the caller supplies: `size_of::<Control>()` bytes at `control`, aligned to 128, and the geometry's
    /// [`data_bytes`](Geometry::data_bytes) at `data`, aligned to 128 too.
    ///
    /// Errors: NULL or misaligned memory; LL slots where the CPU cannot read their flags.
    ///
    /// # Safety
    /// Both must be valid for as long as the ring lives, `control` for reads and writes by the CPU, `data` too unless `memory` is
    /// [`Memory::Device`]. When this is called, nobody else uses them; afterwards they may change at any time by the rules of a ring.
    pub unsafe fn over(control: *mut u8, data: *mut u8, geometry: Geometry, memory: Memory, start: u64) -> Result<Ring> {
        // SAFETY: this function's own requirement.
        unsafe { Ring::build(control, data, 0, geometry, memory, Home::Caller, start) }
    }

    /// # Safety
    /// As for [`Ring::over`]; for any `home` but the caller's, the memory must live as long as that.
    unsafe fn build(
        control: *mut u8,
        data: *mut u8,
        data_offset: usize,
        geometry: Geometry,
        memory: Memory,
        home: Home,
        start: u64,
    ) -> Result<Ring> {
        let control = checked(control.cast::<Control>(), align_of::<Control>(), "control words")?;
        let data = checked(data, Protocol::Ll128.line(), "data")?;
        if memory == Memory::Device && geometry.step_bytes(Protocol::Ll) > 0 {
            return Err(Error::usage("LL slots in device memory: the proxy has to read their flags; give them host memory"));
        }
        let ring = Ring { control, data, geometry, memory, home };
        let words = ring.words();
        words.send_mem.head.store(start, Relaxed);
        words.recv_mem.tail.store(start, Relaxed);
        words.recv_mem.sizes_fifo.iter().for_each(|size| size.store(EMPTY, Relaxed));
        words.info.version.store(layout::VERSION, Relaxed);
        words.info.steps.store(STEPS as u32, Relaxed);
        words.info.data_offset.store(data_offset as u64, Relaxed);
        words.info.data_bytes.store(geometry.data_bytes() as u64, Relaxed);
        for protocol in Protocol::ALL {
            let area = &words.info.areas[protocol as usize];
            area.offset.store(geometry.area(protocol) as u64, Relaxed);
            area.step_bytes.store(geometry.step_bytes(protocol) as u64, Relaxed);
            // Zeroed memory needs no priming for steps from 0 on; the caller's may hold anything.
            if memory == Memory::Host && (start != 0 || matches!(ring.home, Home::Caller)) {
                let bytes = geometry.step_bytes(protocol) * STEPS as usize;
                // SAFETY: the area is inside the data, on a multiple of BUFFER_UNIT from its aligned start; nobody else uses it yet.
                unsafe { lines::prime(protocol, ring.slot(protocol, 0), bytes, start) };
            }
        }
        // Pairs with the Acquire load by which a program that maps the ring checks it (railhead_ring_open).
        words.info.magic.store(layout::MAGIC, Release);
        Ok(ring)
    }

    /// The words that the sides exchange.
    #[inline]
    pub fn words(&self) -> &Control {
        // SAFETY: `build` checked that it is neither NULL nor misaligned; it is valid while `self` lives; all of it is atomics.
        unsafe { self.control.as_ref() }
    }

    /// Sizes and offsets of the slots.
    #[inline]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// What can access the data.
    #[inline]
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// Address of the slot of `step`.
    #[inline]
    pub fn slot(&self, protocol: Protocol, step: u64) -> *mut u8 {
        // SAFETY: the offset is inside the data, by the geometry.
        unsafe { self.data.as_ptr().add(self.geometry.slot(protocol, step)) }
    }

    /// Address of the data, of [`Geometry::data_bytes`] bytes.
    pub fn data(&self) -> *mut u8 {
        self.data.as_ptr()
    }

    /// `bytes` bytes from the slot of `step` on, as the network's functions take them.
    #[inline]
    pub(crate) fn buffer(&self, protocol: Protocol, step: u64, bytes: usize) -> Buffer {
        debug_assert!(self.space(protocol, step) >= bytes);
        // SAFETY: inside the data, as `rules` has checked `step` and `bytes`; a connector keeps its ring until its comm is closed; the step is
        // claimed, so the program does not access its slot.
        unsafe { Buffer::new(self.slot(protocol, step).addr(), bytes) }
    }

    /// The whole data, to be registered.
    pub(crate) fn whole(&self) -> Buffer {
        // SAFETY: as in `buffer`; a registration accesses no data.
        unsafe { Buffer::new(self.data.as_ptr().expose_provenance(), self.geometry.data_bytes()) }
    }

    /// The mapping's descriptor, for another process; none for memory that is not shared.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.home {
            Home::Shared(shm) => shm.fd(),
            Home::Private(_) | Home::Caller => None,
        }
    }

    /// Bytes from the control words to the end of the mapping that holds the slots too; none for memory that the caller supplied.
    pub fn mapped_bytes(&self) -> Option<usize> {
        match &self.home {
            Home::Shared(shm) => Some(shm.len()),
            Home::Private(pages) => Some(pages.len()),
            Home::Caller => None,
        }
    }

    /// The file's path, for another process; none for memory without a name.
    pub fn path(&self) -> Option<PathBuf> {
        match &self.home {
            Home::Shared(shm) => shm.path(),
            Home::Private(_) | Home::Caller => None,
        }
    }

    /// The first line from line `from` on, of those that `bytes` take in the slot of `step`, whose flag is not set. The number of lines if all are
    /// set, or if only a device can read them.
    #[inline]
    pub fn missing(&self, protocol: Protocol, step: u64, from: usize, bytes: usize) -> usize {
        let count = lines::lines(protocol, bytes);
        if self.memory == Memory::Device || protocol == Protocol::Simple {
            return count;
        }
        let space = self.space(protocol, step) / protocol.line();
        // SAFETY: slots start on a line, by BUFFER_UNIT; at most `space` lines lie between here and the end of the slots; host memory.
        unsafe { lines::missing(protocol, self.slot(protocol, step), step, from, count.min(space)) }
    }

    /// Copies into the slots from that of `step` on.
    ///
    /// Errors: more bytes than there are up to the end of the protocol's slots; memory of a device.
    ///
    /// # Safety
    /// The slots must be the caller's: those that [`Producer::has_room`] granted.
    pub unsafe fn copy_in(&self, protocol: Protocol, step: u64, bytes: &[u8]) -> Result<()> {
        self.check_copy(protocol, step, bytes.len())?;
        // SAFETY: inside the data by the check; nobody else reads or writes there by this function's own requirement.
        unsafe { self.slot(protocol, step).copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies out of the slots from that of `step` on.
    ///
    /// Errors: as for [`Ring::copy_in`].
    ///
    /// # Safety
    /// The slots must be the caller's: those that [`Consumer::filled`] reported.
    pub unsafe fn copy_out(&self, protocol: Protocol, step: u64, bytes: &mut [u8]) -> Result<()> {
        self.check_copy(protocol, step, bytes.len())?;
        // SAFETY: as in `copy_in`.
        unsafe { self.slot(protocol, step).copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    /// Bytes from the slot of `step` to the end of the protocol's slots.
    #[inline]
    fn space(&self, protocol: Protocol, step: u64) -> usize {
        (STEPS as usize - layout::slot(step)) * self.geometry.step_bytes(protocol)
    }

    fn check_copy(&self, protocol: Protocol, step: u64, len: usize) -> Result<()> {
        let space = self.space(protocol, step);
        match self.memory {
            Memory::Device => Err(Error::usage("the CPU cannot copy device memory")),
            Memory::Host if len > space => Err(Error::usage(format!("{len} bytes into {protocol} slots with {space} left"))),
            Memory::Host => Ok(()),
        }
    }
}

impl Words for Arc<Ring> {
    #[inline]
    fn load(&self, word: Word, order: Ordering) -> u64 {
        self.words().load(word, order)
    }

    #[inline]
    fn store(&self, word: Word, value: u64, order: Ordering) {
        self.words().store(word, value, order);
    }
}

fn checked<T>(pointer: *mut T, align: usize, what: &str) -> Result<NonNull<T>> {
    match NonNull::new(pointer) {
        Some(pointer) if pointer.addr().get().is_multiple_of(align) => Ok(pointer),
        _ => Err(Error::usage(format!("a ring's {what} at {:#x}; accepted: an address aligned to {align} bytes", pointer.addr()))),
    }
}

#[cfg(test)]
mod tests;
