//! A TCPStore as torch's constructor gives it: a connection to a server, and on one rank the server itself.

use std::sync::Arc;
use std::time::Duration;

use super::connection::Connection;
use super::server::{Server, ServerOptions};
use super::shared_connection::{ConnectionGuard, SharedConnection};
use super::wire::{Event, Part, RequestType};
use crate::base::config::Secret;
use crate::base::{clock, fork};
use crate::store::deadline::Deadline;
use crate::store::watch::{Callback, Change, KeyWatch};
use crate::store::{Error, Result, Store};

/// Who runs the server.
#[derive(Debug)]
pub enum Host {
    /// Another process, at this host and port.
    Other(String, u16),
    /// This store, which is to be reached under this name.
    Own(String, ServerOptions),
    /// This store, or another of this process at the same port.
    Shared(String, ServerOptions),
}

/// How a store is set up.
#[derive(Debug, Clone)]
pub struct TcpOptions {
    /// How many stores there will be, if that is known. Then each counts itself in, and the one with the server waits for all.
    pub world_size: Option<usize>,
    /// Whether to count and to wait.
    pub wait_for_workers: bool,
    /// Timeout of connecting and waiting for the others, and of each later operation without a timeout of its own. Resolving the host's name may take
    /// longer: that cannot be interrupted.
    pub timeout: Duration,
    /// The secret of another process's server. [`ServerOptions`] has that of an own one.
    pub secret: Secret,
}

impl Default for TcpOptions {
    /// Torch's timeout of 300 s, and an unknown number of stores.
    fn default() -> Self {
        TcpOptions { world_size: None, wait_for_workers: true, timeout: Duration::from_secs(300), secret: Secret::default() }
    }
}

/// A client of a TCPStore server, and its server if it has one.
///
/// One operation at a time: while one thread waits, operations of others on the same store wait too, until their timeouts. [`TcpStore::reconnect`] gives a
/// thread its own.
///
/// No operation returns later than 100 ms after its timeout, whatever the server does; one that times out in the middle of a reply ends the connection.
/// So a timeout of zero works with a server that answers within 100 ms.
pub struct TcpStore {
    connection: SharedConnection,
    host: String,
    port: u16,
    timeout: Duration,
    secret: Secret,
    server: Option<Arc<Server>>,
    epoch: u64,
}

/// Key that counts the stores. Not a user's key: those begin with "/".
const INIT: &str = "init/";
/// Time between two reads of it. Source: TCPStore::waitForWorkers.
const POLL_INTERVAL: Duration = Duration::from_millis(10);
/// First pause of a pop that found the queue emptied by another client; the longest is `POLL_INTERVAL`.
const FIRST_PAUSE: Duration = Duration::from_micros(100);

impl TcpStore {
    /// Starts the server if it is this store's, connects, and waits for the others if it is to.
    ///
    /// Errors: [`Error::Network`] if no server answers or the port is in use; [`Error::Timeout`] if the others do not come.
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
        let connection = SharedConnection::new(Connection::open(&host, port, &secret, options.timeout)?);
        let store = TcpStore { connection, host, port, timeout: options.timeout, secret, server, epoch: fork::epoch() };
        if let Some(world_size) = options.world_size.filter(|_| options.wait_for_workers) {
            store.await_workers(world_size, deadline)?;
        }
        Ok(store)
    }

    /// Another connection to the same server.
    pub fn reconnect(&self) -> Result<Self> {
        let connection = SharedConnection::new(self.connect()?);
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

    /// The server's host name.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Counts this store in; the one with the server then waits until `world_size` stores have, so that it does not end before the others have connected.
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
            clock::sleep(deadline.left().map_or(POLL_INTERVAL, |left| left.min(POLL_INTERVAL)));
            joined = self.add_to(Part::OwnKey(INIT), 0, deadline)?;
        }
        Ok(())
    }

    fn check_process(&self) -> Result<()> {
        if self.epoch != fork::epoch() {
            return Err(Error::Usage("a store cannot be used in a process forked after it was made: make another there".into()));
        }
        Ok(())
    }

    /// The connection, for an operation that must be over by the deadline.
    fn acquire(&self, deadline: Deadline) -> Result<ConnectionGuard<'_>> {
        self.check_process()?;
        self.connection.acquire(deadline)
    }

    /// An operation that has no timeout of its own.
    fn call<R>(&self, query: RequestType, parts: &[Part<'_>], reply: impl FnOnce(&mut Connection) -> Result<R>) -> Result<R> {
        let mut connection = self.acquire(Deadline::after(self.timeout))?;
        connection.send(query, parts)?;
        reply(&mut connection)
    }

    fn add_to(&self, key: Part<'_>, delta: i64, deadline: Deadline) -> Result<i64> {
        let mut connection = self.acquire(deadline)?;
        connection.send(RequestType::Add, &[key, Part::Int(delta)])?;
        connection.number()
    }
}

/// Waits for keys.
fn wait_on(connection: &mut Connection, keys: &[&str], timeout: Duration) -> Result<()> {
    connection.send(RequestType::Wait, &counted(keys))?;
    if connection.wait_reply()? {
        return Ok(());
    }
    // As torch prints the keys: with the "/" that they have on the wire.
    let named: Vec<String> = keys.iter().map(|key| format!("/{key}")).collect();
    Err(Error::Timeout(format!("wait timeout after {}ms, keys: {}{}", timeout.as_millis(), named.join(", "), connection.pending_note())))
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

    /// Has no reply: only this store's later operations are sure to see the value.
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(RequestType::Set, &[Part::Key(key), Part::Value(value)], |_| Ok(()))
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let mut connection = self.acquire(Deadline::after(timeout))?;
        wait_on(&mut connection, &[key], timeout)?;
        connection.send(RequestType::Get, &[Part::Key(key)])?;
        connection.bytes()
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        wait_on(&mut *self.acquire(Deadline::after(timeout))?, keys, timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.call(RequestType::Check, &counted(keys), |connection| connection.array().map(|[reply]| reply == super::wire::READY))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.add_by(key, delta, Deadline::after(self.timeout))
    }

    fn add_by(&self, key: &str, delta: i64, deadline: Deadline) -> Result<i64> {
        self.add_to(Part::Key(key), delta, deadline)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.compare_set_by(key, expected, desired, Deadline::after(self.timeout))
    }

    fn compare_set_by(&self, key: &str, expected: &[u8], desired: &[u8], deadline: Deadline) -> Result<Vec<u8>> {
        let mut connection = self.acquire(deadline)?;
        connection.send(RequestType::CompareSet, &[Part::Key(key), Part::Value(expected), Part::Value(desired)])?;
        connection.bytes()
    }

    /// Has no reply, like `set`.
    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(RequestType::Append, &[Part::Key(key), Part::Value(value)], |_| Ok(()))
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let mut connection = self.acquire(Deadline::after(timeout))?;
        wait_on(&mut connection, keys, timeout)?;
        connection.send(RequestType::MultiGet, &counted(keys))?;
        keys.iter().map(|_| connection.bytes()).collect()
    }

    /// Has no reply, like `set`.
    fn multi_set(&self, entries: &[(&str, &[u8])]) -> Result<()> {
        let fields = entries.iter().flat_map(|(key, value)| [Part::Key(key), Part::Value(value)]);
        let parts: Vec<Part<'_>> = std::iter::once(Part::Count(entries.len())).chain(fields).collect();
        self.call(RequestType::MultiSet, &parts, |_| Ok(()))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        Ok(self.call(RequestType::DeleteKey, &[Part::Key(key)], Connection::number)? > 0)
    }

    fn num_keys(&self) -> Result<i64> {
        self.call(RequestType::GetNumKeys, &[], Connection::number)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.call(RequestType::ListKeys, &[], |connection| {
            let mut keys = Vec::new();
            for _ in 0..connection.number()? {
                let key = connection.bytes()?;
                keys.extend(key.strip_prefix(b"/").and_then(|key| std::str::from_utf8(key).ok()).map(str::to_owned));
            }
            Ok(keys)
        })
    }

    /// Has no reply, like `set`.
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(RequestType::QueuePush, &[Part::Key(key), Part::Value(value)], |_| Ok(()))
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let deadline = Deadline::after(timeout);
        let mut connection = self.acquire(deadline)?;
        let mut pause = FIRST_PAUSE;
        loop {
            if !timeout.is_zero() {
                wait_on(&mut connection, &[key], timeout)?;
            }
            connection.send(RequestType::QueuePop, &[Part::Key(key)])?;
            if connection.number()? > 0 {
                return connection.bytes();
            }
            if timeout.is_zero() {
                return Err(Error::QueueEmpty);
            }
            // Another client was faster; or a key has the queue's name, which ends each wait at once.
            if deadline.passed() {
                return Err(Error::wait_timeout(timeout, &[&format!("/{key}")]));
            }
            clock::sleep(deadline.left().map_or(pause, |left| left.min(pause)));
            pause = (2 * pause).min(POLL_INTERVAL);
        }
    }

    fn queue_len(&self, key: &str) -> Result<i64> {
        self.call(RequestType::QueueLen, &[Part::Key(key)], Connection::number)
    }

    /// On a connection of its own.
    fn watch_key(&self, key: &str, callback: Callback) -> Result<KeyWatch> {
        self.check_process()?;
        let mut connection = self.connect()?;
        let stop = connection.clone_stream()?;
        connection.watch(key)?;
        let timeout = self.timeout;
        let next = move |notify: &mut dyn FnMut(Change<'_>)| match connection.change(timeout) {
            Ok((event, old, new)) => {
                notify(match event {
                    Event::Updated => Change::Updated(&old, &new),
                    Event::Created => Change::Created(&new),
                    Event::Deleted => Change::Deleted(&old),
                });
                true
            }
            Err(error) => {
                notify(Change::Lost(&error));
                false
            }
        };
        KeyWatch::start(move || drop(stop.shutdown(std::net::Shutdown::Both)), next, callback)
    }

    fn barrier(&self, key: &str, world_size: i64, timeout: Duration) -> Result<()> {
        let mut connection = self.acquire(Deadline::after(timeout))?;
        connection.send(RequestType::Barrier, &[Part::Key(key), Part::Int(world_size)])?;
        if connection.wait_reply()? {
            return Ok(());
        }
        Err(Error::Timeout(format!("barrier timeout after {}ms, key: {key}{}", timeout.as_millis(), connection.pending_note())))
    }
}
