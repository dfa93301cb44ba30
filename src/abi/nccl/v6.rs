//! ncclNet v6, which NCCL 2.13 to 2.18 load: DMA-BUF registration and, in the status codes, a word for a lost peer.
//!
//! NCCL's own account: nccl v2.30.7 src/include/plugin/net/net_v6.h.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use super::calls;
use super::types::{NAME, ncclResult_t};
use super::v4::{Accept, Close, Connect, DeregMr, Devices, GetProperties, Init, Listen, RegMr, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, init, listen, regMr, test};
use super::v5::{Iflush, Irecv, Isend, accept, connect, iflush, irecv, isend};

/// Properties of a device, as in version 5.
pub type ncclNetProperties_v6_t = super::v5::ncclNetProperties_v5_t;

/// Type of [`regMrDmaBuf`].
pub type RegMrDmaBuf = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, c_int, *mut *mut c_void) -> ncclResult_t;

/// The table.
#[repr(C)]
pub struct ncclNet_v6_t {
    /// "Railhead".
    pub name: *const c_char,
    /// [`init`]
    pub init: Init,
    /// [`devices`]
    pub devices: Devices,
    /// [`getProperties`]
    pub getProperties: GetProperties<ncclNetProperties_v6_t>,
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
}

const _: () = {
    assert!(size_of::<ncclNet_v6_t>() == 17 * 8);
    assert!(offset_of!(ncclNet_v6_t, connect) == 5 * 8);
    assert!(offset_of!(ncclNet_v6_t, deregMr) == 9 * 8);
    assert!(offset_of!(ncclNet_v6_t, closeListen) == 16 * 8);
};

// SAFETY: the table holds addresses of code and of a static string, and nobody writes to it.
unsafe impl Sync for ncclNet_v6_t {}

/// The table that NCCL 2.13 to 2.18 look up.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v6: ncclNet_v6_t = ncclNet_v6_t {
    name: NAME,
    init: init::<6>,
    devices: devices::<6>,
    getProperties: getProperties::<6, ncclNetProperties_v6_t>,
    listen: listen::<6>,
    connect: connect::<6>,
    accept: accept::<6>,
    regMr: regMr::<6>,
    regMrDmaBuf: Some(regMrDmaBuf::<6>),
    deregMr: deregMr::<6>,
    isend: isend::<6>,
    irecv: irecv::<6>,
    iflush: iflush::<6>,
    test: test::<6>,
    closeSend: closeSend::<6>,
    closeRecv: closeRecv::<6>,
    closeListen: closeListen::<6>,
};

/// Registers memory of a device by its DMA-BUF.
///
/// * `data` - its address on the device, by which sends and receives name it.
/// * `size` - bytes, 1 or more.
/// * `kind` - NCCL_PTR_CUDA.
/// * `offset` - of the memory in the DMA-BUF.
/// * `fd` - the DMA-BUF; the caller's to close, at any time after the call.
/// * `mhandle` - out, to be ended with deregMr.
///
/// Returns ncclInvalidUsage if the device's ptrSupport lacks NCCL_PTR_DMABUF, ncclSystemError if the NIC cannot reach the memory.
///
/// Threads: any, also while another drives the comm.
///
/// # Safety
/// The memory exists until deregMr; the peer may change it meanwhile. `mhandle` is valid for writes.
pub unsafe extern "C" fn regMrDmaBuf<const V: u32>(
    comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    offset: u64,
    fd: c_int,
    mhandle: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: the caller keeps this function's contract.
    unsafe { calls::reg_mr_dma_buf(V, comm, data, size, kind, offset, fd, mhandle) }
}
