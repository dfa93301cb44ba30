//! The server's thread: one epoll over the listener and all clients.
//!
//! Readiness is edge-triggered: a connection is read until the kernel has nothing more, and one that has had its share goes to the end of a queue. Who does
//! not read its replies is not read from either.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token, Waker};
use rustix::io::Errno;
use rustix::net::{self, RecvFlags};

use super::ServerOptions;
use super::complaints::Complaints;
use super::connection::Connection;
use super::core::{Core, Refusal};
use crate::base::clock;
use crate::base::error;
use crate::base::fd::{Owned, OwnedFd};
use crate::base::log::{self, log_warn};
use crate::store::deadline::Deadline;
use crate::store::tcp::wire::{Limits, STOP_WAITING};

const WAKER: Token = Token(0);
const LISTENER: Token = Token(1);
/// Token of the first client.
const CLIENTS: usize = 2;

/// Bytes of one read.
const READ: usize = 64 << 10;
/// Bytes of requests and replies that a client may have whatever the others have: the longest key of torch, twice.
const RESERVE: usize = 16 << 10;
/// Reads of one client before others have their turn.
const SHARE: usize = 4;
/// Unsent bytes from which on a client's requests are left alone.
const UNSENT: usize = 64 << 10;
/// Unsent bytes from which on a client that watches is given up.
const UNSENT_NOTICES: usize = 1 << 20;
/// What one may send who has yet to show that it knows the secret.
const STRANGER: Limits = Limits { key: 0, value: 0, keys: 0, request: 128 };
/// How long to wait before accepting again when no descriptor was left.
const BREATH: Duration = Duration::from_millis(100);
/// How long a server that stops goes on taking in what has arrived.
const LAST_CALL: Duration = Duration::from_secs(2);
/// For how long nothing must come for that to be all: what was written on this machine comes much sooner.
const SILENCE: Duration = Duration::from_millis(10);

/// Everything that the thread owns.
pub struct Daemon {
    poll: Owned<Poll>,
    listener: Owned<TcpListener>,
    stop: Arc<AtomicBool>,
    limits: Limits,
    memory: usize,
    core: Core,
    clients: Vec<Option<Connection>>,
    free: Vec<usize>,
    /// Clients that had their share and have more to do.
    queue: VecDeque<usize>,
    /// Bytes that the clients' buffers take.
    buffered: usize,
    /// The listener has clients that no descriptor was left for.
    crowded: bool,
    /// For how long a client may be a stranger, in nanoseconds.
    admission: u64,
    /// Who has come and when, in that order, from the first on who is still a stranger.
    strangers: VecDeque<(usize, u64)>,
    complaints: Complaints,
    scratch: Box<[u8]>,
}

impl Daemon {
    /// For a listening, nonblocking socket.
    pub fn new(listener: OwnedFd, options: &ServerOptions, stop: Arc<AtomicBool>) -> io::Result<(Self, Waker)> {
        let poll = Owned::<Poll>::new(Poll::new()?);
        let waker = Waker::new(poll.registry(), WAKER)?;
        let mut listener: Owned<TcpListener> = listener.convert();
        poll.registry().register(&mut *listener, LISTENER, Interest::READABLE)?;
        let daemon = Daemon {
            poll,
            listener,
            stop,
            limits: options.limits,
            memory: options.memory,
            core: Core::new(options.secret.clone()),
            clients: Vec::new(),
            free: Vec::new(),
            queue: VecDeque::new(),
            buffered: 0,
            crowded: false,
            admission: u64::try_from(options.admission.as_nanos()).unwrap_or(u64::MAX),
            strangers: VecDeque::new(),
            complaints: Complaints::default(),
            scratch: vec![0; READ].into_boxed_slice(),
        };
        Ok((daemon, waker))
    }

    /// Serves until told to stop.
    pub fn run(mut self) {
        let mut events = Events::with_capacity(1024);
        // Acquire pairs with the Release store in `Server::drop`.
        while !self.stop.load(Ordering::Acquire) {
            let timeout = match (self.queue.is_empty(), self.crowded) {
                (false, _) => Some(Duration::ZERO),
                (true, true) => Some(BREATH),
                (true, false) => None,
            };
            let timeout = timeout.into_iter().chain(self.expel()).min();
            match self.poll.poll(&mut events, timeout) {
                Err(e) if e.kind() != ErrorKind::Interrupted => {
                    log_warn!(log::INIT, "store: the server stops: epoll_wait: {e}");
                    return;
                }
                _ => {}
            }
            for event in &events {
                match event.token() {
                    WAKER => {}
                    LISTENER => self.accept(),
                    Token(token) => {
                        let index = token - CLIENTS;
                        if let Some(Some(client)) = self.clients.get_mut(index) {
                            client.ends |= event.is_read_closed() || event.is_error();
                            client.readable |= event.is_readable() || client.ends;
                            self.serve(index);
                        }
                    }
                }
            }
            if self.crowded {
                self.accept();
            }
            for _ in 0..self.queue.len() {
                let Some(index) = self.queue.pop_front() else { break };
                if let Some(Some(client)) = self.clients.get_mut(index) {
                    client.queued = false;
                    self.serve(index);
                }
            }
        }
        self.last_call();
    }

    /// Takes in what was sent before the server was told to stop, until nothing comes for a moment: a write is not answered, and its writer takes it for done.
    fn last_call(&mut self) {
        let deadline = Deadline::after(LAST_CALL);
        let mut events = Events::with_capacity(1024);
        loop {
            self.accept();
            for index in 0..self.clients.len() {
                if let Some(Some(client)) = self.clients.get_mut(index) {
                    client.readable = true;
                    self.serve(index);
                }
            }
            let more = !self.queue.is_empty() || self.clients.iter().flatten().any(|client| client.output.len() > 0);
            self.queue.clear();
            self.clients.iter_mut().flatten().for_each(|client| client.queued = false);
            let _ = self.poll.poll(&mut events, Some(SILENCE));
            if deadline.passed() || (events.is_empty() && !more) {
                return;
            }
        }
    }

    fn accept(&mut self) {
        loop {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    let mut stream = Owned::<TcpStream>::new(stream);
                    let _ = stream.set_nodelay(true);
                    let index = self.free.pop().unwrap_or_else(|| {
                        self.clients.push(None);
                        self.clients.len() - 1
                    });
                    let registered =
                        self.poll.registry().register(&mut *stream, Token(CLIENTS + index), Interest::READABLE | Interest::WRITABLE);
                    match (registered, self.clients.get_mut(index)) {
                        (Ok(()), Some(place)) => {
                            let client = place.insert(Connection::new(stream, clock::now()));
                            self.strangers.push_back((index, client.came));
                        }
                        _ => self.free.push(index),
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    self.crowded = false;
                    return;
                }
                Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)) => {
                    // Once until nobody waits any more: this is tried again and again.
                    if !std::mem::replace(&mut self.crowded, true) {
                        log_warn!(log::INIT, "store: {}", error::Error::system("a client has to wait: accept", e));
                    }
                    return;
                }
                // A client that is gone again.
                Err(_) => {}
            }
        }
    }

    /// Ends the connections of those who have not shown in time that they may use the store: each keeps a descriptor from the others. Returns the time until
    /// the next is due.
    fn expel(&mut self) -> Option<Duration> {
        while let Some(&(index, came)) = self.strangers.front() {
            let left = came.saturating_add(self.admission).saturating_sub(clock::now());
            let place = self
                .clients
                .get_mut(index)
                .filter(|place| place.as_ref().is_some_and(|client| client.came == came && !client.standing.admitted));
            if place.is_some() && left > 0 {
                return Some(Duration::from_nanos(left));
            }
            if let Some(client) = place.and_then(Option::take) {
                let wanted =
                    if client.standing.validated { "knows the secret" } else { "speaks the protocol of today's torch (2.2 and later)" };
                self.complaints.say(peer(&client), format_args!("it has not shown in time that it {wanted}"));
                self.close(index, client);
            }
            self.strangers.pop_front();
        }
        None
    }

    /// One client's turn.
    fn serve(&mut self, index: usize) {
        let Some(mut client) = self.clients.get_mut(index).and_then(Option::take) else { return };
        let (held, stored) = (self.held(), self.core.size());
        let stays = self.turn(index, &mut client);
        let size = client.size();
        self.buffered = self.buffered + size - client.counted;
        client.counted = size;
        // Who takes little goes on when others have taken all: to read, and to delete.
        let takes = self.core.size() > stored || size > RESERVE;
        if stays && takes && self.held() > self.memory && self.held() > held {
            self.complaints.say(peer(&client), format_args!("the server's limit of {} bytes is reached", self.memory));
            self.close(index, client);
        } else if stays {
            if let Some(place) = self.clients.get_mut(index) {
                *place = Some(client);
            }
        } else {
            self.close(index, client);
        }
    }

    /// Reads, carries out and answers until there is nothing to do, or the share is used up; false if the client is to go.
    fn turn(&mut self, index: usize, client: &mut Connection) -> bool {
        for _ in 0..SHARE {
            let Ok(all) = self.carry_out(index, client) else { return false };
            match client.output.flush(&client.stream) {
                // Room came back just now, for requests that were left alone.
                Ok(true) if !all => continue,
                Ok(true) if client.readable => {}
                // Goes on when there is something to read, or room again.
                Ok(_) => return true,
                Err(_) => return false,
            }
            match net::recv(&client.stream, &mut self.scratch[..], RecvFlags::empty()).map(|(n, _)| n) {
                Ok(0) => return false,
                Ok(n) => {
                    // Fewer than asked for: the kernel has no more, and tells when it has, unless it has told of the end already.
                    client.readable = n == self.scratch.len() || client.ends;
                    client.decoder.feed(self.scratch.get(..n).unwrap_or(&[]));
                }
                Err(Errno::AGAIN) => client.readable = false,
                Err(Errno::INTR) => {}
                Err(_) => return false,
            }
        }
        if !client.queued {
            client.queued = true;
            self.queue.push_back(index);
        }
        true
    }

    /// Carries out the requests that are there, while there is room for the replies; whether that was all of them. An error is the client's end.
    fn carry_out(&mut self, index: usize, client: &mut Connection) -> Result<bool, ()> {
        loop {
            if client.output.len() >= UNSENT && !client.output.flush(&client.stream).map_err(|_| ())? {
                return Ok(false);
            }
            let limits = if client.standing.admitted { &self.limits } else { &STRANGER };
            let done = match client.decoder.next(limits) {
                Ok(None) => return Ok(true),
                Ok(Some(request)) => self.core.handle(index, request, &mut client.standing, &mut client.output),
                // What a stranger may send is less, for reasons that have nothing to do with what it sent.
                Err(_) if !client.standing.validated => Err(Refusal::NotValidated),
                Err(_) if !client.standing.admitted => Err(Refusal::NoSecret),
                Err(e) => Err(e.into()),
            };
            if let Err(refusal) = done {
                self.complaints.say(peer(client), format_args!("{refusal}"));
                let _ = client.output.flush(&client.stream);
                return Err(());
            }
            self.tell(Some((index, client)));
        }
    }

    /// Tells those who waited to go on. `current` is the client being served, whose place is empty meanwhile.
    fn tell(&mut self, current: Option<(usize, &mut Connection)>) {
        if !self.core.noticed.is_empty() {
            self.notify();
        }
        if self.core.woken.is_empty() {
            return;
        }
        let mut woken = std::mem::take(&mut self.core.woken);
        let mut current = current;
        for index in woken.drain(..) {
            match &mut current {
                Some((own, client)) if *own == index => client.output.push(&[STOP_WAITING]),
                _ => {
                    if let Some(Some(client)) = self.clients.get_mut(index) {
                        client.output.push(&[STOP_WAITING]);
                        // What is not sent now goes when the socket has room; a client that is gone is noticed by its own event.
                        let _ = client.output.flush(&client.stream);
                    }
                }
            }
        }
        self.core.woken = woken;
    }

    /// Tells those who watch. One that leaves too much of it unread goes: it would take memory without bound, or keep the others from writing.
    fn notify(&mut self) {
        for (index, notice) in std::mem::take(&mut self.core.noticed) {
            let Some(Some(client)) = self.clients.get_mut(index) else { continue };
            let overrun = client.output.len() >= UNSENT_NOTICES;
            if overrun {
                self.complaints.say(peer(client), format_args!("it watches a key and does not read"));
                let _ = client.stream.shutdown(std::net::Shutdown::Both);
                continue;
            }
            client.output.push(&[notice.event as u8]);
            client.output.push_bytes(&notice.key);
            for value in [&notice.old, &notice.new] {
                match value {
                    Some(value) => client.output.push_value(value),
                    None => client.output.push_bytes(&[]),
                }
            }
            // What is not sent now goes when the socket has room; a client that is gone is noticed by its own event.
            let _ = client.output.flush(&client.stream);
            let size = client.size();
            self.buffered = self.buffered + size - client.counted;
            client.counted = size;
        }
    }

    fn close(&mut self, index: usize, client: Connection) {
        self.buffered -= client.counted;
        drop(client);
        self.free.push(index);
        self.core.leave(index);
        self.tell(None);
    }

    /// Bytes of everything.
    fn held(&self) -> usize {
        self.core.size() + self.buffered
    }
}

/// Who it is, for the log.
fn peer(client: &Connection) -> String {
    client.stream.peer_addr().map_or("a client".into(), |at| format!("{}, port {},", at.ip().to_canonical(), at.port()))
}
