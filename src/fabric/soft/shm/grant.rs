//! Copies that both sides of a queue pair make: bulk data moves twice as fast if two cores copy.
//!
//! A responder that pulls a long WRITE out of the requester's memory offers the requester a share: a [`Grant`] names where the bytes
//! go and cuts them into parts. The responder takes parts from the back and reads them, the requester takes parts from the front and
//! writes them (`process_vm_writev`), each when it has the time, so either of them alone gets the whole copy done. Only the owner of memory
//! decides who writes it: the responder has checked key and bounds before, and can withdraw the grant at any time. It then waits until
//! the requester has finished the one part that it may be writing, has closed its queue pair, or is dead.
//!
//! The words of a grant, of which the tag says what descriptor they are about:
//!
//! | word | bits 63..32 | 31 | 30..16 | 15..0 |
//! |---|---|---|---|---|
//! | claims | tag | withdrawn | parts taken by the responder | parts taken by the requester |
//! | done | tag | the requester could not write the part after those done | | parts written by the requester |

mod requester;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use super::layout::{Control, GRANTS, Grant};
use crate::base::clock;
use crate::base::fork::PerProcess;
use crate::base::log::{self, log_warn};
use crate::base::mem::Shm;
use crate::base::process::Process;
pub use requester::{Taken, not_written, take, written};

/// Longest part: two of them are a megabyte, and the caller gets its turn soon enough.
const PART_MAX: u32 = 512 * 1024;
/// Shortest part; below it two system calls cost more than the second core gains.
const PART_MIN: u32 = 32 * 1024;
/// Descriptors that must be waiting for each to be copied by one side as a whole.
const CROWD: u64 = 4;

const FLAG: u64 = 1 << 31;
const OWN_SHIFT: u32 = 16;
const OWN: u64 = 0x7fff;
const PEERS: u64 = 0xffff;

fn tag(desc: u64) -> u64 {
    desc.wrapping_add(1) << 32
}

/// What the lower half of `word` says of `desc`; 0 if it is about another.
fn about(word: u64, desc: u64) -> u64 {
    if word & !0xffff_ffff == tag(desc) { word & 0xffff_ffff } else { 0 }
}

/// Some of a descriptor's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// First byte.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

/// Part `index` of `len` bytes in parts of `part`.
fn cut(index: u64, part: u64, len: u32) -> Option<Part> {
    let offset = index.checked_mul(part).filter(|&offset| offset < u64::from(len))? as u32;
    Some(Part { offset, len: part.min(u64::from(len - offset)) as u32 })
}

/// How far a copy is, to its responder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// This part is the responder's to read.
    Part(Part),
    /// All is taken, and the requester still writes.
    Waits,
    /// All bytes are in place; so many of them the requester has written.
    Done(u32),
    /// The grant was withdrawn, with bytes missing.
    Withdrawn,
    /// The peer has spoilt the grant's words.
    Nonsense,
}

#[derive(Debug, Clone, Copy, Default)]
struct Offer {
    addr: u64,
    len: u32,
    part: u32,
    parts: u32,
    /// Parts that the responder has taken; it has read them when it takes the next.
    own: u32,
    /// The part that the requester gave up was taken over.
    redone: bool,
}

/// A responder's offers, one per descriptor of a run.
pub struct Grants {
    open: [Offer; GRANTS],
    first: u64,
    upto: u64,
    watched: Arc<Watched>,
}

impl Grants {
    /// None. `lane` is the requester's, `peer` its process.
    pub fn new(shm: Arc<Shm>, lane: usize, peer: Option<Arc<Process>>) -> Self {
        let none = [const { AtomicU64::new(0) }; GRANTS];
        let watched = Arc::new(Watched { leaves: none, before: [const { AtomicU64::new(0) }; GRANTS], shm, lane, peer });
        LIVE.with(|live| live.push(watched.clone()));
        Grants { open: [Offer::default(); GRANTS], first: 0, upto: 0, watched }
    }

    /// Whether `desc` was offered.
    #[inline]
    pub fn has(&self, desc: u64) -> bool {
        desc >= self.first && desc < self.upto
    }

    /// The descriptor after the last one offered, given that `head` is the oldest one not done.
    #[inline]
    pub fn next(&self, head: u64) -> u64 {
        self.upto.max(head)
    }

    /// Whether there is room for another descriptor, and its target overlaps no other's: of two that overlap, the later one wins. Nor is one
    /// offered that `done` seems to be about already: it stands there from 2^32 descriptors ago, of which the tag tells nothing.
    pub fn fits(&self, head: u64, addr: u64, len: u32) -> bool {
        let next = self.next(head);
        let apart = |o: &Offer| addr >= o.addr.saturating_add(u64::from(o.len)) || o.addr >= addr.saturating_add(u64::from(len));
        let done = self.watched.grant(next as usize % GRANTS).done.load(Ordering::Relaxed);
        next - head < GRANTS as u64
            && done & !0xffff_ffff != tag(next)
            && (head..next).all(|desc| apart(&self.open[desc as usize % GRANTS]))
    }

    /// Grants descriptor [`Grants::next`], of which the memory is pinned now; `waiting` descriptors wait with it.
    pub fn offer(&mut self, head: u64, key: u32, addr: u64, len: u32, waiting: u64) {
        let desc = self.next(head);
        let part = if waiting >= CROWD { len } else { (len / 2).next_multiple_of(4096).max(PART_MIN) }.min(PART_MAX);
        let parts = len.div_ceil(part);
        let slot = desc as usize % GRANTS;
        self.open[slot] = Offer { addr, len, part, parts, own: 0, redone: false };
        (self.first, self.upto) = (head, desc + 1);
        let grant = self.watched.grant(slot);
        self.watched.before[slot].store(grant.done.load(Ordering::Relaxed), Ordering::Relaxed);
        // Before the pin is given back: a deregistration that waited for the pin finds the key.
        self.watched.leaves[slot].store(tag(desc) | u64::from(key), Ordering::SeqCst);
        grant.claims.store(tag(desc), Ordering::Relaxed);
        // Pairs with the fence in `take`.
        fence(Ordering::Release);
        grant.to.store(addr, Ordering::Relaxed);
        grant.part.store(u64::from(part), Ordering::Relaxed);
        grant.parts.store(u64::from(parts), Ordering::Relaxed);
        // Pairs with the Acquire in `take`.
        grant.number.store(desc + 1, Ordering::Release);
    }

    /// Takes a part of `desc` for the responder, or says how far the copy is. Parts taken before have been read.
    #[inline]
    pub fn progress(&mut self, desc: u64) -> Progress {
        let slot = desc as usize % GRANTS;
        let (grant, offer) = (self.watched.grant(slot), &mut self.open[slot]);
        loop {
            // Pairs with the Release in `written`.
            let done = about(grant.done.load(Ordering::Acquire), desc);
            let claims = grant.claims.load(Ordering::Acquire);
            let state = claims & 0xffff_ffff;
            let (own, peers) = (state >> OWN_SHIFT & OWN, state & PEERS);
            if claims & !0xffff_ffff != tag(desc) || own != u64::from(offer.own) || own + peers > u64::from(offer.parts) {
                return Progress::Nonsense;
            }
            let (count, gave_up) = (done & PEERS, done & FLAG != 0);
            // `done` was read first, so it is not ahead of `claims`.
            if count > peers {
                return Progress::Nonsense;
            }
            if own + peers < u64::from(offer.parts) {
                if state & FLAG != 0 {
                    return Progress::Withdrawn;
                }
                if grant.claims.compare_exchange(claims, claims + (1 << OWN_SHIFT), Ordering::AcqRel, Ordering::Relaxed).is_err() {
                    continue;
                }
                offer.own += 1;
                return cut(u64::from(offer.parts - offer.own), u64::from(offer.part), offer.len)
                    .map_or(Progress::Nonsense, Progress::Part);
            }
            let redone = u64::from(offer.redone);
            return if count + redone == peers {
                let first_own = u64::from(offer.parts - offer.own) * u64::from(offer.part);
                let given_up = cut(count, u64::from(offer.part), offer.len).filter(|_| offer.redone).map_or(0, |part| part.len);
                Progress::Done((first_own.min(u64::from(offer.len)) as u32).saturating_sub(given_up))
            } else if gave_up && count + 1 == peers && !offer.redone {
                if state & FLAG != 0 {
                    return Progress::Withdrawn;
                }
                offer.redone = true;
                cut(count, u64::from(offer.part), offer.len).map_or(Progress::Nonsense, Progress::Part)
            } else {
                Progress::Waits
            };
        }
    }

    /// Descriptor `desc`, the oldest, is done with.
    #[inline]
    pub fn end(&mut self, desc: u64) {
        self.watched.leaves[desc as usize % GRANTS].store(0, Ordering::Relaxed);
        self.first = desc + 1;
    }

    /// Lets the requester take no further part of anything; whether it may still be writing one.
    #[cold]
    pub fn refuse(&mut self) -> bool {
        let slots = (self.first..self.upto).map(|desc| desc as usize % GRANTS);
        slots.fold(false, |busy, slot| self.watched.refuse(slot, self.watched.leaves[slot].load(Ordering::Relaxed)) | busy)
    }

    /// Takes every offer back. On return the requester writes nothing.
    #[cold]
    pub fn withdraw(&mut self) {
        for desc in self.first..self.upto {
            let slot = desc as usize % GRANTS;
            self.watched.withdraw(slot, self.watched.leaves[slot].load(Ordering::Relaxed));
            self.end(desc);
        }
        (self.first, self.upto) = (0, 0);
    }
}

impl Drop for Grants {
    fn drop(&mut self) {
        self.withdraw();
        LIVE.with(|live| live.retain(|w| !Arc::ptr_eq(w, &self.watched)));
    }
}

/// What deregistration on another thread needs of a responder's offers.
struct Watched {
    /// What the grants are about: tag and key of the memory; 0 for nothing.
    leaves: [AtomicU64; GRANTS],
    /// What `done` was when the grant was made: until its requester has done something, it is that.
    before: [AtomicU64; GRANTS],
    shm: Arc<Shm>,
    lane: usize,
    peer: Option<Arc<Process>>,
}

static LIVE: PerProcess<Vec<Arc<Watched>>> = PerProcess::new();

impl Watched {
    fn control(&self) -> &Control {
        // SAFETY: the segment begins with a page-aligned Control, whose fields are atomics, and the Arc keeps it mapped.
        unsafe { &*self.shm.ptr(0, size_of::<Control>()).cast::<Control>() }
    }

    fn grant(&self, slot: usize) -> &Grant {
        &self.control().grants[self.lane & 1][slot % GRANTS]
    }

    /// Whether the requester writes no more: it is dead, or its queue pair is closed.
    fn peer_is_through(&self) -> bool {
        // Pairs with the store in `ShmWire::close`, by the thread that writes parts.
        let closed = self.control().sides[self.lane & 1].closed.load(Ordering::SeqCst) != 0;
        closed || self.peer.as_ref().is_none_or(|peer| peer.is_gone())
    }

    /// Lets the requester take no further part of the grant of `leave`; whether it may be writing one.
    fn refuse(&self, slot: usize, leave: u64) -> bool {
        let grant = self.grant(slot);
        // Pairs with the exchange in `take`: what is taken later is refused, what was taken before is seen. A grant that is about another
        // descriptor by now, or that the peer spoilt, is not the one.
        let flagged =
            grant.claims.fetch_update(Ordering::AcqRel, Ordering::Acquire, |claims| (claims >> 32 == leave >> 32).then_some(claims | FLAG));
        let Ok(claims) = flagged else { return false };
        // Pairs with the Release in `written`.
        let done = grant.done.load(Ordering::Acquire);
        let before = self.before[slot % GRANTS].load(Ordering::Relaxed);
        let state = if done >> 32 == claims >> 32 { done & 0xffff_ffff } else { 0 };
        // An honest requester takes one part at a time, and stores nothing else in `done`.
        (state != 0 || done == before) && state & FLAG == 0 && (state & PEERS) + 1 == claims & PEERS
    }

    /// Takes the grant of `leave` back; on return the requester writes nothing under it.
    #[cold]
    fn withdraw(&self, slot: usize, leave: u64) {
        let mut turns = 0u32;
        let mut since = 0;
        while self.refuse(slot, leave) {
            turns = turns.saturating_add(1);
            match turns {
                0..64 => std::hint::spin_loop(),
                64..1024 => std::thread::yield_now(),
                _ => {
                    if self.peer_is_through() {
                        return;
                    }
                    let now = clock::now();
                    if since == 0 {
                        since = now;
                    } else if since != u64::MAX && now - since > 1_000_000_000 {
                        since = u64::MAX;
                        let pid = self.peer.as_ref().map_or(0, |peer| peer.pid());
                        log_warn!(log::NET, "process {pid} has not finished writing into memory that is being taken back; waiting for it");
                    }
                    clock::sleep(Duration::from_micros(100));
                }
            }
        }
    }
}

/// Takes back every leave to write into memory of `key`, which was deregistered and is pinned no more.
#[cold]
pub fn withdraw(key: u32) {
    let names = |leave: u64| leave != 0 && leave as u32 == key;
    let watched: Vec<_> =
        LIVE.with(|live| live.iter().filter(|w| w.leaves.iter().any(|leave| names(leave.load(Ordering::SeqCst)))).cloned().collect());
    for watched in watched {
        for (slot, leave) in watched.leaves.iter().enumerate() {
            let leave = leave.load(Ordering::SeqCst);
            if names(leave) {
                watched.withdraw(slot, leave);
            }
        }
    }
}

#[cfg(test)]
mod tests;
