//! Bytes arrive: every opcode, size, number of streams, size of buffer.

use super::*;

const SIZES: [usize; 14] = [0, 1, 7, 8, 63, 64, 65, 2047, 4096, 65_537, 131_072, 1 << 20, (1 << 20) + 1, 3_500_003];

fn every_opcode(setup: Setup) {
    let (mut a, mut b) = pair(setup);
    for (round, &len) in SIZES.iter().enumerate() {
        let from = Memory::patterned(len, round as u64);
        for opcode in [Opcode::Send, Opcode::SendWithImm, Opcode::Write, Opcode::WriteWithImm, Opcode::Read] {
            let to = Memory::new(len, ALL);
            let imm = 0xdead_0000 + round as u32;
            if matches!(opcode, Opcode::Send | Opcode::SendWithImm | Opcode::WriteWithImm) {
                b.recv(1, to.sge(0, len));
            }
            let wanted = if opcode == Opcode::Read {
                let request = write(2, to.sge(0, len), &from, 0);
                a.post(of(opcode, request));
                1
            } else {
                let request = write(2, from.sge(0, len), &to, 0);
                a.post(SendWr { imm, ..of(opcode, request) });
                if opcode == Opcode::Write { 1 } else { 2 }
            };
            drive(&mut a, &mut b, |a, b| a.done.len() + b.done.len() == wanted);
            assert!(from.bytes() == to.bytes(), "{opcode:?} of {len} bytes");
            let sent = a.done.pop().unwrap();
            let expected = match opcode {
                Opcode::Read => WcOpcode::Read,
                Opcode::Write | Opcode::WriteWithImm => WcOpcode::Write,
                _ => WcOpcode::Send,
            };
            assert_eq!((sent.wr_id, sent.status, sent.opcode), (2, WcStatus::Success, expected));
            if let Some(got) = b.done.pop() {
                let (kind, with_imm) = match opcode {
                    Opcode::Send => (WcOpcode::Recv, None),
                    Opcode::SendWithImm => (WcOpcode::Recv, Some(imm)),
                    _ => (WcOpcode::RecvRdmaWithImm, Some(imm)),
                };
                assert_eq!((got.wr_id, got.opcode, got.byte_len as usize, got.imm), (1, kind, len, with_imm));
            }
        }
    }
    let bytes = SIZES.iter().sum::<usize>() as u64;
    assert_eq!(a.wq.stats.get(RailCounter::TxTcp), 4 * bytes);
    assert_eq!(b.wq.stats.get(RailCounter::RxTcp), 4 * bytes);
    assert_eq!((b.wq.stats.get(RailCounter::TxTcp), a.wq.stats.get(RailCounter::RxTcp)), (bytes, bytes));
    assert!(a.wire.flushed() && b.wire.flushed());
}

#[test]
fn every_opcode_and_size() {
    every_opcode(Setup::default());
}

#[test]
fn every_opcode_and_size_with_data_streams() {
    for streams in [1, 3, 16] {
        every_opcode(Setup { streams, ..Setup::default() });
    }
}

#[test]
fn every_opcode_and_size_through_tiny_buffers() {
    for streams in [0, 2] {
        every_opcode(Setup { streams, buffer: Some(1), ..Setup::default() });
    }
}

#[test]
fn counters_may_start_anywhere() {
    every_opcode(Setup { start: u64::from(u32::MAX) - 20, ..Setup::default() });
}

#[test]
fn inline_requests_are_copied_while_posting() {
    let (mut a, mut b) = pair(Setup::default());
    let to = Memory::new(64, ALL);
    for len in 0..=64u8 {
        let mut bytes: Vec<u8> = (0..len).map(|i| i ^ len).collect();
        a.wq.post_send(&[SendWr { payload: Payload::Inline(&bytes), ..write(1, Sge::default(), &to, 0) }]).unwrap();
        let expected = bytes.clone();
        bytes.fill(0);
        drive(&mut a, &mut b, |a, _| a.done.len() == 1);
        assert_eq!(to.bytes()[..len as usize], expected[..]);
        a.done.clear();
    }
}

#[test]
fn many_requests_stay_in_order() {
    for streams in [0, 3] {
        let (mut a, mut b) = pair(Setup { streams, buffer: Some(4096), ..Setup::default() });
        let from = Memory::patterned(600_000, 1);
        let to = Memory::new(600_000, ALL);
        for i in 0..200 {
            let len = [0, 16, 5000, 140_000, 600_000][i as usize % 5];
            b.recv(i, Sge::default());
            a.post(SendWr { imm: i as u32, ..of(Opcode::WriteWithImm, write(i, from.sge(0, len), &to, 0)) });
        }
        drive(&mut a, &mut b, |a, b| a.done.len() + b.done.len() == 400);
        assert!(a.done.iter().enumerate().all(|(i, c)| c.wr_id == i as u64 && c.status == WcStatus::Success));
        assert!(b.done.iter().enumerate().all(|(i, c)| c.wr_id == i as u64 && c.imm == Some(i as u32)));
        assert!(from.bytes() == to.bytes());
    }
}

#[test]
fn both_directions_at_once_through_full_buffers() {
    for streams in [0, 2] {
        let (mut a, mut b) = pair(Setup { streams, buffer: Some(1), ..Setup::default() });
        let (from_a, from_b) = (Memory::patterned(2_000_000, 1), Memory::patterned(2_000_000, 2));
        let (at_a, at_b) = (Memory::new(2_000_000, ALL), Memory::new(2_000_000, ALL));
        let (read_a, read_b) = (Memory::new(2_000_000, ALL), Memory::new(2_000_000, ALL));
        for i in 0..3 {
            a.post(write(i, from_a.sge(0, 2_000_000), &at_b, 0));
            b.post(write(i, from_b.sge(0, 2_000_000), &at_a, 0));
            a.post(of(Opcode::Read, write(i, read_a.sge(0, 2_000_000), &from_b, 0)));
            b.post(of(Opcode::Read, write(i, read_b.sge(0, 2_000_000), &from_a, 0)));
        }
        drive(&mut a, &mut b, |a, b| a.done.len() + b.done.len() == 12);
        assert!(at_b.bytes() == from_a.bytes() && at_a.bytes() == from_b.bytes());
        assert!(read_a.bytes() == from_b.bytes() && read_b.bytes() == from_a.bytes());
    }
}

#[test]
fn more_reads_than_may_be_unanswered_take_turns() {
    let (mut a, mut b) = pair(Setup::default());
    let from = Memory::patterned(50 * 4096, 3);
    let to = Memory::new(50 * 4096, ALL);
    for i in 0..50 {
        a.post(of(Opcode::Read, write(i, to.sge(i as usize * 4096, 4096), &from, i as usize * 4096)));
    }
    drive(&mut a, &mut b, |a, _| a.done.len() == 50);
    assert!(from.bytes() == to.bytes());
    assert!(a.done.iter().enumerate().all(|(i, c)| c.wr_id == i as u64 && c.byte_len == 4096));
}

/// Reads a socket into another until nothing is there.
fn relay(from: &OwnedFd, to: &OwnedFd) -> usize {
    let mut bytes = vec![0u8; 1 << 16];
    let mut moved = 0;
    loop {
        // SAFETY: `bytes` is as long as said.
        let n = unsafe { libc::recv(from.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT) };
        if n <= 0 {
            return moved;
        }
        moved += n as usize;
        let mut rest = &bytes[..n as usize];
        while !rest.is_empty() {
            // SAFETY: `rest` is as long as said.
            let n = unsafe { libc::send(to.as_raw_fd(), rest.as_ptr().cast(), rest.len(), 0) };
            assert!(n > 0);
            rest = &rest[n as usize..];
        }
    }
}

#[test]
fn a_stalled_stream_holds_up_one_segment_only() {
    let setup = Setup { buffer: Some(1 << 16), ..Setup::default() };
    let control = streams(None);
    let good = streams(Some(1 << 16));
    let (near, near_peer) = streams(Some(1 << 16));
    let (far_peer, far) = streams(None);
    let mut a = side(&setup, control.0, vec![near, good.0]);
    let mut b = side(&setup, control.1, vec![far, good.1]);
    let len = 8 << 20;
    let from = Memory::patterned(len, 9);
    let to = Memory::new(len, ALL);
    a.post(write(1, from.sge(0, len), &to, 0));
    settle(&mut a, &mut b);
    let there = b.wq.stats.get(RailCounter::RxTcp);
    assert_eq!(there, (len - (512 << 10)) as u64, "the other stream carried everything but one segment");
    assert!(a.done.is_empty());
    socket2::SockRef::from(&far_peer).set_nonblocking(false).unwrap();
    for _ in 0..1000 {
        relay(&near_peer, &far_peer);
        a.step().unwrap();
        b.step().unwrap();
    }
    assert_eq!(a.done.len(), 1);
    assert!(from.bytes() == to.bytes());
}

#[test]
fn a_frame_may_come_byte_by_byte_and_a_slot_is_never_torn() {
    let setup = Setup::default();
    let mut wq = WorkQueues::new(&setup.caps, RailStats::detached(), 1, 0);
    wq.ready(7);
    let mut receiver = FrameReceiver::new();
    let to = Memory::new(64, ALL);
    for round in 1..500u64 {
        let slot = [round; 8];
        let header = codec::Header { len: 64, total: 64, addr: to.addr(), rkey: to.key(), ..codec::Header::new(codec::Kind::Write) };
        let mut stream = header.encode().to_vec();
        stream.extend(slot.iter().flat_map(|w| w.to_ne_bytes()));
        for (i, byte) in stream.iter().enumerate() {
            assert_eq!(receiver.feed(&mut wq, std::slice::from_ref(byte)).unwrap(), 1);
            let expected = if i + 1 == stream.len() { round } else { round - 1 };
            assert!(to.words.iter().all(|w| *w == expected), "after byte {i} of slot {round}");
        }
        assert_eq!(receiver.ackable(), round);
    }
}

/// A thread that only reads follows slot after slot by their flags, while the stream that writes them comes byte by byte. RHT_PUBLISHES
/// sets how many slots.
#[test]
fn a_reader_of_slots_that_come_byte_by_byte_sees_none_torn() {
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    const SLOTS: u64 = 256;
    let publishes: u64 = std::env::var("RHT_PUBLISHES").map_or(100_000, |n| n.parse().unwrap());
    let mut wq = WorkQueues::new(&QpCaps::default(), RailStats::detached(), 1, 0);
    wq.ready(7);
    let mut receiver = FrameReceiver::new();
    let to = Memory::new(64 * SLOTS as usize, ALL);
    let (base, key) = (to.addr(), to.key());
    let (read, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let (read, stop) = (&read, &stop);
        let reader = scope.spawn(move || {
            for n in 0..publishes {
                // SAFETY: aligned words of memory that outlives the scope, read as atomics.
                let word = |i: u64| unsafe { AtomicU64::from_ptr((base + n % SLOTS * 64 + i * 8) as *mut u64) };
                while word(7).load(Ordering::Acquire) != n + 1 {
                    if stop.load(Ordering::Relaxed) {
                        return false;
                    }
                    std::hint::spin_loop();
                }
                if (0..7).any(|i| word(i).load(Ordering::Relaxed) != (n + 1) * (i + 3)) {
                    stop.store(true, Ordering::Relaxed);
                    return false;
                }
                read.store(n + 1, Ordering::Release);
            }
            true
        });
        for n in 0..publishes {
            while n >= read.load(Ordering::Acquire) + SLOTS && !stop.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            let addr = base + n % SLOTS * 64;
            let mut stream = [0u8; codec::HEADER_SIZE + 64];
            stream[..codec::HEADER_SIZE]
                .copy_from_slice(&codec::Header { len: 64, total: 64, addr, rkey: key, ..codec::Header::new(codec::Kind::Write) }.encode());
            for (i, word) in stream[codec::HEADER_SIZE..].chunks_exact_mut(8).enumerate() {
                let value = if i == 7 { n + 1 } else { (n + 1) * (i as u64 + 3) };
                word.copy_from_slice(&value.to_ne_bytes());
            }
            for byte in &stream {
                if receiver.feed(&mut wq, std::slice::from_ref(byte)).is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
            }
            if stop.load(Ordering::Relaxed) {
                break;
            }
        }
        assert!(reader.join().unwrap(), "torn at slot {}", read.load(Ordering::Relaxed));
    });
}

#[test]
fn every_kind_of_frame_may_be_cut_anywhere() {
    // What A sends, recorded, is fed to a receiver in pieces of every size.
    let (near, far) = streams(None);
    let mut a = side(&Setup::default(), near, Vec::new());
    let from = Memory::patterned(3000, 5);
    let to = Memory::new(3000, ALL);
    let landed = Memory::new(3000, ALL);
    // Tells A of four receives.
    let credit = codec::Header { arg: 4, ..codec::Header::new(codec::Kind::Ack) }.encode();
    // SAFETY: `credit` is as long as said.
    unsafe { libc::send(far.as_raw_fd(), credit.as_ptr().cast(), credit.len(), 0) };
    a.step().unwrap();
    for (i, opcode) in [Opcode::Send, Opcode::Write, Opcode::WriteWithImm, Opcode::SendWithImm, Opcode::Read].into_iter().enumerate() {
        a.post(of(opcode, write(i as u64, from.sge(0, 3000), &to, 0)));
    }
    a.post(write(9, from.sge(0, 24), &to, 0));
    let mut bytes = vec![0u8; 1 << 16];
    // SAFETY: `bytes` is as long as said.
    let n = unsafe { libc::recv(far.as_raw_fd(), bytes.as_mut_ptr().cast(), bytes.len(), 0) } as usize;
    for piece in (1..200).chain([n]) {
        let mut wq = WorkQueues::new(&QpCaps::default(), RailStats::detached(), 1, 0);
        wq.ready(7);
        for i in 0..3 {
            wq.post_recv(&RecvWr { wr_id: i, sge: landed.sge(0, 3000) }).unwrap();
        }
        let mut receiver = FrameReceiver::new();
        for part in bytes[..n].chunks(piece) {
            assert_eq!(receiver.feed(&mut wq, part).unwrap(), part.len());
        }
        assert!(receiver.between_frames() && receiver.reads_to_answer().len() == 1);
        assert!(landed.bytes() == from.bytes() && to.bytes() == from.bytes());
    }
}

#[test]
fn an_idle_wire_makes_few_system_calls_and_still_receives() {
    let (mut a, mut b) = pair(Setup::default());
    settle(&mut a, &mut b);
    for _ in 0..60_000 {
        b.step().unwrap();
    }
    let before = b.wq.stats.get(RailCounter::Syscalls);
    for _ in 0..6400 {
        b.step().unwrap();
    }
    let calls = b.wq.stats.get(RailCounter::Syscalls) - before;
    assert!((1..=200).contains(&calls), "{calls} calls in 6400 idle polls");
    let from = Memory::patterned(100, 1);
    let to = Memory::new(100, ALL);
    a.post(write(1, from.sge(0, 100), &to, 0));
    let mut polls = 0;
    while to.bytes() != from.bytes() {
        b.step().unwrap();
        polls += 1;
        assert!(polls <= 65);
    }
}

#[test]
fn an_acknowledgement_is_out_before_the_receive_is_reported() {
    let (mut a, mut b) = pair(Setup::default());
    let from = Memory::patterned(100, 1);
    let to = Memory::new(100, ALL);
    b.recv(1, Sge::default());
    settle(&mut a, &mut b);
    a.post(of(Opcode::WriteWithImm, write(1, from.sge(0, 100), &to, 0)));
    b.step().unwrap();
    assert!(b.done.len() == 1 && b.wire.flushed());
    // B never polls again.
    a.step().unwrap();
    assert_eq!(a.took(), [(1, WcStatus::Success)]);
}

#[test]
fn unsignaled_requests_are_acknowledged_with_something_else() {
    let (mut a, mut b) = pair(Setup::default());
    let from = Memory::patterned(100, 1);
    let to = Memory::new(100, ALL);
    settle(&mut a, &mut b);
    let before = a.wq.stats.get(RailCounter::Syscalls) + b.wq.stats.get(RailCounter::Syscalls);
    a.post(SendWr { signaled: false, ..write(1, from.sge(0, 100), &to, 0) });
    b.step().unwrap();
    assert!(to.bytes() == from.bytes() && b.wire.flushed());
    assert_eq!(a.wq.stats.get(RailCounter::Syscalls) + b.wq.stats.get(RailCounter::Syscalls) - before, 2, "one to send, one to receive");
    assert_eq!((a.wq.sq.acked, a.wq.sq.sent), (0, 1));
    b.post(write(2, to.sge(0, 100), &from, 0));
    a.step().unwrap();
    assert_eq!(a.wq.sq.acked, 1, "the acknowledgement travels with the next request");
    a.post(SendWr { signaled: false, ..write(3, from.sge(0, 100), &to, 0) });
    b.step().unwrap();
    let kept = b.wire.close();
    while a.step().is_ok() {}
    assert_eq!(a.wq.sq.acked, 2, "or, at the latest, with the end of the stream");
    drop(kept);
}

#[test]
fn a_queue_of_unsignaled_requests_never_stays_full() {
    for send_depth in [1, 2, 3, 4, 5, 64] {
        let caps = QpCaps { send_depth, ..QpCaps::default() };
        let (mut a, mut b) = pair(Setup { caps, ..Setup::default() });
        let from = Memory::patterned(100, 1);
        let to = Memory::new(100, ALL);
        let request = SendWr { signaled: false, ..write(1, from.sge(0, 100), &to, 0) };
        let mut posted = 0;
        for _ in 0..10_000 {
            if a.wq.post_send(&[request]).is_ok() {
                a.wire.kick(&mut a.wq).unwrap();
                posted += 1;
            } else {
                a.step().unwrap();
                b.step().unwrap();
            }
        }
        assert!(posted > 3000, "{posted} posted in a queue of {send_depth}");
    }
}

#[test]
fn long_payloads_in_a_row_are_received_directly() {
    const LEN: usize = 48 << 10;
    let (mut a, mut b) = pair(Setup::default());
    let to = Memory::new(LEN, ALL);
    for round in 0..8 {
        let from = Memory::patterned(LEN, round);
        a.post(write(1, from.sge(0, LEN), &to, 0));
        drive(&mut a, &mut b, |a, _| a.done.len() == 1);
        assert!(round == 0 || b.wire.end <= BETWEEN, "message {round}: {} bytes received ahead of their target", b.wire.end);
        assert_eq!(a.took(), [(1, WcStatus::Success)]);
        assert!(from.bytes() == to.bytes());
    }
}

#[test]
fn a_request_may_be_done_once_it_is_sent() {
    let sent = |request| SendWr { when_sent: true, ..request };
    let (mut a, mut b) = pair(Setup::default());
    let from = Memory::patterned(100, 1);
    let to = Memory::new(100, ALL);
    settle(&mut a, &mut b);
    a.post(sent(write(1, from.sge(0, 100), &to, 0)));
    a.step().unwrap();
    assert_eq!((a.took(), a.wq.sq.acked), (vec![(1, WcStatus::Success)], 0), "without a poll of the peer's");
    // One behind it that asks for an ack is done with that.
    a.post(write(2, from.sge(0, 100), &to, 0));
    a.step().unwrap();
    assert_eq!(a.took(), []);
    drive(&mut a, &mut b, |a, _| a.done.len() == 1);
    assert_eq!((a.took(), a.wq.sq.acked), (vec![(2, WcStatus::Success)], 2));
    // What the peer refuses fails the queue pair, and what comes later.
    a.post(sent(SendWr { rkey: to.key() ^ 1, ..write(3, from.sge(0, 100), &to, 0) }));
    a.post(write(4, from.sge(0, 100), &to, 0));
    let (of_a, _) = faults(&mut a, &mut b);
    a.wq.fail(of_a);
    a.poll_completions();
    assert_eq!(a.took(), [(3, WcStatus::Success), (4, WcStatus::RemAccessErr)]);
}

#[test]
fn not_with_data_streams() {
    let (mut a, mut b) = pair(Setup { streams: 2, ..Setup::default() });
    let from = Memory::patterned(100, 1);
    let to = Memory::new(100, ALL);
    settle(&mut a, &mut b);
    a.post(SendWr { when_sent: true, ..write(1, from.sge(0, 100), &to, 0) });
    a.step().unwrap();
    assert_eq!(a.took(), []);
    drive(&mut a, &mut b, |a, _| a.done.len() == 1);
    assert!(to.bytes() == from.bytes());
}

#[test]
fn a_queue_of_requests_that_are_done_once_sent_gets_acks() {
    let caps = QpCaps { send_depth: 4, ..QpCaps::default() };
    let (mut a, mut b) = pair(Setup { caps, ..Setup::default() });
    let from = Memory::patterned(100, 1);
    let to = Memory::new(100, ALL);
    for i in 0..10_000 {
        a.post(SendWr { when_sent: true, ..write(i, from.sge(0, 100), &to, 0) });
        a.step().unwrap();
        assert_eq!(a.took(), [(i, WcStatus::Success)]);
        b.step().unwrap();
        assert!(a.wq.sq.posted - a.wq.sq.acked <= 4, "{i}");
    }
}

/// A request that is held, and the memory that it writes.
fn held(a: &mut Side, b: &mut Side) -> (Memory, Memory) {
    let from = Memory::patterned(100, 1);
    let to = Memory::new(200, ALL);
    settle(a, b);
    a.hold(SendWr { signaled: false, ..write(1, from.sge(0, 100), &to, 0) });
    for _ in 0..10 {
        a.step().unwrap();
        b.step().unwrap();
    }
    assert!(to.bytes() == [0; 200], "it is held");
    (from, to)
}

fn is_there((from, to): &(Memory, Memory)) -> bool {
    to.bytes().starts_with(from.bytes())
}

#[test]
fn what_is_held_goes_with_the_next_request_and_before_it() {
    let (mut a, mut b) = pair(Setup::default());
    let memory = held(&mut a, &mut b);
    let before = a.wq.stats.get(RailCounter::Syscalls);
    a.post(write(2, memory.0.sge(0, 50), &memory.1, 50));
    assert_eq!(a.wq.stats.get(RailCounter::Syscalls) - before, 1);
    settle(&mut a, &mut b);
    assert_eq!((&memory.1.bytes()[..50], &memory.1.bytes()[50..100]), (&memory.0.bytes()[..50], &memory.0.bytes()[..50]));
}

#[test]
fn what_is_held_goes_with_an_ack() {
    let (mut a, mut b) = pair(Setup::default());
    let memory = held(&mut a, &mut b);
    let (other, there) = (Memory::patterned(100, 2), Memory::new(100, ALL));
    b.post(write(3, other.sge(0, 100), &there, 0));
    a.step().unwrap();
    b.step().unwrap();
    assert!(is_there(&memory) && there.bytes() == other.bytes());
    assert_eq!(b.took(), [(3, WcStatus::Success)]);
}

#[test]
fn what_is_held_goes_after_so_many_polls() {
    let (mut a, mut b) = pair(Setup::default());
    let memory = held(&mut a, &mut b);
    for _ in 10..HELD_POLLS - 1 {
        a.step().unwrap();
    }
    b.step().unwrap();
    assert!(!is_there(&memory));
    a.step().unwrap();
    b.step().unwrap();
    assert!(is_there(&memory));
}

#[test]
fn nothing_is_held_before_a_sleep() {
    let (mut a, mut b) = pair(Setup::default());
    let memory = held(&mut a, &mut b);
    a.wire.wake();
    a.step().unwrap();
    b.step().unwrap();
    assert!(is_there(&memory));
}
