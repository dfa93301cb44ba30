//! A TCP connection over loopback between the two ranks, for the limits that use one.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context, ensure};
use socket2::{Domain, Socket, Type};

use super::super::rank::coordinator::Coordinator;

/// Tried in this order. The system's default may pace loopback (bbr halves it); cubic may need privilege, reno does not.
const CONGESTION: [&str; 2] = ["cubic", "reno"];
/// How long the other rank may take to connect: it does so at once.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Said by the rank that connects: the other can accept without waiting.
const CONNECTED: &str = "connected";

/// A connection, and its congestion control.
pub fn pair(rank: usize, coordinator: &mut Coordinator) -> anyhow::Result<(TcpStream, String)> {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
    let set = CONGESTION.iter().find(|name| socket.set_tcp_congestion(name.as_bytes()).is_ok());
    let name = set.map_or_else(|| "the system's default".to_owned(), |name| (*name).to_owned());
    let stream = if rank == 0 {
        socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
        socket.listen(1)?;
        let listener = TcpListener::from(socket);
        coordinator.swap(listener.local_addr()?.to_string())?;
        let connected = coordinator.swap(String::new())?;
        ensure!(connected == CONNECTED, "the other rank {connected}");
        // Inherits the congestion control.
        listener.accept()?.0
    } else {
        let address: SocketAddr = coordinator.swap(String::new())?.parse().context("no address")?;
        let connected = socket.connect_timeout(&address.into(), TIMEOUT);
        coordinator.swap(connected.as_ref().map_or_else(|e| format!("cannot connect: {e}"), |()| CONNECTED.into()))?;
        connected.context("cannot connect over loopback")?;
        TcpStream::from(socket)
    };
    Ok((stream, format!("TCP over loopback with congestion control {name}")))
}
