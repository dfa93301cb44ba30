//! Rules of test: what it writes, and what it means that a request is done.

use std::time::Duration;

use super::{Rule, USUAL};
use crate::check::rank::{Rank, Reusable, difference, pattern};
use crate::check::verdict::{Verdict, during, ensure};
use crate::plugin::MAX_RECVS;

/// Tests of a request that has no reason to be done.
const TRIES: usize = 200;

pub const RULES: &[Rule] = &[
    Rule {
        name: "test-done",
        says: "test writes *done whenever it succeeds: 0 or not.",
        source: "src/transport/net.cc: the variable that done points to is not initialised",
        run: test_done,
        ..USUAL
    },
    Rule {
        name: "test-null-sizes",
        says: "test takes NULL for the sizes.",
        source: "net.h: if size is not NULL; src/bootstrap.cc netIsend, src/transport/net.cc flush, and all sends up to NCCL 2.11",
        run: test_null_sizes,
        ..USUAL
    },
    Rule {
        name: "test-sizes",
        says: "test writes as many sizes as the request has buffers, and no more.",
        source: "src/transport/net.cc: there is place for one size of a send; of a receive, what stands behind the last is added up",
        run: test_sizes,
        ..USUAL
    },
    Rule {
        name: "test-any-order",
        says: "Outstanding requests are tested in any order.",
        source: "src/proxy.cc, src/transport/net.cc: connections that share a comm are visited in the order of their operations",
        run: test_any_order,
        ..USUAL
    },
    Rule {
        name: "recv-done",
        says: "A receive is done when all of its data are in place, and not before.",
        source: "src/transport/net.cc recvProxyProgress: done lets the GPU read the data",
        run: recv_done,
        ..USUAL
    },
    Rule {
        name: "send-done",
        says: "When a send is done, its buffer may be overwritten.",
        source: "src/transport/net.cc sendProxyProgress: done lets the GPU write the next step into the buffer",
        run: send_done,
        ..USUAL
    },
    Rule {
        name: "send-unchanged",
        says: "The plugin leaves a send's buffer as it is.",
        source: "src/transport/net.cc: registered sends are sent from the user's own buffer",
        run: send_unchanged,
        ..USUAL
    },
];

fn test_done(rank: &mut Rank) -> Verdict {
    const UNTOUCHED: i32 = -77;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, 64)?;
    let request = if rank.index == 0 {
        let request = rank.irecv(comm, &buffer, 0, 64)?;
        for _ in 0..TRIES {
            let done = rank.plugin.test_with(request, UNTOUCHED, Some(&mut [0; MAX_RECVS]))?;
            ensure(done != UNTOUCHED, || "test left *done as it was".into())?;
            ensure(done == 0, || format!("test gave done = {done} before anything was sent"))?;
        }
        rank.say(b"go")?;
        request
    } else {
        rank.hear()?;
        rank.isend(comm, &buffer, 0, 64)?
    };
    rank.until("a request", || {
        let done = rank.plugin.test_with(request, UNTOUCHED, Some(&mut [0; MAX_RECVS]))?;
        ensure(done != UNTOUCHED, || "test left *done as it was".into())?;
        Ok((done != 0).then_some(()))
    })?;
    rank.release(buffer)?;
    rank.close(comm)
}

fn test_null_sizes(rank: &mut Rank) -> Verdict {
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, 1 << 16)?;
    for len in [8, 1 << 16] {
        let request = if rank.index == 0 { rank.irecv(comm, &buffer, 0, len)? } else { rank.isend(comm, &buffer, 0, len)? };
        rank.until("a request", || Ok((rank.plugin.test_with(request, 0, None)? != 0).then_some(())))?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn test_sizes(rank: &mut Rank) -> Verdict {
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, 4096)?;
    for len in [1, 8, 4096] {
        let request = if rank.index == 0 { rank.irecv(comm, &buffer, 0, 4096)? } else { rank.isend(comm, &buffer, 0, len)? };
        let sizes = rank.until("a request", || rank.test(request))?;
        // The facade fills the sizes with -1 before each call.
        ensure(sizes[1..].iter().all(|&size| size == -1), || format!("test of one buffer wrote the sizes {sizes:?}"))?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn test_any_order(rank: &mut Rank) -> Verdict {
    const TOTAL: usize = 6;
    const LEN: usize = 3000;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, TOTAL * LEN)?;
    if rank.index == 1 {
        buffer.mem.write(0, &pattern(5, TOTAL * LEN));
    }
    for round in 0..4 {
        let mut outstanding = Vec::new();
        for n in 0..TOTAL {
            let at = n * LEN;
            outstanding.push(if rank.index == 0 { rank.irecv(comm, &buffer, at, LEN)? } else { rank.isend(comm, &buffer, at, LEN)? });
        }
        // Newest first, then from the middle on.
        outstanding.reverse();
        outstanding.rotate_left(round);
        rank.until("requests that are tested in another order than they were posted", || {
            let mut left = Vec::new();
            for &request in &outstanding {
                if during("test, not in the order of posting", rank.test(request))?.is_none() {
                    left.push(request);
                }
            }
            outstanding = left;
            Ok(outstanding.is_empty().then_some(()))
        })?;
    }
    if rank.index == 0 {
        ensure(buffer.mem.read(0, TOTAL * LEN) == pattern(5, TOTAL * LEN), || "the messages arrived damaged".into())?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn recv_done(rank: &mut Rank) -> Verdict {
    const LEN: usize = 1 << 19;
    const TOTAL: usize = 12;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, LEN)?;
    let messages = Reusable::new(LEN);
    for n in 0..TOTAL {
        let sent = messages.message(n, LEN);
        if rank.index == 1 {
            buffer.mem.write(0, sent);
            rank.hear()?;
            let request = rank.isend(comm, &buffer, 0, LEN)?;
            rank.wait("a send", request)?;
        } else {
            buffer.mem.fill(0, LEN, 0);
            let request = rank.irecv(comm, &buffer, 0, LEN)?;
            for _ in 0..TRIES / 10 {
                ensure(rank.test(request)?.is_none(), || format!("receive {n} was done before anything was sent"))?;
            }
            rank.say(b"go")?;
            rank.wait("a receive", request)?;
            let got = buffer.mem.read(0, LEN);
            ensure(got == sent, || format!("receive {n} was done, and {}", difference(&got, sent)))?;
        }
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn send_done(rank: &mut Rank) -> Verdict {
    /// For a send that is done without the receiver's help; one that needs it gets it afterwards.
    const ALONE: Duration = Duration::from_millis(10);
    let comm = rank.one_way()?;
    let lengths = [8, 4096, 100_000, 1 << 20];
    let buffer = rank.buffer(comm, 1 << 20)?;
    for (n, len) in lengths.into_iter().enumerate() {
        let sent = pattern(n as u64, len);
        if rank.index == 1 {
            buffer.mem.write(0, &sent);
            let request = rank.isend(comm, &buffer, 0, len)?;
            rank.wait("a send", request)?;
            buffer.mem.fill(0, len, 0xEE);
            rank.say(b"overwritten")?;
            rank.hear()?;
        } else {
            buffer.mem.fill(0, len, 0);
            let request = rank.irecv(comm, &buffer, 0, len)?;
            let early = rank.hear_within(ALONE)?;
            rank.wait("a receive", request)?;
            if early.is_none() {
                rank.hear()?;
            }
            let got = buffer.mem.read(0, len);
            ensure(got == sent, || format!("a buffer of {len} bytes was overwritten when its send was done: {}", difference(&got, &sent)))?;
            rank.say(b"seen")?;
        }
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn send_unchanged(rank: &mut Rank) -> Verdict {
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, 1 << 20)?;
    for (n, len) in [1, 8, 64, 1000, 8192, 100_000, 1 << 20].into_iter().enumerate() {
        let bytes = pattern(n as u64, len);
        if rank.index == 1 {
            buffer.mem.write(0, &bytes);
            let request = rank.isend(comm, &buffer, 0, len)?;
            rank.wait("a send", request)?;
            ensure(buffer.mem.read(0, len) == bytes, || format!("the buffer of send {n}, {len} bytes, was changed"))?;
        } else {
            let request = rank.irecv(comm, &buffer, 0, len)?;
            rank.wait("a receive", request)?;
        }
    }
    rank.release(buffer)?;
    rank.close(comm)
}
