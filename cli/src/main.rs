//! `railhead`: looks at, measures and checks NCCL network plugins, ours or any other; serves stores, and measures meshes.

mod check;
mod info;
mod mesh;
mod number;
mod perf;
mod plugin;
mod stats;
mod store;
mod top;

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Looks at, measures and checks NCCL network plugins.
#[derive(Parser)]
#[command(version, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Info(info::Args),
    Perf(Box<perf::Args>),
    Check(check::Args),
    Stats(stats::Args),
    Top(top::Args),
    Store(store::Args),
    Mesh(mesh::Args),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Info(args) => info::run(&args),
        Command::Perf(args) => perf::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Stats(args) => stats::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Store(args) => store::run(&args),
        Command::Mesh(args) => mesh::run(&args),
    };
    match result {
        Ok(code) => code,
        Err(error) => {
            say(format_args!("railhead: {error:#}"));
            ExitCode::from(2)
        }
    }
}

/// Says a line on standard error, which may be a pipe that nobody reads any more: that is no reason to end otherwise.
fn say(line: std::fmt::Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
