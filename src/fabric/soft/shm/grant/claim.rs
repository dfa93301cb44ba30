//! The requester's side of a grant: it claims parts from the front, writes them, and reports each. Called by the thread that drives the
//! requester's queue pair, with words of the shared segment that the responder may change at any time.

use std::sync::atomic::{Ordering, fence};

use super::{CopyPart, NOT_WRITTEN, REQUESTER, RESPONDER, RESPONDER_SHIFT, WITHDRAWN, cut, tag, untag};
use crate::fabric::soft::shm::layout::Grant;

/// The result of claiming a part of a descriptor.
pub enum Claim {
    /// The responder has not opened a grant yet.
    NotOpen,
    /// There is no part left to claim.
    Over,
    /// The requester has claimed this part of the bytes that go to this address of the responder, and is to write it.
    Part(CopyPart, u64),
}

/// Claims a part of descriptor `desc`, which is `len` bytes long, for the requester.
#[inline]
pub fn claim(grant: &Grant, desc: u64, len: u32) -> Claim {
    // Pairs with the Release in `Grants::open`.
    let number = grant.number.load(Ordering::Acquire);
    if number != desc + 1 {
        return if number > desc + 1 { Claim::Over } else { Claim::NotOpen };
    }
    loop {
        let claims = grant.claims.load(Ordering::Relaxed);
        let (to, part, parts) = (grant.to.load(Ordering::Relaxed), grant.part.load(Ordering::Relaxed), grant.parts.load(Ordering::Relaxed));
        // Pairs with the fence in `Grants::open`: if these words are another descriptor's, `claims` has changed before them, and the exchange fails.
        fence(Ordering::Acquire);
        let state = claims & 0xffff_ffff;
        let (own, peers) = (state >> RESPONDER_SHIFT & RESPONDER, state & REQUESTER);
        if claims & !0xffff_ffff != tag(desc) || state & WITHDRAWN != 0 || own + peers >= parts || peers == REQUESTER {
            return Claim::Over;
        }
        let Some(cut) = cut(peers, part, len) else { return Claim::Over };
        // Pairs with the update in `LeaseTable::stop`: the responder waits for parts that are claimed before it.
        if grant.claims.compare_exchange(claims, claims + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
            return Claim::Part(cut, to);
        }
    }
}

/// The requester has written the part that it claimed last.
#[inline]
pub fn part_written(grant: &Grant, desc: u64) {
    let count = untag(grant.done.load(Ordering::Relaxed), desc);
    // Pairs with the Acquire in `Grants::poll` and in `LeaseTable::stop`: the bytes are in place.
    grant.done.store(tag(desc) | (count + 1), Ordering::Release);
}

/// The requester could not write the part that it claimed last, and claims no other.
#[cold]
pub fn part_not_written(grant: &Grant, desc: u64) {
    let count = untag(grant.done.load(Ordering::Relaxed), desc);
    grant.done.store(tag(desc) | NOT_WRITTEN | count, Ordering::Release);
}
