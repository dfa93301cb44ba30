//! NCCL_IB_HCA: which ports may be used. A pure function over names.
//!
//! Syntax (NCCL 2.28, `parseStringList` and its use in the InfiniBand transport): `[^][=]name[:port],...`. `^` turns the list into
//! exclusions, `=` asks for whole names instead of prefixes; what stands behind the port (rail and plane) names no other port.
#![forbid(unsafe_code)]

/// A parsed list.
#[derive(Debug, PartialEq, Eq)]
pub struct Filter<'a> {
    exclude: bool,
    exact: bool,
    entries: Vec<(&'a str, Option<u32>)>,
}

impl<'a> Filter<'a> {
    /// Any text is some list.
    pub fn parse(text: &'a str) -> Filter<'a> {
        let text = text.trim();
        let (exclude, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        let entry = |entry: &'a str| {
            let mut parts = entry.split(':');
            let name = parts.next().unwrap_or_default();
            (name, parts.next().and_then(|port| port.parse().ok()))
        };
        let entries = text.split(',').map(str::trim).filter(|entry| !entry.is_empty()).map(entry).collect();
        Filter { exclude, exact, entries }
    }

    /// Whether a port may be used.
    pub fn admits(&self, device: &str, port: u32) -> bool {
        let named = |&(name, wanted): &(&str, Option<u32>)| {
            let name_fits = if self.exact { device == name } else { device.starts_with(name) };
            name_fits && wanted.is_none_or(|wanted| wanted == port)
        };
        self.entries.is_empty() || self.entries.iter().any(named) != self.exclude
    }
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
                assert_eq!(filter.admits(device, port), want, "{text:?}: {device}:{port}");
            }
        }
    }
}
