//! The queue pairs of one link: how many on which rail, what fits into their send queues, and which of them a message takes.
//! Used by the thread that drives the link.
//!
//! A *rail* is a physical device with a completion queue of its own. Queue pairs are numbered across rails first (number `i` is on rail
//! `i % rails`), so that neighbouring stripes travel on different rails.

mod life;

use std::os::fd::RawFd;

use crate::base::error::Result;
use crate::base::stats::RailStats;
use crate::fabric::{
    Capabilities, Completion, CompletionQueue, Domain, Endpoint, Opcode, PagesRegion, Payload, PostError, QpId, RecvWr, SendWr, Sge,
    WcOpcode, WcStatus,
};

use super::limits::{CONTROLS, IMM_LIMIT, MAX_QPS, MAX_RAILS, MAX_RECVS, MAX_REQUESTS, SLOTS};
use super::plan::{Plan, wrapped};
use super::wr_id::{RequestId, WrId, WrKind};

/// Unsignaled requests in a row at most: only the completion of a signaled one frees their entries of the send queue.
const SIGNAL_EVERY: u16 = 64;

/// The number of no queue pair.
pub const NO_QP: usize = usize::MAX;

/// Completions taken from a queue at once.
pub const BATCH: usize = 16;

/// Entries of a send queue that a message takes at most: a record and the data, and where long data goes without its immediate, an empty WRITE_WITH_IMM.
#[inline]
fn message_entries(ar_threshold: u32) -> u32 {
    if ar_threshold == u32::MAX { 2 } else { 3 }
}

/// One queue pair.
struct Qp {
    rail: u8,
    id: QpId,
    /// Entries of the send queue.
    depth: u32,
    /// Free ones.
    room: u32,
    /// Requests posted since the last signaled one.
    unsignaled: u16,
    /// Longest data that goes in one request with its immediate.
    ar_threshold: u32,
}

impl Qp {
    /// Makes the last of `requests` retire all of them and those unsignaled before, and says whether it is signaled; returns how many unsignaled
    /// ones there will be behind the last signaled.
    #[inline(always)]
    fn prepare(&self, requests: &mut [SendWr<'_>], last_id: WrId, signal: bool) -> std::result::Result<u16, PostError> {
        let count = requests.len() as u16;
        if u32::from(count) > self.room {
            return Err(PostError::Full);
        }
        let retires = self.unsignaled + count;
        let signaled = signal || retires >= SIGNAL_EVERY;
        if let Some(last) = requests.last_mut() {
            last.wr_id = WrId { retires, ..last_id }.encode();
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

/// A work request of a send queue. Its id, and whether it is signaled, are for [`QueuePairs::post_send`] to say.
#[derive(Clone, Copy)]
pub struct Wr<'a> {
    /// WRITE, WRITE_WITH_IMM or READ.
    pub opcode: Opcode,
    /// What is written, or where what is read goes.
    pub payload: Payload<'a>,
    /// First byte in the peer's memory, and its key.
    pub remote: (u64, u32),
    /// For a WRITE_WITH_IMM.
    pub imm: u32,
}

impl<'a> Wr<'a> {
    /// Unsignaled, and retiring nothing.
    #[inline(always)]
    fn with(self, id: WrId) -> SendWr<'a> {
        let Wr { opcode, payload, remote: (remote_addr, rkey), imm } = self;
        SendWr { wr_id: id.encode(), opcode, payload, remote_addr, rkey, imm, signaled: false, when_sent: false }
    }
}

/// A physical device of a link.
pub struct RailDevice {
    /// Its domain.
    pub domain: Domain,
    /// What it can do.
    pub capabilities: Capabilities,
    /// Where its queue pairs count.
    pub stats: RailStats,
}

/// All queue pairs of a link, and the regions that the peer writes to, which are dropped after them.
pub struct QueuePairs {
    queues: Vec<CompletionQueue>,
    /// What to sleep on for the queues, if they notify.
    sleep_fds: Vec<RawFd>,
    qps: Vec<Qp>,
    /// Queue pairs that are connected to themselves, one per rail, once a flush has been asked for.
    flush_qps: Vec<QpId>,
    /// The memory that the peer writes to, rail by rail: a sender's CTS FIFO, a receiver's completion records.
    inbox: Vec<PagesRegion>,
    /// The peer's key for its memory that this side writes: FIFO or records.
    remote_keys: [u32; MAX_RAILS],
    /// That memory.
    remote_memory: u64,
    /// The queue pairs that messages take, in order.
    live: [u8; MAX_QPS],
    live_count: usize,
    live_rails: usize,
    /// See [`QueuePairs::ordered`].
    ordered: usize,
    /// The peer's queue pairs, by number, if there is more than one rail: one that was reset is connected to its own again.
    endpoints: Vec<Endpoint>,
    /// Where among these the next message's first stripe goes.
    next: usize,
    /// Whether a message takes all queue pairs, rather than one per rail.
    splits_data: bool,
    /// Whether the fabric counts what the peer writes without telling.
    pub counts_plain_writes: bool,
    /// Whether requests may be posted long before the peer has connected.
    pub keeps_early_requests: bool,
    /// Whether what carries a message is done once it is sent: see [`QueuePairs::complete_when_sent`].
    when_sent: bool,
}

/// Which end of a comm, which is one way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// It writes messages and records.
    Send,
    /// It posts clear-to-sends, and pre-posts a receive for every message that may come.
    Recv,
    /// Both ends at once, of a [`Duplex`](super::duplex::Duplex).
    Both,
}

impl Side {
    /// Receives that a queue pair must hold.
    pub fn recv_depth(self) -> usize {
        match self {
            Side::Send => 1,
            Side::Recv => MAX_REQUESTS,
            Side::Both => SLOTS + 2 * CONTROLS,
        }
    }

    /// Entries of a send queue besides those of messages.
    fn control_entries(self) -> u32 {
        if self == Side::Both { 2 * CONTROLS as u32 } else { 0 }
    }
}

impl QueuePairs {
    /// Messages take the queue pairs of these rails.
    pub fn use_rails(&mut self, takes: impl Fn(usize) -> bool) {
        (self.live, self.live_count, self.next) = ([u8::MAX; MAX_QPS], 0, 0);
        let live = self.qps.iter().zip(0u8..).filter(|(qp, _)| takes(usize::from(qp.rail)));
        for (place, (_, qp)) in self.live.iter_mut().zip(live) {
            *place = qp;
            self.live_count += 1;
        }
        let mut rails: u64 = 0;
        self.qps.iter().filter(|qp| takes(usize::from(qp.rail))).for_each(|qp| rails |= 1 << qp.rail);
        self.live_rails = rails.count_ones() as usize;
    }

    /// The queue pair at a place of the order in which messages take them.
    #[inline(always)]
    pub fn live(&self, place: usize) -> usize {
        self.live.get(place).map_or(NO_QP, |qp| usize::from(*qp))
    }

    /// The queue pair of all that has to stay in one order across messages: clear-to-sends, control messages, and data that goes behind them. Messages take
    /// it as they take any other. [`NO_QP`], which has no room, while none of it may be sent.
    #[inline(always)]
    pub fn ordered(&self) -> usize {
        self.ordered
    }

    /// From now on it is that one.
    pub fn set_ordered(&mut self, qp: usize) {
        self.ordered = qp;
    }

    /// From now on a message is done once its memory is not needed any more, be it that the peer does not have it yet: if it goes on one queue pair,
    /// and on a fabric that can tell the two apart.
    pub fn complete_when_sent(&mut self) {
        self.when_sent = self.qps.len() == 1;
    }

    /// Rails in use.
    pub fn rails(&self) -> usize {
        self.queues.len()
    }

    /// Queue pairs in use.
    #[inline]
    #[allow(clippy::len_without_is_empty)] // There is always one.
    pub fn len(&self) -> usize {
        self.qps.len()
    }

    /// The rail of a queue pair.
    #[inline]
    pub fn rail_of(&self, qp: usize) -> usize {
        self.qps.get(qp).map_or(0, |qp| usize::from(qp.rail))
    }

    /// The peer's memory at `offset`, and its key on the rail of `qp`.
    #[inline]
    pub fn remote(&self, qp: usize, offset: usize) -> (u64, u32) {
        (self.remote_memory.wrapping_add(offset as u64), self.remote_keys.get(self.rail_of(qp)).copied().unwrap_or(0))
    }

    /// Free send queue entries of a queue pair.
    #[inline]
    pub fn room(&self, qp: usize) -> u32 {
        self.qps.get(qp).map_or(0, |qp| qp.room)
    }

    /// How a message of `len` bytes is cut, and the first of the queue pairs that it takes.
    #[inline]
    pub fn plan(&mut self, len: usize, split_min: usize) -> Plan {
        let qps = self.live_count;
        let most = if self.splits_data { qps } else { self.live_rails };
        let plan = Plan::new(len, qps, most, split_min, self.next);
        self.next = wrapped(self.next + plan.stripes, qps);
        plan
    }

    /// The queue pair of a message that takes one request: not striped, and short enough for an immediate that goes with it and tells its size.
    /// `None` for any other message, and if the queue is full. It stays the same until [`QueuePairs::next_qp`].
    #[inline(always)]
    pub fn qp_for_fast_path(&self, len: usize, split_min: usize) -> Option<usize> {
        let at = self.live(self.next);
        let qp = self.qps.get(at)?;
        let short = len < IMM_LIMIT && len <= qp.ar_threshold as usize && (len < split_min || self.qps.len() == 1);
        (short && qp.room >= message_entries(qp.ar_threshold)).then_some(at)
    }

    /// The next message begins on the next queue pair.
    #[inline]
    pub fn next_qp(&mut self) {
        self.next = if self.next + 1 < self.live_count { self.next + 1 } else { 0 };
    }

    /// Undoes the last `plan`: nothing of it was posted.
    #[inline]
    pub fn unplan(&mut self, plan: Plan) {
        self.next = plan.first;
    }

    /// Whether the send queues that a message takes have room for whatever it may need there.
    #[inline]
    pub fn has_room(&self, plan: Plan) -> bool {
        (0..plan.stripes).all(|i| {
            let qp = self.qps.get(self.live(plan.stripe(i).0));
            qp.is_some_and(|qp| qp.room >= message_entries(qp.ar_threshold))
        })
    }

    /// Longest data that goes with its immediate on a queue pair.
    #[inline]
    pub fn ar_threshold(&self, qp: usize) -> u32 {
        self.qps.get(qp).map_or(u32::MAX, |qp| qp.ar_threshold)
    }

    /// The next of those that messages take that has room for one.
    pub fn next_with_room(&mut self) -> Option<usize> {
        let roomy = |qp: &usize| self.qps.get(*qp).is_some_and(|qp| qp.room >= message_entries(qp.ar_threshold));
        let found = (0..self.live_count).map(|i| self.live(wrapped(self.next + i, self.live_count))).find(roomy);
        self.next_qp();
        found
    }

    /// The queue pairs of a rail.
    pub fn qps_of(&self, rail: usize) -> impl Iterator<Item = usize> + use<> {
        (rail..self.qps.len()).step_by(self.queues.len().max(1))
    }

    /// The rails that messages take, and the first queue pair of each.
    pub fn live_rails(&self) -> impl Iterator<Item = (usize, usize)> {
        let first = (0..self.live_count).map(|place| self.live(place)).take(self.live_rails);
        first.map(|qp| (self.rail_of(qp), qp))
    }

    /// Entries of the deepest send queue.
    pub fn depth(&self) -> u32 {
        self.qps.iter().map(|qp| qp.depth).max().unwrap_or(0)
    }

    /// Posts on a queue pair, all or none. Whoever calls has checked the room. `signal` for the last one to be signaled in any case; the others
    /// never are. Their completions name `kind` and `id`.
    #[inline(always)]
    pub fn post_send<const N: usize>(
        &mut self,
        qp: usize,
        wrs: [Wr<'_>; N],
        kind: WrKind,
        id: RequestId,
        signal: bool,
    ) -> std::result::Result<(), PostError> {
        self.post_with(qp, wrs, (kind, id, 0, signal), false)
    }

    /// The same of a message's stripe, signaled.
    #[inline(always)]
    pub fn post_stripe<const N: usize>(
        &mut self,
        qp: usize,
        wrs: [Wr<'_>; N],
        stripe: usize,
        id: RequestId,
    ) -> std::result::Result<(), PostError> {
        self.post_with(qp, wrs, (WrKind::Data, id, stripe as u8, true), false)
    }

    /// The same of one that is not signaled, and can wait until something else is sent.
    #[inline(always)]
    pub fn post_held(&mut self, qp: usize, wr: Wr<'_>, kind: WrKind, id: RequestId) -> std::result::Result<(), PostError> {
        self.post_with(qp, [wr], (kind, id, 0, false), true)
    }

    /// Sends what is held on a queue pair.
    pub fn send_held(&mut self, qp: usize) {
        let Some(qp) = self.qps.get(qp) else { return };
        if let Some(cq) = self.queues.get_mut(usize::from(qp.rail)) {
            cq.qp(qp.id).send_held();
        }
    }

    #[inline(always)]
    fn post_with<const N: usize>(
        &mut self,
        qp: usize,
        wrs: [Wr<'_>; N],
        (kind, id, stripe, signal): (WrKind, RequestId, u8, bool),
        held: bool,
    ) -> std::result::Result<(), PostError> {
        let QueuePairs { queues, qps, .. } = self;
        let wr_id = WrId { kind, stripe, qp: qp as u8, retires: 0, id };
        let Some(qp) = qps.get_mut(qp) else { return Err(PostError::Invalid("no such queue pair")) };
        let Some(cq) = queues.get_mut(usize::from(qp.rail)) else { return Err(PostError::Invalid("no such rail")) };
        let when_sent = self.when_sent && kind == WrKind::Data;
        let mut requests = wrs.map(|wr| SendWr { when_sent, ..wr.with(wr_id) });
        let unsignaled = qp.prepare(&mut requests, wr_id, signal)?;
        if held { cq.qp(qp.id).post_held(requests) } else { cq.qp(qp.id).post_some(requests) }?;
        qp.posted(N, unsignaled);
        Ok(())
    }

    /// [`QueuePairs::post_send`] of as many as a group may have, for a caller who does not know their number before.
    #[inline(never)]
    pub fn post_send_group(&mut self, qp: usize, wrs: &[Wr<'_>], kind: WrKind, id: RequestId) -> std::result::Result<(), PostError> {
        let QueuePairs { queues, qps, .. } = self;
        let wr_id = WrId { kind, stripe: 0, qp: qp as u8, retires: 0, id };
        let Some(qp) = qps.get_mut(qp) else { return Err(PostError::Invalid("no such queue pair")) };
        let Some(cq) = queues.get_mut(usize::from(qp.rail)) else { return Err(PostError::Invalid("no such rail")) };
        let empty = Wr { opcode: Opcode::Write, payload: Payload::Inline(&[]), remote: (0, 0), imm: 0 };
        let mut requests = [empty.with(wr_id); MAX_RECVS];
        for (place, wr) in requests.iter_mut().zip(wrs) {
            *place = wr.with(wr_id);
        }
        let requests = requests.get_mut(..wrs.len()).ok_or(PostError::Full)?;
        let unsignaled = qp.prepare(requests, wr_id, false)?;
        cq.qp(qp.id).post_send(requests)?;
        qp.posted(wrs.len(), unsignaled);
        Ok(())
    }

    /// Pre-posts one receive on a queue pair. It takes immediates only, so it has no memory.
    #[inline(always)]
    pub fn post_recv(&mut self, qp: usize) -> std::result::Result<(), PostError> {
        let Some(it) = self.qps.get(qp) else { return Err(PostError::Invalid("no such qp")) };
        let Some(cq) = self.queues.get_mut(usize::from(it.rail)) else { return Err(PostError::Invalid("no such rail")) };
        let wr_id = WrId { kind: WrKind::Recv, stripe: 0, qp: qp as u8, retires: 0, id: RequestId(0) }.encode();
        cq.qp(it.id).post_recv(&RecvWr { wr_id, sge: Sge::default() })
    }

    /// Takes completions of a rail: how many. `None` after the last rail.
    #[inline(always)]
    pub fn poll(&mut self, rail: usize, out: &mut [Completion; BATCH]) -> Option<usize> {
        let cq = self.queues.get_mut(rail)?;
        Some(cq.poll(out))
    }

    /// Frees the send queue entries that a completion retires.
    #[inline]
    pub fn retire(&mut self, wr: &WrId) {
        if let Some(qp) = self.qps.get_mut(usize::from(wr.qp)) {
            qp.room += u32::from(wr.retires);
        }
    }

    /// Posts the READ of a flush on the queue pair of `rail` that is connected to itself. It is as deep as there are requests, so its completions
    /// retire nothing.
    pub fn post_flush(&mut self, rail: usize, wr: Wr<'_>, id: RequestId) -> std::result::Result<(), PostError> {
        let request = SendWr { signaled: true, ..wr.with(WrId { kind: WrKind::Flush, stripe: 0, qp: rail as u8, retires: 0, id }) };
        let Some(qp) = self.flush_qps.get(rail) else { return Err(PostError::Invalid("no such rail")) };
        let Some(cq) = self.queues.get_mut(rail) else { return Err(PostError::Invalid("no such rail")) };
        cq.qp(*qp).post_send(&[request])
    }

    /// Whether unsignaled requests are out on a queue pair with no signaled one behind them.
    pub fn has_unsignaled(&self, qp: usize) -> bool {
        self.qps.get(qp).is_some_and(|qp| qp.unsignaled > 0)
    }

    /// Asks for notifications, and names the descriptors to sleep on.
    ///
    /// Errors: queues that do not notify; no memory left for it.
    pub fn arm(&mut self, watch: impl FnMut(RawFd)) -> Result<()> {
        self.sleep_fds.iter().copied().for_each(watch);
        self.queues.iter_mut().try_for_each(CompletionQueue::arm)
    }

    /// Whether the queues have to be polled again before anybody sleeps, after [`QueuePairs::arm`].
    pub fn needs_repoll(&mut self) -> bool {
        self.queues.iter_mut().fold(false, |any, cq| any | cq.needs_repoll())
    }
}

/// An unused entry for `poll` to fill.
pub const NO_COMPLETION: Completion =
    Completion { wr_id: 0, status: WcStatus::GeneralErr, opcode: WcOpcode::Send, byte_len: 0, imm: None, qp_num: 0 };
