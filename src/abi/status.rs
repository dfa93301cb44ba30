//! Status codes and the error text of the library's own C functions. Every one of them that can fail runs in [`call`] or [`call_status`], on the thread that
//! calls it.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::c_char;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi::boundary::panic_message;
use crate::base::error::Error as BaseError;
use crate::base::log::{self, log_warn};
use crate::store::Error;

/// How a call ended. Where ncclResult_t has a number for it, it is that number.
#[allow(non_camel_case_types)] // The names are C's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub enum railhead_status_t {
    /// It did what it was asked to do. Only now are outputs written.
    RAILHEAD_OK = 0,
    /// The operating system or the NIC refused.
    RAILHEAD_SYSTEM = 2,
    /// A bad call: NULL, or a handle that is closed or never was one; or a fault of the library.
    RAILHEAD_INTERNAL = 3,
    /// An argument, a setting or the state of things that the caller can mend.
    RAILHEAD_USAGE = 5,
    /// The peer or the server is gone, cannot be reached, refuses this client, or is none.
    RAILHEAD_NETWORK = 6,
    /// Not yet: call again.
    RAILHEAD_IN_PROGRESS = 7,
    /// What was waited for did not happen in time.
    RAILHEAD_TIMEOUT = 8,
    /// There is nothing to pop.
    RAILHEAD_QUEUE_EMPTY = 9,
    /// This kind of store has no such operation.
    RAILHEAD_UNSUPPORTED = 10,
    /// The wait was aborted by another call; what was waited for is outstanding still.
    RAILHEAD_ABORTED = 11,
}

use railhead_status_t::*;

impl From<&BaseError> for railhead_status_t {
    fn from(error: &BaseError) -> Self {
        match error {
            BaseError::System { .. } => RAILHEAD_SYSTEM,
            BaseError::Internal(_) => RAILHEAD_INTERNAL,
            BaseError::Usage(_) => RAILHEAD_USAGE,
            BaseError::Remote(_) => RAILHEAD_NETWORK,
            BaseError::Timeout(_) => RAILHEAD_TIMEOUT,
        }
    }
}

impl From<&Error> for railhead_status_t {
    fn from(error: &Error) -> Self {
        match error {
            Error::Timeout(_) => RAILHEAD_TIMEOUT,
            Error::QueueEmpty => RAILHEAD_QUEUE_EMPTY,
            Error::Unsupported(_) => RAILHEAD_UNSUPPORTED,
            Error::Usage(_) => RAILHEAD_USAGE,
            Error::Network(_) => RAILHEAD_NETWORK,
            Error::System(error) => error.into(),
        }
    }
}

thread_local! {
    /// What `railhead_last_error` shows on this thread.
    static TEXT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Runs one call from C and turns its outcome into a status; the words are kept for `railhead_last_error`.
pub fn call(operation: impl FnOnce() -> Result<(), Error>) -> railhead_status_t {
    match catch_unwind(AssertUnwindSafe(operation)) {
        Ok(Ok(())) => RAILHEAD_OK,
        Ok(Err(error)) => {
            keep(error.to_string());
            (&error).into()
        }
        Err(payload) => panicked(payload),
    }
}

/// As [`call`], for calls that say themselves how they ended; a failure is logged with the function's name, too: what a proxy's thread met may be seen by
/// nobody else.
pub fn call_status(name: &'static str, operation: impl FnOnce() -> Result<railhead_status_t, BaseError>) -> railhead_status_t {
    match catch_unwind(AssertUnwindSafe(operation)) {
        Ok(Ok(status)) => status,
        Ok(Err(error)) => {
            let text = error.to_string();
            // The logger is the host's code: should it panic, the status still stands.
            let _ = catch_unwind(AssertUnwindSafe(|| log_warn!(log::NET, "{name}: {text}")));
            keep(text);
            (&error).into()
        }
        Err(payload) => {
            let _ = catch_unwind(AssertUnwindSafe(|| log_warn!(log::NET, "{name}: internal error: {}", panic_message(&*payload))));
            panicked(payload)
        }
    }
}

#[cold]
fn panicked(payload: Box<dyn Any + Send>) -> railhead_status_t {
    keep(format!("internal error: {}", panic_message(&*payload)));
    // A payload may have a destructor that panics in its turn.
    std::mem::forget(payload);
    RAILHEAD_INTERNAL
}

fn keep(text: String) {
    // A thread that is ending has no words any more; the status stands.
    let _ = TEXT.try_with(|place| {
        let mut bytes = text.into_bytes();
        // A key may hold what ends a C string.
        bytes.iter_mut().filter(|byte| **byte == 0).for_each(|byte| *byte = b'?');
        bytes.push(0);
        place.replace(bytes);
    });
}

/// Returns why the last function of this header that returned a status other than RAILHEAD_OK and RAILHEAD_IN_PROGRESS on this thread did so: the library's
/// memory, valid until the next such call on this thread. Empty if none has failed. Never NULL.
///
/// Threads: any, at any time; each has its own.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_last_error() -> *const c_char {
    const NOTHING: &[u8] = b"\0";
    TEXT.try_with(|text| {
        let text = text.borrow();
        if text.is_empty() { NOTHING.as_ptr() } else { text.as_ptr() }
    })
    .unwrap_or(NOTHING.as_ptr())
    .cast()
}

/// Names a status in a few words: static memory that the caller must not free. Never NULL, whatever the number.
///
/// Threads: any, at any time.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_status_string(status: i32) -> *const c_char {
    let words = match status {
        0 => c"success",
        2 => c"the operating system or the NIC refused",
        3 => c"a bad call, or a fault of the library",
        5 => c"invalid usage",
        6 => c"the peer or the server is gone",
        7 => c"in progress",
        8 => c"timed out",
        9 => c"the queue is empty",
        10 => c"not supported by this kind of store",
        _ => c"no status of Railhead's",
    };
    words.as_ptr()
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    fn text() -> String {
        // SAFETY: never NULL, ends with 0, and lives until this thread's next call.
        unsafe { CStr::from_ptr(railhead_last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn each_thread_has_the_words_of_its_own_last_failure() {
        assert_eq!(text(), "");
        assert_eq!(call(|| Err(Error::QueueEmpty)), RAILHEAD_QUEUE_EMPTY);
        assert_eq!(text(), "queue is empty");
        assert_eq!(call(|| Ok(())), RAILHEAD_OK);
        assert_eq!(call_status("f", || Ok(RAILHEAD_IN_PROGRESS)), RAILHEAD_IN_PROGRESS);
        assert_eq!(text(), "queue is empty", "success changes nothing");
        std::thread::spawn(|| assert_eq!(text(), "")).join().unwrap();
        assert_eq!(call(|| Err(Error::Usage("a\0b".into()))), RAILHEAD_USAGE);
        assert_eq!(text(), "a?b");
        assert_eq!(call_status("f", || Err(BaseError::remote("gone"))), RAILHEAD_NETWORK);
        assert_eq!(text(), "gone");
        assert_eq!(call(|| panic!("on purpose")), RAILHEAD_INTERNAL);
        assert_eq!(text(), "internal error: on purpose");
        assert_eq!(call_status("f", || panic!("again")), RAILHEAD_INTERNAL);
        assert_eq!(text(), "internal error: again");
    }
}
