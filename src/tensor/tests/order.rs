//! What comes before what: connecting and closing, asking and sending, copying out and the next tensor.

use std::sync::mpsc;

use super::*;
use crate::base::mem::Pages;
use crate::base::stats::CommCounter;
use crate::tensor::adapter::Adapter;
use crate::tensor::message::{HEADER, NAME_MAX};

/// Of a worker's own and of another's that are not answered.
fn requests(manager: &Manager, of: usize) -> [usize; 2] {
    manager.with_adapter(&name(of), |adapter| adapter.requests()).unwrap()
}

#[test]
fn a_manager_that_is_connecting_says_so_and_may_be_closed() {
    let store = HashStore::new();
    let [first, second] = [0, 1].map(|worker| manager(SoftWire::Shm, worker, 2, true));
    assert_eq!(first.state(), State::New);
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| first.connect(&store, TIMEOUT));
        while first.state() == State::New && !connecting.is_finished() {
            std::thread::yield_now();
        }
        assert_eq!(first.state(), State::Starting, "it waits for the other one");
        let again = first.connect(&store, TIMEOUT).unwrap_err().to_string();
        assert_eq!(again, format!("worker {} is Starting; expected New", name(0)));
        first.close();
        assert_eq!(first.state(), State::Stopped);
        // It may have been quick enough to connect.
        let other = second.connect(&store, TIMEOUT).and_then(|()| step(&second, 1).recv(&key(0, 1, "x"), TIMEOUT).map(drop));
        let error = other.unwrap_err().to_string();
        assert!(error.contains(&format!("worker {}", name(0))), "{error}");
        let closed = connecting.join().unwrap().unwrap_err().to_string();
        assert_eq!(closed, format!("worker {} has closed its manager", name(0)));
    });
    assert_eq!(first.state(), State::Stopped, "it is not started again");
}

#[test]
fn nothing_is_sent_of_what_nobody_has_asked_for() {
    for wire in WIRES {
        let done = Barrier::new(2);
        workers(wire, 2, |worker, manager| {
            let step = step(&manager, 1);
            if worker == 0 {
                step.send(&key(0, 1, "unasked"), tensor(1 << 20, 1)).unwrap();
                step.send(&key(0, 1, "asked"), tensor(100, 2)).unwrap();
            } else {
                assert!(step.recv(&key(0, 1, "asked"), TIMEOUT).unwrap() == tensor(100, 2));
            }
            done.wait();
            let ops = manager.with_adapter(&name(1 - worker), |adapter| adapter.stats().get(CommCounter::Ops)).unwrap();
            let copied = manager.copied();
            done.wait();
            assert_eq!(ops, 1, "one that was sent, or asked for");
            assert!(copied <= 100, "{copied} bytes copied");
        });
    }
}

#[test]
fn what_is_asked_of_a_step_that_its_producer_has_not_found_waits_for_it() {
    for wire in WIRES {
        let done = Barrier::new(2);
        workers(wire, 2, |worker, manager| {
            if worker == 0 {
                while requests(&manager, 1) != [0, 1] {
                    std::thread::yield_now();
                }
                step(&manager, 9).send(&key(0, 1, "x"), tensor(40_000, 9)).unwrap();
            } else {
                assert!(step(&manager, 9).recv(&key(0, 1, "x"), TIMEOUT).unwrap() == tensor(40_000, 9));
            }
            done.wait();
        });
    }
}

/// The next tensor of its name would overwrite it.
#[test]
fn a_buffer_is_idle_only_once_its_tensor_was_copied_out() {
    const LEN: usize = 40_000;
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        let done = Barrier::new(2);
        workers(wire, 2, |worker, manager| {
            let steps = [1, 2].map(|id| (id, step(&manager, id)));
            let (large, small) = (key(0, 1, "large"), key(0, 1, "small"));
            if worker == 0 {
                steps.iter().for_each(|(id, step)| step.send(&large, tensor(LEN, *id)).unwrap());
                steps[0].1.send(&small, tensor(1, 1)).unwrap();
                done.wait();
                let unanswered = requests(&manager, 1);
                done.wait();
                assert_eq!(unanswered, [0, 1], "the first was written, and the second is owed");
            } else {
                let (got, all_got) = mpsc::channel();
                for (_, step) in &steps {
                    let got = got.clone();
                    step.recv_async(&large, move |result| got.send(result.unwrap()).unwrap()).unwrap();
                }
                // Each of them goes behind what was said before.
                (0..20).for_each(|_| assert!(steps[0].1.recv(&small, TIMEOUT).unwrap() == tensor(1, 1)));
                done.wait();
                done.wait();
                run(&manager, 1);
                assert!(all_got.recv().unwrap() == tensor(LEN, 1));
                run(&manager, 1);
                assert!(all_got.recv().unwrap() == tensor(LEN, 2));
            }
            done.wait();
        });
    }
}

/// `{u8 kind, u16 name_size, u8 name[512], ..}`, and the tensor at 768.
#[test]
fn a_key_of_512_bytes_fills_its_place_before_the_tensor_in_the_buffers_of_both() {
    let edge = "e".repeat(NAME_MAX + 1 - key(0, 1, "e").len());
    let edge = key(0, 1, &edge);
    assert_eq!((edge.len(), HEADER), (512, 768));
    for wire in WIRES {
        let done = Barrier::new(2);
        workers(wire, 2, |worker, manager| {
            let (step, value) = (step(&manager, 1), tensor(40_000, 1));
            if worker == 0 {
                step.send(&edge, value.clone()).unwrap();
            } else {
                assert!(step.recv(&edge, TIMEOUT).unwrap() == value);
            }
            done.wait();
            let buffered = wire.1 == Mode::Buffered;
            let buffer = buffered.then(|| manager.with_adapter(&name(1 - worker), |adapter| adapter.buffer(worker == 0, 0)).unwrap());
            done.wait();
            if let Some(buffer) = buffer {
                assert_eq!(buffer[1..3], 512u16.to_le_bytes());
                assert!(buffer[3..515] == *edge.as_bytes());
                assert!(buffer[768..][..40_000] == *value.bytes());
            }
        });
    }
}

/// What a closed manager answers, on another thread: this one would hang for good if it had the lock.
fn state_in_time(manager: &Arc<Manager>) -> std::result::Result<State, mpsc::RecvTimeoutError> {
    let (inside, (state, in_time)) = (manager.clone(), mpsc::channel());
    std::thread::spawn(move || state.send(inside.state()));
    in_time.recv_timeout(TIMEOUT / 6)
}

#[test]
fn a_tensor_that_is_copied_as_its_manager_is_closed_is_released_by_who_closes_it() {
    const LEN: usize = 128 << 20;
    let (sent, copied) = (Barrier::new(2), Barrier::new(2));
    workers(SoftWire::Shm, 2, |worker, manager| {
        let (step, manager) = (step(&manager, 1), Arc::new(manager));
        if worker == 1 {
            sent.wait();
            step.recv_async(&key(0, 1, "large"), drop).unwrap();
            copied.wait();
            return manager.close();
        }
        let memory = Pages::new(LEN).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(step.recv(&key(1, 0, "never"), TIMEOUT).is_err()));
            while requests(&manager, 1) != [1, 0] {
                std::thread::yield_now();
            }
            let (inside, (released, was_released)) = (manager.clone(), mpsc::channel());
            let release = move || released.send((std::thread::current().id(), state_in_time(&inside))).unwrap();
            step.send_from(&key(0, 1, "large"), 1, &[LEN as i64], memory.to_register(), Box::new(release)).unwrap();
            sent.wait();
            // By the thread that waits above.
            let begun = |adapter: &mut Adapter| adapter.all_copied() >= LEN as u64 && !adapter.has_fill();
            while !manager.with_adapter(&name(1), begun).unwrap() {
                std::thread::yield_now();
            }
            copied.wait();
            manager.close();
            assert_eq!(was_released.try_recv(), Ok((std::thread::current().id(), Ok(State::Stopped))));
        });
    });
}

/// They may call anything as they go.
#[test]
fn what_a_closed_manager_refuses_is_dropped_without_its_lock() {
    struct OnDrop(Arc<Manager>, mpsc::Sender<std::result::Result<State, mpsc::RecvTimeoutError>>);
    impl Drop for OnDrop {
        fn drop(&mut self) {
            self.1.send(state_in_time(&self.0)).unwrap();
        }
    }
    let manager = Arc::new(manager(SoftWire::Shm, 0, 1, true));
    let step = step(&manager, 1);
    let (edge, memory) = (key(0, 0, "x"), Pages::new(100).unwrap());
    let (dropped, was_dropped) = mpsc::channel();
    let guard = || OnDrop(manager.clone(), dropped.clone());
    let release = guard();
    step.send_from(&edge, 1, &[100], memory.to_register(), Box::new(move || drop(release))).unwrap();
    let tensor = step.recv(&edge, TIMEOUT).unwrap();
    manager.close();
    let refused = |result: Result<()>| {
        assert!(result.is_err());
        assert_eq!(was_dropped.try_recv(), Ok(Ok(State::Stopped)));
    };
    refused(step.send(&key(0, 0, "y"), tensor));
    for keys in [&[][..], &[edge.as_str()]] {
        let inside = guard();
        refused(step.recv_all_async(keys, move |_| drop(inside)));
    }
    let inside = guard();
    refused(step.recv_async(&edge, move |_| drop(inside)));
}
