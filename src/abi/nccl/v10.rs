//! ncclNet v10, which NCCL 2.26 and 2.27 load: a traffic class per connection, and handles for NCCL's profiler, which are ignored.
//!
//! NCCL's own account: nccl v2.30.7 src/include/plugin/net/net_v10.h.

use std::ffi::{c_int, c_void};

use super::calls::{self, Arrays, TrafficClassFrom};
use super::types::{ncclDebugLogger_t, ncclNetCommConfig_t, ncclNetDeviceHandle_t, ncclProfilerCallback_t, ncclResult_t};
use super::v4::{Close, DeregMr, Devices, GetProperties, Listen, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, listen, test};
use super::v5::{Iflush, iflush};
use super::v6::{RegMrDmaBuf, regMrDmaBuf};
use super::v7::{Accept, GetDeviceMr, IrecvConsumed, accept};
use super::v8::{RegMr, regMr};
use super::v9::{MakeVDevice, makeVDevice};
use crate::net::Mode;

/// Properties of a device, as in version 9.
pub type ncclNetProperties_v10_t = super::v9::ncclNetProperties_v9_t;

/// Type of [`init`]; of version 10 alone.
pub type Init = unsafe extern "C" fn(Option<ncclDebugLogger_t>, Option<ncclProfilerCallback_t>) -> ncclResult_t;
/// Type of [`connect`]; of version 10 alone.
pub type Connect =
    unsafe extern "C" fn(c_int, *mut ncclNetCommConfig_t, *mut c_void, *mut *mut c_void, *mut *mut ncclNetDeviceHandle_t) -> ncclResult_t;
/// Type of [`isend`].
pub type Isend = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut c_void, *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`irecv`].
pub type Irecv = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    *mut *mut c_void,
    *mut usize,
    *mut c_int,
    *mut *mut c_void,
    *mut *mut c_void,
    *mut *mut c_void,
) -> ncclResult_t;

table! {
    /// The table that NCCL 2.26 and 2.27 look up.
    ncclNetPlugin_v10: ncclNet_v10_t, version 10, ncclNetProperties_v10_t, 4 parts:
    init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test closeSend closeRecv closeListen
    getDeviceMr irecvConsumed makeVDevice
}

/// Reads the settings and finds the devices; see `v4::init`. The profiler is not called.
///
/// # Safety
/// As for `v4::init`.
unsafe extern "C" fn init<const V: u32>(logger: Option<ncclDebugLogger_t>, _profiler: Option<ncclProfilerCallback_t>) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::init(V, logger) }
}

/// Takes a connection to a listener one step further; see `v7::connect`.
///
/// * `config` - in, may be NULL; its traffic class, -1 or 0 to 255, counts at the first call of an attempt.
///
/// Errors, besides those of `v7::connect`: ncclInvalidUsage for a traffic class out of range.
///
/// # Safety
/// As for `v7::connect`; `config` is NULL or valid for reads.
unsafe extern "C" fn connect<const V: u32>(
    dev: c_int,
    config: *mut ncclNetCommConfig_t,
    handle: *mut c_void,
    sendComm: *mut *mut c_void,
    _sendDevComm: *mut *mut ncclNetDeviceHandle_t,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::connect(V, TrafficClassFrom::Argument(config), dev, handle, sendComm, Mode::NonBlocking) }
}

/// Posts a send; see `v5::isend`. `phandle` is for a profiler and ignored.
///
/// # Safety
/// As for `v5::isend`.
pub unsafe extern "C" fn isend<const V: u32>(
    sendComm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    mhandle: *mut c_void,
    _phandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::isend(V, sendComm, data, size, tag, mhandle, request) }
}

/// Posts a receive; see `v5::irecv` and, for what `*request` may hold on entry, `v9::irecv`. `phandles` is for a profiler and ignored.
///
/// # Safety
/// As for `v5::irecv`.
pub unsafe extern "C" fn irecv<const V: u32>(
    recvComm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    _phandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::irecv(V, recvComm, Arrays { n, data, sizes, tags: Some(tags), mhandles }, request) }
}
