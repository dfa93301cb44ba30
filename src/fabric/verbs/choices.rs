//! What a port's NIC, its driver and libibverbs may be able to do or not, tried out: relaxed ordering, enhancements, DMA-BUF, peer memory.
//! Asked by `railhead info`, on its one thread, of ports that are listed; devices that messages flow over ask none of it.

use std::path::Path;
use std::sync::Arc;

use super::attributes;
use super::context::takes_dma_buf;
use super::endpoint::{Address, Ece};
use super::library::made;
use super::port::Port;
use super::{CompletionQueue, MemoryRegion, Shared};
use crate::base::error::Result;
use crate::base::mem::Pages;
use crate::base::stats::RailStats;
use crate::fabric::types::{Access, QpCaps};

/// Each begins with "yes", "no" or "off" and says why.
#[derive(Debug, Clone)]
pub struct Choices {
    /// Of the memory of messages.
    pub relaxed_ordering: String,
    /// Enhanced connection establishment.
    pub ece: String,
    /// Registration of a GPU's memory by DMA-BUF.
    pub dma_buf: String,
    /// Registration of a GPU's memory by its address.
    pub peer_memory: String,
}

/// Tries them out on a port.
pub fn choices(port: &Arc<Port>) -> Choices {
    let context = &port.context;
    let with_domain = |ask: fn(&Arc<Shared>) -> Result<String>| {
        let answer = Shared::new(port.clone()).map(Arc::new).and_then(|shared| ask(&shared));
        answer.unwrap_or_else(|e| format!("no: {e}"))
    };
    Choices {
        relaxed_ordering: match (port.config.ib_relaxed_ordering, context.library.reg_mr_iova2) {
            (0, _) => "off: NCCL_IB_PCI_RELAXED_ORDERING is 0".into(),
            (_, None) => "no: libibverbs has no ibv_reg_mr_iova2 (rdma-core 28 has)".into(),
            _ => with_domain(relaxed_ordering),
        },
        ece: match (port.config.ib_ece, context.library.query_ece.zip(context.library.set_ece)) {
            (false, _) => "off: NCCL_IB_ECE_ENABLE is 0".into(),
            (_, None) => "no: libibverbs has no ibv_query_ece (rdma-core 31 has)".into(),
            _ => with_domain(ece),
        },
        dma_buf: match takes_dma_buf(context.library, context.raw) {
            Ok(()) => "yes: the driver takes them".into(),
            Err(why) => format!("no: {why}"),
        },
        peer_memory: match attributes::peer_memory(Path::new(attributes::SYS)) {
            Some(module) => format!("yes: {module} is loaded"),
            None => "no: nvidia_peermem is not loaded".into(),
        },
    }
}

fn relaxed_ordering(shared: &Arc<Shared>) -> Result<String> {
    let page = Pages::new(1)?;
    // SAFETY: both regions below are dropped here, before the page.
    let memory = unsafe { page.as_memory() };
    let (flags, _) = shared.flags(memory, Access::LOCAL_WRITE)?;
    let Some(reg_mr) = shared.library().reg_mr_iova2 else { return Ok("no".into()) };
    let (addr, flags) = (std::ptr::with_exposed_provenance_mut(memory.addr()), flags | Access::RELAXED_ORDERING.bits());
    // SAFETY: the domain is live; the range is the page, which outlives the region.
    match made(unsafe { reg_mr(shared.pd, addr, memory.len(), memory.addr() as u64, flags) }) {
        Ok(raw) => {
            drop(MemoryRegion { raw, memory, shared: shared.clone() });
            Ok("yes: the driver takes it".into())
        }
        Err(e) => Ok(format!("no: the driver refuses it: {e}")),
    }
}

fn ece(shared: &Arc<Shared>) -> Result<String> {
    let mut cq = CompletionQueue::new(shared.clone(), false)?;
    let qp = cq.create_qp(&QpCaps { send_depth: 1, recv_depth: 1, ..QpCaps::default() }, RailStats::detached())?;
    let told = Address::decode(&cq.qp(qp).endpoint())?.ece;
    Ok(match told {
        Ece::Offered(ece) | Ece::Agreed(ece) => format!("yes: options {:#x} are offered to each peer", ece.options),
        Ece::None => "no: the driver has no enhancements".into(),
    })
}
