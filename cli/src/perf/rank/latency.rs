//! Ping-pong on one comm, with receives posted ahead as NCCL does. Driven by one thread per rank.

use std::rc::Rc;

use super::coordinator::Coordinator;
use super::flow::Flow;
use super::job::{Begin, Job, Meter};
use super::payload::{Pattern, Payload, Stamp};
use super::session::Session;
use crate::perf::message::{Latency, PING_SLOTS, Round};
use crate::perf::spin::Spin;

/// Both directions of a comm.
pub struct PingPong {
    session: Rc<Session>,
    /// Receives that are posted at any time, with the one that is waited for.
    receives: u64,
    send: Flow,
    recv: Flow,
}

impl PingPong {
    /// Allocates and registers.
    pub fn new(session: &Rc<Session>, spec: Latency) -> anyhow::Result<PingPong> {
        let (send, recv) = session.both_ways()?;
        let flow = |comm, room| Flow::new(&session.plugin, comm, 0, (spec.size, room), PING_SLOTS, PING_SLOTS);
        let (send, recv) = (flow(send, spec.size)?, flow(recv, spec.recv_size)?);
        Ok(PingPong { session: Rc::clone(session), receives: spec.ahead.max(1) as u64, send, recv })
    }

    fn run<P: Payload>(&mut self, messages: u64, payload: P) -> anyhow::Result<()> {
        let session = Rc::clone(&self.session);
        let plugin = &session.plugin;
        let begun = self.recv.done;
        let target = begun + messages;
        for seq in begun..target {
            if self.session.rank == 0 {
                self.send(seq, payload)?;
            }
            let mut spin = Spin::default();
            while self.recv.done <= seq {
                let posted = self.recv.post_receives(plugin, target.min(seq + self.receives))?;
                let moved = self.recv.take_receives(plugin, payload)? | self.send.take_sends(plugin, payload)?;
                spin.after(posted || moved);
            }
            if self.session.rank == 1 {
                self.send(seq, payload)?;
            }
            // Rank 0 sends on first, in the next turn: what is posted ahead must not hold up what is waited for.
            if self.session.rank == 1 {
                self.recv.post_receives(plugin, target.min(seq + 1 + self.receives))?;
            }
        }
        let mut spin = Spin::default();
        while self.send.done < target {
            spin.after(self.send.take_sends(plugin, payload)?);
        }
        Ok(())
    }

    fn send<P: Payload>(&mut self, seq: u64, payload: P) -> anyhow::Result<()> {
        let plugin = &self.session.plugin;
        // The other rank can only see this one once its own receive is posted.
        if self.recv.posted == seq {
            self.recv.post_receives(plugin, seq + 1)?;
        }
        let mut spin = Spin::default();
        while self.send.posted <= seq {
            let moved = self.send.post_sends(plugin, seq + 1, payload)? || self.send.take_sends(plugin, payload)?;
            spin.after(moved);
        }
        Ok(())
    }
}

impl Job for PingPong {
    fn verify(&mut self, _: &mut Coordinator) -> anyhow::Result<()> {
        self.run(2 * PING_SLOTS as u64, Pattern)?;
        self.recv.check_margins()
    }

    fn round(&mut self, _: &mut Coordinator, messages: u64, begin: Begin) -> anyhow::Result<Round> {
        let meter = Meter::start(begin);
        self.run(messages, Stamp)?;
        Ok(meter.stop())
    }

    fn release(self: Box<Self>) -> anyhow::Result<u64> {
        let received = self.recv.bytes();
        self.send.release(&self.session.plugin)?;
        self.recv.release(&self.session.plugin)?;
        Ok(received)
    }
}
