//! What the multi-process tests stand on: ranks as processes that load the plugin over its C ABI, bounded waiting, and proof of what
//! happened.
//!
//! A rank is this test binary again: [`World`] starts it with RHT_ROLE set, and the test `child_entry`, which every such binary has,
//! hands over to [`enter`]. Ranks talk to the test and to each other through socket pairs; nothing here sleeps to synchronise.

#![allow(dead_code)]

pub mod comms;
pub mod failover;
pub mod holdings;
pub mod netns;
pub mod pause;
pub mod plugin;
pub mod ports;
pub mod proxy;
pub mod squatter;

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

pub use pause::pause;

/// Longest that anything may take; a bound on hangs, not a measurement.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Descriptor of a rank's channel to the test; channels to the other ranks follow.
const PARENT_FD: RawFd = 200;
/// Descriptor that a stage is reported on.
const STAGE_FD: RawFd = 199;

/// A seed: RHT_SEED, or one of the moment's, which a test that fails shows.
pub fn seed() -> u64 {
    let given = std::env::var("RHT_SEED").ok().map(|text| text.parse().expect("RHT_SEED: a number"));
    let seed = given.unwrap_or_else(|| Random(clock() ^ u64::from(std::process::id())).next());
    println!("seed {seed}: RHT_SEED={seed} repeats it");
    seed
}

/// How often a test repeats what it tries: `few` times, and `many` in `make soak`, which sets RHT_SOAK.
pub fn repeats(few: usize, many: usize) -> usize {
    if std::env::var_os("RHT_SOAK").is_some() { many } else { few }
}

fn clock() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Random numbers, the same for the same seed (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }
}

/// One end of a message-preserving socket pair.
pub struct Chan(OwnedFd);

impl Chan {
    /// Two ends, closed on exec.
    pub fn pair() -> (Chan, Chan) {
        let mut fds = [0; 2];
        // SAFETY: two descriptors for an array of two.
        let rc = unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0, fds.as_mut_ptr()) };
        assert_eq!(rc, 0, "socketpair: {}", io::Error::last_os_error());
        // SAFETY: both were just made and are nobody else's.
        let [a, b] = fds.map(|fd| Chan(unsafe { OwnedFd::from_raw_fd(fd) }));
        (a, b)
    }

    /// Sends one message, which must not be empty: that would read as the end.
    pub fn send(&self, message: &[u8]) -> io::Result<()> {
        assert!(!message.is_empty());
        // SAFETY: reads `message` only.
        let n = unsafe { libc::send(self.0.as_raw_fd(), message.as_ptr().cast(), message.len(), libc::MSG_NOSIGNAL) };
        if n == message.len() as isize { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// One message; `UnexpectedEof` when the other end is gone, `TimedOut` when nothing came in time.
    pub fn recv_within(&self, patience: Duration) -> io::Result<Vec<u8>> {
        let mut p = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        match unsafe { libc::poll(&raw mut p, 1, patience.as_millis() as i32) } {
            0 => return Err(io::ErrorKind::TimedOut.into()),
            n if n < 0 => return Err(io::Error::last_os_error()),
            _ => {}
        }
        let mut buf = vec![0; 65536];
        // SAFETY: writes at most the buffer's length.
        let n = unsafe { libc::recv(self.0.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), 0) };
        match n {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            n if n < 0 => Err(io::Error::last_os_error()),
            n => {
                buf.truncate(n as usize);
                Ok(buf)
            }
        }
    }

    /// One message, or the test fails.
    #[track_caller]
    pub fn recv(&self) -> Vec<u8> {
        self.recv_within(PATIENCE).expect("a message")
    }

    /// One message as text, or the test fails.
    #[track_caller]
    pub fn text(&self) -> String {
        String::from_utf8(self.recv()).expect("text")
    }

    /// Whether a message waits.
    pub fn ready(&self) -> bool {
        let mut p = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        unsafe { libc::poll(&raw mut p, 1, 0) == 1 }
    }
}

/// What a rank knows of the world.
pub struct Ctx {
    pub rank: usize,
    pub size: usize,
    pub parent: Chan,
    peers: Vec<Option<Chan>>,
}

impl Ctx {
    /// The channel to another rank.
    pub fn to(&self, rank: usize) -> &Chan {
        self.peers[rank].as_ref().expect("another rank")
    }

    /// Tells the test something.
    pub fn say(&self, text: &str) {
        self.parent.send(text.as_bytes()).expect("the test is there");
    }

    /// Returns once every rank has called it.
    pub fn barrier(&self) {
        if self.rank == 0 {
            (1..self.size).for_each(|r| assert_eq!(self.to(r).recv(), b"barrier"));
            (1..self.size).for_each(|r| self.to(r).send(b"barrier").expect("rank"));
        } else {
            self.to(0).send(b"barrier").expect("rank 0");
            assert_eq!(self.to(0).recv(), b"barrier");
        }
    }
}

/// A rank's function.
pub type Role = fn(&Ctx);

/// For `child_entry`: in a rank's process runs its role and leaves the process; in the test's own does nothing.
pub fn enter(roles: &[(&str, Role)]) {
    let Ok(name) = std::env::var("RHT_ROLE") else { return };
    let number = |name: &str| std::env::var(name).expect(name).parse::<usize>().expect(name);
    let (rank, size) = (number("RHT_RANK"), number("RHT_SIZE"));
    // SAFETY: `World::spawn` put a channel at each of these descriptors, for us alone.
    let chan = |at: usize| Chan(unsafe { OwnedFd::from_raw_fd(PARENT_FD + at as RawFd) });
    let peers = (0..size).map(|r| (r != rank).then(|| chan(r + 1))).collect();
    let ctx = Ctx { rank, size, parent: chan(0), peers };
    for at in 0..=size {
        // SAFETY: F_SETFD changes a flag; children of the rank shall not hold its channels.
        unsafe { libc::fcntl(PARENT_FD + at as RawFd, libc::F_SETFD, libc::FD_CLOEXEC) };
    }
    let all: Vec<Role> = roles.iter().filter(|(n, _)| *n == name).map(|(_, role)| *role).collect();
    let [role] = all[..] else { panic!("{} roles are called {name}", all.len()) };
    role(&ctx);
    std::process::exit(0);
}

/// How ranks are to be started.
pub struct World {
    role: &'static str,
    size: usize,
    env: Vec<(Option<usize>, String, String)>,
    wrap: Vec<Vec<String>>,
}

impl World {
    /// `size` ranks of a role. Bulk data between them is copied straight, unless the test says otherwise: what goes where must not depend on
    /// the machine.
    pub fn new(role: &'static str, size: usize) -> World {
        World { role, size, env: vec![(None, "RAILHEAD_CMA".into(), "1".into())], wrap: vec![Vec::new(); size] }
    }

    /// A variable for all ranks.
    pub fn env(mut self, name: &str, value: &str) -> World {
        self.env.push((None, name.into(), value.into()));
        self
    }

    /// A variable for one rank.
    pub fn env_of(mut self, rank: usize, name: &str, value: &str) -> World {
        self.env.push((Some(rank), name.into(), value.into()));
        self
    }

    /// A command that runs one rank's process, such as `ip netns exec`.
    pub fn wrap(mut self, rank: usize, command: &[&str]) -> World {
        self.wrap[rank].extend(command.iter().map(|s| s.to_string()));
        self
    }

    /// Starts the ranks.
    pub fn spawn(self) -> Ranks {
        let mut mesh: Vec<Vec<Option<Chan>>> = (0..self.size).map(|_| (0..self.size).map(|_| None).collect()).collect();
        let pairs = (0..self.size).flat_map(|a| (a + 1..self.size).map(move |b| (a, b)));
        for (a, b) in pairs {
            let (x, y) = Chan::pair();
            (mesh[a][b], mesh[b][a]) = (Some(x), Some(y));
        }
        let ranks = mesh.into_iter().enumerate().map(|(rank, peers)| self.start(rank, peers)).collect();
        Ranks { ranks }
    }

    fn start(&self, rank: usize, peers: Vec<Option<Chan>>) -> Rank {
        let exe = std::env::current_exe().expect("current_exe");
        let mut line = self.wrap[rank].clone();
        line.push(exe.to_string_lossy().into_owned());
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).args(["--exact", "child_entry", "--nocapture", "--test-threads=1"]);
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if name.starts_with("RAILHEAD_") || name.starts_with("NCCL_") || name.starts_with("RH_STAGE") {
                command.env_remove(name);
            }
        }
        // The whole suite, with a thread of each device that makes progress too: see `make test`.
        if let Ok(progress) = std::env::var("RHT_PROGRESS") {
            command.env("RAILHEAD_PROGRESS", progress);
        }
        command.env("RHT_ROLE", self.role).env("RHT_RANK", rank.to_string()).env("RHT_SIZE", self.size.to_string());
        // The test harness in the rank reports on stdout, which is of no interest; panics come on stderr.
        command.stdout(std::process::Stdio::null());
        command.env("RH_STAGE_FD", STAGE_FD.to_string());
        for (_, name, value) in self.env.iter().filter(|(r, ..)| r.is_none_or(|r| r == rank)) {
            command.env(name, value);
        }
        let (chan, theirs) = Chan::pair();
        let (stage, stage_theirs) = Chan::pair();
        let mut fds = vec![(stage_theirs.0.as_raw_fd(), STAGE_FD), (theirs.0.as_raw_fd(), PARENT_FD)];
        fds.extend(peers.iter().enumerate().filter_map(|(r, c)| Some((c.as_ref()?.0.as_raw_fd(), PARENT_FD + 1 + r as RawFd))));
        // SAFETY: only async-signal-safe calls between fork and exec.
        unsafe {
            command.pre_exec(move || {
                for &(from, to) in &fds {
                    if libc::dup2(from, to) < 0 {
                        return Err(io::Error::last_os_error());
                    }
                }
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                Ok(())
            });
        }
        let child = command.spawn().unwrap_or_else(|e| panic!("{line:?}: {e}"));
        Rank { rank, child, chan, stage, status: None }
    }
}

/// A running rank.
pub struct Rank {
    rank: usize,
    child: Child,
    pub chan: Chan,
    /// Where a stage is reported.
    pub stage: Chan,
    status: Option<ExitStatus>,
}

impl Rank {
    /// Process id, of the wrapping command if there is one.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends a signal.
    pub fn signal(&self, signal: i32) {
        // SAFETY: our own child, not yet waited for.
        unsafe { libc::kill(self.pid(), signal) };
    }

    /// Whether the process has ended, without waiting.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        if self.status.is_none() {
            self.status = self.child.try_wait().expect("wait");
        }
        self.status
    }

    /// Waits for the end of the process.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        // Longer than the rank itself has for anything: it says best what it waits for.
        let end = Instant::now() + 2 * PATIENCE;
        loop {
            if let Some(status) = self.ended() {
                return status;
            }
            assert!(Instant::now() < end, "rank {} does not end", self.rank);
            // Waiting for an event, not for time to pass: the loop ends with the process.
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// State letter of /proc/pid/stat: `T` when stopped.
    pub fn state(&self) -> char {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        stat.rsplit(") ").next().and_then(|s| s.chars().next()).unwrap_or('?')
    }
}

/// All ranks; killed when dropped.
pub struct Ranks {
    pub ranks: Vec<Rank>,
}

impl Ranks {
    /// The next word of a rank, which must be this.
    #[track_caller]
    pub fn expect(&mut self, rank: usize, word: &str) {
        let got = self.hear(rank);
        assert_eq!(got, word, "rank {rank}");
    }

    /// The next word of a rank.
    #[track_caller]
    pub fn hear(&mut self, rank: usize) -> String {
        let r = &mut self.ranks[rank];
        match r.chan.recv_within(PATIENCE) {
            Ok(m) => String::from_utf8(m).expect("text"),
            Err(e) => {
                let status = r.ended();
                panic!("rank {rank} says nothing: {e}; {status:?}")
            }
        }
    }

    /// Whether a rank says nothing for a moment: what it says too soon, it says at once.
    pub fn is_silent(&self, rank: usize) -> bool {
        self.ranks[rank].chan.recv_within(Duration::from_millis(200)).is_err()
    }

    /// Tells a rank something.
    pub fn tell(&self, rank: usize, word: &str) {
        self.ranks[rank].chan.send(word.as_bytes()).unwrap_or_else(|e| panic!("rank {rank}: {e}"));
    }

    /// Waits until all have ended well.
    #[track_caller]
    pub fn finish(mut self) {
        for rank in &mut self.ranks {
            let status = rank.wait();
            assert!(status.success(), "rank {}: {status}", rank.rank);
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            if rank.ended().is_none() {
                rank.signal(libc::SIGKILL);
                let _ = rank.child.wait();
            }
        }
    }
}

/// Repeats until there is a value, for at most [`PATIENCE`].
#[track_caller]
pub fn until<T>(what: &str, mut step: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = step() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "waited too long for {what}");
        pause(start);
    }
}

/// The same without a pause, for what is measured.
#[track_caller]
pub fn spin<T>(what: &str, mut step: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        for _ in 0..1000 {
            if let Some(value) = step() {
                return value;
            }
        }
        assert!(start.elapsed() < PATIENCE, "waited too long for {what}");
    }
}

/// `len` bytes that depend on `seed`.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        out.extend_from_slice(&x.wrapping_mul(0x2545_F491_4F6C_DD1D).to_le_bytes());
    }
    out.truncate(len);
    out
}
