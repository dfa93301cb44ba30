//! Whether the peer still lives. Asked by the thread that drives the link, only on polls that found nothing, and then rarely.
//!
//! A link fails on evidence alone: a completion that failed, or the end of the control connection (the handshake's, kept for this, where there was one),
//! or of the peer's process, with something outstanding. A peer that is slow or stopped is only reported, unless RAILHEAD_PEER_TIMEOUT_S
//! says otherwise.

use std::os::fd::RawFd;
use std::sync::Arc;

use crate::base::clock;
use crate::base::config::Config;
use crate::base::fd::TcpStream;
use crate::base::process::{Process, ProcessState};
use crate::base::stats::WaitCause;

use super::control_connection::{Confirm, ControlConnection, End};
use super::failover::{CELL_SIZE, Said};

/// Idle polls per look at the clock.
const CLOCK_EVERY: u32 = 64;
/// Nanoseconds between two looks at the control connection and the peer's process.
const CHECK_NS: u64 = 50_000_000;
/// Nanoseconds that completions may still take after the control connection has ended: they travel on other connections, and what was
/// sent before the end arrives, a retransmission or two later.
const GRACE_NS: u64 = 2_000_000_000;

/// Who the peer is.
#[derive(Debug, Clone)]
pub struct Peer {
    /// For messages: host, process, device, address.
    pub label: String,
    /// Its process id, if this process can see it under that number.
    pub pid: Option<i32>,
}

/// What a check found.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing wrong, as far as the connection shows; most polls check no more.
    NotChecked,
    /// Nothing wrong, and the process was checked too: one poll in very many.
    Checked,
    /// Nothing outstanding can complete any more.
    Gone(String),
    /// The peer broke the protocol.
    ProtocolError(String),
}

/// The watch over one peer.
pub struct Liveness {
    /// What the handshake has left.
    control: ControlConnection,
    /// The peer's process, if this one can see it.
    process: Option<Arc<Process>>,
    /// Idle polls; only the remainder matters.
    polls: u32,
    checked_at: u64,
    /// Since when nothing was found; 0 after something was.
    idle_since: u64,
    /// The same, since somebody waits for the peer.
    silent_since: u64,
    /// Somebody does.
    is_waited_for: bool,
    /// What the peer sent that breaks the protocol.
    broken: Option<&'static str>,
    /// When the end of the connection or of the process was seen, and which.
    ended: Option<(u64, &'static str)>,
    /// When the queue pairs were first seen to have failed; 0 before.
    failed_since: u64,
    /// The control connection may be lost though the peer is there.
    outlasts: bool,
    stopped: bool,
    peer_timeout_ns: u64,
}

impl Liveness {
    /// Watches `peer`, over the handshake's connection if there is one.
    pub fn new(stream: Option<TcpStream>, confirm: Option<Box<dyn Confirm>>, peer: &Peer, config: &Config) -> Liveness {
        Liveness {
            control: ControlConnection::new(stream, confirm),
            process: peer.pid.and_then(Process::find),
            polls: 0,
            checked_at: 0,
            idle_since: 0,
            silent_since: 0,
            is_waited_for: true,
            broken: None,
            ended: None,
            failed_since: 0,
            outlasts: false,
            stopped: false,
            peer_timeout_ns: u64::from(config.peer_timeout_s) * 1_000_000_000,
        }
    }

    /// The network of the control connection may fail, and others carry on: that it does not answer any more is no evidence, nor that it is reset, as
    /// it is by a peer for whom it had failed before.
    pub fn outlasts_its_connection(&mut self) {
        self.outlasts = true;
    }

    /// Whether the control connection is lost: nothing of it tells that the peer is gone.
    pub fn has_lost_its_connection(&self) -> bool {
        self.outlasts && !self.control.is_open()
    }

    /// Whether the handshake is complete, as far as was read.
    pub fn confirmed(&self) -> bool {
        self.control.confirmed()
    }

    /// Watches the process that the fabric has proven.
    pub fn set_process(&mut self, process: &Arc<Process>) {
        if self.process.as_ref().is_none_or(|known| !Arc::ptr_eq(known, process)) {
            self.process = Some(process.clone());
        }
    }

    /// A poll found something.
    #[inline]
    pub fn busy(&mut self) {
        self.idle_since = 0;
        self.silent_since = 0;
    }

    /// The peer's silence until now is not held against it.
    pub fn reset_silence(&mut self) {
        self.silent_since = 0;
    }

    /// Whether somebody waits for the peer, until this is said again: the silence of one that nobody waits for means nothing.
    #[inline]
    pub fn set_waited_for(&mut self, waited: bool) {
        self.is_waited_for = waited;
        if !waited {
            self.busy();
        }
    }

    /// Looks at the peer's process, whenever that was last done. Some if it is gone, or its connection: how one knows.
    pub fn condition(&mut self, now: u64) -> Option<String> {
        self.look_at_process(now);
        self.ended.map(|(_, why)| self.describe(why))
    }

    /// Names the descriptor that becomes readable when the peer's process ends. False: there is none, or its end is not all that is to be looked for.
    pub fn watch(&self, mut watch: impl FnMut(RawFd)) -> bool {
        let process = self.process.as_ref().filter(|_| !self.control.is_open() && self.peer_timeout_ns == 0);
        process.and_then(|process| process.fd()).map(&mut watch).is_some()
    }

    /// Whether the peer was seen to be gone.
    pub fn ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Whether the peer's process was stopped when last checked.
    #[inline]
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// A poll found nothing. Most of the time, this is all.
    #[inline]
    pub fn idle(&mut self) -> Verdict {
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(CLOCK_EVERY) { self.look(clock::now()) } else { Verdict::NotChecked }
    }

    /// One of many polls that found nothing.
    #[cold]
    pub fn look(&mut self, now: u64) -> Verdict {
        if self.idle_since == 0 {
            self.idle_since = now;
        }
        if self.silent_since == 0 && self.is_waited_for {
            self.silent_since = now;
        }
        if now.saturating_sub(self.checked_at) < CHECK_NS {
            return Verdict::NotChecked;
        }
        self.checked_at = now;
        match self.read_control() {
            Ok(None) => {}
            Ok(Some(why)) => self.ended = self.ended.or(Some((now, why))),
            Err(what) => return Verdict::ProtocolError(what.into()),
        }
        self.look_at_process(now);
        match self.ended {
            Some((since, why)) if now.saturating_sub(since.max(self.idle_since)) >= GRACE_NS => return Verdict::Gone(self.describe(why)),
            _ => {}
        }
        if self.peer_timeout_ns > 0 && self.silent_since > 0 && now.saturating_sub(self.silent_since) >= self.peer_timeout_ns {
            let seconds = self.peer_timeout_ns / 1_000_000_000;
            let state = if self.stopped { "its process is stopped" } else { "it is slow or hangs" };
            return Verdict::Gone(format!("no progress for {seconds} s (RAILHEAD_PEER_TIMEOUT_S): {state}"));
        }
        Verdict::Checked
    }

    /// Queue pairs have failed. Whether the control connection may still tell why: a peer says there that it closes before it does.
    #[cold]
    pub fn may_explain(&mut self, now: u64) -> bool {
        if self.failed_since == 0 {
            self.failed_since = now;
        }
        self.explain().is_none() && now.saturating_sub(self.failed_since) < GRACE_NS
    }

    /// Whether the peer has said that it closes its comm, as far as was read.
    pub fn said_bye(&self) -> bool {
        self.control.said_bye()
    }

    /// What to say about a peer whose queue pairs fail: why, as far as known by now.
    #[cold]
    pub fn explain(&mut self) -> Option<String> {
        if let Ok(Some(why)) = self.read_control() {
            self.ended = self.ended.or(Some((clock::now(), why)));
        }
        self.look_at_process(clock::now());
        self.ended.map(|(_, why)| self.describe(why))
    }

    fn describe(&self, why: &str) -> String {
        if self.said_bye() { "it closed its comm".into() } else { why.to_owned() }
    }

    fn look_at_process(&mut self, now: u64) {
        let Some(process) = &self.process else { return };
        let state = process.state();
        self.stopped = state == ProcessState::Stopped;
        if state == ProcessState::Dead {
            self.ended = self.ended.or(Some((now, "its process died")));
        }
    }

    /// Reads what the peer said. `Some` if the connection has ended, `Err` for a protocol error.
    fn read_control(&mut self) -> std::result::Result<Option<&'static str>, &'static str> {
        if let Some(what) = self.broken {
            return Err(what);
        }
        if self.ended.is_some() {
            return Ok(None);
        }
        match self.control.read() {
            Ok(()) => Ok(None),
            // A peer that has closed with something unread has reset it.
            Err(End::Way(_)) if self.outlasts && !self.said_bye() => {
                self.control.lose();
                Ok(None)
            }
            Err(End::Way(why) | End::Peer(why)) => Ok(Some(why)),
            Err(End::Protocol(what)) => {
                self.broken = Some(what);
                Err(what)
            }
        }
    }

    /// Reads what the peer has said of its rails, and writes what could not be written before.
    ///
    /// Errors: what it sent that breaks the protocol.
    pub fn hear(&mut self, now: u64) -> std::result::Result<(), &'static str> {
        self.control.write();
        if let Some(why) = self.read_control()? {
            self.ended = Some((now, why));
        }
        Ok(())
    }

    /// The last that the peer has said of a rail on the control connection, as far as was read.
    pub fn said(&self, rail: usize) -> Said {
        self.control.said(rail)
    }

    /// Whether the ends can talk on the control connection, as far as is known.
    pub fn can_talk(&self) -> bool {
        self.control.is_open() && self.ended.is_none()
    }

    /// See [`ControlConnection::say_cell`].
    pub fn say_cell(&mut self, rail: usize, cell: &[u8; CELL_SIZE]) -> bool {
        self.control.say_cell(rail, cell)
    }

    /// See [`ControlConnection::say_bye`].
    pub fn say_bye(&mut self) {
        self.control.say_bye();
    }

    /// See [`ControlConnection::hang_up`].
    #[cold]
    pub fn hang_up(&mut self) {
        self.control.hang_up();
    }
}

#[cfg(test)]
impl Liveness {
    /// A silence of so many nanoseconds is the peer's end.
    pub fn set_peer_timeout_for_test(&mut self, time: u64) {
        self.peer_timeout_ns = time;
    }

    /// Writes bytes as the peer would never get them from an honest side.
    pub fn say_for_test(&mut self, bytes: &[u8]) {
        self.control.say_for_test(bytes);
    }
}

/// The cause that the stats page shows: a stopped peer explains every other wait.
#[inline]
pub fn cause(normal: WaitCause, stopped: bool) -> WaitCause {
    if stopped { WaitCause::PeerStopped } else { normal }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream as Socket};
    use std::time::Duration;

    use super::*;

    /// A watch over a connection, and its other end.
    fn watched() -> (Liveness, Socket) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = Socket::connect(listener.local_addr().unwrap()).unwrap();
        ours.set_nonblocking(true).unwrap();
        let peer = Peer { label: "the peer".into(), pid: None };
        (Liveness::new(Some(TcpStream::new(ours)), None, &peer, &Config::default()), listener.accept().unwrap().0)
    }

    /// Its verdicts until it knows, or no longer has, the connection.
    fn verdict(liveness: &mut Liveness) -> Verdict {
        let mut now = 1;
        loop {
            now += CHECK_NS;
            let verdict = liveness.look(now);
            if verdict != Verdict::Checked || !liveness.control.is_open() {
                return verdict;
            }
        }
    }

    #[test]
    fn a_reset_is_an_end_only_where_nothing_outlasts_the_connection() {
        for outlasts in [false, true] {
            let (mut liveness, theirs) = watched();
            if outlasts {
                liveness.outlasts_its_connection();
            }
            socket2::SockRef::from(&theirs).set_linger(Some(Duration::ZERO)).unwrap();
            drop(theirs);
            let found = verdict(&mut liveness);
            assert_eq!((found == Verdict::Checked, liveness.has_lost_its_connection()), (outlasts, outlasts), "{found:?}");
        }
    }

    #[test]
    fn a_connection_that_is_closed_is_an_end_for_all() {
        let (mut liveness, theirs) = watched();
        liveness.outlasts_its_connection();
        drop(theirs);
        let found = verdict(&mut liveness);
        assert!(matches!(found, Verdict::Gone(_)), "{found:?}");
    }
}
