//! The process's stats page and the records in it: made by init, unmapped with the last reference. At set-up, on any thread.

use std::io::Error as IoError;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use memmap2::{MmapOptions, MmapRaw};

use super::CommKind;
use super::page::{CommRecord, Layout, MAGIC, MEMFD_NAME, RailRecord, VERSION};
use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::fd::File;
use crate::base::fork::{self, PerProcess};
use crate::base::log::{self, log_warn};
use crate::base::mem;

/// RAILHEAD_STATS, as the last init read it.
static ENABLED: AtomicBool = AtomicBool::new(true);
/// The page, while there is a reference to it.
static CURRENT: PerProcess<Weak<OwnPage>> = PerProcess::new();
/// The last comm number given out.
static LAST_ID: AtomicU64 = AtomicU64::new(0);

/// The page in the process that writes it.
struct OwnPage {
    /// Stays mapped in a forked child, where handles of the parent may still be dropped.
    map: MmapRaw,
    _file: File,
    epoch: u64,
    warned: AtomicBool,
}

// SAFETY: the mapping is atomics alone; the rest is Send and Sync by itself.
unsafe impl Send for OwnPage {}
// SAFETY: as above.
unsafe impl Sync for OwnPage {}

impl OwnPage {
    fn new() -> Result<OwnPage> {
        let name = c"railhead-stats";
        debug_assert_eq!(name.to_str(), Ok(MEMFD_NAME));
        let file = mem::memfd(name)?;
        let size = size_of::<Layout>();
        // Not fallocate: most of the page is never touched, and a memfd has no size limit to run into.
        file.set_len(size as u64).map_err(|e| Error::system("sizing the stats page", e))?;
        let map = MmapOptions::new().len(size).map_raw(&file).map_err(|e| Error::system("mapping the stats page", e))?;
        // Readers map it without fear of a shrinking file, and none can map it for writing. A kernel before 5.1 lacks the last seal.
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
        seal(&file, seals | libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_SEAL)
            .or_else(|_| seal(&file, seals | libc::F_SEAL_SEAL))
            .map_err(|e| Error::system("sealing the stats page", e))?;
        let page = OwnPage { map, _file: file, epoch: fork::epoch(), warned: AtomicBool::new(false) };
        let header = &page.layout().header;
        header.version.store(VERSION, Ordering::Relaxed);
        header.pid.store(std::process::id() as i32, Ordering::Relaxed);
        header.started_ns.store(clock::now(), Ordering::Relaxed);
        header.size.store(size as u64, Ordering::Relaxed);
        header.comms.store(super::page::COMMS as u32, Ordering::Relaxed);
        header.rails.store(super::page::RAILS as u32, Ordering::Relaxed);
        // Release: whoever sees the magic sees the rest; pairs with the load in `page::attach`.
        header.magic.store(MAGIC, Ordering::Release);
        Ok(page)
    }

    fn layout(&self) -> &Layout {
        // SAFETY: the mapping has the layout's size, alignment and, as fresh zeroes or by our own stores, values; all are atomics.
        unsafe { &*self.map.as_mut_ptr().cast::<Layout>() }
    }

    /// Whether this process may write records: not a child that inherited the mapping.
    fn is_own(&self) -> bool {
        self.epoch == fork::epoch()
    }

    fn full(&self, what: &str) {
        self.layout().header.overflowed.fetch_add(1, Ordering::Relaxed);
        if !self.warned.swap(true, Ordering::Relaxed) {
            log_warn!(log::NET, "the stats page has no {what} record left; further connections are not shown in it");
        }
    }
}

fn seal(file: &File, seals: libc::c_int) -> std::result::Result<(), IoError> {
    // SAFETY: the descriptor is open; the command takes an integer.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } == 0 { Ok(()) } else { Err(IoError::last_os_error()) }
}

/// Sets whether comms made from now on get records in the page. At each init, by RAILHEAD_STATS.
pub fn set_enabled(enabled: bool) {
    ENABLED.store(enabled, Ordering::Relaxed);
}

/// Keeps the page mapped while there is no comm.
pub struct PageGuard {
    _page: Option<Arc<OwnPage>>,
}

/// Makes the page, unless it is disabled or exists, and keeps it. Called by init, so that the process can be found.
pub fn keep_page() -> PageGuard {
    PageGuard { _page: current() }
}

fn current() -> Option<Arc<OwnPage>> {
    if !ENABLED.load(Ordering::Relaxed) {
        return None;
    }
    let made = CURRENT.with(|slot| match slot.upgrade() {
        Some(page) => Ok(page),
        None => {
            let page = Arc::new(OwnPage::new()?);
            *slot = Arc::downgrade(&page);
            Ok(page)
        }
    });
    made.inspect_err(|error: &Error| log_warn!(log::NET, "no stats page: {error}")).ok()
}

/// A record in the page, or in private memory.
enum Storage<T> {
    Page(Arc<OwnPage>, usize),
    Private(Box<T>),
}

/// A comm's record, free again when this is dropped.
pub(super) struct OwnedCommRecord {
    storage: Storage<CommRecord>,
    id: u64,
}

impl OwnedCommRecord {
    pub(super) fn take(kind: CommKind, device: &str) -> OwnedCommRecord {
        let id = LAST_ID.fetch_add(1, Ordering::Relaxed) + 1;
        let storage = current().and_then(|page| {
            // From 0 to a value that is no kind, so that readers skip the record until it is described.
            let claim = |record: &CommRecord| record.kind.compare_exchange(0, u32::MAX, Ordering::Acquire, Ordering::Relaxed).is_ok();
            match page.layout().comms.iter().position(claim) {
                Some(index) => Some(Storage::Page(page, index)),
                None => {
                    page.full("comm");
                    None
                }
            }
        });
        let owned = OwnedCommRecord { storage: storage.unwrap_or_else(|| Storage::Private(zeroed_comm())), id };
        owned.get().describe(|record| {
            record.clear();
            record.set_device(device);
            record.id.store(id, Ordering::Relaxed);
            record.made_ns.store(clock::now(), Ordering::Relaxed);
            record.kind.store(kind as u32, Ordering::Relaxed);
        });
        owned
    }

    fn get(&self) -> &CommRecord {
        match &self.storage {
            Storage::Page(page, index) => &page.layout().comms[*index],
            Storage::Private(record) => record,
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn record(&self) -> NonNull<CommRecord> {
        NonNull::from(self.get())
    }

    /// A record for one of the comm's rails; private if the comm's is.
    pub(super) fn rail(&self, index: u32) -> OwnedRailRecord {
        let Storage::Page(page, _) = &self.storage else { return OwnedRailRecord::detached() };
        let claim = |record: &RailRecord| record.owner.compare_exchange(0, u64::MAX, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let Some(at) = page.layout().rails.iter().position(claim) else {
            page.full("rail");
            return OwnedRailRecord::detached();
        };
        page.layout().rails[at].describe(|record| {
            record.clear();
            record.index.store(index, Ordering::Relaxed);
            record.owner.store(self.id, Ordering::Relaxed);
        });
        OwnedRailRecord { storage: Storage::Page(page.clone(), at) }
    }
}

impl Drop for OwnedCommRecord {
    fn drop(&mut self) {
        if let Storage::Page(page, index) = &self.storage
            && page.is_own()
        {
            // Release: pairs with the Acquire of the next claim, which comes after all our stores.
            page.layout().comms[*index].kind.store(0, Ordering::Release);
        }
    }
}

/// A rail's record, free again when this is dropped.
pub(super) struct OwnedRailRecord {
    storage: Storage<RailRecord>,
}

impl OwnedRailRecord {
    pub(super) fn detached() -> OwnedRailRecord {
        OwnedRailRecord { storage: Storage::Private(zeroed_rail()) }
    }

    pub(super) fn record(&self) -> NonNull<RailRecord> {
        match &self.storage {
            Storage::Page(page, index) => NonNull::from(&page.layout().rails[*index]),
            Storage::Private(record) => NonNull::from(&**record),
        }
    }
}

impl Drop for OwnedRailRecord {
    fn drop(&mut self) {
        if let Storage::Page(page, index) = &self.storage
            && page.is_own()
        {
            page.layout().rails[*index].owner.store(0, Ordering::Release);
        }
    }
}

fn zeroed_comm() -> Box<CommRecord> {
    // SAFETY: a record is atomics, for which zeroes are a value.
    Box::new(unsafe { std::mem::zeroed() })
}

fn zeroed_rail() -> Box<RailRecord> {
    // SAFETY: as above.
    Box::new(unsafe { std::mem::zeroed() })
}
