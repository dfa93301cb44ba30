//! How members of a job, ranks or workers, tell each other in a store what they have to know before they are connected. On the thread that connects.

use std::time::Duration;

use crate::base::error;

use super::{Deadline, Error, FOREVER, Store};

/// Where the first member that could not be connected has said why.
const FIRST_CAUSE: &str = "not connected";
/// Bytes that are read of it.
const MAX_CAUSE: usize = 4096;

/// A store in which all members meet, until a deadline. Its keys are nobody else's: a prefix of one.
pub struct Exchange<'a> {
    store: &'a dyn Store,
    deadline: Deadline,
    /// What they are called: "ranks".
    members: &'static str,
}

impl<'a> Exchange<'a> {
    /// In this store, for so long at most.
    pub fn new(store: &'a dyn Store, members: &'static str, timeout: Duration) -> Self {
        Exchange { store, deadline: Deadline::after(timeout), members }
    }

    /// The time left.
    pub fn left(&self) -> Duration {
        self.deadline.left().unwrap_or(FOREVER)
    }

    /// Tells all others something.
    ///
    /// Errors: a store that cannot be used.
    pub fn publish(&self, key: &str, value: &[u8]) -> error::Result<()> {
        self.store.set(key, value).map_err(|error| self.in_store(error))
    }

    /// The same for what is told once, and is not empty.
    ///
    /// Errors: as above; somebody, this member itself for instance, has told something under this key before, which others may have read.
    pub fn publish_new(&self, key: &str, value: &[u8], who: &str) -> error::Result<()> {
        let told = self.store.compare_set(key, b"", value).map_err(|error| self.in_store(error))?;
        if told != value {
            return Err(self.in_store(Error::Usage(format!("{who} has been there before; use another prefix each time"))));
        }
        Ok(())
    }

    /// What `who` has told.
    ///
    /// Errors: it has not come in time; a store that cannot be used.
    pub fn fetch(&self, key: &str, who: &str) -> error::Result<Vec<u8>> {
        self.store.get(key, self.left()).map_err(|error| match error {
            Error::Timeout(why) => error::Error::timeout(format!("{who} has not come: {why}")),
            other => self.in_store(other),
        })
    }

    /// What all who are known by these keys have told; nothing if some have not yet.
    ///
    /// Errors: a store that cannot be used.
    pub fn fetch_all(&self, keys: &[&str]) -> error::Result<Option<Vec<Vec<u8>>>> {
        if !self.store.check(keys).map_err(|error| self.in_store(error))? {
            return Ok(None);
        }
        self.store.multi_get(keys, self.left()).map(Some).map_err(|error| self.in_store(error))
    }

    /// Waits until all others have come here, of whom each is known by a key and in words. One that has gone since it told its addresses is named.
    ///
    /// Errors: they have not in time; a store that cannot be used.
    pub fn wait_for_all(&self, own: &str, others: &[(String, String)]) -> error::Result<()> {
        let ready = |key: &str| format!("{key} connects");
        self.publish(&ready(own), b"")?;
        let keys: Vec<String> = others.iter().map(|(key, _)| ready(key)).collect();
        let waited = self.store.wait(&keys.iter().map(String::as_str).collect::<Vec<_>>(), self.left());
        waited.map_err(|error| {
            let absent = |(key, _): &&(String, String)| self.store.check(&[&ready(key)]).is_ok_and(|here| !here);
            match (error, others.iter().find(absent)) {
                (Error::Timeout(why), Some((_, who))) => error::Error::timeout(format!("{who} has not come: {why}")),
                (error, _) => self.in_store(error),
            }
        })
    }

    /// The error of a member that could not be connected. Others notice that it goes, and whoever notices goes, too: all name what the first one has told.
    /// Before this member closes its queue pairs. `who` is this member, in words.
    pub fn first_cause(&self, who: &str, error: error::Error) -> error::Error {
        let words = match &error {
            error::Error::Remote(_) | error::Error::Timeout(_) => error.to_string(),
            own => format!("{who}: {own}"),
        };
        match (error, self.store.compare_set(FIRST_CAUSE, b"", words.as_bytes())) {
            (error::Error::Remote(_), Ok(first)) => error::Error::remote(String::from_utf8_lossy(first.get(..MAX_CAUSE).unwrap_or(&first))),
            // A store that cannot be used tells nothing.
            (error, _) => error,
        }
    }

    fn in_store(&self, error: Error) -> error::Error {
        let words = |why: &dyn std::fmt::Display| format!("the store in which the {} meet: {why}", self.members);
        match error {
            Error::System(error) => error,
            Error::Timeout(why) => error::Error::timeout(words(&why)),
            Error::Usage(why) => error::Error::usage(words(&why)),
            other => error::Error::remote(words(&other)),
        }
    }
}
