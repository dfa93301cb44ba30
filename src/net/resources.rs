//! What comms and their set-up share of a [`Net`](super::Net): settings, the comm's device, registered memory, and what a side tells its peer of
//! itself. Made by `listen` and `connect`, used by whatever thread drives the comm.

use std::sync::Arc;

use crate::base::config::{self, Config};
use crate::base::error::Result;
use crate::base::rand;
use crate::base::stats::CommStats;
use crate::link::address::Local;
use crate::link::device_thread::ProgressThread;
use crate::link::limits::MAX_MESSAGE;
use crate::link::memory::MrTable;
use crate::link::queue_pairs::{QueuePairs, RailDevice};

use super::device::NetDevice;
use super::frames::{PROTOCOL_VERSION, Params};

/// What a comm, or its set-up, needs of its [`super::Net`], without keeping that alive.
#[derive(Clone)]
pub struct Resources {
    /// Settings.
    pub config: Arc<Config>,
    /// This process.
    pub local: Arc<Local>,
    /// The comm's device.
    pub device: Arc<NetDevice>,
    /// Registered memory.
    pub mrs: Arc<MrTable>,
}

impl Resources {
    /// The device's thread, if the settings want one, or who asks has to answer its peer whatever its caller does.
    pub fn thread(&self, answers: bool) -> Result<Option<Arc<ProgressThread>>> {
        self.device.thread(&self.config, answers)
    }

    /// Whether queues are to notify, for the device's thread to sleep.
    pub fn notify(&self) -> bool {
        self.config.progress == config::Progress::Thread
    }

    /// This side's parameters.
    pub fn params(&self, qps: &mut QueuePairs, qps_per_rail: usize, memory: usize, instance: u32, traffic_class: i32) -> Result<Params> {
        let mut nonce = [0u8; 16];
        rand::fill(&mut nonce)?;
        Ok(Params {
            nonce,
            instance,
            host_id: self.local.host_id,
            pid: self.local.pid,
            pid_ns: self.local.pid_ns,
            traffic_class,
            max_message: MAX_MESSAGE as u64,
            memory: memory as u64,
            rails: qps.rails() as u8,
            qps_per_rail: qps_per_rail as u8,
            failover: self.config.failover && qps.rails() > 1,
            fabric: self.device.fabric().to_owned(),
            host: self.local.host.clone(),
            device: self.device.name().to_owned(),
            rkeys: qps.inbox_keys(),
            endpoints: qps.endpoints(),
        })
    }

    /// The first `most` rails of the comm's device.
    pub fn rails(&self, stats: &CommStats, most: usize) -> Result<Vec<RailDevice>> {
        let physical = self.device.rails().iter().take(most).enumerate();
        physical
            .map(|(i, device)| Ok(RailDevice { domain: device.domain()?.clone(), capabilities: device.capabilities, stats: stats.rail(i) }))
            .collect()
    }

    /// Whether both sides can talk; if not, why, in words that make sense on both.
    pub fn check(&self, version: u16, peer: Option<&Params>) -> std::result::Result<(), String> {
        let here = format!("{} pid {}", self.local.host, self.local.pid);
        if version != PROTOCOL_VERSION {
            return Err(format!("wire version {version} meets {PROTOCOL_VERSION} of {here}; use one release of Railhead on all ranks"));
        }
        let Some(peer) = peer else { return Ok(()) };
        if peer.fabric != self.device.fabric() {
            let (theirs, ours) = (&peer.fabric, self.device.fabric());
            return Err(format!(
                "peer {} pid {} ({}) is on fabric {theirs}, this side {here} ({}) on {ours}; set RAILHEAD_FABRIC alike on all ranks",
                peer.host,
                peer.pid,
                peer.device,
                self.device.name()
            ));
        }
        if peer.memory == 0 || peer.memory % 64 != 0 || peer.max_message == 0 {
            return Err(format!("peer {} pid {} names memory that cannot be", peer.host, peer.pid));
        }
        Ok(())
    }
}
