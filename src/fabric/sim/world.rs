//! The network of a simulation, and its clock: what happens when, on which rails nothing gets through, and an oracle for memory that nobody may write to.
//! One thread has a world; everything that is random in it comes from its seed.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::base::clock;
use crate::base::stats::RailStats;
use crate::base::sync::lock;
use crate::fabric::soft::work_queues::Fault;
use crate::fabric::types::{Capabilities, QpCaps, WcStatus};

use super::queue_pair::{Packet, QueuePairState};

/// Nanoseconds that a packet takes at least, and how much longer it may take.
const LATENCY_NS: u64 = 1_000;
const JITTER_NS: u64 = 3_000;
/// One packet in so many takes up to this long instead, and those behind it with it.
const SLOW_ONE_IN: u64 = 200;
const SLOW_NS: u64 = 200_000;
/// One packet in so many comes a second time, after up to this long: queue pairs were reset since.
const GHOST_ONE_IN: u64 = 50;
const GHOST_NS: u64 = 2_000_000_000;

/// Random numbers from a seed (SplitMix64).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// The next one.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// One below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.draw() % n.max(1)
    }

    /// True one time in `n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// A host's port on a rail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Port {
    /// The host.
    pub host: usize,
    /// The rail.
    pub rail: usize,
}

/// What does not get through at a port.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cut {
    /// What the host sends.
    pub out: bool,
    /// What is sent to it.
    pub back: bool,
}

/// Something that will happen.
pub enum Event {
    Packet(Packet),
    Timer(usize),
    Closed { number: usize, generation: u32 },
    Refused { number: usize, generation: u32, fault: Fault },
}

/// When it happens, and where it is kept: the heap moves few bytes.
struct Scheduled {
    time: u64,
    order: u64,
    place: usize,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Scheduled) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Scheduled {}

impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Scheduled) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The earliest is the greatest.
impl Ord for Scheduled {
    fn cmp(&self, other: &Scheduled) -> Ordering {
        (other.time, other.order).cmp(&(self.time, self.order))
    }
}

/// A world. Cheap to clone.
#[derive(Clone)]
pub struct World(Arc<Mutex<State>>);

/// What is in it.
pub struct State {
    pub(super) now: u64,
    order: u64,
    scheduled: BinaryHeap<Scheduled>,
    /// By place; and the places that are free.
    events: Vec<Option<Event>>,
    free: Vec<usize>,
    pub(super) random: Random,
    qps: Vec<QueuePairState>,
    cuts: BTreeMap<Port, Cut>,
    /// Ports whose device will refuse a part of a batch, and how many it takes before.
    refusals: BTreeMap<Port, u64>,
    /// Ports whose device reports nothing any more.
    silent: BTreeSet<Port>,
    pub(super) capabilities: Capabilities,
    /// How much time passes with each poll of a completion queue.
    poll_ns: u64,
    /// By first byte: where the memory ends that nobody may write to.
    guarded: BTreeMap<u64, u64>,
    violation: Option<String>,
    /// Hosts.
    reached: BTreeSet<usize>,
    trace: u64,
}

impl World {
    /// An empty one, whose clock is this thread's from now on.
    pub fn new(seed: u64, capabilities: Capabilities) -> World {
        // Not 0, which some take for never.
        let now = 1_000_000_000;
        clock::set_virtual(Some(now));
        World(Arc::new(Mutex::new(State {
            now,
            order: 0,
            scheduled: BinaryHeap::new(),
            events: Vec::new(),
            free: Vec::new(),
            random: Random(seed),
            qps: Vec::new(),
            cuts: BTreeMap::new(),
            refusals: BTreeMap::new(),
            silent: BTreeSet::new(),
            capabilities,
            poll_ns: 0,
            guarded: BTreeMap::new(),
            violation: None,
            reached: BTreeSet::new(),
            trace: seed,
        })))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }

    /// A host's devices, one per rail.
    pub fn devices(&self, host: usize, rails: usize) -> Vec<crate::fabric::Device> {
        (0..rails).map(|rail| crate::fabric::Device::Sim(super::Device::new(self.clone(), Port { host, rail }))).collect()
    }

    /// Its time, in nanoseconds.
    pub fn now(&self) -> u64 {
        self.state().now
    }

    /// When something happens next, if anything does.
    pub fn next_event(&self) -> Option<u64> {
        self.state().scheduled.peek().map(|next| next.time)
    }

    /// Lets everything happen until then. `Some`: memory was written to that is guarded.
    pub fn advance(&self, until: u64) -> Option<String> {
        let mut state = self.state();
        state.advance(until);
        state.violation.take()
    }

    /// From now on so much time passes with each poll of a completion queue, for those who have no schedule. Several threads may poll then.
    pub fn set_poll_time(&self, ns: u64) {
        self.state().poll_ns = ns;
    }

    /// What gets through at a port from now on. What is on its way there is lost as well.
    pub fn cut(&self, port: Port, cut: Cut) {
        self.state().cuts.insert(port, cut);
    }

    /// A device of its own accord takes the queue pairs of a port to ERROR.
    pub fn break_port(&self, port: Port) {
        let mut state = self.state();
        for number in 0..state.qps.len() {
            if state.qp_ref(number).port == port {
                state.begin_to_fail(number, WcStatus::LocQpOpErr, "the device has failed");
            }
        }
    }

    /// After so many batches of requests the device of a port takes only a part of one, and its queue pair to ERROR.
    pub fn refuse(&self, port: Port, after: u64) {
        self.state().refusals.insert(port, after);
    }

    /// The device of a port reports nothing from now on, whatever becomes of its requests.
    pub fn silence(&self, port: Port) {
        self.state().silent.insert(port);
    }

    /// Whether nothing is wrong on a rail: no cut, no queue pair that has failed or is about to, no device that will refuse, and none whose packets were lost.
    pub fn is_sound(&self, rail: usize) -> bool {
        let state = self.state();
        let is_cut = |(port, cut): (&Port, &Cut)| port.rail == rail && *cut != Cut::default();
        let refuses = state.refusals.keys().any(|port| port.rail == rail);
        !refuses && !state.cuts.iter().any(is_cut) && state.qps.iter().filter(|qp| qp.port.rail == rail).all(QueuePairState::is_sound)
    }

    /// From now on nothing may land there.
    pub fn guard(&self, addr: usize, len: usize) {
        self.state().guarded.insert(addr as u64, (addr + len) as u64);
    }

    /// It may again.
    pub fn unguard(&self, addr: usize) {
        self.state().guarded.remove(&(addr as u64));
    }

    /// Hosts that something has come for since the last time.
    pub fn take_reached(&self) -> BTreeSet<usize> {
        std::mem::take(&mut self.state().reached)
    }

    /// A number that stands for all that has happened.
    pub fn trace(&self) -> u64 {
        self.state().trace
    }

    /// Puts something of the caller's into it.
    pub fn note(&self, what: u64) {
        self.state().note(what);
    }
}

impl Drop for State {
    fn drop(&mut self) {
        clock::set_virtual(None);
    }
}

impl State {
    pub(super) fn add_qp(&mut self, port: Port, caps: &QpCaps, stats: RailStats) -> usize {
        let (number, psn) = (self.qps.len(), self.random.draw() as u32 & 0xff_ffff);
        self.qps.push(QueuePairState::new(port, caps, stats, number, psn));
        number
    }

    fn advance(&mut self, until: u64) {
        while let Some(next) = self.scheduled.peek()
            && next.time <= until
        {
            let Some(Scheduled { time, place, .. }) = self.scheduled.pop() else { break };
            self.now = self.now.max(time);
            clock::set_virtual(Some(self.now));
            self.free.push(place);
            if let Some(event) = self.events[place].take() {
                self.happen(event);
            }
        }
        self.now = self.now.max(until);
        clock::set_virtual(Some(self.now));
    }

    /// A completion queue is polled.
    pub(super) fn polled(&mut self) {
        if self.poll_ns > 0 {
            self.advance(self.now + self.poll_ns);
        }
    }

    pub(super) fn qps(&self) -> usize {
        self.qps.len()
    }

    /// Numbers are given out by `add_qp` alone, or checked by who takes them from an endpoint.
    pub(super) fn qp(&mut self, number: usize) -> &mut QueuePairState {
        &mut self.qps[number]
    }

    pub(super) fn qp_ref(&self, number: usize) -> &QueuePairState {
        &self.qps[number]
    }

    pub(super) fn at(&mut self, after: u64, event: Event) {
        self.order += 1;
        let place = self.free.pop().unwrap_or_else(|| {
            self.events.push(None);
            self.events.len() - 1
        });
        self.events[place] = Some(event);
        self.scheduled.push(Scheduled { time: self.now + after, order: self.order, place });
    }

    pub(super) fn is_silent(&self, port: Port) -> bool {
        self.silent.contains(&port)
    }

    /// How many of so many requests the device of a queue pair takes.
    pub(super) fn taken(&mut self, number: usize, requests: usize) -> usize {
        let port = self.qp_ref(number).port;
        match self.refusals.get_mut(&port) {
            None => requests,
            Some(0) => {
                self.refusals.remove(&port);
                self.random.below(requests as u64) as usize
            }
            Some(before) => {
                *before -= 1;
                requests
            }
        }
    }

    fn note(&mut self, what: u64) {
        self.trace = (self.trace.rotate_left(5) ^ what).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn happen(&mut self, event: Event) {
        let (number, kind) = match &event {
            Event::Packet(packet) => (packet.to, (packet.to as u64) << 32 | u64::from(packet.psn)),
            Event::Timer(number) => (*number, *number as u64 | 1 << 60),
            Event::Closed { number, .. } => (*number, *number as u64 | 3 << 60),
            Event::Refused { number, .. } => (*number, *number as u64 | 4 << 60),
        };
        self.note(self.now ^ kind);
        let port = self.qp_ref(number).port;
        let has_come = match event {
            Event::Packet(packet) => {
                if !self.cuts.get(&port).is_some_and(|cut| cut.back) {
                    self.arrived(packet);
                }
                true
            }
            Event::Timer(number) => self.timer(number),
            Event::Closed { number, generation } => {
                self.closed(number, generation);
                true
            }
            Event::Refused { number, generation, fault } => {
                self.noticed(number, generation, fault);
                true
            }
        };
        if has_come {
            self.reached.insert(port.host);
        }
    }

    /// A packet leaves a queue pair.
    pub(super) fn send(&mut self, from: usize, packet: Packet) {
        let port = self.qp_ref(from).port;
        if self.cuts.get(&port).is_some_and(|cut| cut.out) {
            return;
        }
        let slow = self.random.one_in(SLOW_ONE_IN);
        let takes = LATENCY_NS + self.random.below(if slow { SLOW_NS } else { JITTER_NS });
        if self.random.one_in(GHOST_ONE_IN) {
            let late = takes + self.random.below(GHOST_NS);
            self.at(late, Event::Packet(packet.clone()));
        }
        let now = self.now;
        let qp = self.qp(from);
        qp.last_arrival = (qp.last_arrival + 1).max(now + takes);
        let after = qp.last_arrival - now;
        self.at(after, Event::Packet(packet));
    }

    /// Bytes have landed.
    pub(super) fn landed(&mut self, addr: u64, len: usize) {
        let end = addr + len as u64;
        let before = self.guarded.range(..end).next_back();
        if let Some((start, to)) = before.filter(|(_, to)| **to > addr) {
            let text = format!("at {} ns {len} bytes landed at {addr:#x}, in memory that is done with: {start:#x} to {to:#x}", self.now);
            self.violation.get_or_insert(text);
        }
    }
}
