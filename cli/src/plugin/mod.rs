//! A plugin behind its C ABI, for the commands that drive one.

mod builtin;
mod load;
mod log;
// The tests, which include the file too, use all of it.
#[allow(dead_code)]
mod table;

use std::ffi::c_int;
use std::fmt;

pub use builtin::absolute;
pub use log::{take_log, watch_log};
pub use table::{Buf, HANDLE, HOST, Handle, MAX_RECVS, MISSING, Opaque, Plugin, Properties, Result, VERSIONS};

use log::railhead_cli_logger as logger;

/// A status that no plugin returns: a post left `*request` as it was.
const UNWRITTEN: c_int = -2;

/// A call that did not return ncclSuccess.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    /// The function of the table.
    pub call: &'static str,
    /// What it returned, [`MISSING`] or [`UNWRITTEN`].
    pub status: c_int,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.status {
            1 => "ncclUnhandledCudaError",
            2 => "ncclSystemError",
            3 => "ncclInternalError",
            4 => "ncclInvalidArgument",
            5 => "ncclInvalidUsage",
            6 => "ncclRemoteError",
            7 => "ncclInProgress",
            UNWRITTEN => "*request was not written",
            MISSING => "not in the table",
            _ => "no ncclResult_t",
        };
        write!(f, "{} returned {} ({name})", self.call, self.status)
    }
}

impl std::error::Error for Failure {}

fn failed(call: &'static str, status: c_int) -> Failure {
    Failure { call, status }
}

/// Only a call that succeeds must have written `*request`: NCCL does not look at what a failed one leaves there.
fn unwritten(call: &'static str, result: Result<()>) -> Failure {
    result.err().unwrap_or(Failure { call, status: UNWRITTEN })
}
