//! Receives that are not over: what they are for, and how they ended. Under the lock of the manager; who has asked is told without it.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::base::error::{Error, Result};

use super::adapter::Landed;
use super::key::Key;
use super::steps::StepRef;
use super::value::Tensor;

/// What is called with the tensor, once, on a thread of the user's.
pub type Callback = Box<dyn FnOnce(Result<Tensor>) + Send>;

/// Names a receive.
pub type CallId = u64;

/// How a receive ended.
pub enum Answer {
    /// With a tensor.
    Here(Tensor),
    /// With one that this worker's thread has to copy out, from the buffer of this other worker.
    Landed(usize, Landed),
    /// Without.
    Failed(Error),
}

/// A receive.
pub struct Call {
    /// Its step.
    pub step: StepRef,
    /// What is received.
    pub key: Key,
    /// The worker that was asked.
    pub worker: Option<usize>,
    /// None: somebody waits for it.
    callback: Option<Callback>,
}

/// All of them.
#[derive(Default)]
pub struct Calls {
    next: CallId,
    open: BTreeMap<CallId, Call>,
    /// Somebody waits for these.
    ended: HashMap<CallId, Answer>,
    /// To be called.
    due: VecDeque<(Callback, Answer)>,
    count: u64,
}

impl Calls {
    /// Notes one.
    pub fn open(&mut self, step: StepRef, key: Key, callback: Option<Callback>) -> CallId {
        let id = self.number();
        self.open.insert(id, Call { step, key, worker: None, callback });
        id
    }

    /// Notes one that has ended before it began.
    pub fn refuse(&mut self, callback: Option<Callback>, why: Error) -> CallId {
        let id = self.number();
        self.ends(id, callback, Answer::Failed(why));
        id
    }

    fn number(&mut self) -> CallId {
        self.next += 1;
        self.next
    }

    /// One that is not over.
    pub fn get(&mut self, id: CallId) -> Option<&mut Call> {
        self.open.get_mut(&id)
    }

    /// It is over. Nothing, if it was before.
    pub fn end(&mut self, id: CallId, answer: Answer) {
        if let Some(call) = self.open.remove(&id) {
            self.ends(id, call.callback, answer);
        }
    }

    fn ends(&mut self, id: CallId, callback: Option<Callback>, answer: Answer) {
        self.count += 1;
        match callback {
            Some(callback) => self.due.push_back((callback, answer)),
            None => drop(self.ended.insert(id, answer)),
        }
    }

    /// How many are over.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// How one ended that somebody waits for; it is forgotten.
    pub fn take(&mut self, id: CallId) -> Option<Answer> {
        self.ended.remove(&id)
    }

    /// Nobody waits for it any more: what it was, if it is not over.
    pub fn forget(&mut self, id: CallId) -> Option<Call> {
        self.open.remove(&id)
    }

    /// The next one to be called.
    pub fn next_due(&mut self) -> Option<(Callback, Answer)> {
        self.due.pop_front()
    }

    /// How many are to be called.
    pub fn due(&self) -> usize {
        self.due.len()
    }

    /// Ends all for which that holds, in order.
    pub fn end_all(&mut self, which: impl Fn(&Call) -> bool, why: impl Fn() -> Error) {
        let ids: Vec<CallId> = self.open.iter().filter(|(_, call)| which(call)).map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.end(id, Answer::Failed(why())));
    }
}
