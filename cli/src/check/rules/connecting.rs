//! Rules of listen, connect and accept.

use super::{Rule, USUAL};
use crate::check::rank::Rank;
use crate::check::verdict::{Verdict, ensure};

/// Tries of a call that has no reason to succeed.
const TRIES: usize = 200;

pub const RULES: &[Rule] = &[Rule {
    name: "accept-returns",
    says: "accept returns at once, with success and a NULL comm, as long as nobody connects; called again, it gives the comm in the end.",
    source: "NCCL 2.12 and later, src/transport/net.cc recvProxyConnect: one thread serves all connections, and calls again if the comm is NULL",
    versions: 5..=12,
    run: accept_returns,
    ..USUAL
}];

fn accept_returns(rank: &mut Rank) -> Verdict {
    let comm = if rank.index == 0 {
        let (handle, listen) = rank.listen()?;
        rank.note("accept");
        for _ in 0..TRIES {
            let comm = rank.plugin.accept(listen)?;
            ensure(comm.is_none(), || "accept gave a comm, and nobody had connected".into())?;
        }
        rank.give(&handle)?;
        let comm = rank.accept(listen)?;
        rank.close_listen(listen)?;
        comm
    } else {
        rank.connect(&mut rank.take()?)?
    };
    rank.proof(comm, 1, 1000)?;
    rank.close(comm)
}
