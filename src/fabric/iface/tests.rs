//! Each rule of interface choice, over made-up machines.

use super::*;

const UP: u32 = (libc::IFF_UP | libc::IFF_RUNNING) as u32;

fn link(name: &str, addrs: &[&str]) -> FoundInterface {
    FoundInterface {
        name: name.to_string(),
        flags: UP | if name == "lo" { libc::IFF_LOOPBACK as u32 } else { 0 },
        addrs: addrs.iter().map(|a| SocketAddr::new(a.parse().unwrap(), 0)).collect(),
        ..FoundInterface::default()
    }
}

fn machine() -> Vec<FoundInterface> {
    vec![
        link("lo", &["127.0.0.1", "::1"]),
        link("docker0", &["172.17.0.1"]),
        link("virbr0", &["192.168.122.1"]),
        link("veth12ab", &["169.254.1.1"]),
        link("eth1", &["10.0.0.2", "fd00::2", "fe80::2"]),
        link("eth0", &["10.0.0.1", "fe80::1"]),
        link("ens5", &["fe80::5"]),
    ]
}

fn names(listing: &Listing) -> Vec<&str> {
    listing.interfaces.iter().map(|i| i.name.as_str()).collect()
}

fn select(found: Vec<FoundInterface>, ifname: &str, family: Family) -> Result<Listing> {
    super::select(found, &Config { socket_ifname: ifname.into(), socket_family: family, ..Config::default() })
}

fn chosen(found: Vec<FoundInterface>, ifname: &str, family: Family) -> Vec<String> {
    names(&select(found, ifname, family).unwrap()).into_iter().map(str::to_string).collect()
}

#[test]
fn by_default_only_proper_interfaces_are_used_and_the_others_have_a_reason() {
    let listing = select(machine(), "", Family::Any).unwrap();
    assert_eq!(names(&listing), ["eth0", "eth1"]);
    assert_eq!(listing.excluded.len(), 5);
    assert!(listing.excluded_line().contains("ens5 has only a link-local IPv6 address"));
    assert!(listing.excluded_line().contains("docker0 is a docker* interface"));
}

#[test]
fn second_choices_are_used_when_alone_in_nccls_order() {
    let mut left = machine();
    for expected in ["eth", "veth", "ens5", "docker0", "lo", "virbr0"] {
        let got = chosen(left.clone(), "", Family::Any);
        assert!(!got.is_empty() && got.iter().all(|name| name.starts_with(expected)), "{got:?} instead of {expected}");
        left.retain(|link| !got.contains(&link.name));
    }
    assert!(left.is_empty());
    assert!(chosen(left, "", Family::Any).is_empty());
}

#[test]
fn ib_interfaces_are_used_alone() {
    let mut found = machine();
    found.push(link("ib0", &["10.1.0.1"]));
    assert_eq!(chosen(found, "", Family::Any), ["ib0"]);
}

#[test]
fn the_setting_has_nccls_syntax() {
    let c = |ifname| chosen(machine(), ifname, Family::Any);
    assert_eq!(c("eth"), ["eth0", "eth1"]);
    assert_eq!(c("=eth1"), ["eth1"]);
    assert_eq!(c("eth1,docker"), ["docker0", "eth1"]);
    assert_eq!(c(" =lo , eth0 "), ["eth0", "lo"]);
    assert_eq!(c("^eth0"), ["eth1"]);
    assert_eq!(c("^=eth"), ["eth0", "eth1"]);
    assert_eq!(c("^eth,ens"), ["veth12ab"]);
    assert_eq!(c("ens"), ["ens5"]);
    assert_eq!(c("^"), ["eth0", "eth1"]);
    assert_eq!(c("="), ["eth0", "eth1"]);
    assert_eq!(c("eth0,nosuch"), ["eth0"]);
}

#[test]
fn asking_for_what_is_not_there_is_an_error_that_says_what_is() {
    for ifname in ["=eth", "wlan", "=eth00,wlan0"] {
        let error = select(machine(), ifname, Family::Any).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::Usage(_)) && text.contains(ifname) && text.contains("eth0") && text.contains("virbr0"), "{text}");
    }
}

#[test]
fn the_variable_that_was_set_is_named() {
    let settings = Config { socket_ifname: "wlan".into(), socket_family: Family::Inet, ..Config::default() };
    let aliases = vec!["NCCL_SOCKET_FAMILY", "NCCL_SOCKET_IFNAME"];
    for (aliases, prefix) in [(vec![], "RAILHEAD"), (aliases, "NCCL")] {
        let settings = Config { aliases, ..settings.clone() };
        let refused = super::select(machine(), &settings).unwrap_err().to_string();
        assert!(refused.starts_with(&format!("{prefix}_SOCKET_IFNAME is \"wlan\", which matches none")), "{refused}");
        let listing = super::select(machine(), &Config { socket_ifname: "ens".into(), ..settings }).unwrap();
        let why = format!("ens5 has no IPv4 address, and {prefix}_SOCKET_FAMILY asks for one");
        assert!(listing.excluded_line().contains(&why), "{}", listing.excluded_line());
    }
}

#[test]
fn an_asked_for_interface_must_still_run() {
    let mut found = machine();
    found[5].flags = libc::IFF_UP as u32;
    found[4].flags = 0;
    let listing = select(found, "eth", Family::Any).unwrap();
    assert!(listing.interfaces.is_empty());
    assert!(listing.excluded_line().contains("eth0 is up but has no carrier"));
    assert!(listing.excluded_line().contains("eth1 is down"));
}

#[test]
fn the_family_decides_the_address() {
    let addr = |ifname, family| select(machine(), ifname, family).unwrap().interfaces.first().map(|i| i.addr.ip().to_string());
    assert_eq!(addr("=eth1", Family::Any).as_deref(), Some("10.0.0.2"));
    assert_eq!(addr("=eth1", Family::Inet6).as_deref(), Some("fd00::2"));
    assert_eq!(addr("=ens5", Family::Any).as_deref(), Some("fe80::5"));
    assert_eq!(addr("=ens5", Family::Inet), None);
    assert_eq!(addr("lo", Family::Inet6).as_deref(), Some("::1"));
    assert_eq!(chosen(machine(), "", Family::Inet6), ["eth1"]);
}

#[test]
fn the_order_is_by_pci_path_then_name_and_sixteen_are_used() {
    let mut found: Vec<FoundInterface> = (0..20).map(|i| link(&format!("eth{i:02}"), &["10.0.0.1"])).collect();
    found[19].pci_path = Some("/sys/devices/pci0000:00/0000:00:03.0".into());
    found[18].pci_path = Some("/sys/devices/pci0000:00/0000:00:02.0".into());
    let listing = select(found, "", Family::Any).unwrap();
    assert_eq!(listing.interfaces.len(), MAX_INTERFACES);
    assert_eq!(names(&listing)[..3], ["eth18", "eth19", "eth00"]);
    assert_eq!(listing.excluded.len(), 4);
}

#[test]
fn guid_and_port_together_are_unique() {
    let mut found: Vec<FoundInterface> = ["a", "b", "c", "d"].iter().map(|n| link(n, &["10.0.0.1"])).collect();
    for (i, link) in found.iter_mut().take(2).enumerate() {
        link.pci_path = Some("/sys/devices/pci0000:00/0000:00:02.0".into());
        link.hardware = Some(100 + i as u64);
        link.dev_port = i as u16;
    }
    // A VLAN on the first NIC: same hardware address, no device of its own.
    found[2].hardware = Some(100);
    let got: Vec<(u64, u16)> = select(found, "", Family::Any).unwrap().interfaces.iter().map(|i| (i.guid, i.port)).collect();
    assert_eq!(got, [(100, 1), (100, 2), (100, 3), (name_hash("d"), 1)]);
}

#[test]
fn unknown_speeds_become_the_default() {
    for (speed, expected) in
        [(None, 10_000), (Some(-1), 10_000), (Some(0), 10_000), (Some(25_000), 25_000), (Some(i64::from(u32::MAX)), 10_000)]
    {
        let found = vec![FoundInterface { speed, ..link("eth0", &["10.0.0.1"]) }];
        assert_eq!(select(found, "", Family::Any).unwrap().interfaces[0].speed_mbps, expected);
    }
}

#[test]
fn a_pci_device_is_found_above_a_virtio_or_usb_one() {
    let pci = |path: &str| pci_device(Path::new(path));
    assert_eq!(pci("/sys/devices/pci0000:00/0000:00:03.0/virtio2").as_deref(), Some("/sys/devices/pci0000:00/0000:00:03.0"));
    assert_eq!(
        pci("/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.1").as_deref(),
        Some("/sys/devices/pci0000:16/0000:16:02.0/0000:17:00.1")
    );
    assert_eq!(pci("/sys/devices/pci0000:00/0000:00:14.0/usb1/1-1/1-1:1.0").as_deref(), Some("/sys/devices/pci0000:00/0000:00:14.0"));
    assert_eq!(pci("/sys/devices/platform/soc/fec0"), None);
    assert!(
        is_pci_address("10000:e1:00.0")
            && !is_pci_address("pci0000:00")
            && !is_pci_address("0000:00:03")
            && !is_pci_address("0000.00.03:0")
    );
}

#[test]
fn hardware_addresses_are_read_in_full_or_not_at_all() {
    assert_eq!(hardware("02:fc:00:00:00:01"), Some(0x02fc_0000_0001));
    assert_eq!(hardware("80:00:02:08:fe:80:00:00:00:00:00:00:0c:42:a1:03:00:5d:fd:d4"), Some(0x0c42_a103_005d_fdd4));
    assert_eq!(hardware("00:00:00:00:00:00"), None);
    assert_eq!(hardware(""), None);
    assert_eq!(hardware("02:zz"), None);
}

#[test]
fn this_machine_can_be_read() {
    let found = find().unwrap();
    assert!(found.iter().any(|link| link.flags & libc::IFF_LOOPBACK as u32 != 0), "no loopback interface among {found:?}");
    let names: std::collections::HashSet<&str> = found.iter().map(|link| link.name.as_str()).collect();
    assert_eq!(names.len(), found.len(), "an interface is listed twice");
}
