//! A client's connection to a server, torch's or ours: connecting with patience, sending requests, and reading replies. On the thread of whoever calls
//! the store, under the store's lock.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use super::wire::{self, MAGIC, Part, Query};
use crate::base::{clock, rand};
use crate::store::deadline::Deadline;
use crate::store::{Error, Result};

/// A connection that has been opened and answered.
pub struct Connection {
    stream: TcpStream,
    /// The request being made.
    request: Vec<u8>,
    /// Bytes received: those before `taken` are used.
    received: Box<[u8]>,
    taken: usize,
    filled: usize,
    /// What the socket's receive timeout is now.
    timeout: Option<Duration>,
    /// For replies that come at once unless the server hangs.
    patience: Duration,
    /// Why the connection is of no more use.
    broken: Option<String>,
}

/// First pause between attempts to connect. Torch begins with half a second; a server on its way up is there sooner than that.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// Longest pause.
const LAST_PAUSE: Duration = Duration::from_secs(5);
/// How long one address may take to answer before another is tried.
const ATTEMPT: Duration = Duration::from_secs(10);
const BUFFER: usize = 16 << 10;
/// A reply of more than that is taken for nonsense.
const LONGEST_REPLY: u64 = 4 << 30;

impl Connection {
    /// Connects and greets, again and again, until the deadline.
    ///
    /// Errors: nobody answers, with torch's words.
    pub fn open(host: &str, port: u16, timeout: Duration) -> Result<Self> {
        let deadline = Deadline::after(timeout);
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match Self::attempt(host, port, deadline, timeout) {
                Ok(connection) => return Ok(connection),
                Err(error) => error,
            };
            // Each waits half to one and a half times the pause, so that a whole job does not come at one moment.
            let jitter = 0.5 + (rand::u64()? % 1024) as f64 / 1024.0;
            let wait = pause.mul_f64(jitter);
            if deadline.left().is_some_and(|left| left <= wait) {
                return Err(Error::Network(format!(
                    "The client socket has timed out after {}ms while trying to connect to ({host}, {port}): {error}",
                    timeout.as_millis()
                )));
            }
            clock::sleep(wait);
            pause = pause.mul_f64(1.5).min(LAST_PAUSE);
        }
    }

    fn attempt(host: &str, port: u16, deadline: Deadline, patience: Duration) -> Result<Self> {
        let addresses = (host, port).to_socket_addrs().map_err(|e| Error::system(format!("resolve {host}"), e))?;
        let mut last = Error::Network(format!("{host} has no address"));
        for address in addresses {
            let limit = deadline.left().map_or(ATTEMPT, |left| left.clamp(Duration::from_millis(1), ATTEMPT));
            let greeted = TcpStream::connect_timeout(&address, limit)
                .map_err(|e| Error::system(format!("connect to {address}"), e))
                .and_then(|stream| Self::greet(stream, limit, patience));
            match greeted {
                Ok(connection) => return Ok(connection),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Says what it speaks and sees that the other side does, too. In one write: torch's libuv server hangs up on half a VALIDATE.
    fn greet(stream: TcpStream, limit: Duration, patience: Duration) -> Result<Self> {
        let set_up = || {
            stream.set_nodelay(true)?;
            stream.set_write_timeout(Some(patience.max(Duration::from_secs(1))).filter(|limit| *limit != Duration::MAX))?;
            socket2::SockRef::from(&stream).set_keepalive(true)
        };
        set_up().map_err(|e| Error::system("set up a connection", e))?;
        let mut connection = Connection {
            stream,
            request: Vec::new(),
            received: vec![0; BUFFER].into_boxed_slice(),
            taken: 0,
            filled: 0,
            timeout: None,
            patience: limit,
            broken: None,
        };
        let nonce = std::process::id();
        wire::encode(&mut connection.request, Query::Validate, &[Part::Word(MAGIC)]);
        connection.send(Query::Ping, &[Part::Word(nonce)])?;
        if connection.array()? != nonce.to_le_bytes() {
            return Err(connection.nonsense("a greeting"));
        }
        connection.patience = patience.max(Duration::from_secs(1));
        Ok(connection)
    }

    /// Sends a request.
    pub fn send(&mut self, query: Query, parts: &[Part<'_>]) -> Result<()> {
        if let Some(reason) = &self.broken {
            return Err(Error::Network(reason.clone()));
        }
        wire::encode(&mut self.request, query, parts);
        let sent = self.stream.write_all(&self.request);
        self.request.clear();
        self.request.shrink_to(BUFFER);
        sent.map_err(|e| self.fail(format!("Failed to send: {e}. Connection was likely closed. Did the remote server shutdown or crash?")))
    }

    /// A fixed number of bytes of a reply.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        let mut got = 0;
        while let Some(rest) = out.get_mut(got..).filter(|rest| !rest.is_empty()) {
            if self.taken == self.filled {
                self.fill(None)?;
            }
            let from = self.received.get(self.taken..self.filled).unwrap_or(&[]);
            let n = rest.len().min(from.len());
            rest.iter_mut().zip(from).for_each(|(to, byte)| *to = *byte);
            self.taken += n;
            got += n;
        }
        Ok(out)
    }

    /// A number.
    pub fn number(&mut self) -> Result<i64> {
        self.array().map(i64::from_le_bytes)
    }

    /// A byte string. Takes memory as bytes arrive, not as they are announced.
    pub fn bytes(&mut self) -> Result<Vec<u8>> {
        let len = u64::from_le_bytes(self.array()?);
        if len > LONGEST_REPLY {
            return Err(self.nonsense(&format!("a value of {len} bytes")));
        }
        let len = len as usize;
        let mut out = Vec::with_capacity(len.min(BUFFER));
        while out.len() < len {
            if self.taken == self.filled {
                self.fill(None)?;
            }
            let from = self.received.get(self.taken..self.filled).unwrap_or(&[]);
            let n = from.len().min(len - out.len());
            out.extend_from_slice(from.get(..n).unwrap_or(&[]));
            self.taken += n;
        }
        Ok(out)
    }

    /// The reply to WAIT or BARRIER; false if it did not come in time. Then nothing waits any more.
    pub fn released(&mut self, timeout: Duration) -> Result<bool> {
        let deadline = Deadline::after(timeout);
        while self.taken == self.filled {
            if deadline.passed() {
                return self.cancel();
            }
            self.fill(Some(deadline))?;
        }
        match self.array()? {
            [wire::STOP_WAITING] => Ok(true),
            _ => Err(self.nonsense("a wait")),
        }
    }

    /// Ends a wait. The release may be on its way already: then it counts.
    fn cancel(&mut self) -> Result<bool> {
        self.send(Query::CancelWait, &[])?;
        let raced = match self.array()? {
            [wire::WAIT_CANCELED] => return Ok(false),
            [wire::STOP_WAITING] => self.array()?,
            _ => return Err(self.nonsense("the end of a wait")),
        };
        if raced == [wire::WAIT_CANCELED] { Ok(true) } else { Err(self.nonsense("the end of a wait")) }
    }

    /// Takes more off the socket: within the deadline, at which nothing is returned; or within the connection's patience, which it is an error to exceed.
    fn fill(&mut self, deadline: Option<Deadline>) -> Result<()> {
        let limit = deadline.unwrap_or_else(|| Deadline::after(self.patience));
        loop {
            let wanted = limit.left();
            if wanted.is_some_and(|left| left.is_zero()) {
                return match deadline {
                    Some(_) => Ok(()),
                    None => Err(self.fail(format!("The server has not answered for {}ms.", self.patience.as_millis()))),
                };
            }
            // For a reply that comes at once any shorter timeout will do: it is looked at again.
            let keep = if deadline.is_some() { self.timeout == wanted } else { self.timeout.is_some_and(|set| set <= self.patience) };
            if !keep {
                self.stream.set_read_timeout(wanted).map_err(|e| Error::system("set a receive timeout", e))?;
                self.timeout = wanted;
            }
            match self.stream.read(&mut self.received) {
                Ok(0) => return Err(self.fail(CLOSED.into())),
                Ok(n) => {
                    (self.taken, self.filled) = (0, n);
                    return Ok(());
                }
                Err(e) if is_timeout(&e) || e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.fail(format!("{CLOSED} ({e})"))),
            }
        }
    }

    /// The stream is out of step.
    fn nonsense(&mut self, what: &str) -> Error {
        self.fail(format!("The server answered {what} with what no TCPStore answers. What listens there?"))
    }

    /// Nothing that comes after this can be trusted, so nothing is sent any more.
    fn fail(&mut self, reason: String) -> Error {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.broken = Some(reason.clone());
        Error::Network(reason)
    }
}

/// Torch's words, which users search for.
const CLOSED: &str = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?";

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
