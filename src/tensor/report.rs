//! Which tensors are waited for, from whom, and since when: for messages, the stats page and dumps. Under the lock of the manager.

use crate::base::clock;
use crate::base::stats::CommCounter;
use crate::engine::DumpSource;
use crate::link::driver::Driven;

use super::core::{Core, Peer};
use super::shared::Shared;

/// Receives that are looked at, the oldest ones, for what the stats page shows.
const LOOKED_AT: usize = 64;
/// Receives that a dump names.
const NAMED: usize = 100;

impl Core {
    /// Tells each channel what is waited for from its peer, for the stats page: the oldest receive.
    pub fn note_waits(&mut self) {
        let Core { workers, calls, .. } = self;
        workers.iter_mut().for_each(|worker| worker.oldest = None);
        for (id, call) in calls.open().take(LOOKED_AT) {
            if let Some(worker) = call.worker.and_then(|worker| workers.get_mut(worker)) {
                worker.oldest.get_or_insert(id);
            }
        }
        for worker in workers {
            let Peer::Here(adapter) = &mut worker.peer else { continue };
            match worker.oldest.and_then(|id| Some((id, calls.get(id)?))) {
                Some((id, call)) => adapter.shows(id, &call.key, call.step.id, call.since),
                None => adapter.shows_none(),
            }
        }
    }

    /// Receives that have waited for so long and were not reported, in words; and when the next one will have.
    pub fn stalled(&mut self, now: u64, limit: u64) -> (Option<String>, u64) {
        let (stalled, next) = self.calls.stalled(now, limit);
        let words = stalled.map(|(words, workers)| {
            for worker in workers {
                if let Some(Peer::Here(adapter)) = self.workers.get(worker).map(|worker| &worker.peer) {
                    adapter.stats().add(CommCounter::Stalls, 1);
                }
            }
            words
        });
        (words, next)
    }
}

impl DumpSource for Shared {
    fn dump(&self) -> String {
        let (core, now) = (self.driver.lock(), clock::now());
        let waits: Vec<String> = core.calls.open().take(NAMED).map(|(_, call)| format!("\n[{}]", call.words(now))).collect();
        let doing = if core.has_failed() {
            "closed"
        } else if self.driver.is_asleep() {
            "asleep"
        } else {
            "polling"
        };
        let (receives, due, device) = (core.calls.open().count(), core.calls.due(), self.device.name());
        let of = format!("tensors of worker {} on {device}: {doing}", self.name);
        format!("{of}, {receives} receives, {due} callbacks to be run{}", waits.concat())
    }
}
