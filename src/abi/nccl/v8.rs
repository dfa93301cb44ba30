//! ncclNet v8, which NCCL 2.20 to 2.23 and RCCL 2.21 load: registrations of any size, valid for all comms of a device.
//!
//! NCCL's own account: nccl v2.30.7 src/include/plugin/net/net_v8.h.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use super::calls;
use super::types::{NAME, NCCL_NET_DEVICE_HOST, NCCL_NET_DEVICE_INVALID_VERSION, ncclResult_t};
use super::v4::{Close, DeregMr, Devices, GetProperties, Init, Listen, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, init, listen, test};
use super::v5::{Iflush, Irecv, Isend, iflush, irecv, isend};
use super::v6::{RegMrDmaBuf, regMrDmaBuf};
use super::v7::{Accept, Connect, GetDeviceMr, IrecvConsumed, accept, connect};
use crate::abi::plugin::Description;
use crate::base::error::{Error, Result};

/// Properties of a device.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ncclNetProperties_v8_t {
    /// Unique; valid as long as the process lives.
    pub name: *mut c_char,
    /// Path of the PCI device in /sys, or NULL.
    pub pciPath: *mut c_char,
    /// Unique per NIC, shared by its ports.
    pub guid: u64,
    /// Kinds of memory that can be registered, NCCL_PTR_* as bits.
    pub ptrSupport: c_int,
    /// 1 if a registration serves every comm of the device.
    pub regIsGlobal: c_int,
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
    assert!(size_of::<ncclNetProperties_v8_t>() == 64);
    assert!(offset_of!(ncclNetProperties_v8_t, pciPath) == 8);
    assert!(offset_of!(ncclNetProperties_v8_t, guid) == 16);
    assert!(offset_of!(ncclNetProperties_v8_t, ptrSupport) == 24);
    assert!(offset_of!(ncclNetProperties_v8_t, regIsGlobal) == 28);
    assert!(offset_of!(ncclNetProperties_v8_t, speed) == 32);
    assert!(offset_of!(ncclNetProperties_v8_t, port) == 36);
    assert!(offset_of!(ncclNetProperties_v8_t, latency) == 40);
    assert!(offset_of!(ncclNetProperties_v8_t, maxComms) == 44);
    assert!(offset_of!(ncclNetProperties_v8_t, maxRecvs) == 48);
    assert!(offset_of!(ncclNetProperties_v8_t, netDeviceType) == 52);
    assert!(offset_of!(ncclNetProperties_v8_t, netDeviceVersion) == 56);
};

impl TryFrom<&Description> for ncclNetProperties_v8_t {
    type Error = Error;

    fn try_from(device: &Description) -> Result<Self> {
        let p = &device.properties;
        Ok(ncclNetProperties_v8_t {
            name: device.name,
            pciPath: device.pci_path,
            guid: p.guid,
            ptrSupport: p.ptr_support,
            regIsGlobal: p.reg_is_global.into(),
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

/// Type of [`regMr`].
pub type RegMr = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut *mut c_void) -> ncclResult_t;

/// The table.
#[repr(C)]
pub struct ncclNet_v8_t {
    /// "Railhead".
    pub name: *const c_char,
    /// [`init`]
    pub init: Init,
    /// [`devices`]
    pub devices: Devices,
    /// [`getProperties`]
    pub getProperties: GetProperties<ncclNetProperties_v8_t>,
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
    assert!(size_of::<ncclNet_v8_t>() == 19 * 8);
    assert!(offset_of!(ncclNet_v8_t, connect) == 5 * 8);
    assert!(offset_of!(ncclNet_v8_t, deregMr) == 9 * 8);
    assert!(offset_of!(ncclNet_v8_t, closeListen) == 16 * 8);
    assert!(offset_of!(ncclNet_v8_t, getDeviceMr) == 17 * 8);
    assert!(offset_of!(ncclNet_v8_t, irecvConsumed) == 18 * 8);
};

// SAFETY: the table holds addresses of code and of a static string, and nobody writes to it.
unsafe impl Sync for ncclNet_v8_t {}

/// The table that NCCL 2.20 to 2.23 look up.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v8: ncclNet_v8_t = ncclNet_v8_t {
    name: NAME,
    init: init::<8>,
    devices: devices::<8>,
    getProperties: getProperties::<8, ncclNetProperties_v8_t>,
    listen: listen::<8>,
    connect: connect::<8>,
    accept: accept::<8>,
    regMr: regMr::<8>,
    regMrDmaBuf: Some(regMrDmaBuf::<8>),
    deregMr: deregMr::<8>,
    isend: isend::<8>,
    irecv: irecv::<8>,
    iflush: iflush::<8>,
    test: test::<8>,
    closeSend: closeSend::<8>,
    closeRecv: closeRecv::<8>,
    closeListen: closeListen::<8>,
    getDeviceMr: None,
    irecvConsumed: None,
};

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
