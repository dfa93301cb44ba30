//! ncclNet v12, which NCCL 2.30 and later load: devices know their rail and plane, and up to 8 make one.
//!
//! NCCL's own account: nccl v2.30.7 src/include/plugin/net/net_v12.h.

use super::v4::{Close, DeregMr, Devices, GetProperties, Test};
use super::v4::{closeListen, closeRecv, closeSend, deregMr, devices, getProperties, test};
use super::v5::{Iflush, iflush};
use super::v6::{RegMrDmaBuf, regMrDmaBuf};
use super::v7::{Accept, GetDeviceMr, IrecvConsumed, accept};
use super::v8::{RegMr, regMr};
use super::v9::{MakeVDevice, makeVDevice};
use super::v10::{Irecv, Isend, irecv, isend};
use super::v11::{Connect, Finalize, Init, Listen, SetNetAttr, connect, finalize, init, listen, setNetAttr};

properties! {
    ncclNetProperties_v12_t, 128 bytes, 8 parts:
    name pciPath guid ptrSupport regIsGlobal forceFlush speed port latency maxComms maxRecvs netDeviceType netDeviceVersion vProps
    maxP2pBytes maxCollBytes maxMultiRequestSize railId planeId
}

table! {
    /// The table that NCCL 2.30 and later look up.
    ncclNetPlugin_v12: ncclNet_v12_t, version 12, ncclNetProperties_v12_t, 8 parts:
    init devices getProperties listen connect accept regMr regMrDmaBuf deregMr isend irecv iflush test closeSend closeRecv closeListen
    getDeviceMr irecvConsumed makeVDevice finalize setNetAttr
}
