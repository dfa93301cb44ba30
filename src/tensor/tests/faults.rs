//! Steps that are given up, workers that are gone or misbehave, and what cannot be.

use super::super::adapter::Adapter;
use super::super::io::{ACKS, MESSAGES, TENSORS, Tamper};
use super::super::key::TensorId;
use super::super::message::{HEADER, Kind, NumberedRequest, Packet, RemoteMr};
use super::*;
use crate::link::limits::CONTROL_SIZE;
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
fn all_steps_are_cleaned_up_at_once() {
    let manager = manager(SoftWire::Shm, 0, 2, true);
    let steps: Vec<Rendezvous> = (1..4).map(|id| step(&manager, id)).collect();
    let answers: Vec<_> = steps.iter().map(|step| answer(step, &key(0, 0, "never"))).collect();
    manager.cleanup_all();
    run(&manager, 3);
    for (id, (step, answers)) in (1..4).zip(steps.iter().zip(answers)) {
        assert_eq!(error(&answers), format!("Cleanup {id}"));
        assert_eq!(step.send(&key(0, 0, "late"), tensor(1, 1)).unwrap_err().to_string(), format!("Cleanup {id}"));
    }
    assert_eq!(manager.steps(), 0);
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

/// A packet with something in it that must not be there.
fn packet(kind: Kind, change: impl Fn(&mut [u8; HEADER])) -> [u8; HEADER] {
    let mut bytes = Packet::new(kind, TensorId::new("a", 1)).encode();
    change(&mut bytes);
    bytes
}

#[test]
fn what_a_peer_must_not_send_fails_that_channel_alone() {
    type Hostile = fn(&mut Adapter);
    let to_all: [(Hostile, &str); 10] = [
        (|peer| peer.send_garbage(MESSAGES, HEADER, &[0xff; 64]), "a packet of kind 255"),
        (|peer| peer.send_garbage(MESSAGES, HEADER, &[0; HEADER]), "a message of kind 0"),
        (
            |peer| {
                peer.send_garbage(
                    MESSAGES,
                    HEADER,
                    &packet(Kind::TensorRequest, |bytes| bytes[1..3].copy_from_slice(&513u16.to_le_bytes())),
                )
            },
            "a name of 513 bytes; at most 512",
        ),
        (|peer| peer.send_garbage(MESSAGES, HEADER, &packet(Kind::TensorRequest, |bytes| bytes[548] = 17)), "17 dimensions; at most 16"),
        (
            |peer| peer.send_garbage(MESSAGES, HEADER + 4, &packet(Kind::TensorRequest, |_| ())),
            "a message of 768 bytes that it says has 772",
        ),
        (
            |peer| peer.send_garbage(MESSAGES, HEADER, &packet(Kind::ErrorStatus, |bytes| bytes[678] = 2)),
            "an error of 512 bytes; at most 256",
        ),
        (
            |peer| peer.send_garbage(MESSAGES, HEADER + 4, &packet(Kind::ErrorStatus, |bytes| bytes[677] = 4)),
            "an error for a of step 1, which was not asked for",
        ),
        (|peer| peer.send_garbage(ACKS, 3, &[1, 0, 0]), "3 bytes that begin with [1, 0, 0] as an ack; it has [0, 0, 0]"),
        (|peer| peer.send_garbage(ACKS, 4, &[0; 4]), "4 bytes that begin with [0, 0, 0] as an ack; it has [0, 0, 0]"),
        (|peer| peer.send_control(&[b'X'; CONTROL_SIZE]), "an unknown control message"),
    ];
    let numbered: Hostile = |peer| {
        let request = NumberedRequest { number: 3, step: 1, index: 0, memory: RemoteMr::default() };
        peer.send_control(&request.encode());
    };
    let to_buffered: [(Hostile, &str); 2] = [
        (|peer| peer.send_garbage(TENSORS, 77, &packet(Kind::TensorWrite, |_| ())), "a tensor into buffer 77, which is not"),
        (numbered, "an unknown control message"),
    ];
    let to_direct: [(Hostile, &str); 1] = [(numbered, "a request for number 3, which no tensor has")];
    for way @ Way(_, mode) in WIRES {
        let to_one = if mode == Mode::Buffered { to_buffered.as_slice() } else { &to_direct };
        for &(send, words) in to_all.iter().chain(to_one) {
            let (sent, read, done) = (Barrier::new(3), Barrier::new(2), Barrier::new(3));
            workers(way, 3, |worker, manager| {
                let step = step(&manager, 1);
                if worker == 2 {
                    // Its own ack of the request is written before, as it may be to the same place.
                    while manager.with_adapter(&name(0), |peer| peer.requests()).unwrap() != [0, 1] {
                        std::thread::yield_now();
                    }
                    manager.with_adapter(&name(0), send).unwrap();
                    sent.wait();
                    // What it asks for goes through the same buffer.
                    read.wait();
                    // This side learns that its peer has failed the channel.
                    let why = step.recv(&key(0, 2, "x"), TIMEOUT).unwrap_err().to_string();
                    assert!(why.starts_with(&format!("worker {}: ", name(0))), "{why}");
                    step.send(&key(2, 1, "kept"), tensor(1, 2)).unwrap();
                } else if worker == 0 {
                    let lost = answer(&step, &key(2, 0, "x"));
                    sent.wait();
                    run(&manager, 1);
                    let why = error(&lost);
                    let expected = [format!("worker {}: ", name(2)), format!(": it sent {words}")];
                    assert!(why.starts_with(&expected[0]) && why.contains(&expected[1]), "{way:?}, {words}: {why}");
                    read.wait();
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

#[test]
fn a_write_outside_of_what_was_announced_fails_that_channel_alone() {
    for way @ Way(_, mode) in WIRES {
        let elsewhere: Tamper = |to, _| to.addr += 1 << 30;
        // A buffer may be larger than what is written to it.
        let fewer: Tamper = |_, len| *len -= 1;
        let tampers = [elsewhere].into_iter().chain((mode == Mode::Direct).then_some(fewer));
        // Larger buffers are mapped by workers of one host.
        for (tamper, len) in tampers.flat_map(|tamper| [(tamper, 60_000), (tamper, 200_000)]) {
            let done = Barrier::new(3);
            workers(way, 3, |worker, manager| {
                let step = step(&manager, 1);
                if worker == 0 {
                    manager.with_adapter(&name(1), |adapter| adapter.tamper(tamper)).unwrap();
                    for other in [1, 2] {
                        step.send(&key(0, other, "x"), tensor(len, 1)).unwrap();
                    }
                } else if worker == 1 {
                    let error = step.recv(&key(0, 1, "x"), TIMEOUT).unwrap_err().to_string();
                    assert!(error.starts_with(&format!("worker {}: ", name(0))), "{error}");
                    assert!(step.recv(&key(2, 1, "kept"), TIMEOUT).unwrap().is_dead());
                } else {
                    assert!(step.recv(&key(0, 2, "x"), TIMEOUT).unwrap() == tensor(len, 1));
                    step.send(&key(2, 1, "kept"), Tensor::dead()).unwrap();
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
        let waits = scope.spawn(|| second.connect(&store, Duration::from_secs(5)).unwrap_err());
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
