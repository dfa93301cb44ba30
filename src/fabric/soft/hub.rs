//! Where the incoming streams of a device arrive: its listeners, the half-open streams, and the pending streams of each queue pair.
//!
//! A hub listens while its device has queue pairs. It has no thread: queue pairs that are connecting serve it, on the threads that drive
//! them, and put streams that are for another queue pair into that one's pending streams. Where many connect, each leaves it to the one that was there
//! before it: see [`Turn`].

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, TryLockError};

use super::endpoint::{HELLO_SIZE, Hello, Offer, Token};
use super::shm::recv_with_fd;
use super::sockets::{peer_pid, set_buffers, unix_name};
use super::tcp::socket::TcpSocket;
use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::fd::{Owned, OwnedFd, TcpListener};
use crate::base::sync::lock;
use crate::base::{clock, listen};

/// Closed TCP streams that wait for the peer's end, so that a reset cannot overtake our last acknowledgements.
const LINGER_MAX: usize = 256;
/// How long they wait at most. A peer that has not read our acks by then will not.
const LINGER_NS: u64 = 30_000_000_000;

/// Streams accepted per listener and call.
const ACCEPT_AT_ONCE: usize = 256;
/// Streams pending for one queue pair at most. It has one peer: a control stream and data streams, each dialed again a few times at most.
const PENDING_MAX: usize = 64;

/// An authenticated stream: its Hello was made with the token of the queue pair that it is for.
pub struct IncomingStream {
    /// Non-blocking.
    pub socket: OwnedFd,
    /// Whether it can pass descriptors.
    pub unix: bool,
    /// The peer's process by SO_PEERCRED (unix only; 0 if it is in no pid namespace of ours).
    pub pid: Option<i32>,
    /// The Hello.
    pub hello: Hello,
    /// The Hello as received: the reply's MAC covers it.
    pub raw: [u8; HELLO_SIZE],
    /// The descriptor that came with the Hello.
    pub memory: Option<OwnedFd>,
}

/// The streams that arrived for a queue pair and that it has not taken yet.
pub struct PendingStreams {
    token: Token,
    /// Whether there is one to take. Not set for a stream that only checks.
    ready: AtomicBool,
    /// `None` once the queue pair is connected or in ERROR: whatever arrives later is closed.
    streams: Mutex<Option<VecDeque<IncomingStream>>>,
}

impl PendingStreams {
    fn new(token: Token) -> Arc<PendingStreams> {
        Arc::new(PendingStreams { token, ready: AtomicBool::new(false), streams: Mutex::new(Some(VecDeque::new())) })
    }

    /// The oldest.
    pub fn take(&self) -> Option<IncomingStream> {
        // Pairs with the Release in `Hub::deliver`; the lock orders the rest.
        if !self.ready.load(Ordering::Acquire) {
            return None;
        }
        let mut streams = lock(&self.streams);
        let stream = streams.as_mut().and_then(VecDeque::pop_front);
        self.ready.store(streams.as_ref().is_some_and(|streams| !streams.is_empty()), Ordering::Release);
        stream
    }

    /// Closes those that are pending and every later one.
    pub fn close(&self) {
        *lock(&self.streams) = None;
        self.ready.store(false, Ordering::Release);
    }
}

/// An accepted stream whose Hello has not come whole.
struct HalfOpen {
    socket: OwnedFd,
    unix: bool,
    bytes: [u8; HELLO_SIZE],
    have: usize,
    memory: Option<OwnedFd>,
    /// When its first byte came; 0 before.
    first_byte_at: u64,
}

#[derive(Default)]
struct State {
    listeners: Option<Listeners>,
    /// Half-open streams of which no byte has come, oldest first.
    silent: VecDeque<HalfOpen>,
    /// Half-open streams of which part of a Hello has come, oldest first.
    partial: VecDeque<HalfOpen>,
    /// By the number of the queue pair.
    pending: HashMap<u32, Arc<PendingStreams>>,
    /// Closed TCP streams, and until when each is kept.
    linger: VecDeque<(TcpSocket, u64)>,
    next_qpn: u32,
}

struct Listeners {
    tcp: TcpListener,
    unix: Option<Owned<UnixListener>>,
    port: u16,
}

/// The hub of a device.
pub struct Hub {
    config: Arc<Config>,
    /// Where it listens. The port is chosen when it begins to.
    addr: SocketAddr,
    instance: [u8; 16],
    /// An eventfd that wakes the device's sleepers: readable when a pending stream may be for one of them.
    event: OwnedFd,
    /// Whether it may be readable.
    notified: AtomicBool,
    /// Counts how often the hub was served.
    served: AtomicU64,
    state: Mutex<State>,
}

/// How often the hub was served when a queue pair last had its turn to. If another one has served it since, this one need not: of many that are polled one
/// after the other, one does it for all.
pub struct Turn(u64);

/// What [`Hub::add_qp`] gives a new queue pair.
pub struct AddedQp {
    /// Its number.
    pub qpn: u32,
    /// Where its streams arrive.
    pub pending: Arc<PendingStreams>,
    /// Where the hub listens.
    pub addr: SocketAddr,
}

impl Listeners {
    /// Accepts the next stream. `None`: there is no such listener.
    fn accept(&self, unix: bool) -> Option<io::Result<OwnedFd>> {
        match (unix, &self.unix) {
            (false, _) => Some(self.tcp.accept().map(|(stream, _)| OwnedFd::new(stream)).map_err(|e| listen::refusal(&self.tcp, e))),
            (true, Some(unix)) => Some(unix.accept().map(|(stream, _)| OwnedFd::new(stream)).map_err(|e| listen::refusal(unix, e))),
            (true, None) => None,
        }
    }
}

impl Hub {
    /// A closed hub.
    pub fn new(config: Arc<Config>, addr: SocketAddr, instance: [u8; 16]) -> Result<Self> {
        // SAFETY: plain system call; the result is checked before it is owned.
        let event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if event < 0 {
            return Err(Error::last_os("eventfd"));
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let event = unsafe { OwnedFd::from_raw_fd(event) };
        let (notified, served) = (AtomicBool::new(false), AtomicU64::new(0));
        Ok(Hub { config, addr, instance, event, notified, served, state: Mutex::new(State { next_qpn: 1, ..State::default() }) })
    }

    /// What the listener's abstract unix socket is named after.
    pub fn instance(&self) -> &[u8; 16] {
        &self.instance
    }

    /// Adds a queue pair; the first one opens the listeners.
    pub fn add_qp(&self, token: Token) -> Result<AddedQp> {
        let mut state = lock(&self.state);
        if state.listeners.is_none() {
            state.listeners = Some(self.listen()?);
        }
        let qpn = (0..u32::MAX)
            .map(|i| state.next_qpn.wrapping_add(i) & 0x00ff_ffff)
            .find(|qpn| *qpn != 0 && !state.pending.contains_key(qpn))
            .ok_or_else(|| Error::usage("2^24 queue pairs exist on the device, the most there can be"))?;
        state.next_qpn = qpn + 1;
        let pending = PendingStreams::new(token);
        state.pending.insert(qpn, pending.clone());
        let mut addr = self.addr;
        addr.set_port(state.listeners.as_ref().map_or(0, |listeners| listeners.port));
        Ok(AddedQp { qpn, pending, addr })
    }

    /// A queue pair's secret is another one from now on.
    pub fn renew_qp(&self, qpn: u32, token: Token) -> Arc<PendingStreams> {
        let pending = PendingStreams::new(token);
        lock(&self.state).pending.insert(qpn, pending.clone());
        pending
    }

    /// Removes a queue pair; the last one closes the listeners.
    pub fn remove_qp(&self, qpn: u32) {
        let mut state = lock(&self.state);
        state.pending.remove(&qpn);
        reap(&mut state);
        if state.pending.is_empty() {
            state.listeners = None;
            state.silent.clear();
            state.partial.clear();
        }
    }

    /// Keeps streams until the peer has closed its ends.
    pub fn linger(&self, streams: Vec<TcpSocket>) {
        let mut state = lock(&self.state);
        let until = clock::now() + LINGER_NS;
        state.linger.extend(streams.into_iter().map(|stream| (stream, until)));
        while state.linger.len() > LINGER_MAX {
            state.linger.pop_front().into_iter().for_each(|(stream, _)| stream.leave());
        }
    }

    fn listen(&self) -> Result<Listeners> {
        let tcp = listen::tcp(self.addr, &self.config.port_range)?;
        set_buffers(&tcp, self.config.tcp_buffer_kib);
        let port = tcp.local_addr().map_err(|e| Error::system("getsockname", e))?.port();
        // If it cannot be had, peers on this host find a segment by name, as they do across network namespaces.
        let unix = std::os::unix::net::SocketAddr::from_abstract_name(unix_name(&self.instance))
            .and_then(|name| UnixListener::bind_addr(&name))
            .and_then(|unix| unix.set_nonblocking(true).map(|()| Owned::new(unix)))
            .ok();
        Ok(Listeners { tcp, unix, port })
    }

    /// For a queue pair that was added: the listeners that it needs are open, and whoever serves the hub from now on has them watched.
    pub fn turn(&self) -> Turn {
        Turn(self.served.load(Ordering::Relaxed))
    }

    /// Whether it is the turn of this queue pair to serve the hub. If it then has done so, and had what came watched, it says so by [`Hub::had_turn`].
    pub fn is_turn_of(&self, turn: &mut Turn) -> bool {
        let served = self.served.load(Ordering::Relaxed);
        std::mem::replace(&mut turn.0, served) == served
    }

    /// That was this queue pair's turn. Not if it could not be served: each queue pair has to find that out for itself.
    pub fn had_turn(&self, turn: &mut Turn) {
        turn.0 = self.served.fetch_add(1, Ordering::Relaxed) + 1;
    }

    /// Accepts streams and reads Hellos, without waiting. Returns at once while another thread does.
    ///
    /// Errors: a stream waits to be accepted, and there is no descriptor left for it.
    pub fn serve(&self) -> io::Result<()> {
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(()),
        };
        let state = &mut *state;
        // First, as it frees descriptors.
        if !state.linger.is_empty() {
            reap(state);
        }
        // Before new streams push out silent ones: a stream whose Hello has come meanwhile is not silent any more.
        let timeout = u64::from(self.config.handshake_timeout_s) * 1_000_000_000;
        for half in std::mem::take(&mut state.partial).into_iter().chain(std::mem::take(&mut state.silent)) {
            if half.first_byte_at == 0 || clock::now() - half.first_byte_at < timeout {
                self.read_hello(state, half);
            }
        }
        for unix in [false, true] {
            for _ in 0..ACCEPT_AT_ONCE {
                match state.listeners.as_ref().and_then(|listeners| listeners.accept(unix)) {
                    Some(Ok(stream)) => self.admit(state, stream, unix),
                    // An unauthenticated stream gives up its descriptor for the new one.
                    Some(Err(e))
                        if e.raw_os_error() == Some(libc::EMFILE)
                            && state.silent.pop_front().or_else(|| state.partial.pop_front()).is_some() => {}
                    Some(Err(e)) if e.raw_os_error() == Some(libc::EMFILE) => return Err(e),
                    Some(Err(_)) | None => break,
                }
            }
        }
        Ok(())
    }

    /// Takes a new stream on. As a rule its Hello has come already, so ranks that dial all at once do not push each other out.
    fn admit(&self, state: &mut State, socket: OwnedFd, unix: bool) {
        // SAFETY: plain system call on a descriptor that we own.
        if unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } < 0 {
            return;
        }
        self.read_hello(state, HalfOpen { socket, unix, bytes: [0; HELLO_SIZE], have: 0, memory: None, first_byte_at: 0 });
        if state.silent.len() > self.config.half_open_max()
            && let Some(oldest) = state.silent.pop_front()
        {
            // Its Hello may have come since it was last read. If not, it is the last of the queue now and is dropped.
            self.read_hello(state, oldest);
            state.silent.truncate(self.config.half_open_max());
        }
    }

    /// Reads more of a stream's Hello. Delivers the stream if the Hello is whole, else keeps it. A silent stream never pushes out a partial one.
    fn read_hello(&self, state: &mut State, mut half: HalfOpen) {
        match half.read() {
            Ok(true) => self.deliver(&state.pending, half),
            Ok(false) if half.first_byte_at == 0 => state.silent.push_back(half),
            Ok(false) => {
                state.partial.push_back(half);
                if state.partial.len() > self.config.half_open_max() {
                    state.partial.pop_front();
                }
            }
            Err(_) => {}
        }
    }

    /// Adds a stream to the pending ones of the queue pair that its Hello names. An unauthenticated stream is closed without a reply.
    fn deliver(&self, all: &HashMap<u32, Arc<PendingStreams>>, half: HalfOpen) {
        let Some(pending) = Hello::peek(&half.bytes).and_then(|qpn| all.get(&qpn)) else { return };
        let Some(hello) = Hello::decode(&half.bytes, &pending.token) else { return };
        let pid = if half.unix { peer_pid(&half.socket) } else { None };
        let mut streams = lock(&pending.streams);
        let Some(streams) = streams.as_mut() else { return };
        if streams.len() < PENDING_MAX {
            // A check is only kept open, until the queue pair is connected or gone: nobody needs to wake up for it.
            let wakes = !matches!(hello.offer, Offer::Check);
            streams.push_back(IncomingStream { socket: half.socket, unix: half.unix, pid, hello, raw: half.bytes, memory: half.memory });
            if wakes {
                // Pairs with the Acquire in `PendingStreams::take`.
                pending.ready.store(true, Ordering::Release);
                self.notify();
            }
        }
    }

    /// Calls `watch` with each descriptor of the hub that a sleeper must watch, and for which events. None of them is closed meanwhile.
    pub fn watch(&self, mut watch: impl FnMut(RawFd, u32) -> Result<()>) -> Result<()> {
        let input = libc::EPOLLIN as u32;
        let state = lock(&self.state);
        watch(self.event.as_raw_fd(), input)?;
        if let Some(listeners) = &state.listeners {
            watch(listeners.tcp.as_raw_fd(), input)?;
            listeners.unix.as_ref().map_or(Ok(()), |unix| watch(unix.as_raw_fd(), input))?;
        }
        // A Hello may come long after its stream was accepted. One event only: nothing more is read from the stream once it is pending.
        state.partial.iter().chain(&state.silent).try_for_each(|half| watch(half.socket.as_raw_fd(), input | libc::EPOLLONESHOT as u32))
    }

    /// Wakes the sleepers of the device.
    pub fn notify(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight live bytes. A write fails only if the eventfd's count is full, and then it is readable anyway.
        unsafe { libc::write(self.event.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        // After the write: whoever clears it reads the eventfd after this is false, so it never stays readable with this false.
        self.notified.store(true, Ordering::SeqCst);
    }

    /// Clears the notification if no queue pair has a pending stream to take.
    pub fn clear_notification(&self) {
        if !self.notified.load(Ordering::SeqCst) {
            return;
        }
        let state = lock(&self.state);
        // Pairs with the Release in `deliver`, which cannot run meanwhile, as it needs the lock of the state.
        if state.pending.values().all(|pending| !pending.ready.load(Ordering::Acquire)) {
            self.notified.store(false, Ordering::SeqCst);
            let mut count = [0u8; 8];
            // SAFETY: room for the eight bytes that an eventfd yields.
            unsafe { libc::read(self.event.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        }
    }
}

impl HalfOpen {
    /// Reads more of the Hello; true once it is whole.
    fn read(&mut self) -> io::Result<bool> {
        loop {
            let (n, memory) = match recv_with_fd(&self.socket, &mut self.bytes[self.have..]) {
                Ok((0, _)) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(got) => got,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(e),
            };
            if self.have == 0 {
                self.first_byte_at = clock::now().max(1);
            }
            self.memory = memory.or(self.memory.take());
            self.have += n;
            if !Hello::begins(&self.bytes[..self.have]) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            if self.have == HELLO_SIZE {
                return Ok(true);
            }
        }
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        TcpSocket::leave_all(std::mem::take(&mut lock(&self.state).linger).into_iter().map(|(stream, _)| stream));
    }
}

/// Reads away what lingering streams have received. Drops those that the peer has closed or that have lingered for long enough.
fn reap(state: &mut State) {
    let now = clock::now();
    let mut scratch = [0u8; 4096];
    state.linger.retain(|(stream, until)| {
        loop {
            match recv_with_fd(stream, &mut scratch) {
                Ok((0, _)) => return false,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return e.kind() == io::ErrorKind::WouldBlock && (now < *until || stream.has_unsent()),
            }
        }
    });
}
