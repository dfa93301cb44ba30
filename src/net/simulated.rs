//! Comms on the simulated fabric, for `crate::sim`: their handshake, which goes over TCP, is left out, and what it would have told is handed over. A pair
//! of sockets stands for the connection that it leaves.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::base::config::Config;
use crate::base::error::{Error, Result};
use crate::base::fd::TcpStream;
use crate::base::stats::{self, CommKind};
use crate::fabric::sim::World;
use crate::link::incoming::{RECORDS_SIZE, Records};
use crate::link::liveness::{Liveness, Peer};
use crate::link::queue_pairs::{QueuePairs, Side};
use crate::link::{CELLS_SIZE, Cells, Connection};

use super::cts_fifo::{CTS_FIFO_SIZE, CtsFifo};
use super::{Net, RecvComm, SendComm};

/// A host's network, and the number of its device that has all its rails.
pub struct Host {
    /// Registers memory for that device.
    pub net: Arc<Net>,
    /// See there.
    pub dev: usize,
}

impl Host {
    /// A host of the world, on so many rails.
    ///
    /// Errors: rails that may not be fused.
    pub fn new(world: &World, number: usize, rails: usize, config: &Arc<Config>) -> Result<Host> {
        let net = Net::with_devices(config.clone(), world.devices(number, rails))?;
        let dev = if rails > 1 { net.make_virtual(&(0..rails).collect::<Vec<_>>())? } else { 0 };
        Ok(Host { net, dev })
    }
}

/// The two ends of a comm from one host to another, connected.
///
/// Errors: no memory, or no descriptors.
pub fn comm(from: &Host, to: &Host) -> Result<(SendComm, RecvComm)> {
    let (ours, theirs) = (from.net.resources(from.dev)?, to.net.resources(to.dev)?);
    let stats = [stats::comm(CommKind::Send, ours.device.name()), stats::comm(CommKind::Recv, theirs.device.name())];
    let per_rail = ours.config.qps_per_rail as usize;
    let (fifo, records) = (CtsFifo::new()?, Records::with_more(CELLS_SIZE)?);
    let make = |resources: &super::Resources, stats, side, pages| {
        QueuePairs::new(&resources.rails(stats, usize::MAX)?, per_rail, side, pages, -1, false)
    };
    let mut send = make(&ours, &stats[0], Side::Send, fifo.pages())?;
    let mut recv = make(&theirs, &stats[1], Side::Recv, records.pages())?;
    send.connect(&recv.endpoints(), records.pages().addr() as u64, &recv.inbox_keys())?;
    recv.connect(&send.endpoints(), fifo.pages().addr() as u64, &send.inbox_keys())?;
    let failover = ours.config.failover && send.rails() > 1;
    let cells = [
        failover.then(|| Cells::new(fifo.pages(), CTS_FIFO_SIZE, RECORDS_SIZE, true)),
        failover.then(|| Cells::new(records.pages(), RECORDS_SIZE, CTS_FIFO_SIZE, false)),
    ];
    let [peer_of_send, peer_of_recv] = ["the receiver", "the sender"].map(|label| Peer { label: label.into(), pid: None });
    let control = UnixStream::pair().map_err(|e| Error::system("a control connection", e))?;
    let control = [control.0, control.1].map(|end| {
        let nonblocking = end.set_nonblocking(true).map_err(|e| Error::system("a control connection", e));
        // Read, written and shut down as a connection of TCP is.
        nonblocking.map(|()| TcpStream::new(std::net::TcpStream::from(OwnedFd::from(end))))
    });
    let [control_of_send, control_of_recv] = control;
    let liveness = |peer: &Peer, control: TcpStream| Liveness::new(Some(control), None, peer, &ours.config);
    let ([send_stats, recv_stats], [send_cells, recv_cells]) = (stats, cells);
    let send_liveness = liveness(&peer_of_send, control_of_send?);
    let recv_liveness = liveness(&peer_of_recv, control_of_recv?);
    let send = Connection { qps: send, memory: fifo, peer: peer_of_send, liveness: send_liveness, stats: send_stats, cells: send_cells };
    let recv = Connection { qps: recv, memory: records, peer: peer_of_recv, liveness: recv_liveness, stats: recv_stats, cells: recv_cells };
    // First the one that posts receives.
    let recv = RecvComm::new(theirs, recv)?;
    Ok((SendComm::connected(ours, send)?, recv))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::config::Progress;
    use crate::base::mem::Pages;
    use crate::fabric::sim::{NIC, Port};
    use crate::net::{MemoryKind, RecvBuffer};

    #[test]
    fn a_device_that_never_reports_what_it_was_asked_for_ends_the_comm() {
        const LEN: usize = 1 << 20;
        const SECOND: u64 = 1_000_000_000;
        let world = World::new(1, NIC);
        let config = Arc::new(Config { stats: false, progress: Progress::Caller, fabric_timeout_s: 30, ..Config::default() });
        let hosts = [0, 1].map(|number| Host::new(&world, number, 2, &config).unwrap());
        let (mut send, mut recv) = comm(&hosts[0], &hosts[1]).unwrap();
        let pages = [0, 1].map(|_| Pages::new(LEN).unwrap());
        let mrs = [0, 1].map(|i| hosts[i].net.register(hosts[i].dev, pages[i].to_register(), MemoryKind::Host).unwrap());
        recv.irecv(&[RecvBuffer { addr: pages[1].addr(), len: LEN, tag: 7, mr: mrs[1] }]).unwrap().unwrap();
        let request = loop {
            world.advance(world.now() + 1_000);
            if let Some(request) = send.isend(pages[0].addr(), LEN, 7, mrs[0]).unwrap() {
                break request;
            }
        };
        let port = Port { host: 0, rail: 1 };
        world.silence(port);
        world.break_port(port);
        let begun = world.now();
        let error = loop {
            world.advance(world.now() + SECOND / 100);
            recv.poll_for_test();
            match send.test(request) {
                Err(error) => break error,
                Ok(done) => assert!(done.is_none() && world.now() < begun + 60 * SECOND, "{}", send.link_for_test().rails_for_test()),
            }
        };
        let text = error.to_string();
        assert!(
            matches!(error, Error::Remote(_)) && text.contains("rail 1 is down") && text.contains("30 s (RAILHEAD_FABRIC_TIMEOUT_S)"),
            "{text}"
        );
        assert!((30 * SECOND..32 * SECOND).contains(&(world.now() - begun)), "after {} ns", world.now() - begun);
        println!("{text}");
    }
}
