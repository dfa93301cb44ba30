//! What collectives give.

use super::*;

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
