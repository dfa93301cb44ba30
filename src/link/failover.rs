//! What a link of several rails needs to go on without one of them: what each end says of a rail, what is under way on its queue pairs, and what of it
//! has to be sent again. Plain state; [`super::link`] moves it along (`link/rails.rs`), on the thread that drives the link.
//!
//! Immediates arrive on a queue pair in order, so of those that were posted on one that failed, a count tells which have landed. Each end counts, and
//! says the count once nothing can land any more. What it says is written into a *cell* of the peer's memory, by a WRITE over a live rail; while there is
//! none, the cell goes over the control connection, if there is one. A cell holds one number, which only grows: three per generation of the rail: its queue
//! pairs are reset for each ([`reset`](crate::fabric::QueuePair::reset)).
//!
//! | says | when | lets the peer |
//! |---|---|---|
//! | Up | its queue pairs are connected as this generation, with receives posted | probe the rail, then use it |
//! | Down, with counts | its queue pairs are in ERROR and drained | complete what has landed, and send the rest again |
//! | Settled | it has done that | begin the next generation |
//!
//! An end that says Down later than its peer does so because of the peer's. A generation that fails before it was used is gone through in the same way.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;

use crate::base::mem::Pages;

use super::limits::{MAX_QPS_PER_RAIL, MAX_RAILS, SLOT_SIZE};
use super::plan::Plan;
use super::wr_id::RequestId;

/// Bytes of a cell: `{u32 counts[8], 0, u64 word}`, word last.
pub const CELL_SIZE: usize = SLOT_SIZE;
const AT_WORD: usize = CELL_SIZE - 8;
const _: () = assert!(MAX_QPS_PER_RAIL * 4 <= AT_WORD);
/// Bytes of the cells of an end: for each rail, one per rail that the word may come over, so that no two are written by different queue pairs.
pub const CELLS_SIZE: usize = MAX_RAILS * MAX_RAILS * CELL_SIZE;

/// Nanoseconds until a rail that has failed is tried again, at first and at most: it doubles with each attempt in vain.
pub const FIRST_PAUSE_NS: u64 = 100_000_000;
/// See [`FIRST_PAUSE_NS`].
pub const LAST_PAUSE_NS: u64 = 10_000_000_000;
/// Nanoseconds that an attempt may take: a connection that is being made may wait for far longer on a network that says nothing.
pub const ATTEMPT_NS: u64 = 5_000_000_000;

/// In place of a rail: over the control connection.
pub const CONTROL: usize = usize::MAX;

/// What an end says of a rail, as a number that grows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Word(u64);

impl Word {
    /// Connected as this generation. What is true of generation 0 before anything was said.
    pub fn up(generation: u32) -> Word {
        Word(u64::from(generation) * 3)
    }

    /// Drained.
    pub fn down(generation: u32) -> Word {
        Word(u64::from(generation) * 3 + 1)
    }

    /// The peer's Down is dealt with.
    pub fn settled(generation: u32) -> Word {
        Word(u64::from(generation) * 3 + 2)
    }
}

/// Messages received on each queue pair of a rail, in the order of the rail's queue pairs. They wrap.
pub type Counts = [u32; MAX_QPS_PER_RAIL];

/// What a cell says: of a rail's last generation that has failed, how many messages have come.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Said {
    /// How far the peer is.
    pub word: Word,
    /// How many came.
    pub counts: Counts,
}

/// What the bytes of a cell say.
pub fn decode_cell(cell: &[u8; CELL_SIZE]) -> Said {
    let (counts, word) = cell.split_at(AT_WORD);
    let mut said = Said { word: Word(word.try_into().map_or(0, u64::from_le_bytes)), counts: [0; MAX_QPS_PER_RAIL] };
    for (count, bytes) in said.counts.iter_mut().zip(counts.chunks_exact(4)) {
        *count = bytes.try_into().map_or(0, u32::from_le_bytes);
    }
    said
}

/// The bytes of a cell.
pub fn encode_cell(word: Word, counts: &Counts) -> [u8; CELL_SIZE] {
    let mut out = [0; CELL_SIZE];
    out.chunks_exact_mut(4).zip(counts).for_each(|(out, count)| out.copy_from_slice(&count.to_le_bytes()));
    out.iter_mut().skip(AT_WORD).zip(word.0.to_le_bytes()).for_each(|(out, byte)| *out = byte);
    out
}

/// Where the cells are, and which end begins each generation of a rail.
pub struct Cells {
    /// The memory that the peer writes to.
    pages: Pages,
    /// Where in it they begin.
    here: usize,
    /// Where in the peer's.
    there: usize,
    /// This end does.
    pub connects: bool,
}

/// Place of the cell about a rail, over another one.
fn cell(via: usize, rail: usize) -> usize {
    (via * MAX_RAILS + rail) * CELL_SIZE
}

impl Cells {
    /// Behind what else the peers write to each other: `here` bytes of it in `pages`, `there` in the peer's memory. One of the ends `connects`.
    pub fn new(pages: &Pages, here: usize, there: usize, connects: bool) -> Cells {
        Cells { pages: pages.clone(), here, there, connects }
    }

    /// Offset in the peer's memory.
    pub fn remote(&self, via: usize, rail: usize) -> usize {
        self.there + cell(via, rail)
    }

    /// The last word about a rail. The pages belong to the peer: nothing that is read there is believed unchecked.
    pub fn word(&self, rails: usize, rail: usize) -> Word {
        self.last(rails, rail).0
    }

    /// The same, with the counts that came with it.
    pub fn said(&self, rails: usize, rail: usize) -> Said {
        let (word, via) = self.last(rails, rail);
        let at = |index: usize| self.here + cell(via, rail) + index / 2 * 8;
        // The word has been loaded, by an Acquire.
        let pair = |index: usize| u64::from_le(self.pages.load_u64(at(index), Ordering::Relaxed));
        Said { word, counts: std::array::from_fn(|index| (pair(index) >> (index % 2 * 32)) as u32) }
    }

    /// The last word about a rail, and which rail it came over.
    fn last(&self, rails: usize, rail: usize) -> (Word, usize) {
        // Pairs with the ordered publish of the peer's WRITE.
        let word = |via| u64::from_le(self.pages.load_u64(self.here + cell(via, rail) + AT_WORD, Ordering::Acquire));
        (0..rails).map(|via| (Word(word(via)), via)).max_by_key(|(word, _)| *word).unwrap_or((Word(0), 0))
    }
}

/// How far a rail is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Messages take it.
    Live,
    /// In ERROR: not everything was reported.
    Draining,
    /// Down was said, and the peer's is waited for.
    Down,
    /// Settled was said. The connecting end begins the next generation, after a pause; the other one when it hears that.
    Settled,
    /// Up was said, and the peer's is waited for.
    Connecting,
    /// WRITEs of nothing are under way on each queue pair: messages take it once they have arrived.
    Probing,
}

/// A rail.
pub struct Rail {
    /// Its generation.
    pub generation: u32,
    /// How far it is.
    pub phase: Phase,
    /// What the peer is to be told.
    pub word: Word,
    /// And the counts with it: of the last generation that has failed.
    pub counts: Counts,
    /// What was told, and over which rail, or [`CONTROL`].
    pub told: (Word, usize),
    /// Why it failed, and whether the log has that.
    pub why: String,
    pub is_logged: bool,
    /// When it failed, or was live again.
    pub since: u64,
    /// Since when the peer's host has not answered on it; 0 while it does.
    pub unanswered_since: u64,
    /// When the last attempt began, or failed.
    pub begun_at: u64,
    /// When it is tried again, and after which pause then.
    pub retry_at: u64,
    pub pause: u64,
}

/// What consumes a receive of the peer's, and so is counted there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Posted {
    /// A stripe of a message, which may go over any rail.
    Stripe(RequestId, u8),
    /// A message into a slot that stands open, with its value: it keeps its place among all that is ordered.
    Notification(RequestId, u32),
    /// So does a control message, with its number, or a credit alone: the id of its WRITE, which was signaled, or not.
    Control(RequestId, Option<u16>, bool),
}

impl Posted {
    /// Of a message that is done with it.
    pub fn id(self) -> RequestId {
        match self {
            Posted::Stripe(id, _) | Posted::Notification(id, _) | Posted::Control(id, ..) => id,
        }
    }
}

/// What is under way on a queue pair, and has been.
pub struct Traffic {
    /// What is under way, oldest first.
    pub sent: VecDeque<Posted>,
    /// How much of it the peer has, of this generation.
    pub done: u32,
    /// What came, of this generation.
    pub received: u32,
    /// The probe has arrived.
    pub probed: bool,
}

/// What is needed to send a message again.
#[derive(Clone, Copy)]
pub struct Sent {
    /// Its request.
    pub id: RequestId,
    /// See [`super::sends::Message`].
    pub sequence: u64,
    pub addr: usize,
    pub remote_addr: u64,
    pub rkeys: [u32; MAX_RAILS],
    pub lkeys: [u32; MAX_RAILS],
    /// How it was cut.
    pub plan: Plan,
}

/// Everything about the rails of a link.
pub struct Failover {
    pub rails: Vec<Rail>,
    /// By queue pair.
    pub traffic: Vec<Traffic>,
    pub cells: Cells,
    /// Of messages, by the low byte of their request. No room at an end that sends none.
    pub messages: Vec<Option<Sent>>,
    /// Stripes to be sent again.
    pub lost: VecDeque<(RequestId, u8)>,
    /// What is ordered and to be sent again, in order, and before anything else that is.
    pub lost_in_order: VecDeque<Posted>,
    /// What was found to have landed, of an end both ways: it has no caller that asks.
    pub landed: VecDeque<RequestId>,
    /// Something has landed since rails were last live again: of the generations that have failed since.
    pub has_landed: bool,
    /// The rail of what is ordered.
    pub ordered_rail: usize,
    /// What is ordered goes on another queue pair since this was last asked.
    pub ordered_moved: bool,
}

impl Failover {
    /// Of so many rails and queue pairs, all live. `depth`: what is under way on a queue pair at most. `messages`: requests at most, if this end sends.
    pub fn new(cells: Cells, rails: usize, qps: usize, depth: usize, messages: usize, now: u64) -> Failover {
        let rail = || Rail {
            generation: 0,
            phase: Phase::Live,
            word: Word::up(0),
            counts: [0; MAX_QPS_PER_RAIL],
            told: (Word::up(0), 0),
            why: String::new(),
            is_logged: false,
            since: now,
            unanswered_since: 0,
            begun_at: 0,
            retry_at: 0,
            pause: FIRST_PAUSE_NS,
        };
        let traffic = || Traffic { sent: VecDeque::with_capacity(depth), done: 0, received: 0, probed: false };
        Failover {
            rails: std::iter::repeat_with(rail).take(rails).collect(),
            traffic: std::iter::repeat_with(traffic).take(qps).collect(),
            cells,
            messages: Vec::with_capacity(messages),
            lost: VecDeque::new(),
            lost_in_order: VecDeque::new(),
            landed: VecDeque::new(),
            has_landed: false,
            ordered_rail: 0,
            ordered_moved: false,
        }
    }

    /// What was told over a rail, or [`CONTROL`], may be lost: whether anything was.
    pub fn tell_again(&mut self, via: usize) -> bool {
        let told = self.rails.iter_mut().filter(|it| it.told.1 == via && it.told.0 != Word::up(0));
        told.map(|it| it.told.0 = Word::up(0)).count() > 0
    }

    /// Whether anything has landed since rails were last live again, or nothing is there that could.
    pub fn has_moved(&self) -> bool {
        let landed = self.traffic.iter().any(|it| it.done != 0 || it.received != 0);
        self.has_landed || landed || (self.has_sent_again() && self.traffic.iter().all(|it| it.sent.is_empty()))
    }

    /// How far a rail is.
    pub fn phase(&self, rail: usize) -> Phase {
        self.rails.get(rail).map_or(Phase::Draining, |rail| rail.phase)
    }

    /// Whether messages take it.
    pub fn is_live(&self, rail: usize) -> bool {
        self.phase(rail) == Phase::Live
    }

    /// Whether it has failed, and nothing was begun since: nothing is expected of its queue pairs.
    pub fn is_down(&self, rail: usize) -> bool {
        matches!(self.phase(rail), Phase::Draining | Phase::Down | Phase::Settled)
    }

    /// Something was posted on a queue pair; on none if no rail is left.
    #[inline]
    pub fn posted(&mut self, qp: usize, what: Posted) {
        match self.traffic.get_mut(qp) {
            Some(it) => it.sent.push_back(what),
            None => self.lose(what),
        }
    }

    /// It has to be sent again, before all that has to already: that was lost, or ordered, later.
    pub fn lose(&mut self, what: Posted) {
        match what {
            Posted::Stripe(id, stripe) => self.lost.push_front((id, stripe)),
            Posted::Notification(..) | Posted::Control(..) => self.lost_in_order.push_front(what),
        }
    }

    /// The oldest on a queue pair of which a completion tells has arrived: a message, or if that was a `control` message's, the oldest one that was signaled.
    /// So has what was posted before it.
    #[inline]
    pub fn arrived(&mut self, qp: usize, control: bool) {
        let Some(it) = self.traffic.get_mut(qp) else { return };
        while let Some(what) = it.sent.pop_front() {
            it.done = it.done.wrapping_add(1);
            let is_told = match what {
                Posted::Control(.., signaled) => control && signaled,
                Posted::Stripe(..) | Posted::Notification(..) => !control,
            };
            if is_told {
                return;
            }
        }
    }

    /// A completion has told of so many unsignaled requests on a queue pair, which are control messages.
    #[inline]
    pub fn arrived_unsignaled(&mut self, qp: usize, count: u16) {
        let Some(it) = self.traffic.get_mut(qp) else { return };
        for _ in 0..count {
            if !matches!(it.sent.front(), Some(Posted::Control(.., false))) {
                return;
            }
            it.sent.pop_front();
            it.done = it.done.wrapping_add(1);
        }
    }

    /// Something was received on a queue pair.
    #[inline]
    pub fn received(&mut self, qp: usize) {
        if let Some(it) = self.traffic.get_mut(qp) {
            it.received = it.received.wrapping_add(1);
        }
    }

    /// A probe has arrived.
    pub fn probed(&mut self, qp: usize) {
        if let Some(it) = self.traffic.get_mut(qp) {
            it.probed = true;
        }
    }

    /// What has to be known of a message to send it again.
    #[inline]
    pub fn remember(&mut self, message: Sent) {
        let at = (message.id.0 & 0xff) as usize;
        // Within the capacity: what was never used takes no memory.
        if at >= self.messages.len() && at < self.messages.capacity() {
            self.messages.resize(at + 1, None);
        }
        if let Some(place) = self.messages.get_mut(at) {
            *place = Some(message);
        }
    }

    /// A message that is under way.
    pub fn message(&self, id: RequestId) -> Option<Sent> {
        let message = *self.messages.get((id.0 & 0xff) as usize)?;
        message.filter(|message| message.id == id)
    }

    /// Whether everything is as it should be, and nothing has to be done.
    pub fn is_calm(&self) -> bool {
        self.has_sent_again() && self.rails.iter().all(|rail| rail.phase == Phase::Live && rail.told.0 == rail.word)
    }

    /// Whether it only waits for the time to try a rail again, or for the peer to.
    pub fn waits(&self) -> bool {
        let waits = |rail: &Rail| matches!(rail.phase, Phase::Live | Phase::Settled) && rail.told.0 == rail.word;
        self.has_sent_again() && self.rails.iter().all(waits)
    }

    /// Whether nothing of what a failed rail took with it is left to be dealt with.
    fn has_sent_again(&self) -> bool {
        self.lost.is_empty() && self.lost_in_order.is_empty() && self.landed.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_grow_and_cells_come_back() {
        assert!(Word::up(0) < Word::down(0) && Word::down(0) < Word::settled(0) && Word::settled(0) < Word::up(1));
        assert!(Word::settled(u32::MAX) > Word::down(u32::MAX));
        let pages = Pages::new(100 * 64 + CELLS_SIZE).unwrap();
        let cells = Cells::new(&pages, 100 * 64, 7 * 64, true);
        assert_eq!(cells.said(8, 3), Said::default(), "nothing was written");
        let counts = [1, 2, u32::MAX, 4, 5, 6, 7, 0x8000_0000];
        for (via, word) in [(2, Word::down(9)), (5, Word::settled(9))] {
            let bytes = encode_cell(word, &counts);
            pages.write(100 * 64 + (cells.remote(via, 3) - 7 * 64), &bytes);
            assert_eq!((cells.word(8, 3), cells.said(8, 3)), (word, Said { word, counts }), "over {via}");
            assert_eq!(decode_cell(&bytes), Said { word, counts });
        }
        assert_eq!(cells.word(5, 3), Word::down(9), "of five rails");
        assert_eq!(cells.word(8, 2), Word::up(0), "about another one");
        assert_eq!(cells.remote(7, 7) + CELL_SIZE, 7 * 64 + CELLS_SIZE);
    }
}
