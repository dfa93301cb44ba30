//! Messages as fast as they go, over one or several comms, one way or both. Driven by one thread per rank, as NCCL's proxy does.

use std::rc::Rc;

use super::coordinator::Coordinator;
use super::flow::Flow;
use super::job::{Begin, Job, Meter};
use super::payload::{Pattern, Payload, Stamp, Touch};
use super::session::Session;
use crate::perf::message::{Bandwidth, Round};
use crate::perf::spin::Spin;

/// The flows of the comms in use.
pub struct Stream {
    session: Rc<Session>,
    spec: Bandwidth,
    sends: Vec<Flow>,
    receives: Vec<Flow>,
}

impl Stream {
    /// Allocates and registers.
    pub fn new(session: &Rc<Session>, spec: Bandwidth) -> anyhow::Result<Stream> {
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for (i, comm) in session.comms(spec.comms)?.iter().enumerate() {
            let flow = |comm, room| Flow::new(&session.plugin, comm, i as i32, (spec.size, room), spec.outstanding, spec.slots);
            if let (Some(send), true) = (comm.send, session.rank == 0 || spec.two_way) {
                sends.push(flow(send, spec.size)?);
            }
            if let (Some(recv), true) = (comm.recv, session.rank == 1 || spec.two_way) {
                receives.push(flow(recv, spec.recv_size)?);
            }
        }
        Ok(Stream { session: Rc::clone(session), spec, sends, receives })
    }

    /// `messages` on each comm; how many each had when the first had all.
    fn run<P: Payload>(&mut self, messages: u64, payload: P) -> anyhow::Result<Vec<u64>> {
        let plugin = &self.session.plugin;
        let begun = self.sends.first().or(self.receives.first()).map_or(0, |flow| flow.done);
        let target = begun + messages;
        let (mut at_first, mut spin) = (Vec::new(), Spin::default());
        loop {
            let (mut moved, mut unfinished, mut finished) = (false, 0, 0);
            for flow in &mut self.receives {
                if flow.done < target {
                    moved |= flow.post_receives(plugin, target)?;
                    moved |= flow.take_receives(plugin, payload)?;
                    unfinished += usize::from(flow.done < target);
                    finished += usize::from(flow.done == target);
                }
            }
            for flow in &mut self.sends {
                if flow.done < target {
                    moved |= flow.post_sends(plugin, target, payload)?;
                    moved |= flow.take_sends(plugin, payload)?;
                    unfinished += usize::from(flow.done < target);
                    finished += usize::from(flow.done == target);
                }
            }
            if finished > 0 && at_first.is_empty() {
                at_first = self.receives.iter().chain(&self.sends).map(|flow| flow.done - begun).collect();
            }
            if unfinished == 0 {
                return Ok(at_first);
            }
            spin.after(moved);
        }
    }
}

impl Job for Stream {
    fn verify(&mut self, _: &mut Coordinator) -> anyhow::Result<()> {
        // Each slot twice, so that what a slot held before cannot pass for what it must hold.
        self.run(2 * self.spec.slots as u64, Pattern)?;
        self.receives.iter().try_for_each(Flow::check_margins)
    }

    fn round(&mut self, _: &mut Coordinator, messages: u64, begin: Begin) -> anyhow::Result<Round> {
        let meter = Meter::start(begin);
        let at_first = if self.spec.touch { self.run(messages, Touch)? } else { self.run(messages, Stamp)? };
        Ok(Round { at_first, ..meter.stop() })
    }

    fn release(self: Box<Self>) -> anyhow::Result<u64> {
        let received = self.receives.iter().map(Flow::bytes).sum();
        self.sends.into_iter().chain(self.receives).try_for_each(|flow| flow.release(&self.session.plugin))?;
        Ok(received)
    }
}
