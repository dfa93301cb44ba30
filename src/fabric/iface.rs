//! Which network interfaces are used: NCCL's rules over a description of the machine. Each becomes a device of the software fabric; NICs take the
//! first one's address for their handshakes. Called once per listing of the devices, on the thread that initialises.
//!
//! [`select`] is a pure function over [`FoundInterface`]s, so that every rule is tested without the machine; [`find`] reads the machine.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::path::{Path, PathBuf};
use std::{fs, ptr};

use crate::base::config::{Config, Family};
use crate::base::error::{Error, Result};

/// Interfaces at most: NCCL's MAX_IFS (nccl 2.27 src/include/socket.h).
pub const MAX_INTERFACES: usize = 16;
/// Speed where the system does not know it, in Mbit/s: NCCL's default (nccl 2.27 src/transport/net_socket.cc).
const DEFAULT_SPEED_MBPS: u32 = 10_000;
/// Ethernet's, where the system does not say.
const DEFAULT_MTU: u32 = 1500;
const SYSFS: &str = "/sys/class/net";

/// An interface of the machine, as found.
#[derive(Debug, Clone, Default)]
pub struct FoundInterface {
    /// Name.
    pub name: String,
    /// IFF_* flags.
    pub flags: u32,
    /// Addresses, in the system's order; the port is 0.
    pub addrs: Vec<SocketAddr>,
    /// Mbit/s as sysfs has it: absent or not positive if unknown.
    pub speed: Option<i64>,
    /// Bytes.
    pub mtu: Option<u32>,
    /// Real path of the PCI device.
    pub pci_path: Option<String>,
    /// Last 8 bytes of the hardware address, or all of it if shorter; absent if there is none or it is zero.
    pub hardware: Option<u64>,
    /// Which port of its device, from 0.
    pub dev_port: u16,
}

/// An interface to make a device of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// Name.
    pub name: String,
    /// The one address to listen on and to dial from; port 0.
    pub addr: SocketAddr,
    /// Mbit/s.
    pub speed_mbps: u32,
    /// Bytes.
    pub mtu: u32,
    /// Real path of the PCI device, if it is one.
    pub pci_path: Option<String>,
    /// The same for interfaces that share a NIC; no two interfaces share guid and port.
    pub guid: u64,
    /// From 1.
    pub port: u16,
}

/// An interface that was passed over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Excluded {
    /// Name.
    pub name: String,
    /// Why, to be read after the name.
    pub why: String,
}

/// What became of every interface of the machine.
#[derive(Debug, Clone, Default)]
pub struct Listing {
    /// Usable ones, by PCI path (those without last), then name.
    pub interfaces: Vec<Interface>,
    /// The others.
    pub excluded: Vec<Excluded>,
}

impl Listing {
    /// The exclusions in one line, for a log.
    pub fn excluded_line(&self) -> String {
        if self.excluded.is_empty() {
            return "this machine shows no interface at all".to_string();
        }
        let reasons: Vec<String> = self.excluded.iter().map(|e| format!("{} {}", e.name, e.why)).collect();
        reasons.join("; ")
    }
}

/// Lists the interfaces of this machine that the settings leave usable.
///
/// Errors: they ask for interfaces and the machine has none of them; the system cannot list its interfaces.
pub fn list(config: &Config) -> Result<Listing> {
    select(find()?, config)
}

/// The filter of NCCL_SOCKET_IFNAME: `[^][=]name,name...`; without `=` names are prefixes, `^` turns the list into exclusions.
struct Filter<'a> {
    not: bool,
    exact: bool,
    names: Vec<&'a str>,
}

impl<'a> Filter<'a> {
    fn parse(text: &'a str) -> Self {
        let text = text.trim();
        let (not, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        Filter { not, exact, names: text.split(',').map(str::trim).filter(|name| !name.is_empty()).collect() }
    }

    fn lists(&self, name: &str) -> bool {
        self.names.iter().any(|&wanted| if self.exact { name == wanted } else { name.starts_with(wanted) })
    }

    /// Whether interfaces were asked for, rather than excluded or left to us.
    fn asks(&self) -> bool {
        !self.not && !self.names.is_empty()
    }
}

/// In which order interfaces are used if the settings ask for none: only those of the first tier present are. The order is NCCL's (ib*, the
/// others, docker*, lo, virbr*: nccl 2.27 src/misc/socket.cc, ncclFindInterfaces), with two kinds put between that NCCL takes for others:
/// veth*, usually the host's end of a container's interface, and what only has a link-local IPv6 address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Tier {
    Ib,
    Other,
    Veth,
    LinkLocal,
    Docker,
    Loopback,
    Virbr,
}

impl Tier {
    fn of(it: &FoundInterface, addr: &SocketAddr) -> Tier {
        let name = it.name.as_str();
        if it.flags & libc::IFF_LOOPBACK as u32 != 0 || name == "lo" {
            Tier::Loopback
        } else if name.starts_with("docker") {
            Tier::Docker
        } else if name.starts_with("virbr") {
            Tier::Virbr
        } else if is_link_local(addr) {
            Tier::LinkLocal
        } else if name.starts_with("veth") {
            Tier::Veth
        } else if name.starts_with("ib") {
            Tier::Ib
        } else {
            Tier::Other
        }
    }

    fn why_not(self) -> &'static str {
        match self {
            Tier::Ib | Tier::Other => {
                "is passed over because there are ib* interfaces, which NCCL uses alone; RAILHEAD_SOCKET_IFNAME can ask for it"
            }
            Tier::Veth => "is a veth* interface, used only if there is nothing better or if asked for",
            Tier::LinkLocal => "has only a link-local IPv6 address, used only if there is nothing better or if asked for",
            Tier::Docker => "is a docker* interface, used only if there is nothing better or if asked for",
            Tier::Loopback => "is the loopback interface, used only if there is nothing better or if asked for",
            Tier::Virbr => "is a virbr* interface, used only if there is nothing better or if asked for",
        }
    }
}

/// Applies the rules to a machine's interfaces.
///
/// Errors: the settings ask for interfaces and `found` has none of them.
pub fn select(found: Vec<FoundInterface>, config: &Config) -> Result<Listing> {
    let (ifname, family) = (config.socket_ifname.as_str(), config.socket_family);
    let filter = Filter::parse(ifname);
    if filter.asks() && !found.iter().any(|it| filter.lists(&it.name)) {
        let names: Vec<&str> = found.iter().map(|it| it.name.as_str()).collect();
        return Err(Error::usage(format!(
            "{} is \"{ifname}\", which matches none of this machine's interfaces: {}",
            config.variable("RAILHEAD_SOCKET_IFNAME"),
            names.join(", ")
        )));
    }
    let mut excluded = Vec::new();
    let mut usable = Vec::new();
    for it in found {
        let refusal = if filter.asks() && !filter.lists(&it.name) {
            Some(format!("is not asked for by \"{ifname}\""))
        } else if filter.not && filter.lists(&it.name) {
            Some(format!("is excluded by \"{ifname}\""))
        } else {
            not_running(it.flags).map(str::to_string)
        };
        match (refusal, address(&it.addrs, family)) {
            (Some(why), _) => excluded.push(Excluded { name: it.name, why }),
            (None, None) => {
                let asked = |what| format!("has no {what} address, and {} asks for one", config.variable("RAILHEAD_SOCKET_FAMILY"));
                let why = match family {
                    Family::Any => "has no IP address; `ip addr add` gives it one".into(),
                    Family::Inet => asked("IPv4"),
                    Family::Inet6 => asked("IPv6"),
                };
                excluded.push(Excluded { name: it.name, why });
            }
            (None, Some(addr)) => usable.push((Tier::of(&it, &addr), addr, it)),
        }
    }
    if !filter.asks() {
        let best = usable.iter().map(|(tier, ..)| *tier).min();
        usable.retain(|(tier, _, it)| {
            let keep = Some(*tier) == best;
            if !keep {
                excluded.push(Excluded { name: it.name.clone(), why: tier.why_not().to_string() });
            }
            keep
        });
    }
    usable.sort_by(|(_, _, a), (_, _, b)| (a.pci_path.is_none(), &a.pci_path, &a.name).cmp(&(b.pci_path.is_none(), &b.pci_path, &b.name)));
    for (_, _, it) in usable.drain(MAX_INTERFACES.min(usable.len())..) {
        excluded.push(Excluded { name: it.name, why: format!("is beyond the first {MAX_INTERFACES}") });
    }
    let mut interfaces = Vec::with_capacity(usable.len());
    for (_, addr, it) in usable {
        let (guid, port) = identity(&interfaces, &it);
        let speed_mbps = it.speed.filter(|&s| s > 0).and_then(|s| u32::try_from(s).ok()).filter(|&s| s != u32::MAX);
        interfaces.push(Interface {
            addr,
            speed_mbps: speed_mbps.unwrap_or(DEFAULT_SPEED_MBPS),
            mtu: it.mtu.unwrap_or(DEFAULT_MTU),
            guid,
            port,
            name: it.name,
            pci_path: it.pci_path,
        });
    }
    Ok(Listing { interfaces, excluded })
}

fn not_running(flags: u32) -> Option<&'static str> {
    if flags & libc::IFF_UP as u32 == 0 {
        Some("is down; `ip link set dev ... up` makes it usable")
    } else if flags & (libc::IFF_RUNNING | libc::IFF_LOOPBACK) as u32 == 0 {
        Some("is up but has no carrier; look at its cable and at the other end")
    } else {
        None
    }
}

/// The one address of an interface: IPv4 unless the family says otherwise, and a link-local IPv6 address only if it has no other.
fn address(addrs: &[SocketAddr], family: Family) -> Option<SocketAddr> {
    let first = |want: &dyn Fn(&SocketAddr) -> bool| addrs.iter().copied().find(|a| !a.ip().is_unspecified() && want(a));
    let v4 = || first(&|a| a.is_ipv4());
    let v6 = || first(&|a| a.is_ipv6() && !is_link_local(a)).or_else(|| first(&|a| a.is_ipv6()));
    match family {
        Family::Any => v4().or_else(v6),
        Family::Inet => v4(),
        Family::Inet6 => v6(),
    }
}

fn is_link_local(addr: &SocketAddr) -> bool {
    matches!(addr.ip(), IpAddr::V6(ip) if ip.segments()[0] & 0xffc0 == 0xfe80)
}

/// The guid and port of the next interface after `before`. Ports of one PCI function share the guid of the first, as do interfaces
/// stacked on one NIC, which have its hardware address; each gets a port number of its own.
fn identity(before: &[Interface], it: &FoundInterface) -> (u64, u16) {
    let sibling = before.iter().find(|i| i.pci_path.is_some() && i.pci_path == it.pci_path);
    let guid = sibling.map(|i| i.guid).or(it.hardware).unwrap_or_else(|| name_hash(&it.name));
    let mut port = it.dev_port.saturating_add(1);
    while before.iter().any(|i| i.guid == guid && i.port == port) {
        port = port.checked_add(1).unwrap_or(1);
    }
    (guid, port)
}

/// 64-bit FNV-1a (parameters: <http://www.isthe.com/chongo/tech/comp/fnv/>).
fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// Reads the machine's interfaces, in its own order.
///
/// Errors: the system cannot list them.
pub fn find() -> Result<Vec<FoundInterface>> {
    let mut head: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: `head` is a valid place for the list's address.
    if unsafe { libc::getifaddrs(&mut head) } != 0 {
        return Err(Error::last_os("listing network interfaces"));
    }
    let mut found: Vec<FoundInterface> = Vec::new();
    let mut at = head;
    while !at.is_null() {
        // SAFETY: getifaddrs made the list; its entries live until freeifaddrs below.
        let entry = unsafe { &*at };
        at = entry.ifa_next;
        // SAFETY: ifa_name is a terminated string of the same life.
        let label = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy();
        // An IPv4 alias ("eth0:1") is another address of the interface.
        let name = label.split(':').next().unwrap_or(&label);
        let index = found.iter().position(|it| it.name == name).unwrap_or_else(|| {
            found.push(describe(name, entry.ifa_flags, Path::new(SYSFS)));
            found.len() - 1
        });
        // SAFETY: ifa_addr is null or points at a socket address of its family, of the same life.
        if let (Some(addr), Some(it)) = (unsafe { socket_addr(entry.ifa_addr) }, found.get_mut(index)) {
            it.addrs.push(addr);
        }
    }
    // SAFETY: `head` came from getifaddrs; nothing borrowed from the list is left.
    unsafe { libc::freeifaddrs(head) };
    Ok(found)
}

/// # Safety
/// `addr` is null or points at a socket address as long as its family's.
unsafe fn socket_addr(addr: *const libc::sockaddr) -> Option<SocketAddr> {
    if addr.is_null() {
        return None;
    }
    // SAFETY: not null, and every socket address begins with its family.
    match i32::from(unsafe { (*addr).sa_family }) {
        libc::AF_INET => {
            // SAFETY: an address of this family has this type.
            let v4 = unsafe { addr.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(SocketAddr::from((Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr)), 0)))
        }
        libc::AF_INET6 => {
            // SAFETY: an address of this family has this type.
            let v6 = unsafe { addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            Some(SocketAddr::V6(SocketAddrV6::new(Ipv6Addr::from(v6.sin6_addr.s6_addr), 0, 0, v6.sin6_scope_id)))
        }
        _ => None,
    }
}

/// What sysfs says of an interface; whatever it does not say stays unknown (a container may not show it).
fn describe(name: &str, flags: u32, sysfs: &Path) -> FoundInterface {
    let dir = sysfs.join(name);
    let text = |file: &str| fs::read_to_string(dir.join(file)).ok().map(|text| text.trim().to_string());
    let port = text("dev_port").and_then(|t| t.parse().ok()).filter(|&port| port != 0);
    // Older drivers number their ports in dev_id, in hexadecimal.
    let id = || text("dev_id").and_then(|t| u16::from_str_radix(t.trim_start_matches("0x"), 16).ok());
    FoundInterface {
        name: name.to_string(),
        flags,
        addrs: Vec::new(),
        speed: text("speed").and_then(|t| t.parse().ok()),
        mtu: text("mtu").and_then(|t| t.parse().ok()),
        pci_path: fs::canonicalize(dir.join("device")).ok().and_then(|path| pci_device(&path)),
        hardware: text("address").and_then(|t| hardware(&t)),
        dev_port: port.or_else(id).unwrap_or(0),
    }
}

/// The path up to its last component that names a PCI device: a virtio or USB device has one above it.
fn pci_device(path: &Path) -> Option<String> {
    let is_pci = |p: &&Path| p.file_name().and_then(|n| n.to_str()).is_some_and(is_pci_address);
    path.ancestors().find(is_pci).map(PathBuf::from)?.into_os_string().into_string().ok()
}

/// Whether `name` is a PCI address: domain (4 digits or more), bus, device and function, as in `0000:00:03.0`.
fn is_pci_address(name: &str) -> bool {
    let hex = |s: &str, len: std::ops::RangeInclusive<usize>| len.contains(&s.len()) && s.bytes().all(|b| b.is_ascii_hexdigit());
    let mut parts = name.split([':', '.']);
    let fields = [parts.next(), parts.next(), parts.next(), parts.next(), parts.next()];
    let [Some(domain), Some(bus), Some(device), Some(function), None] = fields else { return false };
    hex(domain, 4..=8) && hex(bus, 2..=2) && hex(device, 2..=2) && hex(function, 1..=1) && name.rfind(':') < name.rfind('.')
}

/// The low 8 bytes of a hardware address in sysfs's notation; none if it is not one or zero.
fn hardware(text: &str) -> Option<u64> {
    let mut value = 0u64;
    for byte in text.split(':') {
        value = value << 8 | u64::from(u8::from_str_radix(byte, 16).ok()?);
    }
    (value != 0).then_some(value)
}

#[cfg(test)]
mod tests;
