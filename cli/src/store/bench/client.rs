//! The client of the measurements: many connections, one epoll, the protocol's bytes.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use railhead::store::tcp::wire::{self, MAGIC, Part, Query};
use rustix::event::epoll;

use crate::store::owner;

/// How long the server may be silent.
const PATIENCE: Duration = Duration::from_secs(60);

/// Connections to one server.
pub struct Client {
    connections: Vec<Connection>,
    epoll: rustix::fd::OwnedFd,
}

struct Connection {
    stream: TcpStream,
    /// Bytes of the reply that is awaited that are still to come.
    missing: usize,
}

impl Client {
    /// Opens connections as torch's client does: VALIDATE and PING in one write, and the answer awaited.
    pub fn open(place: &(String, u16), count: u32) -> anyhow::Result<Client> {
        let address = (place.0.as_str(), place.1).to_socket_addrs()?.next().with_context(|| format!("{} has no address", place.0))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut hello = Vec::new();
        wire::encode(&mut hello, Query::Validate, &[Part::Word(MAGIC)]);
        wire::encode(&mut hello, Query::Ping, &[Part::Word(7)]);
        let mut connections = Vec::new();
        for index in 0..count {
            let mut stream = TcpStream::connect(address).with_context(|| format!("connection {index} to {address}"))?;
            stream.set_nodelay(true)?;
            stream.write_all(&hello)?;
            connections.push(Connection { stream, missing: 4 });
        }
        for (index, connection) in connections.iter_mut().enumerate() {
            let mut nonce = [0; 4];
            connection.stream.set_read_timeout(Some(PATIENCE))?;
            connection.stream.read_exact(&mut nonce).context("the reply to a PING")?;
            ensure!(nonce == 7u32.to_le_bytes(), "not a store: it answers a PING with {nonce:?}");
            connection.stream.set_nonblocking(true)?;
            epoll::add(
                &epoll,
                connection.stream.as_fd(),
                epoll::EventData::new_u64(index as u64),
                epoll::EventFlags::IN | epoll::EventFlags::ET,
            )?;
        }
        Ok(Client { connections, epoll })
    }

    /// Sends one request on a connection, and awaits so many bytes.
    fn ask(&mut self, index: usize, request: &[u8], reply: usize) -> anyhow::Result<()> {
        let connection = self.connections.get_mut(index).context("a connection")?;
        connection.missing = reply;
        // Small enough for any socket's buffer while nothing else is unread.
        connection.stream.write_all(request).context("sending")
    }

    /// Waits for replies and calls `done` for each connection whose reply is whole; ends when that is false.
    fn run(&mut self, mut done: impl FnMut(&mut Client, usize) -> anyhow::Result<bool>) -> anyhow::Result<()> {
        let mut events = Vec::with_capacity(1024);
        let mut bytes = vec![0; 1 << 16];
        loop {
            events.clear();
            let timeout = rustix::event::Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
            epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout))?;
            ensure!(!events.is_empty(), "the server has said nothing for {PATIENCE:?}");
            for event in &events {
                let index = event.data.u64() as usize;
                // The whole reply, as far as it is there: what is left tells of itself no second time.
                loop {
                    let connection = self.connections.get_mut(index).context("a connection")?;
                    match connection.stream.read(&mut bytes) {
                        Ok(0) => bail!("the server hung up"),
                        Ok(n) => {
                            connection.missing = connection.missing.checked_sub(n).context("the server sent more than it was asked for")?
                        }
                        Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                        Err(e) => return Err(e).context("receiving"),
                    }
                    if connection.missing == 0 {
                        if !done(self, index)? {
                            return Ok(());
                        }
                        break;
                    }
                }
            }
        }
    }

    /// As [`Client::open`], and KiB of memory that the server's process takes for each connection.
    pub fn open_measured(place: &(String, u16), server: i32, count: u32) -> anyhow::Result<(Client, f64)> {
        // What the first connections make it take stays.
        drop(Client::open(place, 10)?);
        let before = owner::private_kib(server)?;
        let client = Client::open(place, count)?;
        let after = owner::private_kib(server)?;
        Ok((client, after.saturating_sub(before) as f64 / f64::from(count)))
    }

    /// Set-and-get round trips, and how many of them per second: each connection sends SET and GET of a key of its own together, and again when the value is there.
    pub fn round_trips(&mut self, size: u32, duration: Duration) -> anyhow::Result<(u64, f64)> {
        let value = vec![b'v'; size as usize];
        let request = |index| {
            let mut request = Vec::new();
            let key = format!("bench/{index}");
            wire::encode(&mut request, Query::Set, &[Part::Key(&key), Part::Value(&value)]);
            wire::encode(&mut request, Query::Get, &[Part::Key(&key)]);
            request
        };
        let requests: Vec<Vec<u8>> = (0..self.connections.len()).map(request).collect();
        let reply = 8 + value.len();
        let start = Instant::now();
        for (index, request) in requests.iter().enumerate() {
            self.ask(index, request, reply)?;
        }
        let (mut count, mut counted, mut elapsed, mut left) = (0u64, 0, None, requests.len());
        self.run(|client, index| {
            count += 1;
            // The clock costs as much as a request costs the server if it is read for each.
            if elapsed.is_none() && count.is_multiple_of(64) && start.elapsed() >= duration {
                (counted, elapsed) = (count, Some(start.elapsed()));
            }
            match elapsed {
                None => client.ask(index, requests.get(index).context("a request")?, reply)?,
                // What is under way is taken in: the connections serve again.
                Some(_) => left -= 1,
            }
            Ok(left > 0)
        })?;
        Ok((count, counted as f64 / elapsed.unwrap_or_default().as_secs_f64()))
    }

    /// Milliseconds from the first client's request until all have joined a barrier and been let through.
    pub fn barrier(&mut self) -> anyhow::Result<f64> {
        let mut left = self.connections.len();
        let key = format!("bench/barrier/{}/{:?}", std::process::id(), Instant::now());
        let mut request = Vec::new();
        wire::encode(&mut request, Query::Barrier, &[Part::Key(&key), Part::Int(left as i64)]);
        let start = Instant::now();
        for index in 0..left {
            self.ask(index, &request, 1)?;
        }
        self.run(|_, _| {
            left -= 1;
            Ok(left > 0)
        })?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }
}
