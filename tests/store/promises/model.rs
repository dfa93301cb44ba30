//! Random operations through two handles on one store, against an oracle that knows torch's rules.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use railhead::store::{Error, Store};

use super::contract::{Bed, LONG, settled};

#[derive(Debug, Clone)]
enum Op {
    Set(String, Vec<u8>),
    Get(String),
    Wait(Vec<String>),
    Check(Vec<String>),
    Add(String, i64),
    CompareSet(String, Vec<u8>, Vec<u8>),
    Append(String, Vec<u8>),
    MultiGet(Vec<String>),
    MultiSet(Vec<(String, Vec<u8>)>),
    Delete(String),
    NumKeys,
    ListKeys,
    Push(String, Vec<u8>),
    /// With a moment's patience, or none.
    Pop(String, bool),
    QueueLen(String),
}

/// Few keys, so that operations meet.
fn key() -> impl Strategy<Value = String> {
    prop_oneof![8 => (0..5u8).prop_map(|n| format!("k{n}")), 1 => Just(String::new()), 1 => Just("ключ/\u{0}-".to_owned())]
}

/// Names of queues, the last of which keys have, too.
fn queue() -> impl Strategy<Value = String> {
    prop_oneof![2 => (0..2u8).prop_map(|n| format!("queue{n}")), 1 => Just("k0".to_owned())]
}

fn value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        2 => Just(Vec::new()),
        4 => (-3i64..3).prop_map(|n| n.to_string().into_bytes()),
        2 => vec(any::<u8>(), 0..20),
        1 => vec(any::<u8>(), 3_000..5_000),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let keys = || vec(prop_oneof![4 => key().boxed(), 1 => queue().boxed()], 0..4);
    prop_oneof![
        3 => (key(), value()).prop_map(|(k, v)| Op::Set(k, v)),
        2 => key().prop_map(Op::Get),
        1 => keys().prop_map(Op::Wait),
        2 => keys().prop_map(Op::Check),
        2 => (key(), prop_oneof![-5i64..5, Just(i64::MAX), Just(i64::MIN)]).prop_map(|(k, n)| Op::Add(k, n)),
        3 => (key(), value(), value()).prop_map(|(k, e, d)| Op::CompareSet(k, e, d)),
        2 => (key(), value()).prop_map(|(k, v)| Op::Append(k, v)),
        2 => vec(key(), 0..4).prop_map(Op::MultiGet),
        1 => vec((key(), value()), 0..4).prop_map(Op::MultiSet),
        2 => key().prop_map(Op::Delete),
        1 => Just(Op::NumKeys),
        1 => Just(Op::ListKeys),
        2 => (queue(), value()).prop_map(|(k, v)| Op::Push(k, v)),
        2 => (queue(), prop::bool::weighted(0.1)).prop_map(|(k, patient)| Op::Pop(k, patient)),
        1 => queue().prop_map(Op::QueueLen),
    ]
}

#[derive(Default)]
struct Oracle {
    values: BTreeMap<String, Vec<u8>>,
    queues: BTreeMap<String, VecDeque<Vec<u8>>>,
}

impl Oracle {
    fn has(&self, key: &String) -> bool {
        self.values.contains_key(key) || self.queues.get(key).is_some_and(|queue| !queue.is_empty())
    }

    /// The sum that `add` must give, if there is one.
    fn sum(&self, key: &String, delta: i64, empty_is_zero: bool) -> Option<i64> {
        match self.values.get(key).map(Vec::as_slice) {
            None => Some(delta),
            Some(b"") if empty_is_zero => Some(delta),
            // The values in use are such that nothing but a whole number is read as one.
            Some(text) => Some(std::str::from_utf8(text).ok()?.parse::<i64>().ok()?.wrapping_add(delta)),
        }
    }
}

/// Runs random operations on stores from `make`.
pub fn check(make: fn() -> Bed) {
    let config = ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(ops in vec((any::<bool>(), op()), 1..60))| run(&make(), ops)?);
}

fn run(bed: &Bed, ops: Vec<(bool, Op)>) -> Result<(), TestCaseError> {
    let handles = [bed.handle(), bed.handle()];
    let mut oracle = Oracle::default();
    for (second, op) in ops {
        step(bed, &*handles[usize::from(second)], &mut oracle, op)?;
    }
    for (key, value) in &oracle.values {
        prop_assert_eq!(&handles[0].get(key, LONG).unwrap(), value);
    }
    Ok(())
}

fn step(bed: &Bed, store: &dyn Store, oracle: &mut Oracle, op: Op) -> Result<(), TestCaseError> {
    match op {
        Op::Set(key, value) => {
            settled(store, |s| s.set(&key, &value).unwrap());
            oracle.values.insert(key, value);
        }
        Op::Get(key) => match oracle.values.get(&key) {
            Some(value) => prop_assert_eq!(&store.get(&key, LONG).unwrap(), value),
            // What `get` gives for a queue is nobody's business.
            None if oracle.has(&key) => drop(store.get(&key, LONG).unwrap()),
            None => prop_assert!(matches!(store.get(&key, Duration::ZERO), Err(Error::Timeout(_)))),
        },
        Op::Wait(keys) => {
            let there = keys.iter().all(|key| oracle.has(key));
            match store.wait(&refs(&keys), Duration::ZERO) {
                Ok(()) => prop_assert!(there),
                Err(Error::Timeout(_)) => prop_assert!(!there),
                Err(other) => return Err(TestCaseError::fail(other.to_string())),
            }
        }
        Op::Check(keys) => prop_assert_eq!(store.check(&refs(&keys)).unwrap(), keys.iter().all(|key| oracle.has(key))),
        Op::Add(key, delta) => {
            // A server closes the connection upon an invalid request: that is for another test.
            if let Some(sum) = oracle.sum(&key, delta, bed.empty_is_zero) {
                prop_assert_eq!(store.add(&key, delta).unwrap(), sum);
                oracle.values.insert(key, sum.to_string().into_bytes());
            }
        }
        Op::CompareSet(key, expected, desired) => {
            let current = oracle.values.get(&key).cloned();
            let answer = match current {
                Some(current) if current != expected => current,
                None if !expected.is_empty() => expected.clone(),
                _ => {
                    oracle.values.insert(key.clone(), desired.clone());
                    desired.clone()
                }
            };
            prop_assert_eq!(store.compare_set(&key, &expected, &desired).unwrap(), answer);
        }
        Op::Append(key, value) => {
            settled(store, |s| s.append(&key, &value).unwrap());
            oracle.values.entry(key).or_default().extend(value);
        }
        Op::MultiGet(keys) => {
            let values: Option<Vec<_>> = keys.iter().map(|key| oracle.values.get(key).cloned()).collect();
            match values {
                Some(values) => prop_assert_eq!(store.multi_get(&refs(&keys), LONG).unwrap(), values),
                None if keys.iter().all(|key| oracle.has(key)) => drop(store.multi_get(&refs(&keys), LONG).unwrap()),
                None => prop_assert!(matches!(store.multi_get(&refs(&keys), Duration::ZERO), Err(Error::Timeout(_)))),
            }
        }
        Op::MultiSet(entries) => {
            let borrowed: Vec<(&str, &[u8])> = entries.iter().map(|(key, value)| (key.as_str(), value.as_slice())).collect();
            settled(store, |s| s.multi_set(&borrowed).unwrap());
            oracle.values.extend(entries);
        }
        Op::Delete(key) => {
            let there = oracle.values.remove(&key).is_some();
            prop_assert_eq!(store.delete_key(&key).unwrap(), there || bed.deletes_all);
        }
        Op::NumKeys => prop_assert_eq!(store.num_keys().unwrap(), oracle.values.len() as i64 + bed.own_keys),
        Op::ListKeys => {
            let mut keys = store.list_keys().unwrap();
            keys.sort();
            prop_assert_eq!(keys, oracle.values.keys().cloned().collect::<Vec<_>>());
        }
        Op::Push(key, value) if bed.queues => {
            settled(store, |s| s.queue_push(&key, &value).unwrap());
            oracle.queues.entry(key).or_default().push_back(value);
        }
        Op::Pop(key, patient) if bed.queues => match oracle.queues.entry(key.clone()).or_default().pop_front() {
            Some(value) => prop_assert_eq!(store.queue_pop(&key, LONG).unwrap(), value),
            None if patient => prop_assert!(matches!(store.queue_pop(&key, Duration::from_millis(2)), Err(Error::Timeout(_)))),
            None => prop_assert!(matches!(store.queue_pop(&key, Duration::ZERO), Err(Error::QueueEmpty))),
        },
        Op::QueueLen(key) if bed.queues => {
            prop_assert_eq!(store.queue_len(&key).unwrap(), oracle.queues.get(&key).map_or(0, VecDeque::len) as i64);
        }
        Op::Push(..) | Op::Pop(..) | Op::QueueLen(_) => {}
    }
    Ok(())
}

fn refs(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}
