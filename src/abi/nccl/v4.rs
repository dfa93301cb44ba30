//! ncclNet v4, which NCCL 2.8 to 2.11 load: handles of 64 bytes, connect and accept that block, one buffer per receive.
//!
//! NCCL's own account: plugins/net/example/nccl/net_v4.h. Status codes end at 5: a lost peer is `ncclSystemError`.

use std::ffi::{c_int, c_void};

use super::calls::{self, Arrays, TrafficClassFrom};
use super::types::{ncclDebugLogger_t, ncclResult_t};
use crate::abi::plugin::Description;
use crate::base::error::Error;
use crate::net::Mode;

properties! {
    ncclNetProperties_v4_t, 40 bytes, 0 parts:
    name pciPath guid ptrSupport speed port maxComms
}

/// Type of [`init`]; up to version 9.
pub type Init = unsafe extern "C" fn(Option<ncclDebugLogger_t>) -> ncclResult_t;
/// Type of [`devices`].
pub type Devices = unsafe extern "C" fn(*mut c_int) -> ncclResult_t;
/// Type of [`getProperties`].
pub type GetProperties<P> = unsafe extern "C" fn(c_int, *mut P) -> ncclResult_t;
/// Type of [`listen`]; up to version 10.
pub type Listen = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`connect`]; up to version 6.
pub type Connect = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`accept`]; up to version 6.
pub type Accept = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`regMr`]; up to version 7.
pub type RegMr = unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, c_int, *mut *mut c_void) -> ncclResult_t;
/// Type of [`deregMr`].
pub type DeregMr = unsafe extern "C" fn(*mut c_void, *mut c_void) -> ncclResult_t;
/// Type of [`fn@test`].
pub type Test = unsafe extern "C" fn(*mut c_void, *mut c_int, *mut c_int) -> ncclResult_t;
/// Type of [`closeSend`], [`closeRecv`] and [`closeListen`].
pub type Close = unsafe extern "C" fn(*mut c_void) -> ncclResult_t;
/// Type of [`isend`]; of version 4 alone.
type Isend = unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`irecv`]; of version 4 alone.
type Irecv = Isend;
/// Type of [`iflush`]; of version 4 alone.
type Iflush = Isend;

table! {
    /// The table that NCCL 2.8 to 2.11 look up.
    ncclNetPlugin_v4: ncclNet_v4_t, version 4, ncclNetProperties_v4_t, 0 parts:
    init devices getProperties listen connect accept regMr deregMr isend irecv iflush test closeSend closeRecv closeListen
}

/// Reads the settings from the environment and finds the devices, unless comms or contexts of an earlier init are still alive, which then
/// go on with their settings.
///
/// * `logger` - kept until the next init; may be NULL.
///
/// Returns ncclSuccess, also where there are no devices, and however often it is called.
/// Errors: ncclInvalidUsage for a setting that cannot be met; ncclSystemError.
/// Threads: any.
///
/// # Safety
/// `logger` is NULL or a function of NCCL's logger type that may be called on any thread while the plugin is in use.
pub unsafe extern "C" fn init<const V: u32>(logger: Option<ncclDebugLogger_t>) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::init(V, logger) }
}

/// Tells how many devices there are, virtual ones included; 0 is no error.
///
/// Errors: ncclInternalError before init.
/// Threads: any.
///
/// # Safety
/// `ndev` is valid for writes.
pub unsafe extern "C" fn devices<const V: u32>(ndev: *mut c_int) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::devices(V, ndev) }
}

/// Describes device `dev`. Its strings stay valid as long as the process lives.
///
/// Errors: ncclInternalError for a device that does not exist; ncclInvalidUsage for a virtual device of more devices than `P` can list.
/// Threads: any.
///
/// # Safety
/// `props` is valid for writes.
pub unsafe extern "C" fn getProperties<const V: u32, P: for<'a> TryFrom<&'a Description, Error = Error>>(
    dev: c_int,
    props: *mut P,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::get_properties(V, dev, props) }
}

/// Listens on a device for any number of connections.
///
/// * `handle` - out, 64 bytes for the connecting side. They are a secret: who has them can connect.
/// * `listenComm` - out, to be closed with closeListen, which comms accepted from it outlive.
///
/// Errors: ncclInternalError for a device that does not exist; ncclSystemError where the system refuses a socket.
/// Threads: any.
///
/// # Safety
/// `handle` is valid for 64 bytes, `listenComm` for a pointer.
pub unsafe extern "C" fn listen<const V: u32>(dev: c_int, handle: *mut c_void, listenComm: *mut *mut c_void) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::listen(V, TrafficClassFrom::Nowhere, dev, handle, listenComm) }
}

/// Connects to a listener. Blocks until the listener's host took the connection, not until the peer accepts it: NCCL 2.8 has every rank
/// connect first and accept second. The comm is usable at once; isend has to be repeated until the peer has accepted.
///
/// * `handle` - in and out, the 64 bytes from listen.
/// * `sendComm` - out, to be closed with closeSend.
///
/// Errors: ncclInvalidUsage for bytes that are no handle; ncclSystemError where nobody listens.
/// Threads: any, one at a time per handle.
///
/// # Safety
/// `handle` is valid for 64 bytes, `sendComm` for a pointer.
unsafe extern "C" fn connect<const V: u32>(dev: c_int, handle: *mut c_void, sendComm: *mut *mut c_void) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::connect(V, TrafficClassFrom::Nowhere, dev, handle, sendComm, Mode::Blocking) }
}

/// Accepts a connection. Blocks until a peer connects that knows the handle.
///
/// * `recvComm` - out, to be closed with closeRecv.
///
/// Errors: ncclInternalError for what is not an open listen comm; ncclSystemError.
/// Threads: one at a time per listen comm.
///
/// # Safety
/// `recvComm` is valid for writes.
unsafe extern "C" fn accept<const V: u32>(listenComm: *mut c_void, recvComm: *mut *mut c_void) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::accept(V, listenComm, recvComm, Mode::Blocking) }
}

/// Registers `size` bytes at `data` for transfers on every comm of the comm's device. `kind` must be NCCL_PTR_HOST (1).
///
/// * `mhandle` - out, to be ended with deregMr.
///
/// Errors: ncclInvalidUsage for another kind of memory or a size below 1; ncclInternalError for what is not an open send or receive comm.
/// Threads: any, also while another thread drives the comm.
///
/// # Safety
/// The memory can be read and written until deregMr; the peer may change it meanwhile. `mhandle` is valid for writes.
pub unsafe extern "C" fn regMr<const V: u32>(
    comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    kind: c_int,
    mhandle: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::reg_mr(V, comm, data, size, kind, mhandle) }
}

/// Ends a registration, through any comm of its device. Returns once nothing is copied into or out of the memory any more.
///
/// Errors: ncclInternalError for an unknown registration, or what is not an open send or receive comm.
/// Threads: any, also while another thread drives the comm.
///
/// # Safety
/// None: both arguments are looked up.
pub unsafe extern "C" fn deregMr<const V: u32>(comm: *mut c_void, mhandle: *mut c_void) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::dereg_mr(V, comm, mhandle) }
}

/// Posts a send of `size` bytes; see `v5::isend`, of which this is the case of tag 0.
///
/// # Safety
/// As for `v5::isend`.
unsafe extern "C" fn isend<const V: u32>(
    sendComm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::isend(V, sendComm, data, size, 0, mhandle, request) }
}

/// Posts a receive of up to `size` bytes; see `v5::irecv`, of which this is the case of one buffer with tag 0.
///
/// # Safety
/// As for `v5::irecv`.
unsafe extern "C" fn irecv<const V: u32>(
    recvComm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let arrays = Arrays { n: 1, data: &data, sizes: &size, tags: Some(&0), mhandles: &mhandle };
    // SAFETY: the arrays are of one element each and outlive the call; for the rest the requirements are the same.
    unsafe { calls::irecv(V, recvComm, arrays, request) }
}

/// Posts a flush of one received buffer; see `v5::iflush`.
///
/// # Safety
/// As for `v5::iflush`.
unsafe extern "C" fn iflush<const V: u32>(
    recvComm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let arrays = Arrays { n: 1, data: &data, sizes: &size, tags: None, mhandles: &mhandle };
    // SAFETY: the arrays are of one element each and outlive the call; for the rest the requirements are the same.
    unsafe { calls::iflush(V, recvComm, arrays, request) }
}

/// Makes progress and tells whether a request is complete. Requests may be tested in any order.
///
/// * `done` - out, 1 if complete (the request is then spent), else 0.
/// * `sizes` - out if complete, may be NULL: the bytes of each of the request's buffers (one, up to version 4).
///
/// Errors: ncclInternalError for what is not an outstanding request; ncclRemoteError if the peer is gone (ncclSystemError up to version 5).
/// Threads: one at a time per comm. Never blocks, allocates nothing.
///
/// # Safety
/// `done` is valid for writes, `sizes` NULL or valid for one int per buffer of the request. No other thread uses the request's comm.
pub unsafe extern "C" fn test<const V: u32>(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::test(V, request, done, sizes) }
}

/// Closes a send comm, whatever is outstanding: its requests are spent, and nothing touches their memory any more.
///
/// Errors: ncclInternalError for what is not an open send comm.
/// Threads: one at a time per comm.
///
/// # Safety
/// No other thread drives the comm.
pub unsafe extern "C" fn closeSend<const V: u32>(sendComm: *mut c_void) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::close_send(V, sendComm) }
}

/// Closes a receive comm, whatever is outstanding: its requests are spent, and nothing touches their memory any more.
///
/// Errors: ncclInternalError for what is not an open receive comm.
/// Threads: one at a time per comm.
///
/// # Safety
/// No other thread drives the comm.
pub unsafe extern "C" fn closeRecv<const V: u32>(recvComm: *mut c_void) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::close_recv(V, recvComm) }
}

/// Stops listening. Comms accepted before live on; a peer that was not accepted is turned away.
///
/// Errors: ncclInternalError for what is not an open listen comm.
/// Threads: one at a time per comm.
///
/// # Safety
/// No other thread is in accept with it.
pub unsafe extern "C" fn closeListen<const V: u32>(listenComm: *mut c_void) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::close_listen(V, listenComm) }
}
