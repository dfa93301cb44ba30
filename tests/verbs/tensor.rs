//! Workers that are threads, on the libibverbs that is only memory: what tensors ask of a device, and a request that fails.

use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use railhead::base::config::{Config, Fabric};
use railhead::base::log::{self, Level};
use railhead::link::device::Device;
use railhead::store::HashStore;
use railhead::tensor::{Key, Manager, Mode, Rendezvous, Tensor};

use super::fake_ibverbs::{Control, Fake, NEWEST};

const TIMEOUT: Duration = Duration::from_secs(60);
/// `ibv_wc_status` of a peer that does not answer (rdma-core v55 libibverbs/verbs.h).
const RETRY_EXC_ERR: i64 = 12;

#[track_caller]
fn inside(name: &str) {
    Fake::new(NEWEST).run_all(&["--exact", &format!("tensor::{name}"), "--test-threads=1"]).says("1 passed");
}

#[test]
fn workers_exchange_tensors() {
    inside("all_that_workers_do");
}

#[test]
fn a_request_that_fails_names_the_worker() {
    inside("a_request_fails");
}

#[test]
fn a_device_without_a_name_is_the_first() {
    inside("the_first_device");
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

fn tensor(len: usize, seed: usize) -> Tensor {
    Tensor::new(1, &[len as i64], (0..len).map(|i| (i * 7 + seed) as u8).collect()).expect("a tensor")
}

/// Workers on these devices, by turns.
fn workers(mode: Mode, devices: &[&str], count: usize, f: impl Fn(usize, Manager) + Sync) {
    log::set_stderr(Level::Warn);
    let store = HashStore::new();
    let names: Vec<String> = (0..count).map(name).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    std::thread::scope(|scope| {
        for worker in 0..count {
            let (store, names, f) = (&store, &names, &f);
            let config = Config { fabric: Fabric::Verbs, ..Config::from_env() };
            let device = Device::open(config, devices[worker % devices.len()]).expect("a device");
            scope.spawn(move || {
                let manager = Manager::new(device, names[worker], names, true, mode).expect("a manager");
                manager.connect(store, TIMEOUT).expect("connected");
                f(worker, manager);
            });
        }
    });
}

#[test]
#[ignore = "needs the fake libibverbs"]
fn all_that_workers_do() {
    let control = Control::new();
    let all = [(&["fake0"][..], 2), (&["fake0", "fake1"], 3), (&["fake0+fake1"], 2)];
    for (mode, (devices, count)) in [Mode::Buffered, Mode::Direct].into_iter().flat_map(|mode| all.map(|which| (mode, which))) {
        let done = Barrier::new(count);
        workers(mode, devices, count, |worker, manager| {
            let (next, last) = ((worker + 1) % count, (worker + count - 1) % count);
            for (id, len) in [0, 100, 70_000, 3_000_000, 5].into_iter().enumerate() {
                let step = step(&manager, id as u64);
                step.send(&key(worker, next, "x"), tensor(len, worker)).expect("sent");
                assert!(step.recv(&key(last, worker, "x"), TIMEOUT).expect("received") == tensor(len, last), "{len} bytes");
                // Taken back, and asked for again.
                assert!(step.recv(&key(last, worker, "late"), Duration::from_millis(1)).is_err());
                done.wait();
                step.send(&key(worker, next, "late"), Tensor::dead()).expect("sent");
                assert!(step.recv(&key(last, worker, "late"), TIMEOUT).expect("received").is_dead());
                done.wait();
                manager.cleanup(id as u64);
            }
            let over = step(&manager, 0).recv(&key(last, worker, "x"), Duration::from_millis(100));
            assert!(over.is_err());
            done.wait();
        });
        let left = ["mrs", "qps", "cqs", "pds", "contexts", "violations"].map(|name| control.get(name));
        assert_eq!(left, [0; 6], "{devices:?}, {mode:?}");
    }
}

#[test]
#[ignore = "needs the fake libibverbs"]
fn a_request_fails() {
    let control = Control::new();
    let both = Barrier::new(2);
    workers(Mode::Buffered, &["fake0", "fake1"], 2, |worker, manager| {
        let (other, step) = (1 - worker, step(&manager, 1));
        step.send(&key(worker, other, "x"), tensor(9, 9)).expect("sent");
        assert!(step.recv(&key(other, worker, "x"), TIMEOUT).is_ok());
        both.wait();
        if worker == 0 {
            control.set("status", RETRY_EXC_ERR);
        }
        both.wait();
        let answers = Arc::new(Mutex::new(Vec::new()));
        let into = answers.clone();
        step.recv_async(&key(other, worker, "never"), move |result| into.lock().expect("a lock").push(result)).expect("asked");
        assert_eq!(manager.run(TIMEOUT), 1);
        let error = answers.lock().expect("a lock").pop().expect("an answer").expect_err("a failed request").to_string();
        assert!(error.starts_with(&format!("worker {}: ", name(other))), "{error}");
        both.wait();
    });
}

#[test]
#[ignore = "needs the fake libibverbs"]
fn the_first_device() {
    let control = Control::new();
    let open = |name: &str| Device::open(Config { fabric: Fabric::Verbs, ..Config::from_env() }, name);
    let device = open("").expect("a device");
    assert_eq!(device.name(), "fake0");
    let error = open("fake7").err().expect("refused").to_string();
    assert_eq!(error, "there is no device \"fake7\"; there are fake0, fake1");
    drop(device);
    assert_eq!(["pds", "contexts"].map(|name| control.get(name)), [0; 2]);
}
