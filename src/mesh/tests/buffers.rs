//! Slots. The names in the comments are those of Gloo's tests (gloo/test) that do the same.

use super::*;

/// The two ends of a slot between this rank and the other one of two: what it sends from, and what it receives into.
fn ends(mesh: &Mesh, slot: u64, out: &Pages, back: &Pages, len: usize) -> (Buffer, Buffer) {
    let peer = 1 - mesh.rank();
    // Rank 1 makes them the other way round.
    if mesh.rank() == 0 {
        let to = Buffer::send_to(mesh, peer, slot, given(out, len)).unwrap();
        (to, Buffer::recv_from(mesh, peer, slot, given(back, len)).unwrap())
    } else {
        let from = Buffer::recv_from(mesh, peer, slot, given(back, len)).unwrap();
        (Buffer::send_to(mesh, peer, slot, given(out, len)).unwrap(), from)
    }
}

/// BufferTest.RemoteOffset.
#[test]
fn bytes_go_from_one_offset_to_another() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        ranks(wire, 2, |mesh| {
            let (out, back) = (memory(&(0..100).collect::<Vec<u8>>()), memory(&[255; 100]));
            let (to, from) = ends(&mesh, 1 << 40, &out, &back, 100);
            to.send(10, Some(20), 50).unwrap();
            to.send(99, None, 0).unwrap();
            to.send(0, Some(0), 100).unwrap();
            let sent: Vec<Waited> = (0..3).map(|_| to.wait_send(TIMEOUT).unwrap()).collect();
            assert_eq!(sent, [20, 1, 0].map(|len| Waited::Done { rank: 1 - mesh.rank(), len }));
            (0..3).for_each(|_| assert!(matches!(from.wait_recv(TIMEOUT).unwrap(), Waited::Done { .. })));
            let mut expected = vec![255; 100];
            expected[50..70].copy_from_slice(&(10..30).collect::<Vec<u8>>());
            expected[0] = 99;
            assert_eq!(contents(&back, 100), expected);
            mesh.barrier(options(0)).unwrap();
            to.close(TIMEOUT).unwrap();
            from.close(TIMEOUT).unwrap();
            assert_eq!(mesh.pending(), 0);
        });
    }
}

/// Many at once, of all sizes, each told of once and in order.
#[test]
fn messages_of_a_slot_come_in_order() {
    ranks(SoftWire::Shm, 2, |mesh| {
        const COUNT: usize = 2000;
        let (out, back) = (memory(&[0; 8 * COUNT]), memory(&[0; 8]));
        for i in 0..COUNT {
            out.write(8 * i, &(i as u64 + 1).to_le_bytes());
        }
        let to = Buffer::send_to(&mesh, 1 - mesh.rank(), 3, given(&out, 8 * COUNT)).unwrap();
        let from = Buffer::recv_from(&mesh, 1 - mesh.rank(), 3, given(&back, 8)).unwrap();
        (0..COUNT).for_each(|i| to.send(8 * i, Some(8), 0).unwrap());
        let mut last = 0;
        for i in 1..=COUNT as u64 {
            from.wait_recv(TIMEOUT).unwrap();
            let mut value = [0; 8];
            back.read(0, &mut value);
            let value = u64::from_le_bytes(value);
            // Later ones may be there already.
            assert!(value >= i.max(last), "{value} after {last}");
            last = value;
        }
        assert_eq!(last, COUNT as u64);
        (0..COUNT).for_each(|_| assert!(matches!(to.wait_send(TIMEOUT).unwrap(), Waited::Done { .. })));
        mesh.barrier(options(0)).unwrap();
    });
}

#[test]
fn a_slot_is_used_again_after_its_buffers_are_closed() {
    ranks(SoftWire::Shm, 2, |mesh| {
        for round in 0..600u32 {
            let (out, back) = (memory(&round.to_le_bytes()), memory(&[0; 4]));
            let (to, from) = ends(&mesh, 9, &out, &back, 4);
            to.send(0, None, 0).unwrap();
            from.wait_recv(TIMEOUT).unwrap();
            to.wait_send(TIMEOUT).unwrap();
            assert_eq!(contents(&back, 4), round.to_le_bytes());
            // A message that nobody waits for is nobody's afterwards.
            to.send(0, None, 0).unwrap();
            to.wait_send(TIMEOUT).unwrap();
            // Before either closes: what is sent later goes into the next buffer of the slot.
            mesh.barrier(options(0)).unwrap();
            if round % 2 == 0 {
                from.close(TIMEOUT).unwrap();
                to.close(TIMEOUT).unwrap();
            }
        }
        mesh.barrier(options(0)).unwrap();
    });
}

#[test]
fn what_does_not_fit_fails_alone() {
    ranks(SoftWire::Shm, 2, |mesh| {
        let (pages, peer) = (memory(&[7; 64]), 1 - mesh.rank());
        if mesh.rank() == 0 {
            let to = Buffer::send_to(&mesh, peer, 4, given(&pages, 64)).unwrap();
            to.send(0, Some(33), 0).unwrap();
            to.send(0, Some(1), u64::MAX).unwrap();
            to.send(0, Some(2), 30).unwrap();
            let error = to.wait_send(TIMEOUT).unwrap_err().to_string();
            assert_eq!(error, "slot 4: 33 bytes to offset 0 of the peer's 32");
            assert!(to.wait_send(TIMEOUT).is_err());
            to.wait_send(TIMEOUT).unwrap();
        } else {
            let from = Buffer::recv_from(&mesh, peer, 4, given(&pages, 32)).unwrap();
            from.wait_recv(TIMEOUT).unwrap();
            from.close(TIMEOUT).unwrap();
        }
        mesh.barrier(options(0)).unwrap();
    });
}

#[test]
fn wrong_calls_are_refused_and_nothing_is_lost() {
    ranks(SoftWire::Shm, 2, |mesh| {
        let (pages, peer) = (memory(&[0; 64]), 1 - mesh.rank());
        let to = Buffer::send_to(&mesh, peer, 4, given(&pages, 64)).unwrap();
        let from = Buffer::recv_from(&mesh, peer, 4, given(&pages, 64)).unwrap();
        let twice = |made: Result<Buffer>| made.err().unwrap().to_string();
        assert!(twice(Buffer::send_to(&mesh, peer, 4, given(&pages, 64))).ends_with("slot 4: another buffer of this rank sends to it"));
        assert!(
            twice(Buffer::recv_from(&mesh, peer, 4, given(&pages, 64))).ends_with("slot 4: another buffer of this rank receives into it")
        );
        assert!(twice(Buffer::send_to(&mesh, mesh.rank(), 5, given(&pages, 64))).contains("is this rank"));
        assert!(twice(Buffer::recv_from(&mesh, 7, 5, given(&pages, 64))).contains("there is no rank 7"));
        for (result, why) in [
            (from.send(0, None, 0), "a buffer that receives, not one that sends"),
            (to.wait_recv(TIMEOUT).map(drop), "a buffer that sends, not one that receives"),
            (to.send(60, Some(5), 0), "5 bytes at offset 60 of a buffer of 64"),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
        }
        mesh.barrier(options(0)).unwrap();
        from.close(TIMEOUT).unwrap();
        let error = from.wait_recv(TIMEOUT).unwrap_err().to_string();
        assert_eq!(error, "the buffer is closed");
        mesh.barrier(options(0)).unwrap();
    });
}

/// gloo/allreduce_ring.h: each rank's neighbour says by a message of nothing that its inbox may be written again, in the last round as well.
#[test]
fn an_allreduce_of_slots_and_notifications() {
    for size in [2, 3, 5] {
        ranks(SoftWire::Shm, size, |mesh| {
            const COUNT: usize = 5000;
            let (rank, len) = (mesh.rank(), 4 * COUNT);
            let (right, left) = ((rank + 1) % size, (rank + size - 1) % size);
            let (outbox, inbox, nothing) = (memory(&vec![0; len]), memory(&vec![0; len]), memory(&[0]));
            let to_right = Buffer::send_to(&mesh, right, 0, given(&outbox, len)).unwrap();
            let from_left = Buffer::recv_from(&mesh, left, 0, given(&inbox, len)).unwrap();
            let to_left = Buffer::send_to(&mesh, left, 1, given(&nothing, 0)).unwrap();
            let from_right = Buffer::recv_from(&mesh, right, 1, given(&nothing, 0)).unwrap();
            let numbers = |pages: &Pages| -> Vec<u32> {
                contents(pages, len).chunks_exact(4).map(|bytes| u32::from_ne_bytes(bytes.try_into().unwrap())).collect()
            };
            for run in 0..20 {
                let mut sum: Vec<u32> = (0..COUNT).map(|i| (i * (rank + 1) + run) as u32).collect();
                outbox.write(0, &sum.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<_>>());
                for round in 1..size {
                    to_right.send(0, None, 0).unwrap();
                    from_left.wait_recv(TIMEOUT).unwrap();
                    sum.iter_mut().zip(numbers(&inbox)).for_each(|(sum, number)| *sum += number);
                    to_right.wait_send(TIMEOUT).unwrap();
                    if round + 1 < size {
                        outbox.write(0, &contents(&inbox, len));
                    }
                    to_left.send(0, None, 0).unwrap();
                    from_right.wait_recv(TIMEOUT).unwrap();
                    to_left.wait_send(TIMEOUT).unwrap();
                }
                assert!(sum == (0..COUNT).map(|i| (i * size * (size + 1) / 2 + size * run) as u32).collect::<Vec<_>>(), "run {run}");
            }
            mesh.barrier(options(0)).unwrap();
        });
    }
}

/// As many receives as there may be at a time do not keep a buffer's slot from being opened, nor what is claimed from being received.
#[test]
fn receives_that_nothing_comes_for_hold_no_buffer_back() {
    ranks(SoftWire::Shm, 2, |mesh| {
        let (pages, peer) = (memory(&[0; 4096]), 1 - mesh.rank());
        let all = UnboundBuffer::new(&mesh, given(&pages, 4096)).unwrap();
        (0..300).for_each(|tag| all.recv(&[peer], tag, 0, None).unwrap());
        let (out, back) = (memory(&[9; 64]), memory(&[0; 64]));
        let (to, from) = ends(&mesh, 5, &out, &back, 64);
        to.send(0, None, 0).unwrap();
        assert!(matches!(from.wait_recv(TIMEOUT).unwrap(), Waited::Done { .. }));
        assert_eq!(contents(&back, 64), [9; 64]);
        mesh.barrier(options(0)).unwrap();
        all.close(TIMEOUT).unwrap();
        mesh.barrier(options(0)).unwrap();
    });
}

#[test]
fn a_second_close_returns_when_the_first_does() {
    let holds = Barrier::new(2);
    ranks(SoftWire::Tcp, 2, |mesh| {
        let (pages, peer) = (memory(&[0; 64]), 1 - mesh.rank());
        if mesh.rank() == 1 {
            // Nobody answers for this rank before it waits.
            holds.wait();
            holds.wait();
            return mesh.barrier(options(0)).unwrap();
        }
        let from = Buffer::recv_from(&mesh, peer, 4, given(&pages, 64)).unwrap();
        holds.wait();
        std::thread::scope(|scope| {
            let first = scope.spawn(|| from.close(TIMEOUT).unwrap());
            mesh.driver.until_waited_for(&first);
            let second = scope.spawn(|| from.close(TIMEOUT).unwrap());
            // It has every chance to return early.
            std::thread::sleep(Duration::from_millis(20));
            assert!(!second.is_finished() && !first.is_finished());
            holds.wait();
        });
        mesh.barrier(options(0)).unwrap();
    });
}

#[test]
fn a_peer_that_is_lost_ends_the_waits_for_its_slot() {
    let waits = Barrier::new(2);
    ranks(SoftWire::Tcp, 2, |mesh| {
        let (pages, peer) = (memory(&[0; 64]), 1 - mesh.rank());
        if mesh.rank() == 1 {
            waits.wait();
        } else {
            let from = Buffer::recv_from(&mesh, peer, 4, given(&pages, 64)).unwrap();
            waits.wait();
            let error = from.wait_recv(TIMEOUT).unwrap_err().to_string();
            assert!(error.starts_with("rank 1: "), "{error}");
            from.close(TIMEOUT).unwrap();
        }
    });
}

#[test]
fn a_message_waits_for_its_slot_to_be_opened() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        ranks(wire, 2, |mesh| {
            let (pages, peer) = (memory(&[mesh.rank() as u8; 64]), 1 - mesh.rank());
            if mesh.rank() == 0 {
                let to = Buffer::send_to(&mesh, peer, 4, given(&pages, 64)).unwrap();
                to.send(0, Some(32), 8).unwrap();
                to.send(0, Some(1), 63).unwrap();
                mesh.barrier(options(0)).unwrap();
                (0..2).for_each(|_| assert!(matches!(to.wait_send(TIMEOUT).unwrap(), Waited::Done { .. })));
            } else {
                mesh.barrier(options(0)).unwrap();
                let from = Buffer::recv_from(&mesh, peer, 4, given(&pages, 64)).unwrap();
                (0..2).for_each(|_| assert!(matches!(from.wait_recv(TIMEOUT).unwrap(), Waited::Done { .. })));
                let expected: Vec<u8> = (0..64).map(|i| u8::from(!(8..40).contains(&i) && i != 63)).collect();
                assert_eq!(contents(&pages, 64), expected);
            }
            mesh.barrier(options(0)).unwrap();
        });
    }
}
