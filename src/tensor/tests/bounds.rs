//! What stays bounded, what comes late, and what happens at the same time.

use std::sync::atomic::AtomicBool;

use super::*;

fn told_of(answers: &Mutex<Vec<Result<Tensor>>>) -> usize {
    lock(answers).len()
}

#[test]
fn buffers_of_names_that_are_not_used_any_more_are_given_up() {
    const KEYS: usize = 4500;
    let done = Barrier::new(2);
    workers(SoftWire::Shm, 2, |worker, manager| {
        let step = step(&manager, 1);
        let edge = |i: usize| key(0, 1, &format!("loop {i}"));
        if worker == 0 {
            (0..KEYS).for_each(|i| step.send(&edge(i), tensor(20, i as u64)).unwrap());
        } else {
            (0..KEYS).for_each(|i| assert!(step.recv(&edge(i), TIMEOUT).unwrap() == tensor(20, i as u64), "{i}"));
            // One that was given up is made anew.
            assert!(step.recv(&edge(0), TIMEOUT).unwrap() == tensor(20, 0));
        }
        done.wait();
        let [coming, going] = manager.with_adapter(&name(1 - worker), |adapter| adapter.buffers()).unwrap();
        // And those that are not idle yet, or of which the consumer is being told.
        assert!(coming + going >= 4096 && coming + going < 4096 + 50, "{coming} and {going}");
        done.wait();
    });
}

#[test]
fn a_buffer_that_grows_and_grows_is_mapped_as_before() {
    let done = Barrier::new(2);
    workers(SoftWire::Shm, 2, |worker, manager| {
        for id in 0..60 {
            let (step, len) = (step(&manager, id), 70_000 + id as usize * 8192);
            let edge = key(0, 1, "grows");
            if worker == 0 {
                step.send(&edge, tensor(len, id)).unwrap();
            } else {
                assert!(step.recv(&edge, TIMEOUT).unwrap() == tensor(len, id));
            }
        }
        done.wait();
        let shared = manager.with_adapter(&name(1 - worker), |adapter| adapter.shared_buffers());
        done.wait();
        // Each twice as large as the one before.
        assert_eq!(shared, Some((if worker == 0 { [0, 1] } else { [1, 0] }, 4)));
    });
}

#[test]
fn workers_of_one_host_map_each_others_large_buffers() {
    for (wire, shared, mapped) in [(SoftWire::Shm, 2, 800_000), (SoftWire::Tcp, 0, 0)] {
        let done = Barrier::new(2);
        workers(wire, 2, |worker, manager| {
            for (id, len) in [(1, 100_000), (2, 300_000)] {
                let step = step(&manager, id);
                for (edge, len) in [("small", 1000), ("a", 200_000), ("grows", len)] {
                    let edge = key(0, 1, edge);
                    if worker == 0 {
                        step.send(&edge, tensor(len, id)).unwrap();
                    } else {
                        assert!(step.recv(&edge, TIMEOUT).unwrap() == tensor(len, id));
                    }
                }
            }
            done.wait();
            let found = manager.with_adapter(&name(1 - worker), |adapter| (adapter.shared_buffers().0, adapter.mapped_bytes())).unwrap();
            done.wait();
            let ([coming, going], [received, sent]) = found;
            let (own, other) = if worker == 0 { ((going, sent), (coming, received)) } else { ((coming, received), (going, sent)) };
            assert_eq!((own.0, own.1 / 100_000 * 100_000, other), (shared, mapped, (0, 0)), "{wire:?}");
        });
    }
}

#[test]
fn what_is_not_waited_for_any_more_is_not_asked_for_either() {
    for wire in WIRES {
        let done = Barrier::new(2);
        workers(wire, 2, |worker, manager| {
            let there = step(&manager, 1_000_000);
            if worker == 1 {
                for id in 0..60 {
                    let step = step(&manager, id);
                    let edge = key(0, 1, "never");
                    match id % 3 {
                        0 => assert!(matches!(step.recv(&edge, Duration::from_millis(1)), Err(Error::Timeout(_)))),
                        other => {
                            step.recv_async(&edge, |result| assert!(result.is_err())).unwrap();
                            if other == 1 {
                                step.abort(&Error::usage("not wanted")).unwrap()
                            } else {
                                manager.cleanup(id)
                            }
                            run(&manager, 1);
                        }
                    }
                }
                // All answers of before come first.
                assert!(there.recv(&key(0, 1, "there"), TIMEOUT).unwrap() == tensor(9, 9));
                assert_eq!(manager.with_adapter(&name(0), |adapter| adapter.requests()), Some([0, 0]));
            } else {
                there.send(&key(0, 1, "there"), tensor(9, 9)).unwrap();
            }
            done.wait();
            if worker == 0 {
                assert_eq!(manager.with_adapter(&name(1), |adapter| adapter.requests()), Some([0, 0]));
                assert_eq!(manager.steps(), 1, "nothing is left of steps that only the other has");
            }
            done.wait();
        });
    }
}

#[test]
fn a_step_that_was_cleaned_up_long_ago_is_refused() {
    let done = Barrier::new(2);
    workers(SoftWire::Shm, 2, |worker, manager| {
        if worker == 0 {
            (0..3000).for_each(|id| manager.cleanup(id));
        }
        done.wait();
        if worker == 1 {
            let error = step(&manager, 5).recv(&key(0, 1, "x"), TIMEOUT).unwrap_err().to_string();
            assert_eq!(error, format!("worker {}: Cleanup 5", name(0)));
        }
        done.wait();
    });
}

/// However its time and its tensor coincide: it is not lost, and comes once where it may be had once.
#[test]
fn a_receive_that_gives_up_as_its_tensor_comes_may_be_repeated() {
    const TENSORS: u64 = 400;
    for (wire, tolerates) in WIRES.into_iter().flat_map(|wire| [(wire, false), (wire, true)]) {
        let round = Barrier::new(2);
        workers_that(tolerates, wire, 2, |worker, manager| {
            let step = step(&manager, 1);
            for i in 0..TENSORS {
                let (edge, value) = (key(0, 1, &format!("{i}")), tensor(if i % 4 == 0 { 40_000 } else { 100 }, i));
                round.wait();
                if worker == 0 {
                    step.send(&edge, value).unwrap();
                    continue;
                }
                let got = loop {
                    match step.recv(&edge, Duration::from_micros(i % 40)) {
                        Err(Error::Timeout(_)) => {}
                        got => break got.unwrap(),
                    }
                };
                assert!(got == value, "{i}");
                if !tolerates {
                    let error = step.recv(&edge, TIMEOUT).unwrap_err().to_string();
                    assert_eq!(error, format!("worker {}: Duplicated recv: {edge}", name(0)));
                }
            }
            round.wait();
        });
    }
}

#[test]
fn two_receives_of_what_may_be_had_once_are_one_too_many() {
    let done = Barrier::new(2);
    workers_that(false, SoftWire::Shm, 2, |worker, manager| {
        let (step, edge) = (step(&manager, 1), key(0, 1, "x"));
        if worker == 0 {
            done.wait();
            step.send(&edge, tensor(50, 5)).unwrap();
        } else {
            let got = Arc::new(Mutex::new(Vec::new()));
            let into = got.clone();
            step.recv_async(&edge, move |result| lock(&into).push(result)).unwrap();
            assert_eq!(step.recv(&edge, TIMEOUT).unwrap_err().to_string(), format!("Duplicated recv: {edge}"));
            done.wait();
            run(&manager, 1);
            assert!(lock(&got).pop().unwrap().unwrap() == tensor(50, 5));
        }
        done.wait();
    });
}

#[test]
fn a_tensor_is_copied_without_the_lock() {
    const LEN: usize = 32 << 20;
    let done = Barrier::new(2);
    workers(SoftWire::Shm, 2, |worker, manager| {
        let (edge, sent) = (key(0, 1, "large"), AtomicUsize::new(0));
        let value = |id: u64| Tensor::new(1, &[LEN as i64], vec![id as u8; LEN]).unwrap();
        let mut seen = false;
        for id in 1..8 {
            let step = step(&manager, id);
            if worker == 1 {
                step.recv_async(&edge, |result| drop(result.unwrap())).unwrap();
                // It is asked for by then.
                assert!(step.recv(&key(0, 1, "small"), TIMEOUT).is_ok());
                run(&manager, 1);
            } else {
                step.send(&key(0, 1, "small"), tensor(1, 1)).unwrap();
                let value = value(id);
                std::thread::scope(|scope| {
                    scope.spawn(|| {
                        step.send(&edge, value).unwrap();
                        sent.store(id as usize, Ordering::Release);
                    });
                    let looks = || manager.with_adapter(&name(1), |adapter| (adapter.is_copying(), adapter.is_through())).unwrap();
                    loop {
                        let was_sent = sent.load(Ordering::Acquire) == id as usize;
                        let (copies, through) = looks();
                        seen |= copies;
                        if was_sent && through {
                            break;
                        }
                        std::thread::yield_now();
                    }
                });
            }
            done.wait();
        }
        assert!(seen || worker == 1, "whoever sends keeps the lock while it copies");
    });
}

#[test]
fn what_is_asked_of_a_manager_that_is_closed_is_refused_at_once() {
    let manager = manager(SoftWire::Shm, 0, 1, true);
    let (step, called) = (step(&manager, 1), Arc::new(AtomicUsize::new(0)));
    manager.close();
    let count = || {
        let called = called.clone();
        move || _ = called.fetch_add(1, Ordering::Relaxed)
    };
    let closed = |result: Result<()>| assert_eq!(result.unwrap_err().to_string(), format!("worker {} has closed its manager", name(0)));
    let one = count();
    closed(step.recv_async(&key(0, 0, "x"), move |_| one()));
    for keys in [&[][..], &["no key"], &[&key(0, 0, "x"), &key(0, 0, "y")]] {
        let all = count();
        closed(step.recv_all_async(keys, move |_| all()));
    }
    assert_eq!((manager.run(TIMEOUT), called.load(Ordering::Relaxed)), (0, 0));
}

#[test]
fn callbacks_that_another_thread_runs_are_over_when_a_manager_is_closed() {
    let manager = manager(SoftWire::Shm, 0, 1, true);
    let (step, over, begun) = (step(&manager, 1), AtomicBool::new(false), Barrier::new(2));
    let (manager, begun) = (Arc::new(manager), Arc::new(begun));
    let (inside, waits, over) = (manager.clone(), begun.clone(), Arc::new(over));
    let ends = over.clone();
    step.send(&key(0, 0, "x"), tensor(1, 1)).unwrap();
    let callback = move |_| {
        waits.wait();
        while !inside.is_closed() {
            std::thread::yield_now();
        }
        (0..100).for_each(|_| std::thread::yield_now());
        // One that closes it, too, does not wait for itself.
        inside.close();
        ends.store(true, Ordering::Release);
    };
    step.recv_async(&key(0, 0, "x"), callback).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| manager.run(TIMEOUT));
        begun.wait();
        manager.close();
        assert!(over.load(Ordering::Acquire));
    });
}

#[test]
fn a_tensor_that_comes_with_the_news_that_its_producer_goes_is_there() {
    // In Direct mode who goes waits for all that it has written, for as long as it waits at all.
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        // What the peer would have to read out of the producer's memory goes with that.
        for len in [100, 5000] {
            let (asked, done, producer) = (Barrier::new(2), Barrier::new(2), Mutex::new(None));
            workers(wire, 2, |worker, manager| {
                let (edge, manager) = (key(0, 1, "x"), Arc::new(manager));
                let second = step(&manager, 2);
                if worker == 0 {
                    step(&manager, 1).send(&edge, tensor(len, 1)).unwrap();
                    asked.wait();
                    // The request is here, and the buffer is idle; then the other one looks at nothing.
                    while manager.with_adapter(&name(1), |adapter| adapter.requests()) != Some([0, 1]) {
                        manager.run(Duration::from_millis(1));
                    }
                    *lock(&producer) = Some(manager.clone());
                    asked.wait();
                    asked.wait();
                    second.send(&edge, tensor(len, 2)).unwrap();
                    manager.close();
                } else {
                    assert!(step(&manager, 1).recv(&edge, TIMEOUT).unwrap() == tensor(len, 1));
                    let answers = Arc::new(Mutex::new(Vec::new()));
                    let into = answers.clone();
                    second.recv_async(&edge, move |result| lock(&into).push(result)).unwrap();
                    asked.wait();
                    asked.wait();
                    let producer = lock(&producer).take().unwrap();
                    manager.with_driver_locked(|| {
                        asked.wait();
                        while !producer.is_closed() {
                            std::thread::yield_now();
                        }
                    });
                    run(&manager, 1);
                    assert_eq!(told_of(&answers), 1);
                    assert!(lock(&answers).pop().unwrap().unwrap() == tensor(len, 2));
                    let error = second.recv(&key(0, 1, "y"), TIMEOUT).unwrap_err().to_string();
                    assert!(error.starts_with(&format!("worker {}: ", name(0))), "{error}");
                }
                done.wait();
            });
        }
    }
}
