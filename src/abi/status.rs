//! `railhead_status_t`: how a call of the library's own C functions ended. Numbers as `ncclResult_t`'s, so that a program that uses both tables and
//! these functions has one set.

#![allow(non_camel_case_types)] // The names are C's.

use std::ffi::c_char;

use crate::base::error::Error;

/// How a call ended. The log says why. Numbers and meaning as ncclResult_t's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub enum railhead_status_t {
    /// Done.
    RAILHEAD_SUCCESS = 0,
    /// The operating system or the NIC refused.
    RAILHEAD_SYSTEM_ERROR = 2,
    /// A bad call: NULL, a handle that is closed or never was one; or a fault of the library.
    RAILHEAD_INTERNAL_ERROR = 3,
    /// A size, an argument, a setting or the state of things that the caller can mend.
    RAILHEAD_INVALID_USAGE = 5,
    /// The peer is gone.
    RAILHEAD_REMOTE_ERROR = 6,
    /// Not yet: call again.
    RAILHEAD_IN_PROGRESS = 7,
}

impl From<&Error> for railhead_status_t {
    fn from(error: &Error) -> railhead_status_t {
        match error {
            Error::System { .. } => railhead_status_t::RAILHEAD_SYSTEM_ERROR,
            Error::Internal(_) => railhead_status_t::RAILHEAD_INTERNAL_ERROR,
            Error::Usage(_) => railhead_status_t::RAILHEAD_INVALID_USAGE,
            Error::Remote(_) => railhead_status_t::RAILHEAD_REMOTE_ERROR,
        }
    }
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
        6 => c"the peer is gone",
        7 => c"in progress",
        _ => c"no status of Railhead's",
    };
    words.as_ptr()
}
