//! `railhead stats`: counters of running processes, from their stats pages. The processes are neither stopped nor asked.

mod json;
pub mod processes;
mod prometheus;
pub mod text;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;

use crate::number::{PIDS, within};

/// Counters of running processes: bytes, operations, wires, what each comm waits for and since when.
///
/// Shows every process that uses Railhead and that this user may look into, without stopping it.
#[derive(clap::Args)]
pub struct Args {
    /// Only this process.
    #[arg(long, value_parser = within(PIDS))]
    pid: Option<i32>,
    /// As JSON.
    #[arg(long, conflicts_with = "prometheus")]
    json: bool,
    /// In Prometheus's text format, for a node exporter's textfile collector.
    #[arg(long)]
    prometheus: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let processes = match args.pid {
        Some(pid) => processes::of(pid)?,
        None => processes::all()?,
    };
    let page = if args.json {
        json::page(&processes)?
    } else if args.prometheus {
        prometheus::page(&processes)
    } else {
        text::page(&processes)
    };
    match std::io::stdout().write_all(page.as_bytes()) {
        // Whoever reads has seen enough.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => {}
        result => result.context("writing to stdout")?,
    }
    Ok(ExitCode::SUCCESS)
}
