//! Collectives that end with an error, and of whom.

use super::*;

/// By doubling, rank 2 waits for rank 0, which cannot go on without rank 1. It may find that before it has asked for anything.
#[test]
fn a_rank_that_waits_for_one_that_gives_up_is_told() {
    let (gone, over) = (Barrier::new(4), Barrier::new(3));
    ranks(SoftWire::Shm, 4, |mesh| {
        mesh.driver.set_cores(4);
        mesh.barrier(options(0)).unwrap();
        if mesh.rank() == 1 {
            drop(mesh);
            gone.wait();
        } else {
            gone.wait();
            let pages = memory(&[1; 8]);
            let failed = mesh.allreduce(given(&pages, 8), Reduction::Of(DataType::U8, Op::Sum), options(0));
            over.wait();
            let error = failed.unwrap_err();
            assert!(matches!(error, Error::Remote(_)), "{error}");
        }
    });
}

/// The others are told, as this one goes no further.
#[test]
fn a_message_that_does_not_fit_of_a_rank_that_has_left_is_an_error_of_all() {
    let (left, over) = (Barrier::new(3), Barrier::new(2));
    let errors = ranks(SoftWire::Shm, 3, |mesh| {
        let (pages, all) = (memory(&[1; 16]), memory(&[0; 48]));
        let gather = |len| mesh.gather(given(&pages, len), given(&all, 3 * len), &[len; 3], 1, options(0));
        let error = match mesh.rank() {
            0 => {
                gather(8).unwrap();
                drop(mesh);
                left.wait();
                return None;
            }
            1 => {
                left.wait();
                while !mesh.with(|core| {
                    core.poll();
                    matches!(core.peers[0], core::Peer::Lost(_))
                }) {
                    std::thread::yield_now();
                }
                gather(16).unwrap_err()
            }
            _ => {
                left.wait();
                mesh.broadcast(given(&pages, 16), 1, options(1)).unwrap_err()
            }
        };
        over.wait();
        Some(error)
    });
    assert!(matches!(&errors[1], Some(Error::Usage(said)) if said.starts_with("rank 0: ")), "{errors:?}");
    assert!(matches!(&errors[2], Some(Error::Remote(said)) if said.starts_with("rank 1: it has closed its mesh")), "{errors:?}");
}

/// They would take each other's messages.
#[test]
fn two_collectives_with_one_tag_are_refused() {
    let refused = Barrier::new(2);
    ranks(SoftWire::Shm, 2, |mesh| {
        if mesh.rank() == 0 {
            std::thread::scope(|scope| {
                let first = scope.spawn(|| mesh.barrier(options(7)));
                mesh.driver.until_waited_for(&first);
                let error = mesh.barrier(options(7)).unwrap_err().to_string();
                refused.wait();
                first.join().unwrap().unwrap();
                assert_eq!(error, "barrier, tag 0x7: this rank is in one with the same tag already");
            });
        } else {
            refused.wait();
            mesh.barrier(options(7)).unwrap();
        }
        mesh.barrier(options(7)).unwrap();
    });
}

#[test]
fn a_rank_that_is_lost_is_named_and_poisons_the_mesh() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        let results = ranks(wire, 3, |mesh| {
            mesh.barrier(options(0)).unwrap();
            if mesh.rank() == 1 {
                return None;
            }
            let first = mesh.barrier(options(0)).unwrap_err().to_string();
            let again = mesh.barrier(options(0)).unwrap_err().to_string();
            assert_eq!(first, again);
            Some(first)
        });
        assert!(results[1].is_none());
        // One of the others waits for it; the last one may wait for that one alone.
        assert!(results.iter().flatten().any(|why| why.starts_with("rank 1: ")), "{results:?}");
    }
}

#[test]
fn a_rank_that_leaves_after_its_part_disturbs_nobody() {
    let gone = Barrier::new(4);
    ranks(SoftWire::Shm, 4, |mesh| {
        mesh.barrier(options(0)).unwrap();
        if mesh.rank() == 3 {
            drop(mesh);
            gone.wait();
            return;
        }
        gone.wait();
        // Nothing of these goes to the last rank, and there is time to see that it has gone.
        for _ in 0..if mesh.rank() < 2 { 500 } else { 0 } {
            let (pages, peer) = (memory(&[mesh.rank() as u8; 100]), 1 - mesh.rank());
            let mine = mesh.device.register(pages.to_register()).unwrap();
            let swap = async {
                let received = mesh.recv(peer, 1, mine.place(100, 100)?)?;
                mesh.send(peer, 1, mine.part(0, 100)?)?.await?;
                received.await
            };
            mesh.block_on("swap", swap, TIMEOUT).unwrap();
            let mut got = [9; 100];
            mine.view(100, 100).unwrap().read(&mut got);
            assert_eq!(got, [peer as u8; 100]);
        }
    });
}

#[test]
fn a_collective_that_panics_fails_the_mesh() {
    let broken = |_: &mut [u8], _: &[u8]| panic!("on purpose");
    ranks(SoftWire::Shm, 2, |mesh| {
        let pages = memory(&[1; 100]);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            mesh.allreduce(given(&pages, 100), Reduction::Custom(1, &broken), options(0))
        }));
        assert!(result.is_err());
        let error = mesh.barrier(options(0)).unwrap_err();
        // Or of the other's, which came first.
        assert!(error.to_string().contains("panicked") || error.to_string().contains("it has closed its mesh"), "{error}");
    });
}

#[test]
fn a_rank_that_does_not_come_is_named_when_the_time_is_over() {
    let done = Barrier::new(2);
    ranks(SoftWire::Shm, 2, |mesh| {
        if mesh.rank() == 0 {
            let start = Instant::now();
            let error = mesh.barrier(Options { timeout: Duration::from_millis(300), ..options(0) }).unwrap_err();
            assert!(start.elapsed() >= Duration::from_millis(300));
            let text = "barrier, tag 0x0: rank 0 waited for 0.3 s for a message from rank 1, silent for ";
            assert!(matches!(&error, Error::Timeout(said) if said.contains(text)), "{error}");
            assert_eq!(mesh.barrier(options(0)).unwrap_err().to_string(), error.to_string());
        }
        done.wait();
    });
}

/// Those that wait for it, long before their own time is over.
#[test]
fn a_rank_that_has_waited_too_long_tells_the_others() {
    let over = Barrier::new(2);
    ranks(SoftWire::Shm, 2, |mesh| {
        mesh.barrier(options(0)).unwrap();
        let timeout = Duration::from_millis(if mesh.rank() == 0 { 100 } else { 10_000 });
        // Neither comes to what the other is in.
        let error = mesh.barrier(Options { timeout, ..options(1 + mesh.rank() as u32) }).unwrap_err();
        over.wait();
        let told = match &error {
            Error::Timeout(_) => mesh.rank() == 0,
            Error::Remote(said) => mesh.rank() == 1 && said == "rank 0: it has closed its mesh",
            _ => false,
        };
        assert!(told, "{error}");
    });
}

/// One collective of each kind in which ranks count by these numbers: theirs to each rank, and so do what comes.
fn counted(mesh: &Mesh, what: usize, lens: &[usize], timeout: Duration) -> Result<()> {
    let (own, total, sum) = (lens[mesh.rank()], lens.iter().sum::<usize>(), Reduction::Of(DataType::U8, Op::Sum));
    let (from, to, options) = (memory(&vec![1; total]), memory(&vec![0; total]), Options { timeout, ..options(0) });
    let (all_in, all_out, part_in, part_out) = (given(&from, total), given(&to, total), given(&from, own), given(&to, own));
    match what {
        0 => mesh.allgather(part_in, all_out, lens, options),
        1 => mesh.gather(part_in, all_out, lens, 0, options),
        2 => mesh.scatter(all_in, part_out, lens, 0, options),
        3 => mesh.reduce_scatter(all_in, part_out, lens, sum, options),
        4 => mesh.alltoall(all_in, all_out, lens, lens, options),
        5 => mesh.allreduce(part_out, sum, options),
        6 => mesh.broadcast(part_out, 0, options),
        _ => mesh.reduce(part_in, part_out, sum, 0, options),
    }
}

#[test]
fn ranks_that_count_differently_fail() {
    for [a, b] in [[100, 4096], [4096, 8], [8, 12], [64 << 10, 1 << 20]] {
        for what in 0..5 {
            let results = ranks(SoftWire::Shm, 2, |mesh| {
                let timeout = Duration::from_secs(10);
                let first = counted(&mesh, what, &[if mesh.rank() == 0 { a } else { b }; 2], timeout);
                // Whoever has not met the other's yet does now.
                first.and_then(|()| mesh.barrier(Options { timeout, ..options(0) }))
            });
            let errors: Vec<Error> = results.into_iter().map(|result| result.expect_err(&format!("{what}: {a} and {b}"))).collect();
            let told = |error: &Error| matches!(error, Error::Usage(said) if said.contains("rank ") && said.contains(", tag 0x0: "));
            assert!(errors.iter().any(told), "{what}: {a} and {b}: {errors:?}");
        }
    }
}

/// Nothing is sent for no bytes: whoever expects some waits until its time is over, and nobody gets anything wrong.
#[test]
fn a_rank_that_gives_or_takes_nothing_returns_and_who_expects_some_waits() {
    let (none, some) = (0, 4096);
    for what in 0..8 {
        for of_1 in [[none, none], [some, none]].into_iter().take(if what < 5 { 2 } else { 1 }) {
            let over = Barrier::new(2);
            let results = ranks(SoftWire::Shm, 2, |mesh| {
                let lens = if mesh.rank() == 0 { [some; 2] } else { of_1 };
                // Only who waits in vain is to wait shortly.
                let timeout = if mesh.rank() == 0 && !(of_1[0] == some && matches!(what, 0 | 3 | 4)) { 30 } else { 10_000 };
                let result = counted(&mesh, what, &lens, Duration::from_millis(timeout));
                over.wait();
                result
            });
            let as_said = match (&results[..], what, of_1[0] == some) {
                // Around a ring there are messages of no bytes, too.
                ([Err(a), Err(b)], 0 | 3, true) => [a, b].iter().any(|error| matches!(error, Error::Usage(said) if said.contains("4096"))),
                (_, 0 | 3, true) => false,
                // What they send each other is as both expect it.
                ([Ok(()), Ok(())], 4, true) => true,
                ([Err(Error::Timeout(said)), Ok(())], ..) => said.contains("rank 0 waited for ") && said.contains("rank 1"),
                _ => false,
            };
            assert!(as_said, "{what}, {of_1:?}: {results:?}");
        }
    }
}

#[test]
fn ranks_that_give_different_sizes_fail() {
    let sum = Reduction::Of(DataType::U8, Op::Sum);
    for lens in [[4096, 8192], [8192, 4096], [4096, 3 << 20], [3 << 20, 100], [8, 4096], [1 << 20, 8], [8, 12]] {
        for (kind, busy) in (0..3).flat_map(|kind| [(kind, false), (kind, true)]) {
            let results = ranks(SoftWire::Shm, 2, |mesh| {
                mesh.set_sync(busy);
                let (rank, len) = (mesh.rank(), lens[mesh.rank()]);
                let (pages, more) = (memory(&vec![1; len]), memory(&vec![0; len]));
                let options = Options { timeout: Duration::from_secs(10), ..options(0) };
                let first = match kind {
                    0 => mesh.allreduce(given(&pages, len), sum, options),
                    1 => mesh.broadcast(given(&pages, len), 0, options),
                    _ => mesh.reduce(given(&pages, len), given(&more, len), sum, 1, options),
                };
                // Whoever has not met the other's yet does now.
                let then = mesh.barrier(options);
                (rank, first.and(then))
            });
            let errors: Vec<Error> =
                results.into_iter().map(|(rank, result)| result.expect_err(&format!("rank {rank}, {lens:?}, {kind}, {busy}"))).collect();
            let told = |error: &Error| matches!(error, Error::Usage(said) if said.contains("rank ") && said.contains(", tag 0x0: "));
            assert!(errors.iter().any(told), "{errors:?}");
        }
    }
}

/// Though another one waits, as its rank is late.
#[test]
fn a_second_message_of_another_size_is_told() {
    ranks(SoftWire::Shm, 2, |mesh| {
        let pages = memory(&[0; 4096]);
        let gives =
            |tag: u32, len: usize| mesh.broadcast(given(&pages, len), 0, Options { timeout: Duration::from_secs(10), ..options(tag) });
        if mesh.rank() == 1 {
            let error = gives(2, 8).unwrap_err();
            return assert!(matches!(&error, Error::Usage(said) if said.contains("it sent 4096 bytes")), "{error}");
        }
        std::thread::scope(|scope| {
            let first = scope.spawn(|| gives(1, 4096));
            mesh.driver.until_waited_for(&first);
            let second = gives(2, 4096).unwrap_err();
            assert!(!matches!(second, Error::Timeout(_)) && first.join().unwrap().is_err(), "{second}");
        });
    });
}

#[test]
fn what_cannot_be_is_refused_and_nothing_is_lost() {
    let device = device(SoftWire::Shm);
    let alone = |rank, size| connect(device.clone(), &HashStore::new(), rank, size, Duration::from_millis(50)).err().unwrap().to_string();
    assert!(alone(3, 3).contains("rank 3 of 3; ranks are 0 to 2"));
    let missing = alone(0, 2);
    assert!(missing.starts_with("rank 1 has not come: "), "{missing}");
    let store = HashStore::new();
    store.set("1", b"something else").unwrap();
    let error = connect(device, &store, 0, 2, TIMEOUT).err().unwrap().to_string();
    assert_eq!(error, "rank 1: its address is none of Railhead's");
    let error = Device::open(Config { socket_ifname: "=lo".into(), ..Config::default() }, "lo+nosuch").err().unwrap().to_string();
    assert_eq!(error, "there is no device \"nosuch\"; there are lo");

    ranks(SoftWire::Shm, 2, |mesh| {
        let pages = Pages::new(4096).unwrap();
        let odd = pages.to_register().part(0, 13).unwrap();
        let error = mesh.allreduce(odd, Reduction::Of(DataType::F64, Op::Sum), options(0)).unwrap_err();
        assert!(matches!(&error, Error::Usage(said) if said.contains("13 bytes in elements of 8")), "{error}");
        let mine = mesh.device.register(pages.to_register()).unwrap();
        let error = mine.part(4000, 97).err().unwrap().to_string();
        assert_eq!(error, "97 bytes at offset 4000 of a buffer of 4096");
        let other: Result<_> = mesh.send(2, 0, mine.part(0, 1).unwrap());
        assert_eq!(other.err().unwrap().to_string(), "there is no rank 2; there are 0 to 1");
        assert!(mesh.send(mesh.rank(), 0, mine.part(0, 1).unwrap()).is_err());
        // Nothing of that has harmed it.
        mesh.barrier(options(0)).unwrap();
    });
}

#[test]
fn sizes_that_do_not_fit_together_are_refused_before_anything_is_sent() {
    ranks(SoftWire::Shm, 2, |mesh| {
        let pages = Pages::new(4096).unwrap();
        let (all, part) = (given(&pages, 100), given(&pages, 50));
        let sum = Reduction::Of(DataType::F32, Op::Sum);
        for (result, why) in [
            (mesh.broadcast(all, 2, options(0)), "broadcast: root 2; expected 0 to 1"),
            (mesh.allgather(part, all, &[100], options(0)), "allgather: 1 counts for 2 ranks"),
            (mesh.allgather(part, all, &[40, 60], options(0)), "allgather: in has 50 bytes; the counts say"),
            (mesh.allgather(part, part, &[50, 50], options(0)), "allgather: out has 50 bytes; the counts say 100"),
            (mesh.reduce_scatter(all, part, &[50, 50], sum, options(0)), "reduce_scatter: 50 bytes in elements of 4"),
            (mesh.alltoall(all, all, &[50, 50], &[40, 40], options(0)), "alltoall: this rank's own part has 40 bytes; the counts say 50"),
            (mesh.gather(all, all, &[50, 50], 0, options(0)), "gather: in has 100 bytes; the counts say 50"),
            (mesh.scatter(all, all, &[50, 50], 0, options(0)), "scatter: out has 100 bytes; the counts say 50"),
            (
                mesh.reduce(all, part, Reduction::Of(DataType::U8, Op::Sum), mesh.rank(), options(0)),
                "reduce: out has 50 bytes; the counts say 100",
            ),
        ] {
            let error = result.unwrap_err();
            assert!(matches!(&error, Error::Usage(said) if said.contains(why)), "{why}: {error}");
        }
        mesh.barrier(options(0)).unwrap();
    });
}
