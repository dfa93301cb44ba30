//! The settings: one table, read from the environment at each init, on the thread that calls init; plain data afterwards.
//!
//! `docs/env.md` is [`markdown`] of this table. To add a setting, add a row.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::fmt::{self, Write};
use std::ops::RangeInclusive;

use crate::base::fd;
use crate::base::log::{self, Level, log_info, log_warn};
use crate::base::stage;
use crate::base::thread::Cpus;

mod effective;
mod seconds;
mod secret;
mod value;

pub use effective::{Effective, Setting, Source, Unknown};
pub use seconds::Seconds;
pub use secret::Secret;
use value::{Text, Value, choice};

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
        /// Where that is faster than two copies through a bounce ring.
        Auto = "auto",
        /// Wherever the kernel lets us.
        Always = "1",
        /// Nowhere.
        Never = "0",
    }
}

choice! {
    /// Which threads make progress.
    Progress {
        /// A thread that calls into a comm, for this comm; one of the device, rarely, for peers whose rail has failed and whom no caller answers.
        Poll = "poll",
        /// A thread that calls into a comm, and nothing else.
        Caller = "caller",
        /// And a thread of each device, for all of its comms.
        Thread = "thread",
    }
}

choice! {
    /// A signal that an application may leave unused.
    DumpSignal {
        /// No signal.
        None = "none",
        /// 10 on most machines.
        Usr1 = "SIGUSR1",
        /// 12 on most machines.
        Usr2 = "SIGUSR2",
        /// 3: Ctrl-\ on a terminal.
        Quit = "SIGQUIT",
    }
}

impl DumpSignal {
    /// Its number.
    pub fn number(self) -> Option<i32> {
        match self {
            DumpSignal::None => None,
            DumpSignal::Usr1 => Some(libc::SIGUSR1),
            DumpSignal::Usr2 => Some(libc::SIGUSR2),
            DumpSignal::Quit => Some(libc::SIGQUIT),
        }
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
const HCAS: Text = Text { accepted: "`[^][=]prefix[:port[:rail[:plane]]],...`", check: |_| true };
const CIDR: Text = Text {
    accepted: "`address/bits`, or empty",
    check: |text| {
        let (net, bits) = text.split_once('/').unwrap_or((text, "0"));
        let most = |net: std::net::IpAddr| if net.is_ipv4() { 32 } else { 128 };
        text.is_empty() || net.trim().parse().is_ok_and(|net| bits.trim().parse::<u32>().is_ok_and(|bits| bits <= most(net)))
    },
};
const ADDRESS: Text =
    Text { accepted: "`address`, IPv4 or IPv6, or empty", check: |text| text.is_empty() || text.parse::<std::net::IpAddr>().is_ok() };
const CPUS: Text =
    Text { accepted: "a list of processors such as `0-3,8`, each below 1024, or empty", check: |text| Cpus::parse(text).is_some() };
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
    /// This variable's value is not accepted; the text shows it.
    Bad(&'static str, String),
}

macro_rules! table {
    ($($field:ident: $type:ty, $env:literal $(or $alias:literal)?, $default:expr, $limits:expr, $doc:literal;)*) => {
        /// Every setting, by the lower-case rest of its variable's name.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Config {
            $(#[doc = $doc] pub $field: $type,)*
            /// The aliases that values other than the default were taken from.
            pub aliases: Vec<&'static str>,
        }

        impl Default for Config {
            fn default() -> Self {
                Config { $($field: $default,)* aliases: Vec::new() }
            }
        }

        impl Config {
            fn read(env: &impl Fn(&str) -> Option<OsString>, log: &mut impl FnMut(Level, String)) -> Config {
                Config {
                    $($field: setting($env, [$($alias)?].first().copied(), $default, &$limits, env, log),)*
                    aliases: effective::aliases(env),
                }
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
        "Whether bulk data on one host is copied straight between the two processes (process_vm_readv and process_vm_writev), or else passes through a bounce ring. `auto` measures which is faster, again and again.";
    shm_bounce_kib: u32, "RAILHEAD_SHM_BOUNCE_KIB", 256, 64..=65536,
        "Size of the bounce ring per connection and direction, in KiB, rounded up to a power of two.";
    tcp_streams: u32, "RAILHEAD_TCP_STREAMS" or "NCCL_NSOCKS_PERTHREAD", 0, 0..=16,
        "TCP data streams per queue pair in addition to its control stream. 0: data travels on the control stream.";
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
    failover: bool, "RAILHEAD_FAILOVER", true, (),
        "Whether a comm of several rails goes on when one fails, and takes it up again, if both ends have it so. 0: it fails with it.";
    rail_timeout_s: u32, "RAILHEAD_RAIL_TIMEOUT_S", 30, 0..=86400,
        "Seconds for which a comm of several rails waits if none of them works, as long as its control connection lasts: if the network is silent, for RAILHEAD_TCP_USER_TIMEOUT_S. 0: it fails at once. A mesh has no such connection: its pairs always do.";
    traffic_class: i32, "RAILHEAD_TC" or "NCCL_IB_TC", -1, -1..=255,
        "Traffic class of the data (IPv4 TOS, IPv6 traffic class). -1: what the communicator asks for, else the system's.";
    force_merge: String, "RAILHEAD_FORCE_MERGE" or "NCCL_NET_FORCE_MERGE", String::new(), ANY_TEXT,
        "Devices that may be merged into one although they are not ports of one NIC, in NCCL's syntax: `a,b;c,d`.";
    ib_disable: bool, "RAILHEAD_IB_DISABLE" or "NCCL_IB_DISABLE", false, (),
        "1: RDMA NICs are not used.";
    ib_hca: String, "RAILHEAD_IB_HCA" or "NCCL_IB_HCA", String::new(), HCAS,
        "RDMA ports to use: a list of device name prefixes, with a port or without, and where in the network they are; `=` asks for whole names, `^` excludes. Empty: all.";
    ib_gid_index: i32, "RAILHEAD_IB_GID_INDEX" or "NCCL_IB_GID_INDEX", -1, -1..=255,
        "Index of the GID of every RDMA port. -1: the first one of the wanted version and family; `railhead info` shows it.";
    ib_flid_gid_index: u32, "RAILHEAD_IB_ROUTABLE_FLID_GID_INDEX" or "NCCL_IB_ROUTABLE_FLID_GID_INDEX", 1, 0..=255,
        "Index of the GID of an InfiniBand port that routers reach, taken where it has an FLID; else index 0 is.";
    ib_roce_version: u32, "RAILHEAD_IB_ROCE_VERSION" or "NCCL_IB_ROCE_VERSION_NUM", 2, 1..=2,
        "RoCE version of the GID, if there is one.";
    ib_addr_family: Family, "RAILHEAD_IB_ADDR_FAMILY" or "NCCL_IB_ADDR_FAMILY", Family::Inet, (),
        "Address family of the GID, if there is one.";
    ib_addr_range: String, "RAILHEAD_IB_ADDR_RANGE" or "NCCL_IB_ADDR_RANGE", String::new(), CIDR,
        "Addresses that the GID must be among. Empty: any.";
    ib_pkey: u32, "RAILHEAD_IB_PKEY" or "NCCL_IB_PKEY", 0, 0..=65535,
        "Index of the partition key.";
    ib_sl: i32, "RAILHEAD_IB_SL" or "NCCL_IB_SL", -1, -1..=15,
        "InfiniBand service level. -1: 0.";
    ib_timeout: u32, "RAILHEAD_IB_TIMEOUT" or "NCCL_IB_TIMEOUT", 20, 0..=31,
        "How long a NIC waits for an acknowledgement: 4.096 us x 2^value. 0: for ever.";
    ib_retry_cnt: u32, "RAILHEAD_IB_RETRY_CNT" or "NCCL_IB_RETRY_CNT", 7, 0..=7,
        "How often a NIC sends again before the peer counts as gone. Soft-RoCE takes 7 as for ever.";
    ib_use_inline: bool, "RAILHEAD_IB_USE_INLINE" or "NCCL_IB_USE_INLINE", true, (),
        "Whether small messages are handed to the NIC with the request, where it can take them.";
    ib_relaxed_ordering: u32, "RAILHEAD_IB_RELAXED_ORDERING" or "NCCL_IB_PCI_RELAXED_ORDERING", 2, 0..=2,
        "Whether a NIC may write the bytes of a message in any order. 0: no; 1, 2: where the driver knows it. Never flags.";
    ib_async_errors: bool, "RAILHEAD_IB_ASYNC_ERRORS" or "NCCL_IB_RETURN_ASYNC_EVENTS", true, (),
        "Whether fatal events of a NIC fail the comms that they concern, rather than only being reported.";
    ib_adaptive_routing: i32, "RAILHEAD_IB_ADAPTIVE_ROUTING" or "NCCL_IB_ADAPTIVE_ROUTING", -1, -1..=1,
        "Whether the network takes several paths for one connection. -1: on InfiniBand.";
    ib_ar_threshold: u32, "RAILHEAD_IB_AR_THRESHOLD" or "NCCL_IB_AR_THRESHOLD", 8192, 0..=1 << 30,
        "With adaptive routing: bytes above which a message's data is one WRITE and its notification another, as only plain WRITEs are routed freely.";
    ib_split_data: bool, "RAILHEAD_IB_SPLIT_DATA" or "NCCL_IB_SPLIT_DATA_ON_QPS", false, (),
        "Whether a message is striped over all queue pairs of a NIC's connection. Else it takes one per rail, the next message the next one.";
    ib_merge_vfs: bool, "RAILHEAD_IB_MERGE_VFS" or "NCCL_IB_MERGE_VFS", true, (),
        "Whether virtual functions of a NIC count as one PCI device with it, as its ports do.";
    ib_merge_nics: bool, "RAILHEAD_IB_MERGE_NICS" or "NCCL_IB_MERGE_NICS", true, (),
        "Whether RDMA NICs may be merged into one device, whoever asks for it. Where not, each remains a device of its own.";
    ib_ece: bool, "RAILHEAD_IB_ECE" or "NCCL_IB_ECE_ENABLE", true, (),
        "Whether the two NICs of a connection agree on enhancements (enhanced connection establishment), where both have some.";
    ib_query_speed: bool, "RAILHEAD_IB_QUERY_SPEED" or "NCCL_IB_QUERY_PORT_SPEED", true, (),
        "Whether a port's speed is asked for by ibv_query_port_speed, where libibverbs and the driver have it, rather than computed from its width and its lanes' speed.";
    ib_fifo_tc: i32, "RAILHEAD_IB_FIFO_TC" or "NCCL_IB_FIFO_TC", -1, -1..=255,
        "Traffic class of a receiver's clear-to-sends. -1: as the data.";
    max_half_open: u32, "RAILHEAD_MAX_HALF_OPEN", 64, 1..=4096,
        "Unfinished handshakes that one listener keeps, of those that have sent nothing and of those that have begun, but at most a sixteenth of RLIMIT_NOFILE; the oldest is dropped for a newer one of its kind.";
    handshake_timeout_s: u32, "RAILHEAD_HANDSHAKE_TIMEOUT_S", 10, 1..=3600,
        "Seconds that an incoming handshake may take after its first byte.";
    peer_timeout_s: u32, "RAILHEAD_PEER_TIMEOUT_S", 0, 0..=86400,
        "Seconds after which a peer that lives but does not answer is an error. They count while somebody waits for it, of a mesh from when its ranks are connected. 0: never, it is only reported.";
    tcp_user_timeout_s: u32, "RAILHEAD_TCP_USER_TIMEOUT_S", 60, 0..=86400,
        "Seconds that a peer's host may be silent before its TCP connections count as dead; a peer that lives and does not read may take any time. 0: the system's default.";
    stall_warn_s: Seconds, "RAILHEAD_STALL_WARN_S", Seconds::new(10), 86400,
        "Seconds after which a request that is still outstanding is reported, once, with what it waits for. 0: never.";
    fabric_timeout_s: u32, "RAILHEAD_FABRIC_TIMEOUT_S", 30, 1..=86400,
        "Seconds that a request posted to a NIC may take to complete (RAILHEAD_FABRIC=verbs). The software fabric knows more: see RAILHEAD_TCP_USER_TIMEOUT_S.";
    store_bind: String, "RAILHEAD_STORE_BIND", String::new(), ADDRESS,
        "Address that a store's server listens on. Empty: all addresses, as torch does. Anything else is an error where a server is to start.";
    store_secret: Secret, "RAILHEAD_STORE_SECRET", Secret::default(), (),
        "A secret that a store's server and clients share; a client that does not know it is refused. torch's clients cannot know it, and torch's servers have none. Empty: none. What is not accepted is an error where a store is opened. Never shown.";
    progress: Progress, "RAILHEAD_PROGRESS", Progress::Poll, (),
        "Which threads make progress. `poll`: the one that calls the plugin, for the comm of the call; where a comm has several rails, a thread as well that answers a peer whose rail has failed while nobody calls. `caller`: without that thread. `thread`: a thread of each device as well, for hosts that call rarely. With a thread, each call takes a lock.";
    proxy_cpuset: String, "RAILHEAD_PROXY_CPUSET" or "NCCL_PROXY_CPUSET", String::new(), CPUS,
        "Processors that the threads which move data run on. Empty: where the thread that starts them may. Threads that only wait for events run anywhere.";
    dump_signal: DumpSignal, "RAILHEAD_DUMP_SIGNAL", DumpSignal::None, (),
        "A signal at which each proxy, mesh and manager of tensors, and each device's thread under RAILHEAD_PROGRESS=thread, logs its operations and what they wait for, as warnings. Read when one of those is made, too. A handler that the application has for the signal is called as well, each time; the system's own action for it, such as SIGQUIT's end of the process, no longer happens.";
    debug: Debug, "RAILHEAD_DEBUG", Debug::None, (),
        "Which messages go to stderr, whatever NCCL_DEBUG says.";
    stats: bool, "RAILHEAD_STATS", true, (),
        "Whether counters and wait times are kept where other processes of this user can read them.";
}

impl Config {
    /// Unauthenticated connections of either kind that a listener keeps: RAILHEAD_MAX_HALF_OPEN, as far as the descriptors allow it.
    pub fn half_open_max(&self) -> usize {
        let of_limit = fd::limit().map_or(u64::MAX, |limit| limit.rlim_cur / 16).max(1);
        u64::from(self.max_half_open).min(of_limit) as usize
    }

    /// Reads the environment, logs what is wrong or unusual in it, and applies RAILHEAD_DEBUG. Once per init.
    pub fn from_env() -> Config {
        Config::from_env_or(Debug::None)
    }

    /// The same; `otherwise` decides which messages go to stderr if RAILHEAD_DEBUG is not set.
    pub fn from_env_or(otherwise: Debug) -> Config {
        let env = |name: &str| std::env::var_os(name);
        // First, so that it governs the messages about the rest.
        Config::apply_debug(otherwise);
        stage::init();
        let names = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
        Config::from(&env, names, &mut |level, message| match level {
            Level::Warn => log_warn!(log::ENV, "{message}"),
            _ => log_info!(log::ENV, "{message}"),
        })
    }

    /// Applies RAILHEAD_DEBUG, and reads nothing else.
    pub fn apply_debug(otherwise: Debug) {
        let debug = Debug::parse(std::env::var("RAILHEAD_DEBUG").unwrap_or_default().trim(), &());
        log::set_stderr(debug.unwrap_or(otherwise).level());
    }

    /// Reads from `env`, and logs nothing: init logs what is wrong.
    pub fn quietly(env: &impl Fn(&str) -> Option<OsString>) -> Config {
        Config::read(env, &mut |_, _| ())
    }

    /// The variable that a setting was taken from, for messages about its value: NCCL's name if it was that, else `own`, Railhead's.
    pub fn variable(&self, own: &'static str) -> &'static str {
        let alias = rows().into_iter().find(|row| row.env == own).and_then(|row| row.alias);
        alias.filter(|alias| self.aliases.contains(alias)).unwrap_or(own)
    }

    fn from(env: &impl Fn(&str) -> Option<OsString>, names: impl Iterator<Item = String>, log: &mut impl FnMut(Level, String)) -> Config {
        let config = Config::read(env, log);
        for Unknown { name, nearest } in effective::unknown(names) {
            let hint = nearest.map_or(String::new(), |nearest| format!(": did you mean {nearest}?"));
            log(Level::Warn, format!("{name} is not a setting of Railhead{hint}; see docs/env.md"));
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
    match T::read(&text, limits) {
        Some(value) => Found::Value(source, value),
        None => Found::Bad(source, T::show_rejected(&text)),
    }
}

/// The value of one row. A bad value is reported, and the default used.
fn setting<T: Value>(
    name: &'static str,
    alias: Option<&'static str>,
    default: T,
    limits: &T::Limits,
    env: &impl Fn(&str) -> Option<OsString>,
    log: &mut impl FnMut(Level, String),
) -> T {
    match find::<T>(name, alias, limits, env) {
        Found::Nothing => default,
        Found::Value(source, value) => {
            if value != default {
                let meaning = if source == name { String::new() } else { format!(" (as {name})") };
                log(Level::Info, format!("{source}={}{meaning}", value.show()));
            }
            value
        }
        Found::Bad(source, text) => {
            let (complaint, default_text) = (complaint(source, &text, &T::accepted(limits)), default.show());
            log(Level::Warn, format!("{complaint}; using the default, {}", Shown(&default_text)));
            default
        }
    }
}

fn complaint(source: &str, text: &str, accepted: &str) -> String {
    format!("{source}={text} is not accepted ({accepted})")
}

/// A value in a sentence: an empty one is shown as a word.
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
mod tests;
