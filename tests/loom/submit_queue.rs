//! Models of the engine's submit queue: no start is lost and nobody waits for ever, in any order of the threads' steps.
//!
//! The loop here is that of `src/engine/mod.rs` with operations that are done at once.

use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::submit_queue::{Commands, Rejected, SubmitQueue};
use crate::sync::{Mistake, gets_stuck, model};

type Queue = SubmitQueue<u64, ()>;

fn queue() -> Arc<Queue> {
    Arc::new(SubmitQueue::new(100, 0, None, ()))
}

fn append(queue: &Queue) -> Result<u64, Rejected> {
    queue.append(|(), op_count| Ok(op_count))
}

/// What the engine's thread does, on a state that it shares with waiters. Returns once it is told to end.
fn run(queue: &Queue, state: &Mutex<Vec<u64>>) {
    let mut incoming = Vec::new();
    let mut done = state.lock().unwrap();
    let mut stopping = false;
    loop {
        if queue.is_notified() {
            let Commands { stop, abort, waiters } = queue.collect(&mut incoming);
            done.append(&mut incoming);
            stopping |= stop;
            if abort {
                break;
            }
            if waiters {
                drop(done);
                queue.wait_for_waiters();
                done = state.lock().unwrap();
            }
            continue;
        }
        if stopping {
            break;
        }
        drop(done);
        queue.sleep(None);
        done = state.lock().unwrap();
    }
    drop(done);
    queue.end();
}

/// Two callers start an operation each; each is done although nobody starts anything after.
#[test]
fn no_start_is_lost() {
    model(3, || {
        let (queue, state) = (queue(), Arc::new(Mutex::new(Vec::new())));
        let engine = {
            let (queue, state) = (queue.clone(), state.clone());
            thread::spawn(move || {
                let mut incoming = Vec::new();
                while state.lock().unwrap().len() < 2 {
                    if queue.is_notified() {
                        queue.collect(&mut incoming);
                        state.lock().unwrap().append(&mut incoming);
                    } else {
                        queue.sleep(None);
                    }
                }
            })
        };
        let caller = |queue: Arc<Queue>| {
            thread::spawn(move || {
                append(&queue).unwrap();
                queue.start().unwrap();
            })
        };
        let other = caller(queue.clone());
        append(&queue).unwrap();
        queue.start().unwrap();
        other.join().unwrap();
        engine.join().unwrap();
    });
}

/// What was started before the stop is done, what was not is not, and who waits for the end sees it.
#[test]
fn a_stop_drains_and_its_caller_sees_the_end() {
    model(3, || {
        let (queue, state) = (queue(), Arc::new(Mutex::new(Vec::new())));
        let engine = {
            let (queue, state) = (queue.clone(), state.clone());
            thread::spawn(move || run(&queue, &state))
        };
        append(&queue).unwrap();
        queue.start().unwrap();
        append(&queue).unwrap();
        queue.stop();
        assert_eq!(append(&queue), Err(Rejected::Ending));
        queue.wait_for_end();
        assert_eq!(*state.lock().unwrap(), [0]);
        engine.join().unwrap();
    });
}

/// An abort ends a loop that has nothing to do, or has yet to look.
#[test]
fn an_abort_ends_it_wherever_it_is() {
    model(3, || {
        let (queue, state) = (queue(), Arc::new(Mutex::new(Vec::new())));
        let engine = {
            let (queue, state) = (queue.clone(), state.clone());
            thread::spawn(move || run(&queue, &state))
        };
        append(&queue).unwrap();
        queue.start().unwrap();
        queue.abort();
        queue.wait_for_end();
        assert!(state.lock().unwrap().len() <= 1);
        engine.join().unwrap();
    });
}

/// A waiter gets the lock, and the loop goes on after it and misses nothing that was started meanwhile.
#[test]
fn a_waiter_gets_the_lock_and_releases_it() {
    model(2, || {
        let (queue, state) = (queue(), Arc::new(Mutex::new(Vec::new())));
        let engine = {
            let (queue, state) = (queue.clone(), state.clone());
            thread::spawn(move || run(&queue, &state))
        };
        let waiter = {
            let (queue, state) = (queue.clone(), state.clone());
            thread::spawn(move || {
                queue.add_waiter();
                let seen = state.lock().unwrap().len();
                queue.remove_waiter();
                assert!(seen <= 1);
            })
        };
        append(&queue).unwrap();
        queue.start().unwrap();
        queue.stop();
        waiter.join().unwrap();
        queue.wait_for_end();
        assert_eq!(*state.lock().unwrap(), [0]);
        engine.join().unwrap();
    });
}

#[test]
fn a_start_that_wakes_nobody_is_found() {
    gets_stuck("models_of_submit_queue::no_start_is_lost", Mistake::NoNotify);
}

#[test]
fn a_sleeper_that_looks_before_it_locks_is_found() {
    gets_stuck("models_of_submit_queue::no_start_is_lost", Mistake::LookThenWait);
}

#[test]
fn a_notification_that_is_not_seen_is_found() {
    gets_stuck("models_of_submit_queue::no_start_is_lost", Mistake::NoStore);
}

#[test]
fn an_end_that_wakes_nobody_is_found() {
    gets_stuck("models_of_submit_queue::a_stop_drains_and_its_caller_sees_the_end", Mistake::NoNotify);
}

#[test]
fn an_abort_that_falls_between_look_and_sleep_is_found() {
    gets_stuck("models_of_submit_queue::an_abort_ends_it_wherever_it_is", Mistake::LookThenWait);
}

#[test]
fn a_last_waiter_that_wakes_nobody_is_found() {
    gets_stuck("models_of_submit_queue::a_waiter_gets_the_lock_and_releases_it", Mistake::NoNotify);
}
