//! The tensors' C functions: the example as a user runs it, workers that are killed, two workers in one process, and wrong calls.

use std::ffi::{CStr, CString, c_char, c_void};
use std::io::{BufRead, BufReader};
use std::process::Child;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

use railhead::abi::status::{railhead_last_error, railhead_status_t, railhead_status_t::*};
use railhead::abi::store::*;
use railhead::abi::tensor::{railhead_tensor_mode_t::*, *};

use super::examples::{SANITIZE, make, sanitizers_work, skip, valgrind};
use super::mesh::{Ranks, WIRES, passes, start, until_it_computes};

/// The example's options.
const MODES: [&[&str]; 2] = [&[], &["--direct"]];

const WORKERS: [&CStr; 2] = [c"/job:a/task:0", c"/job:b/task:0"];

fn words() -> String {
    // SAFETY: never NULL, and read before the next call.
    unsafe { CStr::from_ptr(railhead_last_error()) }.to_str().expect("UTF-8").to_owned()
}

#[track_caller]
fn done(status: railhead_status_t) {
    assert_eq!(status, RAILHEAD_OK, "{}", words());
}

#[track_caller]
fn refused(status: railhead_status_t, expected: railhead_status_t, why: &str) {
    assert_eq!(status, expected, "{}", words());
    assert!(words().contains(why), "{why}: {}", words());
}

fn config(worker: &CStr, workers: &[*const c_char], mode: railhead_tensor_mode_t) -> railhead_tensor_config_t {
    let (size, worker, mode) = (size_of::<railhead_tensor_config_t>(), worker.as_ptr(), mode as u64);
    railhead_tensor_config_t { size, worker, workers: workers.as_ptr(), count: workers.len(), timeout_ms: -1, flags: 0, mode }
}

fn tensor(bytes: &[u8]) -> railhead_tensor_t {
    let (mut dims, data) = ([0; 16], bytes.as_ptr().cast());
    dims[0] = bytes.len() as i64;
    railhead_tensor_t {
        size: size_of::<railhead_tensor_t>(),
        dtype: 4,
        rank: 1,
        dims,
        data,
        bytes: bytes.len(),
        is_dead: 0,
        owner: null_mut(),
        release: None,
        user: null_mut(),
    }
}

fn key(from: usize, to: usize, edge: &CStr) -> CString {
    let device = |worker: usize| CString::new(format!("{}/device:CPU:0", WORKERS[worker].to_str().expect("text"))).expect("no 0");
    let (from, to) = (device(from), device(to));
    let (mut key, mut len) = (vec![0u8; 600], 600);
    // SAFETY: strings, and as many bytes as said.
    done(unsafe { railhead_tensor_key_create(from.as_ptr(), 7, to.as_ptr(), edge.as_ptr(), 1, -2, key.as_mut_ptr().cast(), &mut len) });
    CStr::from_bytes_with_nul(&key[..len]).expect("a string").to_owned()
}

#[test]
fn a_pipeline_passes_tensors_on() {
    let program = make("tensor", "").join("tensor_pipeline");
    for wire in WIRES {
        for mode in MODES {
            for bytes in ["1", "100000", "3000001"] {
                let folder = tempfile::tempdir().expect("a folder");
                let options: Vec<&str> = ["--bytes", bytes, "--steps", "5"].iter().chain(mode).copied().collect();
                let workers = start(&program, &[], folder.path(), wire, 3, &options);
                passes(workers, "5 steps, no byte wrong, and one that was aborted");
            }
        }
    }
}

#[test]
fn four_workers_train_with_a_parameter_server() {
    let program = make("tensor", "").join("tensor_params");
    for (wire, mode) in WIRES.into_iter().flat_map(|wire| MODES.map(|mode| (wire, mode))) {
        for elements in ["1", "20000", "300000"] {
            let folder = tempfile::tempdir().expect("a folder");
            let workers = start(&program, &[], folder.path(), wire, 5, &[&["--elements", elements], mode].concat());
            passes(workers, "4 steps of 4 workers, no parameter wrong");
        }
    }
}

#[test]
fn the_examples_run_under_sanitizers() {
    if !sanitizers_work() {
        return skip("the compiler has no AddressSanitizer here");
    }
    let build = make("tensor", SANITIZE);
    for (program, workers, says) in [("tensor_pipeline", 3, "no byte wrong"), ("tensor_params", 5, "no parameter wrong")] {
        for mode in MODES {
            let folder = tempfile::tempdir().expect("a folder");
            passes(start(&build.join(program), &[], folder.path(), "shm", workers, mode), says);
        }
    }
}

#[test]
fn the_examples_run_under_valgrind() {
    let Some(valgrind) = valgrind() else { return skip("valgrind is not installed") };
    let build = make("tensor", "-g");
    let folder = tempfile::tempdir().expect("a folder");
    let pipeline = start(&build.join("tensor_pipeline"), &valgrind, folder.path(), "shm", 3, &["--bytes", "20000"]);
    passes(pipeline, "no byte wrong");
    let folder = tempfile::tempdir().expect("a folder");
    let arguments = ["--elements", "3000", "--steps", "2", "--direct"];
    passes(start(&build.join("tensor_params"), &valgrind, folder.path(), "shm", 5, &arguments), "no parameter wrong");
}

/// Of its loss, and by its name, long before a wait would be over.
#[test]
fn workers_whose_peer_is_killed_end_with_its_name() {
    let program = make("tensor", "").join("tensor_pipeline");
    for (wire, mode) in WIRES.into_iter().zip(MODES) {
        let folder = tempfile::tempdir().expect("a folder");
        let options: Vec<&str> = ["--bytes", "1", "--steps", "100000000"].iter().chain(mode).copied().collect();
        let mut workers = Ranks(start(&program, &[], folder.path(), wire, 3, &options));
        until_it_computes(&workers.0[0]);
        drop(Ranks(vec![workers.0.remove(0)]));
        let left: Vec<Child> = std::mem::take(&mut workers.0);
        // Both wait for the producer.
        for child in left {
            let output = child.wait_with_output().expect("it ends");
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(1), "{text}");
            assert!(text.contains("worker /job:producer/task:0: "), "{text}");
        }
    }
}

/// By the workers that wait for it, unasked and when asked; they go on when it does.
#[test]
fn a_worker_that_is_stopped_is_named_with_the_key_that_is_waited_for() {
    let program = make("tensor", "").join("tensor_pipeline");
    let folder = tempfile::tempdir().expect("a folder");
    let mut workers = Ranks(start(&program, &[], folder.path(), "shm", 3, &["--bytes", "1", "--steps", "1000000"]));
    until_it_computes(&workers.0[1]);
    let [stopped, asked] = [0, 1].map(|worker: usize| workers.0[worker].id() as libc::pid_t);
    let signal = |worker: libc::pid_t, signal: i32| {
        // SAFETY: a child of this process, which it has not waited for.
        assert_eq!(unsafe { libc::kill(worker, signal) }, 0);
    };
    signal(stopped, libc::SIGSTOP);
    let mut told = BufReader::new(workers.0[1].stderr.take().expect("its output")).lines();
    let mut line = |is_one: fn(&String) -> bool| told.find_map(|line| line.ok().filter(is_one)).expect("worker 1 has ended before");
    let names = |line: &str, begin: &str| {
        let words = [begin, " s for /job:producer/task:0/device:", ";/job:consumer/task:0/device:", ";input;", " of step "];
        words.iter().all(|words| line.contains(words)) && line.contains(", produced by /job:producer/task:0")
    };
    let stall = line(|line| line.contains("stalled: "));
    assert!(names(&stall, "stalled: worker /job:consumer/task:0 waited for "), "{stall}");
    // On a slow machine that was before the other one was stopped, and this one does not wait yet. A dump begins after each signal.
    let (mut dump, mut wait) = (String::new(), String::new());
    while wait.is_empty() {
        signal(asked, libc::SIGUSR1);
        let said = line(|line| line.contains("tensors of worker ") || line.ends_with(']'));
        let place = if said.contains("tensors of worker ") { &mut dump } else { &mut wait };
        *place = said;
    }
    assert!(dump.contains("tensors of worker /job:consumer/task:0 on lo: "), "{dump}");
    assert!(names(&wait, "["), "{wait}");
    signal(stopped, libc::SIGCONT);
    workers.0.iter().for_each(until_it_computes);
}

/// What a callback got.
#[derive(Default)]
struct Got(Vec<(railhead_status_t, String, Option<Vec<u8>>)>);

unsafe extern "C" fn got(user: *mut c_void, status: railhead_status_t, why: *const c_char, tensor: *const railhead_tensor_t) {
    // SAFETY: what the test gave, a string, and a tensor or NULL.
    unsafe {
        let bytes = tensor.as_ref().map(|tensor| std::slice::from_raw_parts(tensor.data.cast(), tensor.bytes).to_vec());
        (*user.cast::<Got>()).0.push((status, CStr::from_ptr(why).to_str().expect("UTF-8").to_owned(), bytes));
    }
}

/// Runs two workers, threads of this process, and gives each its connected manager.
fn two_workers(mode: railhead_tensor_mode_t, run: impl Fn(usize, *mut railhead_tensor_manager_t) + Sync) {
    // SAFETY: variables of this process, set before anything reads them; other tests of this program set it to nothing else.
    unsafe { std::env::set_var("RAILHEAD_SOCKET_IFNAME", "lo") };
    let mut store = null_mut();
    // SAFETY: a place.
    done(unsafe { railhead_store_hash(&mut store) });
    let store = store.expose_provenance();
    std::thread::scope(|scope| {
        for (worker, name) in WORKERS.into_iter().enumerate() {
            let run = &run;
            scope.spawn(move || {
                let workers = WORKERS.map(CStr::as_ptr);
                let (config, mut manager) = (config(name, &workers, mode), null_mut());
                // SAFETY: a configuration, handles and places.
                unsafe {
                    done(railhead_tensor_manager_create(&config, null(), &mut manager));
                    done(railhead_tensor_manager_connect(manager, std::ptr::with_exposed_provenance_mut(store)));
                }
                run(worker, manager);
                // SAFETY: a handle.
                done(unsafe { railhead_tensor_manager_close(manager) });
            });
        }
    });
}

#[test]
fn tensors_go_from_worker_to_worker() {
    let contents: Vec<u8> = (0..100_000).map(|i| (i * 7) as u8).collect();
    two_workers(RAILHEAD_TENSOR_BUFFERED, |worker, manager| {
        let (there, back, dead) = (key(0, 1, c"there"), key(1, 0, c"back"), key(0, 1, c"dead"));
        let (mut step, mut received, mut ran) = (null_mut(), tensor(&[]), 0);
        let mut answers = Got::default();
        // SAFETY: handles, strings, tensors with as many bytes as they say, and places; `answers` outlives its callbacks.
        unsafe {
            done(railhead_tensor_step(manager, 5, &mut step));
            done(railhead_tensor_initialize(step));
            if worker == 0 {
                done(railhead_tensor_send(step, there.as_ptr(), &tensor(&contents)));
                done(railhead_tensor_send(step, dead.as_ptr(), &railhead_tensor_t { is_dead: 1, ..tensor(&[]) }));
                refused(railhead_tensor_send(step, dead.as_ptr(), &tensor(&[])), RAILHEAD_USAGE, "Duplicated send");
                done(railhead_tensor_recv(step, back.as_ptr(), 60_000, &mut received));
                assert_eq!((received.dtype, received.rank, received.dims[0], received.bytes), (4, 1, 1, 1));
                done(railhead_tensor_free(&received));
                refused(railhead_tensor_free(&received), RAILHEAD_INTERNAL, "was closed");
                done(railhead_tensor_abort(step, RAILHEAD_TIMEOUT as i32, c"too late".as_ptr()));
                refused(railhead_tensor_send(step, there.as_ptr(), &tensor(&[])), RAILHEAD_TIMEOUT, "too late");
            } else {
                let user = (&raw mut answers).cast();
                done(railhead_tensor_recv_async(step, there.as_ptr(), Some(got), user));
                done(railhead_tensor_manager_run(manager, 60_000, &mut ran));
                assert_eq!(ran, 1);
                assert!(answers.0.pop() == Some((RAILHEAD_OK, String::new(), Some(contents.clone()))));
                done(railhead_tensor_recv(step, dead.as_ptr(), 60_000, &mut received));
                assert_eq!((received.is_dead, received.bytes), (1, 0));
                done(railhead_tensor_free(&received));
                done(railhead_tensor_recv_async(step, key(0, 1, c"never").as_ptr(), Some(got), user));
                done(railhead_tensor_send(step, back.as_ptr(), &tensor(&[9])));
                done(railhead_tensor_manager_run(manager, 60_000, null_mut()));
                let (status, why, bytes) = answers.0.pop().expect("an answer");
                // Or of the other's end, if that comes first.
                assert!(
                    bytes.is_none() && (status == RAILHEAD_TIMEOUT && why.ends_with("too late") || why.contains("/job:a/task:0")),
                    "{why}"
                );
            }
            done(railhead_tensor_release(step));
            done(railhead_tensor_cleanup(manager, 5));
            done(railhead_tensor_cleanup_all(manager));
        }
    });
}

unsafe extern "C" fn count(user: *mut c_void) {
    // SAFETY: what the test gave.
    unsafe { (*user.cast::<AtomicU32>()).fetch_add(1, Ordering::Relaxed) };
}

#[test]
fn tensors_go_from_memory_to_memory() {
    let contents: Vec<u8> = (0..100_000).map(|i| (i * 7) as u8).collect();
    two_workers(RAILHEAD_TENSOR_DIRECT, |worker, manager| {
        let (there, again, back) = (key(0, 1, c"there"), key(0, 1, c"again"), key(1, 0, c"back"));
        let (mut step, mut received, mut memory, released) = (null_mut(), tensor(&[]), null_mut(), AtomicU32::new(0));
        let (mut lent, mut into, mut answers) = (contents.clone(), vec![0u8; 100_001], Got::default());
        // SAFETY: handles, strings, tensors with as many bytes as they say, and places; all memory outlives its tensors, and `answers` its callbacks.
        unsafe {
            done(railhead_tensor_step(manager, 5, &mut step));
            done(railhead_tensor_initialize(step));
            if worker == 0 {
                done(railhead_tensor_register(manager, lent.as_mut_ptr().cast(), lent.len(), &mut memory));
                let lent = railhead_tensor_t { release: Some(count), user: (&raw const released).cast_mut().cast(), ..tensor(&lent) };
                for key in [&there, &again] {
                    done(railhead_tensor_send(step, key.as_ptr(), &lent));
                    refused(railhead_tensor_send(step, key.as_ptr(), &lent), RAILHEAD_USAGE, "Duplicated send");
                }
                done(railhead_tensor_send(step, key(0, 0, c"dead").as_ptr(), &railhead_tensor_t { is_dead: 1, ..lent }));
                done(railhead_tensor_manager_run(manager, 60_000, null_mut()));
                assert_eq!(released.load(Ordering::Relaxed), 1, "of the dead one");
                refused(railhead_tensor_deregister(memory), RAILHEAD_USAGE, "has 2 tensors that were not released");
                done(railhead_tensor_recv(step, back.as_ptr(), 60_000, &mut received));
                done(railhead_tensor_free(&received));
                done(railhead_tensor_cleanup(manager, 5));
                while released.load(Ordering::Relaxed) < 3 {
                    done(railhead_tensor_manager_run(manager, 60_000, null_mut()));
                }
                done(railhead_tensor_deregister(memory));
            } else {
                let (data, bytes) = (into.as_mut_ptr().cast::<c_void>(), into.len());
                done(railhead_tensor_recv_into(step, there.as_ptr(), data, bytes, 60_000, &mut received));
                assert!(received.data == data.cast_const() && (received.dtype, received.bytes) == (4, 100_000) && received.owner.is_null());
                assert!(into[..100_000] == contents);
                let small = railhead_tensor_recv_into(step, again.as_ptr(), data, 99_999, 60_000, &mut received);
                refused(small, RAILHEAD_USAGE, "a tensor of 100000 bytes, received into 99999");
                into.fill(0);
                let (data, user) = (into.as_mut_ptr().cast(), (&raw mut answers).cast());
                done(railhead_tensor_recv_into_async(step, again.as_ptr(), data, bytes, Some(got), user));
                done(railhead_tensor_manager_run(manager, 60_000, null_mut()));
                assert!(answers.0.pop() == Some((RAILHEAD_OK, String::new(), Some(contents.clone()))) && into[..100_000] == contents);
                // Until the other one is done.
                done(railhead_tensor_recv_into_async(step, key(0, 1, c"never").as_ptr(), data, bytes, Some(got), user));
                done(railhead_tensor_send(step, back.as_ptr(), &tensor(&[9])));
                done(railhead_tensor_manager_run(manager, 60_000, null_mut()));
                let (_, why, _) = answers.0.pop().expect("an answer");
                assert_eq!(why, "worker /job:a/task:0: Cleanup 5");
            }
            done(railhead_tensor_release(step));
        }
    });
}

#[test]
fn a_time_of_zero_or_less_is_without_end() {
    two_workers(RAILHEAD_TENSOR_BUFFERED, |worker, manager| {
        if worker == 1 {
            return;
        }
        let mut step = null_mut();
        // SAFETY: handles and places.
        unsafe {
            done(railhead_tensor_step(manager, 1, &mut step));
            done(railhead_tensor_initialize(step));
        }
        let step = step.expose_provenance();
        let recv = |edge: &CStr, time| {
            let (key, mut got, step) = (key(0, 0, edge), tensor(&[]), std::ptr::with_exposed_provenance_mut(step));
            // SAFETY: a handle, a string and a place; what came is given back.
            unsafe {
                let status = railhead_tensor_recv(step, key.as_ptr(), time, &mut got);
                if status == RAILHEAD_OK {
                    done(railhead_tensor_free(&got));
                }
                status
            }
        };
        for (edge, time) in [(c"zero", 0), (c"less", -1), (c"least", i64::MIN)] {
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| recv(edge, time));
                // It has begun by then, or fails to be what is tested, and passes.
                assert_eq!(recv(c"never", 50), RAILHEAD_TIMEOUT, "{}", words());
                let (key, one) = (key(0, 0, edge), tensor(&[1]));
                // SAFETY: a handle, a string and a tensor.
                done(unsafe { railhead_tensor_send(std::ptr::with_exposed_provenance_mut(step), key.as_ptr(), &one) });
                assert_eq!(waits.join().expect("a status"), RAILHEAD_OK);
            });
        }
        // SAFETY: a handle.
        done(unsafe { railhead_tensor_release(std::ptr::with_exposed_provenance_mut(step)) });
    });
}

#[test]
fn keys_are_made_and_read() {
    let made = key(0, 1, c"x");
    assert_eq!(made.to_str(), Ok("/job:a/task:0/device:CPU:0;0000000000000007;/job:b/task:0/device:CPU:0;x;1:-2"));
    // SAFETY: strings, places, and parts that lie in the key.
    unsafe {
        let mut parsed = std::mem::zeroed::<railhead_tensor_key_t>();
        done(railhead_tensor_key_parse(made.as_ptr(), &mut parsed));
        let text = |part: railhead_bytes_t| std::str::from_utf8(std::slice::from_raw_parts(part.data.cast(), part.size)).expect("text");
        assert_eq!((text(parsed.src_device), text(parsed.dst_device)), ("/job:a/task:0/device:CPU:0", "/job:b/task:0/device:CPU:0"));
        assert_eq!((text(parsed.edge), parsed.src_incarnation, parsed.frame, parsed.iter), ("x", 7, 1, -2));
        refused(railhead_tensor_key_parse(c"x;y".as_ptr(), &mut parsed), RAILHEAD_USAGE, "has not five parts");
        let (mut few, mut len) = ([0; 8], 8);
        let status = railhead_tensor_key_create(c"a".as_ptr(), 1, c"b".as_ptr(), c"c".as_ptr(), 0, 0, few.as_mut_ptr(), &mut len);
        refused(status, RAILHEAD_USAGE, "len: 8; the key has 27 bytes");
        assert_eq!(len, 27);
    }
}

#[test]
fn wrong_calls_are_refused_with_value_and_range() {
    // SAFETY: as above.
    unsafe { std::env::set_var("RAILHEAD_SOCKET_IFNAME", "lo") };
    let workers = WORKERS.map(CStr::as_ptr);
    let (mut manager, mut step, mut received) = (null_mut(), null_mut(), tensor(&[]));
    // SAFETY: configurations, strings, handles and places, or what is refused.
    unsafe {
        refused(railhead_tensor_manager_create(null(), null(), null_mut()), RAILHEAD_INTERNAL, "'manager' is NULL");
        let right = config(WORKERS[0], &workers, RAILHEAD_TENSOR_BUFFERED);
        for (config, why) in [
            (railhead_tensor_config_t { size: 8, ..right }, "config: a size of 8; this library's has 56"),
            (railhead_tensor_config_t { flags: 2, ..right }, "flags: 0x2; expected 0 or 1"),
            (railhead_tensor_config_t { mode: 2, ..right }, "mode: 2; expected 0 or 1"),
            (config(c"c", &workers, RAILHEAD_TENSOR_BUFFERED), "worker \"c\" of "),
            (railhead_tensor_config_t { count: 1 << 61, ..right }, "2305843009213693952 is no size"),
        ] {
            refused(railhead_tensor_manager_create(&config, null(), &mut manager), RAILHEAD_USAGE, why);
        }
        done(railhead_tensor_manager_create(&right, null(), &mut manager));
        refused(railhead_tensor_manager_connect(manager, null_mut()), RAILHEAD_INTERNAL, "the store is NULL");
        done(railhead_tensor_step(manager, 1, &mut step));
        done(railhead_tensor_initialize(step));
        let own = key(0, 0, c"own");
        for (tensor, why) in [
            (railhead_tensor_t { size: 1, ..tensor(&[]) }, "tensor: a size of 1; this library's has 192"),
            (railhead_tensor_t { rank: 17, ..tensor(&[]) }, "tensor: 17 dimensions; at most 16"),
            (railhead_tensor_t { dims: [-1; 16], ..tensor(&[]) }, "a dimension of -1; expected 0 or more"),
            (railhead_tensor_t { bytes: usize::MAX, ..tensor(&[1]) }, "bytes: no memory for 18446744073709551615"),
            (railhead_tensor_t { bytes: isize::MAX as usize, ..tensor(&[1]) }, "bytes: no memory for 9223372036854775807"),
        ] {
            refused(railhead_tensor_send(step, own.as_ptr(), &tensor), RAILHEAD_USAGE, why);
        }
        refused(railhead_tensor_send(step, key(1, 0, c"x").as_ptr(), &tensor(&[])), RAILHEAD_USAGE, "Invalid rendezvous key (src)");
        refused(railhead_tensor_recv(step, own.as_ptr(), 1, &mut received), RAILHEAD_TIMEOUT, "Timed out waiting for notification");
        refused(railhead_tensor_recv(step, key(1, 0, c"x").as_ptr(), 1, &mut received), RAILHEAD_USAGE, "is not connected");
        refused(railhead_tensor_recv_async(step, own.as_ptr(), None, null_mut()), RAILHEAD_INTERNAL, "'callback' is NULL");
        refused(railhead_tensor_abort(step, 7, c"x".as_ptr()), RAILHEAD_USAGE, "status: 7; expected 3, 5, 6 or 8");
        refused(railhead_tensor_free(&tensor(&[])), RAILHEAD_INTERNAL, "the tensor owner is NULL");
        let mut few = [0u8; 10];
        let (data, mut memory, mut other) = (few.as_mut_ptr().cast(), null_mut(), null_mut());
        refused(railhead_tensor_recv_into(step, own.as_ptr(), null_mut(), 10, 1, &mut received), RAILHEAD_INTERNAL, "'data' is NULL");
        refused(railhead_tensor_recv_into(step, own.as_ptr(), data, 10, 1, &mut received), RAILHEAD_TIMEOUT, "Timed out waiting");
        refused(railhead_tensor_register(manager, null_mut(), 10, &mut memory), RAILHEAD_INTERNAL, "'data' is NULL");
        refused(railhead_tensor_register(manager, data, 0, &mut memory), RAILHEAD_USAGE, "0 bytes to register");
        done(railhead_tensor_register(manager, data, 10, &mut memory));
        refused(railhead_tensor_register(manager, data.byte_add(9), 1, &mut other), RAILHEAD_USAGE, "overlap 10 bytes at ");
        done(railhead_tensor_deregister(memory));
        refused(railhead_tensor_deregister(memory), RAILHEAD_INTERNAL, "was closed");
        // What waits is told when the manager is closed.
        let mut answers = Got::default();
        done(railhead_tensor_recv_async(step, own.as_ptr(), Some(got), (&raw mut answers).cast()));
        done(railhead_tensor_manager_close(manager));
        assert!(
            matches!(answers.0.as_slice(), [(RAILHEAD_USAGE, why, None)] if why.ends_with("has closed its manager")),
            "{:?}",
            answers.0
        );
        refused(railhead_tensor_manager_run(manager, 0, null_mut()), RAILHEAD_INTERNAL, "was closed");
        refused(
            railhead_tensor_recv_async(step, own.as_ptr(), Some(got), (&raw mut answers).cast()),
            RAILHEAD_USAGE,
            "has closed its manager",
        );
        assert_eq!(answers.0.len(), 1);
        refused(railhead_tensor_initialize(manager.cast()), RAILHEAD_INTERNAL, "is not a tensor rendezvous");
        done(railhead_tensor_release(step));
    }
}
