//! A series of measured rounds of one kind of work on a pair of ranks: a plugin's job or a limit. Used by the coordinator.

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::bail;

use super::message::{Latency, Memory, Outcome, Round, ToRank, Work};
use super::os;
use super::pair::Pair;

/// A pair that several series use.
pub type Shared = Rc<RefCell<Pair>>;

/// Work that is prepared on both ranks, to be measured round by round.
pub struct Series {
    pair: Shared,
    id: u32,
    /// What is measured.
    pub work: Work,
    /// How, if there is something to say.
    pub note: Option<String>,
    messages: u64,
}

/// One round.
#[derive(Debug, Clone)]
pub struct Sample {
    /// From the first beginning to the last end.
    pub seconds: f64,
    /// Per comm and direction.
    pub messages: u64,
    /// Both ranks' user and system time.
    pub cpu_s: f64,
    /// In place of the time per message.
    pub value: Option<f64>,
    /// Messages of each comm of the receiving rank when the first comm had all of its own.
    pub at_first: Vec<u64>,
    /// Growth of both ranks' memory, where asked for.
    pub memory: [Option<Memory>; 2],
}

/// Rounds that must agree on how long a number of messages takes.
const CONFIRMATIONS: usize = 2;
/// Time for both ranks to wake up before they begin together.
const WAKE_NS: u64 = 300_000;

impl Series {
    /// Allocates, registers and, for a plugin, verifies.
    pub fn prepare(pair: &Shared, work: Work) -> anyhow::Result<Series> {
        let mut ranks = pair.borrow_mut();
        let id = ranks.id();
        let [zero, one] = ranks.command(&describe(&work), |_| ToRank::Prepare { id, work })?;
        let note = [zero, one].into_iter().find_map(|outcome| match outcome {
            Outcome::Prepared { note } => note,
            _ => None,
        });
        ranks.command(&format!("{}, checking every byte", describe(&work)), |_| ToRank::Verify { id })?;
        drop(ranks);
        Ok(Series { pair: Rc::clone(pair), id, work, note, messages: 1 })
    }

    /// Finds how many messages take about `seconds`.
    pub fn calibrate(&mut self, seconds: f64) -> anyhow::Result<()> {
        self.messages = match self.work {
            Work::Bandwidth(b) => 2 * b.outstanding as u64,
            Work::Memcpy(b) | Work::Readv(b) | Work::TcpStream(b) => 2 * b.slots as u64,
            Work::Latency(_) | Work::TcpPingPong { .. } | Work::CacheLine | Work::Ring => 16,
            // Its size is its own.
            Work::Churn { .. } => return Ok(()),
        };
        let least = self.messages;
        let enough = seconds / 4.0;
        loop {
            let mut took = self.round()?.seconds;
            for _ in 0..CONFIRMATIONS {
                // A rank that was interrupted once must not make all rounds too short.
                if took >= enough {
                    took = took.min(self.round()?.seconds);
                }
            }
            let wanted = (self.messages as f64 * seconds / took.max(1e-7)) as u64;
            if took >= enough {
                self.messages = wanted.max(least);
                return Ok(());
            }
            self.messages = wanted.min(self.messages * 16).max(least);
        }
    }

    /// Measures once.
    pub fn round(&self) -> anyhow::Result<Sample> {
        let mut ranks = self.pair.borrow_mut();
        let (id, messages) = (self.id, self.messages);
        let start_ns = ranks.one_clock().then(|| os::now_ns() + WAKE_NS);
        let outcomes = ranks.command(&describe(&self.work), |_| ToRank::Round { id, messages, start_ns })?;
        let [Outcome::Round(zero), Outcome::Round(one)] = outcomes else { bail!("a rank answered a round with something else") };
        let seconds = if ranks.one_clock() { between(&zero, &one) } else { longer(&zero, &one) };
        let value = one.value.or(zero.value);
        let memory = [zero.memory, one.memory];
        Ok(Sample { seconds, messages, cpu_s: zero.cpu_s + one.cpu_s, value, at_first: one.at_first, memory })
    }

    /// Gives back what was registered; bytes that a plugin has moved since the beginning.
    pub fn release(self) -> anyhow::Result<u64> {
        let id = self.id;
        let outcomes = self.pair.borrow_mut().command(&describe(&self.work), |_| ToRank::Release { id })?;
        let [Outcome::Released { received: zero }, Outcome::Released { received: one }] = outcomes else {
            bail!("a rank answered its release with something else")
        };
        Ok(zero.saturating_add(one))
    }

    /// The figure of a round: bytes per second for what moves bulk, seconds one way for what bounces.
    pub fn figure(&self, sample: &Sample) -> f64 {
        if let Some(value) = sample.value {
            return value;
        }
        match self.work {
            Work::Latency(_) | Work::TcpPingPong { .. } | Work::Ring => sample.seconds / sample.messages as f64 / 2.0,
            Work::CacheLine | Work::Churn { .. } => sample.seconds,
            _ => self.bytes(sample) / sample.seconds,
        }
    }

    /// Bytes moved in a round, over all comms and directions.
    pub fn bytes(&self, sample: &Sample) -> f64 {
        let per_message = match self.work {
            Work::Bandwidth(b) => b.size * b.comms * (1 + usize::from(b.two_way)),
            Work::Latency(Latency { size, .. }) | Work::TcpPingPong { size } => 2 * size,
            Work::Memcpy(b) | Work::Readv(b) | Work::TcpStream(b) => b.size,
            Work::CacheLine | Work::Ring | Work::Churn { .. } => 0,
        };
        per_message as f64 * sample.messages as f64
    }
}

/// What is done, for an error message.
fn describe(work: &Work) -> String {
    match work {
        Work::Bandwidth(b) => format!("{} bytes, {} outstanding, {} comms", b.size, b.outstanding, b.comms),
        Work::Latency(l) => format!("ping-pong of {} bytes", l.size),
        Work::Churn { comms } => format!("{comms} comms set up and torn down"),
        Work::Memcpy(b) => format!("memcpy of {} bytes", b.size),
        Work::Readv(b) => format!("process_vm_readv of {} bytes", b.size),
        Work::CacheLine => "bouncing a cache line".into(),
        Work::Ring => "ping-pong over rings of cache lines".into(),
        Work::TcpStream(b) => format!("TCP stream of {} bytes", b.size),
        Work::TcpPingPong { size } => format!("TCP ping-pong of {size} bytes"),
    }
}

fn between(zero: &Round, one: &Round) -> f64 {
    let busy = [zero, one].into_iter().filter(|round| round.end_ns != 0);
    let start = busy.clone().map(|round| round.start_ns).min().unwrap_or(0);
    let end = busy.map(|round| round.end_ns).max().unwrap_or(0);
    end.saturating_sub(start) as f64 * 1e-9
}

fn longer(zero: &Round, one: &Round) -> f64 {
    [zero, one].map(|round| round.end_ns.saturating_sub(round.start_ns) as f64 * 1e-9).into_iter().fold(0.0, f64::max)
}
