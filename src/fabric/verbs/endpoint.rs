//! The opaque endpoint of a queue pair on a NIC: what the peer needs for RTR and RTS. Plain data.
#![forbid(unsafe_code)]

use super::gid::Gid;
use crate::base::error::{Error, Result};
use crate::base::mac;
use crate::fabric::types::{ENDPOINT_SIZE, Endpoint};

/// First bytes, with the version of the layout.
const MAGIC: [u8; 4] = *b"RHV2";
/// Bytes before the check sum, and of it.
const BODY: usize = 56;
const CHECK: usize = 8;
const _: () = assert!(BODY + CHECK <= ENDPOINT_SIZE);

/// Enhancements of a queue pair (enhanced connection establishment), in words of the NIC's vendor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Enhancements {
    /// Whose words.
    pub vendor: u32,
    /// Which.
    pub options: u32,
    /// Fields that `struct ibv_ece` has beyond these; none yet.
    pub mask: u32,
}

/// What a queue pair says of its enhancements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Ece {
    /// It has none, or shall not use them.
    #[default]
    None,
    /// What it could do.
    Offered(Enhancements),
    /// What it does: those of the peer's offer that it could.
    Agreed(Enhancements),
}

/// Where a queue pair can be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address {
    /// Queue pair number, 24 bits.
    pub qpn: u32,
    /// Packet sequence number of its first request, 24 bits.
    pub psn: u32,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// The port's GID.
    pub gid: Gid,
    /// Path MTU at most, as `enum ibv_mtu` numbers it (1..=5).
    pub mtu: u8,
    /// `IBV_LINK_LAYER_*`.
    pub link_layer: u8,
    /// READs that it answers at once.
    pub reads: u8,
    /// Enhancements.
    pub ece: Ece,
}

impl Address {
    /// The same of a later generation. Its first packet's number is far from an earlier one's (24 bits of the golden ratio apart), so that no packet of
    /// these is expected any more.
    pub fn of_generation(&self, generation: u32) -> Address {
        Address { psn: self.psn.wrapping_add(generation.wrapping_mul(0x9e_3779)) & 0xff_ffff, ..*self }
    }

    /// As bytes.
    pub fn encode(&self) -> Endpoint {
        let mut out = [0; ENDPOINT_SIZE];
        out[0..4].copy_from_slice(&MAGIC);
        out[4..8].copy_from_slice(&self.qpn.to_le_bytes());
        out[8..12].copy_from_slice(&self.psn.to_le_bytes());
        out[12..14].copy_from_slice(&self.lid.to_le_bytes());
        out[14] = self.mtu;
        out[15] = self.link_layer;
        out[16] = self.reads;
        out[24..40].copy_from_slice(&self.gid.0);
        let (kind, ece) = match self.ece {
            Ece::None => (0, Enhancements::default()),
            Ece::Offered(ece) => (1, ece),
            Ece::Agreed(ece) => (2, ece),
        };
        out[17] = kind;
        out[40..44].copy_from_slice(&ece.vendor.to_le_bytes());
        out[44..48].copy_from_slice(&ece.options.to_le_bytes());
        out[48..52].copy_from_slice(&ece.mask.to_le_bytes());
        let check = sum(&out[..BODY]);
        out[BODY..BODY + CHECK].copy_from_slice(&check);
        Endpoint(out)
    }

    /// Errors: bytes that no queue pair on a NIC made.
    pub fn decode(endpoint: &Endpoint) -> Result<Address> {
        let bytes = &endpoint.0;
        let (body, rest) = bytes.split_at(BODY);
        let (check, zeros) = rest.split_at(CHECK);
        if body[0..4] != MAGIC || sum(body) != check || zeros.iter().any(|&b| b != 0) {
            return Err(Error::remote("the peer's endpoint is not one of a queue pair on a NIC, or was damaged"));
        }
        let word = |at: usize| u32::from_le_bytes([body[at], body[at + 1], body[at + 2], body[at + 3]]);
        let mut gid = Gid::default();
        gid.0.copy_from_slice(&body[24..40]);
        let ece = Enhancements { vendor: word(40), options: word(44), mask: word(48) };
        let address = Address {
            qpn: word(4),
            psn: word(8),
            lid: u16::from_le_bytes([body[12], body[13]]),
            gid,
            mtu: body[14],
            link_layer: body[15],
            reads: body[16],
            ece: match body[17] {
                1 => Ece::Offered(ece),
                2 => Ece::Agreed(ece),
                _ => Ece::None,
            },
        };
        if address.qpn >> 24 != 0 || address.psn >> 24 != 0 || !(1..=5).contains(&address.mtu) {
            return Err(Error::remote(format!("the peer's endpoint makes no sense: {address:?}")));
        }
        Ok(address)
    }
}

/// Against accidents only: who may connect is decided before endpoints are exchanged.
fn sum(body: &[u8]) -> [u8; CHECK] {
    let mut out = [0; CHECK];
    out.copy_from_slice(&mac::hmac(b"verbs endpoint", &[body])[..CHECK]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address() -> Address {
        Address { qpn: 0xab_cdef, psn: 0xff_ffff, lid: 0x1234, gid: Gid([7; 16]), mtu: 5, link_layer: 2, reads: 16, ece: Ece::None }
    }

    #[test]
    fn round_trip() {
        let ece = Enhancements { vendor: 0x15b3, options: 0xffff_0001, mask: 0 };
        for ece in [Ece::None, Ece::Offered(ece), Ece::Agreed(ece)] {
            let address = Address { ece, ..address() };
            assert_eq!(Address::decode(&address.encode()).unwrap(), address);
        }
    }

    #[test]
    fn no_byte_may_be_wrong() {
        for at in 0..ENDPOINT_SIZE {
            let mut endpoint = address().encode();
            endpoint.0[at] ^= 0x41;
            assert!(Address::decode(&endpoint).is_err(), "byte {at}");
        }
    }

    #[test]
    fn numbers_must_be_in_range() {
        for wrong in [
            Address { qpn: 1 << 24, ..address() },
            Address { psn: 1 << 24, ..address() },
            Address { mtu: 0, ..address() },
            Address { mtu: 6, ..address() },
        ] {
            assert!(Address::decode(&wrong.encode()).is_err(), "{wrong:?}");
        }
    }
}
