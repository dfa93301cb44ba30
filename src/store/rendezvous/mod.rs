//! Rendezvous: how a process finds the job's store, its rank and the number of ranks, by a URL and torch's variables.
//!
//! `tcp://`, `env://` and `file://` follow torch's rules and have torch's messages; [`register`] adds schemes. Called once per job and process, on any
//! thread; blocks until the store is reached.
//!
//! Source: torch 2.15, torch/distributed/rendezvous.py.

mod environment;
mod group;
mod schemes;
mod url;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::{Error, Result, Store};
use crate::base::fork::PerProcess;

pub use environment::Environment;
pub use group::{DEFAULT_GROUP, Group, GroupOptions, store_based_barrier};
pub use url::Url;

/// Timeout of a rendezvous and of what follows. Source: default_pg_timeout.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30 * 60);

/// What a rendezvous gives.
pub struct Joined {
    /// The job's store.
    pub store: Arc<dyn Store>,
    /// This process's rank, from 0.
    pub rank: i64,
    /// Number of ranks; -1 if it is unknown.
    pub world_size: i64,
}

/// The arguments of a handler.
pub struct RendezvousArgs {
    /// The URL, with `rank` and `world_size` in its query.
    pub url: Url,
    /// How long it may take.
    pub timeout: Duration,
    /// The variables.
    pub environment: Environment,
}

/// Carries out the rendezvous of a scheme.
pub type Handler = Arc<dyn Fn(&RendezvousArgs) -> Result<Joined> + Send + Sync>;

/// A rendezvous, which can be carried out once.
pub struct Rendezvous {
    args: RendezvousArgs,
    handler: Handler,
    done: bool,
}

/// Schemes of the program's own. Not inherited by a forked child.
static REGISTERED: PerProcess<HashMap<String, Handler>> = PerProcess::new();

/// Adds a scheme; its name is compared in lower case.
///
/// Errors: one that exists.
pub fn register(scheme: &str, handler: Handler) -> Result<()> {
    let scheme = scheme.to_ascii_lowercase();
    let taken = schemes::built_in(&scheme).is_some()
        || REGISTERED.with(|registered| {
            let taken = registered.contains_key(&scheme);
            registered.entry(scheme.clone()).or_insert(handler);
            taken
        });
    if taken { Err(Error::Usage(format!("Rendezvous handler for {scheme}:// already registered"))) } else { Ok(()) }
}

/// Prepares a rendezvous. A `rank` or `world_size` other than -1 goes into the URL's query, which must have neither then.
///
/// Errors: a URL that is none, a scheme that nobody registered. What the scheme itself wants is checked by [`Rendezvous::join`].
pub fn rendezvous(url: &str, rank: i64, world_size: i64, timeout: Duration, environment: Environment) -> Result<Rendezvous> {
    let mut parsed = Url::parse(url)?;
    if rank != -1 || world_size != -1 {
        if parsed.query("rank").is_some() || parsed.query("world_size").is_some() {
            return Err(Error::Usage(format!("The url: {url} has node-specific arguments(rank, world_size) already.")));
        }
        for (name, value) in [("rank", rank), ("world_size", world_size)] {
            if value != -1 {
                parsed.set_query(name, &value.to_string());
            }
        }
    }
    let scheme = parsed.scheme();
    let handler = schemes::built_in(scheme).or_else(|| REGISTERED.with(|registered| registered.get(scheme).cloned()));
    let handler = handler.ok_or_else(|| Error::Usage(format!("No rendezvous handler for {scheme}://")))?;
    Ok(Rendezvous { args: RendezvousArgs { url: parsed, timeout, environment }, handler, done: false })
}

impl Rendezvous {
    /// Carries it out, once: torch's iterators end with an error, too.
    ///
    /// Errors: [`Error::Usage`] for what is missing or wrong in the URL or a variable; those of the store.
    pub fn join(&mut self) -> Result<Joined> {
        if std::mem::replace(&mut self.done, true) {
            let scheme = self.args.url.scheme();
            // Torch spells the two differently.
            let again = if scheme == "file" { "rerendezvous" } else { "re-rendezvous" };
            return Err(Error::Usage(format!("Unable to perform {again} using {scheme}:// method")));
        }
        (self.handler)(&self.args)
    }
}

/// A number as Python's int() reads it from text.
fn integer(text: &str) -> Result<i64> {
    let trimmed = text.trim();
    let (sign, digits) = match trimmed.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", trimmed.strip_prefix('+').unwrap_or(trimmed)),
    };
    let groups = || digits.split('_');
    let number = groups().all(|group| !group.is_empty() && group.bytes().all(|b| b.is_ascii_digit()));
    let parsed = number.then(|| format!("{sign}{}", groups().collect::<String>()).parse().ok()).flatten();
    parsed.ok_or_else(|| Error::Usage(format!("invalid literal for int() with base 10: '{text}'")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_read_as_python_does() {
        for (text, number) in [("0", 0), (" 12\n", 12), ("+7", 7), ("-3", -3), ("1_000", 1000), ("007", 7)] {
            assert_eq!(integer(text).ok(), Some(number), "{text:?}");
        }
        for text in ["", " ", "a", "1a", "0x1", "1.0", "_1", "1_", "1__0", "--1", "+-1", "9223372036854775808"] {
            assert_eq!(integer(text).unwrap_err().to_string(), format!("invalid literal for int() with base 10: '{text}'"));
        }
    }
}
