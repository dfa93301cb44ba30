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
        let held: Vec<String> =
            core.calls.held().take(NAMED).map(|call| format!("\n[{}, which may write to its memory]", call.words(now))).collect();
        let doing = if core.has_failed() {
            "closed"
        } else if self.driver.is_asleep() {
            "asleep"
        } else {
            "polling"
        };
        let (receives, due, device) = (core.calls.open().count(), core.calls.due(), self.device.name());
        let of = format!("tensors of worker {} on {device}: {doing}", self.name);
        format!("{of}, {receives} receives, {due} callbacks to be run{}{}", waits.concat(), held.concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::config::Config;
    use crate::base::error::Error;
    use crate::link::device::Device;
    use crate::tensor::calls::{Answer, Origin};
    use crate::tensor::{Key, Manager, Mode};

    #[test]
    fn a_dump_names_what_has_no_tensor_yet_and_what_is_over_but_for_its_memory() {
        let device = Device::open(Config { socket_ifname: "=lo".into(), stats: false, ..Config::default() }, "").unwrap();
        let shared = Manager::new(device, "/job:a", &["/job:a", "/job:b"], false, Mode::Direct).unwrap().shared.clone();
        let begin = |core: &mut Core, edge: &str| {
            let (step, key) = (core.step(7), Key::new("/job:b/device:CPU:0", 1, "/job:a/device:CPU:0", edge, 0, 0).unwrap());
            core.calls.begin(step, (key, Origin::Worker(0)), None, None)
        };
        let [_, exposed] = shared.driver.with(|core| ["x", "y"].map(|edge| begin(core, edge)));
        shared.driver.with(|core| {
            core.calls.get(exposed).unwrap().is_exposed = true;
            core.calls.end(exposed, Answer::Failed(Error::usage("over")));
        });
        let dump = shared.dump();
        let lines: Vec<&str> = dump.lines().skip(1).collect();
        let all = |line: &str, edge: &str, end: &str| line.contains(&format!(";{edge};0:0 of step 7, ")) && line.ends_with(end);
        assert!(
            matches!(lines[..], [x, y] if all(x, "x", " produced by /job:b]") && all(y, "y", " produced by /job:b, which may write to its memory]")),
            "{dump}"
        );
        shared.driver.with(|core| core.calls.returned(exposed));
        assert!(!shared.dump().contains(";y;"), "{}", shared.dump());
    }
}
