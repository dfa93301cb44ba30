//! Where a device's incoming streams arrive: its listeners, the half-open streams, and a letter box per queue pair.
//!
//! A hub is open while its device has queue pairs. Nobody serves it alone: every queue pair that waits for its peer drives it on the thread
//! that drives that queue pair, and puts what belongs to others into their letter boxes.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::dial;
use super::endpoint::{HELLO_SIZE, Hello, Offer, Token};
use super::shm::recv_with_fd;
use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::fd::{Owned, OwnedFd, TcpListener};
use crate::base::{clock, listen};

/// Closed TCP streams that wait for the peer's end, so that a reset cannot overtake our last acknowledgements.
const LINGER_MAX: usize = 256;
/// And for how long at most: a peer that has not taken them by then will not.
const LINGER_NS: u64 = 30_000_000_000;

/// Streams taken from the kernel per listener and call.
const ADMIT_AT_ONCE: usize = 256;

/// A stream that somebody opened towards one of our queue pairs, and proved to be entitled to.
pub struct Arrival {
    /// Non-blocking.
    pub socket: OwnedFd,
    /// Whether it can pass descriptors.
    pub unix: bool,
    /// The kernel's word for the peer's process (unix only, 0 if it is in no namespace of ours).
    pub pid: Option<i32>,
    /// The verified greeting, and its bytes.
    pub hello: Hello,
    /// As received.
    pub raw: [u8; HELLO_SIZE],
    /// A descriptor that came along.
    pub memory: Option<OwnedFd>,
}

/// Where a queue pair finds its arrivals.
pub struct LetterBox {
    token: Token,
    full: AtomicBool,
    /// `None` once the queue pair has met its peer: whatever comes later is a replay.
    letters: Mutex<Option<VecDeque<Arrival>>>,
}

impl LetterBox {
    /// The next arrival.
    pub fn take(&self) -> Option<Arrival> {
        // Pairs with the Release in `Hub::deliver`; the lock orders the rest.
        if !self.full.load(Ordering::Acquire) {
            return None;
        }
        let mut letters = lock(&self.letters);
        let letter = letters.as_mut().and_then(VecDeque::pop_front);
        self.full.store(letters.as_ref().is_some_and(|letters| !letters.is_empty()), Ordering::Release);
        letter
    }

    /// Nothing more is expected.
    pub fn seal(&self) {
        *lock(&self.letters) = None;
        self.full.store(false, Ordering::Release);
    }
}

struct HalfOpen {
    socket: OwnedFd,
    unix: bool,
    bytes: [u8; HELLO_SIZE],
    have: usize,
    memory: Option<OwnedFd>,
    /// When its first byte came; 0 before.
    since: u64,
}

#[derive(Default)]
struct State {
    open: Option<Listeners>,
    /// Streams that have said nothing yet.
    silent: VecDeque<HalfOpen>,
    /// Streams that have said part of a greeting.
    begun: VecDeque<HalfOpen>,
    boxes: HashMap<u32, Arc<LetterBox>>,
    linger: VecDeque<(OwnedFd, u64)>,
    next_qpn: u32,
}

struct Listeners {
    tcp: TcpListener,
    unix: Option<Owned<UnixListener>>,
    port: u16,
}

/// One device's.
pub struct Hub {
    config: Arc<Config>,
    /// Where it listens; the port is chosen when it opens.
    addr: SocketAddr,
    instance: [u8; 16],
    /// Readable when something was put into a letter box of somebody who may be asleep.
    bell: OwnedFd,
    state: Mutex<State>,
}

/// What a new queue pair needs to know of its hub.
pub struct Membership {
    /// Its number.
    pub qpn: u32,
    /// Where its streams arrive.
    pub letters: Arc<LetterBox>,
    /// Where the hub listens.
    pub addr: SocketAddr,
}

impl Listeners {
    /// The next stream that waits; `None`: there is no such listener.
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
        let bell = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if bell < 0 {
            return Err(Error::last_os("eventfd"));
        }
        // SAFETY: a fresh descriptor that nobody else owns.
        let bell = unsafe { OwnedFd::from_raw_fd(bell) };
        Ok(Hub { config, addr, instance, bell, state: Mutex::new(State { next_qpn: 1, ..State::default() }) })
    }

    /// Names the listener's abstract unix socket.
    pub fn instance(&self) -> &[u8; 16] {
        &self.instance
    }

    /// Admits a queue pair; the first one opens the listeners.
    pub fn join(&self, token: Token) -> Result<Membership> {
        let mut state = lock(&self.state);
        if state.open.is_none() {
            state.open = Some(self.open()?);
        }
        let qpn = (0..u32::MAX)
            .map(|i| state.next_qpn.wrapping_add(i) & 0x00ff_ffff)
            .find(|qpn| *qpn != 0 && !state.boxes.contains_key(qpn))
            .ok_or_else(|| Error::usage("2^24 queue pairs exist on the device, the most there can be"))?;
        state.next_qpn = qpn + 1;
        let letters = Arc::new(LetterBox { token, full: AtomicBool::new(false), letters: Mutex::new(Some(VecDeque::new())) });
        state.boxes.insert(qpn, letters.clone());
        let mut addr = self.addr;
        addr.set_port(state.open.as_ref().map_or(0, |open| open.port));
        Ok(Membership { qpn, letters, addr })
    }

    /// Lets a queue pair go; the last one closes the listeners.
    pub fn leave(&self, qpn: u32) {
        let mut state = lock(&self.state);
        state.boxes.remove(&qpn);
        reap(&mut state);
        if state.boxes.is_empty() {
            state.open = None;
            state.silent.clear();
            state.begun.clear();
        }
    }

    /// Closes streams once the peer has closed its ends.
    pub fn linger(&self, streams: Vec<OwnedFd>) {
        let mut state = lock(&self.state);
        let until = clock::now() + LINGER_NS;
        state.linger.extend(streams.into_iter().map(|stream| (stream, until)));
        while state.linger.len() > LINGER_MAX {
            state.linger.pop_front();
        }
    }

    fn open(&self) -> Result<Listeners> {
        let tcp = listen::tcp(self.addr, &self.config.port_range)?;
        dial::buffers(&tcp, self.config.tcp_buffer_kib);
        let port = tcp.local_addr().map_err(|e| Error::system("getsockname", e))?.port();
        // Without it the peers on this host use what they use across network namespaces.
        let unix = std::os::unix::net::SocketAddr::from_abstract_name(unix_name(&self.instance))
            .and_then(|name| UnixListener::bind_addr(&name))
            .and_then(|unix| unix.set_nonblocking(true).map(|()| Owned::new(unix)))
            .ok();
        Ok(Listeners { tcp, unix, port })
    }

    /// Takes in whoever has come. Cheap when somebody else is at it.
    ///
    /// Errors: somebody has come, and there is no descriptor for his stream.
    pub fn serve(&self) -> io::Result<()> {
        let Ok(mut state) = self.state.try_lock() else { return Ok(()) };
        let state = &mut *state;
        // First, as it frees descriptors.
        if !state.linger.is_empty() {
            reap(state);
        }
        // Then, so that whoever has spoken meanwhile is not among those whom newcomers push out.
        let timeout = u64::from(self.config.handshake_timeout_s) * 1_000_000_000;
        for half in std::mem::take(&mut state.begun).into_iter().chain(std::mem::take(&mut state.silent)) {
            if half.since == 0 || clock::now() - half.since < timeout {
                self.hear(state, half);
            }
        }
        for unix in [false, true] {
            for _ in 0..ADMIT_AT_ONCE {
                match state.open.as_ref().and_then(|open| open.accept(unix)) {
                    Some(Ok(stream)) => self.admit(state, stream, unix),
                    // A stranger's serves as well.
                    Some(Err(e))
                        if e.raw_os_error() == Some(libc::EMFILE)
                            && state.silent.pop_front().or_else(|| state.begun.pop_front()).is_some() => {}
                    Some(Err(e)) if e.raw_os_error() == Some(libc::EMFILE) => return Err(e),
                    Some(Err(_)) | None => break,
                }
            }
        }
        Ok(())
    }

    /// Takes a new stream on. Its greeting has come along as a rule, so a burst of ranks does not push one another out.
    fn admit(&self, state: &mut State, socket: OwnedFd, unix: bool) {
        // SAFETY: plain system call on a descriptor that we own.
        if unsafe { libc::fcntl(socket.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } < 0 {
            return;
        }
        self.hear(state, HalfOpen { socket, unix, bytes: [0; HELLO_SIZE], have: 0, memory: None, since: 0 });
        if state.silent.len() > self.most()
            && let Some(oldest) = state.silent.pop_front()
        {
            // It may have spoken since it was last heard; if not, it is the last one now.
            self.hear(state, oldest);
            state.silent.truncate(self.most());
        }
    }

    /// Streams of either kind that are kept.
    fn most(&self) -> usize {
        self.config.half_open_max()
    }

    /// Reads what a stream says, and keeps it until that is a whole greeting. One that has said nothing never takes the place of one that has.
    fn hear(&self, state: &mut State, mut half: HalfOpen) {
        match half.read() {
            Ok(true) => self.deliver(&state.boxes, half),
            Ok(false) if half.since == 0 => state.silent.push_back(half),
            Ok(false) => {
                state.begun.push_back(half);
                if state.begun.len() > self.most() {
                    state.begun.pop_front();
                }
            }
            Err(_) => {}
        }
    }

    /// Puts a complete stream into its letter box. Strangers are dropped without a word.
    fn deliver(&self, boxes: &HashMap<u32, Arc<LetterBox>>, half: HalfOpen) {
        let Some(letters) = Hello::peek(&half.bytes).and_then(|qpn| boxes.get(&qpn)) else { return };
        let Some(hello) = Hello::decode(&half.bytes, &letters.token) else { return };
        let pid = if half.unix { peer_of(&half.socket) } else { None };
        let mut queue = lock(&letters.letters);
        let Some(queue) = queue.as_mut() else { return };
        // A queue pair has one peer: one control stream and its data streams, each dialed again a few times at most.
        if queue.len() < 64 {
            // A probe only waits in the box, for as long as the queue pair exists or until it has met its peer: nobody need wake for it.
            let news = !matches!(hello.offer, Offer::Probe);
            queue.push_back(Arrival { socket: half.socket, unix: half.unix, pid, hello, raw: half.bytes, memory: half.memory });
            if news {
                // Pairs with the Acquire in `LetterBox::take`.
                letters.full.store(true, Ordering::Release);
                self.ring();
            }
        }
    }

    /// Calls `watch` with each descriptor that a sleeper must watch besides its own streams, and the events. None is closed meanwhile.
    pub fn watch(&self, mut watch: impl FnMut(RawFd, u32) -> Result<()>) -> Result<()> {
        let input = libc::EPOLLIN as u32;
        let state = lock(&self.state);
        watch(self.bell.as_raw_fd(), input)?;
        if let Some(open) = &state.open {
            watch(open.tcp.as_raw_fd(), input)?;
            open.unix.as_ref().map_or(Ok(()), |unix| watch(unix.as_raw_fd(), input))?;
        }
        // A greeting may follow its stream late, when the listener has nothing to say any more. Once: in its letter box it is not read.
        state.begun.iter().chain(&state.silent).try_for_each(|half| watch(half.socket.as_raw_fd(), input | libc::EPOLLONESHOT as u32))
    }

    /// Wakes the sleepers of the device.
    pub fn ring(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: eight live bytes. A bell that is rung 2^64 times unheard has rung.
        unsafe { libc::write(self.bell.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Silences the bell if every letter box was emptied.
    pub fn hush(&self) {
        let state = lock(&self.state);
        // Pairs with the Release in `deliver`, which the state's lock keeps out meanwhile.
        if state.boxes.values().all(|letters| !letters.full.load(Ordering::Acquire)) {
            let mut count = [0u8; 8];
            // SAFETY: room for the eight bytes that an eventfd yields.
            unsafe { libc::read(self.bell.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        }
    }
}

impl HalfOpen {
    /// Reads more of the greeting; true once it is whole.
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
                self.since = clock::now().max(1);
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

/// Drops the lingering streams that are over.
fn reap(state: &mut State) {
    let now = clock::now();
    let mut scratch = [0u8; 4096];
    state.linger.retain(|(stream, until)| {
        loop {
            match recv_with_fd(stream, &mut scratch) {
                Ok((0, _)) => return false,
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return e.kind() == io::ErrorKind::WouldBlock && now < *until,
            }
        }
    });
}

/// The abstract name of the unix socket of a hub.
pub fn unix_name(instance: &[u8; 16]) -> Vec<u8> {
    instance.iter().fold(b"railhead-".to_vec(), |mut name, byte| {
        name.extend_from_slice(format!("{byte:02x}").as_bytes());
        name
    })
}

/// The peer's process, if it is this user's.
pub fn peer_of(socket: &OwnedFd) -> Option<i32> {
    let mut cred = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `cred` has room for the `len` bytes that SO_PEERCRED yields.
    let rc = unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut cred).cast(), &mut len) };
    // SAFETY: plain system call.
    (rc == 0 && cred.uid == unsafe { libc::geteuid() }).then_some(cred.pid)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
