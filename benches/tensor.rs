//! Named tensors between processes of this host: `make bench-tensor`, where benches/tensor.py runs this beside others.
//!
//! Arguments: MODE (buffered or direct), BYTES of a tensor, KEYS that are asked for at any time, WORKERS and SECONDS. This process consumes; the other
//! workers, which it starts, produce, and are always ahead of it. Prints a line of JSON: `gb_s`, and `p50_us`, the median from a request to its
//! callback. Where each worker has a core who waits polls, as `railhead perf` does; else it sleeps.

use std::collections::HashMap;
use std::process::{Child, Command};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use railhead::base::config::{Config, Debug};
use railhead::base::error::Result;
use railhead::base::mem::UserMemory;
use railhead::mesh::Device;
use railhead::store::FileStore;
use railhead::tensor::{Key, Manager, Mode, Rendezvous, Tensor};

const PATIENCE: Duration = Duration::from_secs(60);
/// The step in which the producers are told that it is over.
const LAST: u64 = 0;
/// Requests that are not measured, for each key.
const WARMUP: u64 = 3;

struct Setting {
    mode: Mode,
    bytes: usize,
    keys: usize,
    workers: usize,
    seconds: f64,
}

impl Setting {
    fn parse(arguments: &[String]) -> Option<Setting> {
        let [mode, bytes, keys, workers, seconds] = arguments else { return None };
        let mode = match mode.as_str() {
            "buffered" => Mode::Buffered,
            "direct" => Mode::Direct,
            _ => return None,
        };
        let setting = Setting {
            mode,
            bytes: bytes.parse().ok()?,
            keys: keys.parse().ok()?,
            workers: workers.parse().ok()?,
            seconds: seconds.parse().ok()?,
        };
        (setting.keys > 0 && setting.workers > 1).then_some(setting)
    }

    /// Who produces a key, and the key.
    fn key(&self, number: usize) -> (usize, String) {
        let from = 1 + number % (self.workers - 1);
        (from, key(from, 0, &format!("edge_{number}")))
    }

    /// The end of a worker, connected to all others.
    fn connect(&self, worker: usize, folder: &str) -> Manager {
        let names: Vec<String> = (0..self.workers).map(name).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let device = Device::open(Config::from_env_or(Debug::Warn), "").expect("a device");
        let manager = Manager::new(device, &name(worker), &names, false, self.mode).expect("a manager");
        manager.set_sync(std::thread::available_parallelism().is_ok_and(|cores| self.workers <= cores.get()));
        manager.connect(&FileStore::new(format!("{folder}/store"), None).expect("a store"), PATIENCE).expect("connected");
        manager
    }
}

fn name(worker: usize) -> String {
    format!("/job:worker/task:{worker}")
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

/// The steps of which something is missing. Who has all of one cleans it up.
struct Steps<'a> {
    manager: &'a Manager,
    keys: usize,
    open: HashMap<u64, (Rendezvous, usize)>,
}

impl<'a> Steps<'a> {
    fn new(manager: &'a Manager, keys: usize) -> Steps<'a> {
        Steps { manager, keys, open: HashMap::new() }
    }

    fn get(&mut self, id: u64) -> &Rendezvous {
        &self.open.entry(id).or_insert_with(|| (step(self.manager, id), self.keys)).0
    }

    fn done(&mut self, id: u64) {
        let Some((_, missing)) = self.open.get_mut(&id) else { return };
        *missing -= 1;
        if *missing == 0 {
            self.open.remove(&id);
            self.manager.cleanup(id);
        }
    }
}

/// Sends each key of this worker's, step by step, two steps ahead of who takes them.
fn produce(setting: &Setting, worker: usize, folder: &str) {
    let manager = setting.connect(worker, folder);
    let bytes = vec![worker as u8; setting.bytes].leak();
    // SAFETY: memory that nobody else has, until the process ends.
    let memory = unsafe { UserMemory::new(bytes.as_mut_ptr(), bytes.len()) };
    manager.register(memory).expect("registered");
    let (over, is_over) = mpsc::channel();
    step(&manager, LAST).recv_async(&key(0, worker, "over"), move |result| _ = over.send(result.is_ok())).expect("asked");
    let keys: Vec<String> =
        (0..setting.keys).map(|number| setting.key(number)).filter(|(from, _)| *from == worker).map(|(_, key)| key).collect();
    let (released, all_released) = mpsc::channel();
    let mut steps = Steps::new(&manager, keys.len());
    let mut next = LAST;
    loop {
        while !keys.is_empty() && steps.open.len() < 2 {
            next += 1;
            for key in &keys {
                let released = released.clone();
                let release = Box::new(move || _ = released.send(next));
                steps.get(next).send_from(key, 0, &[memory.len() as i64], memory, release).expect("sent");
            }
        }
        manager.run(PATIENCE);
        all_released.try_iter().for_each(|id| steps.done(id));
        if is_over.try_recv().is_ok() {
            return;
        }
    }
}

/// Asks for all keys again and again: bytes per second, and how long a request has taken.
fn consume(setting: &Setting, folder: &str) -> (f64, Vec<Duration>) {
    let manager = setting.connect(0, folder);
    let mut steps = Steps::new(&manager, setting.keys);
    let (got, all_got) = mpsc::channel();
    let ask = |steps: &mut Steps, number: usize, id: u64| {
        let (key, step) = (setting.key(number).1, steps.get(id));
        let (got, asked, bytes) = (got.clone(), Instant::now(), setting.bytes);
        let callback = move |result: Result<Tensor>| {
            let time = asked.elapsed();
            // Those that are asked for at the end come to nobody.
            let _ = got.send(result.map(|tensor| {
                assert_eq!(tensor.len(), bytes);
                (number, id, time)
            }));
        };
        step.recv_async(&key, callback).expect("asked");
    };
    (0..setting.keys).for_each(|number| ask(&mut steps, number, LAST + 1));
    let (mut began, mut left) = (None, WARMUP * setting.keys as u64);
    let mut times = Vec::new();
    loop {
        assert!(manager.run(PATIENCE) > 0, "nothing within {PATIENCE:?}");
        for (number, id, time) in all_got.try_iter().map(|got| got.expect("a tensor")) {
            steps.done(id);
            ask(&mut steps, number, id + 1);
            left = left.saturating_sub(1);
            if began.is_some() {
                times.push(time);
            }
        }
        match began {
            None if left == 0 => began = Some(Instant::now()),
            Some(began) if began.elapsed().as_secs_f64() >= setting.seconds && !times.is_empty() => {
                let rate = (times.len() * setting.bytes) as f64 / began.elapsed().as_secs_f64();
                (1..setting.workers).for_each(|worker| {
                    let over = Tensor::new(0, &[], Vec::new()).expect("a tensor");
                    step(&manager, LAST).send(&key(0, worker, "over"), over).expect("sent");
                });
                return (rate, times);
            }
            _ => {}
        }
    }
}

/// Processes that are ended if this one fails.
struct Producers(Vec<Child>);

impl Drop for Producers {
    fn drop(&mut self) {
        for producer in &mut self.0 {
            if std::thread::panicking() {
                let _ = producer.kill();
            }
            let _ = producer.wait();
        }
    }
}

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let producer = arguments.iter().position(|argument| argument == "--produce").map(|at| arguments.split_off(at));
    let Some(setting) = Setting::parse(&arguments) else {
        eprintln!("usage: tensor MODE BYTES KEYS WORKERS SECONDS");
        std::process::exit(2);
    };
    if let Some([_, worker, folder]) = producer.as_deref() {
        return produce(&setting, worker.parse().expect("a worker"), folder);
    }
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path().to_str().expect("UTF-8");
    let start = |worker: usize| {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.args(&arguments).args(["--produce", &worker.to_string(), folder]).spawn().expect("a producer")
    };
    let producers = Producers((1..setting.workers).map(start).collect());
    let (rate, mut times) = consume(&setting, folder);
    drop(producers);
    times.sort_unstable();
    println!("{{\"gb_s\": {:.4}, \"p50_us\": {:.3}}}", rate / 1e9, times[times.len() / 2].as_secs_f64() * 1e6);
}
