//! What a mesh, or workers that exchange tensors, cost on which nothing happens: no thread of the process wakes up or computes, whether one waits or none does.

use std::path::Path;
use std::time::Duration;

use railhead::mesh::UnboundBuffer;
use railhead::tensor::Tensor;

use super::mesh_faults::{connected, memory, options, variable, world};
use super::tensor_faults;
use crate::support::{Ctx, PATIENCE, Role, World, until};

pub const ROLES: &[(&str, Role)] = &[("mesh_idles", idles), ("tensor_idles", tensor_idles)];

/// Shorter than a second, after which a sleeping driver may look whether its peers are there.
const WINDOW: Duration = Duration::from_millis(900);

/// Rank 1 does nothing until it is told to. Rank 0 waits, as RHT_WAITS says.
fn idles(ctx: &Ctx) {
    let mut bytes = [ctx.rank as u8; 8];
    let mesh = connected(ctx);
    let waits = variable("RHT_WAITS");
    let buffer = (waits != "nothing").then(|| UnboundBuffer::new(&mesh, memory(&mut bytes)).expect("a buffer"));
    mesh.barrier(options(PATIENCE)).expect("all are here");
    ctx.say("idles");
    match (&*waits, &buffer, ctx.rank) {
        ("receive", Some(buffer), 0) => {
            buffer.recv(&[1], 3, 0, None).expect("asked");
            buffer.wait_recv(PATIENCE).expect("a message");
        }
        ("receive", Some(buffer), _) => {
            assert_eq!(ctx.parent.text(), "go on");
            buffer.send(0, 3, 0, None).expect("asked");
            buffer.wait_send(PATIENCE).expect("sent");
        }
        ("barrier", _, 0) => mesh.barrier(options(PATIENCE)).expect("all have come"),
        ("barrier", ..) => {
            assert_eq!(ctx.parent.text(), "go on");
            mesh.barrier(options(PATIENCE)).expect("all have come");
        }
        _ => assert_eq!(ctx.parent.text(), "go on"),
    }
    mesh.barrier(options(PATIENCE)).expect("all are here");
}

/// Worker 1 does nothing until it is told to. Worker 0 waits, as RHT_WAITS says.
fn tensor_idles(ctx: &Ctx) {
    let manager = tensor_faults::connected(ctx);
    let (step, key) = (tensor_faults::step(&manager, 1), tensor_faults::key(1, 0, "x"));
    let waits = variable("RHT_WAITS");
    ctx.say("idles");
    match (&*waits, ctx.rank) {
        ("receive", 0) => _ = step.recv(&key, PATIENCE).expect("a tensor"),
        ("callback", 0) => {
            step.recv_async(&key, |tensor| _ = tensor.expect("a tensor")).expect("asked");
            assert_eq!(manager.run(PATIENCE), 1);
        }
        _ => {
            assert_eq!(ctx.parent.text(), "go on");
            if ctx.rank == 1 {
                step.send(&key, Tensor::new(1, &[], vec![1; 8]).expect("a tensor")).expect("produced");
            }
        }
    }
    ctx.barrier();
}

/// How often the threads of a process have gone to sleep or were interrupted, and the nanoseconds that they have run.
fn cost(pid: i32) -> Vec<(String, u64, u64)> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
    let of = |task: &Path| {
        let read = |name: &str| std::fs::read_to_string(task.join(name)).unwrap_or_default();
        let status = read("status");
        let switches = status.lines().filter(|line| line.contains("ctxt_switches:"));
        let switches = switches.map(|line| line.rsplit('\t').next().and_then(|n| n.parse::<u64>().ok()).expect("a number")).sum();
        // Where the kernel counts it.
        let ran = read("schedstat").split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
        (read("comm").trim().to_owned(), switches, ran)
    };
    let mut all: Vec<_> = tasks.flatten().map(|task| of(&task.path())).collect();
    all.sort();
    all
}

/// Whether all threads sleep: one that is kept from its core by others does not run either.
fn sleeps(pid: i32) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("threads");
    let mut states = tasks.flatten().map(|task| std::fs::read_to_string(task.path().join("status")).unwrap_or_default());
    states.all(|status| status.lines().any(|line| line.starts_with("State:\tS")))
}

/// Until nothing has moved for a moment.
fn settled(pid: i32) -> Vec<(String, u64, u64)> {
    until("a process that sleeps", || {
        let before = cost(pid);
        std::thread::sleep(Duration::from_millis(30));
        (sleeps(pid) && cost(pid) == before).then_some(before)
    })
}

/// Two ranks, of which those are told to go on that do not wait.
fn costs_nothing(world: World, waits: &str, waiting: &[&str], case: &str) {
    let mut ranks = world.env("RHT_WAITS", waits).spawn();
    (0..2).for_each(|rank| ranks.expect(rank, "idles"));
    let pids = [0, 1].map(|rank| ranks.ranks[rank].pid());
    let before = pids.map(settled);
    std::thread::sleep(WINDOW);
    assert_eq!(before, pids.map(cost), "{waits} over {case}: threads, their switches, nanoseconds");
    let who = if waiting.contains(&waits) { 1..2 } else { 0..2 };
    who.for_each(|rank| ranks.tell(rank, "go on"));
    ranks.finish();
}

#[test]
fn a_mesh_on_which_nothing_happens_costs_nothing() {
    for wire in ["shm", "tcp"] {
        for waits in ["receive", "barrier", "buffer", "nothing"] {
            let folder = tempfile::tempdir().expect("a folder");
            costs_nothing(world("mesh_idles", 2, folder.path(), wire), waits, &["receive", "barrier"], wire);
        }
    }
}

#[test]
fn workers_between_which_nothing_happens_cost_nothing() {
    for (wire, mode) in [("shm", "buffered"), ("tcp", "direct")] {
        for waits in ["receive", "callback", "nothing"] {
            let folder = tempfile::tempdir().expect("a folder");
            let world = world("tensor_idles", 2, folder.path(), wire).env("RHT_MODE", mode);
            costs_nothing(world, waits, &["receive", "callback"], &format!("{wire}, {mode}"));
        }
    }
}
