//! The two ends of a channel, as a table of actions: what this worker does when the other has written to one of its buffers, and when a write of
//! its own is done. Pure: what is to be done is told to [`Actions`]. Under the lock of the manager.
//!
//! Messages go one at a time: the next one is written once this side's device is done with the message buffer and the peer has said, by an ack,
//! that it has read its own. A tensor goes through a buffer of its name, which both sides have; the producer enlarges his and asks the consumer to
//! do so, and uses it again once the consumer has said that he has copied the tensor out.

use std::collections::{HashMap, HashSet, VecDeque};

use crate::base::error::{Error, Result};
use crate::link::limits::MAX_MESSAGE;

use super::message::{self, HEADER, Kind, Meta, Packet, RemoteMr, TEXT_MAX};

/// Tensor buffers of a channel, in each direction: what a name costs is never given back.
pub const MAX_BUFFERS: usize = 1 << 16;
/// Requests of a worker that are not answered.
pub const MAX_REQUESTS: usize = 1 << 16;
/// Messages that wait at most: more than a peer that keeps to the protocol can ask for.
const MAX_QUEUE: usize = 4 * MAX_REQUESTS;
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
pub trait Actions<T> {
    /// Gives a buffer for tensors that go out, or come in, so many bytes, which are free to be written to; and says where they are.
    ///
    /// Errors: there is no memory for it.
    fn grow(&mut self, outgoing: bool, index: usize, bytes: u64) -> Result<RemoteMr>;
    /// Writes the peer's ack buffer.
    fn ack(&mut self);
    /// Writes the peer's message buffer. The text is that of an error.
    fn message(&mut self, packet: &Packet, text: &str);
    /// Copies a tensor behind its header into the buffer, and writes that.
    fn write(&mut self, index: usize, to: RemoteBuffer, packet: &Packet, tensor: T);
    /// Looks for a tensor, now or once it is produced; [`Channel::found`] or [`Channel::not_found`] tells of it.
    fn find(&mut self, name: &str, step: u64);
    /// A tensor that was asked for is in the buffer with this number; [`Channel::consumed`] tells when it was copied out.
    fn deliver(&mut self, index: usize, packet: &Packet);
    /// One will not come, and why.
    fn fail(&mut self, name: &str, step: u64, why: Error);
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

/// The message buffers and their acks.
#[derive(Debug, Default)]
struct Mailbox {
    queue: VecDeque<(Packet, String)>,
    local_busy: bool,
    remote_busy: bool,
    ack_busy: bool,
    /// A message was read before the write of the ack of the one before was done.
    ack_owed: bool,
}

/// A buffer for tensors of one name that go out.
#[derive(Debug)]
struct Outgoing<T> {
    name: String,
    size: u64,
    local: Status,
    remote: Status,
    /// The size that the peer was asked for.
    asked: Option<u64>,
    to: Option<RemoteBuffer>,
    /// Steps whose tensor was found.
    ready: VecDeque<(u64, Meta, T)>,
}

/// One for those that come in.
#[derive(Debug)]
struct Incoming {
    name: String,
    size: u64,
    /// The step of the tensor in it that nobody has copied out.
    full: Option<u64>,
}

/// One end.
#[derive(Debug)]
pub struct Channel<T> {
    mailbox: Mailbox,
    outgoing: Vec<Outgoing<T>>,
    incoming: Vec<Incoming>,
    outgoing_of: HashMap<String, usize>,
    incoming_of: HashMap<String, usize>,
    /// Asked for and not answered.
    wanted: HashSet<(String, u64)>,
    /// Of the peer's wishes, those that are looked for.
    sought: HashSet<(String, u64)>,
    /// How many there are, with those whose tensors wait for their buffers.
    owed: usize,
}

impl<T> Default for Channel<T> {
    fn default() -> Self {
        Channel {
            mailbox: Mailbox::default(),
            outgoing: Vec::new(),
            incoming: Vec::new(),
            outgoing_of: HashMap::new(),
            incoming_of: HashMap::new(),
            wanted: HashSet::new(),
            sought: HashSet::new(),
            owed: 0,
        }
    }
}

impl<T> Channel<T> {
    /// Asks for a tensor, unless it was asked for and has not come.
    ///
    /// Errors: too many are asked for.
    pub fn request(&mut self, name: &str, step: u64, actions: &mut impl Actions<T>) -> Result<()> {
        if self.wanted.len() >= MAX_REQUESTS {
            return Err(Error::usage(format!("{MAX_REQUESTS} tensors are asked for already, which is the limit")));
        }
        if self.wanted.insert((name.to_owned(), step)) {
            self.say(Packet::new(Kind::TensorRequest, name, step), "", actions);
        }
        Ok(())
    }

    /// Whether the peer has to do something.
    pub fn waits(&self) -> bool {
        !self.wanted.is_empty() || self.mailbox.remote_busy
    }

    /// A tensor that was looked for is here.
    pub fn found(&mut self, name: &str, step: u64, meta: Meta, tensor: T, actions: &mut impl Actions<T>) {
        if !self.sought.remove(&(name.to_owned(), step)) {
            return;
        }
        let Some(index) = self.outgoing_of.get(name).copied() else { return };
        let Some(outgoing) = self.outgoing.get_mut(index) else { return };
        outgoing.ready.push_back((step, meta, tensor));
        self.send_next(index, actions);
    }

    /// A tensor that was looked for will not come.
    pub fn not_found(&mut self, name: &str, step: u64, why: &Error, actions: &mut impl Actions<T>) {
        if self.sought.remove(&(name.to_owned(), step)) {
            self.refuse(name, step, why, actions);
        }
    }

    fn refuse(&mut self, name: &str, step: u64, why: &Error, actions: &mut impl Actions<T>) {
        self.owed -= 1;
        let mut packet = Packet::new(Kind::ErrorStatus, name, step);
        let text = why.to_string();
        let end = (0..=text.len().min(TEXT_MAX)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        let text = text.get(..end).unwrap_or_default();
        packet.meta.bytes = text.len() as u64;
        packet.meta.data_type = message::code(why);
        self.say(packet, text, actions);
    }

    fn say(&mut self, packet: Packet, text: &str, actions: &mut impl Actions<T>) {
        self.mailbox.queue.push_back((packet, text.to_owned()));
        self.send_next_message(actions);
    }

    fn send_next_message(&mut self, actions: &mut impl Actions<T>) {
        let Mailbox { queue, local_busy, remote_busy, .. } = &mut self.mailbox;
        if *local_busy || *remote_busy {
            return;
        }
        if let Some((packet, text)) = queue.pop_front() {
            (*local_busy, *remote_busy) = (true, true);
            actions.message(&packet, &text);
        }
    }

    /// A write of this side's is done: its buffer may be filled again.
    pub fn written(&mut self, from: Tx, actions: &mut impl Actions<T>) {
        match from {
            Tx::Ack => {
                self.mailbox.ack_busy = false;
                if std::mem::take(&mut self.mailbox.ack_owed) {
                    self.ack(actions);
                }
            }
            Tx::Message => {
                self.mailbox.local_busy = false;
                self.send_next_message(actions);
            }
            Tx::Tensor(index) => {
                if let Some(outgoing) = self.outgoing.get_mut(index) {
                    outgoing.local = Status::Idle;
                }
                self.send_next(index, actions);
            }
        }
    }

    fn ack(&mut self, actions: &mut impl Actions<T>) {
        if std::mem::replace(&mut self.mailbox.ack_busy, true) {
            self.mailbox.ack_owed = true;
        } else {
            actions.ack();
        }
    }

    /// The peer has read the message that was written last.
    ///
    /// Errors of this and the others: the peer broke the protocol.
    pub fn acked(&mut self, actions: &mut impl Actions<T>) -> Result<()> {
        if !std::mem::take(&mut self.mailbox.remote_busy) {
            return Err(wrong("an ack of nothing"));
        }
        self.send_next_message(actions);
        Ok(())
    }

    /// A message is here, and was copied out of the buffer.
    pub fn message(&mut self, packet: &Packet, text: &str, actions: &mut impl Actions<T>) -> Result<()> {
        if self.mailbox.ack_owed {
            return Err(wrong("a message before the ack of the last"));
        }
        if self.mailbox.queue.len() > MAX_QUEUE {
            return Err(wrong("more than it reads answers to"));
        }
        self.ack(actions);
        let Packet { name, step, .. } = packet;
        match packet.kind {
            Kind::TensorRequest => self.wish(name, *step, actions)?,
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
                if outgoing.asked.take() != Some(packet.buffer_size) || packet.index >= MAX_BUFFERS as u64 {
                    let (bytes, index) = (packet.buffer_size, packet.index);
                    return Err(wrong(&format!("buffer {index} of {bytes} bytes for {name}, which it was not asked for")));
                }
                outgoing.to = Some(RemoteBuffer { memory: packet.memory, len: packet.buffer_size, index: packet.index as u32 });
                (outgoing.local, outgoing.remote) = (Status::Idle, Status::Idle);
                self.send_next(index, actions);
            }
            Kind::BufferRequest => self.enlarge(packet, actions)?,
            Kind::ErrorStatus => {
                if !self.wanted.remove(&(name.clone(), *step)) {
                    return Err(wrong(&format!("an error for {name} of step {step}, which was not asked for")));
                }
                actions.fail(name, *step, message::error(packet.meta.data_type, text));
            }
            Kind::Ack | Kind::TensorWrite | Kind::MetaDataUpdate | Kind::TensorReRequest => {
                return Err(wrong(&format!("a message of kind {}", packet.kind as u8)));
            }
        }
        Ok(())
    }

    /// The peer wants a tensor.
    fn wish(&mut self, name: &str, step: u64, actions: &mut impl Actions<T>) -> Result<()> {
        if self.owed >= MAX_REQUESTS {
            return Err(wrong(&format!("more than {MAX_REQUESTS} requests at a time")));
        }
        if !self.sought.insert((name.to_owned(), step)) {
            return Err(wrong(&format!("a second request for {name} of step {step}")));
        }
        if !self.outgoing_of.contains_key(name) {
            if self.outgoing.len() >= MAX_BUFFERS {
                return Err(wrong(&format!("requests for more than {MAX_BUFFERS} names")));
            }
            self.outgoing_of.insert(name.to_owned(), self.outgoing.len());
            let (name, local, remote) = (name.to_owned(), Status::None, Status::None);
            self.outgoing.push(Outgoing { name, size: 0, local, remote, asked: None, to: None, ready: VecDeque::new() });
        }
        self.owed += 1;
        actions.find(name, step);
        Ok(())
    }

    fn outgoing_named(&mut self, packet: &Packet) -> Result<(usize, &mut Outgoing<T>)> {
        let index = self.outgoing_of.get(&packet.name).copied();
        let found = index.and_then(|index| Some((index, self.outgoing.get_mut(index)?)));
        found.ok_or_else(|| wrong(&format!("a message of kind {} for {}, which it has not asked for", packet.kind as u8, packet.name)))
    }

    /// The peer wants this side's buffer of a name to have more bytes.
    fn enlarge(&mut self, packet: &Packet, actions: &mut impl Actions<T>) -> Result<()> {
        let Packet { name, step, buffer_size, .. } = packet;
        // Whoever has not asked for the tensor has no use for a buffer.
        if !self.wanted.contains(&(name.clone(), *step)) {
            return Err(wrong(&format!("a wish for a buffer for {name} of step {step}, which was not asked for")));
        }
        let known = self.incoming_of.get(name).copied();
        let index = known.unwrap_or(self.incoming.len());
        let (size, full) = self.incoming.get(index).map_or((0, None), |incoming| (incoming.size, incoming.full));
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
            None => {
                self.incoming_of.insert(name.clone(), index);
                self.incoming.push(Incoming { name: name.clone(), size: *buffer_size, full: None });
            }
        }
        let answer = Packet::new(Kind::BufferResponse, name, *step);
        self.say(Packet { buffer_size: *buffer_size, memory, index: index as u64, ..answer }, "", actions);
        Ok(())
    }

    /// The peer has written a tensor into the buffer with this number; this is what stands before it.
    pub fn tensor(&mut self, index: usize, packet: &Packet, actions: &mut impl Actions<T>) -> Result<()> {
        let buffers = self.incoming.len();
        let Some(incoming) = self.incoming.get_mut(index) else { return Err(wrong(&format!("a tensor into buffer {index} of {buffers}"))) };
        let Packet { kind, name, step, meta, .. } = packet;
        if *kind != Kind::TensorWrite || *name != incoming.name {
            return Err(wrong(&format!("a packet of kind {} for {name} into the buffer for {}", *kind as u8, incoming.name)));
        }
        if incoming.full.replace(*step).is_some() {
            return Err(wrong(&format!("a second tensor for {name} into a buffer that was not idle")));
        }
        if meta.bytes > incoming.size.saturating_sub(HEADER as u64) {
            return Err(wrong(&format!("{} bytes of {name} into a buffer of {}", meta.bytes, incoming.size)));
        }
        if !self.wanted.remove(&(name.clone(), *step)) {
            return Err(wrong(&format!("{name} of step {step}, which was not asked for")));
        }
        actions.deliver(index, packet);
        Ok(())
    }

    /// The tensor in the buffer with this number was copied out.
    pub fn consumed(&mut self, index: usize, actions: &mut impl Actions<T>) {
        let Some(incoming) = self.incoming.get_mut(index) else { return };
        let Some(step) = incoming.full.take() else { return };
        let packet = Packet::new(Kind::BufferIdle, &incoming.name, step);
        self.say(packet, "", actions);
    }

    /// Sends the next tensor of this buffer, if that may be; asks for a larger one first if it takes that.
    fn send_next(&mut self, index: usize, actions: &mut impl Actions<T>) {
        while let Some(outgoing) = self.outgoing.get_mut(index)
            && outgoing.asked.is_none()
            && outgoing.local != Status::Busy
            && outgoing.remote != Status::Busy
            && let Some((step, meta, _)) = outgoing.ready.front()
        {
            let (step, needs) = (*step, (HEADER as u64).saturating_add(meta.bytes));
            if needs <= outgoing.size {
                let (Some(to), Some((step, meta, tensor))) = (outgoing.to, outgoing.ready.pop_front()) else { return };
                (outgoing.local, outgoing.remote) = (Status::Busy, Status::Busy);
                self.owed -= 1;
                let packet = Packet { meta, ..Packet::new(Kind::TensorWrite, &outgoing.name, step) };
                actions.write(index, to, &packet, tensor);
                return;
            }
            let name = outgoing.name.clone();
            match grown(index, needs, actions) {
                Ok((size, memory)) => {
                    (outgoing.size, outgoing.asked) = (size, Some(size));
                    let packet = Packet::new(Kind::BufferRequest, &name, step);
                    self.say(Packet { buffer_size: size, memory, ..packet }, "", actions);
                }
                Err(why) => {
                    outgoing.ready.pop_front();
                    self.refuse(&name, step, &why, actions);
                }
            }
        }
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

/// An error of the peer's.
#[cold]
fn wrong(what: &str) -> Error {
    Error::remote(format!("it sent {what}"))
}

#[cfg(test)]
mod tests;
