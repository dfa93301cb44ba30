//! Many comms at once: set up, used, torn down, with the time that takes and the memory that they hold. Driven by one thread per rank.

use std::rc::Rc;

use anyhow::Context;

use super::comms::{self, Directions};
use super::coordinator::Coordinator;
use super::flow::Flow;
use super::job::{Begin, Job, Meter};
use super::payload::Pattern;
use super::session::Session;
use crate::perf::message::{Memory, Round};
use crate::perf::os;
use crate::perf::spin::Spin;

/// How many.
pub struct Churn {
    session: Rc<Session>,
    comms: usize,
}

/// Bytes that each comm moves.
const MESSAGE: usize = 4096;

impl Churn {
    /// Nothing is set up before a round.
    pub fn new(session: &Rc<Session>, comms: usize) -> Churn {
        Churn { session: Rc::clone(session), comms }
    }

    fn cycle(&mut self, coordinator: &mut Coordinator, n: usize) -> anyhow::Result<(f64, Memory)> {
        let Session { plugin, rank, dev, .. } = &*self.session;
        let before = held()?;
        coordinator.swap(String::new())?;
        let begun = os::now_ns();
        let comms = comms::connect(plugin, *dev, *rank, coordinator, n, Directions::One)?;
        let seconds = (os::now_ns() - begun) as f64 * 1e-9;
        for (i, comm) in comms.iter().enumerate() {
            let comm = if *rank == 0 { comm.send } else { comm.recv };
            let mut flow = Flow::new(plugin, comm.context("one direction is set up")?, i as i32, (MESSAGE, MESSAGE), 1, 1)?;
            let mut spin = Spin::default();
            while flow.done < 1 {
                spin.after(if *rank == 0 {
                    flow.post_sends(plugin, 1, Pattern)? | flow.take_sends(plugin, Pattern)?
                } else {
                    flow.post_receives(plugin, 1)? | flow.take_receives(plugin, Pattern)?
                });
            }
            flow.release(plugin)?;
        }
        let after = held()?;
        // Neither closes while the other still counts.
        coordinator.swap(String::new())?;
        comms::close(plugin, &comms)?;
        let growth = Memory { anon: after.anon - before.anon, shared: after.shared - before.shared, mapped: after.mapped - before.mapped };
        Ok((seconds, growth))
    }
}

impl Job for Churn {
    fn verify(&mut self, coordinator: &mut Coordinator) -> anyhow::Result<()> {
        // What the first comm of a process allocates is not what each costs.
        self.cycle(coordinator, 1)?;
        Ok(())
    }

    fn round(&mut self, coordinator: &mut Coordinator, _: u64, begin: Begin) -> anyhow::Result<Round> {
        let meter = Meter::start(begin);
        let (seconds, memory) = self.cycle(coordinator, self.comms)?;
        Ok(Round { value: Some(self.comms as f64 / seconds), memory: Some(memory), ..meter.stop() })
    }
}

/// What this process holds now.
fn held() -> anyhow::Result<Memory> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let kilobytes = |name: &str| -> anyhow::Result<i64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).with_context(|| format!("/proc has no {name}"))?;
        Ok(line.trim().trim_end_matches(" kB").parse::<i64>()? * 1024)
    };
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mapped = maps.lines().filter_map(shared_mapping).sum();
    Ok(Memory { anon: kilobytes("RssAnon:")?, shared: kilobytes("RssShmem:")?, mapped })
}

/// Bytes of a line of /proc/self/maps, if it is shared: "7f00-7f10 rw-s ...".
fn shared_mapping(line: &str) -> Option<i64> {
    let (range, rest) = line.split_once(' ')?;
    let (from, to) = range.split_once('-')?;
    let bytes = i64::from_str_radix(to, 16).ok()? - i64::from_str_radix(from, 16).ok()?;
    (rest.as_bytes().get(3) == Some(&b's')).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_mappings_are_counted() {
        assert_eq!(shared_mapping("7f0000000000-7f0000003000 rw-s 00000000 00:01 12 /memfd:x (deleted)"), Some(0x3000));
        assert_eq!(shared_mapping("7f0000000000-7f0000003000 rw-p 00000000 00:00 0"), None);
        let file = os::memory_file().unwrap();
        file.set_len(1 << 21).unwrap();
        let shared = memmap2::MmapOptions::new().len(1 << 21).map_raw(&file).unwrap();
        // Other tests of this program map and unmap memory meanwhile, so this is found by its address.
        let (begins, maps) = (format!("{:x}-", shared.as_ptr() as usize), std::fs::read_to_string("/proc/self/maps").unwrap());
        assert_eq!(maps.lines().find(|line| line.starts_with(&begins)).and_then(shared_mapping), Some(1 << 21));
        assert!(held().unwrap().mapped >= 1 << 21);
    }
}
