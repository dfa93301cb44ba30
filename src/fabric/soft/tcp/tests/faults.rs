//! What goes wrong ends the queue pair, with the right status on both sides.

use super::*;
use codec::{Header, Kind};
use proptest::prelude::*;

fn bad(request: impl Fn(&Memory, &Memory) -> SendWr<'static>, status: WcStatus) {
    for streams in [0, 2] {
        let (mut a, mut b) = pair(Setup { streams, ..Setup::default() });
        let from = Memory::patterned(300_000, 1);
        let to = Memory::new(300_000, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        a.post(write(1, from.sge(0, 200), &to, 0));
        a.post(request(&from, &to));
        a.post(write(3, from.sge(0, 200_000), &to, 0));
        let (of_a, of_b) = faults(&mut a, &mut b);
        assert_eq!((of_a.status, of_b.status), (status, WcStatus::WrFlushErr), "{} / {}", of_a.why, of_b.why);
        assert_eq!(a.took(), [(1, WcStatus::Success), (2, status), (3, WcStatus::WrFlushErr)]);
        let landed = to.bytes()[200..].iter().position(|b| *b != 0);
        assert_eq!(landed, None, "bytes of a refused request, or after one, landed: {}", of_b.why);
    }
}

#[test]
fn remote_access_violations_are_refused() {
    for len in [8, 64, 100, 4096, 200_000] {
        let at = move |from: &Memory, to: &Memory, offset: usize| write(2, from.sge(0, len), to, offset);
        bad(|f, t| SendWr { rkey: t.key() ^ 0x5000_0000, ..at(f, t, 0) }, WcStatus::RemAccessErr);
        bad(|f, t| SendWr { rkey: 0, ..at(f, t, 0) }, WcStatus::RemAccessErr);
        bad(|f, t| at(f, t, 300_000 - len + 8), WcStatus::RemAccessErr);
        bad(|f, t| SendWr { remote_addr: t.addr() - 8, ..at(f, t, 0) }, WcStatus::RemAccessErr);
        bad(|f, t| SendWr { remote_addr: u64::MAX - 7, ..at(f, t, 0) }, WcStatus::RemAccessErr);
        bad(|f, t| of(Opcode::Read, at(f, t, 0)), WcStatus::RemAccessErr);
        bad(|f, t| SendWr { rkey: 77, ..of(Opcode::Read, at(f, t, 0)) }, WcStatus::RemAccessErr);
    }
}

#[test]
fn a_zero_length_request_needs_no_key() {
    let (mut a, mut b) = pair(Setup::default());
    let nowhere = Memory::new(1, ALL);
    for (i, opcode) in [Opcode::Write, Opcode::Read].into_iter().enumerate() {
        a.post(SendWr { rkey: 0, remote_addr: 0, ..of(opcode, write(i as u64, Sge::default(), &nowhere, 0)) });
    }
    drive(&mut a, &mut b, |a, _| a.done.len() == 2);
}

#[test]
fn local_violations_hit_the_request_itself() {
    for opcode in [Opcode::Write, Opcode::Send, Opcode::Read] {
        for len in [8, 300, 200_000] {
            for streams in [0, 2] {
                let (mut a, mut b) = pair(Setup { streams, ..Setup::default() });
                let from = Memory::patterned(200_000, 1);
                let read_only = Memory::new(200_000, Access::REMOTE_READ);
                let to = Memory::new(200_000, ALL);
                b.recv(7, to.sge(0, 200_000));
                settle(&mut a, &mut b);
                a.post(write(1, from.sge(0, 200_000), &to, 0));
                let lkey = if opcode == Opcode::Read { read_only.key() } else { 1234 };
                a.post(of(opcode, write(2, Sge { lkey, ..read_only.sge(0, len) }, &to, 0)));
                a.post(write(3, from.sge(0, 8), &to, 0));
                let fault = loop {
                    b.step().unwrap();
                    if let Err(fault) = a.step() {
                        break fault;
                    }
                };
                a.wq.fail(fault);
                a.poll_completions();
                assert_eq!(a.took(), [(1, WcStatus::Success), (2, WcStatus::LocProtErr), (3, WcStatus::WrFlushErr)]);
            }
        }
    }
}

#[test]
fn a_send_that_does_not_fit_its_receive_fails_on_both_sides() {
    for (len, room) in [(9, 8), (100, 0), (200_000, 199_999)] {
        for streams in [0, 2] {
            let (mut a, mut b) = pair(Setup { streams, ..Setup::default() });
            let from = Memory::patterned(200_000, 1);
            let to = Memory::new(200_000, ALL);
            b.recv(5, to.sge(0, room));
            b.recv(6, to.sge(0, room));
            a.post(of(Opcode::Send, write(1, from.sge(0, len), &to, 0)));
            let (of_a, _) = faults(&mut a, &mut b);
            assert_eq!(of_a.status, WcStatus::RemInvReqErr);
            assert_eq!(b.took(), [(5, WcStatus::LocLenErr), (6, WcStatus::WrFlushErr)]);
            assert!(to.bytes().iter().all(|b| *b == 0));
        }
    }
}

#[test]
fn a_receive_into_unregistered_memory_fails_on_both_sides() {
    for len in [9, 100_000, 200_000] {
        let (mut a, mut b) = pair(Setup { streams: 2, ..Setup::default() });
        let from = Memory::patterned(200_000, 1);
        let to = Memory::new(200_000, Access::REMOTE_WRITE);
        b.recv(5, to.sge(0, 200_000));
        a.post(of(Opcode::Send, write(1, from.sge(0, len), &to, 0)));
        let (of_a, _) = faults(&mut a, &mut b);
        assert_eq!(of_a.status, WcStatus::RemOpErr);
        assert_eq!(b.took(), [(5, WcStatus::LocProtErr)]);
    }
}

#[test]
fn memory_deregistered_midway_is_never_touched_again() {
    for streams in [0, 2] {
        let (mut a, mut b) = pair(Setup { streams, buffer: Some(1), ..Setup::default() });
        let len = 4 << 20;
        let from = Memory::patterned(len, 1);
        let mut to = Memory::new(len, ALL);
        a.post(write(1, from.sge(0, len), &to, 0));
        drive(&mut a, &mut b, |_, b| b.wq.stats.get(RailCounter::RxTcp) > 100_000);
        to.mr = None;
        to.words.fill(0);
        let (of_a, _) = faults(&mut a, &mut b);
        assert_eq!(of_a.status, WcStatus::RemAccessErr);
        assert!(to.bytes().iter().all(|b| *b == 0));
    }
}

#[test]
fn memory_deregistered_while_it_is_sent_or_read_ends_the_pair() {
    for read in [false, true] {
        for streams in [0, 2] {
            let (mut a, mut b) = pair(Setup { streams, buffer: Some(1), ..Setup::default() });
            let len = 4 << 20;
            let mut from = Memory::patterned(len, 1);
            let to = Memory::new(len, ALL);
            let (giver, taker) = if read {
                b.post(of(Opcode::Read, write(1, to.sge(0, len), &from, 0)));
                (&mut a, &mut b)
            } else {
                a.post(write(1, from.sge(0, len), &to, 0));
                (&mut a, &mut b)
            };
            drive(giver, taker, |_, b| b.wq.stats.get(RailCounter::RxTcp) > 100_000);
            from.mr = None;
            let fault = loop {
                taker.step().unwrap();
                if let Err(fault) = giver.step() {
                    break fault;
                }
            };
            assert_eq!(fault.status, if read { WcStatus::WrFlushErr } else { WcStatus::LocProtErr });
        }
    }
}

#[test]
fn a_send_waits_for_its_receive_and_holds_up_nothing_else() {
    let (mut a, mut b) = pair(Setup::default());
    let (mine, theirs) = (Memory::patterned(5000, 1), Memory::patterned(5000, 2));
    let (at_a, at_b) = (Memory::new(5000, ALL), Memory::new(5000, ALL));
    a.post(of(Opcode::Send, write(1, mine.sge(0, 5000), &at_b, 0)));
    a.post(write(2, mine.sge(0, 5000), &at_b, 0));
    settle(&mut a, &mut b);
    // B has posted nothing, but its own requests complete.
    b.post(write(3, theirs.sge(0, 5000), &at_a, 0));
    drive(&mut a, &mut b, |_, b| b.done.len() == 1);
    assert!(a.done.is_empty());
    assert_eq!(b.wq.stats.get(RailCounter::RnrWaits), 1);
    b.recv(4, at_b.sge(0, 5000));
    drive(&mut a, &mut b, |a, b| a.done.len() == 2 && b.done.len() == 2);
    assert!(at_a.bytes() == theirs.bytes() && at_b.bytes() == mine.bytes());
}

#[test]
fn a_requesters_patience_ends() {
    let caps = QpCaps { rnr_retry: 1, min_rnr_timer_us: 2000, ..QpCaps::default() };
    let (mut a, mut b) = pair(Setup { caps, ..Setup::default() });
    let from = Memory::patterned(50, 1);
    let to = Memory::new(50, ALL);
    a.post(write(1, from.sge(0, 50), &to, 0));
    a.post(of(Opcode::WriteWithImm, write(2, from.sge(0, 50), &to, 0)));
    a.post(write(3, from.sge(0, 50), &to, 0));
    let begun = clock::now();
    let fault = loop {
        let _ = b.step();
        if let Err(fault) = a.step() {
            break fault;
        }
    };
    assert_eq!(fault.status, WcStatus::RnrRetryExcErr);
    assert!(clock::now() - begun >= 2_000_000);
    a.wq.fail(fault);
    a.poll_completions();
    assert_eq!(a.took(), [(1, WcStatus::Success), (2, WcStatus::RnrRetryExcErr), (3, WcStatus::WrFlushErr)]);
}

#[test]
fn what_came_before_the_end_of_the_stream_is_applied() {
    for streams in [0, 3] {
        let (mut a, mut b) = pair(Setup { streams, ..Setup::default() });
        let len = if streams == 0 { 80_000 } else { 150_000 };
        let from = Memory::patterned(len, 1);
        let to = Memory::new(len, ALL);
        b.recv(1, Sge::default());
        b.recv(2, Sge::default());
        settle(&mut a, &mut b);
        for i in 0..2 {
            a.post(of(Opcode::WriteWithImm, write(i, from.sge(0, len), &to, 0)));
            a.step().unwrap();
        }
        assert!(!a.wq.sq.pending(), "the sockets do not hold both requests");
        drop(a.wire.close());
        let fault = loop {
            if let Err(fault) = b.step() {
                break fault;
            }
        };
        assert_eq!(fault.status, WcStatus::RetryExcErr);
        b.poll_completions();
        assert_eq!(b.took(), [(1, WcStatus::Success), (2, WcStatus::Success)]);
        assert!(to.bytes() == from.bytes());
    }
}

#[test]
fn a_peer_that_dies_midway_is_noticed_on_both_paths() {
    for streams in [0, 3] {
        let (mut a, mut b) = pair(Setup { streams, buffer: Some(1), ..Setup::default() });
        let from = Memory::patterned(1_500_000, 1);
        let to = Memory::new(1_500_000, ALL);
        a.post(write(1, from.sge(0, 1_500_000), &to, 0));
        b.post(write(2, to.sge(0, 1_500_000), &from, 0));
        drive(&mut a, &mut b, |_, b| b.wq.stats.get(RailCounter::RxTcp) > 300_000);
        drop(a.wire);
        let fault = loop {
            if let Err(fault) = b.step() {
                break fault;
            }
        };
        assert_eq!(fault.status, WcStatus::RetryExcErr, "{}", fault.why);
        assert!(fault.why.starts_with("lost the peer"), "{}", fault.why);
        b.wq.fail(fault);
        b.poll_completions();
        assert_eq!(b.took(), [(2, WcStatus::RetryExcErr)]);
    }
}

#[test]
fn nonsense_out_of_place_is_a_fault() {
    let to = Memory::new(8192, ALL);
    let w = Header { addr: to.addr(), rkey: to.key(), total: 100, len: 100, ..Header::new(Kind::Write) };
    let long = Header { total: codec::CHUNK * 2, len: codec::CHUNK, ..w };
    let streamed = Header { flags: codec::FLAG_STREAMED, len: 0, arg: codec::SEGMENT_MIN, ..w };
    let part = Header { len: 10, total: 0, ..Header::new(Kind::Part) };
    let read = Header { len: 0, ..Header { kind: Kind::Read, ..w } };
    let cases: Vec<(&str, Vec<Header>)> = vec![
        ("acknowledgement of nothing", vec![Header { addr: 1, ..Header::new(Kind::Ack) }]),
        ("acknowledgement beyond all", vec![Header { addr: u64::MAX, ..Header::new(Kind::Ack) }]),
        ("too many receives", vec![Header { arg: 1 << 20, ..Header::new(Kind::Ack) }]),
        ("receives taken back", vec![Header { arg: 5, ..Header::new(Kind::Ack) }, Header { arg: 4, ..Header::new(Kind::Ack) }]),
        ("answer to nothing", vec![Header { len: 10, total: 10, ..Header::new(Kind::Response) }]),
        ("more of nothing", vec![part]),
        ("more of what is complete", vec![w, part]),
        ("a request inside another", vec![long, w]),
        ("a READ inside another", vec![long, read]),
        ("frames of a streamed request", vec![streamed, part]),
        ("a SEND without a receive", vec![Header { kind: Kind::Send, ..w }]),
        ("an immediate without a receive", vec![Header { flags: codec::FLAG_IMM, ..w }]),
        ("too many READs", vec![read; codec::MAX_READS + 1]),
        ("NAK", vec![Header::new(Kind::Nak)]),
    ];
    // Room for the long ones.
    let room = Memory::new(4 << 20, ALL);
    for (what, headers) in cases {
        let mut wq = WorkQueues::new(&QpCaps::default(), RailStats::detached(), 1, 0);
        wq.ready(7);
        let mut receiver = FrameReceiver::new();
        let mut outcome = Ok(0);
        for header in headers {
            let header = if header.total > 8192 { Header { addr: room.addr(), rkey: room.key(), ..header } } else { header };
            let mut frame = header.encode().to_vec();
            frame.resize(frame.len() + header.len as usize, 1);
            outcome = outcome.and_then(|_| receiver.feed(&mut wq, &frame));
        }
        assert_eq!(outcome.expect_err(what).status, WcStatus::GeneralErr, "{what}");
    }
}

#[test]
fn segments_that_do_not_fit_their_request_are_faults() {
    let len = 300_000u32;
    let segment = codec::SEGMENT_MIN;
    let s = |index, offset, len| codec::SegmentHeader { index, offset, len };
    for (what, segments) in [
        ("of an earlier request", vec![s(0, 0, segment)]),
        ("off the grid", vec![s(1, 1, segment)]),
        ("beyond the end", vec![s(1, 5 * segment, segment)]),
        ("too long", vec![s(1, 0, segment + 1)]),
        ("too short", vec![s(1, 0, segment - 1)]),
        ("too long at the end", vec![s(1, 4 * segment, segment)]),
        ("twice", vec![s(1, segment, segment), s(1, segment, segment)]),
        ("empty", vec![s(1, 0, 0)]),
        ("absurd", vec![s(1, u32::MAX, u32::MAX)]),
    ] {
        let control = streams(None);
        let data = streams(None);
        let mut b = side(&Setup::default(), control.1, vec![data.1]);
        let to = Memory::new(len as usize, ALL);
        let w = Header { addr: to.addr(), rkey: to.key(), ..Header::new(Kind::Write) };
        let mut frames = w.encode().to_vec();
        frames.extend(Header { total: len, flags: codec::FLAG_STREAMED, arg: segment, ..w }.encode());
        // SAFETY: `frames` is as long as said.
        unsafe { libc::send(control.0.as_raw_fd(), frames.as_ptr().cast(), frames.len(), 0) };
        let mut fault = None;
        for header in segments {
            let mut bytes = header.encode().to_vec();
            bytes.resize(bytes.len() + (header.len as usize).min(segment as usize), 1);
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                // SAFETY: `rest` is as long as said.
                let n = unsafe { libc::send(data.0.as_raw_fd(), rest.as_ptr().cast(), rest.len(), libc::MSG_NOSIGNAL) };
                rest = &rest[(n.max(0) as usize).min(rest.len())..];
                fault = fault.or_else(|| b.step().err());
                if fault.is_some() {
                    break;
                }
            }
            for _ in 0..4 {
                fault = fault.or_else(|| b.step().err());
            }
        }
        assert_eq!(fault.expect(what).status, WcStatus::GeneralErr, "{what}");
    }
}

#[test]
fn a_segment_of_a_later_request_waits() {
    let control = streams(None);
    let data = streams(None);
    let mut b = side(&Setup::default(), control.1, vec![data.1]);
    let early = codec::SegmentHeader { index: 5, offset: 0, len: 1000 }.encode();
    let to = Memory::new(300_000, ALL);
    let w = Header {
        addr: to.addr(),
        rkey: to.key(),
        total: 300_000,
        flags: codec::FLAG_STREAMED,
        arg: codec::SEGMENT_MIN,
        ..Header::new(Kind::Write)
    };
    // SAFETY: both are as long as said.
    unsafe {
        libc::send(data.0.as_raw_fd(), early.as_ptr().cast(), early.len(), 0);
        libc::send(control.0.as_raw_fd(), w.encode().as_ptr().cast(), codec::HEADER_SIZE, 0);
    }
    for _ in 0..100 {
        b.step().unwrap();
    }
    assert_eq!(b.wq.stats.get(RailCounter::RxTcp), 0);
}

proptest! {
    #[test]
    fn noise_never_panics(noise in proptest::collection::vec(any::<u8>(), 0..2000), cut in 1usize..64) {
        let mut wq = WorkQueues::new(&QpCaps::default(), RailStats::detached(), 1, 0);
        wq.ready(7);
        let mut receiver = FrameReceiver::new();
        for part in noise.chunks(cut) {
            if receiver.feed(&mut wq, part).is_err() {
                break;
            }
        }
    }

    #[test]
    fn nearly_sensible_frames_never_panic(
        frames in proptest::collection::vec((0u8..10, 0u8..4, 0u32..200, 0u64..4, 0u32..200, any::<bool>(), any::<u32>()), 0..60),
        recvs in 0u64..4,
    ) {
        let to = Memory::new(128, ALL);
        let mut wq = WorkQueues::new(&QpCaps::default(), RailStats::detached(), 1, 0);
        wq.ready(7);
        for i in 0..recvs {
            wq.post_recv(&RecvWr { wr_id: i, sge: to.sge(0, 100) }).unwrap();
        }
        let mut receiver = FrameReceiver::new();
        for (kind, flags, len, addr, total, fits, arg) in frames {
            let base = if addr == 3 { to.addr() } else { addr };
            let total = if fits { len } else { total };
            let header = Header { flags, len, addr: base, total, rkey: to.key(), arg: arg % 3, ..Header::new(Kind::Write) };
            let mut bytes = header.encode().to_vec();
            bytes[0] = kind;
            bytes.resize(bytes.len() + len as usize, 7);
            if receiver.feed(&mut wq, &bytes).is_err() {
                break;
            }
        }
    }
}
