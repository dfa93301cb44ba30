//! One worker as seen by another: a link to it, and its channel, whose tables of actions say what is to be done. Under the lock of the manager, on
//! whichever thread drives it.
//!
//! Each side has four named buffers of its own in one piece of registered memory. A peer writes to slots that stand open, in order: messages, acks, and,
//! in Buffered mode, tensors, whose writes name the buffer. In Direct mode each tensor has a slot of its own, and requests with a number are control
//! messages.

use std::os::fd::RawFd;
use std::sync::Arc;

use crate::base::error::{Error, Result};
#[cfg(test)]
use crate::base::stats::RailCounter;
use crate::base::stats::{CommCounter, CommStats, WaitCause};
use crate::link::Failure;
use crate::link::address::Address;
use crate::link::device::{Device, Registered};
use crate::link::duplex::{Event, Target, Unconnected};
use crate::link::limits::{CONTROL_SIZE, MAX_RAILS, SLOTS};

use super::channel::{Channel, Tx};
#[cfg(test)]
use super::direct::Actions;
use super::direct::Direct;
use super::event::{ChannelEvent, Landed};
use super::io::{ACKS, BUFFERS, ChannelIo, Fill, MESSAGES, RX_ACK, RX_MESSAGE, TENSORS};
use super::key::{Key, TensorId};
use super::memory::{Memory, Pool};
use super::message::{ACK, HEADER, Kind, MESSAGE, NumberedRequest, Packet, TEXT_MAX};
use super::value::Tensor;

/// What stands behind the address of an end: how it sends tensors, and where those are, `{u8 mode, u64 addr, u32 rkeys[8]}`.
const BEHIND: usize = 1 + 8 + 4 * MAX_RAILS;

/// How tensors go from worker to worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Mode {
    /// Copied into a buffer of their name, and out of it.
    Buffered = 0,
    /// Straight from the producer's memory into the consumer's.
    Direct = 1,
}

/// What is said beside the slots, but for requests: this worker goes.
const BYE: [u8; CONTROL_SIZE] = [b'B'; CONTROL_SIZE];

/// One end that has not been told of the other.
pub struct Waiting {
    end: Unconnected,
    buffers: Registered,
    mode: Mode,
}

impl Waiting {
    /// On this device.
    ///
    /// Errors: no memory or queue pair left.
    pub fn new(device: &Device, mode: Mode) -> Result<Waiting> {
        Ok(Waiting { end: device.end()?, buffers: device.scratch(BUFFERS.len() * MESSAGE)?, mode })
    }

    /// What the other end has to be told.
    ///
    /// Errors: none that happens.
    pub fn address(&mut self) -> Result<Vec<u8>> {
        let mut bytes = self.end.address().encode();
        bytes.push(self.mode as u8);
        bytes.extend((self.buffers.view(0, BUFFERS.len() * MESSAGE)?.addr() as u64).to_le_bytes());
        self.buffers.rkeys().iter().for_each(|rkey| bytes.extend(rkey.to_le_bytes()));
        Ok(bytes)
    }

    /// Connects to the worker of this name, whose end has this address; `what` is "channel of a to b," or the like.
    ///
    /// Errors: an address that is none; an end on another fabric, or in another mode.
    pub fn connect(self, name: &str, address: &[u8], what: &str, device: &Arc<Device>, pool: &Arc<Pool>) -> Result<Adapter> {
        let wrong = |why: &str| Error::remote(format!("its address {why}"));
        let (remote, len) = Address::decode(address).map_err(|why| wrong(&why))?;
        let (mode, addr, rkeys) = behind(address.get(len..).unwrap_or_default()).ok_or_else(|| wrong("does not tell of its buffers"))?;
        if mode != self.mode as u8 {
            let theirs = [Mode::Buffered, Mode::Direct].into_iter().find(|known| *known as u8 == mode);
            let theirs = theirs.map_or(format!("mode {mode}"), |theirs| format!("{theirs:?} mode"));
            return Err(Error::usage(format!("it is in {theirs}, this one in {:?} mode; all workers have the same", self.mode)));
        }
        let mut link = self.end.connect(&remote, what, &device.config)?;
        link.stats().set_peer(name, remote.local.pid as i32);
        for slot in [MESSAGES, ACKS, TENSORS].into_iter().take(if self.mode == Mode::Buffered { 3 } else { 2 }) {
            if link.open_standing().is_none_or(|sequence| sequence % SLOTS as u64 != slot) {
                return Err(Error::internal(format!("slot {slot} of a new link is not the next")));
            }
        }
        let target = |sequence, offset: usize| Target { sequence, addr: addr.wrapping_add(offset as u64), len: MESSAGE as u64, rkeys };
        let to = [target(MESSAGES, RX_MESSAGE), target(ACKS, RX_ACK)];
        let io = ChannelIo::new(link, device, pool, self.buffers, to);
        let flow = if self.mode == Mode::Buffered { Flow::Buffered(Channel::default()) } else { Flow::Direct(Direct::default()) };
        Ok(Adapter { flow, io, shown: None })
    }
}

/// A peer's mode, and address and keys of its buffers.
fn behind(bytes: &[u8]) -> Option<(u8, u64, [u32; MAX_RAILS])> {
    let bytes: &[u8; BEHIND] = bytes.try_into().ok()?;
    let (&[mode], bytes) = bytes.split_first_chunk()?;
    let (addr, rest) = bytes.split_first_chunk()?;
    let mut rkeys = [0; MAX_RAILS];
    for (rkey, bytes) in rkeys.iter_mut().zip(rest.chunks_exact(4)) {
        *rkey = u32::from_le_bytes(bytes.try_into().ok()?);
    }
    Some((mode, u64::from_le_bytes(*addr), rkeys))
}

/// A connected worker.
pub struct Adapter {
    flow: Flow,
    io: ChannelIo,
    /// Of the receive that the stats page shows.
    shown: Option<u64>,
}

/// Its channel.
enum Flow {
    Buffered(Channel<Tensor>),
    Direct(Direct<Tensor, Arc<Memory>>),
}

/// Does the same with either.
macro_rules! either {
    ($flow:expr, $channel:ident => $do:expr) => {
        match $flow {
            Flow::Buffered($channel) => $do,
            Flow::Direct($channel) => $do,
        }
    };
}

impl Adapter {
    /// Whether its queue pairs are connected.
    ///
    /// Errors: they cannot be.
    pub fn poll_connected(&mut self) -> Result<bool> {
        self.io.link.poll_connected()
    }

    /// Asks for a tensor, unless that was done. In Direct mode it is written into this memory, or else the library's: whether into this.
    ///
    /// Errors: too many are asked for; a peer that is gone. Nothing was asked then.
    pub fn request(&mut self, id: &TensorId, into: Option<Arc<Memory>>) -> Result<bool> {
        let Adapter { flow, io, .. } = self;
        io.link.check()?;
        let into = into.filter(|memory| memory.is_registered(io.pool()));
        let takes = matches!(flow, Flow::Direct(_)) && into.is_some();
        let asked = match flow {
            Flow::Buffered(channel) => channel.request(id, io)?,
            Flow::Direct(channel) => channel.request(id, into, io)?,
        };
        if asked {
            io.count(CommCounter::Ops);
        }
        // A link that has failed is noticed by the next poll: until that end is dropped the memory may be written to.
        let _ = io.post();
        Ok(asked && takes)
    }

    /// Nobody waits for a tensor any more: it comes, or fails, or [`ChannelEvent::Withdrawn`] says that it will not come.
    pub fn withdraw(&mut self, id: &TensorId) {
        let Adapter { flow, io, .. } = self;
        either!(flow, channel => channel.withdraw(id, io));
        let _ = io.post();
    }

    /// Has a tensor that was looked for sent. A peer that is lost is noticed by the next poll; here and below.
    pub fn found(&mut self, id: &TensorId, tensor: Tensor) {
        let Adapter { flow, io, .. } = self;
        let meta = *tensor.meta();
        either!(flow, channel => channel.found(id, &meta, tensor, io));
        let _ = io.post();
    }

    /// Tells the peer that one will not come.
    pub fn not_found(&mut self, id: &TensorId, why: &Error) {
        let Adapter { flow, io, .. } = self;
        either!(flow, channel => channel.not_found(id, why, io));
        let _ = io.post();
    }

    /// Tells the peer that one which it has taken back is not looked for any more.
    pub fn forgotten(&mut self, id: &TensorId) {
        let Adapter { flow, io, .. } = self;
        either!(flow, channel => channel.forgotten(id, io));
        let _ = io.post();
    }

    /// Whether there is a tensor that is to be copied before it is sent.
    pub fn has_fill(&self) -> bool {
        self.io.has_fill()
    }

    /// The next of them.
    pub fn next_fill(&mut self) -> Option<Box<Fill>> {
        self.io.next_fill()
    }

    /// It was.
    pub fn filled(&mut self, fill: Fill) {
        self.io.filled(fill);
        let _ = self.io.post();
    }

    /// A tensor was copied out of its buffer. One of an earlier connection means nothing.
    pub fn consumed(&mut self, landed: &Landed) {
        let is_here = self.io.incoming(landed.index).is_some_and(|memory| landed.is_in(memory));
        if is_here && let Flow::Buffered(channel) = &mut self.flow {
            channel.consumed(landed.index, &mut self.io);
            let _ = self.io.post();
        }
    }

    /// So many bytes of tensors that this worker has sent or received were copied.
    pub fn copied(&self, bytes: u64) {
        self.io.link.stats().add(CommCounter::Copied, bytes);
    }

    /// How many there are.
    pub fn all_copied(&self) -> u64 {
        self.io.link.stats().get(CommCounter::Copied)
    }

    /// Moves everything along; whether something has moved. [`Adapter::next_event`] then tells what the peer wants.
    ///
    /// Errors: a peer that is gone or misbehaves.
    pub fn poll(&mut self) -> Result<bool> {
        let Adapter { flow, io, .. } = self;
        io.link.set_waited_for(either!(flow, channel => channel.waits()));
        if !io.link.poll(WaitCause::PeerNoSend) {
            return io.link.check().map(|()| false);
        }
        let mut gone = false;
        while let Some(event) = io.link.next_event() {
            let done = match event {
                Event::Sent(id) => {
                    if let Some(from) = io.sent(id) {
                        if let Tx::Tensor(_) = from {
                            io.count(CommCounter::Completions);
                        }
                        either!(flow, channel => channel.written(from, io));
                    }
                    Ok(())
                }
                Event::Received { sequence, value } => arrived(flow, io, sequence, value),
                // What comes behind it is how the peer ends what this one has asked for.
                Event::Control(BYE) => {
                    gone = true;
                    break;
                }
                Event::Control(bytes) => match (&mut *flow, NumberedRequest::decode(&bytes)) {
                    (Flow::Direct(channel), Some(request)) => channel.numbered(&request, io),
                    _ => Err(Error::remote("it sent an unknown control message")),
                },
            };
            if let Err(error) = done {
                io.link.fail(Failure::from_error(&error));
            }
        }
        if gone {
            return Err(Error::remote("it has closed its manager"));
        }
        io.post()?;
        if let Flow::Direct(channel) = flow {
            channel.send_waiting(io);
            io.post()?;
        }
        io.link.check().map(|()| true)
    }

    /// What the peer wants next.
    pub fn next_event(&mut self) -> Option<ChannelEvent> {
        self.io.events.pop_front()
    }

    /// Asks to be woken, and names the descriptors to sleep on. `Some`: see [`Duplex::arm`](crate::link::duplex::Duplex::arm).
    pub fn arm(&mut self, watch: impl FnMut(RawFd)) -> Result<Option<u64>> {
        let waits = either!(&self.flow, channel => channel.waits());
        self.io.link.arm(waits.then_some(WaitCause::PeerNoSend.into()), watch)
    }

    /// Whether it has to be polled again before anybody sleeps.
    pub fn needs_repoll(&mut self) -> bool {
        self.io.link.needs_repoll()
    }

    /// Whether all is sent that the peer has asked for and that is here.
    pub fn is_through(&self) -> bool {
        self.io.is_through() && either!(&self.flow, channel => channel.is_through())
    }

    /// Its counters: of tensors that were asked for and of those that were sent.
    pub fn stats(&self) -> &CommStats {
        self.io.link.stats()
    }

    /// The stats page is to show this receive, of a number that no other has: its key, its step, and since when it waits.
    pub fn shows(&mut self, number: u64, key: &Key, step: u64, since: u64) {
        if self.shown.replace(number) != Some(number) {
            self.stats().set_wait_key(&format!("{};{}:{}", key.edge(), key.frame, key.iter), step, since);
        }
    }

    /// And this, none.
    pub fn shows_none(&mut self) {
        if self.shown.take().is_some() {
            self.stats().set_wait_key("", 0, 0);
        }
    }

    /// Tells the peer that this worker goes, if there is a place for it.
    pub fn say_bye(&mut self) {
        let _ = self.io.link.send_last_control(&BYE);
    }

    /// As [`Duplex::drop_waits`](crate::link::duplex::Duplex::drop_waits), of one that nobody polls any more.
    pub fn drop_waits(&mut self) -> bool {
        self.io.link.drop_waits()
    }

    /// Whether that, and all that was sent before, is through.
    pub fn bye_is_through(&mut self) -> bool {
        // A peer that has it may go at once: what a poll finds after that means nothing.
        if !self.io.link.last_control_is_through() {
            self.io.link.poll(WaitCause::PeerNoSend);
        }
        self.io.link.last_control_is_through()
    }
}

/// The peer has written to a slot.
///
/// Errors: what makes no sense.
fn arrived(flow: &mut Flow, io: &mut ChannelIo, sequence: u64, value: u64) -> Result<()> {
    match (sequence % SLOTS as u64, flow) {
        (MESSAGES, flow) => {
            let (packet, text) = read_message(&io.buffers)?;
            if value != (HEADER + text.len()) as u64 {
                return Err(Error::remote(format!("it sent a message of {} bytes that it says has {value}", HEADER + text.len())));
            }
            either!(flow, channel => channel.message(&packet, &text, io))
        }
        (ACKS, flow) => {
            let mut ack = [0; ACK.len()];
            io.buffers.view(RX_ACK, ACK.len())?.read(&mut ack);
            if (ack, value) != (ACK, ACK.len() as u64) {
                return Err(Error::remote(format!("it sent {value} bytes that begin with {ack:?} as an ack; it has {ACK:?}")));
            }
            either!(flow, channel => channel.acked(io))
        }
        (_, Flow::Buffered(channel)) => {
            let index = value as usize;
            let memory = io.incoming(index).ok_or_else(|| Error::remote(format!("it sent a tensor into buffer {index}, which is not")))?;
            let packet = read_packet(memory, 0)?;
            channel.tensor(index, &packet, io)
        }
        (_, Flow::Direct(channel)) => channel.landed(sequence, value, io),
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

#[cfg(feature = "sim")]
impl Adapter {
    /// What it is made of.
    pub fn link_for_test(&mut self) -> &mut crate::link::Link {
        self.io.link.link_for_test()
    }
}

#[cfg(test)]
impl Adapter {
    /// For how many tensors of so many bytes more the library's memory may be open to the peer.
    pub fn opens(&mut self, bytes: usize, ahead: bool) -> usize {
        let next = || Actions::open(&mut self.io, None, bytes as u64, ahead).unwrap();
        let opened: Vec<_> = std::iter::from_fn(next).collect();
        opened.iter().for_each(|to| self.io.close(to.sequence));
        opened.len()
    }

    /// See [`ChannelIo::shared_buffers`].
    pub fn shared_buffers(&self) -> ([usize; 2], usize) {
        self.io.shared_buffers()
    }

    /// Bytes that were received and sent through mapped memory.
    pub fn mapped_bytes(&self) -> [u64; 2] {
        [RailCounter::RxMapped, RailCounter::TxMapped].map(|counter| self.io.link.stats().rail(0).get(counter))
    }

    /// Has what is written to the peer go elsewhere.
    pub fn tamper(&mut self, tamper: super::io::Tamper) {
        self.io.tamper = Some(tamper);
    }

    /// Writes this into the buffer of a slot of the peer's, and tells it this value.
    pub fn send_garbage(&mut self, slot: u64, value: usize, bytes: &[u8]) {
        self.io.put_garbage(slot, value as u32, bytes);
        self.io.post().unwrap();
    }

    /// Sends this control message.
    pub fn send_control(&mut self, bytes: &[u8; CONTROL_SIZE]) {
        assert!(self.io.link.send_control(bytes).unwrap());
    }

    /// Buffers of tensors that come in and that go out.
    pub fn buffers(&self) -> [usize; 2] {
        self.io.tensors.each_ref().map(foldhash::HashMap::len)
    }

    /// What is in one of them.
    pub fn buffer(&self, outgoing: bool, index: usize) -> Vec<u8> {
        let memory = self.io.tensors[usize::from(outgoing)].get(&index).unwrap();
        memory.view(0, memory.len()).unwrap().to_vec().unwrap()
    }

    /// Requests of this side's and of the peer's that are not answered.
    pub fn requests(&self) -> [usize; 2] {
        either!(&self.flow, channel => channel.requests())
    }

    /// Whether a thread copies a tensor that goes out.
    pub fn is_copying(&self) -> bool {
        self.io.is_copying()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::config::{Config, SoftWire};

    #[test]
    fn what_stands_behind_an_address_is_refused_unless_it_is_whole_and_of_this_mode() {
        let device = Device::open(Config { socket_ifname: "=lo".into(), soft_wire: SoftWire::Shm, ..Config::default() }, "").unwrap();
        let pool = Pool::new(device.clone());
        let address = Waiting::new(&device, Mode::Direct).unwrap().address().unwrap();
        let connect =
            |address: &[u8]| Waiting::new(&device, Mode::Direct).unwrap().connect("b", address, "channel of a to b,", &device, &pool);
        let refused = |address: &[u8]| connect(address).err().expect("refused").to_string();
        assert!(connect(&address).is_ok());
        let end = address.len() - BEHIND;
        for cut in end..address.len() {
            assert_eq!(refused(&address[..cut]), "its address does not tell of its buffers", "{cut} bytes");
        }
        assert_eq!(refused(&[&address[..], &[0]].concat()), "its address does not tell of its buffers");
        let in_mode = |mode| [&address[..end], &[mode], &address[end + 1..]].concat();
        let words = |theirs: &str| format!("it is in {theirs}, this one in Direct mode; all workers have the same");
        assert_eq!(refused(&in_mode(0)), words("Buffered mode"));
        assert_eq!(refused(&in_mode(7)), words("mode 7"));
    }
}
