//! The TCPStore's server and client, each against the bytes recorded from torch 2.15, against each other, and against peers that break off, do not
//! read, or send invalid data. What both have in common with other stores is in `store.rs`.

mod client;
mod corpus;
mod late;
mod secret;
mod server;
mod watch;
mod wire;

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
    TcpStore::new(Host::Other("localhost".into(), port), TcpOptions { timeout: LONG, ..TcpOptions::default() }).expect("connect")
}
