//! What a rank can be asked to measure. Implemented by the plugin's jobs here and by the limits.

use super::coordinator::Coordinator;
use crate::perf::message::Round;
use crate::perf::os;
use crate::perf::spin::Spin;

/// Prepared work. All calls on the thread that drives the rank; the other rank is called alike.
pub trait Job {
    /// Moves data and checks every byte.
    fn verify(&mut self, _: &mut Coordinator) -> anyhow::Result<()> {
        Ok(())
    }

    /// Moves `messages` and measures.
    fn round(&mut self, coordinator: &mut Coordinator, messages: u64, begin: Begin) -> anyhow::Result<Round>;

    /// Gives back what was registered; bytes that a plugin has delivered to this rank meanwhile.
    fn release(self: Box<Self>) -> anyhow::Result<u64> {
        Ok(0)
    }
}

/// When a round begins.
#[derive(Clone, Copy)]
pub struct Begin(pub Option<u64>);

/// Measures a round.
pub struct Meter {
    start_ns: u64,
    cpu_s: f64,
}

impl Meter {
    /// Waits for the beginning, busily, so that both ranks begin together with warm cores.
    pub fn start(begin: Begin) -> Meter {
        if let Begin(Some(at)) = begin {
            let mut spin = Spin::default();
            while os::now_ns() < at {
                spin.idle();
            }
        }
        let cpu_s = os::cpu_seconds();
        Meter { start_ns: os::now_ns(), cpu_s }
    }

    /// The end.
    pub fn stop(self) -> Round {
        let end_ns = os::now_ns();
        Round { start_ns: self.start_ns, end_ns, cpu_s: os::cpu_seconds() - self.cpu_s, ..Round::default() }
    }
}
