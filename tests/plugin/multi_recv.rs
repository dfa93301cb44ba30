//! Grouped receives: tags permuted and repeated, all group sizes, mixed lengths, a withheld send, everything outstanding, many laps.

use std::collections::HashMap;

use crate::support;
use support::comms::{self, Mem};
use support::plugin::{Buf, Opaque, Plugin};
use support::{Ctx, Role, World, pattern, until};

pub const ROLES: &[(&str, Role)] = &[
    ("groups", groups),
    ("withheld", withheld),
    ("full", full),
    ("clamped", clamped),
    ("any_order", any_order),
    ("optional_completion", optional_completion),
];

fn on_both_wires(role: &'static str) {
    for wire in ["shm", "tcp"] {
        World::new(role, 2).env("RAILHEAD_SOFT_WIRE", wire).spawn().finish();
    }
}

/// A started plugin, this rank's one-way comm (rank 0 receives) and registered memory.
fn set_up(ctx: &Ctx, len: usize) -> (Plugin, Opaque, Mem, Opaque) {
    let plugin = Plugin::start(12);
    let comm = comms::one_way(ctx, &plugin, 0).expect("a comm");
    let mem = Mem::new(len);
    let mr = plugin.reg_mr(comm, mem.ptr(0), len).expect("regMr");
    (plugin, comm, mem, mr)
}

fn tear_down(ctx: &Ctx, plugin: &Plugin, comm: Opaque, mr: Opaque) {
    ctx.barrier();
    plugin.dereg_mr(comm, mr).expect("deregMr");
    if ctx.rank == 0 { plugin.close_recv(comm) } else { plugin.close_send(comm) }.expect("close");
}

/// Small random numbers, the same on both ranks.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
}

const SLOT: usize = 70_000;
const LENGTHS: [usize; 8] = [0, 1, 63, 64, 1000, 4096, 9000, 65_537];

/// One group as both ranks compute it: tags of the receive's buffers, and the order in which the sends are posted.
struct Group {
    tags: Vec<i32>,
    lens: Vec<usize>,
    order: Vec<usize>,
}

impl Group {
    fn random(rng: &mut Rng, n: usize) -> Group {
        // Few different tags, so that many groups repeat one; sends of one tag must keep their order.
        let tags: Vec<i32> = (0..n).map(|_| rng.below(5) as i32).collect();
        let lens = (0..n).map(|_| LENGTHS[rng.below(LENGTHS.len())]).collect();
        let mut shuffled: Vec<usize> = (0..n).collect();
        (1..n).rev().for_each(|i| shuffled.swap(i, rng.below(i + 1)));
        // Within one tag the buffers are taken in their order.
        let mut by_tag: HashMap<i32, Vec<usize>> = HashMap::new();
        (0..n).rev().for_each(|i| by_tag.entry(tags[i]).or_default().push(i));
        let order = shuffled.iter().map(|&i| by_tag.get_mut(&tags[i]).and_then(Vec::pop).expect("one per buffer")).collect();
        Group { tags, lens, order }
    }
}

/// n = 1..8, twenty random groups each: more than three laps of 256 slots.
fn groups(ctx: &Ctx) {
    let (plugin, comm, mem, mr) = set_up(ctx, 8 * SLOT);
    let mut rng = Rng(11);
    let mut slots = 0;
    for round in 0..25 {
        for n in 1..=8 {
            let group = Group::random(&mut rng, n);
            slots += n;
            let seed = |i: usize| (round * 100 + n * 10 + i) as u64;
            if ctx.rank == 0 {
                mem.write(0, &vec![0xCC; 8 * SLOT]);
                let bufs: Vec<Buf> = (0..n).map(|i| Buf { addr: mem.ptr(i * SLOT), len: SLOT, tag: group.tags[i], mr }).collect();
                let request = until("irecv", || plugin.irecv(comm, &bufs).expect("irecv"));
                let sizes = comms::wait(&plugin, request).expect("test");
                for (i, (&size, &len)) in sizes.iter().zip(&group.lens).enumerate().take(n) {
                    assert_eq!(size as usize, len, "buffer {i} of {n}");
                    assert!(mem.read(i * SLOT, len) == pattern(seed(i), len), "buffer {i} of {n}: {len} bytes");
                    assert!(mem.read(i * SLOT + len, 64).iter().all(|&b| b == 0xCC), "behind buffer {i}");
                }
                if n < 8 {
                    assert_eq!(sizes[n], -1, "a size was written beyond the group");
                }
            } else {
                let requests: Vec<_> = group
                    .order
                    .iter()
                    .map(|&i| {
                        mem.write(i * SLOT, &pattern(seed(i), group.lens[i]));
                        comms::isend(&plugin, comm, &mem, i * SLOT, group.lens[i], group.tags[i], mr).expect("isend")
                    })
                    .collect();
                for (&i, &request) in group.order.iter().zip(&requests) {
                    assert_eq!(comms::wait(&plugin, request).expect("test")[0] as usize, group.lens[i]);
                }
            }
        }
    }
    assert!(slots > 3 * 256, "{slots} slots are no three laps");
    tear_down(ctx, &plugin, comm, mr);
}

#[test]
fn every_group_size_with_permuted_and_repeated_tags() {
    on_both_wires("groups");
}

/// Of eight sends one is withheld: the other seven complete, at the sender, before it is posted; the receive only after.
fn withheld(ctx: &Ctx) {
    let (plugin, comm, mem, mr) = set_up(ctx, 8 * SLOT);
    for held in [0, 3, 7] {
        for len in [8, 5000, SLOT] {
            if ctx.rank == 0 {
                let bufs: Vec<Buf> = (0..8).map(|i| Buf { addr: mem.ptr(i * SLOT), len: SLOT, tag: i as i32, mr }).collect();
                let request = until("irecv", || plugin.irecv(comm, &bufs).expect("irecv"));
                // The sender says when its seven are done; they may need us to poll.
                until("seven sends", || {
                    assert_eq!(plugin.test(request).expect("test"), None, "done with a send missing");
                    ctx.to(1).ready().then_some(())
                });
                assert_eq!(ctx.to(1).recv(), b"seven");
                for _ in 0..1000 {
                    assert_eq!(plugin.test(request).expect("test"), None, "done with a send missing");
                }
                ctx.to(1).send(b"go").expect("rank 1");
                let sizes = comms::wait(&plugin, request).expect("test");
                assert_eq!(sizes, [len as i32; 8]);
                (0..8).for_each(|i| assert!(mem.read(i * SLOT, len) == pattern(i as u64, len)));
            } else {
                (0..8).for_each(|i| mem.write(i * SLOT, &pattern(i as u64, len)));
                let mut post = |i: usize| comms::isend(&plugin, comm, &mem, i * SLOT, len, i as i32, mr).expect("isend");
                let requests: Vec<_> = (0..8).filter(|&i| i != held).map(&mut post).collect();
                for request in requests {
                    comms::wait(&plugin, request).expect("test");
                }
                ctx.to(0).send(b"seven").expect("rank 0");
                assert_eq!(ctx.to(0).recv(), b"go");
                let last = post(held);
                comms::wait(&plugin, last).expect("test");
            }
        }
    }
    tear_down(ctx, &plugin, comm, mr);
}

#[test]
fn a_withheld_send_holds_only_its_receive() {
    on_both_wires("withheld");
}

/// 32 groups of 8 outstanding at once, the 33rd is "not now"; then all of them complete. Four times over.
fn full(ctx: &Ctx) {
    const EACH: usize = 600;
    let (plugin, comm, mem, mr) = set_up(ctx, 256 * EACH);
    for lap in 0..4u64 {
        let at = |slot: usize| slot * EACH;
        let len = |slot: usize| (slot * 37 + lap as usize * 11) % EACH;
        if ctx.rank == 0 {
            let bufs =
                |g: usize| -> Vec<Buf> { (0..8).map(|i| Buf { addr: mem.ptr(at(g * 8 + i)), len: EACH, tag: i as i32, mr }).collect() };
            let requests: Vec<_> = (0..32).map(|g| until("irecv", || plugin.irecv(comm, &bufs(g)).expect("irecv"))).collect();
            for _ in 0..100 {
                assert_eq!(plugin.irecv(comm, &bufs(0)).expect("irecv"), None, "more receives outstanding than slots");
            }
            ctx.barrier();
            // Not in the order of posting.
            for g in (0..32).rev() {
                let sizes = comms::wait(&plugin, requests[g]).expect("test");
                for (i, &size) in sizes.iter().enumerate() {
                    let slot = g * 8 + i;
                    assert_eq!(size as usize, len(slot));
                    assert!(mem.read(at(slot), len(slot)) == pattern(lap << 32 | slot as u64, len(slot)));
                }
            }
        } else {
            (0..256).for_each(|slot| mem.write(at(slot), &pattern(lap << 32 | slot as u64, len(slot))));
            ctx.barrier();
            let mut open = Vec::new();
            for slot in (0..32).flat_map(|g| (0..8).rev().map(move |i| g * 8 + i)) {
                open.push(comms::isend(&plugin, comm, &mem, at(slot), len(slot), (slot % 8) as i32, mr).expect("isend"));
            }
            for request in open.into_iter().rev() {
                comms::wait(&plugin, request).expect("test");
            }
        }
    }
    tear_down(ctx, &plugin, comm, mr);
}

#[test]
fn thirty_two_groups_of_eight_outstanding() {
    on_both_wires("full");
}

/// A send longer than its receive is clamped to it, and both are told the clamped size.
fn clamped(ctx: &Ctx) {
    let (plugin, comm, mem, mr) = set_up(ctx, 2 * SLOT);
    for (len, room) in [(10, 5), (100, 0), (SLOT, 64), (SLOT, SLOT - 1), (9000, 8192)] {
        if ctx.rank == 0 {
            mem.write(0, &vec![0xCC; 2 * SLOT]);
            let request = comms::irecv(&plugin, comm, &mem, 0, room, 1, mr).expect("irecv");
            assert_eq!(comms::wait(&plugin, request).expect("test")[0] as usize, room);
            assert!(mem.read(0, room) == pattern(1, len)[..room]);
            assert!(mem.read(room, 2 * SLOT - room).iter().all(|&b| b == 0xCC), "behind the receive");
        } else {
            mem.write(0, &pattern(1, len));
            let request = comms::isend(&plugin, comm, &mem, 0, len, 1, mr).expect("isend");
            assert_eq!(comms::wait(&plugin, request).expect("test")[0] as usize, room, "{len} into {room}");
        }
    }
    tear_down(ctx, &plugin, comm, mr);
}

#[test]
fn a_send_longer_than_its_receive_is_clamped() {
    on_both_wires("clamped");
}

/// test() on any outstanding request in any order; one request is watched to its end while the others are left alone.
fn any_order(ctx: &Ctx) {
    const N: usize = 32;
    let (plugin, comm, mem, mr) = set_up(ctx, N * SLOT);
    let mut rng = Rng(5);
    for _ in 0..10 {
        let lens: Vec<usize> = (0..N).map(|_| LENGTHS[rng.below(LENGTHS.len())]).collect();
        let mut order: Vec<usize> = (0..N).collect();
        (1..N).rev().for_each(|i| order.swap(i, rng.below(i + 1)));
        let requests: Vec<_> = (0..N)
            .map(|i| {
                if ctx.rank == 0 {
                    return comms::irecv(&plugin, comm, &mem, i * SLOT, SLOT, 4, mr).expect("irecv");
                }
                mem.write(i * SLOT, &pattern(i as u64, lens[i]));
                comms::isend(&plugin, comm, &mem, i * SLOT, lens[i], 4, mr).expect("isend")
            })
            .collect();
        for i in order {
            assert_eq!(comms::wait(&plugin, requests[i]).expect("test")[0] as usize, lens[i], "request {i}");
            assert!(ctx.rank == 1 || mem.read(i * SLOT, lens[i]) == pattern(i as u64, lens[i]));
        }
    }
    tear_down(ctx, &plugin, comm, mr);
}

#[test]
fn requests_are_tested_in_any_order() {
    on_both_wires("any_order");
}

/// NCCL_NET_OPTIONAL_RECV_COMPLETION: `*request` comes in as 0x1, is overwritten whatever happens, and the receive completes normally.
fn optional_completion(ctx: &Ctx) {
    let (plugin, comm, mem, mr) = set_up(ctx, 300 * 64);
    if ctx.rank == 0 {
        let buf = |i: usize| [Buf { addr: mem.ptr(i * 64), len: 64, tag: 1, mr }];
        let mut open = Vec::new();
        for i in 0..256 {
            let request = until("irecv", || plugin.irecv_with(comm, &buf(i), std::ptr::without_provenance_mut(1)).expect("irecv"));
            assert_ne!(request.0.addr(), 1);
            open.push(request);
        }
        assert_eq!(plugin.irecv_with(comm, &buf(0), std::ptr::without_provenance_mut(1)).expect("irecv"), None, "NULL, not 0x1, when full");
        ctx.barrier();
        for (i, request) in open.into_iter().enumerate() {
            assert_eq!(comms::wait(&plugin, request).expect("test")[0], 64);
            assert!(mem.read(i * 64, 64) == pattern(i as u64, 64));
        }
    } else {
        ctx.barrier();
        (0..256).for_each(|i| mem.write(i * 64, &pattern(i as u64, 64)));
        let open: Vec<_> = (0..256).map(|i| comms::isend(&plugin, comm, &mem, i * 64, 64, 1, mr).expect("isend")).collect();
        for request in open {
            comms::wait(&plugin, request).expect("test");
        }
    }
    tear_down(ctx, &plugin, comm, mr);
}

#[test]
fn optional_receive_completion_is_overwritten() {
    on_both_wires("optional_completion");
}
