//! Rails that fail and come back under a comm.

use std::collections::VecDeque;

use super::*;
use crate::base::config::SoftWire;
use crate::base::rand;
use crate::base::stats::RailCounter;
use crate::link::Link;
use crate::link::queue_pairs::{BATCH, NO_COMPLETION};

fn two_rails(wire: SoftWire, qps_per_rail: u32) -> Pair {
    two_rails_of(Config { soft_wire: wire, qps_per_rail, ..config() })
}

fn two_rails_of(config: Config) -> Pair {
    let net = net(Config { split_min: 1024, ..config });
    let dev = many_rails(&net, 2);
    let mut pair = Pair::new(&net, dev);
    pair.send.link_for_test().retry_rails_at_once_for_test();
    pair
}

impl Pair {
    /// Whether both ends use a rail.
    fn is_live(&mut self, rail: usize) -> bool {
        self.send.link_for_test().is_live_for_test(rail) && self.recv.link_for_test().is_live_for_test(rail)
    }

    fn poll(&mut self) {
        self.send.poll_for_test();
        self.recv.poll_for_test();
    }

    fn until_live(&mut self, rail: usize) {
        let end = clock::now() + 60_000_000_000;
        while !self.is_live(rail) {
            self.poll();
            let (send, recv) = (self.send.link_for_test(), self.recv.link_for_test());
            assert!(clock::now() < end, "rail {rail} is not live:\n{}\n{}", send.rails_for_test(), recv.rails_for_test());
        }
    }

    fn fail(&mut self, rail: usize, at_sender: bool) {
        let link = if at_sender { self.send.link_for_test() } else { self.recv.link_for_test() };
        link.qps.fail_rail(rail);
    }

    /// Message `seed`, of `len` bytes.
    fn message(&mut self, from: &Buffer, to: &Buffer, len: usize, seed: u32) {
        from.fill(0, len, seed);
        let receive = self.irecv(&[to.recv(0, len, 7)]);
        let send = self.isend(from, 0, len, 7);
        assert_eq!(self.received(receive), [len]);
        assert_eq!(self.stripe_completed(send), len);
        to.check(0, len, seed);
    }
}

#[test]
fn either_rail_fails_at_either_end_and_comes_back() {
    for wire in [SoftWire::Tcp, SoftWire::Shm] {
        let mut pair = two_rails(wire, 2);
        let (from, to) = (pair.buffer(300_001), pair.buffer(300_001));
        let mut seed = 0;
        for (rail, at_sender) in [(0, true), (1, true), (0, false), (1, false), (0, false), (0, true)] {
            for len in [0, 8, 1000, 300_000] {
                seed += 1;
                pair.message(&from, &to, len, seed);
            }
            pair.fail(rail, at_sender);
            // Goes on before the ends have agreed, and after.
            for len in [0, 8, 1000, 300_000] {
                seed += 1;
                pair.message(&from, &to, len, seed);
            }
            pair.until_live(rail);
        }
        within("calm", || {
            pair.poll();
            (pair.send.link_for_test().is_calm_for_test() && pair.recv.link_for_test().is_calm_for_test()).then_some(())
        });
        for link in [pair.send.link_for_test(), pair.recv.link_for_test()] {
            let counts =
                [0, 1].map(|rail| [RailCounter::Failures, RailCounter::Reconnects].map(|counter| link.stats.rail(rail).get(counter)));
            assert_eq!(counts, [[4, 4], [2, 2]]);
        }
    }
}

/// What one of the ends has under way.
struct Flight {
    receive: RequestId,
    sends: Vec<(usize, usize, u32)>,
}

/// Random messages, receives posted ahead, while rails fail at random. A received message is as it was sent, and its memory is left alone after that.
#[test]
fn rails_fail_at_random_under_random_traffic() {
    const ROOM: usize = 40_000;
    const PLACES: usize = 24;
    const FAILURES: u32 = 100;
    for (wire, qps_per_rail) in [(SoftWire::Tcp, 1), (SoftWire::Shm, 1), (SoftWire::Tcp, 3), (SoftWire::Shm, 2)] {
        let mut state = rand::u64().unwrap() | 1;
        println!("seed {state:#x} on {wire:?}");
        let mut below = move |n: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) % n
        };
        let mut pair = two_rails(wire, qps_per_rail);
        let (from, to) = (pair.buffer(PLACES * ROOM), pair.buffer(PLACES * ROOM + 1));
        let owned = pattern(ROOM, 0xFFFF);
        (0..PLACES).for_each(|place| to.pages.write(place * ROOM, &owned));
        let (mut flights, mut sending, mut failures) = (VecDeque::<Flight>::new(), VecDeque::new(), 0);
        let (mut free, mut seed): (Vec<usize>, u32) = ((0..PLACES).collect(), 0);
        let (mut moved, mut outage) = (clock::now(), 0);
        while failures < FAILURES || !flights.is_empty() || !sending.is_empty() {
            if clock::now() - moved > 60_000_000_000 {
                let (send, recv) = (pair.send.link_for_test().rails_for_test(), pair.recv.link_for_test().rails_for_test());
                panic!("after {failures} failures nothing moves, {} receives outstanding:\n{send}\n{recv}", flights.len());
            }
            // No thread answers here for an end that nobody calls, as one does else: while no rail is live, nothing is posted.
            pair.poll();
            let n = 1 + below(4) as usize;
            if failures < FAILURES && free.len() >= n {
                let places: Vec<usize> = free.drain(free.len() - n..).collect();
                for place in &places {
                    let mut bytes = vec![0; ROOM];
                    to.pages.read(place * ROOM, &mut bytes);
                    assert!(bytes == owned, "memory of a receive that was done has changed");
                }
                let buffers: Vec<RecvBuffer> = places.iter().map(|place| to.recv(place * ROOM, ROOM, *place as i32)).collect();
                match pair.recv.irecv(&buffers).unwrap() {
                    None => free.extend(places),
                    Some(receive) => {
                        let sends: Vec<_> = places
                            .into_iter()
                            .map(|place| {
                                seed += 1;
                                (place, [0, 8, 900, 5000, ROOM - 1][below(5) as usize], seed)
                            })
                            .collect();
                        sending.extend(sends.iter().map(|send| (*send, None)));
                        flights.push_back(Flight { receive, sends });
                    }
                }
            }
            for ((place, len, seed), request) in sending.iter_mut().filter(|(_, request)| request.is_none()).take(3) {
                from.fill(*place * ROOM, *len, *seed);
                *request = pair.send.isend(from.addr() + *place * ROOM, *len, *place as i32, from.mr).unwrap();
                if request.is_none() {
                    break;
                }
            }
            sending.retain(|(_, request)| request.is_none_or(|request| pair.send.test(request).unwrap().is_none()));
            let mut done = Vec::new();
            flights.retain(|flight| match pair.recv.test(flight.receive).unwrap() {
                None => true,
                Some(sizes) => {
                    done.extend(flight.sends.iter().zip(sizes.bytes).map(|(send, size)| (*send, size)));
                    false
                }
            });
            for ((place, len, seed), size) in done {
                moved = clock::now();
                assert_eq!(size as usize, len);
                let mut bytes = vec![0; len];
                to.pages.read(place * ROOM, &mut bytes);
                assert!(bytes == pattern(len, seed), "message {seed} of {len} bytes");
                to.pages.write(place * ROOM, &owned);
                // Its sender may not know yet, and must not send into it any more.
                free.push(place);
            }
            // Now and then both, but not before something has moved since: rails that come back and move nothing are an outage that goes on.
            let (rail, both) = (below(2) as usize, below(10) == 0);
            if failures < FAILURES && below(20) == 0 && if both { moved > outage } else { pair.is_live(1 - rail) } {
                pair.fail(rail, below(2) == 0);
                if both {
                    pair.fail(1 - rail, below(2) == 0);
                    outage = clock::now();
                }
                failures += 1;
            }
        }
        (0..2).for_each(|rail| pair.until_live(rail));
        pair.message(&from, &to, ROOM, 1);
    }
}

#[test]
fn without_failover_at_one_end_a_comm_fails_with_its_rail() {
    let net = net(Config { failover: false, ..config() });
    let dev = many_rails(&net, 2);
    let mut pair = Pair::new(&net, dev);
    let (from, to) = (pair.buffer(1000), pair.buffer(1001));
    pair.message(&from, &to, 1000, 1);
    pair.fail(1, true);
    let receive = pair.irecv(&[to.recv(0, 1000, 7)]);
    let error = within("the end", || {
        pair.send.poll_for_test();
        pair.recv.test(receive).err()
    });
    assert!(matches!(error, Error::Remote(_)), "{error}");
}

/// No rail is left over which either end could tell what has come: they have their control connection.
#[test]
fn all_rails_fail_at_once_and_come_back() {
    for wire in [SoftWire::Tcp, SoftWire::Shm] {
        let mut pair = two_rails(wire, 2);
        let (from, to) = (pair.buffer(300_001), pair.buffer(300_001));
        for (round, at_senders) in [[true, true], [false, false], [true, false], [false, true]].into_iter().enumerate() {
            for (index, len) in [0, 8, 1000, 300_000].into_iter().enumerate() {
                let seed = (round * 4 + index) as u32;
                from.fill(0, len, seed);
                let receive = pair.irecv(&[to.recv(0, len, 7)]);
                // It may be announced by then, or posted.
                let before = seed.is_multiple_of(2).then(|| pair.isend(&from, 0, len, 7));
                (0..2).for_each(|rail| pair.fail(rail, at_senders[rail]));
                let send = before.unwrap_or_else(|| pair.isend(&from, 0, len, 7));
                assert_eq!(pair.received(receive), [len]);
                assert_eq!(pair.stripe_completed(send), len);
                to.check(0, len, seed);
                (0..2).for_each(|rail| pair.until_live(rail));
            }
        }
    }
}

/// Where nobody waits for one to come back.
#[test]
fn the_last_rail_takes_the_comm_with_it() {
    let mut pair = two_rails_of(Config { soft_wire: SoftWire::Tcp, rail_timeout_s: 0, ..config() });
    let (from, to) = (pair.buffer(1000), pair.buffer(1001));
    pair.message(&from, &to, 1000, 1);
    let receive = pair.irecv(&[to.recv(0, 1000, 7)]);
    (0..2).for_each(|rail| pair.fail(rail, true));
    let error = within("the end", || {
        pair.send.poll_for_test();
        pair.recv.test(receive).err()
    });
    assert!(matches!(error, Error::Remote(_)), "{error}");
}

/// Rails that come back each time, and over which nothing moves, are no end of an outage.
#[test]
fn rails_that_fail_again_and_again_do_not_keep_a_comm_for_ever() {
    let mut pair = two_rails_of(Config { rail_timeout_s: 1, ..config() });
    let (from, to) = (pair.buffer(1000), pair.buffer(1001));
    let receive = pair.irecv(&[to.recv(0, 1000, 7)]);
    let _send = pair.isend(&from, 0, 1000, 7);
    let (mut rounds, mut error) = (0, None);
    within("the end", || {
        if (0..2).any(|rail| pair.send.link_for_test().is_live_for_test(rail)) {
            (0..2).for_each(|rail| [true, false].into_iter().for_each(|at_sender| pair.fail(rail, at_sender)));
            rounds += 1;
        }
        pair.send.poll_for_test();
        error = pair.send.link_for_test().check().err();
        if error.is_none() && !(0..2).any(|rail| pair.send.link_for_test().is_live_for_test(rail)) {
            assert!(pair.recv.test(receive).ok().flatten().is_none(), "it has come");
        }
        error.is_some().then_some(())
    });
    let mut text = error.unwrap().to_string();
    // Whose second is over first says so. If that is the receiver, the sender only hears that it has gone.
    if text.ends_with("cause: the peer is gone") {
        text = pair.recv.link_for_test().check().unwrap_err().to_string();
    }
    assert!(rounds > 1 && text.contains("no rail has worked for 1 s (RAILHEAD_RAIL_TIMEOUT_S)"), "{rounds}: {text}");
}

/// Each message lands, and both rails fail before its sender knows. That it has landed is told when they are taken up again.
#[test]
fn what_has_landed_ends_an_outage_whenever_that_is_told() {
    let mut pair = two_rails_of(Config { rail_timeout_s: 1, ..config() });
    let (from, to) = (pair.buffer(1000), pair.buffer(1001));
    let until = clock::now() + 3_000_000_000;
    while clock::now() < until {
        let receive = pair.irecv(&[to.recv(0, 1000, 7)]);
        let send = pair.isend(&from, 0, 1000, 7);
        within("receive", || pair.recv.test(receive).unwrap());
        (0..2).for_each(|rail| pair.fail(rail, true));
        within("a rail", || {
            pair.poll();
            (0..2).any(|rail| pair.is_live(rail)).then_some(())
        });
        assert_eq!(pair.stripe_completed(send), 1000);
    }
}

/// The peer, which does not call, says nothing of its own.
#[test]
fn an_outage_lasts_no_longer_than_it_may() {
    let mut pair = two_rails_of(Config { rail_timeout_s: 1, ..config() });
    let (from, to) = (pair.buffer(1000), pair.buffer(1001));
    pair.message(&from, &to, 1000, 1);
    let receive = pair.irecv(&[to.recv(0, 1000, 7)]);
    let begun = clock::now();
    (0..2).for_each(|rail| pair.fail(rail, false));
    let error = within("the end", || pair.recv.test(receive).err());
    assert!(clock::now() - begun >= 1_000_000_000, "{error}");
    let text = error.to_string();
    assert!(matches!(error, Error::Remote(_)) && text.contains("no rail has worked for 1 s (RAILHEAD_RAIL_TIMEOUT_S)"), "{text}");
}

/// Nobody waits for the rails of a peer that has left, or broken the protocol.
#[test]
fn an_outage_ends_with_the_peer() {
    for leaves in [true, false] {
        let mut pair = two_rails_of(Config { rail_timeout_s: 3600, ..config() });
        let (from, to) = (pair.buffer(1000), pair.buffer(1001));
        pair.message(&from, &to, 1000, 1);
        let receive = pair.irecv(&[to.recv(0, 1000, 7)]);
        (0..2).for_each(|rail| pair.fail(rail, false));
        let Pair { mut send, mut recv, .. } = pair;
        // What the peer closes with something unread is reset.
        within("the rails are told of", || {
            recv.poll_for_test();
            // Its fabric alone, which lets what is under way come to its end: it hears nothing.
            (0..2).for_each(|rail| _ = send.link_for_test().qps.poll(rail, &mut [NO_COMPLETION; BATCH]));
            recv.link_for_test().rails_for_test().contains("told (Word(1), 18446744073709551615)").then_some(())
        });
        let (said, _send) = if leaves {
            drop(send);
            ("it closed its comm", None)
        } else {
            send.link_for_test().say_for_test(&[5; 72]);
            ("the peer sent a control message that makes no sense", Some(send))
        };
        let error = within("the end", || recv.test(receive).err()).to_string();
        assert!(error.contains(said), "{error}");
    }
}

/// All rails fail, and the sender's caller, who has sent what he had, takes his time.
#[test]
fn a_receiver_waits_for_its_rails_though_the_senders_caller_does_not_call() {
    let net = net(Config { progress: Progress::Poll, ..config() });
    let dev = many_rails(&net, 2);
    let mut pair = Pair::new(&net, dev);
    let to = pair.buffer(1000);
    pair.send.with_link_for_test(|link| (0..2).for_each(|rail| link.qps.fail_rail(rail)));
    let receive = pair.recv.irecv(&[to.recv(0, 1000, 8)]).unwrap().unwrap();
    within("all rails back", || {
        assert!(pair.recv.test(receive).unwrap().is_none());
        let is_back = |link: &mut Link| (0..2).all(|rail| link.stats.rail(rail).get(RailCounter::Reconnects) == 1);
        pair.recv.with_link_for_test(is_back).then_some(())
    });
}

/// Its message had come when the rail failed, but the sender does not know, and the receiver's caller waits for nothing more.
#[test]
fn a_sender_is_answered_though_the_receivers_caller_does_not_call() {
    const LEN: usize = 100_000;
    for wire in [SoftWire::Tcp, SoftWire::Shm] {
        let net = net(Config { soft_wire: wire, split_min: 1024, progress: Progress::Poll, ..config() });
        let dev = many_rails(&net, 2);
        let mut pair = Pair::new(&net, dev);
        let (from, to) = (pair.buffer(LEN), pair.buffer(LEN + 1));
        from.fill(0, LEN, 7);
        let receive = pair.irecv(&[to.recv(0, LEN, 7)]);
        let send = within("isend", || {
            assert_eq!(pair.recv.test(receive).unwrap().map(|sizes| sizes.n), None);
            pair.send.isend(from.addr(), LEN, 7, from.mr).unwrap()
        });
        within("receive", || pair.recv.test(receive).unwrap());
        pair.send.with_link_for_test(|link| link.qps.fail_rail(1));
        within("send", || pair.send.test(send).unwrap());
        to.check(0, LEN, 7);
    }
}
