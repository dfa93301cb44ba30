//! What every clause of the suite stands on: two connected queue pairs of one device, memory to aim at, and bounded waiting.
//!
//! A [`Bed`] is all that a provider has to bring. Both sides live in this process, each with its own completion queue, and one
//! thread drives the two by turns unless a test says otherwise.

use std::collections::VecDeque;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use crate::support::pause;
use railhead::base::config::Config;
use railhead::base::stats::{RailCounter, RailStats};
use railhead::fabric::{
    Access, Completion, CompletionQueue, Device, Domain, MemoryRegion, Opcode, Payload, QpCaps, QpId, QpState, RecvWr, SendWr, Sge,
    SharedPages, UserMemory, WcOpcode, WcStatus,
};

/// Longest that anything here may take; a bound on hangs, not a measurement.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How the bytes travel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wire {
    /// Shared memory of one host.
    Shm,
    /// The same, to memory that the peer writes to by itself.
    Placed,
    /// TCP.
    Tcp,
    /// A NIC, or what the kernel says is one.
    Nic,
    /// Packets of a simulation, where a NIC's rules hold.
    Sim,
}

/// A provider, or one of its wires, under test.
pub struct Bed {
    /// The module of its tests.
    pub name: &'static str,
    /// The path that the bytes must take.
    pub wire: Wire,
    /// Changes the default configuration into the one that makes this wire.
    pub configure: fn(&mut Config),
    /// What makes a simulated device, rather than a configuration.
    pub simulated: Option<fn() -> Device>,
}

/// The clauses that are not asked of the simulated fabric: nothing sleeps in a simulation, so it wakes nobody.
const NOT_SIMULATED: [&str; 7] = [
    "notify::arm_then_drain",
    "notify::wakes_a_sleeper",
    "notify::what_is_drained_uses_up_no_notification",
    "notify::what_is_posted_after_arming_gets_out",
    "notify::no_lost_wakeup",
    "notify::error_notifies",
    "notify::nothing_wakes_an_idle_sleeper",
];

impl Bed {
    /// The first device.
    pub fn device(&self) -> Device {
        self.device_with(|_| {})
    }

    /// The first device under a configuration that is changed further.
    pub fn device_with(&self, change: impl FnOnce(&mut Config)) -> Device {
        if let Some(simulated) = self.simulated {
            return simulated();
        }
        let mut config = Config::default();
        (self.configure)(&mut config);
        change(&mut config);
        let devices = railhead::fabric::devices(&Arc::new(config)).expect("devices");
        devices.into_iter().next().unwrap_or_else(|| panic!("{}: no device", self.name))
    }

    /// Whether a clause is asked of this provider; says so if not.
    pub fn asks(&self, clause: &str) -> bool {
        let asked = self.wire != Wire::Sim || !NOT_SIMULATED.contains(&clause);
        if !asked {
            println!("SKIP {}::{clause}: nothing sleeps in a simulation, so it wakes nobody", self.name);
        }
        asked
    }

    /// Says that a clause, or part of it, is not asked of this provider; true if so. `nic` is why a NIC, real or simulated, cannot do it.
    pub fn waives(&self, clause: &str, nic: &str) -> bool {
        let waived = matches!(self.wire, Wire::Nic | Wire::Sim);
        if waived {
            println!("SKIP {}::{clause}: {nic}", self.name);
        }
        waived
    }

    /// Whether `got` stands for `want`, an error that a requester or responder meets in its own memory. InfiniBand names it; Soft-RoCE calls
    /// all of them local operation errors.
    pub fn own_error(&self, got: WcStatus, want: WcStatus) -> bool {
        got == want || (self.wire == Wire::Nic && got == WcStatus::LocQpOpErr)
    }

    /// Runs the rest of the test called `clause` in a process of its own: this program again, with that test alone.
    pub fn alone(&self, clause: &str, body: impl FnOnce()) {
        if std::env::var_os("RHT_ALONE").is_some() {
            return body();
        }
        let exe = std::env::current_exe().expect("current_exe");
        let test = format!("{}::{clause}", self.name);
        let output = std::process::Command::new(exe)
            .args(["--exact", &test, "--nocapture", "--include-ignored"])
            .env("RHT_ALONE", "1")
            .output()
            .expect("spawn");
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{test} alone: {}\n{text}", output.status);
    }

    /// Two connected sides with default sizes.
    pub fn pair(&self) -> Pair {
        self.pair_on(&self.device(), QpCaps::default())
    }

    /// Two connected sides with given sizes.
    pub fn pair_with(&self, caps: QpCaps) -> Pair {
        self.pair_on(&self.device(), caps)
    }

    /// Two connected sides of a device.
    pub fn pair_on(&self, device: &Device, caps: QpCaps) -> Pair {
        let mut pair = Pair { a: Side::new("a", device, caps, false), b: Side::new("b", device, caps, false) };
        (pair.a.shares, pair.b.shares) = (self.wire == Wire::Placed, self.wire == Wire::Placed);
        pair.connect();
        pair
    }
}

/// One end: a completion queue with one queue pair.
pub struct Side {
    pub name: &'static str,
    pub cq: CompletionQueue,
    pub qp: QpId,
    pub stats: RailStats,
    /// Completions polled and not yet looked at.
    pub got: VecDeque<Completion>,
    pub domain: Domain,
    /// Its memory may be mapped by the peer.
    shares: bool,
    /// Its time is the polls'.
    simulated: bool,
}

impl Side {
    /// An unconnected end.
    pub fn new(name: &'static str, device: &Device, caps: QpCaps, notify: bool) -> Side {
        let domain = device.open().expect("open");
        let mut cq = domain.create_cq(notify).expect("create_cq");
        let stats = RailStats::detached();
        let qp = cq.create_qp(&caps, stats.clone()).expect("create_qp");
        Side { name, cq, qp, stats, got: VecDeque::new(), domain, shares: false, simulated: device.info().fabric == "sim" }
    }

    /// A poll has found nothing. In a simulation others wait for no processor, and the next poll lets time pass.
    fn pause(&self, start: Instant) {
        if !self.simulated {
            pause(start);
        }
    }

    /// Registered memory of this end.
    pub fn memory(&self, len: usize, access: Access) -> Mem {
        if self.shares { Mem::shared(&self.domain, len, access) } else { Mem::new(&self.domain, len, access) }
    }

    /// Memory that the peer may do everything to.
    pub fn open_memory(&self, len: usize) -> Mem {
        self.memory(len, Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ)
    }

    /// Polls once.
    pub fn poll(&mut self) -> usize {
        let mut out =
            [Completion { wr_id: 0, status: WcStatus::GeneralErr, opcode: WcOpcode::Send, byte_len: 0, imm: None, qp_num: 0 }; 16];
        let n = self.cq.poll(&mut out);
        assert!(n <= out.len(), "poll returned {n} of {}", out.len());
        self.got.extend(&out[..n]);
        n
    }

    /// Posts one request, which must be taken.
    #[track_caller]
    pub fn send(&mut self, request: SendWr<'_>) {
        self.cq.qp(self.qp).post_send(&[request]).expect("post_send");
    }

    /// Posts one receive, which must be taken.
    #[track_caller]
    pub fn recv(&mut self, wr_id: u64, sge: Sge) {
        self.cq.qp(self.qp).post_recv(&RecvWr { wr_id, sge }).expect("post_recv");
    }

    /// State of the queue pair.
    pub fn state(&mut self) -> QpState {
        self.cq.qp(self.qp).state()
    }

    /// The oldest completion, which must be there.
    #[track_caller]
    pub fn take(&mut self) -> Completion {
        self.got.pop_front().expect("a completion")
    }

    /// The oldest completion, which must be the success of `wr_id`.
    #[track_caller]
    pub fn take_ok(&mut self, wr_id: u64) -> Completion {
        let c = self.take();
        assert_eq!((c.wr_id, c.status), (wr_id, WcStatus::Success), "side {}: {c:?}", self.name);
        c
    }

    /// The oldest completions, which must be the successes of these.
    #[track_caller]
    pub fn take_all_ok(&mut self, ids: std::ops::Range<u64>) {
        for id in ids {
            self.take_ok(id);
        }
    }

    /// Polls until `n` completions wait.
    #[track_caller]
    pub fn wait(&mut self, n: usize) {
        let start = Instant::now();
        while self.got.len() < n {
            if self.poll() == 0 {
                assert!(start.elapsed() < PATIENCE, "side {}: {} of {n} completions: {:?}", self.name, self.got.len(), self.got);
                self.pause(start);
            }
        }
    }
}

/// Two ends.
pub struct Pair {
    pub a: Side,
    pub b: Side,
}

impl Pair {
    /// Exchanges the endpoints.
    pub fn connect(&mut self) {
        let (ea, eb) = (self.a.cq.qp(self.a.qp).endpoint(), self.b.cq.qp(self.b.qp).endpoint());
        self.a.cq.qp(self.a.qp).connect(&eb).expect("connect a");
        self.b.cq.qp(self.b.qp).connect(&ea).expect("connect b");
    }

    /// Polls both once.
    pub fn poll(&mut self) -> usize {
        self.a.poll() + self.b.poll()
    }

    /// Polls both until each has at least so many completions waiting.
    #[track_caller]
    pub fn wait(&mut self, a: usize, b: usize) {
        let start = Instant::now();
        while self.a.got.len() < a || self.b.got.len() < b {
            if self.poll() == 0 {
                let (ga, gb) = (&self.a.got, &self.b.got);
                assert!(start.elapsed() < PATIENCE, "{}/{a} and {}/{b} completions: {ga:?} {gb:?}", ga.len(), gb.len());
                self.a.pause(start);
            }
        }
    }

    /// Polls both until the condition holds.
    #[track_caller]
    pub fn until(&mut self, what: &str, mut holds: impl FnMut(&mut Pair) -> bool) {
        let start = Instant::now();
        while !holds(self) {
            if self.poll() == 0 {
                assert!(start.elapsed() < PATIENCE, "waited too long for {what}: {:?} {:?}", self.a.got, self.b.got);
                self.a.pause(start);
            }
        }
    }

    /// Polls both many times over, so that whatever was going to happen has happened; nothing may be concluded from how long it took.
    pub fn settle(&mut self) {
        for _ in 0..2000 {
            self.poll();
        }
    }

    /// Goes on polling until both queue pairs are in ERROR.
    #[track_caller]
    pub fn both_fail(&mut self) {
        self.until("both queue pairs in ERROR", |p| p.a.state() == QpState::Error && p.b.state() == QpState::Error);
    }

    /// Moves one small message from a to b, which shows that the pair works.
    #[track_caller]
    pub fn ping(&mut self) {
        let from = self.a.open_memory(64);
        let to = self.b.open_memory(64);
        from.pattern(0x77);
        self.b.recv(9001, to.sge(0, 64));
        self.a.send(Request::send(9000, from.sge(0, 64)));
        let at = |side: &Side, id| side.got.iter().position(|c| c.wr_id == id);
        self.until("a ping", |p| at(&p.a, 9000).is_some() && at(&p.b, 9001).is_some());
        // Other queue pairs' completions may stand around them.
        let take = |side: &mut Side, id| at(side, id).and_then(|at| side.got.remove(at)).expect("just found");
        let (ca, cb) = (take(&mut self.a, 9000), take(&mut self.b, 9001));
        assert_eq!((ca.wr_id, ca.status), (9000, WcStatus::Success));
        assert_eq!((cb.wr_id, cb.status, cb.byte_len), (9001, WcStatus::Success, 64));
        assert_eq!(to.read(0, 64), from.read(0, 64));
    }
}

/// Builders of send requests, all signaled.
pub struct Request;

impl Request {
    pub fn send<'a>(wr_id: u64, sge: Sge) -> SendWr<'a> {
        SendWr {
            wr_id,
            opcode: Opcode::Send,
            payload: Payload::Sge(sge),
            remote_addr: 0,
            rkey: 0,
            imm: 0,
            signaled: true,
            when_sent: false,
        }
    }

    pub fn send_imm<'a>(wr_id: u64, sge: Sge, imm: u32) -> SendWr<'a> {
        SendWr { opcode: Opcode::SendWithImm, imm, ..Request::send(wr_id, sge) }
    }

    pub fn write<'a>(wr_id: u64, sge: Sge, to: &Mem, at: usize) -> SendWr<'a> {
        SendWr { opcode: Opcode::Write, remote_addr: to.addr(at), rkey: to.rkey(), ..Request::send(wr_id, sge) }
    }

    pub fn write_imm<'a>(wr_id: u64, sge: Sge, to: &Mem, at: usize, imm: u32) -> SendWr<'a> {
        SendWr { opcode: Opcode::WriteWithImm, imm, ..Request::write(wr_id, sge, to, at) }
    }

    pub fn write_inline<'a>(wr_id: u64, bytes: &'a [u8], to: &Mem, at: usize) -> SendWr<'a> {
        SendWr { payload: Payload::Inline(bytes), ..Request::write(wr_id, NOTHING, to, at) }
    }

    pub fn read<'a>(wr_id: u64, sge: Sge, from: &Mem, at: usize) -> SendWr<'a> {
        SendWr { opcode: Opcode::Read, ..Request::write(wr_id, sge, from, at) }
    }
}

/// No memory at all.
pub const NOTHING: Sge = Sge { addr: 0, len: 0, lkey: 0 };

/// Registered memory between two inaccessible pages: a byte too far is a crash.
pub struct Mem {
    map: *mut u8,
    map_len: usize,
    at: usize,
    len: usize,
    region: Option<MemoryRegion>,
    /// What it is part of, if the peer may map it.
    shared: Option<SharedPages>,
}

// SAFETY: plain memory, accessed through raw copies only.
unsafe impl Send for Mem {}
// SAFETY: as above.
unsafe impl Sync for Mem {}

const PAGE: usize = 4096;

impl Mem {
    /// Maps and registers `len` bytes (at least one page is mapped).
    pub fn new(domain: &Domain, len: usize, access: Access) -> Mem {
        let mut mem = Mem::unregistered(len);
        // SAFETY: the mapping lives as long as `mem`, which drops the region first.
        let memory = unsafe { UserMemory::new(mem.ptr(0), len) };
        mem.region = Some(domain.register(memory, access).expect("register"));
        mem
    }

    /// The same of [`SharedPages`], without inaccessible pages.
    pub fn shared(domain: &Domain, len: usize, access: Access) -> Mem {
        let shared = SharedPages::new(len.max(1)).expect("shared memory");
        let (map, map_len) = (shared.pages().addr() as *mut u8, shared.pages().len());
        let mut mem = Mem { map, map_len, at: (map_len - len) / 8 * 8, len, region: None, shared: Some(shared) };
        mem.region = Some(domain.register(mem.memory(), access).expect("register"));
        mem
    }

    /// Maps `len` bytes without registering them. The last byte lies just before the guard page.
    pub fn unregistered(len: usize) -> Mem {
        let body = len.next_multiple_of(PAGE).max(PAGE);
        let map_len = body + 2 * PAGE;
        // SAFETY: a fresh anonymous mapping.
        let map = unsafe { libc::mmap(ptr::null_mut(), map_len, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
        assert_ne!(map, libc::MAP_FAILED, "mmap");
        let map = map.cast::<u8>();
        // SAFETY: inside the mapping just made.
        let rc = unsafe { libc::mprotect(map.add(PAGE).cast(), body, libc::PROT_READ | libc::PROT_WRITE) };
        assert_eq!(rc, 0, "mprotect");
        // Slots need 8-aligned addresses, so only lengths that are multiples of 8 touch the guard page.
        Mem { map, map_len, at: PAGE + (body - len) / 8 * 8, len, region: None, shared: None }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn ptr(&self, at: usize) -> *mut u8 {
        assert!(at <= self.len);
        // SAFETY: inside the mapping.
        unsafe { self.map.add(self.at + at) }
    }

    pub fn addr(&self, at: usize) -> u64 {
        self.ptr(at) as u64
    }

    /// All of it, to be registered again.
    pub fn memory(&self) -> UserMemory {
        // SAFETY: it is mapped for as long as this exists, and no test uses such a region later.
        unsafe { UserMemory::new(self.ptr(0), self.len) }
    }

    pub fn lkey(&self) -> u32 {
        self.region.as_ref().expect("registered").lkey()
    }

    pub fn rkey(&self) -> u32 {
        self.region.as_ref().expect("registered").rkey()
    }

    /// Deregisters; the memory stays.
    pub fn deregister(&mut self) {
        self.region = None;
    }

    pub fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { addr: self.addr(at), len: len as u32, lkey: self.lkey() }
    }

    pub fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len);
        // SAFETY: bounds checked above.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.ptr(at), bytes.len()) }
    }

    pub fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut out = vec![0; len];
        // SAFETY: bounds checked above.
        unsafe { ptr::copy_nonoverlapping(self.ptr(at), out.as_mut_ptr(), len) }
        out
    }

    /// Every byte.
    pub fn all(&self) -> Vec<u8> {
        self.read(0, self.len)
    }

    /// Fills everything with one byte.
    pub fn set(&self, byte: u8) {
        // SAFETY: the whole of the accessible range.
        unsafe { ptr::write_bytes(self.ptr(0), byte, self.len) }
    }

    /// Fills everything with bytes that depend on `seed` and on their position.
    pub fn pattern(&self, seed: u64) {
        self.write(0, &pattern(seed, self.len));
    }
}

impl Drop for Mem {
    fn drop(&mut self) {
        self.region = None;
        if self.shared.is_none() {
            // SAFETY: the mapping is ours and nothing refers to it any more.
            unsafe { libc::munmap(self.map.cast(), self.map_len) };
        }
    }
}

/// Small, fast, good enough: xorshift64*.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() >> 11) as usize % n
    }
}

/// `len` bytes that depend on `seed`.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        out.extend_from_slice(&rng.next().to_le_bytes());
    }
    out.truncate(len);
    out
}

/// Bytes sent by each path.
pub fn sent(stats: &RailStats) -> [u64; 5] {
    use RailCounter::{TxBounce, TxCma, TxInline, TxMapped, TxTcp};
    [TxInline, TxMapped, TxCma, TxBounce, TxTcp].map(|c| stats.get(c))
}

/// Bytes received by each path.
pub fn received(stats: &RailStats) -> [u64; 5] {
    use RailCounter::{RxBounce, RxCma, RxInline, RxMapped, RxTcp};
    [RxInline, RxMapped, RxCma, RxBounce, RxTcp].map(|c| stats.get(c))
}

/// What a NIC does not tell, and `net` learns from its control connection.
pub const SILENT: &str = "a NIC tells a side with nothing outstanding nothing of its peer";

/// A knob for long runs: `name` from the environment, else the default.
pub fn count(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().map_or(default, |v| v.parse().unwrap_or_else(|_| panic!("{name}={v} is no number")))
}
