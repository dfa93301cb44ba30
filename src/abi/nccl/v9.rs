//! ncclNet v9, which NCCL 2.24 and 2.25 load: devices made of several, and sizes of size_t in isend and irecv.
//!
//! NCCL's own account: nccl v2.30.7 src/include/plugin/net/net_v9.h.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use super::calls::{self, Arrays};
use super::types::{NAME, NCCL_NET_DEVICE_HOST, NCCL_NET_DEVICE_INVALID_VERSION, VDeviceProps, ncclResult_t};
use super::v4::{Close, DeregMr, Devices, GetProperties, Init, Listen, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, init, listen, test};
use super::v5::{Iflush, iflush};
use super::v6::{RegMrDmaBuf, regMrDmaBuf};
use super::v7::{Accept, Connect, GetDeviceMr, IrecvConsumed, accept, connect};
use super::v8::{RegMr, regMr};
use crate::abi::plugin::Description;
use crate::base::error::{Error, Result};

/// The physical devices that a device consists of.
pub type ncclNetVDeviceProps_v9_t = VDeviceProps<4>;

/// Properties of a device.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ncclNetProperties_v9_t {
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
    pub vProps: VDeviceProps<4>,
    /// Bytes in one message, at most.
    pub maxP2pBytes: usize,
    /// Bytes in one message of a collective, at most.
    pub maxCollBytes: usize,
}

const _: () = {
    assert!(size_of::<ncclNetProperties_v9_t>() == 104);
    assert!(offset_of!(ncclNetProperties_v9_t, pciPath) == 8);
    assert!(offset_of!(ncclNetProperties_v9_t, guid) == 16);
    assert!(offset_of!(ncclNetProperties_v9_t, ptrSupport) == 24);
    assert!(offset_of!(ncclNetProperties_v9_t, regIsGlobal) == 28);
    assert!(offset_of!(ncclNetProperties_v9_t, forceFlush) == 32);
    assert!(offset_of!(ncclNetProperties_v9_t, speed) == 36);
    assert!(offset_of!(ncclNetProperties_v9_t, port) == 40);
    assert!(offset_of!(ncclNetProperties_v9_t, latency) == 44);
    assert!(offset_of!(ncclNetProperties_v9_t, maxComms) == 48);
    assert!(offset_of!(ncclNetProperties_v9_t, maxRecvs) == 52);
    assert!(offset_of!(ncclNetProperties_v9_t, netDeviceType) == 56);
    assert!(offset_of!(ncclNetProperties_v9_t, netDeviceVersion) == 60);
    assert!(offset_of!(ncclNetProperties_v9_t, vProps) == 64);
    assert!(offset_of!(ncclNetProperties_v9_t, maxP2pBytes) == 88);
    assert!(offset_of!(ncclNetProperties_v9_t, maxCollBytes) == 96);
};

impl TryFrom<&Description> for ncclNetProperties_v9_t {
    type Error = Error;

    fn try_from(device: &Description) -> Result<Self> {
        let p = &device.properties;
        Ok(ncclNetProperties_v9_t {
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
        })
    }
}

/// Type of [`isend`]; of version 9 alone.
pub type Isend = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`irecv`]; of version 9 alone.
pub type Irecv =
    unsafe extern "C" fn(*mut c_void, c_int, *mut *mut c_void, *mut usize, *mut c_int, *mut *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`makeVDevice`].
pub type MakeVDevice<const N: usize> = unsafe extern "C" fn(*mut c_int, *mut VDeviceProps<N>) -> ncclResult_t;

/// The table.
#[repr(C)]
pub struct ncclNet_v9_t {
    /// "Railhead".
    pub name: *const c_char,
    /// [`init`]
    pub init: Init,
    /// [`devices`]
    pub devices: Devices,
    /// [`getProperties`]
    pub getProperties: GetProperties<ncclNetProperties_v9_t>,
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
    pub makeVDevice: MakeVDevice<4>,
}

const _: () = {
    assert!(size_of::<ncclNet_v9_t>() == 20 * 8);
    assert!(offset_of!(ncclNet_v9_t, connect) == 5 * 8);
    assert!(offset_of!(ncclNet_v9_t, deregMr) == 9 * 8);
    assert!(offset_of!(ncclNet_v9_t, closeListen) == 16 * 8);
    assert!(offset_of!(ncclNet_v9_t, getDeviceMr) == 17 * 8);
    assert!(offset_of!(ncclNet_v9_t, irecvConsumed) == 18 * 8);
    assert!(offset_of!(ncclNet_v9_t, makeVDevice) == 19 * 8);
};

// SAFETY: the table holds addresses of code and of a static string, and nobody writes to it.
unsafe impl Sync for ncclNet_v9_t {}

/// The table that NCCL 2.24 and 2.25 look up.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v9: ncclNet_v9_t = ncclNet_v9_t {
    name: NAME,
    init: init::<9>,
    devices: devices::<9>,
    getProperties: getProperties::<9, ncclNetProperties_v9_t>,
    listen: listen::<9>,
    connect: connect::<9>,
    accept: accept::<9>,
    regMr: regMr::<9>,
    regMrDmaBuf: Some(regMrDmaBuf::<9>),
    deregMr: deregMr::<9>,
    isend: isend::<9>,
    irecv: irecv::<9>,
    iflush: iflush::<9>,
    test: test::<9>,
    closeSend: closeSend::<9>,
    closeRecv: closeRecv::<9>,
    closeListen: closeListen::<9>,
    getDeviceMr: None,
    irecvConsumed: None,
    makeVDevice: makeVDevice::<9, 4>,
};

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
