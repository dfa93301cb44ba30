//! The slots that messages of a [`Duplex`](super::Duplex) come into, as their receiver knows them. On the thread that drives the link.

use super::super::incoming::{Imm, IncomingMessage, Records, epoch};
use super::super::limits::{MAX_QPS, SLOTS};
use super::control::CONTROL_SLOT;

/// All slots.
#[derive(Debug)]
pub struct Slots {
    /// Those that were ever open: the others were never touched, so they take no memory.
    slots: Vec<Slot>,
    free: Vec<u8>,
}

/// A message that is here, in the memory of a slot.
#[derive(Debug, Clone, Copy)]
pub struct Received {
    /// Of the slot.
    pub sequence: u64,
    /// The message's bytes; of one into a slot that stands open, the sender's value.
    pub value: u64,
}

#[derive(Debug, Clone, Copy)]
struct Slot {
    /// How often it was opened; with the number, the sequence.
    uses: u64,
    state: State,
}

/// What a slot is open for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    /// For one message of at most `room` bytes.
    Once {
        room: u64,
        incoming: IncomingMessage,
    },
    /// For any number.
    Standing,
}

impl Slot {
    const FREE: Slot = Slot { uses: 0, state: State::Free };

    fn sequence(&self, number: u8) -> u64 {
        self.uses * SLOTS as u64 + u64::from(number)
    }
}

impl Default for Slots {
    fn default() -> Slots {
        Slots { slots: Vec::with_capacity(SLOTS), free: (0..CONTROL_SLOT).rev().collect() }
    }
}

impl Slots {
    /// How many are free.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Opens one for one message of at most `room` bytes: its sequence number. `None`: all are open.
    pub fn open(&mut self, room: u64) -> Option<u64> {
        self.open_for(State::Once { room, incoming: IncomingMessage::NONE })
    }

    /// The same for any number of messages.
    pub fn open_standing(&mut self) -> Option<u64> {
        self.open_for(State::Standing)
    }

    fn open_for(&mut self, state: State) -> Option<u64> {
        let number = self.free.pop()?;
        if self.slots.len() <= usize::from(number) {
            self.slots.resize(usize::from(number) + 1, Slot::FREE);
        }
        let slot = self.slots.get_mut(usize::from(number))?;
        *slot = Slot { uses: slot.uses + 1, state };
        Some(slot.sequence(number))
    }

    /// Closes one, if it is open still.
    pub fn close(&mut self, sequence: u64) {
        let number = (sequence % SLOTS as u64) as u8;
        let Some(slot) = self.slots.get_mut(usize::from(number)) else { return };
        if slot.sequence(number) == sequence && slot.state != State::Free {
            slot.state = State::Free;
            self.free.push(number);
        }
    }

    /// A message, or a stripe of one, is here. `Some`: with this, all of it is.
    ///
    /// Errors: what is wrong with it, in words that "for slot 7" may follow.
    pub fn received(&mut self, records: &Records, number: u8, meaning: Imm) -> Result<Option<Received>, String> {
        let Some(slot) = self.slots.get_mut(usize::from(number)) else { return Err(UNEXPECTED.into()) };
        let sequence = slot.sequence(number);
        match (&mut slot.state, meaning) {
            (State::Free, _) => Err(UNEXPECTED.into()),
            (State::Standing, Imm::Whole(value)) => Ok(Some(Received { sequence, value: value.into() })),
            (State::Standing, Imm::Stripe(_)) => Err("a stripe, in order,".into()),
            (State::Once { room, incoming }, meaning) => {
                match meaning {
                    Imm::Whole(size) if !incoming.whole(size) => return Err("all of a message, after stripes of it,".into()),
                    Imm::Whole(_) => {}
                    Imm::Stripe(index) => incoming
                        .stripe(index, records.read(number), epoch(sequence), MAX_QPS as u32)
                        .map_err(|why| format!("stripe {index} {why}"))?,
                }
                if incoming.size > *room {
                    return Err(format!("{} bytes into {room}", incoming.size));
                }
                if !incoming.completed {
                    return Ok(None);
                }
                let value = incoming.size;
                slot.state = State::Free;
                self.free.push(number);
                Ok(Some(Received { sequence, value }))
            }
        }
    }
}

const UNEXPECTED: &str = "a message that nobody waits for,";
