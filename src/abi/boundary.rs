//! The line between C and Rust. Every function that C calls runs inside [`call`]; every pointer that C passes goes through [`Out`],
//! [`read`], [`fn@slice`] or [`bytes`] before it is used. Called by the shims in `abi::nccl`, on whatever thread the host calls from.

use std::any::Any;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use crate::abi::nccl::types::ncclResult_t;
use crate::base::error::{Error, Result};
use crate::base::log::{self, Level, log_info, log_warn};

/// Runs one call from C, of function `name` of ABI version `version`, and turns its outcome into NCCL's status code.
///
/// A panic becomes `ncclInternalError` and a WARN line with its message; an error becomes its code and one line of log.
#[inline(always)]
pub fn call(name: &'static str, version: u32, operation: impl FnOnce() -> Result<()>) -> ncclResult_t {
    call_with(name, version, Level::Warn, operation)
}

/// [`call`], with the level at which a usage error is logged: Info where the host only asks whether it may.
#[inline(always)]
pub fn call_with(name: &'static str, version: u32, usage: Level, operation: impl FnOnce() -> Result<()>) -> ncclResult_t {
    match catch_unwind(AssertUnwindSafe(operation)) {
        Ok(Ok(())) => ncclResult_t::ncclSuccess,
        Ok(Err(error)) => failed(name, version, usage, error),
        Err(payload) => panicked(name, version, payload),
    }
}

/// The status code of an error: the only place that knows. The NCCL of tables v4 and v5 has no code for a lost peer.
pub fn status(error: &Error, version: u32) -> ncclResult_t {
    match error {
        Error::System { .. } => ncclResult_t::ncclSystemError,
        Error::Internal(_) => ncclResult_t::ncclInternalError,
        Error::Usage(_) => ncclResult_t::ncclInvalidUsage,
        Error::Remote(_) | Error::Timeout(_) if version <= 5 => ncclResult_t::ncclSystemError,
        Error::Remote(_) | Error::Timeout(_) => ncclResult_t::ncclRemoteError,
    }
}

#[cold]
fn failed(name: &'static str, version: u32, usage: Level, error: Error) -> ncclResult_t {
    let status = status(&error, version);
    // The logger is the host's code and formatting is ours: should either panic, the status still stands.
    let _ = catch_unwind(AssertUnwindSafe(|| match (usage, &error) {
        (Level::Info, Error::Usage(_)) => log_info!(log::NET, "{name} (v{version}): {error}"),
        _ => log_warn!(log::NET, "{name} (v{version}): {error}"),
    }));
    status
}

#[cold]
fn panicked(name: &'static str, version: u32, payload: Box<dyn Any + Send>) -> ncclResult_t {
    let _ = catch_unwind(AssertUnwindSafe(|| log_warn!(log::NET, "{name} (v{version}): internal error: {}", panic_message(&*payload))));
    // A payload may have a destructor that panics in its turn; this runs outside any other protection.
    std::mem::forget(payload);
    ncclResult_t::ncclInternalError
}

/// Runs a call of the library's own C functions; a failure is logged and answered with `otherwise`.
pub fn call_or<T>(name: &'static str, otherwise: T, operation: impl FnOnce() -> Result<T>) -> T {
    let message = match catch_unwind(AssertUnwindSafe(operation)) {
        Ok(Ok(value)) => return value,
        Ok(Err(error)) => error.to_string(),
        Err(payload) => {
            let message = format!("internal error: {}", panic_message(&*payload));
            std::mem::forget(payload);
            message
        }
    };
    let _ = catch_unwind(AssertUnwindSafe(|| log_warn!(log::NET, "{name}: {message}")));
    otherwise
}

pub(super) fn panic_message(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("a panic without words")
}

/// Where C wants a result: not NULL, aligned, writable.
pub struct Out<T>(NonNull<T>);

impl<T> Out<T> {
    /// Checks the argument `name`.
    ///
    /// # Safety
    /// Unless NULL or misaligned, `pointer` must be valid for writes of a `T` for as long as the result lives.
    #[inline]
    pub unsafe fn new(pointer: *mut T, name: &'static str) -> Result<Out<T>> {
        match NonNull::new(pointer) {
            Some(pointer) if pointer.is_aligned() => Ok(Out(pointer)),
            _ => Err(bad_pointer(pointer.addr(), name, align_of::<T>())),
        }
    }

    /// As [`Out::new`], for a result that the caller may do without.
    ///
    /// # Safety
    /// As for [`Out::new`].
    #[inline]
    pub unsafe fn optional(pointer: *mut T, name: &'static str) -> Result<Option<Out<T>>> {
        if pointer.is_null() {
            return Ok(None);
        }
        // SAFETY: the requirement is the caller's own.
        unsafe { Out::new(pointer, name) }.map(Some)
    }

    /// Writes the result.
    #[inline]
    pub fn set(&self, value: T) {
        // SAFETY: `new` checked the alignment, and its caller vouched that the place may be written. What stands there is foreign and
        // possibly uninitialised, so it is neither read nor dropped.
        unsafe { self.0.write(value) }
    }
}

/// Reads the argument `name`.
///
/// # Safety
/// Unless NULL or misaligned, `pointer` must be valid for reads of a `T`, and no other thread may write there during the call.
#[inline]
pub unsafe fn read<T: Copy>(pointer: *const T, name: &'static str) -> Result<T> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(bad_pointer(pointer.addr(), name, align_of::<T>()));
    }
    // SAFETY: not NULL, aligned; readable by this function's own requirement.
    Ok(unsafe { pointer.read() })
}

/// The argument `name`, an array of `n` elements.
///
/// # Safety
/// Unless NULL or misaligned, `pointer` must be valid for reads of `n` elements, and nobody may write there while the result lives.
#[inline]
pub unsafe fn slice<'a, T: Copy>(pointer: *const T, n: usize, name: &'static str) -> Result<&'a [T]> {
    if pointer.is_null() || !pointer.is_aligned() {
        return Err(bad_pointer(pointer.addr(), name, align_of::<T>()));
    }
    // SAFETY: not NULL, aligned; readable and quiet by this function's own requirement.
    Ok(unsafe { std::slice::from_raw_parts(pointer, n) })
}

/// The argument `name`, `N` bytes that the call may read and change.
///
/// # Safety
/// Unless NULL, `pointer` must be valid for reads and writes of `N` bytes, and nobody else may touch them while the result lives.
#[inline]
pub unsafe fn bytes<'a, const N: usize>(pointer: *mut c_void, name: &'static str) -> Result<&'a mut [u8; N]> {
    if pointer.is_null() {
        return Err(bad_pointer(0, name, 1));
    }
    // SAFETY: not NULL; bytes have no alignment; readable, writable and ours alone by this function's own requirement.
    Ok(unsafe { &mut *pointer.cast::<[u8; N]>() })
}

#[cold]
pub(super) fn bad_pointer(address: usize, name: &'static str, align: usize) -> Error {
    match address {
        0 => Error::internal(format!("argument '{name}' is NULL")),
        _ => Error::internal(format!("argument '{name}' is {address:#x}, which is not aligned to {align} bytes")),
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn every_error_has_its_status() {
        let system = Error::system("open", io::Error::from_raw_os_error(2));
        for version in 4..=12 {
            assert_eq!(status(&system, version) as i32, 2);
            assert_eq!(status(&Error::internal("x"), version) as i32, 3);
            assert_eq!(status(&Error::usage("x"), version) as i32, 5);
            assert_eq!(status(&Error::remote("x"), version) as i32, if version <= 5 { 2 } else { 6 });
        }
    }

    #[test]
    fn a_panic_is_an_internal_error() {
        assert_eq!(call("test", 12, || panic!("on purpose")) as i32, 3);
        assert_eq!(call("test", 12, || std::panic::panic_any(7u32)) as i32, 3);
        assert_eq!(call_or("test", 5, || panic!("on purpose")), 5);
    }

    #[test]
    fn bad_pointers_are_named() {
        // SAFETY: NULL and misaligned pointers are what the functions reject, and they are not used.
        unsafe {
            assert!(Out::<u32>::new(std::ptr::null_mut(), "done").is_err_and(|e| e.to_string().contains("'done' is NULL")));
            let odd = std::ptr::without_provenance_mut::<u32>(0x1001);
            assert!(Out::new(odd, "done").is_err_and(|e| e.to_string().contains("not aligned to 4")));
            assert!(read(odd.cast_const(), "config").is_err());
            assert!(slice(odd.cast_const(), 3, "sizes").is_err());
            assert!(bytes::<64>(std::ptr::null_mut(), "handle").is_err());
            assert!(Out::<u32>::optional(std::ptr::null_mut(), "sizes").is_ok_and(|out| out.is_none()));
        }
    }
}
