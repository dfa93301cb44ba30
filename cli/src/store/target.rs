//! Which store a command works on, and for how long. Read from the command line and the environment, on the main thread.

use std::num::NonZeroU16;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use railhead::store::rendezvous::Environment;
use railhead::store::tcp::{Host, TcpOptions};
use railhead::store::{Error, FileStore, PrefixStore, Store, TcpStore};

/// Which store.
#[derive(clap::Args)]
pub struct StoreTarget {
    /// The server; $MASTER_ADDR:$MASTER_PORT if it is left out
    #[arg(long, value_name = "HOST:PORT", value_parser = host_and_port)]
    connect: Option<(String, u16)>,
    /// A store in a file, which has no queues; this does not count as one of its ranks
    #[arg(long, value_name = "FILE", conflicts_with = "connect")]
    file: Option<PathBuf>,
    /// Only keys behind this prefix, as PREFIX/KEY
    #[arg(long)]
    prefix: Option<String>,
    /// How long to wait for the server or the file's lock, and for keys: seconds, or a number with ms, s, m or h. 0 looks once; a server has 1s to let this in
    #[arg(long, value_name = "TIME", default_value = "300s", value_parser = time, allow_hyphen_values = true)]
    timeout: Duration,
}

impl StoreTarget {
    /// The store, and what connecting has left of the timeout.
    pub fn open(&self) -> anyhow::Result<(Arc<dyn Store>, Duration)> {
        let (start, mut left) = (Instant::now(), self.timeout);
        let store: Arc<dyn Store> = match (&self.file, &self.connect) {
            (Some(file), _) => Arc::new(FileStore::open_existing(file, self.timeout)?),
            (None, Some((host, port))) => Arc::new(self.join(host, *port)?),
            (None, None) => {
                let variable = |name| std::env::var(name).with_context(|| format!("neither --connect nor --file, and {name} is not set"));
                let (host, port) = (variable("MASTER_ADDR")?, variable("MASTER_PORT")?);
                let number: NonZeroU16 = port.parse().with_context(|| format!("MASTER_PORT={port}: expected 1 to 65535"))?;
                Arc::new(self.join(&host, number.get())?)
            }
        };
        if self.file.is_none() {
            left = left.saturating_sub(start.elapsed());
        }
        let store = match &self.prefix {
            Some(prefix) => Arc::new(PrefixStore::new(prefix, store)),
            None => store,
        };
        Ok((store, left))
    }

    fn join(&self, host: &str, port: u16) -> Result<TcpStore, Error> {
        let secret = Environment::process().secret()?;
        let timeout = self.timeout.max(Duration::from_secs(1));
        TcpStore::new(Host::Other(host.to_owned(), port), TcpOptions { timeout, secret, ..TcpOptions::default() })
    }
}

/// A parser for clap of a server's address.
pub fn host_and_port(text: &str) -> Result<(String, u16), String> {
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

/// A parser for clap of a time.
pub fn time(text: &str) -> Result<Duration, String> {
    let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
    let seconds = match unit {
        "ms" => Some(0.001),
        "" | "s" => Some(1.0),
        "m" => Some(60.0),
        "h" => Some(3600.0),
        _ => None,
    };
    let time = seconds.and_then(|unit| Some(number.parse::<f64>().ok()? * unit)).filter(|time| (0.0..=1e6).contains(time));
    time.map(Duration::from_secs_f64).ok_or_else(|| "must be a time from 0 to 1000000 seconds, as 90, 1.5s, 200ms, 1m or 2h".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units_or_are_seconds() {
        for (text, millis) in [("0", 0), ("1", 1_000), ("0.25", 250), ("1.5s", 1_500), ("200ms", 200), ("1m", 60_000), ("2h", 7_200_000)] {
            assert_eq!(time(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "s", "-1", "-1s", "1 s", "1d", "1e9", "1e7", "278h", "nan", "inf", "ms1", "1ms2"] {
            let said = time(text).unwrap_err();
            assert!(said.starts_with("must be a time from 0 to 1000000 seconds"), "{text}: {said}");
        }
    }
}
