//! ncclNet v7, which NCCL 2.19 loads: network devices whose data a GPU unpacks, which Railhead's are not.
//!
//! NCCL's own account: nccl v2.30.7 src/include/plugin/net/net_v7.h.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use super::calls::{self, Scope};
use super::types::{NAME, NCCL_NET_DEVICE_HOST, NCCL_NET_DEVICE_INVALID_VERSION, ncclNetDeviceHandle_t, ncclResult_t};
use super::v4::{Close, DeregMr, Devices, GetProperties, Init, Listen, RegMr, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, init, listen, regMr, test};
use super::v5::{Iflush, Irecv, Isend, iflush, irecv, isend};
use super::v6::{RegMrDmaBuf, regMrDmaBuf};
use crate::abi::plugin::Description;
use crate::base::error::{Error, Result};
use crate::net::Ready;

/// Properties of a device.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ncclNetProperties_v7_t {
    /// Unique; valid as long as the process lives.
    pub name: *mut c_char,
    /// Path of the PCI device in /sys, or NULL.
    pub pciPath: *mut c_char,
    /// Unique per NIC, shared by its ports.
    pub guid: u64,
    /// Kinds of memory that can be registered, NCCL_PTR_* as bits.
    pub ptrSupport: c_int,
    /// Mbit/s.
    pub speed: c_int,
    /// On the NIC.
    pub port: c_int,
    /// Microseconds.
    pub latency: f32,
    /// Comms at most.
    pub maxComms: c_int,
    /// Buffers in one receive, at most.
    pub maxRecvs: c_int,
    /// NCCL_NET_DEVICE_HOST.
    pub netDeviceType: c_int,
    /// NCCL_NET_DEVICE_INVALID_VERSION.
    pub netDeviceVersion: c_int,
}

const _: () = {
    assert!(size_of::<ncclNetProperties_v7_t>() == 56);
    assert!(offset_of!(ncclNetProperties_v7_t, pciPath) == 8);
    assert!(offset_of!(ncclNetProperties_v7_t, guid) == 16);
    assert!(offset_of!(ncclNetProperties_v7_t, ptrSupport) == 24);
    assert!(offset_of!(ncclNetProperties_v7_t, speed) == 28);
    assert!(offset_of!(ncclNetProperties_v7_t, port) == 32);
    assert!(offset_of!(ncclNetProperties_v7_t, latency) == 36);
    assert!(offset_of!(ncclNetProperties_v7_t, maxComms) == 40);
    assert!(offset_of!(ncclNetProperties_v7_t, maxRecvs) == 44);
    assert!(offset_of!(ncclNetProperties_v7_t, netDeviceType) == 48);
    assert!(offset_of!(ncclNetProperties_v7_t, netDeviceVersion) == 52);
};

impl TryFrom<&Description> for ncclNetProperties_v7_t {
    type Error = Error;

    fn try_from(device: &Description) -> Result<Self> {
        let p = &device.properties;
        Ok(ncclNetProperties_v7_t {
            name: device.name,
            pciPath: device.pci_path,
            guid: p.guid,
            ptrSupport: p.ptr_support,
            speed: p.speed_mbps,
            port: p.port,
            latency: p.latency_us,
            maxComms: p.max_comms,
            maxRecvs: p.max_recvs,
            netDeviceType: NCCL_NET_DEVICE_HOST,
            netDeviceVersion: NCCL_NET_DEVICE_INVALID_VERSION,
        })
    }
}

/// Type of [`connect`]; up to version 9.
pub type Connect = unsafe extern "C" fn(c_int, *mut c_void, *mut *mut c_void, *mut *mut ncclNetDeviceHandle_t) -> ncclResult_t;
/// Type of [`accept`].
pub type Accept = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut *mut ncclNetDeviceHandle_t) -> ncclResult_t;
/// Type of getDeviceMr.
pub type GetDeviceMr = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of irecvConsumed.
pub type IrecvConsumed = unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> ncclResult_t;

/// The table.
#[repr(C)]
pub struct ncclNet_v7_t {
    /// "Railhead".
    pub name: *const c_char,
    /// [`init`]
    pub init: Init,
    /// [`devices`]
    pub devices: Devices,
    /// [`getProperties`]
    pub getProperties: GetProperties<ncclNetProperties_v7_t>,
    /// [`listen`]
    pub listen: Listen,
    /// [`connect`]
    pub connect: Connect,
    /// [`accept`]
    pub accept: Accept,
    /// [`regMr`]
    pub regMr: RegMr,
    /// [`regMrDmaBuf`]
    pub regMrDmaBuf: Option<RegMrDmaBuf>,
    /// [`deregMr`]
    pub deregMr: DeregMr,
    /// [`isend`]
    pub isend: Isend,
    /// [`irecv`]
    pub irecv: Irecv,
    /// [`iflush`]
    pub iflush: Iflush,
    /// [`fn@test`]
    pub test: Test,
    /// [`closeSend`]
    pub closeSend: Close,
    /// [`closeRecv`]
    pub closeRecv: Close,
    /// [`closeListen`]
    pub closeListen: Close,
    /// NULL: data is handled by the CPU.
    pub getDeviceMr: Option<GetDeviceMr>,
    /// NULL: data is handled by the CPU.
    pub irecvConsumed: Option<IrecvConsumed>,
}

const _: () = {
    assert!(size_of::<ncclNet_v7_t>() == 19 * 8);
    assert!(offset_of!(ncclNet_v7_t, connect) == 5 * 8);
    assert!(offset_of!(ncclNet_v7_t, deregMr) == 9 * 8);
    assert!(offset_of!(ncclNet_v7_t, closeListen) == 16 * 8);
    assert!(offset_of!(ncclNet_v7_t, getDeviceMr) == 17 * 8);
    assert!(offset_of!(ncclNet_v7_t, irecvConsumed) == 18 * 8);
};

// SAFETY: the table holds addresses of code and of a static string, and nobody writes to it.
unsafe impl Sync for ncclNet_v7_t {}

/// The table that NCCL 2.19 looks up.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v7: ncclNet_v7_t = ncclNet_v7_t {
    name: NAME,
    init: init::<7>,
    devices: devices::<7>,
    getProperties: getProperties::<7, ncclNetProperties_v7_t>,
    listen: listen::<7>,
    connect: connect::<7>,
    accept: accept::<7>,
    regMr: regMr::<7>,
    regMrDmaBuf: Some(regMrDmaBuf::<7>),
    deregMr: deregMr::<7>,
    isend: isend::<7>,
    irecv: irecv::<7>,
    iflush: iflush::<7>,
    test: test::<7>,
    closeSend: closeSend::<7>,
    closeRecv: closeRecv::<7>,
    closeListen: closeListen::<7>,
    getDeviceMr: None,
    irecvConsumed: None,
};

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
    unsafe { calls::connect(V, Scope::Process, dev, handle, sendComm, Ready::Full) }
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
    unsafe { calls::accept(V, listenComm, recvComm, Ready::Full) }
}
