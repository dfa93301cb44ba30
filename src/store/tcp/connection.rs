//! A client's connection to a server, torch's or ours: connecting with patience, sending requests, and reading replies. On the thread of whoever calls
//! the store, under the store's lock.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use super::secret::{self, End, NONCE, SECRET_WANTED};
use super::wire::{self, Event, MAGIC, Part, Query};
use crate::base::config::Secret;
use crate::base::mac::MAC_SIZE;
use crate::base::{clock, rand};
use crate::store::deadline::Deadline;
use crate::store::{Error, FOREVER, Result};

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
    /// The server has let this end in: what it does not like from now on are requests.
    greeted: bool,
    /// The other side has ended the connection.
    ended: bool,
    /// Why the connection is of no more use.
    broken: Option<String>,
}

/// Why an attempt to connect failed.
enum Failure {
    /// It is worth another attempt.
    Passing(Error),
    /// It hung up on who asked for a challenge.
    HungUp(Error),
    /// No attempt will do better.
    Final(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Passing(error)
    }
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
    pub fn open(host: &str, port: u16, secret: &Secret, timeout: Duration) -> Result<Self> {
        let deadline = Deadline::after(timeout);
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match Self::attempt(host, port, secret, deadline, timeout) {
                Ok(connection) => return Ok(connection),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Passing(error) | Failure::HungUp(error)) => error,
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

    fn attempt(host: &str, port: u16, secret: &Secret, deadline: Deadline, patience: Duration) -> std::result::Result<Self, Failure> {
        let addresses = (host, port).to_socket_addrs().map_err(|e| Error::system(format!("resolve {host}"), e))?;
        let mut last = Error::Network(format!("{host} has no address"));
        for address in addresses {
            let greeted = |secret| {
                let limit = deadline.left().map_or(ATTEMPT, |left| left.clamp(Duration::from_millis(1), ATTEMPT));
                TcpStream::connect_timeout(&address, limit)
                    .map_err(|e| Failure::Passing(Error::system(format!("connect to {address}"), e)))
                    .and_then(|stream| Self::greet(stream, secret, limit, patience))
            };
            match greeted(secret) {
                Ok(connection) => return Ok(connection),
                // A server that does not know what was asked, or a proxy whose server is not there yet.
                Err(Failure::HungUp(_)) if greeted(&Secret::default()).is_ok() => {
                    return Err(Failure::Final(Error::Network(
                        "The server knows no secrets, as torch's do not, and this process has one: RAILHEAD_STORE_SECRET".into(),
                    )));
                }
                Err(Failure::Passing(error) | Failure::HungUp(error)) => last = error,
                Err(refused) => return Err(refused),
            }
        }
        Err(Failure::Passing(last))
    }

    /// Says what it speaks and sees that the other side does, too. In one write: torch's libuv server hangs up on half a VALIDATE.
    fn greet(stream: TcpStream, secret: &Secret, limit: Duration, patience: Duration) -> std::result::Result<Self, Failure> {
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
            greeted: false,
            ended: false,
            broken: None,
        };
        let nonce = std::process::id();
        wire::encode(&mut connection.request, Query::Validate, &[Part::Word(MAGIC)]);
        if let Some(key) = secret.key() {
            connection.prove(key)?;
        }
        connection.send(Query::Ping, &[Part::Word(nonce)])?;
        match connection.array().map(u32::from_le_bytes)? {
            answer if answer == nonce => {}
            SECRET_WANTED if secret.key().is_none() => {
                return Err(Failure::Final(Error::Network(
                    "The server has a secret, and this process does not: RAILHEAD_STORE_SECRET".into(),
                )));
            }
            _ => return Err(connection.nonsense("a greeting").into()),
        }
        connection.patience = patience.max(Duration::from_secs(1));
        connection.greeted = true;
        Ok(connection)
    }

    /// Shows the server that this end knows the secret, and sees that the server does, too.
    fn prove(&mut self, key: &[u8]) -> std::result::Result<(), Failure> {
        let refused = |what: &str| Err(Failure::Final(Error::Network(format!("{what}: RAILHEAD_STORE_SECRET"))));
        self.send(Query::Challenge, &[])?;
        let answer = self.array().map_err(|error| if self.ended { Failure::HungUp(error) } else { error.into() });
        match answer? {
            [secret::SECRET] => {}
            [secret::NO_SECRET] => return refused("This process has a secret, and the server does not"),
            _ => return Err(self.nonsense("a greeting").into()),
        }
        let (theirs, mut ours) = (self.array()?, [0; NONCE]);
        rand::fill(&mut ours).map_err(Error::from)?;
        let code = secret::code(key, End::Client, &theirs, &ours);
        self.send(Query::Prove, &[Part::Bare(&ours), Part::Bare(&code)])?;
        match self.array()? {
            [secret::SECRET] => {}
            [secret::WRONG_SECRET] => return refused("The server has another secret than this process"),
            _ => return Err(self.nonsense("a greeting").into()),
        }
        let code: [u8; MAC_SIZE] = self.array()?;
        if secret::verify(key, End::Server, &theirs, &ours, &code) { Ok(()) } else { refused("The server does not know the secret") }
    }

    /// Asks to be told of a key's changes.
    ///
    /// Errors: [`Error::Unsupported`] from a server that hangs up, as torch's do.
    pub fn watch(&mut self, key: &str) -> Result<()> {
        self.send(Query::WatchKey, &[Part::Key(key)])?;
        match self.array() {
            Ok([wire::WATCHING]) => Ok(()),
            Ok(_) => Err(self.nonsense("a watch")),
            Err(_) => Err(Error::Unsupported("The server does not know watch_key: torch's do not.".into())),
        }
    }

    /// The next change of a watched key: what happened, the value before and the value now.
    pub fn change(&mut self) -> Result<(Event, Vec<u8>, Vec<u8>)> {
        while self.taken == self.filled {
            self.fill(Some(Deadline::after(FOREVER)))?;
        }
        let [event] = self.array()?;
        let event = Event::from_byte(event).ok_or_else(|| self.nonsense("a watch"))?;
        let _key = self.bytes()?;
        Ok((event, self.bytes()?, self.bytes()?))
    }

    /// What ends the connection while another thread reads from it.
    pub fn stopper(&self) -> Result<TcpStream> {
        self.stream.try_clone().map_err(|e| Error::system("dup", e))
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
        sent.map_err(|e| {
            self.closed(&format!("Failed to send: {e}. Connection was likely closed. Did the remote server shutdown or crash?"))
        })
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
                Ok(0) => return Err(self.closed(CLOSED)),
                Ok(n) => {
                    (self.taken, self.filled) = (0, n);
                    return Ok(());
                }
                Err(e) if is_timeout(&e) || e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.closed(&format!("{CLOSED} ({e})"))),
            }
        }
    }

    /// The other side has ended the connection; torch's servers and ours do that, too, to who asks for what they do not do.
    fn closed(&mut self, what: &str) -> Error {
        self.ended = true;
        let perhaps = if self.greeted { REFUSED } else { "" };
        self.fail(format!("{what}{perhaps}"))
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

/// What else it may be.
const REFUSED: &str = " Or it refused the request: keys up to 8 KiB, values up to 8 MiB, and add only on numbers, by default.";

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}
