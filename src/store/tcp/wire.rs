//! The wire format of torch's TCPStore: the requests and their fields, and encoding for the client; [`decode`] reads them for the server. No input
//! or output here.
//!
//! A request is a type byte and its fields, without padding: numbers are little-endian (torch: native), a key or value is its length as 64 bits and
//! its bytes, several are preceded by their number. Replies carry no type: they come in the order of the requests.
//!
//! Source: torch 2.15, torch/csrc/distributed/c10d/TCPStoreBackend.hpp and TCPStoreLibUvBackend.cpp, and bytes recorded from it.

mod decode;

pub use decode::{ClientRequest, Decoder, Limits, Strings, WireError};

/// Sent first on every connection, so that other protocols are noticed.
pub const MAGIC: u32 = 0x3C85_F7CE;

/// Reply to CHECK: all keys exist.
pub const READY: u8 = 0;
/// Reply to CHECK: some key does not.
pub const NOT_READY: u8 = 1;
/// Reply to WAIT and BARRIER: the wait is over.
pub const STOP_WAITING: u8 = 0;
/// Reply to CANCEL_WAIT.
pub const WAIT_CANCELED: u8 = 1;

/// Reply to WATCH_KEY: changes follow, each an [`Event`], the key, its old and its new value.
pub const WATCHING: u8 = 3;

/// What happened to a watched key. Source: WatchResponseType of torch before 2.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Event {
    Updated = 0,
    Created = 1,
    Deleted = 2,
}

impl Event {
    /// The event of a byte.
    pub fn from_byte(byte: u8) -> Option<Self> {
        [Event::Updated, Event::Created, Event::Deleted].into_iter().find(|event| *event as u8 == byte)
    }
}

macro_rules! queries {
    ($($name:ident = $value:literal, $shape:expr;)*) => {
        /// The type byte of a request.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[repr(u8)]
        #[allow(missing_docs)]
        pub enum RequestType { $($name = $value),* }

        impl RequestType {
            fn from_byte(byte: u8) -> Option<Self> {
                match byte {
                    $($value => Some(RequestType::$name),)*
                    _ => None,
                }
            }

            /// The fields that follow.
            fn shape(self) -> &'static [Field] {
                use Field::*;
                match self {
                    $(RequestType::$name => &$shape),*
                }
            }
        }
    };
}

queries! {
    Validate = 0, [Word];
    Set = 1, [Key, Value];
    CompareSet = 2, [Key, Value, Value];
    Get = 3, [Key];
    Add = 4, [Key, Int];
    Check = 5, [Keys];
    Wait = 6, [Keys];
    GetNumKeys = 7, [];
    DeleteKey = 8, [Key];
    Append = 9, [Key, Value];
    MultiGet = 10, [Keys];
    MultiSet = 11, [Pairs];
    CancelWait = 12, [];
    Ping = 13, [Word];
    QueuePush = 14, [Key, Value];
    QueuePop = 15, [Key];
    QueueLen = 16, [Key];
    ListKeys = 17, [];
    Barrier = 18, [Key, Int];
    // Railhead's own: torch does not use these numbers, and is unlikely to.
    Challenge = 128, [];
    Prove = 129, [Nonce, Code];
    WatchKey = 130, [Key];
}

/// A field of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Field {
    /// Four bytes.
    Word,
    /// Eight bytes.
    Int,
    /// [`NONCE`](super::secret::NONCE) bytes.
    Nonce,
    /// [`MAC_SIZE`](crate::base::mac::MAC_SIZE) bytes.
    Code,
    /// A length and bytes.
    Key,
    /// A length and bytes.
    Value,
    /// A number and that many keys.
    Keys,
    /// A number and that many keys, each with a value.
    Pairs,
}

/// A field of a request that a client makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part<'a> {
    /// A user's key. On the wire it has the prefix "/", which the store's own keys do not have.
    Key(&'a str),
    /// A key of the store's own.
    OwnKey(&'a str),
    /// A value.
    Value(&'a [u8]),
    /// A number of keys.
    Count(usize),
    /// 64 bits.
    Int(i64),
    /// 32 bits.
    Word(u32),
    /// Bytes of a length that both ends know.
    Bare(&'a [u8]),
}

/// Appends a request.
pub fn encode(out: &mut Vec<u8>, query: RequestType, parts: &[Part<'_>]) {
    out.push(query as u8);
    for part in parts {
        match *part {
            Part::Key(key) => {
                out.extend_from_slice(&(key.len() as u64 + 1).to_le_bytes());
                out.push(b'/');
                out.extend_from_slice(key.as_bytes());
            }
            Part::OwnKey(key) => encode_bytes(out, key.as_bytes()),
            Part::Value(value) => encode_bytes(out, value),
            Part::Count(count) => out.extend_from_slice(&(count as u64).to_le_bytes()),
            Part::Int(number) => out.extend_from_slice(&number.to_le_bytes()),
            Part::Bare(bytes) => out.extend_from_slice(bytes),
            Part::Word(word) => out.extend_from_slice(&word.to_le_bytes()),
        }
    }
}

/// Appends a byte string, as in a request or a reply.
pub fn encode_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

#[cfg(test)]
mod tests;
