//! ncclNet v11, which NCCL 2.28, 2.29 and today's RCCL load: a context per communicator, from init to finalize.
//!
//! NCCL's own account: nccl v2.30.7 src/include/plugin/net/net_v11.h.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use super::calls::{self, Scope};
use super::types::{NAME, NCCL_NET_DEVICE_HOST, NCCL_NET_DEVICE_INVALID_VERSION, VDeviceProps};
use super::types::{ncclDebugLogger_t, ncclNetAttr_t, ncclNetCommConfig_t, ncclNetDeviceHandle_t, ncclProfilerCallback_t, ncclResult_t};
use super::v4::{Close, DeregMr, Devices, GetProperties, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, test};
use super::v5::{Iflush, iflush};
use super::v6::{RegMrDmaBuf, regMrDmaBuf};
use super::v7::{Accept, GetDeviceMr, IrecvConsumed, accept};
use super::v8::{RegMr, regMr};
use super::v9::{MakeVDevice, makeVDevice};
use super::v10::{Irecv, Isend, irecv, isend};
use crate::abi::plugin::Description;
use crate::base::error::{Error, Result};
use crate::net::Ready;

/// Properties of a device.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ncclNetProperties_v11_t {
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
    /// Requests in one call, at most.
    pub maxMultiRequestSize: c_int,
}

const _: () = {
    assert!(size_of::<ncclNetProperties_v11_t>() == 112);
    assert!(offset_of!(ncclNetProperties_v11_t, pciPath) == 8);
    assert!(offset_of!(ncclNetProperties_v11_t, guid) == 16);
    assert!(offset_of!(ncclNetProperties_v11_t, ptrSupport) == 24);
    assert!(offset_of!(ncclNetProperties_v11_t, regIsGlobal) == 28);
    assert!(offset_of!(ncclNetProperties_v11_t, forceFlush) == 32);
    assert!(offset_of!(ncclNetProperties_v11_t, speed) == 36);
    assert!(offset_of!(ncclNetProperties_v11_t, port) == 40);
    assert!(offset_of!(ncclNetProperties_v11_t, latency) == 44);
    assert!(offset_of!(ncclNetProperties_v11_t, maxComms) == 48);
    assert!(offset_of!(ncclNetProperties_v11_t, maxRecvs) == 52);
    assert!(offset_of!(ncclNetProperties_v11_t, netDeviceType) == 56);
    assert!(offset_of!(ncclNetProperties_v11_t, netDeviceVersion) == 60);
    assert!(offset_of!(ncclNetProperties_v11_t, vProps) == 64);
    assert!(offset_of!(ncclNetProperties_v11_t, maxP2pBytes) == 88);
    assert!(offset_of!(ncclNetProperties_v11_t, maxCollBytes) == 96);
    assert!(offset_of!(ncclNetProperties_v11_t, maxMultiRequestSize) == 104);
};

impl TryFrom<&Description> for ncclNetProperties_v11_t {
    type Error = Error;

    fn try_from(device: &Description) -> Result<Self> {
        let p = &device.properties;
        Ok(ncclNetProperties_v11_t {
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
        })
    }
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

/// The table.
#[repr(C)]
pub struct ncclNet_v11_t {
    /// "Railhead".
    pub name: *const c_char,
    /// [`init`]
    pub init: Init,
    /// [`devices`]
    pub devices: Devices,
    /// [`getProperties`]
    pub getProperties: GetProperties<ncclNetProperties_v11_t>,
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
    /// [`finalize`]
    pub finalize: Finalize,
    /// [`setNetAttr`]
    pub setNetAttr: SetNetAttr,
}

const _: () = {
    assert!(size_of::<ncclNet_v11_t>() == 22 * 8);
    assert!(offset_of!(ncclNet_v11_t, connect) == 5 * 8);
    assert!(offset_of!(ncclNet_v11_t, deregMr) == 9 * 8);
    assert!(offset_of!(ncclNet_v11_t, closeListen) == 16 * 8);
    assert!(offset_of!(ncclNet_v11_t, getDeviceMr) == 17 * 8);
    assert!(offset_of!(ncclNet_v11_t, irecvConsumed) == 18 * 8);
    assert!(offset_of!(ncclNet_v11_t, makeVDevice) == 19 * 8);
    assert!(offset_of!(ncclNet_v11_t, finalize) == 20 * 8);
    assert!(offset_of!(ncclNet_v11_t, setNetAttr) == 21 * 8);
};

// SAFETY: the table holds addresses of code and of a static string, and nobody writes to it.
unsafe impl Sync for ncclNet_v11_t {}

/// The table that NCCL 2.28 and 2.29 look up.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v11: ncclNet_v11_t = ncclNet_v11_t {
    name: NAME,
    init: init::<11>,
    devices: devices::<11>,
    getProperties: getProperties::<11, ncclNetProperties_v11_t>,
    listen: listen::<11>,
    connect: connect::<11>,
    accept: accept::<11>,
    regMr: regMr::<11>,
    regMrDmaBuf: Some(regMrDmaBuf::<11>),
    deregMr: deregMr::<11>,
    isend: isend::<11>,
    irecv: irecv::<11>,
    iflush: iflush::<11>,
    test: test::<11>,
    closeSend: closeSend::<11>,
    closeRecv: closeRecv::<11>,
    closeListen: closeListen::<11>,
    getDeviceMr: None,
    irecvConsumed: None,
    makeVDevice: makeVDevice::<11, 4>,
    finalize: finalize::<11>,
    setNetAttr: setNetAttr::<11>,
};

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
    unsafe { calls::listen(V, Scope::Context(ctx), dev, handle, listenComm) }
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
    unsafe { calls::connect(V, Scope::Context(ctx), dev, handle, sendComm, Ready::Full) }
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
