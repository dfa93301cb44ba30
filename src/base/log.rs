//! Log messages, through NCCL's logger and, under RAILHEAD_DEBUG, to stderr. Called on any thread, never on the hot path (except TRACE, which is off by
//! default).
//!
//! WARN: the user must act. INFO: once per init, comm or fault. TRACE: only under RAILHEAD_DEBUG=trace. Without a logger and without
//! RAILHEAD_DEBUG nothing is written. Messages are bounded and built on the stack, so that logging works when memory does not.

use std::ffi::{CStr, c_char, c_int, c_ulong};
use std::fmt::{self, Write};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

/// Subsystem INIT, and below the others that Railhead uses. Source: NCCL's nccl_common.h, `ncclDebugLogSubSys`.
pub const INIT: u64 = 0x1;
/// Subsystem NET.
pub const NET: u64 = 0x10;
/// Subsystem ENV.
pub const ENV: u64 = 0x80;
/// Subsystem REG: memory registration.
pub const REG: u64 = 0x2000;

/// NCCL's `ncclDebugLogger_t`.
pub type NcclLogger = unsafe extern "C" fn(level: c_int, flags: c_ulong, file: *const c_char, line: c_int, fmt: *const c_char, ...);

/// How much a message matters. Values of NCCL's `ncclDebugLogLevel`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// Nothing.
    None = 0,
    /// The user must act.
    Warn = 2,
    /// Once per init, comm or fault.
    Info = 3,
    /// Everything.
    Trace = 5,
}

/// Bytes of a message at most, terminator included.
const MESSAGE_SIZE: usize = 1024;

/// Address of NCCL's logger, or 0.
static LOGGER: AtomicUsize = AtomicUsize::new(0);
/// Messages up to this level go to stderr.
static STDERR: AtomicU8 = AtomicU8::new(Level::None as u8);

/// Sets or removes NCCL's logger: at each init, and when the last comm is closed, because the logger is in a library that may be unloaded then.
pub fn set_nccl_logger(logger: Option<NcclLogger>) {
    LOGGER.store(logger.map_or(0, |f| f as usize), Ordering::Release);
}

/// Sends messages up to `level` to stderr as well.
pub fn set_stderr(level: Level) {
    STDERR.store(level as u8, Ordering::Relaxed);
}

/// Whether a message of this level goes to any output. TRACE goes to NCCL's logger only if it also goes to stderr: it is not worth formatting otherwise.
#[inline]
pub fn enabled(level: Level) -> bool {
    level as u8 <= STDERR.load(Ordering::Relaxed) || (level <= Level::Info && LOGGER.load(Ordering::Relaxed) != 0)
}

/// Formats and delivers a message. Use the macros.
#[cold]
pub fn emit(level: Level, subsys: u64, file: &'static CStr, line: u32, args: fmt::Arguments<'_>) {
    let mut message = Message::<MESSAGE_SIZE>::new();
    // Fails only if an argument's Display does; the message up to there is still logged.
    let _ = message.write_fmt(args);
    let text = message.finish();
    if level as u8 <= STDERR.load(Ordering::Relaxed) {
        to_stderr(level, file, line, text);
    }
    let logger = LOGGER.load(Ordering::Acquire);
    if logger != 0 {
        // SAFETY: only `set_nccl_logger` stores there, and only functions of this type.
        let logger: NcclLogger = unsafe { std::mem::transmute::<usize, NcclLogger>(logger) };
        // SAFETY: NCCL's logger takes a printf format and its arguments; "%s" consumes exactly the one string given. The message never
        // becomes a format itself: it may hold a '%' from a peer or a user. All strings are terminated and outlive the call.
        unsafe { logger(level as c_int, subsys as c_ulong, file.as_ptr(), line as c_int, c"%s".as_ptr(), text.as_ptr()) };
    }
}

fn to_stderr(level: Level, file: &CStr, line: u32, text: &CStr) {
    let mut out = Message::<{ MESSAGE_SIZE + 256 }>::new();
    let name = match level {
        Level::None => "",
        Level::Warn => "WARN",
        Level::Info => "INFO",
        Level::Trace => "TRACE",
    };
    let file = file.to_str().unwrap_or("?");
    let text = text.to_str().unwrap_or("?");
    let _ = write!(out, "railhead[{}] {name} {file}:{line} {text}", std::process::id());
    let bytes = out.finish_line();
    // One write, so that lines of several threads and processes do not mix; and no lock, which a fork could leave taken.
    // SAFETY: `bytes` outlive the call. A closed stderr is an error, which is ignored.
    unsafe { libc::write(2, bytes.as_ptr().cast(), bytes.len()) };
}

/// A bounded string on the stack. NULs are replaced, what does not fit is cut at a character.
struct Message<const N: usize> {
    bytes: [u8; N],
    len: usize,
    full: bool,
}

impl<const N: usize> Message<N> {
    fn new() -> Self {
        Message { bytes: [0; N], len: 0, full: false }
    }

    fn finish(&mut self) -> &CStr {
        // `write_str` leaves at least one byte free and stores no NUL.
        self.bytes[self.len] = 0;
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"?")
    }

    fn finish_line(&mut self) -> &[u8] {
        self.bytes[self.len] = b'\n';
        &self.bytes[..=self.len]
    }
}

impl<const N: usize> Write for Message<N> {
    fn write_str(&mut self, s: &str) -> fmt::Result {
        if self.full {
            return Ok(());
        }
        let room = N - 1 - self.len;
        let mut take = s.len().min(room);
        while !s.is_char_boundary(take) {
            take -= 1;
        }
        self.full = take < s.len();
        for &byte in &s.as_bytes()[..take] {
            self.bytes[self.len] = if byte == 0 { b'?' } else { byte };
            self.len += 1;
        }
        Ok(())
    }
}

/// `log_at!(level, subsys, "format", ...)`: what the three others are made of.
#[allow(unused_macros)]
macro_rules! log_at {
    ($level:expr, $subsys:expr, $($arg:tt)*) => {
        if $crate::base::log::enabled($level) {
            const FILE: &std::ffi::CStr = match std::ffi::CStr::from_bytes_with_nul(concat!(file!(), "\0").as_bytes()) {
                Ok(file) => file,
                Err(_) => c"?",
            };
            $crate::base::log::emit($level, $subsys, FILE, line!(), format_args!($($arg)*));
        }
    };
}

/// `log_warn!(log::NET, "format", ...)`: something that the user must act on.
#[allow(unused_macros)]
macro_rules! log_warn {
    ($subsys:expr, $($arg:tt)*) => { $crate::base::log::log_at!($crate::base::log::Level::Warn, $subsys, $($arg)*) };
}

/// `log_info!(log::NET, "format", ...)`: once per init, comm or fault.
#[allow(unused_macros)]
macro_rules! log_info {
    ($subsys:expr, $($arg:tt)*) => { $crate::base::log::log_at!($crate::base::log::Level::Info, $subsys, $($arg)*) };
}

/// `log_trace!(log::NET, "format", ...)`: only under RAILHEAD_DEBUG=trace.
#[allow(unused_macros)]
macro_rules! log_trace {
    ($subsys:expr, $($arg:tt)*) => { $crate::base::log::log_at!($crate::base::log::Level::Trace, $subsys, $($arg)*) };
}

#[allow(unused_imports)]
pub(crate) use {log_at, log_info, log_trace, log_warn};

#[cfg(test)]
mod tests {
    use std::os::fd::FromRawFd;
    use std::sync::Mutex;

    use super::*;
    use crate::base::fork::tests::in_child;

    type Logged = (c_int, c_ulong, String, c_int, String, String);

    static LOGGED: Mutex<Vec<Logged>> = Mutex::new(Vec::new());

    /// A logger as C would write it, for calls with one argument behind the format.
    unsafe extern "C" fn logger(level: c_int, flags: c_ulong, file: *const c_char, line: c_int, fmt: *const c_char, arg: *const c_char) {
        // SAFETY: the caller under test promises terminated strings.
        let text = |p: *const c_char| unsafe { CStr::from_ptr(p) }.to_str().unwrap().to_string();
        LOGGED.lock().unwrap().push((level, flags, text(file), line, text(fmt), text(arg)));
    }

    /// One that keeps nothing, for a child, which must not wait for another thread's lock.
    unsafe extern "C" fn deaf(_: c_int, _: c_ulong, _: *const c_char, _: c_int, _: *const c_char, _: *const c_char) {}

    type Fixed = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char);

    fn variadic(logger: Fixed) -> NcclLogger {
        // SAFETY: on the platforms that the library builds for, a variadic call passes its first pointer argument where a fixed one would.
        unsafe { std::mem::transmute::<Fixed, NcclLogger>(logger) }
    }

    /// The messages with `marker` in them: other tests of the process may log as well.
    fn logged(marker: &str) -> Vec<Logged> {
        LOGGED.lock().unwrap().iter().filter(|h| h.5.contains(marker)).cloned().collect()
    }

    #[test]
    fn nccls_logger_gets_bounded_text_that_is_never_a_format() {
        set_nccl_logger(Some(variadic(logger)));
        log_warn!(NET, "m1 %s%n {} nul\0.", "100%d");
        let line = line!() - 1;
        log_info!(INIT, "m2");
        log_trace!(NET, "m3 is not asked for");
        log_warn!(NET, "m4  {}{}", "\u{20ac}".repeat(1000), "z");
        log_warn!(NET, "m5 {} {}", "x".repeat(2000), "and more");
        set_nccl_logger(None);
        log_warn!(NET, "m6 nobody listens");

        assert_eq!(logged("m1"), [(2, 0x10, file!().into(), line as c_int, "%s".into(), "m1 %s%n 100%d nul?.".into())]);
        let m2 = logged("m2");
        assert_eq!((m2.len(), m2[0].0, m2[0].1), (1, 3, 1));
        assert_eq!(logged("m3").len() + logged("m6").len(), 0);
        let m4 = &logged("m4")[0].5;
        assert_eq!(m4.len(), 4 + 339 * 3, "cut at a character, not inside");
        assert!(m4[4..].chars().all(|c| c == '\u{20ac}'), "nothing follows what was cut");
        let m5 = &logged("m5")[0].5;
        assert_eq!(m5.len(), 1023);
        assert!(m5[3..].bytes().all(|b| b == b'x'));
    }

    #[test]
    fn stderr_gets_one_line_per_message_up_to_its_level() {
        let mut ends = [0; 2];
        // SAFETY: two ints, as the call wants.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        // SAFETY: the call just returned it.
        let mut reader = unsafe { std::fs::File::from_raw_fd(ends[0]) };
        assert!(in_child(|| {
            // SAFETY: replaces the child's own descriptor.
            unsafe { libc::dup2(ends[1], 2) };
            set_nccl_logger(Some(variadic(deaf)));
            log_warn!(NET, "before");
            set_stderr(Level::Info);
            log_info!(NET, "shown {}", 1);
            log_trace!(NET, "hidden");
            set_stderr(Level::Trace);
            log_trace!(NET, "traced");
            set_stderr(Level::None);
            log_warn!(NET, "after");
            true
        }));
        // SAFETY: ours, and not used again.
        unsafe { libc::close(ends[1]) };
        let mut text = String::new();
        std::io::Read::read_to_string(&mut reader, &mut text).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(
            lines[0].starts_with("railhead[") && lines[0].contains("] INFO src/base/log.rs:") && lines[0].ends_with(" shown 1"),
            "{text}"
        );
        assert!(lines[1].contains("] TRACE ") && lines[1].ends_with(" traced"), "{text}");
    }
}
