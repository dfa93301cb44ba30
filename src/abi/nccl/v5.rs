//! ncclNet v5, which NCCL 2.12 loads: connect and accept no longer block, messages have tags, a receive has up to 8 buffers.
//!
//! NCCL's own account: plugins/net/example/nccl/net_v5.h. Status codes end at 5: a lost peer is `ncclSystemError`.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use super::calls::{self, Arrays, Scope};
use super::types::{NAME, ncclResult_t};
use super::v4::{Accept, Close, Connect, DeregMr, Devices, GetProperties, Init, Listen, RegMr, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, init, listen, regMr, test};
use crate::abi::plugin::Description;
use crate::base::error::{Error, Result};
use crate::net::Ready;

/// Properties of a device.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ncclNetProperties_v5_t {
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
}

const _: () = {
    assert!(size_of::<ncclNetProperties_v5_t>() == 48);
    assert!(offset_of!(ncclNetProperties_v5_t, pciPath) == 8);
    assert!(offset_of!(ncclNetProperties_v5_t, guid) == 16);
    assert!(offset_of!(ncclNetProperties_v5_t, ptrSupport) == 24);
    assert!(offset_of!(ncclNetProperties_v5_t, speed) == 28);
    assert!(offset_of!(ncclNetProperties_v5_t, port) == 32);
    assert!(offset_of!(ncclNetProperties_v5_t, latency) == 36);
    assert!(offset_of!(ncclNetProperties_v5_t, maxComms) == 40);
    assert!(offset_of!(ncclNetProperties_v5_t, maxRecvs) == 44);
};

impl TryFrom<&Description> for ncclNetProperties_v5_t {
    type Error = Error;

    fn try_from(device: &Description) -> Result<Self> {
        let p = &device.properties;
        Ok(ncclNetProperties_v5_t {
            name: device.name,
            pciPath: device.pci_path,
            guid: p.guid,
            ptrSupport: p.ptr_support,
            speed: p.speed_mbps,
            port: p.port,
            latency: p.latency_us,
            maxComms: p.max_comms,
            maxRecvs: p.max_recvs,
        })
    }
}

/// Type of [`isend`]; up to version 8.
pub type Isend = unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, c_int, *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`irecv`]; up to version 8.
pub type Irecv =
    unsafe extern "C" fn(*mut c_void, c_int, *mut *mut c_void, *mut c_int, *mut c_int, *mut *mut c_void, *mut *mut c_void) -> ncclResult_t;
/// Type of [`iflush`].
pub type Iflush =
    unsafe extern "C" fn(*mut c_void, c_int, *mut *mut c_void, *mut c_int, *mut *mut c_void, *mut *mut c_void) -> ncclResult_t;

/// The table.
#[repr(C)]
pub struct ncclNet_v5_t {
    /// "Railhead".
    pub name: *const c_char,
    /// [`init`]
    pub init: Init,
    /// [`devices`]
    pub devices: Devices,
    /// [`getProperties`]
    pub getProperties: GetProperties<ncclNetProperties_v5_t>,
    /// [`listen`]
    pub listen: Listen,
    /// [`connect`]
    pub connect: Connect,
    /// [`accept`]
    pub accept: Accept,
    /// [`regMr`]
    pub regMr: RegMr,
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
}

const _: () = {
    assert!(size_of::<ncclNet_v5_t>() == 16 * 8);
    assert!(offset_of!(ncclNet_v5_t, connect) == 5 * 8);
    assert!(offset_of!(ncclNet_v5_t, deregMr) == 8 * 8);
    assert!(offset_of!(ncclNet_v5_t, closeListen) == 15 * 8);
};

// SAFETY: the table holds addresses of code and of a static string, and nobody writes to it.
unsafe impl Sync for ncclNet_v5_t {}

/// The table that NCCL 2.12 looks up.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v5: ncclNet_v5_t = ncclNet_v5_t {
    name: NAME,
    init: init::<5>,
    devices: devices::<5>,
    getProperties: getProperties::<5, ncclNetProperties_v5_t>,
    listen: listen::<5>,
    connect: connect::<5>,
    accept: accept::<5>,
    regMr: regMr::<5>,
    deregMr: deregMr::<5>,
    isend: isend::<5>,
    irecv: irecv::<5>,
    iflush: iflush::<5>,
    test: test::<5>,
    closeSend: closeSend::<5>,
    closeRecv: closeRecv::<5>,
    closeListen: closeListen::<5>,
};

/// Takes a connection to a listener one step further; never blocks.
///
/// * `handle` - in and out, the bytes from listen (64 of them are used). Where the attempt stands is noted in them, so the same buffer
///   comes with every call.
/// * `sendComm` - out, NULL until the peer has accepted, then the comm, to be closed with closeSend.
///
/// Returns ncclSuccess with `*sendComm == NULL` if it must be called again.
/// Errors: ncclInvalidUsage for bytes that are no handle, or a peer on another fabric or of another version; ncclSystemError where nobody
/// listens.
/// Threads: any, one at a time per handle.
///
/// # Safety
/// `handle` is valid for 64 bytes, `sendComm` for a pointer.
pub unsafe extern "C" fn connect<const V: u32>(dev: c_int, handle: *mut c_void, sendComm: *mut *mut c_void) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::connect(V, Scope::Process, dev, handle, sendComm, Ready::Full) }
}

/// Accepts a connection if one has come; never blocks.
///
/// * `recvComm` - out, NULL until there is one, then the comm, to be closed with closeRecv.
///
/// Returns ncclSuccess with `*recvComm == NULL` if it must be called again.
/// Errors: ncclInternalError for what is not an open listen comm; ncclSystemError.
/// Threads: one at a time per listen comm.
///
/// # Safety
/// `recvComm` is valid for writes.
pub unsafe extern "C" fn accept<const V: u32>(listenComm: *mut c_void, recvComm: *mut *mut c_void) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::accept(V, listenComm, recvComm, Ready::Full) }
}

/// Posts a send.
///
/// * `data`, `size` - in, 0 bytes to 1 GiB; left alone by the caller until `test` reports it done. More than the receive has room for is cut.
/// * `tag` - which buffer of a receive of several it is for.
/// * `mhandle` - from regMr on any comm of the device; covers the bytes.
/// * `request` - out, always written, whatever it held: the request for `test`, or NULL.
///
/// Returns ncclSuccess with `*request == NULL` if the peer has posted no receive yet or the queue is full: call again.
/// Errors: ncclInvalidUsage for a size out of range; ncclInternalError for an unknown comm or registration, or bytes outside of it;
/// ncclRemoteError if the peer is gone (ncclSystemError up to version 5).
/// Threads: one at a time per comm. Never blocks, allocates nothing.
///
/// # Safety
/// `data` is valid for `size` bytes until the request is done or the comm closed; `request` is valid for writes. No other thread uses the
/// comm, regMr and deregMr aside.
pub unsafe extern "C" fn isend<const V: u32>(
    sendComm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::isend(V, sendComm, data, size, tag, mhandle, request) }
}

/// Posts a receive of `n` buffers, each for one send.
///
/// * `n` - 1 to maxRecvs (8). Sends meet receives in the order in which these were posted; a send's tag says which buffer it takes.
/// * `data`, `sizes` - in, `n` each, 0 bytes to 1 GiB; left alone by the caller until `test` reports the request done.
/// * `tags` - in, `n`; may repeat.
/// * `mhandles` - in, `n`, from regMr on any comm of the device; each covers its buffer.
/// * `request` - out, always written, whatever it held: the request for `test`, or NULL.
///
/// Returns ncclSuccess with `*request == NULL` if the queue is full or the handshake still under way: call again.
/// Errors: ncclInvalidUsage for `n` or a size out of range; ncclInternalError for an unknown comm or registration, or a buffer outside
/// of it; ncclRemoteError if the peer is gone (ncclSystemError up to version 5).
/// Threads: one at a time per comm. Never blocks, allocates nothing.
///
/// # Safety
/// The arrays are valid for `n` elements, the buffers for their sizes until the request is done or the comm closed; `request` is valid
/// for writes. No other thread uses the comm, regMr and deregMr aside.
pub unsafe extern "C" fn irecv<const V: u32>(
    recvComm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::irecv(V, recvComm, Arrays { n, data, sizes, tags: Some(tags), mhandles }, request) }
}

/// Makes what a completed receive brought visible to a GPU. Host memory needs none of it: NULL request, success.
///
/// * `n`, `data`, `sizes`, `mhandles` - in, as in the receive.
/// * `request` - out, always written, whatever it held: the request for `test`, or NULL if there is nothing to wait for.
///
/// Errors and threads: as for [`irecv`].
///
/// # Safety
/// As for [`irecv`].
pub unsafe extern "C" fn iflush<const V: u32>(
    recvComm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the requirements are the same.
    unsafe { calls::iflush(V, recvComm, Arrays { n, data, sizes, tags: None, mhandles }, request) }
}
