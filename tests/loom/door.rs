//! The engine's door: no start is lost, nobody waits in vain, whatever falls between what.
//!
//! The loop here is that of `src/engine/mod.rs` with operations that are done at once.

use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::door::{Door, Orders, Shut};
use crate::sync::{Mistake, gets_stuck, model};

type Numbers = Door<u64, ()>;

fn door() -> Arc<Numbers> {
    Arc::new(Door::new(100, 0, None, ()))
}

fn append(door: &Numbers) -> Result<u64, Shut> {
    door.append(|(), op_count| Ok(op_count))
}

/// What the engine's thread does, on a state that it shares with visitors. Returns what was done once it is told to end.
fn run(door: &Numbers, state: &Mutex<Vec<u64>>) {
    let mut incoming = Vec::new();
    let mut done = state.lock().unwrap();
    let mut stopping = false;
    loop {
        if door.has_rung() {
            let Orders { stop, abort, visitors } = door.collect(&mut incoming);
            done.append(&mut incoming);
            stopping |= stop;
            if abort {
                break;
            }
            if visitors {
                drop(done);
                door.give_way();
                done = state.lock().unwrap();
            }
            continue;
        }
        if stopping {
            break;
        }
        drop(done);
        door.sleep(None);
        done = state.lock().unwrap();
    }
    drop(done);
    door.end();
}

/// Two callers start an operation each; each is done although nobody starts anything after.
#[test]
fn no_start_is_lost() {
    model(3, || {
        let (door, state) = (door(), Arc::new(Mutex::new(Vec::new())));
        let engine = {
            let (door, state) = (door.clone(), state.clone());
            thread::spawn(move || {
                let mut incoming = Vec::new();
                while state.lock().unwrap().len() < 2 {
                    if door.has_rung() {
                        door.collect(&mut incoming);
                        state.lock().unwrap().append(&mut incoming);
                    } else {
                        door.sleep(None);
                    }
                }
            })
        };
        let caller = |door: Arc<Numbers>| {
            thread::spawn(move || {
                append(&door).unwrap();
                door.start().unwrap();
            })
        };
        let other = caller(door.clone());
        append(&door).unwrap();
        door.start().unwrap();
        other.join().unwrap();
        engine.join().unwrap();
    });
}

/// What was started before the stop is done, what was not is not, and who waits for the end sees it.
#[test]
fn a_stop_drains_and_its_caller_sees_the_end() {
    model(3, || {
        let (door, state) = (door(), Arc::new(Mutex::new(Vec::new())));
        let engine = {
            let (door, state) = (door.clone(), state.clone());
            thread::spawn(move || run(&door, &state))
        };
        append(&door).unwrap();
        door.start().unwrap();
        append(&door).unwrap();
        door.stop();
        assert_eq!(append(&door), Err(Shut::Ending));
        door.wait_for_end();
        assert_eq!(*state.lock().unwrap(), [0]);
        engine.join().unwrap();
    });
}

/// An abort ends a loop that has nothing to do, or has yet to look.
#[test]
fn an_abort_ends_it_wherever_it_is() {
    model(3, || {
        let (door, state) = (door(), Arc::new(Mutex::new(Vec::new())));
        let engine = {
            let (door, state) = (door.clone(), state.clone());
            thread::spawn(move || run(&door, &state))
        };
        append(&door).unwrap();
        door.start().unwrap();
        door.abort();
        door.wait_for_end();
        assert!(state.lock().unwrap().len() <= 1);
        engine.join().unwrap();
    });
}

/// A visitor gets in, and the loop goes on after it and misses nothing that was started meanwhile.
#[test]
fn a_visitor_gets_in_and_out() {
    model(2, || {
        let (door, state) = (door(), Arc::new(Mutex::new(Vec::new())));
        let engine = {
            let (door, state) = (door.clone(), state.clone());
            thread::spawn(move || run(&door, &state))
        };
        let visitor = {
            let (door, state) = (door.clone(), state.clone());
            thread::spawn(move || {
                door.visit();
                let seen = state.lock().unwrap().len();
                door.leave();
                assert!(seen <= 1);
            })
        };
        append(&door).unwrap();
        door.start().unwrap();
        door.stop();
        visitor.join().unwrap();
        door.wait_for_end();
        assert_eq!(*state.lock().unwrap(), [0]);
        engine.join().unwrap();
    });
}

#[test]
fn a_start_that_wakes_nobody_is_found() {
    gets_stuck("models_of_door::no_start_is_lost", Mistake::NoNotify);
}

#[test]
fn a_sleeper_that_looks_before_it_locks_is_found() {
    gets_stuck("models_of_door::no_start_is_lost", Mistake::LookThenWait);
}

#[test]
fn a_bell_that_is_not_heard_is_found() {
    gets_stuck("models_of_door::no_start_is_lost", Mistake::NoStore);
}

#[test]
fn an_end_that_is_not_told_is_found() {
    gets_stuck("models_of_door::a_stop_drains_and_its_caller_sees_the_end", Mistake::NoNotify);
}

#[test]
fn an_abort_that_falls_between_look_and_sleep_is_found() {
    gets_stuck("models_of_door::an_abort_ends_it_wherever_it_is", Mistake::LookThenWait);
}

#[test]
fn a_last_visitor_that_tells_nobody_is_found() {
    gets_stuck("models_of_door::a_visitor_gets_in_and_out", Mistake::NoNotify);
}
