//! libibverbs, opened at run time: nobody needs it installed who does not need it. Loaded once per process, at the first listing of
//! devices, on whatever thread initialises; never unloaded, as NICs' drivers come with it.
//!
//! Types, constants and the table of inline operations come from ibverbs-sys. A function of it is never called by its name: the linker
//! would make the library a requirement. Each is looked up with the version whose behaviour is meant.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::io;

use ibverbs_sys::*;
use once_cell::sync::OnceCell;

use crate::base::log::{self, log_info};

/// What the dynamic loader calls it (rdma-core: the ABI's major number, unchanged since 2006).
const FILE: &CStr = c"libibverbs.so.1";

macro_rules! functions {
    (required { $($name:ident $version:literal: fn($($arg:ty),*) $(-> $ret:ty)?;)* }
     optional { $($oname:ident $oversion:literal: fn($($oarg:ty),*) $(-> $oret:ty)?;)* }) => {
        /// Its functions, each under its own name without the prefix.
        #[allow(missing_docs)]
        pub struct Library {
            $(pub $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
            $(pub $oname: Option<unsafe extern "C" fn($($oarg),*) $(-> $oret)?>,)*
        }

        impl Library {
            /// Errors: the first required function that is missing, in words.
            fn look_up(handle: DlHandle) -> Result<Library, String> {
                Ok(Library {
                    $($name: {
                        let found = handle.find(concat!("ibv_", stringify!($name), "\0"), concat!($version, "\0"));
                        let found = found.ok_or(concat!("it has no ibv_", stringify!($name), "@", $version))?;
                        // SAFETY: the symbol of that name and version is a function of this type (rdma-core's verbs.h, whose versioned
                        // symbols never change).
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) $(-> $ret)?>(found) }
                    },)*
                    $($oname: handle.find(concat!("ibv_", stringify!($oname), "\0"), concat!($oversion, "\0")).map(|found| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($oarg),*) $(-> $oret)?>(found) }
                    }),)*
                })
            }
        }
    };
}

functions! {
    required {
        get_device_list "IBVERBS_1.1": fn(*mut c_int) -> *mut *mut ibv_device;
        free_device_list "IBVERBS_1.1": fn(*mut *mut ibv_device);
        get_device_name "IBVERBS_1.1": fn(*mut ibv_device) -> *const c_char;
        open_device "IBVERBS_1.1": fn(*mut ibv_device) -> *mut ibv_context;
        close_device "IBVERBS_1.1": fn(*mut ibv_context) -> c_int;
        query_device "IBVERBS_1.1": fn(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        query_port "IBVERBS_1.1": fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        query_gid "IBVERBS_1.1": fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        get_async_event "IBVERBS_1.1": fn(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ack_async_event "IBVERBS_1.1": fn(*mut ibv_async_event);
        event_type_str "IBVERBS_1.1": fn(ibv_event_type) -> *const c_char;
        alloc_pd "IBVERBS_1.1": fn(*mut ibv_context) -> *mut ibv_pd;
        dealloc_pd "IBVERBS_1.1": fn(*mut ibv_pd) -> c_int;
        reg_mr "IBVERBS_1.1": fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        dereg_mr "IBVERBS_1.1": fn(*mut ibv_mr) -> c_int;
        create_comp_channel "IBVERBS_1.0": fn(*mut ibv_context) -> *mut ibv_comp_channel;
        destroy_comp_channel "IBVERBS_1.0": fn(*mut ibv_comp_channel) -> c_int;
        create_cq "IBVERBS_1.1": fn(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        resize_cq "IBVERBS_1.1": fn(*mut ibv_cq, c_int) -> c_int;
        destroy_cq "IBVERBS_1.1": fn(*mut ibv_cq) -> c_int;
        get_cq_event "IBVERBS_1.1": fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ack_cq_events "IBVERBS_1.1": fn(*mut ibv_cq, c_uint);
        create_qp "IBVERBS_1.1": fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        modify_qp "IBVERBS_1.1": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        query_qp "IBVERBS_1.1": fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int;
        destroy_qp "IBVERBS_1.1": fn(*mut ibv_qp) -> c_int;
        fork_init "IBVERBS_1.1": fn() -> c_int;
    }
    optional {
        // Access flags beyond the first ones, which reg_mr refuses.
        reg_mr_iova2 "IBVERBS_1.8": fn(*mut ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ibv_mr;
        query_ece "IBVERBS_1.10": fn(*mut ibv_qp, *mut ibv_ece) -> c_int;
        set_ece "IBVERBS_1.10": fn(*mut ibv_qp, *mut ibv_ece) -> c_int;
        reg_dmabuf_mr "IBVERBS_1.12": fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
        query_port_speed "IBVERBS_1.16": fn(*mut ibv_context, u32, *mut u64) -> c_int;
    }
}

/// What dlopen returned; not NULL.
#[derive(Clone, Copy)]
struct DlHandle(*mut c_void);

impl DlHandle {
    /// A symbol of a version. Both strings end with a NUL.
    fn find(self, name: &'static str, version: &'static str) -> Option<*mut c_void> {
        let (name, version) = (CStr::from_bytes_with_nul(name.as_bytes()).ok()?, CStr::from_bytes_with_nul(version.as_bytes()).ok()?);
        // SAFETY: the handle is open and stays so; both strings are terminated.
        let found = unsafe { libc::dlvsym(self.0, name.as_ptr(), version.as_ptr()) };
        (!found.is_null()).then_some(found)
    }
}

/// The library.
///
/// Errors: why there is none, in words; the same each time.
pub fn get() -> Result<&'static Library, &'static str> {
    static LIBRARY: OnceCell<Result<Library, String>> = OnceCell::new();
    LIBRARY.get_or_init(|| open(FILE)).as_ref().map_err(String::as_str)
}

fn open(file: &CStr) -> Result<Library, String> {
    // SAFETY: the name is terminated. What runs while loading is libibverbs' own business.
    let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if handle.is_null() {
        // SAFETY: dlerror's text is this thread's until its next call into the loader.
        let text = unsafe {
            let text = libc::dlerror();
            if text.is_null() { "unknown error".into() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        return Err(text);
    }
    let library = Library::look_up(DlHandle(handle)).map_err(|missing| format!("{} is too old: {missing}", file.to_string_lossy()))?;
    // Before everything else, or it is refused: a child must not take pages from under a NIC. Newer kernels see to that themselves.
    // SAFETY: takes nothing, and may be called again.
    if let Err(e) = check(unsafe { (library.fork_init)() }) {
        log_info!(log::INIT, "ibv_fork_init: {e}: a process that forks while messages flow may damage them");
    }
    Ok(library)
}

/// What a function that returns 0 or an error number said.
pub fn check(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        // Some report -1 and set errno.
        -1 => Err(io::Error::last_os_error()),
        code => Err(io::Error::from_raw_os_error(code.saturating_abs())),
    }
}

/// What a function that returns a pointer, or NULL and errno, said.
pub fn made<T>(pointer: *mut T) -> io::Result<*mut T> {
    if pointer.is_null() { Err(io::Error::last_os_error()) } else { Ok(pointer) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_absent_or_another_is_told_apart() {
        let absent = open(c"librailhead-no-such.so.1").err().unwrap();
        assert!(absent.contains("librailhead-no-such.so.1"), "{absent}");
        let other = open(c"libc.so.6").err().unwrap();
        assert!(other.contains("too old") && other.contains("ibv_get_device_list@IBVERBS_1.1"), "{other}");
    }

    #[test]
    fn error_numbers_come_in_three_ways() {
        assert!(check(0).is_ok());
        assert_eq!(check(libc::EINVAL).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        assert_eq!(check(-libc::ENOMEM).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
        assert!(made(std::ptr::null_mut::<u8>()).is_err());
    }
}
