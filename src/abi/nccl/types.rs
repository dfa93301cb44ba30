//! The C types that several ABI versions share. Names, order and values: nccl v2.30.7 src/include/plugin/{nccl_net.h,nccl_common.h,
//! net/net_v6.h .. net_v12.h} and plugins/net/example/nccl/net_v4.h, net_device.h.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

use crate::base::error::{Error, Result};
pub use crate::base::log::NcclLogger as ncclDebugLogger_t;

/// How a call ended. Only the codes that Railhead returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub enum ncclResult_t {
    /// Done, or to be called again where the function says so.
    ncclSuccess = 0,
    /// The operating system or the NIC refused.
    ncclSystemError = 2,
    /// A bad call from the host, or a fault of Railhead.
    ncclInternalError = 3,
    /// A size, an argument or a setting that the user can mend.
    ncclInvalidUsage = 5,
    /// The peer is gone. From ABI version 6.
    ncclRemoteError = 6,
}

const _: () = assert!(size_of::<ncclResult_t>() == 4);

/// The host's profiler, which Railhead does not call.
pub type ncclProfilerCallback_t = unsafe extern "C" fn(
    event_handle: *mut *mut c_void,
    event_type: c_int,
    parent_handle: *mut c_void,
    plugin_id: i64,
    data: *mut c_void,
) -> ncclResult_t;

/// Where a network device's data is handled: NCCL_NET_DEVICE_HOST, by the CPU. Railhead's devices are no other.
pub const NCCL_NET_DEVICE_HOST: c_int = 0;

/// Version of the device-side protocol where there is none.
pub const NCCL_NET_DEVICE_INVALID_VERSION: c_int = 0;

/// What a plugin with device-side handling returns from connect and accept. Railhead leaves it alone.
#[repr(C)]
pub struct ncclNetDeviceHandle_t {
    /// Kind of offload.
    pub netDeviceType: c_int,
    /// Its version.
    pub netDeviceVersion: c_int,
    /// The device's object.
    pub handle: *mut c_void,
    /// Its bytes.
    pub size: usize,
    /// Whether the proxy still has to call `test`.
    pub needsProxyProgress: c_int,
}

const _: () = {
    assert!(size_of::<ncclNetDeviceHandle_t>() == 32);
    assert!(offset_of!(ncclNetDeviceHandle_t, netDeviceVersion) == 4);
    assert!(offset_of!(ncclNetDeviceHandle_t, handle) == 8);
    assert!(offset_of!(ncclNetDeviceHandle_t, size) == 16);
    assert!(offset_of!(ncclNetDeviceHandle_t, needsProxyProgress) == 24);
};

/// Settings of a communicator: from version 10 an argument of connect, from 11 of init.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ncclNetCommConfig_t {
    /// Traffic class of its packets, or NCCL_NET_TRAFFIC_CLASS_UNDEF.
    pub trafficClass: c_int,
}

const _: () = assert!(size_of::<ncclNetCommConfig_t>() == 4 && offset_of!(ncclNetCommConfig_t, trafficClass) == 0);

/// No traffic class is asked for.
pub const NCCL_NET_TRAFFIC_CLASS_UNDEF: c_int = -1;

impl ncclNetCommConfig_t {
    /// The traffic class, if one is asked for.
    pub fn traffic_class(&self) -> Result<Option<i32>> {
        match self.trafficClass {
            NCCL_NET_TRAFFIC_CLASS_UNDEF => Ok(None),
            class @ 0..=255 => Ok(Some(class)),
            class => Err(Error::usage(format!("traffic class {class}; accepted: 0 to 255, or -1 for none"))),
        }
    }
}

/// The physical devices that a device consists of, at most `N`: 4 up to version 11, then 8.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct VDeviceProps<const N: usize> {
    /// How many of `devs` count.
    pub ndevs: c_int,
    /// Their numbers.
    pub devs: [c_int; N],
}

const _: () = {
    assert!(size_of::<VDeviceProps<4>>() == 20 && offset_of!(VDeviceProps<4>, devs) == 4);
    assert!(size_of::<VDeviceProps<8>>() == 36 && offset_of!(VDeviceProps<8>, devs) == 4);
};

impl<const N: usize> VDeviceProps<N> {
    /// The list for C. Errors: more devices than the version has room for.
    pub fn new(devs: &[usize]) -> Result<VDeviceProps<N>> {
        let mut props = VDeviceProps { ndevs: devs.len() as c_int, devs: [0; N] };
        if devs.len() > N {
            return Err(Error::usage(format!("a virtual device of {} devices; this ABI version has room for {N}", devs.len())));
        }
        for (place, dev) in props.devs.iter_mut().zip(devs) {
            *place = *dev as c_int;
        }
        Ok(props)
    }

    /// The devices that C lists.
    pub fn devs(&self) -> Result<&[c_int]> {
        match usize::try_from(self.ndevs).ok().and_then(|n| self.devs.get(..n)) {
            Some(devs) if !devs.is_empty() => Ok(devs),
            _ => Err(Error::usage(format!("a virtual device of {} devices; accepted: 1 to {N}", self.ndevs))),
        }
    }
}

/// What a communicator expects of its connections in one direction. A hint.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ncclNetCommAttr_t {
    /// Peers at a time, at most.
    pub maxConcurrentPeers: i32,
    /// And at least.
    pub minConcurrentPeers: i32,
    /// Flows to one peer, at most.
    pub maxFlowsPerPeer: i32,
    /// And at least.
    pub minFlowsPerPeer: i32,
}

const _: () = {
    assert!(size_of::<ncclNetCommAttr_t>() == 16);
    assert!(offset_of!(ncclNetCommAttr_t, minConcurrentPeers) == 4);
    assert!(offset_of!(ncclNetCommAttr_t, maxFlowsPerPeer) == 8);
    assert!(offset_of!(ncclNetCommAttr_t, minFlowsPerPeer) == 12);
};

/// What a communicator is about to do. A hint.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct ncclNetAttr_t {
    /// Of its sends.
    pub sendCommAttr: ncclNetCommAttr_t,
    /// Of its receives.
    pub recvCommAttr: ncclNetCommAttr_t,
    /// Which collectives.
    pub op: u32,
    /// By which algorithms.
    pub algo: u32,
    /// With which protocols.
    pub proto: u32,
}

const _: () = {
    assert!(size_of::<ncclNetAttr_t>() == 44);
    assert!(offset_of!(ncclNetAttr_t, recvCommAttr) == 16);
    assert!(offset_of!(ncclNetAttr_t, op) == 32);
    assert!(offset_of!(ncclNetAttr_t, algo) == 36);
    assert!(offset_of!(ncclNetAttr_t, proto) == 40);
};

/// The plugin's name in every table, and what NCCL_NET selects it by.
pub(super) const NAME: *const c_char = c"Railhead".as_ptr();
