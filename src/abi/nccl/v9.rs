//! ncclNet v9, which NCCL 2.24 and 2.25 load: devices made of several, and sizes of size_t in isend and irecv.
//!
//! NCCL's own account: nccl v2.30.7 src/include/plugin/net/net_v9.h.

use std::ffi::{c_int, c_void};

use super::calls::{self, Arrays};
use super::types::{VDeviceProps, ncclResult_t};
use super::v4::{Close, DeregMr, Devices, GetProperties, Init, Listen, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, init, listen, test};
use super::v5::{Iflush, iflush};
use super::v6::{RegMrDmaBuf, regMrDmaBuf};
use super::v7::{Accept, Connect, GetDeviceMr, IrecvConsumed, accept, connect};
use super::v8::{RegMr, regMr};

properties! {
    ncclNetProperties_v9_t, 104 bytes, 4 parts:
    name pciPath guid ptrSupport regIsGlobal forceFlush speed port latency maxComms maxRecvs netDeviceType netDeviceVersion vProps
    maxP2pBytes maxCollBytes
}

/// Type of [`isend`]; of version 9 alone.
pub type Isend = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`irecv`]; of version 9 alone.
pub type Irecv =
    unsafe extern "C" fn(*mut c_void, c_int, *mut *mut c_void, *mut usize, *mut c_int, *mut *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`makeVDevice`].
pub type MakeVDevice<const N: usize> = unsafe extern "C" fn(*mut c_int, *mut VDeviceProps<N>) -> ncclResult_t;

table! {
    /// The table that NCCL 2.24 and 2.25 look up.
    ncclNetPlugin_v9: ncclNet_v9_t, version 9, ncclNetProperties_v9_t, 4 parts:
    init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test closeSend closeRecv closeListen
    getDeviceMr irecvConsumed makeVDevice
}

/// Posts a send; see `v5::isend`.
///
/// # Safety
/// As for `v5::isend`.
unsafe extern "C" fn isend<const V: u32>(
    sendComm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::isend(V, sendComm, data, size, tag, mhandle, request) }
}

/// Posts a receive; see `v5::irecv`. NCCL may leave NCCL_NET_OPTIONAL_RECV_COMPLETION (0x1) in `*request` to say that it could do without
/// the completion; it gets it all the same.
///
/// # Safety
/// As for `v5::irecv`.
unsafe extern "C" fn irecv<const V: u32>(
    recvComm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::irecv(V, recvComm, Arrays { n, data, sizes, tags: Some(tags), mhandles }, request) }
}

/// Makes one device of several, which it numbers after those that there are.
///
/// * `d` - out, its number.
/// * `props` - in, the physical devices.
///
/// Errors: ncclInvalidUsage for a list that is empty or too long, and for devices that are better left alone (the log says why); NCCL then
/// goes on with the devices as they are. ncclInternalError for a device that does not exist.
/// Threads: any.
///
/// # Safety
/// `d` is valid for writes, `props` for reads.
pub unsafe extern "C" fn makeVDevice<const V: u32, const N: usize>(d: *mut c_int, props: *mut VDeviceProps<N>) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::make_v_device(V, d, props) }
}
