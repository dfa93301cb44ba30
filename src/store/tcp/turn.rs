//! Turns at a store's connection: one operation at a time, and none waits for its turn beyond its deadline. On the threads that use the store.

use std::ops::{Deref, DerefMut};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::connection::Connection;
use crate::store::deadline::Deadline;
use crate::store::{Error, Result};

/// A connection that several threads use.
pub struct Turns {
    connection: Mutex<Connection>,
    /// Somebody has the connection: its lock alone would be waited for without limit.
    taken: Mutex<bool>,
    freed: Condvar,
}

/// The connection, for one operation.
pub struct Turn<'a> {
    // Dropped before the pass, so that whoever comes next finds it unlocked.
    connection: MutexGuard<'a, Connection>,
    _pass: Pass<'a>,
}

struct Pass<'a>(&'a Turns);

impl Turns {
    /// For a connection that nobody uses yet.
    pub fn new(connection: Connection) -> Self {
        Turns { connection: Mutex::new(connection), taken: Mutex::new(false), freed: Condvar::new() }
    }

    /// Waits for a turn, whose operation has to be over by the deadline.
    ///
    /// Errors: [`Error::Timeout`].
    pub fn take(&self, deadline: Deadline) -> Result<Turn<'_>> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        while *taken {
            taken = match deadline.grace().left() {
                None => self.freed.wait(taken).unwrap_or_else(PoisonError::into_inner),
                Some(left) if left.is_zero() => {
                    let words =
                        "timeout while another thread used this store's connection: a thread that waits for long needs a store of its own";
                    return Err(Error::Timeout(words.into()));
                }
                Some(left) => self.freed.wait_timeout(taken, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
        *taken = true;
        drop(taken);
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        connection.limit(deadline);
        Ok(Turn { connection, _pass: Pass(self) })
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.freed.notify_one();
    }
}

impl Deref for Turn<'_> {
    type Target = Connection;

    fn deref(&self) -> &Connection {
        &self.connection
    }
}

impl DerefMut for Turn<'_> {
    fn deref_mut(&mut self) -> &mut Connection {
        &mut self.connection
    }
}
