//! Where producers and consumers of one step meet on one worker: a value waits for its receiver, or a receiver for its value. Plain data under its
//! owner's lock; it gives back what is to be run, which is run without that.

use std::collections::hash_map::Entry;

use foldhash::HashMap;

use crate::base::error::{Error, Result};
use crate::link::Failure;

use super::key::Name;

/// What is known of a key.
#[derive(Debug)]
enum Item<V, W> {
    /// Produced.
    Value(V),
    /// The same, and gone to its receiver.
    Received,
    /// Wanted, by these.
    Waiters(Vec<W>),
}

/// Values and waiters of one step.
#[derive(Debug)]
pub struct Table<V, W> {
    items: HashMap<Name, Item<V, W>>,
    /// A key may be received more than once.
    tolerate_dup_recv: bool,
    /// Why all that comes later fails.
    aborted: Option<Failure>,
}

impl<V: Clone, W> Table<V, W> {
    /// Without anything in it. `tolerate_dup_recv`: a value stays for those who ask for it later, as long as the table does.
    pub fn new(tolerate_dup_recv: bool) -> Table<V, W> {
        Table { items: HashMap::default(), tolerate_dup_recv, aborted: None }
    }

    /// Errors: it was aborted.
    pub fn check(&self) -> Result<()> {
        self.aborted.as_ref().map_or(Ok(()), |why| Err(why.error()))
    }

    /// A value is produced: those who get it now, each a copy.
    ///
    /// Errors: the key has one already; the table was aborted.
    pub fn send(&mut self, key: &Name, value: V) -> Result<Vec<(W, V)>> {
        self.check()?;
        match self.items.entry(key.clone()) {
            Entry::Vacant(entry) => {
                entry.insert(Item::Value(value));
                Ok(Vec::new())
            }
            Entry::Occupied(mut entry) => match entry.get_mut() {
                Item::Value(_) | Item::Received => Err(Error::usage(format!("Duplicated send: {key}"))),
                Item::Waiters(waiters) => {
                    let all = std::mem::take(waiters);
                    // A second send of it is an error, whether or not it is kept.
                    entry.insert(if self.tolerate_dup_recv { Item::Value(value.clone()) } else { Item::Received });
                    Ok(all.into_iter().map(|waiter| (waiter, value.clone())).collect())
                }
            },
        }
    }

    /// A value is wanted: the waiter and a copy if it is here; otherwise the waiter is kept.
    ///
    /// Errors: somebody has asked for it before and that may not be; the table was aborted. The waiter comes back.
    pub fn recv(&mut self, key: &Name, waiter: W) -> std::result::Result<Option<(W, V)>, (W, Error)> {
        if let Err(error) = self.check() {
            return Err((waiter, error));
        }
        match self.items.get_mut(key) {
            None => {
                self.items.insert(key.clone(), Item::Waiters(vec![waiter]));
                Ok(None)
            }
            Some(Item::Waiters(waiters)) if waiters.is_empty() || self.tolerate_dup_recv => {
                waiters.push(waiter);
                Ok(None)
            }
            Some(Item::Value(value)) if self.tolerate_dup_recv => Ok(Some((waiter, value.clone()))),
            Some(item @ Item::Value(_)) => match std::mem::replace(item, Item::Received) {
                Item::Value(value) => Ok(Some((waiter, value))),
                _ => Ok(None),
            },
            Some(_) => Err((waiter, Error::usage(format!("Duplicated recv: {key}")))),
        }
    }

    /// All that wait, and all that comes later, fails: those who have to be told. The first reason is the one that counts.
    pub fn abort(&mut self, why: &Error) -> Vec<(Name, W)> {
        if self.aborted.is_some() {
            return Vec::new();
        }
        self.aborted = Some(Failure::from_error(why));
        self.drain()
    }

    /// Forgets all: those who wait, in the order of their keys, so that the same is told in the same order each time.
    pub fn drain(&mut self) -> Vec<(Name, W)> {
        let waiters = |item| if let Item::Waiters(waiters) = item { waiters } else { Vec::new() };
        let all = self.items.drain().flat_map(|(key, item)| waiters(item).into_iter().map(move |waiter| (key.clone(), waiter)));
        let mut all: Vec<_> = all.collect();
        all.sort_by(|(one, _), (other, _)| one.cmp(other));
        all
    }

    /// A value that nobody has received, which is no longer here then.
    pub fn take(&mut self, key: &Name) -> Option<V> {
        let value = self.items.get(key).is_some_and(|item| matches!(item, Item::Value(_)));
        match if value { self.items.remove(key) } else { None } {
            Some(Item::Value(value)) => Some(value),
            _ => None,
        }
    }

    /// A value whose receiver does not want it any more: it is here again.
    pub fn put_back(&mut self, key: &Name, value: V) {
        if let Some(item @ Item::Received) = self.items.get_mut(key) {
            *item = Item::Value(value);
        }
    }

    /// Forgets a waiter of a key: whether it was there.
    pub fn withdraw(&mut self, key: &Name, waiter: &W) -> bool
    where
        W: PartialEq,
    {
        let Some(Item::Waiters(waiters)) = self.items.get_mut(key) else { return false };
        let index = waiters.iter().position(|other| other == waiter);
        let waited = index.map(|index| waiters.remove(index)).is_some();
        if waiters.is_empty() {
            self.items.remove(key);
        }
        waited
    }

    /// Whether nothing is known of any key, and it was not aborted.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty() && self.aborted.is_none()
    }

    /// Forgets the waiters for which that holds, of all keys.
    pub fn forget(&mut self, which: impl Fn(&W) -> bool) {
        self.items.retain(|_, item| match item {
            Item::Waiters(waiters) => {
                waiters.retain(|waiter| !which(waiter));
                !waiters.is_empty()
            }
            Item::Value(_) | Item::Received => true,
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_receivers_meet_whichever_comes_first() {
        let mut table = Table::new(false);
        assert!(table.send(&"a".into(), 1).unwrap().is_empty());
        assert_eq!(table.recv(&"a".into(), 'x').unwrap(), Some(('x', 1)));
        assert_eq!(table.recv(&"b".into(), 'y').unwrap(), None);
        assert_eq!(table.send(&"b".into(), 2).unwrap(), [('y', 2)]);
        for key in ["a", "b"] {
            assert_eq!(table.send(&key.into(), 3).unwrap_err().to_string(), format!("Duplicated send: {key}"));
            let (waiter, error) = table.recv(&key.into(), 'z').unwrap_err();
            assert_eq!((waiter, error.to_string()), ('z', format!("Duplicated recv: {key}")));
        }
        assert_eq!(table.recv(&"c".into(), 'x').unwrap(), None);
        assert!(table.recv(&"c".into(), 'y').is_err(), "there is a receiver that waits");
    }

    #[test]
    fn a_value_stays_where_it_may_be_received_again() {
        let mut table = Table::new(true);
        assert_eq!((table.recv(&"a".into(), 'x').unwrap(), table.recv(&"a".into(), 'y').unwrap()), (None, None));
        assert_eq!(table.send(&"a".into(), 1).unwrap(), [('x', 1), ('y', 1)]);
        assert_eq!((table.recv(&"a".into(), 'z').unwrap(), table.recv(&"a".into(), 'z').unwrap()), (Some(('z', 1)), Some(('z', 1))));
        assert!(table.send(&"a".into(), 2).is_err());
    }

    #[test]
    fn an_abort_ends_what_waits_and_what_comes() {
        let mut table = Table::new(false);
        table.recv(&"a".into(), 1).unwrap();
        table.recv(&"b".into(), 2).unwrap();
        table.send(&"c".into(), 'v').unwrap();
        let why = Error::timeout("Step 7 was cancelled");
        let mut told = table.abort(&why);
        told.sort_unstable();
        assert_eq!((told, table.abort(&Error::usage("again"))), (vec![("a".into(), 1), ("b".into(), 2)], vec![]));
        let same = |error: Error| matches!(&error, Error::Timeout(why) if why == "Step 7 was cancelled");
        assert!(same(table.send(&"d".into(), 'v').unwrap_err()) && same(table.recv(&"c".into(), 3).unwrap_err().1));
    }

    #[test]
    fn waiters_that_are_gone_are_forgotten() {
        let mut table = Table::new(true);
        table.recv(&"a".into(), 1).unwrap();
        table.recv(&"a".into(), 2).unwrap();
        table.recv(&"b".into(), 1).unwrap();
        table.send(&"c".into(), 'v').unwrap();
        table.forget(|waiter| *waiter == 1);
        assert_eq!((table.send(&"a".into(), 'x').unwrap(), table.send(&"b".into(), 'y').unwrap()), (vec![(2, 'x')], vec![]));
        assert_eq!(table.recv(&"c".into(), 3).unwrap(), Some((3, 'v')));
    }

    #[test]
    fn one_waiter_is_forgotten_and_one_value_taken() {
        let mut table = Table::new(false);
        table.recv(&"a".into(), 1).unwrap();
        assert_eq!(
            (table.withdraw(&"a".into(), &2), table.withdraw(&"b".into(), &1), table.withdraw(&"a".into(), &1), table.is_empty()),
            (false, false, true, true)
        );
        assert_eq!((table.recv(&"a".into(), 3).unwrap(), table.take(&"a".into())), (None, None));
        assert_eq!((table.send(&"a".into(), 'v').unwrap(), table.take(&"a".into())), (vec![(3, 'v')], None));
        table.send(&"b".into(), 'w').unwrap();
        assert_eq!((table.take(&"b".into()), table.take(&"b".into()), table.is_empty()), (Some('w'), None, false));
        // As if it had not been received.
        table.put_back(&"a".into(), 'v');
        table.put_back(&"b".into(), 'w');
        assert_eq!((table.recv(&"a".into(), 4).unwrap(), table.recv(&"b".into(), 4).unwrap()), (Some((4, 'v')), None));
        assert!(table.recv(&"a".into(), 5).is_err());
    }
}
