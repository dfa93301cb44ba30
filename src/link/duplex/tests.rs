//! Two ends in one process, driven in turn by one thread.

use std::sync::Arc;

use proptest::prelude::*;

mod failover;

use super::control::NO_REQUEST;
use super::*;
use crate::base::clock;
use crate::base::config::SoftWire;
use crate::base::mem::Pages;
use crate::base::process::Process;
use crate::base::stats::{self, CommKind, WaitCause};
use crate::fabric::{self, Access, MemoryRegion, Opcode, Payload, QpState};
use crate::link::limits::CONTROLS;
use crate::link::queue_pairs::Wr;

const WIRES: [SoftWire; 2] = [SoftWire::Shm, SoftWire::Tcp];

struct End {
    link: Duplex,
    events: Vec<Event>,
}

/// Two connected ends and memory that both use.
struct World {
    a: End,
    b: End,
    regions: Vec<MemoryRegion>,
    lkeys: [u32; MAX_RAILS],
    pages: Pages,
}

const MEMORY: usize = 64 << 20;

fn config(wire: SoftWire) -> Config {
    Config { socket_ifname: "=lo".into(), soft_wire: wire, stats: false, ..Config::default() }
}

fn rails(config: &Arc<Config>, n: usize) -> Vec<(fabric::Domain, fabric::Capabilities)> {
    let device = fabric::devices(config).unwrap().remove(0);
    (0..n).map(|_| (device.open().unwrap(), device.capabilities())).collect()
}

fn unconnected(config: &Config, rails: &[(fabric::Domain, fabric::Capabilities)]) -> Unconnected {
    let stats = stats::comm(CommKind::Pair, "lo");
    let devices: Vec<RailDevice> = rails
        .iter()
        .enumerate()
        .map(|(i, (domain, capabilities))| RailDevice { domain: domain.clone(), capabilities: *capabilities, stats: stats.rail(i) })
        .collect();
    Unconnected::new(&devices, "soft", "lo", config, stats, true).unwrap()
}

impl World {
    fn new(config: Config, n: usize) -> World {
        let config = Arc::new(config);
        let rails = rails(&config, n);
        let (mut a, mut b) = (unconnected(&config, &rails), unconnected(&config, &rails));
        let (to_a, to_b) = (a.address(), b.address());
        // As they travel.
        let [to_a, to_b] = [to_a, to_b].map(|address| Address::decode(&address.encode()).unwrap().0);
        let end = |link: Duplex| End { link, events: Vec::new() };
        let (a, b) = (a.connect(&to_b, "a to", &config).unwrap(), b.connect(&to_a, "b to", &config).unwrap());
        let pages = Pages::new(MEMORY).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let regions: Vec<MemoryRegion> = rails.iter().map(|rail| rail.0.register(pages.to_register(), access).unwrap()).collect();
        let lkeys = std::array::from_fn(|rail| regions.get(rail).map_or(0, MemoryRegion::lkey));
        World { a: end(a), b: end(b), regions, lkeys, pages }
    }

    fn poll(&mut self) {
        for end in [&mut self.a, &mut self.b] {
            end.link.poll(WaitCause::Fabric);
            while let Some(event) = end.link.next_event() {
                end.events.push(event);
            }
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut World) -> bool) {
        let end = clock::now() + 60_000_000_000;
        while !done(self) {
            assert!(clock::now() < end, "{what}: nothing within 60 s");
            self.poll();
        }
    }

    /// What the sender is told of `len` bytes at `at` behind this slot.
    fn target(&self, sequence: u64, at: usize, len: usize) -> Target {
        let rkeys = std::array::from_fn(|rail| self.regions.get(rail).map_or(0, MemoryRegion::rkey));
        Target { sequence, addr: (self.pages.addr() + at) as u64, len: len as u64, rkeys }
    }

    /// Whether it was posted.
    fn write(&mut self, to: &Target, at: usize, len: usize) -> Option<RequestId> {
        self.a.link.write(to, self.pages.addr() + at, len, &self.lkeys).unwrap()
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.pages.read(at, &mut bytes);
        bytes
    }
}

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        })
        .collect()
}

fn numbered(n: u64) -> [u8; CONTROL_SIZE] {
    let mut bytes = [n as u8; CONTROL_SIZE];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    bytes
}

#[test]
fn a_message_of_any_size_is_whole_and_tells_its_size() {
    const THERE: usize = MEMORY / 2;
    for wire in WIRES {
        for n in [1, 3] {
            let mut world = World::new(Config { split_min: 4096, ..config(wire) }, n);
            for (seed, len) in [0, 1, 64, 4095, 4096, 100_000, (8 << 20) - 1, 8 << 20, (20 << 20) + 3].into_iter().enumerate() {
                let expected = pattern(len, seed as u64);
                world.pages.write(0, &expected);
                world.pages.write(THERE, &vec![0; len + 1]);
                let sequence = world.b.link.open(len as u64 + 7).unwrap();
                let to = world.target(sequence, THERE, len + 7);
                let id = world.write(&to, 0, len).unwrap();
                world.until("both events", |world| !world.a.events.is_empty() && !world.b.events.is_empty());
                assert_eq!(world.a.events.drain(..).collect::<Vec<_>>(), [Event::Sent(id)]);
                assert_eq!(world.b.events.drain(..).collect::<Vec<_>>(), [Event::Received { sequence, value: len as u64 }]);
                assert!(world.bytes(THERE, len) == expected && world.bytes(THERE + len, 1) == [0], "{len} bytes over {n} rails");
            }
        }
    }
}

#[test]
fn control_messages_come_in_order_and_wait_for_their_reader() {
    for wire in WIRES {
        let mut world = World::new(config(wire), 1);
        world.until("queue pairs", |world| world.a.link.poll_connected().unwrap() && world.b.link.poll_connected().unwrap());
        let mut sent = 0u64;
        // Nobody reads: as many go out as have a place.
        for _ in 0..10_000 {
            world.a.link.poll(WaitCause::Fabric);
            sent += u64::from(world.a.link.send_control(&numbered(sent)).unwrap());
        }
        assert_eq!(sent, CONTROLS as u64 - 1, "one place is kept");
        // One way only, over several wraps of the counters, and then both ways.
        let (mut heard, mut back) = (0u64, 0u64);
        while heard < 140_000 {
            sent += u64::from(world.a.link.send_control(&numbered(sent)).unwrap());
            if heard > 130_000 {
                back += u64::from(world.b.link.send_control(&numbered(back)).unwrap());
            }
            world.poll();
            for event in world.b.events.drain(..) {
                assert_eq!(event, Event::Control(numbered(heard)));
                heard += 1;
            }
        }
        world.until("all that was said", |world| world.a.events.len() as u64 == back);
        let said: Vec<Event> = (0..back).map(|n| Event::Control(numbered(n))).collect();
        assert!(back > 100 && world.a.events == said);
    }
}

#[test]
fn there_are_255_slots_and_each_is_used_again() {
    let mut world = World::new(config(SoftWire::Shm), 1);
    let mut seen = std::collections::HashSet::new();
    for round in 0..3 {
        let open: Vec<u64> = (0..255).map(|_| world.b.link.open(8).unwrap()).collect();
        assert_eq!(world.b.link.open(8), None);
        assert!(open.iter().all(|sequence| sequence % 256 != 255 && seen.insert(*sequence)));
        for sequence in &open {
            let to = world.target(*sequence, MEMORY / 2, 8);
            world.until("room", |world| world.write(&to, 0, 8).is_some());
        }
        world.until("all", |world| world.b.events.len() == 255);
        let got: Vec<u64> = world
            .b
            .events
            .drain(..)
            .map(|event| match event {
                Event::Received { sequence, value: 8 } => sequence,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(got, open, "round {round}");
    }
}

#[test]
fn what_is_written_to_a_standing_slot_comes_in_order_with_control_messages() {
    for wire in WIRES {
        let mut world = World::new(config(wire), 2);
        let standing = world.b.link.open_standing().unwrap();
        let to = world.target(standing, MEMORY / 2, 4096);
        let (mut sent, mut said) = (0u32, 0u64);
        let mut next = (0u64, 0u64);
        while next.0 < 3000 {
            let World { a, lkeys, pages, .. } = &mut world;
            let at = u64::from(sent % 500) * 8;
            if a.link.notify(&to, at, sent, pages.addr(), 8, lkeys).unwrap().is_some() {
                sent += 1;
                // One control message after each ten, if there is a place for it.
                if sent.is_multiple_of(10) && a.link.send_control(&numbered(said * 0x1_0000_0000 + u64::from(sent))).unwrap() {
                    said += 1;
                }
            }
            world.poll();
            world.a.events.clear();
            for event in world.b.events.drain(..) {
                match event {
                    Event::Received { sequence, value } => {
                        assert_eq!((sequence, value), (standing, next.0));
                        next.0 += 1;
                    }
                    Event::Control(bytes) => {
                        let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                        assert_eq!((number >> 32, number & 0xffff_ffff), (next.1, next.0), "behind the notifications before it");
                        next.1 += 1;
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        assert!(next.1 > 0);
        world.b.link.close(standing);
        let again: Vec<u64> = (0..255).map(|_| world.b.link.open(1).unwrap()).collect();
        assert!(!again.contains(&standing));
    }
}

#[test]
fn what_cannot_be_sent_is_refused_with_the_sizes() {
    let mut world = World::new(config(SoftWire::Shm), 1);
    let sequence = world.b.link.open(100).unwrap();
    let to = world.target(sequence, 0, 100);
    let error = world.a.link.write(&to, world.pages.addr(), 101, &world.lkeys).unwrap_err().to_string();
    assert!(error.contains("101 bytes into 100 bytes of the peer's memory"), "{error}");
    let error = world.a.link.notify(&to, 60, 0, world.pages.addr(), 41, &world.lkeys).unwrap_err().to_string();
    assert!(error.contains("41 bytes into 40 bytes"), "{error}");
    let error = world.a.link.notify(&to, 101, 0, world.pages.addr(), 0, &world.lkeys).unwrap_err().to_string();
    assert!(error.contains("offset 101 of 100 bytes"), "{error}");
    let error = world.a.link.notify(&to, 0, 1 << 23, world.pages.addr(), 0, &world.lkeys).unwrap_err().to_string();
    assert!(error.contains("8388608; at most 8388607"), "{error}");
    let long = Target { len: u64::MAX, addr: 0, ..to };
    let error = world.a.link.write(&long, world.pages.addr(), MAX_MESSAGE + 1, &world.lkeys).unwrap_err().to_string();
    assert!(error.contains("1073741825 bytes; a message has at most 1073741824"), "{error}");
    let past = Target { addr: u64::MAX - 8, ..to };
    assert!(world.a.link.write(&past, world.pages.addr(), 10, &world.lkeys).is_err());
    // It goes on.
    let id = world.write(&to, 0, 100);
    assert!(id.is_some());
    world.until("the message", |world| !world.b.events.is_empty());
}

#[test]
fn an_end_on_another_fabric_is_refused_by_name() {
    let config = Arc::new(config(SoftWire::Shm));
    let rails = rails(&config, 1);
    let remote = Address { fabric: "verbs".into(), ..unconnected(&config, &rails).address() };
    let error = unconnected(&config, &rails).connect(&remote, "x", &config).err().unwrap().to_string();
    assert!(error.contains("is on fabric verbs, this side on soft; set RAILHEAD_FABRIC alike on all ranks"), "{error}");
}

#[test]
fn a_peer_that_goes_fails_the_link() {
    for wire in WIRES {
        let mut world = World::new(config(wire), 1);
        world.until("queue pairs", |world| world.a.link.poll_connected().unwrap() && world.b.link.poll_connected().unwrap());
        let sequence = world.b.link.open(8).unwrap();
        let to = world.target(sequence, 0, 8);
        let World { mut a, b, lkeys, pages, .. } = world;
        drop(b);
        let end = clock::now() + 60_000_000_000;
        while a.link.check().is_ok() {
            assert!(clock::now() < end, "nothing within 60 s");
            a.link.poll(WaitCause::PeerNoSend);
        }
        let refused = a.link.write(&to, pages.addr(), 8, &lkeys);
        assert!(matches!(refused, Err(Error::Remote(_))), "{refused:?}");
        assert!(a.link.send_control(&[0; CONTROL_SIZE]).is_err());
    }
}

#[test]
fn a_wait_goes_on_when_a_probe_is_answered_and_ends_with_a_message() {
    for wire in WIRES {
        let mut world = World::new(config(wire), 1);
        world.until("queue pairs", |world| world.a.link.poll_connected().unwrap() && world.b.link.poll_connected().unwrap());
        let wait = |world: &World| world.b.link.stats().wait_age(clock::now());
        let link = &mut world.b.link;
        // As `until` polls for.
        assert_eq!(link.arm(Some(WaitCause::Fabric.into()), |_| {}).unwrap(), None);
        let before = clock::now();
        link.link.probe_for_test();
        world.until("an answer", |world| world.b.link.link.answered_for_test());
        let passed = clock::now() - before;
        assert!(wait(&world).is_some_and(|age| age >= passed), "{:?} after {passed} ns", wait(&world));
        assert!(world.a.link.send_control(&[1; CONTROL_SIZE]).unwrap());
        world.until("a message", |world| !world.b.events.is_empty());
        assert_eq!(wait(&world), None);
    }
}

/// Of RAILHEAD_PEER_TIMEOUT_S, whether or not anybody has said that he waits.
#[test]
fn a_peer_that_sends_is_not_given_up() {
    for waits in [Wait::NONE, WaitCause::PeerNoSend.into()] {
        let mut world = World::new(config(SoftWire::Shm), 1);
        world.until("queue pairs", |world| world.a.link.poll_connected().unwrap() && world.b.link.poll_connected().unwrap());
        world.b.link.link.set_peer_timeout_for_test(60_000_000);
        let (began, mut sent) = (clock::now(), 0);
        while clock::now() < began + 150_000_000 {
            sent += usize::from(world.a.link.send_control(&[1; CONTROL_SIZE]).unwrap());
            world.until("a message", |world| world.b.events.len() == sent);
            world.b.link.arm(Some(waits), |_| {}).unwrap();
            world.b.link.check().unwrap();
        }
        // Once it sends nothing, it is.
        world.until("its end", |world| {
            let _ = world.b.link.arm(Some(waits), |_| {});
            world.b.link.check().is_err()
        });
    }
}

/// How long that takes is for whoever waits for it to know, and what comes after is another wait.
#[test]
fn the_time_that_a_link_takes_to_connect_is_not_silence() {
    const TIMEOUT_NS: u64 = 60_000_000;
    let mut world = World::new(config(SoftWire::Shm), 1);
    world.a.link.link.set_peer_timeout_for_test(TIMEOUT_NS);
    let pass = |world: &mut World, connect: bool| {
        let end = clock::now() + 2 * TIMEOUT_NS;
        while clock::now() < end {
            assert!(!connect || !world.a.link.poll_connected().unwrap());
        }
    };
    pass(&mut world, true);
    world.until("queue pairs", |world| world.a.link.poll_connected().unwrap() && world.b.link.poll_connected().unwrap());
    pass(&mut world, false);
    world.a.link.arm(Some(WaitCause::PeerNoSend.into()), |_| {}).unwrap();
    world.a.link.check().unwrap();
}

#[test]
fn silence_while_nobody_waits_is_no_reason_to_give_up() {
    const TIMEOUT_NS: u64 = 60_000_000;
    let mut world = World::new(config(SoftWire::Shm), 1);
    world.until("queue pairs", |world| world.a.link.poll_connected().unwrap() && world.b.link.poll_connected().unwrap());
    world.a.link.link.set_peer_timeout_for_test(TIMEOUT_NS);
    world.a.link.set_waited_for(false);
    // One of them looks.
    for _ in 0..64 {
        world.a.link.poll(Wait::NONE);
    }
    let end = clock::now() + 2 * TIMEOUT_NS;
    while clock::now() < end {}
    world.a.link.set_waited_for(true);
    world.a.link.arm(Some(WaitCause::PeerNoSend.into()), |_| {}).unwrap();
    world.a.link.check().unwrap();
}

/// Also by whoever is polled meanwhile by others, who wait for nothing.
#[test]
fn the_end_of_a_process_is_noticed_while_a_link_connects() {
    let mut world = World::new(config(SoftWire::Shm), 1);
    let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    world.a.link.link.set_process_for_test(&Process::find(child.id() as i32).unwrap());
    child.kill().unwrap();
    child.wait().unwrap();
    let end = clock::now() + 20_000_000_000;
    let error = loop {
        match world.a.link.poll_connected() {
            Ok(false) => assert!(clock::now() < end, "nothing within 20 s"),
            Ok(true) => panic!("it is connected"),
            Err(error) => break error.to_string(),
        }
        for _ in 0..64 {
            world.a.link.set_waited_for(false);
            world.a.link.poll(Wait::NONE);
        }
        std::thread::yield_now();
    };
    assert!(error.contains("its process died"), "{error}");
}

/// The system takes a dying process' memory before its end can be seen, so that its device refuses a WRITE first.
#[test]
fn a_process_that_dies_is_the_reason_though_its_memory_goes_first() {
    loop {
        let mut world = World::new(config(SoftWire::Tcp), 1);
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        world.a.link.link.set_process_for_test(&Process::find(child.id() as i32).unwrap());
        let sequence = world.b.link.open(4096).unwrap();
        let gone = Target { rkeys: [0; MAX_RAILS], ..world.target(sequence, 0, 4096) };
        world.write(&gone, MEMORY / 2, 4096).unwrap();
        world.until("a refused WRITE", |world| world.a.link.link.has_fault());
        // All receives are flushed, and then it looks for a reason.
        let looked = clock::now();
        (0..20).for_each(|_| world.poll());
        let (early, took) = (world.a.link.check(), clock::now() - looked);
        child.kill().unwrap();
        child.wait().unwrap();
        if took > 40_000_000 {
            // This thread was away, and a reason is not waited for without end.
            continue;
        }
        early.expect("it may be the end of the process");
        world.until("a reason", |world| world.a.link.check().is_err());
        let error = world.a.link.check().unwrap_err().to_string();
        assert!(error.contains("its process died") && error.contains("remote access error"), "{error}");
        return;
    }
}

/// Behind what is flushed there may be messages on other queue pairs.
#[test]
fn a_poll_that_finds_what_is_flushed_has_found_something() {
    for wire in WIRES {
        let mut world = World::new(config(wire), 1);
        world.until("queue pairs", |world| world.a.link.poll_connected().unwrap() && world.b.link.poll_connected().unwrap());
        let World { a, mut b, .. } = world;
        drop(a);
        let (end, mut found) = (clock::now() + 20_000_000_000, 0);
        while b.link.check().is_ok() {
            assert!(clock::now() < end, "{wire:?}: nothing within 20 s");
            found += usize::from(b.link.poll(WaitCause::PeerNoSend));
        }
        assert!(found * BATCH * 4 >= Side::Both.recv_depth(), "{wire:?}: {found} polls have found something");
    }
}

/// Though the receiver has learned of it by a post.
#[test]
fn what_a_peer_has_sent_before_it_went_is_received() {
    const COUNT: usize = 200;
    const LEN: usize = 100;
    for wire in WIRES {
        let mut world = World::new(Config { qps_per_rail: 4, ..config(wire) }, 1);
        let mut sent = 0;
        for _ in 0..COUNT {
            let sequence = world.b.link.open(LEN as u64).unwrap();
            let to = world.target(sequence, MEMORY / 2, LEN);
            while world.write(&to, 0, LEN).is_none() {
                world.a.link.poll(WaitCause::Fabric);
                world.b.link.serve_for_test();
                sent += std::iter::from_fn(|| world.a.link.next_event()).count();
            }
        }
        let end = clock::now() + 20_000_000_000;
        while sent < COUNT {
            assert!(clock::now() < end, "{wire:?}: not all was sent");
            world.a.link.poll(WaitCause::Fabric);
            world.b.link.serve_for_test();
            sent += std::iter::from_fn(|| world.a.link.next_event()).count();
        }
        let World { a, mut b, .. } = world;
        drop(a);
        while b.link.link.qps.why(WrKind::Control, 0).is_none() {
            assert!(clock::now() < end, "{wire:?}: its end is not noticed");
            let _ = b.link.link.qps.poll_connected();
        }
        // As a NIC says; the software fabric flushes what is posted.
        b.link.link.post_failed(WrKind::Control, 0, PostError::State(QpState::Error));
        assert!(!b.link.send_control(&numbered(0)).unwrap(), "{wire:?}: it takes a post");
        let mut received = 0;
        while b.link.check().is_ok() {
            assert!(clock::now() < end, "{wire:?}: its end does not count");
            b.link.poll(WaitCause::PeerNoSend);
            received += std::iter::from_fn(|| b.link.next_event()).count();
        }
        assert_eq!(received, COUNT, "{wire:?}");
    }
}

/// A peer that writes any immediates fails the link at worst.
fn hostile(imms: &[u32]) {
    let mut world = World::new(config(SoftWire::Shm), 1);
    let once: Vec<u64> = (0..3).map(|_| world.b.link.open(1000).unwrap()).collect();
    world.b.link.open_standing().unwrap();
    for imm in imms {
        let link = &mut world.a.link.link;
        let wr = Wr { opcode: Opcode::WriteWithImm, payload: Payload::Inline(&[]), remote: link.qps.remote(0, 0), imm: *imm };
        let _ = link.qps.post_send(0, [wr], WrKind::Control, NO_REQUEST, false);
        world.poll();
    }
    world.until("what was written", |world| {
        let link = &mut world.a.link.link;
        let nothing = Wr { opcode: Opcode::Write, payload: Payload::Inline(&[]), remote: link.qps.remote(0, 0), imm: 0 };
        world.b.link.check().is_err() || (link.qps.post_send(0, [nothing], WrKind::Control, NO_REQUEST, true).is_err()) || {
            world.poll();
            !world.a.link.link.qps.has_unsignaled(0)
        }
    });
    for event in &world.b.events {
        match event {
            Event::Received { sequence, value } => assert!(*value <= 1000 || !once.contains(sequence)),
            Event::Control(_) | Event::Sent(_) => {}
        }
    }
    if let Err(error) = world.b.link.check() {
        assert!(error.to_string().contains("the peer sent"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn any_immediates_are_taken_or_refused(imms in proptest::collection::vec(prop_oneof![
        any::<u32>(),
        (0u32..4, 0u32..2, 0u32..70_000).prop_map(|(slot, kind, value)| slot << 24 | kind << 23 | value),
        (0u32..140_000).prop_map(|value| 255 << 24 | value),
    ], 1..40)) {
        hostile(&imms);
    }
}
