//! `railhead store`: serves a key-value store that ranks find each other through, and looks into one, torch's or Railhead's. On the main thread; a
//! watch calls from its own.

mod bench;
mod owner;
mod serve;
mod watch;

use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Subcommand;
use railhead::store::rendezvous::Environment;
use railhead::store::tcp::{Host, TcpOptions};
use railhead::store::{Error, FOREVER, FileStore, PrefixStore, Store, TcpStore};

/// Serves a key-value store for ranks to find each other through, or looks into one.
///
/// The protocol is PyTorch's TCPStore: torch's programs can use the server, and the other commands work on torch's servers (but for watch). The
/// secret of RAILHEAD_STORE_SECRET keeps out who does not know it, torch's programs among them.
///
/// Exit status: 0 done, 1 what was waited for did not come in time, 2 anything else.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(serve::Args),
    /// Prints a key's value, waiting for it
    Get {
        #[command(flatten)]
        place: Place,
        key: String,
        /// The bytes as they are, without a newline behind them
        #[arg(long)]
        raw: bool,
    },
    /// Stores a value
    Set {
        #[command(flatten)]
        place: Place,
        key: String,
        /// The value; what comes on standard input if it is left out
        value: Option<String>,
    },
    /// Adds to a number and prints the sum
    Add {
        #[command(flatten)]
        place: Place,
        key: String,
        #[arg(default_value_t = 1, allow_negative_numbers = true)]
        number: i64,
    },
    /// Waits until all keys exist
    Wait {
        #[command(flatten)]
        place: Place,
        #[arg(required = true)]
        keys: Vec<String>,
    },
    /// Lists the keys
    Ls {
        #[command(flatten)]
        place: Place,
    },
    Watch(watch::Args),
    Bench(bench::Args),
}

/// Which store.
#[derive(clap::Args)]
struct Place {
    /// The server; $MASTER_ADDR:$MASTER_PORT if it is left out
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    connect: Option<(String, u16)>,
    /// A store in a file; this does not count as one of its ranks
    #[arg(long, value_name = "FILE", conflicts_with = "connect")]
    file: Option<PathBuf>,
    /// Only keys behind this prefix, as PREFIX/KEY
    #[arg(long)]
    prefix: Option<String>,
    /// Seconds to wait, for the server or the file's lock and for keys; 0 looks once
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,
}

impl Place {
    /// Torch's 300 s, unless told otherwise.
    fn timeout(&self) -> Duration {
        self.timeout.unwrap_or(Duration::from_secs(300))
    }

    fn open(&self) -> anyhow::Result<Arc<dyn Store>> {
        let store: Arc<dyn Store> = match (&self.file, &self.connect) {
            (Some(file), _) => Arc::new(FileStore::visit(file, self.timeout())?),
            (None, Some((host, port))) => Arc::new(self.join(host, *port)?),
            (None, None) => {
                let variable = |name| std::env::var(name).with_context(|| format!("neither --connect nor --file, and {name} is not set"));
                let (host, port) = (variable("MASTER_ADDR")?, variable("MASTER_PORT")?);
                Arc::new(
                    self.join(
                        &host,
                        port.parse::<NonZeroU16>().with_context(|| format!("MASTER_PORT={port}: expected 1 to 65535"))?.get(),
                    )?,
                )
            }
        };
        Ok(match &self.prefix {
            Some(prefix) => Arc::new(PrefixStore::new(prefix, store)),
            None => store,
        })
    }

    fn join(&self, host: &str, port: u16) -> Result<TcpStore, Error> {
        let secret = Environment::process().secret()?;
        // A moment for the connection, even if no key is waited for.
        let timeout = self.timeout().max(Duration::from_secs(1));
        TcpStore::new(Host::Other(host.to_owned(), port), TcpOptions { timeout, secret, ..TcpOptions::default() })
    }
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let done = match &args.command {
        Command::Serve(args) => serve::run(args),
        Command::Get { place, key, raw } => get(place, key, *raw),
        Command::Set { place, key, value } => set(place, key, value.as_deref()),
        Command::Add { place, key, number } => place.open().and_then(|store| print(format!("{}\n", store.add(key, *number)?).as_bytes())),
        Command::Wait { place, keys } => wait(place, keys),
        Command::Ls { place } => list(place),
        Command::Watch(args) => watch::run(args),
        Command::Bench(args) => bench::run(args),
    };
    match done {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) if matches!(error.downcast_ref(), Some(Error::Timeout(_))) => {
            eprintln!("railhead: {error:#}");
            Ok(ExitCode::FAILURE)
        }
        Err(error) => Err(error),
    }
}

fn get(place: &Place, key: &str, raw: bool) -> anyhow::Result<()> {
    let mut value = place.open()?.get(key, place.timeout())?;
    if !raw {
        value.push(b'\n');
    }
    print(&value)
}

fn set(place: &Place, key: &str, value: Option<&str>) -> anyhow::Result<()> {
    let value = match value {
        Some(value) => value.as_bytes().to_vec(),
        None => {
            let mut value = Vec::new();
            std::io::stdin().read_to_end(&mut value).context("reading standard input")?;
            value
        }
    };
    let store = place.open()?;
    store.set(key, &value)?;
    // A set is not answered; what is answered after it comes after it.
    if !store.check(&[key])? {
        bail!("{key} was deleted at once");
    }
    Ok(())
}

fn wait(place: &Place, keys: &[String]) -> anyhow::Result<()> {
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    let timeout = place.timeout.unwrap_or(FOREVER);
    Ok(place.open()?.wait(&keys, timeout)?)
}

fn list(place: &Place) -> anyhow::Result<()> {
    let mut keys = place.open()?.list_keys()?;
    keys.sort();
    // A key may hold anything; one line each, and no terminal is written to behind the user's back.
    let lines: String = keys.iter().flat_map(|key| key.chars().map(shown).chain([String::from("\n")])).collect();
    print(lines.as_bytes())
}

fn shown(c: char) -> String {
    if c.is_control() { c.escape_default().to_string() } else { c.to_string() }
}

fn print(bytes: &[u8]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        // Whoever reads has seen enough.
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("writing to stdout"),
    }
}

fn host_and_port(text: &str) -> Result<(String, u16), String> {
    let (host, port) = text.rsplit_once(':').ok_or("must be HOST:PORT")?;
    let host = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(host) => host,
        None if host.contains(':') => {
            return Err(format!("host '{host}': must be a name or IPv4 address, or an IPv6 address in brackets, as [::1]:29500"));
        }
        None => host,
    };
    let port: NonZeroU16 = port.parse().map_err(|_| format!("port {port}: must be 1 to 65535"))?;
    if host.is_empty() { Err("must be HOST:PORT".into()) } else { Ok((host.to_owned(), port.get())) }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let range = "must be a number of seconds from 0 to 1000000";
    let number: f64 = text.parse().map_err(|_| range)?;
    if (0.0..=1e6).contains(&number) { Ok(Duration::from_secs_f64(number)) } else { Err(range.into()) }
}
