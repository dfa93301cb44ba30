//! Workers that are processes, one of which is killed or stopped at each message of the tensors' flow (`src/base/stage.rs`): what the others are told, and how
//! often, and that they can abort what they wait for.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use railhead::base::config::{Config, Debug};
use railhead::base::error::Error;
use railhead::base::stage::Stage;
use railhead::link::device::Device;
use railhead::store::FileStore;
use railhead::tensor::{Key, Manager, Mode, Rendezvous, Tensor};

use super::mesh_faults::{variable, world};
use crate::support::{Ctx, PATIENCE, Ranks, Role, World, until};

pub const ROLES: &[(&str, Role)] = &[("tensor_works", works), ("tensor_aborts", aborts)];

const WORKERS: usize = 3;
/// How long the others may take to notice that a worker was killed.
const NOTICED: Duration = Duration::from_secs(3);
/// Tensors for each other worker in each step, and how much larger each is in the next one.
const TENSORS: [usize; 3] = [0, 1000, 100_000];
/// Why a worker aborts what it waits for.
const GIVEN_UP: &str = "given up";
/// The step in which all is well again.
const LAST: u64 = 1 << 40;

/// The number of the step that a worker aborts in each step.
fn aborted(worker: usize, id: u64) -> u64 {
    (1 << 32) + id * WORKERS as u64 + worker as u64
}

fn name(worker: usize) -> String {
    format!("/job:w/task:{worker}")
}

pub fn key(from: usize, to: usize, edge: &str) -> String {
    let device = |worker| format!("{}/device:CPU:0", name(worker));
    Key::new(&device(from), 1, &device(to), edge, 0, 0).expect("a key").text().to_owned()
}

pub fn step(manager: &Manager, id: u64) -> Rendezvous {
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

/// A receive that has ended: its number, whose tensor it is, and why that has not come.
type Ended = (usize, usize, Option<String>);

/// The receives of a step, all with callbacks.
struct Asked {
    count: usize,
    ended: Arc<Mutex<Vec<Ended>>>,
}

impl Asked {
    /// Asks the others for all that they produce in a step.
    fn ask(manager: &Manager, worker: usize, id: u64) -> Asked {
        let received = step(manager, id);
        let mut asked = Asked { count: 0, ended: Arc::default() };
        for from in (0..WORKERS).filter(|from| *from != worker) {
            TENSORS.iter().for_each(|grows| asked.add(&received, from, worker, &grows.to_string()));
            asked.add(&step(manager, aborted(from, id)), from, worker, "any");
            // Its request is taken back.
            let _ = received.recv(&key(from, worker, "never"), Duration::from_micros(1));
        }
        asked
    }

    fn add(&mut self, step: &Rendezvous, from: usize, worker: usize, edge: &str) {
        let (ended, number) = (self.ended.clone(), self.count);
        self.count += 1;
        let end = move |result: Result<Tensor, Error>| {
            let why = result.err().map(|why| why.to_string()).filter(|why| !why.ends_with(": not today"));
            ended.lock().expect("a lock").push((number, from, why));
        };
        step.recv_async(&key(from, worker, edge), end).expect("asked");
    }

    /// Whether each has ended, and once.
    fn once(&self) -> bool {
        let ended = self.ended.lock().expect("a lock");
        ended.len() == self.count && ended.iter().map(|(number, ..)| number).collect::<BTreeSet<_>>().len() == self.count
    }

    /// Why some have failed, and whose tensors those were.
    fn failed(&self) -> (BTreeSet<String>, BTreeSet<usize>) {
        let ended = self.ended.lock().expect("a lock");
        ended.iter().filter_map(|(_, from, why)| Some((why.clone()?, *from))).unzip()
    }
}

/// A worker that has met the others in a file, on the device RHT_DEVICE, or the first.
pub fn connected(ctx: &Ctx) -> Manager {
    let wanted = std::env::var("RHT_DEVICE").unwrap_or_default();
    let device = Device::open(Config::from_env_or(Debug::None), &wanted).expect("a device");
    let names: Vec<String> = (0..ctx.size).map(name).collect();
    let mode = if variable("RHT_MODE") == "direct" { Mode::Direct } else { Mode::Buffered };
    let manager =
        Manager::new(device, &name(ctx.rank), &names.iter().map(String::as_str).collect::<Vec<_>>(), true, mode).expect("a manager");
    manager.connect(&FileStore::new(variable("RHT_STORE"), None).expect("a store"), PATIENCE).expect("connected");
    // Nobody is killed while another connects.
    ctx.barrier();
    manager
}

fn forget(manager: &Manager, id: u64) {
    manager.cleanup(id);
    (0..WORKERS).for_each(|worker| manager.cleanup(aborted(worker, id)));
}

/// Produces and consumes step by step until a worker is lost: says what it was told then, by each receive that failed, and how many did not end once.
fn works(ctx: &Ctx) {
    let manager = connected(ctx);
    ctx.say("works");
    for id in 1.. {
        produce(&manager, ctx.rank, id);
        let asked = Asked::ask(&manager, ctx.rank, id);
        let mut ran = 0;
        while ran < asked.count {
            let more = manager.run(PATIENCE);
            assert!(more > 0, "{ran} of {} have ended", asked.count);
            ran += more;
        }
        let (why, lost) = asked.failed();
        if why.is_empty() {
            forget(&manager, id - 1);
            continue;
        }
        // The others may be further than this one.
        (1..4).for_each(|ahead| produce(&manager, ctx.rank, id + ahead));
        let once = asked.once() && ran == asked.count;
        let why = why.into_iter().collect::<Vec<_>>().join("; ");
        ctx.say(&format!("lost {lost:?}, once: {once}: {why}"));
        assert_eq!(ctx.parent.text(), "go");
        assert_eq!(manager.run(Duration::ZERO), 0, "called once more");
        return;
    }
}

/// The same until it is told to abort what it waits for, or another one has done so: says what ended in another way. Then all exchange tensors.
fn aborts(ctx: &Ctx) {
    let manager = connected(ctx);
    ctx.say("works");
    let others = || (0..WORKERS).filter(|other| *other != ctx.rank);
    // Others may be two steps further.
    let abort = |id: u64| {
        let all = (id..id + 3).flat_map(|id| (0..WORKERS).map(move |worker| aborted(worker, id)).chain([id]));
        all.for_each(|id| step(&manager, id).abort(&Error::usage(GIVEN_UP)).expect("a step"));
    };
    for id in 1.. {
        produce(&manager, ctx.rank, id);
        let asked = Asked::ask(&manager, ctx.rank, id);
        let (mut ran, mut is_told) = (0, false);
        while ran < asked.count {
            ran += manager.run(Duration::from_millis(10));
            if !is_told && ctx.parent.ready() {
                assert_eq!(ctx.parent.text(), "abort");
                is_told = true;
                abort(id);
            }
        }
        let (why, _) = asked.failed();
        if why.is_empty() && !is_told {
            forget(&manager, id - 1);
            continue;
        }
        abort(id);
        let once = asked.once() && ran == asked.count;
        let other: Vec<&String> = why.iter().filter(|why| !why.ends_with(GIVEN_UP)).collect();
        ctx.say(&format!("once: {once}, otherwise: {other:?}"));
        break;
    }
    assert_eq!(ctx.parent.text(), "go on");
    let last = step(&manager, LAST);
    for to in others() {
        let tensor = Tensor::new(1, &[], vec![ctx.rank as u8; 50_000]).expect("a tensor");
        last.send(&key(ctx.rank, to, "last"), tensor).expect("produced");
    }
    for from in others() {
        let tensor = last.recv(&key(from, ctx.rank, "last"), PATIENCE).expect("a tensor");
        assert!(tensor.bytes().iter().all(|byte| *byte == from as u8) && tensor.len() == 50_000);
    }
    assert_eq!(manager.run(Duration::ZERO), 0, "called once more");
    ctx.barrier();
}

/// Workers in that role, one of which stops, or is killed, when it is at that message for the nth time; and which it is.
fn stage_world(role: &'static str, folder: &Path, (stage, nth, action): (Stage, usize, &str), wire: &str, mode: &str) -> (World, usize) {
    let victim = nth % WORKERS;
    let world = world(role, WORKERS, folder, wire).env("RAILHEAD_TCP_BUFFER_KIB", "64").env("RHT_MODE", mode);
    (world.env_of(victim, "RH_STAGE", &format!("{}:{nth}={action}", stage.name())), victim)
}

fn killed_at(stage: Stage, nth: usize, wire: &str, mode: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let (world, victim) = stage_world("tensor_works", folder.path(), (stage, nth, "kill"), wire, mode);
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

/// A worker stops at a message, and the others abort what they wait for: it ends at once; and all goes on when the one that was stopped does.
fn aborted_at(stage: Stage, nth: usize, wire: &str, mode: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let (world, victim) = stage_world("tensor_aborts", folder.path(), (stage, nth, "stop"), wire, mode);
    let case = format!("{} {nth} over {wire}, {mode}", stage.name());
    let mut ranks: Ranks = world.spawn();
    (0..WORKERS).for_each(|worker| ranks.expect(worker, "works"));
    until(&format!("{case}: worker {victim} to stop"), || (ranks.ranks[victim].state() == 'T').then_some(()));
    let others: Vec<usize> = (0..WORKERS).filter(|worker| *worker != victim).collect();
    others.iter().for_each(|worker| ranks.tell(*worker, "abort"));
    let told = Instant::now();
    for worker in others {
        let left = NOTICED.saturating_sub(told.elapsed());
        let said = ranks.ranks[worker].chan.recv_within(left).unwrap_or_else(|e| panic!("{case}: worker {worker}: {e}"));
        assert_eq!(String::from_utf8_lossy(&said), "once: true, otherwise: []", "{case}: worker {worker}");
    }
    ranks.ranks[victim].signal(libc::SIGCONT);
    assert_eq!(ranks.hear(victim), "once: true, otherwise: []", "{case}: worker {victim}");
    (0..WORKERS).for_each(|worker| ranks.tell(worker, "go on"));
    ranks.finish();
}

/// Those of the other mode's flow.
fn is_elsewhere(stage: Stage, mode: &str) -> bool {
    match mode {
        "direct" => matches!(stage, Stage::TensorBufferRequest | Stage::TensorBufferResponse | Stage::TensorBufferIdle),
        _ => matches!(stage, Stage::TensorMetaDataUpdate | Stage::TensorReRequest),
    }
}

/// At each message of each mode's flow, one case after the other.
fn at_each(wire: &str, case: fn(Stage, usize, &str, &str)) {
    for mode in ["buffered", "direct"] {
        let stages = Stage::ALL.iter().filter(|stage| stage.name().starts_with("tensor_") && !is_elsewhere(**stage, mode));
        for (nth, stage) in stages.enumerate() {
            case(*stage, 2 + nth, wire, mode);
        }
        case(Stage::RecvHalf, 10, wire, mode);
    }
}

#[test]
fn the_others_name_the_worker_that_was_killed_at_any_message_on_shared_memory() {
    at_each("shm", killed_at);
}

#[test]
fn the_others_name_the_worker_that_was_killed_at_any_message_on_tcp() {
    at_each("tcp", killed_at);
}

#[test]
fn what_waits_for_a_worker_that_is_stopped_at_any_message_can_be_aborted_on_shared_memory() {
    at_each("shm", aborted_at);
}

#[test]
fn what_waits_for_a_worker_that_is_stopped_at_any_message_can_be_aborted_on_tcp() {
    at_each("tcp", aborted_at);
}
