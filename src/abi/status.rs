//! Status codes and the error text of the library's own C functions. Every one of them that can fail runs in [`call`], on the thread that calls it.

use std::cell::RefCell;
use std::ffi::c_char;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi::boundary::panic_message;
use crate::base::error::Error as BaseError;
use crate::store::Error;

/// How a call ended.
#[allow(non_camel_case_types)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub enum railhead_status {
    /// It did what it was asked to do. Only now are outputs written.
    RAILHEAD_OK = 0,
    /// What was waited for did not happen in time.
    RAILHEAD_TIMEOUT = 1,
    /// There is nothing to pop.
    RAILHEAD_QUEUE_EMPTY = 2,
    /// This kind of store has no such operation.
    RAILHEAD_UNSUPPORTED = 3,
    /// An argument or a setting that the caller can mend: NULL, a handle that is closed or none, a bad URL, a missing variable.
    RAILHEAD_USAGE = 4,
    /// The server is gone, cannot be reached, refuses this client, or is none.
    RAILHEAD_NETWORK = 5,
    /// The operating system refused something else.
    RAILHEAD_SYSTEM = 6,
    /// A fault of the library.
    RAILHEAD_INTERNAL = 7,
}

use railhead_status::*;

thread_local! {
    /// What `railhead_last_error` shows on this thread.
    static TEXT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Runs one call from C and turns its outcome into a status code; the words are kept for `railhead_last_error`.
pub fn call(operation: impl FnOnce() -> Result<(), Error>) -> railhead_status {
    let (status, text) = match catch_unwind(AssertUnwindSafe(operation)) {
        Ok(Ok(())) => return RAILHEAD_OK,
        Ok(Err(error)) => (status(&error), error.to_string()),
        Err(payload) => {
            let text = format!("internal error: {}", panic_message(&*payload));
            std::mem::forget(payload);
            (RAILHEAD_INTERNAL, text)
        }
    };
    keep(text);
    status
}

fn status(error: &Error) -> railhead_status {
    match error {
        Error::Timeout(_) => RAILHEAD_TIMEOUT,
        Error::QueueEmpty => RAILHEAD_QUEUE_EMPTY,
        Error::Unsupported(_) => RAILHEAD_UNSUPPORTED,
        // To the boundary a bad pointer is a broken contract; to a C program it is its own mistake.
        Error::Usage(_) | Error::System(BaseError::Usage(_) | BaseError::Internal(_)) => RAILHEAD_USAGE,
        Error::Network(_) | Error::System(BaseError::Remote(_)) => RAILHEAD_NETWORK,
        Error::System(BaseError::System { .. }) => RAILHEAD_SYSTEM,
    }
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

/// Returns why the last railhead_store_* or railhead_rendezvous_* call that failed on this thread did so: the library's memory, valid until the next such
/// call on this thread. Empty if none has failed. Never NULL.
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
        assert_eq!(text(), "queue is empty", "success changes nothing");
        std::thread::spawn(|| assert_eq!(text(), "")).join().unwrap();
        assert_eq!(call(|| Err(Error::Usage("a\0b".into()))), RAILHEAD_USAGE);
        assert_eq!(text(), "a?b");
        assert_eq!(call(|| panic!("on purpose")), RAILHEAD_INTERNAL);
        assert_eq!(text(), "internal error: on purpose");
    }
}
