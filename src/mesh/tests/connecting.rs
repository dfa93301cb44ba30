//! Ranks that connect by other means than a store, and meshes beside meshes.

use std::sync::Mutex;

use super::*;
use crate::base::clock;
use crate::base::stats::MeshOp;
use crate::base::sync::lock;
use crate::link::driver::Driven;
use crate::mesh::addresses;
use crate::mesh::coll::FORK;
use crate::mesh::connect::PLACE;
use crate::mesh::core::{Core, Peer};
use crate::mesh::ops::Waiter;
use crate::mesh::protocol::Tag;
use crate::store::{Deadline, PrefixStore};

fn sums(mesh: &Mesh, round: usize) {
    let pages = memory(&fill(DataType::U32, 5000, |i| value(mesh.rank(), i + round)));
    mesh.allreduce(given(&pages, 20_000), Reduction::Of(DataType::U32, Op::Sum), options(0)).unwrap();
    assert!(contents(&pages, 20_000) == fill(DataType::U32, 5000, |i| reduced(Op::Sum, mesh.size(), i + round)));
}

/// As Gloo's ContextFactory.
#[test]
fn a_mesh_is_made_over_another() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        ranks(wire, 3, |mesh| {
            let second = mesh.fork(TIMEOUT).unwrap();
            let third = second.fork(TIMEOUT).unwrap();
            // At once, with one tag; and the first one may go.
            std::thread::scope(|scope| {
                scope.spawn(|| (0..20).for_each(|round| sums(&mesh, round)));
                scope.spawn(|| (0..20).for_each(|round| sums(&second, round)));
                scope.spawn(|| (0..20).for_each(|round| sums(&third, round)));
            });
            mesh.barrier(options(0)).unwrap();
            drop((mesh, third));
            sums(&second, 7);
            second.barrier(options(0)).unwrap();
        });
    }
}

/// What came of the first attempt means nothing to the second: neither what ranks have said, nor that they have gone.
#[test]
fn ranks_may_try_again_in_another_prefix() {
    let (store, again) = (Arc::new(HashStore::new()), Barrier::new(3));
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (store, again) = (store.clone(), &again);
            scope.spawn(move || {
                let mesh = Mesh::new(device(SoftWire::Shm), rank, 3).unwrap();
                let pages = memory(&[0; 8]);
                // From here on a thread of its own looks at the first two ranks' pairs.
                let buffer = (rank < 2).then(|| UnboundBuffer::new(&mesh, given(&pages, 8)).unwrap());
                if rank < 2 {
                    // The second rank is gone before the first one gives up.
                    let time = if rank == 0 { 1000 } else { 200 };
                    assert!(mesh.connect(&*store, Duration::from_millis(time)).is_err());
                }
                again.wait();
                mesh.connect(&PrefixStore::new("again", store), TIMEOUT).unwrap();
                mesh.barrier(options(0)).unwrap();
                sums(&mesh, 3);
                drop(buffer);
            });
        }
    });
}

#[test]
fn ranks_connect_by_addresses_that_others_carry() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        let carried = Mutex::new(std::collections::HashMap::new());
        let (told, connected) = (Barrier::new(3), Barrier::new(3));
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let (carried, told, connected) = (&carried, &told, &connected);
                scope.spawn(move || {
                    let mesh = Mesh::new(device(wire), rank, 3).unwrap();
                    let error = mesh.barrier(Options { timeout: Duration::from_millis(1), ..options(0) });
                    // Only ranks 0 and 1, and 1 and 2.
                    let peers: Vec<usize> = (0..3usize).filter(|peer| peer.abs_diff(rank) == 1).collect();
                    assert!(error.unwrap_err().to_string().contains("is not connected"));
                    let mesh = if peers.is_empty() { mesh } else { Mesh::new(device(wire), rank, 3).unwrap() };
                    for &peer in &peers {
                        let address = mesh.address(peer).unwrap();
                        assert_eq!(address, mesh.address(peer).unwrap(), "the same when asked again");
                        lock(carried).insert((rank, peer), address);
                    }
                    told.wait();
                    for &peer in &peers {
                        let address = lock(carried)[&(peer, rank)].clone();
                        mesh.connect_pair(peer, &address).unwrap();
                        let again = mesh.connect_pair(peer, &address).unwrap_err().to_string();
                        assert_eq!(again, format!("rank {peer} is connected already"));
                        assert!(mesh.address(peer).unwrap_err().to_string().contains("is connected already"));
                    }
                    connected.wait();
                    let pages = memory(&[rank as u8; 16]);
                    let mine = UnboundBuffer::new(&mesh, given(&pages, 16)).unwrap();
                    for &peer in &peers {
                        mine.recv(&[peer], 1, 8, Some(8)).unwrap();
                        mine.send(peer, 1, 0, Some(8)).unwrap();
                        assert_eq!(mine.wait_recv(TIMEOUT).unwrap(), Waited::Done { rank: peer, len: 8 });
                        assert_eq!(contents(&pages, 16)[8..], [peer as u8; 8]);
                        mine.wait_send(TIMEOUT).unwrap();
                    }
                    if rank == 0 {
                        let error = mine.send(2, 1, 0, Some(8)).unwrap_err().to_string();
                        assert_eq!(error, "rank 2 is not connected");
                    }
                    connected.wait();
                });
            }
        });
    }
}

#[test]
fn addresses_that_are_none_are_refused() {
    let mesh = Mesh::new(device(SoftWire::Shm), 0, 3).unwrap();
    let mut own = mesh.address(1).unwrap();
    let refused = |peer, address: &[u8]| mesh.connect_pair(peer, address).unwrap_err().to_string();
    assert_eq!(refused(0, &own), "rank 0; expected 0 to 2, and not this rank, 0");
    assert_eq!(refused(3, &own), "rank 3; expected 0 to 2, and not this rank, 0");
    assert_eq!(refused(2, &own), "rank 2 was not told this rank's address towards it");
    assert_eq!(refused(1, b"garbage"), "rank 1: its address is none of Railhead's");
    own.push(0);
    assert_eq!(refused(1, &own), "rank 1: its address has 1 bytes more than it needs");
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

#[test]
fn who_waits_busily_is_served_as_well() {
    ranks(SoftWire::Shm, 2, |mesh| {
        mesh.set_sync(true);
        (0..50).for_each(|round| sums(&mesh, round));
        if mesh.rank() == 0 {
            let error = mesh.barrier(Options { timeout: Duration::from_millis(30), ..options(3) }).unwrap_err();
            assert!(matches!(error, Error::Timeout(_)), "{error}");
        } else {
            assert!(mesh.barrier(options(4)).is_err());
        }
    });
}

/// What is left there would be taken for ranks that have come.
#[test]
fn a_prefix_that_was_used_before_is_refused() {
    let (store, again) = (Arc::new(HashStore::new()), Barrier::new(2));
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (store, again) = (store.clone(), &again);
            scope.spawn(move || {
                let first = connect(device(SoftWire::Shm), &store, rank, 2, TIMEOUT).unwrap();
                first.barrier(options(0)).unwrap();
                drop(first);
                again.wait();
                let second = Mesh::new(device(SoftWire::Shm), rank, 2).unwrap();
                let error = second.connect(&*store, Duration::from_secs(10)).unwrap_err();
                let why = format!("the store in which the ranks meet: rank {rank} has been there before; use another prefix each time");
                assert!(matches!(&error, Error::Usage(said) if *said == why), "{error}");
                second.connect(&PrefixStore::new("second", store), TIMEOUT).unwrap();
                sums(&second, 3);
                second.barrier(options(0)).unwrap();
            });
        }
    });
}

/// Though one that has everything of all others waits for it.
#[test]
fn a_rank_that_gives_up_to_connect_tells_all_others_why() {
    let store = HashStore::new();
    let third = Mesh::new(device(SoftWire::Shm), 2, 3).unwrap();
    let [mut to_first, to_second] = [0, 1].map(|rank| third.address(rank).unwrap());
    let fabric = to_first.windows(4).position(|part| part == b"soft").unwrap();
    to_first[fabric..fabric + 4].copy_from_slice(b"abcd");
    store.set("2", &addresses::encode(&[to_first, to_second]).unwrap()).unwrap();
    store.set("2 connects", b"").unwrap();
    let told = std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let store = &store;
            scope.spawn(move || connect(device(SoftWire::Shm), store, rank, 3, TIMEOUT).map(drop))
        });
        ranks.map(|rank| rank.join().unwrap())
    });
    let why = "is on fabric abcd, this side on soft";
    assert!(matches!(&told[0], Err(Error::Usage(said)) if said.starts_with("rank 2: ") && said.contains(why)), "{told:?}");
    assert!(matches!(&told[1], Err(Error::Remote(said)) if said.starts_with("rank 0: it gives up: ") && said.contains(why)), "{told:?}");
}

/// Nor does it wait for what a lone rank has told nobody.
#[test]
fn a_rank_of_another_size_is_refused_at_once() {
    let store = HashStore::new();
    let _alone = connect(device(SoftWire::Shm), &store, 0, 1, TIMEOUT).unwrap();
    let error = connect(device(SoftWire::Shm), &store, 1, 2, TIMEOUT).map(drop).unwrap_err();
    assert!(matches!(&error, Error::Usage(said) if said == "rank 0: it is one of 1 ranks, this rank one of 2"), "{error}");
}

/// Two ends whose pairs this thread moves on.
fn pair_by_hand(size: usize) -> [Mesh; 2] {
    pair_by_hand_of(size, Config { socket_ifname: "=lo".into(), soft_wire: SoftWire::Shm, stats: false, ..Config::default() })
}

fn pair_by_hand_of(size: usize, config: Config) -> [Mesh; 2] {
    let meshes = [0, 1].map(|rank| Mesh::new(Device::open(config.clone(), "").unwrap(), rank, size).unwrap());
    let addresses = [0, 1].map(|rank: usize| meshes[rank].address(1 - rank).unwrap());
    (0..2).for_each(|rank| meshes[rank].connect_end(1 - rank, &addresses[1 - rank]).unwrap());
    meshes
}

#[test]
fn a_store_is_refused_by_whoever_has_connected_by_hand() {
    let meshes = pair_by_hand(3);
    for mesh in &meshes {
        let error = mesh.connect(&HashStore::new(), Duration::from_millis(50)).unwrap_err().to_string();
        assert_eq!(error, "some ranks are connected already, by their addresses: so must all others be");
    }
    std::thread::scope(|scope| {
        for (rank, mesh) in meshes.iter().enumerate() {
            scope.spawn(move || {
                let pages = memory(&[rank as u8; 16]);
                let mine = UnboundBuffer::new(mesh, given(&pages, 16)).unwrap();
                mine.send(1 - rank, 1, 0, Some(8)).unwrap();
                mine.recv(&[1 - rank], 1, 8, Some(8)).unwrap();
                mine.wait_recv(TIMEOUT).unwrap();
                mine.wait_send(TIMEOUT).unwrap();
                assert_eq!(contents(&pages, 16)[8..], [1 - rank as u8; 8]);
            });
        }
    });
}

#[test]
fn what_is_sent_before_the_peer_is_there_arrives_though_nobody_waits() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        let meshes = [0, 1].map(|rank| Mesh::new(device(wire), rank, 2).unwrap());
        let addresses = [0, 1].map(|rank: usize| meshes[rank].address(1 - rank).unwrap());
        meshes[0].connect_pair(1, &addresses[1]).unwrap();
        let (sent, taken) = (memory(&[7; 8]), memory(&[0; 8]));
        meshes[0].broadcast(given(&sent, 8), 0, options(0)).unwrap();
        meshes[1].connect_pair(0, &addresses[0]).unwrap();
        meshes[1].broadcast(given(&taken, 8), 0, options(0)).unwrap();
        assert_eq!(contents(&taken, 8), [7; 8]);
    }
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

/// By ranks that have it while others still wait for theirs.
#[test]
fn a_mesh_that_is_made_over_another_may_be_closed_at_once() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        ranks(wire, 4, |mesh| (0..20).for_each(|_| drop(mesh.fork(TIMEOUT).unwrap())));
    }
}

/// As it comes no more, though nobody has lost it.
#[test]
fn a_fork_that_one_rank_gives_up_is_an_error_of_all() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        let over = Barrier::new(2);
        let told = ranks(wire, 2, |mesh| {
            let result = if mesh.rank() == 0 {
                let (forked, out) = mesh.fork_ends().unwrap();
                let back = mesh.scratch(mesh.size() * PLACE).unwrap();
                mesh.swap(&mesh.begin_swap(FORK).unwrap(), &out, &back, PLACE, TIMEOUT).unwrap();
                let error = Error::system("eventfd", std::io::Error::from_raw_os_error(libc::EMFILE));
                mesh.poison(&error);
                drop(forked);
                Err(error)
            } else {
                mesh.fork(TIMEOUT).map(drop)
            };
            over.wait();
            result
        });
        assert!(matches!(&told[1], Err(Error::Remote(said)) if said == "rank 0: it has closed its mesh"), "{wire:?}: {told:?}");
    }
}

/// Though its collective could not even begin.
#[test]
fn a_fork_that_is_refused_late_is_an_error_of_all() {
    let over = Barrier::new(2);
    let told = ranks(SoftWire::Shm, 2, |mesh| {
        // Of a barrier that nobody should have with this tag.
        let other = (mesh.rank() == 0).then(|| mesh.running.begin(Tag::collective(MeshOp::Barrier, FORK, true)).unwrap());
        let result = mesh.fork(Duration::from_secs(5)).map(drop);
        over.wait();
        drop(other);
        result
    });
    assert!(matches!(&told[0], Err(Error::Usage(said)) if said.contains("one with the same tag already")), "{told:?}");
    assert!(matches!(&told[1], Err(Error::Remote(said)) if said == "rank 0: it has closed its mesh"), "{told:?}");
}

/// Nothing is done of it.
#[test]
fn a_second_fork_at_once_is_refused_and_the_first_goes_on() {
    ranks(SoftWire::Shm, 2, |mesh| {
        let run = mesh.begin_swap(FORK).unwrap();
        let error = mesh.fork(TIMEOUT).map(drop).unwrap_err().to_string();
        assert!(error.contains("this rank is in one with the same tag already"), "{error}");
        drop(run);
        sums(&mesh.fork(TIMEOUT).unwrap(), 3);
        sums(&mesh, 3);
    });
}

/// Though there was no room to say so at first.
#[test]
fn a_rank_that_gives_a_fork_up_tells_for_which_lost_one() {
    let (swapped, full, lost, over) = (Barrier::new(3), Barrier::new(3), Barrier::new(3), Barrier::new(3));
    let told = ranks(SoftWire::Shm, 3, |mesh| {
        if mesh.rank() == 0 {
            let pages = memory(&[0; 100]);
            let mine = mesh.device.register(given(&pages, 100)).unwrap();
            let told = std::thread::scope(|scope| {
                let forks = scope.spawn(|| mesh.fork(TIMEOUT).map(drop));
                swapped.wait();
                // More than that one, which does not read, has room for.
                for tag in 0..100 {
                    mesh.with(|core| core.recv(&[1], Tag::User(tag), mine.place(0, 100).unwrap().place)).unwrap();
                }
                full.wait();
                while mesh.check().is_ok() && !forks.is_finished() {
                    std::thread::yield_now();
                }
                lost.wait();
                forks.join().unwrap().map_or_else(|error| error.to_string(), |()| "done".into())
            });
            over.wait();
            return told;
        }
        let (forked, out) = mesh.fork_ends().unwrap();
        let back = mesh.scratch(mesh.size() * PLACE).unwrap();
        mesh.swap(&mesh.begin_swap(FORK).unwrap(), &out, &back, PLACE, TIMEOUT).unwrap();
        swapped.wait();
        full.wait();
        if mesh.rank() == 2 {
            // It goes for one that no rank knows of, so it is lost itself.
            mesh.with(|core| core.pair(0).unwrap().send_bye(Some(7)));
        }
        lost.wait();
        let end = Instant::now() + Duration::from_secs(10);
        let told = loop {
            let mut core = mesh.driver.lock();
            core.poll();
            match &core.peers[0] {
                _ if mesh.rank() == 2 => break "".into(),
                Peer::Lost(failure) => break failure.to_string(),
                _ if Instant::now() > end => break "nothing".into(),
                _ => {}
            }
        };
        over.wait();
        drop(forked);
        told
    });
    assert!(told[0].starts_with("rank 2: it has closed its mesh"), "{told:?}");
    assert_eq!(told[1], "rank 0: it has closed its mesh, as rank 2 is lost");
}

/// A connected pair shows no wait, and none is counted.
#[test]
fn who_is_connected_does_not_wait_to_be() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        let over = Barrier::new(2);
        let ages = ranks(wire, 2, |mesh| {
            let age = mesh.with(|core| core.pair(1 - mesh.rank()).unwrap().stats().wait_age(clock::now()));
            over.wait();
            age
        });
        assert_eq!(ages, [None, None], "{wire:?}");
    }
}

/// Although nothing it waits for can come any more.
#[test]
fn a_wait_of_an_earlier_attempt_ends_when_its_time_is_over() {
    let store = HashStore::new();
    let mesh = Mesh::new(device(SoftWire::Shm), 0, 2).unwrap();
    let pages = memory(&[0; 8]);
    let mine = UnboundBuffer::new(&mesh, given(&pages, 8)).unwrap();
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| mine.wait_recv(Duration::from_millis(400)));
        mesh.driver.until_waited_for(&waits);
        assert!(mesh.connect(&store, Duration::from_millis(10)).is_err());
        let end = Instant::now() + Duration::from_secs(10);
        while !waits.is_finished() && Instant::now() < end {
            std::thread::yield_now();
        }
        let in_time = waits.is_finished();
        mine.abort_recv();
        let result = waits.join().unwrap();
        assert!(in_time && matches!(result, Err(Error::Timeout(_))), "{in_time}: {result:?}");
    });
}

#[test]
fn a_mesh_that_is_closed_does_not_begin_to_connect() {
    let store = HashStore::new();
    let mesh = Mesh::new(device(SoftWire::Shm), 0, 2).unwrap();
    mesh.close();
    let result = mesh.connect(&store, Duration::from_millis(200));
    assert!(matches!(&result, Err(Error::Usage(said)) if said == "this rank has closed the mesh"), "{result:?}");
    assert!(!store.check(&["0"]).unwrap(), "others take it for one that comes");
}

#[test]
fn a_mesh_that_is_closed_waits_for_no_queue_pair() {
    let meshes = [0, 1].map(|rank| Mesh::new(device(SoftWire::Shm), rank, 2).unwrap());
    let addresses = [0, 1].map(|rank: usize| meshes[rank].address(1 - rank).unwrap());
    // The other one does not connect.
    meshes[0].connect_pair(1, &addresses[1]).unwrap();
    let timeout = Duration::from_secs(10);
    std::thread::scope(|scope| {
        let connects = scope.spawn(|| meshes[0].wait_connected(Deadline::after(timeout), timeout, None));
        meshes[0].close();
        let result = connects.join().unwrap();
        assert!(matches!(&result, Err(Error::Usage(said)) if said == "this rank has closed the mesh"), "{result:?}");
    });
}

#[test]
fn a_mesh_that_is_closed_while_it_connects_is_not_connected() {
    let store = HashStore::new();
    let mesh = Mesh::new(device(SoftWire::Shm), 0, 2).unwrap();
    std::thread::scope(|scope| {
        let connects = scope.spawn(|| mesh.connect(&store, TIMEOUT));
        while !mesh.connecting.load(Ordering::Relaxed) {
            std::thread::yield_now();
        }
        mesh.close();
        let other = connect(device(SoftWire::Shm), &store, 1, 2, Duration::from_secs(5)).map(drop);
        let result = connects.join().unwrap();
        assert!(matches!(&result, Err(Error::Usage(said)) if said == "this rank has closed the mesh"), "{result:?}, {other:?}");
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

/// Whatever came of what was waited for before: it was taken back, another rank had it, or there was nothing.
#[test]
fn silence_while_nobody_waits_is_not_held_against_a_rank() {
    const SMALL: usize = 8;
    let config = Config { peer_timeout_s: 3, socket_ifname: "=lo".into(), soft_wire: SoftWire::Shm, stats: false, ..Config::default() };
    let triple = || {
        let meshes = [0, 1, 2].map(|rank| Mesh::new(Device::open(config.clone(), "").unwrap(), rank, 3).unwrap());
        let pairs = [(0, 1), (1, 0), (0, 2), (2, 0)];
        let addresses = pairs.map(|(rank, peer): (usize, usize)| meshes[peer].address(rank).unwrap());
        pairs.iter().zip(&addresses).for_each(|((rank, peer), address)| meshes[*rank].connect_pair(*peer, address).unwrap());
        meshes
    };
    let pages = memory(&[0; SMALL]);
    let place = |mesh: &Mesh| mesh.device.register(given(&pages, SMALL)).unwrap();
    // Two looks.
    let poll = |mesh: &Mesh| (0..130).for_each(|_| _ = mesh.with(Driven::poll));
    let recv = |mesh: &Mesh, ranks: &[usize]| {
        let mine = place(mesh);
        (mesh.with(|core| core.recv(ranks, Tag::User(7), mine.place(0, SMALL).unwrap().place)).unwrap(), mine)
    };
    let cases = ["nothing", "taken back", "another had it"].map(|case| (case, triple()));
    let _registered = cases.each_ref().map(|(case, [mesh, _, other])| {
        if *case == "nothing" {
            poll(mesh);
            return None;
        }
        let (op, mine) = recv(mesh, &[1, 2]);
        poll(mesh);
        if *case == "taken back" {
            mesh.with(|core| core.cancel(op));
            return Some(mine);
        }
        let theirs = place(other);
        other.with(|core| core.send(0, Tag::User(7), theirs.part(0, SMALL).unwrap())).unwrap();
        let end = Instant::now() + TIMEOUT;
        while mesh.pending() > 0 && Instant::now() < end {
            other.with(Driven::poll);
            mesh.with(Driven::poll);
        }
        assert_eq!(mesh.pending(), 0);
        Some(mine)
    });
    std::thread::sleep(Duration::from_millis(3100));
    for (case, [mesh, ..]) in &cases {
        let _registered = recv(mesh, &[1]);
        poll(mesh);
        assert!(mesh.check().is_ok(), "{case}: {:?}", mesh.check());
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

/// A thread that has it from the first attempt does not fail the second.
#[test]
fn an_error_of_an_attempt_to_connect_is_no_matter_to_the_next() {
    let (store, failed) = (Arc::new(HashStore::new()), Barrier::new(2));
    let mesh = Mesh::new(device(SoftWire::Shm), 0, 2).unwrap();
    std::thread::scope(|scope| {
        let late = scope.spawn(|| {
            let waits = std::future::poll_fn(|_| {
                failed.wait();
                failed.wait();
                std::task::Poll::Ready(Err::<(), _>(Error::remote("of the first attempt")))
            });
            mesh.block_on("wait", waits, TIMEOUT).unwrap_err()
        });
        failed.wait();
        assert!(mesh.connect(&*store, Duration::from_millis(50)).is_err());
        failed.wait();
        late.join().unwrap();
        mesh.check().unwrap();
    });
}
