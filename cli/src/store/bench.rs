//! `railhead store bench`: what servers of the store protocol can do, ours and torch's beside each other in one run.
//!
//! One client for all: a thread that drives every connection through one epoll and speaks the protocol's bytes, so that what differs is the server. Rounds
//! of the servers alternate.

mod client;
mod report;

use std::time::Duration;

use anyhow::Context;

use super::owner;
use client::Client;
use report::Row;

/// Measures servers: set-and-get round trips, how fast many clients join a barrier, memory per idle connection
#[derive(clap::Args)]
pub struct Args {
    /// The servers, each with a name; the first is the one that the others are compared with
    #[arg(long = "server", value_name = "NAME=HOST:PORT", required = true, value_parser = named)]
    servers: Vec<(String, (String, u16))>,
    /// Numbers of connections for round trips
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8,64", value_parser = clap::value_parser!(u32).range(1..=10000))]
    connections: Vec<u32>,
    /// Clients of the barrier, and idle connections of which the memory is measured
    #[arg(long, value_name = "N", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10000))]
    clients: u32,
    /// Rounds, of which the median counts
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Time per server, number of connections and round: seconds, or a number with ms, s, m or h
    #[arg(long, value_name = "TIME", default_value = "300ms", value_parser = some_time)]
    duration: Duration,
    /// Bytes of a value
    #[arg(long, value_name = "BYTES", default_value_t = 64, value_parser = clap::value_parser!(u32).range(0..=1048576))]
    size: u32,
}

/// Runs the command.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    let pids = args.servers.iter().map(|(name, place)| owner::listening(place.1).with_context(|| name.clone()));
    let pids: Vec<i32> = pids.collect::<anyhow::Result<_>>()?;
    for &connections in &args.connections {
        let mut clients = open(args, connections)?;
        let mut costs = vec![Vec::new(); pids.len()];
        let mut own = vec![Vec::new(); pids.len()];
        let figures = rounds(args, &mut clients, |server, client| {
            let (Some(&pid), Some(costs), Some(own)) = (pids.get(server), costs.get_mut(server), own.get_mut(server)) else {
                return Ok(f64::NAN);
            };
            let busy = || Ok::<_, anyhow::Error>((owner::busy_micros(pid)?, owner::busy_micros(std::process::id().cast_signed())?));
            let before = busy()?;
            let (count, rate) = client.round_trips(args.size, args.duration)?;
            let after = busy()?;
            costs.push((after.0 - before.0) / count as f64);
            own.push((after.1 - before.1) / count as f64);
            Ok(rate)
        })?;
        rows.push(Row { what: format!("set + get, {connections} connection(s)"), unit: "1/s", more_is_better: true, figures });
        rows.push(Row { what: "of which the server's processor time".into(), unit: "us", more_is_better: false, figures: costs });
        rows.push(Row { what: "and this client's".into(), unit: "us", more_is_better: false, figures: own });
    }
    let (mut clients, mut memory) = (Vec::new(), Vec::new());
    for ((name, place), &pid) in args.servers.iter().zip(&pids) {
        let opened = Client::open_measured(place, pid, args.clients).with_context(|| name.clone())?;
        clients.push(opened.0);
        memory.push(vec![opened.1]);
    }
    let figures = rounds(args, &mut clients, |_, client| client.barrier())?;
    drop(clients);
    let mut places: Vec<&(String, u16)> = args.servers.iter().map(|(_, place)| place).collect();
    let joins = rounds(args, &mut places, |_, place| Client::join(place, args.clients))?;
    let what = |how: &str| format!("{} clients {how}join a barrier", args.clients);
    rows.push(Row { what: what("connect and "), unit: "ms", more_is_better: false, figures: joins });
    rows.push(Row { what: what("that are connected "), unit: "ms", more_is_better: false, figures });
    rows.push(Row {
        what: format!("memory per idle connection, of {}", args.clients),
        unit: "KiB",
        more_is_better: false,
        figures: memory,
    });
    let names: Vec<&str> = args.servers.iter().map(|(name, _)| name.as_str()).collect();
    super::print(report::table(&names, args.rounds, &rows).as_bytes())
}

/// Connections to each server. They are kept for all rounds: a server that looks up the name of each peer takes its time to accept.
fn open(args: &Args, count: u32) -> anyhow::Result<Vec<Client>> {
    args.servers.iter().map(|(name, place)| Client::open(place, count).with_context(|| name.clone())).collect()
}

/// One figure per server and round, the servers in turn.
fn rounds<C>(
    args: &Args,
    clients: &mut [C],
    mut measure: impl FnMut(usize, &mut C) -> anyhow::Result<f64>,
) -> anyhow::Result<Vec<Vec<f64>>> {
    let mut figures = vec![Vec::new(); args.servers.len()];
    for _ in 0..args.rounds {
        for (index, (((name, _), client), figures)) in args.servers.iter().zip(&mut *clients).zip(&mut figures).enumerate() {
            figures.push(measure(index, client).with_context(|| name.clone())?);
        }
    }
    Ok(figures)
}

fn named(text: &str) -> Result<(String, (String, u16)), String> {
    let (name, place) = text.split_once('=').filter(|(name, _)| !name.is_empty()).ok_or("must be NAME=HOST:PORT")?;
    Ok((name.to_owned(), super::host_and_port(place)?))
}

fn some_time(text: &str) -> Result<Duration, String> {
    super::time(text).and_then(|time| if time.is_zero() { Err("must be more than 0".into()) } else { Ok(time) })
}
