//! Meshes that are made over others.

use super::*;
use crate::base::stats::MeshOp;
use crate::mesh::coll::FORK;
use crate::mesh::connect::PLACE;
use crate::mesh::core::Peer;
use crate::mesh::protocol::Tag;

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
