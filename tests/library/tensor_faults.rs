//! Workers that are processes, one of which is killed at each message of the tensors' flow (`src/base/stage.rs`): what the others are told, and how often.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use railhead::base::config::{Config, Debug};
use railhead::base::error::Error;
use railhead::base::stage::Stage;
use railhead::link::device::Device;
use railhead::store::FileStore;
use railhead::tensor::{Key, Manager, Mode, Rendezvous, Tensor};

use super::mesh_faults::{variable, world};
use crate::support::{Ctx, PATIENCE, Ranks, Role};

pub const ROLES: &[(&str, Role)] = &[("tensor_works", works)];

const WORKERS: usize = 3;
/// How long the others may take to notice that a worker was killed.
const NOTICED: Duration = Duration::from_secs(3);
/// Tensors for each other worker in each step, and how much larger each is in the next one.
const TENSORS: [usize; 3] = [0, 1000, 100_000];
/// The number of the step that a worker aborts in each step.
fn aborted(worker: usize, id: u64) -> u64 {
    (1 << 32) + id * WORKERS as u64 + worker as u64
}

fn name(worker: usize) -> String {
    format!("/job:w/task:{worker}")
}

fn key(from: usize, to: usize, edge: &str) -> String {
    let device = |worker| format!("{}/device:CPU:0", name(worker));
    Key::new(&device(from), 1, &device(to), edge, 0, 0).expect("a key").text().to_owned()
}

fn step(manager: &Manager, id: u64) -> Rendezvous {
    let step = manager.step(id);
    step.initialize().expect("a step");
    step
}

/// All that the others may ask this worker for in a step.
fn produce(manager: &Manager, worker: usize, id: u64) {
    let (produced, aborted) = (step(manager, id), step(manager, aborted(worker, id)));
    aborted.abort(&Error::usage("not today")).expect("a step");
    for to in (0..WORKERS).filter(|to| *to != worker) {
        for grows in TENSORS {
            let tensor = Tensor::new(1, &[], vec![id as u8; grows * id as usize]).expect("a tensor");
            produced.send(&key(worker, to, &grows.to_string()), tensor).expect("produced");
        }
    }
}

/// Produces and consumes step by step until a worker is lost: says what it was told then, by each receive that failed, and how many did not end once.
fn works(ctx: &Ctx) {
    let device = Device::open(Config::from_env_or(Debug::None), "").expect("a device");
    let names: Vec<String> = (0..WORKERS).map(name).collect();
    let mode = if variable("RHT_MODE") == "direct" { Mode::Direct } else { Mode::Buffered };
    let manager =
        Manager::new(device, &name(ctx.rank), &names.iter().map(String::as_str).collect::<Vec<_>>(), true, mode).expect("a manager");
    manager.connect(&FileStore::new(variable("RHT_STORE"), None).expect("a store"), PATIENCE).expect("connected");
    // Nobody is killed while another connects.
    ctx.barrier();
    ctx.say("works");
    for id in 1.. {
        produce(&manager, ctx.rank, id);
        let received = step(&manager, id);
        let ended = Arc::new(Mutex::new(Vec::new()));
        let mut asked = 0;
        for from in (0..WORKERS).filter(|from| *from != ctx.rank) {
            let mut ask = |step: &Rendezvous, edge: &str| {
                let (ended, key) = (ended.clone(), key(from, ctx.rank, edge));
                let number = asked;
                asked += 1;
                let end = move |result: Result<Tensor, Error>| {
                    let why = result.err().map(|why| why.to_string()).filter(|why| !why.ends_with(": not today"));
                    ended.lock().expect("a lock").push((number, from, why));
                };
                step.recv_async(&key, end).expect("asked");
            };
            TENSORS.iter().for_each(|grows| ask(&received, &grows.to_string()));
            ask(&step(&manager, aborted(from, id)), "any");
            // Its request is taken back.
            let _ = received.recv(&key(from, ctx.rank, "never"), Duration::from_micros(1));
        }
        let mut ran = 0;
        while ran < asked {
            let more = manager.run(PATIENCE);
            assert!(more > 0, "{ran} of {asked} have ended");
            ran += more;
        }
        let ended = ended.lock().expect("a lock");
        let failed: BTreeSet<String> = ended.iter().filter_map(|(_, _, why)| why.clone()).collect();
        if failed.is_empty() {
            manager.cleanup(id - 1);
            (0..WORKERS).for_each(|worker| manager.cleanup(aborted(worker, id - 1)));
            continue;
        }
        // The others may be further than this one.
        (1..4).for_each(|ahead| produce(&manager, ctx.rank, id + ahead));
        let lost: BTreeSet<usize> = ended.iter().filter(|(.., why)| why.is_some()).map(|(_, from, _)| *from).collect();
        let once = ended.iter().map(|(number, ..)| number).collect::<BTreeSet<_>>().len() == asked && ran == asked;
        let why = failed.into_iter().collect::<Vec<_>>().join("; ");
        ctx.say(&format!("lost {lost:?}, once: {once}: {why}"));
        assert_eq!(ctx.parent.text(), "go");
        assert_eq!(manager.run(Duration::ZERO), 0, "called once more");
        return;
    }
}

fn killed_at(stage: Stage, nth: usize, wire: &str, mode: &str) {
    let (folder, victim) = (tempfile::tempdir().expect("a folder"), nth % WORKERS);
    let world = world("tensor_works", WORKERS, folder.path(), wire);
    let world = world.env("RAILHEAD_TCP_BUFFER_KIB", "64").env("RHT_MODE", mode).env_of(
        victim,
        "RH_STAGE",
        &format!("{}:{nth}=kill", stage.name()),
    );
    let case = format!("{} {nth} over {wire}, {mode}", stage.name());
    let mut ranks: Ranks = world.spawn();
    let others: Vec<usize> = (0..WORKERS).filter(|worker| *worker != victim).collect();
    others.iter().for_each(|worker| ranks.expect(*worker, "works"));
    // By the stage alone.
    assert_eq!(ranks.ranks[victim].wait().signal(), Some(libc::SIGKILL), "{case}");
    let killed = Instant::now();
    for worker in &others {
        let left = NOTICED.saturating_sub(killed.elapsed());
        let said = ranks.ranks[*worker].chan.recv_within(left).unwrap_or_else(|e| panic!("{case}: worker {worker}: {e}"));
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(said.starts_with(&format!("lost {{{victim}}}, once: true: worker {}: ", name(victim))), "{case}: worker {worker}: {said}");
    }
    for worker in others {
        ranks.tell(worker, "go");
        assert!(ranks.ranks[worker].wait().success(), "{case}: worker {worker}");
    }
}

/// Those of the other mode's flow.
fn is_elsewhere(stage: Stage, mode: &str) -> bool {
    match mode {
        "direct" => matches!(stage, Stage::TensorBufferRequest | Stage::TensorBufferResponse | Stage::TensorBufferIdle),
        _ => matches!(stage, Stage::TensorMetaDataUpdate | Stage::TensorReRequest),
    }
}

fn killed_at_each(wire: &str) {
    for mode in ["buffered", "direct"] {
        let stages = Stage::ALL.iter().filter(|stage| stage.name().starts_with("tensor_") && !is_elsewhere(**stage, mode));
        for (nth, stage) in stages.enumerate() {
            killed_at(*stage, 2 + nth, wire, mode);
        }
        killed_at(Stage::RecvHalf, 10, wire, mode);
    }
}

#[test]
fn the_others_name_the_worker_that_was_killed_at_any_message_on_shared_memory() {
    killed_at_each("shm");
}

#[test]
fn the_others_name_the_worker_that_was_killed_at_any_message_on_tcp() {
    killed_at_each("tcp");
}
