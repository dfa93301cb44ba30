//! Two ranks and a link both ways between them. What must hold: messages come as they were sent, and once one is there, nobody writes to its memory;
//! control messages and notifications come in the order in which they were sent; and all ends, soon after the last fault.

use std::collections::VecDeque;

use crate::base::error::Result;
use crate::base::mem::Pages;
use crate::base::stats::{self, CommKind, WaitCause};
use crate::fabric::sim::{Random, World};
use crate::fabric::{Access, Domain, MemoryRegion};
use crate::link::Link;
use crate::link::duplex::{Duplex, Event, Target, Unconnected};
use crate::link::limits::{CONTROL_SIZE, MAX_RAILS};
use crate::link::queue_pairs::RailDevice;
use crate::link::wr_id::RequestId;

use super::net::config;
use super::schedule::{self, Ranks, Stop};
use super::{Options, Report, Violation, bytes_of};

/// Messages of a direction at most, and bytes of each one's memory.
const PLACES: usize = 8;
const ROOM: usize = 16 << 10;
/// The same of what is ordered and outstanding: notifications and control messages.
const NOTES: u64 = 16;
const NOTE: usize = 200;
/// Bytes of a direction's memory, at either end.
const MEMORY: usize = PLACES * ROOM + NOTES as usize * NOTE;

/// A message that the receiver waits for.
struct Message {
    place: usize,
    target: Target,
    len: usize,
    pattern: u64,
    /// Of the sender, once it has begun.
    request: Option<RequestId>,
    is_sent: bool,
    is_received: bool,
}

/// What goes from one rank to the other.
struct Way {
    from: Pages,
    to: Pages,
    lkeys: [u32; MAX_RAILS],
    rkeys: [u32; MAX_RAILS],
    /// Messages that are not announced yet, and those that are.
    left: usize,
    messages: VecDeque<Message>,
    /// The slot of notifications, and those whose memory is the sender's link's.
    standing: u64,
    notes: Vec<(RequestId, u64)>,
    /// How much of what is ordered is to be sent, was, and has come.
    ordered: [u64; 3],
    patterns: u64,
    received: u64,
    /// Of both ends, rail by rail.
    _regions: Vec<MemoryRegion>,
}

struct Pair {
    world: World,
    ends: [Duplex; 2],
    /// By the rank that sends.
    ways: [Way; 2],
}

/// Runs one schedule.
///
/// Errors: a promise that was broken.
pub fn run(options: &Options) -> std::result::Result<Report, Violation> {
    schedule::run(options, Pair::new)
}

fn wrong<T>(what: String) -> std::result::Result<T, Stop> {
    Err(Stop::Wrong(what))
}

fn numbered(number: u64) -> [u8; CONTROL_SIZE] {
    std::array::from_fn(|i| (number >> (i % 8 * 8)) as u8)
}

/// Not all are: without a message between them, only one in 64 control messages is signaled.
fn is_note(number: u64) -> bool {
    number % 200 < 60 && number % 2 == 1
}

fn note_at(number: u64) -> usize {
    PLACES * ROOM + (number % NOTES) as usize * NOTE
}

impl Way {
    fn new(from: &[Domain], to: &[Domain], random: &mut Random, options: &Options) -> Result<Way> {
        let pages = [Pages::new(MEMORY)?, Pages::new(MEMORY)?];
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let register = |rails: &[Domain], pages: &Pages| -> Result<Vec<MemoryRegion>> {
            rails.iter().map(|rail| rail.register(pages.to_register(), access)).collect()
        };
        let (ours, theirs) = (register(from, &pages[0])?, register(to, &pages[1])?);
        let [from, to] = pages;
        Ok(Way {
            from,
            to,
            lkeys: std::array::from_fn(|rail| ours.get(rail).map_or(0, MemoryRegion::lkey)),
            rkeys: std::array::from_fn(|rail| theirs.get(rail).map_or(0, MemoryRegion::rkey)),
            left: options.messages / 2 * usize::from(!random.one_in(4)),
            messages: VecDeque::new(),
            standing: 0,
            notes: Vec::new(),
            ordered: [options.messages as u64 * [0, 1, 1, 8][random.below(4) as usize], 0, 0],
            patterns: random.draw(),
            received: 0,
            _regions: ours.into_iter().chain(theirs).collect(),
        })
    }

    fn is_done(&self) -> bool {
        self.left == 0 && self.messages.is_empty() && self.notes.is_empty() && self.ordered[0] == self.ordered[2]
    }

    /// Where a target's memory is.
    fn target(&self, sequence: u64, at: usize, len: usize) -> Target {
        Target { sequence, addr: (self.to.addr() + at) as u64, len: len as u64, rkeys: self.rkeys }
    }

    /// Its memory at the receiver, by its place, may be written to, or not.
    fn guard(&self, world: &World, at: usize, len: usize) {
        world.guard(self.to.addr() + at, len);
    }

    /// The receiver opens a slot, and tells the sender by other means.
    fn announce(&mut self, world: &World, receiver: &mut Duplex, random: &mut Random) {
        let Some(place) = (0..PLACES).find(|place| self.messages.iter().all(|message| message.place != *place)) else { return };
        let Some(sequence) = receiver.open(ROOM as u64) else { return };
        world.unguard(self.to.addr() + place * ROOM);
        let len = [0, 8, 100, 3000, ROOM][random.below(5) as usize];
        self.patterns = self.patterns.wrapping_add(2);
        let (target, pattern) = (self.target(sequence, place * ROOM, ROOM), self.patterns);
        self.from.write(place * ROOM, &bytes_of(len, pattern));
        self.messages.push_back(Message { place, target, len, pattern, request: None, is_sent: false, is_received: false });
        self.left -= 1;
    }

    /// The sender begins what it may. Whether there was anything.
    fn send(&mut self, world: &World, sender: &mut Duplex) -> Result<bool> {
        let mut any = false;
        for message in self.messages.iter_mut().filter(|message| message.request.is_none()) {
            let addr = self.from.addr() + message.place * ROOM;
            message.request = sender.write(&message.target, addr, message.len, &self.lkeys)?;
            if message.request.is_none() {
                break;
            }
            any = true;
        }
        let [all, sent, come] = self.ordered;
        if sent == all || sent - come == NOTES {
            return Ok(any);
        }
        let taken = if !is_note(sent) {
            sender.send_control(&numbered(sent))?
        } else {
            let at = note_at(sent);
            if self.notes.iter().any(|(_, number)| note_at(*number) == at) {
                return Ok(any);
            }
            world.unguard(self.to.addr() + at);
            self.from.write(at, &bytes_of(NOTE, sent));
            let to = self.target(self.standing, PLACES * ROOM, NOTES as usize * NOTE);
            let note = sender.notify(&to, (at - PLACES * ROOM) as u64, sent as u32, self.from.addr() + at, NOTE, &self.lkeys)?;
            self.notes.extend(note.map(|id| (id, sent)));
            note.is_some()
        };
        self.ordered[1] += u64::from(taken);
        Ok(any || taken)
    }

    /// The sender's memory is its own again: what is still read of it comes as something else.
    fn sent(&mut self, id: RequestId) -> std::result::Result<(), Stop> {
        if let Some(message) = self.messages.iter_mut().find(|message| message.request == Some(id) && !message.is_sent) {
            message.is_sent = true;
            self.from.write(message.place * ROOM, &bytes_of(message.len, !message.pattern));
        } else if let Some(note) = self.notes.iter().position(|(note, _)| *note == id) {
            self.notes.swap_remove(note);
        } else {
            return wrong(format!("request {id:?} was sent twice, or never asked for"));
        }
        self.messages.retain(|message| !(message.is_sent && message.is_received));
        Ok(())
    }

    fn next_in_order(&mut self, number: u64) -> std::result::Result<(), Stop> {
        if number != self.ordered[2] {
            return wrong(format!("number {number} of what is ordered has come as {}", self.ordered[2]));
        }
        self.ordered[2] += 1;
        Ok(())
    }

    fn received(&mut self, world: &World, sequence: u64, value: u64) -> std::result::Result<(), Stop> {
        if sequence == self.standing {
            let (at, mut bytes) = (note_at(value), vec![0; NOTE]);
            self.to.read(at, &mut bytes);
            if bytes != bytes_of(NOTE, value) {
                return wrong(format!("notification {value} has come as another one"));
            }
            self.guard(world, at, NOTE);
            return self.next_in_order(value);
        }
        let waits = |message: &&mut Message| message.target.sequence == sequence && !message.is_received;
        let Some(message) = self.messages.iter_mut().find(waits) else {
            return wrong(format!("a message of {value} bytes for slot {sequence}, where none was to come"));
        };
        message.is_received = true;
        let (place, len, pattern) = (message.place, message.len, message.pattern);
        let mut bytes = vec![0; len];
        self.to.read(place * ROOM, &mut bytes);
        if value != len as u64 || bytes != bytes_of(len, pattern) {
            return wrong(format!("a message of {len} bytes has come as another one, of {value}"));
        }
        self.guard(world, place * ROOM, ROOM);
        self.received += 1;
        self.messages.retain(|message| !(message.is_sent && message.is_received));
        Ok(())
    }
}

impl Pair {
    fn new(world: &World, random: &mut Random, options: &Options) -> Result<Pair> {
        let config = config(1 + random.below(3) as u32);
        let make = |host| -> Result<(Vec<Domain>, Unconnected)> {
            let stats = stats::comm(CommKind::Pair, "sim");
            let (mut domains, mut devices) = (Vec::new(), Vec::new());
            for (rail, device) in world.devices(host, options.rails).iter().enumerate() {
                let domain = device.open()?;
                domains.push(domain.clone());
                devices.push(RailDevice { domain, capabilities: device.capabilities(), stats: stats.rail(rail) });
            }
            Ok((domains, Unconnected::new(&devices, "sim", "sim", &config, stats, false)?))
        };
        let [(ours, mut first), (theirs, mut second)] = [make(0)?, make(1)?];
        let mut addresses = [first.address(), second.address()];
        // No process is looked at: this one would be both.
        addresses.iter_mut().for_each(|address| address.local.pid_ns = 0);
        let mut ends = [first.connect(&addresses[1], "0 to", &config)?, second.connect(&addresses[0], "1 to", &config)?];
        let mut ways = [Way::new(&ours, &theirs, random, options)?, Way::new(&theirs, &ours, random, options)?];
        for (sender, way) in ways.iter_mut().enumerate() {
            way.standing = ends[1 - sender].open_standing().unwrap_or(u64::MAX);
            (0..PLACES).for_each(|place| way.guard(world, place * ROOM, ROOM));
            (0..NOTES).for_each(|note| way.guard(world, note_at(note), NOTE));
        }
        Ok(Pair { world: world.clone(), ends, ways })
    }
}

impl Ranks for Pair {
    fn poll(&mut self, rank: usize, random: &mut Random) -> std::result::Result<bool, Stop> {
        let Pair { world, ends, ways } = self;
        let end = &mut ends[rank];
        let mut moved = end.poll(WaitCause::PeerNoSend);
        while let Some(event) = end.next_event() {
            moved = true;
            match event {
                Event::Sent(id) => ways[rank].sent(id)?,
                Event::Received { sequence, value } => ways[1 - rank].received(world, sequence, value)?,
                Event::Control(bytes) => {
                    let number = bytes.iter().take(8).rev().fold(0, |number, byte| number << 8 | u64::from(*byte));
                    if bytes != numbered(number) {
                        return wrong(format!("a control message is torn: {bytes:?}"));
                    }
                    ways[1 - rank].next_in_order(number)?;
                }
            }
        }
        end.check()?;
        if ways[1 - rank].left > 0 && random.one_in(2) {
            ways[1 - rank].announce(world, end, random);
        }
        Ok(moved | ways[rank].send(world, end)?)
    }

    fn is_done(&self) -> bool {
        self.ways.iter().all(Way::is_done)
    }

    fn count(&self) -> usize {
        2
    }

    fn for_each_link(&mut self, rank: usize, f: &mut dyn FnMut(&mut Link)) {
        f(self.ends[rank].link_for_test());
    }

    fn received(&self) -> u64 {
        self.ways.iter().map(|way| way.received).sum()
    }
}
