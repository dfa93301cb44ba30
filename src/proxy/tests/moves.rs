//! Operations that succeed: every byte arrives, in order, and nothing is announced before its time.

use super::super::args::Wait;
use super::super::ring::{EMPTY, STEPS, Words};
use super::*;

/// Moves the operations one after the other, with both programs taking part whenever they can; checks each byte and each invariant on the way.
fn exchange(rig: &mut Rig, operations: &[Steps]) {
    for (n, steps) in operations.iter().enumerate() {
        let Steps { count, slice, chunk, protocol } = *steps;
        let (mut sending, mut receiving) = (Some(Args::new(*steps).unwrap()), Some(Args::new(*steps).unwrap()));
        rig.producer.start(chunk).unwrap();
        rig.consumer.start(chunk).unwrap();
        let len = |message: u64| (message as usize * 53 + n * 17) % (most(protocol, slice) + 1);
        let (mut filled, mut emptied) = (0, 0);
        let mut idle = 0;
        while sending.is_some() || receiving.is_some() || emptied < count / slice {
            if filled < count / slice && rig.producer.has_room(slice).unwrap() {
                fill(&mut rig.producer, rig.send.ring(), protocol, slice, &pattern(n as u64, filled, len(filled)));
                filled += 1;
            }
            let mut moved = false;
            if let Some(args) = &mut sending {
                let progress = send::progress(&rig.send, args).unwrap();
                moved |= progress != Progress::Idle;
                assert!(args.tail.wrapping_sub(args.head) <= STEPS);
                assert!(progress != Progress::Idle || args.wait != Wait::Nothing);
                // What is posted has no size any more, so that nothing is left to be erased once its slot is free.
                let mut step = args.base;
                while step != args.tail && rig.producer.step().wrapping_sub(step) <= STEPS {
                    assert!(rig.producer.step().wrapping_sub(step) > STEPS || rig.send.ring().size((step % STEPS) as usize) == EMPTY);
                    step = step.wrapping_add(slice);
                }
                assert_eq!(rig.send.ring().head(), args.head);
                if progress == Progress::Done {
                    sending = None;
                }
            }
            if let Some(args) = &mut receiving {
                let progress = recv::progress(&rig.recv, args).unwrap();
                moved |= progress != Progress::Idle;
                assert!(args.tail.wrapping_sub(rig.recv.ring().head()) <= STEPS);
                assert!(progress != Progress::Idle || args.wait != Wait::Nothing);
                if progress == Progress::Done {
                    receiving = None;
                }
            }
            while let Some(bytes) = rig.consumer.filled(slice, SLOT * slice as usize).unwrap() {
                let mut wire = vec![0; bytes];
                // SAFETY: filled told of the slots.
                unsafe { rig.recv.ring().copy_out(protocol, rig.consumer.step(), &mut wire) }.unwrap();
                assert_eq!(
                    strip(protocol, &wire, len(emptied)),
                    pattern(n as u64, emptied, len(emptied)),
                    "operation {n}, message {emptied}"
                );
                rig.consumer.release(slice);
                emptied += 1;
                moved = true;
            }
            idle = if moved { 0 } else { idle + 1 };
            assert!(idle < 10_000, "stuck: {sending:?} {receiving:?}");
        }
        assert_eq!((filled, emptied), (count / slice, count / slice));
        assert_eq!(rig.consumer.filled(1, SLOT).unwrap(), None);
    }
}

const WEATHER: [Behaviour; 4] = [
    Behaviour { delay: 0, unwilling: 0, fails_at: None, holds_flushes: false, exaggerates: 0 },
    Behaviour { delay: 5, unwilling: 0, fails_at: None, holds_flushes: false, exaggerates: 0 },
    Behaviour { delay: 0, unwilling: 2, fails_at: None, holds_flushes: false, exaggerates: 0 },
    Behaviour { delay: 20, unwilling: 3, fails_at: None, holds_flushes: false, exaggerates: 0 },
];

#[test]
fn every_slice_chunk_and_protocol_in_every_weather() {
    for behaviour in WEATHER {
        for start in [0, 3, u64::from(u32::MAX) - 9, u64::MAX - 9] {
            let mut rig = Rig::new(behaviour, start);
            for protocol in Protocol::ALL {
                for slice in [1, 2, 4, 8] {
                    for chunk in [1, 2, 4, 8].into_iter().filter(|chunk| *chunk >= slice) {
                        for count in [slice, 3 * slice, 24 * slice] {
                            exchange(&mut rig, &[Steps { count, slice, chunk, protocol }]);
                        }
                    }
                }
            }
            let net = rig.net.clone();
            rig.close().unwrap();
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
        let mut rig = Rig::new(Behaviour { delay: 7, unwilling: 4, ..Behaviour::default() }, start);
        let operations: Vec<Steps> = (0..300)
            .map(|_| {
                let slice = 1 << chance(4);
                let chunk = slice << chance(4 - u64::from(u64::trailing_zeros(slice)));
                Steps { count: slice * (1 + chance(20)), slice, chunk, protocol: Protocol::ALL[chance(3) as usize] }
            })
            .collect();
        exchange(&mut rig, &operations);
        assert_eq!(rig.send.counters().operations.load(std::sync::atomic::Ordering::Relaxed), 300);
    }
}

#[test]
fn a_million_operations_of_no_bytes() {
    let mut rig = Rig::new(Behaviour::default(), u64::MAX - 500_000);
    rig.net.quiet();
    for _ in 0..1_000_000 {
        let (mut sending, mut receiving) = (Args::new(Steps::simple(1)).unwrap(), Args::new(Steps::simple(1)).unwrap());
        assert!(rig.producer.has_room(1).unwrap());
        rig.producer.post(1, 0);
        let _ = recv::progress(&rig.recv, &mut receiving).unwrap();
        assert_eq!(send::progress(&rig.send, &mut sending).unwrap(), Progress::Done);
        assert_eq!(recv::progress(&rig.recv, &mut receiving).unwrap(), Progress::Done);
        assert_eq!(rig.consumer.filled(1, SLOT).unwrap(), Some(0));
        rig.consumer.release(1);
    }
    assert_eq!(rig.consumer.step(), 499_999);
}

/// A producer that writes the size first, then the lines in any order, and `tail` last of all, as a GPU does.
#[test]
fn ll_goes_by_its_flags_alone_and_ll128_by_both() {
    for protocol in [Protocol::Ll, Protocol::Ll128] {
        let rig = Rig::new(Behaviour::default(), 0);
        let ring = rig.send.ring().clone();
        let steps = Steps { count: 1, slice: 1, chunk: 1, protocol };
        let (mut sending, mut receiving) = (Args::new(steps).unwrap(), Args::new(steps).unwrap());
        let _ = recv::progress(&rig.recv, &mut receiving).unwrap();
        let wait = |sending: &mut Args| {
            assert_eq!(send::progress(&rig.send, sending).unwrap(), Progress::Idle);
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
            // SAFETY: this test is the producer, and the proxy only looks at the flags.
            unsafe { ring.copy_in(protocol, 0, part) }.unwrap();
            assert_eq!(wait(&mut sending), Wait::Flags);
        }
        // SAFETY: as above.
        unsafe { ring.copy_in(protocol, 0, &lines) }.unwrap();
        assert_eq!(send::progress(&rig.send, &mut sending).unwrap(), Progress::Done);
        let _ = recv::progress(&rig.recv, &mut receiving).unwrap();
        let mut got = vec![0; 256];
        // SAFETY: this test is the consumer, and the step is announced.
        unsafe { rig.recv.ring().copy_out(protocol, 0, &mut got) }.unwrap();
        assert_eq!((rig.recv.ring().tail(), got), (1, lines));
    }
}

/// What was seen of one slot says nothing of the next, and each has the flags of its own step, whatever is still under way.
#[test]
fn every_slot_is_looked_at_from_its_first_line_on_for_its_own_flags() {
    for protocol in [Protocol::Ll, Protocol::Ll128] {
        for start in [0, u64::from(u32::MAX) - 1, u64::MAX - 1] {
            let rig = Rig::new(Behaviour { delay: u64::MAX - 1, ..Behaviour::default() }, start);
            let ring = rig.send.ring().clone();
            let steps = Steps { count: 2, slice: 1, chunk: 1, protocol };
            let (mut sending, mut receiving) = (Args::new(steps).unwrap(), Args::new(steps).unwrap());
            let _ = recv::progress(&rig.recv, &mut receiving).unwrap();
            // Two parts of a slot with the flags of these steps.
            let put = |at: u64, flags: [u64; 2]| {
                let step = start.wrapping_add(at);
                let part = |flag: u64| match protocol {
                    Protocol::Ll => [[0xee; 4], ll_flag(start.wrapping_add(flag)).to_ne_bytes()].concat().repeat(16),
                    _ => [&[0xee; 120][..], &ll128_flag(start.wrapping_add(flag)).to_ne_bytes()].concat(),
                };
                // SAFETY: this test is the producer, and the proxy only looks at the flags.
                unsafe { ring.copy_in(protocol, step, &flags.map(part).concat()) }.unwrap();
                ring.set_size((step % STEPS) as usize, 256);
                ring.set_tail(step.wrapping_add(1));
            };
            let mut look = || {
                let _ = send::progress(&rig.send, &mut sending).unwrap();
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
fn what_is_flushed_is_announced_only_then() {
    let flush = Options { flush: true, ..Options::default() };
    let mut rig = Rig::over(Fake::new(9, Behaviour { holds_flushes: true, ..Behaviour::default() }), 1, 0, flush);
    let (mut sending, mut receiving) = (Args::new(Steps::simple(3)).unwrap(), Args::new(Steps::simple(3)).unwrap());
    // The second message is empty: there is nothing to flush, but its turn comes after the first.
    for bytes in [5, 0, 256] {
        rig.producer.post(1, bytes);
    }
    for _ in 0..10 {
        let _ = recv::progress(&rig.recv, &mut receiving).unwrap();
        let _ = send::progress(&rig.send, &mut sending).unwrap();
    }
    assert_eq!((receiving.received, receiving.head, rig.recv.ring().tail(), receiving.wait), (3, 0, 0, Wait::Flush));
    let flushes = || -> Vec<usize> {
        rig.net.record().iter().filter_map(|call| if let Call::Iflush { bytes, .. } = call { Some(*bytes) } else { None }).collect()
    };
    assert_eq!(flushes(), [5, 256]);
    rig.net.behave(|behaviour| behaviour.holds_flushes = false);
    assert_eq!(recv::progress(&rig.recv, &mut receiving).unwrap(), Progress::Done);
    assert_eq!(rig.recv.ring().tail(), 3);
    assert_eq!([0, 1, 2].map(|slot| rig.recv.ring().size(slot)), [5, 0, 256]);
    assert_eq!(flushes(), [5, 256], "once each");
}

#[test]
fn a_network_that_takes_nothing_is_asked_again_and_nothing_is_lost() {
    let mut rig = Rig::new(Behaviour::default(), 0);
    let (mut sending, mut receiving) = (Args::new(Steps::simple(2)).unwrap(), Args::new(Steps::simple(2)).unwrap());
    rig.producer.post(1, 10);
    // No receive is posted, so the network takes no send.
    for _ in 0..5 {
        assert_eq!(send::progress(&rig.send, &mut sending).unwrap(), Progress::Idle);
        assert_eq!((sending.tail, sending.wait, rig.send.ring().size(0)), (0, Wait::Receiver, 10));
    }
    let _ = recv::progress(&rig.recv, &mut receiving).unwrap();
    assert_eq!((receiving.tail, receiving.wait), (2, Wait::Sender));
    assert_eq!(send::progress(&rig.send, &mut sending).unwrap(), Progress::Moved);
    assert_eq!((sending.head, sending.tail, rig.send.ring().size(0), sending.wait), (1, 1, EMPTY, Wait::Producer));
    assert_eq!(rig.send.counters().retries.load(std::sync::atomic::Ordering::Relaxed), 5);
    let expected = [false, false, false, false, false, true].map(|taken| Call::Isend { link: 1, bytes: 10, taken });
    let sends: Vec<Call> = rig.net.record().into_iter().filter(|call| matches!(call, Call::Isend { .. })).collect();
    assert_eq!(sends, expected);
}

#[test]
fn at_most_eight_steps_are_in_flight_and_they_complete_in_order() {
    let mut rig = Rig::new(Behaviour { delay: 1000, ..Behaviour::default() }, 0);
    let (mut sending, mut receiving) = (Args::new(Steps::simple(100)).unwrap(), Args::new(Steps::simple(100)).unwrap());
    (0..8).for_each(|_| rig.producer.post(1, 1));
    let _ = recv::progress(&rig.recv, &mut receiving).unwrap();
    let _ = send::progress(&rig.send, &mut sending).unwrap();
    assert_eq!((receiving.tail, sending.tail), (8, 8));
    assert!(!rig.producer.has_room(1).unwrap());
    let taken = |call: &Call| matches!(call, Call::Isend { taken: true, .. } | Call::Irecv { taken: true, .. });
    assert_eq!(rig.net.record().iter().filter(|call| taken(call)).count(), 16);
    // Nothing more is posted to the peer than its consumer has room for, however far the sends are.
    for _ in 0..5000 {
        let _ = recv::progress(&rig.recv, &mut receiving).unwrap();
        let _ = send::progress(&rig.send, &mut sending).unwrap();
        assert_eq!(rig.send.ring().head(), sending.head);
    }
    assert_eq!((receiving.head, receiving.tail, receiving.wait), (8, 8, Wait::Consumer));
    assert_eq!((sending.head, sending.tail, sending.wait), (8, 8, Wait::Producer));
}

#[test]
fn what_is_sent_on_one_link_arrives_on_no_other() {
    let net = Fake::new(3, Behaviour { delay: 3, ..Behaviour::default() });
    let mut one = Rig::over(net.clone(), 1, 0, Options::default());
    let mut two = Rig::over(net, 2, 0, Options::default());
    exchange(&mut one, &[Steps::simple(10)]);
    exchange(&mut two, &[Steps::simple(11)]);
    exchange(&mut one, &[Steps::simple(12)]);
}
