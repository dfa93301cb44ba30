//! Steps that are given up, workers that are gone or misbehave, and what cannot be.

use super::*;
use crate::store::Store;

/// What the callback of a receive gets.
fn answer(step: &Rendezvous, key: &str) -> Arc<Mutex<Vec<Result<Tensor>>>> {
    let answers = Arc::new(Mutex::new(Vec::new()));
    let into = answers.clone();
    step.recv_async(key, move |result| lock(&into).push(result)).unwrap();
    answers
}

/// The one error that it got.
fn error(answers: &Mutex<Vec<Result<Tensor>>>) -> String {
    let mut answers = lock(answers);
    assert_eq!(answers.len(), 1, "called once");
    answers.pop().unwrap().unwrap_err().to_string()
}

#[test]
fn an_abort_ends_what_waits_here_and_there_and_what_comes() {
    for wire in WIRES {
        let (asked, done) = (Barrier::new(2), Barrier::new(2));
        workers(wire, 2, |worker, manager| {
            let (step, other) = (step(&manager, 1), step(&manager, 2));
            let why = Error::timeout("Step 1 was cancelled");
            if worker == 0 {
                let local = answer(&step, &key(0, 0, "never"));
                let remote = answer(&step, &key(1, 0, "never"));
                asked.wait();
                step.abort(&why).unwrap();
                run(&manager, 2);
                assert_eq!((error(&local), error(&remote)), (why.to_string(), why.to_string()));
                assert_eq!(step.send(&key(0, 1, "late"), tensor(1, 1)).unwrap_err().to_string(), why.to_string());
                assert!(matches!(step.recv(&key(1, 0, "late"), TIMEOUT), Err(Error::Timeout(text)) if text == why.to_string()));
                other.send(&key(0, 1, "x"), tensor(1, 1)).unwrap();
            } else {
                let remote = answer(&step, &key(0, 1, "never"));
                // It is there once the other one has an answer to a later request.
                asked.wait();
                run(&manager, 1);
                assert_eq!(error(&remote), format!("worker {}: {why}", name(0)));
                assert!(other.recv(&key(0, 1, "x"), TIMEOUT).unwrap() == tensor(1, 1));
                // It is not aborted here.
                step.send(&key(1, 0, "never"), tensor(1, 1)).unwrap();
                assert_eq!(step.recv(&key(0, 1, "late"), TIMEOUT).unwrap_err().to_string(), format!("worker {}: {why}", name(0)));
            }
            done.wait();
        });
    }
}

#[test]
fn a_step_is_cleaned_up_while_requests_are_on_the_way() {
    for wire in WIRES {
        let (asked, done) = (Barrier::new(2), Barrier::new(2));
        workers(wire, 2, |worker, manager| {
            for id in 0..20u64 {
                let step = step(&manager, id);
                if worker == 0 {
                    step.send(&key(0, 1, "some"), tensor(100_000, id)).unwrap();
                    asked.wait();
                    manager.cleanup(id);
                    assert_eq!(step.send(&key(0, 1, "x"), tensor(1, 1)).unwrap_err().to_string(), format!("Cleanup {id}"));
                } else {
                    let answers: Vec<_> = (0..5).map(|i| answer(&step, &key(0, 1, &i.to_string()))).collect();
                    let some = answer(&step, &key(0, 1, "some"));
                    asked.wait();
                    run(&manager, 6);
                    for answers in answers {
                        assert_eq!(error(&answers), format!("worker {}: Cleanup {id}", name(0)));
                    }
                    match lock(&some).pop().unwrap() {
                        Ok(got) => assert!(got == tensor(100_000, id)),
                        Err(why) => assert_eq!(why.to_string(), format!("worker {}: Cleanup {id}", name(0))),
                    }
                    manager.cleanup_all();
                    assert_eq!(step.recv(&key(0, 1, "x"), TIMEOUT).unwrap_err().to_string(), format!("Cleanup {id}"));
                }
            }
            done.wait();
        });
    }
}

#[test]
fn tensors_of_an_aborted_step_are_thrown_away_and_their_buffers_used_again() {
    for wire in WIRES {
        let (aborted, done) = (Barrier::new(2), Barrier::new(2));
        workers(wire, 2, |worker, manager| {
            for id in 0..30u64 {
                let (step, edge) = (step(&manager, id), key(0, 1, "x"));
                if worker == 0 {
                    if id % 3 == 0 {
                        aborted.wait();
                    }
                    step.send(&edge, tensor(90_000, id)).unwrap();
                } else if id % 3 == 2 {
                    assert!(step.recv(&edge, TIMEOUT).unwrap() == tensor(90_000, id));
                } else {
                    let gone = answer(&step, &edge);
                    step.abort(&Error::usage("not wanted")).unwrap();
                    run(&manager, 1);
                    if id % 3 == 0 {
                        assert_eq!(error(&gone), "not wanted");
                        aborted.wait();
                    } else {
                        // It is on its way, or has come before that.
                        let mut answers = lock(&gone);
                        assert_eq!(answers.len(), 1, "called once");
                        let answer = answers.pop().unwrap();
                        let expected = answer.map_or_else(|why| why.to_string() == "not wanted", |came| came == tensor(90_000, id));
                        assert!(expected, "step {id}");
                    }
                }
            }
            done.wait();
        });
    }
}

#[test]
fn a_worker_that_goes_fails_what_waits_for_it_by_name_and_nothing_else() {
    for wire in WIRES {
        let (asked, gone, through) = (Barrier::new(3), Barrier::new(3), Barrier::new(2));
        workers(wire, 3, |worker, manager| {
            let step = step(&manager, 1);
            if worker == 2 {
                asked.wait();
                drop(manager);
                gone.wait();
                return;
            }
            let other = 1 - worker;
            let lost: Vec<_> = (0..3).map(|i| answer(&step, &key(2, worker, &i.to_string()))).collect();
            let kept = answer(&step, &key(other, worker, "kept"));
            asked.wait();
            run(&manager, 3);
            for lost in &lost {
                let why = error(lost);
                assert!(why.starts_with(&format!("worker {}: ", name(2))), "{why}");
            }
            gone.wait();
            let why = step.recv(&key(2, worker, "later"), TIMEOUT).unwrap_err().to_string();
            assert!(why.starts_with(&format!("worker {}: ", name(2))), "{why}");
            step.send(&key(worker, other, "kept"), tensor(30_000, worker as u64)).unwrap();
            run(&manager, 1);
            assert!(lock(&kept).pop().unwrap().unwrap() == tensor(30_000, other as u64));
            through.wait();
        });
    }
}

#[test]
fn callbacks_of_a_manager_that_is_closed_are_called_once() {
    let done = Barrier::new(2);
    workers(SoftWire::Shm, 2, |worker, manager| {
        let step = step(&manager, 1);
        let answers = [answer(&step, &key(1 - worker, worker, "x")), answer(&step, &key(worker, worker, "y"))];
        let not_run = answer(&step, "no key");
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| step.recv(&key(worker, worker, "z"), TIMEOUT).unwrap_err().to_string());
            manager.until_waited_for(&waits);
            manager.close();
            let why = waits.join().unwrap();
            assert!(why.ends_with("has closed its manager"), "{why}");
        });
        assert!(error(&not_run).contains("no key"));
        for answers in &answers {
            let why = error(answers);
            assert!(
                why.ends_with("it has closed its manager") || why == format!("worker {} has closed its manager", name(worker)),
                "{why}"
            );
        }
        assert_eq!((manager.run(TIMEOUT), step.recv("x", TIMEOUT).is_err()), (0, true));
        assert!(step.send(&key(worker, worker, "y"), tensor(1, 1)).unwrap_err().to_string().ends_with("has closed its manager"));
        done.wait();
    });
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let done = Barrier::new(2);
    workers(SoftWire::Shm, 2, |worker, manager| {
        let step = step(&manager, 1);
        let other = 1 - worker;
        let said = |result: Result<Tensor>| result.unwrap_err().to_string();
        assert!(said(step.recv("a;b", TIMEOUT)).contains("\"a;b\" has not five parts"));
        let foreign = key(worker, other, "x");
        assert_eq!(said(step.recv(&foreign, TIMEOUT)), format!("Invalid rendezvous key (dst): {foreign} @ {}", name(worker)));
        let foreign = key(other, worker, "x");
        let error = step.send(&foreign, tensor(1, 1)).unwrap_err().to_string();
        assert_eq!(error, format!("Invalid rendezvous key (src): {foreign} @ {}", name(worker)));
        let error = said(step.recv(&key(7, worker, "x"), TIMEOUT));
        assert_eq!(error, format!("there is no worker {:?}; there are {} and {}", name(7), name(worker), name(other)));
        assert!(Tensor::new(1, &[1; 17], vec![]).unwrap_err().to_string().contains("17 dimensions; at most 16"));
        done.wait();
    });
}

#[test]
fn names_and_stores_that_cannot_be_are_refused() {
    let refused =
        |name: &str, workers: &[&str]| Manager::new(device(SoftWire::Shm), name, workers, true, Mode::Buffered).err().unwrap().to_string();
    assert!(refused("a", &["b"]).starts_with("worker \"a\" of [\"b\"]"));
    assert!(refused("a", &["a", "a"]).contains("all of which are different"));
    assert!(refused("a", &["a", ""]).starts_with("worker \"\"; expected 1 to 512 bytes"));
    assert!(refused("a;b", &["a;b"]).contains("without a semicolon"));
    assert!(refused("a/device:0", &["a/device:0"]).contains("without /device:"));
    let alone = Manager::new(device(SoftWire::Shm), "a", &["a", "b"], true, Mode::Buffered).unwrap();
    let store = HashStore::new();
    let error = alone.connect(&store, Duration::from_millis(20)).unwrap_err();
    assert!(matches!(&error, Error::Timeout(text) if text.starts_with("worker b has not come: ")), "{error}");
    for (told, why) in [(&b"garbage"[..], "it was not told of worker a"), (b"\x01\0a\x03\0\0\0xyz", "its address is")] {
        let store = HashStore::new();
        store.set("worker/b", told).unwrap();
        let error = alone.connect(&store, TIMEOUT).unwrap_err().to_string();
        assert!(error.starts_with(&format!("worker b: {why}")), "{error}");
    }
    // One that knows of nobody tells nothing.
    let store = HashStore::new();
    let lone = || Manager::new(device(SoftWire::Shm), "b", &["b"], true, Mode::Buffered).unwrap();
    lone().connect(&store, TIMEOUT).unwrap();
    assert_eq!(alone.connect(&store, TIMEOUT).unwrap_err().to_string(), "worker b: it was not told of worker a");
    let error = lone().connect(&store, TIMEOUT).unwrap_err().to_string();
    assert!(error.ends_with("worker b has been there before; use another prefix each time"), "{error}");
    // Nothing of that is in the way of another try.
    assert_eq!(alone.state(), State::New);
    let store = HashStore::new();
    std::thread::scope(|scope| {
        scope.spawn(|| alone.connect(&store, TIMEOUT).unwrap());
        Manager::new(device(SoftWire::Shm), "b", &["b", "a"], true, Mode::Buffered).unwrap().connect(&store, TIMEOUT).unwrap();
    });
    assert_eq!(alone.state(), State::Started);
    assert_eq!(alone.connect(&store, TIMEOUT).unwrap_err().to_string(), "worker a is Started; expected New");
    alone.close();
    assert_eq!(alone.state(), State::Stopped);
    assert_eq!(alone.connect(&store, TIMEOUT).unwrap_err().to_string(), "worker a has closed its manager");
}

#[test]
fn garbage_in_a_message_buffer_fails_that_channel_alone() {
    for wire in WIRES {
        for garbage in [[0xff; 64], [0; 64]] {
            let (sent, done) = (Barrier::new(3), Barrier::new(3));
            workers(wire, 3, |worker, manager| {
                let step = step(&manager, 1);
                if worker == 2 {
                    manager.send_garbage(&name(0), &garbage);
                    sent.wait();
                    // This side learns that its peer has failed the channel.
                    let why = step.recv(&key(0, 2, "x"), TIMEOUT).unwrap_err().to_string();
                    assert!(why.starts_with(&format!("worker {}: ", name(0))), "{why}");
                    step.send(&key(2, 1, "kept"), tensor(1, 2)).unwrap();
                } else if worker == 0 {
                    let lost = answer(&step, &key(2, 0, "x"));
                    sent.wait();
                    run(&manager, 1);
                    let why = error(&lost);
                    assert!(why.starts_with(&format!("worker {}: ", name(2))) && why.contains(": it sent a"), "{why}");
                    step.send(&key(0, 1, "kept"), tensor(1, 0)).unwrap();
                } else {
                    sent.wait();
                    for from in [0, 2] {
                        assert!(step.recv(&key(from, 1, "kept"), TIMEOUT).unwrap() == tensor(1, from as u64));
                    }
                }
                done.wait();
            });
        }
    }
}

/// Of a worker that was there while another one did not come.
#[test]
fn what_was_asked_while_connecting_ends_when_that_fails() {
    let store = HashStore::new();
    let [first, second] = [0, 1].map(|worker| manager(WIRES[0], worker, 3, true));
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| second.connect(&store, Duration::from_secs(20)).unwrap_err());
        let gives_up = scope.spawn(|| first.connect(&store, Duration::from_secs(4)).unwrap_err());
        while first.with_adapter(&name(1), |_| ()).is_none() {
            assert!(!gives_up.is_finished(), "it has not come within 4 s");
            std::thread::yield_now();
        }
        let answer = answer(&step(&first, 1), &key(1, 0, "x"));
        let why = gives_up.join().unwrap().to_string();
        assert_eq!((first.run(TIMEOUT), error(&answer)), (1, why));
        waits.join().unwrap();
    });
}
