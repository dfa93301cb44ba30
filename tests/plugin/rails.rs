//! Several rails in one comm: two interfaces merged into one device by makeVDevice, as NCCL merges the ports of a NIC.

use crate::support;
use railhead::base::stats::{CommKind, RailCounter};
use support::comms::{self, SIZES};
use support::holdings;
use support::netns::{Cable, usable};
use support::plugin::Plugin;
use support::{Ctx, Role, World};

pub const ROLES: &[(&str, Role)] = &[
    ("merges", merges),
    ("may_not_merge", may_not_merge),
    ("carries_on", support::failover::carries_on),
    ("goes_on_to_the_end", support::failover::goes_on_to_the_end),
];

fn version() -> u32 {
    std::env::var("RHT_VERSION").map_or(12, |v| v.parse().expect("a version"))
}

/// Merges its two interfaces, exchanges every size over the result, and says how many bytes each rail has sent.
fn merges(ctx: &Ctx) {
    let mut plugin = Plugin::start(version());
    assert_eq!(plugin.devices().expect("devices"), 2);
    let parts = [0, 1].map(|dev| plugin.properties(dev).expect("properties"));
    assert_eq!(parts[0].vdevs, Some(vec![0]));
    let merged = plugin.make_vdevice(&[0, 1]).expect("makeVDevice");
    assert_eq!((merged, plugin.devices().expect("devices")), (2, 3));
    let whole = plugin.properties(merged).expect("properties");
    assert_eq!(whole.name, format!("{}+{}", parts[0].name, parts[1].name));
    assert_eq!((whole.speed, whole.vdevs), (parts[0].speed + parts[1].speed, Some(vec![0, 1])));

    let (send, recv) = comms::both_ways(ctx, &plugin, merged).expect("comms");
    comms::exchange(&plugin, ctx.rank, send, recv, &SIZES).expect("exchange");
    let sender = holdings::comms(std::process::id() as i32).into_iter().find(|c| c.kind == CommKind::Send).expect("a send comm");
    let sent = |c: RailCounter| sender.rails.iter().map(|r| r.counters[c as usize].to_string()).collect::<Vec<_>>().join(" ");
    ctx.say(&format!("{} {}", sent(RailCounter::TxTcp), sent(RailCounter::TxCma)));
    ctx.barrier();
    plugin.close_send(send).expect("close_send");
    plugin.close_recv(recv).expect("close_recv");
    plugin.finalize().expect("finalize");
}

fn may_not_merge(_: &Ctx) {
    let plugin = Plugin::start(version());
    assert_eq!(plugin.devices().expect("devices"), 2);
    let refused = plugin.make_vdevice(&[0, 1]).expect_err("interfaces that are no ports of one NIC, and that nobody named");
    assert!(refused.to_string().contains('5'), "{refused}");
    assert_eq!(plugin.devices().expect("devices"), 2);
}

/// Two ranks in a network namespace that has two interfaces.
fn world(role: &'static str, cable: &Cable) -> World {
    let world = World::new(role, 2).env("RAILHEAD_SOCKET_IFNAME", "=lo,rht");
    (0..2).fold(world, |world, rank| world.wrap(rank, &cable.at(0)))
}

#[test]
fn a_merged_device_uses_both_interfaces() {
    if !usable() {
        return;
    }
    let cable = Cable::new();
    for version in ["9", "11", "12"] {
        for (wire, streams) in [("tcp", "0"), ("tcp", "2"), ("shm", "0")] {
            // The second setting is about RDMA NICs.
            let world = world("merges", &cable).env("RAILHEAD_FORCE_MERGE", "lo,rht").env("NCCL_IB_MERGE_NICS", "0");
            let world = world.env("RHT_VERSION", version);
            let mut ranks = world.env("RAILHEAD_SOFT_WIRE", wire).env("RAILHEAD_TCP_STREAMS", streams).spawn();
            let large = SIZES.iter().filter(|len| **len >= 1 << 20).sum::<usize>() as u64;
            for rank in 0..2 {
                let words: Vec<u64> = ranks.hear(rank).split(' ').map(|word| word.parse().expect("a number")).collect();
                let (first, second) = if wire == "tcp" { (words[0], words[1]) } else { (words[2], words[3]) };
                assert!(first >= large / 3 && second >= large / 3, "{wire}, version {version}: {words:?}");
            }
            ranks.finish();
        }
    }
}

#[test]
fn interfaces_are_not_merged_unasked() {
    if !usable() {
        return;
    }
    let cable = Cable::new();
    world("may_not_merge", &cable).spawn().finish();
}

/// A rank on each of two hosts with two cables between them.
fn two_hosts(role: &'static str, cable: &Cable) -> World {
    let world = World::new(role, 2).env("RAILHEAD_SOCKET_IFNAME", "=rht,rht1").env("RAILHEAD_FORCE_MERGE", "rht,rht1");
    let world = world.env("RAILHEAD_SOFT_WIRE", "tcp").env("RAILHEAD_FABRIC_TIMEOUT_S", "1");
    (0..2).fold(world, |world, rank| world.wrap(rank, &cable.at(rank)))
}

/// Two hosts with two cables between them, each of which goes down and up again. The first is also that of the comms' handshakes.
#[test]
fn cables_are_cut_and_mended() {
    if !usable() {
        return;
    }
    let cable = Cable::new();
    cable.double();
    for progress in ["poll", "thread"] {
        let world = two_hosts("carries_on", &cable).env("RAILHEAD_PROGRESS", progress);
        let mut ranks = world.env("RHT_ROUNDS", "2").spawn();
        for (interface, end) in [("rht1", 0), ("rht", 1)] {
            (0..2).for_each(|rank| ranks.expect(rank, "ready"));
            (0..2).for_each(|rank| ranks.tell(rank, "down"));
            if interface == "rht1" && progress == "poll" {
                // A process that is stopped is no rail that fails, be it for longer than a rail may be silent: its kernel answers.
                ranks.ranks[1].signal(libc::SIGSTOP);
                std::thread::sleep(std::time::Duration::from_secs(3));
                ranks.ranks[1].signal(libc::SIGCONT);
            }
            cable.set(interface, end, "down");
            (0..2).for_each(|rank| ranks.expect(rank, "ready"));
            cable.set(interface, end, "up");
            (0..2).for_each(|rank| ranks.tell(rank, "up"));
        }
        ranks.finish();
    }
}

/// A rail is down, and then the peer is killed: that is no further rail.
#[test]
fn a_peer_that_is_killed_while_a_rail_is_down_is_named() {
    if !usable() {
        return;
    }
    for killed in [0, 1] {
        let cable = Cable::new();
        cable.double();
        let mut ranks = two_hosts("goes_on_to_the_end", &cable).spawn();
        (0..2).for_each(|rank| ranks.expect(rank, "flowing"));
        cable.set("rht1", 1, "down");
        (0..2).for_each(|rank| ranks.expect(rank, "down"));
        ranks.ranks[killed].signal(libc::SIGKILL);
        ranks.expect(1 - killed, "6");
        assert!(!ranks.ranks[killed].wait().success());
        assert!(ranks.ranks[1 - killed].wait().success());
    }
}
