//! Rails that fail and come back under a link both ways.

use std::collections::VecDeque;

use super::*;
use crate::base::rand;
use crate::base::stats::RailCounter;

const PLACES: usize = 24;
const ROOM: usize = 40_000;
/// Where the standing slot's memory begins, of as many notifications as are outstanding at most.
const STANDING: usize = PLACES * ROOM;
const NOTES: u64 = 8;
const NOTE: usize = 100;
/// Where one direction's memory begins at the sender, and at the receiver.
const FROM: [usize; 2] = [0, MEMORY / 4];
const TO: [usize; 2] = [MEMORY / 2, MEMORY / 4 * 3];

/// What goes from one end to the other.
#[derive(Default)]
struct Way {
    /// Messages that the receiver waits for: slot, place, length and seed; and whether the sender has begun.
    open: Vec<(Target, usize, usize, u64)>,
    unsent: VecDeque<usize>,
    sending: Vec<(RequestId, usize, usize)>,
    free: Vec<usize>,
    standing: u64,
    /// What is ordered: sent and received. Notifications have odd numbers.
    ordered: [u64; 2],
    /// Notifications whose memory is the link's.
    notes: Vec<RequestId>,
    received: u64,
}

fn ends(world: &mut World) -> [&mut Duplex; 2] {
    [&mut world.a.link, &mut world.b.link]
}

/// Of any rail, as either end has counted them.
fn fewest_failures(world: &mut World) -> u64 {
    let counts = ends(world).map(|link| [0, 1].map(|rail| link.stats().rail(rail).get(RailCounter::Failures)));
    counts.as_flattened().iter().copied().min().unwrap_or(0)
}

fn describe(world: &mut World) -> String {
    let [a, b] = ends(world);
    format!("{}\n{}", a.link_for_test().rails_for_test(), b.link_for_test().rails_for_test())
}

/// One step of a direction: `from` is the end that sends. Whether something has moved.
fn step(world: &mut World, way: &mut Way, from: usize, seed: &mut u64, more: bool) -> bool {
    let mut moved = false;
    let place_of = |place: usize| [FROM[from] + place * ROOM, TO[from] + place * ROOM];
    if let (true, Some(place)) = (more, way.free.pop()) {
        *seed += 1;
        // Some are striped.
        let len = (*seed * 7919 % if seed.is_multiple_of(8) { ROOM as u64 } else { 600 }) as usize;
        let sequence = ends(world)[1 - from].open(ROOM as u64).unwrap();
        let [at, to] = place_of(place);
        world.pages.write(at, &pattern(len, *seed));
        world.pages.write(to, &vec![0xee; len + 1]);
        way.open.push((world.target(sequence, to, ROOM), place, len, *seed));
        way.unsent.push_back(place);
        moved = true;
    }
    let (addr, lkeys) = (world.pages.addr(), world.lkeys);
    while let Some(place) = way.unsent.front() {
        let &(to, _, len, _) = way.open.iter().find(|open| open.1 == *place).unwrap();
        let Some(id) = ends(world)[from].write(&to, addr + place_of(*place)[0], len, &lkeys).unwrap() else { break };
        way.sending.push((id, *place, len));
        way.unsent.pop_front();
        moved = true;
    }
    while more && way.ordered[0] - way.ordered[1] < NOTES {
        let number = way.ordered[0];
        if number.is_multiple_of(2) {
            if !ends(world)[from].send_control(&numbered(number)).unwrap() {
                break;
            }
        } else {
            let at = STANDING + (number % NOTES) as usize * NOTE;
            if way.notes.len() == NOTES as usize {
                break;
            }
            world.pages.write(FROM[from] + at, &pattern(NOTE, number));
            let to = world.target(way.standing, TO[from] + STANDING, NOTES as usize * NOTE);
            let offset = (at - STANDING) as u64;
            match ends(world)[from].notify(&to, offset, number as u32, addr + FROM[from] + at, NOTE, &lkeys).unwrap() {
                Some(id) => way.notes.push(id),
                None => break,
            }
        }
        way.ordered[0] += 1;
        moved = true;
    }
    moved
}

/// What has happened at an end.
fn take(world: &mut World, ways: &mut [Way; 2], end: usize) -> bool {
    let mut moved = false;
    while let Some(event) = ends(world)[end].next_event() {
        moved = true;
        match event {
            Event::Sent(id) => {
                let way = &mut ways[end];
                match way.sending.iter().position(|sending| sending.0 == id) {
                    // The memory is the caller's again: what is still read of it comes as something else.
                    Some(at) => {
                        let (_, place, len) = way.sending.swap_remove(at);
                        world.pages.write(FROM[end] + place * ROOM, &vec![0xdd; len]);
                        way.done_with(place);
                    }
                    None => {
                        let at = way.notes.iter().position(|note| *note == id).expect("a message that was sent");
                        way.notes.swap_remove(at);
                    }
                }
            }
            Event::Received { sequence, value } if sequence == ways[1 - end].standing => {
                let way = &mut ways[1 - end];
                assert_eq!((value, value % 2), (way.ordered[1], 1), "out of order");
                let at = TO[1 - end] + STANDING + (value % NOTES) as usize * NOTE;
                assert!(world.bytes(at, NOTE) == pattern(NOTE, value), "notification {value}");
                way.ordered[1] += 1;
            }
            Event::Received { sequence, value } => {
                let way = &mut ways[1 - end];
                let at = way.open.iter().position(|open| open.0.sequence == sequence).expect("a message that was asked for");
                let (_, place, len, seed) = way.open.swap_remove(at);
                let to = TO[1 - end] + place * ROOM;
                assert_eq!(value, len as u64);
                let bytes = world.bytes(to, len + 1);
                assert!(bytes[..len] == pattern(len, seed) && bytes[len] == 0xee, "message {seed} of {len} bytes");
                way.received += 1;
                way.done_with(place);
            }
            Event::Control(bytes) => {
                let way = &mut ways[1 - end];
                assert_eq!(bytes, numbered(way.ordered[1]), "out of order");
                way.ordered[1] += 1;
            }
        }
    }
    moved
}

impl Way {
    /// A place may be used again, if it is free at the other end, too.
    fn done_with(&mut self, place: usize) {
        if !self.open.iter().any(|open| open.1 == place) && !self.sending.iter().any(|sending| sending.1 == place) {
            self.free.insert(0, place);
        }
    }

    fn is_idle(&self) -> bool {
        self.open.is_empty() && self.sending.is_empty() && self.notes.is_empty() && self.ordered[0] == self.ordered[1]
    }
}

#[test]
fn rails_fail_at_random_under_messages_both_ways() {
    for (wire, qps_per_rail) in [(SoftWire::Tcp, 1), (SoftWire::Shm, 1), (SoftWire::Tcp, 3), (SoftWire::Shm, 2)] {
        let mut random = rand::u64().unwrap() | 1;
        println!("seed {random:#x} on {wire:?}");
        let mut below = move |n: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            (random >> 11) % n
        };
        let mut world = World::new(Config { split_min: 4096, qps_per_rail, ..config(wire) }, 2);
        let mut ways = [0, 1].map(|_| Way { free: (0..PLACES).collect(), ..Way::default() });
        for (end, way) in ways.iter_mut().enumerate() {
            way.standing = ends(&mut world)[1 - end].open_standing().unwrap();
        }
        ends(&mut world).into_iter().for_each(|link| link.link_for_test().retry_rails_at_once_for_test());
        let (mut failures, mut seed, mut moved, mut failed_at) = (0, 0, clock::now(), clock::now());
        loop {
            // Each rail more than ten times, as either end counts: of those that fail at once, some are one.
            let more = failures < 100 || fewest_failures(&mut world) <= 10;
            if !more && ways.iter().all(Way::is_idle) {
                break;
            }
            let mut any = false;
            for (end, way) in ways.iter_mut().enumerate() {
                any |= step(&mut world, way, end, &mut seed, more);
            }
            for end in 0..2 {
                if below(3) > 0 {
                    ends(&mut world)[end].poll(WaitCause::Fabric);
                    any |= take(&mut world, &mut ways, end);
                }
            }
            let rail = below(2) as usize;
            // And mostly the one that fails, too.
            let all = below(10) > 0;
            let is_sound = |link: &mut Link| {
                let mut rails = (0..2).filter(|it| all || *it != rail);
                rails.all(|it| link.is_live_for_test(it) && link.qps.broken(|other| other == it).is_none())
            };
            if more && below(10) == 0 && ends(&mut world).into_iter().all(|link| is_sound(link.link_for_test())) {
                ends(&mut world)[below(2) as usize].link_for_test().qps.fail_rail(rail);
                failures += 1;
                failed_at = clock::now();
            }
            if any {
                moved = clock::now();
            }
            let stands = clock::now() - if more { moved.min(failed_at) } else { moved };
            assert!(stands < 60_000_000_000, "after {failures} failures nothing moves, or a rail is not back:\n{}", describe(&mut world));
        }
        let received = ways.iter().map(|way| way.received).sum::<u64>();
        assert!(received > 200, "{received} messages between {failures} failures");
    }
}

/// Nothing but control messages, of which none is signaled where the peer is asked for a sign of life in between.
#[test]
fn what_is_remembered_of_control_messages_is_bounded() {
    for wire in WIRES {
        let mut world = World::new(config(wire), 2);
        for number in 0..2000 {
            world.until("a control message", |world| world.a.link.send_control(&numbered(number)).unwrap());
            if number % 20 == 0 {
                world.a.link.link_for_test().probe_for_test();
            }
            world.until("its arrival", |world| world.b.events.len() as u64 == number + 1);
        }
        let most = world.a.link.link_for_test().remembered_for_test();
        assert!(most <= 64, "{most} are remembered");
    }
}

#[test]
fn the_last_rail_takes_the_link_with_it() {
    for wire in WIRES {
        let mut world = World::new(config(wire), 2);
        ends(&mut world)[0].link_for_test().qps.fail_rail(1);
        world.until("the first", |world| !world.b.link.link_for_test().is_live_for_test(1));
        (0..2).for_each(|rail| ends(&mut world)[0].link_for_test().qps.fail_rail(rail));
        world.until("the end", |world| world.a.link.check().is_err() && world.b.link.check().is_err());
    }
}

#[test]
fn without_failover_at_one_end_a_link_fails_with_its_rail() {
    for wire in WIRES {
        for failover in [[true, false], [false, true]] {
            let configs = failover.map(|failover| Arc::new(Config { failover, ..config(wire) }));
            let rails = rails(&configs[0], 2);
            let [mut a, mut b] = configs.clone().map(|config| unconnected(&config, &rails));
            let (to_a, to_b) = (a.address(), b.address());
            let mut ends = [a.connect(&to_b, "a to", &configs[0]).unwrap(), b.connect(&to_a, "b to", &configs[1]).unwrap()];
            assert!(ends.iter_mut().all(|end| !end.link_for_test().has_failover()));
            ends[0].link_for_test().qps.fail_rail(1);
            let until = clock::now() + 60_000_000_000;
            while ends.iter_mut().any(|end| end.check().is_ok()) {
                for end in &mut ends {
                    end.poll(WaitCause::Fabric);
                }
                assert!(clock::now() < until, "one of them goes on");
            }
        }
    }
}
