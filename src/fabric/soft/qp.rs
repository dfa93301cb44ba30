//! A soft queue pair: connects to its peer, then moves bytes over the wire that both sides chose. Used by the thread that drives its
//! completion queue, which owns it.

use std::sync::Arc;

use super::connect::{self, ConnectArgs, Connected, Connecting};
use super::endpoint::{Address, MAX_STREAMS, Token};
use super::hub::{PendingStreams, Turn};
use super::shm::{self, ShmWire};
use super::tcp::TcpWire;
use super::work_queues::{Fault, WorkQueues};
use super::{Shared, loopback};
use crate::base::config::CrossMemory;
use crate::base::error::{Error, Result};
use crate::base::process::Process;
use crate::base::rand;
use crate::base::stats::{RailCounter, RailStats};
use crate::fabric::types::*;

/// What a queue pair moves its bytes over.
pub enum Wire {
    /// Nothing yet: in INIT.
    Unconnected,
    /// Nothing yet: the two sides are choosing a wire.
    Connecting(Box<Connecting>),
    /// Shared memory.
    Shm(Box<ShmWire>),
    /// TCP.
    Tcp(Box<TcpWire>),
    /// None needed: connected to itself.
    Loopback,
    /// Nothing any more: in ERROR.
    Closed,
}

/// A queue pair.
pub struct QueuePair {
    /// Send queue, receive queue and state.
    pub wq: WorkQueues,
    /// The wire.
    pub wire: Wire,
    shared: Arc<Shared>,
    pending: Arc<PendingStreams>,
    local: Address,
    caps: QpCaps,
    /// How often it was reset, or more: the peer's must be the same.
    generation: u32,
    notify: bool,
    /// Its owner sleeps, as a poll has found nothing.
    asleep: bool,
    /// Polls to skip before [`Connecting`] is stepped again.
    skip_polls: u32,
    /// When to serve the hub.
    turn: Turn,
    /// What the peer may still be writing under after a wire of shared memory was closed. Dropping it waits for the peer.
    last_grants: Option<shm::Grants>,
}

impl QueuePair {
    /// A queue pair in INIT.
    pub(super) fn new(shared: Arc<Shared>, caps: &QpCaps, stats: RailStats, notify: bool) -> Result<Self> {
        let mut token: Token = [0; 16];
        rand::fill(&mut token)?;
        let added = shared.hub.add_qp(token)?;
        let local = Address {
            qpn: added.qpn,
            token,
            instance: *shared.hub.instance(),
            kernel: shared.kernel,
            addr: added.addr,
            rnr_retry: caps.rnr_retry,
            wire: shared.config.soft_wire,
            streams: shared.config.tcp_streams.min(u32::from(MAX_STREAMS)) as u8,
        };
        Ok(QueuePair {
            wq: WorkQueues::new(caps, stats, added.qpn, 0),
            wire: Wire::Unconnected,
            pending: added.pending,
            local,
            caps: *caps,
            generation: 0,
            notify,
            asleep: false,
            skip_polls: 0,
            turn: shared.hub.turn(),
            last_grants: None,
            shared,
        })
    }

    /// Where this queue pair can be reached.
    pub fn endpoint(&self) -> Endpoint {
        self.local.encode()
    }

    /// Takes the queue pair to RTS.
    pub fn connect(&mut self, remote: &Endpoint) -> Result<()> {
        if self.wq.state() != QpState::Init {
            return Err(Error::internal(format!("a queue pair in state {:?} cannot be connected", self.wq.state())));
        }
        let remote = Address::decode(remote)?;
        self.wq.ready(remote.rnr_retry);
        if remote.token == self.local.token {
            self.wire = Wire::Loopback;
            return Ok(());
        }
        let args = ConnectArgs {
            config: self.shared.config.clone(),
            local: self.local.of_generation(self.generation),
            remote: remote.of_generation(self.generation),
            pending: self.pending.clone(),
            notify: self.notify,
            send_slots: (self.caps.send_depth as usize).next_power_of_two(),
            traffic_class: self.caps.traffic_class,
            stats: self.wq.stats.clone(),
        };
        match Connecting::new(args) {
            Ok(connecting) => self.wire = Wire::Connecting(Box::new(connecting)),
            Err(fault) => self.fail(fault),
        }
        Ok(())
    }

    /// State.
    #[inline]
    pub fn state(&self) -> QpState {
        self.wq.state()
    }

    /// Whether the peer has answered and both sides have the wire.
    #[inline]
    pub fn connected(&self) -> bool {
        matches!(self.wire, Wire::Shm(_) | Wire::Tcp(_) | Wire::Loopback)
    }

    /// Whether the peer is known to have posted a receive.
    pub fn knows_receives(&self) -> bool {
        match &self.wire {
            Wire::Tcp(wire) => wire.knows_receives(),
            _ => true,
        }
    }

    /// For how many nanoseconds at least the peer's host has not answered, if it does not, as far as this side knows.
    pub fn unanswered_for(&self) -> Option<u64> {
        match &self.wire {
            Wire::Tcp(wire) => wire.unanswered_for(),
            _ => None,
        }
    }

    /// Number in completions.
    #[inline]
    pub fn qp_num(&self) -> u32 {
        self.wq.qp_num
    }

    /// If the queue pair is in ERROR for what this process has not: what the system said.
    pub fn lack(&self) -> Option<i32> {
        self.wq.errno()
    }

    /// Why the queue pair is in ERROR.
    pub fn error(&self) -> Option<&str> {
        self.wq.error()
    }

    /// The peer's process, on shared memory.
    pub fn peer_process(&self) -> Option<&Arc<Process>> {
        match &self.wire {
            Wire::Shm(wire) => wire.peer_process(),
            _ => None,
        }
    }

    /// Posts requests, and sends those for which the wire has room.
    #[inline(always)]
    pub fn post_send(&mut self, requests: &[SendWr<'_>]) -> std::result::Result<(), PostError> {
        self.wq.post_send(requests)?;
        let sent = match &mut self.wire {
            Wire::Shm(wire) => wire.kick(&mut self.wq),
            Wire::Tcp(wire) => {
                let sent = wire.kick(&mut self.wq);
                if self.asleep && (self.wq.sq.sent != self.wq.sq.posted || self.wq.sq.has_sent()) {
                    // Only its polls send the rest, and tell what is done already.
                    self.wake_owner();
                }
                sent
            }
            Wire::Loopback | Wire::Closed if self.asleep => {
                self.wake_owner();
                Ok(())
            }
            _ => Ok(()),
        };
        if let Err(fault) = sent {
            self.fail(fault);
        }
        Ok(())
    }

    /// Posts requests that can wait for what is sent next. Over TCP they do, as each call costs more than all that it sends.
    #[inline(always)]
    pub fn post_held(&mut self, requests: &[SendWr<'_>]) -> std::result::Result<(), PostError> {
        match &mut self.wire {
            Wire::Tcp(wire) if !self.asleep => {
                let from = self.wq.sq.posted;
                self.wq.post_send(requests)?;
                wire.hold(from);
                Ok(())
            }
            _ => self.post_send(requests),
        }
    }

    /// Sends them, if they are not sent.
    pub fn send_held(&mut self) {
        if let Wire::Tcp(wire) = &mut self.wire
            && let Err(fault) = wire.kick(&mut self.wq)
        {
            self.fail(fault);
        }
    }

    /// Posts a receive request.
    #[inline(always)]
    pub fn post_recv(&mut self, request: &RecvWr) -> std::result::Result<(), PostError> {
        self.wq.post_recv(request)
    }

    /// Takes the queue pair to ERROR.
    pub fn set_error(&mut self) {
        self.fail(Fault::oldest(WcStatus::WrFlushErr, "taken to ERROR by its owner"));
    }

    /// Whether everything outstanding was reported, and the peer writes nothing more.
    pub fn drained(&self) -> bool {
        self.wq.idle() && self.last_grants.as_ref().is_none_or(shm::Grants::peer_is_gone)
    }

    /// Whether the peer maps memory that it is passed.
    pub fn maps_memory(&self) -> bool {
        matches!(&self.wire, Wire::Shm(wire) if wire.maps_memory())
    }

    /// Whether the peer may be writing a part of a message still.
    pub fn drop_waits(&mut self) -> bool {
        self.last_grants.as_mut().is_some_and(|grants| !grants.peer_is_gone() && grants.stop())
    }

    /// From ERROR to INIT, as a later generation: with a secret that only a peer of the same generation knows, and queues that count from the start.
    pub fn reset(&mut self, generation: u32) -> Result<()> {
        check_reset(self.state(), self.drained(), self.generation, generation)?;
        let qpn = self.local.qpn;
        self.pending = self.shared.hub.renew_qp(qpn, self.local.of_generation(generation).token);
        self.wq = WorkQueues::new(&self.caps, self.wq.stats.clone(), qpn, 0);
        self.wire = Wire::Unconnected;
        self.generation = generation;
        self.asleep = false;
        self.skip_polls = 0;
        self.turn = self.shared.hub.turn();
        self.last_grants = None;
        Ok(())
    }

    /// Sends and receives what it can without waiting; true if anything moved. `armed`: the caller will sleep if nothing did.
    #[inline(always)]
    pub fn progress(&mut self, armed: bool) -> bool {
        let moved = match &mut self.wire {
            Wire::Shm(wire) => wire.progress(&mut self.wq),
            Wire::Tcp(wire) => wire.progress(&mut self.wq),
            _ => self.progress_unconnected(armed),
        };
        moved.unwrap_or_else(|fault| {
            self.fail(fault);
            true
        })
    }

    /// Makes progress once and polls completions: how many, and whether anything moved.
    #[inline(always)]
    pub fn poll_once(&mut self, armed: bool, out: &mut [Completion]) -> (usize, bool) {
        let moved = self.progress(armed);
        let taken = if self.acks_flushed() { self.wq.poll_completions(out) } else { 0 };
        (taken, moved)
    }

    /// [`QueuePair::progress`] of a queue pair that has no wire to a peer.
    #[inline(never)]
    fn progress_unconnected(&mut self, armed: bool) -> std::result::Result<bool, Fault> {
        match &self.wire {
            Wire::Loopback => loopback::progress(&mut self.wq),
            Wire::Connecting(_) => self.step_connecting(armed),
            _ => Ok(false),
        }
    }

    /// Whether completions may be reported: the kernel or shared memory has every ack that this side owes the peer.
    #[inline]
    pub fn acks_flushed(&self) -> bool {
        match &self.wire {
            Wire::Tcp(wire) => wire.flushed(),
            _ => true,
        }
    }

    /// Connects a step further. Once connected, makes progress on the new wire.
    #[cold]
    #[inline(never)]
    fn step_connecting(&mut self, armed: bool) -> std::result::Result<bool, Fault> {
        let Wire::Connecting(connecting) = &mut self.wire else { return Ok(false) };
        // Each step costs system calls, and waiting for a slow peer takes no longer with fewer of them.
        if self.skip_polls > 0 && !armed {
            self.skip_polls -= 1;
            return Ok(false);
        }
        self.skip_polls = 8;
        match self.shared.serve_hub(&mut self.turn)? {
            // Only the acceptor needs a stream from the hub: the dialer has its own.
            Err(_) if connecting.waits_for_streams() => return Err(connect::no_descriptor("for a stream of the peer's", &self.local)),
            Err(_) | Ok(()) => {}
        }
        let connected = connecting.step()?;
        let has_opened = connected.is_some() || connecting.has_opened();
        if let Some(connected) = connected {
            self.pending.close();
            self.wire = match connected {
                Connected::Shm(wire) => {
                    if !wire.can_read_peer() && self.shared.config.cma != CrossMemory::Never {
                        self.wq.stats.add(RailCounter::CmaRefused, 1);
                    }
                    Wire::Shm(wire)
                }
                Connected::Tcp(wire) => {
                    self.wq.sq.copies = wire.copies();
                    Wire::Tcp(wire)
                }
            };
        }
        if self.notify {
            self.shared.hub.clear_notification();
        }
        if armed && has_opened {
            // The caller will sleep, and nothing watches those streams yet.
            self.arm()?;
        }
        match &mut self.wire {
            Wire::Shm(wire) => wire.progress(&mut self.wq),
            Wire::Tcp(wire) => wire.progress(&mut self.wq),
            _ => Ok(false),
        }
    }

    /// As [`Shared::serve_hub`], in this queue pair's turn.
    pub(super) fn serve_hub(&mut self) -> Result<std::io::Result<()>> {
        self.shared.serve_hub(&mut self.turn)
    }

    /// Its owner sleeps from now on, and is woken once the sockets take what they have not.
    pub fn before_sleep(&mut self) -> Result<()> {
        self.asleep = true;
        if matches!(&self.wire, Wire::Tcp(wire) if wire.is_holding()) {
            self.send_held();
        }
        match &self.wire {
            Wire::Tcp(wire) if wire.fds().any(|(_, wants)| wants) => self.arm(),
            _ => Ok(()),
        }
    }

    /// Its owner does not sleep any more.
    pub fn after_sleep(&mut self) {
        self.asleep = false;
    }

    /// Wakes the owner, now or once there is room in a socket: that is seen until it arms, where another sleeper of the device may clear a
    /// notification.
    #[cold]
    #[inline(never)]
    fn wake_owner(&self) {
        let both = (libc::EPOLLIN | libc::EPOLLOUT) as u32;
        let watched = matches!(&self.wire, Wire::Tcp(wire) if wire.fds().all(|(fd, _)| self.shared.watch(fd, both).is_ok()));
        if !watched {
            self.shared.hub.notify();
        }
    }

    /// Asks for a notification.
    pub fn arm(&mut self) -> Result<()> {
        let input = libc::EPOLLIN as u32;
        match &mut self.wire {
            Wire::Connecting(connecting) => connecting.watch(|fd, events| self.shared.watch(fd, events)),
            Wire::Shm(wire) => wire.arm(|fd| self.shared.watch(fd, input)),
            Wire::Tcp(wire) => {
                wire.wake();
                let output = |wants| if wants { libc::EPOLLOUT as u32 } else { 0 };
                wire.fds().try_for_each(|(fd, wants)| self.shared.watch(fd, input | output(wants)))
            }
            Wire::Unconnected | Wire::Loopback | Wire::Closed => Ok(()),
        }
    }

    /// To ERROR, if it is not there yet. Closes the wire, which tells the peer.
    #[cold]
    fn fail(&mut self, fault: Fault) {
        self.wq.fail(fault);
        self.close_wire();
        if self.asleep {
            self.wake_owner();
        }
    }

    fn close_wire(&mut self) {
        // A peer that dials now, or has dialed and is still pending, gets its stream closed instead of no answer.
        self.pending.close();
        match std::mem::replace(&mut self.wire, Wire::Closed) {
            Wire::Shm(wire) => self.last_grants = Some(wire.close()),
            Wire::Tcp(wire) => {
                // A socket that is shut down counts as writable for ever.
                wire.fds().for_each(|(fd, _)| self.shared.watch_input_only(fd));
                self.shared.hub.linger(wire.close());
            }
            _ => {}
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.close_wire();
        self.shared.hub.remove_qp(self.local.qpn);
    }
}
