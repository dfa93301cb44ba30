//! Rules of the end of a comm, whoever ends it.

use super::{Rule, USUAL};
use crate::check::process;
use crate::check::rank::Rank;
use crate::check::verdict::{Stop, Verdict, during};
use crate::plugin::Opaque;

pub const RULES: &[Rule] = &[
    Rule {
        name: "close-send-first",
        says: "closeSend returns although the peer's end is open; then closeRecv does. Other comms live on.",
        source: "src/transport/net.cc sendProxyFree, recvProxyFree: each rank closes its ends when its communicator goes, in no common order",
        run: |rank| close_first(rank, 1),
        ..USUAL
    },
    Rule {
        name: "close-recv-first",
        says: "closeRecv returns although the peer's end is open; then closeSend does. Other comms live on.",
        source: "src/transport/net.cc sendProxyFree, recvProxyFree: each rank closes its ends when its communicator goes, in no common order",
        run: |rank| close_first(rank, 0),
        ..USUAL
    },
    Rule {
        name: "close-outstanding",
        says: "closeRecv and closeSend return although requests are outstanding.",
        source: "src/proxy.cc ncclProxyFreeConnections: after ncclCommAbort comms are closed as they are",
        run: close_outstanding,
        ..USUAL
    },
    Rule {
        name: "sender-closes",
        says: "When the sender closes its end, receives that still wait end, with an error or done: they do not wait for ever.",
        source: "src/misc/socket.cc: a closed connection is ncclRemoteError; src/proxy.cc: an error of test is all that tells NCCL of it",
        run: |rank| peer_ends(rank, 1, false),
        ..USUAL
    },
    Rule {
        name: "receiver-closes",
        says: "When the receiver closes its end, sends that still wait end, with an error or done: they do not wait for ever.",
        source: "src/misc/socket.cc: a closed connection is ncclRemoteError; src/proxy.cc: an error of isend or test is all that tells NCCL of it",
        run: |rank| peer_ends(rank, 0, false),
        ..USUAL
    },
    Rule {
        name: "peer-dies",
        says: "When the peer's process dies, receives that still wait end with an error: they do not wait for ever.",
        source: "src/misc/socket.cc: a closed connection is ncclRemoteError; src/proxy.cc: an error of test is all that tells NCCL of it",
        run: |rank| peer_ends(rank, 1, true),
        ..USUAL
    },
    Rule {
        name: "receiver-dies",
        says: "When the receiver's process dies, sends that still wait end, with an error or done: they do not wait for ever.",
        source: "src/misc/socket.cc: a closed connection is ncclRemoteError; src/proxy.cc: an error of isend or test is all that tells NCCL of it",
        run: |rank| peer_ends(rank, 0, true),
        ..USUAL
    },
];

fn close_first(rank: &mut Rank, first: usize) -> Verdict {
    let (comm, other) = (rank.one_way()?, rank.one_way()?);
    rank.proof(comm, 1, 10_000)?;
    if rank.index == first {
        rank.close(comm)?;
        rank.say(b"closed")?;
    } else {
        rank.hear()?;
        rank.close(comm)?;
    }
    during("on another comm than the closed one", rank.proof(other, 2, 10_000))?;
    rank.close(other)
}

fn close_outstanding(rank: &mut Rank) -> Verdict {
    const LEN: usize = 1 << 16;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, LEN)?;
    rank.proof(comm, 1, 64)?;
    if rank.index == 0 {
        rank.irecv(comm, &buffer, 0, LEN)?;
        rank.irecv(comm, &buffer, 0, LEN)?;
        rank.close(comm)?;
        return rank.say(b"closed");
    }
    // The send may find the receives of a comm that is being closed, or its end: all is well as long as the close below returns.
    let mut posted = false;
    for _ in 0..200 {
        if !posted {
            posted = !matches!(rank.try_send(comm, &buffer, 0, LEN, 3), Ok(None));
        }
    }
    rank.hear()?;
    rank.close(comm)
}

/// One rank ends its end of a comm while the other waits.
fn peer_ends(rank: &mut Rank, ends: usize, dies: bool) -> Verdict {
    const LEN: usize = 1 << 16;
    let comm = rank.one_way()?;
    let buffer = rank.buffer(comm, LEN)?;
    rank.proof(comm, 1, 64)?;
    if rank.index == ends {
        rank.hear()?;
        if dies {
            rank.pass();
            process::die();
        }
        rank.release(buffer)?;
        return rank.close(comm);
    }
    let mut request: Option<Opaque> = None;
    let mut told = false;
    let mut step = || -> Verdict<Option<()>> {
        match request {
            None if rank.index == 0 => request = rank.try_recv(comm, &buffer, 0, LEN, 3)?,
            None => request = rank.try_send(comm, &buffer, 0, LEN, 3)?,
            Some(request) => return Ok(rank.test(request)?.map(|_| ())),
        }
        if !told {
            told = true;
            rank.say(b"waiting")?;
        }
        Ok(None)
    };
    rank.until("a request to end whose peer is gone", || match step() {
        // Whatever the error is, it ends the wait.
        Err(Stop::Fail(_)) => Ok(Some(())),
        other => other,
    })?;
    if dies {
        rank.end_alone();
    }
    // A comm in error may refuse; the processes end anyway.
    let _ = rank.release(buffer);
    rank.close(comm)
}
