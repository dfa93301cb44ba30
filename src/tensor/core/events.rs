//! What becomes of what a peer wants, and of receives when it has answered. Under the lock of the manager.

use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::link::Failure;

use super::super::calls::Answer;
use super::super::event::{ChannelEvent, Landed};
use super::super::key::TensorId;
use super::super::steps::CallId;
use super::super::steps::Waiter;
use super::super::value::Tensor;
use super::{Core, Wanted};

/// A tensor of at most so many bytes is copied out as soon as it is here, so that its buffer is free without waiting for the thread that wants it.
const COPIED_AT_ONCE: u64 = 16 << 10;

impl Core {
    /// What a worker wants of this one, or has for it.
    pub(super) fn handle(&mut self, from: usize, event: ChannelEvent) {
        match event {
            ChannelEvent::Find { id, again } => self.find(from, &id, again),
            ChannelEvent::Landed { id, tensor } => self.landed(from, id, tensor),
            ChannelEvent::Here { id, tensor } => self.here(from, &id, tensor),
            ChannelEvent::Failed { id, why } => {
                let why = why.within(&format!("worker {}", self.workers.get(from).map_or("", |worker| &worker.name)));
                let why = Failure::from_error(&why);
                let wanted = self.take_wanted(from, &id);
                self.returned(wanted.exposed);
                for id in wanted.calls {
                    self.calls.end(id, Answer::Failed(why.error()));
                }
            }
            ChannelEvent::Forget { id } => {
                // Else it was found, or refused.
                if self.steps.withdraw(&id, Waiter::Worker(from))
                    && let Some(adapter) = self.adapter(from)
                {
                    adapter.forgotten(&id);
                }
            }
            ChannelEvent::Back { id, tensor } => {
                if let Some(table) = self.steps.table(id.step) {
                    table.put_back(&id.name, tensor);
                }
            }
            ChannelEvent::NoMemory { id, why } => self.no_memory(from, &id, &why),
            ChannelEvent::Withdrawn { id } => self.withdrawn(from, &id),
        }
    }

    /// Receives that wait for this, which is over, and are not.
    fn take_wanted(&mut self, from: usize, what: &TensorId) -> Wanted {
        self.workers.get_mut(from).and_then(|worker| worker.wanted.remove(what)).unwrap_or_default()
    }

    /// Nobody writes to the memory of this receive any more.
    fn returned(&mut self, exposed: Option<CallId>) {
        if let Some(id) = exposed {
            self.calls.returned(id);
        }
    }

    fn landed(&mut self, from: usize, what: TensorId, tensor: Arc<Landed>) {
        let wanted = self.workers.get_mut(from).and_then(|worker| worker.wanted.get_mut(&what));
        // One that can be had once is kept for who asks again, as long as the step is there.
        if !self.tolerate_dup_recv
            && let Some(wanted) = wanted.filter(|wanted| wanted.calls.is_empty())
            && self.steps.table(what.step).is_some_and(|table| table.check().is_ok())
        {
            wanted.kept = true;
            return self.late.push_back((from, what, tensor));
        }
        let ids = self.take_wanted(from, &what).calls;
        if ids.is_empty() {
            return self.consumed(from, &tensor);
        }
        self.copied(from, tensor.len());
        if tensor.len() <= COPIED_AT_ONCE {
            self.end_with(from, ids, tensor.copy(&mut || ()).0);
            return self.consumed(from, &tensor);
        }
        let is_shared = ids.len() > 1;
        for id in ids {
            if is_shared && self.has_memory(id) {
                self.copied(from, tensor.len());
            }
            self.calls.end(id, Answer::Landed { from, landed: tensor.clone(), is_shared });
        }
    }

    /// A tensor that nobody waited for was copied out.
    pub(super) fn keep(&mut self, from: usize, what: &TensorId, landed: &Landed, copy: Result<Tensor>) {
        self.copied(from, landed.len());
        self.consumed(from, landed);
        let ids = self.take_wanted(from, what).calls;
        if !ids.is_empty() {
            self.end_with(from, ids, copy);
        } else if let Ok(copy) = copy {
            self.keep_here(what, copy);
        }
    }

    /// A tensor that may be had once is there for the next who asks.
    fn keep_here(&mut self, what: &TensorId, tensor: Tensor) {
        if let Some(table) = self.steps.table(what.step) {
            // Nobody waits there for what another worker produces; one that was aborted meanwhile takes none.
            let _ = table.send(&what.name, tensor);
        }
    }

    /// A tensor is in the memory of the receive that has exposed it, or in the library's.
    fn here(&mut self, from: usize, what: &TensorId, tensor: Tensor) {
        let Wanted { calls: ids, exposed, .. } = self.take_wanted(from, what);
        if ids.is_empty() && exposed.is_none() && !self.tolerate_dup_recv {
            return self.keep_here(what, tensor);
        }
        if let [id] = ids.as_slice()
            && exposed.is_none_or(|exposed| exposed == *id)
        {
            self.returned(exposed);
            return match exposed {
                Some(_) => self.calls.end(*id, Answer::Here(tensor)),
                None => self.end(from, *id, Ok(tensor)),
            };
        }
        // Others get a copy of what is in one's own memory, made while it is certain to be there.
        let shared = if exposed.is_some() && ids.iter().any(|id| Some(*id) != exposed) {
            self.copied(from, tensor.meta().bytes);
            Tensor::received(*tensor.meta(), tensor.bytes().into_owned())
        } else {
            tensor.clone()
        };
        self.returned(exposed);
        for id in ids {
            match exposed == Some(id) {
                true => self.calls.end(id, Answer::Here(tensor.clone())),
                false => self.end(from, id, Ok(shared.clone())),
            }
        }
    }

    fn has_memory(&mut self, id: CallId) -> bool {
        self.calls.get(id).is_some_and(|call| call.into.is_some())
    }

    /// Ends a receive with a tensor that is not in its own memory yet, if it has any.
    pub(super) fn end(&mut self, from: usize, id: CallId, tensor: Result<Tensor>) {
        if let (Ok(tensor), true) = (&tensor, self.has_memory(id)) {
            self.copied(from, tensor.meta().bytes);
        }
        self.calls.end(id, tensor.map_or_else(Answer::Failed, Answer::Here));
    }

    fn end_with(&mut self, from: usize, ids: Vec<CallId>, answer: Result<Tensor>) {
        let answer = answer.map_err(|why| Failure::from_error(&why));
        for id in ids {
            self.end(from, id, answer.clone().map_err(|why| why.error()));
        }
    }

    fn copied(&mut self, worker: usize, bytes: u64) {
        if let Some(adapter) = self.adapter(worker) {
            adapter.copied(bytes);
        }
    }

    /// There is no memory for a tensor, or too little in that of the receive which has exposed it. Others ask again when the request is taken back.
    fn no_memory(&mut self, from: usize, what: &TensorId, why: &Error) {
        let Some(wanted) = self.workers.get_mut(from).and_then(|worker| worker.wanted.get_mut(what)) else { return };
        let over = match wanted.exposed.take() {
            Some(id) => {
                wanted.calls.retain(|other| *other != id);
                self.calls.returned(id);
                vec![id]
            }
            None => std::mem::take(&mut wanted.calls),
        };
        let why = Failure::from_error(why);
        over.into_iter().for_each(|id| self.calls.end(id, Answer::Failed(why.error())));
    }

    /// A request was taken back: as the time of the receive with the memory is over, or nobody waits any more. Others ask again.
    fn withdrawn(&mut self, from: usize, what: &TensorId) {
        let Wanted { calls: ids, exposed, .. } = self.take_wanted(from, what);
        self.returned(exposed);
        for id in ids {
            match exposed == Some(id) {
                true => self.calls.end(id, Answer::Failed(self.timed_out(what))),
                false => self.begin(id),
            }
        }
    }
}
