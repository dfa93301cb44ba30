//! A client's connection to a server, torch's or ours: connecting with patience, sending requests, and reading replies. On the thread of whoever calls
//! the store, in its turn.
//!
//! Nothing here blocks beyond the deadline of the operation under way, except that the system resolves a name in its own time.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::RecvFlags;
use socket2::{Domain, Type};

use super::secret::{self, End, NONCE, SECRET_WANTED};
use super::wire::{self, Event, MAGIC, Part, Query};
use crate::base::config::Secret;
use crate::base::fd::{Socket, TcpStream};
use crate::base::mac::MAC_SIZE;
use crate::base::{clock, rand};
use crate::store::deadline::Deadline;
use crate::store::{Error, FOREVER, Result};

/// A connection that has been opened and answered.
pub struct Connection {
    stream: TcpStream,
    /// Where the server is, and what it wants to hear.
    server: (SocketAddr, Secret),
    /// The request being made.
    request: Vec<u8>,
    /// Bytes received: those before `taken` are used.
    received: Box<[u8]>,
    taken: usize,
    filled: usize,
    /// What the socket's timeouts are now.
    timeout: Option<Duration>,
    /// When the operation under way has to be over.
    deadline: Deadline,
    /// A request has been sent that no reply has come after.
    unanswered: bool,
    /// A wait was cancelled, and the reply has yet to come; whether its release has.
    canceling: Option<bool>,
    /// The server has let this end in: what it does not like from now on are requests.
    greeted: bool,
    /// The other side has ended the connection.
    ended: bool,
    /// It did so because of a request.
    refused: bool,
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
/// How long a server that ended a connection may take to let in another.
const PROBE: Duration = Duration::from_secs(1);
/// How long a system call may block: with all longer deadlines the same, so that the socket's timeouts stay as they are.
const SLICE: Duration = Duration::from_secs(60);
/// A time for which the kernel's lateness does not matter. Source: Linux, kernel/time/timer.c, on the granularity of the timer wheel.
const LAST_STEP: Duration = Duration::from_millis(50);
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
            let error = match Self::attempt(host, port, secret, deadline) {
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

    fn attempt(host: &str, port: u16, secret: &Secret, deadline: Deadline) -> std::result::Result<Self, Failure> {
        let addresses = (host, port).to_socket_addrs().map_err(|e| Error::system(format!("resolve {host}"), e))?;
        let mut last = Error::Network(format!("{host} has no address"));
        for address in addresses {
            let greeted = |secret| Self::reach(address, secret, deadline.within(ATTEMPT));
            match greeted(secret) {
                Ok(mut connection) => {
                    connection.deadline = deadline;
                    return Ok(connection);
                }
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
    fn reach(address: SocketAddr, secret: &Secret, deadline: Deadline) -> std::result::Result<Self, Failure> {
        let limit = deadline.grace().left().map_or(ATTEMPT, |left| left.max(Duration::from_millis(1)));
        let stream = connect(address, limit).map_err(|e| Error::system(format!("connect to {address}"), e))?;
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
            greeted: false,
            ended: false,
            refused: false,
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
        connection.greeted = true;
        Ok(connection)
    }

    /// The operation that begins has to be over by then.
    pub fn limit(&mut self, deadline: Deadline) {
        self.deadline = deadline;
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
            Err(error) if !self.refused => Err(error),
            Err(_) => Err(Error::Unsupported("The server does not know watch_key: torch's do not.".into())),
        }
    }

    /// The next change of a watched key, which may take `patience` to arrive once it has begun to: what happened, the value before and the value now.
    pub fn change(&mut self, patience: Duration) -> Result<(Event, Vec<u8>, Vec<u8>)> {
        while self.taken == self.filled {
            self.fill(Deadline::after(FOREVER))?;
        }
        self.deadline = Deadline::after(patience);
        let [event] = self.array()?;
        let event = Event::from_byte(event).ok_or_else(|| self.nonsense("a watch"))?;
        let _key = self.bytes()?;
        Ok((event, self.bytes()?, self.bytes()?))
    }

    /// What ends the connection while another thread reads from it.
    pub fn stopper(&self) -> Result<TcpStream> {
        self.stream.try_clone().map(TcpStream::new).map_err(|e| Error::system("dup", e))
    }

    /// Sends a request.
    pub fn send(&mut self, query: Query, parts: &[Part<'_>]) -> Result<()> {
        if let Some(reason) = &self.broken {
            return Err(Error::Network(reason.clone()));
        }
        if self.canceled()?.is_none() {
            return Err(Error::Timeout(SILENT.into()));
        }
        self.look()?;
        wire::encode(&mut self.request, query, parts);
        let request = std::mem::take(&mut self.request);
        let sent = self.write(&request);
        self.request = request;
        self.request.clear();
        self.request.shrink_to(BUFFER);
        sent
    }

    /// Sees that the connection is as good as it was: what comes now is not because of the next request.
    fn look(&mut self) -> Result<()> {
        if !self.greeted {
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
            if !self.arm(by)? {
                // A server that has not seen any of it can still be spoken to.
                return Err(if rest.len() == request.len() { Error::Timeout(SILENT.into()) } else { self.late() });
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
            self.arrive()?;
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
            self.arrive()?;
            let from = self.received.get(self.taken..self.filled).unwrap_or(&[]);
            let n = from.len().min(len - out.len());
            out.extend_from_slice(from.get(..n).unwrap_or(&[]));
            self.taken += n;
        }
        Ok(out)
    }

    /// The reply to WAIT or BARRIER; false if it did not come by the deadline. Then nothing waits any more.
    pub fn released(&mut self) -> Result<bool> {
        while self.taken == self.filled {
            if !self.fill(self.deadline)? {
                if let Err(error) = self.send(Query::CancelWait, &[]) {
                    // It waits there, and cannot be told.
                    self.give_up(error.to_string());
                    return Err(error);
                }
                self.canceling = Some(false);
                return Ok(self.canceled()?.unwrap_or(false));
            }
        }
        match self.array()? {
            [wire::STOP_WAITING] => Ok(true),
            _ => Err(self.nonsense("a wait")),
        }
    }

    /// What there is to say of a wait that was not released, besides that.
    pub fn silence(&self) -> &'static str {
        if self.canceling.is_some() { "; the server does not answer" } else { "" }
    }

    /// Takes in the reply to CANCEL_WAIT, if it has yet to come: whether the release was on its way already, which then counts. `None` if the time is up first.
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
                _ => return Err(self.nonsense("the end of a wait")),
            }
        }
        Ok(Some(false))
    }

    /// Waits until there is something to take.
    fn arrive(&mut self) -> Result<()> {
        if self.taken < self.filled || self.fill(self.deadline.grace())? { Ok(()) } else { Err(self.late()) }
    }

    /// Takes more off the socket; false if nothing came in time.
    fn fill(&mut self, by: Deadline) -> Result<bool> {
        while self.arm(by)? {
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

    /// Lets a read or a write block until then, or for a shorter time, after which it is tried again; false if the moment has passed.
    fn arm(&mut self, by: Deadline) -> Result<bool> {
        let left = by.left().unwrap_or(SLICE);
        if left.is_zero() {
            return Ok(false);
        }
        // The kernel may be late by an eighth, so that the end is approached in steps.
        let most = if left <= LAST_STEP { left } else { (left / 4 * 3).min(SLICE) };
        if !self.timeout.is_some_and(|set| set <= most && 2 * set >= most) {
            let set = self.stream.set_read_timeout(Some(most)).and_then(|()| self.stream.set_write_timeout(Some(most)));
            set.map_err(|e| Error::system("set a socket's timeouts", e))?;
            self.timeout = Some(most);
        }
        Ok(true)
    }

    /// The other side has ended the connection; torch's servers and ours do that, too, to who asks for what they do not do.
    fn closed(&mut self, what: &str) -> Error {
        self.ended = true;
        self.refused = self.greeted && self.unanswered && self.serves();
        let why = if self.refused { refusal(&self.stream) } else { String::new() };
        self.fail(format!("{what}{why}"))
    }

    /// Whether the server lets others in: then it has neither crashed nor been shut down.
    fn serves(&self) -> bool {
        Self::reach(self.server.0, &self.server.1, self.deadline.within(PROBE)).is_ok()
    }

    /// The operation is out of time in the middle of a request or a reply.
    fn late(&mut self) -> Error {
        Error::Timeout(self.give_up(SILENT.into()))
    }

    /// The stream is out of step.
    fn nonsense(&mut self, what: &str) -> Error {
        self.fail(format!("The server answered {what} with what no TCPStore answers. What listens there?"))
    }

    fn fail(&mut self, reason: String) -> Error {
        Error::Network(self.give_up(reason))
    }

    /// Nothing that comes after this can be trusted, so nothing is sent any more.
    fn give_up(&mut self, reason: String) -> String {
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        self.broken = Some(reason.clone());
        reason
    }
}

/// Blocking; known as ours from the first, since connecting may take long.
fn connect(address: SocketAddr, limit: Duration) -> io::Result<TcpStream> {
    let socket = Socket::new(socket2::Socket::new(Domain::for_address(address), Type::STREAM, None)?);
    socket.connect_timeout(&address.into(), limit)?;
    Ok(socket.convert())
}

/// Torch's words, which users search for.
const CLOSED: &str = "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?";

/// The operation's time is up.
const SILENT: &str = "The server has not answered in time.";

/// What else it may be, and where to look.
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
