//! Ranks of a mesh, and collectives one after the other, some at once. What must hold: what they compute is right on every rank; once one is done, nobody
//! writes to its memory; and all ends, soon after the last fault. [`many`] is for any number of ranks.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use crate::base::config::{Config, Progress};
use crate::base::error::{Error, Result};
use crate::base::mem::Pages;
use crate::fabric::sim::{Random, World};
use crate::link::Link;
use crate::mesh::simulated::{self, SimulatedMesh};
use crate::mesh::{Algorithm, DataType, Op, Options as How, Reduction};

use super::schedule::{self, Ranks, Stop};
use super::{Options, Report, Violation};

/// Bytes of an element: a u64, whose sums tell whether anything was added twice.
const ELEMENT: usize = 8;
/// Elements of a rank's part at most.
const MOST: usize = 3000;
/// Elements of a rank, or one for each rank, in [`Task::Ring`].
const RING: usize = 4096;
/// Steps of half of each of them, together, at least.
const RING_STEPS: usize = 1024;
/// Collectives that run at once, each one of a row of them.
const ROWS: usize = 2;
const SUM: Reduction<'static> = Reduction::Of(DataType::U64, Op::Sum);

/// What a collective does, and what its elements come from.
#[derive(Debug, Clone, Copy)]
struct Step {
    what: What,
    /// Elements of a rank's part.
    count: usize,
    pattern: u64,
    tag: u32,
}

impl Step {
    /// Bytes of what comes of it.
    fn len(&self, size: usize) -> usize {
        let parts = if let What::Allgather | What::Alltoall = self.what { size } else { 1 };
        parts * self.count * ELEMENT
    }
}

#[derive(Debug, Clone, Copy)]
enum What {
    Allreduce(Algorithm),
    Broadcast(usize),
    Allgather,
    Alltoall,
    Barrier,
}

/// A rank's future, until it is over.
type Script = Pin<Box<dyn Future<Output = std::result::Result<(), Stop>>>>;

struct Rank {
    mesh: Rc<SimulatedMesh>,
    peers: Vec<usize>,
    rows: Vec<Script>,
    /// Theirs, until nothing can land there any more.
    _memory: Vec<Rc<[Pages; 2]>>,
}

struct Group {
    ranks: Vec<Rank>,
    done: Rc<Cell<u64>>,
}

/// Runs one schedule of a few ranks, each of which is connected to all.
///
/// Errors: a promise that was broken.
pub fn run(options: &Options) -> std::result::Result<Report, Violation> {
    schedule::run(options, |world, random, options| {
        let size = 2 + random.below(4) as usize;
        let meshes = connected(world, options, random, size, (0..size).flat_map(|first| (0..first).map(move |second| (first, second))))?;
        let rows = (0..ROWS as u32).map(|row| steps(random, size, options.messages / 6, row)).collect::<Vec<_>>();
        Group::new(world, meshes, &rows)
    })
}

/// What [`many`] ranks do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Task {
    /// Allreduces around a ring, of few ranks as many more as take as many steps.
    Ring,
    /// Barriers.
    Meet,
}

/// Runs any number of ranks, which are connected to those that they exchange messages with.
///
/// Errors: a promise that was broken.
pub fn many(options: &Options, size: usize, task: Task) -> std::result::Result<Report, Violation> {
    schedule::run(options, |world, random, options| {
        let reach = if task == Task::Meet { size } else { 2.min(size) };
        let distances = (0..usize::BITS).map(|bit| 1 << bit).take_while(|distance| *distance < reach);
        let pairs = distances.flat_map(|distance| (0..size).map(move |rank| (rank, (rank + distance) % size)));
        let meshes = connected(world, options, random, size, pairs)?;
        let (what, count, steps) = match task {
            Task::Ring => (What::Allreduce(Algorithm::Ring), RING.max(size), RING_STEPS.div_ceil(size)),
            Task::Meet => (What::Barrier, 0, 2),
        };
        let steps: Vec<Step> = (0..steps).map(|_| Step { what, count, pattern: random.draw(), tag: 1 }).collect();
        Group::new(world, meshes, &[steps])
    })
}

/// What a rank gives.
fn given(pattern: u64, rank: usize, index: usize) -> u64 {
    let mut random = Random(pattern ^ (rank as u64) << 40 ^ index as u64);
    // So small that no sum is too large.
    random.draw() >> 20
}

/// Row by row the same on all ranks.
fn steps(random: &mut Random, size: usize, count: usize, row: u32) -> Vec<Step> {
    let step = |_| {
        let what = match random.below(8) {
            number @ 0..4 => What::Allreduce(Algorithm::ALL[1 + number as usize]),
            4 => What::Broadcast(random.below(size as u64) as usize),
            5 => What::Allgather,
            6 => What::Alltoall,
            _ => What::Barrier,
        };
        Step { what, count: [1, 5, 6, 40, 700, MOST][random.below(6) as usize], pattern: random.draw(), tag: row }
    };
    (0..count.max(1)).map(step).collect()
}

fn connected(
    world: &World,
    options: &Options,
    random: &mut Random,
    size: usize,
    pairs: impl Iterator<Item = (usize, usize)>,
) -> Result<Vec<Rc<SimulatedMesh>>> {
    let config =
        Config { stats: false, progress: Progress::Caller, qps_per_rail: 1 + random.below(2) as u32, split_min: 1024, ..Config::default() };
    let mesh = |rank| SimulatedMesh::new(world, rank, size, options.rails, &config).map(Rc::new);
    let meshes = (0..size).map(mesh).collect::<Result<Vec<_>>>()?;
    for (first, second) in pairs {
        // Of two ranks, one is both neighbours of the other.
        if first != second && !simulated::are_connected(&meshes[first], second) {
            simulated::connect(&meshes[first], &meshes[second])?;
        }
    }
    Ok(meshes)
}

impl Group {
    fn new(world: &World, meshes: Vec<Rc<SimulatedMesh>>, rows: &[Vec<Step>]) -> Result<Group> {
        let done = Rc::new(Cell::new(0));
        let (mut sums, size) = (Vec::new(), meshes.len());
        for row in rows {
            sums.push(Rc::new(row.iter().map(|step| sum(step, size)).collect::<Vec<_>>()));
        }
        let mut ranks = Vec::new();
        for mesh in meshes {
            let (mut scripts, mut memories): (Vec<Script>, _) = (Vec::new(), Vec::new());
            for (row, sums) in rows.iter().zip(&sums) {
                let longest = row.iter().map(|step| step.len(size)).max().unwrap_or(0);
                let memory = Rc::new([Pages::new(longest.max(1))?, Pages::new(longest.max(1))?]);
                memories.push(memory.clone());
                let script = Row { world: world.clone(), mesh: mesh.clone(), memory, sums: sums.clone(), done: done.clone() };
                scripts.push(Box::pin(script.run(row.clone())));
            }
            ranks.push(Rank { peers: simulated::peers(&mesh), mesh, rows: scripts, _memory: memories });
        }
        Ok(Group { ranks, done })
    }
}

/// What an allreduce has to give.
fn sum(step: &Step, size: usize) -> Vec<u64> {
    match step.what {
        What::Allreduce(_) => (0..step.count).map(|index| (0..size).map(|rank| given(step.pattern, rank, index)).sum()).collect(),
        _ => Vec::new(),
    }
}

/// A rank's part of a row of collectives.
struct Row {
    world: World,
    mesh: Rc<SimulatedMesh>,
    /// What is given, and what comes of it.
    memory: Rc<[Pages; 2]>,
    /// By step.
    sums: Rc<Vec<Vec<u64>>>,
    done: Rc<Cell<u64>>,
}

impl Row {
    async fn run(self, steps: Vec<Step>) -> std::result::Result<(), Stop> {
        for (number, step) in steps.iter().enumerate() {
            let done = self.step(number, step).await;
            if let Err(Stop::Failed(error)) = &done {
                simulated::give_up(&self.mesh, error);
            }
            done?;
            self.done.set(self.done.get() + 1);
        }
        Ok(())
    }

    async fn step(&self, number: usize, step: &Step) -> std::result::Result<(), Stop> {
        let (mesh, Step { count, pattern, tag, .. }) = (&*self.mesh, *step);
        let (size, rank, len) = (mesh.size(), mesh.rank(), count * ELEMENT);
        let [from, to] = &*self.memory;
        let part = |pages: &Pages, len: usize| pages.to_register().part(0, len).ok_or_else(|| Error::internal("memory that is too short"));
        let parts = vec![len; size];
        self.world.unguard(to.addr());
        match step.what {
            What::Allreduce(algorithm) => {
                put(to, (0..count).map(|index| given(pattern, rank, index)));
                let how = How { algorithm, tag, timeout: std::time::Duration::MAX };
                simulated::allreduce(mesh, part(to, len)?, SUM, how)?.await?;
                self.compare(step, |index| self.sums.get(number).and_then(|sums| sums.get(index)).copied().unwrap_or(0))
            }
            What::Broadcast(root) => {
                put(to, (0..count).map(|index| if rank == root { given(pattern, root, index) } else { 0 }));
                simulated::broadcast(mesh, part(to, len)?, root, tag)?.await?;
                self.compare(step, |index| given(pattern, root, index))
            }
            What::Allgather => {
                put(from, (0..count).map(|index| given(pattern, rank, index)));
                simulated::allgather(mesh, part(from, len)?, part(to, len * size)?, &parts, tag)?.await?;
                self.compare(step, |index| given(pattern, index / count, index % count))
            }
            What::Alltoall => {
                put(from, (0..count * size).map(|index| given(pattern, rank, index)));
                simulated::alltoall(mesh, part(from, len * size)?, part(to, len * size)?, &parts, &parts, tag)?.await?;
                self.compare(step, |index| given(pattern, index / count, rank * count + index % count))
            }
            What::Barrier => Ok(simulated::barrier(mesh, tag)?.await?),
        }
    }

    /// Nobody writes to it from now on, or reads what was given.
    fn compare(&self, step: &Step, wanted: impl Fn(usize) -> u64) -> std::result::Result<(), Stop> {
        let (len, [from, to]) = (step.len(self.mesh.size()), &*self.memory);
        let mut bytes = vec![0; len];
        to.read(0, &mut bytes);
        self.world.guard(to.addr(), len);
        put(from, std::iter::repeat_n(!0, len / ELEMENT));
        let (elements, _) = bytes.as_chunks::<ELEMENT>();
        match elements.iter().enumerate().find(|(index, bytes)| u64::from_le_bytes(**bytes) != wanted(*index)) {
            None => Ok(()),
            Some((index, _)) => Err(Stop::Wrong(format!("rank {}: element {index} is wrong after {step:?}", self.mesh.rank()))),
        }
    }
}

fn put(pages: &Pages, elements: impl Iterator<Item = u64>) {
    pages.write(0, &elements.flat_map(u64::to_le_bytes).collect::<Vec<u8>>());
}

impl Ranks for Group {
    fn count(&self) -> usize {
        self.ranks.len()
    }

    fn poll(&mut self, rank: usize, _: &mut Random) -> std::result::Result<bool, Stop> {
        let Rank { mesh, peers, rows, .. } = &mut self.ranks[rank];
        let before = (self.done.get(), simulated::poll(mesh));
        if before.1 {
            simulated::check(mesh, peers)?;
        }
        let mut failed = None;
        rows.retain_mut(|row| match row.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Pending => true,
            Poll::Ready(result) => {
                failed = failed.take().or(result.err());
                false
            }
        });
        failed.map_or(Ok(before.1 || before.0 != self.done.get()), Err)
    }

    fn is_done(&self) -> bool {
        self.ranks.iter().all(|rank| rank.rows.is_empty())
    }

    fn for_each_link(&mut self, rank: usize, f: &mut dyn FnMut(&mut Link)) {
        let rank = &self.ranks[rank];
        simulated::for_each_link(&rank.mesh, &rank.peers, f);
    }

    fn received(&self) -> u64 {
        self.done.get()
    }
}
