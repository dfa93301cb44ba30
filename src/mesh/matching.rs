//! Which send to a rank goes into which of its receives: of one tag, the first to the first. Plain data under the lock of the mesh; [`super::pair`] feeds
//! it with what this rank sends and what the peer sends.

use std::collections::VecDeque;

use crate::base::error::{Error, Result};
use crate::link::duplex::Target;
use crate::link::limits::SLOTS;

use super::device::Part;
use super::ops::OpId;
use super::protocol::Tag;

/// Offers that a rank may have open at a time. (Announcements it may have as many as slots.)
pub const MAX_OFFERS: usize = 1024;

/// A message that this rank sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Send {
    /// The operation.
    pub op: OpId,
    /// Its tag.
    pub tag: Tag,
    /// Its bytes.
    pub part: Part,
}

/// A receive that the peer has advertised or offered.
#[derive(Debug, Clone, Copy)]
enum Recv {
    Ready(Target),
    Offered(u64),
}

/// What was not matched yet, and what was but has not been posted.
#[derive(Debug, Default)]
pub struct Matching {
    /// With the offer that a message has claimed.
    sends: VecDeque<(Send, Option<u64>)>,
    recvs: VecDeque<(Tag, Recv)>,
    matched: VecDeque<(Send, Target)>,
    claims: VecDeque<u64>,
}

impl Matching {
    /// Errors of this and the others: a message and a receive of different sizes.
    pub fn send(&mut self, send: Send) -> Result<()> {
        self.sends.push_back((send, None));
        self.matches(send.tag)
    }

    /// The peer advertises a receive.
    ///
    /// Errors: as above; more than it can have.
    pub fn recv_is_ready(&mut self, tag: Tag, target: Target) -> Result<()> {
        self.recv_ready(tag, Recv::Ready(target))
    }

    /// The peer offers one.
    ///
    /// Errors: as above.
    pub fn offered(&mut self, number: u64, tag: Tag) -> Result<()> {
        self.recv_ready(tag, Recv::Offered(number))
    }

    fn recv_ready(&mut self, tag: Tag, recv: Recv) -> Result<()> {
        if self.recvs.len() >= SLOTS + MAX_OFFERS {
            return Err(Error::remote("the peer advertised more receives than it has slots"));
        }
        self.recvs.push_back((tag, recv));
        self.matches(tag)
    }

    /// The peer has a place for the message that claimed its offer.
    ///
    /// Errors: as above; an offer that nothing has claimed.
    pub fn granted(&mut self, number: u64, target: Target) -> Result<()> {
        let at = self.claimed(number).ok_or_else(|| Error::remote("the peer granted what this rank has not claimed"))?;
        let Some((send, _)) = self.sends.remove(at) else { return Ok(()) };
        self.is_matched(send, target)?;
        self.matches(send.tag)
    }

    /// The peer takes an offer back.
    ///
    /// Errors: as above.
    pub fn withdrawn_offer(&mut self, number: u64) -> Result<()> {
        self.recvs.retain(|(_, recv)| !matches!(recv, Recv::Offered(other) if *other == number));
        let Some(at) = self.claimed(number) else { return Ok(()) };
        let Some((send, claim)) = self.sends.get_mut(at) else { return Ok(()) };
        *claim = None;
        let tag = send.tag;
        self.matches(tag)
    }

    /// The peer takes an advertised receive back: whether there is no message for it yet.
    pub fn withdraw(&mut self, sequence: u64) -> bool {
        let here = |recv: &Recv| matches!(recv, Recv::Ready(target) if target.sequence == sequence);
        let found = self.recvs.iter().position(|(_, recv)| here(recv));
        found.is_some_and(|at| self.recvs.remove(at).is_some())
    }

    /// This rank takes a message back: whether that goes, as nothing has come of it yet.
    pub fn cancel(&mut self, op: OpId) -> bool {
        let found = self.sends.iter().position(|(send, claim)| send.op == op && claim.is_none());
        found.is_some_and(|at| self.sends.remove(at).is_some())
    }

    /// Messages of collectives that no receive was told of for.
    pub fn unmatched(&self) -> impl Iterator<Item = Send> + '_ {
        self.sends.iter().map(|(send, _)| *send).filter(|send| send.tag.other_kind().is_some())
    }

    /// Whether a message waits for its receive.
    pub fn waits(&self) -> bool {
        !self.sends.is_empty()
    }

    /// The next message to post.
    pub fn next(&self) -> Option<(Send, Target)> {
        self.matched.front().copied()
    }

    /// It is posted.
    pub fn posted(&mut self) {
        self.matched.pop_front();
    }

    /// The next offer to claim.
    pub fn next_claim(&mut self) -> Option<u64> {
        self.claims.pop_front()
    }

    fn claimed(&self, number: u64) -> Option<usize> {
        self.sends.iter().position(|(_, claim)| *claim == Some(number))
    }

    /// Matches what there is of a tag. A message that has claimed an offer is not overtaken.
    fn matches(&mut self, tag: Tag) -> Result<()> {
        while let Some(at) = self.sends.iter().position(|(send, _)| send.tag == tag) {
            let Some(found) = self.recvs.iter().position(|(of, _)| *of == tag) else { break };
            let Some((send, claim)) = self.sends.get_mut(at).filter(|(_, claim)| claim.is_none()) else { break };
            let send = *send;
            match self.recvs.remove(found) {
                Some((_, Recv::Offered(number))) => {
                    *claim = Some(number);
                    self.claims.push_back(number);
                }
                Some((_, Recv::Ready(target))) => {
                    self.sends.remove(at);
                    self.is_matched(send, target)?;
                }
                None => break,
            }
        }
        Ok(())
    }

    fn is_matched(&mut self, send: Send, target: Target) -> Result<()> {
        let (ours, theirs) = (send.part.len, target.len);
        if ours as u64 != theirs {
            return Err(Error::usage(format!("it receives {theirs} bytes, {}: this rank sends {ours}", send.tag)));
        }
        self.matched.push_back((send, target));
        Ok(())
    }
}

#[cfg(test)]
impl Matching {
    /// Entries that it has.
    pub fn remembered(&self) -> usize {
        self.sends.len() + self.recvs.len() + self.matched.len() + self.claims.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::limits::MAX_RAILS;
    use crate::mesh::ops::{Asked, Ops, What};

    const TAG: Tag = Tag::User(7);

    fn target(sequence: u64) -> Target {
        Target { sequence, addr: 0x1000, len: 8, rkeys: [0; MAX_RAILS] }
    }

    /// So many messages.
    fn sends<const N: usize>() -> [Send; N] {
        let mut ops = Ops::default();
        let part = Part { addr: 0x2000, len: 8, lkeys: [0; MAX_RAILS], small: None };
        let asked = Asked { rank: Some(1), receives: false, what: What::Tagged(TAG) };
        std::array::from_fn(|_| Send { op: ops.insert(asked), tag: TAG, part })
    }

    /// Which messages go where.
    fn posted(matching: &mut Matching) -> Vec<(OpId, u64)> {
        let mut all = Vec::new();
        while let Some((send, target)) = matching.next() {
            all.push((send.op, target.sequence));
            matching.posted();
        }
        all
    }

    #[test]
    fn the_first_of_a_tag_goes_to_the_first() {
        let [a, b, c] = sends();
        let mut matching = Matching::default();
        matching.send(a).unwrap();
        matching.send(Send { tag: Tag::Collective(7), ..b }).unwrap();
        matching.recv_is_ready(Tag::User(8), target(1)).unwrap();
        assert_eq!(posted(&mut matching), []);
        matching.recv_is_ready(TAG, target(2)).unwrap();
        matching.recv_is_ready(TAG, target(3)).unwrap();
        matching.send(c).unwrap();
        matching.recv_is_ready(Tag::Collective(7), target(4)).unwrap();
        assert_eq!(posted(&mut matching), [(a.op, 2), (c.op, 3), (b.op, 4)]);
    }

    #[test]
    fn a_claim_holds_back_what_comes_later() {
        let [a, b] = sends();
        let mut matching = Matching::default();
        matching.offered(5, TAG).unwrap();
        matching.send(a).unwrap();
        matching.send(b).unwrap();
        assert_eq!((matching.next_claim(), matching.next_claim()), (Some(5), None));
        matching.recv_is_ready(TAG, target(1)).unwrap();
        assert_eq!(posted(&mut matching), [], "the second must not overtake the first");
        assert!(!matching.cancel(a.op), "its receiver may wait for it");
        matching.granted(5, target(2)).unwrap();
        assert_eq!(posted(&mut matching), [(a.op, 2), (b.op, 1)]);
        let error = matching.granted(5, target(3)).unwrap_err().to_string();
        assert!(error.contains("has not claimed"), "{error}");
    }

    #[test]
    fn an_offer_that_is_withdrawn_leaves_the_message_to_the_next_receive() {
        let [a, b] = sends();
        let mut matching = Matching::default();
        matching.offered(5, TAG).unwrap();
        matching.offered(6, TAG).unwrap();
        matching.send(a).unwrap();
        matching.send(b).unwrap();
        // Whose claim it was is the first again.
        matching.withdrawn_offer(5).unwrap();
        assert_eq!((matching.next_claim(), matching.next_claim(), matching.next_claim()), (Some(5), Some(6), None));
        matching.withdrawn_offer(6).unwrap();
        matching.recv_is_ready(TAG, target(1)).unwrap();
        assert_eq!(posted(&mut matching), [(a.op, 1)]);
        // One that nobody has claimed.
        matching.withdrawn_offer(77).unwrap();
    }

    #[test]
    fn what_is_taken_back_is_not_matched() {
        let [a, b] = sends();
        let mut matching = Matching::default();
        matching.send(a).unwrap();
        assert!(matching.cancel(a.op) && !matching.cancel(a.op));
        matching.recv_is_ready(TAG, target(1)).unwrap();
        assert!(matching.withdraw(1) && !matching.withdraw(1));
        matching.send(b).unwrap();
        assert_eq!(posted(&mut matching), []);
        matching.recv_is_ready(TAG, target(2)).unwrap();
        assert!(!matching.withdraw(2) && !matching.cancel(b.op), "it is on its way");
        assert_eq!(posted(&mut matching), [(b.op, 2)]);
    }

    #[test]
    fn other_sizes_and_too_many_receives_are_errors() {
        let [a] = sends();
        let mut matching = Matching::default();
        matching.recv_is_ready(TAG, Target { len: 9, ..target(1) }).unwrap();
        let error = matching.send(a).unwrap_err().to_string();
        assert_eq!(error, "it receives 9 bytes, tag 0x7: this rank sends 8");
        let mut ready = (0..2000).map(|i| matching.recv_is_ready(Tag::User(i + 100), target(i)));
        assert!(ready.any(|ready| ready.is_err()));
    }
}
