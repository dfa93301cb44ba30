//! How members of a job, ranks or workers, tell each other in a store what they have to know before they are connected. On the thread that connects.

use std::borrow::Cow;
use std::cell::Cell;
use std::time::Duration;

use crate::base::error;

use super::{Deadline, Error, FOREVER, Store};

/// Where the first member that could not be connected has said why.
const FIRST_CAUSE: &str = "not connected";
/// Bytes that are read of it.
const MAX_CAUSE: usize = 4096;
/// How long a member that cannot be connected waits for a store that does not answer.
const CAUSE_TIME: Duration = Duration::from_secs(3);

/// A member of a job.
#[derive(Debug, Clone)]
pub struct Member {
    /// Under which it tells.
    pub key: String,
    /// What it is called.
    pub words: String,
}

/// A store in which all members meet, until a deadline. Its keys are nobody else's: a prefix of one.
pub struct Exchange<'a> {
    store: &'a dyn Store,
    deadline: Deadline,
    /// What they are called: "ranks".
    members: &'static str,
    own: Member,
    /// This member has told something.
    published: Cell<bool>,
}

impl<'a> Exchange<'a> {
    /// In this store, for so long at most, as this member.
    pub fn new(store: &'a dyn Store, members: &'static str, own: Member, timeout: Duration) -> Self {
        Exchange { store, deadline: Deadline::after(timeout), members, own, published: Cell::new(false) }
    }

    /// The time left.
    pub fn left(&self) -> Duration {
        self.deadline.left().unwrap_or(FOREVER)
    }

    /// Claims to be this member, before anything is told.
    ///
    /// Errors: somebody, this member itself for instance, has claimed it before, and others may have read what that one told; a store that cannot be
    /// used.
    pub fn claim(&self) -> error::Result<()> {
        let Member { key, words } = &self.own;
        if self.store.add_by(&format!("{key} claimed"), 1, self.deadline).map_err(|error| self.in_store(error))? != 1 {
            return Err(self.in_store(Error::Usage(format!("{words} has been there before; use another prefix each time"))));
        }
        Ok(())
    }

    /// Tells all others something. (Nothing is what a member tells that gives up before.)
    ///
    /// Errors: a store that cannot be used.
    pub fn publish(&self, value: &[u8]) -> error::Result<()> {
        self.published.set(true);
        self.store.set(&self.own.key, value).map_err(|error| self.in_store(error))
    }

    /// What a member has told.
    ///
    /// Errors: it has not come in time, or gives up; a store that cannot be used.
    pub fn fetch(&self, member: &Member) -> error::Result<Vec<u8>> {
        let told = self.store.get(&member.key, self.left()).map_err(|error| match error {
            Error::Timeout(why) => error::Error::timeout(format!("{} has not come: {why}", member.words)),
            other => self.in_store(other),
        })?;
        if told.is_empty() {
            self.unless_given_up()?;
        }
        Ok(told)
    }

    /// What all who are known by these keys have told; nothing if some have not yet.
    ///
    /// Errors: one of them gives up; a store that cannot be used.
    pub fn fetch_all(&self, keys: &[&str]) -> error::Result<Option<Vec<Vec<u8>>>> {
        if !self.store.check(keys).map_err(|error| self.in_store(error))? {
            return Ok(None);
        }
        let told = self.store.multi_get(keys, self.left()).map_err(|error| self.in_store(error))?;
        if told.iter().any(Vec::is_empty) {
            self.unless_given_up()?;
        }
        Ok(Some(told))
    }

    /// Waits until all others have come here. One that has gone since it told its addresses is named.
    ///
    /// Errors: they have not in time, or one of them gives up; a store that cannot be used.
    pub fn wait_for_all(&self, others: &[Member]) -> error::Result<()> {
        self.store.set(&connects(&self.own), b"").map_err(|error| self.in_store(error))?;
        let keys: Vec<String> = others.iter().map(connects).collect();
        let waited = self.store.wait(&keys.iter().map(String::as_str).collect::<Vec<_>>(), self.left());
        waited.map_err(|error| {
            let absent = |member: &&Member| self.store.check(&[&connects(member)]).is_ok_and(|here| !here);
            match (error, others.iter().find(absent)) {
                (Error::Timeout(why), Some(member)) => error::Error::timeout(format!("{} has not come: {why}", member.words)),
                (error, _) => self.in_store(error),
            }
        })?;
        self.unless_given_up()
    }

    /// Errors: a member gives up, for the cause that is told.
    fn unless_given_up(&self) -> error::Result<()> {
        if !self.store.check(&[FIRST_CAUSE]).map_err(|error| self.in_store(error))? {
            return Ok(());
        }
        let cause = self.store.get(FIRST_CAUSE, self.left()).map_err(|error| self.in_store(error))?;
        Err(error::Error::remote(text(&cause)))
    }

    /// The error of a member that could not be connected, as the first of them has told it: others notice that it goes, and whoever notices goes, too. To be
    /// called before this member closes its queue pairs. Who waits for this one in the store hears of it there.
    pub fn first_cause(&self, error: error::Error) -> error::Error {
        let words = match &error {
            error::Error::Remote(_) | error::Error::Timeout(_) => error.to_string(),
            own => format!("{}: it gives up: {own}", self.own.words),
        };
        // A store that cannot be used tells nothing.
        let Ok(first) = self.store.compare_set_by(FIRST_CAUSE, b"", words.as_bytes(), Deadline::after(CAUSE_TIME)) else { return error };
        let _ = self.store.set(&connects(&self.own), b"");
        if !self.published.get() {
            let _ = self.store.set(&self.own.key, b"");
        }
        match error {
            error::Error::Remote(_) => error::Error::remote(text(&first)),
            error::Error::Timeout(_) => error::Error::timeout(text(&first)),
            own => own,
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

/// What a cause says.
fn text(cause: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(cause.get(..MAX_CAUSE).unwrap_or(cause))
}

/// Where a member says that it has read what all others told, or gives up.
fn connects(member: &Member) -> String {
    format!("{} connects", member.key)
}
