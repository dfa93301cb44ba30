//! Control messages of a [`Duplex`](super::Duplex): 64 bytes, in order, both ways. On the thread that drives the link.
//!
//! One is WRITTEN into the next place of a ring in the peer's memory, with an immediate that names slot 255 and acks how many of the peer's were read;
//! so nobody writes into a place that was not read, and none ever waits for a receive. A side that only reads returns its credit alone.

use crate::base::stats::CommCounter;
use crate::fabric::{Opcode, Payload};

use super::super::incoming::{Imm, RECORDS_SIZE, Records};
use super::super::limits::{CONTROL_SIZE, CONTROLS, SLOTS};
use super::super::queue_pairs::Wr;
use super::super::wr_id::{RequestId, WrKind};
use super::super::{Link, Posted};

/// What the immediate of a control message names.
pub const CONTROL_SLOT: u8 = 255;
const _: () = assert!(CONTROL_SLOT as usize == SLOTS - 1);
/// The bit of its value for a control message; without it, it is a credit alone. Below it, how many of the peer's were read.
const CONTROL_BIT: u32 = 1 << 16;
/// Messages read after which a side that has none to send returns the credit.
const CREDIT_EVERY: u16 = CONTROLS as u16 / 2;
/// Where the ring begins in the memory that the peer writes to: behind the completion records.
const RING: usize = RECORDS_SIZE;
/// No request has it.
pub const NO_REQUEST: RequestId = RequestId(0);
/// That of the last message: none has it either.
const LAST: RequestId = RequestId(1);

/// Both directions. The counters wrap.
#[derive(Debug, Default)]
pub struct ControlRing {
    /// What was sent and may be lost with a rail, by its place; empty where nothing goes on without one.
    kept: Box<[[u8; CONTROL_SIZE]]>,
    sent: u16,
    /// Of them, how many the peer has read.
    acked: u16,
    read: u16,
    /// How many the peer knows to be read.
    acked_back: u16,
    last: Last,
}

/// How far the last message is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Last {
    /// There is none, or it is through.
    #[default]
    None,
    /// The next one is the last.
    ToSend,
    /// It is on its way.
    Sent,
}

impl ControlRing {
    /// Of a link that goes on without a rail, or does not.
    pub fn new(goes_on: bool) -> ControlRing {
        ControlRing { kept: vec![[0; CONTROL_SIZE]; if goes_on { CONTROLS } else { 0 }].into(), ..ControlRing::default() }
    }

    /// Sends one. False: no place now. On a queue pair that takes nothing it counts as sent, as one that is flushed; the link fails then.
    pub fn send(&mut self, link: &mut Link, bytes: &[u8; CONTROL_SIZE]) -> bool {
        // One place is kept for the last one, which nobody would send again.
        let most = if self.last == Last::ToSend { CONTROLS } else { CONTROLS - 1 };
        if usize::from(self.sent.wrapping_sub(self.acked)) >= most || link.room_in_order() == 0 {
            return false;
        }
        if let Some(kept) = self.kept.get_mut(usize::from(self.sent) % CONTROLS) {
            *kept = *bytes;
        }
        let id = if self.last == Last::ToSend { LAST } else { NO_REQUEST };
        self.post(link, bytes, Some(self.sent), id);
        self.sent = self.sent.wrapping_add(1);
        true
    }

    /// Sends one again, or a credit, in its place of the order.
    pub fn send_again(&mut self, link: &mut Link, number: Option<u16>, id: RequestId) {
        let kept = number.and_then(|number| self.kept.get(usize::from(number) % CONTROLS).copied());
        self.post(link, kept.as_ref().map_or(&[], |kept| kept), number, id);
    }

    /// The same, for the last one.
    pub fn send_last(&mut self, link: &mut Link, bytes: &[u8; CONTROL_SIZE]) -> bool {
        self.last = Last::ToSend;
        let sent = self.send(link, bytes);
        if self.last == Last::ToSend {
            self.last = Last::None;
        }
        sent
    }

    /// Whether the last one that was sent is still on its way.
    pub fn last_is_under_way(&self) -> bool {
        self.last == Last::Sent
    }

    /// A WRITE of one is done.
    #[inline]
    pub fn completed(&mut self, id: RequestId) {
        if self.last == Last::Sent && id == LAST {
            self.last = Last::None;
        }
    }

    /// A message or a credit is here, with this value: the message.
    pub fn received(&mut self, link: &mut Link, records: &Records, value: u32) -> Option<[u8; CONTROL_SIZE]> {
        let acked = value as u16;
        if acked.wrapping_sub(self.acked) > self.sent.wrapping_sub(self.acked) {
            link.protocol_error(format_args!("a credit of {acked} control messages, {} of {} were left", self.acked, self.sent));
            return None;
        }
        self.acked = acked;
        if value & CONTROL_BIT == 0 {
            return None;
        }
        if usize::from(self.read.wrapping_sub(self.acked_back)) >= CONTROLS {
            link.protocol_error(format_args!("more than {CONTROLS} control messages at a time"));
            return None;
        }
        link.stats.add(CommCounter::Bytes, CONTROL_SIZE as u64);
        let mut bytes = [0; CONTROL_SIZE];
        records.pages().read(place(self.read), &mut bytes);
        self.read = self.read.wrapping_add(1);
        Some(bytes)
    }

    /// Acks what was read, if that has been long to come.
    #[inline]
    pub fn return_credit(&mut self, link: &mut Link) {
        if self.read.wrapping_sub(self.acked_back) >= CREDIT_EVERY && link.room_in_order() > 0 {
            self.post(link, &[], None, NO_REQUEST);
        }
    }

    /// Posts a message, or a credit without a number. There is room.
    fn post(&mut self, link: &mut Link, bytes: &[u8], number: Option<u16>, id: RequestId) {
        let (place, bit) = number.map_or((RING, 0), |number| (place(number), CONTROL_BIT));
        let imm = Imm::Whole(bit | u32::from(self.read)).encode(CONTROL_SLOT);
        let qp = link.qps.ordered();
        let wr = Wr { opcode: Opcode::WriteWithImm, payload: Payload::Inline(bytes), remote: link.qps.remote(qp, place), imm };
        let posted = link.qps.post_send(qp, [wr], WrKind::Control, id, id == LAST);
        let is_signaled = !link.qps.has_unsignaled(qp);
        match link.posted(qp, Posted::Control(id, number, is_signaled), posted) {
            Ok(()) => {
                self.acked_back = self.read;
                if id == LAST {
                    self.last = Last::Sent;
                }
            }
            Err(error) => link.post_failed(WrKind::Control, qp, error),
        }
        link.stats.add(CommCounter::Bytes, bytes.len() as u64);
    }
}

/// Where the message with this number is.
fn place(number: u16) -> usize {
    RING + usize::from(number) % CONTROLS * CONTROL_SIZE
}
