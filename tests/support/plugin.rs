//! The plugin behind its C ABI, as the tests use it: `cli/src/plugin/table.rs` over the library that cargo built with them.

#[path = "../../cli/src/plugin/table.rs"]
mod table;

use std::ffi::{CStr, c_char, c_int, c_ulong};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

pub use table::*;

/// An `ncclResult_t` other than success.
pub type Status = c_int;
/// What a call gives that does not succeed.
type Failure = Status;

pub const SYSTEM_ERROR: Status = 2;
pub const INTERNAL_ERROR: Status = 3;
pub const INVALID_USAGE: Status = 5;
pub const REMOTE_ERROR: Status = 6;

fn failed(call: &'static str, status: Status) -> Status {
    assert_ne!(status, MISSING, "{call} is NULL in the table");
    status
}

/// `*request` must have been written, whatever came of the call.
fn unwritten(call: &'static str, result: Result<()>) -> Status {
    panic!("{call} did not write *request ({result:?})")
}

/// Messages that the plugin logged: level and text.
static LOG: Mutex<Vec<(c_int, String)>> = Mutex::new(Vec::new());

/// NCCL's logger is variadic, which Rust cannot define; a call of it with exactly one argument behind the format passes six arguments, all
/// in registers on the machines that we run on, as this function expects them. The plugin always passes ("%s", message).
extern "C" fn logger(level: c_int, _flags: c_ulong, _file: *const c_char, _line: c_int, format: *const c_char, message: *const c_char) {
    // SAFETY: the plugin passes C strings.
    let (format, message) = unsafe { (CStr::from_ptr(format), CStr::from_ptr(message)) };
    assert_eq!(format.to_bytes(), b"%s", "a message as the format");
    let text = message.to_string_lossy().into_owned();
    if std::env::var_os("RHT_LOG").is_some() {
        eprintln!("[{level}] {text}");
    }
    LOG.lock().unwrap_or_else(|e| e.into_inner()).push((level, text));
}

/// Takes what was logged so far.
pub fn take_log() -> Vec<(c_int, String)> {
    std::mem::take(&mut LOG.lock().unwrap_or_else(|e| e.into_inner()))
}

/// The library that cargo built beside this test.
pub fn library() -> PathBuf {
    let exe = std::env::current_exe().expect("current_exe");
    exe.parent().expect("a directory").join("librailhead.so")
}

impl Plugin {
    /// The table of a version of the library that was built with this test. Not initialised.
    #[track_caller]
    pub fn load(version: u32) -> Plugin {
        Plugin::load_from(&library(), version)
    }

    /// As `load`, from another file.
    #[track_caller]
    pub fn load_from(path: &Path, version: u32) -> Plugin {
        Plugin::open(path, version)
            .unwrap_or_else(|why| panic!("{}, v{version}: {}", path.display(), why.unwrap_or("no such table".into())))
    }

    /// Loads and initialises.
    #[track_caller]
    pub fn start(version: u32) -> Plugin {
        let mut plugin = Plugin::load(version);
        plugin.init().expect("init");
        plugin
    }
}
