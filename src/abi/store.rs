//! `railhead_store_*`: the key-value stores that ranks find each other through, for C programs. Casts and checks; what the operations mean is
//! `store`'s business. On the threads of the host program, which an operation may block up to its timeout.

// What callers owe stands in the header's words, which are these functions' documentation: C's callers do not read "# Safety".
#![allow(clippy::missing_safety_doc)]

pub(super) mod convert;

use std::ffi::{c_char, c_int, c_void};
use std::net::IpAddr;
use std::sync::Arc;

use crate::abi::boundary::{Out, slice};
use crate::abi::objects::Objects;
use crate::abi::status::{call, railhead_status_t};
use crate::base::config::{Config, Debug};
use crate::store::rendezvous::Environment;
use crate::store::tcp::{Host, ServerOptions, TcpOptions};
use crate::store::{Error, FileStore, HashStore, PrefixStore, Result, Store, TcpStore};
use convert::{answer, array, bytes, give, text, texts, timeout};

/// A key-value store that ranks share: an opaque handle. Made by railhead_store_hash, _file, _prefix, _connect and _serve and by railhead_rendezvous,
/// ended by railhead_store_close.
///
/// Threads: any, several at a time, a handle may be closed while another thread uses it: that call goes on. Not from a signal handler. In a forked child
/// the parent's handles are refused, and what they hold open is closed: no child keeps a connection or a port of its parent's. A blocked operation on a connection to a server keeps other operations on the same handle waiting, and on the name
/// spaces and groups that were made of it: a thread that is to wait for long takes a handle of its own (railhead_store_clone).
///
/// Time: no operation on a server returns later than 100 ms after its timeout, also if the server is stopped or does not answer, or another thread has the
/// connection: then it is RAILHEAD_TIMEOUT. What is given no timeout has that of railhead_store_connect or of the rendezvous; 300 s on a store that
/// railhead_store_serve made. Only the system's resolving of a name may take longer. If a server that timed out
/// owes more than the end of a wait, the connection is ended: later calls on the handle are RAILHEAD_NETWORK; a clone of it is as good as new.
#[allow(non_camel_case_types)]
pub struct railhead_store_t(());

/// Bytes, not necessarily text.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct railhead_bytes_t {
    /// Where; anything if the size is 0.
    pub data: *const c_void,
    /// How many.
    pub size: usize,
}

const _: () = assert!(size_of::<railhead_bytes_t>() == 16 && std::mem::offset_of!(railhead_bytes_t, size) == 8);

static STORES: Objects<Arc<dyn Store>> = Objects::new(0xb1, "store");

// ---- opening and closing ----

/// Makes a store within this process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_hash(store: *mut *mut railhead_store_t) -> railhead_status_t {
    // SAFETY: `open` asks of `store` what the header asks of the caller.
    call(|| unsafe { open(store, || Ok(Arc::new(HashStore::new()))) })
}

/// Opens or creates a store in a file, in torch's format: a torch FileStore may use the same file at the same time.
///
/// `world_size`: the last of so many stores removes the file when it is closed; 0 or less: nobody does. This call, operations without a timeout and
/// railhead_store_close wait without limit for whoever holds the file's lock, as torch's do; operations with a timeout until that has passed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_file(path: *const c_char, world_size: i64, store: *mut *mut railhead_store_t) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and a place for a handle.
    call(|| unsafe {
        let path = text(path, "path")?;
        open(store, || Ok(Arc::new(FileStore::new(path, usize::try_from(world_size).ok().filter(|size| *size > 0))?)))
    })
}

/// Makes a name space: the key k is `prefix`/k in `inner`. It keeps `inner`'s store open for itself, and shares its connection; `inner` is closed as any
/// other handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_prefix(
    prefix: *const c_char,
    inner: *mut railhead_store_t,
    store: *mut *mut railhead_store_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and a place for a handle; `inner` is looked up.
    call(|| unsafe {
        let (prefix, inner) = (text(prefix, "prefix")?, found(inner)?);
        open(store, || Ok(Arc::new(PrefixStore::new(prefix, inner))))
    })
}

/// Connects to the server of a TCPStore, torch's or Railhead's, trying until `timeout_ms` has passed (less than 0: for ever). RAILHEAD_STORE_SECRET is
/// the secret of a server that has one; RAILHEAD_USAGE if it is invalid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_connect(
    host: *const c_char,
    port: u16,
    timeout_ms: i64,
    store: *mut *mut railhead_store_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and a place for a handle.
    call(|| unsafe {
        let place = Host::Other(text(host, "host")?.to_owned(), port);
        let secret = environment().secret()?;
        let options = TcpOptions { timeout: timeout(timeout_ms), secret, ..TcpOptions::default() };
        open(store, || Ok(Arc::new(TcpStore::new(place, options)?)))
    })
}

/// Starts the server of a TCPStore in this process and connects to it. The server runs on a thread of its own until this handle and its clones and name
/// spaces are closed; what had arrived by then was carried out.
///
/// `address`: where to listen; NULL for what RAILHEAD_STORE_BIND says, else for all addresses, as torch does. `port`: 0 for any, see
/// railhead_store_port. With RAILHEAD_STORE_SECRET set, clients that do not know it are refused, torch's among them. RAILHEAD_USAGE if either variable
/// holds what is no address or can be no secret.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_serve(address: *const c_char, port: u16, store: *mut *mut railhead_store_t) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string, or NULL, and a place for a handle.
    call(|| unsafe {
        let variables = environment();
        let bind: Option<IpAddr> = if address.is_null() {
            variables.bind()?
        } else {
            let address = text(address, "address")?;
            Some(address.parse().map_err(|_| Error::Usage(format!("address {address}: expected an IPv4 or IPv6 address")))?)
        };
        let own = bind.filter(|ip| !ip.is_unspecified()).map_or("localhost".to_owned(), |ip| ip.to_string());
        let server = ServerOptions { port, bind, secret: variables.secret()?, ..ServerOptions::default() };
        open(store, || Ok(Arc::new(TcpStore::new(Host::Own(own, server), TcpOptions::default())?)))
    })
}

/// Makes another handle on the same store, with a connection of its own if the store is on a server: also of a name space, of a rendezvous' store and of a
/// group's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_clone(store: *mut railhead_store_t, clone: *mut *mut railhead_store_t) -> railhead_status_t {
    // SAFETY: the header asks the caller for a place for a handle; `store` is looked up.
    call(|| unsafe {
        let store = found(store)?;
        open(clone, || store.reopen())
    })
}

/// Ends a handle. What other threads are doing with it goes on.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_store_close(store: *mut railhead_store_t) -> railhead_status_t {
    call(|| Ok(STORES.remove(store).map(drop)?))
}

/// The port of the store's server, whichever process runs it. RAILHEAD_UNSUPPORTED if it has none: a store within this process, or in a file.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_port(store: *mut railhead_store_t, port: *mut u16) -> railhead_status_t {
    // SAFETY: the header asks the caller for a place for a number.
    call(|| unsafe {
        let out = Out::new(port, "port")?;
        out.set(found(store)?.server_port().ok_or_else(|| Error::Unsupported("this store has no server".into()))?);
        Ok(())
    })
}

/// This process's variables, of which RAILHEAD_DEBUG is in force from now on.
pub(super) fn environment() -> Environment {
    Config::apply_debug(Debug::None);
    Environment::process()
}

/// The store of a handle.
pub(super) fn found(handle: *const railhead_store_t) -> Result<Arc<dyn Store>> {
    Ok(Arc::clone(&*STORES.get(handle)?))
}

/// Gives a store to C.
///
/// # Safety
/// Unless NULL or misaligned, `place` must be valid for writes.
pub(super) unsafe fn open(place: *mut *mut railhead_store_t, make: impl FnOnce() -> Result<Arc<dyn Store>>) -> Result<()> {
    // SAFETY: the requirement is the caller's own.
    let out = unsafe { Out::new(place, "store") }?;
    out.set(STORES.insert(make()?));
    Ok(())
}

// ---- values ----

/// Stores a value, replacing any other. A server does not answer to this: only later calls on the same handle are sure to find it done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_set(
    store: *mut railhead_store_t,
    key: *const c_char,
    value: *const c_void,
    size: usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and `size` bytes.
    call(|| unsafe { found(store)?.set(text(key, "key")?, bytes(value, size, "value")?) })
}

/// Waits until the key exists, for at most `timeout_ms` (less than 0: for ever), and copies its value. The caller frees it with
/// railhead_store_free; a 0 that is not counted follows it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_get(
    store: *mut railhead_store_t,
    key: *const c_char,
    timeout_ms: i64,
    value: *mut *mut c_void,
    size: *mut usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and two places.
    call(|| unsafe { give(value, size, || found(store)?.get(text(key, "key")?, timeout(timeout_ms))) })
}

/// Waits until all keys exist, for at most `timeout_ms`. On a server a key that has come meanwhile and was deleted again counts as there. A queue that holds something counts as a key, but a server lets only one who waits go on for each
/// value that is pushed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_wait(
    store: *mut railhead_store_t,
    keys: *const *const c_char,
    count: usize,
    timeout_ms: i64,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for `count` strings.
    call(|| unsafe { found(store)?.wait(&texts(keys, count)?, timeout(timeout_ms)) })
}

/// Whether all keys exist now: 1 or 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_check(
    store: *mut railhead_store_t,
    keys: *const *const c_char,
    count: usize,
    exist: *mut c_int,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for `count` strings and a place.
    call(|| unsafe { answer(exist, "exist", || found(store)?.check(&texts(keys, count)?).map(c_int::from)) })
}

/// Adds to a number, which is stored as decimal text and starts from 0, and gives the sum, which wraps around at 64 bits. A value that is no such number is
/// RAILHEAD_USAGE, or, on a server, which then ends the connection, RAILHEAD_NETWORK.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_add(
    store: *mut railhead_store_t,
    key: *const c_char,
    delta: i64,
    sum: *mut i64,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and a place.
    call(|| unsafe { answer(sum, "sum", || found(store)?.add(text(key, "key")?, delta)) })
}

/// Stores `desired` if the value is `expected`, or if there is no value and `expected` is empty, and gives the value after that: freed with
/// railhead_store_free. A missing key and an `expected` that is not empty give `expected` and store nothing: torch's rule.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_compare_set(
    store: *mut railhead_store_t,
    key: *const c_char,
    expected: railhead_bytes_t,
    desired: railhead_bytes_t,
    value: *mut *mut c_void,
    size: *mut usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string, two runs of bytes and two places.
    call(|| unsafe {
        give(value, size, || {
            let expected = bytes(expected.data, expected.size, "expected")?;
            found(store)?.compare_set(text(key, "key")?, expected, bytes(desired.data, desired.size, "desired")?)
        })
    })
}

/// Appends to a value, which starts empty. A server does not answer to this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_append(
    store: *mut railhead_store_t,
    key: *const c_char,
    value: *const c_void,
    size: usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and `size` bytes.
    call(|| unsafe { found(store)?.append(text(key, "key")?, bytes(value, size, "value")?) })
}

/// Waits until all keys exist, for at most `timeout_ms`, and copies their values, in the order of the keys. One railhead_store_free frees the array and
/// all values; a 0 that is not counted follows each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_multi_get(
    store: *mut railhead_store_t,
    keys: *const *const c_char,
    count: usize,
    timeout_ms: i64,
    values: *mut *mut railhead_bytes_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for `count` strings and a place.
    call(|| unsafe { answer(values, "values", || array(&found(store)?.multi_get(&texts(keys, count)?, timeout(timeout_ms))?)) })
}

/// Stores `count` values. A server does not answer to this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_multi_set(
    store: *mut railhead_store_t,
    keys: *const *const c_char,
    values: *const railhead_bytes_t,
    count: usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for `count` strings and as many runs of bytes.
    call(|| unsafe {
        let keys = texts(keys, count)?;
        let values = if count == 0 { &[] } else { slice(values, count, "values")? };
        let values = values.iter().map(|value| bytes(value.data, value.size, "values"));
        let entries = keys.into_iter().zip(values).map(|(key, value)| Ok((key, value?))).collect::<Result<Vec<_>>>()?;
        found(store)?.multi_set(&entries)
    })
}

/// Removes a key; `existed`, which may be NULL, tells whether it was there: 1 or 0, but always 1 of a store in a file, as torch's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_delete_key(
    store: *mut railhead_store_t,
    key: *const c_char,
    existed: *mut c_int,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and a place, or NULL.
    call(|| unsafe {
        let out = Out::optional(existed, "existed")?;
        let there = found(store)?.delete_key(text(key, "key")?)?;
        if let Some(out) = out {
            out.set(c_int::from(there));
        }
        Ok(())
    })
}

/// How many keys the store holds, its own bookkeeping included, queues not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_num_keys(store: *mut railhead_store_t, count: *mut i64) -> railhead_status_t {
    // SAFETY: the header asks the caller for a place.
    call(|| unsafe { answer(count, "count", || found(store)?.num_keys()) })
}

/// The keys, in no order. One railhead_store_free frees the array and all keys; each ends with a 0 that is not counted.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_list_keys(
    store: *mut railhead_store_t,
    keys: *mut *mut railhead_bytes_t,
    count: *mut usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for two places.
    call(|| unsafe {
        let (keys, count) = (Out::new(keys, "keys")?, Out::new(count, "count")?);
        let found = found(store)?.list_keys()?;
        keys.set(array(&found)?);
        count.set(found.len());
        Ok(())
    })
}

// ---- queues and barriers ----

/// Appends to a queue; one who waits for it goes on. A server does not answer to this.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_queue_push(
    store: *mut railhead_store_t,
    key: *const c_char,
    value: *const c_void,
    size: usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and `size` bytes.
    call(|| unsafe { found(store)?.queue_push(text(key, "key")?, bytes(value, size, "value")?) })
}

/// Takes the oldest value from a queue, waiting for one for at most `timeout_ms`: RAILHEAD_QUEUE_EMPTY if that is 0 and there is none. The caller frees
/// the value with railhead_store_free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_queue_pop(
    store: *mut railhead_store_t,
    key: *const c_char,
    timeout_ms: i64,
    value: *mut *mut c_void,
    size: *mut usize,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and two places.
    call(|| unsafe { give(value, size, || found(store)?.queue_pop(text(key, "key")?, timeout(timeout_ms))) })
}

/// How many values a queue holds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_queue_len(store: *mut railhead_store_t, key: *const c_char, len: *mut i64) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string and a place.
    call(|| unsafe { answer(len, "len", || found(store)?.queue_len(text(key, "key")?)) })
}

/// Waits until `world_size` callers have come to the barrier of this key, for at most `timeout_ms`; not at all if `world_size` is less than 1. A key serves once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_barrier(
    store: *mut railhead_store_t,
    key: *const c_char,
    world_size: i64,
    timeout_ms: i64,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string.
    call(|| unsafe { found(store)?.barrier(text(key, "key")?, world_size, timeout(timeout_ms)) })
}

/// Frees what any function of the store has given: values, arrays of values, keys. NULL is fine.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_free(memory: *mut c_void) {
    // SAFETY: the header asks the caller for what `allocate` gave, once, or NULL.
    unsafe { libc::free(memory) }
}
