//! Receives that are not over: what they are for, and how they ended. Under the lock of the manager; who has asked is told without it.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use crate::base::clock;
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
    since: u64,
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
    /// The last one that was reported as it takes too long.
    reported: CallId,
}

impl Calls {
    /// Notes one.
    pub fn open(&mut self, step: StepRef, key: Key, callback: Option<Callback>) -> CallId {
        let id = self.number();
        self.open.insert(id, Call { step, key, worker: None, since: clock::now(), callback });
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

    /// Receives that have waited for `limit` nanoseconds and were not reported, in words; and when the next one will have.
    pub fn stalled(&mut self, now: u64, limit: u64) -> (Option<String>, u64) {
        let open = |from: CallId| self.open.range(from + 1..);
        let late: Vec<_> = open(self.reported).take_while(|(_, call)| call.since.saturating_add(limit) <= now).collect();
        let words = late.first().map(|(_, call)| {
            let (time, more) = (Duration::from_nanos(now.saturating_sub(call.since)).as_secs_f64(), late.len() - 1);
            let more = if more > 0 { format!(", and {more} more") } else { String::new() };
            format!("{time:.1} s for {} of step {}, produced by {}{more}", call.key.text(), call.step.id, call.key.src_worker())
        });
        let reported = late.last().map_or(self.reported, |(id, _)| **id);
        let next = open(reported).next().map_or(u64::MAX, |(_, call)| call.since.saturating_add(limit));
        self.reported = reported;
        (words, next)
    }

    /// Ends all for which that holds, in order.
    pub fn end_all(&mut self, which: impl Fn(&Call) -> bool, why: impl Fn() -> Error) {
        let ids: Vec<CallId> = self.open.iter().filter(|(_, call)| which(call)).map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.end(id, Answer::Failed(why())));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::steps::Steps;

    #[test]
    fn a_receive_that_takes_too_long_is_reported_once() {
        let mut calls = Calls::default();
        let step = Steps::new(true).find(7);
        let key = |edge: &str| Key::new("/job:a/device:CPU:0", 1, "b", edge, 0, 0).unwrap();
        let before = clock::now();
        let [a, _, c] = ["a", "b", "c"].map(|edge| calls.open(step, key(edge), None));
        assert!(matches!(calls.stalled(before, 1_000_000_000), (None, at) if at >= before + 1_000_000_000));
        calls.end(a, Answer::Failed(Error::usage("over")));
        let late = clock::now() + 5_000_000_000;
        let (words, next) = calls.stalled(late, 1_000_000_000);
        let words = words.unwrap();
        assert!(
            words.ends_with(";0000000000000001;b;b;0:0 of step 7, produced by /job:a, and 1 more") && words.starts_with("5."),
            "{words}"
        );
        assert_eq!((next, calls.stalled(late, 1_000_000_000).0), (u64::MAX, None));
        calls.open(step, key("d"), None);
        let (words, _) = calls.stalled(clock::now() + 1_000_000_000, 1_000_000_000);
        assert!(words.unwrap().contains(";d;"), "the first ones were told of");
        assert!(calls.forget(c).is_some());
    }
}
