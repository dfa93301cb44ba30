//! The project's speed targets: each figure measured in turn with its limit, the ratio taken round by round. `make bench` runs this through
//! `railhead perf --targets`; used by the coordinator.

use anyhow::Context;
use serde::Serialize;

use super::measure::{Effort, PING, What, interleave, limit_name, slots};
use super::message::{Bandwidth, Block, MAX_COMMS, Memory, STEP, Work};
use super::report::{aligned, digits, spread};
use super::series::{Sample, Series, Shared};
use super::summary::Summary;
use super::warnings::{Warning, merge};

/// How the ranks are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    /// Shared memory.
    Shm,
    /// Shared memory, and the kernel refuses cross-memory attach.
    ShmNoCma,
    /// TCP.
    Tcp,
}

impl Setting {
    /// All, as they are drawn.
    pub const ALL: [Setting; 3] = [Setting::Shm, Setting::ShmNoCma, Setting::Tcp];

    /// In the table and the plot.
    pub fn name(self) -> &'static str {
        match self {
            Setting::Shm => "shm",
            Setting::ShmNoCma => "shm, no cross-memory attach",
            Setting::Tcp => "tcp",
        }
    }

    /// The value of `args::WIRE`; other plugins do not mind.
    pub fn wire(self) -> &'static str {
        match self {
            Setting::Shm | Setting::ShmNoCma => "shm",
            Setting::Tcp => "tcp",
        }
    }
}

/// What is asked of a ratio.
#[derive(Debug, Clone, Copy)]
enum Bound {
    AtLeast(f64),
    AtMost(f64),
    /// Shown only.
    None,
}

struct Target {
    setting: Setting,
    name: &'static str,
    work: Work,
    limit: Work,
    bound: Bound,
}

/// A line of the table.
#[derive(Debug, Clone, Serialize)]
pub struct Verdict {
    /// How the ranks were started.
    pub setting: &'static str,
    /// Which figure.
    pub name: String,
    /// Of limit and figure.
    pub unit: &'static str,
    /// What the limit is.
    pub limit_name: String,
    /// Over the rounds.
    pub limit: Option<Summary>,
    /// Over the rounds.
    pub figure: Summary,
    /// Round by round.
    pub ratio: Option<Summary>,
    /// What is asked of the ratio, or of the figure where there is no limit.
    pub target: String,
    /// Whether the median keeps it; none where nothing is asked.
    pub met: Option<bool>,
    /// Why it could not be measured, or how the limit was.
    pub note: Option<String>,
    /// What the plugin warned of in the ranks that this was measured with.
    pub warnings: Vec<Warning>,
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// Active comms beside one.
const MANY: usize = 64;
/// Idle comms.
const IDLE: usize = 1000;
/// In what our plugin says of so many: its stats page has no room for all, which nobody reads here.
const NO_RECORD: &str = "the stats page has no comm record left";
/// Memory that an idle comm may take in each process, private and shared.
const IDLE_KIB: f64 = 128.0;

fn bulk(size: usize, touch: bool) -> Work {
    let recv_size = size.max(STEP);
    Work::Bandwidth(Bandwidth { size, recv_size, outstanding: 8, slots: slots(8), comms: 1, two_way: false, touch })
}

fn targets() -> Vec<Target> {
    use Bound::{AtLeast, AtMost};
    use Setting::{Shm, ShmNoCma, Tcp};
    let block = |size| Block { size, slots: slots(8) };
    let (memcpy, stream) = (|size| Work::Memcpy(block(size)), |size| Work::TcpStream(block(size)));
    let target = |setting, name, work, limit, bound| Target { setting, name, work, limit, bound };
    vec![
        target(Shm, "1 MiB x 8", bulk(MIB, false), memcpy(MIB), AtLeast(1.3)),
        target(Shm, "64 KiB x 8", bulk(64 * KIB, false), Work::Readv(block(64 * KIB)), AtLeast(1.2)),
        target(ShmNoCma, "1 MiB x 8", bulk(MIB, false), memcpy(MIB), AtLeast(0.85)),
        target(Shm, "8 B half round trip", What::latency(8).work(), Work::Ring, AtMost(2.0)),
        target(Tcp, "1 MiB x 8", bulk(MIB, false), stream(MIB), AtLeast(0.95)),
        target(Tcp, "64 KiB x 8", bulk(64 * KIB, false), stream(64 * KIB), AtLeast(1.15)),
        target(Tcp, "8 B half round trip", What::latency(8).work(), Work::TcpPingPong { size: PING }, AtMost(1.15)),
        target(Shm, "1 MiB x 8, every byte touched", bulk(MIB, true), memcpy(MIB), Bound::None),
        target(Shm, "64 KiB x 8, every byte touched", bulk(64 * KIB, true), Work::Readv(block(64 * KIB)), Bound::None),
        target(Tcp, "1 MiB x 8, every byte touched", bulk(MIB, true), stream(MIB), Bound::None),
    ]
}

/// How many lines the table will have.
pub fn count() -> usize {
    targets().len() + 2 * MANY_WIRES.len() + 2 * MANY_WIRES.len()
}

const MANY_WIRES: [Setting; 2] = [Setting::Shm, Setting::Tcp];

/// Measures all. `open` starts two ranks in a setting, with as many comms; `bare` measures limits; `close` ends ranks. With the verdicts comes
/// what the plugin warned of in all of it.
pub fn measure(
    open: impl Fn(Setting, usize) -> anyhow::Result<Shared>,
    close: impl Fn(Shared) -> anyhow::Result<Vec<Warning>>,
    bare: &Shared,
    effort: Effort,
    mut after: impl FnMut(&str),
) -> anyhow::Result<(Vec<Verdict>, Vec<Warning>)> {
    let (mut verdicts, mut warnings) = (Vec::new(), Vec::new());
    let mut end = |pair: Shared, measured: &mut [Verdict]| -> anyhow::Result<()> {
        let mut told = close(pair)?;
        told.retain(|warning| !warning.text.contains(NO_RECORD));
        measured.iter_mut().for_each(|verdict| verdict.warnings.clone_from(&told));
        merge(&mut warnings, told);
        Ok(())
    };
    for target in targets() {
        after(&format!("{}, {}", target.setting.name(), target.name));
        let pair = open(target.setting, 1)?;
        let mut measured = [one(&target, &pair, bare, effort)?];
        end(pair, &mut measured)?;
        verdicts.extend(measured);
    }
    for setting in MANY_WIRES {
        after(&format!("{}, {MANY} active comms", setting.name()));
        let pair = open(setting, MANY)?;
        let mut measured = many(setting, &pair, effort)?;
        end(pair, &mut measured)?;
        verdicts.extend(measured);
        after(&format!("{}, {IDLE} comms", setting.name()));
        let pair = open(setting, 0)?;
        let mut measured = idle(setting, &pair, effort.rounds)?;
        end(pair, &mut measured)?;
        verdicts.extend(measured);
    }
    Ok((verdicts, warnings))
}

fn one(target: &Target, pair: &Shared, bare: &Shared, effort: Effort) -> anyhow::Result<Verdict> {
    let (unit, scale) = if matches!(target.work, Work::Latency(_)) { ("us", 1e6) } else { ("GB/s", 1e-9) };
    let mut all = vec![Series::prepare(pair, target.work)?];
    let limit = Series::prepare(bare, target.limit);
    let refused = limit.as_ref().err().map(|error| format!("{error:#}"));
    let note = limit.as_ref().ok().and_then(|series| series.note.clone());
    all.extend(limit);
    for series in &mut all {
        series.calibrate(effort.seconds)?;
    }
    let samples = interleave(&all, effort.rounds, || ())?;
    let figures: Vec<Vec<f64>> =
        all.iter().zip(&samples).map(|(series, samples)| samples.iter().map(|s| series.figure(s) * scale).collect()).collect();
    for series in all {
        series.release()?;
    }
    let ratio = figures.get(1).and_then(|limit| Summary::of_ratios(&figures[0], limit));
    Ok(Verdict {
        setting: target.setting.name(),
        name: target.name.into(),
        unit,
        limit_name: limit_name(&target.limit).into(),
        limit: figures.get(1).and_then(|limit| Summary::of(limit.iter().copied())),
        figure: Summary::of(figures[0].iter().copied()).context("no round was measured")?,
        ratio,
        target: target.bound.text(),
        met: ratio.and_then(|ratio| target.bound.met(ratio.median)),
        note: refused.or(note),
        warnings: Vec::new(),
    })
}

/// Active comms: what all move together beside what one moves over the same buffers, and the share of the slowest.
fn many(setting: Setting, pair: &Shared, effort: Effort) -> anyhow::Result<[Verdict; 2]> {
    // Receives of this size: of longer ones, so many would take memory that none of them uses.
    let (size, recv_size) = (64 * KIB, 64 * KIB);
    let spec = |comms, slots| Work::Bandwidth(Bandwidth { size, recv_size, outstanding: 8, slots, comms, two_way: false, touch: false });
    let mut both = [Series::prepare(pair, spec(MANY, 8))?, Series::prepare(pair, spec(1, 8 * MANY))?];
    for series in &mut both {
        series.calibrate(effort.seconds)?;
    }
    let samples = interleave(&both, effort.rounds, || ())?;
    let rates = |index: usize| -> Vec<f64> { samples[index].iter().map(|s| both[index].figure(s) * 1e-9).collect() };
    let (all, alone) = (rates(0), rates(1));
    let shares: Vec<f64> = samples[0].iter().filter_map(slowest).collect();
    for series in both {
        series.release()?;
    }
    let ratio = Summary::of_ratios(&all, &alone);
    let (total, share) = (Bound::AtLeast(0.9), Bound::AtLeast(0.5));
    let share_figure = Summary::of(shares).context("no round was measured")?;
    Ok([
        Verdict {
            setting: setting.name(),
            name: format!("{MANY} active comms, 64 KiB x 8 each"),
            unit: "GB/s",
            limit_name: "one comm, same buffers".into(),
            limit: Summary::of(alone),
            figure: Summary::of(all).context("no round was measured")?,
            ratio,
            target: total.text(),
            met: ratio.and_then(|ratio| total.met(ratio.median)),
            note: None,
            warnings: Vec::new(),
        },
        Verdict {
            setting: setting.name(),
            name: "slowest of them".into(),
            unit: "of its share",
            limit_name: "-".into(),
            limit: None,
            figure: share_figure,
            ratio: None,
            target: share.text(),
            // No comm in any round.
            met: share.met(share_figure.min),
            note: None,
            warnings: Vec::new(),
        },
    ])
}

/// What the slowest comm had when the first was done, beside the mean of all.
fn slowest(sample: &Sample) -> Option<f64> {
    let total: u64 = sample.at_first.iter().sum();
    let least = *sample.at_first.iter().min()?;
    Some(least as f64 * sample.at_first.len() as f64 / total as f64)
}

/// Rounds of setting up 1000 comms, at most.
const CYCLES: usize = 3;

fn idle(setting: Setting, pair: &Shared, rounds: usize) -> anyhow::Result<[Verdict; 2]> {
    const { assert!(IDLE <= MAX_COMMS) };
    let series = [Series::prepare(pair, Work::Churn { comms: IDLE })?];
    let samples = interleave(&series, CYCLES.min(rounds), || ())?.concat();
    let per_comm = |part: fn(&Memory) -> i64| {
        // Of the process that has more, in the first cycle: later ones take memory that the one before gave back to the allocator.
        Summary::of(
            samples.iter().take(1).filter_map(|s| s.memory.iter().flatten().map(part).max()).map(|b| b as f64 / (IDLE * KIB) as f64),
        )
    };
    let (all, shared, mapped) = (per_comm(|m| m.anon + m.shared), per_comm(|m| m.shared), per_comm(|m| m.mapped));
    let rate = Summary::of(samples.iter().filter_map(|s| s.value)).context("no round was measured")?;
    let [series] = series;
    series.release()?;
    let shown = |s: Option<Summary>| s.map_or_else(|| "-".to_owned(), |s| digits(s.median));
    let all = all.context("no round was measured")?;
    Ok([
        Verdict {
            setting: setting.name(),
            name: format!("{IDLE} comms set up"),
            unit: "comms/s",
            limit_name: "-".into(),
            limit: None,
            figure: rate,
            ratio: None,
            target: Bound::None.text(),
            met: None,
            note: None,
            warnings: Vec::new(),
        },
        Verdict {
            setting: setting.name(),
            name: "memory of an idle comm".into(),
            unit: "KiB per process",
            limit_name: "-".into(),
            limit: None,
            figure: all,
            ratio: None,
            target: Bound::AtMost(IDLE_KIB).text(),
            met: Bound::AtMost(IDLE_KIB).met(all.median),
            note: Some(format!("of that, shared with the peer {} KiB, of {} KiB mapped for rings and slots", shown(shared), shown(mapped))),
            warnings: Vec::new(),
        },
    ])
}

impl Bound {
    fn text(self) -> String {
        match self {
            Bound::AtLeast(least) => format!(">= {least}"),
            Bound::AtMost(most) => format!("<= {most}"),
            Bound::None => "-".into(),
        }
    }

    fn met(self, value: f64) -> Option<bool> {
        match self {
            Bound::AtLeast(least) => Some(value >= least),
            Bound::AtMost(most) => Some(value <= most),
            Bound::None => None,
        }
    }
}

/// For people.
pub fn table(verdicts: &[Verdict], rounds: usize) -> String {
    let head = ["", "", "limit", "", "figure", "unit", "ratio (min..max)", "target", ""];
    let mut lines = vec![head.map(String::from).to_vec()];
    for v in verdicts {
        lines.push(vec![
            v.setting.to_owned(),
            v.name.clone(),
            v.limit_name.clone(),
            v.limit.as_ref().map_or("-".into(), spread),
            spread(&v.figure),
            v.unit.to_owned(),
            v.ratio.as_ref().map_or("-".into(), spread),
            v.target.clone(),
            match v.met {
                Some(true) => "met".into(),
                Some(false) => "NOT MET".into(),
                None => String::new(),
            },
        ]);
    }
    let mut text = format!("Medians of {rounds} rounds in which limit and figure take turns; the ratio is taken in each round.\n");
    text += &aligned(&lines, 3);
    let mut notes: Vec<String> = Vec::new();
    for v in verdicts {
        if let Some(note) = &v.note {
            let about = if v.limit_name == "-" { format!("{}, {}", v.setting, v.name) } else { v.limit_name.clone() };
            let line = format!("{about}: {note}\n");
            if !notes.contains(&line) {
                notes.push(line);
            }
        }
    }
    text + &notes.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_judge() {
        assert_eq!(Bound::AtLeast(0.9).met(0.9), Some(true));
        assert_eq!(Bound::AtLeast(0.9).met(0.89), Some(false));
        assert_eq!(Bound::AtMost(2.5).met(2.6), Some(false));
        assert_eq!(Bound::None.met(1.0), None);
    }

    #[test]
    fn the_slowest_share_is_of_the_mean() {
        let at_first = vec![10, 5, 15];
        let sample = Sample { seconds: 1.0, messages: 15, cpu_s: 0.0, value: None, at_first, memory: [None, None] };
        assert_eq!(slowest(&sample), Some(0.5));
        assert_eq!(slowest(&Sample { at_first: Vec::new(), ..sample }), None);
    }
}
