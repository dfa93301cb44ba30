//! ncclNet v8, which NCCL 2.20 to 2.23 and RCCL 2.21 load: registrations of any size, valid for all comms of a device.
//!
//! NCCL's own account: nccl v2.30.7 src/include/plugin/net/net_v8.h.

use std::ffi::{c_int, c_void};

use super::calls;
use super::types::ncclResult_t;
use super::v4::{Close, DeregMr, Devices, GetProperties, Init, Listen, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, init, listen, test};
use super::v5::{Iflush, Irecv, Isend, iflush, irecv, isend};
use super::v6::{RegMrDmaBuf, regMrDmaBuf};
use super::v7::{Accept, Connect, GetDeviceMr, IrecvConsumed, accept, connect};

properties! {
    ncclNetProperties_v8_t, 64 bytes, 0 parts:
    name pciPath guid ptrSupport regIsGlobal speed port latency maxComms maxRecvs netDeviceType netDeviceVersion
}

/// Type of [`regMr`].
pub type RegMr = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut *mut c_void) -> ncclResult_t;

table! {
    /// The table that NCCL 2.20 to 2.23 look up.
    ncclNetPlugin_v8: ncclNet_v8_t, version 8, ncclNetProperties_v8_t, 0 parts:
    init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test closeSend closeRecv closeListen
    getDeviceMr irecvConsumed
}

/// Registers memory; see `v4::regMr`.
///
/// # Safety
/// As for `v4::regMr`.
pub unsafe extern "C" fn regMr<const V: u32>(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    mhandle: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::reg_mr(V, comm, data, size, kind, mhandle) }
}
