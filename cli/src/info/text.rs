//! What `info` shows, for people.

use std::fmt::Write;

use super::facts::{Device, Facts, Rdma, Setting};
use crate::stats::text::bytes;

/// Everything; of the settings those that are not at their defaults, or `all`.
pub fn page(facts: &Facts, all: bool) -> String {
    let mut out = String::new();
    plugin(&mut out, facts);
    devices(&mut out, facts);
    rdma(&mut out, &facts.rdma);
    if !facts.unusable.is_empty() {
        out += "\nNot used:\n";
        for it in &facts.unusable {
            put(&mut out, format_args!("  {} {}", it.name, it.why));
        }
    }
    let remarks = facts.host.remarks();
    if !remarks.is_empty() {
        out += "\nThis machine:\n";
        remarks.iter().for_each(|remark| put(&mut out, format_args!("  {remark}")));
    }
    if !facts.settings.is_empty() {
        settings(&mut out, facts, all);
    }
    out
}

fn put(out: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = writeln!(out, "{line}");
}

fn plugin(out: &mut String, facts: &Facts) {
    let it = &facts.plugin;
    let versions: Vec<String> = it.versions.iter().map(|v| format!("v{v}")).collect();
    put(out, format_args!("Plugin {}: {}", it.name, it.file.display()));
    put(out, format_args!("  exports {}; asked as v{}", versions.join(", "), it.version));
    for warning in &it.warnings {
        put(out, format_args!("  it warns: {warning}"));
    }
    if let Some(error) = &it.error {
        put(out, format_args!("  it fails: {error}"));
    }
}

fn devices(out: &mut String, facts: &Facts) {
    if facts.devices.is_empty() {
        out.push_str("\nNo devices: NCCL would go on to another network.\n");
        return;
    }
    out.push_str("\nDevices:\n");
    for device in &facts.devices {
        one(out, device);
    }
    if let Some(failover) = facts.failover {
        put(out, format_args!("  When one fails: {failover}"));
    }
}

fn one(out: &mut String, device: &Device) {
    let Device { device: number, name, speed_mbps, memory, port, guid, max_comms, max_recvs, .. } = device;
    put(out, format_args!("  {number}: {name}, {speed_mbps} Mbit/s, {} memory", memory.join(" and ")));
    let pci = device.pci_path.as_deref().unwrap_or("no PCI device");
    put(out, format_args!("     {pci}; guid {guid:#018x}, port {port}"));
    let longest = device.max_p2p_bytes.map_or(String::new(), |most| format!("; messages up to {}", bytes(most as u64)));
    put(out, format_args!("     up to {max_comms} comms, {max_recvs} receives in one request{longest}"));
    if let Some(parts) = device.made_of.as_ref().filter(|parts| parts.len() > 1) {
        let parts: Vec<String> = parts.iter().map(i32::to_string).collect();
        put(out, format_args!("     made of devices {}", parts.join(", ")));
    }
}

/// Each port with its addresses, and why each is taken or not.
fn rdma(out: &mut String, rdma: &Rdma) {
    if rdma.ports.is_empty() && rdma.none.is_none() {
        return;
    }
    out.push_str("\nRDMA ports:\n");
    if let Some(why) = &rdma.none {
        put(out, format_args!("  none: {why}"));
    }
    for port in &rdma.ports {
        put(out, format_args!("  {} {}", port.name, port.unused.as_deref().unwrap_or("is a device")));
        if let Some(it) = &port.link {
            let lid = if it.lid == 0 { String::new() } else { format!(", LID {}", it.lid) };
            put(
                out,
                format_args!("     {}, {}, {} Mbit/s ({}), MTU {}{lid}", it.state, it.link_layer, it.speed_mbps, it.speed_from, it.mtu),
            );
        }
        if let Some(it) = &port.used {
            let id = |id: Option<i16>| id.map_or("not said".to_string(), |id| id.to_string());
            put(out, format_args!("     rail {}, plane {} (NCCL_IB_HCA)", id(it.rail), id(it.plane)));
            for (what, came) in [
                ("relaxed ordering", &it.choices.relaxed_ordering),
                ("enhancements (ECE)", &it.choices.ece),
                ("DMA-BUF", &it.choices.dma_buf),
                ("peer memory", &it.choices.peer_memory),
            ] {
                put(out, format_args!("     {what}: {came}"));
            }
        }
        for gid in &port.gids {
            let kind = gid.kind.as_deref().unwrap_or("GID");
            let interface = gid.interface.as_ref().map_or(String::new(), |interface| format!(" on {interface}"));
            put(
                out,
                format_args!("     {} {:3} {}, {kind}{interface}: {}", if gid.chosen { '*' } else { ' ' }, gid.index, gid.gid, gid.why),
            );
        }
    }
}

fn settings(out: &mut String, facts: &Facts, all: bool) {
    let shown: Vec<&Setting> = facts.settings.iter().filter(|it| all || it.source != "default").collect();
    let rest = facts.settings.len() - shown.len();
    out.push_str("\nSettings:\n");
    let width = shown.iter().map(|it| it.name.len()).max().unwrap_or(0);
    for it in shown {
        let value = if it.value.is_empty() { "(empty)" } else { &it.value };
        let from = match (&it.rejected, it.source) {
            (Some(text), source) => format!("default: {source}={text} is not accepted ({})", it.accepted),
            (None, "default") => "default".into(),
            (None, source) if source == it.name => "environment".into(),
            (None, source) => format!("environment, as {source}"),
        };
        put(out, format_args!("  {:width$} = {value}  [{from}]", it.name));
    }
    if rest > 0 {
        put(out, format_args!("  {rest} more at their defaults (--all shows them)"));
    }
    for it in &facts.unknown {
        let hint = it.nearest.map_or(String::new(), |nearest| format!("; {nearest} is meant?"));
        put(out, format_args!("  {} is no setting{hint}", it.name));
    }
}
