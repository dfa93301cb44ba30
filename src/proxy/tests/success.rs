//! Tests of operations that succeed: every byte arrives, in order, and nothing is published too early.

use super::super::args::Wait;
use super::super::ring::{EMPTY, STEPS, Words};
use super::*;

/// Runs the operations one after the other, with both programs acting whenever they can; checks each byte and each invariant on the way.
fn exchange(pair: &mut TestPair, operations: &[Steps]) {
    for (n, steps) in operations.iter().enumerate() {
        let Steps { count, slice, chunk, protocol } = *steps;
        let (mut sending, mut receiving) = (Some(Args::new(*steps).unwrap()), Some(Args::new(*steps).unwrap()));
        pair.producer.start(chunk).unwrap();
        pair.consumer.start(chunk).unwrap();
        let len = |message: u64| (message as usize * 53 + n * 17) % (most(protocol, slice) + 1);
        let (mut filled, mut emptied) = (0, 0);
        let mut idle = 0;
        while sending.is_some() || receiving.is_some() || emptied < count / slice {
            if filled < count / slice && pair.producer.has_room(slice).unwrap() {
                fill(&mut pair.producer, pair.send.ring(), protocol, slice, &pattern(n as u64, filled, len(filled)));
                filled += 1;
            }
            let mut moved = false;
            if let Some(args) = &mut sending {
                let progress = send::progress(&pair.send, args).unwrap();
                moved |= progress != Progress::Idle;
                assert!(args.tail.wrapping_sub(args.head) <= STEPS);
                assert!(progress != Progress::Idle || args.wait != Wait::Nothing);
                // Posted steps have no size any more, so no size is cleared once the slot is free again.
                let mut step = args.base;
                while step != args.tail && pair.producer.step().wrapping_sub(step) <= STEPS {
                    assert!(pair.producer.step().wrapping_sub(step) > STEPS || pair.send.ring().size((step % STEPS) as usize) == EMPTY);
                    step = step.wrapping_add(slice);
                }
                assert_eq!(pair.send.ring().head(), args.head);
                if progress == Progress::Done {
                    sending = None;
                }
            }
            if let Some(args) = &mut receiving {
                let progress = recv::progress(&pair.recv, args).unwrap();
                moved |= progress != Progress::Idle;
                assert!(args.tail.wrapping_sub(pair.recv.ring().head()) <= STEPS);
                assert!(progress != Progress::Idle || args.wait != Wait::Nothing);
                if progress == Progress::Done {
                    receiving = None;
                }
            }
            while let Some(bytes) = pair.consumer.filled(slice, SLOT * slice as usize).unwrap() {
                let mut wire = vec![0; bytes];
                // SAFETY: filled told of the slots.
                unsafe { pair.recv.ring().copy_out(protocol, pair.consumer.step(), &mut wire) }.unwrap();
                assert_eq!(
                    strip(protocol, &wire, len(emptied)),
                    pattern(n as u64, emptied, len(emptied)),
                    "operation {n}, message {emptied}"
                );
                pair.consumer.release(slice);
                emptied += 1;
                moved = true;
            }
            idle = if moved { 0 } else { idle + 1 };
            assert!(idle < 10_000, "stuck: {sending:?} {receiving:?}");
        }
        assert_eq!((filled, emptied), (count / slice, count / slice));
        assert_eq!(pair.consumer.filled(1, SLOT).unwrap(), None);
    }
}

const BEHAVIOURS: [Behaviour; 4] = [
    Behaviour { delay: 0, busy: 0, fails_at: None, holds_flushes: false, excess: 0 },
    Behaviour { delay: 5, busy: 0, fails_at: None, holds_flushes: false, excess: 0 },
    Behaviour { delay: 0, busy: 2, fails_at: None, holds_flushes: false, excess: 0 },
    Behaviour { delay: 20, busy: 3, fails_at: None, holds_flushes: false, excess: 0 },
];

#[test]
fn every_slice_chunk_and_protocol_over_every_behaviour_of_the_network() {
    for behaviour in BEHAVIOURS {
        for start in [0, 3, u64::from(u32::MAX) - 9, u64::MAX - 9] {
            let mut pair = TestPair::new(behaviour, start);
            for protocol in Protocol::ALL {
                for slice in [1, 2, 4, 8] {
                    for chunk in [1, 2, 4, 8].into_iter().filter(|chunk| *chunk >= slice) {
                        for count in [slice, 3 * slice, 24 * slice] {
                            exchange(&mut pair, &[Steps { count, slice, chunk, protocol }]);
                        }
                    }
                }
            }
            let net = pair.net.clone();
            pair.close().unwrap();
            assert_eq!(net.holds(), (0, 0, 0));
        }
    }
}

#[test]
fn operations_of_all_kinds_follow_each_other_on_one_ring() {
    let mut random = 0x1234_5678_9abc_def1u64;
    let mut chance = |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    for start in [0, u64::MAX - 500] {
        let mut pair = TestPair::new(Behaviour { delay: 7, busy: 4, ..Behaviour::default() }, start);
        let operations: Vec<Steps> = (0..300)
            .map(|_| {
                let slice = 1 << chance(4);
                let chunk = slice << chance(4 - u64::from(u64::trailing_zeros(slice)));
                Steps { count: slice * (1 + chance(20)), slice, chunk, protocol: Protocol::ALL[chance(3) as usize] }
            })
            .collect();
        exchange(&mut pair, &operations);
        assert_eq!(pair.send.counters().operations.load(std::sync::atomic::Ordering::Relaxed), 300);
    }
}

#[test]
fn a_million_operations_of_no_bytes() {
    let mut pair = TestPair::new(Behaviour::default(), u64::MAX - 500_000);
    pair.net.unrecorded();
    for _ in 0..1_000_000 {
        let (mut sending, mut receiving) = (Args::new(Steps::simple(1)).unwrap(), Args::new(Steps::simple(1)).unwrap());
        assert!(pair.producer.has_room(1).unwrap());
        pair.producer.post(1, 0);
        let _ = recv::progress(&pair.recv, &mut receiving).unwrap();
        assert_eq!(send::progress(&pair.send, &mut sending).unwrap(), Progress::Done);
        assert_eq!(recv::progress(&pair.recv, &mut receiving).unwrap(), Progress::Done);
        assert_eq!(pair.consumer.filled(1, SLOT).unwrap(), Some(0));
        pair.consumer.release(1);
    }
    assert_eq!(pair.consumer.step(), 499_999);
}

/// A producer that writes the size first, then the lines in any order, and `tail` last of all, as a GPU does.
#[test]
fn ll_goes_by_its_flags_alone_and_ll128_by_both() {
    for protocol in [Protocol::Ll, Protocol::Ll128] {
        let pair = TestPair::new(Behaviour::default(), 0);
        let ring = pair.send.ring().clone();
        let steps = Steps { count: 1, slice: 1, chunk: 1, protocol };
        let (mut sending, mut receiving) = (Args::new(steps).unwrap(), Args::new(steps).unwrap());
        let _ = recv::progress(&pair.recv, &mut receiving).unwrap();
        let wait = |sending: &mut Args| {
            assert_eq!(send::progress(&pair.send, sending).unwrap(), Progress::Idle);
            sending.wait
        };
        assert_eq!(wait(&mut sending), Wait::Producer);
        ring.set_size(0, 256);
        assert_eq!(wait(&mut sending), if protocol == Protocol::Ll { Wait::Flags } else { Wait::Producer });
        if protocol == Protocol::Ll128 {
            ring.set_tail(1);
            assert_eq!(wait(&mut sending), Wait::Flags);
        }
        let mut lines = vec![0u8; 256];
        for (at, byte) in lines.iter_mut().enumerate() {
            *byte = match (protocol, at % 8, at % 128) {
                (Protocol::Ll, 4, _) | (Protocol::Ll128, _, 120) => 1,
                (Protocol::Ll, 5.., _) | (Protocol::Ll128, _, 121..) => 0,
                _ => 0xee,
            };
        }
        // All but the first line, then all but the last word's flag, then everything.
        let mut early = lines.clone();
        early[..128].fill(0);
        let mut late = lines.clone();
        late[252..].fill(0);
        late[248..252].fill(0);
        for part in [&early, &late] {
            // SAFETY: this test is the producer, and the proxy reads only the flags.
            unsafe { ring.copy_in(protocol, 0, part) }.unwrap();
            assert_eq!(wait(&mut sending), Wait::Flags);
        }
        // SAFETY: as above.
        unsafe { ring.copy_in(protocol, 0, &lines) }.unwrap();
        assert_eq!(send::progress(&pair.send, &mut sending).unwrap(), Progress::Done);
        let _ = recv::progress(&pair.recv, &mut receiving).unwrap();
        let mut got = vec![0; 256];
        // SAFETY: this test is the consumer, and the step is published.
        unsafe { pair.recv.ring().copy_out(protocol, 0, &mut got) }.unwrap();
        assert_eq!((pair.recv.ring().tail(), got), (1, lines));
    }
}

/// The lines seen of one slot do not count for the next, and each slot needs the flags of its own step, whatever is still in flight.
#[test]
fn every_slot_is_checked_from_its_first_line_on_for_its_own_flags() {
    for protocol in [Protocol::Ll, Protocol::Ll128] {
        for start in [0, u64::from(u32::MAX) - 1, u64::MAX - 1] {
            let pair = TestPair::new(Behaviour { delay: u64::MAX - 1, ..Behaviour::default() }, start);
            let ring = pair.send.ring().clone();
            let steps = Steps { count: 2, slice: 1, chunk: 1, protocol };
            let (mut sending, mut receiving) = (Args::new(steps).unwrap(), Args::new(steps).unwrap());
            let _ = recv::progress(&pair.recv, &mut receiving).unwrap();
            // Two parts of a slot with the flags of these steps.
            let put = |at: u64, flags: [u64; 2]| {
                let step = start.wrapping_add(at);
                let part = |flag: u64| match protocol {
                    Protocol::Ll => [[0xee; 4], ll_flag(start.wrapping_add(flag)).to_ne_bytes()].concat().repeat(16),
                    _ => [&[0xee; 120][..], &ll128_flag(start.wrapping_add(flag)).to_ne_bytes()].concat(),
                };
                // SAFETY: this test is the producer, and the proxy reads only the flags.
                unsafe { ring.copy_in(protocol, step, &flags.map(part).concat()) }.unwrap();
                ring.set_size((step % STEPS) as usize, 256);
                ring.set_tail(step.wrapping_add(1));
            };
            let mut look = || {
                let _ = send::progress(&pair.send, &mut sending).unwrap();
                (sending.tail.wrapping_sub(start), sending.head.wrapping_sub(start), sending.wait)
            };
            const OLD: u64 = 0u64.wrapping_sub(8);
            put(0, [0, OLD]);
            assert_eq!(look(), (0, 0, Wait::Flags));
            put(0, [0, 0]);
            // The next slot has no size yet.
            assert_eq!(look(), (1, 0, Wait::Producer), "{protocol} {start}");
            for flags in [[OLD, 1], [0, 0], [9, 1], [0, 1], [1, 0], [1, OLD]] {
                put(1, flags);
                assert_eq!(look(), (1, 0, Wait::Flags), "{protocol} {start}: {flags:?}");
            }
            put(1, [1, 1]);
            assert_eq!(look(), (2, 0, Wait::Sent), "{protocol} {start}");
        }
    }
}

#[test]
fn data_that_is_flushed_is_published_only_then() {
    let flush = Options { flush: true, ..Options::default() };
    let mut pair = TestPair::over(Fake::new(9, Behaviour { holds_flushes: true, ..Behaviour::default() }), 1, 0, flush);
    let (mut sending, mut receiving) = (Args::new(Steps::simple(3)).unwrap(), Args::new(Steps::simple(3)).unwrap());
    // The second message is empty: it needs no flush, but is published after the first.
    for bytes in [5, 0, 256] {
        pair.producer.post(1, bytes);
    }
    for _ in 0..10 {
        let _ = recv::progress(&pair.recv, &mut receiving).unwrap();
        let _ = send::progress(&pair.send, &mut sending).unwrap();
    }
    assert_eq!((receiving.received, receiving.head, pair.recv.ring().tail(), receiving.wait), (3, 0, 0, Wait::Flush));
    let flushes = || -> Vec<usize> {
        pair.net.record().iter().filter_map(|call| if let Call::Iflush { bytes, .. } = call { Some(*bytes) } else { None }).collect()
    };
    assert_eq!(flushes(), [5, 256]);
    pair.net.behave(|behaviour| behaviour.holds_flushes = false);
    assert_eq!(recv::progress(&pair.recv, &mut receiving).unwrap(), Progress::Done);
    assert_eq!(pair.recv.ring().tail(), 3);
    assert_eq!([0, 1, 2].map(|slot| pair.recv.ring().size(slot)), [5, 0, 256]);
    assert_eq!(flushes(), [5, 256], "once each");
}

#[test]
fn a_network_that_accepts_nothing_is_called_again_and_nothing_is_lost() {
    let mut pair = TestPair::new(Behaviour::default(), 0);
    let (mut sending, mut receiving) = (Args::new(Steps::simple(2)).unwrap(), Args::new(Steps::simple(2)).unwrap());
    pair.producer.post(1, 10);
    // No receive is posted, so the network accepts no send.
    for _ in 0..5 {
        assert_eq!(send::progress(&pair.send, &mut sending).unwrap(), Progress::Idle);
        assert_eq!((sending.tail, sending.wait, pair.send.ring().size(0)), (0, Wait::Receiver, 10));
    }
    let _ = recv::progress(&pair.recv, &mut receiving).unwrap();
    assert_eq!((receiving.tail, receiving.wait), (2, Wait::Sender));
    assert_eq!(send::progress(&pair.send, &mut sending).unwrap(), Progress::Moved);
    assert_eq!((sending.head, sending.tail, pair.send.ring().size(0), sending.wait), (1, 1, EMPTY, Wait::Producer));
    assert_eq!(pair.send.counters().retries.load(std::sync::atomic::Ordering::Relaxed), 5);
    let expected = [false, false, false, false, false, true].map(|accepted| Call::Isend { connection: 1, bytes: 10, accepted });
    let sends: Vec<Call> = pair.net.record().into_iter().filter(|call| matches!(call, Call::Isend { .. })).collect();
    assert_eq!(sends, expected);
}

#[test]
fn at_most_eight_steps_are_in_flight_and_they_complete_in_order() {
    let mut pair = TestPair::new(Behaviour { delay: 1000, ..Behaviour::default() }, 0);
    let (mut sending, mut receiving) = (Args::new(Steps::simple(100)).unwrap(), Args::new(Steps::simple(100)).unwrap());
    (0..8).for_each(|_| pair.producer.post(1, 1));
    let _ = recv::progress(&pair.recv, &mut receiving).unwrap();
    let _ = send::progress(&pair.send, &mut sending).unwrap();
    assert_eq!((receiving.tail, sending.tail), (8, 8));
    assert!(!pair.producer.has_room(1).unwrap());
    let accepted = |call: &Call| matches!(call, Call::Isend { accepted: true, .. } | Call::Irecv { accepted: true, .. });
    assert_eq!(pair.net.record().iter().filter(|call| accepted(call)).count(), 16);
    // No more receives are posted than the consumer has room for, however far the sends are.
    for _ in 0..5000 {
        let _ = recv::progress(&pair.recv, &mut receiving).unwrap();
        let _ = send::progress(&pair.send, &mut sending).unwrap();
        assert_eq!(pair.send.ring().head(), sending.head);
    }
    assert_eq!((receiving.head, receiving.tail, receiving.wait), (8, 8, Wait::Consumer));
    assert_eq!((sending.head, sending.tail, sending.wait), (8, 8, Wait::Producer));
}

#[test]
fn what_is_sent_on_one_connection_arrives_on_no_other() {
    let net = Fake::new(3, Behaviour { delay: 3, ..Behaviour::default() });
    let mut one = TestPair::over(net.clone(), 1, 0, Options::default());
    let mut two = TestPair::over(net, 2, 0, Options::default());
    exchange(&mut one, &[Steps::simple(10)]);
    exchange(&mut two, &[Steps::simple(11)]);
    exchange(&mut one, &[Steps::simple(12)]);
}
