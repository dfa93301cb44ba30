//! Comms whose other end closes, misbehaves or hangs.

use super::*;
use crate::base::config::SoftWire;
use crate::fabric::{Opcode, Payload};
use crate::link::incoming::{CompletionRecord, Imm, epoch};
use crate::link::limits::{RECORD_SIZE, SLOT_SIZE};
use crate::link::queue_pairs::Wr;
use crate::link::wr_id::WrKind;
use std::sync::atomic::Ordering;

use super::super::cts_fifo::Slot;

/// The error that a request ends with, for the reason `expect`.
fn fails(what: &str, expect: &str, mut test: impl FnMut() -> Result<Option<Sizes>>) {
    let error = within(what, || match test() {
        Ok(None) => None,
        Ok(Some(_)) => panic!("{what}: completed"),
        Err(error) => Some(error),
    });
    assert!(matches!(error, Error::Remote(_)), "{what}: {error:?}");
    assert!(error.to_string().contains(expect), "{what}: {error}");
}

#[test]
fn a_receiver_hears_that_its_sender_closed() {
    let Pair { send, mut recv, net, dev } = Pair::new(&net(config()), 0);
    let buffer = Buffer::new(&net, dev, 4096);
    let requests: Vec<_> = (0..32).map(|i| recv.irecv(&[buffer.recv(i * 8, 8, 0)]).unwrap().unwrap()).collect();
    drop(send);
    for &request in requests.iter().rev() {
        fails("receive", "closed its comm", || recv.test(request));
    }
    assert!(matches!(recv.irecv(&[buffer.recv(0, 8, 0)]), Err(Error::Remote(_))));
    net.deregister(dev, buffer.mr).unwrap();
}

#[test]
fn a_sender_hears_that_its_receiver_closed() {
    for len in [8usize, 1 << 20] {
        let mut pair = Pair::new(&net(config()), 0);
        let buffer = pair.buffer(len);
        let to = pair.buffer(len);
        let _recv = pair.irecv(&[to.recv(0, len, 0), to.recv(0, len, 0)]);
        let request = pair.isend(&buffer, 0, len, 0);
        let Pair { mut send, recv, net, dev } = pair;
        drop(recv);
        // The first may have been accepted before the close; whoever waits for another receive never gets one.
        let first = within("first", || send.test(request).map(|s| s.map(|_| ())).map_or_else(|e| Some(Err(e)), |s| s.map(Ok)));
        if let Err(error) = first {
            assert!(matches!(error, Error::Remote(_)), "{error:?}");
        }
        let error = within("isend", || send.isend(buffer.addr(), len, 5, buffer.mr).err());
        assert!(matches!(error, Error::Remote(_)) && error.to_string().contains("closed its comm"), "{error}");
        net.deregister(dev, buffer.mr).unwrap();
    }
}

/// Everything that was accepted before the close completes after it, on both sides, whatever is polled when.
#[test]
fn what_arrived_before_a_close_still_completes() {
    for wire in [crate::base::config::SoftWire::Auto, crate::base::config::SoftWire::Tcp] {
        for closes_first in ["sender", "receiver"] {
            let mut pair = Pair::new(&net(Config { soft_wire: wire, qps_per_rail: 2, ..config() }), 0);
            let (from, to) = (pair.buffer(100 * 1024), pair.buffer(100 * 1024));
            from.fill(0, 100 * 1024, 1);
            let recvs: Vec<_> = (0..100).map(|i| pair.irecv(&[to.recv(i * 1024, 1024, 0)])).collect();
            let sends: Vec<_> = (0..100).map(|i| pair.isend(&from, i * 1024, 1024, 0)).collect();
            if closes_first == "sender" {
                for send in sends {
                    pair.stripe_completed(send);
                }
                let Pair { send, mut recv, .. } = pair;
                drop(send);
                for request in recvs {
                    assert_eq!(within("receive", || recv.test(request).unwrap()).bytes[0], 1024);
                }
            } else {
                for recv in recvs {
                    pair.received(recv);
                }
                let Pair { mut send, recv, .. } = pair;
                drop(recv);
                for request in sends {
                    assert_eq!(within("send", || send.test(request).unwrap()).bytes[0], 1024);
                }
            }
            to.check(0, 100 * 1024, 1);
        }
    }
}

#[test]
fn comms_and_registrations_may_go_with_requests_in_flight() {
    for first in ["sender", "receiver", "memory"] {
        let mut pair = Pair::new(&net(Config { qps_per_rail: 2, ..config() }), 0);
        let (from, to) = (pair.buffer(32 << 16), pair.buffer(32 << 16));
        let _recvs: Vec<_> = (0..32).map(|i| pair.irecv(&[to.recv(i << 16, 1 << 16, 0)])).collect();
        let _sends: Vec<_> = (0..32).map(|i| pair.isend(&from, i << 16, 1 << 16, 0)).collect();
        let Pair { send, recv, net, dev } = pair;
        let free = || {
            net.deregister(dev, from.mr).unwrap();
            net.deregister(dev, to.mr).unwrap();
        };
        match first {
            "memory" => {
                free();
                drop(send);
                drop(recv);
            }
            "sender" => {
                drop(send);
                free();
                drop(recv);
            }
            _ => {
                drop(recv);
                free();
                drop(send);
            }
        }
        assert_eq!(net.mrs.counts(), (0, 0));
    }
}

#[test]
fn a_clear_to_send_into_an_invalidated_fifo_is_a_remote_access_error() {
    let mut pair = Pair::new(&net(config()), 0);
    let buffer = pair.buffer(64);
    pair.send.invalidate_cts_fifo();
    let request = pair.irecv(&[buffer.recv(0, 64, 0)]);
    let Pair { mut send, mut recv, .. } = pair;
    fails("receive", "remote access error", || {
        send.poll_for_test();
        recv.test(request)
    });
    // And the flag was nowhere written.
    for word in (0..256 * SLOT_SIZE).step_by(8) {
        assert_eq!(send.fifo_for_test().load_u64(word, Ordering::Acquire), 0);
    }
}

#[test]
fn a_message_into_deregistered_memory_fails_that_comm_only() {
    let net = net(config());
    let mut pair = Pair::new(&net, 0);
    let mut other = Pair::new(&net, 0);
    let (from, to) = (pair.buffer(64), pair.buffer(64));
    let recv_id = pair.irecv(&[to.recv(0, 64, 0)]);
    net.deregister(0, to.mr).unwrap();
    let send_id = pair.isend(&from, 0, 64, 0);
    let Pair { mut send, mut recv, .. } = pair;
    fails("send", "remote access error", || {
        recv.poll_for_test();
        send.test(send_id)
    });
    fails("receive", "recv comm", || recv.test(recv_id));
    let to = other.buffer(64);
    let recv_id = other.irecv(&[to.recv(0, 64, 0)]);
    let send_id = other.isend(&from, 0, 64, 0);
    other.received(recv_id);
    other.stripe_completed(send_id);
}

/// What a hostile receiver may write into the FIFO.
#[test]
fn nonsense_in_the_fifo_fails_the_sender() {
    let good = Slot { addr: 4096, size: 64, rkeys: [1; 8], nreqs: 1, tag: 0 };
    let slots = |changes: &[&dyn Fn(&mut Slot)]| -> Vec<[u8; SLOT_SIZE]> {
        let change = |(i, change): (usize, &&dyn Fn(&mut Slot))| {
            let mut slot = good;
            change(&mut slot);
            slot.encode(i as u64)
        };
        changes.iter().enumerate().map(change).collect()
    };
    let mut bad_ready = good.encode(0);
    bad_ready[56] = 77;
    let cases: [(&str, Vec<[u8; SLOT_SIZE]>); 5] = [
        ("group of 0", slots(&[&|s| s.nreqs = 0])),
        ("group of 9", slots(&[&|s| s.nreqs = 9])),
        ("groups of 2 and 3", slots(&[&|s| s.nreqs = 2, &|s| s.nreqs = 3])),
        ("past the end of memory", slots(&[&|s| s.addr = u64::MAX - 10])),
        ("ready flag 77", vec![bad_ready]),
    ];
    for (expect, slots) in cases {
        let mut pair = Pair::new(&net(config()), 0);
        let buffer = pair.buffer(64);
        for (i, slot) in slots.iter().enumerate() {
            pair.send.fifo_for_test().write(i * SLOT_SIZE, slot);
        }
        let error = pair.send.isend(buffer.addr(), 64, 0, buffer.mr).err().unwrap();
        assert!(matches!(error, Error::Remote(_)) && error.to_string().contains(expect), "{expect}: {error}");
        assert!(matches!(pair.send.isend(buffer.addr(), 64, 0, buffer.mr), Err(Error::Remote(_))));
        // The other end learns.
        let Pair { mut recv, .. } = pair;
        let request = recv.irecv(&[buffer.recv(0, 64, 0)]).unwrap().unwrap();
        within("receiver", || recv.test(request).err());
    }
}

/// What a hostile sender may send.
#[test]
fn nonsense_in_immediates_and_records_fails_the_receiver() {
    let record = CompletionRecord { size: 64, stripes: 1, epoch: epoch(0) };
    type Case<'a> = (&'a str, Option<CompletionRecord>, &'a [(u8, Imm)]);
    let cases: [Case<'_>; 9] = [
        ("none is expected", None, &[(1, Imm::Whole(1))]),
        ("none is expected", None, &[(0, Imm::Whole(1)), (0, Imm::Whole(1))]),
        ("has room for 64", None, &[(0, Imm::Whole(65))]),
        ("has room for 64", Some(CompletionRecord { size: 65, ..record }), &[(0, Imm::Stripe(0))]),
        ("stripe 1", Some(record), &[(0, Imm::Stripe(1))]),
        ("stripe 0", Some(CompletionRecord { epoch: 9, ..record }), &[(0, Imm::Stripe(0))]),
        ("stripe 0", Some(CompletionRecord { stripes: 0, ..record }), &[(0, Imm::Stripe(0))]),
        ("stripe 0", Some(CompletionRecord { stripes: 3, ..record }), &[(0, Imm::Stripe(0))]),
        ("after stripes", Some(CompletionRecord { stripes: 2, ..record }), &[(0, Imm::Stripe(0)), (0, Imm::Whole(3))]),
    ];
    for (expect, record, imms) in cases {
        let mut pair = Pair::new(&net(Config { qps_per_rail: 2, ..config() }), 0);
        let buffer = pair.buffer(64);
        let _request = pair.irecv(&[buffer.recv(0, 64, 0)]);
        let qps = &mut pair.send.link_for_test().qps;
        let nothing = Wr { opcode: Opcode::Write, payload: Payload::Inline(&[]), remote: qps.remote(0, 0), imm: 0 };
        if let Some(record) = record {
            let bytes: [u8; RECORD_SIZE] = record.encode();
            qps.post_send(0, [Wr { payload: Payload::Inline(&bytes), ..nothing }], WrKind::Data, RequestId(0), true).unwrap();
        }
        for (slot, imm) in imms {
            let message = Wr { opcode: Opcode::WriteWithImm, imm: imm.encode(*slot), ..nothing };
            qps.post_send(0, [message], WrKind::Data, RequestId(0), true).unwrap();
        }
        let Pair { mut send, mut recv, .. } = pair;
        let error = within(expect, || {
            send.poll_for_test();
            recv.poll_for_test();
            recv.link_for_test().check().err()
        });
        assert!(matches!(error, Error::Remote(_)) && error.to_string().contains(expect), "{expect}: {error}");
    }
}

#[test]
fn nonsense_on_the_control_connection_fails_the_comm() {
    // Of no kind, a bye with something behind it, and cells with more in their headers, and about no rail.
    let frame = |at: usize, byte: u8, kind: u8| {
        let mut frame = [0; 72];
        (frame[0], frame[at]) = (kind, byte);
        frame
    };
    for bytes in [[0xffu8; 72], frame(71, 1, 4), frame(1, 1, 4), frame(7, 1, 5), frame(1, 8, 5)] {
        let mut pair = Pair::new(&net(config()), 0);
        let buffer = pair.buffer(64);
        let request = pair.irecv(&[buffer.recv(0, 64, 0)]);
        pair.send.link_for_test().say_for_test(&bytes);
        let Pair { send: _send, mut recv, .. } = pair;
        fails("receive", "control message", || recv.test(request));
    }
}

#[test]
fn a_silent_peer_is_an_error_only_if_asked_for() {
    let patient = Pair::new(&net(config()), 0);
    let strict = Pair::new(&net(Config { peer_timeout_s: 1, ..config() }), 0);
    let buffer = Buffer::new(&patient.net, 0, 64);
    let other = Buffer::new(&strict.net, 0, 64);
    let (mut patient, mut strict) = (patient, strict);
    let waits = patient.irecv(&[buffer.recv(0, 64, 0)]);
    let request = strict.irecv(&[other.recv(0, 64, 0)]);
    fails("strict", "RAILHEAD_PEER_TIMEOUT_S", || {
        assert!(patient.recv.test(waits).unwrap().is_none());
        strict.recv.test(request)
    });
    let send = patient.isend(&buffer, 0, 8, 0);
    patient.stripe_completed(send);
    assert_eq!(patient.received(waits), [8]);
}

/// A message now and then is progress, on both ends.
#[test]
fn a_peer_that_sends_rarely_is_not_silent() {
    let config = |soft_wire| Config { soft_wire, peer_timeout_s: 2, ..config() };
    let mut pairs = [SoftWire::Shm, SoftWire::Tcp].map(|wire| Pair::new(&net(config(wire)), 0));
    let buffers = pairs.each_ref().map(|pair| pair.buffer(64));
    let begin = clock::now();
    for round in 1..=26 {
        let requests: Vec<_> = pairs.iter_mut().zip(&buffers).map(|(pair, to)| pair.irecv(&[to.recv(0, 8, 0)])).collect();
        while clock::now() < begin + round * 100_000_000 {
            for (pair, request) in pairs.iter_mut().zip(&requests) {
                assert!(pair.recv.test(*request).unwrap().is_none());
                pair.send.poll_for_test();
            }
        }
        for ((pair, buffer), request) in pairs.iter_mut().zip(&buffers).zip(requests) {
            let send = pair.isend(buffer, 0, 8, 0);
            pair.stripe_completed(send);
            assert_eq!(pair.received(request), [8]);
        }
    }
}
