//! A step, as producers and consumers of a worker use it. Any number of threads.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::base::error::{Error, Result};
use crate::base::mem::UserMemory;
use crate::base::sync::lock;

use super::adapter::Mode;
use super::calls::{Answer, Callback, Origin};
use super::core::Core;
use super::key::Key;
use super::memory::{Memory, Release};
use super::shared::{Shared, deadline};
use super::steps::{CallId, StepRef};
use super::value::{Tensor, meta};

/// A step of a manager's. Clones are the same step. It fails once the step was cleaned up, or the manager closed.
#[derive(Clone)]
pub struct Rendezvous {
    pub(super) shared: Arc<Shared>,
    step: StepRef,
}

impl Rendezvous {
    /// Of a step.
    pub(super) fn new(shared: Arc<Shared>, step: StepRef) -> Rendezvous {
        Rendezvous { shared, step }
    }

    /// Lets what was asked for before begin. To be called once all that tensors of this step need is there.
    ///
    /// Errors: the step was cleaned up.
    pub fn initialize(&self) -> Result<()> {
        self.shared.with(|core| core.initialize(self.step))
    }

    /// Produces a tensor. It never waits: the tensor goes to who waits for it, or stays until somebody asks.
    ///
    /// Errors: a key that is none, or whose producer is another worker; "Duplicated send"; the step was aborted or cleaned up; the manager is closed.
    pub fn send(&self, key: &str, tensor: Tensor) -> Result<()> {
        self.send_key(&Key::parse(key)?, tensor)
    }

    fn send_key(&self, key: &Key, tensor: Tensor) -> Result<()> {
        // The last of one that is refused is dropped without the lock: its release is the user's.
        let kept = tensor.clone();
        let sent = self.shared.with(|core| core.send(self.step, key, tensor));
        drop(kept);
        sent
    }

    /// The same with a copy of these bytes.
    ///
    /// Errors: more than 16 dimensions, or one below zero; no memory; as above.
    pub fn send_copy(&self, key: &str, data_type: u32, shape: &[i64], bytes: &[u8]) -> Result<()> {
        let key = Key::parse(key)?;
        if !self.is_exposed(&key) || bytes.is_empty() {
            let mut copy = Vec::new();
            copy.try_reserve_exact(bytes.len()).map_err(|_| Error::usage(format!("bytes: no memory for {}", bytes.len())))?;
            copy.extend_from_slice(bytes);
            return self.send_key(&key, Tensor::new(data_type, shape, copy)?);
        }
        let meta = meta(data_type, shape, bytes.len())?;
        self.send_key(&key, Tensor::placed(meta, Arc::new(self.shared.pool.copy(bytes)?)))
    }

    /// The same without a copy: the memory must stay as it is until `release` is called, once, in [`Manager::run`](super::Manager::run) or when the
    /// manager is closed; after that, by whoever drops the last of the tensor. If it is small, and not registered, it is copied all the same.
    ///
    /// Errors: as above; a range that cannot be registered. The memory is the caller's then, and `release` is not called.
    pub fn send_from(&self, key: &str, data_type: u32, shape: &[i64], memory: UserMemory, release: Release) -> Result<()> {
        let (key, meta) = (Key::parse(key)?, meta(data_type, shape, memory.len())?);
        let memory = Arc::new(self.shared.pool.lend(memory, self.is_exposed(&key))?);
        self.send_key(&key, Tensor::placed(meta, memory.clone()))?;
        if memory.is_copy() {
            self.release(release);
        } else {
            memory.release(release);
        }
        Ok(())
    }

    /// Has this called as if a tensor had been sent from memory that nobody needs any more.
    pub fn release(&self, release: Release) {
        self.shared.pool.lend_nothing().release(release);
    }

    /// Whether a peer gets at the memory of this tensor.
    fn is_exposed(&self, key: &Key) -> bool {
        let Shared { name, mode, .. } = &*self.shared;
        *mode == Mode::Direct && !(key.is_from(name) && key.is_for(name))
    }

    /// Receives a tensor, which may not be produced yet. The callback gets it, or why it does not come, in [`Manager::run`](super::Manager::run) or
    /// when the manager is closed; once.
    ///
    /// Errors: the manager is closed. The callback is not called then.
    pub fn recv_async(&self, key: &str, callback: impl FnOnce(Result<Tensor>) + Send + 'static) -> Result<()> {
        self.ask(|core| core.key(key), None, callback)
    }

    /// The same into this memory, which is the library's until then, and as long as the tensor is.
    ///
    /// Errors: as above; a range that cannot be registered. A tensor that has more bytes is an error of the callback's.
    pub fn recv_into_async(&self, key: &str, into: UserMemory, callback: impl FnOnce(Result<Tensor>) + Send + 'static) -> Result<()> {
        let key = Key::parse(key);
        let into = self.destination(&key, into)?;
        self.ask(|core| core.produced(key?), Some(into), callback)
    }

    fn ask(
        &self,
        key: impl FnOnce(&mut Core) -> Result<(Key, Origin)>,
        into: Option<Arc<Memory>>,
        callback: impl FnOnce(Result<Tensor>) + Send + 'static,
    ) -> Result<()> {
        let callback = |result| {
            callback(result);
            true
        };
        // One that is refused is dropped without the lock: it is the user's.
        let mut callback: Option<Callback> = Some(Box::new(callback));
        let asked = self.shared.driver.with(|core| {
            core.check()?;
            let key = key(core);
            core.recv(self.step, key, into, callback.take())
        });
        asked.map(drop)
    }

    /// Receives a tensor, and waits for it, for so long at most.
    ///
    /// Errors: what a callback would get; "Timed out waiting for notification".
    pub fn recv(&self, key: &str, timeout: Duration) -> Result<Tensor> {
        self.wait(Key::parse(key), None, timeout)
    }

    /// The same into this memory, which nobody writes to any more when this returns; it is the library's as long as the tensor is. If its time is over
    /// this takes as long as the producer's worker, which may write to it, needs to answer.
    ///
    /// Errors: as above; a tensor that has more bytes; a range that cannot be registered.
    pub fn recv_into(&self, key: &str, into: UserMemory, timeout: Duration) -> Result<Tensor> {
        let key = Key::parse(key);
        let into = self.destination(&key, into)?;
        self.wait(key, Some(into), timeout)
    }

    pub(super) fn destination(&self, key: &Result<Key>, into: UserMemory) -> Result<Arc<Memory>> {
        let is_exposed = key.as_ref().is_ok_and(|key| self.is_exposed(key));
        self.shared.pool.destination(into, is_exposed).map(Arc::new)
    }

    fn wait(&self, key: Result<Key>, into: Option<Arc<Memory>>, timeout: Duration) -> Result<Tensor> {
        let id = self.begin(key, into.as_ref())?;
        let answer = self.shared.wait(deadline(timeout), |core| core.calls.take(id));
        let answer = answer.or_else(|| self.give_up(id));
        let answer = answer.or_else(|| self.shared.wait(u64::MAX, |core| core.calls.take(id)));
        self.shared.settle(answer.unwrap_or_else(|| Answer::Failed(Error::internal("a receive without an answer"))), into.as_ref())
    }

    /// Begins a receive that somebody waits for.
    pub(super) fn begin(&self, key: Result<Key>, into: Option<&Arc<Memory>>) -> Result<CallId> {
        self.shared.driver.with(|core| {
            let key = key.and_then(|key| core.produced(key));
            core.recv(self.step, key, into.cloned(), None)
        })
    }

    /// Its time is over. It may have come since; `None`: it ends once nobody writes to its memory any more.
    pub(super) fn give_up(&self, id: CallId) -> Option<Answer> {
        self.shared.driver.with(|core| core.calls.take(id).or_else(|| core.give_up(id)))
    }

    /// Receives several tensors. The callback gets them all, in the order of their keys, once the last has come; or the first error, then. A dead one
    /// is an error.
    ///
    /// Errors: as for [`Rendezvous::recv_async`].
    pub fn recv_all_async(&self, keys: &[&str], callback: impl FnOnce(Result<Vec<Tensor>>) + Send + 'static) -> Result<()> {
        if keys.is_empty() {
            let none = |_| {
                callback(Ok(Vec::new()));
                true
            };
            let mut none: Option<Callback> = Some(Box::new(none));
            return self.shared.driver.with(|core| core.recv_none(&mut none));
        }
        let all = Arc::new(Mutex::new(All { tensors: vec![None; keys.len()], error: None, missing: keys.len(), callback: Some(callback) }));
        let part = |(index, key): (usize, &&str)| -> Callback {
            let (all, key) = (all.clone(), (*key).to_owned());
            Box::new(move |result| {
                let finished = lock(&all).take(index, &key, result);
                // Without the lock, as it may do anything.
                finished.map(|(callback, result)| callback(result)).is_some()
            })
        };
        let mut parts = keys.iter().map(|key| Key::parse(*key)).zip(keys.iter().enumerate().map(part)).collect();
        self.shared.driver.with(|core| core.recv_all(self.step, &mut parts))
    }

    /// Ends all receives of this step that wait, here and on workers that have asked this one, and all sends and receives that come later, with this
    /// error. The first one counts. Tensors that are on their way are thrown away.
    ///
    /// Errors: the step was cleaned up.
    pub fn abort(&self, why: &Error) -> Result<()> {
        self.shared.driver.with(|core| core.abort(self.step, why))
    }
}

/// Several receives that have one callback.
struct All<F> {
    tensors: Vec<Option<Tensor>>,
    error: Option<Error>,
    missing: usize,
    callback: Option<F>,
}

impl<F> All<F> {
    /// One is over. The last one finishes it.
    fn take(&mut self, index: usize, key: &str, result: Result<Tensor>) -> Option<(F, Result<Vec<Tensor>>)> {
        match result.and_then(|tensor| if tensor.is_dead() { Err(not_valid(key)) } else { Ok(tensor) }) {
            Ok(tensor) => self.tensors.iter_mut().skip(index).take(1).for_each(|place| *place = Some(tensor.clone())),
            Err(error) => _ = self.error.get_or_insert(error),
        }
        self.missing -= 1;
        let callback = if self.missing == 0 { self.callback.take()? } else { return None };
        let tensors = std::mem::take(&mut self.tensors).into_iter().flatten().collect();
        Some((callback, self.error.take().map_or(Ok(tensors), Err)))
    }
}

/// What TensorFlow says of a dead tensor among several.
fn not_valid(key: &str) -> Error {
    Error::usage(format!("The tensor returned for {key} was not valid."))
}
