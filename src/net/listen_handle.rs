//! The handle that `listen` fills and `connect` reads: 64 bytes, so that it fits the oldest plugin version. Pure; any thread.
//!
//! It travels from rank to rank through NCCL's bootstrap, so a handle that comes back is foreign data. Whoever has seen it may connect,
//! nobody else: the secret keys every message of the handshake. The cursor is the connecting side's own note of a connect in
//! progress (NCCL hands the same buffer to every retry); it names a table entry and is honoured only if that entry belongs to
//! the same address and secret, so a copied or corrupted handle can do no harm.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use crate::base::error::{Error, Result};

/// Bytes of a handle: `NCCL_NET_HANDLE_MAXSIZE` of NCCL up to 2.11 (v4); later ones have 128.
pub const HANDLE_SIZE: usize = 64;

/// Length of the secret that keys the handshake.
pub const SECRET_SIZE: usize = 16;

const MAGIC: u32 = u32::from_le_bytes(*b"RHcn");
const VERSION: u8 = 1;
const FAMILY_V4: u8 = 4;
const FAMILY_V6: u8 = 6;

// Offsets of the fields.
const AT_VERSION: usize = 4;
const AT_FAMILY: usize = 5;
const AT_PORT: usize = 6;
const AT_ADDRESS: usize = 8;
const AT_SCOPE: usize = 24;
const AT_INSTANCE: usize = 28;
const AT_SECRET: usize = 32;
const AT_CURSOR: usize = 48;
const AT_HOST: usize = 56;
const _: () = assert!(AT_HOST + 8 == HANDLE_SIZE && AT_SECRET + SECRET_SIZE == AT_CURSOR);

/// A decoded handle.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ListenHandle {
    /// Where the listener listens.
    pub addr: SocketAddr,
    /// Tells listeners that had the same port one after the other apart.
    pub instance: u32,
    /// Known to those only who were given the handle.
    pub secret: [u8; SECRET_SIZE],
    /// Index and generation of the connecting side's table entry; 0 for none.
    pub cursor: u64,
    /// Beginning of the listener's host id: a hint for logs.
    pub host: [u8; 8],
}

impl ListenHandle {
    /// The 64 bytes.
    pub fn encode(&self) -> [u8; HANDLE_SIZE] {
        let mut out = [0u8; HANDLE_SIZE];
        let (family, scope, address) = match self.addr {
            SocketAddr::V4(v4) => (FAMILY_V4, 0, v4.ip().to_ipv6_mapped().octets()),
            SocketAddr::V6(v6) => (FAMILY_V6, v6.scope_id(), v6.ip().octets()),
        };
        put(&mut out, 0, &MAGIC.to_le_bytes());
        put(&mut out, AT_VERSION, &[VERSION]);
        put(&mut out, AT_FAMILY, &[family]);
        put(&mut out, AT_PORT, &self.addr.port().to_le_bytes());
        put(&mut out, AT_ADDRESS, &address);
        put(&mut out, AT_SCOPE, &scope.to_le_bytes());
        put(&mut out, AT_INSTANCE, &self.instance.to_le_bytes());
        put(&mut out, AT_SECRET, &self.secret);
        put(&mut out, AT_CURSOR, &self.cursor.to_le_bytes());
        put(&mut out, AT_HOST, &self.host);
        out
    }

    /// Errors: bytes that no Railhead of this version wrote.
    pub fn decode(bytes: &[u8; HANDLE_SIZE]) -> Result<ListenHandle> {
        if u32::from_le_bytes(get(bytes, 0)) != MAGIC {
            return Err(Error::internal("connect: not a handle of Railhead's listen; is the other rank using another network plugin?"));
        }
        let [version] = get(bytes, AT_VERSION);
        if version != VERSION {
            return Err(Error::usage(format!(
                "connect: the handle has version {version}, this Railhead speaks {VERSION}; use one release on all ranks"
            )));
        }
        let port = u16::from_le_bytes(get(bytes, AT_PORT));
        let address = Ipv6Addr::from(get::<16>(bytes, AT_ADDRESS));
        let scope = u32::from_le_bytes(get(bytes, AT_SCOPE));
        let addr = match get::<1>(bytes, AT_FAMILY) {
            [FAMILY_V4] => match address.to_ipv4_mapped() {
                Some(v4) if scope == 0 => SocketAddr::new(IpAddr::V4(v4), port),
                _ => return Err(corrupt("address")),
            },
            [FAMILY_V6] => SocketAddr::V6(SocketAddrV6::new(address, port, 0, scope)),
            _ => return Err(corrupt("address family")),
        };
        if port == 0 || addr.ip().is_unspecified() || addr.ip() == IpAddr::V4(Ipv4Addr::BROADCAST) || addr.ip().is_multicast() {
            return Err(corrupt("address"));
        }
        Ok(ListenHandle {
            addr,
            instance: u32::from_le_bytes(get(bytes, AT_INSTANCE)),
            secret: get(bytes, AT_SECRET),
            cursor: u64::from_le_bytes(get(bytes, AT_CURSOR)),
            host: get(bytes, AT_HOST),
        })
    }

    /// Notes `cursor` in encoded bytes and leaves the rest alone.
    pub fn set_cursor(bytes: &mut [u8; HANDLE_SIZE], cursor: u64) {
        put(bytes, AT_CURSOR, &cursor.to_le_bytes());
    }
}

fn corrupt(what: &str) -> Error {
    Error::internal(format!("connect: the handle's {what} makes no sense; it was damaged on its way here"))
}

// Both helpers are called with constant offsets inside the 64 bytes; the bounds are checked all the same.
fn put(out: &mut [u8; HANDLE_SIZE], at: usize, bytes: &[u8]) {
    if let Some(place) = out.get_mut(at..at + bytes.len()) {
        place.copy_from_slice(bytes);
    }
}

fn get<const N: usize>(bytes: &[u8; HANDLE_SIZE], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|part| part.try_into().ok()).unwrap_or([0; N])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(addr: &str) -> ListenHandle {
        ListenHandle {
            addr: addr.parse().unwrap(),
            instance: 0x1234_5678,
            secret: *b"0123456789abcdef",
            cursor: 0x0102_0304_0506_0708,
            host: *b"hosthost",
        }
    }

    #[test]
    fn round_trip() {
        for addr in ["10.1.2.3:4567", "[fe80::1%7]:65535", "[2001:db8::1]:1", "127.0.0.1:1024"] {
            let handle = sample(addr);
            let back = ListenHandle::decode(&handle.encode()).unwrap();
            assert!(back == handle, "{addr}");
        }
    }

    #[test]
    fn the_cursor_is_written_in_place() {
        let mut bytes = sample("10.1.2.3:4567").encode();
        ListenHandle::set_cursor(&mut bytes, 99);
        let mut expected = sample("10.1.2.3:4567");
        expected.cursor = 99;
        assert!(ListenHandle::decode(&bytes).unwrap() == expected);
    }

    #[test]
    fn other_bytes_are_refused() {
        let good = sample("10.1.2.3:4567").encode();
        for (at, value) in [(0, 0u8), (AT_VERSION, 2), (AT_FAMILY, 5), (AT_ADDRESS, 9), (AT_SCOPE, 1)] {
            let mut bad = good;
            bad[at] = value;
            assert!(ListenHandle::decode(&bad).is_err(), "byte {at}");
        }
        let mut no_port = good;
        no_port[AT_PORT] = 0;
        no_port[AT_PORT + 1] = 0;
        assert!(ListenHandle::decode(&no_port).is_err());
        for addr in ["0.0.0.0:5", "255.255.255.255:5", "224.0.0.1:5", "[::]:5", "[ff02::1]:5"] {
            assert!(ListenHandle::decode(&sample(addr).encode()).is_err(), "{addr}");
        }
        assert!(ListenHandle::decode(&[0xff; HANDLE_SIZE]).is_err());
    }
}
