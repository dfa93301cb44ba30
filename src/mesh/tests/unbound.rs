//! Messages with tags. The names in the comments are those of Gloo's tests (gloo/test/send_recv_test.cc) that do the same.

use super::*;

const WIRES: [SoftWire; 2] = [SoftWire::Shm, SoftWire::Tcp];

/// The rank that a wait told of.
fn done(waited: Result<Waited>) -> usize {
    match waited.unwrap() {
        Waited::Done { rank, .. } => rank,
        Waited::Aborted => panic!("it was aborted"),
    }
}

fn buffer(mesh: &Mesh, pages: &Pages, len: usize) -> UnboundBuffer {
    UnboundBuffer::new(mesh, given(pages, len)).unwrap()
}

fn others(mesh: &Mesh) -> Vec<usize> {
    (0..mesh.size()).filter(|rank| *rank != mesh.rank()).collect()
}

/// AllToAll.
#[test]
fn every_rank_sends_to_every_other() {
    for (wire, size) in [(SoftWire::Shm, 2), (SoftWire::Tcp, 3), (SoftWire::Shm, 8)] {
        ranks(wire, size, |mesh| {
            let (out, back) = (memory(&[mesh.rank() as u8; 3000]), memory(&vec![99; 3000 * size]));
            let (from, to) = (buffer(&mesh, &out, 3000), buffer(&mesh, &back, 3000 * size));
            for round in 0..20 {
                for &rank in &others(&mesh) {
                    from.send(rank, round, 0, None).unwrap();
                    to.recv(&[rank], round, rank * 3000, Some(3000)).unwrap();
                }
                let mut sent: Vec<usize> = others(&mesh).iter().map(|_| done(from.wait_send(TIMEOUT))).collect();
                let mut received: Vec<usize> = others(&mesh).iter().map(|_| done(to.wait_recv(TIMEOUT))).collect();
                sent.sort_unstable();
                received.sort_unstable();
                assert_eq!((&sent, &received), (&others(&mesh), &others(&mesh)));
                for rank in others(&mesh) {
                    assert!(contents(&back, 3000 * size)[rank * 3000..][..3000].iter().all(|byte| *byte == rank as u8));
                }
            }
            to.close(TIMEOUT).unwrap();
            from.close(TIMEOUT).unwrap();
        });
    }
}

/// AllToAllOffset, AllToAllEmptyThenNonEmpty.
#[test]
fn offsets_and_messages_of_nothing() {
    ranks(SoftWire::Shm, 3, |mesh| {
        let (rank, size) = (mesh.rank(), mesh.size());
        let (out, back) = (memory(&(0..size as u8).map(|to| 10 * rank as u8 + to).collect::<Vec<_>>()), memory(&[99; 3]));
        let (from, to) = (buffer(&mesh, &out, size), buffer(&mesh, &back, size));
        for len in [0, 1] {
            for &peer in &others(&mesh) {
                from.send(peer, 5, peer, Some(len)).unwrap();
                to.recv(&[peer], 5, peer, Some(len)).unwrap();
            }
            for _ in 1..size {
                done(from.wait_send(TIMEOUT));
                done(to.wait_recv(TIMEOUT));
            }
        }
        let mut expected: Vec<u8> = (0..size).map(|peer| (10 * peer + rank) as u8).collect();
        expected[rank] = 99;
        assert_eq!(contents(&back, size), expected);
        // From the end on there is nothing.
        from.send((rank + 1) % size, 6, size, None).unwrap();
        to.recv(&[(rank + 2) % size], 6, size, None).unwrap();
        done(from.wait_send(TIMEOUT));
        done(to.wait_recv(TIMEOUT));
    });
}

/// RecvFromAny, RecvFromAnyOffset, RecvFromAnyPipeline.
#[test]
fn whoever_sends_is_received_from() {
    for wire in WIRES {
        ranks(wire, 4, |mesh| {
            const LEN: usize = 700;
            let all = others(&mesh);
            if mesh.rank() == 0 {
                let back = memory(&[0; 3 * LEN]);
                let to = buffer(&mesh, &back, 3 * LEN);
                for round in 0..50u8 {
                    for at in 0..3 {
                        to.recv(&all, 7, at * LEN, Some(LEN)).unwrap();
                    }
                    let mut ranks: Vec<usize> = (0..3).map(|_| done(to.wait_recv(TIMEOUT))).collect();
                    ranks.sort_unstable();
                    assert_eq!(ranks, all, "one of each in round {round}");
                    let mut first: Vec<[u8; 2]> = contents(&back, 3 * LEN).chunks(LEN).map(|m| [m[0], m[LEN - 1]]).collect();
                    first.sort_unstable();
                    assert_eq!(first, [[1, round], [2, round], [3, round]]);
                    // None begins the next one before all have ended this.
                    mesh.barrier(options(0)).unwrap();
                }
            } else {
                let out = memory(&[mesh.rank() as u8; LEN]);
                let from = buffer(&mesh, &out, LEN);
                for round in 0..50 {
                    out.write(LEN - 1, &[round]);
                    from.send(0, 7, 0, None).unwrap();
                    assert_eq!(done(from.wait_send(TIMEOUT)), 0);
                    mesh.barrier(options(0)).unwrap();
                }
            }
        });
    }
}

/// RecvFromAnyRPC: a rank serves whoever asks, and answers him.
#[test]
fn a_server_answers_whoever_asks() {
    ranks(SoftWire::Shm, 4, |mesh| {
        const CALLS: u64 = 200;
        let word = memory(&[0; 8]);
        let buffer = buffer(&mesh, &word, 8);
        let mut value = [0; 8];
        if mesh.rank() == 0 {
            for _ in 0..3 * CALLS {
                buffer.recv(&others(&mesh), 1, 0, None).unwrap();
                let asked = done(buffer.wait_recv(TIMEOUT));
                word.read(0, &mut value);
                assert_eq!(value[7] as usize, asked, "whose message it is");
                word.write(0, &(u64::from_le_bytes(value) * 2).to_le_bytes());
                buffer.send(asked, 2, 0, None).unwrap();
                done(buffer.wait_send(TIMEOUT));
            }
        } else {
            for call in 0..CALLS {
                let number = call | (mesh.rank() as u64) << 56;
                word.write(0, &number.to_le_bytes());
                buffer.send(0, 1, 0, None).unwrap();
                done(buffer.wait_send(TIMEOUT));
                buffer.recv(&[0], 2, 0, None).unwrap();
                done(buffer.wait_recv(TIMEOUT));
                word.read(0, &mut value);
                assert_eq!(u64::from_le_bytes(value), number * 2);
            }
        }
        mesh.barrier(options(0)).unwrap();
    });
}

/// RecvFromAnyRPCEmptyThenNonEmpty: a call of nothing, and then one of something, each answered.
#[test]
fn a_server_that_is_asked_with_nothing_and_then_with_something_answers() {
    for wire in WIRES {
        ranks(wire, 3, |mesh| {
            const LEN: usize = 100;
            let pages = memory(&[mesh.rank() as u8; LEN]);
            let mine = buffer(&mesh, &pages, LEN);
            for round in 0..20 {
                for (call, len) in [(2 * round, 0), (2 * round + 1, if round % 2 == 0 { 8 } else { LEN })] {
                    if mesh.rank() == 0 {
                        for _ in others(&mesh) {
                            mine.recv(&others(&mesh), call, 0, Some(len)).unwrap();
                            let asked = mine.wait_recv(TIMEOUT).unwrap();
                            let Waited::Done { rank, len: got } = asked else { panic!("{asked:?}") };
                            assert_eq!((got, contents(&pages, len)), (len as u64, vec![rank as u8; len]));
                            mine.send(rank, 1 << 40 | call, 0, Some(len)).unwrap();
                            assert_eq!(done(mine.wait_send(TIMEOUT)), rank);
                        }
                    } else {
                        pages.write(0, &[mesh.rank() as u8; LEN]);
                        mine.send(0, call, 0, Some(len)).unwrap();
                        assert_eq!(done(mine.wait_send(TIMEOUT)), 0);
                        pages.write(0, &[99; LEN]);
                        mine.recv(&[0], 1 << 40 | call, 0, Some(len)).unwrap();
                        assert_eq!(done(mine.wait_recv(TIMEOUT)), 0);
                        let expected = [vec![mesh.rank() as u8; len], vec![99; LEN - len]].concat();
                        assert_eq!(contents(&pages, LEN), expected);
                    }
                }
            }
            mesh.barrier(options(0)).unwrap();
        });
    }
}

/// All of a tag come in the order in which they were sent, to receives from one rank and from any, mixed.
#[test]
fn messages_of_a_tag_keep_their_order() {
    for wire in WIRES {
        ranks(wire, 3, |mesh| {
            const COUNT: usize = 600;
            if mesh.rank() == 0 {
                let back = memory(&vec![0; 8 * COUNT]);
                let to = buffer(&mesh, &back, 8 * COUNT);
                for i in 0..COUNT {
                    let from: &[usize] = if i % 3 == 0 { &[1] } else { &[1, 2] };
                    to.recv(from, u64::MAX, 8 * i, Some(8)).unwrap();
                }
                mesh.barrier(options(0)).unwrap();
                (0..COUNT).for_each(|_| assert_eq!(done(to.wait_recv(TIMEOUT)), 1));
                let expected: Vec<u8> = (0..COUNT as u64).flat_map(u64::to_le_bytes).collect();
                assert!(contents(&back, 8 * COUNT) == expected);
            } else if mesh.rank() == 1 {
                let out = memory(&(0..COUNT as u64).flat_map(u64::to_le_bytes).collect::<Vec<_>>());
                let from = buffer(&mesh, &out, 8 * COUNT);
                (0..COUNT).for_each(|i| from.send(0, u64::MAX, 8 * i, Some(8)).unwrap());
                mesh.barrier(options(0)).unwrap();
                (0..COUNT).for_each(|_| assert_eq!(done(from.wait_send(TIMEOUT)), 0));
            } else {
                mesh.barrier(options(0)).unwrap();
            }
            mesh.barrier(options(0)).unwrap();
        });
    }
}

/// What a rank asks for goes on while it does something else: nobody there waits, and nobody polls.
#[test]
fn messages_go_on_while_nobody_waits() {
    for busy in [false, true] {
        let (asked, done_there) = (Barrier::new(2), Barrier::new(2));
        ranks(SoftWire::Shm, 2, |mesh| {
            mesh.set_sync(busy);
            let pages = memory(&[mesh.rank() as u8 + 1; 4096]);
            let mine = buffer(&mesh, &pages, 4096);
            if mesh.rank() == 0 {
                mine.send(1, 3, 0, None).unwrap();
                asked.wait();
                done_there.wait();
                assert_eq!(done(mine.wait_send(TIMEOUT)), 1);
            } else {
                asked.wait();
                mine.recv(&[0], 3, 0, None).unwrap();
                assert_eq!(done(mine.wait_recv(TIMEOUT)), 0);
                assert_eq!(contents(&pages, 4096), [1; 4096]);
                done_there.wait();
            }
        });
    }
}

/// AbortRecv, AbortSend.
#[test]
fn a_wait_is_aborted_and_what_it_waited_for_is_not() {
    ranks(SoftWire::Shm, 2, |mesh| {
        let (pages, peer) = (memory(&[mesh.rank() as u8; 8]), 1 - mesh.rank());
        let mine = buffer(&mesh, &pages, 8);
        if mesh.rank() == 0 {
            mine.recv(&[1], 1, 0, None).unwrap();
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| mine.wait_recv(TIMEOUT).unwrap());
                mesh.driver.until_waited_for(&waits);
                mine.abort_recv();
                assert_eq!(waits.join().unwrap(), Waited::Aborted);
            });
            // Before the wait it counts, too, and only once.
            mine.abort_recv();
            assert_eq!(mine.wait_recv(TIMEOUT).unwrap(), Waited::Aborted);
            mesh.barrier(options(0)).unwrap();
            assert_eq!(done(mine.wait_recv(TIMEOUT)), peer);
            assert_eq!(contents(&pages, 8), [1; 8]);
        } else {
            mine.send(0, 2, 0, None).unwrap();
            mine.abort_send();
            assert_eq!(mine.wait_send(TIMEOUT).unwrap(), Waited::Aborted);
            mesh.barrier(options(0)).unwrap();
            // The one that is received.
            mine.send(0, 1, 0, None).unwrap();
            assert_eq!(done(mine.wait_send(TIMEOUT)), peer);
        }
        mesh.barrier(options(0)).unwrap();
        mine.close(TIMEOUT).unwrap();
    });
}

/// Nothing else would wake it.
#[test]
fn a_thread_that_sleeps_in_a_wait_hears_that_it_is_aborted() {
    let over = Barrier::new(2);
    ranks(SoftWire::Shm, 2, |mesh| {
        mesh.barrier(options(0)).unwrap();
        if mesh.rank() == 0 {
            let pages = memory(&[0; 100]);
            let mine = &buffer(&mesh, &pages, 100);
            mine.send(1, 1, 0, None).unwrap();
            mine.recv(&[1], 2, 0, None).unwrap();
            let start = Instant::now();
            std::thread::scope(|scope| {
                for receives in [false, true] {
                    let waits = scope.spawn(move || {
                        if receives { mine.wait_recv(TIMEOUT / 6) } else { mine.wait_send(TIMEOUT / 6) }.map_err(|error| error.to_string())
                    });
                    while !mesh.driver.waiter_sleeps() && !waits.is_finished() {
                        std::thread::yield_now();
                    }
                    if receives {
                        mine.abort_recv()
                    } else {
                        mine.abort_send()
                    };
                    assert_eq!(waits.join().unwrap(), Ok(Waited::Aborted));
                }
            });
            assert!(start.elapsed() < TIMEOUT / 6, "its time was over first");
            // Then the other goes, which ends them.
            over.wait();
        } else {
            over.wait();
        }
    });
}

/// ManySlotsNoLeaks: what was used once is forgotten.
#[test]
fn ten_thousand_tags_take_no_more_memory() {
    let still = Barrier::new(3);
    ranks(SoftWire::Shm, 3, |mesh| {
        const LEN: usize = 100;
        const AT_ONCE: u64 = 50;
        let (rank, pages) = (mesh.rank(), memory(&[1; LEN]));
        let mine = buffer(&mesh, &pages, LEN);
        let remembers = || {
            mesh.barrier(options(0)).unwrap();
            // Nobody is further, and has sent something.
            still.wait();
            let remembered = mesh.driver.lock().remembered();
            still.wait();
            remembered
        };
        let before = remembers();
        for first in (0..10_000).step_by(AT_ONCE as usize) {
            for tag in first..first + AT_ONCE {
                let len = Some(if tag % 2 == 0 { 8 } else { LEN });
                match rank {
                    0 => mine.recv(if tag % 4 < 2 { &[1] } else { &[1, 2] }, tag, 0, len).unwrap(),
                    1 => mine.send(0, tag, 0, len).unwrap(),
                    _ => {}
                }
            }
            match rank {
                0 => {
                    let slot = Buffer::recv_from(&mesh, 1, first, given(&pages, LEN)).unwrap();
                    slot.wait_recv(TIMEOUT).unwrap();
                    slot.close(TIMEOUT).unwrap();
                    (0..AT_ONCE).for_each(|_| assert_eq!(done(mine.wait_recv(TIMEOUT)), 1));
                }
                1 => {
                    let slot = Buffer::send_to(&mesh, 0, first, given(&pages, LEN)).unwrap();
                    slot.send(0, None, 0).unwrap();
                    slot.wait_send(TIMEOUT).unwrap();
                    slot.close(TIMEOUT).unwrap();
                    (0..AT_ONCE).for_each(|_| assert_eq!(done(mine.wait_send(TIMEOUT)), 0));
                }
                _ => {}
            }
        }
        assert_eq!(remembers(), before);
    });
}

#[test]
fn a_buffer_that_is_closed_leaves_nothing_behind() {
    for wire in WIRES {
        ranks(wire, 3, |mesh| {
            const LEN: usize = 60;
            let (pages, peer) = (memory(&[mesh.rank() as u8; 3 * LEN]), (mesh.rank() + 1) % 3);
            let mine = buffer(&mesh, &pages, 3 * LEN);
            // Announced, offered, and waiting for a receive; and small ones, which are said to nobody.
            mine.recv(&[peer], 1, 0, Some(LEN)).unwrap();
            mine.recv(&others(&mesh), 2, LEN, Some(LEN)).unwrap();
            mine.send(peer, 3, 2 * LEN, Some(LEN)).unwrap();
            mine.recv(&[peer], 4, 0, Some(8)).unwrap();
            mine.recv(&others(&mesh), 5, 8, Some(8)).unwrap();
            mesh.barrier(options(0)).unwrap();
            mine.close(TIMEOUT).unwrap();
            assert_eq!(mesh.pending(), 0);
            let error = mine.recv(&[peer], 1, 0, None).unwrap_err().to_string();
            assert_eq!(error, "the buffer is closed");
            mesh.barrier(options(0)).unwrap();
            // Messages go to those who receive them now, not there.
            let other = memory(&[0; LEN + 8]);
            let next = buffer(&mesh, &other, LEN + 8);
            for (tag, len) in [(1, LEN), (2, LEN), (3, LEN), (4, 8), (5, 8)] {
                next.recv(&[(mesh.rank() + 2) % 3], tag, 8, Some(len)).unwrap();
                pages.write(0, &[40 * tag as u8 + mesh.rank() as u8; 3 * LEN]);
                let out = buffer(&mesh, &pages, 3 * LEN);
                out.send(peer, tag, 0, Some(len)).unwrap();
                done(next.wait_recv(TIMEOUT));
                done(out.wait_send(TIMEOUT));
                assert_eq!(contents(&other, 8 + len)[8..], vec![40 * tag as u8 + (mesh.rank() as u8 + 2) % 3; len]);
                assert_eq!(contents(&pages, 3 * LEN), [40 * tag as u8 + mesh.rank() as u8; 3 * LEN]);
            }
            mesh.barrier(options(0)).unwrap();
        });
    }
}

#[test]
fn a_thread_that_waits_hears_that_the_buffer_is_closed() {
    ranks(SoftWire::Shm, 2, |mesh| {
        let (pages, peer) = (memory(&[0; 8]), 1 - mesh.rank());
        let mine = buffer(&mesh, &pages, 8);
        mine.recv(&[peer], 1, 0, None).unwrap();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| mine.wait_recv(TIMEOUT).unwrap_err().to_string());
            mesh.driver.until_waited_for(&waits);
            mine.close(TIMEOUT).unwrap();
            assert_eq!(waits.join().unwrap(), "the buffer is closed");
        });
        mesh.barrier(options(0)).unwrap();
    });
}

#[test]
fn wrong_calls_are_refused_and_nothing_is_lost() {
    ranks(SoftWire::Shm, 2, |mesh| {
        let (pages, peer) = (memory(&[0; 64]), 1 - mesh.rank());
        let mine = buffer(&mesh, &pages, 64);
        for (result, why) in [
            (mine.send(2, 0, 0, None), "there is no rank 2; there are 0 to 1"),
            (mine.send(mesh.rank(), 0, 0, None), "is this rank"),
            (mine.send(peer, 0, 60, Some(5)), "5 bytes at offset 60 of a buffer of 64"),
            (mine.send(peer, 0, usize::MAX, Some(5)), "5 bytes at offset"),
            (mine.send(peer, 0, 65, None), "0 bytes at offset 65 of a buffer of 64"),
            (mine.recv(&[peer, 9], 0, 0, None), "there is no rank 9"),
            (mine.recv(&[mesh.rank(), peer], 0, 0, None), "is this rank"),
            (mine.recv(&[], 0, 0, None), "a receive from no rank"),
            (mine.recv(&[peer], 0, 64, Some(1)), "1 bytes at offset 64 of a buffer of 64"),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(why), "{why}: {error}");
        }
        assert_eq!(mesh.pending(), 0);
        mesh.barrier(options(0)).unwrap();
    });
}

#[test]
fn another_size_is_told_on_both_sides() {
    for late in [0, 1] {
        let results = ranks(SoftWire::Shm, 2, |mesh| {
            let (pages, peer) = (memory(&[0; 128]), 1 - mesh.rank());
            let mine = buffer(&mesh, &pages, 128);
            if mesh.rank() == late {
                std::thread::sleep(Duration::from_millis(20));
            }
            let waited = if mesh.rank() == 0 {
                mine.send(peer, 5, 0, Some(100)).and_then(|()| mine.wait_send(TIMEOUT))
            } else {
                mine.recv(&[peer], 5, 0, Some(64)).and_then(|()| mine.wait_recv(TIMEOUT))
            };
            waited.unwrap_err().to_string()
        });
        assert!(results[0].contains("it receives 64 bytes, tag 0x5: this rank sends 100"), "{results:?}");
        assert!(results[1].contains("rank 0"), "{results:?}");
    }
}

#[test]
fn a_receive_from_any_outlives_the_loss_of_one() {
    let gone = Barrier::new(3);
    ranks(SoftWire::Shm, 3, |mesh| {
        mesh.barrier(options(0)).unwrap();
        let pages = memory(&[mesh.rank() as u8; 8]);
        match mesh.rank() {
            0 => {
                let mine = buffer(&mesh, &pages, 8);
                mine.recv(&[1, 2], 1, 0, None).unwrap();
                mine.recv(&[1, 2], 1, 0, None).unwrap();
                gone.wait();
                assert_eq!(done(mine.wait_recv(TIMEOUT)), 1);
                // Then that one is lost, too.
                let error = mine.wait_recv(TIMEOUT).unwrap_err().to_string();
                assert!(error.starts_with("rank 1: "), "{error}");
            }
            1 => {
                gone.wait();
                let mine = buffer(&mesh, &pages, 8);
                mine.send(0, 1, 0, None).unwrap();
                assert_eq!(done(mine.wait_send(TIMEOUT)), 0);
                mine.close(TIMEOUT).unwrap();
            }
            _ => {
                drop(mesh);
                gone.wait();
            }
        }
    });
}

#[test]
fn a_wait_that_takes_too_long_names_the_ranks_and_nothing_hangs_in_close() {
    let over = Barrier::new(2);
    ranks(SoftWire::Shm, 2, |mesh| {
        let (pages, peer) = (memory(&[0; 8]), 1 - mesh.rank());
        if mesh.rank() == 0 {
            let mine = buffer(&mesh, &pages, 8);
            mine.recv(&[peer], 1, 0, None).unwrap();
            let error = mine.wait_recv(Duration::from_millis(100)).unwrap_err();
            let text = "wait_recv: rank 0 waited for 0.1 s for a message from rank 1 (tag 0x1), silent for ";
            assert!(matches!(&error, Error::Timeout(said) if said.contains(text)), "{error}");
            let start = Instant::now();
            mine.close(TIMEOUT).unwrap();
            assert!(start.elapsed() < TIMEOUT / 2);
        }
        over.wait();
    });
}

#[test]
fn a_wait_that_takes_too_long_ends_all_others() {
    let over = Barrier::new(2);
    ranks(SoftWire::Shm, 2, |mesh| {
        if mesh.rank() == 0 {
            let pages = memory(&[0; 400]);
            let mine = [0; 4].map(|_| buffer(&mesh, &pages, 100));
            (0..3).for_each(|tag| mine[tag].recv(&[1], tag as u64, 0, None).unwrap());
            mine[3].send(1, 3, 0, None).unwrap();
            let start = Instant::now();
            std::thread::scope(|scope| {
                let others = [1, 2, 3].map(|at: usize| {
                    let mine = &mine[at];
                    scope.spawn(move || {
                        if at == 3 { mine.wait_send(TIMEOUT / 4) } else { mine.wait_recv(TIMEOUT / 4) }.unwrap_err().to_string()
                    })
                });
                while mesh.driver.lock().waiters < 3 {
                    std::thread::yield_now();
                }
                let error = mine[0].wait_recv(Duration::from_millis(100)).unwrap_err();
                assert!(matches!(&error, Error::Timeout(said) if said.contains("waited for 0.1 s")), "{error}");
                others.into_iter().for_each(|other| assert_eq!(other.join().unwrap(), error.to_string()));
            });
            assert!(start.elapsed() < TIMEOUT / 4, "each has waited for its own time");
        }
        over.wait();
    });
}

/// More than may wait at the receiver: they hold nobody else back.
#[test]
fn small_messages_that_nobody_has_asked_for_do_not_stop_a_collective() {
    ranks(SoftWire::Shm, 2, |mesh| {
        const COUNT: usize = 400;
        let peer = 1 - mesh.rank();
        let (out, back) = (memory(&(0..COUNT as u64).flat_map(u64::to_le_bytes).collect::<Vec<_>>()), memory(&[0; 8 * COUNT]));
        let (from, to) = (buffer(&mesh, &out, 8 * COUNT), buffer(&mesh, &back, 8 * COUNT));
        (0..COUNT).for_each(|i| from.send(peer, 1, 8 * i, Some(8)).unwrap());
        mesh.barrier(options(0)).unwrap();
        (0..COUNT).for_each(|i| to.recv(&[peer], 1, 8 * i, Some(8)).unwrap());
        (0..COUNT).for_each(|_| assert_eq!((done(to.wait_recv(TIMEOUT)), done(from.wait_send(TIMEOUT))), (peer, peer)));
        assert!(contents(&back, 8 * COUNT) == contents(&out, 8 * COUNT));
        mesh.barrier(options(0)).unwrap();
    });
}

/// Nor each other: one that is waited for goes past those that are not.
#[test]
fn a_small_message_that_is_waited_for_overtakes_those_of_other_tags() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        ranks(wire, 3, |mesh| {
            const COUNT: usize = 400;
            const MORE: u64 = 100;
            let (rank, others) = (mesh.rank(), others(&mesh));
            let (out, back) = (memory(&[7; 8 * COUNT]), memory(&[0; 8 * COUNT]));
            let (from, to) = (buffer(&mesh, &out, 8 * COUNT), buffer(&mesh, &back, 8 * COUNT));
            for peer in &others {
                (0..COUNT).for_each(|i| from.send(*peer, 1, 8 * i, Some(8)).unwrap());
                (2..2 + MORE).for_each(|tag| from.send(*peer, tag, 0, Some(4)).unwrap());
            }
            // Before there is no room, and after; more at once than the sender may be told of.
            for tag in (2..2 + MORE).rev() {
                if tag % 2 == 0 {
                    to.recv(&others, tag, 0, Some(4)).unwrap();
                    to.recv(&others, tag, 0, Some(4)).unwrap();
                } else {
                    others.iter().for_each(|peer| to.recv(&[*peer], tag, 0, Some(4)).unwrap());
                }
            }
            (0..2 * MORE).for_each(|_| assert!(done(to.wait_recv(TIMEOUT)) != rank));
            others.iter().for_each(|peer| (0..COUNT).for_each(|i| to.recv(&[*peer], 1, 8 * i, Some(8)).unwrap()));
            (0..2 * COUNT).for_each(|_| assert!(done(to.wait_recv(TIMEOUT)) != rank));
            assert!(contents(&back, 8 * COUNT) == contents(&out, 8 * COUNT));
            (0..2 * (COUNT + MORE as usize)).for_each(|_| assert!(done(from.wait_send(TIMEOUT)) != rank));
            mesh.barrier(options(0)).unwrap();
        });
    }
}

/// As many as those that nobody has asked for: they wait until somebody does.
#[test]
fn small_messages_whose_receives_were_taken_back_are_no_error() {
    let asked = Barrier::new(2);
    ranks(SoftWire::Shm, 2, |mesh| {
        const FIRST: u64 = 200;
        const ALL: u64 = FIRST + 3000;
        const AT_ONCE: u64 = 100;
        let (out, back) = (memory(&(0..ALL).flat_map(u64::to_le_bytes).collect::<Vec<_>>()), memory(&[0; 8 * ALL as usize]));
        let all = |pages| buffer(&mesh, pages, 8 * ALL as usize);
        let (from, to) = (all(&out), all(&back));
        let send = |tags: std::ops::Range<u64>| tags.for_each(|tag| from.send(0, tag, 8 * tag as usize, Some(8)).unwrap());
        if mesh.rank() == 1 {
            send(0..FIRST);
        }
        mesh.barrier(options(0)).unwrap();
        for first in (FIRST..ALL).step_by(AT_ONCE as usize) {
            if mesh.rank() == 0 {
                let lost = all(&back);
                (first..first + AT_ONCE).for_each(|tag| lost.recv(&[1], tag, 0, Some(8)).unwrap());
                lost.close(TIMEOUT).unwrap();
            }
            asked.wait();
            if mesh.rank() == 1 {
                send(first..first + AT_ONCE);
            }
            mesh.barrier(options(0)).unwrap();
        }
        if mesh.rank() == 0 {
            // First what is not here. What is waited for is told anew with what was received, again and again, faster than the other reads.
            (0..ALL).rev().for_each(|tag| to.recv(&[1], tag, 8 * tag as usize, Some(8)).unwrap());
            (0..ALL).for_each(|_| assert_eq!(done(to.wait_recv(TIMEOUT)), 1));
            assert!(contents(&back, 8 * ALL as usize) == contents(&out, 8 * ALL as usize));
        } else {
            (0..ALL).for_each(|_| assert_eq!(done(from.wait_send(TIMEOUT)), 0));
        }
        mesh.barrier(options(0)).unwrap();
    });
}

/// A rank that has all it wants answers still.
#[test]
fn a_rank_that_does_something_else_lets_others_close() {
    for busy in [false, true] {
        let closed = Barrier::new(2);
        ranks(SoftWire::Shm, 2, |mesh| {
            mesh.set_sync(busy);
            let (pages, peer) = (memory(&[0; 128]), 1 - mesh.rank());
            let mine = buffer(&mesh, &pages, 64);
            let slot = Buffer::recv_from(&mesh, peer, 1, given(&pages, 64)).unwrap();
            mesh.barrier(options(0)).unwrap();
            if mesh.rank() == 0 {
                mine.recv(&[peer], 1, 0, None).unwrap();
                mine.close(TIMEOUT).unwrap();
                slot.close(TIMEOUT).unwrap();
                slot.close(TIMEOUT).unwrap();
                assert_eq!(mesh.pending(), 0);
            }
            closed.wait();
            mesh.barrier(options(0)).unwrap();
        });
    }
}

#[test]
fn a_close_that_takes_too_long_says_so() {
    let (over, begins) = (Barrier::new(2), Barrier::new(2));
    ranks(SoftWire::Shm, 2, |mesh| {
        let (pages, peer) = (memory(&[0; 64]), 1 - mesh.rank());
        // Then nobody answers.
        mesh.set_sync(true);
        mesh.barrier(options(0)).unwrap();
        begins.wait();
        if mesh.rank() == 0 {
            let mine = buffer(&mesh, &pages, 64);
            mine.recv(&[peer], 1, 0, None).unwrap();
            let error = mine.close(Duration::from_millis(50)).unwrap_err();
            assert!(matches!(&error, Error::Timeout(said) if said.contains("close of a buffer")), "{error}");
            assert!(mesh.barrier(options(0)).is_err());
        }
        over.wait();
    });
}

#[test]
fn a_rank_that_leaves_while_a_buffer_is_closed_is_no_matter_to_the_others() {
    let (told, left) = (Barrier::new(2), Barrier::new(2));
    ranks(SoftWire::Shm, 3, |mesh| {
        let pages = memory(&[0; 64]);
        mesh.set_sync(true);
        mesh.barrier(options(0)).unwrap();
        match mesh.rank() {
            0 => {
                let mine = buffer(&mesh, &pages, 64);
                mine.recv(&[1], 1, 0, None).unwrap();
                told.wait();
                mine.close(TIMEOUT).unwrap();
                left.wait();
            }
            1 => {
                told.wait();
                // Unless it is quick, the other's close waits already.
                std::thread::sleep(Duration::from_millis(20));
                return drop(mesh);
            }
            _ => left.wait(),
        }
        let (peer, word) = (2 - mesh.rank(), memory(&[0; 8]));
        let mine = buffer(&mesh, &word, 8);
        mine.send(peer, 9, 0, None).unwrap();
        mine.recv(&[peer], 9, 0, None).unwrap();
        assert_eq!(done(mine.wait_recv(TIMEOUT)), peer);
    });
}

#[test]
fn a_small_message_of_another_size_is_told_whoever_may_send_it() {
    for any in [vec![1], vec![1, 2]] {
        let over = Barrier::new(3);
        ranks(SoftWire::Shm, 3, |mesh| {
            let pages = memory(&[0; 8]);
            let mine = buffer(&mesh, &pages, 8);
            if mesh.rank() == 0 {
                mine.recv(&any, 5, 0, None).unwrap();
                let error = mine.wait_recv(TIMEOUT).unwrap_err().to_string();
                assert!(error.contains("it sent 4 bytes, tag 0x5: this rank receives 8"), "{error}");
            } else if mesh.rank() == 1 {
                mine.send(0, 5, 0, Some(4)).unwrap();
            }
            over.wait();
        });
    }
}

/// A thread that waits gets what another thread's call has ended.
#[test]
fn what_ends_in_another_threads_call_is_noticed() {
    let sent = Barrier::new(2);
    ranks(SoftWire::Shm, 2, |mesh| {
        let (pages, peer) = (memory(&[0; 64]), 1 - mesh.rank());
        let mine = buffer(&mesh, &pages, 64);
        if mesh.rank() == 1 {
            (0..50).for_each(|i| mine.send(peer, i, 0, Some(8)).unwrap());
            // They are all here when the other has that.
            mesh.barrier(options(0)).unwrap();
            sent.wait();
            return;
        }
        mesh.barrier(options(0)).unwrap();
        for i in 0..50 {
            mesh.set_sync(i % 2 == 1);
            std::thread::scope(|scope| {
                let waits = scope.spawn(|| done(mine.wait_recv(TIMEOUT)));
                std::thread::sleep(Duration::from_micros(i * 20));
                mine.recv(&[peer], i, 0, Some(8)).unwrap();
                assert_eq!(waits.join().unwrap(), peer);
            });
        }
        sent.wait();
    });
}

#[test]
fn too_much_is_refused() {
    ranks(SoftWire::Shm, 3, |mesh| {
        let pages = memory(&[0; 64]);
        let mine = buffer(&mesh, &pages, 64);
        assert!(mine.recv(&others(&mesh), 1, 0, Some(2 << 30)).is_err());
        let peer = others(&mesh)[0];
        let made: Vec<_> = (0..200).map(|slot| Buffer::recv_from(&mesh, peer, slot, given(&pages, 8))).collect();
        let refused: Vec<String> = made.iter().filter_map(|made| made.as_ref().err()).map(|error| error.to_string()).collect();
        assert_eq!(refused.len(), 200 - 128);
        assert!(refused[0].contains("slot 128: this rank has 128 buffers"), "{}", refused[0]);
        // There are slots for others.
        let large = memory(&[1; 1 << 20]);
        mesh.allreduce(given(&large, 1 << 20), Reduction::Of(DataType::U8, Op::Sum), options(0)).unwrap();
        mesh.barrier(options(0)).unwrap();
        drop(made);
        mesh.barrier(options(0)).unwrap();
    });
}
