//! ncclNet v12, which NCCL 2.30 and later load: devices know their rail and plane, and up to 8 make one.
//!
//! NCCL's own account: nccl v2.30.7 src/include/plugin/net/net_v12.h.

use std::ffi::{c_char, c_int};
use std::mem::offset_of;

use super::types::{NAME, NCCL_NET_DEVICE_HOST, NCCL_NET_DEVICE_INVALID_VERSION, VDeviceProps};
use super::v4::{Close, DeregMr, Devices, GetProperties, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, test};
use super::v5::{Iflush, iflush};
use super::v6::{RegMrDmaBuf, regMrDmaBuf};
use super::v7::{Accept, GetDeviceMr, IrecvConsumed, accept};
use super::v8::{RegMr, regMr};
use super::v9::{MakeVDevice, makeVDevice};
use super::v10::{Irecv, Isend, irecv, isend};
use super::v11::{Connect, Finalize, Init, Listen, SetNetAttr, connect, finalize, init, listen, setNetAttr};
use crate::abi::plugin::Description;
use crate::base::error::{Error, Result};

/// Properties of a device.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ncclNetProperties_v12_t {
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
    /// 1 if received data has to be flushed whatever NCCL thinks.
    pub forceFlush: c_int,
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
    /// The physical devices that it consists of; itself, if it is one.
    pub vProps: VDeviceProps<8>,
    /// Bytes in one message, at most.
    pub maxP2pBytes: usize,
    /// Bytes in one message of a collective, at most.
    pub maxCollBytes: usize,
    /// Requests in one call, at most.
    pub maxMultiRequestSize: c_int,
    /// Rail that it is on, or -1.
    pub railId: i16,
    /// Plane that it is on, or -1.
    pub planeId: i16,
}

const _: () = {
    assert!(size_of::<ncclNetProperties_v12_t>() == 128);
    assert!(offset_of!(ncclNetProperties_v12_t, pciPath) == 8);
    assert!(offset_of!(ncclNetProperties_v12_t, guid) == 16);
    assert!(offset_of!(ncclNetProperties_v12_t, ptrSupport) == 24);
    assert!(offset_of!(ncclNetProperties_v12_t, regIsGlobal) == 28);
    assert!(offset_of!(ncclNetProperties_v12_t, forceFlush) == 32);
    assert!(offset_of!(ncclNetProperties_v12_t, speed) == 36);
    assert!(offset_of!(ncclNetProperties_v12_t, port) == 40);
    assert!(offset_of!(ncclNetProperties_v12_t, latency) == 44);
    assert!(offset_of!(ncclNetProperties_v12_t, maxComms) == 48);
    assert!(offset_of!(ncclNetProperties_v12_t, maxRecvs) == 52);
    assert!(offset_of!(ncclNetProperties_v12_t, netDeviceType) == 56);
    assert!(offset_of!(ncclNetProperties_v12_t, netDeviceVersion) == 60);
    assert!(offset_of!(ncclNetProperties_v12_t, vProps) == 64);
    assert!(offset_of!(ncclNetProperties_v12_t, maxP2pBytes) == 104);
    assert!(offset_of!(ncclNetProperties_v12_t, maxCollBytes) == 112);
    assert!(offset_of!(ncclNetProperties_v12_t, maxMultiRequestSize) == 120);
    assert!(offset_of!(ncclNetProperties_v12_t, railId) == 124);
    assert!(offset_of!(ncclNetProperties_v12_t, planeId) == 126);
};

impl TryFrom<&Description> for ncclNetProperties_v12_t {
    type Error = Error;

    fn try_from(device: &Description) -> Result<Self> {
        let p = &device.properties;
        Ok(ncclNetProperties_v12_t {
            name: device.name,
            pciPath: device.pci_path,
            guid: p.guid,
            ptrSupport: p.ptr_support,
            regIsGlobal: p.reg_is_global.into(),
            forceFlush: p.force_flush.into(),
            speed: p.speed_mbps,
            port: p.port,
            latency: p.latency_us,
            maxComms: p.max_comms,
            maxRecvs: p.max_recvs,
            netDeviceType: NCCL_NET_DEVICE_HOST,
            netDeviceVersion: NCCL_NET_DEVICE_INVALID_VERSION,
            vProps: VDeviceProps::new(&p.vdevs)?,
            maxP2pBytes: p.max_p2p_bytes,
            maxCollBytes: p.max_coll_bytes,
            maxMultiRequestSize: 1,
            railId: p.rail_id,
            planeId: p.plane_id,
        })
    }
}

/// The table.
#[repr(C)]
pub struct ncclNet_v12_t {
    /// "Railhead".
    pub name: *const c_char,
    /// [`init`]
    pub init: Init,
    /// [`devices`]
    pub devices: Devices,
    /// [`getProperties`]
    pub getProperties: GetProperties<ncclNetProperties_v12_t>,
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
    /// [`makeVDevice`]
    pub makeVDevice: MakeVDevice<8>,
    /// [`finalize`]
    pub finalize: Finalize,
    /// [`setNetAttr`]
    pub setNetAttr: SetNetAttr,
}

const _: () = {
    assert!(size_of::<ncclNet_v12_t>() == 22 * 8);
    assert!(offset_of!(ncclNet_v12_t, connect) == 5 * 8);
    assert!(offset_of!(ncclNet_v12_t, deregMr) == 9 * 8);
    assert!(offset_of!(ncclNet_v12_t, closeListen) == 16 * 8);
    assert!(offset_of!(ncclNet_v12_t, getDeviceMr) == 17 * 8);
    assert!(offset_of!(ncclNet_v12_t, irecvConsumed) == 18 * 8);
    assert!(offset_of!(ncclNet_v12_t, makeVDevice) == 19 * 8);
    assert!(offset_of!(ncclNet_v12_t, finalize) == 20 * 8);
    assert!(offset_of!(ncclNet_v12_t, setNetAttr) == 21 * 8);
};

// SAFETY: the table holds addresses of code and of a static string, and nobody writes to it.
unsafe impl Sync for ncclNet_v12_t {}

/// The table that NCCL 2.30 and later look up.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v12: ncclNet_v12_t = ncclNet_v12_t {
    name: NAME,
    init: init::<12>,
    devices: devices::<12>,
    getProperties: getProperties::<12, ncclNetProperties_v12_t>,
    listen: listen::<12>,
    connect: connect::<12>,
    accept: accept::<12>,
    regMr: regMr::<12>,
    regMrDmaBuf: Some(regMrDmaBuf::<12>),
    deregMr: deregMr::<12>,
    isend: isend::<12>,
    irecv: irecv::<12>,
    iflush: iflush::<12>,
    test: test::<12>,
    closeSend: closeSend::<12>,
    closeRecv: closeRecv::<12>,
    closeListen: closeListen::<12>,
    getDeviceMr: None,
    irecvConsumed: None,
    makeVDevice: makeVDevice::<12, 8>,
    finalize: finalize::<12>,
    setNetAttr: setNetAttr::<12>,
};
