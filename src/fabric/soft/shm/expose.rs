//! Which registered memory the peers are reading on their own, so that deregistration can warn them.
//!
//! A responder pulls bulk data out of the requester's memory without the requester's help. If that memory is deregistered meanwhile,
//! what was pulled is worthless: the segment's `revoked` word is set before `deregister` returns, and a responder looks at it after
//! every pull. Written by the thread that drives the queue pair, read by whoever deregisters.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::layout::Control;
use crate::base::fork::PerProcess;
use crate::base::mem::Shm;

/// The keys that one queue pair exposes, by slot of its send queue.
pub struct Exposed {
    keys: Box<[AtomicU32]>,
    count: AtomicU32,
    shm: Arc<Shm>,
    lane: usize,
}

static LIVE: PerProcess<Vec<Arc<Exposed>>> = PerProcess::new();

impl Exposed {
    /// Starts watching a queue pair whose send queue has `slots` slots (a power of two).
    pub fn new(slots: usize, shm: Arc<Shm>, lane: usize) -> Arc<Self> {
        let exposed = Arc::new(Exposed { keys: (0..slots).map(|_| AtomicU32::new(0)).collect(), count: AtomicU32::new(0), shm, lane });
        LIVE.with(|live| live.push(exposed.clone()));
        exposed
    }

    /// Stops watching it.
    pub fn retire(self: &Arc<Self>) {
        LIVE.with(|live| live.retain(|e| !Arc::ptr_eq(e, self)));
    }

    fn slot(&self, request: u64) -> Option<&AtomicU32> {
        self.keys.get(request as usize & (self.keys.len() - 1))
    }

    /// Request `request` exposes memory of `key`. The caller checks the key afterwards: of a check and a deregistration that meet, one
    /// sees the other (SeqCst here, in `mr::pin` and in `mr::Region::refuse`).
    pub fn add(&self, request: u64, key: u32) {
        self.count.store(self.count.load(Ordering::Relaxed) + 1, Ordering::SeqCst);
        if let Some(slot) = self.slot(request) {
            slot.store(key, Ordering::SeqCst);
        }
    }

    fn names(&self, key: u32) -> bool {
        self.count.load(Ordering::SeqCst) != 0 && self.keys.iter().any(|k| k.load(Ordering::SeqCst) == key)
    }

    fn revoke(&self) {
        // SAFETY: the segment begins with a page-aligned Control, whose fields are atomics, and the Arc keeps it mapped.
        let control = unsafe { &*self.shm.ptr(0, size_of::<Control>()).cast::<Control>() };
        control.lanes[self.lane & 1].revoked.store(1, Ordering::SeqCst);
    }

    /// Requests `from..upto` are over.
    #[inline(always)]
    pub fn remove(&self, from: u64, upto: u64) {
        if self.count.load(Ordering::Relaxed) != 0 {
            self.remove_some(from, upto);
        }
    }

    #[inline(never)]
    fn remove_some(&self, from: u64, upto: u64) {
        let mut count = self.count.load(Ordering::Relaxed);
        let mut request = from;
        while request != upto && count != 0 {
            if let Some(slot) = self.slot(request)
                && slot.load(Ordering::Relaxed) != 0
            {
                slot.store(0, Ordering::Relaxed);
                count -= 1;
            }
            request += 1;
        }
        self.count.store(count, Ordering::Relaxed);
    }
}

/// Warns every peer that reads memory of `key`, which was deregistered. On return nothing pulled later counts.
#[cold]
pub fn revoke(key: u32) {
    LIVE.with(|live| live.iter().filter(|exposed| exposed.names(key)).for_each(|exposed| exposed.revoke()));
}
