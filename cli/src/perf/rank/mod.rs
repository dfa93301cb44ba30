//! A rank: a process of its own that loads the plugin, or none, and does what the coordinator says. Started by `pair` as this same program
//! with a hidden argument; the coordinator is on its standard input. One thread drives the plugin.

mod bandwidth;
mod churn;
mod comms;
pub mod coordinator;
mod flow;
pub mod job;
mod latency;
mod payload;
mod session;

use std::collections::HashMap;
use std::io::ErrorKind;
use std::process::ExitCode;
use std::rc::Rc;

use anyhow::{Context, anyhow, bail, ensure};

use super::limits;
use super::message::{FromRank, Outcome, Start, ToRank, Work};
use super::os;
use coordinator::{Aborted, Coordinator};
use job::{Begin, Job};
use session::Session;

/// Runs as a rank until the coordinator has no more to do.
pub fn run() -> anyhow::Result<ExitCode> {
    os::die_with_parent()?;
    os::be_called(c"railhead")?;
    os::raise_open_files();
    let mut rank = Rank { coordinator: Coordinator::new()?, rank: 0, session: None, jobs: HashMap::new() };
    while let Some(command) = rank.coordinator.next()? {
        let finish = matches!(command, ToRank::Finish);
        let answer = match rank.obey(command) {
            Ok(outcome) => FromRank::Done(outcome),
            Err(error) if error.is::<Aborted>() => FromRank::Done(Outcome::Nothing),
            Err(error) => FromRank::Failed { message: format!("{error:#}") },
        };
        rank.coordinator.answer(&answer)?;
        if finish {
            break;
        }
    }
    Ok(ExitCode::SUCCESS)
}

struct Rank {
    coordinator: Coordinator,
    rank: usize,
    session: Option<Rc<Session>>,
    jobs: HashMap<u32, Box<dyn Job>>,
}

/// Jobs at a time.
const MAX_JOBS: usize = 64;

impl Rank {
    fn obey(&mut self, command: ToRank) -> anyhow::Result<Outcome> {
        match command {
            ToRank::Start(start) => self.start(&start),
            ToRank::Prepare { id, work } => {
                work.check()?;
                os::can_hold(work.bytes())?;
                ensure!(self.jobs.len() < MAX_JOBS, "{MAX_JOBS} jobs are prepared already");
                let (job, note) = self.prepare(work)?;
                self.jobs.insert(id, job);
                Ok(Outcome::Prepared { note })
            }
            ToRank::Verify { id } => {
                let job = self.jobs.get_mut(&id).with_context(|| format!("no job {id}"))?;
                job.verify(&mut self.coordinator)?;
                Ok(Outcome::Nothing)
            }
            ToRank::Round { id, messages, start_ns } => {
                let job = self.jobs.get_mut(&id).with_context(|| format!("no job {id}"))?;
                Ok(Outcome::Round(job.round(&mut self.coordinator, messages, Begin(start_ns))?))
            }
            ToRank::Release { id } => {
                let received = self.jobs.remove(&id).with_context(|| format!("no job {id}"))?.release()?;
                Ok(Outcome::Released { received })
            }
            ToRank::Finish => {
                self.jobs.clear();
                if let Some(session) = self.session.take() {
                    Rc::into_inner(session).context("a job still uses the plugin")?.finish()?;
                }
                Ok(Outcome::Nothing)
            }
            // Its swap has ended by itself, with an error of its own.
            ToRank::Abort => Ok(Outcome::Nothing),
            ToRank::Swapped { .. } => bail!("nothing was swapped"),
        }
    }

    fn start(&mut self, start: &Start) -> anyhow::Result<Outcome> {
        ensure!(start.rank < 2, "rank {}: there are 0 and 1", start.rank);
        ensure!(self.session.is_none(), "this rank has a plugin already");
        self.rank = start.rank;
        if let Some(cpu) = start.cpu {
            match os::stay_on(cpu) {
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    bail!("this process may not run on CPU {cpu}, but on {}", os::allowed())
                }
                other => other.with_context(|| format!("cannot stay on CPU {cpu}"))?,
            }
        }
        let Some(spec) = &start.plugin else { return Ok(Outcome::Nothing) };
        let (session, started) = Session::start(spec, start.rank, start.comms, &mut self.coordinator)?;
        self.session = Some(Rc::new(session));
        Ok(Outcome::Started(started))
    }

    fn prepare(&mut self, work: Work) -> anyhow::Result<(Box<dyn Job>, Option<String>)> {
        let session = self.session.as_ref().ok_or_else(|| anyhow!("this rank has no plugin"));
        match work {
            Work::Bandwidth(spec) => Ok((Box::new(bandwidth::Stream::new(session?, spec)?), None)),
            Work::Latency(spec) => Ok((Box::new(latency::PingPong::new(session?, spec)?), None)),
            Work::Churn { comms } => Ok((Box::new(churn::Churn::new(session?, comms)), None)),
            limit => limits::prepare(limit, self.rank, &mut self.coordinator),
        }
    }
}
