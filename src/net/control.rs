//! Messages on the control connection, which is the handshake's own after H3. Pure; the thread that drives the comm.
//!
//! Sixteen bytes each: `{kind u8, rail u8, slot u8, 0 u8, epoch u32, stripes u64}`, little-endian. The rail messages are what replay
//! after a rail failure needs: a stripe may be sent again only after both ends said that the failed queue pair is in ERROR.

/// Bytes of a message.
pub const CONTROL_SIZE: usize = 16;

/// A message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// The sender of this message has its queue pairs of the rail in ERROR. `epoch` counts the rail's failures.
    RailDown {
        /// Which rail.
        rail: u8,
        /// Which failure of it.
        epoch: u32,
    },
    /// So has the other side: nothing written before can land any more.
    RailDownAck {
        /// Which rail.
        rail: u8,
        /// Which failure of it.
        epoch: u32,
    },
    /// What the receiver has of the message in `slot`.
    Have {
        /// Slot of the CTS FIFO.
        slot: u8,
        /// Which use of the slot: the low half of its sequence number.
        epoch: u32,
        /// A bit per stripe that arrived.
        stripes: u64,
    },
    /// The sender of this message closes its comm on purpose.
    Bye,
}

impl Control {
    /// The bytes.
    pub fn encode(&self) -> [u8; CONTROL_SIZE] {
        let (kind, rail, slot, epoch, stripes) = match *self {
            Control::RailDown { rail, epoch } => (1, rail, 0, epoch, 0),
            Control::RailDownAck { rail, epoch } => (2, rail, 0, epoch, 0),
            Control::Have { slot, epoch, stripes } => (3, 0, slot, epoch, stripes),
            Control::Bye => (4, 0, 0, 0, 0),
        };
        let [e0, e1, e2, e3] = u32::to_le_bytes(epoch);
        let [s0, s1, s2, s3, s4, s5, s6, s7] = u64::to_le_bytes(stripes);
        [kind, rail, slot, 0, e0, e1, e2, e3, s0, s1, s2, s3, s4, s5, s6, s7]
    }

    /// Reads a message; `None` for what no correct peer writes.
    pub fn decode(bytes: &[u8; CONTROL_SIZE]) -> Option<Control> {
        let [kind, rail, slot, zero, e0, e1, e2, e3, s0, s1, s2, s3, s4, s5, s6, s7] = *bytes;
        let epoch = u32::from_le_bytes([e0, e1, e2, e3]);
        let stripes = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let message = match kind {
            1 => Control::RailDown { rail, epoch },
            2 => Control::RailDownAck { rail, epoch },
            3 => Control::Have { slot, epoch, stripes },
            4 => Control::Bye,
            _ => return None,
        };
        // Fields that a kind does not use are 0.
        let rail_fits = usize::from(rail) < super::wire::MAX_RAILS;
        (zero == 0 && rail_fits && message.encode() == *bytes).then_some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn round_trip() {
        for message in [
            Control::RailDown { rail: 7, epoch: 0xffff_fff0 },
            Control::RailDownAck { rail: 0, epoch: 1 },
            Control::Have { slot: 255, epoch: 9, stripes: 0x8000_0000_0000_0001 },
            Control::Bye,
        ] {
            assert_eq!(Control::decode(&message.encode()), Some(message));
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let rail_down = Control::RailDown { rail: 1, epoch: 2 }.encode();
        for (at, value) in [(0, 0), (0, 5), (1, 8), (2, 1), (3, 1), (15, 1)] {
            let mut bad = rail_down;
            bad[at] = value;
            assert_eq!(Control::decode(&bad), None, "byte {at}");
        }
    }

    proptest! {
        #[test]
        fn what_decodes_encodes_to_the_same(bytes: [u8; CONTROL_SIZE]) {
            if let Some(message) = Control::decode(&bytes) {
                prop_assert_eq!(message.encode(), bytes);
            }
        }
    }
}
