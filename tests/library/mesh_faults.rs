//! Meshes of processes, one of which is killed or stopped, or was started wrongly: what the others are told, and that they come to an end.

use std::path::Path;
use std::time::{Duration, Instant};

use railhead::base::config::{Config, Debug};
use railhead::base::error::Result;
use railhead::base::mem::UserMemory;
use railhead::mesh::{Algorithm, Buffer, DataType, Device, Mesh, Op, Options, Reduction, UnboundBuffer};
use railhead::store::tcp::{Host, Server, ServerOptions, TcpOptions};
use railhead::store::{FileStore, TcpStore};

use crate::support::{Ctx, PATIENCE, Random, Ranks, Role, World, repeats, seed};

pub const ROLES: &[(&str, Role)] = &[("mesh_works", works), ("mesh_meets", meets), ("mesh_goes_on", goes_on)];

/// How long the others may take to notice that a rank was killed.
const NOTICED: Duration = Duration::from_secs(3);
const RANKS: usize = 3;
/// What is done by the fewest steps, and what takes a while.
const LENS: [usize; 2] = [8, 4 << 20];
const ALL: [&str; 11] =
    ["allreduce", "reduce", "reduce_scatter", "broadcast", "allgather", "alltoall", "gather", "scatter", "barrier", "message", "slot"];

pub fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name} is not set"))
}

fn number(name: &str) -> u64 {
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
    if variable("RHT_LEAVES") == "1" {
        mesh.close();
    }
    ctx.say(&error.expect("an error").to_string());
    assert_eq!(ctx.parent.text(), "go");
    let start = Instant::now();
    drop(work);
    drop(mesh);
    assert!(start.elapsed() < PATIENCE / 4, "closing took {:?}", start.elapsed());
}

fn start(what: &str, len: usize, wire: &str, folder: &Path, victim: Option<usize>, seed: u64, timeout: Duration) -> Ranks {
    let world = world("mesh_works", RANKS, folder, wire).env("RHT_WHAT", what).env("RHT_LEN", &len.to_string());
    let world = world.env("RHT_VICTIM", &victim.unwrap_or(RANKS).to_string()).env("RHT_SEED", &seed.to_string());
    let world = world.env("RHT_LEAVES", &(seed % 2).to_string()).env("RHT_TIMEOUT_MS", &timeout.as_millis().to_string());
    let mut ranks = world.spawn();
    (0..RANKS).for_each(|rank| ranks.expect(rank, "works"));
    ranks
}

fn end(mut ranks: Ranks, of: impl IntoIterator<Item = usize>) {
    for rank in of {
        ranks.tell(rank, "go");
        let status = ranks.ranks[rank].wait();
        assert!(status.success(), "rank {rank}: {status}");
    }
}

fn kill_one(what: &str, len: usize, wire: &str, seed: u64) {
    // Who waits for a message of another rank learns of a third one's loss when that one leaves.
    let seed = if matches!(what, "message" | "slot") { seed | 1 } else { seed };
    let folder = tempfile::tempdir().expect("a folder");
    let victim = (seed >> 1) as usize % RANKS;
    let case = format!("{what}, {len} bytes over {wire}, seed {seed}");
    let mut ranks = start(what, len, wire, folder.path(), Some(victim), seed, PATIENCE);
    assert!(!ranks.ranks[victim].wait().success());
    let killed = Instant::now();
    for rank in (0..RANKS).filter(|rank| *rank != victim) {
        let left = NOTICED.saturating_sub(killed.elapsed());
        let said = ranks.ranks[rank].chan.recv_within(left).unwrap_or_else(|e| panic!("{case}: rank {rank} of rank {victim}: {e}"));
        let said = String::from_utf8_lossy(&said).into_owned();
        // Itself, or as the one for which another has left.
        let named = said.starts_with(&format!("rank {victim}: ")) || said.ends_with(&format!("as rank {victim} is lost"));
        assert!(named, "{case}: rank {rank} of rank {victim}: {said}");
    }
    end(ranks, (0..RANKS).filter(|rank| *rank != victim));
}

/// In every collective, somewhere in it.
fn kills(wire: &str) {
    let mut random = Random(seed());
    for _ in 0..repeats(3, 50) {
        for what in ALL {
            for len in LENS {
                kill_one(what, len, wire, random.next() >> 1);
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

/// When it goes on, it is told of the others, and everybody comes to an end.
#[test]
fn a_wait_for_a_rank_that_is_stopped_names_it_when_its_time_is_over() {
    const STOPPED: usize = 1;
    for (wire, len) in [("shm", LENS[0]), ("tcp", LENS[1])] {
        for what in ["allreduce", "barrier", "message"] {
            let folder = tempfile::tempdir().expect("a folder");
            // Seed 1: who has failed closes its mesh.
            let mut ranks = start(what, len, wire, folder.path(), None, 1, Duration::from_millis(500));
            ranks.ranks[STOPPED].signal(libc::SIGSTOP);
            let said: Vec<String> = [0, 2].map(|rank| ranks.hear(rank)).into();
            // One of them may wait for the other alone, and for that only until it leaves.
            let named = |said: &String| said.contains(" waited for 0.5 s for ") && said.contains(&format!("rank {STOPPED}"));
            assert!(said.iter().any(named), "{what}, {len} bytes over {wire}: {said:?}");
            ranks.ranks[STOPPED].signal(libc::SIGCONT);
            // Its own time is over, too, if it has waited.
            let told = ranks.hear(STOPPED);
            assert!(told.contains("rank 0") || told.contains("rank 2"), "{what}, {len} bytes over {wire}: {told}");
            end(ranks, 0..RANKS);
        }
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
