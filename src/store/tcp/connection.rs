//! A client's connection to a server, torch's or ours: connecting, with retries, sending requests, and reading replies. On the calling thread of the
//! store's operation, one at a time.
//!
//! Nothing here blocks beyond the deadline of the operation, except that resolving a name cannot be interrupted.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::RecvFlags;
use socket2::{Domain, Type};

use super::secret::{self, End, NONCE, SECRET_WANTED};
use super::wire::{self, Event, MAGIC, Part, RequestType};
use crate::base::config::Secret;
use crate::base::fd::{Socket, TcpStream};
use crate::base::mac::MAC_SIZE;
use crate::base::{clock, rand};
use crate::store::deadline::Deadline;
use crate::store::{Error, FOREVER, Result};

/// A connection that has been opened and answered.
pub struct Connection {
    stream: TcpStream,
    /// The server's address and secret.
    server: (SocketAddr, Secret),
    /// The request being made.
    request: Vec<u8>,
    /// Bytes received: those before `taken` are used.
    received: Box<[u8]>,
    taken: usize,
    filled: usize,
    /// The socket's current timeouts.
    timeout: Option<Duration>,
    /// When the current operation must be over.
    deadline: Deadline,
    /// A request has been sent, and no reply received since.
    unanswered: bool,
    /// A wait was cancelled, and the reply is outstanding; whether the reply to the wait itself has come.
    canceling: Option<bool>,
    /// The server has admitted this client: if it closes the connection now, that may be because of a request.
    admitted: bool,
    /// The other side has ended the connection.
    ended: bool,
    /// It probably did so because of a request.
    refused: bool,
    /// Why the connection cannot be used any more.
    broken: Option<String>,
}

/// Why an attempt to connect failed.
enum Failure {
    /// Another attempt may succeed.
    Transient(Error),
    /// The server closed the connection when asked for a challenge.
    ClosedOnChallenge(Error),
    /// Another attempt would fail too.
    Final(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Transient(error)
    }
}

/// First pause between attempts to connect. Torch begins with half a second; a server that is just starting is ready sooner.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
/// Longest pause.
const LAST_PAUSE: Duration = Duration::from_secs(5);
/// How long one address may take to answer before the next is tried.
const ATTEMPT: Duration = Duration::from_secs(10);
/// How long a server that closed a connection may take to admit another.
const ADMIT: Duration = Duration::from_secs(1);
/// The longest time that a system call may block: the same for all longer deadlines, so that the socket's timeouts need not be set again.
const SLICE: Duration = Duration::from_secs(60);
/// Below this the kernel's timers are accurate enough. Source: Linux, kernel/time/timer.c, on the granularity of the timer wheel.
const LAST_STEP: Duration = Duration::from_millis(50);
const BUFFER: usize = 16 << 10;
/// A longer reply is a protocol error.
const LONGEST_REPLY: u64 = 4 << 30;

impl Connection {
    /// Connects, and tries again until the timeout.
    ///
    /// Errors: no server answers, in torch's words.
    pub fn open(host: &str, port: u16, secret: &Secret, timeout: Duration) -> Result<Self> {
        let deadline = Deadline::after(timeout);
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match Self::attempt(host, port, secret, deadline) {
                Ok(connection) => return Ok(connection),
                Err(Failure::Final(error)) => return Err(error),
                Err(Failure::Transient(error) | Failure::ClosedOnChallenge(error)) => error,
            };
            // Half to one and a half times the pause, so that the ranks of a job do not all try at the same moment.
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

    fn attempt(host: &str, port: u16, secret: &Secret, deadline: Deadline) -> std::result::Result<Self, Failure> {
        let addresses = (host, port).to_socket_addrs().map_err(|e| Error::system(format!("resolve {host}"), e))?;
        let mut last = Error::Network(format!("{host} has no address"));
        for address in addresses {
            let connect = |secret| Self::connect(address, secret, deadline.within(ATTEMPT));
            match connect(secret) {
                Ok(mut connection) => {
                    connection.deadline = deadline;
                    return Ok(connection);
                }
                // A server that does not know challenges, or a proxy whose server is not running yet.
                Err(Failure::ClosedOnChallenge(_)) if connect(&Secret::default()).is_ok() => {
                    return Err(Failure::Final(Error::Network(
                        "The server knows no secrets, as torch's do not, and this process has one: RAILHEAD_STORE_SECRET".into(),
                    )));
                }
                Err(Failure::Transient(error) | Failure::ClosedOnChallenge(error)) => last = error,
                Err(refused) => return Err(refused),
            }
        }
        Err(Failure::Transient(last))
    }

    /// Connects and checks that the server speaks the protocol. In one write: torch's libuv server closes the connection on half a VALIDATE.
    fn connect(address: SocketAddr, secret: &Secret, deadline: Deadline) -> std::result::Result<Self, Failure> {
        let limit = deadline.grace().left().map_or(ATTEMPT, |left| left.max(Duration::from_millis(1)));
        let stream = open_stream(address, limit).map_err(|e| Error::system(format!("connect to {address}"), e))?;
        let set_up = || stream.set_nodelay(true).and_then(|()| socket2::SockRef::from(&stream).set_keepalive(true));
        set_up().map_err(|e| Error::system("set up a connection", e))?;
        let mut connection = Connection {
            stream,
            server: (address, secret.clone()),
            request: Vec::new(),
            received: vec![0; BUFFER].into_boxed_slice(),
            taken: 0,
            filled: 0,
            timeout: None,
            deadline,
            unanswered: false,
            canceling: None,
            admitted: false,
            ended: false,
            refused: false,
            broken: None,
        };
        let nonce = std::process::id();
        wire::encode(&mut connection.request, RequestType::Validate, &[Part::Word(MAGIC)]);
        if let Some(key) = secret.key() {
            connection.prove(key)?;
        }
        connection.send(RequestType::Ping, &[Part::Word(nonce)])?;
        match connection.array().map(u32::from_le_bytes)? {
            answer if answer == nonce => {}
            SECRET_WANTED if secret.key().is_none() => {
                return Err(Failure::Final(Error::Network(
                    "The server has a secret, and this process does not: RAILHEAD_STORE_SECRET".into(),
                )));
            }
            _ => return Err(connection.protocol_error("a greeting").into()),
        }
        connection.admitted = true;
        Ok(connection)
    }

    /// Sets the deadline of the operation that begins.
    pub fn set_deadline(&mut self, deadline: Deadline) {
        self.deadline = deadline;
    }

    /// Proves to the server that this client knows the secret, and checks that the server does, too.
    fn prove(&mut self, key: &[u8]) -> std::result::Result<(), Failure> {
        let refused = |what: &str| Err(Failure::Final(Error::Network(format!("{what}: RAILHEAD_STORE_SECRET"))));
        self.send(RequestType::Challenge, &[])?;
        let answer = self.array().map_err(|error| if self.ended { Failure::ClosedOnChallenge(error) } else { error.into() });
        match answer? {
            [secret::SECRET] => {}
            [secret::NO_SECRET] => return refused("This process has a secret, and the server does not"),
            _ => return Err(self.protocol_error("a greeting").into()),
        }
        let (theirs, mut ours) = (self.array()?, [0; NONCE]);
        rand::fill(&mut ours).map_err(Error::from)?;
        let code = secret::code(key, End::Client, &theirs, &ours);
        self.send(RequestType::Prove, &[Part::Bare(&ours), Part::Bare(&code)])?;
        match self.array()? {
            [secret::SECRET] => {}
            [secret::WRONG_SECRET] => return refused("The server has another secret than this process"),
            _ => return Err(self.protocol_error("a greeting").into()),
        }
        let code: [u8; MAC_SIZE] = self.array()?;
        if secret::verify(key, End::Server, &theirs, &ours, &code) { Ok(()) } else { refused("The server does not know the secret") }
    }

    /// Asks for a key's changes.
    ///
    /// Errors: [`Error::Unsupported`] from a server that closes the connection, as torch's do.
    pub fn watch(&mut self, key: &str) -> Result<()> {
        self.send(RequestType::WatchKey, &[Part::Key(key)])?;
        match self.array() {
            Ok([wire::WATCHING]) => Ok(()),
            Ok(_) => Err(self.protocol_error("a watch")),
            Err(error) if !self.refused => Err(error),
            Err(_) => Err(Error::Unsupported("The server does not know watch_key: torch's do not.".into())),
        }
    }

    /// The next change of a watched key: what happened, the value before and the value now. `timeout` is for the rest of it, from its first byte on.
    pub fn change(&mut self, timeout: Duration) -> Result<(Event, Vec<u8>, Vec<u8>)> {
        while self.taken == self.filled {
            self.fill(Deadline::after(FOREVER))?;
        }
        self.deadline = Deadline::after(timeout);
        let [event] = self.array()?;
        let event = Event::from_byte(event).ok_or_else(|| self.protocol_error("a watch"))?;
        let _key = self.bytes()?;
        Ok((event, self.bytes()?, self.bytes()?))
    }

    /// The stream once more, to shut it down while another thread reads from it.
    pub fn clone_stream(&self) -> Result<TcpStream> {
        self.stream.try_clone().map(TcpStream::new).map_err(|e| Error::system("dup", e))
    }

    /// Sends a request.
    pub fn send(&mut self, query: RequestType, parts: &[Part<'_>]) -> Result<()> {
        if let Some(reason) = &self.broken {
            return Err(Error::Network(reason.clone()));
        }
        if self.canceled()?.is_none() {
            return Err(Error::Timeout(SILENT.into()));
        }
        self.check_open()?;
        wire::encode(&mut self.request, query, parts);
        let request = std::mem::take(&mut self.request);
        let sent = self.write(&request);
        self.request = request;
        self.request.clear();
        self.request.shrink_to(BUFFER);
        sent
    }

    /// Checks that the server has not closed the connection: if it closes it later, that may be because of the next request.
    fn check_open(&mut self) -> Result<()> {
        if !self.admitted {
            return Ok(());
        }
        match rustix::net::recv(&self.stream, &mut [0u8; 1][..], RecvFlags::PEEK | RecvFlags::DONTWAIT).map(|(n, _)| n) {
            Ok(0) => Err(self.closed(CLOSED)),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(()),
            Err(e) => Err(self.closed(&format!("{CLOSED} ({e})"))),
        }
    }

    fn write(&mut self, request: &[u8]) -> Result<()> {
        let (mut rest, by) = (request, self.deadline.grace());
        while !rest.is_empty() {
            if !self.set_timeout(by)? {
                // If none of it was sent, the connection can still be used.
                return Err(if rest.len() == request.len() { Error::Timeout(SILENT.into()) } else { self.reply_timeout() });
            }
            match self.stream.write(rest) {
                Ok(n) => (rest, self.unanswered) = (rest.get(n..).unwrap_or(&[]), true),
                Err(e) if is_timeout(&e) || e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    return Err(self
                        .closed(&format!("Failed to send: {e}. Connection was likely closed. Did the remote server shutdown or crash?")));
                }
            }
        }
        Ok(())
    }

    /// A fixed number of bytes of a reply.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut out = [0; N];
        let mut got = 0;
        while let Some(rest) = out.get_mut(got..).filter(|rest| !rest.is_empty()) {
            self.fill_if_empty()?;
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

    /// A byte string. Memory is allocated as bytes arrive, not by the length in front of them.
    pub fn bytes(&mut self) -> Result<Vec<u8>> {
        let len = u64::from_le_bytes(self.array()?);
        if len > LONGEST_REPLY {
            return Err(self.protocol_error(&format!("a value of {len} bytes")));
        }
        let len = len as usize;
        let mut out = Vec::with_capacity(len.min(BUFFER));
        while out.len() < len {
            self.fill_if_empty()?;
            let from = self.received.get(self.taken..self.filled).unwrap_or(&[]);
            let n = from.len().min(len - out.len());
            out.extend_from_slice(from.get(..n).unwrap_or(&[]));
            self.taken += n;
        }
        Ok(out)
    }

    /// Waits for the reply to WAIT or BARRIER; false if it did not come by the deadline, and the wait was cancelled.
    pub fn wait_reply(&mut self) -> Result<bool> {
        while self.taken == self.filled {
            if !self.fill(self.deadline)? {
                // However late this thread is by now, the server gets its time to reply: without the cancellation the connection would be of no use.
                self.deadline = Deadline::after(Duration::ZERO);
                if let Err(error) = self.send(RequestType::CancelWait, &[]) {
                    // The server goes on waiting, and cannot be told otherwise.
                    self.give_up(error.to_string());
                    return Err(error);
                }
                self.canceling = Some(false);
                return Ok(self.canceled()?.unwrap_or(false));
            }
        }
        match self.array()? {
            [wire::STOP_WAITING] => Ok(true),
            _ => Err(self.protocol_error("a wait")),
        }
    }

    /// Part of the message of a wait that has timed out: whether the server does not even reply to its cancellation.
    pub fn pending_note(&self) -> &'static str {
        if self.canceling.is_some() { "; the server does not answer" } else { "" }
    }

    /// Reads the reply to CANCEL_WAIT, if it is outstanding: whether the wait's own reply came before it, which then counts. `None` after the deadline.
    fn canceled(&mut self) -> Result<Option<bool>> {
        while let Some(released) = self.canceling {
            if self.taken == self.filled && !self.fill(self.deadline.grace())? {
                return Ok(None);
            }
            match (self.array()?, released) {
                ([wire::WAIT_CANCELED], _) => {
                    self.canceling = None;
                    return Ok(Some(released));
                }
                ([wire::STOP_WAITING], false) => self.canceling = Some(true),
                _ => return Err(self.protocol_error("the end of a wait")),
            }
        }
        Ok(Some(false))
    }

    /// Waits until there are unused bytes.
    fn fill_if_empty(&mut self) -> Result<()> {
        if self.taken < self.filled || self.fill(self.deadline.grace())? { Ok(()) } else { Err(self.reply_timeout()) }
    }

    /// Reads from the socket; false if nothing came in time.
    fn fill(&mut self, by: Deadline) -> Result<bool> {
        while self.set_timeout(by)? {
            match self.stream.read(&mut self.received) {
                Ok(0) => return Err(self.closed(CLOSED)),
                Ok(n) => {
                    (self.taken, self.filled, self.unanswered) = (0, n, false);
                    return Ok(true);
                }
                Err(e) if is_timeout(&e) || e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(self.closed(&format!("{CLOSED} ({e})"))),
            }
        }
        Ok(false)
    }

    /// Sets how long the next read or write may block: until the deadline, or less, after which it is tried again; false if the deadline has passed.
    fn set_timeout(&mut self, by: Deadline) -> Result<bool> {
        let left = by.left().unwrap_or(SLICE);
        if left.is_zero() {
            return Ok(false);
        }
        // The kernel's timers may be late by an eighth, so the deadline is approached in steps.
        let most = if left <= LAST_STEP { left } else { (left / 4 * 3).min(SLICE) };
        if !self.timeout.is_some_and(|set| set <= most && 2 * set >= most) {
            let set = self.stream.set_read_timeout(Some(most)).and_then(|()| self.stream.set_write_timeout(Some(most)));
            set.map_err(|e| Error::system("set a socket's timeouts", e))?;
            self.timeout = Some(most);
        }
        Ok(true)
    }

    /// The server has closed the connection. Torch's servers and ours also do that to refuse a request.
    fn closed(&mut self, what: &str) -> Error {
        self.ended = true;
        self.refused = self.admitted && self.unanswered && self.is_serving();
        let why = if self.refused { refusal(&self.stream) } else { String::new() };
        self.fail(format!("{what}{why}"))
    }

    /// Whether the server admits another connection: then it has neither crashed nor been shut down.
    fn is_serving(&self) -> bool {
        Self::connect(self.server.0, &self.server.1, self.deadline.within(ADMIT)).is_ok()
    }

    /// The operation has timed out in the middle of a request or a reply.
    fn reply_timeout(&mut self) -> Error {
        Error::Timeout(self.give_up(SILENT.into()))
    }

    /// The server has sent something else than a reply.
    fn protocol_error(&mut self, what: &str) -> Error {
        self.fail(format!("The server answered {what} with what no TCPStore answers. What listens there?"))
    }

    fn fail(&mut self, reason: String) -> Error {
        Error::Network(self.give_up(reason))
    }

    /// What the server sends from here on cannot be matched to requests, so the connection is closed.
    fn give_up(&mut self, reason: String) -> String {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.broken = Some(reason.clone());
        reason
    }
}

/// A blocking stream, registered as the library's descriptor before it connects, which may take long.
fn open_stream(address: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let socket = Socket::new(socket2::Socket::new(Domain::for_address(address), Type::STREAM, None)?);
    socket.connect_timeout(&address.into(), limit)?;
    Ok(socket.convert())
}

/// Torch's words, which users search for.
const CLOSED: &str = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?";

/// Message of an operation that has timed out.
const SILENT: &str = "The server has not answered in time.";

/// The other possible cause, and where to find it.
fn refusal(stream: &TcpStream) -> String {
    let own = stream
        .local_addr()
        .map_or(String::new(), |own| format!(", as \"{}, port {}, is disconnected\"", own.ip().to_canonical(), own.port()));
    format!(
        " Or it refused the request, for it serves others: keys up to 8 KiB, values up to 8 MiB, and add only on numbers, by default. \
         Railhead's server says in its log what it refused{own}."
    )
}

fn is_timeout(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tcp::{Server, ServerOptions};

    #[test]
    fn a_wait_that_is_noticed_late_to_be_over_is_cancelled_all_the_same() {
        let server = Server::start(ServerOptions { port: 0, bind: Some([127, 0, 0, 1].into()), ..ServerOptions::default() }).unwrap();
        let mut connection = Connection::open("127.0.0.1", server.port(), &Secret::default(), Duration::from_secs(60)).unwrap();
        connection.send(RequestType::Wait, &[Part::Count(1), Part::Key("none")]).unwrap();
        // As after a pause of this process.
        connection.set_deadline(Deadline::LONG_PAST);
        assert!(!connection.wait_reply().unwrap());
        connection.set_deadline(Deadline::after(Duration::from_secs(60)));
        connection.send(RequestType::Add, &[Part::Key("n"), Part::Int(3)]).unwrap();
        assert_eq!(connection.number().unwrap(), 3);
    }
}
