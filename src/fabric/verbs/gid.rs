//! Which entry of a RoCE port's GID table to use: a pure function over the table, so that every rule is tested without a NIC.
//! Called once per port while devices are listed.
#![forbid(unsafe_code)]

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use crate::base::config::Family;

/// Kind of an entry, as sysfs names it (`gid_attrs/types`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidKind {
    /// "IB/RoCE v1": Ethernet frames, one subnet.
    V1,
    /// "RoCE v2": UDP, routed.
    V2,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            GidKind::V1 => "RoCE v1",
            GidKind::V2 => "RoCE v2",
        })
    }
}

/// A GID: 16 bytes, shown as the address that they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The subnet's number: on InfiniBand the last 16 bits of a GID's prefix, which stands before its 64 bits of the port.
    pub fn subnet(&self) -> u16 {
        u16::from_be_bytes([self.0[6], self.0[7]])
    }

    /// Where a router of the sender's own subnet takes what goes to this port, if it says so: the 16 bits before those (NCCL 2.29
    /// src/transport/net_ib/connect.cc).
    pub fn flid(&self) -> Option<u16> {
        Some(u16::from_be_bytes([self.0[4], self.0[5]])).filter(|&flid| flid != 0)
    }

    /// The address: IPv4 where it is mapped.
    pub fn address(&self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Ipv6Addr::from(self.0))
    }
}

/// An entry of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Index in the table.
    pub index: u32,
    /// The GID.
    pub gid: Gid,
    /// `None` where the system does not say.
    pub kind: Option<GidKind>,
    /// Network interface behind it, where the system says.
    pub netdev: Option<String>,
}

/// What the settings ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The index, if it is not up for choice.
    pub forced: Option<Forced>,
    /// RoCE version (NCCL_IB_ROCE_VERSION_NUM).
    pub version: u32,
    /// Address family (NCCL_IB_ADDR_FAMILY).
    pub family: Family,
    /// Only addresses in here (NCCL_IB_ADDR_RANGE).
    pub range: Option<Range>,
}

/// An index, and what says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forced {
    /// Index in the table.
    pub index: u32,
    /// To be read after "chosen:" or "not taken:".
    pub why: String,
}

/// Addresses that share their first bits, as in "10.8.0.0/16".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    net: IpAddr,
    bits: u32,
}

impl Range {
    /// `None` for text that is no CIDR range. Without a prefix length the whole address counts.
    pub fn parse(text: &str) -> Option<Range> {
        let (net, bits) = text.split_once('/').map_or((text, None), |(net, bits)| (net, Some(bits)));
        let net: IpAddr = net.trim().parse().ok()?;
        let most = if net.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Some(most), |bits| bits.trim().parse().ok())?;
        (bits <= most).then_some(Range { net, bits })
    }

    /// Whether the address is inside.
    pub fn holds(&self, address: IpAddr) -> bool {
        let (a, b, width) = match (self.net, address) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (u128::from(u32::from(a)), u128::from(u32::from(b)), 32),
            (IpAddr::V6(a), IpAddr::V6(b)) => (u128::from(a), u128::from(b), 128),
            _ => return false,
        };
        // A shift by the whole width is no shift.
        (a ^ b).checked_shr(width - self.bits).unwrap_or(0) == 0
    }
}

/// What became of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Judged {
    /// The entry.
    pub entry: Entry,
    /// Whether it is the one.
    pub chosen: bool,
    /// Why, or why not, to be read after the GID.
    pub why: String,
}

/// Judges each entry that holds something; at most one is chosen. Addresses outside of the range, link-local and empty ones are never
/// taken unless their index is forced. Of the others the wanted version counts most, then the wanted family, then the lower index.
pub fn choose(table: Vec<Entry>, wanted: &Wanted) -> Vec<Judged> {
    let scores: Vec<Result<u32, String>> = table.iter().map(|entry| score(entry, wanted)).collect();
    let best = scores.iter().flatten().max().copied();
    let at = scores.iter().position(|score| score.as_ref().ok() == best.as_ref() && best.is_some());
    let judge = |(i, (entry, score)): (usize, (Entry, Result<u32, String>))| {
        let chosen = at == Some(i);
        let why = match score {
            Err(why) => why,
            Ok(score) => match wanted.forced.as_ref().filter(|_| chosen) {
                Some(forced) => format!("chosen: {}", forced.why),
                None => remark(&entry, score, chosen, best.unwrap_or(0), wanted),
            },
        };
        Judged { entry, chosen, why }
    };
    table.into_iter().zip(scores).enumerate().map(judge).collect()
}

const VERSION_FITS: u32 = 2;
const FAMILY_FITS: u32 = 1;

fn score(entry: &Entry, wanted: &Wanted) -> Result<u32, String> {
    if let Some(forced) = &wanted.forced {
        return if entry.index == forced.index { Ok(0) } else { Err(format!("not taken: {}", forced.why)) };
    }
    let address = entry.gid.address();
    if entry.gid == Gid::default() {
        return Err("empty".into());
    }
    match address {
        IpAddr::V6(v6) if v6.segments()[0] & 0xffc0 == 0xfe80 => return Err("not taken: a link-local address".into()),
        IpAddr::V4(v4) if v4.is_link_local() => return Err("not taken: a link-local address".into()),
        _ => {}
    }
    if let Some(range) = wanted.range
        && !range.holds(address)
    {
        return Err("not taken: outside of NCCL_IB_ADDR_RANGE".into());
    }
    let version = match entry.kind {
        Some(GidKind::V1) => 1,
        Some(GidKind::V2) => 2,
        // A system that does not say has one kind only.
        None => wanted.version,
    };
    let family_fits = match wanted.family {
        Family::Any => true,
        Family::Inet => address.is_ipv4(),
        Family::Inet6 => address.is_ipv6(),
    };
    Ok(u32::from(version == wanted.version) * VERSION_FITS + u32::from(family_fits) * FAMILY_FITS)
}

fn remark(entry: &Entry, score: u32, chosen: bool, best: u32, wanted: &Wanted) -> String {
    let mut lacks = Vec::new();
    if score & VERSION_FITS == 0 {
        let kind = entry.kind.map_or("unknown kind".into(), |kind| kind.to_string());
        lacks.push(format!("{kind}, NCCL_IB_ROCE_VERSION_NUM is {}", wanted.version));
    }
    if score & FAMILY_FITS == 0 {
        let family = if entry.gid.address().is_ipv4() { "IPv4" } else { "IPv6" };
        lacks.push(format!("{family}, NCCL_IB_ADDR_FAMILY asks for the other"));
    }
    match (chosen, lacks.is_empty()) {
        (true, true) => "chosen: the first of the wanted version and family".into(),
        (true, false) => format!("chosen, as nothing fits better ({})", lacks.join("; ")),
        (false, _) if score == best => "not taken: the one before it is as good".into(),
        (false, _) => format!("not taken: {}", lacks.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(index: u32, address: &str, kind: GidKind) -> Entry {
        let gid = match address.parse().unwrap() {
            IpAddr::V4(v4) => Gid(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Gid(v6.octets()),
        };
        Entry { index, gid, kind: Some(kind), netdev: None }
    }

    /// As a ConnectX shows it: each address once per version.
    fn table() -> Vec<Entry> {
        use GidKind::{V1, V2};
        let addresses = ["fe80::1", "10.8.0.1", "fd08::1", "192.168.7.1"];
        let both = addresses.into_iter().flat_map(|address| [(address, V1), (address, V2)]);
        let mut table: Vec<Entry> = both.enumerate().map(|(i, (address, kind))| entry(i as u32, address, kind)).collect();
        table.push(entry(8, "::", V2));
        table
    }

    fn wanted() -> Wanted {
        Wanted { forced: None, version: 2, family: Family::Inet, range: None }
    }

    fn forced(index: u32) -> Option<Forced> {
        Some(Forced { index, why: "it is so".into() })
    }

    #[track_caller]
    fn chosen(table: Vec<Entry>, wanted: &Wanted) -> Option<u32> {
        let judged = choose(table, wanted);
        assert!(judged.iter().all(|j| !j.why.is_empty()));
        let mut chosen = judged.iter().filter(|j| j.chosen);
        let index = chosen.next().map(|j| j.entry.index);
        assert!(chosen.next().is_none());
        index
    }

    #[test]
    fn the_settings_choose() {
        let range = |text| Range::parse(text);
        assert_eq!(chosen(table(), &wanted()), Some(3));
        assert_eq!(chosen(table(), &Wanted { version: 1, ..wanted() }), Some(2));
        assert_eq!(chosen(table(), &Wanted { family: Family::Inet6, ..wanted() }), Some(5));
        assert_eq!(chosen(table(), &Wanted { range: range("192.168.0.0/16"), ..wanted() }), Some(7));
        assert_eq!(chosen(table(), &Wanted { range: range("fd08::/64"), ..wanted() }), Some(5));
        assert_eq!(chosen(table(), &Wanted { range: range("172.16.0.0/12"), ..wanted() }), None);
        assert_eq!(chosen(table(), &Wanted { forced: forced(0), ..wanted() }), Some(0));
        assert_eq!(chosen(table(), &Wanted { forced: forced(99), ..wanted() }), None);
    }

    #[test]
    fn a_routable_address_of_the_wrong_family_is_better_than_none() {
        let table = vec![entry(0, "fe80::1", GidKind::V2), entry(1, "fd08::1", GidKind::V2), entry(2, "10.0.0.1", GidKind::V1)];
        assert_eq!(chosen(table, &wanted()), Some(1));
        assert_eq!(chosen(vec![entry(0, "fe80::1", GidKind::V2), entry(1, "169.254.3.4", GidKind::V2)], &wanted()), None);
        assert_eq!(chosen(vec![], &wanted()), None);
    }

    #[test]
    fn ranges() {
        for (text, address, want) in [
            ("10.8.0.0/16", "10.8.200.1", true),
            ("10.8.0.0/16", "10.9.0.1", false),
            ("10.8.0.1", "10.8.0.1", true),
            ("10.8.0.1", "10.8.0.2", false),
            ("0.0.0.0/0", "1.2.3.4", true),
            ("0.0.0.0/0", "::1", false),
            ("::/0", "fd08::1", true),
            ("fd08:1::/32", "fd08:1:2::3", true),
        ] {
            assert_eq!(Range::parse(text).unwrap().holds(address.parse().unwrap()), want, "{text} {address}");
        }
        for text in ["", "10.8.0.0/33", "10.8/16", "::/129", "x"] {
            assert_eq!(Range::parse(text), None, "{text}");
        }
    }
}
