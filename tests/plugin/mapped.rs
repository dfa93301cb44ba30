//! Memory from railhead_alloc: the peer maps it, copies out of it, and nothing goes wrong when it is freed early or not allocated at all.

use std::ffi::{CString, c_void};

use crate::support;
use support::comms::{self, Mem};
use support::holdings::paths;
use support::plugin::{Plugin, library};
use support::{Ctx, Role, World, until};

pub const ROLES: &[(&str, Role)] =
    &[("sends_from_own_memory", sends_from_own_memory), ("lacks_descriptors_for_it", lacks_descriptors_for_it)];

type Alloc = extern "C" fn(usize) -> *mut c_void;
type Free = extern "C" fn(*mut c_void);

/// The two functions of the library that the plugin's table came from.
fn functions() -> (Alloc, Free) {
    let name = CString::new(library().to_string_lossy().as_bytes()).expect("a path");
    // SAFETY: the library is loaded, and the two symbols have these types (include/railhead.h).
    unsafe {
        let library = libc::dlopen(name.as_ptr(), libc::RTLD_NOW);
        let alloc = libc::dlsym(library, c"railhead_alloc".as_ptr());
        let free = libc::dlsym(library, c"railhead_free".as_ptr());
        assert!(!alloc.is_null() && !free.is_null());
        (std::mem::transmute::<*mut c_void, Alloc>(alloc), std::mem::transmute::<*mut c_void, Free>(free))
    }
}

const LEN: usize = 3_000_000;
/// More allocations than a peer maps (64): what lies in the others is copied.
const ROUNDS: usize = 70;

fn sends_from_own_memory(ctx: &Ctx) {
    let (alloc, free) = functions();
    let mut plugin = Plugin::start(12);
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    let inn = Mem::new(LEN);
    let in_mr = plugin.reg_mr(recv, inn.ptr(0), LEN).expect("regMr");
    for round in 0..ROUNDS {
        let own = alloc(LEN).cast::<u8>();
        assert!(!own.is_null() && own.addr() % 4096 == 0);
        // SAFETY: LEN fresh bytes.
        let own_bytes = unsafe { std::slice::from_raw_parts_mut(own, LEN) };
        assert!(own_bytes.iter().all(|b| *b == 0));
        own_bytes.copy_from_slice(&support::pattern((round * 2 + ctx.rank) as u64, LEN));
        let mr = plugin.reg_mr(send, own, LEN).expect("regMr");
        // Part of the allocation, so that its place in it matters.
        let (at, len) = (round * 100 + 1, LEN - round * 1000 - 7000);
        let r = comms::irecv(&plugin, recv, &inn, 0, LEN, 1, in_mr).expect("irecv");
        let s = until("isend", || plugin.isend(send, own.wrapping_add(at), len, 1, mr).transpose()).expect("isend");
        let (mut sent, mut got) = (None, None);
        until("both ways", || {
            sent = sent.or_else(|| plugin.test(s).expect("test"));
            got = got.or_else(|| plugin.test(r).expect("test"));
            (sent.is_some() && got.is_some()).then_some(())
        });
        let theirs = support::pattern((round * 2 + 1 - ctx.rank) as u64, LEN);
        assert!(inn.read(0, len) == theirs[at..at + len], "round {round}");
        plugin.dereg_mr(send, mr).expect("deregMr");
        free(own.cast());
    }
    ctx.say(&paths(std::process::id() as i32).map(|n| n.to_string()).join(" "));
    // Not ours, and freed before: refused without harm.
    free(inn.ptr(0).cast());
    free(std::ptr::null_mut());
    assert!(alloc(0).is_null());
    let twice = alloc(1);
    free(twice);
    free(twice);
    ctx.barrier();
    plugin.close_send(send).expect("close_send");
    plugin.close_recv(recv).expect("close_recv");
    plugin.finalize().expect("finalize");
}

/// Rank 1 has no descriptor left by the time it is passed the other one's memory.
fn lacks_descriptors_for_it(ctx: &Ctx) {
    let (alloc, free) = functions();
    let mut plugin = Plugin::start(12);
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    let (inn, own) = (Mem::new(LEN), alloc(LEN).cast::<u8>());
    assert!(!own.is_null());
    let in_mr = plugin.reg_mr(recv, inn.ptr(0), LEN).expect("regMr");
    let mr = plugin.reg_mr(send, own, LEN).expect("regMr");
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: one valid rlimit.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    let limit_to = |most| {
        let limited = libc::rlimit { rlim_cur: most, ..limit };
        // SAFETY: as above.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limited) }, 0);
    };
    if ctx.rank == 1 {
        limit_to(3);
    }
    ctx.barrier();
    for round in 0..10 {
        // SAFETY: LEN bytes that nothing else uses now.
        unsafe { std::slice::from_raw_parts_mut(own, LEN) }.copy_from_slice(&support::pattern(round * 2 + ctx.rank as u64, LEN));
        let r = comms::irecv(&plugin, recv, &inn, 0, LEN, 1, in_mr).expect("irecv");
        let s = until("isend", || plugin.isend(send, own, LEN, 1, mr).transpose()).expect("isend");
        let (mut sent, mut got) = (None, None);
        until("both ways", || {
            sent = sent.or_else(|| plugin.test(s).expect("test"));
            got = got.or_else(|| plugin.test(r).expect("test"));
            (sent.is_some() && got.is_some()).then_some(())
        });
        assert!(inn.read(0, LEN) == support::pattern(round * 2 + 1 - ctx.rank as u64, LEN), "round {round}");
    }
    limit_to(limit.rlim_cur);
    ctx.say(&paths(std::process::id() as i32).map(|n| n.to_string()).join(" "));
    plugin.dereg_mr(send, mr).expect("deregMr");
    free(own.cast());
    ctx.barrier();
    plugin.close_send(send).expect("close_send");
    plugin.close_recv(recv).expect("close_recv");
    plugin.finalize().expect("finalize");
}

#[test]
fn a_peer_without_descriptors_gets_it_like_other_memory() {
    for (cma, progress) in [("1", "poll"), ("0", "poll"), ("0", "thread")] {
        let world = World::new("lacks_descriptors_for_it", 2).env("RAILHEAD_CMA", cma).env("RAILHEAD_PROGRESS", progress);
        let mut ranks = world.spawn();
        for rank in 0..2 {
            let words: Vec<u64> = ranks.hear(rank).split(' ').map(|word| word.parse().expect("a number")).collect();
            let (mapped, cma_bytes, bounce) = (words[1], words[2], words[3]);
            // What rank 1 sends is mapped; of what it gets, the first message is sent to it at least.
            assert_eq!(mapped, 10 * LEN as u64, "{words:?}");
            assert!(bounce >= LEN as u64 && cma_bytes + bounce == 10 * LEN as u64, "{words:?}");
            assert!(cma == "1" || cma_bytes == 0, "{words:?}");
        }
        ranks.finish();
    }
}

#[test]
fn a_peer_on_the_host_maps_it() {
    let mut ranks = World::new("sends_from_own_memory", 2).spawn();
    for rank in 0..2 {
        let words: Vec<u64> = ranks.hear(rank).split(' ').map(|word| word.parse().expect("a number")).collect();
        let (mapped, cma) = (words[1], words[2]);
        assert!(mapped >= 2 * 64 * (LEN as u64 - 80_000), "{words:?}");
        assert!(cma > 0, "more than 64 allocations were mapped: {words:?}");
        assert_eq!(words[4], 0, "bytes went over TCP");
    }
    ranks.finish();
}

#[test]
fn it_is_ordinary_memory_on_tcp() {
    let mut ranks = World::new("sends_from_own_memory", 2).env("RAILHEAD_SOFT_WIRE", "tcp").spawn();
    for rank in 0..2 {
        let words: Vec<u64> = ranks.hear(rank).split(' ').map(|word| word.parse().expect("a number")).collect();
        assert_eq!(words[..4], [0; 4]);
    }
    ranks.finish();
}
