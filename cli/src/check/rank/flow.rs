//! A sequence of messages on one comm, several at once: posted and tested as NCCL's progress thread does for a connection.

use std::collections::VecDeque;

use super::Rank;
use crate::check::verdict::{Verdict, during};
use crate::plugin::Opaque;

/// Messages of which none is more than `depth` behind the oldest that is outstanding. Only the oldest is tested: that plugins take tests
/// in any order is a rule of its own.
pub struct Flow<'a> {
    what: &'static str,
    total: usize,
    depth: usize,
    next: usize,
    outstanding: VecDeque<Opaque>,
    post: Box<dyn FnMut(usize) -> Verdict<Option<Opaque>> + 'a>,
    done: Box<dyn FnMut(usize, [i32; 8]) -> Verdict + 'a>,
}

impl<'a> Flow<'a> {
    /// `what` names a message; `post` tries to post one.
    pub fn new(what: &'static str, total: usize, depth: usize, post: impl FnMut(usize) -> Verdict<Option<Opaque>> + 'a) -> Flow<'a> {
        Flow { what, total, depth, next: 0, outstanding: VecDeque::new(), post: Box::new(post), done: Box::new(|_, _| Ok(())) }
    }

    /// `done` is told the sizes of each message, in the order of posting.
    pub fn then(mut self, done: impl FnMut(usize, [i32; 8]) -> Verdict + 'a) -> Flow<'a> {
        self.done = Box::new(done);
        self
    }

    /// Whether all are done.
    pub fn ended(&self) -> bool {
        self.oldest() == self.total
    }

    /// Number of the first message that is not done.
    fn oldest(&self) -> usize {
        self.next - self.outstanding.len()
    }

    /// What is waited for.
    pub fn waits_for(&self) -> String {
        format!("{} {} of {}", self.what, self.oldest(), self.total)
    }

    /// Tries to post the next message and tests the oldest; whether either came forward.
    pub fn step(&mut self, rank: &Rank) -> Verdict<bool> {
        let mut moved = false;
        let room = self.next < self.total && self.outstanding.len() < self.depth;
        let posted = if room { during(format_args!("{} {}", self.what, self.next), (self.post)(self.next))? } else { None };
        if let Some(request) = posted {
            self.outstanding.push_back(request);
            (self.next, moved) = (self.next + 1, true);
        }
        if let Some(&request) = self.outstanding.front() {
            let n = self.oldest();
            if let Some(sizes) = during(format_args!("{} {n}", self.what), rank.test(request))? {
                self.outstanding.pop_front();
                moved = true;
                (self.done)(n, sizes)?;
            }
        }
        Ok(moved)
    }
}
