//! ncclNet v11, which NCCL 2.28, 2.29 and today's RCCL load: a context per communicator, from init to finalize.
//!
//! NCCL's own account: nccl v2.30.7 src/include/plugin/net/net_v11.h.

use std::ffi::{c_int, c_void};

use super::calls::{self, TrafficClassFrom};
use super::types::{ncclDebugLogger_t, ncclNetAttr_t, ncclNetCommConfig_t, ncclNetDeviceHandle_t, ncclProfilerCallback_t, ncclResult_t};
use super::v4::{Close, DeregMr, Devices, GetProperties, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, test};
use super::v5::{Iflush, iflush};
use super::v6::{RegMrDmaBuf, regMrDmaBuf};
use super::v7::{Accept, GetDeviceMr, IrecvConsumed, accept};
use super::v8::{RegMr, regMr};
use super::v9::{MakeVDevice, makeVDevice};
use super::v10::{Irecv, Isend, irecv, isend};
use crate::net::Mode;

properties! {
    ncclNetProperties_v11_t, 112 bytes, 4 parts:
    name pciPath guid ptrSupport regIsGlobal forceFlush speed port latency maxComms maxRecvs netDeviceType netDeviceVersion vProps
    maxP2pBytes maxCollBytes maxMultiRequestSize
}

/// Type of [`init`].
pub type Init = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut ncclNetCommConfig_t,
    Option<ncclDebugLogger_t>,
    Option<ncclProfilerCallback_t>,
) -> ncclResult_t;
/// Type of [`listen`].
pub type Listen = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`connect`].
pub type Connect = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void, *mut *mut c_void, *mut *mut ncclNetDeviceHandle_t) -> ncclResult_t;
/// Type of [`finalize`].
pub type Finalize = unsafe extern "C" fn(*mut c_void) -> ncclResult_t;
/// Type of [`setNetAttr`].
pub type SetNetAttr = unsafe extern "C" fn(*mut c_void, *mut ncclNetAttr_t) -> ncclResult_t;

table! {
    /// The table that NCCL 2.28 and 2.29 look up.
    ncclNetPlugin_v11: ncclNet_v11_t, version 11, ncclNetProperties_v11_t, 4 parts:
    init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test closeSend closeRecv closeListen
    getDeviceMr irecvConsumed makeVDevice finalize setNetAttr
}

/// Makes a context for a communicator; the first one reads the settings and finds the devices, as `v4::init`.
///
/// * `ctx` - out, to be ended with finalize.
/// * `commId` - ignored.
/// * `config` - in, may be NULL; its traffic class, -1 or 0 to 255, is that of all connections made with the context.
/// * `logger` - kept until the next init or the end of the last context and comm; may be NULL.
///
/// Returns ncclSuccess, also where there are no devices.
/// Errors: ncclInvalidUsage for a setting or a traffic class out of range; ncclSystemError.
/// Threads: any.
///
/// # Safety
/// `ctx` is valid for writes, `config` NULL or valid for reads, `logger` NULL or as for `v4::init`.
pub unsafe extern "C" fn init<const V: u32>(
    ctx: *mut *mut c_void,
    _commId: u64,
    config: *mut ncclNetCommConfig_t,
    logger: Option<ncclDebugLogger_t>,
    _profiler: Option<ncclProfilerCallback_t>,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::init_context(V, ctx, config, logger) }
}

/// Listens on a device; see `v4::listen`.
///
/// Errors, besides: ncclInternalError for what is not a live context.
///
/// # Safety
/// As for `v4::listen`.
pub unsafe extern "C" fn listen<const V: u32>(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    listenComm: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::listen(V, TrafficClassFrom::Context(ctx), dev, handle, listenComm) }
}

/// Takes a connection to a listener one step further; see `v7::connect`. The traffic class is the context's.
///
/// Errors, besides: ncclInternalError for what is not a live context.
///
/// # Safety
/// As for `v7::connect`.
pub unsafe extern "C" fn connect<const V: u32>(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    sendComm: *mut *mut c_void,
    _sendDevComm: *mut *mut ncclNetDeviceHandle_t,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::connect(V, TrafficClassFrom::Context(ctx), dev, handle, sendComm, Mode::NonBlocking) }
}

/// Ends a context. Comms made with it live on until they are closed; with the last context and the last comm everything ends: threads
/// are joined and the logger is dropped, and the next init reads the environment again.
///
/// Errors: ncclInternalError for what is not a live context.
/// Threads: any.
///
/// # Safety
/// None: the argument is looked up.
pub unsafe extern "C" fn finalize<const V: u32>(ctx: *mut c_void) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::finalize(V, ctx) }
}

/// Takes note of what a communicator is about to do. A hint that Railhead needs not: nothing is read, success.
///
/// Errors: ncclInternalError for what is not a live context.
/// Threads: any.
///
/// # Safety
/// None: the context is looked up.
pub unsafe extern "C" fn setNetAttr<const V: u32>(ctx: *mut c_void, _netAttr: *mut ncclNetAttr_t) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::set_net_attr(V, ctx) }
}
