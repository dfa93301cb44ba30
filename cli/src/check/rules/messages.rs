//! Rules of what arrives: the bytes, and no others.

use super::{Rule, USUAL};
use crate::check::rank::{Flow, Rank, Reusable, difference};
use crate::check::verdict::{Verdict, ensure};

/// Sizes on both sides of what plugins distinguish: inline data, pages, eager messages, tasks.
const SIZES: [usize; 19] = [1, 2, 7, 8, 63, 64, 65, 127, 129, 1000, 4095, 4096, 4097, 8192, 8193, 65536, 65537, 1 << 20, (1 << 20) + 3];
/// Bytes before and behind a receive that must stay as they are.
const MARGIN: usize = 64;
const MARK: u8 = 0xC3;

pub const RULES: &[Rule] = &[
    Rule {
        name: "data",
        says: "What arrives is what was sent, byte for byte, in messages of any size.",
        source: "src/transport/net.cc: collectives work on whatever the plugin wrote into the receive",
        run: data,
        ..USUAL
    },
    Rule {
        name: "data-large",
        says: "What arrives is what was sent, in a message of several MiB too.",
        source: "src/transport/net.cc: a registered buffer is sent in pieces of up to maxP2pBytes, 1 GiB before v9",
        run: data_large,
        ..USUAL
    },
    Rule {
        name: "data-bounds",
        says: "A receive writes into its buffer, and neither before nor behind it.",
        source: "src/transport/net.cc: the steps of a connection lie side by side in one registered buffer",
        run: data_bounds,
        ..USUAL
    },
    Rule {
        name: "data-soak",
        says: "What arrives is what was sent, in 200 messages of random sizes, some shorter than their receives, up to 8 at once.",
        source: "src/transport/net.cc: collectives work on whatever the plugin wrote into the receive",
        run: data_soak,
        ..USUAL
    },
];

fn data(rank: &mut Rank) -> Verdict {
    exchange(rank, &SIZES)
}

fn data_large(rank: &mut Rank) -> Verdict {
    // Above the limits that sizes of 8 MiB and 16 MiB are for numbers packed into words.
    exchange(rank, &[(17 << 20) + 5])
}

/// One message after the other.
fn exchange(rank: &mut Rank, sizes: &[usize]) -> Verdict {
    let comm = rank.one_way()?;
    let most = sizes.iter().copied().max().unwrap_or(1);
    let buffer = rank.buffer(comm, most)?;
    let messages = Reusable::new(most);
    for (n, &len) in sizes.iter().enumerate() {
        let sent = messages.message(n, len);
        if rank.index == 1 {
            buffer.mem.write(0, sent);
            let request = rank.isend(comm, &buffer, 0, len)?;
            rank.wait("a send", request)?;
        } else {
            buffer.mem.fill(0, len, 0);
            let request = rank.irecv(comm, &buffer, 0, len)?;
            rank.wait("a receive", request)?;
            let got = buffer.mem.read(0, len);
            ensure(got == sent, || format!("message {n}: {}", difference(&got, sent)))?;
        }
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn data_bounds(rank: &mut Rank) -> Verdict {
    let comm = rank.one_way()?;
    let most = SIZES.into_iter().max().unwrap_or(1);
    let buffer = rank.buffer(comm, most + 2 * MARGIN)?;
    for len in SIZES {
        if rank.index == 1 {
            let request = rank.isend(comm, &buffer, 0, len)?;
            rank.wait("a send", request)?;
            continue;
        }
        buffer.mem.fill(0, MARGIN, MARK);
        buffer.mem.fill(MARGIN + len, MARGIN, MARK);
        let request = rank.irecv(comm, &buffer, MARGIN, len)?;
        rank.wait("a receive", request)?;
        for (side, at) in [("before", 0), ("behind", MARGIN + len)] {
            let intact = buffer.mem.read(at, MARGIN).iter().all(|&byte| byte == MARK);
            ensure(intact, || format!("bytes {side} a receive of {len} were overwritten"))?;
        }
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn data_soak(rank: &mut Rank) -> Verdict {
    const TOTAL: usize = 200;
    const AT_ONCE: usize = 8;
    const ROOM: usize = 1 << 16;
    // Both ranks draw the same sizes: small ones as often as large ones.
    let mut state = 0x2545_F491_4F6C_DD1Du64;
    let mut draw = |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 33).unwrap_or(0) % below
    };
    let sizes: Vec<(usize, usize)> = (0..TOTAL)
        .map(|_| {
            let most = 1 << draw(17);
            let room = 1 + draw(most);
            (room, if draw(2) == 0 { room } else { 1 + draw(room) })
        })
        .collect();
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, AT_ONCE * ROOM)?;
    let messages = Reusable::new(ROOM);
    let (r, at) = (&*rank, |n: usize| n % AT_ONCE * ROOM);
    if rank.index == 1 {
        let post = |n: usize| {
            buffer.mem.write(at(n), messages.message(n, sizes[n].1));
            r.try_send(comm, &buffer, at(n), sizes[n].1, 3)
        };
        rank.flow(Flow::new("send", TOTAL, AT_ONCE, post))?;
    } else {
        let post = |n: usize| r.try_recv(comm, &buffer, at(n), sizes[n].0, 3);
        let done = |n: usize, _| {
            let sent = messages.message(n, sizes[n].1);
            let got = buffer.mem.read(at(n), sent.len());
            ensure(got == sent, || format!("message {n}: {}", difference(&got, sent)))
        };
        rank.flow(Flow::new("receive", TOTAL, AT_ONCE, post).then(done))?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}
