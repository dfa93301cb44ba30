//! Devices as NCCL sees them: the fabric's, and virtual ones that fuse several. Made by init and makeVDevice, read by any thread.

use std::ffi::CString;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, Weak};

use once_cell::sync::OnceCell;

use crate::base::config::{Config, Progress};
use crate::base::error::{Error, Result};
use crate::base::sync::lock;
use crate::fabric::{self, types::ID_UNDEF};
use crate::link::device_thread::ProgressThread;
use crate::link::limits::{MAX_MESSAGE, MAX_RAILS, MAX_RECVS};

/// NCCL_PTR_HOST, a bit of ptrSupport: memory that the CPU reads and writes (nccl 2.30 src/include/plugin/nccl_net.h, as those below).
pub const PTR_HOST: i32 = 1;
/// NCCL_PTR_CUDA: memory of a GPU, by its address.
pub const PTR_CUDA: i32 = 2;
/// NCCL_PTR_DMABUF: memory of a GPU, by a DMA-BUF.
pub const PTR_DMABUF: i32 = 4;

/// Comms of a device at most, as NCCL's own transports say; queue pairs are no limit.
const MAX_COMMS: i32 = 65536;

/// What NCCL is told of a device.
#[derive(Debug, Clone)]
pub struct Properties {
    /// Unique: the key in NCCL's topology.
    pub name: CString,
    /// Real path of the PCI device in sysfs, if it is one.
    pub pci_path: Option<CString>,
    /// Unique per NIC, shared by its ports.
    pub guid: u64,
    /// Kinds of memory that can be registered, as `NCCL_PTR_*` bits.
    pub ptr_support: i32,
    /// A registration serves every comm of the device.
    pub reg_is_global: bool,
    /// Receives into device memory need a flush whatever the GPU.
    pub force_flush: bool,
    /// Mbit/s, never 0.
    pub speed_mbps: i32,
    /// Port on the NIC.
    pub port: i32,
    /// Microseconds.
    pub latency_us: f32,
    /// Comms at most.
    pub max_comms: i32,
    /// Receives of a group at most.
    pub max_recvs: i32,
    /// Physical devices of it; a physical one has itself.
    pub vdevs: Vec<usize>,
    /// Longest point-to-point message.
    pub max_p2p_bytes: usize,
    /// Longest collective message.
    pub max_coll_bytes: usize,
    /// Rail number, or -1.
    pub rail_id: i16,
    /// Plane number, or -1.
    pub plane_id: i16,
}

/// A device of the fabric and its domain, opened at first use.
pub struct Physical {
    device: fabric::Device,
    /// What it can do.
    pub capabilities: fabric::Capabilities,
    domain: OnceCell<fabric::Domain>,
    /// As long as somebody has something for it to do.
    thread: Mutex<Weak<ProgressThread>>,
}

impl Physical {
    /// Not opened yet.
    pub fn new(device: fabric::Device) -> Physical {
        Physical { capabilities: device.capabilities(), device, domain: OnceCell::new(), thread: Mutex::default() }
    }

    /// What the fabric says of it.
    pub fn info(&self) -> &fabric::DeviceInfo {
        self.device.info()
    }

    /// Its domain.
    pub fn domain(&self) -> Result<&fabric::Domain> {
        self.domain.get_or_try_init(|| self.device.open())
    }

    /// Its thread, if the settings want one, or who asks has to answer its peer. It ends with the last that holds it.
    pub fn thread(&self, config: &Config, answers: bool) -> Result<Option<Arc<ProgressThread>>> {
        match config.progress {
            Progress::Poll if answers => {}
            Progress::Thread => {}
            Progress::Poll | Progress::Caller => return Ok(None),
        }
        let mut place = lock(&self.thread);
        if let Some(running) = place.upgrade() {
            return Ok(Some(running));
        }
        let started = Arc::new(ProgressThread::start(config, &self.info().name)?);
        *place = Arc::downgrade(&started);
        Ok(Some(started))
    }
}

/// A device that comms can be made on.
pub struct NetDevice {
    index: usize,
    name: String,
    properties: Arc<Properties>,
    rails: Vec<Arc<Physical>>,
}

impl NetDevice {
    /// Number `index`, a device of the fabric.
    pub fn physical(index: usize, physical: Arc<Physical>) -> Result<NetDevice> {
        let info = physical.info();
        let properties = Properties {
            name: c_string(&info.name)?,
            pci_path: info.pci_path.as_deref().map(c_string).transpose()?,
            guid: info.guid,
            ptr_support: PTR_HOST | if info.peer_memory { PTR_CUDA } else { 0 } | if info.dma_buf { PTR_DMABUF } else { 0 },
            reg_is_global: true,
            force_flush: false,
            speed_mbps: speed(info),
            port: i32::from(info.port),
            latency_us: info.latency_us,
            max_comms: MAX_COMMS,
            max_recvs: MAX_RECVS as i32,
            vdevs: vec![index],
            max_p2p_bytes: MAX_MESSAGE,
            max_coll_bytes: MAX_MESSAGE,
            rail_id: info.rail_id,
            plane_id: info.plane_id,
        };
        Ok(NetDevice { index, name: info.name.clone(), properties: Arc::new(properties), rails: vec![physical] })
    }

    /// Number `index`, the fusion of `parts`. `taken` are the names that exist.
    pub fn fused(index: usize, parts: &[Arc<NetDevice>], taken: &[&str]) -> Result<NetDevice> {
        let first = parts.first().ok_or_else(|| Error::usage("makeVDevice: no devices named"))?;
        let joined = parts.iter().map(|p| p.name()).collect::<Vec<_>>().join("+");
        let mut name = joined.clone();
        let mut n = 1;
        while taken.contains(&name.as_str()) {
            n += 1;
            name = format!("{joined}#{n}");
        }
        let speed = parts.iter().fold(0i32, |sum, p| sum.saturating_add(p.properties.speed_mbps));
        let latency_us = parts.iter().fold(0f32, |most, p| most.max(p.properties.latency_us));
        let agreed = |id: fn(&Properties) -> i16| {
            let of_first = id(&first.properties);
            if parts.iter().all(|p| id(&p.properties) == of_first) { of_first } else { ID_UNDEF }
        };
        let properties = Properties {
            name: c_string(&name)?,
            ptr_support: parts.iter().fold(first.properties.ptr_support, |all, p| all & p.properties.ptr_support),
            speed_mbps: speed,
            latency_us,
            vdevs: parts.iter().map(|p| p.index).collect(),
            rail_id: agreed(|p| p.rail_id),
            plane_id: agreed(|p| p.plane_id),
            ..(*first.properties).clone()
        };
        let rails = parts.iter().flat_map(|p| p.rails.iter().cloned()).collect();
        Ok(NetDevice { index, name, properties: Arc::new(properties), rails })
    }

    /// Its number.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its properties.
    pub fn properties(&self) -> &Arc<Properties> {
        &self.properties
    }

    /// Its physical devices, in order.
    pub fn rails(&self) -> &[Arc<Physical>] {
        &self.rails
    }

    /// Its thread, if the settings want one, or who asks has to answer its peer: the first rail's.
    pub fn thread(&self, config: &Config, answers: bool) -> Result<Option<Arc<ProgressThread>>> {
        self.rails.first().map_or(Ok(None), |physical| physical.thread(config, answers))
    }

    /// Name of its fabric.
    pub fn fabric(&self) -> &'static str {
        self.rails.first().map_or("none", |p| p.info().fabric)
    }

    /// Where its handshakes listen: the first rail's address.
    pub fn addr(&self) -> SocketAddr {
        self.rails.first().map_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0)), |p| p.info().addr)
    }
}

/// Whether the settings let RDMA NICs be fused at all, before it matters which. A NIC alone is not fused with anything.
///
/// Errors: they do not.
pub fn nics_may_fuse(parts: &[Arc<NetDevice>], config: &Config) -> Result<()> {
    if config.ib_merge_nics || parts.len() < 2 || parts.iter().all(|part| part.fabric() != "verbs") {
        return Ok(());
    }
    let names = parts.iter().map(|p| p.name()).collect::<Vec<_>>().join(",");
    let variable = config.variable("RAILHEAD_IB_MERGE_NICS");
    Err(Error::usage(format!("makeVDevice: {variable}=0 keeps {names} apart; unset it, or set it to 1, to have NICs merged")))
}

/// Whether these devices may be fused, by names or because they are one NIC. NCCL fuses all NICs without a PCI path by default when
/// makeVDevice succeeds, and it does not know which of them share a bottleneck, so success has to be asked for.
///
/// Errors: why not.
pub fn may_fuse(parts: &[Arc<NetDevice>], force_merge: &str) -> Result<()> {
    if !(1..=MAX_RAILS).contains(&parts.len()) {
        return Err(Error::usage(format!("makeVDevice: {} devices; 1..={MAX_RAILS} can be merged", parts.len())));
    }
    if parts.iter().any(|p| p.properties.vdevs != [p.index]) {
        return Err(Error::usage("makeVDevice: a virtual device cannot be part of another"));
    }
    if parts.iter().enumerate().any(|(i, p)| parts.iter().take(i).any(|q| q.index == p.index)) {
        return Err(Error::usage("makeVDevice: a device is named twice"));
    }
    let named = force_merge.split(';').any(|group| {
        let names: Vec<&str> = group.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
        parts.iter().all(|part| names.iter().any(|name| matches_name(part, name)))
    });
    if parts.len() == 1 || named || one_nic(parts) {
        return Ok(());
    }
    let names = parts.iter().map(|p| p.name()).collect::<Vec<_>>().join(",");
    Err(Error::usage(format!(
        "makeVDevice: {names} are not ports of one PCI device; set NCCL_NET_FORCE_MERGE={names} to merge them all the same"
    )))
}

/// NCCL's syntax: a whole name, with the port where that matters.
fn matches_name(part: &NetDevice, name: &str) -> bool {
    match name.rsplit_once(':') {
        Some((name, port)) if port.parse() == Ok(part.properties.port) => name == part.name,
        _ => name == part.name,
    }
}

/// Whether all are functions of one PCI device: their paths differ in the function at most.
fn one_nic(parts: &[Arc<NetDevice>]) -> bool {
    let device = |part: &Arc<NetDevice>| {
        let path = part.properties.pci_path.as_ref()?.to_str().ok()?.to_owned();
        Some(path.rsplit_once('.').map_or(path.clone(), |(device, _function)| device.to_owned()))
    };
    let first = parts.first().and_then(device);
    first.is_some() && parts.iter().all(|part| device(part) == first)
}

fn speed(info: &fabric::DeviceInfo) -> i32 {
    i32::try_from(info.speed_mbps).ok().filter(|&s| s > 0).unwrap_or(10_000)
}

fn c_string(text: &str) -> Result<CString> {
    CString::new(text).map_err(|_| Error::internal(format!("{text:?} holds a NUL")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(index: usize, name: &str, pci_path: Option<&str>, rail_id: i16) -> Arc<NetDevice> {
        let properties = Properties {
            name: c_string(name).unwrap(),
            pci_path: pci_path.map(|p| c_string(p).unwrap()),
            guid: index as u64,
            ptr_support: PTR_HOST,
            reg_is_global: true,
            force_flush: false,
            speed_mbps: 1000 * (index as i32 + 1),
            port: 1,
            latency_us: index as f32,
            max_comms: MAX_COMMS,
            max_recvs: MAX_RECVS as i32,
            vdevs: vec![index],
            max_p2p_bytes: MAX_MESSAGE,
            max_coll_bytes: MAX_MESSAGE,
            rail_id,
            plane_id: ID_UNDEF,
        };
        Arc::new(NetDevice { index, name: name.into(), properties: Arc::new(properties), rails: Vec::new() })
    }

    #[test]
    fn only_named_devices_or_ports_of_one_nic_are_fused() {
        let plain = [device(0, "eth0", None, 1), device(1, "eth1", None, 1)];
        assert!(may_fuse(&plain, "").is_err());
        assert!(may_fuse(&plain, "eth0,eth2;eth1").is_err());
        assert!(may_fuse(&plain, "eth0;eth1").is_err());
        assert!(may_fuse(&plain, "eth7;eth1, eth0").is_ok());
        assert!(may_fuse(&plain, "eth0:1,eth1:1").is_ok());
        assert!(may_fuse(&plain, "eth0:2,eth1:1").is_err());
        let ports = [
            device(0, "eth0", Some("/sys/devices/pci0000:00/0000:00:05.0"), 1),
            device(1, "eth1", Some("/sys/devices/pci0000:00/0000:00:05.1"), 2),
        ];
        assert!(may_fuse(&ports, "").is_ok());
        let nics = [ports[0].clone(), device(1, "eth1", Some("/sys/devices/pci0000:00/0000:00:06.0"), 2)];
        assert!(may_fuse(&nics, "").is_err());
        assert!(may_fuse(&[ports[0].clone(), plain[1].clone()], "").is_err());
        assert!(may_fuse(&[plain[0].clone(), plain[0].clone()], "eth0").is_err());
        assert!(may_fuse(&vec![plain[0].clone(); 9], "eth0").is_err());
    }

    #[test]
    fn a_fused_device_adds_speeds_and_keeps_what_its_parts_agree_on() {
        let parts = [device(0, "a", None, 3), device(1, "b", None, 3)];
        let fused = NetDevice::fused(2, &parts, &["a", "b", "a+b"]).unwrap();
        assert_eq!((fused.name(), fused.properties.speed_mbps, fused.properties.rail_id), ("a+b#2", 3000, 3));
        assert_eq!((fused.properties.latency_us, &fused.properties.vdevs[..]), (1.0, &[0, 1][..]));
        let parts = [device(0, "a", None, 3), device(1, "b", None, 4)];
        assert_eq!(NetDevice::fused(2, &parts, &[]).unwrap().properties.rail_id, -1);
    }
}
