//! Memory that tensors are in without being copied: the library's, from a pool that is registered once, and the user's, registered for good or for as
//! long as a tensor is there. Any thread.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};

use crossbeam_utils::atomic::AtomicCell;
use foldhash::HashMap;

use crate::base::error::{Error, Result};
use crate::base::mem::UserMemory;
use crate::base::sync::lock;
use crate::fabric::RegionView;
use crate::link::device::{Device, Registered};
use crate::link::limits::MAX_RAILS;

/// Memory of at most so many bytes is copied rather than registered for one tensor, or taken from the pool for a copy.
pub const COPIED: usize = 16 << 10;
/// Bytes that the pool keeps for later tensors.
const KEPT: usize = 256 << 20;
/// Bytes of the pool's memory are a multiple of it.
const PAGE: usize = 4096;

/// What is called once the bytes of a tensor are not needed any more, on a thread of the user's.
pub type Release = Box<dyn FnOnce() + Send>;

/// All memory of a manager's tensors.
pub struct Pool {
    device: Arc<Device>,
    free: Mutex<Free>,
    /// One page that was given back last.
    page: AtomicCell<Option<Box<Registered>>>,
    /// What the user has registered for good, by first byte. They do not overlap.
    registered: Mutex<BTreeMap<usize, Arc<Registered>>>,
    releases: Releases,
}

/// Memory that no tensor is in.
#[derive(Default)]
struct Free {
    /// By its bytes, the last to be given back at the end, each with the time of that.
    by_len: HashMap<usize, VecDeque<(u64, Box<Registered>)>>,
    bytes: usize,
    time: u64,
}

impl Free {
    /// Makes room by dropping what was given back first.
    fn shrink(&mut self, most: usize) {
        while self.bytes > most {
            let oldest = self.by_len.iter().filter_map(|(len, all)| Some((all.front()?.0, *len))).min();
            let Some((_, len)) = oldest else { return };
            if self.by_len.get_mut(&len).and_then(VecDeque::pop_front).is_some() {
                self.bytes -= len;
            }
            self.by_len.retain(|_, all| !all.is_empty());
        }
    }
}

impl Pool {
    /// Nothing yet.
    pub fn new(device: Arc<Device>) -> Arc<Pool> {
        let releases = Releases { due: Mutex::new(Some(VecDeque::new())), count: AtomicUsize::new(0), notify: OnceLock::new() };
        Arc::new(Pool { device, free: Mutex::default(), page: AtomicCell::new(None), registered: Mutex::default(), releases })
    }

    /// Has a function called, on any thread and under any lock, whenever [`Pool::released`] changes.
    pub fn on_release(&self, notify: impl Fn() + Send + Sync + 'static) {
        let _ = self.releases.notify.set(Box::new(notify));
    }

    /// Memory of the library's for a tensor of so many bytes.
    ///
    /// Errors: there is none.
    pub fn take(self: &Arc<Self>, len: usize) -> Result<Memory> {
        let rounded = rounded(len);
        if rounded == PAGE
            && let Some(page) = self.page.take()
        {
            return Ok(self.memory(Region::Pooled(page), 0, len));
        }
        let found = {
            let mut free = lock(&self.free);
            let found = free.by_len.get_mut(&rounded).and_then(VecDeque::pop_back);
            free.bytes -= if found.is_some() { rounded } else { 0 };
            found.map(|(_, registered)| registered)
        };
        let registered = found.map_or_else(|| self.device.scratch(rounded).map(Box::new), Ok)?;
        Ok(self.memory(Region::Pooled(registered), 0, len))
    }

    fn give(&self, mut registered: Box<Registered>) {
        let len = registered.len();
        if len == PAGE {
            let Some(before) = self.page.swap(Some(registered)) else { return };
            registered = before;
        }
        let mut free = lock(&self.free);
        free.time += 1;
        let time = free.time;
        free.bytes += len;
        free.by_len.entry(len).or_default().push_back((time, registered));
        free.shrink(KEPT);
    }

    /// A copy of these bytes.
    ///
    /// Errors: there is no memory.
    pub fn copy(self: &Arc<Self>, bytes: &[u8]) -> Result<Memory> {
        let mut memory = self.take(bytes.len())?;
        memory.is_copy = true;
        if let Some(view) = memory.view(bytes.len()) {
            view.write(bytes);
        }
        Ok(memory)
    }

    /// The user's memory, with a tensor in it: `registered` if peers have to get at it, unless it is so small that it is copied.
    ///
    /// Errors: a range that cannot be registered.
    pub fn lend(self: &Arc<Self>, memory: UserMemory, registered: bool) -> Result<Memory> {
        if let Some((region, offset)) = self.find(memory) {
            return Ok(self.memory(Region::Users(region), offset, memory.len()));
        }
        if registered && memory.len() > COPIED {
            let region = Arc::new(self.device.register_input(memory)?);
            return Ok(self.memory(Region::Users(region), 0, memory.len()));
        }
        let held = self.device.hold(memory);
        if !registered || memory.is_empty() {
            return Ok(self.memory(Region::Held(Box::new(held)), 0, memory.len()));
        }
        let mut copy = self.take(memory.len())?;
        copy.is_copy = true;
        if let Some(view) = copy.view(memory.len()) {
            view.copy_from(&held.view(0, memory.len())?);
        }
        Ok(copy)
    }

    /// The user's memory, for a tensor that is received into it: `registered` if peers write to it, unless it is so small that it is copied.
    ///
    /// Errors: a range that cannot be registered.
    pub fn destination(self: &Arc<Self>, memory: UserMemory, registered: bool) -> Result<Memory> {
        if let Some((region, offset)) = self.find(memory) {
            return Ok(self.memory(Region::Users(region), offset, memory.len()));
        }
        if registered && memory.len() > COPIED {
            let region = Arc::new(self.device.register(memory)?);
            return Ok(self.memory(Region::Users(region), 0, memory.len()));
        }
        Ok(self.memory(Region::Held(Box::new(self.device.hold(memory))), 0, memory.len()))
    }

    /// No bytes.
    pub fn lend_nothing(self: &Arc<Self>) -> Memory {
        Memory { region: None, offset: 0, len: 0, is_copy: false, pool: self.clone(), release: Mutex::default() }
    }

    fn memory(self: &Arc<Self>, region: Region, offset: usize, len: usize) -> Memory {
        Memory { region: Some(region), offset, len, is_copy: false, pool: self.clone(), release: Mutex::default() }
    }

    /// Registers memory for all tensors in it.
    ///
    /// Errors: none; it overlaps memory that is registered; it cannot be registered.
    pub fn register(&self, memory: UserMemory) -> Result<Weak<Registered>> {
        let (first, end) = (memory.addr(), memory.addr().saturating_add(memory.len()));
        let mut all = lock(&self.registered);
        let overlaps = all.range(..end).next_back().filter(|(other, region)| other.saturating_add(region.len()) > first);
        if let Some((other, region)) = overlaps {
            let (len, bytes) = (region.len(), memory.len());
            return Err(Error::usage(format!("{bytes} bytes at {first:#x} overlap {len} bytes at {other:#x}, which are registered")));
        }
        if memory.is_empty() {
            return Err(Error::usage("0 bytes to register; expected some"));
        }
        let region = Arc::new(self.device.register(memory)?);
        let registered = Arc::downgrade(&region);
        all.insert(first, region);
        Ok(registered)
    }

    /// Ends that. Nobody reads or writes it afterwards. A second call does nothing, whoever has registered memory at its place since.
    ///
    /// Errors: tensors are in it that are sent or received.
    pub fn deregister(&self, addr: usize, registered: &Weak<Registered>) -> Result<()> {
        let mut all = lock(&self.registered);
        let Some(region) = all.get(&addr).filter(|region| std::ptr::eq(Arc::as_ptr(region), registered.as_ptr())) else { return Ok(()) };
        let users = Arc::strong_count(region) - 1;
        if users > 0 {
            return Err(Error::usage(format!("the memory at {addr:#x} has {users} tensors that were not released, or not received yet")));
        }
        all.remove(&addr);
        Ok(())
    }

    fn find(&self, memory: UserMemory) -> Option<(Arc<Registered>, usize)> {
        let all = lock(&self.registered);
        let (first, region) = all.range(..=memory.addr()).next_back()?;
        let offset = memory.addr() - first;
        let inside = offset.checked_add(memory.len()).is_some_and(|end| end <= region.len());
        (inside && !memory.is_empty()).then(|| (region.clone(), offset))
    }

    /// How many releases are due.
    pub fn released(&self) -> usize {
        // Pairs with the Release in `drop`.
        self.releases.count.load(Ordering::Acquire)
    }

    /// The next one.
    pub fn next_release(&self) -> Option<Release> {
        if self.released() == 0 {
            return None;
        }
        let release = lock(&self.releases.due).as_mut()?.pop_front()?;
        self.releases.count.fetch_sub(1, Ordering::Relaxed);
        Some(release)
    }

    /// Those that are due. From now on they are called by whoever gives the last of a tensor back.
    pub fn close(&self) -> VecDeque<Release> {
        let due = lock(&self.releases.due).take().unwrap_or_default();
        self.releases.count.fetch_sub(due.len(), Ordering::Relaxed);
        due
    }
}

/// Bytes of the pool's memory for a tensor: an eighth more at most, so that tensors of about one size share it.
fn rounded(len: usize) -> usize {
    let len = len.max(1);
    let step = (len.checked_next_power_of_two().unwrap_or(len) / 16).max(PAGE);
    len.checked_next_multiple_of(step).unwrap_or(len)
}

/// Those that are due, until nobody asks for them any more.
struct Releases {
    due: Mutex<Option<VecDeque<Release>>>,
    /// How many: changed under the lock, or once they are taken out.
    count: AtomicUsize,
    notify: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// What memory is behind a tensor.
enum Region {
    /// The library's.
    Pooled(Box<Registered>),
    /// The user's.
    Users(Arc<Registered>),
    /// The user's, which is not registered.
    Held(Box<Registered>),
}

/// Memory of a tensor.
pub struct Memory {
    /// Until it is dropped.
    region: Option<Region>,
    offset: usize,
    len: usize,
    is_copy: bool,
    pool: Arc<Pool>,
    release: Mutex<Option<Release>>,
}

impl Memory {
    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    fn registered(&self) -> Option<&Registered> {
        match self.region.as_ref()? {
            Region::Users(registered) => Some(registered),
            Region::Pooled(registered) | Region::Held(registered) => Some(registered),
        }
    }

    /// Its first bytes, if it has so many, and any.
    pub fn view(&self, len: usize) -> Option<RegionView<'_>> {
        if len > self.len { None } else { self.registered()?.view(self.offset, len).ok() }
    }

    /// First byte; 0 if there is none.
    pub fn addr(&self) -> usize {
        self.view(self.len).map_or(0, |view| view.addr())
    }

    /// Keys for local use, and for peers, rail by rail; none unless [`Memory::is_registered`].
    pub fn keys(&self) -> ([u32; MAX_RAILS], [u32; MAX_RAILS]) {
        self.registered().map_or_else(Default::default, |registered| (registered.lkeys(), registered.rkeys()))
    }

    /// Whether peers get at it through this pool's device.
    pub fn is_registered(&self, pool: &Arc<Pool>) -> bool {
        Arc::ptr_eq(&self.pool, pool) && !matches!(self.region, Some(Region::Held(_)))
    }

    /// Whether a tensor was copied here by the library.
    pub fn is_copy(&self) -> bool {
        self.is_copy
    }

    /// Has this called once it is not needed any more.
    pub fn release(&self, release: Release) {
        *lock(&self.release) = Some(release);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // First, so that nobody gets at it any more.
        match self.region.take() {
            Some(Region::Pooled(registered)) => self.pool.give(registered),
            region => drop(region),
        }
        let Some(release) = lock(&self.release).take() else { return };
        let Releases { due, count, notify } = &self.pool.releases;
        let now = match &mut *lock(due) {
            Some(due) => {
                due.push_back(release);
                // Pairs with the Acquire in `released`.
                count.fetch_add(1, Ordering::Release);
                None
            }
            None => Some(release),
        };
        match (now, notify.get()) {
            (Some(release), _) => release(),
            (None, Some(notify)) => notify(),
            (None, None) => {}
        }
    }
}
