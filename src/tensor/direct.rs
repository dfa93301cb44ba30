//! The two ends of a channel whose tensors are not copied, as a table of actions: as [`channel`](super::channel), for TensorFlow's later flow. Pure:
//! what is to be done is told to [`Actions`]. Under the lock of the manager.
//!
//! A consumer who has had a tensor of that name announces memory for another of its shape with the request, and the producer writes straight into it.
//! Otherwise, and if the shape is another one, the consumer is told it, and asks again with memory for that. A tensor without bytes is all in what is
//! told of its shape. A request is taken back by a message that is answered, unless it was answered before: until then the producer may write.
//!
//! Who asks again with memory gives the tensor a number. Requests for it in later steps are control messages with that number, as long as the shape is
//! the same: they need no message buffer and no ack, and are read sooner.

use std::collections::VecDeque;
use std::collections::hash_map::Entry;

use foldhash::HashMap;

use crate::base::error::{Error, Result};
use crate::link::limits::MAX_MESSAGE;

use super::channel::Tx;
use super::key::{Name, TensorId};
use super::mailbox::{MAX_REQUESTS, Mail, Mailbox, wrong};
use super::message::{self, Kind, Meta, NumberedRequest, Packet, RemoteMr};

/// Names whose last shape is remembered: those of the last steps, as others are forgotten when there are more.
pub const MAX_NAMES: usize = 1 << 16;

/// Where a tensor may be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announced {
    /// The consumer's slot of the link, open for one message.
    pub sequence: u64,
    /// His memory.
    pub memory: RemoteMr,
    /// Its bytes: all of the tensor's.
    pub bytes: u64,
}

/// What an end does. `T` is a tensor, `M` memory that a receive has brought.
pub trait Actions<T, M>: Mail {
    /// Opens a slot for a tensor of so many bytes, over the receive's memory, or else the library's. `ahead`: the tensor may not be produced for
    /// long, or have another shape. `None`: not now.
    ///
    /// Errors: the memory is too small; there is none.
    fn open(&mut self, into: Option<&M>, bytes: u64, ahead: bool) -> Result<Option<Announced>>;
    /// Nothing will be written to a slot that was opened.
    fn close(&mut self, sequence: u64);
    /// Writes a tensor.
    fn write(&mut self, to: &Announced, tensor: T);
    /// Looks for a tensor, now or once it is produced; [`Direct::found`] or [`Direct::not_found`] tells of it. `again`: one of its name was found before.
    fn find(&mut self, id: TensorId, again: bool);
    /// The peer does not want a tensor any more. If it is still looked for, [`Direct::forgotten`] tells that it is not.
    fn forget(&mut self, id: &TensorId);
    /// A tensor that was found is not sent, as the peer does not want it any more.
    fn give_back(&mut self, id: &TensorId, tensor: T);
    /// A tensor that was asked for is here: in the memory of this slot, if it has bytes.
    fn deliver(&mut self, id: TensorId, meta: &Meta, sequence: Option<u64>);
    /// One will not come, and why.
    fn fail(&mut self, id: &TensorId, why: Error);
    /// There is no memory for one, and why. Its request is taken back.
    fn no_memory(&mut self, id: &TensorId, why: Error);
    /// A request was taken back.
    fn withdrawn(&mut self, id: &TensorId);
}

/// A request that is not answered.
#[derive(Debug)]
struct Wanted<M> {
    into: Option<M>,
    /// What memory is announced for, or what the peer has told.
    meta: Meta,
    /// The slot that is announced.
    opened: Option<u64>,
    /// The peer has told its shape.
    is_told: bool,
    /// It is being taken back.
    is_withdrawn: bool,
}

/// What is known of a name.
#[derive(Debug)]
struct Known {
    /// The last shape that had bytes.
    meta: Meta,
    /// No other name has it.
    number: u32,
    /// The peer was asked for a tensor of that shape by this number.
    is_numbered: bool,
}

/// A wish of the peer's.
#[derive(Debug)]
enum Sought<T> {
    /// It is looked for, and announced is memory for one of this shape; whether the peer has taken its request back since.
    Looked(Option<(Meta, Announced)>, bool),
    /// The peer was told its shape.
    Told(Meta, T),
}

/// One end.
#[derive(Debug)]
pub struct Direct<T, M> {
    mailbox: Mailbox,
    /// Asked for and not answered.
    wanted: HashMap<TensorId, Wanted<M>>,
    /// By the slots that are open for them.
    slots: HashMap<u64, TensorId>,
    /// Those whose shape is told, and for which there is no slot or memory.
    waiting: VecDeque<TensorId>,
    known: HashMap<Name, Known>,
    /// The peer's wishes.
    sought: HashMap<TensorId, Sought<T>>,
    /// By their numbers: names that it has asked for, and the shapes that it expects.
    numbered: HashMap<u32, (Name, Meta)>,
    /// Tensors that are written, or are to be.
    writing: usize,
}

impl<T, M> Default for Direct<T, M> {
    fn default() -> Self {
        let (mailbox, wanted, slots, waiting, known, sought, numbered) = Default::default();
        Direct { mailbox, wanted, slots, waiting, known, sought, numbered, writing: 0 }
    }
}

impl<T, M> Direct<T, M> {
    /// Asks for a tensor, to be written into this memory, or else the library's; unless it was asked for and has not come: then false.
    ///
    /// Errors: too many are asked for.
    pub fn request(&mut self, id: &TensorId, into: Option<M>, actions: &mut impl Actions<T, M>) -> Result<bool> {
        if self.wanted.contains_key(id) {
            return Ok(false);
        }
        if self.wanted.len() >= MAX_REQUESTS {
            return Err(Error::usage(format!("{MAX_REQUESTS} tensors are asked for already, which is the limit")));
        }
        // Without memory, the shape is told first, which is always right.
        let known = self.known.get(&id.name);
        let to = known.and_then(|known| Some((known, actions.open(into.as_ref(), known.meta.bytes, true).ok()??)));
        let meta = to.map(|(known, _)| known.meta).unwrap_or_default();
        match to {
            Some((Known { number, is_numbered: true, .. }, Announced { sequence, memory, .. })) => {
                let request = NumberedRequest { number: *number, step: id.step, index: sequence, memory };
                self.mailbox.say_numbered(request, actions);
            }
            _ => self.mailbox.say(packet(Kind::TensorRequest, id.clone(), &meta, to.map(|(_, to)| to)), actions),
        }
        let opened = to.map(|(_, to)| to.sequence);
        if let Some(sequence) = opened {
            self.slots.insert(sequence, id.clone());
        }
        self.wanted.insert(id.clone(), Wanted { into, meta, opened, is_told: false, is_withdrawn: false });
        Ok(true)
    }

    /// Takes a request back: `withdrawn` tells that nothing comes of it, unless something does.
    pub fn withdraw(&mut self, id: &TensorId, actions: &mut impl Actions<T, M>) {
        if let Some(wanted) = self.wanted.get_mut(id)
            && !std::mem::replace(&mut wanted.is_withdrawn, true)
        {
            self.mailbox.say(Packet::new(Kind::TensorWithdraw, id.clone()), actions);
        }
    }

    /// Whether the peer has to do something.
    pub fn waits(&self) -> bool {
        !self.wanted.is_empty() || self.mailbox.waits()
    }

    /// Whether all is sent that the peer has asked for and that is here.
    pub fn is_through(&self) -> bool {
        self.mailbox.is_through() && self.sought.values().all(|sought| matches!(sought, Sought::Looked(..)))
    }

    /// A tensor that was looked for is here.
    pub fn found(&mut self, id: &TensorId, meta: &Meta, tensor: T, actions: &mut impl Actions<T, M>) {
        if meta.bytes > MAX_MESSAGE as u64 {
            let bytes = meta.bytes;
            let why = Error::usage(format!("a tensor of {bytes} bytes; one that goes to another worker has at most {MAX_MESSAGE}"));
            return self.not_found(id, &why, actions);
        }
        let Some(sought) = self.sought.get_mut(id) else { return };
        match sought {
            Sought::Looked(Some((expected, to)), _) if expected == meta => {
                let to = *to;
                self.sought.remove(id);
                return self.write(&to, tensor, actions);
            }
            // The peer does not ask again for what it does not want, and waits for this.
            Sought::Looked(_, true) if meta.bytes > 0 => {
                self.sought.remove(id);
                actions.give_back(id, tensor);
                return self.mailbox.say(Packet::new(Kind::TensorWithdrawn, id.clone()), actions);
            }
            Sought::Looked(..) if meta.bytes > 0 => *sought = Sought::Told(*meta, tensor),
            Sought::Looked(..) => drop(self.sought.remove(id)),
            Sought::Told(..) => return,
        }
        self.mailbox.say(packet(Kind::MetaDataUpdate, id.clone(), meta, None), actions);
    }

    /// A tensor that was looked for will not come.
    pub fn not_found(&mut self, id: &TensorId, why: &Error, actions: &mut impl Actions<T, M>) {
        if let Entry::Occupied(entry) = self.sought.entry(id.clone())
            && matches!(entry.get(), Sought::Looked(..))
        {
            entry.remove();
            self.mailbox.refuse(id, why, actions);
        }
    }

    /// A tensor is not looked for any more, as the peer does not want it.
    pub fn forgotten(&mut self, id: &TensorId, actions: &mut impl Actions<T, M>) {
        if let Entry::Occupied(entry) = self.sought.entry(id.clone())
            && matches!(entry.get(), Sought::Looked(..))
        {
            entry.remove();
            self.mailbox.say(Packet::new(Kind::TensorWithdrawn, id.clone()), actions);
        }
    }

    fn write(&mut self, to: &Announced, tensor: T, actions: &mut impl Actions<T, M>) {
        self.writing += 1;
        actions.write(to, tensor);
    }

    /// A write of this side's is done: its buffer may be filled again.
    pub fn written(&mut self, from: Tx, actions: &mut impl Actions<T, M>) {
        match from {
            Tx::Ack => self.mailbox.ack_written(actions),
            Tx::Message => self.mailbox.message_written(actions),
            Tx::Tensor(_) => self.writing = self.writing.saturating_sub(1),
        }
    }

    /// Sends what waits, as far as there is room.
    pub fn send_waiting(&mut self, actions: &mut impl Actions<T, M>) {
        self.mailbox.send_next(actions);
    }

    /// The peer has read the message that was written last.
    ///
    /// Errors of this and the others: the peer broke the protocol.
    pub fn acked(&mut self, actions: &mut impl Actions<T, M>) -> Result<()> {
        self.mailbox.acked(actions)
    }

    /// A message is here, and was copied out of the buffer.
    pub fn message(&mut self, packet: &Packet, text: &str, actions: &mut impl Actions<T, M>) -> Result<()> {
        self.mailbox.received(actions)?;
        let Packet { id, .. } = packet;
        match packet.kind {
            Kind::TensorRequest => self.wish(id.clone(), announced(packet)?.map(|to| (packet.meta, to)), false, actions)?,
            Kind::TensorReRequest => {
                let told = self.sought.remove(id);
                match (told, announced(packet)?) {
                    (Some(Sought::Told(meta, tensor)), Some(to)) if meta == packet.meta => {
                        self.number(packet)?;
                        self.write(&to, tensor, actions);
                    }
                    _ => return Err(wrong(&format!("a second request for {id}, of which it was not told that"))),
                }
            }
            Kind::TensorWithdraw => {
                match self.sought.remove(id) {
                    Some(Sought::Looked(announced, _)) => {
                        self.sought.insert(id.clone(), Sought::Looked(announced, true));
                        actions.forget(id);
                    }
                    Some(Sought::Told(_, tensor)) => {
                        actions.give_back(id, tensor);
                        self.mailbox.say(Packet::new(Kind::TensorWithdrawn, id.clone()), actions);
                    }
                    // It was answered before.
                    None => {}
                }
            }
            Kind::MetaDataUpdate => self.told(id, packet.meta, actions)?,
            Kind::ErrorStatus => {
                let Some(wanted) = self.wanted.remove(id).filter(|wanted| !wanted.is_told) else {
                    return Err(wrong(&format!("an error for {id}, which was not asked for")));
                };
                actions.fail(id, message::error(packet.meta.data_type, text));
                self.close(wanted.opened, actions);
            }
            Kind::TensorWithdrawn => {
                let Some(wanted) = self.wanted.remove(id).filter(|wanted| wanted.is_withdrawn) else {
                    return Err(wrong(&format!("that {id} is taken back, which it is not")));
                };
                actions.withdrawn(id);
                self.close(wanted.opened, actions);
            }
            kind => return Err(wrong(&format!("a message of kind {}", kind as u8))),
        }
        Ok(())
    }

    /// A request that needs no message is here.
    pub fn numbered(&mut self, request: &NumberedRequest, actions: &mut impl Actions<T, M>) -> Result<()> {
        let NumberedRequest { number, step, index, memory } = *request;
        self.mailbox.check_queue()?;
        let found = self.numbered.get(&number).ok_or_else(|| wrong(&format!("a request for number {number}, which no tensor has")))?;
        let (id, meta) = (TensorId { name: found.0.clone(), step }, found.1);
        let to = Announced { sequence: index, memory, bytes: meta.bytes };
        check(&to, &id)?;
        self.wish(id, Some((meta, to)), true, actions)
    }

    /// Notes the number of a tensor that was found.
    fn number(&mut self, packet: &Packet) -> Result<()> {
        let Packet { number, id, meta, .. } = packet;
        if *number > MAX_NAMES as u32 {
            return Err(wrong(&format!("number {number} for {id}; at most {MAX_NAMES} may be")));
        }
        if *number > 0 {
            self.numbered.insert(*number, (id.name.clone(), *meta));
        }
        Ok(())
    }

    /// The peer wants a tensor, and announces memory for one of this shape.
    fn wish(&mut self, id: TensorId, announced: Option<(Meta, Announced)>, again: bool, actions: &mut impl Actions<T, M>) -> Result<()> {
        // A peer has slots for what is written to it, and seldom more than those are in use.
        if self.sought.len() >= MAX_REQUESTS || self.writing >= MAX_REQUESTS {
            return Err(wrong(&format!("more than {MAX_REQUESTS} requests at a time")));
        }
        match self.sought.entry(id.clone()) {
            Entry::Occupied(_) => return Err(wrong(&format!("a second request for {id}"))),
            Entry::Vacant(entry) => entry.insert(Sought::Looked(announced, false)),
        };
        actions.find(id, again);
        Ok(())
    }

    /// The peer tells what a tensor is like, for which it does not know fitting memory.
    fn told(&mut self, id: &TensorId, meta: Meta, actions: &mut impl Actions<T, M>) -> Result<()> {
        let Some(wanted) = self.wanted.get_mut(id).filter(|wanted| !wanted.is_told) else {
            return Err(wrong(&format!("the shape of {id}, which was not asked for")));
        };
        if meta.bytes > MAX_MESSAGE as u64 {
            return Err(wrong(&format!("that {} has {} bytes; at most {MAX_MESSAGE} may be", id.name, meta.bytes)));
        }
        (wanted.is_told, wanted.meta) = (true, meta);
        let opened = wanted.opened.take();
        if meta.bytes == 0 {
            self.wanted.remove(id);
            actions.deliver(id.clone(), &meta, None);
        } else {
            if self.known.len() >= MAX_NAMES && !self.known.contains_key(&id.name) {
                // Numbers are given anew, too: each request that gives one precedes those that are made with it.
                self.known.clear();
            }
            let number = self.known.len() as u32 + 1;
            let known = self.known.entry(id.name.clone()).or_insert(Known { meta, number, is_numbered: false });
            (known.meta, known.is_numbered) = (meta, false);
            self.waiting.push_back(id.clone());
        }
        self.close(opened, actions);
        Ok(())
    }

    /// Asks again for what was told, as far as there are slots and memory.
    fn ask_waiting(&mut self, actions: &mut impl Actions<T, M>) {
        while let Some(id) = self.waiting.front() {
            if let Some(wanted) = self.wanted.get_mut(id).filter(|wanted| wanted.is_told && wanted.opened.is_none() && !wanted.is_withdrawn)
            {
                match actions.open(wanted.into.as_ref(), wanted.meta.bytes, false) {
                    Ok(None) => return,
                    Ok(Some(to)) => {
                        wanted.opened = Some(to.sequence);
                        self.slots.insert(to.sequence, id.clone());
                        let known = self.known.get_mut(&id.name).filter(|known| known.meta == wanted.meta);
                        let number = known.map_or(0, |known| {
                            known.is_numbered = true;
                            known.number
                        });
                        let request = packet(Kind::TensorReRequest, id.clone(), &wanted.meta, Some(to));
                        self.mailbox.say(Packet { number, ..request }, actions);
                    }
                    Err(why) => {
                        // So that the peer does not keep it.
                        (wanted.is_withdrawn, wanted.into) = (true, None);
                        self.mailbox.say(Packet::new(Kind::TensorWithdraw, id.clone()), actions);
                        actions.no_memory(id, why);
                    }
                }
            }
            self.waiting.pop_front();
        }
    }

    /// The peer does not write to this slot, if there is one, and others may have it.
    fn close(&mut self, sequence: Option<u64>, actions: &mut impl Actions<T, M>) {
        if let Some(sequence) = sequence {
            self.slots.remove(&sequence);
            actions.close(sequence);
        }
        self.ask_waiting(actions);
    }

    /// The peer has written so many bytes into the memory of a slot.
    pub fn landed(&mut self, sequence: u64, bytes: u64, actions: &mut impl Actions<T, M>) -> Result<()> {
        let found = self.slots.remove(&sequence).and_then(|id| Some((self.wanted.remove(&id)?, id)));
        let Some((wanted, id)) = found else { return Err(wrong("a tensor that was not asked for")) };
        if bytes != wanted.meta.bytes {
            return Err(wrong(&format!("{bytes} bytes of {id}, which has {}", wanted.meta.bytes)));
        }
        actions.deliver(id, &wanted.meta, Some(sequence));
        self.ask_waiting(actions);
        Ok(())
    }
}

fn packet(kind: Kind, id: TensorId, meta: &Meta, to: Option<Announced>) -> Packet {
    let packet = Packet { meta: *meta, ..Packet::new(kind, id) };
    match to {
        Some(Announced { sequence, memory, bytes }) => Packet { index: sequence, memory, buffer_size: bytes, ..packet },
        None => packet,
    }
}

/// The memory that a request announces.
///
/// Errors: none that could be.
fn announced(packet: &Packet) -> Result<Option<Announced>> {
    let Packet { id, buffer_size: bytes, memory, meta, index, .. } = packet;
    if *bytes == 0 {
        return Ok(None);
    }
    let to = Announced { sequence: *index, memory: *memory, bytes: *bytes };
    if *bytes != meta.bytes || *bytes > MAX_MESSAGE as u64 {
        return Err(wrong(&format!("{bytes} bytes of memory at {:#x} for {}, which has {}", memory.addr, id.name, meta.bytes)));
    }
    check(&to, id).map(|()| Some(to))
}

/// Errors: memory that cannot be.
fn check(to: &Announced, id: &TensorId) -> Result<()> {
    let Announced { memory, bytes, .. } = to;
    match memory.addr.checked_add(*bytes) {
        Some(_) => Ok(()),
        None => Err(wrong(&format!("{bytes} bytes of memory at {:#x} for {}", memory.addr, id.name))),
    }
}

#[cfg(test)]
impl<T, M> Direct<T, M> {
    /// Of this side's and of the peer's that are not answered.
    pub fn requests(&self) -> [usize; 2] {
        [self.wanted.len(), self.sought.len()]
    }
}

#[cfg(test)]
mod tests;
