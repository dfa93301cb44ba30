//! Two ranks and a comm between them. What must hold: messages come as they were sent, in the order of their receives; once a receive is done, nobody
//! writes to its memory; and all ends, soon after the last fault.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use crate::base::config::{Config, Progress};
use crate::base::error::Result;
use crate::base::mem::Pages;
use crate::fabric::sim::{Random, World};
use crate::link::Link;
use crate::link::memory::MemoryKind;
use crate::link::wr_id::RequestId;
use crate::net::simulated::{self, Host};
use crate::net::{RecvBuffer, RecvComm, SendComm};

use super::schedule::{self, Ranks, Stop};
use super::{Options, Report, Violation, bytes_of};

/// Receives outstanding at most, and bytes of each one's memory.
const PLACES: usize = 12;
const ROOM: usize = 16 << 10;

/// A group of receives.
struct Group {
    receive: RequestId,
    /// Place, bytes and pattern of each message.
    messages: Vec<(usize, usize, u64)>,
}

/// A message that the sender is to send, or has begun to.
struct Message {
    place: usize,
    len: usize,
    pattern: u64,
    request: Option<RequestId>,
}

fn fill(pages: &Pages, place: usize, len: usize, pattern: u64) {
    pages.write(place * ROOM, &bytes_of(len, pattern));
}

/// The settings of all schedules; what differs between them is taken from the seed.
pub(super) fn config(qps_per_rail: u32) -> Arc<Config> {
    static CONFIGS: [OnceLock<Arc<Config>>; 4] = [const { OnceLock::new() }; 4];
    let make = || Arc::new(Config { stats: false, progress: Progress::Caller, qps_per_rail, split_min: 1024, ..Config::default() });
    CONFIGS.get(qps_per_rail as usize).map_or_else(make, |place| place.get_or_init(make).clone())
}

/// A comm, and what goes over it.
struct Comm {
    world: World,
    rails: usize,
    send: SendComm,
    recv: RecvComm,
    from: Pages,
    to: Pages,
    mrs: [crate::net::MrHandle; 2],
    groups: VecDeque<Group>,
    sending: VecDeque<Message>,
    free: Vec<usize>,
    /// Messages that are not announced yet.
    left: usize,
    patterns: u64,
    received: u64,
}

/// Runs one schedule.
///
/// Errors: a promise that was broken.
pub fn run(options: &Options) -> std::result::Result<Report, Violation> {
    schedule::run(options, Comm::new)
}

impl Ranks for Comm {
    fn poll(&mut self, rank: usize, random: &mut Random) -> std::result::Result<bool, Stop> {
        if rank == 0 { self.sender() } else { self.receiver(random) }
    }

    fn is_done(&self) -> bool {
        self.left == 0 && self.groups.is_empty() && self.sending.is_empty()
    }

    fn count(&self) -> usize {
        2
    }

    fn for_each_link(&mut self, rank: usize, f: &mut dyn FnMut(&mut Link)) {
        f(if rank == 0 { self.send.link_for_test() } else { self.recv.link_for_test() });
    }

    /// By their control connection; but one rail alone is not taken up again.
    fn outlast_outages(&self) -> bool {
        self.rails > 1
    }

    fn received(&self) -> u64 {
        self.received
    }
}

impl Comm {
    fn new(world: &World, random: &mut Random, options: &Options) -> Result<Comm> {
        let config = config(1 + random.below(3) as u32);
        let hosts = [Host::new(world, 0, options.rails, &config)?, Host::new(world, 1, options.rails, &config)?];
        let [first, second] = &hosts;
        let (send, recv) = simulated::comm(first, second)?;
        let (from, to) = (Pages::new(PLACES * ROOM)?, Pages::new(PLACES * ROOM)?);
        let mrs = [
            first.net.register(first.dev, from.to_register(), MemoryKind::Host)?,
            second.net.register(second.dev, to.to_register(), MemoryKind::Host)?,
        ];
        for place in 0..PLACES {
            world.guard(to.addr() + place * ROOM, ROOM);
        }
        Ok(Comm {
            world: world.clone(),
            rails: options.rails,
            send,
            recv,
            from,
            to,
            mrs,
            groups: VecDeque::new(),
            sending: VecDeque::new(),
            free: (0..PLACES).collect(),
            left: options.messages,
            patterns: random.draw(),
            received: 0,
        })
    }

    /// Whether something has moved.
    fn sender(&mut self) -> std::result::Result<bool, Stop> {
        self.send.poll_for_test();
        let (mut moved, mut posted) = (false, 0);
        for message in self.sending.iter_mut().filter(|message| message.request.is_none()) {
            fill(&self.from, message.place, message.len, message.pattern);
            let addr = self.from.addr() + message.place * ROOM;
            match self.send.isend(addr, message.len, message.place as i32, self.mrs[0])? {
                None => break,
                request => message.request = request,
            }
            moved = true;
            posted += 1;
            if posted == 3 {
                break;
            }
        }
        let mut index = 0;
        while let Some(message) = self.sending.get(index) {
            let done = match message.request {
                Some(request) => self.send.test(request)?.is_some(),
                None => false,
            };
            if done {
                // The memory is the sender's again: what is still read of it comes as something else.
                fill(&self.from, message.place, message.len, !message.pattern);
                self.sending.remove(index);
                moved = true;
            } else {
                index += 1;
            }
        }
        Ok(moved)
    }

    fn receiver(&mut self, random: &mut Random) -> std::result::Result<bool, Stop> {
        self.recv.poll_for_test();
        let mut moved = false;
        let mut index = 0;
        while let Some(group) = self.groups.get(index) {
            let Some(sizes) = self.recv.test(group.receive)? else {
                index += 1;
                continue;
            };
            let Some(group) = self.groups.remove(index) else { break };
            moved = true;
            for (&(place, len, pattern), size) in group.messages.iter().zip(sizes.bytes) {
                let mut bytes = vec![0; len];
                self.to.read(place * ROOM, &mut bytes);
                if size as usize != len || bytes != bytes_of(len, pattern) {
                    return Err(Stop::Wrong(format!("message {} of {len} bytes has come as another one, of {size}", self.received)));
                }
                self.world.guard(self.to.addr() + place * ROOM, ROOM);
                self.received += 1;
                self.free.push(place);
            }
        }
        let n = (1 + random.below(3) as usize).min(self.left);
        // A message's memory at the sender is its place, too.
        let busy = |place: &usize| self.sending.iter().any(|message| message.place == *place);
        let places: Vec<usize> = self.free.iter().copied().filter(|place| !busy(place)).take(n).collect();
        if n == 0 || places.len() < n || !random.one_in(2) {
            return Ok(moved);
        }
        let buffer = |place: &usize| RecvBuffer { addr: self.to.addr() + place * ROOM, len: ROOM, tag: *place as i32, mr: self.mrs[1] };
        let buffers: Vec<RecvBuffer> = places.iter().map(buffer).collect();
        places.iter().for_each(|place| self.world.unguard(self.to.addr() + place * ROOM));
        let Some(receive) = self.recv.irecv(&buffers)? else {
            places.iter().for_each(|place| self.world.guard(self.to.addr() + place * ROOM, ROOM));
            return Ok(moved);
        };
        self.free.retain(|place| !places.contains(place));
        self.left -= n;
        let mut messages = Vec::new();
        for place in places {
            self.patterns = self.patterns.wrapping_add(2);
            let len = [0, 8, 100, 3000, ROOM][random.below(5) as usize];
            messages.push((place, len, self.patterns));
            self.sending.push_back(Message { place, len, pattern: self.patterns, request: None });
        }
        self.groups.push_back(Group { receive, messages });
        Ok(true)
    }
}
