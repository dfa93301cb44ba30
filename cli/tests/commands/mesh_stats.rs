//! `railhead stats` and `railhead top` beside ranks of a mesh: what they show is what was moved, and who waits for which rank, in what, since when.

use crate::support;

use std::process::Command;

use railhead::base::config::{Config, Debug};
use railhead::base::mem::UserMemory;
use railhead::mesh::{Algorithm, Buffer, DataType, Device, Mesh, Op, Options, Reduction, UnboundBuffer};
use serde_json::Value;
use support::{Ctx, PATIENCE, Ranks, Role, World, until};

pub const ROLES: &[(&str, Role)] = &[("mesh_stats", computes)];

const LONG: usize = 100_000;
const DIRECT: usize = 1 << 20;
/// A collective's tag, a message's, and a slot.
const TAGS: [u64; 3] = [77, 1 << 40, 5_000_000_000];

fn options(tag: u32) -> Options {
    Options { algorithm: Algorithm::Auto, tag, timeout: PATIENCE }
}

/// Ranks that connect by the test's channels, and do what the test says.
fn computes(ctx: &Ctx) {
    let device = Device::open(Config::from_env_or(Debug::Warn), "").expect("a device");
    let mesh = Mesh::new(device, ctx.rank, ctx.size).expect("a mesh");
    let others: Vec<usize> = (0..ctx.size).filter(|rank| *rank != ctx.rank).collect();
    let addresses: Vec<Vec<u8>> = others.iter().map(|peer| mesh.address(*peer).expect("an address")).collect();
    ctx.say("unconnected");
    assert_eq!(ctx.parent.text(), "connect");
    others.iter().zip(addresses).for_each(|(peer, address)| ctx.to(*peer).send(&address).expect("the other rank"));
    others.iter().for_each(|peer| mesh.connect_pair(*peer, &ctx.to(*peer).recv()).expect("connected"));
    ctx.barrier();
    let mut bytes = vec![0u8; DIRECT];
    let first = bytes.as_mut_ptr();
    // SAFETY: the bytes outlive all that is done with them.
    let memory = |len: usize| unsafe { UserMemory::new(first, len) };
    let sum = Reduction::Of(DataType::U8, Op::Sum);
    let (mine, peer) = (UnboundBuffer::new(&mesh, memory(DIRECT)).expect("a buffer"), (ctx.rank + 1) % ctx.size);
    let slot = match ctx.rank {
        0 => Buffer::recv_from(&mesh, 1, TAGS[2], memory(8)),
        _ => Buffer::send_to(&mesh, 0, TAGS[2], memory(8)),
    }
    .expect("a buffer");
    ctx.say("connected");
    loop {
        match ctx.parent.text().as_str() {
            "long" if ctx.rank == 0 => mine.send(peer, 1, 0, Some(LONG)).and_then(|()| mine.wait_send(PATIENCE)).map(drop),
            "long" => mine.recv(&[0], 1, 0, Some(LONG)).and_then(|()| mine.wait_recv(PATIENCE)).map(drop),
            "small" if ctx.rank == 1 => mine.send(0, 2, 0, Some(8)).and_then(|()| mine.wait_send(PATIENCE)).map(drop),
            "small" => mine.recv(&others, 2, 0, Some(8)).and_then(|()| mine.wait_recv(PATIENCE)).map(drop),
            "slot" if ctx.rank == 0 => slot.wait_recv(PATIENCE).map(drop),
            "slot" => slot.send(0, None, 0).and_then(|()| slot.wait_send(PATIENCE)).map(drop),
            "any" if ctx.rank == 0 => mine.recv(&others, TAGS[1], 0, Some(LONG)).and_then(|()| mine.wait_recv(PATIENCE)).map(drop),
            "any" => mine.send(0, TAGS[1], 0, Some(LONG)).and_then(|()| mine.wait_send(PATIENCE)).map(drop),
            "allreduce" => mesh.allreduce(memory(8), sum, options(TAGS[0] as u32)),
            "direct" => mesh.allreduce(memory(DIRECT), sum, options(0)),
            "barrier" => mesh.barrier(options(0)),
            "end" => return,
            other => panic!("{other}"),
        }
        .expect("it goes well");
        ctx.say("done");
    }
}

fn spawn(size: usize, env: &[(&str, &str)]) -> Ranks {
    let world = World::new("mesh_stats", size).env("RAILHEAD_SOCKET_IFNAME", "lo");
    let mut ranks = env.iter().fold(world, |world, (name, value)| world.env(name, value)).spawn();
    (0..size).for_each(|rank| ranks.expect(rank, "unconnected"));
    ranks
}

fn connect(ranks: &mut Ranks) {
    tell_all(ranks, "connect");
    (0..ranks.ranks.len()).for_each(|rank| ranks.expect(rank, "connected"));
}

fn tell_all(ranks: &Ranks, word: &str) {
    (0..ranks.ranks.len()).for_each(|rank| ranks.tell(rank, word));
}

fn end(ranks: Ranks) {
    tell_all(&ranks, "end");
    ranks.finish();
}

fn railhead(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_railhead")).args(args).output().expect("railhead");
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// A rank's pair with another.
fn pair(ranks: &Ranks, rank: usize, peer: usize) -> Value {
    let page: Value = serde_json::from_str(&railhead(&["stats", "--json", "--pid", &ranks.ranks[rank].pid().to_string()])).expect("JSON");
    let comms = page["processes"][0]["comms"].as_array().expect("comms").clone();
    let found = comms.iter().find(|comm| comm["peer_rank"] == peer).unwrap_or_else(|| panic!("no pair with rank {peer}: {page}"));
    assert_eq!((&found["direction"], &found["rank"]), (&Value::from("pair"), &Value::from(rank)), "{found}");
    found.clone()
}

/// Once a rank's wait for another is shown: its cause, what it is in, the tag, and the requests outstanding.
fn wait(ranks: &Ranks, rank: usize, peer: usize) -> (String, String, u64, u64) {
    until("a wait", || {
        let pair = pair(ranks, rank, peer);
        let wait = &pair["waits_for"];
        assert!(wait.is_null() || wait["for_s"].as_f64()? < PATIENCE.as_secs_f64(), "{pair}");
        let text = |name: &str| Some(wait[name].as_str()?.to_owned());
        Some((text("cause")?, text("operation")?, wait["tag"].as_u64()?, pair["outstanding"].as_u64()?))
    })
}

fn waited(cause: &str, operation: &str, tag: u64, outstanding: u64) -> (String, String, u64, u64) {
    (cause.into(), operation.into(), tag, outstanding)
}

#[test]
fn what_two_ranks_exchange_is_counted_on_both() {
    for env in [&[("RAILHEAD_SOFT_WIRE", "shm")][..], &[("RAILHEAD_SOFT_WIRE", "tcp")], &[("RAILHEAD_QPS_PER_RAIL", "2")]] {
        let mut ranks = spawn(2, env);
        connect(&mut ranks);
        // How often, and what each is to a rank: requests, and bytes in both directions. A long allreduce has
        // four blocks: of each, a piece and a result go each way.
        let work = [
            ("long", 3, 1, LONG),
            ("small", 5, 1, 8),
            ("slot", 2, 1, 8),
            ("allreduce", 4, 2, 16),
            ("direct", 2, 16, 2 * DIRECT),
            ("barrier", 3, 2, 0),
        ];
        for (word, times, ..) in work {
            for _ in 0..times {
                tell_all(&ranks, word);
                (0..2).for_each(|rank| ranks.expect(rank, "done"));
            }
        }
        let requests: u64 = work.iter().map(|(_, times, requests, _)| times * requests).sum();
        let bytes: u64 = work.iter().map(|(_, times, _, bytes)| times * *bytes as u64).sum();
        for rank in 0..2 {
            let pair = pair(&ranks, rank, 1 - rank);
            assert!(pair["waits_for"].is_null() && pair["outstanding"] == 0, "{pair}");
            let counters = &pair["counters"];
            for (name, expected) in [("ops", requests), ("completions", requests), ("bytes", bytes), ("errors", 0), ("stalls", 0)] {
                assert_eq!(counters[name], expected, "{env:?}, rank {rank}: {name} of {pair}");
            }
            assert!(pair["peer"].as_str().expect("text").starts_with(&format!("rank {}: ", 1 - rank)), "{pair}");
        }
        end(ranks);
    }
}

#[test]
fn a_collective_shows_which_rank_is_waited_for() {
    let mut ranks = spawn(3, &[("RAILHEAD_STALL_WARN_S", "0.2")]);
    until("a connection that is being made", || (pair(&ranks, 0, 1)["waits_for"]["cause"] == "handshake").then_some(()));
    connect(&mut ranks);
    for rank in 0..3 {
        (0..3).filter(|peer| *peer != rank).for_each(|peer| assert!(pair(&ranks, rank, peer)["waits_for"].is_null()));
    }
    // Ranks 0 and 1 swap once rank 2 has given its part to rank 0, from which it gets the result.
    (0..3).filter(|rank| *rank != 1).for_each(|rank| ranks.tell(rank, "allreduce"));
    assert_eq!(wait(&ranks, 0, 1), waited("peer_no_send", "allreduce", TAGS[0], 1));
    assert_eq!(wait(&ranks, 2, 0), waited("peer_no_send", "allreduce", TAGS[0], 1));
    for (rank, peer) in [(0, 2), (2, 1), (1, 0), (1, 2)] {
        let pair = pair(&ranks, rank, peer);
        assert!(pair["waits_for"].is_null(), "nobody waits for rank {peer}: {pair}");
    }
    until("the stall to be counted", || (pair(&ranks, 0, 1)["counters"]["stalls"] == 1).then_some(()));
    assert_eq!(pair(&ranks, 0, 2)["counters"]["stalls"], 0);
    let pid = ranks.ranks[0].pid().to_string();
    let since = || pair(&ranks, 0, 1)["waits_for"]["for_s"].as_f64().expect("seconds");
    let before = since();
    until("time to pass", || (since() > before).then_some(()));
    let text = railhead(&["stats", "--pid", &pid]);
    for part in ["the peer has not sent, for ", " s, in allreduce, tag 0x4d\n", "of rank 0 to rank 1: "] {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
    let samples = railhead(&["stats", "--prometheus", "--pid", &pid]);
    let waiting = samples.lines().filter(|line| line.starts_with("railhead_comm_waiting_seconds{")).collect::<Vec<_>>();
    let labels = "rank=\"0\",peer_rank=\"1\",cause=\"peer_no_send\",operation=\"allreduce\"}";
    assert!(matches!(&waiting[..], [one] if one.contains(labels)), "{waiting:?}");
    let top = railhead(&["top", "--once", "--interval", "0.1", "--pid", &pid]);
    for part in [" pair ", "rank 1 send", "allreduce, tag 0x4d: rank 1: ", ", pairs 0/s 0/s"] {
        assert!(top.contains(part), "no {part:?} in: {top}");
    }
    // It is over once rank 1 has come, and all that time was its.
    ranks.tell(1, "allreduce");
    (0..3).for_each(|rank| ranks.expect(rank, "done"));
    let over = pair(&ranks, 0, 1);
    assert!(over["waits_for"].is_null() && over["outstanding"] == 0, "{over}");
    assert!(over["waited_s"]["peer_no_send"].as_f64().is_some_and(|waited| waited > before), "{over}");
    end(ranks);
}

#[test]
fn messages_and_buffers_show_which_rank_is_waited_for() {
    let mut ranks = spawn(3, &[]);
    connect(&mut ranks);
    // Rank 0 waits for either; rank 2 has sent, and is gone, when rank 1 still has to.
    ranks.tell(0, "any");
    for peer in [1, 2] {
        assert_eq!(wait(&ranks, 0, peer), waited("peer_no_send", "recv_any", TAGS[1], 0));
    }
    ranks.tell(2, "any");
    [0, 2].iter().for_each(|rank| ranks.expect(*rank, "done"));
    assert!([1, 2].iter().all(|peer| pair(&ranks, 0, *peer)["waits_for"].is_null()));
    ranks.tell(0, "slot");
    assert_eq!(wait(&ranks, 0, 1), waited("peer_no_send", "buffer", TAGS[2], 1));
    assert!(pair(&ranks, 0, 2)["waits_for"].is_null());
    ranks.tell(1, "slot");
    [0, 1].iter().for_each(|rank| ranks.expect(*rank, "done"));
    // A sender waits for the receive.
    ranks.tell(1, "any");
    assert_eq!(wait(&ranks, 1, 0), waited("peer_no_receive", "send", TAGS[1], 1));
    assert!(railhead(&["top", "--once", "--interval", "0.1", "--pid", &ranks.ranks[1].pid().to_string()]).contains("rank 0 receive"));
    ranks.tell(0, "any");
    [0, 1].iter().for_each(|rank| ranks.expect(*rank, "done"));
    end(ranks);
}

/// A rank that is stopped is told as such, by its number.
#[test]
fn a_rank_that_is_stopped_is_named() {
    let mut ranks = spawn(2, &[]);
    connect(&mut ranks);
    ranks.ranks[1].signal(libc::SIGSTOP);
    until("the stop", || (ranks.ranks[1].state() == 'T').then_some(()));
    ranks.tell(0, "barrier");
    until("the cause", || (wait(&ranks, 0, 1) == waited("peer_stopped", "barrier", 0, 1)).then_some(()));
    assert!(railhead(&["top", "--once", "--interval", "0.1", "--pid", &ranks.ranks[0].pid().to_string()]).contains("rank 1 stopped"));
    ranks.ranks[1].signal(libc::SIGCONT);
    ranks.tell(1, "barrier");
    (0..2).for_each(|rank| ranks.expect(rank, "done"));
    end(ranks);
}
