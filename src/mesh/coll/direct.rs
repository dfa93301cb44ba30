//! Allreduce straight between all ranks: each one is sent its piece of what every other one has, reduces it, and sends the result to all. As few bytes as
//! around a ring, in two steps; each rank has as many messages under way as there are others.
//!
//! The memory is cut into blocks, and each block into a piece for each rank. Pieces come into scratch memory, and results are sent from there: ranks of one
//! host have it mapped, so each message is one plain copy, and a block stays in the caches from the first copy to the last.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use crate::base::error::Result;
use crate::mesh::context::{Context, Operation};
use crate::mesh::device::Registered;
use crate::mesh::reduce::Reduction;

/// Bytes of a piece: a quarter of a rank's share, so that pieces travel while others are reduced, within these bounds.
const PIECE: RangeInclusive<usize> = 128 << 10..=256 << 10;
/// Blocks whose pieces are sent before those of the first are reduced.
const AHEAD: usize = 2;
/// Blocks that scratch memory has room for: those, the one that is reduced, and the one whose result is on its way.
const SLOTS: usize = AHEAD + 2;

/// How memory is cut: all ranks do it alike.
struct Blocks {
    len: usize,
    ranks: usize,
    element: usize,
    /// Bytes of a piece of all blocks but the last.
    piece: usize,
}

impl Blocks {
    fn new(len: usize, ranks: usize, element: usize) -> Blocks {
        let share = len.div_ceil(ranks);
        let piece = share.min((share / 4).clamp(*PIECE.start(), *PIECE.end()));
        Blocks { len, ranks, element, piece: piece.div_ceil(element).max(1) * element }
    }

    fn count(&self) -> usize {
        self.len.div_ceil(self.ranks * self.piece)
    }

    /// Offset and bytes of a rank's piece of a block. Of the last block, the last pieces may be empty.
    fn piece(&self, block: usize, rank: usize) -> (usize, usize) {
        let start = block * self.ranks * self.piece;
        let left = self.len.saturating_sub(start);
        let piece = left.div_ceil(self.ranks).div_ceil(self.element).saturating_mul(self.element).min(self.piece);
        let at = (rank * piece).min(left);
        (start + at, piece.min(left - at))
    }
}

/// Of all ranks.
pub async fn allreduce(mesh: &Context, mine: &Registered, reduction: Reduction<'_>, tag: u64) -> Result<()> {
    let (rank, ranks) = (mesh.rank(), mesh.size());
    // In an order in which no rank is everybody's first.
    let others = || (1..ranks).map(|step| (rank + step) % ranks);
    let blocks = Blocks::new(mine.len(), ranks, reduction.element());
    let scratch = mesh.scratch(SLOTS * ranks * blocks.piece)?;
    let place = |block: usize, of: usize| (block % SLOTS * ranks + of) * blocks.piece;
    // The result replaces a piece, as those bytes are in this core's cache.
    let result_of = |block: usize| place(block, (rank + 1) % ranks);
    // By block: receives of pieces; and all else, of the blocks from number `oldest` on.
    let mut pieces: VecDeque<Vec<Operation<'_>>> = VecDeque::new();
    let (mut rest, mut oldest): (VecDeque<Vec<Operation<'_>>>, usize) = (VecDeque::new(), 0);
    // Between two ranks all messages have one tag, and match in order: all ranks ask for them in this one.
    for turn in 0..blocks.count() + AHEAD {
        // All that was in the same slot has come and gone.
        while oldest + SLOTS <= turn {
            finish(rest.pop_front()).await?;
            oldest += 1;
        }
        if turn < blocks.count() {
            let (_, len) = blocks.piece(turn, rank);
            let (mut receives, mut sends) = (Vec::with_capacity(ranks), Vec::with_capacity(3 * ranks));
            for other in others().filter(|_| len > 0) {
                receives.push(mesh.recv(other, tag, scratch.place(place(turn, other), len)?)?);
            }
            for other in others() {
                let (at, len) = blocks.piece(turn, other);
                if len > 0 {
                    sends.push(mesh.send(other, tag, mine.part(at, len)?)?);
                }
            }
            pieces.push_back(receives);
            rest.push_back(sends);
        }
        let Some(block) = turn.checked_sub(AHEAD) else { continue };
        let mut results = Vec::with_capacity(2 * ranks);
        // Another rank's result comes where its piece is: it has had that by then.
        for other in others() {
            let (at, len) = blocks.piece(block, other);
            if len > 0 {
                results.push(mesh.recv(other, tag, mine.place(at, len)?)?);
            }
        }
        finish(pieces.pop_front()).await?;
        let (at, len) = blocks.piece(block, rank);
        if len > 0 {
            let (own, result) = (mine.view(at, len)?, scratch.view(result_of(block), len)?);
            let operand = |of| if of == rank { Ok(own) } else { scratch.view(place(block, of), len) };
            reduction.reduce(&(0..ranks).map(operand).collect::<Result<Vec<_>>>()?, &[own, result]);
            for other in others() {
                results.push(mesh.send(other, tag, scratch.part(result_of(block), len)?)?);
            }
        }
        if let Some(operations) = rest.get_mut(block - oldest) {
            operations.extend(results);
        }
    }
    for operations in rest {
        finish(Some(operations)).await?;
    }
    drop(pieces);
    scratch.give_back();
    Ok(())
}

async fn finish(operations: Option<Vec<Operation<'_>>>) -> Result<()> {
    for operation in operations.into_iter().flatten() {
        operation.await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_cover_the_memory_once(elements in 1usize..3_000_000, ranks in 2usize..20, element in 1usize..9) {
            let blocks = Blocks::new(elements * element, ranks, element);
            let mut end = 0;
            for (block, rank) in (0..blocks.count()).flat_map(|block| (0..ranks).map(move |rank| (block, rank))) {
                let (at, len) = blocks.piece(block, rank);
                assert!(at == end && len.is_multiple_of(element) && len <= blocks.piece);
                end = at + len;
            }
            assert_eq!(end, elements * element);
        }
    }
}
