//! Allreduce by recursive halving and doubling: in each step two ranks swap halves of what they have left and reduce their own, until each has one chunk
//! of all; then the chunks are gathered by the same steps backwards. For ranks that are a power of two and data of medium length: as few bytes as around a
//! ring, in far fewer steps.

use crate::base::error::Result;
use crate::mesh::context::Context;
use crate::mesh::device::Registered;
use crate::mesh::reduce::Reduction;

use super::ring::Cut;

/// The chunks of `distance` ranks next to each other, among which is this one: offset and bytes.
fn chunks(cut: &Cut, rank: usize, distance: usize) -> (usize, usize) {
    let first = rank & !(distance - 1);
    let (at, _) = cut.chunk(first);
    let (last, len) = cut.chunk(first + distance - 1);
    (at, last + len - at)
}

/// Of all ranks, which are a power of two.
pub async fn allreduce(mesh: &Context, mine: &Registered, cut: &Cut, reduction: Reduction<'_>, tag: u64) -> Result<()> {
    let (rank, ranks) = (mesh.rank(), mesh.size());
    let distances = || (0..ranks.ilog2()).map(|bit| 1 << bit);
    let longest = distances().map(|distance| chunks(cut, rank, distance).1).max().unwrap_or(0);
    let scratch = mesh.scratch(longest)?;
    for distance in distances().rev() {
        let partner = rank ^ distance;
        let ((keep, len), (give, given)) = (chunks(cut, rank, distance), chunks(cut, partner, distance));
        let received = mesh.recv(partner, tag, scratch.place(0, len)?)?;
        let sent = mesh.send(partner, tag, mine.part(give, given)?)?;
        received.await?;
        let (ours, theirs) = (mine.view(keep, len)?, scratch.view(0, len)?);
        reduction.reduce(&if rank < partner { [ours, theirs] } else { [theirs, ours] }, &[ours]);
        // What the partner gets comes into the same place later: it must have this first.
        sent.await?;
    }
    for distance in distances() {
        let partner = rank ^ distance;
        let ((have, len), (want, theirs)) = (chunks(cut, rank, distance), chunks(cut, partner, distance));
        let received = mesh.recv(partner, tag, mine.place(want, theirs)?)?;
        let sent = mesh.send(partner, tag, mine.part(have, len)?)?;
        received.await?;
        sent.await?;
    }
    scratch.give_back();
    Ok(())
}
