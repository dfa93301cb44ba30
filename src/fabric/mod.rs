//! RC (reliable connection) queue pairs, memory regions and completion queues behind one interface for all providers.
//!
//! In names: Wr is a work request, Wc a work completion, Sge a scatter/gather element. INIT: a queue pair takes receives; RTS: sends too; ERROR: nothing
//! any more. RNR: receiver not ready, no receive request was posted.
//!
//! `net` (and every other layer above) sees only what this file exports: the handles of `dispatch.rs`, the memory of `region.rs` and the vocabulary
//! of [`types`]. Which provider stands behind a [`Device`] is decided when the devices are listed. Dispatch is a `match` on an enum, so that the hot
//! path has no indirect call.
//!
//! # The contract
//!
//! * A queue pair is connected by exchanging opaque [`Endpoint`]s, in any order, over any channel. `connect` does not wait for the peer (a
//!   NIC may take a while to resolve its address); what is posted before the peer answers waits, or, on a NIC, is sent again until its retries are used up.
//! * Reliable and in order per queue pair. A WRITE completes once the responder has accepted it in order. WRITE consumes no
//!   receive request; WRITE_WITH_IMM consumes one and ignores its memory. No receive posted: the requester waits (RNR) up to its
//!   `rnr_retry`. A wrong remote key, range or access is `RemAccessErr` and takes both queue pairs to ERROR. In ERROR everything outstanding
//!   completes with `WrFlushErr`. A dead peer is `RetryExcErr` on the oldest request. Zero-length requests are legal.
//! * `reset` takes a queue pair from ERROR, once it is drained, back to INIT as a later generation. It is connected to the same endpoint as before, and
//!   meets only a peer of its own generation: nothing of an earlier one is accepted or lands any more.
//! * Nothing lands in memory that was deregistered, or that was announced to the peer of a queue pair that was dropped. Both wait for a peer on this host
//!   that is in the middle of a write, be it stopped; `drop_waits` tells whether a drop would.
//! * Ordered publish: of a WRITE of 8 to 64 bytes whose end is 8-aligned, the last 8 bytes become visible (Release) after the
//!   rest. This is what makes a flag at the end of a slot trustworthy.
//! * `poll` returns a completion only after every acknowledgement owed for earlier work was handed to the kernel or to shared
//!   memory: a caller that stops polling after its last completion holds nobody up.
//! * A [`CompletionQueue`] owns its queue pairs, and one thread at a time drives it with all of them. Different queues are independent.
//!   Registration is independent of all of them and may happen on any thread.
//! * A queue created with notification is armed, **then** drained, then waited for on the device's one file descriptor. It is drained once a
//!   poll finds nothing: whoever polls it after that arms it again before the next wait. What is sent on its queue pairs between that poll and
//!   the wait gets out all the same: if not at once, the descriptor becomes readable.
//!
//! The conformance suite, `tests/conformance.rs`, tests each clause on each provider.

mod dispatch;
pub mod iface;
mod region;
#[cfg(feature = "sim")]
pub mod sim;
pub mod soft;
pub mod types;
pub mod verbs;

use std::sync::Arc;

use crate::base::config::{Config, Fabric};
use crate::base::error::Result;
use crate::base::log::{self, log_warn};

pub use dispatch::{CompletionQueue, Device, Domain, QueuePair};
pub use region::{HeldMemory, MemoryRegion, PagesRegion, RegionView};
pub use soft::memory::SharedPages;
pub use types::*;

/// Lists the usable devices, in an order that is the same on every start: by PCI path, then name. RAILHEAD_FABRIC chooses the provider:
/// by default NICs if there is a usable one, else the software fabric.
///
/// Errors: a setting that names no interface of this machine.
pub fn devices(config: &Arc<Config>) -> Result<Vec<Device>> {
    if config.fabric != Fabric::Soft {
        let nics: Vec<Device> = verbs::devices(config)?.into_iter().map(Device::Verbs).collect();
        if !nics.is_empty() {
            return Ok(nics);
        }
        if config.fabric == Fabric::Verbs {
            log_warn!(
                log::INIT,
                "RAILHEAD_FABRIC=verbs, and this machine has no usable RDMA NIC (`railhead info` says why); auto and soft work"
            );
            return Ok(nics);
        }
    }
    Ok(soft::devices(config)?.into_iter().map(Device::Soft).collect())
}

/// Allocates `len` zeroed, page-aligned bytes that a peer on the same host can map: the soft fabric then moves them without a system
/// call. Ordinary memory to every other provider. Freed with [`free`].
///
/// Errors: 0 bytes; no memory or descriptor left.
pub fn alloc(len: usize) -> Result<*mut u8> {
    soft::memory::alloc(len)
}

/// Frees what [`alloc`] returned. A region registered over it keeps the memory mapped until it is deregistered.
///
/// Errors: an address that is no allocation's first byte.
pub fn free(memory: *mut u8) -> Result<()> {
    soft::memory::free(memory)
}
