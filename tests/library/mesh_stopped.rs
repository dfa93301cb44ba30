//! Meshes of processes, one of which is stopped for a while: what the others are told, when, and what becomes of their memory.

use std::time::Duration;

use railhead::mesh::{DataType, Op, Options, Reduction};

use crate::library::mesh_faults::{Case, LENS, connected, end, memory, number, options, start, variable, working, world};
use crate::support::{Ctx, PATIENCE, Rank, Role, until};

pub const ROLES: &[(&str, Role)] = &[("mesh_is_written_to", is_written_to)];

/// When it goes on, it is told of the others, and everybody comes to an end.
#[test]
fn a_wait_for_a_rank_that_is_stopped_names_it_when_its_time_is_over() {
    const STOPPED: usize = 1;
    let [few, many] = LENS;
    for (what, len, wire, ranks, sync) in [
        ("allreduce", few, "shm", 2, false),
        ("allreduce by ring", many, "shm", 3, true),
        ("allreduce by halving", many, "shm", 4, false),
        ("barrier", few, "tcp", 4, false),
        ("message", few, "shm", 3, false),
        ("slot", few, "tcp", 3, false),
        ("slot", many, "shm", 2, false),
    ] {
        let (folder, case) = (tempfile::tempdir().expect("a folder"), Case { what, len, wire, ranks, sync });
        // Seed 1: who has failed closes its mesh.
        let world = working(case, folder.path(), None, 1, Duration::from_secs(1));
        // Who is stopped while it writes to the memory of a collective holds that one up: see below.
        let writes = len == many && wire == "shm" && what != "slot";
        let mut ranks = start(if writes { world.env("RAILHEAD_CMA", "0") } else { world });
        ranks.ranks[STOPPED].signal(libc::SIGSTOP);
        let others = (0..case.ranks).filter(|rank| *rank != STOPPED);
        let said: Vec<String> = others.map(|rank| ranks.hear(rank)).collect();
        // One of them may wait for the other alone, and for that only until it leaves.
        let named = |said: &String| said.contains(" waited for 1.0 s for ") && said.contains(&format!("rank {STOPPED}"));
        assert!(said.iter().any(named), "{case:?}: {said:?}");
        ranks.ranks[STOPPED].signal(libc::SIGCONT);
        // Its own time is over, too, if it has waited.
        let told = ranks.hear(STOPPED);
        assert!((0..case.ranks).any(|rank| rank != STOPPED && told.contains(&format!("rank {rank}"))), "{case:?}: {told}");
        end(ranks, 0..case.ranks);
    }
}

/// Does what RHT_WHAT says again and again, while another thread of rank 0's waits in the same mesh.
fn is_written_to(ctx: &Ctx) {
    let mut bytes = vec![1; LENS[1]];
    let mesh = connected(ctx);
    std::thread::scope(|scope| {
        if ctx.rank == 0 {
            let barrier = || mesh.barrier(Options { tag: 1, ..options(PATIENCE) }).expect_err("nobody else comes");
            scope.spawn(move || ctx.say(&format!("barrier: {}", barrier())));
        }
        let (to, options) = (memory(&mut bytes), options(Duration::from_millis(number("RHT_TIMEOUT_MS"))));
        let work = || match &*variable("RHT_WHAT") {
            "broadcast" => mesh.broadcast(to, 1, options),
            _ => mesh.allreduce(to, Reduction::Of(DataType::U8, Op::Max), options),
        };
        // A rank that is quick copies a whole message alone. Scratch memory is written to otherwise from the second time on.
        let rounds = if variable("RHT_WHAT") == "broadcast" { usize::MAX } else { 1 };
        let Some(error) = std::iter::repeat_with(work).take(rounds).find_map(Result::err) else { return mesh.close() };
        bytes.fill(0xAA);
        assert!(ctx.rank == 1 || ctx.parent.text() == "say");
        ctx.say(&format!("work: {error}"));
    });
    assert_eq!(ctx.parent.text(), "close");
    mesh.close();
    ctx.say(if bytes.iter().all(|&byte| byte == 0xAA) { "untouched" } else { "touched" });
}

/// A wait is over in time, for all but whose memory the rank that is stopped may still write to: those get theirs back when it does no more, and not before.
#[test]
fn memory_is_given_back_when_a_stopped_rank_writes_to_it_no_more() {
    let (waits, is_given_up) = ((1000, "0"), (PATIENCE.as_millis(), "1"));
    for (what, signal, (timeout, peer_timeout)) in [
        ("broadcast", libc::SIGCONT, waits),
        ("broadcast", libc::SIGKILL, waits),
        ("allreduce", libc::SIGCONT, waits),
        ("broadcast", libc::SIGCONT, is_given_up),
        ("allreduce", libc::SIGCONT, is_given_up),
    ] {
        let stopped = (0..100).find_map(|_| {
            let folder = tempfile::tempdir().expect("a folder");
            let world = world("mesh_is_written_to", 2, folder.path(), "shm").env("RHT_WHAT", what);
            let world = world.env("RHT_TIMEOUT_MS", &timeout.to_string()).env_of(0, "RAILHEAD_PEER_TIMEOUT_S", peer_timeout);
            let ranks = world.env_of(1, "RH_STAGE", "send_shared=stop").spawn();
            // Who is through without a stop closes its mesh, and is heard of.
            let Rank { stage, .. } = &ranks.ranks[1];
            until("a stop, or an end", || if stage.ready() { Some(true) } else { ranks.ranks[0].chan.ready().then_some(false) })
                .then_some((ranks, folder))
        });
        let (mut ranks, _folder) = stopped.expect("a rank that stops");
        let why = if peer_timeout == "0" { " waited for 1.0 s for " } else { "(RAILHEAD_PEER_TIMEOUT_S)" };
        let named = |said: &str, of: &str| assert!(said.starts_with(of) && said.contains(why) && said.contains("rank 1"), "{what}: {said}");
        named(&ranks.hear(0), "barrier: ");
        ranks.tell(0, "say");
        if what == "broadcast" {
            assert!(ranks.is_silent(0), "given back under a writer");
            ranks.ranks[1].signal(signal);
            named(&ranks.hear(0), "work: ");
            ranks.tell(0, "close");
        } else {
            // It writes to scratch memory.
            named(&ranks.hear(0), "work: ");
            ranks.tell(0, "close");
            assert!(ranks.is_silent(0), "scratch memory is gone under a writer");
            ranks.ranks[1].signal(signal);
        }
        if signal == libc::SIGCONT {
            let said = ranks.hear(1);
            assert!(said.starts_with("work: ") && said.contains("rank 0"), "{what}: {said}");
            ranks.tell(1, "close");
        }
        ranks.expect(0, "untouched");
        ranks.ranks[1].wait();
        assert!(ranks.ranks[0].wait().success());
    }
}
