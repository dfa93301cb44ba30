//! The bytes of the handshake: frames, their authentication, and the parameters that they carry. Pure; any thread.
//!
//! A frame is `header | body | MAC`. The header `{magic u32, version u16, kind u8, 0 u8, body length u32}` has this layout in every
//! version, and nothing but it is read before the MAC has been checked. The MAC covers header and body and everything said
//! before it, so that a frame of one conversation is worth nothing in another:
//!
//! ```text
//! H1      dialer, '1' | header | body                    everything the acceptor needs
//! H2      acceptor,  '2' | H1 | header | body               everything the dialer needs
//! H3      dialer, '3' | H1 | H2 | header                 empty: "I have seen H2, and I am not a replay"
//! REFUSE  acceptor,  'R' | H1 | header | body               why not, for a log
//! ```
//!
//! All integers are little-endian. What is decoded here has been checked for shape, not for sense: see `handshake`.

use std::io::{self, Read, Write};

use crate::base::mac;
use crate::fabric::{ENDPOINT_SIZE, Endpoint};
use crate::link::limits::{MAX_QPS_PER_RAIL, MAX_RAILS};

/// Version of everything two Railheads say to each other, the layout of slots, records and immediates included.
pub const PROTOCOL_VERSION: u16 = 6;
/// Bytes of a frame's header.
pub const HEADER_SIZE: usize = 12;
/// Bytes of a frame's MAC (HMAC-SHA-256).
pub const MAC_SIZE: usize = 32;
/// Longest body: 64 endpoints of 128 bytes and room to spare. It bounds what an unauthenticated peer can make a listener allocate.
pub const MAX_BODY: usize = 12 * 1024;

const MAGIC: u32 = u32::from_le_bytes(*b"RHhs");
/// Longest name in the parameters.
const MAX_NAME: usize = 64;
/// Longest reason of a refusal.
const MAX_REASON: usize = 400;

/// What a frame is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// H1.
    Hello = 1,
    /// H2.
    Reply = 2,
    /// H3.
    Confirm = 3,
    /// REFUSE.
    Refuse = 4,
}

impl Kind {
    fn label(self) -> &'static [u8] {
        match self {
            Kind::Hello => b"1",
            Kind::Reply => b"2",
            Kind::Confirm => b"3",
            Kind::Refuse => b"R",
        }
    }
}

/// Why bytes were not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// Not a frame of this protocol.
    #[error("no Railhead handshake")]
    Magic,
    /// A frame of a kind that does not belong here.
    #[error("unexpected kind of handshake message")]
    Kind,
    /// Longer than any frame may be, or shorter than its parts.
    #[error("bad length")]
    Length,
    /// Written by someone who does not know the secret, or changed on the way.
    #[error("bad authentication code")]
    Mac,
    /// A field that no correct peer writes.
    #[error("bad {0}")]
    Field(&'static str),
}

/// A frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The writer's [`PROTOCOL_VERSION`].
    pub version: u16,
    /// Which message it is.
    pub kind: Kind,
    /// Bytes of body that follow; the MAC comes after them.
    pub body_len: usize,
}

impl Header {
    /// Reads the beginning of `bytes`.
    pub fn decode(bytes: &[u8]) -> Result<Header, WireError> {
        let mut read = Reader(bytes);
        if read.u32()? != MAGIC {
            return Err(WireError::Magic);
        }
        let version = read.u16()?;
        let kind = match read.u8()? {
            1 => Kind::Hello,
            2 => Kind::Reply,
            3 => Kind::Confirm,
            4 => Kind::Refuse,
            _ => return Err(WireError::Kind),
        };
        if read.u8()? != 0 {
            return Err(WireError::Kind);
        }
        let body_len = read.u32()? as usize;
        if body_len > MAX_BODY {
            return Err(WireError::Length);
        }
        Ok(Header { version, kind, body_len })
    }
}

/// Builds a frame. `before` is what was said earlier: nothing for H1; H1 for H2 and REFUSE; H1 and H2 for H3.
pub fn seal(kind: Kind, version: u16, key: &[u8], before: &[&[u8]], body: &[u8]) -> Vec<u8> {
    let mut frame = Vec::with_capacity(HEADER_SIZE + body.len() + MAC_SIZE);
    frame.extend_from_slice(&MAGIC.to_le_bytes());
    frame.extend_from_slice(&version.to_le_bytes());
    frame.extend_from_slice(&[kind as u8, 0]);
    frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
    frame.extend_from_slice(body);
    let mac = mac::hmac(key, &authenticated(kind, before, &frame));
    frame.extend_from_slice(&mac);
    frame
}

/// Checks a whole frame's MAC and returns its header and body.
pub fn open<'a>(frame: &'a [u8], key: &[u8], before: &[&[u8]]) -> Result<(Header, &'a [u8]), WireError> {
    let header = Header::decode(frame)?;
    let (said, mac) = frame.split_at_checked(HEADER_SIZE + header.body_len).ok_or(WireError::Length)?;
    if mac.len() != MAC_SIZE {
        return Err(WireError::Length);
    }
    if !mac::verify(key, &authenticated(header.kind, before, said), mac) {
        return Err(WireError::Mac);
    }
    Ok((header, said.get(HEADER_SIZE..).unwrap_or_default()))
}

fn authenticated<'a>(kind: Kind, before: &[&'a [u8]], said: &'a [u8]) -> Vec<&'a [u8]> {
    let mut parts = Vec::with_capacity(2 + before.len());
    parts.push(kind.label());
    parts.extend_from_slice(before);
    parts.push(said);
    parts
}

/// Takes one frame off a non-blocking stream, byte by byte if need be, and never a byte more: others may follow.
#[derive(Default)]
pub struct FrameReader {
    bytes: Vec<u8>,
}

/// What a reader or writer did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// All of it is done.
    Done,
    /// The stream has no more to give or take now.
    Blocked,
    /// The peer has closed or reset the stream.
    Closed,
}

impl FrameReader {
    /// Whether the first byte has come.
    pub fn started(&self) -> bool {
        !self.bytes.is_empty()
    }

    /// The frame, once `pull` said that it is done.
    pub fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }

    /// Reads what there is.
    pub fn pull(&mut self, stream: &mut impl Read) -> Result<Progress, WireError> {
        loop {
            let want = if self.bytes.len() < HEADER_SIZE {
                HEADER_SIZE - self.bytes.len()
            } else {
                let total = HEADER_SIZE + Header::decode(&self.bytes)?.body_len + MAC_SIZE;
                total.saturating_sub(self.bytes.len())
            };
            if want == 0 {
                return Ok(Progress::Done);
            }
            let mut chunk = [0u8; 2048];
            let room = chunk.len().min(want);
            match stream.read(chunk.get_mut(..room).unwrap_or_default()) {
                Ok(0) => return Ok(Progress::Closed),
                Ok(n) => self.bytes.extend_from_slice(chunk.get(..n).unwrap_or_default()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(Progress::Blocked),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Ok(Progress::Closed),
            }
        }
    }
}

/// Puts bytes on a non-blocking stream.
#[derive(Default)]
pub struct FrameWriter {
    bytes: Vec<u8>,
    done: usize,
}

impl FrameWriter {
    /// To write `bytes`.
    pub fn new(bytes: Vec<u8>) -> Self {
        FrameWriter { bytes, done: 0 }
    }

    /// Writes what the stream takes.
    pub fn push(&mut self, stream: &mut impl Write) -> Progress {
        loop {
            let rest = self.bytes.get(self.done..).unwrap_or_default();
            if rest.is_empty() {
                return Progress::Done;
            }
            match stream.write(rest) {
                Ok(0) => return Progress::Closed,
                Ok(n) => self.done += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Progress::Blocked,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Progress::Closed,
            }
        }
    }
}

/// The body of H1 and of H2: one side of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Params {
    /// Fresh for every frame.
    pub nonce: [u8; 16],
    /// The listener's instance, from the handle.
    pub instance: u32,
    /// The side's host id (a hint).
    pub host_id: [u8; 16],
    /// The side's process id in its own pid namespace.
    pub pid: u32,
    /// Inode of that pid namespace; 0 if unknown.
    pub pid_ns: u64,
    /// Traffic class asked for; -1 for none.
    pub traffic_class: i32,
    /// Longest message.
    pub max_message: u64,
    /// H1: the CTS FIFO. H2: the completion records.
    pub memory: u64,
    /// Rails in use.
    pub rails: u8,
    /// Queue pairs on each rail.
    pub qps_per_rail: u8,
    /// H1: whether the comm may go on when a rail fails. H2: whether it does.
    pub failover: bool,
    /// Name of the fabric.
    pub fabric: String,
    /// Name of the host.
    pub host: String,
    /// Name of the device.
    pub device: String,
    /// Key of `memory`, per rail.
    pub rkeys: Vec<u32>,
    /// Rail by rail, the queue pairs of each.
    pub endpoints: Vec<Endpoint>,
}

impl Params {
    /// The body. Names are cut to what the layout can hold.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(256 + self.endpoints.len() * ENDPOINT_SIZE);
        out.extend_from_slice(&self.nonce);
        out.extend_from_slice(&self.instance.to_le_bytes());
        out.extend_from_slice(&self.host_id);
        out.extend_from_slice(&self.pid.to_le_bytes());
        out.extend_from_slice(&self.pid_ns.to_le_bytes());
        out.extend_from_slice(&self.traffic_class.to_le_bytes());
        out.extend_from_slice(&self.max_message.to_le_bytes());
        out.extend_from_slice(&self.memory.to_le_bytes());
        out.extend_from_slice(&[self.rails, self.qps_per_rail, u8::from(self.failover)]);
        for name in [&self.fabric, &self.host, &self.device] {
            let name = cut(name, MAX_NAME);
            out.push(name.len() as u8);
            out.extend_from_slice(name.as_bytes());
        }
        for rkey in &self.rkeys {
            out.extend_from_slice(&rkey.to_le_bytes());
        }
        for endpoint in &self.endpoints {
            out.extend_from_slice(&endpoint.0);
        }
        out
    }

    /// Reads a body.
    pub fn decode(body: &[u8]) -> Result<Params, WireError> {
        let mut read = Reader(body);
        let nonce = read.array()?;
        let instance = read.u32()?;
        let host_id = read.array()?;
        let pid = read.u32()?;
        let pid_ns = read.u64()?;
        let traffic_class = read.u32()? as i32;
        let max_message = read.u64()?;
        let memory = read.u64()?;
        let rails = read.u8()?;
        let qps_per_rail = read.u8()?;
        let failover = match read.u8()? {
            0 => false,
            1 => true,
            _ => return Err(WireError::Field("word on failover")),
        };
        if !(1..=MAX_RAILS).contains(&usize::from(rails)) {
            return Err(WireError::Field("number of rails"));
        }
        if !(1..=MAX_QPS_PER_RAIL).contains(&usize::from(qps_per_rail)) {
            return Err(WireError::Field("number of queue pairs"));
        }
        let fabric = read.name("fabric name")?;
        let host = read.name("host name")?;
        let device = read.name("device name")?;
        let rkeys = (0..rails).map(|_| read.u32()).collect::<Result<Vec<_>, _>>()?;
        let endpoints =
            (0..u16::from(rails) * u16::from(qps_per_rail)).map(|_| read.array().map(Endpoint)).collect::<Result<Vec<_>, _>>()?;
        if !read.0.is_empty() {
            return Err(WireError::Length);
        }
        Ok(Params {
            nonce,
            instance,
            host_id,
            pid,
            pid_ns,
            traffic_class,
            max_message,
            memory,
            rails,
            qps_per_rail,
            failover,
            fabric,
            host,
            device,
            rkeys,
            endpoints,
        })
    }
}

/// The body of a REFUSE.
pub fn encode_reason(reason: &str) -> Vec<u8> {
    cut(reason, MAX_REASON).as_bytes().to_vec()
}

/// The reason of a REFUSE, safe to log.
pub fn decode_reason(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body.get(..MAX_REASON).unwrap_or(body));
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

fn cut(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}

/// Takes fields off the front of foreign bytes.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], WireError> {
        let (head, tail) = self.0.split_at_checked(n).ok_or(WireError::Length)?;
        self.0 = tail;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        self.take(N)?.try_into().map_err(|_| WireError::Length)
    }

    fn u8(&mut self) -> Result<u8, WireError> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, WireError> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_le_bytes)
    }

    /// A short name that can be logged as it is.
    fn name(&mut self, what: &'static str) -> Result<String, WireError> {
        let len = usize::from(self.u8()?);
        if len > MAX_NAME {
            return Err(WireError::Field(what));
        }
        let text = std::str::from_utf8(self.take(len)?).map_err(|_| WireError::Field(what))?;
        if text.chars().any(char::is_control) {
            return Err(WireError::Field(what));
        }
        Ok(text.to_owned())
    }
}

#[cfg(test)]
mod tests;
