//! The store's C functions, called wrongly: NULL for each pointer, handles that are closed, forged or of another kind, sizes that are none; and
//! from several threads, with callbacks. c_examples/store_kv.c calls them rightly.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use railhead::abi::rendezvous::*;
use railhead::abi::status::{railhead_last_error, railhead_status_t, railhead_status_t::*};
use railhead::abi::store::*;
use railhead::abi::watch::*;

const LONG: Duration = Duration::from_secs(120);
const LONG_MS: i64 = 120_000;

fn words() -> String {
    // SAFETY: never NULL, and read before the next call.
    unsafe { CStr::from_ptr(railhead_last_error()) }.to_str().unwrap().to_owned()
}

#[track_caller]
fn ok(status: railhead_status_t) {
    assert_eq!(status, RAILHEAD_OK, "{}", words());
}

#[track_caller]
fn refused(status: railhead_status_t, why: &str) {
    // A bad pointer or handle, as opposed to an argument that makes no sense.
    let bad_call = ["NULL", "closed", "is not a", "fork"].iter().any(|word| why.contains(word));
    assert_eq!(status, if bad_call { RAILHEAD_INTERNAL } else { RAILHEAD_USAGE }, "{why}: {}", words());
    assert!(words().contains(why), "{why}: {}", words());
}

fn hash() -> *mut railhead_store_t {
    let mut store = null_mut();
    // SAFETY: a place for a handle.
    ok(unsafe { railhead_store_hash(&mut store) });
    store
}

fn set(store: *mut railhead_store_t, key: &CStr, value: &[u8]) -> railhead_status_t {
    // SAFETY: a string and as many bytes as said.
    unsafe { railhead_store_set(store, key.as_ptr(), value.as_ptr().cast(), value.len()) }
}

fn get(store: *mut railhead_store_t, key: &CStr) -> Vec<u8> {
    let (mut value, mut size) = (null_mut(), 0);
    // SAFETY: a string and two places; the value is as long as it says, ends with a 0, and is freed once.
    unsafe {
        ok(railhead_store_get(store, key.as_ptr(), LONG_MS, &mut value, &mut size));
        let copy = std::slice::from_raw_parts(value.cast::<u8>(), size + 1).to_vec();
        railhead_store_free(value);
        assert_eq!(copy.last(), Some(&0));
        copy[..size].to_vec()
    }
}

#[test]
fn null_is_refused_everywhere_and_named() {
    let store = hash();
    let key = c"k".as_ptr();
    let keys = [key];
    let none = railhead_bytes_t { data: null(), size: 0 };
    let (mut value, mut size, mut number, mut flag) = (null_mut(), 0usize, 0i64, 0 as c_int);
    let (mut array, mut other, mut watch, mut group) = (null_mut(), null_mut(), null_mut(), null_mut());
    let (mut port, mut rank) = (0u16, 0i64);
    unsafe extern "C" fn ignore(_: *mut c_void, _: railhead_change_t, _: railhead_bytes_t, _: railhead_bytes_t) {}
    let strings = [null::<c_char>()];
    // SAFETY: what is not NULL is what the header asks for.
    unsafe {
        refused(railhead_store_hash(null_mut()), "'store' is NULL");
        refused(railhead_store_file(null(), 1, &mut other), "'path' is NULL");
        refused(railhead_store_file(key, 1, null_mut()), "'store' is NULL");
        refused(railhead_store_prefix(null(), store, &mut other), "'prefix' is NULL");
        refused(railhead_store_prefix(key, null_mut(), &mut other), "the store is NULL");
        refused(railhead_store_prefix(key, store, null_mut()), "'store' is NULL");
        refused(railhead_store_connect(null(), 1, 0, &mut other), "'host' is NULL");
        refused(railhead_store_connect(key, 1, 0, null_mut()), "'store' is NULL");
        refused(railhead_store_serve(null(), 0, null_mut()), "'store' is NULL");
        refused(railhead_store_serve(c"nowhere".as_ptr(), 0, &mut other), "address nowhere: expected an IPv4 or IPv6 address");
        refused(railhead_store_clone(null_mut(), &mut other), "the store is NULL");
        refused(railhead_store_clone(store, null_mut()), "'store' is NULL");
        refused(railhead_store_close(null_mut()), "the store is NULL");
        refused(railhead_store_port(null_mut(), &mut port), "the store is NULL");
        refused(railhead_store_port(store, null_mut()), "'port' is NULL");
        refused(railhead_store_set(null_mut(), key, null(), 0), "the store is NULL");
        refused(railhead_store_set(store, null(), null(), 0), "'key' is NULL");
        refused(railhead_store_set(store, key, null(), 1), "'value' is NULL");
        refused(railhead_store_set(store, key, key.cast(), usize::MAX), "is no size");
        refused(railhead_store_get(null_mut(), key, 0, &mut value, &mut size), "the store is NULL");
        refused(railhead_store_get(store, null(), 0, &mut value, &mut size), "'key' is NULL");
        refused(railhead_store_get(store, key, 0, null_mut(), &mut size), "'value' is NULL");
        refused(railhead_store_get(store, key, 0, &mut value, null_mut()), "'size' is NULL");
        refused(railhead_store_wait(null_mut(), keys.as_ptr(), 1, 0), "the store is NULL");
        refused(railhead_store_wait(store, null(), 1, 0), "'keys' is NULL");
        refused(railhead_store_wait(store, strings.as_ptr(), 1, 0), "'keys' is NULL");
        refused(railhead_store_wait(store, keys.as_ptr(), usize::MAX, 0), "is no size");
        refused(railhead_store_check(null_mut(), keys.as_ptr(), 1, &mut flag), "the store is NULL");
        refused(railhead_store_check(store, keys.as_ptr(), 1, null_mut()), "'exist' is NULL");
        refused(railhead_store_check(store, null(), 1, &mut flag), "'keys' is NULL");
        refused(railhead_store_add(null_mut(), key, 1, &mut number), "the store is NULL");
        refused(railhead_store_add(store, null(), 1, &mut number), "'key' is NULL");
        refused(railhead_store_add(store, key, 1, null_mut()), "'sum' is NULL");
        refused(railhead_store_compare_set(null_mut(), key, none, none, &mut value, &mut size), "the store is NULL");
        refused(railhead_store_compare_set(store, null(), none, none, &mut value, &mut size), "'key' is NULL");
        refused(railhead_store_compare_set(store, key, none, none, null_mut(), &mut size), "'value' is NULL");
        let hollow = railhead_bytes_t { data: null(), size: 1 };
        refused(railhead_store_compare_set(store, key, hollow, none, &mut value, &mut size), "'expected' is NULL");
        refused(railhead_store_compare_set(store, key, none, hollow, &mut value, &mut size), "'desired' is NULL");
        refused(railhead_store_append(null_mut(), key, null(), 0), "the store is NULL");
        refused(railhead_store_append(store, null(), null(), 0), "'key' is NULL");
        refused(railhead_store_append(store, key, null(), 1), "'value' is NULL");
        refused(railhead_store_multi_get(null_mut(), keys.as_ptr(), 1, 0, &mut array), "the store is NULL");
        refused(railhead_store_multi_get(store, null(), 1, 0, &mut array), "'keys' is NULL");
        refused(railhead_store_multi_get(store, keys.as_ptr(), 1, 0, null_mut()), "'values' is NULL");
        refused(railhead_store_multi_set(null_mut(), keys.as_ptr(), &none, 1), "the store is NULL");
        refused(railhead_store_multi_set(store, null(), &none, 1), "'keys' is NULL");
        refused(railhead_store_multi_set(store, keys.as_ptr(), null(), 1), "'values' is NULL");
        refused(railhead_store_multi_set(store, keys.as_ptr(), &hollow, 1), "'values' is NULL");
        refused(railhead_store_delete_key(null_mut(), key, &mut flag), "the store is NULL");
        refused(railhead_store_delete_key(store, null(), &mut flag), "'key' is NULL");
        refused(railhead_store_num_keys(null_mut(), &mut number), "the store is NULL");
        refused(railhead_store_num_keys(store, null_mut()), "'count' is NULL");
        refused(railhead_store_list_keys(null_mut(), &mut array, &mut size), "the store is NULL");
        refused(railhead_store_list_keys(store, null_mut(), &mut size), "'keys' is NULL");
        refused(railhead_store_list_keys(store, &mut array, null_mut()), "'count' is NULL");
        refused(railhead_store_queue_push(null_mut(), key, null(), 0), "the store is NULL");
        refused(railhead_store_queue_push(store, null(), null(), 0), "'key' is NULL");
        refused(railhead_store_queue_pop(null_mut(), key, 0, &mut value, &mut size), "the store is NULL");
        refused(railhead_store_queue_pop(store, key, 0, null_mut(), &mut size), "'value' is NULL");
        refused(railhead_store_queue_len(null_mut(), key, &mut number), "the store is NULL");
        refused(railhead_store_queue_len(store, key, null_mut()), "'len' is NULL");
        refused(railhead_store_barrier(null_mut(), key, 1, 0), "the store is NULL");
        refused(railhead_store_barrier(store, null(), 1, 0), "'key' is NULL");
        refused(railhead_store_watch(null_mut(), key, Some(ignore), null_mut(), &mut watch), "the store is NULL");
        refused(railhead_store_watch(store, null(), Some(ignore), null_mut(), &mut watch), "'key' is NULL");
        refused(railhead_store_watch(store, key, None, null_mut(), &mut watch), "'callback' is NULL");
        refused(railhead_store_watch(store, key, Some(ignore), null_mut(), null_mut()), "'watch' is NULL");
        refused(railhead_store_unwatch(null_mut()), "the watch is NULL");
        let url = c"file:///nowhere/at/all?rank=0&world_size=1".as_ptr();
        refused(railhead_rendezvous(url, -1, -1, 0, null_mut(), &mut rank, &mut number), "'store' is NULL");
        refused(railhead_rendezvous(url, -1, -1, 0, &mut other, null_mut(), &mut number), "'own_rank' is NULL");
        refused(railhead_rendezvous(url, -1, -1, 0, &mut other, &mut rank, null_mut()), "'ranks' is NULL");
        refused(railhead_rendezvous_register(null(), None, null_mut()), "'callback' is NULL");
        refused(railhead_rendezvous_join(url, store, 0, 1, 0, &mut group), "Cannot specify both init_method and store.");
        refused(railhead_rendezvous_join(url, null_mut(), 0, 1, 0, null_mut()), "'group' is NULL");
        refused(railhead_rendezvous_new_group(null_mut(), null(), 0, &mut group), "the group is NULL");
        refused(railhead_rendezvous_ranks(null_mut(), &mut rank, &mut number), "the group is NULL");
        refused(railhead_rendezvous_store(null_mut(), &mut other), "the group is NULL");
        refused(railhead_rendezvous_barrier(null_mut(), 0), "the group is NULL");
        refused(railhead_rendezvous_leave(null_mut()), "the group is NULL");
        railhead_store_free(null_mut());
        // What may be NULL.
        ok(railhead_store_set(store, key, null(), 0));
        ok(railhead_store_delete_key(store, key, null_mut()));
        ok(railhead_store_wait(store, null(), 0, 0));
        ok(railhead_store_multi_set(store, null(), null(), 0));
        ok(railhead_store_barrier(store, key, 0, 0));
        let outputs = (value, array, other, watch, group);
        assert_eq!(outputs, (null_mut(), null_mut(), null_mut(), null_mut(), null_mut()), "outputs are written on success alone");
        ok(railhead_store_close(store));
    }
}

#[test]
fn handles_that_are_none_are_told_apart() {
    let (store, closed) = (hash(), hash());
    ok(railhead_store_close(closed));
    refused(railhead_store_close(closed), "was closed");
    refused(set(closed, c"k", b""), "was closed");
    let (mut local, forged) = (0u64, store.map_addr(|at| at ^ 0x1000));
    refused(set((&raw mut local).cast(), c"k", b""), "is not a store");
    refused(set(forged, c"k", b""), "was closed");
    refused(set(std::ptr::without_provenance_mut(1), c"k", b""), "0x1 is not a store");
    refused(railhead_store_unwatch(store.cast()), "is not a watch");
    refused(railhead_rendezvous_leave(store.cast()), "is not a group");
    ok(set(store, c"k", b"v"));
    refused(set(store, c"\xff", b""), "'key' is not UTF-8");
    ok(railhead_store_close(store));
    assert_eq!(local, 0, "what a forged handle points to is left alone");
}

#[test]
fn statuses_are_those_of_the_header() {
    let (store, mut value, mut size, mut number) = (hash(), null_mut(), 0usize, 0i64);
    // SAFETY: strings and places.
    unsafe {
        assert_eq!(railhead_store_get(store, c"k".as_ptr(), 10, &mut value, &mut size), RAILHEAD_TIMEOUT);
        assert_eq!(words(), "wait timeout after 10ms, keys: k");
        assert_eq!(railhead_store_queue_pop(store, c"q".as_ptr(), 0, &mut value, &mut size), RAILHEAD_QUEUE_EMPTY);
        let mut port = 0;
        assert_eq!(railhead_store_port(store, &mut port), RAILHEAD_UNSUPPORTED);
        ok(set(store, c"x", b"x"));
        assert_eq!(railhead_store_add(store, c"x".as_ptr(), 1, &mut number), RAILHEAD_USAGE);
        let mut other = null_mut();
        // Port 1 of loopback: nobody listens there.
        assert_eq!(railhead_store_connect(c"127.0.0.1".as_ptr(), 1, 50, &mut other), RAILHEAD_NETWORK);
        assert!(words().starts_with("The client socket has timed out after 50ms while trying to connect to (127.0.0.1, 1)"), "{}", words());
        assert_eq!(railhead_store_file(c"/nowhere/at/all".as_ptr(), 1, &mut other), RAILHEAD_SYSTEM);
        ok(railhead_store_close(store));
    }
}

#[test]
fn arrays_come_in_one_piece() {
    let store = hash();
    let keys: Vec<CString> = (0..50).map(|i| CString::new(format!("key{i}")).unwrap()).collect();
    let names: Vec<*const c_char> = keys.iter().map(|key| key.as_ptr()).collect();
    let values: Vec<Vec<u8>> = (0..50usize).map(|i| vec![i as u8; i * 37]).collect();
    let given: Vec<railhead_bytes_t> = values.iter().map(|v| railhead_bytes_t { data: v.as_ptr().cast(), size: v.len() }).collect();
    let (mut all, mut count) = (null_mut(), 0);
    // SAFETY: as many strings, values and places as said; the arrays are as long as asked for, and freed once.
    unsafe {
        ok(railhead_store_multi_set(store, names.as_ptr(), given.as_ptr(), 50));
        ok(railhead_store_multi_get(store, names.as_ptr(), 50, 0, &mut all));
        for (got, value) in std::slice::from_raw_parts(all, 50).iter().zip(&values) {
            let got = std::slice::from_raw_parts(got.data.cast::<u8>(), got.size + 1);
            assert_eq!((&got[..value.len()], got.last()), (&value[..], Some(&0)));
            assert_eq!(got.len(), value.len() + 1);
        }
        railhead_store_free(all.cast());
        ok(railhead_store_list_keys(store, &mut all, &mut count));
        let mut listed: Vec<String> =
            std::slice::from_raw_parts(all, count).iter().map(|key| CStr::from_ptr(key.data.cast()).to_str().unwrap().to_owned()).collect();
        railhead_store_free(all.cast());
        listed.sort();
        let mut expected: Vec<String> = (0..50).map(|i| format!("key{i}")).collect();
        expected.sort();
        assert_eq!(listed, expected);
        ok(railhead_store_multi_get(store, null(), 0, 0, &mut all));
        assert!(!all.is_null(), "an empty array is one, and is freed as any");
        railhead_store_free(all.cast());
        ok(railhead_store_close(store));
    }
}

unsafe extern "C" fn report(user: *mut c_void, change: railhead_change_t, old: railhead_bytes_t, new: railhead_bytes_t) {
    // SAFETY: `user` is the sender that outlives the watch; the values are as long as they say.
    let (sender, text) = unsafe {
        let text = |value: railhead_bytes_t| {
            let bytes = if value.size == 0 { &[] } else { std::slice::from_raw_parts(value.data.cast::<u8>(), value.size) };
            String::from_utf8_lossy(bytes).into_owned()
        };
        (&*user.cast::<Sender<String>>(), format!("{change:?} {:?} {:?}", text(old), text(new)))
    };
    let _ = sender.send(text);
}

#[test]
fn a_watch_calls_back_until_it_is_ended() {
    let store = hash();
    let (sender, seen): (Sender<String>, Receiver<String>) = channel();
    let user = (&raw const sender).cast_mut().cast();
    let mut watch = null_mut();
    // SAFETY: `sender` outlives the watch.
    ok(unsafe { railhead_store_watch(store, c"k".as_ptr(), Some(report), user, &mut watch) });
    ok(set(store, c"k", b"1"));
    ok(set(store, c"k", b"2"));
    // SAFETY: a string.
    ok(unsafe { railhead_store_delete_key(store, c"k".as_ptr(), null_mut()) });
    for expected in [r#"RAILHEAD_CREATED "" "1""#, r#"RAILHEAD_UPDATED "1" "2""#, r#"RAILHEAD_DELETED "2" """#] {
        assert_eq!(seen.recv_timeout(LONG).unwrap(), expected);
    }
    ok(railhead_store_unwatch(watch));
    refused(railhead_store_unwatch(watch), "was closed");
    ok(set(store, c"k", b"3"));
    assert!(seen.try_recv().is_err());
    ok(railhead_store_close(store));
}

#[test]
fn a_handle_that_is_closed_in_use_serves_that_call() {
    let mut server = null_mut();
    let mut waiting = null_mut();
    // SAFETY: strings and places.
    unsafe {
        ok(railhead_store_serve(c"127.0.0.1".as_ptr(), 0, &mut server));
        ok(railhead_store_clone(server, &mut waiting));
    }
    // Closed before it had begun, the handle would be refused.
    let waiter = waits(waiting, |store| get(store, c"late"));
    ok(railhead_store_close(waiting));
    ok(set(server, c"late", b"v"));
    assert_eq!(waiter.join().unwrap(), b"v");
    ok(railhead_store_close(server));
}

/// Starts a thread that uses a store, and returns once it sleeps in a receive.
fn waits<R: Send + 'static>(store: *mut railhead_store_t, run: fn(*mut railhead_store_t) -> R) -> std::thread::JoinHandle<R> {
    let (handle, (sender, thread)) = (store.addr(), channel());
    let waiter = std::thread::spawn(move || {
        sender.send(std::fs::read_link("/proc/thread-self").unwrap()).unwrap();
        run(std::ptr::with_exposed_provenance_mut(handle))
    });
    let syscall = std::path::Path::new("/proc").join(thread.recv().unwrap()).join("syscall");
    let end = Instant::now() + LONG;
    while !std::fs::read_to_string(&syscall).is_ok_and(|line| line.starts_with(&format!("{} ", libc::SYS_recvfrom))) {
        assert!(Instant::now() < end && !waiter.is_finished());
        std::thread::yield_now();
    }
    waiter
}

/// A server, a name space of it, a rendezvous' store, and a group's that was made of that.
fn of_servers() -> [*mut railhead_store_t; 4] {
    let (mut server, mut space, mut met, mut group, mut groups) = (null_mut(), null_mut(), null_mut(), null_mut(), null_mut());
    let (mut rank, mut ranks) = (0, 0);
    // SAFETY: strings and places.
    unsafe {
        ok(railhead_store_serve(c"127.0.0.1".as_ptr(), 0, &mut server));
        ok(railhead_store_prefix(c"space".as_ptr(), server, &mut space));
        ok(railhead_rendezvous(c"tcp://localhost:0".as_ptr(), 0, 1, LONG_MS, &mut met, &mut rank, &mut ranks));
        ok(railhead_rendezvous_join(null(), met, 0, 1, LONG_MS, &mut group));
        ok(railhead_rendezvous_store(group, &mut groups));
    }
    ok(railhead_rendezvous_leave(group));
    [server, space, met, groups]
}

#[test]
fn a_clone_has_a_connection_of_its_own() {
    for store in of_servers() {
        let mut clone = null_mut();
        // SAFETY: a place.
        ok(unsafe { railhead_store_clone(store, &mut clone) });
        // SAFETY: an array of one string.
        let waiter = waits(clone, |store| unsafe { railhead_store_wait(store, [c"late".as_ptr()].as_ptr(), 1, 10_000) });
        ok(set(store, c"late", b"v"));
        assert_eq!(waiter.join().unwrap(), RAILHEAD_OK, "the set was kept waiting by the wait");
        ok(railhead_store_close(clone));
        ok(railhead_store_close(store));
    }
}

#[test]
fn every_store_of_a_server_knows_its_port() {
    let stores = of_servers();
    let ports = stores.map(|store| {
        let mut port = 0;
        // SAFETY: a place.
        ok(unsafe { railhead_store_port(store, &mut port) });
        port
    });
    assert_eq!((ports[0], ports[2]), (ports[1], ports[3]));
    assert!(ports[0] != ports[2] && !ports.contains(&0), "{ports:?}");
    stores.into_iter().for_each(|store| ok(railhead_store_close(store)));
}

unsafe extern "C" fn meet(
    user: *mut c_void,
    url: *const c_char,
    timeout_ms: i64,
    store: *mut *mut railhead_store_t,
    rank: *mut i64,
    world_size: *mut i64,
) -> c_int {
    // SAFETY: the library's string and places; `user` is the sender, which outlives the calls.
    unsafe {
        let url = CStr::from_ptr(url).to_str().unwrap();
        (*user.cast::<Sender<String>>()).send(format!("{url} {timeout_ms}")).unwrap();
        if url.contains("fail") {
            return 7;
        }
        (*rank, *world_size) = (1, 2);
        if url.contains("nothing") { 0 } else { c_int::from(railhead_store_hash(store) != RAILHEAD_OK) }
    }
}

#[test]
fn schemes_and_groups_of_a_c_program() {
    let (sender, seen) = channel::<String>();
    let user: *mut c_void = Box::into_raw(Box::new(sender)).cast();
    let (mut store, mut rank, mut ranks, mut group, mut odd) = (null_mut(), 0, 0, null_mut(), null_mut());
    // SAFETY: strings, places, and a user that is never freed.
    unsafe {
        ok(railhead_rendezvous_register(c"c-test".as_ptr(), Some(meet), user));
        refused(railhead_rendezvous_register(c"c-test".as_ptr(), Some(meet), user), "Rendezvous handler for c-test:// already registered");
        ok(railhead_rendezvous(c"c-test://x".as_ptr(), 5, -1, 777, &mut store, &mut rank, &mut ranks));
        assert_eq!((rank, ranks, seen.recv().unwrap().as_str()), (1, 2, "c-test://x?rank=5 777"));
        ok(set(store, c"k", b"v"));
        refused(railhead_rendezvous(c"c-test://fail".as_ptr(), -1, -1, -1, &mut store, &mut rank, &mut ranks), "c-test://fail returned 7");
        assert_eq!(seen.recv().unwrap(), "c-test://fail 1800000", "torch's 30 minutes");
        refused(railhead_rendezvous(c"c-test://nothing".as_ptr(), -1, -1, 0, &mut store, &mut rank, &mut ranks), "the store is NULL");

        ok(railhead_rendezvous_join(null(), store, 1, 2, 0, &mut group));
        ok(railhead_rendezvous_ranks(group, &mut rank, &mut ranks));
        assert_eq!((rank, ranks), (1, 2));
        let mut own = null_mut();
        ok(railhead_rendezvous_store(group, &mut own));
        ok(set(own, c"k", b"mine"));
        assert_eq!(get(store, c"default_pg/0//k"), b"mine");
        ok(railhead_rendezvous_new_group(group, [1i64].as_ptr(), 1, &mut odd));
        ok(railhead_rendezvous_barrier(odd, LONG_MS));
        ok(railhead_rendezvous_leave(odd));
        ok(railhead_rendezvous_new_group(group, [0i64].as_ptr(), 1, &mut odd));
        assert!(odd.is_null(), "rank 1 is no member");
        refused(railhead_rendezvous_new_group(group, [2i64].as_ptr(), 1, &mut odd), "Rank 2 is out of range");
        refused(railhead_rendezvous_new_group(group, [2i64].as_ptr(), usize::MAX, &mut odd), "the job has 2 ranks");
        assert_eq!(railhead_rendezvous_barrier(group, 20), RAILHEAD_TIMEOUT);
        assert!(words().contains("num_workers_joined=1"), "{}", words());
        ok(railhead_rendezvous_leave(group));
        refused(railhead_rendezvous_leave(group), "was closed");
        ok(railhead_store_close(own));
        ok(railhead_store_close(store));
    }
}

#[test]
fn variables_are_followed_or_refused() {
    const CHILD: &str = "RH_STORE_ABI_CHILD";
    if std::env::var_os(CHILD).is_some() {
        let (mut store, mut other, mut port, mut sum) = (null_mut(), null_mut(), 0, 0);
        // SAFETY: as the header asks.
        unsafe {
            let status = railhead_store_serve(null(), 0, &mut store);
            if status != RAILHEAD_OK {
                println!("{status:?}: {}", words());
                return;
            }
            ok(railhead_store_port(store, &mut port));
            ok(railhead_store_connect(c"127.0.0.1".as_ptr(), port, LONG_MS, &mut other));
            ok(railhead_store_set(store, c"k".as_ptr(), c"x".as_ptr().cast(), 1));
            ok(railhead_store_add(store, c"n".as_ptr(), 1, &mut sum));
            assert_ne!(railhead_store_add(other, c"k".as_ptr(), 1, &mut sum), RAILHEAD_OK);
            ok(railhead_store_close(other));
            ok(railhead_store_close(store));
        }
        return;
    }
    let run = |name: &str, value: &str| {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "store::abi::variables_are_followed_or_refused", "--nocapture"]).env(CHILD, "1");
        let output = command.env("RAILHEAD_STORE_BIND", "127.0.0.1").env(name, value).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat()
    };
    let said = run("RAILHEAD_DEBUG", "warn");
    assert!(said.contains("is disconnected: it added 1 to"), "{said}");
    assert!(!run("RAILHEAD_DEBUG", "none").contains("is disconnected"));
    for (name, value) in [("RAILHEAD_STORE_BIND", "10.0.0.5x"), ("RAILHEAD_STORE_SECRET", "  ")] {
        let said = run(name, value);
        assert!(said.contains(&format!("RAILHEAD_USAGE: {name}=")), "{said}");
    }
}
