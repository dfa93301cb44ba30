//! What goes between C and a store: strings and bytes in, results and memory out, pointers of the caller's own. For `railhead_store_*` and
//! `railhead_rendezvous_*`, on the thread that calls them.

use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::time::Duration;

use super::railhead_bytes_t;
use crate::abi::boundary::{Out, bad_pointer, slice};
use crate::store::{Error, FOREVER, Result};

/// What C gave to be handed back to its callback.
pub(in crate::abi) struct User(pub(in crate::abi) *mut c_void);

// SAFETY: the pointer is handed on and never followed; the header tells the caller that the callback runs on another thread.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

/// Writes a plain result.
///
/// # Safety
/// Unless NULL or misaligned, `place` must be valid for writes.
pub(in crate::abi) unsafe fn answer<T>(place: *mut T, name: &'static str, operation: impl FnOnce() -> Result<T>) -> Result<()> {
    // SAFETY: the requirement is the caller's own.
    let out = unsafe { Out::new(place, name) }?;
    out.set(operation()?);
    Ok(())
}

/// Writes a value for C to free.
///
/// # Safety
/// Unless NULL or misaligned, both places must be valid for writes.
pub(in crate::abi) unsafe fn give(value: *mut *mut c_void, size: *mut usize, operation: impl FnOnce() -> Result<Vec<u8>>) -> Result<()> {
    // SAFETY: the requirement is the caller's own.
    let (value, size) = unsafe { (Out::new(value, "value")?, Out::new(size, "size")?) };
    let bytes = operation()?;
    let copy = allocate(bytes.len() + 1)?;
    // SAFETY: as many bytes were just allocated, and one more.
    unsafe {
        ptr::copy_nonoverlapping(bytes.as_ptr(), copy.cast(), bytes.len());
        copy.cast::<u8>().add(bytes.len()).write(0);
    }
    value.set(copy);
    size.set(bytes.len());
    Ok(())
}

/// An array of values for C, and the values behind it, in one piece.
pub(in crate::abi) fn array<V: AsRef<[u8]>>(values: &[V]) -> Result<*mut railhead_bytes_t> {
    let head = size_of_val(values).max(values.len() * size_of::<railhead_bytes_t>());
    let total = values.iter().fold(head, |sum, value| sum + value.as_ref().len() + 1);
    let memory = allocate(total.max(1))?;
    let (mut entry, mut place) = (memory.cast::<railhead_bytes_t>(), memory.cast::<u8>().wrapping_add(head));
    for value in values.iter().map(AsRef::as_ref) {
        // SAFETY: `total` is the sum of what is written here: one entry, and the value with its 0. malloc's memory is aligned for any entry.
        unsafe {
            ptr::copy_nonoverlapping(value.as_ptr(), place, value.len());
            place.add(value.len()).write(0);
            entry.write(railhead_bytes_t { data: place.cast(), size: value.len() });
            (entry, place) = (entry.add(1), place.add(value.len() + 1));
        }
    }
    Ok(memory.cast())
}

/// Memory that `railhead_store_free` frees.
fn allocate(size: usize) -> Result<*mut c_void> {
    // SAFETY: malloc takes any size.
    let memory = unsafe { libc::malloc(size) };
    if memory.is_null() {
        return Err(Error::System(crate::base::error::Error::last_os(format!("allocate {size} bytes"))));
    }
    Ok(memory)
}

/// A timeout as C gives it.
pub(in crate::abi) fn timeout(ms: i64) -> Duration {
    u64::try_from(ms).map_or(FOREVER, Duration::from_millis)
}

/// The argument `name`, a string.
///
/// # Safety
/// Unless NULL, `pointer` must be a string that nobody changes while the result lives.
pub(in crate::abi) unsafe fn text<'a>(pointer: *const c_char, name: &'static str) -> Result<&'a str> {
    if pointer.is_null() {
        return Err(bad_pointer(0, name, 1).into());
    }
    // SAFETY: not NULL; ends with 0 and stays as it is by this function's own requirement.
    let text = unsafe { CStr::from_ptr(pointer) };
    text.to_str().map_err(|_| Error::Usage(format!("argument '{name}' is not UTF-8: {}", text.to_string_lossy())))
}

/// The argument `keys`, several strings.
///
/// # Safety
/// Unless NULL or misaligned, `pointer` must be valid for reads of `count` strings that nobody changes while the result lives.
pub(in crate::abi) unsafe fn texts<'a>(pointer: *const *const c_char, count: usize) -> Result<Vec<&'a str>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    within_reason::<*const c_char>(count, "count")?;
    // SAFETY: the requirement is the caller's own, for the array and for each string.
    unsafe { slice(pointer, count, "keys")?.iter().map(|&key| text(key, "keys")).collect() }
}

/// The argument `name`, a run of bytes.
///
/// # Safety
/// Unless NULL, `pointer` must be valid for reads of `size` bytes that nobody changes while the result lives.
pub(in crate::abi) unsafe fn bytes<'a>(pointer: *const c_void, size: usize, name: &'static str) -> Result<&'a [u8]> {
    if size == 0 {
        return Ok(&[]);
    }
    within_reason::<u8>(size, name)?;
    // SAFETY: the requirement is the caller's own.
    Ok(unsafe { slice(pointer.cast(), size, name)? })
}

/// No array is larger than half of the address space: a length of -1 is a mistake to be told of.
fn within_reason<T>(count: usize, name: &'static str) -> Result<()> {
    match count.checked_mul(size_of::<T>()) {
        Some(size) if size <= isize::MAX as usize => Ok(()),
        _ => Err(Error::Usage(format!("argument '{name}': {count} is no size"))),
    }
}
