//! The requester's side of a grant: it takes parts from the front, and says what became of each. Called by the thread that drives the queue pair of
//! a WRITE, with words of the shared segment that the responder may change at any time.

use std::sync::atomic::{Ordering, fence};

use super::{FLAG, OWN, OWN_SHIFT, PEERS, Part, about, cut, tag};
use crate::fabric::soft::shm::layout::Grant;

/// What a requester finds at a descriptor of its own.
pub enum Taken {
    /// Not offered, up to now.
    NotYet,
    /// Nothing to do any more.
    Over,
    /// This part is the requester's to write, at `to` in the responder's memory.
    Part(Part, u64),
}

/// Takes a part of descriptor `desc`, which is `len` bytes long, for the requester.
#[inline]
pub fn take(grant: &Grant, desc: u64, len: u32) -> Taken {
    // Pairs with the Release in `Grants::offer`.
    let number = grant.number.load(Ordering::Acquire);
    if number != desc + 1 {
        return if number > desc + 1 { Taken::Over } else { Taken::NotYet };
    }
    loop {
        let claims = grant.claims.load(Ordering::Relaxed);
        let (to, part, parts) = (grant.to.load(Ordering::Relaxed), grant.part.load(Ordering::Relaxed), grant.parts.load(Ordering::Relaxed));
        // Pairs with the fence in `Grants::offer`: had these words been changed for another descriptor, `claims` would have been before.
        fence(Ordering::Acquire);
        let state = claims & 0xffff_ffff;
        let (own, peers) = (state >> OWN_SHIFT & OWN, state & PEERS);
        if claims & !0xffff_ffff != tag(desc) || state & FLAG != 0 || own + peers >= parts || peers == PEERS {
            return Taken::Over;
        }
        let Some(cut) = cut(peers, part, len) else { return Taken::Over };
        // Pairs with the swap in `Watched::withdraw`: the responder waits for what is taken before.
        if grant.claims.compare_exchange(claims, claims + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return Taken::Part(cut, to);
        }
    }
}

/// The requester has written the part that it took last.
#[inline]
pub fn written(grant: &Grant, desc: u64) {
    let count = about(grant.done.load(Ordering::Relaxed), desc);
    // Pairs with the Acquire in `Grants::progress` and in `Watched::withdraw`: the bytes are there.
    grant.done.store(tag(desc) | (count + 1), Ordering::Release);
}

/// The requester could not write the part that it took last, and takes no other.
#[cold]
pub fn not_written(grant: &Grant, desc: u64) {
    let count = about(grant.done.load(Ordering::Relaxed), desc);
    grant.done.store(tag(desc) | FLAG | count, Ordering::Release);
}
