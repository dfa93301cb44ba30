//! The simulated fabric: queue pairs of any number of hosts in one thread, over rails that fail, in a time of their own. Only under the feature `sim`,
//! for `crate::sim`, which moves the time along, and for the conformance suite, where polls do; the layers above run on it as they are.
//!
//! It behaves like a NIC where providers differ: a queue pair is connected at once, and what is posted before the peer is there is sent again until
//! the retries are used up; nothing tells that the peer's queue pair has failed. [`world`] has the network and the clock, [`queue_pair`] the protocol.

mod queue_pair;
mod world;

use std::cell::OnceCell;
use std::os::fd::RawFd;
use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::base::stats::RailStats;

use super::soft;
use super::types::*;
use queue_pair::QueuePairState;
pub use world::{Cut, Port, Random, World};

/// Bytes that a request may carry inline.
pub const MAX_INLINE: usize = soft::MAX_INLINE;

/// What a simulated device can do where nobody wants it otherwise: as a NIC.
pub const NIC: Capabilities = Capabilities {
    keeps_early_requests: false,
    counts_plain_writes: false,
    splits_data: true,
    ar_threshold: u32::MAX,
    shares_regions: false,
    descriptors_per_qp: 0,
};

/// What begins an endpoint.
const MAGIC: [u8; 8] = *b"RHSIMEP1";

/// A host's port on a rail.
#[derive(Clone)]
pub struct Device {
    world: World,
    port: Port,
    info: Arc<DeviceInfo>,
}

impl Device {
    /// The port of `world` that `port` names.
    pub(super) fn new(world: World, port: Port) -> Device {
        let info = DeviceInfo {
            name: format!("sim{}", port.rail),
            fabric: "sim",
            // Ports of one device, which may be fused.
            pci_path: Some("/sim".into()),
            guid: 1,
            port: port.rail as u16 + 1,
            speed_mbps: 100_000,
            latency_us: 2.0,
            mtu: 4096,
            max_qp: 0,
            rail_id: ID_UNDEF,
            plane_id: ID_UNDEF,
            peer_memory: false,
            dma_buf: false,
            addr: ([127, 0, 0, 1], 0).into(),
        };
        Device { world, port, info: Arc::new(info) }
    }

    /// Properties.
    pub fn info(&self) -> &DeviceInfo {
        &self.info
    }

    /// What it can do: as the world was told.
    pub fn capabilities(&self) -> Capabilities {
        self.world.state().capabilities
    }

    /// It needs nothing to be opened.
    pub fn open(&self) -> Domain {
        Domain { world: self.world.clone(), port: self.port }
    }
}

/// A port that queue pairs are made on.
#[derive(Clone)]
pub struct Domain {
    world: World,
    port: Port,
}

impl Domain {
    /// Registers memory: the table is the software fabric's.
    pub fn register(&self, memory: UserMemory, access: Access) -> Result<soft::MemoryRegion> {
        soft::MemoryRegion::register(memory, access)
    }

    /// Makes a completion queue. Nothing sleeps in a simulation.
    pub fn create_cq(&self, notify: bool) -> Result<CompletionQueue> {
        if notify {
            return Err(Error::usage("the simulated fabric wakes nobody"));
        }
        Ok(CompletionQueue { world: self.world.clone(), port: self.port, qps: Vec::new(), next: 0 })
    }

    /// There is none.
    pub fn notification_fd(&self) -> Result<RawFd> {
        Err(Error::usage("the simulated fabric wakes nobody"))
    }
}

/// A completion queue and its queue pairs.
pub struct CompletionQueue {
    world: World,
    port: Port,
    qps: Vec<Option<Box<QueuePair>>>,
    /// The queue pair that the next poll begins with.
    next: usize,
}

impl CompletionQueue {
    /// Makes a queue pair in INIT.
    pub fn create_qp(&mut self, caps: &QpCaps, stats: RailStats) -> Result<QpId> {
        let number = self.world.state().add_qp(self.port, caps, stats);
        self.qps.push(Some(Box::new(QueuePair { world: self.world.clone(), number, why: OnceCell::new() })));
        Ok(QpId(self.qps.len() as u32 - 1))
    }

    /// The queue pair that `create_qp` named.
    ///
    /// # Panics
    /// Never for an id of this queue that was not destroyed.
    pub fn qp(&mut self, id: QpId) -> &mut QueuePair {
        self.qps.get_mut(id.0 as usize).and_then(Option::as_deref_mut).unwrap_or_else(|| panic!("{id:?} names no queue pair"))
    }

    /// Destroys a queue pair.
    pub fn destroy_qp(&mut self, id: QpId) {
        if let Some(place) = self.qps.get_mut(id.0 as usize) {
            *place = None;
        }
    }

    /// Takes completions.
    pub fn poll(&mut self, out: &mut [Completion]) -> usize {
        let (mut n, count) = (0, self.qps.len());
        let mut state = self.world.state();
        state.polled();
        if state.is_silent(self.port) {
            return 0;
        }
        for i in 0..count {
            let at = (self.next + i) % count;
            if let (Some(Some(qp)), Some(rest)) = (self.qps.get(at), out.get_mut(n..)) {
                n += state.qp(qp.number).poll(rest);
            }
        }
        self.next = (self.next + 1) % count.max(1);
        n
    }

    /// Nothing sleeps.
    pub fn arm(&mut self) -> Result<()> {
        Err(Error::usage("the simulated fabric wakes nobody"))
    }
}

/// A queue pair: the world has it.
pub struct QueuePair {
    world: World,
    number: usize,
    /// Why it has failed, once somebody has asked.
    why: OnceCell<String>,
}

impl QueuePair {
    fn with<T>(&self, f: impl FnOnce(&mut QueuePairState) -> T) -> T {
        f(self.world.state().qp(self.number))
    }

    /// Where it can be reached: its number, and where its packet numbers begin.
    pub fn endpoint(&self) -> Endpoint {
        let mut out = [0; ENDPOINT_SIZE];
        let number = (self.number as u64).to_le_bytes();
        let psn = self.with(|qp| qp.first_psn).to_le_bytes();
        out.iter_mut().zip(MAGIC.iter().chain(&number).chain(&psn)).for_each(|(out, byte)| *out = *byte);
        Endpoint(out)
    }

    /// To RTS.
    pub fn connect(&mut self, remote: &Endpoint) -> Result<()> {
        let word = |at: usize| remote.0.iter().skip(at).take(8).rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
        let (number, psn) = (word(8) as usize, word(16) as u32);
        let mut state = self.world.state();
        if !remote.0.starts_with(&MAGIC) || number >= state.qps() {
            return Err(Error::remote("an endpoint that is none of the simulated fabric"));
        }
        if state.qp(self.number).state() != QpState::Init {
            return Err(Error::internal("connect of a queue pair that is not in INIT"));
        }
        let rnr_retry = state.rnr_retry(number);
        state.qp(self.number).connect(number, psn, rnr_retry);
        Ok(())
    }

    /// State.
    pub fn state(&self) -> QpState {
        self.with(|qp| qp.state())
    }

    /// Its number.
    pub fn qp_num(&self) -> u32 {
        self.number as u32
    }

    /// Posts requests, and sends them.
    pub fn post_send(&mut self, requests: &[SendWr<'_>]) -> std::result::Result<(), PostError> {
        let mut state = self.world.state();
        if state.qp(self.number).state() != QpState::Rts {
            return Err(PostError::State(state.qp(self.number).state()));
        }
        let taken = state.taken(self.number, requests.len());
        state.qp(self.number).wq.post_send(requests.get(..taken).unwrap_or_default())?;
        state.transmit(self.number);
        if taken < requests.len() {
            state.begin_to_fail(self.number, WcStatus::LocQpOpErr, "the device has refused a request");
            return Err(PostError::State(QpState::Error));
        }
        Ok(())
    }

    /// Posts a receive request.
    pub fn post_recv(&mut self, request: &RecvWr) -> std::result::Result<(), PostError> {
        self.with(|qp| qp.wq.post_recv(request))
    }

    /// To ERROR. For a while what the peer has sent still lands.
    pub fn set_error(&mut self) {
        let mut state = self.world.state();
        state.begin_to_fail(self.number, WcStatus::WrFlushErr, "taken to ERROR by its owner");
    }

    /// Whether everything was reported, and nothing lands any more.
    pub fn drained(&self) -> bool {
        self.with(|qp| qp.drained())
    }

    /// To INIT, as a later generation.
    pub fn reset(&mut self, generation: u32) -> Result<()> {
        self.why = OnceCell::new();
        self.with(|qp| qp.reset(generation))
    }

    /// Why it is in ERROR.
    pub fn error(&self) -> Option<&str> {
        match self.why.get() {
            Some(why) => Some(why),
            None => {
                let why = self.with(|qp| qp.wq.error().map(str::to_owned))?;
                Some(self.why.get_or_init(|| why))
            }
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.world.state().destroy(self.number);
    }
}
