//! Ranks that leave, or come to an end while others read what they have sent.

use super::*;
use crate::base::stats::MeshOp;
use crate::mesh::core::{Core, Peer};
use crate::mesh::ops::Waiter;
use crate::mesh::protocol::Tag;

const LEN: usize = 100_000;
/// How long the other rank takes to look, at most.
const SLOW: Duration = Duration::from_millis(20);

/// What the second of three ranks does, whose buffers are of a message to the first, and of one from the third, which is lost if `loses`.
fn ends(wire: SoftWire, loses: bool, how: impl FnOnce(&Mesh, UnboundBuffer, UnboundBuffer) + Send) {
    let [first, second, _third] = three_in_a_row(wire);
    let pages = memory(&[0; LEN]);
    let mine = first.device.register(given(&pages, LEN)).unwrap();
    let receive = first.with(|core| core.recv(&[1], Tag::User(5), mine.place(0, LEN).unwrap().place)).unwrap();
    let end = Instant::now() + TIMEOUT;
    until_receive_is_known(&second, &first);
    let (from, to) = (memory(&[9; LEN]), memory(&[0; LEN]));
    let out = UnboundBuffer::new(&second, given(&from, LEN)).unwrap();
    let into = UnboundBuffer::new(&second, given(&to, LEN)).unwrap();
    out.send(0, 5, 0, None).unwrap();
    into.recv(&[2], 6, 0, None).unwrap();
    if loses {
        second.with(|core| core.pair(2).unwrap().fail(&Error::remote("it has ended")));
    }
    std::thread::scope(|scope| {
        let ends = scope.spawn(|| how(&second, out, into));
        until_failed(&second);
        let failed = Instant::now();
        while !ends.is_finished() && failed.elapsed() < SLOW {
            std::thread::yield_now();
        }
        while first.with(|core| core.ops.take(receive).is_none()) {
            assert!(Instant::now() < end, "nothing comes");
            first.check().unwrap();
            first.with(Driven::poll);
        }
        assert!(contents(&pages, LEN) == [9; LEN], "{wire:?}");
    });
}

/// However the error is found: by a wait, by a test, by another thread's wait, or because the time is over.
#[test]
fn a_buffer_is_read_until_the_others_know_of_its_rank_s_end() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        ends(wire, true, |_, out, into| {
            into.wait_recv(TIMEOUT).unwrap_err();
            drop(out);
        });
        ends(wire, true, |mesh, out, into| {
            until_failed(mesh);
            into.test_recv().unwrap_err();
            drop(out);
        });
        ends(wire, true, |mesh, out, into| {
            std::thread::scope(|scope| {
                scope.spawn(|| into.wait_recv(TIMEOUT).unwrap_err());
                until_failed(mesh);
                drop(out);
            });
        });
        ends(wire, false, |_, out, into| {
            into.wait_recv(Duration::from_millis(1)).unwrap_err();
            drop(out);
        });
    }
}

#[test]
fn what_is_asked_of_a_closed_mesh_fails_at_once() {
    let asked = Barrier::new(2);
    ranks(SoftWire::Shm, 2, |mesh| {
        mesh.barrier(options(0)).unwrap();
        let (pages, peer) = (memory(&[0; 8]), 1 - mesh.rank());
        let mine = UnboundBuffer::new(&mesh, given(&pages, 8)).unwrap();
        mine.recv(&[peer], 1, 0, None).unwrap();
        asked.wait();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| mine.wait_recv(TIMEOUT).unwrap_err().to_string());
            mesh.driver.until_waited_for(&waits);
            mesh.close();
            let why = waits.join().unwrap();
            assert!(why == "this rank has closed the mesh" || why.contains("it has closed its mesh"), "{why}");
        });
        assert!(mesh.barrier(options(0)).is_err());
        mine.close(TIMEOUT).unwrap();
    });
}

/// After all that stands before it.
#[test]
fn a_rank_that_closes_is_heard_though_there_was_no_room_to_say_so() {
    let [mesh, peer] = pair_by_hand(2);
    let pages = memory(&[0; 100]);
    let mine = mesh.device.register(given(&pages, 100)).unwrap();
    // More than the peer has room for before it reads.
    for tag in 0..100 {
        mesh.with(|core| core.recv(&[1], Tag::User(tag), mine.place(0, 100).unwrap().place)).unwrap();
    }
    mesh.with(Core::send_byes);
    std::thread::scope(|scope| {
        let hears = scope.spawn(|| {
            let end = Instant::now() + Duration::from_secs(10);
            while Instant::now() < end {
                let mut core = peer.driver.lock();
                core.poll();
                if let Peer::Lost(failure) = &core.peers[0] {
                    return failure.to_string();
                }
            }
            "nothing".into()
        });
        mesh.send_byes(10_000_000_000);
        assert_eq!(hears.join().unwrap(), "rank 0: it has closed its mesh");
    });
}

fn several_queue_pairs(wire: SoftWire) -> Config {
    Config { socket_ifname: "=lo".into(), soft_wire: wire, stats: false, qps_per_rail: 8, ..Config::default() }
}

/// They may come on other queue pairs than its bye, be more than are taken at once, and be fewer than the receives that a queue pair gives back which is
/// gone.
#[test]
fn all_messages_of_a_rank_that_has_left_are_received() {
    const LEN: usize = 100;
    let counts = [132, 200].into_iter().flat_map(|count| [(SoftWire::Shm, count), (SoftWire::Tcp, count)]);
    for ((wire, count), is_gone) in counts.flat_map(|case| [(case, false), (case, true)]) {
        let case = format!("{wire:?}, {count} messages, gone: {is_gone}");
        let [first, second] = pair_by_hand_of(2, several_queue_pairs(wire));
        let pages = [memory(&[1; LEN]), memory(&vec![0; LEN * count])];
        let mine = first.device.register(given(&pages[0], LEN)).unwrap();
        let theirs = second.device.register(given(&pages[1], LEN * count)).unwrap();
        for i in 0..count {
            second.with(|core| core.recv(&[0], Tag::User(7), theirs.place(i * LEN, LEN).unwrap().place)).unwrap();
        }
        let end = Instant::now() + TIMEOUT;
        while first.with(|core| core.pair(1).unwrap().recvs_ready_for_test()) < count as u64 {
            assert!(Instant::now() < end, "{case}: the receives are not known");
            first.with(Driven::poll);
            second.with(Driven::poll);
        }
        for _ in 0..count {
            first.with(|core| core.send(1, Tag::User(7), mine.part(0, LEN).unwrap())).unwrap();
        }
        // Its device takes all, and nobody polls for what that means.
        while first.pending() > 0 {
            assert!(Instant::now() < end, "{case}: not all was sent");
            first.with(Driven::poll);
            second.with(|core| core.pair(0).unwrap().serve_for_test());
        }
        first.with(Core::send_byes);
        while !first.with(Core::byes_are_through) {
            assert!(Instant::now() < end, "{case}: its end was not sent");
            second.with(|core| core.pair(0).unwrap().serve_for_test());
        }
        let first = (!is_gone).then_some(first);
        while second.pending() > 0 && second.check().is_ok() {
            assert!(Instant::now() < end, "{case}: not all has come");
            second.with(Driven::poll);
        }
        drop(first);
        assert!(second.pending() == 0, "{case}: {} have not come: {:?}", second.pending(), second.check());
    }
}

/// Nobody waits for what it may still acknowledge.
#[test]
fn a_rank_that_has_left_for_a_lost_one_is_heard_at_once() {
    for qps_per_rail in [1, 8] {
        hears_why(Config { qps_per_rail, ..several_queue_pairs(SoftWire::Shm) });
    }
}

fn hears_why(config: Config) {
    let looks_again = config.qps_per_rail > 1;
    let [first, second] = pair_by_hand_of(2, config);
    let pages = [memory(&[1; 100]), memory(&[0; 100])];
    let mine = first.device.register(given(&pages[0], 100)).unwrap();
    let theirs = second.device.register(given(&pages[1], 100)).unwrap();
    second.with(|core| core.recv(&[0], Tag::User(7), theirs.place(0, 100).unwrap().place)).unwrap();
    let end = Instant::now() + TIMEOUT;
    until_receive_is_known(&first, &second);
    first.with(|core| core.send(1, Tag::User(7), mine.part(0, 100).unwrap())).unwrap();
    // It never takes the message.
    second.with(|core| core.pair(0).unwrap().send_bye(Some(0)));
    while first.with(|core| core.pair(1).is_ok_and(|pair| pair.left().is_none())) {
        assert!(Instant::now() < end, "its end is not known");
        first.with(Driven::poll);
    }
    // On one queue pair nothing can come behind a bye.
    if looks_again {
        first.with(Driven::poll);
    }
    let error = first.check().unwrap_err().to_string();
    assert_eq!(error, "rank 1: it has closed its mesh, as rank 0 is lost");
}

/// What a rank has sent before it gives up is read from its memory, which stays until the others have it: also what a collective has of its own.
#[test]
fn what_was_sent_before_another_rank_was_lost_arrives() {
    const LEN: usize = 100_000;
    type Sends = fn(&Mesh) -> Result<()>;
    let scratch: Sends = |mesh| {
        let collective = async {
            let scratch = mesh.scratch(LEN)?;
            scratch.view(0, LEN)?.write(&[9; LEN]);
            let tag = Tag::collective(MeshOp::Broadcast, 0, false);
            let (_first, third) = (mesh.send(0, tag, scratch.part(0, LEN)?)?, mesh.send(2, tag, scratch.part(0, LEN)?)?);
            third.await.map(drop)
        };
        mesh.block_on(Waiter::Collective(7), collective, TIMEOUT)
    };
    let broadcast: Sends = |mesh| {
        let pages = memory(&[9; LEN]);
        mesh.broadcast(given(&pages, LEN), 1, options(0))
    };
    for (wire, sends) in [(SoftWire::Shm, scratch), (SoftWire::Tcp, scratch), (SoftWire::Shm, broadcast), (SoftWire::Tcp, broadcast)] {
        let [first, second, _third] = three_in_a_row(wire);
        let pages = memory(&[0; LEN]);
        let mine = first.device.register(given(&pages, LEN)).unwrap();
        let tag = Tag::collective(MeshOp::Broadcast, 0, false);
        let receive = first.recv(1, tag, mine.place(0, LEN).unwrap()).unwrap();
        let end = Instant::now() + TIMEOUT;
        until_receive_is_known(&second, &first);
        std::thread::scope(|scope| {
            let gives_up = scope.spawn(|| sends(&second));
            while second.pending() < 2 {
                assert!(Instant::now() < end, "nothing was sent");
                std::thread::yield_now();
            }
            second.with(|core| core.pair(2).unwrap().fail(&Error::remote("it has ended")));
            // The first one takes nothing before.
            until_failed(&second);
            first.block_on(Waiter::Collective(7), async { receive.await.map(drop) }, TIMEOUT).unwrap();
            assert!(contents(&pages, LEN) == [9; LEN], "{wire:?}");
            let error = gives_up.join().unwrap().unwrap_err().to_string();
            assert!(error.starts_with("rank 2: "), "{error}");
        });
    }
}

/// Its acknowledgements come on other queue pairs than its bye.
#[test]
fn who_has_received_all_may_leave_on_several_queue_pairs() {
    const COUNT: usize = 200;
    const LEN: usize = 100;
    for (round, wire) in (0..8).flat_map(|round| [(round, SoftWire::Shm), (round, SoftWire::Tcp)]) {
        let [first, second] = pair_by_hand_of(2, several_queue_pairs(wire));
        let pages = [memory(&[1; LEN]), memory(&[0; LEN * COUNT])];
        let mine = first.device.register(given(&pages[0], LEN)).unwrap();
        let theirs = second.device.register(given(&pages[1], LEN * COUNT)).unwrap();
        for _ in 0..COUNT {
            first.with(|core| core.send(1, Tag::User(7), mine.part(0, LEN).unwrap())).unwrap();
        }
        let end = Instant::now() + TIMEOUT;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for i in 0..COUNT {
                    second.with(|core| core.recv(&[0], Tag::User(7), theirs.place(i * LEN, LEN).unwrap().place)).unwrap();
                }
                while second.pending() > 0 && Instant::now() < end {
                    second.with(Driven::poll);
                }
                assert_eq!(second.pending(), 0, "not all has come");
            });
            while first.pending() > 0 && first.check().is_ok() && Instant::now() < end {
                first.with(Driven::poll);
                if round % 2 == 0 {
                    std::thread::yield_now();
                }
            }
        });
        assert!(first.pending() == 0 && first.check().is_ok(), "{wire:?}, round {round}: {:?}", first.check());
    }
}
