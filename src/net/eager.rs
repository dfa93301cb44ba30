//! Eager messages: short ones that go out before their receive was announced, so that they cost one WRITE instead of two. Both ends'
//! bookkeeping, without the fabric. Used by the threads that drive the two comms.
//!
//! A comm has one *eager tag*, that of its first receive. Receives with this tag are numbered in the order of their posting, and so are the
//! messages with it: message `i` is for receive `i`, whoever knows of what by then.
//!
//! * **Receiver.** Once it has announced a receive of at most `most` bytes alone, it says nothing of those like it that follow: they are
//!   *quiet*. Every other receive is announced, with how many eager-tagged ones were posted before it ([`super::cts_fifo::Slot::first`]).
//! * **Sender.** While the last announcement that it took was of such a receive, it does not wait for the next one: a short message goes to
//!   the receiver's eager ring, with its number. Longer ones wait. An announced receive whose number is below that of the next message has been
//!   served already.
//! * The receiver copies an eager message to its receive, or keeps it in the ring until that is posted. The ring has [`EAGER_SLOTS`]; how
//!   many were emptied comes back with every [`RETURN_EVERY`]th, in the FIFO's last line, as does how many receives were posted, if one of
//!   them has waited for [`TELL_NS`]: a longer message may wait for it, and is cut to it.
//!
//! An announcement that an eager message serves is one that the sender may not have read when its slot could be used again. So both stop,
//! the receiver being quiet and the sender going ahead, while half a lap of announcements or more was served since the last message that was
//! written to an announced place.
//!
//! Numbers are modulo 2^32, and shorter on the wire. Those that stand still while others go on are pulled along.

use super::cts_fifo::Credit;
use super::mr_cache::MrHandle;
use super::request::{MAX_REQUESTS, RequestId};

/// Longest eager message: what every fabric carries in one piece, and a slot of the ring.
pub const EAGER_SIZE: usize = 64;
/// Slots of the eager ring.
pub const EAGER_SLOTS: usize = 64;
/// Slots that are given back at once.
const RETURN_EVERY: u32 = EAGER_SLOTS as u32 / 2;
/// Nanoseconds that a quiet receive waits before the sender is told of it. Far longer than a message takes, and no longer than a mistake
/// of the caller's may cost.
pub const TELL_NS: u64 = 1_000_000;
/// Receives with the eager tag that can be looked up: no more are outstanding.
const PLACES: usize = MAX_REQUESTS;
/// Bits of a number in an announcement.
pub const FIRST_BITS: u32 = 24;
/// No receive that is spoken of is further behind the next message, or further ahead.
const WINDOW: u32 = 2 * PLACES as u32;
/// Receives after which the sender is told of their number in any case: it compares numbers that are less than half of 2^32 apart.
const REMIND_EVERY: u32 = 1 << 30;

/// How far `a` is ahead of `b`.
#[inline]
fn ahead(a: u32, b: u32) -> i32 {
    a.wrapping_sub(b) as i32
}

/// The number nearest to `near` of which only the lowest `bits` are known.
#[inline]
fn nearest(near: u32, low: u32, bits: u32) -> u32 {
    let shift = 32 - bits;
    near.wrapping_add_signed((low.wrapping_sub(near) << shift) as i32 >> shift)
}

/// The sender's side.
pub struct Outbox {
    /// Longest eager message; 0: there are none.
    most: usize,
    tag: Option<u32>,
    /// The last announcement was of a receive that quiet ones follow.
    willing: bool,
    /// The next message is for a quiet receive, whatever its length.
    forced: bool,
    /// Messages with the tag.
    numbered: u32,
    /// Eager messages.
    sent: u32,
    credit: Credit,
    /// Receives with the tag that announcements told of.
    known: u32,
}

impl Outbox {
    /// One that has sent nothing. `most` as agreed.
    pub fn new(most: usize) -> Outbox {
        Outbox { most, tag: None, willing: false, forced: false, numbered: 0, sent: 0, credit: Credit::default(), known: 0 }
    }

    /// Whether a message of `len` bytes may go before its receive is announced, and with how many bytes. `close`: less than half a lap of
    /// announcements was taken since one was written to.
    #[inline(always)]
    pub fn takes(&self, len: usize, tag: u32, close: bool) -> Option<usize> {
        let fits = self.willing && close && len <= self.most || self.forced;
        (fits && self.tag == Some(tag) && ahead(self.sent, self.credit.taken) < EAGER_SLOTS as i32).then_some(len.min(self.most))
    }

    /// Whether [`Outbox::credit`] may change what [`Outbox::takes`] says.
    #[inline]
    pub fn wants_credit(&self, tag: u32) -> bool {
        self.willing && self.tag == Some(tag)
    }

    /// Takes over what the receiver says, if nothing is announced. False for what no correct receiver says.
    pub fn credit(&mut self, credit: Credit) -> bool {
        if ahead(credit.taken, self.credit.taken) < 0 || ahead(credit.taken, self.sent) > 0 {
            return false;
        }
        self.credit = credit;
        self.forced |= self.awaited(credit);
        true
    }

    /// Whether there are receives that no message was sent to, by what the receiver says. It may have said it long ago.
    pub fn awaited(&self, credit: Credit) -> bool {
        self.forced || (1..=WINDOW as i32).contains(&ahead(credit.posted, self.numbered))
    }

    /// Number and slot of the next eager message, which is being sent.
    #[inline]
    pub fn next(&self) -> (u32, usize) {
        (self.numbered, self.sent as usize % EAGER_SLOTS)
    }

    /// It was sent.
    #[inline]
    pub fn sent(&mut self) {
        self.sent = self.sent.wrapping_add(1);
        self.numbered = self.numbered.wrapping_add(1);
        self.forced = false;
        if ahead(self.numbered, self.known) > WINDOW as i32 {
            self.known = self.numbered.wrapping_sub(WINDOW);
        }
    }

    /// A message was sent to an announced receive.
    #[inline(always)]
    pub fn sent_directly(&mut self, tag: u32) {
        if self.tag == Some(tag) {
            self.numbered = self.numbered.wrapping_add(1);
        }
    }

    /// Whether messages are to be counted.
    #[inline(always)]
    pub fn counts(&self) -> bool {
        self.most > 0
    }

    /// A group of receives with these tags and lengths has been announced, `first` as it says.
    #[inline]
    pub fn announced(&mut self, first: u32, group: impl Iterator<Item = (u32, u64)>) -> Announced {
        let first = nearest(self.numbered, first, FIRST_BITS);
        let far = ahead(first, self.numbered);
        if ahead(first, self.known) < 0 || !(-(WINDOW as i32)..=PLACES as i32).contains(&far) {
            return Announced::Nonsense(first);
        }
        if far > 0 {
            // Quiet ones were posted before it.
            self.forced = true;
            return Announced::Later;
        }
        let (mut number, mut served, mut len, mut willing) = (first, 0, 0, false);
        for (i, (tag, size)) in group.enumerate() {
            let ours = *self.tag.get_or_insert(tag) == tag;
            if ours {
                served |= u8::from(ahead(self.numbered, number) > 0) << i;
                number = number.wrapping_add(1);
            }
            willing = ours && size <= self.most as u64;
            len = i + 1;
        }
        self.known = number;
        self.willing = willing && len == 1;
        self.forced = false;
        Announced::Served(served)
    }
}

/// What an announcement means for the sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Announced {
    /// It is its turn. Bits: which of its receives were served before it was seen.
    Served(u8),
    /// Quiet receives come before it.
    Later,
    /// A number that no correct receiver sends.
    Nonsense(u32),
}

/// A receive with the eager tag.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// Its number.
    pub number: u32,
    /// Nothing has come for it, as far as eager messages go.
    pub open: bool,
    /// Of an announced one, the announcement's sequence number.
    pub announced: Option<u64>,
    /// The request of a quiet one.
    pub request: RequestId,
    /// First byte.
    pub addr: usize,
    /// Bytes.
    pub len: u32,
    /// The registration that covers it.
    pub mr: MrHandle,
}

/// An eager message that has landed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Arrival {
    /// Its number.
    pub number: u32,
    /// Bytes.
    pub len: u8,
    /// Slot of the ring.
    pub slot: u8,
}

/// The receiver's side.
pub struct Inbox {
    most: usize,
    tag: Option<u32>,
    /// The last announcement was of a receive that quiet ones may follow.
    quiet: bool,
    /// There was such a one, so eager messages may come from now on.
    began: bool,
    /// Receives with the tag posted.
    posted: u32,
    /// Quiet ones that nothing has come for.
    waiting: u32,
    /// One more than the number of the last quiet one.
    quiet_end: u32,
    /// Up to which the sender knows, by announcements or credits; and by the last credit.
    told: u32,
    said: u32,
    /// Eager messages that have landed, those that were copied, and those whose slots were given back.
    arrived: u32,
    taken: u32,
    returned: u32,
    /// One more than the number of the last eager message.
    expected: u32,
    /// What lies in the ring.
    ring: [Arrival; EAGER_SLOTS],
    /// By number; there once a quiet receive may be. Fills during the first lap.
    places: Vec<Place>,
    /// Since when the sender should be told; 0: it need not, as far as looked.
    since: u64,
    polls: u32,
}

impl Inbox {
    /// One that nothing has come for. `most` as agreed.
    pub fn new(most: usize) -> Inbox {
        Inbox {
            most,
            tag: None,
            quiet: false,
            began: false,
            posted: 0,
            waiting: 0,
            quiet_end: 0,
            told: 0,
            said: 0,
            arrived: 0,
            taken: 0,
            returned: 0,
            expected: 0,
            ring: [Arrival::default(); EAGER_SLOTS],
            places: Vec::with_capacity(if most > 0 { PLACES } else { 0 }),
            since: 0,
            polls: 0,
        }
    }

    /// Whether the next receive may be one that needs no announcement, whatever its tag.
    #[inline(always)]
    pub fn may_skip(&self) -> bool {
        self.quiet || self.taken != self.arrived
    }

    /// Whether receives are to be counted.
    #[inline(always)]
    pub fn counts(&self) -> bool {
        self.most > 0
    }

    /// Whether a receive has the eager tag.
    #[inline(always)]
    pub fn has(&self, tag: u32) -> bool {
        self.tag == Some(tag)
    }

    /// The message that has come for the next receive with the tag.
    #[inline]
    pub fn come(&self) -> Option<Arrival> {
        let first = *self.ring.get(self.taken as usize % EAGER_SLOTS)?;
        (self.taken != self.arrived && first.number == self.posted).then_some(first)
    }

    /// Whether a receive of `len` bytes with the tag needs no announcement.
    #[inline]
    pub fn may_be_quiet(&self, len: usize) -> bool {
        self.quiet && len <= self.most
    }

    /// Receives with the tag posted so far, as an announcement says it.
    #[inline]
    pub fn first(&self) -> u32 {
        self.posted & ((1 << FIRST_BITS) - 1)
    }

    /// Where the receive numbered `number` is noted, or another of its turn.
    #[inline]
    fn place(&mut self, number: u32) -> Option<&mut Place> {
        self.places.get_mut(number as usize % PLACES)
    }

    /// Whether the next `n` receives with the tag can be noted. `landed` says of an announced one whether its message has come.
    #[inline]
    pub fn has_room(&self, n: u32, landed: impl Fn(u64) -> bool) -> bool {
        (0..n).all(|i| match self.places.get(self.posted.wrapping_add(i) as usize % PLACES) {
            Some(place) if place.open => place.announced.is_some_and(&landed),
            _ => true,
        })
    }

    /// A receive of the caller's is posted, the next with the tag: quiet if it has a request, announced with its sequence number otherwise.
    #[inline]
    pub fn post(&mut self, announced: Option<u64>, request: RequestId, addr: usize, len: usize, mr: MrHandle) {
        let number = self.posted;
        self.posted = number.wrapping_add(1);
        if ahead(self.posted, self.expected) > WINDOW as i32 {
            self.expected = self.posted.wrapping_sub(WINDOW);
        }
        if announced.is_none() {
            self.waiting += 1;
            self.quiet_end = self.posted;
            (self.since, self.polls) = (0, 0);
        } else {
            self.told = self.posted;
            if !self.began {
                return;
            }
        }
        let place = Place { number, open: true, announced, request, addr, len: len as u32, mr };
        let at = number as usize % PLACES;
        while self.places.len() <= at {
            self.places.push(Place { open: false, ..place });
        }
        if let Some(old) = self.place(number) {
            *old = place;
        }
    }

    /// A group was announced whose last receive has this length and tag.
    #[inline(always)]
    pub fn announced(&mut self, n: usize, tag: u32, len: usize) {
        if self.most == 0 {
            return;
        }
        self.quiet = n == 1 && len <= self.most && *self.tag.get_or_insert(tag) == tag;
        self.began |= self.quiet;
    }

    /// The eager tag, which the first receive's becomes.
    #[inline(always)]
    pub fn tag(&mut self, first: u32) -> Option<u32> {
        if self.most == 0 { None } else { Some(*self.tag.get_or_insert(first)) }
    }

    /// An eager message has landed in `slot`. False for what no correct sender sends.
    pub fn arrive(&mut self, slot: u8, low_number: u16, len: usize) -> bool {
        let number = nearest(self.posted, u32::from(low_number), 16);
        let far = ahead(number, self.posted);
        let fits = self.most > 0
            && len <= self.most
            && usize::from(slot) == self.arrived as usize % EAGER_SLOTS
            && (self.arrived.wrapping_sub(self.taken) as usize) < EAGER_SLOTS
            && ahead(number, self.expected) >= 0
            && (-(PLACES as i32)..EAGER_SLOTS as i32).contains(&far);
        if fits {
            if let Some(place) = self.ring.get_mut(usize::from(slot)) {
                *place = Arrival { number, len: len as u8, slot };
            }
            self.arrived = self.arrived.wrapping_add(1);
            self.expected = number.wrapping_add(1);
        }
        fits
    }

    /// The next message that can be copied, and where to. An error if there is no such receive, or it had its message.
    pub fn deliver(&mut self) -> Result<Option<(Arrival, Place)>, Arrival> {
        let Some(first) = self.ring.get(self.taken as usize % EAGER_SLOTS).copied() else { return Ok(None) };
        if self.taken == self.arrived || ahead(first.number, self.posted) >= 0 {
            return Ok(None);
        }
        let found = self.place(first.number).filter(|place| place.open && place.number == first.number);
        let Some(place) = found else { return Err(first) };
        place.open = false;
        let place = *place;
        if place.announced.is_none() {
            self.waiting -= 1;
            (self.since, self.polls) = (0, 0);
        }
        self.taken = self.taken.wrapping_add(1);
        Ok(Some((first, place)))
    }

    /// The message of [`Inbox::come`] was copied to a receive that is never posted.
    pub fn took(&mut self) {
        self.taken = self.taken.wrapping_add(1);
        self.posted = self.posted.wrapping_add(1);
    }

    /// Whether slots are to be given back.
    #[inline]
    pub fn owes(&self) -> bool {
        self.taken.wrapping_sub(self.returned) >= RETURN_EVERY || self.posted.wrapping_sub(self.said) >= REMIND_EVERY
    }

    /// Whether the sender does not know of a quiet receive that waits.
    #[inline(always)]
    pub fn keeps_quiet(&self) -> bool {
        self.waiting > 0 && ahead(self.quiet_end, self.told) > 0
    }

    /// A poll has found nothing while [`Inbox::keeps_quiet`]: whether it is time to look at the clock.
    #[inline]
    pub fn polled(&mut self, every: u32) -> bool {
        self.polls = self.polls.wrapping_add(1);
        self.polls.is_multiple_of(every)
    }

    /// Whether the sender is to be told at `now`.
    pub fn is_overdue(&mut self, now: u64) -> bool {
        if self.since == 0 {
            self.since = now.max(1);
        }
        now.saturating_sub(self.since) >= TELL_NS
    }

    /// What to tell the sender.
    #[inline]
    pub fn news(&self) -> Credit {
        Credit { taken: self.taken, posted: self.posted }
    }

    /// The sender was told.
    #[inline]
    pub fn told(&mut self) {
        self.returned = self.taken;
        (self.told, self.said) = (self.posted, self.posted);
        (self.since, self.polls) = (0, 0);
    }
}

/// What tests need to see and to set.
#[cfg(test)]
impl Outbox {
    pub fn sent_for_test(&self) -> u32 {
        self.sent
    }

    /// As if there had been `n` of everything.
    pub fn begin_at_for_test(&mut self, n: u32) {
        (self.numbered, self.sent, self.known) = (n, n, n.wrapping_sub(WINDOW));
        self.credit = Credit { taken: n, posted: n };
    }
}

#[cfg(test)]
impl Inbox {
    /// As [`Outbox::begin_at_for_test`].
    pub fn begin_at_for_test(&mut self, n: u32) {
        (self.posted, self.quiet_end, self.told, self.said) = (n, n, n, n);
        self.expected = n.wrapping_sub(WINDOW);
        (self.arrived, self.taken, self.returned) = (n, n, n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_known_by_its_lowest_bits() {
        for near in [0u32, 5, 1 << 15, 1 << 16, 1 << 23, 1 << 24, 1 << 31, u32::MAX - 3] {
            for off in [-255i32, -1, 0, 1, 63, 319] {
                let number = near.wrapping_add_signed(off);
                assert_eq!(nearest(near, number & 0xffff, 16), number, "{near} {off}");
                assert_eq!(nearest(near, number & ((1 << FIRST_BITS) - 1), FIRST_BITS), number, "{near} {off}");
            }
        }
    }
}
