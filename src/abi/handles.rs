//! The comms behind the handles that C holds. Looked up on every call, on the host's threads.
//!
//! Looking up takes no lock and no memory. An entry has two parts: `shared` serves registrations on any thread; `driven`, the comm
//! itself, is handed out as `&mut` to one thread at a time, which NCCL promises and the entry's busy flag checks.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use crate::abi::handle::{Handle, Kind, MAX_COMMS, Place};
use crate::base::error::{Error, Result};
use crate::net::{ListenComm, Net, RecvComm, RequestId, SendComm};

const CHUNK: usize = 512;
const CHUNKS: usize = MAX_COMMS / CHUNK;

/// The comms of this process. Entries are reused, never freed.
pub struct Slab {
    process: u8,
    chunks: [OnceLock<Box<[Entry]>>; CHUNKS],
    free: Mutex<Free>,
}

#[derive(Default)]
struct Free {
    closed: Vec<u32>,
    never_used: u32,
}

struct Entry {
    // Bit 0: open. Above it: the count, which the closing of a comm increments.
    state: AtomicU32,
    // Set while a thread drives the comm.
    busy: AtomicBool,
    shared: Mutex<Option<Shared>>,
    driven: UnsafeCell<Driven>,
}

// SAFETY: `driven` is what makes Entry not Sync. It is written by `insert` before `state` shows the entry open, and by `close` after it
// claimed `busy`; between the two it is touched only through `Driving`, whose constructor requires that no other thread drives the comm.
// The comms themselves are Send.
unsafe impl Sync for Entry {}

/// What calls on any thread may use while another thread drives the comm.
#[derive(Clone)]
pub struct Shared {
    /// The net that the comm belongs to.
    pub net: Arc<Net>,
    /// Its device.
    pub dev: usize,
}

/// A comm, driven by one thread at a time.
pub enum Driven {
    /// Nothing: the entry is free.
    Closed,
    /// A listen comm.
    Listen(Box<ListenComm>),
    /// A send comm.
    Send(Box<SendComm>),
    /// A receive comm.
    Recv(Box<RecvComm>),
}

/// A comm in the hands of the thread that drives it.
pub struct Driving<'a, C> {
    comm: &'a mut C,
    // The comm's device and net, and the handle's low bits for requests, are found again through the entry.
    entry: &'a Entry,
    index: u32,
    count: u32,
}

impl<C> Deref for Driving<'_, C> {
    type Target = C;
    #[inline]
    fn deref(&self) -> &C {
        self.comm
    }
}

impl<C> DerefMut for Driving<'_, C> {
    #[inline]
    fn deref_mut(&mut self) -> &mut C {
        self.comm
    }
}

impl<C> Drop for Driving<'_, C> {
    #[inline]
    fn drop(&mut self) {
        // pairs with the load in `Entry::claim` of the thread that drives the comm next
        self.entry.busy.store(false, Ordering::Release);
    }
}

impl<C> Driving<'_, C> {
    /// The handle of one of the comm's requests.
    #[inline]
    pub fn request(&self, kind: Kind, request: RequestId) -> Handle {
        Place::request(kind, self.index, self.count, request)
    }

    /// What other threads may use of the comm.
    pub fn shared(&self) -> Option<Shared> {
        lock(&self.entry.shared).clone()
    }
}

impl Slab {
    /// An empty slab for the process that is `process` forks away from the first one.
    pub fn new(process: u8) -> Slab {
        Slab { process, chunks: [const { OnceLock::new() }; CHUNKS], free: Mutex::new(Free::default()) }
    }

    /// Takes a comm in and returns its handle.
    ///
    /// Errors: more than 2^18 comms open at once; `Closed`, which is no comm.
    pub fn insert(&self, shared: Shared, driven: Driven) -> Result<Handle> {
        let kind = match &driven {
            Driven::Closed => return Err(Error::internal("a closed comm has no handle")),
            Driven::Listen(_) => Kind::Listen,
            Driven::Send(_) => Kind::Send,
            Driven::Recv(_) => Kind::Recv,
        };
        let index = {
            let mut free = lock(&self.free);
            match free.closed.pop() {
                Some(index) => index,
                None if (free.never_used as usize) < MAX_COMMS => {
                    free.never_used += 1;
                    free.never_used - 1
                }
                None => return Err(Error::usage(format!("{} comms are open, which is the limit", MAX_COMMS))),
            }
        };
        let chunk = self.chunks[index as usize / CHUNK].get_or_init(|| (0..CHUNK).map(|_| Entry::new()).collect());
        let entry = &chunk[index as usize % CHUNK];
        *lock(&entry.shared) = Some(shared);
        let count = entry.state.load(Ordering::Relaxed) >> 1;
        // SAFETY: the entry is not open and its index is on no list, so this thread alone knows it; no reference into it exists.
        unsafe { *entry.driven.get() = driven };
        // pairs with the Acquire load in `Entry::is_open`
        entry.state.store(count << 1 | 1, Ordering::Release);
        Ok(Place::comm(kind, self.process, index, count))
    }

    /// The listen comm that `handle` names.
    ///
    /// # Safety
    /// No other thread drives or closes this comm while the result lives. (Violations are detected: always for a listen comm, as far as
    /// a plain flag can for the others.)
    #[inline]
    pub unsafe fn listen(&self, handle: Handle) -> Result<Driving<'_, ListenComm>> {
        handle.expect(Kind::Listen, self.process)?;
        // SAFETY: the requirement is the caller's own.
        unsafe { self.drive(handle.comm(), handle, Entry::claim_surely, Driven::as_listen) }
    }

    /// The send comm that `handle` names.
    ///
    /// # Safety
    /// As for [`Slab::listen`].
    #[inline(always)]
    pub unsafe fn send(&self, handle: Handle) -> Result<Driving<'_, SendComm>> {
        handle.expect(Kind::Send, self.process)?;
        // SAFETY: the requirement is the caller's own.
        unsafe { self.drive(handle.comm(), handle, Entry::claim, Driven::as_send) }
    }

    /// The receive comm that `handle` names.
    ///
    /// # Safety
    /// As for [`Slab::listen`].
    #[inline(always)]
    pub unsafe fn recv(&self, handle: Handle) -> Result<Driving<'_, RecvComm>> {
        handle.expect(Kind::Recv, self.process)?;
        // SAFETY: the requirement is the caller's own.
        unsafe { self.drive(handle.comm(), handle, Entry::claim, Driven::as_recv) }
    }

    /// The send comm of the request that `handle` names, and the comm's number of the request.
    ///
    /// # Safety
    /// As for [`Slab::listen`].
    #[inline(always)]
    pub unsafe fn send_request(&self, handle: Handle) -> Result<(Driving<'_, SendComm>, RequestId)> {
        let (place, request) = handle.request();
        // SAFETY: the requirement is the caller's own.
        Ok((unsafe { self.drive(place, handle, Entry::claim, Driven::as_send) }?, request))
    }

    /// The receive comm of the request that `handle` names, and the comm's number of the request.
    ///
    /// # Safety
    /// As for [`Slab::listen`].
    #[inline(always)]
    pub unsafe fn recv_request(&self, handle: Handle) -> Result<(Driving<'_, RecvComm>, RequestId)> {
        let (place, request) = handle.request();
        // SAFETY: the requirement is the caller's own.
        Ok((unsafe { self.drive(place, handle, Entry::claim, Driven::as_recv) }?, request))
    }

    /// What any thread may use of the send or receive comm that `handle` names, while another drives it.
    pub fn shared(&self, handle: Handle) -> Result<Shared> {
        match handle.kind() {
            Some(kind @ (Kind::Send | Kind::Recv)) => handle.expect(kind, self.process)?,
            _ => return Err(handle.is_no("send or receive comm")),
        }
        let place = handle.comm();
        let entry = self.entry(place).ok_or_else(|| self.gone(handle))?;
        let shared = lock(&entry.shared);
        // Under the lock, as `close` empties `shared` under it: what is cloned belongs to the comm of this handle.
        if entry.is_open(place) { shared.clone().ok_or_else(|| self.gone(handle)) } else { Err(self.gone(handle)) }
    }

    /// Takes the comm that `handle` names out of the slab, for the caller to drop.
    ///
    /// Errors: not a `kind`; closed before; another thread is driving it.
    pub fn close(&self, handle: Handle, kind: Kind) -> Result<(Driven, Option<Shared>)> {
        handle.expect(kind, self.process)?;
        let place = handle.comm();
        let entry = self.entry(place).ok_or_else(|| self.gone(handle))?;
        if !entry.claim_surely() {
            return Err(in_use(handle));
        }
        if !entry.is_open(place) {
            entry.busy.store(false, Ordering::Release);
            return Err(self.gone(handle));
        }
        // SAFETY: `busy` is ours, so no thread drives the comm, and the entry is open, so it is not being filled.
        let driven = unsafe { std::mem::replace(&mut *entry.driven.get(), Driven::Closed) };
        let shared = {
            let mut shared = lock(&entry.shared);
            entry.state.store(place.next() << 1, Ordering::Release);
            shared.take()
        };
        entry.busy.store(false, Ordering::Release);
        lock(&self.free).closed.push(place.index);
        Ok((driven, shared))
    }

    /// # Safety
    /// As for [`Slab::listen`].
    #[inline(always)]
    unsafe fn drive<C>(
        &self,
        place: Place,
        handle: Handle,
        claim: fn(&Entry) -> bool,
        pick: fn(&mut Driven) -> Option<&mut C>,
    ) -> Result<Driving<'_, C>> {
        let Some(entry) = self.entry(place) else {
            return Err(self.gone(handle));
        };
        if !entry.is_open(place) {
            return Err(self.gone(handle));
        }
        if !claim(entry) {
            return Err(in_use(handle));
        }
        // SAFETY: the entry is open, so `insert` has filled `driven`; the caller promises that no other thread drives or closes the
        // comm, and the flag just set turns away one that does so later.
        match pick(unsafe { &mut *entry.driven.get() }) {
            Some(comm) => Ok(Driving { comm, entry, index: place.index, count: entry.state.load(Ordering::Relaxed) >> 1 }),
            None => {
                entry.busy.store(false, Ordering::Release);
                Err(self.gone(handle))
            }
        }
    }

    #[inline(always)]
    fn entry(&self, place: Place) -> Option<&Entry> {
        self.chunks.get(place.index as usize / CHUNK)?.get()?.get(place.index as usize % CHUNK)
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

impl Entry {
    fn new() -> Entry {
        Entry { state: AtomicU32::new(0), busy: AtomicBool::new(false), shared: Mutex::new(None), driven: UnsafeCell::new(Driven::Closed) }
    }

    #[inline(always)]
    fn is_open(&self, place: Place) -> bool {
        // pairs with the Release stores in `insert` and `close`
        let state = self.state.load(Ordering::Acquire);
        state & 1 == 1 && place.is(state >> 1)
    }

    /// Sets `busy`, unless it is set.
    fn claim_surely(&self) -> bool {
        // pairs with the Release store of the thread that drove the comm before
        self.busy.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Sets `busy`, unless it is set. A load and a store instead of one atomic operation: two threads that come within the same few
    /// nanoseconds are not told apart, and in return a call costs no locked instruction.
    #[inline]
    fn claim(&self) -> bool {
        // pairs with the Release store of the thread that drove the comm before
        let free = !self.busy.load(Ordering::Acquire);
        if free {
            self.busy.store(true, Ordering::Relaxed);
        }
        free
    }
}

impl Driven {
    fn as_listen(&mut self) -> Option<&mut ListenComm> {
        if let Driven::Listen(comm) = self { Some(comm) } else { None }
    }

    fn as_send(&mut self) -> Option<&mut SendComm> {
        if let Driven::Send(comm) = self { Some(comm) } else { None }
    }

    fn as_recv(&mut self) -> Option<&mut RecvComm> {
        if let Driven::Recv(comm) = self { Some(comm) } else { None }
    }
}

#[cold]
fn in_use(handle: Handle) -> Error {
    let words = handle.kind().map_or("handle", Kind::words);
    Error::internal(format!("{words} {:#x} is in use by another thread; a comm may be driven by one thread at a time", handle.value()))
}

// A panic elsewhere leaves these locks' contents whole: each is changed by single assignments.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
        let slab = Slab::new(0);
        let never_made = Place::comm(Kind::Send, 0, 0, 0);
        let beyond = Place::comm(Kind::Send, 0, MAX_COMMS as u32 - 1, 7);
        for handle in [handle(0), handle(1), handle(0x7fff_1234_5678), handle(u64::MAX), never_made, beyond] {
            // SAFETY: nobody else uses this slab.
            unsafe {
                assert!(slab.listen(handle).is_err());
                assert!(slab.send(handle).is_err());
                assert!(slab.recv(handle).is_err());
                assert!(slab.send_request(handle).is_err());
                assert!(slab.recv_request(handle).is_err());
            }
            assert!(slab.shared(handle).is_err());
            assert!(slab.close(handle, Kind::Send).is_err());
            assert!(handle.is_send_request().is_err());
        }
        let recv = Place::comm(Kind::Recv, 0, 0, 0);
        assert!(message(slab.close(recv, Kind::Send)).contains("is a receive comm, not a send comm"));
        assert!(message(slab.close(never_made, Kind::Send)).contains("is closed, or never was one"));
        assert!(message(Slab::new(1).close(never_made, Kind::Send)).contains("before a fork"));
        assert!(message(slab.shared(handle(0))).contains("send or receive comm is NULL"));
    }
}
