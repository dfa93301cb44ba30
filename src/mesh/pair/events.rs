//! What comes from the peer of a [`Pair`]: completions, messages, control messages, and its end. Under the lock of the mesh, on whichever thread drives it.

use crate::base::clock;
use crate::base::error::{Error, Result};
use crate::base::stats::Wait;
use crate::link::Failure;
use crate::link::duplex::Event;

use super::super::ops::{Ops, Outcome};
use super::super::protocol::Control;
use super::super::recvs::Open;
use super::{Pair, PairEvent};

/// How long they may take.
const ACKS_NS: u64 = 1_000_000_000;

impl Pair {
    /// Moves everything along; whether there was something to do. `events` gets what is for the mesh. `waits`: somebody waits for the peer whom it does
    /// not know of.
    ///
    /// Errors: a peer that is gone or breaks the protocol; a message and a receive of different sizes.
    pub fn poll(&mut self, ops: &mut Ops, waits: bool, events: &mut Vec<PairEvent>) -> Result<bool> {
        self.link.set_waited_for(self.outstanding > 0 || waits);
        let moved = self.link.poll(self.wait);
        if moved {
            self.wait = Wait::NONE;
        }
        let mut gone = None;
        while let Some(event) = self.link.next_event() {
            match event {
                Event::Sent(id) => {
                    let place = self.sent.get_mut((id.0 & 0xff) as usize);
                    if let Some((op, len)) = place.and_then(Option::take) {
                        self.ends(op, Outcome::Done { rank: self.rank, len: len as u64, small: None }, ops);
                    }
                }
                Event::Received { sequence, value } => self.received(sequence, value, ops)?,
                Event::Control(bytes) => match Control::decode(&bytes) {
                    Ok(Control::Bye(of)) => gone = Some(of),
                    Ok(Control::Message(tag, small)) => {
                        self.link.carried(small.len());
                        events.push(PairEvent::Message(tag, small));
                    }
                    Ok(Control::Claimed(number)) => events.push(PairEvent::Claimed(number)),
                    Ok(Control::Unmatched { tag, len, ready }) => {
                        if self.recvs.is_unmatched(tag, len, ready) {
                            events.push(PairEvent::Unmatched(tag, len));
                        }
                    }
                    Ok(control) => self.on_control(control, ops)?,
                    Err(what) => self.protocol_error(&what),
                },
            }
        }
        if let Some(of) = gone {
            self.has_left(of);
        }
        if let Some(of) = self.left {
            // What it has sent before may be on other queue pairs, and behind what they flush.
            let has_all = !moved || self.link.queue_pairs() == 1;
            if has_all && !self.awaits_acks() {
                let why = of.map_or(String::new(), |rank| format!(", as rank {rank} is lost"));
                return Err(Error::remote(format!("it has closed its mesh{why}")));
            }
            return Ok(moved);
        }
        if moved {
            self.flush_controls()?;
            self.post_small(ops)?;
            self.post()?;
            self.post_slots(ops)?;
        }
        self.link.check().map(|()| moved)
    }

    fn has_left(&mut self, of: Option<usize>) {
        (self.left, self.left_at) = (Some(of), clock::now());
        self.link.set_peer_left();
    }

    /// Somebody begins to wait for the peer: if nobody did before, its silence until now means nothing. `waits` as for [`Pair::poll`].
    #[inline]
    pub fn wait_begins(&mut self, waits: bool) {
        if self.outstanding == 0 && !waits {
            self.link.reset_silence();
        }
    }

    /// Whether a peer that has left as its part was done may still acknowledge what it has taken: on other queue pairs than that of its bye, the last of
    /// it as it closes them.
    pub(super) fn awaits_acks(&mut self) -> bool {
        self.left == Some(None)
            && self.link.queue_pairs() > 1
            && self.sent.iter().any(Option::is_some)
            && self.link.check().is_ok()
            && clock::now() < self.left_at + ACKS_NS
    }

    fn received(&mut self, sequence: u64, value: u64, ops: &mut Ops) -> Result<()> {
        match self.recvs.received(sequence) {
            Some(Open::Slot { slot, .. }) => {
                if let Some(op) = self.slots.arrived(slot) {
                    self.ends(op, Outcome::Done { rank: self.rank, len: 0, small: None }, ops);
                }
            }
            Some(Open::Once { tag, len, .. }) if value != len as u64 => {
                return Err(Error::usage(format!("it sent {value} bytes, {tag}: this rank receives {len}")));
            }
            Some(Open::Once { op, .. }) => self.ends(op, Outcome::Done { rank: self.rank, len: value, small: None }, ops),
            None => {}
        }
        Ok(())
    }

    fn on_control(&mut self, control: Control, ops: &mut Ops) -> Result<()> {
        match control {
            Control::RecvReady(tag, target) => {
                self.recvs_ready += 1;
                self.matching.recv_is_ready(tag, target)?;
            }
            Control::Offered(number, tag) => {
                self.recvs_ready += 1;
                self.matching.offered(number, tag)?;
            }
            Control::Received(kind, number) => self.small.get_mut(kind).map_or(Ok(()), |sends| sends.received(number))?,
            Control::Wanted(tag) => self.small.get_mut(tag.kind()).map_or(Ok(()), |sends| sends.wanted(tag))?,
            Control::Granted(number, target) => self.matching.granted(number, target)?,
            Control::WithdrawnOffer(number) => self.matching.withdrawn_offer(number)?,
            Control::Opened(slot, target) if self.slots.opened(slot, target) => {}
            Control::Withdraw(sequence) => {
                if self.matching.withdraw(sequence) || self.slots.withdraw(sequence) {
                    self.controls.push_back(Control::Withdrawn(sequence));
                }
            }
            Control::Withdrawn(sequence) => {
                let slots = &self.slots;
                let asked = |open: &Open| match open {
                    Open::Once { withdrawn, .. } => *withdrawn,
                    Open::Slot { slot, .. } => slots.is_closing(*slot),
                };
                let Some(open) = self.recvs.close(sequence, asked) else {
                    self.protocol_error("an answer to nothing");
                    return Ok(());
                };
                self.link.close(open.sequence());
                match open {
                    Open::Once { op, .. } => self.ends(op, Outcome::Cancelled, ops),
                    Open::Slot { slot, .. } => {
                        if let Some(op) = self.slots.give_incoming(slot) {
                            self.ends(op, Outcome::Cancelled, ops);
                        }
                    }
                }
            }
            Control::Opened(..) => self.protocol_error("a slot twice, or too many"),
            Control::Claimed(_) | Control::Message(..) | Control::Unmatched { .. } | Control::Bye(_) => {}
        }
        Ok(())
    }

    #[cold]
    pub(super) fn protocol_error(&mut self, what: &str) {
        self.link.fail(Failure::remote(format!("the peer sent {what}")));
    }

    /// Whether the peer has sent its bye, and for which rank that it has lost.
    pub fn left(&self) -> Option<Option<usize>> {
        self.left
    }

    /// Tells the peer that this rank goes, if there is a place for it: a peer that waits for it learns why. It may go for a rank that it has lost. Once is
    /// enough.
    pub fn send_bye(&mut self, gone: Option<usize>) {
        if !self.bye_sent && self.flush_controls().is_ok() && self.controls.is_empty() {
            self.bye_sent = self.link.send_last_control(&Control::Bye(gone).encode()).unwrap_or(false);
        }
    }

    /// Whether that, and all that was sent before, is through, or will never be.
    pub fn bye_is_through(&mut self) -> bool {
        // A peer that has it, or has said the same, may go at once: what a poll finds after that means nothing.
        if !self.is_done() {
            self.link.poll(Wait::NONE);
            while let Some(event) = self.link.next_event() {
                if let Event::Control(bytes) = event
                    && let Ok(Control::Bye(of)) = Control::decode(&bytes)
                {
                    self.has_left(of);
                }
            }
        }
        self.is_done() || self.link.check().is_err()
    }

    fn is_done(&mut self) -> bool {
        self.left.is_some() || self.bye_sent && self.link.last_control_is_through()
    }
}
