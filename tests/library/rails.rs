//! Meshes and tensors over several rails, which fail and come back under them: what `net` does then is in `tests/plugin/rails.rs`.

use railhead::base::stats::RailCounter;
use railhead::tensor::Tensor;

use super::mesh_faults::variable;
use super::tensor_faults::{self, key, step};
use crate::support::failover::mesh::{self, LEN, count};
use crate::support::netns::{Cable, usable};
use crate::support::{Ctx, PATIENCE, Role, World};

pub const ROLES: &[(&str, Role)] =
    &[("mesh_carries_on", mesh::carries_on), ("mesh_rails_fail", mesh_rails_fail), ("tensor_rails_fail", tensor_rails_fail)];

/// Whether RHT_FAILURES failures of rails were seen here, and as many recoveries.
fn has_seen_enough() -> bool {
    let wanted = variable("RHT_FAILURES").parse().expect("a number");
    count(RailCounter::Failures) >= wanted && count(RailCounter::Reconnects) >= wanted
}

/// Works with the other rank while rails fail under both.
fn mesh_rails_fail(ctx: &Ctx) {
    let end = mesh::connected(ctx);
    let mut work = mesh::work(ctx, &end);
    crate::support::until("failures", || {
        work();
        mesh::both_say(&end, has_seen_enough()).then_some(())
    });
}

/// Exchanges tensors with the other worker while rails fail under both.
fn tensor_rails_fail(ctx: &Ctx) {
    let manager = tensor_faults::connected(ctx);
    let (other, mut id) = (1 - ctx.rank, 0);
    crate::support::until("failures", || {
        id += 1;
        let step = step(&manager, id);
        let lens = [0, 8, 3000, LEN];
        for len in lens {
            let tensor = Tensor::new(1, &[], vec![id as u8; len]).expect("a tensor");
            step.send(&key(ctx.rank, other, &len.to_string()), tensor).expect("produced");
        }
        for len in lens {
            let tensor = step.recv(&key(other, ctx.rank, &len.to_string()), PATIENCE).expect("a tensor");
            assert!(tensor.len() == len && tensor.bytes().iter().all(|byte| *byte == id as u8), "{len} in step {id}");
        }
        manager.cleanup(id - 1);
        let met = has_seen_enough();
        ctx.to(other).send(&[u8::from(met)]).expect("the other worker");
        (ctx.to(other).recv() == [1] && met).then_some(())
    });
    ctx.barrier();
}

/// Two hosts with two cables between them, each of which goes down and up again.
#[test]
fn a_mesh_goes_on_without_a_cable() {
    if !usable() {
        return;
    }
    let (cable, folder) = (Cable::new(), tempfile::tempdir().expect("a folder"));
    cable.double();
    let world = World::new("mesh_carries_on", 2).env("RAILHEAD_SOCKET_IFNAME", "=rht,rht1").env("RAILHEAD_SOFT_WIRE", "tcp");
    let world = world.env("RAILHEAD_FABRIC_TIMEOUT_S", "1").env("RHT_STORE", folder.path().join("store").to_str().expect("UTF-8"));
    let cables = [("rht1", 0), ("rht", 1)];
    let world = (0..2).fold(world, |world, rank| world.wrap(rank, &cable.at(rank))).env("RHT_DEVICE", "rht+rht1");
    let mut ranks = world.env("RHT_ROUNDS", &cables.len().to_string()).spawn();
    for (interface, end) in cables {
        for state in ["down", "up"] {
            (0..2).for_each(|rank| ranks.expect(rank, "ready"));
            cable.set(interface, end, state);
            (0..2).for_each(|rank| ranks.tell(rank, state));
        }
    }
    ranks.finish();
}

/// Two ranks of one host, both of whose rails fail in turn, again and again, at the end `at`: at both, they might fail at the same time. The other end has
/// the stage as well, as it may be the one that connects them anew.
#[cfg(feature = "stages")]
fn rails_fail(role: &'static str, wire: &str, mode: &str, at: usize) {
    if !usable() {
        return;
    }
    let (cable, folder) = (Cable::new(), tempfile::tempdir().expect("a folder"));
    let world = World::new(role, 2).env("RAILHEAD_SOCKET_IFNAME", "=lo,rht").env("RAILHEAD_SOFT_WIRE", wire).env("RHT_DEVICE", "lo+rht");
    let world = world.env("RHT_STORE", folder.path().join("store").to_str().expect("UTF-8")).env("RHT_MODE", mode);
    let world = world.env_of(at, "RH_STAGE", "rail=0,1@7:down:0").env_of(1 - at, "RH_STAGE", "rail=0,1@1000000000:down:0");
    (0..2).fold(world, |world, rank| world.wrap(rank, &cable.at(0))).env("RHT_FAILURES", "20").spawn().finish();
}

#[cfg(feature = "stages")]
#[test]
fn rails_fail_under_a_mesh() {
    [("shm", 0), ("tcp", 1)].into_iter().for_each(|(wire, at)| rails_fail("mesh_rails_fail", wire, "", at));
}

#[cfg(feature = "stages")]
#[test]
fn rails_fail_under_tensors() {
    for (at, mode) in [(0, "buffered"), (1, "direct")] {
        ["shm", "tcp"].into_iter().for_each(|wire| rails_fail("tensor_rails_fail", wire, mode, at));
    }
}
