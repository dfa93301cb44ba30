//! Rules of the properties, for every device.

use std::ffi::c_int;

use super::{Rule, USUAL};
use crate::check::rank::Rank;
use crate::check::verdict::{Verdict, during, ensure};
use crate::plugin::{HOST, Properties};

pub const RULES: &[Rule] = &[
    Rule {
        name: "device-name",
        says: "Each device has a name of its own.",
        source: "src/graph/xml.cc ncclTopoFillNet: a device is looked up by its name; two of one name would be one",
        ranks: 1,
        run: device_name,
        ..USUAL
    },
    Rule {
        name: "device-host",
        says: "Each device takes host memory: NCCL_PTR_HOST is in ptrSupport.",
        source: "README, getProperties: ptrSupport is NCCL_PTR_HOST and whatever else; src/transport/net.cc registers host buffers without asking",
        ranks: 1,
        run: |rank| each(rank, |p| ensure(p.ptr_support & HOST != 0, || format!("ptrSupport is {:#x}", p.ptr_support))),
        ..USUAL
    },
    Rule {
        name: "device-speed",
        says: "Each device has a speed above 0, in Mbit/s.",
        source: "README, getProperties; src/graph/topo.cc ncclTopoAddNet takes 0 and less for 10 Gbit/s, whatever the device is",
        ranks: 1,
        run: |rank| each(rank, |p| ensure(p.speed > 0, || format!("speed is {}", p.speed))),
        ..USUAL
    },
    Rule {
        name: "device-comms",
        says: "Each device takes at least one comm: maxComms is above 0.",
        source: "net.h, maxComms; src/graph/topo.cc takes it as the number of channels that may use the device",
        ranks: 1,
        run: |rank| each(rank, |p| ensure(p.max_comms > 0, || format!("maxComms is {}", p.max_comms))),
        ..USUAL
    },
    Rule {
        name: "device-recvs",
        says: "Each device takes receives of at least one buffer: maxRecvs is above 0.",
        source: "README, getProperties; src/transport/net.cc groups receives by maxRecvs",
        versions: 5..=12,
        ranks: 1,
        run: |rank| each(rank, |p| ensure(p.max_recvs > 0, || format!("maxRecvs is {}", p.max_recvs))),
        ..USUAL
    },
    Rule {
        name: "device-type",
        says: "netDeviceType is NCCL_NET_DEVICE_HOST, or NCCL_NET_DEVICE_UNPACK in the version that NCCL was built with.",
        source: "src/plugin/net.cc ncclNetCheckDeviceVersion: a plugin of another type is not used",
        versions: 7..=12,
        ranks: 1,
        run: device_type,
        ..USUAL
    },
    Rule {
        name: "device-parts",
        says: "vProps lists what a device is made of: at least one device, each of them there; a physical one is made of itself.",
        source: "README, getProperties; src/graph/topo.cc looks up the properties of each device in vProps",
        versions: 9..=12,
        ranks: 1,
        run: device_parts,
        ..USUAL
    },
    Rule {
        name: "device-stable",
        says: "A device's properties are the same when asked again.",
        source: "src/graph/topo.cc, src/transport/net.cc: asked at init and at each connection, and taken for the same",
        ranks: 1,
        run: device_stable,
        ..USUAL
    },
];

/// Checks each device's properties.
fn each(rank: &mut Rank, check: impl Fn(&Properties) -> Verdict) -> Verdict {
    for dev in 0..rank.plugin.devices()? {
        rank.note("getProperties");
        let properties = rank.plugin.properties(dev)?;
        during(format_args!("device {dev}"), check(&properties))?;
    }
    Ok(())
}

fn device_name(rank: &mut Rank) -> Verdict {
    let mut names: Vec<String> = Vec::new();
    for dev in 0..rank.plugin.devices()? {
        rank.note("getProperties");
        let name = rank.plugin.properties(dev)?.name;
        ensure(!name.is_empty(), || format!("device {dev} has no name"))?;
        ensure(!names.contains(&name), || format!("device {dev} is called {name:?}, as one before it is"))?;
        names.push(name);
    }
    Ok(())
}

fn device_type(rank: &mut Rank) -> Verdict {
    /// NCCL_NET_DEVICE_HOST and NCCL_NET_DEVICE_UNPACK.
    const TYPES: [c_int; 2] = [0, 1];
    /// NCCL_NET_DEVICE_UNPACK_VERSION.
    const UNPACK_VERSION: c_int = 7;
    for dev in 0..rank.plugin.devices()? {
        rank.note("getProperties");
        let Some((kind, version)) = rank.plugin.properties(dev)?.net_device else { continue };
        let known = kind == TYPES[0] || (kind == TYPES[1] && version == UNPACK_VERSION);
        ensure(known, || format!("device {dev}: netDeviceType is {kind}, netDeviceVersion {version}"))?;
    }
    Ok(())
}

fn device_parts(rank: &mut Rank) -> Verdict {
    let devices = rank.plugin.devices()?;
    for dev in 0..devices {
        rank.note("getProperties");
        let parts = rank.plugin.properties(dev)?.vdevs.unwrap_or_default();
        let itself = parts.len() > 1 || parts == [dev];
        let there = parts.iter().all(|part| (0..devices).contains(part));
        ensure(itself && there, || format!("device {dev} of {devices} is made of {parts:?}"))?;
    }
    Ok(())
}

fn device_stable(rank: &mut Rank) -> Verdict {
    for dev in 0..rank.plugin.devices()? {
        rank.note("getProperties");
        let [first, again] = [rank.plugin.properties(dev)?, rank.plugin.properties(dev)?].map(|p| format!("{p:?}"));
        ensure(first == again, || format!("device {dev} had {first}, then {again}"))?;
    }
    Ok(())
}
