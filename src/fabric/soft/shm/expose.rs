//! Which registered memory peers may be reading by themselves, so that deregistration can tell them to stop.
//!
//! A responder reads bulk data out of the requester's memory without the requester's help. If that memory is deregistered meanwhile, what was
//! read is not valid: deregistration sets the segment's `revoked` word before it returns, and a responder loads that word after every
//! read. Written by the thread that drives the queue pair, read by the thread that deregisters.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::layout::Control;
use crate::base::fork::PerProcess;
use crate::base::mem::Shm;

/// The keys of the memory that one queue pair exposes to its peer, by slot of its send queue.
pub struct Exposed {
    keys: Box<[AtomicU32]>,
    count: AtomicU32,
    shm: Arc<Shm>,
    direction: usize,
}

static LIVE: PerProcess<Vec<Arc<Exposed>>> = PerProcess::new();

impl Exposed {
    /// For a queue pair whose send queue has `slots` slots (a power of two). Deregistration finds it until [`Exposed::retire`].
    pub fn new(slots: usize, shm: Arc<Shm>, direction: usize) -> Arc<Self> {
        let exposed = Arc::new(Exposed { keys: (0..slots).map(|_| AtomicU32::new(0)).collect(), count: AtomicU32::new(0), shm, direction });
        LIVE.with(|live| live.push(exposed.clone()));
        exposed
    }

    /// Hides it from deregistration: the queue pair is closed.
    pub fn retire(self: &Arc<Self>) {
        LIVE.with(|live| live.retain(|e| !Arc::ptr_eq(e, self)));
    }

    fn slot(&self, request: u64) -> Option<&AtomicU32> {
        self.keys.get(request as usize & (self.keys.len() - 1))
    }

    /// Request `request` exposes memory of `key`. The caller checks the key afterwards: if a deregistration runs at the same time, either the
    /// check fails or the deregistration sees the exposure (SeqCst here, in `mr::pin` and in `mr::Region::refuse`).
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
        control.directions[self.direction & 1].revoked.store(1, Ordering::SeqCst);
    }

    /// Requests `from..upto` are acked, and expose their memory no longer.
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

/// Tells every peer that may be reading memory of `key`, which was deregistered. On return, peers take nothing they read later for valid.
#[cold]
pub fn end_peer_reads(key: u32) {
    LIVE.with(|live| live.iter().filter(|exposed| exposed.names(key)).for_each(|exposed| exposed.revoke()));
}
