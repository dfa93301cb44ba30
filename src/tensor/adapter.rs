//! One worker as seen by another: a link to it, the buffers of its channel, and what the [`Channel`] says is to be done with them. Under the lock
//! of the manager, on whichever thread drives it.
//!
//! Each side has four named buffers of its own in one piece of registered memory, and tensor buffers besides. A peer writes to three slots that stand
//! open, in order: messages, acks, and tensors, whose writes name the buffer.

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::Arc;

use crate::base::error::{Error, Result};
use crate::base::stats::WaitCause;
use crate::link::Failure;
use crate::link::address::Address;
use crate::link::device::{Device, Registered};
use crate::link::duplex::{Duplex, Event, Target, Unconnected};
use crate::link::limits::{MAX_RAILS, MAX_REQUESTS, SAY_SIZE, SLOTS};

use super::channel::{Actions, Channel, RemoteBuffer, Tx};
use super::message::{HEADER, Kind, MESSAGE, Meta, Packet, RemoteMr, TEXT_MAX};
use super::value::Tensor;

/// The buffers that every channel has, in the order in which they lie: each of [`MESSAGE`] bytes.
pub const BUFFERS: [&str; 4] = ["tx_message_buffer", "rx_message_buffer", "tx_ack_buffer", "rx_ack_buffer"];
const TX_MESSAGE: usize = 0;
const RX_MESSAGE: usize = MESSAGE;
const TX_ACK: usize = 2 * MESSAGE;
const RX_ACK: usize = 3 * MESSAGE;
/// What stands behind the address of an end: where those are, `{u64 addr, u32 rkeys[8]}`.
const BEHIND: usize = 8 + 4 * MAX_RAILS;

/// The slots that stand open, in the order in which each side opens them.
const MESSAGES: u64 = 0;
const ACKS: u64 = 1;
const TENSORS: u64 = 2;

/// All that is ever said beside the slots: this worker goes.
const BYE: [u8; SAY_SIZE] = [b'B'; SAY_SIZE];

/// One end that has not been told of the other.
pub struct Waiting {
    end: Unconnected,
    buffers: Registered,
}

impl Waiting {
    /// On this device.
    ///
    /// Errors: no memory or queue pair left.
    pub fn new(device: &Device) -> Result<Waiting> {
        Ok(Waiting { end: device.end()?, buffers: device.scratch(BUFFERS.len() * MESSAGE)? })
    }

    /// What the other end has to be told.
    ///
    /// Errors: none that happens.
    pub fn address(&mut self) -> Result<Vec<u8>> {
        let mut bytes = self.end.address().encode();
        bytes.extend((self.buffers.view(0, BUFFERS.len() * MESSAGE)?.addr() as u64).to_le_bytes());
        self.buffers.rkeys().iter().for_each(|rkey| bytes.extend(rkey.to_le_bytes()));
        Ok(bytes)
    }

    /// Connects to the end with this address; `what` is "channel of a to b," or the like.
    ///
    /// Errors: an address that is none; an end on another fabric.
    pub fn connect(self, address: &[u8], what: &str, device: &Arc<Device>) -> Result<Adapter> {
        let wrong = |why: &str| Error::remote(format!("its address {why}"));
        let (remote, len) = Address::decode(address).map_err(|why| wrong(&why))?;
        let (addr, rkeys) = behind(address.get(len..).unwrap_or_default()).ok_or_else(|| wrong("does not tell of its buffers"))?;
        let mut link = self.end.connect(&remote, what, &device.config)?;
        for slot in [MESSAGES, ACKS, TENSORS] {
            if link.open_standing().is_none_or(|sequence| sequence % SLOTS as u64 != slot) {
                return Err(Error::internal(format!("slot {slot} of a new link is not the next")));
            }
        }
        let target = |sequence, offset: usize| Target { sequence, addr: addr.wrapping_add(offset as u64), len: MESSAGE as u64, rkeys };
        let to = [target(MESSAGES, RX_MESSAGE), target(ACKS, RX_ACK)];
        let (posts, told, sent) = (VecDeque::new(), VecDeque::new(), Box::new([None; MAX_REQUESTS]));
        let (outgoing, incoming) = (HashMap::new(), HashMap::new());
        let hands = Hands { link, device: device.clone(), buffers: self.buffers, to, outgoing, incoming, posts, sent, told, broken: None };
        Ok(Adapter { channel: Channel::default(), hands })
    }
}

/// Address and keys of a peer's buffers.
fn behind(bytes: &[u8]) -> Option<(u64, [u32; MAX_RAILS])> {
    let bytes: &[u8; BEHIND] = bytes.try_into().ok()?;
    let (addr, rest) = bytes.split_first_chunk()?;
    let mut rkeys = [0; MAX_RAILS];
    for (rkey, bytes) in rkeys.iter_mut().zip(rest.chunks_exact(4)) {
        *rkey = u32::from_le_bytes(bytes.try_into().ok()?);
    }
    Some((u64::from_le_bytes(*addr), rkeys))
}

/// What the peer wants of this worker, or has for it.
pub enum Told {
    /// It wants a tensor: [`Adapter::found`] or [`Adapter::not_found`] answers.
    Find {
        /// Its key.
        name: String,
        /// Its step.
        step: u64,
    },
    /// A tensor is here: [`Adapter::consumed`] once it was copied out.
    Landed {
        /// Its key.
        name: String,
        /// Its step.
        step: u64,
        /// Where it is.
        tensor: Landed,
    },
    /// A tensor will not come, and why.
    Failed {
        /// Its key.
        name: String,
        /// Its step.
        step: u64,
        /// In the peer's words.
        why: Error,
    },
}

/// A tensor in its buffer.
pub struct Landed {
    /// The buffer's number.
    pub index: usize,
    meta: Meta,
    memory: Arc<Registered>,
}

impl Landed {
    /// A copy, for which no lock is needed.
    ///
    /// Errors: none that happens, as the sizes were checked.
    pub fn copy(&self) -> Result<Tensor> {
        let mut bytes = vec![0; self.meta.bytes as usize];
        self.memory.view(HEADER, bytes.len())?.read(&mut bytes);
        Ok(Tensor::received(self.meta, bytes))
    }

    /// Its bytes.
    pub fn len(&self) -> u64 {
        self.meta.bytes
    }
}

/// A connected worker.
pub struct Adapter {
    channel: Channel<Tensor>,
    hands: Hands,
}

/// What executes what the channel says.
struct Hands {
    link: Duplex,
    device: Arc<Device>,
    /// The named ones.
    buffers: Registered,
    /// The peer's, for messages and for acks.
    to: [Target; 2],
    /// Of tensors, by number.
    outgoing: HashMap<usize, Arc<Registered>>,
    incoming: HashMap<usize, Arc<Registered>>,
    /// Writes for which there was no room.
    posts: VecDeque<Post>,
    /// By the index of a request: what it writes.
    sent: Box<[Option<Tx>; MAX_REQUESTS]>,
    told: VecDeque<Told>,
    /// What could not be done.
    broken: Option<Error>,
}

#[derive(Clone, Copy)]
struct Post {
    from: Tx,
    to: Target,
    value: u32,
    addr: usize,
    len: usize,
    lkeys: [u32; MAX_RAILS],
}

impl Adapter {
    /// Whether its queue pairs are connected.
    ///
    /// Errors: they cannot be.
    pub fn poll_connected(&mut self) -> Result<bool> {
        self.hands.link.poll_connected()
    }

    /// Asks for a tensor, unless that was done.
    ///
    /// Errors: too many are asked for; a peer that is gone.
    pub fn request(&mut self, name: &str, step: u64) -> Result<()> {
        self.hands.link.check()?;
        self.channel.request(name, step, &mut self.hands)?;
        self.hands.post()
    }

    /// Has a tensor that was looked for sent. A peer that is lost is noticed by the next poll; here and below.
    pub fn found(&mut self, name: &str, step: u64, tensor: Tensor) {
        self.channel.found(name, step, *tensor.meta(), tensor, &mut self.hands);
        let _ = self.hands.post();
    }

    /// Tells the peer that one will not come.
    pub fn not_found(&mut self, name: &str, step: u64, why: &Error) {
        self.channel.not_found(name, step, why, &mut self.hands);
        let _ = self.hands.post();
    }

    /// The tensor in this buffer was copied out.
    pub fn consumed(&mut self, index: usize) {
        self.channel.consumed(index, &mut self.hands);
        let _ = self.hands.post();
    }

    /// Moves everything along; whether something has moved. [`Adapter::told`] then tells what the peer wants.
    ///
    /// Errors: a peer that is gone or misbehaves.
    pub fn poll(&mut self) -> Result<bool> {
        let Adapter { channel, hands } = self;
        if !channel.waits() {
            hands.link.nobody_waits();
        }
        let moved = hands.link.poll(WaitCause::PeerNoSend);
        let mut gone = false;
        while let Some(event) = hands.link.next_event() {
            let done = match event {
                Event::Sent(id) => {
                    if let Some(from) = hands.sent.get_mut((id.0 & 0xff) as usize).and_then(Option::take) {
                        channel.written(from, hands);
                    }
                    Ok(())
                }
                Event::Received { sequence, value } => arrived(channel, hands, sequence % SLOTS as u64, value),
                Event::Said(BYE) => {
                    gone = true;
                    Ok(())
                }
                Event::Said(_) => Err(Error::remote("it sent something that is not said")),
            };
            if let Err(error) = done.and_then(|()| hands.broken.take().map_or(Ok(()), Err)) {
                hands.link.fail(Failure::from_error(&error));
            }
        }
        if gone {
            return Err(Error::remote("it has closed its manager"));
        }
        if moved {
            hands.post()?;
        }
        hands.link.check().map(|()| moved)
    }

    /// What the peer wants next.
    pub fn told(&mut self) -> Option<Told> {
        self.hands.told.pop_front()
    }

    /// Asks to be woken, and names the descriptors to sleep on. `Some`: see [`Duplex::arm`].
    pub fn arm(&mut self, watch: impl FnMut(RawFd)) -> Result<Option<u64>> {
        self.hands.link.arm(self.channel.waits().then_some(WaitCause::PeerNoSend.into()), watch)
    }

    /// Whether it has to be polled again before anybody sleeps.
    pub fn needs_repoll(&mut self) -> bool {
        self.hands.link.needs_repoll()
    }

    /// Tells the peer that this worker goes, if there is a place for it.
    pub fn say_bye(&mut self) {
        let _ = self.hands.link.say_last(&BYE);
    }

    /// Whether that, and all that was sent before, is through.
    pub fn bye_is_through(&mut self) -> bool {
        self.hands.link.poll(WaitCause::PeerNoSend);
        self.hands.link.last_is_through()
    }
}

/// The peer has written to a slot.
///
/// Errors: what makes no sense.
fn arrived(channel: &mut Channel<Tensor>, hands: &mut Hands, slot: u64, value: u64) -> Result<()> {
    match slot {
        MESSAGES => {
            let (packet, text) = read_message(&hands.buffers)?;
            if value != (HEADER + text.len()) as u64 {
                return Err(Error::remote(format!("it sent a message of {} bytes that it says has {value}", HEADER + text.len())));
            }
            channel.message(&packet, &text, hands)
        }
        ACKS => match read_packet(&hands.buffers, RX_ACK)?.kind {
            Kind::Ack => channel.acked(hands),
            kind => Err(Error::remote(format!("it sent a packet of kind {} as an ack", kind as u8))),
        },
        _ => {
            let index = value as usize;
            let memory =
                hands.incoming.get(&index).ok_or_else(|| Error::remote(format!("it sent a tensor into buffer {index}, which is not")))?;
            let packet = read_packet(memory, 0)?;
            channel.tensor(index, &packet, hands)
        }
    }
}

fn read_packet(memory: &Registered, offset: usize) -> Result<Packet> {
    let mut bytes = [0; HEADER];
    memory.view(offset, HEADER)?.read(&mut bytes);
    Packet::decode(&bytes).map_err(|what| Error::remote(format!("it sent {what}")))
}

/// The message, and the text of an error.
fn read_message(buffers: &Registered) -> Result<(Packet, String)> {
    let packet = read_packet(buffers, RX_MESSAGE)?;
    let len = if packet.kind == Kind::ErrorStatus { packet.meta.bytes } else { 0 };
    let mut text = [0; TEXT_MAX];
    let text = text.get_mut(..usize::try_from(len).unwrap_or(usize::MAX));
    let text = text.ok_or_else(|| Error::remote(format!("it sent an error of {len} bytes; at most {TEXT_MAX}")))?;
    buffers.view(RX_MESSAGE + HEADER, text.len())?.read(text);
    Ok((packet, String::from_utf8_lossy(text).into_owned()))
}

impl Hands {
    /// Posts what is to be written, as far as there is room.
    ///
    /// Errors: the link has failed, now or before.
    fn post(&mut self) -> Result<()> {
        while let Some(post) = self.posts.front() {
            let Post { from, to, value, addr, len, lkeys } = post;
            let posted = self.link.notify(to, 0, *value, *addr, *len, lkeys);
            let Some(id) = posted.inspect_err(|error| self.link.fail(Failure::from_error(error)))? else { break };
            if let Some(place) = self.sent.get_mut((id.0 & 0xff) as usize) {
                *place = Some(*from);
            }
            self.posts.pop_front();
        }
        Ok(())
    }

    /// Notes a write of these parts, one behind the other, from the front of a buffer.
    fn put(&mut self, from: Tx, to: Target, value: u32, parts: &[&[u8]]) {
        let (memory, offset) = match from {
            Tx::Message => (&self.buffers, TX_MESSAGE),
            Tx::Ack => (&self.buffers, TX_ACK),
            Tx::Tensor(index) => match self.outgoing.get(&index) {
                Some(memory) => (&**memory, 0),
                None => return,
            },
        };
        let len = parts.iter().map(|part| part.len()).sum();
        match memory.view(offset, len) {
            Ok(view) => {
                let mut at = 0;
                for part in parts {
                    if let Some(place) = view.part(at, part.len()) {
                        place.write(part);
                    }
                    at += part.len();
                }
                self.posts.push_back(Post { from, to, value, addr: view.addr(), len, lkeys: memory.lkeys() });
            }
            Err(error) => self.broken = Some(error),
        }
    }
}

impl Actions<Tensor> for Hands {
    fn grow(&mut self, outgoing: bool, index: usize, bytes: u64) -> Result<RemoteMr> {
        let bytes = usize::try_from(bytes).map_err(|_| Error::usage(format!("a buffer of {bytes} bytes")))?;
        let memory = Arc::new(self.device.scratch(bytes)?);
        let remote = RemoteMr { addr: memory.view(0, bytes)?.addr() as u64, rkeys: memory.rkeys() };
        let buffers = if outgoing { &mut self.outgoing } else { &mut self.incoming };
        buffers.insert(index, memory);
        Ok(remote)
    }

    fn ack(&mut self) {
        let [_, to] = self.to;
        self.put(Tx::Ack, to, HEADER as u32, &[&Packet::new(Kind::Ack, "", 0).encode()]);
    }

    fn message(&mut self, packet: &Packet, text: &str) {
        let [to, _] = self.to;
        self.put(Tx::Message, to, (HEADER + text.len()) as u32, &[&packet.encode(), text.as_bytes()]);
    }

    fn write(&mut self, index: usize, to: RemoteBuffer, packet: &Packet, tensor: Tensor) {
        let target = Target { sequence: TENSORS, addr: to.memory.addr, len: to.len, rkeys: to.memory.rkeys };
        self.put(Tx::Tensor(index), target, to.index, &[&packet.encode(), tensor.bytes()]);
    }

    fn find(&mut self, name: &str, step: u64) {
        self.told.push_back(Told::Find { name: name.to_owned(), step });
    }

    fn deliver(&mut self, index: usize, packet: &Packet) {
        let Some(memory) = self.incoming.get(&index).cloned() else { return };
        let tensor = Landed { index, meta: packet.meta, memory };
        self.told.push_back(Told::Landed { name: packet.name.clone(), step: packet.step, tensor });
    }

    fn fail(&mut self, name: &str, step: u64, why: Error) {
        self.told.push_back(Told::Failed { name: name.to_owned(), step, why });
    }
}

#[cfg(test)]
impl Adapter {
    /// Writes this into the peer's message buffer.
    pub fn send_garbage(&mut self, bytes: &[u8]) {
        let [to, _] = self.hands.to;
        self.hands.put(Tx::Message, to, bytes.len() as u32, &[bytes]);
        self.hands.post().unwrap();
    }
}
