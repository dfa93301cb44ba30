//! What the lock of a manager guards: the other workers, the steps, and the receives that are not over.

use std::collections::HashMap;
use std::os::fd::RawFd;

use crate::base::error::{Error, Result};
use crate::link::Failure;
use crate::link::driver::Driven;

use super::adapter::{Adapter, Landed, Told};
use super::calls::{Answer, CallId, Callback, Calls};
use super::key::Key;
use super::steps::{StepRef, Steps, Waiter};
use super::value::Tensor;

/// A tensor of at most so many bytes is copied out as soon as it is here, so that its buffer is free without waiting for the thread that wants it.
const COPIED_AT_ONCE: u64 = 16 << 10;

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
    /// Who waits for what was asked of it, by key and step.
    wanted: HashMap<(String, u64), Vec<CallId>>,
}

/// All of it.
pub struct Core {
    name: String,
    /// The others.
    pub workers: Vec<Worker>,
    index_of: HashMap<String, usize>,
    steps: Steps,
    /// Receives.
    pub calls: Calls,
    closed: bool,
}

impl Core {
    /// The worker of this name's, of these others, none of them connected.
    pub fn new(name: &str, others: &[&str], tolerate_dup_recv: bool) -> Core {
        let worker = |name: &&str| Worker { name: (*name).to_owned(), peer: Peer::Absent, wanted: HashMap::new() };
        Core {
            name: name.to_owned(),
            workers: others.iter().map(worker).collect(),
            index_of: others.iter().enumerate().map(|(index, name)| ((*name).to_owned(), index)).collect(),
            steps: Steps::new(tolerate_dup_recv),
            calls: Calls::default(),
            closed: false,
        }
    }

    /// Errors: it is closed.
    pub fn check(&self) -> Result<()> {
        if self.closed { Err(Error::usage(format!("worker {} has closed its manager", self.name))) } else { Ok(()) }
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
                Waiter::Worker(worker) => self.find(worker, &key, step.id),
            }
        }
        Ok(())
    }

    /// A tensor is produced.
    ///
    /// Errors: a key that is none, or of another worker's; a second tensor for it; the step was aborted or cleaned up; the manager is closed.
    pub fn send(&mut self, step: StepRef, key: &str, tensor: Tensor) -> Result<()> {
        self.check()?;
        let key = Key::parse(key)?;
        if key.src_worker() != self.name {
            return Err(Error::usage(format!("Invalid rendezvous key (src): {} @ {}", key.text(), self.name)));
        }
        for (waiter, tensor) in self.steps.get(step)?.table.send(key.text(), tensor)? {
            self.give(waiter, key.text(), step.id, tensor);
        }
        Ok(())
    }

    /// A tensor is wanted. Whatever is wrong is the receive's answer.
    pub fn recv(&mut self, step: StepRef, key: &str, callback: Option<Callback>) -> CallId {
        let key = match self.check().and_then(|()| Key::parse(key)) {
            Ok(key) if key.dst_worker() != self.name => {
                Err(Error::usage(format!("Invalid rendezvous key (dst): {} @ {}", key.text(), self.name)))
            }
            key => key,
        };
        let key = match key {
            Ok(key) => key,
            Err(error) => return self.calls.refuse(callback, error),
        };
        let text = key.text().to_owned();
        let id = self.calls.open(step, key, callback);
        match self.steps.get(step).and_then(|found| found.defer(&text, Waiter::Call(id))) {
            Ok(true) => {}
            Ok(false) => self.begin(id),
            Err(error) => self.calls.end(id, Answer::Failed(error)),
        }
        id
    }

    /// Has a receive look here, or ask the worker that has the tensor.
    fn begin(&mut self, id: CallId) {
        if let Err(error) = self.try_begin(id) {
            self.calls.end(id, Answer::Failed(error));
        }
    }

    fn try_begin(&mut self, id: CallId) -> Result<()> {
        let Some(call) = self.calls.get(id) else { return Ok(()) };
        let (step, key, from) = (call.step, call.key.text().to_owned(), call.key.src_worker().to_owned());
        if from == self.name {
            return match self.steps.get(step)?.table.recv(&key, Waiter::Call(id)) {
                Ok(None) => Ok(()),
                Ok(Some((_, tensor))) => {
                    self.calls.end(id, Answer::Here(tensor));
                    Ok(())
                }
                Err((_, error)) => Err(error),
            };
        }
        let Some(index) = self.index_of.get(&from).copied() else {
            let names: Vec<&str> = self.workers.iter().map(|worker| worker.name.as_str()).collect();
            return Err(Error::usage(format!("there is no worker {from:?}; there are {} and {}", self.name, names.join(", "))));
        };
        call.worker = Some(index);
        let Some(worker) = self.workers.get_mut(index) else { return Ok(()) };
        match &mut worker.peer {
            Peer::Here(adapter) => adapter.request(&key, step.id).map_err(|error| error.within(&format!("worker {from}")))?,
            Peer::Lost(failure) => return Err(failure.error()),
            Peer::Absent => return Err(Error::usage(format!("worker {from} is not connected"))),
        }
        worker.wanted.entry((key, step.id)).or_default().push(id);
        Ok(())
    }

    /// Another worker wants a tensor.
    fn find(&mut self, worker: usize, name: &str, id: u64) {
        if let Err(error) = self.try_find(worker, name, id) {
            self.refuse(worker, name, id, &error);
        }
    }

    fn try_find(&mut self, worker: usize, name: &str, id: u64) -> Result<()> {
        let key = Key::parse(name)?;
        if key.src_worker() != self.name {
            return Err(Error::usage(format!("Invalid rendezvous key (src): {name} @ {}", self.name)));
        }
        if self.workers.get(worker).is_some_and(|worker| key.dst_worker() != worker.name) {
            return Err(Error::usage(format!("Invalid rendezvous key (dst): {name}, which another worker asks for")));
        }
        let step = self.steps.find_for_other(id)?;
        if step.defer(name, Waiter::Worker(worker))? {
            return Ok(());
        }
        match step.table.recv(name, Waiter::Worker(worker)) {
            Ok(found) => {
                if let Some((waiter, tensor)) = found {
                    self.give(waiter, name, id, tensor);
                }
                Ok(())
            }
            Err((_, error)) => Err(error),
        }
    }

    fn give(&mut self, waiter: Waiter, key: &str, id: u64, tensor: Tensor) {
        match waiter {
            Waiter::Call(call) => self.calls.end(call, Answer::Here(tensor)),
            Waiter::Worker(worker) => {
                if let Some(adapter) = self.adapter(worker) {
                    adapter.found(key, id, tensor);
                }
            }
        }
    }

    fn refuse(&mut self, worker: usize, name: &str, id: u64, why: &Error) {
        if let Some(adapter) = self.adapter(worker) {
            adapter.not_found(name, id, why);
        }
    }

    fn adapter(&mut self, worker: usize) -> Option<&mut Adapter> {
        match self.workers.get_mut(worker).map(|worker| &mut worker.peer) {
            Some(Peer::Here(adapter)) => Some(adapter),
            _ => None,
        }
    }

    /// Nobody waits for a receive any more: its key, if it is not over.
    pub fn give_up(&mut self, id: CallId) -> Option<Key> {
        let call = self.calls.forget(id)?;
        if let Ok(step) = self.steps.get(call.step) {
            step.forget(Waiter::Call(id));
        }
        // The tensor may be on its way; whoever asks again waits for that.
        let wanted = call.worker.and_then(|worker| self.workers.get_mut(worker));
        if let Some(ids) = wanted.and_then(|worker| worker.wanted.get_mut(&(call.key.text().to_owned(), call.step.id))) {
            ids.retain(|other| *other != id);
        }
        Some(call.key)
    }

    /// Ends all receives of a step that are not over, and all that comes later.
    ///
    /// Errors: it was cleaned up.
    pub fn abort(&mut self, step: StepRef, why: &Error) -> Result<()> {
        let waited = self.steps.get(step)?.abort(why);
        self.tell(step.id, waited, why);
        Ok(())
    }

    /// Ends a step, and forgets what is in it.
    pub fn cleanup(&mut self, id: u64) {
        let (waited, why) = self.steps.cleanup(id);
        self.tell(id, waited, &why);
    }

    /// Ends all steps.
    pub fn cleanup_all(&mut self) {
        self.steps.ids().into_iter().for_each(|id| self.cleanup(id));
    }

    /// A step is over: tells the workers that waited, and all receives, those that wait for others too.
    fn tell(&mut self, id: u64, waited: Vec<(String, Waiter)>, why: &Error) {
        for (key, waiter) in waited {
            if let Waiter::Worker(worker) = waiter {
                self.refuse(worker, &key, id, why);
            }
        }
        let why = Failure::from_error(why);
        self.calls.end_all(|call| call.step.id == id, || why.error());
    }

    /// A tensor was copied out of its buffer.
    pub fn consumed(&mut self, worker: usize, index: usize) {
        if let Some(adapter) = self.adapter(worker) {
            adapter.consumed(index);
        }
    }

    /// What a worker wants of this one, or has for it.
    fn told(&mut self, from: usize, told: Told) {
        match told {
            Told::Find { name, step } => self.find(from, &name, step),
            Told::Landed { name, step, tensor } => self.landed(from, (name, step), tensor),
            Told::Failed { name, step, why } => {
                let why = why.within(&format!("worker {}", self.workers.get(from).map_or("", |worker| &worker.name)));
                let why = Failure::from_error(&why);
                for id in self.wanted(from, &(name, step)) {
                    self.calls.end(id, Answer::Failed(why.error()));
                }
            }
        }
    }

    /// Receives that wait for this, and are not over.
    fn wanted(&mut self, from: usize, what: &(String, u64)) -> Vec<CallId> {
        let Core { workers, calls, .. } = self;
        let mut ids = workers.get_mut(from).and_then(|worker| worker.wanted.remove(what)).unwrap_or_default();
        ids.retain(|id| calls.get(*id).is_some());
        ids
    }

    fn landed(&mut self, from: usize, what: (String, u64), tensor: Landed) {
        let ids = self.wanted(from, &what);
        if let [id] = *ids
            && tensor.len() > COPIED_AT_ONCE
        {
            return self.calls.end(id, Answer::Landed(from, tensor));
        }
        if !ids.is_empty() {
            let copy = tensor.copy();
            for id in ids {
                self.calls.end(
                    id,
                    copy.as_ref().map_or_else(|why| Answer::Failed(Failure::from_error(why).error()), |copy| Answer::Here(copy.clone())),
                );
            }
        }
        self.consumed(from, tensor.index);
    }

    /// A worker is lost: all that waits for it ends.
    fn lost(&mut self, index: usize, error: Error) {
        let Some(worker) = self.workers.get_mut(index) else { return };
        let failure = Failure::from_error(&error.within(&format!("worker {}", worker.name)));
        worker.peer = Peer::Lost(failure.clone());
        worker.wanted.clear();
        self.calls.end_all(|call| call.worker == Some(index), || failure.error());
        self.steps.forget(Waiter::Worker(index));
    }

    /// Whether the queue pairs of all who are here are connected.
    ///
    /// Errors: one cannot be, or is lost.
    pub fn poll_connected(&mut self) -> Result<bool> {
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
        if self.closed {
            return false;
        }
        self.closed = true;
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

    /// Whether all that the others were sent before they were told that this one goes is through.
    pub fn byes_are_through(&mut self) -> bool {
        self.workers.iter_mut().all(|worker| match &mut worker.peer {
            Peer::Here(adapter) => adapter.bye_is_through(),
            _ => true,
        })
    }
}

impl Driven for Core {
    fn poll(&mut self) -> bool {
        let mut moved = false;
        for index in 0..self.workers.len() {
            let Some(adapter) = self.adapter(index) else { continue };
            let polled = adapter.poll();
            // What came before it was lost is here.
            while let Some(told) = self.adapter(index).and_then(Adapter::told) {
                self.told(index, told);
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
        let mut look: Option<u64> = None;
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
        self.closed
    }

    fn ended(&self) -> u64 {
        self.calls.count()
    }
}
