//! What plugins log, kept for the command that wants to show it. Written on any of a plugin's threads.

use std::collections::VecDeque;
use std::ffi::{CStr, c_char, c_int, c_ulong};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Lines kept; older ones go.
const KEPT: usize = 1000;

/// A line that a plugin logged.
#[derive(Debug, Clone)]
pub struct Line {
    /// ncclDebugLogLevel: 1 version, 2 warn, 3 info, 4 abort, 5 trace.
    pub level: c_int,
    /// The message.
    pub text: String,
}

/// Is told of each line as it comes.
type Watcher = Box<dyn Fn(&Line) + Send + Sync>;

static WATCHER: OnceLock<Watcher> = OnceLock::new();
static LOG: Mutex<VecDeque<Line>> = Mutex::new(VecDeque::new());

unsafe extern "C" {
    /// NCCL's logger, in logger.c; its variable arguments belong to `format`.
    pub fn railhead_cli_logger(level: c_int, flags: c_ulong, file: *const c_char, line: c_int, format: *const c_char, ...);
}

/// Called by logger.c with the formatted message.
#[unsafe(no_mangle)]
extern "C" fn railhead_cli_log(level: c_int, _flags: c_ulong, _file: *const c_char, _line: c_int, message: *const c_char) {
    // SAFETY: logger.c passes a buffer that vsnprintf ended with a NUL.
    let text = unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned();
    let line = Line { level, text };
    if let Some(watcher) = WATCHER.get() {
        watcher(&line);
    }
    let mut log = LOG.lock().unwrap_or_else(PoisonError::into_inner);
    if log.len() == KEPT {
        log.pop_front();
    }
    log.push_back(line);
}

/// Takes what was logged so far.
pub fn take_log() -> Vec<Line> {
    LOG.lock().unwrap_or_else(PoisonError::into_inner).drain(..).collect()
}

/// From now on `watcher` is told of each line as it comes, on the plugin's thread. The first watcher stays.
pub fn watch_log(watcher: impl Fn(&Line) + Send + Sync + 'static) {
    let _ = WATCHER.set(Box::new(watcher));
}
