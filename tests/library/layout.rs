//! The C layouts that Rust exports are those that NCCL loads: compared, size by size and offset by offset, with structures that
//! `tests/c/nccl_net.h` defines independently, and looked at through the built library.

use crate::build;
use std::collections::BTreeMap;
use std::mem::offset_of;
use std::process::Command;

use railhead::abi::nccl::{types, v4, v5, v6, v7, v8, v9, v10, v11, v12};

/// Names and numbers as the C program prints them.
macro_rules! layouts {
    ($($name:ident: $type:ty { $($member:ident),+ $(,)? })+) => {
        BTreeMap::from([$(
            (stringify!($name).to_string(), size_of::<$type>()),
            $((concat!(stringify!($name), ".", stringify!($member)).to_string(), offset_of!($type, $member)),)+
        )+])
    };
}

fn rust_layouts() -> BTreeMap<String, usize> {
    layouts! {
        device_handle: types::ncclNetDeviceHandle_t { netDeviceType, netDeviceVersion, handle, size, needsProxyProgress }
        comm_config: types::ncclNetCommConfig_t { trafficClass }
        comm_attr: types::ncclNetCommAttr_t { maxConcurrentPeers, minConcurrentPeers, maxFlowsPerPeer, minFlowsPerPeer }
        net_attr: types::ncclNetAttr_t { sendCommAttr, recvCommAttr, op, algo, proto }
        vdevice4: types::VDeviceProps<4> { ndevs, devs }
        vdevice8: types::VDeviceProps<8> { ndevs, devs }
        props_v4: v4::ncclNetProperties_v4_t { name, pciPath, guid, ptrSupport, speed, port, maxComms }
        props_v5: v5::ncclNetProperties_v5_t { name, pciPath, guid, ptrSupport, speed, port, latency, maxComms, maxRecvs }
        props_v6: v6::ncclNetProperties_v6_t { name, pciPath, guid, ptrSupport, speed, port, latency, maxComms, maxRecvs }
        props_v7: v7::ncclNetProperties_v7_t {
            name, pciPath, guid, ptrSupport, speed, port, latency, maxComms, maxRecvs, netDeviceType, netDeviceVersion,
        }
        props_v8: v8::ncclNetProperties_v8_t {
            name, pciPath, guid, ptrSupport, regIsGlobal, speed, port, latency, maxComms, maxRecvs, netDeviceType, netDeviceVersion,
        }
        props_v9: v9::ncclNetProperties_v9_t {
            name, pciPath, guid, ptrSupport, regIsGlobal, forceFlush, speed, port, latency, maxComms, maxRecvs, netDeviceType,
            netDeviceVersion, vProps, maxP2pBytes, maxCollBytes,
        }
        props_v10: v10::ncclNetProperties_v10_t {
            name, pciPath, guid, ptrSupport, regIsGlobal, forceFlush, speed, port, latency, maxComms, maxRecvs, netDeviceType,
            netDeviceVersion, vProps, maxP2pBytes, maxCollBytes,
        }
        props_v11: v11::ncclNetProperties_v11_t {
            name, pciPath, guid, ptrSupport, regIsGlobal, forceFlush, speed, port, latency, maxComms, maxRecvs, netDeviceType,
            netDeviceVersion, vProps, maxP2pBytes, maxCollBytes, maxMultiRequestSize,
        }
        props_v12: v12::ncclNetProperties_v12_t {
            name, pciPath, guid, ptrSupport, regIsGlobal, forceFlush, speed, port, latency, maxComms, maxRecvs, netDeviceType,
            netDeviceVersion, vProps, maxP2pBytes, maxCollBytes, maxMultiRequestSize, railId, planeId,
        }
        net_v4: v4::ncclNet_v4_t {
            name, init, devices, getProperties, listen, connect, accept, regMr, deregMr, isend, irecv, iflush, test, closeSend, closeRecv,
            closeListen,
        }
        net_v5: v5::ncclNet_v5_t {
            name, init, devices, getProperties, listen, connect, accept, regMr, deregMr, isend, irecv, iflush, test, closeSend, closeRecv,
            closeListen,
        }
        net_v6: v6::ncclNet_v6_t {
            name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf, deregMr, isend, irecv, iflush, test,
            closeSend, closeRecv, closeListen,
        }
        net_v7: v7::ncclNet_v7_t {
            name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf, deregMr, isend, irecv, iflush, test,
            closeSend, closeRecv, closeListen, getDeviceMr, irecvConsumed,
        }
        net_v8: v8::ncclNet_v8_t {
            name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf, deregMr, isend, irecv, iflush, test,
            closeSend, closeRecv, closeListen, getDeviceMr, irecvConsumed,
        }
        net_v9: v9::ncclNet_v9_t {
            name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf, deregMr, isend, irecv, iflush, test,
            closeSend, closeRecv, closeListen, getDeviceMr, irecvConsumed, makeVDevice,
        }
        net_v10: v10::ncclNet_v10_t {
            name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf, deregMr, isend, irecv, iflush, test,
            closeSend, closeRecv, closeListen, getDeviceMr, irecvConsumed, makeVDevice,
        }
        net_v11: v11::ncclNet_v11_t {
            name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf, deregMr, isend, irecv, iflush, test,
            closeSend, closeRecv, closeListen, getDeviceMr, irecvConsumed, makeVDevice, finalize, setNetAttr,
        }
        net_v12: v12::ncclNet_v12_t {
            name, init, devices, getProperties, listen, connect, accept, regMr, regMrDmaBuf, deregMr, isend, irecv, iflush, test,
            closeSend, closeRecv, closeListen, getDeviceMr, irecvConsumed, makeVDevice, finalize, setNetAttr,
        }
    }
}

#[test]
fn sizes_and_offsets_are_those_of_c() {
    let output = Command::new(build::compile("abi_layout")).output().expect("the program runs");
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).expect("the program prints ASCII");
    let c: BTreeMap<String, usize> = text
        .lines()
        .map(|line| line.split_once(' ').expect("a name and a number"))
        .map(|(name, number)| (name.to_string(), number.parse().expect("a number")))
        .collect();
    let rust = rust_layouts();
    assert!(c.len() > 300, "only {} layouts", c.len());
    for (name, number) in &c {
        assert_eq!(rust.get(name), Some(number), "{name}: C left, Rust right");
    }
    assert_eq!(rust.len(), c.len(), "Rust has members that C has not");
}

#[test]
fn the_library_exports_the_tables() {
    let output = Command::new(build::compile("abi_layout")).arg(build::library()).output().expect("the program runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
