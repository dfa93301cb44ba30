//! What the server answers: one request, its reply, and who goes on because of it. No input or output here.

use super::output::Output;
use super::waits::Waits;
use crate::store::tcp::wire::{self, MAGIC, Request, WireError};
use crate::store::values::{Compared, NotANumber, Values};

/// The store itself.
#[derive(Default)]
pub struct Core {
    pub values: Values,
    pub waits: Waits,
    /// Clients to be told to go on, after the request at hand.
    pub woken: Vec<usize>,
}

/// Why a client is disconnected.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Refusal {
    #[error("it sent {0}")]
    Wire(#[from] WireError),
    #[error("it does not speak the protocol of today's torch (2.2 and later)")]
    NotValidated,
    #[error("it opened the connection twice")]
    ValidatedTwice,
    #[error("it asked to wait while waiting")]
    WaitsTwice,
    #[error("it added to what is not a number of 64 bits")]
    NotANumber,
    #[error("it came to a barrier of {0}")]
    NobodyAtBarrier(i64),
}

impl From<NotANumber> for Refusal {
    fn from(_: NotANumber) -> Self {
        Refusal::NotANumber
    }
}

impl Core {
    /// Carries out a client's request and appends the reply.
    pub fn handle(&mut self, client: usize, request: Request<'_>, validated: &mut bool, out: &mut Output) -> Result<(), Refusal> {
        match request {
            Request::Validate { .. } if *validated => return Err(Refusal::ValidatedTwice),
            Request::Validate { magic: MAGIC } => *validated = true,
            _ if !*validated => return Err(Refusal::NotValidated),
            _ => {}
        }
        if let Some(key) = self.waits.settle(client)
            && !matches!(request, Request::QueuePop { key: popped } if popped == &*key)
        {
            self.pass_on(&key);
        }
        match request {
            Request::Validate { .. } => {}
            Request::Set { key, value } => {
                self.values.set(key, value);
                self.wake(key);
            }
            Request::CompareSet { key, expected, desired } => match self.values.compare_set(key, expected, desired) {
                Compared::Stored => {
                    out.push_bytes(desired);
                    self.wake(key);
                }
                Compared::Other(value) => out.push_value(&value),
                // Torch says so, though nothing is there.
                Compared::Missing => out.push_bytes(expected),
            },
            Request::Get { key } => self.push_value(key, out),
            Request::Add { key, delta } => {
                let sum = self.values.add(key, delta)?;
                out.push_i64(sum);
                self.wake(key);
            }
            Request::Check { keys } => {
                let ready = keys.iter().all(|key| self.values.contains(key));
                out.push(&[if ready { wire::READY } else { wire::NOT_READY }]);
            }
            Request::Wait { keys } => {
                if self.waits.waiting(client) {
                    return Err(Refusal::WaitsTwice);
                }
                if self.waits.wait(client, &keys, &self.values) {
                    out.push(&[wire::STOP_WAITING]);
                }
            }
            Request::GetNumKeys => out.push_i64(self.values.keys().len() as i64),
            Request::DeleteKey { key } => out.push_i64(i64::from(self.values.delete(key))),
            Request::Append { key, value } => {
                self.values.append(key, value);
                self.wake(key);
            }
            Request::MultiGet { keys } => keys.iter().for_each(|key| self.push_value(key, out)),
            Request::MultiSet { entries } => {
                let pairs = || (0..entries.count() / 2).filter_map(|i| Some((entries.get(2 * i)?, entries.get(2 * i + 1)?)));
                pairs().for_each(|(key, value)| self.values.set(key, value));
                pairs().for_each(|(key, _)| self.wake(key));
            }
            Request::CancelWait => {
                self.waits.cancel(client);
                out.push(&[wire::WAIT_CANCELED]);
            }
            Request::Ping { nonce } => out.push(&nonce.to_le_bytes()),
            Request::QueuePush { key, value } => {
                self.values.push(key, value);
                self.waits.wake_one(key, &self.values, &mut self.woken);
            }
            Request::QueuePop { key } => {
                out.push_i64(self.values.queue_len(key) as i64);
                if let Some(value) = self.values.pop(key) {
                    out.push_value(&value);
                }
            }
            Request::QueueLen { key } => out.push_i64(self.values.queue_len(key) as i64),
            Request::ListKeys => {
                let keys = self.values.keys();
                out.push_i64(keys.len() as i64);
                keys.for_each(|key| out.push_bytes(key));
            }
            Request::Barrier { key, world_size } => {
                if world_size < 1 {
                    return Err(Refusal::NobodyAtBarrier(world_size));
                }
                if self.waits.waiting(client) {
                    return Err(Refusal::WaitsTwice);
                }
                let count = self.values.add(key, 1)?;
                self.wake(key);
                self.waits.arrive(client, key, world_size, count, &mut self.woken);
            }
        }
        Ok(())
    }

    /// The client is gone: what it waited for, and what it was woken for, is for others.
    pub fn leave(&mut self, client: usize) {
        self.waits.cancel(client);
        if let Some(key) = self.waits.settle(client) {
            self.pass_on(&key);
        }
    }

    /// Bytes of everything that is held for clients in common.
    pub fn size(&self) -> usize {
        self.values.size() + self.waits.size()
    }

    fn wake(&mut self, key: &[u8]) {
        self.waits.wake(key, &self.values, &mut self.woken);
    }

    /// Somebody was woken for a value and does not take it.
    fn pass_on(&mut self, key: &[u8]) {
        if self.values.queue_len(key) > 0 {
            self.waits.wake_one(key, &self.values, &mut self.woken);
        }
    }

    fn push_value(&self, key: &[u8], out: &mut Output) {
        match self.values.get(key) {
            Some(value) => out.push_value(value),
            // Torch's libuv server cannot say that there is nothing, either.
            None => out.push_bytes(&[]),
        }
    }
}
