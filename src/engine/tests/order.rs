//! Tests of the order in which operations are stepped, and of what is held back. Without a thread, but for the last one.

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

#[test]
fn connectors_take_turns_and_operations_of_one_follow_each_other() {
    let engine = stepped();
    let [a, b, c] = [(); 3].map(|()| engine.add_connector().unwrap());
    for (connector, name) in [(a, 1), (b, 2), (c, 3), (a, 4), (b, 5), (a, 6)] {
        engine.append(connector, op(name, &[Act::Moved])).unwrap();
    }
    engine.start().unwrap();
    assert_eq!(drain(&engine), 12);
    // As in NCCL, a new connector is put behind the first of the lap: c is before b.
    let steps = engine.with_work(|work| std::mem::take(&mut work.steps)).unwrap();
    assert_eq!(steps, [(2, 3), (1, 2), (0, 1), (2, 3), (1, 2), (0, 1), (1, 5), (0, 4), (1, 5), (0, 4), (0, 6), (0, 6)]);
    assert_eq!(engine.counters().done, 6);
}

#[test]
fn what_was_appended_runs_only_once_started() {
    let engine = stepped();
    let a = engine.add_connector().unwrap();
    assert_eq!(engine.append(a, op(1, &[])), Ok(0));
    assert_eq!(engine.step(), Ok(Step::Empty));
    engine.start().unwrap();
    assert_eq!(engine.append(a, op(2, &[])), Ok(1));
    assert_eq!(engine.step(), Ok(Step::Stepped(Progress::Done)));
    assert_eq!(engine.step(), Ok(Step::Empty));
    engine.start().unwrap();
    engine.start().unwrap();
    assert_eq!(engine.step(), Ok(Step::Stepped(Progress::Done)));
    assert_eq!(engine.step(), Ok(Step::Empty));
}

#[test]
fn an_open_group_is_held_back_until_it_is_closed_and_started() {
    let engine = stepped();
    let [a, b] = [(); 2].map(|()| engine.add_connector().unwrap());
    engine.append(a, op(1, &[])).unwrap();
    engine.group_start().unwrap();
    engine.append(a, op(2, &[])).unwrap();
    engine.group_start().unwrap();
    engine.append(b, op(3, &[])).unwrap();
    engine.group_end().unwrap();
    engine.append(b, op(4, &[])).unwrap();
    let ended = || engine.with_work(|work| work.ended.clone()).unwrap();
    // What was appended before the group runs; the rest is held however often one starts.
    for _ in 0..3 {
        engine.start().unwrap();
        drain(&engine);
        assert_eq!(ended(), [(0, 1)]);
    }
    engine.group_end().unwrap();
    assert_eq!(engine.step(), Ok(Step::Empty));
    assert_eq!(engine.group_end(), Err(Refusal::NoGroup));
    engine.start().unwrap();
    drain(&engine);
    assert_eq!(ended(), [(0, 1), (1, 3), (0, 2), (1, 4)]);
}

#[test]
fn a_cancelled_group_never_was() {
    let engine = stepped();
    let alive = Arc::new(AtomicUsize::new(0));
    let a = engine.add_connector().unwrap();
    assert_eq!(engine.group_cancel(), Err(Refusal::NoGroup));
    assert_eq!(engine.append(a, op(1, &[])), Ok(0));
    engine.group_start().unwrap();
    engine.group_start().unwrap();
    for n in 1..=3 {
        let _alive = Some(Alive::new(&alive));
        assert_eq!(engine.append(a, Op { _alive, ..op(9, &[]) }), Ok(n));
    }
    engine.group_cancel().unwrap();
    assert_eq!(alive.load(Ordering::Relaxed), 0);
    assert_eq!(engine.group_end(), Err(Refusal::NoGroup));
    assert_eq!(engine.append(a, op(2, &[])), Ok(1));
    engine.start().unwrap();
    drain(&engine);
    assert_eq!(engine.with_work(|work| work.ended.clone()), Ok(vec![(0, 1), (0, 2)]));
}

#[test]
fn operation_counts_wrap() {
    let first = u64::MAX - 2;
    let engine = Engine::stepped(Script::default(), Options { first_op_count: first, limit: 4, ..options("wrap") });
    let [a, b] = [(); 2].map(|()| engine.add_connector().unwrap());
    let mut next = first;
    for round in 0..5 {
        engine.append(a, op(round, &[Act::Moved])).unwrap();
        engine.group_start().unwrap();
        assert_eq!(engine.append(b, op(round + 100, &[])), Ok(next.wrapping_add(1)));
        engine.start().unwrap();
        assert_eq!(drain(&engine), 2, "round {round}");
        engine.group_end().unwrap();
        engine.start().unwrap();
        assert_eq!(drain(&engine), 1, "round {round}");
        next = next.wrapping_add(2);
        assert_eq!(engine.next_op_count(), Ok(next));
    }
    assert_eq!(next, 7);
    // The limit counts what is not done, whatever the numbers.
    for _ in 0..4 {
        engine.append(a, op(0, &[])).unwrap();
    }
    assert_eq!(engine.append(a, op(0, &[])), Err(Refusal::Full(4)));
    engine.start().unwrap();
    drain(&engine);
    engine.append(a, op(0, &[])).unwrap();
}

#[test]
fn counters_wrap() {
    let engine = stepped();
    let a = engine.add_connector().unwrap();
    let counts = &engine.shared.counts;
    for counter in [&counts.steps, &counts.done, &counts.laps] {
        counter.store(u64::MAX, Ordering::Relaxed);
    }
    engine.append(a, op(1, &[])).unwrap();
    engine.start().unwrap();
    drain(&engine);
    let Counters { steps, done, laps, .. } = engine.counters();
    assert_eq!((steps, done, laps), (0, 0, 0));
}

#[test]
fn a_connector_is_removed_once_it_has_nothing_to_do() {
    let engine = stepped();
    let [a, b] = [(); 2].map(|()| engine.add_connector().unwrap());
    engine.append(a, op(1, &[Act::Moved])).unwrap();
    assert_eq!(engine.remove_connector(a), Err(Refusal::Busy(a)), "held");
    engine.start().unwrap();
    assert_eq!(engine.remove_connector(a), Err(Refusal::Busy(a)), "started");
    engine.step().unwrap();
    assert_eq!(engine.remove_connector(a), Err(Refusal::Busy(a)), "in progress");
    engine.remove_connector(b).unwrap();
    drain(&engine);
    engine.remove_connector(a).unwrap();
    assert_eq!(engine.remove_connector(a), Err(Refusal::NoConnector(a)));
    assert_eq!(engine.append(a, op(2, &[])), Err(Refusal::NoConnector(a)));
    let again = engine.add_connector().unwrap();
    assert_eq!(again.index(), a.index());
    assert_eq!(engine.append(a, op(2, &[])), Err(Refusal::NoConnector(a)), "the index belongs to another");
    engine.append(again, op(2, &[])).unwrap();
}

#[test]
fn connectors_without_operations_are_not_stepped() {
    let engine = stepped();
    let connectors: Vec<_> = (0..1000).map(|_| engine.add_connector().unwrap()).collect();
    // All have had something to do before.
    connectors.iter().for_each(|&connector| _ = engine.append(connector, op(0, &[])).unwrap());
    engine.start().unwrap();
    assert_eq!(drain(&engine), 1000);
    engine.append(connectors[500], op(1, &vec![Act::Idle; 2000])).unwrap();
    engine.start().unwrap();
    engine.with_work(|work| work.steps.clear()).unwrap();
    assert_eq!(drain(&engine), 2001);
    assert_eq!(engine.with_work(|work| work.steps.iter().all(|step| *step == (500, 1))), Ok(true));
}

#[test]
fn the_dump_shows_three_connectors_three_operations_deep_and_what_each_waits_for() {
    let engine = stepped();
    let connectors = [(); 3].map(|()| engine.add_connector().unwrap());
    for name in 0..9 {
        engine.append(connectors[name as usize % 3], op(name, &[Act::Moved, Act::Idle, Act::Idle])).unwrap();
    }
    engine.start().unwrap();
    engine.group_start().unwrap();
    engine.append(connectors[1], op(9, &[])).unwrap();
    // Two laps and a bit: the first two in the circle wait, the third has moved.
    (0..5).for_each(|_| _ = engine.step().unwrap());
    let dump = engine.dump().unwrap();
    let seen: Vec<_> = dump.operations.iter().map(|op| (op.connector.index(), op.op_count, op.state, op.depth, op.held)).collect();
    let (ready, progress) = (State::Ready, State::Progress);
    assert_eq!(
        seen,
        [
            (0, 0, progress, 0, false),
            (0, 3, ready, 1, false),
            (0, 6, ready, 2, false),
            (2, 2, progress, 0, false),
            (2, 5, ready, 1, false),
            (2, 8, ready, 2, false),
            (1, 1, progress, 0, false),
            (1, 4, ready, 1, false),
            (1, 7, ready, 2, false),
            (1, 9, ready, 3, true),
        ]
    );
    let idle: Vec<_> = dump.operations.iter().map(|op| !op.idle.is_zero()).collect();
    assert_eq!(idle, [false, false, false, true, false, false, true, false, false, false]);
    assert_eq!(dump.operations[3].what, "act 2 of 3");
    let text = dump.to_string();
    assert!(text.starts_with("stepped: without a thread, 10 operations\n[connector 0|0| Progress for "), "{text}");
    assert!(text.contains("\n`-> [connector 2|5| Ready for 0.") && text.contains("s: act 2 of 3]\n"), "{text}");
    assert!(text.contains("\n[connector 1|9| Ready, held for "), "{text}");
}

#[test]
fn a_step_does_not_allocate_beyond_the_most_that_ever_was_in_use() {
    let engine = stepped();
    let connectors: Vec<_> = (0..40).map(|_| engine.add_connector().unwrap()).collect();
    let round = || {
        for &connector in &connectors {
            engine.append(connector, op(0, &[])).unwrap();
        }
        engine.start().unwrap();
        drain(&engine);
        let scheduler = lock(&engine.shared.scheduler);
        (scheduler.list.slots(), scheduler.slots.capacity(), scheduler.incoming.capacity())
    };
    // Two rounds, as the two vectors of started operations change places.
    let (_, second) = (round(), round());
    for _ in 0..10 {
        assert_eq!(round(), second);
    }
    assert_eq!(second.0, 2 * list::POOL);
}

/// For each connector, for each operation: how often it is idle before each of its moves.
fn load() -> impl Strategy<Value = Vec<Vec<Vec<u8>>>> {
    vec(vec(vec(0..3u8, 0..4), 0..8), 64)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn sixty_four_connectors_each_do_their_operations_in_order(load in load(), grouped in any::<bool>()) {
        let engine = threaded("sixty-four");
        let connectors: Vec<_> = load.iter().map(|_| engine.add_connector().unwrap()).collect();
        let depth = load.iter().map(Vec::len).max().unwrap_or(0);
        if grouped {
            engine.group_start().unwrap();
        }
        let mut steps = 0;
        for at in 0..depth {
            for (connector, ops) in connectors.iter().zip(&load) {
                let Some(moves) = ops.get(at) else { continue };
                let acts: Vec<_> = moves.iter().flat_map(|&idle| (0..idle).map(|_| Act::Idle).chain([Act::Moved])).collect();
                steps += acts.len() as u64 + 1;
                engine.append(*connector, op(at as u64, &acts)).unwrap();
            }
            if !grouped {
                engine.start().unwrap();
            }
        }
        if grouped {
            prop_assert_eq!(engine.counters().steps, 0);
            engine.group_end().unwrap();
            engine.start().unwrap();
        }
        engine.stop().unwrap();
        let ended = engine.with_work(|work| std::mem::take(&mut work.ended)).unwrap();
        for (at, ops) in load.iter().enumerate() {
            let of_it: Vec<_> = ended.iter().filter(|(connector, _)| *connector == at).map(|(_, name)| *name).collect();
            prop_assert_eq!(of_it, (0..ops.len() as u64).collect::<Vec<_>>());
        }
        prop_assert_eq!(engine.counters().steps, steps);
        prop_assert_eq!(engine.counters().done, ended.len() as u64);
    }
}
