//! What two soft queue pairs exchange to connect: the endpoint, which travels out of band, and the Hello and the Reply, the first bytes of
//! every stream. Pure codecs, little-endian, used while queue pairs connect; everything that a peer sent is checked here.
//!
//! An endpoint carries a random token. The Hello proves, by a MAC, that the dialer knows the token of the queue pair that it dials; the Reply
//! proves that the acceptor knows the dialer's. So only a peer that has the endpoints can connect, reply or pass memory.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use crate::base::config::SoftWire;
use crate::base::error::{Error, Result};
use crate::base::mac::{self, MAC_SIZE};
use crate::fabric::types::{ENDPOINT_SIZE, Endpoint};

/// Version of everything in this file. A peer of another version is refused, and the error names it.
const VERSION: u8 = 2;
const ENDPOINT_MAGIC: [u8; 4] = *b"RHEP";
const HELLO_MAGIC: [u8; 4] = *b"RHHI";
const REPLY_MAGIC: [u8; 4] = *b"RHRE";

/// Bytes of a Hello.
pub const HELLO_SIZE: usize = 128;
/// Bytes of a Reply.
pub const REPLY_SIZE: usize = 64;
/// Characters of a segment's name in /dev/shm; shorter names are padded with NUL.
const NAME_SIZE: usize = 48;

/// A queue pair's secret.
pub type Token = [u8; 16];

/// A decoded endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Number of the queue pair on its device.
    pub qpn: u32,
    /// Its secret.
    pub token: Token,
    /// What the hub's abstract unix socket is named after.
    pub instance: [u8; 16],
    /// Hash of the kernel's boot id: equal on one kernel. A hint.
    pub kernel: [u8; 16],
    /// The hub's TCP listener.
    pub addr: SocketAddr,
    /// How often its requests are retried for want of a receive (`QpCaps::rnr_retry`).
    pub rnr_retry: u8,
    /// Which wires it takes.
    pub wire: SoftWire,
    /// TCP data streams it wants, 0..=16.
    pub streams: u8,
}

/// Most data streams of a queue pair.
pub const MAX_STREAMS: u8 = 16;

impl Address {
    /// The same of a later generation, whose secret nobody has to be told: it follows from the first one's.
    pub fn of_generation(&self, generation: u32) -> Address {
        let mut it = self.clone();
        if generation > 0 {
            let derived = mac::hmac(&self.token, &[b"generation", &generation.to_le_bytes()]);
            it.token.iter_mut().zip(derived).for_each(|(byte, new)| *byte = new);
        }
        it
    }

    /// For the peer.
    pub fn encode(&self) -> Endpoint {
        let mut out = Writer::new([0; ENDPOINT_SIZE]);
        out.put(&ENDPOINT_MAGIC);
        let wire = match self.wire {
            SoftWire::Auto => 0,
            SoftWire::Shm => 1,
            SoftWire::Tcp => 2,
        };
        out.put(&[VERSION, wire, self.streams, self.rnr_retry]);
        out.put(&self.qpn.to_le_bytes());
        out.put(&self.token);
        out.put(&self.instance);
        out.put(&self.kernel);
        let (family, ip, scope) = match self.addr {
            SocketAddr::V4(v4) => (4u8, v4.ip().to_ipv6_mapped().octets(), 0),
            SocketAddr::V6(v6) => (6, v6.ip().octets(), v6.scope_id()),
        };
        out.put(&[family, 0]);
        out.put(&self.addr.port().to_le_bytes());
        out.put(&ip);
        out.put(&scope.to_le_bytes());
        Endpoint(out.bytes)
    }

    /// From a peer.
    pub fn decode(endpoint: &Endpoint) -> Result<Self> {
        let mut input = Reader { bytes: &endpoint.0, at: 0 };
        let bad = |what: String| Error::remote(format!("not an endpoint of the soft fabric: {what}"));
        let magic: [u8; 4] = input.take();
        let [version, wire, streams, rnr_retry] = input.take();
        if magic != ENDPOINT_MAGIC {
            return Err(bad(format!("it begins with {magic:02x?}")));
        }
        if version != VERSION {
            return Err(bad(format!("version {version}, this side speaks {VERSION}")));
        }
        let wire = match wire {
            0 => SoftWire::Auto,
            1 => SoftWire::Shm,
            2 => SoftWire::Tcp,
            other => return Err(bad(format!("wire {other}"))),
        };
        if streams > MAX_STREAMS || rnr_retry > 7 {
            return Err(bad(format!("{streams} streams (at most {MAX_STREAMS}), rnr_retry {rnr_retry} (at most 7)")));
        }
        let qpn = u32::from_le_bytes(input.take());
        let (token, instance, kernel) = (input.take(), input.take(), input.take());
        let [family, _] = input.take();
        let port = u16::from_le_bytes(input.take());
        let ip = Ipv6Addr::from(input.take::<16>());
        let scope = u32::from_le_bytes(input.take());
        let addr = match (family, ip.to_ipv4_mapped()) {
            (4, Some(v4)) => SocketAddr::new(IpAddr::V4(v4), port),
            (6, _) => SocketAddr::V6(SocketAddrV6::new(ip, port, 0, scope)),
            _ => return Err(bad(format!("address family {family}"))),
        };
        Ok(Address { qpn, token, instance, kernel, addr, rnr_retry, wire, streams })
    }
}

/// What the dialer offers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Offer {
    /// Bytes on this stream.
    Tcp,
    /// A segment of that length, whose descriptor comes with the Hello.
    Passed(u64),
    /// A segment of that length under that name in /dev/shm.
    Named(u64, String),
    /// Nothing more: this is the data stream of that number, from 0.
    Data(u8),
    /// Nothing: the acceptor checks whether its dialer still exists. The dialer's hub closes this stream when it does not.
    Check,
}

/// The first bytes that the dialer sends on every stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Number of the queue pair that is dialed.
    pub to: u32,
    /// Number of the queue pair that dials.
    pub from: u32,
    /// Fresh for every Hello.
    pub nonce: [u8; 16],
    /// What the stream is for.
    pub offer: Offer,
}

impl Hello {
    /// Bytes, and their MAC under the token of the dialed queue pair.
    pub fn encode(&self, token: &Token) -> [u8; HELLO_SIZE] {
        let mut out = Writer::new([0; HELLO_SIZE]);
        let (kind, stream, len, name) = match &self.offer {
            Offer::Tcp => (0, 0, 0, ""),
            Offer::Passed(len) => (1, 0, *len, ""),
            Offer::Named(len, name) => (2, 0, *len, name.as_str()),
            Offer::Data(stream) => (3, *stream, 0, ""),
            Offer::Check => (4, 0, 0, ""),
        };
        out.put(&HELLO_MAGIC);
        out.put(&[VERSION, kind, stream, 0]);
        out.put(&self.to.to_le_bytes());
        out.put(&self.from.to_le_bytes());
        out.put(&self.nonce);
        out.put(&len.to_le_bytes());
        out.put(name.as_bytes());
        let signed = HELLO_SIZE - MAC_SIZE;
        let (body, mac) = out.bytes.split_at_mut(signed);
        mac.copy_from_slice(&mac::hmac(token, &[b"hello", body]));
        out.bytes
    }

    /// Whether a Hello may begin with these bytes.
    pub fn begins(bytes: &[u8]) -> bool {
        bytes.iter().zip(&HELLO_MAGIC).all(|(byte, magic)| byte == magic)
    }

    /// Which queue pair is dialed, whose token the MAC is to be checked with.
    pub fn peek(bytes: &[u8; HELLO_SIZE]) -> Option<u32> {
        let mut input = Reader { bytes, at: 0 };
        let magic: [u8; 4] = input.take();
        let [version, ..] = input.take::<4>();
        (magic == HELLO_MAGIC && version == VERSION).then(|| u32::from_le_bytes(input.take()))
    }

    /// Checks the MAC, then everything else. `None` for a peer that does not know the token.
    pub fn decode(bytes: &[u8; HELLO_SIZE], token: &Token) -> Option<Self> {
        let (body, code) = bytes.split_at(HELLO_SIZE - MAC_SIZE);
        if !mac::verify(token, &[b"hello", body], code) {
            return None;
        }
        let mut input = Reader { bytes: body, at: 4 };
        let [_, kind, stream, _] = input.take();
        let (to, from) = (u32::from_le_bytes(input.take()), u32::from_le_bytes(input.take()));
        let nonce = input.take();
        let len = u64::from_le_bytes(input.take());
        let name: [u8; NAME_SIZE] = input.take();
        let offer = match kind {
            0 => Offer::Tcp,
            1 => Offer::Passed(len),
            2 => {
                let end = name.iter().position(|b| *b == 0).unwrap_or(NAME_SIZE);
                Offer::Named(len, String::from_utf8(name.get(..end)?.to_vec()).ok()?)
            }
            3 if stream < MAX_STREAMS => Offer::Data(stream),
            4 => Offer::Check,
            _ => return None,
        };
        Some(Hello { to, from, nonce, offer })
    }
}

/// The acceptor's reply to a Hello.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// To the control stream: over TCP, with that many data streams. To a data stream: its number.
    Tcp(u8),
    /// Over the segment that was offered.
    Shm,
    /// What was offered cannot be used: 0, or what the system said to an acceptor that lacks what it takes.
    Refused(u8),
}

impl Reply {
    /// Bytes, and their MAC under the dialer's token, which covers the Hello as well.
    pub fn encode(self, token: &Token, hello: &[u8; HELLO_SIZE]) -> [u8; REPLY_SIZE] {
        let mut out = Writer::new([0; REPLY_SIZE]);
        let (kind, value) = match self {
            Reply::Tcp(streams) => (0, streams),
            Reply::Shm => (1, 0),
            Reply::Refused(errno) => (2, errno),
        };
        out.put(&REPLY_MAGIC);
        out.put(&[VERSION, kind, value, 0]);
        let (body, mac) = out.bytes.split_at_mut(REPLY_SIZE - MAC_SIZE);
        mac.copy_from_slice(&mac::hmac(token, &[b"reply", hello, body]));
        out.bytes
    }

    /// Checks that it is a Reply to that Hello.
    pub fn decode(bytes: &[u8; REPLY_SIZE], token: &Token, hello: &[u8; HELLO_SIZE]) -> Option<Self> {
        let (body, code) = bytes.split_at(REPLY_SIZE - MAC_SIZE);
        if !mac::verify(token, &[b"reply", hello, body], code) {
            return None;
        }
        let mut input = Reader { bytes: body, at: 4 };
        let [_, kind, value, _] = input.take();
        match kind {
            0 if value <= MAX_STREAMS => Some(Reply::Tcp(value)),
            1 => Some(Reply::Shm),
            2 => Some(Reply::Refused(value)),
            _ => None,
        }
    }
}

struct Writer<const N: usize> {
    bytes: [u8; N],
    at: usize,
}

impl<const N: usize> Writer<N> {
    fn new(bytes: [u8; N]) -> Self {
        Writer { bytes, at: 0 }
    }

    /// Appends what fits; the layouts above fit.
    fn put(&mut self, field: &[u8]) {
        debug_assert!(self.at + field.len() <= N);
        for (to, from) in self.bytes[self.at..].iter_mut().zip(field) {
            *to = *from;
        }
        self.at += field.len();
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    /// The next bytes; zeros past the end, which the layouts above do not reach.
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut field = [0; N];
        for (to, from) in field.iter_mut().zip(self.bytes.iter().skip(self.at)) {
            *to = *from;
        }
        self.at += N;
        field
    }
}

const _: () = assert!(4 + 4 + 4 + 16 * 3 + 2 + 2 + 16 + 4 <= ENDPOINT_SIZE);
const _: () = assert!(4 + 4 + 4 + 4 + 16 + 8 + NAME_SIZE + MAC_SIZE <= HELLO_SIZE);
const _: () = assert!(4 + 4 + MAC_SIZE <= REPLY_SIZE);
/// An IPv4 address is carried in its IPv6-mapped form.
const _: Ipv4Addr = Ipv4Addr::LOCALHOST;

#[cfg(test)]
mod tests {
    use super::*;

    fn address(addr: &str) -> Address {
        Address {
            qpn: 77,
            token: [7; 16],
            instance: [8; 16],
            kernel: [9; 16],
            addr: addr.parse().unwrap(),
            rnr_retry: 3,
            wire: SoftWire::Tcp,
            streams: 4,
        }
    }

    #[test]
    fn endpoints_come_back_as_they_went() {
        for addr in ["10.1.2.3:4567", "[2001:db8::1]:1", "[fe80::1%3]:65535"] {
            let address = address(addr);
            assert_eq!(Address::decode(&address.encode()).unwrap(), address);
        }
    }

    #[test]
    fn foreign_endpoints_are_refused_by_name() {
        let good = address("10.1.2.3:4567").encode();
        for (at, value, word) in
            [(0, 0, "begins"), (4, 9, "version 9"), (5, 3, "wire 3"), (6, 17, "17 streams"), (7, 8, "rnr_retry 8"), (60, 5, "family 5")]
        {
            let mut bad = good;
            bad.0[at] = value;
            let error = Address::decode(&bad).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn a_hello_with_a_flipped_bit_is_refused() {
        for offer in [
            Offer::Tcp,
            Offer::Passed(12345),
            Offer::Named(1 << 40, "railhead-0123456789abcdef0123456789abcdef".into()),
            Offer::Data(15),
            Offer::Check,
        ] {
            let hello = Hello { to: 1, from: 2, nonce: [5; 16], offer };
            let bytes = hello.encode(&[1; 16]);
            assert_eq!(Hello::peek(&bytes), Some(1));
            assert_eq!(Hello::decode(&bytes, &[1; 16]), Some(hello));
            assert_eq!(Hello::decode(&bytes, &[2; 16]), None);
            for bit in 0..HELLO_SIZE * 8 {
                let mut bad = bytes;
                bad[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Hello::decode(&bad, &[1; 16]), None, "bit {bit}");
            }
        }
    }

    #[test]
    fn a_reply_belongs_to_its_hello() {
        let hello = [3; HELLO_SIZE];
        for reply in [Reply::Tcp(16), Reply::Shm, Reply::Refused(0), Reply::Refused(libc::ENOMEM as u8)] {
            let bytes = reply.encode(&[1; 16], &hello);
            assert_eq!(Reply::decode(&bytes, &[1; 16], &hello), Some(reply));
            assert_eq!(Reply::decode(&bytes, &[1; 16], &[4; HELLO_SIZE]), None);
            assert_eq!(Reply::decode(&bytes, &[2; 16], &hello), None);
            for bit in 0..REPLY_SIZE * 8 {
                let mut bad = bytes;
                bad[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Reply::decode(&bad, &[1; 16], &hello), None, "bit {bit}");
            }
        }
    }
}
