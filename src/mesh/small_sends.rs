//! Small messages to one rank that were not sent yet, and how many more it has room for. Under the lock of the mesh; used by [`super::pair`].

use std::collections::{HashSet, VecDeque};

use crate::base::error::{Error, Result};

use super::ops::OpId;
use super::protocol::Small;
use super::protocol::Tag;
use super::small::{MAX_EARLY, MAX_WANTED};

/// One.
#[derive(Debug, Clone, Copy)]
pub struct SmallSend {
    /// The operation.
    pub op: OpId,
    /// Its tag.
    pub tag: Tag,
    /// Its bytes.
    pub small: Small,
}

/// Those of collectives, or of users.
#[derive(Debug, Default)]
pub struct SmallSends {
    waiting: VecDeque<SmallSend>,
    /// Sent, but not said to be received.
    unreceived: u64,
    /// Tags with which the peer waits for one more, though there is no room for others.
    wanted: HashSet<Tag>,
}

impl SmallSends {
    /// One to send.
    pub fn push(&mut self, send: SmallSend) {
        self.waiting.push_back(send);
    }

    /// Whether one may be sent that was not pushed.
    pub fn has_room(&self) -> bool {
        self.waiting.is_empty() && self.unreceived < MAX_EARLY
    }

    /// One that was not pushed was sent, for which there was room.
    pub fn sent_at_once(&mut self, tag: Tag) {
        self.unreceived += 1;
        // An empty set still hashes.
        if !self.wanted.is_empty() {
            self.wanted.remove(&tag);
        }
    }

    /// Whether there is one that waits for the peer to receive others.
    pub fn waits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes one back, if it is not sent; whether it was not.
    pub fn cancel(&mut self, op: OpId) -> bool {
        let found = self.waiting.iter().position(|send| send.op == op);
        found.is_some_and(|at| self.waiting.remove(at).is_some())
    }

    /// The place of the next one that may be sent: the first, if there is room, or else the first of those that are waited for.
    pub fn next(&self) -> Option<(usize, SmallSend)> {
        let at = match self.unreceived < MAX_EARLY {
            true => 0,
            false if self.wanted.is_empty() => return None,
            false => self.waiting.iter().position(|send| self.wanted.contains(&send.tag))?,
        };
        self.waiting.get(at).map(|send| (at, *send))
    }

    /// The one at this place was sent.
    pub fn sent(&mut self, at: usize) {
        if let Some(send) = self.waiting.remove(at) {
            self.sent_at_once(send.tag);
        }
    }

    /// The peer waits for one with this tag, though it has no room for others.
    ///
    /// Errors: more than it may wait for so.
    pub fn wanted(&mut self, tag: Tag) -> Result<()> {
        if self.wanted.len() >= MAX_WANTED {
            return Err(Error::remote(format!("the peer waits for small messages with more than {MAX_WANTED} tags")));
        }
        self.wanted.insert(tag);
        Ok(())
    }

    /// The peer has received so many. What it waited for before, it says again if need be.
    ///
    /// Errors: more than were sent.
    pub fn received(&mut self, number: u64) -> Result<()> {
        self.wanted.clear();
        self.unreceived =
            self.unreceived.checked_sub(number).ok_or_else(|| Error::remote("the peer sent that it received what was not sent"))?;
        Ok(())
    }
}

#[cfg(test)]
impl SmallSends {
    /// Entries that it has.
    pub fn remembered(&self) -> usize {
        self.waiting.len() + self.wanted.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::ops::{Asked, Ops, What};

    const A: Tag = Tag::User(7);
    const B: Tag = Tag::User(8);

    fn all_sent(sends: &mut SmallSends) -> Vec<Tag> {
        let mut all = Vec::new();
        while let Some((at, send)) = sends.next() {
            all.push(send.tag);
            sends.sent(at);
        }
        all
    }

    #[test]
    fn what_is_waited_for_overtakes_what_there_is_no_room_for() {
        let (mut ops, mut sends) = (Ops::default(), SmallSends::default());
        let mut push = |tag, sends: &mut SmallSends| {
            let op = ops.insert(Asked { rank: Some(1), receives: false, what: What::Tagged(tag) });
            sends.push(SmallSend { op, tag, small: Small::NONE });
            op
        };
        (0..=MAX_EARLY).for_each(|_| _ = push(A, &mut sends));
        assert_eq!(all_sent(&mut sends).len() as u64, MAX_EARLY);
        sends.wanted(B).unwrap();
        assert!(sends.next().is_none(), "there is none yet");
        let ops = [push(B, &mut sends), push(B, &mut sends)];
        assert_eq!(all_sent(&mut sends), [B]);
        assert!(!sends.cancel(ops[0]) && sends.cancel(ops[1]));
        sends.wanted(B).unwrap();
        sends.received(2).unwrap();
        assert_eq!(all_sent(&mut sends), [A], "one more was sent than there is room for");
        push(B, &mut sends);
        assert!(sends.next().is_none(), "it has to be waited for still");
        assert!(sends.received(MAX_EARLY + 1).is_err());
        assert_eq!((0..=MAX_WANTED as u64).filter(|tag| sends.wanted(Tag::User(*tag)).is_err()).count(), 1);
    }
}
