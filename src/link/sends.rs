//! Messages on their way to the peer: what is posted for one, on which queue pairs, and when all of it has completed. Used by the thread that drives
//! the link.

use crate::base::stage::{self, Stage};
use crate::base::stats::{CommCounter, CommStats};
use crate::fabric::{Completion, Opcode, Payload, PostError, Sge};

use super::Link;
use super::failover::{Posted, Sent};
use super::incoming::{CompletionRecord, Imm, epoch};
use super::limits::{IMM_LIMIT, MAX_QPS, MAX_RAILS, MAX_RECVS, RECORD_SIZE, SLOTS};
use super::memory::Registration;
use super::plan::Plan;
use super::queue_pairs::{NO_QP, QueuePairs, Wr};
use super::request::{Request, RequestTable};
use super::wr_id::{RequestId, WrId, WrKind};

/// Entries of a send queue that a message takes on one queue pair at most: a record, data, and an immediate.
pub const MOST_ENTRIES: u32 = 3;

/// The request of a message of `len` bytes in so many stripes, 1..=64.
#[inline(always)]
pub fn request(len: usize, stripes: usize, sequence: u64) -> Request {
    let mut bytes = [0; MAX_RECVS];
    bytes[0] = len as u32;
    Request { n: 1, left: 1, pending_stripes: u64::MAX >> (MAX_QPS - stripes), sequence, bytes }
}

/// What knows the keys of a message's memory for local use.
pub trait LocalKeys {
    /// Of a rail.
    fn lkey(&self, rail: usize) -> u32;
}

impl LocalKeys for Registration {
    #[inline(always)]
    fn lkey(&self, rail: usize) -> u32 {
        Registration::lkey(self, rail)
    }
}

/// Rail by rail.
impl LocalKeys for [u32; MAX_RAILS] {
    #[inline(always)]
    fn lkey(&self, rail: usize) -> u32 {
        self.get(rail).copied().unwrap_or(0)
    }
}

/// A message that is being posted.
pub struct Message<'a, K> {
    /// Sequence number of the receive; its low byte is the slot.
    pub sequence: u64,
    /// First byte at the receiver.
    pub remote_addr: u64,
    /// The keys of that memory, rail by rail.
    pub rkeys: &'a [u32; MAX_RAILS],
    /// First byte here.
    pub addr: usize,
    /// None for a message without bytes.
    pub keys: Option<&'a K>,
    /// Its request.
    pub id: RequestId,
}

impl<K: LocalKeys> Message<'_, K> {
    /// The WRITE of `len` bytes of it, with an immediate.
    #[inline(always)]
    pub fn write(&self, qps: &QueuePairs, qp: usize, offset: usize, len: usize, imm: Imm) -> Wr<'static> {
        let rail = qps.rail_of(qp);
        let lkey = self.keys.map_or(0, |keys| keys.lkey(rail));
        Wr {
            opcode: Opcode::WriteWithImm,
            payload: Payload::Sge(Sge { addr: (self.addr + offset) as u64, len: len as u32, lkey }),
            remote: (self.remote_addr.wrapping_add(offset as u64), self.rkeys.get(rail).copied().unwrap_or(0)),
            imm: imm.encode((self.sequence % SLOTS as u64) as u8),
        }
    }

    /// Posts it on the queue pair of what is ordered, with this value as its immediate.
    pub fn post_in_order(self, link: &mut Link, len: usize, value: u32) -> std::result::Result<(), (usize, PostError)> {
        let ordered = link.qps.ordered();
        let qps = &mut link.qps;
        let data = self.write(qps, ordered, 0, len, Imm::Whole(value));
        let posted = if len <= qps.ar_threshold(ordered) as usize {
            qps.post_send(ordered, [data], WrKind::Data, self.id, true)
        } else {
            let body = Wr { opcode: Opcode::Write, imm: 0, ..data };
            let empty = Wr { payload: Payload::Sge(Sge::default()), ..data };
            qps.post_send(ordered, [body, empty], WrKind::Data, self.id, true)
        };
        link.remember(&self, Plan::whole(len));
        link.posted(ordered, Posted::Notification(self.id, value), posted).map_err(|error| (ordered, error))
    }

    /// Posts it as planned, in any number of work requests.
    #[inline(never)]
    pub fn post(self, link: &mut Link, plan: Plan) -> std::result::Result<(), (usize, PostError)> {
        link.remember(&self, plan);
        // A queue pair that fails meanwhile is none of those that messages take any more.
        let qps: [usize; MAX_QPS] = std::array::from_fn(|place| link.qps.live(place));
        for stripe in 0..plan.stripes {
            let qp = qps.get(plan.stripe(stripe).0).copied().unwrap_or(NO_QP);
            let posted = self.post_stripe(&mut link.qps, &link.stats, plan, stripe, qp);
            link.posted(qp, Posted::Stripe(self.id, stripe as u8), posted).map_err(|error| (qp, error))?;
        }
        Ok(())
    }

    /// Posts a stripe of it on a queue pair.
    fn post_stripe(
        &self,
        qps: &mut QueuePairs,
        stats: &CommStats,
        plan: Plan,
        stripe: usize,
        qp: usize,
    ) -> std::result::Result<(), PostError> {
        let whole = plan.stripes == 1 && plan.len() < IMM_LIMIT;
        let record = CompletionRecord { size: plan.len() as u64, stripes: plan.stripes as u32, epoch: epoch(self.sequence) }.encode();
        let (_, offset, len) = plan.stripe(stripe);
        let imm = if whole { Imm::Whole(plan.len() as u32) } else { Imm::Stripe(stripe as u32) };
        let data = self.write(qps, qp, offset, len, imm);
        let remote = qps.remote(qp, (self.sequence % SLOTS as u64) as usize * RECORD_SIZE);
        let record = Wr { opcode: Opcode::Write, payload: Payload::Inline(&record), remote, imm: 0 };
        // Data too long to go with its immediate goes before it.
        let body = Wr { opcode: Opcode::Write, imm: 0, ..data };
        let empty = Wr { payload: Payload::Sge(Sge::default()), ..data };
        let posted = match (whole, len <= qps.ar_threshold(qp) as usize) {
            (true, true) => qps.post_stripe(qp, [data], stripe, self.id),
            (true, false) => qps.post_stripe(qp, [body, empty], stripe, self.id),
            (false, true) => qps.post_stripe(qp, [record, data], stripe, self.id),
            (false, false) => qps.post_stripe(qp, [record, body, empty], stripe, self.id),
        };
        if !whole {
            // The rails count a record's bytes as they count a message's.
            stats.add(CommCounter::Bytes, RECORD_SIZE as u64);
        }
        posted
    }
}

impl Sent {
    fn message(&self) -> Message<'_, [u32; MAX_RAILS]> {
        let Sent { id, sequence, addr, remote_addr, rkeys, lkeys, .. } = self;
        Message { sequence: *sequence, remote_addr: *remote_addr, rkeys, addr: *addr, keys: Some(lkeys), id: *id }
    }

    /// Posts a stripe once more, on a queue pair.
    pub fn post_again(&self, qps: &mut QueuePairs, stats: &CommStats, stripe: usize, qp: usize) -> std::result::Result<(), PostError> {
        self.message().post_stripe(qps, stats, self.plan, stripe, qp)
    }

    /// The same of one that is ordered.
    pub fn post_again_in_order(&self, link: &mut Link, value: u32) -> std::result::Result<(), (usize, PostError)> {
        self.message().post_in_order(link, self.plan.len(), value)
    }
}

/// A stripe has completed: the peer has all of it.
#[inline]
pub fn stripe_completed(link: &mut Link, wr: &WrId, _: &Completion) {
    stripe_done(&mut link.requests, wr.id, wr.stripe);
}

/// The peer has all of a stripe.
#[inline]
pub fn stripe_done(requests: &mut RequestTable, id: RequestId, stripe: u8) {
    let Some(request) = requests.get_mut(id) else { return };
    request.pending_stripes &= !(1 << stripe);
    if request.pending_stripes == 0 && request.left > 0 {
        request.left = 0;
        stage::reach(Stage::SendDone);
    }
}
