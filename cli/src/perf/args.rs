//! The command line of `railhead perf`, and what is wrong with it. Read once, by the coordinator.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail, ensure};

use super::measure::Effort;
use super::message::{AHEAD, MAX_AHEAD, MAX_OUTSTANDING, MAX_SIZE, STEP};
use super::os;
use crate::number::{ABIS, within};

/// Measures a plugin between two ranks, beside what the machine can do without one.
///
/// Two processes load the plugin as NCCL does and move messages from and to ordinary memory, one busy thread each. Every byte is checked
/// before anything is timed. While it is, a sequence number in each message is: all of it from 8 bytes on, its low bytes in smaller ones.
/// GB are 10^9 bytes.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The plugin: any shared library that exports ncclNetPlugin_v4 to v12. Or one of those inside NCCL: `nccl:FILE` is the Socket of libnccl.so.2,
    /// `nccl-ib:FILE` its net_ib.
    #[arg(long, value_name = "FILE", required_unless_present = "rank")]
    pub plugin: Option<PathBuf>,
    /// Version of NCCL's table, 4 to 12; the newest that the plugin exports if not given.
    #[arg(long, value_parser = within(ABIS))]
    pub abi: Option<u32>,
    /// Device of the plugin.
    #[arg(long, default_value_t = 0, allow_negative_numbers = true, value_parser = within(0..=i32::MAX))]
    pub dev: i32,
    /// Another plugin, measured in turn with the first: A B A B.
    #[arg(long, value_name = "OTHER", conflicts_with_all = ["connect", "listen"])]
    pub compare: Option<PathBuf>,
    /// Sizes of messages, 0 to 64M: a list of sizes and of ranges LOW..HIGH in powers of two.
    /// 0,8,64,512,4K,16K,64K,256K,1M,4M,16M,64M if not given.
    #[arg(long, value_name = "LIST")]
    pub sizes: Option<String>,
    /// Bytes of a receive, 0 to 64M: a message fills what it has of it, and a longer one has a receive of its own size. With 0 all have. A step of NCCL's,
    /// 512K, if not given.
    #[arg(long, value_name = "SIZE")]
    pub recv_size: Option<String>,
    /// For half round trips, receives that are posted at any time, 0 to 8; with 0, one when it is waited for. 4 if not given: NCCL posts those of a
    /// few steps before anything comes. (With bandwidth, as many as are outstanding.)
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = within(0..=MAX_AHEAD as u32))]
    pub ahead: Option<u32>,
    /// For bandwidth, requests outstanding per comm and direction, 1 to 32: a list. 8 if not given.
    #[arg(long, value_name = "LIST")]
    pub outstanding: Option<String>,
    /// For bandwidth, comms in use at once, 1 to 8: a list. 1 if not given.
    #[arg(long, value_name = "LIST")]
    pub comms: Option<String>,
    /// Whether bandwidth is measured in one direction or in both at once. In one if not given.
    #[arg(long, value_enum)]
    pub direction: Option<Direction>,
    /// For bandwidth, the sender writes and the receiver reads every byte of each message, within the time measured.
    #[arg(long)]
    pub touch: bool,
    /// What to measure.
    #[arg(long, value_enum, default_value = "both")]
    pub what: Subject,
    /// Limits to measure in the same rounds: all, none or a list of memcpy, readv, ring, cache-line, tcp-stream, tcp-ping-pong.
    /// All if not given, and none between two hosts.
    #[arg(long, value_name = "LIST")]
    pub limits: Option<String>,
    /// Rounds of each figure, 1 to 1000; the table shows the median and the spread.
    #[arg(long, default_value_t = 9, value_parser = within(1..=1000u32))]
    pub rounds: u32,
    /// Milliseconds of a round, about, 1 to 10000.
    #[arg(long, value_name = "MS", default_value_t = 40, value_parser = within(1..=10_000u32))]
    pub round_ms: u32,
    /// Seconds without any progress after which the ranks are ended, 1 to 86400.
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = within(1..=86_400u32))]
    pub timeout: u32,
    /// Sets a variable in the ranks' environment only. May be repeated.
    #[arg(long, value_name = "NAME=VALUE")]
    pub env: Vec<String>,
    /// Two different CPUs that the two ranks stay on. With --listen and --connect, each side uses the one of its rank: 1 and 0.
    #[arg(long, value_name = "A,B")]
    pub cpus: Option<String>,
    /// Prints JSON instead of the table.
    #[arg(long)]
    pub json: bool,
    /// Draws the figures and the limits.
    #[arg(long, value_name = "FILE.svg")]
    pub plot: Option<PathBuf>,
    /// Lets a `railhead perf --connect` on another host measure the plugin of this one, once. Give the plugin and its environment here,
    /// everything else there. All addresses and port 18520 if not given.
    #[arg(long, value_name = "ADDR[:PORT]", num_args = 0..=1, default_missing_value = "[::]")]
    #[arg(conflicts_with_all = ["connect", "sizes", "recv_size", "ahead", "outstanding", "comms", "direction", "touch", "what"])]
    #[arg(conflicts_with_all = ["limits", "rounds", "round_ms", "timeout", "json", "plot"])]
    pub listen: Option<String>,
    /// Measures between this host and one that runs `railhead perf --listen`. The port is 18520 if not given.
    #[arg(long, value_name = "HOST[:PORT]")]
    pub connect: Option<String>,
    /// Measures all speed targets of the project and says which are met. With --plot, the sizes are drawn in each setting.
    #[arg(long, conflicts_with_all = ["compare", "listen", "connect", "recv_size", "ahead", "outstanding", "comms", "direction", "touch", "what", "limits"])]
    pub targets: bool,
    /// Makes the kernel refuse cross-memory attach to the plugin.
    #[arg(long, hide = true)]
    pub refuse_cma: bool,
    /// Be a rank; for this program itself.
    #[arg(long, hide = true, exclusive = true)]
    pub rank: bool,
}

/// Of bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Direction {
    /// From rank 0 to rank 1.
    One,
    /// Both at once.
    Two,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Subject {
    /// Half round trips.
    Latency,
    /// Throughput.
    Bandwidth,
    /// First the one, then the other.
    Both,
}

/// Names of all limits.
pub const LIMITS: [&str; 6] = ["memcpy", "readv", "ring", "cache-line", "tcp-stream", "tcp-ping-pong"];

/// `--sizes` if not given.
const SIZES: &str = "0,8,64,512,4K,16K,64K,256K,1M,4M,16M,64M";
/// What `--targets` sets itself.
pub const WIRE: &str = "RAILHEAD_SOFT_WIRE";

impl Args {
    /// Refuses options that would have no effect beside others, where clap cannot.
    pub fn check(&self) -> anyhow::Result<()> {
        let of_bandwidth = [
            ("--outstanding", self.outstanding.is_some()),
            ("--comms", self.comms.is_some()),
            ("--direction", self.direction.is_some()),
            ("--touch", self.touch),
        ];
        let given: Vec<&str> = of_bandwidth.into_iter().filter_map(|(name, given)| given.then_some(name)).collect();
        if self.what == Subject::Latency && !given.is_empty() {
            bail!("--what latency cannot be used with {}: bandwidth only", given.join(", "));
        }
        if self.what == Subject::Bandwidth && self.ahead.is_some() {
            bail!("--what bandwidth cannot be used with --ahead: half round trips only");
        }
        if self.targets {
            ensure!(
                self.sizes.is_none() || self.plot.is_some(),
                "--targets cannot be used with --sizes but for its --plot: targets have theirs"
            );
            if let Some((name, value)) = self.env()?.into_iter().find(|(name, _)| name == WIRE) {
                bail!("--targets cannot be used with --env {name}={value}: it measures each wire");
            }
        }
        Ok(())
    }

    /// `--env`, taken apart.
    pub fn env(&self) -> anyhow::Result<Vec<(String, String)>> {
        let pair = |text: &String| match text.split_once('=') {
            Some((name, value)) if !name.is_empty() && !text.contains('\0') => Ok((name.to_owned(), value.to_owned())),
            _ => bail!("--env {text:?}: NAME=VALUE is wanted"),
        };
        self.env.iter().map(pair).collect()
    }

    /// `--timeout`.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(u64::from(self.timeout))
    }

    /// `--rounds` and `--round-ms`.
    pub fn effort(&self) -> Effort {
        Effort { rounds: self.rounds as usize, seconds: f64::from(self.round_ms) * 1e-3 }
    }

    /// `--cpus`, by rank.
    pub fn cpus(&self) -> anyhow::Result<[Option<usize>; 2]> {
        let Some(text) = &self.cpus else { return Ok([None; 2]) };
        let two = text.split_once(',').and_then(|(a, b)| Some([a.trim().parse().ok()?, b.trim().parse().ok()?]));
        let allowed = os::allowed();
        let two: [usize; 2] = two.with_context(|| {
            format!("--cpus {text:?}: two numbers are wanted, with a comma between them; this process may run on CPUs {allowed}")
        })?;
        let one_host = self.listen.is_none() && self.connect.is_none();
        if one_host && two[0] == two[1] {
            bail!("--cpus {text}: two different CPUs of {allowed} are wanted: on one, each rank would wait for the other to be suspended");
        }
        Ok(two.map(Some))
    }

    /// `--limits`, as names.
    pub fn limits(&self) -> anyhow::Result<Vec<&'static str>> {
        match self.limits.as_deref() {
            None if self.connect.is_some() => Ok(Vec::new()),
            None | Some("all") => Ok(LIMITS.to_vec()),
            Some("none") => Ok(Vec::new()),
            Some(list) => list
                .split(',')
                .map(|name| {
                    let known = LIMITS.iter().find(|known| **known == name.trim());
                    known.copied().with_context(|| format!("--limits: {name:?} is none of all, none, {}", LIMITS.join(", ")))
                })
                .collect(),
        }
    }

    /// `--sizes`, in the order given.
    pub fn sizes(&self) -> anyhow::Result<Vec<usize>> {
        sizes(self.sizes.as_deref().unwrap_or(SIZES)).context("--sizes")
    }

    /// `--recv-size`.
    pub fn recv_size(&self) -> anyhow::Result<usize> {
        self.recv_size.as_deref().map_or(Ok(STEP), |text| size(text).context("--recv-size"))
    }

    /// `--ahead`.
    pub fn ahead(&self) -> usize {
        self.ahead.map_or(AHEAD, |n| n as usize)
    }

    /// `--outstanding`.
    pub fn outstanding(&self) -> anyhow::Result<Vec<usize>> {
        numbers(self.outstanding.as_deref().unwrap_or("8"), MAX_OUTSTANDING).context("--outstanding")
    }

    /// `--comms`.
    pub fn comms(&self) -> anyhow::Result<Vec<usize>> {
        numbers(self.comms.as_deref().unwrap_or("1"), 8).context("--comms")
    }
}

fn numbers(list: &str, most: usize) -> anyhow::Result<Vec<usize>> {
    let number = |text: &str| {
        let n = text.trim().parse().ok().filter(|n| (1..=most).contains(n));
        n.with_context(|| format!("{text:?} is no number from 1 to {most}"))
    };
    unique(list.split(',').map(number).collect::<anyhow::Result<_>>()?)
}

fn sizes(list: &str) -> anyhow::Result<Vec<usize>> {
    let mut all = Vec::new();
    for part in list.split(',') {
        let Some((low, high)) = part.split_once("..") else {
            all.push(size(part)?);
            continue;
        };
        let (low, high) = (size(low)?, size(high)?);
        ensure!(low <= high, "{part:?}: the range goes from the smaller to the larger");
        all.push(low);
        let mut next = (low + 1).next_power_of_two();
        while next <= high {
            all.push(next);
            next *= 2;
        }
    }
    unique(all)
}

fn size(text: &str) -> anyhow::Result<usize> {
    let text = text.trim();
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        _ => (text, 0),
    };
    let bytes = digits.parse::<usize>().ok().and_then(|n| n.checked_mul(1 << shift)).filter(|&n| n <= MAX_SIZE);
    bytes.with_context(|| format!("{text:?} is no size from 0 to 64M (such as 8, 64K, 1M)"))
}

fn unique(list: Vec<usize>) -> anyhow::Result<Vec<usize>> {
    let mut seen = std::collections::HashSet::new();
    Ok(list.into_iter().filter(|n| seen.insert(*n)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_sizes() {
        assert_eq!(sizes("0,8,64K, 1m").unwrap(), [0, 8, 64 << 10, 1 << 20]);
        assert_eq!(sizes("3..20").unwrap(), [3, 4, 8, 16]);
        assert_eq!(sizes("0..4,2").unwrap(), [0, 1, 2, 4]);
        assert_eq!(sizes("64M").unwrap(), [64 << 20]);
        for bad in ["", "65M", "64M,", "x", "8..4", "-1", "1G", "18446744073709551615K", "1..2..3", "é"] {
            assert!(sizes(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn lists_of_numbers() {
        assert_eq!(numbers("1,8, 8", 8).unwrap(), [1, 8]);
        for bad in ["0", "9", "", "1,", "two"] {
            assert!(numbers(bad, 8).is_err(), "{bad:?}");
        }
    }
}
