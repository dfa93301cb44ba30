//! Copies that both sides of a queue pair make: bulk data moves twice as fast if two cores copy. The threads that drive the two queue pairs
//! copy; a thread that deregisters memory withdraws its grants.
//!
//! For a long WRITE from the requester's private memory, the responder opens a [`Grant`], which names where the bytes go and cuts them into
//! parts. The responder claims parts from the back and reads them, the requester claims parts from the front and writes them
//! (`process_vm_writev`), each when it has the time, so either of them alone completes the copy. The responder has checked key and bounds
//! before, and can withdraw the grant at any time. It then waits until the requester has written the one part that it may be writing, has
//! closed its queue pair, or is dead.
//!
//! The words of a grant. The tag says which descriptor they are for:
//!
//! | word | bits 63..32 | 31 | 30..16 | 15..0 |
//! |---|---|---|---|---|
//! | claims | tag | withdrawn | parts claimed by the responder | parts claimed by the requester |
//! | done | tag | the requester could not write the part that it claimed last | | parts written by the requester |

mod claim;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use super::layout::{Control, GRANTS, Grant};
use crate::base::clock;
use crate::base::fork::PerProcess;
use crate::base::log::{self, log_warn};
use crate::base::mem::Shm;
use crate::base::process::Process;
pub use claim::{Claim, claim, part_not_written, part_written};

/// Longest part: what a system call copies before the caller gets its turn.
const PART_MAX: u32 = 512 * 1024;
/// Shortest part; below it two system calls cost more than a second core gains.
const PART_MIN: u32 = 32 * 1024;
/// If so many descriptors wait, short ones are not cut: the two sides then copy different descriptors, in one system call each.
const CROWD: u64 = 4;
/// The longest of these. Of one longer than that, up to twice the longest part, each side mostly copies the same half whenever its memory is used again, of
/// which its core's caches may still have some.
const WHOLE_MAX: u32 = 256 * 1024;

/// After how long a warning tells that a withdrawn grant waits for the requester.
const WARN_NS: u64 = 1_000_000_000;

/// In `claims`.
const WITHDRAWN: u64 = 1 << 31;
const RESPONDER_SHIFT: u32 = 16;
const RESPONDER: u64 = 0x7fff;
const REQUESTER: u64 = 0xffff;
/// In `done`: the requester could not write the part that it claimed last.
const NOT_WRITTEN: u64 = 1 << 31;

fn tag(desc: u64) -> u64 {
    desc.wrapping_add(1) << 32
}

/// The lower half of `word` if it is for `desc`; else 0.
fn untag(word: u64, desc: u64) -> u64 {
    if word & !0xffff_ffff == tag(desc) { word & 0xffff_ffff } else { 0 }
}

/// A part of a descriptor's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyPart {
    /// First byte.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

/// Part number `index` of `len` bytes that are cut into parts of `part`.
fn cut(index: u64, part: u64, len: u32) -> Option<CopyPart> {
    let offset = index.checked_mul(part).filter(|&offset| offset < u64::from(len))? as u32;
    Some(CopyPart { offset, len: part.min(u64::from(len - offset)) as u32 })
}

/// What [`Grants::poll`] tells the responder of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyProgress {
    /// The responder has claimed this part, and is to read it.
    Part(CopyPart),
    /// All parts are claimed, and the requester still writes.
    Waits,
    /// All bytes are in place; the requester has written so many of them.
    Done(u32),
    /// The grant was withdrawn, with bytes missing.
    Withdrawn,
    /// The peer has stored impossible values in the grant.
    ProtocolError,
}

#[derive(Debug, Clone, Copy, Default)]
struct OpenGrant {
    addr: u64,
    len: u32,
    part: u32,
    /// None of a descriptor that was passed over.
    parts: u32,
    /// Parts that the responder has claimed. It has read each before it claims the next.
    claimed: u32,
    /// Whether the responder has taken over the part that the requester could not write.
    took_over: bool,
}

/// A responder's grants, for the descriptors `first..upto`, of which it may have passed over some.
pub struct Grants {
    open: [OpenGrant; GRANTS],
    first: u64,
    upto: u64,
    leases: Arc<LeaseTable>,
}

impl Grants {
    /// None open. `direction` is the requester's, `peer` its process.
    pub fn new(shm: Arc<Shm>, direction: usize, peer: Option<Arc<Process>>) -> Self {
        let none = [const { AtomicU64::new(0) }; GRANTS];
        let leases = Arc::new(LeaseTable { leases: none, done_before: [const { AtomicU64::new(0) }; GRANTS], shm, direction, peer });
        LIVE.with(|live| live.push(leases.clone()));
        Grants { open: [OpenGrant::default(); GRANTS], first: 0, upto: 0, leases }
    }

    /// Whether `desc` has a grant, or was passed over.
    #[inline]
    pub fn is_open(&self, desc: u64) -> bool {
        desc >= self.first && desc < self.upto
    }

    /// The descriptor that gets the next grant, if `head` is the oldest one not consumed.
    #[inline]
    pub fn next(&self, head: u64) -> u64 {
        self.upto.max(head)
    }

    /// Whether descriptor [`Grants::next`] can get a grant: there is a free one, and the target overlaps no other's, as of two that overlap the
    /// later one must win. Nor if `done` has its tag already: that is from 2^32 descriptors ago.
    pub fn fits(&self, head: u64, addr: u64, len: u32) -> bool {
        let next = self.next(head);
        let apart = |o: &OpenGrant| addr >= o.addr.saturating_add(u64::from(o.len)) || o.addr >= addr.saturating_add(u64::from(len));
        let done = self.leases.grant(next as usize % GRANTS).done.load(Ordering::Relaxed);
        next - head < GRANTS as u64
            && done & !0xffff_ffff != tag(next)
            && (head..next).all(|desc| apart(&self.open[desc as usize % GRANTS]))
    }

    /// Opens a grant for descriptor [`Grants::next`], whose target, memory of `key`, the caller has pinned. `waiting` descriptors wait that are no
    /// short WRITEs, this one included.
    pub fn open(&mut self, head: u64, key: u32, addr: u64, len: u32, waiting: u64) {
        let desc = self.next(head);
        let whole = waiting >= CROWD && len <= WHOLE_MAX;
        let part = if whole { len } else { len.div_ceil(2).next_multiple_of(4096).max(PART_MIN) }.min(PART_MAX);
        let parts = len.div_ceil(part);
        let slot = desc as usize % GRANTS;
        self.open[slot] = OpenGrant { addr, len, part, parts, claimed: 0, took_over: false };
        (self.first, self.upto) = (head, desc + 1);
        let grant = self.leases.grant(slot);
        self.leases.done_before[slot].store(grant.done.load(Ordering::Relaxed), Ordering::Relaxed);
        // Before the caller drops its pin: a deregistration that waited for the pin finds the lease.
        self.leases.leases[slot].store(tag(desc) | u64::from(key), Ordering::SeqCst);
        grant.claims.store(tag(desc), Ordering::Relaxed);
        // Pairs with the fence in `claim`.
        fence(Ordering::Release);
        grant.to.store(addr, Ordering::Relaxed);
        grant.part.store(u64::from(part), Ordering::Relaxed);
        grant.parts.store(u64::from(parts), Ordering::Relaxed);
        // Pairs with the Acquire in `claim`.
        grant.number.store(desc + 1, Ordering::Release);
    }

    /// Passes over descriptor [`Grants::next`], which needs no copy: later ones can get a grant if they overlap it no more than another's target.
    pub fn pass(&mut self, head: u64, addr: u64, len: u32) {
        let desc = self.next(head);
        self.open[desc as usize % GRANTS] = OpenGrant { addr, len, ..OpenGrant::default() };
        (self.first, self.upto) = (head, desc + 1);
    }

    /// Claims a part of `desc` for the responder, or says how far the copy is. The responder has read the parts that it claimed before.
    #[inline]
    pub fn poll(&mut self, desc: u64) -> CopyProgress {
        let slot = desc as usize % GRANTS;
        let (grant, open) = (self.leases.grant(slot), &mut self.open[slot]);
        if open.parts == 0 {
            return CopyProgress::Done(0);
        }
        loop {
            // Pairs with the Release in `part_written`.
            let done = untag(grant.done.load(Ordering::Acquire), desc);
            let claims = grant.claims.load(Ordering::Acquire);
            let state = claims & 0xffff_ffff;
            let (own, peers) = (state >> RESPONDER_SHIFT & RESPONDER, state & REQUESTER);
            if claims & !0xffff_ffff != tag(desc) || own != u64::from(open.claimed) || own + peers > u64::from(open.parts) {
                return CopyProgress::ProtocolError;
            }
            let (count, not_written) = (done & REQUESTER, done & NOT_WRITTEN != 0);
            // `done` was loaded first, so an honest requester's is not ahead of `claims`.
            if count > peers {
                return CopyProgress::ProtocolError;
            }
            if own + peers < u64::from(open.parts) {
                if state & WITHDRAWN != 0 {
                    return CopyProgress::Withdrawn;
                }
                let more = claims + (1 << RESPONDER_SHIFT);
                if grant.claims.compare_exchange(claims, more, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                    continue;
                }
                open.claimed += 1;
                return cut(u64::from(open.parts - open.claimed), u64::from(open.part), open.len)
                    .map_or(CopyProgress::ProtocolError, CopyProgress::Part);
            }
            let took_over = u64::from(open.took_over);
            return if count + took_over == peers {
                let first_own = u64::from(open.parts - open.claimed) * u64::from(open.part);
                let taken_over = cut(count, u64::from(open.part), open.len).filter(|_| open.took_over).map_or(0, |part| part.len);
                CopyProgress::Done((first_own.min(u64::from(open.len)) as u32).saturating_sub(taken_over))
            } else if not_written && count + 1 == peers && !open.took_over {
                if state & WITHDRAWN != 0 {
                    return CopyProgress::Withdrawn;
                }
                open.took_over = true;
                cut(count, u64::from(open.part), open.len).map_or(CopyProgress::ProtocolError, CopyProgress::Part)
            } else {
                CopyProgress::Waits
            };
        }
    }

    /// Closes the grant of `desc`, the oldest: its copy is done.
    #[inline]
    pub fn close(&mut self, desc: u64) {
        self.leases.leases[desc as usize % GRANTS].store(0, Ordering::Relaxed);
        self.first = desc + 1;
    }

    /// Lets the requester claim no further part of anything; whether it may still be writing one.
    #[cold]
    pub fn stop(&mut self) -> bool {
        let slots = (self.first..self.upto).map(|desc| desc as usize % GRANTS);
        slots.fold(false, |busy, slot| self.leases.stop(slot, self.leases.leases[slot].load(Ordering::Relaxed)) | busy)
    }

    /// Whether the requester writes nothing more: it is dead, or its queue pair is closed.
    pub fn peer_is_gone(&self) -> bool {
        self.leases.peer_is_gone()
    }

    /// Withdraws every grant. On return the requester writes nothing.
    #[cold]
    pub fn withdraw(&mut self) {
        for desc in self.first..self.upto {
            let slot = desc as usize % GRANTS;
            self.leases.withdraw(slot, self.leases.leases[slot].load(Ordering::Relaxed));
            self.close(desc);
        }
        (self.first, self.upto) = (0, 0);
    }
}

impl Drop for Grants {
    fn drop(&mut self) {
        self.withdraw();
        LIVE.with(|live| live.retain(|leases| !Arc::ptr_eq(leases, &self.leases)));
    }
}

/// The memory that a responder's grants are for: what a thread that deregisters memory needs to withdraw them.
struct LeaseTable {
    /// By grant: its tag and the key of its memory; 0 if it is closed.
    leases: [AtomicU64; GRANTS],
    /// By grant: `done` when it was opened. The word keeps that value until the requester has written a part.
    done_before: [AtomicU64; GRANTS],
    shm: Arc<Shm>,
    direction: usize,
    peer: Option<Arc<Process>>,
}

static LIVE: PerProcess<Vec<Arc<LeaseTable>>> = PerProcess::new();

impl LeaseTable {
    fn control(&self) -> &Control {
        // SAFETY: the segment begins with a page-aligned Control, whose fields are atomics, and the Arc keeps it mapped.
        unsafe { &*self.shm.ptr(0, size_of::<Control>()).cast::<Control>() }
    }

    fn grant(&self, slot: usize) -> &Grant {
        &self.control().grants[self.direction & 1][slot % GRANTS]
    }

    /// Whether the requester writes no more: it is dead, or its queue pair is closed.
    fn peer_is_gone(&self) -> bool {
        // Pairs with the store in `ShmWire::close`, by the thread that writes parts.
        let closed = self.control().sides[self.direction & 1].closed.load(Ordering::SeqCst) != 0;
        closed || self.peer.as_ref().is_none_or(|peer| peer.is_gone())
    }

    /// Lets the requester claim no further part under `lease`; whether it may be writing one.
    fn stop(&self, slot: usize, lease: u64) -> bool {
        if lease == 0 {
            return false;
        }
        let grant = self.grant(slot);
        // Pairs with the exchange in `claim`: a later claim fails, an earlier one is seen here. If the tag differs, the grant is for another
        // descriptor by now, or the peer has spoilt it, and there is nothing to stop.
        let flagged = grant
            .claims
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |claims| (claims >> 32 == lease >> 32).then_some(claims | WITHDRAWN));
        let Ok(claims) = flagged else { return false };
        // Pairs with the Release in `part_written`.
        let done = grant.done.load(Ordering::Acquire);
        let before = self.done_before[slot % GRANTS].load(Ordering::Relaxed);
        let state = if done >> 32 == claims >> 32 { done & 0xffff_ffff } else { 0 };
        // An honest requester claims one part at a time, and stores nothing but its count in `done`.
        (state != 0 || done == before) && state & NOT_WRITTEN == 0 && (state & REQUESTER) + 1 == claims & REQUESTER
    }

    /// Withdraws the grant of `lease`; on return the requester writes nothing under it.
    #[cold]
    fn withdraw(&self, slot: usize, lease: u64) {
        let mut tries = 0u32;
        let mut since = 0;
        while self.stop(slot, lease) {
            tries = tries.saturating_add(1);
            match tries {
                0..64 => std::hint::spin_loop(),
                64..1024 => std::thread::yield_now(),
                _ => {
                    if self.peer_is_gone() {
                        return;
                    }
                    let now = clock::now();
                    if since == 0 {
                        since = now;
                    } else if since != u64::MAX && now - since > WARN_NS {
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

/// Withdraws every grant for memory of `key`, which was deregistered and is not pinned any more, so that there are no new ones.
#[cold]
pub fn end_peer_writes(key: u32) {
    let names = |lease: u64| lease != 0 && lease as u32 == key;
    let tables: Vec<_> =
        LIVE.with(|live| live.iter().filter(|table| table.leases.iter().any(|l| names(l.load(Ordering::SeqCst)))).cloned().collect());
    for table in tables {
        for (slot, lease) in table.leases.iter().enumerate() {
            let lease = lease.load(Ordering::SeqCst);
            if names(lease) {
                table.withdraw(slot, lease);
            }
        }
    }
}

#[cfg(test)]
mod tests;
