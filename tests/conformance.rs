//! The fabric's conformance suite: each clause of the contract in `src/fabric/mod.rs`, on each provider and wire.
//!
//! The clauses are functions over a [`Bed`](conformance::bed::Bed); a new provider is one more line at the end of this file. On real queue
//! pairs those that need a device run in `cli/tests/softroce.rs`.

/// The clauses, by subject.
#[macro_use]
// Without the feature nothing is simulated, and what is there for that is not used.
#[cfg_attr(not(feature = "sim"), allow(dead_code))]
mod conformance {
    #[macro_use]
    pub mod suite;

    pub mod bed;
    pub mod churn;
    pub mod connect;
    pub mod error;
    pub mod keys;
    pub mod notify;
    pub mod order;
    pub mod placed;
    pub mod publish;
    pub mod queue;
    pub mod read;
    pub mod receive;
    pub mod reset;
    pub mod size;
    pub mod wire;
}

#[path = "support/fake_ibverbs.rs"]
mod fake_ibverbs;
#[path = "support/pause.rs"]
mod support;

use conformance::bed::{Bed, Wire};
use railhead::base::config::{CrossMemory, Fabric, SoftWire};

conforms! {
    soft_shm: Bed { name: "soft_shm", wire: Wire::Shm, configure: |c| {
        (c.fabric, c.soft_wire, c.cma) = (Fabric::Soft, SoftWire::Shm, CrossMemory::Always);
    }, simulated: None };
    soft_tcp: Bed { name: "soft_tcp", wire: Wire::Tcp, configure: |c| (c.fabric, c.soft_wire) = (Fabric::Soft, SoftWire::Tcp), simulated: None };
    #[ignore = "verbs_conforms_on_memory runs it with a libibverbs that is memory"]
    verbs: Bed {
        name: "verbs", wire: Wire::Nic, configure: |c| (c.fabric, c.ib_timeout, c.ib_retry_cnt) = (Fabric::Verbs, 14, 6), simulated: None
    };
}

#[cfg(feature = "sim")]
conforms! {
    sim: Bed { name: "sim", wire: Wire::Sim, configure: |_| (), simulated: Some(simulated_device) };
}

/// A device in this test's world, whose time passes as the queues of the world are polled: slowly enough for whoever settles that no retries are used up
/// meanwhile.
#[cfg(feature = "sim")]
fn simulated_device() -> railhead::fabric::Device {
    use railhead::fabric::sim::{NIC, World};
    const POLL_NS: u64 = 500;
    thread_local! {
        static WORLD: World = {
            let world = World::new(conformance::bed::count("RHT_SEED", 1), NIC);
            world.set_poll_time(POLL_NS);
            world
        };
    }
    WORLD.with(|world| world.devices(0, 1).remove(0))
}

conforms_as_shared_memory! {
    soft_placed: Bed { name: "soft_placed", wire: Wire::Placed, configure: |c| {
        (c.fabric, c.soft_wire, c.cma) = (Fabric::Soft, SoftWire::Shm, CrossMemory::Always);
    }, simulated: None };
}

/// All clauses on a libibverbs that performs everything at once, in memory: what is the provider's own fault shows in seconds, without a
/// machine. That a device does what it is asked for, it does not show.
#[test]
fn verbs_conforms_on_memory() {
    let fake = fake_ibverbs::Fake::new(fake_ibverbs::NEWEST).env("RHT_PUBLISHES", "20000");
    fake.env("RAILHEAD_DEBUG", "none").run_all(&["verbs::"]).says("; 0 failed; 0 ignored;");
}
