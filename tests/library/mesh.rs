//! The mesh's C functions: the example as a user runs it, ranks that are killed, and wrong calls.

use std::ffi::{CStr, c_void};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

use railhead::abi::buffer::*;
use railhead::abi::collective::*;
use railhead::abi::mesh::*;
use railhead::abi::status::{railhead_last_error, railhead_status_t, railhead_status_t::*};
use railhead::abi::store::*;

use super::examples::{SANITIZE, make, sanitizers_work, skip, valgrind};
use crate::support::ports::own_port;

pub const WIRES: [&str; 2] = ["shm", "tcp"];

/// Ranks of an example that meet in a file.
pub fn start(program: &Path, wrapper: &[String], folder: &Path, wire: &str, ranks: usize, options: &[&str]) -> Vec<Child> {
    let start = |rank: usize| {
        let line: Vec<String> = wrapper.iter().cloned().chain([program.display().to_string()]).collect();
        let mut command = Command::new(&line[0]);
        command.args(&line[1..]).args(options);
        command.arg("--url").arg(format!("file://{}/store?rank={rank}&world_size={ranks}", folder.display()));
        command.env("RAILHEAD_SOCKET_IFNAME", "lo").env("RAILHEAD_SOFT_WIRE", wire);
        command.env("RAILHEAD_DEBUG", "warn").env("RAILHEAD_STALL_WARN_S", "0.3").env("RAILHEAD_DUMP_SIGNAL", "SIGUSR1");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the example starts")
    };
    (0..ranks).map(start).collect()
}

pub fn passes(ranks: Vec<Child>, says: &str) {
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().expect("the example ends");
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "rank {rank}: {}\n{text}", output.status);
        assert!(rank > 0 || text.contains(says), "{text}");
    }
}

#[test]
fn ranks_compute_sums_together() {
    let program = make("mesh", "").join("mesh_allreduce");
    for wire in WIRES {
        for elements in ["1", "1000", "1000003"] {
            let folder = tempfile::tempdir().expect("a folder");
            let ranks = start(&program, &[], folder.path(), wire, 3, &["--elements", elements, "--rounds", "5"]);
            passes(ranks, "5 rounds, no element wrong");
        }
    }
}

#[test]
fn ranks_exchange_buffers_and_messages() {
    let program = make("mesh", "").join("mesh_pair");
    for wire in WIRES {
        for (ranks, bytes) in [(2, "1"), (3, "65536"), (2, "3000001")] {
            let folder = tempfile::tempdir().expect("a folder");
            let ranks = start(&program, &[], folder.path(), wire, ranks, &["--bytes", bytes, "--messages", "50"]);
            passes(ranks, "no byte wrong");
        }
    }
}

/// Both examples, small, on both wires.
fn both_run(programs: &Path, wrapper: &[String], ranks: usize, elements: &str, messages: &str) {
    for wire in WIRES {
        let folder = tempfile::tempdir().expect("a folder");
        let options = ["--elements", elements, "--rounds", "2"];
        passes(start(&programs.join("mesh_allreduce"), wrapper, folder.path(), wire, ranks, &options), "no element wrong");
        let folder = tempfile::tempdir().expect("a folder");
        passes(start(&programs.join("mesh_pair"), wrapper, folder.path(), wire, ranks, &["--messages", messages]), "no byte wrong");
    }
}

#[test]
fn examples_run_under_sanitizers() {
    if !sanitizers_work() {
        return skip("the compiler has no AddressSanitizer here");
    }
    both_run(&make("mesh", SANITIZE), &[], 3, "100000", "20");
}

#[test]
fn examples_run_under_valgrind() {
    let Some(valgrind) = valgrind() else { return skip("valgrind is not installed") };
    both_run(&make("mesh", "-g"), &valgrind, 2, "10000", "3");
}

/// As the examples' first lines say.
#[test]
fn examples_find_their_ranks_in_the_environment() {
    let programs = make("mesh", "");
    for program in ["mesh_allreduce", "mesh_pair"] {
        let port = own_port().to_string();
        let start = |rank: usize| {
            let mut command = Command::new(programs.join(program));
            command.env("RANK", rank.to_string()).env("WORLD_SIZE", "3").env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", &port);
            command.env("RAILHEAD_STORE_BIND", "127.0.0.1").env("RAILHEAD_SOCKET_IFNAME", "lo");
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the example starts")
        };
        passes((0..3).map(start).collect(), "wrong");
    }
}

/// Waits until a rank uses its time, as it does once it has connected.
pub fn until_it_computes(rank: &Child) {
    let ticks = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", rank.id())).unwrap_or_default();
        stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(11)?.parse::<u64>().ok()).unwrap_or(0)
    };
    let (before, end) = (ticks(), Instant::now() + Duration::from_secs(60));
    while ticks() < before + 30 {
        assert!(Instant::now() < end, "the ranks do not compute");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Of its loss, long before a wait would be over.
#[test]
fn ranks_whose_peer_is_killed_end_with_its_name() {
    let program = make("mesh", "").join("mesh_allreduce");
    for wire in WIRES {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ranks = Ranks(start(&program, &[], folder.path(), wire, 3, &["--elements", "300000", "--rounds", "1000000"]));
        until_it_computes(&ranks.0[1]);
        drop(Ranks(vec![ranks.0.remove(1)]));
        let mut named = 0;
        for child in std::mem::take(&mut ranks.0) {
            let output = child.wait_with_output().expect("it ends");
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{text}");
            named += usize::from(text.contains("rank 1: "));
        }
        assert!(named > 0, "nobody named the rank that was killed");
    }
}

/// By the ranks that wait for it, unasked and when asked; they go on when it does.
#[test]
fn a_rank_that_is_stopped_is_reported_by_its_number() {
    let program = make("mesh", "").join("mesh_allreduce");
    let folder = tempfile::tempdir().expect("a folder");
    let mut ranks = Ranks(start(&program, &[], folder.path(), "shm", 2, &["--elements", "300000", "--rounds", "1000000"]));
    until_it_computes(&ranks.0[1]);
    let [asked, stopped] = [0, 1].map(|rank: usize| ranks.0[rank].id() as libc::pid_t);
    let signal = |rank: libc::pid_t, signal: i32| {
        // SAFETY: a child of this process, which it has not waited for.
        assert_eq!(unsafe { libc::kill(rank, signal) }, 0);
    };
    let stderr = ranks.0[0].stderr.take().expect("its output");
    let mut told = BufReader::new(stderr).lines();
    let mut line = |with: &[&str]| {
        let is_one = |line: &String| with.iter().any(|with| line.contains(with));
        told.find_map(|line| line.ok().filter(is_one)).unwrap_or_else(|| panic!("rank 0 has ended, and has not said {with:?}"))
    };
    // Between two allreduces there is a barrier.
    let names = |line: &str, words: fn(&str) -> String| ["allreduce", "barrier"].iter().any(|name| line.contains(&words(name)));
    // On a slow machine a wait may be reported that began before the other one was stopped. It is not reported twice.
    loop {
        signal(stopped, libc::SIGSTOP);
        let stall = line(&["stalled: "]);
        assert!(names(&stall, |name| format!("stalled: {name}, tag 0x0: rank 0 waited for ")), "{stall}");
        if stall.contains(" rank 1, silent for ") {
            break;
        }
        signal(stopped, libc::SIGCONT);
        until_it_computes(&ranks.0[1]);
    }
    // A dump begins after each signal.
    let (mut dump, mut wait) = (String::new(), String::new());
    while !wait.contains(", silent for ") {
        signal(asked, libc::SIGUSR1);
        let said = line(&["mesh of rank 0 of 2 on lo: ", "[a "]);
        let place = if said.contains("[a ") { &mut wait } else { &mut dump };
        *place = said;
    }
    assert!(dump.contains(" on lo: 1 waiting, ") && dump.ends_with(" operations"), "{dump}");
    assert!(names(&wait, |name| format!(" rank 1 ({name}, tag 0x0), silent for ")), "{wait}");
    signal(stopped, libc::SIGCONT);
    ranks.0.iter().for_each(until_it_computes);
}

/// Killed when the test ends, however it does: stopped ones, too.
pub struct Ranks(pub Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

fn words() -> String {
    // SAFETY: never NULL, and read before the next call.
    unsafe { CStr::from_ptr(railhead_last_error()) }.to_str().expect("UTF-8").to_owned()
}

#[track_caller]
fn refused(status: railhead_status_t, expected: railhead_status_t, why: &str) {
    assert_eq!(status, expected, "{}", words());
    assert!(words().contains(why), "{why}: {}", words());
}

fn config() -> railhead_mesh_config_t {
    railhead_mesh_config_t { size: size_of::<railhead_mesh_config_t>(), rank: 0, ranks: 1, timeout_ms: -1, flags: 0 }
}

fn collective() -> railhead_collective_t {
    railhead_collective_t {
        size: size_of::<railhead_collective_t>(),
        tag: 0,
        dtype: railhead_dtype_t::RAILHEAD_I32 as u32,
        op: railhead_op_t::RAILHEAD_SUM as u32,
        algorithm: railhead_algorithm_t::RAILHEAD_AUTO as u32,
        root: 0,
        timeout_ms: 10_000,
        custom: None,
        user: null_mut(),
    }
}

#[test]
fn wrong_calls_are_refused_with_value_and_range() {
    // SAFETY: variables of this process, set before anything reads them; other tests of this program set none of these.
    unsafe { std::env::set_var("RAILHEAD_SOCKET_IFNAME", "lo") };
    let create = |config: railhead_mesh_config_t, device: Option<&CStr>| {
        let mut mesh = null_mut();
        // SAFETY: a configuration, a string or NULL, and a place.
        (unsafe { railhead_mesh_create(&config, device.map_or(null(), CStr::as_ptr), &mut mesh) }, mesh)
    };
    // SAFETY: NULL is what is refused.
    refused(unsafe { railhead_mesh_create(null(), null(), null_mut()) }, RAILHEAD_INTERNAL, "'mesh' is NULL");
    for (config, why) in [
        (railhead_mesh_config_t { size: 8, ..config() }, "config: a size of 8; this library's has 40"),
        (railhead_mesh_config_t { ranks: 0, ..config() }, "ranks: 0; expected 1 to 65536"),
        (railhead_mesh_config_t { rank: 1, ..config() }, "rank: 1; expected 0 to 0"),
        (railhead_mesh_config_t { rank: -1, ranks: 2, ..config() }, "rank: -1; expected 0 to 1"),
        (railhead_mesh_config_t { flags: 4, ..config() }, "flags: 0x4; expected 0"),
    ] {
        refused(create(config, None).0, RAILHEAD_USAGE, why);
    }
    refused(create(config(), Some(c"nosuch0")).0, RAILHEAD_USAGE, "there is no device \"nosuch0\"; there are lo");

    let (status, mesh) = create(config(), None);
    assert_eq!(status, RAILHEAD_OK, "{}", words());
    let mut numbers = [1i32, 2, 3];
    let memory: *mut c_void = numbers.as_mut_ptr().cast();
    // SAFETY: three numbers, or what is refused.
    let allreduce = |collective: &railhead_collective_t, memory: *mut c_void, count| unsafe {
        railhead_allreduce(mesh, collective, memory, memory, count)
    };
    let mut store = null_mut();
    // SAFETY: a place; handles.
    unsafe {
        assert_eq!(railhead_store_hash(&mut store), RAILHEAD_OK);
        refused(railhead_mesh_connect(mesh, null_mut()), RAILHEAD_INTERNAL, "the store is NULL");
        assert_eq!(railhead_mesh_connect(mesh, store), RAILHEAD_OK, "{}", words());
        refused(railhead_mesh_connect(mesh, store), RAILHEAD_USAGE, "connected already");
    }
    for (collective, why) in [
        (railhead_collective_t { size: 1, ..collective() }, "collective: a size of 1; this library's has 56"),
        (railhead_collective_t { dtype: 10, ..collective() }, "dtype: 10; expected 0 to 9"),
        (railhead_collective_t { op: 4, ..collective() }, "op: 4; expected 0 to 3"),
        (railhead_collective_t { op: 1000, ..collective() }, "RAILHEAD_CUSTOM, and custom is NULL"),
        (railhead_collective_t { algorithm: 5, ..collective() }, "algorithm: 5; expected 0 to 4"),
    ] {
        refused(allreduce(&collective, memory, 3), RAILHEAD_USAGE, why);
    }
    refused(allreduce(&collective(), null_mut(), 3), RAILHEAD_INTERNAL, "argument 'in' is NULL");
    refused(allreduce(&collective(), memory, usize::MAX), RAILHEAD_USAGE, "elements of 4 bytes are more than memory has");
    // SAFETY: three numbers, or what is refused.
    unsafe {
        let elsewhere = railhead_collective_t { root: 1, ..collective() };
        refused(railhead_broadcast(mesh, &elsewhere, memory, 3), RAILHEAD_USAGE, "root: 1; expected 0 to 0");
        refused(railhead_gather(mesh, &collective(), memory, memory, null()), RAILHEAD_INTERNAL, "'counts' is NULL");
    }
    // One rank's sum is its own; no element needs no memory.
    assert_eq!(allreduce(&collective(), null_mut(), 0), RAILHEAD_OK);
    assert_eq!(allreduce(&collective(), memory, 3), RAILHEAD_OK);
    assert_eq!(numbers, [1, 2, 3]);
    // SAFETY: handles, of which one is closed, one is none, and one is of another kind.
    unsafe {
        assert_eq!(railhead_barrier(mesh, null()), RAILHEAD_OK);
        refused(railhead_barrier(store.cast(), null()), RAILHEAD_INTERNAL, "is not a mesh");
        assert_eq!(railhead_mesh_close(mesh), RAILHEAD_OK);
        refused(railhead_mesh_close(mesh), RAILHEAD_INTERNAL, "was closed");
        refused(railhead_barrier(mesh, null()), RAILHEAD_INTERNAL, "was closed");
        assert_eq!(railhead_store_close(store), RAILHEAD_OK);
    }
}

/// The greater of both; counts elements.
unsafe extern "C" fn greatest(user: *mut c_void, into: *mut c_void, from: *const c_void, count: usize) {
    // SAFETY: a counter, and as many numbers as said.
    unsafe {
        *user.cast::<usize>() += count;
        for i in 0..count {
            let (into, from) = (into.cast::<i32>().add(i), from.cast::<i32>().add(i));
            into.write(from.read().max(into.read()));
        }
    }
}

#[test]
fn a_callers_own_function_reduces() {
    // SAFETY: as above.
    unsafe { std::env::set_var("RAILHEAD_SOCKET_IFNAME", "lo") };
    let mut store = null_mut();
    // SAFETY: a place.
    assert_eq!(unsafe { railhead_store_hash(&mut store) }, RAILHEAD_OK);
    let store = store.expose_provenance();
    std::thread::scope(|scope| {
        for rank in 0..2i32 {
            scope.spawn(move || {
                let config = railhead_mesh_config_t { rank: rank.into(), ranks: 2, ..config() };
                let mut mesh = null_mut();
                let (numbers, mut out, mut calls) = ([rank; 500], [-1i32; 500], 0usize);
                let collective = railhead_collective_t { op: 1000, custom: Some(greatest), user: (&raw mut calls).cast(), ..collective() };
                // SAFETY: a configuration, handles, and 500 numbers in two places.
                unsafe {
                    assert_eq!(railhead_mesh_create(&config, null(), &mut mesh), RAILHEAD_OK, "{}", words());
                    assert_eq!(railhead_mesh_connect(mesh, std::ptr::with_exposed_provenance_mut(store)), RAILHEAD_OK, "{}", words());
                    let status = railhead_allreduce(mesh, &collective, numbers.as_ptr().cast(), out.as_mut_ptr().cast(), 500);
                    assert_eq!(status, RAILHEAD_OK, "{}", words());
                    assert_eq!(railhead_mesh_close(mesh), RAILHEAD_OK);
                }
                assert_eq!((numbers, out, calls), ([rank; 500], [1; 500], 500));
            });
        }
    });
}

/// Runs two ranks, threads of this process, and gives each its connected mesh.
fn two_ranks(run: impl Fn(i64, *mut railhead_mesh_t) + Sync) {
    // SAFETY: as above.
    unsafe { std::env::set_var("RAILHEAD_SOCKET_IFNAME", "lo") };
    let mut store = null_mut();
    // SAFETY: a place.
    assert_eq!(unsafe { railhead_store_hash(&mut store) }, RAILHEAD_OK);
    let store = store.expose_provenance();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let run = &run;
            scope.spawn(move || {
                let (config, mut mesh) = (railhead_mesh_config_t { rank, ranks: 2, ..config() }, null_mut());
                // SAFETY: a configuration, handles and places.
                unsafe {
                    assert_eq!(railhead_mesh_create(&config, null(), &mut mesh), RAILHEAD_OK, "{}", words());
                    assert_eq!(railhead_mesh_connect(mesh, std::ptr::with_exposed_provenance_mut(store)), RAILHEAD_OK, "{}", words());
                }
                run(rank, mesh);
                // SAFETY: a handle.
                assert_eq!(unsafe { railhead_mesh_close(mesh) }, RAILHEAD_OK);
            });
        }
    });
}

#[test]
fn buffers_are_made_used_and_closed() {
    two_ranks(|rank, mesh| {
        let (peer, mut words_of, mut buffer, mut bound) = (1 - rank, [rank as u64; 4], null_mut(), null_mut());
        let memory: *mut c_void = words_of.as_mut_ptr().cast();
        let mut from = -1;
        // SAFETY: handles, memory that outlives its buffers, and places.
        unsafe {
            assert_eq!(railhead_unbound_create(mesh, memory, 32, &mut buffer), RAILHEAD_OK, "{}", words());
            refused(railhead_unbound_send(buffer, 2, 0, 0, 8), RAILHEAD_USAGE, "rank: rank 2; expected 0 to 1");
            refused(railhead_unbound_send(buffer, rank, 0, 0, 8), RAILHEAD_USAGE, "is this rank");
            refused(railhead_unbound_recv(buffer, &peer, 1, 0, 30, 8), RAILHEAD_USAGE, "8 bytes at offset 30 of a buffer of 32");
            refused(railhead_unbound_recv(buffer, null(), 1, 0, 0, 8), RAILHEAD_INTERNAL, "'ranks' is NULL");
            refused(railhead_unbound_recv(buffer, &peer, 0, 0, 0, 8), RAILHEAD_USAGE, "a receive from no rank");
            refused(railhead_unbound_create(mesh, null_mut(), 1, &mut null_mut()), RAILHEAD_INTERNAL, "'memory' is NULL");
            assert_eq!(railhead_unbound_abort_recv(buffer), RAILHEAD_OK);
            assert_eq!(railhead_unbound_wait_recv(buffer, null_mut(), 10_000), RAILHEAD_ABORTED);
            assert_eq!(railhead_unbound_recv(buffer, &peer, 1, u64::MAX, 8, 8), RAILHEAD_OK, "{}", words());
            let mut done = -1;
            refused(railhead_unbound_test_recv(buffer, &mut from, null_mut()), RAILHEAD_INTERNAL, "'done' is NULL");
            assert_eq!(railhead_unbound_test_recv(buffer, &mut from, &mut done), RAILHEAD_OK, "{}", words());
            assert_eq!((done, from), (0, -1));
            assert_eq!(railhead_barrier(mesh, null()), RAILHEAD_OK);
            assert_eq!(railhead_unbound_send(buffer, peer, u64::MAX, 0, 8), RAILHEAD_OK, "{}", words());
            assert_eq!(railhead_unbound_wait_send(buffer, null_mut(), 10_000), RAILHEAD_OK, "{}", words());
            assert_eq!(railhead_unbound_wait_recv(buffer, &mut from, 10_000), RAILHEAD_OK, "{}", words());
            assert_eq!((from, memory.cast::<u64>().add(1).read()), (peer, peer as u64));
            // The same once more, by looking.
            memory.cast::<u64>().add(1).write(9);
            from = -1;
            assert_eq!(railhead_unbound_recv(buffer, &peer, 1, u64::MAX, 8, 8), RAILHEAD_OK, "{}", words());
            assert_eq!(railhead_unbound_send(buffer, peer, u64::MAX, 0, 8), RAILHEAD_OK, "{}", words());
            for test in [railhead_unbound_test_send, railhead_unbound_test_recv] {
                done = 0;
                while done == 0 {
                    assert_eq!(test(buffer, &mut from, &mut done), RAILHEAD_OK, "{}", words());
                }
                assert_eq!((done, from), (1, peer));
                from = -1;
                assert_eq!(test(buffer, &mut from, &mut done), RAILHEAD_OK, "{}", words());
                assert_eq!((done, from), (0, -1), "told twice");
            }
            assert_eq!(memory.cast::<u64>().add(1).read(), peer as u64);

            refused(railhead_buffer_send_to(mesh, rank, 0, memory, 32, &mut bound), RAILHEAD_USAGE, "is this rank");
            assert_eq!(railhead_buffer_recv_from(mesh, peer, 7, memory, 32, &mut bound), RAILHEAD_OK, "{}", words());
            refused(railhead_buffer_wait_send(bound, 10), RAILHEAD_USAGE, "slot 7: a buffer that receives");
            refused(railhead_buffer_recv_from(mesh, peer, 7, memory, 32, &mut null_mut()), RAILHEAD_USAGE, "slot 7: another buffer");
            let (out, mut sends) = (40 + rank, null_mut());
            assert_eq!(railhead_buffer_send_to(mesh, peer, 7, (&raw const out).cast(), 8, &mut sends), RAILHEAD_OK, "{}", words());
            assert_eq!(railhead_buffer_send(sends, 0, RAILHEAD_REST, 24), RAILHEAD_OK, "{}", words());
            assert_eq!(railhead_buffer_wait_recv(bound, 10_000), RAILHEAD_OK, "{}", words());
            assert_eq!(railhead_buffer_wait_send(sends, 10_000), RAILHEAD_OK, "{}", words());
            assert_eq!(memory.cast::<i64>().add(3).read(), 40 + peer);
            assert_eq!(railhead_buffer_send(sends, 0, 8, 25), RAILHEAD_OK, "{}", words());
            refused(railhead_buffer_wait_send(sends, 10_000), RAILHEAD_USAGE, "slot 7: 8 bytes to offset 25 of the peer's 32");
            assert_eq!(railhead_barrier(mesh, null()), RAILHEAD_OK);
            assert_eq!(railhead_buffer_close(sends), RAILHEAD_OK, "{}", words());
            assert_eq!(railhead_buffer_close(bound), RAILHEAD_OK, "{}", words());
            refused(railhead_buffer_close(bound), RAILHEAD_INTERNAL, "was closed");
            assert_eq!(railhead_unbound_close(buffer), RAILHEAD_OK, "{}", words());
            refused(railhead_unbound_abort_send(buffer), RAILHEAD_INTERNAL, "was closed");
            refused(railhead_unbound_test_send(buffer, null_mut(), &mut done), RAILHEAD_INTERNAL, "was closed");
            assert_eq!(railhead_barrier(mesh, null()), RAILHEAD_OK);
        }
    });
}

#[test]
fn meshes_are_forked_and_pairs_connected_by_hand() {
    let addresses = std::sync::Mutex::new([const { Vec::new() }; 2]);
    let both = std::sync::Barrier::new(2);
    two_ranks(|rank, mesh| {
        let (peer, own) = (1 - rank, rank as usize);
        let mut forked = null_mut();
        // SAFETY: handles, and places of the sizes that are said.
        unsafe {
            assert_eq!(railhead_mesh_fork(mesh, &mut forked), RAILHEAD_OK, "{}", words());
            assert_eq!(railhead_mesh_set_sync(forked, 1), RAILHEAD_OK);
            assert_eq!(railhead_barrier(forked, null()), RAILHEAD_OK, "{}", words());
            assert_eq!(railhead_mesh_close(forked), RAILHEAD_OK);
            let header = include_str!("../../include/railhead.h");
            assert!(header.contains(&format!("#define RAILHEAD_MESH_ADDRESS {RAILHEAD_MESH_ADDRESS}\n")));
            let (mut pair, mut len, mut address) = (null_mut(), 10, vec![0; RAILHEAD_MESH_ADDRESS]);
            let config = railhead_mesh_config_t { rank, ranks: 2, ..config() };
            assert_eq!(railhead_mesh_create(&config, null(), &mut pair), RAILHEAD_OK, "{}", words());
            refused(railhead_mesh_address(pair, peer, address.as_mut_ptr(), &mut len), RAILHEAD_USAGE, "len: 10; the address has ");
            assert!(len > 10);
            refused(railhead_mesh_address(pair, rank, address.as_mut_ptr(), &mut len), RAILHEAD_USAGE, "and not this rank");
            assert_eq!(railhead_mesh_address(pair, peer, address.as_mut_ptr(), &mut len), RAILHEAD_OK, "{}", words());
            address.truncate(len);
            addresses.lock().expect("no panic")[own] = address;
            both.wait();
            let theirs = addresses.lock().expect("no panic")[1 - own].clone();
            refused(
                railhead_mesh_connect_pair(pair, peer, theirs.as_ptr(), theirs.len() - 1),
                RAILHEAD_NETWORK,
                "its address is cut short",
            );
            assert_eq!(railhead_mesh_connect_pair(pair, peer, theirs.as_ptr(), theirs.len()), RAILHEAD_OK, "{}", words());
            both.wait();
            assert_eq!(railhead_barrier(pair, null()), RAILHEAD_OK, "{}", words());
            assert_eq!(railhead_mesh_close(pair), RAILHEAD_OK);
        }
    });
}

/// In collectives, messages and buffers; the mesh's own is 30 s.
#[test]
fn a_calls_own_timeout_is_the_one_that_counts() {
    for what in 0..4 {
        let over = std::sync::Barrier::new(2);
        two_ranks(|rank, mesh| {
            if rank == 0 {
                let (mut bytes, mut unbound, mut buffer) = ([0u8; 64], null_mut(), null_mut());
                let memory: *mut c_void = bytes.as_mut_ptr().cast();
                // SAFETY: handles, memory that outlives its buffers, and places.
                unsafe {
                    assert_eq!(railhead_unbound_create(mesh, memory, 64, &mut unbound), RAILHEAD_OK, "{}", words());
                    assert_eq!(railhead_buffer_recv_from(mesh, 1, 7, memory, 64, &mut buffer), RAILHEAD_OK, "{}", words());
                    let status = match what {
                        0 => railhead_barrier(mesh, &railhead_collective_t { timeout_ms: 100, ..collective() }),
                        1 => {
                            assert_eq!(railhead_unbound_recv(unbound, &1, 1, 0, 0, 64), RAILHEAD_OK, "{}", words());
                            railhead_unbound_wait_recv(unbound, null_mut(), 100)
                        }
                        2 => {
                            assert_eq!(railhead_unbound_send(unbound, 1, 0, 0, 64), RAILHEAD_OK, "{}", words());
                            railhead_unbound_wait_send(unbound, null_mut(), 100)
                        }
                        _ => railhead_buffer_wait_recv(buffer, 100),
                    };
                    refused(status, RAILHEAD_TIMEOUT, " rank 0 waited for 0.1 s for ");
                    assert_eq!(railhead_unbound_close(unbound), RAILHEAD_OK, "{}", words());
                    assert_eq!(railhead_buffer_close(buffer), RAILHEAD_OK, "{}", words());
                }
            }
            over.wait();
        });
    }
}
