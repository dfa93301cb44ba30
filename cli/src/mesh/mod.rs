//! `railhead mesh bench`: how fast ranks exchange and compute, with Gloo's options and nccl-tests' figures. This process is one rank; without a URL it
//! starts the others and is rank 0.
//!
//! * [`args`]: what is asked for; [`work`]: what a rank does once; [`measure`]: how often it does it, and how long that takes; [`cost`]: what the pairs
//!   have taken by then.

mod args;
mod cost;
mod measure;
mod work;

use std::io::IsTerminal;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use railhead::base::config::{Config, Debug};
use railhead::mesh::{Device, Mesh};
use railhead::store::rendezvous::{Environment, rendezvous};
use railhead::store::{PrefixStore, Store};

use crate::perf::plot::{Canvas, Chart};
use crate::perf::report::{aligned, digits, size};
use args::Bench;
use cost::Cost;
use measure::Row;

/// Measures meshes: ranks that exchange messages and compute together.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Subcommand,
}

#[derive(clap::Subcommand)]
enum Subcommand {
    Bench(Box<Bench>),
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let Subcommand::Bench(bench) = &args.command;
    bench.check()?;
    let canvas = bench.plot.as_deref().map(Canvas::open).transpose()?;
    let (rows, rank) = match &bench.url {
        Some(url) => rank(bench, url)?,
        None => ranks(bench)?,
    };
    if rank != 0 {
        return Ok(ExitCode::SUCCESS);
    }
    if bench.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        print!("{}", table(&rows));
        if let Some(row) = rows.first() {
            println!("\n{}", row.cost);
        }
    }
    if let Some(canvas) = canvas {
        canvas.draw(&charts(&rows))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The other ranks, which end with this process's interest in them.
struct Others(Vec<Child>);

impl Drop for Others {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Starts the other ranks on this machine, and is the first.
fn ranks(bench: &Bench) -> anyhow::Result<(Vec<Row>, i64)> {
    let folder = tempfile::tempdir().context("cannot make a folder for the ranks to meet in")?;
    let url = |rank: usize| format!("file://{}/store?rank={rank}&world_size={}", folder.path().display(), bench.ranks);
    let me = std::env::current_exe().context("this program")?;
    let start = |rank: usize| {
        // What else is asked for is as here.
        let mut command = Command::new(&me);
        command.args(std::env::args_os().skip(1)).arg("--url").arg(url(rank)).stdout(Stdio::null());
        command.spawn().with_context(|| format!("cannot start rank {rank}"))
    };
    let mut others = Others(Vec::new());
    let measured = (1..bench.ranks).try_for_each(|rank| {
        others.0.push(start(rank)?);
        Ok(())
    });
    let measured = measured.and_then(|()| rank(bench, &url(0)));
    let ended: Vec<_> = if measured.is_ok() { others.0.iter_mut().map(Child::wait).collect() } else { Vec::new() };
    others.0.retain(|_| measured.is_err());
    drop(others);
    let measured = measured?;
    for (rank, status) in ended.into_iter().enumerate() {
        let status = status?;
        ensure!(status.success(), "rank {} ended with {status}", rank + 1);
    }
    Ok(measured)
}

/// Is one rank.
fn rank(bench: &Bench, url: &str) -> anyhow::Result<(Vec<Row>, i64)> {
    let timeout = Duration::from_secs(bench.timeout);
    let joined = rendezvous(url, -1, -1, timeout, Environment::process())?.join()?;
    let (rank, size) = (joined.rank, joined.world_size);
    let (Ok(mine), Ok(all)) = (usize::try_from(rank), usize::try_from(size)) else { bail!("{url}: rank {rank} of {size}") };
    let device = Device::open(Config::from_env_or(Debug::Warn), bench.device.as_deref().unwrap_or_default())?;
    let cost = Cost::begin()?;
    let mesh = Mesh::new(device, mine, all)?;
    mesh.set_sync(bench.sync);
    let keys: Arc<dyn Store> = joined.store;
    mesh.connect(&PrefixStore::new("railhead-mesh-bench", keys), timeout)?;
    let cost = cost.connected();
    // Once all pairs that a barrier needs were used.
    mesh.barrier(work::options(0, timeout))?;
    let cost = cost.of_each(all - 1)?;
    let jobs = bench.jobs();
    let bar = ProgressBar::new(jobs.len() as u64);
    if rank != 0 || !std::io::stderr().is_terminal() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    bar.set_style(ProgressStyle::with_template("{bar:30} {pos}/{len} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut rows = Vec::new();
    for (what, elements) in jobs {
        bar.set_message(format!("{what} of {}", size_of_elements(elements)));
        rows.push(measure::measure(&mesh, what, elements, bench, cost)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    mesh.barrier(work::options(0, timeout + 2 * Duration::from_secs_f64(bench.iteration_time)))?;
    mesh.close();
    Ok((rows, rank))
}

fn size_of_elements(elements: usize) -> String {
    size(4 * elements)
}

fn table(rows: &[Row]) -> String {
    let head = ["", "bytes", "ranks", "threads", "times", "min us", "p50 us", "p99 us", "max us", "GB/s", "bus GB/s"];
    let mut lines = vec![head.map(String::from).to_vec()];
    for row in rows {
        let figures = [row.min_us, row.p50_us, row.p99_us, row.max_us, row.gb_s, row.bus_gb_s].map(digits);
        let mut line = vec![row.what.clone(), size(row.bytes), row.ranks.to_string(), row.threads.to_string(), row.times.to_string()];
        line.extend(figures);
        lines.push(line);
    }
    aligned(&lines, 1)
}

fn charts(rows: &[Row]) -> Vec<Chart> {
    let mut time = Chart { title: "Time".into(), unit: "us", series: Vec::new() };
    let mut bus = Chart { title: "Bus bandwidth".into(), unit: "GB/s", series: Vec::new() };
    for row in rows {
        time.add(row.what.clone(), false, row.bytes, row.p50_us);
        bus.add(row.what.clone(), false, row.bytes, row.bus_gb_s);
    }
    [time, bus].into_iter().filter(|chart| !chart.series.is_empty()).collect()
}
