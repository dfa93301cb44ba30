//! ncclNet v7, which NCCL 2.19 loads: network devices whose data a GPU unpacks, which Railhead's are not.
//!
//! NCCL's own account: nccl v2.30.7 src/include/plugin/net/net_v7.h.

use std::ffi::{c_int, c_void};

use super::calls::{self, TrafficClassFrom};
use super::types::{ncclNetDeviceHandle_t, ncclResult_t};
use super::v4::{Close, DeregMr, Devices, GetProperties, Init, Listen, RegMr, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, init, listen, regMr, test};
use super::v5::{Iflush, Irecv, Isend, iflush, irecv, isend};
use super::v6::{RegMrDmaBuf, regMrDmaBuf};
use crate::net::Mode;

properties! {
    ncclNetProperties_v7_t, 56 bytes, 0 parts:
    name pciPath guid ptrSupport speed port latency maxComms maxRecvs netDeviceType netDeviceVersion
}

/// Type of [`connect`]; up to version 9.
pub type Connect = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void, *mut *mut ncclNetDeviceHandle_t) -> ncclResult_t;
/// Type of [`accept`].
pub type Accept = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut *mut ncclNetDeviceHandle_t) -> ncclResult_t;
/// Type of getDeviceMr.
pub type GetDeviceMr = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of irecvConsumed.
pub type IrecvConsumed = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> ncclResult_t;

table! {
    /// The table that NCCL 2.19 looks up.
    ncclNetPlugin_v7: ncclNet_v7_t, version 7, ncclNetProperties_v7_t, 0 parts:
    init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test closeSend closeRecv closeListen
    getDeviceMr irecvConsumed
}

/// Takes a connection to a listener one step further; see `v5::connect`. `*sendDevComm` is left alone: no device of Railhead is offloaded.
///
/// # Safety
/// As for `v5::connect`.
pub unsafe extern "C" fn connect<const V: u32>(
    dev: c_int,
    handle: *mut c_void,
    sendComm: *mut *mut c_void,
    _sendDevComm: *mut *mut ncclNetDeviceHandle_t,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::connect(V, TrafficClassFrom::Nowhere, dev, handle, sendComm, Mode::NonBlocking) }
}

/// Accepts a connection if one has come; see `v5::accept`. `*recvDevComm` is left alone.
///
/// # Safety
/// As for `v5::accept`.
pub unsafe extern "C" fn accept<const V: u32>(
    listenComm: *mut c_void,
    recvComm: *mut *mut c_void,
    _recvDevComm: *mut *mut ncclNetDeviceHandle_t,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::accept(V, listenComm, recvComm, Mode::NonBlocking) }
}
