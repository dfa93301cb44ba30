//! `railhead info`: which devices a plugin has, what is not usable and why, and the settings in force.

mod facts;
mod host;
mod text;

use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;

/// Devices and their properties; what is not usable, and why; the settings in force, and where each comes from.
///
/// Ends with 1 if the plugin has no device.
#[derive(clap::Args)]
pub struct Args {
    /// Any NCCL net plugin; `nccl:FILE` and `nccl-ib:FILE` are those inside libnccl.so.2. Without it, librailhead.so: beside this program, in ../lib, or wherever the loader finds it.
    #[arg(long)]
    plugin: Option<std::path::PathBuf>,
    /// As JSON.
    #[arg(long)]
    json: bool,
    /// Also the settings that are at their defaults.
    #[arg(long)]
    all: bool,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let facts = facts::gather(args.plugin.as_deref())?;
    let page = if args.json { serde_json::to_string_pretty(&facts).context("writing JSON")? + "\n" } else { text::page(&facts, args.all) };
    match std::io::stdout().write_all(page.as_bytes()) {
        // Whoever reads has seen enough.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => {}
        result => result.context("writing to stdout")?,
    }
    Ok(if facts.devices.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
