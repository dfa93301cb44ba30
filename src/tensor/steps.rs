//! The steps of a worker: for each a table in which producers and consumers meet. Under the lock of the manager.
//!
//! A step may be found before it is initialised, here or by another worker that is ahead: what is sent is kept then, and what is to be received
//! waits.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};

use crate::base::error::{Error, Result};

use super::calls::CallId;
use super::table::Table;
use super::value::Tensor;

/// Steps that were cleaned up of which that is known: a request that comes late is refused, and does not wait for ever.
const REMEMBERED: usize = 1024;

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
    /// Where they meet.
    pub table: Table<Tensor, Waiter>,
    initialized: bool,
    /// What waits for that.
    deferred: Vec<(String, Waiter)>,
}

impl Step {
    /// Keeps a receive until the step is initialised. False: it is.
    ///
    /// Errors: it was aborted.
    pub fn defer(&mut self, key: &str, waiter: Waiter) -> Result<bool> {
        self.table.check()?;
        if !self.initialized {
            self.deferred.push((key.to_owned(), waiter));
        }
        Ok(!self.initialized)
    }

    /// It may begin: what was deferred.
    pub fn initialize(&mut self) -> Vec<(String, Waiter)> {
        self.initialized = true;
        std::mem::take(&mut self.deferred)
    }

    /// Ends all that waits and all that comes: who waited.
    pub fn abort(&mut self, why: &Error) -> Vec<(String, Waiter)> {
        let mut all = self.table.abort(why);
        all.append(&mut self.deferred);
        all
    }

    /// Nobody there waits any more.
    pub fn forget(&mut self, waiter: Waiter) {
        self.table.forget(|other| *other == waiter);
        self.deferred.retain(|(_, other)| *other != waiter);
    }
}

/// All of them.
pub struct Steps {
    steps: HashMap<u64, Step>,
    generation: u64,
    /// Cleaned up, the last first to be forgotten at the end.
    cleaned: (HashSet<u64>, VecDeque<u64>),
    tolerate_dup_recv: bool,
}

impl Steps {
    /// See [`Table::new`].
    pub fn new(tolerate_dup_recv: bool) -> Steps {
        Steps { steps: HashMap::new(), generation: 0, cleaned: Default::default(), tolerate_dup_recv }
    }

    /// A step of this worker's; it is made if there is none.
    pub fn find(&mut self, id: u64) -> StepRef {
        let step = self.find_or_create(id);
        let generation = step.generation;
        self.cleaned.0.remove(&id);
        StepRef { id, generation }
    }

    /// The same, for another worker.
    ///
    /// Errors: it was cleaned up.
    pub fn find_for_other(&mut self, id: u64) -> Result<&mut Step> {
        if self.cleaned.0.contains(&id) { Err(cleanup(id)) } else { Ok(self.find_or_create(id)) }
    }

    fn find_or_create(&mut self, id: u64) -> &mut Step {
        match self.steps.entry(id) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => {
                self.generation += 1;
                let table = Table::new(self.tolerate_dup_recv);
                entry.insert(Step { generation: self.generation, table, initialized: false, deferred: Vec::new() })
            }
        }
    }

    /// Errors: it was cleaned up.
    pub fn get(&mut self, step: StepRef) -> Result<&mut Step> {
        self.steps.get_mut(&step.id).filter(|found| found.generation == step.generation).ok_or_else(|| cleanup(step.id))
    }

    /// Removes a step, if it is there: who waited, and what they are told.
    pub fn cleanup(&mut self, id: u64) -> (Vec<(String, Waiter)>, Error) {
        let why = cleanup(id);
        let waited = self.steps.remove(&id).map_or(Vec::new(), |mut step| step.abort(&why));
        let (set, order) = &mut self.cleaned;
        if set.insert(id) {
            order.push_back(id);
        }
        while order.len() > REMEMBERED {
            if let Some(id) = order.pop_front() {
                set.remove(&id);
            }
        }
        (waited, why)
    }

    /// The numbers of all that are there.
    pub fn ids(&self) -> Vec<u64> {
        self.steps.keys().copied().collect()
    }

    /// Nobody there waits any more, in any step.
    pub fn forget(&mut self, waiter: Waiter) {
        self.steps.values_mut().for_each(|step| step.forget(waiter));
    }
}

/// What those are told that wait for a step, or come to it, when it is cleaned up: TensorFlow's words.
fn cleanup(id: u64) -> Error {
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
        assert!(step.defer("k", Waiter::Worker(2)).unwrap());
        assert_eq!(step.table.send("k", tensor()).unwrap(), []);
        let step = steps.get(found).unwrap();
        assert!(step.defer("l", Waiter::Call(1)).unwrap());
        assert_eq!(step.initialize(), [("k".into(), Waiter::Worker(2)), ("l".into(), Waiter::Call(1))]);
        assert!(!step.defer("k", Waiter::Call(3)).unwrap());
        assert_eq!(steps.find(7), found);
    }

    #[test]
    fn a_step_that_was_cleaned_up_answers_nobody() {
        let mut steps = Steps::new(true);
        let old = steps.find(7);
        steps.get(old).unwrap().defer("k", Waiter::Worker(2)).unwrap();
        let (waited, why) = steps.cleanup(7);
        assert_eq!((waited, why.to_string()), (vec![("k".into(), Waiter::Worker(2))], "Cleanup 7".into()));
        assert_eq!(steps.get(old).err().unwrap().to_string(), "Cleanup 7");
        assert_eq!(steps.find_for_other(7).err().unwrap().to_string(), "Cleanup 7");
        // One of its own is another one.
        let new = steps.find(7);
        assert!(new != old && steps.get(old).is_err() && steps.get(new).is_ok() && steps.find_for_other(7).is_ok());
        // What is long ago is forgotten.
        (100..101 + REMEMBERED as u64).for_each(|id| drop(steps.cleanup(id)));
        assert!(steps.find_for_other(100).is_ok() && steps.find_for_other(101).is_err());
    }

    #[test]
    fn a_worker_that_is_gone_waits_no_more() {
        let mut steps = Steps::new(true);
        let found = steps.find(7);
        let step = steps.get(found).unwrap();
        step.defer("k", Waiter::Worker(2)).unwrap();
        step.defer("k", Waiter::Worker(1)).unwrap();
        assert!(step.table.recv("t", Waiter::Worker(2)).unwrap().is_none());
        steps.forget(Waiter::Worker(2));
        let step = steps.get(found).unwrap();
        assert_eq!(step.table.send("t", tensor()).unwrap(), []);
        assert_eq!(step.initialize(), [("k".into(), Waiter::Worker(1))]);
    }
}
