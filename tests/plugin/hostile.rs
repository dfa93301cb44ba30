//! Peers that write nonsense into what both can write to, and peers that die under the bare fabric: an error at the other end, or nothing,
//! but never a crash, a hang or a byte where it does not belong.

use std::sync::Arc;

use crate::support;
use railhead::base::config::{Config, SoftWire};
use railhead::base::stats::RailStats;
use railhead::fabric::{
    Access, Completion, CompletionQueue, Endpoint, Opcode, Payload, QpCaps, RecvWr, SendWr, Sge, UserMemory, WcOpcode, WcStatus, devices,
};
use support::comms::{self, Mem};
use support::holdings::shm_files;
use support::plugin::Plugin;
use support::{Ctx, Role, World, pattern, until};

pub const ROLES: &[(&str, Role)] = &[("scribbles", scribbles), ("bare_fabric", bare_fabric)];

/// This process's mappings that others write to, the stats page apart.
fn shared_mappings() -> Vec<(usize, usize)> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let range = |line: &str| {
        let (from, to) = line.split_once(' ')?.0.split_once('-')?;
        Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
    };
    maps.lines().filter(|l| l.contains("rw-s") && l.contains("railhead") && !l.contains("railhead-stats")).filter_map(range).collect()
}

/// Rank 1 exchanges a few messages and then overwrites everything that it shares with rank 0, again and again, while both go on. Rank 0 must end:
/// with an error or without one. What it reads into stays within its receives.
fn scribbles(ctx: &Ctx) {
    let plugin = Plugin::start(12);
    let seed: u64 = std::env::var("RHT_SEED").expect("RHT_SEED").parse().expect("a number");
    let (send, recv) = comms::both_ways(ctx, &plugin, 0).expect("comms");
    comms::exchange(&plugin, ctx.rank, send, recv, &[100, 100_000]).expect("exchange");
    // Until here both were honest.
    ctx.barrier();
    let mem = Mem::new(4 << 20);
    let mr = plugin.reg_mr(send, mem.ptr(0), 1 << 20).expect("regMr");
    let guarded = Mem::new(4 << 20);
    let to = plugin.reg_mr(recv, guarded.ptr(1 << 20), 1 << 20).expect("regMr");
    guarded.write(0, &vec![0x5A; 4 << 20]);
    let (mut sending, mut receiving) = (None, None);
    let (mut turns, mut errors) = (0u64, 0);
    let mut enough = None;
    let mut x = seed | 1;
    // The nonsense-maker for a number of turns; the other until it has errors, or has gone on for a while after the last of it.
    loop {
        let step = [
            match sending {
                None => plugin.isend(send, mem.ptr(0), 1 << (turns % 21), 1, mr).map(|s| sending = s),
                Some(s) => plugin.test(s).map(|done| sending = if done.is_some() { None } else { sending }),
            },
            match receiving {
                None => {
                    let buf = support::plugin::Buf { addr: guarded.ptr(1 << 20), len: 1 << 20, tag: 1, mr: to };
                    plugin.irecv(recv, &[buf]).map(|r| receiving = r)
                }
                Some(r) => plugin.test(r).map(|done| receiving = if done.is_some() { None } else { receiving }),
            },
        ];
        errors += step.iter().filter(|s| s.is_err()).count();
        turns += 1;
        if ctx.rank == 1 {
            if turns > 200 && turns.is_multiple_of(50) {
                let shared = shared_mappings();
                // After the first nonsense the comms may be lost, and what was shared with them.
                assert!(!shared.is_empty() || turns > 250, "nothing is shared");
                for (from, to) in shared {
                    // All of it, or a few words anywhere, or the front where the counters are.
                    let words = (to - from) / 8;
                    for i in 0..[words, 16, 64][(x >> 20) as usize % 3] {
                        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                        let at = if x >> 62 == 0 { i % words } else { (x >> 16) as usize % words };
                        // SAFETY: a shared mapping of this process, written with atomics as its owners do.
                        unsafe {
                            (*((from + 8 * at) as *const std::sync::atomic::AtomicU64))
                                .store(x >> (x & 63), std::sync::atomic::Ordering::Relaxed)
                        };
                    }
                }
            }
            if turns == 2000 || errors > 4 {
                break;
            }
        } else if errors > 4 || enough.is_some_and(|since| turns > since + 2000) {
            break;
        } else if enough.is_none() && ctx.to(1).ready() {
            // What lies there by now is looked at.
            enough = Some(turns);
        }
    }
    if ctx.rank == 0 {
        let outside = |at: usize, len: usize| guarded.read(at, len).iter().all(|&b| b == 0x5A);
        assert!(outside(0, 1 << 20) && outside(2 << 20, 2 << 20), "bytes landed outside of the receive");
        // This process is whole: it can do with others what it always could.
        let (s, r) = comms::to_itself(&plugin, 0).expect("comms");
        comms::exchange_with_itself(&plugin, s, r, &pattern(1, 100_000));
        let _ = (plugin.close_send(send), plugin.close_recv(recv));
        ctx.say(if errors > 0 { "whole, after errors" } else { "whole" });
    } else {
        let _ = ctx.to(0).send(b"enough");
        // Rank 0 decides when it is over.
        let _ = ctx.to(0).recv_within(support::PATIENCE);
    }
}

#[test]
fn nonsense_in_shared_memory() {
    let mut noticed = 0;
    for seed in 1..=12 {
        for cma in ["1", "0"] {
            let mut ranks = World::new("scribbles", 2).env("RHT_SEED", &seed.to_string()).env("RAILHEAD_CMA", cma).spawn();
            let word = ranks.hear(0);
            assert!(word.starts_with("whole"), "seed {seed}: {word}");
            noticed += u32::from(word != "whole");
            assert!(ranks.ranks[0].wait().success(), "seed {seed}");
        }
    }
    assert!(noticed > 0, "no nonsense ever did anything: it was not written where it matters");
    assert!(shm_files().is_empty());
}

fn poll(cq: &mut CompletionQueue) -> Vec<Completion> {
    let blank = Completion { wr_id: 0, status: WcStatus::GeneralErr, opcode: WcOpcode::Send, byte_len: 0, imm: None, qp_num: 0 };
    let mut out = [blank; 32];
    let n = cq.poll(&mut out);
    out[..n].to_vec()
}

/// Two processes with a queue pair each. Rank 1 is killed with rank 0's requests of every kind outstanding.
fn bare_fabric(ctx: &Ctx) {
    let soft_wire = if std::env::var("RHT_WIRE").expect("RHT_WIRE") == "tcp" { SoftWire::Tcp } else { SoftWire::Shm };
    let config = Config { soft_wire, ..Config::default() };
    let domain = devices(&Arc::new(config)).expect("devices")[0].open().expect("open");
    let mut cq = domain.create_cq(false).expect("create_cq");
    let qp = cq.create_qp(&QpCaps::default(), RailStats::detached()).expect("create_qp");
    let mem = Mem::new(8 << 20);
    // SAFETY: the memory outlives its registration.
    let memory = unsafe { UserMemory::new(mem.ptr(0), mem.len()) };
    let region = domain.register(memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ).expect("register");
    let chan = ctx.to(1 - ctx.rank);
    let mut hello = cq.qp(qp).endpoint().0.to_vec();
    hello.extend_from_slice(&(mem.ptr(0) as u64).to_le_bytes());
    hello.extend_from_slice(&region.rkey().to_le_bytes());
    chan.send(&hello).expect("rank");
    let theirs = chan.recv();
    cq.qp(qp).connect(&Endpoint(theirs[..128].try_into().expect("an endpoint"))).expect("connect");
    let remote_addr = u64::from_le_bytes(theirs[128..136].try_into().expect("eight"));
    let rkey = u32::from_le_bytes(theirs[136..140].try_into().expect("four"));
    let sge = Sge { addr: mem.ptr(0) as u64, len: 4096, lkey: region.lkey() };
    let request = |wr_id, opcode, len| SendWr {
        wr_id,
        opcode,
        payload: Payload::Sge(Sge { len, ..sge }),
        remote_addr,
        rkey,
        imm: 5,
        signaled: true,
        when_sent: false,
    };
    if ctx.rank == 1 {
        cq.qp(qp).post_recv(&RecvWr { wr_id: 1, sge }).expect("post_recv");
        until("the first message", || poll(&mut cq).first().map(|c| assert_eq!(c.status, WcStatus::Success)));
        ctx.say("kill me");
        loop {
            std::hint::spin_loop();
        }
    }
    (0..3).for_each(|i| cq.qp(qp).post_recv(&RecvWr { wr_id: 100 + i, sge }).expect("post_recv"));
    cq.qp(qp).post_send(&[request(1, Opcode::Send, 4096)]).expect("post_send");
    until("the first message", || poll(&mut cq).first().map(|c| assert_eq!((c.wr_id, c.status), (1, WcStatus::Success))));
    let kinds = [Opcode::Send, Opcode::Write, Opcode::Read, Opcode::WriteWithImm];
    for i in 0..20u64 {
        cq.qp(qp).post_send(&[request(10 + i, kinds[i as usize % 4], 1 << (i % 23))]).expect("post_send");
    }
    ctx.say("loaded");
    let mut got = Vec::new();
    until("the end of all requests", || {
        got.extend(poll(&mut cq));
        (got.len() >= 23).then_some(())
    });
    let status = |id: u64| got.iter().find(|c| c.wr_id == id).map(|c| c.status);
    assert_eq!(status(10), Some(WcStatus::RetryExcErr), "{:?}", cq.qp(qp).error());
    (11..30).chain(100..103).for_each(|id| assert_eq!(status(id), Some(WcStatus::WrFlushErr), "request {id}"));
    assert_eq!(got.len(), 23);
    ctx.say("told");
}

#[test]
fn a_killed_peer_under_the_bare_fabric() {
    for wire in ["shm", "tcp"] {
        let mut ranks = World::new("bare_fabric", 2).env("RHT_WIRE", wire).spawn();
        ranks.expect(1, "kill me");
        ranks.expect(0, "loaded");
        ranks.ranks[1].signal(libc::SIGKILL);
        ranks.expect(0, "told");
        assert!(ranks.ranks[0].wait().success());
    }
}
