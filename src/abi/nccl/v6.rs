//! ncclNet v6, which NCCL 2.13 to 2.18 load: DMA-BUF registration and, in the status codes, a word for a lost peer.
//!
//! NCCL's own account: nccl v2.30.7 src/include/plugin/net/net_v6.h.

use std::ffi::{c_int, c_void};

use super::calls;
use super::types::ncclResult_t;
use super::v4::{Accept, Close, Connect, DeregMr, Devices, GetProperties, Init, Listen, RegMr, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, init, listen, regMr, test};
use super::v5::{Iflush, Irecv, Isend, accept, connect, iflush, irecv, isend};

/// Properties of a device, as in version 5.
pub type ncclNetProperties_v6_t = super::v5::ncclNetProperties_v5_t;

/// Type of [`regMrDmaBuf`].
pub type RegMrDmaBuf = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int, u64, c_int, *mut *mut c_void) -> ncclResult_t;

table! {
    /// The table that NCCL 2.13 to 2.18 look up.
    ncclNetPlugin_v6: ncclNet_v6_t, version 6, ncclNetProperties_v6_t, 0 parts:
    init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test closeSend closeRecv closeListen
}

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
