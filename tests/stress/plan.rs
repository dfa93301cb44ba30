//! What travels over a comm: both ends know it from the seed, so the receiver knows every byte.

use std::collections::{HashMap, VecDeque};

use crate::support::{Random, pattern};

use super::episode::{Episode, Spec};

#[derive(Debug, Clone, Copy)]
pub struct Message {
    pub tag: i32,
    /// Bytes that are sent.
    pub size: usize,
    /// Bytes that the receive has room for.
    pub room: usize,
    /// Where in the episode's bytes it begins.
    pub from: usize,
}

impl Message {
    /// Bytes that arrive.
    pub fn moved(&self) -> usize {
        self.size.min(self.room)
    }
}

/// The messages of a comm, in groups as they are received.
pub struct Plan {
    random: Random,
    most: usize,
    largest_group: u64,
    groups: u64,
    bytes: u64,
    /// Of the group that is being sent.
    sends: VecDeque<Message>,
}

const TAGS: [i32; 6] = [0, 1, 2, -1, i32::MAX, i32::MIN];

impl Plan {
    pub fn new(episode: &Episode, spec: &Spec) -> Plan {
        let mut random = episode.random(100 + spec.id as u64);
        let largest_group = if random.below(2) == 0 { 1 } else { 8 };
        // A comm that is to break has no end of its own.
        let (groups, bytes) = if spec.doomed { (u64::MAX, u64::MAX) } else { (1 + random.below(episode.groups), episode.bytes) };
        Plan { random, most: episode.most, largest_group, groups, bytes, sends: VecDeque::new() }
    }

    /// The bytes that messages are taken from.
    pub fn source(episode: &Episode) -> Vec<u8> {
        pattern(episode.seed, 2 * episode.most)
    }

    /// The next group to receive, in the order of its buffers.
    pub fn group(&mut self) -> Option<Vec<Message>> {
        if self.groups == 0 || self.bytes == 0 {
            return None;
        }
        self.groups -= 1;
        let n = 1 + self.random.below(self.largest_group) as usize;
        let messages: Vec<Message> = (0..n).map(|_| self.message(n)).collect();
        self.bytes = self.bytes.saturating_sub(messages.iter().map(|m| m.size as u64).sum());
        // The order of sending is drawn by either side, so that both go on with the same numbers.
        self.sends = self.shuffled(&messages);
        Some(messages)
    }

    /// Whether all of it was taken, by `send` or by `group`.
    pub fn is_over(&self, sending: bool) -> bool {
        (self.groups == 0 || self.bytes == 0) && (!sending || self.sends.is_empty())
    }

    /// The next message to send.
    pub fn send(&mut self) -> Option<Message> {
        if self.sends.is_empty() {
            self.group()?;
        }
        self.sends.pop_front()
    }

    fn message(&mut self, n: usize) -> Message {
        let most = self.most / n;
        let random = &mut self.random;
        let size = match random.below(12) {
            0 => 0,
            1 => 1,
            2 => 8,
            3 => random.below(130) as usize,
            4 => [63, 64, 65, 4095, 4096, 4097, 8192, 8193][random.below(8) as usize],
            5 | 6 => random.below(5000) as usize,
            7 => random.below(70_000) as usize | 1,
            8 => 65_535 + random.below(3) as usize,
            9 => (512 << 10) - 1 + random.below(3) as usize,
            _ => random.below(most as u64 + 1) as usize,
        };
        let size = size.min(most);
        let room = match random.below(16) {
            0..8 => size,
            8..15 => size + random.below(65 + 2 * size as u64) as usize,
            // Less room than message: what does not fit is not sent.
            _ => random.below(size as u64 + 1) as usize,
        };
        let from = random.below(self.most as u64) as usize;
        Message { tag: TAGS[random.below(TAGS.len() as u64) as usize], size, room: room.min(most), from }
    }

    /// In any order, but that those of one tag keep theirs: they take the buffers of that tag in turn.
    fn shuffled(&mut self, messages: &[Message]) -> VecDeque<Message> {
        let mut tags: Vec<i32> = messages.iter().map(|m| m.tag).collect();
        (1..tags.len()).rev().for_each(|i| tags.swap(i, self.random.below(i as u64 + 1) as usize));
        let mut by_tag: HashMap<i32, VecDeque<Message>> = HashMap::new();
        messages.iter().for_each(|m| by_tag.entry(m.tag).or_default().push_back(*m));
        tags.iter().filter_map(|tag| by_tag.get_mut(tag)?.pop_front()).collect()
    }
}
