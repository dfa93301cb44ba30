//! A store's connection, used by one operation at a time; none waits for it beyond its deadline. On the threads that use the store.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::connection::Connection;
use crate::base::sync::lock;
use crate::store::deadline::Deadline;
use crate::store::{Error, Result};

/// A connection that several threads use.
pub struct SharedConnection {
    connection: Mutex<Connection>,
    /// Whether an operation has the connection. (The wait for a mutex has no timeout.)
    in_use: Mutex<bool>,
    freed: Condvar,
}

/// The connection, for one operation.
pub struct ConnectionGuard<'a> {
    // Dropped first, so that the next operation finds it unlocked.
    connection: MutexGuard<'a, Connection>,
    _in_use: InUse<'a>,
}

struct InUse<'a>(&'a SharedConnection);

impl SharedConnection {
    /// Shares a connection.
    pub fn new(connection: Connection) -> Self {
        SharedConnection { connection: Mutex::new(connection), in_use: Mutex::new(false), freed: Condvar::new() }
    }

    /// Waits for the connection, for an operation that must be over by the deadline.
    ///
    /// Errors: [`Error::Timeout`].
    pub fn acquire(&self, deadline: Deadline) -> Result<ConnectionGuard<'_>> {
        let mut in_use = lock(&self.in_use);
        while *in_use {
            in_use = match deadline.grace().left() {
                None => self.freed.wait(in_use).unwrap_or_else(PoisonError::into_inner),
                Some(left) if left.is_zero() => {
                    let words =
                        "timeout while another thread used this store's connection: a thread that waits for long needs a store of its own";
                    return Err(Error::Timeout(words.into()));
                }
                Some(left) => self.freed.wait_timeout(in_use, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
        *in_use = true;
        drop(in_use);
        let mut connection = lock(&self.connection);
        connection.set_deadline(deadline);
        Ok(ConnectionGuard { connection, _in_use: InUse(self) })
    }
}

impl Drop for InUse<'_> {
    fn drop(&mut self) {
        *lock(&self.0.in_use) = false;
        self.0.freed.notify_one();
    }
}

impl Deref for ConnectionGuard<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl DerefMut for ConnectionGuard<'_> {
    fn deref_mut(&mut self) -> &mut Connection {
        &mut self.connection
    }
}
