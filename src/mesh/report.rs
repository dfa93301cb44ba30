//! Who waits for whom, and in what: for messages, the stats page and dumps. Under the lock of the mesh.

use crate::base::clock;
use crate::base::stats::{CommCounter, MeshOp};
use crate::engine::DumpSource;

use super::context::Context;
use super::core::{Core, Peer};
use super::ops::{OpId, Waiter};
use super::pair::Pair;

/// Operations and ranks that a message names.
const NAMED: usize = 4;

impl Core {
    /// Has the pairs count what was asked of them since, and what has ended.
    #[inline]
    pub fn count(&mut self) {
        let Core { peers, ops, .. } = self;
        for (rank, counter) in ops.uncounted() {
            if let Some(Peer::Here(pair)) = peers.get(rank) {
                pair.stats().add(counter, 1);
            }
        }
    }

    /// Tells each pair what is waited for from its peer, for the stats page.
    pub fn note_waits(&mut self) {
        let Core { peers, ops, any, small, waiters, shows_waits, .. } = self;
        if *waiters == 0 {
            return;
        }
        *shows_waits = true;
        for peer in peers.iter_mut() {
            if let Peer::Here(pair) = peer {
                pair.waits_for_nothing(false);
            }
        }
        let mut note = |rank: usize, receives: bool, (op, tag): (MeshOp, u64)| {
            if let Some(Peer::Here(pair)) = peers.get_mut(rank) {
                pair.waits_for(receives, op, tag);
            }
        };
        for asked in ops.pending() {
            asked.rank.iter().for_each(|rank| note(*rank, asked.receives, asked.what.shown(asked.receives)));
        }
        let any = any.iter().map(|recv| (recv.tag, recv.ranks.as_slice()));
        for (tag, ranks) in any.chain(small.any().map(|(_, tag, ranks)| (tag, ranks))) {
            ranks.iter().for_each(|rank| note(*rank, true, (MeshOp::RecvAny, tag.of().1)));
        }
    }

    /// Nobody waits any more.
    pub fn waits_over(&mut self) {
        if std::mem::take(&mut self.shows_waits) {
            for peer in &mut self.peers {
                if let Peer::Here(pair) = peer {
                    pair.waits_for_nothing(true);
                }
            }
        }
    }

    /// What somebody waits for, in words.
    pub fn waits_for(&self, waiter: Waiter<'_>) -> String {
        let waits: Vec<String> = self.waits(waiter).take(NAMED).collect();
        if waits.is_empty() { "nothing".into() } else { waits.join(", ") }
    }

    /// All that somebody waits for, each in words: from which rank, and how long that has been silent.
    pub fn waits<'a>(&'a self, waiter: Waiter<'a>) -> impl Iterator<Item = String> + 'a {
        let now = clock::now();
        self.ops.awaited(waiter).map(move |(op, asked)| {
            let words = if matches!(waiter, Waiter::Collective(_)) { format!("{asked:#}") } else { asked.to_string() };
            let Some(rank) = asked.rank else {
                let named: Vec<String> = self.ranks_of(op).iter().take(NAMED).map(usize::to_string).collect();
                return format!("{words}: {}", named.join(", "));
            };
            match self.peer(rank).and_then(|pair| pair.stats().wait_age(now)) {
                Some(age) => format!("{words}, silent for {:.1} s", age as f64 / 1e9),
                None => words,
            }
        })
    }

    /// Counts a report that somebody waits for too long.
    pub fn count_stalls(&self, waiter: Waiter<'_>) {
        let mut ranks: Vec<usize> = self.ops.awaited(waiter).filter_map(|(_, asked)| asked.rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks.iter().filter_map(|rank| self.peer(*rank)).for_each(|pair| pair.stats().add(CommCounter::Stalls, 1));
    }

    fn peer(&self, rank: usize) -> Option<&Pair> {
        match self.peers.get(rank) {
            Some(Peer::Here(pair)) => Some(pair),
            _ => None,
        }
    }

    /// Those that a receive from any of several waits for.
    fn ranks_of(&self, op: OpId) -> &[usize] {
        let long = self.any.iter().map(|recv| (recv.op, recv.ranks.as_slice()));
        let mut all = long.chain(self.small.any().map(|(op, _, ranks)| (op, ranks)));
        all.find(|(of, _)| *of == op).map_or(&[], |(_, ranks)| ranks)
    }
}

impl DumpSource for Context {
    fn dump(&self) -> String {
        let core = self.driver.lock();
        let doing = match &core.failed {
            Some(failure) => format!("failed: {}", failure.error()),
            None if core.waiters == 0 => "nobody waits".into(),
            None => format!("{} waiting, {}", core.waiters, if self.driver.is_asleep() { "asleep" } else { "polling" }),
        };
        let waits: Vec<String> = core.waits(Waiter::Anybody).map(|wait| format!("\n[{wait}]")).collect();
        let (rank, size, device) = (self.rank(), self.size(), self.device.name());
        format!("mesh of rank {rank} of {size} on {device}: {doing}, {} operations{}", waits.len(), waits.concat())
    }
}
