//! What servers of the store protocol can do, side by side: `make bench-store`, where tests/torch/bench.py starts the servers and then this.
//!
//! One client for all: a thread that drives every connection through one epoll and speaks the protocol's bytes, so that what differs is the
//! server. Rounds of the servers alternate. Arguments: `--rounds N`, and NAME=PORT=PID for each server; the first is compared with the others.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use mio::{Events, Interest, Poll, Token};
use railhead::store::tcp::wire::{self, MAGIC, Part, RequestType};

/// Connections of the round trips.
const CONNECTIONS: [usize; 3] = [1, 8, 64];
/// Clients of a barrier, and idle connections of which the memory is measured.
const CLIENTS: usize = 1000;
/// Of round trips, per server and round.
const DURATION: Duration = Duration::from_millis(300);
/// Bytes of a value; tests/torch/bench.py tells the server that does nothing.
const SIZE: usize = 64;
/// How long a server may be silent.
const PATIENCE: Duration = Duration::from_secs(60);

struct Server {
    name: String,
    port: u16,
    pid: u32,
}

/// Connections to one server.
struct Client {
    connections: Vec<Connection>,
    poll: Poll,
}

struct Connection {
    stream: mio::net::TcpStream,
    /// Bytes of the reply that is awaited that are still to come.
    missing: usize,
}

impl Client {
    /// Opens connections as torch's client does: VALIDATE and PING in one write, and the answer awaited.
    fn open(port: u16, count: usize) -> Client {
        let (mut client, mut left) = (Client::greet(port, count), count);
        client.run(|_, _| {
            left -= 1;
            left > 0
        });
        client
    }

    /// Connects and sends the greetings, each of which is answered by four bytes.
    fn greet(port: u16, count: usize) -> Client {
        let poll = Poll::new().expect("epoll");
        let mut hello = Vec::new();
        wire::encode(&mut hello, RequestType::Validate, &[Part::Word(MAGIC)]);
        wire::encode(&mut hello, RequestType::Ping, &[Part::Word(7)]);
        let connect = |index| {
            let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).expect("connect");
            stream.set_nodelay(true).expect("no delay");
            stream.write_all(&hello).expect("write");
            stream.set_nonblocking(true).expect("non-blocking");
            let mut stream = mio::net::TcpStream::from_std(stream);
            poll.registry().register(&mut stream, Token(index), Interest::READABLE).expect("register");
            Connection { stream, missing: 4 }
        };
        let connections = (0..count).map(connect).collect();
        Client { connections, poll }
    }

    /// Sends one request on a connection, and awaits so many bytes.
    fn ask(&mut self, index: usize, request: &[u8], reply: usize) {
        let connection = &mut self.connections[index];
        connection.missing = reply;
        // Small enough for any socket's buffer while nothing else is unread.
        assert_eq!(connection.stream.write(request).expect("write"), request.len());
    }

    /// Takes in replies and calls `more` for each connection whose reply is whole; ends when that is false.
    fn run(&mut self, mut more: impl FnMut(&mut Client, usize) -> bool) {
        let (mut events, mut bytes) = (Events::with_capacity(1024), vec![0; 1 << 16]);
        loop {
            self.poll.poll(&mut events, Some(PATIENCE)).expect("epoll");
            assert!(!events.is_empty(), "the server has said nothing for {PATIENCE:?}");
            for event in &events {
                let index = event.token().0;
                // The whole reply, as far as it is there: what is left tells of itself no second time.
                loop {
                    let connection = &mut self.connections[index];
                    match connection.stream.read(&mut bytes) {
                        Ok(0) => panic!("the server hung up"),
                        Ok(n) => connection.missing = connection.missing.checked_sub(n).expect("no more than was asked for"),
                        Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                        Err(e) => panic!("read: {e}"),
                    }
                    if connection.missing == 0 {
                        if !more(self, index) {
                            return;
                        }
                        break;
                    }
                }
            }
        }
    }

    /// Set-and-get round trips, and how many of them per second: each connection sends SET and GET of a key of its own together, and again
    /// when the value is there.
    fn round_trips(&mut self) -> (u64, f64) {
        let value = [b'v'; SIZE];
        let request = |index| {
            let (mut request, key) = (Vec::new(), format!("bench/{index}"));
            wire::encode(&mut request, RequestType::Set, &[Part::Key(&key), Part::Value(&value)]);
            wire::encode(&mut request, RequestType::Get, &[Part::Key(&key)]);
            request
        };
        let requests: Vec<Vec<u8>> = (0..self.connections.len()).map(request).collect();
        let start = Instant::now();
        for (index, request) in requests.iter().enumerate() {
            self.ask(index, request, 8 + SIZE);
        }
        let (mut count, mut rate, mut left) = (0u64, None, requests.len());
        self.run(|client, index| {
            count += 1;
            // The clock costs as much as a request costs the server if it is read for each.
            if rate.is_none() && count.is_multiple_of(64) && start.elapsed() >= DURATION {
                rate = Some(count as f64 / start.elapsed().as_secs_f64());
            }
            match rate {
                None => client.ask(index, &requests[index], 8 + SIZE),
                // What is under way is taken in: the connections serve again.
                Some(_) => left -= 1,
            }
            left > 0
        });
        (count, rate.expect("a rate"))
    }

    /// Milliseconds from the first client's connecting until all have been greeted, have joined a barrier and been let through.
    fn join(port: u16) -> f64 {
        let (mut greeted, mut left, request) = (vec![false; CLIENTS], CLIENTS, barrier());
        let start = Instant::now();
        let mut client = Client::greet(port, CLIENTS);
        client.run(|client, index| {
            if !std::mem::replace(&mut greeted[index], true) {
                client.ask(index, &request, 1);
                return true;
            }
            left -= 1;
            left > 0
        });
        let took = start.elapsed();
        drop(client);
        // Answered once the server has seen them all go: that is nobody else's time.
        drop(Client::open(port, 1));
        took.as_secs_f64() * 1e3
    }

    /// As `join`, of clients that are connected and greeted.
    fn barrier(&mut self) -> f64 {
        let (mut left, request) = (CLIENTS, barrier());
        let start = Instant::now();
        (0..CLIENTS).for_each(|index| self.ask(index, &request, 1));
        self.run(|_, _| {
            left -= 1;
            left > 0
        });
        start.elapsed().as_secs_f64() * 1e3
    }
}

/// The request for a barrier that nobody has come to.
fn barrier() -> Vec<u8> {
    let (key, mut request) = (format!("bench/barrier/{}/{:?}", std::process::id(), Instant::now()), Vec::new());
    wire::encode(&mut request, RequestType::Barrier, &[Part::Key(&key), Part::Int(CLIENTS as i64)]);
    request
}

/// Private memory of a process, in KiB.
fn private_kib(pid: u32) -> f64 {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("smaps_rollup");
    let private = text.lines().filter(|line| line.starts_with("Private_Clean:") || line.starts_with("Private_Dirty:"));
    private.map(|line| line.split_whitespace().nth(1).and_then(|number| number.parse::<f64>().ok()).expect("a number")).sum()
}

/// Processor time of all threads of a process so far, in microseconds.
fn busy_micros(pid: u32) -> f64 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("task").flatten();
    let nanos = |stat: String| stat.split_whitespace().next()?.parse::<f64>().ok();
    threads.filter_map(|thread| nanos(fs::read_to_string(thread.path().join("schedstat")).ok()?)).sum::<f64>() / 1e3
}

fn median(figures: &[f64]) -> f64 {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// A row of the table, from each server's rounds. Ratios are taken round by round, so that a slow moment counts for both.
fn row(what: &str, unit: &str, figures: &[Vec<f64>]) {
    let mut line = format!("| {what} |");
    for figures in figures {
        let figure = median(figures);
        line += &format!(" {figure:.*} {unit} |", if figure >= 100.0 { 0 } else { 2 });
    }
    for others in &figures[1..] {
        let mut ratios: Vec<f64> = figures[0].iter().zip(others).map(|(ours, theirs)| ours / theirs).collect();
        ratios.sort_by(f64::total_cmp);
        line += &format!(" {:.2} ({:.2}..{:.2}) |", median(&ratios), ratios[0], ratios[ratios.len() - 1]);
    }
    println!("{line}");
}

fn main() {
    let (mut rounds, mut servers) = (9, Vec::new());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.split('=').collect::<Vec<_>>()[..] {
            // Of `cargo bench` itself.
            ["--bench"] => {}
            ["--rounds"] => rounds = arguments.next().and_then(|n| n.parse().ok()).expect("--rounds N"),
            [name, port, pid] => {
                servers.push(Server { name: name.into(), port: port.parse().expect("a port"), pid: pid.parse().expect("a process") })
            }
            _ => panic!("{argument}: neither --rounds N nor NAME=PORT=PID"),
        }
    }
    let names = servers.iter().map(|server| format!(" {} |", server.name));
    let ratios = servers.iter().skip(1).map(|server| format!(" ratio to {} (min..max) |", server.name));
    println!("| |{}\n|---|{}", names.chain(ratios).collect::<String>(), "---|".repeat(2 * servers.len() - 1));
    let taken = |clients: &mut [Client], measure: &mut dyn FnMut(usize, &mut Client) -> f64| {
        let mut figures = vec![Vec::new(); clients.len()];
        for _ in 0..rounds {
            clients.iter_mut().enumerate().for_each(|(server, client)| figures[server].push(measure(server, client)));
        }
        figures
    };
    for connections in CONNECTIONS {
        // Kept for all rounds: a server that looks up the name of each peer takes its time to accept.
        let mut clients: Vec<Client> = servers.iter().map(|server| Client::open(server.port, connections)).collect();
        let (mut costs, mut own) = (vec![Vec::new(); servers.len()], vec![Vec::new(); servers.len()]);
        let busy = |server: usize| [servers[server].pid, std::process::id()].map(busy_micros);
        let figures = taken(&mut clients, &mut |server, client| {
            let before = busy(server);
            let (count, rate) = client.round_trips();
            let after = busy(server);
            costs[server].push((after[0] - before[0]) / count as f64);
            own[server].push((after[1] - before[1]) / count as f64);
            rate
        });
        row(&format!("set + get, {connections} connection(s)"), "1/s", &figures);
        row("of which the server's processor time", "us", &costs);
        row("and this client's", "us", &own);
    }
    let idle = |server: &Server| {
        // What the first connections make it take stays.
        drop(Client::open(server.port, 10));
        let before = private_kib(server.pid);
        let client = Client::open(server.port, CLIENTS);
        (client, vec![(private_kib(server.pid) - before).max(0.0) / CLIENTS as f64])
    };
    let (mut clients, memory): (Vec<Client>, Vec<Vec<f64>>) = servers.iter().map(idle).unzip();
    let barriers = taken(&mut clients, &mut |_, client| client.barrier());
    let joins = taken(&mut clients, &mut |server, _| Client::join(servers[server].port));
    row(&format!("{CLIENTS} clients connect and join a barrier"), "ms", &joins);
    row(&format!("{CLIENTS} clients that are connected join a barrier"), "ms", &barriers);
    row(&format!("memory per idle connection, of {CLIENTS}"), "KiB", &memory);
    println!("\nMedians of {rounds} round(s), the servers in turn.");
}
