//! The two ends of a channel, as a table of actions: what this worker does when the other has written to one of its buffers, and when a write of
//! its own is done. Pure: what is to be done is told to [`Actions`]. Under the lock of the manager.
//!
//! A tensor goes through a buffer of its name, which both sides have; the producer enlarges his and asks the consumer to do so, and uses it again
//! once the consumer has said that he has copied the tensor out. Of buffers that are idle, the producer gives up those that have been so for longest, if
//! there are too many, and has the consumer do the same.

use std::collections::VecDeque;

use foldhash::{HashMap, HashSet};

use crate::base::error::{Error, Result};
use crate::link::limits::MAX_MESSAGE;

use super::buffers::{Buffers, Idle};
use super::key::{Name, TensorId};
use super::mailbox::{MAX_REQUESTS, Mail, Mailbox, wrong};
use super::message::{self, HEADER, Kind, Meta, Packet, RemoteMr};

/// Tensor buffers of a channel, in each direction: more than requests and idle ones need.
pub const MAX_BUFFERS: usize = 1 << 17;
/// Buffers that are kept while they are idle, for the next tensors of their names, and their bytes.
const IDLE: (usize, u64) = (4096, 1 << 30);
/// Bytes of a buffer are a multiple of it.
const PAGE: u64 = 4096;
const _: () = assert!(MAX_BUFFERS <= crate::link::limits::IMM_LIMIT);

/// One of this side's buffers that it writes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tx {
    /// The message buffer.
    Message,
    /// The peer's message buffer's ack buffer.
    Ack,
    /// The buffer of a tensor, by number.
    Tensor(usize),
}

/// Where a tensor goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteBuffer {
    /// The peer's memory.
    pub memory: RemoteMr,
    /// Its bytes.
    pub len: u64,
    /// Its number there, which the peer is told with the write.
    pub index: u32,
}

/// What an end does. `T` is a tensor's contents.
pub trait Actions<T>: Mail {
    /// Gives a buffer for tensors that go out, or come in, so many bytes, which are free to be written to; and says where they are.
    ///
    /// Errors: there is no memory for it.
    fn grow(&mut self, outgoing: bool, index: usize, bytes: u64) -> Result<RemoteMr>;
    /// Frees the memory of a buffer, whose number may be used again.
    fn give_up(&mut self, outgoing: bool, index: usize);
    /// Copies a tensor behind its header into the buffer, and writes that.
    fn write(&mut self, index: usize, to: RemoteBuffer, packet: &Packet, tensor: T);
    /// Looks for a tensor, now or once it is produced; [`Channel::found`] or [`Channel::not_found`] tells of it.
    fn find(&mut self, id: TensorId);
    /// A tensor that was asked for is in the buffer with this number; [`Channel::consumed`] tells when it was copied out.
    fn deliver(&mut self, index: usize, packet: &Packet);
    /// One will not come, and why.
    fn fail(&mut self, id: &TensorId, why: Error);
    /// The peer does not want a tensor any more. If it is still looked for, [`Channel::forgotten`] tells that it is not.
    fn forget(&mut self, id: &TensorId);
    /// A request was taken back.
    fn withdrawn(&mut self, id: &TensorId);
}

/// Whether a buffer may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Status {
    /// It has no memory.
    #[default]
    None,
    Idle,
    Busy,
}

/// A buffer for tensors of one name that go out.
#[derive(Debug)]
struct Outgoing<T> {
    name: Name,
    size: u64,
    local: Status,
    remote: Status,
    /// The size that the peer was asked for.
    asked: Option<u64>,
    to: Option<RemoteBuffer>,
    /// Steps whose tensor was found.
    ready: VecDeque<(u64, Meta, T)>,
    /// What names it among those that are idle.
    idle: Option<u64>,
}

impl<T> Outgoing<T> {
    fn new(name: Name) -> Outgoing<T> {
        let (local, remote) = (Status::None, Status::None);
        Outgoing { name, size: 0, local, remote, asked: None, to: None, ready: VecDeque::new(), idle: None }
    }

    /// Whether it may be written to, enlarged or given up.
    fn is_free(&self) -> bool {
        self.asked.is_none() && self.local != Status::Busy && self.remote != Status::Busy
    }
}

/// One for those that come in.
#[derive(Debug)]
struct Incoming {
    name: Name,
    size: u64,
    /// The step of the tensor in it that nobody has copied out.
    full: Option<u64>,
}

/// One end.
#[derive(Debug)]
pub struct Channel<T> {
    mailbox: Mailbox,
    outgoing: Buffers<Outgoing<T>>,
    /// Of those.
    idle: Idle,
    incoming: Buffers<Incoming>,
    /// Of those, how many have a tensor in them.
    full: usize,
    /// Asked for and not answered; and whether that is being taken back.
    wanted: HashMap<TensorId, bool>,
    /// Of the peer's wishes, those that are looked for.
    sought: HashSet<TensorId>,
    /// How many there are, with those whose tensors wait for their buffers.
    owed: usize,
}

impl<T> Default for Channel<T> {
    fn default() -> Self {
        Channel {
            mailbox: Mailbox::default(),
            outgoing: Buffers::default(),
            idle: Idle::new(IDLE.0, IDLE.1),
            incoming: Buffers::default(),
            full: 0,
            wanted: HashMap::default(),
            sought: HashSet::default(),
            owed: 0,
        }
    }
}

impl<T> Channel<T> {
    /// Asks for a tensor, unless it was asked for and has not come: whether it was not.
    ///
    /// Errors: too many are asked for.
    pub fn request(&mut self, id: &TensorId, actions: &mut impl Actions<T>) -> Result<bool> {
        if self.wanted.contains_key(id) {
            return Ok(false);
        }
        if self.wanted.len() + self.full >= MAX_REQUESTS {
            return Err(Error::usage(format!(
                "{MAX_REQUESTS} tensors are asked for already, or have come and were not taken, which is the limit"
            )));
        }
        self.wanted.insert(id.clone(), false);
        self.mailbox.say(Packet::new(Kind::TensorRequest, id.clone()), actions);
        Ok(true)
    }

    /// Takes a request back: unless the tensor is on its way, [`Actions::withdrawn`] tells that it will not come, and [`Channel::request`] asks for
    /// nothing until then.
    pub fn withdraw(&mut self, id: &TensorId, actions: &mut impl Actions<T>) {
        if let Some(withdrawn @ false) = self.wanted.get_mut(id) {
            *withdrawn = true;
            self.mailbox.say(Packet::new(Kind::TensorWithdraw, id.clone()), actions);
        }
    }

    /// Whether the peer has to do something.
    pub fn waits(&self) -> bool {
        !self.wanted.is_empty() || self.mailbox.waits()
    }

    /// Whether all is sent that the peer has asked for and that is here.
    pub fn is_through(&self) -> bool {
        self.mailbox.is_through() && self.owed == self.sought.len()
    }

    /// A tensor that was looked for is here.
    pub fn found(&mut self, id: &TensorId, meta: &Meta, tensor: T, actions: &mut impl Actions<T>) {
        if !self.sought.remove(id) {
            return;
        }
        let name = &id.name;
        let index = self.outgoing.index_of(name).unwrap_or_else(|| self.outgoing.insert(name, Outgoing::new(name.clone())));
        let Some(outgoing) = self.outgoing.get_mut(index) else { return };
        outgoing.ready.push_back((id.step, *meta, tensor));
        if let Some(idle) = outgoing.idle.take() {
            self.idle.remove(idle);
        }
        self.send_next(index, actions);
    }

    /// A tensor that was looked for will not come.
    pub fn not_found(&mut self, id: &TensorId, why: &Error, actions: &mut impl Actions<T>) {
        if self.sought.remove(id) {
            self.refuse(id, why, actions);
        }
    }

    /// A tensor is not looked for any more, as the peer does not want it.
    pub fn forgotten(&mut self, id: &TensorId, actions: &mut impl Actions<T>) {
        if self.sought.remove(id) {
            self.owed -= 1;
            self.mailbox.say(Packet::new(Kind::TensorWithdrawn, id.clone()), actions);
        }
    }

    fn refuse(&mut self, id: &TensorId, why: &Error, actions: &mut impl Actions<T>) {
        self.owed -= 1;
        self.mailbox.refuse(id, why, actions);
    }

    /// A write of this side's is done: its buffer may be filled again.
    pub fn written(&mut self, from: Tx, actions: &mut impl Actions<T>) {
        match from {
            Tx::Ack => self.mailbox.ack_written(actions),
            Tx::Message => self.mailbox.message_written(actions),
            Tx::Tensor(index) => {
                if let Some(outgoing) = self.outgoing.get_mut(index) {
                    outgoing.local = Status::Idle;
                }
                self.send_next(index, actions);
            }
        }
    }

    /// The peer has read the message that was written last.
    ///
    /// Errors of this and the others: the peer broke the protocol.
    pub fn acked(&mut self, actions: &mut impl Actions<T>) -> Result<()> {
        self.mailbox.acked(actions)
    }

    /// A message is here, and was copied out of the buffer.
    pub fn message(&mut self, packet: &Packet, text: &str, actions: &mut impl Actions<T>) -> Result<()> {
        self.mailbox.received(actions)?;
        let id = &packet.id;
        let TensorId { name, .. } = id;
        match packet.kind {
            Kind::TensorRequest => self.wish(id, actions)?,
            Kind::BufferIdle => {
                let (index, outgoing) = self.outgoing_named(packet)?;
                if outgoing.remote != Status::Busy {
                    return Err(wrong(&format!("that the buffer for {name} is idle again, which it was")));
                }
                outgoing.remote = Status::Idle;
                self.send_next(index, actions);
            }
            Kind::BufferResponse => {
                let (index, outgoing) = self.outgoing_named(packet)?;
                let Packet { buffer_size: bytes, index: number, memory: RemoteMr { addr, .. }, .. } = packet;
                if outgoing.asked.take() != Some(*bytes) || *number >= MAX_BUFFERS as u64 || addr.checked_add(*bytes).is_none() {
                    return Err(wrong(&format!("buffer {number} of {bytes} bytes at {addr:#x} for {name}, which it was not asked for")));
                }
                outgoing.to = Some(RemoteBuffer { memory: packet.memory, len: packet.buffer_size, index: packet.index as u32 });
                (outgoing.local, outgoing.remote) = (Status::Idle, Status::Idle);
                self.send_next(index, actions);
            }
            Kind::BufferRequest => self.enlarge(packet, actions)?,
            Kind::ErrorStatus => {
                if self.wanted.remove(id).is_none() {
                    return Err(wrong(&format!("an error for {id}, which was not asked for")));
                }
                actions.fail(id, message::error(packet.meta.data_type, text));
            }
            Kind::TensorWithdraw => {
                // If it is not looked for, the answer is on its way.
                if self.sought.contains(id) {
                    actions.forget(id);
                }
            }
            Kind::TensorWithdrawn => {
                if self.wanted.remove(id) != Some(true) {
                    return Err(wrong(&format!("that {id} is taken back, which it is not")));
                }
                actions.withdrawn(id);
            }
            kind => return Err(wrong(&format!("a message of kind {}", kind as u8))),
        }
        Ok(())
    }

    /// The peer wants a tensor.
    fn wish(&mut self, id: &TensorId, actions: &mut impl Actions<T>) -> Result<()> {
        if self.owed >= MAX_REQUESTS {
            return Err(wrong(&format!("more than {MAX_REQUESTS} requests at a time")));
        }
        if !self.sought.insert(id.clone()) {
            return Err(wrong(&format!("a second request for {id}")));
        }
        // As many as a peer has that copies tensors out.
        if self.outgoing.len() >= MAX_BUFFERS {
            return Err(wrong(&format!("requests for more than {MAX_BUFFERS} names, of which it takes no tensors")));
        }
        self.owed += 1;
        actions.find(id.clone());
        Ok(())
    }

    fn outgoing_named(&mut self, packet: &Packet) -> Result<(usize, &mut Outgoing<T>)> {
        let index = self.outgoing.index_of(&packet.id.name);
        let found = index.and_then(|index| Some((index, self.outgoing.get_mut(index)?)));
        found.ok_or_else(|| wrong(&format!("a message of kind {} for {}, which it has not asked for", packet.kind as u8, packet.id.name)))
    }

    /// The peer wants this side's buffer of a name to have more bytes, or to be given up.
    fn enlarge(&mut self, packet: &Packet, actions: &mut impl Actions<T>) -> Result<()> {
        let Packet { id, buffer_size, .. } = packet;
        let TensorId { name, .. } = id;
        let index = self.incoming.index_of(name).unwrap_or(self.incoming.next_index());
        let known = self.incoming.get_mut(index).map(|incoming| (incoming.size, incoming.full));
        if *buffer_size == 0 && matches!(known, Some((_, None))) {
            self.incoming.remove(name);
            actions.give_up(false, index);
            return Ok(());
        }
        // Whoever has not asked for the tensor has no use for a buffer.
        if !self.wanted.contains_key(id) {
            return Err(wrong(&format!("a wish for a buffer for {id}, which was not asked for")));
        }
        let (size, full) = known.unwrap_or_default();
        if index >= MAX_BUFFERS || full.is_some() {
            return Err(wrong(&format!("a wish for a buffer for {name}, which is number {index}, and full: {}", full.is_some())));
        }
        if *buffer_size < HEADER as u64 || *buffer_size <= size || *buffer_size > MAX_MESSAGE as u64 {
            return Err(wrong(&format!(
                "a wish for a buffer of {buffer_size} bytes for {name}; it has {size}, and at most {MAX_MESSAGE} may be"
            )));
        }
        let memory = actions.grow(false, index, *buffer_size)?;
        match self.incoming.get_mut(index) {
            Some(incoming) => incoming.size = *buffer_size,
            None => _ = self.incoming.insert(name, Incoming { name: name.clone(), size: *buffer_size, full: None }),
        }
        let answer = Packet::new(Kind::BufferResponse, id.clone());
        self.mailbox.say(Packet { buffer_size: *buffer_size, memory, index: index as u64, ..answer }, actions);
        Ok(())
    }

    /// The peer has written a tensor into the buffer with this number; this is what stands before it.
    pub fn tensor(&mut self, index: usize, packet: &Packet, actions: &mut impl Actions<T>) -> Result<()> {
        let buffers = self.incoming.len();
        let Some(incoming) = self.incoming.get_mut(index) else { return Err(wrong(&format!("a tensor into buffer {index} of {buffers}"))) };
        let Packet { kind, id, meta, .. } = packet;
        let TensorId { name, step } = id;
        if *kind != Kind::TensorWrite || *name != incoming.name {
            return Err(wrong(&format!("a packet of kind {} for {name} into the buffer for {}", *kind as u8, incoming.name)));
        }
        if incoming.full.replace(*step).is_some() {
            return Err(wrong(&format!("a second tensor for {name} into a buffer that was not idle")));
        }
        if meta.bytes > incoming.size.saturating_sub(HEADER as u64) {
            return Err(wrong(&format!("{} bytes of {name} into a buffer of {}", meta.bytes, incoming.size)));
        }
        if self.wanted.remove(id).is_none() {
            return Err(wrong(&format!("{id}, which was not asked for")));
        }
        self.full += 1;
        actions.deliver(index, packet);
        Ok(())
    }

    /// The tensor in the buffer with this number was copied out.
    pub fn consumed(&mut self, index: usize, actions: &mut impl Actions<T>) {
        let Some(incoming) = self.incoming.get_mut(index) else { return };
        let Some(step) = incoming.full.take() else { return };
        self.full -= 1;
        let packet = Packet::new(Kind::BufferIdle, TensorId::new(incoming.name.clone(), step));
        self.mailbox.say(packet, actions);
    }

    /// Sends the next tensor of this buffer, if that may be; asks for a larger one first if it takes that.
    fn send_next(&mut self, index: usize, actions: &mut impl Actions<T>) {
        while let Some(outgoing) = self.outgoing.get_mut(index)
            && outgoing.is_free()
            && let Some((step, meta, _)) = outgoing.ready.front()
        {
            let (step, needs) = (*step, (HEADER as u64).saturating_add(meta.bytes));
            if needs <= outgoing.size {
                let (Some(to), Some((step, meta, tensor))) = (outgoing.to, outgoing.ready.pop_front()) else { return };
                (outgoing.local, outgoing.remote) = (Status::Busy, Status::Busy);
                self.owed -= 1;
                let packet = Packet { meta, ..Packet::new(Kind::TensorWrite, TensorId::new(outgoing.name.clone(), step)) };
                actions.write(index, to, &packet, tensor);
                return;
            }
            let id = TensorId::new(outgoing.name.clone(), step);
            match grown(index, needs, actions) {
                Ok((size, memory)) => {
                    (outgoing.size, outgoing.asked) = (size, Some(size));
                    let packet = Packet::new(Kind::BufferRequest, id);
                    self.mailbox.say(Packet { buffer_size: size, memory, ..packet }, actions);
                }
                Err(why) => {
                    outgoing.ready.pop_front();
                    self.refuse(&id, &why, actions);
                }
            }
        }
        self.rest(index, actions);
    }

    /// This buffer may be idle now: gives up those that are too many.
    fn rest(&mut self, index: usize, actions: &mut impl Actions<T>) {
        let Some(outgoing) = self.outgoing.get_mut(index) else { return };
        if !outgoing.ready.is_empty() || !outgoing.is_free() || outgoing.idle.is_some() {
            return;
        }
        if outgoing.size == 0 {
            let name = outgoing.name.clone();
            return self.outgoing.remove(&name);
        }
        outgoing.idle = Some(self.idle.insert(index, outgoing.size));
        while let Some(index) = self.idle.pop_excess() {
            let Some(outgoing) = self.outgoing.get_mut(index) else { return };
            let name = outgoing.name.clone();
            self.outgoing.remove(&name);
            actions.give_up(true, index);
            // No bytes: the peer gives up its own, which nobody writes to.
            self.mailbox.say(Packet::new(Kind::BufferRequest, TensorId::new(name, 0)), actions);
        }
    }
}

#[cfg(test)]
impl<T> Channel<T> {
    /// Of this side's and of the peer's that are not answered.
    pub fn requests(&self) -> [usize; 2] {
        [self.wanted.len(), self.owed]
    }
}

/// Gives a buffer for tensors that go out as many bytes as it needs, or a few more.
fn grown<T>(index: usize, needs: u64, actions: &mut impl Actions<T>) -> Result<(u64, RemoteMr)> {
    if needs > MAX_MESSAGE as u64 {
        let (bytes, most) = (needs - HEADER as u64, MAX_MESSAGE - HEADER);
        return Err(Error::usage(format!("a tensor of {bytes} bytes; one that goes through a buffer has at most {most}")));
    }
    let size = needs.next_multiple_of(PAGE);
    actions.grow(true, index, size).map(|memory| (size, memory))
}

#[cfg(test)]
mod tests;
