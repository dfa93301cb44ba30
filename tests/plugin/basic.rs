//! Two and three processes that load the plugin and move bytes: every ABI version, both wires, the order of calls that NCCL has.

use crate::support;
use railhead::base::stats::RailCounter;
use support::comms::{self, Mem, SIZES};
use support::holdings::{paths, rail_sum};
use support::plugin::{Plugin, VERSIONS};
use support::{Ctx, Role, World, until};

pub const ROLES: &[(&str, Role)] =
    &[("exchange", exchange), ("nccl_2_8_order", nccl_2_8_order), ("to_itself", to_itself), ("both_ends_at_once", both_ends_at_once)];

fn version() -> u32 {
    std::env::var("RHT_VERSION").map_or(12, |v| v.parse().expect("a version"))
}

/// Connects both ways, exchanges every size, and reports by which paths the bytes went, before it closes.
fn exchange(ctx: &Ctx) {
    let mut plugin = Plugin::start(version());
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    comms::exchange(&plugin, ctx.rank, send, recv, &SIZES).expect("exchange");
    ctx.say(&paths(std::process::id() as i32).map(|n| n.to_string()).join(" "));
    ctx.say(&rail_sum(std::process::id() as i32, RailCounter::CmaRefused).to_string());
    ctx.barrier();
    plugin.close_send(send).expect("close_send");
    plugin.close_recv(recv).expect("close_recv");
    plugin.finalize().expect("finalize");
}

/// Runs `exchange` on two ranks; bytes by path, summed over both: inline, mapped, cma, bounce, tcp; then refusals.
fn run_exchange(world: World) -> ([u64; 5], u64) {
    let mut ranks = world.spawn();
    let mut sum = [0u64; 5];
    let mut refused = 0;
    for rank in 0..2 {
        let words = ranks.hear(rank);
        for (total, word) in sum.iter_mut().zip(words.split(' ')) {
            *total += word.parse::<u64>().expect("a number");
        }
        refused += ranks.hear(rank).parse::<u64>().expect("a number");
    }
    ranks.finish();
    (sum, refused)
}

fn payload() -> u64 {
    SIZES.iter().sum::<usize>() as u64
}

#[test]
fn shared_memory_is_taken_on_one_host() {
    let ([inline, _, cma, _, tcp], _) = run_exchange(World::new("exchange", 2));
    assert_eq!(tcp, 0, "bytes went over TCP");
    assert!(inline > 0 && cma >= payload(), "{inline} inline, {cma} by cross-memory attach");
}

#[test]
fn tcp_is_taken_on_request() {
    for streams in ["0", "2"] {
        let (by_path, _) = run_exchange(World::new("exchange", 2).env("RAILHEAD_SOFT_WIRE", "tcp").env("RAILHEAD_TCP_STREAMS", streams));
        assert_eq!(by_path[..4], [0; 4], "bytes went another way");
        assert!(by_path[4] >= 4 * payload(), "{by_path:?}");
    }
}

#[test]
fn bounce_ring_is_taken_without_cross_memory_attach() {
    let ([_, _, cma, bounce, tcp], _) = run_exchange(World::new("exchange", 2).env("RAILHEAD_CMA", "0"));
    assert_eq!((cma, tcp), (0, 0));
    assert!(bounce >= payload(), "{bounce}");
    // One side alone cannot pull; the other may.
    let ([_, _, cma, bounce, tcp], _) = run_exchange(World::new("exchange", 2).env_of(1, "RAILHEAD_CMA", "0"));
    assert_eq!(tcp, 0);
    assert!(bounce >= payload() / 2, "{cma} {bounce}");
}

#[test]
fn every_version_on_both_wires() {
    for version in VERSIONS {
        for wire in ["shm", "tcp"] {
            run_exchange(World::new("exchange", 2).env("RHT_VERSION", &version.to_string()).env("RAILHEAD_SOFT_WIRE", wire));
        }
    }
}

#[test]
fn several_queue_pairs_per_rail() {
    for wire in ["shm", "tcp"] {
        run_exchange(
            World::new("exchange", 2).env("RAILHEAD_QPS_PER_RAIL", "4").env("RAILHEAD_SPLIT_MIN", "128").env("RAILHEAD_SOFT_WIRE", wire),
        );
    }
    // Each side decides for itself; they must agree on something.
    run_exchange(World::new("exchange", 2).env_of(0, "RAILHEAD_QPS_PER_RAIL", "3"));
}

#[test]
fn ipv6() {
    let world = World::new("exchange", 2).env("RAILHEAD_SOCKET_FAMILY", "AF_INET6").env("RAILHEAD_SOFT_WIRE", "tcp");
    let (by_path, _) = run_exchange(world.env("RAILHEAD_SOCKET_IFNAME", "=lo"));
    assert!(by_path[4] > 0);
}

/// NCCL 2.8: every rank connects to its next first (v4: one blocking call), registers, and accepts from its previous one then.
fn nccl_2_8_order(ctx: &Ctx) {
    let plugin = Plugin::start(version());
    let (next, previous) = ((ctx.rank + 1) % ctx.size, (ctx.rank + ctx.size - 1) % ctx.size);
    let (mine, listen) = plugin.listen(0).expect("listen");
    let mut theirs = if ctx.size == 1 {
        mine
    } else {
        comms::give(ctx.to(previous), &mine);
        comms::get(ctx.to(next))
    };
    let mut send = None;
    if plugin.version() == 4 {
        send = Some(plugin.connect(0, &mut theirs).expect("connect").expect("v4 connects in one call"));
    } else {
        // Later versions may say "not yet": one try must not be needed to make the accept of another rank possible.
        send = send.or(plugin.connect(0, &mut theirs).expect("connect"));
    }
    let out = Mem::filled(&support::pattern(ctx.rank as u64, 100_000));
    let mut out_mr = send.map(|s| plugin.reg_mr(s, out.ptr(0), out.len()).expect("regMr right after connect"));
    if ctx.size > 1 {
        ctx.barrier();
    }
    let recv = until("accept", || {
        if send.is_none() {
            send = plugin.connect(0, &mut theirs).expect("connect");
        }
        plugin.accept(listen).expect("accept")
    });
    plugin.close_listen(listen).expect("close_listen");
    let send = match send {
        Some(send) => send,
        None => comms::connect(&plugin, 0, &mut theirs).expect("connect"),
    };
    let out_mr = *out_mr.get_or_insert_with(|| plugin.reg_mr(send, out.ptr(0), out.len()).expect("regMr"));
    let inn = Mem::new(100_000);
    let in_mr = plugin.reg_mr(recv, inn.ptr(0), inn.len()).expect("regMr");
    let r = comms::irecv(&plugin, recv, &inn, 0, inn.len(), 1, in_mr).expect("irecv");
    let mut s = None;
    let (mut sent, mut got) = (None, None);
    until("the ring", || {
        s = s.or_else(|| plugin.isend(send, out.ptr(0), out.len(), 1, out_mr).expect("isend"));
        sent = sent.or_else(|| s.and_then(|s| plugin.test(s).expect("test")));
        got = got.or_else(|| plugin.test(r).expect("test"));
        (sent.is_some() && got.is_some()).then_some(())
    });
    assert!(inn.read(0, inn.len()) == support::pattern(previous as u64, 100_000));
    plugin.dereg_mr(send, out_mr).expect("deregMr");
    plugin.dereg_mr(recv, in_mr).expect("deregMr");
    plugin.close_send(send).expect("close");
    plugin.close_recv(recv).expect("close");
}

#[test]
fn all_connect_then_register_then_accept() {
    for version in VERSIONS {
        for ranks in [2, 3] {
            World::new("nccl_2_8_order", ranks).env("RHT_VERSION", &version.to_string()).spawn().finish();
        }
    }
    World::new("nccl_2_8_order", 3).env("RHT_VERSION", "4").env("RAILHEAD_SOFT_WIRE", "tcp").spawn().finish();
}

/// A rank that is its own peer.
fn to_itself(ctx: &Ctx) {
    nccl_2_8_order(ctx);
}

#[test]
fn self_connection() {
    for version in VERSIONS {
        for wire in ["shm", "tcp"] {
            World::new("to_itself", 1).env("RHT_VERSION", &version.to_string()).env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
        }
    }
}

/// Both ranks connect to each other at the same moment, many times over, without closing anything in between.
fn both_ends_at_once(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let mut open = Vec::new();
    for round in 0..20 {
        ctx.barrier();
        let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
        comms::exchange(&plugin, ctx.rank, send, recv, &[round * 100]).expect("exchange");
        open.push((send, recv));
    }
    for &(send, recv) in &open {
        comms::exchange(&plugin, ctx.rank, send, recv, &[4097]).expect("exchange");
    }
    ctx.barrier();
    for (send, recv) in open {
        plugin.close_recv(recv).expect("close");
        plugin.close_send(send).expect("close");
    }
}

#[test]
fn both_connect_at_once_twenty_times() {
    for wire in ["shm", "tcp"] {
        World::new("both_ends_at_once", 2).env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
    }
}
