//! Meshes of processes, one of which is killed, or was started wrongly: what the others are told, and that they come to an end.

use std::path::Path;
use std::time::{Duration, Instant};

use railhead::base::config::{Config, Debug};
use railhead::base::error::Result;
use railhead::base::mem::UserMemory;
use railhead::mesh::{Algorithm, Buffer, DataType, Device, Mesh, Op, Options, Reduction, UnboundBuffer};
use railhead::store::tcp::{Host, Server, ServerOptions, TcpOptions};
use railhead::store::{FileStore, TcpStore};

use crate::support::{Ctx, PATIENCE, Random, Ranks, Role, World, repeats, seed};

pub const ROLES: &[(&str, Role)] = &[
    ("mesh_works", works),
    ("mesh_meets", meets),
    ("mesh_goes_on", goes_on),
    ("mesh_forks", forks),
    ("mesh_runs_out", runs_out),
    ("mesh_is_short", is_short),
    ("mesh_lacks_memory", lacks_memory),
];

/// How long the others may take to notice that a rank was killed.
const NOTICED: Duration = Duration::from_secs(3);
/// What is done by the fewest steps, and what takes a while.
pub const LENS: [usize; 2] = [8, 4 << 20];
const ALL: [&str; 14] = [
    "allreduce",
    "allreduce by ring",
    "allreduce by halving",
    "reduce",
    "reduce_scatter",
    "broadcast",
    "allgather",
    "alltoall",
    "gather",
    "scatter",
    "barrier",
    "message",
    "slot",
    "fork",
];

pub fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

pub fn number(name: &str) -> u64 {
    variable(name).parse().expect(name)
}

pub fn options(timeout: Duration) -> Options {
    Options { tag: 0, timeout, algorithm: Algorithm::Auto }
}

/// This process's end of a mesh, not connected.
pub fn mesh(rank: usize, size: usize) -> Mesh {
    let device = Device::open(Config::from_env_or(Debug::None), "").expect("a device");
    Mesh::new(device, rank, size).expect("a mesh")
}

/// Ranks that meet in a file of this folder.
pub fn world(role: &'static str, size: usize, folder: &Path, wire: &str) -> World {
    let world = World::new(role, size).env("RAILHEAD_SOCKET_IFNAME", "lo").env("RAILHEAD_SOFT_WIRE", wire);
    world.env("RHT_STORE", folder.join("store").to_str().expect("UTF-8"))
}

/// A rank that has met the others in a file.
pub fn connected(ctx: &Ctx) -> Mesh {
    let mesh = mesh(ctx.rank, ctx.size);
    mesh.connect(&FileStore::new(variable("RHT_STORE"), None).expect("a store"), PATIENCE).expect("connected");
    mesh
}

pub fn memory(bytes: &mut [u8]) -> UserMemory {
    // SAFETY: bytes of a rank's, which outlive its mesh and everything on it.
    unsafe { UserMemory::new(bytes.as_mut_ptr(), bytes.len()) }
}

/// What a rank does again and again.
struct Work<'a> {
    mesh: &'a Mesh,
    what: String,
    from: UserMemory,
    to: UserMemory,
    lens: Vec<usize>,
    timeout: Duration,
    message: UnboundBuffer,
    /// To the next rank, and from the one before.
    slot: (Buffer, Buffer),
}

impl<'a> Work<'a> {
    fn new(mesh: &'a Mesh, from: &mut [u8], to: &mut [u8]) -> Work<'a> {
        let (rank, size, from, to) = (mesh.rank(), mesh.size(), memory(from), memory(to));
        let part = |rank: usize| from.len() * (rank + 1) / size - from.len() * rank / size;
        let send = Buffer::send_to(mesh, (rank + 1) % size, 7, from).expect("a buffer");
        let recv = Buffer::recv_from(mesh, (rank + size - 1) % size, 7, to).expect("a buffer");
        Work {
            mesh,
            what: variable("RHT_WHAT"),
            from,
            to,
            lens: (0..size).map(part).collect(),
            timeout: Duration::from_millis(number("RHT_TIMEOUT_MS")),
            message: UnboundBuffer::new(mesh, to).expect("a buffer"),
            slot: (send, recv),
        }
    }

    fn once(&self) -> Result<()> {
        let Work { mesh, from, to, lens, timeout, .. } = self;
        let (rank, size, own, options) = (mesh.rank(), mesh.size(), lens[mesh.rank()], options(*timeout));
        let (at, sum) = (lens[..rank].iter().sum(), Reduction::Of(DataType::U8, Op::Sum));
        let mine = from.part(at, own).expect("a part");
        let (next, last) = ((rank + 1) % size, (rank + size - 1) % size);
        match &*self.what {
            "allreduce" => mesh.allreduce(*to, sum, options),
            "allreduce by ring" => mesh.allreduce(*to, sum, Options { algorithm: Algorithm::Ring, ..options }),
            "allreduce by halving" => mesh.allreduce(*to, sum, Options { algorithm: Algorithm::Halving, ..options }),
            "reduce" => mesh.reduce(*from, *to, sum, 0, options),
            "reduce_scatter" => mesh.reduce_scatter(*from, to.part(at, own).expect("a part"), lens, sum, options),
            "broadcast" => mesh.broadcast(*to, 0, options),
            "allgather" => mesh.allgather(mine, *to, lens, options),
            "alltoall" => {
                let even = vec![from.len() / size; size];
                let all = |memory: &UserMemory| memory.part(0, even.iter().sum()).expect("a part");
                mesh.alltoall(all(from), all(to), &even, &even, options)
            }
            "gather" => mesh.gather(mine, *to, lens, 0, options),
            "scatter" => mesh.scatter(*from, to.part(at, own).expect("a part"), lens, 0, options),
            "barrier" => mesh.barrier(options),
            "message" => {
                self.message.recv(&[last], 1, 0, None)?;
                self.message.send(next, 1, 0, None)?;
                self.message.wait_recv(*timeout)?;
                self.message.wait_send(*timeout).map(|_| ())
            }
            "slot" => {
                self.slot.0.send(0, None, 0)?;
                self.slot.1.wait_recv(*timeout)?;
                self.slot.0.wait_send(*timeout).map(|_| ())
            }
            "fork" => mesh.fork(*timeout).map(drop),
            other => panic!("no work is called {other}"),
        }
    }
}

/// Ends this process after so long, whatever its other threads are at.
fn die_after(delay: Duration) {
    let start = Instant::now();
    std::thread::spawn(move || {
        while start.elapsed() < delay {
            std::hint::spin_loop();
        }
        // SAFETY: this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    });
}

/// Works until something fails, and says what. Rank RHT_VICTIM ends itself somewhere within one of its rounds. Who has failed stays, with its mesh, until
/// it is told to go; with RHT_LEAVES it closes that at once.
fn works(ctx: &Ctx) {
    let len = number("RHT_LEN") as usize;
    let (mut from, mut to) = (vec![1; len], vec![1; len]);
    let mut random = Random(number("RHT_SEED"));
    let rounds = 1 + random.below(if len > 1 << 16 { 6 } else { 100 });
    let share = random.below(1000) as f64 / 600.0;
    let mesh = connected(ctx);
    mesh.set_sync(variable("RHT_SYNC") == "1");
    let work = Work::new(&mesh, &mut from, &mut to);
    // The others may be further already, and one of them gone.
    let first = mesh.barrier(options(PATIENCE)).err();
    ctx.say("works");
    let mut last = Duration::ZERO;
    let error = first.or_else(|| {
        (0..).find_map(|round| {
            if number("RHT_VICTIM") == ctx.rank as u64 && round == rounds {
                die_after(last.mul_f64(share));
            }
            let start = Instant::now();
            let failed = work.once().err();
            last = start.elapsed();
            failed
        })
    });
    // First: a rank that is stopped in the middle of a copy into this one's memory holds up its close.
    ctx.say(&error.expect("an error").to_string());
    if variable("RHT_LEAVES") == "1" {
        mesh.close();
    }
    assert_eq!(ctx.parent.text(), "go");
    let start = Instant::now();
    drop(work);
    drop(mesh);
    assert!(start.elapsed() < PATIENCE / 4, "closing took {:?}", start.elapsed());
}

/// What ranks do, and how many they are.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub what: &'static str,
    pub len: usize,
    pub wire: &'static str,
    pub ranks: usize,
    /// Whether those that wait never sleep.
    pub sync: bool,
}

/// Those ranks; one of them ends itself at a place that follows from the seed.
pub fn working(case: Case, folder: &Path, victim: Option<usize>, seed: u64, timeout: Duration) -> World {
    let Case { what, len, wire, ranks, sync } = case;
    let world = world("mesh_works", ranks, folder, wire).env("RHT_WHAT", what).env("RHT_LEN", &len.to_string());
    let world = world.env("RHT_VICTIM", &victim.unwrap_or(ranks).to_string()).env("RHT_SEED", &seed.to_string());
    let world = world.env("RHT_LEAVES", &(seed % 2).to_string()).env("RHT_TIMEOUT_MS", &timeout.as_millis().to_string());
    world.env("RHT_SYNC", if sync { "1" } else { "0" })
}

/// Starts them; returns once all work.
pub fn start(world: World) -> Ranks {
    let mut ranks = world.spawn();
    (0..ranks.ranks.len()).for_each(|rank| ranks.expect(rank, "works"));
    ranks
}

/// Lets them go; they end well.
pub fn end(mut ranks: Ranks, of: impl IntoIterator<Item = usize>) {
    for rank in of {
        ranks.tell(rank, "go");
        let status = ranks.ranks[rank].wait();
        assert!(status.success(), "rank {rank}: {status}");
    }
}

fn kill_one(case: Case, seed: u64) {
    // Who waits for a message of another rank learns of a third one's loss when that one leaves.
    let seed = if matches!(case.what, "message" | "slot") { seed | 1 } else { seed };
    let folder = tempfile::tempdir().expect("a folder");
    let victim = (seed >> 1) as usize % case.ranks;
    let mut ranks = start(working(case, folder.path(), Some(victim), seed, PATIENCE));
    let others = (0..case.ranks).filter(|rank| *rank != victim);
    let case = format!("{case:?}, seed {seed}");
    let last = ranks.ranks[victim].chan.recv_within(PATIENCE);
    assert!(last.is_err(), "{case}: rank {victim} fails by itself: {}", String::from_utf8_lossy(&last.unwrap_or_default()));
    assert!(!ranks.ranks[victim].wait().success());
    let killed = Instant::now();
    for rank in others.clone() {
        let left = NOTICED.saturating_sub(killed.elapsed());
        let chan = &ranks.ranks[rank].chan;
        let said = chan.recv_within(left).unwrap_or_else(|e| {
            let late = chan.recv_within(PATIENCE).map(|said| String::from_utf8_lossy(&said).into_owned());
            panic!("{case}: rank {rank} of rank {victim}: {e}; after {:.1} s: {late:?}", killed.elapsed().as_secs_f64())
        });
        let said = String::from_utf8_lossy(&said).into_owned();
        // Itself, or as the one for which another has left.
        let named = said.starts_with(&format!("rank {victim}: ")) || said.ends_with(&format!("as rank {victim} is lost"));
        assert!(named, "{case}: rank {rank} of rank {victim}: {said}");
    }
    end(ranks, others);
}

/// In every collective, somewhere in it, among two to four ranks.
fn kills(wire: &'static str) {
    let mut random = Random(seed());
    for _ in 0..repeats(2, 50) {
        for what in ALL {
            for len in LENS {
                let ranks = if what == "allreduce by halving" { 4 } else { 2 + random.below(3) as usize };
                // Who polls without end needs a processor, and in `make soak` alone has one: nothing runs beside it there.
                let sync = random.below(4) == 0 && (ranks == 2 || repeats(0, 1) > 0);
                kill_one(Case { what, len, wire, ranks, sync }, random.next() >> 1);
            }
        }
    }
}

#[test]
fn all_others_name_the_rank_that_was_killed_on_shared_memory() {
    kills("shm");
}

#[test]
fn all_others_name_the_rank_that_was_killed_on_tcp() {
    kills("tcp");
}

/// Leaves this process room for so many descriptors more.
fn leave_descriptors(more: usize) {
    // One of them is that of the folder.
    let open = std::fs::read_dir("/proc/self/fd").expect("descriptors").count() - 1;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for the limit, and the limit.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = (open + more) as libc::rlim_t;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
}

/// Forks a mesh; rank 1 has few descriptors left for it. It says how that ended, and what becomes of the mesh.
fn forks(ctx: &Ctx) {
    let mesh = connected(ctx);
    mesh.barrier(options(PATIENCE)).expect("all are here");
    if ctx.rank == 1 {
        leave_descriptors(3);
    }
    let forked = mesh.fork(PATIENCE).map(drop);
    let then = mesh.barrier(options(PATIENCE));
    let words = |result: Result<()>| result.map_or_else(|error| error.to_string(), |()| "done".into());
    ctx.say(&format!("{}; {}", words(forked), words(then)));
    assert_eq!(ctx.parent.text(), "go");
}

/// As they cannot go on without it.
#[test]
fn a_rank_that_cannot_fork_tells_the_others() {
    for wire in ["shm", "tcp"] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ranks = world("mesh_forks", 3, folder.path(), wire).spawn();
        let said: Vec<String> = (0..3).map(|rank| ranks.hear(rank)).collect();
        assert!(said[1].starts_with("3 ranks: the pairs and the scratch memory of rank 1 take "), "{said:?}");
        // Of the one that cannot, or of the other, which has heard first.
        let heard = |other: usize, of: usize| said[other].starts_with(&format!("rank {of}: it has closed its mesh; rank {of}: "));
        assert!(heard(0, 1) && (heard(2, 1) || heard(2, 0)) || heard(0, 2) && heard(2, 1), "{said:?}");
        end(ranks, 0..3);
    }
}

/// Forks, and rank 1 has but RHT_LEFT descriptors left once it has begun, as another thread takes them.
fn runs_out(ctx: &Ctx) {
    let mesh = connected(ctx);
    mesh.fork(PATIENCE).map(drop).expect("a first fork");
    if ctx.rank == 1 {
        // All that a fork takes, or it does not begin.
        leave_descriptors(ctx.size - 1 + 8 + 2);
    }
    mesh.barrier(options(PATIENCE)).expect("all are here");
    let forked = std::thread::scope(|scope| {
        if ctx.rank == 1 {
            let left = number("RHT_LEFT") as usize;
            let count = || std::fs::read_dir("/proc/self/fd").map_or(0, |all| all.count());
            let before = count();
            scope.spawn(move || {
                let end = Instant::now() + PATIENCE / 4;
                while count() <= before && Instant::now() < end {}
                let mut files: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
                files.truncate(files.len().saturating_sub(left));
                std::mem::forget(files);
            });
        }
        mesh.fork(PATIENCE).map(drop)
    });
    ctx.say(&forked.map_or_else(|error| error.to_string(), |()| "done".into()));
    assert_eq!(ctx.parent.text(), "go");
}

/// It is the one that is short; nobody says that another is lost, or waits for long.
#[test]
fn a_rank_that_runs_out_of_descriptors_while_it_forks_blames_nobody() {
    let mut short = 0;
    for (wire, left) in (0..4).flat_map(|left| [("shm", left), ("tcp", left)]) {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ranks = world("mesh_runs_out", 3, folder.path(), wire).env("RHT_LEFT", &left.to_string()).spawn();
        let said: Vec<String> = (0..3).map(|rank| ranks.hear(rank)).collect();
        let wrong = |said: &String| ["as rank 0 is", "as rank 2 is", "has not connected in"].iter().any(|words| said.contains(words));
        assert!(!said.iter().any(wrong), "{wire}, {left} left: {said:#?}");
        if said[1].contains("descriptor") {
            assert!(said[1].ends_with("(os error 24)"), "{wire}, {left} left: {said:#?}");
            short += 1;
        }
        end(ranks, 0..3);
    }
    assert!(short > 0, "it was never short");
}

/// Says how it ends to connect with RHT_LEFT descriptors left, and then to compute.
fn is_short(ctx: &Ctx) {
    let mesh = mesh(ctx.rank, ctx.size);
    let store = FileStore::new(variable("RHT_STORE"), None).expect("a store");
    // The file is opened and closed again and again.
    leave_descriptors(number("RHT_LEFT") as usize);
    let connected = mesh.connect(&store, PATIENCE);
    let mut bytes = vec![1; 4 << 20];
    let result = connected.and_then(|()| mesh.allreduce(memory(&mut bytes), Reduction::Of(DataType::U8, Op::Sum), options(PATIENCE)));
    ctx.say(&result.map_or_else(|error| error.to_string(), |()| "done".into()));
    assert_eq!(ctx.parent.text(), "go");
}

/// Before it begins, and with what a first collective takes.
#[test]
fn a_rank_with_too_few_descriptors_says_how_many_it_lacks() {
    let folder = tempfile::tempdir().expect("a folder");
    // Two for each pair, and eight.
    let mut ranks = world("mesh_is_short", 2, folder.path(), "shm").env("RHT_LEFT", "8").spawn();
    for rank in 0..2 {
        let said = ranks.hear(rank);
        let told = said.starts_with(&format!("2 ranks: the pairs and the scratch memory of rank {rank} take "))
            && said.contains(", and 8 are left");
        assert!(told, "{said}");
    }
    end(ranks, 0..2);
    let folder = tempfile::tempdir().expect("a folder");
    let mut ranks = world("mesh_is_short", 2, folder.path(), "shm").env("RHT_LEFT", "20").spawn();
    (0..2).for_each(|rank| ranks.expect(rank, "done"));
    end(ranks, 0..2);
}

/// Connects, on a rank 1 whose address space ends soon.
fn lacks_memory(ctx: &Ctx) {
    const MORE: u64 = 40 << 20;
    let mesh = mesh(ctx.rank, ctx.size);
    let store = FileStore::new(variable("RHT_STORE"), None).expect("a store");
    if ctx.rank == 1 {
        let pages = std::fs::read_to_string("/proc/self/statm").expect("statm");
        let pages: u64 = pages.split(' ').next().and_then(|n| n.parse().ok()).expect("pages");
        // SAFETY: the limit, and a place for it.
        unsafe {
            let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            assert_eq!(libc::getrlimit(libc::RLIMIT_AS, &mut limit), 0);
            limit.rlim_cur = pages * libc::sysconf(libc::_SC_PAGESIZE) as u64 + MORE;
            assert_eq!(libc::setrlimit(libc::RLIMIT_AS, &limit), 0);
        }
    }
    let connected = mesh.connect(&store, PATIENCE);
    ctx.say(&connected.map_or_else(|error| error.to_string(), |()| "done".into()));
    assert_eq!(ctx.parent.text(), "go");
}

/// Whether it makes the memory of a pair or maps that of its peer.
#[test]
fn a_rank_that_has_no_memory_for_its_pairs_says_so() {
    for round in 0..repeats(2, 20) {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ranks = world("mesh_lacks_memory", 3, folder.path(), "shm").env("RAILHEAD_SHM_BOUNCE_KIB", "65536").spawn();
        let said: Vec<String> = (0..3).map(|rank| ranks.hear(rank)).collect();
        let short =
            "no memory left for shared memory with the peer, and RAILHEAD_SOFT_WIRE=shm allows nothing else: Cannot allocate memory";
        assert!(said[1].contains(short), "round {round}: {said:#?}");
        for other in [0, 2] {
            assert!(said[other].starts_with("rank 1: ") && said[other].contains("Cannot allocate memory"), "round {round}: {said:#?}");
        }
        end(ranks, 0..3);
    }
}

/// Does its part of one small reduction, the first thing on the mesh, and then something else.
fn goes_on(ctx: &Ctx) {
    let (mut from, mut to) = ([1; 8], [0; 8]);
    let mesh = connected(ctx);
    let sum = Reduction::Of(DataType::U8, Op::Sum);
    let reduced = mesh.reduce(memory(&mut from), memory(&mut to), sum, 0, options(Duration::from_secs(10)));
    ctx.say(&reduced.map_or_else(|error| error.to_string(), |()| "done".into()));
    assert_eq!(ctx.parent.text(), "go");
    assert!(ctx.rank > 0 || to == [ctx.size as u8; 8]);
}

/// What a collective has sent when it returns comes to the others, though the rank does not come back to the mesh.
#[test]
fn a_rank_whose_part_is_done_need_not_wait_for_the_others() {
    for round in 0..repeats(12, 200) {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ranks = world("mesh_goes_on", 6, folder.path(), ["tcp", "shm"][round % 2]).spawn();
        (0..6).for_each(|rank| ranks.expect(rank, "done"));
        end(ranks, 0..6);
    }
}

/// All but the last rank of the world, which is the server, meet there as ranks of RHT_RANKS, and say how that ended, or the first barrier. Rank
/// RHT_VICTIM ends itself meanwhile.
fn meets(ctx: &Ctx) {
    if ctx.rank == ctx.size - 1 {
        let server = Server::start(ServerOptions { port: 0, ..ServerOptions::default() }).expect("a server");
        (0..ctx.rank).for_each(|rank| ctx.to(rank).send(server.port().to_string().as_bytes()).expect("a rank"));
        assert_eq!(ctx.parent.text(), "go");
        return;
    }
    let port = String::from_utf8(ctx.to(ctx.size - 1).recv()).expect("text").parse().expect("a port");
    let tcp = TcpOptions { timeout: PATIENCE, ..TcpOptions::default() };
    let store = TcpStore::new(Host::Other("localhost".into(), port), tcp).expect("the server");
    let (mesh, timeout) = (mesh(ctx.rank, number("RHT_RANKS") as usize), Duration::from_millis(number("RHT_TIMEOUT_MS")));
    ctx.say("meets");
    if number("RHT_VICTIM") == ctx.rank as u64 {
        die_after(Duration::from_micros(number("RHT_DELAY_US")));
    }
    let failed = mesh.connect(&store, timeout).err();
    let failed = failed.or_else(|| (0..).find_map(|_| mesh.barrier(options(timeout)).err()));
    ctx.say(&failed.expect("an error").to_string());
    assert_eq!(ctx.parent.text(), "go");
}

fn meeting(wire: &str, sizes: &[usize], timeout: Duration, victim: Option<(usize, u64)>) -> Ranks {
    let world = World::new("mesh_meets", sizes.len() + 1).env("RAILHEAD_SOCKET_IFNAME", "lo").env("RAILHEAD_SOFT_WIRE", wire);
    let world = sizes.iter().enumerate().fold(world, |world, (rank, size)| world.env_of(rank, "RHT_RANKS", &size.to_string()));
    let (victim, delay) = victim.unwrap_or((sizes.len(), 0));
    let world = world.env("RHT_VICTIM", &victim.to_string()).env("RHT_DELAY_US", &delay.to_string());
    let mut ranks = world.env("RHT_TIMEOUT_MS", &timeout.as_millis().to_string()).spawn();
    (0..sizes.len()).for_each(|rank| ranks.expect(rank, "meets"));
    ranks
}

/// By those who wait for it, when the time is over or, once they have met, at once. Another may hear first that one of those has given up.
#[test]
fn a_rank_that_is_killed_while_ranks_connect_is_named() {
    let mut random = Random(seed());
    for round in 0..repeats(6, 100) {
        let (wire, victim, delay) = (["shm", "tcp"][round % 2], random.below(3) as usize, random.below(8000));
        let mut ranks = meeting(wire, &[3; 3], Duration::from_millis(1500), Some((victim, delay)));
        let others: Vec<usize> = (0..3).filter(|rank| *rank != victim).collect();
        let said: Vec<String> = others.iter().map(|rank| ranks.hear(*rank)).collect();
        let name = |rank: usize| said.iter().filter(|said| said.contains(&format!("rank {rank}"))).count();
        let case = format!("{wire}, rank {victim} after {delay} us: {said:?}");
        assert!(name(victim) > 0 && said.iter().all(|said| said.starts_with("rank ") || said.starts_with("barrier: ")), "{case}");
        end(ranks, others.into_iter().chain([3]));
    }
}

/// Long before the ranks would have given up.
#[test]
fn a_store_that_dies_while_ranks_connect_is_an_error_at_once() {
    let mut ranks = meeting("auto", &[3, 3], 4 * PATIENCE, None);
    ranks.ranks[2].signal(libc::SIGKILL);
    for rank in 0..2 {
        let said = ranks.hear(rank);
        assert!(said.starts_with("the store in which the ranks meet: "), "rank {rank}: {said}");
    }
    end(ranks, 0..2);
}

#[test]
fn a_rank_of_another_size_is_told_on_both_sides() {
    for (sizes, wire) in [([2, 3], "shm"), ([3, 2], "tcp"), ([4, 3], "auto")] {
        let mut ranks = meeting(wire, &sizes, PATIENCE, None);
        for rank in 0..2 {
            let (said, other) = (ranks.hear(rank), 1 - rank);
            let told = said.starts_with(&format!("rank {other}: ")) && said.contains(&format!("{} ranks", sizes[other]));
            assert!(told, "rank {rank} of {sizes:?}: {said}");
        }
        end(ranks, 0..3);
    }
}
