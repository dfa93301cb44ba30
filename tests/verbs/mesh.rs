//! Meshes whose ranks are threads, on the libibverbs that is only memory: what the mesh asks of a device, and a request that fails.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use railhead::base::config::{Config, Fabric};
use railhead::base::log::{self, Level};
use railhead::base::mem::UserMemory;
use railhead::mesh::{Algorithm, Buffer, DataType, Device, Mesh, Op, Options, Reduction, UnboundBuffer, Waited};
use railhead::store::HashStore;

use super::fake_ibverbs::{Control, Fake, NEWEST};

const TIMEOUT: Duration = Duration::from_secs(60);
/// `ibv_wc_status` of a peer that does not answer (rdma-core v55 libibverbs/verbs.h).
const RETRY_EXC_ERR: i64 = 12;

#[track_caller]
fn inside(name: &str) -> super::fake_ibverbs::Ran {
    let ran = Fake::new(NEWEST).run_all(&["--exact", &format!("mesh::{name}"), "--test-threads=1"]);
    ran.says("1 passed");
    ran
}

#[test]
fn ranks_compute_and_exchange() {
    inside("all_that_ranks_do");
}

#[test]
fn a_request_that_fails_names_the_rank() {
    inside("a_request_fails");
}

#[test]
fn a_request_that_fails_wakes_who_sleeps() {
    inside("a_request_fails_while_a_rank_sleeps");
}

#[test]
fn nothing_is_posted_to_a_rank_that_has_not_connected() {
    inside("one_connects_late");
}

#[test]
fn ranks_that_meet_with_one_that_has_given_up_are_told() {
    inside("one_gives_up");
}

fn options(tag: u32) -> Options {
    Options { algorithm: Algorithm::Auto, tag, timeout: TIMEOUT }
}

/// Ranks on these devices, by turns.
fn ranks(devices: &[&str], size: usize, f: impl Fn(Mesh) + Sync) {
    log::set_stderr(Level::Warn);
    let store = HashStore::new();
    std::thread::scope(|scope| {
        for rank in 0..size {
            let (store, f) = (&store, &f);
            let config = Config { fabric: Fabric::Verbs, ..Config::from_env() };
            let device = Device::open(config, devices[rank % devices.len()]).expect("a device");
            scope.spawn(move || {
                let mesh = Mesh::new(device, rank, size).expect("a mesh");
                mesh.connect(store, TIMEOUT).expect("connected");
                f(mesh);
            });
        }
    });
}

fn memory(of: &mut [u32]) -> UserMemory {
    // SAFETY: the numbers outlive whatever they are given to.
    unsafe { UserMemory::new(of.as_mut_ptr().cast(), size_of_val(of)) }
}

fn sums(mesh: &Mesh, count: usize, tag: u32) {
    let mut numbers: Vec<u32> = (0..count).map(|i| (i + mesh.rank()) as u32).collect();
    mesh.allreduce(memory(&mut numbers), Reduction::Of(DataType::U32, Op::Sum), options(tag)).expect("allreduce");
    let expected = |i: usize| (0..mesh.size()).map(|rank| (i + rank) as u32).sum::<u32>();
    assert!(numbers.iter().enumerate().all(|(i, number)| *number == expected(i)));
}

#[test]
#[ignore = "needs the fake libibverbs"]
fn all_that_ranks_do() {
    let control = Control::new();
    for (devices, size) in [(&["fake0"][..], 2), (&["fake0", "fake1"], 3), (&["fake0+fake1"], 2)] {
        ranks(devices, size, |mesh| {
            let (rank, next, last) = (mesh.rank(), (mesh.rank() + 1) % size, (mesh.rank() + size - 1) % size);
            [1, 1000, 600_001].into_iter().for_each(|count| sums(&mesh, count, 0));
            mesh.barrier(options(0)).expect("barrier");
            // Messages, long and short, from any rank; and into the slot of a buffer.
            for len in [8, 200_000usize] {
                let (mut out, mut back) = (vec![rank as u32; len / 4], vec![99; len / 4]);
                let (from, to) =
                    (UnboundBuffer::new(&mesh, memory(&mut out)).unwrap(), UnboundBuffer::new(&mesh, memory(&mut back)).unwrap());
                let others: Vec<usize> = (0..size).filter(|other| *other != rank).collect();
                from.send(next, 7, 0, None).expect("send");
                to.recv(if len == 8 { std::slice::from_ref(&last) } else { &others }, 7, 0, None).expect("recv");
                assert_eq!(to.wait_recv(TIMEOUT).expect("wait_recv"), Waited::Done { rank: last, len: len as u64 });
                from.wait_send(TIMEOUT).expect("wait_send");
                to.close(TIMEOUT).expect("close");
                from.close(TIMEOUT).expect("close");
                assert!(back.iter().all(|number| *number == last as u32));
                back.fill(99);
                let (sends, receives) = (
                    Buffer::send_to(&mesh, next, 5, memory(&mut out)).unwrap(),
                    Buffer::recv_from(&mesh, last, 5, memory(&mut back)).unwrap(),
                );
                sends.send(0, None, 0).expect("send");
                receives.wait_recv(TIMEOUT).expect("wait_recv");
                sends.wait_send(TIMEOUT).expect("wait_send");
                receives.close(TIMEOUT).expect("close");
                sends.close(TIMEOUT).expect("close");
                assert!(back.iter().all(|number| *number == last as u32));
                mesh.barrier(options(0)).expect("barrier");
            }
            let second = mesh.fork(TIMEOUT).expect("fork");
            sums(&second, 5000, 0);
            second.barrier(options(0)).expect("barrier");
            mesh.barrier(options(0)).expect("barrier");
        });
        let left = ["mrs", "qps", "cqs", "pds", "violations"].map(|name| control.get(name));
        assert_eq!(left, [0; 5], "{devices:?}");
    }
}

#[test]
#[ignore = "needs the fake libibverbs"]
fn a_request_fails() {
    let control = Control::new();
    let computed = Barrier::new(2);
    ranks(&["fake0", "fake1"], 2, |mesh| {
        sums(&mesh, 1000, 0);
        computed.wait();
        if mesh.rank() == 0 {
            control.set("status", RETRY_EXC_ERR);
        }
        computed.wait();
        let mut numbers = vec![0; 1000];
        let error = mesh.allreduce(memory(&mut numbers), Reduction::Of(DataType::U32, Op::Sum), options(0)).expect_err("a failed request");
        assert!(error.to_string().contains(&format!("rank {}: ", 1 - mesh.rank())), "{error}");
        computed.wait();
    });
}

/// Nothing of it is heard on a NIC but by asking, as the peer's process lives.
#[test]
#[ignore = "needs the fake libibverbs"]
fn a_request_fails_while_a_rank_sleeps() {
    let control = Control::new();
    let (waits, over) = (Barrier::new(2), Barrier::new(2));
    ranks(&["fake0", "fake1"], 2, |mesh| {
        mesh.barrier(options(0)).expect("barrier");
        // SAFETY: a number.
        let thread = unsafe { libc::gettid() };
        if mesh.rank() == 1 {
            waits.wait();
            over.wait();
            return;
        }
        let (control, waits, arms) = (&control, &waits, control.get("arms"));
        std::thread::scope(|scope| {
            scope.spawn(move || {
                waits.wait();
                let status = format!("/proc/self/task/{thread}/status");
                let asleep = || std::fs::read_to_string(&status).is_ok_and(|status| status.contains("State:\tS"));
                let end = Instant::now() + TIMEOUT;
                while !(asleep() && control.get("arms") > arms) {
                    assert!(Instant::now() < end, "it does not sleep");
                    std::thread::yield_now();
                }
                control.set("status", RETRY_EXC_ERR);
            });
            let error = mesh.barrier(Options { timeout: Duration::from_secs(10), ..options(0) }).expect_err("a failed request");
            over.wait();
            assert!(error.to_string().starts_with("rank 1: "), "{error}");
        });
    });
}

/// To one that has a buffer, and so a thread that looks after its mesh while the other is late.
#[test]
#[ignore = "needs the fake libibverbs"]
fn one_connects_late() {
    log::set_stderr(Level::Warn);
    let control = Control::new();
    let device = || Device::open(Config { fabric: Fabric::Verbs, ..Config::from_env() }, "fake0").expect("a device");
    let meshes = [0, 1].map(|rank| Mesh::new(device(), rank, 2).expect("a mesh"));
    let [of_0, of_1] = [0, 1].map(|rank: usize| meshes[rank].address(1 - rank).expect("an address"));
    let mut word = [0];
    let buffer = UnboundBuffer::new(&meshes[0], memory(&mut word)).expect("a buffer");
    meshes[0].connect_pair(1, &of_1).expect("connected");
    // Longer than two looks a second apart, the second of which would ask.
    let end = Instant::now() + Duration::from_millis(2500);
    while Instant::now() < end && control.get("requests") == 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(control.get("requests"), 0, "a NIC gives up on a rank that is not there yet");
    meshes[1].connect_pair(0, &of_0).expect("connected");
    drop(buffer);
    std::thread::scope(|scope| meshes.iter().for_each(|mesh| drop(scope.spawn(|| sums(mesh, 5000, 0)))));
}

/// Queue pairs of a device are connected at once, whether or not there is a peer.
#[test]
#[ignore = "needs the fake libibverbs"]
fn one_gives_up() {
    let store = HashStore::new();
    let connect = |rank: usize, timeout: Duration| {
        let device = Device::open(Config { fabric: Fabric::Verbs, ..Config::from_env() }, "fake0").expect("a device");
        Mesh::new(device, rank, 3).expect("a mesh").connect(&store, timeout).map_err(|error| error.to_string())
    };
    let why = connect(0, Duration::from_millis(50)).expect_err("the others do not come");
    assert!(why.starts_with("rank 1 has not come: "), "{why}");
    std::thread::scope(|scope| {
        let others = [1, 2].map(|rank| scope.spawn(move || connect(rank, TIMEOUT)));
        for other in others {
            assert_eq!(other.join().expect("no panic"), Err(why.clone()));
        }
    });
}
