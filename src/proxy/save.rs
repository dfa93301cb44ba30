//! The operations that a rank's share of a transfer needs: peers, directions and steps. Pure functions, for programs that plan transfers as NCCL does;
//! any thread.
//!
//! Source of every rule: NCCL 2.7.8, src/proxy.cc (ncclProxySaveP2p, ncclProxySaveColl, NeedProxy) and, for the steps of a collective, src/enqueue.cc
//! (getLoopInfo, computeColl).

use super::args::Steps;
use super::connector::Direction;
use super::protocol::Protocol;
use super::ring::STEPS;
use crate::base::error::{Error, Result};

/// A step of send and receive holds this part of a ring's slot (src/include/collectives.h: SENDRECV_SLICEFACTOR).
pub const SENDRECV_SLICEFACTOR: u64 = 4;
/// Children that a rank has in a tree at most (src/include/devcomm.h: NCCL_MAX_TREE_ARITY).
pub const MAX_TREE_ARITY: usize = 3;

/// An operation to append to the connector of that peer and direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Saved {
    /// Whether it sends to the peer or receives from it.
    pub direction: Direction,
    /// Rank.
    pub peer: u32,
    /// Its steps.
    pub steps: Steps,
}

fn send(peer: u32, steps: Steps) -> Saved {
    Saved { direction: Direction::Send, peer, steps }
}

fn recv(peer: u32, steps: Steps) -> Saved {
    Saved { direction: Direction::Recv, peer, steps }
}

/// The share of `rank` in one round of an all-to-all exchange among `ranks`: it sends to the rank `delta` after it and receives from the one `delta`
/// before it.
///
/// * `delta` - 0: with itself, which needs no network.
/// * `send_bytes`, `recv_bytes` - `None`: nothing goes that way. Zero bytes are one step, because the other side waits for it.
/// * `buffer` - bytes of a ring's data, all slots together.
///
/// Errors: a rank or a delta that is not below `ranks`; a buffer too small to be divided into steps.
pub fn save_p2p(rank: u32, ranks: u32, delta: u32, send_bytes: Option<u64>, recv_bytes: Option<u64>, buffer: u64) -> Result<Vec<Saved>> {
    if rank >= ranks || delta >= ranks {
        return Err(Error::usage(format!("rank {rank}, delta {delta}: both must be below the {ranks} ranks")));
    }
    let step = buffer / STEPS / SENDRECV_SLICEFACTOR;
    if step == 0 {
        let least = STEPS * SENDRECV_SLICEFACTOR;
        return Err(Error::usage(format!("a buffer of {buffer} bytes: must have {least} at least")));
    }
    if delta == 0 {
        return Ok(Vec::new());
    }
    let steps = |bytes: u64| Steps::simple(bytes.div_ceil(step).max(1));
    // In 64 bits, where the sums cannot overflow.
    let [rank, ranks, delta] = [rank, ranks, delta].map(u64::from);
    let to = ((rank + delta) % ranks) as u32;
    let from = ((ranks + rank - delta) % ranks) as u32;
    Ok(send_bytes.map(|bytes| send(to, steps(bytes))).into_iter().chain(recv_bytes.map(|bytes| recv(from, steps(bytes)))).collect())
}

/// Who sends to whom in a collective (src/include/info.h: ncclPattern_t; those of an aggregating switch aside).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// All-gather, reduce-scatter: once around.
    Ring,
    /// All-reduce: twice around.
    RingTwice,
    /// Broadcast along the ring, from the root on.
    PipelineFrom,
    /// Reduction along the ring, up to the root.
    PipelineTo,
    /// Reduction towards the top of a tree.
    TreeUp,
    /// Broadcast from the top of a tree.
    TreeDown,
    /// Both.
    TreeUpDown,
}

/// A rank's place in the ring of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingPlace<'a> {
    /// The ranks in ring order. The first one is the rank itself.
    pub order: &'a [u32],
}

/// A rank's place in a tree.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TreePlace {
    /// Parent; `None` at the top.
    pub up: Option<u32>,
    /// Children.
    pub down: [Option<u32>; MAX_TREE_ARITY],
}

/// A rank's places in a channel: the reduction may go up another tree than the one that the broadcast comes down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Channel<'a> {
    /// The ring.
    pub ring: RingPlace<'a>,
    /// The tree that reductions go up.
    pub tree_up: TreePlace,
    /// The tree that broadcasts come down.
    pub tree_down: TreePlace,
}

/// The share of a rank in a collective on one channel.
///
/// * `root` - rank where a pipeline begins or ends; of no meaning to the other patterns.
///
/// Errors: a root that is not in the ring of a pipeline; steps that make no sense.
pub fn save_coll(pattern: Pattern, channel: &Channel<'_>, root: u32, steps: Steps) -> Result<Vec<Saved>> {
    steps.check()?;
    let Channel { ring, tree_up, tree_down } = channel;
    let mut saved = Vec::new();
    match (pattern, ring.order) {
        // A rank that is alone has no peer.
        (Pattern::Ring | Pattern::RingTwice | Pattern::PipelineFrom | Pattern::PipelineTo, [] | [_]) => {}
        (Pattern::Ring | Pattern::RingTwice, [_, .., previous]) => saved.extend([recv(*previous, steps), send(ring.order[1], steps)]),
        (Pattern::PipelineFrom | Pattern::PipelineTo, [me, .., previous]) => {
            if !ring.order.contains(&root) {
                return Err(Error::usage(format!("root {root} is not a rank of the ring {:?}", ring.order)));
            }
            let next = ring.order[1];
            // One of the links of the ring is left out: that into the root of a broadcast, that out of the root of a reduction.
            let (no_recv, no_send) = if pattern == Pattern::PipelineFrom { (*me, next) } else { (*previous, *me) };
            saved.extend((root != no_recv).then(|| recv(*previous, steps)));
            saved.extend((root != no_send).then(|| send(next, steps)));
        }
        (Pattern::TreeUp | Pattern::TreeDown | Pattern::TreeUpDown, _) => {}
    }
    if matches!(pattern, Pattern::TreeUp | Pattern::TreeUpDown) {
        saved.extend(tree_up.down.into_iter().flatten().map(|peer| recv(peer, steps)));
        saved.extend(tree_up.up.map(|peer| send(peer, steps)));
    }
    if matches!(pattern, Pattern::TreeDown | Pattern::TreeUpDown) {
        saved.extend(tree_down.down.into_iter().flatten().map(|peer| send(peer, steps)));
        saved.extend(tree_down.up.map(|peer| recv(peer, steps)));
    }
    Ok(saved)
}

/// How a collective is cut into steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    /// Who sends to whom.
    pub pattern: Pattern,
    /// How slots are filled.
    pub protocol: Protocol,
    /// Ranks that take part.
    pub ranks: u32,
    /// Channels that share the bytes.
    pub channels: u32,
    /// Bytes of a ring's data, all slots together.
    pub buffer: u64,
    /// Steps of a chunk, which is what a rank passes on as one. Source of NCCL's numbers: src/include/collectives.h, 4 for the ring patterns of
    /// SIMPLE, 1 for everything else.
    pub chunk: u64,
    /// Steps of a slice, of which a chunk has several: 2 where a chunk has 4, else 1.
    pub slice: u64,
}

/// The steps of a collective of `bytes` on each of its channels; `None` if there is nothing to move.
///
/// * `bytes` - of the whole operation, as NCCL counts them: for an all-gather and a reduce-scatter, those of all ranks together.
///
/// Errors: no rank, no channel, or a buffer too small to hold a line of the protocol in each slot; more steps than can be counted.
pub fn coll_steps(cut: &Cut, bytes: u64) -> Result<Option<Steps>> {
    let Cut { pattern, protocol, ranks, channels, buffer, chunk, slice } = *cut;
    // Before anything is multiplied by them.
    Steps { count: slice, slice, chunk, protocol }.check()?;
    // The data in a slot: all of it, half of each line, 15 words of 16 (src/include/devcomm.h: ncclLLFifoLine, NCCL_LL128_DATAELEMS).
    let slots = buffer / STEPS * chunk;
    let data = match protocol {
        Protocol::Simple => slots,
        Protocol::Ll => slots / 2,
        Protocol::Ll128 => slots / 16 * 15,
    };
    if ranks == 0 || channels == 0 || data == 0 {
        return Err(Error::usage(format!("{ranks} ranks, {channels} channels, a buffer of {buffer} bytes: too few")));
    }
    let ranks = u64::from(ranks);
    let (steps_per_loop, chunks_per_loop) = match pattern {
        Pattern::Ring => (ranks - 1, ranks),
        Pattern::RingTwice => (2 * (ranks - 1), ranks),
        _ => (1, 1),
    };
    let per_loop = u128::from(channels) * u128::from(chunks_per_loop) * u128::from(data);
    let count = u128::from(bytes).div_ceil(per_loop) * u128::from(steps_per_loop) * u128::from(chunk);
    if count == 0 {
        return Ok(None);
    }
    let count = u64::try_from(count).map_err(|_| Error::usage(format!("{bytes} bytes make {count} steps, more than can be counted")))?;
    let steps = Steps { count, slice, chunk, protocol };
    steps.check()?;
    Ok(Some(steps))
}

#[cfg(test)]
mod tests;
