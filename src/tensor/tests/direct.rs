//! Tensors that are not copied: whose memory they are in, when it is whose, and what becomes of receives that are given up.

use super::*;
use crate::base::mem::Pages;

const WAYS: [Way; 2] = [Way(SoftWire::Shm, Mode::Direct), Way(SoftWire::Tcp, Mode::Direct)];

/// The user's memory, with these contents.
fn pages(bytes: &[u8]) -> Pages {
    let pages = Pages::new(bytes.len()).unwrap();
    pages.write(0, bytes);
    pages
}

fn read(pages: &Pages, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    pages.read(0, &mut bytes);
    bytes
}

/// Sends a tensor from the user's memory; counts when it is released.
fn lend(step: &Rendezvous, key: &str, pages: &Pages, len: usize, released: &Arc<AtomicUsize>) {
    let (released, memory) = (released.clone(), pages.to_register().part(0, len).unwrap());
    step.send_from(key, 9, &[len as i64, 1], memory, Box::new(move || _ = released.fetch_add(1, Ordering::Relaxed))).unwrap();
}

#[test]
fn no_byte_is_copied_whosever_memory_it_is() {
    const LEN: usize = 300_000;
    for way in WAYS {
        let done = Barrier::new(2);
        let copied = workers(way, 2, |worker, manager| {
            let [lent, registered] = [1, 2].map(|seed| pages(&contents(LEN, seed)));
            let handle = manager.register(registered.to_register()).unwrap();
            let (into, released) = (pages(&[0; LEN + 100]), Arc::new(AtomicUsize::new(0)));
            for id in 0..4u64 {
                let step = step(&manager, id);
                if worker == 0 {
                    lend(&step, &key(0, 1, "lent"), &lent, LEN, &released);
                    lend(&step, &key(0, 1, "registered"), &registered, LEN - id as usize, &released);
                    lend(&step, &key(0, 1, "small"), &registered, 8, &released);
                    let error = handle.deregister().unwrap_err().to_string();
                    assert!(error.contains("tensors that were not released"), "{error}");
                    done.wait();
                    assert_eq!(released.load(Ordering::Relaxed), 0, "another may ask for it");
                    manager.cleanup(id);
                    while released.load(Ordering::Relaxed) < 3 {
                        assert!(manager.run(TIMEOUT) > 0);
                    }
                    assert_eq!(released.swap(0, Ordering::Relaxed), 3);
                } else {
                    let tensor = step.recv(&key(0, 1, "lent"), TIMEOUT).unwrap();
                    assert!(*tensor.bytes() == contents(LEN, 1) && tensor.meta().shape() == [LEN as i64, 1]);
                    let memory = if id % 2 == 0 { into.to_register() } else { registered.to_register() };
                    let tensor = step.recv_into(&key(0, 1, "registered"), memory, TIMEOUT).unwrap();
                    assert_eq!((tensor.as_ptr() as usize, tensor.len()), (memory.addr(), LEN - id as usize));
                    assert!(*tensor.bytes() == contents(LEN, 2)[..tensor.len()]);
                    assert!(*step.recv(&key(0, 1, "small"), TIMEOUT).unwrap().bytes() == contents(LEN, 2)[..8]);
                    done.wait();
                }
            }
            handle.deregister().unwrap();
            handle.deregister().unwrap();
            let copied = manager.copied();
            done.wait();
            copied
        });
        assert_eq!(copied, [0, 0]);
    }
}

/// Of one that is announced before it is produced there may be no more for a while; of those that are there, there may.
#[test]
fn a_large_tensor_that_is_awaited_is_in_nobodys_way() {
    const LARGE: usize = (4 << 20) + 1;
    let turn = Barrier::new(2);
    workers(WAYS[0], 2, |worker, manager| {
        let (first, second) = (step(&manager, 1), step(&manager, 2));
        let (large, small) = (key(0, 1, "large"), key(0, 1, "small"));
        let value = || Tensor::new(1, &[], vec![1; LARGE]).unwrap();
        if worker == 0 {
            first.send(&large, value()).unwrap();
            turn.wait();
            second.send(&small, tensor(100, 1)).unwrap();
            turn.wait();
            second.send(&large, value()).unwrap();
        } else {
            // From now on what is like it is announced.
            drop(first.recv(&large, TIMEOUT).unwrap());
            second.recv_async(&large, |got| assert_eq!(got.unwrap().bytes().len(), LARGE)).unwrap();
            turn.wait();
            let got = second.recv(&small, Duration::from_secs(10));
            turn.wait();
            assert!(*got.unwrap().bytes() == contents(100, 1));
            run(&manager, 1);
        }
        turn.wait();
    });
}

/// For those that are there as for those that are not produced yet, which are in nobody's way. One has memory in any case.
#[test]
fn memory_is_open_for_a_few_tensors_however_many_are_asked_for() {
    const BYTES: usize = 64 << 10;
    let turn = Barrier::new(2);
    workers(WAYS[0], 2, |worker, manager| {
        let (first, second) = (step(&manager, 1), step(&manager, 2));
        let keys: Vec<String> = (0..240).map(|number| key(0, 1, &format!("edge {number}"))).collect();
        let send = |step: &Rendezvous, seed| keys.iter().for_each(|key| step.send(key, tensor(BYTES, seed)).unwrap());
        let ask = |step: &Rendezvous, seed| {
            keys.iter().for_each(|key| step.recv_async(key, move |got| assert!(got.unwrap() == tensor(BYTES, seed))).unwrap());
        };
        if worker == 0 {
            send(&first, 1);
            turn.wait();
            send(&second, 2);
        } else {
            let opens = |bytes, ahead| manager.with_adapter(&name(0), |adapter| adapter.opens(bytes, ahead)).unwrap();
            assert_eq!(
                [(BYTES, false), (BYTES, true), (5 << 20, false), (5 << 20, true)].map(|(bytes, ahead)| opens(bytes, ahead)),
                [64, 64, 1, 1]
            );
            ask(&first, 1);
            run(&manager, keys.len());
            ask(&second, 2);
            assert_eq!((opens(BYTES, true), opens(BYTES, false)), (0, 64), "all that may be are open for what is asked for");
            turn.wait();
            run(&manager, keys.len());
        }
        turn.wait();
    });
}

#[test]
fn copies_are_counted() {
    for way in WIRES {
        let done = Barrier::new(2);
        let copied = workers(way, 2, |worker, manager| {
            let (step, into, small) = (step(&manager, 1), pages(&[0; 9000]), pages(&contents(9000, 2)));
            if worker == 0 {
                step.send_copy(&key(0, 1, "copied"), 9, &[5000, 1], &contents(5000, 1)).unwrap();
                lend(&step, &key(0, 1, "small"), &small, 9000, &Arc::default());
                // Its memory is free, though it is there for others.
                assert_eq!(manager.run(Duration::ZERO), usize::from(way.1 == Mode::Direct));
            } else {
                assert!(step.recv(&key(0, 1, "copied"), TIMEOUT).unwrap() == tensor(5000, 1));
                assert!(
                    step.recv_into(&key(0, 1, "small"), into.to_register(), TIMEOUT).unwrap()
                        == Tensor::new(9, &[9000, 1], contents(9000, 2)).unwrap()
                );
                assert!(read(&into, 9000) == contents(9000, 2));
            }
            done.wait();
            let copied = manager.copied();
            done.wait();
            manager.close();
            copied
        });
        assert_eq!(copied[0], 14_000);
        // Into memory that is too small to be registered for one tensor; through buffers, all of it.
        assert_eq!(copied[1], if way.1 == Mode::Direct { 9000 } else { 23_000 });
    }
}

#[test]
fn workers_in_different_modes_are_told_so() {
    let store = HashStore::new();
    std::thread::scope(|scope| {
        for (worker, mode, other) in [(0, Mode::Direct, Mode::Buffered), (1, Mode::Buffered, Mode::Direct)] {
            let store = &store;
            scope.spawn(move || {
                let error = manager(Way(SoftWire::Shm, mode), worker, 2, true).connect(store, TIMEOUT).unwrap_err();
                let text =
                    format!("worker {}: it is in {other:?} mode, this one in {mode:?} mode; all workers have the same", name(1 - worker));
                assert_eq!((matches!(error, Error::Usage(_)), error.to_string()), (true, text));
            });
        }
    });
}

/// Whatever the producer does meanwhile, and the tensor comes to who asks again.
#[test]
fn nobody_writes_to_the_memory_of_a_receive_that_has_returned() {
    const LEN: usize = 200_000;
    for way in WAYS {
        let turn = Barrier::new(2);
        let [_, late] = workers(way, 2, |worker, manager| {
            let (into, nothing) = (pages(&[7; LEN]), [7; LEN]);
            let mut late = 0;
            for id in 0..60u64 {
                let (step, edge) = (step(&manager, id), key(0, 1, "x"));
                turn.wait();
                if worker == 0 {
                    // A little before its time is over, or after.
                    let until = std::time::Instant::now() + Duration::from_micros(id * 40);
                    while std::time::Instant::now() < until {
                        std::hint::spin_loop();
                    }
                    step.send(&edge, tensor(LEN, id)).unwrap();
                    // Until it has been asked for a second time.
                    step.recv(&key(1, 0, "done"), TIMEOUT).unwrap();
                } else {
                    match step.recv_into(&edge, into.to_register(), Duration::from_micros(1200)) {
                        Ok(got) => assert!(got == tensor(LEN, id) && read(&into, LEN) == contents(LEN, id)),
                        Err(Error::Timeout(_)) => {
                            late += 1;
                            into.write(0, &nothing);
                        }
                        Err(error) => panic!("{error}"),
                    }
                    let before = read(&into, LEN);
                    assert!(step.recv(&edge, TIMEOUT).unwrap() == tensor(LEN, id));
                    assert!(read(&into, LEN) == before, "written after it was given back, in step {id}");
                    step.send(&key(1, 0, "done"), Tensor::dead()).unwrap();
                }
            }
            turn.wait();
            late
        })[..] else {
            panic!()
        };
        println!("{way:?}: {late} of 60 were late");
    }
}

#[test]
fn a_receive_that_nothing_comes_of_is_taken_back() {
    for way in WAYS {
        let (gave_up, done) = (Barrier::new(2), Barrier::new(2));
        workers(way, 2, |worker, manager| {
            let (step, edge, into) = (step(&manager, 1), key(0, 1, "x"), pages(&[7; 50_000]));
            if worker == 0 {
                gave_up.wait();
                step.send(&edge, tensor(50_000, 1)).unwrap();
            } else {
                let others = Arc::new(AtomicUsize::new(0));
                for _ in 0..3 {
                    let error = step.recv_into(&edge, into.to_register(), Duration::from_millis(2)).unwrap_err().to_string();
                    assert!(error.starts_with("Timed out waiting for notification: "), "{error}");
                    let others = others.clone();
                    let take = move |got: Result<Tensor>| _ = others.fetch_add(got.unwrap().len(), Ordering::Relaxed);
                    // The first one asks, and the next receive with memory of its own joins it.
                    step.recv_async(&edge, take).unwrap();
                }
                gave_up.wait();
                run(&manager, 3);
                assert_eq!(others.load(Ordering::Relaxed), 150_000);
                assert!(read(&into, 50_000) == [7; 50_000]);
                assert!(step.recv_into(&edge, into.to_register(), TIMEOUT).unwrap() == tensor(50_000, 1));
            }
            done.wait();
        });
    }
}

/// Though its producer does nothing.
#[test]
fn an_abort_takes_receives_back() {
    for way in WAYS {
        let done = Barrier::new(2);
        workers(way, 2, |worker, manager| {
            if worker == 1 {
                let (first, second, into) = (step(&manager, 1), step(&manager, 2), pages(&[7; 50_000]));
                let count = Arc::new(AtomicUsize::new(0));
                for step in [&first, &second] {
                    let count = count.clone();
                    let take = move |result: Result<Tensor>| {
                        let why = result.unwrap_err().to_string();
                        assert!(why == "not today" || why == "Cleanup 2", "{why}");
                        count.fetch_add(1, Ordering::Relaxed);
                    };
                    step.recv_into_async(&key(0, 1, "x"), into.to_register(), take).unwrap();
                }
                first.abort(&Error::usage("not today")).unwrap();
                manager.cleanup(2);
                run(&manager, 2);
                assert_eq!(count.load(Ordering::Relaxed), 2);
            }
            done.wait();
        });
    }
}

#[test]
fn several_receive_one_tensor_each_into_its_own_memory() {
    for way in WIRES {
        let (asked, done) = (Barrier::new(2), Barrier::new(2));
        workers(way, 2, |worker, manager| {
            for id in 0..3 {
                let (step, edge, memory) = (step(&manager, id), key(0, 1, "x"), [pages(&[0; 90_000]), pages(&[0; 90_000])]);
                if worker == 0 {
                    asked.wait();
                    step.send(&edge, tensor(90_000, id)).unwrap();
                } else {
                    let got = Arc::new(Mutex::new(Vec::new()));
                    let take = || {
                        let got = got.clone();
                        move |result: Result<Tensor>| lock(&got).push(result.unwrap())
                    };
                    for memory in &memory {
                        step.recv_into_async(&edge, memory.to_register(), take()).unwrap();
                    }
                    step.recv_async(&edge, take()).unwrap();
                    asked.wait();
                    run(&manager, 3);
                    let mut places: Vec<usize> = lock(&got).iter().map(|got| got.as_ptr() as usize).collect();
                    assert!(lock(&got).iter().all(|got| *got == tensor(90_000, id)));
                    places.retain(|place| memory.iter().any(|memory| memory.addr() == *place));
                    assert_eq!(places.len(), 2);
                    lock(&got).clear();
                }
            }
            done.wait();
        });
    }
}

#[test]
fn a_tensor_that_does_not_fit_is_an_error_of_that_receive() {
    for way in WIRES {
        let done = Barrier::new(2);
        workers(way, 2, |worker, manager| {
            let (small, released) = (pages(&[7; 40_000]), Arc::new(AtomicUsize::new(0)));
            for id in 0..3 {
                let (step, edge) = (step(&manager, id), key(0, 1, "x"));
                if worker == 0 {
                    let memory = pages(&contents(50_000, id));
                    lend(&step, &edge, &memory, 50_000, &released);
                    step.recv(&key(1, 0, "done"), TIMEOUT).unwrap();
                    manager.cleanup(id);
                    run(&manager, 1);
                    assert_eq!(released.swap(0, Ordering::Relaxed), 1, "nothing is kept for who does not take it");
                } else {
                    let part = small.to_register().part(0, 40_000).unwrap();
                    let error = step.recv_into(&edge, part, TIMEOUT).unwrap_err().to_string();
                    assert!(error.ends_with("a tensor of 50000 bytes, received into 40000"), "{error}");
                    assert!(read(&small, 40_000) == [7; 40_000]);
                    assert!(*step.recv(&edge, TIMEOUT).unwrap().bytes() == contents(50_000, id));
                    step.send(&key(1, 0, "done"), Tensor::dead()).unwrap();
                }
            }
            done.wait();
        });
    }
}

/// Whichever message or write is on its way.
#[test]
fn an_abort_ends_receives_with_memory_of_their_own_once_it_is_theirs() {
    const LEN: usize = 100_000;
    for way in WAYS {
        let turn = Barrier::new(2);
        workers(way, 2, |worker, manager| {
            for id in 0..60u64 {
                let (step, edge) = (step(&manager, id), key(0, 1, "x"));
                turn.wait();
                let pause = std::time::Instant::now() + Duration::from_micros(if id % 2 == worker as u64 { id * 10 } else { 0 });
                if worker == 0 {
                    while std::time::Instant::now() < pause {
                        std::hint::spin_loop();
                    }
                    // By either side, before it is there, or after.
                    if id % 3 == 0 {
                        step.abort(&Error::usage("not today")).unwrap();
                    } else {
                        step.send(&edge, tensor(LEN + id as usize % 2, id)).unwrap();
                    }
                } else {
                    let answers = Arc::new(Mutex::new(Vec::new()));
                    let (ended, memory) = (answers.clone(), pages(&[7; LEN + 1]));
                    let take = move |result: Result<Tensor>| lock(&ended).push(result.map(|tensor| tensor.len()));
                    step.recv_into_async(&edge, memory.to_register(), take).unwrap();
                    while std::time::Instant::now() < pause {
                        std::hint::spin_loop();
                    }
                    if id % 3 == 1 {
                        step.abort(&Error::usage("not today")).unwrap();
                    }
                    run(&manager, 1);
                    let mut answers = lock(&answers);
                    match answers.pop() {
                        Some(Ok(len)) => assert!(len == LEN + id as usize % 2 && read(&memory, len) == contents(len, id)),
                        Some(Err(error)) => {
                            assert!(id % 3 < 2 && error.to_string().ends_with("not today"), "{error}");
                            memory.write(0, &[7; LEN + 1]);
                        }
                        None => panic!("not called"),
                    }
                    let before = read(&memory, LEN + 1);
                    // All that was on its way is here when a later tensor is.
                    turn.wait();
                    assert!(before == read(&memory, LEN + 1) && answers.is_empty());
                    continue;
                }
                turn.wait();
            }
        });
    }
}

#[test]
fn a_worker_that_goes_ends_receives_with_memory_of_their_own() {
    for way in WAYS {
        let asked = Barrier::new(2);
        workers(way, 2, |worker, manager| {
            let step = step(&manager, 1);
            if worker == 0 {
                assert!(step.recv(&key(1, 0, "x"), TIMEOUT).unwrap().is_dead());
                asked.wait();
                return;
            }
            let (memory, answers) = ([0; 3].map(|byte: u8| pages(&[byte; 30_000])), Arc::new(Mutex::new(Vec::new())));
            for (i, memory) in memory.iter().enumerate() {
                let answers = answers.clone();
                let take = move |result: Result<Tensor>| lock(&answers).push(result.unwrap_err().to_string());
                step.recv_into_async(&key(0, 1, &i.to_string()), memory.to_register(), take).unwrap();
            }
            step.send(&key(1, 0, "x"), Tensor::dead()).unwrap();
            asked.wait();
            run(&manager, 3);
            assert!(lock(&answers).iter().all(|why| why.starts_with(&format!("worker {}: ", name(0)))), "{answers:?}");
        });
    }
}

#[test]
fn what_waits_and_what_is_lent_ends_when_a_manager_is_closed() {
    for way in WIRES {
        let done = Barrier::new(2);
        workers(way, 2, |worker, manager| {
            let (step, memory, released) = (step(&manager, 1), pages(&[7; 30_000]), Arc::new(AtomicUsize::new(0)));
            let answers = Arc::new(Mutex::new(Vec::new()));
            let ended = answers.clone();
            let take = move |result: Result<Tensor>| lock(&ended).push(result.unwrap_err().to_string());
            step.recv_into_async(&key(1 - worker, worker, "x"), memory.to_register(), take).unwrap();
            lend(&step, &key(worker, 1 - worker, "never asked for"), &memory, 30_000, &released);
            lend(&step, &key(worker, worker, "own"), &memory, 30_000, &released);
            let own = step.recv(&key(worker, worker, "own"), TIMEOUT).unwrap();
            assert_eq!(own.as_ptr() as usize, memory.addr());
            let refused = step.send_from(&key(worker, worker, "own"), 9, &[], memory.to_register(), Box::new(|| panic!("it was refused")));
            assert!(refused.unwrap_err().to_string().starts_with("Duplicated send"));
            done.wait();
            manager.close();
            assert_eq!((lock(&answers).len(), released.load(Ordering::Relaxed)), (1, 1), "once");
            drop(own);
            assert_eq!(released.load(Ordering::Relaxed), 2);
        });
    }
}

/// More than there are slots, and again, when what they are like is known.
#[test]
fn any_number_of_tensors_is_on_its_way() {
    const KEYS: usize = 700;
    for way in WAYS {
        let done = Barrier::new(2);
        workers(way, 2, |worker, manager| {
            for id in 0..3 {
                let (step, other, came) = (step(&manager, id), 1 - worker, Arc::new(AtomicUsize::new(0)));
                let len = move |i: usize| if i as u64 % 5 == id { i } else { i * 7 % 3000 };
                for i in 0..KEYS {
                    let came = came.clone();
                    let take = move |result: Result<Tensor>| {
                        assert!(result.unwrap() == tensor(len(i), i as u64));
                        came.fetch_add(1, Ordering::Relaxed);
                    };
                    step.recv_async(&key(other, worker, &i.to_string()), take).unwrap();
                }
                // In another order.
                (0..KEYS).for_each(|i| {
                    step.send(&key(worker, other, &(i * 3 % KEYS).to_string()), tensor(len(i * 3 % KEYS), (i * 3 % KEYS) as u64)).unwrap()
                });
                run(&manager, KEYS);
                assert_eq!(came.load(Ordering::Relaxed), KEYS);
                done.wait();
            }
        });
    }
}

/// A tensor that is written elsewhere than announced, or is not the one that was told.

#[test]
fn who_ends_the_registration_of_memory_twice_ends_no_other() {
    let (manager, memory) = (manager(WAYS[0], 0, 1, true), pages(&[7; 60_000]));
    let first = manager.register(memory.to_register()).unwrap();
    first.deregister().unwrap();
    let second = manager.register(memory.to_register()).unwrap();
    first.deregister().unwrap();
    assert!(manager.register(memory.to_register()).err().unwrap().to_string().contains("which are registered"));
    second.deregister().unwrap();
    drop(manager.register(memory.to_register()).unwrap());
}
