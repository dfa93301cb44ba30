//! Small messages: they travel inside a control message, before anybody asks for them, and wait at the receiver for whoever does. Plain data under the
//! lock of the mesh.
//!
//! Both ranks know that it is one: of a user's, by its length; of a collective's, by the tag. As many of a rank as [`MAX_EARLY`] may wait for their receives; who sends counts.

use std::collections::{HashSet, VecDeque};

use crate::base::error::{Error, Result};

use super::ops::{OpId, Ops, Outcome};
use super::protocol::{Small, Tag};

/// How many of one rank may wait for their receives: of collectives, and of users. So neither holds the other back.
pub const MAX_EARLY: u64 = 128;

/// For how many tags a receiver may say that it waits for one more, while there is no room for others.
pub const MAX_WANTED: usize = 1024;

/// A receive that waits.
#[derive(Debug)]
struct Recv {
    op: OpId,
    tag: Tag,
    len: usize,
    ranks: Ranks,
}

/// From whom.
#[derive(Debug)]
pub enum Ranks {
    /// This one.
    One(usize),
    /// Any of these.
    Any(Vec<usize>),
}

impl Ranks {
    /// Whether this is one of them.
    pub fn contain(&self, rank: usize) -> bool {
        match self {
            Ranks::One(one) => *one == rank,
            Ranks::Any(all) => all.contains(&rank),
        }
    }
}

/// Messages of a rank that nobody has asked for yet.
#[derive(Debug, Default)]
struct Early {
    messages: VecDeque<(Tag, Small)>,
    /// Those of collectives and of users that were asked for, and of which the rank was not told.
    matched: [u64; 2],
    /// Tags with which one more is to come, though there is no room for others.
    wanted: HashSet<Tag>,
}

impl Early {
    fn count(&mut self, tag: Tag) {
        if let Some(matched) = self.matched.get_mut(tag.kind()) {
            *matched += 1;
        }
    }

    /// The first with this tag, if it is as is asked.
    fn take(&mut self, tag: Tag, is_wanted: impl FnOnce(&Small) -> bool) -> Option<Small> {
        let at = self.messages.iter().position(|(of, _)| *of == tag)?;
        if !self.messages.get(at).is_some_and(|(_, small)| is_wanted(small)) {
            return None;
        }
        // Most are the first of all.
        let (_, small) = if at == 0 { self.messages.pop_front() } else { self.messages.remove(at) }?;
        self.count(tag);
        Some(small)
    }

    fn waiting(&self, kind: usize) -> u64 {
        self.messages.iter().filter(|(of, _)| of.kind() == kind).count() as u64
    }

    /// Whether the rank may send no more.
    fn is_full(&self, kind: usize) -> bool {
        let matched = self.matched.get(kind).copied().unwrap_or(0);
        self.messages.len() as u64 + matched >= MAX_EARLY && self.waiting(kind) + matched >= MAX_EARLY
    }
}

/// All of them.
#[derive(Debug)]
pub struct SmallMessages {
    recvs: VecDeque<Recv>,
    /// By rank.
    early: Vec<Early>,
}

impl SmallMessages {
    /// Among so many ranks.
    pub fn new(ranks: usize) -> SmallMessages {
        SmallMessages { recvs: VecDeque::new(), early: (0..ranks).map(|_| Early::default()).collect() }
    }

    /// Receives one: at once if it is here, and then it is said from whom.
    ///
    /// Errors: one that is here has another length, and is of the rank that is said.
    pub fn recv(
        &mut self,
        op: OpId,
        tag: Tag,
        len: usize,
        ranks: Ranks,
        ops: &mut Ops,
    ) -> std::result::Result<Option<usize>, (usize, Error)> {
        let all: &[usize] = match &ranks {
            Ranks::One(one) => std::slice::from_ref(one),
            Ranks::Any(all) => all,
        };
        for &rank in all {
            if let Some(small) = self.early.get_mut(rank).and_then(|early| early.take(tag, |_| true)) {
                return ends(op, rank, tag, len, small, ops).map(|()| Some(rank)).map_err(|error| (rank, error));
            }
        }
        self.recvs.push_back(Recv { op, tag, len, ranks });
        Ok(None)
    }

    /// Receives one of this length from a rank, if it is the first that is here with the tag.
    pub fn take(&mut self, rank: usize, tag: Tag, len: usize) -> Option<Small> {
        self.early.get_mut(rank)?.take(tag, |small| small.len() == len)
    }

    /// Whether a receive waits for this rank.
    pub fn waits_for(&self, rank: usize) -> bool {
        self.recvs.iter().any(|recv| recv.ranks.contain(rank))
    }

    /// The tag of a receive that a rank is to be told of, as it has no room for what was not asked for. It may send one with that tag then, unless it is told
    /// first of those that were received: then it forgets the tags.
    pub fn wants(&mut self, rank: usize, kind: usize) -> Option<Tag> {
        let early = self.early.get_mut(rank).filter(|early| early.is_full(kind))?;
        // Those that were taken back may have come, and wait. The rank takes no more tags at a time.
        let wanted = early.wanted.iter().filter(|tag| tag.kind() == kind).count();
        if wanted >= MAX_WANTED || early.waiting(kind) + wanted as u64 >= MAX_EARLY + MAX_WANTED as u64 {
            return None;
        }
        let waits = |recv: &&Recv| recv.tag.kind() == kind && recv.ranks.contain(rank) && !early.wanted.contains(&recv.tag);
        let tag = self.recvs.iter().find(waits)?.tag;
        early.wanted.insert(tag);
        Some(tag)
    }

    /// One is here: whether somebody waited for it.
    ///
    /// Errors: whoever waits for it waits for another length; more than may wait.
    pub fn arrived(&mut self, rank: usize, tag: Tag, small: Small, ops: &mut Ops) -> Result<bool> {
        let Some(early) = self.early.get_mut(rank) else { return Ok(false) };
        // An empty set still hashes.
        if !early.wanted.is_empty() {
            early.wanted.remove(&tag);
        }
        let waits = self.recvs.iter().position(|recv| recv.tag == tag && recv.ranks.contain(rank));
        match waits.and_then(|at| self.recvs.remove(at)) {
            Some(recv) => {
                early.count(tag);
                ends(recv.op, rank, tag, recv.len, small, ops).map(|()| true)
            }
            None if early.waiting(tag.kind()) >= MAX_EARLY + MAX_WANTED as u64 => {
                Err(Error::remote("the peer sent more small messages than may wait"))
            }
            None => {
                early.messages.push_back((tag, small));
                Ok(false)
            }
        }
    }

    /// How many of a rank's, of a tag's kind, were received of which it was not told, if it has to be: it is told then.
    pub fn credit(&mut self, rank: usize, tag: Tag) -> Option<u64> {
        let early = self.early.get_mut(rank)?;
        let matched = early.matched.get_mut(tag.kind()).filter(|matched| **matched >= MAX_EARLY / 4)?;
        early.wanted.retain(|wanted| wanted.kind() != tag.kind());
        Some(std::mem::take(matched))
    }

    /// The length that a receive from a rank waits for.
    pub fn waits(&self, rank: usize, tag: Tag) -> Option<usize> {
        self.recvs.iter().find(|recv| recv.tag == tag && recv.ranks.contain(rank)).map(|recv| recv.len)
    }

    /// Whether a rank has sent one with this tag that nobody has asked for.
    pub fn is_here(&self, rank: usize, tag: Tag) -> bool {
        self.early.get(rank).is_some_and(|early| early.messages.iter().any(|(of, _)| *of == tag))
    }

    /// Messages that nobody has asked for: of which rank, with which tag, and their lengths.
    pub fn early(&self) -> impl Iterator<Item = (usize, Tag, usize)> + '_ {
        self.early.iter().enumerate().flat_map(|(rank, early)| early.messages.iter().map(move |(tag, small)| (rank, *tag, small.len())))
    }

    /// The ranks of each receive from any of several.
    pub fn any(&self) -> impl Iterator<Item = (OpId, Tag, &[usize])> + '_ {
        self.recvs.iter().filter_map(|recv| match &recv.ranks {
            Ranks::One(_) => None,
            Ranks::Any(ranks) => Some((recv.op, recv.tag, ranks.as_slice())),
        })
    }

    /// Takes a receive back: whether it waited.
    pub fn cancel(&mut self, op: OpId) -> bool {
        let found = self.recvs.iter().position(|recv| recv.op == op);
        found.is_some_and(|at| self.recvs.remove(at).is_some())
    }

    /// A rank is lost: whether somebody waits for it and nobody else.
    pub fn lost(&mut self, rank: usize) -> bool {
        let mut alone = false;
        for recv in &mut self.recvs {
            alone |= match &mut recv.ranks {
                Ranks::One(one) => *one == rank,
                Ranks::Any(all) => {
                    all.retain(|other| *other != rank);
                    all.is_empty()
                }
            };
        }
        alone
    }
}

fn ends(op: OpId, rank: usize, tag: Tag, len: usize, small: Small, ops: &mut Ops) -> Result<()> {
    if small.len() != len {
        // Whoever waits for it waits for this rank now, which is about to be lost.
        ops.is_with(op, rank);
        return Err(other_length(small.len(), tag, len));
    }
    ops.end(op, Outcome::Done { rank, len: len as u64, small: Some(small) });
    Ok(())
}

/// A message and its receive differ.
#[cold]
pub fn other_length(sent: usize, tag: Tag, received: usize) -> Error {
    Error::usage(format!("it sent {sent} bytes, {tag}: this rank receives {received}"))
}

#[cfg(test)]
impl SmallMessages {
    /// Entries that it has.
    pub fn remembered(&self) -> usize {
        self.recvs.len() + self.early.iter().map(|early| early.messages.len() + early.wanted.len()).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::ops::{Asked, What};
    use crate::mesh::protocol::MAX_SMALL;

    const TAG: Tag = Tag::User(7);

    fn small(bytes: &[u8]) -> Small {
        Small::new(bytes.len(), |to| to.copy_from_slice(bytes)).unwrap()
    }

    fn op(ops: &mut Ops) -> OpId {
        ops.insert(Asked { rank: None, receives: true, what: What::Tagged(TAG) })
    }

    fn got(ops: &mut Ops, op: OpId) -> Option<(usize, Vec<u8>)> {
        match ops.take(op)? {
            Outcome::Done { rank, small: Some(small), .. } => Some((rank, small.bytes().to_vec())),
            _ => None,
        }
    }

    #[test]
    fn no_more_bytes_than_there_is_room_for() {
        assert!(Small::new(MAX_SMALL, |bytes| bytes.fill(1)).is_some() && Small::new(MAX_SMALL + 1, |_| ()).is_none());
        assert_eq!(small(b"").bytes(), b"");
    }

    #[test]
    fn messages_and_receives_match_in_order_whichever_comes_first() {
        let (mut all, mut ops) = (SmallMessages::new(3), Ops::default());
        let [a, b, c, d] = std::array::from_fn(|_| op(&mut ops));
        all.arrived(1, TAG, small(b"1"), &mut ops).unwrap();
        all.arrived(1, Tag::Collective(7), small(b"x"), &mut ops).unwrap();
        all.arrived(1, TAG, small(b"2"), &mut ops).unwrap();
        all.recv(a, TAG, 1, Ranks::One(1), &mut ops).unwrap();
        all.recv(b, TAG, 1, Ranks::Any(vec![0, 1]), &mut ops).unwrap();
        assert_eq!((got(&mut ops, a), got(&mut ops, b)), (Some((1, b"1".to_vec())), Some((1, b"2".to_vec()))));
        all.recv(c, TAG, 1, Ranks::Any(vec![0, 2]), &mut ops).unwrap();
        all.recv(d, TAG, 1, Ranks::One(2), &mut ops).unwrap();
        all.arrived(2, TAG, small(b"3"), &mut ops).unwrap();
        all.arrived(2, TAG, small(b"4"), &mut ops).unwrap();
        assert_eq!((got(&mut ops, c), got(&mut ops, d)), (Some((2, b"3".to_vec())), Some((2, b"4".to_vec()))));
        assert_eq!(all.early().collect::<Vec<_>>(), [(1, Tag::Collective(7), 1)]);
    }

    #[test]
    fn other_lengths_and_more_than_may_wait_are_errors() {
        let (mut all, mut ops) = (SmallMessages::new(2), Ops::default());
        let [a, b] = std::array::from_fn(|_| op(&mut ops));
        all.recv(a, TAG, 2, Ranks::One(1), &mut ops).unwrap();
        assert_eq!(all.waits(1, TAG), Some(2));
        let error = all.arrived(1, TAG, small(b"1"), &mut ops).unwrap_err().to_string();
        assert_eq!(error, "it sent 1 bytes, tag 0x7: this rank receives 2");
        all.arrived(1, TAG, small(b"1"), &mut ops).unwrap();
        let (rank, error) = all.recv(b, TAG, 2, Ranks::One(1), &mut ops).unwrap_err();
        assert_eq!((rank, error.to_string()), (1, "it sent 1 bytes, tag 0x7: this rank receives 2".into()));
        let mut sent = (0..2000).map(|_| all.arrived(1, TAG, small(b"1"), &mut ops));
        assert_eq!(sent.position(|sent| sent.is_err()), Some(MAX_EARLY as usize + MAX_WANTED));
    }

    #[test]
    fn who_sends_is_told_before_his_credit_is_used_up() {
        let (mut all, mut ops) = (SmallMessages::new(2), Ops::default());
        let mut told = 0;
        for _ in 0..1000 {
            let op = op(&mut ops);
            all.arrived(1, TAG, small(b"1"), &mut ops).unwrap();
            all.recv(op, TAG, 1, Ranks::One(1), &mut ops).unwrap();
            told += all.credit(1, TAG).unwrap_or(0);
        }
        assert!((1000 - MAX_EARLY / 4..=1000).contains(&told), "{told}");
        assert_eq!((all.credit(0, TAG), all.credit(1, Tag::Collective(7))), (None, None));
    }

    #[test]
    fn who_may_send_no_more_is_told_what_is_waited_for() {
        let (mut all, mut ops) = (SmallMessages::new(2), Ops::default());
        let (other, third) = (Tag::User(8), Tag::User(9));
        let [a, b, c] = std::array::from_fn(|_| op(&mut ops));
        all.recv(a, other, 1, Ranks::One(1), &mut ops).unwrap();
        for _ in 1..MAX_EARLY {
            all.arrived(1, TAG, small(b"1"), &mut ops).unwrap();
            assert_eq!(all.wants(1, TAG.kind()), None, "it has room");
        }
        all.arrived(1, TAG, small(b"1"), &mut ops).unwrap();
        all.recv(b, other, 1, Ranks::One(1), &mut ops).unwrap();
        all.recv(c, third, 1, Ranks::Any(vec![0, 1]), &mut ops).unwrap();
        assert_eq!((all.wants(1, TAG.kind()), all.wants(1, TAG.kind()), all.wants(1, TAG.kind())), (Some(other), Some(third), None));
        assert_eq!((all.wants(0, TAG.kind()), all.wants(1, 0)), (None, None));
        // One has come: there may be another.
        assert!(all.arrived(1, other, small(b"1"), &mut ops).unwrap());
        assert_eq!((all.wants(1, TAG.kind()), all.wants(1, TAG.kind())), (Some(other), None));
        // Once it is told of what was received, it has to be told again.
        for _ in 1..MAX_EARLY / 4 {
            let op = op(&mut ops);
            all.recv(op, TAG, 1, Ranks::One(1), &mut ops).unwrap();
        }
        assert!(all.credit(1, TAG).is_some() && all.wants(1, TAG.kind()).is_none());
        (1..MAX_EARLY / 4).for_each(|_| _ = all.arrived(1, TAG, small(b"1"), &mut ops).unwrap());
        assert_eq!((all.wants(1, TAG.kind()), all.wants(1, TAG.kind())), (Some(other), Some(third)));
    }

    /// Though those that were received leave room for more.
    #[test]
    fn who_may_send_no_more_is_told_of_no_more_tags_than_it_takes() {
        let (mut all, mut ops) = (SmallMessages::new(2), Ops::default());
        for i in 0..MAX_EARLY {
            all.arrived(1, TAG, small(b"1"), &mut ops).unwrap();
            if i < MAX_EARLY / 4 - 1 {
                let op = op(&mut ops);
                all.recv(op, TAG, 1, Ranks::One(1), &mut ops).unwrap();
            }
        }
        let mut sends = crate::mesh::small_sends::SmallSends::default();
        for tag in 0..MAX_WANTED as u64 + 100 {
            let op = op(&mut ops);
            all.recv(op, Tag::User(100 + tag), 1, Ranks::One(1), &mut ops).unwrap();
            while let Some(tag) = all.wants(1, TAG.kind()) {
                sends.wanted(tag).unwrap();
            }
        }
    }

    #[test]
    fn receives_are_taken_back_and_lose_their_ranks() {
        let (mut all, mut ops) = (SmallMessages::new(3), Ops::default());
        let [a, b, c] = std::array::from_fn(|_| op(&mut ops));
        all.recv(a, TAG, 1, Ranks::One(0), &mut ops).unwrap();
        all.recv(b, TAG, 1, Ranks::Any(vec![1, 2]), &mut ops).unwrap();
        assert!(!all.lost(1) && all.lost(2));
        assert!(all.cancel(b) && !all.cancel(b) && !all.lost(1));
        assert!(all.cancel(a) && !all.cancel(c));
    }
}
