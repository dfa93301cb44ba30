//! `railhead_version`: which build a C program has loaded. Any thread, any time, also before `init`.

use std::ffi::c_char;

const VERSION: &[u8] = concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes();

/// Returns the library's version, "major.minor.patch": static memory that the caller must not free. Never NULL.
///
/// Threads: any, at any time.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_version() -> *const c_char {
    VERSION.as_ptr().cast()
}
