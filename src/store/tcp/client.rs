//! A TCPStore as torch's constructor gives it: a connection to a server, and on one rank the server itself.

use std::sync::Arc;
use std::time::Duration;

use super::connection::Connection;
use super::server::{Server, ServerOptions};
use super::turn::{Turn, Turns};
use super::wire::{Event, Part, Query};
use crate::base::config::Secret;
use crate::base::{clock, fork};
use crate::store::deadline::Deadline;
use crate::store::watch::{Callback, Change, Watch};
use crate::store::{Error, Result, Store};

/// Who runs the server.
#[derive(Debug)]
pub enum Host {
    /// Somebody else, at this host and port.
    Other(String, u16),
    /// This store, which is to be reached under this name.
    Own(String, ServerOptions),
    /// This store, or another of this process at the same port.
    Shared(String, ServerOptions),
}

/// How a store is set up.
#[derive(Debug, Clone)]
pub struct TcpOptions {
    /// How many stores there will be, if that is known. Then all announce themselves, and the one with the server waits for them.
    pub world_size: Option<usize>,
    /// Whether it does wait.
    pub wait_for_workers: bool,
    /// For connecting and waiting for the others, and for each later operation that has no timeout of its own. The system may take longer to resolve the host's
    /// name: that cannot be interrupted.
    pub timeout: Duration,
    /// What somebody else's server wants to hear. A server of one's own has its own.
    pub secret: Secret,
}

impl Default for TcpOptions {
    /// Torch's timeout of 300 s, and nobody known.
    fn default() -> Self {
        TcpOptions { world_size: None, wait_for_workers: true, timeout: Duration::from_secs(300), secret: Secret::default() }
    }
}

/// A client of a TCPStore server, and its server if it has one.
///
/// One operation at a time: a thread that waits keeps others from using the same store, until their timeouts. [`TcpStore::reconnect`] gives a thread its own.
///
/// No operation returns later than 100 ms after its timeout, whatever the server does or does not; one that was cut off in the middle of a reply ends the
/// connection. A timeout of zero so is for a server that answers within that.
pub struct TcpStore {
    connection: Turns,
    host: String,
    port: u16,
    timeout: Duration,
    secret: Secret,
    server: Option<Arc<Server>>,
    epoch: u64,
}

/// Counts the stores that have come. Not a user's key: those begin with "/".
const INIT: &str = "init/";
/// Pause between looks at it. Source: TCPStore::waitForWorkers.
const LOOK: Duration = Duration::from_millis(10);
/// First pause of a popper that was overtaken; the last is `LOOK`.
const FIRST_PAUSE: Duration = Duration::from_micros(100);

impl TcpStore {
    /// Starts the server if it is this store's, connects, and waits for the others if it is to.
    ///
    /// Errors: [`Error::Network`] if nobody answers or the port is taken; [`Error::Timeout`] if the others do not come.
    pub fn new(host: Host, options: TcpOptions) -> Result<Self> {
        let deadline = Deadline::after(options.timeout);
        let (host, port, secret, server) = match host {
            Host::Other(host, port) => (host, port, options.secret, None),
            Host::Own(host, server) => {
                let secret = server.secret.clone();
                let server = Arc::new(Server::start(server)?);
                (host, server.port(), secret, Some(server))
            }
            Host::Shared(host, server) => {
                let secret = server.secret.clone();
                let server = Server::shared(server)?;
                (host, server.port(), secret, Some(server))
            }
        };
        let connection = Turns::new(Connection::open(&host, port, &secret, options.timeout)?);
        let store = TcpStore { connection, host, port, timeout: options.timeout, secret, server, epoch: fork::epoch() };
        if let Some(world_size) = options.world_size.filter(|_| options.wait_for_workers) {
            store.await_workers(world_size, deadline)?;
        }
        Ok(store)
    }

    /// Another connection to the same server.
    pub fn reconnect(&self) -> Result<Self> {
        let connection = Turns::new(self.connect()?);
        Ok(TcpStore {
            connection,
            host: self.host.clone(),
            port: self.port,
            timeout: self.timeout,
            secret: self.secret.clone(),
            server: self.server.clone(),
            epoch: fork::epoch(),
        })
    }

    fn connect(&self) -> Result<Connection> {
        Connection::open(&self.host, self.port, &self.secret, self.timeout)
    }

    /// The server's port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The name that the server was reached under.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Announces this store; the one with the server then waits until so many have come, so that it does not leave before anybody is there.
    ///
    /// Errors: [`Error::Timeout`], with torch's words.
    pub fn wait_for_workers(&self, world_size: usize, timeout: Duration) -> Result<()> {
        self.await_workers(world_size, Deadline::after(timeout))
    }

    fn await_workers(&self, world_size: usize, deadline: Deadline) -> Result<()> {
        let start = clock::now();
        let mut joined = self.add_to(Part::OwnKey(INIT), 1, deadline)?;
        if self.server.is_none() {
            return Ok(());
        }
        while joined < world_size as i64 {
            if deadline.passed() {
                return Err(Error::Timeout(format!(
                    "Timed out after {} seconds waiting for clients. {joined}/{world_size} clients joined.",
                    (clock::now() - start) / 1_000_000_000
                )));
            }
            clock::sleep(deadline.left().map_or(LOOK, |left| left.min(LOOK)));
            joined = self.add_to(Part::OwnKey(INIT), 0, deadline)?;
        }
        Ok(())
    }

    fn here(&self) -> Result<()> {
        if self.epoch != fork::epoch() {
            return Err(Error::Usage("a store cannot be used in a process forked after it was made: make another there".into()));
        }
        Ok(())
    }

    /// The connection, for an operation that has to be over by then.
    fn turn(&self, deadline: Deadline) -> Result<Turn<'_>> {
        self.here()?;
        self.connection.take(deadline)
    }

    /// An operation that has no timeout of its own.
    fn call<R>(&self, query: Query, parts: &[Part<'_>], reply: impl FnOnce(&mut Connection) -> Result<R>) -> Result<R> {
        let mut connection = self.turn(Deadline::after(self.timeout))?;
        connection.send(query, parts)?;
        reply(&mut connection)
    }

    fn add_to(&self, key: Part<'_>, delta: i64, deadline: Deadline) -> Result<i64> {
        let mut connection = self.turn(deadline)?;
        connection.send(Query::Add, &[key, Part::Int(delta)])?;
        connection.number()
    }
}

/// Waits for keys on a connection that is then used on.
fn wait_on(connection: &mut Connection, keys: &[&str], timeout: Duration) -> Result<()> {
    connection.send(Query::Wait, &counted(keys))?;
    if connection.released()? {
        return Ok(());
    }
    // What users know the keys as on the wire.
    let named: Vec<String> = keys.iter().map(|key| format!("/{key}")).collect();
    Err(Error::Timeout(format!("wait timeout after {}ms, keys: {}{}", timeout.as_millis(), named.join(", "), connection.silence())))
}

fn counted<'a>(keys: &[&'a str]) -> Vec<Part<'a>> {
    std::iter::once(Part::Count(keys.len())).chain(keys.iter().map(|key| Part::Key(key))).collect()
}

impl Store for TcpStore {
    fn reopen(self: Arc<Self>) -> Result<Arc<dyn Store>> {
        Ok(Arc::new(self.reconnect()?))
    }

    fn server_port(&self) -> Option<u16> {
        Some(self.port)
    }

    /// Is not answered: only this store's next operations are sure to find it done.
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(Query::Set, &[Part::Key(key), Part::Value(value)], |_| Ok(()))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let mut connection = self.turn(Deadline::after(timeout))?;
        wait_on(&mut connection, &[key], timeout)?;
        connection.send(Query::Get, &[Part::Key(key)])?;
        connection.bytes()
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        wait_on(&mut *self.turn(Deadline::after(timeout))?, keys, timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.call(Query::Check, &counted(keys), |connection| connection.array().map(|[reply]| reply == super::wire::READY))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.add_by(key, delta, Deadline::after(self.timeout))
    }

    fn add_by(&self, key: &str, delta: i64, deadline: Deadline) -> Result<i64> {
        self.add_to(Part::Key(key), delta, deadline)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.call(Query::CompareSet, &[Part::Key(key), Part::Value(expected), Part::Value(desired)], Connection::bytes)
    }

    /// Is not answered, as `set`.
    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(Query::Append, &[Part::Key(key), Part::Value(value)], |_| Ok(()))
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let mut connection = self.turn(Deadline::after(timeout))?;
        wait_on(&mut connection, keys, timeout)?;
        connection.send(Query::MultiGet, &counted(keys))?;
        keys.iter().map(|_| connection.bytes()).collect()
    }

    /// Is not answered, as `set`.
    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        let fields = entries.iter().flat_map(|(key, value)| [Part::Key(key), Part::Value(value)]);
        let parts: Vec<Part<'_>> = std::iter::once(Part::Count(entries.len())).chain(fields).collect();
        self.call(Query::MultiSet, &parts, |_| Ok(()))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        Ok(self.call(Query::DeleteKey, &[Part::Key(key)], Connection::number)? > 0)
    }

    fn num_keys(&self) -> Result<i64> {
        self.call(Query::GetNumKeys, &[], Connection::number)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.call(Query::ListKeys, &[], |connection| {
            let mut keys = Vec::new();
            for _ in 0..connection.number()? {
                let key = connection.bytes()?;
                keys.extend(key.strip_prefix(b"/").and_then(|key| std::str::from_utf8(key).ok()).map(str::to_owned));
            }
            Ok(keys)
        })
    }

    /// Is not answered, as `set`.
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(Query::QueuePush, &[Part::Key(key), Part::Value(value)], |_| Ok(()))
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let deadline = Deadline::after(timeout);
        let mut connection = self.turn(deadline)?;
        let mut pause = FIRST_PAUSE;
        loop {
            if !timeout.is_zero() {
                wait_on(&mut connection, &[key], timeout)?;
            }
            connection.send(Query::QueuePop, &[Part::Key(key)])?;
            if connection.number()? > 0 {
                return connection.bytes();
            }
            if timeout.is_zero() {
                return Err(Error::QueueEmpty);
            }
            // Another client was faster; or a key is called as the queue, which ends each wait at once.
            if deadline.passed() {
                return Err(Error::wait_timeout(timeout, &[&format!("/{key}")]));
            }
            clock::sleep(deadline.left().map_or(pause, |left| left.min(pause)));
            pause = (2 * pause).min(LOOK);
        }
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        self.call(Query::QueueLen, &[Part::Key(key)], Connection::number)
    }

    /// On a connection of the watch's own.
    fn watch_key(&self, key: &str, callback: Callback) -> Result<Watch> {
        // Not in a forked child, as every operation.
        self.here()?;
        let mut connection = self.connect()?;
        let stop = connection.stopper()?;
        connection.watch(key)?;
        let patience = self.timeout;
        let next = move |tell: &mut dyn FnMut(Change<'_>)| match connection.change(patience) {
            Ok((event, old, new)) => {
                tell(match event {
                    Event::Updated => Change::Updated(&old, &new),
                    Event::Created => Change::Created(&new),
                    Event::Deleted => Change::Deleted(&old),
                });
                true
            }
            Err(error) => {
                tell(Change::Lost(&error));
                false
            }
        };
        Watch::start(move || drop(stop.shutdown(std::net::Shutdown::Both)), next, callback)
    }

    fn barrier(&self, key: &str, world_size: i64, timeout: Duration) -> Result<()> {
        let mut connection = self.turn(Deadline::after(timeout))?;
        connection.send(Query::Barrier, &[Part::Key(key), Part::Int(world_size)])?;
        if connection.released()? {
            return Ok(());
        }
        Err(Error::Timeout(format!("barrier timeout after {}ms, key: {key}{}", timeout.as_millis(), connection.silence())))
    }
}
