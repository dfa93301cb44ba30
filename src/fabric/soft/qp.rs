//! A soft queue pair: meets its peer, then moves bytes over the wire that the two have found. Driven by the thread that drives its
//! completion queue, which owns it.

use std::sync::Arc;

use super::connect::{self, Bringup, Met, Party};
use super::endpoint::{Address, MAX_STREAMS, Token};
use super::hub::LetterBox;
use super::queue::{Core, Fault};
use super::shm::{self, ShmWire};
use super::tcp::TcpWire;
use super::{Shared, loopback};
use crate::base::config::CrossMemory;
use crate::base::error::{Error, Result};
use crate::base::process::Process;
use crate::base::rand;
use crate::base::stats::{RailCounter, RailStats};
use crate::fabric::types::*;

/// How far a queue pair is.
pub enum Link {
    /// Not connected.
    Unconnected,
    /// Meeting its peer.
    Meeting(Box<Bringup>),
    /// On shared memory.
    Shm(Box<ShmWire>),
    /// On TCP.
    Tcp(Box<TcpWire>),
    /// Connected to itself.
    Own,
    /// In ERROR.
    Down,
}

/// A queue pair.
pub struct QueuePair {
    /// Queues and fate.
    pub core: Core,
    /// How far it is.
    pub link: Link,
    shared: Arc<Shared>,
    letters: Arc<LetterBox>,
    local: Address,
    notify: bool,
    send_slots: usize,
    traffic_class: Option<u8>,
    /// Polls until the meeting is looked at again.
    patience: u32,
    /// Dropping it waits until the peer writes nothing into this side's memory any more.
    leave: Option<shm::Offers>,
}

impl QueuePair {
    /// A queue pair in INIT.
    pub(super) fn new(shared: Arc<Shared>, caps: &QpCaps, stats: RailStats, notify: bool) -> Result<Self> {
        let mut token: Token = [0; 16];
        rand::fill(&mut token)?;
        let member = shared.hub.join(token)?;
        let local = Address {
            qpn: member.qpn,
            token,
            instance: *shared.hub.instance(),
            kernel: shared.kernel,
            addr: member.addr,
            rnr_retry: caps.rnr_retry,
            wire: shared.config.soft_wire,
            streams: shared.config.tcp_streams.min(u32::from(MAX_STREAMS)) as u8,
        };
        Ok(QueuePair {
            core: Core::new(caps, stats, member.qpn, 0),
            link: Link::Unconnected,
            letters: member.letters,
            local,
            notify,
            send_slots: (caps.send_depth as usize).next_power_of_two(),
            traffic_class: caps.traffic_class,
            patience: 0,
            leave: None,
            shared,
        })
    }

    /// Where this queue pair can be reached.
    pub fn endpoint(&self) -> Endpoint {
        self.local.encode()
    }

    /// Takes the queue pair to RTS.
    pub fn connect(&mut self, remote: &Endpoint) -> Result<()> {
        if self.core.state() != QpState::Init {
            return Err(Error::internal(format!("a queue pair in state {:?} cannot be connected", self.core.state())));
        }
        let remote = Address::decode(remote)?;
        self.core.ready(remote.rnr_retry);
        if remote.token == self.local.token {
            self.link = Link::Own;
            return Ok(());
        }
        let party = Party {
            config: self.shared.config.clone(),
            local: self.local.clone(),
            remote,
            letters: self.letters.clone(),
            notify: self.notify,
            send_slots: self.send_slots,
            traffic_class: self.traffic_class,
            stats: self.core.stats.clone(),
        };
        match Bringup::new(party) {
            Ok(meeting) => self.link = Link::Meeting(Box::new(meeting)),
            Err(fault) => self.fail(fault),
        }
        Ok(())
    }

    /// State.
    #[inline]
    pub fn state(&self) -> QpState {
        self.core.state()
    }

    /// Whether the peer's end has answered.
    #[inline]
    pub fn met(&self) -> bool {
        matches!(self.link, Link::Shm(_) | Link::Tcp(_) | Link::Own)
    }

    /// Number in completions.
    #[inline]
    pub fn qp_num(&self) -> u32 {
        self.core.qp_num
    }

    /// Whether the queue pair is in ERROR because this process has no descriptor left.
    pub fn lacks_descriptor(&self) -> bool {
        self.core.status() == Some(WcStatus::LocQpOpErr)
    }

    /// Why the queue pair is in ERROR.
    pub fn error(&self) -> Option<&str> {
        self.core.error()
    }

    /// The peer's process, on shared memory.
    pub fn peer_process(&self) -> Option<&Arc<Process>> {
        match &self.link {
            Link::Shm(wire) => wire.peer_process(),
            _ => None,
        }
    }

    /// Posts requests, and sends what can go at once.
    #[inline(always)]
    pub fn post_send(&mut self, requests: &[SendRequest<'_>]) -> std::result::Result<(), PostError> {
        self.core.post_send(requests)?;
        let sent = match &mut self.link {
            Link::Shm(wire) => wire.kick(&mut self.core),
            Link::Tcp(wire) => wire.kick(&mut self.core),
            _ => Ok(()),
        };
        if let Err(fault) = sent {
            self.fail(fault);
        }
        Ok(())
    }

    /// Posts a receive request.
    #[inline(always)]
    pub fn post_recv(&mut self, request: &RecvRequest) -> std::result::Result<(), PostError> {
        self.core.post_recv(request)
    }

    /// Takes the queue pair to ERROR.
    pub fn set_error(&mut self) {
        self.fail(Fault::oldest(WcStatus::WrFlushErr, "taken to ERROR by its owner"));
    }

    /// Moves what can be moved; true if anything was. `armed`: the caller sleeps if nothing was.
    #[inline(always)]
    pub fn progress(&mut self, armed: bool) -> bool {
        let moved = match &mut self.link {
            Link::Shm(wire) => wire.progress(&mut self.core),
            Link::Tcp(wire) => wire.progress(&mut self.core),
            _ => self.progress_without(armed),
        };
        moved.unwrap_or_else(|fault| {
            self.fail(fault);
            true
        })
    }

    /// Moves what can be moved and takes completions: how many, and whether anything moved.
    #[inline(always)]
    pub fn turn(&mut self, armed: bool, out: &mut [Completion]) -> (usize, bool) {
        let moved = self.progress(armed);
        let taken = if self.settled() { self.core.harvest(out) } else { 0 };
        (taken, moved)
    }

    /// Without a wire.
    #[inline(never)]
    fn progress_without(&mut self, armed: bool) -> std::result::Result<bool, Fault> {
        match &self.link {
            Link::Own => loopback::progress(&mut self.core),
            Link::Meeting(_) => self.meet(armed),
            _ => Ok(false),
        }
    }

    /// Whether completions may be given out: every acknowledgement owed is out of our hands.
    #[inline]
    pub fn settled(&self) -> bool {
        match &self.link {
            Link::Tcp(wire) => wire.flushed(),
            _ => true,
        }
    }

    #[cold]
    #[inline(never)]
    fn meet(&mut self, armed: bool) -> std::result::Result<bool, Fault> {
        let Link::Meeting(meeting) = &mut self.link else { return Ok(false) };
        // A meeting costs system calls at every step; a peer that takes long is not met sooner by asking every time.
        if self.patience > 0 && !armed {
            self.patience -= 1;
            return Ok(false);
        }
        self.patience = 8;
        match self.shared.hub.serve() {
            // Whoever dials has his streams.
            Err(_) if meeting.waits_for_streams() => return Err(connect::no_descriptor("for a stream of the peer's", &self.local)),
            Err(_) | Ok(()) => {}
        }
        self.shared.watch_hub().map_err(|e| Fault::oldest(WcStatus::GeneralErr, e.to_string()))?;
        if let Some(met) = meeting.step()? {
            self.letters.seal();
            self.link = match met {
                Met::Shm(wire) => {
                    if !wire.pulls() && self.shared.config.cma != CrossMemory::Never {
                        self.core.stats.add(RailCounter::CmaRefused, 1);
                    }
                    Link::Shm(wire)
                }
                Met::Tcp(wire) => Link::Tcp(wire),
            };
        }
        if self.notify {
            self.shared.hub.hush();
        }
        if armed {
            // The caller drains and then sleeps: what it waits for may be on a new stream by now.
            self.arm().map_err(|e| Fault::oldest(WcStatus::GeneralErr, e.to_string()))?;
        }
        match &mut self.link {
            Link::Shm(wire) => wire.progress(&mut self.core),
            Link::Tcp(wire) => wire.progress(&mut self.core),
            _ => Ok(false),
        }
    }

    /// Asks for a notification.
    pub fn arm(&mut self) -> Result<()> {
        let input = libc::EPOLLIN as u32;
        match &mut self.link {
            Link::Meeting(meeting) => meeting.watch(|fd, events| self.shared.watch(fd, events)),
            Link::Shm(wire) => {
                wire.arm();
                self.shared.watch(wire.fd(), input)
            }
            Link::Tcp(wire) => {
                wire.wake();
                let output = |wants| if wants { libc::EPOLLOUT as u32 } else { 0 };
                wire.fds().try_for_each(|(fd, wants)| self.shared.watch(fd, input | output(wants)))
            }
            Link::Unconnected | Link::Own | Link::Down => Ok(()),
        }
    }

    /// To ERROR, if it is not there yet. The wire goes down, and by that the peer learns.
    #[cold]
    fn fail(&mut self, fault: Fault) {
        self.core.fail(fault);
        self.take_down();
    }

    fn take_down(&mut self) {
        // Whoever dials now, or did and was not heard yet, shall not wait for an answer.
        self.letters.seal();
        match std::mem::replace(&mut self.link, Link::Down) {
            Link::Shm(wire) => self.leave = wire.close(),
            Link::Tcp(wire) => self.shared.hub.linger(wire.close()),
            _ => {}
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        self.take_down();
        self.shared.hub.leave(self.local.qpn);
    }
}
