//! The settings: one table, read from the environment at each init, on the thread that calls init; plain data afterwards.
//!
//! `docs/env.md` is [`markdown`] of this table. To add a setting, add a row.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::fmt::{self, Write};
use std::ops::RangeInclusive;

use crate::base::log::{self, Level, log_info, log_warn};
use crate::base::stage;

mod effective;
mod seconds;

pub use effective::{Effective, Setting, Source, Unknown};
pub use seconds::Seconds;

/// A type that a setting can have.
trait Value: Sized + PartialEq {
    /// What narrows the type down.
    type Limits;
    /// `None` for text that is not such a value within the limits.
    fn parse(text: &str, limits: &Self::Limits) -> Option<Self>;
    /// The accepted values in words.
    fn accepted(limits: &Self::Limits) -> String;
    /// The value as one would write it.
    fn show(&self) -> String;
}

macro_rules! integer {
    ($type:ty) => {
        impl Value for $type {
            type Limits = RangeInclusive<$type>;

            fn parse(text: &str, limits: &Self::Limits) -> Option<Self> {
                // NCCL reads its numbers with strtoll(.., 0), so scripts may hold hexadecimal ones.
                let value = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
                    Some(digits) if !digits.starts_with('+') => <$type>::from_str_radix(digits, 16).ok()?,
                    _ => text.parse().ok()?,
                };
                limits.contains(&value).then_some(value)
            }

            fn accepted(limits: &Self::Limits) -> String {
                format!("{}..{}", limits.start(), limits.end())
            }

            fn show(&self) -> String {
                self.to_string()
            }
        }
    };
}

integer!(u32);
integer!(i32);

impl Value for bool {
    type Limits = ();

    fn parse(text: &str, (): &()) -> Option<Self> {
        match text.to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => Some(true),
            "0" | "false" | "no" | "off" => Some(false),
            _ => None,
        }
    }

    fn accepted((): &()) -> String {
        "0, 1".into()
    }

    fn show(&self) -> String {
        u8::from(*self).to_string()
    }
}

/// Text that passes a check.
struct Text {
    accepted: &'static str,
    check: fn(&str) -> bool,
}

impl Value for String {
    type Limits = Text;

    fn parse(text: &str, limits: &Text) -> Option<Self> {
        (limits.check)(text).then(|| text.to_string())
    }

    fn accepted(limits: &Text) -> String {
        limits.accepted.into()
    }

    fn show(&self) -> String {
        self.clone()
    }
}

/// Enums whose values have names, compared without regard to case.
macro_rules! choice {
    ($(#[$meta:meta])* $name:ident { $($(#[$doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum $name { $($(#[$doc])* $variant,)* }

        impl Value for $name {
            type Limits = ();

            fn parse(text: &str, (): &()) -> Option<Self> {
                $(if text.eq_ignore_ascii_case($text) { return Some($name::$variant); })*
                None
            }

            fn accepted((): &()) -> String {
                [$($text),*].join(", ")
            }

            fn show(&self) -> String {
                match self { $($name::$variant => $text.into(),)* }
            }
        }
    };
}

choice! {
    /// Which provider.
    Fabric {
        /// `Verbs` if a device is usable, else `Soft`.
        Auto = "auto",
        /// RDMA NICs through libibverbs.
        Verbs = "verbs",
        /// The embedded software fabric.
        Soft = "soft",
    }
}

choice! {
    /// Which wire of the software fabric.
    SoftWire {
        /// Shared memory where both ends can open it, else TCP.
        Auto = "auto",
        /// Shared memory, or no connection.
        Shm = "shm",
        /// TCP.
        Tcp = "tcp",
    }
}

choice! {
    /// Whether bulk data on one host is copied straight between two processes' memory.
    CrossMemory {
        /// Where that is faster than two copies through a ring.
        Auto = "auto",
        /// Wherever the kernel lets us.
        Always = "1",
        /// Nowhere.
        Never = "0",
    }
}

choice! {
    /// Which addresses.
    Family {
        /// Both.
        Any = "any",
        /// IPv4.
        Inet = "AF_INET",
        /// IPv6.
        Inet6 = "AF_INET6",
    }
}

choice! {
    /// What goes to stderr.
    Debug {
        /// Nothing.
        None = "none",
        /// Warnings.
        Warn = "warn",
        /// And what happens once per init or comm.
        Info = "info",
        /// Everything.
        Trace = "trace",
    }
}

impl Debug {
    fn level(self) -> Level {
        match self {
            Debug::None => Level::None,
            Debug::Warn => Level::Warn,
            Debug::Info => Level::Info,
            Debug::Trace => Level::Trace,
        }
    }
}

/// The range of RAILHEAD_PORT_RANGE; `None` for the system's choice, and for text that the table does not accept.
pub fn parse_ports(text: &str) -> Option<RangeInclusive<u16>> {
    let (low, high) = text.split_once('-')?;
    let (low, high): (u16, u16) = (low.trim().parse().ok()?, high.trim().parse().ok()?);
    (low >= 1024 && low <= high).then_some(low..=high)
}

const ANY_TEXT: Text = Text { accepted: "any text", check: |_| true };
const INTERFACES: Text = Text { accepted: "`[^][=]prefix,...`", check: |_| true };
const PORTS: Text =
    Text { accepted: "`LOW-HIGH` within 1024-65535, or empty", check: |text| text.is_empty() || parse_ports(text).is_some() };
const CONGESTION: Text = Text {
    accepted: "`auto`, `system` or an algorithm's name of at most 15 letters, digits, `-` and `_`",
    // TCP_CA_NAME_MAX is 16 with the terminator (linux/tcp.h).
    check: |text| matches!(text.len(), 1..=15) && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-'),
};

/// One row as the documentation needs it.
struct Row {
    env: &'static str,
    alias: Option<&'static str>,
    default: String,
    accepted: String,
    doc: &'static str,
}

/// What the environment has for a row.
enum Found<T> {
    Nothing,
    Value(&'static str, T),
    Bad(&'static str, OsString),
}

macro_rules! table {
    ($($field:ident: $type:ty, $env:literal $(or $alias:literal)?, $default:expr, $limits:expr, $doc:literal;)*) => {
        /// Every setting, by the lower-case rest of its variable's name.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Config {
            $(#[doc = $doc] pub $field: $type,)*
        }

        impl Default for Config {
            fn default() -> Self {
                Config { $($field: $default,)* }
            }
        }

        impl Config {
            fn read(env: &impl Fn(&str) -> Option<OsString>, tell: &mut impl FnMut(Level, String)) -> Config {
                Config { $($field: setting($env, [$($alias)?].first().copied(), $default, &$limits, env, tell),)* }
            }
        }

        /// Every variable that is ours.
        const NAMES: &[&str] = &[$($env),*];

        /// For each row, in order, where its value comes from and how it is written.
        fn origins(env: &impl Fn(&str) -> Option<OsString>) -> Vec<(Source, String)> {
            vec![$(effective::origin(find::<$type>($env, [$($alias)?].first().copied(), &$limits, env), &$default),)*]
        }

        fn rows() -> Vec<Row> {
            vec![$(Row {
                env: $env,
                alias: [$($alias)?].first().copied(),
                default: <$type as Value>::show(&$default),
                accepted: <$type as Value>::accepted(&$limits),
                doc: $doc,
            },)*]
        }
    };
}

table! {
    fabric: Fabric, "RAILHEAD_FABRIC", Fabric::Auto, (),
        "Which provider: RDMA NICs, or the embedded software fabric. `auto` takes NICs if there are usable ones.";
    soft_wire: SoftWire, "RAILHEAD_SOFT_WIRE", SoftWire::Auto, (),
        "Which wire of the software fabric. `auto` takes shared memory where both ends can open it, else TCP; `shm` refuses anything else.";
    cma: CrossMemory, "RAILHEAD_CMA", CrossMemory::Auto, (),
        "Whether bulk data on one host is copied straight between the two processes (process_vm_readv and process_vm_writev), or else passes through a bounce ring. `auto` measures which is faster here.";
    shm_bounce_kib: u32, "RAILHEAD_SHM_BOUNCE_KIB", 256, 64..=65536,
        "Size of the bounce ring per connection and direction, in KiB, rounded up to a power of two.";
    tcp_streams: u32, "RAILHEAD_TCP_STREAMS" or "NCCL_NSOCKS_PERTHREAD", 0, 0..=16,
        "TCP data streams per queue pair beside its control stream. 0: data travels on the control stream.";
    tcp_congestion: String, "RAILHEAD_TCP_CONGESTION", String::from("auto"), CONGESTION,
        "TCP congestion control. `auto`: reno towards the same host, the system's default elsewhere; `system`: always the default.";
    tcp_buffer_kib: u32, "RAILHEAD_TCP_BUFFER_KIB", 0, 0..=65536,
        "Send and receive buffer of each TCP stream, in KiB. 0: the system's, which tunes itself.";
    socket_ifname: String, "RAILHEAD_SOCKET_IFNAME" or "NCCL_SOCKET_IFNAME", String::new(), INTERFACES,
        "Interfaces to use: a list of name prefixes; `=` asks for whole names, `^` excludes. Empty: all but docker, lo, virbr and veth ones.";
    socket_family: Family, "RAILHEAD_SOCKET_FAMILY" or "NCCL_SOCKET_FAMILY", Family::Any, (),
        "Address family of the interfaces.";
    port_range: String, "RAILHEAD_PORT_RANGE", String::new(), PORTS,
        "Ports that listeners take, for firewalls. Empty: the system's choice.";
    qps_per_rail: u32, "RAILHEAD_QPS_PER_RAIL" or "NCCL_IB_QPS_PER_CONNECTION", 1, 1..=8,
        "Queue pairs per rail of a connection.";
    split_min: u32, "RAILHEAD_SPLIT_MIN", 65536, 128..=1 << 30,
        "Smallest message, in bytes, that is striped over a connection's queue pairs.";
    traffic_class: i32, "RAILHEAD_TC" or "NCCL_IB_TC", -1, -1..=255,
        "Traffic class of the data (IPv4 TOS, IPv6 traffic class). -1: what the communicator asks for, else the system's.";
    force_merge: String, "RAILHEAD_FORCE_MERGE" or "NCCL_NET_FORCE_MERGE", String::new(), ANY_TEXT,
        "Devices that may be merged into one although they are not ports of one NIC, in NCCL's syntax: `a,b;c,d`.";
    max_half_open: u32, "RAILHEAD_MAX_HALF_OPEN", 64, 1..=4096,
        "Unfinished handshakes that one listener keeps; the oldest is dropped for a newer one.";
    handshake_timeout_s: u32, "RAILHEAD_HANDSHAKE_TIMEOUT_S", 10, 1..=3600,
        "Seconds that an incoming handshake may take after its first byte.";
    peer_timeout_s: u32, "RAILHEAD_PEER_TIMEOUT_S", 0, 0..=86400,
        "Seconds after which a peer that lives but does not answer is an error. 0: never, it is only reported.";
    tcp_user_timeout_s: u32, "RAILHEAD_TCP_USER_TIMEOUT_S", 60, 0..=86400,
        "Seconds that sent data may stay unacknowledged before a TCP connection counts as dead. 0: the system's default.";
    stall_warn_s: Seconds, "RAILHEAD_STALL_WARN_S", Seconds::new(10), 86400,
        "Seconds after which a request that is still outstanding is reported, once, with what it waits for. 0: never.";
    fabric_timeout_s: u32, "RAILHEAD_FABRIC_TIMEOUT_S", 30, 1..=86400,
        "Seconds that a request posted to a NIC may take to complete.";
    debug: Debug, "RAILHEAD_DEBUG", Debug::None, (),
        "Which messages go to stderr, whatever NCCL_DEBUG says.";
    stats: bool, "RAILHEAD_STATS", true, (),
        "Whether counters and wait times are kept where other processes of this user can read them.";
}

impl Config {
    /// Reads the environment, says in the log what is wrong or unusual in it, and applies RAILHEAD_DEBUG. Once per init.
    pub fn from_env() -> Config {
        let env = |name: &str| std::env::var_os(name);
        // First, so that it governs the messages about the rest.
        let debug = Debug::parse(std::env::var("RAILHEAD_DEBUG").unwrap_or_default().trim(), &());
        log::set_stderr(debug.unwrap_or(Debug::None).level());
        stage::init();
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        Config::from(&env, names, &mut |level, message| match level {
            Level::Warn => log_warn!(log::ENV, "{message}"),
            _ => log_info!(log::ENV, "{message}"),
        })
    }

    fn from(env: &impl Fn(&str) -> Option<OsString>, names: impl Iterator<Item = String>, tell: &mut impl FnMut(Level, String)) -> Config {
        let config = Config::read(env, tell);
        for Unknown { name, nearest } in effective::unknown(names) {
            let hint = nearest.map_or(String::new(), |nearest| format!(": {nearest} is meant?"));
            tell(Level::Warn, format!("{name} is not a setting of Railhead{hint}; see docs/env.md"));
        }
        config
    }
}

/// Looks for one row. Railhead's own name wins over the alias.
fn find<T: Value>(
    name: &'static str,
    alias: Option<&'static str>,
    limits: &T::Limits,
    env: &impl Fn(&str) -> Option<OsString>,
) -> Found<T> {
    let found = |source: &'static str| env(source).map(|text| (source, text));
    let Some((source, text)) = found(name).or_else(|| alias.and_then(found)) else { return Found::Nothing };
    match text.to_str().and_then(|text| T::parse(text.trim(), limits)) {
        Some(value) => Found::Value(source, value),
        None => Found::Bad(source, text),
    }
}

/// The value of one row. A bad value is reported, and the default stands.
fn setting<T: Value>(
    name: &'static str,
    alias: Option<&'static str>,
    default: T,
    limits: &T::Limits,
    env: &impl Fn(&str) -> Option<OsString>,
    tell: &mut impl FnMut(Level, String),
) -> T {
    match find::<T>(name, alias, limits, env) {
        Found::Nothing => default,
        Found::Value(source, value) => {
            if value != default {
                let meaning = if source == name { String::new() } else { format!(" (as {name})") };
                tell(Level::Info, format!("{source}={}{meaning}", value.show()));
            }
            value
        }
        Found::Bad(source, text) => {
            let (bad, accepted, default_text) = (text.to_string_lossy(), T::accepted(limits), default.show());
            tell(Level::Warn, format!("{source}={bad} is not accepted ({accepted}); using the default, {}", Shown(&default_text)));
            default
        }
    }
}

/// A value in prose: nothing to see is said so.
struct Shown<'a>(&'a str);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "empty" } else { self.0 })
    }
}

/// The page `docs/env.md`.
pub fn markdown() -> String {
    let mut page = String::from(
        "# Environment\n\n\
         Read at each init. Railhead's own name wins over the alias. A value that is not accepted is reported as a warning and the default\n\
         used; so is an unknown RAILHEAD_ name. Whatever differs from its default is logged once per init, at INFO.\n\n\
         This page is generated from the table in `src/base/config.rs` (`make docs`).\n\n\
         | name | alias | default | accepted | meaning |\n|---|---|---|---|---|\n",
    );
    for row in rows() {
        let alias = row.alias.map_or(String::new(), |alias| format!("`{alias}`"));
        let default = if row.default.is_empty() { "empty".into() } else { format!("`{}`", row.default) };
        // Writing to a String cannot fail.
        let _ = writeln!(page, "| `{}` | {alias} | {default} | {} | {} |", row.env, row.accepted, row.doc);
    }
    page
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    /// The settings that these variables give, and what was said about them.
    fn read(vars: &[(&str, &str)]) -> (Config, Vec<(Level, String)>) {
        let env: HashMap<&str, OsString> = vars.iter().map(|&(name, value)| (name, value.into())).collect();
        let mut said = Vec::new();
        let names = vars.iter().map(|(name, _)| name.to_string());
        let config = Config::from(&|name| env.get(name).cloned(), names, &mut |level, text| said.push((level, text)));
        (config, said)
    }

    #[test]
    fn nothing_set_gives_the_defaults_in_silence() {
        assert_eq!(read(&[]), (Config::default(), vec![]));
        assert_eq!(read(&[("NCCL_DEBUG", "INFO"), ("PATH", "/bin")]), (Config::default(), vec![]));
    }

    #[test]
    fn every_default_is_accepted_where_it_is_written_out() {
        for row in rows() {
            for name in [Some(row.env), row.alias].into_iter().flatten() {
                assert_eq!(read(&[(name, &row.default)]), (Config::default(), vec![]), "{name}={}", row.default);
            }
        }
    }

    #[test]
    fn a_value_is_taken_and_told_once_with_its_source() {
        let (config, said) = read(&[("RAILHEAD_SHM_BOUNCE_KIB", " 0x80 "), ("NCCL_SOCKET_IFNAME", "^lo,eth")]);
        assert_eq!(config, Config { shm_bounce_kib: 128, socket_ifname: "^lo,eth".into(), ..Config::default() });
        let told: Vec<_> = said.iter().map(|(level, text)| (*level, text.as_str())).collect();
        assert_eq!(
            told,
            [(Level::Info, "RAILHEAD_SHM_BOUNCE_KIB=128"), (Level::Info, "NCCL_SOCKET_IFNAME=^lo,eth (as RAILHEAD_SOCKET_IFNAME)")]
        );
    }

    #[test]
    fn our_own_name_wins_over_the_alias() {
        let (config, said) = read(&[("NCCL_IB_TC", "8"), ("RAILHEAD_TC", "9")]);
        assert_eq!(config.traffic_class, 9);
        assert_eq!(said.len(), 1);
        // Even where it only says the default.
        assert_eq!(read(&[("NCCL_IB_TC", "8"), ("RAILHEAD_TC", "-1")]), (Config::default(), vec![]));
    }

    #[test]
    fn a_bad_value_is_reported_with_the_accepted_ones_and_the_default_stands() {
        let cases = [
            ("RAILHEAD_SHM_BOUNCE_KIB", "63", "64..65536"),
            ("RAILHEAD_SHM_BOUNCE_KIB", "65537", "64..65536"),
            ("RAILHEAD_SHM_BOUNCE_KIB", "", "64..65536"),
            ("RAILHEAD_SHM_BOUNCE_KIB", "0x", "64..65536"),
            ("RAILHEAD_SHM_BOUNCE_KIB", "128k", "64..65536"),
            ("RAILHEAD_SHM_BOUNCE_KIB", "-128", "64..65536"),
            ("RAILHEAD_SHM_BOUNCE_KIB", "99999999999999999999", "64..65536"),
            ("NCCL_NSOCKS_PERTHREAD", "-2", "0..16"),
            ("RAILHEAD_TC", "-2", "-1..255"),
            ("RAILHEAD_TC", "256", "-1..255"),
            ("RAILHEAD_FABRIC", "ib", "auto, verbs, soft"),
            ("RAILHEAD_SOFT_WIRE", "", "auto, shm, tcp"),
            ("RAILHEAD_CMA", "2", "auto, 1, 0"),
            ("RAILHEAD_PORT_RANGE", "80-90", "LOW-HIGH"),
            ("RAILHEAD_PORT_RANGE", "3000-2999", "LOW-HIGH"),
            ("RAILHEAD_PORT_RANGE", "3000", "LOW-HIGH"),
            ("RAILHEAD_PORT_RANGE", "3000-65536", "LOW-HIGH"),
            ("RAILHEAD_STALL_WARN_S", "86400.001", "0..86400, in thousandths"),
            ("RAILHEAD_STALL_WARN_S", "0.0001", "thousandths"),
            ("RAILHEAD_STALL_WARN_S", ".5", "thousandths"),
            ("RAILHEAD_STALL_WARN_S", "1.", "thousandths"),
            ("RAILHEAD_STALL_WARN_S", "-1", "thousandths"),
            ("RAILHEAD_STALL_WARN_S", "1e3", "thousandths"),
            ("RAILHEAD_STALL_WARN_S", "9999999999", "thousandths"),
            ("RAILHEAD_TCP_CONGESTION", "", "algorithm"),
            ("RAILHEAD_TCP_CONGESTION", "sixteen_letters_", "algorithm"),
            ("RAILHEAD_TCP_CONGESTION", "../bbr", "algorithm"),
        ];
        for (name, value, accepted) in cases {
            let (config, said) = read(&[(name, value)]);
            assert_eq!(config, Config::default(), "{name}={value}");
            assert_eq!(said.len(), 1, "{name}={value}");
            assert_eq!(said[0].0, Level::Warn, "{name}={value}");
            assert!(said[0].1.contains(&format!("{name}={value} ")) && said[0].1.contains(accepted), "{}", said[0].1);
        }
    }

    #[test]
    fn seconds_have_thousandths() {
        for (text, nanos, shown) in
            [("0.2", 200_000_000, "0.2"), ("10", 10_000_000_000, "10"), ("0.005", 5_000_000, "0.005"), ("0", 0, "0")]
        {
            let (config, said) = read(&[("RAILHEAD_STALL_WARN_S", text)]);
            assert_eq!(config.stall_warn_s.nanos(), nanos, "{text}");
            assert!(
                said.iter().all(|(level, said)| *level == Level::Info && *said == format!("RAILHEAD_STALL_WARN_S={shown}")),
                "{said:?}"
            );
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_a_bad_value() {
        let mut said = Vec::new();
        // Any text would do here.
        let env = |name: &str| (name == "RAILHEAD_FORCE_MERGE").then(|| OsString::from_vec(vec![b'a', 0xff]));
        let config = Config::from(&env, std::iter::empty(), &mut |level, _| said.push(level));
        assert_eq!((config, said), (Config::default(), vec![Level::Warn]));
    }

    #[test]
    fn both_ends_of_a_range_and_every_choice_are_accepted() {
        for row in rows() {
            let values: Vec<&str> = match row.accepted.split_once("..") {
                Some((low, high)) if !row.accepted.contains('`') => vec![low, high.split(',').next().unwrap_or_default()],
                _ if row.accepted.contains('`') || row.accepted == "any text" => continue,
                _ => row.accepted.split(", ").collect(),
            };
            assert!(values.len() >= 2, "{}", row.env);
            for value in values {
                let upper = value.to_ascii_uppercase();
                for (_, said) in [read(&[(row.env, value)]), read(&[(row.env, &upper)])] {
                    assert!(said.iter().all(|(level, _)| *level == Level::Info), "{said:?}");
                }
            }
        }
    }

    #[test]
    fn an_unknown_name_of_ours_is_reported() {
        let (config, said) = read(&[("RAILHEAD_FABRICS", "soft")]);
        assert_eq!(config, Config::default());
        assert_eq!(said.len(), 1);
        assert!(said[0].0 == Level::Warn && said[0].1.contains("RAILHEAD_FABRICS is not"), "{said:?}");
        assert!(said[0].1.contains("RAILHEAD_FABRIC is meant"), "{said:?}");
    }

    #[test]
    fn a_port_range_is_read_as_it_was_accepted() {
        assert_eq!(parse_ports("1024-65535"), Some(1024..=65535));
        assert_eq!(parse_ports("4000-4000"), Some(4000..=4000));
        assert_eq!(parse_ports(""), None);
    }

    #[test]
    fn the_page_has_a_row_for_every_setting() {
        let page = markdown();
        for name in NAMES {
            assert_eq!(page.matches(&format!("| `{name}` |")).count(), 1, "{name}");
        }
        assert!(page.contains("| `RAILHEAD_SPLIT_MIN` |  | `65536` | 128..1073741824 |"), "{page}");
    }
}
