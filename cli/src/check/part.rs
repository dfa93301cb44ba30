//! A rank's process: it plays its part of a rule on its first thread, tells the supervisor what came of it, and ends.

use std::sync::{Arc, Mutex, PoisonError};

use super::chan::Chan;
use super::process;
use super::rank::{Rank, tell, word};
use super::supervisor::Job;
use super::verdict::Stop;
use crate::plugin;

/// ncclDebugLogLevel of a warning.
const WARN: i32 = 2;

/// Plays the part of rank `index` and ends the process.
pub fn play(job: &Job, index: usize) -> ! {
    process::tie_to_parent();
    let Ok((to_parent, to_peer)) = process::channels() else { std::process::exit(2) };
    let parent = Arc::new(Mutex::new(Chan::from_fd(to_parent)));
    let log = parent.clone();
    plugin::watch_log(move |line| {
        if line.level == WARN {
            tell(&log, word::WARNING, &line.text);
        }
    });
    let peer = (job.rule.ranks > 1).then(|| Chan::from_fd(to_peer));
    let rank = Rank::start(&job.setting, job.rule.ready, index, peer, &parent);
    let (how, text) = match rank.and_then(|mut rank| (job.rule.run)(&mut rank).and_then(|()| rank.end())) {
        Ok(()) => (word::PASSED, String::new()),
        Err(Stop::Fail(why)) => (word::FAILED, why),
        Err(Stop::Skip(why)) => (word::SKIPPED, why),
        Err(Stop::Aside(why)) => (word::ASIDE, why),
    };
    tell(&parent, how, &text);
    if how != word::PASSED {
        // The supervisor ends this process once it has decided: what happens at an end might look to the other rank like a second failure.
        // It says nothing, so this returns when it is gone.
        let _ = parent.lock().unwrap_or_else(PoisonError::into_inner).recv();
    }
    std::process::exit(0)
}
