//! `railhead_alloc` and `railhead_free`: memory that a peer on the same host maps instead of copying out of it. For C programs that can
//! choose where their buffers lie. Any thread, any time, also before `init`.

use std::ffi::c_void;
use std::ptr;

use crate::abi::boundary::call_or;
use crate::fabric;

/// Allocates `size` bytes, zeroed and page-aligned, for use as buffers of this plugin.
///
/// Ordinary memory to the program; but once registered with regMr, a receiver on the same host maps it and copies straight out of
/// it, without a system call per message. Not inherited by fork. The caller frees it with railhead_free, after deregMr.
///
/// Returns NULL if `size` is 0 or memory or descriptors have run out; the log says which.
///
/// Threads: any, at any time.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_alloc(size: usize) -> *mut c_void {
    call_or("railhead_alloc", ptr::null_mut(), || fabric::alloc(size).map(<*mut u8>::cast))
}

/// Frees what railhead_alloc returned. NULL is fine. Anything else that it did not return, or that was freed already, is left alone and
/// logged.
///
/// A peer that has mapped it keeps it, and its pages, until their comm is closed: nothing tells it earlier, and it could be copying. A comm maps
/// 64 of them at most, and copies out of others as out of ordinary memory. So this is for buffers that stay, not for each message.
///
/// Threads: any, at any time.
#[unsafe(no_mangle)]
pub extern "C" fn railhead_free(memory: *mut c_void) {
    if !memory.is_null() {
        call_or("railhead_free", (), || fabric::free(memory.cast()));
    }
}
