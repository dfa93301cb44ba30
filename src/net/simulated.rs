//! Comms on the simulated fabric, for `crate::sim`: their handshake, which goes over TCP, is left out, and what it would have told is handed over.

use std::sync::Arc;

use crate::base::config::Config;
use crate::base::error::Result;
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
/// Errors: no memory.
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
        failover.then(|| Cells::new(fifo.pages(), CTS_FIFO_SIZE, RECORDS_SIZE)),
        failover.then(|| Cells::new(records.pages(), RECORDS_SIZE, CTS_FIFO_SIZE)),
    ];
    let [peer_of_send, peer_of_recv] = ["the receiver", "the sender"].map(|label| Peer { label: label.into(), pid: None });
    let liveness = |peer: &Peer| Liveness::new(None, None, peer, &ours.config);
    let ([send_stats, recv_stats], [send_cells, recv_cells]) = (stats, cells);
    let recv = Connection {
        liveness: liveness(&peer_of_recv),
        qps: recv,
        memory: records,
        peer: peer_of_recv,
        stats: recv_stats,
        cells: recv_cells,
    };
    let send =
        Connection { liveness: liveness(&peer_of_send), qps: send, memory: fifo, peer: peer_of_send, stats: send_stats, cells: send_cells };
    // First the one that posts receives.
    let recv = RecvComm::new(theirs, recv)?;
    Ok((SendComm::connected(ours, send)?, recv))
}
