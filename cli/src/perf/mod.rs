//! `railhead perf`: measures any net plugin between two processes, beside what the machine can do without one. `main` calls `run`.

mod args;
mod channel;
mod lane;
mod limits;
mod measure;
mod memory;
mod message;
mod os;
mod pair;
mod rank;
mod report;
mod summary;

use std::cell::RefCell;
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};

pub use args::Args;
use args::{Direction, Subject};
use lane::Shared;
use measure::{Effort, What};
use message::{Outcome, PluginSpec, Start, ToRank};
use pair::Pair;
use report::{About, Report};

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.rank {
        return rank::run();
    }
    measure(args)?;
    Ok(ExitCode::SUCCESS)
}

fn measure(args: &Args) -> anyhow::Result<()> {
    let rows = rows(args)?;
    let limits = args.limits()?;
    let comms = args.comms()?.into_iter().max().unwrap_or(1);
    let effort = Effort { rounds: args.rounds as usize, seconds: f64::from(args.round_ms) * 1e-3 };
    let timeout = Duration::from_secs(u64::from(args.timeout));
    let mut plugins: Vec<Shared> = Vec::new();
    let mut about = Vec::new();
    for path in args.plugin.iter().chain(&args.compare) {
        let (pair, what) = plugin(args, path, comms, &args.env()?, timeout)?;
        plugins.push(pair);
        about.push(what);
    }
    let bare = if limits.is_empty() { None } else { Some(bare(timeout)?) };
    let bar = bar(rows.len() as u64);
    let mut report = Report { railhead: env!("CARGO_PKG_VERSION"), rounds: effort.rounds, plugins: about, rows: Vec::new() };
    for what in rows {
        bar.set_message(describe(&what));
        report.rows.push(measure::row(&plugins, bare.as_ref(), &limits, what, effort, || bar.tick())?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    for pair in plugins.into_iter().chain(bare) {
        Rc::into_inner(pair).context("a lane is still open")?.into_inner().finish()?;
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", report.table());
    }
    Ok(())
}

fn rows(args: &Args) -> anyhow::Result<Vec<What>> {
    let sizes = args.sizes()?;
    let mut rows = Vec::new();
    if args.what != Subject::Bandwidth {
        rows.extend(sizes.iter().map(|&size| What::Latency { size }));
    }
    if args.what != Subject::Latency {
        for comms in args.comms()? {
            for outstanding in args.outstanding()? {
                for &size in &sizes {
                    let two_way = args.direction == Direction::Two;
                    rows.push(What::Bandwidth { size, outstanding, comms, two_way, touch: args.touch });
                }
            }
        }
    }
    Ok(rows)
}

/// Two ranks with the plugin, connected.
fn plugin(args: &Args, path: &Path, comms: usize, env: &[(String, String)], timeout: Duration) -> anyhow::Result<(Shared, About)> {
    // A relative path without a slash would be looked for in the loader's directories.
    let path = path.canonicalize().with_context(|| format!("{}", path.display()))?;
    let spec = PluginSpec { path: path.clone(), abi: args.abi, dev: args.dev, refuse_cma: args.refuse_cma };
    let mut pair = Pair::local(&path.display().to_string(), env, timeout)?;
    let start = |rank| ToRank::Start(Start { rank, plugin: Some(spec.clone()), comms });
    let [Outcome::Started(zero), Outcome::Started(one)] = pair.command("starting", start)? else {
        bail!("a rank answered its start with something else")
    };
    if zero.abi != one.abi || zero.name != one.name {
        bail!("the ranks run different plugins: {zero:?} and {one:?}");
    }
    Ok((Rc::new(RefCell::new(pair)), About { path: path.display().to_string(), started: zero }))
}

/// Two ranks without a plugin, for the limits.
fn bare(timeout: Duration) -> anyhow::Result<Shared> {
    let mut pair = Pair::local("limits", &[], timeout)?;
    pair.command("starting", |rank| ToRank::Start(Start { rank, plugin: None, comms: 0 }))?;
    Ok(Rc::new(RefCell::new(pair)))
}

/// Hidden where standard error is no terminal.
fn bar(rows: u64) -> ProgressBar {
    let bar = ProgressBar::new(rows);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {elapsed}") {
        bar.set_style(style);
    }
    bar
}

fn describe(what: &What) -> String {
    match *what {
        What::Bandwidth { size, outstanding, comms, .. } => {
            format!("throughput, {}, {outstanding} outstanding, {comms} comms", report::size(size))
        }
        What::Latency { size } => format!("half round trip, {}", report::size(size)),
    }
}
