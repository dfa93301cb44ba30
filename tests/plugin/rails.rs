//! Several rails in one comm: two interfaces merged into one device by makeVDevice, as NCCL merges the ports of a NIC.

use std::collections::VecDeque;
use std::time::Instant;

use crate::support;
use railhead::base::stats::page::CommSnapshot;
use railhead::base::stats::{CommKind, RailCounter};
use support::comms::{self, Mem, SIZES};
use support::holdings;
use support::netns::{Cable, usable};
use support::plugin::{Buf, Plugin};
use support::{Ctx, PATIENCE, Role, World, repeats};

pub const ROLES: &[(&str, Role)] = &[
    ("merges", merges),
    ("may_not_merge", may_not_merge),
    ("carries_on", support::failover::carries_on),
    ("goes_on_to_the_end", support::failover::goes_on_to_the_end),
    ("outlasts", support::failover::outlasts),
    ("rails_fail_in_turn", rails_fail_in_turn),
];

/// Messages from one failure to the next, and how many are under way at a time.
const EVERY: usize = 8;
const DEPTH: usize = 4;
/// Tags of a transfer's messages, of the one behind them, and of none.
const MESSAGE: i32 = 1;
const LAST: i32 = 2;
const NONE: i32 = 3;

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

/// The one comm of this process's.
fn comm() -> CommSnapshot {
    holdings::comms(std::process::id() as i32).into_iter().find(|comm| !comm.rails.is_empty()).expect("a comm")
}

fn per_rail(comm: &CommSnapshot, counter: RailCounter) -> Vec<u64> {
    comm.rails.iter().map(|rail| rail.counters[counter as usize]).collect()
}

/// Whether so many failures were seen, and every rail is back.
fn is_back(failures: usize) -> bool {
    let comm = comm();
    let sum = |counter| comm.rail_sum(counter) as usize;
    sum(RailCounter::Failures) == failures && sum(RailCounter::Reconnects) == failures
}

/// Repeats until there is a value, without a pause: rails come back as fast as both ends call.
#[track_caller]
fn without_pause<T>(what: &str, mut step: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = step() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "waited too long for {what}");
        std::thread::yield_now();
    }
}

/// A transfer of RHT_BYTES from rank 1 to rank 0, under which rails fail RHT_FAILURES times: one with each [`EVERY`]th message of the sender's, with others
/// under way. Every byte is looked at.
fn rails_fail_in_turn(ctx: &Ctx) {
    let number = |name: &str| std::env::var(name).expect(name).parse::<usize>().expect(name);
    let (failures, bytes) = (number("RHT_FAILURES"), number("RHT_BYTES"));
    let mut plugin = Plugin::start(12);
    let merged = plugin.make_vdevice(&[0, 1]).expect("makeVDevice");
    let comm_of = comms::one_way(ctx, &plugin, merged).expect("a comm");
    let len = bytes.div_ceil(failures * EVERY);
    // No two that could be mistaken for each other have the same bytes at the same place.
    const SHIFTS: usize = 4093;
    let all = support::pattern(7, len + SHIFTS);
    let message = |n: usize| &all[n % SHIFTS..][..len];
    let mem = Mem::new(DEPTH * len);
    let mr = plugin.reg_mr(comm_of, mem.ptr(0), mem.len()).expect("regMr");
    let sends = ctx.rank == 1;
    let post = |n: usize, len: usize, tag| {
        let at = mem.ptr(n % DEPTH * len);
        without_pause("a request", || match sends {
            true => plugin.isend(comm_of, at, len, tag, mr).expect("isend"),
            false => plugin.irecv(comm_of, &[Buf { addr: at, len, tag, mr }]).expect("irecv"),
        })
    };
    let wait = |request| without_pause("a message", || plugin.test(request).expect("test"))[0] as usize;
    // Polls, as there is no receive with this tag.
    let poll = || assert!(plugin.isend(comm_of, mem.ptr(0), 1, NONE, mr).expect("isend").is_none());
    let finish = |n: usize, request| {
        assert_eq!(wait(request), len);
        assert!(sends || mem.read(n % DEPTH * len, len) == message(n), "message {n}");
    };
    let mut requests = VecDeque::new();
    for n in 0..failures * EVERY {
        if requests.len() == DEPTH {
            let (n, request) = requests.pop_front().expect("a request");
            finish(n, request);
        }
        if sends {
            mem.write(n % DEPTH * len, message(n));
            if n % EVERY == EVERY - 1 {
                without_pause("all rails", || {
                    poll();
                    is_back(n / EVERY).then_some(())
                });
            }
        }
        requests.push_back((n, post(n, len, MESSAGE)));
    }
    requests.into_iter().for_each(|(n, request)| finish(n, request));
    let peer = ctx.to(1 - ctx.rank);
    if sends {
        without_pause("all rails", || {
            poll();
            is_back(failures).then_some(())
        });
        peer.send(b"back").expect("rank 0");
        without_pause("the receiver's rails", || {
            poll();
            peer.ready().then_some(())
        });
        assert_eq!(peer.recv(), b"back");
        wait(post(0, 1, LAST));
    } else {
        let last = post(0, 1, LAST);
        without_pause("all rails", || {
            assert!(plugin.test(last).expect("test").is_none());
            let comm = comm();
            // Those that fail again before this end has them back count once.
            (peer.ready() && comm.rails.iter().all(|rail| rail.down.is_none())).then_some(())
        });
        assert_eq!(peer.recv(), b"back");
        peer.send(b"back").expect("rank 1");
        wait(last);
    }
    let comm = comm();
    let seen = [RailCounter::Failures, RailCounter::Reconnects].map(|counter| per_rail(&comm, counter));
    assert_eq!(seen[0], seen[1], "failures, and recoveries");
    if sends {
        assert_eq!(seen[0], [failures.div_ceil(2) as u64, failures as u64 / 2]);
        let counter = if std::env::var("RAILHEAD_SOFT_WIRE").expect("a wire") == "tcp" { RailCounter::TxTcp } else { RailCounter::TxCma };
        let moved = per_rail(&comm, counter);
        assert!(moved.iter().sum::<u64>() >= bytes as u64 && moved.iter().all(|moved| *moved >= bytes as u64 / 10), "{moved:?}");
    } else {
        assert!(seen[0].iter().all(|seen| *seen > 0), "{seen:?}");
    }
    ctx.barrier();
    plugin.dereg_mr(comm_of, mr).expect("deregMr");
    match sends {
        true => plugin.close_send(comm_of).expect("close_send"),
        false => plugin.close_recv(comm_of).expect("close_recv"),
    }
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

/// One transfer, under which one rail after the other fails, again and again, and is back each time.
#[cfg(feature = "stages")]
#[test]
fn rails_fail_in_turn_under_one_transfer() {
    if !usable() {
        return;
    }
    let cable = Cable::new();
    let (failures, bytes) = (repeats(50, 1000), repeats(64 << 20, 4 << 30));
    for wire in ["shm", "tcp"] {
        let world = world("rails_fail_in_turn", &cable).env("RAILHEAD_FORCE_MERGE", "lo,rht").env("RAILHEAD_SOFT_WIRE", wire);
        let world = world.env("RHT_FAILURES", &failures.to_string()).env("RHT_BYTES", &bytes.to_string());
        world.env_of(1, "RH_STAGE", &format!("rail=0,1@{EVERY}:down:0")).spawn().finish();
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

/// Both go down at once, and are mended once the comms have noticed: their handshakes' connections, over one of them, last.
#[test]
fn comms_outlast_all_of_their_cables() {
    if !usable() {
        return;
    }
    let cable = Cable::new();
    cable.double();
    let mut ranks = two_hosts("outlasts", &cable).spawn();
    (0..2).for_each(|rank| ranks.expect(rank, "ready"));
    ["rht", "rht1"].iter().for_each(|interface| cable.set(interface, 0, "down"));
    for rank in 0..2 {
        let pid = ranks.ranks[rank].pid();
        support::until("no rail", || {
            let comms = holdings::comms(pid);
            comms.iter().any(|comm| comm.rails.len() == 2 && comm.rails.iter().all(|rail| rail.down.is_some())).then_some(())
        });
    }
    ["rht", "rht1"].iter().for_each(|interface| cable.set(interface, 0, "up"));
    ranks.finish();
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
