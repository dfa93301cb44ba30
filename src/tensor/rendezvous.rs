//! A step, as producers and consumers of a worker use it. Any number of threads.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::base::error::{Error, Result};
use crate::base::sync::lock;

use super::calls::{Answer, Callback};
use super::manager::Shared;
use super::steps::StepRef;
use super::value::Tensor;

/// A step of a manager's. Clones are the same step. It fails once the step was cleaned up, or the manager closed.
#[derive(Clone)]
pub struct Rendezvous {
    shared: Arc<Shared>,
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
        self.shared.driver.with(|core| core.initialize(self.step))
    }

    /// Produces a tensor. It never waits: the tensor goes to who waits for it, or stays until somebody asks.
    ///
    /// Errors: a key that is none, or whose producer is another worker; "Duplicated send"; the step was aborted or cleaned up; the manager is closed.
    pub fn send(&self, key: &str, tensor: Tensor) -> Result<()> {
        self.shared.driver.with(|core| core.send(self.step, key, tensor))
    }

    /// Receives a tensor, which may not be produced yet. The callback gets it, or why it does not come, in [`Manager::run`](super::Manager::run) or
    /// when the manager is closed; once.
    pub fn recv_async(&self, key: &str, callback: Callback) {
        self.shared.driver.with(|core| core.recv(self.step, key, Some(callback)));
    }

    /// Receives a tensor, and waits for it, for so long at most.
    ///
    /// Errors: what a callback would get; "Timed out waiting for notification".
    pub fn recv(&self, key: &str, timeout: Duration) -> Result<Tensor> {
        let Shared { driver, name, .. } = &*self.shared;
        let id = driver.with(|core| core.recv(self.step, key, None));
        let answer = self.shared.wait(timeout, |core| core.calls.take(id));
        // It may have come since.
        let answer = answer.or_else(|| driver.with(|core| core.calls.take(id).or_else(|| core.give_up(id).and(None))));
        self.shared.settle(answer.unwrap_or_else(|| {
            let step = self.step.id;
            Answer::Failed(Error::timeout(format!("Timed out waiting for notification: {key} of step {step} @ {name}")))
        }))
    }

    /// Receives several tensors. The callback gets them all, in the order of their keys, once the last has come; or the first error. A dead one is an
    /// error.
    pub fn recv_all_async(&self, keys: &[&str], callback: impl FnOnce(Result<Vec<Tensor>>) + Send + 'static) {
        type Parts<F> = (Vec<Option<Tensor>>, Option<Error>, usize, Option<F>);
        let parts: Parts<_> = (vec![None; keys.len()], None, keys.len(), Some(callback));
        let finish = |(tensors, error, _, callback): &mut Parts<_>| {
            let tensors = std::mem::take(tensors).into_iter().flatten().collect();
            Some((callback.take()?, error.take().map_or(Ok(tensors), Err)))
        };
        let parts = Arc::new(Mutex::new(parts));
        if keys.is_empty()
            && let Some((callback, result)) = finish(&mut lock(&parts))
        {
            return callback(result);
        }
        for (index, key) in keys.iter().enumerate() {
            let (parts, name) = (parts.clone(), (*key).to_owned());
            let part = move |result: Result<Tensor>| {
                let finished = {
                    let mut parts = lock(&parts);
                    match result {
                        Ok(tensor) if tensor.is_dead() => {
                            parts.1.get_or_insert_with(|| not_valid(&name));
                        }
                        Ok(tensor) => parts.0.iter_mut().skip(index).take(1).for_each(|place| *place = Some(tensor.clone())),
                        Err(error) => {
                            parts.1.get_or_insert(error);
                        }
                    }
                    parts.2 -= 1;
                    if parts.2 == 0 { finish(&mut parts) } else { None }
                };
                // Without the lock, as it may do anything.
                if let Some((callback, result)) = finished {
                    callback(result);
                }
            };
            self.recv_async(key, Box::new(part));
        }
    }

    /// Ends all receives of this step that wait, here and on workers that have asked this one, and all sends and receives that come later, with this
    /// error. The first one counts. Tensors that are on their way are thrown away.
    ///
    /// Errors: the step was cleaned up.
    pub fn abort(&self, why: &Error) -> Result<()> {
        self.shared.driver.with(|core| core.abort(self.step, why))
    }
}

/// What TensorFlow says of a dead tensor among several.
fn not_valid(key: &str) -> Error {
    Error::usage(format!("The tensor returned for {key} was not valid."))
}
