//! What ranks say to each other besides their messages: that memory waits for one, and that they go. Plain bytes, made and read by [`super::pair`].

use crate::link::duplex::Target;
use crate::link::limits::{MAX_RAILS, SAY_SIZE};

/// A receive waits.
const RECV: u8 = 1;
/// The rank closes its mesh.
const BYE: u8 = 2;

/// What a rank says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// A receive waits.
    Announcement(Announcement),
    /// It closes its mesh: it sends nothing, and receives nothing, any more.
    Bye,
}

/// "A message with this tag may be written here": `{u8 kind, u8 0, u16 slot, u32 use, u64 tag, u64 addr, u64 len, u32 rkeys[8]}`, little endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announcement {
    /// Of the messages that it is for.
    pub tag: u64,
    /// Where they go.
    pub target: Target,
}

const _: () = assert!(SAY_SIZE == 32 + 4 * MAX_RAILS);

impl Announcement {
    /// The bytes. Of the slot's use the low 32 bits travel, which is what an epoch has of it, and more.
    fn encode(&self) -> [u8; SAY_SIZE] {
        let Target { sequence, addr, len, rkeys } = self.target;
        let head = u64::from(RECV) | (sequence & 0xff) << 16 | (sequence >> 8) << 32;
        let words = [head, self.tag, addr, len].into_iter().flat_map(u64::to_le_bytes);
        let mut bytes = words.chain(rkeys.into_iter().flat_map(u32::to_le_bytes));
        std::array::from_fn(|_| bytes.next().unwrap_or(0))
    }
}

impl Said {
    /// The bytes.
    pub fn encode(&self) -> [u8; SAY_SIZE] {
        match self {
            Said::Announcement(announcement) => announcement.encode(),
            Said::Bye => std::array::from_fn(|i| if i == 0 { BYE } else { 0 }),
        }
    }

    /// Errors: what is wrong, in words that follow "the peer sent".
    pub fn decode(bytes: &[u8; SAY_SIZE]) -> Result<Said, String> {
        let word = |i: usize| bytes.get(8 * i..).and_then(|rest| rest.first_chunk()).map_or(0, |word| u64::from_le_bytes(*word));
        let key = |i: usize| bytes.get(32 + 4 * i..).and_then(|rest| rest.first_chunk()).map_or(0, |key| u32::from_le_bytes(*key));
        let head = word(0);
        if *bytes == Said::Bye.encode() {
            return Ok(Said::Bye);
        }
        if head as u8 != RECV || head >> 8 & 0xff != 0 || head >> 16 & 0xffff >= 255 {
            return Err(format!("a control message that begins with {head:#x}"));
        }
        let target = Target { sequence: head >> 32 << 8 | head >> 16 & 0xff, addr: word(2), len: word(3), rkeys: std::array::from_fn(key) };
        Ok(Said::Announcement(Announcement { tag: word(1), target }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn announcements_round_trip(tag: u64, addr: u64, len: u64, uses: u32, slot in 0u64..255, rkeys: [u32; MAX_RAILS]) {
            let it = Announcement { tag, target: Target { sequence: u64::from(uses) << 8 | slot, addr, len, rkeys } };
            let it = Said::Announcement(it);
            prop_assert_eq!(Said::decode(&it.encode()), Ok(it));
        }

        #[test]
        fn any_first_bytes_are_refused_or_mean_something(head: u8, slot: u16) {
            let mut all = [0; SAY_SIZE];
            (all[0], all[2], all[3]) = (head, slot as u8, (slot >> 8) as u8);
            match Said::decode(&all) {
                Ok(Said::Bye) => prop_assert_eq!((head, slot), (BYE, 0)),
                Ok(Said::Announcement(_)) => prop_assert!(head == RECV && slot < 255),
                Err(_) => prop_assert!(head != RECV || slot >= 255),
            }
        }

        #[test]
        fn other_bytes_are_refused_or_an_announcement(bytes: [u8; 32], more: [u8; 32]) {
            let mut all = [0; SAY_SIZE];
            all[..32].copy_from_slice(&bytes);
            all[32..].copy_from_slice(&more);
            if let Ok(it) = Said::decode(&all) {
                prop_assert_eq!(it.encode(), all);
            }
        }
    }
}
