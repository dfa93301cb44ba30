//! Messages that go out before their receives are announced. See [`super::super::eager`].

use std::collections::VecDeque;

use crate::base::config::SoftWire;
use crate::fabric::{Opcode, Payload, SendRequest};
use crate::net::cts_fifo::{AT_CREDIT, AT_EAGER, Credit, Imm};
use crate::net::eager::{EAGER_SIZE, EAGER_SLOTS, TELL_NS};
use crate::net::wr_id::WrKind;

use super::*;

const TAG: i32 = 7;

/// Announces one short receive and serves it: quiet ones may follow.
fn begin(pair: &mut Pair, buffer: &Buffer) {
    let recv = pair.irecv(&[buffer.recv(0, 8, TAG)]);
    let send = pair.isend(buffer, 0, 8, TAG);
    assert_eq!(pair.received(recv), [8]);
    pair.sent(send);
}

#[test]
fn short_messages_do_not_wait_for_their_receives_and_are_bounded() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        let mut pair = Pair::new(&net(Config { soft_wire: wire, ..config() }), 0);
        let (from, to) = (pair.buffer(8192), pair.buffer(8192));
        begin(&mut pair, &from);
        for i in 0..EAGER_SLOTS {
            from.fill(i * EAGER_SIZE, EAGER_SIZE, i as u32);
            let send = pair.isend(&from, i * EAGER_SIZE, EAGER_SIZE, TAG);
            assert_eq!(pair.sent(send), EAGER_SIZE);
        }
        // Neither one more, nor a longer one, nor one with another tag.
        for _ in 0..1000 {
            pair.nudge();
            assert!(pair.send.isend(from.addr(), 1, TAG, from.mr).unwrap().is_none());
            assert!(pair.send.isend(from.addr(), 65, TAG, from.mr).unwrap().is_none());
            assert!(pair.send.isend(from.addr(), 1, TAG + 1, from.mr).unwrap().is_none());
        }
        for i in 0..EAGER_SLOTS {
            // Short receives and long ones; a group takes two.
            let at = i * EAGER_SIZE;
            let recv = pair.irecv(&[to.recv(at, if i % 3 == 0 { 4096 } else { EAGER_SIZE }, TAG)]);
            assert_eq!(pair.received(recv), [EAGER_SIZE]);
            let mut bytes = [0; EAGER_SIZE];
            to.pages.read(at, &mut bytes);
            assert!(bytes[..] == pattern(EAGER_SIZE, i as u32), "{wire:?}: message {i}");
        }
        // The slots are free again.
        let send = pair.isend(&from, 0, 8, TAG);
        pair.sent(send);
    }
}

#[test]
fn what_was_sent_before_a_close_still_arrives() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        arrives_before_a_close(Config { soft_wire: wire, ..config() }, 0);
        // Long idle, a receiver looks at a wire more rarely, and not at all of them in the same poll.
        for polls in (100_000..100_064).step_by(8) {
            arrives_before_a_close(Config { soft_wire: wire, qps_per_rail: 2, ..config() }, polls);
        }
    }
}

fn arrives_before_a_close(config: Config, polls: usize) {
    let lanes = config.qps_per_rail;
    let mut pair = Pair::new(&net(config), 0);
    let (from, to) = (pair.buffer(4096), pair.buffer(4096));
    (0..32).for_each(|_| pair.nudge());
    begin(&mut pair, &from);
    let receives: Vec<_> = (0..3).map(|i| pair.irecv(&[to.recv(i * 64, 64, TAG)])).collect();
    (0..polls).for_each(|_| pair.nudge());
    for i in 0..3 {
        from.fill(0, 60, i);
        let send = within("isend", || pair.send.isend(from.addr(), 60, TAG, from.mr).unwrap());
        // With one lane, the receiver need not poll.
        within("send", || {
            let sizes = pair.send.test(send).unwrap();
            if sizes.is_none() && lanes > 1 {
                pair.nudge();
            }
            sizes
        });
    }
    let Pair { send, mut recv, .. } = pair;
    drop(send);
    for (i, receive) in receives.into_iter().enumerate() {
        let sizes = within("receive", || recv.test(receive).unwrap());
        assert_eq!((sizes.n, sizes.bytes[0]), (1, 60));
        to.check(i * 64, 60, i as u32);
    }
}

/// Its requests all done and not tested, a receiver hears of the close before it posts the receives of what has come.
#[test]
fn a_close_does_not_take_what_lies_in_the_ring() {
    let mut pair = Pair::new(&net(config()), 0);
    let (from, to) = (pair.buffer(4096), pair.buffer(4096));
    begin(&mut pair, &from);
    let done: Vec<_> = (0..MAX_REQUESTS)
        .map(|_| {
            let recv = pair.irecv(&[to.recv(0, 8, TAG)]);
            let send = pair.isend(&from, 0, 8, TAG);
            pair.sent(send);
            recv
        })
        .collect();
    from.fill(0, 60, 5);
    let send = pair.isend(&from, 0, 60, TAG);
    pair.sent(send);
    let Pair { send, mut recv, .. } = pair;
    drop(send);
    (0..10_000).for_each(|_| assert!(recv.irecv(&[to.recv(64, 60, TAG)]).unwrap().is_none()));
    done.into_iter().for_each(|id| assert!(recv.test(id).unwrap().is_some()));
    let last = recv.irecv(&[to.recv(64, 60, TAG)]).unwrap().expect("room");
    within("receive", || recv.test(last).unwrap());
    to.check(64, 60, 5);
}

/// Nobody polls once his last request is done.
#[test]
fn a_send_does_not_wait_for_a_receiver_that_has_everything() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        let mut pair = Pair::new(&net(Config { soft_wire: wire, ..config() }), 0);
        const LONG: usize = 16 << 20;
        let (from, to) = (pair.buffer(LONG), pair.buffer(LONG));
        begin(&mut pair, &from);
        // As many as there are places in the ring whether or not the last emptied ones were given back.
        for short in 1..=EAGER_SLOTS / 2 - 1 {
            // Behind a long one, which does not leave at once.
            let mut receives = VecDeque::from([pair.irecv(&[to.recv(0, LONG, TAG)])]);
            receives.extend((0..short).map(|_| pair.irecv(&[to.recv(0, 8, TAG)])));
            let mut sends = VecDeque::from([pair.isend(&from, 0, LONG, TAG)]);
            sends.extend((0..short).map(|_| within("isend", || pair.send.isend(from.addr(), 8, TAG, from.mr).unwrap())));
            let mut test_send = |pair: &mut Pair| {
                if let Some(id) = sends.front()
                    && pair.send.test(*id).unwrap().is_some()
                {
                    sends.pop_front();
                }
                sends.is_empty()
            };
            within("receives", || {
                test_send(&mut pair);
                let id = receives.front()?;
                if pair.recv.test(*id).unwrap().is_some() {
                    receives.pop_front();
                }
                receives.is_empty().then_some(())
            });
            within("sends", || test_send(&mut pair).then_some(()));
        }
    }
}

#[test]
fn a_receive_whose_memory_is_gone_fails() {
    let mut pair = Pair::new(&net(config()), 0);
    let (from, to) = (pair.buffer(4096), pair.buffer(4096));
    begin(&mut pair, &from);
    // Announced, but served before the sender sees that.
    let recv = pair.irecv(&[to.recv(0, 4096, TAG)]);
    pair.net.deregister(0, to.mr).unwrap();
    let send = pair.send.isend(from.addr(), 8, TAG, from.mr).unwrap().expect("eager");
    let outcome = within("receive", || match pair.recv.test(recv) {
        Ok(None) => None,
        outcome => Some(outcome.map(drop)),
    });
    assert!(outcome.is_err(), "{send:?} was received into no memory");
}

#[test]
fn a_long_message_is_cut_to_a_receive_that_was_not_announced() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        let mut pair = Pair::new(&net(Config { soft_wire: wire, ..config() }), 0);
        let (from, to) = (pair.buffer(4096), pair.buffer(4096));
        begin(&mut pair, &from);
        from.fill(0, 4096, 3);
        let first = pair.irecv(&[to.recv(0, 40, TAG)]);
        let second = pair.irecv(&[to.recv(64, 4000, TAG)]);
        // Announced, but not its turn.
        let one = pair.isend(&from, 0, 4096, TAG);
        let two = pair.isend(&from, 0, 4096, TAG);
        assert_eq!((pair.received(first), pair.received(second)), (vec![40], vec![4000]));
        assert_eq!((pair.sent(one), pair.sent(two)), (EAGER_SIZE, 4000));
        // Nothing is announced: the sender is told in time.
        begin(&mut pair, &from);
        let third = pair.irecv(&[to.recv(0, 8, TAG)]);
        let send = pair.isend(&from, 0, 4096, TAG);
        assert_eq!(pair.received(third), [8]);
        pair.sent(send);
    }
}

/// Lengths around what matters.
const LENGTHS: [usize; 8] = [0, 1, 8, 63, 64, 65, 200, 5000];

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) as usize % n
    }
}

/// A message's place: where its receive is, and how long.
struct Expected {
    at: usize,
    room: usize,
    len: usize,
    seed: u32,
}

/// Receives posted together, with their tags.
type Group = Vec<(i32, Expected)>;

/// Any receives and groups, and sends that fit them, at any time relative to each other: each message arrives where it belongs.
fn any_schedule(config: Config, seed: u64, begin_at: u32) -> u32 {
    const ROUNDS: usize = 300;
    let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut pair = Pair::new(&net(config), 0);
    pair.send.outbox_for_test().begin_at_for_test(begin_at);
    pair.send.fifo_for_test().write(AT_CREDIT, &Credit { taken: begin_at, posted: begin_at }.encode());
    pair.recv.inbox_for_test().begin_at_for_test(begin_at);
    let stride = 5008;
    let (from, to) = (pair.buffer(stride * ROUNDS * 3), pair.buffer(stride * ROUNDS * 3));
    // What is received, and in which order it is sent. Long runs of short ones, so that there are quiet ones.
    let (mut groups, mut sends, mut number) = (VecDeque::new(), VecDeque::new(), 0);
    let mut short = true;
    for round in 0..ROUNDS {
        if rng.below(20) == 0 {
            short = !short;
        }
        let n = if rng.below(if short { 40 } else { 5 }) == 0 { 2 + rng.below(2) } else { 1 };
        let mut group: Group = (0..n)
            .map(|i| {
                let most = if short { 5 } else { LENGTHS.len() };
                let room = LENGTHS[rng.below(most)];
                let len = if rng.below(30) == 0 { LENGTHS[rng.below(LENGTHS.len())] } else { room.min(LENGTHS[rng.below(most)]) };
                let tag = if round > 0 && rng.below(8) == 0 { TAG + 1 } else { TAG };
                (tag, Expected { at: (round * 3 + i) * stride, room, len, seed: 0 })
            })
            .collect();
        // Within a group, messages with different tags may come in any order.
        let swap = group.len() == 2 && group[0].0 != group[1].0 && rng.below(2) == 0;
        let order: Vec<usize> = if swap { vec![1, 0] } else { (0..group.len()).collect() };
        for i in order {
            number += 1;
            let (tag, expected) = &mut group[i];
            expected.seed = number;
            from.fill(expected.at, expected.len, number);
            sends.push_back((*tag, expected.at, expected.len));
        }
        groups.push_back(group);
    }
    let mut receiving: Vec<(RequestId, Group)> = Vec::new();
    let mut sending: Vec<RequestId> = Vec::new();
    let end = clock::now() + 60_000_000_000;
    while !(groups.is_empty() && sends.is_empty() && receiving.is_empty() && sending.is_empty()) {
        assert!(
            clock::now() < end,
            "seed {seed}: {} receives and {} sends to be posted, {} and {} outstanding",
            groups.len(),
            sends.len(),
            receiving.len(),
            sending.len()
        );
        // Bursts, so that one side is ahead by a varying amount.
        for _ in 0..rng.below(40) {
            match rng.below(4) {
                0 => {
                    if let Some(group) = groups.front() {
                        let buffers: Vec<_> = group.iter().map(|(tag, e)| to.recv(e.at, e.room, *tag)).collect();
                        if let Some(id) = pair.recv.irecv(&buffers).unwrap() {
                            receiving.push((id, groups.pop_front().unwrap()));
                        }
                    }
                }
                1 => {
                    if let Some(&(tag, at, len)) = sends.front()
                        && let Some(id) = pair.send.isend(from.addr() + at, len, tag, from.mr).unwrap()
                    {
                        sending.push(id);
                        sends.pop_front();
                    }
                }
                2 => {
                    if !receiving.is_empty() {
                        let i = rng.below(receiving.len());
                        let id = receiving[i].0;
                        if let Some(sizes) = pair.recv.test(id).unwrap() {
                            let (_, group) = receiving.swap_remove(i);
                            for (bytes, (_, e)) in sizes.bytes[..sizes.n].iter().zip(&group) {
                                let len = e.len.min(e.room);
                                assert_eq!(*bytes as usize, len, "seed {seed}, message {}", e.seed);
                                let mut got = vec![0; len];
                                to.pages.read(e.at, &mut got);
                                assert!(got == pattern(e.len, e.seed)[..len], "seed {seed}, message {}", e.seed);
                            }
                        }
                    }
                }
                _ => {
                    if !sending.is_empty() {
                        let i = rng.below(sending.len());
                        if pair.send.test(sending[i]).unwrap().is_some() {
                            sending.swap_remove(i);
                        }
                    }
                }
            }
        }
    }
    pair.send.outbox_for_test().sent_for_test().wrapping_sub(begin_at)
}

#[test]
fn any_schedule_brings_each_message_where_it_belongs() {
    let mut eager = 0;
    for seed in 1..=40 {
        let wire = if seed % 2 == 0 { SoftWire::Shm } else { SoftWire::Tcp };
        let qps_per_rail = if seed % 3 == 0 { 3 } else { 1 };
        // Numbers are cut to 16, 24 and 32 bits.
        let begin_at = [0, (1 << 16) - 100, (1 << 23) + 10, (1 << 24) - 100, (1 << 24) + 10, u32::MAX - 100][seed as usize % 6];
        eager += any_schedule(Config { soft_wire: wire, qps_per_rail, split_min: 128, ..config() }, seed, begin_at);
    }
    assert!(eager > 1000, "only {eager} messages went out before their receives were announced");
    let off = any_schedule(Config { eager_max: 0, ..config() }, 1, 0);
    assert_eq!(off, 0);
}

/// What a hostile receiver may say of eager messages.
#[test]
fn nonsense_about_credit_fails_the_sender() {
    for credit in [Credit { taken: 1, posted: 1 }, Credit { taken: u32::MAX, posted: 1 }] {
        let mut pair = Pair::new(&net(config()), 0);
        let buffer = pair.buffer(4096);
        begin(&mut pair, &buffer);
        pair.send.fifo_for_test().write(AT_CREDIT, &credit.encode());
        let error = pair.send.isend(buffer.addr(), 4096, TAG, buffer.mr).err().unwrap();
        assert!(matches!(error, Error::Remote(_)) && error.to_string().contains("which cannot be"), "{credit:?}: {error}");
    }
}

/// The sender does not believe in more receives than can be.
#[test]
fn a_number_of_receives_that_cannot_be_means_nothing() {
    let mut pair = Pair::new(&net(config()), 0);
    let buffer = pair.buffer(4096);
    begin(&mut pair, &buffer);
    for posted in [0, 1, 514, 1 << 31, u32::MAX] {
        pair.send.fifo_for_test().write(AT_CREDIT, &Credit { taken: 0, posted }.encode());
        assert!(pair.send.isend(buffer.addr(), 4096, TAG, buffer.mr).unwrap().is_none(), "{posted}");
    }
}

/// Announcements that cross messages which do not wait for them, more than the FIFO has slots.
#[test]
fn announcements_served_before_they_were_seen_do_not_use_up_the_fifo() {
    let mut pair = Pair::new(&net(config()), 0);
    let (from, to) = (pair.buffer(4096), pair.buffer(8192));
    begin(&mut pair, &from);
    for round in 0..1000 {
        // The sender has not polled since the last round.
        let sends: Vec<_> = (0..2).filter_map(|_| pair.send.isend(from.addr(), 8, TAG, from.mr).unwrap()).collect();
        let receives = [pair.irecv(&[to.recv(0, 4096, TAG)]), pair.irecv(&[to.recv(4096, 8, TAG)])];
        let more: Vec<_> = (sends.len()..2).map(|_| pair.isend(&from, 0, 8, TAG)).collect();
        for id in sends.into_iter().chain(more) {
            pair.sent(id);
        }
        for id in receives {
            assert_eq!(pair.received(id), [8], "round {round}");
        }
    }
    let recv = pair.irecv(&[to.recv(0, 4096, TAG)]);
    let send = pair.isend(&from, 0, 4096, TAG);
    assert_eq!(pair.received(recv), [4096]);
    pair.sent(send);
}

/// An announcement that an eager message has served stays in the FIFO until the sender has read of it.
#[test]
fn announcements_that_the_sender_has_not_read_are_not_overwritten() {
    let mut pair = Pair::new(&net(config()), 0);
    let (from, to) = (pair.buffer(4096), pair.buffer(4096));
    begin(&mut pair, &from);
    let sends: Vec<_> = (0..EAGER_SLOTS).map(|_| pair.send.isend(from.addr(), 8, TAG, from.mr).unwrap().expect("eager")).collect();
    // All announced, as the receiver has not seen a message yet.
    let served: Vec<_> = (0..EAGER_SLOTS).map(|_| pair.irecv(&[to.recv(0, 4096, TAG)])).collect();
    served.into_iter().for_each(|id| assert_eq!(pair.received(id), [8]));
    // As many more as there is room for.
    let outstanding: Vec<_> = std::iter::from_fn(|| pair.recv.irecv(&[to.recv(0, 4096, TAG)]).unwrap()).collect();
    // The announcements land, and the sender looks at none.
    (0..1000).for_each(|_| pair.send.poll_for_test());
    sends.into_iter().for_each(|id| assert_eq!(pair.sent(id), 8));
    for (id, len) in outstanding.into_iter().zip(1000..) {
        let send = pair.isend(&from, 0, len, TAG);
        assert_eq!(pair.received(id), [len]);
        pair.sent(send);
    }
}

/// A quiet receive behind which another was announced: the sender knows, and is not told again and again.
#[test]
fn the_sender_is_told_once() {
    let mut pair = Pair::new(&net(config()), 0);
    let buffer = pair.buffer(8192);
    begin(&mut pair, &buffer);
    let quiet = pair.irecv(&[buffer.recv(0, 8, TAG)]);
    let room = |pair: &mut Pair| pair.recv.core_for_test().rails.room(0);
    let poll = |pair: &mut Pair| {
        let end = clock::now() + 5 * TELL_NS;
        while clock::now() < end {
            assert!(pair.recv.test(quiet).unwrap().is_none());
        }
    };
    let before = room(&mut pair);
    poll(&mut pair);
    assert_eq!(room(&mut pair), before - 1);
    pair.irecv(&[buffer.recv(4096, 4096, TAG)]);
    let before = room(&mut pair);
    poll(&mut pair);
    assert_eq!(room(&mut pair), before);
}

/// What a hostile sender may send into the ring.
#[test]
fn nonsense_in_the_eager_ring_fails_the_receiver() {
    // Slot, number and length of messages after the first one; one receive, number 1, is posted and is not announced.
    type Message = (u8, u16, usize);
    let cases: [(&str, &[Message]); 6] = [
        ("slot 1", &[(1, 1, 8)]),
        ("slot 200", &[(200, 1, 8)]),
        ("receive 0", &[(0, 0, 8)]),
        ("number 1", &[(0, 1, 8), (1, 1, 8)]),
        ("number 66", &[(0, 66, 8)]),
        ("number 32768", &[(0, 0x8000, 8)]),
    ];
    for (expect, messages) in cases {
        let mut pair = Pair::new(&net(config()), 0);
        let buffer = pair.buffer(4096);
        begin(&mut pair, &buffer);
        pair.irecv(&[buffer.recv(0, 64, TAG)]);
        send_raw(&mut pair, messages);
        let error = hears(pair);
        assert!(matches!(error, Error::Remote(_)) && error.to_string().contains(expect), "{expect}: {error}");
    }
    // One more than there are slots.
    let mut pair = Pair::new(&net(config()), 0);
    let buffer = pair.buffer(4096);
    begin(&mut pair, &buffer);
    let all: Vec<Message> = (0..=EAGER_SLOTS).map(|i| ((i % EAGER_SLOTS) as u8, 1 + i as u16, 8)).collect();
    send_raw(&mut pair, &all);
    assert!(hears(pair).to_string().contains("slot 0"));
    // And where there are none.
    let mut pair = Pair::new(&net(Config { eager_max: 0, ..config() }), 0);
    let buffer = pair.buffer(4096);
    begin(&mut pair, &buffer);
    send_raw(&mut pair, &[(0, 1, 8)]);
    assert!(hears(pair).to_string().contains("an eager message"));
}

fn send_raw(pair: &mut Pair, messages: &[(u8, u16, usize)]) {
    let rails = &mut pair.send.core_for_test().rails;
    let bytes = [7; EAGER_SIZE];
    for &(slot, number, len) in messages {
        let (remote_addr, rkey) = rails.remote(0, AT_EAGER);
        let message = SendRequest {
            wr_id: 0,
            opcode: Opcode::WriteWithImm,
            payload: Payload::Inline(&bytes[..len]),
            remote_addr,
            rkey,
            imm: Imm::Eager(number).encode(slot),
            signaled: true,
        };
        rails.post_send(0, [message], WrKind::Data, RequestId(0), true).unwrap();
    }
}

fn hears(pair: Pair) -> Error {
    let Pair { mut send, mut recv, .. } = pair;
    within("the receiver fails", || {
        send.poll_for_test();
        recv.poll_for_test();
        recv.core_for_test().check().err()
    })
}
