//! Straight from rank to rank: what each has for each other one, all to one, and one to all.

use crate::base::error::Result;
use crate::link::limits::MAX_MESSAGE;
use crate::mesh::context::{Context, Operation};
use crate::mesh::device::Registered;

use super::ring::Cut;

/// Announces as many receives as a message of these bytes takes; none for no bytes.
fn receive<'a>(
    mesh: &'a Context,
    all: &mut Vec<Operation<'a>>,
    rank: usize,
    tag: u64,
    to: &'a Registered,
    at: usize,
    len: usize,
) -> Result<()> {
    for offset in (0..len).step_by(MAX_MESSAGE) {
        all.push(mesh.recv(rank, tag, to.place(at + offset, MAX_MESSAGE.min(len - offset))?)?);
    }
    Ok(())
}

/// Sends as many.
fn send<'a>(
    mesh: &'a Context,
    all: &mut Vec<Operation<'a>>,
    rank: usize,
    tag: u64,
    from: &Registered,
    at: usize,
    len: usize,
) -> Result<()> {
    for offset in (0..len).step_by(MAX_MESSAGE) {
        all.push(mesh.send(rank, tag, from.part(at + offset, MAX_MESSAGE.min(len - offset))?)?);
    }
    Ok(())
}

async fn finish(all: Vec<Operation<'_>>) -> Result<()> {
    for one in all {
        one.await?;
    }
    Ok(())
}

/// Chunk i of `from` goes to rank i, whose chunk for this rank comes into its place in `to`.
pub async fn alltoall(mesh: &Context, from: (&Registered, &Cut), to: (&Registered, &Cut), tag: u64) -> Result<()> {
    let (rank, size) = (mesh.rank(), mesh.size());
    let mut all = Vec::new();
    // In an order in which no rank is everybody's first.
    for step in 1..size {
        let left = (rank + size - step) % size;
        let (at, len) = to.1.chunk(left);
        receive(mesh, &mut all, left, tag, to.0, at, len)?;
    }
    for step in 1..size {
        let right = (rank + step) % size;
        let (at, len) = from.1.chunk(right);
        send(mesh, &mut all, right, tag, from.0, at, len)?;
    }
    finish(all).await
}

/// The root's memory gets every other rank's chunk, in its place. The others give all of theirs.
pub async fn gather(mesh: &Context, mine: &Registered, cut: &Cut, root: usize, tag: u64) -> Result<()> {
    let mut all = Vec::new();
    if mesh.rank() == root {
        for rank in (0..mesh.size()).filter(|rank| *rank != root) {
            let (at, len) = cut.chunk(rank);
            receive(mesh, &mut all, rank, tag, mine, at, len)?;
        }
    } else {
        send(mesh, &mut all, root, tag, mine, 0, mine.len())?;
    }
    finish(all).await
}

/// Every other rank's memory gets its chunk of the root's.
pub async fn scatter(mesh: &Context, mine: &Registered, cut: &Cut, root: usize, tag: u64) -> Result<()> {
    let mut all = Vec::new();
    if mesh.rank() == root {
        for rank in (0..mesh.size()).filter(|rank| *rank != root) {
            let (at, len) = cut.chunk(rank);
            send(mesh, &mut all, rank, tag, mine, at, len)?;
        }
    } else {
        receive(mesh, &mut all, root, tag, mine, 0, mine.len())?;
    }
    finish(all).await
}
