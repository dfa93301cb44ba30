//! Around a ring: for much data, as each rank sends and receives no more than its share of it once or twice, whatever their number.
//!
//! The memory is cut into a chunk for each rank. In the reducing half each chunk goes around once, and every rank adds what it has of it; in the gathering
//! half each goes around straight into its place. One after the other they are an allreduce; the first alone is a reduce-scatter, the second an allgather.
//! Chunks are cut into segments: while one is reduced, the next one travels.

use std::collections::VecDeque;

use crate::base::error::Result;
use crate::mesh::context::{Context, Operation};
use crate::mesh::device::{Destination, Registered};
use crate::mesh::reduce::Reduction;

/// Longest segment.
const SEGMENT: usize = 1 << 20;
/// Segments of a chunk at least, if it is long enough.
const LEAST_SEGMENTS: usize = 2;
/// Shortest segment that is worth a message of its own.
const SHORTEST: usize = 16 << 10;
/// Receives that are posted ahead.
const AHEAD: usize = 4;

/// How memory is cut: all ranks do it alike.
#[derive(Debug, Clone)]
pub struct Cut {
    /// Where each rank's chunk begins, and where the last one ends.
    starts: Vec<usize>,
    /// Bytes of a segment.
    segment: usize,
    /// Segments of the longest chunk; of others, the last ones may be empty.
    segments: usize,
}

impl Cut {
    /// Into chunks that are as long as can be, of whole elements.
    pub fn even(len: usize, ranks: usize, element: usize) -> Cut {
        let chunk = len.div_ceil(ranks).div_ceil(element) * element;
        let lens: Vec<usize> = (0..ranks).map(|rank| chunk.min(len.saturating_sub(rank * chunk))).collect();
        Cut::by(&lens, element)
    }

    /// Into chunks of these bytes, each whole elements.
    pub fn by(lens: &[usize], element: usize) -> Cut {
        let mut starts = vec![0];
        starts.extend(lens.iter().scan(0usize, |end, len| {
            *end = end.saturating_add(*len);
            Some(*end)
        }));
        let longest = lens.iter().copied().max().unwrap_or(0);
        let wanted = (longest / LEAST_SEGMENTS).clamp(SHORTEST.min(longest), SEGMENT);
        let segment = (wanted.div_ceil(element) * element).max(element);
        Cut { starts, segment, segments: longest.div_ceil(segment).max(1) }
    }

    fn ranks(&self) -> usize {
        self.starts.len() - 1
    }

    /// Offset and bytes of a rank's chunk.
    pub fn chunk(&self, rank: usize) -> (usize, usize) {
        let at = |i: usize| self.starts.get(i).copied().unwrap_or(0);
        (at(rank), at(rank + 1).saturating_sub(at(rank)))
    }

    /// Bytes of the longest chunk.
    pub fn longest(&self) -> usize {
        (0..self.ranks()).map(|rank| self.chunk(rank).1).max().unwrap_or(0)
    }

    /// Bytes of all.
    pub fn len(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }

    /// Offset and bytes of a segment of a chunk.
    fn segment(&self, chunk: usize, segment: usize) -> (usize, usize) {
        let (start, len) = self.chunk(chunk);
        let at = (segment * self.segment).min(len);
        (start + at, self.segment.min(len - at))
    }

    /// The segment that a rank sends or receives as number `n`, where it begins with this chunk and goes on with the one before it.
    fn nth(&self, first: usize, n: usize) -> (usize, usize) {
        let (step, ranks) = (n / self.segments, self.ranks());
        self.segment((first + ranks - step % ranks) % ranks, n % self.segments)
    }
}

/// This rank's neighbours: the one it receives from, and the one it sends to.
fn neighbours(mesh: &Context) -> (usize, usize) {
    let (rank, ranks) = (mesh.rank(), mesh.size());
    ((rank + ranks - 1) % ranks, (rank + 1) % ranks)
}

/// Of all ranks, into the memory of each.
pub async fn allreduce(mesh: &Context, mine: &Registered, cut: &Cut, reduction: Reduction<'_>, tag: u64) -> Result<()> {
    let (_, right) = neighbours(mesh);
    reduce_half(mesh, mine, cut, reduction, tag, mesh.rank()).await?;
    gather_half(mesh, mine, cut, tag, right).await
}

/// Reduces chunks around the ring. This rank begins with chunk `first`, the next one with that behind it. At the end it has the one behind `first` of all
/// ranks, and the others hold nothing of use.
pub async fn reduce_half(mesh: &Context, mine: &Registered, cut: &Cut, reduction: Reduction<'_>, tag: u64, first: usize) -> Result<()> {
    let scratch = mesh.scratch(AHEAD * cut.segment)?;
    let place = |n: usize| n % AHEAD * cut.segment;
    let receive = |n, (_, len)| scratch.place(place(n), len);
    let reduce = |n, (at, len)| {
        let mine = mine.view(at, len)?;
        reduction.reduce(&[scratch.view(place(n), len)?, mine], &[mine]);
        Ok(())
    };
    around(mesh, mine, cut, tag, first, receive, reduce).await?;
    scratch.give_back();
    Ok(())
}

/// Gathers chunks around the ring, each into its place. This rank begins with chunk `first`, which it has, the next one with that behind it.
pub async fn gather_half<'a>(mesh: &'a Context, mine: &'a Registered, cut: &Cut, tag: u64, first: usize) -> Result<()> {
    around(mesh, mine, cut, tag, first, |_, (at, len)| mine.place(at, len), |_, _| Ok(())).await
}

/// Sends chunks around the ring, `first` of them first, segment by segment. What comes as number `n`, a segment with this offset and these bytes, is
/// received where `receive` says; once `received` has had it, it goes on, a step later. At the end the memory is the caller's again.
async fn around<'a>(
    mesh: &'a Context,
    mine: &Registered,
    cut: &Cut,
    tag: u64,
    first: usize,
    receive: impl Fn(usize, (usize, usize)) -> Result<Destination<'a>>,
    received: impl Fn(usize, (usize, usize)) -> Result<()>,
) -> Result<()> {
    let (left, right) = neighbours(mesh);
    let before = (first + cut.ranks() - 1) % cut.ranks();
    let mut sends: VecDeque<Operation<'_>> = VecDeque::new();
    let mut recvs: VecDeque<Operation<'_>> = VecDeque::new();
    let (all, mut sent, mut posted) = ((cut.ranks() - 1) * cut.segments, 0, 0);
    for n in 0..all {
        while posted < all.min(n + AHEAD) {
            recvs.push_back(mesh.recv(left, tag, receive(posted, cut.nth(before, posted))?)?);
            posted += 1;
        }
        while sent < all.min(n + cut.segments) {
            let (at, len) = cut.nth(first, sent);
            sends.push_back(mesh.send(right, tag, mine.part(at, len)?)?);
            sent += 1;
        }
        if let Some(coming) = recvs.pop_front() {
            coming.await?;
        }
        received(n, cut.nth(before, n))?;
    }
    for sent in sends {
        sent.await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn covers(cut: &Cut, len: usize, element: usize) {
        assert!(cut.segment <= SEGMENT.next_multiple_of(element));
        let mut end = 0;
        for chunk in 0..cut.ranks() {
            for segment in 0..cut.segments {
                let (at, len) = cut.segment(chunk, segment);
                assert!(at == end && len.is_multiple_of(element));
                end = at + len;
            }
        }
        assert_eq!((end, cut.len()), (len, len));
    }

    proptest! {
        #[test]
        fn segments_cover_the_memory_once(elements in 1usize..3_000_000, ranks in 2usize..20, element in 1usize..9) {
            covers(&Cut::even(elements * element, ranks, element), elements * element, element);
        }

        #[test]
        fn also_where_chunks_differ(counts in proptest::collection::vec(0usize..400_000, 2..12), element in 1usize..9) {
            let lens: Vec<usize> = counts.iter().map(|count| count * element).collect();
            covers(&Cut::by(&lens, element), lens.iter().sum(), element);
        }
    }
}
