//! Receives that are not over: what they are for, and how they ended. Under the lock of the manager; who has asked is told without it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use foldhash::HashMap;

use crate::base::clock;
use crate::base::error::{Error, Result};

use super::event::Landed;
use super::key::{Key, TensorId};
use super::memory::Memory;
use super::steps::{CallId, StepRef};
use super::value::Tensor;

/// What is called with the tensor, once, on a thread of the user's; whether it has called a callback of the user's. (Of several receives with one
/// callback, the last does.)
pub type Callback = Box<dyn FnOnce(Result<Tensor>) -> bool + Send>;

/// How a receive ended.
pub enum Answer {
    /// With a tensor.
    Here(Tensor),
    /// With one that whoever wants it has to copy out, from the buffer of this other worker; and whether others want it, too.
    Landed { from: usize, landed: Arc<Landed>, is_shared: bool },
    /// Without.
    Failed(Error),
}

/// Where a tensor is produced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// This worker.
    Here,
    /// The other one of that number.
    Worker(usize),
}

/// A receive.
pub struct Call {
    /// Its step.
    pub step: StepRef,
    /// What is received.
    pub key: Key,
    /// Where that is produced.
    pub origin: Origin,
    /// The worker that was asked.
    pub worker: Option<usize>,
    /// The user's memory, which the tensor is to be in.
    pub into: Option<Arc<Memory>>,
    /// That worker may write to it: the receive is not over before that is.
    pub is_exposed: bool,
    /// When it was called.
    pub since: u64,
    /// None: somebody waits for it.
    callback: Option<Callback>,
}

/// A receive that is over, and of which a user is to be told.
pub struct DueAnswer {
    /// His.
    pub callback: Callback,
    /// For him.
    pub answer: Answer,
    /// The memory which the tensor is to be in.
    pub into: Option<Arc<Memory>>,
    /// What is left of it: it is freed after the callback, which is called sooner so.
    _call: Option<Box<Call>>,
}

impl Call {
    /// For how long it has waited, for what, and from whom.
    pub fn words(&self, now: u64) -> String {
        let (key, step, time) = (&self.key, self.step.id, Duration::from_nanos(now.saturating_sub(self.since)).as_secs_f64());
        format!("{time:.1} s for {} of step {step}, produced by {}", key.text(), key.src_worker())
    }
}

/// Those that are not over, in order, and places of others between them.
#[derive(Default)]
struct Open {
    places: VecDeque<(CallId, Option<Box<Call>>)>,
    count: usize,
}

impl Open {
    /// Behind all others.
    fn push(&mut self, id: CallId, call: Call) {
        self.places.push_back((id, Some(Box::new(call))));
        self.count += 1;
    }

    fn get_mut(&mut self, id: CallId) -> Option<&mut Call> {
        let place = self.places.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        self.places.get_mut(place)?.1.as_deref_mut()
    }

    fn remove(&mut self, id: CallId) -> Option<Box<Call>> {
        let place = self.places.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        let call = self.places.get_mut(place)?.1.take()?;
        self.count -= 1;
        while self.places.front().is_some_and(|(_, call)| call.is_none()) {
            self.places.pop_front();
        }
        if self.places.len() > 64 + 2 * self.count {
            self.places.retain(|(_, call)| call.is_some());
        }
        Some(call)
    }

    /// Those behind that number.
    fn behind(&self, id: CallId) -> impl Iterator<Item = (CallId, &Call)> {
        let first = self.places.partition_point(|(other, _)| *other <= id);
        self.places.range(first..).filter_map(|(id, call)| Some((*id, call.as_deref()?)))
    }
}

/// All of them.
#[derive(Default)]
pub struct Calls {
    next: CallId,
    open: Open,
    /// Over, but for their memory, which is exposed.
    held: HashMap<CallId, (Box<Call>, Answer)>,
    /// Somebody waits for these.
    ended: HashMap<CallId, Answer>,
    /// To be called, with tensors in this memory.
    due: VecDeque<DueAnswer>,
    /// Threads on which one is called.
    calling: Vec<usize>,
    count: u64,
    /// The last one that was reported as it takes too long.
    reported: CallId,
}

impl Calls {
    /// Notes one.
    pub fn begin(&mut self, step: StepRef, (key, origin): (Key, Origin), into: Option<Arc<Memory>>, callback: Option<Callback>) -> CallId {
        let id = self.number();
        self.open.push(id, Call { step, key, origin, worker: None, into, is_exposed: false, since: clock::coarse(), callback });
        id
    }

    /// Notes one that has ended before it began.
    pub fn over(&mut self, callback: Option<Callback>, answer: Answer) -> CallId {
        let id = self.number();
        self.ends(id, callback, answer, None);
        id
    }

    fn number(&mut self) -> CallId {
        self.next += 1;
        self.next
    }

    /// The number of the next one.
    pub fn next(&self) -> CallId {
        self.next + 1
    }

    /// One that is not over.
    pub fn get(&mut self, id: CallId) -> Option<&mut Call> {
        self.open.get_mut(id)
    }

    /// It is over. Nothing, if it was before.
    pub fn end(&mut self, id: CallId, answer: Answer) {
        match self.open.remove(id) {
            Some(call) if call.is_exposed => drop(self.held.insert(id, (call, answer))),
            Some(mut call) => self.ends(id, call.callback.take(), answer, Some(call)),
            None => {}
        }
    }

    /// Nobody writes to the memory of a receive any more. If it is over, that is told now.
    pub fn returned(&mut self, id: CallId) {
        if let Some(call) = self.open.get_mut(id) {
            call.is_exposed = false;
        }
        if let Some((mut call, answer)) = self.held.remove(&id) {
            self.ends(id, call.callback.take(), answer, Some(call));
        }
    }

    fn ends(&mut self, id: CallId, callback: Option<Callback>, answer: Answer, mut call: Option<Box<Call>>) {
        self.count += 1;
        match callback {
            Some(callback) => {
                let into = call.as_mut().and_then(|call| call.into.take());
                self.due.push_back(DueAnswer { callback, answer, into, _call: call });
            }
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
    pub fn forget(&mut self, id: CallId) -> Option<Box<Call>> {
        self.open.remove(id)
    }

    /// The next one to be called.
    pub fn next_due(&mut self) -> Option<DueAnswer> {
        self.due.pop_front()
    }

    /// This thread calls one, and says when it has.
    pub fn calls(&mut self) {
        self.calling.push(this_thread());
    }

    /// This thread has called one.
    pub fn called(&mut self) {
        let this = this_thread();
        if let Some(index) = self.calling.iter().rposition(|thread| *thread == this) {
            self.calling.swap_remove(index);
        }
    }

    /// Whether another thread calls one.
    pub fn is_calling_elsewhere(&self) -> bool {
        let this = this_thread();
        self.calling.iter().any(|thread| *thread != this)
    }

    /// How many are to be called.
    pub fn due(&self) -> usize {
        self.due.len()
    }

    /// Receives that have waited for `limit` nanoseconds and were not reported: the first in words, and the workers of all; and when the next one will
    /// have.
    pub fn stalled(&mut self, now: u64, limit: u64) -> (Option<(String, Vec<usize>)>, u64) {
        let late: Vec<_> = self.open.behind(self.reported).take_while(|(_, call)| call.since.saturating_add(limit) <= now).collect();
        let words = late.first().map(|(_, call)| {
            let more = if late.len() > 1 { format!(", and {} more", late.len() - 1) } else { String::new() };
            (call.words(now) + &more, late.iter().filter_map(|(_, call)| call.worker).collect())
        });
        let reported = late.last().map_or(self.reported, |(id, _)| *id);
        let next = self.open.behind(reported).next().map_or(u64::MAX, |(_, call)| call.since.saturating_add(limit));
        self.reported = reported;
        (words, next)
    }

    /// All that are not over, the oldest first.
    pub fn open(&self) -> impl Iterator<Item = (CallId, &Call)> {
        self.open.behind(0)
    }

    /// All that are over but for their memory, to which a worker may write.
    pub fn held(&self) -> impl Iterator<Item = &Call> {
        self.held.values().map(|(call, _)| call.as_ref())
    }

    /// Ends all for which that holds, in order: which they were, whom they have asked, and for what.
    pub fn end_all(&mut self, which: impl Fn(&Call) -> bool, why: impl Fn() -> Error) -> Vec<(CallId, Option<usize>, TensorId)> {
        let all = self.open().filter(|(_, call)| which(call));
        let all: Vec<_> = all.map(|(id, call)| (id, call.worker, call.key.in_step(call.step.id))).collect();
        all.iter().for_each(|(id, ..)| self.end(*id, Answer::Failed(why())));
        all
    }
}

/// No other thread that calls something has the same number. Read faster than the library's.
fn this_thread() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| std::ptr::from_ref(here).addr())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::steps::Steps;

    #[test]
    fn a_receive_that_takes_too_long_is_reported_once() {
        let mut calls = Calls::default();
        let step = Steps::new(true).find(7);
        let key = |edge: &str| (Key::new("/job:a/device:CPU:0", 1, "b", edge, 0, 0).unwrap(), Origin::Worker(0));
        let before = clock::coarse();
        let [a, _, c] = ["a", "b", "c"].map(|edge| calls.begin(step, key(edge), None, None));
        assert!(matches!(calls.stalled(before, 1_000_000_000), (None, at) if at >= before + 1_000_000_000));
        calls.end(a, Answer::Failed(Error::usage("over")));
        let late = clock::now() + 5_000_000_000;
        let (words, next) = calls.stalled(late, 1_000_000_000);
        let (words, _) = words.unwrap();
        assert!(
            words.ends_with(";0000000000000001;b;b;0:0 of step 7, produced by /job:a, and 1 more") && words.starts_with("5."),
            "{words}"
        );
        assert_eq!((next, calls.stalled(late, 1_000_000_000).0), (u64::MAX, None));
        calls.begin(step, key("d"), None, None);
        let (words, _) = calls.stalled(clock::now() + 1_000_000_000, 1_000_000_000);
        assert!(words.unwrap().0.contains(";d;"), "the first ones were told of");
        assert!(calls.forget(c).is_some());
    }
}
