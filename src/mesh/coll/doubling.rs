//! Allreduce by recursive doubling: in each step two ranks swap all they have, and both reduce it. For little data: the fewest steps.
//!
//! A few bytes, among ranks that are a power of two, are not in anybody's memory on the way. Of ranks that are no power of two, each of the last ones first gives what it has to one of the first, and gets the result at the end.

use crate::base::error::Result;
use crate::mesh::context::Context;
use crate::mesh::device::Registered;
use crate::mesh::protocol::Small;
use crate::mesh::reduce::Reduction;

/// Of all ranks.
pub async fn allreduce(mesh: &Context, mine: &Registered, reduction: Reduction<'_>, tag: u64) -> Result<()> {
    let (rank, len) = (mesh.rank(), mine.len());
    let core = 1 << mesh.size().ilog2();
    let extra = mesh.size() - core;
    if rank >= core {
        let partner = rank - core;
        mesh.send(partner, tag, mine.part(0, len)?)?.await?;
        return mesh.recv(partner, tag, mine.place(0, len)?)?.await.map(|_| ());
    }
    let scratch = mesh.scratch(len)?;
    let (ours, theirs) = (mine.view(0, len)?, scratch.view(0, len)?);
    if rank < extra {
        mesh.recv(rank + core, tag, scratch.place(0, len)?)?.await?;
        reduction.reduce(&[ours, theirs], &[ours]);
    }
    let mut distance = 1;
    while distance < core {
        let partner = rank ^ distance;
        let received = mesh.recv(partner, tag, scratch.place(0, len)?)?;
        let sent = mesh.send(partner, tag, mine.part(0, len)?)?;
        received.await?;
        // What is sent must not change before the peer has it.
        sent.await?;
        reduction.reduce(&if rank < partner { [ours, theirs] } else { [theirs, ours] }, &[ours]);
        distance *= 2;
    }
    if rank < extra {
        mesh.send(rank + core, tag, mine.part(0, len)?)?.await?;
    }
    scratch.give_back();
    Ok(())
}

/// The same of a small message's bytes, of ranks that are a power of two.
pub async fn allreduce_small(mesh: &Context, mine: &Registered, reduction: Reduction<'_>, tag: u64) -> Result<()> {
    let (rank, len) = (mesh.rank(), mine.len());
    let memory = mine.view(0, len)?;
    let mut ours = Small::new(len, |bytes| memory.read(bytes)).unwrap_or(Small::NONE);
    let mut distance = 1;
    while distance < mesh.size() {
        let partner = rank ^ distance;
        let theirs = mesh.sendrecv(partner, ours, partner, len, tag).await?;
        ours = if rank < partner { reduction.small(&ours, &theirs) } else { reduction.small(&theirs, &ours) };
        distance *= 2;
    }
    memory.write(ours.bytes());
    Ok(())
}
