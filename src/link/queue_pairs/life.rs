//! The life of a link's queue pairs: they are made, connected to the peer's, fail, and are reset rail by rail. Called by the thread that drives the
//! link, or that connects it.

use std::sync::Arc;

use super::*;
use crate::base::error::Error;
use crate::base::mem::Pages;
use crate::base::process::Process;
use crate::fabric::{Access, QpCaps, QpState, QueuePair};
use crate::link::limits::SLOT_SIZE;

impl QueuePairs {
    /// Makes the queue pairs and registers `inbox` for the peer's WRITEs. A `traffic_class` outside 0..=255 is the system's. `notify` if they are to
    /// be armed.
    pub fn new(
        devices: &[RailDevice],
        qps_per_rail: usize,
        side: Side,
        inbox: &Pages,
        traffic_class: i32,
        notify: bool,
    ) -> Result<QueuePairs> {
        let caps = QpCaps { recv_depth: side.recv_depth() as u32, traffic_class: u8::try_from(traffic_class).ok(), ..QpCaps::default() };
        let mut all = QueuePairs {
            queues: Vec::new(),
            sleep_fds: Vec::new(),
            qps: Vec::new(),
            flush_qps: Vec::new(),
            inbox: Vec::new(),
            remote_keys: [0; MAX_RAILS],
            remote_memory: 0,
            live: [0; MAX_QPS],
            live_count: 0,
            live_rails: 0,
            ordered: 0,
            endpoints: Vec::new(),
            next: 0,
            splits_data: devices.iter().all(|device| device.capabilities.splits_data),
            counts_plain_writes: devices.iter().all(|device| device.capabilities.counts_plain_writes),
            keeps_early_requests: devices.iter().all(|device| device.capabilities.keeps_early_requests),
            when_sent: false,
        };
        for device in devices {
            all.queues.push(device.domain.create_cq(notify)?);
            if notify {
                all.sleep_fds.push(device.domain.notification_fd()?);
            }
            all.inbox.push(device.domain.register_pages(inbox, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?);
        }
        for _ in 0..qps_per_rail {
            for (rail, (device, cq)) in devices.iter().zip(&mut all.queues).enumerate() {
                let ar_threshold = device.capabilities.ar_threshold;
                // A clear-to-send takes one entry, so a receiver's queue is deep enough too.
                let send_depth = message_entries(ar_threshold) * MAX_REQUESTS as u32 + side.control_entries();
                let caps = QpCaps { send_depth, ..caps };
                let qp = cq.create_qp(&caps, device.stats.clone())?;
                if cq.qp(qp).max_inline() < SLOT_SIZE {
                    return Err(Error::usage(format!(
                        "the device takes {} bytes inline; a clear-to-send needs {SLOT_SIZE}",
                        cq.qp(qp).max_inline()
                    )));
                }
                all.qps.push(Qp { rail: rail as u8, id: qp, depth: caps.send_depth, room: caps.send_depth, unsignaled: 0, ar_threshold });
            }
        }
        all.use_rails(|_| true);
        Ok(all)
    }

    /// Keys of the inbox, for the peer.
    pub fn inbox_keys(&self) -> Vec<u32> {
        self.inbox.iter().map(|region| region.rkey()).collect()
    }

    /// Deregisters the inbox, so that the peer's WRITEs into it fail. For tests.
    pub fn forget_inbox(&mut self) {
        self.inbox.clear();
    }

    /// Endpoints rail by rail, as the handshake lists them.
    pub fn endpoints(&mut self) -> Vec<Endpoint> {
        let mut all = Vec::with_capacity(self.qps.len());
        for (rail, cq) in self.queues.iter_mut().enumerate() {
            for qp in self.qps.iter().filter(|qp| usize::from(qp.rail) == rail) {
                all.push(cq.qp(qp.id).endpoint());
            }
        }
        all
    }

    /// Destroys the queue pairs that the peer has no counterpart for.
    pub fn shrink(&mut self, rails: usize, qps_per_rail: usize) {
        let mut seen = [0usize; MAX_RAILS];
        let queues = &mut self.queues;
        self.qps.retain(|qp| {
            let rail = usize::from(qp.rail);
            let count = seen.get_mut(rail).map_or(usize::MAX, |n| {
                *n += 1;
                *n
            });
            let keep = rail < rails && count <= qps_per_rail;
            if let (false, Some(cq)) = (keep, queues.get_mut(rail)) {
                cq.destroy_qp(qp.id);
            }
            keep
        });
        self.queues.truncate(rails);
        self.sleep_fds.truncate(rails);
        self.inbox.truncate(rails);
        self.use_rails(|_| true);
    }

    /// Connects every queue pair to its counterpart; `endpoints` rail by rail. `memory` and `keys` are the peer's.
    pub fn connect(&mut self, endpoints: &[Endpoint], memory: u64, keys: &[u32]) -> Result<()> {
        let mut remote = endpoints.iter();
        for (rail, cq) in self.queues.iter_mut().enumerate() {
            for qp in self.qps.iter().filter(|qp| usize::from(qp.rail) == rail) {
                let endpoint = remote.next().ok_or_else(|| Error::remote("the peer named too few queue pairs"))?;
                cq.qp(qp.id).connect(endpoint)?;
            }
        }
        if self.queues.len() > 1 {
            // From rail by rail to the order of the numbers.
            let (rails, per_rail) = (self.queues.len(), self.qps.len() / self.queues.len());
            let at = |qp: usize| endpoints.get(qp % rails * per_rail + qp / rails).copied();
            self.endpoints = (0..self.qps.len()).filter_map(at).collect();
        }
        self.remote_memory = memory;
        for (place, key) in self.remote_keys.iter_mut().zip(keys) {
            *place = *key;
        }
        Ok(())
    }

    /// Lets the queue pairs connect to their counterparts; true once all have.
    ///
    /// Errors: one that failed, in the fabric's words: `System` for want of a descriptor, memory or port.
    pub fn poll_connected(&mut self) -> Result<bool> {
        let mut all = true;
        for cq in &mut self.queues {
            // No room for completions: what may have arrived already stays for the comm.
            cq.poll(&mut []);
        }
        for qp in &self.qps {
            let Some(cq) = self.queues.get_mut(usize::from(qp.rail)) else { continue };
            let qp = cq.qp(qp.id);
            if qp.state() == QpState::Error {
                let why = qp.error().unwrap_or("a queue pair failed").to_owned();
                return Err(match qp.lack() {
                    Some(errno) => Error::system(why, std::io::Error::from_raw_os_error(errno)),
                    None => Error::remote(why),
                });
            }
            all &= qp.connected();
        }
        Ok(all)
    }

    /// Whether the peer is known to have posted receives for all of them.
    pub fn know_receives(&mut self) -> bool {
        let queues = &mut self.queues;
        self.qps.iter().all(|qp| queues.get_mut(usize::from(qp.rail)).is_some_and(|cq| cq.qp(qp.id).knows_receives()))
    }

    /// Whether one of them is connecting still.
    pub fn are_connecting(&mut self) -> bool {
        let queues = &mut self.queues;
        self.qps.iter().any(|qp| {
            let cq = queues.get_mut(usize::from(qp.rail));
            cq.is_some_and(|cq| cq.qp(qp.id).state() == QpState::Rts && !cq.qp(qp.id).connected())
        })
    }

    /// The peer's process, where a fabric has proven it.
    pub fn peer_process(&mut self) -> Option<Arc<Process>> {
        let queues = &mut self.queues;
        self.qps.iter().find_map(|qp| queues.get_mut(usize::from(qp.rail))?.qp(qp.id).peer_process().cloned())
    }

    /// Takes the queue pairs of a rail to ERROR.
    #[cold]
    pub fn fail_rail(&mut self, rail: usize) {
        self.of_rail(rail, |qp| qp.set_error());
    }

    /// Whether they have reported all that was outstanding, and nothing can land any more.
    pub fn rail_drained(&mut self, rail: usize) -> bool {
        let mut all = true;
        self.of_rail(rail, |qp| all &= qp.drained());
        all
    }

    /// Whether the peer maps memory of [`Device::shared_scratch`](crate::link::device::Device::shared_scratch).
    pub fn maps_memory(&mut self) -> bool {
        let QueuePairs { qps, queues, .. } = self;
        qps.iter().any(|qp| queues.get_mut(usize::from(qp.rail)).is_some_and(|cq| cq.qp(qp.id).maps_memory()))
    }

    /// Takes all to ERROR; whether dropping them would wait for the peer.
    #[cold]
    pub fn drop_waits(&mut self) -> bool {
        let mut waits = false;
        for qp in &self.qps {
            waits |= self.queues.get_mut(usize::from(qp.rail)).is_some_and(|cq| cq.qp(qp.id).drop_waits());
        }
        waits
    }

    /// Whether the peer's host does not answer on one of them: for how many nanoseconds at least.
    pub fn rail_unanswered_for(&mut self, rail: usize) -> Option<u64> {
        let mut most = None;
        self.of_rail(rail, |qp| most = most.max(qp.unanswered_for()));
        most
    }

    fn of_rail(&mut self, rail: usize, mut what: impl FnMut(&mut QueuePair)) {
        let Some(cq) = self.queues.get_mut(rail) else { return };
        self.qps.iter().filter(|qp| usize::from(qp.rail) == rail).for_each(|qp| what(&mut cq.qp(qp.id)));
    }

    /// Takes those of a rail, which are drained, to their next generation, posts receives, and connects them to the peer's.
    ///
    /// Errors: they do not go; then some may have.
    pub fn reset_rail(&mut self, rail: usize, generation: u32, receives: usize) -> Result<()> {
        for number in self.qps_of(rail) {
            let (Some(qp), Some(cq)) = (self.qps.get_mut(number), self.queues.get_mut(rail)) else { continue };
            let id = qp.id;
            cq.qp(id).reset(generation)?;
            (qp.room, qp.unsignaled) = (qp.depth, 0);
            for _ in 0..receives {
                self.post_recv(number).map_err(|e| Error::internal(format!("posting receives: {e}")))?;
            }
            let Some(endpoint) = self.endpoints.get(number) else { continue };
            if let Some(cq) = self.queues.get_mut(rail) {
                cq.qp(id).connect(endpoint)?;
            }
        }
        Ok(())
    }

    /// Makes the queue pair of `rail` that is connected to itself, for flushes, unless it is there. Rails in order.
    pub fn add_flush_qp(&mut self, rail: usize, caps: &QpCaps, stats: RailStats) -> Result<()> {
        if rail < self.flush_qps.len() {
            return Ok(());
        }
        let cq = self.queues.get_mut(rail).ok_or_else(|| Error::internal("no such rail"))?;
        let id = cq.create_qp(caps, stats)?;
        let itself = cq.qp(id).endpoint();
        let connected = cq.qp(id).connect(&itself);
        match connected {
            Ok(()) => self.flush_qps.push(id),
            Err(_) => cq.destroy_qp(id),
        }
        connected
    }

    /// Why the queue pair failed on which work of `kind` was posted, in the fabric's words. `qp` is a rail if that is `Flush`.
    #[cold]
    pub fn why(&mut self, kind: WrKind, qp: usize) -> Option<String> {
        let (rail, qp) = match kind {
            WrKind::Flush => (qp, *self.flush_qps.get(qp)?),
            _ => self.qps.get(qp).map(|qp| (usize::from(qp.rail), qp.id))?,
        };
        self.queues.get_mut(rail)?.qp(qp).error().map(str::to_owned)
    }

    /// If a queue pair has failed because this process has no descriptor, memory or port left for it: what the system said.
    #[cold]
    pub fn lack(&mut self) -> Option<i32> {
        let QueuePairs { queues, qps, flush_qps, .. } = self;
        all(qps, flush_qps).find_map(|(rail, qp)| queues.get_mut(rail)?.qp(qp).lack())
    }

    /// A queue pair that is in ERROR, and why: with nothing outstanding on it, no completion tells. Of those to the peer, on rails that are `in_use`, also
    /// which rail.
    pub fn broken(&mut self, in_use: impl Fn(usize) -> bool) -> Option<(Option<usize>, String)> {
        let QueuePairs { queues, qps, flush_qps, .. } = self;
        let mut why = |rail: usize, qp| {
            let qp = queues.get_mut(rail)?.qp(qp);
            (qp.state() == QpState::Error).then(|| qp.error().unwrap_or("a queue pair failed").to_owned())
        };
        let own = flush_qps.iter().enumerate().find_map(|(rail, qp)| Some((None, why(rail, *qp)?)));
        let mut used = qps.iter().map(|qp| (usize::from(qp.rail), qp.id)).filter(|(rail, _)| in_use(*rail));
        own.or_else(|| used.find_map(|(rail, qp)| Some((Some(rail), why(rail, qp)?))))
    }

    /// Takes everything to ERROR, so that the peer learns.
    #[cold]
    pub fn abort(&mut self) {
        let QueuePairs { queues, qps, flush_qps, .. } = self;
        for (rail, qp) in all(qps, flush_qps) {
            if let Some(cq) = queues.get_mut(rail) {
                cq.qp(qp).set_error();
            }
        }
        queues.iter_mut().for_each(CompletionQueue::disarm);
    }
}

/// All queue pairs: their rails and names.
fn all(qps: &[Qp], flush_qps: &[QpId]) -> impl Iterator<Item = (usize, QpId)> {
    let qps = qps.iter().map(|qp| (usize::from(qp.rail), qp.id));
    qps.chain(flush_qps.iter().copied().enumerate())
}
