//! The comms behind the handles that C holds. Looked up on every call, on the host's threads.
//!
//! A look-up takes no lock and allocates nothing. An entry has two parts: `shared` is for registrations on any thread; `driven`, the comm itself, is
//! lent as `&mut` to one thread at a time, which NCCL promises and the entry's busy flag checks.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::abi::handle::{CommKey, Handle, Kind, MAX_COMMS};
use crate::base::error::{Error, Result};
use crate::base::slab::Slab;
use crate::base::sync::lock;
use crate::net::{ListenComm, Net, RecvComm, RequestId, SendComm};

/// Comms for which memory is allocated at a time.
const CHUNK: usize = 512;

/// The comms of this process.
pub struct CommTable {
    process: u8,
    slots: Slab<Slot, CHUNK, { MAX_COMMS / CHUNK }>,
}

/// A comm, or none while the entry is free. How many comms had the entry before is half of its generation.
#[derive(Default)]
struct Slot {
    /// Set while a thread drives the comm.
    busy: AtomicBool,
    shared: Mutex<Option<CommDevice>>,
    driven: UnsafeCell<AnyComm>,
}

// SAFETY: `driven` is what makes Slot not Sync. It is written by `insert` before the entry is published, and by `close` after it has set `busy`;
// between the two it is accessed only through `CommGuard`, whose constructor requires that no other thread drives the comm. The comms themselves are
// Send.
unsafe impl Sync for Slot {}

const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<AnyComm>();
};

/// What calls on any thread may use while another thread drives the comm.
#[derive(Clone)]
pub struct CommDevice {
    /// The net that the comm belongs to.
    pub net: Arc<Net>,
    /// Its device.
    pub dev: usize,
}

/// A comm, driven by one thread at a time.
#[derive(Default)]
pub enum AnyComm {
    /// None: the entry is free.
    #[default]
    Closed,
    /// A listen comm.
    Listen(Box<ListenComm>),
    /// A send comm.
    Send(Box<SendComm>),
    /// A receive comm.
    Recv(Box<RecvComm>),
}

/// A comm, lent to the thread that drives it.
pub struct CommGuard<'a, C> {
    comm: &'a mut C,
    slot: &'a Slot,
    index: u32,
    count: u32,
}

impl<C> Deref for CommGuard<'_, C> {
    type Target = C;
    #[inline]
    fn deref(&self) -> &C {
        self.comm
    }
}

impl<C> DerefMut for CommGuard<'_, C> {
    #[inline]
    fn deref_mut(&mut self) -> &mut C {
        self.comm
    }
}

impl<C> Drop for CommGuard<'_, C> {
    #[inline]
    fn drop(&mut self) {
        // Release: pairs with the Acquire in `Slot::claim` of the thread that drives the comm next.
        self.slot.busy.store(false, Ordering::Release);
    }
}

impl<C> CommGuard<'_, C> {
    /// The handle of one of the comm's requests.
    #[inline]
    pub fn request(&self, kind: Kind, request: RequestId) -> Handle {
        CommKey::request(kind, self.index, self.count, request)
    }

    /// The part of the comm that other threads may use.
    pub fn shared(&self) -> Option<CommDevice> {
        lock(&self.slot.shared).clone()
    }
}

impl CommTable {
    /// An empty table, for the process that is `process` forks away from the first one.
    pub fn new(process: u8) -> CommTable {
        CommTable { process, slots: Slab::default() }
    }

    /// Adds a comm and returns its handle.
    ///
    /// Errors: more than 2^18 comms open at once; `Closed`, which is no comm.
    pub fn insert(&self, shared: CommDevice, driven: AnyComm) -> Result<Handle> {
        let kind = match &driven {
            AnyComm::Closed => return Err(Error::internal("a closed comm has no handle")),
            AnyComm::Listen(_) => Kind::Listen,
            AnyComm::Send(_) => Kind::Send,
            AnyComm::Recv(_) => Kind::Recv,
        };
        let inserted = self.slots.insert(|slot| {
            *lock(&slot.shared) = Some(shared);
            // SAFETY: the entry is free, and given to this thread alone to fill; no reference into it exists.
            unsafe { *slot.driven.get() = driven };
        });
        let (index, generation) = inserted.ok_or_else(|| Error::usage(format!("{MAX_COMMS} comms are open, which is the limit")))?;
        Ok(CommKey::comm(kind, self.process, index, generation >> 1))
    }

    /// The listen comm that `handle` names.
    ///
    /// # Safety
    /// No other thread drives or closes this comm from the call on until the result is dropped. (Violations are detected: always for a listen comm, as far as
    /// a plain flag can for the others.)
    #[inline]
    pub unsafe fn listen(&self, handle: Handle) -> Result<CommGuard<'_, ListenComm>> {
        handle.check_kind(Kind::Listen, self.process)?;
        // SAFETY: the requirement is the caller's own.
        unsafe { self.drive::<_, true>(handle.comm(), handle, AnyComm::as_listen) }
    }

    /// The send comm that `handle` names.
    ///
    /// # Safety
    /// As for [`CommTable::listen`].
    #[inline(always)]
    pub unsafe fn send(&self, handle: Handle) -> Result<CommGuard<'_, SendComm>> {
        handle.check_kind(Kind::Send, self.process)?;
        // SAFETY: the requirement is the caller's own.
        unsafe { self.drive::<_, false>(handle.comm(), handle, AnyComm::as_send) }
    }

    /// The receive comm that `handle` names.
    ///
    /// # Safety
    /// As for [`CommTable::listen`].
    #[inline(always)]
    pub unsafe fn recv(&self, handle: Handle) -> Result<CommGuard<'_, RecvComm>> {
        handle.check_kind(Kind::Recv, self.process)?;
        // SAFETY: the requirement is the caller's own.
        unsafe { self.drive::<_, false>(handle.comm(), handle, AnyComm::as_recv) }
    }

    /// The send comm of the request that `handle` names, and the comm's number of the request.
    ///
    /// # Safety
    /// As for [`CommTable::listen`].
    #[inline(always)]
    pub unsafe fn send_request(&self, handle: Handle) -> Result<(CommGuard<'_, SendComm>, RequestId)> {
        let (key, request) = handle.request();
        // SAFETY: the requirement is the caller's own.
        Ok((unsafe { self.drive::<_, false>(key, handle, AnyComm::as_send) }?, request))
    }

    /// The receive comm of the request that `handle` names, and the comm's number of the request.
    ///
    /// # Safety
    /// As for [`CommTable::listen`].
    #[inline(always)]
    pub unsafe fn recv_request(&self, handle: Handle) -> Result<(CommGuard<'_, RecvComm>, RequestId)> {
        let (key, request) = handle.request();
        // SAFETY: the requirement is the caller's own.
        Ok((unsafe { self.drive::<_, false>(key, handle, AnyComm::as_recv) }?, request))
    }

    /// The part of the send or receive comm that `handle` names which any thread may use, while another drives the comm.
    pub fn shared(&self, handle: Handle) -> Result<CommDevice> {
        match handle.kind() {
            Some(kind @ (Kind::Send | Kind::Recv)) => handle.check_kind(kind, self.process)?,
            _ => return Err(handle.is_no("send or receive comm")),
        }
        let key = handle.comm();
        let (_, slot) = self.slots.entry(key.index).ok_or_else(|| self.gone(handle))?;
        let shared = lock(&slot.shared);
        // The generation under the lock, under which `shared` changes: so what is cloned belongs to the comm of this handle.
        let current = self.slots.entry(key.index).filter(|(generation, _)| key.is(*generation));
        current.and_then(|_| shared.clone()).ok_or_else(|| self.gone(handle))
    }

    /// Removes the comm that `handle` names, for the caller to drop.
    ///
    /// Errors: not a `kind`; closed before; another thread is driving it.
    pub fn close(&self, handle: Handle, kind: Kind) -> Result<(AnyComm, Option<CommDevice>)> {
        handle.check_kind(kind, self.process)?;
        let key = handle.comm();
        let (generation, slot) = self.open_slot(key, handle)?;
        if !slot.claim_surely() {
            return Err(in_use(handle));
        }
        let closed = self.slots.remove(key.index, generation, |slot| {
            // SAFETY: whoever drives a comm has promised that nobody closes it meanwhile (`listen`), which `busy` only checks; and the entry is not free
            // yet, so no `insert` fills it.
            let closed = (unsafe { std::mem::take(&mut *slot.driven.get()) }, lock(&slot.shared).take());
            // Release: pairs with the Acquire in `Slot::claim`.
            slot.busy.store(false, Ordering::Release);
            closed
        });
        if closed.is_none() {
            slot.busy.store(false, Ordering::Release);
        }
        closed.ok_or_else(|| self.gone(handle))
    }

    /// # Safety
    /// As for [`CommTable::listen`].
    #[inline(always)]
    unsafe fn drive<C, const SURELY: bool>(
        &self,
        key: CommKey,
        handle: Handle,
        pick: fn(&mut AnyComm) -> Option<&mut C>,
    ) -> Result<CommGuard<'_, C>> {
        let (generation, slot) = self.open_slot(key, handle)?;
        if !(if SURELY { slot.claim_surely() } else { slot.claim() }) {
            return Err(in_use(handle));
        }
        // A comm that was closed since is not the one of `handle`. From now on `close` finds `busy` set.
        if SURELY && self.slots.entry(key.index).is_none_or(|(now, _)| now != generation) {
            slot.busy.store(false, Ordering::Release);
            return Err(self.gone(handle));
        }
        // SAFETY: the entry is published, so `insert` has filled `driven`; the caller promises that no other thread drives or closes the comm, and
        // the flag just set turns away one that does so later.
        match pick(unsafe { &mut *slot.driven.get() }) {
            Some(comm) => Ok(CommGuard { comm, slot, index: key.index, count: generation >> 1 }),
            None => {
                slot.busy.store(false, Ordering::Release);
                Err(self.gone(handle))
            }
        }
    }

    #[inline(always)]
    fn open_slot(&self, key: CommKey, handle: Handle) -> Result<(u32, &Slot)> {
        match self.slots.entry(key.index) {
            Some((generation, slot)) if key.is(generation) => Ok((generation, slot)),
            _ => Err(self.gone(handle)),
        }
    }

    #[cold]
    fn gone(&self, handle: Handle) -> Error {
        let (value, words) = (handle.value(), handle.kind().map_or("handle", Kind::words));
        let fork = if self.process > 0 { "; what was made before a fork belongs to the parent process" } else { "" };
        match handle.kind() {
            Some(Kind::SendRequest | Kind::RecvRequest) => Error::internal(format!("{words} {value:#x} is of no open comm{fork}")),
            _ => Error::internal(format!("{words} {value:#x} is closed, or never was one{fork}")),
        }
    }
}

impl Slot {
    /// Sets `busy`, unless it is set.
    fn claim_surely(&self) -> bool {
        // Acquire: pairs with the Release store of the thread that drove the comm before.
        self.busy.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Sets `busy`, unless it is set. A load and a store instead of one atomic instruction, which would cost more: two threads that call within the
    /// same few nanoseconds both get the comm.
    #[inline]
    fn claim(&self) -> bool {
        // Acquire: pairs with the Release store of the thread that drove the comm before.
        let free = !self.busy.load(Ordering::Acquire);
        if free {
            self.busy.store(true, Ordering::Relaxed);
        }
        free
    }
}

impl AnyComm {
    fn as_listen(&mut self) -> Option<&mut ListenComm> {
        if let AnyComm::Listen(comm) = self { Some(comm) } else { None }
    }

    fn as_send(&mut self) -> Option<&mut SendComm> {
        if let AnyComm::Send(comm) = self { Some(comm) } else { None }
    }

    fn as_recv(&mut self) -> Option<&mut RecvComm> {
        if let AnyComm::Recv(comm) = self { Some(comm) } else { None }
    }
}

#[cold]
fn in_use(handle: Handle) -> Error {
    let words = handle.kind().map_or("handle", Kind::words);
    Error::internal(format!("{words} {:#x} is in use by another thread; a comm may be driven by one thread at a time", handle.value()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message<T>(result: Result<T>) -> String {
        result.err().map(|error| error.to_string()).unwrap_or_default()
    }

    fn handle(value: u64) -> Handle {
        Handle::from_pointer(std::ptr::without_provenance_mut(value as usize))
    }

    #[test]
    fn handles_of_nothing() {
        let comms = CommTable::new(0);
        let never_made = CommKey::comm(Kind::Send, 0, 0, 0);
        let beyond = CommKey::comm(Kind::Send, 0, MAX_COMMS as u32 - 1, 7);
        for handle in [handle(0), handle(1), handle(0x7fff_1234_5678), handle(u64::MAX), never_made, beyond] {
            // SAFETY: no other thread has this table.
            unsafe {
                assert!(comms.listen(handle).is_err());
                assert!(comms.send(handle).is_err());
                assert!(comms.recv(handle).is_err());
                assert!(comms.send_request(handle).is_err());
                assert!(comms.recv_request(handle).is_err());
            }
            assert!(comms.shared(handle).is_err());
            assert!(comms.close(handle, Kind::Send).is_err());
            assert!(handle.is_send_request().is_err());
        }
        let recv = CommKey::comm(Kind::Recv, 0, 0, 0);
        assert!(message(comms.close(recv, Kind::Send)).contains("is a receive comm, not a send comm"));
        assert!(message(comms.close(never_made, Kind::Send)).contains("is closed, or never was one"));
        assert!(message(CommTable::new(1).close(never_made, Kind::Send)).contains("before a fork"));
        assert!(message(comms.shared(handle(0))).contains("send or receive comm is NULL"));
    }
}
