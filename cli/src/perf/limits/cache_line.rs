//! The limit of a message: one cache line that two processes write in turn, spinning. The figure is the time one way, half of there and back,
//! median over lines on pages of their own, since it depends on the address.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, ensure};

use super::super::message::Round;
use super::super::os;
use super::super::rank::coordinator::{self, Coordinator};
use super::super::rank::job::{Begin, Job, Meter};
use super::super::shared::Words;
use super::super::spin::Spin;
use super::super::summary::Summary;

/// Pages with one line each.
const PAGES: usize = 16;
/// Words of a page.
const PAGE: usize = 4096 / 8;

/// A mapping that both ranks have.
pub struct CacheLine {
    words: Words,
    rank: usize,
    /// There and back so far, on each line.
    turns: u64,
}

impl CacheLine {
    /// Maps it in both.
    pub fn new(rank: usize, coordinator: &mut Coordinator) -> anyhow::Result<CacheLine> {
        Ok(CacheLine { words: Words::of_both(PAGES * PAGE, rank, coordinator)?, rank, turns: 0 })
    }

    /// A line somewhere on its page, not the same place on each.
    fn line(&self, page: usize) -> anyhow::Result<&AtomicU64> {
        self.words.get(page * PAGE + page % (PAGE / 8) * 8).context("the mapping is too short")
    }

    /// Rank 0 stores odd numbers, rank 1 the even ones that follow; each waits for the other's. Nanoseconds.
    fn bounce(&self, page: usize, bounces: u64) -> anyhow::Result<u64> {
        let line = self.line(page)?;
        let begun = os::now_ns();
        for turn in self.turns..self.turns + bounces {
            let (there, back) = (2 * turn + 1, 2 * turn + 2);
            // Relaxed would do, since the line is all there is; a plugin's flag needs Release and Acquire. Pairs with itself in the other rank.
            let (store, wait) = if self.rank == 0 { (there, back) } else { (back, there) };
            if self.rank == 0 {
                line.store(store, Ordering::Release);
            }
            let mut spin = Spin::default();
            while line.load(Ordering::Acquire) != wait {
                spin.idle();
            }
            if self.rank == 1 {
                line.store(store, Ordering::Release);
            }
        }
        Ok(os::now_ns() - begun)
    }
}

impl Job for CacheLine {
    /// `messages` there and back, in equal parts on each line.
    fn round(&mut self, _: &mut Coordinator, messages: u64, begin: Begin) -> anyhow::Result<Round> {
        ensure!(begin.0.is_some(), "both ranks must be on one host");
        let meter = Meter::start(begin);
        let bounces = messages.div_ceil(PAGES as u64);
        let mut figures = Vec::with_capacity(PAGES);
        for page in 0..PAGES {
            figures.push(self.bounce(page, bounces)? as f64 * 1e-9 / (2 * bounces) as f64);
            coordinator::count(bounces);
        }
        self.turns += bounces;
        let value = Summary::of(figures).map(|s| s.median).filter(|_| self.rank == 0);
        Ok(Round { value, ..meter.stop() })
    }
}
