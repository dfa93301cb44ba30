//! The TCPStore's server and client, each against the bytes recorded from torch 2.15, against each other, and against peers that break off, do not
//! read, or send invalid data. What both have in common with other stores is in `store.rs`.

mod client;
mod corpus;
mod late;
mod secret;
mod server;
mod watch;
mod wire;

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use railhead::store::TcpStore;
use railhead::store::tcp::{Host, Server, ServerOptions, TcpOptions};

/// Long enough for anything that must happen, on a machine that is busy.
const LONG: Duration = Duration::from_secs(120);

fn serve(change: impl FnOnce(&mut ServerOptions)) -> Server {
    let mut options = ServerOptions { port: 0, ..ServerOptions::default() };
    change(&mut options);
    Server::start(options).expect("start")
}

fn join(port: u16) -> TcpStore {
    join_at("localhost", port)
}

fn join_at(host: &str, port: u16) -> TcpStore {
    TcpStore::new(Host::Other(host.into(), port), TcpOptions { timeout: LONG, ..TcpOptions::default() }).expect("connect")
}

/// A loopback address that nobody else uses, for tests that come back to a port: elsewhere it may be taken meanwhile.
fn own_address() -> Ipv4Addr {
    static COUNT: AtomicU8 = AtomicU8::new(1);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, high | 1, low, COUNT.fetch_add(1, Ordering::Relaxed))
}

/// A port at that address that nobody listens on.
fn free_port(address: Ipv4Addr) -> u16 {
    TcpListener::bind((address, 0)).expect("bind").local_addr().expect("address").port()
}
