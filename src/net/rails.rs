//! The queue pairs of one comm: how many on which rail, what fits into their send queues, and which of them a message takes.
//! Used by the thread that drives the comm.
//!
//! A *rail* is a physical device with a completion queue of its own; a *lane* is one queue pair. Lanes are numbered across rails
//! first (lane `i` is on rail `i % rails`), so that neighbouring stripes travel on different rails.

use std::os::fd::RawFd;
use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::base::process::Process;
use crate::base::stats::RailStats;
use crate::fabric::{
    Access, Completion, CompletionQueue, Domain, Endpoint, MemoryRegion, PostError, QpCaps, QpId, QpState, RecvRequest, SendRequest, Sge,
    UserMemory, WcOpcode, WcStatus,
};

use super::cts_fifo::{IMM_LIMIT, SLOT_SIZE};
use super::plan::wrapped;
use super::request::{MAX_REQUESTS, RequestId};
use super::wire::{MAX_QPS_PER_RAIL, MAX_RAILS};
use super::wr_id::{WrId, WrKind};

pub use super::plan::Plan;

/// Lanes of a comm at most: a bit each in a stripe bitmap.
pub const MAX_LANES: usize = MAX_RAILS * MAX_QPS_PER_RAIL;
const _: () = assert!(MAX_LANES <= 64);

/// Unsignaled requests in a row at most. Without a signaled one now and then, a send queue never drains.
const SIGNAL_EVERY: u16 = 64;

/// The lane that announcements take: the first of the first rail.
pub const ANNOUNCES: usize = 0;

/// Completions taken from a queue at once.
pub const BATCH: usize = 16;

/// Entries of a lane's send queue that a message takes at most: a record, data, and an immediate if that may go alone.
#[inline]
fn message_entries(max_with_imm: u32) -> u32 {
    if max_with_imm == u32::MAX { 2 } else { 3 }
}

/// One queue pair.
struct Lane {
    rail: u8,
    qp: QpId,
    /// Free entries of the send queue.
    room: u32,
    /// Requests posted since the last signaled one.
    unsignaled: u16,
    /// Longest data that goes with its immediate.
    max_with_imm: u32,
}

impl Lane {
    /// Names `requests` and says which of them are signaled; returns how many unsignaled ones there will be behind the last signaled.
    #[inline(always)]
    fn prepare(
        &self,
        lane: usize,
        requests: &mut [SendRequest<'_>],
        kind: WrKind,
        id: RequestId,
        signal: bool,
    ) -> std::result::Result<u16, PostError> {
        let count = requests.len() as u16;
        if u32::from(count) > self.room {
            return Err(PostError::Full);
        }
        let retires = self.unsignaled + count;
        let signaled = signal || retires >= SIGNAL_EVERY;
        if let Some((last, others)) = requests.split_last_mut() {
            for other in others {
                other.wr_id = WrId { kind, lane: lane as u8, retires: 0, id }.encode();
                other.signaled = false;
            }
            last.wr_id = WrId { kind, lane: lane as u8, retires, id }.encode();
            last.signaled = signaled;
        }
        Ok(if signaled { 0 } else { retires })
    }

    #[inline(always)]
    fn posted(&mut self, count: usize, unsignaled: u16) {
        self.room -= count as u32;
        self.unsignaled = unsignaled;
    }
}

/// A physical device of a comm.
pub struct RailDevice {
    /// Its domain.
    pub domain: Domain,
    /// Where its queue pairs count.
    pub stats: RailStats,
}

/// All queue pairs of a comm, and the regions over the comm's own memory. Dropped in this order: after the queue pairs are gone
/// nothing touches the regions.
pub struct Rails {
    queues: Vec<CompletionQueue>,
    /// What to sleep on for the queues, if they notify.
    sleep_fds: Vec<RawFd>,
    lanes: Vec<Lane>,
    /// Queue pairs that are connected to themselves, one per rail, once a flush has been asked for.
    loops: Vec<QpId>,
    own: Vec<MemoryRegion>,
    /// The peer's key for its memory that this side writes: FIFO or records.
    remote_keys: [u32; MAX_RAILS],
    /// That memory.
    remote_memory: u64,
    /// Where the next message's first stripe goes.
    next: usize,
    /// Whether a message takes all lanes, rather than one per rail.
    splits_data: bool,
    /// Whether the fabric counts what the peer writes without telling.
    counts_silent_writes: bool,
}

/// Which end of a comm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// It writes messages and records.
    Send,
    /// It announces, and pre-posts a receive for every message that may come.
    Recv,
}

impl Rails {
    /// Makes the queue pairs and registers `own` for the peer's WRITEs. A `traffic_class` outside 0..=255 is the system's. `notify` if they are to
    /// be armed.
    pub fn new(
        devices: &[RailDevice],
        qps_per_rail: usize,
        side: Side,
        own: UserMemory,
        traffic_class: i32,
        notify: bool,
    ) -> Result<Rails> {
        let caps = QpCaps {
            recv_depth: if side == Side::Recv { MAX_REQUESTS as u32 } else { 1 },
            traffic_class: u8::try_from(traffic_class).ok(),
            ..QpCaps::default()
        };
        let mut rails = Rails {
            counts_silent_writes: true,
            queues: Vec::new(),
            sleep_fds: Vec::new(),
            lanes: Vec::new(),
            loops: Vec::new(),
            own: Vec::new(),
            remote_keys: [0; MAX_RAILS],
            remote_memory: 0,
            next: 0,
            splits_data: devices.iter().all(|device| device.domain.splits_data()),
        };
        for device in devices {
            rails.queues.push(device.domain.create_cq(notify)?);
            if notify {
                rails.sleep_fds.push(device.domain.notification_fd()?);
            }
            rails.own.push(device.domain.register(own, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?);
        }
        for _ in 0..qps_per_rail {
            for (rail, (device, cq)) in devices.iter().zip(&mut rails.queues).enumerate() {
                let max_with_imm = device.domain.max_with_imm();
                // An announcement takes one.
                let caps = QpCaps { send_depth: message_entries(max_with_imm) * MAX_REQUESTS as u32, ..caps };
                let qp = cq.create_qp(&caps, device.stats.clone())?;
                if cq.qp(qp).max_inline() < SLOT_SIZE {
                    return Err(Error::usage(format!(
                        "the device takes {} bytes inline; announcements need {SLOT_SIZE}",
                        cq.qp(qp).max_inline()
                    )));
                }
                rails.counts_silent_writes &= cq.qp(qp).counts_silent_writes();
                rails.lanes.push(Lane { rail: rail as u8, qp, room: caps.send_depth, unsignaled: 0, max_with_imm });
            }
        }
        Ok(rails)
    }

    /// Whether the fabric counts what the peer writes without telling.
    #[inline]
    pub fn counts_silent_writes(&self) -> bool {
        self.counts_silent_writes
    }

    /// Whether work may be posted long before the peer has connected.
    pub fn keep_early_work(&mut self) -> bool {
        let queues = &mut self.queues;
        self.lanes.iter().all(|lane| queues.get_mut(usize::from(lane.rail)).is_none_or(|cq| cq.qp(lane.qp).keeps_early_work()))
    }

    /// Rails in use.
    pub fn rails(&self) -> usize {
        self.queues.len()
    }

    /// Lanes in use.
    #[inline]
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Keys of this side's own memory, for the peer.
    pub fn own_keys(&self) -> Vec<u32> {
        self.own.iter().map(MemoryRegion::rkey).collect()
    }

    /// Drops the regions over this side's own memory, so that the peer's WRITEs into it fail. For tests.
    pub fn forget_own(&mut self) {
        self.own.clear();
    }

    /// Endpoints rail by rail, as the handshake lists them.
    pub fn endpoints(&mut self) -> Vec<Endpoint> {
        let mut all = Vec::with_capacity(self.lanes.len());
        for (rail, cq) in self.queues.iter_mut().enumerate() {
            for lane in self.lanes.iter().filter(|lane| usize::from(lane.rail) == rail) {
                all.push(cq.qp(lane.qp).endpoint());
            }
        }
        all
    }

    /// Destroys the queue pairs that the peer has no counterpart for.
    pub fn shrink(&mut self, rails: usize, qps_per_rail: usize) {
        let mut seen = [0usize; MAX_RAILS];
        let queues = &mut self.queues;
        self.lanes.retain(|lane| {
            let rail = usize::from(lane.rail);
            let count = seen.get_mut(rail).map_or(usize::MAX, |n| {
                *n += 1;
                *n
            });
            let keep = rail < rails && count <= qps_per_rail;
            if let (false, Some(cq)) = (keep, queues.get_mut(rail)) {
                cq.destroy_qp(lane.qp);
            }
            keep
        });
        self.queues.truncate(rails);
        self.sleep_fds.truncate(rails);
        self.own.truncate(rails);
    }

    /// Connects every lane to its counterpart; `endpoints` rail by rail. `memory` and `keys` are the peer's.
    pub fn connect(&mut self, endpoints: &[Endpoint], memory: u64, keys: &[u32]) -> Result<()> {
        let mut remote = endpoints.iter();
        for (rail, cq) in self.queues.iter_mut().enumerate() {
            for lane in self.lanes.iter().filter(|lane| usize::from(lane.rail) == rail) {
                let endpoint = remote.next().ok_or_else(|| Error::remote("the peer named too few queue pairs"))?;
                cq.qp(lane.qp).connect(endpoint)?;
            }
        }
        self.remote_memory = memory;
        for (place, key) in self.remote_keys.iter_mut().zip(keys) {
            *place = *key;
        }
        Ok(())
    }

    /// The rail of a lane.
    #[inline]
    pub fn rail_of(&self, lane: usize) -> usize {
        self.lanes.get(lane).map_or(0, |lane| usize::from(lane.rail))
    }

    /// The peer's memory at `offset`, and its key on the rail of `lane`.
    #[inline]
    pub fn remote(&self, lane: usize, offset: usize) -> (u64, u32) {
        (self.remote_memory.wrapping_add(offset as u64), self.remote_keys.get(self.rail_of(lane)).copied().unwrap_or(0))
    }

    /// Free send queue entries of a lane.
    #[inline]
    pub fn room(&self, lane: usize) -> u32 {
        self.lanes.get(lane).map_or(0, |lane| lane.room)
    }

    /// How a message of `len` bytes is cut, and the first of the lanes that it takes.
    #[inline]
    pub fn plan(&mut self, len: usize, split_min: usize) -> Plan {
        let lanes = self.lanes.len();
        let most = if self.splits_data { lanes } else { self.queues.len() };
        let plan = Plan::new(len, lanes, most, split_min, self.next);
        self.next = wrapped(self.next + plan.stripes, lanes);
        plan
    }

    /// The lane of a message that takes one request: not striped, and short enough for an immediate that goes with it and tells its size.
    /// `None` for another, or if there is no room. It stays the same until [`Rails::next_lane`].
    #[inline(always)]
    pub fn lane_for_short(&self, len: usize, split_min: usize) -> Option<usize> {
        let lane = self.lanes.get(self.next)?;
        let short = len < IMM_LIMIT && len <= lane.max_with_imm as usize && (len < split_min || self.lanes.len() == 1);
        (short && lane.room >= message_entries(lane.max_with_imm)).then_some(self.next)
    }

    /// The next message begins on the next lane.
    #[inline]
    pub fn next_lane(&mut self) {
        self.next = wrapped(self.next + 1, self.lanes.len());
    }

    /// Undoes the last `plan`: nothing of it was posted.
    #[inline]
    pub fn unplan(&mut self, plan: Plan) {
        self.next = plan.first;
    }

    /// The lanes that a message takes, a bit each; `None` if the send queue of one does not take whatever the message may need there.
    #[inline]
    pub fn lanes_for_message(&self, plan: Plan) -> Option<u64> {
        (0..plan.stripes).try_fold(0u64, |taken, i| {
            let lane = plan.stripe(i).0;
            let roomy = self.lanes.get(lane).is_some_and(|lane| lane.room >= message_entries(lane.max_with_imm));
            roomy.then_some(taken | 1 << lane)
        })
    }

    /// Longest data that goes with its immediate on a lane.
    #[inline]
    pub fn max_with_imm(&self, lane: usize) -> u32 {
        self.lanes.get(lane).map_or(u32::MAX, |lane| lane.max_with_imm)
    }

    /// Posts `requests` on a lane, all or none. Whoever calls has checked the room. `signal` for the last one to be signaled in any case;
    /// the others never are. Their wr_ids are filled in here.
    #[inline(always)]
    pub fn post_send<const N: usize>(
        &mut self,
        lane: usize,
        mut requests: [SendRequest<'_>; N],
        kind: WrKind,
        id: RequestId,
        signal: bool,
    ) -> std::result::Result<(), PostError> {
        let Rails { queues, lanes, .. } = self;
        let Some(it) = lanes.get_mut(lane) else { return Err(PostError::Invalid("no such lane")) };
        let Some(cq) = queues.get_mut(usize::from(it.rail)) else { return Err(PostError::Invalid("no such rail")) };
        let after = it.prepare(lane, &mut requests, kind, id, signal)?;
        cq.qp(it.qp).post_some(requests)?;
        it.posted(N, after);
        Ok(())
    }

    /// [`Rails::post_send`], for a caller who does not know their number before.
    #[inline(never)]
    pub fn post_send_all(
        &mut self,
        lane: usize,
        requests: &mut [SendRequest<'_>],
        kind: WrKind,
        id: RequestId,
        signal: bool,
    ) -> std::result::Result<(), PostError> {
        let Rails { queues, lanes, .. } = self;
        let Some(it) = lanes.get_mut(lane) else { return Err(PostError::Invalid("no such lane")) };
        let Some(cq) = queues.get_mut(usize::from(it.rail)) else { return Err(PostError::Invalid("no such rail")) };
        let after = it.prepare(lane, requests, kind, id, signal)?;
        cq.qp(it.qp).post_send(requests)?;
        it.posted(requests.len(), after);
        Ok(())
    }

    /// Pre-posts one receive on a lane. It takes immediates only, so it has no memory.
    #[inline(always)]
    pub fn post_recv(&mut self, lane: usize) -> std::result::Result<(), PostError> {
        let Some(it) = self.lanes.get(lane) else { return Err(PostError::Invalid("no such lane")) };
        let Some(cq) = self.queues.get_mut(usize::from(it.rail)) else { return Err(PostError::Invalid("no such rail")) };
        let wr_id = WrId { kind: WrKind::Recv, lane: lane as u8, retires: 0, id: RequestId(0) }.encode();
        cq.qp(it.qp).post_recv(&RecvRequest { wr_id, sge: Sge::default() })
    }

    /// Takes completions of a rail: how many. `None` behind the last rail.
    #[inline(always)]
    pub fn poll(&mut self, rail: usize, out: &mut [Completion; BATCH]) -> Option<usize> {
        self.queues.get_mut(rail).map(|cq| cq.poll(out))
    }

    /// Frees the send queue entries that a completion retires.
    #[inline]
    pub fn retire(&mut self, wr: &WrId) {
        if let Some(lane) = self.lanes.get_mut(usize::from(wr.lane)) {
            lane.room += u32::from(wr.retires);
        }
    }

    /// Makes the queue pair of `rail` that is connected to itself, unless it is there. Rails in order.
    pub fn add_loop(&mut self, rail: usize, caps: &QpCaps, stats: RailStats) -> Result<()> {
        if rail < self.loops.len() {
            return Ok(());
        }
        let cq = self.queues.get_mut(rail).ok_or_else(|| Error::internal("no such rail"))?;
        let id = cq.create_qp(caps, stats)?;
        let itself = cq.qp(id).endpoint();
        let connected = cq.qp(id).connect(&itself);
        match connected {
            Ok(()) => self.loops.push(id),
            Err(_) => cq.destroy_qp(id),
        }
        connected
    }

    /// Posts on the queue pair of `rail` that is connected to itself.
    pub fn post_loop(&mut self, rail: usize, request: SendRequest<'_>) -> std::result::Result<(), PostError> {
        let Some(qp) = self.loops.get(rail) else { return Err(PostError::Invalid("no such rail")) };
        let Some(cq) = self.queues.get_mut(rail) else { return Err(PostError::Invalid("no such rail")) };
        cq.qp(*qp).post_send(&[request])
    }

    /// Why the queue pair failed that work of `kind` on `lane` (of flushes: rail) was posted on, in the fabric's words.
    #[cold]
    pub fn why(&mut self, kind: WrKind, lane: usize) -> Option<String> {
        let (rail, qp) = match kind {
            WrKind::Flush => (lane, *self.loops.get(lane)?),
            _ => self.lanes.get(lane).map(|lane| (usize::from(lane.rail), lane.qp))?,
        };
        self.queues.get_mut(rail)?.qp(qp).error().map(str::to_owned)
    }

    /// A queue pair that is in ERROR, and why: with nothing outstanding on it, no completion tells.
    pub fn broken(&mut self) -> Option<String> {
        let Rails { queues, lanes, loops, .. } = self;
        all(lanes, loops).find_map(|(rail, qp)| {
            let qp = queues.get_mut(rail)?.qp(qp);
            (qp.state() == QpState::Error).then(|| qp.error().unwrap_or("a queue pair failed").to_owned())
        })
    }

    /// Takes everything to ERROR, so that the peer learns.
    #[cold]
    pub fn abort(&mut self) {
        let Rails { queues, lanes, loops, .. } = self;
        for (rail, qp) in all(lanes, loops) {
            if let Some(cq) = queues.get_mut(rail) {
                cq.qp(qp).set_error();
            }
        }
        queues.iter_mut().for_each(CompletionQueue::mute);
    }

    /// Whether requests are out on a lane of which nobody will be told, unless another follows.
    pub fn is_quiet(&self, lane: usize) -> bool {
        self.lanes.get(lane).is_some_and(|lane| lane.unsignaled > 0)
    }

    /// Lets the queue pairs meet their counterparts; true once all have.
    ///
    /// Errors: one that failed, in the fabric's words: `System` for want of a descriptor.
    pub fn meet(&mut self) -> Result<bool> {
        let mut all = true;
        for cq in &mut self.queues {
            // No room for completions: what may have arrived already stays for the comm.
            cq.poll(&mut []);
        }
        for lane in &self.lanes {
            let Some(cq) = self.queues.get_mut(usize::from(lane.rail)) else { continue };
            let qp = cq.qp(lane.qp);
            if qp.state() == QpState::Error {
                let why = qp.error().unwrap_or("a queue pair failed").to_owned();
                return Err(if qp.lacks_descriptor() {
                    Error::system(why, std::io::Error::from_raw_os_error(libc::EMFILE))
                } else {
                    Error::remote(why)
                });
            }
            all &= qp.met();
        }
        Ok(all)
    }

    /// Asks for notifications, and names the descriptors to sleep on.
    ///
    /// Errors: queues that do not notify; no memory left for it.
    pub fn arm(&mut self, watch: impl FnMut(RawFd)) -> Result<()> {
        self.sleep_fds.iter().copied().for_each(watch);
        self.queues.iter_mut().try_for_each(CompletionQueue::arm)
    }

    /// Whether there is more to do than the last polls did, after [`Rails::arm`].
    pub fn is_restless(&mut self) -> bool {
        self.queues.iter_mut().fold(false, |any, cq| any | cq.is_restless())
    }

    /// The peer's process, where a fabric has proven it.
    pub fn peer_process(&mut self) -> Option<Arc<Process>> {
        let queues = &mut self.queues;
        self.lanes.iter().find_map(|lane| queues.get_mut(usize::from(lane.rail))?.qp(lane.qp).peer_process().cloned())
    }
}

/// All queue pairs: their rails and names.
fn all(lanes: &[Lane], loops: &[QpId]) -> impl Iterator<Item = (usize, QpId)> {
    let lanes = lanes.iter().map(|lane| (usize::from(lane.rail), lane.qp));
    lanes.chain(loops.iter().copied().enumerate())
}

/// An unused entry for `poll` to fill.
pub const NO_COMPLETION: Completion =
    Completion { wr_id: 0, status: WcStatus::GeneralErr, opcode: WcOpcode::Send, byte_len: 0, imm: None, qp_num: 0 };
