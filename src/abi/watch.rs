//! `railhead_store_watch` and `_unwatch`: a C function that is told of each change of a key, on a thread of the watch.

// What callers owe stands in the header's words, which are this function's documentation: C's callers do not read "# Safety".
#![allow(clippy::missing_safety_doc)]

use std::ffi::{c_char, c_void};
use std::ptr;

use crate::abi::boundary::{Out, bad_pointer};
use crate::abi::objects::Objects;
use crate::abi::status::{call, railhead_status_t};
use crate::abi::store::convert::{User, text};
use crate::abi::store::{found, railhead_bytes_t, railhead_store_t};
use crate::store::{Change, KeyWatch};

/// A watch on a key: an opaque handle, ended by railhead_store_unwatch.
#[allow(non_camel_case_types)]
pub struct railhead_watch_t(());

/// What happened to a watched key.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub enum railhead_change_t {
    /// It has another value, or the same once more.
    RAILHEAD_UPDATED = 0,
    /// It exists now: there is no old value.
    RAILHEAD_CREATED = 1,
    /// It is gone: there is no new value.
    RAILHEAD_DELETED = 2,
    /// The server is gone, or gave this watch up because its callback was too slow: neither value, and nothing after this.
    RAILHEAD_LOST = 3,
}

use railhead_change_t::*;

/// Called with each change of a watched key, in order, on a thread of the watch, which has all signals blocked. The values are the library's, until the
/// callback returns. May call any function of this header; must not throw.
#[allow(non_camel_case_types)]
pub type railhead_watch_callback_t =
    Option<unsafe extern "C" fn(user: *mut c_void, change: railhead_change_t, old_value: railhead_bytes_t, new_value: railhead_bytes_t)>;

static WATCHES: Objects<KeyWatch> = Objects::new(0xb2, "watch");

/// Has `callback` called with `user` and each change of the key's value from now on, on a thread of its own, until railhead_store_unwatch.
/// RAILHEAD_UNSUPPORTED by torch's servers. In a file a change is noticed within 10 ms.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn railhead_store_watch(
    store: *mut railhead_store_t,
    key: *const c_char,
    callback: railhead_watch_callback_t,
    user: *mut c_void,
    watch: *mut *mut railhead_watch_t,
) -> railhead_status_t {
    // SAFETY: the header asks the caller for a string, a place, and a function that may be called from another thread.
    call(|| unsafe {
        let out = Out::new(watch, "watch")?;
        let callback = callback.ok_or_else(|| bad_pointer(0, "callback", 1))?;
        let user = User(user);
        let tell = move |change: Change<'_>| {
            let user = &user;
            let nothing = railhead_bytes_t { data: ptr::null(), size: 0 };
            let of = |value: &[u8]| railhead_bytes_t { data: value.as_ptr().cast(), size: value.len() };
            let (change, old, new) = match change {
                Change::Created(new) => (RAILHEAD_CREATED, nothing, of(new)),
                Change::Updated(old, new) => (RAILHEAD_UPDATED, of(old), of(new)),
                Change::Deleted(old) => (RAILHEAD_DELETED, of(old), nothing),
                Change::Lost(_) => (RAILHEAD_LOST, nothing, nothing),
            };
            // The caller gave the function for these arguments, and keeps it and `user` usable until it has ended the watch.
            callback(user.0, change, old, new);
        };
        out.set(WATCHES.insert(found(store)?.watch_key(text(key, "key")?, Box::new(tell))?));
        Ok(())
    })
}

/// Ends a watch. When this returns, the callback has returned for the last time; called within the callback, it is the last call.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_store_unwatch(watch: *mut railhead_watch_t) -> railhead_status_t {
    call(|| Ok(WATCHES.remove(watch).map(drop)?))
}
