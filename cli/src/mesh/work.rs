//! What a rank does once, with memory of its own, and whether what comes of it is right. On the thread that measures it.

use std::time::Duration;

use anyhow::ensure;
use railhead::base::mem::UserMemory;
use railhead::mesh::{Algorithm, DataType, Mesh, Op, Options, Reduction, UnboundBuffer};

/// For an operation with this tag.
pub fn options(tag: u32, timeout: Duration) -> Options {
    Options { tag, timeout, algorithm: Algorithm::Auto }
}

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum What {
    /// Every rank gets the sum of all ranks' elements
    Allreduce,
    /// The first rank gets the sum
    Reduce,
    /// Every rank gets its part of the sum
    ReduceScatter,
    /// Every rank gets the first one's elements
    Broadcast,
    /// Every rank gets a part of each
    Allgather,
    /// Every rank gets a part of each, another one of each
    Alltoall,
    /// The first rank gets a part of each
    Gather,
    /// Every rank gets its part of the first one's
    Scatter,
    /// All ranks wait for each other
    Barrier,
    /// Ranks 0 and 1 send a message to and fro: the time is half of that
    Sendrecv,
}

impl std::fmt::Display for What {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let value = clap::ValueEnum::to_possible_value(self);
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

impl What {
    /// What of the bytes crosses each rank's link: nccl-tests doc/PERFORMANCE.md.
    pub fn bus_factor(self, ranks: usize) -> f64 {
        let n = ranks as f64;
        match self {
            What::Allreduce => 2.0 * (n - 1.0) / n,
            What::ReduceScatter | What::Allgather | What::Alltoall | What::Gather | What::Scatter => (n - 1.0) / n,
            What::Reduce | What::Broadcast | What::Sendrecv => 1.0,
            What::Barrier => 0.0,
        }
    }
}

/// One thread's memory.
pub struct Work<'a> {
    mesh: &'a Mesh,
    what: What,
    tag: u32,
    timeout: Duration,
    inputs: Vec<Vec<f32>>,
    output: Vec<f32>,
    /// Elements of each rank's part, in bytes.
    lens: Vec<usize>,
    /// Over the output.
    message: Option<UnboundBuffer>,
}

impl<'a> Work<'a> {
    /// Of so many elements, which are filled with the rank's numbers.
    pub fn new(mesh: &'a Mesh, what: What, elements: usize, inputs: usize, thread: usize, timeout: Duration) -> anyhow::Result<Work<'a>> {
        let ranks = mesh.size();
        let part = |rank: usize| elements * (rank + 1) / ranks - elements * rank / ranks;
        let mut work = Work {
            mesh,
            what,
            tag: thread as u32,
            timeout,
            inputs: (0..inputs).map(|input| (0..elements).map(|i| element(mesh.rank(), input, i)).collect()).collect(),
            output: vec![0.0; elements],
            lens: (0..ranks).map(|rank| 4 * part(rank)).collect(),
            message: None,
        };
        if what == What::Sendrecv {
            if let (0, Some(first)) = (mesh.rank(), work.inputs.first()) {
                work.output.clone_from(first);
            }
            let memory = bytes(&mut work.output);
            work.message = Some(UnboundBuffer::new(mesh, memory)?);
        }
        Ok(work)
    }

    /// Does it once.
    pub fn run(&mut self) -> anyhow::Result<()> {
        let options = options(self.tag, self.timeout);
        let sum = Reduction::Of(DataType::F32, Op::Sum);
        let (mesh, lens, rank) = (self.mesh, &self.lens, self.mesh.rank());
        let own = lens.get(rank).copied().unwrap_or(0);
        let before: usize = lens.iter().take(rank).sum();
        let Some((first, more)) = self.inputs.split_first_mut() else { return Ok(()) };
        let output = bytes(&mut self.output);
        let part = |memory: UserMemory, at: usize, len: usize| memory.part(at, len).unwrap_or(memory);
        match self.what {
            What::Allreduce => {
                for other in more.iter() {
                    first.iter_mut().zip(other).for_each(|(into, from)| *into += from);
                }
                mesh.allreduce(bytes(first), sum, options)?;
                more.iter_mut().for_each(|other| other.copy_from_slice(first));
            }
            What::Reduce => mesh.reduce(bytes(first), output, sum, 0, options)?,
            What::ReduceScatter => mesh.reduce_scatter(bytes(first), part(output, before, own), lens, sum, options)?,
            What::Broadcast => mesh.broadcast(bytes(first), 0, options)?,
            What::Allgather => mesh.allgather(part(bytes(first), before, own), output, lens, options)?,
            What::Alltoall => {
                // Parts of one length: what is left over stays.
                let even = vec![lens.iter().copied().min().unwrap_or(0); mesh.size()];
                let all = even.iter().sum();
                mesh.alltoall(part(bytes(first), 0, all), part(output, 0, all), &even, &even, options)?;
            }
            What::Gather => mesh.gather(part(bytes(first), before, own), output, lens, 0, options)?,
            What::Scatter => mesh.scatter(bytes(first), part(output, before, own), lens, 0, options)?,
            What::Barrier => mesh.barrier(options)?,
            What::Sendrecv => {
                let Some(message) = &self.message else { return Ok(()) };
                let peer = 1 - rank.min(1);
                for turn in 0..2 {
                    match rank {
                        0 | 1 if rank == turn => {
                            message.send(peer, u64::from(self.tag), 0, None)?;
                            message.wait_send(self.timeout)?;
                        }
                        0 | 1 => {
                            message.recv(&[peer], u64::from(self.tag), 0, None)?;
                            message.wait_recv(self.timeout)?;
                        }
                        _ => {}
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether the first run came to what it must.
    pub fn verify(&self) -> anyhow::Result<()> {
        let (rank, ranks) = (self.mesh.rank(), self.mesh.size());
        let before: usize = self.lens.iter().take(rank).sum::<usize>() / 4;
        let own = before..before + self.lens.get(rank).map_or(0, |len| len / 4);
        let sum = |i: usize| -> f32 { (0..ranks).flat_map(|rank| (0..self.inputs.len()).map(move |input| element(rank, input, i))).sum() };
        let least = self.lens.iter().copied().min().unwrap_or(0) / 4;
        let owner = |i: usize| (0..ranks).find(|of| i < self.lens.iter().take(of + 1).sum::<usize>() / 4).unwrap_or(0);
        let first = self.inputs.first().map_or(&[][..], Vec::as_slice);
        type Expected<'b> = Box<dyn Fn(usize) -> f32 + 'b>;
        let all = 0..self.output.len();
        let at_root = if rank == 0 { all.clone() } else { 0..0 };
        let (of, range, expected): (&[f32], std::ops::Range<usize>, Expected<'_>) = match self.what {
            What::Allreduce => (first, all, Box::new(sum)),
            What::Reduce => (&self.output, at_root, Box::new(sum)),
            What::ReduceScatter => (&self.output, own, Box::new(sum)),
            What::Broadcast => (first, all, Box::new(|i| element(0, 0, i))),
            What::Allgather => (&self.output, all, Box::new(move |i| element(owner(i), 0, i))),
            What::Alltoall => {
                let place = move |i: usize| element(i / least.max(1), 0, rank * least + i % least.max(1));
                (&self.output, 0..least * ranks, Box::new(place))
            }
            What::Gather => (&self.output, at_root, Box::new(move |i| element(owner(i), 0, i))),
            What::Scatter => (&self.output, own, Box::new(|i| element(0, 0, i))),
            What::Sendrecv => (&self.output, if rank < 2 { all } else { 0..0 }, Box::new(|i| element(0, 0, i))),
            What::Barrier => return Ok(()),
        };
        for i in range {
            let (is, must) = (of.get(i).copied().unwrap_or(f32::NAN), expected(i));
            ensure!(is == must, "{}: element {i} of rank {rank} is {is}, not {must}", self.what);
        }
        Ok(())
    }
}

/// Small numbers, whose sums are exact, whatever their order.
fn element(rank: usize, input: usize, i: usize) -> f32 {
    ((i + 5 * rank + 3 * input) % 32) as f32
}

fn bytes(of: &mut [f32]) -> UserMemory {
    // SAFETY: the numbers outlive the call that they are given to, which is over before they are looked at; those of a message outlive its buffer, which
    // is the last field and is dropped with them.
    unsafe { UserMemory::new(of.as_mut_ptr().cast(), size_of_val(of)) }
}

impl Drop for Work<'_> {
    fn drop(&mut self) {
        // Before the memory that it is over.
        self.message = None;
    }
}
