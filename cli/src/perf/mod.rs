//! `railhead perf`: measures any net plugin between two processes, beside what the machine can do without one. `main` calls `run`.

mod args;
mod channel;
mod limits;
mod measure;
mod memory;
mod message;
mod os;
mod pair;
pub mod plot;
mod rank;
mod remote;
pub mod report;
mod series;
mod shared;
mod spin;
mod summary;
mod targets;
mod warnings;

use std::cell::RefCell;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;

use anyhow::{Context, bail};
use indicatif::{ProgressBar, ProgressStyle};

use crate::plugin::absolute;
pub use args::Args;
use args::{Direction, Subject};
use measure::What;
use message::{Outcome, PluginSpec, Start, ToRank};
use pair::Pair;
use plot::Canvas;
use report::{About, Report};
use series::Shared;
use targets::Setting;
use warnings::Warning;

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    if args.rank {
        return rank::run();
    }
    args.check()?;
    if let Some(address) = &args.listen {
        let plugin = args.plugin.as_deref().context("--plugin is missing")?;
        remote::listen(address, &spec(args, plugin)?, args.cpus()?[1], &args.env()?)?;
    } else if args.targets {
        targets(args)?;
    } else {
        measure(args)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(args: &Args) -> anyhow::Result<()> {
    let rows = rows(args)?;
    let limits = args.limits()?;
    let comms = args.comms()?.into_iter().max().unwrap_or(1);
    let effort = args.effort();
    let canvas = args.plot.as_deref().map(Canvas::open).transpose()?;
    let mut plugins: Vec<Shared> = Vec::new();
    let mut about = Vec::new();
    for path in args.plugin.iter().chain(&args.compare) {
        let (pair, what) = plugin(args, &spec(args, path)?, comms, &args.env()?)?;
        plugins.push(pair);
        about.push(what);
    }
    let bare = if limits.is_empty() { None } else { Some(bare(args)?) };
    let bar = bar(rows.len() as u64);
    let mut report = Report { railhead: env!("CARGO_PKG_VERSION"), rounds: effort.rounds, plugins: about, rows: Vec::new() };
    for what in rows {
        bar.set_message(describe(&what));
        report.rows.push(measure::row(&plugins, bare.as_ref(), &limits, what, effort, || bar.tick())?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    for (pair, about) in plugins.into_iter().zip(&mut report.plugins) {
        about.warnings = close(pair)?;
    }
    bare.map(close).transpose()?;
    if args.json {
        say(&(serde_json::to_string_pretty(&report)? + "\n"))?
    } else {
        say(&report.table())?
    }
    canvas.map_or(Ok(()), |canvas| canvas.draw(&plot::charts(&report.names(), &report.rows)))
}

/// On standard output, which may be a pipe that nobody reads any more.
fn say(text: &str) -> anyhow::Result<()> {
    std::io::stdout().write_all(text.as_bytes()).context("standard output")
}

/// The table of all speed targets and, if asked for, the plot of every setting.
fn targets(args: &Args) -> anyhow::Result<()> {
    let path = args.plugin.as_deref().context("--plugin is missing")?;
    let env = args.env()?;
    let effort = args.effort();
    let sizes = args.sizes()?;
    let canvas = args.plot.as_deref().map(Canvas::open).transpose()?;
    let open = |setting: Setting, comms: usize| -> anyhow::Result<Shared> {
        let env: Vec<_> = env.iter().cloned().chain([(args::WIRE.to_owned(), setting.wire().to_owned())]).collect();
        let spec = PluginSpec { refuse_cma: setting == Setting::ShmNoCma, ..spec(args, path)? };
        Ok(plugin(args, &spec, comms, &env)?.0)
    };
    let bare = bare(args)?;
    let bar = bar(targets::count() as u64);
    let (verdicts, warnings) = targets::measure(open, close, &bare, effort, |name| {
        bar.set_message(name.to_owned());
        bar.inc(1);
    })?;
    bar.finish_and_clear();
    let text = if args.json {
        serde_json::to_string_pretty(&verdicts)? + "\n"
    } else {
        targets::table(&verdicts, effort.rounds) + &lines(&warnings)
    };
    say(&text)?;
    if let Some(canvas) = canvas {
        let mut charts = Vec::new();
        let bar = self::bar(2 * sizes.len() as u64);
        let pairs = Setting::ALL.map(|setting| open(setting, 1));
        let pairs = pairs.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
        for latency in [false, true] {
            let mut rows = Vec::new();
            for &size in &sizes {
                let what = if latency { What::latency(size) } else { What::bulk(size) };
                bar.set_message(describe(&what));
                rows.push(measure::row(&pairs, Some(&bare), &args::LIMITS, what, effort, || bar.tick())?);
                bar.inc(1);
            }
            charts.extend(plot::charts(&Setting::ALL.map(Setting::name), &rows));
        }
        bar.finish_and_clear();
        let mut later = Vec::new();
        for pair in pairs {
            warnings::merge(&mut later, close(pair)?);
        }
        later.retain(|warning| warnings.iter().all(|told| told.text != warning.text));
        eprint!("{}", lines(&later));
        canvas.draw(&charts)?;
    }
    close(bare).map(drop)
}

fn lines(warnings: &[Warning]) -> String {
    warnings.iter().map(Warning::line).collect()
}

/// Lets ranks end in order; what their plugin warned of.
fn close(pair: Shared) -> anyhow::Result<Vec<Warning>> {
    Rc::into_inner(pair).context("a series is not released")?.into_inner().finish()
}

fn rows(args: &Args) -> anyhow::Result<Vec<What>> {
    let (sizes, least) = (args.sizes()?, args.recv_size()?);
    let mut rows = Vec::new();
    if args.what != Subject::Bandwidth {
        rows.extend(sizes.iter().map(|&size| What::Latency { size, recv_size: size.max(least), ahead: args.ahead() }));
    }
    if args.what != Subject::Latency {
        for comms in args.comms()? {
            for outstanding in args.outstanding()? {
                for &size in &sizes {
                    let (recv_size, two_way) = (size.max(least), args.direction == Some(Direction::Two));
                    rows.push(What::Bandwidth { size, recv_size, outstanding, comms, two_way, touch: args.touch });
                }
            }
        }
    }
    Ok(rows)
}

fn spec(args: &Args, path: &Path) -> anyhow::Result<PluginSpec> {
    // A relative path without a slash would be looked for in the loader's directories.
    let path = absolute(path)?;
    Ok(PluginSpec { path, abi: args.abi, dev: args.dev, refuse_cma: args.refuse_cma })
}

/// Two ranks with the plugin, connected.
fn plugin(args: &Args, spec: &PluginSpec, comms: usize, env: &[(String, String)]) -> anyhow::Result<(Shared, About)> {
    let timeout = args.timeout();
    let path = spec.path.display().to_string();
    let mut pair = match &args.connect {
        Some(address) => Pair::with_remote(&path, env, remote::connect(address)?, timeout)?,
        None => Pair::local(&path, env, timeout)?,
    };
    let cpus = args.cpus()?;
    let start = |rank| ToRank::Start(Start { rank, plugin: Some(spec.clone()), comms, cpu: cpus[rank] });
    let [Outcome::Started(zero), Outcome::Started(one)] = pair.command("starting", start)? else {
        bail!("a rank answered its start with something else")
    };
    if zero.abi != one.abi || zero.name != one.name {
        bail!("the ranks run different plugins: {} v{} and {} v{}", zero.name, zero.abi, warnings::printable(&one.name), one.abi);
    }
    Ok((Rc::new(RefCell::new(pair)), About { path, started: zero, warnings: Vec::new() }))
}

/// Two ranks without a plugin, for the limits.
fn bare(args: &Args) -> anyhow::Result<Shared> {
    let mut pair = Pair::local("limits", &[], args.timeout())?;
    let cpus = args.cpus()?;
    pair.command("starting", |rank| ToRank::Start(Start { rank, plugin: None, comms: 0, cpu: cpus[rank] }))?;
    Ok(Rc::new(RefCell::new(pair)))
}

/// Hidden where standard error is no terminal.
fn bar(rows: u64) -> ProgressBar {
    let bar = ProgressBar::new(rows);
    if let Ok(style) = ProgressStyle::with_template("{bar:20} {pos}/{len} {elapsed} {wide_msg}") {
        bar.set_style(style);
    }
    bar
}

fn describe(what: &What) -> String {
    match *what {
        What::Bandwidth { size, outstanding, comms, .. } => {
            let manner = what.manner();
            format!(
                "throughput{manner}, {}, {outstanding} outstanding, {comms} comm{}",
                report::size(size),
                if comms == 1 { "" } else { "s" }
            )
        }
        What::Latency { size, .. } => format!("half round trip, {}", report::size(size)),
    }
}
