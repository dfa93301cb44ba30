//! The ports of this machine's NICs: which can be used, with what, and why not the others. Called once per listing of the devices, on the
//! thread that initialises.

use std::ffi::CStr;
use std::fs;
use std::net::SocketAddr;
use std::sync::Arc;

use ibverbs_sys::*;

use super::attributes::{self, Attributes};
use super::context::{self, Context};
use super::filter::{self, Filter};
use super::gid::{self, Entry, Forced, Gid, GidKind, Judged, Range, Wanted};
use super::library::{Library, check, made};
use crate::base::config::Config;
use crate::base::error::Result;
use crate::base::log::{self, log_warn};
use crate::fabric::types::DeviceInfo;

/// Ports at most: NCCL's MAX_IB_DEVS (nccl 2.28 src/transport/net_ib).
const MAX_PORTS: usize = 32;
/// GIDs that are looked at: as many as the index in an address vector can name.
const MAX_GIDS: u32 = 256;
/// `IBV_QPF_GRH_REQUIRED` of a port's flags (rdma-core 44 libibverbs/verbs.h).
const GRH_REQUIRED: u8 = 1;

/// A port that can be used.
pub struct Port {
    /// Its device.
    pub context: Arc<Context>,
    /// Number on the device, from 1.
    pub number: u8,
    /// Device and number, for messages.
    pub label: String,
    /// `IBV_LINK_LAYER_*`.
    pub link_layer: u8,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// Whether every packet needs a global header, even within the subnet.
    pub global: bool,
    /// As `enum ibv_mtu` numbers it.
    pub mtu: ibv_mtu,
    /// Index of the GID in the port's table.
    pub gid_index: u8,
    /// The GID.
    pub gid: Gid,
    /// What became of each GID of the table.
    pub gids: Vec<Judged>,
    /// What it said when it was listed.
    pub attributes: Attributes,
    /// Properties.
    pub info: DeviceInfo,
    /// The settings.
    pub config: Arc<Config>,
}

impl Port {
    /// Index of the GID in the port's table now: an address that was removed and came back has another one while queue pairs have the first (Linux
    /// drivers/infiniband/core/cache.c). The first one, if it is not there.
    pub fn gid_index_now(&self) -> u8 {
        let Some(chosen) = self.gids.iter().find(|gid| gid.chosen).map(|gid| &gid.entry) else { return self.gid_index };
        let is_it = |index: &u32| {
            entry(&self.context, self.number, *index)
                .is_some_and(|it| it.gid == chosen.gid && it.kind == chosen.kind && it.netdev == chosen.netdev)
        };
        let first = u32::from(self.gid_index);
        std::iter::once(first).chain(0..MAX_GIDS).find(is_it).map_or(self.gid_index, |index| index as u8)
    }
}

/// A port that cannot be used.
#[derive(Debug, Clone)]
pub struct Rejected {
    /// Device and number.
    pub label: String,
    /// Why, to be read after the label.
    pub why: String,
    /// What it says of itself, if it was asked.
    pub attributes: Option<Attributes>,
    /// What became of each GID, if it came to that.
    pub gids: Vec<Judged>,
}

impl Rejected {
    fn unasked(label: String, why: String) -> Rejected {
        Rejected { label, why, attributes: None, gids: Vec::new() }
    }
}

/// What became of every port of the machine.
#[derive(Default)]
pub struct Listing {
    /// Usable ones, by PCI path (those without last), then name.
    pub ports: Vec<Arc<Port>>,
    /// The others.
    pub rejected: Vec<Rejected>,
}

/// Lists the ports. `addr` is where their handshakes listen.
pub fn list(library: &'static Library, config: &Arc<Config>, addr: SocketAddr) -> Result<Listing> {
    let mut listing = Listing::default();
    if let Some(complaint) = filter::complaint(&config.ib_hca) {
        log_warn!(log::NET, "{complaint}");
    }
    let mut count = 0;
    // SAFETY: the place outlives the call.
    let devices = unsafe { (library.get_device_list)(&mut count) };
    let Ok(devices) = made(devices) else {
        // ENOSYS: a kernel without RDMA. There is nothing to list either way.
        return Ok(listing);
    };
    for i in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` entries and is alive until it is freed below.
        let device = unsafe { *devices.add(i) };
        // SAFETY: a device of the list; its name is a string inside it.
        let name = unsafe { CStr::from_ptr((library.get_device_name)(device)) }.to_string_lossy().into_owned();
        match context::open(library, device, &name) {
            Ok((context, attr)) => ports(&Arc::new(context), &attr, config, addr, &mut listing),
            Err(e) => listing.rejected.push(Rejected::unasked(name, format!("cannot be opened: {e}"))),
        }
    }
    // SAFETY: made by get_device_list, freed once. Open devices stay valid.
    unsafe { (library.free_device_list)(devices) };
    listing.ports.sort_by_key(|port| (port.info.pci_path.is_none(), port.info.pci_path.clone(), port.info.name.clone(), port.number));
    tell_ports_apart(&mut listing.ports);
    for extra in listing.ports.drain(MAX_PORTS.min(listing.ports.len())..) {
        listing.rejected.push(Rejected::unasked(extra.label.clone(), format!("is one of more than {MAX_PORTS} ports")));
    }
    Ok(listing)
}

/// Functions of one card all call their port 1: as NCCL does, a port is counted behind those of the functions before it.
fn tell_ports_apart(ports: &mut [Arc<Port>]) {
    for at in 1..ports.len() {
        let (before, rest) = ports.split_at_mut(at);
        let Some(port) = rest.first_mut().and_then(Arc::get_mut) else { continue };
        let path = &port.info.pci_path;
        let others = before.iter().filter(|it| path.is_some() && it.info.pci_path == *path && it.context.name != port.context.name);
        port.info.port += others.count() as u16;
    }
}

/// Judges the ports of a device.
fn ports(context: &Arc<Context>, attr: &ibv_device_attr, config: &Arc<Config>, addr: SocketAddr, listing: &mut Listing) {
    let filter = Filter::parse(&config.ib_hca);
    let many = attr.phys_port_cnt > 1;
    for number in 1..=attr.phys_port_cnt {
        let label = format!("{}:{number}", context.name);
        let (mut gids, mut attributes) = (Vec::new(), None);
        let why = if let Some(at) = filter.admits(&context.name, u32::from(number)) {
            match judge(context, number, config, &mut attributes, &mut gids) {
                Ok((port, attributes, chosen)) => {
                    let info = attributes::describe(context, attr, (number, many), &attributes, at, config, addr);
                    listing.ports.push(Arc::new(Port {
                        context: context.clone(),
                        number,
                        label,
                        link_layer: port.link_layer,
                        lid: port.lid,
                        global: port.link_layer == IBV_LINK_LAYER_ETHERNET as u8 || port.flags & GRH_REQUIRED != 0,
                        mtu: port.active_mtu,
                        gid_index: chosen.index as u8,
                        gid: chosen.gid,
                        gids,
                        attributes,
                        info,
                        config: config.clone(),
                    }));
                    continue;
                }
                Err(why) => why,
            }
        } else {
            format!("is left out by NCCL_IB_HCA={}", config.ib_hca)
        };
        listing.rejected.push(Rejected { label, why, attributes, gids });
    }
}

/// The port's attributes and its GID, or why it cannot be used.
fn judge(
    context: &Context,
    number: u8,
    config: &Config,
    said: &mut Option<Attributes>,
    gids: &mut Vec<Judged>,
) -> std::result::Result<(ibv_port_attr, Attributes, Entry), String> {
    let mut port = ibv_port_attr::default();
    // SAFETY: the device is open; the place outlives the call.
    check(unsafe { (context.library.query_port)(context.raw, number, &mut port) }).map_err(|e| format!("cannot be queried: {e}"))?;
    let attributes = said.insert(attributes::attributes(context, number, &port, config)).clone();
    if port.state != ibv_port_state::IBV_PORT_ACTIVE {
        return Err(format!("is not active ({}): no cable, or its link is down", attributes::state_name(port.state)));
    }
    if !(1..=5).contains(&port.active_mtu) {
        return Err(format!("has MTU code {}, which means nothing here", port.active_mtu));
    }
    let ethernet = match u32::from(port.link_layer) {
        IBV_LINK_LAYER_ETHERNET => true,
        // Old drivers say nothing and mean InfiniBand.
        IBV_LINK_LAYER_INFINIBAND | IBV_LINK_LAYER_UNSPECIFIED => false,
        other => return Err(format!("has link layer {other}, which is neither InfiniBand nor Ethernet")),
    };
    let length = u32::try_from(port.gid_tbl_len).unwrap_or(0).min(MAX_GIDS);
    let table: Vec<Entry> = (0..length).filter_map(|index| entry(context, number, index)).collect();
    let wanted = Wanted {
        forced: forced(&table, ethernet, config),
        version: config.ib_roce_version,
        family: config.ib_addr_family,
        range: Range::parse(&config.ib_addr_range),
    };
    *gids = gid::choose(table, &wanted);
    let chosen = gids.iter().find(|gid| gid.chosen).map(|gid| gid.entry.clone());
    chosen.map(|chosen| (port, attributes, chosen)).ok_or_else(|| match config.ib_gid_index {
        index @ 0.. => format!("has no GID {index}, which NCCL_IB_GID_INDEX names"),
        _ if !ethernet => "has no GID 0, which is an InfiniBand port's own".into(),
        _ if config.ib_addr_range.is_empty() => "has no GID but link-local ones: its interface has no IP address".into(),
        _ => format!("has no GID within NCCL_IB_ADDR_RANGE={}", config.ib_addr_range),
    })
}

/// The index that is not up for choice.
fn forced(table: &[Entry], ethernet: bool, config: &Config) -> Option<Forced> {
    if let Ok(index) = u32::try_from(config.ib_gid_index) {
        return Some(Forced { index, why: format!("NCCL_IB_GID_INDEX is {index}") });
    }
    if ethernet {
        return None;
    }
    let index = config.ib_flid_gid_index;
    if let Some(flid) = table.iter().find(|entry| entry.index == index).and_then(|entry| entry.gid.flid()) {
        return Some(Forced { index, why: format!("NCCL_IB_ROUTABLE_FLID_GID_INDEX is {index}, which has FLID {flid}") });
    }
    Some(Forced { index: 0, why: "an InfiniBand port's own is index 0".into() })
}

/// An entry of the GID table that is not empty. One that cannot be read (EINVAL of some drivers) is empty.
fn entry(context: &Context, number: u8, index: u32) -> Option<Entry> {
    let mut raw = ibv_gid { raw: [0; 16] };
    // SAFETY: the device is open; the place outlives the call.
    check(unsafe { (context.library.query_gid)(context.raw, number, index as i32, &mut raw) }).ok()?;
    // SAFETY: every pattern of 16 bytes is one.
    let gid = Gid(unsafe { raw.raw });
    if gid == Gid::default() {
        return None;
    }
    let attrs = context.sysfs.join("ports").join(number.to_string()).join("gid_attrs");
    let read = |what: &str| fs::read_to_string(attrs.join(what).join(index.to_string())).ok().map(|text| text.trim().to_owned());
    let kind = read("types").and_then(|kind| match kind.as_str() {
        "RoCE v2" => Some(GidKind::V2),
        "IB/RoCE v1" => Some(GidKind::V1),
        _ => None,
    });
    Some(Entry { index, gid, kind, netdev: read("ndevs") })
}
