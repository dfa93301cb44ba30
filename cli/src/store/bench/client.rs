//! The client of the measurements: many connections, one epoll, the protocol's bytes.

use std::io::Write;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use railhead::store::tcp::wire::{self, MAGIC, Part, Query};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{self, RecvFlags, SendFlags};

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
        let mut client = Client::greet(place, count)?;
        let mut left = count;
        client.run(|_, _| {
            left -= 1;
            Ok(left > 0)
        })?;
        Ok(client)
    }

    /// Connects and sends the greetings, each of which is answered by four bytes.
    fn greet(place: &(String, u16), count: u32) -> anyhow::Result<Client> {
        let address = (place.0.as_str(), place.1).to_socket_addrs()?.next().with_context(|| format!("{} has no address", place.0))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut hello = Vec::new();
        wire::encode(&mut hello, Query::Validate, &[Part::Word(MAGIC)]);
        wire::encode(&mut hello, Query::Ping, &[Part::Word(7)]);
        let mut connections = Vec::new();
        for index in 0..count {
            let stream = TcpStream::connect(address).with_context(|| format!("connection {index} to {address}"))?;
            stream.set_nodelay(true)?;
            (&stream).write_all(&hello)?;
            let data = epoll::EventData::new_u64(u64::from(index));
            epoll::add(&epoll, stream.as_fd(), data, epoll::EventFlags::IN | epoll::EventFlags::ET)?;
            connections.push(Connection { stream, missing: 4 });
        }
        Ok(Client { connections, epoll })
    }

    /// Sends one request on a connection, and awaits so many bytes.
    fn ask(&mut self, index: usize, request: &[u8], reply: usize) -> anyhow::Result<()> {
        let connection = self.connections.get_mut(index).context("a connection")?;
        connection.missing = reply;
        // Small enough for any socket's buffer while nothing else is unread.
        let sent = net::send(&connection.stream, request, SendFlags::NOSIGNAL).context("sending")?;
        ensure!(sent == request.len(), "the server does not take {} bytes", request.len());
        Ok(())
    }

    /// Takes in replies and calls `done` for each connection whose reply is whole; ends when that is false.
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
                    match net::recv(&connection.stream, &mut bytes[..], RecvFlags::DONTWAIT).map(|(n, _)| n) {
                        Ok(0) => bail!("the server hung up"),
                        Ok(n) => {
                            connection.missing = connection.missing.checked_sub(n).context("the server sent more than it was asked for")?
                        }
                        Err(Errno::AGAIN) => break,
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

    /// Milliseconds from the first client's connecting until all have been greeted, have joined a barrier and been let through.
    pub fn join(place: &(String, u16), count: u32) -> anyhow::Result<f64> {
        let request = barrier_of(count as usize);
        let (mut greeted, mut left) = (vec![false; count as usize], count);
        let start = Instant::now();
        let mut client = Client::greet(place, count)?;
        client.run(|client, index| {
            let greeted = greeted.get_mut(index).context("a connection")?;
            if !std::mem::replace(greeted, true) {
                client.ask(index, &request, 1)?;
                return Ok(true);
            }
            left -= 1;
            Ok(left > 0)
        })?;
        let took = start.elapsed();
        drop(client);
        // Answered once the server has seen them all go: that is nobody else's time.
        drop(Client::open(place, 1)?);
        Ok(took.as_secs_f64() * 1e3)
    }

    /// Milliseconds from the first client's request until all have joined a barrier and been let through; connected and greeted they are.
    pub fn barrier(&mut self) -> anyhow::Result<f64> {
        let mut left = self.connections.len();
        let request = barrier_of(left);
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

/// The request for a barrier of so many that nobody has come to.
fn barrier_of(count: usize) -> Vec<u8> {
    let key = format!("bench/barrier/{}/{:?}", std::process::id(), Instant::now());
    let mut request = Vec::new();
    wire::encode(&mut request, Query::Barrier, &[Part::Key(&key), Part::Int(count as i64)]);
    request
}
