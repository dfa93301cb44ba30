//! Rules of the table, of init and of finalize.

use super::{Rule, USUAL};
use crate::check::rank::Rank;
use crate::check::verdict::{Verdict, during, ensure};

pub const RULES: &[Rule] = &[
    Rule {
        name: "table",
        says: "The table has a name, and every function that NCCL calls without looking whether it is there.",
        source: "README, API Functions: name is what NCCL_NET selects; src/plugin/net.cc: finalize is called unconditionally from v11 on",
        ranks: 1,
        ready: false,
        gate: true,
        deviceless: true,
        run: table,
        ..USUAL
    },
    Rule {
        name: "init",
        says: "init succeeds.",
        source: "README, init: NCCL does not use a plugin whose init does not return ncclSuccess",
        ranks: 1,
        ready: false,
        gate: true,
        deviceless: true,
        run: init,
        ..USUAL
    },
    DEVICES,
];

/// Also run where no chosen rule asks for a device.
pub const DEVICES: Rule = Rule {
    name: "devices",
    says: "devices gives at least one device, and the same number when asked again.",
    source: "README, devices: it should not be zero; src/graph/topo.cc asks again, and takes all from 0 on",
    ranks: 1,
    ready: false,
    gate: true,
    run: devices,
    ..USUAL
};

/// Run last: they take longest.
pub const CYCLES: &[Rule] = &[
    Rule {
        name: "init-cycles",
        says: "After finalize, init and all that follows work again in the same process.",
        source: "src/plugin/net.cc ncclNetInit, ncclNetFinalize: once per communicator, of which a process may have one after another",
        versions: 11..=12,
        ready: false,
        run: init_cycles,
        ..USUAL
    },
    Rule {
        name: "contexts",
        says: "Several contexts live at once; finalize of one leaves the others as they are.",
        source: "README, init: each context is associated to one communicator; src/plugin/net.cc ncclNetFinalize",
        versions: 11..=12,
        run: contexts,
        ..USUAL
    },
];

fn table(rank: &mut Rank) -> Verdict {
    ensure(!rank.plugin.name().is_empty(), || "the table has no name".into())?;
    let missing = rank.plugin.missing();
    ensure(missing.is_empty(), || format!("NULL in the table: {}", missing.join(", ")))
}

fn init(rank: &mut Rank) -> Verdict {
    rank.note("init");
    Ok(rank.plugin.init()?)
}

fn devices(rank: &mut Rank) -> Verdict {
    rank.init()?;
    let (first, again) = (rank.plugin.devices()?, rank.plugin.devices()?);
    ensure(first == again, || format!("devices gave {first}, then {again}"))
}

fn init_cycles(rank: &mut Rank) -> Verdict {
    for cycle in 0..3 {
        during(format_args!("cycle {cycle}"), rank.init())?;
        let comm = during(format_args!("cycle {cycle}"), rank.one_way())?;
        rank.proof(comm, cycle, 5000)?;
        rank.close(comm)?;
        rank.note("finalize");
        during(format_args!("cycle {cycle}"), rank.plugin.finalize())?;
    }
    Ok(())
}

fn contexts(rank: &mut Rank) -> Verdict {
    let mut second = rank.load_again()?;
    rank.note("init");
    during("a second context", second.init())?;
    let comm = rank.one_way()?;
    rank.proof(comm, 1, 5000)?;
    rank.note("finalize");
    during("the second context", second.finalize())?;
    during("after finalize of another context", rank.proof(comm, 2, 5000))?;
    let another = during("after finalize of another context", rank.one_way())?;
    rank.proof(another, 3, 5000)?;
    rank.close(another)?;
    rank.close(comm)
}
