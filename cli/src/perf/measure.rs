//! Measures rows of a table: one or two plugins and the limits beside them, in turn, round by round, so that what drifts on the machine
//! drifts for all. Used by the coordinator.

use serde::Serialize;

use super::message::{AHEAD, Bandwidth, Block, Latency, STEP, Work};
use super::series::{Sample, Series, Shared};
use super::summary::Summary;

/// How long, and how often.
#[derive(Debug, Clone, Copy)]
pub struct Effort {
    /// Rounds of each.
    pub rounds: usize,
    /// Seconds of a round, about.
    pub seconds: f64,
}

/// One line of a table.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// What was moved.
    #[serde(flatten)]
    pub what: What,
    /// Of `figure`, here and below.
    pub unit: &'static str,
    /// One per plugin.
    pub plugins: Vec<Figure>,
    /// First plugin to second.
    pub ratio: Option<Summary>,
    /// Measured in the same rounds.
    pub limits: Vec<Limit>,
}

/// What a row is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum What {
    /// Bytes per second.
    Bandwidth {
        /// Of a message, in bytes.
        size: usize,
        /// Of a receive.
        recv_size: usize,
        /// Per comm and direction.
        outstanding: usize,
        /// In use.
        comms: usize,
        /// Both directions at once.
        two_way: bool,
        /// Every byte written and read by the application.
        touch: bool,
    },
    /// Half a round trip.
    Latency {
        /// Of a message, in bytes.
        size: usize,
        /// Of a receive.
        recv_size: usize,
        /// Receives that are posted at any time.
        ahead: usize,
    },
}

/// A plugin's part of a row.
#[derive(Debug, Clone, Serialize)]
pub struct Figure {
    /// Over the rounds.
    pub figure: Summary,
    /// Of all comms and directions.
    pub messages_per_s: f64,
    /// Bytes that the rounds moved.
    pub timed_bytes: u64,
    /// All that were moved for this row: also to check every byte, and to find how long a round is. What other counters show.
    pub bytes: u64,
    /// Both ranks' user and system time; none where no bytes move.
    pub cpu_s_per_gb: Option<f64>,
}

/// A limit's part of a row.
#[derive(Debug, Clone, Serialize)]
pub struct Limit {
    /// Which.
    pub name: &'static str,
    /// How it was measured.
    pub note: Option<String>,
    /// Why there is no figure.
    pub refused: Option<String>,
    /// Over the rounds.
    pub figure: Option<Summary>,
    /// Each plugin to this limit, round by round.
    pub ratios: Vec<Summary>,
}

/// Size of the limit for small messages over TCP.
pub const PING: usize = 8;

/// The limits that a row is shown beside.
pub fn limits_of(what: &What) -> Vec<Work> {
    match *what {
        What::Bandwidth { size: 0, .. } => Vec::new(),
        What::Bandwidth { size, outstanding, comms, .. } => {
            let block = Block { size, slots: slots(outstanding) * comms };
            vec![Work::Memcpy(block), Work::Readv(block), Work::TcpStream(block)]
        }
        What::Latency { .. } => vec![Work::Ring, Work::CacheLine, Work::TcpPingPong { size: PING }],
    }
}

/// The name of a limit in tables and options.
pub fn limit_name(work: &Work) -> &'static str {
    match work {
        Work::Memcpy(_) => "memcpy",
        Work::Readv(_) => "readv",
        Work::CacheLine => "cache-line",
        Work::Ring => "ring",
        Work::TcpStream(_) => "tcp-stream",
        Work::TcpPingPong { .. } => "tcp-ping-pong",
        Work::Bandwidth(_) | Work::Latency(_) | Work::Churn { .. } => "plugin",
    }
}

/// NCCL has 8 slots in a buffer (NCCL_STEPS), however many it posts.
pub fn slots(outstanding: usize) -> usize {
    outstanding.max(8)
}

impl Row {
    /// Of a message, in bytes.
    pub fn size(&self) -> usize {
        match self.what {
            What::Bandwidth { size, .. } | What::Latency { size, .. } => size,
        }
    }
}

impl What {
    /// Half a round trip, with receives posted as NCCL does.
    pub fn latency(size: usize) -> What {
        What::Latency { size, recv_size: size.max(STEP), ahead: AHEAD }
    }

    /// Throughput of one comm with eight outstanding, with receives as NCCL posts them.
    pub fn bulk(size: usize) -> What {
        What::Bandwidth { size, recv_size: size.max(STEP), outstanding: 8, comms: 1, two_way: false, touch: false }
    }

    /// The plugin's work for it.
    pub fn work(&self) -> Work {
        match *self {
            What::Bandwidth { size, recv_size, outstanding, comms, two_way, touch } => {
                Work::Bandwidth(Bandwidth { size, recv_size, outstanding, slots: slots(outstanding), comms, two_way, touch })
            }
            What::Latency { size, recv_size, ahead } => Work::Latency(Latency { size, recv_size, ahead }),
        }
    }

    /// How messages go where that is not the usual: what a title has behind its subject.
    pub fn manner(&self) -> &'static str {
        match self {
            What::Bandwidth { two_way: true, touch: true, .. } => ", both directions together, every byte touched",
            What::Bandwidth { two_way: true, .. } => ", both directions together",
            What::Bandwidth { touch: true, .. } => ", every byte touched",
            What::Bandwidth { .. } | What::Latency { .. } => "",
        }
    }

    /// Whether its figures are of both directions, which those of limits never are.
    pub fn two_way(&self) -> bool {
        matches!(self, What::Bandwidth { two_way: true, .. })
    }

    fn unit(&self) -> (&'static str, fn(f64) -> f64) {
        match self {
            What::Bandwidth { .. } => ("GB/s", |v| v * 1e-9),
            What::Latency { .. } => ("us", |v| v * 1e6),
        }
    }
}

/// Each series once per round.
pub fn interleave(all: &[Series], rounds: usize, mut after: impl FnMut()) -> anyhow::Result<Vec<Vec<Sample>>> {
    let mut samples = vec![Vec::with_capacity(rounds); all.len()];
    for _ in 0..rounds {
        for (series, samples) in all.iter().zip(&mut samples) {
            samples.push(series.round()?);
            after();
        }
    }
    Ok(samples)
}

/// Measures a row: `plugins` in turn, and the limits among `wanted` on `bare`.
pub fn row(
    plugins: &[Shared],
    bare: Option<&Shared>,
    wanted: &[&str],
    what: What,
    effort: Effort,
    after: impl FnMut(),
) -> anyhow::Result<Row> {
    let (unit, scale) = what.unit();
    let mut all = plugins.iter().map(|pair| Series::prepare(pair, what.work())).collect::<anyhow::Result<Vec<_>>>()?;
    let mut limits = Vec::new();
    if let Some(bare) = bare {
        for work in limits_of(&what).into_iter().filter(|work| wanted.contains(&limit_name(work))) {
            let (name, prepared) = (limit_name(&work), Series::prepare(bare, work));
            let refused = prepared.as_ref().err().map(|error| format!("{error:#}"));
            limits.push(Limit { name, note: None, refused, figure: None, ratios: Vec::new() });
            all.extend(prepared);
        }
    }
    for series in &mut all {
        series.calibrate(effort.seconds)?;
    }
    let samples = interleave(&all, effort.rounds, after)?;
    let figures: Vec<Vec<f64>> =
        all.iter().zip(&samples).map(|(series, samples)| samples.iter().map(|s| scale(series.figure(s))).collect()).collect();
    let (ours, others) = figures.split_at(plugins.len());
    let measured = limits.iter_mut().filter(|limit| limit.refused.is_none());
    for ((limit, series), figures) in measured.zip(&all[plugins.len()..]).zip(others) {
        limit.note.clone_from(&series.note);
        limit.figure = Summary::of(figures.iter().copied());
        limit.ratios = ours.iter().filter_map(|ours| Summary::of_ratios(ours, figures)).collect();
    }
    let mut plugins: Vec<Figure> =
        all.iter().zip(&samples).zip(ours).filter_map(|((series, samples), figures)| figure(series, samples, figures)).collect();
    let ratio = if let [a, b] = ours { Summary::of_ratios(a, b) } else { None };
    let mut all = all.into_iter();
    for (plugin, series) in plugins.iter_mut().zip(all.by_ref()) {
        plugin.bytes = series.release()?;
    }
    all.try_for_each(|limit| limit.release().map(drop))?;
    Ok(Row { what, unit, plugins, ratio, limits })
}

fn figure(series: &Series, samples: &[Sample], figures: &[f64]) -> Option<Figure> {
    let flows = match series.work {
        Work::Bandwidth(b) => b.comms * (1 + usize::from(b.two_way)),
        _ => 2,
    };
    let median = |values: Vec<f64>| Summary::of(values).map(|s| s.median);
    let bytes = |s: &Sample| series.bytes(s);
    Some(Figure {
        figure: Summary::of(figures.iter().copied())?,
        messages_per_s: median(samples.iter().map(|s| flows as f64 * s.messages as f64 / s.seconds).collect())?,
        timed_bytes: samples.iter().map(|s| bytes(s) as u64).sum(),
        bytes: 0,
        cpu_s_per_gb: median(samples.iter().filter(|s| bytes(s) > 0.0).map(|s| s.cpu_s / (bytes(s) * 1e-9)).collect()),
    })
}
