//! Any plugin's v12 table as the proxy's network. Called by the proxy on the engine's thread, and at set-up on the program's.
//!
//! The plugin may be written in any language: any function may be NULL, return a number that NCCL does not know, or unwind. All of that becomes an
//! error with the names of the plugin and the function.

#![allow(non_snake_case)] // The functions' names are NCCL's.

use std::any::Any;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::mem::offset_of;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{null_mut, with_exposed_provenance_mut};
use std::sync::{Mutex, MutexGuard};

use crate::abi::nccl::types::{NCCL_NET_TRAFFIC_CLASS_UNDEF, ncclDebugLogger_t, ncclNetCommConfig_t};
use crate::abi::nccl::v12::{ncclNet_v12_t, ncclNetPlugin_v12};
use crate::base::error::{Error, Result};
use crate::base::log::{self, log_warn};
use crate::base::rand;
use crate::base::sync::lock;
use crate::proxy::net::{Buffer, Comm, ListenHandle, Mr, Net, NetRequest};

/// NCCL_PTR_HOST and NCCL_PTR_CUDA (nccl v2.30.7 src/include/plugin/nccl_net.h).
const PTR: [c_int; 2] = [1, 2];
/// Room for the sizes that a plugin may write when asked for one: NCCL_NET_MAX_REQUESTS_RECV, the most buffers that any plugin takes in one receive.
const SIZES: usize = 8;

type Pointer = *mut c_void;
type Close = unsafe extern "C-unwind" fn(Pointer) -> c_int;

/// `ncclNet_v12_t` of any plugin. The functions that the proxy never calls are kept as words.
#[derive(Clone, Copy)]
#[repr(C)]
struct Functions {
    name: *const c_char,
    init: Option<
        unsafe extern "C-unwind" fn(
            *mut Pointer,
            u64,
            *mut ncclNetCommConfig_t,
            Option<ncclDebugLogger_t>,
            Option<unsafe extern "C" fn()>,
        ) -> c_int,
    >,
    devices: usize,
    getProperties: usize,
    listen: Option<unsafe extern "C-unwind" fn(Pointer, c_int, Pointer, *mut Pointer) -> c_int>,
    connect: Option<unsafe extern "C-unwind" fn(Pointer, c_int, Pointer, *mut Pointer, *mut Pointer) -> c_int>,
    accept: Option<unsafe extern "C-unwind" fn(Pointer, *mut Pointer, *mut Pointer) -> c_int>,
    regMr: Option<unsafe extern "C-unwind" fn(Pointer, Pointer, usize, c_int, *mut Pointer) -> c_int>,
    regMrDmaBuf: usize,
    deregMr: Option<unsafe extern "C-unwind" fn(Pointer, Pointer) -> c_int>,
    isend: Option<unsafe extern "C-unwind" fn(Pointer, Pointer, usize, c_int, Pointer, Pointer, *mut Pointer) -> c_int>,
    irecv: Option<
        unsafe extern "C-unwind" fn(
            Pointer,
            c_int,
            *mut Pointer,
            *mut usize,
            *mut c_int,
            *mut Pointer,
            *mut Pointer,
            *mut Pointer,
        ) -> c_int,
    >,
    iflush: Option<unsafe extern "C-unwind" fn(Pointer, c_int, *mut Pointer, *mut c_int, *mut Pointer, *mut Pointer) -> c_int>,
    test: Option<unsafe extern "C-unwind" fn(Pointer, *mut c_int, *mut c_int) -> c_int>,
    closeSend: Option<Close>,
    closeRecv: Option<Close>,
    closeListen: Option<Close>,
    getDeviceMr: usize,
    irecvConsumed: usize,
    makeVDevice: usize,
    finalize: Option<Close>,
    setNetAttr: usize,
}

const _: () = {
    assert!(size_of::<Functions>() == size_of::<ncclNet_v12_t>());
    assert!(offset_of!(Functions, init) == offset_of!(ncclNet_v12_t, init));
    assert!(offset_of!(Functions, listen) == offset_of!(ncclNet_v12_t, listen));
    assert!(offset_of!(Functions, connect) == offset_of!(ncclNet_v12_t, connect));
    assert!(offset_of!(Functions, accept) == offset_of!(ncclNet_v12_t, accept));
    assert!(offset_of!(Functions, regMr) == offset_of!(ncclNet_v12_t, regMr));
    assert!(offset_of!(Functions, deregMr) == offset_of!(ncclNet_v12_t, deregMr));
    assert!(offset_of!(Functions, isend) == offset_of!(ncclNet_v12_t, isend));
    assert!(offset_of!(Functions, irecv) == offset_of!(ncclNet_v12_t, irecv));
    assert!(offset_of!(Functions, iflush) == offset_of!(ncclNet_v12_t, iflush));
    assert!(offset_of!(Functions, test) == offset_of!(ncclNet_v12_t, test));
    assert!(offset_of!(Functions, closeSend) == offset_of!(ncclNet_v12_t, closeSend));
    assert!(offset_of!(Functions, closeRecv) == offset_of!(ncclNet_v12_t, closeRecv));
    assert!(offset_of!(Functions, closeListen) == offset_of!(ncclNet_v12_t, closeListen));
    assert!(offset_of!(Functions, finalize) == offset_of!(ncclNet_v12_t, finalize));
};

/// A plugin's table, and the context for its listeners and connections.
pub struct Table {
    functions: Functions,
    name: String,
    logger: Option<ncclDebugLogger_t>,
    context: Mutex<Context>,
}

#[derive(Clone, Copy)]
enum Context {
    /// None yet: the first listener or connection calls init.
    None,
    /// Made by our call of init, and finalized by us.
    Own(usize),
    /// The program's.
    Given(usize),
}

// SAFETY: `name` is not used after `new`, and everything else is addresses of code and values. A plugin's functions may be called from any thread,
// one comm by one thread at a time, which is what `Comm` promises.
unsafe impl Send for Table {}
// SAFETY: as above.
unsafe impl Sync for Table {}

impl Table {
    /// A plugin's table, or this library's own for NULL. `context` is what the plugin's init returned; with NULL the first listener or connection
    /// calls init, with `logger`, and dropping the table finalizes that. Comms that are given need none.
    ///
    /// Errors: a misaligned pointer; a table that lacks a function which every use of it needs.
    ///
    /// # Safety
    /// `table` must be NULL, misaligned, or a table of that version, whose functions do what NCCL says they do, and whose code stays loaded as long
    /// as the result lives; `context`, unless NULL, a live context of it for as long.
    pub unsafe fn new(table: *const c_void, context: *mut c_void, logger: Option<ncclDebugLogger_t>) -> Result<Table> {
        let own = (&raw const ncclNetPlugin_v12).cast::<c_void>();
        let table = if table.is_null() { own } else { table }.cast::<Functions>();
        if !table.is_aligned() {
            return Err(Error::usage(format!("a table at {:#x}, which is not aligned to {} bytes", table.addr(), align_of::<Functions>())));
        }
        // SAFETY: aligned; a table of 22 words, of which each is a pointer, by this function's own requirement; a function that is called as one
        // that may unwind may also be one that does not.
        let functions = unsafe { table.read() };
        let name = if functions.name.is_null() {
            "without a name".into()
        } else {
            // SAFETY: a C string, by this function's own requirement.
            unsafe { CStr::from_ptr(functions.name) }.to_string_lossy().into_owned()
        };
        let context = if context.is_null() { Context::None } else { Context::Given(context.expose_provenance()) };
        let table = Table { functions, name, logger, context: Mutex::new(context) };
        let Functions { regMr, deregMr, isend, irecv, iflush, test, closeSend, closeRecv, .. } = &table.functions;
        table.need("regMr", regMr)?;
        table.need("deregMr", deregMr)?;
        table.need("isend", isend)?;
        table.need("irecv", irecv)?;
        table.need("iflush", iflush)?;
        table.need("test", test)?;
        table.need("closeSend", closeSend)?;
        table.need("closeRecv", closeRecv)?;
        Ok(table)
    }

    /// The plugin's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The context for what is about to be made.
    fn context(&self) -> Result<Pointer> {
        let mut held = self.held();
        if let Context::Own(context) | Context::Given(context) = *held {
            return Ok(with_exposed_provenance_mut(context));
        }
        let init = self.need("init", &self.functions.init)?;
        let id = rand::u64()?;
        let mut context = null_mut();
        let mut config = ncclNetCommConfig_t { trafficClass: NCCL_NET_TRAFFIC_CLASS_UNDEF };
        // SAFETY: a place for the context and a configuration, as NCCL passes them.
        self.call("init", || unsafe { init(&raw mut context, id, &raw mut config, self.logger, None) })?;
        *held = Context::Own(context.expose_provenance());
        Ok(context)
    }

    fn held(&self) -> MutexGuard<'_, Context> {
        // Changed by single assignments.
        lock(&self.context)
    }

    #[inline]
    fn need<F: Copy>(&self, function: &'static str, pointer: &Option<F>) -> Result<F> {
        match pointer {
            Some(pointer) => Ok(*pointer),
            None => Err(self.lacks(function)),
        }
    }

    #[inline]
    fn call(&self, function: &'static str, call: impl FnOnce() -> c_int) -> Result<()> {
        match catch_unwind(AssertUnwindSafe(call)) {
            Ok(0) => Ok(()),
            Ok(code) => Err(self.failed(function, code)),
            Err(payload) => Err(self.panicked(function, payload)),
        }
    }

    fn close(&self, function: &'static str, close: &Option<Close>, comm: Comm) -> Result<()> {
        let close = self.need(function, close)?;
        // SAFETY: an open comm, by its token, which ends here.
        self.call(function, || unsafe { close(pointer(comm.value())) })
    }

    #[cold]
    fn lacks(&self, function: &str) -> Error {
        Error::usage(format!("plugin {} has no {function}", self.name))
    }

    #[cold]
    fn failed(&self, function: &str, code: c_int) -> Error {
        let what = format!("{function} of plugin {}", self.name);
        let (word, kind): (&str, fn(String) -> Error) = match code {
            1 => ("ncclUnhandledCudaError", Error::internal),
            2 => return Error::system(what, io::Error::other("ncclSystemError (2)")),
            3 => ("ncclInternalError", Error::internal),
            4 => ("ncclInvalidArgument", Error::usage),
            5 => ("ncclInvalidUsage", Error::usage),
            6 => ("ncclRemoteError", Error::remote),
            _ => ("no code of NCCL's", Error::internal),
        };
        kind(format!("{what}: {word} ({code})"))
    }

    #[cold]
    fn panicked(&self, function: &str, payload: Box<dyn Any + Send>) -> Error {
        let word = payload.downcast_ref::<&str>().copied().or_else(|| payload.downcast_ref::<String>().map(String::as_str));
        let error = Error::internal(format!("{function} of plugin {} unwound: {}", self.name, word.unwrap_or("without words")));
        // Not dropped: its destructor could unwind as well.
        std::mem::forget(payload);
        error
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        let context = *self.held();
        if let (Context::Own(context), Some(finalize)) = (context, self.functions.finalize) {
            // SAFETY: the context that init returned, finalized once.
            if let Err(error) = self.call("finalize", || unsafe { finalize(with_exposed_provenance_mut(context)) }) {
                log_warn!(log::NET, "{error}");
            }
        }
    }
}

/// The pointer that a token stands for.
#[inline]
fn pointer(value: usize) -> Pointer {
    with_exposed_provenance_mut(value)
}

impl Net for Table {
    #[inline]
    fn isend(&self, comm: &Comm, data: Buffer, tag: i32, mr: &Mr) -> Result<Option<NetRequest>> {
        let isend = self.need("isend", &self.functions.isend)?;
        let mut request = null_mut();
        // SAFETY: an open comm, registered memory that stays, and a place for the request, by the tokens.
        self.call("isend", || unsafe {
            isend(pointer(comm.value()), pointer(data.addr()), data.bytes(), tag, pointer(mr.value()), null_mut(), &raw mut request)
        })?;
        Ok(posted(request))
    }

    #[inline]
    fn irecv(&self, comm: &Comm, data: Buffer, tag: i32, mr: &Mr) -> Result<Option<NetRequest>> {
        let irecv = self.need("irecv", &self.functions.irecv)?;
        let (mut addr, mut bytes, mut tag, mut mr) = (pointer(data.addr()), data.bytes(), tag, pointer(mr.value()));
        let (mut profiler, mut request) = (null_mut(), null_mut());
        // SAFETY: as in `isend`; arrays of one.
        self.call("irecv", || unsafe {
            irecv(pointer(comm.value()), 1, &raw mut addr, &raw mut bytes, &raw mut tag, &raw mut mr, &raw mut profiler, &raw mut request)
        })?;
        Ok(posted(request))
    }

    fn iflush(&self, comm: &Comm, data: Buffer, mr: &Mr) -> Result<Option<NetRequest>> {
        let iflush = self.need("iflush", &self.functions.iflush)?;
        let mut bytes = c_int::try_from(data.bytes()).map_err(|_| Error::usage(format!("a flush of {} bytes", data.bytes())))?;
        let (mut addr, mut mr, mut request) = (pointer(data.addr()), pointer(mr.value()), null_mut());
        // SAFETY: as in `irecv`.
        self.call("iflush", || unsafe { iflush(pointer(comm.value()), 1, &raw mut addr, &raw mut bytes, &raw mut mr, &raw mut request) })?;
        Ok(posted(request))
    }

    #[inline]
    fn test(&self, request: &mut Option<NetRequest>) -> Result<Option<usize>> {
        let Some(value) = request.as_ref().map(NetRequest::value) else { return Ok(Some(0)) };
        let test = self.need("test", &self.functions.test)?;
        let (mut done, mut sizes) = (0, [0; SIZES]);
        // SAFETY: a request that was not complete when last asked, by its token, and room for more sizes than it has buffers.
        self.call("test", || unsafe { test(pointer(value), &raw mut done, sizes.as_mut_ptr()) })?;
        if done == 0 {
            return Ok(None);
        }
        *request = None;
        match usize::try_from(sizes[0]) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(_) => Err(Error::remote(format!("test of plugin {}: a message of {} bytes", self.name, sizes[0]))),
        }
    }

    fn listen(&self, dev: i32) -> Result<(Comm, ListenHandle)> {
        let listen = self.need("listen", &self.functions.listen)?;
        self.need("closeListen", &self.functions.closeListen)?;
        let context = self.context()?;
        let (mut handle, mut comm) = (ListenHandle::default(), null_mut());
        // SAFETY: a live context; places for the handle, of NCCL_NET_HANDLE_MAXSIZE bytes, and the comm.
        self.call("listen", || unsafe { listen(context, dev, handle.0.as_mut_ptr().cast(), &raw mut comm) })?;
        match made(comm) {
            Some(comm) => Ok((comm, handle)),
            None => Err(Error::internal(format!("listen of plugin {}: no listener, and no error", self.name))),
        }
    }

    fn connect(&self, dev: i32, handle: &mut ListenHandle) -> Result<Option<Comm>> {
        let connect = self.need("connect", &self.functions.connect)?;
        let context = self.context()?;
        let (mut comm, mut device) = (null_mut(), null_mut());
        // SAFETY: as in `listen`; the handle is one that a peer gave, which a plugin must look at with suspicion.
        self.call("connect", || unsafe { connect(context, dev, handle.0.as_mut_ptr().cast(), &raw mut comm, &raw mut device) })?;
        Ok(made(comm))
    }

    fn accept(&self, listener: &Comm) -> Result<Option<Comm>> {
        let accept = self.need("accept", &self.functions.accept)?;
        let (mut comm, mut device) = (null_mut(), null_mut());
        // SAFETY: an open listener, by its token, and places for the results.
        self.call("accept", || unsafe { accept(pointer(listener.value()), &raw mut comm, &raw mut device) })?;
        Ok(made(comm))
    }

    fn reg_mr(&self, comm: &Comm, data: Buffer, device: bool) -> Result<Mr> {
        let reg_mr = self.need("regMr", &self.functions.regMr)?;
        let mut mr = null_mut();
        let kind = PTR[usize::from(device)];
        // SAFETY: an open comm and memory that stays, by the tokens; a place for the registration.
        self.call("regMr", || unsafe { reg_mr(pointer(comm.value()), pointer(data.addr()), data.bytes(), kind, &raw mut mr) })?;
        // SAFETY: just registered with that comm; whoever takes the token takes it back. A plugin that needs no registration may return NULL.
        Ok(unsafe { Mr::new(mr.expose_provenance()) })
    }

    fn dereg_mr(&self, comm: &Comm, mr: Mr) -> Result<()> {
        let dereg_mr = self.need("deregMr", &self.functions.deregMr)?;
        // SAFETY: an open comm and a registration with it, by the tokens, of which the latter ends here.
        self.call("deregMr", || unsafe { dereg_mr(pointer(comm.value()), pointer(mr.value())) })
    }

    fn close_send(&self, comm: Comm) -> Result<()> {
        self.close("closeSend", &self.functions.closeSend, comm)
    }

    fn close_recv(&self, comm: Comm) -> Result<()> {
        self.close("closeRecv", &self.functions.closeRecv, comm)
    }

    fn close_listen(&self, comm: Comm) -> Result<()> {
        self.close("closeListen", &self.functions.closeListen, comm)
    }
}

/// The request that a plugin posted; NULL is none.
#[inline]
fn posted(request: Pointer) -> Option<NetRequest> {
    // SAFETY: just posted, and nobody else knows it.
    (!request.is_null()).then(|| unsafe { NetRequest::new(request.expose_provenance()) })
}

/// The comm that a plugin made; NULL is none yet.
fn made(comm: Pointer) -> Option<Comm> {
    // SAFETY: just made, and nobody else knows it.
    (!comm.is_null()).then(|| unsafe { Comm::new(comm.expose_provenance()) })
}

#[cfg(test)]
mod tests;
