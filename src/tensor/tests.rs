//! Workers that are threads of one process.

mod bounds;
mod direct;
mod faults;
mod order;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::*;
use crate::base::config::{Config, SoftWire};
use crate::base::error::{Error, Result};
use crate::base::sync::lock;
use crate::base::testing::Barrier;
use crate::link::device::Device;
use crate::store::HashStore;

const TIMEOUT: Duration = Duration::from_secs(60);
const WIRES: [Way; 4] = [
    Way(SoftWire::Shm, Mode::Buffered),
    Way(SoftWire::Tcp, Mode::Buffered),
    Way(SoftWire::Shm, Mode::Direct),
    Way(SoftWire::Tcp, Mode::Direct),
];

/// How tensors go from worker to worker.
#[derive(Debug, Clone, Copy)]
struct Way(SoftWire, Mode);

impl From<SoftWire> for Way {
    fn from(wire: SoftWire) -> Way {
        Way(wire, Mode::Buffered)
    }
}

fn device(wire: SoftWire) -> Arc<Device> {
    Device::open(Config { socket_ifname: "=lo".into(), soft_wire: wire, stats: false, ..Config::default() }, "").unwrap()
}

fn name(worker: usize) -> String {
    format!("/job:worker/replica:0/task:{worker}")
}

fn manager(way: impl Into<Way>, worker: usize, count: usize, tolerate_dup_recv: bool) -> Manager {
    let Way(wire, mode) = way.into();
    let names: Vec<String> = (0..count).map(name).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    Manager::new(device(wire), &name(worker), &names, tolerate_dup_recv, mode).unwrap()
}

/// Runs a thread for each worker, each with a device of its own.
fn workers<T: Send>(way: impl Into<Way>, count: usize, f: impl Fn(usize, Manager) -> T + Sync) -> Vec<T> {
    workers_that(true, way, count, f)
}

/// The same, of which a tensor may be had again, or once.
fn workers_that<T: Send>(tolerate_dup_recv: bool, way: impl Into<Way>, count: usize, f: impl Fn(usize, Manager) -> T + Sync) -> Vec<T> {
    let way = way.into();
    let store = HashStore::new();
    std::thread::scope(|scope| {
        let worker = |worker| {
            let (store, f) = (&store, &f);
            scope.spawn(move || {
                let manager = manager(way, worker, count, tolerate_dup_recv);
                manager.connect(store, TIMEOUT).unwrap();
                f(worker, manager)
            })
        };
        let threads: Vec<_> = (0..count).map(worker).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The key of what one worker produces for another.
fn key(from: usize, to: usize, edge: &str) -> String {
    let device = |worker| format!("{}/device:CPU:0", name(worker));
    Key::new(&device(from), 1, &device(to), edge, 0, 0).unwrap().text().to_owned()
}

fn contents(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

fn tensor(len: usize, seed: u64) -> Tensor {
    Tensor::new(9, &[len as i64, 1], contents(len, seed)).unwrap()
}

fn step(manager: &Manager, id: u64) -> Rendezvous {
    let step = manager.step(id);
    step.initialize().unwrap();
    step
}

/// Runs callbacks until so many have run.
fn run(manager: &Manager, mut count: usize) {
    while count > 0 {
        let ran = manager.run(TIMEOUT);
        assert!(ran > 0, "nothing within 60 s; {count} are missing");
        count = count.checked_sub(ran).expect("more callbacks than receives");
    }
}

#[test]
fn tensors_of_any_size_come_whole_whoever_is_first() {
    const SIZES: [usize; 5] = [0, 1, 4095, 1 << 20, 9 << 20];
    for wire in WIRES {
        let order = Barrier::new(2);
        workers(wire, 2, |worker, manager| {
            for producer_first in [true, false] {
                let step = step(&manager, u64::from(producer_first));
                let edge = |len: usize| key(0, 1, &format!("of {len}"));
                if worker == 0 {
                    if !producer_first {
                        // The other one waits, or is about to.
                        order.wait();
                    }
                    SIZES.iter().for_each(|len| step.send(&edge(*len), tensor(*len, *len as u64)).unwrap());
                    if producer_first {
                        order.wait();
                    }
                } else {
                    order.wait();
                    for len in SIZES {
                        let got = step.recv(&edge(len), TIMEOUT).unwrap();
                        assert!(got == tensor(len, len as u64), "{len} bytes, producer first: {producer_first}");
                        assert_eq!((got.meta().data_type, got.meta().shape()), (9, [len as i64, 1].as_slice()));
                    }
                }
            }
            order.wait();
        });
    }
}

#[test]
fn a_tensor_that_changes_its_shape_each_step_goes_through_one_buffer() {
    for wire in WIRES {
        let done = Barrier::new(2);
        workers(wire, 2, |worker, manager| {
            for id in 0..60u64 {
                // It grows, and between that it is small, dead, or empty.
                let value = match id % 4 {
                    0 => Tensor::dead(),
                    1 => tensor(0, id),
                    2 => tensor(10, id),
                    _ => tensor(id as usize * 5000, id),
                };
                let (step, edge) = (step(&manager, id), key(0, 1, "grows"));
                match worker {
                    0 => step.send(&edge, value).unwrap(),
                    _ => assert!(step.recv(&edge, TIMEOUT).unwrap() == value, "step {id}"),
                }
            }
            done.wait();
        });
    }
}

#[test]
fn two_steps_with_one_name_are_not_mixed_up() {
    for wire in WIRES {
        let done = Barrier::new(2);
        workers(wire, 2, |worker, manager| {
            let (edge, got) = (key(0, 1, "x"), Arc::new(Mutex::new(Vec::new())));
            if worker == 0 {
                // In the order that is not asked for.
                (0..10u64).rev().for_each(|id| step(&manager, id).send(&edge, tensor(30_000, id)).unwrap());
            } else {
                for id in 0..10u64 {
                    let got = got.clone();
                    let take = move |result: Result<Tensor>| lock(&got).push((id, result.unwrap() == tensor(30_000, id)));
                    step(&manager, id).recv_async(&edge, take).unwrap();
                }
                run(&manager, 10);
                let mut got = std::mem::take(&mut *lock(&got));
                got.sort_unstable();
                assert_eq!(got, (0..10).map(|id| (id, true)).collect::<Vec<_>>());
            }
            done.wait();
        });
    }
}

#[test]
fn three_workers_exchange_a_thousand_keys_both_ways() {
    const KEYS: usize = 1000;
    for wire in WIRES {
        let done = Barrier::new(3);
        workers(wire, 3, |worker, manager| {
            let step = step(&manager, 1);
            let others = || (0..3).filter(|other| *other != worker);
            let len = |i: usize| (i * 37) % 5000;
            let came = Arc::new(AtomicUsize::new(0));
            for other in others() {
                for i in 0..KEYS {
                    let came = came.clone();
                    let take = move |result: Result<Tensor>| {
                        assert!(result.unwrap() == tensor(len(i), (other * KEYS + i) as u64));
                        came.fetch_add(1, Ordering::Relaxed);
                    };
                    step.recv_async(&key(other, worker, &i.to_string()), take).unwrap();
                    step.send(&key(worker, other, &i.to_string()), tensor(len(i), (worker * KEYS + i) as u64)).unwrap();
                }
            }
            run(&manager, 2 * KEYS);
            assert_eq!(came.load(Ordering::Relaxed), 2 * KEYS);
            done.wait();
        });
    }
}

#[test]
fn a_worker_is_its_own_consumer_and_needs_no_connection() {
    let manager = manager(SoftWire::Shm, 0, 2, true);
    let step = step(&manager, 1);
    step.send(&key(0, 0, "early"), tensor(100, 1)).unwrap();
    assert!(step.recv(&key(0, 0, "early"), TIMEOUT).unwrap() == tensor(100, 1));
    let got = Arc::new(Mutex::new(None));
    let take = got.clone();
    step.recv_async(&key(0, 0, "late"), move |result| *lock(&take) = Some(result.unwrap())).unwrap();
    assert_eq!(manager.run(Duration::ZERO), 0);
    step.send(&key(0, 0, "late"), Tensor::dead()).unwrap();
    assert!(lock(&got).is_none(), "callbacks run in `run` alone");
    assert_eq!(manager.run(Duration::ZERO), 1);
    assert!(lock(&got).take().unwrap().is_dead());
    assert_eq!(step.send(&key(0, 0, "late"), tensor(1, 1)).unwrap_err().to_string(), format!("Duplicated send: {}", key(0, 0, "late")));
    let error = step.recv(&key(1, 0, "x"), TIMEOUT).unwrap_err().to_string();
    assert_eq!(error, format!("worker {} is not connected", name(1)));
}

#[test]
fn what_is_asked_before_a_step_is_initialised_waits_for_that() {
    for wire in WIRES {
        let (asked, done) = (Barrier::new(2), Barrier::new(2));
        workers(wire, 2, |worker, manager| {
            let (edge, own) = (key(0, 1, "x"), key(0, 0, "own"));
            let step = manager.step(5);
            let take = |result: Result<Tensor>| assert!(result.unwrap() == tensor(100, 1));
            if worker == 0 {
                step.send(&edge, tensor(100, 1)).unwrap();
                step.send(&own, tensor(100, 1)).unwrap();
                step.recv_async(&own, take).unwrap();
                asked.wait();
                // Nobody has been given it, though it was produced and asked for.
                asked.wait();
                assert_eq!(manager.run(Duration::ZERO), 0);
                step.initialize().unwrap();
                run(&manager, 1);
            } else {
                step.recv_async(&edge, take).unwrap();
                asked.wait();
                assert_eq!(manager.run(Duration::from_millis(20)), 0);
                step.initialize().unwrap();
                assert_eq!(manager.run(Duration::from_millis(50)), 0);
                asked.wait();
                run(&manager, 1);
            }
            done.wait();
        });
    }
}

#[test]
fn several_tensors_come_with_one_callback() {
    for wire in WIRES {
        let done = Barrier::new(2);
        workers(wire, 2, |worker, manager| {
            let step = step(&manager, 1);
            let keys: Vec<String> = ["a", "b", "c", "dead"].iter().map(|edge| key(0, 1, edge)).collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            if worker == 0 {
                (0..3).for_each(|i| step.send(keys[2 - i], tensor(20_000 * i, i as u64)).unwrap());
                step.send(keys[3], Tensor::dead()).unwrap();
            } else {
                let results = Arc::new(Mutex::new(Vec::new()));
                let take = || {
                    let results = results.clone();
                    move |result| lock(&results).push(result)
                };
                step.recv_all_async(&keys[..3], take()).unwrap();
                run(&manager, 1);
                let got = lock(&results).pop().unwrap().unwrap();
                assert!(got == (0..3).map(|i| tensor(20_000 * (2 - i), 2 - i as u64)).collect::<Vec<_>>());
                step.recv_all_async(&[keys[0], keys[3], keys[1]], take()).unwrap();
                run(&manager, 1);
                let error = lock(&results).pop().unwrap().unwrap_err().to_string();
                assert_eq!(error, format!("The tensor returned for {} was not valid.", keys[3]));
                step.recv_all_async(&[], take()).unwrap();
                run(&manager, 1);
                assert_eq!(lock(&results).pop().unwrap().unwrap(), []);
            }
            done.wait();
        });
    }
}

#[test]
fn of_several_that_fail_the_first_is_told_once_the_last_has_come() {
    workers(SoftWire::Shm, 1, |_, manager| {
        let step = step(&manager, 1);
        let late = manager.step(2);
        let (own, nobodys) = (key(0, 0, "late"), key(7, 0, "nobody's"));
        let error = Arc::new(Mutex::new(None));
        let ask = |step: &Rendezvous, keys: &[&str]| {
            let take = error.clone();
            step.recv_all_async(keys, move |result| *lock(&take) = result.err()).unwrap();
        };
        ask(&step, &[&own, "no key", &nobodys]);
        assert_eq!(manager.run(Duration::ZERO), 0, "one has not come");
        assert!(lock(&error).is_none());
        step.send(&own, tensor(1, 1)).unwrap();
        run(&manager, 1);
        let first = lock(&error).take().expect("an error").to_string();
        assert!(first.contains("key \"no key\" has not five parts"), "{first}");
        // The first in time, whichever key it is of: this one's waits for its step.
        ask(&late, &[&own, "no key"]);
        late.abort(&Error::usage("not wanted")).unwrap();
        run(&manager, 1);
        let first = lock(&error).take().expect("an error").to_string();
        assert!(first.contains("key \"no key\" has not five parts"), "{first}");
    });
}

#[test]
fn a_callback_may_call_anything() {
    let done = Barrier::new(2);
    workers(SoftWire::Shm, 2, |worker, manager| {
        let step = step(&manager, 1);
        let (there, back) = (key(0, 1, "there"), key(1, 0, "back"));
        let manager = Arc::new(manager);
        if worker == 0 {
            step.send(&there, tensor(50_000, 1)).unwrap();
            assert!(step.recv(&back, TIMEOUT).unwrap() == tensor(50_000, 1));
        } else {
            let (again, inside, answer) = (step.clone(), manager.clone(), back.clone());
            let take = move |result: Result<Tensor>| {
                again.send(&answer, result.unwrap()).unwrap();
                assert!(again.recv(&there, TIMEOUT).unwrap() == tensor(50_000, 1), "once more, as it stays");
                assert_eq!(inside.run(Duration::ZERO), 0);
                inside.cleanup(2);
            };
            step.recv_async(&key(0, 1, "there"), take).unwrap();
            run(&manager, 1);
        }
        done.wait();
    });
}

/// Nobody wants them any more, and the buffer is free for the next.
#[test]
fn tensors_that_come_too_late_are_thrown_away() {
    for wire in WIRES {
        let (gave_up, done) = (Barrier::new(2), Barrier::new(2));
        workers(wire, 2, |worker, manager| {
            let edge = key(0, 1, "x");
            for id in 0..5 {
                let step = step(&manager, id);
                if worker == 0 {
                    gave_up.wait();
                    step.send(&edge, tensor(70_000, id)).unwrap();
                } else {
                    assert!(matches!(step.recv(&edge, Duration::from_millis(2)), Err(Error::Timeout(_))));
                    gave_up.wait();
                }
            }
            let step = step(&manager, 9);
            match worker {
                0 => step.send(&edge, tensor(80_000, 9)).unwrap(),
                _ => assert!(step.recv(&edge, TIMEOUT).unwrap() == tensor(80_000, 9)),
            }
            done.wait();
        });
    }
}

#[test]
fn any_number_of_threads_share_a_manager() {
    const THREADS: usize = 4;
    for wire in WIRES {
        let done = Barrier::new(2);
        workers(wire, 2, |worker, manager| {
            let (step, other) = (step(&manager, 1), 1 - worker);
            let called = Arc::new(AtomicUsize::new(0));
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let (manager, step, called) = (&manager, &step, &called);
                    scope.spawn(move || {
                        for i in 0..40 {
                            let (edge, len) = (format!("{thread} {i}"), i * 1000);
                            step.send(&key(worker, other, &edge), tensor(len, i as u64)).unwrap();
                            if thread % 2 == 0 {
                                assert!(step.recv(&key(other, worker, &edge), TIMEOUT).unwrap() == tensor(len, i as u64));
                            } else {
                                let called = called.clone();
                                let take = move |result: Result<Tensor>| {
                                    _ = called.fetch_add(result.unwrap().bytes().len() + 1, Ordering::Relaxed)
                                };
                                step.recv_async(&key(other, worker, &edge), take).unwrap();
                                manager.run(Duration::from_millis(1));
                            }
                        }
                    });
                }
            });
            let all = THREADS / 2 * (0..40).map(|i| i * 1000 + 1).sum::<usize>();
            while called.load(Ordering::Relaxed) < all {
                assert!(manager.run(TIMEOUT) > 0);
            }
            assert_eq!((called.load(Ordering::Relaxed), manager.run(Duration::ZERO)), (all, 0));
            done.wait();
        });
    }
}

#[test]
fn a_receive_has_its_time_and_may_be_repeated() {
    for wire in WIRES {
        let (gave_up, done) = (Barrier::new(2), Barrier::new(2));
        workers(wire, 2, |worker, manager| {
            let (step, edge) = (step(&manager, 1), key(0, 1, "x"));
            if worker == 0 {
                gave_up.wait();
                step.send(&edge, tensor(70_000, 1)).unwrap();
            } else {
                // Another one waits as long as it takes.
                let got = Arc::new(AtomicUsize::new(0));
                let count = got.clone();
                let take = move |result: Result<Tensor>| _ = count.fetch_add(result.unwrap().bytes().len(), Ordering::Relaxed);
                step.recv_async(&edge, take).unwrap();
                for _ in 0..3 {
                    let error = step.recv(&edge, Duration::from_millis(5)).unwrap_err();
                    let Error::Timeout(text) = &error else { panic!("{error}") };
                    assert!(text.starts_with(&format!("Timed out waiting for notification: {edge} of step 1 @ ")), "{text}");
                }
                gave_up.wait();
                assert!(step.recv(&edge, TIMEOUT).unwrap() == tensor(70_000, 1));
                run(&manager, 1);
                assert_eq!(got.load(Ordering::Relaxed), 70_000);
                let own = step.recv(&key(1, 1, "own"), Duration::from_millis(5)).unwrap_err();
                assert!(matches!(own, Error::Timeout(_)));
                step.send(&key(1, 1, "own"), tensor(3, 3)).unwrap();
                assert!(step.recv(&key(1, 1, "own"), TIMEOUT).unwrap() == tensor(3, 3));
            }
            done.wait();
        });
    }
}
