//! What the server answers: one request, its reply, and who goes on because of it. No input or output here.

use std::sync::Arc;

use super::connection::Standing;
use super::output::Output;
use super::waits::Waits;
use super::watches::{Notice, Watches};
use crate::base::config::Secret;
use crate::base::rand;
use crate::store::tcp::secret::{self, End, NONCE};
use crate::store::tcp::wire::{self, Event, MAGIC, Request, WireError};
use crate::store::values::{Compared, NotANumber, Value, Values};

/// The store itself.
#[derive(Default)]
pub struct Core {
    pub values: Values,
    pub waits: Waits,
    watches: Watches,
    secret: Secret,
    /// Clients to be told to go on, after the request at hand.
    pub woken: Vec<usize>,
    /// Clients to be told of a change, after the request at hand.
    pub noticed: Vec<(usize, Arc<Notice>)>,
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
    #[error("it does not know the secret (RAILHEAD_STORE_SECRET)")]
    NoSecret,
    #[error("no random numbers: {0}")]
    NoNonce(#[from] crate::base::error::Error),
    #[error("it watches, and asks for something else")]
    Watches,
    #[error("it asked to wait while waiting")]
    WaitsTwice,
    #[error("it added {delta} to {key:?}, whose value is no number of 64 bits")]
    NotANumber { key: String, delta: i64 },
}

impl Refusal {
    /// Of a key no more than a line takes.
    fn not_a_number(key: &[u8], delta: i64) -> Self {
        Refusal::NotANumber { key: String::from_utf8_lossy(key).chars().take(64).collect(), delta }
    }
}

impl Core {
    /// An empty store for those who know the secret.
    pub fn new(secret: Secret) -> Self {
        Core { secret, ..Core::default() }
    }

    /// Carries out a client's request and appends the reply. After an error the client gets what is in `out`, and goes.
    pub fn handle(&mut self, client: usize, request: Request<'_>, standing: &mut Standing, out: &mut Output) -> Result<(), Refusal> {
        if !standing.admitted || matches!(request, Request::Validate { .. } | Request::Challenge | Request::Prove { .. }) {
            return self.admit(request, standing, out);
        }
        if self.watches.watching(client) && !matches!(request, Request::WatchKey { .. }) {
            return Err(Refusal::Watches);
        }
        if let Some(key) = self.waits.settle(client)
            && !matches!(request, Request::QueuePop { key: popped } if popped == &*key)
        {
            self.pass_on(&key);
        }
        match request {
            Request::Validate { .. } | Request::Challenge | Request::Prove { .. } => {}
            Request::Set { key, value } => {
                self.alter(key, |values| values.set(key, value));
                self.wake(key);
            }
            Request::CompareSet { key, expected, desired } => match self.alter(key, |values| values.compare_set(key, expected, desired)) {
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
                let sum = self.alter(key, |values| values.add(key, delta)).map_err(|NotANumber| Refusal::not_a_number(key, delta))?;
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
            Request::DeleteKey { key } => out.push_i64(i64::from(self.alter(key, |values| values.delete(key)))),
            Request::Append { key, value } => {
                self.alter(key, |values| values.append(key, value));
                self.wake(key);
            }
            Request::MultiGet { keys } => keys.iter().for_each(|key| self.push_value(key, out)),
            Request::MultiSet { entries } => {
                let pairs = || (0..entries.count() / 2).filter_map(|i| Some((entries.get(2 * i)?, entries.get(2 * i + 1)?)));
                pairs().for_each(|(key, value)| self.alter(key, |values| values.set(key, value)));
                pairs().for_each(|(key, _)| self.wake(key));
            }
            Request::CancelWait => {
                self.waits.cancel(client);
                out.push(&[wire::WAIT_CANCELED]);
            }
            Request::Ping { nonce } => out.push(&nonce.to_le_bytes()),
            Request::QueuePush { key, value } => {
                self.values.push(key, value);
                self.waits.wake_one(key, &mut self.woken);
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
                if self.waits.waiting(client) {
                    return Err(Refusal::WaitsTwice);
                }
                let count = self.alter(key, |values| values.add(key, 1)).map_err(|NotANumber| Refusal::not_a_number(key, 1))?;
                self.wake(key);
                self.waits.arrive(client, key, world_size, count, &mut self.woken);
            }
            Request::WatchKey { key } => {
                if self.waits.waiting(client) {
                    return Err(Refusal::WaitsTwice);
                }
                self.watches.add(client, key);
                out.push(&[wire::WATCHING]);
            }
        }
        Ok(())
    }

    /// One who has yet to show that it may use the store.
    fn admit(&mut self, request: Request<'_>, standing: &mut Standing, out: &mut Output) -> Result<(), Refusal> {
        let key = self.secret.key();
        match (request, key) {
            (Request::Validate { .. }, _) if standing.validated => return Err(Refusal::ValidatedTwice),
            (Request::Validate { magic: MAGIC }, _) => {
                standing.validated = true;
                standing.admitted = key.is_none();
            }
            _ if !standing.validated => return Err(Refusal::NotValidated),
            (Request::Challenge, None) => out.push(&[secret::NO_SECRET]),
            (Request::Challenge, Some(_)) => {
                let mut nonce = [0; NONCE];
                rand::fill(&mut nonce)?;
                standing.nonce = Some(nonce);
                out.push(&[secret::SECRET]);
                out.push(&nonce);
            }
            (Request::Prove { nonce, code }, Some(key)) => {
                // A challenge serves once.
                let ours = standing.nonce.take().ok_or(Refusal::NoSecret)?;
                if !secret::verify(key, End::Client, &ours, nonce, code) {
                    out.push(&[secret::WRONG_SECRET]);
                    return Err(Refusal::NoSecret);
                }
                standing.admitted = true;
                out.push(&[secret::SECRET]);
                out.push(&secret::code(key, End::Server, &ours, nonce));
            }
            (Request::Ping { .. }, _) => {
                out.push(&secret::SECRET_WANTED.to_le_bytes());
                return Err(Refusal::NoSecret);
            }
            _ => return Err(Refusal::NoSecret),
        }
        Ok(())
    }

    /// Changes a key's value, and notes who is to be told of it.
    fn alter<R>(&mut self, key: &[u8], change: impl FnOnce(&mut Values) -> R) -> R {
        if self.watches.of(key).is_empty() {
            return change(&mut self.values);
        }
        // Held, so that a change makes another value of it.
        let old = self.values.get(key).cloned();
        let result = change(&mut self.values);
        let new = self.values.get(key).cloned();
        let event = match (&old, &new) {
            (Some(old), Some(new)) if Value::ptr_eq(old, new) => return result,
            (Some(_), Some(_)) => Event::Updated,
            (None, Some(_)) => Event::Created,
            (Some(_), None) => Event::Deleted,
            (None, None) => return result,
        };
        let notice = Arc::new(Notice { event, key: key.into(), old, new });
        self.noticed.extend(self.watches.of(key).iter().map(|&client| (client, Arc::clone(&notice))));
        result
    }

    /// The client is gone: what it waited for, and what it was woken for, is for others.
    pub fn leave(&mut self, client: usize) {
        self.waits.cancel(client);
        self.watches.leave(client);
        if let Some(key) = self.waits.settle(client) {
            self.pass_on(&key);
        }
    }

    /// Bytes of everything that is held for clients in common.
    pub fn size(&self) -> usize {
        self.values.size() + self.waits.size() + self.watches.size()
    }

    fn wake(&mut self, key: &[u8]) {
        self.waits.wake(key, &mut self.woken);
    }

    /// Somebody was woken for a value and does not take it.
    fn pass_on(&mut self, key: &[u8]) {
        if self.values.queue_len(key) > 0 {
            self.waits.wake_one(key, &mut self.woken);
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
