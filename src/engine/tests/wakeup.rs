//! Tests that the thread wakes whenever it should, and sleeps otherwise.

use super::*;

/// Nanoseconds that the threads of that name have run on a processor (Documentation/scheduler/sched-stats.rst: the first number of schedstat).
fn cpu_time(name: &str) -> u64 {
    let mut total = None;
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        let task = task.unwrap().path();
        // Other threads of the test program come and go.
        if std::fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim_end() == name) {
            let text = std::fs::read_to_string(task.join("schedstat")).unwrap();
            *total.get_or_insert(0) += text.split_whitespace().next().unwrap().parse::<u64>().unwrap();
        }
    }
    total.expect("a thread of that name")
}

#[test]
fn a_million_appends_and_starts_race_with_falling_asleep_and_none_is_lost() {
    const OPS: u64 = 1_000_000;
    const PRODUCERS: u64 = 2;
    let engine = threaded("race");
    // The same each time, but for what the scheduler does.
    let finished = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for producer in 0..PRODUCERS {
            let (engine, finished) = (&engine, &finished);
            scope.spawn(move || {
                let connector = engine.add_connector().unwrap();
                let mut random = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(producer + 1);
                for n in 0..OPS / PRODUCERS {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let flag = flags_now_and_then(random);
                    let acts: Vec<_> = flag.iter().map(|(here, go)| Act::Block(Arc::clone(here), Arc::clone(go))).collect();
                    until("there is room", || match engine.append(connector, op(n, &acts)) {
                        Ok(_) => true,
                        Err(refusal) => {
                            assert!(matches!(refusal, Refusal::Full(_)), "{refusal}");
                            false
                        }
                    });
                    engine.start().unwrap();
                    if let Some((here, _)) = flag {
                        // Nobody else will wake it for this one, once the other producer has gone.
                        until("this operation was stepped", || here.load(Ordering::Acquire) == 1);
                        (0..random >> 56).for_each(|_| std::hint::spin_loop());
                    }
                }
                finished.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    assert_eq!(finished.load(Ordering::Relaxed), PRODUCERS);
    until("all are done", || engine.counters().done == OPS);
    assert!(engine.counters().sleeps > 100, "it hardly ever slept: {:?}", engine.counters());
    engine.stop().unwrap();
}

type Flags = (Arc<AtomicU64>, Arc<AtomicU64>);

/// For one operation in 64, what tells that it was stepped, and does not hold it up.
fn flags_now_and_then(random: u64) -> Option<Flags> {
    random.wrapping_shr(40).is_multiple_of(64).then(|| (wait(), Arc::new(AtomicU64::new(1))))
}

#[test]
fn append_alone_wakes_nobody_and_start_does() {
    let engine = threaded("append-only");
    let connector = engine.add_connector().unwrap();
    until("it sleeps", || engine.is_asleep());
    let before = engine.counters();
    engine.group_start().unwrap();
    for n in 0..1000 {
        engine.append(connector, op(n, &[])).unwrap();
    }
    engine.start().unwrap();
    engine.group_end().unwrap();
    assert!(engine.is_asleep());
    assert_eq!(engine.counters(), before);
    engine.start().unwrap();
    until("all are done", || engine.counters().done == 1000);
    until("it sleeps again", || engine.is_asleep());
}

#[test]
fn an_engine_that_has_nothing_to_do_takes_no_processor_time() {
    const NAME: &str = "rh-test-idle";
    let engine = threaded(NAME);
    let connector = engine.add_connector().unwrap();
    engine.append(connector, op(0, &[Act::Moved])).unwrap();
    engine.start().unwrap();
    until("it has done its work and sleeps", || engine.counters().done == 1 && engine.is_asleep());
    // What is held is nothing to do.
    engine.group_start().unwrap();
    engine.append(connector, op(1, &[])).unwrap();
    let sleeps = engine.counters().sleeps;
    let before = cpu_time(NAME);
    clock::sleep(Duration::from_millis(300));
    let used = cpu_time(NAME) - before;
    // The way into the sleep may still have been going on.
    assert!(used < 1_000_000, "{used} ns in 300 ms");
    assert_eq!(engine.counters().sleeps, sleeps, "it woke in between");
}

#[test]
fn a_thread_whose_operations_do_not_move_sleeps_if_its_options_say_so() {
    let sleeping = Options { idle_sleep: Duration::from_secs(3600), yields: 3, ..options("sleeps") };
    let engine = Engine::new(Script::default(), sleeping).unwrap();
    let connector = engine.add_connector().unwrap();
    let go = wait();
    engine.append(connector, op(0, &[Act::Until(Arc::clone(&go))])).unwrap();
    engine.start().unwrap();
    until("it sleeps", || engine.is_asleep() && engine.counters().yields > 0);
    let counters = engine.counters();
    assert_eq!((counters.yields, counters.idle_laps), (3, 40));
    go.store(1, Ordering::Release);
    // Any start ends the sleep.
    engine.append(connector, op(1, &[])).unwrap();
    engine.start().unwrap();
    until("both are done", || engine.counters().done == 2);
    // Without that it polls.
    let engine = threaded("polls");
    let connector = engine.add_connector().unwrap();
    engine.append(connector, op(0, &[Act::Until(wait())])).unwrap();
    engine.start().unwrap();
    until("it has yielded often enough", || engine.counters().yields > 1100);
    assert!(engine.counters().sleeps <= 1 && !engine.is_asleep());
}

#[test]
fn callers_get_the_lock_while_the_thread_has_work() {
    let engine = threaded("waited-for");
    let connector = engine.add_connector().unwrap();
    let go = wait();
    engine.append(connector, op(0, &[Act::Until(Arc::clone(&go))])).unwrap();
    engine.start().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..200 {
                    assert_eq!(engine.with_work(|work| work.ended.len()), Ok(0));
                    assert_eq!(engine.dump().unwrap().operations.len(), 1);
                }
            });
        }
    });
    // A caller that panics does not lock the others out.
    let panicked = catch_unwind(AssertUnwindSafe(|| engine.with_work(|_| panic!("a caller"))));
    assert!(panicked.is_err());
    go.store(1, Ordering::Release);
    until("it goes on", || engine.counters().done == 1);
}
