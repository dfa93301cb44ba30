//! Rules of several comms, and of what the two ends of one do at the same time.

use super::{Rule, USUAL};
use crate::check::rank::{Flow, Rank, STAMP, difference, pattern, stamp};
use crate::check::verdict::{Verdict, during, ensure};

pub const RULES: &[Rule] = &[
    Rule {
        name: "comms-apart",
        says: "Each message arrives on the comm that is connected to the one it was sent on.",
        source: "src/transport/net.cc: a connection per channel and peer, each with data of its own",
        run: comms_apart,
        ..USUAL
    },
    Rule {
        name: "comms-independent",
        says: "A comm whose peer sends nothing, or takes nothing, does not stop another.",
        source: "src/proxy.cc progressOps: operations of different peers and channels wait for each other nowhere in NCCL",
        run: comms_independent,
        ..USUAL
    },
    Rule {
        name: "two-way",
        says: "Two ranks that both send and receive large messages at once, on one thread each, both get through.",
        source: "src/transport/net.cc: in a ring each rank sends to one and receives from another, with one progress thread for both",
        run: two_way,
        ..USUAL
    },
    Rule {
        name: "idle-peer",
        says: "A rank whose last request is done need make no further call: its peer's requests complete all the same.",
        source: "src/proxy.cc ncclProxyProgress: the progress thread sleeps when it has no operations",
        run: idle_peer,
        ..USUAL
    },
];

fn comms_apart(rank: &mut Rank) -> Verdict {
    const COMMS: usize = 4;
    const LEN: usize = 2000;
    let comms = (0..COMMS).map(|_| rank.one_way()).collect::<Verdict<Vec<_>>>()?;
    let buffers = comms.iter().map(|&comm| rank.buffer(comm, LEN)).collect::<Verdict<Vec<_>>>()?;
    for round in 0..3usize {
        let bytes = |comm: usize| pattern((10 * round + comm) as u64, LEN);
        let mut waiting = Vec::new();
        for i in 0..COMMS {
            // The sender begins with the last.
            let i = if rank.index == 1 { COMMS - 1 - i } else { i };
            let buffer = &buffers[i];
            waiting.push(if rank.index == 1 {
                buffer.mem.write(0, &bytes(i));
                (i, rank.isend(comms[i], buffer, 0, LEN)?)
            } else {
                buffer.mem.fill(0, LEN, 0);
                (i, rank.irecv(comms[i], buffer, 0, LEN)?)
            });
        }
        rank.until("messages on several comms at once", || {
            let mut left = Vec::new();
            for &(i, request) in &waiting {
                if rank.test(request)?.is_none() {
                    left.push((i, request));
                    continue;
                }
                let got = buffers[i].mem.read(0, LEN);
                ensure(rank.index == 1 || got == bytes(i), || format!("comm {i}: {}", difference(&got, &bytes(i))))?;
            }
            waiting = left;
            Ok(waiting.is_empty().then_some(()))
        })?;
    }
    buffers.into_iter().try_for_each(|buffer| rank.release(buffer))?;
    comms.into_iter().try_for_each(|comm| rank.close(comm))
}

fn comms_independent(rank: &mut Rank) -> Verdict {
    const LEN: usize = 1 << 16;
    let (idle, busy, early) = (rank.one_way()?, rank.one_way()?, rank.one_way()?);
    let (idle_buffer, early_buffer) = (rank.buffer(idle, LEN)?, rank.buffer(early, LEN)?);
    // On one comm a receive waits for its send, on another a send for its receive; then the third is used.
    let mut sent_early = None;
    let waiting = if rank.index == 0 {
        Some(rank.irecv(idle, &idle_buffer, 0, LEN)?)
    } else {
        sent_early = rank.try_send(early, &early_buffer, 0, LEN, 3)?;
        None
    };
    rank.meet()?;
    for seed in 0..5 {
        during("while other comms wait for their peer", rank.proof(busy, seed, LEN))?;
    }
    rank.meet()?;
    if let Some(request) = waiting {
        let received = rank.until("irecv to take a receive", || rank.try_recv(early, &early_buffer, 0, LEN, 3))?;
        rank.wait("the receive of the comm that waited", request)?;
        rank.wait("the receive of the send that waited", received)?;
    } else {
        let late = rank.isend(idle, &idle_buffer, 0, LEN)?;
        let sent = match sent_early {
            Some(request) => request,
            None => rank.until("isend to take a message", || rank.try_send(early, &early_buffer, 0, LEN, 3))?,
        };
        rank.wait("the send of the comm that waited", late)?;
        rank.wait("the send that waited", sent)?;
    }
    rank.release(idle_buffer)?;
    rank.release(early_buffer)?;
    [idle, busy, early].into_iter().try_for_each(|comm| rank.close(comm))
}

fn two_way(rank: &mut Rank) -> Verdict {
    const TOTAL: usize = 6;
    const AT_ONCE: usize = 2;
    const LEN: usize = 1 << 19;
    let (send, recv) = rank.both_ways()?;
    let (out, inn) = (rank.buffer(send, AT_ONCE * LEN)?, rank.buffer(recv, AT_ONCE * LEN)?);
    let at = |n: usize| n % AT_ONCE * LEN;
    let r = &*rank;
    let mut sends = Flow::new("send", TOTAL, AT_ONCE, |n| {
        out.mem.write(at(n), &(n as u64).to_ne_bytes());
        r.try_send(send, &out, at(n), LEN, 3)
    });
    let mut receives = Flow::new("receive", TOTAL, AT_ONCE, |n| r.try_recv(recv, &inn, at(n), LEN, 3)).then(|n, _| {
        let got = stamp(&inn.mem.read(at(n), STAMP));
        ensure(got == n as u64, || format!("receive {n} got message {got}"))
    });
    while !(sends.ended() && receives.ended()) {
        let what = format!("{} and {}, both at once", sends.waits_for(), receives.waits_for());
        rank.until(&what, || Ok((sends.step(r)? | receives.step(r)?).then_some(())))?;
    }
    drop((sends, receives));
    rank.release(out)?;
    rank.release(inn)?;
    rank.close_send(send)?;
    rank.close_recv(recv)
}

fn idle_peer(rank: &mut Rank) -> Verdict {
    let comm = rank.one_way()?;
    let most = 1 << 18;
    let buffer = rank.buffer(comm, most)?;
    for len in [8, 1000, 20_000, most] {
        let r = &*rank;
        let post = |_| if r.index == 1 { r.try_send(comm, &buffer, 0, len, 3) } else { r.try_recv(comm, &buffer, 0, len, 3) };
        during(format_args!("{len} bytes, while the peer may have stopped calling"), rank.flow(Flow::new("message", 3, 1, post)))?;
        // Whoever is through waits here, without a call of the plugin.
        rank.meet()?;
    }
    rank.release(buffer)?;
    rank.close(comm)
}
