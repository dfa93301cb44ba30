//! The packet in front of every message and tensor: what it is, of which tensor, in which step, and where memory is. Plain bytes, made and read by
//! the channel's two ends.
//!
//! The fields and their order are TensorFlow's (tensorflow/contrib/verbs/README.md), with the widths that it documents. Its shape and data type,
//! which there are objects of C++, are numbers here: see [`HEADER`].

use crate::base::error::Error;
use crate::link::limits::{CONTROL_SIZE, MAX_RAILS};

use super::key::TensorId;

/// Bytes that a name may have.
pub const NAME_MAX: usize = 512;
/// Dimensions that a tensor may have.
pub const RANK_MAX: usize = 16;
/// Bytes before the tensor, or the text of an error. Little endian: `{u8 kind, u16 name_size, u8 name[512], u64 step, u64 buffer_size, u64 addr,
/// u32 rkey, u8 is_dead, u32 data_type, u8 rank, i64 dims[16], u64 bytes, u32 more_rkeys[7], u64 index, u32 number, u8 zero[43]}`.
pub const HEADER: usize = 768;
/// Bytes of the text of an error.
pub const TEXT_MAX: usize = 256;
/// An ack: the front of a packet without a name, as nothing of the rest means anything.
pub const ACK: [u8; 3] = [Kind::Ack as u8, 0, 0];
/// Bytes of a message buffer, and of an ack buffer.
pub const MESSAGE: usize = HEADER + TEXT_MAX;

/// Bytes before the step.
const FRONT: usize = 3 + NAME_MAX;
/// What is behind a name, and behind the last field.
const ZEROS: [u8; NAME_MAX] = [0; NAME_MAX];

const _: () = assert!(FRONT == 515 && 725 + 43 == HEADER && 43 <= NAME_MAX && MAX_RAILS == 8);

/// What a packet says. The first six have TensorFlow's numbers, and the next three its later names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The message buffer is free again.
    Ack = 0,
    /// So is the tensor's.
    BufferIdle = 1,
    /// The tensor's buffer is too small: the sender's has so many bytes now. 0: it has given its own up.
    BufferRequest = 2,
    /// So has the receiver's.
    BufferResponse = 3,
    /// A tensor is wanted.
    TensorRequest = 4,
    /// A tensor, in the tensor's buffer.
    TensorWrite = 5,
    /// A tensor is not what its receiver expects: its data type, shape and bytes.
    MetaDataUpdate = 6,
    /// A tensor is wanted again, now that there is memory for it.
    TensorReRequest = 7,
    /// There is no such tensor: why.
    ErrorStatus = 8,
    /// A tensor is not wanted any more. It comes nevertheless, or an error does, or the next.
    TensorWithdraw = 9,
    /// It will not come.
    TensorWithdrawn = 10,
}

impl Kind {
    const ALL: [Kind; 11] = [
        Kind::Ack,
        Kind::BufferIdle,
        Kind::BufferRequest,
        Kind::BufferResponse,
        Kind::TensorRequest,
        Kind::TensorWrite,
        Kind::MetaDataUpdate,
        Kind::TensorReRequest,
        Kind::ErrorStatus,
        Kind::TensorWithdraw,
        Kind::TensorWithdrawn,
    ];
}

/// Memory that a peer may write to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemoteMr {
    /// First byte.
    pub addr: u64,
    /// The keys, rail by rail.
    pub rkeys: [u32; MAX_RAILS],
}

/// What is known of a tensor without its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Meta {
    /// A number of the users': nothing here depends on it.
    pub data_type: u32,
    /// How many of `dims` count.
    pub rank: u8,
    /// The others are zero.
    pub dims: [i64; RANK_MAX],
    /// Of its contents. Of an error in a packet, those of its text.
    pub bytes: u64,
    /// Its producer has nothing to send, and says so: there are no contents.
    pub is_dead: bool,
}

impl Meta {
    /// Errors: more dimensions than a tensor may have, or one below zero; a dead tensor with contents.
    pub fn new(data_type: u32, shape: &[i64], bytes: u64, is_dead: bool) -> std::result::Result<Meta, String> {
        if shape.len() > RANK_MAX {
            return Err(format!("{} dimensions; at most {RANK_MAX}", shape.len()));
        }
        if let Some(dim) = shape.iter().find(|dim| **dim < 0) {
            return Err(format!("a dimension of {dim}; expected 0 or more"));
        }
        if is_dead && bytes > 0 {
            return Err(format!("a dead tensor of {bytes} bytes; it has none"));
        }
        let mut dims = [0; RANK_MAX];
        dims.iter_mut().zip(shape).for_each(|(to, from)| *to = *from);
        Ok(Meta { data_type, rank: shape.len() as u8, dims, bytes, is_dead })
    }

    /// Its dimensions.
    pub fn shape(&self) -> &[i64] {
        self.dims.get(..usize::from(self.rank)).unwrap_or_default()
    }
}

/// The number of an error's kind in an [`Kind::ErrorStatus`].
pub fn code(error: &Error) -> u32 {
    match error {
        Error::Internal(_) => 0,
        Error::Usage(_) => 1,
        Error::System { .. } => 2,
        Error::Remote(_) => 3,
        Error::Timeout(_) => 4,
    }
}

/// The error of a peer's. That of its system is no error of this one.
pub fn error(code: u32, text: &str) -> Error {
    match code {
        0 => Error::internal(text),
        1 => Error::usage(text),
        4 => Error::timeout(text),
        _ => Error::remote(text),
    }
}

/// A packet. What a kind has not is zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Packet {
    /// What it says.
    pub kind: Kind,
    /// Of which tensor.
    pub id: TensorId,
    /// Bytes of the tensor's buffer, with this header.
    pub buffer_size: u64,
    /// The memory of the sender of this packet that it tells of.
    pub memory: RemoteMr,
    /// The tensor.
    pub meta: Meta,
    /// The number of a buffer of the sender of this packet, or of a request.
    pub index: u64,
    /// By which a [`NumberedRequest`] may name the same tensor in another step; 0: by none.
    pub number: u32,
}

/// The first byte of a request that is a control message.
const NUMBERED: u8 = b'N';

/// A request for a tensor that was asked for in an earlier step, and is expected to be what it was: a control message, `{u8 'N', u8 zero[3], u32
/// number, u64 step, u64 index, u64 addr, u32 rkeys[8]}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NumberedRequest {
    /// The request that gave it was the last with that number.
    pub number: u32,
    /// The step.
    pub step: u64,
    /// The slot of the sender of this in which the tensor is to be.
    pub index: u64,
    /// Its memory, of as many bytes as the tensor had.
    pub memory: RemoteMr,
}

const _: () = assert!(4 + 4 + 8 + 8 + 8 + 4 * MAX_RAILS == CONTROL_SIZE);

impl NumberedRequest {
    /// As it is sent.
    pub fn encode(&self) -> [u8; CONTROL_SIZE] {
        let NumberedRequest { number, step, index, memory: RemoteMr { addr, rkeys } } = self;
        let (mut bytes, at) = ([0; CONTROL_SIZE], &mut 0);
        let mut put = |part: &[u8]| put(&mut bytes, at, part);
        put(&[NUMBERED, 0, 0, 0]);
        put(&number.to_le_bytes());
        put(&step.to_le_bytes());
        put(&index.to_le_bytes());
        put(&addr.to_le_bytes());
        rkeys.iter().for_each(|rkey| put(&rkey.to_le_bytes()));
        bytes
    }

    /// None: it is another control message.
    pub fn decode(bytes: &[u8; CONTROL_SIZE]) -> Option<NumberedRequest> {
        let mut rest = bytes.as_slice();
        if *cut(&mut rest)? != [NUMBERED, 0, 0, 0] {
            return None;
        }
        let number = u32::from_le_bytes(*cut(&mut rest)?);
        let step = u64::from_le_bytes(*cut(&mut rest)?);
        let index = u64::from_le_bytes(*cut(&mut rest)?);
        let mut memory = RemoteMr { addr: u64::from_le_bytes(*cut(&mut rest)?), rkeys: [0; MAX_RAILS] };
        for rkey in &mut memory.rkeys {
            *rkey = u32::from_le_bytes(*cut(&mut rest)?);
        }
        Some(NumberedRequest { number, step, index, memory })
    }
}

/// Copied to that place, which is behind it then.
#[inline(always)]
fn put(bytes: &mut [u8], at: &mut usize, part: &[u8]) {
    if let Some(place) = bytes.get_mut(*at..*at + part.len()) {
        place.copy_from_slice(part);
    }
    *at += part.len();
}

/// Cut out of the front of what is left.
fn cut<'a, const N: usize>(rest: &mut &'a [u8]) -> Option<&'a [u8; N]> {
    let (part, left) = rest.split_first_chunk()?;
    *rest = left;
    Some(part)
}

impl Packet {
    /// One of nothing but these.
    pub fn new(kind: Kind, id: TensorId) -> Packet {
        Packet { kind, id, buffer_size: 0, memory: RemoteMr::default(), meta: Meta::default(), index: 0, number: 0 }
    }

    /// A name of more than [`NAME_MAX`] bytes is cut off.
    pub fn encode(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let (front, rest) = bytes.split_at_mut(FRONT);
        let name = self.id.name.as_bytes();
        let name = name.get(..NAME_MAX).unwrap_or(name);
        put(front, &mut 0, &[self.kind as u8]);
        put(front, &mut 1, &(name.len() as u16).to_le_bytes());
        put(front, &mut 3, name);
        let at = &mut 0;
        let mut put = |part: &[u8]| put(rest, at, part);
        put(&self.id.step.to_le_bytes());
        put(&self.buffer_size.to_le_bytes());
        put(&self.memory.addr.to_le_bytes());
        let mut rkeys = self.memory.rkeys.into_iter();
        put(&rkeys.next().unwrap_or(0).to_le_bytes());
        put(&[u8::from(self.meta.is_dead)]);
        put(&self.meta.data_type.to_le_bytes());
        put(&[self.meta.rank]);
        self.meta.dims.iter().for_each(|dim| put(&dim.to_le_bytes()));
        put(&self.meta.bytes.to_le_bytes());
        rkeys.for_each(|rkey| put(&rkey.to_le_bytes()));
        put(&self.index.to_le_bytes());
        put(&self.number.to_le_bytes());
        bytes
    }

    /// Errors: what is wrong, in words that follow "the peer sent".
    pub fn decode(bytes: &[u8; HEADER]) -> std::result::Result<Packet, String> {
        let Parts { kind, name_size, name, step, is_dead, memory, meta, buffer_size, index, number, rest } =
            Parts::of(bytes).ok_or("a packet that is cut off")?;
        let known = *Kind::ALL.get(usize::from(kind)).ok_or_else(|| format!("a packet of kind {kind}"))?;
        let name = name.split_at_checked(usize::from(name_size));
        let (name, behind) = name.ok_or_else(|| format!("a name of {name_size} bytes; at most {NAME_MAX}"))?;
        let name = std::str::from_utf8(name).map_err(|_| "a name that is no text")?;
        if is_dead > 1 {
            return Err(format!("is_dead {is_dead}; expected 0 or 1"));
        }
        if usize::from(meta.rank) > RANK_MAX {
            return Err(format!("{} dimensions; at most {RANK_MAX}", meta.rank));
        }
        let (shape, others) = meta.dims.split_at(usize::from(meta.rank));
        if shape.iter().any(|dim| *dim < 0) || others.iter().any(|dim| *dim != 0) {
            return Err("a dimension below zero, or behind the last".into());
        }
        if meta.is_dead && meta.bytes > 0 {
            return Err(format!("a dead tensor of {} bytes", meta.bytes));
        }
        if [behind, rest].iter().any(|zeros| ZEROS.get(..zeros.len()) != Some(zeros)) {
            return Err(format!("a packet of kind {kind}, with something in it that does not belong there"));
        }
        Ok(Packet { kind: known, id: TensorId::new(name, step), buffer_size, memory, meta, index, number })
    }
}

/// What the bytes of a packet say, before it is known whether they make sense.
struct Parts<'a> {
    kind: u8,
    name_size: u16,
    name: &'a [u8; NAME_MAX],
    step: u64,
    is_dead: u8,
    memory: RemoteMr,
    meta: Meta,
    buffer_size: u64,
    index: u64,
    number: u32,
    /// Behind it.
    rest: &'a [u8],
}

impl Parts<'_> {
    fn of(bytes: &[u8; HEADER]) -> Option<Parts<'_>> {
        let mut rest = bytes.as_slice();
        let [kind] = *cut(&mut rest)?;
        let name_size = u16::from_le_bytes(*cut(&mut rest)?);
        let name = cut(&mut rest)?;
        let step = u64::from_le_bytes(*cut(&mut rest)?);
        let buffer_size = u64::from_le_bytes(*cut(&mut rest)?);
        let addr = u64::from_le_bytes(*cut(&mut rest)?);
        let mut rkeys = [0; MAX_RAILS];
        let (first, more) = rkeys.split_first_mut()?;
        *first = u32::from_le_bytes(*cut(&mut rest)?);
        let [is_dead] = *cut(&mut rest)?;
        let data_type = u32::from_le_bytes(*cut(&mut rest)?);
        let [rank] = *cut(&mut rest)?;
        let mut dims = [0; RANK_MAX];
        for dim in &mut dims {
            *dim = i64::from_le_bytes(*cut(&mut rest)?);
        }
        let bytes = u64::from_le_bytes(*cut(&mut rest)?);
        for rkey in more {
            *rkey = u32::from_le_bytes(*cut(&mut rest)?);
        }
        let index = u64::from_le_bytes(*cut(&mut rest)?);
        let number = u32::from_le_bytes(*cut(&mut rest)?);
        let meta = Meta { data_type, rank, dims, bytes, is_dead: is_dead == 1 };
        let memory = RemoteMr { addr, rkeys };
        Some(Parts { kind, name_size, name, step, is_dead, memory, meta, buffer_size, index, number, rest })
    }
}

/// What stands at the documented places of a packet: type, name and step, and what of the rest is not 0.
#[cfg(test)]
pub fn golden(kind: u8, name: &[u8], step: u64, rest: &[(usize, &[u8])]) -> Vec<u8> {
    let mut bytes = vec![0; 768];
    let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
    put(0, &[kind]);
    put(1, &(name.len() as u16).to_le_bytes());
    put(3, name);
    put(515, &step.to_le_bytes());
    rest.iter().for_each(|(at, part)| put(*at, part));
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn packet() -> Packet {
        Packet {
            kind: Kind::BufferRequest,
            id: TensorId::new("a;b", 0x1122_3344_5566_7788),
            buffer_size: 4096,
            memory: RemoteMr { addr: 0x7fff_0000_1000, rkeys: [1, 2, 3, 4, 5, 6, 7, 8] },
            meta: Meta::new(1, &[2, 3], 24, false).unwrap(),
            index: 9,
            number: 10,
        }
    }

    /// Of every field, at the place that is documented.
    #[test]
    fn golden_bytes() {
        let bytes = packet().encode();
        let at = |range: std::ops::Range<usize>| bytes[range].to_vec();
        assert_eq!((at(0..1), at(1..3), at(3..7)), (vec![2], vec![3, 0], b"a;b\0".to_vec()));
        assert_eq!(at(515..523), 0x1122_3344_5566_7788u64.to_le_bytes());
        assert_eq!((at(523..531), at(531..539)), (4096u64.to_le_bytes().to_vec(), 0x7fff_0000_1000u64.to_le_bytes().to_vec()));
        assert_eq!((at(539..543), at(543..544), at(544..548), at(548..549)), (vec![1, 0, 0, 0], vec![0], vec![1, 0, 0, 0], vec![2]));
        assert_eq!((at(549..557), at(557..565)), (2u64.to_le_bytes().to_vec(), 3u64.to_le_bytes().to_vec()));
        assert_eq!((at(677..685), at(685..689), at(709..713)), (24u64.to_le_bytes().to_vec(), vec![2, 0, 0, 0], vec![8, 0, 0, 0]));
        assert_eq!((at(713..721), at(721..725), at(725..768)), (9u64.to_le_bytes().to_vec(), vec![10, 0, 0, 0], vec![0; 43]));
        for (number, kind) in Kind::ALL.into_iter().enumerate() {
            let packet = Packet { kind, ..packet() };
            assert_eq!((packet.encode()[0] as usize, Packet::decode(&packet.encode())), (number, Ok(packet)));
        }
    }

    #[test]
    fn golden_bytes_of_a_numbered_request() {
        let memory = RemoteMr { addr: 0x7fff_0000_1000, rkeys: [1, 2, 3, 4, 5, 6, 7, 8] };
        let request = NumberedRequest { number: 0x0102_0304, step: 0x1122_3344_5566_7788, index: 9, memory };
        let words = [0x0102_0304_0000_004e, 0x1122_3344_5566_7788, 9, 0x7fff_0000_1000, 2 << 32 | 1, 4 << 32 | 3, 6 << 32 | 5, 8 << 32 | 7];
        let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_le_bytes).collect();
        assert_eq!((request.encode().to_vec(), NumberedRequest::decode(&request.encode())), (bytes, Some(request)));
        for other in [[b'B'; CONTROL_SIZE], [0; CONTROL_SIZE], [b'N'; CONTROL_SIZE]] {
            assert_eq!(NumberedRequest::decode(&other), None);
        }
    }

    #[test]
    fn what_is_wrong_is_told() {
        let wrong = |change: fn(&mut [u8; HEADER])| {
            let mut bytes = packet().encode();
            change(&mut bytes);
            Packet::decode(&bytes).unwrap_err()
        };
        assert_eq!(wrong(|bytes| bytes[0] = 11), "a packet of kind 11");
        assert_eq!(wrong(|bytes| bytes[1..3].copy_from_slice(&513u16.to_le_bytes())), "a name of 513 bytes; at most 512");
        assert_eq!(wrong(|bytes| bytes[3] = 0xff), "a name that is no text");
        assert_eq!(wrong(|bytes| bytes[543] = 2), "is_dead 2; expected 0 or 1");
        assert_eq!(wrong(|bytes| bytes[548] = 17), "17 dimensions; at most 16");
        assert_eq!(wrong(|bytes| bytes[556] = 0x80), "a dimension below zero, or behind the last");
        assert_eq!(wrong(|bytes| bytes[565] = 1), "a dimension below zero, or behind the last");
        assert_eq!(wrong(|bytes| bytes[543] = 1), "a dead tensor of 24 bytes");
        assert!(wrong(|bytes| bytes[6] = 1).contains("does not belong there"));
        assert!(wrong(|bytes| bytes[767] = 1).contains("does not belong there"));
        assert!(Meta::new(0, &[1; 17], 0, false).unwrap_err().contains("17 dimensions"));
        assert!(Meta::new(0, &[-1], 0, false).unwrap_err().contains("-1"));
        assert!(Meta::new(0, &[1], 1, true).unwrap_err().contains("dead tensor of 1 bytes"));
    }

    proptest! {
        #[test]
        fn other_bytes_are_refused_or_mean_themselves(at in 0..HEADER, byte: u8, other in 0..HEADER, more: u8) {
            let mut bytes = packet().encode();
            (bytes[at], bytes[other]) = (byte, more);
            if let Ok(packet) = Packet::decode(&bytes) {
                prop_assert_eq!(packet.encode(), bytes);
            }
        }

        #[test]
        fn any_bytes_are_refused_or_mean_themselves(random in proptest::collection::vec(any::<u8>(), HEADER), zero in 0..HEADER) {
            let mut bytes: [u8; HEADER] = random.try_into().unwrap();
            // What comes last has to be zero, and the kind and the name's length small.
            bytes[zero..].fill(0);
            bytes[0] %= 16;
            bytes[2] %= 4;
            if let Ok(packet) = Packet::decode(&bytes) {
                prop_assert_eq!(packet.encode(), bytes);
            }
        }
    }
}
