//! The control messages that ranks send each other. Plain bytes, made and read by [`super::pair`].
//!
//! A receive from one rank is *advertised* to it: a message with this tag may be written here. A receive from any of several is *offered* to all of them;
//! who has a message for it *claims* it, and waits; the first is *granted* it, with the place to write to, and from the others it is *withdrawn*. So is a
//! receive that is given up: an advertisement that a message was not written for already is answered, after which nothing is written.

use crate::base::stats::MeshOp;
use crate::link::duplex::Target;
use crate::link::limits::{CONTROL_SIZE, MAX_RAILS};

/// Longest small message: what a control message has room for behind its head and the tag.
pub const MAX_SMALL: usize = CONTROL_SIZE - 16;

/// The bytes of a small message, which travels inside a control message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Small {
    len: u8,
    bytes: [u8; MAX_SMALL],
}

impl Small {
    /// No bytes.
    pub const NONE: Small = Small { len: 0, bytes: [0; MAX_SMALL] };

    /// None of more than it may have. `fill` gets as many bytes to fill.
    pub fn new(len: usize, fill: impl FnOnce(&mut [u8])) -> Option<Small> {
        let mut bytes = [0; MAX_SMALL];
        fill(bytes.get_mut(..len)?);
        Some(Small { len: len as u8, bytes })
    }

    /// The same of bytes that have zeros behind them, and nothing else.
    pub fn from_padded(len: usize, padded: &[u8; MAX_SMALL]) -> Option<Small> {
        let is_padded = padded.get(len..)?.iter().all(|byte| *byte == 0);
        is_padded.then_some(Small { len: len as u8, bytes: *padded })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        usize::from(self.len)
    }

    /// All of them.
    pub fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len()).unwrap_or_default()
    }

    /// The same, with zeros behind them.
    pub fn padded(&self) -> &[u8; MAX_SMALL] {
        &self.bytes
    }
}

/// Of which message, between two ranks: the first sent with a tag is the first received with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tag {
    /// A collective's own.
    Collective(u64),
    /// A user's.
    User(u64),
}

/// The bit of a collective's tag that is set where all of its messages are small ones, which its ranks know alike.
pub const SMALL: u64 = 1 << 40;

/// The high byte of a collective's tag has this and the collective's number: no user's message has such a tag.
const COLLECTIVE: u64 = 0x80;

impl Tag {
    /// Of a collective with its caller's tag, whose messages are all `small` or not.
    pub fn collective(op: MeshOp, tag: u32, small: bool) -> u64 {
        (COLLECTIVE | op as u64) << 56 | if small { SMALL } else { 0 } | u64::from(tag)
    }

    /// What is done, where one tag says so, and its caller's or user's tag.
    pub fn of(self) -> (MeshOp, u64) {
        match self {
            Tag::Collective(number) => {
                let op = MeshOp::ALL.get((number >> 56 ^ COLLECTIVE) as usize).copied();
                op.filter(|op| op.is_collective()).map_or((MeshOp::None, number), |op| (op, number & u64::from(u32::MAX)))
            }
            Tag::User(number) => (MeshOp::None, number),
        }
    }

    /// Whether a message of so many bytes is sent as a small one.
    pub fn is_small(self, len: usize) -> bool {
        match self {
            Tag::Collective(number) => number & SMALL != 0,
            Tag::User(_) => len <= MAX_SMALL,
        }
    }

    /// 0 for a collective's, 1 for a user's.
    pub fn kind(self) -> usize {
        self.number().0 as usize
    }

    /// The tag that the same collective has for messages of the other kind. A user's has none: his are matched apart.
    pub fn other_kind(self) -> Option<Tag> {
        match self {
            Tag::Collective(number) => Some(Tag::Collective(number ^ SMALL)),
            Tag::User(_) => None,
        }
    }

    fn number(self) -> (u64, u64) {
        match self {
            Tag::Collective(number) => (0, number),
            Tag::User(number) => (1, number),
        }
    }
}

impl std::fmt::Display for Tag {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (op, tag) = self.of();
        if op != MeshOp::None {
            write!(f, "{}, ", op.name())?;
        }
        write!(f, "tag {tag:#x}")
    }
}

/// A control message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// A message with this tag may be written here.
    RecvReady(Tag, Target),
    /// The message that claimed this offer may be written here.
    Granted(u64, Target),
    /// Messages for this slot of a buffer may be written here, until it is withdrawn.
    Opened(u64, Target),
    /// A receive with this tag, which somebody else may get, is offered under this number.
    Offered(u64, Tag),
    /// There is a message for this offer.
    Claimed(u64),
    /// Of this offer nothing will come.
    WithdrawnOffer(u64),
    /// Is a message written there? If not, none may be any more: the sequence number of a slot.
    Withdraw(u64),
    /// None is, nor will be.
    Withdrawn(u64),
    /// A message, and its bytes.
    Message(Tag, Small),
    /// So many more messages of that kind were received, of collectives or of users.
    Received(usize, u64),
    /// A message with this tag is waited for, though there is no room for others.
    Wanted(Tag),
    /// For a message of so many bytes with this tag there is no receive among as many as were ready.
    Unmatched {
        /// Of the message.
        tag: Tag,
        /// Its bytes.
        len: u64,
        /// Receives advertised or offered so far.
        ready: u64,
    },
    /// The rank closes its mesh: it sends nothing, and receives nothing, any more. It has lost this rank.
    Bye(Option<usize>),
}

const _: () = assert!(CONTROL_SIZE == 32 + 4 * MAX_RAILS);

/// Slots that a target may name: the last one is the link's own.
const TARGETS: u64 = 255;

impl Control {
    /// `{u8 kind, u8 tag's kind, u16 slot, u32 use of the slot, u64 tag or number, u64 addr, u64 len, u32 rkeys[8]}`, little endian; what a kind has
    /// not is zero. Of a slot's use the low 32 bits travel, which is what an epoch has of it, and more.
    pub fn encode(&self) -> [u8; CONTROL_SIZE] {
        let none = Target { sequence: 0, addr: 0, len: 0, rkeys: [0; MAX_RAILS] };
        let (kind, tag_kind, number, target) = match *self {
            Control::RecvReady(tag, target) => (1, tag.number().0, tag.number().1, target),
            Control::Bye(gone) => (2, 0, gone.map_or(0, |rank| rank as u64 + 1), none),
            Control::Granted(number, target) => (3, 0, number, target),
            Control::Opened(number, target) => (4, 0, number, target),
            Control::Offered(number, tag) => (5, tag.number().0, tag.number().1, Target { addr: number, ..none }),
            Control::Claimed(number) => (6, 0, number, none),
            Control::WithdrawnOffer(number) => (7, 0, number, none),
            Control::Withdraw(sequence) => (8, 0, 0, Target { sequence, ..none }),
            Control::Withdrawn(sequence) => (9, 0, 0, Target { sequence, ..none }),
            Control::Message(tag, small) => return message(tag, &small),
            Control::Received(kind, number) => (11, kind as u64, number, none),
            Control::Wanted(tag) => (13, tag.number().0, tag.number().1, none),
            Control::Unmatched { tag, len, ready } => (12, tag.number().0, tag.number().1, Target { addr: ready, len, ..none }),
        };
        let head = kind | tag_kind << 8 | (target.sequence & 0xff) << 16 | (target.sequence >> 8) << 32;
        let mut bytes = [0; CONTROL_SIZE];
        put_words(&mut bytes, [head, number, target.addr, target.len]);
        for (place, key) in bytes.as_chunks_mut().0.iter_mut().skip(8).zip(target.rkeys) {
            *place = key.to_le_bytes();
        }
        bytes
    }

    /// Errors: what is wrong, in words that follow "the peer sent".
    pub fn decode(bytes: &[u8; CONTROL_SIZE]) -> Result<Control, String> {
        let word = |i: usize| bytes.get(8 * i..).and_then(|rest| rest.first_chunk()).map_or(0, |word| u64::from_le_bytes(*word));
        let key = |i: usize| bytes.get(32 + 4 * i..).and_then(|rest| rest.first_chunk()).map_or(0, |key| u32::from_le_bytes(*key));
        let (head, number) = (word(0), word(1));
        let sequence = head >> 32 << 8 | head >> 16 & 0xff;
        let target = Target { sequence, addr: word(2), len: word(3), rkeys: std::array::from_fn(key) };
        let tag = if head >> 8 & 0xff == 0 { Tag::Collective(number) } else { Tag::User(number) };
        let control = match head as u8 {
            1 => Control::RecvReady(tag, target),
            2 => Control::Bye((number as usize).checked_sub(1)),
            3 => Control::Granted(number, target),
            4 => Control::Opened(number, target),
            5 => Control::Offered(word(2), tag),
            6 => Control::Claimed(number),
            7 => Control::WithdrawnOffer(number),
            8 => Control::Withdraw(sequence),
            9 => Control::Withdrawn(sequence),
            MESSAGE => {
                let len = (head >> 16 & 0xffff) as usize;
                let padded = bytes.last_chunk().filter(|_| head >> 32 == 0 && head >> 8 & 0xfe == 0);
                let small = padded.and_then(|padded| Small::from_padded(len, padded));
                return small
                    .map(|small| Control::Message(tag, small))
                    .ok_or_else(|| format!("a message of {len} bytes in {CONTROL_SIZE}"));
            }
            11 => Control::Received(tag.kind(), number),
            12 => Control::Unmatched { tag, len: word(3), ready: word(2) },
            13 => Control::Wanted(tag),
            _ => return Err(format!("a control message that begins with {head:#x}")),
        };
        if control.encode() != *bytes || sequence % 256 >= TARGETS {
            return Err(format!("a control message of kind {}, with something in it that does not belong there", head as u8));
        }
        Ok(control)
    }
}

/// The kind of a message with its bytes.
const MESSAGE: u8 = 10;

/// `{u8 kind, u8 tag's kind, u16 len, u32 0, u64 tag, u8 bytes[48]}`
fn message(tag: Tag, small: &Small) -> [u8; CONTROL_SIZE] {
    let head = u64::from(MESSAGE) | tag.number().0 << 8 | (small.len() as u64) << 16;
    let mut bytes = [0; CONTROL_SIZE];
    put_words(&mut bytes, [head, tag.number().1]);
    if let Some(end) = bytes.last_chunk_mut() {
        *end = *small.padded();
    }
    bytes
}

/// The first words of a control message.
fn put_words<const N: usize>(bytes: &mut [u8; CONTROL_SIZE], words: [u64; N]) {
    for (place, word) in bytes.as_chunks_mut().0.iter_mut().zip(words) {
        *place = word.to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_control() -> impl Strategy<Value = Control> {
        let target = (any::<u32>(), 0u64..255, any::<u64>(), any::<u64>(), any::<[u32; MAX_RAILS]>())
            .prop_map(|(uses, slot, addr, len, rkeys)| Target { sequence: u64::from(uses) << 8 | slot, addr, len, rkeys });
        (0..13, any::<bool>(), any::<u64>(), any::<u64>(), target).prop_map(|(kind, user, number, more, target)| {
            let tag = if user { Tag::User(number) } else { Tag::Collective(number) };
            match kind {
                0 => Control::RecvReady(tag, target),
                1 => Control::Bye((number as usize).checked_sub(1)),
                2 => Control::Granted(number, target),
                3 => Control::Opened(number, target),
                4 => Control::Offered(more, tag),
                5 => Control::Claimed(number),
                6 => Control::WithdrawnOffer(number),
                7 => Control::Withdraw(target.sequence),
                8 => Control::Message(tag, Small::new(number as usize % 49, |bytes| bytes.fill(more as u8)).unwrap()),
                9 => Control::Received(usize::from(user), number),
                10 => Control::Unmatched { tag, len: number, ready: more },
                11 => Control::Wanted(tag),
                _ => Control::Withdrawn(target.sequence),
            }
        })
    }

    #[test]
    fn a_collectives_tag_tells_which_it_is() {
        for op in MeshOp::ALL.into_iter().filter(|op| op.is_collective()) {
            for small in [false, true] {
                let tag = Tag::Collective(Tag::collective(op, u32::MAX, small));
                assert_eq!((tag.of(), tag.is_small(0)), ((op, u64::from(u32::MAX)), small));
                assert_eq!(tag.to_string(), format!("{}, tag 0xffffffff", op.name()));
            }
        }
        for other in [7, 0x80 << 56 | 7, 0x8a << 56 | 7, u64::MAX] {
            assert_eq!(Tag::Collective(other).of(), (MeshOp::None, other));
        }
        assert_eq!(Tag::User(0x8400_0000_0000_0007).to_string(), "tag 0x8400000000000007");
    }

    proptest! {
        #[test]
        fn what_is_said_is_what_is_heard(control in any_control()) {
            prop_assert_eq!(Control::decode(&control.encode()), Ok(control));
        }

        #[test]
        fn other_bytes_are_refused_or_mean_something(control in any_control(), at in 0..CONTROL_SIZE, byte: u8, more: [u8; 32]) {
            let mut bytes = control.encode();
            bytes[at] = byte;
            if let Ok(it) = Control::decode(&bytes) {
                prop_assert_eq!(it.encode(), bytes);
            }
            bytes[..32].copy_from_slice(&more);
            if let Ok(it) = Control::decode(&bytes) {
                prop_assert_eq!(it.encode(), bytes);
            }
        }
    }
}
