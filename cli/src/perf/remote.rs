//! Two hosts: the listening side lends its rank 1, with its own plugin and environment, to one coordinator on another host. What comes over
//! the connection is frames of `channel`; nothing in them names a file here, and a rank checks the sizes that it is asked for.

use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use super::channel;
use super::message::{FromRank, PluginSpec, Start, ToRank};
use super::pair::{ENDED_WELL, Process};
use super::warnings::printable;

/// Where none is given.
const PORT: u16 = 18520;
/// Sent by both sides first, so that neither talks to something else.
const GREETING: &[u8; 16] = b"railhead perf 2\n";
/// For the greeting, for connecting, and for a rank to end.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Idle time before the kernel asks whether the other host still lives.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// Waits for a coordinator and serves it until it leaves.
pub fn listen(address: &str, spec: &PluginSpec, cpu: Option<usize>, env: &[(String, String)]) -> anyhow::Result<()> {
    let addresses = resolve(address).context("--listen")?;
    let listener = bind(&addresses).or_else(|error| match addresses[..] {
        // A host without IPv6.
        [any] if any.ip() == Ipv6Addr::UNSPECIFIED => bind(&[(Ipv4Addr::UNSPECIFIED, any.port()).into()]),
        _ => Err(error),
    });
    let listener = listener.with_context(|| format!("cannot listen at {address}"))?;
    println!("listening at {}", listener.local_addr()?);
    io::stdout().flush()?;
    loop {
        let (stream, from) = listener.accept()?;
        match greet(&stream) {
            Ok(()) => return serve(&stream, from, spec, cpu, env),
            Err(error) => eprintln!("railhead: {from}: {error:#}"),
        }
    }
}

/// Listens at the first address that can be had.
fn bind(addresses: &[SocketAddr]) -> io::Result<TcpListener> {
    let bind = |&address: &SocketAddr| -> io::Result<TcpListener> {
        let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        if address.ip() == Ipv6Addr::UNSPECIFIED {
            // All addresses are those of IPv4 too, whatever net.ipv6.bindv6only says.
            socket.set_only_v6(false)?;
        }
        socket.bind(&address.into())?;
        // Only one coordinator is served; others may come before it.
        socket.listen(16)?;
        Ok(socket.into())
    };
    let mut last = io::ErrorKind::AddrNotAvailable.into();
    for address in addresses {
        match bind(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// Connects with a listening side.
pub fn connect(address: &str) -> anyhow::Result<TcpStream> {
    let addresses = resolve(address).context("--connect")?;
    let connect = |address: &SocketAddr| TcpStream::connect_timeout(address, TIMEOUT);
    let mut last = None;
    for candidate in &addresses {
        match connect(candidate) {
            Ok(stream) => {
                greet(&stream)?;
                return Ok(stream);
            }
            Err(e) => last = Some(e),
        }
    }
    let why = last.map_or_else(|| "no address".to_owned(), |e| e.to_string());
    bail!("cannot connect with {address}: {why}; is `railhead perf --listen` running there?")
}

fn resolve(address: &str) -> anyhow::Result<Vec<SocketAddr>> {
    let bare = address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(address);
    let found = match bare.parse::<IpAddr>() {
        Ok(ip) => Ok(vec![SocketAddr::new(ip, PORT)]),
        // No name has such; no resolver need be asked.
        Err(_) if address.is_empty() || address.contains(['[', ']']) && address.parse::<SocketAddr>().is_err() => {
            Err(std::io::Error::from(std::io::ErrorKind::InvalidInput))
        }
        Err(_) if address.contains(':') => address.to_socket_addrs().map(Iterator::collect),
        Err(_) => (address, PORT).to_socket_addrs().map(Iterator::collect),
    };
    let found: Vec<SocketAddr> = found.with_context(|| format!("{address:?} is no ADDRESS or ADDRESS:PORT"))?;
    ensure!(!found.is_empty(), "{address:?} has no address");
    Ok(found)
}

fn greet(stream: &TcpStream) -> anyhow::Result<()> {
    use std::io::Read;
    stream.set_nodelay(true)?;
    SockRef::from(stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    let mut both: &TcpStream = stream;
    both.write_all(GREETING)?;
    let mut theirs = [0; GREETING.len()];
    both.read_exact(&mut theirs).context("no greeting: no railhead perf there?")?;
    ensure!(theirs == *GREETING, "not this version of railhead perf at the other end");
    stream.set_read_timeout(None)?;
    Ok(())
}

fn serve(stream: &TcpStream, from: SocketAddr, spec: &PluginSpec, cpu: Option<usize>, env: &[(String, String)]) -> anyhow::Result<()> {
    println!("measured by {from}");
    let (mut process, rank) = Process::start(env)?;
    let answers = {
        let (from_rank, to_peer) = (rank.try_clone()?, stream.try_clone()?);
        std::thread::Builder::new().name("answers".into()).spawn(move || answers(from_rank, to_peer))?
    };
    let commands = commands(stream, &rank, spec, cpu);
    // A rank that has been told to finish ends by itself; any other is ended with its process.
    if matches!(commands, Ok(Ended::Finished)) {
        let ended = process.ended(TIMEOUT);
        ensure!(ended == ENDED_WELL, "the rank {ended}");
    }
    drop(process);
    // Its end of the connection is closed now, which ends the thread.
    let told = answers.join().unwrap_or(None);
    match (commands?, told) {
        (_, Some(failure)) => bail!("the rank failed: {}", printable(&failure)),
        (Ended::Finished, None) => Ok(()),
        (Ended::Left, None) => bail!("{from} left before it was done"),
    }
}

enum Ended {
    Finished,
    Left,
}

/// From the coordinator to the rank. The plugin is ours, whatever the coordinator names.
fn commands(mut from: &TcpStream, mut to: &UnixStream, spec: &PluginSpec, cpu: Option<usize>) -> anyhow::Result<Ended> {
    while let Some(command) = channel::read::<ToRank>(&mut from).context("what the coordinator sends")? {
        let command = match command {
            ToRank::Start(start) => {
                ensure!(start.rank == 1, "the coordinator asks for rank {}", start.rank);
                ToRank::Start(Start { plugin: Some(spec.clone()), cpu, ..start })
            }
            other => other,
        };
        // The thread that reads its answers tells the coordinator that the rank is gone.
        if channel::write(&mut to, &command).is_err() {
            return Ok(Ended::Left);
        }
        if matches!(command, ToRank::Finish) {
            return Ok(Ended::Finished);
        }
    }
    Ok(Ended::Left)
}

/// From the rank to the coordinator; what the rank failed with, if it did.
fn answers(mut from: UnixStream, mut to: TcpStream) -> Option<String> {
    let mut failure = None;
    while let Ok(Some(answer)) = channel::read::<FromRank>(&mut from) {
        if let FromRank::Failed { message } = &answer {
            failure = Some(message.clone());
        }
        if channel::write(&mut to, &answer).is_err() {
            break;
        }
    }
    // Wakes the other thread too, if the rank died.
    let _ = to.shutdown(Shutdown::Both);
    failure
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_may_be_left_out_and_an_address_may_be_of_either_kind() {
        for (text, socket) in [
            ("127.0.0.1", "127.0.0.1:18520"),
            ("127.0.0.1:7", "127.0.0.1:7"),
            ("::1", "[::1]:18520"),
            ("[::1]", "[::1]:18520"),
            ("[::1]:7", "[::1]:7"),
            ("[::]", "[::]:18520"),
        ] {
            assert_eq!(resolve(text).unwrap(), [socket.parse().unwrap()], "{text}");
        }
        for bad in ["", "127.0.0.1:x", "127.0.0.1:65536", "[::1", "::1]:7", ":"] {
            assert!(resolve(bad).is_err(), "{bad:?}");
        }
    }
}
