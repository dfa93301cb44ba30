//! What `info` shows, gathered: from the plugin through its own interface, from this machine, and from the environment.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::bail;
use railhead::base::config::{Effective, Fabric, Source};
use railhead::fabric::iface;
use railhead::fabric::verbs::attributes::Attributes;
use railhead::fabric::verbs::gid::Judged;
use railhead::fabric::verbs::{self, Choices};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use super::host::{self, Host};
use crate::plugin::{Plugin, Properties, take_log};
use crate::stats::processes::printable;

/// What our own plugin calls itself.
const OURS: &str = "Railhead";
const FILE: &str = "librailhead.so";

/// Everything.
#[derive(Debug, Serialize)]
pub struct Facts {
    /// The plugin.
    pub plugin: About,
    /// Its devices.
    pub devices: Vec<Device>,
    /// What becomes of a comm whose NIC or network fails; of our own plugin only.
    pub failover: Option<&'static str>,
    /// What is there and not used; of our own plugin only.
    pub unusable: Vec<Unusable>,
    /// RDMA NICs, if any are looked for; of our own plugin only.
    pub rdma: Rdma,
    /// The machine.
    pub host: Host,
    /// Settings of this release, by the table's order; of our own plugin only.
    pub settings: Vec<Setting>,
    /// Variables that are called like settings, and are none.
    pub unknown: Vec<Unknown>,
}

/// The plugin.
#[derive(Debug, Serialize)]
pub struct About {
    /// Where it was found.
    pub file: PathBuf,
    /// What it calls itself.
    pub name: String,
    /// Versions of the interface that it has.
    pub versions: Vec<u32>,
    /// The one that was asked.
    pub version: u32,
    /// Why it has no devices to show, if a call failed.
    pub error: Option<String>,
    /// What it had to say meanwhile, at WARN.
    pub warnings: Vec<String>,
}

/// A device.
#[derive(Debug, Serialize)]
pub struct Device {
    /// Its number.
    pub device: i32,
    /// Its name.
    pub name: String,
    /// Where it is in /sys.
    pub pci_path: Option<String>,
    /// Unique per NIC.
    pub guid: u64,
    /// On the NIC.
    pub port: i32,
    /// Mbit/s.
    pub speed_mbps: i32,
    /// Kinds of memory: "host", "cuda", "dma-buf".
    pub memory: Vec<&'static str>,
    /// Comms at most.
    pub max_comms: i32,
    /// Buffers of one receive at most.
    pub max_recvs: i32,
    /// Longest message, where the version says so.
    pub max_p2p_bytes: Option<usize>,
    /// The devices that it is made of, where the version says so.
    pub made_of: Option<Vec<i32>>,
}

/// The machine's RDMA NICs.
#[derive(Debug, Default, Serialize)]
pub struct Rdma {
    /// Why they could not be looked at.
    pub none: Option<String>,
    /// Their ports.
    pub ports: Vec<RdmaPort>,
}

/// A port of an RDMA NIC.
#[derive(Debug, Serialize)]
pub struct RdmaPort {
    /// Device and number.
    pub name: String,
    /// Why it is not used, to be read after the name.
    pub unused: Option<String>,
    /// What it says of itself, if it was asked.
    #[serde(serialize_with = "link")]
    pub link: Option<Attributes>,
    /// What is made of it; of a port that is used only.
    #[serde(serialize_with = "used")]
    pub used: Option<Used>,
    /// Its addresses.
    pub gids: Vec<Gid>,
}

/// What is made of a port.
#[derive(Debug)]
pub struct Used {
    /// Of NCCL_IB_HCA.
    pub rail: Option<i16>,
    /// Of NCCL_IB_HCA.
    pub plane: Option<i16>,
    /// What came of each wish.
    pub choices: Choices,
}

/// An address of a port.
#[derive(Debug, Serialize)]
pub struct Gid {
    /// Place in the port's table.
    pub index: u32,
    /// The address, as IPv6.
    pub gid: String,
    /// RoCE version.
    pub kind: Option<String>,
    /// Network interface that it comes from.
    pub interface: Option<String>,
    /// Whether it is the one.
    pub chosen: bool,
    /// Why, or why not.
    pub why: String,
}

/// What is there and not used.
#[derive(Debug, Serialize)]
pub struct Unusable {
    /// What.
    pub name: String,
    /// Why, to be read after the name.
    pub why: String,
}

/// A setting.
#[derive(Debug, Serialize)]
pub struct Setting {
    /// Our name for it.
    pub name: &'static str,
    /// NCCL's.
    pub alias: Option<&'static str>,
    /// In force.
    pub value: String,
    /// "default", or the variable.
    pub source: &'static str,
    /// What the variable holds, if that is not accepted.
    pub rejected: Option<String>,
    /// What would be in force otherwise.
    pub default: String,
    /// What is accepted.
    pub accepted: String,
    /// What it does.
    pub meaning: &'static str,
}

/// A variable that is nobody's.
#[derive(Debug, Serialize)]
pub struct Unknown {
    /// Its name.
    pub name: String,
    /// The setting that is called most alike.
    pub nearest: Option<&'static str>,
}

/// Asks everybody.
///
/// Errors: no such plugin.
pub fn gather(file: Option<&Path>) -> anyhow::Result<Facts> {
    let file = file.map_or_else(find, given);
    let versions = Plugin::versions(&file)?;
    let Some(&version) = versions.last() else { bail!("{} exports no version of NCCL's interface", file.display()) };
    let mut plugin = Plugin::load(&file, Some(version))?;
    let name = printable(&plugin.name());
    let (devices, error) = match devices(&mut plugin) {
        Ok(devices) => (devices, None),
        Err(failure) => (Vec::new(), Some(failure.to_string())),
    };
    let warnings = take_log().into_iter().filter(|line| line.level == 2).map(|line| printable(&line.text)).collect();
    let about = About { file, versions, version, error, warnings, name };
    let mut facts = Facts {
        plugin: about,
        devices,
        failover: None,
        unusable: Vec::new(),
        rdma: Rdma::default(),
        host: host::look(),
        settings: Vec::new(),
        unknown: Vec::new(),
    };
    if facts.plugin.name == OURS {
        let effective = Effective::read();
        facts.failover = Some(failover(&effective, facts.devices.len()));
        facts.unusable = unusable(&effective);
        facts.rdma = rdma(&effective);
        // Ports fail over the same setting as interfaces do; once is enough.
        facts.rdma.none.take_if(|none| facts.unusable.iter().any(|it| it.why.ends_with(&**none)));
        facts.unknown = effective.unknown.iter().map(|u| Unknown { name: printable(&u.name), nearest: u.nearest }).collect();
        facts.settings = effective.settings.into_iter().map(setting).collect();
    }
    Ok(facts)
}

/// Our own library: as installed, as built, or by the loader.
fn find() -> PathBuf {
    let program = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_path_buf));
    let places = program.iter().flat_map(|dir| [dir.join(FILE), dir.join("../lib").join(FILE)]);
    places.into_iter().find(|place| place.is_file()).unwrap_or_else(|| FILE.into())
}

/// A file that is there is meant, even where its name alone would have the loader search its own places.
fn given(file: &Path) -> PathBuf {
    let here = std::path::absolute(file).ok().filter(|here| here.exists());
    here.unwrap_or_else(|| file.into())
}

fn devices(plugin: &mut Plugin) -> crate::plugin::Result<Vec<Device>> {
    plugin.init()?;
    let devices = plugin.devices().and_then(|n| (0..n).map(|i| plugin.properties(i).map(|p| device(i, p))).collect());
    // It has served; what it says about its end changes nothing.
    let _ = plugin.finalize();
    devices
}

fn device(number: i32, p: Properties) -> Device {
    let kinds = [(1, "host"), (2, "cuda"), (4, "dma-buf")];
    Device {
        device: number,
        name: printable(&p.name),
        pci_path: p.pci_path.map(|path| printable(&path)),
        guid: p.guid,
        port: p.port,
        speed_mbps: p.speed,
        memory: kinds.into_iter().filter(|(bit, _)| p.ptr_support & bit != 0).map(|(_, kind)| kind).collect(),
        max_comms: p.max_comms,
        max_recvs: p.max_recvs,
        max_p2p_bytes: p.max_p2p_bytes,
        made_of: p.vdevs,
    }
}

/// What becomes of a comm when a device or its network fails.
fn failover(effective: &Effective, devices: usize) -> &'static str {
    match (effective.config.failover, devices) {
        (false, _) => "a comm ends with the first of its rails that fails (RAILHEAD_FAILOVER=0)",
        (true, 0 | 1) => "a comm ends with its only rail: there is no second device",
        (true, _) => {
            "a comm over several devices goes on without one that fails, and for a while without any; one over a single device ends with it"
        }
    }
}

/// Interfaces that are passed over, and NICs that no provider may drive.
fn unusable(effective: &Effective) -> Vec<Unusable> {
    let mut all: Vec<Unusable> = match iface::list(&effective.config) {
        Ok(listing) => listing.excluded.into_iter().map(|e| Unusable { name: e.name, why: e.why }).collect(),
        Err(error) => vec![Unusable { name: "every interface".into(), why: format!("is passed over: {error}") }],
    };
    if effective.config.fabric == Fabric::Soft {
        all.extend(host::rdma_devices().into_iter().map(|name| Unusable { name, why: "is left alone by RAILHEAD_FABRIC=soft".into() }));
    }
    all
}

/// Ports of RDMA NICs, and why there are none to look at.
fn rdma(effective: &Effective) -> Rdma {
    if effective.config.fabric == Fabric::Soft {
        return Rdma::default();
    }
    let gids = |judged: &[Judged]| -> Vec<Gid> {
        let one = |it: &Judged| Gid {
            index: it.entry.index,
            gid: it.entry.gid.to_string(),
            kind: it.entry.kind.map(|kind| kind.to_string()),
            interface: it.entry.netdev.clone(),
            chosen: it.chosen,
            why: it.why.clone(),
        };
        judged.iter().map(one).collect()
    };
    let told = |id: i16| (id >= 0).then_some(id);
    match verbs::listing(&Arc::new(effective.config.clone())) {
        Ok(Ok(listing)) => {
            let used = listing.ports.iter().map(|port| RdmaPort {
                name: port.label.clone(),
                unused: None,
                link: Some(port.attributes.clone()),
                used: Some(Used { rail: told(port.info.rail_id), plane: told(port.info.plane_id), choices: verbs::choices(port) }),
                gids: gids(&port.gids),
            });
            let unused = listing.rejected.iter().map(|port| RdmaPort {
                name: port.label.clone(),
                unused: Some(port.why.clone()),
                link: port.attributes.clone(),
                used: None,
                gids: gids(&port.gids),
            });
            Rdma { none: None, ports: used.chain(unused).collect() }
        }
        // Without a NIC nobody asks why.
        Ok(Err(why)) if effective.config.fabric == Fabric::Verbs || !host::rdma_devices().is_empty() => {
            Rdma { none: Some(why), ports: Vec::new() }
        }
        Ok(Err(_)) => Rdma::default(),
        Err(error) => Rdma { none: Some(error.to_string()), ports: Vec::new() },
    }
}

/// `lid` is null where there is none, as on Ethernet.
fn link<S: Serializer>(said: &Option<Attributes>, to: S) -> Result<S::Ok, S::Error> {
    let Some(Attributes { state, link_layer, speed_mbps, speed_from, mtu, lid }) = said else { return to.serialize_none() };
    let mut map = to.serialize_struct("Link", 6)?;
    map.serialize_field("state", state)?;
    map.serialize_field("layer", link_layer)?;
    map.serialize_field("speed_mbps", speed_mbps)?;
    map.serialize_field("speed_from", speed_from)?;
    map.serialize_field("mtu", mtu)?;
    map.serialize_field("lid", &Some(*lid).filter(|&lid| lid != 0))?;
    map.end()
}

fn used<S: Serializer>(used: &Option<Used>, to: S) -> Result<S::Ok, S::Error> {
    let Some(Used { rail, plane, choices }) = used else { return to.serialize_none() };
    let Choices { relaxed_ordering, ece, dma_buf, peer_memory } = choices;
    let mut map = to.serialize_struct("Used", 6)?;
    map.serialize_field("rail", rail)?;
    map.serialize_field("plane", plane)?;
    map.serialize_field("relaxed_ordering", relaxed_ordering)?;
    map.serialize_field("ece", ece)?;
    map.serialize_field("dma_buf", dma_buf)?;
    map.serialize_field("peer_memory", peer_memory)?;
    map.end()
}

fn setting(setting: railhead::base::config::Setting) -> Setting {
    let (source, rejected) = match setting.source {
        Source::Default => ("default", None),
        Source::Variable(name) => (name, None),
        Source::Rejected(name, text) => (name, Some(printable(&text))),
    };
    Setting {
        name: setting.name,
        alias: setting.alias,
        value: printable(&setting.value),
        source,
        rejected,
        default: setting.default,
        accepted: setting.accepted,
        meaning: setting.doc,
    }
}
