//! Meshes whose ranks are threads of one process.

mod buffers;
mod collectives;
mod connecting;
mod failing;
mod farewell;
mod forking;
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

/// An allreduce of all ranks gives what it must, in this round.
fn sums(mesh: &Mesh, round: usize) {
    let pages = memory(&fill(DataType::U32, 5000, |i| value(mesh.rank(), i + round)));
    mesh.allreduce(given(&pages, 20_000), Reduction::Of(DataType::U32, Op::Sum), options(0)).unwrap();
    assert!(contents(&pages, 20_000) == fill(DataType::U32, 5000, |i| reduced(Op::Sum, mesh.size(), i + round)));
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
