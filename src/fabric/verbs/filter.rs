//! NCCL_IB_HCA: which ports may be used, and which rail and plane of the network they are on. A pure function over names.
//!
//! Syntax (NCCL 2.29, `parseStringList` of src/misc/utils.cc and its use in src/transport/net_ib/init.cc):
//! `[^][=]name[:port[:rail[:plane]]],...`. `^` turns the list into exclusions, `=` asks for whole names instead of prefixes; what is empty
//! or -1 behind a colon says nothing, and neither does what is no number.
#![forbid(unsafe_code)]

use crate::fabric::types::ID_UNDEF;

/// A parsed list.
#[derive(Debug, PartialEq, Eq)]
pub struct Filter<'a> {
    exclude: bool,
    exact: bool,
    entries: Vec<Entry<'a>>,
}

#[derive(Debug, PartialEq, Eq)]
struct Entry<'a> {
    name: &'a str,
    port: Option<u32>,
    at: RailPlane,
}

/// The rail and the plane of the network that a port is on; -1 if the list does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RailPlane {
    /// Ports of one rail reach each other through fewer switches.
    pub rail: i16,
    /// Planes have nothing in common.
    pub plane: i16,
}

const UNDEF: RailPlane = RailPlane { rail: ID_UNDEF, plane: ID_UNDEF };

impl<'a> Filter<'a> {
    /// Any text is some list.
    pub fn parse(text: &'a str) -> Filter<'a> {
        let text = text.trim();
        let (exclude, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        let entry = |entry: &'a str| {
            let mut parts = entry.split(':').map(str::trim);
            let name = parts.next().unwrap_or_default();
            let port = parts.next().and_then(|port| port.parse().ok()).filter(|port| *port > 0);
            let mut id = || parts.next().and_then(|id| id.parse().ok()).filter(|id| *id >= 0).unwrap_or(ID_UNDEF);
            Entry { name, port, at: RailPlane { rail: id(), plane: id() } }
        };
        let entries = text.split(',').map(entry).filter(|entry| !entry.name.is_empty()).collect();
        Filter { exclude, exact, entries }
    }

    /// Whether a port may be used, and where the list says it is: the first entry that names it counts.
    pub fn admits(&self, device: &str, port: u32) -> Option<RailPlane> {
        let names = |entry: &&Entry<'_>| {
            let name_fits = if self.exact { device == entry.name } else { device.starts_with(entry.name) };
            name_fits && entry.port.is_none_or(|wanted| wanted == port)
        };
        let named = self.entries.iter().find(names);
        match named {
            Some(entry) => (!self.exclude).then_some(entry.at),
            None => (self.exclude || self.entries.is_empty()).then_some(UNDEF),
        }
    }
}

/// What is wrong with a list, which is used nevertheless: an entry with too many parts, or a part that is no number.
pub fn complaint(text: &str) -> Option<String> {
    let entries = text.trim_start_matches(['^', '=', ' ']).split(',').map(str::trim);
    entries.clone().find(|entry| !is_entry(entry)).map(|entry| {
        format!(
            "NCCL_IB_HCA={text}: in {entry:?} is more than a name, a port (1-255), a rail and a plane (0-32767): what is none is left out"
        )
    })
}

fn is_entry(entry: &str) -> bool {
    let mut parts = entry.split(':').map(str::trim);
    let name = parts.next().unwrap_or_default();
    let mut number = |least: i16, most: i16| match parts.next() {
        None | Some("" | "-1") => true,
        Some(number) => number.parse().is_ok_and(|number| (least..=most).contains(&number)),
    };
    let numbers = number(1, 255) && number(0, i16::MAX) && number(0, i16::MAX);
    numbers && parts.next().is_none() && (!name.is_empty() || !entry.contains(':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_admit_what_nccl_admits() {
        /// Device, port, whether it is admitted.
        type Port = (&'static str, u32, bool);
        let cases: [(&str, &[Port]); 8] = [
            ("", &[("mlx5_0", 1, true)]),
            ("mlx5", &[("mlx5_0", 1, true), ("mlx5_11", 2, true), ("rxe0", 1, false)]),
            ("=mlx5_1", &[("mlx5_1", 1, true), ("mlx5_11", 1, false)]),
            ("mlx5_0:1", &[("mlx5_0", 1, true), ("mlx5_0", 2, false)]),
            ("^mlx5_1", &[("mlx5_0", 1, true), ("mlx5_1", 1, false), ("mlx5_10", 1, false)]),
            ("^=mlx5_1:2,rxe0", &[("mlx5_1", 1, true), ("mlx5_1", 2, false), ("mlx5_10", 2, true), ("rxe0", 1, false), ("rxe01", 1, true)]),
            ("=mlx5_0:1:3:4, mlx5_3", &[("mlx5_0", 1, true), ("mlx5_3", 2, true), ("mlx5_0", 2, false)]),
            ("^", &[("mlx5_0", 1, true)]),
        ];
        for (text, ports) in cases {
            let filter = Filter::parse(text);
            for &(device, port, want) in ports {
                assert_eq!(filter.admits(device, port).is_some(), want, "{text:?}: {device}:{port}");
            }
        }
    }

    #[test]
    fn a_list_says_where_ports_are() {
        let at = |rail, plane| Some(RailPlane { rail, plane });
        let filter = Filter::parse("=mlx5_0:1:3:4,mlx5_0:2:5,mlx5_1::6,mlx5_2:-1::7,mlx5_2:1:8, mlx5_3");
        let ports = [("mlx5_0", 1), ("mlx5_0", 2), ("mlx5_1", 2), ("mlx5_2", 1), ("mlx5_3", 1), ("mlx5_4", 1)];
        let want = [at(3, 4), at(5, -1), at(6, -1), at(-1, 7), at(-1, -1), None];
        assert_eq!(ports.map(|(device, port)| filter.admits(device, port)), want);
        // What is left over from exclusions is nowhere in particular.
        assert_eq!(Filter::parse("^mlx5_0:1:3:4").admits("mlx5_1", 1), at(-1, -1));
    }

    #[test]
    fn what_is_no_number_is_told() {
        for odd in ["mlx5_0:x", "^mlx5_0:0", "a,=mlx5_0:1:2:3:4", "mlx5_0:256", "mlx5_0:1:32768", "mlx5_0:1:-2", ":1"] {
            assert!(complaint(odd).is_some_and(|text| text.contains(odd)), "{odd}");
        }
        for fine in ["", "mlx5", "^=mlx5_0:1:2:3, mlx5_1::,", "mlx5_0:-1:0:32767"] {
            assert_eq!(complaint(fine), None);
        }
        // The name still counts.
        assert_eq!(Filter::parse("^mlx5_0:x").admits("mlx5_0", 1), None);
    }
}
