//! Handles a client's request: changes the store, makes the reply, and collects the clients that are woken by it. No input or output here.

use std::sync::Arc;

use super::connection::Admission;
use super::output::Output;
use super::waits::Waits;
use super::watches::{ChangeNotice, Watches};
use crate::base::config::Secret;
use crate::base::rand;
use crate::store::tcp::secret::{self, End, NONCE};
use crate::store::tcp::wire::{self, ClientRequest, Event, MAGIC, WireError};
use crate::store::values::{Compared, NotANumber, Value, Values};

/// The store, and the state of its clients.
#[derive(Default)]
pub struct Handler {
    pub values: Values,
    pub waits: Waits,
    watches: Watches,
    secret: Secret,
    /// Clients whose wait the last request has ended.
    pub woken: Vec<usize>,
    /// Changes by the last request, each with a client that watches the key.
    pub notices: Vec<(usize, Arc<ChangeNotice>)>,
}

/// Why a client is disconnected.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DisconnectReason {
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

impl DisconnectReason {
    /// With as much of the key as fits a line.
    fn not_a_number(key: &[u8], delta: i64) -> Self {
        DisconnectReason::NotANumber { key: String::from_utf8_lossy(key).chars().take(64).collect(), delta }
    }
}

impl Handler {
    /// An empty store, for clients that know the secret.
    pub fn new(secret: Secret) -> Self {
        Handler { secret, ..Handler::default() }
    }

    /// Carries out a client's request and appends the reply. After an error the client is sent what is in `out` and disconnected.
    pub fn handle(
        &mut self,
        client: usize,
        request: ClientRequest<'_>,
        admission: &mut Admission,
        out: &mut Output,
    ) -> Result<(), DisconnectReason> {
        if !admission.admitted || matches!(request, ClientRequest::Validate { .. } | ClientRequest::Challenge | ClientRequest::Prove { .. })
        {
            return self.admit(request, admission, out);
        }
        if self.watches.watching(client) && !matches!(request, ClientRequest::WatchKey { .. }) {
            return Err(DisconnectReason::Watches);
        }
        if let Some(key) = self.waits.take_woken_for(client)
            && !matches!(request, ClientRequest::QueuePop { key: popped } if popped == &*key)
        {
            self.wake_next(&key);
        }
        match request {
            ClientRequest::Validate { .. } | ClientRequest::Challenge | ClientRequest::Prove { .. } => {}
            ClientRequest::Set { key, value } => {
                self.alter(key, |values| values.set(key, value));
                self.wake(key);
            }
            ClientRequest::CompareSet { key, expected, desired } => {
                match self.alter(key, |values| values.compare_set(key, expected, desired)) {
                    Compared::Stored => {
                        out.push_bytes(desired);
                        self.wake(key);
                    }
                    Compared::Other(value) => out.push_value(&value),
                    // Torch's reply, though the key does not exist.
                    Compared::Missing => out.push_bytes(expected),
                }
            }
            ClientRequest::Get { key } => self.push_value(key, out),
            ClientRequest::Add { key, delta } => {
                let sum =
                    self.alter(key, |values| values.add(key, delta)).map_err(|NotANumber| DisconnectReason::not_a_number(key, delta))?;
                out.push_i64(sum);
                self.wake(key);
            }
            ClientRequest::Check { keys } => {
                let ready = keys.iter().all(|key| self.values.contains(key));
                out.push(&[if ready { wire::READY } else { wire::NOT_READY }]);
            }
            ClientRequest::Wait { keys } => {
                if self.waits.is_waiting(client) {
                    return Err(DisconnectReason::WaitsTwice);
                }
                if self.waits.wait(client, &keys, &self.values) {
                    out.push(&[wire::STOP_WAITING]);
                }
            }
            ClientRequest::GetNumKeys => out.push_i64(self.values.keys().len() as i64),
            ClientRequest::DeleteKey { key } => out.push_i64(i64::from(self.alter(key, |values| values.delete(key)))),
            ClientRequest::Append { key, value } => {
                self.alter(key, |values| values.append(key, value));
                self.wake(key);
            }
            ClientRequest::MultiGet { keys } => keys.iter().for_each(|key| self.push_value(key, out)),
            ClientRequest::MultiSet { entries } => {
                let pairs = || (0..entries.count() / 2).filter_map(|i| Some((entries.get(2 * i)?, entries.get(2 * i + 1)?)));
                pairs().for_each(|(key, value)| self.alter(key, |values| values.set(key, value)));
                pairs().for_each(|(key, _)| self.wake(key));
            }
            ClientRequest::CancelWait => {
                self.waits.cancel(client);
                out.push(&[wire::WAIT_CANCELED]);
            }
            ClientRequest::Ping { nonce } => out.push(&nonce.to_le_bytes()),
            ClientRequest::QueuePush { key, value } => {
                self.values.push(key, value);
                self.waits.wake_one(key, &mut self.woken);
            }
            ClientRequest::QueuePop { key } => {
                out.push_i64(self.values.queue_len(key) as i64);
                if let Some(value) = self.values.pop(key) {
                    out.push_value(&value);
                }
            }
            ClientRequest::QueueLen { key } => out.push_i64(self.values.queue_len(key) as i64),
            ClientRequest::ListKeys => {
                let keys = self.values.keys();
                out.push_i64(keys.len() as i64);
                keys.for_each(|key| out.push_bytes(key));
            }
            ClientRequest::Barrier { key, world_size } => {
                if self.waits.is_waiting(client) {
                    return Err(DisconnectReason::WaitsTwice);
                }
                let count = self.alter(key, |values| values.add(key, 1)).map_err(|NotANumber| DisconnectReason::not_a_number(key, 1))?;
                self.wake(key);
                self.waits.join_barrier(client, key, world_size, count, &mut self.woken);
            }
            ClientRequest::WatchKey { key } => {
                if self.waits.is_waiting(client) {
                    return Err(DisconnectReason::WaitsTwice);
                }
                self.watches.add(client, key);
                out.push(&[wire::WATCHING]);
            }
        }
        Ok(())
    }

    /// Handles a request of a client that is not admitted yet.
    fn admit(&mut self, request: ClientRequest<'_>, admission: &mut Admission, out: &mut Output) -> Result<(), DisconnectReason> {
        let key = self.secret.key();
        match (request, key) {
            (ClientRequest::Validate { .. }, _) if admission.validated => return Err(DisconnectReason::ValidatedTwice),
            (ClientRequest::Validate { magic: MAGIC }, _) => {
                admission.validated = true;
                admission.admitted = key.is_none();
            }
            _ if !admission.validated => return Err(DisconnectReason::NotValidated),
            (ClientRequest::Challenge, None) => out.push(&[secret::NO_SECRET]),
            (ClientRequest::Challenge, Some(_)) => {
                let mut nonce = [0; NONCE];
                rand::fill(&mut nonce)?;
                admission.nonce = Some(nonce);
                out.push(&[secret::SECRET]);
                out.push(&nonce);
            }
            (ClientRequest::Prove { nonce, code }, Some(key)) => {
                // A challenge is valid once.
                let ours = admission.nonce.take().ok_or(DisconnectReason::NoSecret)?;
                if !secret::verify(key, End::Client, &ours, nonce, code) {
                    out.push(&[secret::WRONG_SECRET]);
                    return Err(DisconnectReason::NoSecret);
                }
                admission.admitted = true;
                out.push(&[secret::SECRET]);
                out.push(&secret::code(key, End::Server, &ours, nonce));
            }
            (ClientRequest::Ping { .. }, _) => {
                out.push(&secret::SECRET_WANTED.to_le_bytes());
                return Err(DisconnectReason::NoSecret);
            }
            _ => return Err(DisconnectReason::NoSecret),
        }
        Ok(())
    }

    /// Changes a key's value, and makes the notices for the clients that watch it.
    fn alter<R>(&mut self, key: &[u8], change: impl FnOnce(&mut Values) -> R) -> R {
        if self.watches.of(key).is_empty() {
            return change(&mut self.values);
        }
        // Cloned, so that a change does not happen in place and can be told by the pointer.
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
        let notice = Arc::new(ChangeNotice { event, key: key.into(), old, new });
        self.notices.extend(self.watches.of(key).iter().map(|&client| (client, Arc::clone(&notice))));
        result
    }

    /// Removes a client. If it was woken for a value of a queue, the next one that waits is woken instead.
    pub fn remove_client(&mut self, client: usize) {
        self.waits.cancel(client);
        self.watches.remove_client(client);
        if let Some(key) = self.waits.take_woken_for(client) {
            self.wake_next(&key);
        }
    }

    /// Bytes of everything but the clients' buffers.
    pub fn size(&self) -> usize {
        self.values.size() + self.waits.size() + self.watches.size()
    }

    fn wake(&mut self, key: &[u8]) {
        self.waits.wake(key, &mut self.woken);
    }

    /// A client was woken for a value of a queue and did not pop it: wakes the next one.
    fn wake_next(&mut self, key: &[u8]) {
        if self.values.queue_len(key) > 0 {
            self.waits.wake_one(key, &mut self.woken);
        }
    }

    fn push_value(&self, key: &[u8], out: &mut Output) {
        match self.values.get(key) {
            Some(value) => out.push_value(value),
            // The protocol has no reply for a missing key; torch's libuv server sends an empty value, too.
            None => out.push_bytes(&[]),
        }
    }
}
