//! What a channel does with its link: fills message buffers, posts writes, and notes what its worker has to be told. What its tables of actions say is
//! done in [`buffered`] and [`direct`], by mode. Under the lock of the manager.

mod buffer_memory;
mod buffered;
mod direct;

use std::collections::VecDeque;
use std::sync::Arc;

use foldhash::HashMap;

use crate::base::error::{Error, Result};
use crate::base::stage::{self, Stage};
use crate::base::stats::CommCounter;
use crate::link::Failure;
use crate::link::device::{Device, Registered};
use crate::link::duplex::{Duplex, Target};
use crate::link::limits::{MAX_RAILS, MAX_REQUESTS};
use crate::link::wr_id::RequestId;

use self::buffer_memory::BufferMemory;
use super::channel::Tx;
use super::direct::Announced;
use super::event::ChannelEvent;
use super::key::TensorId;
use super::mailbox::Mail;
use super::memory::{Memory, Pool};
use super::message::{ACK, HEADER, Kind, MESSAGE, NumberedRequest, Packet};
use super::value::Tensor;

/// The buffers that every channel has, in the order in which they lie: each of [`MESSAGE`] bytes.
pub const BUFFERS: [&str; 4] = ["tx_message_buffer", "rx_message_buffer", "tx_ack_buffer", "rx_ack_buffer"];
const TX_MESSAGE: usize = 0;
/// Where the second of them begins.
pub const RX_MESSAGE: usize = MESSAGE;
const TX_ACK: usize = 2 * MESSAGE;
/// Where the last of them does.
pub const RX_ACK: usize = 3 * MESSAGE;
/// The slots that stand open, in the order in which each side opens them: the first, for messages.
pub const MESSAGES: u64 = 0;
/// The second, for acks.
pub const ACKS: u64 = 1;
/// The third, for tensors that go through buffers.
pub const TENSORS: u64 = 2;

/// A tensor that is to be copied before it is sent, for which no lock is needed; [`ChannelIo::filled`] sends it then.
pub struct Fill {
    /// The named buffers of the channel, which may be gone when it is copied.
    of: Arc<Registered>,
    tensor: Tensor,
    to: Place,
}

enum Place {
    /// The buffer of a tensor, behind a header.
    Buffer { index: usize, to: Target, value: u32, memory: Arc<Registered>, packet: Box<Packet> },
    /// Memory that the device reads, as it does not read the producer's.
    Pooled { to: Announced, pool: Arc<Pool>, copy: Option<Result<Memory>> },
}

impl Fill {
    /// Copies it. `between` is called now and then.
    pub fn copy(&mut self, between: &mut impl FnMut()) {
        match &mut self.to {
            Place::Buffer { memory, .. } => {
                // The buffer has room for it: it was made so.
                if let Ok(view) = memory.view(HEADER, self.tensor.len()) {
                    self.tensor.copy_to(&view, between);
                }
            }
            Place::Pooled { pool, copy, .. } => {
                let taken = pool.take(self.tensor.len()).inspect(|memory| {
                    if let Some(view) = memory.view(self.tensor.len()) {
                        self.tensor.copy_to(&view, between);
                    }
                });
                *copy = Some(taken);
            }
        }
    }
}

/// What executes what the channel says.
pub struct ChannelIo {
    /// First, so that nobody reads or writes the memory below when that is dropped.
    pub link: Duplex,
    pool: Arc<Pool>,
    /// The named ones.
    pub buffers: Arc<Registered>,
    /// The peer's, for messages and for acks.
    to: [Target; 2],
    /// Of tensors that come in and that go out, by number.
    pub tensors: [HashMap<usize, Arc<Registered>>; 2],
    /// Where their memory is from.
    memory: BufferMemory,
    fills: VecDeque<Box<Fill>>,
    /// Those, and others that are being copied.
    filling: usize,
    /// By their slots: what tensors are written into.
    opened: HashMap<u64, Opened>,
    /// Bytes of the library's memory among that: for tensors that are there, and for those that may not be.
    open: [usize; 2],
    /// Writes for which there was no room.
    posts: VecDeque<Post>,
    writes: VecDeque<(Announced, Tensor)>,
    /// By the index of a request: what it writes.
    sent: Vec<Option<Sent>>,
    pub events: VecDeque<ChannelEvent>,
    /// What could not be done.
    broken: Option<Error>,
    #[cfg(test)]
    pub tamper: Option<Tamper>,
}

/// Changes where a tensor is written, and its bytes.
#[cfg(test)]
pub type Tamper = fn(&mut super::message::RemoteMr, &mut u64);

/// A write whose memory is not to be touched yet.
enum Sent {
    Buffer(Tx),
    Tensor { _memory: Tensor },
}

/// Memory behind a slot of this side's.
struct Opened {
    memory: Arc<Memory>,
    /// Its bytes, if it is the library's.
    pooled: usize,
    /// The tensor may not be produced yet.
    ahead: bool,
}

#[derive(Clone, Copy)]
struct Post {
    from: Tx,
    kind: Kind,
    to: Target,
    value: u32,
    addr: usize,
    len: usize,
    lkeys: [u32; MAX_RAILS],
}

impl ChannelIo {
    /// Over a link, with the named buffers; `to` are the peer's, for messages and for acks.
    pub fn new(link: Duplex, device: &Arc<Device>, pool: &Arc<Pool>, buffers: Registered, to: [Target; 2]) -> ChannelIo {
        ChannelIo {
            link,
            pool: pool.clone(),
            buffers: Arc::new(buffers),
            to,
            tensors: Default::default(),
            memory: BufferMemory::new(device.clone()),
            fills: VecDeque::new(),
            filling: 0,
            opened: HashMap::default(),
            open: [0; 2],
            posts: VecDeque::new(),
            writes: VecDeque::new(),
            sent: std::iter::repeat_with(|| None).take(MAX_REQUESTS).collect(),
            events: VecDeque::new(),
            broken: None,
            #[cfg(test)]
            tamper: None,
        }
    }

    /// Where the library's memory is from.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// Of a tensor that comes in.
    pub fn incoming(&self, index: usize) -> Option<&Arc<Registered>> {
        let [coming, _] = &self.tensors;
        coming.get(&index)
    }

    /// Counts one.
    pub fn count(&self, counter: CommCounter) {
        self.link.stats().add(counter, 1);
    }

    /// Whether the peer has all that was to be written.
    pub fn is_through(&self) -> bool {
        self.filling == 0 && self.posts.is_empty() && self.writes.is_empty() && self.sent.iter().all(Option::is_none)
    }

    /// The peer has all of a write: the buffer that is free again. In Direct mode a tensor's memory is its producer's then, whatever the number.
    pub fn sent(&mut self, id: RequestId) -> Option<Tx> {
        match self.sent.get_mut((id.0 & 0xff) as usize).and_then(Option::take)? {
            Sent::Buffer(from) => Some(from),
            Sent::Tensor { .. } => Some(Tx::Tensor(0)),
        }
    }

    /// Posts what is to be written, as far as there is room.
    ///
    /// Errors: the link has failed, now or before.
    pub fn post(&mut self) -> Result<()> {
        if let Some(error) = self.broken.take() {
            self.link.fail(Failure::from_error(&error));
        }
        while let Some(post) = self.posts.front() {
            let Post { from, kind, to, value, addr, len, lkeys } = post;
            let posted = self.link.notify(to, 0, *value, *addr, *len, lkeys);
            let Some(id) = posted.inspect_err(|error| self.link.fail(Failure::from_error(error)))? else { break };
            if let Some(place) = self.sent.get_mut((id.0 & 0xff) as usize) {
                *place = Some(Sent::Buffer(*from));
            }
            if let Some(stage) = stage(*kind) {
                stage::reach(stage);
            }
            self.posts.pop_front();
        }
        while let Some((to, tensor)) = self.writes.front() {
            let (addr, keys) = tensor.memory().map_or_else(Default::default, |memory| (memory.addr(), memory.keys().0));
            let target = Target { sequence: to.sequence, addr: to.memory.addr, len: to.bytes, rkeys: to.memory.rkeys };
            let posted = self.link.write(&target, addr, to.bytes as usize, &keys);
            let Some(id) = posted.inspect_err(|error| self.link.fail(Failure::from_error(error)))? else { break };
            let tensor = self.writes.pop_front();
            if let (Some(place), Some((_, memory))) = (self.sent.get_mut((id.0 & 0xff) as usize), tensor) {
                *place = Some(Sent::Tensor { _memory: memory });
            }
            stage::reach(Stage::TensorWrite);
        }
        Ok(())
    }

    /// Notes a write of so many bytes from that offset of a memory, at which these are put before.
    fn put(&mut self, from: (Tx, Kind), memory: &Registered, (offset, len): (usize, usize), (to, value): (Target, u32), front: &[u8]) {
        match memory.view(offset, len) {
            Ok(view) => {
                view.write(front);
                let ((from, kind), addr, lkeys) = (from, view.addr(), memory.lkeys());
                self.posts.push_back(Post { from, kind, to, value, addr, len, lkeys });
            }
            Err(error) => self.broken = Some(error),
        }
    }

    fn fill(&mut self, tensor: Tensor, to: Place) {
        self.filling += 1;
        self.link.stats().add(CommCounter::Copied, tensor.len() as u64);
        self.fills.push_back(Box::new(Fill { of: self.buffers.clone(), tensor, to }));
    }

    /// Whether there is a tensor that is to be copied before it is sent.
    pub fn has_fill(&self) -> bool {
        !self.fills.is_empty()
    }

    /// The next of them.
    pub fn next_fill(&mut self) -> Option<Box<Fill>> {
        self.fills.pop_front()
    }

    /// It was: notes its write. One of an earlier connection is not written.
    pub fn filled(&mut self, Fill { of, tensor, to }: Fill) {
        if !Arc::ptr_eq(&of, &self.buffers) {
            return;
        }
        self.filling -= 1;
        match to {
            Place::Buffer { index, to, value, memory, packet } => {
                self.count(CommCounter::Ops);
                #[cfg(test)]
                let to = self.tampered_target(to);
                let (from, len) = ((Tx::Tensor(index), packet.kind), HEADER + tensor.len());
                self.put(from, &memory, (0, len), (to, value), &packet.encode());
            }
            Place::Pooled { to, copy: Some(Ok(copy)), .. } => self.write_from(to, Tensor::placed(*tensor.meta(), Arc::new(copy))),
            Place::Pooled { copy, .. } => self.broken = copy.and_then(Result::err),
        }
    }

    /// Notes a write of a tensor from memory that the device reads.
    fn write_from(&mut self, to: Announced, tensor: Tensor) {
        self.count(CommCounter::Ops);
        #[cfg(test)]
        let to = self.tampered(to);
        self.writes.push_back((to, tensor));
    }

    /// The memory of a slot that is not open any more.
    fn take_opened(&mut self, sequence: u64) -> Option<Arc<Memory>> {
        let Opened { memory, pooled, ahead } = self.opened.remove(&sequence)?;
        self.open[usize::from(ahead)] -= pooled;
        Some(memory)
    }
}

/// What is reached when one was posted.
fn stage(kind: Kind) -> Option<Stage> {
    match kind {
        Kind::Ack => Some(Stage::TensorAck),
        Kind::BufferIdle => Some(Stage::TensorBufferIdle),
        Kind::BufferRequest => Some(Stage::TensorBufferRequest),
        Kind::BufferResponse => Some(Stage::TensorBufferResponse),
        Kind::TensorRequest => Some(Stage::TensorRequest),
        Kind::TensorWrite => Some(Stage::TensorWrite),
        Kind::MetaDataUpdate => Some(Stage::TensorMetaDataUpdate),
        Kind::TensorReRequest => Some(Stage::TensorReRequest),
        Kind::ErrorStatus => Some(Stage::TensorErrorStatus),
        Kind::TensorWithdraw => Some(Stage::TensorWithdraw),
        Kind::TensorWithdrawn => Some(Stage::TensorWithdrawn),
    }
}

impl Mail for ChannelIo {
    fn ack(&mut self) {
        let ([_, to], memory) = (self.to, self.buffers.clone());
        self.put((Tx::Ack, Kind::Ack), &memory, (TX_ACK, ACK.len()), (to, ACK.len() as u32), &ACK);
    }

    fn message(&mut self, packet: &Packet, text: &str) {
        let ([to, _], memory, len) = (self.to, self.buffers.clone(), HEADER + text.len());
        if let Ok(place) = memory.view(TX_MESSAGE + HEADER, text.len()) {
            place.write(text.as_bytes());
        }
        self.put((Tx::Message, packet.kind), &memory, (TX_MESSAGE, len), (to, len as u32), &packet.encode());
    }

    fn numbered(&mut self, request: &NumberedRequest) -> bool {
        // What was noted before is posted before.
        if !self.posts.is_empty() {
            return false;
        }
        match self.link.send_control(&request.encode()) {
            Ok(sent) => {
                if sent {
                    stage::reach(Stage::TensorRequest);
                }
                sent
            }
            // It fails the link as well.
            Err(_) => true,
        }
    }
}

/// What a channel's end does with a tensor that was asked for, whichever its mode.
impl ChannelIo {
    fn tell_find(&mut self, id: TensorId, again: bool) {
        self.events.push_back(ChannelEvent::Find { id, again });
    }

    fn tell_forget(&mut self, id: &TensorId) {
        self.events.push_back(ChannelEvent::Forget { id: id.clone() });
    }

    fn tell_failed(&mut self, id: &TensorId, why: Error) {
        self.count(CommCounter::Completions);
        self.count(CommCounter::Errors);
        self.events.push_back(ChannelEvent::Failed { id: id.clone(), why });
    }

    fn tell_withdrawn(&mut self, id: &TensorId) {
        self.count(CommCounter::Completions);
        self.events.push_back(ChannelEvent::Withdrawn { id: id.clone() });
    }
}

#[cfg(test)]
impl ChannelIo {
    /// How many tensor buffers the peer may map: of tensors that come, and of those that go; and how much memory was made for such.
    pub fn shared_buffers(&self) -> ([usize; 2], usize) {
        let shared = self.tensors.each_ref().map(|buffers| buffers.values().filter(|memory| memory.is_shared()).count());
        (shared, self.memory.made())
    }

    /// Whether a thread copies a tensor that goes out.
    pub fn is_copying(&self) -> bool {
        self.filling > self.fills.len()
    }

    /// Notes a write of this into the buffer of a slot of the peer's: of a tensor's, into that for messages. The peer is told this value.
    pub fn put_garbage(&mut self, slot: u64, value: u32, bytes: &[u8]) {
        let ([message, ack], memory) = (self.to, self.buffers.clone());
        let to = Target { sequence: slot, ..if slot == ACKS { ack } else { message } };
        self.put((Tx::Message, Kind::Ack), &memory, (TX_MESSAGE, bytes.len()), (to, value), bytes);
    }

    fn tampered(&self, mut to: Announced) -> Announced {
        if let Some(tamper) = self.tamper {
            tamper(&mut to.memory, &mut to.bytes);
        }
        to
    }

    fn tampered_target(&self, to: Target) -> Target {
        let memory = super::message::RemoteMr { addr: to.addr, rkeys: to.rkeys };
        let Announced { memory, bytes, .. } = self.tampered(Announced { sequence: to.sequence, memory, bytes: to.len });
        Target { addr: memory.addr, len: bytes, ..to }
    }
}
