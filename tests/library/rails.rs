//! Meshes over several rails, which fail and come back under them: what `net` does then is in `tests/plugin/rails.rs`.

use railhead::base::config::{Config, Debug};
use railhead::base::stats::RailCounter;
use railhead::mesh::{DataType, Device, Mesh, Op, Reduction, UnboundBuffer};
use railhead::store::FileStore;

use super::mesh_faults::{memory, options, variable};
use crate::support::netns::{Cable, usable};
use crate::support::{Ctx, PATIENCE, Role, World, holdings};

pub const ROLES: &[(&str, Role)] = &[("mesh_carries_on", carries_on)];

/// Works with the other rank while one rail after the other fails and comes back, and says when each pair has noticed.
fn carries_on(ctx: &Ctx) {
    const LEN: usize = 300_000;
    let device = Device::open(Config::from_env_or(Debug::None), "rht+rht1").expect("a device");
    let mesh = Mesh::new(device, ctx.rank, 2).expect("a mesh");
    mesh.connect(&FileStore::new(variable("RHT_STORE"), None).expect("a store"), PATIENCE).expect("connected");
    let sum = Reduction::Of(DataType::U8, Op::Sum);
    let (mut numbers, mut from, mut to) = (vec![0; LEN], vec![0; LEN], vec![0; LEN]);
    let mut round = 0u8;
    let mut work = || {
        round = round.wrapping_add(1);
        for len in [8, LEN] {
            let mine = |rank: usize| move |i: usize| (i + rank) as u8 ^ round;
            (0..len).for_each(|i| numbers[i] = mine(ctx.rank)(i));
            mesh.allreduce(memory(&mut numbers[..len]), sum, options(PATIENCE)).expect("allreduce");
            assert!((0..len).all(|i| numbers[i] == mine(0)(i).wrapping_add(mine(1)(i))), "sums of {len} in round {round}");
            (0..len).for_each(|i| from[i] = mine(ctx.rank)(i));
            let (out, into) = (memory(&mut from[..len]), memory(&mut to[..len]));
            let [out, into] = [out, into].map(|memory| UnboundBuffer::new(&mesh, memory).expect("a buffer"));
            into.recv(&[1 - ctx.rank], 7, 0, None).expect("recv");
            out.send(1 - ctx.rank, 7, 0, None).expect("send");
            into.wait_recv(PATIENCE).expect("a message");
            out.wait_send(PATIENCE).expect("sent");
            drop((out, into));
            assert!((0..len).all(|i| to[i] == mine(1 - ctx.rank)(i)), "a message of {len} in round {round}");
        }
    };
    let count = |counter| holdings::comms(std::process::id() as i32).iter().map(|comm| comm.rail_sum(counter)).sum::<u64>();
    let rounds = variable("RHT_ROUNDS").parse().expect("a number");
    for _ in 0..rounds {
        for (counter, said) in [(RailCounter::Failures, "down"), (RailCounter::Reconnects, "up")] {
            let before = count(counter);
            ctx.say("ready");
            assert_eq!(ctx.parent.text(), said);
            crate::support::until(said, || {
                work();
                let mut met = [u8::from(count(counter) > before); 8];
                mesh.allreduce(memory(&mut met), sum, options(PATIENCE)).expect("allreduce");
                (met[0] == 2).then_some(())
            });
        }
    }
    work();
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
    let world = (0..2).fold(world, |world, rank| world.wrap(rank, &cable.at(rank)));
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
