//! From one rank to all, and from all to one, along a binomial tree: as many steps as the number of ranks has bits. Long memory goes in segments, so that
//! a rank passes on the first while the second comes.

use std::collections::VecDeque;

use crate::base::error::Result;
use crate::mesh::context::{Context, Operation};
use crate::mesh::device::Registered;
use crate::mesh::reduce::Reduction;

/// Longest segment.
const SEGMENT: usize = 1 << 20;
/// Receives that are posted ahead.
const AHEAD: usize = 4;

/// This rank's place in the tree of a root.
struct Place {
    parent: Option<usize>,
    /// The one with the most ranks below it first.
    children: Vec<usize>,
}

impl Place {
    fn new(mesh: &Context, root: usize) -> Place {
        let (size, mine) = (mesh.size(), (mesh.rank() + mesh.size() - root) % mesh.size());
        let real = |place: usize| (place + root) % size;
        // The lowest bit that is set leads to the parent, those below it to the children.
        let bits = if mine == 0 { size.next_power_of_two().trailing_zeros() } else { mine.trailing_zeros() };
        let children = (0..bits).rev().map(|bit| mine + (1 << bit)).filter(|child| *child < size).map(real).collect();
        Place { parent: (mine != 0).then(|| real(mine & (mine - 1))), children }
    }
}

fn segments(len: usize, element: usize) -> Vec<(usize, usize)> {
    let segment = (SEGMENT / element * element).max(element);
    (0..len.div_ceil(segment)).map(|i| (i * segment, segment.min(len - i * segment))).collect()
}

/// The root's memory becomes that of all.
pub async fn broadcast(mesh: &Context, mine: &Registered, root: usize, tag: u64) -> Result<()> {
    let place = Place::new(mesh, root);
    let segments = segments(mine.len(), 1);
    let mut sends: Vec<Operation<'_>> = Vec::new();
    let mut recvs: VecDeque<Operation<'_>> = VecDeque::new();
    let mut coming = segments.iter();
    for &(at, len) in &segments {
        if let Some(parent) = place.parent {
            while recvs.len() < AHEAD
                && let Some(&(at, len)) = coming.next()
            {
                recvs.push_back(mesh.recv(parent, tag, mine.place(at, len)?)?);
            }
            if let Some(received) = recvs.pop_front() {
                received.await?;
            }
        }
        for child in &place.children {
            sends.push(mesh.send(*child, tag, mine.part(at, len)?)?);
        }
    }
    for sent in sends {
        sent.await?;
    }
    Ok(())
}

/// The first `len` bytes of the root's memory become the reduction of all; those of the others hold nothing of use then.
pub async fn reduce(mesh: &Context, mine: &Registered, len: usize, reduction: Reduction<'_>, root: usize, tag: u64) -> Result<()> {
    let place = Place::new(mesh, root);
    let segments = segments(len, reduction.element());
    let longest = segments.first().map_or(0, |(_, len)| *len);
    let scratch = mesh.scratch(AHEAD * longest)?;
    let inbox = &*scratch;
    // Each segment from each child, the one with the fewest ranks below it first, as it is done first.
    let work: Vec<(usize, usize, usize)> =
        segments.iter().flat_map(|(at, len)| place.children.iter().rev().map(|child| (*child, *at, *len))).collect();
    let mut sends: Vec<Operation<'_>> = Vec::new();
    let mut recvs: VecDeque<Operation<'_>> = VecDeque::new();
    let (mut posted, mut done) = (0, 0);
    for &(at, len) in &segments {
        for _ in &place.children {
            while posted < done + AHEAD
                && let Some(&(child, _, len)) = work.get(posted)
            {
                recvs.push_back(mesh.recv(child, tag, inbox.place(posted % AHEAD * longest, len)?)?);
                posted += 1;
            }
            if let Some(received) = recvs.pop_front() {
                received.await?;
            }
            let mine = mine.view(at, len)?;
            reduction.reduce(&[mine, inbox.view(done % AHEAD * longest, len)?], &[mine]);
            done += 1;
        }
        if let Some(parent) = place.parent {
            sends.push(mesh.send(parent, tag, mine.part(at, len)?)?);
        }
    }
    for sent in sends {
        sent.await?;
    }
    drop(recvs);
    scratch.give_back();
    Ok(())
}
