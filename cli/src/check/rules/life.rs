//! Rules of the table, of init and of the devices.

use super::{Rule, USUAL};
use crate::check::rank::Rank;
use crate::check::verdict::{Verdict, ensure};

pub const RULES: &[Rule] = &[Rule {
    name: "devices",
    says: "devices gives at least one device, and the same number when asked again.",
    source: "NCCL src/plugin/net.cc: a plugin without devices is not used; src/graph/topo.cc asks again, and takes all from 0 on",
    ranks: 1,
    ready: false,
    gate: true,
    run: devices,
    ..USUAL
}];

fn devices(rank: &mut Rank) -> Verdict {
    rank.init()?;
    let (first, again) = (rank.plugin.devices()?, rank.plugin.devices()?);
    ensure(first == again, || format!("devices gave {first}, then {again}"))
}
