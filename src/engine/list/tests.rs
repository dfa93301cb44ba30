//! The list against a model that has no links: for each place in the circle, the queue of a connector.

use std::collections::{HashSet, VecDeque};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const CONNECTORS: u32 = 6;

#[derive(Debug, Clone)]
enum Op {
    Append(u32),
    /// The next operation was stepped and is not done.
    Pass,
    /// It was stepped and is done.
    Remove,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![5 => (0..CONNECTORS).prop_map(Op::Append), 3 => Just(Op::Pass), 5 => Just(Op::Remove)]
}

#[derive(Default)]
struct Model {
    /// From where a lap begins: connector, and its slots in order.
    circle: VecDeque<(u32, VecDeque<u32>)>,
    /// Index in the circle of the place before the one that is stepped next.
    before_next: usize,
}

impl Model {
    fn append(&mut self, connector: u32, slot: u32) {
        if let Some((_, queue)) = self.circle.iter_mut().find(|(of, _)| *of == connector) {
            queue.push_back(slot);
            return;
        }
        let at = self.circle.len().min(1);
        self.circle.insert(at, (connector, VecDeque::from([slot])));
        if at <= self.before_next && self.circle.len() > 1 {
            self.before_next += 1;
        }
    }

    fn next(&self) -> usize {
        (self.before_next + 1) % self.circle.len()
    }

    fn remove(&mut self) {
        let at = self.next();
        self.circle[at].1.pop_front();
        if !self.circle[at].1.is_empty() {
            // The operation that took the place is not stepped in this lap.
            self.before_next = at;
            return;
        }
        self.circle.remove(at);
        if at == 0 && !self.circle.is_empty() {
            // The lap begins with the one that followed, which now is first.
            self.before_next = self.circle.len() - 1;
        } else if at < self.before_next {
            self.before_next -= 1;
        }
    }

    fn flat(&self) -> Vec<(u32, u32)> {
        self.circle.iter().flat_map(|(_, queue)| queue.iter().zip(0..).map(|(slot, depth)| (*slot, depth))).collect()
    }
}

fn flat(list: &List) -> Vec<(u32, u32)> {
    let mut all = Vec::new();
    list.for_each(|slot, depth| all.push((slot, depth)));
    all
}

/// Slots of the pool: none twice, none in use.
fn check_pool(list: &List) {
    let mut seen: HashSet<u32> = flat(list).into_iter().map(|(slot, _)| slot).collect();
    assert_eq!(seen.len(), list.len());
    let mut slot = list.pool;
    while slot != NONE {
        assert!(seen.insert(slot), "slot {slot} is in the pool twice, or in use");
        slot = list.next(slot);
    }
    assert_eq!(seen.len(), list.slots(), "a slot is lost");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_the_model(ops in vec(op(), 0..400)) {
        let (mut list, mut model) = (List::default(), Model::default());
        let mut before_next = NONE;
        for op in ops {
            match op {
                Op::Append(connector) => {
                    let first = list.is_empty();
                    let slot = list.append(connector);
                    model.append(connector, slot);
                    if first {
                        before_next = slot;
                    }
                }
                Op::Pass if !list.is_empty() => {
                    before_next = list.next(before_next);
                    model.before_next = model.next();
                }
                Op::Remove if !list.is_empty() => {
                    prop_assert_eq!(list.next(before_next), model.circle[model.next()].1[0]);
                    before_next = list.remove_next(before_next);
                    model.remove();
                }
                Op::Pass | Op::Remove => {}
            }
            prop_assert_eq!(flat(&list), model.flat());
            prop_assert_eq!(list.is_empty(), model.circle.is_empty());
            if !list.is_empty() {
                prop_assert_eq!(list.next(before_next), model.circle[model.next()].1[0]);
            }
            for connector in 0..CONNECTORS {
                prop_assert_eq!(list.has(connector), model.circle.iter().any(|(of, _)| *of == connector));
            }
            check_pool(&list);
        }
    }
}

#[test]
fn a_circle_of_one_is_replaced_and_then_empties() {
    let mut list = List::default();
    let (first, second) = (list.append(7), list.append(7));
    assert_eq!((list.next(first), list.next_peer(first)), (first, second));
    assert_eq!(list.remove_next(first), second);
    assert_eq!((list.ops(), list.next(second), list.len()), (second, second, 1));
    assert_eq!(list.remove_next(second), NONE);
    assert!(list.is_empty() && !list.has(7));
    assert_eq!(list.append(7), second);
}

#[test]
fn the_pool_grows_only_when_it_is_empty() {
    let mut list = List::default();
    for round in 0..10 {
        let slots: Vec<_> = (0..POOL as u32).map(|connector| list.append(connector)).collect();
        assert_eq!(list.slots(), POOL, "round {round}");
        let mut before_next = slots[0];
        while before_next != NONE {
            before_next = list.remove_next(before_next);
        }
    }
    (0..=POOL as u32).for_each(|connector| _ = list.append(connector));
    assert_eq!(list.slots(), 2 * POOL);
}
