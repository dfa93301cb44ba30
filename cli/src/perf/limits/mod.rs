//! What the machine can do without any plugin, measured by two processes of their own in the same run. One file per limit. Called by `rank`
//! on its one thread.

mod cache_line;
mod memcpy;
mod readv;
mod ring;
mod tcp;
mod tcp_ping_pong;
mod tcp_stream;

use anyhow::bail;

use super::message::Work;
use super::rank::coordinator::Coordinator;
use super::rank::job::Job;

/// Gets ready to measure a limit, with a remark on how. Both ranks at the same time.
pub fn prepare(work: Work, rank: usize, coordinator: &mut Coordinator) -> anyhow::Result<(Box<dyn Job>, Option<String>)> {
    match work {
        Work::Memcpy(block) => Ok((Box::new(memcpy::Memcpy::new(block, rank)?), None)),
        Work::Readv(block) => Ok((Box::new(readv::Readv::new(block, rank, coordinator)?), None)),
        Work::CacheLine => Ok((Box::new(cache_line::CacheLine::new(rank, coordinator)?), None)),
        Work::Ring => Ok((Box::new(ring::Ring::new(rank, coordinator)?), None)),
        Work::TcpStream(block) => {
            let (job, note) = tcp_stream::TcpLoop::new(block, rank, coordinator)?;
            Ok((Box::new(job), Some(note)))
        }
        Work::TcpPingPong { size } => {
            let (job, note) = tcp_ping_pong::TcpPingPong::new(size, rank, coordinator)?;
            Ok((Box::new(job), Some(note)))
        }
        Work::Bandwidth(_) | Work::Latency(_) | Work::Churn { .. } => bail!("{work:?} is no limit"),
    }
}
