//! Tests of stop, abort, failure and fork, in every state of an engine.

use super::*;
use crate::base::fork::tests::in_child;

/// What an engine is doing when it is ended.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Doing {
    /// It has never had anything to do.
    Nothing,
    /// It has, and sleeps again.
    Asleep,
    /// It holds an open group.
    Holding,
    /// Operations were started that it may not have collected.
    Ready,
    /// An operation waits, others behind it.
    Waiting,
    /// It is in the middle of a step.
    InStep,
}

const ALL: [Doing; 6] = [Doing::Nothing, Doing::Asleep, Doing::Holding, Doing::Ready, Doing::Waiting, Doing::InStep];

/// An engine that is doing something, and what a test needs of it.
struct TestEngine {
    engine: Engine<Script>,
    connector: ConnectorId,
    alive: Arc<AtomicUsize>,
    /// Lets the operation that waits go on.
    go: Arc<AtomicU64>,
    /// Operations that a stop has to wait for.
    started: usize,
}

fn test_engine(doing: Doing) -> TestEngine {
    let engine = threaded("ending");
    let [connector, other] = [(); 2].map(|()| engine.add_connector().unwrap());
    let alive = Arc::new(AtomicUsize::new(0));
    let (here, go) = (wait(), wait());
    let append = |connector, acts: &[Act]| engine.append(connector, Op { _alive: Some(Alive::new(&alive)), ..op(0, acts) }).unwrap();
    let mut started = 0;
    match doing {
        Doing::Nothing => {}
        Doing::Asleep => {
            append(connector, &[Act::Moved]);
            engine.start().unwrap();
            until("it sleeps again", || engine.is_asleep() && engine.counters().done == 1);
            started = 1;
        }
        Doing::Holding => {
            engine.group_start().unwrap();
            append(connector, &[]);
            append(other, &[]);
            engine.start().unwrap();
        }
        Doing::Ready => {
            (0..10).for_each(|_| _ = append(connector, &[Act::Idle, Act::Moved]));
            engine.start().unwrap();
            started = 10;
        }
        Doing::Waiting => {
            append(connector, &[Act::Until(Arc::clone(&go))]);
            (0..3).for_each(|_| _ = append(connector, &[]));
            append(other, &[Act::Until(Arc::clone(&go))]);
            engine.start().unwrap();
            until("both were stepped", || engine.counters().laps > 2);
            started = 5;
        }
        Doing::InStep => {
            append(connector, &[Act::Block(Arc::clone(&here), Arc::clone(&go))]);
            append(other, &[]);
            engine.start().unwrap();
            until("it is in the step", || here.load(Ordering::Acquire) == 1);
            started = 2;
        }
    }
    TestEngine { engine, connector, alive, go, started }
}

#[test]
fn stop_does_what_was_started_in_every_state() {
    for doing in ALL {
        let TestEngine { engine, connector, alive, go, started } = test_engine(doing);
        std::thread::scope(|scope| {
            let stopping = scope.spawn(|| engine.stop());
            if matches!(doing, Doing::Waiting | Doing::InStep) {
                until("appends are refused", || engine.append(connector, op(0, &[])) == Err(Refusal::Stopped));
                assert!(!stopping.is_finished() && !engine.has_ended(), "{doing:?}");
            }
            go.store(1, Ordering::Release);
            assert_eq!(stopping.join().unwrap(), Ok(()), "{doing:?}");
        });
        assert!(engine.has_ended() && engine.fatal().is_none());
        assert_eq!(engine.counters().done, started as u64, "{doing:?}");
        let held = if doing == Doing::Holding { 2 } else { 0 };
        assert_eq!(alive.load(Ordering::Relaxed), held, "{doing:?}");
        assert_eq!(engine.start(), Err(Refusal::Stopped));
        assert_eq!(engine.append(connector, op(0, &[])), Err(Refusal::Stopped));
        // Ending what has ended does nothing.
        assert_eq!((engine.stop(), engine.abort()), (Ok(()), Ok(())));
        drop(engine);
        assert_eq!(alive.load(Ordering::Relaxed), 0, "{doing:?}");
    }
}

#[test]
fn abort_leaves_what_is_not_done_in_every_state() {
    for doing in ALL {
        let TestEngine { engine, connector, alive, go, .. } = test_engine(doing);
        std::thread::scope(|scope| {
            let aborting = scope.spawn(|| engine.abort());
            if doing == Doing::InStep {
                until("appends are refused", || engine.start() == Err(Refusal::Stopped));
                assert!(!aborting.is_finished());
                // A step is not cut short.
                go.store(1, Ordering::Release);
            }
            assert_eq!(aborting.join().unwrap(), Ok(()), "{doing:?}");
        });
        assert!(engine.has_ended() && engine.fatal().is_none());
        let (done, left) = (engine.counters().done as usize, alive.load(Ordering::Relaxed));
        match doing {
            Doing::Nothing | Doing::Asleep => assert_eq!(left, 0),
            Doing::Holding => assert_eq!((done, left), (0, 2)),
            Doing::Ready => assert_eq!(done + left, 10),
            Doing::Waiting => assert_eq!((done, left), (0, 5)),
            // The other connector's operation came first.
            Doing::InStep => assert_eq!((done, left), (1, 1)),
        }
        assert_eq!(engine.dump().unwrap().operations.len(), left, "{doing:?}");
        engine.remove_connector(connector).unwrap();
        let others = match doing {
            Doing::Holding | Doing::Waiting => 1,
            _ => 0,
        };
        assert_eq!(alive.load(Ordering::Relaxed), others, "{doing:?}");
        assert_eq!(engine.stop(), Ok(()));
        drop(engine);
        assert_eq!(alive.load(Ordering::Relaxed), 0, "{doing:?}");
    }
}

#[test]
fn dropping_an_engine_aborts_it_in_every_state() {
    for doing in ALL {
        let TestEngine { engine, alive, go, .. } = test_engine(doing);
        if doing == Doing::InStep {
            go.store(1, Ordering::Release);
        }
        drop(engine);
        assert_eq!(alive.load(Ordering::Relaxed), 0, "{doing:?}");
    }
}

#[test]
fn a_stop_that_waits_for_ever_is_ended_by_an_abort() {
    let TestEngine { engine, connector, .. } = test_engine(Doing::Waiting);
    std::thread::scope(|scope| {
        let stopping = [(); 2].map(|()| scope.spawn(|| engine.stop()));
        until("appends are refused", || engine.append(connector, op(0, &[])) == Err(Refusal::Stopped));
        assert_eq!(engine.abort(), Ok(()));
        for stopping in stopping {
            assert_eq!(stopping.join().unwrap(), Ok(()));
        }
    });
}

#[test]
fn an_engine_without_a_thread_ends_by_its_steps() {
    let engine = stepped();
    let a = engine.add_connector().unwrap();
    engine.append(a, op(1, &[Act::Moved])).unwrap();
    engine.start().unwrap();
    engine.append(a, op(2, &[])).unwrap();
    engine.stop().unwrap();
    assert_eq!(drain(&engine), 2);
    assert!(engine.has_ended());
    assert_eq!(engine.step(), Ok(Step::Ended));

    let engine = stepped();
    let a = engine.add_connector().unwrap();
    engine.append(a, op(1, &[Act::Moved])).unwrap();
    engine.start().unwrap();
    engine.step().unwrap();
    engine.abort().unwrap();
    assert_eq!(engine.step(), Ok(Step::Ended));
    assert_eq!(engine.counters().done, 0);
}

/// An operation of the third connector fails in its second step, while others wait and a caller stops the engine.
fn fails(act: Act, shown: &str) {
    for with_thread in [false, true] {
        let engine = if with_thread { threaded("fails") } else { stepped() };
        let connectors = [(); 3].map(|()| engine.add_connector().unwrap());
        for connector in connectors {
            engine.append(connector, op(0, &[])).unwrap();
        }
        engine.append(connectors[0], op(1, &[Act::Until(wait())])).unwrap();
        let failing = engine.append(connectors[2], op(2, &[Act::Moved, act.clone(), Act::Moved])).unwrap();
        engine.append(connectors[2], op(3, &[])).unwrap();
        engine.start().unwrap();
        if with_thread {
            until("it has failed", || engine.has_ended());
        } else {
            while engine.step() != Err(Refusal::Failed) {}
            assert_eq!(engine.step(), Err(Refusal::Failed));
        }
        let fatal = engine.fatal().unwrap();
        assert_eq!((fatal.connector, fatal.op_count), (connectors[2], failing));
        assert_eq!(fatal.to_string(), format!("operation {failing} of connector 2: {shown}"));
        // Every caller learns, and none waits.
        assert_eq!(engine.append(connectors[1], op(4, &[])), Err(Refusal::Failed));
        assert_eq!(engine.start(), Err(Refusal::Failed));
        assert_eq!((engine.stop(), engine.abort()), (Ok(()), Ok(())));
        let dump = engine.dump().unwrap();
        assert_eq!(dump.doing, format!("failed: {fatal}"));
        assert_eq!(dump.operations.iter().map(|op| op.op_count).collect::<Vec<_>>(), [3, failing, 5]);
    }
}

#[test]
fn an_error_ends_the_engine_and_names_the_operation() {
    fails(Act::Fail("the peer is gone"), "the peer is gone");
}

#[test]
fn a_panic_ends_the_engine_alone_and_names_the_operation() {
    fails(Act::Panic("no such thing"), "internal error: no such thing");
}

#[test]
fn whoever_has_seen_the_failure_is_refused() {
    for _ in 0..20 {
        let engine = threaded("fails");
        let connector = engine.add_connector().unwrap();
        engine.append(connector, op(0, &[Act::Fail("the peer is gone")])).unwrap();
        engine.start().unwrap();
        until("it has failed", || engine.fatal().is_some());
        assert_eq!((engine.start(), engine.remove_connector(connector)), (Err(Refusal::Failed), Ok(())));
    }
}

#[test]
fn a_caller_that_waits_in_stop_learns_of_the_failure() {
    let TestEngine { engine, connector, go, .. } = test_engine(Doing::Waiting);
    engine.append(connector, op(0, &[Act::Fail("late")])).unwrap();
    engine.start().unwrap();
    std::thread::scope(|scope| {
        let stopping = scope.spawn(|| engine.stop());
        until("appends are refused", || engine.append(connector, op(0, &[])) == Err(Refusal::Stopped));
        go.store(1, Ordering::Release);
        assert_eq!(stopping.join().unwrap(), Ok(()));
    });
    assert!(engine.fatal().is_some());
}

#[test]
fn two_engines_in_one_process_do_not_know_of_each_other() {
    let (one, two) = (threaded("one"), threaded("two"));
    let (a, b) = (one.add_connector().unwrap(), two.add_connector().unwrap());
    let go = wait();
    one.append(a, op(1, &[Act::Until(Arc::clone(&go))])).unwrap();
    one.start().unwrap();
    two.append(b, op(2, &[Act::Moved])).unwrap();
    two.start().unwrap();
    until("the other one has done its own", || two.counters().done == 1);
    two.append(b, op(3, &[Act::Panic("of its own")])).unwrap();
    two.start().unwrap();
    until("the other one has failed", || two.fatal().is_some());
    assert!(one.fatal().is_none() && !one.has_ended());
    go.store(1, Ordering::Release);
    one.stop().unwrap();
    assert_eq!(one.with_work(|work| work.ended.clone()), Ok(vec![(0, 1)]));
}

/// A client whose operation ends its own engine, as a callback may.
struct EndsItsEngine(Arc<Mutex<Option<Engine<EndsItsEngine>>>>, Arc<Mutex<Vec<Result<()>>>>);

impl Work for EndsItsEngine {
    type Op = ();
    type Error = String;

    fn progress(&mut self, connector: ConnectorId, (): &mut ()) -> std::result::Result<Progress, String> {
        let engine = lock(&self.0).take();
        if let Some(engine) = engine {
            lock(&self.1).extend([engine.with_work(|_| ()), engine.dump().map(drop), engine.append(connector, ()).map(drop)]);
            lock(&self.1).extend([engine.start(), engine.stop()]);
        }
        Ok(Progress::Done)
    }
}

#[test]
fn the_engines_own_thread_may_append_and_drop_it_but_not_wait_for_it() {
    let (place, seen) = (Arc::default(), Arc::default());
    let engine = Engine::new(EndsItsEngine(Arc::clone(&place), Arc::clone(&seen)), options("own-thread")).unwrap();
    let shared = Arc::downgrade(&engine.shared);
    let connector = engine.add_connector().unwrap();
    engine.append(connector, ()).unwrap();
    {
        // Not taken before it is started.
        let mut place = lock(&place);
        engine.start().unwrap();
        *place = Some(engine);
    }
    until("the thread has ended", || shared.strong_count() == 0);
    let own = Err(Refusal::OwnThread);
    assert_eq!(*lock(&seen), [own, own, Ok(()), Ok(()), own]);
}

#[test]
fn a_child_is_refused_and_leaves_the_parents_engine_alone() {
    let TestEngine { engine, connector, alive, go, started } = test_engine(Doing::Waiting);
    assert!(in_child(|| {
        let refused = Err(Refusal::Forked);
        let calls = [
            engine.append(connector, op(0, &[])).map(drop),
            engine.add_connector().map(drop),
            engine.remove_connector(connector),
            engine.group_start(),
            engine.group_end(),
            engine.group_cancel(),
            engine.start(),
            engine.stop(),
            engine.abort(),
            engine.step().map(drop),
            engine.next_op_count().map(drop),
            engine.with_work(|_| ()),
            engine.dump().map(drop),
        ];
        // SAFETY: the parent's engine is never used again in this process, which leaves by _exit.
        let mine = unsafe { std::ptr::read(&engine) };
        drop(mine);
        calls.iter().all(|call| *call == refused) && alive.load(Ordering::Relaxed) == started
    }));
    go.store(1, Ordering::Release);
    engine.stop().unwrap();
    assert_eq!(engine.counters().done, started as u64);
}

#[test]
fn a_child_has_engines_of_its_own() {
    let _parents = test_engine(Doing::Waiting);
    assert!(in_child(|| {
        let engine = threaded("child");
        let Ok(a) = engine.add_connector() else { return false };
        engine.append(a, op(1, &[Act::Moved])).is_ok()
            && engine.start().is_ok()
            && engine.stop().is_ok()
            && engine.with_work(|work| work.ended == [(0, 1)]) == Ok(true)
    }));
}

#[test]
fn a_step_that_does_not_end_is_what_the_dump_shows() {
    let TestEngine { engine, go, .. } = test_engine(Doing::InStep);
    let dump = engine.dump().unwrap();
    assert_eq!(dump.doing, "stuck in a step of operation 0 of connector 0");
    go.store(1, Ordering::Release);
    engine.stop().unwrap();
    assert_eq!(engine.dump().unwrap().doing, "ended");
}
