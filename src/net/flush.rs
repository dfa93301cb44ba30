//! Flush: a READ of received device memory over a queue pair that is connected to itself on the same NIC. PCIe lets no read pass the
//! writes before it, so once the READ completes, the received data has left the NIC. Used by the thread that drives the comm; host memory
//! needs none of it.

use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::base::mem::Pages;
use crate::fabric::{Access, MemoryRegion, Opcode, Payload, QpCaps, QpId, SendRequest, Sge};

use super::comm::Core;
use super::device::Physical;
use super::mr_cache::Registration;
use super::rails::{WrId, WrKind};
use super::request::{MAX_RECVS, MAX_REQUESTS, Request, RequestId};

/// The loopback queue pairs of a comm, one per rail. They are destroyed with the comm's queues, and must outlive neither.
pub struct Flusher {
    qps: Vec<(QpId, MemoryRegion)>,
    /// Where the READs put their byte.
    scratch: Pages,
}

impl Flusher {
    /// Makes and connects the queue pairs. Once per comm, at the first flush.
    pub fn new(devices: &[Arc<Physical>], core: &mut Core) -> Result<Flusher> {
        let scratch = Pages::new(1)?;
        let caps = QpCaps { send_depth: MAX_REQUESTS as u32, recv_depth: 1, ..QpCaps::default() };
        let mut qps = Vec::new();
        for (rail, device) in devices.iter().enumerate().take(core.rails.rails()) {
            let region = device.domain()?.register(scratch.as_memory(), Access::LOCAL_WRITE)?;
            let stats = core.stats.rail(rail);
            let cq = core.rails.queue(rail).ok_or_else(|| Error::internal("flush: no such rail"))?;
            let id = cq.create_qp(&caps, stats)?;
            let itself = cq.qp(id).endpoint();
            cq.qp(id).connect(&itself)?;
            qps.push((id, region));
        }
        Ok(Flusher { qps, scratch })
    }

    /// Reads one byte at `addr` on every rail. `None`: too many requests are outstanding.
    pub fn post(&mut self, core: &mut Core, addr: u64, registration: &Registration) -> Result<Option<RequestId>> {
        if !core.requests.has_room() {
            return Ok(None);
        }
        let request = Request { n: 0, left: self.qps.len() as u8, stripes: 0, sequence: 0, bytes: [0; MAX_RECVS] };
        let Some(id) = core.requests.insert(request) else { return Ok(None) };
        let rkeys = registration.rkeys();
        for (rail, (qp, region)) in self.qps.iter().enumerate() {
            let read = SendRequest {
                // Retires nothing: the queue is as deep as there are requests.
                wr_id: WrId { kind: WrKind::Flush, lane: rail as u8, retires: 0, id }.encode(),
                opcode: Opcode::Read,
                payload: Payload::Sge(Sge { addr: self.scratch.addr() as u64, len: 1, lkey: region.lkey() }),
                remote_addr: addr,
                rkey: rkeys.get(rail).copied().unwrap_or(0),
                imm: 0,
                signaled: true,
            };
            let posted = core.rails.queue(rail).map(|cq| cq.qp(*qp).post_send(&[read]));
            if let Some(Err(error)) = posted {
                core.post_failed(rail, "a flush", error);
                return core.check().map(|()| None);
            }
        }
        Ok(Some(id))
    }
}
