//! How often a rank does something, and how long it takes. All ranks do it as often: the first one says how often, from how long the warm-up took.

use std::time::{Duration, Instant};

use railhead::base::mem::UserMemory;
use railhead::mesh::Mesh;
use serde::Serialize;

use super::args::Bench;
use super::cost::Cost;
use super::work::{What, Work, options};

/// A row of the table.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// What was done.
    pub what: String,
    /// Bytes of each rank.
    pub bytes: usize,
    /// How many there are.
    pub ranks: usize,
    /// Threads of each that did it at once.
    pub threads: usize,
    /// How often each did it.
    pub times: usize,
    /// The shortest.
    pub min_us: f64,
    /// The median.
    pub p50_us: f64,
    /// The mean: where more ranks than cores take turns, it tells more than how long most of them took one rank.
    pub mean_us: f64,
    /// Longer than 99 of 100.
    pub p99_us: f64,
    /// The longest.
    pub max_us: f64,
    /// Bytes of all threads by the median time.
    pub gb_s: f64,
    /// The same, of what crosses each link.
    pub bus_gb_s: f64,
    /// What the first rank's pairs have taken, in all rows the same.
    #[serde(flatten)]
    pub cost: Cost,
}

/// The most times that a row is measured.
const MOST: f64 = 1e6;
/// The tag of what the ranks agree by.
const AGREE: u32 = 1000;

/// Measures one row.
pub fn measure(mesh: &Mesh, what: What, elements: usize, bench: &Bench, cost: Cost) -> anyhow::Result<Row> {
    let timeout = Duration::from_secs(bench.timeout);
    let mut work = (0..bench.threads)
        .map(|thread| Work::new(mesh, what, elements, bench.inputs, thread, timeout))
        .collect::<anyhow::Result<Vec<_>>>()?;
    // Ranks that have nothing to do in a row wait here for those that have.
    let agree = options(AGREE, timeout + 2 * Duration::from_secs_f64(bench.iteration_time));
    mesh.barrier(agree)?;
    at_once(&mut work, |work| {
        work.run()?;
        if bench.no_verify { Ok(()) } else { work.verify() }
    })?;
    let warm = bench.warmup_iters.max(1);
    let start = Instant::now();
    at_once(&mut work, |work| (0..warm).try_for_each(|_| work.run()))?;
    let each = start.elapsed().as_secs_f64() / f64::from(warm);
    let mut times = [(bench.iteration_time / each.max(1e-9)).clamp(1.0, MOST) as u64];
    // SAFETY: the number outlives the call.
    let memory = unsafe { UserMemory::new(times.as_mut_ptr().cast(), size_of_val(&times)) };
    mesh.broadcast(memory, 0, agree)?;
    let times = times[0] as usize;
    mesh.barrier(agree)?;
    let samples = at_once(&mut work, |work| {
        let mut samples = Vec::with_capacity(times);
        for _ in 0..times {
            let start = Instant::now();
            work.run()?;
            samples.push(start.elapsed().as_secs_f64());
        }
        Ok(samples)
    })?;
    let mut samples: Vec<f64> = samples.into_iter().flatten().collect();
    // A message goes there and back in one.
    let half = if what == What::Sendrecv { 0.5 } else { 1.0 };
    let mean = samples.iter().sum::<f64>() / samples.len() as f64 * half;
    samples.sort_by(f64::total_cmp);
    let at = |share: f64| samples.get(((samples.len() - 1) as f64 * share) as usize).copied().unwrap_or(0.0) * half;
    let (bytes, median) = (4 * elements, at(0.5));
    let gb_s = (bytes * bench.threads) as f64 / median / 1e9;
    Ok(Row {
        what: what.to_string(),
        bytes,
        ranks: mesh.size(),
        threads: bench.threads,
        times,
        min_us: at(0.0) * 1e6,
        p50_us: median * 1e6,
        mean_us: mean * 1e6,
        p99_us: at(0.99) * 1e6,
        max_us: at(1.0) * 1e6,
        gb_s,
        bus_gb_s: gb_s * what.bus_factor(mesh.size()),
        cost,
    })
}

/// Has a thread for each piece of work do something, and waits for all.
fn at_once<T: Send>(work: &mut [Work<'_>], f: impl Fn(&mut Work<'_>) -> anyhow::Result<T> + Sync) -> anyhow::Result<Vec<T>> {
    if let [one] = work {
        return Ok(vec![f(one)?]);
    }
    std::thread::scope(|scope| {
        let f = &f;
        let threads: Vec<_> = work.iter_mut().map(|work| scope.spawn(move || f(work))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| anyhow::bail!("a thread panicked"))).collect()
    })
}
