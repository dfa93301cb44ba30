//! What the machine can do without any plugin, measured by two processes of their own in the same run. One file per limit. Called by `rank`
//! on its one thread.

mod memcpy;

use anyhow::bail;

use super::message::Work;
use super::rank::job::Job;
use super::rank::link::Link;

/// Gets ready to measure a limit, with a remark on how.
pub fn prepare(work: Work, rank: usize, _link: &mut Link) -> anyhow::Result<(Box<dyn Job>, Option<String>)> {
    match work {
        Work::Memcpy(block) => Ok((Box::new(memcpy::Memcpy::new(block, rank)?), None)),
        other => bail!("{other:?} is no limit"),
    }
}
