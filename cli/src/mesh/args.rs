//! What `railhead mesh bench` is asked for. Gloo's benchmark has options of the same names.

use std::path::PathBuf;

use anyhow::{bail, ensure};

use super::work::What;
use crate::number::within;

/// Measures collectives and messages among ranks: on this machine, or with --url as one rank of any.
///
/// Each is verified once before it is measured. The bus bandwidth is nccl-tests': the bytes by the time, times what of them crosses each link.
///
/// Exit status: 0 done, 2 anything else.
#[derive(clap::Args)]
pub struct Bench {
    /// What to measure
    #[arg(long, value_enum, value_delimiter = ',', default_value = "allreduce")]
    pub what: Vec<What>,
    /// Floats that each rank has, of each size to measure; 0 for a barrier
    #[arg(long, value_delimiter = ',', default_values_t = [2, 256, 16384, 262144, 4194304, 16777216], value_parser = within(0..=1usize << 28))]
    pub elements: Vec<usize>,
    /// Ranks to start on this machine, without --url
    #[arg(long, default_value_t = 2, value_parser = within(1..=256usize))]
    pub ranks: usize,
    /// Where ranks meet that were started by somebody else: env://, tcp://HOST:PORT or file://PATH
    #[arg(long)]
    pub url: Option<String>,
    /// Device, as `railhead info` names it; several with + between them; the first one if it is not given
    #[arg(long)]
    pub device: Option<String>,
    /// Seconds that each row is measured for
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0)]
    pub iteration_time: f64,
    /// Times that a row is done before it is measured
    #[arg(long, value_name = "TIMES", default_value_t = 5, value_parser = within(0..=10_000u32))]
    pub warmup_iters: u32,
    /// Threads of each rank that do it at once
    #[arg(long, default_value_t = 1, value_parser = within(1..=16usize))]
    pub threads: usize,
    /// Arrays of each rank: an allreduce adds them up first, and copies the result to all of them
    #[arg(long, default_value_t = 1, value_parser = within(1..=16usize))]
    pub inputs: usize,
    /// Poll without end instead of sleeping
    #[arg(long)]
    pub sync: bool,
    /// Do not look whether the results are right
    #[arg(long)]
    pub no_verify: bool,
    /// Seconds that anything may take
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = within(1..=86_400u64))]
    pub timeout: u64,
    /// Prints the rows as JSON
    #[arg(long)]
    pub json: bool,
    /// Draws times and bandwidths into this file, as SVG
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
}

impl Bench {
    /// Errors: what does not go together.
    pub fn check(&self) -> anyhow::Result<()> {
        let seconds = self.iteration_time;
        ensure!((0.001..=3600.0).contains(&seconds), "--iteration-time: {seconds}; expected 0.001 to 3600");
        if self.inputs > 1 && self.what.iter().any(|what| *what != What::Allreduce) {
            bail!("--inputs: {}; only an allreduce takes more than 1", self.inputs);
        }
        if self.ranks < 2 && self.url.is_none() && self.what.contains(&What::Sendrecv) {
            bail!("--ranks: {}; sendrecv takes at least 2", self.ranks);
        }
        Ok(())
    }

    /// Each row's work and elements. A barrier has none.
    pub fn jobs(&self) -> Vec<(What, usize)> {
        let of = |what: What| if what == What::Barrier { vec![0] } else { self.elements.clone() };
        self.what.iter().flat_map(|what| of(*what).into_iter().map(move |elements| (*what, elements))).collect()
    }
}
