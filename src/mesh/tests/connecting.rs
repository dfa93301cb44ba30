//! Ranks that connect: by a store, by other means, again, and not at all.

use std::sync::Mutex;

use super::*;
use crate::base::clock;
use crate::base::sync::lock;
use crate::mesh::addresses;
use crate::mesh::protocol::Tag;
use crate::store::{Deadline, PrefixStore};

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
