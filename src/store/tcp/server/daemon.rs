//! The server's thread: one epoll over the listener and all clients.
//!
//! Readiness is edge-triggered: a connection is read until the kernel has nothing more; after its share of reads it goes to the end of a queue. Requests of
//! a client that does not read its replies are not read.

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
use super::connection::Connection;
use super::disconnect_log::DisconnectLog;
use super::handler::{DisconnectReason, Handler};
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
/// Reads of one client before others are served.
const SHARE: usize = 4;
/// Unsent bytes from which on a client's requests are not handled.
const UNSENT: usize = 64 << 10;
/// Unsent bytes from which on a client that watches is disconnected.
const UNSENT_NOTICES: usize = 1 << 20;
/// Limits of a client that is not admitted yet.
const UNADMITTED: Limits = Limits { key: 0, value: 0, keys: 0, request: 128 };
/// Time before the next accept after one failed for lack of a descriptor or memory.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);
/// The longest time for which a server that stops handles what has arrived.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// It ends earlier after this time without an event: what was written on this machine arrives much sooner.
const DRAIN_IDLE: Duration = Duration::from_millis(10);

/// Everything that the thread owns.
pub struct Daemon {
    poll: Owned<Poll>,
    listener: Owned<TcpListener>,
    stop: Arc<AtomicBool>,
    limits: Limits,
    memory: usize,
    handler: Handler,
    clients: Vec<Option<Connection>>,
    free: Vec<usize>,
    /// Clients that had their share and have more to do.
    queue: VecDeque<usize>,
    /// Bytes of the clients' buffers.
    buffered: usize,
    /// Connections wait in the listener because an accept failed.
    accept_failed: bool,
    /// The time in which a client must be admitted, in nanoseconds.
    admission_timeout: u64,
    /// Clients and when they connected, in that order, from the first one on that is not admitted.
    unadmitted: VecDeque<(usize, u64)>,
    disconnects: DisconnectLog,
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
            handler: Handler::new(options.secret.clone()),
            clients: Vec::new(),
            free: Vec::new(),
            queue: VecDeque::new(),
            buffered: 0,
            accept_failed: false,
            admission_timeout: u64::try_from(options.admission.as_nanos()).unwrap_or(u64::MAX),
            unadmitted: VecDeque::new(),
            disconnects: DisconnectLog::default(),
            scratch: vec![0; READ].into_boxed_slice(),
        };
        Ok((daemon, waker))
    }

    /// Serves until told to stop.
    pub fn run(mut self) {
        let mut events = Events::with_capacity(1024);
        // Acquire pairs with the Release store in `Server::drop`.
        while !self.stop.load(Ordering::Acquire) {
            let timeout = match (self.queue.is_empty(), self.accept_failed) {
                (false, _) => Some(Duration::ZERO),
                (true, true) => Some(ACCEPT_RETRY),
                (true, false) => None,
            };
            let timeout = timeout.into_iter().chain(self.disconnect_unadmitted()).min();
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
            if self.accept_failed {
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
        self.drain();
    }

    /// Handles what was sent before the server was told to stop, until nothing comes for a moment: writes have no reply, so their senders rely on it.
    fn drain(&mut self) {
        let deadline = Deadline::after(DRAIN_TIMEOUT);
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
            let _ = self.poll.poll(&mut events, Some(DRAIN_IDLE));
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
                            self.unadmitted.push_back((index, client.connected_at));
                        }
                        _ => self.free.push(index),
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    self.accept_failed = false;
                    return;
                }
                Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)) => {
                    // Logged once, until no connection waits any more: the accept is tried again and again.
                    if !std::mem::replace(&mut self.accept_failed, true) {
                        log_warn!(log::INIT, "store: {}", error::Error::system("a client has to wait: accept", e));
                    }
                    return;
                }
                // The client has closed already.
                Err(_) => {}
            }
        }
    }

    /// Disconnects clients that were not admitted in time: each takes a descriptor from the others. Returns the time until the next is due.
    fn disconnect_unadmitted(&mut self) -> Option<Duration> {
        while let Some(&(index, connected_at)) = self.unadmitted.front() {
            let left = connected_at.saturating_add(self.admission_timeout).saturating_sub(clock::now());
            let place = self
                .clients
                .get_mut(index)
                .filter(|place| place.as_ref().is_some_and(|client| client.connected_at == connected_at && !client.admission.admitted));
            if place.is_some() && left > 0 {
                return Some(Duration::from_nanos(left));
            }
            if let Some(client) = place.and_then(Option::take) {
                let wanted =
                    if client.admission.validated { "knows the secret" } else { "speaks the protocol of today's torch (2.2 and later)" };
                self.disconnects.warn(peer(&client), format_args!("it has not shown in time that it {wanted}"));
                self.close(index, client);
            }
            self.unadmitted.pop_front();
        }
        None
    }

    /// Serves a client, and disconnects it if it ends, errs or exceeds the memory limit.
    fn serve(&mut self, index: usize) {
        let Some(mut client) = self.clients.get_mut(index).and_then(Option::take) else { return };
        let (held, stored) = (self.held(), self.handler.size());
        let stays = self.exchange(index, &mut client);
        let size = client.size();
        self.buffered = self.buffered + size - client.counted;
        client.counted = size;
        // A client that uses little memory may go on when the others have used all: to read, and to delete.
        let takes = self.handler.size() > stored || size > RESERVE;
        if stays && takes && self.held() > self.memory && self.held() > held {
            self.disconnects.warn(peer(&client), format_args!("the server's limit of {} bytes is reached", self.memory));
            self.close(index, client);
        } else if stays {
            if let Some(place) = self.clients.get_mut(index) {
                *place = Some(client);
            }
        } else {
            self.close(index, client);
        }
    }

    /// Reads requests, handles them and replies until there is nothing to do, or the share is used up; false if the client is to be disconnected.
    fn exchange(&mut self, index: usize, client: &mut Connection) -> bool {
        for _ in 0..SHARE {
            let Ok(all) = self.handle_requests(index, client) else { return false };
            match client.output.flush(&client.stream) {
                // There is room now for the replies to requests that were not handled.
                Ok(true) if !all => continue,
                Ok(true) if client.readable => {}
                // An event continues this when there is something to read, or room again.
                Ok(_) => return true,
                Err(_) => return false,
            }
            match net::recv(&client.stream, &mut self.scratch[..], RecvFlags::empty()).map(|(n, _)| n) {
                Ok(0) => return false,
                Ok(n) => {
                    // Fewer than asked for: the kernel has no more, and an event will report more, unless it has reported the end already.
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

    /// Handles the received requests while there is room for the replies; whether that was all of them. On an error the client is to be disconnected.
    fn handle_requests(&mut self, index: usize, client: &mut Connection) -> Result<bool, ()> {
        loop {
            if client.output.len() >= UNSENT && !client.output.flush(&client.stream).map_err(|_| ())? {
                return Ok(false);
            }
            let limits = if client.admission.admitted { &self.limits } else { &UNADMITTED };
            let done = match client.decoder.next(limits) {
                Ok(None) => return Ok(true),
                Ok(Some(request)) => self.handler.handle(index, request, &mut client.admission, &mut client.output),
                // The limits of an unadmitted client are not the reason to report, but that it is not admitted.
                Err(_) if !client.admission.validated => Err(DisconnectReason::NotValidated),
                Err(_) if !client.admission.admitted => Err(DisconnectReason::NoSecret),
                Err(e) => Err(e.into()),
            };
            if let Err(refusal) = done {
                self.disconnects.warn(peer(client), format_args!("{refusal}"));
                let _ = client.output.flush(&client.stream);
                return Err(());
            }
            self.wake(Some((index, client)));
        }
    }

    /// Replies to the clients that were woken. `current` is the client being served, which `clients` does not hold meanwhile.
    fn wake(&mut self, current: Option<(usize, &mut Connection)>) {
        if !self.handler.notices.is_empty() {
            self.notify();
        }
        if self.handler.woken.is_empty() {
            return;
        }
        let mut woken = std::mem::take(&mut self.handler.woken);
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
        self.handler.woken = woken;
    }

    /// Sends the notices to the clients that watch. One that leaves too many unread is disconnected: its memory would grow without bound, or the others
    /// could not write any more.
    fn notify(&mut self) {
        for (index, notice) in std::mem::take(&mut self.handler.notices) {
            let Some(Some(client)) = self.clients.get_mut(index) else { continue };
            if client.output.len() >= UNSENT_NOTICES {
                self.disconnects.warn(peer(client), format_args!("it watches a key and does not read"));
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
        self.handler.remove_client(index);
        self.wake(None);
    }

    /// Bytes of everything.
    fn held(&self) -> usize {
        self.handler.size() + self.buffered
    }
}

/// Its address, for the log.
fn peer(client: &Connection) -> String {
    client.stream.peer_addr().map_or("a client".into(), |at| format!("{}, port {},", at.ip().to_canonical(), at.port()))
}
