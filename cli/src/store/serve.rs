//! `railhead store serve`: a server until a signal ends it.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};

use anyhow::Context;
use railhead::base::config::{Config, Debug};
use railhead::store::rendezvous::Environment;
use railhead::store::tcp::{DEFAULT_PORT, Server, ServerOptions, wire::Limits};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Serves a store until SIGINT or SIGTERM; prints the address that it listens on, as ADDR:PORT, once it does; an address of zeros stands for all.
///
/// A client that does not say within 30 s what it speaks, and that it knows the secret if there is one, is disconnected; afterwards it may be idle.
#[derive(clap::Args)]
pub struct Args {
    /// Port to listen on; 0: any that is free
    #[arg(long, default_value_t = DEFAULT_PORT)]
    port: u16,
    /// Address to listen on, or a name, of whose addresses the first serves that is this machine's; RAILHEAD_STORE_BIND, or else all addresses, as torch does
    #[arg(long, value_name = "ADDR")]
    bind: Option<String>,
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
    let binds = match &args.bind {
        Some(name) => resolve(name)?,
        None => vec![environment.bind()?],
    };
    let secret = environment.secret()?;
    Config::from_env_or(Debug::Warn);
    // Each client takes one.
    let files = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: files.maximum, ..files });
    let value = (args.value as usize) << 20;
    let limits = Limits { value, request: Limits::default().request.max(2 * value), ..Limits::default() };
    let start = |bind: &Option<IpAddr>| {
        let memory = (args.memory as usize) << 20;
        Server::start(ServerOptions { port: args.port, bind: *bind, secret: secret.clone(), limits, memory, ..ServerOptions::default() })
    };
    let (first, others) = binds.split_first().context("--bind: it has no address")?;
    let server = others.iter().fold(start(first), |server, bind| server.or_else(|_| start(bind)));
    let server = server.with_context(|| args.bind.iter().fold("serve".to_string(), |serve, name| format!("{serve} --bind {name}")))?;
    let address = server.address();
    if address.ip().is_unspecified() && secret.key().is_none() {
        crate::say(format_args!(
            "railhead: warning: this listens on all addresses and wants no secret: whoever reaches port {} can read and change the store. --bind gives it \
             an address, RAILHEAD_STORE_SECRET a secret",
            address.port()
        ));
    }
    super::print(format!("{address}\n").as_bytes())?;
    let _ = signals.forever().next();
    Ok(())
}

/// The addresses of a name, or of an address, which may stand in brackets.
fn resolve(name: &str) -> anyhow::Result<Vec<Option<IpAddr>>> {
    let bare = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    let addresses = (bare, 0).to_socket_addrs().with_context(|| format!("--bind {name}"))?;
    Ok(addresses.map(|address: SocketAddr| Some(address.ip())).collect())
}
