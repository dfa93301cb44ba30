//! What the lock of a manager guards: the other workers, the steps, and the receives that are not over.

mod events;

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::Arc;

use foldhash::HashMap;

use crate::base::error::{Error, Result};
use crate::link::Failure;
use crate::link::driver::{Driven, Driver};

use super::adapter::Adapter;
use super::calls::{Answer, Call, Callback, Calls, Origin};
use super::event::Landed;
use super::io::Fill;
use super::key::{Key, Keys, Name, TensorId};
use super::leaving::{Leaving, LostEnd};
use super::memory::Memory;
use super::steps::{self, CallId, StepRef, Steps, Waiter};
use super::value::Tensor;

/// How far a worker's own end is: the states of TensorFlow's server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It is not connected: TensorFlow's `DISCONNECTED`, before.
    New,
    /// A thread connects it.
    Starting,
    /// It is connected to all others: `CONNECTED`.
    Started,
    /// It was closed: `DISCONNECTED`, after. It is not started again.
    Stopped,
}

/// How far another worker is.
pub enum Peer {
    /// Nothing was done about it.
    Absent,
    /// It is connected.
    Here(Box<Adapter>),
    /// It is lost, and why.
    Lost(Failure),
}

/// Another worker.
pub struct Worker {
    /// Its name.
    pub name: String,
    /// How far it is.
    pub peer: Peer,
    /// What was asked of it, by key and step.
    wanted: HashMap<TensorId, Wanted>,
    /// The oldest receive that waits for it, when last looked at.
    pub oldest: Option<CallId>,
}

/// What was asked of another worker and is not over.
#[derive(Default)]
struct Wanted {
    /// Who waits for it.
    calls: Vec<CallId>,
    /// The one to whose memory the worker may write.
    exposed: Option<CallId>,
    /// It is here, and is copied out for whoever will ask for it.
    kept: bool,
}

/// A copy, for which no lock is needed.
enum Work {
    /// Into the buffer towards a worker.
    Fill(usize, Box<Fill>),
    /// Out of the buffer that is written by a worker, for whoever will ask for it.
    Keep(usize, TensorId, Arc<Landed>),
}

/// All of it.
pub struct Core {
    name: String,
    /// The others.
    pub workers: Vec<Worker>,
    leaving: Leaving,
    index_of: HashMap<String, usize>,
    steps: Steps,
    tolerate_dup_recv: bool,
    /// Receives.
    pub calls: Calls,
    /// What was received, and where it is produced.
    keys: Keys<Origin>,
    /// Tensors that nobody waits for.
    late: VecDeque<(usize, TensorId, Arc<Landed>)>,
    /// Threads that copy a tensor that is to be sent.
    filling: usize,
    state: State,
}

impl Core {
    /// The worker of this name's, of these others, none of them connected.
    pub fn new(name: &str, others: &[&str], tolerate_dup_recv: bool) -> Core {
        let worker = |name: &&str| Worker { name: (*name).to_owned(), peer: Peer::Absent, wanted: HashMap::default(), oldest: None };
        Core {
            name: name.to_owned(),
            workers: others.iter().map(worker).collect(),
            leaving: Leaving::default(),
            index_of: others.iter().enumerate().map(|(index, name)| ((*name).to_owned(), index)).collect(),
            steps: Steps::new(tolerate_dup_recv),
            tolerate_dup_recv,
            calls: Calls::default(),
            keys: Keys::default(),
            late: VecDeque::new(),
            filling: 0,
            state: State::New,
        }
    }

    /// Errors: it is closed.
    pub fn check(&self) -> Result<()> {
        match self.state {
            State::Stopped => Err(Error::usage(format!("worker {} has closed its manager", self.name))),
            State::New | State::Starting | State::Started => Ok(()),
        }
    }

    /// How far it is.
    pub fn state(&self) -> State {
        self.state
    }

    /// This thread connects it.
    ///
    /// Errors: it is not new.
    pub fn start(&mut self) -> Result<()> {
        self.check()?;
        match self.state {
            State::New => self.state = State::Starting,
            state => return Err(Error::usage(format!("worker {} is {state:?}; expected New", self.name))),
        }
        Ok(())
    }

    /// The worker of this name is connected.
    pub fn connected(&mut self, name: &str, adapter: Adapter) {
        let Core { workers, index_of, .. } = self;
        if let Some(worker) = index_of.get(name).and_then(|index| workers.get_mut(*index)) {
            worker.peer = Peer::Here(Box::new(adapter));
        }
    }

    /// It has done so, or may be started again, once its ends are taken.
    ///
    /// Errors: why it has not; it was closed.
    pub fn started(&mut self, connected: Result<()>) -> Result<()> {
        let done = self.check().and(connected);
        if let Err(error) = &done {
            let failure = Failure::from_error(error);
            // What was asked of workers that were here already.
            self.calls.end_all(|call| call.worker.is_some(), || failure.error());
            (0..self.workers.len()).for_each(|index| self.steps.forget(Waiter::Worker(index)));
        }
        if self.state == State::Starting {
            self.state = if done.is_ok() { State::Started } else { State::New };
        }
        done
    }

    /// A step; it is made if there is none.
    pub fn step(&mut self, id: u64) -> StepRef {
        self.steps.find(id)
    }

    /// Lets what was deferred begin.
    ///
    /// Errors: the step was cleaned up.
    pub fn initialize(&mut self, step: StepRef) -> Result<()> {
        for (key, waiter) in self.steps.get(step)?.initialize() {
            match waiter {
                Waiter::Call(id) => self.begin(id),
                Waiter::Worker(worker) => self.find(worker, &TensorId { name: key, step: step.id }, false),
            }
        }
        Ok(())
    }

    /// A tensor is produced.
    ///
    /// Errors: a key of another worker's; a second tensor for it; the step was aborted or cleaned up; the manager is closed.
    pub fn send(&mut self, step: StepRef, key: &Key, tensor: Tensor) -> Result<()> {
        self.check()?;
        if !key.is_from(&self.name) {
            return Err(Error::usage(format!("Invalid rendezvous key (src): {} @ {}", key.text(), self.name)));
        }
        for (waiter, tensor) in self.steps.get(step)?.table.send(key.name(), tensor)? {
            self.give(waiter, &key.in_step(step.id), tensor);
        }
        Ok(())
    }

    /// Several are wanted. No callback is called if it is closed, and all are left.
    pub fn recv_all(&mut self, step: StepRef, all: &mut Vec<(Result<Key>, Callback)>) -> Result<()> {
        self.check()?;
        all.drain(..).try_for_each(|(key, callback)| {
            let key = key.and_then(|key| self.produced(key));
            self.recv(step, key, None, Some(callback)).map(drop)
        })
    }

    /// None is: the callback is called, with whatever. It is left if it is closed.
    pub fn recv_none(&mut self, callback: &mut Option<Callback>) -> Result<()> {
        self.check()?;
        self.calls.over(callback.take(), Answer::Here(Tensor::dead()));
        Ok(())
    }

    /// A key by its text, for [`Core::recv`].
    ///
    /// Errors: no key; one for another worker, or from one that is not known.
    pub fn key(&mut self, text: &str) -> Result<(Key, Origin)> {
        let Core { keys, name, workers, index_of, .. } = self;
        keys.parse(text, |key| origin(key, name, workers, index_of))
    }

    /// The same of one that was parsed.
    pub fn produced(&self, key: Key) -> Result<(Key, Origin)> {
        let origin = origin(&key, &self.name, &self.workers, &self.index_of)?;
        Ok((key, origin))
    }

    /// A tensor is wanted, in this memory if there is any. Whatever else is wrong, with its key for instance, is the receive's answer.
    ///
    /// Errors: it is closed; the callback is not called then.
    pub fn recv(
        &mut self,
        step: StepRef,
        key: Result<(Key, Origin)>,
        into: Option<Arc<Memory>>,
        callback: Option<Callback>,
    ) -> Result<CallId> {
        self.check()?;
        let key = match key {
            Ok(key) => key,
            Err(error) => return Ok(self.calls.over(callback, Answer::Failed(error))),
        };
        let waiter = Waiter::Call(self.calls.next());
        let deferred = self.steps.get(step).and_then(|found| found.defer(key.0.name(), waiter));
        let id = self.calls.begin(step, key, into, callback);
        match deferred {
            Ok(true) => {}
            Ok(false) => self.begin(id),
            Err(error) => self.calls.end(id, Answer::Failed(error)),
        }
        Ok(id)
    }

    /// Has a receive look here, or ask the worker that has the tensor.
    fn begin(&mut self, id: CallId) {
        if let Err(error) = self.try_begin(id) {
            self.calls.end(id, Answer::Failed(error));
        }
    }

    fn try_begin(&mut self, id: CallId) -> Result<()> {
        let Core { calls, steps, workers, .. } = self;
        let Some(call) = calls.get(id) else { return Ok(()) };
        let (step, what) = (call.step, call.key.in_step(call.step.id));
        let Origin::Worker(index) = call.origin else {
            return match steps.get(step)?.table.recv(&what.name, Waiter::Call(id)) {
                Ok(None) => Ok(()),
                Ok(Some((_, tensor))) => {
                    calls.end(id, Answer::Here(tensor));
                    Ok(())
                }
                Err((_, error)) => Err(error),
            };
        };
        let Some(worker) = workers.get_mut(index) else { return Ok(()) };
        call.worker = Some(index);
        // It may have come after an earlier receive's time.
        if let Some(tensor) = steps.get(step)?.table.take(&what.name) {
            self.end(index, id, Ok(tensor));
            return Ok(());
        }
        let wanted = worker.wanted.get_mut(&what);
        if wanted.as_ref().is_some_and(|wanted| !wanted.calls.is_empty() && !self.tolerate_dup_recv) {
            return Err(Error::usage(format!("Duplicated recv: {}", what.name)));
        }
        call.is_exposed = match &mut worker.peer {
            _ if wanted.as_ref().is_some_and(|wanted| wanted.kept) => false,
            Peer::Here(adapter) => {
                let asked = adapter.request(&what, call.into.clone());
                asked.map_err(|error| error.within(&format!("worker {}", worker.name)))?
            }
            Peer::Lost(failure) => return Err(failure.error()),
            Peer::Absent => return Err(Error::usage(format!("worker {} is not connected", worker.name))),
        };
        let exposed = call.is_exposed.then_some(id);
        match wanted {
            Some(wanted) => {
                wanted.calls.push(id);
                wanted.exposed = wanted.exposed.or(exposed);
            }
            None => _ = worker.wanted.insert(what, Wanted { calls: vec![id], exposed, kept: false }),
        }
        Ok(())
    }

    /// Another worker wants a tensor. `again`: its key is known to be one of this worker's for that one.
    fn find(&mut self, worker: usize, what: &TensorId, again: bool) {
        if let Err(error) = self.try_find(worker, what, again) {
            self.refuse(worker, what, &error);
        }
    }

    fn try_find(&mut self, worker: usize, what: &TensorId, again: bool) -> Result<()> {
        let name = &what.name;
        if !again {
            self.check_key(worker, name)?;
        }
        let step = self.steps.find_for_other(what.step)?;
        if step.defer(name, Waiter::Worker(worker))? {
            return Ok(());
        }
        match step.table.recv(name, Waiter::Worker(worker)) {
            Ok(found) => {
                if let Some((waiter, tensor)) = found {
                    self.give(waiter, what, tensor);
                }
                Ok(())
            }
            Err((_, error)) => Err(error),
        }
    }

    /// Errors: no key, or not one of this worker's for that one.
    fn check_key(&self, worker: usize, name: &Name) -> Result<()> {
        let key = Key::parse(name.clone())?;
        if !key.is_from(&self.name) {
            return Err(Error::usage(format!("Invalid rendezvous key (src): {name} @ {}", self.name)));
        }
        if self.workers.get(worker).is_some_and(|worker| !key.is_for(&worker.name)) {
            return Err(Error::usage(format!("Invalid rendezvous key (dst): {name}, which another worker asks for")));
        }
        Ok(())
    }

    fn give(&mut self, waiter: Waiter, what: &TensorId, tensor: Tensor) {
        match waiter {
            Waiter::Call(call) => self.calls.end(call, Answer::Here(tensor)),
            Waiter::Worker(worker) => {
                if let Some(adapter) = self.adapter(worker) {
                    adapter.found(what, tensor);
                }
            }
        }
    }

    fn refuse(&mut self, worker: usize, what: &TensorId, why: &Error) {
        if let Some(adapter) = self.adapter(worker) {
            adapter.not_found(what, why);
        }
    }

    fn adapter(&mut self, worker: usize) -> Option<&mut Adapter> {
        match self.workers.get_mut(worker).map(|worker| &mut worker.peer) {
            Some(Peer::Here(adapter)) => Some(adapter),
            _ => None,
        }
    }

    /// The time of a receive is over: what it ends with. `None`: a worker may write to its memory; it ends once that is over.
    pub fn give_up(&mut self, id: CallId) -> Option<Answer> {
        let call = self.calls.get(id)?;
        let (what, worker) = (call.key.in_step(call.step.id), call.worker);
        if call.is_exposed {
            if let Some(adapter) = worker.and_then(|worker| self.adapter(worker)) {
                adapter.withdraw(&what);
            }
            return None;
        }
        let call = self.calls.forget(id)?;
        if self.steps.get(call.step).is_ok() {
            self.steps.withdraw(&what, Waiter::Call(id));
        }
        // The tensor may be on its way; whoever asks again waits for that.
        if let Some(worker) = worker.and_then(|worker| self.workers.get_mut(worker)) {
            worker.forget(&what, id);
        }
        Some(Answer::Failed(self.timed_out(&what)))
    }

    fn timed_out(&self, what: &TensorId) -> Error {
        Error::timeout(format!("Timed out waiting for notification: {what} @ {}", self.name))
    }

    /// Ends all receives of a step that are not over, and all that comes later.
    ///
    /// Errors: it was cleaned up.
    pub fn abort(&mut self, step: StepRef, why: &Error) -> Result<()> {
        let waited = self.steps.get(step)?.abort(why);
        let why = Failure::from_error(why);
        self.tell(step.id, waited, || why.error());
        Ok(())
    }

    /// Ends a step, and forgets what is in it.
    pub fn cleanup(&mut self, id: u64) {
        let waited = self.steps.cleanup(id);
        self.tell(id, waited, || steps::cleanup(id));
    }

    /// Ends all steps.
    pub fn cleanup_all(&mut self) {
        self.steps.ids().into_iter().for_each(|id| self.cleanup(id));
    }

    /// A step is over: tells the workers that waited, and all receives, those that wait for others too.
    fn tell(&mut self, id: u64, waited: Vec<(Name, Waiter)>, why: impl Fn() -> Error) {
        for (key, waiter) in waited {
            if let Waiter::Worker(worker) = waiter {
                self.refuse(worker, &TensorId { name: key, step: id }, &why());
            }
        }
        for (call, worker, what) in self.calls.end_all(|call| call.step.id == id, why) {
            if let Some(worker) = worker.and_then(|worker| self.workers.get_mut(worker)) {
                worker.forget(&what, call);
            }
        }
    }

    /// A tensor was copied out of its buffer.
    pub fn consumed(&mut self, worker: usize, landed: &Landed) {
        if let Some(adapter) = self.adapter(worker) {
            adapter.consumed(landed);
        }
    }

    fn next_work(&mut self) -> Option<Work> {
        if let Some((from, what, tensor)) = self.late.pop_front() {
            return Some(Work::Keep(from, what, tensor));
        }
        let fill = (0..self.workers.len()).find_map(|index| Some(Work::Fill(index, self.adapter(index)?.next_fill()?)))?;
        self.filling += 1;
        Some(fill)
    }

    /// Whether a thread copies a tensor that is to be sent.
    pub fn is_filling(&self) -> bool {
        self.filling > 0
    }

    /// A worker is lost: all that waits for it ends.
    fn lost(&mut self, index: usize, error: Error) {
        let Some(worker) = self.workers.get_mut(index) else { return };
        let failure = Failure::from_error(&error.within(&format!("worker {}", worker.name)));
        if let Some(end) = worker.leave(Peer::Lost(failure.clone())) {
            self.leaving.add(end);
        }
        // What is being copied out is here.
        worker.wanted.retain(|_, wanted| wanted.kept);
        let kept = |call: &Call| worker.wanted.contains_key(&call.key.in_step(call.step.id));
        self.calls.end_all(|call| call.worker == Some(index) && !kept(call), || failure.error());
        self.steps.forget(Waiter::Worker(index));
        self.leaving.drop_quiet(&mut self.calls);
    }

    /// Whether the queue pairs of all who are here are connected.
    ///
    /// Errors: one cannot be, or is lost; this one is closed.
    pub fn poll_connected(&mut self) -> Result<bool> {
        self.check()?;
        let mut all = true;
        for Worker { name, peer, .. } in &mut self.workers {
            match peer {
                Peer::Here(adapter) => all &= adapter.poll_connected().map_err(|error| error.within(&format!("worker {name}")))?,
                Peer::Lost(failure) => return Err(failure.error()),
                Peer::Absent => all = false,
            }
        }
        Ok(all)
    }

    /// Ends it, and tells the others; false if that was done before.
    pub fn close(&mut self) -> bool {
        if self.state == State::Stopped {
            return false;
        }
        self.state = State::Stopped;
        let closed = self.check().err().map(|error| Failure::from_error(&error));
        if let Some(closed) = closed {
            self.calls.end_all(|_| true, || closed.error());
        }
        // First: that is why others do not get what they wait for.
        for worker in &mut self.workers {
            if let Peer::Here(adapter) = &mut worker.peer {
                adapter.say_bye();
            }
        }
        self.cleanup_all();
        true
    }

    /// Ends the connections, for [`Shared::drop_ends`](super::shared::Shared::drop_ends).
    pub fn take_ends(&mut self) -> Vec<LostEnd> {
        let mut ends = self.leaving.take();
        for worker in &mut self.workers {
            ends.extend(worker.leave(Peer::Absent));
            worker.wanted.clear();
        }
        ends
    }

    /// Bytes of tensors that were copied on their way from and to the workers that are connected.
    pub fn all_copied(&mut self) -> u64 {
        (0..self.workers.len()).filter_map(|worker| self.adapter(worker).map(|adapter| adapter.all_copied())).sum()
    }

    /// Whether all is sent that the others have asked for and that is here. Moves it along.
    pub fn is_through(&mut self) -> bool {
        self.poll();
        (0..self.workers.len()).all(|worker| self.adapter(worker).is_none_or(|adapter| adapter.is_through()))
    }

    /// Whether all that the others were sent before they were told that this one goes is through.
    pub fn byes_are_through(&mut self) -> bool {
        // Each is polled, also behind one that does not answer.
        self.workers.iter_mut().fold(true, |all, worker| match &mut worker.peer {
            Peer::Here(adapter) => adapter.bye_is_through() && all,
            _ => all,
        })
    }
}

/// Where the tensor of a key is produced that the worker of this name is to receive.
///
/// Errors: it is for another worker, or from none of these.
fn origin(key: &Key, name: &str, workers: &[Worker], index_of: &HashMap<String, usize>) -> Result<Origin> {
    if !key.is_for(name) {
        return Err(Error::usage(format!("Invalid rendezvous key (dst): {} @ {name}", key.text())));
    }
    if key.is_from(name) {
        return Ok(Origin::Here);
    }
    index_of.get(key.src_worker()).copied().map(Origin::Worker).ok_or_else(|| {
        let others: Vec<&str> = workers.iter().map(|worker| worker.name.as_str()).collect();
        Error::usage(format!("there is no worker {:?}; there are {name} and {}", key.src_worker(), others.join(", ")))
    })
}

impl Driven for Core {
    fn links(&self) -> usize {
        self.workers.len() + 1
    }

    fn poll(&mut self) -> bool {
        let mut moved = self.leaving.drop_quiet(&mut self.calls);
        for index in 0..self.workers.len() {
            let Some(adapter) = self.adapter(index) else { continue };
            let polled = adapter.poll();
            // What came before it was lost is here.
            while let Some(event) = self.adapter(index).and_then(Adapter::next_event) {
                self.handle(index, event);
            }
            match polled {
                Ok(some) => moved |= some,
                Err(error) => {
                    moved = true;
                    self.lost(index, error);
                }
            }
        }
        moved
    }

    fn arm(&mut self, fds: &mut Vec<RawFd>) -> Result<Option<u64>> {
        self.note_waits();
        let mut look = self.leaving.look();
        for worker in &mut self.workers {
            if let Peer::Here(adapter) = &mut worker.peer {
                let again = adapter.arm(|fd| {
                    if !fds.contains(&fd) {
                        fds.push(fd);
                    }
                })?;
                look = look.into_iter().chain(again).min();
            }
        }
        Ok(look)
    }

    fn needs_repoll(&mut self) -> bool {
        (0..self.workers.len()).any(|worker| self.adapter(worker).is_some_and(Adapter::needs_repoll))
    }

    fn has_failed(&self) -> bool {
        self.state == State::Stopped
    }

    fn instead_of_arm(&mut self) {
        self.note_waits();
    }

    fn ended(&self) -> u64 {
        self.calls.count()
    }

    fn has_work(&mut self) -> bool {
        !self.late.is_empty() || (0..self.workers.len()).any(|index| self.adapter(index).is_some_and(|adapter| adapter.has_fill()))
    }

    fn work(driver: &Driver<Core>) {
        loop {
            let next = driver.lock().next_work();
            match next {
                None => return,
                Some(Work::Fill(worker, mut fill)) => {
                    let _filling = Filling(driver);
                    fill.copy(&mut || driver.poll_once());
                    let unwanted = driver.with(|core| match core.adapter(worker) {
                        Some(adapter) => {
                            adapter.filled(*fill);
                            None
                        }
                        None => Some(fill),
                    });
                    // Of another manager's tensor, which is closed, this calls the user's release: not under the lock.
                    drop(unwanted);
                }
                Some(Work::Keep(from, what, tensor)) => {
                    let (copy, _) = tensor.copy(&mut || driver.poll_once());
                    driver.with(|core| core.keep(from, &what, &tensor, copy));
                }
            }
        }
    }
}

/// A thread copies a tensor that is to be sent, until this is dropped: however that ends.
struct Filling<'a>(&'a Driver<Core>);

impl Drop for Filling<'_> {
    fn drop(&mut self) {
        self.0.lock().filling -= 1;
    }
}

impl Worker {
    /// Its end, if it is connected; it is this now.
    fn leave(&mut self, now: Peer) -> Option<LostEnd> {
        let Peer::Here(adapter) = std::mem::replace(&mut self.peer, now) else { return None };
        Some(LostEnd::new(adapter, self.wanted.values().filter_map(|wanted| wanted.exposed)))
    }

    /// A receive is over that waited for this. What nobody waits for is not wanted any more.
    fn forget(&mut self, what: &TensorId, id: CallId) {
        let Some(wanted) = self.wanted.get_mut(what) else { return };
        wanted.calls.retain(|other| *other != id);
        if wanted.calls.is_empty()
            && !wanted.kept
            && let Peer::Here(adapter) = &mut self.peer
        {
            adapter.withdraw(what);
        }
    }
}

#[cfg(test)]
impl Core {
    /// How many steps there are.
    pub fn steps(&self) -> usize {
        self.steps.ids().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_worker_may_ask_for_what_this_one_produces_for_it_alone() {
        let core = Core::new("/job:a", &["/job:b", "/job:c"], true);
        let asks = |from: &str, to: &str| {
            let device = |worker: &str| format!("/job:{worker}/device:CPU:0");
            let text = Key::new(&device(from), 1, &device(to), "x", 0, 0).unwrap().text().to_owned();
            (core.check_key(0, &text.as_str().into()).map_err(|why| why.to_string()), text)
        };
        assert_eq!(asks("a", "b").0, Ok(()));
        let (asked, text) = asks("b", "b");
        assert_eq!(asked, Err(format!("Invalid rendezvous key (src): {text} @ /job:a")));
        let (asked, text) = asks("a", "c");
        assert_eq!(asked, Err(format!("Invalid rendezvous key (dst): {text}, which another worker asks for")));
        assert!(core.check_key(0, &"no key".into()).is_err());
    }
}
