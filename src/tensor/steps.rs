//! The steps of a worker: for each a table in which producers and consumers meet. Under the lock of the manager.
//!
//! A step may be found before it is initialised, here or by another worker that is ahead: what is sent is kept then, and what is to be received
//! waits.

use std::collections::hash_map::Entry;

use foldhash::HashMap;

use crate::base::error::{Error, Result};

use super::cleaned::Cleaned;
use super::key::{Name, TensorId};
use super::table::Table;
use super::value::Tensor;

/// Names a receive.
pub type CallId = u64;

/// Who waits for a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiter {
    /// A receive here.
    Call(CallId),
    /// Another worker.
    Worker(usize),
}

/// Names a step, as long as it is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepRef {
    /// Its number, which the users chose.
    pub id: u64,
    generation: u64,
}

/// One step.
#[derive(Debug)]
pub struct Step {
    generation: u64,
    /// This worker has found it: not only others have asked.
    own: bool,
    /// Where they meet.
    pub table: Table<Tensor, Waiter>,
    initialized: bool,
    /// What waits for that.
    deferred: Vec<(Name, Waiter)>,
}

impl Step {
    /// Keeps a receive until the step is initialised. False: it is.
    ///
    /// Errors: it was aborted.
    pub fn defer(&mut self, key: &Name, waiter: Waiter) -> Result<bool> {
        self.table.check()?;
        if !self.initialized {
            self.deferred.push((key.clone(), waiter));
        }
        Ok(!self.initialized)
    }

    /// It may begin: what was deferred.
    pub fn initialize(&mut self) -> Vec<(Name, Waiter)> {
        self.initialized = true;
        std::mem::take(&mut self.deferred)
    }

    /// Ends all that waits and all that comes: who waited.
    pub fn abort(&mut self, why: &Error) -> Vec<(Name, Waiter)> {
        let mut all = self.table.abort(why);
        all.append(&mut self.deferred);
        all
    }

    /// One waits no more for a key: whether it has.
    fn withdraw(&mut self, key: &Name, waiter: Waiter) -> bool {
        let deferred = self.deferred.iter().position(|(other, who)| other == key && *who == waiter);
        deferred.map(|index| self.deferred.remove(index)).is_some() || self.table.withdraw(key, &waiter)
    }

    /// Nobody there waits any more.
    fn forget(&mut self, waiter: Waiter) {
        self.table.forget(|other| *other == waiter);
        self.deferred.retain(|(_, other)| *other != waiter);
    }

    /// Whether nothing is lost without it.
    fn is_unused(&self) -> bool {
        !self.own && self.deferred.is_empty() && self.table.is_empty()
    }
}

/// All of them.
pub struct Steps {
    steps: HashMap<u64, Step>,
    generation: u64,
    cleaned: Cleaned,
    tolerate_dup_recv: bool,
}

impl Steps {
    /// See [`Table::new`].
    pub fn new(tolerate_dup_recv: bool) -> Steps {
        Steps { steps: HashMap::default(), generation: 0, cleaned: Cleaned::default(), tolerate_dup_recv }
    }

    /// A step of this worker's; it is made if there is none.
    pub fn find(&mut self, id: u64) -> StepRef {
        let step = in_place(self.steps.entry(id), &mut self.generation, self.tolerate_dup_recv);
        step.own = true;
        StepRef { id, generation: step.generation }
    }

    /// The same, for another worker.
    ///
    /// Errors: it was cleaned up, and this worker has not used its number again.
    pub fn find_for_other(&mut self, id: u64) -> Result<&mut Step> {
        let Steps { steps, generation, cleaned, tolerate_dup_recv } = self;
        let entry = steps.entry(id);
        if matches!(entry, Entry::Vacant(_)) && cleaned.contains(id) {
            return Err(cleanup(id));
        }
        Ok(in_place(entry, generation, *tolerate_dup_recv))
    }

    /// Errors: it was cleaned up.
    pub fn get(&mut self, step: StepRef) -> Result<&mut Step> {
        self.steps.get_mut(&step.id).filter(|found| found.generation == step.generation).ok_or_else(|| cleanup(step.id))
    }

    /// Removes a step, if it is there: who waited, for [`cleanup`] to be told.
    pub fn cleanup(&mut self, id: u64) -> Vec<(Name, Waiter)> {
        self.cleaned.insert(id);
        let Some(mut step) = self.steps.remove(&id) else { return Vec::new() };
        let mut all = step.table.drain();
        all.append(&mut step.deferred);
        all
    }

    /// The numbers of all that are there.
    pub fn ids(&self) -> Vec<u64> {
        self.steps.keys().copied().collect()
    }

    /// The table of a step that is there, whoever has made it.
    pub fn table(&mut self, id: u64) -> Option<&mut Table<Tensor, Waiter>> {
        self.steps.get_mut(&id).map(|step| &mut step.table)
    }

    /// One waits no more for a key: whether it has. A step that is only asked for is forgotten once nobody asks for it.
    pub fn withdraw(&mut self, what: &TensorId, waiter: Waiter) -> bool {
        let Entry::Occupied(mut entry) = self.steps.entry(what.step) else { return false };
        let waited = entry.get_mut().withdraw(&what.name, waiter);
        if entry.get().is_unused() {
            entry.remove();
        }
        waited
    }

    /// Nobody there waits any more, in any step.
    pub fn forget(&mut self, waiter: Waiter) {
        self.steps.retain(|_, step| {
            step.forget(waiter);
            !step.is_unused()
        });
    }
}

/// The step of an entry, which is made if there is none.
fn in_place<'a>(entry: Entry<'a, u64, Step>, generation: &mut u64, tolerate_dup_recv: bool) -> &'a mut Step {
    match entry {
        Entry::Occupied(entry) => entry.into_mut(),
        Entry::Vacant(entry) => {
            *generation += 1;
            let table = Table::new(tolerate_dup_recv);
            entry.insert(Step { generation: *generation, own: false, table, initialized: false, deferred: Vec::new() })
        }
    }
}

/// What those are told that wait for a step, or come to it, when it is cleaned up: TensorFlow's words.
pub fn cleanup(id: u64) -> Error {
    Error::usage(format!("Cleanup {id}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor() -> Tensor {
        Tensor::new(1, &[], vec![7]).unwrap()
    }

    #[test]
    fn what_comes_before_a_step_is_initialised_waits() {
        let mut steps = Steps::new(true);
        let found = steps.find(7);
        let step = steps.find_for_other(7).unwrap();
        assert!(step.defer(&"k".into(), Waiter::Worker(2)).unwrap());
        assert_eq!(step.table.send(&"k".into(), tensor()).unwrap(), []);
        let step = steps.get(found).unwrap();
        assert!(step.defer(&"l".into(), Waiter::Call(1)).unwrap());
        assert_eq!(step.initialize(), [("k".into(), Waiter::Worker(2)), ("l".into(), Waiter::Call(1))]);
        assert!(!step.defer(&"k".into(), Waiter::Call(3)).unwrap());
        assert_eq!(steps.find(7), found);
    }

    #[test]
    fn an_abort_ends_what_a_step_has_deferred_too() {
        let mut steps = Steps::new(true);
        let found = steps.find(7);
        let step = steps.get(found).unwrap();
        assert!(step.defer(&"k".into(), Waiter::Worker(2)).unwrap());
        assert!(step.defer(&"l".into(), Waiter::Call(1)).unwrap());
        assert_eq!(step.abort(&Error::usage("not wanted")), [("k".into(), Waiter::Worker(2)), ("l".into(), Waiter::Call(1))]);
        assert_eq!(step.initialize(), []);
        assert!(step.table.send(&"k".into(), tensor()).is_err());
    }

    #[test]
    fn a_step_that_was_cleaned_up_answers_nobody() {
        let mut steps = Steps::new(true);
        let old = steps.find(7);
        steps.get(old).unwrap().defer(&"k".into(), Waiter::Worker(2)).unwrap();
        assert_eq!(steps.cleanup(7), [("k".into(), Waiter::Worker(2))]);
        assert_eq!(steps.get(old).err().unwrap().to_string(), "Cleanup 7");
        assert_eq!(steps.find_for_other(7).err().unwrap().to_string(), "Cleanup 7");
        // One of its own is another one.
        let new = steps.find(7);
        assert!(new != old && steps.get(old).is_err() && steps.get(new).is_ok() && steps.find_for_other(7).is_ok());
    }

    #[test]
    fn a_step_that_was_cleaned_up_is_known_however_long_ago_that_was_and_how_often() {
        let mut steps = Steps::new(true);
        let cleaned = |steps: &mut Steps, ids: std::ops::Range<u64>| ids.for_each(|id| drop(steps.cleanup(id)));
        cleaned(&mut steps, 0..1);
        // Used again, and cleaned up again, after many others.
        cleaned(&mut steps, 1000..2000);
        steps.find(0);
        assert!(steps.find_for_other(0).is_ok());
        cleaned(&mut steps, 0..1);
        cleaned(&mut steps, 2000..3000);
        assert!([0, 1000, 1999, 2999].into_iter().all(|id| steps.find_for_other(id).is_err()));
        cleaned(&mut steps, 3000..10_000);
        assert!([0, 1000, 1999, 2999].into_iter().all(|id| steps.find_for_other(id).is_err()));
        assert!(steps.find_for_other(10_000).is_ok() && steps.ids() == [10_000]);
    }

    /// Else a worker that asks and goes, or gives up, leaves more and more of them.
    #[test]
    fn a_step_that_only_others_ask_for_is_there_as_long_as_they_do() {
        let mut steps = Steps::new(true);
        let asks =
            |steps: &mut Steps, id, worker| assert!(steps.find_for_other(id).unwrap().defer(&"k".into(), Waiter::Worker(worker)).unwrap());
        [(7, 1), (7, 2), (8, 1), (9, 2)].into_iter().for_each(|(id, worker)| asks(&mut steps, id, worker));
        assert!(steps.withdraw(&TensorId::new("k", 7), Waiter::Worker(1)) && !steps.withdraw(&TensorId::new("k", 7), Waiter::Worker(1)));
        assert!(steps.withdraw(&TensorId::new("k", 8), Waiter::Worker(1)) && !steps.withdraw(&TensorId::new("k", 8), Waiter::Worker(1)));
        assert_eq!(steps.steps.len(), 2, "7 is asked for by another worker, and 9");
        let own = steps.find(9);
        assert!(steps.get(own).unwrap().table.recv(&"t".into(), Waiter::Worker(2)).unwrap().is_none());
        assert!(steps.withdraw(&TensorId::new("t", 9), Waiter::Worker(2)));
        steps.forget(Waiter::Worker(2));
        assert_eq!(steps.ids(), [9], "found by this worker, too");
    }

    #[test]
    fn a_worker_that_is_gone_waits_no_more() {
        let mut steps = Steps::new(true);
        let found = steps.find(7);
        let step = steps.get(found).unwrap();
        step.defer(&"k".into(), Waiter::Worker(2)).unwrap();
        step.defer(&"k".into(), Waiter::Worker(1)).unwrap();
        assert!(step.table.recv(&"t".into(), Waiter::Worker(2)).unwrap().is_none());
        steps.forget(Waiter::Worker(2));
        let step = steps.get(found).unwrap();
        assert_eq!(step.table.send(&"t".into(), tensor()).unwrap(), []);
        assert_eq!(step.initialize(), [("k".into(), Waiter::Worker(1))]);
    }
}
