//! What a port says of itself, in numbers of libibverbs and in files of the kernel, and what NCCL is told of it. Called while ports are listed, on the
//! thread that initialises; nothing here decides whether a port is used.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use ibverbs_sys::*;

use super::context::Context;
use super::filter::RailPlane;
use super::library::check;
use crate::base::config::Config;
use crate::fabric::types::DeviceInfo;

/// Microseconds, for NCCL's topology, which only compares.
const LATENCY_US: f32 = 1.0;
/// Speed where the system does not know it, in Mbit/s: NCCL's default.
const DEFAULT_SPEED_MBPS: u32 = 10_000;

/// What a port says of itself.
#[derive(Debug, Clone)]
pub struct Attributes {
    /// Its state, in a word or two.
    pub state: &'static str,
    /// "Ethernet" or "InfiniBand", else its number.
    pub link_layer: String,
    /// Mbit/s.
    pub speed_mbps: u32,
    /// Who says that.
    pub speed_from: &'static str,
    /// Bytes; 0 for a code that means nothing here.
    pub mtu: u32,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
}

/// Asks the port, and the driver for what the port's numbers do not say.
pub fn attributes(context: &Context, number: u8, port: &ibv_port_attr, config: &Config) -> Attributes {
    let from_driver = driver_speed(context, number, config).map(|speed| (speed, "the driver's word"));
    let known = || speed(port.active_speed, port.active_width).map(|speed| (speed, "the port's codes"));
    let (speed_mbps, speed_from) =
        from_driver.or_else(known).unwrap_or((DEFAULT_SPEED_MBPS, "a default: the port's codes mean nothing here"));
    Attributes {
        state: state_name(port.state),
        link_layer: match u32::from(port.link_layer) {
            IBV_LINK_LAYER_ETHERNET => "Ethernet".into(),
            IBV_LINK_LAYER_INFINIBAND => "InfiniBand".into(),
            IBV_LINK_LAYER_UNSPECIFIED => "unspecified (InfiniBand)".into(),
            other => other.to_string(),
        },
        speed_mbps,
        speed_from,
        // 256 << 0 is code 1.
        mtu: if (1..=5).contains(&port.active_mtu) { 128 << port.active_mtu } else { 0 },
        lid: port.lid,
    }
}

/// What NCCL is told of a port.
pub fn describe(
    context: &Context,
    attr: &ibv_device_attr,
    (number, many): (u8, bool),
    attributes: &Attributes,
    at: RailPlane,
    config: &Config,
    addr: SocketAddr,
) -> DeviceInfo {
    let name = if many { format!("{}:{number}", context.name) } else { context.name.clone() };
    DeviceInfo {
        name,
        fabric: "verbs",
        pci_path: pci_path(&context.sysfs, config.ib_merge_vfs),
        guid: u64::from_be(if attr.sys_image_guid == 0 { attr.node_guid } else { attr.sys_image_guid }),
        port: u16::from(number),
        speed_mbps: attributes.speed_mbps,
        latency_us: LATENCY_US,
        mtu: attributes.mtu,
        max_qp: u32::try_from(attr.max_qp).unwrap_or(0),
        rail_id: at.rail,
        plane_id: at.plane,
        peer_memory: peer_memory(Path::new(SYS)).is_some(),
        dma_buf: context.dma_buf,
        addr,
    }
}

/// Where the kernel's modules say that they are there.
pub const SYS: &str = "/sys";

/// Which module of the kernel lets NICs reach a GPU's memory by its address, if any does (NCCL 2.28 src/transport/net_ib, ncclIbGdrSupport;
/// RCCL's for amdkfd). `sys` is where sysfs is mounted.
pub fn peer_memory(sys: &Path) -> Option<&'static str> {
    const MODULES: [(&str, &str); 4] = [
        ("nv_peer_mem", "kernel/mm/memory_peers/nv_mem/version"),
        ("nv_peer_mem_nc", "kernel/mm/memory_peers/nv_mem_nc/version"),
        ("nvidia_peermem", "module/nvidia_peermem/version"),
        ("amdkfd", "kernel/mm/memory_peers/amdkfd/version"),
    ];
    MODULES.into_iter().find(|(_, path)| sys.join(path).exists()).map(|(name, _)| name)
}

/// Real path of the PCI device, as NCCL writes it: ports of one card, which are its functions, count as one, and with `merge_vfs` virtual
/// functions of it too.
fn pci_path(sysfs: &Path, merge_vfs: bool) -> Option<String> {
    let path = fs::canonicalize(sysfs.join("device")).ok()?;
    merged(path.to_str()?, merge_vfs)
}

/// "0000:3b:00.1" is a port of "0000:3b:00.0", and "0000:3b:02.5" a virtual function.
fn merged(path: &str, merge_vfs: bool) -> Option<String> {
    let (bus, function) = path.rsplit_once(':')?;
    let (device, _) = function.split_once('.').filter(|(device, number)| (device.len(), number.len()) == (2, 1))?;
    let device = if merge_vfs { "00" } else { device };
    path.contains("/devices/pci").then(|| format!("{bus}:{device}.0"))
}

/// Mbit/s in the driver's own words, if it has any: there are speeds that the codes have no number for.
fn driver_speed(context: &Context, number: u8, config: &Config) -> Option<u32> {
    let ask = context.library.query_port_speed.filter(|_| config.ib_query_speed)?;
    let mut hundreds = 0u64;
    // SAFETY: the device is open; the place outlives the call.
    check(unsafe { ask(context.raw, u32::from(number), &mut hundreds) }).ok()?;
    u32::try_from(hundreds.checked_mul(100)?).ok().filter(|&speed| speed > 0)
}

/// Mbit/s from the codes of InfiniBand (specification 1.4 and later, PortInfo; as NCCL has them).
fn speed(speed: u8, width: u8) -> Option<u32> {
    let lane = match speed {
        1 => 2_500,
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        _ => return None,
    };
    let lanes = match width {
        1 => 1,
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => return None,
    };
    Some(lane * lanes)
}

/// A word or two.
pub fn state_name(state: ibv_port_state::Type) -> &'static str {
    match state {
        ibv_port_state::IBV_PORT_NOP => "nop",
        ibv_port_state::IBV_PORT_DOWN => "down",
        ibv_port_state::IBV_PORT_INIT => "initialising",
        ibv_port_state::IBV_PORT_ARMED => "armed: does a subnet manager run?",
        ibv_port_state::IBV_PORT_ACTIVE => "active",
        ibv_port_state::IBV_PORT_ACTIVE_DEFER => "active, deferred",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_a_card_are_one() {
        let path = |end: &str| format!("/sys/devices/pci0000:3a/0000:3a:00.0/0000:3b:{end}");
        for end in ["00.0", "00.1", "02.5"] {
            assert_eq!(merged(&path(end), true), Some(path("00.0")), "{end}");
        }
        assert_eq!(merged(&path("00.1"), false), Some(path("00.0")));
        assert_eq!(merged(&path("02.5"), false), Some(path("02.0")));
        assert_eq!(merged("/sys/devices/virtual/net/v0", true), None);
        assert_eq!(merged("", true), None);
    }

    #[test]
    fn speeds() {
        assert_eq!([speed(128, 2), speed(64, 2), speed(32, 1), speed(1, 1)], [400_000, 200_000, 25_000, 2_500].map(Some));
        assert_eq!([speed(0, 2), speed(3, 1), speed(64, 0)], [None; 3]);
    }

    #[test]
    fn modules_for_peer_memory_are_found_by_name() {
        for (name, version) in [
            ("nv_peer_mem", "kernel/mm/memory_peers/nv_mem/version"),
            ("nv_peer_mem_nc", "kernel/mm/memory_peers/nv_mem_nc/version"),
            ("nvidia_peermem", "module/nvidia_peermem/version"),
            ("amdkfd", "kernel/mm/memory_peers/amdkfd/version"),
        ] {
            let sys = tempfile::tempdir().unwrap();
            assert_eq!(peer_memory(sys.path()), None);
            let file = sys.path().join(version);
            // The folder alone is also there while the module is being loaded.
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            assert_eq!(peer_memory(sys.path()), None, "{name}");
            fs::write(file, "1\n").unwrap();
            assert_eq!(peer_memory(sys.path()), Some(name));
        }
    }
}
