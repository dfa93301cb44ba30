//! Rules of registered memory.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::{Rule, USUAL};
use crate::check::rank::{Rank, difference, pattern};
use crate::check::verdict::{Stop, Verdict, during, ensure};

pub const RULES: &[Rule] = &[
    Rule {
        name: "mr-parts",
        says: "Any part of registered memory can be sent and received, with the registration of the whole.",
        source: "src/transport/net.cc: a connection's buffer is registered once, its steps are parts of it",
        run: mr_parts,
        ..USUAL
    },
    Rule {
        name: "mr-again",
        says: "Memory may be registered several times, by one comm or several; deregistering one leaves the others usable.",
        source: "README, regIsGlobal: a buffer within a registered one is registered again and deregistered, while the first stays",
        run: mr_again,
        ..USUAL
    },
    Rule {
        name: "mr-busy",
        says: "Memory may be registered and deregistered on one thread while another moves data over the same comm.",
        source: "src/proxy.cc: user buffers are registered on the service thread, the progress thread goes on meanwhile",
        run: mr_busy,
        ..USUAL
    },
];

fn mr_parts(rank: &mut Rank) -> Verdict {
    const WHOLE: usize = 1 << 18;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, WHOLE)?;
    let bytes = pattern(1, WHOLE);
    if rank.index == 1 {
        buffer.mem.write(0, &bytes);
    }
    for (at, len) in [(0, 100), (4096, 4096), (1, 7), (100_001, 70_000), (WHOLE - 1, 1), (WHOLE - 70_000, 70_000)] {
        let part = || format!("{len} bytes from {at} on, of {WHOLE} registered");
        if rank.index == 1 {
            let request = during(part(), rank.isend(comm, &buffer, at, len))?;
            rank.wait("a send", request)?;
        } else {
            let request = during(part(), rank.irecv(comm, &buffer, at, len))?;
            rank.wait("a receive", request)?;
            let got = buffer.mem.read(at, len);
            ensure(got == bytes[at..at + len], || format!("{}: {}", part(), difference(&got, &bytes[at..at + len])))?;
        }
    }
    rank.release(buffer)?;
    rank.close(comm)
}

fn mr_again(rank: &mut Rank) -> Verdict {
    const LEN: usize = 1 << 16;
    let comms = [rank.one_way()?, rank.one_way()?];
    let first = rank.buffer(comms[0], LEN)?;
    let again = during("the same memory and comm", rank.register(comms[0], first.mem))?;
    let other = during("the same memory, another comm", rank.register(comms[1], first.mem))?;
    let sent = pattern(2, LEN);
    for (gone, comm, buffer) in [(first, comms[0], again), (again, comms[1], other)] {
        rank.release(gone)?;
        let what = "after another registration of the same memory is gone";
        if rank.index == 1 {
            buffer.mem.write(0, &sent);
            let request = during(what, rank.isend(comm, &buffer, 0, LEN))?;
            rank.wait("a send", request)?;
        } else {
            buffer.mem.fill(0, LEN, 0);
            let request = during(what, rank.irecv(comm, &buffer, 0, LEN))?;
            rank.wait("a receive", request)?;
            let got = buffer.mem.read(0, LEN);
            ensure(got == sent, || format!("{what}: {}", difference(&got, &sent)))?;
        }
    }
    rank.release(other)?;
    comms.into_iter().try_for_each(|comm| rank.close(comm))
}

fn mr_busy(rank: &mut Rank) -> Verdict {
    const LEN: usize = 1 << 14;
    const AT_ONCE: usize = 4;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, AT_ONCE * LEN)?;
    let spare = rank.buffer(comm, LEN)?;
    let (r, stop) = (&*rank, AtomicBool::new(false));
    let registered = thread::scope(|scope| {
        let service = scope.spawn(|| {
            for _ in 0..40 {
                let more = r.register(comm, spare.mem)?;
                r.release(more)?;
            }
            // Pairs with nothing: the flag only ends the traffic, and the threads are joined.
            stop.store(true, Ordering::Relaxed);
            Ok::<_, Stop>(())
        });
        let traffic = || {
            let mut round = 0u8;
            // The sender decides when it is enough, and says so in the last message.
            loop {
                let over = stop.load(Ordering::Relaxed) || service.is_finished();
                let at = usize::from(round) % AT_ONCE * LEN;
                if r.index == 1 {
                    buffer.mem.fill(at, LEN, u8::from(over));
                    let request = r.isend(comm, &buffer, at, LEN)?;
                    r.wait("a send", request)?;
                } else {
                    let request = r.irecv(comm, &buffer, at, LEN)?;
                    r.wait("a receive", request)?;
                }
                round = round.wrapping_add(1);
                if buffer.mem.byte(at + LEN - 1) == 1 {
                    return Ok(());
                }
            }
        };
        let moved: Verdict = traffic();
        let registered = service.join().unwrap_or_else(|_| Err(Stop::Fail("railhead itself: a thread panicked".into())));
        during("while memory is registered on another thread", moved).and(registered)
    });
    during("regMr and deregMr while another thread moves data", registered)?;
    rank.release(spare)?;
    rank.release(buffer)?;
    rank.close(comm)
}
