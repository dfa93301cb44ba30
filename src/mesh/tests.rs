//! Meshes whose ranks are threads of one process.

mod buffers;
mod connecting;
mod farewell;
mod hostile;
mod unbound;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use half::{bf16, f16};

use super::*;
use crate::base::config::{Config, SoftWire};
use crate::base::error::{Error, Result};
use crate::base::mem::{Pages, UserMemory};
use crate::base::testing::Barrier;
use crate::link::driver::Driven;
use crate::store::{HashStore, Store};

const TIMEOUT: Duration = Duration::from_secs(60);

fn options(tag: u32) -> Options {
    Options { tag, timeout: TIMEOUT, algorithm: Algorithm::Auto }
}

fn device(wire: SoftWire) -> Arc<Device> {
    Device::open(Config { socket_ifname: "=lo".into(), soft_wire: wire, stats: false, ..Config::default() }, "").unwrap()
}

fn connect(device: Arc<Device>, store: &HashStore, rank: usize, size: usize, timeout: Duration) -> Result<Mesh> {
    let mesh = Mesh::new(device, rank, size)?;
    mesh.connect(store, timeout)?;
    Ok(mesh)
}

/// Runs a thread for each rank, each with a device of its own.
fn ranks<T: Send>(wire: SoftWire, size: usize, f: impl Fn(Mesh) -> T + Sync) -> Vec<T> {
    let store = HashStore::new();
    std::thread::scope(|scope| {
        let rank = |rank| {
            let (store, f) = (&store, &f);
            scope.spawn(move || f(connect(device(wire), store, rank, size, TIMEOUT).unwrap()))
        };
        let threads: Vec<_> = (0..size).map(rank).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Memory with these bytes, or the first of them.
fn memory(bytes: &[u8]) -> Pages {
    let pages = Pages::new(bytes.len().max(1)).unwrap();
    pages.write(0, bytes);
    pages
}

/// What was put there, as a rank gives it.
fn given(pages: &Pages, len: usize) -> UserMemory {
    pages.to_register().part(0, len).unwrap()
}

fn contents(pages: &Pages, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    pages.read(0, &mut bytes);
    bytes
}

/// Element `i` of a rank: small enough for sums and products to be exact in every type.
fn element(data_type: DataType, value: u8) -> Vec<u8> {
    match data_type {
        DataType::I8 => (value as i8).to_ne_bytes().to_vec(),
        DataType::U8 => value.to_ne_bytes().to_vec(),
        DataType::I32 => i32::from(value).to_ne_bytes().to_vec(),
        DataType::U32 => u32::from(value).to_ne_bytes().to_vec(),
        DataType::I64 => i64::from(value).to_ne_bytes().to_vec(),
        DataType::U64 => u64::from(value).to_ne_bytes().to_vec(),
        DataType::F16 => f16::from_f32(value.into()).to_ne_bytes().to_vec(),
        DataType::Bf16 => bf16::from_f32(value.into()).to_ne_bytes().to_vec(),
        DataType::F32 => f32::from(value).to_ne_bytes().to_vec(),
        DataType::F64 => f64::from(value).to_ne_bytes().to_vec(),
    }
}

fn value(rank: usize, i: usize) -> u8 {
    ((i * 7 + rank * 3) % 3 + 1) as u8
}

fn reduced(op: Op, size: usize, i: usize) -> u8 {
    let values = (0..size).map(|rank| value(rank, i));
    match op {
        Op::Sum => values.sum(),
        Op::Product => values.fold(1, u8::wrapping_mul),
        Op::Min => values.min().unwrap(),
        Op::Max => values.max().unwrap(),
    }
}

fn fill(data_type: DataType, count: usize, of: impl Fn(usize) -> u8) -> Vec<u8> {
    match data_type {
        // Of which there may be many.
        DataType::U8 => (0..count).map(of).collect(),
        _ => (0..count).flat_map(|i| element(data_type, of(i))).collect(),
    }
}

/// Three ranks, of which the first and the last are connected to the second alone.
fn three_in_a_row(wire: SoftWire) -> [Mesh; 3] {
    let meshes = [0, 1, 2].map(|rank| Mesh::new(device(wire), rank, 3).unwrap());
    for [mesh, other] in [[0, 1], [1, 2]].map(|ranks| ranks.map(|rank: usize| &meshes[rank])) {
        let addresses = [mesh.address(other.rank()).unwrap(), other.address(mesh.rank()).unwrap()];
        mesh.connect_end(other.rank(), &addresses[1]).unwrap();
        other.connect_end(mesh.rank(), &addresses[0]).unwrap();
    }
    meshes
}

/// Polls both until the one knows of a receive of the other's.
fn until_receive_is_known(by: &Mesh, of: &Mesh) {
    let end = Instant::now() + TIMEOUT;
    while by.with(|core| core.pair(of.rank()).unwrap().recvs_ready_for_test()) == 0 {
        assert!(Instant::now() < end, "the receive is not known");
        of.with(Driven::poll);
        by.with(Driven::poll);
    }
}

fn until_failed(mesh: &Mesh) {
    let end = Instant::now() + TIMEOUT;
    while mesh.check().is_ok() {
        assert!(Instant::now() < end, "the mesh has not failed");
        std::thread::yield_now();
    }
}

#[test]
fn allreduce_of_every_type_and_operation() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        ranks(wire, 3, |mesh| {
            for data_type in DataType::ALL {
                for op in Op::ALL {
                    for count in [1, 1000, 30_001] {
                        let bytes = fill(data_type, count, |i| value(mesh.rank(), i));
                        let pages = memory(&bytes);
                        mesh.allreduce(given(&pages, bytes.len()), Reduction::Of(data_type, op), options(0)).unwrap();
                        let expected = fill(data_type, count, |i| reduced(op, 3, i));
                        assert!(contents(&pages, bytes.len()) == expected, "{data_type:?} {op:?} {count}");
                    }
                }
            }
        });
    }
}

#[test]
fn allreduce_among_any_number_of_ranks() {
    for size in 1..=15 {
        ranks(SoftWire::Shm, size, |mesh| {
            // The longest where a rank's neighbours are not the same, and all of it takes a while.
            let most = if size == 4 { (9 << 20) + 1 } else { 70_001 };
            for (round, len) in [1, 7, 4096, 40 << 10, most].into_iter().enumerate() {
                let mine = fill(DataType::U8, len, |i| value(mesh.rank(), i + round));
                let expected = fill(DataType::U8, len, |i| reduced(Op::Sum, size, i + round));
                for algorithm in Algorithm::ALL {
                    let pages = memory(&mine);
                    mesh.allreduce(given(&pages, len), Reduction::Of(DataType::U8, Op::Sum), Options { algorithm, ..options(0) }).unwrap();
                    assert!(contents(&pages, len) == expected, "{len} bytes, {size} ranks, {algorithm:?}");
                }
            }
        });
    }
}

#[test]
fn floats_have_the_same_bits_on_all_ranks() {
    for (len, size) in [(4096, 5), (1 << 20, 5), (1 << 20, 8)] {
        let results = ranks(SoftWire::Shm, size, |mesh| {
            let mut state = mesh.rank() as u64 + 1;
            // Any bits: infinities, both zeros, numbers that are none.
            let bytes: Vec<u8> = (0..len)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (state >> 56) as u8
                })
                .collect();
            Op::ALL.map(|op| {
                let pages = memory(&bytes);
                mesh.allreduce(given(&pages, len), Reduction::Of(DataType::F16, op), options(0)).unwrap();
                contents(&pages, len)
            })
        });
        assert!(results.iter().all(|result| *result == results[0]), "{len} bytes");
    }
}

fn is_nan(data_type: DataType, bytes: &[u8]) -> bool {
    match data_type {
        DataType::F16 => f16::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::Bf16 => bf16::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        DataType::F32 => f32::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
        _ => f64::from_ne_bytes(bytes.try_into().unwrap()).is_nan(),
    }
}

/// In the last bits of one is whose it is.
fn nan(data_type: DataType, rank: usize) -> Vec<u8> {
    let bits = rank as u16 + 1;
    match data_type {
        DataType::F16 => (0x7e00 | bits).to_ne_bytes().to_vec(),
        DataType::Bf16 => (0x7fc0 | bits).to_ne_bytes().to_vec(),
        DataType::F32 => (0x7fc0_0000 | u32::from(bits)).to_ne_bytes().to_vec(),
        _ => (0x7ff8_0000_0000_0000 | u64::from(bits)).to_ne_bytes().to_vec(),
    }
}

/// By every algorithm, with the same bits on all ranks; a minimum or maximum is one of those that were given.
#[test]
fn what_is_no_number_on_one_rank_is_none_in_the_result() {
    for size in [3, 4] {
        // Of one rank, of none, or of all.
        let is_none = |rank: usize, i: usize| i % (size + 2) == rank || i % (size + 2) == size + 1;
        let results = ranks(SoftWire::Shm, size, |mesh| {
            let mut results = Vec::new();
            for data_type in [DataType::F16, DataType::Bf16, DataType::F32, DataType::F64] {
                let width = data_type.size();
                for (op, algorithm, count) in Op::ALL
                    .into_iter()
                    .flat_map(|op| Algorithm::ALL.map(|algorithm| (op, algorithm)))
                    .flat_map(|(op, by)| [(op, by, 5), (op, by, 1001)])
                {
                    let given_of = |rank: usize, i: usize| {
                        if is_none(rank, i) { nan(data_type, rank) } else { element(data_type, value(rank, i)) }
                    };
                    let len = count * width;
                    let pages = memory(&(0..count).flat_map(|i| given_of(mesh.rank(), i)).collect::<Vec<_>>());
                    mesh.allreduce(given(&pages, len), Reduction::Of(data_type, op), Options { algorithm, ..options(0) }).unwrap();
                    let result = contents(&pages, len);
                    for (i, number) in result.chunks_exact(width).enumerate() {
                        let none: Vec<usize> = (0..size).filter(|rank| is_none(*rank, i)).collect();
                        let is_right = match op {
                            _ if none.is_empty() => number == element(data_type, reduced(op, size, i)),
                            Op::Min | Op::Max => none.iter().any(|rank| number == nan(data_type, *rank)),
                            _ => is_nan(data_type, number),
                        };
                        assert!(is_right, "{data_type:?} {op:?} {algorithm:?} {size} ranks, element {i}: {number:x?}");
                    }
                    results.push(result);
                }
            }
            results
        });
        assert!(results.iter().all(|result| *result == results[0]), "{size} ranks");
    }
}

#[test]
fn a_function_of_the_callers_own() {
    // The lesser of two pairs, by its first number: of 12 bytes, which no block is a multiple of.
    let least = |a: &mut [u8], b: &[u8]| {
        for (a, b) in a.chunks_exact_mut(12).zip(b.chunks_exact(12)) {
            if b[..4] < a[..4] {
                a.copy_from_slice(b);
            }
        }
    };
    ranks(SoftWire::Shm, 4, |mesh| {
        let pair = |rank: usize, i: usize| {
            let mut pair = [0u8; 12];
            pair[0] = ((i + rank) % 4) as u8;
            pair[11] = rank as u8;
            pair
        };
        let count = (12 * 4096) / 12;
        let pages = memory(&(0..count).flat_map(|i| pair(mesh.rank(), i)).collect::<Vec<_>>());
        mesh.allreduce(given(&pages, 12 * count), Reduction::Custom(12, &least), options(0)).unwrap();
        let expected: Vec<u8> = (0..count).flat_map(|i| pair((4 - i % 4) % 4, i)).collect();
        assert!(contents(&pages, 12 * count) == expected);
    });
}

#[test]
fn nobody_leaves_a_barrier_before_all_have_come() {
    for size in 2..=15 {
        let came = AtomicUsize::new(0);
        ranks(SoftWire::Shm, size, |mesh| {
            for round in 1..=3 {
                came.fetch_add(1, Ordering::Relaxed);
                mesh.barrier(options(0)).unwrap();
                assert!(came.load(Ordering::Relaxed) >= round * size, "round {round}");
                mesh.barrier(options(0)).unwrap();
            }
        });
    }
}

#[test]
fn collectives_of_several_threads_go_on_at_once() {
    for size in [2, 3] {
        ranks(SoftWire::Shm, size, |mesh| {
            std::thread::scope(|scope| {
                for tag in 0..4 {
                    let mesh = &mesh;
                    scope.spawn(move || {
                        for round in 0..40 {
                            let len = [8, 4096, 40, 100 << 10][round % 4];
                            let pages = memory(&fill(DataType::U8, len, |i| value(mesh.rank(), i + tag as usize)));
                            mesh.allreduce(given(&pages, len), Reduction::Of(DataType::U8, Op::Sum), options(tag)).unwrap();
                            assert!(contents(&pages, len) == fill(DataType::U8, len, |i| reduced(Op::Sum, size, i + tag as usize)));
                        }
                    });
                }
            });
        });
    }
}

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

/// What somebody else's polls have finished since a thread looked is noticed before it sleeps.
#[test]
fn nobody_sleeps_beside_what_is_done() {
    let done = Barrier::new(2);
    ranks(SoftWire::Shm, 2, |mesh| {
        let (pages, peer) = (memory(&[7; 100]), 1 - mesh.rank());
        let mine = mesh.device.register(pages.to_register()).unwrap();
        if mesh.rank() == 0 {
            let seen = mesh.driver.moves();
            let received = mesh.recv(peer, 1, mine.place(0, 100).unwrap()).unwrap();
            // As another thread would, until it is here.
            while mesh.pending() > 0 {
                mesh.driver.step(mesh.driver.moves(), crate::base::clock::now() + 1_000_000);
            }
            let until = crate::base::clock::now() + 10_000_000_000;
            mesh.driver.step(seen, until);
            let slept = crate::base::clock::now() >= until;
            done.wait();
            assert!(!slept);
            assert!(mesh.block_on("receive", received, TIMEOUT).unwrap().is_none(), "100 bytes are no small message");
        } else {
            mesh.block_on("send", mesh.send(peer, 1, mine.part(0, 100).unwrap()).unwrap(), TIMEOUT).unwrap();
            done.wait();
        }
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

/// Whose ranks are not equally far.
#[test]
fn small_and_large_collectives_of_one_tag_follow_each_other() {
    for wire in [SoftWire::Shm, SoftWire::Tcp] {
        ranks(wire, 3, |mesh| {
            for round in 0..6 {
                if mesh.rank() == 1 + round % 2 {
                    std::thread::sleep(Duration::from_millis(30));
                }
                for len in [8, 8, 1 << 20, 8, 100, 40, 4096] {
                    let mine = memory(&vec![if mesh.rank() == 0 { len as u8 + 1 } else { 0 }; len]);
                    mesh.broadcast(given(&mine, len), 0, options(0)).unwrap();
                    assert!(contents(&mine, len) == vec![len as u8 + 1; len]);
                }
            }
        });
    }
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

/// Bytes that only this rank has for that one.
fn message(from: usize, to: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + from * 7 + to * 13 + 1) as u8).collect()
}

/// Uneven, and some of nothing.
fn lens(size: usize, scale: usize) -> Vec<usize> {
    (0..size).map(|rank| (rank * 2 % 3) * scale + rank % 2).collect()
}

#[test]
fn everything_comes_to_its_place() {
    for size in [1, 2, 3, 6] {
        ranks(SoftWire::Shm, size, |mesh| {
            let rank = mesh.rank();
            for scale in [0, 5, 3000, 700_000] {
                let lens = lens(size, scale);
                let total = lens.iter().sum::<usize>();
                let at = |rank: usize| lens[..rank].iter().sum::<usize>();
                let all: Vec<u8> = (0..size).flat_map(|of| message(of, 0, lens[of])).collect();
                let mine = memory(&message(rank, 0, lens[rank]));

                let out = memory(&vec![0; total]);
                mesh.allgather(given(&mine, lens[rank]), given(&out, total), &lens, options(0)).unwrap();
                assert!(contents(&out, total) == all, "allgather");
                // In its place.
                let out = memory(&vec![0; total]);
                out.write(at(rank), &message(rank, 0, lens[rank]));
                mesh.allgather(given(&out, total).part(at(rank), lens[rank]).unwrap(), given(&out, total), &lens, options(0)).unwrap();
                assert!(contents(&out, total) == all, "allgather in place");

                for root in [0, size - 1] {
                    let out = memory(&vec![0; total]);
                    mesh.gather(given(&mine, lens[rank]), given(&out, total), &lens, root, options(0)).unwrap();
                    let expected = if rank == root { all.clone() } else { vec![0; total] };
                    assert!(contents(&out, total) == expected, "gather");

                    let part = memory(&vec![0; lens[rank]]);
                    let whole = memory(&if rank == root { all.clone() } else { vec![0; total] });
                    mesh.scatter(given(&whole, total), given(&part, lens[rank]), &lens, root, options(0)).unwrap();
                    assert!(contents(&part, lens[rank]) == message(rank, 0, lens[rank]), "scatter");

                    let same = memory(&if rank == root { all.clone() } else { vec![0; total] });
                    mesh.broadcast(given(&same, total), root, options(0)).unwrap();
                    assert!(contents(&same, total) == all, "broadcast");
                }

                // As many bytes from rank a to rank b as that has of its own.
                let (out_lens, in_lens) = (lens.clone(), vec![lens[rank]; size]);
                let from = memory(&(0..size).flat_map(|to| message(rank, to, lens[to])).collect::<Vec<_>>());
                let to = memory(&vec![0; size * lens[rank]]);
                mesh.alltoall(given(&from, total), given(&to, size * lens[rank]), &out_lens, &in_lens, options(0)).unwrap();
                let expected: Vec<u8> = (0..size).flat_map(|of| message(of, rank, lens[rank])).collect();
                assert!(contents(&to, expected.len()) == expected, "alltoall");
            }
        });
    }
}

#[test]
fn reductions_come_to_their_rank() {
    for (wire, size) in [(SoftWire::Shm, 1), (SoftWire::Shm, 2), (SoftWire::Tcp, 3), (SoftWire::Shm, 7)] {
        ranks(wire, size, |mesh| {
            for count in [1, 1000, 600_001] {
                let bytes = fill(DataType::U32, count, |i| value(mesh.rank(), i));
                let expected = fill(DataType::U32, count, |i| reduced(Op::Sum, size, i));
                let reduction = Reduction::Of(DataType::U32, Op::Sum);
                for root in [0, size / 2] {
                    let (from, to) = (memory(&bytes), memory(&vec![0; bytes.len()]));
                    mesh.reduce(given(&from, bytes.len()), given(&to, bytes.len()), reduction, root, options(0)).unwrap();
                    assert!(contents(&from, bytes.len()) == bytes, "what is given is not changed");
                    assert!(contents(&to, bytes.len()) == if mesh.rank() == root { expected.clone() } else { vec![0; bytes.len()] });
                }
                let lens: Vec<usize> = (0..size).map(|rank| 4 * (count * (rank + 1) / size - count * rank / size)).collect();
                let (at, len) = (lens[..mesh.rank()].iter().sum::<usize>(), lens[mesh.rank()]);
                let (from, to) = (memory(&bytes), memory(&vec![0; len]));
                mesh.reduce_scatter(given(&from, bytes.len()), given(&to, len), &lens, reduction, options(0)).unwrap();
                assert!(contents(&from, bytes.len()) == bytes && contents(&to, len) == expected[at..at + len]);
            }
        });
    }
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
