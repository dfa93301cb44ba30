//! Tables computed by hand from the rules of NCCL 2.7.8.

use super::Direction::{Recv, Send};
use super::*;

/// NCCL's default: 4 MiB, so steps of 128 KiB for send and receive, slots of 512 KiB.
const BUFFER: u64 = 4 << 20;

fn flat(saved: &[Saved]) -> Vec<(Direction, u32, u64)> {
    saved.iter().map(|saved| (saved.direction, saved.peer, saved.steps.count)).collect()
}

#[test]
fn bytes_become_steps_of_a_quarter_slot_and_none_at_all_become_one() {
    let kib = 1 << 10;
    let table = [(0, 1), (1, 1), (128 * kib, 1), (128 * kib + 1, 2), (256 * kib, 2), (1 << 20, 8), (u64::MAX, 1 << 47)];
    for (bytes, steps) in table {
        let saved = save_p2p(0, 2, 1, Some(bytes), None, BUFFER).unwrap();
        assert_eq!(saved, [Saved { direction: Send, peer: 1, steps: Steps::simple(steps) }], "{bytes} bytes");
    }
    // ARM: 1 MiB.
    assert_eq!(save_p2p(0, 2, 1, None, Some(100 * kib), 1 << 20).unwrap()[0].steps.count, 4);
}

#[test]
fn peers_are_delta_away_on_either_side() {
    let table = [
        // rank, ranks, delta, to, from
        (0, 4, 1, 1, 3),
        (3, 4, 1, 0, 2),
        (1, 4, 2, 3, 3),
        (0, 4, 3, 3, 1),
        (2, 5, 4, 1, 3),
        (0, 2, 1, 1, 1),
        (u32::MAX - 1, u32::MAX, u32::MAX - 1, u32::MAX - 2, 0),
    ];
    for (rank, ranks, delta, to, from) in table {
        let saved = save_p2p(rank, ranks, delta, Some(1), Some(1 << 18), BUFFER).unwrap();
        assert_eq!(flat(&saved), [(Send, to, 1), (Recv, from, 2)], "{rank} of {ranks}, {delta}");
    }
}

#[test]
fn no_operations_without_a_peer_or_without_data() {
    assert_eq!(save_p2p(1, 4, 0, Some(1), Some(1), BUFFER).unwrap(), []);
    assert_eq!(save_p2p(1, 4, 1, None, None, BUFFER).unwrap(), []);
    assert_eq!(flat(&save_p2p(1, 4, 1, None, Some(0), BUFFER).unwrap()), [(Recv, 0, 1)]);
}

#[test]
fn invalid_arguments_are_refused() {
    for (rank, ranks, delta, buffer) in [(4, 4, 1, BUFFER), (0, 4, 4, BUFFER), (0, 0, 0, BUFFER), (0, 2, 1, 31)] {
        assert!(save_p2p(rank, ranks, delta, Some(1), Some(1), buffer).is_err(), "{rank} {ranks} {delta} {buffer}");
    }
    assert!(save_p2p(0, 2, 1, Some(1), Some(1), 32).is_ok());
    let channel = Channel { ring: RingPlace { order: &[0, 1] }, tree_up: TreePlace::default(), tree_down: TreePlace::default() };
    assert!(save_coll(Pattern::PipelineFrom, &channel, 2, Steps::simple(1)).is_err());
    assert!(save_coll(Pattern::Ring, &channel, 0, Steps::simple(0)).is_err());
}

/// In the ring 3 2 1 0, rank by rank: whether it receives and whether it sends.
fn along_the_ring(pattern: Pattern, root: u32) -> [(bool, bool); 4] {
    [0, 1, 2, 3].map(|rank| {
        let order: Vec<u32> = (0..4).map(|n| (rank + 4 - n) % 4).collect();
        let (next, previous) = ((rank + 3) % 4, (rank + 1) % 4);
        let channel = Channel { ring: RingPlace { order: &order }, tree_up: TreePlace::default(), tree_down: TreePlace::default() };
        let saved = save_coll(pattern, &channel, root, Steps::simple(7)).unwrap();
        let (receives, sends) = (recv(previous, Steps::simple(7)), send(next, Steps::simple(7)));
        assert!(saved.iter().all(|saved| [receives, sends].contains(saved)), "{saved:?}");
        (saved.contains(&receives), saved.contains(&sends))
    })
}

#[test]
fn a_ring_goes_all_around_and_a_pipeline_stops_at_the_root() {
    let (no, yes) = (false, true);
    assert_eq!(along_the_ring(Pattern::Ring, 9), [(yes, yes); 4]);
    assert_eq!(along_the_ring(Pattern::RingTwice, 9), [(yes, yes); 4]);
    // From root 2: 2 -> 1 -> 0 -> 3.
    assert_eq!(along_the_ring(Pattern::PipelineFrom, 2), [(yes, yes), (yes, yes), (no, yes), (yes, no)]);
    // To root 2: 1 -> 0 -> 3 -> 2.
    assert_eq!(along_the_ring(Pattern::PipelineTo, 2), [(yes, yes), (no, yes), (yes, no), (yes, yes)]);
}

#[test]
fn a_rank_that_is_alone_has_no_operations() {
    for pattern in [Pattern::Ring, Pattern::PipelineFrom, Pattern::TreeUpDown] {
        let channel = Channel { ring: RingPlace { order: &[0] }, tree_up: TreePlace::default(), tree_down: TreePlace::default() };
        assert_eq!(save_coll(pattern, &channel, 0, Steps::simple(1)).unwrap(), [], "{pattern:?}");
    }
}

#[test]
fn trees_go_up_by_receiving_from_children_and_down_by_sending_to_them() {
    let tree_up = TreePlace { up: Some(8), down: [Some(2), None, Some(6)] };
    let tree_down = TreePlace { up: Some(1), down: [Some(3), Some(5), Some(7)] };
    let channel = Channel { ring: RingPlace { order: &[4, 5] }, tree_up, tree_down };
    let saved = |pattern| flat(&save_coll(pattern, &channel, 99, Steps::simple(3)).unwrap());
    let up = [(Recv, 2, 3), (Recv, 6, 3), (Send, 8, 3)];
    let down = [(Send, 3, 3), (Send, 5, 3), (Send, 7, 3), (Recv, 1, 3)];
    assert_eq!(saved(Pattern::TreeUp), up);
    assert_eq!(saved(Pattern::TreeDown), down);
    assert_eq!(saved(Pattern::TreeUpDown), [&up[..], &down[..]].concat());
    // At the top and at the leaves.
    let top = TreePlace { up: None, down: [Some(1), None, None] };
    let leaf = TreePlace { up: Some(0), down: [None; 3] };
    let channel = Channel { ring: RingPlace { order: &[] }, tree_up: top, tree_down: leaf };
    assert_eq!(flat(&save_coll(Pattern::TreeUpDown, &channel, 0, Steps::simple(1)).unwrap()), [(Recv, 1, 1), (Recv, 0, 1)]);
}

#[test]
fn what_one_rank_sends_another_receives() {
    // The tree of NCCL's src/graph/trees.cc over 6 ranks: 0 - 4 - {2 - {1, 3}, 5}.
    let place = |up, down: &[u32]| {
        let mut place = TreePlace { up, ..TreePlace::default() };
        down.iter().zip(&mut place.down).for_each(|(peer, down)| *down = Some(*peer));
        place
    };
    let trees = [place(None, &[4]), place(Some(2), &[]), place(Some(4), &[1, 3]), place(Some(2), &[]), place(Some(0), &[2, 5])];
    let trees = [&trees[..], &[place(Some(4), &[])]].concat();
    let patterns = [Pattern::Ring, Pattern::PipelineFrom, Pattern::PipelineTo, Pattern::TreeUp, Pattern::TreeDown, Pattern::TreeUpDown];
    for (pattern, root) in patterns.into_iter().flat_map(|pattern| (0..6).map(move |root| (pattern, root))) {
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for rank in 0..6 {
            let order: Vec<u32> = (0..6).map(|n| (rank + n) % 6).collect();
            let tree = trees[rank as usize];
            let channel = Channel { ring: RingPlace { order: &order }, tree_up: tree, tree_down: tree };
            for saved in save_coll(pattern, &channel, root, Steps::simple(1)).unwrap() {
                match saved.direction {
                    Send => sent.push((rank, saved.peer)),
                    Recv => received.push((saved.peer, rank)),
                }
            }
        }
        sent.sort_unstable();
        received.sort_unstable();
        assert_eq!(sent, received, "{pattern:?}, root {root}");
        assert!(sent.len() >= 5);
    }
}

#[test]
fn collectives_are_cut_as_nccl_cuts_them() {
    use Pattern::*;
    use Protocol::*;
    let cut = |pattern, protocol, ranks, channels, buffer, chunk, slice| Cut { pattern, protocol, ranks, channels, buffer, chunk, slice };
    let mib = 1u64 << 20;
    let table = [
        // A loop of 4 ranks on 2 channels with chunks of 4 x 512 KiB: 16 MiB; 2 x 3 x 4 steps each.
        (cut(RingTwice, Simple, 4, 2, BUFFER, 4, 2), 16 * mib, 24),
        (cut(RingTwice, Simple, 4, 2, BUFFER, 4, 2), 16 * mib + 1, 48),
        (cut(RingTwice, Simple, 4, 2, BUFFER, 4, 2), 1, 24),
        (cut(Ring, Simple, 4, 2, BUFFER, 4, 2), 32 * mib, 24),
        (cut(PipelineFrom, Simple, 4, 1, BUFFER, 1, 1), 3 * mib, 6),
        (cut(TreeUpDown, Simple, 4, 2, BUFFER, 1, 1), 3 * mib, 3),
        // LL: half of a slot is data: 32 KiB of 64.
        (cut(TreeUp, Ll, 8, 1, 512 << 10, 1, 1), 64 << 10, 2),
        // LL128: 15 words of 16: 120 KiB of 128.
        (cut(TreeDown, Ll128, 8, 1, 1 << 20, 1, 1), 120 << 10, 1),
        (cut(TreeDown, Ll128, 8, 1, 1 << 20, 1, 1), (120 << 10) + 1, 2),
    ];
    for (cut, bytes, count) in table {
        let Cut { protocol, chunk, slice, .. } = cut;
        assert_eq!(coll_steps(&cut, bytes).unwrap(), Some(Steps { count, slice, chunk, protocol }), "{cut:?}, {bytes}");
        assert_eq!(coll_steps(&cut, 0).unwrap(), None);
    }
    // Nobody else.
    assert_eq!(coll_steps(&cut(Ring, Simple, 1, 1, BUFFER, 4, 2), 1).unwrap(), None);
    for (bad, bytes) in [
        (cut(Ring, Simple, 0, 1, BUFFER, 1, 1), 1),
        (cut(Ring, Simple, 2, 0, BUFFER, 1, 1), 1),
        (cut(Ring, Ll128, 2, 1, 127, 1, 1), 1),
        (cut(Ring, Simple, 2, 1, BUFFER, 0, 1), 1),
        (cut(Ring, Simple, 2, 1, BUFFER, 3, 1), 1),
        (cut(Ring, Simple, 2, 1, u64::MAX, u64::MAX, 1), 1),
        (cut(RingTwice, Simple, u32::MAX, 1, 8, 8, 8), u64::MAX),
    ] {
        assert!(coll_steps(&bad, bytes).is_err(), "{bad:?}");
    }
}
