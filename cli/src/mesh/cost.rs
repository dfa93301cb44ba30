//! What it takes a rank to be connected to the others: time, and of each pair memory and descriptors. On the thread that connects.

use std::time::Instant;

use anyhow::Context;
use serde::Serialize;

/// What a rank's pairs have taken.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Cost {
    /// Until all were connected, with the store's part in it.
    pub connect_s: f64,
    /// Descriptors of the process, for each.
    pub pair_descriptors: f64,
    /// Resident private memory of the process, for each. The smaller a mesh, the more of it is what any mesh takes.
    pub pair_private_kib: f64,
    /// Resident shared memory, of which the other rank has the same.
    pub pair_shared_kib: f64,
}

/// Before and while they connect.
pub struct Connecting {
    before: [f64; 3],
    begun: Instant,
    connect_s: f64,
}

impl Cost {
    /// They connect now.
    pub fn begin() -> anyhow::Result<Connecting> {
        Ok(Connecting { before: held()?, begun: Instant::now(), connect_s: 0.0 })
    }
}

impl Connecting {
    /// They are connected.
    pub fn connected(self) -> Connecting {
        Connecting { connect_s: self.begun.elapsed().as_secs_f64(), ..self }
    }

    /// What each of so many pairs has taken until now.
    pub fn of_each(self, pairs: usize) -> anyhow::Result<Cost> {
        let after = held()?;
        let each = |i: usize| (after[i] - self.before[i]) / pairs.max(1) as f64;
        Ok(Cost { connect_s: self.connect_s, pair_descriptors: each(0), pair_private_kib: each(1), pair_shared_kib: each(2) })
    }
}

impl std::fmt::Display for Cost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Cost { connect_s, pair_descriptors, pair_private_kib, pair_shared_kib } = self;
        write!(
            f,
            "connected in {connect_s:.3} s; after a barrier each pair takes rank 0 {pair_descriptors:.1} descriptors, \
             {pair_private_kib:.0} KiB of private memory and {pair_shared_kib:.0} KiB of shared"
        )
    }
}

/// Descriptors, and KiB of private and of shared memory.
fn held() -> anyhow::Result<[f64; 3]> {
    let descriptors = std::fs::read_dir("/proc/self/fd").context("/proc/self/fd")?.count();
    let status = std::fs::read_to_string("/proc/self/status").context("/proc/self/status")?;
    let kib = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("/proc has no {name}"))?;
        line.trim().trim_end_matches(" kB").parse::<f64>().with_context(|| format!("{name} {line}"))
    };
    Ok([descriptors as f64, kib("RssAnon:")?, kib("RssShmem:")?])
}
