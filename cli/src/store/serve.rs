//! `railhead store serve`: a server until a signal ends it.

use std::net::IpAddr;

use anyhow::Context;
use railhead::base::config::{Config, Debug};
use railhead::store::rendezvous::Environment;
use railhead::store::tcp::{DEFAULT_PORT, Server, ServerOptions, wire::Limits};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Serves a store until SIGINT or SIGTERM; prints its port once it listens
#[derive(clap::Args)]
pub struct Args {
    /// 0: any that is free
    #[arg(long, default_value_t = DEFAULT_PORT)]
    port: u16,
    /// Address to listen on; RAILHEAD_STORE_BIND, or else all addresses, as torch does
    #[arg(long, value_name = "ADDR")]
    bind: Option<IpAddr>,
    /// Bytes that everything in the store may take, in MiB; who exceeds it is disconnected
    #[arg(long, value_name = "MIB", default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..))]
    memory: u32,
    /// Largest value of a request, in MiB; torch's servers take 8
    #[arg(long, value_name = "MIB", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    value: u32,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<()> {
    // Before anything that a signal should end.
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("signals")?;
    let environment = Environment::process();
    let bind = args.bind.map_or_else(|| environment.bind(), |bind| Ok(Some(bind)))?;
    let secret = environment.secret()?;
    Config::from_env_or(Debug::Warn);
    // Each client takes one.
    let files = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files });
    let value = (args.value as usize) << 20;
    let limits = Limits { value, request: Limits::default().request.max(2 * value), ..Limits::default() };
    let server = Server::start(ServerOptions {
        port: args.port,
        bind,
        secret,
        limits,
        memory: (args.memory as usize) << 20,
        ..ServerOptions::default()
    })?;
    super::print(format!("{}\n", server.port()).as_bytes())?;
    let _ = signals.forever().next();
    Ok(())
}
