//! What the lock of a mesh guards: the pairs, what they are asked for, and why the mesh has failed.

use std::collections::VecDeque;
use std::os::fd::RawFd;

use crate::base::error::{Error, Result};
use crate::link::Failure;
use crate::link::driver::Driven;
use crate::link::duplex::Unconnected;

use super::device::{Part, Place};
use super::matching::MAX_OFFERS;
use super::ops::{Asked, OpId, Ops, Outcome, What};
use super::pair::{Pair, PairEvent, fits};
use super::protocol::Tag;
use super::small::{Ranks, SmallMessages, other_length};

/// Another rank.
pub enum Peer {
    /// Nothing was done about it. This rank itself is so for ever.
    Absent,
    /// It may be told the address of this end.
    Unconnected(Box<Unconnected>),
    /// It is connected.
    Here(Box<Pair>),
    /// It is lost, and why.
    Lost(Failure),
}

/// A receive from any of several ranks, which none has claimed.
pub(super) struct AnyRecv {
    pub(super) op: OpId,
    pub(super) tag: Tag,
    place: Place,
    pub(super) ranks: Vec<usize>,
    /// The number under which they were offered it.
    number: Option<u64>,
}

/// Whether something waits for a rank that its pair does not know of.
fn waits_for_any(small: &SmallMessages, any: &VecDeque<AnyRecv>, rank: usize) -> bool {
    small.waits_for(rank) || any.iter().any(|recv| recv.ranks.contains(&rank))
}

/// Polls that find nothing, per look at what is waited for.
const LOOK_EVERY: u32 = 64;

/// All of it.
pub struct Core {
    rank: usize,
    /// By rank.
    pub peers: Vec<Peer>,
    /// To ranks that are lost, and may be writing to memory of this one's.
    leaving: Vec<Pair>,
    /// Those that were connected, in order: what is polled, where most of many ranks never are.
    connected: Vec<usize>,
    /// What was asked for.
    pub ops: Ops,
    /// Why nothing goes any more.
    pub failed: Option<Failure>,
    /// A rank that was lost before its part was done, and how this one has learnt of it: no collective comes to its end without it.
    gone: Option<(usize, Failure)>,
    /// Somebody has waited in vain until others have heard that this one goes: nobody does again.
    pub unheard: bool,
    /// It was closed.
    pub closed: bool,
    /// In order; only the first are offered.
    pub(super) any: VecDeque<AnyRecv>,
    offers: u64,
    pub(super) small: SmallMessages,
    events: Vec<PairEvent>,
    /// Threads that wait for something.
    pub(super) waiters: usize,
    /// Only the remainder matters.
    idle_polls: u32,
    /// The stats page may show waits.
    pub(super) shows_waits: bool,
}

impl Core {
    /// A rank's, of so many, none of them connected.
    pub fn new(rank: usize, size: usize) -> Core {
        Core {
            rank,
            peers: (0..size).map(|_| Peer::Absent).collect(),
            leaving: Vec::new(),
            connected: Vec::new(),
            ops: Ops::default(),
            failed: None,
            gone: None,
            unheard: false,
            closed: false,
            any: VecDeque::new(),
            offers: 0,
            small: SmallMessages::new(size),
            events: Vec::new(),
            waiters: 0,
            idle_polls: 0,
            shows_waits: false,
        }
    }

    /// Errors: the mesh has failed.
    pub fn check(&self) -> Result<()> {
        self.failed.as_ref().map_or(Ok(()), |failure| Err(failure.error()))
    }

    /// Errors: the same; a rank is lost, if it is a collective's message.
    pub(super) fn check_all(&self, tag: Tag) -> Result<()> {
        match tag {
            Tag::Collective(_) => self.check_ranks(),
            _ => self.check(),
        }
    }

    /// Errors: the mesh has failed; a rank was lost before its part was done.
    pub fn check_ranks(&self) -> Result<()> {
        self.check()?;
        self.gone.as_ref().map_or(Ok(()), |(_, failure)| Err(failure.error()))
    }

    /// A rank is connected now.
    pub fn set_connected(&mut self, rank: usize, pair: Pair) {
        if let Some(peer) = self.peers.get_mut(rank) {
            *peer = Peer::Here(Box::new(pair));
            if let Err(at) = self.connected.binary_search(&rank) {
                self.connected.insert(at, rank);
            }
        }
    }

    /// A rank that is connected.
    ///
    /// Errors: one that is not, or there is not.
    pub fn pair(&mut self, rank: usize) -> Result<&mut Pair> {
        self.pair_and_ops(rank).map(|(pair, _)| pair)
    }

    /// The same, for what ends operations.
    pub fn pair_and_ops(&mut self, rank: usize) -> Result<(&mut Pair, &mut Ops)> {
        let size = self.peers.len();
        match self.peers.get_mut(rank) {
            Some(Peer::Here(pair)) => Ok((pair, &mut self.ops)),
            Some(Peer::Lost(failure)) => Err(failure.error()),
            Some(_) if rank == self.rank => {
                Err(Error::usage(format!("rank {rank} is this rank; only others can be sent to or received from")))
            }
            Some(_) => Err(Error::usage(format!("rank {rank} is not connected"))),
            None => Err(Error::usage(format!("there is no rank {rank}; there are 0 to {}", size.saturating_sub(1)))),
        }
    }

    /// Notes an operation and has it posted.
    ///
    /// Errors: the mesh has failed; what `post` says.
    pub fn start(&mut self, asked: Asked, post: impl FnOnce(&mut Core, OpId) -> Result<()>) -> Result<OpId> {
        if let What::Tagged(tag) = asked.what {
            self.check_all(tag)?;
        }
        self.check()?;
        if let Some(rank) = asked.rank {
            self.wait_begins(rank);
        }
        let id = self.ops.insert(asked);
        post(self, id).inspect_err(|_| self.ops.forget(id))?;
        Ok(id)
    }

    fn wait_begins(&mut self, rank: usize) {
        let waits = waits_for_any(&self.small, &self.any, rank);
        if let Some(Peer::Here(pair)) = self.peers.get_mut(rank) {
            pair.wait_begins(waits);
        }
    }

    /// Starts to send to a rank.
    ///
    /// Errors: one that is not connected, or is lost; the mesh has failed.
    pub fn send(&mut self, rank: usize, tag: Tag, part: Part) -> Result<OpId> {
        self.start(Asked { rank: Some(rank), receives: false, what: What::Tagged(tag) }, |core, op| {
            let (pair, ops) = core.pair_and_ops(rank)?;
            pair.send(op, tag, part, ops).map_err(|error| named(rank, error))
        })
    }

    /// Starts a receive from whichever of these ranks has a message first.
    ///
    /// Errors: a rank that is not connected; all are lost; the mesh has failed.
    pub fn recv(&mut self, ranks: &[usize], tag: Tag, place: Place) -> Result<OpId> {
        self.check()?;
        fits(place.len)?;
        let what = What::Tagged(tag);
        // What a rank has sent before it was lost is received.
        let is_here = |core: &Core, rank: usize| tag.is_small(place.len) && core.small.is_here(rank, tag);
        if let &[rank] = ranks {
            if !is_here(self, rank) {
                self.pair(rank)?;
            }
            return self.start(Asked { rank: Some(rank), receives: true, what }, |core, op| core.recv_one(op, rank, tag, place));
        }
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        ranks.dedup();
        let lost = |core: &Core, rank: &usize| matches!(core.peers.get(*rank), Some(Peer::Lost(_)));
        for rank in &ranks {
            if !lost(self, rank) {
                self.pair(*rank)?;
            }
        }
        let first = ranks.first().copied();
        ranks.retain(|rank| !lost(self, rank) || is_here(self, *rank));
        match (ranks.as_slice(), first) {
            ([], None) => Err(Error::usage("a receive from no rank")),
            ([], Some(first)) => self.pair(first).and(Err(Error::internal("a rank that is lost is here"))),
            (&[rank], _) => self.recv(&[rank], tag, place),
            _ => {
                ranks.iter().for_each(|rank| self.wait_begins(*rank));
                self.start(Asked { rank: None, receives: true, what }, |core, op| core.recv_any(op, ranks, tag, place))
            }
        }
    }

    fn recv_one(&mut self, op: OpId, rank: usize, tag: Tag, place: Place) -> Result<()> {
        if tag.is_small(place.len) {
            return self.recv_small(op, Ranks::One(rank), tag, place.len);
        }
        // Behind one that is not offered yet it waits its turn, as that one's message may be this rank's.
        if self.any.iter().any(|recv| recv.number.is_none() && recv.tag == tag && recv.ranks.contains(&rank)) {
            return self.recv_any(op, vec![rank], tag, place);
        }
        self.pair(rank)?.recv(op, tag, place).map_err(|error| named(rank, error))
    }

    fn recv_any(&mut self, op: OpId, ranks: Vec<usize>, tag: Tag, place: Place) -> Result<()> {
        if tag.is_small(place.len) {
            return self.recv_small(op, Ranks::Any(ranks), tag, place.len);
        }
        self.any.push_back(AnyRecv { op, tag, place, ranks, number: None });
        self.offer();
        Ok(())
    }

    fn recv_small(&mut self, op: OpId, ranks: Ranks, tag: Tag, len: usize) -> Result<()> {
        let one = if let Ranks::One(rank) = ranks { Some(rank) } else { None };
        match self.small.recv(op, tag, len, ranks, &mut self.ops) {
            Ok(None) => {
                // It is not among those that are here, which is all that the rank had sent when it said so.
                if let (Some(rank), Some(other)) = (one, tag.other_kind())
                    && let Some(sent) = self.pair(rank).ok().and_then(|pair| pair.unmatched_there(other))
                {
                    self.misfit(rank, &other_length(sent as usize, tag, len));
                }
                match one {
                    Some(rank) => self.send_wanted(rank, tag),
                    None => (0..self.peers.len()).for_each(|rank| self.send_wanted(rank, tag)),
                }
            }
            Ok(from) => self.received_small(from, tag),
            Err((rank, error)) => self.misfit(rank, &error),
        }
        Ok(())
    }

    /// A message and its receive do not fit: whoever waits for the rank hears of it from the next poll.
    #[cold]
    fn misfit(&mut self, rank: usize, error: &Error) {
        if let Ok(pair) = self.pair(rank) {
            pair.fail(error);
        } else if self.failed.is_none() {
            // It was lost after it had sent. The others learn that this rank has come to an end.
            self.failed = Some(Failure::from_error(&Error::usage(format!("rank {rank}: {error}"))));
            self.send_byes();
        }
    }

    /// A small message was received that was here.
    pub(super) fn received_small(&mut self, from: Option<usize>, tag: Tag) {
        self.send_received(from, tag);
        if let Some(rank) = from {
            self.send_wanted(rank, tag);
        }
    }

    /// Tells a rank that its small messages were received, if it has to know.
    fn send_received(&mut self, rank: Option<usize>, tag: Tag) {
        if let Some(rank) = rank
            && let Some(number) = self.small.credit(rank, tag)
            && let Ok(pair) = self.pair(rank)
        {
            // A rank that is lost is noticed by the next poll.
            let _ = pair.send_received(tag, number);
        }
    }

    /// Tells a rank that has no room for more small messages which of this tag's kind are waited for.
    fn send_wanted(&mut self, rank: usize, tag: Tag) {
        while let Some(tag) = self.small.wants(rank, tag.kind()) {
            if let Ok(pair) = self.pair(rank) {
                // As above.
                let _ = pair.send_wanted(tag);
            }
        }
    }

    /// Offers what was not offered, as far as may be. A rank that is lost meanwhile is noticed by the next poll.
    fn offer(&mut self) {
        let Core { any, peers, offers, .. } = self;
        for recv in any.iter_mut().take(MAX_OFFERS).filter(|recv| recv.number.is_none()) {
            *offers += 1;
            recv.number = Some(*offers);
            for rank in &recv.ranks {
                if let Some(Peer::Here(pair)) = peers.get_mut(*rank) {
                    let _ = pair.offer(*offers, recv.tag);
                }
            }
        }
    }

    /// A rank has a message for an offer. One that was withdrawn meanwhile is nothing.
    fn claimed(&mut self, by: usize, number: u64) {
        let Some(at) = self.any.iter().position(|recv| recv.number == Some(number) && recv.ranks.contains(&by)) else { return };
        let Some(recv) = self.any.remove(at) else { return };
        self.ops.is_with(recv.op, by);
        for rank in recv.ranks {
            if let Some(Peer::Here(pair)) = self.peers.get_mut(rank) {
                let _ = if rank == by { pair.grant(recv.op, number, recv.tag, recv.place) } else { pair.withdraw_offer(number) };
            }
        }
        self.offer();
    }

    /// What came from a rank that is not for its pair alone.
    fn on_event(&mut self, rank: usize, event: PairEvent) {
        match event {
            PairEvent::Claimed(number) => self.claimed(rank, number),
            PairEvent::Message(tag, small) => match self.small.arrived(rank, tag, small, &mut self.ops) {
                Ok(received) => {
                    if received {
                        self.send_received(Some(rank), tag);
                    }
                    self.send_wanted(rank, tag);
                }
                Err(error) => self.misfit(rank, &error),
            },
            PairEvent::Unmatched(tag, sent) => {
                if let Some(len) = tag.other_kind().and_then(|other| self.small.waits(rank, other)) {
                    self.misfit(rank, &other_length(sent as usize, tag, len));
                }
            }
        }
    }

    /// Takes an operation back, if nothing has come of it. It ends then.
    pub fn cancel(&mut self, op: OpId) {
        if self.small.cancel(op) {
            return self.ops.end(op, Outcome::Cancelled);
        }
        if let Some(recv) = self.any.iter().position(|recv| recv.op == op).and_then(|at| self.any.remove(at)) {
            for rank in recv.ranks {
                if let (Some(Peer::Here(pair)), Some(number)) = (self.peers.get_mut(rank), recv.number) {
                    let _ = pair.withdraw_offer(number);
                }
            }
            self.ops.end(op, Outcome::Cancelled);
            return self.offer();
        }
        let Some(Asked { rank: Some(rank), .. }) = self.ops.asked(op) else { return };
        if let Ok((pair, ops)) = self.pair_and_ops(rank) {
            // A peer that is lost is noticed by the next poll.
            let _ = pair.cancel(op, ops);
        }
    }

    /// Tells all ranks that this one goes, and for which other one if it has lost one.
    pub fn send_byes(&mut self) {
        let gone = self.gone.as_ref().map(|(rank, _)| *rank);
        for peer in &mut self.peers {
            if let Peer::Here(pair) = peer {
                pair.send_bye(gone);
            }
        }
    }

    /// A rank is lost, and with it the mesh if something waits for it. A collective does in any case, unless the rank has `left` when its part was done.
    /// `ours`: the fault is this rank's, and nobody else is told of that one.
    fn lost(&mut self, rank: usize, left: Option<Option<usize>>, ours: bool, failure: Failure) {
        let done = left == Some(None);
        if !done && !ours && self.gone.is_none() {
            // Of one that has left for another, that one is named.
            let first = left.flatten().filter(|first| *first < self.peers.len()).unwrap_or(rank);
            self.gone = Some((first, failure.clone()));
        }
        let Core { peers, ops, leaving, .. } = self;
        if let Some(peer) = peers.get_mut(rank)
            && let Peer::Here(mut pair) = std::mem::replace(peer, Peer::Lost(failure.clone()))
        {
            pair.give_up(ops);
            if pair.drop_waits() {
                leaving.push(*pair);
            }
        }
        let mut nobody_left = self.small.lost(rank);
        for recv in &mut self.any {
            recv.ranks.retain(|other| *other != rank);
            nobody_left |= recv.ranks.is_empty();
        }
        if self.failed.is_none()
            && (nobody_left || self.ops.pending().any(|asked| asked.rank == Some(rank) || !done && asked.is_collectives()))
        {
            self.failed = Some(failure);
            // Others may wait for this one, which has come to an end.
            self.send_byes();
        }
    }

    /// Gives up all ranks, so that they can be connected anew: what was asked for has failed. A mesh that was closed stays so.
    pub fn disconnect(&mut self, failure: &Failure) {
        self.ops.fail_all(failure);
        self.count();
        self.peers.fill_with(|| Peer::Absent);
        self.connected.clear();
        (self.gone, self.unheard) = (None, false);
        self.any.clear();
        self.events.clear();
        self.small = SmallMessages::new(self.peers.len());
        if !self.closed {
            self.failed = None;
        }
    }

    /// Whether a rank was lost before its part was done.
    pub fn has_lost(&self) -> bool {
        self.gone.is_some()
    }

    /// Whether all that ranks were sent before they were told that this one goes is through.
    pub fn byes_are_through(&mut self) -> bool {
        // Each is polled, also behind one that does not answer.
        self.peers.iter_mut().fold(true, |all, peer| match peer {
            Peer::Here(pair) => pair.bye_is_through() && all,
            _ => all,
        })
    }

    /// The ranks that are here, whether or not their queue pairs are connected.
    pub fn here(&self) -> Vec<usize> {
        let peers = self.peers.iter().enumerate();
        peers.filter(|(_, peer)| matches!(peer, Peer::Here(_))).map(|(rank, _)| rank).collect()
    }

    /// Has their queue pairs wake who sleeps on these descriptors while they connect.
    ///
    /// Errors: as for [`Pair::arm`].
    pub fn arm_all(&mut self, ranks: &[usize], fds: &mut Vec<RawFd>) -> Result<()> {
        for &rank in ranks {
            self.pair(rank)?.arm(false, |fd| fds.push(fd)).map_err(|error| named(rank, error))?;
        }
        fds.sort_unstable();
        fds.dedup();
        Ok(())
    }

    /// Leaves those of these ranks whose queue pairs are not connected.
    ///
    /// Errors: one cannot be, and is lost now, or is so already.
    pub fn poll_connecting(&mut self, ranks: &mut Vec<usize>) -> Result<()> {
        let mut failed = None;
        ranks.retain(|&rank| {
            failed.is_none() && {
                let connected = self.pair(rank).and_then(|pair| pair.poll_connected().map_err(|error| named(rank, error)));
                let waits = !matches!(connected, Ok(true));
                failed = connected.err().map(|error| (rank, error));
                waits
            }
        });
        let Some((rank, error)) = failed else { return Ok(()) };
        // It is not, where this one lacks what it takes.
        if let (Some(Peer::Here(_)), Error::Remote(_)) = (self.peers.get(rank), &error) {
            self.lost(rank, None, false, Failure::from_error(&error));
        }
        Err(error)
    }

    /// A mesh that is made over this one has lost a rank, if it has: so has this one, and says which when it gives up.
    pub fn lost_by(&mut self, other: &Core) {
        self.gone = self.gone.take().or_else(|| other.gone.clone());
    }
}

impl Driven for Core {
    fn links(&self) -> usize {
        self.peers.len()
    }

    fn poll(&mut self) -> bool {
        let (mut moved, mut lost) = (false, Vec::new());
        for at in 0..self.connected.len() {
            let Core { peers, connected, ops, events, small, any, .. } = self;
            let Some(&rank) = connected.get(at) else { break };
            let Some(Peer::Here(pair)) = peers.get_mut(rank) else { continue };
            let waits = waits_for_any(small, any, rank);
            let polled = pair.poll(ops, waits, events);
            let left = pair.left();
            if !self.events.is_empty() {
                let mut all = std::mem::take(&mut self.events);
                all.drain(..).for_each(|event| self.on_event(rank, event));
                self.events = all;
            }
            match polled {
                Ok(some) => moved |= some,
                Err(error) => {
                    moved = true;
                    let ours = matches!(error, Error::Internal(_) | Error::System { .. });
                    lost.push((left, rank, ours, Failure::from_error(&named(rank, error))));
                }
            }
        }
        if lost.len() > 1 {
            // Who has left may have done so for one that is gone.
            lost.sort_by_key(|(left, ..)| left.is_some());
        }
        lost.into_iter().for_each(|(left, rank, ours, failure)| self.lost(rank, left, ours, failure));
        self.count();
        if !moved {
            self.idle_polls = self.idle_polls.wrapping_add(1);
            if self.idle_polls.is_multiple_of(LOOK_EVERY) {
                self.note_waits();
            }
        }
        moved
    }

    fn arm(&mut self, fds: &mut Vec<RawFd>) -> Result<Option<u64>> {
        self.note_waits();
        let mut look: Option<u64> = None;
        for rank in 0..self.peers.len() {
            let waits = waits_for_any(&self.small, &self.any, rank);
            if let Some(Peer::Here(pair)) = self.peers.get_mut(rank) {
                let again = pair.arm(waits, |fd| fds.push(fd))?;
                look = look.into_iter().chain(again).min();
            }
        }
        fds.sort_unstable();
        fds.dedup();
        Ok(look)
    }

    fn needs_repoll(&mut self) -> bool {
        let again = |peer: &mut Peer| match peer {
            Peer::Here(pair) => pair.needs_repoll(),
            _ => false,
        };
        self.peers.iter_mut().any(again)
    }

    fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    fn ended(&self) -> u64 {
        self.ops.ended()
    }

    /// Fails the pairs of ranks that have sent small messages of a collective of which this rank waits for longer ones: none of those can be here by now.
    fn settled(&mut self) -> bool {
        let Core { small, peers, .. } = self;
        let mut failed = false;
        for (rank, tag, sent) in small.early() {
            if let (Some(Peer::Here(pair)), Some(other)) = (peers.get_mut(rank), tag.other_kind())
                && let Some(receives) = pair.receives(other)
            {
                pair.fail(&other_length(sent, tag, receives));
                failed = true;
            }
        }
        failed
    }

    fn waited_for(&mut self, waiters: usize) {
        self.waiters = waiters;
        if waiters == 0 {
            self.waits_over();
        }
    }

    /// Tells all ranks of messages of collectives that none of their receives is for.
    fn instead_of_arm(&mut self) {
        for peer in &mut self.peers {
            if let Peer::Here(pair) = peer {
                // A rank that is lost is noticed by the next poll.
                let _ = pair.send_unmatched();
            }
        }
    }
}

/// An error of this rank's.
pub fn named(rank: usize, error: Error) -> Error {
    error.within(&format!("rank {rank}"))
}

#[cfg(test)]
impl Core {
    /// Entries that it has of messages, receives and slots.
    pub fn remembered(&self) -> usize {
        let pairs: usize = self.peers.iter().map(|peer| if let Peer::Here(pair) = peer { pair.remembered() } else { 0 }).sum();
        pairs + self.any.len() + self.small.remembered() + self.ops.pending().count()
    }
}
