//! ncclNet v5, which NCCL 2.12 loads: connect and accept no longer block, messages have tags, a receive has up to 8 buffers.
//!
//! NCCL's own account: plugins/net/example/nccl/net_v5.h. Status codes end at 5: a lost peer is `ncclSystemError`.

use std::ffi::{c_int, c_void};

use super::calls::{self, Arrays, TrafficClassFrom};
use super::types::ncclResult_t;
use super::v4::{Accept, Close, Connect, DeregMr, Devices, GetProperties, Init, Listen, RegMr, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, init, listen, regMr, test};
use crate::net::Mode;

properties! {
    ncclNetProperties_v5_t, 48 bytes, 0 parts:
    name pciPath guid ptrSupport speed port latency maxComms maxRecvs
}

/// Type of [`isend`]; up to version 8.
pub type Isend = unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, c_int, *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`irecv`]; up to version 8.
pub type Irecv =
    unsafe extern "C" fn(*mut c_void, c_int, *mut *mut c_void, *mut c_int, *mut c_int, *mut *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`iflush`].
pub type Iflush =
    unsafe extern "C" fn(*mut c_void, c_int, *mut *mut c_void, *mut c_int, *mut *mut c_void, *mut *mut c_void) -> ncclResult_t;

table! {
    /// The table that NCCL 2.12 looks up.
    ncclNetPlugin_v5: ncclNet_v5_t, version 5, ncclNetProperties_v5_t, 0 parts:
    init devices getProperties listen connect accept regMr deregMr isend irecv iflush test closeSend closeRecv closeListen
}

/// Takes a connection to a listener one step further; never blocks.
///
/// * `handle` - in and out, the bytes from listen (64 of them are used). Where the attempt stands is noted in them, so the same buffer
///   comes with every call.
/// * `sendComm` - out, NULL until the peer has accepted, then the comm, to be closed with closeSend.
///
/// Returns ncclSuccess with `*sendComm == NULL` if it must be called again.
/// Errors: ncclInvalidUsage for bytes that are no handle, or a peer on another fabric or of another version; ncclSystemError where nobody
/// listens.
/// Threads: any, one at a time per handle.
///
/// # Safety
/// `handle` is valid for 64 bytes, `sendComm` for a pointer.
pub unsafe extern "C" fn connect<const V: u32>(dev: c_int, handle: *mut c_void, sendComm: *mut *mut c_void) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::connect(V, TrafficClassFrom::Nowhere, dev, handle, sendComm, Mode::NonBlocking) }
}

/// Accepts a connection if one has come; never blocks.
///
/// * `recvComm` - out, NULL until there is one, then the comm, to be closed with closeRecv.
///
/// Returns ncclSuccess with `*recvComm == NULL` if it must be called again.
/// Errors: ncclInternalError for what is not an open listen comm; ncclSystemError.
/// Threads: one at a time per listen comm.
///
/// # Safety
/// `recvComm` is valid for writes.
pub unsafe extern "C" fn accept<const V: u32>(listenComm: *mut c_void, recvComm: *mut *mut c_void) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::accept(V, listenComm, recvComm, Mode::NonBlocking) }
}

/// Posts a send.
///
/// * `data`, `size` - in, 0 bytes to 1 GiB; left alone by the caller until `test` reports it done. More than the receive has room for is cut.
/// * `tag` - which buffer of a receive of several it is for.
/// * `mhandle` - from regMr on any comm of the device; covers the bytes.
/// * `request` - out, always written, whatever it held: the request for `test`, or NULL.
///
/// Returns ncclSuccess with `*request == NULL` if the peer has posted no receive yet or the queue is full: call again.
/// Errors: ncclInvalidUsage for a size out of range; ncclInternalError for an unknown comm or registration, or bytes outside of it;
/// ncclRemoteError if the peer is gone (ncclSystemError up to version 5).
/// Threads: one at a time per comm. Never blocks, allocates nothing.
///
/// # Safety
/// `data` is valid for `size` bytes until the request is done or the comm closed; `request` is valid for writes. No other thread uses the
/// comm, regMr and deregMr aside.
pub unsafe extern "C" fn isend<const V: u32>(
    sendComm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::isend(V, sendComm, data, size, tag, mhandle, request) }
}

/// Posts a receive of `n` buffers, each for one send.
///
/// * `n` - 1 to maxRecvs (8). Sends meet receives in the order in which these were posted; a send's tag says which buffer it takes.
/// * `data`, `sizes` - in, `n` each, 0 bytes to 1 GiB; left alone by the caller until `test` reports the request done.
/// * `tags` - in, `n`; may repeat.
/// * `mhandles` - in, `n`, from regMr on any comm of the device; each covers its buffer.
/// * `request` - out, always written, whatever it held: the request for `test`, or NULL.
///
/// Returns ncclSuccess with `*request == NULL` if the queue is full or the handshake still under way: call again.
/// Errors: ncclInvalidUsage for `n` or a size out of range; ncclInternalError for an unknown comm or registration, or a buffer outside
/// of it; ncclRemoteError if the peer is gone (ncclSystemError up to version 5).
/// Threads: one at a time per comm. Never blocks, allocates nothing.
///
/// # Safety
/// The arrays are valid for `n` elements, the buffers for their sizes until the request is done or the comm closed; `request` is valid
/// for writes. No other thread uses the comm, regMr and deregMr aside.
pub unsafe extern "C" fn irecv<const V: u32>(
    recvComm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::irecv(V, recvComm, Arrays { n, data, sizes, tags: Some(tags), mhandles }, request) }
}

/// Makes what a completed receive brought visible to a GPU. Host memory needs none of it: NULL request, success.
///
/// * `n`, `data`, `sizes`, `mhandles` - in, as in the receive.
/// * `request` - out, always written, whatever it held: the request for `test`, or NULL if there is nothing to wait for.
///
/// Errors and threads: as for [`irecv`].
///
/// # Safety
/// As for [`irecv`].
pub unsafe extern "C" fn iflush<const V: u32>(
    recvComm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::iflush(V, recvComm, Arrays { n, data, sizes, tags: None, mhandles }, request) }
}
