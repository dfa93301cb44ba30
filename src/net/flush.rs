//! Flush: a READ of received device memory over a queue pair that is connected to itself on the same NIC. PCIe lets no read pass the
//! writes before it, so once the READ completes, the received data has left the NIC. Used by the thread that drives the comm; host memory
//! needs none of it.

use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::base::mem::Pages;
use crate::fabric::{Access, Opcode, PagesRegion, Payload, QpCaps, Sge};
use crate::link::Link;
use crate::link::limits::{MAX_RECVS, MAX_REQUESTS};
use crate::link::memory::Registration;
use crate::link::queue_pairs::Wr;
use crate::link::request::Request;
use crate::link::wr_id::{RequestId, WrKind};

use super::device::Physical;

/// What the loopback queue pairs of a comm, one per rail, work on. They are destroyed with the comm's queues, before this.
pub struct Flusher {
    /// Of `scratch`, one per rail.
    regions: Vec<PagesRegion>,
    /// Where the READs put their byte.
    scratch: Pages,
}

impl Flusher {
    /// Makes and connects the queue pairs. Once per comm, at the first flush.
    pub fn new(devices: &[Arc<Physical>], link: &mut Link) -> Result<Flusher> {
        let scratch = Pages::new(1)?;
        let caps = QpCaps { send_depth: MAX_REQUESTS as u32, recv_depth: 1, ..QpCaps::default() };
        let mut regions = Vec::new();
        for (rail, device) in devices.iter().enumerate().take(link.qps.rails()) {
            regions.push(device.domain()?.register_pages(&scratch, Access::LOCAL_WRITE)?);
            let stats = link.stats.rail(rail);
            link.qps.add_flush_qp(rail, &caps, stats)?;
        }
        Ok(Flusher { regions, scratch })
    }

    /// Reads one byte at `addr` on every rail. `None`: the link has failed, and others are to be told first.
    ///
    /// Errors: as many requests as may be are outstanding. (No request would mean that nothing need be flushed.)
    pub fn post(&mut self, link: &mut Link, addr: u64, registration: &Registration) -> Result<Option<RequestId>> {
        if !link.requests.has_room() {
            return Err(Error::usage(format!("iflush: {MAX_REQUESTS} requests are outstanding, as many as may be")));
        }
        let request = Request { n: 0, left: self.regions.len() as u8, pending_stripes: 0, sequence: 0, bytes: [0; MAX_RECVS] };
        let Some(id) = link.requests.insert(request) else { return Ok(None) };
        let rkeys = registration.rkeys();
        for (rail, region) in self.regions.iter().enumerate() {
            let read = Wr {
                opcode: Opcode::Read,
                payload: Payload::Sge(Sge { addr: self.scratch.addr() as u64, len: 1, lkey: region.lkey() }),
                remote: (addr, rkeys.get(rail).copied().unwrap_or(0)),
                imm: 0,
            };
            if let Err(error) = link.qps.post_flush(rail, read, id) {
                link.post_failed(WrKind::Flush, rail, error);
                return link.check().map(|()| None);
            }
        }
        Ok(Some(id))
    }
}
