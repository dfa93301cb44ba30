//! Rules of what arrives: the bytes, their number, their order.

use super::{Rule, USUAL};
use crate::check::rank::{Rank, Reusable, STAMP, difference, stamp};
use crate::check::verdict::{Verdict, ensure};

/// Sizes on both sides of what plugins distinguish: inline data, pages, eager messages, tasks.
const SIZES: [usize; 18] = [1, 2, 7, 8, 63, 64, 65, 127, 129, 1000, 4095, 4097, 8192, 8193, 65536, 65537, 1 << 20, (1 << 20) + 3];
/// Bytes before and behind a receive that must stay as they are.
const MARGIN: usize = 64;
const MARK: u8 = 0xC3;

pub const RULES: &[Rule] = &[
    Rule {
        name: "data",
        says: "What arrives is what was sent, byte for byte, in messages of any size.",
        source: "NCCL src/transport/net.cc: collectives work on whatever the plugin wrote into the receive",
        run: data,
        ..USUAL
    },
    Rule {
        name: "recv-size",
        says: "A message may be shorter than its receive; test of the receive gives the bytes that arrived.",
        source: "NCCL src/transport/net.cc recvProxyProgress: receives are posted for the largest step, the sizes that test gives are added up",
        run: recv_size,
        ..USUAL
    },
    Rule {
        name: "order",
        says: "Messages of one tag meet the receives in the order in which both were posted, whatever their sizes.",
        source: "NCCL src/transport/net.cc: a step is known by its place in the sequence alone; all steps of a connection carry one tag",
        run: order,
        ..USUAL
    },
];

fn data(rank: &mut Rank) -> Verdict {
    let comm = rank.one_way()?;
    let most = 1 << 21;
    let buffer = rank.buffer(comm, most)?;
    let messages = Reusable::new(most);
    for (n, len) in SIZES.into_iter().enumerate() {
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

fn recv_size(rank: &mut Rank) -> Verdict {
    let comm = rank.one_way()?;
    let room = 1 << 20;
    let buffer = rank.buffer(comm, room)?;
    for len in [1, 8, 100, 4096, 70_000, room - 1, room] {
        if rank.index == 1 {
            let request = rank.isend(comm, &buffer, 0, len)?;
            rank.wait("a send", request)?;
        } else {
            let request = rank.irecv(comm, &buffer, 0, room)?;
            let size = rank.wait("a receive", request)?;
            ensure(size == len, || format!("{len} bytes were sent into a receive of {room}; its test gave {size}"))?;
        }
    }
    rank.release(buffer)?;
    rank.close(comm)
}

/// Messages of sizes that take ways of their own through a plugin, several at once.
fn order(rank: &mut Rank) -> Verdict {
    const LENGTHS: [usize; 4] = [100_000, 8, 9000, 64];
    const SLOT: usize = 1 << 17;
    const AT_ONCE: usize = 8;
    const TOTAL: usize = 64;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, AT_ONCE * SLOT)?;
    let at = |n: usize| n % AT_ONCE * SLOT;
    let r = &*rank;
    if rank.index == 1 {
        let post = |n: usize| {
            buffer.mem.write(at(n), &(n as u64).to_ne_bytes());
            r.try_send(comm, &buffer, at(n), LENGTHS[n % LENGTHS.len()], 3)
        };
        r.flow("send", TOTAL, AT_ONCE, post, |_, _| Ok(()))?;
    } else {
        let post = |n: usize| r.try_recv(comm, &buffer, at(n), SLOT, 3);
        let done = |n: usize, _| {
            let got = stamp(&buffer.mem.read(at(n), STAMP));
            ensure(got == n as u64, || format!("receive {n} got message {got}"))
        };
        r.flow("receive", TOTAL, AT_ONCE, post, done)?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}
