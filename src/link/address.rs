//! What one end of a link tells the other, through whatever the ranks meet by (a store): who it is, on which fabric, and where its queue pairs and its
//! memory are. Made and read while a link is set up.
//!
//! Whoever can read an address can connect in its place: the endpoints carry the fabric's tokens.

use std::os::unix::fs::MetadataExt;

use crate::base::host;
use crate::fabric::{ENDPOINT_SIZE, Endpoint};

use super::limits::{MAX_QPS_PER_RAIL, MAX_RAILS};
use super::liveness::Peer;

/// Version of the layout of an address, and of what two ends of a [`Duplex`](super::duplex::Duplex) write to each other. Both ends must have the same.
pub const VERSION: u16 = 4;
const MAGIC: [u8; 4] = *b"RHAD";
/// Longest name.
const MAX_NAME: usize = 255;
/// Longest address: with every rail and queue pair.
pub const MAX_ADDRESS: usize = 64 + 3 * (1 + MAX_NAME) + MAX_RAILS * (4 + MAX_QPS_PER_RAIL * ENDPOINT_SIZE);

/// A process, as its peers hear of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Local {
    /// Host id (a hint).
    pub host_id: [u8; 16],
    /// Host name.
    pub host: String,
    /// Process id.
    pub pid: u32,
    /// Inode of the pid namespace; 0 if unknown.
    pub pid_ns: u64,
}

impl Local {
    /// This one.
    pub fn new() -> Local {
        let host = String::from_utf8_lossy(&host::name()).chars().filter(|c| !c.is_control()).collect();
        let pid_ns = std::fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino());
        Local { host_id: host::id(), host, pid: std::process::id(), pid_ns }
    }

    /// The pid of `other` if this process can see it under that number.
    pub fn sees(&self, other: &Local) -> Option<i32> {
        let same = other.host_id == self.host_id && other.pid_ns != 0 && other.pid_ns == self.pid_ns;
        i32::try_from(other.pid).ok().filter(|_| same)
    }
}

impl Default for Local {
    fn default() -> Self {
        Self::new()
    }
}

/// One end of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Its process.
    pub local: Local,
    /// Name of its fabric.
    pub fabric: String,
    /// Name of its device.
    pub device: String,
    /// Where the peer's WRITEs go.
    pub memory: u64,
    /// Queue pairs on each rail.
    pub qps_per_rail: usize,
    /// It goes on without a rail that has failed.
    pub failover: bool,
    /// Keys of that memory, rail by rail.
    pub rkeys: Vec<u32>,
    /// Its queue pairs, rail by rail.
    pub endpoints: Vec<Endpoint>,
}

impl Address {
    /// The bytes. Names are cut to what the layout can hold.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(512);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&[self.rkeys.len() as u8, self.qps_per_rail as u8, u8::from(self.failover)]);
        out.extend_from_slice(&self.local.host_id);
        out.extend_from_slice(&self.local.pid.to_le_bytes());
        out.extend_from_slice(&self.local.pid_ns.to_le_bytes());
        out.extend_from_slice(&self.memory.to_le_bytes());
        for name in [&self.local.host, &self.fabric, &self.device] {
            let end = (0..=name.len().min(MAX_NAME)).rev().find(|end| name.is_char_boundary(*end)).unwrap_or(0);
            out.push(end as u8);
            out.extend(name.bytes().take(end));
        }
        self.rkeys.iter().for_each(|rkey| out.extend_from_slice(&rkey.to_le_bytes()));
        self.endpoints.iter().for_each(|endpoint| out.extend_from_slice(&endpoint.0));
        out
    }

    /// Reads the address at the front of `bytes`, and says how long it is.
    ///
    /// Errors: what is wrong with it, in words that follow "the peer's address".
    pub fn decode(bytes: &[u8]) -> Result<(Address, usize), String> {
        let mut read = Reader(bytes);
        if read.array()? != MAGIC {
            return Err("is none of Railhead's".into());
        }
        match u16::from_le_bytes(read.array()?) {
            VERSION => {}
            other => return Err(format!("is of wire version {other}, this side's is {VERSION}; use one release of Railhead on all ranks")),
        }
        let [rails, qps_per_rail] = read.array()?.map(usize::from);
        if !(1..=MAX_RAILS).contains(&rails) || !(1..=MAX_QPS_PER_RAIL).contains(&qps_per_rail) {
            return Err(format!(
                "names {rails} rails with {qps_per_rail} queue pairs each; 1 to {MAX_RAILS} with 1 to {MAX_QPS_PER_RAIL} may be"
            ));
        }
        let [failover] = read.array()?;
        if failover > 1 {
            return Err(format!("has {failover} where 0 or 1 may be"));
        }
        let host_id = read.array()?;
        let pid = u32::from_le_bytes(read.array()?);
        let pid_ns = u64::from_le_bytes(read.array()?);
        let memory = u64::from_le_bytes(read.array()?);
        if memory == 0 || memory % 64 != 0 {
            return Err("names memory that cannot be".into());
        }
        let (host, fabric, device) = (read.name()?, read.name()?, read.name()?);
        let rkeys = (0..rails).map(|_| read.array().map(u32::from_le_bytes)).collect::<Result<_, _>>()?;
        let endpoints = (0..rails * qps_per_rail).map(|_| read.array().map(Endpoint)).collect::<Result<_, _>>()?;
        let local = Local { host_id, host, pid, pid_ns };
        let failover = failover == 1;
        Ok((Address { local, fabric, device, memory, qps_per_rail, failover, rkeys, endpoints }, bytes.len() - read.0.len()))
    }

    /// The peer whose address this is, as seen from `here`.
    pub fn peer(&self, here: &Local) -> Peer {
        Peer { label: format!("{} pid {} ({})", self.local.host, self.local.pid, self.device), pid: here.sees(&self.local) }
    }
}

/// Takes fields off the front of foreign bytes.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let (head, tail) = self.0.split_at_checked(n).ok_or("is cut short")?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        self.take(N)?.try_into().map_err(|_| "is cut short".into())
    }

    /// Safe to log.
    fn name(&mut self) -> Result<String, String> {
        let [len] = self.array()?;
        let text = std::str::from_utf8(self.take(usize::from(len))?).map_err(|_| "has a name that is not UTF-8")?;
        if text.chars().any(char::is_control) { Err("has a name with control characters".into()) } else { Ok(text.to_owned()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn address(rails: usize, qps_per_rail: usize, name: &str) -> Address {
        Address {
            local: Local { host_id: [7; 16], host: name.into(), pid: 5, pid_ns: 9 },
            fabric: "soft".into(),
            device: "eth0".into(),
            memory: 4096,
            qps_per_rail,
            failover: rails > 1,
            rkeys: (0..rails as u32).collect(),
            endpoints: (0..rails * qps_per_rail).map(|i| Endpoint([i as u8; ENDPOINT_SIZE])).collect(),
        }
    }

    #[test]
    fn addresses_round_trip_one_behind_the_other() {
        let (a, b) = (address(2, 3, "host"), address(MAX_RAILS, MAX_QPS_PER_RAIL, &"x".repeat(255)));
        let mut bytes = a.encode();
        bytes.extend(b.encode());
        let (first, len) = Address::decode(&bytes).unwrap();
        let (second, rest) = Address::decode(&bytes[len..]).unwrap();
        assert_eq!((first, second, len + rest), (a, b, bytes.len()));
        assert!(rest <= MAX_ADDRESS);
    }

    #[test]
    fn a_name_too_long_is_cut_between_characters() {
        let (read, _) = Address::decode(&address(1, 1, &"\u{e4}".repeat(200)).encode()).unwrap();
        assert_eq!(read.local.host, "\u{e4}".repeat(127));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let good = address(1, 1, "host").encode();
        let with = |at: usize, value: u8| {
            let mut bytes = good.clone();
            bytes[at] = value;
            Address::decode(&bytes).unwrap_err()
        };
        assert_eq!(with(0, b'X'), "is none of Railhead's");
        assert!(with(4, 9).starts_with("is of wire version 9"));
        assert!(with(6, 0).contains("0 rails"));
        assert!(with(7, 9).contains("9 queue pairs"));
        assert_eq!(with(8, 2), "has 2 where 0 or 1 may be");
        assert_eq!(with(46, 7), "has a name with control characters");
        assert_eq!(with(37, 1), "names memory that cannot be");
        assert_eq!(Address::decode(&good[..good.len() - 1]).unwrap_err(), "is cut short");
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400), front in 0usize..60) {
            let mut all = address(1, 2, "host").encode();
            all.truncate(front);
            all.extend(bytes);
            let _ = Address::decode(&all);
        }
    }
}
